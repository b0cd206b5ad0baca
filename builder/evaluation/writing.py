"""Lets a decoder's tenant write behind prompts: here, with the engine of a server, or on a running server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch

from builder.console import progress_bar
from builder.evaluation.evaluation import Answers, Evaluation
from builder.publish.export import write_version
from builder.store.store import Store, TenantVersion
from builder.tasks.examples import Example
from builder.tasks.lookup import Texts
from builder.tasks.tasks import training_task
from hplm.engine.backbone import Backbone
from hplm.errors import HplmError, InvalidInput
from hplm.generation.prompt_form import PromptForm
from hplm.generation.request import AnswerPart
from hplm.generation.sampling import Sampling
from hplm.generation.service import DecoderService
from hplm.generation.settings import DecoderSettings
from hplm.model.cpu import apart
from hplm.model.prompts import Prompts
from hplm.process.driver import Driver

IN_FLIGHT = 256  # prompts


def longest_target(prompts: Prompts, examples: Sequence[Example]) -> int:
    """Returns how many tokens the longest target has, with the one that ends it."""
    return max(len(prompts.encode(example.target)) for example in examples)  # the start id stands for the end


def evaluate_writing(store: Store, tenant: TenantVersion, texts: Texts, device: torch.device) -> Evaluation:
    """Evaluates what a tenant writes behind the prompts of texts."""
    examples = texts.examples
    most = longest_target(Prompts.load(store.folder / "tokenizer.json", store.config), examples)
    answers = write_here(store, tenant, examples, most, device)
    return Evaluation(tenant, texts, answers, training_task(tenant.task).score([], examples, answers))


def write_here(store: Store, tenant: TenantVersion, examples: Sequence[Example], most: int, device: torch.device) -> Answers:
    """Returns the likeliest texts, of so many tokens at most, as the engine of a server writes them in 32 bits."""
    (home := store.folder / "building").mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="writing-", dir=home) as folder:  # there its files are links
        version = Path(folder, store.config.name, "1")
        write_version(store, [tenant], version)
        backbone = Backbone(version, device=device)
        prompts = Prompts.load(version / Backbone.TOKENIZER, backbone.config)
        service = apart(lambda: DecoderService(backbone, prompts, DecoderSettings(device)))
        driver = Driver(service.reader)
        service.reader.wake = driver.wake
        try:
            return [[text] for text in _written_by(service, backbone, tenant.id, examples, most)]
        finally:
            driver.close()
            service.close()  # its reader wakes the driver at its end
            driver.join()


def _written_by(
    service: DecoderService, backbone: Backbone, tenant_id: str, examples: Sequence[Example], most: int
) -> list[str]:
    view, said, texts = backbone.view, SimpleQueue[tuple[int, AnswerPart | HplmError]](), [""] * len(examples)
    tenant, sampling = view.snapshot.find(tenant_id), Sampling(temperature=0, max_tokens=most)

    def submit(number: int) -> None:
        example = examples[number]
        given = (None, example.text) if example.is_chat else (example.text, None)
        form = PromptForm(*given, None, {"truncate": True})
        service.submit(view, tenant, form, sampling, lambda part: said.put((number, part)))
        service.reader.wake()

    waiting = iter(range(len(examples)))
    for number in islice(waiting, IN_FLIGHT):
        submit(number)
    for _ in progress_bar(examples, "writing", unit="text"):
        is_last = False
        while not is_last:
            number, part = said.get()
            if isinstance(part, HplmError):
                raise InvalidInput(f"{examples[number].where}: {part}")
            texts[number] += part.text
            is_last = part.is_last
        for number in islice(waiting, 1):
            submit(number)
    return texts


def write_served(client: Any, tenant: TenantVersion, examples: Sequence[Example], most: int) -> Answers:
    """Returns what a server writes. `client`: an `hplm_client.HplmClient`."""
    ask = partial(client.generate, tenant=tenant.id, truncate=True, temperature=0, max_tokens=most)
    return [
        [(ask(messages=json.loads(example.text)) if example.is_chat else ask(example.text)).text]
        for example in progress_bar(examples, "asking", unit="text")
    ]

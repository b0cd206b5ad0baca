"""HMI's Table 4 for one tenant of a decoder: other schemes write behind the same prompts, trained with the same budget.

`compressed` has as many layers as the tenant's upper ones, evenly chosen: it takes the time of an hPLM. It reads no text but
the tenant's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from builder.console import progress_bar
from builder.evaluation.evaluation import Answers, Evaluation
from builder.evaluation.writing import longest_target
from builder.learning.bodies import WholeBody
from builder.store.store import Store
from builder.tasks.columns import AS_TRAINED
from builder.training.data import read_data
from builder.training.finetuning import TrainingOptions, finetune
from builder.training.generating import PromptReader, WrittenData
from builder.training.model import TenantModel, tiles
from hplm.arrays import ranges
from hplm.errors import InvalidInput
from hplm.generation.attention import Chunks, attention_over
from hplm.generation.cache import BLOCK, Cache, table_of
from hplm.model.layer import unchanged
from hplm.model.stacks import through, turn_of
from research.schemes.export import evenly
from research.schemes.trained import own_options, training_files

# `dedicated`: all layers are tuned; the next two: those below or above the split (HMI's Figure 16).
SCHEMES = ("dedicated", "dedicated-lower", "dedicated-upper", "adapter", "shared", "compressed")
RATE = 2e-5  # of all weights
AT_ONCE = 32  # prompts


def score_decoders(
    store: Store, evaluation: Evaluation, runs: Sequence[tuple[str, int]], device: torch.device,
    train_file: Path | None = None, dev_file: Path | None = None,
) -> Iterator[Answers]:  # fmt: skip
    """Yields what each scheme writes. `runs`: schemes and seeds. Pass the files if they were moved."""
    if others := {name for name, _ in runs} - {*SCHEMES}:
        raise InvalidInput(f"--against {min(others)} is for encoders: choose from {', '.join(SCHEMES)}")
    tenant, report = evaluation.tenant, store.report(evaluation.tenant)
    train, dev = training_files(tenant, report, train_file, dev_file)
    options = own_options(report)
    reader = PromptReader(store, tenant.domain, tenant.domain_version)
    data = read_data(reader, tenant.task, train, dev, device, columns=AS_TRAINED.after(report))
    examples = evaluation.texts.examples
    most = longest_target(reader.prompts, examples)
    room = store.config.positions - most
    prompts = [np.concatenate([own[:1], own[1:][max(0, len(own) - room) :]]) for own in map(reader.prompt_of, examples)]
    for name, seed in runs:
        body = WholeBody.of(store)
        if name == "compressed":
            body = body.with_layers(evenly(len(body.layers), store.config.upper_layers))
        model = TenantModel(None, None, seed)
        if name != "shared":
            own = replace(options, seed=seed)
            if name != "adapter":
                own = replace(own, adapter=TrainingOptions.adapter, rank=0, places=None, body_rate=RATE)
                own = replace(own, body_part=name.partition("-")[2] or "all")
            model = finetune(body, WrittenData.of(data, body.next_token.weight), own).model
        body.to(device).eval()
        parts = [prompts[first : first + AT_ONCE] for first in range(0, len(prompts), AT_ONCE)]
        texts = [text for part in progress_bar(parts, "writing") for text in written(body, model, part, most)]
        yield [[reader.prompts.decode(text)] for text in texts]


@torch.no_grad()
def written(body: WholeBody, model: TenantModel, prompts: Sequence[np.ndarray], most: int) -> list[list[int]]:
    """Returns the likeliest tokens behind each prompt, at most so many, without the one that ends a text."""
    config, matrix = body.config, body.next_token.weight
    layers, below = 1 + max(layer.number for layer in body.layers), [unchanged] * (len(body.layers) - len(body.upper_layers))
    rooms = [len(prompt) + most for prompt in prompts]
    cache = Cache(sum(room + BLOCK for room in rooms), max(rooms), layers, config.key_width, matrix.device, block=BLOCK)
    blocks = [cache.take(room) or () for room in rooms]
    found: list[list[int]] = [[] for _ in prompts]
    new, before, going = list(prompts), np.zeros(len(prompts), dtype=np.int64), list(range(len(prompts)))
    while going:
        counts = np.array([len(own) for own in new], dtype=np.int64)
        attend = attention_over(config, cache, Chunks(table_of([blocks[i] for i in going]), before, counts))
        tokens, places = (torch.from_numpy(own).to(matrix.device) for own in (np.concatenate(new), ranges(before, counts)))
        rows = torch.from_numpy(np.cumsum(counts) - 1).to(matrix.device)
        adapters = [*below, *(model.adapts(tiles(tokens), tiles(rows)) or [unchanged] * len(body.upper_layers))]
        x = body.embedded(tokens, places, torch.zeros_like(places))
        read = body.leave(through(body.layers, x, attend, adapters, rows, turn_of(config, places, x.dtype)))
        chosen = (read @ matrix.T).argmax(1).tolist()
        for i, token in zip(going, chosen, strict=True):
            found[i].append(token)
        goes_on = [token not in config.end_ids and len(found[i]) < most for i, token in zip(going, chosen, strict=True)]
        new = [np.array([token]) for token, goes in zip(chosen, goes_on, strict=True) if goes]
        before, going = (before + counts)[goes_on], [i for i, goes in zip(going, goes_on, strict=True) if goes]
    return [own[:-1] if own[-1] in config.end_ids else own for own in found]

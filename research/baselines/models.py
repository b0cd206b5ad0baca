"""Many whole models behind one Triton model. Memory holds some of them, and a new one replaces the least recently used one.

whole.json      the scheme and its tenants
backbone.json   sizes; `upper_layers` are the layers that every tenant has for itself
tokenizer.json
bodies/  heads/     a file for each tenant: of `research.baselines.body`, and safetensors
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from hplm.errors import Broken, DeadlineMissed, Draining, HplmError, Internal, InvalidInput, NoTenant, QueueFull
from hplm.model.config import BackboneConfig
from hplm.model.malloc import keep_freed_memory
from hplm.model.tokenizer import Encoded, Tokenizer
from hplm.tasks import TextAnswer, find_task
from research.baselines.body import Slot


@dataclass(frozen=True)
class WholeTenant:
    id: str
    version: int
    task: str
    labels: tuple[str, ...]
    head_function: str | None
    weights: str  # the name of its files


@dataclass(frozen=True)
class WholeConfig:
    FILE = "whole.json"

    scheme: str
    note: str  # tells a reader of the file where the weights come from
    tenants: tuple[WholeTenant, ...]

    def save(self, folder: Path) -> None:
        (folder / self.FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def load(cls, folder: Path) -> WholeConfig:
        return msgspec.json.decode((folder / cls.FILE).read_bytes(), type=cls)


@dataclass(frozen=True, eq=False)
class Question:
    tenant: WholeTenant
    encoded: list[Encoded]
    spans: list[np.ndarray]
    passages: Sequence[str]
    top_k: int
    arrival: float  # on the monotonic clock
    allowed_s: float  # 0: no deadline

    @property
    def too_late(self) -> DeadlineMissed | None:
        if not self.allowed_s or time.monotonic() <= self.arrival + self.allowed_s:
            return None
        return DeadlineMissed(
            f"not started within the {self.allowed_s * 1e3:g} ms that the request allowed: send a longer timeout"
        )


Answered = tuple[Question, "list[TextAnswer] | HplmError"]


class WholeModels:
    def __init__(self, folder: Path, resident: int, batch_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cpu":
            keep_freed_memory()
        self.config = BackboneConfig.load(folder / "backbone.json")
        tenants = WholeConfig.load(folder).tenants
        self._folder = folder
        self._batch_tokens = batch_tokens
        self._device = device
        self._tenants = {tenant.id: tenant for tenant in tenants}
        self._tokenizer = Tokenizer((folder / "tokenizer.json").read_text("utf-8"), self.config.positions)
        count = min(resident, len(self._tenants))
        self._free = [Slot(self.config, device, dtype) for _ in range(count)]
        self._held: OrderedDict[str, Slot] = OrderedDict()  # by tenant, the least recently used first
        if count == len(self._tenants):  # all models fit: they are loaded now, so that no first request has to wait
            for tenant in tenants:
                self._slot(tenant)

    def question(
        self, parameters: Mapping[str, Any], texts: Sequence[str], pairs: Sequence[str] | None, allowed_s: float = 0.0
    ) -> Question:
        arrival = time.monotonic()
        alone = next(iter(self._tenants)) if len(self._tenants) == 1 else None
        tenant = self._tenants.get(parameters.get("tenant", alone))
        if tenant is None:
            raise NoTenant
        if pairs is not None and len(pairs) != len(texts):
            raise InvalidInput(f"TEXT has {len(texts)} texts and TEXT_PAIR {len(pairs)}: send one pair for each")
        seconds = pairs if pairs is not None else [None] * len(texts)
        truncate = bool(parameters.get("truncate", False))
        encoded = [self._tokenizer.encode(text, pair, truncate) for text, pair in zip(texts, seconds, strict=True)]
        task = find_task(tenant.task)
        spans = [task.rows(text, pair, one) for text, pair, one in zip(texts, seconds, encoded, strict=True)]
        top_k = min(int(parameters.get("top_k", 0)), len(tenant.labels))
        passages = pairs if pairs is not None else [""] * len(texts)
        return Question(tenant, encoded, spans, passages, top_k, arrival, allowed_s)

    def answer(self, questions: Sequence[Question]) -> Iterator[Answered]:
        """Yields each question once, with its answer. Questions whose model is in memory go first, before others evict it."""
        by_tenant: dict[str, list[Question]] = {}
        for question in questions:
            by_tenant.setdefault(question.tenant.id, []).append(question)
        for mine in sorted(by_tenant.values(), key=lambda mine: mine[0].tenant.id not in self._held):
            yield from self._answer_tenant(mine)

    def _answer_tenant(self, questions: list[Question]) -> Iterator[Answered]:
        left = list(questions)
        try:
            late = [(question, error) for question in questions if (error := question.too_late) is not None]
            for question, error in late:
                left.remove(question)
                yield question, error
            if not left:
                return
            slot = self._slot(questions[0].tenant)
            for batch in self._batches(list(left)):
                for question, rows in zip(batch, self._run(slot, batch), strict=True):
                    left.remove(question)
                    yield question, rows
        except HplmError as error:
            yield from ((question, error) for question in left)
        except (OSError, RuntimeError, ValueError) as error:
            broken = Broken(f"tenant {questions[0].tenant.id!r}: {error}")
            yield from ((question, broken) for question in left)

    def _batches(self, questions: list[Question]) -> Iterator[list[Question]]:
        """Yields batches of whole requests with at most `batch_tokens`. A larger request is a batch of its own."""
        batch, tokens = [], 0
        for question in questions:
            own = sum(len(text.tokens) for text in question.encoded)
            if batch and tokens + own > self._batch_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(question)
            tokens += own
        yield batch

    @torch.inference_mode()
    def _run(self, slot: Slot, batch: list[Question]) -> list[list[TextAnswer]]:
        texts = [(question, number) for question in batch for number in range(len(question.encoded))]
        texts.sort(key=lambda text: -len(text[0].encoded[text[1]].tokens))  # attention runs over texts of equal length
        encoded = [question.encoded[number] for question, number in texts]
        lengths = [len(text.tokens) for text in encoded]
        tenant = batch[0].tenant
        task = find_task(tenant.task)
        tokens, segments = (
            self._sent(np.concatenate([getattr(text, column) for text in encoded])) for column in ("tokens", "segments")
        )
        starts = np.cumsum(lengths) - lengths
        spans = [question.spans[number] for question, number in texts]
        reading = np.concatenate([np.maximum(rows[:, 0], 0) + start for rows, start in zip(spans, starts, strict=True)])
        hidden = slot.body(tokens, segments, lengths, self._sent(reading))
        logits = slot.logits(hidden, tenant.head_function).float().cpu().split([len(rows) for rows in spans])
        answers: dict[Question, dict[int, TextAnswer]] = {question: {} for question in batch}
        for (question, number), rows, own in zip(texts, spans, logits, strict=True):
            answers[question][number] = task.answer(own.numpy(), rows, tenant.labels, question.top_k, question.passages[number])
        return [[by_number[number] for number in range(len(by_number))] for by_number in answers.values()]

    def _sent(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)

    def _slot(self, tenant: WholeTenant) -> Slot:
        slot = self._held.pop(tenant.id, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1]
            try:
                slot.fill(*files_of(self._folder, tenant.weights))
            except BaseException:
                self._free.append(slot)
                raise
        self._held[tenant.id] = slot
        return slot


def files_of(folder: Path, weights: str) -> tuple[Path, Path]:
    """Returns the files of a body and its head."""
    return folder / "bodies" / weights, folder / "heads" / f"{weights}.safetensors"


Respond = Callable[["list[TextAnswer] | HplmError"], None]


class Worker:
    """A thread that answers waiting requests in rounds. A round takes all requests that came during the last round.

    The model has its own queue, as hPLMs have. While clients wait for answers, Triton's batcher sometimes sleeps for up to half
    a second, which would make the baseline look worse than it is.
    """

    def __init__(self, models: WholeModels, most: int) -> None:
        self._models = models
        self._most = most
        self._waiting: dict[Question, Respond] = {}
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="answer", daemon=True)
        self._thread.start()

    def submit(self, question: Question, respond: Respond) -> None:
        """Takes the question, which is then answered once, or raises."""
        with self._change:
            if self._closed:
                raise Draining("the model is being unloaded: send the request again")
            if len(self._waiting) >= self._most:
                raise QueueFull(f"{self._most} requests are waiting: retry after 1 s")
            self._waiting[question] = respond
            self._change.notify()

    def close(self) -> None:
        """Refuses new questions, and waits until those it has taken are answered."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waiting:
                    if self._closed:
                        return
                    self._change.wait()
                waiting, self._waiting = self._waiting, {}
            try:
                for question, result in self._models.answer(list(waiting)):
                    waiting.pop(question)(result)
            except Exception as error:  # every waiting request must get an answer
                for respond in waiting.values():
                    respond(Internal(f"the batch failed: {error}"))

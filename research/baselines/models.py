"""Many whole models behind one Triton model. Memory holds some of them, and a new one replaces the least recently used one.

whole.json      the tenants
backbone.json   sizes; `upper_layers` are the layers that every tenant has for itself
tokenizer.json
bodies/  heads/     a file for each tenant: of `research.baselines.body`, and safetensors
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from hplm.errors import Broken, DeadlineMissed, Draining, HplmError, Internal, InvalidInput, NoTenant, QueueFull
from hplm.model.config import BackboneConfig
from hplm.model.cpu import keep_freed_memory
from hplm.model.tokenizer import Encoded, Tokenizer
from hplm.tasks.answers import TextAnswer
from hplm.tasks.tasks import find_task
from research.baselines.body import STORED, Slot


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

    tenants: tuple[WholeTenant, ...]

    def save(self, folder: Path) -> None:
        (folder / self.FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def load(cls, folder: Path) -> WholeConfig:
        return msgspec.json.decode((folder / cls.FILE).read_bytes(), type=cls)


def files_of(folder: Path, weights: str) -> tuple[Path, Path]:
    """Returns the files of a body and its head."""
    return folder / "bodies" / weights, folder / "heads" / f"{weights}.safetensors"


@dataclass(frozen=True, eq=False)
class WholeRequest:
    tenant: WholeTenant
    encoded: list[Encoded]
    spans: list[np.ndarray]
    passages: Sequence[str]
    top_k: int
    arrival: float  # on the monotonic clock
    allowed_s: float  # 0: no deadline

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.encoded)


Answer = list[TextAnswer] | HplmError


class WholeModels:
    def __init__(self, folder: Path, resident: int, batch_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cpu":
            keep_freed_memory()
        self.config = BackboneConfig.load(folder / "backbone.json")
        self._folder, self._batch_tokens, self._device = folder, batch_tokens, device
        self._tenants = {tenant.id: tenant for tenant in WholeConfig.load(folder).tenants}
        self._tokenizer = Tokenizer((folder / "tokenizer.json").read_text("utf-8"), self.config.positions)
        count = min(resident, len(self._tenants))
        self._free = [Slot(self.config, device, dtype) for _ in range(count)]
        self._held: OrderedDict[str, Slot] = OrderedDict()  # by tenant, the least recently used first
        self._place: Tensor | None = None  # one for all slots: models are read by one thread
        if device.type != "cpu" or dtype != STORED:
            self._place = torch.empty(len(self._free[0].body.flat), dtype=STORED, pin_memory=device.type == "cuda")
        if count == len(self._tenants):  # all models fit: they are loaded now, so that no first request has to wait
            for tenant in self._tenants.values():
                self._slot(tenant)

    def question(
        self, parameters: Mapping[str, Any], texts: Sequence[str], pairs: Sequence[str] | None, allowed_s: float = 0.0
    ) -> WholeRequest:
        arrival = time.monotonic()
        tenant = self._tenants.get(parameters.get("tenant", ""))
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
        return WholeRequest(tenant, encoded, spans, [pair or "" for pair in seconds], top_k, arrival, allowed_s)

    def answer(self, questions: Sequence[WholeRequest]) -> Iterator[tuple[WholeRequest, Answer]]:
        """Yields each question once, with its answer. Questions whose model is in memory go first, before others evict it."""
        by_tenant: dict[str, list[WholeRequest]] = {}
        for question in questions:
            by_tenant.setdefault(question.tenant.id, []).append(question)
        for mine in sorted(by_tenant.values(), key=lambda mine: mine[0].tenant.id not in self._held):
            for batch in self._batches(mine):
                now = time.monotonic()
                late = {question for question in batch if question.allowed_s and now > question.arrival + question.allowed_s}
                for question in late:
                    what = f"not started within the {question.allowed_s * 1e3:g} ms that the request allowed"
                    yield question, DeadlineMissed(f"{what}: send a longer timeout")
                if rest := [question for question in batch if question not in late]:
                    yield from zip(rest, self._answered(rest), strict=True)

    def _answered(self, batch: list[WholeRequest]) -> Sequence[Answer]:
        tenant = batch[0].tenant
        try:
            return self._run(self._slot(tenant), batch)
        except HplmError as error:
            return [error] * len(batch)
        except (OSError, RuntimeError, ValueError) as error:
            return [Broken(f"tenant {tenant.id!r}: {error}: export the scheme again")] * len(batch)

    def _batches(self, questions: list[WholeRequest]) -> Iterator[list[WholeRequest]]:
        """Yields batches of whole requests with at most `batch_tokens`. A larger request is a batch of its own."""
        batch, tokens = list[WholeRequest](), 0
        for question in questions:
            if batch and tokens + question.tokens > self._batch_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(question)
            tokens += question.tokens
        yield batch

    @torch.inference_mode()
    def _run(self, slot: Slot, batch: list[WholeRequest]) -> list[list[TextAnswer]]:
        texts = [(question, number) for question in batch for number in range(len(question.encoded))]
        texts.sort(key=lambda text: -len(text[0].encoded[text[1]].tokens))  # attention runs over texts of equal length
        encoded, spans = [one.encoded[number] for one, number in texts], [one.spans[number] for one, number in texts]
        lengths, tenant = [len(text.tokens) for text in encoded], batch[0].tenant
        tokens = self._sent(np.concatenate([text.tokens for text in encoded]))
        segments = self._sent(np.concatenate([text.segments for text in encoded]))
        starts = np.cumsum(lengths) - lengths
        reading = np.concatenate([np.maximum(rows[:, 0], 0) + start for rows, start in zip(spans, starts, strict=True)])
        hidden = slot.body(tokens, segments, lengths, self._sent(reading))
        logits = slot.logits(hidden, tenant.head_function).float().cpu().split([len(rows) for rows in spans])
        task, answers = find_task(tenant.task), dict[tuple[WholeRequest, int], TextAnswer]()
        for (question, number), rows, own in zip(texts, spans, logits, strict=True):
            passage = question.passages[number]
            answers[question, number] = task.answer(own.numpy(), rows, tenant.labels, question.top_k, passage)
        return [[answers[question, number] for number in range(len(question.encoded))] for question in batch]

    def _sent(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)

    def _slot(self, tenant: WholeTenant) -> Slot:
        slot = self._held.pop(tenant.id, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1]
            try:
                slot.fill(*files_of(self._folder, tenant.weights), self._place)
            except BaseException:
                self._free.append(slot)
                raise
        self._held[tenant.id] = slot
        return slot


class Worker:
    """A thread that answers waiting requests in rounds. A round takes all requests that came during the last round.

    The model has its own queue, as hPLMs have. While clients wait for answers, Triton's batcher sometimes sleeps for up to half
    a second, which would make the baseline look worse than it is.
    """

    def __init__(self, models: WholeModels, most: int) -> None:
        self._models, self._most = models, most
        self._waiting: dict[WholeRequest, Callable[[Answer], None]] = {}
        self._lock, self._thread = threading.Lock(), ThreadPoolExecutor(1, "answer")

    def submit(self, question: WholeRequest, respond: Callable[[Answer], None]) -> None:
        """Takes the question, which is then answered once, or raises."""
        with self._lock:
            if len(self._waiting) >= self._most:
                raise QueueFull(f"{self._most} requests are waiting: retry after 1 s")
            try:
                self._thread.submit(self._round)
            except RuntimeError:
                raise Draining("the model is being unloaded: send the request again") from None
            self._waiting[question] = respond

    def close(self) -> None:
        """Refuses new questions, and waits until those it has taken are answered."""
        self._thread.shutdown()

    def _round(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        try:
            for question, result in self._models.answer(list(waiting)):
                waiting.pop(question)(result)
        except Exception as error:  # every waiting request must get an answer
            for respond in waiting.values():
                respond(Internal(f"the batch failed: {error}"))

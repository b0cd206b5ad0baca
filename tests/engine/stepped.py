"""Parts of the upper half that go on when a test says so, and fail where its world says so."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hplm.errors import Broken

if TYPE_CHECKING:
    from tests.engine.world import World

FAULTS = {  # where they come, and what is raised there
    "memory": ("run", torch.OutOfMemoryError("CUDA out of memory")),
    "memory between stages": ("enter", torch.OutOfMemoryError("CUDA out of memory")),
    "kernel": ("run", RuntimeError("a kernel failed")),
    "kernel between stages": ("enter", RuntimeError("a kernel failed")),
    "device between stages": ("enter", RuntimeError("CUDA error: unspecified launch failure")),
    "device": ("run", RuntimeError("CUDA error: unspecified launch failure")),
    "disk": ("stage", OSError("the disk is gone")),
    "row": ("stage", None),  # a text's own stored data are broken
    "memory ahead": ("stage", torch.OutOfMemoryError("CUDA out of memory")),
    "no numbers": ("run", None),  # the logits are not finite
    "no memory for answers": ("run", None),
    "start is not counted": ("started", ZeroDivisionError("a bug")),
    "batch is not counted": ("computed", ZeroDivisionError("a bug")),
    "choice": ("choice", ZeroDivisionError("a bug")),
    "line": ("line", ZeroDivisionError("a bug")),
    "reader": ("respond", ConnectionError("the reader is gone")),
}
SILENT = {"start is not counted", "batch is not counted", "reader", "choice"}  # no answer says anything of these


class Unreadable:
    """Logits for which there is no memory when they are read."""

    def _fail(self, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    __getitem__ = __array__ = __getattr__ = _fail


class Line:
    """A scheduler that counts what waits, remembers the requests, and fails where the world says so."""

    def __init__(self, scheduler, world: World) -> None:
        self._own, self._world = scheduler, world

    def __getattr__(self, name):
        return getattr(self._own, name)

    def __len__(self):
        return len(self._own)

    def offer(self, texts, now):
        self._world.requests.append(weakref.ref(texts[0].request))
        displaced = self._own.offer(texts, now)
        assert self._own.shares.items <= self._world.limit
        return displaced

    def choose(self, capacity, now):
        self._world.passes("choice")
        batch = self._own.choose(capacity, now)
        if batch is not None:
            assert len(batch.texts) == 1 or sum(text.tokens for text in batch.texts) <= capacity.tokens
        return batch

    def started(self, batch, now):
        self._own.started(batch, now)
        self._world.passes("line", batch.texts)

    def finished(self, batch, *learned):
        self._own.finished(batch, *learned)
        self._world.passes("line", batch.texts)


class Failing:
    """A part of the engine that fails where the world says so."""

    def __init__(self, whole, world: World) -> None:
        self._whole, self._world = whole, world

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def stage(self, texts, broken, places=None):
        if self._world.passes("stage", texts) == "row":
            broken(texts[0], Broken("the row is broken"))
            texts, places = texts[1:], places and places.of([*range(1, len(texts))])
        staged = self._whole.stage(texts, broken, places) if texts else None
        self._world.has_places |= places is not None
        return staged

    def run(self, staged, stage):
        self._world.computes(staged)
        self._world.has_overlapped |= staged.under_way is not None
        is_last = self._whole.overlaps or stage == len(self._whole.stages) - 1
        fault = self._world.passes("run" if is_last else "enter", staged.texts)
        for computed in self._whole.run(staged, stage):
            if fault is not None:
                harmed = [own * np.nan if fault == "no numbers" else Unreadable() for own in computed.logits]
                computed = replace(computed, logits=harmed)
            yield computed

    def __len__(self):
        return len(self._whole)

    def take(self, *given):
        self._whole.take(*given)
        self._world.taken += 1

    def give_back(self, tenant):
        self._world.taken -= 1
        self._whole.give_back(tenant)

    def note_start(self, *given):
        self._world.passes("started")
        self._whole.note_start(*given)

    def computed(self, *given):
        self._world.passes("computed")
        self._whole.computed(*given)

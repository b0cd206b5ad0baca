"""The way from host memory to slots: on CUDA a stream beside the one that computes; on the CPU in place, done at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Mark(Protocol):
    """A moment in the order of copies."""

    def wait(self) -> None:
        """What the calling thread gives the device to compute from here on starts after it."""

    def synchronize(self) -> None:
        """The calling thread itself goes on after it."""


class Copies:
    """Marks are in the order of copies: who waits for one waits for everything copied before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # on which the slots are being cleared

    def under_way(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return _Past() if self._stream is None else _Ahead(self._stream.record_event(), self._device)


class _Past:
    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Ahead:
    def __init__(self, event: torch.cuda.Event | torch.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

"""Copies from host memory to slots: on CUDA in a stream beside the computing one, on the CPU at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Mark:
    """A point in the order of copies. Without an event, all copies before it are done."""

    def __init__(self, event: torch.cuda.Event | torch.Event | None = None, device: torch.device | None = None) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Makes the device wait for the mark before it runs the calling thread's next work."""
        event = self._event
        if event is not None and event.query():
            self._event = None  # most batches use weights that have long arrived: nothing asks again
        elif event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """Blocks the calling thread until the mark is reached."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


AT_ONCE, REACHED = nullcontext(), Mark()


class Copies:
    """Starts copies and marks points between them. Waiting for a mark is waiting for all copies before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # it may still clear the slots

    def under_way(self) -> AbstractContextManager[object]:
        return AT_ONCE if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return REACHED if self._stream is None else Mark(self._stream.record_event(), self._device)

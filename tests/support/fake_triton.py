"""Modules of Triton's side, imported with a stand-in for what Triton gives them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

UTILITIES = "triton_python_backend_utils"


@contextmanager
def with_fake_triton(stand_in: Any, *names: str) -> Iterator[list[ModuleType]]:
    """Yields the modules, imported anew, and forgets them afterwards: those that other tests import have other stand-ins."""
    _forget((UTILITIES, *names))
    sys.modules[UTILITIES] = stand_in
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        _forget((UTILITIES, *names))


def _forget(names: tuple[str, ...]) -> None:
    for name in names:
        sys.modules.pop(name, None)
        room, _, own = name.rpartition(".")
        if room in sys.modules:
            vars(sys.modules[room]).pop(own, None)  # `from room import own` looks there first

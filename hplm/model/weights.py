"""Files of weights: safetensors with a checksum in their header."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hplm.errors import Broken
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.tensors import array_of

CHECKSUM = "crc32"  # of names and tensors, in order of the names
BUILD_AGAIN = "build or copy it again"
S = TypeVar("S", LowerStack, UpperStack)


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Saves weights in a file that other users can read, because a server often runs as another user.

    The library's own function makes files that only the owner can read.
    """
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.write_bytes(save(stored, {CHECKSUM: checksum_of(stored)}))


def load_weights(path: Path, way_out: str = BUILD_AGAIN) -> dict[str, Tensor]:
    """Loads weights and compares them with their checksum."""
    try:
        file: Any = safe_open(path, "pt")  # the library has no types
        with file as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            metadata: dict[str, str] = stored.metadata() or {}
    except FileNotFoundError:
        raise Broken(f"{path} is missing: {way_out}") from None
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise Broken(f"cannot read {path} ({error}): {way_out}") from None
    if metadata.get(CHECKSUM) != checksum_of(tensors):
        raise Broken(f"{path} does not match its checksum: {way_out}")
    return tensors


def stored(stack: LowerStack | UpperStack) -> dict[str, Tensor]:
    """Returns the weights of a stack as they are stored: a decoder's matrices in 16 bits, if these hold their numbers."""
    weights = stack.state_dict()
    narrow = {name: own.half() for name, own in weights.items() if own.ndim > 1} if stack.config.is_decoder else {}
    return weights | {name: own for name, own in narrow.items() if own.isfinite().all()}


def load_stack(
    kind: Callable[[BackboneConfig], S], config: BackboneConfig, path: Path, way_out: str = BUILD_AGAIN,
    dtype: torch.dtype = torch.float32,
) -> S:  # fmt: skip
    """Loads a stack in some precision. There is never a second copy of its weights in memory but the file's."""
    with without_weights():
        stack = kind(config)
    weights = load_weights(path, way_out)
    stack.load_state_dict({name: weights.pop(name).to(dtype, copy=True) for name in list(weights)}, assign=True)
    return stack


@contextmanager
def without_weights() -> Generator[None, None, None]:
    """Modules that are made here get their weights later."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Draws no numbers: to draw those of an embedding on "meta", torch imports its compiler, a second and 75 MB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(array_of(tensors[name].reshape(-1).view(torch.uint8)).data, zlib.crc32(name.encode(), crc))
    return f"{crc:08x}"

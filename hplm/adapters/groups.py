"""Linear maps over all rows of a batch at once, each row with the weights of its slot, in the ways of several devices."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from hplm.arrays import Array, padded, ranges
from hplm.compiled import HOW, kernel, number_fields, pointer_fields, vectors
from hplm.model.layer import activation
from hplm.model.tensors import sent

CPU = torch.device("cpu")
# Of `InPlace`:
MOST_RANK = 256  # as in kernel.c
STEP = 16  # numbers of outputs are multiples of it
WORTH = 1 << 18  # multiplications that are worth another thread
# Of `Runs`:
ALIGNMENT = 16  # bytes
GENERATIONS = (9, 10)  # major compute capabilities of GPUs that have the kernel
MOST = 1023  # products in one call


class Map(NamedTuple):
    """A linear map of each slot: slots x outputs x inputs, and slots x outputs."""

    weight: Tensor
    bias: Tensor | None = None


class Groups(ABC):
    """Made once for a batch from the slot of every row, and used in every layer. Weights are slots x outputs x inputs."""

    is_recordable = False  # whether its kernels depend only on the sizes of what it has sent to the device

    @staticmethod
    @abstractmethod
    def takes(device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> bool:
        """Whether it maps on this device with weights (outputs x inputs) and biases of these shapes."""

    @abstractmethod
    def __init__(self, slots: Array, counts: Array, device: torch.device) -> None:
        """`slots`: of each run of rows. `counts`: the rows of each run, at least one."""

    def spread(self, x: Tensor) -> Tensor:
        """Brings rows x d into the order and shape that the maps take."""
        return x

    def collect(self, spread: Tensor) -> Tensor:
        """Brings spread rows back into rows x d."""
        return spread

    @abstractmethod
    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Adds the linear map of spread rows to `base`, in place: large new tensors cost more than small products."""
        base.add_(self.collect(self.linear(spread, weight, bias)))

    def add_low_rank(self, base: Tensor, spread: Tensor, down: Map, up: Map, function: str | None = None) -> None:
        """Adds two linear maps of spread rows to `base`, in place, with a function between them."""
        inner = self.linear(spread, *down)
        self.add(base, inner if function is None else activation(function)(inner), *up)


class _Maps(ctypes.Structure):
    _fields_ = (
        *HOW, *pointer_fields("down", "down_bias", "up", "up_bias"), ("starts", ctypes.c_char_p), ("slots", ctypes.c_char_p),
        *pointer_fields("x", "out"),
        *number_fields("inputs", "rank", "outputs", "relu", "adds", "bf16", "count", "x_stride", "out_stride"),
    )  # fmt: skip


class InPlace(Groups):
    """By the compiled kernel: on CPUs of x86-64, in 32 bits with AVX2, in bf16 with AVX-512's instructions for it.

    It reads the weights of a slot where they lie, without copies, tiles and padding. A low-rank map with its biases is one
    call: what lies between its two products stays in the caches.
    """

    @staticmethod
    def takes(device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> bool:
        every = [*shapes]  # outputs x inputs
        if device.type != "cpu" or any(shape[0] % STEP for shape in every) or (found := vectors()) is None:
            return False
        if dtype is not torch.bfloat16:
            return dtype is torch.float32
        # Torch's products in bf16 use AMX. It has no public name for that.
        has_amx = torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
        return found.has_bf16 and not has_amx and not any(shape[-1] % 2 for shape in every)

    def __init__(self, slots: Array, counts: Array, device: torch.device = CPU) -> None:
        bounds = np.arange(len(slots) + 1)
        counts.cumsum(out=bounds[1:])
        self._runs = bounds.tobytes(), slots.astype(np.int64, copy=False).tobytes(), len(slots)

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = spread.new_empty(spread.shape[0], weight.shape[1])
        self._map(spread, out, Map(weight, bias), adds=False)
        return out

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self._map(spread, base, Map(weight, bias))

    def add_low_rank(self, base: Tensor, spread: Tensor, down: Map, up: Map, function: str | None = None) -> None:
        if function in (None, "relu") and down.weight.shape[1] <= MOST_RANK:
            self._map(spread, base, up, down, relu=function is not None)
        else:
            super().add_low_rank(base, spread, down, up, function)

    def _map(self, x: Tensor, out: Tensor, up: Map, down: Map | None = None, relu: bool = False, adds: bool = True) -> None:
        """Maps by `up`, after `down` and a function if there is such a map."""
        compiled = kernel()
        assert compiled is not None and out.stride(1) == 1
        if x.stride(1) != 1:
            x = x.contiguous()
        _, outputs, rank = up.weight.shape
        before, inputs = ((None, None), 0) if down is None else (_at(down), down.weight.shape[2])
        threads = torch.get_num_threads() if x.shape[0] * rank * (inputs + outputs) >= WORTH else 1
        starts, slots, count = self._runs
        maps = _Maps(
            *compiled.how(threads), *before, *_at(up), starts, slots, x.data_ptr(), out.data_ptr(),
            inputs, rank, outputs, relu, adds, x.dtype is torch.bfloat16, count, x.stride(0), out.stride(0),
        )  # fmt: skip
        compiled.library.hplm_map(ctypes.byref(maps))


def _at(own: Map) -> tuple[int, int | None]:
    """Returns where the weights and biases of a map are. Weights lie as inputs x outputs."""
    assert own.weight.mT.is_contiguous() and (own.bias is None or own.bias.is_contiguous())
    return own.weight.data_ptr(), None if own.bias is None else own.bias.data_ptr()


class Runs(Groups):
    """By one grouped kernel: a product for each run of rows, of any length. Those of one slot should be neighbours.

    The kernel exists on CUDA for bf16, from Hopper on, and needs rows of a multiple of 16 bytes. Elsewhere torch replaces it
    by a loop, which waits for the device.
    """

    @staticmethod
    def takes(device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> bool:
        return (
            device.type == "cuda"
            and dtype == torch.bfloat16
            and torch.cuda.get_device_capability(device)[0] in GENERATIONS
            and all(width * dtype.itemsize % ALIGNMENT == 0 for shape in shapes if len(shape) > 1 for width in shape)
        )

    def __init__(self, slots: Array, counts: Array, device: torch.device) -> None:
        slots, bounds = slots.astype(np.int64, copy=False), np.append(0, counts.cumsum())
        self._calls = [_call(slots[i : i + MOST], bounds[i : i + MOST + 1], device) for i in range(0, len(slots), MOST)]
        self._slot_of_row = sent(slots.repeat(counts), device)
        self._is_one = len(slots) == 1
        self.is_recordable = len(self._calls) == 1

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._is_one:  # a plain product takes fewer kernels
            ((_, slot, _),) = self._calls
            own = weight.mT.index_select(0, slot)[0]
            return spread @ own if bias is None else torch.addmm(bias.index_select(0, slot)[0], spread, own)
        parts = [grouped_mm(spread[rows], weight.mT.index_select(0, slots), offs=ends) for rows, slots, ends in self._calls]
        mapped = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mapped if bias is None else mapped.add_(bias.index_select(0, self._slot_of_row))


def _call(slots: Array, bounds: Array, device: torch.device) -> tuple[slice, Tensor, Tensor]:
    """Returns the rows of some runs, and for each run its slot and its end. `bounds`: those of the runs.

    Runs without rows behind the last one make their number a power of two: batches of few shapes can be recorded.
    """
    ends, size = (bounds[1:] - bounds[0]).astype(np.int32), min(1 << (len(slots) - 1).bit_length(), MOST)
    rows = slice(int(bounds[0]), int(bounds[-1]))
    return rows, sent(padded(slots, size), device), sent(padded(ends, size), device)


class Tiles(Groups):
    """Rows are cut into tiles of equal length, each of one slot. One product serves all tenants, however texts are mixed.

    If tiles of some length fit in all runs, they are views. Otherwise rows that share a slot are gathered and padded.
    """

    @staticmethod
    def takes(device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> bool:
        return True

    def __init__(self, slots: Array, counts: Array, device: torch.device) -> None:
        self._take: Tensor | None = None  # gathers rows into tiles, `_back` undoes it; None: tiles are views
        self._back: Tensor | None = None
        if len(slots) == 1:
            self._tiles, self._first, self._slots = 1, int(slots[0]), None
            return
        rows, tile = int(counts.sum()), int(np.gcd.reduce(counts))
        distinct = np.unique(slots)
        rows_of = np.bincount(np.searchsorted(distinct, slots), counts).astype(np.int64)
        mean = -(-rows // len(distinct))  # short groups are padded to it, long groups take several tiles
        tiles_of = -(-rows_of // mean)
        if rows // tile <= 2 * tiles_of.sum():  # more small products would cost more than gathering
            tile_slots = np.repeat(slots, counts // tile)
        else:
            tile_slots = np.repeat(distinct, tiles_of)
            order = np.argsort(np.repeat(slots, counts), kind="stable")
            home = ranges((np.cumsum(tiles_of) - tiles_of) * mean, rows_of)
            take = np.zeros(len(tile_slots) * mean, dtype=np.int64)  # padding repeats row 0 and is dropped afterwards
            take[home] = order
            back = np.empty(rows, dtype=np.int64)
            back[order] = home
            self._take, self._back = sent(take, device), sent(back, device)
        self._tiles = len(tile_slots)
        self._first = int(tile_slots[0])
        consecutive = bool((np.diff(tile_slots) == 1).all())  # then their weights need no copy; true for a single tile
        self._slots = None if consecutive else sent(tile_slots.astype(np.int64), device)

    def spread(self, x: Tensor) -> Tensor:
        """Turns rows x d into tiles x rows of a tile x d."""
        if self._take is not None:
            x = x.index_select(0, self._take)
        return x.view(self._tiles, -1, x.shape[1])

    def collect(self, spread: Tensor) -> Tensor:
        rows = spread.flatten(0, 1)
        return rows if self._back is None else rows.index_select(0, self._back)

    def _pick(self, slots: Tensor) -> Tensor:
        """Returns the weights of each tile: slots x ... -> tiles x ..."""
        if self._slots is None:
            return slots[self._first : self._first + self._tiles]
        return slots.index_select(0, self._slots)

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self._pick(weight.mT)
        return torch.bmm(spread, weight) if bias is None else torch.baddbmm(self._pick(bias).unsqueeze(1), spread, weight)

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if self._take is not None:
            super().add(base, spread, weight, bias)
            return
        own = self.spread(base)
        if bias is not None:
            own.add_(self._pick(bias).unsqueeze(1))
        own.baddbmm_(spread, self._pick(weight.mT))

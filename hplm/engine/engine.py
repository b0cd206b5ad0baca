"""The engine, which runs a staged batch through the shared upper layers, each text with its own adapter and head."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hplm.adapters.parts import Part, adapted
from hplm.arrays import Array
from hplm.engine.sheets import Sheet
from hplm.engine.staged import StagedBatch
from hplm.engine.stages import Stage, check_layers
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.eightbit import to_eight_bits
from hplm.model.layer import QKV, Adapt, Attend
from hplm.model.malloc import keep_freed_memory
from hplm.model.prepacked import can_prepack, prepacked
from hplm.model.stacks import UpperStack, through, turn_of
from hplm.model.tensors import array_of
from hplm.options import ENGINE_DTYPES, LAYER_DTYPES

MEASURED = 3  # measurements; the fastest counts, without other work on the machine
CACHE_LINE = 16  # numbers of 32 bits
TORCH_DTYPES: dict[str, torch.dtype] = dict(zip(LAYER_DTYPES, (torch.float32, torch.bfloat16), strict=True))
INT8 = "int8"


@dataclass(frozen=True)
class Precision:
    dtype: torch.dtype  # of everything but the shared products
    eight_bits: bool = False  # whether the shared products are computed in 8 bits

    @property
    def name(self) -> str:
        return INT8 if self.eight_bits else next(name for name, dtype in TORCH_DTYPES.items() if dtype is self.dtype)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput(f"unknown device {name!r}: choose auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device {name!r} is not available: torch finds no CUDA device. Use auto or cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the torch dtype. `auto` is bf16 if the hardware multiplies it, else fp32."""
    if name != "auto":
        if name not in TORCH_DTYPES:
            raise InvalidInput(f"unknown dtype {name!r}: choose auto, {' or '.join(TORCH_DTYPES)}")
        return TORCH_DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    # A private name, because torch 2.10 may not have the public get_capabilities() yet.
    has_bf16 = torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
    return torch.bfloat16 if has_bf16 else torch.float32


def resolve_precision(name: str, device: torch.device, auto_on_cpu: str = "auto") -> Precision:
    """Returns the precision of an engine. `auto_on_cpu` is what `auto` means on a CPU."""
    if name == "auto" and device.type == "cpu":
        name = auto_on_cpu
    if name not in ("auto", *ENGINE_DTYPES):
        raise InvalidInput(f"unknown dtype {name!r}: choose auto, {' or '.join(ENGINE_DTYPES)}")
    if name != INT8:
        return Precision(resolve_dtype(name, device))
    if device.type != "cpu":
        raise InvalidInput(f"dtype int8 is for CPUs, but the device is {device}: choose auto, fp32 or bf16, or --device cpu")
    return Precision(torch.float32, eight_bits=True)


class Engine:
    """All layers on one device, or on those of several stages.

    A batch passes the stages one after the other: `enter` computes all but the last one, `run` the last one or the only one.
    Another thread may compute another batch in another stage.
    """

    def __init__(
        self,
        upper: UpperStack,
        device: torch.device,
        dtype: torch.dtype,
        eight_bits: bool = False,
        stages: Sequence[Stage] = (),
    ) -> None:
        """`device`: where batches enter. It is the first stage's, if there are stages."""
        check_layers(stages, len(upper.layers))
        self.stages = tuple(stages) or (Stage(0, len(upper.layers) - 1, device),)
        self.device = device
        self.dtype = dtype
        self.takes_few_sizes = can_prepack(device, dtype)
        if device.type == "cpu":
            keep_freed_memory()
        self._upper = self._ready(upper, eight_bits)
        self._layers = [self._upper.layers[stage.first : stage.last + 1] for stage in self.stages]  # of each stage

    def _ready(self, stack: UpperStack, eight_bits: bool) -> UpperStack:
        if eight_bits:
            to_eight_bits(stack.layers)
        for stage in self.stages:
            stack.layers[stage.first : stage.last + 1].to(device=stage.device, dtype=self.dtype)
        for part in stack.children():
            if part is not stack.layers:
                part.to(device=self.device, dtype=self.dtype)
        stack = stack.eval().requires_grad_(False)
        stack = prepacked(stack) if self.takes_few_sizes else stack
        if self.device.type == "cpu" and self.dtype is torch.float32 and not eight_bits:
            for layer in stack.layers:
                for linear in (layer.attention_out, layer.ffn_out):  # it would slow down large products of wider ones
                    linear.weight.data = _transposed(linear.weight.data)
        return stack

    def after_layers(self, done: Callable[[], object]) -> None:
        """Calls `done` from now on after each layer, when the device has computed it."""

        def hook(*_: object) -> None:
            self._wait_for_all()
            done()

        for layer in self._upper.layers:
            layer.register_forward_hook(hook)

    @torch.inference_mode()
    def run(self, batch: StagedBatch) -> list[Array]:
        """Computes a batch. Returns the logits of each text: its answer rows x the size of its sheet's largest head, fp32."""
        batch.ready.wait()
        try:
            # All sheets are started before one is waited for.
            started = [_read(self._compute(sheet, -1).float(), sheet.heads) for sheet in batch.sheets]
            by_text: dict[int, Array] = {}
            for sheet, logits in zip(batch.sheets, started, strict=True):
                parts = logits.cpu().split_with_sizes(sheet.rows_of)
                by_text.update((text, array_of(part)) for text, part in zip(sheet.indexes, parts, strict=True))
        except BaseException:
            self._wait()  # for what was started: staging takes the batch's memory as soon as nobody holds the batch
            raise
        return [by_text[text] for text in range(len(batch.texts))]

    @torch.inference_mode()
    def enter(self, batch: StagedBatch, stage: int) -> None:
        """Computes a batch in a stage that is not the last one. Returns when the stage's device has done it."""
        batch.ready.wait()
        try:
            for sheet in batch.sheets:
                sheet.hidden = self._compute(sheet, stage)
        finally:
            self._wait(stage)

    def _compute(self, sheet: Sheet, stage: int) -> Tensor:
        """Computes a stage's layers. Returns all tokens, or behind the last layer those that an answer reads."""
        own, is_last = self.stages[stage], self.stages[stage] is self.stages[-1]
        adapters: list[Adapt] = [partial(adapted, sheet.adapters[stage], layer) for layer in range(own.first, own.last + 1)]
        if is_last:
            adapters[-1] = partial(_adapt_last, sheet, own.last)
        positions = sheet.positions.to(own.device)
        if own.first:
            assert sheet.hidden is not None  # the stage before has left it
            x, sheet.hidden = sheet.hidden.to(own.device), None
        else:
            assert sheet.sums is not None  # staging has gathered them
            x = self._upper.enter(sheet.sums.to(own.device), positions, sheet.segments.to(own.device))
        rows, turn = sheet.reading if is_last else None, turn_of(self._upper.config, positions, x.dtype)
        return through(self._layers[stage], x, sheet.attend[stage], adapters, rows, turn)

    @torch.inference_mode()
    def seconds(self, texts: int, tokens: int) -> float:
        """Measures how long the layers take for `texts` texts of `tokens` tokens. Returns the best time."""
        generator = torch.Generator().manual_seed(texts)
        x = torch.randn(texts * tokens, self._upper.norm.weight.numel(), generator=generator).to(self.device, self.dtype)
        attend = PackedAttention([tokens] * texts, self._upper.heads)
        taken: list[float] = []
        for _ in range(MEASURED + 1):
            self._wait_for_all()
            begin = time.perf_counter()
            self.through(x, attend)
            self._wait_for_all()
            taken.append(time.perf_counter() - begin)
        return min(taken[1:])  # the first run warms up

    def through(self, x: Tensor, attend: Attend, adapters: Sequence[Adapt] | None = None) -> Tensor:
        """Computes the layers alone, one stage after the other."""
        for stage, layers in zip(self.stages, self._layers, strict=True):
            own = adapters[stage.first : stage.last + 1] if adapters is not None else None
            x = through(layers, x.to(stage.device), attend, own)
        return x

    def _wait(self, stage: int = -1) -> None:
        """Waits until the device of a stage has done all that was started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.stages[stage].device)

    def _wait_for_all(self) -> None:
        for stage in range(len(self.stages)):
            self._wait(stage)


def _transposed(weight: Tensor) -> Tensor:
    """Returns the same weight, stored as inputs x outputs. A single short text runs a tenth faster, large batches as before.

    Each row is padded by a cache line: rows a multiple of 4 KB apart would compete for the same places in the cache.
    """
    outputs, inputs = weight.shape
    return weight.new_empty(inputs, outputs + CACHE_LINE)[:, :outputs].copy_(weight.t()).t()


def _adapt_last(sheet: Sheet, layer: int, at: str, before: Tensor, after: Tensor) -> Tensor:
    """After its attention, the last layer computes only the tokens that an answer reads."""
    return adapted(sheet.adapters[-1] if at == QKV else sheet.reading_adapters, layer, at, before, after)


def _read(x: Tensor, parts: list[Part]) -> Tensor:
    """Returns logits: rows x the size of the largest head in the batch."""
    for part in parts:
        part.arrived[0].wait()
    if len(parts) == 1:
        return parts[0].layout.read(x, parts[0].groups, parts[0].layers[0])
    results: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        assert part.rows is not None  # with several heads, no head has all rows
        results.append((part.rows, part.layout.read(x.index_select(0, part.rows), part.groups, part.layers[0])))
    logits = x.new_zeros(len(x), max(result.shape[1] for _, result in results))
    for rows, result in results:
        logits[rows, : result.shape[1]] = result
    return logits

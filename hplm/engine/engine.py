"""The engine, which runs a staged batch through the shared upper layers, each text with its own adapter and head."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hplm.adapters.layout_rows import LayoutRows, adapted, adapted_last, means, with_means
from hplm.arrays import Array
from hplm.engine.exits import ExitAudit
from hplm.engine.graphs import Graphs, can_record
from hplm.engine.laid import EXITS, HEAD, Laid
from hplm.engine.sheets import Sheet, StagedBatch
from hplm.engine.stages import Stage, check_layers
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention, avoid_plans
from hplm.model.cpu import SideBySide, keep_freed_memory
from hplm.model.fastest import SERVING, fastest
from hplm.model.layer import Adapt, Attend, plain
from hplm.model.products import EightBitLinear, Prepacked, can_prepack, replace_products
from hplm.model.stacks import UpperStack, through, turn_of
from hplm.model.tensors import array_of, sent
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
    if not re.fullmatch(r"(cpu|cuda)(:(0|[1-9][0-9]?))?", name):  # torch knows others, and cannot compute on all of them
        raise InvalidInput(f"unknown device {name!r}: choose auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device {name!r} is not available: torch finds no CUDA device. Use auto or cpu")
    return device


def resolve_dtype(name: str, device: torch.device, work: str = SERVING) -> torch.dtype:
    """Returns the torch dtype. `auto` is the faster one on a CPU, which is measured; on a GPU bf16 if it multiplies that."""
    if name != "auto":
        if name not in TORCH_DTYPES:
            raise InvalidInput(f"unknown dtype {name!r}: choose auto, {' or '.join(TORCH_DTYPES)}")
        return TORCH_DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return fastest(work).dtype


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


@dataclass(slots=True)
class Computed:
    """Texts of a batch that are done: those that leave before the last layer, or those that have passed all."""

    indexes: list[int]  # of the texts in the batch
    logits: list[Array]  # of each text: its answer rows x the size of the largest head, or the states' width; fp32
    exit: int | None = None  # None: behind all layers that they pass
    is_end: bool = True  # False: others of the batch go on


class Engine:
    """All layers on one device, or on those of several stages.

    A batch passes the stages one after the other. Another thread may compute another batch in another stage.
    """

    def __init__(
        self,
        upper: UpperStack,
        device: torch.device,
        dtype: torch.dtype,
        eight_bits: bool = False,
        stages: Sequence[Stage] = (),
        threads: int = 1,
        graphs: Callable[[torch.device], Graphs] = Graphs,
    ) -> None:
        """`device`: where batches enter. It is the first stage's, if there are stages. `graphs` makes what records kernels.

        `threads`: that compute the sheets of a batch side by side: no more than there are cores. None waits for another before
        the end of the batch.
        """
        check_layers(stages, len(upper.layers))
        self.stages = tuple(stages) or (Stage(0, len(upper.layers) - 1, device),)
        self.device = device
        self.dtype = dtype
        config, is_whole = upper.config, len(self.stages) == 1
        self._graphs = graphs(device) if is_whole and can_record(device, dtype, config.head_size) else None
        self._side_by_side = SideBySide(threads) if threads > 1 else None
        self.takes_few_sizes = can_prepack(device, dtype) or self._graphs is not None
        if device.type == "cpu":
            keep_freed_memory()
        avoid_plans(device)
        self._config, self._places = config, places_of(upper).to(device, dtype)
        self._upper = self._ready(upper, eight_bits)
        self.exit_audit = ExitAudit()
        self._after_layer: Callable[[], object] | None = None
        layers = [layer.plain() for layer in self._upper.layers]
        self._layers = [layers[stage.first : stage.last + 1] for stage in self.stages]  # of each stage
        self._enter = plain(self._upper.norm) if config.enters_normed else None
        # Heads read normed states where layers begin with norms.
        self._leave = [
            unnormed if config.enters_normed else plain(deepcopy(self._upper.final_norm).to(stage.device))
            for stage in self.stages
        ]

    def _ready(self, stack: UpperStack, eight_bits: bool) -> UpperStack:
        if eight_bits:
            replace_products(stack.layers, EightBitLinear)
        for stage in self.stages:
            stack.layers[stage.first : stage.last + 1].to(device=stage.device, dtype=self.dtype)
        for part in stack.children():
            if part is not stack.layers:
                part.to(device=self.device, dtype=self.dtype)
        stack = stack.eval().requires_grad_(False)
        if self.device.type == "cpu" and not eight_bits and stack.config.has_places:  # in 8 bits it would not be faster
            stack.layers[-1].put_query_apart()
        if can_prepack(self.device, self.dtype):
            replace_products(stack, Prepacked)
        if self.device.type == "cpu" and self.dtype is torch.float32 and not eight_bits:
            for layer in stack.layers:
                for linear in (layer.attention_out, layer.ffn_out):  # it would slow down large products of wider ones
                    linear.weight.data = _transposed(linear.weight.data)
        return stack

    def after_layers(self, done: Callable[[], object]) -> None:
        """Calls `done` from now on after each layer, when the device has computed it."""

        def waited() -> None:
            self._wait_for_all()
            done()

        self._after_layer, self._graphs, self._side_by_side = waited, None, None

    @property
    def overlaps(self) -> bool:
        """Whether a batch may begin before the one before it ends: then `start` it, and another thread may `run` it."""
        return self._side_by_side is not None

    def start(self, batch: StagedBatch) -> None:
        """Starts to compute a batch of several sheets, and returns when a thread has begun. One of one sheet only waits."""
        assert self._side_by_side is not None
        if len(batch.sheets) > 1:
            batch.ready.wait()
            batch.under_way = self._side_by_side.start(partial(self._compute, number=0), batch.sheets)
        else:
            self._side_by_side.wait()  # its products are divided among the same cores

    def run(self, batch: StagedBatch, stage: int = -1) -> Iterator[Computed]:
        """Computes a batch in a stage. Yields texts that leave before the last layer, and behind it the others.

        Whoever iterates does so in inference mode. Before the last stage it ends when the stage's device has done all.
        """
        batch.ready.wait()
        number = stage % len(self.stages)
        try:
            if self.overlaps and batch.under_way is None:
                self.start(batch)
            if batch.under_way is not None:
                yield from batch.under_way
            else:
                for sheet in batch.sheets:
                    if self._graphs is not None and sheet.shape is not None and len(batch.sheets) == 1:
                        sheet.hidden = self._graphs.run(sheet, self._hidden)
                    else:
                        yield from self._compute(sheet, number)
            if number < len(self.stages) - 1:
                self._wait(number)
                return
            # All heads are started before one is waited for.
            started = [(sheet, _read(sheet.laid, sheet.taken())) for sheet in batch.sheets if sheet.texts]
            if started:
                indexes = [index for sheet, _ in started for index in sheet.indexes]
                yield Computed(indexes, [part for sheet, logits in started for part in split(logits, sheet.laid.answer_rows)])
        except BaseException:
            self._wait(number)  # for what was started: staging takes the batch's memory as soon as nobody holds the batch
            raise

    def _compute(self, sheet: Sheet, number: int) -> Iterator[Computed]:
        """Computes a sheet in a stage. Yields texts that leave at exits, or pass no more layers.

        The sheet gets the rows of the others, which are not laid again: behind the last layer those that an answer reads.
        Exit k is before layer k, whose work leaving spares.
        """
        stage, layers = self.stages[number], self._layers[number]
        if stage.first:
            x = sheet.taken().to(stage.device)
        else:
            assert sheet.sums is not None  # staging has gathered them
            x = sheet.sums.to(stage.device)
            if len(self._places):
                x = torch.embedding(self._places, sheet.places.to(stage.device)).add_(x)
            if self._enter is not None:
                x = self._enter(x)
        last, turn, positions = stage.last if stage is self.stages[-1] else -1, None, None
        for at, layer in enumerate(layers, stage.first):
            if sheet.may_leave:
                x = yield from self._leaving(sheet, at, x, number)
                if not sheet.texts:
                    break
            if positions is not sheet.laid.positions[number]:
                positions = sheet.laid.positions[number]
                turn = turn_of(self._config, positions, x.dtype) if positions is not None else None
            parts, attend, rows = sheet.laid.adapters[number], sheet.laid.attend[number], None
            adapt = partial(adapted, parts, at)
            # Whether no text passes another layer, although there is one.
            all_end = sheet.may_leave and at < last and len(sheet.done(at + 1)) == len(sheet.texts)
            if at == last or all_end:
                rows, attend, of_rows = sheet.laid.ending
                adapt = partial(adapted_last, parts, of_rows, at)
            x = layer(x, attend, adapt, rows, turn)
            if at == last or all_end:
                x = self._leave[number](x)
            if self._after_layer is not None:
                self._after_layer()
            if all_end:
                yield Computed(sheet.indexes, split(_read(sheet.laid, x), sheet.laid.answer_rows), is_end=False)
                sheet.leave(sheet.done(at + 1))
                break
        sheet.hidden = x

    def _leaving(self, sheet: Sheet, at: int, x: Tensor, number: int) -> Generator[Computed, None, Tensor]:
        """Yields texts that leave before a layer. Returns the rows of the others."""
        if len(done := sheet.done(at)):
            reading, rows_of, heads = sheet.laid.reads(done, HEAD)
            rows = self._leave[number](x.index_select(0, sent(reading, x.device))).float().to(self.stages[-1].device)
            x = yield from self._left(sheet, done, split(read(rows, heads), rows_of), x)
        if len(asked := sheet.asked(at)):
            reading, rows_of, heads = sheet.laid.reads(asked, EXITS, number)
            read_here = with_means(self._leave[number](x), reading, rows_of, *sheet.laid.places_of(asked))
            logits = split(read(read_here, heads, at), rows_of)
            texts: list[int] = asked.tolist()
            leaves = self.exit_audit.leaving([sheet.texts[text] for text in texts], logits, at)
            if leaves.any():
                x = yield from self._left(sheet, asked[leaves], [*compress(logits, leaves)], x, at)
        return x

    @staticmethod
    def _left(
        sheet: Sheet, leaving: Array, logits: list[Array], x: Tensor, exit: int | None = None
    ) -> Generator[Computed, None, Tensor]:
        """Yields texts that leave. Returns the rows of the others."""
        numbers: list[int] = leaving.tolist()
        yield Computed([sheet.indexes[number] for number in numbers], logits, exit, is_end=False)
        return x.index_select(0, sent(sheet.leave(leaving), x.device))

    def _hidden(self, sheet: Sheet) -> Tensor:
        """Returns what all layers compute of texts that come to the end."""
        for _ in self._compute(sheet, 0):
            raise AssertionError("a text leaves")
        return sheet.taken()

    @torch.inference_mode()
    def seconds(self, texts: int, tokens: int) -> float:
        """Measures how long the layers take for `texts` texts of `tokens` tokens. Returns the best time."""
        generator = torch.Generator().manual_seed(texts)
        x = torch.randn(texts * tokens, self._config.hidden, generator=generator).to(self.device, self.dtype)
        attend, positions = PackedAttention([tokens] * texts, self._upper.heads), torch.arange(tokens).repeat(texts)
        taken: list[float] = []
        for _ in range(MEASURED + 1):
            self._wait_for_all()
            begin = time.perf_counter()
            self.through(x, attend, positions)
            self._wait_for_all()
            taken.append(time.perf_counter() - begin)
        return min(taken[1:])  # the first run warms up

    def through(self, x: Tensor, attend: Attend, positions: Tensor, adapters: Sequence[Adapt] | None = None) -> Tensor:
        """Computes the layers alone, one stage after the other. `positions`: of the tokens in their texts."""
        for stage, layers in zip(self.stages, self._layers, strict=True):
            own = adapters[stage.first : stage.last + 1] if adapters is not None else None
            turn = turn_of(self._config, positions.to(stage.device), self.dtype)
            x = through(layers, x.to(stage.device), attend, own, turn=turn)
        return x

    def _wait(self, stage: int = -1) -> None:
        """Waits until the device of a stage has done all that was started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.stages[stage].device)

    def _wait_for_all(self) -> None:
        for stage in range(len(self.stages)):
            self._wait(stage)


def places_of(upper: UpperStack) -> Tensor:
    """Returns what positions and segments add to a token, as one table. The positions of the first segment come first."""
    config = upper.config
    if not config.segments:
        return torch.empty(0, config.hidden)
    segments = upper.segments.weight.detach()
    return (segments[:, None] + upper.positions.weight.detach()).flatten(0, 1) if config.has_places else segments


def unnormed(x: Tensor) -> Tensor:
    return x


def _transposed(weight: Tensor) -> Tensor:
    """Returns the same weight, stored as inputs x outputs. A single short text runs a tenth faster, large batches as before.

    Each row is padded by a cache line: rows a multiple of 4 KB apart would compete for the same places in the cache.
    """
    outputs, inputs = weight.shape
    return weight.new_empty(inputs, outputs + CACHE_LINE)[:, :outputs].copy_(weight.t()).t()


def _read(laid: Laid, x: Tensor) -> Tensor:
    """Returns the logits of texts. Further rows of `x` belong to none."""
    rows = x[: int(laid.rows_of.sum())].float()
    if laid.pools:
        rows = means(rows, np.where(laid.answer_rows < laid.rows_of, laid.rows_of, 1).repeat(laid.answer_rows))
    return read(rows, laid.heads)


def split(logits: Tensor, rows_of: Array) -> list[Array]:
    """Returns the logits of each text."""
    whole, ends = array_of(logits.cpu()), rows_of.cumsum().tolist()
    return [whole[start:end] for start, end in pairwise([0, *ends])]


def read(x: Tensor, parts: list[LayoutRows], layer: int = 0) -> Tensor:
    """Returns logits: rows x the size of the largest head in the batch. A row without a head is the answer itself.

    `layer`: of the heads' records.
    """
    for part in parts:
        part.arrived[layer].wait()
    if len(parts) == 1 and parts[0].rows is None:
        return parts[0].layout.read(x, parts[0].groups, parts[0].layers[layer])
    results: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        assert part.rows is not None  # with several heads, no head has all rows
        results.append((part.rows, part.layout.read(x.index_select(0, part.rows), part.groups, part.layers[layer])))
    width = max((result.shape[1] for _, result in results), default=0)
    all_have_heads = sum(len(rows) for rows, _ in results) == len(x)
    logits = x.new_zeros(len(x), width) if all_have_heads else pad(x, (0, max(0, width - x.shape[1])))
    for rows, result in results:
        logits[rows, : result.shape[1]] = result
    return logits


@torch.inference_mode()
def computed(engine: Engine, batch: StagedBatch) -> list[Array]:
    """Computes a batch in the last stage. Returns the logits of each text, also of those that left."""
    found: dict[int, Array] = {}
    for done in engine.run(batch):
        found.update(zip(done.indexes, done.logits, strict=True))
    return [found[index] for index in range(len(batch.texts))]

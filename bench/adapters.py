"""`hplm bench adapters`: the adapters of one layer, in batches of many tenants, beside a loop over tenants and beside peft.

Every variant gets the input and the output of the shared projection, and changes the output in place. Weights are in slots of
arbitrary numbers, as in a server that has run for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.rows import Positive, Row, Rows, Whole, benchmark
from bench.turns import alternate_timed
from hplm.adapters.kernel import kernel
from hplm.adapters.layout import Layout
from hplm.model.layer import ATTENTION_OUT, QKV

CPU = torch.device("cpu")
SLOTS = 256
TOKENS = (20, 128)  # of a tenant
TO_LOOP = {20: 4.0, 128: 2.0}  # targets, by tokens, for MANY tenants or more
TO_PEFT = 2.0
MANY = 16

Variant = tuple["Projected", Callable[[Tensor], object]]  # the function changes the projection's output


@benchmark(hidden=32, rank=4, seconds=0.005)
def adapters(
    *, hidden: Whole = 768, rank: Whole = 32, seconds: Positive = 1.0, tenants: tuple[Whole, ...] = (1, 4, 16, 64)
) -> Rows:
    """Measures how long the adapters of one layer take for a batch of many tenants.

    `grouped` is ours, for bottlenecks and for LoRA. Beside it are a loop over tenants, and peft's mixed batches, which have
    only LoRA. Times are medians.

    :param hidden: width of a vector
    :param rank: of an adapter
    :param seconds: for each figure
    :param tenants: in a batch
    """
    try:
        import peft  # noqa: F401 # pyright: ignore[reportMissingImports] it comes with the extra `bench`

        with_peft = True
    except ModuleNotFoundError:
        with_peft = False
    with torch.inference_mode():
        for tokens in TOKENS:
            for count in tenants:
                timings = alternate_timed(
                    {name: _timed(*variant) for name, variant in variants(hidden, rank, count, tokens, with_peft).items()},
                    seconds,
                    warm_up=3,
                )
                median = {name: timing.median for name, timing in timings.items()}
                at, is_target = f"t{tokens}/{count}", count >= MANY
                for name, time_us in median.items():
                    yield Row(f"{at}/{name}_us", time_us, "us")
                least = TO_LOOP[tokens] if is_target else None
                yield Row(f"{at}/to_loop", median["loop"] / median["grouped"], least=least)
                yield Row(f"{at}/lora_to_loop", median["loop_lora"] / median["grouped_lora"], least=least)
                if with_peft:
                    to_peft = median["peft"] / median["grouped_lora"]
                    yield Row(f"{at}/lora_to_peft", to_peft, least=TO_PEFT if is_target else None)
    yield Row("threads", torch.get_num_threads())
    yield Row("compiled_kernel", kernel() is not None)
    if not with_peft:
        yield Row("peft", "not measured, because it is not installed: pip install -c constraints.txt -e '.[bench]'")


@dataclass(frozen=True)
class Projected:
    """Input and output of a projection of the shared layer: tenants x tokens rows, text by text."""

    before: Tensor
    after: Tensor
    slots: np.ndarray  # of each tenant

    @classmethod
    def drawn(cls, tenants: int, tokens: int, hidden: int, parts: int) -> Projected:
        generator = torch.Generator().manual_seed(tenants)
        rows = tenants * tokens
        before = torch.randn(rows, hidden, generator=generator)
        after = torch.randn(rows, parts * hidden, generator=generator)
        return cls(before, after, np.random.default_rng(tenants).permutation(SLOTS)[:tenants])

    @property
    def slot_of_row(self) -> np.ndarray:
        return np.repeat(self.slots, len(self.before) // len(self.slots))

    def of_tenants(self) -> list[tuple[int, slice]]:
        tokens = len(self.before) // len(self.slots)
        return [(slot, slice(i * tokens, (i + 1) * tokens)) for i, slot in enumerate(self.slots.tolist())]


def _timed(rows: Projected, run: Callable[[Tensor], object]) -> Callable[[int], float]:
    after = rows.after.clone()

    def timed(_: int) -> float:
        after.copy_(rows.after)
        start = time.perf_counter()
        run(after)
        return time.perf_counter() - start

    return timed


def variants(hidden: int, rank: int, tenants: int, tokens: int, with_peft: bool) -> dict[str, Variant]:
    bottleneck = Layout("bottleneck", rank, hidden, 1, ("attention_out",))
    lora = Layout("lora", rank, hidden, 1, ("query", "value"))
    out, qkv = Projected.drawn(tenants, tokens, hidden, 1), Projected.drawn(tenants, tokens, hidden, 3)
    out_groups = bottleneck.group(out.slot_of_row, CPU, torch.float32)
    qkv_groups = lora.group(qkv.slot_of_row, CPU, torch.float32)
    weights, loras = _slots(bottleneck), _slots(lora)
    own, own_loras = _records(bottleneck, weights), _records(lora, loras)  # what does without slots pads nothing
    found: dict[str, Variant] = {
        "grouped": (out, lambda after: bottleneck.adapt(ATTENTION_OUT, out.before, after, out_groups, weights)),
        "loop": (out, _bottleneck_loop(out, own)),
        "grouped_lora": (qkv, lambda after: lora.adapt(QKV, qkv.before, after, qkv_groups, loras)),
        "loop_lora": (qkv, _lora_loop(qkv, own_loras)),
    }
    if with_peft:
        found["peft"] = (qkv, _peft(qkv, own_loras, rank))
    return found


def _slots(layout: Layout) -> dict[str, Tensor]:
    (weights,) = layout.allocate(SLOTS, CPU, torch.float32)
    generator = torch.Generator().manual_seed(layout.size)
    for tensor in _records(layout, weights).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return weights


def _records(layout: Layout, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the part of each slot that a record fills: its own rank."""
    return {name: tensor[(slice(None), *map(slice, layout.shapes[name]))] for name, tensor in weights.items()}


def _loop_weights(weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Returns the weights of each slot, contiguous in memory, as `F.linear` reads them fastest."""
    return [{name: tensor[slot].contiguous() for name, tensor in weights.items()} for slot in range(SLOTS)]


def _bottleneck_loop(rows: Projected, weights: dict[str, Tensor]) -> Callable[[Tensor], object]:
    tenants = rows.of_tenants()
    own = _loop_weights({name.removeprefix("attention_out/"): tensor for name, tensor in weights.items()})

    def run(after: Tensor) -> None:
        for slot, mine in tenants:
            x, weight = after[mine], own[slot]
            inner = F.relu(F.linear(x, weight["down"], weight["down_bias"]))
            x += F.linear(inner, weight["up"], weight["up_bias"])

    return run


def _lora_loop(rows: Projected, weights: dict[str, Tensor]) -> Callable[[Tensor], object]:
    tenants = rows.of_tenants()
    own = _loop_weights(weights)
    hidden = rows.before.shape[1]
    parts = {"query": slice(0, hidden), "value": slice(2 * hidden, 3 * hidden)}

    def run(after: Tensor) -> None:
        for slot, mine in tenants:
            x, weight = rows.before[mine], own[slot]
            for place, part in parts.items():
                after[mine, part] += F.linear(F.linear(x, weight[f"{place}/a"]), weight[f"{place}/b"])

    return run


def _peft(rows: Projected, weights: dict[str, Tensor], rank: int) -> Callable[[Tensor], object]:
    """Computes only peft's step. The shared projection below it returns a computed result, and is not measured."""
    from peft import LoraConfig  # pyright: ignore[reportMissingImports] it comes with the extra `bench`
    from peft.tuners.lora import Linear  # pyright: ignore[reportMissingImports] likewise

    hidden = rows.before.shape[1]
    names = [f"slot-{slot}" for slot in rows.slots]
    x = rows.before.view(len(names), -1, hidden)
    modules = []
    for place in ("query", "value"):
        base = torch.nn.Linear(hidden, hidden)
        # alpha = rank gives a scale of 1: our scale is already part of B.
        config = LoraConfig(r=rank, lora_alpha=rank)
        module: Any = Linear(base, names[0], config=config, r=rank, lora_alpha=rank)
        for name, slot in zip(names, rows.slots.tolist(), strict=True):
            if name != names[0]:
                module.update_layer(name, rank, rank, config=config)
            module.lora_A[name].weight.data.copy_(weights[f"{place}/a"][slot])
            module.lora_B[name].weight.data.copy_(weights[f"{place}/b"][slot])
        modules.append(module.eval())

    def run(after: Tensor) -> None:
        for module, start in zip(modules, (0, 2 * hidden), strict=True):
            computed = after[:, start : start + hidden].unflatten(0, x.shape[:2])
            module.base_layer.forward = lambda _, computed=computed: computed  # peft also adds to it in place
            module(x, adapter_names=names)

    return run

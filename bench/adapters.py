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
from bench.turns import alternate
from hplm.adapters.kernel import kernel
from hplm.adapters.layout import Layout
from hplm.model.layer import ATTENTION_OUT, QKV

CPU = torch.device("cpu")
SLOTS = 256
TOKENS = (20, 128)  # of a tenant
TO_LOOP = {20: 4.0, 128: 2.0}  # targets, by tokens, for MANY tenants or more
TO_PEFT = 2.0
MANY = 16

Step = Callable[[Tensor, Tensor, dict[str, Tensor]], None]  # changes a tenant's output by its input and its weights
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
                median = alternate(
                    {name: _timed(*variant) for name, variant in variants(hidden, rank, count, tokens, with_peft).items()},
                    seconds,
                    warm_up=3,
                )
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
    tokens: int

    @classmethod
    def drawn(cls, tenants: int, tokens: int, hidden: int, parts: int) -> Projected:
        generator = torch.Generator().manual_seed(tenants)
        before, after = (torch.randn(tenants * tokens, width, generator=generator) for width in (hidden, parts * hidden))
        return cls(before, after, np.random.default_rng(tenants).permutation(SLOTS)[:tenants], tokens)

    @property
    def slot_of_row(self) -> np.ndarray:
        return np.repeat(self.slots, self.tokens)

    def looped(self, own: list[dict[str, Tensor]], step: Step) -> Variant:
        """Returns a loop over the tenants. `own`: the weights of each slot."""
        tenants = [(own[slot], slice(i * self.tokens, (i + 1) * self.tokens)) for i, slot in enumerate(self.slots.tolist())]

        def run(after: Tensor) -> None:
            for weights, mine in tenants:
                step(self.before[mine], after[mine], weights)

        return self, run


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
    (weights, own), (loras, own_loras) = _slots(bottleneck), _slots(lora)
    parts = {"query": slice(0, hidden), "value": slice(2 * hidden, 3 * hidden)}

    def bottleneck_step(before: Tensor, after: Tensor, weight: dict[str, Tensor]) -> None:
        inner = F.relu(F.linear(after, weight["attention_out/down"], weight["attention_out/down_bias"]))
        after += F.linear(inner, weight["attention_out/up"], weight["attention_out/up_bias"])

    def lora_step(before: Tensor, after: Tensor, weight: dict[str, Tensor]) -> None:
        for place, part in parts.items():
            after[:, part] += F.linear(F.linear(before, weight[f"{place}/a"]), weight[f"{place}/b"])

    found: dict[str, Variant] = {
        "grouped": (out, lambda after: bottleneck.adapt(ATTENTION_OUT, out.before, after, out_groups, weights)),
        "loop": out.looped(own, bottleneck_step),
        "grouped_lora": (qkv, lambda after: lora.adapt(QKV, qkv.before, after, qkv_groups, loras)),
        "loop_lora": qkv.looped(own_loras, lora_step),
    }
    return found | ({"peft": (qkv, _peft(qkv, own_loras, rank))} if with_peft else {})


def _slots(layout: Layout) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Returns random weights in slots, and those of each slot alone: without padding, and contiguous in memory."""
    (weights,) = layout.allocate(SLOTS, CPU, torch.float32)
    generator = torch.Generator().manual_seed(layout.size)
    own: list[dict[str, Tensor]] = [{} for _ in range(SLOTS)]
    for name, shape in layout.shapes.items():
        filled = weights[name][(slice(None), *map(slice, shape))]  # a slot has room for a rank that is rounded up
        filled.copy_(torch.randn(filled.shape, generator=generator) * 0.1)
        for slot, weight in enumerate(own):
            weight[name] = filled[slot].contiguous()
    return weights, own


def _peft(rows: Projected, own: list[dict[str, Tensor]], rank: int) -> Callable[[Tensor], object]:
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
            module.lora_A[name].weight.data.copy_(own[slot][f"{place}/a"])
            module.lora_B[name].weight.data.copy_(own[slot][f"{place}/b"])
        modules.append(module.eval())

    def run(after: Tensor) -> None:
        for module, start in zip(modules, (0, 2 * hidden), strict=True):
            computed = after[:, start : start + hidden].unflatten(0, x.shape[:2])
            module.base_layer.forward = lambda _, computed=computed: computed  # peft also adds to it in place
            module(x, adapter_names=names)

    return run

"""Times one layer's adapters in a batch of many tenants: all at once, tenant by tenant, and with `peft`'s mixed batches.

Every variant gets the input and the output of the shared projection, and changes the output in place. Weights are in slots of
arbitrary numbers, as in a server that has run for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.adapters import AdaptersBench
from bench.tools.timing import Timing, alternate_timed
from hplm.adapters.groups import Groups
from hplm.adapters.kernel import kernel
from hplm.adapters.layout import PROJECTIONS, Layout
from hplm.adapters.tiles import Tiles
from hplm.model.attention import PackedAttention
from hplm.model.layer import ATTENTION_OUT, QKV, Adapt, Layer, unchanged
from testing.random_store import BERT_BASE

CPU = torch.device("cpu")
SLOTS = 256
HEAD = 64  # width of an attention head
TOKENS = (20, 128)  # of a tenant
TO_LOOP = {20: 4.0, 128: 2.0}  # targets, by tokens, for MANY tenants or more
TO_PEFT = 2.0
MANY = 16
WITHOUT_PEFT = (
    "peft was not measured, because it is not installed: run `pip install -c constraints.txt -e '.[bench]'` in the checkout"
)


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


@dataclass(frozen=True)
class Variant:
    rows: Projected
    run: Callable[[Tensor], object]  # changes the projection's output


def bench_adapters(case: AdaptersBench) -> dict:
    figures: dict = {}
    spread: dict[str, dict] = {}
    with_peft = has_peft()
    with torch.inference_mode():
        for tokens in TOKENS:
            for tenants in case.tenants:
                timings = alternate_timed(_timed(variants(case, tenants, tokens, with_peft)), case.seconds, warm_up=3)
                spread[f"t{tokens}.{tenants}"] = {name: asdict(timing) for name, timing in timings.items()}
                figures.setdefault(f"t{tokens}", {})[str(tenants)] = _figures(timings)
    return figures | {
        "spread_us": spread,
        "case": asdict(case),
        "threads": torch.get_num_threads(),
        "compiled_kernel": kernel() is not None,
        "torch": torch.__version__,
        **({} if with_peft else {"peft": WITHOUT_PEFT}),
    }


def _figures(timings: dict[str, Timing]) -> dict:
    """Returns medians and ratios. Names without `lora` are of bottlenecks; peft's mixed batches have only LoRA.

    In a whole layer, the LoRA is on all projections and the bottleneck after attention.
    """
    median = {name: round(timing.median, 1) for name, timing in timings.items()}
    peft = median.get("peft")
    return {
        "grouped_us": median["grouped"],
        "tiles_us": median["tiles"],  # by torch, as where the compiled kernel is missing
        "loop_us": median["loop"],
        "floor_us": median["floor"],
        "peft_us": peft,
        "grouped_lora_us": median["grouped_lora"],
        "loop_lora_us": median["loop_lora"],
        "to_loop": round(median["loop"] / median["grouped"], 2),
        "floor_to_loop": round(median["loop"] / median["floor"], 2),
        "lora_to_loop": round(median["loop_lora"] / median["grouped_lora"], 2),
        "lora_to_peft": round(peft / median["grouped_lora"], 2) if peft is not None else None,
        "layer_us": median["layer"],
        "layer_bottleneck": round(median["layer_bottleneck"] / median["layer"], 2),
        "layer_lora": round(median["layer_lora"] / median["layer"], 2),
    }


def _timed(variants: dict[str, Variant]) -> dict[str, Callable[[int], float]]:
    def timed(variant: Variant) -> Callable[[int], float]:
        after = variant.rows.after.clone()

        def run(_: int) -> float:
            after.copy_(variant.rows.after)
            start = time.perf_counter()
            variant.run(after)
            return time.perf_counter() - start

        return run

    return {name: timed(variant) for name, variant in variants.items()}


def variants(case: AdaptersBench, tenants: int, tokens: int, with_peft: bool) -> dict[str, Variant]:
    bottleneck = Layout("bottleneck", case.rank, case.hidden, 1, ("attention_out",))
    lora = Layout("lora", case.rank, case.hidden, 1, ("query", "value"))
    out, qkv = Projected.drawn(tenants, tokens, case.hidden, 1), Projected.drawn(tenants, tokens, case.hidden, 3)
    out_groups = bottleneck.group(out.slot_of_row, CPU, torch.float32)
    qkv_groups = lora.group(qkv.slot_of_row, CPU, torch.float32)
    tiles = Tiles(out.slot_of_row, CPU)
    adapters, loras = _slots(bottleneck), _slots(lora)
    own, own_loras = _records(bottleneck, adapters), _records(lora, loras)  # what does without slots pads nothing
    found: dict[str, Variant] = {
        "grouped": Variant(out, lambda after: bottleneck.adapt(ATTENTION_OUT, out.before, after, out_groups, adapters)),
        "tiles": Variant(out, lambda after: bottleneck.adapt(ATTENTION_OUT, out.before, after, tiles, adapters)),
        "loop": Variant(out, _bottleneck_loop(out, own)),
        "floor": Variant(out, _products(out, own)),
        "grouped_lora": Variant(qkv, lambda after: lora.adapt(QKV, qkv.before, after, qkv_groups, loras)),
        "loop_lora": Variant(qkv, _lora_loop(qkv, own_loras)),
    }
    plain = _layer(case)
    attend = PackedAttention([tokens] * tenants, max(1, case.hidden // HEAD))
    whole = Layout("lora", case.rank, case.hidden, 1, tuple(PROJECTIONS), 4 * case.hidden)
    widest = _slots(whole)

    def adapted(layout: Layout, weights: dict[str, Tensor], groups: Groups) -> Adapt:
        return lambda at, before, after: layout.adapt(at, before, after, groups, weights)

    for name, adapt in (
        ("layer", unchanged),
        ("layer_bottleneck", adapted(bottleneck, adapters, out_groups)),
        ("layer_lora", adapted(whole, widest, out_groups)),
    ):
        found[name] = Variant(out, lambda after, adapt=adapt: after.copy_(plain(out.before, attend, adapt)))
    if with_peft:
        found["peft"] = Variant(qkv, _peft(qkv, own_loras, case.rank))
    return found


def _layer(case: AdaptersBench) -> Layer:
    torch.manual_seed(0)
    heads = max(1, case.hidden // HEAD)
    return Layer(replace(BERT_BASE, hidden=case.hidden, heads=heads, intermediate=4 * case.hidden)).eval()


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


def _products(rows: Projected, weights: dict[str, Tensor]) -> Callable[[Tensor], object]:
    """Computes only the two batched products, on weights that lie together. Batching by torch cannot be faster than this."""
    slots = torch.from_numpy(rows.slots)
    down, up = (weights[f"attention_out/{name}"].mT[slots].contiguous() for name in ("down", "up"))
    inner = torch.empty(len(slots), len(rows.after) // len(slots), down.shape[2])

    def run(after: Tensor) -> None:
        tiles = after.unflatten(0, inner.shape[:2])
        torch.bmm(tiles, down, out=inner)
        tiles.baddbmm_(inner, up)

    return run


def has_peft() -> bool:
    try:
        import peft  # noqa: F401 # pyright: ignore[reportMissingImports] it comes with the extra `bench`
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        return False
    return True


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
        module = Linear(base, names[0], config=config, r=rank, lora_alpha=rank)
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


def table_of(figures: dict) -> str:
    bottleneck = ("grouped_us", "tiles_us", "floor_us", "loop_us", "to_loop", "floor_to_loop")
    names = (*bottleneck, "grouped_lora_us", "loop_lora_us", "lora_to_loop", "peft_us", "lora_to_peft")
    names += ("layer_us", "layer_bottleneck", "layer_lora")
    lines = [f"one layer, {figures['threads']} threads, torch {figures['torch']}; medians in microseconds, and ratios"]
    lines.append(f"{'tokens':>6} {'tenants':>7} " + " ".join(f"{name.removesuffix('_us'):>16}" for name in names))
    for tokens in TOKENS:
        for tenants, one in figures[f"t{tokens}"].items():
            cells = " ".join(f"{'-' if one[name] is None else one[name]:>16}" for name in names)
            lines.append(f"{tokens:6} {tenants:>7} {cells}  {_verdict(tokens, int(tenants), one)}".rstrip())
    return "\n".join(lines + [figures[name] for name in ("peft",) if name in figures])


def _verdict(tokens: int, tenants: int, one: dict) -> str:
    if tenants < MANY:
        return ""
    aims = [("loop", one["to_loop"], TO_LOOP[tokens]), ("lora loop", one["lora_to_loop"], TO_LOOP[tokens])]
    if one["lora_to_peft"] is not None:
        aims.append(("peft", one["lora_to_peft"], TO_PEFT))
    return ", ".join(f"{name} {aim:g} x: {'met' if got >= aim else 'MISSED'}" for name, got, aim in aims)

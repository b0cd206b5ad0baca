from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.adapters import groups as ways
from hplm.adapters.groups import MOST_RANK, InPlace, Map, Runs, Tiles
from hplm.adapters.layout import Layout
from tests.support.device import needs_cuda
from tests.support.needed import needs_kernel

CPU = torch.device("cpu")
MOST_ROWS = 60  # of a piece of work, in kernel.c
ONE = np.array([1])
TYPES = [torch.float32, *[torch.bfloat16] * (ways.kernel() is not None and ways.kernel().has_bf16)]  # that the kernel takes


def each(slots):
    """Returns runs of one row each."""
    return slots, np.ones_like(slots)


@given(texts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=20), even=st.integers(0, 3))
def test_every_row_gets_the_weights_of_its_own_slot(texts, even):
    """`even`: rows of every text. Such texts may be left where they lie."""
    slots, counts = np.array([(slot, even or count) for slot, count in texts]).T
    of_row = torch.from_numpy(slots.repeat(counts))
    weight, bias, x = torch.randn(4, 4, 8), torch.randn(4, 4), torch.randn(len(of_row), 8)
    expected = torch.einsum("rox,rx->ro", weight[of_row], x) + bias[of_row]
    for groups in (kind(*own, CPU) for kind in (Tiles, Runs) for own in ((slots, counts), each(of_row.numpy()))):
        spread, base = groups.spread(x), torch.ones(len(x), 4)
        groups.add(base, spread, weight, bias)
        assert torch.allclose(groups.collect(groups.linear(spread, weight, bias)), expected, atol=1e-5)
        assert torch.allclose(base, 1 + expected, atol=1e-5)


def test_a_grouped_kernel_gets_fewer_than_1024_products():
    """Neither with 600 slots in turn, nor with 2500 slots."""
    for slots in (np.tile(np.arange(600), 2), np.arange(2500)):
        weight, x = torch.randn(int(slots.max()) + 1, 4, 8), torch.randn(len(slots), 8)
        groups = Runs(*each(slots), CPU)
        with patch.object(ways, "grouped_mm", wraps=ways.grouped_mm) as calls:
            mapped = groups.collect(groups.linear(groups.spread(x), weight))
        assert all(len(call.kwargs["offs"]) < 1024 for call in calls.call_args_list)
        assert torch.allclose(mapped, torch.einsum("rox,rx->ro", weight[torch.from_numpy(slots)], x), atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("count", [1, 7, 64, 1500, 5000])
@pytest.mark.parametrize("runs_of", [1, 40])
def test_a_grouped_kernel_maps_rows_as_single_products_do(count, runs_of):
    cuda, chance = torch.device("cuda"), np.random.default_rng(count)
    slots = np.repeat(chance.integers(0, 40, count), runs_of)[:count]
    x, weight, bias = (torch.randn(shape, device=cuda, dtype=torch.bfloat16) for shape in ((count, 64), (40, 64, 24), (40, 24)))
    groups, weight = Runs(*each(slots), cuda), weight.mT  # as slots have them
    assert Runs.takes(cuda, torch.bfloat16, [(64, 24)]), "this GPU has no grouped kernel"
    base = torch.ones(count, 24, device=cuda, dtype=torch.bfloat16)
    groups.add(base, groups.spread(x), weight, bias)
    own = torch.from_numpy(slots).to(cuda)
    wanted = 1 + bias.double()[own] + torch.einsum("roi,ri->ro", weight.double()[own], x.double())
    assert ((base.double() - wanted).abs() < 0.02 * wanted.abs() + 0.15).all()


@needs_kernel()
def test_the_compiled_kernel_takes_numbers_that_it_reads_and_widths_that_fill_its_registers():
    assert InPlace.takes(CPU, torch.float32, [(16, 31), (16,)])
    for dtype in (torch.float16, torch.float64):
        assert not InPlace.takes(CPU, dtype, [(32, 32)])
    for shape in ((16, 31), (24, 32)):
        assert not InPlace.takes(CPU, torch.bfloat16, [shape])


def test_a_grouped_kernel_is_used_only_for_fitting_devices_and_widths(monkeypatch):
    cuda = torch.device("cuda")
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[-1])
    assert Runs.takes(cuda, torch.bfloat16, [(768, 32)])
    assert not Runs.takes(cuda, torch.bfloat16, [(768, 4)])  # 8 bytes
    assert not Runs.takes(cuda, torch.float32, [(768, 32)])
    assert not Runs.takes(CPU, torch.bfloat16, [(768, 32)])
    capability.append((8, 0))
    assert not Runs.takes(cuda, torch.bfloat16, [(768, 32)])  # an older GPU runs a loop that waits for the device


def _lying(slots, outputs, inputs, dtype=torch.float32):
    """Returns weights as slots have them: stored as inputs x outputs."""
    return torch.randn(slots, inputs, outputs, dtype=dtype).mT


@needs_kernel()
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 2 * MOST_ROWS + 3), min_size=1, max_size=6),
    slots=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 70), st.sampled_from([16, 48, 256, 272]), st.sampled_from([16, 32, 80])),
    biased=st.booleans(),
    function=st.sampled_from([None, "relu", "gelu"]),
    rows=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_kernel_maps_as_tiles_do(lengths, slots, widths, biased, function, rows, seed):
    torch.manual_seed(seed)
    inputs, rank, outputs = widths
    of_text = np.random.default_rng(seed).integers(0, slots, len(lengths))
    of_row = np.repeat(of_text, 1 if rows else lengths)
    x = torch.randn(len(of_row), 2 * inputs)[:, inputs:]
    down, up = _lying(slots, rank, inputs), _lying(slots, outputs, rank)
    biases = [torch.randn(slots, width) if biased else None for width in (rank, outputs)]
    both = [Map(own, bias) for own, bias in zip((down, up), biases, strict=True)]
    base, tiles, found = torch.randn(len(x), 3 * outputs), Tiles(*each(of_row), CPU), {}
    for instructions in range(1, ways.kernel().instructions + 1):
        with patch.object(ways.kernel(), "instructions", instructions), patch.object(ways, "WORTH", seed % 2 * 10**9):
            for groups in (tiles, InPlace(of_text, np.ones_like(of_text) if rows else np.array(lengths))):
                spread, changed = groups.spread(x), base.clone()
                groups.add_low_rank(changed[:, outputs : 2 * outputs], spread, *both, function)
                groups.add(changed[:, :outputs], groups.linear(spread, down, biases[0]), up)
                found[type(groups)] = [changed, groups.collect(groups.linear(spread, down, biases[0]))]
        for mine, expected in zip(found[InPlace], found[Tiles], strict=True):
            assert torch.allclose(mine, expected, atol=1e-3, rtol=1e-4)


@needs_kernel()
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 2 * MOST_ROWS + 3), min_size=1, max_size=6),
    widths=st.tuples(st.integers(1, 35), st.sampled_from([16, 48, 272]), st.sampled_from([16, 32, 80])),
    biased=st.booleans(),
    function=st.sampled_from([None, "relu", "gelu"]),
    seed=st.integers(0, 99),
)
def test_the_kernel_rounds_to_bf16_only_what_it_writes(lengths, widths, biased, function, seed):
    if torch.bfloat16 not in TYPES:
        pytest.skip("the kernel takes no bf16 on this processor, or with this compiler")
    torch.manual_seed(seed)
    inputs, rank, outputs = 2 * widths[0], *widths[1:]
    x, base = (torch.randn(sum(lengths), 2 * width).bfloat16()[:, width:] for width in (inputs, outputs))
    weights = [_lying(4, rank, inputs, torch.bfloat16), _lying(4, outputs, rank, torch.bfloat16)]
    biases = [torch.randn(4, width).bfloat16() if biased else None for width in (rank, outputs)]
    both = [Map(*own) for own in zip(weights, biases, strict=True)]
    wide = [Map(own.float(), bias if bias is None else bias.float()) for own, bias in both]
    groups = InPlace(np.random.default_rng(seed).integers(0, 4, len(lengths)), np.array(lengths))
    inner, expected = groups.linear(x.float(), *wide[0]), base.float()
    assert torch.allclose(groups.linear(x, *both[0]).float(), inner, rtol=2**-8, atol=1e-3)
    groups.add_low_rank(expected, x.float(), *wide, function)
    groups.add_low_rank(base, x, *both, function)
    assert ((base - expected).abs() <= 2**-7 * expected.abs() + 2**-8 * 4 * rank**0.5 * inner.abs().max()).all()


@needs_kernel()
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernel_gives_a_row_the_same_bits_beside_any_neighbours(dtype):
    down, up = Map(_lying(3, 32, 64, dtype)), Map(_lying(3, 64, 32, dtype))
    x = torch.randn(130, 64, dtype=dtype)
    together, alone = x.clone(), x.clone()
    InPlace(np.array([2, 0, 1]), np.array([7, 100, 23])).add_low_rank(together, x, down, up)
    for row, slot in enumerate(np.repeat([2, 0, 1], [7, 100, 23])):
        InPlace(np.array([slot]), ONE).add_low_rank(alone[row : row + 1], x[row : row + 1], down, up)
    assert torch.equal(together, alone)


@needs_kernel()
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_no_number_does_not_become_one(dtype):
    down, up = Map(torch.full((1, 4, 16), torch.nan, dtype=dtype).mT), Map(torch.ones(1, 16, 16, dtype=dtype).mT)
    out = torch.zeros(1, 16, dtype=dtype)
    InPlace(np.array([0]), ONE).add_low_rank(out, torch.ones(1, 4, dtype=dtype), down, up, function="relu")
    assert out.isnan().all()


@needs_kernel()
@pytest.mark.parametrize("kind", ["lora", "bottleneck"])
@pytest.mark.parametrize(
    ("hidden", "dtype", "has_bf16", "has_amx", "groups"),
    [
        (32, torch.float32, False, False, InPlace),
        (32, torch.bfloat16, True, False, InPlace),
        (32, torch.bfloat16, True, True, Tiles),
        (32, torch.bfloat16, False, False, Tiles),
        (40, torch.float32, True, False, Tiles),  # it takes multiples of 16
    ],
)
def test_the_kernel_takes_adapters_of_any_rank(monkeypatch, kind, hidden, dtype, has_bf16, has_amx, groups):
    monkeypatch.setattr(ways.kernel(), "has_bf16", has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    for rank in (1, 8, 17, MOST_RANK + 20):
        layout = Layout(kind, rank, hidden, 2, ("attention_out", "ffn_in", "ffn_out"), 48)
        assert layout.way(CPU, dtype) is groups

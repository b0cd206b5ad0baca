import numpy as np
import pytest
import torch

from hplm.adapters import runs
from hplm.adapters.layout import Layout
from hplm.adapters.runs import Runs
from hplm.adapters.tiles import Tiles

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [Tiles, Runs])
@pytest.mark.parametrize(
    "slots",
    [[2], [1] * 9, [0, 1, 0, 3, 3, 3, 3, 3, 3, 3, 1, 0], list(range(4)) * 5, [0] * 50 + [1]],
    ids=["one row", "one slot", "mixed", "interleaved", "skewed"],
)
def test_every_row_gets_the_weights_of_its_own_slot(slots, kind):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 4, 8, generator=generator), torch.randn(4, 4, generator=generator)
    x = torch.randn(len(slots), 8, generator=generator)
    groups = kind(np.array(slots), CPU)
    spread, base = groups.spread(x), torch.ones(len(slots), 4)
    mapped = groups.collect(groups.linear(spread, weight, bias))
    groups.add(base, spread, weight, bias)
    for row, slot in enumerate(slots):
        own = weight[slot] @ x[row]
        assert torch.allclose(mapped[row], own + bias[slot], atol=1e-5)
        assert torch.allclose(base[row], 1 + own + bias[slot], atol=1e-5)


@pytest.mark.parametrize(
    "slots, copies",
    [
        ([2, 2, 3, 3, 4, 4], []),
        ([3, 3, 0, 0, 2, 2], ["weights"]),
        ([1, 1, 1, 1, 2, 2], ["weights"]),  # three tiles
        ([1] * 9 + [2], ["rows", "weights"]),
        ([0, 1, 0, 1, 0, 1, 0, 1], ["rows"]),
    ],
    ids=str,
)
def test_rows_and_weights_that_lie_together_are_not_copied(slots, copies):
    weight, x = torch.randn(5, 3, 8), torch.randn(len(slots), 8)
    groups = Tiles(np.array(slots), CPU)
    copied = {
        "rows": groups.spread(x).data_ptr() != x.data_ptr(),
        "weights": groups.pick(weight).untyped_storage().data_ptr() != weight.untyped_storage().data_ptr(),
    }
    assert [name for name, happened in copied.items() if happened] == copies
    mapped = groups.collect(groups.linear(groups.spread(x), weight, torch.zeros(5, 3)))
    for row, slot in enumerate(slots):
        assert torch.allclose(mapped[row], weight[slot] @ x[row], atol=1e-5)


def test_rows_are_sorted_only_if_slots_alternate_often():
    x = torch.randn(12, 8)
    assert Runs(np.array([2] * 4 + [0] * 5 + [1] * 3), CPU).spread(x) is x
    assert Runs(np.array([0, 1] * 6), CPU).spread(x) is not x


def test_a_grouped_kernel_gets_fewer_than_1024_products(monkeypatch):
    """Neither with 600 slots in turn, nor with 2500 slots."""
    grouped_mm = runs.grouped_mm

    def limited(x, weight, offs):
        assert len(offs) < 1024
        return grouped_mm(x, weight, offs=offs)

    monkeypatch.setattr(runs, "grouped_mm", limited)
    for slots in (np.tile(np.arange(600), 2), np.arange(2500)):
        weight, x = torch.randn(int(slots.max()) + 1, 4, 8), torch.randn(len(slots), 8)
        groups = Runs(slots, CPU)
        mapped = groups.collect(groups.linear(groups.spread(x), weight))
        assert torch.allclose(mapped, torch.einsum("rox,rx->ro", weight[torch.from_numpy(slots)], x), atol=1e-5)


def test_a_grouped_kernel_is_used_only_for_fitting_devices_and_widths(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert runs.fits(cuda, torch.bfloat16, [768, 32])
    assert not runs.fits(cuda, torch.bfloat16, [768, 4])  # 8 bytes
    assert not runs.fits(cuda, torch.float32, [768, 32])
    assert not runs.fits(CPU, torch.bfloat16, [768, 32])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not runs.fits(cuda, torch.bfloat16, [768, 32])  # an older GPU runs a loop that waits for the device
    layout = Layout("bottleneck", 32, 768, 1, ("attention_out",))
    assert isinstance(layout.group(np.zeros(3, dtype=np.int64), CPU, torch.float32), Tiles)

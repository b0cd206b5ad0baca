"""Slots: which records are evicted, and that a batch waits for its weights layer by layer. Broken records are refused."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hplm.adapters.layout import Layout
from hplm.adapters.records import Records, pack, write
from hplm.adapters.slots import Slots, SlotsTaken
from hplm.errors import Broken
from tests.support.message import mentioning

LAYOUT = Layout("bottleneck", 3, 8, 2, ("attention_out",))
CPU = torch.device("cpu")


@pytest.fixture
def kept(tmp_path):
    """A folder with five records. All have different numbers."""
    made = [write(tmp_path, pack({"adapter": (LAYOUT, LAYOUT.unpack(_numbers(i)))}, {}))["adapter"] for i in range(5)]
    return SimpleNamespace(files=Records(tmp_path), made=made)


def _numbers(i):
    return (torch.arange(LAYOUT.layers * LAYOUT.layer_size).view(LAYOUT.layers, -1) * 5.0 % 512 + i).half()


@pytest.mark.parametrize("harm", [{"checksum": 7}, {"offset": 8}, {"offset": 10**6}, {"file": "none"}], ids=str)
def test_a_record_that_is_not_what_the_snapshot_says_is_never_used_and_takes_no_slot(kept, harm):
    slots, other = Slots(LAYOUT, 1, CPU, torch.float32), replace(kept.made[3], **harm)
    for use in (lambda: kept.files.weights(other), lambda: slots.hold(other, kept.files)):
        with pytest.raises(Broken, match=mentioning(other.file, "hplm restore")):
            use()
    assert slots.hold(kept.made[4], kept.files) == 0
    slots.fill()
    assert _holds(slots, 0, 4, kept)


def _holds(slots, slot, i, kept):
    own = kept.files.weights(kept.made[i])
    return all(
        torch.equal(part := layer[name][slot][tuple(map(slice, tensor.shape))], tensor.to(part.dtype))
        and layer[name][slot].count_nonzero() == tensor.count_nonzero()
        for layer, stored in zip(slots.layers, own, strict=True)
        for name, tensor in stored.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slots_evict_the_least_recently_used_and_never_a_pinned_one(kept, dtype):
    slots = Slots(LAYOUT, 2, CPU, dtype)

    def hold(i):
        slot = slots.hold(kept.made[i], kept.files)
        slots.fill()
        assert _holds(slots, slot, i, kept)
        return slot

    first, second = hold(0), hold(1)
    with pytest.raises(SlotsTaken):
        slots.hold(kept.made[2], kept.files)
    slots.release(second)
    assert hold(2) == second and _holds(slots, first, 0, kept)
    slots.release(first)
    slots.release(second)
    assert hold(2) == second  # still there
    slots.release(second)
    assert hold(1) == first  # though both were free: 2 was used later than 0


def test_records_of_a_batch_arrive_together_and_those_of_a_dropped_one_do_not(kept):
    slots = Slots(LAYOUT, 2, CPU, torch.float32)
    lost, stays = slots.hold(kept.made[0], kept.files), slots.hold(kept.made[1], kept.files)
    slots.release(lost)
    slots.release(stays)
    assert slots.hold(kept.made[2], kept.files) == lost and slots.hold(kept.made[1], kept.files) == stays
    slots.fill()
    assert _holds(slots, lost, 2, kept) and _holds(slots, stays, 1, kept)


class Watched:
    """Stands in for `Copies`, and records the order of events as on a CUDA stream."""

    def __init__(self, events):
        self.events = events

    @contextmanager
    def under_way(self):
        self.events.append("begin")
        yield
        self.events.append("end")

    def record_event(self):
        number = sum(event.startswith("record") for event in self.events)
        self.events.append(f"record {number}")
        told = {name: partial(self.events.append, f"{name} {number}") for name in ("wait", "synchronize")}
        return SimpleNamespace(**told)


def test_layers_are_marked_one_by_one_and_copies_wait_until_records_are_read(kept, monkeypatch):
    events = []
    monkeypatch.setattr("hplm.adapters.slots.Copies", lambda device: Watched(events))
    slots = Slots(LAYOUT, 4, CPU, torch.float32)
    slots.hold(kept.made[0], kept.files)
    recorded = slots.fill()
    assert len(recorded) == LAYOUT.layers and events == ["begin", "record 0", "record 1", "end"]
    slots.hold(kept.made[0], kept.files)
    assert slots.fill() == recorded and len(events) == 4  # copies nothing: earlier copies have their events
    for other in (1, 2):
        slots.hold(kept.made[other], kept.files)
        assert events[4:] == ["synchronize 0", "synchronize 1"]

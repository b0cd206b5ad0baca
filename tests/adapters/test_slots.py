"""Banks and slots: whose record is read, which records are evicted, and that a batch waits for its weights layer by layer."""

import pytest
import torch

from hplm.adapters.bank import Bank, record_bytes, write_bank, write_record
from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.adapters.slots import Slots, SlotsTaken
from hplm.errors import Broken
from tests.support.message import mentioning

LAYOUT = Layout("bottleneck", 3, 8, 2, ("attention_out",))
CPU = torch.device("cpu")


@pytest.fixture
def bank(tmp_path):
    """A bank whose record i belongs to uid 100 + i, version 7. All records have different numbers."""
    records = [(100 + i, 7, _numbers(i)) for i in range(5)]
    write_bank(tmp_path / LAYOUT.file_name, LAYOUT, records)
    return Bank(tmp_path / LAYOUT.file_name)


def _numbers(i):
    return torch.arange(LAYOUT.layers * LAYOUT.layer_size).view(LAYOUT.layers, -1) * 5.0 % 512 + i


def _record(i):
    return Record(LAYOUT.file_name, i, 100 + i, 7)


def test_a_record_comes_back_in_its_shapes(bank):
    layers = bank.weights(_record(3))
    assert [{name: tuple(t.shape) for name, t in layer.items()} for layer in layers] == [LAYOUT.shapes] * 2
    for layer, stored in zip(layers, LAYOUT.unpack(_numbers(3).half()), strict=True):
        assert all(torch.equal(tensor, stored[name]) for name, tensor in layer.items())


def test_a_record_of_another_tenant_is_never_used(bank):
    for index, uid, version in ((3, 102, 7), (3, 103, 8), (5, 105, 7)):
        with pytest.raises(Broken, match=mentioning(index, LAYOUT.file_name)):
            bank.weights(Record(LAYOUT.file_name, index, uid, version))


def test_damage_fails_only_its_own_records(bank):
    data = bytearray(bank.path.read_bytes())
    data[4096 + record_bytes(LAYOUT) + 100] ^= 1
    bank.path.write_bytes(data[:-1])
    damaged = Bank(bank.path)
    for broken in (1, 4):
        with pytest.raises(Broken, match=mentioning(broken, LAYOUT.file_name)):
            damaged.weights(_record(broken))
    assert damaged.weights(_record(2)) and damaged.weights(_record(3))
    with pytest.raises(Broken, match=mentioning(bank.path.with_name("none.bank"))):
        Bank(bank.path.with_name("none.bank"))


def test_a_bank_grows_and_its_readers_see_it(bank):
    write_record(bank.path, LAYOUT, 5, 200, 1, torch.full((LAYOUT.layers, LAYOUT.layer_size), 9.0))
    assert (bank.weights(Record(LAYOUT.file_name, 5, 200, 1))[0]["attention_out/down"] == 9).all()
    write_record(bank.path, LAYOUT, 2, 201, 1, torch.full((LAYOUT.layers, LAYOUT.layer_size), 8.0))
    with pytest.raises(Broken, match=mentioning(2, LAYOUT.file_name)):
        bank.weights(_record(2))
    assert (bank.weights(Record(LAYOUT.file_name, 2, 201, 1))[1]["attention_out/up_bias"] == 8).all()
    assert bank.weights(_record(4))


@pytest.mark.parametrize("broken", [b'"size": null', b'"size": 3.0', b'"size": true', b'"size": -3'])
def test_a_bank_whose_header_has_no_whole_numbers_is_broken(bank, broken):
    head, rest = bank.path.read_bytes()[:4096], bank.path.read_bytes()[4096:]
    bank.path.write_bytes(head.replace(b'"size": 3', broken).rstrip(b"\0").ljust(4096, b"\0") + rest)
    with pytest.raises(Broken, match=mentioning(bank.path)):
        Bank(bank.path)


def _holds(slots, slot, i, bank):
    own = bank.weights(_record(i))
    return all(
        torch.equal(layer[name][slot][tuple(map(slice, tensor.shape))], tensor.float())
        and layer[name][slot].count_nonzero() == tensor.count_nonzero()
        for layer, stored in zip(slots.layers, own, strict=True)
        for name, tensor in stored.items()
    )


def test_slots_evict_the_least_recently_used_and_never_a_pinned_one(bank):
    slots = Slots(bank.layout, 2, CPU, torch.float32)

    def hold(i):
        slot = slots.hold(_record(i), bank)
        slots.fill()
        assert _holds(slots, slot, i, bank)
        return slot

    first, second = hold(0), hold(1)
    with pytest.raises(SlotsTaken):
        slots.hold(_record(2), bank)
    slots.release(second)
    assert hold(2) == second and _holds(slots, first, 0, bank)
    slots.release(first)
    slots.release(second)
    assert hold(2) == second  # still there
    slots.release(second)
    assert hold(1) == first  # though both were free: 2 was used later than 0


def test_records_of_a_batch_arrive_together_and_those_of_a_dropped_one_do_not(bank):
    slots = Slots(bank.layout, 2, CPU, torch.float32)
    lost, kept = slots.hold(_record(0), bank), slots.hold(_record(1), bank)
    slots.release(lost)
    slots.release(kept)
    assert slots.hold(_record(2), bank) == lost and slots.hold(_record(1), bank) == kept
    slots.fill()
    assert _holds(slots, lost, 2, bank) and _holds(slots, kept, 1, bank)
    slots = Slots(bank.layout, 4, CPU, torch.float32)
    held = [slots.hold(_record(i), bank) for i in (3, 1, 3, 4)]
    slots.fill()
    assert held[0] == held[2] and all(_holds(slots, slot, i, bank) for slot, i in zip(held, (3, 1, 3, 4), strict=True))


def test_a_broken_record_takes_no_slot(bank):
    slots = Slots(bank.layout, 1, CPU, torch.float32)
    with pytest.raises(Broken):
        slots.hold(Record(LAYOUT.file_name, 0, 1, 1), bank)
    assert slots.hold(_record(4), bank) == 0
    slots.fill()
    assert _holds(slots, 0, 4, bank)


class Watched:
    """Stands in for `Copies`, and records the order of events as on a CUDA stream."""

    are_at_once = False

    def __init__(self, events):
        self.events = events

    def __enter__(self):
        self.events.append("begin")

    def __exit__(self, *exception):
        self.events.append("end")

    def under_way(self):
        return self

    def mark(self):
        number = sum(event.startswith("mark") for event in self.events)
        self.events.append(f"mark {number}")
        return Moment(self.events, number)


class Moment:
    def __init__(self, events, number):
        self.events, self.number = events, number

    def wait(self):
        self.events.append(f"wait {self.number}")

    def synchronize(self):
        self.events.append(f"synchronize {self.number}")


def test_layers_are_marked_one_by_one_and_copies_wait_until_records_are_read(bank, monkeypatch):
    events = []
    monkeypatch.setattr("hplm.adapters.slots.Copies", lambda device: Watched(events))
    slots = Slots(bank.layout, 4, CPU, torch.float32)
    slots.hold(_record(0), bank)
    marks = slots.fill()
    assert len(marks) == LAYOUT.layers and events == ["begin", "mark 0", "mark 1", "end"]
    slots.hold(_record(0), bank)
    slots.fill()  # copies nothing, but marks earlier copies
    assert events[4:] == ["begin", "mark 2", "mark 3", "end"]
    for other in (1, 2):
        slots.hold(_record(other), bank)
        assert events[8:] == ["synchronize 3"]

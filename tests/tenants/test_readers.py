"""Readers of a live state: when they see a change, and which files they keep using."""

import os
import time
from contextlib import closing

import msgspec
import pytest
import torch

from builder.publish.live import add_domain
from builder.store.store import TenantVersion
from hplm.engine.backbone import Backbone
from hplm.engine.laid import StagingSettings
from hplm.engine.staging import EncoderStager
from hplm.errors import Draining, InvalidInput, NoTenant
from hplm.lookup import views
from hplm.lookup.views import KEPT_SECONDS, RegistryWatcher
from hplm.options import LEASE_SECONDS
from hplm.plot.rows import StoredRows
from hplm.registry import follower, lease
from hplm.registry.folder import Folder
from hplm.registry.follower import FIRST_PAUSE, LONGEST_PAUSE
from hplm.tenants.manager import Manager
from hplm.tenants.state_folder import StateFolder
from testing.random_store import random_table, random_tenant
from testing.toy import WORDS
from tests.engine.asker import Asker, texts_of
from tests.places import knowledge, served
from tests.support.faulty_store import FaultyStore
from tests.support.message import mentions as names_in
from tests.support.wait import Clock, Hold, eventually

pytestmark = pytest.mark.slow


class Quick(Clock):
    """A clock by which managers wait without any time, while readers have the machine's."""

    time = staticmethod(time.time)


def readers_of(live):
    return list(live.state.readers.glob("[!.]*"))


def until_somebody_reads(live):
    eventually(lambda: readers_of(live))


@pytest.mark.parametrize("trouble", ["a long check", "an error"])
def test_a_reader_that_cannot_take_a_change_writes_on_and_is_late(place, trouble):
    """A user who deletes a tenant or revokes a key must learn that this server still serves it."""
    live, hold = Manager.open(*place[1:], clock=Quick()), Hold()

    class Stuck(Backbone):
        def refresh(self):
            hold.pass_through()
            raise TypeError("a field that is not known")

    with closing(RegistryWatcher(Stuck(live.folder, place[2]))), hold:
        until_somebody_reads(live)
        live.add("new-a", knowledge(place[0], "new-a"))
        hold.until_reached()
        if trouble == "an error":
            hold.open()
        (reader,) = readers_of(live)
        before = reader.stat().st_mtime_ns
        eventually(lambda: reader.stat().st_mtime_ns > before)
        assert reader.read_text() == "0\n"
        assert live.settle() == [reader.name]


def test_a_reader_that_was_silent_for_a_moment_is_waited_for(place):
    """After the machine was stopped, all readers were silent. Only killed ones stay silent."""

    class Awakening(Clock):
        def sleep(self, seconds):
            super().sleep(seconds)
            if self.seconds > began + 0.3:  # it writes again, as readers do
                paused.write_text(f"{takes}\n")
                os.utime(paused, (self.seconds,) * 2)

    takes, began = 0, time.time()
    live = Manager.open(*place[1:], clock=Awakening(began))
    generation = live.limit("tenant-0", rate=5.0) and live.state.current()
    live.state.readers.mkdir(parents=True, exist_ok=True)
    paused, killed = (live.state.readers / name for name in ("here-1-a", "here-2-b"))
    for reader in (paused, killed):
        reader.write_text("0\n")
        os.utime(reader, (time.time() - 20,) * 2)
    assert live.settle() == ["here-1-a"]
    takes = generation
    assert live.settle() == []


def test_a_reader_continues_to_write_after_the_disk_was_full(place, live, caplog):
    """Its first two tries fail, and the log says so once."""
    first, second = (FaultyStore(live.state.folder, decides="CURRENT") for _ in range(2))
    with first.at(1, FaultyStore.fail), second.at(1, FaultyStore.fail), closing(RegistryWatcher(served(place))):
        until_somebody_reads(live)
        live.add("new-a", knowledge(place[0], "new-a"))
        assert live.settle() == []
    assert not readers_of(live) and second.calls and caplog.text.count("No space left") == 1


def test_a_ticket_of_a_skipped_generation_is_valid(place, live, monkeypatch):
    """Two changes come between two looks of the upper half. Lookup has seen the first one, the upper half has not."""
    backbone = served(place)
    generations = [live.add(name, knowledge(place[0], name)).generation for name in ("new-a", "new-b", "new-c")]
    pointer = live.registry.pointer()
    publish(live, pointer, generations[2])  # whose snapshot is missing
    with closing(RegistryWatcher(backbone)):
        between = backbone.at(generations[1])
        assert {tenant.id for tenant in between.snapshot.tenants} >= {"new-a", "new-b"}
        with pytest.raises(NoTenant):
            between.snapshot.find("new-c")
        live.state.current_file.write_bytes(pointer.written())
        assert backbone.at(generations[2]) is backbone.view and backbone.at(generations[1]) is between
        monkeypatch.setattr(views, "OPENING_SECONDS", 0.1)
        with pytest.raises(Draining):
            backbone.at(generations[2] + 1)


def test_requests_do_not_wait_for_a_state_that_hangs(place, live, monkeypatch):
    """The thread that follows it does, and those who name a generation that it cannot open are refused, all together."""
    backbone, hold = served(place), Hold()
    generation = live.add("new-a", knowledge(place[0], "new-a")).generation
    monkeypatch.setattr(StateFolder, "pointer", lambda *_: hold.pass_through())
    monkeypatch.setattr(Folder, "get", lambda *_: hold.pass_through())
    monkeypatch.setattr(views, "OPENING_SECONDS", 0.1)
    monkeypatch.setattr(follower, "ENDING_SECONDS", 0.1)
    with hold, closing(RegistryWatcher(backbone)):
        hold.until_reached()
        assert backbone.view.snapshot.find("tenant-0")
        with pytest.raises(Draining):
            backbone.at(generation)
        monkeypatch.setattr(views, "OPENING_SECONDS", 0.0)
        with pytest.raises(Draining):
            backbone.at(generation)


class Noted(StateFolder):
    """A state that notes which generations are read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.read = []

    def load(self, generation):
        self.read.append(generation)
        return super().load(generation)


def test_a_snapshot_is_not_read_again_while_nothing_changes(place, live, caplog):
    """At thousands of tenants that takes a third of a second, and a reader looks five times a second."""
    older, newer = (live.add(name, knowledge(place[0], name)).generation for name in ("new-a", "new-b"))
    clock = Clock(100.0)
    backbone = served(place, clock=clock)
    backbone.state = noted = Noted(live.state.folder)
    pointer = live.registry.pointer()
    publish(live, pointer, older)  # as if a state was put back while it is served
    for _ in range(20):
        backbone.refresh()
    assert not noted.read and backbone.view.snapshot.generation == newer
    assert names_in(caplog.text, "toy", older, newer)
    publish(live, pointer, newer + 1)  # whose snapshot is missing
    for _ in range(2):
        with pytest.raises(InvalidInput):
            backbone.refresh()
        for _ in range(20):
            backbone.refresh()
        assert backbone.is_behind
        clock.seconds += LONGEST_PAUSE
    assert noted.read == [newer + 1] * 2
    publish(live, pointer, newer)
    backbone.refresh()
    assert len(noted.read) == 2 and not backbone.is_behind


@pytest.mark.parametrize("copied", [False, True])
def test_a_generation_that_cannot_be_opened_does_not_hold(place, live, copied, monkeypatch):
    """Between two tries too: a key that it revokes is still taken, and for no longer than the lease."""
    clock = Clock(100.0)
    backbone = served(place, clock=clock)
    if copied:
        monkeypatch.setattr(backbone, "mirror", object())
    before, pointer = backbone.generation, live.registry.pointer()
    publish(live, pointer, 3)  # whose snapshot is missing
    with pytest.raises(InvalidInput):
        backbone.refresh()
    clock.seconds += FIRST_PAUSE / 2
    lease.save(backbone.state.seen, lease.boot_time(clock))
    aged = backbone.age
    assert not backbone.refresh()
    assert backbone.generation == before and backbone.age == aged > 0
    clock.seconds += pointer.lease_s
    assert backbone.is_stale


def test_a_generation_that_requests_wait_for_and_nobody_can_read_is_given_up(place, live, monkeypatch):
    """Otherwise each look would fail, and no table of a deleted tenant would be closed again."""
    for name in ("new-a", "new-b"):
        live.add(name, knowledge(place[0], name))
    backbone = served(place)
    publish(live, live.registry.pointer(), 2)  # and the snapshot of 3 is missing
    monkeypatch.setattr(views, "OPENING_SECONDS", 0.0)
    backbone.soon = lambda: None
    with pytest.raises(Draining):
        backbone.at(3)
    with pytest.raises(InvalidInput):
        backbone.refresh()
    monkeypatch.setattr(views, "KEPT_SECONDS", 0.0)
    backbone.refresh()


def publish(live, pointer, generation):
    again = msgspec.structs.replace(pointer, generation=generation, snapshots={**pointer.snapshots, 3: "3-missing"})
    live.state.current_file.write_bytes(again.written())


def test_memory_of_removed_layouts_is_freed(place, live):
    """It is allocated again when a layout returns, and its counters continue."""
    clock, lora = Clock(100.0), "lora-2x2-query+ffn_in"
    backbone = served(place, clock=clock)
    stager = EncoderStager(backbone, StagingSettings(4, torch.device("cpu"), torch.float32))

    def staged(tenant):
        """Returns the bytes of the slots, and how often LoRA was missing in them."""
        backbone.refresh()
        batch = stager.stage(texts_of(backbone, tenant, [WORDS[0]]), pytest.fail)
        stager.release(batch.held)
        return stager.device_bytes, sum(slots.misses for layout, slots in stager.slots().items() if layout.name == lora)

    before, _ = staged("tenant-0")
    live.add("new-c", knowledge(place[0], "new-c"))
    bytes, missed = staged("new-c")
    assert bytes > before and missed == 1
    live.delete("new-c")
    assert staged("tenant-0") == (bytes, 1), "a ticket may still name it"
    clock.seconds += KEPT_SECONDS
    assert staged("tenant-0") == (before, 1)
    live.add("new-c", knowledge(place[0], "new-c"))
    assert staged("new-c") == (bytes, 2)


def add_lawyer(store, live):
    """Adds a table, and a tenant of it."""
    random_table(store, "law", 1, ("root", 1), 2000, seed=3)
    add_domain(live, store, "law")
    random_tenant(store, TenantVersion("lawyer", 1, "law", 1, "classify", ["x", "y"], 4), 0.3, seed=60)
    live.add("lawyer", knowledge(store, "lawyer"))


def test_requests_do_not_wait_while_a_table_is_read_into_memory(place, live, monkeypatch):
    asker = Asker(live.folder, place[2], plot_preload="true")
    hold, preload = Hold(), StoredRows.preload
    monkeypatch.setattr(StoredRows, "preload", lambda *given: hold.pass_through() or preload(*given))
    add_lawyer(place[0], live)
    asker.backbone.refresh()
    with hold:
        answers = [asker.wait(asker.ask(tenant, [WORDS[0]])) for tenant in ("lawyer", "tenant-0")]
        hold.until_reached()
        assert not any(isinstance(answer, Exception) for answer in answers)
    asker.close()


def test_a_state_that_is_put_back_renews_no_lease_because_its_changes_do_not_arrive(place, live):
    clock, before = Clock(), live.state.current_file.read_bytes()
    live.add_key("tenant-0")
    backbone = Backbone(live.folder, place[2], clock=clock)
    live.state.current_file.write_bytes(before)
    clock.seconds += 2 * LEASE_SECONDS
    backbone.refresh()
    assert backbone.is_stale

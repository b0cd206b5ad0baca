"""A follower that is interrupted at any step leaves the generation before or the new one, and the next one goes on."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hplm.follow import records, tables
from hplm.follow.copy import Copy
from hplm.follow.records import Records
from hplm.follow.source import Source
from hplm.follow.tables import Arrivals
from hplm.follow.troubles import Troubles
from hplm.plot.table import Table
from hplm.tenants.followed import Followed
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state import State
from tests.follow.faulty import faulty
from tests.follow.machine import Machine, same, step
from tests.follow.test_following import add_law
from tests.places import answer, knowledge, learn, make_place
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

MOMENTS = [
    (Copy, "_taken"),
    (Records, "bring"),
    (Records, "_write"),
    (records, "write_bank"),
    (records, "write_packed"),
    (Snapshot, "save"),
    (Followed, "save"),
    (Arrivals, "take"),
    (State, "publish"),
    (Records, "rest"),
    (Copy, "_sweep"),
]


class Cut(BaseException):
    pass


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


@pytest.mark.parametrize("owner, moment", MOMENTS, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interruption_at_any_step_leaves_a_generation_that_is_served(place, tmp_path, monkeypatch, owner, moment, after):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    with faulty(state) as source:
        machine = Machine(repository, tmp_path / "copy", source.url)
        machine.follow()
        old = {tenant.id: machine.answer(tenant.id) for tenant in machine.served().tenants}
        learn(store, "new-a", 2, seed=60)
        live.update("new-a", knowledge(store, "new-a"))
        live.add("new-c", knowledge(store, "new-c"))
        live.delete("tenant-1")
        add_law(place, live)
        new = {tenant.id: answer(place, tenant.id) for tenant in live.current().tenants}
        real, cuts = getattr(owner, moment), []

        def cut(*given, **options):
            if after:
                real(*given, **options)
            cuts.append(moment)
            raise Cut

        with machine.following() as following:
            until_arrived(following)
            with monkeypatch.context() as patch, contextlib.suppress(Cut):
                patch.setattr(owner, moment, cut)
                step(following)
                step(following)
        assert cuts
        for tenant in machine.served().tenants:  # each has its old knowledge or its new one
            found = machine.answer(tenant.id)
            assert any(torch.equal(known[tenant.id], found) for known in (old, new) if tenant.id in known)
        machine.follow()
        assert same((repository, state), machine)
        assert not list(machine.state.folder.glob("arriving/*"))


def until_arrived(following):
    """Lets the thread bring the tables of the newest generation, without taking anything over."""
    copy = following.copy
    wanted = copy._taken(copy._source.current("toy"))
    copy._arrivals.want([branch for branch in wanted.branches if not copy._is_here(branch)])
    eventually(lambda: copy._arrivals.whole)


TABLE_MOMENTS = [
    *((Arrivals, "_begin", 1), (Arrivals, "_bring_file", 1), (Arrivals, "_bring_file", 4)),
    *((Table, "verify", 1), (tables, "sync", 1), (tables, "sync", 7), (tables, "sync", 8)),
]


@pytest.mark.parametrize("owner, moment, at", TABLE_MOMENTS, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupted_table_goes_on(place, tmp_path, monkeypatch, owner, moment, after, at):
    """The bringing of a table is cut off at a step, for the `at`-th time that it comes to it."""
    _, repository, state = place
    live = Manager.open(repository, state)
    real, calls = getattr(owner, moment), []

    def cut(*given, **options):
        calls.append(moment)
        if len(calls) == at and not after:
            raise Cut
        done = real(*given, **options)
        if len(calls) == at:
            raise Cut
        return done

    with faulty(state) as source:
        machine = Machine(repository, tmp_path / "copy", source.url)
        machine.follow()
        add_law(place, live)
        (law,) = (branch for branch in live.current().branches if branch.domain == "law")
        with monkeypatch.context() as patch:
            patch.setattr(Arrivals, "_run", lambda _: None)
            said = []
            arrivals = Arrivals(machine.state, Source(source.url), "toy", Troubles(said.append), said.append)
            arrivals.want([law])
            patch.setattr(owner, moment, cut)
            with pytest.raises(Cut):
                arrivals._bring(law)
            arrivals.close()
        assert len(calls) == at
        machine.follow()
        assert same((repository, state), machine)


def test_a_killed_follower_is_followed_by_another_one(place, tmp_path):
    """A real kill, wherever it meets the follower. It is killed as soon as it has begun to write."""
    store, repository, state = place
    live = Manager.open(repository, state)
    with faulty(state) as source:
        machine = Machine(repository, tmp_path / "copy", source.url)
        machine.follow()
        add_law(place, live, ("lawyer", "jurist"))
        for name in ("new-a", "new-b", "new-c"):
            live.add(name, knowledge(store, name))
        for wanted in ("arriving", "adapters/*", "snapshots/1"):
            command = [sys.executable, "-m", "hplm.cli.main", "follow", "--from", source.url, "--repository", str(repository)]
            process = subprocess.Popen([*command, "--state", str(machine.root)], cwd=Path(__file__).parents[2])
            eventually(lambda wanted=wanted: any(machine.state.folder.glob(wanted)))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            for tenant in machine.served().tenants:
                assert torch.equal(machine.answer(tenant.id), answer(place, tenant.id))
        machine.follow()
        assert same((repository, state), machine)


def test_what_an_interrupted_follower_left_is_removed(place, tmp_path, monkeypatch):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    with faulty(state) as source:
        machine = Machine(repository, tmp_path / "copy", source.url)
        machine.follow()
        kept = {file for file in machine.state.folder.rglob("*") if file.is_file()}
        for name in ("plot/old/1/values", "adapters/x.part0.g9.bank", "adapters/y.bank.writing", "snapshots/9.writing"):
            (machine.state.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (machine.state.folder / name).write_bytes(b"0")
        (machine.state.folder / "arriving/old.1.5").mkdir(parents=True)
        monkeypatch.setattr("hplm.follow.copy.REST_SECONDS", 0.0)
        monkeypatch.setattr("hplm.follow.records.REST_SECONDS", 0.0)
        monkeypatch.setattr("hplm.follow.copy.SWEEPING_SECONDS", 0.0)
        with machine.following() as following:
            for _ in range(3):
                step(following)
            eventually(lambda: not list(machine.state.folder.glob("arriving/*")))
        assert {file for file in machine.state.folder.rglob("*") if file.is_file()} == kept

"""Changes of tenants that are interrupted anywhere are complete or undone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from builder.store.store import Store
from hplm.tenants.backup import back_up, restore
from hplm.tenants.manager import Manager
from hplm.tenants.state import State
from testing.random_store import random_table
from tests.places import answer, exported_answer, knowledge, served

pytestmark = pytest.mark.slow


KILLED = """
import os, random, signal, sys, threading, time
from pathlib import Path
from builder.store.store import Store
from hplm.tenants.manager import Manager
from tests.places import knowledge
store, repository, state, delay = Store(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
live, begun = Manager.open(repository, state), threading.Event()
def kill():
    begun.wait()
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
while True:
    live.add("new-a", knowledge(store, "new-a"))
    print("added", flush=True)
    begun.set()
    live.delete("new-a")
    print("deleted", flush=True)
"""


@pytest.mark.parametrize("delay", [0.01, 0.05, 0.15])
def test_after_a_real_kill_no_acknowledged_change_is_undone(place, delay):
    store, repository, state = place
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(store.folder), str(repository), str(state), str(delay)],
        stdout=subprocess.PIPE,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == -signal.SIGKILL
    said = done.stdout.decode().split()
    assert said[0] == "added"
    assert served(place).view.snapshot.generation >= len(said)  # readers have all acknowledged changes
    live = Manager.open(repository, state)
    live.registry.current()  # the next manager finishes a change that was decided but not acknowledged
    changes = [entry["action"].removeprefix("tenant ") for entry in live.registry.audit()]
    assert len(changes) in (len(said), len(said) + 1)
    assert [word.removesuffix("ed").replace("delet", "delete") for word in said] == changes[: len(said)]
    tenants = {tenant.id for tenant in served(place).view.snapshot.tenants}
    assert ("new-a" in tenants) == (len(changes) % 2 == 1)
    live.add("new-b", knowledge(Store(store.folder), "new-b"))
    assert (answer(place, "new-b") == exported_answer(place, "new-b")).all()


def test_new_files_keep_their_names_without_power(place, tmp_path, monkeypatch):
    """A file system may forget a new name until its folder is synced, so that comes before CURRENT names the file."""
    store, repository, state = place
    live, synced, fsync = Manager.open(repository, state), [], os.fsync
    random_table(store, "law", 1, ("root", 1), 500, seed=3)

    def seen(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    live.adopt_domain("law", 1, store.table_folder("law", 1))
    live.add("new-a", knowledge(store, "new-a"))
    named = max(number for number, path in enumerate(synced) if path.name.startswith("CURRENT"))
    own = live.state
    assert {own.snapshots, own.banks, own.tables, own.tables / "law", own.folder} <= set(synced[:named])
    back_up(live, tmp_path / "saved" / "one")
    restore(tmp_path / "saved" / "one", live.exported, State(tmp_path / "again" / "toy"))
    assert {tmp_path / "saved", tmp_path / "again"} <= set(synced)

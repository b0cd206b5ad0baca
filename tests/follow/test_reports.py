"""Two numbers for managers: what followers' readers serve whole, and what they no longer serve."""

import os
import time

import pytest

from hplm.follow.follower import Follower
from hplm.follow.source import Source
from hplm.tenants.manager import Manager
from hplm.tenants.state import REMEMBERED_SECONDS, State, Taken
from tests.follow.machine import step, until_whole
from tests.places import knowledge
from tests.support.message import mentions
from tests.support.wait import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture
def stalling(monkeypatch):
    """A machine that may stand still for minutes between a reader's word and the look at it."""
    monkeypatch.setattr("hplm.tenants.state.ALIVE_SECONDS", 1000.0)


def report(place, name="one"):
    file = place[2] / "toy/readers" / name
    return file.read_text().split() if file.exists() else None


def play(machine, name, generation):
    """Plays a server that reads the copy."""
    machine.state.readers.mkdir(parents=True, exist_ok=True)
    (machine.state.readers / name).write_text(f"{generation}\n")


def test_the_least_that_any_reader_has_taken_is_reported(place, source, machine):
    store, repository, state = place
    live = Manager.open(repository, state)
    with machine.following() as following:
        step(following)
        assert report(place) == ["0", "0"]
        play(machine, "here-1-a", 0)
        play(machine, "here-2-b", 0)
        live.add("new-a", knowledge(store, "new-a"))
        live.add("new-b", knowledge(store, "new-b"))
        until_whole(following)
        step(following)
        assert report(place) == ["0", "2"], "nothing was removed"
        play(machine, "here-1-a", machine.served().generation)
        live.delete("tenant-0")
        until_whole(following)
        step(following)
        assert report(place) == ["0", "2"]
        play(machine, "here-2-b", machine.served().generation)
        step(following)
        assert report(place) == ["2", "2"]
        play(machine, "here-1-a", machine.served().generation)
        step(following)
        assert report(place) == ["3", "3"]


def test_removals_wait_for_the_second_number(place, stalling):
    _, repository, state = place
    live = Manager.open(repository, state)
    live.limit("tenant-0", rate=1.0)
    live.state.readers.mkdir()
    (live.state.readers / "far").write_text("0 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hplm.tenants.state.PATIENCE", 0.2)
        assert live.settle_now(removes=True) == []
        assert live.settle_now() == ["far"]
        (live.state.readers / "far").write_text("1 1\n")
        assert live.settle_now() == []
        (live.state.readers / "near").write_text("0\n")
        assert live.settle_now() == live.settle_now(removes=True) == ["near"]


def test_a_silent_follower_is_late_because_it_may_serve_on(place):
    """A silent reader of this machine has ended. A silent follower may be cut off, with servers that still answer."""
    _, repository, state = place
    live = Manager.open(repository, state)
    live.limit("tenant-0", rate=1.0)
    live.state.readers.mkdir()
    for name, said in (("far", "0 0\n"), ("near", "0\n"), ("left", "-\n")):
        (live.state.readers / name).write_text(said)
        os.utime(live.state.readers / name, (time.time() - 100,) * 2)
    assert live.settle_now(removes=True) == ["far"]
    live.limit("tenant-0", rate=2.0)
    assert [file.name for file in live.state.readers.iterdir()] == ["far"], "the others were forgotten"
    os.utime(live.state.readers / "far", (time.time() - REMEMBERED_SECONDS - 1,) * 2)
    live.limit("tenant-0", rate=3.0)
    assert not list(live.state.readers.iterdir())


def test_the_clock_of_the_file_server_counts(place, monkeypatch, stalling):
    """The manager's clock goes wrong by an hour. A reader that wrote just now is not silent."""
    _, repository, state = place
    live = Manager.open(repository, state)
    live.limit("tenant-0", rate=1.0)
    live.state.readers.mkdir()
    now = time.time
    for ahead in (3600, -3600):
        (live.state.readers / "here-1-a").write_text("0\n")
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda ahead=ahead: now() + ahead)
            patch.setattr("hplm.tenants.state.PATIENCE", 0.2)
            assert live.settle_now() == ["here-1-a"]
            live.state.forget_readers()
    assert (live.state.readers / "here-1-a").exists()


@pytest.mark.parametrize(
    "text, found",
    [("5\n", (5, 5, False)), ("5 7\n", (5, 7, True)), ("-\n", None), ("", None), ("5 x\n", None)],
)
def test_a_file_of_one_number_means_both(tmp_path, text, found):
    (tmp_path / "one").write_text(text)
    taken = Taken.read(tmp_path / "one", time.time())
    assert (taken and (taken.whole, taken.removed, taken.follows)) == found


def test_a_follower_goes_on_until_the_servers_that_it_informs_have_ended(place, source, machine, stalling):
    """All processes of a pod are told to end at once."""
    _, repository, state = place
    follower = Follower(repository, machine.root, lambda: Source(source.url), "one", machine.said.append)
    play(machine, "here-1-a", 0)
    Manager.open(repository, state).limit("tenant-0", rate=1.0)

    def end_the_server(answer):
        if "readers" in answer.path and machine.state.current():
            (machine.state.readers / "here-1-a").unlink(missing_ok=True)

    source.fault = end_the_server
    follower.finish(PATIENCE)
    follower.close()
    assert report(place) == ["-"] and machine.served().find("tenant-0").rate == 1.0


def test_a_follower_takes_leave_if_nothing_is_served_from_its_copy(place, source, machine):
    state = place[2]
    with machine.following() as following:
        step(following)
    following = machine.opened()
    step(following)
    play(machine, "here-1-a", 0)
    following.close()
    assert report(place) == ["0", "0"], "a server still reads the copy"
    (machine.state.readers / "here-1-a").unlink()
    following = machine.opened()
    step(following)
    following.close()
    assert report(place) == ["-"] and State(state / "toy").taken(time.time()) == []


def test_a_source_that_takes_no_reports_is_followed_all_the_same(place, source, machine):
    """Such as `rclone serve http`."""
    store, repository, state = place
    source.fault = lambda answer: setattr(answer, "status", 405 if "readers" in answer.path else answer.status)
    Manager.open(repository, state).add("new-a", knowledge(store, "new-a"))
    with machine.following() as following:
        until_whole(following)
        for _ in range(3):
            step(following)
    assert sum(mentions(line, "405", "managers") for line in machine.said) == 1

"""Sources that are not, or no longer, those of a copy: restored from a backup, of another export, at a wrong address."""

import contextlib
import shutil

import pytest

from hplm.errors import InvalidInput
from hplm.tenants.manager import Manager
from tests.follow.machine import step, until_whole
from tests.follow.test_faults import changed
from tests.places import knowledge
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


def test_a_source_that_went_back_is_not_followed(place, source, machine, tmp_path):
    state = place[2]
    live = changed(place)
    machine.follow()
    shutil.copytree(state, tmp_path / "saved")
    live.limit("tenant-0", rate=1.0)
    machine.follow()
    source.state = tmp_path / "saved"
    with machine.following() as following:
        source.state = tmp_path / "nothing"  # a disk that is not there, and comes back
        with pytest.raises(InvalidInput, match=mentioning("3", "0", "disk")):
            following.copy.look()
        source.state = state
        following.copy.look()
        source.state = tmp_path / "saved"
        for _ in range(2):
            with pytest.raises(InvalidInput, match=mentioning("3", "--state")):
                following.copy.look()
    assert machine.served().find("tenant-0").rate == 1.0
    with machine.following() as following, pytest.raises(InvalidInput, match=mentioning("3", "--state")):
        source.state = state
        following.copy.look()


@pytest.mark.parametrize("seen", ["in between", "at the end", "after more", "by another follower"])
def test_a_restored_source_with_as_many_changes_as_before_is_not_followed(place, source, machine, tmp_path, seen):
    """Its new tenant has the uid that a tenant of the copy has, and a key was added to another one."""
    store, repository, state = place
    live = changed(place)
    shutil.copytree(state, tmp_path / "saved")
    live.add("new-b", knowledge(store, "new-b"))
    with contextlib.ExitStack() as followers:
        following = followers.enter_context(machine.following())
        until_whole(following)
        before = machine.served()
        source.state = tmp_path / "saved"
        if seen == "in between":
            step(following)
        restored = Manager.open(repository, source.state)
        restored.add_key("new-a")
        if seen in ("in between", "after more"):
            restored.add("new-c", knowledge(store, "new-c"))
            restored.limit("tenant-0", rate=1.0)
        if seen == "in between":
            (source.state / "toy/snapshots/3").unlink()  # old ones are not kept
        if seen == "by another follower":
            followers.close()
            following = followers.enter_context(machine.following())
        else:
            source.fault = lambda answer: setattr(answer, "status", 503)
            step(following)
            source.fault = lambda answer: None
        for _ in range(3):
            step(following)
        assert any(mentions(line, "gone back", "--state") for line in machine.said)
        assert not any("ended" in line for line in machine.said if "gone back" in line)
        assert machine.served().tenants == before.tenants
        assert (source.state / "toy/readers/one").read_text() == "0 0\n"


def test_a_server_at_a_wrong_address_is_no_source_without_changes(source, machine):
    source.state /= "wrong"
    for status in (404, 405, 501):
        source.fault = lambda answer, status=status: setattr(answer, "status", 404 if "CURRENT" in answer.path else status)
        with machine.following() as following, pytest.raises(InvalidInput, match=mentioning(source.url, "--from")):
            following.step(once=True)
        assert not any("is here" in line for line in machine.said)
    with machine.following() as following:
        for _ in range(3):
            step(following)
        assert sum(mentions(line, source.url, "--from") for line in machine.said) == 1 and not following.copy.is_whole
        source.fault = lambda answer: None  # before the first change
        until_whole(following)

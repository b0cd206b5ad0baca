"""The file that a follower writes for the metrics of servers: when the source answered, and when the copy was equal to it."""

import time

import pytest

from hplm.engine.copied import measure_copy
from hplm.metrics.meter import Meter
from hplm.metrics.names import COPY_BEHIND_SECONDS, SOURCE_ANSWERS
from hplm.tenants.manager import Manager
from tests.follow.machine import step, until_whole
from tests.places import knowledge

pytestmark = pytest.mark.slow


def measured(machine, now):
    meter = Meter()
    measure_copy(meter, machine.state, now)
    return {metric: level for (metric, _), level in meter.take()[1].items()}


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves on."""
    now = [time.time()]
    monkeypatch.setattr("hplm.follow.follower.time.time", lambda: now[0])
    return now


def test_a_copy_is_behind_from_the_moment_it_was_last_equal(place, source, machine, clock):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    with machine.following() as following:
        until_whole(following)
        begun = clock[0]
        assert measured(machine, begun) == {COPY_BEHIND_SECONDS: 0, SOURCE_ANSWERS: 1}
        source.fault = lambda answer: setattr(answer, "status", 404 if "adapters" in answer.path else answer.status)
        live.add("new-b", knowledge(store, "new-b"))
        clock[0] += 30
        step(following)
        assert not following.copy.is_whole
        assert measured(machine, clock[0]) == {COPY_BEHIND_SECONDS: 30, SOURCE_ANSWERS: 1}, "it answers, but not all is here"
        source.fault = lambda answer: setattr(answer, "status", 401)
        clock[0] += 30
        step(following)
        assert measured(machine, clock[0]) == {COPY_BEHIND_SECONDS: 60, SOURCE_ANSWERS: 0}, "it refuses to answer"
        source.fault = lambda answer: None
        until_whole(following)
        assert measured(machine, clock[0]) == {COPY_BEHIND_SECONDS: 0, SOURCE_ANSWERS: 1}
    assert measured(machine, clock[0] + 90) == {COPY_BEHIND_SECONDS: 90, SOURCE_ANSWERS: 0}, "no follower runs any more"


def test_a_state_that_is_no_copy_has_no_such_metrics(machine, clock):
    assert measured(machine, clock[0]) == {}
    machine.state.folder.mkdir(parents=True)
    machine.state.heard.write_text("17")  # the rest was lost with the machine's power
    assert measured(machine, clock[0]) == {}


def test_a_copy_whose_source_has_never_answered_is_behind_since_it_began_to_follow(source, machine, clock):
    source.fault = lambda answer: setattr(answer, "status", 401)
    begun = clock[0]
    with machine.following() as following:
        step(following)
        clock[0] += 60
        step(following)
        assert measured(machine, clock[0]) == {COPY_BEHIND_SECONDS: 60, SOURCE_ANSWERS: 0}
    clock[0] += 60
    with machine.following() as following:
        assert measured(machine, clock[0]) == {COPY_BEHIND_SECONDS: clock[0] - begun, SOURCE_ANSWERS: 0}, (
            "its follower began again"
        )
        source.fault = lambda answer: None
        until_whole(following)
        assert measured(machine, clock[0]) == {COPY_BEHIND_SECONDS: 0, SOURCE_ANSWERS: 1}

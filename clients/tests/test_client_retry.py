"""Decisions about retries, with the test's own clock and random numbers."""

from __future__ import annotations

import pytest

from hplm_client import InvalidInput, QueueFull
from hplm_client.retry import FIRST_PAUSE_S, GRACE_S, LONGEST_PAUSE_S, Attempts


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def attempts(retries=10, deadline_ms=None, network_timeout=60.0, clock=None, die=1.0):
    return Attempts(retries, deadline_ms, network_timeout, clock or Clock(), lambda: die)


def test_pauses_double_up_to_a_limit():
    series = attempts()
    pauses = [series.pause_s(QueueFull("full")) for _ in range(8)]
    assert pauses == [min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) for number in range(8)]


def test_pauses_differ_between_clients():
    assert attempts(die=0.0).pause_s(QueueFull("full")) == FIRST_PAUSE_S / 2
    assert attempts(die=0.5).pause_s(QueueFull("full")) == FIRST_PAUSE_S * 0.75


def test_a_pause_is_never_shorter_than_the_hint():
    hinted = QueueFull("[queue_full] retry after 0.2 s")
    assert attempts(die=0.0).pause_s(hinted) == pytest.approx(0.2)
    assert attempts(die=1.0).pause_s(hinted) == pytest.approx(0.3)


def test_the_number_of_attempts_is_limited():
    series, error = attempts(retries=2), QueueFull("full")
    series.pause_s(error)
    series.pause_s(error)
    with pytest.raises(QueueFull) as caught:
        series.pause_s(error)
    assert caught.value is error
    with pytest.raises(QueueFull):
        attempts(retries=0).pause_s(error)


def test_a_pause_that_would_outlast_the_deadline_is_not_started():
    clock = Clock()
    series = attempts(deadline_ms=100, clock=clock)
    clock.now += 0.04
    assert series.pause_s(QueueFull("full")) == FIRST_PAUSE_S
    clock.now += 0.05
    with pytest.raises(QueueFull):
        series.pause_s(QueueFull("[queue_full] retry after 11 ms"))


def test_without_a_deadline_the_network_timeout_bounds_all_attempts():
    clock = Clock()
    series = attempts(network_timeout=1.0, clock=clock)
    assert (series.timeout_us, series.network_s) == (None, 1.0)
    clock.now += 0.97
    assert series.network_s == pytest.approx(0.03)
    with pytest.raises(QueueFull):
        series.pause_s(QueueFull("full"))


def test_every_attempt_gets_the_rest_of_the_deadline():
    clock = Clock()
    series = attempts(deadline_ms=50, clock=clock)
    assert series.timeout_us == 50_000
    assert series.network_s == pytest.approx(0.05 + GRACE_S)
    clock.now += 0.03
    assert series.timeout_us == 20_000
    clock.now += 0.02 + GRACE_S / 4
    assert series.timeout_us == 1, "0 would mean the tenant's default to the server"
    assert series.network_s == pytest.approx(0.75 * GRACE_S), "the grace is one for all of them"
    clock.now += GRACE_S
    assert series.network_s == 0.0


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf")])
def test_a_deadline_is_positive(deadline):
    with pytest.raises(InvalidInput, match=rf"(?<!\w){deadline} ms"):
        attempts(deadline_ms=deadline)

"""The time at which a request arrived, as the front door, clients and the model `hplm` say it."""

import os

import pytest

from hplm.errors import InvalidInput
from hplm.tenants.arrival import ARRIVAL, FORWARDED, HEADER, LONGEST_NS, Arrivals, Mark

NOW_US = 1_800_000_000_000_000
RECEIVED_NS = 10**15
SECOND_US = 10**6


@pytest.fixture
def mark():
    mark = Mark(os.getpid())
    yield mark


@pytest.fixture
def arrivals(mark):
    return Arrivals(mark, lambda: 1000 * NOW_US, lambda: RECEIVED_NS)


def waited_ns(arrivals, parameters):
    return RECEIVED_NS - arrivals.arrival_ns(parameters, RECEIVED_NS)


def test_a_request_arrived_when_the_front_door_says_so(arrivals):
    assert waited_ns(arrivals, {"tenant": "acme"}) == 0
    for name in (HEADER, "Hplm-Arrived"):
        assert waited_ns(arrivals, {name: str(NOW_US - 3 * SECOND_US)}) == 3 * 10**9


def test_what_a_model_does_between_receipt_and_this_request_is_no_time_in_the_door(mark):
    since_ns = 2 * 10**9  # other requests came with it and were taken before it
    later = Arrivals(mark, lambda: 1000 * NOW_US + since_ns, lambda: RECEIVED_NS + since_ns)
    assert waited_ns(later, {HEADER: str(NOW_US - 3 * SECOND_US)}) == 3 * 10**9


def test_nobody_gains_time_by_the_header(arrivals, caplog):
    for ahead_us in (1, SECOND_US // 2, 3 * SECOND_US, NOW_US):
        assert waited_ns(arrivals, {HEADER: str(NOW_US + ahead_us)}) == 0


@pytest.mark.parametrize("said_us", [NOW_US - LONGEST_NS // 1000 - 1, NOW_US + 2 * SECOND_US, 0])
def test_of_another_clock_nothing_counts_and_the_log_says_so_once(arrivals, caplog, said_us):
    for _ in range(3):
        assert waited_ns(arrivals, {HEADER: str(said_us)}) == 0
    (record,) = caplog.records
    assert HEADER in record.message and "NTP" in record.message
    assert waited_ns(arrivals, {HEADER: str(NOW_US - SECOND_US)}) == 10**9


@pytest.mark.parametrize("said", ["", "-1", "1e9", " 1", "1_000", "\u0663", "9" * 19, "soon", 17, True, 1.5])
def test_what_is_no_time_is_refused(arrivals, said):
    with pytest.raises(InvalidInput, match=HEADER):
        arrivals.arrival_ns({HEADER: said}, RECEIVED_NS)


def test_two_such_headers_are_refused(arrivals):
    with pytest.raises(InvalidInput, match=HEADER):
        arrivals.arrival_ns({HEADER: str(NOW_US), "Hplm-Arrived": str(NOW_US)}, RECEIVED_NS)


def test_forwarded_requests_keep_their_arrival_for_as_long_as_they_wait(mark, arrivals):
    parameters = {HEADER: str(NOW_US), **mark.parameters(5)}
    assert mark.is_on(parameters)
    assert arrivals.arrival_ns(parameters, RECEIVED_NS) == 5


@pytest.mark.parametrize("claim", [{}, {FORWARDED: "00" * 32}, {FORWARDED: 1}])
def test_clients_cannot_say_that_a_request_was_forwarded(mark, arrivals, claim):
    assert not mark.is_on(claim)
    assert waited_ns(arrivals, {ARRIVAL: 5, **claim}) == 0

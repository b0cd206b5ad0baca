"""The time at which a request arrived, as the front door, clients and the model `hplm` say it."""

import os

import pytest

from hplm.errors import InvalidInput
from hplm.tenants.arrival import HEADER, LONGEST_NS, ArrivalClock, Forwarding
from tests.support.message import refusing

NOW_US = 1_800_000_000_000_000
RECEIVED_NS = 10**15
SECOND_US = 10**6


@pytest.fixture
def forwarding():
    return Forwarding(os.getpid())


@pytest.fixture
def arrivals(forwarding):
    return ArrivalClock(forwarding, lambda: 1000 * NOW_US, lambda: RECEIVED_NS)


def waited_ns(arrivals, parameters):
    return RECEIVED_NS - arrivals.arrival_ns(parameters, RECEIVED_NS)


@pytest.mark.parametrize("name", [HEADER, "Hplm-Arrived"])
@pytest.mark.parametrize("ago_us", [3 * SECOND_US, 1, -1, -SECOND_US // 2, -3 * SECOND_US, -NOW_US])
def test_a_request_arrived_when_the_front_door_says_so_and_nobody_gains_time_by_it(arrivals, name, ago_us):
    assert waited_ns(arrivals, {"tenant": "acme"}) == 0
    assert waited_ns(arrivals, {name: str(NOW_US - ago_us)}) == max(0, 1000 * ago_us), f"{name} of {ago_us} us ago"


def test_what_a_model_does_between_receipt_and_this_request_is_no_time_in_the_door(forwarding):
    since_ns = 2 * 10**9  # other requests came with it and were taken before it
    later = ArrivalClock(forwarding, lambda: 1000 * NOW_US + since_ns, lambda: RECEIVED_NS + since_ns)
    assert waited_ns(later, {HEADER: str(NOW_US - 3 * SECOND_US)}) == 3 * 10**9


@pytest.mark.parametrize("said_us", [NOW_US - LONGEST_NS // 1000 - 1, NOW_US + 2 * SECOND_US, 0])
def test_of_another_clock_nothing_counts_and_the_log_says_so_once(arrivals, caplog, said_us):
    for _ in range(3):
        assert waited_ns(arrivals, {HEADER: str(said_us)}) == 0
    (record,) = caplog.records
    assert HEADER in record.message and "NTP" in record.message
    assert waited_ns(arrivals, {HEADER: str(NOW_US - SECOND_US)}) == 10**9


@pytest.mark.parametrize("said", ["", "-1", "1e9", " 1", "1_000", "\u0663", "9" * 19, "soon", 17, True, 1.5, "two"])
def test_what_is_no_time_is_refused(arrivals, said):
    headers = {HEADER: str(NOW_US), "Hplm-Arrived": str(NOW_US)} if said == "two" else {HEADER: said}
    with refusing(InvalidInput, HEADER):
        arrivals.arrival_ns(headers, RECEIVED_NS)


def test_forwarded_requests_keep_their_arrival_for_as_long_as_they_wait(forwarding, arrivals):
    """Clients cannot say that a request was forwarded: `tests/server/test_replies.py`."""
    parameters = {HEADER: str(NOW_US), **forwarding.parameters(5)}
    assert forwarding.is_in(parameters)
    assert arrivals.arrival_ns(parameters, RECEIVED_NS) == 5

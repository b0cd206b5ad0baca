"""When a placement that was found replaces the current one."""

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.placement.attained import REFUSED, Attained
from hplm.placement.renewal import Comparison, divided
from hplm.placement.workload import Trace
from hplm.simulate.arrivals import SECOND
from tests.support.message import refusing


def _trace(*seconds):
    at = (np.array(seconds) * SECOND).astype(np.int64)
    return Trace(("b0/law",), at, np.zeros(len(at), np.int64), np.full(len(at), 5), np.full(len(at), SECOND), "a test")


def _attained(served, texts=1000):
    ends = np.full(texts, REFUSED)
    ends[:served] = 1.0
    return Attained(_trace(*range(texts)), ends, np.zeros(1))


def test_the_end_is_held_out_and_what_came_long_before_is_not_searched():
    searched, held_out = divided(_trace(0, 10, 11, 19.5, 20.5, 21), search_seconds=10, test_seconds=1)
    assert (searched.arrival_ns / SECOND).tolist() == [11, 19.5]
    assert (held_out.arrival_ns / SECOND).tolist() == [20.5, 21]


def test_without_requests_before_the_held_out_ones_there_is_nothing_to_search_with():
    with refusing(InvalidInput, "--test-seconds", "a test"):
        divided(_trace(0, 5), search_seconds=10, test_seconds=6)
    with refusing(InvalidInput, "--search-seconds", "a test"):
        divided(_trace(0, 50), search_seconds=10, test_seconds=6)


@pytest.mark.parametrize(
    "wanted, current, found, is_worth",
    [
        *((1.0, 930, 940, True), (1.0, 930, 939, False), (1.0, 940, 930, False), (1.0, 940, 940, False)),
        *((0.0, 930, 929, False), (0.0, 930, 930, False), (0.0, 930, 931, True)),
    ],
)
def test_a_placement_is_worth_it_from_the_wanted_gain_on(wanted, current, found, is_worth):
    compared = Comparison(_attained(current), _attained(found))
    assert compared.is_worth(wanted) is is_worth
    assert compared.gain_points == pytest.approx((found - current) / 10)

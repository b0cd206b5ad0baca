from fractions import Fraction
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.das import DeadlineAware, SlottedDeadlineAware
from hplm.scheduling.policy import policy
from hplm.scheduling.simulation.arrivals import SimulatedText
from hplm.scheduling.waiting import Capacity
from tests.naming import naming

COST = CostModel()
ROW = 12


def _text(tokens, deadline=0):
    return SimulatedText(tokens=tokens, arrival_ns=0, deadline_ns=deadline)


def _lengths(chooses, texts, capacity):
    columns = Columns(texts)
    return [text.tokens for text in columns.remove(chooses.select(columns, 0, capacity, COST))]


def test_a_row_is_filled_by_utility_and_then_by_deadlines():
    """Four texts fit. Two are the shortest; the others have at least half their utility and the earliest deadlines."""
    texts = [_text(3, 90), _text(3, 91), _text(4, 60), _text(4, 70), _text(6, 50), _text(7, 10)]
    capacity = Capacity(14, 14, 14)
    # The most urgent text is too long to have half the utility of the shortest. The text of six tokens is not.
    assert _lengths(DeadlineAware(), texts, capacity) == [3, 3, 6]


def test_all_texts_are_chosen_if_all_fit():
    assert sorted(_lengths(DeadlineAware(), [_text(3), _text(5), _text(4)], Capacity(12, 9, 9))) == [3, 4, 5]


def test_a_text_that_does_not_fit_a_slot_waits_and_is_not_lost():
    texts = [_text(3, 90), _text(3, 91), _text(3, 92), _text(3, 93), _text(6, 1), _text(6, 2)]
    chooses, columns, served = SlottedDeadlineAware(), Columns(texts), []
    first = columns.remove(chooses.select(columns, 0, Capacity(ROW, 9, 9), COST))
    assert [text.tokens for text in first] == [3, 3]  # slots of three tokens; the urgent text of six waits
    while len(columns):
        served += columns.remove(chooses.select(columns, 0, Capacity(ROW, 9, 9), COST))
    assert len(first) + len(served) == len(texts)


def test_options_are_checked():
    assert policy("das:eta=0.25,q=0.75,rows=4") == DeadlineAware(eta=0.25, q=0.75, rows=4)
    with pytest.raises(InvalidInput, match=naming("eta")):
        policy("das:eta=0")
    with pytest.raises(InvalidInput, match=naming("colour")):
        policy("das:colour=2")


# Arrival and deadline are numbers of time slots. A text can run in any of them, the first and the last included.
instances = st.lists(
    st.tuples(st.integers(1, ROW), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8
)  # length, arrival, how long it can wait


def _best(instance):
    """Returns the highest possible utility if the future is known."""

    @cache
    def from_slot(slot, done):
        if slot == 5:
            return Fraction(0)
        there = [i for i, (_, at, wait) in enumerate(instance) if i not in done and at <= slot <= at + wait]
        best = from_slot(slot + 1, done)
        for count in range(1, len(there) + 1):
            for chosen in combinations(there, count):
                if sum(instance[i][0] for i in chosen) <= ROW:
                    value = sum(Fraction(1, instance[i][0]) for i in chosen)
                    best = max(best, value + from_slot(slot + 1, done | frozenset(chosen)))
        return best

    return from_slot(0, frozenset())


@settings(deadline=None, max_examples=80)
@given(instance=instances, eta=st.sampled_from([0.25, 0.5, 0.75]))
def test_das_is_never_below_its_competitive_bound(instance, eta):
    q = 1 - eta
    chooses, left, value = DeadlineAware(eta=eta, q=q), set(range(len(instance))), Fraction(0)
    for slot in range(5):
        there = sorted(i for i in left if instance[i][1] <= slot <= sum(instance[i][1:]))
        if not there:
            continue
        columns = Columns([_text(instance[i][0], 1 + sum(instance[i][1:])) for i in there])
        chosen = [there[k] for k in np.asarray(chooses.select(columns, 0, Capacity(ROW, ROW, ROW), COST))]
        assert sum(instance[i][0] for i in chosen) <= ROW
        value += sum(Fraction(1, instance[i][0]) for i in chosen)
        left -= set(chosen)
    assert float(value) >= eta * q / (eta * q + 1) * float(_best(tuple(instance))) - 1e-9

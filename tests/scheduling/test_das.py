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
from hplm.scheduling.das import DeadlineAware
from hplm.scheduling.policy import policy
from hplm.scheduling.selection import OUTSIDE, Capacity
from hplm.simulate.arrivals import SimulatedText
from research.papers.policies import SlottedDeadlineAware
from tests.support.message import mentioning, mentions

COST = CostModel()
ROW = 12
whole = st.integers


def _text(tokens, deadline=0, priority=0):
    return SimulatedText(tokens=tokens, arrival_ns=0, deadline_ns=deadline, priority=priority)


def _boxes(chosen, box, tokens):
    """Returns the tokens of the texts in each row or slot, by its number."""
    return {int(number): tokens[chosen.indexes[box == number]].tolist() for number in np.unique(box)}


FILLED = [  # rows, tokens, texts with their deadlines, and the texts in each row
    # Two are the shortest. The most urgent one is too long to have half their utility, and that of six tokens is not.
    (0, 14, [(3, 90), (3, 91), (4, 60), (4, 70), (6, 50), (7, 10)], {0: [3, 3, 6]}),
    # The first row takes the shortest text, then by deadline. So does the second one, of what the first has left.
    (2, 20, [(4, 90), (4, 80), (5, 50), (6, 40), (5, 60)], {0: [4, 6], 1: [4, 5]}),
]


@pytest.mark.parametrize(("rows", "tokens", "texts", "filled"), FILLED)
def test_each_row_is_filled_by_utility_and_then_by_deadlines(rows, tokens, texts, filled):
    columns = Columns([_text(*text) for text in texts])
    chosen = DeadlineAware(rows=rows).select(columns, 0, Capacity(tokens, tokens, tokens), COST)
    assert _boxes(chosen, chosen.places.row, columns.tokens) == filled


@pytest.mark.parametrize(
    ("options", "tokens", "usual", "shape"),
    [
        ("", 1280, 128, (3, 426)),
        ("", 1280, 500, (2, 640)),
        ("", 100, 20, (1, 100)),
        (":rows=16", 1600, 150, (10, 160)),
        (":row_tokens=100", 4096, 512, (40, 100)),
        (":rows=4,row_tokens=100", 4096, 512, (4, 100)),
        (":row_tokens=5000", 1600, 20, (1, 1600)),
        (":rows=16", 128, 512, (1, 128)),
    ],
)
def test_rows_and_their_tokens_follow_the_options_the_batch_and_the_texts(options, tokens, usual, shape):
    assert policy(f"das{options}").shape(Capacity(tokens, 99, 99), usual) == shape


def test_on_a_slow_machine_rows_become_fewer_and_still_hold_the_usual_texts(caplog):
    """Its batches are bounded to 128 tokens: 16 rows of these would have 8 tokens, and no text would fit."""
    das, columns = policy("das:rows=16"), Columns([_text(15 + number % 10) for number in range(200)] + [_text(60)])
    for _ in range(5):
        rows = das.select(columns, 0, Capacity(128, 128, 128), COST).places.row
        assert {*rows.tolist()} == {0, 1, 2, 3, 4}
    (said,) = [record.getMessage() for record in caplog.records]
    assert mentions(said, "rows", 5, 16)


@pytest.mark.parametrize("name", ["das", "slotted_das"])
@pytest.mark.parametrize("long", [60, 95, 130])
def test_a_text_longer_than_a_row_is_not_passed_over_for_ever(name, long):
    """New and shorter texts fill all rows of every batch, and the texts that came before it wait as well."""
    chooses, capacity = policy(f"{name}:rows=4,row_tokens=22"), Capacity(100, 100, 100)
    columns = Columns([*[_text(20)] * 10, _text(long)])
    for _ in range(40):
        batch = columns.remove(chooses.select(columns, 0, capacity, COST).indexes)
        if any(text.tokens == long for text in batch):
            return
        assert len(batch) > 1
        columns.add([_text(4)] * 40)
    pytest.fail("it was never chosen")


waiting = st.lists(
    st.builds(_text, whole(1, 40), whole(1, 5), st.sampled_from([0, 0, 1])),
    min_size=1, max_size=40,
)  # fmt: skip


@given(waiting=waiting, rows=whole(0, 5), row_tokens=whole(0, 30), tokens=whole(1, 100))
def test_rows_and_slots_keep_their_limits(waiting, rows, row_tokens, tokens):
    columns, capacity = Columns(waiting), Capacity(tokens, 99, 99)
    for kind in (DeadlineAware, SlottedDeadlineAware):
        chooses = kind(rows=rows, row_tokens=row_tokens)
        longest = chooses.fill(columns, capacity).row_tokens
        most = min(rows or tokens, tokens // longest)
        chosen = chooses.select(columns, 0, capacity, COST)
        inside = _boxes(chosen, chosen.places.row, columns.tokens)
        outside = inside.pop(OUTSIDE, [])
        assert all(text > longest for text in outside) and all(sum(row) <= longest for row in inside.values())
        taken = sum(-(-text // longest) for text in outside)
        assert len(inside) + taken <= most or (len(chosen.indexes) == 1 and outside)
        if chosen.places.slot is not None:
            slots = _boxes(chosen, chosen.places.slot, columns.tokens)
            assert slots.pop(OUTSIDE, []) == outside
            width = max((sum(slot) for slot in slots.values()), default=0)
            for number in inside:
                inside_it = np.unique(chosen.places.slot[chosen.places.row == number])
                assert len(inside_it) * width <= longest


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("eta=0", ["eta=0"]), ("eta=1", ["eta=1"]), ("eta=-0.5", ["eta=-0.5"]), ("eta=nan", ["eta=nan"]),
        ("q=0", ["q=0"]), ("q=1.5", ["q=1.5"]), ("eta=0.75", ["eta=0.75", "q=0.5"]), ("eta=0.7,q=0.4", ["eta=0.7", "q=0.4"]),
        ("rows=-1", ["rows=-1"]), ("rows=2.5", ["rows=2.5"]), ("row_tokens=many", ["row_tokens=many"]),
        ("colour=2", ["colour"]),
    ],
)  # fmt: skip
def test_options_are_checked(options, named):
    for name in ("das", "slotted_das"):
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            policy(f"{name}:{options}")
    for other, named in (("timely:reserve=2", ["reserve=2"]), ("sjf:in_time=no", ["in_time=no"])):
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            policy(other)


# Arrival and deadline are numbers of time slots. A text can run in any of them, the first and the last included.
def instances(longest, most):
    return st.lists(st.tuples(whole(1, longest), whole(0, 2), whole(0, 2)), min_size=1, max_size=most)  # length, arrival, wait


@cache
def _fit(lengths, free):
    """Whether texts of these lengths, longest first, fit into rows with so much room."""
    if not lengths:
        return True
    rooms = {tuple(sorted([*free[:i], room - lengths[0], *free[i + 1 :]])) for i, room in enumerate(free) if room >= lengths[0]}
    return any(_fit(lengths[1:], room) for room in rooms)


def _best(instance, rows):
    """Returns the highest possible utility of batches of so many rows, if the future is known."""

    @cache
    def from_slot(slot, done):
        if slot == 5:
            return Fraction(0)
        there = [i for i, (_, at, wait) in enumerate(instance) if i not in done and at <= slot <= at + wait]
        best, fitting = from_slot(slot + 1, done), []
        for chosen in (frozenset(chosen) for count in range(len(there), 0, -1) for chosen in combinations(there, count)):
            if any(chosen < more for more in fitting):
                continue  # to run more texts in a slot is never worse
            if _fit(tuple(sorted((instance[i][0] for i in chosen), reverse=True)), (ROW,) * rows):
                fitting.append(chosen)
                value = sum(Fraction(1, instance[i][0]) for i in chosen)
                best = max(best, value + from_slot(slot + 1, done | chosen))
        return best

    return from_slot(0, frozenset())


def _reached(chooses, instance, rows):
    """Returns the utility that the policy reaches. Checks that each of its batches fits."""
    left, value = set(range(len(instance))), Fraction(0)
    for slot in range(5):
        there = sorted(i for i in left if instance[i][1] <= slot <= sum(instance[i][1:]))
        if not there:
            continue
        columns = Columns([_text(instance[i][0], 1 + sum(instance[i][1:])) for i in there])
        chosen = chooses.select(columns, 0, Capacity(rows * ROW, rows * ROW, rows * ROW), COST)
        boxes = _boxes(chosen, chosen.places.row, columns.tokens)
        assert set(boxes) <= set(range(rows)) and all(sum(row) <= ROW for row in boxes.values())
        value += sum(Fraction(1, instance[there[k]][0]) for k in chosen.indexes)
        left -= {there[k] for k in chosen.indexes}
    return value


@settings(max_examples=120)
@given(instance=instances(ROW, 8), eta=st.sampled_from([0.25, 0.5, 0.75]), rows=whole(1, 3))
def test_das_is_never_below_its_competitive_bound(instance, eta, rows):
    own = rows if rows > 1 else 0  # it finds a lone row itself
    reached, bound = _reached(DeadlineAware(eta, 1 - eta, rows=own), instance, rows), eta * (1 - eta) / (eta * (1 - eta) + 1)
    assert reached >= bound * float(_best(tuple(instance), rows)) - 1e-9


def test_a_higher_priority_goes_before_a_long_text_that_waits():
    columns = Columns([_text(60), *[_text(5, priority=1)] * 30])
    chosen = policy("das:rows=4,row_tokens=25").select(columns, 0, Capacity(100, 100, 100), COST)
    assert columns.tokens[chosen.indexes].tolist() == [5] * 20

"""The default policy: what a batch takes, and that nobody is passed over for ever."""

from math import ceil

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.fairness import AHEAD, fair_share
from hplm.scheduling.selection import Capacity
from hplm.scheduling.timely import Timely
from hplm.simulate.arrivals import SimulatedText

ROOM = Capacity(tokens=200, texts=200, tenants=200)
COST = CostModel()


def _text(tokens=10, deadline=0, priority=0, tenant=0):
    return SimulatedText(tokens=tokens, arrival_ns=0, deadline_ns=deadline, priority=priority, slot_key=tenant, tenant=tenant)


def _batch(texts, chooses=None, capacity=ROOM, start=0):
    columns = Columns(texts)
    return columns.remove((chooses or Timely()).select(columns, start, capacity, COST))


FULL = int(COST.predict(200, 20))
FULL_OF_LONG = int(COST.predict(200, 14))
BATCHES = {  # other texts, and those that come before them: how many, their tokens, deadline and priority
    "the most urgent, if all can be in time": ((20, 10, 5 * FULL, 0), (20, 10, 2 * FULL, 0)),
    "not the longest, if not all can be": ((4, 50, 2 * FULL_OF_LONG - 1, 0), (20, 10, 2 * FULL_OF_LONG - 1, 0)),
    "nothing late, while others can be in time": ((20, 10, FULL // 2, 0), (13, 15, FULL + FULL // 2, 0)),
    "the highest priority": ((40, 5, 10**9, 0), (10, 20, 0, 1)),
}


@pytest.mark.parametrize(("others", "first"), BATCHES.values(), ids=BATCHES)
def test_what_a_batch_takes(others, first):
    others, first = ([_text(*given) for _ in range(count)] for count, *given in (others, first))
    batch = _batch(others + first)
    late = [text for text in others if 0 < text.deadline_ns < FULL]  # which may fill it up
    assert {*first} <= {*batch} <= {*first, *late}


@given(demands=st.lists(st.integers(1, 1000), min_size=1, max_size=20), room=st.integers(1, 5000))
def test_shares_are_max_min_fair(demands, room):
    demands = np.array(demands, float)
    share = fair_share(demands, room)
    if demands.sum() <= room:
        assert share == np.inf
    else:
        assert np.isclose(np.minimum(demands, share).sum(), room)


@given(tenants=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=2, max_size=6))
@example([(1, 2), (1, 40), (1, 40), (1, 40), (1, 40), (3, 13)])
def test_every_tenant_that_still_waits_has_its_fair_share(tenants):
    """Nobody has more at its cost, but for the first text of a tenant, which may be longer than a share.

    `tenants`: the number of texts of each, and their length.
    """
    counts, lengths = np.array(tenants).T
    texts = [_text(length, tenant=tenant) for tenant, (count, length) in enumerate(tenants) for _ in range(count)]
    batch, demand = _batch(texts, Timely(reserve=0.0)), lengths * counts
    got = np.bincount([text.tenant for text in batch], [text.tokens for text in batch], minlength=len(tenants))
    assert got.sum() <= ROOM.tokens
    share = fair_share(demand.astype(float), ROOM.tokens)
    too_long = np.maximum(lengths - share, 0).sum()
    assert (got + lengths + too_long > np.minimum(demand, share))[got < demand].all()


def _serve_until(text, chooses, columns, arriving, batches):
    """Fails if the text is not chosen within so many batches. `arriving` returns the texts that come before each."""
    for number in range(batches):
        for other in arriving(number):
            columns.add([other])
        if text in columns.remove(chooses.select(columns, number * FULL, ROOM, COST)):
            return
    raise AssertionError(f"still passed over after {batches} batches")


def test_texts_without_deadlines_are_served_in_order_of_arrival():
    """Short ones arrive without end, and none of them overtakes the long one for more than the batch's rest."""
    long_text = _text(150)
    columns = Columns([_text(20) for _ in range(30)] + [long_text])
    few = 4  # there are 600 tokens before it, and 200 in a batch
    _serve_until(long_text, Timely(reserve=0.0), columns, lambda _: [_text(5) for _ in range(60)], few)


@settings(max_examples=30)
@given(
    ahead=st.lists(st.integers(20, 60), max_size=6),
    own=st.integers(20, 300),
    tokens=st.integers(1, 5),
    is_urgent=st.booleans(),
    reserve=st.sampled_from([0.05, Timely().reserve]),
)
def test_a_long_text_is_chosen_by_the_reserve_after_a_bounded_number_of_batches(ahead, own, tokens, is_urgent, reserve):
    """Short texts arrive without end, with deadlines or without. The reserve serves the long text, and those before it.

    It may be longer than a batch.
    """
    passed_over = [_text(length) for length in [*ahead, own]]
    columns = Columns(passed_over)
    saved = max(own, ROOM.tokens) if own + tokens > ROOM.tokens else own  # beside a short text it has no room
    bound = ceil((sum(ahead) + saved) / (reserve * ROOM.tokens)) + 1

    def arriving(batch):
        return [_text(tokens, is_urgent * (batch + 3) * FULL)] * (300 - len(columns))

    _serve_until(passed_over[-1], Timely(reserve=reserve), columns, arriving, bound)


KINDS = st.fixed_dictionaries({
    "tokens": st.integers(4, 700), "deadline": st.sampled_from([0, 2 * FULL, 10**12]), "priority": st.integers(-1, 1)
})  # fmt: skip


def _served(kinds, reserve):
    """Returns the tokens that each tenant has had after 60 batches, in all of which it has texts waiting.

    All texts of the first tenant came before those of the second one.
    """
    chooses, columns, had = Timely(reserve=reserve), Columns(), np.zeros(len(kinds))
    for tenant, kind in enumerate(kinds):
        for _ in range(2 * ROOM.tokens // kind["tokens"] + (3 if tenant else 70)):
            columns.add([_text(**kind, tenant=tenant)])
    for _ in range(60):
        for text in columns.serve(chooses.select(columns, 0, ROOM, COST)):
            had[text.tenant] += text.tokens
            columns.add([text])
    return had


@pytest.mark.parametrize(
    "kinds",
    [
        [{"tokens": 512}, {"tokens": 512}],  # each fills a batch alone
        [{"tokens": 512, "priority": 2**31 - 1}, {"tokens": 512}],
        [{"tokens": 512, "deadline": 2 * FULL}, {"tokens": 512}],
        [{"tokens": 4}, {"tokens": 512}],
        [{"tokens": 512}, {"tokens": 4}],
        [{"tokens": 4, "deadline": 2 * FULL}, {"tokens": 21}],
    ],
)
def test_two_tenants_get_equal_work_with_texts_of_any_length(kinds):
    had = _served(kinds, Timely().reserve)
    assert abs(had[0] - had[1]) <= (AHEAD + 2) * ROOM.tokens + 2 * max(kind["tokens"] for kind in kinds)


@settings(max_examples=40)
@given(kinds=st.lists(KINDS, min_size=2, max_size=4), reserve=st.sampled_from([0.0, Timely().reserve]))
@example(kinds=[{"tokens": 4}, {"tokens": 101}, {"tokens": 101}], reserve=0.0)
def test_no_tenant_starves_another_by_lengths_deadlines_or_priorities(kinds, reserve):
    """Of texts longer than half a batch only one fits, and short ones fill the rest: a tenant may have half of a fair share."""
    longest = max(kind["tokens"] for kind in kinds)
    assert _served(kinds, reserve).min() >= 60 * ROOM.tokens / 2 / len(kinds) - (AHEAD + 2) * ROOM.tokens - 2 * longest


@pytest.mark.parametrize("deadline", [{}, {"deadline": 2 * FULL}])
def test_a_newcomer_beside_texts_that_fill_a_batch_is_in_the_next_one(deadline):
    """One batch computes and one is staged when it comes. It does not fit beside a text of the other tenant."""
    columns, chooses = Columns([_text(ROOM.tokens, tenant=0, **deadline)] * 40), Timely()
    for _ in range(2):
        columns.serve(chooses.select(columns, 0, ROOM, COST))
    columns.add([_text(4, tenant=1)])
    assert columns.text(int(chooses.select(columns, 0, ROOM, COST)[0])).tenant == 1


def test_an_idle_tenant_saves_nothing_up_and_one_that_leaves_for_a_moment_loses_nothing():
    columns, chooses = Columns([_text(200, tenant=0)] * 40), Timely(reserve=0.0)
    for _ in range(9):
        columns.serve(chooses.select(columns, 0, ROOM, COST))
    come = _text(200, tenant=1)
    order = []
    for _ in range(16):
        if columns.number_of(1) is None:
            columns.add([come])  # it never has a second one
        order += [text.tenant for text in columns.serve(chooses.select(columns, 0, ROOM, COST))]
    assert abs(order.count(0) - order.count(1)) <= AHEAD + 2

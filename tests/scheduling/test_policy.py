import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.policy import OURS, policy
from hplm.scheduling.selection import Selection
from hplm.scheduling.simulation.arrivals import SimulatedText
from hplm.scheduling.waiting import Capacity
from tests.support.message import mentioning

ROOM = Capacity(tokens=100, texts=10, tenants=3)
COST = CostModel()

waiting = st.lists(
    st.builds(
        SimulatedText,
        tokens=st.integers(1, 120), arrival_ns=st.just(0), deadline_ns=st.sampled_from([0, 10**6, 10**7, 10**8]),
        priority=st.sampled_from([0, 0, 1, -3]), slot_key=st.integers(-2, 3), tenant=st.integers(0, 2),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


def serve(chooses, waiting):
    """Runs batch after batch until no text waits, and checks each batch."""
    columns = Columns(waiting)
    while len(columns):
        indexes = Selection.of(chooses.select(columns, 0, ROOM, COST)).indexes
        assert len(indexes) and len(set(indexes.tolist())) == len(indexes)
        batch = columns.remove(indexes)
        if len(batch) > 1:
            assert sum(text.tokens for text in batch) <= ROOM.tokens and len(batch) <= ROOM.texts
            assert len({text.slot_key for text in batch}) <= ROOM.tenants
        yield batch


@given(waiting=waiting, name=st.sampled_from([*OURS, "das:rows=3", "das:row_tokens=40", "slotted_das:row_tokens=40"]))
def test_any_policy_serves_everything_once_and_within_capacity(waiting, name):
    served = [id(text) for batch in serve(policy(name), waiting) for text in batch]
    assert sorted(served) == sorted(map(id, waiting))


@given(waiting=waiting)
def test_first_come_first_served_keeps_the_order_of_arrival_within_a_priority(waiting):
    served = [id(text) for batch in serve(policy("fcfs"), waiting) for text in batch]
    assert served == [id(text) for text in sorted(waiting, key=lambda text: -text.priority)]


@pytest.mark.parametrize("name", ["fcfs", "timely"])
def test_the_lowest_possible_priority_comes_last(name):
    waiting = [SimulatedText(tokens=5, arrival_ns=i, priority=priority) for i, priority in enumerate((-(2**31), 0, 2**31 - 1))]
    assert [text.priority for text in next(serve(policy(name), waiting))] == [2**31 - 1, 0, -(2**31)]


def test_an_unknown_policy_is_named():
    with pytest.raises(InvalidInput, match=mentioning("horizon=2.5", 255)):
        policy("timely:horizon=2.5")
    with pytest.raises(InvalidInput, match="'lifo'"):
        policy("lifo")
    with pytest.raises(InvalidInput, match=mentioning("texts=2.5")):
        policy("length_aware:texts=2.5")


def test_columns_grow_and_close_their_gaps():
    texts = [SimulatedText(tokens=i + 1, arrival_ns=i, slot_key=i % 7, tenant=i % 3) for i in range(3000)]
    columns = Columns(texts)
    out = columns.remove(np.array([5, 2999, 0]))
    assert out == [texts[5], texts[2999], texts[0]]
    assert (
        columns.tokens.tolist() == [text.tokens for text in [columns.text(i) for i in range(len(columns))]]
        and len(columns) == 2997
    )
    assert columns.slot_keys == 7 and columns.tenants == 3
    assert columns.demand.tolist() == [columns.tokens[columns.tenant == tenant].sum() for tenant in range(3)]

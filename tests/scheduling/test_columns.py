"""Texts as columns, and numbers that are given to values while these are in use."""

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.scheduling.columns import Columns, Numbers
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import FirstComeFirstServed
from hplm.scheduling.queue import Queue
from hplm.simulate.arrivals import SimulatedText


def test_numbers_are_reused_when_values_are_given_back():
    """Counting by tenant costs as much as the highest number, so it must fall again after a burst of thousands."""
    numbers, held, rng = Numbers(), [], random.Random(0)
    for _ in range(5000):
        if held and rng.random() < 0.5:
            value, number = held.pop(rng.randrange(len(held)))
            assert numbers.number_of(value) == number
            numbers.give_back([number])
        else:
            value = rng.randrange(300)
            held.append((value, numbers.take(value)))
        of_value = dict(held)
        assert len(set(of_value.values())) == len(of_value) and len(numbers) == max(of_value.values(), default=-1) + 1
    numbers.give_back([number for _, number in held])
    assert len(numbers) == 0 and numbers.take("one") == 0


@settings(max_examples=50)
@given(count=st.integers(1, 60) | st.just(3000), data=st.data())  # many make the columns grow
def test_texts_leave_in_the_order_given_and_the_others_keep_theirs(count, data):
    texts = [SimulatedText(tokens=i + 1, arrival_ns=i, slot_key=i % 5, tenant=i % 3, bytes=i) for i in range(count)]
    gone, columns = data.draw(st.lists(st.integers(0, count - 1), unique=True)), Columns(texts)
    assert columns.remove(np.array(gone, np.int64)) == [texts[i] for i in gone]
    left = [text for i, text in enumerate(texts) if i not in gone]
    assert [columns.text(i) for i in range(len(columns))] == left
    assert columns.tokens.tolist() == [text.tokens for text in left] and columns.arrival.tolist() == [
        i.arrival_ns for i in left
    ]
    assert columns.all_tokens == sum(text.tokens for text in left)
    assert columns.bytes == columns.shares.work == sum(text.bytes for text in left) and columns.shares.items == len(left)
    by_tenant = {tenant: sum(text.tokens for text in left if text.tenant == tenant) for tenant in range(3)}
    assert len({text.slot_key for text in left}) <= columns.slot_keys <= 5
    assert len({text.tenant for text in left}) <= columns.tenants <= 3
    assert columns.demand.tolist() == [columns.tokens[columns.tenant == tenant].sum() for tenant in range(columns.tenants)]
    assert dict(columns.by_tenant()) == {tenant: tokens for tenant, tokens in by_tenant.items() if tokens}


@pytest.mark.parametrize("wrong", [{"deadline_ns": 2**63}, {"arrival_ns": 2**63}, {"tokens": 2**31}, {"priority": 2**31}])
def test_a_text_whose_numbers_do_not_fit_is_not_added(wrong):
    good, columns = SimulatedText(tokens=2, arrival_ns=0, tenant=1), Columns()
    columns.add([good])
    with pytest.raises(struct.error):
        columns.add([SimulatedText(**{"tokens": 1, "arrival_ns": 0, "tenant": 2, **wrong})])
    assert (len(columns), columns.all_tokens, columns.bytes) == (1, 2, columns.shares.work) and columns.shares.items == 1
    assert columns.remove(np.array([0])) == [good] and not len(columns)


def test_a_request_that_cannot_join_a_full_queue_costs_nobody_its_place():
    queue, full = Queue(FirstComeFirstServed(), Limits(items=2, work=100)), SimulatedText(tokens=1, arrival_ns=0, tenant=1)
    queue.offer([full, full], 0)
    with pytest.raises(struct.error):
        queue.offer([SimulatedText(tokens=1, arrival_ns=0, tenant=2, deadline_ns=2**63)], 0)
    assert queue.abandon() == [full, full]

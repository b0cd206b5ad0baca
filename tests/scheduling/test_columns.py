"""Texts as columns, and numbers that are given to values while these are in use."""

import random

import numpy as np

from hplm.scheduling.columns import Columns, Numbers
from hplm.scheduling.simulation.arrivals import SimulatedText


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

"""Numbers that are given to values while these are in use."""

import random

from hplm.scheduling.columns import Numbers


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

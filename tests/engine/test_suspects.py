"""Which tenants run alone after the engine has ended, and which one is guilty: the time is played here."""

import pytest

from hplm.engine.suspects import CLEAN_ANSWERS, REMEMBERED_SECONDS, SUSPECTED_SECONDS, Suspects

A, B, C, D = range(4)


@pytest.fixture
def suspects():
    return Suspects()


def test_the_tenants_of_all_batches_are_suspects_and_the_one_that_ends_the_engine_alone_is_guilty(suspects):
    assert suspects.alone(0) == frozenset()
    assert suspects.ended({A, B, C}, 0) is None
    assert suspects.alone(1) == {A, B, C}
    assert suspects.ended({A}, 1) == A
    assert suspects.alone(2) == {A}  # the others are cleared, and the guilty one runs alone also after its release


def test_an_engine_that_ends_without_a_batch_says_nothing(suspects):
    suspects.ended({A, B}, 0)
    assert suspects.ended(set(), 1) is None
    assert suspects.alone(1) == {A, B}


def test_those_who_are_suspected_for_another_end_stay_so(suspects):
    suspects.ended({A, B}, 0)
    suspects.ended({C, D}, 1)
    assert suspects.ended({C}, 2) == C
    assert suspects.alone(2) == {A, B, C}


def test_a_guilty_tenant_that_was_released_is_guilty_at_its_next_end(suspects):
    suspects.ended({A, B}, 0)
    suspects.ended({A}, 1)
    assert suspects.ended({A}, 3601) == A


def test_a_suspicion_ends_with_time_or_with_clean_answers(suspects):
    suspects.ended({A, B}, 0)
    for _ in range(CLEAN_ANSWERS - 1):
        suspects.answered(A)
    assert suspects.alone(0) == {A, B}
    suspects.answered(A)
    suspects.answered(D)  # of whom nobody has thought ill
    assert suspects.alone(0) == {B}
    assert suspects.alone(SUSPECTED_SECONDS - 1) == {B}
    assert suspects.alone(SUSPECTED_SECONDS) == frozenset()


def test_who_waits_until_it_is_cleared_each_time_ends_the_engine_ever_more_seldom(suspects):
    now, ends = 0.0, 0
    while now < REMEMBERED_SECONDS:
        assert suspects.ended({A, B}, now) is None
        ends += 1
        while A in suspects.alone(now):
            now += SUSPECTED_SECONDS
    assert ends <= 8  # not 144
    suspects.ended({A, B}, now)
    answers = 0
    while A in suspects.alone(now):
        suspects.answered(A)
        answers += 1
    assert answers >= CLEAN_ANSWERS << 7


def test_a_suspicion_is_forgotten_at_last(suspects):
    suspects.ended({A}, 0)
    assert suspects.alone(REMEMBERED_SECONDS) == frozenset()
    suspects.ended({A}, REMEMBERED_SECONDS)
    assert suspects.alone(REMEMBERED_SECONDS + SUSPECTED_SECONDS) == frozenset()

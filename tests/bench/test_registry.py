"""`hplm bench registry` sees every fault that it counts."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.registry_judge import LAG, MIXED, Books, Judge, Owner
from bench.registry_parts import State
from hplm.errors import HplmError
from loadtest.chaos.history import OK, REFUSED, UNANSWERED, WRONG, Answer, Question
from tests.support.wait import eventually

EXPECTED = {"text": [np.array([1.0, 0.0]), np.array([0.0, 1.0])]}
NO_TENANT = Answer(REFUSED, "no_tenant")
FIRST, SECOND, NEITHER = (Answer(OK, logits=one) for one in (*EXPECTED["text"], np.array([1.0, 1.0])))


def outcome(books, answer, key="", later=0.0, blind=()):
    judge, asked = Judge([], 0, books, EXPECTED, Question("kept", "text")), time.monotonic() + later
    machine: Any = SimpleNamespace(name="server", blind=[(asked + begin, asked + end) for begin, end in blind])
    return judge.verdict(machine, Question("acme", "text", key), answer, asked, asked)[0]


def test_an_answer_is_that_of_a_version_of_the_last_seconds_and_a_key_opens_its_tenant_until_it_is_revoked():
    books = Books()
    books.is_now("acme", State(0))
    assert [outcome(books, one) for one in (FIRST, SECOND, NO_TENANT)] == [OK, WRONG, WRONG]
    books.may_be("acme", State(1))  # a change that may be made
    assert outcome(books, FIRST) == outcome(books, SECOND) == OK
    books.is_now("acme", State(1))
    assert outcome(books, FIRST) == OK and outcome(books, FIRST, later=2 * LAG) == WRONG
    assert outcome(books, FIRST, later=2 * LAG, blind=[(-2 * LAG, 1.0)]) == OK  # this server could not know
    books.is_now("acme", State())
    assert outcome(books, NO_TENANT) == REFUSED and outcome(books, SECOND, later=2 * LAG) == WRONG
    assert outcome(books, NEITHER) == MIXED and outcome(books, Answer(UNANSWERED)) == UNANSWERED
    books = Books()
    books.is_now("acme", State(0), ["old", "new"])
    assert [outcome(books, FIRST, key) for key in ("old", "new", "other")] == [OK, OK, WRONG]
    assert outcome(books, NO_TENANT, "old") == WRONG
    books.is_now("acme", State(0), ["new"])
    assert [outcome(books, one, "old", later=2 * LAG) for one in (FIRST, NO_TENANT)] == [WRONG, REFUSED]


@pytest.mark.parametrize(("there", "is_lost"), [("before", False), ("after", False), ("other", True)])
def test_a_change_of_which_nobody_heard_was_made_or_was_not(there, is_lost):
    def killed(*_):
        raise HplmError("killed")

    found = {"before": State(), "after": State(0), "other": State(5)}[there]
    manager: Any = SimpleNamespace(ask=killed)
    witness: Any = SimpleNamespace(ask=lambda *_: ([found], 0))
    owner = Owner(0, 1, manager, witness, Books())
    owner.change(1)  # adds a tenant with the only knowledge
    owner.start()
    eventually(lambda: owner.done)
    assert bool(owner.lost) == is_lost and found in owner.states.values() and not owner.acknowledged

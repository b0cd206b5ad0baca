"""The times of a level's sheets, measured with an engine whose clock is made up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from builder.cascade.candidates import tried
from builder.cascade.sheet_times import SheetTimes, timed
from tests.builder.cascade.measured import measured

TIMES = SheetTimes((20, 40, 400), (0.2, 0.3, 2.0), (0.4, 0.6, 4.0))


@dataclass
class Clock:
    """A level that takes `fixed` for each sheet, `token` for each token, and twice as long while it is watched."""

    fixed: float
    token: float
    stalls: tuple[int, ...] = ()  # the texts of sheets beside which other work runs, once

    def seconds(self, texts, tokens, rows, watch=False):
        assert rows == 1
        taken = (1 + watch) * (self.fixed + self.token * texts * tokens)
        if texts in self.stalls:
            self.stalls = tuple(one for one in self.stalls if one != texts)
            return 100 * taken
        return taken


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(400, 0.005), (40, 0.0075), (20, 0.01), (5, 0.01), (0, 0.01), (4000, 0.005), (220, 1.15 / 220)],
)
def test_a_token_costs_by_its_sheet(tokens, seconds):
    assert TIMES.of_token(tokens) == pytest.approx(seconds)
    assert TIMES.of_token(tokens, watched=True) == pytest.approx(2 * seconds)
    assert (TIMES.text, TIMES.batch) == (20, 400)


def test_sheets_grow_up_to_what_the_own_level_computes_in_fifty_milliseconds():
    """40 texts of 25 tokens take 10 + 40 ms. Sheets of 1, 2, 4 ... 32 texts are below; 64 take 74 ms, and 43 of them 50."""
    small, own = timed([Clock(0.005, 0.00001), Clock(0.010, 0.00004)], 25, 1, watched=1)
    assert own.tokens == small.tokens == (25, 50, 100, 200, 400, 800, 43 * 25)
    assert own.seconds == pytest.approx([0.011, 0.012, 0.014, 0.018, 0.026, 0.042, 0.053])
    assert small.seconds[-1] == pytest.approx(0.01575) and small.watched[-1] == pytest.approx(0.0315)
    assert own.watched == own.seconds, "nothing goes on from the own level"
    assert timed([Clock(0.005, 0.00001), Clock(0.010, 0.00004)], 25, 1, watched=0)[0].watched == small.seconds


def test_a_batch_has_its_bounds():
    assert timed([Clock(0, 1e-9)], 100, 1, watched=0)[0].batch == 4000  # 40 texts, at most 4,096 tokens
    assert timed([Clock(10, 1)], 30, 1, watched=0)[0].tokens == (30, 150)  # 128 tokens are always allowed
    assert timed([Clock(0, 1e-9)], 5000, 1, watched=0)[0].tokens == (5000,)


def test_a_slow_moment_does_not_count():
    stalling = timed([Clock(0.001, 0.00001, stalls=(4, 8)), Clock(0.010, 0.00004)], 25, 1, watched=0)
    assert stalling == timed([Clock(0.001, 0.00001), Clock(0.010, 0.00004)], 25, 1, watched=0)


def test_attention_may_cost_more_than_all_layers():
    deep, own = timed([Clock(0.009, 0.00003), Clock(0.010, 0.00004)], 25, 1, watched=1)
    assert deep.watched[-1] == pytest.approx(2 * deep.seconds[-1]) and deep.watched[-1] > own.seconds[-1]


def test_the_own_level_is_timed_with_attention_where_another_backbone_follows():
    own = timed([Clock(0.009, 0.00003), Clock(0.010, 0.00004)], 25, 1, watched=2)[1]
    assert own.watched == pytest.approx([2 * one for one in own.seconds])


def test_times_are_stored_as_milliseconds():
    assert SheetTimes.read(TIMES.stored()) == TIMES
    for name, value in (
        ("tokens", [20, 20, 400]),
        ("tokens", []),
        ("ms", [1.0]),
        ("ms", [0, 1, 2]),
        ("watched_ms", [1, 2, "x"]),
    ):
        with pytest.raises((TypeError, ValueError)):
            SheetTimes.read(TIMES.stored() | {name: value})


def test_the_last_step_of_a_plan_has_a_small_sheet():
    """Sheets take 10 ms besides 0.1 ms a token: a batch of 1,000 tokens 110 ms, 100 of them 20 ms."""
    sheets = SheetTimes((20, 1000), (0.012, 0.110), (0.024, 0.220))
    known = measured()
    known.times[:] = [sheets] * 3
    one = tried(known, (0, 2), 0.6, 16.0, 0.7)
    all_tokens = known.whole[2].tokens.sum()
    share = one.shares[1]
    assert one.shares[0] == 1 and 0 < share < one.reached[1], "words were left out"
    taken = 0.220 + 0.010 + 0.1 * share  # the first level is watched
    assert one.mean * len(known.examples) / all_tokens * 1000 == pytest.approx(taken)
    unpruned = tried(known, (0, 2), 0.6, 16.0)
    assert unpruned.shares[1] > share
    assert unpruned.mean * len(known.examples) / all_tokens * 1000 == pytest.approx(0.110 + 0.010 + 0.1 * unpruned.shares[1])


def test_another_backbone_computes_what_a_batch_of_the_first_one_sends_on():
    """Of a batch of 1,000 tokens here, all texts together have 2,000 tokens there: half of them are a sheet of 1,000."""
    known = measured(levels=2)
    near, far = known.whole
    larger = SheetTimes((20, 1000, 4000), (0.02, 0.5, 1.2), (0.02, 0.5, 1.2))
    known = replace(known, whole=[near, replace(far, tokens=2 * near.tokens)], times=[known.times[0], larger])
    tokens = known.whole[1].tokens / 2
    assert known.seconds(1, tokens) == pytest.approx(tokens * 0.5 / 1000)
    assert known.alone(1) == pytest.approx(known.whole[1].tokens * 1.2 / 4000)


def test_costs_of_texts_are_those_of_their_tokens():
    known = measured()
    alone = known.alone(2)
    assert alone == pytest.approx(0.004 * known.whole[2].tokens)
    assert known.seconds(2, np.zeros(len(alone), dtype=np.int64)).sum() == 0

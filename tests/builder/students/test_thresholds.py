"""The students that are asked first are chosen by what their answers lose against those of all."""

import numpy as np
import pytest

from builder.students.team import asked_first
from hplm.levels.calibration import Calibration
from hplm.tenants.students import Students, Team

EACH = 0.25  # the cost of a member
TEXTS, EASY = 200, 150


def teams_of(size):
    return [Team(number, number * EACH, Calibration()) for number in range(size, 0, -1)]


def logits_of(*margins):
    """Returns logits of two labels, whose difference is given: for the easy texts, and for the others."""
    return [np.repeat([[0.0, easy], [0.0, hard]], [EASY, TEXTS - EASY], axis=0) for easy, hard in margins]


@pytest.mark.parametrize(
    ("margins", "drop", "members", "cost"),
    [
        ([(6.0, -0.1), (6.0, 4.0)], 1.0, 1, 0.3125),  # the hard quarter is unsure: the second one is asked about it alone
        ([(6.0, -0.1), (6.0, 4.0)], 40.0, 1, 0.25),  # all of it may be lost
        ([(-0.1, -0.1), (6.0, 4.0)], 1.0, None, 0.5),  # the first one is wrong everywhere
        ([(6.0, 4.0), (6.0, 4.0)], 1.0, 1, 0.25),  # and here never
    ],
)
def test_the_first_answer_alone_where_they_are_sure_and_lose_little(margins, drop, members, cost):
    (team, *rest) = asked_first(teams_of(2), logits_of(*margins), np.full(TEXTS, 5), drop)
    assert (team.first.members if team.first else None) == members and team.cost == pytest.approx(cost)
    if 0.25 < cost < 0.5:
        easy, hard = (1 / (1 + np.exp(-abs(margin))) for margin in margins[0])
        assert hard < team.first.threshold < easy and team.first.leaves == 0.75
    assert [one.members for one in rest] == ([1] if cost > EACH else [])
    Students(1, (team, *rest)).check()


def test_long_texts_count_more_and_a_team_that_is_not_cheaper_than_a_larger_one_is_left_out():
    """Of two, both are needed for all texts, and cost more than three of which one answers most texts alone."""
    lengths = np.repeat([1, 97], [EASY, TEXTS - EASY])
    logits = logits_of((6.0, -0.1), (-6.0, 0.1), (6.0, 4.0))
    by_length = {
        name: asked_first(teams_of(3), logits, own, drop=1.0) for name, own in {"hard": lengths, "all": lengths * 0 + 1}.items()
    }
    assert by_length["hard"][0].first.leaves == pytest.approx(EASY / (EASY + 97 * (TEXTS - EASY)))
    assert [team.members for team in by_length["hard"]] == [3, 2, 1]
    assert [team.members for team in by_length["all"]] == [3, 1]

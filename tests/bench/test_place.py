"""AlpaServe's figures from short simulations."""

import pytest

from bench.measuring.alpaserve import PAPER, cluster_of, models, problem_of
from bench.measuring.place import NO_DEADLINE, _fig2, _table2, highest_rate
from bench.measuring.place_picture import draw
from bench.place import PlaceBench
from hplm.placement.baselines import baseline

CASE = PlaceBench(40.0, 1)


def test_table_2_is_nearly_that_of_the_paper():
    for row in _table2(PlaceBench(200.0, 1)).values():
        assert row["replication"] == pytest.approx(row["paper_replication"], abs=0.08)
        assert row["search"] >= row["replication"]


@pytest.mark.parametrize("cv, shares, least", [(1.0, (0.5, 0.5), 1.15), (3.0, (0.5, 0.5), 1.4), (1.0, (0.2, 0.8), 3.0)])
def test_two_stages_share_bursts_as_in_fig_2(cv, shares, least):
    assert _fig2(CASE, cv, shares) > least


def test_the_highest_rate_is_found():
    assert highest_rate(lambda rate: 1.0 if rate <= 37 else 0.5, 10.0) == pytest.approx(37, rel=0.015)
    assert highest_rate(lambda rate: 1.0 if rate <= 37 else 0.5, 300.0) == pytest.approx(37, rel=0.015)


def test_model_sets_take_turns_and_clusters_have_machines():
    kinds = models(PAPER["sets"]["S3"])
    assert len(kinds) == 60 and len(set(kinds[:6])) == 6
    assert [len(machine.devices) for machine in cluster_of(20).machines] == [8, 8, 4]


def test_replicas_fit_as_often_as_on_a_v100():
    problem = problem_of(["BERT-2.7B"] * 4, 1, 4.0, 1.0, 5.0, 20.0, 0)
    assert len(baseline("replication", problem).groups[0].units) == 2


def test_curves_are_drawn(tmp_path):
    draw({"a": {"search": {"1": 0.5, "2": 0.7}, "replication": {"1": None, "2": 0.6}}}, tmp_path / "place.svg")
    assert (tmp_path / "place.svg").read_text().startswith("<?xml")


def test_nothing_is_refused_without_deadlines():
    problem = problem_of(["BERT-6.7B"] * 2, 2, 3.0, 3.0, NO_DEADLINE, 50.0, 0)
    assert baseline("replication", problem).attained.share == 1

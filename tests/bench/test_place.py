"""AlpaServe's figures from short simulations."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.measuring import place_measured, place_shared
from bench.measuring.alpaserve import PAPER, cluster_of, models, problem_of
from bench.measuring.place import NO_DEADLINE, _fig2, _table2, highest_rate
from bench.measuring.place_curves import _changed, _large
from bench.measuring.place_cuts import cut_curves, partition_curves
from bench.measuring.place_measured import bench_measured, figures_of, table_of
from bench.measuring.place_picture import draw
from bench.place import MeasuredBench, PlaceBench, SharedBench
from hplm.placement.baselines import baseline
from testing.toy import CONFIG

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


def test_hops_cost_less_than_an_uneven_cut_and_dividing_a_stage_the_most():
    """Fig. 8."""
    curves = cut_curves()
    stages, divided = curves["Fig. 8a: overhead of stages"], curves["Fig. 8b: overhead of devices a stage"]
    assert 0 < stages["hops"]["8"] < stages["uneven cut"]["8"]
    for devices in ("2", "4", "8"):
        assert divided["communication"][devices] > stages["hops"][devices] + stages["uneven cut"][devices]


def test_stages_have_throughput_divided_ones_are_fast_and_replicas_need_memory():
    """Fig. 9."""
    curves = cut_curves()
    ways = "stages", "devices a stage", "replicas"
    latency, throughput, memory = ([curves[title][way]["8"] for way in ways] for title in curves if title.startswith("Fig. 9"))
    assert latency[1] < latency[2] < latency[0]
    assert throughput[1] < throughput[0] < throughput[2]
    assert memory[0] == memory[1] and memory[2] == pytest.approx(8 * memory[0])


def test_the_best_cut_has_less_overhead_than_an_equal_one():
    """Fig. 16: 32.9 % and 46.7 % less at 8 stages in the paper."""
    for lines in partition_curves().values():
        assert all(lines["best cut"][n] <= lines["equal cut"][n] + 1e-9 for n in lines["best cut"])
        assert lines["best cut"]["8"] < 0.7 * lines["equal cut"]["8"]


def test_a_search_answers_more_large_models_in_time_than_devices_of_their_own():
    """Fig. 13."""
    lines = _large(replace(CASE, seconds=60.0), (8,), (4,), (5,))["Fig. 13: in time by rate"]
    manual = [by_rate["8"] for name, by_rate in lines.items() if name != "search"]
    assert len(manual) == 4 and lines["search"]["8"] > max(manual) > 0


def test_a_search_suffers_less_than_replication_where_other_requests_come():
    """Fig. 14."""
    lines = _changed(CASE, (20,), (4,), (5,))["Fig. 14: other requests come, by rate"]
    assert lines["search"]["20"] > lines["clockwork"]["20"] and lines["search"]["20"] > lines["replication"]["20"]
    assert 0 < lines["search, timely"]["20"] <= 1


def test_curves_are_drawn(tmp_path):
    draw({"a": {"search": {"1": 0.5, "2": 0.7}, "replication": {"1": None, "2": 0.6}}}, tmp_path / "place.svg")
    assert (tmp_path / "place.svg").read_text().startswith("<?xml")


def test_nothing_is_refused_without_deadlines():
    problem = problem_of(["BERT-6.7B"] * 2, 2, 3.0, 3.0, NO_DEADLINE, 50.0, 0)
    assert baseline("replication", problem).attained.share == 1


def test_the_simulators_errors_are_in_percentage_points():
    points = [
        {"real": 0.5, "simulated": 0.52, "screened": 0.6},
        {"real": 0.9, "simulated": 0.86, "screened": 0.9},
    ]
    found = figures_of(points)
    assert found == pytest.approx({
        "sim_error_max": 4, "sim_error_mean": 3, "screen_error_max": 10, "screen_error_mean": 5,
    })  # fmt: skip


def test_clients_run_on_the_cores_of_the_servers(monkeypatch):
    """The simulators add the clients' work to these cores."""
    mine, during = {3, 4, 5, 6}, []

    class Recorded:
        def __init__(self, case, folder, devices):
            self.placements, self.profile = ["one"], SimpleNamespace(error=SimpleNamespace(mean=0.0))

        def points(self, name):
            during.append(set(mine))
            return [{"real": 1.0, "simulated": 1.0, "screened": 1.0}]

    def pin(_, cores):
        mine.clear()
        mine.update(cores)

    monkeypatch.setattr(place_measured, "Measured", Recorded)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(mine))
    monkeypatch.setattr(os, "sched_setaffinity", pin)
    bench_measured(MeasuredBench())
    assert during == [{3, 4}] and mine == {3, 4, 5, 6}


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_two_placements_are_served_beside_their_simulation():
    before = os.sched_getaffinity(0)
    figures = bench_measured(MeasuredBench().quick())
    assert [point["placement"] for point in figures["points"]] == ["a server a core", "two cores a stage"]
    assert all(0 <= point[name] <= 1 for point in figures["points"] for name in ("real", "simulated", "screened"))
    assert "two cores a stage" in table_of(figures) and os.sched_getaffinity(0) == before


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_two_backbones_are_served_apart_and_together(monkeypatch):
    monkeypatch.setitem(place_shared.SIZES, "toy", CONFIG)
    monkeypatch.setattr(place_shared, "TOKENS", 12)
    before = os.sched_getaffinity(0)
    figures = place_shared.bench_shared(SharedBench("toy", "fp32", tenants=1, load=0.5, seconds=4.0, rounds=1))
    for name in ("poisson", "cv3", "skew"):
        assert figures[f"fig2_{name}"] > 0 and all(ms > 0 for ms in figures["mean_ms"][name].values())
    assert "two stages for both" in place_shared.table_of(figures) and os.sched_getaffinity(0) == before

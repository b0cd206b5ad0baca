"""The papers' figures: their order is that of the papers. `tests/bench/test_commands.py` has the commands.

AlpaServe's baselines place as they say.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from hplm.model.attention import PackedAttention
from hplm.placement.placement import Placement
from research.papers.alpaserve import cut_curves, figures_of, stated
from research.papers.placements import clockwork, greedy, manual, replication, round_robin
from research.papers.tabi import Looked
from research.papers.tcb import simulated
from research.papers.timeline import trace_of
from tests.placement.problems import problem_of


@pytest.mark.slow
def test_tcbs_order_of_packings_and_policies() -> None:
    found = simulated(0.4, (100.0, 1000.0), 1)
    assert all(ratios["to_naive"] > ratios["to_turbo"] > 1 for ratios in found["to_concat"].values())
    for axis in ("rows", "variances", "row_tokens"):
        assert all(by_policy["DAS"]["utility"] > by_policy["FCFS"]["utility"] for by_policy in found[axis].values())


@pytest.mark.slow
def test_alpaserves_table_2_and_fig_2_are_nearly_those_of_the_paper() -> None:
    table, equal, skewed = (next(iter(figure.curves(3).values())) for figure in figures_of(100.0)[:3])
    paper = stated()["replication, the paper's"]
    assert all(share == pytest.approx(paper[scale], abs=0.08) for scale, share in table["replication"].items())
    assert all(table["search"][scale] >= share for scale, share in table["replication"].items())
    for found, cv, least in ((equal, "1", 1.15), (equal, "3", 1.4), (skewed, "1", 3.0)):
        assert next(iter(found.values()))[cv] > least


def test_alpaserves_cuts_are_in_the_order_of_the_paper() -> None:
    at_8 = {title[:7]: {line: curve["8"] for line, curve in lines.items()} for title, lines in cut_curves().items()}
    assert 0 < at_8["Fig. 8a"]["hops"] < at_8["Fig. 8a"]["uneven cut"]
    slowest_first, fastest_first = (sorted(at_8[title], key=at_8[title].get, reverse=True) for title in ("Fig. 9a", "Fig. 9b"))
    assert slowest_first == ["stages", "replicas", "devices a stage"]
    assert fastest_first == ["replicas", "stages", "devices a stage"]
    assert at_8["Fig. 16"]["best cut"] < 0.7 * at_8["Fig. 16"]["equal cut"]  # 32.9 % and 46.7 % less in the paper


@pytest.mark.parametrize(("place", "stages"), [(round_robin(2), 2), (greedy(2), 2), (manual(1, 2), 1), (replication, 1)])
def test_baselines_cut_as_they_say(place, stages):
    problem = problem_of(8.0, 6.0, devices=4, memory_mb=80)
    found = place(problem)
    assert found.groups and all(group.stages == stages for group in found.groups)
    Placement.of(found.groups, problem.units, problem.cluster, problem.profile).check(problem.cluster, problem.profile)
    assert 0 < found.attained.share <= 1


def test_clockwork_places_each_window_anew():
    """One device holds one of two backbones, which take turns: a placement for all of the time serves half."""
    problem = problem_of(8.0, 8.0, devices=1, memory_mb=40, rate=20.0, seconds=20.0, scale=20.0)
    turn = (problem.trace.arrival_ns // 5_000_000_000) % 2
    problem = problem.on(replace(problem.trace, unit=turn.astype(np.int64)))
    assert clockwork(5)(problem).attained.share > 0.9
    assert replication(problem).attained.share < 0.7


def test_a_journal_becomes_a_trace(tmp_path) -> None:
    entries = [
        {"batch": 7, "texts": 2, "stages": {"prepare": [1.0, 1.1], "compute": [1.3, 2]}},
        *({"computed": 2.0, "answered": at, "batch": 7} for at in (2.1, 2.3)),
        {"computed": 0, "answered": 2.3, "batch": 0},  # refused
    ]
    (tmp_path / "journal").write_text("\n".join(map(json.dumps, entries)))
    events = trace_of(tmp_path / "journal")["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(threads[one["tid"]], one["name"], one["ts"], round(one["dur"])) for one in events if one["ph"] == "X"]
    staging, engine = ("staging", "prepare 7", 0, 100_000), ("engine", "compute 7", 300_000, 700_000)
    assert spans == [staging, engine, ("answering", "answer 7", 1e6, 300_000)]


def test_words_that_are_looked_at_stay() -> None:
    looked = Looked([3, 4], heads=1)
    query, key = torch.ones(7, 4), torch.zeros(7, 4)
    key[2], key[5] = 9.0, 9.0  # all tokens look at the last of the first text, and at the third of the second
    value = torch.randn(7, 4)
    assert torch.allclose(looked(0, query, key, value), PackedAttention([3, 4], 1)(0, query, key, value))
    tokens, lengths = looked.most(0.5)
    assert tokens.tolist() == [0, 2, 3, 5] and lengths == [2, 2]

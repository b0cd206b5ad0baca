"""The benchmark of stages, small: it measures every variant, and cuts where the slowest stage is the fastest."""

import os

import numpy as np
import pytest

from bench.measuring.stages import (
    BOTH_CORES,
    NO_STAGES,
    ONE_STAGE,
    PIPELINED,
    REPLICAS,
    _first_layers,
    bench_stages,
    figures_of,
    table_of,
)
from bench.stages import StagesBench
from testing.random_store import SIZES


@pytest.mark.parametrize(
    "layers, first", [([1, 1], 1), ([1, 1, 1, 1], 2), ([1, 1, 1, 0.5], 2), ([5, 1, 1, 1], 1), ([1, 1, 1, 9], 3)]
)
def test_the_cut_makes_the_slowest_stage_the_fastest(layers, first):
    assert _first_layers(np.array(layers)) == first


def test_ratios_are_medians_of_those_of_the_rounds():
    rates = {
        PIPELINED: [90.0, 45.0, 95.0], REPLICAS: [100.0, 50.0, 100.0], BOTH_CORES: [80.0, 40.0, 80.0],
        ONE_STAGE: [50.0, 25.0, 50.0], NO_STAGES: [51.0, 26.0, 50.0],
    }  # fmt: skip
    figures = figures_of(rates)
    assert figures["pipeline_over_replicas"] == 0.9 and figures["one_stage_over_today"] == 1.02
    printed = table_of({**figures, "cut": "0-1@cpu:0 2-3@cpu:1", "layer_ms": [1.0], "best_by_cut": 0.95})
    assert "0.900 (target 0.92)" in printed and "0-1@cpu:0" in printed


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two stages take two cores")
def test_every_variant_is_measured():
    figures = bench_stages(StagesBench("minilm", 8, 4, tenants=6, slots=18, seconds=0.5, rounds=1))
    assert all(figures[name] > 0 for name in (PIPELINED, REPLICAS, BOTH_CORES, ONE_STAGE, NO_STAGES))
    assert len(figures["layer_ms"]) == SIZES["minilm"].upper_layers and figures["cut"].startswith("0-")

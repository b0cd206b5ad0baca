"""The cluster benchmark: its targets, and the tenants that a third replica takes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.cluster import PARTS, ClusterBench
from bench.measuring import cluster_simulated
from bench.measuring.cluster import TARGETS, WITH_STAND_INS, WITH_THREE, WITH_TWO, bench_cluster, met, table_of
from bench.measuring.cluster_overflow import FACTORS
from hplm.errors import InvalidInput
from loadtest.report import Report

NO_HAPROXY = shutil.which("haproxy") is None and not Path("/usr/sbin/haproxy").exists()


def test_each_figure_is_shown_beside_its_target():
    figures = {"proxy_over_direct": 0.97, "reroute_s": 2.5, "kill_wrong": 0, "through_req_per_s": 812.3}
    table = table_of({**figures, "targets": {name: met(name, figures[name]) for name in TARGETS if name in figures}})
    shown = {line.split()[0]: line for line in table.splitlines() if line}
    assert shown["proxy_over_direct"].endswith(">= 0.95: met")
    assert shown["reroute_s"].endswith("<= 2: missed")
    assert shown["kill_wrong"].endswith("<= 0: met")
    assert "812.3" in shown["through_req_per_s"]


def test_every_part_is_measured_somewhere():
    assert {*WITH_TWO, *WITH_THREE, *WITH_STAND_INS} == set(PARTS)


@pytest.mark.parametrize("options, what", [({"parts": ("dance",)}, "--only dance"), ({"rounds": 0}, "--rounds 0")])
def test_a_case_without_a_meaning_is_refused(options, what):
    with pytest.raises(InvalidInput, match=what):
        ClusterBench(**options)


@pytest.mark.parametrize("cores, core_ms", [({3, 5}, 12 + 2 + 1), ({3, 4, 5}, 12)])
def test_what_a_lone_text_of_one_letter_costs_the_cores_of_the_replicas(monkeypatch, cores, core_ms):
    """Router and client count if they have no other cores. By the times in `computed` the replicas need 12 ms a request."""
    asked = []
    computed = {11: iter((0, 500e6)), 12: iter((0, 100e6)), 13: iter((0, 100e6))}

    def sent(address, load):
        asked.extend(load.requests)
        statuses, latencies = np.full(50, 200), np.full(50, 0.02)
        return Report(1.0, 0.05, np.arange(50), statuses, latencies, lag_s=0.0)

    cluster = SimpleNamespace(
        replicas={"one": "", "two": ""}, pids=lambda name: (1, {"one": 11, "two": 12}[name]), router=13, address=""
    )
    material = SimpleNamespace(asking=lambda text, tenant: f"{tenant} asks {text!r}".encode(), tenants=["t"])
    monkeypatch.setattr(cluster_simulated, "sent", sent)
    monkeypatch.setattr(cluster_simulated, "computed_ns", lambda group: next(computed[group]))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores)
    found = cluster_simulated._round_trip(cluster, material, [3, 5])  # pyright: ignore
    assert asked == [b"t asks 'a'"]
    assert (found.ns, found.core_ns) == (pytest.approx(20e6), pytest.approx(core_ms * 1e6))


@pytest.mark.slow
@pytest.mark.skipif(NO_HAPROXY, reason="haproxy is not installed")
def test_a_third_replica_takes_its_share_of_the_tenants_and_moves_no_other():
    figures = bench_cluster(ClusterBench(parts=("ring",)).quick())
    assert 0.2 < figures["moved_share"] <= 0.4
    assert figures["strayed_share"] == 0
    assert figures["targets"] == {"moved_share": True}


@pytest.mark.slow
@pytest.mark.skipif(NO_HAPROXY, reason="haproxy is not installed")
def test_requests_are_passed_on_because_of_the_bound_alone():
    figures = bench_cluster(ClusterBench(parts=("overflow",)).quick())
    assert figures["passed_on_of_8_at_0"] == 0 < figures["passed_on_of_8_at_125"]
    assert all(figures[f"brought_over_turns_of_8_at_{factor}"] > 0 for factor in FACTORS)

"""The comparison, small: schemes on a real Triton, interrupted and continued."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.measuring.tenants import tenant_id
from hplm.errors import HplmError, InvalidInput
from loadtest.report import Load, Report
from research.comparison import compare as compare_module
from research.comparison.compare import Comparison, run, table
from research.comparison.results import Results
from research.comparison.served_schemes import (
    DISK,
    ExportedScheme,
    Served,
    Setup,
    WeightMegabytes,
    export_compared,
    weight_megabytes,
)
from research.comparison.swapper import Residency
from testing.toy import CONFIG
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

SMALL = Setup(CONFIG, tenants=5, budget=2, batch_tokens=64, dtype="fp32", rank=4)
SCHEMES = ("hplm", "dedicated", DISK)  # the tests of exporting cover the other schemes
CASE = Comparison("saturate", SMALL, (1, 5), SCHEMES, "12", seconds=0.5, connections=3, patience=60.0)


def test_schemes_run_on_the_same_triton_and_no_number_is_measured_twice(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compare_module, "gflops", lambda: 1.0)
    first = run(replace(CASE, schemes=("hplm", "dedicated")), tmp_path / "results", tmp_path / "work")
    figures = run(CASE, tmp_path / "results", tmp_path / "work")
    assert set(figures["schemes"]) == set(SCHEMES)
    for scheme, rates in figures["schemes"].items():
        assert set(rates) == {"1", "5"} and all(rate > 0 for rate in rates.values()), scheme
    assert figures["schemes"]["hplm"] == first["schemes"]["hplm"]  # not measured again
    results = Results(tmp_path / "results" / "toy-saturate")
    assert results.get("dedicated", 5)["loads"] > 0 and results.get("dedicated", 1)["loads"] == 0
    for _, _, measured in results.all():
        assert set(measured["by_status"]) == {"200"} and not measured["errors"] and measured["private_mb"] > 0
        assert len(measured["machine_gflops"]) == 2
    assert figures["ratios"]["hplm_to_inprocess_from_disk"] > 0 and "hplm_to_dedicated" in table(figures)
    monkeypatch.setattr(compare_module, "export_compared", lambda *_: pytest.fail("measured again"))
    assert run(CASE, tmp_path / "results", tmp_path / "work") == figures
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "results/toy-saturate", "seconds")):
        run(replace(CASE, seconds=2.0), tmp_path / "results", tmp_path / "work")


def reported(statuses: list[int], **more: object) -> Report:
    return Report(1.0, 0.1, np.arange(len(statuses)), np.array(statuses), np.full(len(statuses), 0.01), 0.0, **more)


@pytest.fixture
def loads(monkeypatch) -> list[Load]:
    """Records the loads instead of sending them, and reports all requests as answered."""
    sent: list[Load] = []
    monkeypatch.setattr(compare_module, "run_apart", lambda load: (sent.append(load), reported([200]))[1])
    monkeypatch.setattr(compare_module, "weight_megabytes", lambda _: WeightMegabytes(1.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(compare_module, "gflops", lambda: 1.0)
    return sent


def serving(scheme: str) -> Served:
    residency = Residency(SMALL.budget, lambda name: None, lambda name: None)
    swapper = SimpleNamespace(url="127.0.0.1:2", residency=residency) if scheme == "dedicated" else None
    server = SimpleNamespace(http_url="127.0.0.1:1", pid=os.getpid())
    return Served(ExportedScheme(scheme, Path("nowhere"), SMALL), server, swapper)


@pytest.mark.parametrize(("scheme", "tenants", "warm"), [("hplm", 5, 5), ("dedicated", 1, 1), ("dedicated", 5, 2)])
def test_every_number_has_its_own_warm_up(loads, scheme, tenants, warm) -> None:
    """If not all models fit, the warm-up uses only the loaded ones."""
    server = serving(scheme)
    measured = compare_module._measure(server, CASE, tenants)
    warming, load = loads
    assert warming.seconds < load.seconds and (warming.port, warming.connections) == (load.port, load.connections)
    for sent, asked in ((warming, warm), (load, tenants)):
        named = [any(tenant_id(number).encode() in request for request in sent.requests) for number in range(5)]
        assert named == [number < asked for number in range(5)]
    assert measured.get("loads") == (0 if scheme == "dedicated" else None)


@pytest.mark.parametrize(
    ("report", "named"),
    [
        (reported([200, 503, 503, 400]), ["hplm", 5, 3, 1, "'status 503'", 2]),
        (reported([200], errors=Counter(timeout=4, reset=1)), ["hplm", 5, 1, "'timeout'", 4]),
        (reported([200], lost_connections=1), ["hplm", 5, "'lost connection'"]),
        (reported([]), ["hplm", 5]),
    ],
)
def test_a_load_with_failures_gives_no_rate(loads, monkeypatch, report, named) -> None:
    monkeypatch.setattr(compare_module, "run_apart", lambda load: report)
    with pytest.raises(HplmError, match=mentioning(*named)):
        compare_module._measure(serving("hplm"), CASE, 5)


def test_a_failure_does_not_stop_other_measurements(monkeypatch, tmp_path: Path) -> None:
    def measured(server: Served, case: Comparison, tenants: int) -> dict:
        if server == "hplm" and tenants == 1:
            reported([200], errors=Counter(timeout=1)).expect_success("hplm with 1 tenants")
        return {"req_per_s": 1.0}

    monkeypatch.setattr(compare_module, "export_compared", lambda work, scheme, setup: scheme)
    monkeypatch.setattr(compare_module, "served", lambda exported: nullcontext(exported))
    monkeypatch.setattr(compare_module, "_measure", measured)
    with pytest.raises(HplmError, match=mentioning("hplm", 1, "'timeout'")):
        run(replace(CASE, schemes=("hplm", "plot")), tmp_path, tmp_path)
    results = Results(tmp_path / "toy-saturate")
    assert {(scheme, tenants) for scheme, tenants, _ in results.all()} == {("hplm", 5), ("plot", 1), ("plot", 5)}


def test_an_open_scenario_reports_response_times(tmp_path: Path) -> None:
    case = replace(CASE, scenario="burst", tenants=(3,), schemes=("dedicated_inprocess",), seconds=2.0)
    run(case, tmp_path)
    for _, _, measured in Results(tmp_path / "toy-burst").all():
        # A user starts every 0.05 s, and each sends again after 1.2 s.
        assert measured["offered"] == 40 + 16 == measured["succeeded"]
        assert len(measured["latency_ms"]) == 101 and np.all(np.diff(measured["latency_ms"]) >= 0)


def test_the_weights_of_each_scheme_are_counted(tmp_path: Path) -> None:
    costs = {
        scheme: weight_megabytes(export_compared(tmp_path, scheme, SMALL)) for scheme in ("hplm", "shared", "dedicated", "plot")
    }
    parameters = 4 * (4 * 32 * 32 + 4 * 32 + 2 * 32 * 64 + 64 + 32 + 4 * 32) + (200 + 64 + 2) * 32 + 2 * 32
    assert costs["dedicated"].each == pytest.approx(4 * parameters / 1e6, rel=0.1)  # plus a header
    assert costs["plot"].each < costs["dedicated"].each and costs["plot"].mapped == costs["hplm"].mapped > 0
    assert costs["hplm"].each == 0 and costs["hplm"].swapped < costs["dedicated"].swapped / 10
    assert costs["shared"].shared > costs["hplm"].shared and costs["shared"].swapped < costs["hplm"].swapped
    assert costs["hplm"].models_in_16_gb > 10 * costs["dedicated"].models_in_16_gb


def test_the_same_settings_go_on_with_the_results(tmp_path: Path) -> None:
    """Settings come back from a file, where no tuple is."""
    Results.open(tmp_path, CASE.settings()).put("hplm", 5, {"req_per_s": 1})
    assert Results.open(tmp_path, CASE.settings()).get("hplm", 5) == {"req_per_s": 1}


def test_results_are_written_whole_and_in_order(tmp_path: Path) -> None:
    results = Results.open(tmp_path, {"seconds": 1})
    for tenants in (100, 2, 30):
        results.put("dedicated_inprocess", tenants, {"req_per_s": tenants})
    assert [(scheme, tenants) for scheme, tenants, _ in results.all()] == [("dedicated_inprocess", n) for n in (2, 30, 100)]
    assert results.get("dedicated", 2) is None
    assert json.loads((tmp_path / "settings.json").read_text()) == {"seconds": 1}

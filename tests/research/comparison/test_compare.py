"""The comparison, small: schemes on a real Triton, interrupted and continued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hplm.errors import InvalidInput
from research.comparison import compare as compare_module
from research.comparison.compare import Comparison, run, table
from research.comparison.results import Results
from research.comparison.served_schemes import (
    DISK,
    Setup,
    export_compared,
    weight_megabytes,
)
from testing.toy import CONFIG
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

SMALL = Setup(CONFIG, tenants=5, budget=2, batch_tokens=64, dtype="fp32", rank=4)
SCHEMES = ("hplm", DISK)  # the tests of exporting cover the other schemes
CASE = Comparison("saturate", SMALL, (1, 5), SCHEMES, "12", seconds=0.5, connections=3, patience=60.0)


def test_schemes_run_on_the_same_triton_and_no_number_is_measured_twice(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compare_module, "gflops", lambda: 1.0)
    first = run(replace(CASE, schemes=("hplm",)), tmp_path / "results", tmp_path / "work")
    figures = run(CASE, tmp_path / "results", tmp_path / "work")
    assert set(figures["schemes"]) == set(SCHEMES)
    for scheme, rates in figures["schemes"].items():
        assert set(rates) == {"1", "5"} and all(rate > 0 for rate in rates.values()), scheme
    assert figures["schemes"]["hplm"] == first["schemes"]["hplm"]  # not measured again
    results = Results(tmp_path / "results" / "toy-saturate")
    for _, _, measured in results.all():
        assert set(measured["by_status"]) == {"200"} and not measured["errors"] and measured["private_mb"] > 0
        assert len(measured["machine_gflops"]) == 2
    assert figures["ratios"]["hplm_to_inprocess_from_disk"] > 0 and "hplm" in table(figures)
    monkeypatch.setattr(compare_module, "export_compared", lambda *_: pytest.fail("measured again"))
    assert run(CASE, tmp_path / "results", tmp_path / "work") == figures
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "results/toy-saturate", "seconds")):
        run(replace(CASE, seconds=2.0), tmp_path / "results", tmp_path / "work")


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

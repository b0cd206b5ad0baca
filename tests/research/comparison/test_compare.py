"""The comparison, small: schemes on a real Triton, interrupted and continued; and its report, from stored results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builder.publish.model_configs import ServingOptions
from hplm.errors import InvalidInput
from research.comparison import compare as compare_module
from research.comparison.compare import QUICK, run
from research.comparison.report import NAMES, described, make_report, summary
from research.comparison.schemes import export_compared, megabytes, random_tenant_store
from testing.random_store import SIZES
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

STORED = Path(__file__).parents[3] / "research/report/results"


def test_schemes_run_on_the_same_triton_and_no_number_is_measured_twice(tmp_path: Path, monkeypatch) -> None:
    """Three servers start. Of the five dedicated models, two fit in memory."""
    first = summary(run(replace(QUICK, schemes=("hplm",)), tmp_path / "results", tmp_path / "work"))
    results = run(QUICK, tmp_path / "results", tmp_path / "work")
    figures = summary(results)
    assert figures["schemes"].keys() == set(QUICK.schemes) and figures["ratios"]["hplm_to_inprocess"] > 0
    assert all(set(rates) == {"1", "5"} and min(rates.values()) > 0 for rates in figures["schemes"].values())
    assert figures["schemes"]["hplm"] == first["schemes"]["hplm"] and "| hPLM | 5 |" in described(results)
    for _, _, measured in results.found:
        assert set(measured["by_status"]) == {"200"} and not measured["errors"] and measured["private_mb"] > 0
    case = replace(QUICK, scenario="burst", tenants=(3,), schemes=("hplm",), seconds=2.0)
    ((_, _, measured),) = run(case, tmp_path / "results", tmp_path / "work").found
    # A user starts every 0.05 s, and each sends again after 1.2 s.
    assert measured["offered"] == 40 + 16 == measured["succeeded"] and np.all(np.diff(measured["latency_ms"]) >= 0)
    monkeypatch.setattr(compare_module, "export_compared", lambda *_: pytest.fail("measured again"))
    assert summary(run(QUICK, tmp_path / "results", tmp_path / "work")) == figures
    with pytest.raises(pytest.fail.Exception):  # a server that knows one tenant is another one
        run(replace(QUICK, tenants=(1,)), tmp_path / "results", tmp_path / "work")


def test_the_weights_of_each_scheme_are_counted(tmp_path: Path) -> None:
    store = random_tenant_store(tmp_path / "store", SIZES["toy"], rank=4)
    hplm, shared, dedicated = (
        megabytes(export_compared(store, tmp_path / scheme, scheme, 5, 2, ServingOptions(dtype="fp32")))
        for scheme in ("hplm", "shared", "dedicated_inprocess")
    )
    parameters = 4 * (4 * 32 * 32 + 4 * 32 + 2 * 32 * 64 + 64 + 32 + 4 * 32) + (200 + 64 + 2) * 32 + 2 * 32
    assert dedicated["each"] == pytest.approx(4 * parameters / 1e6, rel=0.1)  # plus a header
    assert hplm["each"] == 0 == dedicated["mapped"] and hplm["swapped"] < dedicated["swapped"] / 10
    assert shared["shared"] > hplm["shared"] and shared["swapped"] < hplm["swapped"] and hplm["mapped"] > 0
    assert hplm["models_in_16_gb"] > 10 * dedicated["models_in_16_gb"]


def test_the_report_shows_all_stored_results_and_can_be_made_from_its_own_files(tmp_path: Path) -> None:
    assert make_report(STORED, tmp_path / "report") == ["bert-base-saturate", "minilm-steady", "minilm-burst"]
    page = (tmp_path / "report" / "README.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert len(shown) == 3 and all(b"<svg" in (tmp_path / "report" / picture).read_bytes() for picture in shown)
    assert len([line for line in page.splitlines() if "| 1,000 |" in line]) == len(NAMES) and "hplm_to_inprocess" in page
    make_report(tmp_path / "report" / "results", tmp_path / "report")
    assert (tmp_path / "report" / "README.md").read_text() == page
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "nothing")):
        make_report(tmp_path / "nothing", tmp_path / "report")

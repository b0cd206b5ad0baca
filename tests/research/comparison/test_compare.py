"""The comparison, small: schemes on a real Triton, interrupted and continued; and its report, from stored results."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from builder.publish.model_configs import ServingOptions
from hplm.errors import InvalidInput
from research.comparison.compare import QUICK, run
from research.comparison.report import NAMES, make_report
from research.comparison.schemes import export_compared, megabytes, random_tenant_store
from research.result_file import ResultFile
from testing.random_store import SIZES
from tests.support.lent import loading
from tests.support.message import mentioning
from tests.support.servers import Lease

pytestmark = pytest.mark.slow

STORED = Path(__file__).parents[3] / "research/report/results"


@pytest.mark.server("bare")
def test_what_is_missing_is_measured_and_no_number_twice(tmp_path: Path, server: Lease, monkeypatch) -> None:
    """Models are loaded. `tests/bench/test_commands.py` has several schemes."""
    monkeypatch.setattr("research.comparison.compare.TritonServer", partial(loading, server))
    case = replace(QUICK, scenario="burst", tenants=(3, 5), seconds=2.0)
    kept = ResultFile(tmp_path / "toy-burst.jsonl")
    others = [(scheme, tenants) for scheme in QUICK.schemes for tenants in (3, 5) if (scheme, tenants) != ("hplm", 3)]
    for scheme, tenants in others:
        kept.put({"scheme": scheme, "tenants": tenants, "settings": case.settings()}, {"p50_ms": 1.0})
    found = {(scheme, tenants): measured for scheme, tenants, measured in run(case, tmp_path, tmp_path / "work").found}
    assert found.keys() == {("hplm", 3), *others} and all(found[one] == {"p50_ms": 1.0} for one in others)
    # A user starts every 0.05 s, and each sends again after 1.2 s.
    measured = found["hplm", 3]
    assert measured["offered"] == 40 + 16 == measured["succeeded"] and np.all(np.diff(measured["latency_ms"]) >= 0)
    assert set(measured["by_status"]) == {"200"} and not measured["errors"] and measured["private_mb"] > 0
    assert replace(case, tenants=(3,)).settings() != case.settings()  # a server that knows fewer tenants is another one


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

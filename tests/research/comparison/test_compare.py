"""The comparison's figures. `tests/bench/test_commands.py` runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.turns import machine
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError
from loadtest.load import Report
from research.comparison.compare import (
    DTYPE,
    Comparison,
    export_compared,
    measured,
    megabytes,
    percentiles_ms,
    random_tenant_store,
    under_load,
)
from research.result_file import ResultFile
from testing.random_store import SIZES
from tests.support.message import refusing

pytestmark = pytest.mark.slow


def test_no_number_is_measured_twice(tmp_path: Path) -> None:
    case = Comparison("burst", "toy", known_tenants=5, budget=2, lengths="12", seconds=2.0, patience=60.0)
    kept = ResultFile(tmp_path / "toy-burst.jsonl")
    for scheme, tenants in (("hplm", 5), ("shared", 3)):
        settings = {**vars(case), "dtype": DTYPE, "machine": machine()}
        kept.put({"scheme": scheme, "tenants": tenants, "settings": settings}, {"p50_ms": 1.0})
    for scheme, tenants in (("hplm", 5), ("shared", 3)):
        assert measured(case, (tenants,), (scheme,), kept, tmp_path / "work") == {scheme: {tenants: {"p50_ms": 1.0}}}
    assert not (tmp_path / "work").exists()
    with refusing(HplmError, "1 tenants", "--seconds"):  # its tenant sends the first request later
        under_load(replace(case, scenario="steady"), "hplm", SimpleNamespace(http_url="", pid=None), 1)


def test_requests_without_an_answer_count_in_the_percentiles() -> None:
    report = Report(1.0, 0.0, np.arange(4), np.array([200, 503, 200, 200]), np.array([0.1, 0.01, 0.3, 0.2]), 0.0)
    found = percentiles_ms(report, 5)
    assert found[25] == pytest.approx(200) and found[50] == pytest.approx(300) and found[75] is found[99] is None


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

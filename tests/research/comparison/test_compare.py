"""The comparison, small: schemes on a real Triton, interrupted and continued."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bench.machine import machine
from builder.publish.model_configs import ServingOptions
from research.comparison.compare import (
    PERCENTS,
    Case,
    export_compared,
    measured,
    megabytes,
    random_tenant_store,
    rows_of_schemes,
)
from research.result_file import ResultFile
from testing.random_store import SIZES
from tests.support.lent import loading
from tests.support.servers import Lease

pytestmark = pytest.mark.slow

CASE = Case("burst", "toy", known_tenants=5, budget=2, lengths="12", seconds=2.0, patience=60.0)


@pytest.mark.server("bare")
def test_what_is_missing_is_measured_and_no_number_twice(tmp_path: Path, server: Lease, monkeypatch) -> None:
    """Models are loaded. `tests/bench/test_commands.py` has several schemes."""
    monkeypatch.setattr("research.comparison.compare.TritonServer", partial(loading, server))
    kept = ResultFile(tmp_path / "toy-burst.jsonl")
    settings = {**vars(CASE), "machine": machine()}
    for scheme, tenants in (("hplm", 5), ("shared", 3), ("shared", 5)):
        kept.put({"scheme": scheme, "tenants": tenants, "settings": settings}, {"p50_ms": 1.0})
    found = measured(CASE, (3, 5), ("hplm", "shared"), kept, tmp_path / "work")
    one = found["hplm"].pop(3)
    assert found == {"hplm": {5: {"p50_ms": 1.0}}, "shared": {3: {"p50_ms": 1.0}, 5: {"p50_ms": 1.0}}}
    # A user starts every 0.05 s, and each sends again after 1.2 s.
    assert one["succeeded"] == 40 + 16 and one["answered"] == 1 and one["private_mb"] > 0
    rows = {row.name: row.value for row in rows_of_schemes(CASE, {"hplm": {3: one}})}
    within = [rows[f"answered within ms, by percent/hplm with 3 tenants/{percent}"] for percent in PERCENTS]
    assert within == sorted(within) and rows["answered/hplm/3"] == 1


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

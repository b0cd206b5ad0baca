"""The comparison, small: schemes on a real Triton, interrupted and continued; and its report, from stored results."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError, InvalidInput
from loadtest.encode import infer_request
from loadtest.generator import Load
from research.comparison import compare as compare_module
from research.comparison.compare import Comparison, main, run
from research.comparison.model_control import Clients, ModelControl
from research.comparison.report import described, make_report, summary
from research.comparison.schemes import COMPARED, export_compared, random_tenant_store
from tests.loadtest.small_server import SmallServer, answer
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

CASE = Comparison(
    "saturate", "toy", (1, 5), ("hplm", "dedicated"), budget=2, lengths="12", seconds=0.5, connections=3, batch_tokens=64,
    dtype="fp32", rank=4,
)  # fmt: skip
STORED = Path(__file__).parents[3] / "research/report/results"


def test_schemes_run_on_the_same_triton_and_no_number_is_measured_twice(tmp_path: Path, monkeypatch) -> None:
    """Of the five dedicated models, two fit: clients load the others."""
    monkeypatch.setattr(compare_module, "gflops", lambda: 1.0)
    first = summary(run(replace(CASE, schemes=("hplm",)), tmp_path / "results", tmp_path / "work"))
    case = replace(CASE, schemes=("hplm",), tenants=(1,), seconds=0.6)
    assert summary(run(case, tmp_path / "results", tmp_path / "work"))["settings"]["seconds"] == 0.6  # kept apart
    results = run(CASE, tmp_path / "results", tmp_path / "work")
    figures = summary(results)
    assert set(figures["schemes"]) == set(CASE.schemes)
    for scheme, rates in figures["schemes"].items():
        assert set(rates) == {"1", "5"} and all(rate > 0 for rate in rates.values()), scheme
    assert figures["schemes"]["hplm"] == first["schemes"]["hplm"]  # not measured again
    for scheme, tenants, measured in results.found:
        assert set(measured["by_status"]) == {"200"} and not measured["errors"] and measured["private_mb"] > 0
        assert len(measured["machine_gflops"]) == 2
        assert (measured.get("loads", 0) > 0) == (scheme == "dedicated" and tenants == 5)
    assert figures["ratios"]["hplm_to_dedicated_at_most_tenants"] > 0 and "| hPLM | 5 |" in described(results)
    monkeypatch.setattr(compare_module, "export_compared", lambda *_: pytest.fail("measured again"))
    assert summary(run(CASE, tmp_path / "results", tmp_path / "work")) == figures


def test_an_open_scenario_reports_response_times(tmp_path: Path) -> None:
    case = replace(CASE, scenario="burst", tenants=(3,), schemes=("dedicated_inprocess",), seconds=2.0)
    for _, _, measured in run(case, tmp_path).found:
        # A user starts every 0.05 s, and each sends again after 1.2 s.
        assert measured["offered"] == 40 + 16 == measured["succeeded"]
        assert len(measured["latency_ms"]) == 101 and np.all(np.diff(measured["latency_ms"]) >= 0)


def test_the_weights_of_each_scheme_are_counted(tmp_path: Path) -> None:
    store = random_tenant_store(tmp_path / "store", CASE.config, rank=4)
    hplm, shared, dedicated = (
        export_compared(store, tmp_path / scheme, scheme, 5, 2, ServingOptions(dtype="fp32")).megabytes()
        for scheme in ("hplm", "shared", "dedicated")
    )
    parameters = 4 * (4 * 32 * 32 + 4 * 32 + 2 * 32 * 64 + 64 + 32 + 4 * 32) + (200 + 64 + 2) * 32 + 2 * 32
    assert dedicated["each"] == pytest.approx(4 * parameters / 1e6, rel=0.1)  # plus a header
    assert hplm["each"] == 0 == dedicated["mapped"] and hplm["swapped"] < dedicated["swapped"] / 10
    assert shared["shared"] > hplm["shared"] and shared["swapped"] < hplm["swapped"] and hplm["mapped"] > 0
    assert hplm["models_in_16_gb"] > 10 * dedicated["models_in_16_gb"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--budget 0", ["--budget 0"]),
        ("--schemes hplm,plot", ["--schemes", "'plot'"]),
        ("--lengths normal:20,20,3,600", ["--lengths 600"]),
        ("--lengths 2", ["--lengths 2"]),
    ],
)
def test_impossible_options_are_refused(given: str, named: list, capsys) -> None:
    assert main(given.split()) == 1
    assert mentions(capsys.readouterr().err, *named)


@contextmanager
def controlled(budget: int, respond=lambda number, body: answer()) -> Iterator[tuple[SmallServer, ModelControl]]:
    with SmallServer(respond) as triton:
        yield triton, ModelControl(f"127.0.0.1:{triton.port}", ("admin", "secret"), budget)


def changes(triton: SmallServer) -> list[tuple[str, str]]:
    """Returns the model and the verb of each request to model control."""
    lines = [head.split()[1].decode().split("/") for head in triton.heads]
    return [(path[4], path[5]) for path in lines if "repository" in path]


def test_under_traffic_the_budget_holds_and_models_in_use_stay() -> None:
    with controlled(3) as (triton, control):
        used = dict.fromkeys(map(str, range(8)), 0)

        def ask(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(20):
                name = str(rng.randrange(8))
                with control.use(name):
                    used[name] += 1
                    assert name in control._models and len(control._models) <= 3

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        done = changes(triton)
    assert sum(used.values()) == 160 and control.loads == sum(verb == "load" for _, verb in done)
    assert sum(verb == "load" for _, verb in done) - sum(verb == "unload" for _, verb in done) <= 3
    assert all(b"admin: secret" in head.lower() for head in triton.heads)


def test_clients_load_the_model_of_each_request_and_count_from_when_it_was_due() -> None:
    models = [f"m{number % 3}" for number in range(12)]
    requests = [infer_request(model, ["a text"], "tenant") for model in models]
    with controlled(1) as (triton, control):
        load = Load(f"127.0.0.1:{triton.port}", requests, 5.0, count=12, connections=2, patience=5.0)
        report = Clients(control, load, models).run()
        assert report.by_status == {200: 12} and not report.failures and sorted(report.numbers) == list(range(12))
        assert control.loads >= 3 and len(changes(triton)) == 2 * control.loads - 1
        late = replace(load, arrivals=np.zeros(12), connections=1)
        report = Clients(control, late, models).run()
        assert report.succeeded == 12 and np.all(np.diff(report.latencies) > 0)  # a single client, and all are due at once
        report = Clients(control, replace(late, seconds=0.001, patience=1e-9), models).run()
        assert report.errors["unsent"] and report.failures.total() + report.succeeded == 12  # none is forgotten


def test_a_model_that_cannot_be_loaded_ends_the_load_and_is_named() -> None:
    with controlled(1, lambda number, body: answer(status=400, body=b"unknown model")) as (triton, control):
        load = Load(f"127.0.0.1:{triton.port}", [infer_request("a", ["a text"], "tenant")], 60.0, connections=2)
        with pytest.raises(HplmError, match=mentioning("'a'", "unknown model")):
            Clients(control, load, ["a"]).run()


def test_the_report_shows_all_stored_results_and_can_be_made_from_its_own_files(tmp_path: Path) -> None:
    made = make_report(STORED, tmp_path / "report")
    assert made == ["bert-base-saturate", "minilm-steady", "minilm-burst"]
    page = (tmp_path / "report" / "README.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert len(shown) == 3 and all(b"<svg" in (tmp_path / "report" / picture).read_bytes() for picture in shown)
    assert len([line for line in page.splitlines() if "| 1,000 |" in line]) == len(COMPARED)
    for figure in ("Fig. 11", "Table 2", "Fig. 12", "Fig. 13", "hplm_to_inprocess"):
        assert figure in page
    make_report(tmp_path / "report" / "results", tmp_path / "report")
    assert (tmp_path / "report" / "README.md").read_text() == page
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "nothing")):
        make_report(tmp_path / "nothing", tmp_path / "report")

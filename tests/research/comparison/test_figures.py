"""The report is made from result files without measuring, shows all of them, and can be made again from its own files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bench.tools.thread_spans import Span, read_journal
from hplm.errors import InvalidInput
from research.comparison.figures import make_report
from research.comparison.results import Results
from research.comparison.served_schemes import COMPARED
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

SETTINGS = {
    "setup": {"size": "minilm", "budget": 20}, "lengths": "128", "seconds": 15.0, "connections": 16, "patience": 60.0,
    "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8, "torch": "2", "python": "3"},
}  # fmt: skip
RATES = {"hplm": 24.0, "shared": 13.0, "adapter": 12.0, "plot": 23.0, "compressed": 22.0}


def measured(scheme: str, tenants: int) -> dict:
    swaps = scheme not in ("hplm", "adapter", "shared") and tenants > 20
    rate = RATES.get(scheme, 12.0) / (300 if swaps and scheme == "dedicated" else 4 if swaps else 1)
    own = scheme not in ("hplm", "adapter", "shared")
    return {
        "req_per_s": rate, "p50_ms": 1000 / rate, "p99_ms": 3000 / rate, "succeeded": 900, "offered": 1000,
        "offered_req_per_s": 50.0, "latency_ms": (np.linspace(1, 90, 101) * 100 / rate).tolist(), "private_mb": 900.0,
        "shared": 0.0 if own else 170.0, "each": 436.0 if own else 0.0, "swapped": 436.0 if own else 1.2, "mapped": 230.0,
        "machine_gflops": [140.0 + tenants / 100, 150.0],
        "models_in_16_gb": 36 if own else 13_000,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    scenarios = {"saturate": (1, 10, 100, 1000), "slowdown": (1, 1000), "steady": (10, 100), "burst": (100,)}
    for scenario, counts in scenarios.items():
        kept = Results.open(folder / f"minilm-{scenario}", SETTINGS | {"scenario": scenario})
        for scheme in COMPARED:
            for tenants in counts:
                kept.put(scheme, tenants, measured(scheme, tenants))
    pipeline = {"pipelined": 120.0, "no_retrieval": 110.0, "no_swapping": 108.0, "coarse_swapping": 115.0, "synchronous": 95.0}
    case = {"size": "minilm", "tokens": 32, "tenants": 256, "slots": 64}
    (folder / "pipeline.json").write_text(json.dumps(pipeline | {"case": case}))
    spans = []
    for batch in range(40):
        spans += [
            ["stage", f"stage {batch}", batch * 0.02, batch * 0.02 + 0.006],
            ["compute", f"compute {batch}", batch * 0.02 + 0.02, batch * 0.02 + 0.039],
            ["answer", f"answer {batch}", batch * 0.02 + 0.04, batch * 0.02 + 0.041],
        ]
    (folder / "timeline.json").write_text(json.dumps(spans))
    return folder


def test_every_figure_is_there_and_the_page_names_the_machine(results, tmp_path) -> None:
    made = make_report(results, tmp_path / "report")
    assert made == ["minilm-saturate", "minilm-slowdown", "minilm-steady", "minilm-burst", "pipeline", "timeline"]
    page = (tmp_path / "report" / "README.md").read_text()
    assert mentions(page, "a CPU", 2) and "$" not in page
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert len(shown) == 7
    for picture in shown:
        assert (tmp_path / "report" / picture).read_bytes().startswith(b"\x89PNG")
    assert sum(line.endswith(" | 141, 150 |") for line in page.splitlines()) == 2 * len(COMPARED)  # steady and burst
    for named in ([140.01, 150, "GFLOP/s"], ["**2 x**", 1.8], ["**600 x**", 100]):
        assert any(mentions(line, *named) for line in page.splitlines()), named
    for figure in ("Fig. 11", "Table 2", "Fig. 3", "Fig. 12", "Fig. 13", "Table 6", "Fig. 17"):
        assert figure in page
    make_report(tmp_path / "report" / "results", tmp_path / "report")  # again, from its own files
    assert (tmp_path / "report" / "README.md").read_text() == page


def test_some_results_are_enough_but_none_are_refused(results, tmp_path) -> None:
    only = tmp_path / "only"
    kept = Results.open(only / "minilm-saturate", SETTINGS | {"scenario": "saturate"})
    kept.put("hplm", 1, measured("hplm", 1))
    kept.put(
        "dedicated", 1, measured("dedicated", 1) | {"req_per_s": 0.0, "p50_ms": None, "p99_ms": None}
    )  # no request was answered
    assert make_report(only, tmp_path / "report") == ["minilm-saturate"]
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "nothing")):
        make_report(tmp_path / "nothing", tmp_path / "report")


def test_a_servers_journal_is_read_as_a_timeline(tmp_path) -> None:
    entries = [
        {"batch": 7, "texts": 2, "stages": {"prepare": [1.0, 1.1], "swap": [1.1, 1.2], "compute": [1.3, 2]}},
        {"request": "a", "computed": 2.0, "answered": 2.1, "batch": 7},
        {"request": "b", "computed": 2.0, "answered": 2.3, "batch": 7},
        {"request": "c", "computed": 0, "answered": 2.3, "batch": 0},  # refused
    ]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert read_journal(tmp_path / "journal.jsonl") == [
        Span("staging", "prepare 7", 1.0, 1.1),
        Span("staging", "swap 7", 1.1, 1.2),
        Span("engine", "compute 7", 1.3, 2),
        Span("answering", "answer 7", 2.0, 2.3),
    ]

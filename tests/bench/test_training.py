"""`hplm bench training` and `hplm bench adaptation` on a toy backbone: variants of a step, and its parts."""

import json

import pytest

from bench.measuring import adaptation as bench_adaptation
from bench.measuring import training as bench_training
from hplm.cli.main import main
from testing.toy import CONFIG
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def test_all_four_variants_are_measured(monkeypatch, capsys):
    monkeypatch.setitem(bench_training.SIZES, "minilm", CONFIG)
    assert main(["bench", "training", "--tokens", "12", "--texts", "4", "--seconds", "0.05", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tokens"] == 48 and figures["steps"] >= 3
    for name in ("whole", "windows", "upper"):
        assert figures[f"share_of_{name}"] == pytest.approx(figures["tables_ms"] / figures[f"{name}_ms"], rel=0.2)
    table = bench_training.table_of(figures)
    assert mentions(table, f"{figures['share_of_whole']:.2f}")


def test_the_parts_of_a_step_add_up(monkeypatch, capsys):
    monkeypatch.setitem(bench_adaptation.SIZES, "minilm", CONFIG)
    assert main(["bench", "adaptation", "--seconds", "0.05", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["steps"] >= 1 and 500 < figures["tokens"] <= 1024 and 0.5 < figures["present"] < 1
    assert sum(figures[f"{part}_share"] for part in bench_adaptation.PARTS) == pytest.approx(1, abs=0.01)
    assert mentions(bench_adaptation.table_of(figures), f"{figures['step_ms']:.1f}")

from __future__ import annotations

import json
import mmap
from dataclasses import replace
from pathlib import Path

import pytest

from bench.measuring.cold import can_drop, drop
from bench.measuring.plot import TARGETS, bench_plot, table_of
from bench.measuring.plot_tables import space_of
from bench.plot import PlotBench
from hplm.cli.main import main
from hplm.errors import InvalidInput
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

TINY = PlotBench(keys=3000, hidden=32, tokens=16, seconds=0.02, count_tokens=20_000, build_keys=200, vocabulary=300)
TIMES = (
    "lookup", "gather", "gather_fp32", "touch", "sequential", "int8_gather", "lower_stack", "lower_stack_bfloat16",
    "lower_stack_float32", "keys_1m", "keys_10m", "cold", "pread", "cold_faults",
)  # fmt: skip
RATES = ("forward_ngrams_per_s", "build_ngrams_per_s", "count_tokens_per_s", "count_peak_mb")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if not can_drop(tmp_path):
        pytest.skip("temporary files live in memory here, nothing of them can be cold")
    return tmp_path


def test_every_figure_is_there_and_nothing_is_left_behind(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    figures = bench_plot(TINY)
    for name in (*(f"{time}_us" for time in TIMES), *RATES, *TARGETS):
        assert figures[name] > 0, name
    assert set(figures["found"]) == {"root", "2-gram", "1-gram"}
    assert sum(figures["found"].values()) == pytest.approx(1, abs=1e-3)
    for spread in figures["spread_us"].values():
        assert 0 < spread["least"] <= spread["median"] <= spread["p90"]
    assert list(disk.iterdir()) == []
    printed = table_of(json.loads(json.dumps(figures)))
    assert printed.count("met") + printed.count("MISSED") == len(TARGETS)


def test_ngrams_of_two_words_are_measured_too(disk: Path) -> None:
    case = PlotBench(keys=300, window=5, hidden=16, tokens=8, seconds=0.01, count_tokens=2000, build_keys=10)
    assert space_of(case).words == 2
    figures = bench_plot(case, disk / "kept")
    assert {"1-gram", "2-gram"} <= set(figures["found"]) <= {"root", "4-gram", "3-gram", "2-gram", "1-gram"}
    assert figures["keys_1m_us"] > 0 and figures["count_tokens_per_s"] > 0
    with pytest.raises(InvalidInput, match=mentioning(disk / "kept/fp16/1", 5, "--folder")):
        bench_plot(replace(case, window=3), disk / "kept")


def test_kept_tables_are_used_again(disk: Path) -> None:
    case = PlotBench(keys=300, hidden=16, tokens=8, seconds=0.01, count_tokens=0, build_keys=10, vocabulary=50)
    assert "count_tokens_per_s" not in bench_plot(case, disk / "kept")
    assert sorted(path.name for path in (disk / "kept").iterdir()) == ["fp16", "int8"]
    values = disk / "kept" / "fp16" / "1" / "values"
    written = values.stat().st_mtime_ns
    bench_plot(case, disk / "kept")
    assert values.stat().st_mtime_ns == written
    with pytest.raises(InvalidInput, match=mentioning(disk / "kept/fp16/1", 16, "--folder")):
        bench_plot(PlotBench(keys=300, hidden=32, vocabulary=50), disk / "kept")


def test_a_mapped_file_cannot_be_dropped_from_memory(disk: Path) -> None:
    path = disk / "file"
    path.write_bytes(b"x" * 8192)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[0] == ord("x")
        with pytest.raises(InvalidInput, match=mentioning(path, "--folder")):
            drop(path)
    drop(path)


def test_too_little_space_is_reported_before_anything_is_written(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plot", "--keys", "1000000000000", "--folder", str(disk / "full")]) == 1
    assert mentions(capsys.readouterr().err, disk / "full", "--folder", "--keys")
    assert list((disk / "full").iterdir()) == []

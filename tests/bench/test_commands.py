"""Each benchmark ends with its figures as JSON, and refuses impossible options before it builds anything."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest

import bench
from bench.rows import EngineDtype, Size
from hplm.cli.main import main
from hplm.options import ENGINE_DTYPES
from testing.random_store import SIZES
from tests.research.schemes.checkpoints import save_bert
from tests.support.message import mentions

FIGURES = {  # of each command: figures that must be there, by their paths
    "adapters": "t128.16.grouped_us t128.16.to_loop",
    "cascade --model bert": "work tenants.stdlib-area.points_lost random.points_lost one_client.over_full served.as_expected",
    "cluster --only proxy": "proxy_over_direct hop_p50_ms",
    "engine": "toy.var20.packed toy.var100.packed_to.naive int8_over_fp32",
    "generate --parts halves": "decode_ratio",
    "glue": "c1_added_ms c64_grpc_share_of_noop c64_share_of_echo",
    "overload": "on_time_of_admitted simulated_on_time_of_offered",
    "overload --policies fcfs das:row_tokens=64 --variance 20": "drift.on_time",
    "place --shared --size toy": "fig2_skew mean_ms.poisson",
    "plot": "lookup_us gather_us cold_to_pread",
    "schedule": "rates.3.0 overhead_share decoders.capacity_per_s",
    "serve --tenants 2,4": "added_over_noop_ms share_of_bound most_to_least.req_per_s",
    "training": "tables_ms share_of_whole",
}


def numbers(found: object) -> Iterator[float]:
    for value in found.values() if isinstance(found, dict) else found if isinstance(found, list) else []:
        yield from [value] if isinstance(value, (int, float)) else numbers(value)


@pytest.mark.slow
@pytest.mark.parametrize("command", FIGURES)
def test_a_benchmark_ends_with_its_figures(command: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:
    """Some start a server or train, so they take more than five seconds."""
    monkeypatch.chdir(tmp_path)
    if "--model" in command:
        save_bert(tmp_path / "bert")
    assert main(["bench", *command.split(), "--quick", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for path in FIGURES[command].split():
        found = figures
        for name in re.split(r"\.(?!0)", path):
            found = found[name]
        assert found is not None
    assert all(math.isfinite(number) for number in numbers(figures)) and len(list(numbers(figures))) > 2


def test_only_the_named_benchmark_is_imported_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code = """import sys, argparse, bench
bench.register(argparse.ArgumentParser().add_subparsers())
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder", "loadtest", "testing", "cyclopts"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out.splitlines()[4:]
    assert [line.split()[0] for line in listed] == list(bench.benchmarks()) and all(len(line.split()) > 3 for line in listed)
    assert set(get_args(Size)) == set(SIZES) and get_args(EngineDtype) == ("auto", *ENGINE_DTYPES)


def test_a_missed_target_is_a_failure_but_not_with_quick(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:
    (tmp_path / "slow.py").write_text(
        '"""`hplm bench slow`: is slow."""\n'
        "from bench.rows import Row, benchmark\n@benchmark(most=2)\ndef slow(*, most: int = 1):\n"
        '    """Is slow."""\n    yield Row("share", 1.5, most=most)\n'
    )
    monkeypatch.setattr(bench, "__path__", [*bench.__path__, str(tmp_path)])
    picture = tmp_path / "slow.svg"
    assert main(["bench", "slow", "--json", "--picture", str(picture)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missed"] == ["share"] and picture.stat().st_size
    assert main(["bench", "slow", "--most", "3"]) == 0 and "met" in capsys.readouterr().out
    assert main(["bench", "slow", "--quick"]) == 0 and "MISSED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("serve --seconds 0", ["--seconds", "0.0"]),
        ("serve --tokens 1", ["--tokens 1", 3, 512]),
        ("overload --tokens 513", ["--tokens 513"]),
        ("overload --policy luck", ["policy", "'luck'"]),
        ("generate --parts luck", ["--parts", '"luck"']),
        ("overload --packings dense", ["'dense'"]),
        ("schedule --promise-ms 0 1", ["--promise-ms", "0.0"]),
        ("schedule --deadlines-ms 300 50", ["--deadlines-ms 300 50"]),
        ("cascade --questions 0", ["--questions"]),
        ("cluster --only dance", ["--only", '"dance"']),
        ("plot --keys 1000000000000", ["--folder", "--keys"]),
        ("training --picture x.foo", ["--picture x.foo"]),
        ("luck", ["'luck'", "serve"]),
    ],
)
def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str], given: str, named: list) -> None:
    assert main(["bench", *given.split()]) == 1
    assert mentions(capsys.readouterr().err, *named)

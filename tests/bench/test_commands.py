"""Each benchmark ends with its figures as JSON, and refuses impossible options before it builds anything."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator

import pytest

from bench.options import SIZE_NAMES, whole_numbers
from hplm.cli.main import main
from testing.random_store import SIZES
from tests.support.message import mentions

FIGURES = {  # of each command: figures that must be there, by their paths
    "adapters": "t128.16.grouped_us t128.16.layer_bottleneck",
    "adaptation": "step_ms teacher_share",
    "cluster --only ring": "moved_share strayed_share targets.moved_share",
    "engine": "toy.var20 toy.var100 toy.int8 int8_over_fp32",
    "generate --parts shares": "",
    "glue": "c1_added_ms c64_grpc_share_of_noop",
    "overload": "on_time_of_admitted simulated_on_time_of_offered",
    "pipeline": "pipelined synchronous",
    "plot": "lookup_us gather_us build_ngrams_per_s found.root",
    "promises": "capacity_per_s targets",
    "schedule": "rates targets.das_at_least_fcfs",
    "serve": "added_over_noop_ms share_of_bound",
    "stages": "pipeline_over_replicas layer_ms",
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
    assert main(["bench", *command.split(), "--quick", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for path in FIGURES[command].split():
        found = figures
        for name in path.split("."):
            found = found[name]
        assert found is not None
    assert all(math.isfinite(number) for number in numbers(figures)) and len(list(numbers(figures))) > 2


def test_registering_imports_nothing_heavy() -> None:
    code = """import sys, argparse, bench
bench.register(argparse.ArgumentParser().add_subparsers())
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder", "loadtest", "testing"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert set(SIZE_NAMES) == set(SIZES)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("serve --seconds 0", ["--seconds 0.0"]),
        ("serve --tokens 1", ["--tokens 1", 3, 512]),
        ("overload --tokens 513", ["--tokens 513"]),
        ("overload --policy luck", ["policy", "'luck'"]),
        ("pipeline --seconds nan", ["--seconds nan"]),
        ("generate --parts luck", ["--parts", "'luck'"]),
        ("policies --packings dense", ["'dense'"]),
        ("promises --promise-ms 0 1", ["--promise-ms 0 1"]),
        ("schedule --deadlines-ms 300 50", ["--deadlines-ms 300.0 50.0"]),
        ("cluster --only dance", ["--only dance"]),
        ("cascade --drop -1", ["--drop"]),
        ("plot --keys 1000000000000", ["--folder", "--keys"]),
    ],
)
def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str], given: str, named: list) -> None:
    assert main(["bench", *given.split()]) == 1
    assert mentions(capsys.readouterr().err, *named)


def test_several_numbers_are_read() -> None:
    assert whole_numbers("1,10,100") == [1, 10, 100]
    for nonsense in ("10,0", "many", "1,,2", "-3"):
        with pytest.raises(ArgumentTypeError, match=repr(nonsense)):
            whole_numbers(nonsense)

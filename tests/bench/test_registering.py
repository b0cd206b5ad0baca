"""The recipe in `bench/__init__.py`: one more file in the folder is one more benchmark."""

import json
import subprocess
import sys

import pytest

import bench
from bench.options import SIZE_NAMES
from hplm.cli.main import main, parser
from testing.random_store import SIZES

RECIPE = '''
"""`hplm bench sum`: adding numbers, beside adding them in a loop."""

import time
from dataclasses import dataclass

from bench.options import benchmark, expect_above_zero


@dataclass(frozen=True)
class SumBench:
    numbers: int = 1000

    def __post_init__(self):
        expect_above_zero(numbers=self.numbers)


def register(kinds):
    parser = benchmark(kinds, "sum", run, "adding numbers", "Adds numbers at once, beside adding them in a loop.")
    parser.add_argument("--numbers", type=int, default=SumBench.numbers, help="to add (default: %(default)s)")


def run(args):
    case = SumBench(args.numbers)
    start = time.perf_counter()
    sum(range(case.numbers))
    middle = time.perf_counter()
    total = 0
    for number in range(case.numbers):
        total += number
    figures = {"total": total, "to_loop": (time.perf_counter() - middle) / (middle - start)}
    if not args.json:
        print(f"{figures['to_loop']:.1f} times as fast as a loop")
    return figures
'''


@pytest.fixture
def one_more(tmp_path, monkeypatch):
    (tmp_path / "sum.py").write_text(RECIPE)
    monkeypatch.setattr(bench, "__path__", [*bench.__path__, str(tmp_path)])
    yield
    sys.modules.pop("bench.sum", None)
    vars(bench).pop("sum", None)


def test_one_file_is_a_benchmark(one_more, capsys):
    assert main(["bench", "sum", "--numbers", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == 10
    assert main(["bench", "sum"]) == 0
    assert "times as fast" in capsys.readouterr().out
    assert main(["bench", "sum", "--numbers", "0"]) == 1
    assert "--numbers 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "--help"])
    assert "adding numbers" in capsys.readouterr().out


def test_registering_imports_nothing_heavy():
    code = """import sys, argparse, bench
bench.register(argparse.ArgumentParser().add_subparsers())
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder", "loadtest", "testing"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_names_of_sizes_are_those_that_there_are():
    assert set(SIZE_NAMES) == set(SIZES)

"""What registering benchmarks costs, and the names that their options offer."""

import subprocess
import sys

from bench.options import SIZE_NAMES
from testing.random_store import SIZES


def test_registering_imports_nothing_heavy():
    code = """import sys, argparse, bench
bench.register(argparse.ArgumentParser().add_subparsers())
assert not sys.modules.keys() & {"torch", "numpy", "transformers", "builder", "loadtest", "testing"}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_names_of_sizes_are_those_that_there_are():
    assert set(SIZE_NAMES) == set(SIZES)

"""The file of finished numbers in the repository."""

from dataclasses import replace
from pathlib import Path

from research.accuracy.report import named_options
from research.accuracy.studies import TIERS
from research.result_file import ResultFile

RESULTS = Path(__file__).parents[3] / "research/results/accuracy.jsonl"


def test_new_options_of_training_do_not_void_the_results():
    stored = {frozenset(finished.run["training"]) for finished in ResultFile(RESULTS)}
    options = TIERS[1].training("hplm", 6, 4, seed=0)
    usual = frozenset(named_options(options))
    assert stored == {usual, usual | {"dropout"}}  # the latter of a study whose option is gone
    assert "function" in named_options(replace(options, function="gelu"))

"""Benchmarks refuse impossible options before they build or serve anything."""

import pytest

from bench.measuring import adaptation as bench_adaptation
from bench.measuring import generate as bench_generate
from bench.measuring import overload as bench_overload
from bench.measuring import pipeline as bench_pipeline
from bench.measuring import policies as bench_policies
from bench.measuring import promises as bench_promises
from bench.measuring import schedule as bench_schedule
from bench.measuring import serve as bench_serve
from bench.measuring import tcb as bench_tcb
from bench.measuring import timeline as bench_timeline
from bench.measuring import training as bench_training
from hplm.cli.main import main
from research.comparison import compare
from tests.support.message import mentions


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("serve --seconds 0", ["--seconds 0.0"]),
        ("serve --tokens 1", ["--tokens 1", 3, 512]),
        ("serve --connections 0", ["--connections 0"]),
        ("overload --overload 0", ["--overload 0.0"]),
        ("overload --tokens 513", ["--tokens 513"]),
        ("overload --policy luck", ["policy", "'luck'"]),
        ("pipeline --seconds nan", ["--seconds nan"]),
        ("training --texts 0", ["--texts 0"]),
        ("generate --layers 0", ["--layers 0"]),
        ("generate --parts luck", ["--parts", "'luck'"]),
        ("adaptation --seconds 0", ["--seconds 0.0"]),
        ("timeline --seconds 0", ["--seconds 0.0"]),
        ("policies --policies luck", ["'luck'"]),
        ("policies --packings dense", ["'dense'"]),
        ("promises --policies luck", ["'luck'"]),
        ("promises --requests 0", ["--requests 0"]),
        ("promises --share 2", ["--share 2"]),
        ("promises --promise-ms 0 1", ["--promise-ms 0 1"]),
        ("promises --cost-ms 0 1 1", ["--cost-ms 0 1 1"]),
        ("tcb --rate 0", ["--rate 0.0"]),
        ("tcb --picture x.foo", ["--picture x.foo"]),
        ("schedule --cv 0", ["--cv 0.0"]),
        ("schedule --deadlines-ms 300 50", ["--deadlines-ms 300.0 50.0"]),
        ("schedule --picture x.foo", ["--picture x.foo"]),
    ],
)
def test_impossible_options_are_refused_at_once(monkeypatch, capsys, given, named) -> None:
    modules = (bench_overload, bench_pipeline, bench_policies, bench_schedule, bench_serve, bench_tcb, bench_timeline)
    for module in (bench_adaptation, bench_generate, *modules, bench_promises, bench_training):
        name = f"bench_{module.__name__.rpartition('.')[2]}"
        monkeypatch.setattr(module, name, lambda *_, name=name: pytest.fail(f"{name} was begun"))
    assert main(["bench", *given.split()]) == 1
    assert mentions(capsys.readouterr().err, *named)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--seconds 0", ["--seconds 0.0"]),
        ("--connections 0", ["--connections 0"]),
        ("--budget 0", ["--budget 0"]),
        ("--patience nan", ["--patience nan"]),
        ("--lengths 513", ["--lengths 513", 3, 512]),
        ("--lengths 2", ["--lengths 2"]),
        ("--lengths normal:20,20,3,600", ["--lengths 600"]),
        ("--lengths normal:nan,20", ["lengths", "'normal:nan,20'"]),
    ],
)
def test_a_comparison_also_refuses_impossible_options(monkeypatch, given, named) -> None:
    monkeypatch.setattr(compare, "run", lambda *_: pytest.fail("the comparison was begun"))
    with pytest.raises(SystemExit) as refusal:
        compare.main(given.split())
    assert mentions(refusal.value, *named)

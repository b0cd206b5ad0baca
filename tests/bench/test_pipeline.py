"""The pipeline benchmark, small: it measures every variant, and does not count errors as answers."""

from dataclasses import replace

import pytest

from bench.measuring import pipeline as bench_pipeline
from bench.measuring.pipeline import table_of
from bench.pipeline import PipelineBench
from hplm.engine.engine import Engine
from hplm.engine.overlap import OVERLAPS
from hplm.errors import Internal
from testing.random_store import SIZES
from testing.toy import CONFIG

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def toy_size(monkeypatch):
    monkeypatch.setitem(SIZES, "toy", replace(CONFIG, positions=32))
    monkeypatch.setattr(bench_pipeline, "ROUNDS", 1)


def toy_case(**options) -> PipelineBench:
    return PipelineBench(
        "toy", **{"tokens": 8, "batch_texts": 4, "tenants": 12, "slots": 8, "seconds": 0.5, "rank": 4, **options}
    )


def test_every_variant_is_measured():
    figures = bench_pipeline.bench_pipeline(toy_case(tokens=6))
    assert figures["case"]["batch_texts"] == 6, "so that a batch has room for the longest text, of 32 tokens"
    assert all(figures[name] > 0 for name in (*OVERLAPS, "commit_0_ms", "commit_5_ms"))
    assert 0 < figures["staging_share"] < 1
    assert len(table_of(figures).splitlines()) == len(OVERLAPS) + 4


def test_an_error_is_not_counted_as_an_answer(monkeypatch):
    monkeypatch.setattr(Engine, "run", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(Internal, match="OSError"):
        bench_pipeline.bench_pipeline(toy_case())

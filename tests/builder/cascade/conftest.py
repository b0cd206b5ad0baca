import pytest

from hplm.engine.engine import Engine
from tests.builder.cascade.measured import steady_seconds


@pytest.fixture
def few_candidates(monkeypatch):
    """All of them take seconds."""
    for name, values in (("CUTOFFS", (0.95, 0.7, 0.5)), ("SLOPE", 16.0), ("ALPHAS", (0.5, 0.9))):
        monkeypatch.setattr(f"builder.cascade.candidates.{name}", values)


@pytest.fixture
def steady_times(monkeypatch):
    """Levels take times that follow from their layers: plans are the same ones on each machine."""
    monkeypatch.setattr(Engine, "seconds", steady_seconds)

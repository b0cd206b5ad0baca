"""The soak compares what processes take at the beginning and at the end. `tests/bench` runs it on a real server."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hplm.errors import HplmError
from loadtest import soak
from loadtest.load import Report

TEXTS = ["text"]
MEMORY = [50, 90, 100, 100, 100, 100, 100, 100, 100, 100, 120, 120]  # MB after each window


@pytest.fixture
def offered(monkeypatch) -> list[float | None]:
    """Rates of the loads. Of a thousand requests in ten seconds, a hundred are answered: refusals are quick."""
    rates, statuses = [], np.array([200] * 100 + [503] * 900)
    report = Report(10.0, 0.0, np.arange(1000), statuses, np.zeros(1000), 0.0)
    monkeypatch.setattr(soak, "send", lambda load: rates.append(load.rate) or [report])
    return rates


def served(failing: str = "") -> Any:
    def call(name: str, value: object = None):
        if name == failing:
            raise HplmError(name)
        return value

    calls = {"open_tenants": ["acme"], "processes": {}, "add_guest": "acme", "delete_guest": None}
    return SimpleNamespace(backbone="toy", address="", **{name: partial(call, name, value) for name, value in calls.items()})


def test_growth_compares_the_time_after_the_warm_up_with_the_end_and_refusals_are_no_capacity(offered):
    found = soak.growth([{"engine": (taken * 10**6, 10 + at)} for at, taken in enumerate(MEMORY)])
    assert found["memory_growth"] == {"engine": 0.2} and found["memory_mb"] == {"engine": 120.0}
    assert found["files_growth"] == {"engine": 8}  # medians of the samples 2 and 3, and 10 and 11
    assert soak.soaked(served(), TEXTS, 0.01, 0.8)["rate_per_s"] == 8.0 == pytest.approx(offered[1])


@pytest.mark.parametrize("failing", ["processes", "add_guest"])
@pytest.mark.usefixtures("offered")
def test_a_run_that_cannot_be_watched_or_changed_is_no_result(failing):
    with pytest.raises(HplmError, match=failing):
        soak.soaked(served(failing), TEXTS, 60.0, 0.8)

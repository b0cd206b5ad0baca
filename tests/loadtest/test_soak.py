"""The soak compares what processes take at the beginning and at the end, and a short run on a real server ends well."""

from types import SimpleNamespace

import numpy as np
import pytest

from hplm.errors import HplmError
from loadtest import soak
from loadtest.generator import Load
from loadtest.load import Report
from loadtest.soak import _growth

REPORT = Report(1.0, 0.0, np.zeros(1), np.full(1, 200), np.zeros(1), 0.0)


def test_growth_compares_the_time_after_the_warm_up_with_the_end():
    memory = [50, 90, 100, 100, 100, 100, 100, 100, 100, 100, 120, 120]
    samples = [{"engine": (taken * 10**6, 10 + at)} for at, taken in enumerate(memory)]
    found = _growth(samples)
    assert found["memory_growth"] == {"engine": 0.2} and found["memory_mb"] == {"engine": 120.0}
    assert found["files_growth"] == {"engine": 8}  # medians of the samples 2 and 3, and 10 and 11


class Served:
    def __init__(self, **failing):
        self.failing = failing

    def __getattr__(self, name):
        def call():
            if name in self.failing:
                raise HplmError(self.failing[name])
            return {}

        return call


@pytest.mark.parametrize(
    ("served", "seconds", "named"),
    [
        (Served(processes="it has ended"), 60.0, "it has ended"),
        (Served(add_guest="no guest"), 60.0, "no guest"),
        (Served(), 0.0, "--minutes"),
    ],
)
def test_a_run_that_cannot_be_watched_or_changed_or_is_too_short_is_no_result(monkeypatch, served, seconds, named):
    monkeypatch.setattr(soak, "CHURN_SECONDS", 0.01)
    monkeypatch.setattr(soak, "send", lambda load: [REPORT])
    with pytest.raises(HplmError, match=named):
        soak._beside_guests(served, Load("", [b""]), seconds)


def test_refusals_are_no_capacity(monkeypatch):
    """They are quick: of a thousand requests in ten seconds, a hundred were answered."""
    statuses, offered = np.array([200] * 100 + [503] * 900), []
    full = Report(10.0, 0.0, np.arange(1000), statuses, np.zeros(1000), 0.0)
    monkeypatch.setattr(soak, "send", lambda load: [full])
    monkeypatch.setattr(soak, "standard_library", lambda: ["text"])
    monkeypatch.setattr(soak, "_beside_guests", lambda _, load, seconds: offered.append(load.rate) or ([REPORT], [{}], 0))
    served = SimpleNamespace(open_tenants=lambda: ["acme"], backbone="toy", address="")
    assert soak._soak(served, 60.0, 0.8)["rate_per_s"] == 8.0 == pytest.approx(offered[0])

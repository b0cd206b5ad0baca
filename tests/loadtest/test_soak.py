"""The soak compares what processes take at the beginning and at the end, and a short run on a real server ends well."""

import json

import pytest

from hplm.errors import HplmError
from loadtest import soak
from loadtest.soak import Watching, _growth
from tests.support.wait import eventually


def test_growth_compares_the_time_after_the_warm_up_with_the_end():
    memory = [50, 90, 100, 100, 100, 100, 100, 100, 100, 100, 120, 120]
    samples = [{"engine": (taken * 10**6, 10 + at)} for at, taken in enumerate(memory)]
    found = _growth(samples)
    assert found["memory_growth"] == {"engine": 0.2} and found["memory_mb"] == {"engine": 120.0}
    assert found["files_growth"] == {"engine": 8}  # medians of the samples 2 and 3, and 10 and 11


class Ended:
    """A server whose processes cannot be found any more."""

    def processes(self):
        raise HplmError("it has ended")

    def add_guest(self):
        pass

    delete_guest = add_guest


def test_a_run_whose_server_cannot_be_watched_is_no_result(monkeypatch):
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 0.0)
    watching = Watching(Ended())
    eventually(lambda: watching.error)
    with pytest.raises(HplmError, match="it has ended"):
        watching.stop()


def test_a_run_without_a_sample_is_no_result(monkeypatch):
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 600.0)
    with pytest.raises(HplmError, match="--minutes"):
        Watching(Ended()).stop()


@pytest.mark.slow
def test_a_short_run_on_a_real_server_answers_everything_while_tenants_come_and_go(toy, capsys, monkeypatch):
    monkeypatch.setattr(soak, "CAPACITY_SECONDS", 1.0)
    monkeypatch.setattr(soak, "CHURN_SECONDS", 0.5)
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 0.5)
    assert soak.main(["--repository", str(toy.repository), "--minutes", "0.1", "--share", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == 0 and found["sent"] > 0 and found["guests"] > 0
    assert {"tritonserver", "engine", "toy-lookup", "toy-upper", "hplm"} <= found["memory_mb"].keys()

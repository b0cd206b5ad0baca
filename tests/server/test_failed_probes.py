"""A probe that a model refuses counts in no metric and holds no place. Triton's part is played by a stand-in."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from hplm.errors import Draining, Internal
from hplm.server.held import Held
from tests.support.fake_triton import with_fake_triton


class Request:
    def __init__(self, **parameters):
        self.parameters = lambda: json.dumps(parameters)
        self.get_response_sender = lambda: None


class Refusals:
    def __init__(self):
        self.errors = []

    def put(self, sender, error):
        self.errors.append(error)


def fails():
    raise Internal("it does not move")


@pytest.fixture(params=["hplm_lookup", "hplm_generate"])
def model(request):
    """Returns a model without what serves, and what it has counted."""
    with with_fake_triton(SimpleNamespace(), "backends.replies", f"backends.{request.param}.model") as (_, module):
        model, counted = module.TritonPythonModel.__new__(module.TritonPythonModel), Counter()
        model._held, model._refusals = Held("toy"), Refusals()
        model._service = SimpleNamespace(check=fails, count=lambda outcome: counted.update([outcome]))
        model._count = lambda outcome: counted.update([outcome])
        model.replies = module.replies
        yield model, counted


@pytest.mark.parametrize(("drains", "kind"), [(False, Internal), (True, Draining)])
def test_a_probe_that_is_refused_counts_nowhere(model, monkeypatch, drains, kind):
    model, counted = model
    monkeypatch.setattr(model.replies, "DRAIN", SimpleNamespace(begun=drains))
    model.execute([Request(hplm_probe=True)])
    assert [type(error) for error in model._refusals.errors] == [kind]
    assert not counted and model._held._count == 0


def test_a_request_that_is_refused_counts(model, monkeypatch):
    model, counted = model
    monkeypatch.setattr(model.replies, "DRAIN", SimpleNamespace(begun=True))
    model.execute([Request(tenant="acme")])
    assert counted == {"draining": 1} and model._held._count == 1

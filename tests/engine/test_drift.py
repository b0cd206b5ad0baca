"""Drift: steps from which texts go on more or less often than when their plan was profiled."""

from types import SimpleNamespace

import pytest

from hplm.adapters.record import Record
from hplm.engine import drift as module
from hplm.engine.drift import DECISIONS, Drift
from hplm.levels.plan import Plan, Step
from hplm.tenants.snapshot import Tenant

PLAN = Plan((Step(0, 0.9, reached=1.0), Step(1, 0.9, reached=0.4), Step(2, reached=0.1)))
OWN = Plan((Step(2),))


def tenant_of(uid, version=1):
    record = Record("head-16.bank", 0, uid, version)
    return Tenant(f"tenant-{uid}", uid, version, "root", 1, "classify", ("a", "b"), record, None, ladder=(OWN, PLAN))


def decide(drift, going, step=0, tenant=None, decisions=DECISIONS, is_by_link=False):
    request = SimpleNamespace(tenant=tenant or tenant_of(1), plan=PLAN, is_by_link=is_by_link)
    stays, goes = SimpleNamespace(request=request, step=step), SimpleNamespace(request=request, step=step + 1)
    drift.count([stays] * (decisions - going), [goes] * going)


@pytest.mark.parametrize(
    ("step", "share", "is_off"), [(0, 0.4, 0), (0, 0.47, 0), (0, 0.6, 1), (0, 0.2, 1), (1, 0.25, 0), (1, 0.5, 1)]
)
def test_a_share_far_from_the_profile_is_a_drift(step, share, is_off, caplog):
    drift = Drift()
    decide(drift, round(share * DECISIONS), step)
    assert len(drift) == is_off == len(caplog.records)
    assert not is_off or "tenant-1" in caplog.text


def test_a_drift_ends_when_texts_are_as_before(caplog):
    drift = Drift()
    for going, off in ((400, 1), (400, 1), (200, 0)):
        decide(drift, going)
        assert len(drift) == off
    assert len(caplog.records) == 1  # it is said once


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST", 10)
    drift = Drift()
    for uid in range(50):
        decide(drift, 1, tenant=tenant_of(uid), decisions=2)
    assert len(drift._counts) == 10
    decide(drift, 400)
    monkeypatch.setattr(module, "REMEMBERED", 0.0)
    assert not len(drift)

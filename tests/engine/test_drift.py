"""Drift: steps from which texts go on more or less often than when their plan was profiled."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hplm.adapters.record import Record
from hplm.engine import drift as module
from hplm.engine.drift import DECISIONS, Drift
from hplm.engine.request import Request
from hplm.levels.plan import Plan, Step
from hplm.tenants.link import Link
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import ARRIVES, LEAVES, Ticket

PLAN = Plan((Step(0, 0.9, reached=1.0), Step(1, 0.9, reached=0.4), Step(2, reached=0.1)))
OWN = Plan((Step(2),))


def tenant_of(uid, version=1):
    record = Record("head-16.bank", 0, uid, version)
    return Tenant(f"tenant-{uid}", uid, version, "root", 1, "classify", ("a", "b"), record, None, ladder=(OWN, PLAN))


def test_a_plan_of_a_link_is_watched_too():
    link = Link("large", "there", 1, Plan((Step(0, 0.9, reached=1.0), Step(1, reached=0.4))))
    tenant, drift = replace(tenant_of(1), link=link), Drift()
    text = SimpleNamespace(
        request=SimpleNamespace(tenant=tenant, plan=link.plan, is_by_link=False), step=0
    )  # it stays there when it leaves
    for leaving, off in ((200, 0), (400, 1)):
        drift.count([text] * (DECISIONS - leaving), [], [text] * leaving)
        assert len(drift) == off


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


def test_texts_that_come_by_a_link_are_not_counted():
    """They are those of which another backbone was not sure: more of them go on."""
    drift = Drift()
    decide(drift, DECISIONS, is_by_link=True)
    assert not len(drift) and not drift._counts
    for across, is_by_link in ((0, False), (LEAVES, False), (ARRIVES, True)):
        ticket = Ticket(1, 1, 1, 1, 0, 0, 0, 0, across=across)
        assert Request(ticket, None, tenant_of(1), 1, lambda request, answer: None).is_by_link == is_by_link


def test_few_decisions_say_nothing():
    drift = Drift()
    decide(drift, DECISIONS - 1, decisions=DECISIONS - 1)
    assert not len(drift)
    decide(drift, 1, decisions=1)
    assert len(drift) == 1


def test_tenants_and_versions_are_counted_apart():
    drift = Drift()
    for tenant in (tenant_of(1), tenant_of(2), tenant_of(2, version=2)):
        decide(drift, DECISIONS // 2, tenant=tenant, decisions=DECISIONS // 2)
    assert not len(drift)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST", 10)
    drift = Drift()
    for uid in range(50):
        decide(drift, 1, tenant=tenant_of(uid), decisions=2)
    assert len(drift._counts) == 10
    decide(drift, 400)
    monkeypatch.setattr(module, "REMEMBERED", 0.0)
    assert not len(drift)


def test_texts_in_windows_come_to_the_last_step_without_a_decision():
    windowed = Plan((Step(0, 0.9, reached=0.7), Step(2, reached=0.65)))  # 0.3 in windows, and half of the others
    record = Record("head-16.bank", 0, 9, 1)
    tenant = Tenant("span", 9, 1, "root", 1, "span", ("start", "end"), record, None, ladder=(windowed,))
    request = SimpleNamespace(tenant=tenant, plan=windowed, is_by_link=False)
    stays, goes = SimpleNamespace(request=request, step=0), SimpleNamespace(request=request, step=1)
    drift = Drift()
    drift.count([stays] * (DECISIONS // 2), [goes] * (DECISIONS // 2))
    assert not len(drift)

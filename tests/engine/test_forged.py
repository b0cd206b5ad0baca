"""The upper half refuses tickets that are too old, or of another export."""

import time

import pytest

from hplm.engine import service
from hplm.errors import DeadlineMissed, Draining, NoTenant
from hplm.tenants.ticket import Ticket
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.message import mentioning


@pytest.fixture
def asker(toy):
    asker = Asker(toy.folder)
    yield asker
    asker.close()


def test_a_ticket_for_an_unknown_tenant_is_refused(asker):
    view = asker.backbone.view
    good = asker.lookup.resolve(view, view.snapshot.find("beta"), [f"{WORDS[0]} {WORDS[1]}"], None, False)
    stranger = Ticket(view.snapshot.export_number, 0, 999, 1, time.monotonic_ns(), 0, 0, 0)
    with pytest.raises(NoTenant):
        asker.service.submit(stranger, good, lambda answer, counted: None)


def test_a_ticket_expires(asker):
    """Otherwise it would be a key that never expires and that nobody can revoke."""
    view = asker.backbone.view
    tenant = view.snapshot.find("acme")
    good = asker.lookup.resolve(view, tenant, [WORDS[0]], None, False)
    for seconds, refused in ((service.TICKET_SECONDS - 5, False), (service.TICKET_SECONDS + 5, True)):
        received_ns = time.monotonic_ns() - seconds * 10**9
        arrival = {"arrival_ns": received_ns - 10**12, "waited_ns": 10**12}  # at the front door
        ticket = Ticket(view.snapshot.export_number, 0, tenant.uid, 1, deadline_ns=0, priority=0, top_k=0, **arrival)
        if refused:
            with pytest.raises(DeadlineMissed, match=mentioning(service.TICKET_SECONDS)):
                asker.service.submit(ticket, good, lambda answer, counted: None)
        else:
            asker.service.submit(ticket, good, lambda answer, counted: None)


def test_a_ticket_of_another_export_is_refused(asker):
    """Tenants of both exports have the same uids. While Triton loads a new export, one model may still have the old one."""
    view = asker.backbone.view
    tenant = view.snapshot.find("acme")
    good = asker.lookup.resolve(view, tenant, [WORDS[0]], None, False)
    ticket = Ticket(view.snapshot.export_number ^ 1, 0, tenant.uid, 1, time.monotonic_ns(), 0, 0, 0)
    with pytest.raises(Draining):
        asker.service.submit(ticket, good, lambda answer, counted: None)

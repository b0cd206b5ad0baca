"""The upper half refuses forged inputs and old tickets."""

import time

import numpy as np
import pytest

from hplm.engine import service
from hplm.engine.looked_up import LookedUp
from hplm.errors import DeadlineMissed, Draining, InvalidInput, NoTenant
from hplm.tenants.ticket import Ticket
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.naming import naming


@pytest.fixture
def asker(toy):
    asker = Asker(toy.folder)
    yield asker
    asker.close()


def test_forged_rows_are_refused(asker):
    view = asker.backbone.view
    tenant = view.snapshot.find("beta")
    good = asker.lookup.resolve(view, tenant, [f"{WORDS[0]} {WORDS[1]}"], None, False)
    ticket = Ticket(view.snapshot.export_number, 0, tenant.uid, tenant.version, time.monotonic_ns(), 0, 0, 0)
    beyond_root = (
        next(branch.base for branch in view.snapshot.branches if branch.domain == "bio") + 5
    )  # beta reads only the root
    for addresses, segments, spans in [
        (good.addresses + 10**9, good.segments, good.spans),
        (np.full_like(good.addresses, beyond_root), good.segments, good.spans),
        (np.full_like(good.addresses, -5), good.segments, good.spans),
        (np.full_like(good.addresses, -1), good.segments, good.spans),
        (good.addresses, good.segments + 2, good.spans),
        (good.addresses, good.segments, good.spans + 100),
        (np.tile(good.addresses, 20), np.tile(good.segments, 20), good.spans),
        (good.addresses, good.segments[:, :2], good.spans),
        (good.addresses, good.segments, np.tile(good.spans, (1, 9, 1))),
    ]:
        with pytest.raises(InvalidInput, match=naming("ROWS", "SEGMENTS", "SPANS")):
            asker.service.submit(ticket, LookedUp(addresses, segments, spans), lambda answer, counted: None)
    with pytest.raises(NoTenant):
        stranger = Ticket(view.snapshot.export_number, 0, 999, 1, time.monotonic_ns(), 0, 0, 0)
        asker.service.submit(stranger, good, lambda answer, counted: None)


def test_a_ticket_expires(asker):
    """Otherwise it would be a key that never expires and that nobody can revoke."""
    view = asker.backbone.view
    tenant = view.snapshot.find("acme")
    good = asker.lookup.resolve(view, tenant, [WORDS[0]], None, False)
    for seconds, refused in ((service.TICKET_SECONDS - 5, False), (service.TICKET_SECONDS + 5, True)):
        arrival_ns = time.monotonic_ns() - seconds * 10**9
        ticket = Ticket(view.snapshot.export_number, 0, tenant.uid, 1, arrival_ns, 0, 0, 0)
        if refused:
            with pytest.raises(DeadlineMissed, match=naming(service.TICKET_SECONDS)):
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

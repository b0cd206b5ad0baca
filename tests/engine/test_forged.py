"""The engine refuses forms that are too old, or of another export."""

import time

import pytest

from hplm.engine import service
from hplm.errors import DeadlineMissed, Draining, NoTenant
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.message import mentioning


@pytest.fixture
def asker(toy):
    asker = Asker(toy.folder)
    yield asker
    asker.close()


def test_a_form_for_an_unknown_tenant_is_refused(asker):
    view = asker.backbone.view
    form = asker.lookup.resolve(view, view.snapshot.find("beta"), [WORDS[0]], arrival_ns=time.monotonic_ns())
    form.head = form.head._replace(uid=999)
    with pytest.raises(NoTenant):
        asker.service.submit(form, lambda answer: None)


def test_a_form_expires(asker):
    """Otherwise it would be a key that never expires and that nobody can revoke."""
    view = asker.backbone.view
    tenant = view.snapshot.find("acme")
    for seconds, refused in ((service.TICKET_SECONDS - 5, False), (service.TICKET_SECONDS + 5, True)):
        received_ns = time.monotonic_ns() - seconds * 10**9
        arrival = {"arrival_ns": received_ns - 10**12, "waited_ns": 10**12}  # at the front door
        form = asker.lookup.resolve(view, tenant, [WORDS[0]], **arrival)
        if refused:
            with pytest.raises(DeadlineMissed, match=mentioning(service.TICKET_SECONDS)):
                asker.service.submit(form, lambda answer: None)
        else:
            asker.service.submit(form, lambda answer: None)


def test_a_form_of_another_export_is_refused(asker):
    """Tenants of both exports have the same uids. While Triton loads a new export, one model may still have the old one."""
    view = asker.backbone.view
    tenant = view.snapshot.find("acme")
    form = asker.lookup.resolve(view, tenant, [WORDS[0]], arrival_ns=time.monotonic_ns())
    form.head = form.head._replace(export=form.head.export ^ 1)
    with pytest.raises(Draining):
        asker.service.submit(form, lambda answer: None)

"""The engine refuses forms that are too old, of another export or for an unknown tenant."""

import time

import pytest

from hplm.engine.service import TICKET_SECONDS
from hplm.errors import DeadlineMissed, Draining, NoTenant
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.wait import eventually


@pytest.fixture(scope="module")
def asker(toy):
    asker = Asker(toy.folder)
    yield asker
    asker.close()


FORMS = {  # its age, what is changed in its head, and why it is refused
    "good": (TICKET_SECONDS - 5, lambda head: {}, None),
    "too old: it would be a key that nobody can revoke": (TICKET_SECONDS + 5, lambda head: {}, DeadlineMissed),
    "of an unknown tenant": (0, lambda head: {"uid": 999}, NoTenant),
    "of another export, which one model may still have": (0, lambda head: {"export": head.export ^ 1}, Draining),
}


@pytest.mark.parametrize(("seconds", "changes", "error"), FORMS.values(), ids=FORMS)
def test_only_a_form_that_may_be_answered_is_taken(asker, seconds, changes, error):
    view, waited_ns, answers = asker.backbone.view, 10**12, []  # at the front door
    arrival = {"arrival_ns": time.monotonic_ns() - seconds * 10**9 - waited_ns, "waited_ns": waited_ns}
    form = asker.lookup.resolve(view, view.snapshot.find("acme"), [WORDS[0]], **arrival)
    form.head = form.head._replace(**changes(form.head))
    if error is None:
        asker.service.submit(form, answers.append)
        asker.wait(asker.ask("acme", [WORDS[0]]))
        eventually(lambda: answers)
    else:
        with pytest.raises(error):
            asker.service.submit(form, answers.append)
        assert not answers

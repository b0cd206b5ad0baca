"""A domain changes under load on a real Triton: every answer is that of the old or the new version, and none is lost."""

import random
from dataclasses import replace

import numpy as np
import pytest

from builder.publish.live import update_domain
from testing.random_store import random_table, random_tenant
from testing.reference import Reference
from testing.toy import random_text
from tests.server.asking import Asking
from tests.support.answers import Comparison

pytestmark = [pytest.mark.slow, pytest.mark.server("precisions")]

TEXTS = [random_text(random.Random(seed), 40) for seed in range(5)]


def version_of(answer):
    """Returns the version of an answer. A version number is never used twice, so the second version returns as the third."""
    return min(2, int(answer["VERSION"][0, 0]))


def test_every_answer_is_of_the_old_or_the_new_version_and_none_fails(server):
    """The server was started on a state that had changed before."""
    store, live = server.built.stores["live"], server.manager("live")
    tenants = sorted(store.tenants(), key=lambda tenant: tenant.id)
    asked = [(tenant.id, text) for tenant in tenants for text in TEXTS]

    def answers_of(state):
        """Returns the allowed answers by tenant and text."""
        reference = Reference.open(server.model_folder("live"), state)
        return {one: reference.forward(one[1], one[0]).numpy() for one in asked}

    with Asking(server.stock, [tenant.id for tenant in tenants], TEXTS, "live") as load:

        def wait_for(version, among=lambda tenant: True):
            load.wait_for(lambda tenant, text, answer: among(tenant) and version_of(answer) == version)

        wait_for(1)
        random_table(store, "bio", 2, ("root", 1), 3000, seed=77)
        for number, tenant in enumerate(tenants):
            random_tenant(store, replace(tenant, version=2, domain_version=2), 0.3, seed=500 + number)
        canary = update_domain(live, store, "bio", share=0.34).moved
        assert len(canary) == 2
        wait_for(2, lambda tenant: tenant in canary)
        wait_for(1, lambda tenant: tenant not in canary)
        update_domain(live, store, "bio")
        wait_for(2, lambda tenant: tenant not in canary)
        allowed = {1: answers_of(None), 2: answers_of(server.state)}
        live.roll_back_domain("bio")
        wait_for(1)
        update_domain(live, store, "bio")
        wait_for(2)
    assert not load.failures(), load.failures()[:3]
    comparison = Comparison()
    for tenant, text, answer in load.answers:
        version = version_of(answer)
        comparison.add(f"{tenant} version {version}", answer["LOGITS"][0], allowed[version][tenant, text])
    comparison.assert_equal("fp32")
    for one in asked:  # otherwise the comparison could not distinguish the versions
        assert np.abs(allowed[1][one] - allowed[2][one]).max() > 0.01

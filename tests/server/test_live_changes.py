"""Tenants and domains change on a real Triton that is asked all the time: the right answers, and none is lost."""

import os
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from builder.publish.live import update_domain
from builder.publish.model_configs import ALIAS
from builder.store.store import TenantVersion
from hplm.engine.backbone import Backbone
from hplm.model.prompts import Prompts
from hplm.server.probing import ModelState
from testing.random_store import random_knowledge, random_table, random_tenant
from testing.reference import Reference
from testing.toy import WORDS, random_text
from tests.server.asking import Asking
from tests.server.stock import GREEDY, RETURN, Asked, ids_of, refused
from tests.support.answers import Comparison
from tests.support.generative import GenerativeReference
from tests.support.wait import PATIENCE

pytestmark = pytest.mark.slow

TEXT = " ".join(WORDS[:9])


class Changing:
    """A manager each of whose changes has been taken by the server when it returns."""

    def __init__(self, server, backbone="toy"):
        self.manager, self._config = server.manager(backbone), server.built.stores[backbone].config

    def __call__(self, change, *given, **more):
        done = getattr(self.manager, change)(*given, **more)
        assert self.manager.settle() == [], "a server has not taken a change"
        return done

    def learned(self, tenant, seed=7):
        return random_knowledge(self._config, tenant, 0.3, seed)


@pytest.mark.server("toy")
def test_while_its_state_hangs_every_request_is_answered_and_models_work(server):
    """Opening a pipe waits, as does a network file system that is away."""
    current, stock, control = server.state / "toy/CURRENT", server.stock(), server.server.control()
    away, pid = current.rename(current.with_name("AWAY")), server.server.pid
    os.mkfifo(current)
    try:
        time.sleep(1)  # until the threads that follow it have met the pipe; on a slow machine some have not
        for model in ("toy", ALIAS):
            for _ in range(5):
                assert stock.ask([TEXT], "echo", model=model)["LABEL"].size
                with refused("no_tenant"):
                    stock.ask([TEXT], "nobody", model=model)
        for model, probe in control.probes(["toy-lookup", "toy-upper", ALIAS]).items():
            assert control.probe(model, probe, PATIENCE).state is ModelState.WORKS
    finally:
        waiting = os.open(current, os.O_RDWR)
        away.replace(current)
        os.close(waiting)  # lets them read an empty file
    assert stock.ask([TEXT], server.tenant().id, model=ALIAS)["LABEL"].size and server.server.pid == pid


@pytest.mark.server("toy")
def test_a_tenant_is_added_changed_and_deleted_under_load(server):
    acme = TenantVersion(server.named("acme"), 1, "root", 1, "classify", ["x", "y"], 4)
    change, stock, name = Changing(server), server.stock(), acme.id
    with Asking(server.stock, ["echo"], [TEXT]) as load:
        with refused("no_tenant"):
            stock.ask([TEXT], name)
        assert change("add", name, change.learned(acme)).after == 1
        first = stock.ask([TEXT], name)  # every reader has the tenant, so it answers at once
        np.testing.assert_allclose(first["LOGITS"][0], server.reference().forward(TEXT, name), atol=1e-3)
        grown = replace(acme, labels=["x", "y", *(f"new {number}" for number in range(15))])  # whose head is of another size
        assert change("update", name, change.learned(grown, seed=8)).after == 2
        second = stock.ask([TEXT], name)
        np.testing.assert_allclose(second["LOGITS"][0], server.reference().forward(TEXT, name), atol=1e-3)
        assert second["VERSION"][0, 0] == b"2" and second["LOGITS"].shape[-1] == 17
        assert change("roll_back", name).after == 1
        assert np.allclose(stock.ask([TEXT], name)["LOGITS"], first["LOGITS"], atol=1e-5)
        secret, _ = change("add_key", name, days=1)
        with refused("no_tenant"):
            stock.ask([TEXT], name)
        assert change("delete", name).after is None
        with refused("no_tenant"):
            stock.ask([TEXT], name, headers={"authorization": f"Bearer {secret}"})
        assert change("compact") >= 0
        load.wait_for(lambda *answer: True)
    assert not load.failures(), load.failures()[:3]


@pytest.mark.server("chat")
def test_a_decoders_tenant_is_added_changed_limited_and_deleted_while_it_streams(server):
    """A stream is so long that it still runs when its tenant is changed."""
    luna = TenantVersion(server.named("luna", "chat"), 1, "law", 1, "generate", [], 4, "lora", ("query", "value", "ffn_out"))
    change, prompt = Changing(server, "chat"), "some words"

    def expected():
        """Returns what a slow reference of the newest version writes."""
        backbone = Backbone(server.model_folder("chat"), server.state)
        prompts = Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)
        return GenerativeReference(backbone).generate(prompts.encode(prompt).tolist(), luna.id, 24)

    def ask(most=24, **more):
        return Asked(server, prompt, luna.id, {**GREEDY, "logprobs": 0, "max_tokens": most}, stream=True, **RETURN, **more)

    def answer(**more):
        return ids_of(ask(**more).pieces())

    with refused("no_tenant"):
        answer()
    assert change("add", luna.id, change.learned(luna, seed=1)).after == 1
    first, stream = expected(), ask(5000)
    begins = stream.piece()
    assert first.agrees(answer())
    assert change("update", luna.id, change.learned(luna, seed=2)).after == 2
    assert server.held, "the stream has ended before its tenant was changed"
    second = expected()
    assert second.agrees(answer()) and second.tokens != first.tokens
    change("limit", luna.id, deadline_us=1)
    with refused("deadline"):
        answer()
    assert len(answer(timeout=60_000_000)) == 24  # a request's own time wins
    assert change("delete", luna.id).after is None
    with refused("no_tenant"):
        answer()
    assert first.agrees(ids_of([begins, *(stream.piece() for _ in range(23))]))
    stream.client.stop_stream(cancel_requests=True)


TEXTS = [random_text(random.Random(seed), 40) for seed in range(5)]


def version_of(answer):
    """Returns the version of an answer. A version number is never used twice, so the second version returns as the third."""
    return min(2, int(answer["VERSION"][0, 0]))


@pytest.mark.server("precisions")
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

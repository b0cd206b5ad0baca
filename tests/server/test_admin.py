"""Remote management on a real Triton: tenants are added, changed and deleted while they and others are asked all the time."""

import numpy as np
import pytest

from builder.store.store import TenantFile
from hplm.engine.backbone import Backbone
from hplm.model.prompts import Prompts
from testing.toy import WORDS
from tests.server.admin import Admin
from tests.server.asking import Asking
from tests.server.generating import GREEDY, RETURN, Asked, ids_of
from tests.server.stock import refused
from tests.support.generative import GenerativeReference

pytestmark = pytest.mark.slow

TEXT = " ".join(WORDS[:9])


@pytest.mark.server("toy")
def test_a_tenant_is_added_changed_and_deleted_under_load(server):
    """Which commands are refused: `tests/tenants/test_commands.py`."""
    acme = TenantFile(server.named("acme"), 1, "root", 1, "classify", ["x", "y"], 4)
    admin, stock, name = Admin(server), server.stock(), acme.id
    for key in (None, "wrong", ""):
        with refused("no_tenant"):
            Admin(server, key)("tenant.list")
    with refused("invalid_input", "'nobody'"):
        admin("tenant.delete", id="nobody")
    with Asking(server.stock, ["echo"], [TEXT]) as load:
        with refused("no_tenant"):
            stock.ask([TEXT], name)
        assert admin("tenant.add", **admin.trained(acme)).items() >= {"after": 1, "late": []}.items()
        first = stock.ask([TEXT], name)  # every reader has the tenant, so it answers at once
        np.testing.assert_allclose(first["LOGITS"][0], server.reference().forward(TEXT, name), atol=1e-3)
        assert admin("tenant.update", **admin.trained(acme, seed=8))["after"] == 2
        second = stock.ask([TEXT], name)
        assert second["VERSION"][0, 0] == b"2" and np.abs(second["LOGITS"] - first["LOGITS"]).max() > 0.01
        assert admin("tenant.rollback", id=name)["after"] == 1
        assert np.allclose(stock.ask([TEXT], name)["LOGITS"], first["LOGITS"], atol=1e-5)
        assert {"id": name, "version": 1} in admin("tenant.list")["tenants"]
        secret = admin("tenant.key.add", id=name, days=1)
        assert secret["secret"].startswith("hplm_") and "secret" not in str(admin("tenant.show", id=name))
        with refused("no_tenant"):
            stock.ask([TEXT], name)
        assert admin("tenant.delete", id=name)["after"] is None
        with refused("no_tenant"):
            stock.ask([TEXT], name, headers={"authorization": f"Bearer {secret['secret']}"})
        assert admin("tenant.compact")["bytes"] >= 0
        actions = [change["action"] for change in admin("log")["changes"]]
        told = [f"tenant {what}" for what in ("add", "update", "rollback", "key add", "delete")]
        assert told in (actions[-5:], actions[4::-1])
        load.wait_for(lambda *answer: True)
    assert not load.failures(), load.failures()[:3]


@pytest.mark.server("chat")
def test_a_decoders_tenant_is_added_changed_limited_and_deleted_while_it_streams(server):
    """A stream is so long that it still runs when its tenant is changed."""
    luna = TenantFile(server.named("luna", "chat"), 1, "law", 1, "generate", [], 4, "lora", ("query", "value", "ffn_out"))
    admin, prompt = Admin(server, backbone="chat"), "some words"

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
    assert admin("tenant.add", **admin.trained(luna, seed=1)).items() >= {"after": 1, "late": []}.items()
    first, stream = expected(), ask(5000)
    begins = stream.piece()
    assert first.agrees(answer())
    assert admin("tenant.update", **admin.trained(luna, seed=2))["after"] == 2
    assert server.held, "the stream has ended before its tenant was changed"
    second = expected()
    assert second.agrees(answer()) and second.tokens != first.tokens
    assert admin("tenant.limit", id=luna.id, first_token_us=1, token_us=60_000_000)["late"] == []
    with refused("deadline"):
        answer()
    assert len(answer(parameters={"first_token_ms": 60_000})) == 24  # a request's own time wins
    assert admin("tenant.delete", id=luna.id)["after"] is None
    with refused("no_tenant"):
        answer()
    assert first.agrees(ids_of([begins, *(stream.piece() for _ in range(23))]))
    stream.client.stop_stream(cancel_requests=True)

"""Live changes of a decoder on a real Triton: its tenants are added, changed, deleted, saved and restored while they stream."""

import base64

import pytest
from safetensors.torch import save
from tritonclient.utils import InferenceServerException

from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.engine.backbone import Backbone
from hplm.model.prompts import Prompts
from hplm.tenants.state import State
from testing.generative import GenerativeReference
from testing.random_store import random_tenant
from testing.toy import make_chat
from tests.cli.test_domain import run
from tests.server.generating import GREEDY, RETURN, Asked, ids_of
from tests.server.test_admin import KEY, Admin
from tests.support.message import mentioning
from tests.support.servers import held, serving

pytestmark = pytest.mark.slow

PROMPT = "some words"
PLAIN = TenantFile("plain", 1, "root", 1, "generate", [], 0)
TOLD = {**GREEDY, "logprobs": 0}


class Place:
    def __init__(self, folder):
        options = ServingOptions(dtype="fp32", seats=4, cache_tokens=32_768, admission=False, admin=True)
        self.chat = make_chat(folder, [PLAIN], ["law"], options=options)
        self.repository, self.state = self.chat.repository, folder / "state"
        State(self.state / "chat").begin()

    def trained(self, version=1, name="luna"):
        """Returns what a client sends to add a LoRA that it has trained itself."""
        tenant = TenantFile(name, version, "law", 1, "generate", [], 4, "lora", ("query", "value", "ffn_out"))
        random_tenant(self.chat.store, tenant, 0.3, seed=version)
        adapter, _ = self.chat.store.tenant_weights(tenant)
        tensors = {f"adapter.{i}.{key}": value.contiguous() for i, layer in enumerate(adapter) for key, value in layer.items()}
        return {
            "id": name, "domain": "law", "task": "generate", "tensors": base64.b64encode(save(tensors)).decode(),
            "adapter": {"kind": "lora", "rank": 4, "places": list(tenant.places)},
        }  # fmt: skip

    def expected(self, tenant="luna"):
        """Returns what a slow reference of the newest version writes."""
        backbone = Backbone(self.chat.folder, self.state)
        prompts = Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)
        return GenerativeReference(backbone).generate(prompts.encode(PROMPT).tolist(), tenant, 24)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HPLM_ADMIN_KEY", KEY)
    return Place(tmp_path)


def ask(server, tenant="luna", sampling=TOLD, **more):
    return Asked(server, PROMPT, tenant, sampling, stream=True, **RETURN, **more)


def answer(server, **more):
    """Returns the ids of a whole answer."""
    return ids_of(ask(server, **more).pieces())


def begun(server, most=1000):
    """Returns a stream of so many tokens that has begun."""
    asked = ask(server, sampling={**TOLD, "max_tokens": most})
    asked.first = asked.piece()
    return asked


def ended(asked):
    """Returns the ids of a stream that has begun, and why it ended."""
    pieces = [asked.first, *asked.pieces()]
    return ids_of(pieces), pieces[-1]["finish_reason"][0]


def test_a_tenant_is_added_changed_and_deleted_while_it_streams(place):
    with serving(place.repository, state=place.state) as server:
        admin = Admin(server, backbone="chat")
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            answer(server)
        added = admin("tenant.add", **place.trained())
        assert (added["after"], added["late"]) == (1, [])
        first, before = place.expected(), begun(server, 6000)
        assert first.agrees(answer(server))
        assert admin("tenant.update", **place.trained(2))["after"] == 2
        assert held(server) == 1, "the stream has ended before its tenant was changed"
        second, between = place.expected(), begun(server, 2000)
        assert second.agrees(answer(server)) and second.tokens != first.tokens
        assert admin("tenant.delete", id="luna")["after"] is None
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            answer(server)
        for stream, version, most in ((before, first, 6000), (between, second, 2000)):
            ids, reason = ended(stream)
            assert version.agrees(ids[:24]) and (len(ids), reason) == (most, b"length")
        assert answer(server, tenant="plain")


def test_limits_and_keys_hold_from_the_next_request_on(place):
    with serving(place.repository, state=place.state) as server:
        admin = Admin(server, backbone="chat")
        admin("tenant.add", **place.trained())
        stream = begun(server)
        assert admin("tenant.limit", id="luna", first_token_us=1, token_us=60_000_000)["late"] == []
        with pytest.raises(InferenceServerException, match=r"\[deadline\]"):
            answer(server)
        assert len(answer(server, parameters={"first_token_ms": 60_000})) == 24  # a request's own time wins
        admin("tenant.limit", id="luna", first_token_us=0)
        secret = admin("tenant.key.add", id="luna")["secret"]
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            answer(server)
        assert len(answer(server, headers={"authorization": f"Bearer {secret}"})) == 24
        assert ended(stream)[1] == b"length"
        mona = place.trained(name="mona")
        for command, given, named in (
            ("tenant.limit", {"id": "luna", "token_us": 0.5}, ["'token_us'"]),
            ("tenant.add", {**mona, "task": "classify"}, ["'classify'", "'chat'"]),
            ("tenant.add", {**mona, "tensors": "!!"}, ["'tensors'", "safetensors"]),
        ):
            with pytest.raises(InferenceServerException, match=mentioning("[invalid_input]", *named)):
                admin(command, **given)


def test_a_state_saved_while_a_tenant_streams_is_restored_with_its_answers(place, tmp_path, capsys):
    places = ["--repository", place.repository, "--state"]
    with serving(place.repository, state=place.state) as server:
        admin = Admin(server, backbone="chat")
        for version, change in ((1, "tenant.add"), (2, "tenant.update")):
            admin(change, **place.trained(version))
        admin("tenant.limit", id="luna", first_token_us=50_000_000, tokens_rate=10**6)
        expected, shown, stream = answer(server), admin("tenant.show", id="luna"), begun(server)
        assert run(capsys, "backup", "--to", tmp_path / "saved", *places, place.state)["generation"] == 3
        admin("tenant.delete", id="luna")
        assert ended(stream)[1] == b"length"
    assert run(capsys, "restore", "--from", tmp_path / "saved", *places, tmp_path / "again")["generation"] == 3
    run(capsys, "verify", *places, tmp_path / "again")
    with serving(place.repository, state=tmp_path / "again") as server:
        admin = Admin(server, backbone="chat")
        assert (answer(server), admin("tenant.show", id="luna")) == (expected, shown)
        assert admin("tenant.rollback", id="luna")["after"] == 1
        assert answer(server) != expected

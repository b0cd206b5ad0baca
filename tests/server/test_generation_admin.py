"""Live changes of a decoder on a real Triton: its tenants are added, changed, deleted, saved and restored while they stream."""

import base64
from dataclasses import dataclass

import pytest
from safetensors.torch import save
from tritonclient.utils import InferenceServerException

from builder.store.store import TenantFile
from hplm.engine.backbone import Backbone
from hplm.model.prompts import Prompts
from testing.generative import GenerativeReference
from testing.random_store import random_weights
from tests.cli.commands import run
from tests.server.generating import GREEDY, RETURN, Asked, ids_of
from tests.server.test_admin import Admin
from tests.support.message import mentioning
from tests.support.servers import Lease

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

PROMPT = "some words"
TOLD = {**GREEDY, "logprobs": 0}


@dataclass
class Place:
    server: Lease
    name: str  # of the tenant that a test adds

    def __post_init__(self):
        self.admin = Admin(self.server, backbone="chat")

    def trained(self, version=1, name=""):
        """Returns what a client sends to add a LoRA that it has trained itself."""
        tenant = TenantFile(name or self.name, version, "law", 1, "generate", [], 4, "lora", ("query", "value", "ffn_out"))
        config = self.server.built.stores["chat"].config
        adapter, _ = random_weights(config, tenant, 0.3, seed=version)
        tensors = {f"adapter.{i}.{key}": value.contiguous() for i, layer in enumerate(adapter) for key, value in layer.items()}
        return {
            "id": tenant.id, "domain": "law", "task": "generate", "tensors": base64.b64encode(save(tensors)).decode(),
            "adapter": {"kind": "lora", "rank": 4, "places": list(tenant.places)},
        }  # fmt: skip

    def expected(self, state=None):
        """Returns what a slow reference of the newest version writes."""
        backbone = Backbone(self.server.model_folder("chat"), state or self.server.state)
        prompts = Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)
        return GenerativeReference(backbone).generate(prompts.encode(PROMPT).tolist(), self.name, 24)

    def ask(self, tenant="", sampling=TOLD, **more):
        return Asked(self.server, PROMPT, tenant or self.name, sampling, stream=True, **RETURN, **more)

    def answer(self, **more):
        """Returns the ids of a whole answer."""
        return ids_of(self.ask(**more).pieces())

    def begun(self, most=1000):
        """Returns a stream of so many tokens that has begun."""
        asked = self.ask(sampling={**TOLD, "max_tokens": most})
        asked.first = asked.piece()
        return asked


@pytest.fixture
def place(server):
    return Place(server, server.named("luna", "chat"))


def ended(asked):
    """Returns the ids of a stream that has begun, and why it ended."""
    pieces = [asked.first, *asked.pieces()]
    return ids_of(pieces), pieces[-1]["finish_reason"][0]


def test_a_tenant_is_added_changed_and_deleted_while_it_streams(place):
    admin = place.admin
    with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
        place.answer()
    added = admin("tenant.add", **place.trained())
    assert (added["after"], added["late"]) == (1, [])
    first, before = place.expected(), place.begun(6000)
    assert first.agrees(place.answer())
    assert admin("tenant.update", **place.trained(2))["after"] == 2
    assert place.server.held == 1, "the stream has ended before its tenant was changed"
    second, between = place.expected(), place.begun(2000)
    assert second.agrees(place.answer()) and second.tokens != first.tokens
    assert admin("tenant.delete", id=place.name)["after"] is None
    with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
        place.answer()
    for stream, version, most in ((before, first, 6000), (between, second, 2000)):
        ids, reason = ended(stream)
        assert version.agrees(ids[:24]) and (len(ids), reason) == (most, b"length")
    assert place.answer(tenant="plain")


def test_limits_and_keys_hold_from_the_next_request_on(place):
    admin = place.admin
    admin("tenant.add", **place.trained())
    stream = place.begun()
    assert admin("tenant.limit", id=place.name, first_token_us=1, token_us=60_000_000)["late"] == []
    with pytest.raises(InferenceServerException, match=r"\[deadline\]"):
        place.answer()
    assert len(place.answer(parameters={"first_token_ms": 60_000})) == 24  # a request's own time wins
    admin("tenant.limit", id=place.name, first_token_us=0)
    secret = admin("tenant.key.add", id=place.name)["secret"]
    with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
        place.answer()
    assert len(place.answer(headers={"authorization": f"Bearer {secret}"})) == 24
    assert ended(stream)[1] == b"length"
    mona = place.trained(name=place.server.named("mona", "chat"))
    for command, given, named in (
        ("tenant.limit", {"id": place.name, "token_us": 0.5}, ["'token_us'"]),
        ("tenant.add", {**mona, "task": "classify"}, ["'classify'", "'chat'"]),
        ("tenant.add", {**mona, "tensors": "!!"}, ["'tensors'", "safetensors"]),
    ):
        with pytest.raises(InferenceServerException, match=mentioning("[invalid_input]", *named)):
            admin(command, **given)


def test_a_state_saved_while_a_tenant_streams_is_restored_with_its_answers(place, tmp_path, capsys):
    places = ["--backbone", "chat", "--repository", place.server.repository, "--state"]
    admin, name, again = place.admin, place.name, tmp_path / "again"
    for version, change in ((1, "tenant.add"), (2, "tenant.update")):
        admin(change, **place.trained(version))
    admin("tenant.limit", id=name, first_token_us=50_000_000, tokens_rate=10**6)
    second, shown, stream = place.expected(), admin("tenant.show", id=name), place.begun()
    generation = place.server.manager("chat").current().generation
    assert run(capsys, "backup", "--to", tmp_path / "saved", *places, place.server.state)["generation"] == generation
    admin("tenant.delete", id=name)
    assert ended(stream)[1] == b"length"
    assert run(capsys, "restore", "--from", tmp_path / "saved", *places, again)["generation"] == generation
    assert place.expected(again).tokens == second.tokens
    assert run(capsys, "tenant", "show", name, *places, again) == {"backbone": "chat", **shown}
    run(capsys, "tenant", "rollback", name, *places, again)
    assert place.expected(again).tokens != second.tokens

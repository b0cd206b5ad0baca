"""Live changes of a decoder on a real Triton: its tenants are added, changed, limited and deleted while they stream."""

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
from tests.server.generating import GREEDY, RETURN, Asked, ids_of
from tests.server.test_admin import Admin
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

    def trained(self, version=1):
        """Returns what a client sends to add a LoRA that it has trained itself."""
        tenant = TenantFile(self.name, version, "law", 1, "generate", [], 4, "lora", ("query", "value", "ffn_out"))
        adapter, _ = random_weights(self.server.built.stores["chat"].config, tenant, 0.3, seed=version)
        tensors = {f"adapter.{i}.{key}": value.contiguous() for i, layer in enumerate(adapter) for key, value in layer.items()}
        return {
            "id": tenant.id, "domain": "law", "task": "generate", "tensors": base64.b64encode(save(tensors)).decode(),
            "adapter": {"kind": "lora", "rank": 4, "places": list(tenant.places)},
        }  # fmt: skip

    def expected(self):
        """Returns what a slow reference of the newest version writes."""
        backbone = Backbone(self.server.model_folder("chat"), self.server.state)
        prompts = Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)
        return GenerativeReference(backbone).generate(prompts.encode(PROMPT).tolist(), self.name, 24)

    def ask(self, sampling=TOLD, **more):
        return Asked(self.server, PROMPT, self.name, sampling, stream=True, **RETURN, **more)

    def answer(self, **more):
        """Returns the ids of a whole answer."""
        return ids_of(self.ask(**more).pieces())

    def begun(self, most):
        """Returns a stream of so many tokens that has begun."""
        asked = self.ask({**TOLD, "max_tokens": most})
        asked.first = asked.piece()
        return asked


@pytest.fixture
def place(server):
    return Place(server, server.named("luna", "chat"))


def test_a_tenant_is_added_changed_limited_and_deleted_while_it_streams(place):
    """The streams are long, so that they still run when their tenant is changed."""
    admin = place.admin
    with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
        place.answer()
    added = admin("tenant.add", **place.trained())
    assert (added["after"], added["late"]) == (1, [])
    first, before = place.expected(), place.begun(5000)
    assert first.agrees(place.answer())
    assert admin("tenant.update", **place.trained(2))["after"] == 2
    assert place.server.held, "the stream has ended before its tenant was changed"
    second, between = place.expected(), place.begun(1500)
    assert second.agrees(place.answer()) and second.tokens != first.tokens
    assert admin("tenant.limit", id=place.name, first_token_us=1, token_us=60_000_000)["late"] == []
    with pytest.raises(InferenceServerException, match=r"\[deadline\]"):
        place.answer()
    assert len(place.answer(parameters={"first_token_ms": 60_000})) == 24  # a request's own time wins
    admin("tenant.limit", id=place.name, first_token_us=0)
    secret = admin("tenant.key.add", id=place.name)["secret"]
    with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
        place.answer()
    assert len(place.answer(headers={"authorization": f"Bearer {secret}"})) == 24
    assert admin("tenant.delete", id=place.name)["after"] is None
    with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
        place.answer()
    for stream, version in ((before, first), (between, second)):
        assert version.agrees(ids_of([stream.first, *(stream.piece() for _ in range(23))]))
        stream.client.stop_stream(cancel_requests=True)

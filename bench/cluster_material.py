"""The material of the cluster benchmark: a repository of random weights, and texts for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.rows import say
from bench.server import tenant_id, texts_of
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from loadtest.chaos.history import Question
from loadtest.encode import infer_request
from testing.random_store import SIZES, random_store, random_tenants

RANK, LABELS = 8, 4
TEXTS = 64
SPREAD = 0.3  # of weights, so that answers of another tenant or slot are other answers


@dataclass(frozen=True)
class Material:
    store: Store
    repository: Path
    tenants: list[str]
    tokens: int  # of a text

    @property
    def backbone(self) -> str:
        return self.store.config.name

    @cached_property
    def texts(self) -> list[str]:
        return texts_of(self.store.config, [self.tokens] * TEXTS)

    def request(self, number: int, tenant: str) -> bytes:
        """Returns a request with the header by which the router knows the tenant, as `hplm_client` sends it."""
        whole = infer_request(self.backbone, [self.texts[number % TEXTS]], tenant)
        return whole.replace(b"\r\n", f"\r\nhplm-tenant: {tenant}\r\n".encode(), 1)

    def questions(self, tenants: int) -> list[Question]:
        return [Question(tenant, text) for text in self.texts[:3] for tenant in self.tenants[:tenants]]


def make_material(folder: Path, size: str, tokens: int, slots: int) -> Material:
    say("making a repository")
    count = 4 * slots
    files = random_tenants(count, RANK, LABELS)
    store = random_store(folder / "store", SIZES[size], files, spread=SPREAD, corpus_tokens=5_000)
    export(store, folder / "repository", ServingOptions(slots=slots))
    return Material(store, folder / "repository", [tenant_id(number, count) for number in range(count)], tokens)

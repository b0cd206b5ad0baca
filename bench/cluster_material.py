"""The material of the cluster benchmark: a repository of random weights and texts for it, and a store with more tenants."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from bench.server import tenant_id, texts_of
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from loadtest.chaos.history import Question
from loadtest.encode import Parameter, infer_request
from testing.random_store import SIZES, random_store, random_table, random_tenant, random_tenants
from testing.toy import CONFIG

CONFIGS = {**SIZES, CONFIG.name: CONFIG}
RANK, LABELS = 8, 4
TRAVELLER = "traveller"  # the domain whose table travels
TEXTS = 64
SPREAD = 0.3  # of weights, so that answers of another tenant or slot are other answers


@dataclass(frozen=True)
class ClusterBench:
    size: str
    tokens: int  # of a text
    slots: int  # of a replica; there are four times as many tenants
    connections: int
    seconds: float  # of each timed measurement
    rounds: int
    adds: int  # tenants that come and go
    table_mb: float  # that travels while a key is revoked
    rate: float = 50.0  # requests a second that a tenant may send

    @property
    def tenants(self) -> int:
        return 4 * self.slots


@dataclass(frozen=True)
class Material:
    case: ClusterBench
    store: Store
    repository: Path

    @property
    def backbone(self) -> str:
        return self.store.config.name

    @cached_property
    def tenants(self) -> list[str]:
        return [tenant_id(number, self.case.tenants) for number in range(self.case.tenants)]

    @cached_property
    def texts(self) -> list[str]:
        """Texts with exactly so many tokens."""
        return texts_of(self.store.config, [self.case.tokens] * TEXTS)

    def request(self, number: int, tenant: str, parameters: Mapping[str, Parameter] | None = None) -> bytes:
        return self.asking(self.texts[number % TEXTS], tenant, parameters)

    def asking(self, text: str, tenant: str, parameters: Mapping[str, Parameter] | None = None) -> bytes:
        """Returns a request with the header by which the router knows the tenant, as `hplm_client` sends it."""
        whole = infer_request(self.backbone, [text], tenant, parameters=parameters)
        return whole.replace(b"\r\n", f"\r\nhplm-tenant: {tenant}\r\n".encode(), 1)

    def questions(self, tenants: int) -> list[Question]:
        return [Question(tenant, text) for text in self.texts[:3] for tenant in self.tenants[:tenants]]

    @cached_property
    def guests(self) -> list[str]:
        """Tenants of the store that are not exported."""
        return [f"guest-{number}" for number in range(self.case.adds)]

    def make_traveller(self) -> None:
        """Gives the store a domain with a table of the wanted size."""
        say(f"making a table of {self.case.table_mb:,.0f} MB")
        spec = self.store.table_spec(TRAVELLER, 1, ("root", 1), "fp16", 0)
        tokens = round(1e6 * self.case.table_mb / spec.row_bytes)  # most bring a new window, and so a row
        random_table(self.store, TRAVELLER, 1, ("root", 1), tokens, seed=9)


def make_material(folder: Path, case: ClusterBench) -> Material:
    say("making a repository")
    files = random_tenants(case.tenants, RANK, LABELS)
    store = random_store(folder / "store", CONFIGS[case.size], files, spread=SPREAD, corpus_tokens=5_000)
    export(store, folder / "repository", ServingOptions(slots=case.slots))
    material = Material(case, store, folder / "repository")
    for number, guest in enumerate(material.guests):
        random_tenant(store, replace(files[0], id=guest), SPREAD, seed=1000 + number)
    return material


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""Measures what clients of a cluster see while a replica is killed, and while tenants, tables and keys change."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.rows import say
from bench.server import tenant_id, texts_of
from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.errors import HplmError
from loadtest.chaos.history import (
    FAILED,
    UNANSWERED,
    WRONG,
    Asker,
    Clients,
    History,
    Question,
    expected_answers,
)  # fmt: skip
from loadtest.encode import infer_request
from loadtest.server import ServedCluster
from testing.random_store import SIZES, random_store, random_table, random_tenant, random_tenants

RANK, LABELS, TEXTS = 8, 4, 64
SPREAD = 0.3  # of weights, so that answers of another tenant or slot are other answers
CLIENTS, TENANTS = 16, 8
CALM = 2.0  # seconds of load before and after
PATIENCE, BACK_SECONDS = 60.0, 180.0
PAUSE = 0.01  # seconds between looks
AFTER = 0.5  # seconds that a deleted tenant is asked for
NEWCOMER = "newcomer"  # a domain whose table is large


@dataclass(frozen=True)
class Material:
    """A repository of random weights, and texts for it."""

    store: Store
    repository: Path
    tenants: list[str]
    texts: list[str]

    @classmethod
    def made(cls, folder: Path, size: str, tokens: int, slots: int) -> Material:
        config, repository, count = SIZES[size], folder / "repository", 4 * slots
        tenants = random_tenants(count, RANK, LABELS)
        store = random_store(folder / "store", config, tenants, spread=SPREAD, corpus_tokens=5_000)
        export(store, repository, ServingOptions(slots=slots))
        names = [tenant_id(number, count) for number in range(count)]
        return cls(store, repository, names, texts_of(config, [tokens] * TEXTS))

    @property
    def backbone(self) -> str:
        return self.store.config.name

    def request(self, number: int, tenant: str) -> bytes:
        """Returns a request with the header by which the router knows the tenant, as `hplm_client` sends it."""
        whole = infer_request(self.backbone, [self.texts[number % TEXTS]], tenant)
        return whole.replace(b"\r\n", f"\r\nhplm-tenant: {tenant}\r\n".encode(), 1)

    def questions(self) -> list[Question]:
        return [Question(tenant, text) for text in self.texts[:3] for tenant in self.tenants[:TENANTS]]


class AtEach(Clients):
    """A client of each replica, which asks for one tenant."""

    pauses = 0.01, 0.01

    def __init__(self, cluster: ServedCluster, material: Material, tenant: str, key: str = "") -> None:
        askers = [Asker(address, material.backbone) for address in cluster.replicas.values()]
        super().__init__(askers, [Question(tenant, material.texts[0], key)])

    def all_heard(self, since: float, is_answered: bool = True) -> float:
        """Waits until each replica has answered, or refused, a request from after `since`. Returns when that was."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            times = [ended for ended in self.first(since, is_answered) if ended is not None]
            if len(times) == len(self.heard):
                return max(times)
            time.sleep(PAUSE)
        raise HplmError(f"a replica has not taken a change within {PATIENCE:g} s: read its log")


def kill_figures(cluster: ServedCluster, material: Material) -> dict[str, Any]:
    """Every answer is compared with that of an unharmed replica. `reroute_s`: from the kill to the last failure."""
    say("kill -9 of a replica under load")
    victim, address = next(iter(cluster.replicas.items()))
    expected = expected_answers(address, material.backbone, material.questions())
    with History(cluster.address, [material.backbone], expected, CLIENTS) as history:
        time.sleep(CALM)
        killed = time.monotonic()
        processes = cluster.kill(victim)
        time.sleep(CALM)
        while not cluster.is_back(victim, processes):
            if time.monotonic() > killed + BACK_SECONDS:
                raise HplmError(f"{victim} was not started again within {BACK_SECONDS:g} s: read its log")
            time.sleep(CALM / 4)
        back = time.monotonic()
        time.sleep(CALM)
    counts = history.counts()
    return {
        "kill_unanswered": counts[UNANSWERED],
        "kill_closed": counts[FAILED],  # HAProxy closes a connection that is not new, instead of an answer 502
        "kill_wrong": counts[WRONG],
        "kill_requests": counts.total(),
        "reroute_s": round(max(0.0, history.last_failure - killed), 2),
        "back_s": round(back - killed, 1),
        "kill_reasons": history.reasons(),
    }


def change_figures(cluster: ServedCluster, material: Material, count: int) -> dict[str, Any]:
    """`add_p99_s`: from the beginning of `tenant add` until every replica has answered the tenant."""
    say(f"{count} tenants come and go")
    manager = cluster.manager()
    took: list[float] = []
    after = 0
    (like,) = random_tenants(1, RANK, LABELS)
    for number in range(count):
        guest = f"guest-{number}"
        random_tenant(material.store, replace(like, id=guest), SPREAD, seed=1000 + number)
        with AtEach(cluster, material, guest) as asking:
            began = time.monotonic()
            manager.settle(add_tenant(manager, material.store, guest).generation)
            took.append(asking.all_heard(began) - began)
            manager.settle(manager.delete(guest).generation)
            returned = time.monotonic()
            time.sleep(AFTER)
        after += sum(one.is_answered for own in asking.heard for one in own if one.asked >= returned)
    return {
        "add_p99_s": round(float(np.percentile(took, 99)), 3),
        "after_delete": after,
    }


def revoke_figures(cluster: ServedCluster, material: Material, table_mb: float) -> dict[str, Any]:
    """Revokes a key as soon as a large table is published, which all replicas then open."""
    say(f"making a table of {table_mb:,.0f} MB")
    store, manager, tenant = material.store, cluster.manager(), material.tenants[-1]
    row_bytes = store.table_spec(NEWCOMER, 1, ("root", 1), "fp16", 0).row_bytes
    random_table(store, NEWCOMER, 1, ("root", 1), round(1e6 * table_mb / row_bytes), seed=9)  # most tokens bring a new row
    manager.add_key(tenant)  # a last one cannot be revoked
    secret, key = manager.add_key(tenant)
    manager.settle_now()
    with AtEach(cluster, material, tenant, secret) as asking:
        asking.all_heard(time.monotonic())
        say("a table is published and a key is revoked")
        add_domain(manager, store, NEWCOMER)
        began = time.monotonic()
        manager.revoke_key(tenant, key.id)
        return {"revoke_s": round(asking.all_heard(began, is_answered=False) - began, 3)}

"""Measures what clients of a cluster see while replicas are killed or replaced, and tenants, tables and keys change."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self

from bench.rows import say
from bench.server import tenant_id, texts_of
from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.errors import HplmError
from hplm_client import HplmClient, HplmClientError
from loadtest.chaos.history import FAILED, OK, UNANSWERED, WRONG, History, Question, expected_answers
from loadtest.encode import infer_request
from loadtest.server import ServedCluster
from testing.random_store import SIZES, random_store, random_table, random_tenant, random_tenants

RANK, LABELS, TEXTS = 8, 4, 64
SPREAD = 0.3  # of weights, so that answers of another tenant or slot are other answers
CLIENTS, TENANTS = 16, 8
CALM = 2.0  # seconds of load before and after
PATIENCE, BACK_SECONDS, TRAVEL_SECONDS = 60.0, 180.0, 600.0
PAUSE = 0.01  # between two requests of a client
AFTER = 0.5  # seconds that a deleted tenant is asked for
TRAVELLER = "traveller"  # the domain whose table travels


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


class Client:
    """Asks one question after the other, and notes what came back."""

    def __init__(self, address: str, backbone: str, questions: Sequence[Question], **options: Any) -> None:
        self.answers: list[tuple[float, float, str]] = []  # when asked, when answered, and the kind of error if there was one
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, args=(address, backbone, questions, options), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        self._thread.join()

    def first(self, good: bool, since: float) -> float:
        """Returns when the first such answer to a request after `since` came. Waits for it."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for asked, answered, error in self.answers:
                if asked >= since and good == (not error):
                    return answered
            time.sleep(PAUSE)
        raise HplmError(f"a replica has not taken a change within {PATIENCE:g} s: read its log")

    def _ask_on(self, address: str, backbone: str, questions: Sequence[Question], options: dict[str, Any]) -> None:
        with HplmClient(address, backbone=backbone, **options) as client:
            for question in cycle(questions):
                if self._ending.wait(PAUSE):
                    return
                asked, error = time.monotonic(), ""
                try:
                    client.infer(question.text, tenant=question.tenant)
                except HplmClientError as refused:
                    error = type(refused).__name__
                self.answers.append((asked, time.monotonic(), error))


def kill_figures(cluster: ServedCluster, material: Material) -> dict[str, Any]:
    """Every answer is compared with that of an unharmed replica. `reroute_s`: from the kill to the last failure."""
    say("kill -9 of a replica under load")
    victim, address = next(iter(cluster.replicas.items()))
    expected = expected_answers(address, material.backbone, material.questions())
    history = History(cluster.address, [material.backbone], expected, CLIENTS)
    try:
        time.sleep(CALM)
        before, killed = history.counts(), time.monotonic()
        processes = cluster.kill(victim)
        time.sleep(CALM)
        while not cluster.is_back(victim, processes):
            if time.monotonic() > killed + BACK_SECONDS:
                raise HplmError(f"{victim} was not started again within {BACK_SECONDS:g} s: read its log")
            time.sleep(CALM / 4)
        back = time.monotonic()
        time.sleep(CALM)
    finally:
        history.stop()
    counts = history.counts()
    return {
        "kill_unanswered": counts[UNANSWERED],
        "kill_closed": counts[FAILED],  # HAProxy closes a connection that is not new, instead of an answer 502
        "kill_wrong": counts[WRONG],
        "kill_failed": (counts - before).total() - (counts - before)[OK],
        "kill_requests": counts.total(),
        "reroute_s": round(max(0.0, history.last_failure - killed), 2),
        "back_s": round(back - killed, 1),
        "kill_reasons": history.reasons(),
    }


def roll_figures(cluster: ServedCluster, material: Material) -> dict[str, Any]:
    """Counts the requests of `hplm_client` that fail although it retries, while all replicas are replaced."""
    say("all replicas are replaced under load")
    questions = material.questions()
    clients = [Client(cluster.address, material.backbone, questions[number:]) for number in range(CLIENTS)]
    with ExitStack() as asking:
        for client in clients:
            asking.enter_context(client)
        time.sleep(CALM)
        cluster.roll(say)
        time.sleep(CALM)
    reasons = Counter(error for client in clients for _, _, error in client.answers)
    answered = reasons.pop("", 0)
    return {"roll_failures": reasons.total(), "roll_requests": answered, "roll_reasons": dict(reasons)}


def change_figures(cluster: ServedCluster, material: Material, count: int) -> dict[str, Any]:
    """`add_p99_s`: from the beginning of `tenant add` until every replica has answered the tenant."""
    say(f"{count} tenants come and go")
    manager = cluster.manager()
    took: list[float] = []
    deletes: list[float] = []
    after = 0
    (like,) = random_tenants(1, RANK, LABELS)
    for number in range(count):
        guest = f"guest-{number}"
        random_tenant(material.store, replace(like, id=guest), SPREAD, seed=1000 + number)
        with ExitStack() as asking:
            clients = _at_each(cluster, material, guest, asking)
            began = time.monotonic()
            manager.settle(add_tenant(manager, material.store, guest).generation)
            took.append(max(client.first(True, began) for client in clients) - began)
            began = time.monotonic()
            manager.settle(manager.delete(guest).generation)
            returned = time.monotonic()
            deletes.append(returned - began)
            time.sleep(AFTER)
        after += sum(not error for client in clients for asked, _, error in client.answers if asked >= returned)
    return {
        "add_p50_s": round(float(np.percentile(took, 50)), 3),
        "add_p99_s": round(float(np.percentile(took, 99)), 3),
        "delete_p50_s": round(float(np.percentile(deletes, 50)), 3),
        "after_delete": after,
    }


def revoke_figures(cluster: ServedCluster, material: Material, table_mb: float) -> dict[str, Any]:
    """Revokes a key as soon as a large table is published, which all replicas then fetch."""
    say(f"making a table of {table_mb:,.0f} MB")
    store, manager, tenant = material.store, cluster.manager(), material.tenants[-1]
    row_bytes = store.table_spec(TRAVELLER, 1, ("root", 1), "fp16", 0).row_bytes
    random_table(store, TRAVELLER, 1, ("root", 1), round(1e6 * table_mb / row_bytes), seed=9)  # most tokens bring a new row
    manager.add_key(tenant)  # a last one cannot be revoked
    secret, key = manager.add_key(tenant)
    manager.settle_now()
    with ExitStack() as asking:
        clients = _at_each(cluster, material, tenant, asking, api_key=secret)
        for client in clients:
            client.first(True, time.monotonic())
        say("a key is revoked while the table travels")
        add_domain(manager, store, TRAVELLER)
        began = time.monotonic()
        manager.revoke_key(tenant, key.id)
        refused = max(client.first(False, began) for client in clients)
        travels = _without_the_table(cluster, material)
        while _without_the_table(cluster, material) and time.monotonic() < began + TRAVEL_SECONDS:
            time.sleep(PAUSE)
    return {
        "revoke_s": round(refused - began, 3),
        "revoked_while_travelling": travels,
        "table_travelled_s": round(time.monotonic() - began, 1),
    }


def _at_each(cluster: ServedCluster, material: Material, tenant: str, asking: ExitStack, **options: Any) -> list[Client]:
    """Starts a client of each replica, which asks for a tenant until `asking` ends."""
    question = [Question(tenant, material.texts[0])]
    clients = [Client(address, material.backbone, question, retries=0, **options) for address in cluster.replicas.values()]
    return [asking.enter_context(client) for client in clients]


def _without_the_table(cluster: ServedCluster, material: Material) -> int:
    """Returns how many replicas do not have the whole table yet."""
    folders = (cluster.folder / name / material.backbone / "plot" / TRAVELLER / "1" for name in cluster.replicas)
    return sum(not folder.is_dir() for folder in folders)

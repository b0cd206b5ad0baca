"""`hplm bench cluster`: two servers behind HAProxy on this machine, beside the same servers without it."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np

from bench.rows import ONLY_QUICK, Positive, Row, Rows, Size, Whole, benchmark, say
from bench.server import tenant_id, texts_of
from bench.turns import in_turn
from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.branches import table_spec
from builder.store.store import Store
from hplm.errors import HplmError
from loadtest.chaos.history import FAILED, OK, UNANSWERED, WRONG, Asker, History, TenantText, expected_answers
from loadtest.cluster import ServedCluster
from loadtest.encode import infer_request
from loadtest.generator import Load
from loadtest.load import Report, send
from testing.random_store import SIZES, random_store, random_table, random_tenant, random_tenants

RANK, LABELS, TEXTS = 8, 4, 64
SPREAD = 0.3  # of weights, so that answers of another tenant or slot are other answers
ASKED = 10  # requests by which a tenant's replica is found
CLIENTS, TENANTS = 16, 8  # while a replica is killed
CALM = 2.0  # seconds of load before and after
PATIENCE = 60.0
PAUSE = 0.01  # seconds between looks
STOP_REQUESTS, STOP_RATE = 400, 50.0  # during each stop, and a second
AFTER = 0.5  # seconds that a deleted tenant is asked for
NEWCOMER = "newcomer"  # a domain whose table is large

Asked = Mapping[str, Sequence[bytes]]  # requests by address
Part = Literal["proxy", "changes", "revoke", "faults", "stops"]


@benchmark(
    size="toy", tokens=16, slots=4, connections=8, seconds=0.5, rounds=1, adds=2, table_mb=1.0, stops=1,
    only=("proxy", "changes", "revoke"),
)  # fmt: skip
def cluster(
    *,
    size: Annotated[Size, ONLY_QUICK] = "minilm",
    tokens: Annotated[int, ONLY_QUICK] = 32,
    slots: Annotated[int, ONLY_QUICK] = 16,
    connections: Annotated[int, ONLY_QUICK] = 64,
    seconds: Positive = 15.0,
    rounds: Whole = 3,
    adds: Whole = 20,
    table_mb: Positive = 2000.0,
    stops: Annotated[int, ONLY_QUICK] = 5,
    only: Annotated[tuple[Part, ...], ONLY_QUICK] = get_args(Part),
) -> Rows:
    """Runs two servers on this machine, and HAProxy with the file of `hplm route`.

    Measures what the router costs, what clients see when a server is killed or stopped, and how soon changes of tenants are
    everywhere.
    Needs haproxy, and two cores.

    :param seconds: of each timed measurement
    :param rounds: turns of each comparison
    :param adds: tenants that come and go
    :param table_mb: of the table that is published before a key is revoked
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise HplmError("this machine has one core, but each of two servers needs its own: use another machine")
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder:  # a short path, for sockets
        say("making a repository")
        material = Material.made(Path(folder), size, tokens, slots)
        with ServedCluster(material.repository, Path(folder), [[core] for core in cores]) as servers:
            if "proxy" in only:
                yield from _proxy(servers, material, max(2, slots // 2), connections, seconds, rounds)
            if "changes" in only:
                yield from _changes(servers, material, adds)
            if "revoke" in only:
                yield from _revoked(servers, material, table_mb)
            if "faults" in only:
                yield from _killed(servers, material)
            if "stops" in only:
                yield from _stopped(servers, material, stops)


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


def _proxy(cluster: ServedCluster, material: Material, tenants: int, connections: int, seconds: float, rounds: int) -> Rows:
    """Turns of both ways follow each other, because machines drift.

    Without the router, each replica gets the tenants that the router sends it: with fewer tenants a batch has fewer adapters.
    """
    placed = _placed(cluster, material, material.tenants[:tenants])  # a batch may use half of the slots
    direct = {
        cluster.replicas[name]: [material.request(number, own[number % len(own)]) for number in range(8 * len(own))]
        for name, own in placed.items()
        if own
    }
    through = {cluster.address: [request for own in direct.values() for request in own]}
    (first, own), *_ = direct.items()

    def rate(asked: Asked) -> float:
        return sum(report.req_per_s for report in _together(asked, connections, seconds))

    def p50_ms(address: str) -> float:
        return _together({address: own[:1]}, 1, seconds / 2)[0].percentile_ms(50)

    say("the router beside none")
    ways = {"direct": partial(rate, direct), "through": partial(rate, through)}
    direct_rate, through_rate = in_turn(ways, rounds).values()
    one_client = {"a replica": partial(p50_ms, first), "the router": partial(p50_ms, cluster.address)}
    without, by_router = in_turn(one_client, rounds).values()
    yield Row("direct_req_per_s", direct_rate, "/s")
    yield Row("through_req_per_s", through_rate, "/s")
    yield Row("proxy_over_direct", through_rate / direct_rate, least=0.95)
    yield Row("hop_p50_ms", by_router - without, "ms", most=0.5)


def _together(asked: Asked, connections: int, seconds: float) -> list[Report]:
    """Sends requests to several addresses at the same time, with the connections divided among them."""
    each = max(1, connections // len(asked))
    reports = send(*(Load(to, requests, seconds=seconds, connections=each) for to, requests in asked.items()))
    for report in reports:
        report.expect_success("requests to the cluster")
    return reports


def _placed(cluster: ServedCluster, material: Material, tenants: Sequence[str]) -> dict[str, list[str]]:
    """Returns the tenants that the router sends to each replica while there is no other load."""
    own: dict[str, list[str]] = {name: [] for name in cluster.replicas}
    for tenant in tenants:
        before = cluster.requests()
        send(Load(cluster.address, [material.request(0, tenant)], count=ASKED))
        counts = {name: count - before[name] for name, count in cluster.requests().items()}
        own[max(counts, key=counts.__getitem__)].append(tenant)
    return own


class AtEach(History):
    """A client of each replica, which asks for one tenant."""

    pauses = 0.01, 0.01

    def __init__(self, cluster: ServedCluster, material: Material, tenant: str, key: str = "") -> None:
        askers = [Asker(address, material.backbone) for address in cluster.replicas.values()]
        super().__init__(askers, {TenantText(tenant, material.texts[0], key): None})

    def ended(self, since: float, is_answered: bool) -> list[list[float]]:
        """Returns when each replica has answered, or refused, requests from after `since`."""
        return [[one.ended for one in own if one.sent >= since and (one.outcome == OK) == is_answered] for own in self.heard]

    def all_heard(self, since: float, is_answered: bool = True) -> float:
        """Waits until each replica has answered, or refused, a request from after `since`. Returns when that was."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if all(times := self.ended(since, is_answered)):
                return max(first for first, *_ in times)
            time.sleep(PAUSE)
        raise HplmError(f"a replica has not taken a change within {PATIENCE:g} s: read its log")


def _changes(cluster: ServedCluster, material: Material, count: int) -> Rows:
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
            add_tenant(manager, material.store, guest)
            manager.settle()
            took.append(asking.all_heard(began) - began)
            manager.delete(guest)
            manager.settle()
            returned = time.monotonic()
            time.sleep(AFTER)
        after += sum(map(len, asking.ended(returned, is_answered=True)))
    yield Row("add_p99_s", float(np.percentile(took, 99)), "s", most=1.0)
    yield Row("after_delete", after, most=0)


def _revoked(cluster: ServedCluster, material: Material, table_mb: float) -> Rows:
    """Revokes a key as soon as a large table is published, which all replicas then open."""
    say(f"making a table of {table_mb:,.0f} MB")
    store, manager, tenant = material.store, cluster.manager(), material.tenants[-1]
    row_bytes = table_spec(store.config, NEWCOMER, 1, ("root", 1), "fp16", 0).row_bytes
    random_table(store, NEWCOMER, 1, ("root", 1), round(1e6 * table_mb / row_bytes), seed=9)  # most tokens bring a new row
    manager.add_key(tenant)  # a last one cannot be revoked
    secret, key = manager.add_key(tenant)
    manager.settle()
    with AtEach(cluster, material, tenant, secret) as asking:
        asking.all_heard(time.monotonic())
        say("a table is published and a key is revoked")
        add_domain(manager, store, NEWCOMER)
        began = time.monotonic()
        manager.revoke_key(tenant, key.id)
        yield Row("revoke_s", asking.all_heard(began, is_answered=False) - began, "s", most=1.0)


def _killed(cluster: ServedCluster, material: Material) -> Rows:
    """Every answer is compared with that of an unharmed replica. `reroute_s`: from the kill to the last failure."""
    say("kill -9 of a replica under load")
    victim, address = next(iter(cluster.replicas.items()))
    questions = [TenantText(tenant, text) for text in material.texts[:3] for tenant in material.tenants[:TENANTS]]
    expected = expected_answers(address, material.backbone, questions)
    with History([Asker(cluster.address, material.backbone) for _ in range(CLIENTS)], expected) as history:
        time.sleep(CALM)
        killed = time.monotonic()
        cluster.kill(victim)
        time.sleep(CALM)
        cluster.start(victim)
        cluster.until_up(victim)
        time.sleep(CALM)
    counts = history.counts()
    say(f"not answered: {history.reasons()}")
    yield Row("kill_requests", counts.total())
    yield Row("kill_unanswered", counts[UNANSWERED], most=0)
    yield Row("kill_closed", counts[FAILED])  # HAProxy closes a connection that is not new, instead of an answer 502
    yield Row("kill_wrong", counts[WRONG], most=0)
    yield Row("reroute_s", max(0.0, history.last_failure - killed), "s", most=2.0)


def _stopped(cluster: ServedCluster, material: Material, stops: int) -> Rows:
    """SIGTERM of one of the replicas under load, in turn, and its start. Nothing is asked a second time."""
    say(f"SIGTERM of a replica, {stops} times")
    requests = [material.request(number, tenant) for number, tenant in enumerate(material.tenants)]
    replicas = list(cluster.replicas)
    reports: list[Report] = []
    for stop in range(stops):
        replica, seconds = replicas[stop % len(replicas)], STOP_REQUESTS / STOP_RATE
        load = Load(cluster.address, requests, seconds, STOP_REQUESTS, CLIENTS, rate=STOP_RATE)
        with ThreadPoolExecutor(1) as sender:
            sent = sender.submit(load.run)
            time.sleep(CALM)
            cluster.terminate(replica)
            reports.append(sent.result())
        cluster.start(replica)
        cluster.until_up(replica)
    failures = sum((report.failures for report in reports), Counter[str]())
    say(f"not answered: {dict(failures)}")
    yield Row("stop_requests", sum(report.succeeded for report in reports) + failures.total())
    yield Row("stop_failed", failures.total(), most=0)

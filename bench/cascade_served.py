"""Cascades through a real Triton: latency below saturation, throughput, and right answers in time in an overload, in turns.

For each way of answering, every tenant is exported once more, with the same weights and another ladder.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.cascade_material import CascadeBench, Material
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.training.tasks import training_task
from hplm.engine.backbone import Backbone
from hplm.errors import HplmError
from hplm.levels.plan import Plan, Step
from hplm.server import TritonServer
from hplm.tenants.snapshot import Snapshot, Tenant
from loadtest.encode import Parameter, infer_request
from loadtest.generator import Load
from loadtest.load import send

# The full stack; the dearest plan; all plans, by the governor; the shallowest level alone.
STRONG, CASCADE, LADDER, SMALL = "strong", "cascade", "ladder", "level-0"
LOAD = 0.7  # of the rate at which strong is saturated
OVERLOAD = 3.0
BATCH_TOKENS = 1024  # so that a batch takes a fraction of the deadlines
IN_FLIGHT = 64  # requests at saturation
ALLOWED = (2.0, 12.0)  # the deadlines of an overload, in times that strong takes for a batch; drawn evenly
MOST_CONNECTIONS = 512
DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Asked:
    """A test text, the tenant that answers it, and the right answer."""

    tenant: str
    text: str
    label: str


@dataclass(frozen=True)
class Poisson:
    """Requests of an open loop."""

    due: np.ndarray  # seconds
    asked: np.ndarray  # the numbers of the texts

    @classmethod
    def of(cls, rate: float, seconds: float, texts: int, seed: int) -> Poisson:
        random = np.random.default_rng(seed)
        due = np.cumsum(random.exponential(1 / rate, max(2, round(rate * seconds))))
        return cls(due, random.integers(0, texts, len(due)))


@dataclass(frozen=True)
class Sent:
    """The answers to an open loop, in the order in which its requests were due."""

    latencies: np.ndarray  # seconds since a request was due; infinite if it has no answer
    labels: list[str | None]


def asked_of(material: Material) -> list[Asked]:
    """Returns the test texts of all tenants, in a random order."""
    every = [
        Asked(one.tenant.id, example.text, example.labels[0])
        for one in material.cascaded
        for example in training_task(one.tenant.task).read(one.question.test).examples
    ]
    return [every[number] for number in np.random.default_rng(5).permutation(len(every))]


def exported(material: Material, repository: Path) -> str:
    """Exports the store with a tenant for each way, and returns the backbone's name."""
    options = ServingOptions(dtype=material.precision.name, batch_tokens=BATCH_TOKENS, queue_texts=100_000)
    backbone = export(material.store, repository, options, replace=True).backbone
    path = repository / backbone / "1" / Backbone.TENANTS
    whole = Snapshot.load(path)
    known = {one.tenant.id for one in material.cascaded}
    tenants = [own for tenant in whole.tenants if tenant.id in known for own in _in_all_ways(tenant)]
    numbered = [replace(tenant, uid=number) for number, tenant in enumerate(tenants, start=1)]
    Snapshot(whole.generation, whole.branches, numbered, whole.export).save(path)
    return backbone


def _in_all_ways(tenant: Tenant) -> list[Tenant]:
    ladders = {STRONG: (), CASCADE: tenant.ladder[:1], LADDER: tenant.ladder, SMALL: (Plan((Step(0),)),)}
    return [replace(tenant, id=f"{tenant.id}-{way}", ladder=tuple(ladder)) for way, ladder in ladders.items()]


class Served:
    """A running server."""

    def __init__(self, server: TritonServer, backbone: str, asked: Sequence[Asked]) -> None:
        host, port = server.http_url.split(":")
        self._host, self._port = host, int(port)
        self._backbone, self.asked = backbone, asked

    def saturated(self, way: str, seconds: float) -> float:
        """Returns answers a second."""
        requests = [self._request(way, number) for number in range(len(self.asked))]
        (report,) = send(Load(self._host, self._port, requests, seconds=seconds, connections=IN_FLIGHT))
        report.expect_success(f"{way} at saturation")
        return report.req_per_s

    def open_loop(self, way: str, load: Poisson, allowed: np.ndarray | None = None) -> Sent:
        """Sends requests when they are due. `allowed`: seconds until the deadline of each."""
        limits = allowed.tolist() if allowed is not None else [None] * len(load.due)
        requests = [self._request(way, *one) for one in zip(load.asked.tolist(), limits, strict=True)]
        seconds, due, most = float(load.due[-1]) + 1.0, load.due, MOST_CONNECTIONS
        (report,) = send(
            Load(self._host, self._port, requests, seconds=seconds, connections=most, arrivals=due, keep_bodies=True)
        )
        sent = Sent(np.full(len(requests), np.inf), [None] * len(requests))
        columns = report.numbers.tolist(), report.statuses.tolist(), report.latencies.tolist(), report.bodies
        for number, status, took, body in zip(*columns, strict=True):
            if status == 200:
                sent.latencies[number], sent.labels[number] = took, label_in(body)
        return sent

    def _request(self, way: str, number: int, allowed: float | None = None) -> bytes:
        asked = self.asked[number]
        parameters: dict[str, Parameter] = {"truncate": True}
        if allowed is not None:
            parameters["timeout"] = round(1e6 * allowed)
        tenant = f"{asked.tenant}-{way}"
        return infer_request(self._backbone, [asked.text], tenant, outputs=("LABEL",), parameters=parameters)


def label_in(body: bytes) -> str:
    """Returns the first label of an answer: JSON, and behind it the output's bytes, each string with its length."""
    _, end = DECODER.raw_decode(body.decode("latin-1"))
    (length,) = struct.unpack_from("<I", body, end)
    return body[end + 4 : end + 4 + length].decode()


def timed(served: Served, batch_texts: float, case: CascadeBench) -> dict[str, Any]:
    """`batch_texts`: of a full batch."""
    for way in (STRONG, CASCADE, LADDER):
        served.saturated(way, case.seconds / 4)  # warms up
    rates: dict[str, list[float]] = {STRONG: [], CASCADE: []}
    for _ in tqdm(range(case.rounds), desc="at saturation, in turns"):
        for way, own in rates.items():
            own.append(served.saturated(way, case.seconds / 2))
    capacity = float(np.mean(rates[STRONG]))
    found: dict[str, list[Sent]] = {STRONG: [], CASCADE: [], SMALL: []}
    for turn in tqdm(range(case.rounds), desc="arriving at random, in turns"):
        load = Poisson.of(LOAD * capacity, case.seconds, len(served.asked), turn)
        for way, sent in found.items():
            sent.append(served.open_loop(way, load))
    latencies = {name: _described(sent) for name, sent in found.items()}
    in_time = _in_time(served, capacity, batch_texts / capacity, case)
    return {
        "latency_over_strong": _ratio(latencies[CASCADE]["mean_ms"], latencies[STRONG]["mean_ms"]),
        "p99_over_strong": _ratio(latencies[CASCADE]["p99_ms"], latencies[STRONG]["p99_ms"]),
        "throughput_over_strong": _ratio(float(np.mean(rates[CASCADE])), capacity),
        "overload_ratio": _ratio(in_time[LADDER], in_time[STRONG]),
        "strong_per_s": capacity,
        "drift": _ratio(served.saturated(STRONG, case.seconds / 2), capacity),
        "latencies": latencies,
        "right_in_time": in_time,
    }


def _in_time(served: Served, capacity: float, batch_s: float, case: CascadeBench) -> dict[str, float]:
    """Returns the shares of requests that are answered rightly and in time, at a multiple of strong's rate."""
    shares: dict[str, list[float]] = {STRONG: [], LADDER: []}
    for turn in tqdm(range(case.rounds), desc="overload, in turns"):
        load = Poisson.of(OVERLOAD * capacity, case.seconds, len(served.asked), turn)
        allowed = np.random.default_rng(turn).uniform(ALLOWED[0] * batch_s, ALLOWED[1] * batch_s, len(load.due))
        wanted = [served.asked[number].label for number in load.asked.tolist()]
        for way, own in shares.items():
            sent = served.open_loop(way, load, allowed)
            right = np.array([found == label for found, label in zip(sent.labels, wanted, strict=True)])
            own.append(float((right & (sent.latencies <= allowed)).mean()))
    return {way: float(np.mean(own)) for way, own in shares.items()}


def _described(sent: Sequence[Sent]) -> dict[str, float]:
    latencies = 1e3 * np.concatenate([one.latencies for one in sent])
    unanswered = int((~np.isfinite(latencies)).sum())
    if unanswered:
        raise HplmError(f"{unanswered} of {len(latencies)} requests have no answer: read the messages above, then try again")
    return {"mean_ms": float(latencies.mean()), "p99_ms": float(np.percentile(latencies, 99))}


def _ratio(one: float, other: float) -> float | None:
    """None: the other one has nothing, not a right answer in time."""
    return one / other if other else None

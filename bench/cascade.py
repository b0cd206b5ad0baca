"""`hplm bench cascade`: texts that leave early at exits, beside the full stack alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.cascade_material import Judged, described, judged, stored
from bench.rows import EngineDtype, Positive, Row, Rows, Whole, benchmark, rows_of, say
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.publish.precision import served_precision
from builder.store.store import Store
from hplm.arrays import Array
from hplm.engine.backbone import Backbone
from hplm.engine.engine import resolve_device
from hplm.server import TritonServer
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from loadtest.generator import Load
from loadtest.load import Report, send

TARGETS = {
    "work": ("<=", 0.6),
    "points_lost": ("<=", 0.5),
    "one_client/over_full": ("<=", 0.75),
    "loaded_mean/over_full": ("<=", 0.7),
    "loaded_p99/over_full": ("<=", 1.0),
    "throughput/over_full": (">=", 1.45),
    "overload/over_full": (">=", 1.5),
    "mixed/over_alone": (">=", 0.95),
    "served/as_expected": (">=", 0.98),
}
FULL = "-full"  # ends the names of the same tenants without exits
LOAD, OVERLOAD = 0.7, 3.0  # of the full stack's capacity
ALLOWED = (2.0, 12.0)  # the deadlines of an overload, in times that the full stack takes for a batch; drawn evenly
BATCH_TOKENS = 1024  # so that a batch takes a fraction of the deadlines
CLIENTS, MOST_CONNECTIONS = 64, 512
COMPARED = 2000  # answers that are compared with those offline, at most


@benchmark(questions=2, texts=160, epochs=1, minutes=0.02, keep=0.01, seconds=0.3, rounds=1)
def cascade(
    *,
    folder: Path = Path(".hplm/bench-cascade"),
    model: str = "",
    questions: Whole = 100,
    texts: Whole = 3000,
    epochs: Whole = 3,
    minutes: Positive = 2.5,
    keep: Positive = 0.1,
    seconds: Positive = 20.0,
    rounds: Whole = 3,
    dtype: EngineDtype = "auto",
    build: bool = False,
) -> Rows:
    """Builds tenants with exits on a model whose first two layers are in tables. Measures what exits lose and spare.

    Two servers of the same store, one without exits, answer in turn. `random`: as many texts leave, whichever they are. What
    judges a way has not chosen it.

    :param folder: what is built, which later runs use again
    :param model: Hugging Face name or folder of another BERT than MiniLM
    :param questions: tenants, at most
    :param texts: of each file, at most
    :param epochs: of each tenant
    :param minutes: of adapting the lower layers
    :param keep: share of the n-grams that have rows in the table
    :param seconds: of each timed measurement
    :param rounds: turns of each timed measurement
    :param dtype: precision of the engine
    :param build: only build what the folder lacks, for this precision
    """
    store, asked = stored(folder, model, questions, texts, epochs, minutes, keep)
    precision = served_precision(store, dtype, resolve_device("auto"))
    found = [judged(store, id, question, precision) for id, question in asked.items()]
    if build:
        yield Row("tenants", len(found))
        return
    yield from rows_of({"dtype": precision.name, **offline(found)}, TARGETS)
    with _servers(store, list(asked), precision.name, folder) as (exits, full):
        yield from rows_of(_Turns(found, exits, full, seconds, rounds).figures(), TARGETS)


def offline(found: Sequence[Judged]) -> dict[str, Any]:
    """Returns what the dearest plan loses and spares, on average and for each tenant, beside random texts."""
    own, full = [one.way(one.plan(0)) for one in found], [float(one.test.right[-1].mean()) for one in found]
    by_chance = described([one.random(one.plan(0)) for one in found])["points_lost"]
    each = zip(found, full, own, strict=True)
    return {
        "full_accuracy": float(np.mean(full)),
        **described(own),
        "random": {"points_lost": by_chance},
        "tenants": {one.id: {"full_accuracy": accuracy, **described([way])} for one, accuracy, way in each},
    }


@contextmanager
def _servers(store: Store, ids: Sequence[str], dtype: str, folder: Path) -> Iterator[tuple[_Server, _Server]]:
    """Gives a server of all tenants, each also without exits, and one of tenants without exits alone."""
    options = ServingOptions(dtype=dtype, batch_tokens=BATCH_TOKENS, queue_texts=100_000)
    with TemporaryDirectory(prefix="served-", dir=folder) as home, ExitStack() as running:
        servers: list[_Server] = []
        for way in ("exits", "full"):
            backbone = export(store, Path(home) / way, options).backbone
            path = Path(home) / way / backbone / "1" / Backbone.TENANTS
            whole = Snapshot.load(path)
            known = [tenant for tenant in whole.tenants if tenant.id in ids]
            bare = [replace(tenant, id=f"{tenant.id}{FULL}", exits=None) for tenant in known]
            tenants = [replace(one, uid=uid) for uid, one in enumerate([*known, *bare] if way == "exits" else bare, start=1)]
            Snapshot(whole.generation, whole.branches, tenants, whole.export).save(path)
            servers.append(_Server(running.enter_context(TritonServer(Path(home) / way)), backbone))
        yield servers[0], servers[1]


@dataclass(frozen=True)
class _Asked:
    """A test text, its tenant, the right answer, those of all exits and the full stack, and the exit where it leaves."""

    tenant: str
    text: str
    wanted: str
    expected: Array
    exit: int


@dataclass(frozen=True)
class _Server:
    server: TritonServer
    backbone: str

    def send(self, asked: Sequence[_Asked], way: str, connections: int, allowed: Array | None = None, **load: Any) -> Report:
        """Sends texts in turn. With deadlines, the server may refuse them, and choose cheaper plans than the dearest."""
        bounds = [{"hplm_rung": 1}] * len(asked) if allowed is None else [{"timeout": round(1e6 * one)} for one in allowed]
        requests = [
            infer_request(
                self.backbone, [one.text], one.tenant + way, outputs=("LABEL", "LEVEL"), parameters={"truncate": True, **bound}
            )
            for one, bound in zip(asked, bounds, strict=True)
        ]
        (report,) = send(Load(self.server.http_url, requests, connections=connections, keep_bodies=True, **load))
        if allowed is None:
            report.expect_success("a load")
        return report


@dataclass(frozen=True)
class _Turns:
    found: Sequence[Judged]
    exits: _Server
    full: _Server
    seconds: float
    rounds: int

    def figures(self) -> dict[str, Any]:
        asked, ways = self._asked(), {"exits": (self.exits, ""), "full": (self.full, FULL)}
        number_of = {own.id: number for number, own in enumerate(self.found)}
        for server, way in ways.values():
            server.send(asked, way, CLIENTS, seconds=self.seconds / 2)  # warms up
        found: dict[str, dict[str, list[float]]] = {}
        for turn in range(self.rounds):
            say(f"one client and {CLIENTS} clients, turn {turn + 1} of {self.rounds}")
            for name, (server, way) in ways.items():
                one, many = (server.send(asked, way, clients, seconds=self.seconds) for clients in (1, CLIENTS))
                _keep(found, name, one_client=1e3 * one.latencies.mean(), throughput=many.req_per_s)
            for half in range(2):  # of the tenants, which are asked without exits, beside the others with theirs
                mixed = [replace(own, tenant=own.tenant + FULL * ((number_of[own.tenant] + half) % 2)) for own in asked]
                many = self.exits.send(mixed, "", CLIENTS, seconds=self.seconds / 2)
                _keep(found, "mixed", throughput=many.req_per_s)
        alone, together = float(np.mean(found["throughput"]["full"])), float(np.mean(found["throughput"].pop("mixed")))
        batch_s = BATCH_TOKENS / float(np.mean([own.tokens for own in self.found])) / alone
        for turn in range(self.rounds):
            say(f"{LOAD:g} and {OVERLOAD:g} times {alone:.0f} texts a second, turn {turn + 1} of {self.rounds}")
            random = np.random.default_rng(turn)
            loads = [self._poisson(asked, share * alone, random) for share in (LOAD, OVERLOAD)]
            allowed = random.uniform(ALLOWED[0] * batch_s, ALLOWED[1] * batch_s, len(loads[1][0]))
            for name, (server, way) in ways.items():
                (texts, due), crowd = loads
                took = 1e3 * server.send(texts, way, MOST_CONNECTIONS, seconds=due[-1] + 1, arrivals=due).latencies
                right = self._right(server, way, *crowd, allowed)
                _keep(found, name, loaded_mean=took.mean(), loaded_p99=np.percentile(took, 99), overload=right)
        figures: dict[str, Any] = {}
        for what, own in found.items():
            exits, full = (float(np.mean(own[name])) for name in ways)
            figures[what] = {"exits": exits, "full": full, "over_full": exits / full if full else None}
        figures["mixed"] = {"req_per_s": together, "over_alone": together / alone}
        return {**figures, "served": self._served(asked[:COMPARED])}

    def _asked(self) -> list[_Asked]:
        every = [
            _Asked(own.id, *one)
            for own in self.found
            for one in zip(own.texts, *own.expected(), own.test.answered.left_at(own.plan(0)).tolist(), strict=True)
        ]
        return [every[number] for number in np.random.default_rng(5).permutation(len(every)).tolist()]

    def _poisson(self, asked: Sequence[_Asked], rate: float, random: np.random.Generator) -> tuple[list[_Asked], Array]:
        due = np.cumsum(random.exponential(1 / rate, max(2, round(rate * self.seconds))))
        return [asked[number] for number in random.integers(0, len(asked), len(due)).tolist()], due

    def _right(self, server: _Server, way: str, texts: Sequence[_Asked], due: Array, allowed: Array) -> float:
        """Returns the share of the texts that are answered rightly and in time."""
        report = server.send(texts, way, MOST_CONNECTIONS, allowed, seconds=due[-1] + 1, arrivals=due)
        answers = zip(report.in_time(allowed), report.numbers, report.bodies, strict=True)
        return sum(_answer(body)[0] == texts[number].wanted for in_time, number, body in answers if in_time) / len(texts)

    def _served(self, asked: Sequence[_Asked]) -> dict[str, float]:
        """Compares answers with those offline. One of a hundred texts that could leave is audited, and goes on."""
        report = self.exits.send(asked, "", CLIENTS, seconds=600.0, count=len(asked))
        pairs = [(asked[number], *_answer(body)) for number, body in zip(report.numbers, report.bodies, strict=True)]
        return {
            "left_as_expected": float(np.mean([exit == own.exit for own, _, exit in pairs])),
            "as_expected": float(np.mean([label == own.expected[own.exit] for own, label, _ in pairs])),
        }


def _keep(found: dict[str, dict[str, list[float]]], name: str, **values: float) -> None:
    for what, value in values.items():
        found.setdefault(what, {}).setdefault(name, []).append(float(value))


def _answer(body: bytes) -> tuple[str, int]:
    """Returns the label of an answer, and the exit: JSON comes first, and behind it the outputs' bytes."""
    head, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    parts: dict[str, bytes] = {}
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        parts[output["name"]], end = body[end : end + size], end + size
    (level,) = struct.unpack("<i", parts["LEVEL"])
    return parts["LABEL"][4:].decode(), level - 1

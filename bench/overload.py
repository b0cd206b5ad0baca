"""`hplm bench overload`: a server that gets more requests than it can answer in time, or one for each policy and packing.

A closed loop measures the capacity. Then texts with random deadlines arrive as a Poisson process at three times it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np

from bench.rows import ONLY_QUICK, ModelSize, NotNegative, Positive, Row, Rows, Size, benchmark, rows_of, say
from bench.server import random_export, requests_of, settings_of, texts_of
from bench.simulated import simulate
from builder.publish.model_configs import ServingOptions
from hplm.engine.packing import read_packing
from hplm.scheduling.admission import REFUSED
from hplm.scheduling.policy import DEFAULT, policy
from hplm.server import TritonServer
from hplm.simulate.arrivals import Arrivals, Lengths, Stream
from loadtest.generator import Load, measured
from loadtest.load import Report, send
from testing.random_store import SIZES

MEAN = 20  # tokens of a text, if lengths vary
TEXTS = 4096  # different ones, sent in turn
MOST_CONNECTIONS = 512
BATCH_TEXTS = 8  # more for short texts, because a batch must hold the longest text
TENANTS = 16  # requests go to them in turn
SEED = 0  # of arrivals and deadlines
DEADLINES = 2.0, 12.0  # in batch times, drawn uniformly between these
OVERLOAD = 3.0  # times the capacity
BASE = ("fcfs", "packed")


@benchmark(size="toy", tokens=16, seconds=0.6)
def overload(
    *,
    size: ModelSize = "bert-base",
    tokens: Annotated[int, ONLY_QUICK] = 128,
    variance: NotNegative = 0.0,
    policies: tuple[str, ...] = (DEFAULT,),
    packings: tuple[str, ...] = ("packed",),
    seconds: Positive = 60.0,
) -> Rows:
    """Sends a server three times the requests that it can answer, with deadlines of some batch times.

    Measures how many it answers in time, how many it refuses and how fast, beside the simulator with the same arrivals. With
    several policies or packings, each pair has a server of its own, between two of first come, first served with the packing
    `packed`; these refuse nothing on arrival. A text's `utility` is 1 / length, as in TCB, if it was started by its deadline.

    :param variance: above 0: lengths are normal with mean 20, from 3 to 100 tokens, or what the model takes
    :param policies: of scheduling
    :param packings: of batches
    :param seconds: of overload, for each server
    """
    for name in policies:
        policy(name)
    for name in packings:
        read_packing(name, lambda texts, tokens: 0.0)
    varied = Lengths(MEAN, variance, most=min(Lengths.most, SIZES[size].positions))
    lengths = varied.draw(TEXTS, np.random.default_rng(SEED)) if variance else np.full(TEXTS, tokens)
    mean = MEAN if variance else tokens
    batch = max(BATCH_TEXTS, -(-SIZES[size].positions // mean))
    drawn = Drawn(texts_of(SIZES[size], lengths), lengths, seconds, batch)
    pairs = list(product(policies, packings))
    if len(pairs) == 1:
        yield from _one(size, *pairs[0], drawn)
    else:
        yield from _compared(size, [pair for pair in pairs if pair != BASE], drawn)


@dataclass(frozen=True)
class Drawn:
    """Texts, and how they are sent."""

    texts: list[str]
    lengths: np.ndarray
    seconds: float
    batch: int

    def capacity(self, server: TritonServer, model: str) -> float:
        """Returns the answers a second of a closed loop."""
        requests = requests_of(model, self.texts, TENANTS, outputs=("LABEL",))
        load = Load(server.http_url, requests, seconds=self.seconds / 3, connections=4 * self.batch)
        return measured(load, "the capacity", self.seconds / 6, "give --seconds more, or the command again").req_per_s

    def offered(self, capacity: float) -> Arrivals:
        say(f"capacity: {capacity:.1f} requests a second; sending {OVERLOAD:g} times as many")
        least, most = (1e3 * times * self.batch / capacity for times in DEADLINES)
        drawn = Stream(OVERLOAD * capacity, self.seconds, allowed_ms=(least, most)).draw(SEED)
        numbers = np.arange(len(drawn))
        return replace(drawn, tokens=self.lengths[numbers % len(self.lengths)], tenant=numbers % TENANTS)

    def report(self, server: TritonServer, model: str, offered: Arrivals) -> Report:
        requests = requests_of(model, self.texts, TENANTS, offered.allowed_ns / 1e9, outputs=("LABEL",))
        arrivals = offered.at_ns / 1e9
        load = {"seconds": arrivals[-1] + 1.0, "connections": MOST_CONNECTIONS, "arrivals": arrivals, "keep_bodies": True}
        return send(Load(server.http_url, requests, **load))[0]


@contextmanager
def _served(size: Size, drawn: Drawn, options: dict) -> Iterator[tuple[TritonServer, Path, Path]]:
    """Gives a server, the folder of its model, and its journal."""
    with TemporaryDirectory(prefix="hplm-bench-") as folder:
        journal = Path(folder) / "journal.jsonl"
        mean = round(float(drawn.lengths.mean()))
        serving = ServingOptions(slots=max(2, 2 * TENANTS), batch_tokens=drawn.batch * mean, journal=str(journal), **options)
        with random_export(SIZES[size], TENANTS, serving) as exported, TritonServer(exported.parent) as server:
            yield server, exported, journal


def _one(size: Size, scheduling: str, packing: str, drawn: Drawn) -> Rows:
    with _served(size, drawn, {"policy": scheduling, "packing": packing}) as (server, exported, journal):
        before = drawn.capacity(server, exported.name)
        offered = drawn.offered(before)
        report = drawn.report(server, exported.name, offered)
        after = drawn.capacity(server, exported.name)
        entries, settings = _entries(journal), settings_of(exported)
    on_time_by_server = sum(entry.get("outcome") == "on_time" for entry in entries)
    rows = list(figures(report, offered, (before + after) / 2, drawn.batch, on_time_by_server))
    yield from rows
    yield Row("capacity_drift", after / before)
    simulated = simulate(offered, report, entries, settings)
    (share,) = (row.value for row in rows if row.name == "on_time_of_offered")
    yield Row("simulated_on_time_of_offered", simulated)
    yield Row("simulator_off_by", abs(simulated - float(share or 0.0)), most=0.03)


def figures(report: Report, offered: Arrivals, capacity: float, batch: int, by_server: int) -> Rows:
    """`by_server`: how many requests the server counted as on time. All other figures are by the client's clock.

    `admitted` are requests that were not refused on arrival.
    """
    refused = np.array([REFUSED.encode() in body for body in report.bodies], dtype=bool)
    on_time, count = int(report.in_time(offered.allowed_ns / 1e9).sum()), len(offered)
    admitted = int((~refused).sum()) + report.errors.total()
    yield Row("capacity_req_per_s", capacity, "/s")
    yield Row("offered_req_per_s", 1e9 * count / float(np.ptp(offered.at_ns)), "/s")
    yield Row("batch_ms", batch / capacity * 1e3, "ms")
    yield Row("on_time_of_admitted", on_time / max(1, admitted), least=0.9)
    yield Row("goodput_of_capacity", on_time / report.wall_s / capacity, least=0.9)
    yield Row("on_time_of_offered", on_time / count)
    yield Row("on_time", on_time)
    yield Row("on_time_by_server", by_server)
    yield Row("server_counts_more", (by_server - on_time) / max(1, on_time))
    yield Row("refused", int(refused.sum()))
    yield Row("dropped_later", int(((report.statuses != 200) & ~refused).sum()))
    yield Row("late", report.succeeded - on_time)
    yield Row("unanswered", report.errors.total())
    for percent, most in ((50, None), (99, 20.0)):
        value = float(np.percentile(report.latencies[refused], percent)) * 1e3 if refused.any() else None
        yield Row(f"refusal_p{percent}_ms", value, "ms", most=most if refused.any() else None)


def _compared(size: Size, pairs: Sequence[tuple[str, str]], drawn: Drawn) -> Rows:
    """Measures each pair of a policy and a packing between two measurements of the base, because machines drift."""
    offered: Arrivals | None = None
    measured = []
    for scheduling, packing in chain([BASE], *([pair, BASE] for pair in pairs)):
        say(f"{scheduling} with {packing}")
        options = {"policy": scheduling, "packing": packing, "admission": False, "batch_ms": "0"}
        with _served(size, drawn, options) as (server, exported, journal):
            capacity = drawn.capacity(server, exported.name)
            offered = offered or drawn.offered(capacity)  # the same for all
            report = drawn.report(server, exported.name, offered)
            measured.append(compared_figures(report, _entries(journal), offered))
    bases = measured[::2]
    yield from rows_of(bases[0], at=f"{' with '.join(BASE)}/")
    for pair, found, around in zip(pairs, measured[1::2], pairwise(bases), strict=True):
        yield from rows_of({**found, "to_base": ratios(found, around)}, at=f"{' with '.join(pair)}/")
    yield from rows_of(ratios(bases[-1], bases[:1]), at="drift/")


def compared_figures(report: Report, entries: list[dict], offered: Arrivals) -> dict[str, float]:
    """`on_time` is what the client saw. `utility` is read from the server's journal."""
    started = [entry for entry in entries if "request" in entry and 0 < entry["started"] <= entry["deadline"]]
    return {
        "texts_per_s": report.req_per_s,
        "on_time": float(report.in_time(offered.allowed_ns / 1e9).sum()) / len(offered),
        "utility": sum(1 / entry["tokens"] for entry in started) / float((1 / offered.tokens).sum()),
    }


def ratios(pair: dict[str, float], bases: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Returns the figures of a pair over the mean of the bases."""
    means = {name: sum(base[name] for base in bases) / len(bases) for name in pair}
    return {name: pair[name] / mean if mean else None for name, mean in means.items()}


def _entries(journal: Path) -> list[dict]:
    return [json.loads(line) for line in journal.read_text("utf-8").splitlines()]

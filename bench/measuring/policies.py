"""Sends the same overload to servers with different policies and packings, and compares what they answer.

Every pair is measured between two measurements of first come, first served with the packing `packed`, because machines drift.
A closed loop on the first of these sets the rate and the deadlines of all. A text's utility is 1 / length, as in TCB, if it was
started by its deadline; that is read from the server's journal. On time is what the client saw.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path

import numpy as np

from bench.measuring.overload import MOST_CONNECTIONS, Offered
from bench.policies import PoliciesBench
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.scheduling.simulation.arrivals import Lengths
from hplm.server import TritonServer
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from testing.random_store import SIZES, random_store, random_tenants, words

MEAN = 20
BASE = ("fcfs", "packed")
TEXTS = 4096  # different texts, sent in turn


@dataclass(frozen=True)
class Texts:
    lengths: np.ndarray
    texts: list[str]

    @classmethod
    def draw(cls, case: PoliciesBench) -> Texts:
        """Draws texts whose words follow Zipf's law. With the two special tokens, they have these lengths."""
        generator = np.random.default_rng(case.seed)
        lengths = Lengths(MEAN, case.variance).draw(TEXTS, generator)
        vocabulary = words(SIZES[case.size].vocabulary)
        weights = 1 / np.arange(1, len(vocabulary) + 1)
        drawn = generator.choice(len(vocabulary), int(lengths.sum()), p=weights / weights.sum())
        parts = np.split(drawn, np.cumsum(lengths)[:-1])
        return cls(lengths, [" ".join(vocabulary[number] for number in part[2:]) for part in parts])

    def requests(self, backbone: str, tenants: int, deadlines: np.ndarray | None = None) -> list[bytes]:
        width, count = len(str(tenants - 1)), len(self.texts) if deadlines is None else len(deadlines)
        timeouts = [{}] * count if deadlines is None else [{"timeout": round(float(one) * 1e6)} for one in deadlines]
        return [
            infer_request(
                backbone,
                [self.texts[i % len(self.texts)]],
                f"tenant-{i % tenants:0{width}d}",
                outputs=("LABEL",),
                parameters=timeout,
            )
            for i, timeout in enumerate(timeouts)
        ]

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        return self.lengths[numbers % len(self.lengths)]


def bench_policies(case: PoliciesBench) -> dict:
    others = [pair for pair in product(case.policies, case.packings) if pair != BASE]
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        served = Served(case, Path(folder))
        measured = [served.measure(*pair) for pair in chain([BASE], *([pair, BASE] for pair in others))]
    bases = measured[::2]
    return {
        "base": bases,
        "pairs": [
            pair | {"to_base": ratios(pair, around)} for pair, *around in zip(measured[1::2], bases, bases[1:], strict=False)
        ],
        "drift": ratios(bases[-1], bases[:1]),
        "case": asdict(case),
    }


class Served:
    """One store, served with a pair of policy and packing after the other."""

    def __init__(self, case: PoliciesBench, folder: Path) -> None:
        self._case = case
        self._folder = folder
        self._store = random_store(folder / "store", SIZES[case.size], random_tenants(case.tenants, 32, 4))
        self._texts = Texts.draw(case)
        self._offered: Offered | None = None

    def measure(self, policy: str, packing: str) -> dict:
        print(f"{policy} with {packing}", file=sys.stderr, flush=True)
        journal = self._folder / "journal.jsonl"
        journal.unlink(missing_ok=True)
        tenants, repository = self._case.tenants, self._folder / "repository"
        backbone = _export(self._store, repository, self._case, policy, packing, journal)
        with TritonServer(repository) as server:
            warmed = _warm(server, self._texts.requests(backbone, tenants), self._case)
            offered = self._offered = self._offered or _offer(self._case, warmed)
            report = _overload(server, self._texts.requests(backbone, tenants, offered.deadlines), offered)
        entries = [json.loads(line) for line in journal.read_text("utf-8").splitlines()]
        lengths = self._texts.lengths_of(np.arange(len(offered.arrivals)))
        return {"policy": policy, "packing": packing} | figures(report, entries, offered, lengths)


def figures(report: Report, entries: list[dict], offered: Offered, lengths: np.ndarray) -> dict[str, float]:
    served = report.statuses == 200
    on_time = served & (report.latencies <= offered.deadlines[report.numbers])
    started = [entry for entry in entries if "request" in entry and 0 < entry["started"] <= entry["deadline"]]
    return {
        "texts_per_s": round(report.req_per_s, 2),
        "on_time": round(float(on_time.sum()) / len(lengths), 4),
        "utility": round(sum(1 / entry["tokens"] for entry in started) / float((1 / lengths).sum()), 4),
    }


def ratios(pair: dict, bases: Sequence[dict]) -> dict[str, float | None]:
    """Returns the figures of a pair over the mean of the others."""
    means = {name: sum(base[name] for base in bases) / len(bases) for name in ("texts_per_s", "on_time", "utility")}
    return {name: round(pair[name] / mean, 3) if mean else None for name, mean in means.items()}


def _export(store: Store, repository: Path, case: PoliciesBench, policy: str, packing: str, journal: Path) -> str:
    options = ServingOptions(
        dtype=case.dtype,
        policy=policy,
        packing=packing,
        admission=False,
        slots=max(2, 2 * case.tenants),
        batch_tokens=case.batch_tokens,
        batch_ms="0",
        journal=str(journal),
    )
    return export(store, repository, options).backbone


def _warm(server: TritonServer, requests: list[bytes], case: PoliciesBench) -> Report:
    """Warms a server up by a closed loop, then measures another one."""
    host, port = server.http_url.split(":")
    connections = 4 * case.batch_tokens // MEAN
    send(Load(host, int(port), requests, seconds=case.seconds / 8, connections=connections))
    return send(Load(host, int(port), requests, seconds=case.seconds / 4, connections=connections))[0]


def _offer(case: PoliciesBench, warmed: Report) -> Offered:
    """Draws the requests for all pairs, at a multiple of the rate of the closed loop."""
    warmed.expect_success("the capacity", "give --seconds more, or the command again")
    capacity, generator = warmed.req_per_s, np.random.default_rng(case.seed)
    count = round(case.seconds * case.overload * capacity)
    batch = case.batch_tokens / MEAN / capacity
    return Offered(
        np.cumsum(generator.exponential(1 / (case.overload * capacity), count)),
        generator.uniform(case.deadlines[0] * batch, case.deadlines[1] * batch, count),
    )


def _overload(server: TritonServer, requests: list[bytes], offered: Offered) -> Report:
    host, port = server.http_url.split(":")
    seconds = float(offered.arrivals[-1]) + 1.0
    load = Load(host, int(port), requests, seconds=seconds, connections=MOST_CONNECTIONS, arrivals=offered.arrivals)
    return send(load)[0]


def table_of(found: dict) -> str:
    lines = [f"{'policy':>28} {'packing':>9} {'texts/s':>9} {'on time':>8} {'utility':>8}   to {' with '.join(BASE)}"]
    for pair in (found["base"][0], *found["pairs"]):
        lines.append(
            f"{pair['policy']:>28} {pair['packing']:>9} {pair['texts_per_s']:>9.1f} {pair['on_time']:>8.3f} "
            f"{pair['utility']:>8.3f}   {_shown(pair.get('to_base', {}))}"
        )
    lines.append(f"{' with '.join(BASE)} at the end, over its first measurement: {_shown(found['drift'])}")
    return "\n".join(lines)


def _shown(found: dict[str, float | None]) -> str:
    return "  ".join("none" if ratio is None else f"{ratio:.2f}" for ratio in found.values())

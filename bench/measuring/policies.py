"""Sends the same overload to servers with different policies and packings, and compares what they answer.

The first pair is first come, first served with the packing `packed`. A closed loop on it measures the capacity, which sets the
rate and the deadlines. It is measured again at the end, because machines drift. A text's utility is 1 / length, as in TCB, if
it was started by its deadline; that is read from the server's journal. On time is what the client saw.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
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
from loadtest.generator import run_apart
from loadtest.report import Load, Report
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
    texts, offered, pairs = Texts.draw(case), None, []
    others = [pair for pair in product(case.policies, case.packings) if pair != BASE]
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        store = random_store(Path(folder) / "store", SIZES[case.size], random_tenants(case.tenants, 32, 4))
        for number, (policy, packing) in enumerate([BASE, *others, BASE]):
            print(f"{policy} with {packing}", file=sys.stderr, flush=True)
            journal = Path(folder) / f"journal-{number}.jsonl"
            backbone = _export(store, Path(folder) / "repository", case, policy, packing, journal)
            with TritonServer(Path(folder) / "repository") as server:
                capacity = _capacity(server, texts.requests(backbone, case.tenants), case)
                offered = offered or _offer(case, capacity)
                report = _overload(server, texts.requests(backbone, case.tenants, offered.deadlines), offered)
            started = [json.loads(line) for line in journal.read_text("utf-8").splitlines()]
            pairs.append({"policy": policy, "packing": packing, "capacity": round(capacity, 1)} | figures(
                report, started, offered, texts.lengths_of(np.arange(len(offered.arrivals)))
            ))  # fmt: skip
    *measured, again = pairs
    return {
        "pairs": [pair | {"to_base": ratios(pair, measured[0])} for pair in measured],
        "drift": ratios(again, measured[0]),
        "case": asdict(case),
    }


def figures(report: Report, entries: list[dict], offered: Offered, lengths: np.ndarray) -> dict[str, float]:
    served = report.statuses == 200
    on_time = served & (report.latencies <= offered.deadlines[report.numbers])
    started = [entry for entry in entries if "request" in entry and 0 < entry["started"] <= entry["deadline"]]
    return {
        "texts_per_s": round(report.req_per_s, 2),
        "on_time": round(float(on_time.sum()) / len(lengths), 4),
        "utility": round(sum(1 / entry["tokens"] for entry in started) / float((1 / lengths).sum()), 4),
    }


def ratios(pair: dict, base: dict) -> dict[str, float]:
    return {name: round(pair[name] / base[name], 3) for name in ("texts_per_s", "on_time", "utility")}


def _export(store: Store, repository: Path, case: PoliciesBench, policy: str, packing: str, journal: Path) -> str:
    options = ServingOptions(
        dtype=case.dtype,
        policy=policy,
        packing=packing,
        admission=False,
        slots=max(2, 2 * case.tenants),
        batch_tokens=case.batch_tokens,
        journal=str(journal),
    )
    return export(store, repository, options).backbone


def _capacity(server: TritonServer, requests: list[bytes], case: PoliciesBench) -> float:
    """Returns the texts a second of a closed loop. The loop warms the server up as well."""
    host, port = server.http_url.split(":")
    connections = 4 * case.batch_tokens // MEAN
    for seconds in (case.seconds / 8, case.seconds / 4):
        report = run_apart(Load(host, int(port), requests, seconds=seconds, connections=connections))
    report.expect_success("the capacity")
    return report.req_per_s


def _offer(case: PoliciesBench, capacity: float) -> Offered:
    generator = np.random.default_rng(case.seed)
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
    return run_apart(load)


def table_of(found: dict) -> str:
    lines = [f"{'policy':>28} {'packing':>9} {'texts/s':>9} {'on time':>8} {'utility':>8}   to {' + '.join(BASE)}"]
    for pair in found["pairs"]:
        to = "  ".join(f"{ratio:.2f}" for ratio in pair["to_base"].values())
        lines.append(
            f"{pair['policy']:>28} {pair['packing']:>9} {pair['texts_per_s']:>9.1f} {pair['on_time']:>8.3f} "
            f"{pair['utility']:>8.3f}   {to}"
        )
    lines.append("the first pair again, over its first measurement: " + "  ".join(f"{r:.2f}" for r in found["drift"].values()))
    return "\n".join(lines)

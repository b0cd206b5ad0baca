"""Measures how the router spreads tenants over replicas: adapters brought, the busiest replica, and limits."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from bench.cluster_material import Material, say
from bench.cluster_traffic import requests_of, sent
from hplm.cluster.router import CONFIG, SOCKET, start_command
from hplm.errors import HplmError
from hplm.placement.workload import power_law
from hplm.server.ports import LOOPBACK, listen
from loadtest.generator import Load
from loadtest.server import ServedCluster
from loadtest.server_count import PUBLISHED_AFTER

REQUESTS = 4096  # different ones
TIMES_THE_LIMIT = 3
BURST_S = 0.1  # of the rate: what may come at once, so that a pause of the machine costs little of the limit
ROUTER_SECONDS = 30.0
_MISSES = re.compile(r"^hplm_slot_misses_total\{.*\} (\S+)$", re.MULTILINE)


def spread_figures(cluster: ServedCluster, material: Material) -> dict[str, float]:
    """The same requests go through the router, and through one that takes the replicas in turn. Tenants follow Zipf's law."""
    case = material.case
    share = power_law(len(material.tenants), 1.0)
    chosen = np.random.default_rng(3).choice(len(material.tenants), REQUESTS, p=share)
    requests = [material.request(number, material.tenants[tenant]) for number, tenant in enumerate(chosen.tolist())]

    def answered(address: str, seconds: float) -> int:
        report = sent(address, Load("", 0, requests, seconds=seconds, connections=case.connections))
        report.expect_success("tenants on replicas")
        return report.succeeded

    def brought(address: str) -> float:
        """Returns the adapters and heads brought to a device, for each request."""
        answered(address, case.seconds / 4)
        before = _misses(cluster)
        count = answered(address, case.seconds)
        return (_misses(cluster) - before) / count

    hashed, turned, busiest = [], [], []
    with round_robin(cluster) as other:
        for turn in range(case.rounds):
            say(f"tenants on replicas, round {turn + 1} of {case.rounds}")
            before = requests_of(cluster)
            hashed.append(brought(cluster.address))
            counts = np.array([count - before[name] for name, count in requests_of(cluster).items()])
            busiest.append(float(counts.max() / counts.mean()))
            turned.append(brought(other))
    return {
        "hash_over_round_robin": round(float(np.median(hashed) / np.median(turned)), 3),
        "hash_brought_per_request": round(float(np.median(hashed)), 4),
        "round_robin_brought_per_request": round(float(np.median(turned)), 4),
        "busiest_over_mean": round(float(np.median(busiest)), 3),
    }


def limit_figures(cluster: ServedCluster, material: Material) -> dict[str, float]:
    """Sends several times what a tenant may send, to a tenant with one home and to one whose limit all replicas share."""
    case = material.case
    manager = cluster.manager()
    figures: dict[str, float] = {}
    for homes, tenant in ((1, material.tenants[0]), (len(cluster.replicas), material.tenants[1])):
        say(f"a limit of {case.rate:g} requests a second over {homes} of {len(cluster.replicas)} replicas")
        manager.limit(tenant, rate=case.rate, burst=BURST_S * case.rate, homes=homes)
        manager.settle_now()
        time.sleep(PUBLISHED_AFTER)  # for the router, which follows too
        asked = [material.request(0, tenant)]
        load = Load("", 0, asked, seconds=case.seconds, rate=TIMES_THE_LIMIT * case.rate, connections=case.connections)
        admitted = sent(cluster.address, load).succeeded
        figures[f"limit_ratio_{homes}_homes"] = round(admitted / (case.rate * case.seconds), 3)
    return {"limit_ratio": max(figures.values()), "limit_least": min(figures.values()), **figures}


@contextmanager
def round_robin(cluster: ServedCluster) -> Generator[str]:
    """Runs a second router before the same replicas, which takes them in turn. Yields its address."""
    with listen(LOOPBACK, 0, "") as free:
        port = free.getsockname()[1]
    source, folder = cluster.folder / "router", cluster.folder / "turns"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(SOCKET), dirs_exist_ok=True)
    config = (folder / CONFIG).read_text("utf-8").replace(str(source.resolve()), str(folder.resolve()))
    (folder / CONFIG).write_text(in_turn(config).replace(f"bind {cluster.address}", f"bind {LOOPBACK}:{port}"), "utf-8")
    with subprocess.Popen(start_command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as router:
        try:
            _until_ready(f"{LOOPBACK}:{port}")
            yield f"{LOOPBACK}:{port}"
        finally:
            router.terminate()


def in_turn(config: str) -> str:
    """Returns HAProxy's file for a router that takes the replicas in turn."""
    config = re.sub(r"^    balance hash .*$", "    balance roundrobin", config, flags=re.MULTILINE)
    return re.sub(r"^    hash-.*\n", "", config, flags=re.MULTILINE)


def _until_ready(address: str) -> None:
    until = time.monotonic() + ROUTER_SECONDS
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=1):
                time.sleep(2)  # for the checks of all replicas
                return
        except OSError:
            time.sleep(0.1)
    raise HplmError(f"the router that takes replicas in turn does not answer at {address}")


def _misses(cluster: ServedCluster) -> float:
    time.sleep(PUBLISHED_AFTER)
    total = 0.0
    for address in cluster.metrics.values():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            total += sum(map(float, _MISSES.findall(answer.read().decode())))
    return total

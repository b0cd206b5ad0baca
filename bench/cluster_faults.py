"""Kills a replica under load, and replaces all replicas under load: what clients see of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from bench.cluster_material import Material, say
from hplm.errors import HplmError
from hplm_client import HplmClient, HplmClientError
from loadtest.chaos.history import FAILED, OK, UNANSWERED, WRONG, History, expected_answers
from loadtest.server import ServedCluster

CLIENTS = 16
TENANTS = 8
CALM = 2.0  # seconds of load before and after
BACK_SECONDS = 180.0
LOOK = 0.02


def kill_figures(cluster: ServedCluster, material: Material) -> dict[str, Any]:
    """Every answer is compared with that of an unharmed replica. `reroute_s`: from the kill to the last failure."""
    say("kill -9 of a replica under load")
    replicas = cluster.replicas
    victim = next(iter(replicas))
    expected = expected_answers(replicas[victim], material.backbone, material.questions(TENANTS))
    history = History(cluster.address, [material.backbone], expected, CLIENTS)
    try:
        time.sleep(CALM)
        before = history.counts()
        killed = time.monotonic()
        watched = Watched(history, killed)
        processes = cluster.kill(victim)
        watched.for_seconds(CALM)
        while not cluster.is_back(victim, processes) and time.monotonic() < killed + BACK_SECONDS:
            watched.for_seconds(CALM / 4)
        back = time.monotonic()
        if back >= killed + BACK_SECONDS:
            raise HplmError(f"{victim} was not started again within {BACK_SECONDS:g} s: read its log")
        watched.for_seconds(CALM)
    finally:
        history.stop()
    counts = history.counts()
    return {
        "kill_unanswered": counts[UNANSWERED],
        "kill_closed": counts[FAILED],  # HAProxy closes a connection that is not new, instead of an answer 502
        "kill_wrong": counts[WRONG],
        "kill_failed": _failures(counts) - _failures(before),
        "kill_requests": counts.total(),
        "reroute_s": round(watched.last_failure - killed, 2),
        "back_s": round(back - killed, 1),
        "kill_reasons": history.reasons(),
    }


class Watched:
    """Notes when the last request failed."""

    def __init__(self, history: History, since: float) -> None:
        self.last_failure = since
        self._history = history
        self._failed = _failures(history.counts())

    def for_seconds(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if (failed := _failures(self._history.counts())) > self._failed:
                self._failed, self.last_failure = failed, now
            time.sleep(LOOK)


def roll_figures(cluster: ServedCluster, material: Material) -> dict[str, Any]:
    """Counts the requests of `hplm_client` that fail although it retries, while all replicas are replaced."""
    say("all replicas are replaced under load")
    asking = Asking(cluster.address, material)
    try:
        time.sleep(CALM)
        cluster.roll(say)
        time.sleep(CALM)
    finally:
        asking.stop()
    return {
        "roll_failures": sum(asking.failures.values()),
        "roll_requests": asking.answered,
        "roll_reasons": dict(asking.failures),
    }


class Asking:
    """Clients that ask without a pause until they are stopped."""

    def __init__(self, address: str, material: Material) -> None:
        self.answered = 0
        self.failures: Counter[str] = Counter()
        self._address, self._material = address, material
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, number: int) -> None:
        tenants, texts = self._material.tenants[:TENANTS], self._material.texts
        with HplmClient(self._address, backbone=self._material.backbone) as client:
            while not self._ending.is_set():
                number += 1
                try:
                    client.infer(texts[number % len(texts)], tenant=tenants[number % len(tenants)])
                except HplmClientError as error:
                    with self._lock:
                        self.failures[type(error).__name__] += 1
                else:
                    with self._lock:
                        self.answered += 1


def _failures(counts: Counter[str]) -> int:
    return counts.total() - counts[OK]

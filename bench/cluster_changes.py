"""Changes tenants while all replicas are asked: how soon new ones answer everywhere, and deleted ones no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.cluster_material import TRAVELLER, Material, say
from builder.publish.live import add_domain, add_tenant
from hplm.errors import HplmError
from hplm_client import HplmClient, HplmClientError
from loadtest.server import ServedCluster

PATIENCE = 60.0
PAUSE = 0.01  # between two requests of a poller
AFTER = 0.5  # seconds that a deleted tenant is asked for


class Poller:
    """Asks one replica for a tenant again and again, and notes when the answers change."""

    def __init__(self, address: str, backbone: str, tenant: str, text: str, key: str | None = None) -> None:
        self.answers: list[tuple[float, float, bool]] = []  # when asked, when answered, and whether with an answer
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, args=(address, backbone, tenant, text, key), daemon=True)
        self._thread.start()

    def first(self, good: bool, since: float) -> float:
        """Returns when the first such answer to a request after `since` came. Waits for it."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for asked, answered, was in self.answers:
                if asked >= since and was == good:
                    return answered
            time.sleep(PAUSE)
        raise HplmError(f"a replica has not taken a change within {PATIENCE:g} s: read the logs of its follower")

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def _ask_on(self, address: str, backbone: str, tenant: str, text: str, key: str | None) -> None:
        with HplmClient(address, backbone=backbone, api_key=key, retries=0) as client:
            while not self._ending.is_set():
                asked = time.monotonic()
                try:
                    client.infer(text, tenant=tenant)
                    is_good = True
                except HplmClientError:
                    is_good = False
                self.answers.append((asked, time.monotonic(), is_good))
                time.sleep(PAUSE)


def change_figures(cluster: ServedCluster, material: Material) -> dict[str, Any]:
    """`add_p99_s`: from the beginning of `tenant add` until every replica has answered the tenant."""
    say(f"{len(material.guests)} tenants come and go")
    manager = cluster.manager()
    took: list[float] = []
    deletes: list[float] = []
    after = 0
    for guest in material.guests:
        pollers = _pollers(cluster, material, guest)
        began = time.monotonic()
        manager.settle(add_tenant(manager, material.store, guest).generation)
        took.append(max(poller.first(True, began) for poller in pollers) - began)
        began = time.monotonic()
        manager.settle(manager.delete(guest).generation, removes=True)
        returned = time.monotonic()
        deletes.append(returned - began)
        time.sleep(AFTER)
        for poller in pollers:
            poller.stop()
        after += sum(is_good for poller in pollers for asked, _, is_good in poller.answers if asked >= returned)
    return {
        "add_p50_s": round(float(np.percentile(took, 50)), 3),
        "add_p99_s": round(float(np.percentile(took, 99)), 3),
        "delete_p50_s": round(float(np.percentile(deletes, 50)), 3),
        "after_delete": after,
    }


def revoke_figures(cluster: ServedCluster, material: Material) -> dict[str, Any]:
    """Revokes a key as soon as a large table is published, which all replicas then fetch."""
    material.make_traveller()
    manager, tenant = cluster.manager(), material.tenants[-1]
    manager.add_key(tenant)  # a last one cannot be revoked
    secret, key = manager.add_key(tenant)
    manager.settle_now()
    pollers = _pollers(cluster, material, tenant, secret)
    for poller in pollers:
        poller.first(True, time.monotonic())
    say("a key is revoked while the table travels")
    try:
        add_domain(manager, material.store, TRAVELLER)
        began = time.monotonic()
        manager.revoke_key(tenant, key.id)
        refused = max(poller.first(False, began) for poller in pollers)
        travels = [name for name in cluster.replicas if not _has_table(cluster, material, name)]
        until = time.monotonic() + 600
        while not all(_has_table(cluster, material, name) for name in cluster.replicas) and time.monotonic() < until:
            time.sleep(PAUSE)
        arrived = time.monotonic()
    finally:
        for poller in pollers:
            poller.stop()
    return {
        "revoke_s": round(refused - began, 3),
        "revoked_while_travelling": len(travels),  # replicas that had not the whole table yet
        "table_travelled_s": round(arrived - began, 1),
    }


def _pollers(cluster: ServedCluster, material: Material, tenant: str, key: str | None = None) -> Sequence[Poller]:
    return [Poller(address, material.backbone, tenant, material.texts[0], key) for address in cluster.replicas.values()]


def _has_table(cluster: ServedCluster, material: Material, replica: str) -> bool:
    return (cluster.folder / replica / material.backbone / "plot" / TRAVELLER / "1").is_dir()

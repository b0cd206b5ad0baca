"""Measures how a noisy tenant changes another tenant's latency, and how a quota helps.

    python -m loadtest.noisy_neighbour --repository model_repository --backbone minilm \\
        --quiet stdlib-area --noisy maths-parameters

The quiet tenant sends a few requests a second. The noisy one sends as many as the server takes, from many connections. Measured
are the quiet one alone, both together, and both with a quota for the noisy one, which is written into a copy of the repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from hplm.server import TritonServer
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send

QUIET_RATE = 20.0  # requests a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, required=True, help="model repository to serve")
    parser.add_argument("--backbone", required=True, help="name of the backbone")
    parser.add_argument("--model", help="model that gets the requests, such as hplm (default: the backbone)")
    parser.add_argument("--quiet", required=True, metavar="TENANT", help="tenant that sends a few requests")
    parser.add_argument("--noisy", required=True, metavar="TENANT", help="tenant that sends many requests")
    parser.add_argument("--text", default="the quick brown fox jumps over the lazy dog", help="text of all requests")
    parser.add_argument("--connections", type=int, default=64, help="connections of the noisy tenant (default: 64)")
    parser.add_argument(
        "--noisy-rate", type=float, help="requests a second of the noisy tenant (default: as many as its connections take)"
    )
    parser.add_argument("--in-flight", type=int, default=2, help="quota: requests in flight of the noisy tenant (default: 2)")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="quota: requests a second of the noisy tenant (default: no limit)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each measurement (default: 5)")
    args = parser.parse_args()
    print(json.dumps(measure(args)))


def measure(args: argparse.Namespace) -> dict[str, dict]:
    measured = {}
    with TritonServer(args.repository) as server:
        measured["alone"] = _together(server, args, 0)
        measured["no_quota"] = _together(server, args, args.connections)
    with tempfile.TemporaryDirectory() as folder:
        limited = Path(folder) / "repository"
        shutil.copytree(args.repository, limited)
        path = limited / args.backbone / "1" / "tenants.json"
        stored = Snapshot.load(path)
        quota = {"in_flight": args.in_flight, "rate": args.rate}
        tenants = [replace(tenant, **quota) if tenant.id == args.noisy else tenant for tenant in stored.tenants]
        Snapshot(stored.generation, stored.branches, tenants, stored.export).save(path)
        with TritonServer(limited) as server:
            measured["quota"] = _together(server, args, args.connections)
    return measured


def _together(server: TritonServer, args: argparse.Namespace, noisy_connections: int) -> dict:
    host, _, port = server.http_url.rpartition(":")

    def load(tenant: str, connections: int, rate: float | None) -> Load:
        request = infer_request(args.model or args.backbone, [args.text], tenant)
        return Load(host, int(port), [request], connections=connections, seconds=args.seconds, rate=rate)

    loads = {"quiet": load(args.quiet, 8, QUIET_RATE)}
    if noisy_connections:
        loads["noisy"] = load(args.noisy, noisy_connections, args.noisy_rate)
    return {who: _said(report) for who, report in zip(loads, send(*loads.values()), strict=True)}


def _said(report: Report) -> dict:
    served = report.latencies[report.statuses == 200] * 1000
    times = {f"p{q}_ms": round(float(np.percentile(served, q)), 2) for q in (50, 99)} if len(served) else {}
    return {"served_per_s": round(len(served) / report.wall_s, 1), **times, "statuses": report.by_status}


if __name__ == "__main__":
    main()

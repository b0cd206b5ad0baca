"""What a noisy tenant does to another's latency, and what a quota does about it.

    python -m loadtest.noisy_neighbour --repository model_repository --backbone minilm --quiet acme --noisy beta

The quiet one sends a few requests a second; the noisy one sends all the server takes, from many connections. The quiet one
alone, both together, and both with the noisy one under a quota, which is written into a copy of the repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from hplm.server import TritonServer
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from loadtest.generator import run_apart
from loadtest.report import Load, Report

QUIET_RATE = 20.0  # requests a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--model", help="asked instead of the backbone, such as hplm")
    parser.add_argument("--quiet", required=True, metavar="TENANT")
    parser.add_argument("--noisy", required=True, metavar="TENANT")
    parser.add_argument("--text", default="the quick brown fox jumps over the lazy dog")
    parser.add_argument("--connections", type=int, default=64, help="of the noisy one (default: 64)")
    parser.add_argument("--noisy-rate", type=float, help="what it sends a second (default: all that its connections take)")
    parser.add_argument("--in-flight", type=int, default=2, help="the noisy one's quota (default: 2)")
    parser.add_argument("--rate", type=float, default=0.0, help="its quota in requests a second (default: none)")
    parser.add_argument("--seconds", type=float, default=5.0)
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
    reports: dict[str, Report] = {}

    def send(who: str, tenant: str, connections: int, rate: float | None) -> None:
        host, _, port = server.http_url.rpartition(":")
        request = infer_request(args.model or args.backbone, [args.text], tenant)
        reports[who] = run_apart(Load(host, int(port), [request], connections=connections, seconds=args.seconds, rate=rate))

    senders = [threading.Thread(target=send, args=("quiet", args.quiet, 8, QUIET_RATE))]
    if noisy_connections:
        senders.append(threading.Thread(target=send, args=("noisy", args.noisy, noisy_connections, args.noisy_rate)))
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    return {who: _said(report) for who, report in reports.items()}


def _said(report: Report) -> dict:
    served = report.latencies[report.statuses == 200] * 1000
    times = {f"p{q}_ms": round(float(np.percentile(served, q)), 2) for q in (50, 99)} if len(served) else {}
    return {"served_per_s": round(len(served) / report.wall_s, 1), **times, "statuses": report.by_status}


if __name__ == "__main__":
    main()

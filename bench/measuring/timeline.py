"""Records what the threads of a loaded server do, batch by batch (HMI, Fig. 17), from its journal."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.measuring.serve import tenant_requests, texts_of
from bench.serve import ServeBench
from bench.timeline import TimelineBench
from bench.tools.thread_spans import Span, read_journal
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError
from hplm.server import TritonServer
from loadtest.load import Load, send
from testing.random_store import SIZES, random_store, random_tenants


def bench_timeline(case: TimelineBench) -> list[Span]:
    serve = ServeBench(case.size, case.tokens, case.tenants, case.seconds, 3 * case.batch_texts, case.dtype)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch:
        repository, journal = Path(scratch) / "repository", Path(scratch) / "journal.jsonl"
        store = random_store(Path(scratch) / "store", SIZES[case.size], random_tenants(case.tenants, serve.rank, 4))
        batch_tokens = max(case.batch_texts * case.tokens, SIZES[case.size].positions)
        options = ServingOptions(dtype=case.dtype, slots=case.slots, batch_tokens=batch_tokens, journal=str(journal))
        backbone = export(store, repository, options).backbone
        requests = tenant_requests(backbone, texts_of(serve), serve)
        with TritonServer(repository) as server:
            host, port = server.http_url.split(":")
            (report,) = send(Load(host, int(port), requests, seconds=case.seconds, connections=serve.connections))
        if not report.succeeded:
            raise HplmError(f"the server answered no request of the benchmark: {report.summary()}")
        return read_journal(journal)

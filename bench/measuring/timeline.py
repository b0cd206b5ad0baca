"""What the threads of a loaded pipeline do, batch by batch (HMI, Fig. 17), from the journal of a real server:

python -m bench.measuring.timeline --results results        leaves timeline.json there, for `research.comparison.figures`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from bench.measuring.serve import SIZES, Case, _requests, texts_of
from bench.tools.thread_spans import Span, read_journal
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError
from hplm.server import TritonServer
from loadtest.generator import run_apart
from loadtest.report import Load
from testing.random_store import random_store, random_tenants


@dataclass(frozen=True)
class Timeline:
    size: str = "minilm"
    tokens: int = 128
    batch_texts: int = 8
    tenants: int = 64
    slots: int = 32  # fewer than tenants, so that adapters have to be brought
    seconds: float = 5.0
    dtype: str = "auto"


def bench_timeline(case: Timeline) -> list[Span]:
    serve = Case(case.size, case.tokens, case.tenants, case.seconds, 3 * case.batch_texts, case.dtype)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch:
        repository, journal = Path(scratch) / "repository", Path(scratch) / "journal.jsonl"
        store = random_store(Path(scratch) / "store", SIZES[case.size], random_tenants(case.tenants, serve.rank, 4))
        batch_tokens = max(case.batch_texts * case.tokens, SIZES[case.size].positions)
        options = ServingOptions(dtype=case.dtype, slots=case.slots, batch_tokens=batch_tokens, journal=str(journal))
        backbone = export(store, repository, options).backbone
        requests = _requests(backbone, texts_of(serve), serve)
        with TritonServer(repository) as server:
            host, port = server.http_url.split(":")
            report = run_apart(Load(host, int(port), requests, seconds=case.seconds, connections=serve.connections))
        if not report.succeeded:
            raise HplmError(f"the server answered no request of the benchmark: {report.summary()}")
        return read_journal(journal)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.measuring.timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=tuple(SIZES), default=Timeline.size, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=Timeline.tokens, help="of a text (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=Timeline.seconds, help="of load (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        spans = bench_timeline(Timeline(given.size, given.tokens, seconds=given.seconds))
    except HplmError as error:
        sys.exit(str(error))
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / "timeline.json"
    path.write_text(json.dumps([astuple(span) for span in spans]) + "\n", "utf-8")
    print(f"{path}: {len(spans)} spans")


if __name__ == "__main__":
    main()

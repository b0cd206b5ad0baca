"""`hplm bench timeline`: what the threads of a loaded server do, batch by batch (HMI, Fig. 17), as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.rows import EngineDtype, Positive, Row, Rows, Size, Whole, benchmark, expect_text
from bench.server import random_export, requests_of, texts_of
from builder.publish.model_configs import ServingOptions
from hplm.server import TritonServer
from loadtest.load import Load, send
from testing.random_store import SIZES

THREADS = {"prepare": "staging", "swap": "staging", "retrieve": "staging", "compute": "engine"}  # by stage of a batch
MICRO = 1e6


@benchmark(size="toy", tokens=16, seconds=0.5)
def timeline(
    *,
    size: Size = "minilm",
    tokens: Whole = 128,
    batch_texts: Whole = 8,
    tenants: Whole = 64,
    slots: Whole = 32,
    seconds: Positive = 5.0,
    dtype: EngineDtype = "auto",
    to: Path = Path("timeline.json"),
) -> Rows:
    """Loads a real server that has more tenants than slots, and writes the times of each thread from its journal.

    ui.perfetto.dev and chrome://tracing open the file. `overlap` is the share of staging that was hidden behind computing.

    :param size: of the model
    :param tokens: of a text
    :param batch_texts: of a batch; more for short texts, because a batch must hold the longest text
    :param tenants: more than slots, so that adapters have to be copied to the device
    :param slots: for adapters on the device
    :param seconds: of load
    :param dtype: precision of the engine
    :param to: file to write
    """
    expect_text(tokens, size)
    texts = texts_of(SIZES[size], [tokens] * 12 * batch_texts)
    with TemporaryDirectory(prefix="hplm-bench-") as scratch:
        journal = Path(scratch) / "journal.jsonl"
        batch_tokens = max(batch_texts * tokens, SIZES[size].positions)
        options = ServingOptions(dtype=dtype, slots=slots, batch_tokens=batch_tokens, journal=str(journal))
        with random_export(SIZES[size], tenants, options) as folder, TritonServer(folder.parent) as server:
            host, port = server.http_url.split(":")
            requests = requests_of(folder.name, texts, tenants)
            (report,) = send(Load(host, int(port), requests, seconds=seconds, connections=3 * batch_texts))
        report.expect_success("the load")
        events = trace_of(journal)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", "utf-8")
    spans = [event for event in events if event["ph"] == "X"]
    computing = [(event["ts"], event["ts"] + event["dur"]) for event in spans if event["cat"] == "engine"]
    staging = [(event["ts"], event["ts"] + event["dur"]) for event in spans if event["cat"] == "staging"]
    hidden = sum(max(0.0, min(end, until) - max(start, since)) for start, end in staging for since, until in computing)
    yield Row("file", str(to))
    yield Row("spans", len(spans))
    yield Row("overlap", hidden / max(1e-9, sum(end - start for start, end in staging)))


def trace_of(journal: Path) -> list[dict]:
    """Reads the file of the parameter `journal`: batches and their answers. Returns the events of a Chrome trace."""
    spans: list[tuple[str, str, float, float]] = []  # thread, name, and seconds
    answers: dict[int, list[tuple[float, float]]] = {}
    for entry in map(json.loads, journal.read_text("utf-8").splitlines()):
        if "stages" in entry:
            for stage, (start, end) in entry["stages"].items():
                spans.append((THREADS[stage], f"{stage} {entry['batch']}", start, end))
        elif entry.get("computed"):
            answers.setdefault(entry["batch"], []).append((entry["computed"], entry["answered"]))
    for batch, times in answers.items():
        spans.append(("answering", f"answer {batch}", min(start for start, _ in times), max(end for _, end in times)))
    begin = min((start for _, _, start, _ in spans), default=0.0)
    numbers = {thread: number for number, thread in enumerate(dict.fromkeys(THREADS.values()), 1)} | {"answering": 0}
    named = [{"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}} for name, tid in numbers.items()]
    return named + [
        {
            "ph": "X", "pid": 1, "tid": numbers[thread], "name": name, "cat": thread,
            "ts": round((start - begin) * MICRO, 3), "dur": round((end - start) * MICRO, 3),
        }
        for thread, name, start, end in sorted(spans, key=lambda span: span[2])
    ]  # fmt: skip

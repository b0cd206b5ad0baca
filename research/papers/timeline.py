"""`python -m research.papers timeline`: a server's journal as a trace for ui.perfetto.dev (HMI's Fig. 17)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.rows import Row, Rows, benchmark
from hplm.errors import MISFITS, InvalidInput

THREADS = {"prepare": "staging", "swap": "staging", "retrieve": "staging", "compute": "engine"}
MICRO = 1e6


@benchmark()
def timeline(journal: Path, *, to: Path) -> Rows:
    """Writes a server's journal as a trace for chrome://tracing or ui.perfetto.dev (HMI's Fig. 17).

    :param journal: the file of the parameter `journal` of `<backbone>-upper`
    :param to: the file to write
    """
    trace = trace_of(journal)
    to.write_text(json.dumps(trace) + "\n", "utf-8")
    yield Row("events", len(trace["traceEvents"]))


def trace_of(journal: Path) -> dict[str, Any]:
    """Returns the stages of each batch, and the time in which its requests were answered."""
    spans: list[tuple[str, str, float, float]] = []  # thread, name, start and end in seconds
    answers: dict[int, list[float]] = {}
    for number, line in enumerate(journal.read_text("utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            for stage, (start, end) in entry.get("stages", {}).items():
                spans.append((str(THREADS.get(stage, stage)), f"{stage} {entry['batch']}", start, end))
            if entry.get("computed"):
                answers.setdefault(entry["batch"], []).extend((entry["computed"], entry["answered"]))
        except MISFITS as error:
            raise InvalidInput(f"{journal}, line {number}, is no line of a journal: {error!r}") from None
    spans += [("answering", f"answer {batch}", min(times), max(times)) for batch, times in answers.items()]
    if not spans:
        raise InvalidInput(f"{journal} has no batches: send requests to the server first")
    first = min(start for _, _, start, _ in spans)
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(thread for thread, *_ in spans), 1)}
    events = [{"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}} for name, tid in threads.items()]
    for thread, name, start, end in spans:
        times = {"ts": round((start - first) * MICRO, 3), "dur": round((end - start) * MICRO, 3)}
        events.append({"ph": "X", "pid": 1, "tid": threads[thread], "name": name, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}

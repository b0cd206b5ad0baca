"""Timelines of threads: what each thread did, and when. Reads them, and writes them as a trace for Chrome or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import InvalidInput

MICRO = 1e6


@dataclass(frozen=True)
class Span:
    thread: str
    name: str  # its first word is the kind: spans of one kind have one colour
    start: float  # seconds of any clock
    end: float

    @property
    def kind(self) -> str:
        return self.name.split()[0]


def read_spans(path: Path) -> list[Span]:
    """Reads a JSON file: a list of [thread, name, start, end]."""
    try:
        rows = json.loads(path.read_text("utf-8"))
        spans = [Span(str(thread), str(name), float(start), float(end)) for thread, name, start, end in rows]
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{path} is not a list of [thread, name, start, end]: {error}") from None
    if not spans or any(span.end < span.start or not span.name.strip() for span in spans):
        raise InvalidInput(f"{path} is not a timeline: give spans that have a name and end after they start")
    return spans


THREADS = {"prepare": "staging", "swap": "staging", "retrieve": "staging", "compute": "engine"}


def read_journal(path: Path) -> list[Span]:
    """Reads a journal, which `<backbone>-upper` writes to the file of its parameter `journal`: batches and their answers."""
    spans: list[Span] = []
    answers: dict[int, list[tuple[float, float]]] = {}
    for line in path.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if "stages" in entry:
            spans += [
                Span(THREADS[stage], f"{stage} {entry['batch']}", start, end) for stage, (start, end) in entry["stages"].items()
            ]
        elif entry.get("computed"):
            answers.setdefault(entry["batch"], []).append((entry["computed"], entry["answered"]))
    for batch, times in answers.items():
        starts, ends = zip(*times, strict=True)
        spans.append(Span("answering", f"answer {batch}", min(starts), max(ends)))
    return spans


def threads_of(spans: Iterable[Span]) -> list[str]:
    """Returns the threads in the order of their first spans."""
    return list(dict.fromkeys(span.thread for span in sorted(spans, key=lambda span: span.start)))


def chrome_trace(spans: Sequence[Span]) -> dict:
    """Returns the spans in the format that chrome://tracing and ui.perfetto.dev open."""
    begin = min(span.start for span in spans)
    numbers = {thread: number for number, thread in enumerate(threads_of(spans), 1)}
    named = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": thread}}
        for thread, number in numbers.items()
    ]
    done = [
        {
            "ph": "X",
            "pid": 1,
            "tid": numbers[span.thread],
            "name": span.name,
            "cat": span.kind,
            "ts": round((span.start - begin) * MICRO, 3),
            "dur": round((span.end - span.start) * MICRO, 3),
        }
        for span in spans
    ]
    return {"traceEvents": named + done, "displayTimeUnit": "ms"}


def window(spans: Sequence[Span], most: int = 30) -> list[Span]:
    """Returns at most `most` consecutive spans from the middle, where the pipeline is full. A picture cannot show more."""
    ordered = sorted(spans, key=lambda span: span.start)
    first = max(0, (len(ordered) - most) // 2)
    return ordered[first : first + most]

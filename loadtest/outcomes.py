"""Counts the outcomes of requests as a user sees them: answered in time, answered late, refused and why, or failed."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from loadtest.server_count import ServerCount

ON_TIME, LATE, UNSENT, CUT = "on_time", "late", "unsent", "cut"


class NotOnTime(Exception):
    """A failure that Locust shows in its table, with one line for each outcome."""

    def __init__(self, outcome: str, explanation: str) -> None:
        super().__init__(f"[{outcome}] {explanation}")
        self.outcome = outcome


@dataclass
class Outcomes:
    """The outcomes of each scenario. Latency counts from the time a request was due, even if it was sent later."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    latest_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # the longest delay before sending
    server: ServerCount | None = None  # of the same requests

    def add(self, scenario: str, outcome: str, lag_ms: float) -> None:
        self.counts[scenario][outcome] += 1
        self.latest_ms[scenario] = max(self.latest_ms[scenario], lag_ms)

    def clear(self) -> None:
        self.counts.clear()
        self.latest_ms.clear()

    @property
    def in_time(self) -> int:
        return sum(counts[ON_TIME] for counts in self.counts.values())

    def summary(self) -> dict[str, dict]:
        figures = {}
        for scenario, counts in self.counts.items():
            total = counts.total()
            figures[scenario] = {
                "requests": total,
                "on_time": counts[ON_TIME],
                "on_time_share": round(counts[ON_TIME] / total, 4),
                "late": counts[LATE],
                "not_on_time": {name: count for name, count in sorted(counts.items()) if name not in (ON_TIME, LATE)},
                "sender_lag_ms": round(self.latest_ms[scenario], 1),
            }
        return figures

    def table(self) -> str:
        lines = [f"{'scenario':20}{'requests':>10}{'on time':>10}{'late':>8}{'sent late by':>14}  refused or failed"]
        for scenario, one in self.summary().items():
            others = ", ".join(f"{name} {count}" for name, count in one["not_on_time"].items()) or "-"
            lag = f"{one['sender_lag_ms']:.0f} ms"
            lines.append(f"{scenario:20}{one['requests']:>10}{one['on_time_share']:>10.1%}{one['late']:>8}{lag:>14}  {others}")
        return "\n".join(lines)

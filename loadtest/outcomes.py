"""Counts the outcomes of requests as a user sees them: answered in time, answered late, refused and why, or failed."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from html import escape
from typing import Any

from loadtest.monitoring import ServerCount

ON_TIME, LATE, UNSENT, CUT = "on_time", "late", "unsent", "cut"
COLUMNS = {
    "scenario": "Scenario",
    "requests": "Requests",
    "on_time_share": "On time",
    "late": "Late",
    "sent_late_by": "Sent late by",
    "refused_or_failed": "Refused or failed",
}


class NotOnTime(Exception):
    """A failure that Locust shows in its table, with one line for each outcome."""

    def __init__(self, outcome: str, explanation: str) -> None:
        super().__init__(f"[{outcome}] {explanation}")
        self.outcome = outcome


@dataclass
class OutcomeCounts:
    """The outcomes of each scenario. Latency counts from the time a request was due, even if it was sent later."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    latest_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # the longest delay before sending
    server: ServerCount | None = None  # of the same requests
    began: float = field(default_factory=time.time)

    def add(self, scenario: str, outcome: str, lag_ms: float) -> None:
        self.counts[scenario][outcome] += 1
        self.latest_ms[scenario] = max(self.latest_ms[scenario], lag_ms)

    def clear(self) -> None:
        self.counts.clear()
        self.latest_ms.clear()

    @property
    def in_time(self) -> int:
        return sum(counts[ON_TIME] for counts in self.counts.values())

    def summary(self) -> dict[str, dict[str, Any]]:
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

    def rows(self) -> list[dict[str, str]]:
        """Returns a row of `COLUMNS` for each scenario."""
        return [
            {
                "scenario": scenario,
                "requests": str(one["requests"]),
                "on_time_share": f"{one['on_time_share']:.1%}",
                "late": str(one["late"]),
                "sent_late_by": f"{one['sender_lag_ms']:.0f} ms",
                "refused_or_failed": ", ".join(f"{name} {count}" for name, count in one["not_on_time"].items()) or "-",
            }
            for scenario, one in self.summary().items()
        ]

    def table(self) -> str:
        lines = [[title.lower() for title in COLUMNS.values()], *([*row.values()] for row in self.rows())]
        return "\n".join("{:20}{:>10}{:>10}{:>8}{:>14}  {}".format(*line) for line in lines)

    def in_report(self, page: str) -> str:
        """Returns Locust's report page with the outcomes as a table."""
        head = "".join(f"<th>{title}</th>" for title in COLUMNS.values())
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row.values()) for row in self.rows())
        body = "".join(f"<tr>{row}</tr>" for row in (head, *cells))
        section = (
            '<section id="outcomes" style="font-family:sans-serif;margin:2em;background:#fff;color:#000">'
            f'<h2>Outcomes</h2><table border="1" cellpadding="6" style="border-collapse:collapse">{body}</table></section>'
        )
        before, end, after = page.rpartition("</body>")
        return before + section + end + after

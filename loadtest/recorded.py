"""Reads a recorded trace: that of `hplm.scheduling`, with names of tenants, and with texts if it has any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import InvalidInput
from hplm.scheduling.simulation.arrivals import MILLISECOND, SECOND, Arrivals, in_order


@dataclass(frozen=True)
class Recorded:
    arrivals: Arrivals
    texts: list[str | None]


def read_recorded(path: Path, tenants: Sequence[str]) -> Recorded:
    """Reads JSONL: `arrival` in seconds, `tokens` or `text`, and optionally `deadline_ms`, `tenant`, `priority`.

    A tenant that the server does not have is replaced by one that it has, always by the same one.
    """
    known = {name: number for number, name in enumerate(tenants)}
    strangers: dict[str, int] = {}
    rows, texts = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            name, text = str(row.get("tenant", "")), row.get("text")
            tenant = known[name] if name in known else strangers.setdefault(name, len(strangers) % len(tenants))
            tokens = int(row["tokens"]) if text is None else int(row.get("tokens", len(text.split()) + 2))
            allowed = int(float(row.get("deadline_ms", 0)) * MILLISECOND)
            rows.append((int(float(row["arrival"]) * SECOND), tokens, allowed, tenant, int(row.get("priority", 0))))
            texts.append(text)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise InvalidInput(f"{path}, line {number} is not a recorded request ({error!r}): see docs/loadtest.md") from None
    if not rows:
        raise InvalidInput(f"{path} contains no requests: see docs/loadtest.md")
    columns, order = in_order(rows, path)
    return Recorded(Arrivals(*columns.T), [texts[i] for i in order.tolist()])

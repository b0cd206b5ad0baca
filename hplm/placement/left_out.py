"""The requests of journals that placement leaves out, because the profile does not know their tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput

MOST_SHARE = 0.2  # of all requests: a placement for the others would not suit the load
NAMED = 5  # tenants


@dataclass(frozen=True, eq=False)
class LeftOut:
    arrival_ns: Array = field(default_factory=lambda: np.empty(0, np.int64))  # in order
    tenants: Sequence[str] = ()  # of each request

    def __len__(self) -> int:
        return len(self.tenants)

    def between(self, start_ns: int, end_ns: int) -> LeftOut:
        first, last = np.searchsorted(self.arrival_ns, (start_ns, end_ns))
        return LeftOut(self.arrival_ns[first:last], self.tenants[first:last])

    def expect_few(self, known: int, source: str) -> None:
        """Refuses too many, beside so many requests of known tenants."""
        share = len(self) / max(1, known + len(self))
        if share > MOST_SHARE:
            raise InvalidInput(
                f"{share:.1%} of the requests ({source}) are of {self._whose}. At most {MOST_SHARE:.0%} are left out: if these "
                "tenants are new, measure again with `hplm place profile` and search with the new profile; if they were "
                "deleted, give journals of the time since then"
            )

    @property
    def text(self) -> str:
        return f"{len(self):,} requests are left out: they are of {self._whose}"

    @property
    def figures(self) -> dict[str, Any]:
        counts = Counter(self.tenants)
        return {"requests": len(self), "tenants": len(counts), "most": _most(counts)}

    @property
    def _whose(self) -> str:
        counts = Counter(self.tenants)
        more = f" and {len(counts) - NAMED:,} more" if len(counts) > NAMED else ""
        one_or_more = f"{len(counts):,} tenants" if len(counts) > 1 else "a tenant"
        return f"{one_or_more} that the profile does not know ({', '.join(_most(counts))}{more})"


def _most(counts: Counter[str]) -> list[str]:
    return [tenant for tenant, _ in counts.most_common(NAMED)]

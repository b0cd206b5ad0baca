"""The requests of journals that placement leaves out, because the profile does not know their tenants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput

MOST_SHARE = 0.2  # of all requests: a placement for the others would not suit the load
NAMED = 5  # tenants


@dataclass(frozen=True, eq=False)
class LeftOut:
    tenants: tuple[str, ...]
    arrival_ns: Array  # in order
    tenant: Array  # index in `tenants`

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def since(self, start_ns: int) -> LeftOut:
        """Returns what arrived from this time on."""
        first = int(np.searchsorted(self.arrival_ns, start_ns))
        return LeftOut(self.tenants, self.arrival_ns[first:], self.tenant[first:])

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
        names = self._most_first
        return {"requests": len(self), "tenants": len(names), "most": names[:NAMED]}

    @property
    def _whose(self) -> str:
        names = self._most_first
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        one_or_more = f"{len(names):,} tenants" if len(names) > 1 else "a tenant"
        return f"{one_or_more} that the profile does not know ({', '.join(names[:NAMED])}{more})"

    @property
    def _most_first(self) -> list[str]:
        """The tenants that have requests, those with the most first."""
        counts = np.bincount(self.tenant, minlength=len(self.tenants))
        order: list[int] = np.argsort(-counts, kind="stable").tolist()
        return [self.tenants[number] for number in order if counts[number]]


NOTHING = LeftOut((), np.empty(0, np.int64), np.empty(0, np.int64))

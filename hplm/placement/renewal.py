"""Says whether a found placement should replace the current one. Both are tested with requests that the search did not see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.errors import InvalidInput
from hplm.placement.attained import Attained
from hplm.placement.workload import Trace, span_ns


def divided(trace: Trace, search_seconds: float, test_seconds: float) -> tuple[Trace, Trace]:
    """Returns the end of a trace in two parts: one to search with, and the one after it, to test with."""
    test_from = int(trace.arrival_ns[-1]) + 1 - span_ns(test_seconds)
    search_from = test_from - span_ns(search_seconds)
    if not ((search_from <= trace.arrival_ns) & (trace.arrival_ns < test_from)).any():
        raise InvalidInput(
            f"no requests are left to search with: none came in the {search_seconds:,g} s before the last {test_seconds:,g} s "
            f"({trace.source}). Give journals of a longer time, a longer --search-seconds, or a shorter --test-seconds"
        )
    return trace.between(search_from, test_from), trace.last(test_seconds)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two placements with the same requests."""

    current: Attained
    found: Attained

    @property
    def more(self) -> int:
        """The texts that the found placement answers in time beyond those of the current one."""
        return int(np.count_nonzero(self.found.served)) - int(np.count_nonzero(self.current.served))

    @property
    def gain_points(self) -> float:
        """The same in percentage points."""
        return 100 * self.more / len(self.found.trace)

    def is_worth(self, least_points: float) -> bool:
        """Whether the found one has the wanted gain. With 0 points it must still answer a text more in time."""
        return self.more > 0 and 100 * self.more >= least_points * len(self.found.trace)  # of whole numbers: exact at the bound

"""The screen: AlpaServe's runtime on a virtual clock, for millions of texts. It ranks placements.

Requests go to the group whose first stage is free first. It serves first come, first served, and refuses what would be late.
Each stage has a clock. `most_texts` above 1 batches as AlpaServe 6.5 does: texts wait in one line a unit, and an idle group
takes the oldest one, and those of its backbone behind it as long as all stay in time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.placement.attained import Attained
from hplm.placement.case import Cases
from hplm.placement.kernel import kernel
from hplm.placement.placement import Group
from hplm.placement.profile import Profile
from hplm.placement.stepping import Steps
from hplm.placement.workload import Trace


class Screen:
    """Screens many placements with one trace."""

    def __init__(self, profile: Profile, trace: Trace, most_texts: int = 1) -> None:
        trace.expect_deadlines()
        if most_texts < 1:
            raise InvalidInput(f"batches of {most_texts} texts: give 1 or more")
        self.trace = trace
        self._cases = Cases(profile, trace)
        self._most_texts = most_texts

    def attained(self, groups: Sequence[Group]) -> Attained:
        case = self._cases.of(groups)
        compiled = kernel()
        if compiled is None:
            steps = Steps(case)
            steps.one_by_one() if self._most_texts == 1 else steps.in_batches(self._most_texts)
        elif self._most_texts == 1:
            compiled.one_by_one(case)
        else:
            compiled.in_batches(case, self._most_texts)
        return Attained(self.trace, case.end, case.busy)


def alone_ns(profile: Profile, trace: Trace) -> Array:
    """Returns for each text the nanoseconds that it takes on one device that serves nothing else. SLO scales multiply them.

    Where a backbone was not measured on one device, its least number of devices a stage counts.
    """
    took = np.zeros(len(trace))
    backbone, tokens = trace.backbone, trace.tokens.astype(np.int64)
    for name, own in profile.backbones.items():
        mine = backbone == name
        took[mine] = own.alone().ns(tokens[mine], tokens[mine] ** 2, 1)
    return took

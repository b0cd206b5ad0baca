"""The screen: AlpaServe's runtime on a virtual clock, for millions of texts. It ranks placements.

Requests wait in one line for each set of groups that may serve them, and an idle group takes the oldest one. So each goes to
the group whose first stage is free first, first come, first served. A request that would be late is refused. Each stage has a
clock. `most_texts` above 1 batches as AlpaServe 6.5 does: a group also takes those of the same backbone behind the first one,
as long as all stay in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hplm.arrays import Array
from hplm.placement.attained import REFUSED, Attained
from hplm.placement.kernel import TERMS, ScreenCase, run
from hplm.placement.placement import Group
from hplm.placement.profile import Cut, Profile, Terms
from hplm.placement.stepping import Steps
from hplm.placement.workload import Trace


class Screen:
    """Screens many placements with one trace. What does not depend on the placement is computed once."""

    def __init__(self, profile: Profile, trace: Trace, most_texts: int = 1) -> None:
        trace.expect_deadlines()
        self.trace = trace
        self._profile = profile
        self._most_texts = min(most_texts, len(trace))  # the kernel's numbers have 64 bits
        self._backbones = {name: i for i, name in enumerate(profile.backbones)}
        self._around = np.array([[*own.around.numbers] for own in profile.backbones.values()])
        self._known: dict[tuple[str, int, Cut], Array] = {}
        self._arrival, self._timeout = (np.ascontiguousarray(own, np.int64) for own in (trace.arrival_ns, trace.timeout_ns))
        self._unit, self._tokens = (np.ascontiguousarray(own, np.int32) for own in (trace.unit, trace.tokens))

    def attained(self, groups: Sequence[Group]) -> Attained:
        case = self.case(groups)
        if not run(case, self._most_texts):
            Steps(case, self._most_texts).run()
        return Attained(self.trace, case.end, case.busy)

    def case(self, groups: Sequence[Group]) -> ScreenCase:
        groups_of: dict[str, list[int]] = {name: [] for name in self.trace.names}
        for number, group in enumerate(groups):
            for name in groups_of.keys() & group.units:
                groups_of[name].append(number)
        lines: dict[tuple[str, tuple[int, ...]], int] = {}
        line = [lines.setdefault((name.split("/")[0], (*own,)), len(lines)) if own else -1 for name, own in groups_of.items()]
        serves = np.zeros((len(lines), len(groups)), np.uint8)
        for (_, own), number in lines.items():
            serves[number, own] = 1
        depth = np.array([group.stages for group in groups], np.int32)
        stages = int(depth.max(initial=1))
        terms = np.zeros((len(groups), len(self._backbones), stages, TERMS))
        for number, group in enumerate(groups):
            for backbone, cut in group.cuts.items():
                terms[number, self._backbones[backbone], : len(cut)] = self._terms(backbone, group.intra, cut)
        return ScreenCase(
            arrival=self._arrival, timeout=self._timeout, unit=self._unit, tokens=self._tokens, line=np.array(line, np.int32),
            backbone=np.array([self._backbones[backbone] for backbone, _ in lines], np.int32), serves=serves,
            depth=depth, terms=terms, around=self._around, clock=np.zeros((len(groups), stages)),
            end=np.full(len(self._unit), REFUSED), busy=np.zeros(len(groups)),
        )  # fmt: skip

    def _terms(self, backbone: str, intra: int, cut: Cut) -> Array:
        """Returns the terms of each stage."""
        key = backbone, intra, cut
        if key not in self._known:
            own, hop = self._profile.backbones[backbone], self._profile.hop
            self._known[key] = np.array([[*stage.numbers] for stage in own.stages(hop, intra, cut)])
        return self._known[key]


def alone_ns(profile: Profile, trace: Trace) -> Array:
    """Returns for each text the nanoseconds that it takes on one device that serves nothing else. SLO scales multiply them.

    Where a backbone was not measured on one device, its least number of devices a stage counts.
    """
    return each_ns({name: own.alone() + own.around for name, own in profile.backbones.items()}, trace)


def each_ns(terms: Mapping[str, Terms], trace: Trace) -> Array:
    """Returns the nanoseconds of each text, by the terms of its backbone."""
    took = np.zeros(len(trace))
    backbone, tokens = trace.backbone, trace.tokens.astype(np.int64)
    for name, own in terms.items():
        mine = backbone == name
        took[mine] = own.ns(tokens[mine], tokens[mine] ** 2)
    return took

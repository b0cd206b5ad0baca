"""Simulates a placement: each group's own encoder, as it serves, with simulated stages, all on one virtual clock.

It batches, packs and drops texts as the server does. Its stages take the profile's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from hplm.engine.service import ANSWERING_NS
from hplm.engine.settings import EARLIEST
from hplm.errors import InvalidInput
from hplm.parameters import milliseconds, whole_number, yes_or_no
from hplm.placement.attained import REFUSED, Attained
from hplm.placement.placement import Group
from hplm.placement.profile import Profile
from hplm.placement.workload import Trace
from hplm.scheduling.cost import CostModel
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity, Places
from hplm.simulate.arrivals import Arrivals, SimulatedText
from hplm.simulate.encoders import Outcome, Server, SimulatedEngine, run

LESSONS = ((1, 64), (8, 64), (32, 16), (4, 256), (16, 128))  # batches that a cost model is taught: texts, and tokens of each
ROUNDS = 3  # of these batches: more than the batches before a cost model is believed
UNLIMITED_BYTES = 2**60
PARAMETERS = ("policy", "batch_tokens", "batch_texts", "queue_texts", "commit_ms", "batch_ms", "admission")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of every group's server, by default as `hplm export` writes them."""

    policy: str = DEFAULT
    batch_tokens: int = 4096
    batch_texts: int = 4096
    queue_texts: int = 8192
    commit_ns: int | None = 5_000_000
    batch_ns: int = 50_000_000
    admission: bool = True

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> ServerSettings:
        """Returns settings from parameters that are named as in `config.pbtxt`; others stay as exports have them.

        `batch_texts` is the simulator's own: servers bound a batch by its tokens.
        """
        unknown = sorted(parameters.keys() - PARAMETERS)
        if unknown:
            raise InvalidInput(f"--parameters {unknown[0]}={parameters[unknown[0]]}: give {', '.join(PARAMETERS)}")
        changes: dict[str, Any] = {}
        for name in parameters:
            if name == "policy":
                policy(parameters[name])  # raises if there is none
                changes[name] = parameters[name]
            elif name == "admission":
                changes[name] = yes_or_no(parameters, name)
            elif name == "commit_ms" and parameters[name] == EARLIEST:
                changes["commit_ns"] = None
            elif name.endswith("_ms"):
                changes[name.replace("_ms", "_ns")] = round(1e6 * milliseconds(parameters, name, "0"))
            else:
                changes[name] = whole_number(parameters, name)
        return replace(cls(), **changes)

    def scheduler(self, stages: Stages) -> Scheduler[SimulatedText]:
        """Returns a new one. With admission it knows the profile's times: else it would believe nothing at first."""
        policies, limits = [policy(self.policy) for _ in stages.terms], Limits(self.queue_texts, UNLIMITED_BYTES)
        times = self.commit_ns, self.batch_ns, ANSWERING_NS
        made: Scheduler[SimulatedText] = Scheduler(policies, limits, self.admission, *times)
        if self.admission:
            stages.teach(made.costs)
        return made


class Stages:
    """How long the batches of a group's backbones take in each stage."""

    def __init__(self, group: Group, profile: Profile, trace: Trace) -> None:
        numbers = {name: number for number, name in enumerate(group.cuts)}
        self.backbone_of = [numbers.get(name.split("/")[0]) for name in trace.names]  # of each unit; None: not here
        self.terms = [profile.backbones[name].stages(profile.hop, group.intra, cut) for name, cut in group.cuts.items()]
        tokens = float(trace.tokens.mean())
        self.around_ns = max(
            (profile.backbones[name].around.ns(tokens, tokens**2, 1) for name in group.cuts), default=0.0
        )  # of a mean text

    def ns(self, unit: int, tokens: int, scores: int, texts: int) -> list[float]:
        """Returns the time of each stage for a batch of a unit's backbone."""
        return [terms.ns(tokens, scores, texts) for terms in self.terms[cast(int, self.backbone_of[unit])]]

    def batch_ns(self, texts: Sequence[SimulatedText], places: Places | None) -> list[float]:
        """Returns the same for texts of one backbone."""
        tokens, scores = sum(text.tokens for text in texts), sum(text.tokens**2 for text in texts)
        return self.ns(texts[0].tenant, tokens, scores, len(texts))

    def teach(self, costs: Sequence[CostModel]) -> None:
        """Lets the cost models learn the profile, as if the backbones had been served before."""
        for cost, terms in zip(costs, self.terms, strict=True):
            for _ in range(ROUNDS):
                for texts, tokens in LESSONS:
                    took = [max(1, int(stage.ns(texts * tokens, texts * tokens**2, texts))) for stage in terms]
                    cost.observe(texts * tokens, texts, 0, sum(took), stages_ns=took if len(took) > 1 else ())


class GroupServer(Server):
    def __init__(self, group: Group, profile: Profile, trace: Trace, serving: ServerSettings, outcome: Outcome) -> None:
        self._stages = Stages(group, profile, trace)
        # The slots of tenants are no limit here: a trace has units.
        capacity = Capacity(serving.batch_tokens, serving.batch_texts, serving.batch_texts, in_flight=group.stages + 1)
        around_ns = int(self._stages.around_ns)
        machine = SimulatedEngine(self._stages.batch_ns, capacity, answering_ns=around_ns, stages=group.stages)
        super().__init__(serving.scheduler(self._stages), machine, outcome)
        self._works_ns: dict[int, float] = {}  # of each text that is here: in the slowest stage
        self.queue_ns = 0.0  # of all of them

    def arrive(self, text: SimulatedText) -> None:
        text.backbone = cast(int, self._stages.backbone_of[text.tenant])
        works = max(self._stages.ns(text.tenant, text.tokens, text.tokens**2, 1))
        self._works_ns[text.number] = works
        self.queue_ns += works
        super().arrive(text)

    def leave(self, texts: Sequence[SimulatedText], fate: int) -> None:
        super().leave(texts, fate)
        for text in texts:
            self.queue_ns -= self._works_ns.pop(text.number)
        if not self._works_ns:
            self.queue_ns = 0.0  # without what rounding has left


def simulate(groups: Sequence[Group], profile: Profile, trace: Trace, serving: ServerSettings) -> Attained:
    """Returns what the groups' servers answer in time. Each unit is a tenant for them."""
    arrivals = Arrivals(trace.arrival_ns, trace.tokens, trace.timeout_ns, trace.unit, np.zeros(len(trace), np.int64))
    outcome = Outcome.of(arrivals)
    servers = [GroupServer(group, profile, trace, serving, outcome) for group in groups]
    groups_of = [[i for i, group in enumerate(groups) if name in group.units] for name in trace.names]

    def goes_to(text: SimulatedText) -> int | None:
        """Returns the group with the least work that is not done. AlpaServe counts requests, which need not be alike here."""
        return min(groups_of[text.tenant], key=lambda group: servers[group].queue_ns, default=None)

    run(servers, arrivals, goes_to)
    end_ns = np.where(outcome.on_time, outcome.answered_ns, REFUSED).astype(float)
    return Attained(trace, end_ns, np.array([server.outcome.busy_ns for server in servers], float))

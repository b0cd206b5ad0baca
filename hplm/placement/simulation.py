"""Simulates a placement: the encoder of each backbone of each group, as it serves, with simulated stages, on one virtual clock.

It batches, packs and drops texts as the server does. Its stages take the profile's time, and longer while other encoders of the
group compute too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        limits, times = Limits(self.queue_texts, UNLIMITED_BYTES), (self.commit_ns, self.batch_ns, ANSWERING_NS)
        made: Scheduler[SimulatedText] = Scheduler(policy(self.policy), limits, self.admission, *times)
        if self.admission:
            stages.teach(made.cost)
        return made


class Stages:
    """How long the batches of a group's backbone take in each stage."""

    def __init__(self, group: Group, backbone: str, profile: Profile, trace: Trace) -> None:
        own, tokens = profile.backbones[backbone], float(trace.tokens.mean())
        self._terms = own.stages(profile.hop, group.intra, group.cuts[backbone])
        self._times = group.intra / max(1, group.intra // len(group.cuts))  # the engines divide the cores of a stage
        self.around_ns = own.around.ns(tokens, tokens**2, 1)  # of a mean text

    def ns(self, tokens: int, scores: int, texts: int) -> list[float]:
        """Returns the time of each stage for a batch."""
        return [self._times * terms.ns(tokens, scores, texts) for terms in self._terms]

    def batch_ns(self, texts: Sequence[SimulatedText], places: Places | None) -> list[float]:
        """Returns the same for texts."""
        return self.ns(sum(text.tokens for text in texts), sum(text.tokens**2 for text in texts), len(texts))

    def teach(self, cost: CostModel) -> None:
        """Lets the cost model learn the profile, as if the backbone had been served before."""
        for _ in range(ROUNDS):
            for texts, tokens in LESSONS:
                took = [max(1, int(stage)) for stage in self.ns(texts * tokens, texts * tokens**2, texts)]
                cost.observe(texts * tokens, texts, 0, sum(took), stages_ns=took if len(took) > 1 else ())


class BackboneServer(Server):
    """A backbone's engine in a group. `here`: all engines of the group."""

    def __init__(
        self, group: Group, backbone: str, profile: Profile, trace: Trace, serving: ServerSettings, outcome: Outcome
    ) -> None:
        self._stages = Stages(group, backbone, profile, trace)
        self.group, self.backbone, self.here = group, backbone, list[BackboneServer]()
        # The slots of tenants are no limit here: a trace has units.
        capacity = Capacity(serving.batch_tokens, serving.batch_texts, serving.batch_texts, in_flight=group.stages + 1)
        machine = SimulatedEngine(
            self._stages.batch_ns, capacity, answering_ns=int(self._stages.around_ns), stages=group.stages
        )
        super().__init__(serving.scheduler(self._stages), machine, outcome)
        self._works_ns: dict[int, float] = {}  # of each text that is here: in the slowest stage
        self.queue_ns = 0.0  # of all of them

    def arrive(self, text: SimulatedText) -> None:
        works = max(self._stages.ns(text.tokens, text.tokens**2, 1))
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
    servers: list[BackboneServer] = []
    for group in groups:
        here = [BackboneServer(group, name, profile, trace, serving, outcome) for name in group.cuts]
        servers += here
        for server in here:
            server.here = here
            if group.intra < len(here):  # no core for each
                server.beside = [other for other in here if other is not server]
    units = [(name, name.split("/")[0]) for name in trace.names]
    servers_of = [
        [i for i, own in enumerate(servers) if name in own.group.units and backbone == own.backbone] for name, backbone in units
    ]

    def goes_to(text: SimulatedText) -> int | None:
        """Returns the server in the group with the least work left. AlpaServe counts requests, which need not be alike here."""
        return min(servers_of[text.tenant], key=lambda one: sum([own.queue_ns for own in servers[one].here]), default=None)

    run(servers, arrivals, goes_to)
    end_ns = np.where(outcome.on_time, outcome.answered_ns, REFUSED).astype(float)
    busy_ns = [sum([own.outcome.busy_ns for own in servers if own.group is group]) for group in groups]
    return Attained(trace, end_ns, np.array(busy_ns, float))

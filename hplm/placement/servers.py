"""The simulated server of a group: the scheduler that serves, and stages that take the profile's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.parameters import milliseconds, whole_number, yes_or_no
from hplm.placement.placement import Group
from hplm.placement.profile import Profile, Terms
from hplm.placement.workload import Trace
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost, CostModel
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT, Policy, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Places, Selection
from hplm.scheduling.simulation.arrivals import SimulatedText
from hplm.scheduling.simulation.server import Computing, Load, Machine, Server
from hplm.scheduling.waiting import Capacity

LESSONS = ((1, 64), (8, 64), (32, 16), (4, 256), (16, 128))  # batches that a cost model is taught: texts, and tokens of each
ROUNDS = 3  # of these batches: more than the batches before a cost model is believed
UNLIMITED_BYTES = 2**60
PARAMETERS = ("policy", "batch_tokens", "batch_texts", "queue_texts", "commit_ms", "batch_ms", "admission")


@dataclass(frozen=True)
class Serving:
    """The settings of every group's server, by default as `hplm export` writes them."""

    policy: str = DEFAULT
    batch_tokens: int = 4096
    batch_texts: int = 4096
    queue_texts: int = 8192
    commit_ns: int | None = 5_000_000
    batch_ns: int = 50_000_000
    admission: bool = True
    noise: float = 0.0  # relative standard deviation of a batch's time

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Serving:
        """Returns settings from parameters that are named as in `config.pbtxt`; others stay as exports have them.

        `batch_texts` is the simulator's own: servers bound a batch by its tokens.
        """
        unknown = sorted(parameters.keys() - PARAMETERS)
        if unknown:
            raise InvalidInput(f"--serving {unknown[0]}={parameters[unknown[0]]}: give {', '.join(PARAMETERS)}")
        changes: dict[str, Any] = {}
        for name in parameters:
            if name == "policy":
                policy(parameters[name])  # raises if there is none
                changes[name] = parameters[name]
            elif name == "admission":
                changes[name] = yes_or_no(parameters, name)
            elif name.endswith("_ms"):
                changes[name.replace("_ms", "_ns")] = round(1e6 * milliseconds(parameters, name, "0"))
            else:
                changes[name] = whole_number(parameters, name)
        return replace(cls(), **changes)

    def scheduler(self, stages: Stages) -> Scheduler[SimulatedText]:
        """Returns a new one. With admission it knows the profile's times: else it would believe nothing at first."""
        chosen, around = policy(self.policy), int(stages.around_ns)
        if len(set(stages.backbone_of)) > 1:
            chosen = OneBackbone(chosen, stages.backbone_of)
        limits = Limits(self.queue_texts, UNLIMITED_BYTES)
        made: Scheduler[SimulatedText] = Scheduler(chosen, limits, self.admission, self.commit_ns, self.batch_ns, around)
        if self.admission:
            stages.teach(made.cost)
        return made


class Stages:
    """How long the batches of a group's backbones take in each stage."""

    def __init__(self, group: Group, profile: Profile, trace: Trace) -> None:
        backbones = [name.split("/")[0] for name in trace.names]
        self.backbone_of = [name if name in group.cuts else None for name in backbones]  # of each unit; None: not here
        self._terms = {
            name: [profile.backbones[name].terms(group.intra, *ends) + (profile.hop if ends[0] else Terms()) for ends in cut]
            for name, cut in group.cuts.items()
        }
        tokens = float(trace.tokens.mean())
        self.around_ns = max(
            (profile.backbones[name].around.ns(tokens, tokens**2, 1) for name in group.cuts), default=0.0
        )  # of a mean text

    def ns(self, unit: int, tokens: int, scores: int, texts: int) -> list[float]:
        """Returns the time of each stage for a batch of a unit's backbone."""
        return [terms.ns(tokens, scores, texts) for terms in self._terms[cast(str, self.backbone_of[unit])]]

    def teach(self, cost: CostModel) -> None:
        """Lets a cost model learn the profile, as if it had served each backbone before."""
        for _ in range(ROUNDS):
            for terms in self._terms.values():
                for texts, tokens in LESSONS:
                    took = [max(1, int(stage.ns(texts * tokens, texts * tokens**2, texts))) for stage in terms]
                    cost.observe(texts * tokens, texts, 0, sum(took), stages_ns=took if len(took) > 1 else ())


class OneBackbone:
    """Lets a policy choose among the texts of all backbones, and keeps those of the backbone that it wants first."""

    def __init__(self, chooser: Policy, backbone_of: Sequence[str | None]) -> None:
        numbers = {name: i for i, name in enumerate(dict.fromkeys(backbone_of))}
        self._chooser = chooser
        self._kind_of = np.array([numbers[name] for name in backbone_of])

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array | Selection:
        units = [cast(int, columns.tenant_of(number)) for number in range(columns.tenants)]
        kind = self._kind_of[units][columns.tenant]
        kinds = len(np.unique(kind))
        if kinds == 1:
            return self._chooser.select(columns, start_ns, capacity, cost)
        wide = Capacity(capacity.tokens * kinds, capacity.texts * kinds, capacity.tenants * kinds)
        chosen = Selection.of(self._chooser.select(columns, start_ns, wide, cost)).indexes
        mine = chosen[kind[chosen] == kind[chosen[:1]]]
        fits = np.cumsum(columns.tokens[mine]) <= capacity.tokens
        fits[:1] = True  # or a text that is longer than a batch would wait for ever
        return mine[fits][: capacity.texts]


class GroupServer(Server):
    def __init__(self, group: Group, profile: Profile, trace: Trace, serving: Serving, load: Load, seed: int = 0) -> None:
        self._stages = Stages(group, profile, trace)
        # The slots of tenants are no limit here: a trace has units.
        capacity = Capacity(serving.batch_tokens, serving.batch_texts, serving.batch_texts, in_flight=group.stages + 1)
        machine = Machine(_by_stages, capacity, answering_ns=int(self._stages.around_ns), noise=serving.noise)
        super().__init__(serving.scheduler(self._stages), machine, load, seed)
        self._clock = [0] * group.stages
        self._works_ns: dict[int, float] = {}  # of each text that is here: in the slowest stage
        self.queue_ns = 0.0  # of all of them

    def arrive(self, text: SimulatedText, now: int) -> None:
        works = max(self._stages.ns(text.tenant, text.tokens, text.tokens**2, 1))
        self._works_ns[text.number] = works
        self.queue_ns += works
        super().arrive(text, now)

    def _give_up(self, texts: Sequence[SimulatedText], fate: int, now: int) -> None:
        self._left(texts)
        super()._give_up(texts, fate, now)

    def _finish(self, one: Computing, now: int) -> None:
        self._left(one.sheet)
        super()._finish(one, now)

    def _left(self, texts: Sequence[SimulatedText]) -> None:
        for text in texts:
            self.queue_ns -= self._works_ns.pop(text.number)
        if not self._works_ns:
            self.queue_ns = 0.0  # without what rounding has left

    def _stages_ns(self, texts: Sequence[SimulatedText], places: Places | None) -> list[float]:
        tokens, scores = sum(text.tokens for text in texts), sum(text.tokens**2 for text in texts)
        return self._stages.ns(texts[0].tenant, tokens, scores, len(texts))


def _by_stages(lengths: Array, places: Places | None) -> float:
    raise NotImplementedError("a group's batches take the time of its stages")

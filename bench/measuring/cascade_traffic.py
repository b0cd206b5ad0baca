"""Traffic of the timed part of the cascade benchmark: test texts for tenants that answer in different ways, at random times.

For each way, every tenant is exported once more, with the same weights and another ladder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.measuring.cascade_material import Material
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.training.tasks import training_task
from hplm.engine.backbone import Backbone
from hplm.levels.plan import Plan, Step
from hplm.tenants.snapshot import Snapshot, Tenant

STRONG, CASCADE, LADDER = "strong", "cascade", "ladder"  # the own level; the dearest plan; all plans, by the governor
LOAD = 0.7  # of the rate at which strong is saturated
OVERLOAD = 3.0
BATCH_TOKENS = 1024  # so that a batch takes a fraction of the deadlines
IN_FLIGHT = 64  # requests at saturation
ALLOWED = (2.0, 12.0)  # the deadlines of an overload, in times that strong takes for a batch; drawn evenly


def level_way(level: int) -> str:
    """The way of a tenant that answers by one level alone."""
    return f"level-{level}"


@dataclass(frozen=True)
class Asked:
    """A test text, the tenant that answers it, and the right answer."""

    tenant: str
    text: str
    label: str

    def of(self, way: str) -> str:
        """The name of its tenant that answers in this way."""
        return f"{self.tenant}-{way}"


@dataclass(frozen=True)
class Poisson:
    """Requests of an open loop."""

    due: np.ndarray  # seconds
    asked: np.ndarray  # the numbers of the texts

    @classmethod
    def of(cls, rate: float, seconds: float, texts: int, seed: int) -> Poisson:
        random = np.random.default_rng(seed)
        due = np.cumsum(random.exponential(1 / rate, max(2, round(rate * seconds))))
        return cls(due, random.integers(0, texts, len(due)))


@dataclass(frozen=True)
class Sent:
    """The answers to an open loop, in the order in which its requests were due."""

    latencies: np.ndarray  # seconds since a request was due; infinite if it has no answer
    labels: list[str | None]


class Target(Protocol):
    """Something that answers requests."""

    def saturated(self, way: str, seconds: float) -> float:
        """Returns answers a second with so many requests in flight that the engine never waits."""
        ...

    def open_loop(self, ways: Sequence[str], load: Poisson, allowed: np.ndarray | None = None) -> Sent:
        """Sends requests when they are due. A text is asked in all ways at once, and its answer is there with the last.

        `allowed`: seconds until the deadline of each.
        """
        ...


def asked_of(material: Material) -> list[Asked]:
    """Returns the test texts of all tenants, in a random order."""
    every = [
        Asked(one.tenant.id, example.text, example.labels[0])
        for one in material.cascaded
        for example in training_task(one.tenant.task).read(one.question.test).examples
    ]
    return [every[number] for number in np.random.default_rng(5).permutation(len(every))]


def voters(material: Material) -> list[str]:
    """Returns the ways of all levels, which a vote asks. The own level is the last."""
    return [*(level_way(number) for number in range(len(material.cascaded[0].levels) - 1)), STRONG]


def exported(material: Material, repository: Path) -> str:
    """Exports the store with a tenant for each way, and returns the backbone's name."""
    options = ServingOptions(dtype=material.precision.name, batch_tokens=BATCH_TOKENS, queue_texts=100_000)
    backbone = export(material.store, repository, options, replace=True).backbone
    path = repository / backbone / "1" / Backbone.TENANTS
    whole = Snapshot.load(path)
    known = {one.tenant.id for one in material.cascaded}
    tenants = [own for tenant in whole.tenants if tenant.id in known for own in _in_all_ways(tenant)]
    numbered = [replace(tenant, uid=number) for number, tenant in enumerate(tenants, start=1)]
    Snapshot(whole.generation, whole.branches, numbered, whole.export).save(path)
    return backbone


def _in_all_ways(tenant: Tenant) -> list[Tenant]:
    single = {level_way(number): (Plan((Step(number),)),) for number in range(len(tenant.levels))}
    ladders: dict[str, Sequence[Plan]] = {STRONG: (), CASCADE: tenant.ladder[:1], LADDER: tenant.ladder, **single}
    return [replace(tenant, id=f"{tenant.id}-{way}", ladder=tuple(ladder)) for way, ladder in ladders.items()]

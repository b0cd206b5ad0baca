"""A profile: the time and the memory that each part of a repository's backbones takes on a machine. How to cut it into stages.

`hplm place profile` measures it (`hplm/placement/measuring.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Annotated, NamedTuple, overload

import numpy as np
from msgspec import Meta

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.placement.files import Name, Number, Positive, Whole, Word, digest, read, write

Cut = tuple[tuple[int, int], ...]  # of each stage the first and the last layer, both included
KIND, FORMAT = "hplm profile", 2
WAY_OUT = "measure it with `hplm place profile`"


class Shape(NamedTuple):
    """The size of a batch."""

    tokens: float
    scores: float  # the squared lengths of its texts, added up
    texts: float

    @classmethod
    def of(cls, lengths: Array) -> Shape:
        """Returns the shape of a batch of texts of these lengths."""
        return cls(int(lengths.sum()), int((lengths.astype(np.int64) ** 2).sum()), len(lengths))


@dataclass(frozen=True)
class Terms:
    """The nanoseconds of a step, for a batch, a token, a score and a text."""

    batch_ns: Number = 0.0
    token_ns: Number = 0.0
    score_ns: Number = 0.0
    text_ns: Number = 0.0

    @overload
    def ns(self, tokens: Array, scores: Array, texts: Array | float = 1) -> Array: ...
    @overload
    def ns(self, tokens: float, scores: float, texts: float = 1) -> float: ...
    def ns(self, tokens: Array | float, scores: Array | float, texts: Array | float = 1) -> Array | float:
        return self.batch_ns + self.token_ns * tokens + self.score_ns * scores + self.text_ns * texts

    def __add__(self, other: Terms) -> Terms:
        return Terms(*map(add, self.numbers, other.numbers))

    @property
    def numbers(self) -> Iterable[float]:
        return vars(self).values()  # `astuple` copies each number, which takes a search most of its time

    def shared_by(self, cores: int) -> Terms:
        """Returns the time that each of these cores takes, if they divide the work."""
        return Terms(*(own / cores for own in self.numbers))


@dataclass(frozen=True)
class BackboneProfile:
    layers: Positive  # of the upper stack
    precision: Word  # of the engine that was measured
    export: Word  # the name of the export that was measured
    tenants: Mapping[Name, tuple[Name, ...]]  # by domain
    parents: Mapping[str, Word]  # the domain that each domain's tables fall back to; roots have none
    entry_bytes: Whole  # on the first stage's device: vectors of positions and segments
    layer_bytes: tuple[Whole, ...]  # of each layer
    table_bytes: Mapping[str, Whole]  # by domain, of all its served versions
    record_bytes: Whole  # of a tenant, on average
    slots: Whole
    slot_bytes: Whole  # of a slot of every layout, over all layers
    # By devices a stage, of each layer: the first with what is before it, the last with its heads. The last layer computes only
    # the rows that are read.
    times: Annotated[Mapping[Positive, tuple[Terms, ...]], Meta(min_length=1)]
    around: Terms  # outside of the layers and the cores: the wait for the way through the server
    core: Terms = Terms()  # work of the group's cores outside of the layers: lookup, staging, the server's for each text

    def terms(self, intra: int, first: int = 0, last: int | None = None) -> Terms:
        """Returns the terms of layers first to last, both included (AlpaServe 4.1: the sum of the layers' own)."""
        if intra not in self.times:
            raise InvalidInput(
                f"the profile has no times for {intra} devices a stage, but for {', '.join(map(str, self.times))}: "
                f"measure them with `hplm place profile --intra {intra}`"
            )
        last = self.layers - 1 if last is None else last
        return reduce(Terms.__add__, self.times[intra][first : last + 1], Terms())

    def stage_bytes(self, first: int = 0, last: int | None = None) -> int:
        """Returns the bytes of a stage with these layers: their weights, and their part of all slots."""
        last = self.layers - 1 if last is None else last
        slots = -(-self.slots * self.slot_bytes * (last - first + 1) // self.layers)
        return sum(self.layer_bytes[first : last + 1]) + slots + (0 if first else self.entry_bytes)

    def alone(self) -> Terms:
        """Returns the time that a text keeps the fewest devices busy that were measured."""
        fewest = min(self.times)
        return self.terms(fewest) + self.core.shared_by(fewest)

    def stages(self, hop: Terms, intra: int, cut: Cut) -> list[Terms]:
        """Returns the terms of each stage. All but the first get their input by a hop.

        The cores of the first stage also do what is outside of the layers. It runs in threads of its own, so they divide it.
        """
        core = self.core.shared_by(intra)
        return [self.terms(intra, first, last) + (hop if first else core) for first, last in cut]

    def chain(self, domain: str) -> list[str]:
        """Returns a domain and those that it falls back to."""
        found = [domain]
        while (parent := self.parents.get(found[-1])) is not None:
            found.append(parent)
        return found


@dataclass(frozen=True)
class FitError:
    """How far batches of shapes that no term was fitted to lie from the prediction, relative to their measured times."""

    mean: Number
    max: Number


@dataclass(frozen=True)
class Profile:
    machine: Mapping[str, Word]  # its fingerprint: processor, cores, versions
    backbones: Annotated[Mapping[Name, BackboneProfile], Meta(min_length=1)]
    hop: Terms  # from a stage to the next one
    error: FitError

    @cached_property
    def digest(self) -> str:
        return digest(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Profile:
        profile = read(path, KIND, FORMAT, cls, WAY_OUT)
        for name, own in profile.backbones.items():
            if (wrong := _wrong(own)) is not None:
                raise InvalidInput(f"{path}: backbone {name!r}: {wrong}: {WAY_OUT}")
        return profile

    def write(self, path: Path) -> None:
        write(path, KIND, FORMAT, asdict(self))

    @classmethod
    def together(cls, profiles: Sequence[Profile]) -> Profile:
        """Returns one profile of the backbones of all. Refuses profiles of different machines: their times do not compare."""
        first = profiles[0]
        for other in profiles[1:]:
            for name in (*first.machine, *other.machine):
                here, there = first.machine.get(name, "unknown"), other.machine.get(name, "unknown")
                if here != there:
                    raise InvalidInput(
                        f"the profile is of another machine: {name} {here!r}, not {there!r}: {WAY_OUT} on the machine that "
                        "serves"
                    )
        backbones: dict[str, BackboneProfile] = {}
        for profile in profiles:
            for name, own in profile.backbones.items():
                if backbones.setdefault(name, own) != own:
                    raise InvalidInput(f"two profiles have the backbone {name!r}: give one of them")
        longest = max(profiles, key=lambda profile: profile.hop.ns(1000, 0, 1))
        error = FitError(max(one.error.mean for one in profiles), max(one.error.max for one in profiles))
        return cls(first.machine, backbones, longest.hop, error)


def _wrong(profile: BackboneProfile) -> str | None:
    """Returns what does not fit together."""
    for name, own in (
        ("'layer_bytes'", profile.layer_bytes),
        *((f"'times' of {i!r}", own) for i, own in profile.times.items()),
    ):
        if len(own) != profile.layers:
            return f"{name} are of {len(own)} layers, not of {profile.layers}"
    for domain in profile.tenants:
        seen, step = set[str](), domain
        while step is not None:
            if step in seen:
                return f"parents of {domain!r} lead to no root"
            if step not in profile.table_bytes:
                return f"table_bytes lack the domain {step!r} of its tenants"
            seen.add(step)
            step = profile.parents.get(step)
    return None


def best_cut(
    profile: BackboneProfile, hop: Terms, intra: int, stages: int, shape: Shape, room: Sequence[int] | None = None
) -> Cut:
    """Returns the cut whose slowest stage is the fastest: F(s, k) of AlpaServe 4.1; an empty one if none has enough room.

    `room`: the bytes that each stage has.
    """
    layers = profile.layers
    ends = [0.0, *accumulate(profile.terms(intra, layer, layer).ns(*shape) for layer in range(layers))]
    core_ns, hop_ns = profile.core.shared_by(intra).ns(*shape), hop.ns(*shape)
    no_cut: list[tuple[float, Cut]] = [(math.inf, ())]
    best = [(0.0, ()), *no_cut * layers]  # by number of first layers: the slowest of the stages so far, and their cut
    for stage in range(stages):
        before, best = best, no_cut * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(stage, end):
                slowest = max(before[begin][0], ends[end] - ends[begin] + (hop_ns if begin else core_ns))
                fits = room is None or profile.stage_bytes(begin, end - 1) <= room[stage]
                if fits and slowest < best[end][0]:
                    best[end] = slowest, (*before[begin][1], (begin, end - 1))
    return best[layers][1]

"""A profile: the time and the memory that each part of a repository's backbones takes on a machine.

`hplm place profile` measures it (`hplm/placement/measuring.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.placement.fields import Fields, digest, write

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

    batch_ns: float = 0.0
    token_ns: float = 0.0
    score_ns: float = 0.0
    text_ns: float = 0.0

    @overload
    def ns(self, tokens: Array, scores: Array, texts: Array | float = 1) -> Array: ...
    @overload
    def ns(self, tokens: float, scores: float, texts: float = 1) -> float: ...
    def ns(self, tokens: Array | float, scores: Array | float, texts: Array | float = 1) -> Array | float:
        return self.batch_ns + self.token_ns * tokens + self.score_ns * scores + self.text_ns * texts

    def __add__(self, other: Terms) -> Terms:
        return Terms(
            self.batch_ns + other.batch_ns,
            self.token_ns + other.token_ns,
            self.score_ns + other.score_ns,
            self.text_ns + other.text_ns,
        )

    def shared_by(self, cores: int) -> Terms:
        """Returns the time that each of these cores takes, if they divide the work."""
        return Terms(self.batch_ns / cores, self.token_ns / cores, self.score_ns / cores, self.text_ns / cores)


@dataclass(frozen=True)
class BackboneProfile:
    layers: int  # of the upper stack
    precision: str  # of the engine that was measured
    export: str  # the name of the export that was measured
    tenants: Mapping[str, tuple[str, ...]]  # by domain
    parents: Mapping[str, str]  # the domain that each domain's tables fall back to; roots have none
    entry_bytes: int  # on the first stage's device: vectors of positions and segments
    layer_bytes: tuple[int, ...]  # of each layer
    table_bytes: Mapping[str, int]  # by domain, of all its served versions
    record_bytes: int  # of a tenant, on average
    slots: int
    slot_bytes: int  # of a slot of every layout, over all layers
    times: Mapping[int, tuple[Terms, ...]]  # by devices a stage, of each layer: the first with what is before it, the last
    # with its heads. The last layer computes only the rows that are read.
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

    def alone(self) -> Terms:
        """Returns the time of a text on the fewest devices that were measured, while these do nothing else."""
        fewest = min(self.times)
        return self.terms(fewest) + self.core.shared_by(fewest) + self.around

    def stages(self, hop: Terms, intra: int, cut: Sequence[tuple[int, int]]) -> list[Terms]:
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

    mean: float
    max: float


@dataclass(frozen=True)
class Profile:
    machine: Mapping[str, str]  # its fingerprint: processor, cores, versions
    backbones: Mapping[str, BackboneProfile]
    hop: Terms  # from a stage to the next one
    error: FitError

    @cached_property
    def digest(self) -> str:
        return digest(self._content())

    @classmethod
    def read(cls, path: Path) -> Profile:
        fields = Fields.of_file(path, KIND, FORMAT, WAY_OUT)
        machine, backbones, error = fields.fields("machine"), fields.fields("backbones"), fields.fields("error")
        found = {name: _backbone(backbones.fields(name)) for name in backbones.names()}
        return cls(
            machine={name: machine.text(name) for name in machine.names()},
            backbones=found or fields.refuse("backbones", "a backbone's profile"),
            hop=_terms(fields.fields("hop")),
            error=FitError(error.number("mean"), error.number("max")),
        )

    def write(self, path: Path) -> None:
        write(path, KIND, FORMAT, self._content())

    def _content(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def together(cls, profiles: Sequence[Profile]) -> Profile:
        """Returns one profile of the backbones of all. Refuses profiles of different machines: their times do not compare."""
        first = profiles[0]
        for other in profiles[1:]:
            first.check_machine(other.machine)
        backbones: dict[str, BackboneProfile] = {}
        for profile in profiles:
            for name, own in profile.backbones.items():
                if backbones.setdefault(name, own) != own:
                    raise InvalidInput(f"two profiles have the backbone {name!r}: give one of them")
        longest = max(profiles, key=lambda profile: profile.hop.ns(1000, 0, 1))
        error = FitError(max(one.error.mean for one in profiles), max(one.error.max for one in profiles))
        return cls(first.machine, backbones, longest.hop, error)

    def check_machine(self, machine: Mapping[str, str]) -> None:
        """Refuses another machine than the profile's."""
        for name in (*self.machine, *machine):
            here, there = self.machine.get(name, "unknown"), machine.get(name, "unknown")
            if here != there:
                raise InvalidInput(
                    f"the profile is of another machine: {name} {here!r}, not {there!r}: {WAY_OUT} on the machine that serves"
                )


def _terms(fields: Fields) -> Terms:
    return Terms(*(fields.number(name) for name in ("batch_ns", "token_ns", "score_ns", "text_ns")))


def _backbone(fields: Fields) -> BackboneProfile:
    layers, times = fields.whole("layers", 1), fields.fields("times")
    tenants, parents, tables = fields.fields("tenants"), fields.fields("parents"), fields.fields("table_bytes")
    layer_bytes = fields.wholes("layer_bytes")
    if len(layer_bytes) != layers:
        fields.refuse("layer_bytes", f"the bytes of {layers} layers")
    profile = BackboneProfile(
        layers=layers,
        precision=fields.text("precision"),
        export=fields.text("export"),
        tenants={domain: tenants.texts(domain) for domain in tenants.names()},
        parents={domain: parents.text(domain) for domain in parents.names()},
        entry_bytes=fields.whole("entry_bytes"),
        layer_bytes=layer_bytes,
        table_bytes={domain: tables.whole(domain) for domain in tables.names()},
        record_bytes=fields.whole("record_bytes"),
        slots=fields.whole("slots"),
        slot_bytes=fields.whole("slot_bytes"),
        times={_intra(times, name): _layer_times(times, name, layers) for name in times.names()}
        or fields.refuse("times", "times of 1 or more devices a stage"),
        around=_terms(fields.fields("around")),
        core=_terms(fields.fields("core")),
    )
    _check_domains(fields, profile)
    return profile


def _intra(fields: Fields, name: str) -> int:
    return int(name) if name.isdecimal() and int(name) else fields.refuse(name, "times of 1 or more devices a stage")


def _layer_times(fields: Fields, name: str, layers: int) -> tuple[Terms, ...]:
    times = tuple(map(_terms, fields.list(name)))
    return times if len(times) == layers else fields.refuse(name, f"the times of {layers} layers")


def _check_domains(fields: Fields, profile: BackboneProfile) -> None:
    for domain in profile.tenants:
        seen = {domain}
        step: str | None = domain
        while step is not None:
            if step not in profile.table_bytes:
                fields.refuse("table_bytes", f"bytes that name the domain {step!r} of its tenants")
            step = profile.parents.get(step)
            if step in seen:
                fields.refuse("parents", "parents that lead to a root")
            if step is not None:
                seen.add(step)

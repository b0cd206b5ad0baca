"""`hplm place profile`: measures what backbones cost.

The options of all `hplm place` that say what is to be placed: the cluster, the profiles and the trace.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hplm.cli.options import Numbers, Positive, Words, about
from hplm.cli.served import StateLocation, checked_state
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.placement.problem import Problem
    from hplm.placement.profile import Profile


TYPICAL_TOKENS = (16, 128)  # of the single texts whose times are printed
Repository = Annotated[Path, about("folder that `hplm export` wrote")]


@Parameter(name="*")
@dataclass(frozen=True)
class ProblemOptions:
    """The options of a problem."""

    cluster: Path
    """machines, devices and their memory"""
    profiles: tuple[Path, ...]
    """what `hplm place profile` has measured"""
    trace: tuple[Path, ...]
    """journals of servers, or one recorded trace"""
    slo_scale: Positive | None = None
    """deadlines: so many times a request's time on one device (default: the deadlines of the trace)"""
    hot: tuple[str, ...] = ()
    """tenants that are placed apart from their domain, as BACKBONE/TENANT"""
    rate: Positive = 1.0
    """multiple of the trace's rate of requests"""

    def problem(self, batch_texts: int = 1) -> Problem:
        """`batch_texts`: most texts of a batch, for the screen."""
        from hplm.placement.cluster import Cluster
        from hplm.placement.problem import Problem
        from hplm.placement.profile import Profile
        from hplm.placement.screen import alone_ns
        from hplm.placement.traces import read_trace
        from hplm.placement.units import units_by_name, units_of

        cluster, profile = Cluster.read(self.cluster), Profile.together([Profile.read(path) for path in self.profiles])
        units = units_of(profile, self.hot)
        trace = read_trace(self.trace, units_by_name(profile, units)).at_rate(self.rate)
        trace.expect_known()
        if self.slo_scale is not None:
            trace = trace.with_timeouts(self.slo_scale * alone_ns(profile, trace))
        return Problem(cluster, profile, units, trace, batch_texts)

    def words(self) -> str:
        """Returns the options that describe the same problem again."""
        words: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                words += [f"--{one.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
        return shlex.join(words)


def profile(
    *, repository: Repository, devices: Words, to: Path, intra: Numbers = (1,), state: StateLocation = None
) -> dict[str, Any]:
    """Measure the times and the memory of a repository's backbones, each layer while the other cores compute too.

    Stop other work on the machine first.

    :param devices: all devices of the machine, between commas: cpu:0,cpu:1 (cores) or cuda:0
    :param to: profile to write
    :param intra: devices a stage, such as 1,2: threads on a CPU
    """
    from hplm.placement.measuring import check_devices, profile_repository, profiled_backbones
    from hplm.placement.profile import KIND

    state = checked_state(state)
    check_target(to, KIND)
    check_devices(devices, intra)
    measured = profile_repository(profiled_backbones(repository), devices, intra, state)
    measured.write(to)
    report = _reported(measured)
    print(
        f"next: write machines.json (docs/placement.md), then: hplm place search --cluster machines.json "
        f"--profiles {shlex.quote(str(to))} --trace trace.jsonl --to placement.json"
    )
    return report


def _reported(profile: Profile) -> dict[str, Any]:
    """Prints the named parts of each backbone's memory, and the times of single texts. Returns them."""
    backbones: dict[str, Any] = {}
    for name, own in profile.backbones.items():
        tenants = sum(map(len, own.tenants.values()))
        sizes = {
            "layers": sum(own.layer_bytes),
            "entry": own.entry_bytes,
            "slots": own.slots * own.slot_bytes,
            "device": own.stage_bytes(),
            "tables": sum(own.table_bytes.values()),
            "records": own.record_bytes * tenants,
        }
        mb = {part: round(size / 1e6, 1) for part, size in sizes.items()}
        print(f"{name} in {own.precision}: {own.layers} layers, {tenants} tenants")
        parts = f"layers {mb['layers']:,}, what enters them {mb['entry']:,}, slots {mb['slots']:,}"
        print(f"  once a device: {mb['device']:,} MB ({parts})")
        print(f"  once a machine: tables {mb['tables']:,} MB, records {mb['records']:,} MB")
        ms = {
            intra: {tokens: round(own.terms(intra).ns(tokens, tokens**2) / 1e6, 3) for tokens in TYPICAL_TOKENS}
            for intra in own.times
        }
        for intra, times in ms.items():
            texts = ", ".join(f"{tokens} tokens {one:,.2f} ms" for tokens, one in times.items())
            print(f"  {intra} device{'s' * (intra != 1)} a stage: a text of {texts}")
        backbones[name] = {"precision": own.precision, "layers": own.layers, "tenants": tenants, "mb": mb, "ms": ms}
    error = profile.error
    print(f"predictions of other batches are off by {error.mean:.1%} on average, {error.max:.1%} at most")
    return {"backbones": backbones, "error": {"mean": round(error.mean, 4), "max": round(error.max, 4)}}


def check_target(path: Path, kind: str) -> None:
    """Refuses a file whose folder does not exist, or that is of another kind, before anything is computed for it."""
    from hplm.placement.files import kind_of

    if not path.parent.is_dir():
        raise InvalidInput(f"--to {path}: the folder {path.parent} does not exist: make it, or name another file")
    if path.exists() and kind_of(path) != kind:
        raise InvalidInput(f"--to {path} exists, and is no {kind.removeprefix('hplm ')}: name another file")

"""`hplm place profile` and `emit`: measure what backbones cost, and write a model repository for each group of devices."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hplm.cli.options import AtLeastOne, Json, Numbers, Texts, Words, about
from hplm.cli.place_problem import check_target
from hplm.cli.served import StatePlace, check_state
from hplm.errors import some

if TYPE_CHECKING:
    from hplm.placement.profile import Profile

TYPICAL_TOKENS = (16, 128)  # of the single texts whose times are printed
Repository = Annotated[Path, about("folder that `hplm export` wrote")]


def profile(
    *, repository: Repository, devices: Words, to: Path, intra: Numbers = (1,), backbone: Texts = (), rounds: AtLeastOne = 5,
    wire: bool = False, state: StatePlace = None, json: Json = False,
) -> dict[str, Any]:  # fmt: skip
    """Measure the times and the memory of a repository's backbones, each layer while the other cores compute too.

    Stop other work on the machine first.

    :param devices: all devices of the machine, between commas: cpu:0,cpu:1 (cores) or cuda:0
    :param to: profile to write
    :param intra: devices a stage, such as 1,2: threads on a CPU
    :param backbone: only this one; may be repeated (default: all encoders)
    :param rounds: how often each batch is measured
    :param wire: also serve the repository for some seconds, to measure the way through the server (default: 2 ms are assumed)
    """
    from hplm.cli.round_trips import round_trips
    from hplm.placement.measuring import check_devices, cores_of, profile_repository, sources_of
    from hplm.placement.profile import KIND

    check_state(state)
    check_target(to, KIND)
    check_devices(devices, intra)
    sources = sources_of(repository, backbone)
    cores = cores_of(devices)[: min(intra)]
    served = round_trips(repository, state, [source.name for source in sources], cores) if wire else {}
    measured = profile_repository(sources, devices, intra, state, rounds, served)
    measured.write(to)
    report = _told(measured)
    print(
        f"next: write cluster.json (docs/placement.md), then: hplm place search --cluster cluster.json "
        f"--profiles {shlex.quote(str(to))} --trace trace.jsonl --to placement.json"
    )
    return report


def emit(*, placement: Path, repository: Repository, to: Path, state: StatePlace = None, json: Json = False) -> dict[str, Any]:
    """Write a model repository for each group of a placement, which serves the tenants of the group's units alone.

    The files are hard links where the file system allows it. All groups read one state.

    :param placement: what `hplm place search` wrote
    :param to: new folder for the repositories
    """
    from builder.publish.groups import emit, gaps
    from hplm.placement.placement import Placement

    check_state(state)
    placed = Placement.read(placement)
    emitted = emit(placed, repository, to, state)
    missing = gaps(placed, repository, state)
    groups: list[dict[str, Any]] = []
    for one in emitted:
        group = one.group
        print(
            f"{group.name} on {', '.join(group.devices)} of {group.machine}: {one.tenants} tenants of {some(group.units)}\n"
            f"  {one.command}"
        )
        own = {"name": group.name, "machine": group.machine, "devices": group.devices}
        groups.append({**own, "repository": str(one.repository), "tenants": one.tenants, "command": one.command})
    for gap in missing:
        print(f"note: {gap}")
    return {"groups": groups, "gaps": missing}


def _told(profile: Profile) -> dict[str, Any]:
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

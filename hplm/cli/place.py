"""`hplm place`: which tenants go on which devices."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.cli import place_renew, place_search
from hplm.cli.place_problem import check_target
from hplm.cli.served import check_state
from hplm.registry.store import place_of

if TYPE_CHECKING:
    from hplm.placement.profile import Profile

NAMED = 5  # units that are listed
TYPICAL_TOKENS = (16, 128)  # of the single texts whose times are printed


def register(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "place",
        help="find which tenants go on which devices",
        description="Measure what a repository's backbones cost, search which tenants go on which devices of a cluster, and "
        "write a model repository for each group of devices.",
    )
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    _register_profile(actions)
    place_search.register(actions)
    place_renew.register(actions)
    _register_emit(actions)


def _register_profile(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "profile",
        help="measure the times and the memory of a repository's backbones",
        description="Measure each layer of each encoder on this machine, while its other cores compute too. Stop other work "
        "on the machine first.",
    )
    _source_options(command)
    command.add_argument(
        "--backbone", action="append", default=[], help="only this one; may be repeated (default: all encoders)"
    )
    command.add_argument(
        "--devices",
        type=_words,
        required=True,
        metavar="LIST",
        help="all devices of the machine: cpu:0,cpu:1 (cores) or cuda:0",
    )
    command.add_argument(
        "--intra",
        type=_numbers,
        default=[1],
        metavar="LIST",
        help="devices a stage, such as 1,2: threads on a CPU (default: 1)",
    )
    command.add_argument("--rounds", type=int, default=5, help="how often each batch is measured (default: %(default)s)")
    command.add_argument(
        "--wire", action="store_true",
        help="also serve the repository for some seconds, to measure the way through the server (default: 2 ms are assumed)",
    )  # fmt: skip
    command.add_argument("--to", type=Path, required=True, metavar="FILE", help="profile to write")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run_profile)


def _register_emit(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "emit",
        help="write a model repository for each group of a placement",
        description="Write a model repository for each group, which serves the tenants of its units alone. The files are hard "
        "links where the file system allows it. All groups read one state.",
    )
    command.add_argument("--placement", type=Path, required=True, metavar="FILE", help="what `hplm place search` wrote")
    _source_options(command)
    command.add_argument("--to", type=Path, required=True, metavar="DIR", help="new folder for the repositories")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run_emit)


def _source_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--repository", type=Path, required=True, metavar="DIR", help="folder that `hplm export` wrote")
    text = "the folder or the bucket of `hplm serve --state`, which holds changes"
    command.add_argument("--state", type=place_of, metavar="DIR", help=text)


def run_profile(args: argparse.Namespace) -> dict[str, Any]:
    from hplm.cli.round_trips import round_trips
    from hplm.errors import InvalidInput
    from hplm.placement.measuring import check_devices, cores_of, profile_repository, sources_of
    from hplm.placement.profile import KIND

    check_state(args.state)
    if args.rounds < 1:
        raise InvalidInput(f"--rounds {args.rounds}: give 1 or more")
    check_target(args.to, KIND)
    check_devices(args.devices, args.intra)
    sources = sources_of(args.repository, args.backbone)
    cores = cores_of(args.devices)[: min(args.intra)]
    served = round_trips(args.repository, args.state, [source.name for source in sources], cores) if args.wire else {}
    profile = profile_repository(sources, args.devices, args.intra, args.state, args.rounds, served)
    profile.write(args.to)
    report = _report(profile)
    if not args.json:
        print(_text(report))
        print(
            f"next: write cluster.json (docs/placement.md), then: hplm place search --cluster cluster.json "
            f"--profiles {shlex.quote(str(args.to))} --trace trace.jsonl --to placement.json"
        )
    return report


def run_emit(args: argparse.Namespace) -> dict[str, Any]:
    from builder.publish.groups import emit, gaps
    from hplm.placement.placement import Placement

    check_state(args.state)
    placement = Placement.read(args.placement)
    emitted = emit(placement, args.repository, args.to, args.state)
    missing = gaps(placement, args.repository, args.state)
    if not args.json:
        for one in emitted:
            devices = f"{', '.join(one.group.devices)} of {one.group.machine}"
            print(f"{one.group.name} on {devices}: {one.tenants} tenants of {_some(one.group.units)}\n  {one.command}")
        for gap in missing:
            print(f"note: {gap}")
    return {
        "groups": [
            {
                "name": one.group.name,
                "machine": one.group.machine,
                "devices": list(one.group.devices),
                "repository": str(one.repository),
                "tenants": one.tenants,
                "command": one.command,
            }
            for one in emitted
        ],
        "gaps": missing,
    }


def _report(profile: Profile) -> dict[str, Any]:
    """Returns the named parts of each backbone's memory, and the times of single texts."""
    from hplm.placement.stages import stage_bytes

    backbones: dict[str, Any] = {}
    for name, own in profile.backbones.items():
        tenants = sum(map(len, own.tenants.values()))
        backbones[name] = {
            "precision": own.precision,
            "layers": own.layers,
            "tenants": tenants,
            "mb": {
                "layers": round(sum(own.layer_bytes) / 1e6, 1),
                "entry": round(own.entry_bytes / 1e6, 1),
                "slots": round(own.slots * own.slot_bytes / 1e6, 1),
                "device": round(stage_bytes(own, 0, own.layers - 1) / 1e6, 1),
                "tables": round(sum(own.table_bytes.values()) / 1e6, 1),
                "records": round(own.record_bytes * tenants / 1e6, 1),
            },
            "ms": {
                str(intra): {
                    str(tokens): round(own.terms(intra).ns(tokens, tokens**2, 1) / 1e6, 3) for tokens in TYPICAL_TOKENS
                }
                for intra in own.times
            },
        }
    return {"backbones": backbones, "error": {"mean": round(profile.error.mean, 4), "max": round(profile.error.max, 4)}}


def _text(report: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, own in report["backbones"].items():
        mb = own["mb"]
        lines.append(f"{name} in {own['precision']}: {own['layers']} layers, {own['tenants']} tenants")
        parts = f"layers {mb['layers']:,}, what enters them {mb['entry']:,}, slots {mb['slots']:,}"
        lines.append(f"  once a device: {mb['device']:,} MB ({parts})")
        lines.append(f"  once a machine: tables {mb['tables']:,} MB, records {mb['records']:,} MB")
        for intra, times in own["ms"].items():
            texts = ", ".join(f"{tokens} tokens {ms:,.2f} ms" for tokens, ms in times.items())
            lines.append(f"  {intra} device{'s' * (intra != '1')} a stage: a text of {texts}")
    error = report["error"]
    lines.append(f"predictions of other batches are off by {error['mean']:.1%} on average, {error['max']:.1%} at most")
    return "\n".join(lines)


def _some(units: Sequence[str]) -> str:
    return ", ".join(units[:NAMED]) + (f" and {len(units) - NAMED} more" if len(units) > NAMED else "")


def _words(given: str) -> list[str]:
    return given.split(",")


def _numbers(given: str) -> list[int]:
    try:
        return [int(number) for number in given.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r}: give whole numbers, such as 1,2") from None

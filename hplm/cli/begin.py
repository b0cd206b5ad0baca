"""`hplm begin` makes a registry for a repository: an empty one, or one with a state of the release before."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli.served import served_options
from hplm.options import LEASE_SECONDS

if TYPE_CHECKING:
    from hplm.tenants.registry import Registry


def register(commands: argparse._SubParsersAction) -> None:
    begin = commands.add_parser(
        "begin",
        help="make a live state",
        description="Make a live state, in a folder or a bucket, in which nothing was changed since the export. `hplm serve` "
        "makes a missing folder by itself. With --from, bring over a state of the release before.",
    )
    served_options(begin, required=True)
    begin.add_argument(
        "--lease",
        type=float,
        default=LEASE_SECONDS,
        metavar="SECONDS",
        help="how long a server that cannot see this state answers for tenants with keys: a revoked key may open them so long "
        "(default: %(default)g)",
    )
    begin.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="a live state of the release before, or its backup: serve its tenants with their versions, keys and limits",
    )
    text = "the export that the state of --from was served with"
    begin.add_argument("--from-repository", type=Path, metavar="DIR", help=text)
    begin.add_argument("--json", action="store_true", help="end with one line of JSON")
    begin.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict:
    from hplm.errors import InvalidInput
    from hplm.tenants.registry import registries_of

    if args.state is None:
        raise InvalidInput("give --state, the folder or bucket that `hplm serve --state` or HPLM_STATE will name")
    if not args.lease > 0:
        raise InvalidInput(f"--lease {args.lease:g}: give a positive number of seconds")
    if (args.source is None) != (args.from_repository is None):
        raise InvalidInput("give --from and --from-repository together: a live state, and the export that it was served with")
    registries = registries_of(args.repository, args.state, args.backbone)
    if not registries:
        wanted = f"no backbone {args.backbone!r}" if args.backbone else "no backbone"
        raise InvalidInput(f"{args.repository} contains {wanted}: name the folder of `hplm export`")
    begun = [name for name, registry in registries.items() if _begin(args, name, registry)]
    if not begun:
        raise InvalidInput(f"{args.state} has a live state for {', '.join(registries)} already: nothing was changed")
    if not args.json:
        what = "without changes" if args.source is None else f"with the tenants of {args.source}"
        print(f"{args.state}: a live state {what}, for {', '.join(begun)}")
    return {"begun": begun}


def _begin(args: argparse.Namespace, name: str, registry: Registry) -> bool:
    if args.source is None:
        return registry.begin(args.lease)
    from hplm.tenants.import_state import import_state
    from hplm.tenants.manager import Manager

    return import_state(Manager.open(args.repository, args.state, name), args.source, args.from_repository, args.lease)

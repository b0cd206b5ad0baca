"""`hplm begin` makes an empty registry for a repository."""

from __future__ import annotations

import argparse

from hplm.cli.served import served_options

LEASE_SECONDS = 300.0


def register(commands: argparse._SubParsersAction) -> None:
    begin = commands.add_parser(
        "begin",
        help="make an empty live state",
        description="Make a live state, in a folder or a bucket, in which nothing was changed since the export. `hplm serve` "
        "makes a missing folder by itself.",
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
    begin.add_argument("--json", action="store_true", help="end with one line of JSON")
    begin.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict:
    from hplm.errors import InvalidInput
    from hplm.tenants.registry import registries_of

    if args.state is None:
        raise InvalidInput("give --state, the folder or bucket that `hplm serve --state` or HPLM_STATE will name")
    if not args.lease > 0:
        raise InvalidInput(f"--lease {args.lease:g}: give a positive number of seconds")
    registries = registries_of(args.repository, args.state, args.backbone)
    if not registries:
        wanted = f"no backbone {args.backbone!r}" if args.backbone else "no backbone"
        raise InvalidInput(f"{args.repository} contains {wanted}: name the folder of `hplm export`")
    begun = [name for name, registry in registries.items() if registry.begin(args.lease)]
    if not begun:
        raise InvalidInput(f"{args.state} has a live state for {', '.join(registries)} already: nothing was changed")
    if not args.json:
        print(f"{args.state}: a live state without changes, for {', '.join(begun)}")
    return {"begun": begun}

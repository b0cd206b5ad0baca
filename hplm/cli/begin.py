"""`hplm begin` makes an empty live state for a repository."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hplm.cli.served import served_options

if TYPE_CHECKING:
    from hplm.tenants.state import State


def register(commands: argparse._SubParsersAction) -> None:
    begin = commands.add_parser(
        "begin",
        help="make an empty live state",
        description="Make a live state in which nothing was changed since the export, for servers that do not start without "
        "one (--state-must-exist). `hplm serve` without that option makes a missing state by itself.",
    )
    served_options(begin, required=True)
    begin.add_argument("--json", action="store_true", help="end with one line of JSON")
    begin.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict:
    from hplm.errors import InvalidInput
    from hplm.tenants.state import states_of

    if args.state is None:
        raise InvalidInput("give --state DIR, the folder that `hplm serve --state DIR` or HPLM_STATE will name")
    states = states_of(args.repository, args.state, args.backbone)
    if not states:
        wanted = f"no backbone {args.backbone!r}" if args.backbone else "no backbone"
        raise InvalidInput(f"{args.repository} contains {wanted}: name the folder of `hplm export`")
    begun = [state for state in states if state.begin()]
    if not begun:
        raise InvalidInput(f"{args.state} has a live state for {_named(states)} already: nothing was changed")
    if not args.json:
        print(f"{args.state}: a live state without changes, for {_named(begun)}")
    return {"begun": [state.folder.name for state in begun]}


def _named(states: list[State]) -> str:
    return ", ".join(state.folder.name for state in states)

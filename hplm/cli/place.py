"""`hplm place`: which backbones, domains and tenants go on which devices."""

from __future__ import annotations

import argparse

from hplm.cli import place_search


def register(commands: argparse._SubParsersAction) -> None:
    place = commands.add_parser("place", help="find which backbones, domains and tenants go on which devices")
    actions = place.add_subparsers(dest="action", required=True, metavar="ACTION")
    place_search.register(actions)

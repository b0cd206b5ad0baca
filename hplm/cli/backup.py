"""`hplm backup` copies a live state into a folder, and `hplm restore` publishes it again."""

from __future__ import annotations

import argparse
from pathlib import Path

from hplm.cli.served import open_manager, served_options


def register(commands: argparse._SubParsersAction) -> None:
    backup = commands.add_parser(
        "backup",
        help="copy a live state into a folder",
        description="Copy all files that the newest generation of the state needs, while it is served. The repository is not "
        "copied.",
    )
    backup.add_argument("--to", type=Path, required=True, metavar="DIR", help="new folder for the backup")
    restore = commands.add_parser(
        "restore",
        help="publish a backup",
        description="Publish a backup as the next generation. Running servers take it as any change. A lost state "
        "is made anew, and servers with a copy of a lost bucket must be started without it.",
    )
    restore.add_argument(
        "--from", dest="source", type=Path, required=True, metavar="DIR", help="folder that `hplm backup` wrote"
    )
    for command, run in ((backup, run_backup), (restore, run_restore)):
        served_options(command, required=True)
        command.add_argument("--json", action="store_true", help="end with one line of JSON")
        command.set_defaults(run=run)


def run_backup(args: argparse.Namespace) -> dict:
    from hplm.tenants.backup import back_up

    manifest = back_up(open_manager(args), args.to)
    if not args.json:
        print(f"generation {manifest['generation']} is in {args.to}")
    return manifest


def run_restore(args: argparse.Namespace) -> dict:
    from hplm.tenants.backup import restore

    registry = open_manager(args).registry
    manifest = restore(args.source, registry)
    if not args.json:
        print(f"generation {manifest['backed_up']} of the backup is generation {manifest['generation']} of {registry.store}")
    return manifest

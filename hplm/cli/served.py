"""Options of commands that read or change a served repository and its state."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.registry.store import Place, place_of

if TYPE_CHECKING:
    from hplm.tenants.manager import Manager


def served_options(parser: argparse.ArgumentParser, required: bool = False, repository: Path | None = None) -> None:
    default = f" (default: {repository})" if repository is not None else ""
    text = f"the served model repository{default}"
    parser.add_argument("--repository", type=Path, required=required, default=repository, metavar="DIR", help=text)
    text = "the folder or the bucket of `hplm serve --state`, which holds changes"
    parser.add_argument("--state", type=place_of, metavar="DIR", help=text)
    parser.add_argument("--backbone", help="name of the backbone (default: the only one of the repository)")


def check_state(state: Place | None) -> None:
    """Raises if the state does not exist. Read-only commands call it: a missing folder is a mistake, not an empty state."""
    from hplm.errors import InvalidInput

    if isinstance(state, Path) and not state.is_dir():
        raise InvalidInput(f"--state {state} is not a folder: give the folder of `hplm serve --state`")


def open_manager(args: argparse.Namespace) -> Manager:
    """Opens the manager of the named backbone and its state, which need not exist."""
    from hplm.errors import InvalidInput
    from hplm.tenants.manager import Manager

    if args.state is None:
        raise InvalidInput("--state is missing: give the folder of `hplm serve --state`, which holds all changes")
    return Manager.open(args.repository, args.state, args.backbone)


def begun_manager(args: argparse.Namespace) -> Manager:
    """Opens the manager of a state that exists: a change of a mistyped one would count nowhere."""
    manager = open_manager(args)
    manager.registry.check_begun()
    return manager


def print_late(late: list[str]) -> None:
    """Prints which servers have not taken a change."""
    if late:
        print(f"  not yet taken by {', '.join(late)}: check that these servers are running")

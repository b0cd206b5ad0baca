"""Options of commands about what is being served, and what they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hplm.tenants.manager import Manager


def served_options(parser: argparse.ArgumentParser, required: bool = False, repository: Path | None = None) -> None:
    default = f" (default: {repository})" if repository is not None else ""
    text = f"the model repository that is served{default}"
    parser.add_argument("--repository", type=Path, required=required, default=repository, metavar="DIR", help=text)
    parser.add_argument("--state", type=Path, metavar="DIR", help="what `hplm serve --state` was given: changes go there")
    parser.add_argument("--backbone", help="which of the repository's (default: the only one)")


def check_state(state: Path | None) -> None:
    """For commands that only read: a folder that is not there is a mistake, and no state in which nothing has changed."""
    from hplm.errors import InvalidInput

    if state is not None and not state.is_dir():
        raise InvalidInput(f"--state {state} is no folder: name the one that `hplm serve --state` was given")


def open_manager(args: argparse.Namespace) -> Manager:
    from hplm.errors import InvalidInput
    from hplm.tenants.manager import Manager

    if args.state is None:
        raise InvalidInput("changes go to the live state: give --state DIR, the folder that `hplm serve --state DIR` was given")
    return Manager.open(args.repository, args.state, args.backbone)

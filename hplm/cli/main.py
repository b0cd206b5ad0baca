"""The entry point: collects our commands and those of other packages, runs one, and prints its result."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from functools import partial
from importlib.metadata import EntryPoint
from typing import NoReturn

from hplm import __version__
from hplm.errors import HplmError
from hplm.registered import COMMANDS, load, registered

# Each module registers its commands with `register(commands)`. A command sets `run=function(args) -> dict | None`. This
# function may set `args.status`, the exit status, where the result is not an error and scripts have to tell it.
# Heavy imports belong inside the run functions, so that `hplm --help` answers at once.
GROUPS = (
    *("build", "import_", "export", "begin", "serve", "watch", "drain", "route", "cluster", "doctor"),
    *("tenant", "root", "domain", "verify", "backup", "infer", "generate", "evaluate", "calibrate", "place"),
)
BUILDER = "builder"  # not everywhere that hplm is installed


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="hplm", description="Build, serve and change thousands of fine-tuned BERTs behind one Triton."
    )
    top.add_argument("--version", action="version", version=f"hplm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in GROUPS:
        importlib.import_module(f"hplm.cli.{group}").register(commands)
    for name, point in registered(COMMANDS).items():
        if name not in commands.choices:  # a command of ours cannot be replaced
            _register(name, point, commands)
    return top


def _register(name: str, point: EntryPoint, commands: argparse._SubParsersAction) -> None:
    """Registers a command of another package. If it cannot be imported, registers a command that says why."""
    try:
        load(point, f"`hplm {name}`")(commands)
    except HplmError as error:
        # The prefix "\0" makes argparse read options as words.
        absent = commands.add_parser(name, help="not installed here", add_help=False, prefix_chars="\0")
        absent.add_argument("words", nargs="*")
        absent.set_defaults(run=partial(_refuse, error))


def _refuse(error: HplmError, _: argparse.Namespace) -> NoReturn:
    raise error


def _calm_bars() -> None:
    """Lets progress bars write one line a second at most if nobody watches them. tqdm reads this when it is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "1")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    _calm_bars()
    try:
        result = args.run(args)
    except HplmError as error:
        print(f"hplm {args.command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a wrong path, no permission, a full disk
        what = f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror or error
        print(f"hplm {args.command}: {what}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name != BUILDER:
            raise
        way_out = "take a checkout of hplm and `pip install -e '.[build]'`"
        print(f"hplm {args.command}: the package `{BUILDER}` is not installed here: {way_out}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not _device_is_full(error):
            raise
        print(f"hplm {args.command}: {str(error).splitlines()[0]} Free some memory, or use --device cpu", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hplm {args.command}: interrupted", file=sys.stderr)
        return 130
    if result is not None and getattr(args, "json", False):
        print(json.dumps(result))
    return getattr(args, "status", 0)


def _device_is_full(error: RuntimeError) -> bool:
    """Whether torch raised this because a device is out of memory. Does not import torch."""
    return "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError)


if __name__ == "__main__":
    sys.exit(main())

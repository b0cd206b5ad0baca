"""Entry point: collects the groups, runs one command, prints its result."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from hplm import __version__
from hplm.errors import HplmError

# Each module registers its commands with `register(commands)`; a command sets `run=function(args) -> dict | None`.
# Heavy imports belong inside the run functions, so that `hplm --help` answers at once.
GROUPS = ("build", "import_", "export", "serve", "tenant", "domain", "verify", "backup", "infer", "evaluate", "bench")
# Our packages that need not be installed, as in the container image, and the extra of each in a checkout.
EXTRAS = {"builder": "build", "bench": "bench", "research": "build", "loadtest": "loadtest", "demo": "demo"}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="hplm", description="Build, serve and watch hierarchical multi-tenant BERTs.")
    top.add_argument("--version", action="version", version=f"hplm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in GROUPS:
        importlib.import_module(f"hplm.cli.{group}").register(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
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
        if error.name not in EXTRAS:
            raise
        way_out = f"in a checkout of hplm, pip install -e '.[{EXTRAS[error.name]}]'"
        print(f"hplm {args.command}: the package `{error.name}` is not installed: {way_out}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not _device_is_full(error):
            raise
        print(f"hplm {args.command}: {str(error).splitlines()[0]} Free some of it, or say --device cpu", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hplm {args.command}: interrupted", file=sys.stderr)
        return 130
    if result is not None and getattr(args, "json", False):
        print(json.dumps(result))
    return 0


def _device_is_full(error: RuntimeError) -> bool:
    """torch is there, if it raised it."""
    return "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError)


if __name__ == "__main__":
    sys.exit(main())

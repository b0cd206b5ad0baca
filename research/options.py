"""The research commands. cyclopts reads their options from signatures and dataclasses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError

from bench.run import apart
from hplm.errors import HplmError


def run(app: App, arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status."""
    words = apart(sys.argv[1:] if arguments is None else arguments)
    name = app.name[0].rpartition(".")[2]
    return ended(name, lambda: app(words, exit_on_error=False, print_error=False, result_action="return_value"))


def ended(name: str, call: Callable[[], int | None]) -> int:
    """Returns the exit status of a call: 1 if it fails, after its message."""
    try:
        return call() or 0
    except (HplmError, CycloptsError) as error:
        print(f"{name}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{name}: {error.filename}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; give the same command to continue", file=sys.stderr)
        return 130
    return 1

"""The research commands: cyclopts reads their options from signatures and dataclasses, and calls run side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from functools import partial
from typing import TypeVar

from cyclopts import App, CycloptsError

from bench.run import apart
from builder.worker_processes import worker_processes
from hplm.errors import HplmError

Result = TypeVar("Result")


def run(app: App, arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status."""
    call = partial(app, exit_on_error=False, print_error=False, result_action="return_value")
    return ended(app.name[0].rpartition(".")[2], lambda words: call(apart(words)), arguments)


def ended(name: str, call: Callable[[Sequence[str]], int | None], arguments: Sequence[str] | None = None) -> int:
    """Calls with the arguments, or those of the program. Returns the exit status: 1 if it fails, after its message."""
    try:
        return call(sys.argv[1:] if arguments is None else arguments) or 0
    except (HplmError, CycloptsError) as error:
        print(f"{name}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{name}: {error.filename}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; give the same command to continue", file=sys.stderr)
        return 130
    return 1


def results_of(calls: Sequence[Callable[[], Result]], at_once: int) -> Iterator[tuple[int, Result]]:
    """Yields the place of each call and its result, as they end. Several at once have a process each."""
    if at_once == 1:
        yield from ((place, call()) for place, call in enumerate(calls))
        return
    with worker_processes(at_once) as pool:
        running = {pool.submit(call): place for place, call in enumerate(calls)}
        yield from ((running[done], done.result()) for done in as_completed(running))

"""The entry point: finds a command of ours or of another package, runs it, and prints its result.

A command is a function: its signature gives the options, its docstring the help. It prints for people, and returns what --json
prints, which all commands with a result have: a dict, or a dict and an exit status where the result is no error and scripts
have to tell it. Heavy imports belong inside the functions, so that `hplm --help` answers at once.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import UnusedCliTokensError

from hplm import __version__
from hplm.cli.options import read_whole_numbers
from hplm.errors import HplmError
from hplm.registered import BUILDING, COMMANDS, load, registered

GROUPS = BUILD, SERVE, CHANGE, ASK, PLACE = "Build a store", "Serve it", "Change what is served", "Ask", "Use many machines"
# Group, noun, help of the noun, and its functions by modules of `hplm.cli`. Without a noun, functions are commands themselves.
OURS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (BUILD, "build", "Build a backbone, a domain or a tenant.", {}),
    (BUILD, "root", "Copy a root to another machine or store, as one file.", {}),
    (SERVE, "", "", {"state": "begin", "serve": "serve", "watch": "watch drain", "doctor": "doctor"}),
    (SERVE, "", "", {"state": "verify backup restore"}),
    (CHANGE, "tenant", "List and change served tenants, their keys and limits.", {
        "tenant": "list_ show rollback delete apply limit compact log",
    }),
    (CHANGE, "tenant key", "Add, list and revoke API keys; a tenant without keys is open to everybody.", {
        "tenant": "key_add key_list key_revoke",
    }),
    (CHANGE, "domain", "List, inspect, add, update, roll back and delete domains, of a store or while they are served.", {
        "domain": "list_ rollback delete",
    }),
    (ASK, "", "", {"ask": "infer generate"}),
    (PLACE, "", "", {"route": "route"}),
    (PLACE, "place", "Find which tenants go on which devices.", {"place": "profile", "place_search": "search simulate"}),
)  # fmt: skip
# A thread that waits sleeps at once, for the sake of other programs. A server's do not: its products are short.
COMPUTING = {"build", "calibrate", "domain", "evaluate", "export", "import", "tenant"}
JSON = "--json"
BUILDER = "builder"  # not everywhere that hplm is installed


def application() -> App:
    """Returns all commands, of which none of ours is imported."""
    top = App(
        name="hplm",
        help="Build, serve and change thousands of fine-tuned models on one Triton. With --json results are a line of JSON.",
        version=f"hplm {__version__}",
        version_flags="--version",
        help_format="markdown",
        default_parameter=Parameter(consume_multiple=(1, None), negative=(), allow_repeating=True, show_default=_shown),
        group_commands=Group("Commands", sort_key=len(GROUPS)),
        group_arguments=Group("Arguments", sort_key=0),
        group_parameters=Group("Options", sort_key=1),
        result_action="return_value",
        config=read_whole_numbers,
    )
    groups = {title: Group(title, sort_key=number) for number, title in enumerate(GROUPS)}
    for number, (title, words, about, modules) in enumerate(OURS):
        *path, noun = words.split() or [""]
        above = top[path[0]] if path else top
        if noun:
            above.command(App(name=noun, help=about, version_flags=(), group=() if path else groups[title], sort_key=number))
        for module, functions in modules.items():
            for function in functions.split():
                verb = function.removeprefix(f"{noun}_").strip("_")
                more = {} if noun else {"group": groups[title], "sort_key": number}
                (above[noun] if noun else top).command(f"hplm.cli.{module}:{function}", name=verb, version_flags=(), **more)
    for name, point in registered(BUILDING).items():
        *path, verb = name.split(".")
        more = {} if path else {"group": groups[BUILD], "sort_key": len(OURS)}
        above = top[path[0]] if path else top
        try:
            import_module(point.module.partition(".")[0])  # the package alone, which imports nothing
            above.command(point.value, name=verb, version_flags=(), **more)
        except ModuleNotFoundError as error:
            above.command(_absent(verb, error, **more))
    for name, point in registered(COMMANDS).items():
        if name not in [*top]:  # a command of ours cannot be replaced
            _add(top, name, point)
    return top


def _add(top: App, name: str, point: EntryPoint) -> None:
    """Adds a command of another package. If it cannot be imported, adds a command that says why."""
    try:
        load(point, f"`hplm {name}`")(top)
    except HplmError as error:
        top.command(_absent(name, error))


def _absent(name: str, reason: Exception, **more: Any) -> App:
    """Returns a command that says why it is not here."""

    def absent(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        raise reason

    return App(name=name, help="not installed here", help_flags=(), version_flags=(), default_command=absent, **more)


def _shown(default: object) -> str | None:
    """Returns how a default is shown; None if help does not show it."""
    if default is None or default is False or default == ():
        return None
    if isinstance(default, tuple):
        return " ".join(str(_shown(one)) for one in default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def parsed(words: Iterable[str], app: App | None = None) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """Returns the function of a command and its arguments, also `json`. Raises a CycloptsError if they do not fit."""
    read = partial((app or application()).parse_args, exit_on_error=False, print_error=False)
    words = [*words]
    end = words.index("--") if "--" in words else len(words)
    own = [word for word in words[:end] if word != JSON] + words[end:]
    command, given, _ = read(own)
    as_json = own != words and _has_result(command)
    if own != words and not as_json:
        command, given, _ = read(words)  # refuses --json, or takes all words as they are
    given.apply_defaults()
    if as_json:
        given.arguments["json"] = True
    return command, given


def _has_result(command: Callable[..., Any]) -> bool:
    return not str(inspect.signature(command).return_annotation).startswith(("None", "tuple[None"))


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    name = f"hplm {words[0]}" if words else "hplm"
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "1")  # progress bars that nobody watches write one line a second at most
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a file's name may be no UTF-8
    if {*words[:1]} & COMPUTING:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it when it is imported
    try:
        return _run(words)
    except CycloptsError as error:
        command = " ".join(("hplm", *(error.command_chain or ())))
        print(f"{command}: {usage(error)} See `{command} --help`", file=sys.stderr)
        return 2
    except HplmError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except OSError as error:  # a wrong path, no permission, a full disk
        what = f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror or error
        print(f"{name}: {what}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name != BUILDER:
            raise
        way_out = "take a checkout of hplm and `pip install -e '.[build]'`"
        print(f"{name}: the package `{BUILDER}` is not installed here: {way_out}", file=sys.stderr)
    except RuntimeError as error:
        if "torch" not in sys.modules or not isinstance(error, sys.modules["torch"].OutOfMemoryError):
            raise  # it is no full device
        print(f"{name}: {str(error).splitlines()[0]} Free some memory, or use --device cpu", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return 1


def _run(words: list[str]) -> int:
    """Runs a command and prints its result. Returns the exit status."""
    app = application()
    command, given = parsed(words, app)
    if getattr(command, "__func__", None) is App.help_print:
        _import_all(app, "hplm")
        command(*given.args, **given.kwargs)
        return 0 if {"--help", "-h"} & {*words} else 2
    as_json = given.arguments.get("json")
    with redirect_stdout(io.StringIO()) if as_json else nullcontext():
        result = command(*given.args, **given.kwargs)
    result, status = result if isinstance(result, tuple) else (result, 0)
    if as_json:
        print(json.dumps(result))
    return status


def _import_all(app: App, words: str) -> None:
    """Imports all commands, because help shows what their docstrings say. Says how each is called, without types."""
    for name in app:
        _import_all(app[name], f"{words} {name}")
    if callable(app.default_command):
        known = inspect.signature(app.default_command).parameters.values()
        places = [one.name.upper() for one in known if one.kind is inspect.Parameter.POSITIONAL_ONLY]
        json = [f"[{JSON}]"] if _has_result(app.default_command) else []
        app.usage = " ".join(["Usage:", words, *places, "[OPTIONS]", *json])


def usage(error: CycloptsError) -> str:
    """Returns what is wrong with the words, in one line."""
    if isinstance(error, UnusedCliTokensError):
        return f"no place for {' '.join(error.unused_tokens or ())!r}."
    text = " ".join(str(error).split())
    text = text if text.endswith((".", "?")) else f"{text}."
    return text.removeprefix(f'Command "{" ".join(error.command_chain or ())}" parameter ')


if __name__ == "__main__":
    sys.exit(main())

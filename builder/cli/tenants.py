"""`hplm build tenants`: many tenants by one command, a line of a file each."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import CycloptsError

from builder.cli.build import check_tenant, tenant
from builder.cli.options import SOME_REFUSED, AtOnce, PartOption, RayAddress, open_store, workers
from builder.part import WHOLE
from hplm.cli.options import Device, StoreFolder, about
from hplm.errors import HplmError, InvalidInput

if TYPE_CHECKING:
    from builder.store.store import Store

Lines = Sequence[tuple[str, dict[str, Any]]]  # tenants with their options
PAGE = "tenants.html"
FILE = "file with one JSON object a line, a tenant each: docs/training.md"
# Options that a line does not have, and why.
OF_ALL = dict.fromkeys(("store", "device", "json"), "it is an option of the command, for all lines")
NOT_HERE = {**OF_ALL, "fresh": "the command may be given again, and would train anew each time; `hplm build tenant` takes it"}


def tenants(
    file: Annotated[Path, about(FILE)], /, *, store: StoreFolder, at_once: AtOnce = None, ray: RayAddress = None,
    part: PartOption = WHOLE, device: Device = "auto",
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Train many tenants, each as `hplm build tenant` does.

    A wrong line is refused before anything is trained. A tenant that cannot be built is named, and the others go on. The same
    command after an interruption goes on, and then changes nothing.
    """
    from builder.console import progress_bar, say
    from builder.page import tenants_page
    from builder.worker_processes import outcomes

    opened = open_store(store)
    lines, page = part.among(read_tenants(file, opened, device)), opened.folder / part.page(PAGE)
    answers, refused = dict[str, dict[str, Any]](), dict[str, str]()
    with (
        workers(at_once, ray, opened, _domains(opened, lines), _models(opened, lines), device) as pool,
        progress_bar(outcomes(pool, built, opened.interrupted_last(lines)), "building", total=len(lines), unit="tenant") as bar,
    ):
        for (name, _), found in bar:
            if isinstance(found, str):
                refused[name] = found
                say(f"tenant {name} refused: {found}")
                continue
            answers[name] = found
            if found["is_new"]:
                say(f"{found['said']}tenant {name} version {found['version']}: {_score(found)}")
    tenants_page(page, [_row(answers[name]) for name in sorted(answers)], refused)
    new = sum(answer["is_new"] for answer in answers.values())
    same = len(answers) - new
    print(f"tenants built: {new}; left as they are: {same}; refused: {len(refused)}; {page}")
    told = {
        name: {"version": one["version"], "new": one["is_new"], "score": _score(one)} for name, one in sorted(answers.items())
    }
    return {"built": told, "refused": refused, "page": str(page)}, SOME_REFUSED if refused else 0


def built(name: str, options: Mapping[str, Any]) -> dict[str, Any] | str:
    """Builds a tenant by the options of `tenant`. Returns what that does, or why the tenant is refused."""
    from builder.console import no_progress_bars

    before = open_store(options["store"]).tenant_versions(name)
    said = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said), no_progress_bars():
            answer = tenant(**options)
    except HplmError as error:
        return str(error)
    return {**answer, "is_new": answer["version"] not in before, "said": said.getvalue()}


def read_tenants(file: Path, store: Store, device: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the tenants that a file names, with their arguments of `tenant`. Refuses a wrong line by its number."""
    from hplm.cli.main import application, parsed, usage

    app, found = application(), dict[str, tuple[int, dict[str, Any]]]()
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            words = ["build", "tenant", f"--store={store.folder}", f"--device={device}", *_words(line)]
            command, given = parsed(words, app)
            if command is not tenant:
                raise InvalidInput("help and version are no options of a tenant: leave them out")
            options = _beside(file.parent, given.arguments)
            check_tenant(store, **{name: options[name] for name in options.keys() - {*OF_ALL, "seed"}})
            if (name := options["id"]) in found:
                raise InvalidInput(f"line {found[name][0]} has the tenant {name!r} too: give each tenant one line")
        except CycloptsError as error:
            raise InvalidInput(f"line {number} of {file}: {usage(error)} See `hplm build tenant --help`") from None
        except HplmError as error:
            raise InvalidInput(f"line {number} of {file}: {error}") from None
        found[name] = number, options
    if not found:
        raise InvalidInput(f'{file} names no tenant: give a line such as {{"id": "acme", "task": "classify", "train": FILE}}')
    return [(name, options) for name, (_, options) in found.items()]


def _words(line: bytes) -> Sequence[str]:
    """Returns the options of a line as words of a command."""
    try:
        given = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"it is not JSON ({error})") from None
    if not isinstance(given, dict):
        raise InvalidInput('it is no object: give {"id": ..., "task": ..., "train": ...}')
    words = list[str]()
    for name, value in given.items():
        if name in NOT_HERE:
            raise InvalidInput(f"leave {name!r} out: {NOT_HERE[name]}")
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str | int | float) for one in values) and value is not None:
            raise InvalidInput(f"{name!r} is {value!r}: give a text, a number, true, false, null or a list of these")
        option = f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            words.append(option if value is True else f"{option}={','.join(map(str, values))}")
    return words


def _beside(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with paths from the folder of their file."""
    paths = {name: folder / path for name in ("train", "dev") if (path := options[name]) is not None}
    training = options["training"]
    if training.teacher is not None:
        paths["training"] = replace(training, teacher=folder / training.teacher)
    return {**options, **paths}


def _domains(store: Store, lines: Lines) -> set[str]:
    known = ((options["domain"], store.tenant(name)) for name, options in lines)
    return {domain or (tenant.domain if tenant is not None else "root") for domain, tenant in known}


def _models(store: Store, lines: Lines) -> list[Path]:
    """Returns the original model if one of the tenants has a teacher, which comes from it."""
    return [Path(store.model)] if any(options["training"].teacher for _, options in lines) else []


def _score(answer: Mapping[str, Any]) -> str:
    dev = answer.get("dev")
    return f"{dev['metric']} {dev[dev['metric']]:.3f} on {dev['texts']} dev texts" if dev else "not trained"


def _row(answer: Mapping[str, Any]) -> dict[str, Any]:
    facts = {"tenant": answer["tenant"], "version": answer["version"], "task": answer["task"]}
    return {**facts, "score": _score(answer), "warnings": "; ".join(answer.get("warnings", ()))}

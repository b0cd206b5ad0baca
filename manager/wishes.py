"""Reads what a request for a job says about the training, or about a domain."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hplm.tenants.snapshot import NAME
from hplm_openai.errors import wrong
from hplm_openai.fields import Given, check_no_other, shown

AUTO = "auto"
LONGEST_METADATA = (16, 64, 512)  # entries, and characters of a name and of a value, as OpenAI has it
PROMOTES = ("better", "never", "always")
MOST_IMPORTED = 32  # files
USUAL: dict[str, Any] = {"seed": 0, "best": False, "fresh": False, "promote": PROMOTES[0], "new_labels": False, "import": []}
Form = tuple[Callable[[Any], bool], str]  # whether a value is right, and what to give


def wishes_in(given: Given) -> dict[str, Any]:
    """Takes what a request says about the training."""
    hyper, ours = _hyperparameters(given), _object("hplm", given.pop("hplm", None))
    found = _taken(given, COMMON) | _taken(hyper, HYPERPARAMETERS) | _taken(ours, OURS)
    if found["least"] is not None and not found["import"]:
        raise wrong("'least' is of imports: leave it out", "least")
    if found["fresh"] and found["from_version"] is not None:
        raise wrong("'fresh' stands beside 'from_version': a training begins once, so leave one out", "fresh")
    for left in (hyper, ours):
        check_no_other(left)
    return found


def domain_wishes_in(given: Given) -> dict[str, Any]:
    """Takes what a request says about a domain. Options that are not given are those of the command."""
    options = {name: value for name, value in _taken(given, DOMAIN_OPTIONS).items() if value is not None}
    return {**_taken(given, COMMON), "import": [], "options": options}


def _hyperparameters(given: Given) -> Given:
    """Takes them from where OpenAI has them now, or had them before."""
    method, hyper = given.pop("method", None), given.pop("hyperparameters", None)
    match method:
        case None:
            own = {}
        case {"type": "supervised", **more} if not more or [*more] == ["supervised"]:
            own = more.get("supervised") or {}
        case _:
            raise wrong(f"'method' is {shown(method)}: only the type 'supervised' is supported", "method")
    if not isinstance(own, dict) or own.keys() - {"hyperparameters"} or (hyper and own.get("hyperparameters")):
        raise wrong("'method' has more than 'hyperparameters', or they stand beside it too: give them once", "method")
    found = _object("hyperparameters", own.get("hyperparameters") or hyper)
    return {name: value for name, value in found.items() if value != AUTO}


def _object(name: str, value: Any) -> Given:
    if not isinstance(value or {}, dict):
        raise wrong(f"{name!r} is {shown(value)}: give an object", name)
    return {name: one for name, one in (value or {}).items() if one is not None}


def _taken(given: Given, known: Mapping[str, Form]) -> dict[str, Any]:
    """Takes these fields. A value that is not right is refused."""
    for name, (is_right, form) in known.items():
        if name in given and not is_right(given[name]):
            raise wrong(f"{name!r} is {shown(given[name])}: give {form}", name)
    return {name: given.pop(name, USUAL.get(name)) for name in known}


def _number(least: float, most: float, form: str) -> Form:
    return lambda value: type(value) in (int, float) and least <= value <= most, form


def _whole(least: int, most: int) -> Form:
    return lambda value: type(value) is int and least <= value <= most, f"a whole number from {least:,} to {most:,}"


def _one_of(*values: Any) -> Form:
    return lambda value: value in values, " or ".join(map(repr, values))


def _matching(form: re.Pattern[str], said: str) -> Form:
    return lambda value: isinstance(value, str) and form.fullmatch(value) is not None, said


def _is_metadata(value: Any) -> bool:
    entries, name, text = LONGEST_METADATA
    is_right = isinstance(value, Mapping) and len(value) <= entries
    return is_right and all(len(key) <= name and isinstance(one, str) and len(one) <= text for key, one in value.items())


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MOST_IMPORTED and all(isinstance(id, str) for id in value)


FLAG: Form = lambda value: type(value) is bool, "true or false"
COMMON: dict[str, Form] = {
    "seed": _whole(0, 2**31 - 1),
    "metadata": (_is_metadata, "an object of up to 16 texts, with names of up to 64 characters, and texts of up to 512"),
}
HYPERPARAMETERS: dict[str, Form] = {
    "n_epochs": _whole(1, 100),
    "batch_size": _one_of(AUTO),  # it is chosen here
    "learning_rate_multiplier": _number(1e-3, 1e3, "a number from 0.001 to 1,000"),
}
OURS: dict[str, Form] = {
    "task": _matching(re.compile("[a-z]{1,20}"), "one such as classify"),
    "best": FLAG,
    "fresh": FLAG,
    "promote": _one_of(*PROMOTES),
    "new_labels": FLAG,
    "import": (_are_ids, f"a list of ids of up to {MOST_IMPORTED} files"),
    "least": _number(0, 1, "the share of answers that must be the checkpoint's, 0 to 1"),
    "from_version": _whole(1, 2**31 - 1),
}
DOMAIN_OPTIONS: dict[str, Form] = {  # of `hplm build domain`
    "parent": _matching(NAME, "the name of a domain"),
    "learn": _one_of("masked", "distil", "next"),
    "minutes": _number(0, 10_000, "a number from 0 to 10,000"),
    "steps": _whole(0, 10**9),
    "keep": _number(0, 1, "a share, 0 to 1"),
    "min_tokens": _whole(0, 10**12),
}

"""Reads what a request for a job says about the training, or about a domain."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hplm.tenants.snapshot import NAME
from hplm_openai.errors import wrong
from hplm_openai.fields import Given, check_no_other, choice, flag, shown, whole

AUTO = "auto"
LONGEST_METADATA = (16, 64, 512)  # entries, and characters of a name and of a value, as OpenAI has it
PROMOTES = ("better", "never", "always")
MOST_IMPORTED = 32  # files


def wishes_in(given: Given) -> dict[str, Any]:
    """Takes what a request says about the training."""
    method, hyper = given.pop("method", None), given.pop("hyperparameters", None)
    if method is not None:
        match method:
            case {"type": "supervised", **more} if not more or [*more] == ["supervised"]:
                own = more.get("supervised") or {}
            case _:
                raise wrong(f"'method' is {shown(method)}: only the type 'supervised' is supported", "method")
        if not isinstance(own, dict) or own.keys() - {"hyperparameters"} or (hyper and own.get("hyperparameters")):
            raise wrong("'method' has more than 'hyperparameters', or they stand beside it too: give them once", "method")
        hyper = own.get("hyperparameters") or hyper
    ours = given.pop("hplm", None) or {}
    for name, value in (("hyperparameters", hyper or {}), ("hplm", ours)):
        if not isinstance(value, dict):
            raise wrong(f"{name!r} is {shown(value)}: give an object", name)
    hyper = {name: value for name, value in (hyper or {}).items() if value not in (None, AUTO)}
    ours = {name: value for name, value in ours.items() if value is not None}
    if "batch_size" in hyper:
        raise wrong("'batch_size' is chosen here: leave it out, or give 'auto'", "batch_size")
    rate = hyper.pop("learning_rate_multiplier", None)
    if rate is not None and (type(rate) not in (int, float) or not 1e-3 <= rate <= 1e3):
        said = f"'learning_rate_multiplier' is {shown(rate)}: give a number from 0.001 to 1,000"
        raise wrong(said, "learning_rate_multiplier")
    task = ours.pop("task", None)
    if task is not None and not (isinstance(task, str) and re.fullmatch("[a-z]{1,20}", task)):
        raise wrong(f"'task' is {shown(task)}: give one such as classify", "hplm")
    epochs = _counted(hyper, "n_epochs", 100)
    found = {
        **_usual(given), "n_epochs": epochs, "learning_rate_multiplier": rate,
        "task": task, "best": flag(ours, "best"), "fresh": flag(ours, "fresh"), "promote": choice(ours, "promote", *PROMOTES),
        "new_labels": flag(ours, "new_labels"), "import": _ids(ours), "least": _least(ours),
        "from_version": whole(ours, "from_version", 1),
    }  # fmt: skip
    if found["least"] is not None and not found["import"]:
        raise wrong("'least' is of imports: leave it out", "hplm")
    if found["fresh"] and found["from_version"] is not None:
        raise wrong("'fresh' stands beside 'from_version': a training begins once, so leave one out", "hplm")
    for left in (hyper, ours):
        check_no_other(left)
    return found


def domain_wishes_in(given: Given) -> dict[str, Any]:
    """Takes what a request says about a domain. Options that are not given are those of the command."""
    options = {name: given.pop(name) for name in DOMAIN_OPTIONS if name in given}
    for name, value in options.items():
        is_right, form = DOMAIN_OPTIONS[name]
        if not is_right(value):
            raise wrong(f"{name!r} is {shown(value)}: give {form}", name)
    return {**_usual(given), "import": [], "options": options}


def _usual(given: Given) -> dict[str, Any]:
    """Takes what every request for a job may have."""
    _check_metadata(metadata := given.pop("metadata", None))
    return {"seed": whole(given, "seed", 0) or 0, "metadata": metadata}


def _is_number(least: float, most: float, *kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds and least <= value <= most


def _ids(given: Given) -> list[str]:
    """Takes the ids of a checkpoint's files; none: it is no import."""
    found = given.pop("import", None)
    if found is None:
        return []
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_IMPORTED or not all(isinstance(id, str) for id in found):
        raise wrong(f"'import' is {shown(found)}: give a list of ids of up to {MOST_IMPORTED} files", "hplm")
    return found


def _least(given: Given) -> float | None:
    found = given.pop("least", None)
    if found is not None and (type(found) not in (int, float) or not 0 <= found <= 1):
        raise wrong(f"'least' is {shown(found)}: give the share of answers that must be the checkpoint's, 0 to 1", "hplm")
    return found


def _counted(given: Given, name: str, most: int) -> int | None:
    value = whole(given, name, 1)
    if value is not None and value > most:
        raise wrong(f"{name!r} is {value:,}: give {most} at most", name)
    return value


def _check_metadata(given: Any) -> None:
    entries, name, value = LONGEST_METADATA
    if given is None:
        return
    is_right = isinstance(given, dict) and len(given) <= entries
    if not is_right or not all(len(key) <= name and isinstance(one, str) and len(one) <= value for key, one in given.items()):
        raise wrong(f"'metadata' is no object of up to {entries} texts, of up to {value} characters each", "metadata")


DOMAIN_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {  # of `hplm build domain`: what is right, and its form
    "parent": (lambda value: isinstance(value, str) and NAME.fullmatch(value) is not None, "the name of a domain"),
    "learn": (lambda value: value in ("masked", "distil", "next"), "masked, distil or next"),
    "minutes": (_is_number(0, 10_000, int, float), "a number from 0 to 10,000"),
    "steps": (_is_number(0, 10**9, int), "a whole number from 0 to 1,000,000,000"),
    "keep": (_is_number(0, 1, int, float), "a share, 0 to 1"),
    "min_tokens": (_is_number(0, 10**12, int), "a whole number from 0 to 1,000,000,000,000"),
}

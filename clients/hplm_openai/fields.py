"""Reads what all requests have: their key, their model, and fields of one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hplm_openai.errors import Refused, wrong

LONGEST_NAME = 256  # characters of a model's name
MOST_TEXTS = 2048  # of one request, as OpenAI has it
# Fields that no answer depends on here, which are not read.
IGNORED = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity", "prompt_cache_key",
    "safety_identifier",
}  # fmt: skip


def key_in(headers: list[str]) -> str | None:
    """Returns the key of a request, from its `authorization` headers. None: it has none."""
    if not headers:
        return None
    scheme, _, key = headers[0].strip().partition(" ")
    key = key.strip()
    if len(set(headers)) > 1 or scheme.lower() != "bearer" or not (key.isascii() and key.isprintable()):
        raise Refused(401, "the header authorization is not 'Bearer KEY': send it so, once", "invalid_api_key")
    return key or None


def given_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that were given. As with OpenAI, null is as good as nothing."""
    return {name: value for name, value in body.items() if value is not None and name not in IGNORED}


def check_model(model: Any, way: str = "") -> None:
    """Raises if this is no tenant's name. `way`: another one to name it."""
    if not isinstance(model, str) or not 0 < len(model) <= LONGEST_NAME or "\0" in model:  # Triton would end it there
        raise wrong(f"the model is no name: send the name of a tenant, such as GET /v1/models lists{way}", "model")


def deadline_in(given: dict[str, Any]) -> float | None:
    """Takes the milliseconds that the whole answer may take."""
    value = given.pop("deadline_ms", None)
    if value is not None and (type(value) not in (int, float) or not 0 < value <= 1e9):
        raise wrong(f"'deadline_ms' is {shown(value)}: give milliseconds above 0, 1,000,000,000 at most", "deadline_ms")
    return value


def priority_in(given: dict[str, Any]) -> int | None:
    value = given.pop("priority", None)
    if value is not None and (type(value) is not int or not -(2**31) <= value < 2**31):
        raise wrong(f"'priority' is {shown(value)}: give a whole number of 32 bits", "priority")
    return value


def texts(given: dict[str, Any], name: str) -> list[str]:
    """Takes a text, or a list of texts."""
    value = given.pop(name, None)
    found = value if isinstance(value, list) else [value]
    if not 0 < len(found) <= MOST_TEXTS or not all(isinstance(one, str) for one in found):
        raise wrong(f"{name!r} is no text, and no list of 1 to {MOST_TEXTS:,} texts: send that", name)
    return found


def text(given: dict[str, Any], name: str) -> str:
    value = given.pop(name, None)
    if not isinstance(value, str):
        raise wrong(f"{name!r} is no text: send one", name)
    return value


def whole(given: dict[str, Any], name: str, least: int) -> int | None:
    """Takes a whole number of this or more; None if it was not given."""
    value = given.pop(name, None)
    if value is not None and (type(value) is not int or value < least):
        raise wrong(f"{name!r} is {shown(value)}: give a whole number from {least} on", name)
    return value


def flag(given: dict[str, Any], name: str, otherwise: bool = False) -> bool:
    value = given.pop(name, otherwise)
    if type(value) is not bool:
        raise wrong(f"{name!r} is {shown(value)}: give true or false", name)
    return value


def unknown(name: str, way: str) -> Refused:
    """Returns the refusal of a field."""
    return wrong(f"the field {shown(name)} is unknown, or not supported with this value: {way}", name[:LONGEST_NAME])


def shown(value: Any) -> str:
    """Returns a value for a message, or its beginning."""
    shown = repr(value)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}..."

"""Reads the fields of a request. Each function takes one of those that were given; what is left is unknown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hplm_client.answer import Answer
from hplm_openai.errors import Refused, wrong

LONGEST_NAME = 256  # characters of a model's name
MOST_TEXTS = 2048  # of one request, as OpenAI has it
# Fields that no answer depends on here. Of them only `model` is read, before all others.
IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity",
    "prompt_cache_key", "safety_identifier",
}  # fmt: skip
# Values that ask for nothing. Those from the third line on are vLLM's, TEI's, and Hugging Face's.
NEUTRAL: dict[str, list[Any]] = {
    "best_of": [1], "suffix": [""], "stop": [""], "modalities": [["text"]], "response_format": [{"type": "text"}],
    "tools": [[]], "functions": [[]], "tool_choice": ["none", "auto"],
    "skip_special_tokens": [True], "add_generation_prompt": [True], "add_special_tokens": [True], "padding": ["do_not_pad"],
    "truncation_side": ["right"], "truncation_direction": ["right", "Right"], "handle_impossible_answer": [True, False],
}  # fmt: skip
TOOLS = {"tools", "tool_choice", "functions", "function_call"}
Given = dict[str, Any]
Ask = Callable[..., Awaitable[list[Answer]]]  # asks a tenant; takes arguments of our client's `infer_batch`


def key_in(headers: list[str]) -> str | None:
    """Returns the key of a request, from its `authorization` headers. None: it has none."""
    if not headers:
        return None
    scheme, _, key = headers[0].strip().partition(" ")
    key = key.strip()
    if len(set(headers)) > 1 or scheme.lower() != "bearer" or not (key.isascii() and key.isprintable()):
        raise Refused(401, "the header authorization is not 'Bearer KEY': send it so, once", "invalid_api_key")
    return key or None


def check_model(model: Any, way: str = "") -> None:
    """Raises if this is no tenant's name. `way`: another one to name it."""
    if not isinstance(model, str) or not 0 < len(model) <= LONGEST_NAME or "\0" in model:  # Triton would end it there
        raise wrong(f"the model is no name: send the name of a tenant, such as GET /v1/models lists{way}", "model")


def given_in(body: Mapping[str, Any]) -> Given:
    """Returns the fields that were given, and ask for something. As with OpenAI, null is as good as nothing."""
    return {
        name: value
        for name, value in body.items()
        if value is not None and name not in IGNORED and value not in NEUTRAL.get(name, [])
    }


def check_no_other(given: Given) -> None:
    """Raises if there is a field that nobody has taken."""
    for name in given:
        way = "describe the answer by 'response_format' instead" if name in TOOLS else "leave it out"
        raise wrong(f"the field {shown(name)} is unknown, or not supported with this value: {way}", name[:LONGEST_NAME])


def ours(given: Given) -> dict[str, Any]:
    """Takes what every request may have besides the fields of its interface: arguments of our client."""
    deadline_ms = given.pop("deadline_ms", None)
    if deadline_ms is not None and (type(deadline_ms) not in (int, float) or not 0 < deadline_ms <= 1e9):
        raise wrong(f"'deadline_ms' is {shown(deadline_ms)}: give milliseconds above 0, 1,000,000,000 at most", "deadline_ms")
    truncates = [flag(given, "truncate"), choice(given, "truncate_prompt_tokens", None, -1) == -1]  # the latter is vLLM's
    return {"deadline_ms": deadline_ms, "truncate": any(truncates), "priority": whole(given, "priority", -(2**31))}


def texts(given: Given, name: str) -> list[str]:
    """Takes a text, or a list of texts."""
    value = given.pop(name, None)
    found = value if isinstance(value, list) else [value]
    if not 0 < len(found) <= MOST_TEXTS or not are_texts(found):
        raise wrong(f"{name!r} is no text, and no list of 1 to {MOST_TEXTS:,} texts: send that", name)
    return found


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def text(given: Given, name: str) -> str:
    value = given.pop(name, None)
    if not isinstance(value, str):
        raise wrong(f"{name!r} is no text: send one", name)
    return value


def whole(given: Given, name: str, least: int) -> int | None:
    """Takes a whole number of 32 bits, this or more; None if it was not given."""
    value = given.pop(name, None)
    if value is not None and (type(value) is not int or not least <= value < 2**31):
        raise wrong(f"{name!r} is {shown(value)}: give a whole number from {least:,} to {2**31 - 1:,}", name)
    return value


def flag(given: Given, name: str, otherwise: bool = False) -> bool:
    value = given.pop(name, otherwise)
    if type(value) is not bool:
        raise wrong(f"{name!r} is {shown(value)}: give true or false", name)
    return value


def choice(given: Given, name: str, *values: Any) -> Any:
    """Takes one of these values. The first is that of a request without the field."""
    value = given.pop(name, values[0])
    if value not in values:
        raise wrong(f"{name!r} is {shown(value)}: give {' or '.join(map(repr, values))}", name)
    return value


def shown(value: Any) -> str:
    """Returns a value for a message, or its beginning."""
    shown = repr(value)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}..."

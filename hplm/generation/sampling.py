"""Settings by which the tokens of an answer are chosen, as clients send them in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from hplm.errors import InvalidInput

MOST_CHOICES = 16
MOST_STOPS = 16
LONGEST_STOP = 256  # characters
MOST_BIASED = 1024
MOST_LOGPROBS = 20
MOST_TOKENS = 1 << 30
LARGEST_SEED = 2**63 - 1
GREEDY = 1e-5  # temperatures below it take the likeliest token, as in vLLM: they differ from it by rounding only


@dataclass(frozen=True)
class Sampling:
    """The names and meanings are those of vLLM and of OpenAI's completions."""

    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None  # None: another one for each request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1  # answers
    logprobs: int | None = None  # how many of the likeliest tokens are told with each token
    echo: bool = False  # the answer begins with the prompt

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def check_ids(self, vocabulary: int) -> None:
        """Raises if it names a token that the model does not have."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocabulary:
                    raise InvalidInput(f"{name!r} names token {token}, but the model has tokens 0 to {vocabulary - 1}")


def read_sampling(given: str | Mapping[str, Any] | None) -> Sampling:
    """Reads the settings of a request: JSON, or what JSON has become."""
    if given is None or given == "":
        return Sampling()
    read: Any = given
    if isinstance(given, str):
        try:
            read = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"the sampling parameters are not JSON: {error}") from None
    if not isinstance(read, Mapping):
        raise InvalidInput('the sampling parameters are no JSON object: send one such as {"temperature": 0.7}')
    values: dict[str, Any] = {}
    for name, value in cast("Mapping[str, Any]", read).items():
        reader = READERS.get(name)
        if reader is None:
            raise InvalidInput(f"unknown sampling parameter {name!r}: choose of {', '.join(READERS)}")
        if value is not None:  # as in OpenAI's interface, null is the default
            values[name] = reader(name, value)
    sampling = Sampling(**values)
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidInput(
            f"'min_tokens' is {sampling.min_tokens}, more than 'max_tokens', which is {sampling.max_tokens}: "
            "lower the one or raise the other"
        )
    return sampling


def sampling_of(parameters: Mapping[str, Any], json: str | None) -> Sampling:
    """Returns how tokens are chosen: as the JSON text says or, without one, parameters with the names of the settings."""
    named = {name: value for name, value in parameters.items() if name in READERS}
    if json is None:
        return read_sampling(named)
    if named:
        raise InvalidInput(f"parameter {next(iter(named))!r} stands beside 'sampling_parameters': put it in there")
    return read_sampling(json)


Reader = Callable[[str, Any], Any]
S = TypeVar("S", bound=Sized)


def _number(least: float, most: float, above: bool = False) -> Reader:
    """Reads a number from `least` to `most`. `above`: `least` itself is too low."""

    def read(name: str, value: Any) -> float:
        # A comparison with NaN is false.
        if type(value) not in (int, float) or not (least < value <= most if above else least <= value <= most):
            raise _wrong(name, value, f"a number {f'above {least:g}' if above else f'of at least {least:g}'}, {most:g} at most")
        return float(value)

    return read


def _whole(least: int, most: int) -> Reader:
    def read(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(name, value, f"a whole number from {least} to {most}")
        return value

    return read


def _top_k(name: str, value: Any) -> int:
    """Reads -1, which vLLM's clients send for all tokens, as 0."""
    return max(0, _whole(-1, MOST_TOKENS)(name, value))


def _switch(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong(name, value, "true or false")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = _some(name, cast("list[Any]", value) if isinstance(value, list) else [value], MOST_STOPS, "strings")
    if not all(isinstance(stop, str) for stop in stops):
        raise _wrong(name, value, "a string or a list of strings")
    if "" in stops:
        raise InvalidInput(f"{name!r} has an empty string, which every text contains: leave it out")
    if (longest := max(map(len, stops), default=0)) > LONGEST_STOP:
        raise InvalidInput(f"{name!r} has a string of {longest} characters: give {LONGEST_STOP} at most")
    return tuple(stops)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ids = cast("list[Any]", value) if isinstance(value, list) else None
    if ids is None or any(type(token) is not int for token in ids):
        raise _wrong(name, value, "a list of token ids")
    return tuple(_some(name, ids, MOST_BIASED, "ids"))


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object of token ids and numbers")
    bias: dict[int, float] = {}
    for token, amount in _some(name, cast("dict[Any, Any]", value), MOST_BIASED, "ids").items():
        if re.fullmatch("[0-9]{1,18}", str(token)) is None:
            raise _wrong(name, token, "an object whose names are token ids")
        bias[int(token)] = _number(-100, 100)(name, amount)
    return bias


def _some(name: str, values: S, most: int, what: str) -> S:
    if len(values) > most:
        raise InvalidInput(f"{name!r} has {len(values)} {what}: give {most} at most")
    return values


def _wrong(name: str, value: Any, wanted: str) -> InvalidInput:
    return InvalidInput(f"{name!r} is {value!r}: give {wanted}")


READERS: dict[str, Reader] = {
    "temperature": _number(0, 100),
    "top_k": _top_k,
    "top_p": _number(0, 1, above=True),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),  # logits are divided by it, and must not overflow
    "logit_bias": _bias,
    "seed": _whole(-LARGEST_SEED - 1, LARGEST_SEED),
    "stop": _stops,
    "stop_token_ids": _ids,
    "ignore_eos": _switch,
    "max_tokens": _whole(1, MOST_TOKENS),
    "min_tokens": _whole(0, MOST_TOKENS),
    "n": _whole(1, MOST_CHOICES),
    "logprobs": _whole(0, MOST_LOGPROBS),
    "echo": _switch,
}
assert READERS.keys() == {one.name for one in fields(Sampling)}

"""Settings by which the tokens of an answer are chosen, as clients send them in JSON, and the numbers of their draws.

A draw takes one uniform number, from a seed and the token's place. So company and timing never change it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from hplm.arrays import Array
from hplm.errors import InvalidInput

MOST_SHOWN = 80  # characters of a wrong value
GREEDY = 1e-5  # temperatures below it take the likeliest token, as in vLLM: they differ from it by rounding only
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LONGEST_GRAMMAR = 65_536  # characters of a schema in JSON
BITS = 24  # as many as a float of 32 bits holds exactly

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Choice = Annotated[str, Meta(min_length=1, max_length=1024)]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what the text of an answer may be: one of these is given. The names are vLLM's."""

    json: dict[str, Any] | None = None  # JSON that this schema allows
    json_object: bool = False
    regex: Annotated[str, Meta(min_length=1, max_length=LONGEST_GRAMMAR)] | None = None
    choice: Annotated[tuple[Choice, ...], Meta(max_length=256)] = ()

    def __post_init__(self) -> None:
        if [self.json is not None, self.json_object, self.regex is not None, bool(self.choice)].count(True) != 1:
            raise ValueError("give one of 'json', 'json_object', 'regex' and 'choice'")
        if self.json is not None and (length := len(json.dumps(self.json))) > LONGEST_GRAMMAR:
            raise ValueError(f"the schema has {length:,} characters: give {LONGEST_GRAMMAR:,} at most")


@dataclass(frozen=True)
class Sampling:
    """The names and meanings are those of vLLM and of OpenAI's completions. The types bound what clients may send."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0  # 0: the likeliest token
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] = 0  # 0: all tokens
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0  # logits are divided by it, and must not overflow
    logit_bias: Annotated[Mapping[int, Bias], Meta(max_length=1024)] = field(default_factory=dict[int, float])
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # None: another one for each request
    stop: Annotated[tuple[Stop, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=1024)] = ()
    ignore_eos: bool = False
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] = 16
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    n: Annotated[int, Meta(ge=1, le=16)] = 1  # answers
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # how many of the likeliest tokens are told with each token
    echo: bool = False  # the answer begins with the prompt; with `logprobs`, its tokens are told too
    structured_outputs: StructuredOutputs | None = None  # None: any text

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    def check_ids(self, vocabulary: int, end_ids: Sequence[int]) -> None:
        """Raises if it names a token that the model does not have, or leaves none to choose."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocabulary:
                    raise InvalidInput(f"{name!r} names token {token}, but the model has tokens 0 to {vocabulary - 1}")
        if self.min_tokens and len({*end_ids, *self.stop_token_ids}) == vocabulary:
            raise InvalidInput(
                f"'min_tokens' is {self.min_tokens}, but 'stop_token_ids' leaves no token to choose: leave out one of the two"
            )


SETTINGS: dict[str, Any] = get_type_hints(Sampling, include_extras=True)
SETTINGS["stop"] |= Stop  # clients may send one alone


def sampling_of(parameters: Mapping[str, Any], given: str | None) -> Sampling:
    """Returns how tokens are chosen, as JSON and parameters with the names of the settings say. Both may say the same."""
    values = _values(_object(given)) if given else dict[str, Any]()
    for name, value in _values({name: value for name, value in parameters.items() if name in SETTINGS}).items():
        if values.setdefault(name, value) != value:
            raise InvalidInput(
                f"parameter {name!r} is {parameters[name]!r}, but 'sampling_parameters' has {values[name]!r}: send one of them"
            )
    sampling = Sampling(**values)
    sampling = replace(sampling, top_k=max(0, sampling.top_k))  # vLLM's clients send -1 for all tokens
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidInput(
            f"'min_tokens' is {sampling.min_tokens}, more than 'max_tokens', which is {sampling.max_tokens}: "
            "lower the one or raise the other"
        )
    if sampling.min_tokens and sampling.structured_outputs is not None:
        raise InvalidInput(
            f"'min_tokens' is {sampling.min_tokens}, but 'structured_outputs' says where an answer may end: leave out one"
        )
    return sampling


def _object(given: str) -> Mapping[str, Any]:
    try:
        read: Any = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the sampling parameters are not JSON: {error}") from None
    if not isinstance(read, Mapping):
        raise InvalidInput('the sampling parameters are no JSON object: send one such as {"temperature": 0.7}')
    return cast("Mapping[str, Any]", read)


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are not null. Text may be a number or a truth value: some clients send all of them so."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in SETTINGS:
            raise InvalidInput(f"unknown sampling parameter {name!r}: choose of {', '.join(SETTINGS)}")
        try:
            if value is not None:  # as in OpenAI's interface, null is the default
                own = msgspec.convert(value, SETTINGS[name], str_keys=True, strict=not isinstance(value, str))
                values[name] = (own,) if name == "stop" and isinstance(own, str) else own
        except (msgspec.ValidationError, UnicodeError) as error:
            raise InvalidInput(f"{name!r} is {repr(value)[:MOST_SHOWN]}: {error}") from None
    return values


def mixed(numbers: Array) -> Array:
    """Returns 64 random bits for each number of 64 bits: the function `splitmix64` of Steele, Lea and Flood (2014)."""
    with np.errstate(over="ignore"):
        bits = numbers + GOLDEN
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


def seed_of(seed: int, choice: int) -> int:
    """Returns the seed of one answer of a request. The first answer has the request's own."""
    if not choice:
        return seed % 2**64
    own = np.array([seed % 2**64], dtype=np.uint64)
    return int(mixed(own ^ mixed(np.array([choice], dtype=np.uint64)))[0])


def uniform(seeds: Array, places: Array) -> Array:
    """Returns a number from 0 to below 1 for each pair of a seed and a place, float32."""
    bits = mixed(seeds.astype(np.uint64) ^ mixed(places.astype(np.uint64)))
    return (bits >> np.uint64(64 - BITS)).astype(np.float32) * np.float32(2.0**-BITS)

"""Generated text: what a client asks of a decoder, and what it gets."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hplm_client.answer import Tenant
from hplm_client.errors import InvalidInput, UnexpectedAnswer, expecting, refusal
from hplm_client.wire import (
    Tensors,
    Value,
    check_id,
    check_key,
    check_tenant,
    encoded,
    listing_of,
    parameters_of,
    tenants_in,
)

EVENT = b"data: "
UNIMPLEMENTED = 501
PROMPT, MESSAGES, OUTPUT, LOGPROBS = "text_input", "messages", "text_output", "logprobs"
# For each token: {"ID": {"logprob": -0.1, "decoded_token": "a"}, ...}. The token itself comes first, then the likeliest.
Logprobs = list[dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Piece:
    """A part of an answer. The parts of a choice come in order, and together they are the whole."""

    text: str
    choice: int = 0  # the number of the answer, of `n`
    finish_reason: str | None = None  # in the last part of a choice: stop, length, deadline or cancelled
    tokens: int = 0  # that this part adds
    logprobs: Logprobs | None = None  # of these tokens; only with the setting `logprobs`


@dataclass(frozen=True)
class Generated:
    """A whole answer: a text for each of `n` choices."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    generated_tokens: int
    logprobs: tuple[Logprobs, ...] | None = None  # of each choice; only with the setting `logprobs`

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def finish_reason(self) -> str:
        return self.finish_reasons[0]


class PromptLike(Protocol):
    """A request to a decoder over gRPC."""

    @property
    def key(self) -> str | None: ...

    @property
    def id(self) -> str | None: ...

    def inputs(self) -> dict[str, str | bool]: ...

    def parameters(self) -> dict[str, Value]: ...


Messages = Sequence[Mapping[str, str]]  # of a chat: each has a role and a content


@dataclass(frozen=True)
class Prompt:
    """One request for generated text: a text to go on with, or the messages of a chat."""

    text: str | None
    messages: Messages | None
    tenant: str
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stream: bool = False
    truncate: bool = False
    priority: int | None = None
    key: str | None = field(default=None, repr=False)
    id: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise InvalidInput("a request has either a prompt or messages: give one of them")
        if not isinstance(self.text, str | None):
            raise InvalidInput(f"the prompt is {type(self.text).__name__}: give str")
        check_tenant(self.tenant)
        check_key(self.key)
        check_id(self.id)
        self.parameters()  # checks them
        encoded("the prompt", self.text or "")
        try:
            encoded("a message", self._messages_json or "")
            json.dumps(self.sampling, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"messages or settings are no JSON ({error}): give dict, list, str and numbers") from error

    @property
    def _messages_json(self) -> str | None:
        return None if self.messages is None else json.dumps(self.messages, ensure_ascii=False)

    def inputs(self) -> dict[str, str | bool]:
        return inputs_of(self.text, self._messages_json, self.sampling, self.stream)

    def parameters(self) -> dict[str, Value]:
        return parameters_of(self.tenant, self.truncate, self.priority, {})

    def body(self, timeout_us: int | None, bearer: str | None) -> bytes:
        """Returns the body for Triton's `generate`, with the key: it forwards no headers to the model."""
        more = {"timeout": timeout_us, "authorization": bearer, "id": self.id}
        given = {name: value for name, value in more.items() if value is not None}
        return json.dumps({**self.inputs(), **self.parameters(), **given}).encode()


@dataclass(frozen=True)
class Listing(Prompt):
    """Asks a decoder for the tenants that the key opens, or for one of them."""

    text: str | None = ""
    messages: Messages | None = None
    tenant: str = ""  # all

    def __post_init__(self) -> None:
        check_key(self.key)

    def parameters(self) -> dict[str, Value]:
        return listing_of(self.tenant or None)


def inputs_of(text: str | None, messages: str | None, sampling: Mapping[str, Any], stream: bool) -> dict[str, str | bool]:
    """Returns the inputs of a decoder for one request. Either `text` or `messages` (JSON) is given."""
    inputs: dict[str, str | bool] = {"stream": stream, "exclude_input_in_output": True}
    inputs |= dict.fromkeys(("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True)
    if text is not None:
        inputs[PROMPT] = text
    if messages is not None:
        inputs[MESSAGES] = messages
    if sampling:
        inputs["sampling_parameters"] = json.dumps(sampling)
    if sampling.get(LOGPROBS) is not None:
        inputs["return_logprobs"] = True
    return inputs


Outputs = Mapping[str, Any]  # the outputs of a response by name: lists, or alone where there is one value


def tensors_of(inputs: Mapping[str, str | bool]) -> dict[str, np.ndarray]:
    """Returns an input of one value for each."""
    tensors = {}
    for name, value in inputs.items():
        tensors[name] = np.empty([1], dtype=bool if isinstance(value, bool) else np.object_)
        tensors[name][...] = value if isinstance(value, bool) else value.encode()
    return tensors


def listed(result: Tensors, name: str) -> list[Any]:
    """Returns the values of an output."""
    values = result.as_numpy(name)
    if values is None:
        raise UnexpectedAnswer(f"output {name} is missing: is this a decoder of hPLM?")
    return [value.decode() if isinstance(value, bytes) else value for value in values.ravel().tolist()]


@expecting("a list of tenants")
def listed_in(responses: Iterable[Outputs], backbone: str) -> list[Tenant]:
    """Returns the tenants in a decoder's answer to a listing."""
    return tenants_in(_list(only(responses), OUTPUT)[0], backbone)


def first_response(first: Outputs | None, backbone: str) -> Outputs:
    """Returns the first response of a stream. None: it ended without one."""
    if first is None:
        raise UnexpectedAnswer(f"model {backbone!r} ended its stream without an answer: is it a decoder of hPLM?")
    return first


async def pieces_in(responses: AsyncGenerator[Outputs]) -> AsyncGenerator[Piece]:
    """Yields what is new in each choice."""
    async with aclosing(responses):
        async for response in responses:
            for piece in pieces_of(response):
                yield piece


@expecting("that of a decoder")
def pieces_of(response: Outputs) -> list[Piece]:
    """Returns what is new in each choice."""
    texts, reasons, counts = (_list(response, name) for name in (OUTPUT, "finish_reason", "num_output_tokens"))
    parts = zip(texts, reasons, counts, _logprobs(response) or [None] * len(texts), strict=True)
    found = [Piece(text, i, reason or None, tokens, logprobs) for i, (text, reason, tokens, logprobs) in enumerate(parts)]
    return [piece for piece in found if piece.text or piece.finish_reason or piece.tokens]


@expecting("that of a decoder")
def prompt_tokens_in(response: Outputs) -> int:
    return _list(response, "num_input_tokens")[0]


def object_in(body: bytes, url: str) -> dict[str, Any]:
    """Returns the JSON object that a body is."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):  # a proxy's page, not Triton's JSON
        answer = None
    if not isinstance(answer, dict):
        raise UnexpectedAnswer(f"the answer of {url} is not one of Triton's: {body[:80]!r}")
    return answer


def event_in(line: bytes, url: str) -> Outputs | None:
    """Returns the outputs in a line of a stream of events, or None if it has none."""
    if not line.startswith(EVENT):
        return None
    event = object_in(line[len(EVENT) :], url)
    if "error" in event:
        raise refusal(f"{event['error']} (HTTP from {url})", None)
    return event


def only(responses: Iterable[Outputs]) -> Outputs:
    """Returns the response of a request without `stream`."""
    found = list(responses)
    if len(found) != 1:
        raise UnexpectedAnswer(f"{len(found)} responses came instead of one: is this a decoder of hPLM?")
    return found[0]


def whole_in(responses: Iterable[Outputs]) -> Generated:
    """Returns the only response as an answer."""
    response = only(responses)
    with expecting("that of a decoder"):
        return Generated(
            tuple(_list(response, OUTPUT)),
            tuple(_list(response, "finish_reason")),
            prompt_tokens_in(response),
            sum(_list(response, "num_output_tokens")),
            _logprobs(response),
        )


@expecting("Triton's description of a model")
def reads_prompts(metadata: Mapping[str, Any]) -> bool:
    """Whether the model with this metadata is a decoder."""
    return any(tensor.get("name") == PROMPT for tensor in metadata.get("inputs", []))


def _logprobs(response: Outputs) -> tuple[Logprobs, ...] | None:
    return tuple(map(json.loads, _list(response, LOGPROBS))) if LOGPROBS in response else None


def _list(response: Outputs, name: str) -> list[Any]:
    try:
        value = response[name]
    except KeyError:
        raise UnexpectedAnswer(f"output {name} is missing: is this a decoder of hPLM?") from None
    return value if isinstance(value, list) else [value]

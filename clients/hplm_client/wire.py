"""The wire format: turns a question into Triton's tensors and parameters, and Triton's tensors into answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from hplm_client.answer import Answer, Row, Tenant
from hplm_client.errors import InvalidInput, NoBackbone, UnexpectedAnswer, expecting

UNKNOWN = -1.0  # the confidence of a tenant without calibration
ALIAS = "hplm"  # the model that forwards to backbones
UPPER = "-upper"  # the end of the names of upper models
OUTPUTS = ("LABEL", "SCORE", "SPAN", "VERSION")
# Not "priority": Triton keeps that parameter for itself, no Python model sees it, and tritonclient refuses to send it.
PRIORITY = "hplm_priority"
RUNG = "hplm_rung"
LIST = "hplm_tenants"  # asks which tenants the key opens, instead of an answer
Value = str | int | float | bool  # of a parameter
# The most that the server takes in one request: texts, and characters of all texts and pairs.
MOST_TEXTS, MOST_CHARACTERS = 1024, 4_000_000


class Tensors(Protocol):
    """An InferResult of either protocol."""

    def as_numpy(self, name: str) -> np.ndarray | None: ...


@dataclass(frozen=True)
class InferRequest:
    """A request for texts, as both protocols send it. Without `outputs`, the server sends all that the model has."""

    inputs: Mapping[str, np.ndarray]  # of flags, or of encoded texts
    parameters: Mapping[str, Value]
    outputs: tuple[str, ...] = ()
    id: str = ""  # by which Triton and the journal name it
    key: str | None = field(default=None, repr=False)  # instead of the client's


@dataclass(frozen=True)
class TenantTexts:
    """Some texts for one tenant."""

    texts: Sequence[str]
    tenant: str
    pairs: Sequence[str] | None = None
    top_k: int | None = None
    truncate: bool = False
    priority: int | None = None
    logits: bool = False
    confidence: bool = False
    embedding: bool = False
    tokens: bool = False
    key: str | None = field(default=None, repr=False)
    id: str | None = None
    more: Mapping[str, Value] = field(default_factory=dict[str, Value])  # parameters

    def __post_init__(self) -> None:
        if not self.texts:
            raise InvalidInput("the request has no texts: give at least one")
        if self.pairs is not None and len(self.pairs) != len(self.texts):
            raise InvalidInput(f"{len(self.texts)} texts but {len(self.pairs)} pairs: give one pair for each text, or none")
        check_tenant(self.tenant)
        check_key(self.key)
        check_id(self.id)
        check_parameters(self.more)
        for name in ("logits", "confidence", "embedding", "tokens"):
            check_flag(name, getattr(self, name))

    def parts(self) -> list[TenantTexts]:
        """Returns the same texts as questions that a server takes, in order."""
        sizes = [len(text) for text in self.texts]
        for number, pair in enumerate(self.pairs or ()):
            sizes[number] += len(pair)
        if len(sizes) <= MOST_TEXTS and sum(sizes) <= MOST_CHARACTERS:
            return [self]
        starts, characters = [0], 0
        for number, size in enumerate(sizes):
            if number - starts[-1] == MOST_TEXTS or (number > starts[-1] and characters + size > MOST_CHARACTERS):
                starts.append(number)
                characters = 0
            characters += size
        bounds = [slice(*bound) for bound in zip(starts, [*starts[1:], len(sizes)], strict=True)]
        return [replace(self, texts=self.texts[own], pairs=self.pairs and self.pairs[own]) for own in bounds]

    def parameters(self) -> dict[str, Value]:
        return parameters_of(self.tenant, self.truncate, self.priority, {"top_k": self.top_k}, self.more)


def texts_in(name: str, given: Iterable[str]) -> list[str]:
    """Returns the texts of any iterable."""
    if isinstance(given, str | bytes):
        raise InvalidInput(f"{name} is a single {type(given).__name__}: give a list of str")
    try:
        each = iter(given)
    except TypeError:
        raise InvalidInput(f"{name} is {type(given).__name__}: give a list of str, or another iterable of them") from None
    texts = list(each)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInput(f"{name} {number} is {type(text).__name__}: give str")
    return texts


def parameters_of(
    tenant: str,
    truncate: bool,
    priority: int | None,
    named: Mapping[str, str | int | None],
    more: Mapping[str, Value] | None = None,
) -> dict[str, Value]:
    """Returns the parameters of a request, but those that are not given. `more`: those without an argument of their own."""
    check_flag("truncate", truncate)
    own = {"tenant": tenant, "truncate": True if truncate else None, PRIORITY: priority, **named}
    for name in more or ():
        if name in own or name in ("outputs", "timeout", "authorization"):
            raise InvalidInput(f"the parameter {name!r} has an argument of its own: leave it out of `parameters`")
    given = {name: value for name, value in {**own, **(more or {})}.items() if value is not None}
    for name, value in given.items():  # gRPC sends whole numbers of 64 bits
        if not isinstance(value, str | int | float) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
            raise InvalidInput(f"{name.removeprefix('hplm_')} is {value!r}: give an int from {-(2**63):,} to {2**63 - 1:,}")
    return given


def check_key(key: str | None) -> None:
    """Raises if this key cannot be sent as a header. The message does not tell it."""
    if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable() and key):
        raise InvalidInput("api_key cannot be sent as a header: give printable ASCII characters only")


def check_id(name: str | None) -> None:
    """Raises if this cannot be the id of a request."""
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidInput(f"request_id is {name!r}: give a text, or None")
    encoded("request_id", name or "")


def check_parameters(given: Mapping[str, Value]) -> None:
    """Raises if these are no parameters by name, or have text that cannot be sent."""
    if not isinstance(given, Mapping) or not all([isinstance(name, str) for name in given]):
        raise InvalidInput(f"parameters is {given!r}: give a dict of names and values")
    for name, value in given.items():
        encoded("the name of a parameter", name)
        encoded(f"the parameter {name!r}", value if isinstance(value, str) else "")


def check_flag(name: str, value: bool) -> None:
    """Raises if this is neither True nor False. 'false' would count as true."""
    if value not in (True, False):
        raise InvalidInput(f"{name} is {value!r}: give True or False")


def check_tenant(name: str) -> None:
    """Raises if this is no tenant's name. Triton ends a name at a NUL, and would answer as another tenant."""
    if not name or not isinstance(name, str):
        raise InvalidInput("the request has no tenant: give the tenant's name")
    if "\0" in name:
        raise InvalidInput(f"the tenant's name {name!r} has a NUL: give the tenant's name")
    encoded("tenant", name)


def encoded(name: str, text: str) -> bytes:
    """Returns the text in UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{name} cannot be encoded as UTF-8: leave out the character {text[error.start]!r} at {error.start}"
        ) from error


def encode(question: TenantTexts) -> InferRequest:
    inputs = {"TEXT": _strings("TEXT", question.texts)}
    if question.pairs is not None:
        inputs["TEXT_PAIR"] = _strings("TEXT_PAIR", question.pairs)
    asked = {
        "LOGITS": question.logits, "CONFIDENCE": question.confidence, "LEVEL": RUNG in question.more, "TOKENS": question.tokens,
    }  # fmt: skip
    usual = ("EMBEDDING", "VERSION") if question.embedding else OUTPUTS
    outputs = (*usual, *(name for name, wanted in asked.items() if wanted))
    # Triton tells none of a backbone's models which outputs a request wants, and all of them cost time.
    parameters = question.parameters() | {"outputs": ",".join(outputs)}
    return InferRequest(inputs, parameters, outputs, question.id or "", question.key)


def listing_of(tenant: str | None) -> dict[str, Value]:
    """Returns the parameters that ask which tenants the key opens. `tenant`: only for this one, with its labels."""
    return {LIST: True} if tenant is None else {LIST: True, "tenant": tenant}


def encode_listing(tenant: str | None, key: str | None) -> InferRequest:
    """Returns the request that asks an encoder for its tenants."""
    return InferRequest({"TEXT": _strings("TEXT", [""])}, listing_of(tenant), ("LABEL",), key=key)


@expecting("a list of tenants")
def tenants_in(told: str, backbone: str) -> list[Tenant]:
    """Returns the tenants in what a backbone has told."""
    return [
        Tenant(one["tenant"], one["task"], backbone, _names(one, "labels"), one.get("dimensions"), _names(one, "prefixes"))
        for one in json.loads(told)
    ]


def _names(told: Mapping[str, Any], which: str) -> tuple[str, ...] | None:
    return tuple(told[which]) if which in told else None


def listed_in(result: Tensors, backbone: str) -> list[Tenant]:
    """Returns the tenants in an encoder's answer to a listing."""
    return tenants_in(_text(_tensor(result, "LABEL", 2, 1)[0, 0]), backbone)


@expecting("that of a backbone")
def decode(result: Tensors, question: TenantTexts) -> list[Answer]:
    """Returns an answer for each text, without the rows that fill short answers up to the longest."""
    batch = len(question.texts)
    tokens = _tensor(result, "TOKENS", 2, batch)[:, 0].tolist() if question.tokens else [None] * batch
    if question.embedding:
        versions, vectors = _tensor(result, "VERSION", 2, batch)[:, 0], _tensor(result, "EMBEDDING", 2, batch).tolist()
        return [
            Answer((), _text(version), embedding=tuple(vector), tokens=count)
            for version, vector, count in zip(versions.tolist(), vectors, tokens, strict=True)
        ]
    labels = _tensor(result, "LABEL", 2, batch)
    scores = _tensor(result, "SCORE", 2, batch)
    spans = _tensor(result, "SPAN", 3, batch)
    versions = _tensor(result, "VERSION", 2, batch)
    if scores.shape != labels.shape or spans.shape != (*labels.shape, 2) or versions.shape != (batch, 1):
        shapes = f"LABEL {labels.shape}, SCORE {scores.shape}, SPAN {spans.shape}, VERSION {versions.shape}"
        raise UnexpectedAnswer(f"the shapes of the outputs do not fit each other ({shapes}): is this an hPLM backbone?")
    logits = _tensor(result, "LOGITS", 3, batch).tolist() if question.logits else [[]] * batch
    sure = _tensor(result, "CONFIDENCE", 2, batch).tolist() if question.confidence else [[UNKNOWN]] * batch
    levels = _tensor(result, "LEVEL", 2, batch).tolist() if RUNG in question.more else [[None]] * batch
    columns = labels.tolist(), scores.tolist(), spans.tolist(), logits
    return [
        Answer(
            tuple(_rows(*own)), _text(version[0]), confidence[0] if confidence[0] != UNKNOWN else None, level[0], tokens=count
        )
        for *own, version, confidence, level, count in zip(*columns, versions.tolist(), sure, levels, tokens, strict=True)
    ]


@expecting("Triton's statistics")
def backbones_in(statistics: Mapping[str, Any]) -> list[str]:
    """Returns the backbones in Triton's statistics: models that are ready together with their lookup and upper models."""
    ready = _ready_in(statistics)
    return sorted(name for name in ready if {f"{name}-lookup", f"{name}{UPPER}"} <= ready)


@expecting("Triton's statistics")
def others_in(statistics: Mapping[str, Any]) -> list[str]:
    """Returns the ready models that are no backbone of encoders and no part of one, nor the model that forwards to all."""
    backbones, ready = backbones_in(statistics), _ready_in(statistics)
    return sorted(ready - {ALIAS} - {f"{name}{part}" for name in backbones for part in ("", "-lookup", UPPER)})


def _ready_in(statistics: Mapping[str, Any]) -> set[str]:
    """Returns the models in Triton's statistics, which are those that are ready.

    Statistics are open to clients, while the repository index is for operators only.
    """
    return {entry["name"] for entry in statistics.get("model_stats", [])}


def only(names: list[str]) -> str:
    """Returns the only backbone's name."""
    if len(names) == 1:
        return names[0]
    if names:
        raise NoBackbone(f"the server has {len(names)} backbones, so name one of them: {', '.join(names)}")
    raise NoBackbone("the server has no backbone that is ready, which is a model with a -lookup and an -upper model")


def _strings(name: str, texts: Sequence[str]) -> np.ndarray:
    column = np.empty((len(texts), 1), dtype=np.object_)
    for number, text in enumerate(texts):
        column[number, 0] = encoded(f"{name} {number}", text)
    return column


def _tensor(result: Tensors, name: str, dimensions: int, batch: int) -> np.ndarray:
    tensor = result.as_numpy(name)
    if tensor is None or tensor.ndim != dimensions or tensor.shape[0] != batch:
        found = "missing" if tensor is None else f"of shape {tensor.shape}"
        raise UnexpectedAnswer(f"output {name} is {found}, but {batch} texts were sent: is this an hPLM backbone?")
    return tensor


def _rows(labels: list[Any], scores: list[float], spans: list[list[int]], logits: list[list[float]]) -> Iterable[Row]:
    for number, (label, score, span) in enumerate(zip(labels, scores, spans, strict=True)):
        if label == b"" and span == [-1, -1]:
            continue
        own = tuple(logits[number]) if label != b"" and number < len(logits) else None
        yield Row(_text(label), score, (span[0], span[1]), own)


def _text(value: Any) -> str:
    try:
        return value.decode()
    except (AttributeError, UnicodeDecodeError) as error:
        raise UnexpectedAnswer(f"a string output contains {value!r}, which is not UTF-8") from error

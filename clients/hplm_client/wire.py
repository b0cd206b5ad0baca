"""The wire format: turns a question into Triton's tensors and parameters, and Triton's tensors into answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hplm_client.answer import Answer, Row
from hplm_client.errors import InvalidInput, NoBackbone, UnexpectedAnswer, expecting

UNKNOWN = -1.0  # the confidence of a tenant without calibration
ALIAS = "hplm"  # the model that forwards to backbones
UPPER = "-upper"  # the end of the names of upper models
OUTPUTS = ("LABEL", "SCORE", "SPAN", "VERSION")
# Not "priority": Triton keeps that parameter for itself, no Python model sees it, and tritonclient refuses to send it.
PRIORITY = "hplm_priority"
RUNG = "hplm_rung"


class Tensors(Protocol):
    """An InferResult of either protocol."""

    def as_numpy(self, name: str) -> np.ndarray | None: ...


@dataclass(frozen=True)
class Request:
    """A request for texts, as both protocols send it. Without `outputs`, the server sends all that the model has."""

    inputs: Mapping[str, np.ndarray]  # of flags, or of encoded texts
    parameters: Mapping[str, str | int | bool]
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """One request: some texts for one tenant."""

    texts: Sequence[str]
    tenant: str
    pairs: Sequence[str] | None = None
    top_k: int | None = None
    truncate: bool = False
    priority: int | None = None
    logits: bool = False
    confidence: bool = False
    rung: int | None = None
    level: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.texts, str) or isinstance(self.pairs, str):
            raise InvalidInput("texts or pairs is a single str, whose characters would become texts: give a list of str")
        if self.texts is None or len(self.texts) == 0:  # an array has no truth value
            raise InvalidInput("the request has no texts: give at least one")
        if self.pairs is not None and len(self.pairs) != len(self.texts):
            raise InvalidInput(f"{len(self.texts)} texts but {len(self.pairs)} pairs: give one pair for each text, or none")
        check_tenant(self.tenant)
        for name in ("logits", "confidence", "level"):
            check_flag(name, getattr(self, name))

    def parameters(self) -> dict[str, str | int | bool]:
        return parameters_of(self.tenant, self.truncate, self.priority, {"top_k": self.top_k, RUNG: self.rung})


def parameters_of(
    tenant: str, truncate: bool, priority: int | None, more: Mapping[str, str | int | None]
) -> dict[str, str | int | bool]:
    """Returns the parameters of a request, but those that are not given."""
    check_flag("truncate", truncate)
    given = {"tenant": tenant, "truncate": True if truncate else None, PRIORITY: priority, **more}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():  # gRPC sends whole numbers of 64 bits
        if not isinstance(value, str | int | float) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
            raise InvalidInput(f"{name.removeprefix('hplm_')} is {value!r}: give an int from {-(2**63):,} to {2**63 - 1:,}")
    return given


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


def encode(question: Question) -> Request:
    inputs = {"TEXT": _strings("TEXT", question.texts)}
    if question.pairs is not None:
        inputs["TEXT_PAIR"] = _strings("TEXT_PAIR", question.pairs)
    asked = {"LOGITS": question.logits, "CONFIDENCE": question.confidence, "LEVEL": question.level}
    outputs = (*OUTPUTS, *(name for name, wanted in asked.items() if wanted))
    # Triton tells none of a backbone's models which outputs a request wants, and all of them cost time.
    return Request(inputs, question.parameters() | {"outputs": ",".join(outputs)}, outputs)


@expecting("that of a backbone")
def decode(result: Tensors, question: Question) -> list[Answer]:
    """Returns an answer for each text, without the rows that fill short answers up to the longest."""
    batch = len(question.texts)
    labels = _tensor(result, "LABEL", 2, batch)
    scores = _tensor(result, "SCORE", 2, batch)
    spans = _tensor(result, "SPAN", 3, batch)
    versions = _tensor(result, "VERSION", 2, batch)
    if scores.shape != labels.shape or spans.shape != (*labels.shape, 2) or versions.shape != (batch, 1):
        shapes = f"LABEL {labels.shape}, SCORE {scores.shape}, SPAN {spans.shape}, VERSION {versions.shape}"
        raise UnexpectedAnswer(f"the shapes of the outputs do not fit each other ({shapes}): is this an hPLM backbone?")
    logits = _tensor(result, "LOGITS", 3, batch).tolist() if question.logits else [[]] * batch
    sure = _tensor(result, "CONFIDENCE", 2, batch).tolist() if question.confidence else [[UNKNOWN]] * batch
    levels = _tensor(result, "LEVEL", 2, batch).tolist() if question.level else [[None]] * batch
    columns = labels.tolist(), scores.tolist(), spans.tolist(), logits
    return [
        Answer(tuple(_rows(*own)), _text(version[0]), confidence[0] if confidence[0] != UNKNOWN else None, level[0])
        for *own, version, confidence, level in zip(*columns, versions.tolist(), sure, levels, strict=True)
    ]


@expecting("Triton's statistics")
def backbones_in(statistics: Mapping[str, Any]) -> list[str]:
    """Returns the backbones in Triton's statistics: models that are ready together with their lookup and upper models."""
    ready = ready_in(statistics)
    computed = {name for upper in _uppers_in(ready) for name in _computed_by(upper)}
    return sorted(name for name in ready & computed if f"{name}-lookup" in ready)


@expecting("Triton's statistics")
def others_in(statistics: Mapping[str, Any]) -> list[str]:
    """Returns the ready models that are no backbone of encoders and no part of one, nor the model that forwards to all."""
    backbones = backbones_in(statistics)
    ready = ready_in(statistics)
    parts = {ALIAS} | {f"{name}{part}" for name in backbones for part in ("", "-lookup", "-admin")}
    return sorted(ready - parts - {upper for upper in _uppers_in(ready) if set(_computed_by(upper)) & set(backbones)})


def _uppers_in(ready: set[str]) -> list[str]:
    return [name for name in ready if name.endswith(UPPER)]


def _computed_by(upper: str) -> list[str]:
    """Returns the backbones that an upper model computes: one, or several of a placement's group."""
    return upper.removesuffix(UPPER).split("+")


@expecting("Triton's statistics")
def ready_in(statistics: Mapping[str, Any]) -> set[str]:
    """Returns the models in Triton's statistics, which are those that are ready.

    Statistics are open to clients, while the repository index is for operators only.
    """
    return {entry["name"] for entry in statistics.get("model_stats", [])}


def only(names: list[str], kind: str, which: str) -> str:
    """Returns the only name. `kind` and `which` say in an error what is missing."""
    if len(names) == 1:
        return names[0]
    if names:
        raise NoBackbone(f"the server has {len(names)} {kind}s, so name one of them: {', '.join(names)}")
    raise NoBackbone(f"the server has no {kind} that is ready{which}")


def _strings(name: str, texts: Sequence[str]) -> np.ndarray:
    column = np.empty((len(texts), 1), dtype=np.object_)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInput(f"{name} {number} is {type(text).__name__}: give str")
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

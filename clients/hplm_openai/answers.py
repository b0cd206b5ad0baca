"""Writes answers: what many have, and those to prompts in OpenAI's form, whole and as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hplm_client import generation
from hplm_client.answer import Answer, Tenant
from hplm_client.generation import Outputs, Piece
from hplm_openai.completion_request import CompletionRequest

FINISH = {None: None, "stop": "stop"}  # all others: the answer was cut, which OpenAI calls "length"
UNPRINTABLE = "\ufffd"  # stands in a token's text for a part of a character
LEAST = -9999.0  # what OpenAI tells instead of minus infinity, which JSON does not have

# The text and logprob of a token, then those of the likeliest in its place. A prompt's first token has no logprob.
Token = list[tuple[str, float | None]]


def model_of(tenant: Tenant) -> dict[str, Any]:
    """Returns a tenant as a model. What stands behind `owned_by` is ours."""
    own = {name: value for name in ("task", "labels", "dimensions", "prefixes") if (value := getattr(tenant, name))}
    return {"id": tenant.name, "object": "model", "created": 0, "owned_by": tenant.backbone, **own}


def named(prefix: str, tenant: Tenant, **fields: Any) -> dict[str, Any]:
    """Returns an answer of a tenant with an id of its own."""
    return {"id": f"{prefix}-{_new_id()}", "model": tenant.name, **fields}


def in_list(prefix: str, tenant: Tenant, data: list[Any], answers: list[Answer]) -> dict[str, Any]:
    """Returns answers as OpenAI's and vLLM's lists have them."""
    return named(prefix, tenant, object="list", created=int(time.time()), data=data, usage=usage(answers))


def usage(answers: list[Answer]) -> dict[str, int]:
    tokens = sum(answer.tokens or 0 for answer in answers)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _new_id() -> str:
    return secrets.token_hex(12)


@dataclass
class AnswerWriter(ABC):
    """The answer to one request in OpenAI's form. It counts the tokens that it has sent."""

    request: CompletionRequest
    prefix = ""  # of the answer's id
    whole_kind = chunk_kind = ""  # of object
    id: str = field(default_factory=_new_id)
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: dict[int, int] = field(default_factory=dict[int, int])  # of each prompt
    tokens: int = 0

    def whole(self, responses: list[Outputs]) -> dict[str, Any]:
        """Returns the answer whose only responses these are, one for each prompt."""
        pieces = [piece for number, response in enumerate(responses) for piece in self._pieces(number, response)]
        choices = [self._choice(piece, is_whole=True) for piece in pieces]
        return {**self._head(self.whole_kind), "choices": choices, "usage": self._usage}

    def chunks(self, number: int, response: Outputs) -> Iterator[dict[str, Any]]:
        """Yields what a response to a prompt adds to each choice."""
        for piece in self._pieces(number, response):
            if piece.text or piece.finish_reason or piece.logprobs:
                yield self._chunk([self._choice(piece, is_whole=False)])

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        if self.request.include_usage:
            yield {**self._chunk([]), "usage": self._usage}

    @abstractmethod
    def _content(self, number: int, text: str, is_whole: bool) -> dict[str, Any]:
        """Returns the text of a choice, or what a chunk adds to it."""

    @abstractmethod
    def _logprobs(self, number: int, text: str, tokens: list[Token]) -> dict[str, Any]: ...

    def _choice(self, piece: Piece, is_whole: bool) -> dict[str, Any]:
        number, text, tokens = piece.choice, piece.text, piece.logprobs
        logprobs = None if tokens is None else self._logprobs(number, text, list(map(_token, tokens)))
        finish = FINISH.get(piece.finish_reason, "length")
        return {"index": number, **self._content(number, text, is_whole), "logprobs": logprobs, "finish_reason": finish}

    @property
    def _usage(self) -> dict[str, int]:
        prompts = sum(self.prompt_tokens.values())
        return {"prompt_tokens": prompts, "completion_tokens": self.tokens, "total_tokens": prompts + self.tokens}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.request.tenant}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_kind), "choices": choices}
        return {**chunk, "usage": None} if self.request.include_usage else chunk

    def _pieces(self, number: int, response: Outputs) -> list[Piece]:
        """Returns what is new in each choice of a prompt. Counts the tokens."""
        pieces = generation.pieces_of(response)
        self.prompt_tokens[number] = generation.prompt_tokens_in(response)
        self.tokens += sum(piece.tokens for piece in pieces)
        before = number * self.request.choices  # choices of earlier prompts
        return [replace(piece, choice=before + piece.choice) for piece in pieces] if before else pieces


@dataclass
class CompletionWriter(AnswerWriter):
    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"
    _said: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))  # each choice's text until now
    _ends: Counter[int] = field(default_factory=Counter[int])  # where the text of each choice's last token ends in it

    def _content(self, number: int, text: str, is_whole: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, number: int, text: str, tokens: list[Token]) -> dict[str, Any]:
        """Looks for the tokens in the text: they may lack a space, be a part of a character, or come before their text."""
        self._said[number] += text
        offsets: list[int] = []
        for (token, _), *_ in tokens:
            found = -1 if UNPRINTABLE in token else self._said[number].find(token, self._ends[number])
            offsets.append(max(found, self._ends[number]))
            if found >= 0:
                self._ends[number] = found + len(token)
        # Of different tokens with the same text, the likeliest counts.
        likeliest = [dict(sorted(token, key=_rank)) if token[0][1] is not None else None for token in tokens]
        return {
            "tokens": [token[0][0] for token in tokens],
            "token_logprobs": [token[0][1] for token in tokens],
            "top_logprobs": likeliest if self.request.logprobs else None,
            "text_offset": offsets,
        }


@dataclass
class ChatWriter(AnswerWriter):
    prefix = "chatcmpl"
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    _begun: set[int] = field(default_factory=set[int])  # choices

    def _content(self, number: int, text: str, is_whole: bool) -> dict[str, Any]:
        if is_whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        delta = {"content": text} if number in self._begun else {"role": "assistant", "content": text}
        self._begun.add(number)
        return {"delta": delta}

    def _logprobs(self, number: int, text: str, tokens: list[Token]) -> dict[str, Any]:
        most = self.request.logprobs or 0
        told = [
            {
                **_logprob(*token[0]),
                "top_logprobs": [_logprob(*one) for one in sorted(token, key=_rank, reverse=True)[:most]],
            }
            for token in tokens
        ]
        return {"content": told, "refusal": None}


def _rank(one: tuple[str, float | None]) -> float:
    return LEAST if one[1] is None else one[1]


def _logprob(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if UNPRINTABLE in text else list(text.encode())}


def _token(told: Mapping[str, Any]) -> Token:
    """Reads a token of the output `logprobs`. The token itself comes first."""
    return [(one["decoded_token"], one["logprob"] and max(LEAST, one["logprob"])) for one in told.values()]

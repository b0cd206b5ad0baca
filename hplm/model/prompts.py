"""Turns prompts into tokens of a decoder, and tokens into text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer as HuggingFaceTokenizer

from hplm.arrays import Array
from hplm.errors import Broken, InvalidInput
from hplm.model.chat import ChatTemplate, read_messages

if TYPE_CHECKING:  # processes that only follow snapshots do without torch
    from hplm.model.config import BackboneConfig

T = TypeVar("T")
READ_CHARACTERS = 16  # of a prompt, for each token that the model takes: others wait while a prompt is tokenised


class Prompts:
    """The tokenizer of a decoder. No token stands around a prompt but the start id before it, where the model has it there.

    An empty prompt is the start id.
    """

    def __init__(self, tokenizer_json: str, config: BackboneConfig) -> None:
        if config.start_id is None:
            raise ValueError(f"{config.name} is an encoder, which reads no prompts")
        self.most_characters = READ_CHARACTERS * config.positions  # of a prompt
        self._name = config.name
        self._start_id, self._starts, self._always_starts = config.start_id, config.starts, config.always_starts
        self._vocabulary = config.vocabulary
        self._end_id = config.end_ids[0] if config.end_ids else None
        self._template = config.chat_template
        self._tokenizer = unlimited(tokenizer_json)

    @classmethod
    def load(cls, path: Path, config: BackboneConfig) -> Prompts:
        return read_tokenizer(path, lambda tokenizer_json: cls(tokenizer_json, config))

    def encode(self, text: str) -> Array:
        """Returns the tokens of a prompt, int64."""
        return self.started(self.ids_of(text))

    def of_messages(self, messages: str) -> Array:
        """Returns the tokens of a chat, whose messages are JSON, as those of a prompt."""
        return self.started(self.ids_of_messages(messages))

    def ids_of(self, text: str) -> list[int]:
        """Returns the tokens of a text alone."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def ids_of_messages(self, messages: str) -> list[int]:
        return self._chat.tokens(read_messages(messages, self.most_characters))

    def ids_in(self, given: str) -> list[int]:
        """Returns the tokens in a list in JSON."""
        try:
            ids = msgspec.json.decode(given, type=list[int])
        except msgspec.DecodeError as error:
            raise InvalidInput(f"'token_ids' is no list of token ids in JSON ({error}): send one such as [5, 7]") from None
        if not ids:
            raise InvalidInput("'token_ids' is empty: send at least one")
        if unknown := [id for id in ids if not 0 <= id < self._vocabulary]:
            raise InvalidInput(f"'token_ids' names token {unknown[0]}, but the model has tokens 0 to {self._vocabulary - 1}")
        return ids

    def started(self, ids: list[int], as_given: bool = False) -> Array:
        """Returns the tokens of a prompt, int64. `as_given`: with a start id only if it has to be there."""
        tokens = np.array(ids, dtype=np.int64)
        starts = self._always_starts or (self._starts and not as_given) or not ids
        return with_start_id(tokens, self._start_id) if starts else tokens

    def end_of(self, tokens: Array, most: int) -> Array:
        """Returns so many of the last tokens of a prompt. A start id stays first."""
        if len(tokens) <= most:
            return tokens
        first = int(tokens[0] == self._start_id)
        return np.concatenate([tokens[:first], tokens[len(tokens) - most + first :]])

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Returns the text of tokens. `special`: with that of special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=not special)

    @property
    def tokenizer_json(self) -> str:
        return self._tokenizer.to_str()

    @cached_property
    def _chat(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidInput(f"{self._name} has no chat template: send 'text_input' instead of 'messages'")
        try:
            return ChatTemplate(self._template, self._tokenizer, self._start_id, self._end_id)
        except TemplateError as error:
            raise Broken(f"the chat template of {self._name} cannot be read ({error}): build the backbone again") from None


def read_tokenizer(path: Path, made: Callable[[str], T]) -> T:
    """Returns what is made of the JSON of a tokenizer."""
    try:
        return made(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Broken(f"{path} is missing: build or copy it again") from None
    except Exception as error:  # the library raises no narrower type
        raise Broken(f"{path} does not describe a tokenizer ({error}): build or copy it again") from None


def unlimited(tokenizer_json: str) -> HuggingFaceTokenizer:
    """Returns a tokenizer that neither pads nor cuts."""
    tokenizer = HuggingFaceTokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def with_start_id(tokens: Array, start_id: int) -> Array:
    """Returns the tokens with the start id first. Chat templates begin with it."""
    return tokens if len(tokens) and tokens[0] == start_id else np.concatenate([[start_id], tokens]).astype(tokens.dtype)

"""Turns the messages of a chat into the tokens of a prompt, by the chat template of a decoder.

A template is part of the model, and as trusted. Messages are not: what they say is text, and never a special token.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from hplm.errors import InvalidInput

FORM = '[{"role": "user", "content": "..."}]'
ROLE = re.compile(r"[\w-]{1,64}")  # a template may make a special token of a role
MOST_MESSAGES = 2048
ESCAPED = 12  # characters that JSON may use for one
RENDER_SECONDS = 1.0  # others wait while a template reads messages
WRITTEN = 4  # characters that a template may write for each one of the messages
OWN_WORDS = 20_000  # characters that it may write beside
BREAK = "\ufdd0"  # a code point that no text has


class ChatTemplate:
    """A chat template and the tokenizer that it was written for."""

    def __init__(self, template: str, tokenizer: HuggingFaceTokenizer, start_id: int, end_id: int | None) -> None:
        """Raises jinja2's TemplateError if the template is none."""
        self._tokenizer = tokenizer
        self._literal = HuggingFaceTokenizer.from_str(tokenizer.to_str())
        self._literal.encode_special_tokens = True  # as text: it knows no special tokens
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        special = sorted((added[id].content for id in self._special_ids), key=len, reverse=True)
        self._special = re.compile(f"(?={_any_of(special)}).", re.DOTALL)
        self._broken = re.compile(f"({_any_of([text[0] + BREAK + text[1:] for text in special])})|{BREAK}")
        ends = {"bos_token": start_id, "eos_token": end_id}
        self._named = {name: tokenizer.id_to_token(id) for name, id in ends.items() if id is not None}
        self._template = _environment().from_string(template)

    def tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Returns the tokens of the messages and of what the template writes before an answer."""
        written = self._render([{key: self._break(text) for key, text in message.items()} for message in messages])
        tokens: list[int] = []
        for number, part in enumerate(self._broken.split(written)):
            if part and number % 2:
                literal = self._literal.encode(part.replace(BREAK, ""), add_special_tokens=False).ids
                tokens += self._without_special(literal)
            elif part:
                tokens += self._tokenizer.encode(part, add_special_tokens=False).ids
        return tokens

    def _break(self, text: str) -> str:
        """Puts a break into each text of a special token, so that those which the template writes are the only ones."""
        broken = self._special.sub(lambda found: found[0] + BREAK, text.replace(BREAK, ""))
        if self._tokenizer.normalizer is not None:  # it may make the text of a special token from other characters
            for part in self._broken.split(broken)[::2]:
                self._without_special(self._tokenizer.encode(part, add_special_tokens=False).ids)
        return broken

    def _without_special(self, tokens: list[int]) -> list[int]:
        if found := self._special_ids.intersection(tokens):
            raise InvalidInput(
                f"'messages' hold a text that the tokenizer only reads as its special token "
                f"{self._tokenizer.id_to_token(min(found))!r}: leave it out"
            )
        return tokens

    def _render(self, messages: list[dict[str, str]]) -> str:
        most = OWN_WORDS + WRITTEN * sum(len(text) for message in messages for text in message.values())
        ends, length, parts = time.monotonic() + RENDER_SECONDS, 0, list[str]()
        given: dict[str, Any] = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            for part in self._template.generate(**given, **self._named):
                parts.append(part)
                length += len(part)
                if length > most or time.monotonic() > ends:
                    raise InvalidInput("the chat template takes too long for 'messages', or makes too much of them: send fewer")
        except InvalidInput:
            raise
        except Exception as error:  # a template may do anything
            raise InvalidInput(f"the chat template does not take these 'messages': {error}") from None
        return "".join(parts)


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


def read_messages(given: str, most: int) -> list[dict[str, str]]:
    """Reads the messages of a chat from JSON. `most`: characters."""
    if len(given) > ESCAPED * most:
        raise _too_long(len(given), ESCAPED * most)
    try:
        messages = msgspec.convert(json.loads(given), list[Any])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise InvalidInput(f"'messages' are no list in JSON ({error}): send one such as {FORM}") from None
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise InvalidInput(f"'messages' are a list of {len(messages):,}: send 1 to {MOST_MESSAGES:,}, without old ones")
    read = [_read_message(number, message) for number, message in enumerate(messages, start=1)]
    if (length := sum(len(text) for message in read for text in message.values())) > most:
        raise _too_long(length, most)
    return read


def _read_message(number: int, message: Any) -> dict[str, str]:
    try:
        read = msgspec.convert(message, Message)
        read.content.encode()
    except msgspec.ValidationError as error:
        raise InvalidInput(f"message {number} of 'messages' is wrong ({error}): send {FORM}") from None
    except UnicodeEncodeError as error:
        raise InvalidInput(f"message {number} of 'messages' has half a character at {error.start}: send whole ones") from None
    if not ROLE.fullmatch(read.role):
        raise InvalidInput(f"message {number} of 'messages' has role {read.role!r}: send a word, such as 'user'")
    return msgspec.structs.asdict(read)


def _too_long(length: int, most: int) -> InvalidInput:
    return InvalidInput(f"'messages' have {length:,} characters, but {most:,} are read at most: leave out old ones")


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns what templates find where they are written for `transformers`."""
    environment: Any = ImmutableSandboxedEnvironment(  # the dictionaries in it have no types
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(Extension):
    """`generation` marks what a model is trained on. It changes nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    """Unlike jinja2's own, it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(map(re.escape, texts)) or "(?!)"

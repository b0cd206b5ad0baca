"""Grammars that answers follow: which tokens may come next. `llguidance` compiles them and reads the tokens."""

from __future__ import annotations

import json
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.generation.grammar_check import LIMITS, check
from hplm.generation.sampling import StructuredOutputs
from hplm.model.config import BackboneConfig
from hplm.model.prompts import Prompts

OBJECT = {"type": "object"}
# Bounded: a model that does not know how to go on often writes white space without end.
USUAL = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}}


class Grammar:
    """Reads the tokens of one answer."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._vocabulary)

    def barred(self) -> Array:
        """Returns for each token whether it may not come next. If none may come, none is barred, and `take` will raise."""
        allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        barred = np.unpackbits(~allowed, bitorder="little", count=self._vocabulary).astype(bool)
        return barred & ~barred.all()

    def take(self, token: int) -> bool:
        """Reads a token. Returns whether the answer is whole, so that nothing can follow. Raises if it may not come."""
        if self._matcher.is_error() or not self._matcher.consume_token(token):
            raise _wrong(self._matcher.get_error())
        return self._matcher.is_stopped()

    def check(self) -> None:
        """Raises if no token may come next."""
        self.barred()
        if self._matcher.is_error():
            raise _wrong(self._matcher.get_error())


class Grammars:
    """Compiles grammars for a decoder. Its tokenizer is read for the first one. One thread at a time."""

    def __init__(self, prompts: Prompts, config: BackboneConfig) -> None:
        self._prompts, self._config = prompts, config

    def compiled(self, wanted: StructuredOutputs) -> Grammar:
        """Raises if it is wrong, or takes too long to compile."""
        try:
            written = _written(wanted)
            check(written)
            found = Grammar(LLMatcher(self._tokenizer, written, log_level=0, limits=LIMITS), self._config.vocabulary)
        except ValueError as error:
            raise _wrong(str(error)) from None
        found.check()
        return found

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        config = self._config
        return LLTokenizer(self._prompts.tokenizer_json, n_vocab=config.vocabulary, eos_token=list(config.end_ids))


def _written(wanted: StructuredOutputs) -> str:
    """Returns a grammar in the library's form."""
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in wanted.choice))
    return LLMatcher.grammar_from_json_schema(json.dumps({**USUAL, **(OBJECT if wanted.json is None else wanted.json)}))


def _wrong(reason: str) -> InvalidInput:
    said = reason.removesuffix("<non-verbose/>").strip()
    said = "nothing may come next" if said == "NoExtensionBias" else said
    return InvalidInput(f"'structured_outputs' is not possible: {said}")

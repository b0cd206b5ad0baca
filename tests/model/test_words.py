"""Texts that are read word by word have the tokens that the library gives them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from hplm.model import words
from hplm.model.tokenizer import Tokenizer
from tests.model.test_cutting import KINDS, LONG_TOKEN, PIECES, SPECIAL

READ_BY_WORDS = [name for name, kind in KINDS.items() if Tokenizer(kind, 64)._words is not None]
ODD = ["…", ",", "\u0301", "\x1c", "\u200b", "\ufffd", "\0", "水水", "é", "ΑΣ", "İ", "\t", "\n", "x" * 40]
PARTS = st.one_of(st.sampled_from([*PIECES, *SPECIAL, LONG_TOKEN, *ODD]), st.text(max_size=6))
SPACES = st.sampled_from(["", " ", "  ", "\u00a0", "\u2003", "\n"])
TEXTS = st.lists(st.tuples(PARTS, SPACES), max_size=12).map(lambda parts: "".join(part + space for part, space in parts))


@pytest.mark.parametrize("kind", READ_BY_WORDS)
@settings(max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5))
@example(texts=["the [MASK] a", "a\x1cthe a", " a  the ", f"a {LONG_TOKEN} the"])
def test_tokens_are_those_of_the_library(kind, texts):
    library = HuggingFaceTokenizer.from_str(KINDS[kind])
    read = words.Words(library)
    for _ in range(2):  # the second time from memory
        for text, tokens in zip(texts, read.tokens(texts), strict=True):
            assert tokens.tolist() == library.encode(text).ids


def test_tokens_that_take_spaces_are_left_to_the_library():
    assert "special tokens with spaces" not in READ_BY_WORDS
    assert {"no added tokens", "special tokens", "cased"} <= set(READ_BY_WORDS)


def test_few_words_are_remembered_and_frequent_ones_come_back(monkeypatch):
    monkeypatch.setattr(words, "MOST", 4)
    library = HuggingFaceTokenizer.from_str(KINDS["no added tokens"])
    read = words.Words(library)
    for number in range(20):
        text = f"the a{number} there{number} the"
        assert read.tokens([text])[0].tolist() == library.encode(text).ids
        assert len(read._known) <= 4
    assert read.tokens(["x" * 50])[0].tolist() == library.encode("x" * 50).ids
    assert "x" * 50 not in read._known


def test_offsets_of_a_text_that_was_read_by_words():
    tokenizer, library = Tokenizer(KINDS["special tokens"], 64), HuggingFaceTokenizer.from_str(KINDS["special tokens"])
    encoded, expected = tokenizer.encode("the,  there a"), library.encode("the,  there a")
    np.testing.assert_array_equal(encoded.offsets, expected.offsets)
    assert encoded.special.tolist() == list(map(bool, expected.special_tokens_mask))
    assert encoded.segments.tolist() == expected.type_ids

"""Prompts begin with the start id, have no other special tokens around them, and keep their end when they are cut."""

import numpy as np
import pytest

from hplm.errors import Broken
from hplm.model.prompts import Prompts, cut_prompt
from hplm.model.tokenizer import Tokenizer
from testing.random_store import byte_tokenizer_json
from testing.toy import CHAT, CONFIG
from tests.support.message import mentioning

TEXTS = ("Hello  World\n", "naïve 水 🙂", "", " ")


@pytest.fixture(scope="module")
def prompts():
    return Prompts(byte_tokenizer_json(CHAT.vocabulary), CHAT)


def test_a_prompt_begins_with_the_start_id_and_comes_back(prompts):
    for text, tokens in zip(TEXTS, prompts.encode_all(TEXTS), strict=True):
        assert tokens[0] == CHAT.start_id and len(tokens) == 1 + len(text.encode())
        assert tokens.dtype == np.int64 and np.array_equal(tokens, prompts.encode(text))
        assert prompts.decode(tokens) == text


def test_a_template_that_begins_with_the_start_id_gets_no_other_one(prompts):
    start = f"<|{CHAT.start_id}|>"
    assert np.array_equal(prompts.encode(start + "a"), prompts.encode("a"))
    assert prompts.decode(prompts.encode("a"), special=True) == start + "a"


def test_a_prompt_that_is_cut_keeps_its_end(prompts):
    tokens = prompts.encode("abcdef")
    assert prompts.decode(cut_prompt(tokens, 4)) == "def" and cut_prompt(tokens, 4)[0] == CHAT.start_id
    assert np.array_equal(cut_prompt(tokens, 7), tokens)
    assert cut_prompt(tokens, 1).tolist() == [CHAT.start_id]


def test_documents_of_a_decoder_are_cut_into_pieces_behind_the_start_id():
    tokenizer = Tokenizer(byte_tokenizer_json(CHAT.vocabulary), 5, CHAT.start_id)
    pieces = tokenizer.encode_documents(["abcdefghi", "x"])
    assert [len(piece) for piece in pieces] == [5, 5, 2, 2] and all(piece[0] == CHAT.start_id for piece in pieces)
    assert tokenizer._tokenizer.decode(np.concatenate([piece[1:] for piece in pieces[:3]]).tolist()) == "abcdefghi"


def test_an_encoder_has_no_prompts():
    with pytest.raises(ValueError, match=CONFIG.name):
        Prompts(byte_tokenizer_json(300), CONFIG)


def test_a_broken_tokenizer_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(Broken, match=mentioning(path)):
        Prompts.load(path, CHAT)
    path.write_text("{}")
    with pytest.raises(Broken, match=mentioning(path)):
        Prompts.load(path, CHAT)

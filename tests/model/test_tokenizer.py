import numpy as np
import pytest
from tokenizers import Encoding

from hplm.errors import InvalidInput
from hplm.model.tokenizer import MOST_IN_WINDOWS, Tokenizer, first_tokens, words_of
from testing.random_store import tokenizer_json, word
from testing.toy import CONFIG, WORDS
from tests.support.message import mentioning


@pytest.fixture
def tokenizer(toy):
    return toy.store.tokenizer()


def test_offsets_are_code_points(tokenizer):
    text = f"日本 {word(3)}"
    encoded = tokenizer.encode(text)
    assert text[slice(*encoded.offsets[-2])] == word(3)


def test_first_token_of_each_word(tokenizer):
    text = f"{word(1)},{word(2)}  {word(3)} \x00 {word(4)}"
    encoded = tokenizer.encode(text)
    spans = words_of(text)
    tokens = first_tokens(encoded, spans)
    assert [text[start:stop] for start, stop in spans] == [f"{word(1)},{word(2)}", word(3), "\x00", word(4)]
    assert tokens[2] == -1  # it has no token
    assert [encoded.offsets[token][0] for token in tokens[[0, 1, 3]]] == [spans[0][0], spans[1][0], spans[3][0]]


def test_an_unreadable_text_beside_a_readable_pair_has_no_tokens(tokenizer):
    encoded = tokenizer.encode("\u200b \u200b", word(1))
    assert (first_tokens(encoded, words_of("\u200b \u200b")) == [-1, -1]).all()


def test_truncated_words_have_no_token(tokenizer):
    text = " ".join(word(i) for i in range(100))
    tokens = first_tokens(tokenizer.encode(text, truncate=True), words_of(text))
    assert (tokens[:62] == range(1, 63)).all() and (tokens[62:] == -1).all()


@pytest.mark.parametrize("lengths", [(100, 3), (3, 100), (100, 100), (31, 31), (30, 31)])
def test_a_truncated_pair_fills_the_model_and_keeps_both(tokenizer, lengths):
    first, second = (" ".join(word(i) for i in range(length)) for length in lengths)
    encoded = tokenizer.encode(first, second, truncate=True)
    assert len(encoded.tokens) == min(64, sum(lengths) + 3)
    assert (encoded.segments == 0).sum() - 2 >= min(lengths[0], 30)
    assert (encoded.segments == 1).sum() - 1 >= min(lengths[1], 30)
    assert encoded.tokens[-1] == 3


@pytest.mark.parametrize("text, named", [("", []), ("  \n", []), ("\x00", []), ("wa " * 63, [65, 64, "truncate=true"])])
def test_unreadable_texts_are_refused(tokenizer, text, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        tokenizer.encode(text)


def test_a_long_document_is_split_into_pieces_without_loss(tokenizer):
    words = " ".join(WORDS[i % 50] for i in range(3 * tokenizer.positions))
    whole, short = Tokenizer(tokenizer_json(CONFIG.vocabulary), 10_000).encode_documents([words, WORDS[0]])
    pieces = tokenizer.encode_documents([words])
    assert len(pieces) == 4 and all(len(piece) <= tokenizer.positions for piece in pieces)
    assert all((piece[0], piece[-1]) == (whole[0], whole[-1]) for piece in pieces)
    assert np.concatenate([piece[1:-1] for piece in pieces]).tolist() == whole[1:-1].tolist()
    assert [piece.tolist() for piece in tokenizer.encode_documents([WORDS[0]])] == [short.tolist()]


@pytest.mark.parametrize("lengths", [(100, None), (100, 3), (3, 100), (80, 90), (70, 0)])
def test_truncation_is_that_of_the_library(tokenizer, lengths):
    first, second = (None if length is None else "x" if length == 0 else " ".join(WORDS[:length]) for length in lengths)
    encoded = tokenizer.encode(first, second, truncate=True)
    library = tokenizer._tokenizer
    library.enable_truncation(tokenizer.positions, strategy="longest_first" if second else "only_first")
    theirs = library.encode(first, second)
    library.no_truncation()
    assert encoded.tokens.tolist() == theirs.ids and encoded.segments.tolist() == theirs.type_ids
    assert encoded.offsets.tolist() == [list(span) for span in theirs.offsets]
    assert encoded.special.tolist() == list(map(bool, theirs.special_tokens_mask))


@pytest.mark.parametrize("words", [10, 58, 59, 87, 88, 89, 150, 400])
def test_windows_are_those_of_the_library(tokenizer, words):
    first, second = " ".join(WORDS[:4]), " ".join(WORDS[i % 150] for i in range(words))
    encoded = tokenizer.encode(first, second, in_windows=True)
    library = tokenizer._tokenizer
    library.enable_truncation(tokenizer.positions, stride=28, strategy="only_second")  # 57 are left, half of them overlap
    theirs = library.encode(first, second)
    library.no_truncation()
    windows = [theirs, *theirs.overflowing]
    assert encoded.lengths.tolist() == [len(window.ids) for window in windows] and len(encoded.tokens) == sum(encoded.lengths)
    assert encoded.tokens.tolist() == [token for window in windows for token in window.ids]
    assert encoded.segments.tolist() == [segment for window in windows for segment in window.type_ids]
    assert encoded.offsets.tolist() == [list(span) for window in windows for span in window.offsets]


def test_a_text_that_leaves_no_room_for_windows_is_refused_or_cut(tokenizer):
    first, second = " ".join(WORDS[:30]), " ".join(WORDS[:100])
    assert len(tokenizer.encode(" ".join(WORDS[:29]), second, in_windows=True).lengths) > 1
    with pytest.raises(InvalidInput, match=mentioning(64, "truncate=true")):
        tokenizer.encode(first, second, in_windows=True)
    assert tokenizer.encode(first, second, truncate=True, in_windows=True).lengths.tolist() == [64]


def test_a_pair_of_too_many_characters_is_not_read_in_windows(tokenizer):
    longest = f"{WORDS[0]} " * 1000
    longest += "x" * (MOST_IN_WINDOWS - len(longest))
    assert len(tokenizer.encode(WORDS[1], longest, in_windows=True).lengths) > 1
    with pytest.raises(InvalidInput, match=mentioning(64, "truncate=true")):
        tokenizer.encode(WORDS[1], longest + "x", in_windows=True)
    assert tokenizer.encode(WORDS[1], longest + "x", truncate=True, in_windows=True).lengths.tolist() == [64]


def test_a_long_text_with_a_long_pair_costs_the_sum_of_both(tokenizer):
    """The library also encodes pieces that it cuts off, and for a pair all their combinations: here some hundred thousand."""
    long = " ".join(WORDS * 200)
    assert len(tokenizer.encode(long, long, truncate=True).tokens) == tokenizer.positions


def test_truncated_parts_are_not_kept_in_memory(tokenizer):
    text = " ".join(word(i) for i in range(100))
    cut, whole = tokenizer.encode(text, truncate=True), Tokenizer(tokenizer_json(CONFIG.vocabulary), 10_000).encode(text)
    assert not any(isinstance(held, Encoding) for held in vars(cut).values())
    assert (cut.offsets[:63] == whole.offsets[:63]).all() and len(cut.offsets) == len(cut.special) == 64

"""Tokens are those of the library, whether a text is read by words, cut where it is long, or in windows."""

import json
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from hplm.errors import InvalidInput
from hplm.model import tokenizer as tokenizer_module
from hplm.model import words
from hplm.model.tokenizer import MOST_IN_WINDOWS, Tokenizer
from hplm.model.word_spans import first_tokens, words_of
from testing.random_store import tokenizer_json
from testing.toy import CONFIG, WORDS
from tests.support.message import mentioning


@pytest.fixture
def tokenizer(toy):
    return toy.store.tokenizer()


def test_a_word_that_was_cut_off_has_no_token(tokenizer):
    long = " ".join(WORDS[:100])
    tokens = first_tokens(tokenizer.encode(long, truncate=True), words_of(long))
    assert (tokens[:62] == range(1, 63)).all() and (tokens[62:] == -1).all()


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


def assert_as_the_library(tokenizer, first, second, truncation, **given):
    """Compares with the library's own cutting, into one window or several."""
    library = HuggingFaceTokenizer.from_str(tokenizer_json(CONFIG.vocabulary))
    library.enable_truncation(tokenizer.positions, **truncation)
    found, theirs = tokenizer.encode(first, second, **given), library.encode(first, second)
    windows = [theirs, *theirs.overflowing] if "stride" in truncation else [theirs]
    assert found.lengths.tolist() == [len(window.ids) for window in windows]
    assert found.tokens.tolist() == [token for window in windows for token in window.ids]
    assert found.segments.tolist() == [segment for window in windows for segment in window.type_ids]
    assert found.offsets.tolist() == [list(span) for window in windows for span in window.offsets]
    assert (found.parts < 0).tolist() == [bool(special) for window in windows for special in window.special_tokens_mask]


@pytest.mark.parametrize("lengths", [(100, None), (100, 3), (3, 100), (80, 90), (70, 0), (30, 31)])
def test_truncation_is_that_of_the_library(tokenizer, lengths):
    first, second = (None if length is None else "x" if length == 0 else " ".join(WORDS[:length]) for length in lengths)
    strategy = {"strategy": "longest_first" if second else "only_first"}
    assert_as_the_library(tokenizer, first, second, strategy, truncate=True)
    both = tokenizer.encode(" ".join(WORDS[:100]), " ".join(WORDS[:100]), truncate=True)
    assert len(both.tokens) == 64 and (both.segments == 1).sum() in (31, 32)


@pytest.mark.parametrize("words", [10, 58, 59, 87, 88, 89, 150, 400])
def test_windows_are_those_of_the_library(tokenizer, words):
    first, second = " ".join(WORDS[:4]), " ".join(WORDS[i % 150] for i in range(words))
    windows = {"stride": 28, "strategy": "only_second"}  # 57 are left, half of them overlap
    assert_as_the_library(tokenizer, first, second, windows, in_windows=True)


def test_a_pair_whose_text_leaves_no_room_or_that_has_too_many_characters_is_refused_or_cut(tokenizer):
    longest = f"{WORDS[0]} " * 1000
    longest += "x" * (MOST_IN_WINDOWS - len(longest))
    for first, second, named in (
        (" ".join(WORDS[:29]), " ".join(WORDS[:100]), ()), (" ".join(WORDS[:30]), " ".join(WORDS[:100]), (64,)),
        (WORDS[1], longest, ()), (WORDS[1], longest + "x", ("passage", "32,769", "32,768")),
    ):  # fmt: skip
        if not named:
            assert len(tokenizer.encode(first, second, in_windows=True).lengths) > 1
            continue
        with pytest.raises(InvalidInput, match=mentioning(*named, "truncate=true")):
            tokenizer.encode(first, second, in_windows=True)
        assert tokenizer.encode(first, second, truncate=True, in_windows=True).lengths.tolist() == [64]


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LONG_TOKEN, NAME = "[a.b.c.d.e.f]", "new york"
PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789.,;!?[]'-", "the", "there", "un", "日", "本", "語", "。", "ᄒ", "ᅡ", "ᆫ", "σ"]
# A cut might break these: words that go on, marks and conjoining letters that belong to the character before them, characters
# that are removed, all kinds of white space, and tokens that are found before words are.
ODD = [
    " ", "  ", "\t", "\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2003", "\u3000", "\u2028",
    "\x00", "\u200b", "\u200d", "\ufeff", "\ufffd", "\xad", "\u0301", "\u0327", "\u0338", "\u302e", "\U0001d165", "\U0001d16d",
    "é", "ﬁ", "İ", "ß", "Σ", "ς", "한", "ᄒ", "ᅡ", "ᆫ", "日本語", "。", "·", "…", "\U0001f469\u200d\U0001f467", "-", "'", "...",
    "[", "]", "[MASK]", "[MA", "SK]", "[SEP]", LONG_TOKEN, "the", "there", "unthere", "Xylophone", "a" * 30, "zz top", "3.14",
    ",", "ΑΣ", "水水", "x" * 40, "un ", "a",
]  # fmt: skip


def texts_of(most):
    """Draws texts of up to so many parts."""
    return st.lists(st.sampled_from(ODD) | st.text(max_size=3), min_size=1, max_size=most).map("".join)


TEXTS = texts_of(60)


def made(normalizer=None, added=(), **flags) -> str:
    """Returns a tokenizer.json. `added` are tokens that are found before words are."""
    pieces = [*SPECIAL, *PIECES, *(f"##{piece}" for piece in PIECES)]
    entries = {token: number for number, token in enumerate(pieces)}
    tokenizer = HuggingFaceTokenizer(models.WordPiece(entries, unk_token="[UNK]", max_input_chars_per_word=20))
    tokenizer.normalizer = normalizer or normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", entries["[SEP]"]), ("[CLS]", entries["[CLS]"]))
    tokenizer.add_special_tokens(list(added))
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = [{**token, **flags} for token in stored["added_tokens"]]
    return json.dumps(stored)


KINDS = {
    "no added tokens": made(),
    "special tokens": made(added=SPECIAL),
    "a long token": made(added=[LONG_TOKEN]),
    "special tokens with spaces": made(added=SPECIAL, lstrip=True, rstrip=True),
    "special tokens as words": made(added=SPECIAL, single_word=True),
    "cased": made(normalizers.BertNormalizer(lowercase=False, clean_text=False), added=SPECIAL),
    "another normalizer": made(normalizers.Sequence([normalizers.NFKC(), normalizers.BertNormalizer()])),
    "tokens found in normalized text": made(added=["[MASK]", NAME], normalized=True),
}
UNREAD = ("special tokens with spaces", "another normalizer", "tokens found in normalized text")  # by words


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@example(text="the " * 200, pair=None)
@example(text="the " * 200, pair="there, " * 150)
@example(text="日本語" * 100, pair="x")
@example(text=f"a a a a a a {LONG_TOKEN} the end of this, then more", pair=None)
@example(text="a" * 1000 + " the", pair=None)
@example(text="\x00" * 1000 + " the" * 100, pair="\u200b" * 500)
@example(text="a " * 9 + NAME[:-1] + "\x00" * 100 + NAME[-1] + " the" * 40, pair=None)
@given(text=TEXTS, pair=st.none() | TEXTS)
def test_a_cut_text_has_the_first_tokens_of_the_whole_text(kind, text, pair):
    """So few characters are read for a token that a text is read in several beginnings."""
    positions = 12
    whole = HuggingFaceTokenizer.from_str(KINDS[kind]).encode(text, pair)
    if not text.strip() or not any(part is not None for part in whole.sequence_ids):
        with pytest.raises(InvalidInput):
            Tokenizer(KINDS[kind], positions).encode(text, pair, truncate=True)
        return
    with patch.multiple(tokenizer_module, CHARACTERS_A_TOKEN=2, GROWTH=2):
        found = Tokenizer(KINDS[kind], positions).encode(text, pair, truncate=True)
    expected, taken = [], {0: int((found.parts == 0).sum()), 1: int((found.parts == 1).sum()), None: positions}
    for *token, part, (start, stop) in zip(whole.ids, whole.type_ids, whole.sequence_ids, whole.offsets, strict=True):
        taken[part] -= 1
        own = "" if part is None else (text, pair)[part][start:stop].lstrip()
        if taken[part] >= 0:
            expected.append([*token, stop - len(own), stop])
    assert np.column_stack([found.tokens, found.segments, found.offsets]).tolist() == expected
    assert len(expected) == min(len(whole), positions)


class Counting:
    """Counts the characters that a tokenizer of the library reads."""

    def __init__(self, library: HuggingFaceTokenizer) -> None:
        self.library, self.characters = library, 0

    def encode(self, text, **options):
        self.characters += len(text)
        return self.library.encode(text, **options)

    def encode_batch(self, given, **options):
        self.characters += sum(len(one) if isinstance(one, str) else sum(map(len, one)) for one in given)
        return self.library.encode_batch(given, **options)


def counting(kind):
    """Returns a tokenizer, and the counting one of the library that it asks."""
    tokenizer, library = Tokenizer(kind, 512), Counting(HuggingFaceTokenizer.from_str(kind))
    tokenizer._tokenizer = library
    return tokenizer, library


LONG = "the unthere, " * 8000


@pytest.mark.parametrize("pair", [None, "there", LONG], ids=["alone", "short pair", "long pair"])
@pytest.mark.parametrize("text", [LONG, "日本語" * 33_000], ids=["words", "no spaces"])
def test_little_of_a_long_text_is_tokenised(text, pair):
    tokenizer, library = counting(KINDS["special tokens"])
    assert len(tokenizer.encode(text, pair, truncate=True).tokens) == 512
    assert library.characters < 20_000
    with pytest.raises(InvalidInput, match=mentioning("512", "truncate=true")):
        tokenizer.encode(text, pair)
    with pytest.raises(InvalidInput, match=mentioning("512", "truncate=true")):
        tokenizer.encode(text, "there", in_windows=True)
    assert library.characters < 60_000


def numbers(tokens: bytes) -> list[int]:
    return np.frombuffer(tokens, np.int64).tolist()


EDGES = ["", "  ", "\x00", "the [MASK] a", "a\x1cthe a", " a  the ", f"a {LONG_TOKEN} the", "x" * 40, "the " * 38, "the " * 39]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(texts=st.lists(texts_of(24) | st.just(""), min_size=1, max_size=5))
@example(texts=EDGES)
def test_texts_are_read_by_words_as_the_library_reads_them(kind, texts):
    """The others are left to the library: those that it may refuse or cut, and all of some tokenizers."""
    tokenizer, library = Tokenizer(KINDS[kind], 40), HuggingFaceTokenizer.from_str(KINDS[kind])
    for _ in range(2):  # the second time from memory
        for text, tokens in zip(texts, tokenizer.by_words(texts), strict=True):
            own = library.encode(text).ids
            read = kind not in UNREAD and 2 < len(own) <= 40 and len(text) <= 320
            assert numbers(tokens) == (own if read else [])


def test_few_words_are_remembered_and_forgotten_ones_come_back_beside_new_ones(monkeypatch):
    """A word that is remembered is not read by the library again. Long ones never are."""
    library = HuggingFaceTokenizer.from_str(KINDS["no added tokens"])
    monkeypatch.setattr(words, "MOST", 4)
    counted, many = Counting(library), [f"there{number}" for number in range(9)]
    read, several = words.Words(counted), (["the \x00 b", "\x00 the"], ["the c d e", "a \x00"], ["x" * 50])
    for texts in (["the a"], *several, *([f"the a {one} the"] for one in many), *several):
        assert [numbers(tokens) for tokens in read.tokens(texts)] == [library.encode(text).ids for text in texts]
    for asked, characters in ((many, 9 * 6), (["x" * 50], 50), (many[-1:], 0)):
        counted.characters = 0
        for one in asked:
            read.tokens([one])
        assert counted.characters == characters

"""A long text is tokenised only as far as needed, and the result is that of tokenising all of it."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from hplm.errors import InvalidInput
from hplm.model import tokenizer as tokenizer_module
from hplm.model.tokenizer import Tokenizer
from tests.support.message import mentioning

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LONG_TOKEN = "[a.b.c.d.e.f]"
PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789.,;!?[]'-", "the", "there", "un", "日", "本", "語", "。", "ᄒ", "ᅡ", "ᆫ", "σ"]
POSITIONS = 12
# A cut might break these: words that go on, marks and conjoining letters that belong to the character before them, characters
# that are removed, all kinds of white space, and tokens that are found before words are.
ODD = [
    " ", "  ", "\t", "\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2003", "\u3000", "\u2028",
    "\x00", "\u200b", "\u200d", "\ufeff", "\ufffd", "\xad", "\u0301", "\u0327", "\u0338", "\u302e", "\U0001d165", "\U0001d16d",
    "é", "ﬁ", "İ", "ß", "Σ", "ς", "한", "ᄒ", "ᅡ", "ᆫ", "日本語", "。", "·", "…", "\U0001f469\u200d\U0001f467", "-", "'", "...",
    "[", "]", "[MASK]", "[MA", "SK]", "[SEP]", LONG_TOKEN, "the", "there", "unthere", "Xylophone", "a" * 30, "zz top", "3.14",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(ODD) | st.text(max_size=3), min_size=1, max_size=150).map("".join)


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
}


def outcome(tokenizer: Tokenizer, text: str, pair: str | None) -> list | type:
    try:
        encoded = tokenizer.encode(text, pair, truncate=True)
    except InvalidInput as error:
        return type(error)
    return [part.tolist() for part in (encoded.tokens, encoded.segments, encoded.offsets, encoded.special)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@example(text="the " * 200, pair=None)
@example(text="the " * 200, pair="there, " * 150)
@example(text="日本語" * 100, pair="x")
@example(text=f"a a a a a a {LONG_TOKEN} the end of this, then more", pair=None)
@example(text="a" * 1000 + " the", pair=None)
@example(text="\x00" * 1000 + " the" * 100, pair="\u200b" * 500)
@given(text=TEXTS, pair=st.none() | TEXTS)
def test_a_cut_text_has_the_tokens_of_the_whole_text(kind, text, pair):
    cutting, whole = Tokenizer(KINDS[kind], POSITIONS), Tokenizer(KINDS[kind], POSITIONS)
    assert cutting._added_length is not None
    whole._added_length = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokenizer_module, "CHARACTERS_A_TOKEN", 2)
        patched.setattr(tokenizer_module, "GROWTH", 2)
        assert outcome(cutting, text, pair) == outcome(whole, text, pair)


class Counting:
    """Counts the characters that the library tokenises."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._library, self.characters = tokenizer._tokenizer, 0
        tokenizer._tokenizer = self

    def encode(self, text, **options):
        self.characters += len(text)
        return self._library.encode(text, **options)

    def encode_batch(self, given):
        self.characters += sum(len(one) if isinstance(one, str) else sum(map(len, one)) for one in given)
        return self._library.encode_batch(given)


LONG = "the unthere, " * 8000


@pytest.mark.parametrize("pair", [None, "there", LONG], ids=["alone", "short pair", "long pair"])
@pytest.mark.parametrize("text", [LONG, "日本語" * 33_000], ids=["words", "no spaces"])
def test_little_of_a_long_text_is_tokenised(text, pair):
    tokenizer = Tokenizer(KINDS["special tokens"], 512)
    counting = Counting(tokenizer)
    assert len(tokenizer.encode(text, pair, truncate=True).tokens) == 512
    assert counting.characters < 20_000
    with pytest.raises(InvalidInput, match=mentioning("512", "truncate=true")):
        tokenizer.encode(text, pair)
    assert counting.characters < 40_000


@pytest.mark.parametrize(
    "kind",
    [
        made(normalizers.Sequence([normalizers.NFKC(), normalizers.BertNormalizer()])),
        made(added=["[MASK]", "new york"], normalized=True),
    ],
    ids=["another normalizer", "tokens found in normalized text"],
)
def test_a_text_that_cannot_be_cut_safely_is_tokenised_whole(kind):
    tokenizer = Tokenizer(kind, 512)
    counting = Counting(tokenizer)
    assert len(tokenizer.encode(LONG, truncate=True).tokens) == 512
    assert counting.characters == len(LONG)

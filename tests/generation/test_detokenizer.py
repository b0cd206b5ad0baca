"""Text while it comes: characters stay whole, stop strings are never said, and the sum of the parts is the whole."""

from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hplm.generation.detokenizer import MOST_HELD, Detokenizer


def by_bytes(ids):
    """Decodes tokens that are bytes, as byte-level tokenizers do."""
    return bytes(ids).decode("utf-8", "replace")


def by_runs(ids):
    """Decodes as tokenizers with a byte fallback do: a run of bytes that is not whole becomes one sign for each byte."""
    try:
        return bytes(ids).decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(id) if id < 128 else "\ufffd" for id in ids)


def with_spaces(ids):
    """Decodes as SentencePiece does: words, without the space before the first. Token 99 has no text."""
    return "".join(f" w{id}" for id in ids if id != 99).lstrip(" ")


def in_pieces(*pieces, decode=by_bytes):
    return lambda ids: decode(b"".join(pieces[id] for id in ids))


def said(detokenizer, ids):
    parts = []
    for id in ids:
        parts.append(detokenizer.add([id]))
        if detokenizer.stopped:
            return parts
    return [*parts, detokenizer.end()]


@pytest.mark.parametrize(
    ("detokenizer", "ids", "parts"),
    [
        (Detokenizer(with_spaces), [0, 1, 2], ["w0", " w1", " w2", ""]),
        (Detokenizer(with_spaces, before=[8, 9]), [1, 2], [" w1", " w2", ""]),
        (Detokenizer(with_spaces), [1, 99, 2, 99, 99], ["w1", "", " w2", "", "", ""]),
        (Detokenizer(by_bytes, ["abcd"]), b"xabcx", ["x", "", "", "", "abcx", ""]),
        (Detokenizer(by_bytes, ["abcd"]), b"xabc", ["x", "", "", "", "abc"]),
        (Detokenizer(in_pieces(b"hello ", b"wor", b"ld. And", b" more"), ["ld. A"]), range(4), ["hello ", "wor", ""]),
        (Detokenizer(by_bytes), b"ab\xf0\x9f", ["a", "b", "", "", "\ufffd"]),
        (Detokenizer(by_runs, before="水火".encode()[-4:]), "木a".encode(), ["", "", "木", "a", ""]),
        (Detokenizer(by_runs, before=b"\xff"), b"a", ["a", ""]),
    ],
)
def test_a_text_comes_in_these_parts(detokenizer, ids, parts):
    assert said(detokenizer, ids) == parts


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
    detokenizer = Detokenizer(by_bytes)
    assert "".join(detokenizer.add([0xFF]) for _ in range(3 * MOST_HELD)) == "\ufffd" * 3 * MOST_HELD
    assert detokenizer.end() == ""
    assert "".join(said(Detokenizer(by_bytes), b"\xff\xfea")) == "\ufffd\ufffda"


STOPS = st.lists(st.text("ab 水👍", min_size=1, max_size=3), max_size=2)


@pytest.mark.parametrize("decode", [by_bytes, by_runs])
@given(text=st.text("ab 水👍é\n", max_size=30), stops=STOPS, data=st.data())
def test_any_text_cut_anywhere_is_said_up_to_its_first_stop_string(decode, text, stops, data):
    """And no part has a piece of a character."""
    assume(not any(one in other for one, other in permutations(stops, 2)))  # the shorter one would end first
    raw, pieces = text.encode(), []
    while raw:
        size = data.draw(st.integers(1, 6))
        pieces.append(raw[:size])
        raw = raw[size:]
    detokenizer = Detokenizer(in_pieces(*pieces, decode=decode), stops)
    found = [text.index(stop) for stop in stops if stop in text]
    assert "".join(said(detokenizer, range(len(pieces)))) == (text[: min(found)] if found else text)
    assert detokenizer.stopped == bool(found)

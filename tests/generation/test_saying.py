"""Text while it comes: characters stay whole, stop strings are never said, and the sum of the parts is the whole."""

import random

import pytest

from hplm.generation.saying import MOST_HELD, Saying


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
    """Decodes as SentencePiece does: words, without the space before the first."""
    return "".join(f" w{id}" for id in ids).lstrip(" ")


def said(saying, ids):
    parts = []
    for id in ids:
        parts.append(saying.add([id]))
        if saying.stopped:
            return parts
    parts.append(saying.end())
    return parts


TEXT = "naïve 水 and 👩‍👩‍👧‍👦🇩🇪 👍🏽 done"


@pytest.mark.parametrize("decode", [by_bytes, by_runs])
def test_characters_are_said_whole(decode):
    parts = said(Saying(decode), TEXT.encode())
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert max(map(len, parts)) == 1


def test_words_keep_their_spaces():
    parts = said(Saying(with_spaces), range(5))
    assert parts == ["w0", " w1", " w2", " w3", " w4", ""]


def test_the_first_word_has_its_space_behind_the_prompt():
    assert said(Saying(with_spaces, before=[8, 9]), [1, 2]) == [" w1", " w2", ""]


def test_bytes_that_are_no_character_are_said_at_the_end():
    assert "".join(said(Saying(by_bytes), b"ab\xf0\x9f")) == "ab\ufffd"
    assert "".join(said(Saying(by_bytes), b"\xff\xfea")) == "\ufffd\ufffda"


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
    saying = Saying(by_bytes)
    parts = [saying.add([0xFF]) for _ in range(3 * MOST_HELD)]
    assert "".join(parts) == "\ufffd" * 3 * MOST_HELD
    assert saying.end() == ""


def test_tokens_without_text_take_no_space_from_the_next():
    def decode(ids):
        return with_spaces([id for id in ids if id != 99])

    assert said(Saying(decode), [1, 99, 2, 99, 99]) == ["w1", "", " w2", "", "", ""]


@pytest.mark.parametrize("stop", ["END", "👍🏽", " 水", "\n\n", "ND"])
def test_nothing_of_a_stop_string_is_said(stop):
    text = f"one EN two 👍 three \n{stop} never"
    saying = Saying(by_bytes, ["nowhere", stop])
    assert "".join(said(saying, text.encode())) == text[: text.index(stop)]
    assert saying.stopped


def test_the_first_stop_string_counts():
    saying = Saying(by_bytes, ["cd", "bcd", "e"])
    assert "".join(said(saying, b"abcde")) == "a"


def test_the_beginning_of_a_stop_string_is_said_when_it_is_none():
    saying = Saying(by_bytes, ["abcd"])
    assert said(saying, b"xabcx") == ["x", "", "", "", "abcx", ""]
    assert said(Saying(by_bytes, ["abcd"]), b"xabc") == ["x", "", "", "", "abc"]


def test_a_stop_string_in_one_token_with_other_text():
    def decode(ids):
        return "".join(["hello ", "wor", "ld. And", " more"][id] for id in ids)

    assert said(Saying(decode, ["ld. A"]), [0, 1, 2, 3]) == ["hello ", "wor", ""]


def test_a_stop_string_counts_only_where_it_may():
    saying = Saying(by_bytes, ["b"])
    assert [saying.add([id], may_stop=False) for id in b"ab"] == ["a", "b"] and not saying.stopped
    assert saying.add(list(b"cbd")) == "c" and saying.stopped


def test_any_text_cut_anywhere_is_said_up_to_its_first_stop_string():
    chance = random.Random(0)
    for _ in range(500):
        text = "".join(chance.choice("ab 水👍é") for _ in range(chance.randrange(30)))
        stops = ["".join(chance.choice("ab 水👍") for _ in range(chance.randrange(1, 4))) for _ in range(chance.randrange(3))]
        raw, pieces = text.encode(), []
        while raw:
            size = chance.randrange(1, 6)
            pieces.append(raw[:size])
            raw = raw[size:]

        def decode(ids, pieces=pieces):
            return b"".join(pieces[id] for id in ids).decode("utf-8", "replace")

        parts = said(Saying(decode, stops), range(len(pieces)))
        found = [text.index(stop) for stop in stops if stop in text]
        assert "".join(parts) == (text[: min(found)] if found else text)

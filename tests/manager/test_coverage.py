"""How the console tells which words the tables of a domain know: held to the words of the corpora themselves."""

import random

import pytest

from hplm.errors import HplmError
from manager.coverage import ALONE, COMPUTED, SHORTENED, WHOLE, parts_of
from tests.builder.stores import decoder_store, some_lines, with_bio
from tests.model.decoders import drawn, llama, saved
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def windows(lines, count):
    """The runs of `count` words of lines, whose ends count too."""
    ended = [["^", *line.split(), "$"] for line in lines]
    return {tuple(words[at : at + count]) for words in ended for at in range(len(words) - count + 1)}


def test_each_word_is_told_by_the_windows_of_the_corpora(tmp_path):
    store, lines = with_bio(tmp_path), [*some_lines(20, 0), *some_lines(30, 1)]
    whole, pairs = windows(lines, 3), windows(lines, 2)
    known = sorted({word for line in lines for word in line.split()})
    words = random.Random(5).choices(known[:12], k=30) + lines[-1].split()
    text = f"  {' '.join(words)}\n"
    parts = parts_of(store.folder, "bio", 1, text)
    assert "".join(part for part, _ in parts) == text
    assert [part for part, kind in parts if kind] == words
    around = ["^", *words, "$"]
    wanted = [
        WHOLE if tuple(around[at - 1 : at + 2]) in whole else SHORTENED if tuple(around[at : at + 2]) in pairs else ALONE
        for at in range(1, len(words) + 1)
    ]
    assert [kind for _, kind in parts if kind] == wanted and {*wanted} == {WHOLE, SHORTENED, ALONE}
    with pytest.raises(HplmError) as caught:
        parts_of(store.folder, "none", 1, text)
    assert mentions(str(caught.value), "none", "meta.json")


def test_a_decoder_computes_the_words_that_its_tables_lack(tmp_path):
    model = saved(drawn(llama()), tmp_path / "tiny", starts=True)
    (corpus := tmp_path / "corpus.txt").write_text("red 3: x\n" * 20)
    store = decoder_store(str(model), tmp_path / "store", 2, [corpus])
    text = "red 3: green"
    parts = parts_of(store.folder, "root", 1, text)
    assert "".join(part for part, _ in parts) == text
    kinds = [(part, kind) for part, kind in parts if kind]
    assert kinds[0] == ("red", WHOLE) and kinds[-1] == ("green", COMPUTED)
    assert {kind for _, kind in kinds} == {WHOLE, COMPUTED}

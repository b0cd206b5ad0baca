"""A corpus has all its inputs, counts are those of a dictionary, and a table takes the most frequent n-grams of each length."""

import gzip
import json
import os
import tempfile
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.store.resumable import write_json
from builder.tables import counts as counts_room
from builder.tables import sorted_runs
from builder.tables.corpus import Corpus, tokenize_corpus
from builder.tables.counts import add_counts, count_ngrams, most_bytes
from builder.tables.ranking import SHORTER_IN_ROOT, Ranking
from builder.tables.sorted_runs import Run, rows_in
from builder.tables.text_files import LONGEST_LINE, READ_AT_ONCE
from builder.tasks.examples import read_corpus
from hplm.disk import bytes_in
from hplm.errors import Broken, InvalidInput
from hplm.model.tokenizer import Tokenizer
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace
from testing.random_store import tokenizer_json
from testing.reference import windows_of
from testing.toy import CONFIG
from tests.builder.stores import some_lines
from tests.support.killed import content
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

MANY_RUNS = 3000  # bytes: some tens of tokens a run


@pytest.mark.parametrize("pattern", [b"a", b"word " * 4095 + b"word\n"], ids=["one line", "many lines"])
def test_what_unpacks_to_thousands_of_times_its_size_is_refused(tmp_path, pattern):
    piece = 1 << 27
    path = tmp_path / "bomb.txt.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(pattern * (piece // len(pattern))))  # some ten KB
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=mentioning(path)):
            for _ in read_corpus([path]):
                pass
        assert tracemalloc.get_traced_memory()[1] < piece
    finally:
        tracemalloc.stop()


def test_a_text_that_repeats_itself_is_read_and_a_line_that_no_document_needs_is_not(tmp_path):
    path = tmp_path / "repeats.txt.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b"the same\n" * 100_000))
    assert sum(1 for _ in read_corpus([path])) == 100_000
    path = tmp_path / "one_line.txt"
    path.write_bytes(b"short\n" + b"word " * (LONGEST_LINE // 5 + 1))
    with pytest.raises(InvalidInput, match=mentioning(path, 2)):
        list(read_corpus([path]))


def test_a_pipe_is_read_and_has_no_progress(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        pool.submit(pipe.write_text, "one\ntwo\n")
        assert list(read_corpus([pipe], pytest.fail)) == ["one", "two"]


def test_the_corpus_contains_every_document_of_files_of_any_format(tmp_path):
    parts = [some_lines(30, seed) for seed in range(4)]
    parts[0][3], parts[1][3] = "{braces} are no JSON", "two\nlines"
    objects = "\n" + "\n".join(json.dumps({"text": text, "id": 4}) for text in parts[1])
    pieces = [["\n".join(part[:7]).encode() + b"\n", "\n".join(part[7:]).encode()] for part in parts]
    files = {
        "plain.txt": "\n\n".join(parts[0]).encode(),
        "objects.jsonl.gz": gzip.compress(objects.encode()),
        "members.gz": b"".join(map(gzip.compress, pieces[2])),
        "frames.txt.zst": b"".join(zstandard.ZstdCompressor().compress(piece) for piece in pieces[3]),
    }
    for name, packed in files.items():
        (tmp_path / name).write_bytes(packed)
    paths, documents = [tmp_path / name for name in files], list(chain(*parts))
    tokenizer, read = Tokenizer(tokenizer_json(CONFIG.vocabulary), positions=8), []
    assert list(read_corpus(paths, read.append)) == documents
    assert sum(read) == sum(path.stat().st_size for path in paths)
    corpus = tokenize_corpus(paths, tokenizer, tmp_path / "corpus")
    expected = tokenizer.encode_documents(documents)
    assert corpus.tokens == sum(map(len, expected))
    for document, ids in zip([*corpus, corpus[-1]], [*expected, expected[-1]], strict=True):
        assert document.dtype == np.int32
        np.testing.assert_array_equal(document, ids)
    with pytest.raises(InvalidInput, match=mentioning(tmp_path)):
        Corpus(tmp_path)  # it was never finished


spaces = st.builds(KeySpace, st.sampled_from([3, 200, 250_000]), st.builds(Window, st.integers(1, 5), st.booleans()))


def corpora(vocabulary, most=30):
    tokens = st.one_of(st.integers(0, min(vocabulary, 4) - 1), st.integers(vocabulary - 2, vocabulary - 1))
    return st.lists(st.lists(tokens, max_size=12), max_size=most)


def corpus_of(folder, documents):
    lengths = [len(document) for document in documents]
    folder.mkdir(parents=True)
    np.array(list(chain(*documents)), dtype=np.uint32).tofile(folder / "tokens")
    np.cumsum(lengths, dtype=np.uint64).tofile(folder / "ends")
    write_json(folder / "meta.json", {"documents": len(documents), "tokens": sum(lengths)})
    return Corpus(folder)


def expected_counts(space, documents):
    """Counts each window once, and each of its shorter forms once. A decoder's windows have none."""
    counts = Counter()
    for document in documents:
        windows = windows_of(space.window, [document])
        for window in windows:
            levels = space.window.levels()[: 1 if space.window.causal else None]
            forms = {tuple(np.where(keep, window, 0).tolist()) for keep in levels}
            counts.update(tuple(space.pack(np.array([form]))[0].tolist()) for form in forms)
    return counts


def stored_counts(counts):
    levels = [rows(counts, level) for level in range(len(counts.levels))]
    assert all(level == sorted(level) for level in levels)
    entries = [(tuple(key), count) for level in levels for key, count in level]
    assert len(dict(entries)) == len(entries) == sum(counts.levels)  # each at one level only
    return dict(entries)


def rows(counts, level):
    run, distinct = counts.run(level), counts.levels[level]
    keys = np.fromfile(run.keys, np.uint64).reshape(distinct, run.words)
    numbers = np.fromfile(run.counts, np.uint64)
    return list(zip(keys.tolist(), numbers.tolist(), strict=True))


@settings(max_examples=30)
@given(st.data(), spaces, st.sampled_from([1, 1000, MANY_RUNS, 1 << 20]), st.sampled_from([2, 64]))
def test_counts_and_their_sums_equal_those_of_a_dictionary(data, space, memory, width):
    """Takes seconds: each example counts corpora on the disk."""
    parts = [data.draw(corpora(space.vocabulary, most=15)) for _ in range(data.draw(st.integers(1, 3)))]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_runs, "WIDTH", width)
        folder = Path(name)
        counted = [
            count_ngrams(corpus_of(folder / f"corpus-{i}", part), space, folder / f"counts-{i}", memory)
            for i, part in enumerate(parts)
        ]
        added = add_counts(counted, folder / "added", memory)
        for counts, documents in zip([*counted, added], [*parts, list(chain(*parts))], strict=True):
            assert stored_counts(counts) == expected_counts(space, documents)
            assert (counts.tokens, counts.documents) == (sum(map(len, documents)), len(documents))
            left = {path.name for path in counts.folder.iterdir()}
            assert left == {"meta.json", *(f"{part}-{i}" for i in range(len(space.masks)) for part in ("keys", "counts"))}


def some_documents(number=12, vocabulary=200):
    generator = np.random.default_rng(0)
    return [(generator.zipf(1.5, size=generator.integers(1, 15)) % vocabulary).tolist() for _ in range(number)]


def test_counts_that_were_begun_with_other_memory_begin_anew(tmp_path):
    corpus, space = corpus_of(tmp_path / "corpus", some_documents()), KeySpace(200, Window(3))
    counts = count_ngrams(corpus, space, tmp_path / "counts", MANY_RUNS)
    for name in ("meta.json", "keys-1"):  # as if it was killed before
        (counts.folder / name).unlink()
    assert stored_counts(count_ngrams(corpus, space, counts.folder, 1 << 20)) == expected_counts(space, some_documents())


def test_a_corpus_is_never_taken_for_another_nor_filled_with_zeros(tmp_path):
    texts, tokenizer = [tmp_path / "one.txt", tmp_path / "two.txt"], Tokenizer(tokenizer_json(CONFIG.vocabulary), positions=64)
    for path, lines in zip(texts, (3, 4), strict=True):
        path.write_text("\n".join(some_lines(lines, 1)))
    corpus = tokenize_corpus(texts[:1], tokenizer, tmp_path / "corpus")
    with pytest.raises(InvalidInput, match=mentioning(corpus.folder, "one.txt", "two.txt")):
        tokenize_corpus(texts[1:], tokenizer, corpus.folder)
    (corpus.folder / "meta.json").replace(corpus.folder / "begun.json")  # as if it was killed before
    for part in ("ends", "tokens"):
        os.truncate(corpus.folder / part, 4)
        with pytest.raises(Broken, match=mentioning(corpus.folder / part, 4)):
            tokenize_corpus(texts[:1], tokenizer, corpus.folder)


def test_the_time_and_the_most_space_are_said_before(tmp_path, capsys):
    """From a first part, of which a block is read; and from a tenth of the tokens."""
    path, tokenizer = tmp_path / "corpus.txt", Tokenizer(tokenizer_json(CONFIG.vocabulary), positions=64)
    path.write_text("\n".join(some_lines(2000, 1)), "utf-8")
    assert (size := path.stat().st_size) > 2 * READ_AT_ONCE
    tokenize_corpus([path], tokenizer, tmp_path / "corpus", SimpleNamespace(monotonic=iter([0, 4]).__next__))
    assert mentions(capsys.readouterr().err, f"{size / 1e6:.1f} MB", f"{4 * size / READ_AT_ONCE:.0f} s", "GB")
    space = KeySpace(250_000, Window(3))
    corpus = corpus_of(tmp_path / "few", [list(range(start, start + 12)) for start in range(40)])
    counts = count_ngrams(corpus, space, tmp_path / "counts", MANY_RUNS, SimpleNamespace(monotonic=iter([0, 2]).__next__))
    assert mentions(capsys.readouterr().err, f"{corpus.tokens:,}", "20 s", "GB")
    assert 2 * bytes_in(counts.folder) <= most_bytes(corpus.tokens, space)  # beside it were runs of hardly more n-grams


def corpus_of_runs(folder, runs, memory, space, seed=0):
    """A corpus that is counted in so many runs."""
    documents = np.random.default_rng(seed).zipf(1.3, (runs * rows_in(memory, space.words) // 20, 20)) % space.vocabulary
    return corpus_of(folder / f"corpus-{runs}-{seed}", documents.tolist())


def test_reads_grow_with_the_number_of_runs_times_its_logarithm(tmp_path, monkeypatch):
    """16 times as many runs are merged in three levels instead of one, and not by 256 times as many reads."""
    monkeypatch.setattr(sorted_runs, "WIDTH", 4)
    space, memory, reads = KeySpace(30_000, Window(2)), 30_000, []
    read_keys, read_counts = Run.read_keys, Run.read_counts
    monkeypatch.setattr(Run, "read_keys", lambda *given: reads.append(given) or read_keys(*given))
    monkeypatch.setattr(Run, "read_counts", lambda *given: reads.append(given) or read_counts(*given))
    counted = []
    for runs in (4, 64):
        reads.clear()
        count_ngrams(corpus_of_runs(tmp_path, runs, memory, space), space, tmp_path / f"counts-{runs}", memory)
        counted.append(len(reads))
    few, many = counted
    assert 16 * few < many < 16 * 3.5 * few, counted


def test_counting_in_levels_takes_the_memory_and_the_space_that_it_says(tmp_path, monkeypatch):
    """And gives the files of one merge of all runs."""
    space, memory, used, write = KeySpace(30_000, Window(3)), 1_000_000, [], Run.write
    monkeypatch.setattr(counts_room, "TIMED", 1000)
    corpus = corpus_of_runs(tmp_path, 12, memory, space)
    whole = count_ngrams(corpus, space, tmp_path / "whole", memory)
    monkeypatch.setattr(sorted_runs, "WIDTH", 3)
    monkeypatch.setattr(Run, "write", lambda *given: write(*given) or used.append(bytes_in(tmp_path / "levels")))
    tracemalloc.start()
    try:
        levels = count_ngrams(corpus, space, tmp_path / "levels", memory)
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()
    assert max(used) <= most_bytes(corpus.tokens, space)
    assert content(levels.folder) == content(whole.folder)


def test_parts_that_are_added_in_levels_stay_as_they_are(tmp_path, monkeypatch):
    space, memory = KeySpace(30_000, Window(2)), 10_000
    corpora = [corpus_of_runs(tmp_path, 1, memory, space, seed) for seed in range(5)]
    parts = [count_ngrams(corpus, space, tmp_path / f"part-{i}", memory) for i, corpus in enumerate(corpora)]
    before, added = [content(part.folder) for part in parts], []
    for width in (2, 64):
        monkeypatch.setattr(sorted_runs, "WIDTH", width)
        added.append(content(add_counts(parts, tmp_path / f"added-{width}", memory).folder))
    assert added[0] == added[1] and [content(part.folder) for part in parts] == before


def level_of(space, key):
    return max(i for i, mask in enumerate(space.masks) if np.array_equal(np.array(key, dtype=np.uint64) & mask, key))


def expected_order(space, expected, root):
    """Returns the keys by their place in their own level; of two keys at one place, that of the deeper level is first."""
    places = {}
    for level in range(len(space.masks)):
        keys = sorted((key for key in expected if level_of(space, key) == level), key=lambda key: (-expected[key], key))
        weight = len(keys) * (SHORTER_IN_ROOT if root and level else 1)
        places |= {key: (Fraction(2 * number + 1, 2 * weight), -level) for number, key in enumerate(keys)}
    return sorted(places, key=places.__getitem__)


@settings(max_examples=50)
@given(st.data(), spaces, st.booleans(), st.sampled_from([1, 5, 1 << 20]))
def test_keys_come_in_the_order_of_their_places(data, space, root, block):
    """So a branch takes one share of each length, and a root more of the shorter ones. `block`: rows that are read at once."""
    documents = data.draw(corpora(space.vocabulary))
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(Path(folder) / "corpus", documents)
        counts = count_ngrams(corpus, space, Path(folder) / "counts")
        in_order = [list(key) for key in expected_order(space, expected_counts(space, documents), root)]
        ranking, keep = Ranking(counts, root), data.draw(st.sampled_from([0.0, 0.03, 0.5, 0.98, 1.0]))
        for level, distinct in enumerate(counts.levels):
            here = sum(level_of(space, key) == level for key in in_order[: ranking.number(keep)])
            assert abs(here - min(1, keep * SHORTER_IN_ROOT if root and level else keep) * distinct) <= 1
        number = data.draw(st.integers(0, sum(counts.levels) + 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counts_room, "BLOCK", block)
            assert ranking.keys(number).tolist() == in_order[:number]

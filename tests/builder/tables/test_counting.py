"""Counts on disk are those of a dictionary, and a table takes the most frequent n-grams of each length by itself."""

import tempfile
from collections import Counter
from fractions import Fraction
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.store.resumable import ResumableFiles
from builder.tables.corpus import Corpus
from builder.tables.counts import add_counts, count_ngrams, most_bytes
from builder.tables.ranking import SHORTER_IN_ROOT, Ranking
from builder.tables.sorted_runs import Merge, rows_in
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace
from hplm.plot.room import bytes_in
from tests.support.message import mentions

pytestmark = pytest.mark.slow

MANY_RUNS = 3000  # bytes: some tens of tokens a run
spaces = st.builds(KeySpace, st.sampled_from([3, 200, 250_000]), st.builds(Window, st.integers(1, 5), st.booleans()))


def corpora(vocabulary, most=30):
    tokens = st.one_of(st.integers(0, min(vocabulary, 4) - 1), st.integers(vocabulary - 2, vocabulary - 1))
    return st.lists(st.lists(tokens, max_size=12), max_size=most)


def corpus_of(folder, documents):
    lengths = [len(document) for document in documents]
    with ResumableFiles(folder, ("tokens", "ends"), {}, {}) as growing:
        growing.append("tokens", np.array(list(chain(*documents)), dtype=np.uint32))
        growing.append("ends", np.cumsum(lengths, dtype=np.uint64))
        growing.finish({"documents": len(documents), "tokens": sum(lengths)})
    return Corpus(folder)


def expected_counts(space, documents):
    """Counts each window once, and each of its shorter forms once."""
    counts = Counter()
    for document in documents:
        windows = space.window.of(np.array(document, dtype=np.int32), np.array([len(document)]))
        for window in windows:
            forms = {tuple(np.where(keep, window, 0).tolist()) for keep in space.window.levels()}
            counts.update(tuple(space.pack(np.array([form]))[0].tolist()) for form in forms)
    return counts


def stored_counts(counts):
    levels = [rows(counts, level) for level in range(len(counts.levels))]
    assert all(level == sorted(level) for level in levels)
    entries = [(tuple(key), count) for level in levels for key, count in level]
    assert len(dict(entries)) == len(entries) == counts.distinct  # each at one level only
    return dict(entries)


def rows(counts, level):
    run, distinct = counts.run(level), counts.levels[level]
    keys = np.fromfile(run.keys, np.uint64).reshape(distinct, run.words)
    numbers = np.fromfile(run.counts, np.uint64)
    return list(zip(keys.tolist(), numbers.tolist(), strict=True))


@settings(max_examples=30)
@given(st.data(), spaces, st.sampled_from([1, 1000, MANY_RUNS, 1 << 20]))
def test_counts_and_their_sums_equal_those_of_a_dictionary(data, space, memory):
    """Takes seconds: each example counts corpora on the disk."""
    parts = [data.draw(corpora(space.vocabulary, most=15)) for _ in range(data.draw(st.integers(1, 3)))]
    with tempfile.TemporaryDirectory() as name:
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


def test_the_time_and_the_most_space_are_said_before(tmp_path, capsys, monkeypatch):
    space, documents = KeySpace(250_000, Window(3)), [list(range(start, start + 12)) for start in range(40)]
    corpus = corpus_of(tmp_path / "corpus", documents)
    monkeypatch.setattr("builder.tables.counts.time", SimpleNamespace(monotonic=iter([0, 2]).__next__))  # of a tenth of them
    counts = count_ngrams(corpus, space, tmp_path / "counts", MANY_RUNS)
    assert mentions(capsys.readouterr().err, f"{corpus.tokens:,}", "20 s", "GB")
    assert 2 * bytes_in(counts.folder) <= most_bytes(corpus.tokens, space)  # beside it were runs of hardly more n-grams


def test_a_partition_of_a_merge_fits_the_memory(tmp_path):
    space = KeySpace(200, Window(2))
    documents = some_documents(400)
    parts = [count_ngrams(corpus_of(tmp_path / str(i), documents[i::3]), space, tmp_path / f"c{i}") for i in range(3)]
    memory = 10_000
    merge = Merge([part.run(0) for part in parts], memory)
    sizes = [merge.rows(i, i + 1) for i in range(merge.partitions)]
    assert len(sizes) > 3
    assert max(sizes) <= rows_in(memory, space.words) < sum(sizes)


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
@given(st.data(), spaces, st.booleans(), st.sampled_from([1, 2, 5, 1 << 20]))
def test_keys_come_in_the_order_of_their_places(data, space, root, chunk):
    """So a branch takes one share of each length, and a root more of the shorter ones."""
    documents = data.draw(corpora(space.vocabulary))
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(Path(folder) / "corpus", documents)
        counts = count_ngrams(corpus, space, Path(folder) / "counts")
        in_order = [list(key) for key in expected_order(space, expected_counts(space, documents), root)]
        ranking, keep = Ranking(counts, root), data.draw(st.sampled_from([0.0, 0.03, 0.5, 0.98, 1.0]))
        for level, distinct in enumerate(counts.levels):
            here = sum(level_of(space, key) == level for key in in_order[: ranking.number(keep)])
            assert abs(here - min(1, keep * SHORTER_IN_ROOT if root and level else keep) * distinct) <= 1
        number = data.draw(st.integers(0, counts.distinct + 1))
        chunks = list(ranking.keys(number, chunk))
        assert [len(keys) for keys in chunks[:-1]] == [chunk] * (len(chunks) - 1)
        assert [key for keys in chunks for key in keys.tolist()] == in_order[:number]

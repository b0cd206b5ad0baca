"""A corpus on disk contains all its inputs, whatever their format. Killed work: tests/builder/test_killed.py."""

import gzip
import json
import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

from builder.tables.corpus import Corpus, tokenize_corpus
from builder.tables.text_files import LONGEST_LINE, READ_AT_ONCE
from builder.tasks.examples import read_corpus
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Tokenizer
from testing.random_store import tokenizer_json
from testing.toy import CONFIG
from tests.builder.stores import some_lines
from tests.support.message import mentioning, mentions


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


def test_the_time_and_the_space_are_said_before(tmp_path, capsys, monkeypatch):
    """From the first part, of which a block is read."""
    path, tokenizer = tmp_path / "corpus.txt", Tokenizer(tokenizer_json(CONFIG.vocabulary), positions=64)
    path.write_text("\n".join(some_lines(2000, 1)), "utf-8")
    clock = SimpleNamespace(monotonic=iter([0, 4]).__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr("builder.tables.corpus.time", clock)
    tokenize_corpus([path], tokenizer, tmp_path / "corpus")
    size = path.stat().st_size
    assert size > 2 * READ_AT_ONCE
    assert mentions(capsys.readouterr().err, f"{size / 1e6:.1f} MB", f"{4 * size / READ_AT_ONCE:.0f} s", "GB")


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
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "corpus", "inputs")):
        tokenize_corpus(paths[:2], tokenizer, tmp_path / "corpus")
    with pytest.raises(InvalidInput, match=mentioning(tmp_path)):
        Corpus(tmp_path)  # it was never finished

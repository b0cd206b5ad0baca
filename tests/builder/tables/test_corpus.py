"""A corpus on disk contains all its inputs, whatever their format, and however often the work was interrupted."""

import gzip
import json
import tracemalloc
from itertools import chain

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, pre_tokenizers, processors

from builder.tables.corpus import Corpus, tokenize_corpus
from builder.tables.text_files import LONGEST_LINE
from builder.tasks.examples import read_corpus
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Tokenizer
from tests.support.message import mentioning

LETTERS = "abcdefghij"


@pytest.fixture
def tokenizer(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the tests fork
    entries = {token: i for i, token in enumerate(["[UNK]", "[CLS]", "[SEP]", *LETTERS])}
    tokenizer = HuggingFaceTokenizer(models.WordPiece(entries, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return Tokenizer(tokenizer.to_str(), positions=8)


def documents_of(number, seed=0):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(list(LETTERS), size=generator.integers(1, 12))) for _ in range(number)]


@pytest.fixture
def inputs(tmp_path):
    """Four files of 30 documents, each in another format."""
    parts = [documents_of(30, seed) for seed in range(4)]
    plain, objects = "\n\n".join(parts[0]), "\n".join(json.dumps({"text": text}) for text in parts[1])
    half = len(parts[3]) // 2
    frames = ["\n".join(parts[3][:half]) + "\n", "\n".join(parts[3][half:])]
    files = {
        "plain.txt": plain.encode(),
        "objects.jsonl.gz": gzip.compress(objects.encode()),
        "members.gz": gzip.compress("\n".join(parts[2][:7]).encode() + b"\n") + gzip.compress("\n".join(parts[2][7:]).encode()),
        "frames.txt.zst": b"".join(zstandard.ZstdCompressor().compress(frame.encode()) for frame in frames),
    }
    for name, packed in files.items():
        (tmp_path / name).write_bytes(packed)
    return [tmp_path / name for name in files], list(chain(*parts))


def test_plain_gzip_zstd_and_jsonl_are_read_as_one_corpus(inputs):
    paths, documents = inputs
    read = []
    assert list(read_corpus(paths, read.append)) == documents
    assert sum(read) == sum(path.stat().st_size for path in paths)


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


def test_the_corpus_contains_every_document(tmp_path, inputs, tokenizer):
    paths, documents = inputs
    corpus = tokenize_corpus(paths, tokenizer, tmp_path / "corpus", show_progress=False)
    expected = tokenizer.encode_documents(documents)
    assert len(corpus) == len(expected) and corpus.tokens == sum(map(len, expected))
    for document, ids in zip(corpus, expected, strict=True):
        assert document.dtype == np.int32
        np.testing.assert_array_equal(document, ids)
    np.testing.assert_array_equal(corpus[-1], expected[-1])
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "corpus", "inputs")):
        tokenize_corpus(paths[:2], tokenizer, tmp_path / "corpus", show_progress=False)
    with pytest.raises(InvalidInput, match=mentioning(tmp_path)):
        Corpus(tmp_path)  # it was never finished

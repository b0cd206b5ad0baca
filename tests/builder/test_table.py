"""From a corpus to a table: the right n-grams, the lower stack's own values, and the gather that gives them back."""

import numpy as np
import pytest
import torch

from builder.ngrams import count
from builder.random_store import random_documents, tokenizer_json
from builder.store import Store
from builder.table import build_table
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from hplm.model.windows import aggregate, windows_of
from hplm.plot.forest import gather
from hplm.plot.keys import KeySpace
from tests.toy import CONFIG


def test_counting_is_that_of_a_dictionary(monkeypatch):
    documents = random_documents(CONFIG, 3000, 20, seed=4)
    space = KeySpace(CONFIG.vocabulary, 3)
    expected = {}
    for document in documents:
        padded = [0, *(document + 1).tolist(), 0]
        for a, b, c in zip(padded, padded[1:], padded[2:], strict=False):
            for gram in ((a, b, c), (0, b, c), (0, b, 0)):
                expected[gram] = expected.get(gram, 0) + 1
    for chunk in (1 << 21, 100):
        monkeypatch.setattr("builder.ngrams.CHUNK_TOKENS", chunk)
        counts = count(documents, space)
        found = dict(zip(map(tuple, space.unpack(counts.keys).tolist()), counts.counts.tolist(), strict=True))
        assert found == expected and counts.tokens == 3000


def test_the_most_frequent_share_is_kept():
    counts = count([np.array([7, 7, 7, 7, 5, 6])], KeySpace(50, 3))
    space = KeySpace(50, 3)
    top = space.unpack(counts.most_frequent(1 / len(counts.keys)))
    assert top.tolist() == [[0, 8, 0]]
    assert len(counts.most_frequent(0.0)) == 0 and len(counts.most_frequent(1.0)) == len(counts.keys)
    with pytest.raises(InvalidInput, match=r"keep 1\.5"):
        counts.most_frequent(1.5)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    lower, upper = random_backbone(CONFIG)
    return Store.create(tmp_path_factory.mktemp("s") / "store", "m", CONFIG, tokenizer_json(CONFIG.vocabulary), lower, upper)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_table_gives_back_what_the_lower_stack_computes(store, dtype):
    """Where every window is in the table, gathering equals running the lower stack, up to 16-bit storage."""
    lower = store.lower("root", 1)
    documents = random_documents(CONFIG, 1000, 20, seed=1)
    domain = f"whole-{dtype}"
    build_table(store, domain, 1, None, lower, documents * 2, 1.0, dtype, torch.device("cpu"))
    chain = store.forest().chain(domain, 1)
    tokens, lengths = np.concatenate(documents), np.array([len(document) for document in documents])
    windows = windows_of(tokens, lengths, 3)
    hits = chain.lookup(windows)
    assert (hits.levels == 0).all()
    with torch.no_grad():
        expected = aggregate(lower(torch.from_numpy(windows)))
    close = {"fp16": 2e-3, "bf16": 2e-2}[dtype]
    assert torch.allclose(gather(store.forest(), hits.addresses, lengths, torch.float32), expected, atol=close)


def test_rare_and_unseen_windows_are_served_by_shorter_ones(store):
    lower = store.lower("root", 1)
    build_table(store, "small", 1, None, lower, random_documents(CONFIG, 500, 20, seed=2), 0.1, "fp16", torch.device("cpu"))
    chain = store.forest().chain("small", 1)
    windows = windows_of(np.arange(5, 60), np.array([55]), 3)
    hits = chain.lookup(windows)
    assert set(hits.levels) >= {2}
    table = store.forest().chain("small", 1).links[0][0]
    with torch.no_grad():
        last = lower(torch.from_numpy(windows[-1:] * np.array([0, 1, 0])))
    row = int(table.find(KeySpace(CONFIG.vocabulary, 3).pack(windows[-1:] * np.array([0, 1, 0])))[0])
    assert torch.allclose(table.values.view(-1, 3, CONFIG.hidden)[row].float(), last[0], atol=2e-3)
    assert (last[0, [0, 2]] == 0).all()

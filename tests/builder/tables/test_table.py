"""From a corpus to a table: rows have the lower stack's values in the order of the ranking, and gathering returns them."""

import numpy as np
import pytest
import torch

from builder.tables.ranking import Ranking
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.gathering import Gatherer
from testing.toy import CONFIG
from tests.builder.tables.branches import build, make_store, some_lines

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("window", [Window(3), Window(2), Window(5), Window(3, causal=True)], ids=str)
def test_gathering_returns_what_the_lower_stack_computes(tmp_path, window, dtype):
    """If every window is in the table, gathering equals running the lower stack, except for the precision of storing."""
    store = make_store(tmp_path, window)
    table, corpus, _ = build(store, tmp_path, "whole", some_lines(40, seed=1), dtype=dtype)
    forest = Forest([store.folder / "plot"], assign_addresses([table]))
    documents = list(corpus)
    tokens, lengths = np.concatenate(documents), np.array([len(document) for document in documents])
    hits = forest.chain("whole", 1).lookup(tokens, lengths)
    assert (hits.levels == 0).all()
    gatherer = Gatherer(CPU, torch.float32)
    assert not len(gatherer.broken(forest, hits.addresses))
    with torch.no_grad():
        expected = window.aggregate(store.lower("root", 1)(torch.from_numpy(window.of(tokens, lengths))))
    close = {"fp16": 2e-3, "bf16": 2e-2, "int8": 3e-2}[dtype]
    assert torch.allclose(gatherer.sums(forest, hits.addresses, lengths), expected, atol=close)


def test_rows_are_in_the_order_of_the_ranking_and_the_root_is_complete(tmp_path):
    store = make_store(tmp_path, Window(3))
    table, _, counts = build(store, tmp_path, "small", some_lines(40, seed=2), keep=0.1)
    ranking = Ranking(counts, root=True)
    kept = ranking.number(0.1)
    keys = table.index.by_row()
    assert (keys[:kept] == np.concatenate(list(ranking.keys(kept)))).all()
    assert kept < table.meta.keys < kept + CONFIG.vocabulary
    assert (table.find(store.space.unigrams()) > 0).all()
    assert len(np.unique(keys)) == len(keys)


def test_the_same_corpus_gives_the_same_bytes(tmp_path):
    store = make_store(tmp_path, Window(3))
    tables = [build(store, tmp_path, name, some_lines(20, seed=3))[0] for name in ("one", "two")]
    for name in ("values", "keys", "rows", "starts", "checksums"):
        assert (tables[0].folder / name).read_bytes() == (tables[1].folder / name).read_bytes()


def test_rare_and_unseen_windows_are_served_by_shorter_ones(tmp_path):
    store = make_store(tmp_path, Window(3))
    table, _, _ = build(store, tmp_path, "small", some_lines(25, seed=2), keep=0.1)
    hits = Forest([store.folder / "plot"], assign_addresses([table])).chain("small", 1).lookup(np.arange(5, 60), np.array([55]))
    assert set(hits.levels) >= {2}
    alone = np.array([[0, 60, 0]])
    with torch.no_grad():
        expected = store.lower("root", 1)(torch.from_numpy(alone))[0]
    row = int(table.find(store.space.pack(alone))[0])
    assert torch.allclose(table.rows.vectors(row), expected, atol=2e-3)
    assert (expected[[0, 2]] == 0).all()

"""From a corpus to a table: rows have the lower stack's values in the order of the ranking, and gathering returns them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.tables.ranking import Ranking
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.gathering import Gatherer
from testing.toy import CONFIG
from tests.builder.stores import build, make_store, some_lines

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "window, dtype",
    [(Window(3), "fp16"), (Window(2), "bf16"), (Window(5), "int8"), (Window(3, causal=True), "int8"), (Window(4), "fp16")],
    ids=str,
)
def test_gathering_returns_what_the_lower_stack_computes(tmp_path, window, dtype):
    """If every window is in the table, gathering equals running the lower stack, except for the precision of storing."""
    store = make_store(tmp_path / "store", replace(CONFIG, window=window))
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
    store = make_store(tmp_path / "store")
    table, _, counts = build(store, tmp_path, "small", some_lines(40, seed=2), keep=0.1)
    ranking = Ranking(counts, root=True)
    kept = ranking.number(0.1)
    keys = table.index.by_row()
    assert (keys[:kept] == np.concatenate(list(ranking.keys(kept)))).all()
    assert kept < table.meta.keys < kept + CONFIG.vocabulary
    assert (table.find(store.space.unigrams()) > 0).all()
    assert len(np.unique(keys)) == len(keys)

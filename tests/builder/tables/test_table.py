"""Rows have the lower stack's values in the order of the ranking, and an inspection predicts tables of other sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.tables.inspection import cover, read_pieces
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.gathering import Gatherer
from hplm.plot.levels import count_levels, ends
from testing.toy import CONFIG
from tests.builder.stores import add_domain, build, corpus, make_store, rooted, some_lines
from tests.support.device import DEVICE
from tests.support.message import mentioning

KEEPS = [1.0, 0.3, 0.0]
CASES = [(Window(3), "bio"), (Window(2, causal=True), "root"), (Window(5), "root")]


def looked_up(store, chain, text):
    documents = store.tokenizer().encode_documents(text.read_text("utf-8").splitlines())
    return chain.lookup(np.concatenate(documents), np.array([len(document) for document in documents]))


def shares(store, chain, text):
    """Returns the shares (here, above, shorter by name) of the lookups of a served text."""
    hits = looked_up(store, chain, text)
    tokens = chain.space.window.levels().sum(1).tolist()
    own = (hits.tries == 0).mean()
    above = ((hits.levels == 0) & (hits.tries > 0)).mean()
    return own, above, {f"{count}-gram": (hits.levels == level).mean() for level, count in enumerate(tokens) if level}


@pytest.mark.parametrize(("window", "name"), CASES, ids=str)
def test_predicted_coverage_equals_that_of_tables_built_with_this_keep(tmp_path, window, name):
    """The one of a root, which keeps its tokens at every size, or of a domain of a domain that is cut."""
    store, text = rooted(tmp_path, window), corpus(tmp_path, 7)
    if name == "bio":
        add_domain(store, "parent", 1, keep=0.3)
        add_domain(store, "bio", 2, parent="parent")
        text.write_text("\n".join([*some_lines(10, 2), *some_lines(10, 1), *some_lines(30, 9)]), "utf-8")
    coverage = cover(store, name, 1, read_pieces(store, text), KEEPS)
    for number, (keep, kept) in enumerate(zip(KEEPS, coverage.kept, strict=True)):
        own = f"kept-{number}"
        if name == "bio":
            table = add_domain(store, own, 2, parent="parent", keep=keep)
            chain = store.forest(own, 1).chain(own, 1)
        else:
            table, _, _ = build(store, tmp_path, own, some_lines(20, seed=0), keep=keep)
            chain = Forest([store.folder / "plot"], assign_addresses([table])).chain(own, 1)
        here, above, shorter = shares(store, chain, text)
        assert kept.ngrams == table.meta.keys and abs(kept.fp16_bytes - sum(table.meta.sizes().values())) < 400
        assert (kept.here, kept.above) == pytest.approx((here, above)) and kept.shorter == pytest.approx(shorter)
        assert name == "bio" or above == 0


@pytest.mark.parametrize("keep", [0.3, 0.05, 0.0])
def test_a_cut_table_predicts_its_own_coverage_and_that_of_smaller_ones(tmp_path, keep):
    store = rooted(tmp_path, keep=keep)
    text = corpus(tmp_path, 7)
    coverage = cover(store, "root", 1, read_pieces(store, text), [keep])
    assert coverage.kept[0].ngrams == store.meta("root", 1).keys
    chain = store.forest("root", 1).chain("root", 1)
    hits = looked_up(store, chain, text)
    names = count_levels(chain, ends(chain, hits))
    assert coverage.levels == pytest.approx({name: count / coverage.tokens for name, count in names.items()})
    assert coverage.kept[0].here == pytest.approx(coverage.levels["root"])
    assert all(kept.keep <= max(0.004, keep + 0.02) for kept in cover(store, "root", 1, read_pieces(store, text)).kept)
    with pytest.raises(InvalidInput, match=mentioning(0.9, "'root'", "--keep")):
        cover(store, "root", 1, read_pieces(store, text), [0.9])


def test_the_page_of_a_branch_says_how_much_of_its_corpus_the_table_and_smaller_ones_cover(tmp_path):
    store = rooted(tmp_path)
    add_domain(store, "bio", 1, keep=0.3)
    chain = store.forest("bio", 1).chain("bio", 1)
    hits = looked_up(store, chain, corpus(tmp_path, 1))
    page, levels = store.page("bio", 1).read_text("utf-8"), count_levels(chain, ends(chain, hits))
    assert list(levels) == ["domain", "root", "2-gram", "1-gram"] and 0.2 < levels["domain"] / len(hits.levels) < 1
    assert all(f"<td>{name}</td><td>{count / len(hits.levels):.2%}</td>" in page for name, count in levels.items())
    _, smaller, *_ = cover(store, "bio", 1, read_pieces(store, corpus(tmp_path, 1))).kept
    assert "<td>0.400%</td>" in page and f"<td>{smaller.here:.2%}</td>" in page
    assert f"<td>{len(hits.levels):,}</td>" in page


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
    gatherer = Gatherer(DEVICE, torch.float32)
    assert not len(gatherer.broken(forest, hits.addresses))
    with torch.no_grad():
        expected = window.aggregate(store.lower("root", 1)(torch.from_numpy(window.of(tokens, lengths))))
    close = {"fp16": 2e-3, "bf16": 2e-2, "int8": 3e-2}[dtype]
    assert torch.allclose(gatherer.sums(forest, hits.addresses, lengths).cpu(), expected, atol=close)

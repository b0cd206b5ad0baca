"""Domains are built, updated, deleted and swept; tables have the lower stack's values, a predicted coverage, and room."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.learning.limits import Budget
from builder.store.resumable import write_json
from builder.tables import table
from builder.tables.counts import Counts
from builder.tables.domain import UpdateOptions, build_domain, delete_domain, update_domain
from builder.tables.inspection import cover, read_pieces
from builder.tables.ranking import Ranking
from hplm.disk import NoSpace
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses, count_levels, ends
from hplm.plot.gathering import Gatherer
from testing.reference import windows_of
from testing.toy import CONFIG
from tests.builder.stores import (
    SMALL,
    add_domain,
    add_tenant,
    build,
    corpus,
    cut,
    full_disk,
    grow,
    make_store,
    rooted,
    rows,
    some_lines,
    with_bio,
)
from tests.support.device import DEVICE
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

LEARNING = Budget(steps=1)
KEEPS = [1.0, 0.3, 0.0]
CASES = [(Window(3), "bio"), (Window(2, causal=True), "root"), (Window(5), "root")]


def test_an_update_gives_the_table_of_both_corpora_together(tmp_path):
    store = with_bio(tmp_path)
    first = store.table("bio", 1)
    add_tenant(store, "acme", "bio")
    second, both = grow(store, "bio", 2), add_domain(store, "both", 1, 2)
    assert (second.index.by_row() == both.index.by_row()).all()
    assert second.meta.corpus_tokens == both.meta.corpus_tokens > first.meta.corpus_tokens
    old, new = rows(first), rows(second)
    assert len(new) > len(old) and all(new[key] == value for key, value in old.items())
    assert [branch for branch in store.domains() if branch[0] == "bio"] == [("bio", 1), ("bio", 2)]
    assert store.users()["bio", 1] == ["tenant acme"] and store.users()["bio", 2] == []


@pytest.mark.parametrize(("name", "keep"), [("bio", 0.25), ("root", 0.25), ("root", 0.0)])
def test_an_update_keeps_the_share_of_the_version_before_and_the_order_of_the_ranking(tmp_path, name, keep):
    store = rooted(tmp_path, keep=keep)
    if name == "bio":
        add_domain(store, "bio", 1, keep=keep)
    updated = grow(store, name, 2)
    ranking = Ranking(Counts(store.counts_folder(name, 2)), root=name == "root")
    kept = ranking.keep_for(updated.meta.keys)
    assert kept == pytest.approx(keep, abs=0.01)
    keys, wanted = updated.index.by_row(), ranking.keys(ranking.number(kept))
    assert len(np.unique(keys)) == len(keys) and (keys[: len(wanted)] == wanted).all()


def test_versions_that_nobody_needs_are_deleted(tmp_path):
    """Users of others are named in tests/cli/test_refusals.py."""
    store = with_bio(tmp_path)
    add_tenant(store, "acme", "bio")
    grow(store, "bio", 3)
    assert delete_domain(store, "bio", 2) == [2]
    for given, named in ((("bio", 7), ["'bio'", 7]), (("root",), ["root"])):
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            delete_domain(store, *given)
    store.remove_tenant("acme")
    assert delete_domain(store, "bio") == [1]
    assert not [path for path in store.folder.rglob("*bio*")]


def test_a_domain_cannot_be_deleted_while_something_is_built_on_it(tmp_path):
    """A domain whose table is broken can, and breaks no other."""
    store = with_bio(tmp_path)
    add_domain(store, "law", 2)
    cut(store, add_domain, "cells", 3, parent="bio")
    working = store.tenant_work_folder("acme") / "training"
    working.mkdir(parents=True)
    write_json(working / "plan.json", {"domain": "law", "domain_version": 1})
    for name, user in (("bio", store.work_folder("cells", 1)), ("law", working)):
        with pytest.raises(InvalidInput, match=mentioning(repr(name), user)):
            delete_domain(store, name)
    shutil.rmtree(store.folder / "building")
    (store.table_folder("law", 1) / "values").write_bytes(b"")
    assert store.chain("bio", 1) == [("bio", 1), ("root", 1)]
    assert len(store.forest("bio", 1).chain("bio", 1).links) == 2 and not store.forest("bio", 1).failures()
    assert delete_domain(store, "bio") == delete_domain(store, "law") == [1]


def test_sweep_keeps_used_versions_and_the_two_newest(tmp_path):
    store = with_bio(tmp_path)
    add_tenant(store, "acme", "bio", 1)
    for seed in (2, 3, 4):
        grow(store, "bio", seed)
    assert [version for name, version in store.domains() if name == "bio"] == [1, 3, 4]
    store.remove_tenant("acme")
    assert store.sweep() == [("bio", 1)]
    assert not store.counts_folder("bio", 1).exists() and not store.has_lower("bio", 2) and store.has_lower("bio", 3)


def test_the_root_can_be_updated_but_is_not_adapted(tmp_path):
    store = rooted(tmp_path)
    with pytest.raises(InvalidInput, match="--minutes 0"):
        update_domain(store, "root", [corpus(tmp_path, 1)], UpdateOptions(), LEARNING, DEVICE)
    updated = grow(store, "root", 1)
    assert (updated.index.find(store.space.unigrams()) > 0).all()
    assert add_domain(store, "bio", 2).meta.parent_version == 2


def test_without_a_share_a_table_has_a_usual_size_at_most(tmp_path, monkeypatch, capsys):
    store = with_bio(tmp_path)
    whole = store.meta("bio", 1).keys
    monkeypatch.setattr(table, "USUAL_NGRAMS", usual := whole // 2)
    less = add_domain(store, "less", 1).meta.keys
    assert 0.9 * usual < less <= usual
    assert mentions(capsys.readouterr().err, "less", f"{less:,}", f"{whole:,}", "--keep")
    assert add_domain(store, "all", 1, keep=1.0).meta.keys == whole
    assert less < grow(store, "less", 2).meta.keys < whole


def test_what_has_no_room_is_refused_before_anything_learns_and_can_be_smaller(tmp_path):
    store, files = with_bio(tmp_path), [corpus(tmp_path, 1)]
    cut(store, add_domain, "late", 1, at="lower", keep=1.0)
    (learned := store.work_folder("late", 1) / "learning.pt").touch()
    needed = sum(store.meta("bio", 1).sizes().values())
    with full_disk(needed // 2):
        with pytest.raises(NoSpace, match="--keep"):
            add_domain(store, "late", 1, keep=1.0)
        assert learned.exists(), "what was learned is lost"
        for call in (
            lambda: build_domain(store, "less", files, SMALL, LEARNING, DEVICE),
            lambda: update_domain(store, "bio", [corpus(tmp_path, 2)], UpdateOptions(), LEARNING, DEVICE),
        ):
            with pytest.raises(NoSpace, match=mentioning(f"{needed // 2:,} bytes", store.folder, "--keep")):
                call()
        assert set(store.domains()) == {("bio", 1), ("root", 1)}
        assert not store.has_lower("less", 1) and not store.has_lower("bio", 2)
        with pytest.raises(NoSpace) as refused:
            add_domain(store, "less", 1, keep=1.0)
        (keep,) = re.findall(r"--keep ([0-9.]+)", str(refused.value))
        assert 0.25 < float(keep) < 0.5
        assert add_domain(store, "less", 1, keep=float(keep)).meta.keys


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
    if window.causal:  # each window, and all words alone
        windows = {tuple(one) for one in windows_of(window, documents).tolist()}
        assert table.meta.keys == len(windows | {(0, 0, word) for word in range(1, store.config.vocabulary + 1)})
    gatherer = Gatherer(DEVICE, torch.float32)
    assert not len(gatherer.broken(forest, hits.addresses))
    with torch.no_grad():
        expected = window.aggregate(store.lower("root", 1)(torch.from_numpy(windows_of(window, documents))))
    close = {"fp16": 2e-3, "bf16": 2e-2, "int8": 3e-2}[dtype]
    assert torch.allclose(gatherer.sums(forest, hits.addresses, lengths).cpu(), expected, atol=close)

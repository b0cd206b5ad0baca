"""Domains are built, updated, deleted and swept; tables have a usual size at most, and room on the disk."""

import re
import shutil

import numpy as np
import pytest

from builder.learning.limits import Budget
from builder.store.resumable import write_json
from builder.tables import table
from builder.tables.counts import Counts
from builder.tables.domain import UpdateOptions, build_domain, delete_domain, update_domain
from builder.tables.ranking import Ranking
from hplm.errors import InvalidInput
from hplm.plot.room import NoSpace
from tests.builder.stores import (
    SMALL,
    add_domain,
    add_tenant,
    corpus,
    cut,
    full_disk,
    grow,
    rooted,
    rows,
    with_bio,
)
from tests.support.device import DEVICE
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

LEARNING = Budget(steps=1)


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
    keys, wanted = updated.index.by_row(), list(ranking.keys(ranking.number(kept)))
    assert len(np.unique(keys)) == len(keys) and all((keys[: len(part)] == part).all() for part in wanted)


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
    working = store.tenant_work_folder("acme")
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
            with pytest.raises(NoSpace, match=mentioning("GB", store.folder, "--keep")):
                call()
        assert set(store.domains()) == {("bio", 1), ("root", 1)}
        assert not store.has_lower("less", 1) and not store.has_lower("bio", 2)
        with pytest.raises(NoSpace) as refused:
            add_domain(store, "less", 1, keep=1.0)
        (keep,) = re.findall(r"--keep ([0-9.]+)", str(refused.value))
        assert 0.25 < float(keep) < 0.5
        assert add_domain(store, "less", 1, keep=float(keep)).meta.keys

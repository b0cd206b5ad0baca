"""Unfinished branches: one process at a time, only the same command goes on, and refused commands leave nothing behind.

Killed builds are in `tests/builder/test_killed.py`.
"""

import shutil
from dataclasses import replace
from functools import partial

import pytest

from builder.adaptation.learning import Budget
from builder.importing.lower import NewDomain
from builder.store.store import Store
from builder.tables.build_folder import held
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, delete_domain, recut_domain
from builder.tables.root import RootOptions, build_root
from builder.training.finetuning import TrainingOptions
from hplm.errors import InvalidInput
from tests.builder.adaptation.test_masked import save
from tests.builder.tables.branches import CPU, some_lines
from tests.builder.tables.test_domain import NO_TIME, SMALL, corpus, cut, grow, rooted, rows, with_bio
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

BUSY = "'bio'"


def test_a_branch_is_built_by_one_process_at_a_time(tmp_path):
    store = rooted(tmp_path)
    with held(store.work_folder("bio", 1), "the other's"), pytest.raises(InvalidInput, match=BUSY):
        build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU)
    build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU)
    for version in (1, 2):  # the other process is about to end, or still at work
        with held(store.work_folder("bio", version), "the other's"), pytest.raises(InvalidInput, match=BUSY):
            grow(store, tmp_path, "bio", 2)
    with held(tmp_path / "new/building/root-1", "the other's"), pytest.raises(InvalidInput, match=mentioning(tmp_path / "new")):
        build_root("any", [corpus(tmp_path, 1)], tmp_path / "new", RootOptions(), NO_TIME, CPU)
    assert grow(store, tmp_path, "bio", 2).meta.version == 2
    assert list((store.folder / "building").iterdir()) == []


@pytest.mark.parametrize(
    "wrong, named",
    [
        (None, ["none.txt"]),
        ("one document of two words", [1]),
        ('{"text": "a"}\n{"text": 1}', ["corpus.txt:2", "'text'"]),
    ],
)
def test_a_corpus_that_is_refused_can_be_corrected(tmp_path, wrong, named):
    store, path = rooted(tmp_path), tmp_path / ("none.txt" if wrong is None else "corpus.txt")
    if wrong is not None:
        path.write_text(wrong)
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        build_domain(store, "bio", [path], SMALL, Budget(steps=1), CPU)
    with pytest.raises(InvalidInput, match="--min-tokens"):
        build_domain(store, "bio", [corpus(tmp_path, 1)], DomainOptions(), NO_TIME, CPU)
    assert not store.has_lower("bio", 1) and not store.work_folder("bio", 1).exists()
    assert build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU).meta.keys


def test_a_root_stores_the_absolute_path_of_its_model(tmp_path, monkeypatch):
    """Two refused commands before it leave nothing behind. It takes seconds, because it imports what saves models."""
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "none")):
        build_root(str(tmp_path / "none"), [corpus(tmp_path, 2)], tmp_path / "store", RootOptions(), NO_TIME, CPU)
    save(tmp_path, "without")
    monkeypatch.chdir(tmp_path)
    path = corpus(tmp_path, 1, lines=1)
    with pytest.raises(InvalidInput, match=mentioning(1)):
        build_root(".", [path], tmp_path / "store", RootOptions("tiny"), NO_TIME, CPU)
    path.write_text("\n".join(some_lines(30, seed=1)))
    build_root(".", [path], tmp_path / "store", RootOptions("tiny"), NO_TIME, CPU)
    assert Store(tmp_path / "store").model == str(tmp_path)


def test_a_wrong_seed_or_share_is_refused_before_any_work():
    domains = RootOptions, DomainOptions, UpdateOptions
    wrong = [(options, "seed", seed) for options in (*domains, TrainingOptions) for seed in (-1, 2**64)]
    for options in (*domains, partial(NewDomain, "low", [])):
        wrong += [(options, "keep", keep) for keep in (-0.1, 1.5, float("nan"))]
    for options, name, value in wrong:
        with pytest.raises(InvalidInput, match=mentioning(f"{name} {value}")):
            options(**{name: value})
        options(**{name: 0})


def test_an_update_that_another_process_finishes_meanwhile_is_followed_by_the_next(tmp_path, monkeypatch):
    store, latest = with_bio(tmp_path), Store.latest

    def overtaken(self, domain):
        version = latest(self, domain)
        monkeypatch.undo()
        grow(store, tmp_path, "bio", 2)
        return version

    monkeypatch.setattr(Store, "latest", overtaken)
    assert grow(store, tmp_path, "bio", 3).meta.version == 3


def test_users_are_read_while_nobody_else_can_build_the_domain(tmp_path, monkeypatch):
    store, users = with_bio(tmp_path), Store.users

    def read(self):
        with pytest.raises(InvalidInput, match=BUSY), held(store.work_folder("bio", 2), "'bio'"):
            pass
        return users(self)

    monkeypatch.setattr(Store, "users", read)
    assert delete_domain(store, "bio") == [1]


def test_a_domain_on_a_parent_that_is_deleted_meanwhile_is_not_built(tmp_path, monkeypatch):
    store, save_lower = with_bio(tmp_path), Store.save_lower

    def deleted(self, domain, version, lower):
        save_lower(self, domain, version, lower)
        store.remove_branch("bio", 1)

    monkeypatch.setattr(Store, "save_lower", deleted)
    with pytest.raises(InvalidInput, match=mentioning(store.table_folder("bio", 1))):
        build_domain(store, "cells", [corpus(tmp_path, 2)], replace(SMALL, parent="bio"), NO_TIME, CPU)
    assert store.domains() == [("root", 1)]


def test_a_table_cut_to_one_size_is_cut_anew_to_another(tmp_path, monkeypatch):
    store = with_bio(tmp_path)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("builder.tables.table.write_table", killed)
        recut_domain(store, "bio", store, "less", 0.5, "fp16", CPU)
    table = recut_domain(store, "bio", store, "less", 0.25, "fp16", CPU)
    assert table.meta.keys == recut_domain(store, "bio", store, "same", 0.25, "fp16", CPU).meta.keys
    assert store.has_lower("less", 1)


def test_an_interrupted_build_continues_on_the_parents_version_of_its_start(tmp_path, monkeypatch):
    store = with_bio(tmp_path)
    options = replace(SMALL, parent="bio")
    cut(monkeypatch, lambda: build_domain(store, "cells", [corpus(tmp_path, 3)], options, NO_TIME, CPU))
    grow(store, tmp_path, "bio", 2)
    table = build_domain(store, "cells", [corpus(tmp_path, 3)], options, NO_TIME, CPU)
    assert (table.meta.parent, table.meta.parent_version) == ("bio", 1)
    assert store.users()["bio", 1] == ["domain cells version 1"]
    assert grow(store, tmp_path, "cells", 4).meta.parent_branch == ("bio", 1)  # as an update does


def test_after_an_old_version_is_deleted_an_interrupted_update_continues(tmp_path, monkeypatch):
    store = with_bio(tmp_path)
    grow(store, tmp_path, "bio", 2)
    cut(monkeypatch, lambda: grow(store, tmp_path, "bio", 3))
    assert delete_domain(store, "bio", 1) == [1] and store.has_lower("bio", 3)
    assert grow(store, tmp_path, "bio", 3).meta.version == 3


def test_only_the_same_command_finishes_an_interrupted_build(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    cut(monkeypatch, lambda: build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU))
    with pytest.raises(InvalidInput, match=mentioning(store.work_folder("bio", 1), "dtype")):
        build_domain(store, "bio", [corpus(tmp_path, 1)], replace(SMALL, dtype="int8"), NO_TIME, CPU)
    with pytest.raises(InvalidInput, match=mentioning(store.work_folder("bio", 1), "corpus")):
        build_domain(store, "bio", [corpus(tmp_path, 2)], SMALL, NO_TIME, CPU)
    build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU)
    with pytest.raises(InvalidInput, match="hplm domain update"):
        build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU)


def test_after_the_folder_is_removed_a_build_starts_again(tmp_path, monkeypatch):
    """The new build must contain neither counts nor rows of the build before."""
    store = rooted(tmp_path)
    cut(monkeypatch, lambda: build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU))
    half_written = store.table_folder("bio", 1).with_name("1.writing")
    half_written.mkdir(parents=True)
    (half_written / "values").write_bytes(b"x" * 1000)
    shutil.rmtree(store.work_folder("bio", 1))
    table = build_domain(store, "bio", [corpus(tmp_path, 2)], SMALL, NO_TIME, CPU)
    same = build_domain(store, "other", [corpus(tmp_path, 2)], SMALL, NO_TIME, CPU)
    assert rows(table) == rows(same)


def test_a_domain_does_not_continue_an_update_of_a_deleted_one_of_its_name(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    for seed in (1, 2):
        build_domain(store, "bio", [corpus(tmp_path, seed)], SMALL, NO_TIME, CPU)
        if seed == 1:
            cut(monkeypatch, lambda: grow(store, tmp_path, "bio", 3))
            delete_domain(store, "bio")
    both = build_domain(store, "both", [corpus(tmp_path, 2), corpus(tmp_path, 3)], SMALL, NO_TIME, CPU)
    assert rows(grow(store, tmp_path, "bio", 3)) == rows(both)

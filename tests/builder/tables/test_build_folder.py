"""Folders of unfinished branches: one process at a time, and after a refusal another command may build the branch."""

import os
from dataclasses import replace

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
from tests.builder.tables.test_domain import NO_TIME, SMALL, corpus, grow, rooted, with_bio
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


def test_a_killed_process_no_longer_holds_the_folder(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), held(tmp_path / "work", "this"):
            (tmp_path / "work/left").touch()
            raise KeyboardInterrupt
    with held(tmp_path / "work", "this"):
        (tmp_path / "work/left").unlink()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    "wrong, named", [("one document of two words", [1]), ('{"text": "a"}\n{"text": 1}', ["corpus.txt:2", "'text'"])]
)
def test_a_corpus_that_is_refused_can_be_corrected(tmp_path, wrong, named):
    store, path = rooted(tmp_path), tmp_path / "corpus.txt"
    path.write_text(wrong)
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        build_domain(store, "bio", [path], SMALL, Budget(steps=1), CPU)
    path.write_text("\n".join(some_lines(30, seed=1)))
    assert build_domain(store, "bio", [path], SMALL, NO_TIME, CPU).meta.keys


def test_a_root_stores_the_absolute_path_of_its_model(tmp_path, monkeypatch):
    """A corpus of one document is refused, also for a root."""
    save(tmp_path, "without")
    monkeypatch.chdir(tmp_path)
    path = corpus(tmp_path, 1, lines=1)
    with pytest.raises(InvalidInput, match=mentioning(1)):
        build_root(".", [path], tmp_path / "store", RootOptions("tiny"), NO_TIME, CPU)
    path.write_text("\n".join(some_lines(30, seed=1)))
    build_root(".", [path], tmp_path / "store", RootOptions("tiny"), NO_TIME, CPU)
    assert Store(tmp_path / "store").model == str(tmp_path)


@pytest.mark.parametrize("options", [RootOptions, DomainOptions, UpdateOptions, TrainingOptions])
def test_a_wrong_seed_is_refused_before_any_work(options):
    for seed in (-1, 2**64):
        with pytest.raises(InvalidInput, match=mentioning(f"seed {seed}")):
            options(seed=seed)


@pytest.mark.parametrize("keep", [-0.1, 1.5, float("nan")])
def test_a_wrong_share_is_refused_before_any_work(keep):
    for options in (RootOptions, DomainOptions, UpdateOptions, lambda keep: NewDomain("low", [], keep)):
        with pytest.raises(InvalidInput, match=mentioning(f"keep {keep}")):
            options(keep=keep)
        options(keep=0.0)


def test_a_folder_that_vanishes_before_it_is_opened_is_made_again(tmp_path, monkeypatch):
    folder, opened = tmp_path / "work", os.open

    def vanished(path, flags):
        monkeypatch.undo()
        folder.rmdir()
        return opened(path, flags)

    monkeypatch.setattr(os, "open", vanished)
    with held(folder, "this"):
        assert folder.is_dir()


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

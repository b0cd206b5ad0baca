"""Builds and updates of domains that are interrupted, killed or overtaken end as if they had run at once."""

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from builder.store.resumable import write_json
from builder.store.store import Store
from builder.tables.domain import build_domain, delete_domain
from builder.tables.root import RootOptions, build_root
from hplm.errors import InvalidInput
from tests.builder.tables.branches import CPU
from tests.builder.tables.test_domain import NO_TIME, SMALL, corpus, cut, grow, rooted, rows
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


def test_an_update_that_fails_in_its_clean_up_counts_nothing_twice(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "sweep", lambda self: (_ for _ in ()).throw(OSError("the disk is away")))
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is away"):
                grow(store, tmp_path, "bio", 2)
    assert grow(store, tmp_path, "bio", 2).meta.version == 2
    assert not store.work_folder("bio", 2).exists()


def test_an_interrupted_build_continues_on_the_parents_version_of_its_start(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU)
    options = replace(SMALL, parent="bio")
    cut(monkeypatch, lambda: build_domain(store, "cells", [corpus(tmp_path, 3)], options, NO_TIME, CPU))
    grow(store, tmp_path, "bio", 2)
    table = build_domain(store, "cells", [corpus(tmp_path, 3)], options, NO_TIME, CPU)
    assert (table.meta.parent, table.meta.parent_version) == ("bio", 1)
    assert store.users()["bio", 1] == ["domain cells version 1"]


def test_builds_that_end_meanwhile_do_not_count_as_users(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    working = store.tenant_work_folder("acme")
    working.mkdir(parents=True)
    write_json(working / "plan.json", {"domain": "root", "domain_version": 1})
    scandir = os.scandir

    def ends(path):
        if Path(path).name == "tenants":
            entries = list(scandir(path))
            shutil.rmtree(working, ignore_errors=True)
            return contextlib.nullcontext(iter(entries))
        return scandir(path)

    monkeypatch.setattr("pathlib.Path._scandir" if hasattr(Path, "_scandir") else "os.scandir", ends)
    assert store.users()["root", 1] == []


def test_after_an_old_version_is_deleted_an_interrupted_update_continues(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU)
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


def test_after_a_command_that_failed_at_once_another_one_may_build(tmp_path):
    store = rooted(tmp_path)
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "none.txt")):
        build_domain(store, "bio", [tmp_path / "none.txt"], SMALL, NO_TIME, CPU)
    build_domain(store, "bio", [corpus(tmp_path, 1)], SMALL, NO_TIME, CPU)
    for model in ("none", "nor-this-one"):
        with pytest.raises(InvalidInput, match=mentioning(tmp_path / model)):
            build_root(str(tmp_path / model), [corpus(tmp_path, 1)], tmp_path / "new", RootOptions(), NO_TIME, CPU)

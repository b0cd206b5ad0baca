"""Unfinished branches: one process at a time, only the same command goes on, and refused commands leave nothing behind.

Killed builds are in `tests/builder/test_killed.py`.
"""

import errno
import inspect
import os
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from builder.learning.limits import Budget
from builder.store.store import Store
from builder.tables.build_folder import locked_folder
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, delete_domain
from builder.tables.root import RootOptions, build_root
from builder.training.finetuning import TrainingOptions
from hplm.disk import NoSpace
from hplm.errors import InvalidInput
from tests.builder.checkpoints import save_bert
from tests.builder.stores import (
    NO_TIME,
    add_domain,
    corpus,
    cut,
    full_disk,
    grow,
    interrupted,
    meanwhile,
    rooted,
    rows,
    with_bio,
)
from tests.support.device import DEVICE
from tests.support.killed import content
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

BUSY = "'bio'"


def test_a_branch_is_built_by_one_process_at_a_time(tmp_path):
    store = rooted(tmp_path)
    with locked_folder(store.work_folder("bio", 1), "the other's"), pytest.raises(InvalidInput, match=BUSY):
        add_domain(store, "bio", 1)
    add_domain(store, "bio", 1)
    for version in (1, 2):  # the other process is about to end, or still at work
        with locked_folder(store.work_folder("bio", version), "the other's"), pytest.raises(InvalidInput, match=BUSY):
            grow(store, "bio", 2)
    with (
        locked_folder(tmp_path / "new/building/root-1", "the other's"),
        pytest.raises(InvalidInput, match=mentioning(tmp_path / "new")),
    ):
        build_root("any", [corpus(tmp_path, 1)], tmp_path / "new", RootOptions(), NO_TIME, DEVICE)
    assert grow(store, "bio", 2).meta.version == 2
    assert list((store.folder / "building").iterdir()) == []


def test_an_interrupted_build_goes_on_with_another_keep(tmp_path):
    store = rooted(tmp_path)
    cut(store, add_domain, "bio", 1)
    half_written = store.table_folder("bio", 1).with_name("1.writing")
    half_written.mkdir(parents=True)
    (half_written / "values").write_bytes(b"x" * 1000)
    assert rows(add_domain(store, "bio", 1, keep=0.5)) == rows(add_domain(store, "same", 1, keep=0.5))
    assert (store.plan("bio", 1) or {})["options"]["keep"] == 0.5


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.EBADF, "Bad file descriptor")))  # as NFS does
    with (
        pytest.raises(InvalidInput, match=mentioning(tmp_path / "work", "Bad file descriptor", "NFS")),
        locked_folder(tmp_path / "work", "it"),
    ):
        pytest.fail("it is not locked")


def test_a_corpus_that_is_refused_can_be_corrected(tmp_path):
    store, path = rooted(tmp_path), tmp_path / "some.txt"
    for wrong, named in (("one document of two words", [1]), ('{"text": "a"}\n{"text": 1}', [f"{path}:2", "text"])):
        path.write_text(wrong)
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            build_domain(store, "bio", [path], DomainOptions(min_tokens=1), Budget(steps=1), DEVICE)
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as shell:
        print("two documents\nof two words", file=shell, flush=True)
        with pytest.raises(InvalidInput, match=mentioning(f"/dev/fd/{reading}")):  # as of <(...)
            build_domain(store, "bio", [Path(f"/dev/fd/{reading}")], DomainOptions(min_tokens=1), NO_TIME, DEVICE)
    with pytest.raises(InvalidInput, match="--min-tokens"):
        build_domain(store, "bio", [corpus(tmp_path, 1)], DomainOptions(), NO_TIME, DEVICE)
    assert not store.has_lower("bio", 1) and not store.work_folder("bio", 1).exists()
    assert add_domain(store, "bio", 1).meta.keys


def test_a_root_stores_the_absolute_path_of_its_model(tmp_path, monkeypatch):
    """Refused commands before it leave no file behind. It takes seconds, because it imports what saves models."""
    path, folder = corpus(save_bert(tmp_path), 1), tmp_path / "store"
    monkeypatch.chdir(tmp_path)
    build = partial(build_root, ".", [path], folder, RootOptions(name="tiny", keep=0.5))
    with full_disk(), pytest.raises(NoSpace, match=mentioning("'root'", folder, "--keep")):
        build(Budget(steps=1), DEVICE)
    assert not [path for path in folder.rglob("*") if path.is_file()]
    files = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    with pytest.raises(InvalidInput, match=mentioning(tmp_path, "--store")):  # else its tokenizer would be replaced
        build_root(".", [path], tmp_path, RootOptions(name="tiny"), NO_TIME, DEVICE)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == files
    store, table = build(NO_TIME, DEVICE)
    assert table.meta.keys and Store(folder).domains() == store.domains() and store.model == str(tmp_path)
    before = content(folder)
    assert build(NO_TIME, DEVICE)[1].meta == table.meta and content(folder) == before
    with pytest.raises(InvalidInput, match=mentioning(folder, "--store")):
        build(Budget(steps=1), DEVICE)
    os.utime(tmp_path / "model.safetensors", (1, 1))  # as if it was another model
    with pytest.raises(InvalidInput, match=mentioning(folder, "--store")):
        build(NO_TIME, DEVICE)


@pytest.mark.parametrize("options", [RootOptions, DomainOptions, UpdateOptions, TrainingOptions])
def test_a_wrong_seed_or_share_is_refused_before_any_work(options):
    wrong = {"seed": (-1, 2**64), "keep": (-0.1, 1.5, float("nan"))}
    for name in wrong.keys() & inspect.signature(options).parameters:
        for value in wrong[name]:
            with pytest.raises(InvalidInput, match=mentioning(f"{name} {value}")):
                options(**{name: value})


def test_an_update_that_another_process_finishes_meanwhile_is_followed_by_the_next(tmp_path):
    store = with_bio(tmp_path)
    overtaken = meanwhile(store, "latest", lambda: grow(store, "bio", 2))
    assert grow(overtaken, "bio", 3).meta.version == 3


def test_users_are_read_while_nobody_else_can_build_the_domain(tmp_path):
    store = with_bio(tmp_path)

    def build():
        with pytest.raises(InvalidInput, match=BUSY), locked_folder(store.work_folder("bio", 2), "'bio'"):
            pass

    assert delete_domain(meanwhile(store, "users", build), "bio") == [1]


def test_a_domain_on_a_parent_that_is_deleted_meanwhile_is_not_built(tmp_path):
    store = with_bio(tmp_path)
    without = meanwhile(store, "save_lower", lambda: store.remove_branch("bio", 1))
    with pytest.raises(InvalidInput, match=mentioning(store.table_folder("bio", 1))):
        add_domain(without, "cells", 2, parent="bio")
    assert store.domains() == [("root", 1)]


def test_an_interrupted_build_continues_on_the_parents_version_of_its_start(tmp_path):
    store = with_bio(tmp_path)
    cut(store, add_domain, "cells", 3, parent="bio")
    grow(store, "bio", 2)
    table = add_domain(store, "cells", 3, parent="bio")
    assert (table.meta.parent, table.meta.parent_version) == ("bio", 1)
    assert store.users()["bio", 1] == ["domain cells version 1"]
    assert grow(store, "cells", 4).meta.parent_branch == ("bio", 1)  # as an update does
    cut(store, grow, "cells", 5)
    assert delete_domain(store, "cells", 1) == [1] and store.has_lower("cells", 3)
    assert grow(store, "cells", 5).meta.version == 3


def test_only_the_same_command_finishes_an_interrupted_build(tmp_path):
    """After its folder is removed, the build starts again, without counts and rows of the build before."""
    store = rooted(tmp_path)
    cut(store, add_domain, "bio", 1)
    working = store.work_folder("bio", 1)
    fewer = {"dtype": "int8", "keep": 0.5}
    for seed, options, named in ((1, fewer, ["--dtype fp16 (now int8)", "--keep not given (now 0.5)"]), (2, {}, ["--corpus"])):
        with pytest.raises(InvalidInput, match=mentioning(working, *named)):
            add_domain(store, "bio", seed, **options)
    add_domain(store, "bio", 1)
    half_written = store.table_folder("other", 1).with_name("1.writing")
    cut(store, add_domain, "other", 1)
    half_written.mkdir(parents=True)
    (half_written / "values").write_bytes(b"x" * 1000)
    shutil.rmtree(store.work_folder("other", 1))
    assert rows(add_domain(store, "other", 2)) == rows(add_domain(store, "same", 2))


def test_a_build_that_was_killed_after_its_table_leaves_no_folder_and_the_same_one_changes_nothing(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    monkeypatch.setattr("builder.tables.domain.clear_work_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        add_domain(store, "bio", 1)
    monkeypatch.undo()
    assert store.work_folder("bio", 1).exists()
    for seed, options in ((2, {}), (1, {"dtype": "int8"})):
        with pytest.raises(InvalidInput, match="hplm domain update"):
            add_domain(store, "bio", seed, **options)
    assert not store.work_folder("bio", 1).exists()
    assert store.users()["root", 1] == ["domain bio version 1"]
    grow(store, "bio", 2)
    grow(store, "root", 3)  # the domain stays on the version that it was built on
    before = content(store.folder)
    assert (add_domain(store, "bio", 1).meta.version, grow(store, "bio", 2).meta.version) == (1, 2)
    assert content(store.folder) == before
    assert grow(store, "bio", 2, keep=0.5).meta.version == 3


def test_a_domain_does_not_continue_an_update_of_a_deleted_one_of_its_name(tmp_path):
    store = with_bio(tmp_path)
    cut(store, grow, "bio", 3)
    delete_domain(store, "bio")
    add_domain(store, "bio", 2)
    assert rows(grow(store, "bio", 3)) == rows(add_domain(store, "both", 2, 3))

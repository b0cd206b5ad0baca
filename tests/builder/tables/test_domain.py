"""Domains are built, updated, deleted and swept; tables have a usual size at most, and room on the disk."""

import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest

from builder.adaptation.learning import Budget
from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile
from builder.tables import domain as domains
from builder.tables import size
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, delete_domain, update_domain
from builder.tables.ranking import Ranking
from builder.tables.root import RootOptions, build_root
from hplm.errors import InvalidInput
from hplm.model.windows import TRIGRAMS, Window
from hplm.plot.room import NoSpace
from tests.builder.adaptation.test_masked import save
from tests.builder.tables.branches import CPU, build, make_store, some_lines
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

NO_TIME = Budget(steps=0)
SMALL = DomainOptions(min_tokens=1)


def corpus(folder: Path, seed: int, lines: int = 30) -> Path:
    path = folder / f"corpus-{seed}.txt"
    if not path.exists():
        path.write_text("\n".join(some_lines(lines, seed)), "utf-8")
    return path


@cache
def _built(window: Window, keep: float, domain: str | None = None) -> tuple[Path, TemporaryDirectory]:
    """Builds a store once for all tests. The second value removes its folder at the end."""
    owner = TemporaryDirectory()
    folder = Path(owner.name)
    if domain is not None:
        store = rooted(folder, window, keep)
        build_domain(store, domain, [corpus(folder, 1)], SMALL, NO_TIME, CPU)
        return store.folder, owner
    store = make_store(folder, window)
    _, _, counts = build(store, folder, "root", some_lines(20, seed=0), keep)
    store.counts_folder("root", 1).parent.mkdir(parents=True)
    counts.folder.rename(store.counts_folder("root", 1))
    return store.folder, owner


def rooted(folder: Path, window: Window = TRIGRAMS, keep: float = 1.0) -> Store:
    """A store with a root, without the checkpoint that a real one comes from."""
    return Store(shutil.copytree(_built(window, keep)[0], folder / "store"))


def with_bio(folder: Path) -> Store:
    """A store with a root and the domain `bio` of the first corpus."""
    return Store(shutil.copytree(_built(TRIGRAMS, 1.0, "bio")[0], folder / "store"))


def tenant(store: Store, name: str, domain: str, version: int = 1) -> None:
    weights = {"weight": store.upper().norm.weight.detach(), "bias": store.upper().norm.bias.detach()}
    store.save_tenant(TenantFile(name, 1, domain, version, "classify", ["a", "b"], 0), None, weights, {})


def grow(store: Store, folder: Path, name: str, seed: int, **options: object):
    return update_domain(store, name, [corpus(folder, seed)], UpdateOptions(**options), NO_TIME, CPU)


def rows(table) -> dict[bytes, bytes]:
    values = table.rows.raw(np.arange(1, table.size))
    return {key.tobytes(): value.tobytes() for key, value in zip(table.index.by_row(), values, strict=True)}


def cut(monkeypatch, call) -> None:
    """Makes the build fail where it would compute the table."""

    def power_cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(domains, "build_table", power_cut)
        call()


def test_an_update_gives_the_table_of_both_corpora_together(tmp_path):
    store = with_bio(tmp_path)
    first = store.table("bio", 1)
    tenant(store, "acme", "bio")
    second = grow(store, tmp_path, "bio", 2)
    both = build_domain(store, "both", [corpus(tmp_path, 1), corpus(tmp_path, 2)], SMALL, NO_TIME, CPU)
    assert (second.index.by_row() == both.index.by_row()).all()
    assert second.meta.corpus_tokens == both.meta.corpus_tokens > first.meta.corpus_tokens
    old, new = rows(first), rows(second)
    assert len(new) > len(old) and all(new[key] == value for key, value in old.items())
    assert [branch for branch in store.domains() if branch[0] == "bio"] == [("bio", 1), ("bio", 2)]
    assert store.users()["bio", 1] == ["tenant acme"] and store.users()["bio", 2] == []


@pytest.mark.parametrize("keep", [1.0, 0.25, 0.0])
@pytest.mark.parametrize("name", ["bio", "root"])
def test_an_update_keeps_the_share_of_the_version_before(tmp_path, name, keep):
    store = rooted(tmp_path, keep=keep)
    if name == "bio":
        build_domain(store, "bio", [corpus(tmp_path, 1)], replace(SMALL, keep=keep), NO_TIME, CPU)
    updated = grow(store, tmp_path, name, 2)
    ranking = Ranking(domains.Counts(store.counts_folder(name, 2)), root=name == "root")
    kept = ranking.keep_of(updated.meta)
    assert kept == pytest.approx(keep, abs=0.01) and (kept == 1) == (keep == 1)
    for keys in ranking.keys(ranking.number(kept)):
        assert (updated.find(keys) > 0).all()


def test_a_domain_in_use_stays_and_its_users_are_named(tmp_path):
    store = with_bio(tmp_path)
    build_domain(store, "cells", [corpus(tmp_path, 2)], replace(SMALL, parent="bio"), NO_TIME, CPU)
    tenant(store, "acme", "bio")
    with pytest.raises(InvalidInput, match=mentioning("'bio'", "cells", 1, "acme")):
        delete_domain(store, "bio")
    assert delete_domain(store, "cells") == [1]
    with pytest.raises(InvalidInput, match=mentioning("'bio'", 1, "acme")):
        delete_domain(store, "bio", 1)
    grow(store, tmp_path, "bio", 3)
    assert delete_domain(store, "bio", 2) == [2]
    with pytest.raises(InvalidInput, match=mentioning("'bio'", 7)):
        delete_domain(store, "bio", 7)
    with pytest.raises(InvalidInput, match="'law'"):
        delete_domain(store, "law")
    with pytest.raises(InvalidInput, match=mentioning("root")):
        delete_domain(store, "root")
    (store.tenant_folder("acme", 1) / "tenant.json").unlink()
    assert delete_domain(store, "bio") == [1]
    assert not [path for path in store.folder.rglob("*bio*")]


def test_a_domain_cannot_be_deleted_while_something_is_built_on_it(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    for name, seed in (("bio", 1), ("law", 2)):
        build_domain(store, name, [corpus(tmp_path, seed)], SMALL, NO_TIME, CPU)
    cut(monkeypatch, lambda: build_domain(store, "cells", [corpus(tmp_path, 3)], replace(SMALL, parent="bio"), NO_TIME, CPU))
    working = store.tenant_work_folder("acme")
    working.mkdir(parents=True)
    write_json(working / "plan.json", {"domain": "law", "domain_version": 1})
    with pytest.raises(InvalidInput, match=mentioning("'bio'", store.work_folder("cells", 1))):
        delete_domain(store, "bio")
    with pytest.raises(InvalidInput, match=mentioning("'law'", working)):
        delete_domain(store, "law")
    shutil.rmtree(store.folder / "building")
    assert delete_domain(store, "bio") == delete_domain(store, "law") == [1]


def test_a_broken_table_affects_only_branches_that_need_it(tmp_path):
    store = rooted(tmp_path)
    for name, seed in (("bio", 1), ("law", 2)):
        build_domain(store, name, [corpus(tmp_path, seed)], SMALL, NO_TIME, CPU)
    (store.table_folder("law", 1) / "values").write_bytes(b"")
    assert store.chain("bio", 1) == [("bio", 1), ("root", 1)]
    assert len(store.forest("bio", 1).chain("bio", 1).links) == 2 and not store.forest("bio", 1).failures()
    assert delete_domain(store, "law") == [1]


def test_sweep_keeps_used_versions_and_the_two_newest(tmp_path):
    store = with_bio(tmp_path)
    tenant(store, "acme", "bio", 1)
    for seed in (2, 3, 4):
        grow(store, tmp_path, "bio", seed)
    assert [version for name, version in store.domains() if name == "bio"] == [1, 3, 4]
    (store.tenant_folder("acme", 1) / "tenant.json").unlink()
    assert store.sweep() == [("bio", 1)]
    assert not store.counts_folder("bio", 1).exists() and not store.has_lower("bio", 2) and store.has_lower("bio", 3)
    delete_domain(store, "bio", 4)
    grow(store, tmp_path, "bio", 5)
    delete_domain(store, "bio", 3)
    grow(store, tmp_path, "bio", 6)
    assert [version for name, version in store.domains() if name == "bio"] == [4, 5]
    assert store.sweep() == []


def test_the_root_can_be_updated_but_is_not_adapted(tmp_path):
    store = rooted(tmp_path)
    with pytest.raises(InvalidInput, match="--minutes 0"):
        update_domain(store, "root", [corpus(tmp_path, 1)], UpdateOptions(), Budget(steps=1), CPU)
    updated = grow(store, tmp_path, "root", 1)
    assert updated.meta.parent is None and updated.meta.version == 2
    assert (updated.find(store.space.unigrams()) > 0).all()
    child = build_domain(store, "bio", [corpus(tmp_path, 2)], SMALL, NO_TIME, CPU)
    assert child.meta.parent_version == 2


def options(keep: float | None = None) -> DomainOptions:
    return DomainOptions(keep=keep, min_tokens=1)


def test_without_a_share_a_table_has_a_usual_size_at_most(tmp_path, monkeypatch, capsys):
    store = rooted(tmp_path)
    whole = build_domain(store, "whole", [corpus(tmp_path, 1)], options(), NO_TIME, CPU).meta
    monkeypatch.setattr(size, "USUAL_NGRAMS", usual := whole.keys // 2)
    capsys.readouterr()
    less = build_domain(store, "less", [corpus(tmp_path, 1)], options(), NO_TIME, CPU).meta
    assert 0.9 * usual < less.keys <= usual
    assert mentions(capsys.readouterr().err, "less", f"{less.keys:,}", f"{whole.keys:,}", "--keep")
    assert build_domain(store, "all", [corpus(tmp_path, 1)], options(1.0), NO_TIME, CPU).meta.keys == whole.keys
    grown = update_domain(store, "less", [corpus(tmp_path, 2)], UpdateOptions(), NO_TIME, CPU).meta
    assert less.keys < grown.keys < whole.keys


def test_what_has_no_room_is_refused_before_anything_learns_and_can_be_smaller(tmp_path, monkeypatch):
    store, files = rooted(tmp_path), [corpus(tmp_path, 1)]
    needed = sum(build_domain(store, "whole", files, options(), NO_TIME, CPU).meta.sizes().values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed // 2))
    for call in (
        lambda: build_domain(store, "less", files, options(), Budget(steps=1), CPU),
        lambda: update_domain(store, "whole", [corpus(tmp_path, 2)], UpdateOptions(), Budget(steps=1), CPU),
    ):
        with pytest.raises(NoSpace, match=mentioning("GB", store.folder, "--keep")):
            call()
    assert store.domains() == [("root", 1), ("whole", 1)] and not store.has_lower("less", 1) and not store.has_lower("whole", 2)
    with pytest.raises(NoSpace) as refused:
        build_domain(store, "less", files, options(1.0), NO_TIME, CPU)
    (keep,) = re.findall(r"--keep ([0-9.]+)", str(refused.value))
    assert 0.25 < float(keep) < 0.5
    assert build_domain(store, "less", files, options(float(keep)), NO_TIME, CPU).meta.keys


def test_a_root_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    model, folder = str(save(tmp_path, "without")), tmp_path / "store"
    with monkeypatch.context() as full, pytest.raises(NoSpace, match=mentioning("'root'", folder, "--keep")):
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        build_root(model, [corpus(tmp_path, 1)], folder, RootOptions("tiny"), Budget(steps=1), CPU)
    assert not [path for path in folder.rglob("*") if path.is_file()]
    store, table = build_root(model, [corpus(tmp_path, 1)], folder, RootOptions("tiny", keep=0.5), NO_TIME, CPU)
    assert table.meta.keys and Store(folder).domains() == store.domains()

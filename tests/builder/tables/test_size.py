"""Tables that the disk has no room for are refused before anything learns. Without --keep a table has a usual size at most."""

import re
import shutil
from types import SimpleNamespace

import pytest

from builder.store.store import Store
from builder.tables import domain as domains
from builder.tables import root as roots
from builder.tables import size
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, update_domain
from builder.tables.root import RootOptions, build_root
from hplm.plot.room import NoSpace, check_room
from tests.builder.adaptation.test_masked import save
from tests.builder.tables.branches import CPU
from tests.builder.tables.test_domain import NO_TIME, corpus, rooted
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


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


def test_a_domain_without_room_is_refused_and_can_be_built_smaller(tmp_path, monkeypatch):
    store = rooted(tmp_path)
    files, adapt = [corpus(tmp_path, 1)], domains._adapt
    needed = sum(build_domain(store, "whole", files, options(), NO_TIME, CPU).meta.sizes().values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed // 2))
    monkeypatch.setattr(domains, "_adapt", None)
    for call in (
        lambda: build_domain(store, "less", files, options(), NO_TIME, CPU),
        lambda: update_domain(store, "whole", [corpus(tmp_path, 2)], UpdateOptions(), NO_TIME, CPU),
    ):
        with pytest.raises(NoSpace, match=mentioning("GB", store.folder, "--keep")):
            call()
    (store.work_folder("less", 1)).mkdir()
    (learned := store.work_folder("less", 1) / "adaptation.pt").touch()
    with pytest.raises(NoSpace):
        build_domain(store, "less", files, options(), NO_TIME, CPU)
    assert learned.exists()
    shutil.rmtree(learned.parent)
    store.remove_branch("less", 1)
    assert not list((store.folder / "building").iterdir()) and not store.counts_folder("less", 1).exists()
    monkeypatch.setattr(domains, "_adapt", adapt)
    with pytest.raises(NoSpace) as refused:
        build_domain(store, "less", files, options(1.0), NO_TIME, CPU)
    (keep,) = re.findall(r"--keep ([0-9.]+)", str(refused.value))
    assert 0.25 < float(keep) < 0.5
    assert build_domain(store, "less", files, options(float(keep)), NO_TIME, CPU).meta.keys


def test_a_root_without_room_is_refused_before_anything_learns(tmp_path, monkeypatch):
    model, folder = str(save(tmp_path, "without")), tmp_path / "store"
    with monkeypatch.context() as full, pytest.raises(NoSpace, match=mentioning("'root'", folder, "--keep")):
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        full.setattr(roots, "adapt", None)
        build_root(model, [corpus(tmp_path, 1)], folder, RootOptions("tiny"), NO_TIME, CPU)
    assert not [path for path in folder.rglob("*") if path.is_file()]
    store, table = build_root(model, [corpus(tmp_path, 1)], folder, RootOptions("tiny", keep=0.5), NO_TIME, CPU)
    assert table.meta.keys and Store(folder).domains() == store.domains()


def test_room_is_that_of_the_nearest_folder(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: seen.append(path) or SimpleNamespace(free=10))
    check_room(tmp_path / "not" / "yet", 10, "this", "that")
    with pytest.raises(NoSpace, match=mentioning("this", tmp_path, "that")):
        check_room(tmp_path / "not" / "yet", 11, "this", "that")
    assert seen == [tmp_path, tmp_path]

"""The demo's data: the same from the same sources, readable, and without a test text in what is learnt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from demo.data import MANIFEST, DemoData, data_of, stored_demo_data, write_demo_data
from demo.docstrings import STANDARD_LIBRARY, Source
from demo.documents import shingles
from demo.domains import Domain
from demo.tasks import TASKS
from hplm.errors import HplmError
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

AREAS = {name: (Source(STANDARD_LIBRARY, (name,)),) for name in ("asyncio", "email", "logging", "unittest")}
SMALL = Domain("small", AREAS)
SMALL_TASKS = [replace(task, domain="small") for task in TASKS]
SIZES = {"train": 60, "dev": 10, "test": 20}


def written(folder: Path) -> DemoData:
    return write_demo_data(folder, [SMALL], SMALL_TASKS, SIZES, show_progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def data(folder: Path) -> DemoData:
    return written(folder)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(path: Path) -> list[str]:
    return [row["text"] if "text" in row else " ".join(row["tokens"]) for row in rows(path)]


def test_the_same_sources_give_the_same_files_and_existing_ones_are_kept(data, folder, tmp_path, monkeypatch) -> None:
    again = tmp_path / "again"
    again.mkdir()
    monkeypatch.setattr("demo.data.write_demo_data", lambda folder, **_: written(folder))  # not of the demo's own sources
    first = stored_demo_data(again, SIZES)
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
    assert files == {path.relative_to(again): path.read_bytes() for path in again.rglob("*.*") if path.name != MANIFEST}
    assert len(files) == 1 + 3 * len(SMALL_TASKS)
    monkeypatch.setattr("demo.data.write_demo_data", None)
    assert stored_demo_data(again, SIZES) == first == written(again)
    moved = data_of(again.rename(tmp_path / "moved"))
    assert all(file.exists() for tenant in moved.tenants for file in (tenant.train, tenant.dev, tenant.test))
    assert all(domain.corpus.exists() for domain in moved.domains)


def test_the_builder_can_read_the_files(data: DemoData) -> None:
    for tenant in data.tenants:
        for row in (row for path in (tenant.train, tenant.dev, tenant.test) for row in rows(path)):
            if tenant.task == "classify":
                assert set(row) == {"text", "label"} and row["label"] in tenant.labels
                assert 6 <= len(row["text"].split()) <= 100
            else:
                assert set(row) == {"tokens", "tags"} and set(row["tags"]) <= set(tenant.labels)
                assert len(row["tokens"]) == len(row["tags"]) <= 100
                assert " ".join(row["tokens"]).split() == row["tokens"]


def test_no_corpus_and_no_other_split_has_half_of_a_test_text(tmp_path: Path) -> None:
    """Neither training data nor corpora: here, one domain reads the sources of the other domain's test texts."""
    kin = tuple(source for sources in AREAS.values() for source in sources)
    reader = Domain("reader", {"json": (Source(STANDARD_LIBRARY, ("json",)),)}, kin)
    found = write_demo_data(tmp_path, [SMALL, reader], SMALL_TASKS, SIZES, show_progress=False, further=True)
    corpora = [domain.corpus.read_text(encoding="utf-8").splitlines() for domain in found.domains]
    assert [len(corpus) for corpus in corpora] == [domain.documents for domain in found.domains]
    assert len(set(corpora[0]) & set(corpora[1])) > len(corpora[0]) / 2  # corpora may contain training texts
    read = [shingles(line) for corpus in corpora for line in corpus]
    for tenant in found.tenants:
        earlier: set[str] = set()
        for path in (tenant.train, tenant.dev, tenant.test):
            held = [shingles(text) for text in texts(path)]
            assert not any(2 * len(own & earlier) >= len(own) for own in held), path
            if path != tenant.train:
                assert not any(2 * len(own & line) >= len(own) for own in held for line in read), path
            earlier.update(*held)


def test_sources_without_examples_are_an_error_that_names_them(tmp_path: Path) -> None:
    bare = Domain("small", {"nothing": (Source(STANDARD_LIBRARY, ("no_such_module",)),)})
    with pytest.raises(HplmError, match=mentioning("'stdlib-area'", "stdlib", "train")):
        write_demo_data(tmp_path, [bare], SMALL_TASKS, SIZES, show_progress=False)

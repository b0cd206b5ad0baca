"""The demo's data: the same from the same sources, readable, and without a test text in what is learnt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builder.tasks.tasks import training_task
from demo.data import MANIFEST, DemoData, stored, write_demo_data
from demo.docstrings import STANDARD_LIBRARY, Source
from demo.documents import shingles
from demo.domains import DOMAINS, Domain
from demo.tasks import TASKS
from hplm.errors import HplmError
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

AREAS = {name: (Source(STANDARD_LIBRARY, (name,)),) for name in ("asyncio", "email", "logging", "unittest")}
SMALL = Domain("small", AREAS)
SMALL_TASKS = [replace(task, domain="small") for task in TASKS]
SIZES = {"train": 60, "dev": 10, "test": 20}


def written(folder: Path) -> DemoData:
    folder.mkdir()
    kin = tuple(source for sources in AREAS.values() for source in sources)
    reader = Domain("reader", {"json": (Source(STANDARD_LIBRARY, ("json",)),)}, kin)
    return write_demo_data(folder, [SMALL, reader], SMALL_TASKS, SIZES, show_progress=False, further=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    """Data of two domains, of which one reads the sources of the other domain's test texts."""
    return written(tmp_path_factory.mktemp("demo") / "first")


def test_the_same_sources_give_the_same_files_and_existing_ones_are_kept(found: DemoData, tmp_path: Path) -> None:
    def files(folder: Path) -> dict[Path, bytes]:
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*") if path.name != MANIFEST}

    first = found.domains[0].corpus.parents[1]
    stored(folder := tmp_path / "stored", SIZES, lambda: written(folder))
    assert files(folder) == files(first) and len(files(folder)) == 2 + 3 * len(SMALL_TASKS)
    moved = stored(folder.rename(tmp_path / "moved"), SIZES, lambda: pytest.fail("written again"))
    assert all(domain.corpus.exists() for domain in moved.domains)
    for tenant in moved.tenants:
        for part, size in SIZES.items():  # as the builder reads them
            examples = training_task(tenant.task).read(getattr(tenant, part))
            assert 0 < len(examples) <= size and {label for one in examples for label in one.labels} <= set(tenant.labels)
            assert all(len(one.text.split()) <= 100 for one in examples), tenant.id


def test_no_corpus_and_no_other_split_has_half_of_a_test_text(found: DemoData) -> None:
    """Neither training data nor corpora."""
    corpora = [domain.corpus.read_text(encoding="utf-8").splitlines() for domain in found.domains]
    assert [len(corpus) for corpus in corpora] == [domain.documents for domain in found.domains]
    assert len(set(corpora[0]) & set(corpora[1])) > len(corpora[0]) / 2  # corpora may contain training texts
    read = [shingles(line) for corpus in corpora for line in corpus]
    for tenant in found.tenants:
        earlier: set[str] = set()
        for path in (tenant.train, tenant.dev, tenant.test):
            rows = map(json.loads, path.read_text("utf-8").splitlines())
            held = [shingles(row.get("text") or " ".join(row["tokens"])) for row in rows]
            assert not any(2 * len(own & earlier) >= len(own) for own in held), path
            if path != tenant.train:
                assert not any(2 * len(own & line) >= len(own) for own in held for line in read), path
            earlier.update(*held)


def test_sources_without_examples_are_named_and_those_of_the_demo_are_there(tmp_path: Path) -> None:
    bare = Domain("small", {"nothing": (Source(STANDARD_LIBRARY, ("no_such_module",)),)})
    with pytest.raises(HplmError, match=mentioning("'stdlib-area'", "stdlib", "train")):
        write_demo_data(tmp_path, [bare], SMALL_TASKS, SIZES, show_progress=False)
    assert {task.domain for task in TASKS} == {domain.name for domain in DOMAINS}
    assert len({task.tenant for task in TASKS}) == len(TASKS) and {task.task for task in TASKS} == {"classify", "tag"}
    for name, sources in (part for domain in DOMAINS for part in domain.areas.items()):
        assert sum(len(source.files()) for source in sources) >= 5, name

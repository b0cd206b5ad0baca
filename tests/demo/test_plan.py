"""The demo's plan: what is built first, and how much of it on which machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.plan import (
    FIRST_ANSWERS_SECONDS,
    LARGE,
    MARGIN,
    SIZES,
    WHOLE_SECONDS,
    Part,
    Sources,
    Speed,
    choose_size,
    parts_of,
)

FAST = Speed(parsed=3.4e6, ngrams=4_000, trained=12_000, vocabulary=30_522)  # two cores with AMX
SLOW = Speed(parsed=2.5e6, ngrams=1_900, trained=3_400, vocabulary=30_522)  # two cores with AVX2


@pytest.fixture
def sources(tmp_path: Path) -> list[Sources]:
    """As much text as the pinned packages have."""
    sizes = {"stdlib": 7_275_301, "maths": 14_535_073, "learning": 16_552_038, "web": 9_636_130}
    found = []
    for name, size in sizes.items():
        file = tmp_path / f"{name}.py"
        with open(file, "wb") as empty:
            empty.truncate(size)
        found.append(Sources(name, (file,), (f"{name}-one", f"{name}-two")))
    return found


def seconds(parts: list[Part]) -> float:
    return sum(part.seconds for part in parts)


def test_one_domain_and_its_tenants_come_before_the_first_answers(sources: list[Sources]) -> None:
    parts = parts_of(LARGE, FAST, sources)
    assert [part.name for part in parts] == ["data", "root", "stdlib", "first", "maths", "learning", "web", "all"]
    assert [part.name for part in parts if part.is_first] == ["data", "root", "stdlib", "first"]
    assert "stdlib-one" in parts[2].title


def test_a_machine_that_is_slow_or_may_become_slower_builds_less_and_is_in_time(sources: list[Sources]) -> None:
    first = seconds([part for part in parts_of(LARGE, FAST, sources) if part.is_first])
    assert first < FIRST_ANSWERS_SECONDS < MARGIN * first
    assert choose_size(SIZES, FAST, sources) is not LARGE
    size = choose_size(SIZES, SLOW, sources)
    parts = parts_of(size, SLOW, sources)
    assert size is not LARGE and seconds([part for part in parts if part.is_first]) <= FIRST_ANSWERS_SECONDS
    assert seconds(parts) <= WHOLE_SECONDS < MARGIN * seconds(parts_of(LARGE, SLOW, sources))
    assert choose_size([LARGE], SLOW, sources) is LARGE  # a size that was begun is kept

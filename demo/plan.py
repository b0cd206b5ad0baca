"""The demo's plan: how much it builds on this machine, and how long each part takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FIRST_ANSWERS_SECONDS, WHOLE_SECONDS = 240, 600  # a smaller size is chosen if one of them might be exceeded
MARGIN = 1.5  # a machine may become so much slower than it was measured, because of its heat or its neighbours
EPOCHS = 2  # of each tenant's training
QUESTIONS = 200  # of each tenant's test file

# Costs of the parts, measured with MiniLM and the pinned packages on one core with AVX2. They only serve to estimate time.
TOKENS_PER_BYTE = 0.0176  # of a domain's corpus, for each byte of its source files
READING = 2.0  # times as long as parsing alone
TOKENISING = 0.12  # of the time of reading
ROOT_NGRAMS, DOMAIN_NGRAMS = 1.2, 0.85  # rows for each token of a corpus, times `keep`; a root takes more of the shorter forms
ADAPTING_ROOT, ADAPTING_DOMAIN = 92_000, 8_000  # what comes before the first step takes as long as so many rows of a table
EXAMINING = 5_000  # and what comes after the last step
TEXT_TOKENS = 80  # a tenant's training text takes as long as so many measured tokens
EVALUATING = 0.33  # of the time of training on the same texts
LOADING, STARTING, ASKING = 10e6, 33e6, 20e3  # a checkpoint, Triton, one question: as long as parsing so many bytes
QUESTION_TOKENS = 20  # and one question besides as long as training on so many tokens


@dataclass(frozen=True)
class Size:
    """The amount that is built. All sizes have the same domains and tenants."""

    name: str
    root_keep: float  # share of the whole windows that have a row in the table
    domain_keep: float
    minutes: float  # of adapting the lower half for the root
    domain_minutes: float
    train: int  # texts of each tenant
    dev: int
    test: int = 300

    @property
    def texts(self) -> dict[str, int]:
        return {"train": self.train, "dev": self.dev, "test": self.test}


LARGE = Size("large", root_keep=0.05, domain_keep=0.4, minutes=1.5, domain_minutes=0.25, train=1000, dev=200)
MEDIUM = Size("medium", root_keep=0.025, domain_keep=0.1, minutes=1.0, domain_minutes=0, train=700, dev=150)
SMALL = Size("small", root_keep=0.01, domain_keep=0.04, minutes=1.0, domain_minutes=0, train=500, dev=100)
SIZES = (LARGE, MEDIUM, SMALL)


@dataclass(frozen=True)
class Speed:
    """The work that this machine does in a second."""

    parsed: float  # bytes of Python source; on one core
    ngrams: float  # rows of a table
    trained: float  # tokens that a tenant is trained on
    vocabulary: int  # of the checkpoint: each token has a row in the root's table


@dataclass(frozen=True)
class Sources:
    """A domain's source files, and its tenants."""

    domain: str
    files: tuple[Path, ...]
    tenants: tuple[str, ...]

    @cached_property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def tokens(self) -> float:
        """Of the domain's corpus, roughly."""
        return TOKENS_PER_BYTE * self.bytes


@dataclass(frozen=True)
class Part:
    name: str
    title: str
    seconds: float
    is_first: bool = False  # whether it comes before the first answers


def parts_of(size: Size, speed: Speed, sources: Sequence[Sources]) -> list[Part]:
    """Returns the parts in their order. The first domain and its tenants come before the first answers."""
    tenants = sum(len(one.tenants) for one in sources)
    reading = READING * sum(one.bytes for one in sources) / speed.parsed
    starting = STARTING / speed.parsed
    asking = QUESTIONS * tenants * (ASKING / speed.parsed + QUESTION_TOKENS / speed.trained)
    first, *others = sources
    return [
        Part("data", f"read docstrings: corpora of {len(sources)} domains, data of {tenants} tenants", reading, is_first=True),
        Part("root", "root: adapt the lower half, compute the table", _root(size, speed, sources, reading), is_first=True),
        Part(first.domain, _title(first), _domain(size, speed, first), is_first=True),
        Part("first", f"export, start Triton, ask {len(first.tenants)} tenants: the first answers", starting, is_first=True),
        *(Part(one.domain, _title(one), _domain(size, speed, one)) for one in others),
        Part("all", f"export everything, start Triton, examine {tenants} tenants", starting + asking),
    ]


def choose_size(sizes: Sequence[Size], speed: Speed, sources: Sequence[Sources]) -> Size:
    """Returns the first of the sizes that this machine builds in time, else the last one."""
    for size in sizes:
        parts = parts_of(size, speed, sources)
        first = MARGIN * sum(part.seconds for part in parts if part.is_first)
        if first <= FIRST_ANSWERS_SECONDS and MARGIN * sum(part.seconds for part in parts) <= WHOLE_SECONDS:
            return size
    return sizes[-1]


def minutes_of(parts: Sequence[Part]) -> str:
    return f"{sum(part.seconds for part in parts) / 60:.1f}"


def table_of(parts: Sequence[Part], done: Collection[str] = ()) -> str:
    """Returns the plan as text. `done`: names of parts that an earlier run has finished."""
    left = [part for part in parts if part.name not in done]
    titles = [part.title for part in parts]
    times = ["done" if part.name in done else minutes_of([part]) for part in parts]
    width = max(map(len, titles))
    lines = [f"{'part':<{width}}  minutes", "-" * (width + 9)]
    lines += [f"{title:<{width}}  {time:>7}" for title, time in zip(titles, times, strict=True)]
    lines += ["-" * (width + 9), f"{'everything':<{width}}  {minutes_of(left):>7}"]
    if any(part.name == "first" for part in left):
        first = minutes_of([part for part in left if part.is_first])
        lines.append(f"{'until the first answers':<{width}}  {first:>7}")
    return "\n".join(lines)


def _root(size: Size, speed: Speed, sources: Sequence[Sources], reading: float) -> float:
    rows = speed.vocabulary + size.root_keep * ROOT_NGRAMS * sum(one.tokens for one in sources)
    return TOKENISING * reading + _adapting(size.minutes, ADAPTING_ROOT, speed) + rows / speed.ngrams


def _domain(size: Size, speed: Speed, one: Sources) -> float:
    rows = size.domain_keep * DOMAIN_NGRAMS * one.tokens
    texts = EPOCHS * size.train + EVALUATING * (EPOCHS + 1) * size.dev
    training = len(one.tenants) * texts * TEXT_TOKENS / speed.trained
    return _adapting(size.domain_minutes, ADAPTING_DOMAIN, speed) + rows / speed.ngrams + training


def _adapting(minutes: float, before: int, speed: Speed) -> float:
    """The work before the first step is part of the minutes, and is finished even if it takes longer."""
    if not minutes:
        return 0.0
    return LOADING / speed.parsed + max(60 * minutes, before / speed.ngrams) + EXAMINING / speed.ngrams


def _title(one: Sources) -> str:
    return f"domain {one.domain}: compute the table, train {' and '.join(one.tenants)}"

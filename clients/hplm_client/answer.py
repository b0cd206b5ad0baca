"""The answer that a client gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One label. A tagger returns a row for each word; a word that the model cannot read has the label '' and its span."""

    label: str
    score: float  # the label's probability
    span: tuple[int, int]  # the code points of the text that the label is about
    logits: tuple[float, ...] | None = None  # only with logits=True, and only for rows with logits of their own


@dataclass(frozen=True)
class Tenant:
    """A tenant that the key opens, or one without keys."""

    name: str
    task: str
    backbone: str
    labels: tuple[str, ...] | None = None  # only of a tenant that was named
    dimensions: int | None = None  # of the vectors of a tenant of the task embed
    prefixes: tuple[str, ...] | None = None  # the names of those that a request to it may choose


@dataclass(frozen=True)
class Answer:
    """All rows of one text, and the tenant's version that answered."""

    rows: tuple[Row, ...]
    version: str
    confidence: float | None = None  # how likely it is right; only with confidence=True, and of a calibrated tenant
    level: int | None = None  # at which level it was answered, or by how many students; only with the parameter hplm_rung
    embedding: tuple[float, ...] | None = None  # the vector, instead of rows; only with embedding=True
    tokens: int | None = None  # of the text, as the model has read it; only with tokens=True
    late: bool = False  # it came after `deadline_ms`

    @property
    def label(self) -> str | None:
        """The first row's label; None if the text has no rows."""
        return self.rows[0].label if self.rows else None

    @property
    def score(self) -> float | None:
        return self.rows[0].score if self.rows else None

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(row.label for row in self.rows)

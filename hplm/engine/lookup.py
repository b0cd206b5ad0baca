"""The first half of a request: tokenises texts and finds the addresses of their precomputed rows, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hplm.engine.backbone import Backbone, View
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Encoded
from hplm.plot.forest import Hits
from hplm.tasks import Task
from hplm.tenants.snapshot import Tenant

PAD = -1
MOST_ROWS = 1 << 20  # of an answer, with all texts padded to the widest
LONGEST_TEXT = 100_000  # characters, before truncation
MOST_CHARACTERS = 40 * LONGEST_TEXT  # of a request: while it is tokenised, other requests wait


@dataclass(frozen=True)
class LookedUp:
    """A request between the two models: its texts as rectangles. Short texts are filled up with PAD."""

    addresses: np.ndarray  # texts x tokens, int64
    segments: np.ndarray  # texts x tokens, uint8; 0 beyond the end
    spans: np.ndarray  # texts x answer rows x 3, int32

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts."""
        return _used(self.addresses)

    def text(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the addresses, segments and spans of one text.

        They are copies: a waiting text keeps only its own part of the rectangles in memory.
        """
        tokens, rows = _used(self.addresses[index]), _used(self.spans[index, :, 1])
        return self.addresses[index, :tokens].copy(), self.segments[index, :tokens].copy(), self.spans[index, :rows].copy()


@dataclass(frozen=True)
class Resolved(LookedUp):
    """A looked-up request in the lookup model, with its hits. The hits are counted there and not sent."""

    hits: Hits  # where the windows of all tokens were found


class Lookup:
    def __init__(self, backbone: Backbone) -> None:
        self._tokenizer = backbone.tokenizer()

    def resolve(
        self, view: View, tenant: Tenant, texts: Sequence[str], pairs: Sequence[str] | None, truncate: bool
    ) -> Resolved:
        if (characters := sum(map(len, texts)) + sum(map(len, pairs or ()))) > MOST_CHARACTERS:
            raise InvalidInput(
                f"the request has {characters:,} characters, but at most {MOST_CHARACTERS:,} are allowed: send several requests"
            )
        read = [
            self._read(i, len(texts), tenant.task_object, text, pairs[i] if pairs is not None else None, truncate)
            for i, text in enumerate(texts)
        ]
        encoded, spans = [text for text, _ in read], [rows for _, rows in read]
        lengths = np.array([len(text.tokens) for text in encoded])
        tokens = np.concatenate([text.tokens for text in encoded])
        hits = view.forest.chain(tenant.domain, tenant.domain_version).lookup(tokens, lengths)
        segments = np.concatenate([text.segments for text in encoded])
        rows = np.array([len(s) for s in spans])
        if len(rows) * rows.max() > MOST_ROWS:
            raise InvalidInput(
                f"the answer to {len(rows)} texts, the longest with {rows.max():,} words, would have more than {MOST_ROWS:,} "
                "rows: send long texts in separate requests"
            )
        return Resolved(
            addresses=_rectangle(hits.addresses, lengths, PAD),
            segments=_rectangle(segments, lengths, 0),
            spans=_rectangle(np.concatenate(spans), rows, PAD),
            hits=hits,
        )

    def _read(
        self, index: int, count: int, task: Task, text: str, pair: str | None, truncate: bool
    ) -> tuple[Encoded, np.ndarray]:
        try:
            check_length(text, pair)
            encoded = self._tokenizer.encode(text, pair, truncate)
            return encoded, task.rows(text, pair, encoded)
        except InvalidInput as error:
            raise InvalidInput(f"text {index + 1} of {count}: {error}") from None


def check_length(text: str, pair: str | None) -> None:
    if len(text) > LONGEST_TEXT or (pair is not None and len(pair) > LONGEST_TEXT):
        raise InvalidInput(f"it has more than {LONGEST_TEXT:,} characters: send only the part that matters")


def _used(values: np.ndarray) -> int:
    """Returns how many of the values are not padding."""
    return int((values != PAD).sum())


def _rectangle(flat: np.ndarray, lengths: np.ndarray, fill: int) -> np.ndarray:
    filled = np.full((len(lengths), int(lengths.max()), *flat.shape[1:]), fill, dtype=flat.dtype)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = flat
    return filled

"""The first half of a request: tokenises texts and finds the addresses of their precomputed rows, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.engine.backbone import Backbone, View
from hplm.engine.looked_up import PAD, LookedUp
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Encoded
from hplm.plot.forest import Hits
from hplm.plot.kernel import kernel
from hplm.tenants.snapshot import Tenant

MOST_ROWS = 1 << 20  # of an answer, with all texts padded to the widest
LONGEST_TEXT = 100_000  # characters, before truncation
MOST_CHARACTERS = 40 * LONGEST_TEXT  # of a request: while it is tokenised, other requests wait


@dataclass(frozen=True)
class Resolved(LookedUp):
    """A looked-up request in the lookup model, with its hits. The hits are counted there and not sent."""

    hits: Hits  # where the windows of all tokens were found


class Reading:
    """The texts of a request while they are tokenised, piece by piece."""

    def __init__(
        self, view: View, tenant: Tenant, texts: Sequence[str], pairs: Sequence[str] | None = None, truncate: bool = False
    ) -> None:
        if pairs is not None and len(pairs) != len(texts):
            raise InvalidInput(f"TEXT has {len(texts)} texts, but TEXT_PAIR has {len(pairs)}: send one pair for each text")
        self.view = view
        self.tenant = tenant
        self.texts = texts
        self.pairs = pairs
        self.truncate = truncate
        self.encoded: list[Encoded] = []
        self.spans: list[Array] = []
        self.characters_left = sum(map(len, texts)) + sum(map(len, pairs or ()))
        if self.characters_left > MOST_CHARACTERS:
            raise InvalidInput(
                f"the request has {self.characters_left:,} characters, but at most {MOST_CHARACTERS:,} are allowed: send "
                "several requests"
            )

    @property
    def texts_left(self) -> int:
        return len(self.texts) - len(self.encoded)

    def text(self, index: int) -> tuple[str, str | None]:
        return self.texts[index], self.pairs[index] if self.pairs is not None else None


class Lookup:
    def __init__(self, backbone: Backbone) -> None:
        self._tokenizer = backbone.tokenizer()
        kernel()  # now, so that the log says at start whether it is there

    def resolve(
        self, view: View, tenant: Tenant, texts: Sequence[str], pairs: Sequence[str] | None = None, truncate: bool = False
    ) -> Resolved:
        reading = Reading(view, tenant, texts, pairs, truncate)
        while (resolved := self.read(reading, MOST_CHARACTERS)) is None:
            pass
        return resolved

    def read(self, reading: Reading, characters: int) -> Resolved | None:
        """Tokenises the next texts, as many as have these characters but at least one. Returns the result after the last."""
        enough = reading.characters_left - characters
        while reading.texts_left:
            self._read_next(reading)
            if reading.characters_left <= enough:
                break
        return None if reading.texts_left else self._find(reading)

    def _find(self, reading: Reading) -> Resolved:
        encoded, spans = reading.encoded, reading.spans
        lengths = np.array([len(text.tokens) for text in encoded])
        tokens = np.concatenate([text.tokens for text in encoded])
        chain = reading.view.forest.chain(reading.tenant.domain, reading.tenant.domain_version)
        hits = chain.lookup(tokens, lengths)
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

    def _read_next(self, reading: Reading) -> None:
        index = len(reading.encoded)
        text, pair = reading.text(index)
        try:
            check_length(text, pair)
            encoded = self._tokenizer.encode(text, pair, reading.truncate)
            reading.spans.append(reading.tenant.task_object.rows(text, pair, encoded))
            reading.encoded.append(encoded)
        except InvalidInput as error:
            raise InvalidInput(f"text {index + 1} of {len(reading.texts)}: {error}") from None
        reading.characters_left -= len(text) + len(pair or "")


def check_length(text: str, pair: str | None) -> None:
    if len(text) > LONGEST_TEXT or (pair is not None and len(pair) > LONGEST_TEXT):
        raise InvalidInput(f"it has more than {LONGEST_TEXT:,} characters: send only the part that matters")


def _rectangle(flat: Array, lengths: Array, fill: int) -> Array:
    filled = np.full((len(lengths), int(lengths.max()), *flat.shape[1:]), fill, dtype=flat.dtype)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = flat
    return filled

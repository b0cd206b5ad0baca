"""The first half of a request: tokenises texts and finds the addresses of their precomputed rows, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hplm.arrays import Array
from hplm.engine.views import View, Views
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Encoded, Given
from hplm.plot.forest import Chain
from hplm.plot.kernel import kernel
from hplm.plot.levels import Tally
from hplm.request.form import Form, Head, write
from hplm.tenants.snapshot import Tenant

MOST_ROWS = 1 << 20  # of an answer, with all texts padded to the widest
LONGEST_TEXT = 100_000  # characters, before truncation
MOST_TOKENS = 1 << 19  # of a request: 1,024 texts of 512 tokens
MOST_CHARACTERS = 40 * LONGEST_TEXT  # of a request: while it is tokenised, other requests wait


class Reading:
    """The texts of a request while they are tokenised, piece by piece."""

    def __init__(
        self,
        view: View,
        tenant: Tenant,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        truncate: bool = False,
        **asked: int,
    ) -> None:
        """`asked`: what else the head of its form says (`arrival_ns`, `deadline_ns`, ...)."""
        if pairs is not None and len(pairs) != len(texts):
            raise InvalidInput(f"TEXT has {len(texts)} texts, but TEXT_PAIR has {len(pairs)}: send one pair for each text")
        for index, text in enumerate(texts):
            check_length(text, pairs[index] if pairs is not None else None, f"text {index + 1} of {len(texts)}: ")
        self.view = view
        self.tenant = tenant
        snapshot = view.snapshot
        of_tenant = tenant.uid, tenant.version, tenant.domain, tenant.id
        self.head = Head(snapshot.export_number, snapshot.generation, *of_tenant, **asked)
        self.texts = texts
        self.pairs = pairs
        self.truncate = truncate
        self.in_windows = tenant.task_object.needs_pair
        self.tokens = 0  # of the texts that were read
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

    @property
    def chain(self) -> Chain:
        return self.view.forest.chain(self.tenant.domain, self.tenant.domain_version)

    def next_texts(self, characters: int) -> list[tuple[str, str | None]]:
        """Returns the next texts with their pairs, as many as have these characters but at least one."""
        found: list[tuple[str, str | None]] = []
        for index in range(len(self.encoded), len(self.texts)):
            text, pair = self.texts[index], self.pairs[index] if self.pairs is not None else None
            found.append((text, pair))
            characters -= len(text) + len(pair or "")
            if characters <= 0:
                break
        return found

    def take(self, text: str, pair: str | None, encoded: Encoded | InvalidInput) -> None:
        """Adds the next text after it was tokenised. Raises if it cannot be read."""
        try:
            if isinstance(encoded, InvalidInput):
                raise encoded
            self.spans.append(self.tenant.task_object.rows(text, pair, encoded))
        except InvalidInput as error:
            raise InvalidInput(f"text {len(self.encoded) + 1} of {len(self.texts)}: {error}") from None
        encoded.forget()
        self.encoded.append(encoded)
        self.tokens += len(encoded.tokens)
        if self.tokens > MOST_TOKENS:
            raise InvalidInput(
                f"the first {len(self.encoded)} of {len(self.texts)} texts have {self.tokens:,} tokens in all their windows, "
                f"but at most {MOST_TOKENS:,} are allowed: send several requests"
            )
        self.characters_left -= len(text) + len(pair or "")

    def form(self, secret: bytes, addresses: Array) -> bytearray:
        """Returns the signed form, with the addresses of all tokens."""
        counts = [len(spans) for spans in self.spans]
        if not self.in_windows and len(counts) * max(counts) > MOST_ROWS:  # else the answer has one row a text
            raise InvalidInput(
                f"the answer to {len(counts)} texts, the longest with {max(counts):,} words, would have more than "
                f"{MOST_ROWS:,} rows: send long texts in separate requests"
            )
        return write(
            secret,
            self.head,
            lengths=[len(text.tokens) for text in self.encoded],
            counts=counts,
            addresses=addresses,
            segments=_end_to_end([text.segments for text in self.encoded]),
            spans=_end_to_end(self.spans),
            passages=self.pairs if self.pairs is not None and self.in_windows else (),
        )


class Lookup:
    def __init__(self, views: Views, secret: bytes = b"") -> None:
        """`secret`: that signs what it finds."""
        self._secret = secret
        self._tokenizer = views.tokenizer()
        kernel()  # now, so that the log says at start whether it is there
        self.tally = Tally()

    def resolve(
        self,
        view: View,
        tenant: Tenant,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        truncate: bool = False,
        **asked: int,
    ) -> Form:
        (found,) = self.read([Reading(view, tenant, texts, pairs, truncate, **asked)], MOST_CHARACTERS)
        assert found is not None
        if isinstance(found, Exception):
            raise found
        return Form(found)

    def read(self, readings: Sequence[Reading], characters: int) -> list[bytearray | Exception | None]:
        """Reads the next texts of requests, of each as many as have these characters but at least one.

        Returns for each request its form after its last text, or what is wrong with it, or None if more texts are left. All
        are read together, because a call costs more than a text.
        """
        failed: dict[int, Exception] = {}
        given = [(number, *text) for number, reading in enumerate(readings) for text in reading.next_texts(characters)]
        try:
            encoded = self._tokenizer.encode_all(
                [Given(text, pair, readings[number].truncate, readings[number].in_windows) for number, text, pair in given]
            )
        except Exception as error:
            if len(readings) == 1:
                return [error]
            return [self.read([reading], characters)[0] for reading in readings]  # only those at fault fail
        for (number, text, pair), tokens in zip(given, encoded, strict=True):
            if number not in failed:
                try:
                    readings[number].take(text, pair, tokens)
                except Exception as error:
                    failed[number] = error
        complete = {number: reading for number, reading in enumerate(readings) if not reading.texts_left}
        found = self._find({number: reading for number, reading in complete.items() if number not in failed})
        return [failed.get(number) or found.get(number) for number in range(len(readings))]

    def _find(self, readings: dict[int, Reading]) -> dict[int, bytearray | Exception]:
        """Looks up the requests of each chain together."""
        by_chain: dict[Chain, list[int]] = {}
        results: dict[int, bytearray | Exception] = {}
        for number, reading in readings.items():
            try:
                by_chain.setdefault(reading.chain, []).append(number)
            except Exception as error:  # a table is broken
                results[number] = error
        for chain, numbers in by_chain.items():
            try:
                results.update(zip(numbers, self._find_in(chain, [readings[number] for number in numbers]), strict=True))
            except Exception as error:
                if len(numbers) == 1:
                    results[numbers[0]] = error
                else:  # each alone, so that only those at fault fail
                    for number in numbers:
                        results.update(self._find({number: readings[number]}))
        return results

    def _find_in(self, chain: Chain, readings: list[Reading]) -> list[bytearray]:
        encoded = [text for reading in readings for text in reading.encoded]
        lengths = _end_to_end([text.lengths for text in encoded])
        hits = chain.lookup(_end_to_end([text.tokens for text in encoded]), lengths)
        sizes = [sum(len(text.tokens) for text in reading.encoded) for reading in readings]
        ends = np.cumsum(sizes).tolist()
        found = [
            reading.form(self._secret, hits.addresses[end - size : end])
            for reading, size, end in zip(readings, sizes, ends, strict=True)
        ]
        self.tally.add(readings[0].tenant.domain, chain, hits)
        return found


def check_length(text: str, pair: str | None, where: str = "") -> None:
    if len(text) > LONGEST_TEXT or (pair is not None and len(pair) > LONGEST_TEXT):
        raise InvalidInput(f"{where}it has more than {LONGEST_TEXT:,} characters: send only the part that matters")


def _end_to_end(arrays: Sequence[Array]) -> Array:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]

"""The first half of a request: tokenises texts and finds the addresses of their precomputed rows, on the CPU."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from operator import add

import numpy as np

from hplm.compiled import kernel
from hplm.errors import HplmError, InvalidInput
from hplm.lookup.views import View, Views
from hplm.model.tokenizer import Encoded, TokenizerInput
from hplm.model.words import ITEM
from hplm.plot.forest import Chain, Tally
from hplm.request.form import SPAN, Form, TicketHead, write
from hplm.tasks.tasks import TASKS, Task
from hplm.tenants.snapshot import Tenant

MOST_ROWS = 1 << 20  # of an answer, with all texts padded to the widest
MOST_NUMBERS = 1 << 24  # the most logits of an answer, over all rows
LONGEST_TEXT = 100_000  # characters, before truncation
MOST_TOKENS = 1 << 19  # of a request: 1,024 texts of 512 tokens
MOST_CHARACTERS = 40 * LONGEST_TEXT  # of a request: while it is tokenised, other requests wait
A_TEXT = 256  # a text costs as much as so many characters more than it has
IN_LINE = 0.5  # share of the time that a request has left which it may wait for its look-up
Found = bytes | Encoded | InvalidInput  # what tokenising a text gives; bytes: its tokens, as int64


class LookupRequest:
    """A request of a tenant that was admitted. Its texts are tokenised piece by piece."""

    __slots__ = (
        "_ends", "_sizes", "answered", "by_words", "counts", "deadline_ns", "defer", "head", "ids", "lengths", "limit", "owner",
        "pairs", "respond", "segments", "spans", "task", "tenant", "texts", "tokens", "truncate", "view", "windows", "work",
    )  # fmt: skip

    def __init__(
        self,
        view: View,
        tenant: Tenant,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        truncate: bool = False,
        respond: Callable[[bytearray | Exception], HplmError | None] = lambda found: None,
        defer: Callable[[], None] = lambda: None,
        head: TicketHead | None = None,
        prefix: str | None = None,
    ) -> None:
        """`respond` sends its form, or an error, and returns the error that was sent instead. `defer` is called before another
        thread may do so. `head`: of its form, if it says more than `head_of`. `prefix`: the name of the one that it asks for.
        """
        if pairs is not None and len(pairs) != len(texts):
            raise InvalidInput(f"TEXT has {len(texts)} texts, but TEXT_PAIR has {len(pairs)}: send one pair for each text")
        self.view, self.tenant, self.task = view, tenant, tenant.task_object
        self.texts, self.pairs, self.truncate = texts, pairs, truncate
        self.head = head = head or head_of(view, tenant)
        if head.top_k:
            self._check_able("top_k", lambda task: task.read_best is not None)
        if head.dimensions:
            self._check_able("dimensions", lambda task: task.is_vector)
        if prefix is not None:
            self._check_able("hplm_prefix", lambda task: task.is_vector)
        self.limit: int | None = None  # tokens of each text that it reads, if the tenant says so
        if tenant.embedding is not None:
            tenant.embedding.check_asked(head.dimensions)
            self.texts = texts = tenant.embedding.prefixed(texts, prefix)
            self.limit = tenant.embedding.limit
        self.respond, self.defer = respond, defer
        self.owner = tenant.uid  # in the line
        self.answered = False
        # By when it must leave the line. Later it would be looked up in vain, because the engine needs time too.
        self.deadline_ns = head.received_ns + round(IN_LINE * (head.deadline_ns - head.received_ns)) if head.deadline_ns else 0
        self.by_words = pairs is None and self.task.reads_first_token  # then the tokens are all that is needed of a text
        # Characters of each text and its pair.
        self._sizes = [*map(len, texts)] if pairs is None else [*map(add, map(len, texts), map(len, pairs))]
        if (characters := sum(self._sizes)) > LONGEST_TEXT:
            self._check_lengths(characters)
        self.work = characters + A_TEXT * len(texts)
        self._ends = [len(texts)]  # of its pieces
        self.ids: list[bytes] = []  # the tokens of each text that was read, as int64
        self.lengths: list[int] = []  # the tokens of each
        self.tokens = 0  # of all
        self.windows: list[int] = []  # tokens of each window of these texts
        self.counts: list[int] = []  # answer rows of each
        self.segments, self.spans = bytearray(), bytearray()  # of these texts, as a form has them

    def _check_able(self, parameter: str, is_able: Callable[[Task], bool]) -> None:
        if not is_able(self.task):
            able = " or ".join(task.name for task in TASKS.values() if is_able(task))
            tenant = f"tenant {self.tenant.id!r} has the task {self.task.name!r}"
            raise InvalidInput(f"{parameter} is for the task {able}, but {tenant}: leave out {parameter}")

    def _check_lengths(self, characters: int) -> None:
        for index, text in enumerate(self.texts):
            check_length(text, self._pair(index), f"text {index + 1} of {len(self.texts)}: ")
        if characters > MOST_CHARACTERS:
            raise InvalidInput(
                f"the request has {characters:,} characters, but at most {MOST_CHARACTERS:,} are allowed: send several requests"
            )

    def divide(self, characters: int) -> list[int]:
        """Divides it into pieces of as many texts as have these characters. Returns the work of each."""
        works, room = list[int](), 0
        self._ends.clear()
        for end, size in enumerate(self._sizes, 1):
            if room <= 0:
                works.append(0)
                self._ends.append(end)
                room = characters
            works[-1] += size + A_TEXT
            self._ends[-1] = end
            room -= size
        return works

    @property
    def next_texts(self) -> range:
        """The numbers of the texts in its next piece. One that was not divided is one piece."""
        first = len(self.ids)
        return range(first, next((end for end in self._ends if end > first), first))

    def given(self, index: int) -> TokenizerInput:
        truncate = self.truncate or self.limit is not None
        return TokenizerInput(self.texts[index], self._pair(index), truncate, self.task.needs_pair, self.limit)

    def take(self, found: Sequence[Found]) -> None:
        """Adds the next texts after they were tokenised. Raises if one of them cannot be read."""
        ids = [one for one in found if isinstance(one, bytes)]
        if len(ids) == len(found):
            lengths = [len(own) // ITEM for own in ids]
            spans = array("i", bytes(SPAN * len(ids)))
            spans[2::3] = array("i", self._sizes[len(self.ids) : len(self.ids) + len(ids)])  # as `first_token`
            self._add(ids, lengths, lengths, bytes(sum(lengths)), spans.tobytes(), [1] * len(ids))
            return
        for one in found:
            if isinstance(one, bytes):
                self.take([one])
            else:
                self._take_encoded(one)

    def _take_encoded(self, encoded: Encoded | InvalidInput) -> None:
        index = len(self.ids)
        try:
            if isinstance(encoded, InvalidInput):
                raise encoded
            rows = self.task.rows(self.texts[index], self._pair(index), encoded)
        except InvalidInput as error:
            raise InvalidInput(f"text {index + 1} of {len(self.texts)}: {error}") from None
        ids, segments, spans = encoded.tokens.tobytes(), encoded.segments.tobytes(), rows.astype(np.int32, copy=False).tobytes()
        self._add([ids], [len(segments)], encoded.lengths.tolist(), segments, spans, [len(rows)])

    def _add(
        self, ids: list[bytes], lengths: list[int], windows: list[int], segments: bytes, spans: bytes, counts: list[int]
    ) -> None:
        self.ids += ids
        self.lengths += lengths
        self.windows += windows
        self.counts += counts
        self.segments += segments
        self.spans += spans
        self.tokens += len(segments)
        if self.tokens > MOST_TOKENS:
            totals = enumerate(accumulate(self.lengths), 1)
            count, tokens = next((count, tokens) for count, tokens in totals if tokens > MOST_TOKENS)
            raise InvalidInput(
                f"the first {count} of {len(self.texts)} texts have {tokens:,} tokens in all their windows, "
                f"but at most {MOST_TOKENS:,} are allowed: send several requests"
            )

    def _pair(self, index: int) -> str | None:
        return self.pairs[index] if self.pairs is not None else None

    def form(self, secret: bytes, addresses: bytes) -> bytearray:
        """Returns the signed form, with the addresses of all tokens."""
        in_windows, counts = self.task.needs_pair, self.counts
        rows, labels = len(counts) * max(counts), self.tenant.outputs
        if rows * labels > MOST_NUMBERS or (rows > MOST_ROWS and not in_windows):  # in windows the answer has one row a text
            raise InvalidInput(
                f"the answer to {len(counts):,} texts, the longest with {max(counts):,} rows of {labels:,} labels, would have "
                f"more than {MOST_ROWS:,} rows or {MOST_NUMBERS:,} numbers: send long texts in separate requests"
            )
        passages = self.pairs if self.pairs is not None and in_windows else ()
        return write(secret, self.head, self.lengths, counts, addresses, self.segments, self.spans, passages)


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
        prefix: str | None = None,
        **asked: int,
    ) -> Form:
        """Returns the form of a request. Raises what is wrong with it. `asked`: what else its head says (`arrival_ns`, ...)."""
        head = head_of(view, tenant)._replace(**asked)
        request = LookupRequest(view, tenant, texts, pairs, truncate, head=head, prefix=prefix)
        (found,) = self.read([request])
        assert found is not None
        if isinstance(found, Exception):
            raise found
        return Form(found)

    def read(self, requests: Sequence[LookupRequest]) -> list[bytearray | Exception | None]:
        """Reads the next piece of each request.

        Returns for each request its form after its last piece, or what is wrong with it, or None if pieces are left. All are
        read together, because a call costs more than a text.
        """
        results: list[bytearray | Exception | None] = [None] * len(requests)
        try:
            tokenised = self._tokenised(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [self.read([request])[0] for request in requests]  # only those at fault fail
        by_chain: dict[Chain, list[int]] = {}
        for number, (request, found) in enumerate(zip(requests, tokenised, strict=True)):
            try:
                request.take(found)
                if len(request.ids) == len(request.texts):
                    tenant = request.tenant
                    chain = request.view.forest.chain(tenant.domain, tenant.domain_version)
                    by_chain.setdefault(chain, []).append(number)
            except Exception as error:
                results[number] = error
        for chain, numbers in by_chain.items():
            for number, form in zip(numbers, self._find(chain, [requests[number] for number in numbers]), strict=True):
                results[number] = form
        return results

    def _tokenised(self, requests: Sequence[LookupRequest]) -> list[list[Found]]:
        """Returns for each request its next texts. All that are read by words are read by one call."""
        both = [(request, request.next_texts) for request in requests]
        texts = [text for request, own in both if request.by_words for text in request.texts[own.start : own.stop]]
        read = iter(self._tokenizer.by_words(texts))
        tokenised: list[list[Found]] = []
        others: list[tuple[list[Found], int, TokenizerInput]] = []  # that cannot be read by words, and their places
        for request, own in both:
            words = islice(read, len(own)) if request.by_words else [b""] * len(own)
            if request.limit is not None:
                words = [one if len(one) <= ITEM * request.limit else b"" for one in words]
            found: list[Found] = [*words]
            if not all(found):
                others += [(found, at, request.given(own[at])) for at, one in enumerate(found) if not one]
            tokenised.append(found)
        if others:
            encoded = self._tokenizer.encode_all([given for _, _, given in others])
            for (found, at, _), one in zip(others, encoded, strict=True):
                found[at] = one
        return tokenised

    def _find(self, chain: Chain, requests: Sequence[LookupRequest]) -> Sequence[bytearray | Exception]:
        """Returns the forms of requests of one chain. If they fail together, only those at fault fail."""
        try:
            return self._find_all(chain, requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [self._find(chain, [request])[0] for request in requests]

    def _find_all(self, chain: Chain, requests: Sequence[LookupRequest]) -> list[bytearray]:
        ids = b"".join([own for request in requests for own in request.ids])
        windows = np.array([length for request in requests for length in request.windows], dtype=np.int64)
        hits = chain.lookup(np.frombuffer(ids, dtype=np.int64), windows)
        addresses, at, found = hits.addresses.tobytes(), 0, list[bytearray]()
        for request in requests:
            start, at = at, at + ITEM * request.tokens
            found.append(request.form(self._secret, addresses[start:at]))
        self.tally.add(requests[0].tenant.domain, chain, hits)
        return found


def head_of(view: View, tenant: Tenant, *asked: int) -> TicketHead:
    """`asked`: the other fields, in order."""
    snapshot = view.snapshot
    return TicketHead(tenant.domain, tenant.id, snapshot.export_number, snapshot.generation, tenant.uid, tenant.version, *asked)


def check_length(text: str, pair: str | None, where: str = "") -> None:
    if len(text) > LONGEST_TEXT or (pair is not None and len(pair) > LONGEST_TEXT):
        raise InvalidInput(f"{where}it has more than {LONGEST_TEXT:,} characters: send only the part that matters")

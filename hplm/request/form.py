"""The form of a request: lookup writes it once and signs it; upper passes it on, and the engine reads it in place.

    signature 16 | head 88 | domain and tenant, zeros | addresses i64[tokens] | tokens of each text u32
    | answer rows of each text u32 | spans i32[rows, 3] | bytes of each passage u32 | segments u8[tokens] | passages | zeros

Upper and the engine trust a signed form, because no client can make one.
"""

from __future__ import annotations

import hmac
import struct
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hplm.arrays import Array
from hplm.errors import NoTenant

_SIGNATURE_BYTES = 16
_HEAD = struct.Struct("<QQQIiqqqHHHBxIIIIHH4x")
_INT64, _INT32, _UINT8 = map(np.dtype, (np.int64, np.int32, np.uint8))
HEAD_BYTES = _SIGNATURE_BYTES + _HEAD.size
SPAN = 12  # bytes of an answer row's span
PROBE = b"\0"  # instead of a form: whether the engine works
SAYING = bytes(_SIGNATURE_BYTES)  # instead of a signature: upper sends what follows back to the client, as the label


class TicketHead(NamedTuple):
    """Describes the request. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share."""

    domain: str  # of the tenant
    tenant: str
    export: int  # of the snapshot: generations are numbered anew in each export
    generation: int  # of the snapshot in which lookup found the tenant
    uid: int
    version: int
    priority: int = 0
    arrival_ns: int = 0  # at the front door, if there is one
    deadline_ns: int = 0  # 0: no deadline
    waited_ns: int = 0  # from its arrival until lookup got it
    top_k: int = 0  # 0: not requested
    dimensions: int = 0  # of a vector; 0: not requested
    outputs: int = 0  # that the request wants of its tenant's task, as bits
    rung: int = 0  # of the tenant's that the request asks for, from 1, the dearest; 0: the engine chooses

    @property
    def received_ns(self) -> int:
        return self.arrival_ns + self.waited_ns


MOST_RUNG = 255  # a higher one is the tenant's last as well
NO_HEAD = TicketHead("", "", 0, 0, 0, 0)


class Form:
    """Views of the bytes of a form, and what the engine is told beside it."""

    __slots__ = (
        "addresses", "counts", "head", "id", "lengths", "number", "passages", "segments", "spans", "texts", "tokens", "wanted",
    )  # fmt: skip

    def __init__(self, form: bytes | bytearray, number: int = 0, wanted: int = 0, id: str = "") -> None:
        """Raises ValueError if its sizes do not fit together. Ignores bytes behind it.

        `number`: of the request in the model process. `wanted`: outputs, as bits. `id`: the client's name for it.
        """
        self.number, self.wanted, self.id = number, wanted, id
        if len(form) < HEAD_BYTES:
            raise ValueError(f"a form of {len(form)} bytes is too short")
        self.head, (tokens, texts, rows, passages), addresses = _read(form)
        self.tokens, self.texts = tokens, texts
        lengths = addresses + 8 * tokens
        spans = lengths + 8 * texts
        segments = spans + SPAN * rows + 4 * passages
        if segments + tokens > len(form) or passages not in (0, texts):
            raise ValueError(f"a form of {len(form)} bytes cannot have {tokens} tokens and {texts} texts with {rows} rows")
        sizes = list(_sizes(texts).unpack_from(form, lengths))
        self.lengths: list[int] = sizes[:texts]  # tokens of each text
        self.counts: list[int] = sizes[texts:]  # answer rows of each text
        if not texts or sum(self.lengths) != tokens or sum(self.counts) != rows:
            raise ValueError(f"{texts} texts do not have {tokens} tokens and {rows} rows in all")
        self.addresses: Array = np.ndarray(tokens, _INT64, form, addresses)  # of each token
        self.segments: Array = np.ndarray(tokens, _UINT8, form, segments)  # of each token
        self.spans: Array = np.ndarray((rows, 3), _INT32, form, spans)
        # One for each text, if the tenant's task answers from the pair.
        self.passages = _passages(form, spans + SPAN * rows, passages, segments + tokens) if passages else []


@lru_cache
def _sizes(texts: int) -> struct.Struct:
    return struct.Struct(f"<{2 * texts}I")


def _passages(form: bytes | bytearray, sizes: int, count: int, start: int) -> list[str]:
    places = list(accumulate(np.frombuffer(form, np.uint32, count, sizes).tolist(), initial=start))
    if places[-1] > len(form):
        raise ValueError(f"a form of {len(form)} bytes cannot have passages that end at {places[-1]}")
    return [form[begin:end].decode() for begin, end in pairwise(places)]


def write(
    secret: bytes,
    head: TicketHead,
    lengths: Sequence[int],
    counts: Sequence[int],
    addresses: bytes,
    segments: bytes | bytearray,
    spans: bytes | bytearray,
    passages: Sequence[str] = (),
) -> bytearray:
    """Returns a signed form. Its size is a multiple of its texts, because Triton takes tensors with a row for each text.

    `addresses`, `segments` and `spans` are as a form has them. `spans` are answer rows x 3: the token to read (-1: none), and
    the first and last code point that the row is about.
    """
    encoded = [passage.encode() for passage in passages]
    domain, tenant, texts = head.domain.encode(), head.tenant.encode(), len(lengths)
    counted = len(segments), texts, len(spans) // SPAN, len(encoded), len(domain), len(tenant)
    signed = b"".join(
        (
            _HEAD.pack(*head[2:], *counted),
            domain,
            tenant,
            bytes(-(len(domain) + len(tenant)) % 8),
            addresses,
            array("I", [*lengths, *counts]),
            spans,
            array("I", [*map(len, encoded)]) if encoded else b"",
            segments,
            *encoded,
        )
    )
    signed += bytes(-(_SIGNATURE_BYTES + len(signed)) % texts)
    return bytearray().join((_signature(secret, signed), signed))


def check(form: bytes, secret: bytes) -> None:
    """Raises if a form was not signed with this secret."""
    signature, signed = form[:_SIGNATURE_BYTES], memoryview(form)[_SIGNATURE_BYTES:]
    if len(form) < HEAD_BYTES or not hmac.compare_digest(signature, _signature(secret, signed)):
        raise NoTenant


def read_head(form: bytes) -> TicketHead:
    """Returns the head of a checked form."""
    return _read(form)[0]


def _read(form: bytes | bytearray) -> tuple[TicketHead, tuple[int, ...], int]:
    """Returns the head, the numbers of tokens, texts, rows and passages, and where the addresses begin."""
    fields: tuple[int, ...] = _HEAD.unpack_from(form, _SIGNATURE_BYTES)
    tenant = HEAD_BYTES + fields[-2]
    end = tenant + fields[-1]
    names = form[HEAD_BYTES:tenant].decode(), form[tenant:end].decode()
    return TicketHead._make((*names, *fields[:12])), fields[12:16], end + -end % 8


def _signature(secret: bytes, signed: bytes | memoryview) -> bytes:
    keyed = _keyed(secret).copy()
    keyed.update(signed)
    return keyed.digest()[:_SIGNATURE_BYTES]


@cache
def _keyed(secret: bytes) -> hmac.HMAC:
    """Returns the beginning of all signatures with a secret. A copy is made faster than SHA-256 is found by its name."""
    return hmac.new(secret, digestmod="sha256")

"""Bad versions of good bytes and of good JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

MAGIC = [
    b"",
    b"\0",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\0" * 16,
    b"\n",
    b'"',
    b"{",
    b"\xed\xa0\x80",
    b"\xff\xfe",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
]
WORDS = ["", " ", "\0", "é", "水" * 40, "a" * 3000, "../x", "/etc/passwd", "-1", "1e9", "NaN", "null", "\ud800", "%s%n", "{}"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=20),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


def edits(size: int) -> SearchStrategy[list[tuple[int, int, bytes]]]:
    """Replacements: where, how many bytes, and what comes there instead."""
    new = st.one_of(
        st.sampled_from(MAGIC),
        st.binary(max_size=9),
        st.sampled_from([struct.pack("<I", n % 2**32) for n in NUMBERS]),
        st.sampled_from([struct.pack("<Q", n % 2**64) for n in NUMBERS]),
    )
    where = st.one_of(st.integers(0, max(0, size - 1)), st.integers(0, min(size, 400)))
    length = st.one_of(st.integers(0, 8), st.integers(0, size))
    return st.lists(st.tuples(where, length, new), min_size=1, max_size=3)


def edited(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for where, length, new in changes:
        data = data[:where] + new + data[where + length :]
    return data


def mutated(data: bytes) -> SearchStrategy[bytes]:
    """Good bytes with some replaced, left out or added, cut off, or not there at all."""
    return st.one_of(
        edits(len(data)).map(lambda changes: edited(data, changes)),
        st.integers(0, len(data)).map(lambda end: data[:end]),
        st.binary(max_size=64),
    )


@st.composite
def mutated_json(draw: st.DrawFn, good: Any, inner: SearchStrategy[Any] = values) -> Any:
    """A good value of which one to three parts are replaced, left out, doubled or renamed."""
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        value = draw(_changed(value, inner))
    return value


@st.composite
def _changed(draw: st.DrawFn, value: Any, inner: SearchStrategy[Any]) -> Any:
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 9)) == 0:
        return draw(inner)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw(st.sampled_from(keys))
    how = draw(st.sampled_from(["within", "within", "within", "replace", "leave out", "add"]))
    out = dict(value) if isinstance(value, dict) else list(value)
    if how == "within":
        out[key] = draw(_changed(value[key], inner))
    elif how == "replace":
        out[key] = draw(inner)
    elif how == "leave out":
        del out[key]
    elif isinstance(out, dict):
        out[draw(st.one_of(st.text(max_size=6), st.sampled_from(WORDS)))] = draw(inner)
    else:
        out.insert(key, draw(st.one_of(st.just(value[key]), inner)))
    return out


def dumped(value: Any) -> bytes:
    """JSON, with half surrogate pairs as they are: as escapes."""
    return json.dumps(value).encode()

"""Bad versions of good files."""

from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.refusals.contract import ODD

BYTES = [b"", b"\0", b"\xff" * 4, b"\x7f" + b"\xff" * 7, b"\0" * 16, b"\n", b'"', b"{", b"\xed\xa0\x80", b"\xff\xfe"]
NAMES = ["", "é", "../x", "/etc/passwd", "null", "format", "a" * 3000]
odd = st.one_of(st.sampled_from([*ODD, *NAMES]), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20))


def bad(name: str, data: bytes) -> SearchStrategy[bytes]:
    """Returns bad versions of a file. What is JSON in it stays JSON in most of them."""
    if name.endswith(".safetensors"):
        begins = 8 + struct.unpack_from("<Q", data)[0]
        header = bad_json(json.loads(data[8:begins])).map(dumped)
        return header.map(lambda text: struct.pack("<Q", len(text)) + text + data[begins:]) | cut_or_flipped(data)
    if name.endswith(".jsonl"):
        lines = st.sampled_from([json.loads(line) for line in data.splitlines()])
        several = st.lists(lines | lines.flatmap(bad_json), max_size=3)
        return several.map(lambda some: b"\n".join(map(dumped, some))) | cut_or_flipped(data)
    try:
        changed = bad_json(json.loads(data)).map(dumped)
    except ValueError:
        return cut_or_flipped(data)
    return st.one_of(changed, changed, cut_or_flipped(data))


def cut_or_flipped(data: bytes) -> SearchStrategy[bytes]:
    """Good bytes that are cut off, not there at all, or of which some are replaced, left out or added."""
    size = len(data)
    where = st.integers(0, max(0, size - 1)) | st.integers(0, min(size, 400))
    edit = st.tuples(where, st.integers(0, 8) | st.integers(0, size), st.sampled_from(BYTES) | st.binary(max_size=9))
    edited = st.lists(edit, min_size=1, max_size=3).map(lambda edits: _edited(data, edits))
    return st.one_of(edited, st.integers(0, size).map(lambda end: data[:end]), st.binary(max_size=64))


def _edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for where, length, new in edits:
        data = data[:where] + new + data[where + length :]
    return data


@st.composite
def bad_json(draw: st.DrawFn, good: Any) -> Any:
    """A good value of which one to three parts are replaced, left out, doubled or renamed."""
    for _ in range(draw(st.integers(1, 3))):
        good = draw(_changed(good))
    return good


@st.composite
def _changed(draw: st.DrawFn, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 9)) == 0:
        return draw(odd)
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else list(range(len(value)))))
    out = value.copy()
    match draw(st.sampled_from(["within", "within", "within", "replace", "leave out", "add"])):
        case "within":
            out[key] = draw(_changed(value[key]))
        case "replace":
            out[key] = draw(odd)
        case "leave out":
            del out[key]
        case _ if isinstance(out, dict):
            out[draw(st.sampled_from(NAMES))] = draw(odd)
        case _:
            out.insert(key, draw(st.just(value[key]) | odd))
    return out


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()

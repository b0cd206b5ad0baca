"""A hash index from keys to rows. It is memory-mapped and written once, and every hit is compared with the whole key.

    starts   uint32, buckets + 1: where each bucket begins
    keys     uint64, keys + padding x words: keys in order of bucket; with the padding, `longest` keys can be read anywhere
    rows     uint32, keys + padding: the row of each of these keys

There are two to four buckets for each key, and the fullest bucket has some seven keys. So a lookup reads one place in `starts`
and one or two cache lines of `keys`, however large the table is. A bisection would miss the cache at every step.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from ctypes import c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from hplm.arrays import Array
from hplm.compiled import Kernel, declared, number_fields, pointer_fields
from hplm.errors import Broken
from hplm.plot.keys import KeySpace

FILES = ("starts", "keys", "rows")
PART = 1 << 22  # keys that are sorted by bucket at once
CHUNK = 1 << 20
MOST_WORDS = 5  # as in kernel.c
SHORT = 4096  # tokens of a lookup that takes microseconds
_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class IndexMeta:
    keys: int
    words: int
    longest: int  # keys in the fullest bucket
    checksums: dict[str, int]  # crc32 of each file

    @property
    def bits(self) -> int:
        """Bits of a bucket's number."""
        return bits_for(self.keys)

    def sizes(self) -> dict[str, int]:
        padded = self.keys + self.longest
        return {"starts": 4 * ((1 << self.bits) + 1), "keys": 8 * padded * self.words, "rows": 4 * padded}


def bits_for(keys: int) -> int:
    """Gives two to four buckets for each key. The fullest bucket, and so every search, then has some seven keys."""
    return max(0, keys - 1).bit_length() + 1


class Index:
    """Checks its files completely when it is opened: they are a few thousandths of a table."""

    def __init__(self, folder: Path, meta: IndexMeta) -> None:
        for name in FILES:
            if _checksum(folder / name) != meta.checksums[name]:
                raise Broken(f"{folder / name} does not match its checksum: build or copy the table again")
        self._bits = meta.bits
        self._starts = _mapped(folder / "starts", "<u4")
        self._keys = _mapped(folder / "keys", "<u8").reshape(-1, meta.words)
        self._rows = _mapped(folder / "rows", "<u4")
        self._count = meta.keys
        self._steps = np.arange(meta.longest)

    def find(self, keys: Array) -> Array:
        """Returns the row of each key, or 0 if the index does not have the key."""
        found = np.zeros(len(keys), dtype=np.int64)
        if not self._count or not len(keys):
            return found
        places: Array = (self._starts.take(_bucket(keys, self._bits))[:, None] + self._steps).ravel()
        # The last word is compared first, because it differs most. The other words are compared only where it is equal.
        words = self._keys.shape[1]
        same = self._keys.reshape(-1).take(places * words + (words - 1)).reshape(len(keys), -1) == keys[:, -1:]
        hits = same.ravel().nonzero()[0]
        which, places = hits // len(self._steps), places.take(hits)
        if words > 1:
            whole = (self._keys[places] == keys[which]).all(1)
            which, places = which[whole], places[whole]
        found[which] = self._rows.take(places)
        return found

    def pointers(self) -> tuple[int, int, int, int]:
        """Returns where `starts`, `keys` and `rows` are in memory, and the bits of a bucket's number."""
        return self._starts.ctypes.data, self._keys.ctypes.data, self._rows.ctypes.data, self._bits

    def by_row(self) -> Array:
        """Returns all keys in order of their rows, beginning with row 1."""
        keys = np.empty((self._count, self._keys.shape[1]), dtype=np.uint64)
        keys[self._rows[: self._count].astype(np.int64) - 1] = self._keys[: self._count]
        return keys


class _Space(ctypes.Structure):
    _fields_ = (
        *number_fields("n", "centre", "words", "levels"),
        ("word", c_int64 * MOST_WORDS), ("shift", c_int64 * MOST_WORDS),
        ("masks", c_uint64 * (MOST_WORDS * (MOST_WORDS + 1))),
    )  # fmt: skip


class _Link(ctypes.Structure):
    _fields_ = *pointer_fields("starts", "keys", "rows"), *number_fields("bits", "base")


_Start = ctypes.c_char * 0  # of a buffer of any size


class Search:
    """Look-ups in the indexes of one chain by the compiled kernel. Without it `Chain.find_by_arrays` does the same."""

    def __init__(self, compiled: Kernel, space: KeySpace, links: Sequence[tuple[Index, int]]) -> None:
        given = c_void_p, *(c_void_p, c_int64) * 3, c_void_p
        self._long = declared(compiled.library.hplm_lookup, *given)
        # A short lookup takes microseconds and keeps the interpreter's lock: to get that back can take milliseconds.
        self._short = declared(compiled.holding.hplm_lookup, *given)
        self._indexes = [index for index, _ in links]  # keeps the mapped files open
        self._links = (_Link * len(links))(*(_Link(*index.pointers(), base) for index, base in links))
        masks = space.masks
        self._space = _Space(space.window.n, space.window.centre, space.words, len(masks))
        for position, (word, shift) in enumerate(space.places):
            self._space.word[position], self._space.shift[position] = word, int(shift)
        self._space.masks[: masks.size] = masks.ravel().tolist()
        self._space_at = ctypes.addressof(self._space)

    def find(self, tokens: Array, lengths: Array) -> tuple[Array, Array]:
        """Returns the address of each token, 0 if no table has it, and the places that were tried before."""
        tokens, lengths = as_int64(tokens), as_int64(lengths)
        found = np.empty((2, len(tokens)), dtype=np.int64)
        find, links = self._short if len(tokens) <= SHORT else self._long, self._links
        # Bytes and buffers are passed in less time than numpy takes to say where an array is.
        texts = tokens.tobytes(), len(tokens), lengths.tobytes(), len(lengths)
        if find(self._space_at, links, len(links), *texts, _Start.from_buffer(found.data)):
            raise ValueError(f"{len(tokens)} tokens are not those of texts of {lengths} tokens")
        return found[0], found[1]


def as_int64(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers, dtype=np.int64)


def write_index(folder: Path, keys: Array) -> IndexMeta:
    """Writes the index of keys that are in order of their rows, from row 1. `keys` may be mapped and larger than memory."""
    count, words = keys.shape
    bits = bits_for(count)
    in_bucket = np.zeros(1 << bits, dtype=np.uint32)
    with open(folder / "keys", "wb") as key_file, open(folder / "rows", "wb") as row_file:
        for part_keys, part_rows in _by_bucket(keys, bits):
            part_keys.astype("<u8").tofile(key_file)
            part_rows.astype("<u4").tofile(row_file)
            buckets, sizes = np.unique(_bucket(part_keys, bits), return_counts=True)
            in_bucket[buckets] = sizes
        longest = int(in_bucket.max())
        np.zeros((longest, words), "<u8").tofile(key_file)
        np.zeros(longest, "<u4").tofile(row_file)
    starts = np.zeros(len(in_bucket) + 1, dtype="<u4")
    np.cumsum(in_bucket, out=starts[1:])
    starts.tofile(folder / "starts")
    return IndexMeta(count, words, longest, {name: _checksum(folder / name) for name in FILES})


def _by_bucket(keys: Array, bits: int) -> Iterator[tuple[Array, Array]]:
    """Yields keys and rows in order of bucket, one range of buckets at a time."""
    parts = max(1, -(-len(keys) // PART))
    edges = np.linspace(0, 1 << bits, parts + 1).astype(np.int64)
    for low, high in pairwise(edges):
        buckets: list[Array] = []
        rows: list[Array] = []
        for start in range(0, len(keys), CHUNK):
            bucket = _bucket(keys[start : start + CHUNK], bits)
            mine = np.flatnonzero((bucket >= low) & (bucket < high))
            buckets.append(bucket[mine])
            rows.append(mine + start)
        if rows:
            row = np.concatenate(rows)
            row = row[np.argsort(np.concatenate(buckets), kind="stable")]
            yield keys[row], row + 1


def _bucket(keys: Array, bits: int) -> Array:
    """Returns each key's bucket: the highest bits of its hash, on which every bit of the key has an effect."""
    mixed = keys[:, 0] * _ODD
    for word in range(1, keys.shape[1]):
        mixed ^= mixed >> _HALF
        mixed += keys[:, word]
        mixed *= _ODD
    mixed ^= mixed >> _HALF
    mixed *= _ODD
    return (mixed >> np.uint64(64 - bits)).view(np.int64)


def _mapped(path: Path, dtype: str) -> Array:
    # A plain array is returned: every slice of a memmap is a memmap again, which costs more than the search in it.
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc

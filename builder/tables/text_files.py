"""Reads text files line by line: plain, gzip or zstd, recognised by their names."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from builder.store.resumable import digest_of
from hplm.errors import InvalidInput

READ_AT_ONCE = 1 << 16
COMPRESSED = (".gz", ".zst")
TOLD_EVERY = 100  # lines
LONGEST_LINE = 1 << 24  # bytes: a document that is tokenised takes some forty times as much memory

# Compressed text is a tenth of its size, the same line again and again some hundredth.
MOST_UNPACKED = 1000  # times the file's size
ALWAYS_UNPACKED = 1 << 26  # bytes
_ZSTD_AT_ONCE = 512  # compressed bytes, which unpack to 16 MB at most: four bytes may stand for 128 KB

Progress = Callable[[int], object]  # called with the number of stored bytes that were read


def raw_lines(path: Path, progress: Progress | None = None) -> Iterator[bytes]:
    """Yields the lines. Refuses what would fill memory or disk: a file may unpack to thousands of times its size."""
    check_file(path)
    most = max(ALWAYS_UNPACKED, MOST_UNPACKED * path.stat().st_size) if path.suffix in COMPRESSED else None
    told = unpacked = 0
    with open(path, "rb", buffering=0) as file:
        kept = io.BufferedReader(file, READ_AT_ONCE)  # it would close the file once nothing holds it
        content = _content(path, kept)
        try:
            for number in count(1):
                line = content.readline(LONGEST_LINE + 1)
                if progress is not None and (not line or number % TOLD_EVERY == 1) and file.seekable():  # a pipe has no places
                    progress((read := file.tell()) - told)
                    told = read
                if not line:
                    return
                if len(line) > LONGEST_LINE:
                    raise InvalidInput(
                        f"{path}:{number}: a line of more than {LONGEST_LINE >> 20} MB: give each document a line of its own"
                    )
                unpacked += len(line)
                if most is not None and unpacked > most:
                    raise InvalidInput(
                        f"{path} unpacks to more than {most >> 20} MB, over {MOST_UNPACKED} times its size: this is no usual "
                        "text. If you want to read it all the same, unpack it first"
                    )
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise InvalidInput(f"{path} is truncated or corrupt ({error}): download or compress it again") from None


def check_file(path: Path) -> None:
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder: give the files in it")
    if not path.exists():
        raise InvalidInput(f"{path} does not exist")


def check_stays(path: Path) -> None:
    check_file(path)
    if not path.is_file():
        raise InvalidInput(f"{path} is a pipe or a device, which cannot be read again: write its text to a file")


def digest_of_files(*paths: Path) -> str:
    for path in paths:
        check_stays(path)
    return digest_of(*paths)


def content_suffix(path: Path) -> str:
    """Returns the suffix without the compression: `.jsonl` for `corpus.jsonl.zst`."""
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def _content(path: Path, kept: BinaryIO) -> BinaryIO | io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=kept)
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstd(kept), READ_AT_ONCE)
    return kept


class _Zstd(io.RawIOBase):
    """Reads zstd and reports truncation: the library's own reader takes a truncated file for a shorter one."""

    def __init__(self, kept: BinaryIO) -> None:
        self._frames = self._decompressed(kept)
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            ready = next(self._frames, None)
            if ready is None:
                return 0
            self._ready = ready
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    @staticmethod
    def _decompressed(kept: BinaryIO) -> Iterator[bytes]:
        frame = None
        while compressed := kept.read(_ZSTD_AT_ONCE):
            while compressed:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(compressed)
                compressed = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("it ends within a frame")

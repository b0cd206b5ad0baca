"""Files of owners: reads a form while it comes, keeps its file, and removes files that nobody needs any more.

A file lies in the folder of its owner under its id. It is there once it has a row; what has none, nobody was told of.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from hplm.clock import Clock
from hplm.disk import check_room
from hplm.registry.folder import sync
from hplm_client.waiting import within
from hplm_openai.connections import Gone
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import shown
from manager.records import DAY, File, Records
from manager.rights import Rights

TRAINS, DATA = "fine-tune", "user_data"  # purposes
ENDINGS = {TRAINS: (".jsonl", ".csv", ".tsv", ".parquet"), DATA: (".safetensors", ".json", ".txt", ".model")}
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf")  # how compressed files begin
FILE = "file"  # the field of the API
ONE_FILE = {FILE: 1}
LONGEST_NAME, MOST_FIELDS, LONGEST_FIELD = 256, 32, 10_000
SECONDS_BETWEEN = 60.0  # two pieces of an upload
KEPT_DAYS = 30  # after the last job
SPARE_BYTES = 100_000_000  # of the disk, that uploads leave free
MARGIN = 65_536  # of a form around its file


@dataclass(eq=False)
class Incoming:
    """A file that comes, under a name that no row has yet."""

    path: Path
    name: str
    most: int  # bytes
    file: BinaryIO
    bytes: int = 0
    begins: bytes = b""
    _digest: Any = field(default_factory=hashlib.sha256)

    def write(self, data: bytes) -> None:
        self.bytes += len(data)
        if self.bytes > self.most:
            raise Refused(413, f"the file has more than {self.most:,} bytes, which is what is left to you", param="file")
        if len(self.begins) < 8:
            self.begins += data[:8]
        self._digest.update(data)
        self.file.write(data)

    def finish(self) -> str:
        """Returns the digest of a file that is on the disk then."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return self._digest.hexdigest()

    def drop(self) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)


@dataclass(eq=False)
class Form:
    """The fields and the files of one request."""

    fields: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, list[Incoming]] = field(default_factory=dict[str, list[Incoming]])  # by the names of their fields

    @property
    def bytes(self) -> int:
        return sum(file.bytes for files in self.files.values() for file in files)

    def drop(self) -> None:
        for files in self.files.values():
            for file in files:
                file.drop()


class Uploads:
    def __init__(self, records: Records, rights: Rights, folder: Path, clock: Clock = time) -> None:
        self._records, self._rights, self._folder, self._clock = records, rights, folder, clock

    def path(self, file: File) -> Path:
        return self._folder / file.owner / f"{file.id}{file.ending}"

    async def read(self, request: Request, owner: str, names: Mapping[str, int] = ONE_FILE) -> Form:
        """Reads a form. Its files are on the disk, without a row: `keep` or `drop` them.

        `names`: how many files each field may have.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or not (boundary := options.get(b"boundary")):
            raise Refused(415, "the body is no form: send 'multipart/form-data' with the fields 'file' and 'purpose'")
        if "content-encoding" in request.headers:
            raise Refused(415, "the body is compressed: send it without Content-Encoding")
        room = self._left(owner)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > room + MARGIN:
            raise Refused(413, f"the body has {int(length):,} bytes, and its files may have {room:,}: send less", param="file")
        check_room(self._folder, SPARE_BYTES + min(room, int(length or 0)), "the file", "free some space")
        reading = _Reading(self._folder / owner, room, names)
        try:
            parser = MultipartParser(boundary, reading.callbacks())
            async for piece in _pieces(request):
                parser.write(piece)
            parser.finalize()
            if not reading.is_whole:
                raise wrong("the form ends before its end: send it again")
        except FormParserError as error:
            reading.form.drop()
            raise wrong(f"the body is no form in 'multipart/form-data': {error}") from None
        except ClientDisconnect:
            reading.form.drop()
            raise Gone from None
        except BaseException:
            reading.form.drop()
            raise
        return reading.form

    async def keep(self, form: Form, owner: str, who: str, **fixed: str) -> File:
        """Keeps a form's file, and returns its row. Raises, and drops the file, if the form is wrong. `fixed`: fields."""
        try:
            return await run_in_threadpool(self._keep, form, {**form.fields, **fixed}, owner, who)
        except BaseException:
            form.drop()
            raise

    def _keep(self, form: Form, given: dict[str, str], owner: str, who: str) -> File:
        purpose, now = given.pop("purpose", ""), int(self._clock.time())
        expires = _expiry(given, now)
        for name in given:
            raise wrong(f"the field {shown(name)} is unknown: leave it out", name[:LONGEST_NAME])
        if purpose not in ENDINGS:
            raise wrong(f"'purpose' is {shown(purpose)}: give {' or '.join(map(repr, ENDINGS))}", "purpose")
        if (came := next(iter(form.files.get(FILE, ())), None)) is None:
            raise wrong("the form has no file: send one in the field 'file'", "file")
        ending, known = Path(came.name).suffix.lower(), ENDINGS[purpose]
        if purpose == TRAINS and not ending:
            ending = known[0]  # clients call what is no file "upload"
        if ending not in known:
            way = "name it so" if purpose == TRAINS else "save weights as safetensors, and leave out the rest"
            raise wrong(f"the file's name {shown(came.name)} ends in none of {', '.join(known)}: {way}", "file")
        if not came.bytes:
            raise wrong(f"the file {shown(came.name)} is empty", "file")
        if purpose == TRAINS and came.bytes > (most := self._rights.limit(owner, "file_bytes")):
            raise Refused(413, f"the file has {came.bytes:,} bytes, and data may have {most:,}: send less", param="file")
        if came.begins.startswith(PACKED):
            raise wrong(f"the file {shown(came.name)} is compressed: send it unpacked", "file")
        file = File(f"file-{secrets.token_hex(12)}", owner, came.name, purpose, ending, came.bytes, came.finish(), now, expires)
        os.rename(came.path, self.path(file))
        sync(came.path.parent)  # makes the name last
        came.path = self.path(file)  # to drop, if it gets no row
        with self._records.together():
            if came.bytes > self._left(owner):
                raise Refused(413, f"your files would have more than {self._rights.limit(owner, 'bytes'):,} bytes: delete some")
            self._records.add(file)
            self._records.note(who, owner, "file add", file=file.id, bytes=file.bytes)
        return file

    def found(self, owner: str, id: str) -> File:
        """Returns an owner's file."""
        file = self._records.get(File, id)
        if file is None or file.owner != owner:
            raise Refused(404, f"no such file: {shown(id)}", param="id")
        return file

    def delete(self, owner: str, id: str, who: str) -> None:
        with self._records.together():
            file = self.found(owner, id)
            if self._records.needs(file.id):
                raise Refused(409, f"a job needs the file {file.id!r}: cancel it first, or wait for its end", param="id")
            self._records.remove(File, file.id)
            self._records.note(who, owner, "file delete", file=file.id)
        self.path(file).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes files at their end: those that expire, and 30 days after their last job."""
        now = self._clock.time()
        for file in self._records.files():
            needed = self._records.last_needed(file.id)
            if (file.expires and file.expires < now) or (needed and needed + KEPT_DAYS * DAY < now):
                with self._records.together():
                    if self._records.needs(file.id):
                        continue
                    self._records.remove(File, file.id)
                    self._records.note("manager", file.owner, "file expired", file=file.id)
                self.path(file).unlink(missing_ok=True)

    def remove_unknown(self) -> None:
        """Removes what has no row, before the first request: uploads of which a kill has left a part."""
        known = {self.path(file) for file in self._records.files()}
        for path in self._folder.glob("*/*"):
            if path not in known:
                path.unlink()

    def _left(self, owner: str) -> int:
        """Returns how many bytes an owner may still store."""
        return max(0, self._rights.limit(owner, "bytes") - self._records.bytes_of(owner))


class _Reading:
    """Takes the parts of a form from its parser."""

    def __init__(self, folder: Path, room: int, names: Mapping[str, int]) -> None:
        """`room`: bytes of all files. `names`: how many files each field may have."""
        self.form, self.is_whole = Form(), False
        self._folder, self._room, self._names = folder, room, names
        self._header, self._value = b"", b""  # of the part that comes
        self._name, self._text = "", bytearray()
        self._to: Incoming | None = None

    def callbacks(self) -> Any:
        def header_field(data: bytes, start: int, end: int) -> None:
            self._header += data[start:end]

        def header_value(data: bytes, start: int, end: int) -> None:
            self._value += data[start:end]

        def data(data: bytes, start: int, end: int) -> None:
            if self._to is not None:
                self._to.write(data[start:end])
                return
            self._text += data[start:end]
            if len(self._text) > LONGEST_FIELD:
                raise wrong(f"the field {shown(self._name)} has more than {LONGEST_FIELD:,} bytes", self._name[:LONGEST_NAME])

        return {
            "on_part_begin": self._begin, "on_header_field": header_field, "on_header_value": header_value,
            "on_header_end": self._header_end, "on_headers_finished": self._headers_end, "on_part_data": data,
            "on_part_end": self._part_end, "on_end": self._end,
        }  # fmt: skip

    def _begin(self) -> None:
        self._disposition, self._name, self._text, self._to = b"", "", bytearray(), None
        if len(self.form.fields) >= MOST_FIELDS:
            raise wrong(f"the form has more than {MOST_FIELDS} fields: send fewer")

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" not in options:
            return
        files = self.form.files.get(self._name, [])
        if len(files) >= (most := self._names.get(self._name, 0)):
            many = f"the field {shown(self._name)} has more files than {most}: send fewer"
            raise wrong(many, self._name[:LONGEST_NAME])
        name = options[b"filename"].decode("utf-8", "replace")[:LONGEST_NAME]
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{secrets.token_hex(12)}.coming"
        opened = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
        self._to = Incoming(path, name, self._room - self.form.bytes, opened)
        self.form.files[self._name] = [*files, self._to]

    def _part_end(self) -> None:
        if self._to is None:
            if self._name in self.form.fields:
                raise wrong(f"the form has the field {shown(self._name)} twice: send it once", self._name[:LONGEST_NAME])
            self.form.fields[self._name] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_whole = True


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    pieces = request.stream()
    while True:
        try:
            piece = await within(anext(pieces, None), SECONDS_BETWEEN)
        except asyncio.TimeoutError:
            raise Refused(408, f"nothing came for {SECONDS_BETWEEN:g} s: send the file again") from None
        if piece is None:
            return
        yield piece


def _expiry(given: dict[str, str], now: int) -> int:
    """Takes when a file ends, as OpenAI's client says it; 0: never."""
    anchor, seconds = given.pop("expires_after[anchor]", "created_at"), given.pop("expires_after[seconds]", None)
    if seconds is None and anchor == "created_at":
        return 0
    if anchor != "created_at" or seconds is None or not seconds.isdecimal() or not 3600 <= int(seconds) <= 2_592_000:
        form = "the anchor 'created_at' and 3,600 to 2,592,000 seconds"
        raise wrong(f"'expires_after' is {shown(anchor)} and {shown(seconds)}: give {form}", "expires_after")
    return now + int(seconds)


def told(file: File) -> dict[str, Any]:
    """Returns a file as OpenAI's clients read it."""
    return {
        "id": file.id, "object": "file", "bytes": file.bytes, "created_at": file.created, "filename": file.name,
        "purpose": file.purpose, "status": "processed", "expires_at": file.expires or None,
    }  # fmt: skip

"""Files of owners: takes them from forms, keeps them, and removes files that nobody needs any more.

A file lies in the folder of its owner under its id. It is there once it has a row; what has none, nobody was told of.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

from python_multipart.multipart import parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
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
LARGEST_PART = 100_000  # bytes of a field that are read
SECONDS_BETWEEN = 60.0  # two pieces of an upload
KEPT_DAYS = 30  # after the last job
SPARE_BYTES = 100_000_000  # of the disk, that uploads leave free
MARGIN = 65_536  # bytes of a form around its files
BLOCK = 1 << 20  # bytes that are copied at once
Parts = tuple[dict[str, str], dict[str, list[UploadFile]]]  # of a form: its fields, and its files by their fields


class Uploads:
    def __init__(self, records: Records, rights: Rights, folder: Path, clock: Clock = time) -> None:
        self._records, self._rights, self._folder, self._clock = records, rights, folder, clock

    def path(self, file: File) -> Path:
        return self._folder / file.owner / f"{file.id}{file.ending}"

    @asynccontextmanager
    async def form(self, request: Request, owner: str, names: Mapping[str, int] = ONE_FILE) -> AsyncIterator[Parts]:
        """Reads a form. Yields its fields, and its files, which have no names on the disk and go with it: `keep` them.

        `names`: how many files each field may have.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise Refused(415, "the body is no form: send 'multipart/form-data' with the fields 'file' and 'purpose'")
        if "content-encoding" in request.headers:
            raise Refused(415, "the body is compressed: send it without Content-Encoding")
        room = self._left(owner)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > room + MARGIN:
            raise Refused(413, f"the body has {int(length):,} bytes, and its files may have {room:,}: send less", param="file")
        check_room(self._folder, SPARE_BYTES + 2 * min(room, int(length or 0)), "the file and its copy", "free some space")
        try:
            form = await _Reading(request, room, sum(names.values()) + 1).parse()
        except MultiPartException as error:
            raise wrong(f"the body is no form in 'multipart/form-data': {error.__cause__ or error.message}") from None
        except ClientDisconnect:
            raise Gone from None
        try:
            yield _parts(form, names)
        finally:
            await form.close()

    async def keep(self, came: UploadFile | None, given: Mapping[str, str], owner: str, who: str) -> File:
        """Keeps a form's file, and returns its row. Raises if it is wrong. `given`: the fields about it."""
        return await run_in_threadpool(self._keep, came, dict(given), owner, who)

    def _keep(self, came: UploadFile | None, given: dict[str, str], owner: str, who: str) -> File:
        purpose, now = given.pop("purpose", ""), int(self._clock.time())
        expires = _expiry(given, now)
        for name in given:
            raise wrong(f"the field {shown(name)} is unknown: leave it out", name[:LONGEST_NAME])
        if purpose not in ENDINGS:
            raise wrong(f"'purpose' is {shown(purpose)}: give {' or '.join(map(repr, ENDINGS))}", "purpose")
        if came is None:
            raise wrong("the form has no file: send one in the field 'file'", "file")
        name, size = (came.filename or "")[:LONGEST_NAME], came.size or 0
        ending, known = Path(name).suffix.lower(), ENDINGS[purpose]
        if purpose == TRAINS and not ending:
            ending = known[0]  # clients call what is no file "upload"
        if ending not in known:
            way = "name it so" if purpose == TRAINS else "save weights as safetensors, and leave out the rest"
            raise wrong(f"the file's name {shown(name)} ends in none of {', '.join(known)}: {way}", "file")
        if not size:
            raise wrong(f"the file {shown(name)} is empty", "file")
        if purpose == TRAINS and size > (most := self._rights.limit(owner, "file_bytes")):
            raise Refused(413, f"the file has {size:,} bytes, and data may have {most:,}: send less", param="file")
        begins = came.file.read(8)
        came.file.seek(0)
        if begins.startswith(PACKED):
            raise wrong(f"the file {shown(name)} is compressed: send it unpacked", "file")
        id = f"file-{secrets.token_hex(12)}"
        path = self._folder / owner / f"{id}{ending}"
        try:
            file = File(id, owner, name, purpose, ending, size, _copied(came.file, path), now, expires)
            with self._records.together():
                if size > self._left(owner):
                    most = self._rights.limit(owner, "bytes")
                    raise Refused(413, f"your files would have more than {most:,} bytes: delete some", param="file")
                self._records.add(file)
                self._records.note(who, owner, "file add", file=id, bytes=size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
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


class _Reading(MultiPartParser):
    """Reads a form within limits."""

    def __init__(self, request: Request, room: int, most: int) -> None:
        """`room`: bytes of all files. `most`: so many files."""
        limits = {"max_files": most, "max_fields": MOST_FIELDS, "max_part_size": LARGEST_PART}
        super().__init__(request.headers, self._pieces(request, room + MARGIN), **limits)
        self._is_whole = False

    def on_end(self) -> None:
        self._is_whole = True

    async def _pieces(self, request: Request, left: int) -> AsyncGenerator[bytes]:
        pieces = request.stream()
        while True:
            try:
                piece = await within(anext(pieces, None), SECONDS_BETWEEN)
            except asyncio.TimeoutError:
                raise Refused(408, f"nothing came for {SECONDS_BETWEEN:g} s: send the file again") from None
            if piece is None:
                break
            if (left := left - len(piece)) < 0:
                raise Refused(413, "the files have more bytes than are left to you: send less, or delete some", param="file")
            yield piece
        if not self._is_whole:
            raise wrong("the form ends before its end: send it again")


def _parts(form: FormData, names: Mapping[str, int]) -> Parts:
    """Returns the fields and the files of a form. Raises if one has too many files, comes twice, or is too long."""
    fields, files = dict[str, str](), dict[str, list[UploadFile]]()
    for name in form:
        texts = [one for one in form.getlist(name) if isinstance(one, str)]
        found = [one for one in form.getlist(name) if isinstance(one, UploadFile)]
        fault = None
        if len(found) > (most := names.get(name, 0)):
            fault = f"has more files than {most}: send fewer"
        elif len(texts) > 1:
            fault = "comes twice: send it once"
        elif len("".join(texts)) > LONGEST_FIELD:
            fault = f"has more than {LONGEST_FIELD:,} characters: send less"
        if fault:
            raise wrong(f"the field {shown(name)} {fault}", name[:LONGEST_NAME])
        if texts:
            fields[name] = texts[0]
        if found:
            files[name] = found
    return fields, files


def _copied(source: BinaryIO, path: Path) -> str:
    """Copies a file to its place, on the disk. Returns its digest."""
    digest = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        while block := source.read(BLOCK):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)  # makes the name last
    return digest.hexdigest()


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

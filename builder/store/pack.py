"""A root as one file: made once, on the fastest machine, and unpacked into stores anywhere.

The file is a tar archive. Its first member, `root.json`, has the size and the SHA-256 of each of the others.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import msgspec

from builder.store.branches import CORPUS
from builder.store.resumable import WRITING, replaced, whole_digest_of, write_json
from builder.store.store import FORMAT as STORE_FORMAT
from builder.store.store import Store, absolute_model, written_folder
from hplm.disk import check_room
from hplm.errors import Broken, InvalidInput

FORMAT = 1
MANIFEST = "root.json"
UNPACKED = "unpacked"


class PackedFile(msgspec.Struct):
    """A file of a packed root."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct):
    format: int
    backbone: str = ""
    model: str = ""
    version: int = 1
    files: dict[str, PackedFile] = {}


def pack_root(store: Store, file: Path) -> Manifest:
    """Writes the newest version of the store's root to a file, and returns its manifest. The same root gives the same bytes."""
    if file.is_dir():
        raise InvalidInput(f"{file} is a folder: name a file in it")
    version = store.latest("root")
    paths = [store.folder / name for name in ("store.json", "backbone.json", "tokenizer.json", "upper.safetensors")]
    paths += [path for path in store.lower_files("root", version) if path.exists()]
    for folder in (store.counts_folder("root", version), store.table_folder("root", version)):  # a decoder may lack counts
        paths += sorted(path for path in folder.glob("*") if path.name != CORPUS)  # which names files of this machine
    file.with_name(file.name + WRITING).unlink(missing_ok=True)  # what a killed command has left may fill the disk
    needed = sum(path.stat().st_size for path in paths)
    check_room(file.parent, needed, f"the root of {store.folder}", "name a file on a larger disk")
    files = {
        path.relative_to(store.folder).as_posix(): PackedFile(path.stat().st_size, whole_digest_of(path)) for path in paths
    }
    manifest = Manifest(FORMAT, store.config.name, store.model, version, files)
    text = (json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n").encode()
    with replaced(file) as temporary, tarfile.open(temporary, "w") as archive:
        archive.addfile(_member(MANIFEST, len(text)), io.BytesIO(text))
        for name, described in files.items():
            with open(store.folder / name, "rb") as source:
                archive.addfile(_member(name, described.bytes), source)
    return manifest


def unpack_root(file: Path, folder: Path, model: str | None = None) -> Store:
    """Makes a store from a packed root. `model`: the original model, if it lies elsewhere here."""
    existed = folder.exists()
    try:
        with tarfile.open(file, "r:") as archive:
            manifest = _manifest(archive, file)
            given = repr((msgspec.to_builtins(manifest), model))
            # Inside of `folder` and not instead of it, which may be the current folder or a mount point.
            unpacked = folder / f"{UNPACKED}-{sha256(given.encode()).hexdigest()[:12]}"
            if unpacked.is_dir():  # a command was killed while it moved files that it had checked
                return _moved_out(unpacked, folder)
            left = [path for path in folder.glob("*") if path.name.startswith(UNPACKED)]
            if begun := [path for path in left if path.suffix != WRITING]:
                raise InvalidInput(
                    f"{folder} is half made of another packed root than {file}, or with another --model: give that command "
                    f"again, or name a new --store. {begun[0]} has what it lacks"
                )
            if existed and len(left) < len([*folder.iterdir()]):
                raise InvalidInput(f"{folder} is not empty: name a new --store")
            for path in left:  # by a killed command
                shutil.rmtree(path)
            check_room(folder, file.stat().st_size, f"the root in {file}", "name a --store on a larger disk")
            with written_folder(unpacked) as writing:
                _unpack(archive, manifest, file, writing)
                if model is not None:
                    write_json(writing / "store.json", {"format": STORE_FORMAT, "model": absolute_model(model)})
        return _moved_out(unpacked, folder)
    except tarfile.TarError as error:
        raise InvalidInput(f"{file} is not a packed root, or was cut off ({error}): name a file of `hplm root pack`") from None
    finally:
        if not existed:
            with suppress(OSError):  # it is a store, or was not made
                folder.rmdir()


def _moved_out(unpacked: Path, folder: Path) -> Store:
    for path in sorted(unpacked.iterdir(), key=lambda path: path.name == "store.json"):  # which makes it a store
        path.rename(folder / path.name)
    unpacked.rmdir()
    return Store(folder)


def _unpack(archive: tarfile.TarFile, manifest: Manifest, file: Path, folder: Path) -> None:
    left = dict(manifest.files)
    for member in archive.getmembers()[1:]:
        if (described := left.pop(member.name, None)) is None or not member.isreg():
            raise Broken(f"{file} holds {member.name!r}, which {MANIFEST} does not name as a file: copy it again")
        if (path := PurePosixPath(member.name)).is_absolute() or ".." in path.parts:
            raise Broken(f"{file} holds {member.name!r}, which lies outside of a store: do not use it")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as writing:
            shutil.copyfileobj(cast(IO[bytes], archive.extractfile(member)), writing)
        if whole_digest_of(target) != described.sha256:
            raise Broken(f"{member.name} in {file} does not match its checksum: copy it again")
    if left:
        raise Broken(f"{file} ends before {next(iter(left))}: copy it again")
    Store(folder)  # refuses another format


def _manifest(archive: tarfile.TarFile, file: Path) -> Manifest:
    member = archive.next()
    source = archive.extractfile(member) if member is not None and member.name == MANIFEST else None
    if source is None:
        raise InvalidInput(f"{file} is not a packed root: name a file of `hplm root pack`")
    try:
        described = msgspec.json.decode(source.read(), type=dict[str, Any])
        if (own := described.get("format")) != FORMAT:
            raise InvalidInput(f"{file} has format {own}, this version of hplm reads {FORMAT}: pack it again")
        return msgspec.convert(described, Manifest)
    except (ValueError, RecursionError) as error:
        raise Broken(f"{MANIFEST} in {file} does not describe its files ({error}): copy it again") from None


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member

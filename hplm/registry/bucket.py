"""A registry in a bucket: S3, GCS, Azure, MinIO, Ceph. Credentials come from the usual variables of the environment."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import from_url  # pyright: ignore[reportUnknownVariableType]

from hplm.errors import InvalidInput
from hplm.location import Remote
from hplm.registry.store import CURRENT, Absent, Away, Conflict, Denied, ObjectStore, StoredObject

TIMEOUT = timedelta(seconds=20)
LOOKING = timedelta(seconds=3)  # for CURRENT: a later look sees more than one that hangs
CONNECTING = timedelta(seconds=3)
RETRYING = timedelta(seconds=5)  # longer waits are for who asks: a server looks again, and a manager says so
RETRIES = 2
BLOCK = 16 << 20  # bytes that one request fetches of a file: its time does not grow with the file


class Bucket(ObjectStore):
    def __init__(self, place: Remote) -> None:
        self._place = place
        self._store, self._looked_at = self._opened(TIMEOUT), self._opened(LOOKING)

    def _opened(self, timeout: timedelta) -> Any:
        try:
            return from_url(
                self._place.url,
                client_options={
                    "timeout": timeout,
                    "connect_timeout": CONNECTING,
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": RETRYING},
            )
        except (exceptions.BaseError, ValueError) as error:
            raise InvalidInput(
                f"{self._place} cannot be opened ({_first_line(error)}): check address and credentials"
            ) from None

    def __str__(self) -> str:
        return str(self._place)

    def current(self, seen: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, str]] | None:
        with self._asking(CURRENT):
            try:
                found = obstore.get(self._looked_at, CURRENT, options={"if_none_match": seen["e_tag"]} if seen else None)
            except exceptions.NotModifiedError:
                return None
            tag = {name: value for name in ("e_tag", "version") if (value := found.meta[name]) is not None}
            return bytes(found.bytes()), tag

    def swap(self, content: bytes, seen: Mapping[str, str] | None) -> None:
        with self._asking(CURRENT):
            mode: Any = {**seen} if seen else "create"
            obstore.put(self._store, CURRENT, content, mode=mode)

    def get(self, name: str) -> bytes:
        with self._asking(name):
            return bytes(obstore.get(self._store, name).bytes())

    def fetch(self, name: str, to: Path) -> None:
        with self._asking(name), open(to, "wb") as file:
            size = obstore.head(self._store, name)["size"]
            for start in range(0, size, BLOCK):
                file.write(obstore.get_range(self._store, name, start=start, length=min(BLOCK, size - start)))

    def put(self, name: str, content: bytes | Path) -> None:
        with self._asking(name):
            obstore.put(self._store, name, content)

    def names(self, folder: str) -> Iterator[StoredObject]:
        with self._asking(f"{folder}/"):
            library: Any = obstore  # a type of its lists is that of a package that we do not need
            listed = library.list(self._store, f"{folder}/")
            for found in listed:
                for one in found:
                    yield StoredObject(one["path"], one["last_modified"].timestamp(), one["size"])

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._asking(name):
                try:
                    obstore.delete(self._store, name)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _asking(self, name: str) -> Generator[None, None, None]:
        where: Any = f"{self._place}/{name}"
        try:
            yield
        except FileNotFoundError:
            raise Absent(f"{where} is missing") from None
        except (exceptions.PreconditionError, exceptions.AlreadyExistsError):
            raise Conflict from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise Denied(f"{where} is refused ({_first_line(error)}): check the credentials, and their rights") from None
        except exceptions.BaseError as error:
            said = f"{where} does not answer ({_first_line(error)})"
            if self._place.url.startswith("s3://") and "AWS_ACCESS_KEY_ID" not in os.environ:
                said += "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, unless this machine has rights of its own"
            raise Away(said) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

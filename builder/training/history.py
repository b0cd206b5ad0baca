"""The files that the versions of a tenant have learned from, as their reports name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.tables.text_files import check_file
from builder.training.examples import Divided
from hplm.errors import InvalidInput


@dataclass(frozen=True)
class Learned:
    """The files of one version's training."""

    train: Path | None
    dev: Path | None
    divided: Divided | None  # how the training file was divided, if it is also the dev file


def learned_by(store: Store, tenant: TenantFile, moved: Sequence[Path] = ()) -> Iterator[Learned]:
    """Yields the files of the version's training, then of the version that it was trained on, and so on.

    An import has learned from no file. `moved`: files, of which some may be such data that lie elsewhere now.
    """
    for path in moved:
        check_file(path)
    by_digest = {digest_of(path): path for path in moved}
    version = tenant.version
    while version:
        report = store.report(store.tenant_version(tenant.id, version))
        train, dev = (_found(tenant.id, version, report.get(part), by_digest) for part in ("training", "dev"))
        yield Learned(train, dev, Divided.of(report))
        version = report.get("from_version", 0)


def _found(tenant_id: str, version: int, part: dict[str, Any] | None, by_digest: dict[str, Path]) -> Path | None:
    if part is None:
        return None
    if part["digest"] in by_digest:
        return by_digest[part["digest"]]
    path = Path(part["file"])
    if not path.is_file() or digest_of(path) != part["digest"]:
        raise InvalidInput(
            f"version {version} of tenant {tenant_id!r} was trained on {path}, which was moved or changed since: name the file "
            "as it was with --seen"
        )
    return path

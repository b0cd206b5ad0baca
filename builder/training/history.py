"""The files that the versions of a tenant have learned from, as their reports name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.tables.text_files import digest_of_file
from hplm.errors import InvalidInput

PARTS = ("training", "dev")


def learned_by(store: Store, tenant: TenantFile, moved: Sequence[Path], parts: Sequence[str] = PARTS) -> Iterator[Path]:
    """Yields the training and dev files of the version, then of the version that it was trained on, and so on.

    An import has learned from no file. `moved`: files, of which some may be such data that lie elsewhere now. `parts`: which
    data are meant.
    """
    by_digest = {digest_of_file(path): path for path in moved}
    version = tenant.version
    while version:
        report = store.report(store.tenant_version(tenant.id, version))
        for part in parts:
            if part in report:
                yield _found(tenant.id, version, report[part], by_digest)
        version = report.get("from_version", 0)


def _found(tenant_id: str, version: int, part: dict[str, Any], by_digest: dict[str, Path]) -> Path:
    if part["digest"] in by_digest:
        return by_digest[part["digest"]]
    path = Path(part["file"])
    if not path.is_file() or digest_of(path) != part["digest"]:
        raise InvalidInput(
            f"version {version} of tenant {tenant_id!r} was trained on {path}, which was moved or changed since: name the file "
            "as it was with --seen"
        )
    return path

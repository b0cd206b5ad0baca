"""Labelled texts that a tenant's training has not seen: others would make its answers look better than they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.tables.text_files import check_file
from builder.training.labelled import Example, Labelled
from hplm.errors import InvalidInput

FEWEST = 100  # texts, from which something about answers can be learned


def used_files(store: Store, tenant: TenantFile, seen: Sequence[Path]) -> Iterator[Path]:
    """Yields the files of the version's training and of those that it was trained on, then those of `seen`."""
    for path in seen:
        check_file(path)
    moved = {digest_of(path): path for path in seen}
    found: set[str] = set()
    version = tenant.version
    while version:
        report = store.report(store.tenant_version(tenant.id, version))
        for part in (report[name] for name in ("training", "dev") if name in report):
            if part["digest"] in found:
                continue
            found.add(part["digest"])
            if part["digest"] in moved:
                continue
            path = Path(part["file"])
            if not path.is_file() or digest_of(path) != part["digest"]:
                raise InvalidInput(
                    f"version {version} of tenant {tenant.id!r} was trained on {path}, which was moved or changed since: name "
                    "the file as it was with --seen, so that its texts are left out"
                )
            yield path
        version = report.get("from_version", 0)
    yield from seen


def unseen(labelled: Labelled, used: Iterable[Labelled], tenant: str, purpose: str) -> Labelled:
    """Returns the texts that are not in `used`, and refuses too few of them. `tenant` and `purpose` are words for the error."""
    known = {_key(example) for other in used for example in other.examples}
    fresh = [example for example in labelled.examples if _key(example) not in known]
    if len(fresh) < FEWEST:
        raise InvalidInput(
            f"{labelled.path}: {len(labelled.examples) - len(fresh):,} of its {len(labelled.examples):,} texts occur in the "
            f"training or dev data of {tenant}, and {len(fresh):,} are left: {purpose} needs {FEWEST} texts or more that have "
            "chosen nothing else"
        )
    return Labelled(labelled.path, fresh)


def _key(example: Example) -> tuple[str, ...]:
    return tuple(" ".join(text.split()) for text in (example.text, example.pair or ""))

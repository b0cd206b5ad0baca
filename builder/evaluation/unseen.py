"""Texts that a tenant's training has not seen: others would make its answers look better than they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.tables.text_files import digest_of_files
from builder.tasks.examples import Example, has_labels, key_of, read_unlabelled
from builder.tasks.labels import check_labels
from builder.tasks.tasks import training_task
from hplm.errors import InvalidInput

FEWEST = 100  # texts, from which something about answers can be learned
PARTS = ("training", "dev")


class UnseenTexts:
    """The texts of a file without those that occur in the training or dev data of a tenant's version.

    The same holds for the versions that it was trained on.
    """

    def __init__(
        self, store: Store, tenant: TenantFile, file: Path, seen: Sequence[Path], purpose: str, parts: Sequence[str] = PARTS,
        with_labels: bool = True,
    ) -> None:  # fmt: skip
        """`seen`: more files of texts to leave out, also moved ones. `purpose` is a word for errors.

        `parts`: of the training's data, those that are left out. `with_labels`: whether the texts must have labels.
        """
        self.task = training_task(tenant.task)
        if self.task.served.evidence is None or (self.task.right_class is None and self.task.is_right is None):
            raise InvalidInput(f"tenant {tenant.id!r} has the task {tenant.task}, whose answers have no confidence")
        self.file, self.digest = file, digest_of_files(file)
        self.is_labelled = with_labels or has_labels(file)
        self._tenant, self._purpose = tenant, purpose
        self._used = {digest_of_files(path): path for path in (*learned_by(store, tenant, seen, parts), *seen)}
        self.seen = sorted(self._used)  # the digests of the files whose texts are left out

    @cached_property
    def fresh(self) -> list[Example]:
        """The texts that the training has not seen. Raises if they are too few."""
        texts = self._texts
        known = {key_of(example) for path in self._used.values() for example in self.task.read(path)}
        found = [example for example in texts if key_of(example) not in known]
        if len(found) < FEWEST:
            raise InvalidInput(
                f"{self.file}: {len(texts) - len(found):,} of its {len(texts):,} texts occur in the "
                f"training or dev data of tenant {self._tenant.id!r}, and {len(found):,} are left: {self._purpose} "
                f"needs {FEWEST} texts or more that have chosen nothing else"
            )
        return found

    @property
    def left_out(self) -> int:
        return len(self._texts) - len(self.fresh)

    @cached_property
    def _texts(self) -> list[Example]:
        if not self.is_labelled:
            return [*read_unlabelled(self.file)]
        examples = self.task.read(self.file)
        check_labels(examples, self._tenant.labels, f"the training data of tenant {self._tenant.id!r}")
        return examples


def count_learned(store: Store, tenant: TenantFile, examples: Sequence[Example], parts: Sequence[str] = PARTS) -> int:
    """Returns how many of a file's texts occur in these parts of the training's data; 0 where the files were moved."""
    task, known = training_task(tenant.task), set[tuple[str, ...]]()
    given = [examples[0].file] if examples[0].file.is_file() else []  # and no pipe, which is empty by now
    with suppress(InvalidInput):
        for path in learned_by(store, tenant, given, parts):
            known |= {key_of(example) for example in task.read(path)}
    learned = store.report(tenant).get("students", {}) if parts == PARTS else {}  # a training goes on from the full stack
    file = Path(learned.get("unlabelled", ""))  # of texts without labels
    if file.is_file() and digest_of(file) == learned["asked"]["unlabelled"]:
        known |= {key_of(example) for example in read_unlabelled(file)}
    return sum(key_of(example) in known for example in examples)


def learned_by(store: Store, tenant: TenantFile, moved: Sequence[Path], parts: Sequence[str] = PARTS) -> Iterator[Path]:
    """Yields the training and dev files of the version, then of the version that it was trained on, and so on.

    An import has learned from no file. `moved`: files, of which some may be such data that lie elsewhere now. `parts`: which
    data are meant.
    """
    by_digest = {digest_of_files(path): path for path in moved}
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

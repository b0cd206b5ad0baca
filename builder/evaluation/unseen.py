"""Texts that a tenant's training has not seen: others would make its answers look better than they are."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from builder.store.store import TenantVersion
from builder.tables.text_files import digest_of_files
from builder.tasks.columns import AS_TRAINED, Columns
from builder.tasks.examples import Example, has_labels, hash_of, read_unlabelled
from builder.tasks.labels import check_labels
from builder.tasks.tasks import training_task
from hplm.errors import InvalidInput

FEWEST = 100  # texts, from which something about answers can be learned


class UnseenTexts:
    """The texts of a file without those that a tenant's version has seen."""

    def __init__(
        self, tenant: TenantVersion, file: Path, seen: frozenset[int], purpose: str, with_labels: bool = True,
        columns: Columns = AS_TRAINED,
    ) -> None:  # fmt: skip
        """`seen`: hashes of texts. `purpose` is a word for errors. `with_labels`: whether the texts must have labels."""
        self.task = training_task(tenant.task)
        if self.task.served.evidence is None or (self.task.right_class is None and self.task.is_right is None):
            raise InvalidInput(f"tenant {tenant.id!r} has the task {tenant.task}, whose answers have no confidence")
        self.file, self.digest, self.columns = file, digest_of_files(file), columns
        self.is_labelled = with_labels or has_labels(file, columns, self.task.line)
        self._tenant, self._seen, self._purpose = tenant, seen, purpose

    @cached_property
    def fresh(self) -> list[Example]:
        """The texts that the training has not seen. Raises if they are too few."""
        found = [example for example in self._texts if hash_of(example) not in self._seen]
        if len(found) < FEWEST:
            raise InvalidInput(
                f"{self.file}: {self.left_out:,} of its {len(self._texts):,} texts occur in the "
                f"training or dev data of tenant {self._tenant.id!r}, and {len(found):,} are left: {self._purpose} "
                f"needs {FEWEST} texts or more that have chosen nothing else"
            )
        return found

    @property
    def left_out(self) -> int:
        return sum(hash_of(example) in self._seen for example in self._texts)

    @cached_property
    def _texts(self) -> list[Example]:
        if not self.is_labelled:
            return [*read_unlabelled(self.file, self.columns, self.task.line)]
        examples = self.task.read(self.file, self.columns)
        check_labels(examples, self._tenant.labels, f"the training data of tenant {self._tenant.id!r}")
        return examples

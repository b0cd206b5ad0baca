"""The knowledge of a tenant before it is served: domain, task, labels, adapter, and a head or an embedding."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor

from hplm.adapters.heads import size_for, sized
from hplm.adapters.layout import Layout
from hplm.adapters.record import Record, has_content
from hplm.adapters.records import LayoutWeights, RecordFile, pack
from hplm.calibration import TEMPERATURE, Calibration
from hplm.errors import InvalidInput
from hplm.plot.table import Branch
from hplm.tasks.tasks import TASKS, Task
from hplm.tenants.embedding import Embedding
from hplm.tenants.exits import Exits
from hplm.tenants.snapshot import Tenant
from hplm.tenants.students import Student, Students

log = logging.getLogger(__name__)
Head = tuple[Layout, Mapping[str, Tensor]]
Adapter = tuple[Layout, Sequence[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class ExitKnowledge:
    """The exits of a tenant in memory."""

    exits: Exits  # without a record
    layout: Layout
    heads: Sequence[Mapping[str, Tensor]]  # of each exit


@dataclass(frozen=True)
class StudentKnowledge:
    """The students of a tenant in memory."""

    students: Students  # without records
    members: Sequence[tuple[Adapter, Head]]


@dataclass(frozen=True)
class TenantKnowledge:
    """A version of a tenant in memory. The tensors have the names and shapes of their layouts."""

    domain: str
    domain_version: int
    task: str
    labels: tuple[str, ...]
    head: Head | None
    adapter: Adapter | None
    version: int = 0  # its version in the store; 0: none
    calibration: Calibration | None = None
    exits: ExitKnowledge | None = None
    students: StudentKnowledge | None = None
    embedding: Embedding | None = None

    def packed(self) -> RecordFile:
        """Returns the version's record file. Its heads have room for more labels, so that several tenants have alike ones."""
        heads = {"head": (self.head[0], [self.head[1]])} if self.head is not None else {}
        heads |= {"exits": (self.exits.layout, self.exits.heads)} if self.exits is not None else {}
        parts: dict[str, LayoutWeights] = {"adapter": self.adapter} if self.adapter is not None else {}
        for number, (adapter, (layout, own)) in enumerate(self.students.members if self.students is not None else ()):
            heads[_of_student(number, "head")] = layout, [own]
            parts[_of_student(number, "adapter")] = adapter
        for name, (layout, layers) in heads.items():
            size = size_for(layout.size)
            parts[name] = replace(layout, size=size), [sized(layer, size) for layer in layers]
        calibration = asdict(self.calibration) if self.calibration is not None else None
        exits = asdict(self.exits.exits) if self.exits is not None else None
        tenant = {
            "domain": self.domain, "domain_version": self.domain_version, "task": self.task, "labels": self.labels,
            "calibration": calibration, "exits": exits,
        }  # fmt: skip
        if self.students is not None:
            tenant["students"] = self.students.students.described()
        if self.embedding is not None:
            tenant["embedding"] = asdict(self.embedding)
        return pack(parts, tenant)

    @classmethod
    def read(cls, packed: RecordFile, version: int) -> TenantKnowledge:
        """Returns what a record file holds. Raises one of MISFITS if it is not the file of a version."""
        tenant, weights, labels = packed.header["tenant"], packed.weights, tuple(packed.header["tenant"]["labels"])
        found = {name: (Layout.of(record.layout), weights(record)) for name, record in packed.records.items()}
        head = exits = students = None
        if "head" in found:
            layout, (whole,) = found["head"]
            head = replace(layout, size=len(labels)), sized(whole, len(labels))
        if "exits" in found and _is_known("exits", tenant["exits"]["calibrations"], packed.name):
            layout, heads = found["exits"]
            own = [sized(whole, len(labels)) for whole in heads]
            exits = ExitKnowledge(Exits.read(tenant["exits"]), replace(layout, size=len(labels)), own)
        if (stored := tenant.get("students")) is not None:
            members: list[tuple[Adapter, Head]] = []
            for number in range(Students.read(stored).teams[0].members):
                layout, (whole,) = found[_of_student(number, "head")]
                own = replace(layout, size=len(labels)), sized(whole, len(labels))
                members.append((found[_of_student(number, "adapter")], own))
            students = StudentKnowledge(Students.read(stored), members)
        calibration = None
        if (stored := tenant["calibration"]) is not None and _is_known("a calibration", [stored], packed.name):
            calibration = Calibration.read(stored)
        embedding = Embedding.read(stored) if (stored := tenant.get("embedding")) is not None else None
        return cls(
            tenant["domain"], tenant["domain_version"], tenant["task"], labels, head, found.get("adapter"), version,
            calibration, exits, students, embedding,
        )  # fmt: skip

    def is_of(self, tenant: Tenant) -> bool:
        """Whether a served tenant has this content."""
        packed, files = self.packed(), {record.file for record in tenant.records()}
        if files or packed.records:
            return any(has_content(file, packed.content) for file in files)
        own = (self.domain, self.domain_version), self.task, self.labels, self.embedding
        return (tenant.branch_id, tenant.task, tenant.labels, tenant.embedding) == own

    def tenant(self, tenant_id: str, uid: int, version: int, records: Mapping[str, Record]) -> Tenant:
        """Returns the tenant as snapshots hold it. `records`: those of its parts."""
        return Tenant(
            id=tenant_id,
            uid=uid,
            version=version,
            domain=self.domain,
            domain_version=self.domain_version,
            task=self.task,
            labels=self.labels,
            head=records.get("head"),
            adapter=records.get("adapter"),
            calibration=self.calibration,
            exits=replace(self.exits.exits, record=records["exits"]) if self.exits is not None else None,
            students=self._students(records),
            embedding=self.embedding,
            stored=self.version if self.version != version else 0,
        )

    def _students(self, records: Mapping[str, Record]) -> Students | None:
        if self.students is None:
            return None
        numbers = range(len(self.students.members))
        members = [Student(records[_of_student(one, "head")], records[_of_student(one, "adapter")]) for one in numbers]
        return replace(self.students.students, members=tuple(members))

    def check(self, tenant_id: str, branches: Iterable[Branch], width: int | None) -> None:
        """Raises if a backbone with these tables cannot serve the tenant. `width`: of its vectors; None: unknown."""
        for wrong in chain(self._wrong({branch.id for branch in branches}), self._wrong_widths(width)):
            raise InvalidInput(f"tenant {tenant_id!r} {wrong}")

    def _wrong(self, tables: Set[tuple[str, int]]) -> Iterator[str]:
        """Yields what is wrong. What follows is looked at only if that is right."""
        if self.task not in TASKS:
            yield f"has the unknown task {self.task!r}: choose {' or '.join(TASKS)}"
        task, found = TASKS[self.task], len(self.labels)
        size = task.head_size(found)
        if found != size:
            yield f"has {found} labels, but the task {self.task} needs {size}"
        for label in [label for label, times in Counter(self.labels).items() if times > 1]:
            yield f"has the label {label!r} more than once: give each label once"
        try:
            "".join(self.labels).encode()
        except UnicodeEncodeError as error:  # JSON may have halves of characters
            yield f"has a label with {error.object[error.start]!r}, which is not UTF-8: send UTF-8"
        if (self.head is not None) != task.has_head:
            yield f"has the task {self.task} and {'no' if self.head is None else 'a'} head: export it again"
        if (self.embedding is not None) != task.is_vector:
            yield f"has the task {self.task} and {'no' if self.embedding is None else 'an'} embedding: export it again"
        if self.calibration is not None and task.evidence is None:
            yield f"has the task {self.task}, whose answers have no confidence: leave its calibration out"
        if (self.domain, self.domain_version) not in tables:
            yield (
                f"needs version {self.domain_version} of domain {self.domain!r}, which is not served: "
                "add it with `hplm domain add` or `hplm domain update`"
            )
        if self.exits is not None:
            yield from self._wrong_exits(self.exits, task)
        if self.students is not None:
            yield from self._wrong_students(self.students, task)

    def _wrong_exits(self, given: ExitKnowledge, task: Task) -> Iterator[str]:
        if task.same is None:
            yield f"has the task {self.task}, which has no exits: leave them out"
        labels, exits = len(self.labels), len(given.heads)
        if given.layout.size != labels or len(given.exits.calibrations) != exits:
            yield f"has {labels} labels, but its exits have others: make them anew with `hplm tenant exits`"
        if given.layout.layers != exits or (self.adapter is not None and self.adapter[0].layers != exits):
            yield f"has {exits} exits, but not as many layers: make them anew with `hplm tenant exits`"

    def _wrong_students(self, given: StudentKnowledge, task: Task) -> Iterator[str]:
        if not task.takes_students or self.exits is not None:
            yield f"cannot have students beside exits, or with the task {self.task}"
        students, members = given.students, given.members
        if (
            {adapter.layers for (adapter, _), _ in members} != {students.depth}
            or (self.adapter is not None and self.adapter[0].layers < students.depth)
            or any(head.size != len(self.labels) for _, (head, _) in members)
            or len(members) != students.teams[0].members
        ):
            yield "has students of other labels, layers or numbers: make them anew with `hplm tenant students`"

    def _wrong_widths(self, width: int | None) -> Iterator[str]:
        members = self.students.members if self.students is not None else ()
        layouts = [part[0] for part in (self.head, self.adapter, *chain.from_iterable(members)) if part is not None]
        known = layouts[0].hidden if width is None and layouts else width
        own = self.embedding.dimensions if self.embedding is not None else 0
        if known is not None and own > known:
            yield f"has vectors of {own} dimensions, but this backbone has {known}: train it for this backbone"
        for layout in layouts:
            if layout.hidden != known:
                yield f"has width {layout.hidden}, but this backbone has {known}: train it for this backbone"


def _of_student(number: int, part: str) -> str:
    """Returns the name of a part of a record file."""
    return f"student.{number}.{part}"


def _is_known(what: str, calibrations: Sequence[Mapping[str, Any]], place: object) -> bool:
    """Whether stored calibrations are of the kind of this release. Others are left out, with a line in the log."""
    others = [stored["kind"] for stored in calibrations if stored["kind"] != TEMPERATURE]
    if others:
        log.warning("%s has %s of kind %r, which this release does not have: left out", place, what, others[0])
    return not others

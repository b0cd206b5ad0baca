"""One version of a tenant: its record, as it is published, beside its report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch import Tensor

from hplm.adapters.layout import KINDS, Layout, adapter_layout, head_layout
from hplm.adapters.record import ENDING, has_content
from hplm.adapters.records import RecordFile, read_header
from hplm.errors import MISFITS, Broken
from hplm.model.config import BackboneConfig
from hplm.tasks.tasks import TASKS
from hplm.tenants.embedding import Embedding
from hplm.tenants.knowledge import TenantKnowledge

REPORT, PICTURE, SEEN = "report.json", "training.png", "seen.npz"
WAY_OUT = "build or copy it again, or delete the tenant"
Weights = tuple[list[dict[str, Tensor]] | None, dict[str, Tensor]]  # of the adapter, layer by layer, and the head


@dataclass(frozen=True)
class TenantVersion:
    """Describes a version without its weights."""

    id: str
    version: int
    domain: str
    domain_version: int
    task: str
    labels: list[str]
    rank: int  # of the adapter; 0: a head alone
    adapter: str = "bottleneck"
    places: tuple[str, ...] | None = None  # the projections that the adapter works on; None: the usual ones of its kind
    function: str = "relu"  # inside the adapter
    head_function: str | None = None  # between the two layers of a head; None: the head has one layer
    dtype: str = "fp16"  # of the stored adapter and head
    embedding: Embedding | None = None  # how it makes vectors, if that is its task

    @property
    def has_head(self) -> bool:
        task = TASKS.get(self.task)
        return task is None or task.has_head

    def adapter_layout(self, config: BackboneConfig) -> Layout | None:
        return adapter_layout(config, self.adapter, self.rank, self.places, self.function, self.dtype)

    def with_adapter(self, layout: Layout) -> TenantVersion:
        places = None if layout.places == KINDS[layout.kind].usual_places else layout.places
        return replace(self, rank=layout.size, adapter=layout.kind, places=places, function=layout.function)

    def head_layout(self, config: BackboneConfig) -> Layout:
        return head_layout(config, len(self.labels), self.head_function, self.dtype)

    def knowledge(
        self, config: BackboneConfig, adapter: list[dict[str, Tensor]] | None, head: dict[str, Tensor]
    ) -> TenantKnowledge:
        """Returns the version with these weights, which its layouts name and shape. `head`: empty if there is none."""
        layout = self.adapter_layout(config)
        return TenantKnowledge(
            domain=self.domain,
            domain_version=self.domain_version,
            task=self.task,
            labels=tuple(self.labels),
            head=(self.head_layout(config), head) if head else None,
            adapter=(layout, adapter) if layout is not None and adapter is not None else None,
            version=self.version,
            embedding=self.embedding,
        )


def described(folder: Path) -> TenantVersion:
    """Returns what a version is. Reads no weights."""
    path = _record(folder)
    try:
        header = read_header(path)
        layouts = {name: Layout.of(key) for name, key in header["layouts"].items()}
        named = {"id": folder.parent.name, "version": int(folder.name), "rank": 0}
        tenant = msgspec.convert({**header["tenant"], **named}, TenantVersion)
    except (*MISFITS, OSError) as error:
        raise Broken(f"{path} does not describe a tenant ({error}): {WAY_OUT}") from None
    adapter, head = layouts.get("adapter"), layouts.get("head")
    function = head.function if head is not None and head.kind == "head2" else None
    tenant = replace(tenant, head_function=function, dtype=(adapter or head or Layout).dtype)
    return tenant.with_adapter(adapter) if adapter is not None else tenant


def read_version(folder: Path) -> TenantKnowledge:
    """Returns all that is published of a version, and checks it."""
    path = _record(folder)
    try:
        content = path.read_bytes()
        if not has_content(path.name, content):
            raise Broken(f"{path} does not match the checksum in its name: {WAY_OUT}")
        return TenantKnowledge.read(RecordFile(content), int(folder.name))
    except (*MISFITS, OSError) as error:
        raise Broken(f"{path} does not hold a version of a tenant ({error}): {WAY_OUT}") from None


def _record(folder: Path) -> Path:
    found = list(folder.glob(f"*{ENDING}"))
    if len(found) != 1:
        raise Broken(f"{folder} has {len(found)} files *{ENDING}, and not the one record of a version: {WAY_OUT}")
    return found[0]

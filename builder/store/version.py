"""One version of a tenant: its record, as it is published, beside its report. Earlier releases stored several files."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch import Tensor

from hplm.adapters.layout import KINDS, Layout, adapter_layout, exit_layout, head_layout
from hplm.adapters.record import ENDING, has_content
from hplm.adapters.records import Packed, read_header
from hplm.errors import MISFITS, Broken
from hplm.model.config import BackboneConfig
from hplm.model.weights import load_weights
from hplm.tasks import TASKS, find_task
from hplm.tenants.exits import Exits
from hplm.tenants.knowledge import ExitKnowledge, Knowledge, read_calibration

REPORT, PICTURE = "report.json", "training.png"
WAY_OUT = "build or copy it again, or delete the tenant"
OLDER = "tenant.json"  # of earlier releases, whose files of weights lie beside it
NO_LONGER_SERVED = ("ladder.json", "link.json")
log = logging.getLogger(__name__)
Weights = tuple[list[dict[str, Tensor]] | None, dict[str, Tensor]]  # of the adapter, layer by layer, and the head


@dataclass(frozen=True)
class TenantFile:
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

    @property
    def has_head(self) -> bool:
        task = TASKS.get(self.task)
        return task is None or not task.generates

    def adapter_layout(self, config: BackboneConfig) -> Layout | None:
        return adapter_layout(config, self.adapter, self.rank, self.places, self.function, self.dtype)

    def with_adapter(self, layout: Layout) -> TenantFile:
        places = None if layout.places == KINDS[layout.kind].usual_places else layout.places
        return replace(self, rank=layout.size, adapter=layout.kind, places=places, function=layout.function)

    def head_layout(self, config: BackboneConfig) -> Layout:
        return head_layout(config, len(self.labels), self.head_function, self.dtype)

    def knowledge(self, config: BackboneConfig, adapter: list[dict[str, Tensor]] | None, head: dict[str, Tensor]) -> Knowledge:
        """Returns the version with these weights, which its layouts name and shape. `head`: empty if there is none."""
        layout = self.adapter_layout(config)
        return Knowledge(
            domain=self.domain,
            domain_version=self.domain_version,
            task=self.task,
            labels=tuple(self.labels),
            head=(self.head_layout(config), head) if head else None,
            adapter=(layout, adapter) if layout is not None and adapter is not None else None,
            version=self.version,
        )


def described(folder: Path) -> TenantFile:
    """Returns what a version is. Reads no weights."""
    if (folder / OLDER).exists():
        return _older_described(folder)
    path = _record(folder)
    try:
        header = read_header(path)
        layouts = {name: Layout.of(key) for name, key in header["layouts"].items()}
        named = {"id": folder.parent.name, "version": int(folder.name), "rank": 0}
        tenant = msgspec.convert({**header["tenant"], **named}, TenantFile)
    except (*MISFITS, OSError) as error:
        raise Broken(f"{path} does not describe a tenant ({error}): {WAY_OUT}") from None
    adapter, head = layouts.get("adapter"), layouts.get("head")
    function = head.function if head is not None and head.kind == "head2" else None
    tenant = replace(tenant, head_function=function, dtype=(adapter or head or Layout).dtype)
    return tenant.with_adapter(adapter) if adapter is not None else tenant


def read_version(folder: Path, config: BackboneConfig) -> Knowledge:
    """Returns all that is published of a version, and checks it."""
    if (folder / OLDER).exists():
        return _older(folder, _older_described(folder), config)
    path = _record(folder)
    try:
        content = path.read_bytes()
        if not has_content(path.name, content):
            raise Broken(f"{path} does not match the checksum in its name: {WAY_OUT}")
        return Knowledge.read(Packed(content), int(folder.name))
    except (*MISFITS, OSError) as error:
        raise Broken(f"{path} does not hold a version of a tenant ({error}): {WAY_OUT}") from None


def _record(folder: Path) -> Path:
    found = list(folder.glob(f"*{ENDING}"))
    if len(found) != 1:
        raise Broken(f"{folder} has {len(found)} files *{ENDING}, and not the one record of a version: {WAY_OUT}")
    return found[0]


def _older_described(folder: Path) -> TenantFile:
    """Describes a version as earlier releases stored it: `tenant.json`, and files of weights beside it."""
    path = folder / OLDER
    try:
        return msgspec.json.decode(path.read_bytes(), type=TenantFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Broken(f"{path} does not describe a tenant ({error}): {WAY_OUT}") from None


def _older(folder: Path, tenant: TenantFile, config: BackboneConfig) -> Knowledge:
    for name in NO_LONGER_SERVED:
        if (folder / name).exists():
            log.warning("%s is no longer served: the full stack of tenant %s answers", folder / name, tenant.id)
    path = folder / OLDER
    adapter = _layers(folder / "adapter.safetensors", config.upper_layers) if tenant.rank else None
    head = load_weights(folder / "head.safetensors") if tenant.has_head else {}
    found = tenant.knowledge(config, adapter, head)
    try:
        if (path := folder / "calibration.json").exists():
            stored = json.loads(path.read_text("utf-8"))["calibration"]
            found = replace(found, calibration=read_calibration(stored, len(tenant.labels), path))
        if (path := folder / "exits.json").exists():
            exits = Exits.read(json.loads(path.read_text("utf-8"))["exits"])
            layout = exit_layout(config, find_task(tenant.task).exit_outputs(tenant.labels), tenant.dtype)
            heads = _layers(folder / "exits.safetensors", layout.layers)
            found = replace(found, exits=ExitKnowledge(exits, layout, heads))
            if any({name: part.shape for name, part in head.items()} != layout.shapes for head in heads):
                raise TypeError("its heads are of another tenant")
        return found
    except MISFITS as error:
        raise Broken(f"{path} cannot be read ({error}): make it again with `hplm calibrate` or `hplm tenant exits`") from None


def _layers(path: Path, count: int) -> list[dict[str, Tensor]]:
    layers: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in load_weights(path).items():
        layer, _, part = name.partition(".")
        layers[int(layer)][part] = tensor
    return layers

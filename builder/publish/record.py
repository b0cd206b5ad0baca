"""Reads a record file that came from elsewhere: from another store, an export or a registry of the same backbone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from builder.store.version import TenantVersion
from hplm.adapters.layout import EXIT, KINDS, Layout, adapter_layout, exit_layout, head_layout
from hplm.adapters.records import FORMAT, RecordFile
from hplm.errors import MISFITS, HplmError, InvalidInput
from hplm.model.config import BackboneConfig
from hplm.tenants.keys import Key
from hplm.tenants.knowledge import TenantKnowledge
from hplm.tenants.manager import Manager, Published

FROM = "give the file *.safetensors of a version in a store, or of `records` of an export or a registry"


def publish_record(manager: Manager, tenant_id: str, path: Path, keys: list[Key]) -> Published:
    """Serves what a record file holds, as a tenant's first or next version."""
    knowledge = read_record(path, BackboneConfig.load(manager.folder / "backbone.json"))
    return manager.publish({tenant_id: lambda: knowledge}, keys)


def read_record(path: Path, config: BackboneConfig) -> TenantKnowledge:
    """Returns what a file holds. Raises if it is no record, or of another backbone."""
    try:
        packed = RecordFile(path.read_bytes())
        parts = load(packed.content)
        if packed.header["format"] != FORMAT:
            raise ValueError(f"its format is {packed.header['format']!r}, and not {FORMAT}")
        msgspec.convert({**packed.header["tenant"], "id": "", "version": 0, "rank": 0}, TenantVersion)  # checks types
        for name, layout in packed.header["layouts"].items():
            _check(name, Layout.of(layout), parts[name], config)
        return TenantKnowledge.read(packed, 0)
    except (*MISFITS, HplmError, OSError, SafetensorError) as error:
        raise InvalidInput(f"{path} is no record of a tenant of {config.name!r} ({error}): {FROM}") from None


def _check(name: str, found: Layout, part: Tensor, config: BackboneConfig) -> None:
    """Raises if a part is not what its layout says, or does not fit the layers of the backbone: students have fewer."""
    if (part.dtype, part.nbytes) != (found.torch_dtype, found.weight_bytes):
        raise ValueError(f"its {name} has {part.nbytes:,} bytes, and its layout {found.weight_bytes:,}")
    if not part.isfinite().all():
        raise ValueError(f"its {name} has NaN or an infinite number")
    if found.kind == EXIT:
        wanted = exit_layout(config, found.size, found.dtype)
    elif KINDS[found.kind].usual_places:
        wanted = adapter_layout(config, found.kind, found.size, found.places, found.function, found.dtype)
        if wanted is not None and name != "adapter" and 0 < found.layers <= config.upper_layers:
            wanted = replace(wanted, layers=found.layers)
    else:
        wanted = head_layout(config, found.size, found.function if found.kind == "head2" else None, found.dtype)
    if found != wanted:
        raise ValueError(f"its {name} has the layout {found.key}, and this backbone has {wanted.key if wanted else 'none'}")

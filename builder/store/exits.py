"""The exits of a tenant's version: `exits.json` and `exits.safetensors` beside its weights. They may be replaced."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile
from hplm.adapters.layout import Layout, exit_layout
from hplm.errors import MISFITS, Broken
from hplm.model.weights import load_weights, save_weights
from hplm.tasks import find_task
from hplm.tenants.exits import Exits

FILE, WEIGHTS = "exits.json", "exits.safetensors"
WAY_OUT = "make the tenant's exits again with `hplm tenant exits`, or remove the file"


@dataclass(frozen=True)
class StoredExits:
    exits: Exits
    heads: list[dict[str, Tensor]]  # of each exit
    asked: dict[str, Any]  # the texts' digests, the precision and the options that they were made with
    report: dict[str, Any]


def read_exits(store: Store, tenant: TenantFile) -> StoredExits | None:
    """Returns the exits of this version of a tenant; None if it has none."""
    folder = store.tenant_folder(tenant.id, tenant.version)
    try:
        stored = json.loads((folder / FILE).read_text("utf-8"))
        exits = Exits.read(stored["exits"])
        heads: list[dict[str, Tensor]] = [{} for _ in exits.calibrations]
        for name, tensor in load_weights(folder / WEIGHTS, WAY_OUT).items():
            number, _, part = name.partition(".")
            heads[int(number)][part] = tensor
        found = StoredExits(exits, heads, dict(stored["asked"]), dict(stored["report"]))
    except FileNotFoundError:
        return None
    except MISFITS as error:
        raise Broken(f"{folder / FILE} does not describe exits ({error}): {WAY_OUT}") from None
    layout = layout_of(store, tenant)
    fits = len(heads) == layout.layers and exits.suits(len(tenant.labels), find_task(tenant.task).is_number)
    if not fits or any({n: t.shape for n, t in head.items()} != layout.shapes for head in heads):
        raise Broken(f"{folder / WEIGHTS} does not have the exits of this tenant: {WAY_OUT}")
    return found


def write_exits(store: Store, tenant: TenantFile, found: StoredExits) -> None:
    """Replaces the exits of a version. Interrupted, it leaves the version without exits, or with all of them."""
    folder = store.tenant_folder(tenant.id, tenant.version)
    (folder / FILE).unlink(missing_ok=True)
    flat = {f"{number}.{name}": tensor for number, head in enumerate(found.heads) for name, tensor in head.items()}
    save_weights(flat, folder / WEIGHTS)
    write_json(folder / FILE, {"exits": found.exits.described(), "asked": found.asked, "report": found.report})


def layout_of(store: Store, tenant: TenantFile, size: int | None = None) -> Layout:
    """Returns the layout of a tenant's exits. `size`: outputs of a head, if not the tenant's own."""
    return exit_layout(store.config, size or outputs_of(tenant), tenant.dtype)


def outputs_of(tenant: TenantFile) -> int:
    """Returns the outputs of an exit's head. One of numbers also says how far off its number may be."""
    return find_task(tenant.task).exit_outputs(tenant.labels)

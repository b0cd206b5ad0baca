"""What shared servers serve, by the name of a configuration. A mark `server(NAME)` names one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from builder.publish.export import export
from builder.publish.groups import emit
from builder.publish.live import add_domain
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from hplm.tenants.keys import new_key
from hplm.tenants.manager import Manager
from testing.random_store import random_store, random_table, random_tenants
from testing.toy import CONFIG, DOMAINS, TENANTS, make_chat
from tests.backbones import CUT, make_two, placement_of_two
from tests.fixtures import RELEASES, unpack
from tests.server.plain_models import ECHO, add_model
from tests.tasks import make_tasks

SECRET, KEY = new_key()  # of the decoder's tenant `keyed`
ENCODER = ServingOptions(dtype="fp32", slots=4, batch_tokens=256)
DECODER = ServingOptions(dtype="fp32", max_sequences=8, cache_tokens=32_768)
PLACES = ("query", "value", "ffn_in", "ffn_out", "ffn_gate")
WRITERS = [
    TenantVersion("plain", 1, "root", 1, "generate", [], 0),
    TenantVersion("lora", 1, "law", 1, "generate", [], 4, "lora", PLACES),
    TenantVersion("wide", 1, "root", 1, "generate", [], 16, "lora", ("query", "key", "value", "attention_out")),
    TenantVersion("keyed", 1, "root", 1, "generate", [], 0),
    TenantVersion("single", 1, "root", 1, "generate", [], 0),
]
SETTINGS = {"keyed": {"keys": (KEY,)}, "single": {"in_flight": 1}}


@dataclass(frozen=True)
class Built:
    """A repository to serve. `stores`: those of its backbones, by name."""

    repository: Path
    stores: dict[str, Store]
    options: tuple[str, ...] = ()  # further ones of tritonserver


def _toy(folder: Path) -> Built:
    """Two encoders in fp32: the toy, and `tasks`, with all tasks. `hugo` is in both."""
    options = replace(ENCODER, plot_preload=True, journal=str(folder / "journal.jsonl"))
    toy = random_store(folder / "toy", CONFIG, TENANTS, DOMAINS, spread=0.3)
    export(toy, folder / "repository", options)
    tasks = make_tasks(folder, "tasks", [replace(TENANTS[4], id="hugo")], calibrated=True)
    trace = ("triton", f"triton,file={folder / 'trace.json'}", "triton,log-frequency=1", "level=OFF", "rate=1")
    return Built(tasks.repository, {"toy": toy, "tasks": tasks.store}, tuple(f"--trace-config={one}" for one in trace[1:]))


def _chat(folder: Path) -> Built:
    """A decoder, and the toy beside it."""
    chat = make_chat(folder, WRITERS, ["law"], SETTINGS, DECODER)
    toy = random_store(folder / "toy", CONFIG, TENANTS, DOMAINS, spread=0.3)
    export(toy, chat.repository, ENCODER)
    return Built(chat.repository, {"chat": chat.store, "toy": toy})


def _precisions(folder: Path) -> Built:
    """The toy in bf16 and in int8, and `live`, whose state has changed before the start."""
    stores: dict[str, Store] = {}
    for dtype in ("bf16", "int8"):
        stores[dtype] = random_store(folder / dtype, replace(CONFIG, name=dtype), TENANTS, DOMAINS, spread=0.3)
        export(stores[dtype], folder / "repository", replace(ENCODER, dtype=dtype))
    live = stores["live"] = random_store(
        folder / "live",
        replace(CONFIG, name="live"),
        random_tenants(6, 4, 3, ("bio",)),
        ("bio",),
        corpus_tokens=3000,
        spread=0.3,
    )
    export(live, folder / "repository", replace(ENCODER, plot_preload=True))
    random_table(live, "law", 1, ("bio", 1), 1000, seed=5)
    manager = Manager.open(folder / "repository", folder / "state", "live")
    manager.registry.begin()
    add_domain(manager, live, "law")
    return Built(folder / "repository", stores)


def _group(folder: Path) -> Built:
    """A group of a placement: two backbones, each with an engine of two stages, without the tenants of the domain `law`."""
    repository, stores = make_two(folder)
    cores = [f"cpu:{core}" for core in (sorted(os.sched_getaffinity(0)) * 2)[:2]]
    placement = placement_of_two(repository, tuple(cores), CUT)
    (whole,) = placement.groups
    units = {
        "both": [unit for unit in whole.units if "/law" not in unit],
        "law": [unit for unit in whole.units if "/law" in unit],
    }
    groups = tuple(replace(whole, name=name, machine=name, units=tuple(own)) for name, own in units.items())
    placement = replace(placement, groups=groups)
    emit(placement, repository, folder / "groups")
    return Built(folder / "groups/both", stores)


def _bare(folder: Path) -> Built:
    """A small model. The server is for repositories that tests load (`lent.loading`)."""
    add_model(folder / "repository", "says", ECHO)
    return Built(folder / "repository", {})


def _release(archive: Path, folder: Path) -> Built:
    """The export of a release, with its registry."""
    unpack(archive, folder)
    return Built(folder / "repository", {"toy": Store(folder / "store")})


CONFIGS: dict[str, Callable[[Path], Built]] = {
    "toy": _toy, "chat": _chat, "precisions": _precisions, "group": _group, "bare": _bare,
    **{archive.name: partial(_release, archive) for archive in RELEASES},
}  # fmt: skip

"""Measures servers of the same backbone with more and more tenants. Requests go to all tenants alike.

Every tenant has an adapter and a head of its own. Their numbers are pieces of one random pool that begin at different places:
to draw all of them would take longer than the measurement, with ten thousand tenants of BERT-base's size.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bench.measuring.serve import BATCH_TOKENS, load_server, texts_of
from bench.serve import ServeBench
from bench.tools.processes import memory_of_server
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.adapters.bank import Bank, record_bytes, write_bank
from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.engine.backbone import Backbone
from hplm.engine.engine import resolve_device, resolve_precision
from hplm.engine.staging import Stager, StagingSettings
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from hplm.server import TritonServer
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from testing.random_store import SIZES, random_store, random_tenants

REQUESTS = 8192  # different requests, more than are sent
APART = 8  # numbers of the pool between the beginnings of two tenants
LABELS = 4
MB = 1e6


def bench_tenants(case: ServeBench, counts: Sequence[int]) -> dict:
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch:
        repository = Path(scratch) / "repository"
        store = random_store(Path(scratch) / "store", SIZES[case.size], random_tenants(1, case.rank, LABELS))
        options = ServingOptions(dtype=case.dtype, batch_tokens=BATCH_TOKENS)
        folder = repository / export(store, repository, options).backbone / "1"
        whole = multiply(folder, max(counts))
        figures = {}
        for count in counts:
            Snapshot(whole.generation, whole.branches, whole.tenants[:count], whole.export).save(folder / Backbone.TENANTS)
            print(f"{count} tenants", file=sys.stderr, flush=True)
            figures[str(count)] = _serve(repository, folder, case, options.slots)
        weights = sum(layout.layers * layout.layer_size for layout in _layouts(folder))
    parameters = sum(parameter.numel() for half in random_backbone(SIZES[case.size]) for parameter in half.parameters())
    least, most = figures[str(min(counts))], figures[str(max(counts))]
    return {
        "tenants": figures,
        "most_to_least": {name: round(most[name] / least[name], 3) for name in ("req_per_s", "start_s")},
        "tenant_to_backbone": round(weights / parameters, 5),  # in parameters
    }


def multiply(folder: Path, count: int) -> Snapshot:
    """Gives an exported backbone of one tenant `count` tenants. Returns their snapshot."""
    exported = Snapshot.load(folder / Backbone.TENANTS)
    (first,) = exported.tenants
    layouts = {record.bank: Bank(folder / Backbone.BANKS / record.bank).layout for record in first.records()}
    needed = count * sum(record_bytes(layout) for layout in layouts.values())
    free = shutil.disk_usage(folder).free
    if needed > 0.9 * free:
        raise InvalidInput(
            f"{count} tenants need {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free: set TMPDIR to "
            "a folder with more space"
        )
    for name, layout in layouts.items():
        write_bank(folder / Backbone.BANKS / name, layout, tqdm(_records(layout, count), name, count))

    def at(record: Record | None, number: int) -> Record | None:
        return replace(record, index=number, uid=number + 1) if record is not None else None

    tenants = [
        replace(first, id=tenant_id(number), uid=number + 1, head=at(first.head, number), adapter=at(first.adapter, number))
        for number in range(count)
    ]
    return Snapshot(exported.generation, exported.branches, tenants, exported.export)


def tenant_id(number: int) -> str:
    return f"tenant-{number:06d}"


def _records(layout: Layout, count: int) -> Iterator[tuple[int, int, Tensor]]:
    size = layout.layers * layout.layer_size
    numbers = torch.randn(size + APART * count, generator=torch.Generator().manual_seed(layout.size)) * 0.02
    pool = numbers.to(layout.torch_dtype)
    for number in range(count):
        yield number + 1, 1, pool[APART * number : APART * number + size].view(layout.layers, -1)


def _layouts(folder: Path) -> list[Layout]:
    return [Bank(path).layout for path in sorted((folder / Backbone.BANKS).iterdir())]


def _serve(repository: Path, folder: Path, case: ServeBench, slots: int) -> dict:
    count = len(Snapshot.load(folder / Backbone.TENANTS).tenants)
    server = TritonServer(repository)
    begin = time.perf_counter()
    with server:
        started = time.perf_counter() - begin
        warming, requests = (_requests(folder.parent.name, case, count, seed) for seed in (1, 2))
        alone, saturated = load_server(server.http_url, requests, warming, case)
        memory = memory_of_server(server)
    return {
        "req_per_s": round(saturated.req_per_s, 2),
        "p50_ms": round(alone.percentile_ms(50), 3),
        "p99_ms": round(alone.percentile_ms(99), 3),
        "start_s": round(started, 2),
        "device_mb": round(_device_bytes(folder, case, slots) / MB, 1),
        "host_mb": round(memory.resident / MB, 1),  # of all processes of the server
        "private_mb": round(memory.private / MB, 1),  # the part of it that is not shared
        "disk_mb": round(sum(record_bytes(layout) for layout in _layouts(folder)) / MB, 3),  # of one tenant
    }


def _requests(backbone: str, case: ServeBench, count: int, seed: int) -> list[bytes]:
    """Returns requests, each to a random tenant."""
    texts = texts_of(case)
    chosen = np.random.default_rng(seed).integers(0, count, REQUESTS).tolist()
    return [
        infer_request(backbone, [texts[i % len(texts)]], tenant_id(number), outputs=("LABEL", "SCORE"))
        for i, number in enumerate(chosen)
    ]


def _device_bytes(folder: Path, case: ServeBench, slots: int) -> int:
    device = resolve_device("auto")
    settings = StagingSettings(slots, device, resolve_precision(case.dtype, device).dtype)
    return Stager(Backbone(folder), settings).device_bytes

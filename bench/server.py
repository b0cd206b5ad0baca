"""A backbone with random weights: what its engine and its server are asked, and what the server's processes take."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from builder.publish.model_configs import ServingOptions
from hplm.adapters import records
from hplm.adapters.layout import Layout
from hplm.engine.backbone import Backbone
from hplm.engine.request import EncoderRequest, Text
from hplm.engine.settings import EncoderSettings
from hplm.engine.sheets import StagedBatch
from hplm.engine.staging import EncoderStager
from hplm.errors import InvalidInput
from hplm.lookup.lookup import Lookup
from hplm.model.config import BackboneConfig
from hplm.parameters import parameters_of
from hplm.server.process_group import members
from hplm.tenants.models import upper_config
from hplm.tenants.snapshot import Snapshot, Tenant
from loadtest.encode import infer_request
from loadtest.traffic import texts_for
from testing.random_repository import RANK, write
from testing.random_store import words

APART = 8  # numbers of the pool between the beginnings of two tenants


@contextmanager
def random_export(
    config: BackboneConfig, tenants: int, options: ServingOptions, rank: int = RANK, vectors: bool = False
) -> Iterator[Path]:
    """Gives the folder of an exported backbone with random weights, in a repository that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        yield write(Path(folder), config, tenants, options, rank, vectors)


def tenant_id(number: int, tenants: int = 10**6) -> str:
    """Returns the name of a tenant of a random store with so many tenants. Those of `multiply` have six digits."""
    return f"tenant-{number % tenants:0{len(str(tenants - 1))}d}"


def texts_of(config: BackboneConfig, lengths: Sequence[int] | np.ndarray) -> list[str]:
    """Returns texts for a model of this vocabulary. With the two special tokens, they have these lengths."""
    return texts_for(np.asarray(lengths).tolist(), words(config.vocabulary))


def settings_of(folder: Path) -> EncoderSettings:
    """Returns the settings of an exported backbone's engine."""
    return EncoderSettings.read(parameters_of(upper_config(folder.parent, folder.name)))


def waiting(backbone: Backbone, texts: Sequence[str], tenants: Sequence[Tenant]) -> list[list[Text]]:
    """Returns what waits for each text: it alone, or once for each of a tenant's students. Tenants take turns."""
    lookup, view, found = Lookup(backbone), backbone.view, []
    for number, text in enumerate(texts):
        tenant = tenants[number % len(tenants)]
        form = lookup.resolve(view, tenant, [text])
        found.append(EncoderRequest(form, view, tenant, lambda request, answer: None).parts())
    return found


def stage(stager: EncoderStager, texts: Sequence[Text]) -> StagedBatch:
    """Returns texts as a batch. Raises if one of them cannot be staged."""

    def broken(text: Text, error: Exception) -> None:
        raise error

    batch = stager.stage(texts, broken)
    assert batch is not None  # or `broken` has raised
    return batch


def requests_of(
    model: str,
    texts: Sequence[str],
    tenants: int,
    deadlines: np.ndarray | None = None,
    together: int = 1,
    outputs: Sequence[str] = ("LABEL", "SCORE"),
) -> list[bytes]:
    """Returns a request for each text, or for each deadline, in seconds. Tenants take turns; `together`: texts of a request."""
    timeouts = [{}] * len(texts) if deadlines is None else [{"timeout": round(float(one) * 1e6)} for one in deadlines]
    asked = [([texts[(i + j) % len(texts)] for j in range(together)], tenant_id(i, tenants)) for i in range(len(timeouts))]
    return [infer_request(model, *one, outputs=outputs, parameters=own) for one, own in zip(asked, timeouts, strict=True)]


def private_bytes(pid: int | None) -> int:
    """Returns the memory of a server and all processes that it has started, without the pages of mapped files."""
    assert pid is not None, "the server has not started"
    return 1024 * sum(_sum_of("RssAnon", f"{process}/status") for process in members(pid))


def waits(pids: Iterable[int]) -> int:
    """Returns how often the threads of these processes have waited so far: each time, the kernel switches to another one."""
    return sum(_sum_of("voluntary_ctxt_switches", f"{pid}/task/*/status") for pid in pids)


def _sum_of(field: str, files: str) -> int:
    """Returns the sum of a field over files of /proc, without those of processes that have ended."""
    total = 0
    for file in Path("/proc").glob(files):
        with suppress(FileNotFoundError, ProcessLookupError):
            total += sum(map(int, re.findall(rf"^{field}:\s+(\d+)", file.read_text("utf-8", "replace"), re.MULTILINE)))
    return total


def expect_room(folder: Path, needed: float, what: str, way_out: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > 0.9 * free:
        raise InvalidInput(f"{what} {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free: {way_out}")


def multiply(folder: Path, count: int) -> Snapshot:
    """Gives an exported backbone of one tenant `count` tenants. Returns their snapshot.

    Every tenant has an adapter and a head of its own. Their numbers are pieces of one random pool that begin at different
    places: to draw all of them would take longer than a measurement, with ten thousand tenants of BERT-base's size.
    """
    exported = Snapshot.load(folder / Backbone.TENANTS)
    (first,) = exported.tenants
    layouts = {name: Layout.of(record.layout) for name in ("head", "adapter") if (record := getattr(first, name)) is not None}
    needed = count * sum(layout.weight_bytes for layout in layouts.values())
    expect_room(folder, needed, f"{count} tenants need", "set TMPDIR to a folder with more space")
    pieces = {name: _pieces(layout, count) for name, layout in layouts.items()}

    def tenant(number: int) -> Tenant:
        own = {name: pieces[name][number].view(layout.layers, -1) for name, layout in layouts.items()}
        packed = records.pack({name: (layout, layout.unpack(own[name])) for name, layout in layouts.items()}, {})
        return replace(first, id=tenant_id(number), uid=number + 1, **records.write(folder / Backbone.RECORDS, packed))

    tenants = [tenant(number) for number in tqdm(range(count), "tenants")]
    return Snapshot(exported.generation, exported.branches, tenants, exported.export, exported.ledger)


def _pieces(layout: Layout, count: int) -> Tensor:
    """Returns views of one pool: tenants x the numbers of a record."""
    size = layout.layers * layout.layer_size
    numbers = torch.randn(size + APART * count, generator=torch.Generator().manual_seed(layout.size)) * 0.02
    return numbers.to(layout.torch_dtype).unfold(0, size, APART)

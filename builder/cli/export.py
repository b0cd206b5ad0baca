"""`hplm export`: writes a store as Triton model folders."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from builder.cli.options import open_store
from hplm.cli.options import Device, Json, StoreFolder
from hplm.errors import InvalidInput
from hplm.options import ENGINE_DTYPES

Engine = Annotated[str, Parameter(choices=("auto", *ENGINE_DTYPES))]


def export(
    *, store: StoreFolder, repository: Path = Path("model_repository"),
    dtype: Engine = "auto", device: Device = "auto", deadline_ms: float = 0, admin: bool = False, threads: int = 0,
    slots: int = 256, policy: str = "timely", no_admission: bool = False, packing: str = "packed", batch_tokens: int = 4096,
    replace_: Annotated[bool, Parameter("--replace")] = False, settings_only: bool = False,
    max_sequences: int = 32, cache_tokens: int = 16_384, queue_texts: int = 8192, hot: int = 0, preload: bool = False,
    json: Json = False,
) -> dict:  # fmt: skip
    """Write a store as Triton model folders.

    They are `<backbone>-lookup`, `<backbone>-upper`, the alias `hplm`, and `<backbone>`, which of a decoder stands alone.

    :param repository: model repository to write
    :param replace_: write all files anew, also over another export of this backbone, after its servers have stopped
    :param settings_only: write the configurations alone; the tables and tenants of the export stay
    :param dtype: precision of the engine; auto measures whether int8 is faster on this machine's CPU, and close enough
    :param deadline_ms: deadline of requests that name none; 0: no deadline
    :param admin: also write the model `<backbone>-admin`, which changes tenants and domains
    :param threads: CPU threads of the engine; 0: all cores
    :param slots: tenants to keep on the device
    :param policy: policy that chooses the next batch
    :param no_admission: accept requests even if they cannot be answered in time
    :param packing: how the texts of a batch lie in tensors: end to end, or by a registered packing
    :param batch_tokens: most tokens in a batch
    :param max_sequences: decoders: most sequences that run together
    :param cache_tokens: decoders: tokens whose keys and values have room in memory
    :param queue_texts: most texts that may wait
    :param hot: rows of each table to read into memory before serving, or to keep on the GPU
    :param preload: read the tables into memory before serving
    """
    from builder.publish.export import check_export, export, refuse_mixture
    from builder.publish.model_configs import ServingOptions
    from builder.publish.precision import measure_eight_bits
    from hplm.engine.engine import resolve_device
    from hplm.model.products import available

    options = ServingOptions(
        dtype=dtype, device=device, threads=threads, slots=slots, policy=policy, admission=not no_admission, packing=packing,
        batch_tokens=batch_tokens, max_sequences=max_sequences, cache_tokens=cache_tokens, queue_texts=queue_texts,
        deadline_ms=deadline_ms, plot_hot=hot, plot_preload=preload, admin=admin,
    )  # fmt: skip
    if replace_ and settings_only:
        raise InvalidInput("--replace and --settings-only exclude each other: give one of them")
    eight_bits, opened = None, open_store(store)
    refuse_mixture(repository, opened.config.name)
    check_export(opened, options)
    on_cpu = device in ("auto", "cpu") and resolve_device(device).type == "cpu"
    if dtype == "auto" and on_cpu and available() and not opened.config.is_decoder:
        eight_bits = measure_eight_bits(opened, threads)
        options = replace(options, auto_on_cpu=eight_bits.auto, auto_because=str(eight_bits))
    exported = export(opened, repository, options, replace_, settings_only)
    print(f"exported backbone {exported.backbone}: {exported.tenants} tenants, {exported.tables} tables")
    if settings_only:
        print("only configurations were written: restart the servers, or load the models again")
    elif not exported.is_new:
        print("the same content was exported before: only configurations were written; --replace writes all files")
    if eight_bits is not None:
        print(f"{eight_bits}: on a CPU it serves in {eight_bits.other if eight_bits.auto == 'auto' else eight_bits.auto}")
    print(f"next: hplm serve --repository {repository}")
    return {
        "backbone": exported.backbone,
        "tenants": exported.tenants,
        "tables": exported.tables,
        "repository": str(repository),
        "int8": eight_bits and {**asdict(eight_bits), "auto": eight_bits.auto},
    }

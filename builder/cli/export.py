"""`hplm export`: writes a store as Triton model folders."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from builder.cli.options import open_store
from hplm.cli.options import Device, StoreFolder, named_values
from hplm.errors import InvalidInput
from hplm.options import ENGINE_DTYPES

Engine = Annotated[str, Parameter(choices=("auto", *ENGINE_DTYPES))]


def export(
    *, store: StoreFolder, repository: Path = Path("model_repository"), dtype: Engine = "auto", device: Device = "auto",
    parameters: tuple[str, ...] = (), replace_: Annotated[bool, Parameter("--replace")] = False, settings_only: bool = False,
) -> dict:  # fmt: skip
    """Write a store as Triton model folders.

    They are `<backbone>-lookup`, `<backbone>-upper`, the alias `hplm`, and `<backbone>`, which of a decoder stands alone.

    :param repository: model repository to write
    :param dtype: precision of the engine; auto measures whether int8 is faster on this machine's CPU, and close enough
    :param parameters: NAME=VALUE: parameters of the exported config.pbtxt, such as deadline_ms=500 slots=512: docs/operating.md
    :param replace_: write all files anew, also over another export of this backbone, after its servers have stopped
    :param settings_only: write the configurations alone; the tables and tenants of the export stay
    """
    from builder.publish.export import check_export, export, refuse_mixture
    from builder.publish.model_configs import ServingOptions
    from builder.publish.precision import measure_eight_bits
    from hplm.engine.engine import resolve_device
    from hplm.model.products import available

    if replace_ and settings_only:
        raise InvalidInput("--replace and --settings-only exclude each other: give one of them")
    eight_bits, opened = None, open_store(store)
    options = ServingOptions(dtype=dtype, device=device)
    options = options.with_parameters(named_values(parameters), opened.config)
    refuse_mixture(repository, opened.config.name)
    check_export(opened, options)
    on_cpu = device in ("auto", "cpu") and resolve_device(device).type == "cpu"
    if dtype == "auto" and on_cpu and available() and not opened.config.is_decoder:
        eight_bits = measure_eight_bits(opened, options.threads)
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

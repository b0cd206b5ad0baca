"""`hplm export`: writes a store as Triton model folders."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from hplm.options import CACHES, ENGINE_DTYPES


def register(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export",
        help="write a store as Triton model folders",
        description="Write <backbone>, <backbone>-lookup, <backbone>-upper and the alias hplm into a model repository; "
        "of a decoder, <backbone> alone.",
    )
    export.add_argument("--store", type=Path, required=True, help="folder that `hplm build` wrote")
    export.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="model repository to write (default: %(default)s)"
    )
    text = "write all files anew, also over another export of this backbone, after its servers have stopped"
    export.add_argument("--replace", action="store_true", help=text)
    export.add_argument(
        "--dtype", choices=("auto", *ENGINE_DTYPES), default="auto",
        help="precision of the engine; auto measures whether int8 is faster on this machine's CPU, and close enough "
        "(default: %(default)s)",
    )  # fmt: skip
    export.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    export.add_argument("--threads", type=int, default=0, help="CPU threads of the engine; 0: all cores")
    export.add_argument("--slots", type=int, default=256, help="tenants to keep on the device (default: %(default)s)")
    export.add_argument("--policy", default="timely", help="policy that chooses the next batch (default: %(default)s)")
    export.add_argument("--no-admission", action="store_true", help="accept requests even if they cannot be answered in time")
    export.add_argument(
        "--packing",
        default="packed",
        help="how the texts of a batch lie in tensors: end to end, or by a registered packing (default: %(default)s)",
    )
    export.add_argument("--batch-tokens", type=int, default=4096, help="most tokens in a batch (default: %(default)s)")
    export.add_argument(
        "--max-sequences",
        "--seats",
        type=int,
        default=32,
        help="decoders: most sequences that run together (default: %(default)s)",
    )
    export.add_argument(
        "--cache-tokens", type=int, default=16_384, metavar="N",
        help="decoders: tokens whose keys and values have room in memory (default: %(default)s)",
    )  # fmt: skip
    export.add_argument("--cache", choices=CACHES, help=argparse.SUPPRESS)  # of earlier commands; it changes nothing
    export.add_argument("--queue-texts", type=int, default=8192, help="most texts that may wait (default: %(default)s)")
    export.add_argument("--deadline-ms", type=float, default=0, help="deadline of requests that name none; 0: no deadline")
    export.add_argument(
        "--hot",
        type=int,
        default=0,
        metavar="N",
        help="rows of each table to lock in memory, or to keep on the GPU (default: 0)",
    )
    export.add_argument("--preload", action="store_true", help="read the tables into memory before serving")
    export.add_argument(
        "--admin", action="store_true", help="also write the model <backbone>-admin, which changes tenants and domains"
    )
    export.add_argument("--json", action="store_true", help="end with one line of JSON")
    export.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict:
    from builder.publish.export import check_export, export, refuse_mixture
    from builder.publish.model_configs import ServingOptions
    from builder.publish.precision import measure_eight_bits
    from builder.store.store import Store
    from hplm.engine.engine import resolve_device
    from hplm.model.eightbit import available

    options = ServingOptions(
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        slots=args.slots,
        policy=args.policy,
        admission=not args.no_admission,
        packing=args.packing,
        batch_tokens=args.batch_tokens,
        max_sequences=args.max_sequences,
        cache_tokens=args.cache_tokens,
        queue_texts=args.queue_texts,
        deadline_ms=args.deadline_ms,
        plot_hot=args.hot,
        plot_preload=args.preload,
        admin=args.admin,
    )
    eight_bits, store = None, Store(args.store)
    refuse_mixture(args.repository, store.config.name)
    check_export(store, options)
    on_cpu = args.device in ("auto", "cpu") and resolve_device(args.device).type == "cpu"
    if args.dtype == "auto" and on_cpu and available() and not store.config.is_decoder:
        eight_bits = measure_eight_bits(store, args.threads)
        options = replace(options, auto_on_cpu=eight_bits.auto, auto_because=str(eight_bits))
    exported = export(store, args.repository, options, args.replace)
    if not args.json:
        print(f"exported backbone {exported.backbone}: {exported.tenants} tenants, {exported.tables} tables")
        if not exported.is_new:
            print("the same content was exported before: only configurations were written; --replace writes all files")
        if eight_bits is not None:
            print(f"{eight_bits}: on a CPU it serves in {eight_bits.other if eight_bits.auto == 'auto' else eight_bits.auto}")
        print(f"next: hplm serve --repository {args.repository}")
    return {
        "backbone": exported.backbone,
        "tenants": exported.tenants,
        "tables": exported.tables,
        "repository": str(args.repository),
        "int8": eight_bits and {**asdict(eight_bits), "auto": eight_bits.auto},
    }

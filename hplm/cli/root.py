"""`hplm root`: packs a store's root into one file, and makes a store from such a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hplm.cli.tables import table_built


def register(commands: argparse._SubParsersAction) -> None:
    root = commands.add_parser("root", help="copy a root to another machine or store, as one file")
    actions = root.add_subparsers(dest="action", required=True, metavar="ACTION")
    _action(actions, "pack", run_pack, "write a store's root to one file, with checksums", "the store to pack the root of")
    unpack = _action(actions, "unpack", run_unpack, "make a store from a packed root", "new folder for the store")
    unpack.add_argument("--name", help="name of the backbone (default: as packed)")
    unpack.add_argument(
        "--model", help="original model: Hugging Face name or folder, if it lies elsewhere here (default: as packed)"
    )


def _action(actions: argparse._SubParsersAction, name: str, run: object, text: str, store: str) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    action.add_argument("--store", type=Path, required=True, help=store)
    action.add_argument("file", type=Path, metavar="FILE", help="the packed root, a tar archive")
    action.add_argument("--json", action="store_true", help="end with one line of JSON")
    action.set_defaults(run=run)
    return action


def run_pack(args: argparse.Namespace) -> dict:
    from builder.store.pack import pack_root
    from builder.store.store import Store

    manifest = pack_root(Store(args.store), args.file)
    size = args.file.stat().st_size
    if not args.json:
        print(f"root of backbone {manifest['backbone']}: {args.file}, {size / 1e6:,.1f} MB")
    return {"backbone": manifest["backbone"], "version": manifest["version"], "file": str(args.file), "bytes": size}


def run_unpack(args: argparse.Namespace) -> dict:
    from builder.store.pack import unpack_root

    store = unpack_root(args.file, args.store, args.name, args.model)
    if Path(store.model).is_absolute() and not Path(store.model).exists():
        print(
            f"the original model, {store.model}, is not here: domains that learn and comparisons with it need it; name it "
            "with --model",
            file=sys.stderr,
        )
    return table_built(args, store.table("root", store.latest("root")), f"root of backbone {store.config.name}")

"""`hplm verify`: checks all stored files against their checksums."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli.served import check_state

if TYPE_CHECKING:
    from hplm.tenants.verification import Part


def register(commands: argparse._SubParsersAction) -> None:
    verify = commands.add_parser(
        "verify",
        help="check all stored files against their checksums",
        description="Read a store or model repository. Check tables, records and weights against their checksums, and that "
        "other files can be read. Exit with 1 if something is broken, after listing all of it.",
    )
    what = verify.add_mutually_exclusive_group(required=True)
    what.add_argument("--store", type=Path, help="folder that `hplm build` wrote")
    what.add_argument("--repository", type=Path, help="folder that `hplm export` wrote")
    verify.add_argument("--state", type=Path, help="with --repository: the folder of `hplm serve --state`")
    verify.add_argument("--json", action="store_true", help="end with one line of JSON")
    verify.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict:
    from tqdm import tqdm

    from hplm.errors import HplmError, InvalidInput

    if args.state is not None and args.repository is None:
        raise InvalidInput("--state needs --repository: give both")
    check_state(args.state)
    parts = _parts(args)
    size, broken = sum(part.size for part in parts), []
    with tqdm(total=size, desc="verifying", unit="B", unit_scale=True) as bar:
        for part in parts:
            before = bar.n
            broken += part.check(part.path, bar.update)
            bar.update(part.size - (bar.n - before))
    if broken:
        raise HplmError("\n".join([f"{len(broken)} broken:", *(f"  {message}" for message in broken)]))
    kinds = [part.kind for part in parts]
    result = {"tables": kinds.count("table"), "records": kinds.count("record"), "files": kinds.count("file"), "gb": size / 1e9}
    if not args.json:
        print(f"ok: {result['tables']} tables, {result['records']} records, {result['gb']:,.3g} GB")
    return result


def _parts(args: argparse.Namespace) -> list[Part]:
    if args.store is not None:
        from builder.store.verification import store_parts

        return store_parts(args.store)
    from hplm.tenants.verification import repository_parts

    return repository_parts(args.repository, args.state)

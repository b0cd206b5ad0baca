"""`hplm verify`: checks all stored files against their checksums."""

from __future__ import annotations

from pathlib import Path

from hplm.cli.options import Json
from hplm.cli.served import check_state
from hplm.errors import HplmError, InvalidInput


def verify(*, store: Path | None = None, repository: Path | None = None, state: Path | None = None, json: Json = False) -> dict:
    """Check all stored files: tables, records and weights against their checksums, and that others can be read.

    Triton checks a config.pbtxt when it loads the model. Exit with 1 if something is broken, after listing all of it.

    :param store: folder that `hplm build` wrote
    :param repository: folder that `hplm export` wrote
    :param state: with --repository: the folder of `hplm serve --state`
    """
    from tqdm import tqdm

    if state is not None and repository is None:
        raise InvalidInput("--state needs --repository: give both")
    check_state(state)
    if store is not None and repository is None:
        from builder.store.verification import store_parts

        parts = store_parts(store)
    elif repository is not None and store is None:
        from hplm.tenants.verification import repository_parts

        parts = repository_parts(repository, state)
    else:
        raise InvalidInput("give either --store or --repository")
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
    print(f"ok: {result['tables']} tables, {result['records']} records, {result['gb']:,.3g} GB")
    return result

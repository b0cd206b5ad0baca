"""`hplm root`: packs a store's root into one file, and makes a store from such a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from hplm.cli.options import Json, StoreFolder, about, open_store
from hplm.cli.tables import table_built

Packed = Annotated[Path, about("the packed root, a tar archive")]


def pack(file: Packed, /, *, store: StoreFolder, json: Json = False) -> dict:
    """Write a store's root to one file, with checksums."""
    from builder.store.pack import pack_root

    manifest = pack_root(open_store(store), file)
    size = file.stat().st_size
    print(f"root of backbone {manifest['backbone']}: {file}, {size / 1e6:,.1f} MB")
    return {"backbone": manifest["backbone"], "version": manifest["version"], "file": str(file), "bytes": size}


def unpack(file: Packed, /, *, store: Path, name: str | None = None, model: str | None = None, json: Json = False) -> dict:
    """Make a store from a packed root.

    :param store: new folder for the store
    :param name: name of the backbone (default: as packed)
    :param model: original model: Hugging Face name or folder, if it lies elsewhere here (default: as packed)
    """
    from builder.store.pack import unpack_root

    made = unpack_root(file, store, name, model)
    if Path(made.model).is_absolute() and not Path(made.model).exists():
        print(
            f"the original model, {made.model}, is not here: domains that learn and comparisons with it need it; name it "
            "with --model",
            file=sys.stderr,
        )
    return table_built(made, made.table("root", made.latest("root")), f"root of backbone {made.config.name}")

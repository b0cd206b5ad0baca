"""Writes a repository of random weights, for load tests to which only the shapes matter.

    python -m testing.random_repository --to random

Its tenants are `tenant-0` to `tenant-9`; of a hundred, `tenant-00` to `tenant-99`. The vocabulary is made up: words of real
texts are unknown to it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError, InvalidInput
from hplm.options import AUTO, ENGINE_DTYPES
from testing.random_store import SIZES, random_store, random_tenants

RANK = 32
LABELS = 4


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="testing.random_repository", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--to", type=Path, required=True, metavar="DIR", help="model repository to write; empty or not there yet")
    add("--size", choices=tuple(SIZES), default="minilm", help="shape and name of the backbone (default: %(default)s)")
    add("--tenants", type=int, default=10, metavar="N", help="how many tenants (default: %(default)s)")
    add("--dtype", choices=(AUTO, *ENGINE_DTYPES), default=AUTO, help="precision of the engine (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        write(given.to, given.size, given.tenants, given.dtype)
    except (HplmError, OSError) as error:
        sys.exit(str(error))
    print(f"{given.to} has the backbone {given.size} with {given.tenants} tenants")


def write(repository: Path, size: str, tenants: int, dtype: str) -> None:
    if tenants < 1:
        raise InvalidInput(f"--tenants {tenants}: give 1 or more")
    if repository.exists() and any(repository.iterdir()):
        raise InvalidInput(f"{repository} is not empty: name another folder with --to")
    with tempfile.TemporaryDirectory(prefix="hplm-random-") as scratch:
        store = random_store(Path(scratch) / "store", SIZES[size], random_tenants(tenants, RANK, LABELS))
        export(store, repository, ServingOptions(dtype=dtype))


if __name__ == "__main__":
    main()

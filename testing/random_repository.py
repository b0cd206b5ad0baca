"""Writes a repository of random weights, for load tests to which only the shapes matter.

    python -m testing.random_repository --to random

Its tenants are `tenant-0` to `tenant-9`; of a hundred, `tenant-00` to `tenant-99`. The vocabulary is made up: words of real
texts are unknown to it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError, InvalidInput
from hplm.model.config import BackboneConfig
from hplm.options import AUTO, ENGINE_DTYPES
from hplm.tenants.embedding import Embedding
from testing.random_store import SIZES, random_store, random_tenants, tokenizer_json

RANK, LABELS = 32, 4


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
        if given.tenants < 1:
            raise InvalidInput(f"--tenants {given.tenants}: give 1 or more")
        if given.to.exists() and any(given.to.iterdir()):
            raise InvalidInput(f"{given.to} is not empty: name another folder with --to")
        write(given.to, SIZES[given.size], given.tenants, ServingOptions(dtype=given.dtype))
    except (HplmError, OSError) as error:
        sys.exit(str(error))
    print(f"{given.to} has the backbone {given.size} with {given.tenants} tenants")


def write(
    repository: Path, config: BackboneConfig, tenants: int, options: ServingOptions, rank: int = RANK, vectors: bool = False
) -> Path:
    """Returns the folder of the backbone. `rank`: of the tenants' adapters. `vectors`: they answer with vectors."""
    with tempfile.TemporaryDirectory(prefix="hplm-random-") as scratch:
        made = random_tenants(tenants, rank, LABELS)
        if config.is_decoder:
            made = [replace(one, task="generate", labels=[], adapter="lora", places=("query", "value")) for one in made]
        elif vectors:
            made = [replace(one, task="embed", labels=[], embedding=Embedding(config.hidden)) for one in made]
        store = random_store(Path(scratch) / "store", config, made, tokenizer=tokenizer_json)
        return repository / export(store, repository, options).backbone


if __name__ == "__main__":
    main()

"""The branches of a store: the root and the domains, each in versions that have a lower stack and a table."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from builder.store.resumable import PLAN, digest_of, read_json, replaced, write_json
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.weights import load_stack, load_weights, save_weights, stored
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.keys import KeySpace
from hplm.plot.meta import TableMeta, TableSpec
from hplm.plot.table import Branch, Table

UPPER = "upper.safetensors"
CORPUS = "corpus.json"


def check_root(folder: Path) -> None:
    """Refuses a store whose root is still being built."""
    if not (folder / "plot" / "root" / "1").exists() and (folder / "building" / "root-1" / PLAN).exists():
        raise InvalidInput(
            f"the root of {folder} is not finished: wait for its build, or, if it was interrupted, give the same `hplm build "
            "root` command again"
        )


class Branches:
    """The part of a `Store` that reads and writes its branches and the upper stack that all share. It may have no root yet."""

    config: BackboneConfig  # once the store is there

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def work_folder(self, domain: str, version: int) -> Path:
        """Returns the folder in which a branch is built."""
        return self.folder / "building" / f"{domain}-{version}"

    def table_folder(self, domain: str, version: int) -> Path:
        return self.folder / "plot" / domain / str(version)

    def counts_folder(self, domain: str, version: int) -> Path:
        return self.folder / "counts" / domain / str(version)

    def corpus(self, domain: str, version: int) -> list[Path]:
        """Returns the files whose n-grams a branch has."""
        return [Path(name) for name in self._origin(domain, version).get("files", ())]

    def plan(self, domain: str, version: int) -> dict[str, Any] | None:
        """Returns the plan by which a branch was built; None if another machine has built it."""
        return self._origin(domain, version).get("plan")

    def save_origin(self, domain: str, version: int, files: Sequence[Path], plan: dict[str, Any]) -> None:
        """Saves the names of the files and the plan. Call it before the branch has its table."""
        (folder := self.counts_folder(domain, version)).mkdir(parents=True, exist_ok=True)
        write_json(folder / CORPUS, {"files": [str(file.absolute()) for file in files], "plan": plan})

    def _origin(self, domain: str, version: int) -> dict[str, Any]:
        path = self.counts_folder(domain, version) / CORPUS
        return read_json(path) if path.exists() else {}

    def explained(self) -> float | None:
        """Returns the share of the variance of the original's output that the root explains; None if it is not known here."""
        return self.learned("root", 1).get("explained")

    def learned(self, domain: str, version: int) -> dict[str, Any]:
        """Returns the report of how a branch's lower layers have learned; nothing if they have not, or elsewhere."""
        path = self.learning(domain, version)
        return read_json(path) if path.exists() else {}

    def learning(self, domain: str, version: int) -> Path:
        """Returns the report of how a branch's lower layers have learned."""
        return self.folder / "lower" / f"{domain}-{version}.json"

    @property
    def space(self) -> KeySpace:
        return KeySpace(self.config.vocabulary, self.config.window)

    def domains(self) -> list[tuple[str, int]]:
        """Returns every table: the root first, then by name and version."""
        folders = [meta.parent for meta in self.folder.glob("plot/*/*/meta.json")]
        found = [(folder.parent.name, int(folder.name)) for folder in folders if folder.name.isdecimal()]
        return sorted(found, key=lambda domain: (domain[0] != "root", domain))

    def versions(self, domain: str) -> list[int]:
        """Returns the versions of a domain, oldest first."""
        return [version for name, version in self.domains() if name == domain]

    def latest(self, domain: str) -> int:
        if not (versions := self.versions(domain)):
            check_root(self.folder)
            known = ", ".join(sorted({name for name, _ in self.domains()})) or "none yet"
            raise InvalidInput(f"domain {domain!r} is not in {self.folder}: known are {known}")
        return versions[-1]

    def table(self, domain: str, version: int) -> Table:
        lower = self._below(domain, version) if self.config.is_decoder else None
        return Table(self.table_folder(domain, version), lower)

    def meta(self, domain: str, version: int) -> TableMeta:
        """Returns a table's description, even if the rest of the table is broken."""
        return TableMeta.load(self.table_folder(domain, version) / "meta.json")

    def chain_digest(self, domain: str, version: int) -> str:
        """Returns a digest of a table and those it falls back to: a branch built again may have the same name and version."""
        steps = self.chain(domain, version)
        return digest_of(*(self.table_folder(*step) / name for step in steps for name in ("meta.json", "checksums")))

    def branches(self) -> list[Branch]:
        return assign_addresses(self.table(*domain) for domain in self.domains())

    def chain(self, domain: str, version: int) -> list[tuple[str, int]]:
        """Returns the branch and those it falls back to, up to the root."""
        steps, parent = [(domain, version)], self.meta(domain, version).parent_branch
        while parent is not None:
            steps.append(parent)
            parent = self.meta(*parent).parent_branch
        return steps

    def forest(self, domain: str, version: int) -> Forest:
        """Opens the tables that the branch needs and no others: another domain's table may be broken."""
        return Forest(
            [self.folder / "plot"], assign_addresses(self.table(*step) for step in reversed(self.chain(domain, version)))
        )

    def upper(self) -> UpperStack:
        return load_stack(UpperStack, self.config, self.folder / UPPER)

    def save_upper(self, upper: UpperStack) -> None:
        replace_weights(self.folder / UPPER, stored(upper))

    def lower(self, domain: str, version: int) -> LowerStack:
        return load_stack(LowerStack, self.config, self._below(domain, version))

    def has_lower(self, domain: str, version: int) -> bool:
        return self._below(domain, version).exists()

    def lower_files(self, domain: str, version: int) -> list[Path]:
        """Returns the files of a branch's lower stack, of which some may not exist."""
        suffixes = (".safetensors", ".json", ".png", ".head.safetensors")
        return [self._below(domain, version, suffix) for suffix in suffixes]

    def save_lower(self, domain: str, version: int, lower: LowerStack) -> None:
        replace_weights(self._below(domain, version), stored(lower))

    def masked_head(self, domain: str, version: int) -> dict[str, Tensor] | None:
        """Returns the head that guesses masked words on the branch's lower stack; None if the branch has none."""
        path = self._below(domain, version, ".head.safetensors")
        return load_weights(path) if path.exists() else None

    def save_masked_head(self, domain: str, version: int, weights: dict[str, Tensor]) -> None:
        """Saves the head. Call it before `save_lower`: a branch with a lower stack counts as adapted."""
        replace_weights(self._below(domain, version, ".head.safetensors"), weights)

    def remove_branch(self, domain: str, version: int) -> None:
        """Removes a finished or unfinished branch. The table goes last, so an interrupted removal can be repeated."""
        remove_folder(self.counts_folder(domain, version))
        for path in self.lower_files(domain, version):
            path.unlink(missing_ok=True)
        self.remove_begun_table(domain, version)
        remove_folder(self.table_folder(domain, version))

    def remove_begun_table(self, domain: str, version: int) -> None:
        table = self.table_folder(domain, version)
        remove_folder(table.with_name(table.name + ".writing"))

    def _below(self, domain: str, version: int, suffix: str = ".safetensors") -> Path:
        return self.folder / "lower" / f"{domain}-{version}{suffix}"


def remove_folder(folder: Path, going: Path | None = None) -> None:
    """Renames the folder before it removes it, so that a folder with this name is always complete."""
    going = going or folder.with_name(folder.name + ".removed")
    if going.exists():  # an earlier removal was interrupted
        shutil.rmtree(going)
    if folder.exists():
        going.parent.mkdir(exist_ok=True)
        folder.rename(going)
        shutil.rmtree(going)
    with suppress(OSError):  # it is not empty, or another process removed it
        going.parent.rmdir()


def table_spec(
    config: BackboneConfig, domain: str, version: int, parent: tuple[str, int] | None, dtype: str, corpus_tokens: int
) -> TableSpec:
    return TableSpec(
        domain=domain,
        version=version,
        parent=parent[0] if parent else None,
        parent_version=parent[1] if parent else None,
        n=config.window.n,
        causal=config.window.causal,
        vocabulary=config.vocabulary,
        hidden=config.hidden,
        dtype=dtype,
        corpus_tokens=corpus_tokens,
    )


def replace_weights(path: Path, weights: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as temporary:
        save_weights(weights, temporary)

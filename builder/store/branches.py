"""The branches of a store: the root and the domains, each in versions that have a table."""

from __future__ import annotations

from pathlib import Path

from builder.store.resumable import digest_of
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.plot.branch import Branch
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table, TableMeta, TableSpec


class Branches:
    """The part of a `Store` that reads its branches."""

    folder: Path
    config: BackboneConfig

    def table_folder(self, domain: str, version: int) -> Path:
        return self.folder / "plot" / domain / str(version)

    def counts_folder(self, domain: str, version: int) -> Path:
        return self.folder / "counts" / domain / str(version)

    @property
    def space(self) -> KeySpace:
        return KeySpace(self.config.vocabulary, self.config.window)

    def table_spec(
        self, domain: str, version: int, parent: tuple[str, int] | None, dtype: str, corpus_tokens: int
    ) -> TableSpec:
        return table_spec(self.config, domain, version, parent, dtype, corpus_tokens)

    def domains(self) -> list[tuple[str, int]]:
        """Returns every table: the root first, then by name and version."""
        folders = [meta.parent for meta in self.folder.glob("plot/*/*/meta.json")]
        found = [(folder.parent.name, int(folder.name)) for folder in folders if folder.name.isdecimal()]
        return sorted(found, key=lambda domain: (domain[0] != "root", domain))

    def latest(self, domain: str) -> int:
        versions = [version for name, version in self.domains() if name == domain]
        if not versions:
            known = ", ".join(sorted({name for name, _ in self.domains()})) or "none yet"
            raise InvalidInput(f"domain {domain!r} is not in {self.folder}: known are {known}")
        return max(versions)

    def table(self, domain: str, version: int) -> Table:
        return Table(self.table_folder(domain, version))

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

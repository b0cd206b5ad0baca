"""Bad files in formats that a server reads: model folders, live states and their backups."""

from __future__ import annotations

import shutil

import numpy as np

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.adapters.bank import Bank, Record
from hplm.engine.backbone import Backbone
from hplm.engine.lookup import Lookup
from hplm.plot.table import Table
from hplm.tenants.backup import back_up, restore
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state import State
from hplm.tenants.verification import repository_parts
from testing.random_store import random_stack
from testing.toy import WORDS, make_toy
from tests.fuzz.files import Files, verified
from tests.fuzz.target import accepts


class ModelFolder(Files):
    """The model folder that `hplm export` wrote. The server reads it at its start, and answers from it."""

    kept = (
        ("backbone.json", b"null"),
        ("backbone.json", b'{"format": 2}'),
        ("tokenizer.json", b"null"),
        ("tokenizer.json", b"\x9f"),
    )
    weight = 0.1

    def make(self, folder):
        toy = make_toy(folder / "toy")
        random_stack(toy.store, "small", 1, seed=1)
        export(toy.store, toy.repository, ServingOptions())
        return toy.folder

    def names(self):
        mine = ("stacks/", "plot/bio/")
        return [name for name in super().names() if name.startswith(mine) or "/" not in name or name.endswith(".bank")]

    def read(self):
        backbone = Backbone(self.folder, prepare=lambda table: table.index)
        backbone.upper()
        accepts(backbone.stacks, self.work, broken=True)
        lookup, view = Lookup(backbone), backbone.view
        for tenant in view.snapshot.tenants:
            for record in tenant.records():
                bank = view.banks.get(record.bank)
                if bank is None:  # it is broken: a text that needs it says so
                    continue
                accepts(lambda bank=bank, record=record: bank.read(record, bank.layout.empty()), self.work, broken=True)
            accepts(lambda tenant=tenant: _answered(lookup, view, tenant), self.work, broken=True)


def _answered(lookup, view, tenant):
    found = lookup.resolve(view, tenant, [" ".join(WORDS[:5])], [WORDS[1]])
    for table, base in view.forest.tables_of(found.addresses):
        own = found.addresses - base
        own = own[(own >= 0) & (own < table.size)]
        if not len(table.rows.touch(own)):
            table.rows.vectors(int(own[0]))


class Tables(Files):
    """One table."""

    kept = (("meta.json", b"null"), ("meta.json", b'{"format": 2, "index": {}}'))
    weight = 0.5

    def make(self, folder):
        return make_toy(folder / "toy").folder / "plot" / "bio" / "1"

    def read(self):
        table = Table(self.folder)
        keys = table.index.by_row()
        table.find(keys[:9])
        table.rows.touch(np.arange(min(table.size, 9)))
        table.verify()


class Banks(Files):
    """One bank."""

    def make(self, folder):
        return make_toy(folder / "toy").folder / "adapters"

    def names(self):
        return super().names()[:2]

    def read(self):
        for name in self.good:
            bank = Bank(self.folder / name)
            for index in range(min(bank.records, 4)):
                uid, version = bank.owner(index)
                accepts(lambda bank=bank, index=index, uid=uid, version=version: bank.weights(Record("", index, uid, version)),
                        self.work, broken=True)  # fmt: skip
            list(bank.headers())
            list(bank.broken(lambda size: None))


class LiveState(Files):
    """A live state: its managers and its readers."""

    kept = (("snapshots/2", b"null"), ("snapshots/2", b'{"format": 3}'))
    weight = 0.2

    def make(self, folder):
        self.repository = make_toy(folder / "toy").repository
        manager = Manager(self.repository / "toy" / "1", folder / "state")
        manager.limit("acme", rate=5.0)
        manager.add_key("city")
        return folder / "state" / "toy"

    def names(self):
        return ["CURRENT", "registry.sqlite", "snapshots/2"]

    def read(self):
        accepts(lambda: Backbone(self.repository / "toy" / "1", self.work / "state"), self.work, broken=True)
        manager = Manager(self.repository / "toy" / "1", self.work / "state")
        for use in (manager.current, manager.registry.audit, self._verified):
            accepts(use, self.work, broken=True)

    def _verified(self):
        for part in repository_parts(self.repository, self.work / "state"):
            if part.path.is_relative_to(self.folder):
                verified(part)

    def check(self, case):
        super().check(case)
        for leftover in self.folder.glob("registry.sqlite-*"):
            leftover.unlink()


class Changes(LiveState):
    """A change of a live state whose files are bad."""

    weight = 0.3

    def read(self):
        kept = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        try:
            Manager(self.repository / "toy" / "1", self.work / "state").limit("dune", in_flight=3)
        finally:
            for path in [path for path in self.folder.rglob("*") if path.is_file()]:
                path.unlink()
            for path, data in kept.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


class Backups(Files):
    """A backup of a live state."""

    kept = (("backup.json", b"null"), ("backup.json", b'{"format": 1}'))

    def make(self, folder):
        model = make_toy(folder / "toy").folder
        manager = Manager(model, folder / "state")
        manager.limit("acme", rate=5.0)
        self.exported = Snapshot.load(model / "tenants.json")
        back_up(manager, folder / "backup")
        return folder / "backup"

    def names(self):
        return ["backup.json"]

    def read(self):
        try:
            restore(self.folder, self.exported, State(self.work / "restored"))
        finally:
            shutil.rmtree(self.work / "restored", ignore_errors=True)


TARGETS = {
    "model-folder": ModelFolder,
    "table": Tables,
    "bank": Banks,
    "state": LiveState,
    "change": Changes,
    "backup": Backups,
}

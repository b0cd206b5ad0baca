"""Bad files and messages in formats that hPLM writes itself. Reading them works, or fails with an error that says why."""

from __future__ import annotations

import json
import shutil
import socket
import struct
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from builder.cascade import selection
from builder.cascade.candidates import Candidate
from builder.cascade.profile import Profile, read_profile, save_profile
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.levels import ladder_of, levels_of, save_ladder
from builder.store.links import link_of, save_link
from builder.store.pack import MANIFEST, pack_root, unpack_root
from builder.store.store import Store
from builder.store.verification import store_parts
from hplm.adapters.bank import Bank, Record
from hplm.engine.backbone import Backbone
from hplm.engine.channel import Asks, Channel, Replies
from hplm.engine.lookup import Lookup
from hplm.errors import NoTenant
from hplm.levels.plan import Plan, Step
from hplm.placement.cluster import Cluster
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile as PlacementProfile
from hplm.placement.units import units_of
from hplm.plot.table import Table
from hplm.tenants.backup import back_up, restore
from hplm.tenants.link import Link
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state import State
from hplm.tenants.ticket import Ticket
from hplm.tenants.verification import Part, repository_parts
from testing.random_store import random_level, random_stack
from testing.toy import WORDS, make_toy
from tests.fuzz.files import Files
from tests.fuzz.mutations import dumped, mutated, mutated_json
from tests.fuzz.target import Found, Target, accepts
from tests.placement.profiles import cluster_of, profile_of, write_cluster


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
                _verified(part)

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


class Stores(Files):
    """A store, as builds, `hplm export` and `hplm verify` read it."""

    weight = 0.02

    def make(self, folder):
        store = make_toy(folder / "toy").store
        random_stack(store, "small", 1, seed=1)
        acme, plan = store.tenant("acme"), Plan((Step(0, 0.9, 4.0, 0.7, reached=1.0), Step(1, weight=0.6, reached=0.4)))
        random_level(store, acme, "small", 0.3, seed=1)
        levels = [{"name": name, "layers": 1, "score": 0.9, "mean_ms": 1.0} for name in ("small", "full")]
        asked = {"levels": [["small", "0", None], ["full", "1", None]]}
        report = {"metric": "accuracy", "levels": levels}
        save_profile(store, acme, Profile([Candidate(plan, 0.9, 0.01, 0.02, 0.1)], asked, report))
        save_ladder(store, acme, [plan])
        save_link(store, acme, Link("large", "acme", 1, Plan((Step(1, 0.9, 4.0, 0.7), Step(2, weight=0.6)))), {})
        return store.folder

    def names(self):
        return [name for name in super().names() if name.endswith((".json", ".safetensors"))]

    def read(self):
        def open_parts():
            store = Store(self.folder)
            store.users()
            store.branches()
            for tenant in store.tenants():
                accepts(
                    lambda tenant=tenant: (tenant.adapter_layout(store.config), tenant.head_layout(store.config)),
                    self.work,
                    True,
                )
                accepts(lambda tenant=tenant: store.tenant_weights(tenant), self.work, broken=True)
                accepts(lambda tenant=tenant: _levels(store, tenant), self.work, broken=True)
                accepts(lambda tenant=tenant: ladder_of(store, tenant), self.work, broken=True)
                accepts(lambda tenant=tenant: link_of(store, tenant), self.work, broken=True)
                accepts(lambda tenant=tenant: _selected(store, tenant), self.work, broken=True)
            for read in (store.tokenizer, store.upper, lambda: store.lower("root", 1), lambda: store.stack("small")):
                accepts(read, self.work, broken=True)

        accepts(open_parts, self.work, broken=True)
        for part in store_parts(self.folder):
            if not part.path.name.startswith("values"):
                _verified(part)


def _levels(store, tenant):
    for level in levels_of(store, tenant):
        level.head_layout, level.adapter_layout  # noqa: B018
        level.weights()
        level.report()


def _selected(store, tenant):
    """Reads a tenant's profile, and selects from it."""
    if (profile := read_profile(store, tenant)) is not None:
        for one in selection.select(profile.front, selection.Target(accuracy=0), profile.own):
            selection.reported(one, profile.names)


def _verified(part: Part) -> None:
    for said in part.check(part.path, lambda size: None):
        if len(said.encode("utf-8", "surrogateescape")) > 2048:
            raise Found(f"a message of {len(said):,} characters: {said[:100]!r}")


class Placements(Files):
    """The files of placement: a cluster, a profile and a placement, which is checked if it can be read."""

    def make(self, folder):
        profile, cluster = profile_of(), cluster_of()
        units = units_of(profile)
        group = Group("one", "m0", ("cpu:0",), 1, {"bert": ((0, 2),)}, tuple(unit.name for unit in units))
        write_cluster(cluster, folder / "cluster.json")
        profile.write(folder / "profile.json")
        Placement.of((group,), units, cluster, profile).write(folder / "placement.json")
        return folder

    def read(self):
        cluster, profile = Cluster.read(self.folder / "cluster.json"), PlacementProfile.read(self.folder / "profile.json")
        placement = Placement.read(self.folder / "placement.json")
        accepts(lambda: placement.check(cluster, profile), self.work)
        replace(placement, cluster=cluster.digest, profile=profile.digest).check(cluster, profile)


class PackedRoots(Files):
    """A root packed into a file."""

    weight = 0.2

    def make(self, folder):
        store = make_toy(folder / "toy").store
        (folder / "packed").mkdir()
        for path in (store.table_folder("root", 1) / "values", store.folder / "upper.safetensors"):
            assert path.exists()
        store.counts_folder("root", 1).mkdir(parents=True, exist_ok=True)
        pack_root(store, folder / "packed" / "root.tar")
        return folder / "packed"

    def cases(self):
        data = self.good["root.tar"]
        end = data.index(b"}\n\0") + 2
        manifest = json.loads(data[512:end])
        assert MANIFEST.encode() in data[:100]

        def with_manifest(text: bytes) -> bytes:
            room = -(-(end - 512) // 512) * 512
            return data[:512] + text[: end - 512].ljust(end - 512, b" ").ljust(room, b"\0") + data[512 + room :]

        shorter = json.dumps(manifest)
        return st.tuples(
            st.just("root.tar"), st.one_of(mutated(data), mutated_json(json.loads(shorter)).map(dumped).map(with_manifest))
        )

    def read(self):
        into = self.work / "unpacked"
        try:
            unpack_root(self.folder / "root.tar", into)
        finally:
            shutil.rmtree(into, ignore_errors=True)
            if {path.name for path in self.work.iterdir()} - {"toy", "packed"}:
                raise Found(f"files beside the store: {list(self.work.iterdir())}")


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


class Tickets(Target):
    """Tickets that this server has not signed."""

    weight = 5

    def __init__(self, folder):
        self.secret = b"s" * 32
        self.good = Ticket(2**63, 3, 4, 5, 6, 7, -8, 9).sign(self.secret, b"found" * 40)

    def cases(self):
        return mutated(self.good).filter(lambda data: data != self.good)

    def check(self, case):
        try:
            Ticket.check(case, self.secret)
        except NoTenant:
            return
        raise Found("a forged ticket is valid")


class Messages(Target):
    """A channel whose other end was killed in the middle of a message, and which cuts messages anywhere."""

    weight = 3

    def __init__(self, folder):
        self.sent = [Asks([]), Replies([])]

    def cases(self):
        return st.tuples(st.integers(0, 200), st.lists(st.integers(1, 40), max_size=6))

    def check(self, case):
        end, pieces = case
        mine, other = socket.socketpair()
        try:
            sender = Channel(mine.detach())
            for message in self.sent:
                sender.send(message)
            sender.close()
            stream = other.recv(1 << 16)
            near, far = socket.socketpair()
            receiver = Channel(near.detach())
            left = stream[:end]
            for size in pieces:
                far.sendall(left[:size])
                left = left[size:]
            far.sendall(left)
            far.close()
            got = []
            while (message := receiver.receive()) is not None:
                got.append(message)
            receiver.close()
        finally:
            other.close()
        whole, ends = 0, 0
        for _ in self.sent:
            ends += 8 + struct.unpack_from("<Q", stream, ends)[0]
            whole += ends <= end
        if got != self.sent[:whole]:
            raise Found(f"{got} of the first {end} of {len(stream)} bytes")


TARGETS = {
    "model-folder": ModelFolder,
    "table": Tables,
    "bank": Banks,
    "state": LiveState,
    "change": Changes,
    "store": Stores,
    "placement": Placements,
    "packed-root": PackedRoots,
    "backup": Backups,
    "ticket": Tickets,
    "channel": Messages,
}

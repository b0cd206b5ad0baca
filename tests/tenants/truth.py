"""What a live state must say: a model of its changes, and a world of managers and readers that is compared with it.

Only `Change.make`, `World` and `seen` know how a state is changed and read today.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import torch

from builder.publish.export import export
from builder.publish.live import add_domain, update_domain
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.adapters.heads import sized
from hplm.calibration import Calibration
from hplm.engine.backbone import Backbone
from hplm.errors import HplmError
from hplm.lookup.views import View
from hplm.registry.folder import LOCK, WRITING, Folder
from hplm.registry.pointer import KEPT_SNAPSHOTS, begin
from hplm.registry.store import StoredObject
from hplm.tenants.exits import Exits
from hplm.tenants.knowledge import TenantKnowledge
from hplm.tenants.manager import Manager
from hplm.tenants.registry_writer import Busy, needed_by
from hplm.tenants.state_folder import StateFolder
from testing.random_store import random_exit_knowledge, random_knowledge, random_store, random_table, random_tenant
from testing.toy import CONFIG
from tests.support.faulty_store import Cut, FaultyStore
from tests.support.wait import Clock

ROOT, LABELS = ("root", 1), ["x", "y", "z"]
KINDS = (("bottleneck", ()), ("lora", ("query", "ffn_in")))


@dataclass(frozen=True)
class Known:
    """A version of a tenant, as a request meets it."""

    version: int
    weights: bytes
    branch: tuple[str, int] = ROOT
    calibration: Calibration | None = None
    exits: Exits | None = None  # without their record
    keys: tuple[Any, ...] = ()  # ANY: one that nobody was told
    rate: float = 0.0


Seen = tuple[dict[str, Known], set[tuple[str, int]]]  # tenants and domains


@dataclass
class Content:
    tenants: dict[str, Known]
    domains: set[tuple[str, int]]
    before: dict[str, Known] = field(default_factory=dict)  # to which a rollback returns
    last: dict[str, int] = field(default_factory=dict)  # the last version that a tenant has used

    def put(self, name: str, version: int, **learned: Any) -> None:
        """Adds a tenant or its next version, which keeps its keys and limits."""
        old = self.tenants.get(name)
        if old is not None:
            self.before[name] = old
            version = max(version, self.last.get(name, old.version) + 1)
        self.last[name] = version
        settings = {"keys": old.keys, "rate": old.rate} if old is not None else {}
        self.tenants[name] = Known(version, **learned, **settings)

    def roll_back(self, name: str) -> None:
        now = self.tenants[name]
        self.tenants[name] = replace(self.before.pop(name), keys=now.keys, rate=now.rate)

    def close(self) -> None:
        """Forgets tables that nobody needs, after a change of domains."""
        needed = {known.branch for known in (*self.tenants.values(), *self.before.values())}
        self.domains &= needed | {ROOT} | set({domain: (domain, version) for domain, version in sorted(self.domains)}.values())


class Export:
    """A served backbone with the tenants `zero` of the root and `one` of a domain."""

    def __init__(self, folder: Path) -> None:
        tenants = [
            TenantVersion(name, 1, domain, 1, "classify", LABELS, 4) for name, domain in (("zero", "root"), ("one", "bio"))
        ]
        self.store = random_store(folder / "store", CONFIG, tenants, ("bio",), corpus_tokens=500, spread=0.3)
        self.repository = folder / "repository"
        export(self.store, self.repository, ServingOptions())
        for domain, version, parent in (("bio", 2, ROOT), ("law", 1, ROOT)):
            random_table(self.store, domain, version, parent, 300, seed=7)
        random_tenant(self.store, replace(tenants[1], version=2, domain_version=2), 0.3, seed=9)
        self.tuned = weights_of(self.store.knowledge(self.store.tenant("one")))  # on the second version of its domain
        self.knowledge = [learned(seed) for seed in range(4)]
        self.content = Content(*seen(self.read(None)))

    def read(self, state: Path | None, **more: Any) -> Backbone:
        return Backbone(self.repository / "toy/1", state, **more)


def learned(seed: int) -> TenantKnowledge:
    """Returns a version without more, with exits, with a calibration, and with both."""
    kind, places = KINDS[seed % 2]
    file = TenantVersion("any", 1, "root", 1, "classify", LABELS, 4, kind, places)
    calibration = Calibration(temperature=1.5) if seed > 1 else None
    exits = random_exit_knowledge(CONFIG, file, seed=seed) if seed % 2 else None
    return replace(random_knowledge(CONFIG, file, 0.3, seed), calibration=calibration, exits=exits)


def weights_of(knowledge: TenantKnowledge) -> bytes:
    assert knowledge.head is not None and knowledge.adapter is not None
    return as_bytes(knowledge.head[1], knowledge.adapter[1], knowledge.exits.heads if knowledge.exits is not None else ())


def as_bytes(head: Any, adapter: Any, exits: Any = ()) -> bytes:
    """Returns the weights as a record has them. Heads there are larger than their labels."""
    layers = [*(sized(one, len(LABELS)) for one in (head, *exits)), *adapter]
    parts = [layer[name] for layer in layers for name in sorted(layer)]
    return b"".join(part.to(torch.float16).contiguous().numpy().tobytes() for part in parts)


def seen(backbone: Backbone, view: View | None = None) -> Seen:
    """Reads what a view serves, to the last byte of a tenant's weights."""
    view = view or backbone.view
    assert not view.forest.failures()
    tenants: dict[str, Known] = {}
    for tenant in view.snapshot.tenants:
        assert tenant.head is not None and tenant.adapter is not None
        (head,), adapter = (backbone.records.weights(record) for record in (tenant.head, tenant.adapter))
        exits, heads = tenant.exits, ()
        if exits is not None and exits.record is not None:
            exits, heads = replace(exits, record=None), backbone.records.weights(exits.record)
        assert view.forest.chain(*tenant.branch_id).links
        more = {"calibration": tenant.calibration, "exits": exits, "keys": tenant.keys, "rate": tenant.rate}
        tenants[tenant.id] = Known(tenant.version, as_bytes(head, adapter, heads), tenant.branch_id, **more)
    return tenants, {branch.id for branch in view.snapshot.branches}


def expect_same(found: Seen, wanted: Seen, where: str) -> None:
    """Fails with the tenants and their fields, or the domains, that differ."""
    (tenants, domains), (expected, its) = found, wanted
    wrong = [f"{name} is served" for name in tenants.keys() - expected.keys()]
    wrong += [f"{name} is not served" for name in expected.keys() - tenants.keys()]
    for name in tenants.keys() & expected.keys():
        mine, other = vars(tenants[name]), vars(expected[name])
        wrong += [f"{name} has {one} {mine[one]!r:.60}, not {other[one]!r:.60}" for one in mine if mine[one] != other[one]]
    wrong += [f"domain {domain} is wrong" for domain in sorted(domains ^ its)]
    assert not wrong, f"{where}: {'; '.join(wrong)}"


class Change(NamedTuple):
    kind: str
    tenant: str = ""
    number: int = 0  # of what it has learned, or a rate

    def make(self, manager: Manager, export: Export) -> Any:
        name = self.tenant
        return {
            "add": lambda: manager.add(name, export.knowledge[self.number]),
            "update": lambda: manager.update(name, export.knowledge[self.number]),
            "roll back": lambda: manager.roll_back(name),
            "delete": lambda: manager.delete(name),
            "add key": lambda: manager.add_key(name)[1],
            "revoke key": lambda: manager.revoke_key(name, next(key.id for key in manager.current().find(name).keys)),
            "limit": lambda: manager.limit(name, rate=float(self.number)),
            "add domain": lambda: add_domain(manager, export.store, "law"),
            "delete domain": lambda: manager.delete_domain("law"),
            "update domain": lambda: update_domain(manager, export.store, "bio"),
            "roll back domain": lambda: manager.roll_back_domain("bio"),
        }[self.kind]()

    def after(self, before: Content, export: Export, key: Any = ANY) -> Content | None:
        """Returns what is served after this change, or None if it must be refused."""
        new, kind, name = Content(dict(before.tenants), set(before.domains), dict(before.before), dict(before.last)), *self[:2]
        now = new.tenants.get(name)
        if name and (now is None) != (kind == "add"):
            return None
        if kind in ("add", "update"):
            given = export.knowledge[self.number]
            exits = given.exits.exits if given.exits is not None else None
            new.put(name, 1, weights=weights_of(given), calibration=given.calibration, exits=exits)
        elif kind == "roll back":
            if name not in new.before:
                return None
            new.roll_back(name)
        elif kind == "delete":
            for known in (new.tenants, new.before, new.last):
                known.pop(name, None)
        elif now is not None and kind == "add key":
            new.tenants[name] = replace(now, keys=(*now.keys, key))
        elif now is not None and kind == "revoke key":
            if len(now.keys) < 2:
                return None
            new.tenants[name] = replace(now, keys=now.keys[1:])
        elif now is not None and kind == "limit":
            new.tenants[name] = replace(now, rate=float(self.number))
        elif kind in ("add domain", "delete domain"):
            if (("law", 1) in new.domains) != (kind == "delete domain"):
                return None
            new.domains ^= {("law", 1)}
            new.close()
        elif kind == "update domain":
            one = new.tenants.get("one")
            goes = one is not None and one.branch == ("bio", 1)
            if not goes and ("bio", 2) in new.domains:
                return None
            new.domains.add(("bio", 2))
            if goes:
                new.put("one", 2, weights=export.tuned, branch=("bio", 2))
            new.close()
        elif kind == "roll back domain":
            branches = [known["one"].branch for known in (new.before, new.tenants) if "one" in known]
            if branches != [("bio", 1), ("bio", 2)]:
                return None
            new.roll_back("one")
            new.close()
        return new


class OfLongAgo(Folder):
    """All its objects were written long ago."""

    def names(self, folder: str) -> Iterator[StoredObject]:
        return (found._replace(written=0.0) for found in super().names(folder))


class World:
    """A state with managers and a reader, in a folder whose calls can be cut."""

    def __init__(self, export: Export, folder: Path, like: World | None = None) -> None:
        """`like`: another world, whose state this one begins with."""
        self.export, self.state, self.live = export, folder / "state", StateFolder(folder / "state/toy")
        self.store, self.clock = FaultyStore(folder, decides="CURRENT"), Clock(1e9)
        if like is not None:
            shutil.copytree(like.state, self.state)
        begin(Folder(self.live.folder))
        self.now = export.content if like is None else like.now
        self.reader = export.read(self.state, clock=self.clock)
        self.held = self.reader.view, seen(self.reader)  # of a request on its way
        self.made: list[Change] = []  # of those that have met

    def manager(self) -> Manager:
        return Manager.open(self.export.repository, self.state, clock=self.clock)

    def change(self, change: Change) -> None:
        """Makes a change, which must succeed, be on disk, and leave nothing else behind."""
        with self.store.at(0, FaultyStore.fail):
            key = change.make(self.manager(), self.export)
        self.check_synced(change)
        self.check(change.after(self.now, self.export, key))
        names = {str(path.relative_to(self.live.folder)) for path in self.live.folder.rglob("*")}
        left = [name for name in names if name.endswith(WRITING) or name.startswith(".clock")]
        snapshot = self.manager().current()
        needed = needed_by(snapshot) | {name for name, _ in snapshot.ledger.resting}
        here = {f"plot/{path.parent.name}/{path.name}/" for path in self.live.tables.glob("*/*") if any(path.iterdir())}
        left += here.union(f"records/{path.name}" for path in self.live.records.glob("*")) - needed
        assert not left, f"nobody needs {left}"
        assert len(list(self.live.snapshots.glob("*"))) <= KEPT_SNAPSHOTS

    def interrupt(self, change: Change, call: int, harm: Callable[..., None]) -> bool:
        """Makes a change that is harmed at a call. It is complete or undone. Returns whether it has so many calls."""
        before, after, manager = self.now, change.after(self.now, self.export), self.manager()
        try:
            with self.store.at(call, harm):
                change.make(manager, self.export)
            allowed = [after]
            self.check_synced(change)
        except Cut:
            allowed = [before, after]
        except (HplmError, OSError):
            allowed = [before]  # else its result, such as a key, is lost
        self.check(*allowed)
        later = self.manager()
        later.registry.store = OfLongAgo(self.live.folder)
        later.compact()  # what was left is removed as soon as it can be of no change on its way
        return self.store.calls >= call

    def meet(self, change: Change, call: int, other: Change) -> bool:
        """Makes a change, and another one at a call of it. Returns whether it has so many calls."""
        refused: list[tuple[Change, HplmError]] = []

        def attempt(one: Change) -> None:
            try:
                one.make(self.manager(), self.export)
                self.made.append(one)
            except HplmError as error:
                refused.append((one, error))

        with self.store.at(call, lambda *_: attempt(other)):
            attempt(change)
        content = self.now
        for one in self.made:
            content = one.after(content, self.export)
            assert content is not None, f"{one} was not refused"
        for one, error in refused:
            assert isinstance(error, Busy) or one.after(content, self.export) is None, f"{one} was refused: {error}"
        self.check(content)
        return self.store.calls >= call

    def check_synced(self, change: Change) -> None:
        unsynced = [name for name in self.store.unsynced if not name.endswith(LOCK)]  # it is empty
        assert not unsynced, f"after {change} a power cut would take {unsynced}"

    def check(self, *allowed: Content | None) -> None:
        """A new reader and one that goes on see one of these, and a request on its way what it began with."""
        self.reader.refresh()
        found = seen(self.reader)
        known = [one for one in allowed if one is not None]
        self.now = next((one for one in known if (one.tenants, one.domains) == found), known[-1])
        for backbone in (self.reader, self.export.read(self.state)):
            expect_same(seen(backbone), (self.now.tenants, self.now.domains), "a reader")
        expect_same(seen(self.reader, self.held[0]), self.held[1], "a request on its way")

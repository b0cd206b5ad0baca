"""All that reads files: good files for each reader, and how it reads them."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zstandard

from builder.importing.adapters import read_folder
from builder.importing.foreign import check_shapes, upper_adapter
from builder.importing.heads import chosen_labels
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from builder.store.verification import store_parts
from builder.tasks.examples import read_corpus
from builder.tasks.tasks import training_task
from hplm.adapters.layout import head_layout
from hplm.engine.backbone import Backbone
from hplm.errors import Broken, HplmError, Internal
from hplm.lookup.lookup import Lookup
from hplm.placement.cluster import Cluster
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile
from hplm.placement.units import units_of
from hplm.registry.folder import Folder
from hplm.tenants.backup import back_up, restore
from hplm.tenants.manager import Manager
from hplm.tenants.registry_writer import Registry
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.verification import CheckedPath, repository_parts
from loadtest.traffic import read_recorded
from testing.toy import CONFIG, WORDS, Toy
from tests.placement.problems import cluster_of, profile_of, write_cluster
from tests.refusals.mutations import dumped

SAVED = Path(__file__).parents[1] / "builder" / "importing" / "fixtures"
Made = tuple[Path, Callable[[str], object]]  # a folder of good files, and what reads it when one of them is bad


class Taken:
    """Takes refusals: errors of ours, no longer than 1 KB, that name the file."""

    def __init__(self, work: Path, by_users: bool, toy: Toy) -> None:
        """`toy`: an exported backbone, of which a reader gets a copy."""
        self.work, self.by_users = work, by_users
        self._toy = toy
        self.folder = work
        self.bad: str | None = None
        self.refusals: list[str] = []

    def __call__(self, read: Callable[[], object]) -> None:
        try:
            read()
        except HplmError as error:
            self.refused(str(error))
            assert not self.by_users or not isinstance(error, Broken | Internal), f"a file of a user is called broken: {error}"

    def refused(self, said: str) -> None:
        assert self.bad is not None, f"a good file is refused: {said}"
        said = said.replace(str(self.work), "")
        assert len(said.encode("utf-8", "surrogatepass")) <= 1024, f"a message of {len(said):,} characters: {said[:100]!r}"
        named = any(part in said for part in (*self.bad.split("/"), f"/{self.folder.name}"))
        assert named, f"{self.bad} is refused without its name: {said}"
        self.refusals.append(said)

    def own_toy(self) -> Toy:
        folder = shutil.copytree(self._toy.store.folder.parent, self.work / "toy")
        return Toy(Store(folder / "store"), folder / "repository")

    def verify(self, parts: list[CheckedPath], name: str) -> None:
        """Checks what may have changed with this file. Other tables have not, and take long."""
        for part in parts:
            if part.kind != "table" or (self.folder / name).is_relative_to(part.path):
                for said in part.check(part.path, lambda size: None):
                    self.refused(f"{part.path}: {said}")


def model_folder(work: Path, take: Taken) -> Made:
    toy = take.own_toy()
    export(toy.store, toy.repository, ServingOptions())

    def read_backbone() -> None:
        backbone = Backbone(toy.folder, prepare=lambda table: table.index)
        backbone.upper()
        lookup, view = Lookup(backbone), backbone.view
        for tenant in view.snapshot.tenants:
            for record in tenant.records():
                take(lambda record=record: backbone.records.weights(record))
            take(lambda tenant=tenant: answered(lookup, view, tenant))

    def read(name: str) -> None:
        take(read_backbone)
        take.verify(repository_parts(toy.repository, None), name)

    return toy.folder, read


def answered(lookup: Lookup, view: Any, tenant: Any) -> None:
    found = lookup.resolve(view, tenant, [" ".join(WORDS[:5])], [WORDS[1]])
    for table, base in view.forest.tables_of(found.addresses):
        own = found.addresses - base
        own = own[(own >= 0) & (own < table.size)]
        if not len(table.rows.touch(own)):
            table.rows.vectors(int(own[0]))


def state(work: Path, take: Taken) -> Made:
    model, known = _state(work, take)

    def read(name: str) -> None:
        take(lambda: Backbone(model, work / "state"))
        manager = Manager(model, work / "state")
        for use in (manager.current, manager.registry.audit):
            take(use)
        parts = repository_parts(model.parents[1], work / "state")
        take.verify([part for part in parts if part.path.is_relative_to(known)], name)
        take(lambda: manager.limit("dune", in_flight=3))

    return known, read


def _state(work: Path, take: Taken) -> tuple[Path, Path]:
    model = take.own_toy().folder
    manager = Manager(model, work / "state")
    manager.registry.begin()
    manager.limit("acme", rate=5.0)
    manager.add_key("city")
    return model, work / "state" / "toy"


def backup(work: Path, take: Taken) -> Made:
    model, _ = _state(work, take)
    exported = Snapshot.load(model / "tenants.json")
    back_up(Manager(model, work / "state"), work / "backup")

    def read(name: str) -> None:
        shutil.rmtree(work / "restored", ignore_errors=True)
        restore(work / "backup", Registry(Folder(work / "restored"), exported), accept_old_keys=True)

    return work / "backup", read


def store(work: Path, take: Taken) -> Made:
    made = take.own_toy().store

    def read(name: str) -> None:
        store = Store(made.folder)
        store.users()
        store.branches()
        for tenant in store.tenants():
            take(lambda tenant=tenant: (tenant.adapter_layout(store.config), tenant.head_layout(store.config)))
            take(lambda tenant=tenant: store.tenant_weights(tenant))
        for part in (store.tokenizer, store.upper, lambda: store.lower("root", 1)):
            take(part)

    def read_and_verify(name: str) -> None:
        take(lambda: read(name))
        take.verify(store_parts(made.folder), name)

    return made.folder, read_and_verify


def placement(work: Path, take: Taken) -> Made:
    profile, cluster, folder = profile_of(), cluster_of(), work / "placed"
    folder.mkdir()
    units = units_of(profile)
    group = Group("one", "m0", ("cpu:0",), 1, {"bert": ((0, 2),)}, tuple(unit.name for unit in units))
    write_cluster(cluster, folder / "cluster.json")
    profile.write(folder / "profile.json")
    Placement.of((group,), units, cluster, profile).write(folder / "placement.json")

    def read(name: str) -> None:
        cluster, profile = Cluster.read(folder / "cluster.json"), Profile.read(folder / "profile.json")
        placement = Placement.read(folder / "placement.json")
        replace(placement, cluster=cluster.digest, profile=profile.digest).check(cluster, profile)

    return folder, read


def imported(work: Path, take: Taken) -> Made:
    for name in ("peft-tag-patterns", "peft-pooler"):
        shutil.copytree(SAVED / name, work / "saved" / name, ignore=shutil.ignore_patterns("expected.json"))
    (work / "config.json").write_text('{"model_type": "bert"}')  # of the model below the adapters

    def read(name: str) -> None:
        adapter = read_folder(work / "saved" / name.partition("/")[0], str(work), None)
        head = adapter.head
        assert head is not None
        rows = len(head.weights["weight"])
        chosen_labels(head.task, None if head.labels else [str(row) for row in range(rows)], head.labels, rows, head.source)
        check_shapes(head.weights, head_layout(CONFIG, rows, head.function), CONFIG, head.source, "the head")
        upper_adapter(adapter, adapter.halves(CONFIG)[1], CONFIG)

    return work / "saved", read


LABELLED: dict[str, list[dict[str, Any]]] = {
    "classify.jsonl": [{"text": "a b", "label": "x"}, {"text": "c", "text_pair": "d", "label": 1}],
    "multilabel.jsonl": [{"text": "a b", "labels": ["x", "y"]}, {"text": "c", "labels": []}],
    "regress.jsonl": [{"text": "a b", "label": 1.5}, {"text": "c", "label": -1}],
    "tag.jsonl": [{"tokens": ["a", "b"], "tags": ["O", "X"]}],
    "span.jsonl": [{"text": "q", "text_pair": "a b", "answers": {"text": ["b"], "answer_start": [2]}}],
}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def labelled(work: Path, take: Taken) -> Made:
    folder = written(work / "data", {name: b"\n".join(map(dumped, rows)) for name, rows in LABELLED.items()})
    return folder, lambda name: training_task(Path(name).stem).read(folder / name)


def corpus(work: Path, take: Taken) -> Made:
    lines = [" ".join(WORDS[at : at + 7]) for at in range(40)]
    plain = {"a.txt": "\n".join(lines).encode(), "b.jsonl": b"\n".join(dumped({"text": line}) for line in lines)}
    packed = {f"{name}.gz": gzip.compress(data) for name, data in plain.items()}
    packed |= {f"{name}.zst": zstandard.compress(data) for name, data in plain.items()}
    folder = written(work / "data", plain | packed)
    return folder, lambda name: list(read_corpus([folder / name]))


def trace(work: Path, take: Taken) -> Made:
    row = {"arrival": 1.5, "tokens": 9, "tenant": "x", "deadline_ms": 80, "priority": 1}
    folder = written(work / "data", {"trace.jsonl": dumped(row) + b"\n" + dumped({"arrival": 2, "tokens": 3})})
    return folder, lambda name: read_recorded(folder / name, ["x"])


@dataclass(frozen=True)
class Reader:
    make: Callable[[Path, Taken], Made]
    examples: int
    kept: tuple[tuple[str, bytes], ...] = ()  # they once broke something, and are refused
    only: str = ""  # a pattern of the files that are replaced
    by_users: bool = False  # wrote the files


READERS = {
    "model folder": Reader(model_folder, 25, (("backbone.json", b"null"), ("backbone.json", b'{"format": 2}'),
        ("tokenizer.json", b"null"), ("tokenizer.json", b"\x9f"), ("plot/bio/1/meta.json", b"null"),
        ("plot/bio/1/meta.json", b'{"format": 2, "index": {}}')), r"[^/]+|plot/bio/.*|records/.*"),
    "state": Reader(state, 20, (("CURRENT", b"null"), ("CURRENT", b'{"format": 3}')), "CURRENT|snapshots/2-.*"),
    "backup": Reader(backup, 50, (("backup.json", b"null"), ("backup.json", b'{"format": 1}')), "backup.json"),
    "store": Reader(store, 6, tuple(("store.json", data) for data in (b"null", b"{", b"[]", b'{"format": 2}')),
        r".*\.(json|safetensors)"),
    "placement": Reader(placement, 60, by_users=True),
    "import": Reader(imported, 25, (("peft-pooler/adapter_model.safetensors", b""),
        ("peft-tag-patterns/adapter_model.bin", b".")), by_users=True),
    "labelled": Reader(labelled, 100, by_users=True),
    "corpus": Reader(corpus, 100, by_users=True),
    "trace": Reader(trace, 80, (("trace.jsonl", b'{"arrival": [0], "tokens": 3}'), ("trace.jsonl", b"\x82"),
                                ("trace.jsonl", b'{"arrival": 1, "tokens": 10000000000000000000000}')), by_users=True),
}  # fmt: skip

"""Bad files and data, in this process. Reading them works, or fails with an error that names what is wrong."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import struct
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
import zstandard
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from builder.importing.found import halves, records, storable, upper_layout
from builder.importing.heads import check_head, chosen_labels
from builder.importing.tenant import read_folder
from builder.store.pack import MANIFEST, pack_root, unpack_root
from builder.store.store import Store
from builder.store.verification import store_parts
from builder.training.labelled import read_answers, read_corpus, read_label, read_labelled, read_labels, read_tags, read_value
from hplm.adapters.bank import PAGE, Bank, Record
from hplm.engine.backbone import Backbone
from hplm.engine.channel import Asks, Channel, Replies
from hplm.engine.lookup import Lookup
from hplm.engine.settings import check
from hplm.errors import NoTenant
from hplm.plot.table import Table
from hplm.scheduling.policy import policy
from hplm.scheduling.simulation.arrivals import read_trace
from hplm.tenants.backup import back_up, restore
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state import State
from hplm.tenants.ticket import Ticket
from hplm.tenants.verification import Part, repository_parts
from loadtest.recorded import read_recorded
from loadtest.traffic import lengths_of
from testing.toy import CONFIG, WORDS, make_toy
from tests.fuzz.mutations import WORDS as ODD
from tests.fuzz.mutations import dumped, mutated, mutated_json, values
from tests.fuzz.target import Found, Target, accepts

FIXTURES = Path(__file__).parents[1] / "builder" / "importing" / "fixtures"


class Files(Target):
    """A folder of good files, of which a case replaces one."""

    def __init__(self, folder: Path) -> None:
        self.work = folder
        self.folder = self.make(folder)
        self.good = {name: (self.folder / name).read_bytes() for name in self.names()}

    @abstractmethod
    def make(self, folder: Path) -> Path:
        """Makes the good files, and returns their folder."""

    def names(self) -> list[str]:
        """Returns the files that cases replace."""
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())

    @abstractmethod
    def read(self) -> object:
        """Reads the files as the product does."""

    def cases(self):
        return st.sampled_from(sorted(self.good)).flatmap(lambda name: st.tuples(st.just(name), bad(name, self.good[name])))

    def check(self, case):
        name, data = case
        path = self.folder / name
        path.unlink()  # the file before may still be mapped
        path.write_bytes(data)
        try:
            accepts(self.read, self.work, broken=True)
        finally:
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.good[name])


def bad(name: str, data: bytes) -> SearchStrategy[bytes]:
    """Returns bad versions of a file. What is JSON in it stays JSON in most of them."""
    if name.endswith(".safetensors"):
        size = struct.unpack_from("<Q", data)[0]
        header = mutated_json(json.loads(data[8 : 8 + size])).map(dumped)
        return st.one_of(header.map(lambda text: struct.pack("<Q", len(text)) + text + data[8 + size :]), mutated(data))
    if name.endswith(".bank"):
        header = mutated_json(json.loads(data[:PAGE].rstrip(b"\0"))).map(dumped)
        return st.one_of(header.map(lambda text: text[:PAGE].ljust(PAGE, b"\0") + data[PAGE:]), mutated(data))
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in data.splitlines()]
        several = st.lists(st.one_of(st.sampled_from(lines), st.sampled_from(lines).flatmap(mutated_json)), max_size=3)
        return st.one_of(several.map(lambda some: b"\n".join(map(dumped, some))), mutated(data))
    try:
        good = json.loads(data)
    except ValueError:
        return mutated(data)
    changed = mutated_json(good)
    return st.one_of(changed.map(dumped), changed.map(dumped), mutated(data))


class ModelFolder(Files):
    """What `hplm export` wrote: the server reads it at its start, and answers from it."""

    kept = (
        ("backbone.json", b"null"),
        ("backbone.json", b'{"format": 2}'),
        ("tokenizer.json", b"null"),
        ("tokenizer.json", b"\x9f"),
    )
    weight = 0.1

    def make(self, folder):
        return make_toy(folder / "toy").folder

    def names(self):
        return [name for name in super().names() if "bio" in name or "/" not in name or name.endswith(".bank")]

    def read(self):
        backbone = Backbone(self.folder, prepare=lambda table: table.index)
        backbone.upper()
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
        return make_toy(folder / "toy").store.folder

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
            for read in (store.tokenizer, store.upper, lambda: store.lower("root", 1)):
                accepts(read, self.work, broken=True)

        accepts(open_parts, self.work, broken=True)
        for part in store_parts(self.folder):
            if not part.path.name.startswith("values"):
                _verified(part)


def _verified(part: Part) -> None:
    for said in part.check(part.path, lambda size: None):
        if len(said.encode("utf-8", "surrogateescape")) > 2048:
            raise Found(f"a message of {len(said):,} characters: {said[:100]!r}")


class Imports(Files):
    """Folders that `peft` and `adapters` saved."""

    kept = (("adapters-lora-tag/adapter.safetensors", b""), ("adapters-double/pytorch_adapter.bin", b"."))
    weight = 0.3

    def make(self, folder):
        for name in ("peft-tag-patterns", "adapters-double", "adapters-lora-tag", "adapters-stock-head"):
            shutil.copytree(FIXTURES / name, folder / "saved" / name)
        return folder / "saved"

    def names(self):
        return [name for name in super().names() if not name.endswith("expected.json")]

    def check(self, case):
        self.tried = case[0].partition("/")[0]
        super().check(case)

    def read(self):
        adapter, head = read_folder(self.folder / self.tried, str(self.work), None)
        config = SIZED
        chosen_labels(head.task, None, head.labels, len(head.weights["weight"]), head.source)
        check_head(head.weights, head.function, config, head.source)
        layout = upper_layout(adapter, halves(adapter, config).upper, config)
        if layout is not None:
            for record in records(halves(adapter, config).upper, layout):
                storable(record, layout, adapter.source)


class Labelled(Files):
    """Labelled data of each task."""

    weight = 2

    READERS: ClassVar = {
        "classify.jsonl": read_label,
        "multilabel.jsonl": read_labels,
        "regress.jsonl": read_value,
        "tag.jsonl": read_tags,
        "span.jsonl": read_answers,
    }

    def make(self, folder):
        lines = {
            "classify.jsonl": [{"text": "a b", "label": "x"}, {"text": "c", "text_pair": "d", "label": 1}],
            "multilabel.jsonl": [{"text": "a b", "labels": ["x", "y"]}, {"text": "c", "labels": []}],
            "regress.jsonl": [{"text": "a b", "label": 1.5}, {"text": "c", "label": -1}],
            "tag.jsonl": [{"tokens": ["a", "b"], "tags": ["O", "X"]}],
            "span.jsonl": [{"text": "q", "text_pair": "a b c", "answers": {"text": ["b"], "answer_start": [2]}}],
        }
        (folder / "data").mkdir()
        for name, some in lines.items():
            (folder / "data" / name).write_bytes(b"\n".join(map(dumped, some)))
        return folder / "data"

    def check(self, case):
        self.tried = case[0]
        super().check(case)

    def read(self):
        read_labelled(self.folder / self.tried, self.READERS[self.tried])


class Corpora(Labelled):
    """Corpora, plain and compressed."""

    weight = 2

    def make(self, folder):
        text = ("\n".join(" ".join(WORDS[i : i + 7]) for i in range(40)) + "\n").encode()
        documents = b"\n".join(dumped({"text": line.decode()}) for line in text.splitlines())
        (folder / "data").mkdir()
        for name, data in (("a.txt", text), ("b.jsonl", documents)):
            (folder / "data" / name).write_bytes(data)
            (folder / "data" / f"{name}.gz").write_bytes(gzip.compress(data))
            (folder / "data" / f"{name}.zst").write_bytes(zstandard.compress(data))
        return folder / "data"

    def read(self):
        for _ in read_corpus([self.folder / self.tried]):
            pass


class Traces(Labelled):
    """Recorded loads."""

    kept = (
        ("trace.jsonl", b'{"arrival": [0], "tokens": 3}'),
        ("trace.jsonl", b"\x82"),
        ("trace.jsonl", b'{"arrival": 1, "tokens": 10000000000000000000000}'),
    )

    def make(self, folder):
        (folder / "data").mkdir()
        rows = [
            {"arrival": 1.5, "tokens": 9, "tenant": "x", "deadline_ms": 80, "priority": 1},
            {"arrival": 2, "text": "a b", "tokens": 3},
        ]
        (folder / "data" / "trace.jsonl").write_bytes(b"\n".join(map(dumped, rows)))
        return folder / "data"

    def read(self):
        accepts(lambda: read_trace(self.folder / self.tried), self.work)
        accepts(lambda: read_recorded(self.folder / self.tried, ["x"]), self.work)


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


class Options(Target):
    """Values of `config.pbtxt` and of the command line."""

    weight = 2

    def __init__(self, folder):
        config = (make_toy(folder).repository / "toy-upper" / "config.pbtxt").read_text()
        found = [line.split('"') for line in config.splitlines() if line.startswith("parameters")]
        self.good = {parts[1]: parts[3] for parts in found} | {"deadline_ms": "0"}
        self.folder = folder

    def cases(self):
        odd = st.one_of(st.sampled_from([*ODD, "0", "-1", "1e400", "nan", "٣", "1_0"]), st.text(max_size=12), values.map(str))
        names = st.sampled_from(["timely", "das", "sjf", "edf", "x"])
        options = st.sampled_from(["eta", "q", "rows", "horizon", "reserve", "in_time"])
        policies = st.builds("{}:{}={}".format, names, options, odd)
        parameters = st.dictionaries(st.sampled_from(sorted(self.good)), odd, min_size=1, max_size=2)
        return st.one_of(
            st.tuples(st.just("parameters"), parameters),
            st.tuples(st.just("policy"), st.one_of(odd, policies)),
            st.tuples(st.just("lengths"), st.one_of(odd, odd.map(lambda value: f"normal:{value},20"))),
        )

    def check(self, case):
        kind, given = case
        read = {
            "parameters": lambda: check({**self.good, **given}),
            "policy": lambda: policy(given),
            "lengths": lambda: lengths_of(given),
        }
        accepts(read[kind], self.folder)


SIZED = CONFIG
TARGETS = {
    "model-folder": ModelFolder,
    "table": Tables,
    "bank": Banks,
    "state": LiveState,
    "change": Changes,
    "store": Stores,
    "import": Imports,
    "labelled": Labelled,
    "corpus": Corpora,
    "trace": Traces,
    "packed-root": PackedRoots,
    "backup": Backups,
    "ticket": Tickets,
    "channel": Messages,
    "options": Options,
}

"""A store, an export and a live state of an earlier commit can be served. Another format is refused with a way out.

`fixtures/before/make.py` says how they were made, and by which commit.
"""

import json
import random
import re
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.learning.limits import Budget
from builder.publish.export import export
from builder.publish.live import add_tenant, update_domain, update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from builder.tables.domain import UpdateOptions
from builder.tables.domain import update_domain as build_version
from hplm.adapters.bank import PAGE
from hplm.cli.main import main
from hplm.engine.backbone import Backbone
from hplm.errors import Broken, HplmError, InvalidInput, NoTenant
from hplm.tenants.backup import back_up, restore
from hplm.tenants.keys import allows
from hplm.tenants.manager import Manager
from hplm.tenants.state import State
from testing.random_store import random_tenant, words
from testing.reference import Reference
from tests.engine.asker import Asker
from tests.support.answers import Comparison
from tests.tasks import expected_logits, same_labels

FIXTURE = Path(__file__).parent / "fixtures" / "before"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text("utf-8"))
VERSIONS = EXPECTED["versions"]  # of each tenant, by place
BACKBONE = "small"


@dataclass(frozen=True)
class Before:
    folder: Path

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def live(self) -> Manager:
        return Manager.open(self.repository, self.state)

    def backbone(self) -> Backbone:
        return Backbone(self.repository / BACKBONE / "1", self.state)

    def reference(self) -> Reference:
        return Reference(self.backbone())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Runs with one thread: tensors are so small that a second thread would only wait, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def before(tmp_path):
    with tarfile.open(FIXTURE / "before.tar.gz") as archive:
        archive.extractall(tmp_path / "before", filter="data")
    return Before(tmp_path / "before")


def exported_again(store, repository):
    export(store, repository, ServingOptions())
    return Reference.open(repository / BACKBONE / "1")


def assert_answers(reference, versions):
    """Checks that the tenants give the answers of these versions."""
    comparison = Comparison()
    for tenant_id, version in versions.items():
        task = reference.backbone.view.snapshot.find(tenant_id).task
        for answer in EXPECTED["answers"][tenant_id][str(version)]:
            asked = answer["text"], tenant_id, answer["pair"]
            reading = reference.answer(*asked)
            assert same_labels(task, reading.labels, answer["labels"])
            assert [list(span) for span in reading.spans] == answer["spans"]
            logits = np.nan_to_num(np.array(answer["logits"], dtype=float))  # None: a word without a token
            found = reference.forward(*asked).numpy()
            comparison.add(tenant_id, found[1:] if task == "span" else found, logits)  # that commit read the passage alone
    comparison.assert_equal("fp32")


def served_versions(reference):
    return {tenant.id: tenant.version for tenant in reference.backbone.view.snapshot.tenants}


def test_an_old_store_can_be_exported_and_answers_as_before(before, tmp_path):
    reference = exported_again(before.store, tmp_path / "fresh")
    assert served_versions(reference) == VERSIONS["store"]
    assert_answers(reference, VERSIONS["store"])


def test_an_old_export_answers_as_before(before):
    reference = Reference.open(before.repository / BACKBONE / "1")
    assert served_versions(reference) == VERSIONS["export"]
    assert_answers(reference, VERSIONS["export"])


def test_an_old_state_answers_as_before(before):
    reference = before.reference()
    assert served_versions(reference) == VERSIONS["state"]
    assert_answers(reference, VERSIONS["state"])
    snapshot = reference.backbone.view.snapshot
    beta = snapshot.find("beta")
    assert (beta.rate, beta.burst, beta.in_flight, beta.deadline_us) == (500, 100, 50, 60_000_000)
    keys = snapshot.find("acme").keys
    assert allows(keys, f"Bearer {EXPECTED['secret']}", time.time()) and not allows(keys, "Bearer another", time.time())
    with pytest.raises(NoTenant):  # deleted from the state
        snapshot.find("echo")


def test_verify_accepts_all_old_files(before):
    assert main(["verify", "--store", str(before.folder / "store")]) == 0
    assert main(["verify", "--repository", str(before.repository), "--state", str(before.state)]) == 0


@pytest.mark.parametrize("place", ["export", "state"])
def test_the_upper_half_serves_an_old_export_with_its_parameters(before, place):
    folder, state = before.repository / BACKBONE / "1", before.state if place == "state" else None
    config = (before.repository / f"{BACKBONE}-upper" / "config.pbtxt").read_text("utf-8")
    parameters = dict(re.findall(r'key: "(\w+)"\s+value \{ string_value: "(.*?)" \}', config))
    asker, reference = Asker(folder, state, **parameters), Reference.open(folder, state)
    asked = []
    for number in range(3):
        for tenant_id, version in VERSIONS[place].items():
            answer = EXPECTED["answers"][tenant_id][str(version)][number]
            pairs = None if answer["pair"] is None else [answer["pair"]]
            asked.append((tenant_id, answer, asker.ask(tenant_id, [answer["text"]], pairs)))
    comparison = Comparison()
    for tenant_id, answer, number in asked:
        (rows,) = asker.wait(number)
        tenant = reference.backbone.view.snapshot.find(tenant_id)
        spans = rows.spans.tolist()
        assert same_labels(tenant.task, rows.labels, answer["labels"]) and spans == answer["spans"]
        logits = expected_logits(reference, tenant, answer["text"], answer["pair"])
        comparison.add(tenant_id, rows.logits, np.array(logits))
    comparison.assert_equal("fp32")
    asker.close()


def test_an_old_state_can_be_changed_and_the_change_is_read(before):
    live, reader = before.live(), before.backbone()
    assert reader.view.snapshot.generation == 8
    secret, _ = live.add_key("acme")
    assert live.roll_back("city").after == 1
    assert live.roll_back_domain("bio").moved == ["acme", "dune"]
    assert update_tenant(live, before.store, "flux").after == 3  # 2 was used once, and rolled back
    add_tenant(live, before.store, "echo")
    reader.refresh()
    snapshot = reader.view.snapshot
    assert snapshot.generation == 13
    for known in (EXPECTED["secret"], secret):
        assert allows(snapshot.find("acme").keys, f"Bearer {known}", time.time())
    assert snapshot.find("echo").uid == 14  # no earlier tenant had this uid
    assert_answers(Reference(reader), {**VERSIONS["export"], "ivan": 1, "flux": 2})
    assert [change["generation"] for change in live.registry.audit()] == list(range(1, 14))


def test_an_old_store_and_its_state_can_be_updated(before, tmp_path):
    rng, known, corpus = random.Random(0), words(before.store.config.vocabulary), tmp_path / "corpus.txt"
    corpus.write_text("\n".join(" ".join(rng.choices(known, k=8)) for _ in range(12)), "utf-8")
    store = before.store
    table = build_version(store, "bio", [corpus], UpdateOptions(), Budget(steps=0), torch.device("cpu"))
    assert table.meta.version == 3 and table.meta.keys > store.table("bio", 2).meta.keys
    random_tenant(store, replace(store.tenant("acme"), version=3, domain_version=3), 0.3, seed=0)
    moved = update_domain(before.live(), store, "bio")
    assert (moved.moved, moved.behind) == (["acme"], ["dune", "gaia", "many"])
    state, fresh = before.reference(), exported_again(store, tmp_path / "fresh")
    assert_answers(state, {name: version for name, version in VERSIONS["state"].items() if name != "acme"})
    text = EXPECTED["answers"]["acme"]["1"][2]["text"]
    assert (state.forward(text, "acme") == fresh.forward(text, "acme")).all()


def test_an_old_state_can_be_compacted_backed_up_and_restored(before, tmp_path):
    live = before.live()
    live.compact()
    assert_answers(before.reference(), VERSIONS["state"])
    back_up(live, tmp_path / "backup")
    restore(tmp_path / "backup", live.exported, State(tmp_path / "restored" / BACKBONE))
    assert_answers(Reference.open(live.folder, tmp_path / "restored"), VERSIONS["state"])


def test_a_new_export_in_the_old_place_needs_another_state(before):
    assert_answers(exported_again(before.store, before.repository), VERSIONS["store"])
    with pytest.raises(Broken, match=r"another export.*--state"):
        before.backbone()


def renumber(path, newer):
    """Writes another format number into a file; returns the number."""
    content, is_bank = path.read_bytes(), path.suffix == ".bank"
    end = PAGE if is_bank else len(content)
    stored = json.loads(content[:end].rstrip(b"\0"))
    number = 99 if newer else stored["format"] - 1
    header = json.dumps({**stored, "format": number}).encode()
    path.unlink()  # the store and the export may share the file
    path.write_bytes((header.ljust(PAGE, b"\0") if is_bank else header) + content[end:])
    return number


def ask(tenant_id):
    return lambda before: before.reference().forward("text", tenant_id)


REFUSED = {  # by file: the function that reads it, and the way out in its error
    "store/store.json": (lambda before: before.store, "build the store"),
    "store/plot/bio/2/meta.json": (lambda before: exported_again(before.store, before.folder), "build the table"),
    "repository/small/1/backbone.json": (Before.backbone, "export"),
    "repository/small/1/tenants.json": (Before.backbone, "export"),
    "repository/small/1/plot/root/1/meta.json": (ask("beta"), "build the table"),
    "repository/small/1/adapters/head-16.bank": (ask("beta"), "export"),
    "state/small/snapshots/8": (Before.backbone, "export"),
    "state/small/plot/bio/2/meta.json": (ask("acme"), "build the table"),
    "state/small/adapters/head2-16-tanh.g1.bank": (ask("ivan"), "`hplm restore`.*`hplm tenant update`"),
}


@pytest.mark.parametrize("newer", [False, True], ids=["older", "newer"])
@pytest.mark.parametrize("file", REFUSED)
def test_another_format_is_refused_with_its_file_and_a_way_out(before, file, newer):
    use, way_out = REFUSED[file]
    number = renumber(before.folder / file, newer)
    with pytest.raises(HplmError, match=rf"{re.escape(file)} .*format {number}\b.*{way_out}"):
        use(before)


def test_a_backup_of_another_format_is_refused(before, tmp_path):
    live = before.live()
    back_up(live, tmp_path / "backup")
    number = renumber(tmp_path / "backup" / "backup.json", newer=True)
    with pytest.raises(InvalidInput, match=rf"backup .*format {number}\b"):
        restore(tmp_path / "backup", live.exported, State(tmp_path / "restored" / BACKBONE))


def test_a_table_of_another_format_fails_only_its_tenants(before):
    renumber(before.folder / "state/small/plot/bio/2/meta.json", newer=True)
    reference = before.reference()
    for tenant_id in ("acme", "dune"):
        with pytest.raises(Broken, match=r"bio/2/meta\.json"):
            reference.forward("text", tenant_id)
    assert_answers(reference, {name: version for name, version in VERSIONS["state"].items() if name not in ("acme", "dune")})


def test_the_command_in_the_error_renews_a_bank_of_another_format(before):
    renumber(before.folder / "state/small/adapters/head2-16-tanh.g1.bank", newer=True)
    reference = before.reference()
    with pytest.raises(InvalidInput, match="`hplm tenant update`"):
        reference.forward("text", "ivan")
    assert_answers(reference, {name: version for name, version in VERSIONS["state"].items() if name != "ivan"})
    assert update_tenant(before.live(), before.store, "ivan").after == 2
    assert_answers(before.reference(), VERSIONS["state"])

"""Links of tenants to tenants of other backbones: in snapshots, in the directory, and through changes."""

import base64
import json
from dataclasses import asdict, replace

import pytest
from safetensors.torch import save

from builder.publish.export import export
from builder.publish.live import update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.links import save_link
from builder.store.store import TenantFile
from hplm.errors import Broken, InvalidInput
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from hplm.model.config import BackboneConfig
from hplm.plot.branch import Branch
from hplm.tasks import TASKS
from hplm.tenants.commands import Commands
from hplm.tenants.directory import Directory, MissingTarget
from hplm.tenants.knowledge import Knowledge
from hplm.tenants.link import ONWARD, Link
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from testing.random_store import random_store
from testing.toy import CONFIG
from tests.places import calibrate
from tests.support.message import mentioning
from tests.tenants.edited import edited

pytestmark = pytest.mark.slow

WARM = Calibration(temperature=2.0)
LINK = Link("large", "acme", 1, Plan((Step(0, 0.7, 4.0, 0.5), Step(1, weight=0.6))))
NOW = 1_000_000.0
ROOT = Branch("root", 1, 0)


@pytest.fixture
def snapshot(toy):
    exported = Snapshot.load(toy.folder / "tenants.json")
    changed = [replace(one, link=LINK, calibration=WARM) if one.id == "acme" else one for one in exported.tenants]
    return Snapshot(3, exported.branches, changed, exported.export)


def test_links_are_saved_and_loaded(snapshot, tmp_path):
    snapshot.save(tmp_path / "3")
    again = Snapshot.load(tmp_path / "3")
    assert again.find("acme").link == LINK and LINK.prunes and LINK.weight == 0.6
    assert again.find("acme").is_cascaded and not again.find("acme").prunes
    assert again.find("city").link is None and not again.find("city").is_cascaded


def test_a_snapshot_from_before_links_is_read(snapshot, tmp_path):
    snapshot.save(tmp_path / "3")
    stored = json.loads((tmp_path / "3").read_text())
    for tenant in stored["tenants"]:
        del tenant["link"], tenant["stored"]
    (tmp_path / "3").write_text(json.dumps(stored))
    acme = Snapshot.load(tmp_path / "3").find("acme")
    assert acme.link is None and acme.stored_version == acme.version


@pytest.mark.parametrize(
    "change",
    [
        {"link": {"backbone": "large"}},
        {"link": {**asdict(LINK), "version": "1"}},
        {"link": {**asdict(LINK), "plan": asdict(Plan((Step(1),)))}},  # nothing decides who goes on
        {"link": {**asdict(LINK), "plan": asdict(Plan((Step(0), Step(2))))}},  # the tenant has one level
        {"calibration": None},
        {"stored": "1"},
    ],
)
def test_a_link_that_cannot_be_followed_is_broken(snapshot, tmp_path, change):
    snapshot.save(tmp_path / "3")
    with edited(tmp_path / "3", "acme") as stored:
        stored.update(change)
    with pytest.raises(Broken, match="does not describe tenants"):
        Snapshot.load(tmp_path / "3")


@pytest.fixture
def repository(snapshot, tmp_path):
    """Returns a repository of two backbones with a tenant `acme` each, and what is known of them."""
    here = snapshot.find("acme")
    save_backbone(tmp_path, "toy", snapshot, [here, snapshot.find("city")])
    save_backbone(tmp_path, "large", snapshot, [replace(here, link=None)])
    return tmp_path, here


def save_backbone(folder, name, snapshot, tenants):
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    Snapshot(0, snapshot.branches, tenants, name).save(folder / name / "1" / "tenants.json")


def test_of_two_tenants_with_one_name_the_one_with_the_link_answers(repository, snapshot):
    folder, here = repository
    assert Directory(folder).find({"tenant": "acme"}, NOW)[0] == "toy"
    back = replace(here, link=replace(LINK, backbone="toy"))
    save_backbone(folder, "large", snapshot, [back])  # a circle has no beginning
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "'large'", "'toy'")):
        Directory(folder).find({"tenant": "acme"}, NOW)
    save_backbone(folder, "large", snapshot, [replace(here, link=None)])
    save_backbone(folder, "third", snapshot, [replace(here, link=None)])
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "'third'", "'toy'")):
        Directory(folder).find({"tenant": "acme"}, NOW)


def test_a_target_is_the_one_that_was_profiled_or_is_named(repository, snapshot):
    folder, here = repository
    found = Directory(folder).target(LINK, here)
    assert (found.id, found.link) == ("acme", None)
    for link, named in [
        (replace(LINK, backbone="nowhere"), ["'nowhere'"]),
        (replace(LINK, tenant="nobody"), ["'large'", "'nobody'"]),
        (replace(LINK, version=2), ["'acme'", "'large'", "version 1"]),
    ]:
        with pytest.raises(MissingTarget, match=mentioning(*named)):
            Directory(folder).target(link, here)
    for changed in ({"labels": here.labels[::-1]}, {"task": "tag"}):
        with pytest.raises(MissingTarget, match="'acme'"):
            Directory(folder).target(LINK, replace(here, **changed))
    save_backbone(folder, "large", snapshot, [replace(here, link=None, version=7, stored=1)])
    assert Directory(folder).target(LINK, here).version == 7, "the same version of the store"


ACME = TenantFile("acme", 1, "root", 1, "classify", ["x", "y", "z"], 4)


@pytest.fixture
def served(tmp_path):
    store = random_store(tmp_path / "store", CONFIG, [ACME], corpus_tokens=500, spread=0.3)
    calibrate(store, "acme", WARM)
    export(store, tmp_path / "repository", ServingOptions())
    return store, Manager.open(tmp_path / "repository", tmp_path / "state")


def test_a_link_is_exported_and_published_with_its_tenant(served, tmp_path):
    store, live = served
    assert live.current().find("acme").link is None
    save_link(store, ACME, LINK, {})
    update_tenant(live, store, "acme")
    updated = live.current().find("acme")
    assert (updated.link, updated.version, updated.stored_version) == (LINK, 2, 1)
    live.roll_back("acme")
    assert live.current().find("acme").link is None
    export(store, tmp_path / "other", ServingOptions())
    assert Snapshot.load(tmp_path / "other/toy/1/tenants.json").find("acme").link == LINK


def test_the_admin_model_carries_a_link(served):
    store, live = served
    _, head = store.tenant_weights(ACME)
    command = {
        "command": "tenant.add", "id": "new", "domain": "root", "task": "classify", "labels": ACME.labels,
        "calibration": asdict(WARM), "link": asdict(LINK),
        "tensors": base64.b64encode(save({f"head.{name}": part.contiguous() for name, part in head.items()})).decode(),
    }  # fmt: skip
    live.state.begin()
    commands = Commands(live, BackboneConfig.load(live.folder / "backbone.json"))
    commands.run(json.dumps(command))
    assert live.current().find("new").link == LINK
    for change, named in [
        ({"link": {"backbone": "large"}}, ["'link'", "link.json"]),
        ({"calibration": None}, ["'other'", "hplm cascade across"]),
        ({"link": asdict(replace(LINK, plan=Plan((Step(0), Step(2)))))}, ["'other'", "'large'"]),
    ]:
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            commands.run(json.dumps({**command, "id": "other", **change}))


def test_an_export_from_before_links_takes_no_tenant_with_a_link(served):
    store, live = served
    config = live.folder.parent.parent / "toy-upper/config.pbtxt"
    config.write_text(config.read_text().replace(f'"{ONWARD}"', '"ELSE"'))
    update_tenant(live, store, "acme")
    save_link(store, ACME, LINK, {})
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "export the repository again")):
        update_tenant(live, store, "acme")
    assert live.current().find("acme").version == 2


@pytest.mark.parametrize("change", [{"needs_pair": True}, {"evidence": None}, {"combined": None}])
def test_a_task_without_links_is_refused(monkeypatch, change):
    knowledge = Knowledge("root", 1, "classify", ("x", "y"), (None, {}), None, calibration=WARM, link=LINK)
    monkeypatch.setitem(TASKS, "classify", replace(TASKS["classify"], **change))
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "classify", "'large'", "leave the link out")):
        knowledge.check("acme", [ROOT], 32, {})

"""A new export goes on with the keys, limits and versions of another one's registry, in a folder and in a bucket."""

import time
from contextlib import nullcontext

import pytest
import torch

from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.errors import Broken, InvalidInput
from hplm.location import location_of
from hplm.model.weights import save_weights
from hplm.tenants.authorize import admit
from hplm.tenants.keys import allows
from hplm.tenants.manager import Manager
from hplm.tenants.mirror import Mirror
from hplm.tenants.snapshot import SETTINGS
from hplm.tenants.state_folder import StateFolder
from hplm.tenants.succession import Succession, begin_from
from testing.bucket import bucket
from testing.random_store import random_backbone, random_store, random_table, random_tenant, random_tenants
from testing.reference import Reference
from testing.toy import CONFIG
from tests.cli.commands import flip
from tests.places import TEXT, knowledge, learn, make_place
from tests.support.faulty_folder import FaultyFolder
from tests.support.message import refusing

pytestmark = pytest.mark.slow


class Rolled:
    """A served export, and another one that has not begun."""

    def __init__(self, folder, states):
        self.folder, self._states = folder, states
        self.store, self.repository, _ = make_place(folder)
        self.old = Manager.open(self.repository, states / "old")
        self.old.registry.begin(60)

    def manager(self):
        return Manager.open(self.folder / "new", self._states / "new")

    def begin(self, store=None, **own):
        export(store or self.store, self.folder / "new", ServingOptions())
        return begin_from(self.manager(), self.old, **own)

    def answers(self, manager, names):
        """Returns the logits of tenants. A registry in a bucket is first copied."""
        state = manager.state.folder.parent if manager.state is not None else self._copied(manager)
        reference = Reference.open(manager.folder, state)
        return torch.cat([reference.forward(TEXT, name).flatten() for name in names])

    def _copied(self, manager):
        state = self.folder / f"copy-{manager.folder.parents[1].name}"
        Mirror(manager.folder, manager.registry.store, StateFolder(state / "toy")).begin()
        return state


@pytest.fixture(params=["folder", "bucket"])
def rolled(request, tmp_path):
    is_remote = request.param == "bucket"
    with bucket() if is_remote else nullcontext():
        yield Rolled(tmp_path, location_of("s3://bucket/hplm") if is_remote else tmp_path / "states")


def test_keys_limits_and_versions_that_fit_stay(rolled):
    old, store = rolled.old, rolled.store
    random_table(store, "law", 1, ("root", 1), 500, seed=9)
    random_tenant(store, TenantVersion("late", 1, "law", 1, "classify", ["x", "y"], 4), 0.3, seed=9)
    add_domain(old, store, "law")
    add_tenant(old, store, "late")
    secret, _ = old.add_key("late")
    add_tenant(old, store, "new-a")
    old.add("guest", knowledge(store, "new-b"))  # no store has it
    old.limit("tenant-1", rate=5.0, homes=2)
    learn(store, "tenant-1", 2, seed=3)
    old.update("tenant-1", knowledge(store, "tenant-1"))
    old.update("new-a", knowledge(store, "new-a"))
    old.roll_back("tenant-1")
    store.remove_tenant("late")  # the export lacks its table too
    store.remove_branch("law", 1)
    served, names = old.current(), ["guest", "late", "new-a", "tenant-0", "tenant-1"]
    assert rolled.begin() == Succession(kept=tuple(names), renewed=(), left_out=("new-b", "new-c"))
    new = rolled.manager()
    found = new.current()
    assert [tenant.id for tenant in found.tenants] == names and new.registry.pointer().lease_s == 60
    for name in names:
        for field in ("version", "domain", "domain_version", "stored", *SETTINGS):
            assert getattr(found.find(name), field) == getattr(served.find(name), field), (name, field)
    assert len({tenant.uid for tenant in found.tenants}) == len(names) and found.ledger.next_uid > max(
        tenant.uid for tenant in found.tenants
    )
    assert admit(found, {"tenant": "late", "authorization": f"Bearer {secret}"}, time.time()).id == "late"
    assert torch.equal(rolled.answers(new, names), rolled.answers(old, names))
    assert new.registry.collect() == 0 and new.roll_back("new-a").after == 1
    assert new.update("tenant-1", knowledge(store, "tenant-1")).after == 3  # 2 was served before
    (first, *_) = new.registry.audit()
    assert (first["action"], first["from_generation"]) == ("begin", served.generation)
    assert begin_from(new, old) is None


def other_layers(folder, tenants):
    """A store of the same backbone whose layers are others."""
    store = random_store(folder, CONFIG, tenants, corpus_tokens=500, spread=0.3)
    save_weights(random_backbone(store.config, 7)[1].state_dict(), folder / "upper.safetensors")
    return store


def test_tenants_whose_versions_do_not_fit_get_those_of_the_export_with_their_keys(rolled, tmp_path):
    old = rolled.old
    secret, _ = old.add_key("tenant-0")
    old.update("tenant-0", knowledge(rolled.store, "tenant-0"))
    add_tenant(old, rolled.store, "new-a")
    store = other_layers(tmp_path / "other", random_tenants(3, 4, 3))
    with refusing(InvalidInput, "new-a", "hplm build tenant", "hplm tenant delete"):
        rolled.begin(store)
    with refusing(InvalidInput, "CURRENT is missing"):
        rolled.manager().registry.pointer()
    old.delete("new-a")
    taken = rolled.begin(store, lease_s=7)
    assert taken == Succession(kept=(), renewed=("tenant-0", "tenant-1"), left_out=("tenant-2",))
    new = rolled.manager()
    tenant = new.current().find("tenant-0")
    assert (tenant.version, tenant.stored, new.current().find("tenant-1").version) == (3, 1, 2)  # 2 and 1 were others
    assert allows(tenant.keys_by_digest, f"Bearer {secret}", time.time()) and new.registry.pointer().lease_s == 7
    assert torch.equal(rolled.answers(new, ["tenant-0"]), Reference.open(new.folder).forward(TEXT, "tenant-0").flatten())


@pytest.fixture
def here(tmp_path):
    return Rolled(tmp_path, tmp_path / "states")


@pytest.mark.parametrize("part", ["records", "snapshots", "CURRENT"])
def test_an_interrupted_succession_leaves_no_registry_and_is_made_again(here, part):
    old = here.old
    old.add("guest", knowledge(here.store, "new-b"))
    here.store.remove_tenant("new-b")
    export(here.store, here.folder / "new", ServingOptions())
    new, folder = here.manager(), here.folder / "states/new/toy"

    def fails(name):
        if name.startswith(part) and (part != "CURRENT" or (folder / "snapshots").exists()):
            raise OSError(name)

    new.registry.store = FaultyFolder(folder, fails)
    with pytest.raises(OSError, match=part):
        begin_from(new, old)
    with refusing(InvalidInput, "CURRENT is missing"):
        here.manager().registry.pointer()
    assert here.begin() is not None
    assert here.manager().current().generation == 1 + (part == "CURRENT")  # no generation is used twice
    assert torch.equal(here.answers(here.manager(), ["guest"]), here.answers(old, ["guest"]))


def test_a_damaged_record_and_a_registry_that_has_not_begun_are_named(here):
    old = here.old
    old.add("guest", knowledge(here.store, "new-b"))
    here.store.remove_tenant("new-b")
    (record,) = (here.folder / "states/old/toy/records").iterdir()
    flip(record, -5)
    with refusing(Broken, "guest", record.name, "hplm tenant update"):
        here.begin()
    with refusing(InvalidInput, "CURRENT is missing"):
        begin_from(here.manager(), Manager.open(here.repository, here.folder / "states/none"))

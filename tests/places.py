"""A backbone that is served with a live state, and a store with more tenants than were exported."""

from dataclasses import replace

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.engine.backbone import Backbone
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from testing.random_store import random_store, random_tenant, random_tenants
from testing.reference import Reference
from testing.toy import CONFIG, WORDS

TEXT = " ".join(WORDS[:12])


def make_place(tmp_path):
    """Serves two tenants. The store has three more, one of them with LoRA and a head of two layers."""
    store = random_store(tmp_path / "store", CONFIG, random_tenants(2, 4, 3), corpus_tokens=2000, spread=0.3)
    export(store, tmp_path / "repository", ServingOptions())
    for number, name in enumerate(("new-a", "new-b")):
        random_tenant(store, TenantVersion(name, 1, "root", 1, "classify", ["x", "y"], 4), 0.3, seed=40 + number)
    lora = TenantVersion("new-c", 1, "root", 1, "tag", ["O", "I"], 2, "lora", ("query", "ffn_in"), head_function="tanh")
    random_tenant(store, lora, 0.3, seed=50)
    begin(Folder(tmp_path / "state/toy"))
    return store, tmp_path / "repository", tmp_path / "state"


def learn(store, name, version, seed):
    known = next(tenant for tenant in store.tenants() if tenant.id == name)
    random_tenant(store, replace(known, version=version), 0.3, seed)


def knowledge(store, name):
    return store.knowledge(store.tenant(name))


def answer(place, tenant_id, state=True):
    _, repository, folder = place
    return Reference.open(repository / "toy/1", folder if state else None).forward(TEXT, tenant_id)


def exported_answer(place, tenant_id):
    """Returns the answer of the same tenant after a new export of the whole store."""
    store, repository, _ = place
    fresh = repository.with_name("fresh")
    export(store, fresh, ServingOptions())
    return Reference.open(fresh / "toy/1").forward(TEXT, tenant_id)


def served(place, **more):
    _, repository, state = place
    return Backbone(repository / "toy/1", state, **more)

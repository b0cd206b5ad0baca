"""Tables and tenants of live domains for tests, and the versions that are served."""

from dataclasses import replace

from hplm.engine.backbone import Backbone
from testing.random_store import random_table, random_tenant


def learn(store, version, tenants):
    random_table(store, "bio", version, ("root", 1), 3000, seed=50 + version)
    for number, tenant in enumerate(tenants):
        random_tenant(store, replace(tenant, version=version, domain_version=version), 0.3, seed=90 + number)


def served(repository, state):
    return Backbone(repository / "toy/1", state)


def versions(backbone):
    return {tenant.id: (tenant.version, tenant.domain_version) for tenant in backbone.view.snapshot.tenants}

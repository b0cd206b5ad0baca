"""A store with an export and a live state, made once; each test gets a copy."""

import shutil
from dataclasses import replace

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from testing.random_store import random_store, random_table, random_tenant, random_tenants
from testing.toy import CONFIG
from tests.builder.stores import add_domain, add_tenant, grow, rooted
from tests.cli.commands import Live
from tests.support.here import in_this_process  # noqa: F401

TENANTS = random_tenants(4, 4, 2, domains=("bio",))
ACME = TenantVersion("acme", 1, "root", 1, "classify", ["x", "y"], 4)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Four tenants of bio are exported, and three of them were tuned again on its second version; acme and law are new."""
    folder = tmp_path_factory.mktemp("live")
    store = random_store(folder / "store", CONFIG, TENANTS, ("bio",), corpus_tokens=1000)
    export(store, folder / "repository", ServingOptions())
    random_table(store, "bio", 2, ("root", 1), 1000, seed=9)
    random_table(store, "law", 1, ("root", 1), 500, seed=3)
    for tenant in TENANTS[:3]:
        random_tenant(store, replace(tenant, version=2, domain_version=2), 0.1, seed=5)
    random_tenant(store, ACME, 0.3, seed=1)
    begin(Folder(folder / "state/toy"))
    return folder


@pytest.fixture
def live(made, tmp_path):
    return Live(shutil.copytree(made, tmp_path / "live"))


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A store with a root, a domain of two versions with a tenant on the first one, and a child of that domain."""
    folder = tmp_path_factory.mktemp("grown")
    store = rooted(folder)
    add_domain(store, "bio", 1, keep=0.5, dtype="int8")
    add_tenant(store, "acme", "bio")
    grow(store, "bio", 2)
    add_domain(store, "cells", 3, parent="bio")
    return store


@pytest.fixture
def grown(built, tmp_path):
    return Store(shutil.copytree(built.folder, tmp_path / "store"))

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from testing.random_store import random_store, random_tenants
from testing.toy import CONFIG
from tests.builder.publish.live_domains import learn


@pytest.fixture
def place(tmp_path):
    """Ten tenants of a domain, served; the store has a second version of the domain, and eight of them tuned on it."""
    tenants = random_tenants(10, 4, 3, domains=("bio",))
    store = random_store(tmp_path / "store", CONFIG, tenants, ("bio",), corpus_tokens=3000, spread=0.3)
    export(store, tmp_path / "repository", ServingOptions())
    learn(store, 2, tenants[:8])
    return store, tmp_path / "repository", tmp_path / "state"

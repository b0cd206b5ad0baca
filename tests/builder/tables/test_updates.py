"""A tenant's next version keeps the order of labels that its clients know, even after an import."""

import pytest

from builder.evaluation.tenant import evaluate_tenant
from builder.publish.export import export
from builder.publish.live import update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from builder.training.start import ANEW
from hplm.tenants.manager import Manager
from tests.builder.training.small_tenants import CPU, learn, made, make_store

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store")


def imported(store, labels):
    """Returns a tenant as imported by `hplm import --labels`, with labels in an order of its own."""
    hidden = store.upper().norm.weight.detach()
    head = {"weight": hidden.repeat(len(labels), 1), "bias": hidden[: len(labels)]}
    store.save_tenant(TenantFile("acme", 1, "root", 1, "classify", labels, 0), None, head, {})


def test_training_keeps_the_order_of_labels(store, tmp_path):
    imported(store, ["right", "left"])
    export(store, tmp_path / "repository", ServingOptions())
    train = made(tmp_path, "classify", 240, 1)
    update = learn(store, "classify", train, epochs=6, from_version=ANEW)
    assert (update.version, update.labels) == (2, ["right", "left"])
    assert evaluate_tenant(store, "acme", train, CPU, show_progress=False).scores.main > 0.7
    live = Manager.open(tmp_path / "repository", tmp_path / "state")
    assert update_tenant(live, store, "acme").before == 1

"""Students: a text waits once for each that answers it, and load lowers their number."""

import random

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from testing.random_store import random_store, random_students
from testing.reference import Reference
from testing.toy import CONFIG, random_text
from tests.engine.asker import Asker, stages_of

TEAMS = (6, 3, 1)
LABELS = ["x", "y", "z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tenants with six students, one of a single layer and one of all, and a tenant without."""
    folder, tasks = tmp_path_factory.mktemp("students"), {"crew": "classify", "band": "tag", "solo": "classify"}
    tenants = [TenantVersion(name, 1, "root", 1, task, LABELS, 4, "lora") for name, task in tasks.items()]
    store = random_store(folder / "store", CONFIG, tenants, spread=0.3)
    for number, tenant in enumerate(tenants[:2]):
        random_students(store, tenant, TEAMS, depth=1 + number, seed=number)
    export(store, folder / "repository", ServingOptions(dtype="fp32"))
    return folder / "repository/toy/1"


@pytest.mark.parametrize(("slots", "stages"), [("14", ()), ("2", ()), ("14", stages_of(0, 1))], ids=["", "few slots", "stages"])
def test_a_request_gets_the_number_of_students_of_its_rung(folder, slots, stages):
    """Half of the slots are for a batch: seven hold one text of six students and one of another, and one a single student."""
    asker, rng = Asker(folder, slots=slots, batch_tokens="64", stages=stages), random.Random(1)
    reference = Reference.open(folder)
    asked = []
    for number in range(30):
        tenant, texts, rung = rng.choice(["crew", "band", "solo"]), [random_text(rng, 9)] * rng.choice([1, 2]), 1 + number % 3
        asked.append((tenant, texts, rung, asker.ask(tenant, texts, confidence=True, rung=rung)))
    levels = set()
    assert asker.backbone.view.snapshot.find("crew").costs == (3.0, 1.5, 0.5)  # by which the load controller chooses
    for tenant, texts, rung, number in asked:
        members = TEAMS[rung - 1]
        wanted = reference.forward(texts[0], tenant, students=members)
        for answer in asker.wait(number):
            np.testing.assert_allclose(answer.logits, wanted, atol=1e-3)
            assert answer.level == (1 if tenant == "solo" else members)
            levels.add(answer.level)
            if tenant == "crew":
                assert answer.confidence == pytest.approx(float((wanted / 1.5).softmax(1).max()), abs=1e-3)
    assert levels == set(TEAMS)
    asker.close()

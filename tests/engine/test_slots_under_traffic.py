"""With far more tenants than slots, every answer equals the reference, whatever was evicted in between."""

import random

import pytest
import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from testing.random_store import random_store
from testing.reference import Reference
from testing.toy import CONFIG, WORDS, random_text
from tests.engine.asker import Asker
from tests.support.answers import Comparison

pytestmark = pytest.mark.slow

TENANTS = [TenantFile(f"tenant-{i:02d}", 1, "root", 1, "classify", ["a", "b", "c"], 8) for i in range(40)]


def small_world(folder):
    store = random_store(folder / "store", CONFIG, TENANTS, spread=0.3)
    export(store, folder / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    return folder / "repository" / CONFIG.name / "1"


def test_forty_tenants_in_four_slots_get_their_own_answers(tmp_path):
    folder = small_world(tmp_path)
    reference, asker, rng = Reference.open(folder), Asker(folder), random.Random(5)
    asked = []
    for _ in range(200):
        tenant, text = rng.choice(TENANTS).id, random_text(rng, 20)
        asked.append((tenant, text, asker.ask(tenant, [text])))
    comparison = Comparison()
    for tenant, text, number in asked:
        comparison.add(tenant, asker.wait(number)[0].logits, reference.forward(text, tenant).numpy())
    comparison.assert_equal("fp32")
    asker.close()


def test_a_batch_waits_for_each_layer_before_it_uses_it(tmp_path, monkeypatch):
    """Here weights are copied only when somebody waits for them, so a missing wait gives wrong answers."""
    late = []

    class Late:
        """A mark that makes its copy only when somebody waits for it."""

        def __init__(self, copies):
            self.copies = copies

        def wait(self):
            late.append(len(self.copies))
            for copy in self.copies:
                copy()
            self.copies.clear()

    def fill(slots):
        marks = []
        for number, layer in enumerate(slots.layers):
            copies = []
            for slot, arrival in slots._promised:
                for name, tensor in slots._layout.unpack(arrival.flat.clone())[number].items():
                    own = layer[name][slot][tuple(map(slice, tensor.shape))]
                    own.fill_(torch.nan)
                    copies.append(lambda target=own, tensor=tensor: target.copy_(tensor))
            marks.append(Late(copies))
        slots._promised.clear()
        return marks

    folder = small_world(tmp_path)
    monkeypatch.setattr("hplm.adapters.slots.Slots.fill", fill)
    reference, asker = Reference.open(folder), Asker(folder)
    comparison = Comparison()
    for tenant in TENANTS[:3]:
        (rows,) = asker.wait(asker.ask(tenant.id, [WORDS[3]]))
        comparison.add(tenant.id, rows.logits, reference.forward(WORDS[3], tenant.id).numpy())
    comparison.assert_equal("fp32")
    assert any(late)
    asker.close()

"""Stages of an engine: how they are written, where their tensors are, and that their answers are the reference's."""

import os
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from hplm.adapters.layout import EXIT
from hplm.adapters.slots import Slots
from hplm.engine.engine import Engine, resolve_precision
from hplm.engine.packing import read_packing
from hplm.engine.stages import Stage
from hplm.engine.staging import Stager, StagingSettings
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from testing.reference import Reference
from testing.toy import CONFIG, TENANTS, make_toy, random_text
from tests.engine.asker import Asker, stages_of, texts_of
from tests.support.answers import Comparison
from tests.support.message import mentioning

CPU, META = torch.device("cpu"), torch.device("meta")
CORE = min(os.sched_getaffinity(0))
LAYERS = 5
CUTS = [(4,), (1, 4), (0, 4), (0, 2, 4), (0, 1, 2, 3, 4)]
PACKINGS = ["packed", "naive", "turbo", "concat:rows=2,length=80", "slotted:rows=2,length=80,slot=40"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("deep"), replace(CONFIG, upper_layers=LAYERS))


@pytest.fixture(scope="module")
def reference(deep):
    return Reference.open(deep.folder)


@pytest.fixture(scope="module")
def texts(reference):
    """Three texts of each tenant, so that every kind of adapter and head is in each batch."""
    rng, found = random.Random(4), []
    for tenant in TENANTS:
        for text in (random_text(rng, longest) for longest in (1, 12, 40)):
            found.append((tenant.id, text, *texts_of(reference.backbone, tenant.id, [text], truncate=True)))
    return found


@pytest.fixture(scope="module")
def expected(deep):
    references = {in_eight_bits: Reference.open(deep.folder, eight_bits=in_eight_bits) for in_eight_bits in (False, True)}
    return cache(lambda dtype, tenant, text: references[dtype == "int8"].forward(text, tenant, truncate=True).numpy())


@torch.inference_mode()
def served_by(backbone, texts, cut, packing="packed", dtype="fp32"):
    """Returns the logits of each text, computed in one thread."""
    stages, precision = stages_of(*cut), resolve_precision(dtype, CPU)
    engine = Engine(backbone.upper(), CPU, precision.dtype, precision.eight_bits, stages=stages)
    packed = read_packing(packing, engine.seconds)
    settings = StagingSettings(16, CPU, precision.dtype, packing=packed, few_sizes=engine.takes_few_sizes, stages=stages)
    batch = Stager(backbone, settings).stage(texts, lambda text, error: pytest.fail(str(error)))
    assert batch is not None
    found = {}
    for passed in (*(engine.enter(batch, stage) for stage in range(len(stages) - 1)), engine.run(batch)):
        for done in passed:
            found.update(zip(done.indexes, done.logits, strict=True))
    return [found[index] for index in range(len(texts))]


@pytest.mark.parametrize(
    "cut, packing, dtype",
    [
        *((cut, "packed", dtype) for cut in CUTS for dtype in ("fp32", "bf16", "int8")),
        *((cut, packing, "fp32") for cut in ((1, 4), (0, 2, 4)) for packing in PACKINGS[1:]),
    ],
    ids=str,
)
def test_stages_give_the_reference_answers(reference, texts, expected, cut, packing, dtype):
    comparison = Comparison()
    served = served_by(reference.backbone, [text for _, _, text in texts], cut, packing, dtype)
    for (tenant, words, text), logits in zip(texts, served, strict=True):
        readable = text.spans[:, 0] >= 0
        answer = expected(dtype, tenant, words)[readable]
        comparison.add(tenant, logits[readable, : answer.shape[1]], answer)
    comparison.assert_equal(dtype)


def test_each_layer_and_its_slots_are_on_the_device_of_its_stage(reference):
    stages = Stage(0, 1, CPU), Stage(2, 4, META)
    engine = Engine(random_backbone(replace(CONFIG, upper_layers=LAYERS))[1], CPU, torch.float32, stages=stages)
    devices = {name: weight.device.type for name, weight in engine._upper.named_parameters()}
    assert {name for name, device in devices.items() if device == "meta"} == {
        name for name in devices if name.startswith(("layers.2.", "layers.3.", "layers.4."))
    }
    settings = StagingSettings(4, CPU, torch.float32, stages=stages)
    layouts = reference.backbone.layouts
    assert {"bottleneck", "head", EXIT} <= {layout.kind for layout in layouts}
    for layout in layouts:
        slots = Slots(layout, 2, CPU, torch.float32, settings.devices_of(layout))
        found = [tensor.device.type for layer in slots.layers for tensor in list(layer.values())[:1]]
        by_layer = layout.places or layout.kind == EXIT
        assert found == (["cpu"] * 2 + ["meta"] * 3 if by_layer else ["meta"])


@pytest.mark.parametrize("end", [3, 7])
def test_stages_must_end_with_the_last_layer(reference, end):
    with pytest.raises(InvalidInput, match=mentioning(f"layer {end}", f"{LAYERS} layers")):
        Engine(reference.backbone.upper(), CPU, torch.float32, stages=stages_of(1, end))


def test_three_stages_in_threads_answer_as_the_reference_does(deep, expected):
    asker, rng, asked = Asker(deep.folder, stages=stages_of(0, 2, 4), slots="9", batch_tokens="96"), random.Random(1), []
    for _ in range(40):
        tenant, given = rng.choice(TENANTS).id, [random_text(rng, 20) for _ in range(rng.choice([1, 1, 3]))]
        asked.append((tenant, given, asker.ask(tenant, given)))
    asker.close()
    comparison = Comparison()
    for tenant, given, number in asked:
        for text, rows in zip(given, asker.wait(number), strict=True):
            comparison.add(tenant, rows.logits, expected("fp32", tenant, text))
    comparison.assert_equal("fp32")

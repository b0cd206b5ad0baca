"""Where the tensors of an engine's stages are. `tests/answers` and `test_exits` compare the answers of stages."""

from dataclasses import replace

import pytest
import torch

from hplm.adapters.layout import EXIT
from hplm.adapters.slots import Slots
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine
from hplm.engine.stages import Stage
from hplm.engine.staging import StagingSettings
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from testing.toy import CONFIG, make_toy
from tests.engine.asker import stages_of
from tests.support.message import mentioning

CPU, META = torch.device("cpu"), torch.device("meta")
LAYERS = 5


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return Backbone(make_toy(tmp_path_factory.mktemp("deep"), replace(CONFIG, upper_layers=LAYERS)).folder)


def test_each_layer_and_its_slots_are_on_the_device_of_its_stage(deep):
    stages = Stage(0, 1, CPU), Stage(2, 4, META)
    engine = Engine(random_backbone(replace(CONFIG, upper_layers=LAYERS))[1], CPU, torch.float32, stages=stages)
    devices = {name: weight.device.type for name, weight in engine._upper.named_parameters()}
    assert {name for name, device in devices.items() if device == "meta"} == {
        name for name in devices if name.startswith(("layers.2.", "layers.3.", "layers.4."))
    }
    settings = StagingSettings(4, CPU, torch.float32, stages=stages)
    layouts = deep.layouts
    assert {"bottleneck", "head", EXIT} <= {layout.kind for layout in layouts}
    for layout in layouts:
        slots = Slots(layout, 2, CPU, torch.float32, settings.devices_of(layout))
        found = [tensor.device.type for layer in slots.layers for tensor in list(layer.values())[:1]]
        by_layer = layout.places or layout.kind == EXIT
        assert found == (["cpu"] * 2 + ["meta"] * 3 if by_layer else ["meta"])


@pytest.mark.parametrize("end", [3, 7])
def test_stages_must_end_with_the_last_layer(deep, end):
    with pytest.raises(InvalidInput, match=mentioning(f"layer {end}", f"{LAYERS} layers")):
        Engine(deep.upper(), CPU, torch.float32, stages=stages_of(1, end))

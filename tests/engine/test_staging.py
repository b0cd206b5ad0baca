"""Where the tensors of a batch are, and when: on the devices of their stages, and in a stream that the engine waits for."""

from dataclasses import replace

import pytest
import torch

from hplm.adapters.layout import EXIT
from hplm.adapters.slots import Slots
from hplm.engine import sheets
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine, computed
from hplm.engine.stages import Stage
from hplm.engine.staging import Stager, StagingSettings
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from hplm.plot.gathering import Gatherer
from testing.toy import CONFIG, TENANTS, WORDS, make_toy
from tests.adapters.test_slots import Watched
from tests.engine.asker import stages_of, texts_of
from tests.support.message import mentioning

CPU, META = torch.device("cpu"), torch.device("meta")
LAYERS = 5


@pytest.fixture
def events(monkeypatch):
    found, sent, sums, compute = [], sheets.sent, Gatherer.sums, Engine._compute

    def noted(name, call):
        return lambda *given: found.append(name) or call(*given)

    monkeypatch.setattr(sheets, "sent", noted("send", sent))
    monkeypatch.setattr(Gatherer, "sums", noted("gather", sums))
    monkeypatch.setattr(Engine, "_compute", noted("compute", compute))
    return found


@pytest.fixture
def staged(reference, events):
    """An engine, its stager and a batch that is staged."""
    backbone = reference.backbone
    stager = Stager(backbone, StagingSettings(4, CPU, torch.float32), lambda device: Watched(events))
    texts = texts_of(backbone, TENANTS[0].id, [" ".join(WORDS[:5])])
    batch = stager.stage(texts, broken=lambda text, error: pytest.fail(str(error)))
    return Engine(backbone.upper(), CPU, torch.float32), stager, batch


def test_staging_has_its_own_stream_and_the_engine_waits_for_it(staged, events):
    engine, stager, batch = staged
    computed(engine, batch)
    stager.release(batch.held)
    inside = False
    for event in events:
        if event in ("begin", "end"):
            inside = event == "begin"
        elif event in ("send", "gather"):
            assert inside
    gathered, computing = events.index("gather"), events.index("compute")
    marks = [number for number, event in enumerate(events) if event.startswith("mark")]
    assert events.count("gather") == 1 and gathered < marks[-1] < computing
    assert events[computing - 1] == f"wait {len(marks) - 1}"  # for the last mark, right before computing


def test_a_batch_that_cannot_be_staged_holds_no_slots(reference, monkeypatch):
    backbone = reference.backbone
    stager = Stager(backbone, StagingSettings(4, CPU, torch.float32))
    monkeypatch.setattr(stager, "retrieve", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stager.stage(texts_of(backbone, TENANTS[0].id, [WORDS[0]]), broken=lambda text, error: pytest.fail(str(error)))
    assert not [slots.pinned for slots in stager.slots().values() if slots.pinned]


def test_a_failed_batch_is_waited_for_before_its_memory_is_free(staged, events, monkeypatch):
    """Kernels that were started may still read it, and staging would write the next batch there."""
    engine, _, batch = staged
    monkeypatch.setattr(Engine, "_compute", lambda *given: 1 / 0)
    monkeypatch.setattr(engine, "_wait", lambda: events.append("wait for all"))
    with pytest.raises(ZeroDivisionError):
        computed(engine, batch)
    assert events[-1] == "wait for all"


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

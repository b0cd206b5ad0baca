"""Where the tensors of a batch are, and when: on the devices of their stages, and in a stream that the engine waits for."""

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hplm.adapters.layout import EXIT
from hplm.adapters.slots import Slots
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine, computed
from hplm.engine.laid import StagingSettings
from hplm.engine.stages import Stage
from hplm.engine.staging import EncoderStager
from hplm.errors import InvalidInput, OutOfCapacity
from testing.random_store import random_backbone
from testing.toy import CONFIG, WORDS, make_toy
from tests.adapters.test_slots import Watched
from tests.engine.asker import stages_of, texts_of
from tests.support.message import mentioning

CPU, META = torch.device("cpu"), torch.device("meta")
LAYERS = 5


class Operations(TorchDispatchMode):
    """Calls `note` before each operation of torch, with that and what it is given."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, operation, types, given=(), named=None):
        self._note(operation.overloadpacket, given)
        return operation(*given, **(named or {}))


def test_staging_has_its_own_stream_and_the_engine_waits_for_it(reference):
    backbone, events = reference.backbone, []
    stager = EncoderStager(backbone, StagingSettings(4, CPU, torch.float32), lambda device: Watched(events))
    texts, engine = texts_of(backbone, "acme", [" ".join(WORDS[:5])]), Engine(backbone.upper(), CPU, torch.float32)
    stager.release(stager.stage(texts, broken).held)  # brings the adapters, in streams of their slots
    events.clear()
    with Operations(lambda *_: events.append("operation")):
        batch = stager.stage(texts, broken)
        staged = len(events)
        computed(engine, batch)
    inside = False
    for event in events[:staged]:
        inside = event == "begin" or (inside and event != "end")
        assert inside or event == "end"
    recorded = [event for event in events if event.startswith("record")]
    last = staged - 1 - events[staged - 1 :: -1].index("operation")
    assert last < events.index(recorded[-1]) < staged  # the event is behind all that was started
    assert events[staged:].index(recorded[-1].replace("record", "wait")) < events[staged:].index("operation")


def broken(text, error):
    pytest.fail(str(error))


def test_a_batch_that_cannot_be_staged_holds_no_slots(reference):
    failing = SimpleNamespace(under_way=nullcontext, record_event=lambda: 1 / 0)
    stager = EncoderStager(reference.backbone, StagingSettings(4, CPU, torch.float32), lambda device: failing)
    with pytest.raises(ZeroDivisionError):
        stager.stage(texts_of(reference.backbone, "acme", [WORDS[0]]), broken)
    assert not [slots.pinned for slots in stager.slots().values() if slots.pinned]


def test_a_lone_text_lies_as_the_last_one_of_its_length_and_tenant_did(reference, monkeypatch):
    monkeypatch.setattr("hplm.engine.staging.MOST_LONE", 2)
    backbone, engine = reference.backbone, Engine(reference.backbone.upper(), CPU, torch.float32)
    stager = EncoderStager(backbone, StagingSettings(4, CPU, torch.float32))

    def laid(tenant, words):
        texts = texts_of(backbone, tenant, [" ".join(words)])
        batch = stager.stage(texts, broken)
        torch.testing.assert_close(*map(torch.from_numpy, (computed(engine, batch)[0], one_by_one(texts)[0])))
        stager.release(batch.held)
        return batch.sheets[0].laid

    def one_by_one(texts):  # by a stager that remembers nothing
        fresh = EncoderStager(backbone, StagingSettings(4, CPU, torch.float32))
        return computed(engine, fresh.stage(texts, broken))

    first = laid("acme", WORDS[:5])
    assert laid("acme", WORDS[5:10]) is first
    assert laid("acme", WORDS[:4]) is not first and laid("echo", WORDS[:5]) is not first
    assert laid("acme", WORDS[:5]) is not first  # two others were remembered since
    stager.swap = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        laid("echo", WORDS[:6])
    del stager.swap
    laid("echo", WORDS[:6])  # its adapters were never copied as that one lay


def test_no_memory_for_a_tenants_adapter_fails_only_that_tenant(reference):
    backbone, failed = copy(reference.backbone), []

    def read(record, into):
        if record == backbone.view.snapshot.find("acme").adapter:
            raise MemoryError("the device is full")
        reference.backbone.records.read(record, into)

    backbone.records = SimpleNamespace(read=read)
    stager = EncoderStager(backbone, StagingSettings(4, CPU, torch.float32))
    texts = [text for tenant in ("acme", "city", "acme", "beta") for text in texts_of(backbone, tenant, [WORDS[0]])]
    batch = stager.stage(texts, lambda text, error: failed.append((text, type(error))))
    assert batch.texts == texts[1::2] and failed == [(text, OutOfCapacity) for text in texts[::2]]


def test_a_failed_batch_is_waited_for_before_its_memory_is_free(reference, monkeypatch):
    """Kernels that were started may still read it, and staging would write the next batch there."""
    backbone, waits = reference.backbone, []
    batch = EncoderStager(backbone, StagingSettings(4, CPU, torch.float32)).stage(
        texts_of(backbone, "acme", [WORDS[0]]), broken
    )
    batch.sheets[0].laid.attend = [lambda *given: 1 / 0]
    engine = Engine(backbone.upper(), CPU, torch.float32)
    monkeypatch.setattr(engine, "_wait", lambda stage: waits.append("for all"))
    with pytest.raises(ZeroDivisionError):
        computed(engine, batch)
    assert waits == ["for all"]


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
        assert found == ((["cpu"] * 2 + ["meta"] * 3)[: layout.layers] if by_layer else ["meta"])


@pytest.mark.parametrize("end", [3, 7])
def test_stages_must_end_with_the_last_layer(deep, end):
    with pytest.raises(InvalidInput, match=mentioning(f"layer {end}", f"{LAYERS} layers")):
        Engine(deep.upper(), CPU, torch.float32, stages=stages_of(1, end))

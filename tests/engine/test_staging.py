"""Staging starts everything in a stream of its own, and the engine waits for its mark."""

import pytest
import torch

from hplm.engine import sheets, staging
from hplm.engine.engine import Engine, computed
from hplm.engine.staging import Stager, StagingSettings
from hplm.plot.gathering import Gatherer
from testing.toy import TENANTS, WORDS
from tests.adapters.test_slots import Watched
from tests.engine.asker import texts_of

CPU = torch.device("cpu")


@pytest.fixture
def events(monkeypatch):
    found, sent, sums, compute = [], sheets.sent, Gatherer.sums, Engine._compute

    def noted(name, call):
        return lambda *given: found.append(name) or call(*given)

    monkeypatch.setattr(staging, "Copies", lambda device: Watched(found))
    monkeypatch.setattr(sheets, "sent", noted("send", sent))
    monkeypatch.setattr(Gatherer, "sums", noted("gather", sums))
    monkeypatch.setattr(Engine, "_compute", noted("compute", compute))
    return found


@pytest.fixture
def staged(reference, events):
    """An engine, its stager and a batch that is staged."""
    backbone = reference.backbone
    stager = Stager(backbone, StagingSettings(4, CPU, torch.float32))
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


def test_a_tenant_is_pinned_once_a_batch(reference):
    backbone = reference.backbone
    stager = Stager(backbone, StagingSettings(4, CPU, torch.float32))
    texts = [text for tenant in TENANTS[:2] * 3 for text in texts_of(backbone, tenant.id, [WORDS[0]])]
    batch = stager.stage(texts, broken=lambda text, error: pytest.fail(str(error)))
    records = {record for text in texts for record in text.request.tenant.records()}
    assert len(batch.held) == len(records) == batch.brought
    assert sum(slots.hits for slots in stager.slots().values()) == 2 * len(records)  # of each text but the first
    stager.release(batch.held)
    assert not any(slots.pinned for slots in stager.slots().values())


def test_a_batch_that_cannot_be_staged_holds_no_slots(reference, monkeypatch):
    backbone = reference.backbone
    stager = Stager(backbone, StagingSettings(4, CPU, torch.float32))
    monkeypatch.setattr(stager, "retrieve", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stager.stage(texts_of(backbone, TENANTS[0].id, [WORDS[0]]), broken=lambda text, error: pytest.fail(str(error)))
    pinned = [slots.pinned for slots in stager.slots().values() if slots.pinned]
    assert not pinned, f"a batch that was given up holds slots: {pinned}"


def test_a_failed_batch_is_waited_for_before_its_memory_is_free(staged, events, monkeypatch):
    """Kernels that were started may still read it, and staging would write the next batch there."""
    engine, _, batch = staged
    monkeypatch.setattr(Engine, "_compute", lambda *given: 1 / 0)
    monkeypatch.setattr(engine, "_wait", lambda: events.append("wait for all"))
    with pytest.raises(ZeroDivisionError):
        computed(engine, batch)
    assert events[-1] == "wait for all"

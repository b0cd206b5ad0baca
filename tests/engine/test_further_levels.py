"""Levels that texts may reach later: the batch holds their adapters and heads, if they can be read."""

from dataclasses import replace

import pytest
import torch

from hplm.adapters.bank import Bank
from hplm.engine.backbone import Backbone
from hplm.engine.lookup import Lookup
from hplm.engine.request import Request
from hplm.engine.staging import Stager, StagingSettings
from hplm.errors import Broken
from hplm.tenants.level import FULL
from hplm.tenants.ticket import Ticket
from tests.ladders import STACK, make_ladders

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return Backbone(make_ladders(tmp_path_factory.mktemp("ladders")).folder, None)


def texts_of(backbone):
    """Returns texts that stand at the first of two levels."""
    view, tenant = backbone.view, backbone.view.snapshot.find("pair")
    ticket = Ticket(view.snapshot.export_number, view.snapshot.generation, tenant.uid, tenant.version, 0, 0, 0, 0)
    found = Lookup(backbone).resolve(view, tenant, ["a b", "c", "d e"], None, False)
    request = Request(ticket, view, tenant, 3, lambda request, answer: None, shares={FULL: 1.0, STACK: 0.5})
    request.plan = tenant.plans[2]
    return request.texts_from(found)


@pytest.fixture
def stager(backbone):
    return Stager(backbone, StagingSettings(4, CPU, torch.float32, depths={STACK: 1, FULL: 2}))


def staged(stager, texts, **how):
    batch = stager.stage(texts, lambda text, error: pytest.fail(str(error)), **how)
    stager.release(batch.held)
    return batch


def test_a_level_that_cannot_be_read_is_tried_once_in_each_view(backbone, stager, monkeypatch, caplog):
    texts, read, tried = texts_of(backbone), Bank.read, []
    further = texts[0].further_records()

    def broken(bank, record, into):
        if record in further:
            tried.append(record)
            raise Broken("its checksum is wrong")
        return read(bank, record, into)

    monkeypatch.setattr(Bank, "read", broken)
    for views in (1, 2):
        for _ in range(3):
            batch = staged(stager, texts)
            assert not any(record in batch.placed for record in further) and len(batch.texts) == 3
        assert tried == views * further and len(caplog.records) == len(tried)
        monkeypatch.setattr(type(backbone), "view", replace(backbone.view))


def test_texts_that_cannot_go_on_in_their_batch_hold_no_further_levels(backbone, stager):
    texts = texts_of(backbone)
    further = texts[0].further_records()
    for may_go_on in (True, False):
        placed = staged(stager, texts, may_go_on=may_go_on).placed
        assert all((record in placed) == may_go_on for record in further)

"""Texts that go on in a batch take over the vectors of the words that they still have."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hplm.engine.lookup import Lookup
from hplm.engine.packing import read_packing
from hplm.engine.request import Request
from hplm.engine.sheets import Sheets
from hplm.engine.staged import StagedBatch
from hplm.engine.staging import Stager, StagingSettings
from hplm.tenants.level import FULL
from hplm.tenants.ticket import Ticket
from testing.toy import TENANTS, WORDS

CPU = torch.device("cpu")
PACKINGS = ["packed", "naive", "concat:rows=2,length=20", "slotted:rows=2,length=20,slot=10"]


def texts_of(backbone):
    view, tenant = backbone.view, backbone.view.snapshot.find(TENANTS[0].id)
    ticket = Ticket(view.snapshot.export_number, view.snapshot.generation, tenant.uid, tenant.version, 0, 0, 0, 0)
    given = [" ".join(WORDS[:count]) for count in (9, 2, 6, 15, 4)]
    found = Lookup(backbone).resolve(view, tenant, given, None, False)
    return Request(ticket, view, tenant, len(given), lambda request, answer: None).texts_from(found)


def vectors(sheets):
    """Returns the vectors of each text's tokens, by the text's index."""
    return {
        index: sheet.sums[torch.from_numpy(rows)]
        for sheet in sheets
        for index, (rows, _) in zip(sheet.indexes, sheet.places(), strict=True)
    }


@pytest.mark.parametrize("few_sizes", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_texts_keep_their_vectors_from_sheet_to_sheet(reference, packing, few_sizes):
    backbone = reference.backbone
    settings = StagingSettings(
        4, CPU, torch.float32, packing=read_packing(packing, lambda texts, tokens: 0.0), few_sizes=few_sizes, batch_tokens=24
    )
    stager = Stager(backbone, settings)

    def staged(texts):
        batch = stager.stage(texts, broken=lambda text, error: pytest.fail(str(error)))
        assert batch is not None
        stager.release(batch.held)
        return batch

    texts = texts_of(backbone)
    batch = staged(texts)
    assert batch.next_sheets()
    for going_on, words_left in (([0, 1, 2, 3], 0.7), ([0, 3], 0.5)):
        assert not batch.next_sheets()
        for index in going_on:
            own = np.arange(texts[index].length) if texts[index].kept is None else texts[index].kept
            gone = np.random.default_rng(index).random(len(own)) > words_left
            gone[0] = False
            texts[index].kept = own[~gone]
        batch.go_on(going_on)
        laid = batch.next_sheets()
        assert all(int(sheet.lengths.sum()) <= 24 for sheet in laid)
        expected = vectors(staged([texts[index] for index in going_on]).sheets)
        found = vectors(laid)
        assert sorted(found) == going_on
        for number, index in enumerate(going_on):
            assert len(found[index]) == len(texts[index].kept)
            torch.testing.assert_close(found[index], expected[number], rtol=0, atol=1e-6)
        for sheet in laid:
            empty = np.setdiff1d(np.arange(len(sheet.positions)), np.concatenate([rows for rows, _ in sheet.places()]))
            assert not sheet.sums[torch.from_numpy(empty)].any()


def test_stacks_of_one_depth_are_computed_one_after_the_other():
    packing = read_packing("packed", lambda texts, tokens: 0.0)
    sheets = Sheets(packing, 1, CPU, torch.float32, depths={"a": 2, "b": 2, "c": 1, FULL: 4})
    laid = [SimpleNamespace(stack=stack) for stack in sorted(("c", "b", "a", FULL, "a", "c", "b"), key=sheets.order_of)]
    batch = StagedBatch([], None, laid, {}, {}, {}, [], sheets)
    begun = []
    while some := batch.next_sheets():
        begun.append("".join(sheet.stack or "." for sheet in some))
    assert begun == ["cc", "aa", "bb", "."]

"""Texts that go on share sheets with those that wait for the same stack, and lie there as they would alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hplm.engine.backbone import Backbone
from hplm.engine.packing import read_packing
from hplm.engine.sheets import Sheets
from hplm.engine.staged import StagedBatch
from hplm.engine.staging import Stager, StagingSettings
from hplm.tenants.level import FULL
from testing.toy import WORDS
from tests.engine.asker import texts_of
from tests.ladders import STACK, make_ladders

CPU = torch.device("cpu")
PACKINGS = ["packed", "naive", "turbo", "concat:rows=2,length=20", "slotted:rows=2,length=20,slot=10"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return Backbone(make_ladders(tmp_path_factory.mktemp("ladders")).folder, None)


def drawn(backbone, chance):
    """Returns texts that stand at the first of two levels or at the last one."""
    given = [" ".join(chance.choice(WORDS, chance.integers(1, 15))) for _ in range(chance.integers(2, 10))]
    texts = texts_of(backbone, "pair", given, shares={FULL: 1.0, STACK: 0.5}, plan=2)
    for text in texts[1:]:
        if chance.random() < 0.4:
            text._stand_at(text.step + 1)
    return texts


def staged(stager, texts):
    batch = stager.stage(texts, lambda text, error: pytest.fail(str(error)))
    stager.release(batch.held)
    return batch


@pytest.mark.parametrize("most_tokens", [None, 12, 30])
@pytest.mark.parametrize("few_sizes", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_texts_that_go_on_lie_with_those_that_wait(backbone, packing, few_sizes, most_tokens):
    arrange = read_packing(packing, lambda texts, tokens: 1e-3 * texts * tokens + 1e-3)
    settings = StagingSettings(
        8, CPU, torch.float32, packing=arrange, few_sizes=few_sizes, depths={STACK: 1, FULL: 2}, batch_tokens=most_tokens
    )
    stager, chance = Stager(backbone, settings), np.random.default_rng(0)
    for _ in range(8):
        texts = drawn(backbone, chance)
        batch = staged(stager, texts)
        computed = [index for sheet in batch.next_sheets() for index in sheet.indexes]
        going_on = [index for index in computed if chance.random() < 0.7]
        for text in (texts[index] for index in going_on):
            text._stand_at(text.step + 1)
            if chance.random() < 0.5:  # it has lost words
                text.kept = np.flatnonzero((chance.random(text.length) < 0.6) | (np.arange(text.length) == 0))
        batch.go_on(going_on)
        sheets = batch.next_sheets()
        assert sorted(index for sheet in sheets for index in sheet.indexes) == sorted(
            {*range(len(texts))} - {*computed} | {*going_on}
        )
        assert not batch.next_sheets()
        if most_tokens is None and packing == "packed":
            assert len(sheets) <= 1
        for sheet in sheets:
            places = dict(zip(sheet.indexes, sheet.places(), strict=True))
            for index, (rows, tokens) in places.items():
                (alone,) = staged(stager, [texts[index]]).sheets
                ((own_rows, own_tokens),) = alone.places()
                assert (tokens == own_tokens).all() and (sheet.positions.numpy()[rows] == own_tokens).all()
                found, expected = sheet.sums[torch.from_numpy(rows)], alone.sums[torch.from_numpy(own_rows)]
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
            empty = np.setdiff1d(np.arange(len(sheet.positions)), np.concatenate([rows for rows, _ in places.values()]))
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

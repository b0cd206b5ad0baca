"""Texts that go on in a batch take over the vectors of the words that they still have."""

from types import SimpleNamespace

import torch

from hplm.engine.packing import read_packing
from hplm.engine.sheets import Sheets
from hplm.engine.staged import StagedBatch
from hplm.tenants.level import FULL

CPU = torch.device("cpu")


def test_stacks_of_one_depth_are_computed_one_after_the_other():
    packing = read_packing("packed", lambda texts, tokens: 0.0)
    sheets = Sheets(packing, 1, CPU, torch.float32, depths={"a": 2, "b": 2, "c": 1, FULL: 4})
    laid = [SimpleNamespace(stack=stack) for stack in sorted(("c", "b", "a", FULL, "a", "c", "b"), key=sheets.order_of)]
    batch = StagedBatch([], None, laid, {}, {}, {}, [], sheets)
    begun = []
    while some := batch.next_sheets():
        begun.append("".join(sheet.stack or "." for sheet in some))
    assert begun == ["cc", "aa", "bb", "."]

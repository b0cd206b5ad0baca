"""Levels and ladders in a store: read as they were saved, and named where they are broken."""

from dataclasses import replace

import pytest
import torch

from builder.store.levels import ladder_of, levels_of, save_ladder
from builder.store.store import TenantFile
from hplm.errors import Broken, InvalidInput
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from testing.random_store import random_level, random_stack, random_store, random_tenant, random_weights
from testing.toy import CONFIG
from tests.support.message import mentioning

LORA = TenantFile("acme", 1, "root", 1, "classify", ["x", "y", "z"], 2, "lora", ("query", "ffn_in"), head_function="tanh")
LADDER = (Plan((Step(0, 0.9, 2.0, 0.5), Step(2, weight=0.5))), Plan((Step(1),)))
WARM = Calibration(temperature=1.5)


@pytest.fixture
def store(tmp_path):
    store = random_store(tmp_path / "store", replace(CONFIG, upper_layers=3), [LORA], corpus_tokens=500, spread=0.3)
    for name, layers in (("small", 1), ("medium", 2)):
        random_stack(store, name, layers, seed=layers)
        random_level(store, LORA, name, 0.3, seed=layers, calibration=WARM)
    return store


def test_levels_are_read_as_they_were_saved_and_each_version_has_its_own(store):
    small, medium = levels_of(store, LORA)
    assert [(level.stack, level.config.upper_layers) for level in (small, medium)] == [("small", 1), ("medium", 2)]
    assert medium.calibrated.calibration == WARM and medium.tenant == LORA
    (adapter, head), (their_adapter, their_head) = medium.weights(), random_weights(medium.config, LORA, 0.3, 2)
    for mine, theirs in ((head, their_head), *zip(adapter, their_adapter, strict=True)):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], part) for name, part in theirs.items())
    save_ladder(store, LORA, LADDER)
    random_tenant(store, replace(LORA, version=2), 0.3, seed=9)
    assert levels_of(store, replace(LORA, version=2)) == [] and ladder_of(store, replace(LORA, version=2)) is None
    assert ladder_of(store, LORA) == LADDER


def test_a_level_of_another_stack_and_a_ladder_of_other_levels_are_refused(store):
    save_ladder(store, LORA, LADDER)
    for file in (levels_of(store, LORA)[0].folder).iterdir():
        file.unlink()
    with pytest.raises(Broken, match=mentioning("ladder.json", "'acme'", "hplm cascade select")):
        ladder_of(store, LORA)
    random_level(store, LORA, "small", 0.3, seed=7)  # as a build does, it removes the ladder
    assert ladder_of(store, LORA) is None
    random_stack(store, "small", 1, seed=5)
    with pytest.raises(InvalidInput, match=mentioning("'small'", "'acme'", "another", "hplm cascade build")):
        levels_of(store, LORA)

"""Levels and ladders in a store: read as they were saved, and named where they are broken."""

from dataclasses import replace

import pytest
import torch

from builder.store.levels import ladder_of, levels_of, save_ladder, stored_levels
from builder.store.store import TenantFile
from hplm.cli.main import main
from hplm.errors import Broken, InvalidInput
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from testing.random_store import random_level, random_stack, random_store, random_tenant, random_weights
from testing.toy import CONFIG
from tests.support.message import mentioning, mentions

LORA = TenantFile("acme", 1, "root", 1, "classify", ["x", "y", "z"], 2, "lora", ("query", "ffn_in"), head_function="tanh")
LADDER = (Plan((Step(0, 0.9, 2.0, 0.5), Step(2, weight=0.5))), Plan((Step(1),)))
WARM = Calibration(temperature=1.5)
LEVEL = (
    b'{"stack": "%s", "layers": %s, "digest": "0", "rank": 2, "adapter": "lora", "places": null, "function": "relu", '
    b'"head_function": null, "dtype": "fp16"}'
)


@pytest.fixture
def store(tmp_path):
    store = random_store(tmp_path / "store", replace(CONFIG, upper_layers=3), [LORA], corpus_tokens=500, spread=0.3)
    for name, layers in (("small", 1), ("medium", 2)):
        random_stack(store, name, layers, seed=layers)
        random_level(store, LORA, name, 0.3, seed=layers, calibration=WARM)
    return store


def test_levels_are_read_as_they_were_saved(store):
    small, medium = levels_of(store, LORA)
    assert [(level.stack, level.config.upper_layers) for level in (small, medium)] == [("small", 1), ("medium", 2)]
    assert medium.calibrated.calibration == WARM and medium.tenant == LORA
    assert (medium.adapter_layout.layers, medium.adapter_layout.places) == (2, ("query", "ffn_in"))
    assert (medium.head_layout.kind, medium.head_layout.size) == ("head2", 3)
    (adapter, head), (their_adapter, their_head) = medium.weights(), random_weights(medium.config, LORA, 0.3, 2)
    assert all(torch.equal(head[name], part) for name, part in their_head.items())
    for mine, theirs in zip(adapter, their_adapter, strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], part) for name, part in theirs.items())


def test_a_version_has_its_own_levels(store):
    save_ladder(store, LORA, LADDER)
    random_tenant(store, replace(LORA, version=2), 0.3, seed=9)
    assert levels_of(store, replace(LORA, version=2)) == [] and ladder_of(store, replace(LORA, version=2)) is None
    assert ladder_of(store, LORA) == LADDER


def test_folders_that_are_being_written_or_removed_are_no_levels(store):
    folder = store.tenant_folder("acme", 1) / "levels"
    for end in (".writing", ".removed"):
        (folder / "small").rename(folder / f"small{end}")
        (folder / f"small{end}/adapter.safetensors").write_bytes(b"short")
        assert [level.stack for level in levels_of(store, LORA)] == ["medium"]
        assert main(["verify", "--store", str(store.folder)]) == 0
        (folder / f"small{end}").rename(folder / "small")


def test_a_level_of_another_stack_is_refused(store):
    random_stack(store, "small", 1, seed=5)
    with pytest.raises(InvalidInput, match=mentioning("'small'", "'acme'", "another", "hplm cascade build")):
        levels_of(store, LORA)
    (store.folder / "stacks/small.safetensors").unlink()
    with pytest.raises(InvalidInput, match=mentioning("'small'", "'acme'", "missing")):
        levels_of(store, LORA)
    assert len(stored_levels(store, LORA)) == 2
    with pytest.raises(InvalidInput, match=mentioning("'small'", "medium", "hplm build stack")):
        store.stack("small")


def test_a_ladder_of_other_levels_is_refused(store):
    save_ladder(store, LORA, LADDER)
    random_level(store, LORA, "small", 0.3, seed=7)  # as a build does, it removes the ladder
    assert ladder_of(store, LORA) is None
    save_ladder(store, LORA, LADDER)
    for file in (levels_of(store, LORA)[0].folder).iterdir():
        file.unlink()
    with pytest.raises(Broken, match=mentioning("ladder.json", "'acme'", "hplm cascade select")):
        ladder_of(store, LORA)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("levels/small/level.json", b"{}"),
        ("levels/small/level.json", b"[]"),
        ("levels/small/level.json", LEVEL % (b"small", b"1000000000")),
        ("levels/small/level.json", LEVEL % (b"medium", b"1")),
        ("levels/small/level.json", (LEVEL % (b"small", b"1")).replace(b'"head_function": null', b'"head_function": []')),
        ("levels/small/calibration.json", None),
        ("levels/small/calibration.json", b"{}"),
        ("levels/small/adapter.safetensors", b"short"),
        ("levels/small/adapter.safetensors", None),
        ("levels/small/head.safetensors", None),
        ("ladder.json", b'{"plans": []}'),
        ("ladder.json", b'{"levels": ["small"], "plans": []}'),
        ("ladder.json", b'{"levels": ["small", "medium"], "plans": [{"steps": [{"level": 3}]}]}'),
        ("link.json", b"{}"),
        ("../../../stacks/small.safetensors", None),
    ],
)
def test_verify_names_what_is_broken(store, capsys, file, content):
    path = store.tenant_folder("acme", 1) / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert main(["verify", "--store", str(store.folder)]) == 1
    assert mentions(capsys.readouterr().err, "acme", file if file in ("ladder.json", "link.json") else "small")

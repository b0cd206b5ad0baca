"""Levels of small tenants are trained, calibrated and stored."""

import json
from dataclasses import replace

import pytest
import torch

from builder.cascade import build as cascade
from builder.cascade.build import build_levels
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.calibrations import read_calibrated
from builder.store.levels import ladder_of, levels_of, save_ladder
from builder.training import finetuning
from hplm.cli.main import main
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from hplm.levels.plan import Plan, Step
from hplm.model.stacks import UpperStack
from hplm.tenants.snapshot import Snapshot
from tests.builder.training.small_tenants import TASKS, examples, pretend, untrained, write
from tests.support.killed import content
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)
LADDER = [Plan((Step(0, 0.9, 2.0), Step(1))), Plan((Step(0),))]


def add_stack(store, name, layers):
    """Adds the first layers of the store's full stack, which have learned nothing."""
    stack, weights = UpperStack(replace(store.config, upper_layers=layers)), store.upper().state_dict()
    stack.load_state_dict({part: weights[part] for part in stack.state_dict()})
    store.save_stack(name, stack, {})


def with_stacks(store):
    add_stack(store, "small", 1)
    add_stack(store, "medium", 2)
    return store


@pytest.fixture
def files(tmp_path):
    """Returns the training data and the texts for calibrations of a classifier."""
    return examples(tmp_path, "cut", 80, "train"), examples(tmp_path, "cut", 150, "fresh")


@pytest.fixture
def place(store, files, monkeypatch):
    """A tenant and levels that learn nothing."""
    with_stacks(store)
    monkeypatch.setattr(cascade, "train", untrained)
    pretend(store, "classify", files[0], epochs=2)
    return store, files[1]


def levels(store, fresh, *stacks, tenant="acme", **options):
    return build_levels(store, tenant, stacks or ("small",), fresh, FP32, CPU, show_progress=False, **options)


@pytest.mark.parametrize("task", ["bio", "cut"])
def test_a_level_learns_its_tenants_task(trained_store, tmp_path, task):
    store, fresh = with_stacks(trained_store), examples(tmp_path, task, 150, "fresh")
    metric, least = TASKS[task][2:4]
    built = levels(store, fresh, soft_labels=task != "cut", tenant=task, epochs=12, learning_rate=1e-2)
    tenant = store.tenant(task)
    (level,) = levels_of(store, tenant)
    dev = level.report()["dev"]
    assert dev["metric"] == metric and dev[metric] >= least - 0.1  # one layer of three
    assert [(one.is_trained, one.is_calibrated) for one in built.levels] == [(True, True)] and built.is_calibrated
    assert level.calibrated.calibration.suits(len(tenant.labels))
    own = read_calibrated(store, tenant)
    assert (level.calibrated.calibration.delta, level.calibrated.asked["texts"]) == (own.calibration.delta, own.asked["texts"])
    adapter, head = level.weights()
    assert (len(adapter), level.adapter_layout.layers) == (1, 1)
    assert {name: tuple(part.shape) for name, part in head.items()} == level.head_layout.shapes


def test_the_same_call_changes_nothing_and_another_one_what_it_must(place, files, tmp_path):
    store, fresh = place
    levels(store, fresh)
    save_ladder(store, store.tenant("acme"), LADDER)
    assert ladder_of(store, store.tenant("acme")) == tuple(LADDER)
    before = content(store.folder)
    built = levels(store, fresh)
    assert content(store.folder) == before
    assert [(one.is_trained, one.is_calibrated) for one in built.levels] == [(False, False)] and not built.is_calibrated
    other = examples(tmp_path, "cut", 150, "other")
    built = levels(store, other)
    assert [(one.is_trained, one.is_calibrated) for one in built.levels] == [(False, True)]
    changed = {name for name, found in content(store.folder).items() if before.get(name) != found}
    assert changed == {"tenants/acme/1/levels/small/calibration.json"}
    assert ladder_of(store, store.tenant("acme")) is None, "it goes when a level changes"
    built = levels(store, other, epochs=1)
    assert [(one.is_trained, one.is_calibrated) for one in built.levels] == [(True, True)]
    add_stack(store, "small", 2)  # another stack of that name
    with pytest.raises(InvalidInput, match=mentioning("'small'", "'acme'", "another")):
        levels_of(store, store.tenant("acme"))
    assert levels(store, other, epochs=1).levels[0].is_trained and levels_of(store, store.tenant("acme"))


def test_an_interrupted_build_continues(place, monkeypatch):
    (store, fresh), soft = place, True
    levels(store, fresh, "medium", soft_labels=soft)
    train, loss, steps = finetuning.train, finetuning._loss, []

    def cut_off(*given):
        train(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(cascade, "train", cut_off)
        levels(store, fresh, "medium", "small", soft_labels=soft)
    assert [level.stack for level in levels_of(store, store.tenant("acme"))] == ["medium"]
    monkeypatch.setattr(cascade, "train", train)
    monkeypatch.setattr(finetuning, "_loss", lambda *given: steps.append(1) or loss(*given))
    built = levels(store, fresh, "medium", "small", soft_labels=soft)
    assert [one.is_trained for one in built.levels] == [True, False] and not steps
    assert not list(store.folder.glob("building/tenants/*"))


def test_a_next_version_has_no_levels_and_says_so(place, tmp_path, capsys):
    store, fresh = place
    levels(store, fresh)
    capsys.readouterr()
    pretend(store, "classify", examples(tmp_path, "cut", 60, "more"), epochs=1)
    assert mentions(capsys.readouterr().err, "acme", 2, "small", "hplm cascade build")
    assert levels_of(store, store.tenant("acme")) == []
    levels(store, fresh)
    (level,) = levels_of(store, store.tenant("acme"))
    # Both versions' data, without the dev texts: the second was trained on the first.
    assert level.report()["training"]["texts"] + level.report()["dev"]["texts"] == 140


@pytest.mark.parametrize("file", ["level.json", "head.safetensors"])
def test_a_broken_level_is_built_again(place, capsys, file):
    store, fresh = place
    levels(store, fresh, "small", "medium", epochs=1)
    path = store.tenant_folder("acme", 1) / "levels/small" / file
    whole = path.read_bytes()
    path.write_bytes(b"short")
    assert main(["verify", "--store", str(store.folder)]) == 1
    assert [one.is_trained for one in levels(store, fresh, "medium", epochs=1).levels] == [False]
    assert [one.is_trained for one in levels(store, fresh, epochs=1).levels] == [True]
    assert main(["verify", "--store", str(store.folder)]) == 0
    assert path.read_bytes() == whole


def test_bad_input_is_named(place, files, tmp_path, capsys):
    store, fresh = place
    add_stack(store, "deep", 3)
    seen = write(tmp_path / "seen.jsonl", [json.loads(line) for line in files[0].read_text().splitlines()] * 2)
    tenant = store.tenant("acme")
    store.save_tenant(replace(tenant, id="imported"), *store.tenant_weights(tenant), {"task": "classify", "imported": {}})
    for arguments, named in [
        (["nobody", "--levels", "small", "--calibrate-texts", fresh], ["'nobody'"]),
        (["acme", "--levels", "large", "--calibrate-texts", fresh], ["'large'", "small", "hplm build stack"]),
        (["acme", "--levels", "small", "deep", "--calibrate-texts", fresh], ["deep.safetensors", 3]),
        (["acme", "--levels", "small", "--calibrate-texts", seen], [seen, 0, 100]),
        (["imported", "--levels", "small", "--calibrate-texts", fresh], ["'imported'", "hplm build tenant"]),
    ]:
        command = ["cascade", "build", "--store", store.folder, "--dtype", "fp32", "--id", *arguments]
        assert main([str(word) for word in command]) == 1
        assert mentions(capsys.readouterr().err, *named), (arguments, named)
    assert not list(store.folder.glob("tenants/*/*/levels")) and not list(store.folder.glob("building/tenants/*"))


def test_the_command_builds_levels_that_are_exported(place, capsys, tmp_path):
    store, fresh = place
    command = ["cascade", "build", "--store", store.folder, "--id", "acme", "--levels", "medium", "small", "--dtype", "fp32"]
    command = [str(word) for word in [*command, "--calibrate-texts", fresh, "--epochs", "1"]]
    assert main(command) == 0
    assert mentions(capsys.readouterr().out, "small", 1, "medium", 2, "accuracy", "ECE", "calibrated")
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["tenant"], told["version"], told["calibrated"]) == ("acme", 1, False)
    built = [(one["stack"], one["layers"], one["changed"]) for one in told["levels"]]
    assert built == [("small", 1, False), ("medium", 2, False)], "the shallowest first"
    save_ladder(store, store.tenant("acme"), LADDER)
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32"))
    assert main(["verify", "--store", str(store.folder)]) == main(["verify", "--repository", str(tmp_path / "repository")]) == 0
    tenant = Snapshot.load(tmp_path / "repository/toy/1/tenants.json").find("acme")
    assert [level.stack for level in tenant.levels] == ["small", "medium"] and tenant.ladder == tuple(LADDER)
    assert tenant.calibration == read_calibrated(store, store.tenant("acme")).calibration

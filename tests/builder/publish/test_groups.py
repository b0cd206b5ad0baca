"""Emitted groups: their own tenants and tables, linked files, the live state, and what is refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch

from builder.publish.config_changes import with_parameters
from builder.publish.export import export
from builder.publish.groups import emit
from builder.publish.live import add_tenant, update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.engine.settings import Settings, read_all
from hplm.errors import InvalidInput, NoTenant
from hplm.parameters import parameters_of
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.tenants.manager import Manager
from hplm.tenants.models import upper_of
from hplm.tenants.snapshot import Snapshot
from testing.reference import Reference
from testing.toy import CONFIG, TENANTS, WORDS, make_chat
from tests.backbones import CUT as BOTH_CUT
from tests.backbones import WHOLE, make_two, placement_of_two
from tests.places import knowledge, learn, make_place
from tests.support.message import mentioning

CUT = {"toy": ((0, CONFIG.upper_layers - 1),)}
TWO = {"toy": ((0, 0), (1, 1))}
TEXT = " ".join(WORDS[:12])
UNITS = (Unit("toy/root", 3), Unit("toy/law", 2), Unit("toy/bio", 2), Unit("toy/bio/acme", 1))


def group(name, *units, devices=("cpu:0",), intra=1, cuts=CUT):
    return Group(name, "m0", devices, intra, cuts, units)


def placement_of(folder, *groups, units=UNITS):
    export = Snapshot.load(folder / "tenants.json").export
    return Placement(groups, units, {"toy": "fp32"}, {"toy": export}, "a cluster", "a profile")


def test_a_group_answers_for_its_tenants_as_the_whole_repository_does(toy, reference, tmp_path):
    """A group of several cores has as many threads."""
    two = group("two", "toy/bio", "toy/law", "toy/root", devices=("cpu:0", "cpu:1"), intra=2)
    placement = placement_of(toy.folder, group("one", "toy/root", "toy/bio/acme"), two)
    commands = [found.command for found in emit(placement, toy.repository, tmp_path / "groups")]
    assert "--http-port 8000" in commands[0] and "--http-port 8010" in commands[1] and "taskset -c 0,1 " in commands[1]
    emitted = tmp_path / "groups"
    one, two = (Reference.open(emitted / name / "toy/1") for name in ("one", "two"))
    assert {tenant.id for tenant in one.backbone.view.snapshot.tenants} == {"acme", "beta", "echo", "hugo"}
    assert {tenant.id for tenant in two.backbone.view.snapshot.tenants} == {tenant.id for tenant in TENANTS} - {"acme"}
    for own in (one, two):
        for tenant in own.backbone.view.snapshot.tenants:
            assert torch.equal(own.forward(TEXT, tenant.id), reference.forward(TEXT, tenant.id))
    with pytest.raises(NoTenant):
        two.forward(TEXT, "acme")
    for name, tables, threads in (("one", ["bio", "root"], "1"), ("two", ["bio", "law", "root"], "2")):
        assert sorted(path.name for path in (emitted / name / "toy/1/plot").iterdir()) == tables
        assert {path.name for path in (emitted / name).iterdir()} == {"hplm", "toy", "toy-lookup", "toy-upper"}
        for file in ("upper.safetensors", "plot/root/1/values"):
            assert os.path.samefile(emitted / name / "toy/1" / file, toy.folder / file)
        config = emitted / name / "toy-upper/config.pbtxt"
        assert not os.path.samefile(config, toy.repository / "toy-upper/config.pbtxt")
        assert parameters_of(config)["threads"] == threads and parameters_of(config)["device"] == "cpu"
    with pytest.raises(InvalidInput, match=mentioning(emitted)):
        emit(placement, toy.repository, emitted)


def test_a_group_of_several_stages_has_the_layers_of_each_device(toy, tmp_path, monkeypatch):
    config = "one/toy-upper/config.pbtxt"
    cut = group("one", "toy/root", devices=("cpu:4", "cpu:2"), cuts=TWO)
    (found,) = emit(placement_of(toy.folder, cut), toy.repository, tmp_path / "cut")
    parameters = parameters_of(tmp_path / "cut" / config)
    assert parameters["stages"] == "0-0@cpu:4 1-1@cpu:2" and "taskset -c 4,2 " in found.command
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 4})
    settings = Settings.read(parameters)
    assert [(stage.first, stage.last, stage.core) for stage in settings.stages] == [(0, 0, 4), (1, 1, 2)]
    whole = placement_of(tmp_path / "cut/one/toy/1", group("one", "toy/root"))  # of a repository that is cut
    emit(whole, tmp_path / "cut/one", tmp_path / "whole")
    assert Settings.read(parameters_of(tmp_path / "whole" / config)).stages == ()
    assert "stages" not in parameters_of(toy.repository / "toy-upper/config.pbtxt")


@pytest.mark.slow
def test_a_group_has_what_a_live_state_serves_now(tmp_path):
    store, repository, state = make_place(tmp_path)
    live = Manager.open(repository, state)
    add_tenant(live, store, "new-c")
    learn(store, "tenant-0", 2, seed=9)
    update_tenant(live, store, "tenant-0")
    folder, out = repository / "toy/1", tmp_path / "groups"
    placement = placement_of(folder, group("one", "toy/root"), units=(Unit("toy/root", 3),))
    found = parameters_of(repository / "toy-upper/config.pbtxt")
    placement = replace(placement, precisions={"toy": Settings.read(found).precision.name})
    emit(placement, repository, out, state)
    now, emitted = Reference.open(folder, state), Reference.open(out / "one/toy/1")
    assert {tenant.id for tenant in emitted.backbone.view.snapshot.tenants} == {"tenant-0", "tenant-1", "new-c"}
    for tenant in emitted.backbone.view.snapshot.tenants:
        assert torch.equal(emitted.forward(TEXT, tenant.id), now.forward(TEXT, tenant.id))
    own = Manager.open(out / "one", tmp_path / "own state")  # a state of its own begins empty, and takes changes
    own.registry.begin()
    own.add("new-a", knowledge(store, "new-a"))
    assert Reference.open(out / "one/toy/1", tmp_path / "own state").forward(TEXT, "new-a") is not None
    (record,) = {one.file for one in emitted.backbone.view.snapshot.find("new-c").records()}
    assert os.path.samefile(state / "toy/records" / record, out / "one/toy/1/records" / record)  # nobody changes it


@pytest.mark.parametrize(
    "changed, named",
    [
        (
            {"groups": (group("one", "toy/root", devices=("cpu:0", "cpu:1", "cpu:2", "cpu:3"), intra=2, cuts=TWO),)},
            ["'one'", "2 stages of 2", "--intra 1"],
        ),
        ({"groups": (group("one", "toy/root", devices=("cuda:0", "cuda:1"), intra=2),)}, ["'one'", "--intra 1"]),
        ({"groups": (group("one"),)}, ["'one'", "units"]),
        ({"exports": {"toy": "another"}}, ["stale", "hplm place search"]),
        ({"precisions": {"toy": "bf16"}}, ["'bf16'", "'fp32'", "stale"]),
        ({"units": UNITS[:1]}, ["'acme'", "stale"]),
        ({"units": (*UNITS, Unit("toy/art", 1)), "groups": (group("one", "toy/art"),)}, ["'toy/art'", "stale"]),
        ({"groups": (group("one", "toy/root", cuts={"toy": ((0, 6),)}),)}, ["7", "stale"]),
        ({"groups": (group("one", "toy/root", cuts={"bert": ((0, 1),)}),)}, ["'bert'", "stale"]),
    ],
)  # fmt: skip
def test_placements_that_cannot_be_emitted_are_refused_and_leave_nothing(toy, tmp_path, changed, named):
    placement = replace(placement_of(toy.folder, group("one", "toy/root")), **changed)
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        emit(placement, toy.repository, tmp_path / "groups")
    assert not list(tmp_path.iterdir())


def test_stages_that_the_export_leaves_no_batches_for_are_refused(toy, tmp_path):
    repository = tmp_path / "repository"
    shutil.copytree(toy.repository, repository)
    config = repository / "toy-upper/config.pbtxt"
    config.write_text(with_parameters(config.read_text(), {"slots": "2"}))
    cut = group("one", "toy/root", devices=("cpu:4", "cpu:2"), cuts=TWO)
    with pytest.raises(InvalidInput, match=mentioning("'one'", "slots", "2")):
        emit(placement_of(toy.folder, cut), repository, tmp_path / "groups")
    assert not (tmp_path / "groups").exists()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    repository, _ = make_two(tmp_path_factory.mktemp("two"))
    return repository


def test_a_group_of_several_backbones_has_one_engine_for_all(two, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 4})
    (found,) = emit(placement_of_two(two, ("cpu:4", "cpu:2"), BOTH_CUT), two, tmp_path / "groups")
    group = found.repository
    assert {path.name for path in group.iterdir()} == {*("hplm", "toy", "toy-lookup", "deep", "deep-lookup", "toy+deep-upper")}
    text = (group / "toy+deep-upper/config.pbtxt").read_text()
    assert 'name: "toy+deep-upper"' in text and "# toy+deep-upper: " in text and "toy-upper" not in text
    assert "At the export: " in (two / "toy-upper/config.pbtxt").read_text() and "At the export: " not in text
    settings = read_all(parameters_of(group / "toy+deep-upper/config.pbtxt"))
    assert {name: [(stage.first, stage.last, stage.core) for stage in own.stages] for name, own in settings.items()} == {
        "toy": [(0, 0, 4), (1, 1, 2)], "deep": [(0, 1, 4), (2, 3, 2)],
    }  # fmt: skip
    for name in ("toy", "deep"):
        assert 'model_name: "toy+deep-upper"' in (group / name / "config.pbtxt").read_text()
        assert upper_of(group, name) == "toy+deep-upper" and upper_of(two, name) == f"{name}-upper"
    assert found.tenants == 2 * len(TENANTS)


NEWER = 'parameters { key: "newer" value { string_value: "7" } }\n'


@pytest.mark.parametrize(
    "change, precisions, named",
    [
        (lambda text: with_parameters(text, {"slots": "9"}), {}, ["toy", "deep", "'slots'", "'4'", "'9'"]),
        (lambda text: text + NEWER, {}, ["toy", "deep", "'newer'", "'missing'", "'7'"]),
        (lambda text: text, {"toy": "fp32", "deep": "int8"}, ["toy in fp32", "deep in int8", "--dtype"]),
    ],
    ids=["parameters", "another parameter", "precisions"],
)
def test_backbones_that_cannot_share_an_engine_are_refused(two, tmp_path, change, precisions, named):
    repository = shutil.copytree(two, tmp_path / "repository")
    config = repository / "deep-upper/config.pbtxt"
    config.write_text(change(config.read_text()))
    placement = placement_of_two(repository, ("cpu:4", "cpu:2"), BOTH_CUT)
    placement = replace(placement, precisions=precisions or placement.precisions)
    with pytest.raises(InvalidInput, match=mentioning("'both'", *named)):
        emit(placement, repository, tmp_path / "groups")


def test_a_decoder_in_a_group_is_refused(two, tmp_path):
    repository = shutil.copytree(two, tmp_path / "repository")
    chat = make_chat(tmp_path / "chat", [TenantFile("writer", 1, "root", 1, "generate", [], 0)])
    shutil.copytree(chat.repository, repository, dirs_exist_ok=True)
    cuts = {"toy": WHOLE["toy"], "chat": ((0, chat.store.config.upper_layers - 1),)}
    placement = placement_of_two(repository, ("cpu:0",), cuts)
    with pytest.raises(InvalidInput, match=mentioning("'chat'", "'both'", "decoder", repository)):
        emit(placement, repository, tmp_path / "groups")


def test_a_store_is_not_exported_into_the_repository_of_a_group(two, toy, tmp_path):
    emit(placement_of_two(two, ("cpu:4", "cpu:2"), BOTH_CUT), two, tmp_path / "groups")
    with pytest.raises(InvalidInput, match=mentioning("toy+deep-upper", "'toy'", "hplm place emit")):
        export(toy.store, tmp_path / "groups/both", ServingOptions(), replace=True)

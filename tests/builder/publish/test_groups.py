"""Emitted groups: their own tenants and tables, linked files, one registry for all, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace

import pytest
import torch

from builder.publish.export import export
from builder.publish.groups import emit
from builder.publish.live import add_tenant, update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.engine.backbone import Backbone
from hplm.engine.settings import EncoderSettings
from hplm.errors import Broken, InvalidInput, NoTenant
from hplm.parameters import parameters_of
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.tenants.directory import Directory
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from testing.reference import Reference
from testing.toy import CONFIG, SERVED, WORDS, make_chat
from tests.backbones import CUT as BOTH_CUT
from tests.backbones import WHOLE, make_two, placement_of_two
from tests.places import learn, make_place
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
    assert {tenant.id for tenant in two.backbone.view.snapshot.tenants} == {tenant.id for tenant in SERVED} - {"acme"}
    for own in (one, two):
        for tenant in own.backbone.view.snapshot.tenants:
            assert torch.equal(own.forward(TEXT, tenant.id), reference.forward(TEXT, tenant.id))
    with pytest.raises(NoTenant):
        two.forward(TEXT, "acme")
    for name, own, tables, threads in (("one", one, {"bio", "root"}, "1"), ("two", two, {"bio", "law", "root"}, "2")):
        assert {table.meta.domain for table in own.backbone.view.forest.tables()} == tables
        assert {path.name for path in (emitted / name).iterdir()} == {"hplm", "toy", "toy-lookup", "toy-upper"}
        config, file = "toy-upper/config.pbtxt", "toy/1/plot/root/1/values"
        assert (emitted / name / file).samefile(toy.repository / file), "a table is not linked"
        assert not (emitted / name / config).samefile(toy.repository / config)
        assert parameters_of(emitted / name / config).items() >= {"threads": threads, "device": "cpu"}.items()
    with pytest.raises(InvalidInput, match=mentioning(emitted)):
        emit(placement, toy.repository, emitted)


def test_a_group_of_several_stages_has_the_layers_of_each_device(toy, tmp_path):
    config = "one/toy-upper/config.pbtxt"
    cut = group("one", "toy/root", devices=("cpu:4", "cpu:2"), cuts=TWO)
    (found,) = emit(placement_of(toy.folder, cut), toy.repository, tmp_path / "cut")
    assert parameters_of(tmp_path / "cut" / config)["stages"] == "0-0@cpu:4 1-1@cpu:2" and "taskset -c 4,2 " in found.command
    whole = placement_of(tmp_path / "cut/one/toy/1", group("one", "toy/root"))  # of a repository that is cut
    emit(whole, tmp_path / "cut/one", tmp_path / "whole")
    assert EncoderSettings.read(parameters_of(tmp_path / "whole" / config)).stages == ()
    assert "stages" not in parameters_of(toy.repository / "toy-upper/config.pbtxt")


def test_a_change_of_the_one_registry_reaches_the_group_that_serves_its_tenant(tmp_path):
    store, repository, state = make_place(tmp_path)
    live, out = Manager.open(repository, state), tmp_path / "groups"
    add_tenant(live, store, "new-c")
    groups = (group("one", "toy/root"), group("two", "toy/root/tenant-1"))
    placement = placement_of(repository / "toy/1", *groups, units=(Unit("toy/root", 2), Unit("toy/root/tenant-1", 1)))
    found = EncoderSettings.read(parameters_of(repository / "toy-upper/config.pbtxt"))
    placement = replace(placement, precisions={"toy": found.precision.name})
    emitted = emit(placement, repository, out, state)
    assert [one.tenants for one in emitted] == [2, 1] and f"--state {state} " in emitted[0].command

    def served():
        for name in ("one", "two"):
            snapshot = Backbone(out / name / "toy/1", state).view.snapshot
            (known,) = Directory(out / name, state).snapshots()
            assert known.tenants == snapshot.tenants
            yield {tenant.id for tenant in snapshot.tenants}

    assert [*served()] == [{"new-c", "tenant-0"}, {"tenant-1"}]
    learn(store, "tenant-0", 2, seed=9)
    update_tenant(live, store, "tenant-0")
    live.delete("new-c")
    other = Manager.open(out / "two", state)  # every repository of the export names the same registry
    add_tenant(other, store, "new-a")
    assert [*served()] == [{"tenant-0", "new-a"}, {"tenant-1"}]
    whole, one = Reference.open(repository / "toy/1", state), Reference.open(out / "one/toy/1", state)
    for tenant in ("tenant-0", "new-a"):
        assert torch.equal(one.forward(TEXT, tenant), whole.forward(TEXT, tenant))
    other.delete("tenant-1")
    assert [*served()] == [{"tenant-0", "new-a"}, set()]


def test_a_filter_that_cannot_be_read_serves_nothing(toy, tmp_path):
    """Without its filter the group would serve all tenants."""
    (found,) = emit(placement_of(toy.folder, group("one", "toy/root")), toy.repository, tmp_path / "groups")
    (found.repository / "toy/1/filter.json").write_text("{}")
    for opened in (lambda: Backbone(found.repository / "toy/1"), lambda: Directory(found.repository)):
        with pytest.raises(Broken, match=mentioning(found.repository / "toy/1/filter.json", "hplm place emit")):
            opened()


@pytest.mark.parametrize(
    "changed, named",
    [
        (
            {"groups": (group("one", "toy/root", devices=("cpu:0", "cpu:1", "cpu:2", "cpu:3"), intra=2, cuts=TWO),)},
            ["'one'", "2 stages of 2", "hplm place search"],
        ),
        ({"groups": (group("one", "toy/root", devices=("cuda:0", "cuda:1"), intra=2),)}, ["'one'", "--intra 1"]),
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


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    repository, _ = make_two(tmp_path_factory.mktemp("two"))
    return repository


def copied(repository, folder):
    """Returns a copy whose tables, of a hundred megabytes, are the same files."""

    def copy(source, target):
        (os.link if source.endswith("/values") else shutil.copy2)(source, target)

    return shutil.copytree(repository, folder / "repository", copy_function=copy)


def test_a_group_of_several_backbones_has_an_engine_for_each(two, tmp_path):
    repository = copied(two, tmp_path)
    (repository / "deep-upper/config.pbtxt").write_text(with_slots((two / "deep-upper/config.pbtxt").read_text(), "9"))
    (found,) = emit(placement_of_two(repository, ("cpu:4", "cpu:2"), BOTH_CUT), repository, tmp_path / "groups")
    names = [f"{name}{part}" for name in ("toy", "deep") for part in ("", "-lookup", "-upper")]
    assert {path.name for path in found.repository.iterdir()} == {"hplm", *names}
    for name, stages, slots in (("toy", "0-0@cpu:4 1-1@cpu:2", "4"), ("deep", "0-1@cpu:4 2-3@cpu:2", "9")):
        parameters = parameters_of(found.repository / f"{name}-upper/config.pbtxt")
        assert parameters.items() >= {"backbone": name, "stages": stages, "slots": slots}.items()
        assert "$" not in (found.repository / f"{name}-upper/config.pbtxt").read_text()
    assert found.tenants == 2 * len(SERVED) and "taskset -c 4,2 " in found.command


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (4, "2"), (5, "2")])
def test_the_backbones_of_a_group_divide_its_cores(two, tmp_path, cores, threads):
    devices = tuple(f"cpu:{core}" for core in range(cores))
    placement = placement_of_two(two, devices, WHOLE)
    placement = replace(placement, groups=tuple(replace(group, intra=cores) for group in placement.groups))
    (found,) = emit(placement, two, tmp_path / "groups")
    for name in ("toy", "deep"):
        assert parameters_of(found.repository / f"{name}-upper/config.pbtxt")["threads"] == threads


def with_slots(config, slots):
    return re.sub(r'("slots" .* string_value: )"4"', rf'\g<1>"{slots}"', config)


def test_what_was_edited_in_the_parameters_of_an_export_stays_in_its_groups(toy, tmp_path):
    repository, placement = copied(toy.repository, tmp_path), placement_of(toy.folder, group("one", "toy/root"))
    config = repository / "toy-upper/config.pbtxt"
    config.write_text(with_slots(config.read_text(), "9") + NEWER)
    emit(placement, repository, tmp_path / "groups")
    expected = {**parameters_of(config), "device": "cpu", "threads": "1", "dtype": "fp32"}
    assert expected["slots"] == "9" and parameters_of(tmp_path / "groups/one/toy-upper/config.pbtxt") == expected


NEWER = 'parameters { key: "newer" value { string_value: "7" } }\n'


def test_a_backbone_with_too_few_slots_for_its_stages_is_refused(two, tmp_path):
    repository = copied(two, tmp_path)
    config = repository / "deep-upper/config.pbtxt"
    config.write_text(with_slots(config.read_text(), "2"))
    with pytest.raises(InvalidInput, match=mentioning("'both'", "'deep'", "slots", "2")):
        emit(placement_of_two(repository, ("cpu:4", "cpu:2"), BOTH_CUT), repository, tmp_path / "groups")
    assert not (tmp_path / "groups").exists()


def test_a_decoder_in_a_group_is_refused(two, tmp_path):
    repository = copied(two, tmp_path)
    chat = make_chat(tmp_path / "chat", [TenantVersion("writer", 1, "root", 1, "generate", [], 0)])
    shutil.copytree(chat.repository, repository, dirs_exist_ok=True)
    cuts = {"toy": WHOLE["toy"], "chat": ((0, chat.store.config.upper_layers - 1),)}
    placement = placement_of_two(repository, ("cpu:0",), cuts)
    with pytest.raises(InvalidInput, match=mentioning("'chat'", "'both'", "decoder", repository)):
        emit(placement, repository, tmp_path / "groups")


def test_a_store_is_not_exported_into_the_repository_of_a_group(two, toy, tmp_path):
    emit(placement_of_two(two, ("cpu:4", "cpu:2"), BOTH_CUT), two, tmp_path / "groups")
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "groups/both", "'toy'", "hplm place emit")):
        export(toy.store, tmp_path / "groups/both", ServingOptions(), replace=True)

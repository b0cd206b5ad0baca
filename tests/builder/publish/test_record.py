"""A record file of another store or registry is served as a tenant, if it is one and fits the backbone."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from hplm.adapters.layout import Layout
from hplm.adapters.records import FIELD, RecordFile
from hplm.tenants.manager import Manager
from tests.cli.commands import refused, run
from tests.places import answer, make_place
from tests.support.message import mentions


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("record"))


@pytest.fixture(scope="module")
def record(place):
    (found,) = place[0].tenant_folder("new-c", 1).glob("*.safetensors")
    return found.read_bytes()


def given(place, path):
    return ["tenant", "publish", "acme", "--record", path, "--repository", place[1], "--state", place[2]]


def test_a_record_is_served_as_the_store_s_version_of_it_and_changes_nothing_again(place, record, tmp_path, capsys):
    (path := tmp_path / "any name").write_bytes(record)
    assert run(capsys, *given(place, path))["after"] == 1
    again = run(capsys, *given(place, path))
    assert (again["before"], again["after"]) == (1, 1)
    run(capsys, "tenant", "publish", "new-c", "--store", place[0].folder, *given(place, path)[5:])
    assert torch.equal(answer(place, "acme"), answer(place, "new-c"))
    manager = Manager.open(*place[1:])
    assert manager.current().find("acme").labels == ("O", "I")
    manager.delete("acme")
    manager.delete("new-c")


def changed(
    record, tensors=lambda found: None, layouts=lambda found: None, tenant=lambda found: None, header=lambda found: None
):
    """Returns a record file whose parts these functions have changed in place."""
    found, says = load(record), json.loads(json.dumps(RecordFile(record).header))
    for change, part in ((tensors, found), (layouts, says["layouts"]), (tenant, says["tenant"]), (header, says)):
        change(part)
    return save(found, {FIELD: json.dumps(says)})


def fitted(record, **size):
    """Returns a record with an adapter of another size."""
    layout = replace(Layout.of(RecordFile(record).header["layouts"]["adapter"]), **size)
    adapter = {"adapter": torch.zeros(layout.layers, layout.layer_size, dtype=layout.torch_dtype)}
    return changed(record, lambda one: one.update(adapter), lambda one: one.update(adapter=layout.key))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda record: b"", ["no record"]),
        (lambda record: b"text\n" * 100, ["no record"]),
        (lambda record: record[:-100], ["no record"]),
        (lambda record: save(load(record)), ["no record"]),
        (lambda record: changed(record, header=lambda one: one.update(format=1)), ["format"]),
        (lambda record: changed(record, header=lambda one: one.pop("tenant")), ["'tenant'"]),
        (lambda record: changed(record, tenant=lambda one: one.update(labels=[1, 2])), ["labels"]),
        (lambda record: changed(record, tenant=lambda one: one.update(labels=["x", "x"])), ["'x'"]),
        (lambda record: changed(record, tenant=lambda one: one.update(domain="law")), ["'law'"]),
        (lambda record: changed(record, tenant=lambda one: one.update(domain_version="1")), ["domain_version"]),
        (lambda record: changed(record, tenant=lambda one: one.update(task=["tag"])), ["task"]),
        (lambda record: changed(record, tenant=lambda one: one.update(task="sing")), ["'sing'"]),
        (lambda record: changed(record, tensors=lambda one: one["head"].fill_(torch.nan)), ["head", "NaN"]),
        (lambda record: changed(record, tensors=lambda one: one.pop("adapter")), ["'adapter'"]),
        (lambda record: changed(record, tensors=lambda one: one.update(adapter=one["adapter"][:, :-1].clone())), ["bytes"]),
        (lambda record: fitted(record, hidden=64), ["adapter", "layout"]),
        (lambda record: fitted(record, layers=3), ["adapter", "layout"]),
        (lambda record: changed(record, layouts=lambda one: one.update(adapter="magic,1")), ["magic"]),
    ],
)  # fmt: skip
def test_what_is_no_record_of_the_backbone_is_refused_by_its_name(place, record, tmp_path, capsys, change, named):
    (path := tmp_path / "record.safetensors").write_bytes(change(record))
    said = refused(capsys, *given(place, path))
    assert (
        mentions(said, *named)
        and "Traceback" not in said
        and "acme" not in {tenant.id for tenant in Manager.open(*place[1:]).current().tenants}
    )


def test_options_of_a_store_do_not_stand_beside_a_record(place, record, tmp_path, capsys):
    (path := tmp_path / "record.safetensors").write_bytes(record)
    words = given(place, path)
    assert mentions(refused(capsys, *words, "--store", place[0].folder), "--store", "--record")
    assert mentions(refused(capsys, *words, "--version", 1), "--version")
    assert mentions(refused(capsys, *words[:2], "other", *words[2:]), "one tenant")
    assert mentions(refused(capsys, *words[:4], tmp_path / "none", *words[5:]), tmp_path / "none")

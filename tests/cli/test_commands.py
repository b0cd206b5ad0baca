"""The command line as a user meets it: one line of JSON under --json, errors without a traceback."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from hplm.cli.main import main
from hplm.tenants import quarantine
from testing.toy import TENANTS
from tests.support.message import mentions


def _json(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def test_tenant_list_returns_the_facts_of_each_tenant(toy, capsys):
    listed = _json(capsys, "tenant", "list", "--repository", toy.repository)
    assert [tenant["id"] for tenant in listed["tenants"]] == [tenant.id for tenant in TENANTS]
    assert listed["tenants"][0] == {
        "id": "acme",
        "backbone": "toy",
        "domain": "bio",
        "domain_version": 1,
        "version": 1,
        "task": "classify",
        "labels": ["red", "grün", "blue"],
        "levels": [],
        "plans": 0,
        "link": None,
        "homes": 1,
        "open": True,
        "quarantined": False,
    }


def test_a_quarantined_tenant_is_listed_and_released(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quarantine, "FOLDER", tmp_path)
    of_toy, places = quarantine.Quarantine(toy.repository / "toy"), ("--repository", toy.repository)
    of_toy.put("acme")
    listed = _json(capsys, "tenant", "list", *places)["tenants"]
    assert [tenant["id"] for tenant in listed if tenant["quarantined"]] == ["acme"]
    assert _json(capsys, "tenant", "release", "acme", *places) == {"tenant": "acme", "backbones": ["toy"]}
    assert main(["tenant", "release", "acme", *map(str, places)]) == 1
    assert mentions(capsys.readouterr().err, "'acme'", "quarantined", toy.repository, "--repository")
    of_toy.put("beta")
    assert of_toy.tenants(time.time() + quarantine.SECONDS - 60) == {"beta"}
    assert of_toy.tenants(time.time() + quarantine.SECONDS) == frozenset()  # an hour later
    assert not list(tmp_path.iterdir())


def test_export_prints_what_it_wrote(toy, tmp_path, capsys):
    options = "--slots", 6, "--dtype", "fp32"
    exported = _json(capsys, "export", "--store", toy.store.folder, "--repository", tmp_path / "r", *options)
    repository = str(tmp_path / "r")
    assert exported == {
        "scheme": "hplm", "backbone": "toy", "tenants": len(TENANTS), "tables": 3, "repository": repository, "int8": None
    }  # fmt: skip
    assert '"6"' in (tmp_path / "r/toy-upper/config.pbtxt").read_text()


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["tenant", "show", "nobody", "--repository", "{toy}"], ["'nobody'", "{toy}", "hplm tenant list"]),
        (["tenant", "list", "--repository", "{tmp}/none"], ["{tmp}/none", "--repository"]),
        (["tenant", "list", "--repository", "{tmp}"], ["{tmp}"]),
        (["export", "--store", "{tmp}", "--repository", "{tmp}/r"], ["{tmp}", "hplm build root"]),
        (["build", "tenant", "--store", "{tmp}", "--id", "a", "--task", "tag", "--train", "x"], ["{tmp}", "hplm build root"]),
        (
            ["build", "root", "--store", "{tmp}/s", "--model", "{tmp}/none", "--corpus", "{toy}/toy/config.pbtxt"],
            ["{tmp}/none"],
        ),
    ],
)
def test_errors_name_the_thing_and_have_no_traceback(toy, tmp_path, capsys, arguments, named):
    arguments, named = ([one.format(toy=toy.repository, tmp=tmp_path) for one in those] for those in (arguments, named))
    assert main(arguments) == 1
    assert mentions(capsys.readouterr().err, *named)


def test_an_error_of_the_system_is_one_line_and_an_error_of_the_code_a_traceback(toy, tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    places = ["--repository", str(toy.repository), "--state", str(tmp_path / "state")]
    assert main(["restore", "--from", str(file), *places]) == 1
    assert capsys.readouterr().err == f"hplm restore: Not a directory: {file}/backup.json\n"
    assert main(["begin", *places[:3], str(file)]) == 1
    assert mentions(capsys.readouterr().err, file / "toy", "Not a directory")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builder.publish.export.export", full)
    export = ["export", "--store", str(toy.store.folder), "--repository", str(tmp_path / "r")]
    assert main(export) == 1 and capsys.readouterr().err == "hplm export: No space left on device\n"
    monkeypatch.setattr("builder.publish.export.export", None)
    with pytest.raises(TypeError):
        main(export)


def test_a_device_without_memory_is_one_line_with_a_way_out(toy, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has ...")

    monkeypatch.setattr("builder.publish.export.export", full)
    assert main(["export", "--store", str(toy.store.folder), "--repository", str(tmp_path / "r")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("hplm export: CUDA out of memory. Tried to allocate 2 GiB.") and said.count("\n") == 1
    assert mentions(said, "--device cpu")


def test_bars_are_written_once_a_second_at_most_if_nobody_watches():
    code = """
from hplm.cli.main import main
assert main(["verify", "--store", "nowhere"]) == 1
from tqdm import tqdm
print(tqdm([]).mininterval)
"""
    unset = {name: value for name, value in os.environ.items() if name != "TQDM_MININTERVAL"}  # `run` sets it
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, env=unset).stdout
    assert float(said) == 1

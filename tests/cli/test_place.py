"""`hplm place`: from a measured profile to the repositories of a placement, and what it refuses."""

from __future__ import annotations

import json
import os

import pytest

from hplm.cli.main import main
from hplm.placement.cluster import Cluster, Device, Machine
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile
from hplm.placement.units import Unit, units_of
from hplm.tenants.snapshot import Snapshot
from testing.toy import CONFIG, TENANTS
from tests.support.message import mentions

CORE = f"cpu:{min(os.sched_getaffinity(0))}"


@pytest.mark.slow
def test_a_profiled_repository_is_placed_and_emitted(toy, tmp_path, capfd):
    source = ["--repository", str(toy.repository)]
    measured = ["--devices", CORE, "--rounds", "1", "--wire", "--to", f"{tmp_path}/p.json"]
    assert main(["place", "profile", *source, *measured, "--json"]) == 0
    printed = capfd.readouterr()
    report = json.loads(printed.out)
    assert mentions(printed.err, "toy, 1 device a stage")  # progress, from another process
    own = report["backbones"]["toy"]
    assert own["tenants"] == len(TENANTS) and own["mb"]["tables"] > 0 and own["ms"]["1"]["16"] > 0
    profile = Profile.read(tmp_path / "p.json")
    cluster = Cluster((Machine("here", (Device(CORE, 10**9),), 10**9),))
    units = units_of(profile)
    group = Group("all", "here", (CORE,), 1, {"toy": ((0, own["layers"] - 1),)}, tuple(unit.name for unit in units))
    Placement.of((group,), units, cluster, profile).write(tmp_path / "placement.json")
    emit = ["place", "emit", "--placement", f"{tmp_path}/placement.json", *source, "--to", f"{tmp_path}/groups"]
    assert main(emit) == 0
    assert mentions(capfd.readouterr().out, f"{tmp_path}/groups/all", f"{len(TENANTS)} tenants", "hplm serve")
    assert (tmp_path / "groups/all/toy/1/tenants.json").is_file()
    assert main([*emit, "--json"]) == 1
    assert mentions(capfd.readouterr().err, f"{tmp_path}/groups")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["profile", "--devices", "cpu:99999", "--to", "{tmp}/p.json"], ["cpu:99999"]),
        (["profile", "--devices", CORE, "--to", "{tmp}/none/p.json"], ["{tmp}/none"]),
        (["profile", "--devices", CORE, "--rounds", "0", "--to", "{tmp}/p.json"], ["--rounds", "0"]),
        (["profile", "--devices", CORE, "--backbone", "other", "--to", "{tmp}/p.json"], ["'other'", "toy"]),
        (["profile", "--devices", CORE, "--state", "{tmp}/none", "--to", "{tmp}/p.json"], ["{tmp}/none"]),
        (["emit", "--placement", "{tmp}/none.json", "--to", "{tmp}/groups"], ["{tmp}/none.json", "hplm place search"]),
    ],
)
def test_bad_input_is_one_line_that_names_it(toy, tmp_path, capsys, arguments, named):
    given = ["place", arguments[0], "--repository", str(toy.repository), *(own.format(tmp=tmp_path) for own in arguments[1:])]
    assert main(given) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and mentions(printed, *(name.format(tmp=tmp_path) for name in named))


def test_emit_names_tenants_that_no_group_serves(toy, tmp_path, capsys):
    export = Snapshot.load(toy.folder / "tenants.json").export
    cut = {"toy": ((0, CONFIG.upper_layers - 1),)}
    units = (Unit("toy/root", 3), Unit("toy/law", 2), Unit("toy/bio", 3))
    groups = (Group("one", "here", ("cpu:0",), 1, cut, ("toy/root", "toy/bio")),)
    Placement(groups, units, {"toy": "fp32"}, {"toy": export}, "c", "p").write(tmp_path / "p.json")
    emit = ["place", "emit", "--placement", f"{tmp_path}/p.json", "--repository", str(toy.repository), "--to"]
    assert main([*emit, f"{tmp_path}/groups"]) == 0
    assert mentions(capsys.readouterr().out, "no group serves 2 tenants", "toy/city", "toy/flux")
    assert main([*emit, f"{tmp_path}/again", "--json"]) == 0
    (gap,) = json.loads(capsys.readouterr().out)["gaps"]
    assert mentions(gap, "toy/city", "toy/flux")

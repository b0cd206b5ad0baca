"""The files of placement: what is written is read again, and what does not fit is refused with the file and the field."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from hplm.errors import InvalidInput
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile, Terms
from hplm.placement.units import units_of
from tests.placement.profiles import backbone_profile, cluster_of, profile_of, write_cluster
from tests.support.message import refusing

PROFILE, CLUSTER = profile_of(), cluster_of()
WHOLE = {"bert": ((0, 2),)}
GROUPS = (
    Group("one", "m0", ("cpu:0",), 1, WHOLE, ("bert/law",)),
    Group("two", "m0", ("cpu:1",), 1, WHOLE, ("bert/law", "bert/root")),
)
PLACEMENT = Placement.of(GROUPS, units_of(PROFILE), CLUSTER, PROFILE)
FILES = {"profile": PROFILE, "cluster": CLUSTER, "placement": PLACEMENT}


def _write(kind, path):
    write_cluster(CLUSTER, path) if kind == "cluster" else FILES[kind].write(path)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_written_is_read_again(tmp_path, kind):
    written, path = FILES[kind], tmp_path / "file.json"
    _write(kind, path)
    read = type(written).read(path)
    assert read == written
    assert getattr(read, "digest", "") == getattr(written, "digest", "")
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    "kind, way, value, named",
    [
        ("cluster", ["machines"], [], ["machines"]),
        ("cluster", ["machines", 0, "devices", 1, "memory"], -1, ["devices[1].memory", 1]),
        ("cluster", ["machines", 0, "devices", 1, "name"], "cpu:0", ["'cpu:0'", "twice"]),
        ("cluster", ["machines", 0, "devices", 1, "name"], "core7", ["'m0'", "'core7'", "cuda:0"]),
        ("cluster", ["machines", 0, "devices", 1, "name"], "cuda:1", ["'m0'", "cpu:0", "cuda:1", "kind"]),
        ("profile", ["backbones"], {}, ["backbones"]),
        ("profile", ["backbones", "bert", "layer_bytes"], [1, 2], ["bert", "layer_bytes", "3"]),
        ("profile", ["backbones", "bert", "times", "1"], [], ["times", 1, 3]),
        ("profile", ["backbones", "bert", "times", "1", 0, "token_ns"], -1.0, ["[0].token_ns"]),
        ("profile", ["backbones", "bert", "table_bytes"], {"law": 3}, ["table_bytes", "'root'"]),
        ("profile", ["backbones", "bert", "parents"], {"law": "root", "root": "law"}, ["parents"]),
        ("profile", ["backbones", "bert", "times", "1", 0, "token_ns"], float("nan"), ["JSON"]),
        ("profile", ["backbones", "bert", "slots"], 1 << 80, ["slots"]),
        ("placement", ["groups", 1, "name"], "one", ["two of one name"]),
        ("placement", ["groups", 1, "name"], "../x", ["groups[1].name"]),
        ("placement", ["groups", 1, "name"], "two\n", ["groups[1].name"]),
        ("placement", ["groups", 0, "intra"], 2, ["'one'", "2"]),
        ("placement", ["groups", 0, "devices"], ["cpu:1"], ["'one'", "'two'", "'cpu:1'"]),
        ("placement", ["groups", 0, "devices"], ["gpu"], ["'one'", "'gpu'", "cuda:0"]),
        ("placement", ["groups", 0, "units"], ["bert/art"], ["'one'", "'bert/art'"]),
        ("placement", ["groups", 0], {**asdict(GROUPS[0]), "cuts": {}, "units": []}, ["'one'", "no units"]),
        ("placement", ["groups", 0, "units"], ["bert/law", "bert/law"], ["'one'", "'bert/law'", "twice"]),
        ("profile", ["backbones", "bert", "times"], {}, ["times"]),
        ("placement", ["groups", 0, "cuts"], {}, ["'one'", "'bert/law'"]),
        ("placement", ["groups", 0, "cuts", "bert"], [[0, 1], [2, 2]], ["'one'", "'bert'", "2"]),
        ("placement", ["groups", 0, "cuts", "bert"], [[1, 2]], ["'one'", "'bert'"]),
        ("placement", ["groups", 0, "cuts", "bert"], [[0, 0], [2, 2]], ["'one'", "'bert'"]),
        ("placement", ["exports"], {}, ["'bert'", "export"]),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_its_file(tmp_path, kind, way, value, named):
    path = tmp_path / f"{kind}.json"
    _write(kind, path)
    stored = json.loads(path.read_text())
    inner = stored
    for step in way[:-1]:
        inner = inner[step]
    inner[way[-1]] = value
    path.write_text(json.dumps(stored))
    with refusing(InvalidInput, path.name, *named):
        type(FILES[kind]).read(path)


def test_profiles_of_one_machine_are_joined_and_others_refused():
    other = Profile(PROFILE.machine, {"mini": backbone_profile([1e6])}, Terms(9e9), PROFILE.error)
    joined = Profile.together([PROFILE, other])
    assert set(joined.backbones) == {"bert", "mini"} and joined.hop == other.hop
    elsewhere = Profile({**PROFILE.machine, "cores": "64"}, other.backbones, other.hop, other.error)
    with refusing(InvalidInput, "cores", "'2'", "'64'", "hplm place profile"):
        Profile.together([PROFILE, elsewhere])
    again = Profile(PROFILE.machine, {"bert": backbone_profile([1e6])}, Terms(), PROFILE.error)
    with refusing(InvalidInput, "'bert'"):
        Profile.together([PROFILE, again])

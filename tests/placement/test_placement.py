"""Units and cuts, their memory, and the files of placement: what does not fit is refused with the file and the field."""

import json
from dataclasses import asdict, replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import InvalidInput
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile, Shape, Terms, best_cut
from hplm.placement.units import Unit, machine_bytes, stages_bytes, units_by_name, units_of
from research.papers.placements import equal_cut
from tests.placement.problems import MB, backbone_profile, cluster_of, profile_of, write_cluster
from tests.support.message import refusing

PROFILE, CLUSTER = profile_of(), cluster_of()
UNITS = units_of(PROFILE)
WHOLE = {"bert": ((0, 2),)}
HOP = Terms(2e5, 5.0)
SHAPE = Shape(100.0, 2000.0, 5.0)


def group(name="one", machine="m0", devices=("cpu:0",), intra=1, cuts=WHOLE, units=("bert/law",)):
    return Group(name, machine, devices, intra, cuts, units)


def placed(*groups, cluster=None, profile=PROFILE):
    return Placement.of(groups, units_of(profile), cluster or cluster_of(), profile)


def test_units_are_the_tenants_of_a_domain_and_hot_tenants():
    assert units_of(PROFILE) == (Unit("bert/root", 1), Unit("bert/law", 2))
    hot = units_of(PROFILE, ["bert/a", "bert/c"])
    assert hot == (Unit("bert/root/c", 1), Unit("bert/law/a", 1), Unit("bert/law", 1))
    assert (hot[1].backbone, hot[1].domain, hot[1].tenant, hot[2].tenant) == ("bert", "law", "a", None)
    named = {"a": "bert/law/a", "b": "bert/law", "c": "bert/root/c"}
    own_names = {unit.name: unit.name for unit in hot}
    assert units_by_name(PROFILE, hot) == own_names | named | {f"bert/{tenant}": unit for tenant, unit in named.items()}
    with refusing(InvalidInput, "'bert/nobody'"):
        units_of(PROFILE, ["bert/nobody"])


def test_tables_are_counted_once_with_those_that_they_fall_back_to():
    root, law = UNITS
    assert machine_bytes(PROFILE, [root]) == 100 * MB + MB
    assert machine_bytes(PROFILE, [law]) == 120 * MB + 2 * MB
    assert machine_bytes(PROFILE, [root, law, law]) == 120 * MB + 3 * MB
    assert machine_bytes(PROFILE, []) == 0


OTHER = profile_of(bert=backbone_profile([1e6] * 3))


@pytest.mark.parametrize(
    "groups, given, named",
    [
        ((group(devices=("cpu:5",)),), {}, ["'one'", "'cpu:5'", "'m0'"]),
        ((group(machine="m7"),), {}, ["'one'", "'m7'"]),
        ((group(),), {"cluster": cluster_of(memory_mb=50)}, ["'one'", "bert", "61,000,000", "50,000,000", "cpu:0"]),
        ((group(),), {"cluster": cluster_of(tables_mb=50)}, ["'m0'", "122,000,000", "50,000,000"]),
        ((group(cuts={"bert": ((0, 1),)}),), {}, ["'one'", "'bert'", "3"]),
        ((group(cuts={**WHOLE, "mini": ((0, 1),)}),), {}, ["'one'", "'mini'", "profile"]),
        ((group(),), {"units": (*UNITS, Unit("bert/art", 1))}, ["'bert/art'", "profile"]),
        ((group(),), {"units": (*UNITS, Unit("bert/law/z", 1))}, ["'bert/z'", "profile"]),
        ((group(),), {"units": (UNITS[0], Unit("bert/law", 7))}, ["'bert/law'", "profile"]),
        ((group(),), {"now": (cluster_of(4), PROFILE)}, ["stale", "cluster", "hplm place search"]),
        ((group(),), {"now": (cluster_of(), OTHER)}, ["stale", "profile", "hplm place search"]),
    ],
)  # fmt: skip
def test_a_placement_that_does_not_fit_the_cluster_and_the_profile_is_refused(groups, given, named):
    cluster = given.get("cluster", cluster_of())
    placement = replace(placed(*groups, cluster=cluster), units=given.get("units", UNITS))
    with refusing(InvalidInput, *named):
        placement.check(*given.get("now", (cluster, PROFILE)))


def test_layers_and_slots_are_counted_once_a_stage_whatever_the_units():
    both = profile_of(bert=backbone_profile(), mini=backbone_profile([1e6, 1e6], layer_mb=1))
    cuts = {"bert": ((0, 0), (1, 2)), "mini": ((0, 0), (1, 1))}
    assert stages_bytes(both, cuts) == [(10 + 10 + 1) * MB + (1 + 15 + 1) * MB, (20 + 20) * MB + (1 + 15) * MB]


def test_units_that_no_group_serves_are_known():
    assert placed(group()).unplaced == (Unit("bert/root", 1),)
    assert not placed(group(units=("bert/law", "bert/root"))).unplaced


GROUPS = group(), group("two", devices=("cpu:1",), units=("bert/law", "bert/root"))
FILES = {"profile": PROFILE, "cluster": CLUSTER, "placement": placed(*GROUPS)}


@pytest.fixture
def path(tmp_path, kind):
    """A file of this kind."""
    path = tmp_path / f"{kind}.json"
    write_cluster(CLUSTER, path) if kind == "cluster" else FILES[kind].write(path)
    return path


@pytest.mark.parametrize("kind", FILES)
def test_what_is_written_is_read_again(path, kind):
    written = FILES[kind]
    read = type(written).read(path)
    assert read == written
    assert getattr(read, "digest", "") == getattr(written, "digest", "")
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    "kind, way, value, named",
    [
        ("cluster", ["machines"], [], ["machines"]),
        ("cluster", ["machines", 0, "devices", 1, "memory"], -1, ["devices[1].memory", 1]),
        ("cluster", ["machines", 0, "devices", 1, "name"], "cpu:0", ["'cpu:0'", "twice"]),
        ("cluster", ["machines", 0, "devices", 1, "name"], "cpu:00", ["'m0'", "'cpu:00'", "cuda:0"]),
        ("cluster", ["machines", 0, "devices", 1, "name"], "cuda:1", ["'m0'", "cpu:0", "cuda:1", "kind"]),
        ("profile", ["backbones"], {}, ["backbones"]),
        ("profile", ["backbones"], {"a/b": {}}, ["backbones"]),
        ("profile", ["backbones", "bert", "tenants"], {"law": ["a/b"]}, ["tenants"]),
        ("profile", ["backbones", "bert", "layer_bytes"], [1, 2], ["bert", "layer_bytes", "3"]),
        ("profile", ["backbones", "bert", "times", "1"], [], ["times", 1, 3]),
        ("profile", ["backbones", "bert", "times", "1", 0, "token_ns"], -1.0, ["[0].token_ns"]),
        ("profile", ["backbones", "bert", "table_bytes"], {"law": 3}, ["table_bytes", "'root'"]),
        ("profile", ["backbones", "bert", "parents"], {"law": "root", "root": "law"}, ["parents"]),
        ("profile", ["backbones", "bert", "times", "1", 0, "token_ns"], float("nan"), ["JSON"]),
        ("profile", ["backbones", "bert", "slots"], 1 << 80, ["slots"]),
        ("placement", ["groups", 1, "name"], "one", ["group 'one'", "twice"]),
        ("placement", ["groups", 1, "name"], "../x", ["groups[1].name"]),
        ("placement", ["groups", 1, "name"], "two\n", ["groups[1].name"]),
        ("placement", ["groups", 0, "intra"], 2, ["'one'", "2"]),
        ("placement", ["groups", 0, "devices"], ["cpu:1"], ["'one'", "'two'", "'cpu:1'"]),
        ("placement", ["groups", 0, "devices"], ["cpu:0", "cpu:0"], ["'one'", "'cpu:0'", "once"]),
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
def test_a_field_that_does_not_fit_is_named_with_its_file(path, kind, way, value, named):
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


def cuts(layers, stages):
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple((begin, end - 1) for begin, end in zip((0, *ends), (*ends, layers), strict=True))


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=8), st.data())
def test_the_best_cut_is_as_fast_as_the_best_of_all(batch_ns, data):
    profile = backbone_profile(batch_ns)
    stages = data.draw(st.integers(1, len(batch_ns)))
    room = data.draw(st.none() | st.lists(st.integers(0, 100).map(lambda mb: mb * MB), min_size=stages, max_size=stages))
    fitting = [
        cut
        for cut in cuts(len(batch_ns), stages)
        if room is None or all(profile.stage_bytes(*own) <= bytes_ for own, bytes_ in zip(cut, room, strict=True))
    ]
    found = best_cut(profile, HOP, 1, stages, SHAPE, room)
    assert found in (fitting or [()])
    if found:
        fastest = min(max(stage_ns(profile, cut)) for cut in fitting)
        assert max(stage_ns(profile, found)) == pytest.approx(fastest)


def stage_ns(profile, cut, hop=HOP):
    return [terms.ns(*SHAPE) for terms in profile.stages(hop, 1, cut)]  # what both simulators take


def test_the_first_stage_also_does_what_is_outside_of_the_layers():
    """4 layers of 2 ms, a hop of 0.1 ms and 4 ms outside of the layers: 8.0 and 4.1 ms by 2 + 2, 6.0 and 6.1 by 1 + 3."""
    profile, hop = backbone_profile([0] * 4, times={1: (Terms(2e6),) * 4}, core=Terms(4e6)), Terms(1e5)
    assert stage_ns(profile, equal_cut(4, 2), hop) == [8e6, 4.1e6]
    best = best_cut(profile, hop, 1, 2, SHAPE)
    assert best == ((0, 0), (1, 3))
    assert stage_ns(profile, best, hop) == [6e6, 6.1e6]


def test_equal_cuts_have_all_layers_once():
    assert equal_cut(6, 4) == ((0, 0), (1, 2), (3, 3), (4, 5)) and equal_cut(3, 1) == ((0, 2),)

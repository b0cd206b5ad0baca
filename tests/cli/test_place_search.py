"""`hplm place search`, `simulate` and `compare`, on files that a test writes."""

import json
import shlex

import pytest

from hplm.cli.main import main
from hplm.placement.placement import Placement
from tests.placement.problems import write_problem
from tests.placement.profiles import cluster_of, write_cluster
from tests.support.message import mentions


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A cluster, a profile and a recorded trace without deadlines, as options."""
    monkeypatch.chdir(tmp_path)
    write_problem(tmp_path, rate=40.0)
    return ["--cluster", "c.json", "--profiles", "p.json", "--trace", "t.jsonl"]


def _run(capsys, *argv):
    status = main(["place", *argv])
    return status, capsys.readouterr()


def test_a_placement_is_found_drawn_and_simulated(given, capsys, tmp_path):
    options = [*given, "--slo-scale", "5", "--json"]
    status, printed = _run(capsys, "search", *options, "--to", "placement.json", "--picture", "p.svg", "--confirm-seconds", "2")
    assert status == 0, printed.err
    found = json.loads(printed.out)
    placement = Placement.read(tmp_path / "placement.json")
    assert [group.name for group in placement.groups] == [group["name"] for group in found["groups"]]
    assert 0.5 < found["screen"]["attained"] <= 1 and 0.5 < found["full"]["attained"] <= 1
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    status, printed = _run(capsys, "simulate", "placement.json", *options, "--full-seconds", "2")
    assert status == 0, printed.err
    simulated = json.loads(printed.out)
    assert simulated["screen"] == found["screen"] and simulated["full"] == found["full"]


def test_units_that_no_group_serves_are_named(given, capsys, tmp_path):
    write_cluster(cluster_of(1, 60), tmp_path / "c.json")  # room for one of three backbones
    options = [*given, "--slo-scale", "5", "--confirm-seconds", "0", "--to", "placement.json"]
    status, printed = _run(capsys, "search", *options, "--json")
    assert status == 0, printed.err
    found = json.loads(printed.out)
    served = {unit for group in found["groups"] for unit in group["units"]}
    assert len(found["unplaced"]) == 2 and not served & set(found["unplaced"])
    assert mentions(_run(capsys, "search", *options)[1].out, "no group serves", *found["unplaced"])


def test_baselines_are_compared_at_several_deadlines(given, capsys, tmp_path):
    options = [*given, "--slo-scales", "1,4", "--baselines", "replication,manual:2,1,clockwork:4", "--rate", "1.5"]
    assert _run(capsys, "search", *given, "--slo-scale", "4", "--baseline", "greedy:2", "--to", "placement.json")[0] == 0
    status, printed = _run(capsys, "compare", "placement.json", *options, "--picture", "c.svg", "--json")
    assert status == 0, printed.err
    shares = json.loads(printed.out)["by_slo_scale"]
    assert list(shares) == ["search", "placement.json", "replication", "manual:2,1", "clockwork:4"]
    assert all(by_scale["1"] <= by_scale["4"] for by_scale in shares.values())
    assert shares["search"]["4"] >= max(shares["replication"]["4"], shares["placement.json"]["4"])
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "changed, named",
    [
        ((), ("--slo-scale", "deadline")),
        (("--slo-scale", "0.001"), ("--slo-scale", "b0")),
        (("--slo-scale", "4", "--search", "wide"), ("wide", "beam:K")),
        (("--slo-scale", "4", "--baseline", "clockwork"), ("clockwork", "compare")),
        (("--slo-scale", "4", "--rate", "0"), ("--rate",)),
        (("--slo-scale", "4", "--serving", "batch=3"), ("batch", "batch_texts")),
        (("--slo-scale", "4", "--hot", "b0/z"), ("b0/z",)),
        (("--slo-scale", "4", "--cv", "nan"), ("--cv", "nan")),
        (("--slo-scale", "4", "--cv", "2", "--window", "1e-10"), ("seconds", 0.001)),
        (("--slo-scale", "4", "--confirm-seconds", "nan"), ("--confirm-seconds", "nan")),
        (("--slo-scale", "4", "--baseline", "greedy:2", "--most-stages", "1"), ("greedy:2", "--most-stages")),
        (("--slo-scale", "4", "--to", "none/placement.json"), ("none", "--to")),
    ],
)
def test_bad_input_is_named(given, capsys, tmp_path, changed, named):
    status, printed = _run(capsys, "search", *given, "--to", "placement.json", *changed)
    assert status == 1 and mentions(printed.err, *named)
    assert not (tmp_path / "placement.json").exists()


def test_a_placement_needs_its_own_hot_tenants(given, capsys):
    options = [*given, "--slo-scale", "5"]
    hot = ["--hot", "b1/a"]
    searched = ["search", *options, "--confirm-seconds", "0", "--to", "placement.json"]
    assert _run(capsys, *searched, *hot)[0] == 0
    assert _run(capsys, "simulate", "placement.json", *options, *hot, "--full-seconds", "0")[0] == 0
    for command in (["simulate", "placement.json", *options], ["compare", "placement.json", *given, "--slo-scales", "5"]):
        status, printed = _run(capsys, *command)
        assert status == 1 and mentions(printed.err, "placement.json", "--hot b1/a")
    assert _run(capsys, *searched)[0] == 0
    status, printed = _run(capsys, "simulate", "placement.json", *options, *hot)
    assert status == 1 and mentions(printed.err, "placement.json", "--hot")


def test_the_next_commands_that_are_printed_run(given, capsys):
    options = [*given, "--slo-scale", "5", "--rate", "0.5", "--serving", "batch_texts=1", "--confirm-seconds", "1"]
    status, printed = _run(capsys, "search", *options, "--most-stages", "1", "--to", "my placement.json")
    assert status == 0, printed.err
    simulate, emit = (line.partition("hplm ")[2] for line in printed.out.splitlines()[-2:])
    assert mentions(emit, "place emit", "'my placement.json'")
    assert main(shlex.split(simulate)) == 0
    again = capsys.readouterr().out
    assert printed.out.splitlines()[-4] == again.splitlines()[0]  # what the screen says

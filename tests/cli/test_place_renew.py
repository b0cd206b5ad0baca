"""`hplm place renew`: a better placement is written, and any other is not."""

import json

import pytest

from hplm.cli.main import main
from hplm.cli.place_renew import KEPT
from hplm.placement.placement import Placement
from tests.placement.problems import profile, write_problem
from tests.placement.profiles import cluster_of, write_cluster
from tests.support.message import mentions

SPANS = ("--search-seconds", "6", "--test-seconds", "2")
PROBLEM = ("--cluster", "c.json", "--profiles", "p.json", "--trace", "t.jsonl", "--slo-scale", "3")


@pytest.fixture(autouse=True)
def problem(tmp_path, monkeypatch):
    """Four devices, of which the current placement uses three, and more requests than these can answer in time."""
    monkeypatch.chdir(tmp_path)
    write_problem(tmp_path, rate=120.0)
    searched = ["search", *PROBLEM, "--baseline", "manual:1,1", "--confirm-seconds", "0", "--to", "now.json", "--json"]
    assert main(["place", *searched]) == 0


def _renew(capsys, *options, current="now.json"):
    capsys.readouterr()
    status = main(["place", "renew", current, *PROBLEM, *SPANS, "--to", "next.json", *options])
    return status, capsys.readouterr()


def test_a_better_placement_is_written_and_then_stays(capsys, tmp_path):
    status, printed = _renew(capsys, "--json")
    assert status == 0, printed.err
    renewed = json.loads(printed.out)
    assert renewed["written"] and renewed["gain_points"] >= 1
    assert renewed["found"]["attained"] > renewed["current"]["attained"] > 0
    assert renewed["found"]["texts"] == renewed["current"]["texts"] == renewed["tested"]["texts"]
    assert renewed["tested"]["seconds"] <= 2 < renewed["searched"]["seconds"] <= 6
    assert sum(len(group.devices) for group in Placement.read(tmp_path / "next.json").groups) == 4
    (tmp_path / "next.json").replace(tmp_path / "now.json")
    status, printed = _renew(capsys, "--json")
    assert status == KEPT, printed.err
    kept = json.loads(printed.out)
    assert not kept["written"] and kept["gain_points"] < 1 and not (tmp_path / "next.json").exists()


def test_both_are_simulated_with_the_last_requests_alone(capsys, tmp_path):
    """The current placement attains what `place simulate` says of these requests."""
    renewed = json.loads(_renew(capsys, "--json")[1].out)
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    (tmp_path / "last.jsonl").write_text("\n".join(lines[-renewed["tested"]["texts"] :]))
    simulated = ["simulate", "now.json", *PROBLEM, "--trace", "last.jsonl", "--json"]
    assert main(["place", *simulated]) == 0
    assert json.loads(capsys.readouterr().out)["full"] == renewed["current"]


def test_a_smaller_gain_than_the_wanted_one_writes_nothing(capsys, tmp_path):
    status, printed = _renew(capsys, "--least-gain", "100")
    assert status == KEPT and mentions(printed.out, "now.json", "stays", "100 are wanted")
    assert not (tmp_path / "next.json").exists()


def test_what_an_earlier_run_has_found_is_removed_when_the_current_placement_stays(capsys, tmp_path):
    assert json.loads(_renew(capsys, "--json")[1].out)["removed"] is False
    assert (tmp_path / "next.json").exists()
    status, printed = _renew(capsys, "--least-gain", "100")
    assert status == KEPT and mentions(printed.out, "now.json", "stays", "next.json", "removed")
    assert not (tmp_path / "next.json").exists() and (tmp_path / "now.json").exists()


@pytest.mark.parametrize("file", ["c.json", "p.json", "t.jsonl", "notes.txt"])
@pytest.mark.parametrize("command", ["renew now.json", "search"])
def test_a_file_that_is_no_placement_is_neither_removed_nor_replaced(command, file, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    before = (tmp_path / file).read_bytes()
    assert main(["place", *command.split(), *PROBLEM, *(SPANS if "renew" in command else ()), "--to", file]) == 1
    assert mentions(capsys.readouterr().err, "--to", file) and (tmp_path / file).read_bytes() == before


@pytest.mark.parametrize(
    "changed, named",
    [
        (("--to", "./now.json"), ("--to", "now.json")),
        (("--to", "none/next.json"), ("--to", "none")),
        (("--test-seconds", "9"), ("--test-seconds", "t.jsonl")),
        (("--test-seconds", "0"), ("seconds", 0.001)),
        (("--search-seconds", "nan"), ("--search-seconds", "nan")),
        (("--least-gain", "-1"), ("--least-gain", "-1")),
        (("--hot", "b1/a"), ("now.json", "--hot")),
    ],
)
def test_bad_input_is_named(capsys, tmp_path, changed, named):
    status, printed = _renew(capsys, *changed)
    assert status == 1 and mentions(printed.err, *named)
    assert not (tmp_path / "next.json").exists()


@pytest.mark.parametrize("file, what", [("c.json", "cluster"), ("p.json", "profile")])
def test_a_current_placement_of_another_cluster_or_profile_is_refused(capsys, tmp_path, file, what):
    write_cluster(cluster_of(5, 60), tmp_path / file) if what == "cluster" else profile(8.0, 8.0, 25.0).write(tmp_path / file)
    status, printed = _renew(capsys)
    assert status == 1 and mentions(printed.err, "stale", what)


def _journal(tmp_path, tenants, deleted_at=()):
    """Writes the problem's requests as a journal: of b0/a and b1/a, and of each of these tenants every tenth of a second.

    Requests of b0/deleted come at the given seconds before that.
    """
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    asked = [(row["arrival"], f"{row['unit'].split('/')[0]}/a", row["tokens"]) for row in rows]
    asked += [(tenth / 10, name, 64) for name in tenants for tenth in range(80)]
    asked += [(-float(at), "b0/deleted", 64) for at in deleted_at]
    lines = [{"clock": 0.0, "wall": 1e9, "backbone": "b0"}]
    for at, name, tokens in sorted(asked):
        backbone, tenant = name.split("/")
        arrived = 1000 + at
        times = {"arrived": arrived, "deadline": arrived + 0.1}
        lines.append({"backbone": backbone, "tenant": tenant, "texts": 1, "tokens": tokens, **times})
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_requests_of_tenants_that_the_profile_does_not_know_are_left_out_and_named(capsys, tmp_path):
    status, printed = _renew(capsys, "--json", "--trace", str(_journal(tmp_path, [])))
    assert status == 0, printed.err
    without = json.loads(printed.out)
    assert without["left_out"] == {"requests": 0, "tenants": 0, "most": []}
    path = _journal(tmp_path, ["b0/new", "gone/x"])
    status, printed = _renew(capsys, "--json", "--trace", str(path))
    assert status == 0, printed.err
    renewed = json.loads(printed.out)
    assert renewed["left_out"] == {"requests": 160, "tenants": 2, "most": ["b0/new", "gone/x"]}
    assert renewed["found"] == without["found"] and renewed["searched"] == without["searched"]
    printed = _renew(capsys, "--trace", str(path))[1]
    (line,) = [line for line in printed.out.splitlines() if "left out" in line]
    assert mentions(line, "160", "b0/new", "gone/x")


def test_too_many_requests_of_unknown_tenants_are_refused(capsys, tmp_path):
    yesterday = (tmp_path / "now.json").read_text()
    (tmp_path / "next.json").write_text(yesterday)
    status, printed = _renew(capsys, "--trace", str(_journal(tmp_path, [f"b0/new-{number}" for number in range(9)])))
    assert status == 1 and mentions(printed.err, "journal.jsonl", "b0/new-0", "hplm place profile")
    assert "b0/new-8" not in printed.err and mentions(printed.err, "4 more")
    assert (tmp_path / "next.json").read_text() == yesterday


def test_held_out_requests_of_mostly_unknown_tenants_are_refused(capsys, tmp_path):
    """They are few of all requests, but all in the seconds that are held out."""
    path = _journal(tmp_path, [])
    first, *lines = map(json.loads, path.read_text().splitlines())
    end = max(line["arrived"] for line in lines)
    late = [line for line in lines if line["arrived"] > end - 2]
    lines += [
        {**late[0], "tenant": "new", "arrived": at, "deadline": at + 0.1}
        for at in (end - number / 100 for number in range(200))
    ]
    assert len(lines) > 200 / 0.2
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *sorted(lines, key=lambda line: line["arrived"]))))
    status, printed = _renew(capsys, "--trace", str(path))
    assert status == 1 and mentions(printed.err, "b0/new")
    assert not (tmp_path / "next.json").exists()


def test_only_requests_of_the_time_that_is_used_count(capsys, tmp_path):
    """A journal keeps the requests of deleted tenants, until it is cut."""
    path = str(_journal(tmp_path, [], deleted_at=range(100, 3000)))
    status, printed = _renew(capsys, "--json", "--trace", path)
    assert status == 0, printed.err
    assert json.loads(printed.out)["left_out"]["requests"] == 0
    status = main(["place", "simulate", "now.json", *PROBLEM, "--trace", path])
    assert status == 1 and mentions(capsys.readouterr().err, "b0/deleted")

"""`hplm place`: a placement is found, simulated, and renewed if a better one is found."""

import json
import os
import shlex

import pytest

from hplm.cli.place_search import KEPT, Searching
from hplm.cli.round_trips import round_trips
from hplm.placement.partition import Parallel
from hplm.placement.placement import Placement
from tests.cli.commands import printed, refused, run
from tests.placement.problems import write_problem
from tests.support.message import mentions

PROBLEM = ["--cluster", "c.json", "--profiles", "p.json", "--trace", "t.jsonl"]


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options that name a cluster, a profile and a recorded trace without deadlines."""
    monkeypatch.chdir(tmp_path)
    write_problem(tmp_path, rate=40.0)
    return [*PROBLEM, "--slo-scale", "5"]


def test_a_search_tries_only_groups_that_servers_run():
    """As `hplm place emit` says, and with as many stages as the user wants."""
    cuts = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
    assert [own for own in cuts if Searching(most_stages=2).allows(Parallel(*own))] == cuts[:3]


def test_a_placement_is_found_and_drawn_and_the_next_commands_that_are_printed_run(given, capsys, tmp_path):
    options = [*given, "--rate", "0.5", "--serving", "batch_texts=1", "--confirm-seconds", "1", "--picture", "p.svg"]
    lines = printed(capsys, "place", "search", *options, "--most-stages", "1", "--to", "my placement.json").splitlines()
    assert (tmp_path / "p.svg").read_text().startswith("<?xml") and Placement.read(tmp_path / "my placement.json").groups
    simulate, emit = (line.partition("hplm ")[2] for line in lines[-2:])
    assert mentions(emit, "place emit", "'my placement.json'")
    assert lines[-4] == printed(capsys, *shlex.split(simulate)).splitlines()[0]  # what the screen says


RENEW = ["place", "search", *PROBLEM, "--slo-scale", "3", "--most-stages", "1", "--to", "next.json"]
RENEW += ["--current", "now.json", "--search-seconds", "6", "--test-seconds", "2"]


@pytest.fixture
def crowded(tmp_path, monkeypatch):
    """Four devices, of which the current placement uses three, and more requests than these can answer in time."""
    monkeypatch.chdir(tmp_path)
    write_problem(tmp_path, rate=120.0)
    return tmp_path


def test_a_better_placement_is_written_and_then_stays(crowded, capsys):
    renewed = run(capsys, *RENEW)
    assert renewed["written"] and renewed["gain_points"] >= 1
    assert renewed["found"]["attained"] > renewed["current"]["attained"] > 0
    assert renewed["found"]["texts"] == renewed["current"]["texts"]
    assert renewed["found"]["seconds"] <= 2 < renewed["screen"]["seconds"] <= 6
    assert sum(len(group.devices) for group in Placement.read(crowded / "next.json").groups) == 4
    better = (crowded / "next.json").read_text()
    said = printed(capsys, *RENEW, "--least-gain", "100", status=KEPT)  # removes what the earlier run has found
    assert mentions(said, "now.json", "stays", "100 are wanted", "next.json", "removed")
    assert not (crowded / "next.json").exists()
    (crowded / "now.json").write_text(better)
    kept = run(capsys, *RENEW, status=KEPT)
    assert not kept["written"] and kept["gain_points"] < 1 and not (crowded / "next.json").exists()


def _journal(folder, *asked):
    """Writes the problem's requests, as those of b0/a and b1/a, and these into a journal. Returns the option that names it."""
    rows = [json.loads(line) for line in (folder / "t.jsonl").read_text().splitlines()]
    known = [(row["arrival"], f"{row['unit'].split('/')[0]}/a", row["tokens"]) for row in rows]
    lines: list[dict[str, object]] = []
    for at, name, tokens in sorted([*known, *asked]):
        backbone, tenant = name.split("/")
        times = {"wall": 1e9 + at, "arrived": 1000 + at, "deadline": 1000 + at + 0.1}
        lines.append({"backbone": backbone, "tenant": tenant, "texts": 1, "tokens": tokens, **times})
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "--trace", str(folder / "journal.jsonl")


def test_requests_of_unknown_tenants_are_left_out_and_named_and_too_many_are_refused(crowded, capsys):
    """Too many are few of all requests, but all in the seconds that are held out. Those of long before do not matter."""
    renew = [word for word in RENEW if word not in ("--trace", "t.jsonl")]
    new = [(tenth / 10, "b0/new", 64) for tenth in range(80)]
    before = [(number / 100 - 50, "b0/old", 64) for number in range(2000)]
    few = printed(capsys, *renew, *_journal(crowded, *before, *new))
    assert [mentions(line, 80, "b0/new") for line in few.splitlines() if "left out" in line] == [True]
    (crowded / "next.json").write_text(yesterday := (crowded / "now.json").read_text())
    late = [(7.9 - number / 200, f"b0/late-{number % 9}", 64) for number in range(200)]
    said = refused(capsys, *renew, *_journal(crowded, *late))
    assert mentions(said, "4 more", "hplm place profile") and said.count("b0/late-") == 5
    assert (crowded / "next.json").read_text() == yesterday


@pytest.mark.slow
@pytest.mark.server("toy")
def test_the_way_through_a_server_is_measured(server, monkeypatch):
    """By `place profile --wire`, which starts a server of its own: here the shared one is in its place."""
    monkeypatch.setattr("hplm.server.TritonServer", lambda *_, **__: server.server)
    for call in ("start", "stop"):
        monkeypatch.setattr(server.server, call, lambda: None)
    mine = os.sched_getaffinity(0)
    found = round_trips(server.repository, server.state, ["toy"], [min(mine)])["toy"]
    assert found.ns > 0 < found.core_ns and os.sched_getaffinity(0) == mine

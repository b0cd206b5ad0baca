"""`hplm place search` and `simulate`: a placement is found, and simulated."""

import json
import shlex

import pytest

from hplm.cli.place_search import is_served
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
    """As `hplm place emit` says."""
    cuts = [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2)]
    assert [own for own in cuts if is_served(Parallel(*own))] == cuts[:4]


def test_a_placement_is_found_and_drawn_and_the_next_commands_that_are_printed_run(given, capsys, tmp_path):
    options = [*given, "--rate", "0.5", "--picture", "p.svg"]
    lines = printed(capsys, "place", "search", *options, "--to", "my placement.json").splitlines()
    assert (tmp_path / "p.svg").read_text().startswith("<?xml") and Placement.read(tmp_path / "my placement.json").groups
    simulate, emit = (line.partition("hplm ")[2] for line in lines[-2:])
    assert mentions(emit, "place emit", "'my placement.json'")
    found = run(capsys, *shlex.split(simulate))
    assert found["attained"] > 0.9 and set(found["by_unit"]) == {"b0/law", "b1/law", "b2/law"}


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


def test_requests_of_unknown_tenants_are_left_out_and_named_and_too_many_are_refused(given, tmp_path, capsys):
    search = ["place", "search", "--to", "next.json"]
    search += [word for word in given if word not in ("--trace", "t.jsonl")]
    new = [(tenth / 10, "b0/new", 64) for tenth in range(80)]
    few = printed(capsys, *search, *_journal(tmp_path, *new))
    assert [mentions(line, 80, "b0/new") for line in few.splitlines() if "left out" in line] == [True]
    (tmp_path / "next.json").write_text(yesterday := (tmp_path / "now.json").read_text())
    late = [(7.9 - number / 200, f"b0/late-{number % 9}", 64) for number in range(400)]
    said = refused(capsys, *search, *_journal(tmp_path, *late))
    assert mentions(said, "4 more", "hplm place profile") and said.count("b0/late-") == 5
    assert (tmp_path / "next.json").read_text() == yesterday

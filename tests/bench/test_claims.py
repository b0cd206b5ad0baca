"""The claims of the project: their commands exist, the pages say what was measured, and what has changed since is stale."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from bench import claims
from bench.run import of
from hplm.errors import HplmError
from tests.support.message import mentioning


def results() -> dict:
    return json.loads(claims.RESULTS.read_text("utf-8"))


@pytest.mark.parametrize("one", claims.measurements(), ids=lambda one: one.command)
def test_the_command_of_a_claim_takes_its_options_and_what_it_watches_is_there(one: claims.Measurement) -> None:
    words = shlex.split(one.command)
    if words[:2] == ["hplm", "bench"]:
        _, app = of(words[2])
        app.parse_args(words[3:], exit_on_error=False, print_error=False)
    assert all((claims.ROOT / path).exists() for path in one.watches) and one.claims and one.minutes > 0
    if one.command in results():
        assert set(results()[one.command]["figures"]) == {claim.figure for claim in one.claims}


def test_the_pages_say_what_was_measured() -> None:
    assert set(results()) <= {one.command for one in claims.measurements()}
    for page, only_headlines in claims.PAGES.items():
        text = page.read_text("utf-8")
        figures = claims.headlines(results()) if only_headlines else claims.tables(results())
        assert claims.filled(text, figures) == text, "run `python -m bench.claims --write`"
    with pytest.raises(HplmError, match=mentioning(claims.END)):
        claims.filled(claims.BEGIN, "figures")


def test_a_figure_is_judged_by_its_target() -> None:
    assert claims.verdict(0.9, "at least 0.9") == "met" and claims.verdict(0.9, "") == ""
    for value, target in ((0.89, "at least 0.9"), (5.1, "at most 5"), (None, "at most 5")):
        assert claims.verdict(value, target) == "missed"


def test_a_figure_is_stale_once_what_it_watches_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def commit(file: str) -> str:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("changed")
        git("add", "-A")
        git("commit", "-qm", "change")
        return git("rev-parse", "HEAD").strip()

    monkeypatch.setattr(claims, "ROOT", tmp_path)
    one = claims.Measurement("title", "hplm bench glue --seconds 3", 3, ["engine"], ())
    git("init", "-q")
    result = {"commit": commit("README.md")}
    commit("docs/page.md")
    assert not claims.stale(one, result)
    assert claims.stale(one, {"commit": "0" * 40})
    for file in ("engine/layer.py", "bench/glue.py"):
        commit(file)
        assert claims.stale(one, result)
        result = {"commit": git("rev-parse", "HEAD").strip()}


def test_a_command_without_figures_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    bad, good = claims.measurements()[:2]
    kept = results()[good.command]

    def measured(one: claims.Measurement) -> dict:
        if one is bad:
            raise HplmError("there is no peft")
        return kept

    for name, value in {
        "RESULTS": tmp_path / "r.json",
        "PAGES": {},
        "measurements": lambda: [bad, good],
        "measure": measured,
    }.items():
        monkeypatch.setattr(claims, name, value)
    with pytest.raises(SystemExit, match="1 commands have no new figures"):
        claims.main(["--run"])
    assert "there is no peft" in capsys.readouterr().err
    assert json.loads((tmp_path / "r.json").read_text("utf-8")) == {good.command: kept}


def test_only_takes_a_part_of_a_command_and_says_when_nothing_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    claims.main(["--only", "comparison"])
    assert "research.comparison.compare" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        claims.main(["--only", "absent"])
    assert "no command has the word absent" in capsys.readouterr().err

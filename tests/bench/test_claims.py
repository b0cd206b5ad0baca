"""The claims of the project: their commands exist, the pages say what was measured, and what has changed since is stale."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from bench import claims
from bench.run import of


def results() -> dict:
    return json.loads(claims.RESULTS.read_text("utf-8"))


@pytest.mark.parametrize("one", claims.measurements(), ids=lambda one: one.command)
def test_the_command_of_a_claim_takes_its_options_and_what_it_watches_is_there(one: claims.Measurement) -> None:
    for command in (one.command, *(command for need in one.needs.values() for command in need.commands)):
        words = shlex.split(command)
        if words[:2] == ["hplm", "bench"]:
            _, app = of("hplm bench", "bench", words[2])
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
    judged = [claims.verdict(*one) for one in ((0.9, "at least 0.9"), (0.89, "at least 0.9"), (None, "at most 5"), (1, ""))]
    assert judged == ["met", "missed", "missed", ""]


def test_a_figure_is_stale_once_what_it_watches_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def commit(file: str, text: str = "changed") -> dict[str, str]:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
        git("add", "-A")
        git("commit", "-qm", "change")
        return {"commit": git("rev-parse", "HEAD").strip()}

    monkeypatch.setattr(claims, "ROOT", tmp_path)
    one = claims.Measurement("title", "hplm bench glue --seconds 3", 3, ["engine"], ())
    git("init", "-q")
    result = commit("README.md")
    commit("docs/page.md")
    assert not claims.stale(one, result) and claims.stale(one, {"commit": "0" * 40})
    for file in ("engine/layer.py", "bench/glue.py"):
        before, result = result, commit(file)
        assert claims.stale(one, before) and not claims.stale(one, result), file
    commit("engine/layer.py", '"""A docstring."""\nchanged  # a comment')
    assert not claims.stale(one, result)


def test_what_a_command_needs_is_made_first_and_what_cannot_be_measured_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = 'python -c "import pathlib; {}"'
    make = python.format("pathlib.Path('made').touch()")
    show = python.format("print(dict(share=float(pathlib.Path('made').exists())).__repr__().replace(chr(39), chr(34)))")
    claim = (claims.Claim("share", "its share"),)
    good = claims.Measurement("good", show, 1, [], claim, needs={"file": claims.Need([make], "made")})
    bad = claims.Measurement("bad", show + " ", 1, [], claim, needs={"luck": claims.Need(["false"], "luck")})
    patches = {"ROOT": tmp_path, "RESULTS": tmp_path / "r.json", "PAGES": {}, "measurements": lambda: [bad, good]}
    for name, value in {**patches, "_git": lambda *words: ""}.items():
        monkeypatch.setattr(claims, name, value)
    with pytest.raises(SystemExit, match="1 commands have no new figures"):
        claims.main(["--run"])
    said = capsys.readouterr().err
    assert "file is missing: python" in said and "luck is missing: false" in said
    kept = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert list(kept) == [good.command] and kept[good.command]["figures"] == {"share": 1.0}

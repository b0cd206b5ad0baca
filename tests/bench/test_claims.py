"""The claims of the project: their commands exist, the pages say what was measured, and what has changed since is stale."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from bench import claims
from bench.run import of

KNOWN = claims.Claims.read()
MEASURED = json.loads((claims.ROOT / claims.RESULTS).read_text("utf-8"))


@pytest.mark.parametrize("one", KNOWN.measurements, ids=lambda one: one.command)
def test_the_command_of_a_claim_takes_its_options_and_what_it_watches_is_there(one: claims.Measurement) -> None:
    words = shlex.split(one.command)
    if words[:2] == ["hplm", "bench"]:
        of("hplm bench", "bench", words[2])[1].parse_args(words[3:], exit_on_error=False, print_error=False)
        assert claims.watched(one)[-1] == f"bench/{words[2]}.py"
    assert all((claims.ROOT / path).exists() for path in one.watches) and one.figures and one.minutes > 0
    assert set(one.needs) <= set(KNOWN.needs)
    assert one.command not in MEASURED or set(MEASURED[one.command]["figures"]) == set(one.figures)


def test_the_pages_say_what_was_measured() -> None:
    assert set(MEASURED) <= {one.command for one in KNOWN.measurements}
    for page, figures in claims.PAGES.items():
        text = (claims.ROOT / page).read_text("utf-8")
        assert claims.filled(text, figures(KNOWN.measurements, MEASURED)) == text, "run `python -m bench.claims --write`"
    judged = [claims.verdict(*one) for one in ((0.9, "at least 0.9"), (0.89, "at least 0.9"), (None, "at most 5"), (1, ""))]
    assert judged == ["met", "missed", "missed", ""]


def test_one_run_makes_what_is_missing_measures_what_it_can_and_knows_what_is_stale(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        for words in (
            ("init", "-q"),
            ("add", "-A"),
            ("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "change"),
        ):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)

    python = 'python -c "import json, pathlib; {}"'
    show = python.format("print(json.dumps(dict(share=float(pathlib.Path('made').exists()))))")
    needs = {"file": {"commands": [python.format("pathlib.Path('made').touch()")], "path": "made"}}
    needs["luck"] = {"commands": ["false"], "path": "luck"}
    about = {"minutes": 1, "watches": ["engine"], "figures": {"share": {"says": "its share"}}}
    known = [{"title": name, "command": show + " " * len(name), "needs": [name], **about} for name in ("luck", "file")]
    page, said = f"{claims.BEGIN}{claims.END}", json.dumps({"needs": needs, "measurements": known})
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    write(**{"README.md": page, "docs/benchmarks.md": page, "bench/claims.json": said, "engine/layer.py": "old"})
    with pytest.raises(SystemExit, match="1 commands have no new figures"):
        claims.main(["--run"])
    kept = json.loads((tmp_path / claims.RESULTS).read_text("utf-8"))
    assert [(command, one["figures"]) for command, one in kept.items()] == [(known[1]["command"], {"share": 1.0})]
    assert "| its share | 1 |" in (tmp_path / "docs/benchmarks.md").read_text("utf-8")

    def is_stale() -> bool:
        capsys.readouterr()
        claims.main([])
        return ", stale" in capsys.readouterr().out

    for file, text, stale in (
        ("README.md", page + "changed", False),
        ("engine/layer.py", '"""A docstring."""\nold  # a comment', False),
        ("engine/layer.py", "changed", True),
    ):
        write(**{file: text})
        assert is_stale() == stale, text

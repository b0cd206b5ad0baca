"""A decoder's hPLMs and their rivals are built, scored and printed; a second call trains nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.data import DemoData, DemoDomain, DemoTenant
from research import generating
from tests.model.decoders import drawn, llama, saved
from tests.support.learning import by_one_step
from tests.support.message import mentions

LINES = [{"text": f"red {number}\n\nIn one sentence:", "target": f" It is {number}."} for number in range(12)]


@pytest.mark.slow
def test_every_split_is_scored_and_the_first_beside_rivals(tmp_path: Path, monkeypatch, capsys) -> None:
    (corpus := tmp_path / "corpus.txt").write_text("".join(f"{line['target'] * 3}\n" for line in LINES), "utf-8")
    (file := tmp_path / "summary.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES), "utf-8")
    tenant = DemoTenant("summary", "toy", "generate", "what?", (), file, file, file, 0.0)
    data = DemoData((DemoDomain("toy", corpus, len(LINES)),), (tenant,))
    monkeypatch.setattr(generating, "stored", lambda home, written_as, write: home.mkdir(parents=True, exist_ok=True) or data)
    model = saved(drawn(llama()), tmp_path / "tiny")
    shapes = ["--splits", "1+1", "--windows", "3", "--windows", "1"]
    words = ["--model", str(model), "--work", str(tmp_path / "work"), "--minutes", "0.01", *shapes]
    with by_one_step():
        assert generating.main([*words, "--against", "shared"]) == 0
        said = capsys.readouterr().out
        assert generating.main([*words, "--against", "shared"]) == 0
    assert capsys.readouterr().out == said and mentions(said, "windows of 3", "windows of 1", "summary, shared: ", "+- ")
    assert said.count("perplexity of held-out docstrings") == 2 and said.count("summary: rouge1") == 1
    assert generating.main(["--against", "distil"]) == 1 and mentions(capsys.readouterr().err, "'distil'", "compressed")

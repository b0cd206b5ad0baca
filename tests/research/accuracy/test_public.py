"""Public texts as tasks: their files are read, texts are divided, and no corpus has a dev or test text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from demo.public import stored_public_data
from research.accuracy.report import named_options
from research.accuracy.studies import TIERS
from research.result_file import ResultFile

RESULTS = Path(__file__).parents[3] / "research/results/accuracy.jsonl"
SIZES = {"train": 12, "dev": 4, "test": 6}
LABELS = ("earn", "acq", "rare")


def tab(path, columns, rows):
    header = ["\t".join(columns), "\t".join("d" for _ in columns), "\t".join("" for _ in columns)]
    path.write_text("\n".join([*header, "", *("\t".join(row) for row in rows)]) + "\n", "utf-8")


def in_letters(number):
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def texts(part, count):
    """Returns labels and texts of 30 words. Each word is in one text alone; digits would not count."""
    words = [[f"{part}x{in_letters(number)}x{in_letters(place)}" for place in range(30)] for number in range(count)]
    return [(LABELS[number % 2], " ".join(own)) for number, own in enumerate(words)]


@pytest.fixture
def files(tmp_path):
    home = tmp_path / "package" / "datasets"
    home.mkdir(parents=True)
    leaked = texts("test", 8)[0]  # this test text is also in the training texts
    tab(home / "reuters-r52-train.tab", ["Category", "Text"], [*texts("train", 30), ("rare", "one " * 20), leaked])
    tab(home / "reuters-r52-test.tab", ["Category", "Text"], [*texts("test", 8), ("unknown", "two " * 20)])
    tab(home / "friends-transcripts.tab", ["Author", "Quote"], [("Monica", "There is nothing to tell you about him")] * 40)
    return tmp_path / "package"


def lines_of(path):
    return path.read_text("utf-8").splitlines()


def test_texts_are_divided_and_corpora_have_no_dev_or_test_text(files, tmp_path):
    further = {"docstrings": tmp_path / "docstrings.txt"}
    data, general = stored_public_data(tmp_path / "data", [files], SIZES, 8, further)
    assert [task.id for task in data.tenants] == ["reuters-52"]
    task, corpus = data.tenants[0], lines_of(data.domains[0].corpus)
    parts = {part: [json.loads(line) for line in lines_of(getattr(task, part))] for part in SIZES}
    assert {part: len(rows) for part, rows in parts.items()} == SIZES
    assert task.labels == ("acq", "earn", "rare") and {row["label"] for row in parts["test"]} <= set(task.labels)
    assert all(len(row["text"].split()) == 8 for rows in parts.values() for row in rows)
    begun = {part: {row["text"] for row in rows} for part, rows in parts.items()}
    assert not begun["train"] & begun["dev"]
    assert not any(line.startswith(("testx", *begun["dev"])) for line in corpus)
    assert sum(line.startswith("trainx") for line in corpus) == 30 - sum(text.startswith("trainx") for text in begun["dev"])
    assert list(general) == ["stories", "docstrings"] and "Monica" not in general["stories"].read_text()
    assert all("nothing to tell" in line for line in lines_of(general["stories"]))
    before = task.train.stat().st_mtime_ns
    assert stored_public_data(tmp_path / "data", [files], SIZES, 8, further) == (data, general)
    assert task.train.stat().st_mtime_ns == before
    stored_public_data(tmp_path / "data", [files], SIZES, 9, further)
    assert len(json.loads(lines_of(task.train)[0])["text"].split()) == 9


def test_new_options_of_training_do_not_void_the_results():
    stored = {frozenset(finished.run["training"]) for finished in ResultFile(RESULTS)}
    options = TIERS[1].training("hplm", 6, 4, seed=0)
    usual = frozenset(named_options(options))
    assert stored == {usual, usual | {"dropout"}}  # the latter of a study whose option is gone
    assert "function" in named_options(replace(options, function="gelu"))

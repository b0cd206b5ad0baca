"""Public texts as tasks: texts are divided, and no corpus has a dev or test text."""

import json
from dataclasses import replace
from pathlib import Path

from demo.public import TASKS, TWEETS, stored_public_data
from research.accuracy.report import named_options
from research.accuracy.studies import TIERS
from research.result_file import ResultFile

RESULTS = Path(__file__).parents[3] / "research/results/accuracy.jsonl"
SIZES = {"train": 12, "dev": 4, "test": 6}


def tab(path, columns, rows):
    lines = ["\t".join(columns), *["\t".join("d" for _ in columns)] * 2, "", *("\t".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def texts(part, count):
    """Returns labels and texts of 30 words. Each word is in one text alone; digits would not count."""
    letters = str.maketrans("0123456789", "abcdefghij")
    words = [[f"{part}x{number}x{place}".translate(letters) for place in range(30)] for number in range(count)]
    return [(("earn", "acq")[number % 2], " ".join(own)) for number, own in enumerate(words)]


def read(task, part):
    return [json.loads(line)["text"] for line in getattr(task, part).read_text("utf-8").splitlines()]


def test_texts_are_divided_and_corpora_have_no_dev_or_test_text(tmp_path):
    leaked = texts("test", 8)[0]  # this test text is also in the training texts
    tab(tmp_path / "reuters-r52-train.tab", ["Category", "Text"], [*texts("train", 30), ("rare", "one " * 20), leaked])
    tab(tmp_path / "reuters-r52-test.tab", ["Category", "Text"], [*texts("test", 8), ("unknown", "two " * 20)])
    tab(tmp_path / "friends-transcripts.tab", ["Author", "Quote"], [("Monica", "There is nothing to tell you about him")] * 40)

    def stored(words):
        return stored_public_data(tmp_path / "data", [tmp_path], SIZES, words, {"docstrings": tmp_path / "docstrings.txt"})

    data, general = stored(8)
    (task,), corpus = data.tenants, data.domains[0].corpus.read_text("utf-8").splitlines()
    parts = {part: read(task, part) for part in SIZES}
    assert task.id == "reuters-52" and {part: len(own) for part, own in parts.items()} == SIZES
    assert task.labels == ("acq", "earn", "rare")
    assert all(len(text.split()) == 8 for own in parts.values() for text in own)
    assert not {*parts["train"]} & {*parts["dev"]}
    assert not any(line.startswith(("testx", *parts["dev"])) for line in corpus)
    assert sum(line.startswith("trainx") for line in corpus) == 30 - sum(text.startswith("trainx") for text in parts["dev"])
    assert all("nothing to tell" in line and "Monica" not in line for line in general["stories"].read_text().splitlines())
    task.train.write_text("kept")
    assert stored(8) == (data, general) and task.train.read_text() == "kept"
    stored(9)
    assert len(read(task, "train")[0].split()) == 9


def test_new_options_of_training_do_not_void_the_results():
    stored = {frozenset(finished.run["training"]) for finished in ResultFile(RESULTS)}
    options = TIERS[1].training("hplm", 6, 4, seed=0)
    usual = frozenset(named_options(options))
    assert stored == {usual, usual | {"dropout"}}  # the latter of a study whose option is gone
    assert "function" in named_options(replace(options, function="gelu"))


def test_of_one_file_a_fifth_is_for_the_test(tmp_path):
    rows = [(label, words, "x") for label, words in texts("tweet", 30)]
    tab(tmp_path / "election-tweets-2016.tab", ["Author", "Content", "Place"], rows)
    sizes = {"train": 20, "dev": 3, "test": 20}
    data, _ = stored_public_data(tmp_path / "data", [tmp_path], sizes, 8, {}, (*TASKS, TWEETS))
    parts = {part: read(data.tenants[0], part) for part in sizes}
    assert [len(own) for own in parts.values()] == [20, 3, 6] and len({*parts["train"], *parts["dev"], *parts["test"]}) == 29

"""Public texts as tasks: their files are read, texts are divided, and no corpus has a dev or test text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from demo.data import DemoData, DemoDomain
from hplm.errors import InvalidInput
from research.accuracy.public import MAILS, published_table, stored_public_data
from research.accuracy.recipes import DomainRecipe, LargeDomainRecipe
from research.accuracy.report import named_options
from research.accuracy.studies import studies_of
from research.accuracy.tiers import PUBLIC, TIERS
from research.result_file import ResultFile
from tests.builder.tables.branches import some_lines
from tests.research.accuracy.test_report import TINY, data, report  # noqa: F401  fixtures
from tests.support.message import mentioning

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
    found = stored_public_data(tmp_path / "data", [files], SIZES, 8, further)
    assert [task.id for task in found.data.tenants] == ["reuters-52"]
    task, corpus = found.data.tenants[0], lines_of(found.data.domains[0].corpus)
    parts = {part: [json.loads(line) for line in lines_of(getattr(task, part))] for part in SIZES}
    assert {part: len(rows) for part, rows in parts.items()} == SIZES
    assert task.labels == ("acq", "earn", "rare") and {row["label"] for row in parts["test"]} <= set(task.labels)
    assert all(len(row["text"].split()) == 8 for rows in parts.values() for row in rows)
    begun = {part: {row["text"] for row in rows} for part, rows in parts.items()}
    assert not begun["train"] & begun["dev"]
    assert not any(line.startswith(("testx", *begun["dev"])) for line in corpus)
    assert sum(line.startswith("trainx") for line in corpus) == 30 - sum(text.startswith("trainx") for text in begun["dev"])
    assert list(found.general) == ["stories", "docstrings"] and "Monica" not in found.general["stories"].read_text()
    assert all("nothing to tell" in line for line in lines_of(found.general["stories"]))
    before = task.train.stat().st_mtime_ns
    assert stored_public_data(tmp_path / "data", [files], SIZES, 8, further) == found
    assert task.train.stat().st_mtime_ns == before
    stored_public_data(tmp_path / "data", [files], SIZES, 9, further)
    assert len(json.loads(lines_of(task.train)[0])["text"].split()) == 9


def test_a_mail_is_its_subject_and_its_words(tmp_path):
    for kind in MAILS:
        (tmp_path / "mails" / "data" / kind).mkdir(parents=True)
        for number in range(9):
            about = " ".join(f"{kind.replace('-', '')}x{in_letters(number)}x{in_letters(place)}" for place in range(20))
            page = f"<html><style>p {{ color: red }}</style><p>Buy&nbsp;now</p> from me@here.org {about}</html>"
            head = "From: secret@sender.org\nX-Spam: yes\nSubject: Offer\nContent-Type: text/html\n\n"
            (tmp_path / "mails" / "data" / kind / f"{number}.txt").write_text(head + page)
    task = stored_public_data(tmp_path / "data", [tmp_path / "mails"], SIZES, 9, {}).data.tenants[0]
    rows = [json.loads(line) for line in lines_of(task.test)]
    assert task.id == "mail-spam" and {row["label"] for row in rows} == {"ham", "spam"}
    assert all(row["text"].startswith("Offer Buy now from ") and "color" not in row["text"] for row in rows)
    assert not any("@" in row["text"] or "secret" in row["text"] for row in rows)
    assert all(("spam" in row["text"]) == (row["label"] == "spam") for row in rows)


def test_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("research.accuracy.public._installed", lambda: [])
    with pytest.raises(InvalidInput, match=mentioning("--files")):
        stored_public_data(tmp_path / "data", [], SIZES, 8, {})
    with pytest.raises(InvalidInput, match=mentioning(f"--files {tmp_path / 'typo'}")):
        stored_public_data(tmp_path / "data", [tmp_path / "typo"], SIZES, 8, {})


def test_published_scores_stand_beside_the_tasks():
    lines = published_table(["reuters-52", "mail-spam"]).splitlines()
    assert len(lines) == 3 and lines[2].startswith("| reuters-52 |")
    assert published_table(["maths-area"]) == ""


def test_a_large_domain_is_built_with_its_largest_share():
    case = studies_of(PUBLIC[1], 6)["domains"].cases[1]
    assert isinstance(case.below, LargeDomainRecipe) and case.below.whole == case.below and case.below.keep == 0.03
    smaller = replace(case.below, keep=0.01, dtype="int8")
    assert smaller.whole == case.below
    assert type(studies_of(TIERS[1], 6)["domains"].cases[1].below) is DomainRecipe


def test_new_options_of_training_do_not_void_the_results():
    stored = {frozenset(finished.run["training"]) for finished in ResultFile(RESULTS)}
    options = TIERS[1].training("hplm", 6, 4, seed=0)
    usual = frozenset(named_options(options))
    assert stored == {usual, usual | {"dropout"}}  # an option is named only where it is not as usual
    assert "function" in named_options(replace(options, function="gelu"))


@pytest.mark.slow
def test_the_root_reads_general_text_alone(report, tmp_path):  # noqa: F811
    """Another domain's corpus changes nothing, the root's corpus changes all numbers that stand on it."""
    general, other = tmp_path / "general.txt", tmp_path / "other.txt"
    general.write_text("\n".join(some_lines(2000, seed=5)), "utf-8")
    other.write_text("\n".join(some_lines(2000, seed=6)), "utf-8")
    domains = (*report.data.domains, DemoDomain("others", (), other, 2000))
    tier = replace(TINY, seeds=(0,), domain_keep=0.2)
    report = replace(report, data=DemoData(domains, report.data.tenants), tier=tier, general={"general": general})
    study = report.studies["domains"]
    report.run([study], at_a_time=1)
    runs = report.finished(study)
    assert [run["case"] for run in runs] == 2 * ["root alone", "n-grams", "n-grams, learned", "dedicated"]
    store = report.home / "stores" / "1-3-3-0.005-0.3"
    assert (report.home / "corpora" / "general.txt").exists()
    assert sorted(folder.name for folder in (store / "plot").iterdir()) == [
        "root", "toys.as-root.0.2-fp16", "toys.masked-0.005.0.2-fp16",
    ]  # fmt: skip
    whole = {run["case"]: run["windows_found"][0] for run in runs if run["case"] != "dedicated"}
    assert whole["n-grams"] > whole["root alone"]
    other.write_text("another", "utf-8")
    assert replace(report).finished(study) == runs
    general.write_text("another", "utf-8")
    assert {run["case"] for run in replace(report).finished(study)} == {"dedicated"}

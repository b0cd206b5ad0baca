"""Labelled data as people have it: CSV, Parquet, and columns with other names teach and score what JSON lines do."""

import csv
import json
from dataclasses import replace
from functools import partial

import pytest

from builder.evaluation.evaluation import evaluate_tenant
from builder.evaluation.unseen import UnseenTexts
from builder.students.build import build_students
from builder.students.options import StudentOptions
from builder.tasks.columns import Columns
from builder.tasks.examples import has_labels, hash_of, read_corpus, read_unlabelled
from builder.tasks.tasks import training_task
from hplm.cli.main import parsed
from hplm.errors import InvalidInput
from tests.builder.training.small_tenants import made, pretend, write
from tests.support.device import DEVICE
from tests.support.message import mentioning
from tests.support.needed import missing

LABEL = dict.fromkeys(("label", "labels", "tags", "answers"), "stars")
NAMES = {"text": "review", "text_pair": "reply", "tokens": "review", **LABEL}
RENAMED = Columns(text_column="review", label_column="stars")


def without_file(examples):
    return [(one.text, one.pair, one.labels, one.value, one.answers) for one in examples]


def renamed(path):
    return [{NAMES[name]: value for name, value in json.loads(line).items()} for line in path.read_text().splitlines()]


def as_csv(path, separator=","):
    """Writes JSON lines as a CSV beside them, with lists as JSON."""
    rows = renamed(path)
    with open(made := path.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: one if isinstance(one, str) else json.dumps(one) for name, one in row.items()})
    return made


def as_parquet(path):
    try:
        import polars
    except ImportError:
        missing("reading Parquet needs polars: .venv/bin/pip install 'hplm[parquet]'")
    polars.DataFrame(renamed(path)).write_parquet(made := path.with_suffix(".parquet"))
    return made


def as_json(path):
    return write(path.with_name(f"renamed-{path.name}"), renamed(path))


@pytest.mark.parametrize("form", [as_csv, partial(as_csv, separator=";"), partial(as_csv, separator="\t"), as_parquet, as_json])
@pytest.mark.parametrize("task", ["classify", "multilabel", "tag", "regress", "span"])
def test_each_form_of_a_file_gives_the_same_examples(tmp_path, task, form):
    path = made(tmp_path, task, 30, 1)
    columns = replace(RENAMED, pair_column="reply") if task == "span" else RENAMED
    plain, own = training_task(task).read(path), form(path)
    assert without_file(training_task(task).read(own, columns)) == without_file(plain)
    texts = read_unlabelled(own, columns, training_task(task).line)
    assert [hash_of(one) for one in texts] == [hash_of(one) for one in plain]
    assert has_labels(own, columns, training_task(task).line)


def test_a_cell_is_a_text_whatever_is_in_it(tmp_path):
    """A text may have lines, separators, quotes and brackets; a label may look like a number."""
    path = tmp_path / "data.csv"
    path.write_bytes('\ufefftext,label,text_pair\r\n"a, ""b""\nc",007,\r\n\r\n[1],x,[2]\r\n'.encode())
    first, second = training_task("classify").read(path)
    assert (first.text, first.labels, first.pair, first.line) == ('a, "b"\nc', ("007",), None, 3)
    assert (second.text, second.labels, second.pair) == ("[1]", ("x",), "[2]")
    assert [*read_corpus([path])] == [first.text, second.text]


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("a.csv", "review,stars\nx,y\n", "a.csv:2 'text' 'review', 'stars' --text-column"),
        ("a.csv", "text,stars\nx,y\n", "a.csv:2 'label' 'stars' --label-column"),
        ("a.csv", "text,label\nx, and y,z\n", "a.csv:2 3 2 quotes"),
        ("a.csv", 'text,label\n"x" y,z\n', "a.csv:2 quote"),
        ("a.csv", "text,text\nx,y\n", "a.csv 'text' two columns"),
        ("a.csv", "text,label\n", "a.csv empty"),
        ("a.parquet", "text,label\nx,y\n", "a.parquet Parquet"),
        ("a.json", '[\n {"text": "x", "label": "y"}\n]', "a.json:1 jq -c '.[]'"),
        ("a.txt", "text,label\nx,y\n", "a.txt:1 .csv .parquet"),
        ("a.xlsx", "PK\3\4", "a.xlsx:1 binary .csv .parquet"),
        ("a.csv", "PAR1", "a.csv end in .parquet"),
    ],
)  # fmt: skip
def test_a_wrong_file_says_how_to_convert_it(tmp_path, name, content, named):
    if name == "a.parquet":
        as_parquet(made(tmp_path, "classify", 3, 1))
    (path := tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=mentioning(*named.split())):
        training_task("classify").read(path)


def test_a_list_in_a_csv_is_json(tmp_path):
    (path := tmp_path / "a.csv").write_text("text,labels\nx,\"['y']\"\n")
    with pytest.raises(InvalidInput, match=mentioning("a.csv:2", "'labels'", "JSON", '["...", "..."]')):
        training_task("multilabel").read(path)


def test_a_column_that_was_named_must_be_there(tmp_path):
    (path := tmp_path / "a.csv").write_text("text,label,stars\nx,y,z\n")
    task = training_task("classify")
    assert task.read(path, Columns(label_column="stars"))[0].labels == ("z",)
    with pytest.raises(InvalidInput, match=mentioning("'star'", "--label-column")):
        task.read(path, Columns(label_column="star"))
    with pytest.raises(InvalidInput, match=mentioning("'second'", "--pair-column")):
        task.read(path, Columns(pair_column="second"))


def test_a_tenant_remembers_the_columns_of_its_training(store, tmp_path):
    """Later steps read the same files by them, and a text was seen whatever file it stands in."""
    train = made(tmp_path, "classify", 120, 1)
    plain, own = pretend(store, "classify", train, tenant="plain"), as_csv(train)
    tenant = pretend(store, "classify", own, columns=RENAMED)
    assert store.seen(tenant) == store.seen(plain)
    assert pretend(store, "classify", own, columns=RENAMED) == tenant  # it is done
    scores = [evaluate_tenant(store, name, path, DEVICE).scores for name, path in (("plain", train), ("acme", own))]
    assert scores[0] == scores[1]
    with pytest.raises(InvalidInput, match=mentioning("120", "0 are left")):
        _ = UnseenTexts(tenant, train, store.seen(tenant).all, "this").fresh
    (renamed := tmp_path / "again.csv").write_bytes(own.read_bytes() + b"one more text,left\n")
    assert pretend(store, "classify", renamed).version == 2
    build_students(store, "acme", StudentOptions(1, 1, rank=2, epochs=1, learning_rate=0.1), DEVICE)
    assert store.known_tenant("acme").version == 3


@pytest.mark.parametrize("more", [[], ["--learning-rate", "5e-4"], ["--adapter", "bottleneck"]])
def test_best_stands_for_the_options_of_the_best_answers(more):
    words = ["build", "tenant", "--id", "acme", "--store", "store", "--rank", "8"]
    preset = ["--adapter", "lora", "--upper-rate", "1e-4", "--learning-rate", "1e-3"]
    best, named = (parsed([*words, *given, *more])[1].arguments["training"].given() for given in (["--best"], preset))
    assert best == named and best["body_rate"] == 1e-4

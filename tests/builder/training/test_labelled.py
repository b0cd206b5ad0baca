"""Reading labelled files and corpora: what they may contain, and how errors name the wrong line."""

import json

import pytest

from builder.training.labelled import read_corpus
from builder.training.tasks import training_task
from hplm.errors import InvalidInput
from tests.support.message import mentioning


def write(tmp_path, content, name="data.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_classify_files_are_read(tmp_path):
    path = write(tmp_path, '\ufeff{"text": "a b", "label": "x"}\r\n\n{"text": "c", "text_pair": "d", "label": 3}\n')
    first, second = training_task("classify").read(path).examples
    assert (first.line, first.text, first.pair, first.labels) == (1, "a b", None, ("x",))
    assert (second.line, second.text, second.pair, second.labels) == (3, "c", "d", ("3",))


def test_tag_files_are_read_as_words_with_single_spaces(tmp_path):
    path = write(tmp_path, '{"tokens": ["in", "São", "Paulo"], "tags": ["O", "B", "I"]}')
    (example,) = training_task("tag").read(path).examples
    assert (example.text, example.labels) == ("in São Paulo", ("O", "B", "I"))


@pytest.mark.parametrize(
    "task, content, named",
    [
        ("classify", "", ["data.jsonl"]),
        ("classify", "\n  \n", ["data.jsonl"]),
        ("classify", '{"text": "a", "label": "x"}\nnot json', ["data.jsonl:2", "JSON"]),
        ("classify", '["a", "x"]', ["data.jsonl:1", "JSON", "list"]),
        ("classify", '{"text": "a"}', ["data.jsonl:1", "'label'", "'text'"]),
        ("classify", '{"label": "x"}', ["data.jsonl:1", "'text'", "'label'"]),
        ("classify", '{"text": " ", "label": "x"}', ["data.jsonl:1", "'text'"]),
        ("classify", '{"text": 5, "label": "x"}', ["data.jsonl:1", "'text'", "int"]),
        ("classify", '{"text": "a", "text_pair": "", "label": "x"}', ["data.jsonl:1", "'text_pair'"]),
        ("classify", '{"text": "a", "label": null}', ["data.jsonl:1", "label", None]),
        ("classify", '{"text": "a", "label": ""}', ["data.jsonl:1", "label", "''"]),
        ("classify", '{"text": "a \\ud800 b", "label": "x"}', ["data.jsonl:1", 3]),
        ("classify", b'{"text": "a", "label": "x"}\n\x00\x01\x02', ["data.jsonl:2"]),
        ("classify", b'{"text": "caf\xe9", "label": "x"}', ["data.jsonl:1", "UTF-8", 14]),
        ("tag", '{"tokens": ["a", "b"], "tags": ["O"]}', ["data.jsonl:1", 2, "tokens", "tags"]),
        ("tag", '{"tokens": [], "tags": []}', ["data.jsonl:1", "'tokens'"]),
        ("tag", '{"tokens": ["a", "b c"], "tags": ["O", "O"]}', ["data.jsonl:1", 2, "'b c'"]),
        ("tag", '{"tokens": ["a", ""], "tags": ["O", "O"]}', ["data.jsonl:1", 2, "''"]),
        ("tag", '{"tokens": "a b", "tags": ["O", "O"]}', ["data.jsonl:1", "'tokens'", "'tags'"]),
        ("tag", '{"text": "a", "label": "x"}', ["data.jsonl:1", "'tokens'", "'text'", "'label'"]),
    ],
)
def test_wrong_examples_are_named_by_file_and_line(tmp_path, task, content, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        training_task(task).read(write(tmp_path, content))


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "nothing.jsonl")):
        training_task("classify").read(tmp_path / "nothing.jsonl")
    with pytest.raises(InvalidInput, match=mentioning(tmp_path)):
        list(read_corpus([tmp_path]))


def test_a_corpus_is_lines_or_jsonl(tmp_path):
    lines = write(tmp_path, "one document\n\n{braces} are no JSON\nlast", "corpus.txt")
    objects = write(tmp_path, "\n" + json.dumps({"text": "two\nlines"}) + "\n" + json.dumps({"text": "x", "id": 4}), "c2.txt")
    assert list(read_corpus([lines, objects])) == ["one document", "{braces} are no JSON", "last", "two\nlines", "x"]


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("corpus.txt", "\n\n", ["corpus.txt"]),
        ("corpus.txt", b"fine\n\x89PNG\x00\x00", ["corpus.txt:2"]),
        ("corpus.txt", b"fine\nfine\n\xff\xfe", ["corpus.txt:3", "UTF-8"]),
        ("corpus.jsonl", "plain text", ["corpus.jsonl:1", "JSON"]),
        ("corpus.jsonl", '{"text": "a"}\n{"body": "b"}', ["corpus.jsonl:2", "'text'", "'body'"]),
    ],
)
def test_a_broken_corpus_is_named_by_file_and_line(tmp_path, name, content, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        list(read_corpus([write(tmp_path, content, name)]))


SQUAD = {"text": "who?", "text_pair": "the old man", "answers": {"text": ["old man", "man"], "answer_start": [4, 8]}}


def read_one(tmp_path, task, entry):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(entry))
    (example,) = training_task(task).read(path).examples
    return example


def test_each_task_reads_its_own_form(tmp_path):
    several = read_one(tmp_path, "multilabel", {"text": "a", "labels": ["x", 2, "x"]})
    assert several.labels == ("x", "2") and several.pair is None
    assert read_one(tmp_path, "multilabel", {"text": "a", "labels": []}).labels == ()
    valued = read_one(tmp_path, "regress", {"text": "a", "text_pair": "b", "label": 3})
    assert valued.value == 3.0 and valued.pair == "b"
    assert read_one(tmp_path, "span", SQUAD).answers == ((4, 11), (8, 11))
    assert read_one(tmp_path, "span", {**SQUAD, "answers": {"text": [], "answer_start": []}}).answers == ()


@pytest.mark.parametrize(
    "task, entry, named",
    [
        ("multilabel", {"text": "a", "labels": "x"}, ["'labels'", "str"]),
        ("multilabel", {"text": "a", "label": "x"}, ["'labels'", "'label'"]),
        ("regress", {"text": "a", "label": "3"}, ["label", "'3'"]),
        ("regress", {"text": "a", "label": True}, ["label", True]),
        ("regress", {"text": "a", "label": float("nan")}, ["label", "nan"]),
        ("span", {**SQUAD, "text_pair": ""}, ["'text_pair'"]),
        ("span", {**SQUAD, "answers": ["old"]}, ["'answers'", "'text'", "'answer_start'"]),
        ("span", {**SQUAD, "answers": {"text": ["old"], "answer_start": [3]}}, ["'old'", 3]),
        ("span", {**SQUAD, "answers": {"text": ["old"], "answer_start": []}}, [0]),
        ("span", {**SQUAD, "answers": {"text": [""], "answer_start": [0]}}, ["''"]),
    ],
)
def test_examples_that_do_not_fit_their_task_are_refused(tmp_path, task, entry, named):
    with pytest.raises(InvalidInput, match=mentioning("one.jsonl:1", *named)):
        read_one(tmp_path, task, entry)

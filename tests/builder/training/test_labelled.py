"""What labelled files and corpora may hold, and how each thing they may not is named."""

import json

import pytest

from builder.training.labelled import read_corpus
from builder.training.tasks import training_task
from hplm.errors import InvalidInput


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
    "task, content, message",
    [
        ("classify", "", "data.jsonl is empty"),
        ("classify", "\n  \n", "data.jsonl is empty"),
        ("classify", '{"text": "a", "label": "x"}\nnot json', "data.jsonl:2: not JSON"),
        ("classify", '["a", "x"]', "data.jsonl:1: not a JSON object but a list"),
        ("classify", '{"text": "a"}', "data.jsonl:1: no key 'label'; it has 'text'"),
        ("classify", '{"label": "x"}', "data.jsonl:1: no key 'text'"),
        ("classify", '{"text": " ", "label": "x"}', "data.jsonl:1: 'text' is empty"),
        ("classify", '{"text": 5, "label": "x"}', "data.jsonl:1: 'text' is not a string but a int"),
        ("classify", '{"text": "a", "text_pair": "", "label": "x"}', "data.jsonl:1: 'text_pair' is empty"),
        ("classify", '{"text": "a", "label": null}', "data.jsonl:1: label None is neither"),
        ("classify", '{"text": "a", "label": ""}', "data.jsonl:1: label '' is neither"),
        ("classify", '{"text": "a \\ud800 b", "label": "x"}', "data.jsonl:1: character 3 of .* half a surrogate pair"),
        ("classify", b'{"text": "a", "label": "x"}\n\x00\x01\x02', "data.jsonl:2: a zero byte: this is a binary file"),
        ("classify", b'{"text": "caf\xe9", "label": "x"}', r"data.jsonl:1: not valid UTF-8 \(byte 14\)"),
        ("tag", '{"tokens": ["a", "b"], "tags": ["O"]}', "data.jsonl:1: 2 tokens but 1 tags"),
        ("tag", '{"tokens": [], "tags": []}', "data.jsonl:1: 'tokens' is empty"),
        ("tag", '{"tokens": ["a", "b c"], "tags": ["O", "O"]}', "data.jsonl:1: token 2, 'b c', is not one word"),
        ("tag", '{"tokens": ["a", ""], "tags": ["O", "O"]}', "data.jsonl:1: token 2, '', is not one word"),
        ("tag", '{"tokens": "a b", "tags": ["O", "O"]}', "data.jsonl:1: 'tokens' and 'tags' must be lists"),
        ("tag", '{"text": "a", "label": "x"}', "data.jsonl:1: no key 'tokens'"),
    ],
)
def test_what_cannot_be_learned_from_is_named_by_file_and_line(tmp_path, task, content, message):
    with pytest.raises(InvalidInput, match=message):
        training_task(task).read(write(tmp_path, content))


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"nothing\.jsonl does not exist"):
        training_task("classify").read(tmp_path / "nothing.jsonl")
    with pytest.raises(InvalidInput, match="is a folder"):
        list(read_corpus([tmp_path]))


def test_a_corpus_is_lines_or_jsonl(tmp_path):
    lines = write(tmp_path, "one document\n\n{braces} are no JSON\nlast", "corpus.txt")
    objects = write(tmp_path, "\n" + json.dumps({"text": "two\nlines"}) + "\n" + json.dumps({"text": "x", "id": 4}), "c2.txt")
    assert list(read_corpus([lines, objects])) == ["one document", "{braces} are no JSON", "last", "two\nlines", "x"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("corpus.txt", "\n\n", "corpus .*corpus.txt is empty"),
        ("corpus.txt", b"fine\n\x89PNG\x00\x00", "corpus.txt:2: a zero byte"),
        ("corpus.txt", b"fine\nfine\n\xff\xfe", "corpus.txt:3: not valid UTF-8"),
        ("corpus.jsonl", "plain text", "corpus.jsonl:1: not JSON"),
        ("corpus.jsonl", '{"text": "a"}\n{"body": "b"}', "corpus.jsonl:2: no key 'text'; it has 'body'"),
    ],
)
def test_a_broken_corpus_is_named_by_file_and_line(tmp_path, name, content, message):
    with pytest.raises(InvalidInput, match=message):
        list(read_corpus([write(tmp_path, content, name)]))


SQUAD = {"text": "who?", "text_pair": "the old man", "answers": {"text": ["old man", "man"], "answer_start": [4, 8]}}


def read_one(tmp_path, task, entry):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(entry))
    (example,) = training_task(task).read(path).examples
    return example


def test_every_task_has_its_form(tmp_path):
    several = read_one(tmp_path, "multilabel", {"text": "a", "labels": ["x", 2, "x"]})
    assert several.labels == ("x", "2") and several.pair is None
    assert read_one(tmp_path, "multilabel", {"text": "a", "labels": []}).labels == ()
    valued = read_one(tmp_path, "regress", {"text": "a", "text_pair": "b", "label": 3})
    assert valued.value == 3.0 and valued.pair == "b"
    assert read_one(tmp_path, "span", SQUAD).answers == ((4, 11), (8, 11))


@pytest.mark.parametrize(
    "task, entry, message",
    [
        ("multilabel", {"text": "a", "labels": "x"}, "'labels' is not a list but a str"),
        ("multilabel", {"text": "a", "label": "x"}, "no key 'labels'"),
        ("regress", {"text": "a", "label": "3"}, "label '3' is not a number"),
        ("regress", {"text": "a", "label": True}, "label True is not a number"),
        ("regress", {"text": "a", "label": float("nan")}, "label nan is not a number"),
        ("span", {**SQUAD, "text_pair": ""}, "'text_pair' is empty"),
        ("span", {**SQUAD, "answers": ["old"]}, "'answers' is not an object"),
        ("span", {**SQUAD, "answers": {"text": [], "answer_start": []}}, "no answer: a question that the passage"),
        ("span", {**SQUAD, "answers": {"text": ["old"], "answer_start": [3]}}, "does not have 'old' at character 3"),
        ("span", {**SQUAD, "answers": {"text": ["old"], "answer_start": []}}, "1 answers but 0 starts"),
        ("span", {**SQUAD, "answers": {"text": [""], "answer_start": [0]}}, "answer '' is not a text"),
    ],
)
def test_what_does_not_fit_its_task_is_refused(tmp_path, task, entry, message):
    with pytest.raises(InvalidInput, match=rf"one\.jsonl:1: .*{message}"):
        read_one(tmp_path, task, entry)

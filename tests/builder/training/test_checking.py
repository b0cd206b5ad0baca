"""`hplm check`: two hundred bad files, each with its reason and line, which a training refuses too; good ones with warnings."""

import gzip
import io
import json
import random
import zipfile
from types import SimpleNamespace

import pytest

from builder.tables.text_files import LONGEST_LINE
from builder.tasks.columns import Columns
from builder.training.data import read_data
from hplm.cli.main import main
from hplm.errors import InvalidInput
from testing.toy import WORDS, make_decoder
from tests.builder.training.small_tenants import made, pretend, write
from tests.cli.commands import printed, refused, run
from tests.support.device import DEVICE
from tests.support.message import mentions

EACH, OF_LARGE = 8, 1  # files of a kind
LARGE = {"wide", "long name", "10 MB", "no end", "gzip bomb", "3,000 labels", "5,000 labels"}


def good(rng, count=12):
    return [{"text": " ".join(rng.choices(WORDS, k=9)) + f" {i}", "label": "xy"[i % 2]} for i in range(count)]


def lines(rows):
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def among(bad, *named, before=lambda rng: None):
    """Returns a maker of good lines with a bad one among them, whose number is named. `bad` may take the chance."""

    def make(rng):
        rows = good(rng)
        rows[at := rng.randrange(len(rows))] = bad(rng) if callable(bad) else bad
        return lines(rows), at + 1, named

    return make


def labelled(label):
    return {"text": "a b", "label": label}


def deep(rng):
    return b'{"text": "a", "label": "x", "more": ' + rng.choice([b"[", b'{"a":']) * rng.choice([2_000, 50_000])


def named_like(suffix, content, *named):
    return lambda rng: (content(rng) if callable(content) else content, None, named, suffix)


def zipped(rng):
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("train.jsonl", lines(good(rng)))
    return file.getvalue()


def chat(*roles):
    return {"messages": [{"role": role, "content": "a"} for role in roles]}


FAULTS = {
    "empty": named_like(".jsonl", lambda rng: rng.choice([b"", b"\n" * 3, b" \n\t\n", b"\r\n"]), "empty"),
    "binary": named_like(".jsonl", lambda rng: b"\0" + rng.randbytes(5000), "binary"),
    "latin-1": among('{"text": "caf\xe9", "label": "x"}'.encode("latin-1"), "UTF-8", "14"),
    "utf-16": named_like(".jsonl", lambda rng: lines(good(rng)).decode().encode("utf-16"), "UTF-16", "iconv"),
    "10 MB": among({"text": "a" * 10_000_000, "label": "x"}, "100,000", "characters"),
    "no end": named_like(".jsonl", b"a" * (LONGEST_LINE + 2), "16 MB"),
    "deep": among(deep, "deep"),
    "NUL in a label": among(labelled("a\0b"), "NUL", "label"),
    "NUL": among(b'{"text": "a\0", "label": "x"}', "binary"),
    "1 MB label": among(labelled("x" * 1_000_000), "256", "`$.label`"),
    "no label": among({"text": "a"}, "`label`"),
    "odd label": among(lambda rng: labelled(rng.choice([None, 0.5, True, [], {}, "", 10**30])), "`$.label`"),
    "empty text": among({"text": " \u3000", "label": "x"}, "'text'"),
    "half a character": among(b'{"text": "\\ud800", "label": "x"}', "surrogate"),
    "cut": among(lambda rng: json.dumps(labelled("x")).encode()[: rng.randrange(1, 20)], "JSON object"),
    "text": among(lambda rng: rng.choice([b"<html>", b"- a: b", b"3", b'"text"', b"null"]), "JSON object"),
    "other task": among({"tokens": ["a"], "tags": ["O"]}, "--task tag"),
    "chat": among(lambda rng: chat(*rng.choice([["user"], ["user", "assistant", "user"], []])), "'messages'"),
    "chat without text": among(chat("system", "assistant"), "'text'"),
    "two targets": among({"text": "a", "labels": {"mood": "x", "topic": "y"}}, "2 targets"),
    "array": named_like(".json", lambda rng: json.dumps(good(rng), indent=1).encode(), "jq -c"),
    "one label": named_like(".jsonl", lambda rng: lines({**row, "label": "x"} for row in good(rng)), "'x'", "two"),
    "one text": named_like(".jsonl", lambda rng: lines([labelled("xy"[i % 2]) for i in range(9)]), "alike", "--dev"),
    "3,000 labels": named_like(".jsonl", lambda rng: lines(labelled(i) | {"text": str(i)} for i in range(3000)), "only one"),
    "5,000 labels": named_like(".jsonl", lambda rng: lines(labelled(i) for i in range(5000)), "5,000", "4,096"),
    "zip": named_like(".jsonl", zipped, "binary"),
    "no gzip": named_like(".jsonl.gz", lambda rng: lines(good(rng)), "corrupt"),
    "cut gzip": named_like(".jsonl.gz", lambda rng: gzip.compress(lines(good(rng)))[: -rng.randrange(1, 20)], "truncated"),
    "cut zstd": named_like(".jsonl.zst", b"\x28\xb5\x2f\xfd\0", "truncated"),
    "gzip bomb": named_like(".jsonl.gz", gzip.compress((b" " * 1_000_000 + b"\n") * 100), "unpacks"),
    "ragged": named_like(".csv", b"text,label\na,x\nb,y,z\n", "3 cells"),
    "wide": named_like(".csv", (b",".join(b"%d" % i for i in range(50_000)) + b"\n") * 2, "--text-column", "more"),
    "long name": named_like(".csv", b"text," + b"n" * 1_000_000 + b"\na,b\n", "--label-column"),
    "quote": named_like(".csv", b'text,label\n"a,x\n' * 9, "quote"),
}  # fmt: skip


def reasons(file, dev=None):
    """Returns why a training refuses the files. Nothing is looked up."""
    with pytest.raises(InvalidInput) as refusal:
        read_data(SimpleNamespace(store=None, read=lambda examples, *_: examples), "classify", file, dev, DEVICE)
    return str(refusal.value)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_bad_file_is_named_with_its_line_as_a_training_names_it_and_leaves_nothing(kind, tmp_path, capsys):
    fine = write(tmp_path / "fine.jsonl", good(random.Random(0)))
    for number in range(count := OF_LARGE if kind in LARGE else EACH):
        content, line, named, *suffix = FAULTS[kind](random.Random(f"{kind} {number}"))
        (file := tmp_path / f"{number}{(suffix or ['.jsonl'])[0]}").write_bytes(content)
        found = run(capsys, "check", "--task", "classify", "--train", file, status=1)
        fault, *others = found["faults"]
        assert not others or kind == "array"
        assert mentions(fault, f"{file}:{line}" if line else file, *named) and len(fault) < 1000, fault
        assert reasons(file).startswith(fault) and mentions(reasons(file), "hplm check") == bool(others)
        if line:
            assert run(capsys, "check", "--train", fine, "--dev", file, status=1)["faults"] == [fault]
    assert len([*tmp_path.iterdir()]) == count + 1


def test_there_are_two_hundred_bad_files():
    assert EACH * (len(FAULTS) - len(LARGE)) >= 200


@pytest.mark.parametrize("name", ["missing", "..", "/proc/self/mem/x", "a\0b", "a" * 5000, "{}/x", "\udcff"])
def test_a_name_that_is_no_file_is_refused(name, tmp_path, capsys):
    (file := tmp_path / "a file").touch()
    for option in ("--train", "--dev"):
        words = ["check", "--train", write(tmp_path / "good.jsonl", good(random.Random(0))), option, name.format(file)]
        assert main([*map(str, words)]) == 1 and "Traceback" not in capsys.readouterr().err


def test_up_to_twenty_faults_are_named_and_others_are_not_made_of_them(tmp_path, capsys):
    rows = [{**row, "label": None if i % 2 else "x"} for i, row in enumerate(good(random.Random(0), 24))]
    few, dev = tmp_path / "few.jsonl", tmp_path / "dev.jsonl"
    few.write_bytes(lines([*rows, b"\xff"]))  # at which the reading ends
    *named, last = printed(capsys, "check", "--train", few, status=1).splitlines()
    assert [one.split(" ")[0] for one in named] == [*(f"{few}:{i}:" for i in range(2, 25, 2)), f"{few}:25:"]
    assert mentions(last, 13, "hplm build tenant")
    many = write(tmp_path / "many.jsonl", [labelled("")] * 60)
    *named, last = printed(capsys, "check", "--train", many, status=1).splitlines()
    assert len(named) == 20 and mentions(named[-1], f"{many}:20") and mentions(last, "20 or more")
    train = write(tmp_path / "train.jsonl", good(random.Random(0)))
    write(dev, [labelled(one) for one in "zxw"])
    first, second = run(capsys, "check", "--train", train, "--dev", dev, status=1)["faults"]
    assert mentions(first, f"{dev}:1", "'z'") and mentions(second, f"{dev}:3", "'w'")
    assert reasons(train, dev).startswith(first) and mentions(reasons(train, dev), "hplm check", 2)
    dev.write_bytes(lines([*good(random.Random(0)), b"{"]))
    assert [one.split(" ")[0] for one in run(capsys, "check", "--train", few, "--dev", dev, status=1)["faults"]][12:] == [
        f"{few}:25:", f"{dev}:13:"
    ]  # fmt: skip


def test_doubtful_data_pass_with_warnings_and_their_lines(tmp_path, capsys):
    rows = good(random.Random(0), 30)
    again = [rows[0], {**rows[1], "text": rows[1]["text"].replace(" ", "  "), "label": "x"}, labelled("single")]
    train = write(tmp_path / "train.jsonl", [*rows, *again])
    found = run(capsys, "check", "--train", train)
    assert found["task"] == "classify" and not found["faults"]
    for named in (
        [1, "texts occur again:", "train.jsonl:31", "line 1"], ["another answer", "train.jsonl:32", "line 2"],
        ["'single' (train.jsonl:33)"], [3, "too few"],
    ):  # fmt: skip
        assert [mentions(one, *named) for one in found["warnings"]].count(True) == 1, named
    assert found["training"]["texts"] + found["dev"]["texts"] == 33
    assert mentions(printed(capsys, "check", "--train", train, "--dev", train), "warning", "33 of 33", "train.jsonl:1")
    dev = write(tmp_path / "dev.jsonl", [{**row, "label": "x"} for row in rows[:2]])
    said = printed(capsys, "check", "--train", train, "--dev", dev)
    assert mentions(said, "dev.jsonl:2 (as train.jsonl:2)", "2 of 2") and "dev.jsonl:1 (as" not in said
    clean = write(tmp_path / "clean.jsonl", good(random.Random(1), 60))
    assert printed(capsys, "check", "--train", clean) == "classify: 54 texts to learn, 6 dev texts, 2 labels\n"


@pytest.mark.parametrize("task", ["classify", "multilabel", "tag", "regress", "span", "embed"])
def test_the_first_line_says_the_task_and_a_store_what_its_tables_have(task, store, tmp_path, capsys):
    train = made(tmp_path, "near" if task == "embed" else task, 90, 1)
    if task == "regress":
        train.write_text(train.read_text().replace("}", ".5}"))
    assert run(capsys, "check", "--train", train)["task"] == task
    before = sorted(store.folder.rglob("*"))
    found = run(capsys, "check", "--train", train, "--store", store.folder)
    assert sum(found["training"]["windows_found"]) == pytest.approx(1, abs=1e-3) and found["training"]["texts_cut"] == 0
    said = printed(capsys, "check", "--train", train, "--store", store.folder)
    assert "windows found: whole" in said and sorted(store.folder.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_data_of_a_next_version_are_checked_as_its_training_reads_them(store, tmp_path, capsys):
    """Dev texts that an earlier version has learned are known after its files are gone."""
    rows, more = good(random.Random(0), 20), good(random.Random(1), 20)
    first, new = (write(tmp_path / f"{name}.jsonl", own) for name, own in (("first", rows), ("new", more)))
    csv = tmp_path / "first.csv"
    csv.write_text("".join(f"{row['text']},{row['label']}\n" for row in [{"text": "text", "label": "stars"}, *rows]))
    judged = write(tmp_path / "judged.jsonl", [{"text": row["text"], "stars": row["label"]} for row in more[:5]])
    pretend(store, "classify", csv, judged, columns=Columns(label_column="stars"))
    before, asked = sorted(store.folder.rglob("*")), ["check", "--store", store.folder, "--id", "acme", "--train"]
    dev = write(tmp_path / "dev.jsonl", [{"text": row["text"], "stars": row["label"]} for row in rows[:7]])
    train = write(tmp_path / "train.jsonl", [{"text": row["text"], "stars": row["label"]} for row in more])
    csv.unlink()
    for options, learned in (([], True), (["--from-version", 1], True), (["--fresh"], False)):
        found = run(capsys, *asked, train, "--dev", dev, *options)
        assert found["task"] == "classify" and mentions(found["warnings"], "7 of 7", "dev.jsonl:1") == learned, options
    as_new = ["--id", "other", "--label-column", "stars"]
    assert not mentions(run(capsys, *asked, train, "--dev", dev, *as_new)["warnings"], "7 of 7")
    assert mentions(printed(capsys, *asked, new, status=1), new, "'stars'"), "the columns of its training"
    plain = ["--label-column", "label"]
    third = write(tmp_path / "third.jsonl", [*rows, labelled("z"), labelled("y"), labelled("w")])
    assert mentions(printed(capsys, *asked, third, *plain, status=1), "'acme'", 1, "'w'", "'z'")
    grown = [*asked, third, *plain, "--new-labels"]
    assert run(capsys, *grown)["new_labels"] == ["w", "z"] and mentions(printed(capsys, *grown), 4, "new: 'w', 'z'")
    assert mentions(printed(capsys, *asked, first, *plain, "--task", "tag", status=1), "'acme'", "classify", "tag")
    assert mentions(printed(capsys, *asked, first, *plain, "--from-version", 9, status=1), "--from-version 9", "'acme'")
    assert mentions(refused(capsys, *asked, first, "--fresh", "--from-version", 1), "--fresh", "--from-version")
    assert mentions(refused(capsys, "check", "--train", first, "--id", "acme"), "--id", "--store")
    assert mentions(refused(capsys, *asked[:3], "--train", first, "--fresh"), "--fresh", "--id")
    for name in ("../acme", "/etc", "a/b", "..", "", "a\0b", "Acme", "a" * 65):
        assert mentions(refused(capsys, *asked[:3], "--train", first, "--id", name), "tenant name", repr(name))
    assert sorted(store.folder.rglob("*")) == before


def test_texts_that_are_cut_and_options_of_a_store_are_named(store, tmp_path, capsys):
    train = write(tmp_path / "a.jsonl", [*good(random.Random(0)), {"text": "a " * 2000, "label": "x"}])
    of = ["check", "--train", train, "--dev", train]
    assert mentions(printed(capsys, *of, "--store", store.folder), "1 of 13 texts", "cut")
    assert mentions(refused(capsys, *of, "--domain", "bio"), "--domain", "--store")
    assert mentions(refused(capsys, *of, "--domain", "bio", "--store", store.folder), "'bio'")
    assert mentions(printed(capsys, *of, "--task", "generate", "--store", store.folder, status=1), "generate", "decoder")


def test_a_decoders_data_are_prompts_and_chats(tmp_path, capsys):
    store = make_decoder(tmp_path / "store", [], [])
    rows = [{"text": f"{word} {i}", "target": f" {word}"} for i, word in enumerate(WORDS[:40])]
    train = write(tmp_path / "a.jsonl", [*rows, rows[0] | {"target": " b"}])
    found = run(capsys, "check", "--train", train, "--store", store.folder)
    assert found["task"] == "generate" and found["training"]["texts"] > 30 and len(found["training"]["windows_found"]) == 1
    assert not mentions(found["warnings"], "again"), "a prompt may be followed by several texts"
    classified = write(tmp_path / "b.jsonl", good(random.Random(0)))
    assert mentions(printed(capsys, "check", "--train", classified, "--store", store.folder, status=1), "'target'", "classify")

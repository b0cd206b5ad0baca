"""Labelled files and corpora: what is read, divided and put into packs, and how what cannot be learned is refused."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.evaluation.evaluation import evaluate_tenant
from builder.packed_batches import packed_batches
from builder.store.seen import SeenTexts
from builder.store.store import TenantVersion
from builder.tasks.division import seen_after, split_again, split_off
from builder.tasks.examples import Example, hash_of, read_corpus
from builder.tasks.tasks import training_task
from builder.training.data import read_data
from hplm.errors import Broken, InvalidInput
from testing.random_store import random_tenant
from tests.builder.training.small_tenants import asked, learn, made, pretend, write
from tests.support.device import DEVICE
from tests.support.message import mentioning, mentions

SQUAD = {"text": "who?", "text_pair": "the old man", "answers": {"text": ["old man", "man"], "answer_start": [4, 8]}}

CHAT = [
    {"role": "system", "content": "sort"}, {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "my card"}, {"role": "assistant", "content": "lost\n"},
]  # fmt: skip


def raw(folder, content):
    path = folder / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "task, content, read",
    [
        ("classify", '\ufeff{"text": "a b", "label": "x"}\r\n\n', {"line": 1, "text": "a b", "pair": None, "labels": ("x",)}),
        ("classify", '\n\n{"text": "c", "text_pair": "d", "label": 3}', {"line": 3, "pair": "d", "labels": ("3",)}),
        ("tag", '{"tokens": ["in", "São"], "tags": ["O", "B"]}', {"text": "in São", "labels": ("O", "B")}),
        ("multilabel", '{"text": "a", "labels": ["x", 2, "x"]}', {"labels": ("x", "2")}),
        ("multilabel", '{"text": "a", "labels": []}', {"labels": ()}),
        ("regress", '{"text": "a", "text_pair": "b", "label": 3}', {"value": 3.0, "pair": "b"}),
        ("classify", json.dumps({"messages": CHAT}), {"text": "my card", "labels": ("lost",)}),  # OpenAI's
        ("classify", '{"text": "a", "labels": {"intent": "x"}}', {"labels": ("x",)}),  # Mistral's
        (
            "multilabel",
            json.dumps({"messages": CHAT, "labels": {"mood": ["x", "y"]}}),
            {"text": "my card", "labels": ("x", "y")},
        ),
        ("classify", '{"text": "a", "label": "x", "messages": 1, "labels": {"i": "y"}}', {"text": "a", "labels": ("x",)}),
        ("span", json.dumps(SQUAD), {"answers": ((4, 11), (8, 11))}),
        ("span", json.dumps({**SQUAD, "answers": {"text": [], "answer_start": []}}), {"answers": ()}),
        ("span", json.dumps({**SQUAD, "answers": {"text": [" old "], "answer_start": [3]}}), {"answers": ((4, 7),)}),
    ],
)
def test_each_task_reads_its_own_form(tmp_path, task, content, read):
    (example,) = training_task(task).read(raw(tmp_path, content))
    assert {name: getattr(example, name) for name in read} == read


@pytest.mark.parametrize(
    "task, content, named",
    [
        ("classify", "\n  \n", "data.jsonl JSON"),
        ("classify", '{"text": "a", "label": "x"}\nnot json', "data.jsonl:2 JSON"),
        ("classify", '{"text": "a", "label": "x"}\n3', "data.jsonl:2 JSON object"),
        ("classify", '{"text": "a"}', 'data.jsonl:1 `label` classify is like {"text": "...", "label": "..."}'),
        ("classify", '{"text": "a", "label": 0.5}', "data.jsonl:1 label --task regress"),
        ("classify", '{"text": "a", "labels": ["x"]}', "data.jsonl:1 `label` --task multilabel"),
        ("tag", '{"text": "a", "label": "x"}', "data.jsonl:1 `tokens` --task classify"),
        ("classify", '{"text": "a", "label": "x"}'.encode("utf-16"), "data.jsonl UTF-16 UTF-8"),
        ("classify", '{"text": " ", "label": "x"}', "data.jsonl:1 'text'"),
        ("classify", '{"text": "a", "text_pair": "", "label": "x"}', "data.jsonl:1 'text_pair'"),
        ("classify", '{"text": "a \\ud800 b", "label": "x"}', "data.jsonl:1 surrogate JSON"),
        ("classify", b'{"text": "a", "label": "x"}\n\x00\x01\x02', "data.jsonl:2"),
        ("classify", b'{"text": "caf\xe9", "label": "x"}', "data.jsonl:1 UTF-8 14"),
        ("classify", '{"text": "a", "label": ""}', "data.jsonl:1 label length"),
        ("classify", json.dumps({"text": "a", "label": "x" * 257}), "data.jsonl:1 label 256"),
        ("classify", '{"text": "a", "label": "x\\u0000"}', "data.jsonl:1 label NUL"),
        ("classify", f'{{"text": "a", "label": {"1" * 30}}}', "data.jsonl:1 label"),
        ("classify", json.dumps({"text": "a" * 100_001, "label": "x"}), "data.jsonl:1 100,000 characters"),
        ("classify", '{"text": "a", "label": "x", "more": ' + "[" * 10_000, "data.jsonl:1 deep JSON"),
        ("multilabel", '{"text": "a", "labels": {"x": "y", "z": "y"}}', "data.jsonl:1 'labels' 2 targets"),
        ("classify", json.dumps({"messages": CHAT[:4]}), "data.jsonl:1 'messages' assistant"),
        ("classify", json.dumps({"messages": [{"role": "user"}]}), "data.jsonl:1 `content` $.messages"),
        ("multilabel", json.dumps({"messages": CHAT}), "data.jsonl:1 `labels` --task classify"),
        ("tag", '{"tokens": ["a", "b"], "tags": ["O"]}', "data.jsonl:1 2 tags"),
        ("tag", '{"tokens": [], "tags": []}', "data.jsonl:1 tokens length"),
        ("tag", '{"tokens": ["a", "b c"], "tags": ["O", "O"]}', "data.jsonl:1 2 'b c'"),
        ("regress", '{"text": "a", "label": true}', "data.jsonl:1 label bool"),
        ("regress", '{"text": "a", "label": 1e300}', "data.jsonl:1 label 1000000000000000.0"),
        ("span", json.dumps({**SQUAD, "text_pair": ""}), "data.jsonl:1 'text_pair'"),
        ("span", json.dumps({**SQUAD, "answers": {"text": ["old"], "answer_start": [3]}}), "data.jsonl:1 'old' 3"),
        ("span", json.dumps({**SQUAD, "answers": {"text": ["old"], "answer_start": []}}), "data.jsonl:1 0"),
        ("span", json.dumps({**SQUAD, "answers": {"text": [""], "answer_start": [0]}}), "data.jsonl:1 ''"),
        ("corpus", "\n\n", "data.jsonl"),
        ("corpus", b'{"text": "a"}\n\xff\xfe', "data.jsonl:2 UTF-8"),
        ("corpus", "plain text", "data.jsonl:1 JSON"),
        ("corpus", None, "data.jsonl"),
        ("classify", None, "data.jsonl"),
    ],
)
def test_wrong_lines_missing_files_and_folders_are_named(tmp_path, task, content, named):
    path = tmp_path / "data.jsonl" if content is None else raw(tmp_path, content)
    if content is None and task == "corpus":
        path.mkdir()
    with pytest.raises(InvalidInput, match=mentioning(*named.split(maxsplit=2))) as caught:
        list(read_corpus([path])) if task == "corpus" else training_task(task).read(path)
    assert ("one JSON object a line" in str(caught.value)) == ("JSON" in named)


def data_of(path, task, *given, store=None, **options):
    """Returns the data of a training, which are not looked up: their parts have only examples."""
    reader = SimpleNamespace(store=store, read=lambda examples, *_: SimpleNamespace(examples=examples))
    return read_data(reader, task, path, *(given or (None,)), device=DEVICE, **options)


@pytest.mark.parametrize(
    "task, row, shared, both",
    [
        ("classify", lambda i: {"text": f"text {i % 30}"}, "text", 0),
        ("classify", lambda i: {"text": f"query {i % 20}", "text_pair": f"candidate {i}"}, "text", 0),
        ("span", lambda i: {"text": f"question {i}", "text_pair": f"end of {i % 20}"}, "pair", 0),
        ("span", lambda i: {"text": f"question {i}", "text_pair": f"end of {i % 2}"}, "pair", 2),  # too few to set one apart
    ],
)
def test_examples_that_share_a_text_are_all_in_training_or_all_in_dev(tmp_path, task, row, shared, both):
    answer = {"answers": {"text": ["end"], "answer_start": [0]}}
    rows = [{**row(i), **(answer if task == "span" else {"label": "ab"[i % 2]})} for i in range(120)]
    data = data_of(write(tmp_path / "data.jsonl", rows), task)
    parts = data.train.examples, data.dev.examples
    training, dev = ({getattr(example, shared) for example in part} for part in parts)
    assert (len(parts[0]), len(parts[1])) == (108, 12) and len(training & dev) == both


@pytest.mark.parametrize("seed", range(8))
def test_a_learned_text_never_comes_to_dev_in_later_versions(seed, tmp_path):
    """Not when its label gets more examples, its group becomes a small one, or the new examples share texts."""
    chance = random.Random(seed)
    texts = [f"{seed} {chance.randrange(150) if number >= 100 else number}" for number in range(400)]
    examples = [Example(Path("file"), n, text, labels=(str(int(chance.expovariate(0.2))),)) for n, text in enumerate(texts)]
    learned, seen = set(), SeenTexts()
    for start, stop in ((0, 50), (0, 90), (90, 100), (0, 150), (0, 400)):
        some = examples[start:stop]
        training, dev = split_off(some, 0.1, seen)
        assert not learned & {example.text for example in dev}
        learned |= {example.text for example in training}
        seen_after(seen, training, dev).save(tmp_path / "seen.npz")
        seen = SeenTexts.load(tmp_path / "seen.npz")
        assert split_again(some, 0.1, seen) == (training, dev), "students learn from the same texts"


@pytest.mark.parametrize("seed", range(4))
def test_questions_of_a_learned_passage_and_dev_texts_of_before_stay_on_their_side(seed):
    def asked(number, passage):
        return Example(Path("file"), number, f"question {number}", f"passage {seed} {passage}", answers=((0, 7),))

    first = [asked(number, number % 20) for number in range(120)]
    training, dev = split_off(first, 0.1)
    seen, known = seen_after(SeenTexts(), training, dev), {one.pair for one in training}
    _, judged = split_off([asked(number, number % 40) for number in range(200, 400)], 0.1, seen)
    assert judged and not known & {one.pair for one in judged} and {one.pair for one in dev} <= {one.pair for one in judged}
    odd = [replace(one, text=one.text.replace(" ", "  ")) for one in training]
    assert {hash_of(one) for one in odd} <= seen.learned, "spaces make no other text"


def test_after_a_dev_file_the_next_version_divides_its_own_and_an_import_has_seen_nothing(store, tmp_path):
    train = write(tmp_path / "a.jsonl", [{"text": str(i), "label": "ab"[i % 2]} for i in range(20)])
    start = TenantVersion("acme", 1, "root", 1, "classify", ["a", "b"], 0)
    random_tenant(store, start, 0.3, seed=1)
    assert len(data_of(train, "classify", store=store, known=start, start=start).dev.examples) == 2
    examples, file = training_task("classify").read(train), store.tenant_folder("acme", 1) / "seen.npz"
    seen_after(SeenTexts(), examples[:12], examples[12:]).save(file)
    data = data_of(train, "classify", store=store, known=start, start=start)
    assert {one.text for one in data.dev.examples} <= {one.text for one in examples[12:]}
    file.write_bytes(b"PK")
    with pytest.raises(Broken, match=mentioning(file)):
        data_of(train, "classify", store=store, known=start, start=start)


def numbers(*values):
    return [{"text": str(i), "label": value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    "task, rows, dtype, named",
    [
        ("classify", [{"text": text, "label": "x"} for text in "ab"], "fp16", ["'x'"]),
        ("multilabel", [{"text": "a", "labels": []}] * 3, "fp16", []),
        ("multilabel", [{"text": "a", "labels": [str(i) for i in range(4097)]}], "fp16", ["4,097", "4,096"]),
        ("regress", numbers(2, 2, 2), "fp16", [2]),
        ("regress", numbers(*range(2000, 2005)), "fp16", [2002]),  # 16 bits cannot tell them apart
        ("regress", numbers(1e-7, 2e-7), "fp16", ["fp16"]),
        ("regress", numbers(1e6, 0), "fp16", ["fp16"]),
        ("regress", numbers(50, 51), "bf16", ["bf16"]),
        ("regress", numbers(10**400), "fp16", ["range", "label"]),
    ],
)
def test_data_that_no_head_can_learn_are_refused_before_training(tmp_path, task, rows, dtype, named):
    path = write(tmp_path / "data.jsonl", rows)
    with pytest.raises(InvalidInput, match=mentioning(path, *named)):
        data_of(path, task, path, dtype=dtype)


def test_the_kinds_of_questions_decide_the_labels(tmp_path):
    """A tenant keeps its labels, whatever later files have: test_versions.py."""
    known = [asked(random.Random(number)) for number in range(30)]
    none = [{**one, "answers": {"text": [], "answer_start": []}} for one in known]
    for rows, labels in ((known, ["start", "end"]), (known + none, ["start", "end", "none"])):
        assert data_of(write(tmp_path / "data.jsonl", rows), "span").labels == labels
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "none.jsonl")):
        data_of(write(tmp_path / "none.jsonl", none), "span")


def test_values_are_checked_without_the_dev_part(tmp_path):
    path = tmp_path / "values.jsonl"
    (held,) = data_of(write(path, numbers(*range(10))), "regress").dev.examples
    odd = int(held.text)  # of these texts, this one goes to dev
    with pytest.raises(InvalidInput, match=mentioning(path, 2)):
        data_of(write(path, numbers(*(3.0 if i == odd else 2.0 for i in range(10)))), "regress")


@pytest.mark.slow
def test_data_by_which_no_score_says_anything_are_named(store, tmp_path):
    rows = [{"text": str(i), "label": "ab"[i % 2]} for i in range(20)]
    train, one = write(tmp_path / "a.jsonl", [*rows[1:], rows[0] | {"text_pair": "c"}]), write(tmp_path / "b.jsonl", rows[1:2])
    for dev, named in ((train, ["20 of 20 dev texts", "1 of 20 texts have a text_pair"]), (one, ["dev texts: 1"])):
        tenant = pretend(store, "classify", train, dev)
        assert mentions(store.report(tenant)["warnings"], *named)
    new = write(tmp_path / "c.jsonl", [{"text": "new", "label": "a"}])
    seen, files = store.seen(tenant).all, map(training_task("classify").read, (train, one, new))
    assert [sum(hash_of(text) in seen for text in examples) for examples in files] == [20, 1, 0]


@pytest.mark.slow
def test_dev_texts_that_an_earlier_version_has_learned_are_counted(store, tmp_path):
    def file(name, texts):
        return write(tmp_path / name, [{"text": str(text), "label": "ab"[int(text) % 2]} for text in texts])

    first, unseen = file("first", range(30)), file("unseen", range(200, 210))
    again = file("again", [one.text for one in data_of(first, "classify").train.examples[:6]])
    for train, dev, learned in (
        (first, None, 0), (again, None, 1), (file("more", range(40)), None, 0),
        (file("new", range(40, 60)), unseen, 0), (file("newer", range(60, 80)), unseen, 0), (unseen, again, 6),
    ):  # fmt: skip
        report = store.report(pretend(store, "classify", train, dev))
        told = [warning for warning in report["warnings"] if "learned" in warning]
        assert [one.startswith(f"{learned} of ") for one in told] == [True] * (learned > 0), train
    assert mentions(told, "6 of 6 dev texts", "again:1", "3 more")


@pytest.mark.slow
def test_labels_texts_and_options_that_cannot_be_used_are_named(store, tmp_path):
    train, long = made(tmp_path, "classify", 60, 1), [{"text": "a", "label": "x"}, {"text": "a " * 60_000, "label": "y"}]
    other = write(tmp_path / "other.jsonl", [{"text": "a", "label": "left"}, {"text": "b", "label": "up"}])
    few, far = write(tmp_path / "few.jsonl", [*long[:1], {"text": "b", "label": "y"}]), write(tmp_path / "far.jsonl", long)
    for files, options, named in [
        ((train, other), {}, [f"{other}:2", "'up'", train]),
        ((few,), {}, [few, "--dev"]),
        ((far, far), {}, [f"{far}:2", "100,000"]),
        ((train,), {"body_rate": 1e-4}, ["'bottleneck'", "lora"]),
        ((train,), {"rank": 0, "body_rate": 1e-4}, ["--rank"]),
        ((train,), {"rank": 1 << 40}, [f"--rank {1 << 40}"]),
    ]:
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            learn(store, "classify", *files, **options)
    counts = dict.fromkeys(("epochs", "patience", "batch_texts"), 0)
    for name, value in {**counts, "rank": -1, "doubt": -1, "learning_rate": 0, "body_rate": -1}.items():
        with pytest.raises(InvalidInput, match=f"{name.split('_')[-1]} {value}"):
            learn(store, "classify", train, **{name: value})
    for task in ("guess",):
        with pytest.raises(InvalidInput, match=f"'{task}'"):
            learn(store, task, few)
    pretend(store, "classify", train)
    for tenant, named in (("acme", [f"{other}:2", "'up'", "'acme'"]), ("nobody", ["'nobody'", store.folder])):
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            evaluate_tenant(store, tenant, other, DEVICE)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=300), st.integers(1, 20), st.sampled_from([None, 1, 2]))
def test_every_text_is_in_one_pack_in_the_order_of_a_seed(lengths, most_texts, seed):
    """A text that is longer than the limit has a pack of its own. Other seeds give another order."""
    lengths = np.array(lengths)
    cut, again = (
        list(packed_batches(lengths, most_texts, np.random.default_rng(seed) if seed else None, 100)) for _ in range(2)
    )
    order = np.concatenate(cut)
    assert sorted(order) == list(range(len(lengths))) and (order == np.concatenate(again)).all()
    for pack in cut:
        assert len(pack) <= most_texts and (lengths[pack].sum() <= 100 or len(pack) == 1)
        assert (np.diff(lengths[pack]) >= 0).all()
    other = np.concatenate(list(packed_batches(lengths, most_texts, np.random.default_rng(3), 100)))
    assert len(lengths) < 100 or (other != order).any()

"""Questions on passages: with answers or without, and on passages that are longer than a text may be."""

import json
import random

import pytest

from builder.evaluation.tenant import evaluate_tenant
from builder.training.examples import Reader
from builder.training.objectives import UNREAD
from builder.training.tasks import training_task
from hplm.errors import InvalidInput
from testing.toy import WORDS
from tests.builder.training.small_tenants import CPU, asked, learn, write
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


def test_the_kinds_of_questions_are_part_of_what_a_tenant_is(store, tmp_path):
    rng = random.Random(3)
    known = write(tmp_path / "known.jsonl", [asked(rng) for _ in range(30)])
    none = write(tmp_path / "none.jsonl", [{**asked(rng), "answers": {"text": [], "answer_start": []}} for _ in range(30)])
    both = write(tmp_path / "both.jsonl", [json.loads(line) for path in (known, none) for line in path.open()])
    with pytest.raises(InvalidInput, match=mentioning(none)):
        learn(store, "span", none, epochs=1)
    learn(store, "span", known, tenant="always", epochs=1)
    with pytest.raises(InvalidInput, match=mentioning("'always'", 1, "['none']")):
        learn(store, "span", both, tenant="always", epochs=1)
    learn(store, "span", both, tenant="perhaps", epochs=1)
    assert learn(store, "span", known, tenant="perhaps", epochs=1).labels == ["start", "end", "none"]


def test_an_answer_is_learned_in_the_windows_that_have_all_of_it(store, tmp_path):
    """A passage of 120 words has windows of words 0 to 59, 30 to 89 and 60 to 119."""
    words = [WORDS[30 + i] for i in range(120)]
    passage = " ".join(words)

    def asks(first, last):
        answer = " ".join(words[first : last + 1])
        return {"text": WORDS[0], "text_pair": passage, "answers": {"text": [answer], "answer_start": [passage.index(answer)]}}

    path = write(tmp_path / "long.jsonl", [asks(1, 2), asks(40, 41), asks(59, 60), asks(29, 30), asks(119, 119)])
    task = training_task("span")
    for labels, no in ((["start", "end"], [UNREAD, UNREAD]), (["start", "end", "none"], [0, 0])):
        texts = Reader(store, "root", 1).read(task.read(path), task, labels, show_progress=False)
        assert texts.cut == 0 and [example.line for example in texts.examples] == [1, 2, 3, 4, 5]
        assert texts.lengths.tolist() == [64] * 15
        targets = [text.targets.tolist() for text in texts.texts]
        assert [targets[i : i + 3] for i in range(0, 15, 3)] == [
            [[2, 3], no, no],
            [[41, 42], [11, 12], no],
            [no, [30, 31], no],
            [[30, 31], no, no],
            [no, no, [60, 60]],
        ]


def test_long_passages_are_learned(store, tmp_path):
    rng = random.Random(5)

    def long(rng):
        example = asked(rng)
        before, after = (" ".join(rng.choices(WORDS[50:], k=rng.randint(20, 60))) for _ in range(2))
        answers = {**example["answers"], "answer_start": [example["answers"]["answer_start"][0] + len(before) + 1]}
        return {**example, "text_pair": f"{before} {example['text_pair']} {after}", "answers": answers}

    train, dev, test = (
        write(tmp_path / f"{part}.jsonl", [long(rng) for _ in range(count)])
        for part, count in (("train", 360), ("dev", 60), ("test", 60))
    )
    tenant = learn(store, "span", train, dev, epochs=6)
    found = evaluate_tenant(store, "acme", test, CPU, show_progress=False)
    assert found.scores.main > 0.35 and len(found.answers) == 60
    report = store.report(tenant)
    assert (report["training"]["texts"], report["dev"]["texts"], report["training"]["texts_cut"]) == (360, 60, 0)

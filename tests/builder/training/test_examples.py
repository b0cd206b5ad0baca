"""Dev examples are not used in training, nor in checks of the training data."""

import json
import random
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from builder.store.resumable import write_json
from builder.store.store import TenantFile
from builder.training.examples import Divided, split_off
from builder.training.labelled import Example, Labelled
from builder.training.material import Material
from hplm.errors import InvalidInput
from hplm.model.windows import TRIGRAMS
from testing.random_store import random_tenant
from tests.builder.tables.branches import make_store
from tests.builder.training.small_tenants import write
from tests.support.message import mentioning


def test_values_are_checked_without_the_dev_part(tmp_path):
    def read(values):
        path = write(tmp_path / "values.jsonl", [{"text": str(i), "label": value} for i, value in enumerate(values)])
        return Material(tmp_path, "root", 1, "regress", path, None).read()

    (held,) = read(range(10)).dev.examples
    odd = int(held.text)  # of these texts, this one goes to dev
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "values.jsonl", 2)):
        read([3.0 if i == odd else 2.0 for i in range(10)])
    training, dev, *_ = read([2.0 if i == odd else i % 2 for i in range(10)])
    assert {example.value for example in training.examples} == {0, 1} and [example.value for example in dev.examples] == [2]


def test_more_labels_than_heads_have_are_refused_before_training(tmp_path):
    path = write(tmp_path / "labels.jsonl", [{"text": "a", "labels": [str(number) for number in range(4097)]}])
    with pytest.raises(InvalidInput, match=mentioning(path, "4,097", "4,096")):
        Material(tmp_path, "root", 1, "multilabel", path, path).read()


def test_a_number_too_large_for_a_float_is_named(tmp_path):
    path = write(tmp_path / "values.jsonl", [{"text": "a", "label": 10**400}])
    with pytest.raises(InvalidInput, match=mentioning(f"{path}:1", 10**400)):
        Material(tmp_path, "root", 1, "regress", path, path).read()


@pytest.mark.parametrize(
    "dtype, values", [("fp16", [1e-7, 2e-7]), ("fp16", [1e6, 0]), ("fp16", [500, 501]), ("bf16", [50, 51])]
)
def test_values_that_16_bits_cannot_hold_are_refused(tmp_path, dtype, values):
    path = write(tmp_path / "values.jsonl", [{"text": "a", "label": value} for value in values])
    with pytest.raises(InvalidInput, match=mentioning(path, dtype)):
        Material(tmp_path, "root", 1, "regress", path, path, dtype=dtype).read()


def test_a_text_is_in_training_or_dev_and_never_in_both(tmp_path):
    rows = [{"text": f"text {number % 30}", "label": "ab"[number % 2]} for number in range(120)]
    path = write(tmp_path / "again.jsonl", rows)
    training, dev, *_ = Material(tmp_path, "root", 1, "classify", path, None).read()
    assert len(dev.examples) == 12 and len(training.examples) == 108
    assert not {example.text for example in training.examples} & {example.text for example in dev.examples}


@pytest.mark.parametrize("repeats", ["text", "text_pair"])
def test_pairs_that_share_a_text_are_all_in_training_or_all_in_dev(tmp_path, repeats):
    other = {"text": "text_pair", "text_pair": "text"}[repeats]
    rows = [{repeats: f"query {i % 20}", other: f"candidate {i}", "label": "ab"[i % 2]} for i in range(100)]
    path = write(tmp_path / "pairs.jsonl", rows)
    training, dev, *_ = Material(tmp_path, "root", 1, "classify", path, None).read()
    sides = [{(example.text, example.pair)[repeats == "text_pair"] for example in part.examples} for part in (training, dev)]
    assert len(dev.examples) == 10 and not sides[0] & sides[1]


@pytest.mark.parametrize("passages, shared", [(20, 0), (2, 2)])
def test_questions_on_one_of_many_passages_stay_together(tmp_path, passages, shared):
    answers = {"text": ["end"], "answer_start": [0]}
    rows = [{"text": f"question {i}", "text_pair": f"end of {i % passages}", "answers": answers} for i in range(100)]
    path = write(tmp_path / "spans.jsonl", rows)
    training, dev, *_ = Material(tmp_path, "root", 1, "span", path, None).read()
    both = {example.pair for example in training.examples} & {example.pair for example in dev.examples}
    assert len(dev.examples) == 10 and len(both) == shared


@pytest.mark.parametrize("seed", range(8))
def test_a_learned_text_never_comes_to_dev_in_later_versions(seed):
    """Not when its label gets more examples, its group becomes a small one, or the new examples share texts."""
    chance = random.Random(seed)
    texts = [f"{seed} {chance.randrange(150) if number >= 100 else number}" for number in range(400)]
    examples = [Example(n, text, labels=(str(int(chance.expovariate(0.2))),)) for n, text in enumerate(texts)]
    learned, divided = set(), None
    for start, stop in ((0, 50), (0, 90), (90, 100), (0, 150), (0, 400)):
        labelled = Labelled(Path("file"), examples[start:stop])
        training, dev, now = split_off(labelled, 0.1, divided)
        assert not learned & {example.text for example in dev.examples}
        learned |= {example.text for example in training.examples}
        divided = Divided.of(json.loads(json.dumps({"divided": asdict(now)})))
        assert split_off(labelled, 0.1, divided)[:2] == (training, dev)  # which cascades rely on


def test_after_a_dev_file_the_next_version_needs_one_too(tmp_path):
    store, train = (
        make_store(tmp_path, TRIGRAMS),
        write(tmp_path / "a.jsonl", [{"text": str(i), "label": "ab"[i % 2]} for i in range(20)]),
    )
    start = TenantFile("acme", 1, "root", 1, "classify", ["a", "b"], 0)
    random_tenant(store, start, 0.3, seed=1)
    for report, refused in (({"training": {}, "dev": {}}, True), ({"imported": {}}, False)):
        write_json(store.tenant_folder("acme", 1) / "report.json", report)
        material = Material(store.folder, "root", 1, "classify", train, None, ("a", "b"), start=start)
        with pytest.raises(InvalidInput, match=mentioning("'acme'", train, "--dev", "--fresh")) if refused else nullcontext():
            assert len(material.read().dev.examples) == 2

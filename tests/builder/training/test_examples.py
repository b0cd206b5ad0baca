"""What is set aside for dev is not learned from, and cannot tell apart what is."""

import numpy as np
import pytest

from builder.tenant import Material
from hplm.errors import InvalidInput
from tests.builder.test_tenant import write


def test_values_are_judged_without_those_set_aside(tmp_path):
    values = [2.0] * 10
    values[np.random.default_rng(0).permutation(10)[0]] = 3.0  # where the seed takes the dev part from
    path = write(tmp_path / "values.jsonl", [{"text": "a", "label": value} for value in values])
    with pytest.raises(InvalidInput, match=r"values\.jsonl: every value to learn from is 2"):
        Material(tmp_path, "root", 1, "regress", path, None, seed=0).read()
    training, dev, _ = Material(tmp_path, "root", 1, "regress", path, None, seed=1).read()
    assert {example.value for example in training.examples} == {2, 3} and len(dev.examples) == 1


def test_more_labels_than_heads_have_are_refused_before_anything_is_learned(tmp_path):
    path = write(tmp_path / "labels.jsonl", [{"text": "a", "labels": [str(number) for number in range(4097)]}])
    with pytest.raises(InvalidInput, match=r"labels\.jsonl: 4,097 labels, and heads go up to 4,096"):
        Material(tmp_path, "root", 1, "multilabel", path, path, seed=0).read()


def test_a_number_too_large_to_be_one_is_named(tmp_path):
    path = write(tmp_path / "values.jsonl", [{"text": "a", "label": 10**400}])
    with pytest.raises(InvalidInput, match=r"values\.jsonl:1: label 1000.* is not a number"):
        Material(tmp_path, "root", 1, "regress", path, path, seed=0).read()

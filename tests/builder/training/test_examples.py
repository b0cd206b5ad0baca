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

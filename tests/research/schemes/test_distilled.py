"""Compressed baselines: a dedicated BERT teaches one of fewer layers, by its answers and by its hidden states."""

import numpy as np
import pytest
import torch

from builder.training.finetuning import TrainingOptions
from research.schemes.distilled import states_of
from research.schemes.pretrained import evenly
from research.schemes.trained import SCHEMES, options_of, train_scheme, whole_body
from tests.research.schemes.test_trained import CPU, data, store  # noqa: F401  fixtures

pytestmark = pytest.mark.slow


def pack_of(data):  # noqa: F811
    return data.reader.pack(data.train, np.arange(len(data.train.texts)), CPU, False)


@pytest.mark.parametrize("name", ["distil", "tiny-half", "tiny-third"])
def test_a_student_has_fewer_layers_and_is_scored_as_others(store, data, name):  # noqa: F811
    own = TrainingOptions(epochs=1, rank=4)
    trained = train_scheme(store, data, name, own, show_progress=False)
    assert len(trained.body.layers) == max(1, round(SCHEMES[name].kept * 4)) < 4
    assert 0 <= trained.scores.main <= 1 and not trained.model.adapters
    assert options_of(name, own) == options_of("dedicated", own)


def test_a_student_starts_from_its_teachers_layers(store, data):  # noqa: F811
    teacher, pack = whole_body(store).eval(), pack_of(data)
    with torch.no_grad():
        assert torch.equal(teacher.with_layers(range(4))(pack, None), teacher(pack, None))
        upper = teacher.with_layers([0, 1])
        read = states_of(teacher, pack)[2][pack.reading]
        assert torch.allclose(upper(pack, None), read, atol=1e-5)
    assert (evenly(6, 3), evenly(6, 2), evenly(12, 4)) == ([0, 2, 4], [1, 4], [1, 4, 7, 10])
    before = teacher.layers[0].qkv.weight.clone()
    upper.layers[0].qkv.weight.data.zero_()
    assert torch.equal(teacher.layers[0].qkv.weight, before)

"""A device computes packs of texts, with layers that are compiled once for all of them."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from builder.hardware import compiled
from builder.learning.windows import Shrinking, Student
from builder.packed_batches import packed_batches
from hplm.model.checkpoint import random_backbone
from testing.toy import CONFIG


def read(lengths, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, CONFIG.vocabulary, size=sum(lengths)).astype(np.int32)
    return Shrinking(CONFIG, torch.device("cpu"))(tokens, np.array(lengths), rng)


def gradients(student, lesson):
    student.zero_grad()
    hidden = student(lesson)
    sum(part.square().sum() for part in hidden).backward()
    return [part.detach() for part in hidden] + [parameter.grad.clone() for parameter in student.upper.layers.parameters()]


@pytest.fixture
def compilations(monkeypatch):
    """Counts compilations. No code is generated: only the calls of the generator are counted."""
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: plain(self, backend=counted, **given))
    torch.compiler.reset()
    yield graphs
    torch.compiler.reset()


def test_compiled_layers_give_the_same_results_and_compile_once(compilations):
    student = Student(*random_backbone(CONFIG))
    fast = copy.deepcopy(student)
    compiled([*fast.lower.layers, *fast.upper.layers], torch.device("cpu"))
    fast(read([5, 3], 0))
    assert not compilations, "a CPU compiles nothing"
    compiled([*fast.lower.layers, *fast.upper.layers], torch.device("cuda"))
    seen = []
    for number, lengths in enumerate(([5, 3], [9, 9, 2, 7], [4])):
        lesson = read(lengths, number)
        for own, plain in zip(gradients(fast, lesson), gradients(student, lesson), strict=True):
            assert torch.allclose(own, plain, rtol=1e-3, atol=1e-3)
        seen.append(len(compilations))
    assert seen[0] > 0 and len(set(seen)) == 1, "every list of lengths was compiled by itself"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=300), st.integers(1, 20), st.sampled_from([None, 1, 2]))
def test_every_text_is_in_one_pack_in_the_order_of_a_seed(lengths, most_texts, seed):
    """A text that is longer than the limit has a pack of its own. Other seeds give another order."""
    lengths = np.array(lengths)
    cut, again = (
        list(packed_batches(lengths, 100, most_texts, np.random.default_rng(seed) if seed else None)) for _ in range(2)
    )
    order = np.concatenate(cut)
    assert sorted(order) == list(range(len(lengths))) and (order == np.concatenate(again)).all()
    for pack in cut:
        assert len(pack) <= most_texts and (lengths[pack].sum() <= 100 or len(pack) == 1)
        assert (np.diff(lengths[pack]) >= 0).all()
    other = np.concatenate(list(packed_batches(lengths, 100, most_texts, np.random.default_rng(3))))
    assert len(lengths) < 100 or (other != order).any()

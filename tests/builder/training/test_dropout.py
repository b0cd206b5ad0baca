"""Dropout in training: what it leaves out, and that nothing of it remains."""

import random

import numpy as np
import pytest
import torch

from builder.training.bodies import PlotBody, RememberingBody
from builder.training.dropout import dropout
from builder.training.examples import Reader
from builder.training.tasks import training_task
from tests.builder.training.small_tenants import CPU, classified, write


@pytest.fixture
def pack(store, tmp_path):
    rng, task = random.Random(1), training_task("classify")
    labelled = task.read(write(tmp_path / "texts.jsonl", [classified(rng) for _ in range(200)]))
    reader = Reader(store, "root", 1)
    texts = reader.read(labelled, task, task.labels(labelled), show_progress=False)
    return reader.pack(texts, np.arange(200), CPU)


@torch.no_grad()
def hidden(body, pack, share, *seed):
    with dropout(body, share, seed):
        return body(pack, None)


def test_a_step_leaves_out_the_share_that_its_seed_chooses(store, pack):
    body = PlotBody(store.upper(), store.config.heads)
    whole = hidden(body, pack, 0.0, 1)
    left_out = hidden(body, pack, 0.25, 1) == 0
    assert 0.23 < left_out.float().mean() < 0.27 and not (whole == 0).any()
    assert torch.equal(hidden(body, pack, 0.25, 1), hidden(body, pack, 0.25, 1))
    assert not torch.equal(left_out, hidden(body, pack, 0.25, 2) == 0)
    assert torch.equal(hidden(body, pack, 0.0, 1), whole)  # nothing remains


def test_what_is_kept_makes_up_for_what_is_left_out(store, pack):
    body = PlotBody(store.upper(), store.config.heads)
    body.upper.layers = body.upper.layers[:0]  # only the first layer's input and the head's are dropped
    whole, mean = hidden(body, pack, 0.0), torch.stack([hidden(body, pack, 0.1, seed) for seed in range(300)]).mean(0)
    assert (whole - mean).abs().mean() < 0.05 * whole.abs().mean()


def test_a_body_that_remembers_its_results_remembers_whole_ones(store, pack):
    whole = hidden(PlotBody(store.upper(), store.config.heads), pack, 0.0)
    body = RememberingBody(PlotBody(store.upper(), store.config.heads))
    dropped = hidden(body, pack, 0.5, 1)
    assert torch.equal(hidden(body, pack, 0.0), whole)
    assert torch.equal(dropped[dropped != 0], 2 * whole[dropped != 0]) and (dropped == 0).any()

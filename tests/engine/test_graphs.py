"""A graph gives a batch its own answers, whatever was recorded. Where there is a GPU, its graphs are tested too."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.adapters.groups import InPlace, Runs
from hplm.engine.engine import Engine, computed
from hplm.engine.graphs import MOST, Graphs
from hplm.engine.laid import StagingSettings
from hplm.engine.staging import EncoderStager
from hplm.model import attention
from hplm.model.attention import PackedAttention, rows_attend
from testing.random_store import random_store
from testing.reference import Reference
from testing.toy import CONFIG, DOMAINS, ROTARY, random_text
from tests.engine.asker import texts_of
from tests.support.device import needs_cuda

ALIKE = [TenantVersion(f"alike-{i}", 1, DOMAINS[i % 2], 1, "classify", ["a", "b", "c"], 8) for i in range(5)]
TENANTS = [
    *ALIKE,
    TenantVersion("plain", 1, "root", 1, "tag", ["O", "A"], 0),
    TenantVersion("other", 1, "root", 1, "tag", ["O", "A"], 4, "lora"),
]
SLOTS = 3  # of each layout: fewer than tenants


class Counted(Graphs):
    """Counts replays. `fails`: what is recorded is nothing that can be. `is_full`: there is no memory for it."""

    replays, fails, is_full = 0, False, False

    def _captured(self, run):
        if self.is_full:
            raise torch.OutOfMemoryError("the device is full")
        kernels = self._kernels(torch.cuda.synchronize if self.fails else run)

        def replay():
            self.replays += 1
            kernels.replay()

        return SimpleNamespace(replay=replay, pool=kernels.pool)

    def _kernels(self, run):
        return super()._captured(run)


class Repeated(Counted):
    """Instead of kernels, it records what was computed: with the memory, the weights and the shapes of that time."""

    def _kernels(self, run):
        if self.fails:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return SimpleNamespace(replay=run, pool=None)


class Recorded(StagingSettings):
    recorded = True


def any_length(self, query, key, value, ends, near):
    """Attends as torch's kernel for CUDA does, which knows the texts from `ends` alone."""
    bounds = [slice(*pair) for pair in zip(ends.tolist(), ends[1:].tolist(), strict=False)]
    assert max(own.stop - own.start for own in bounds) <= self.longest
    texts = ([x[own] for x in (query, key, value)] for own in bounds if own.start < own.stop)
    return torch.cat([rows_attend(*three, 1, self.heads, near) for three in texts])


@pytest.fixture(scope="module", params=[CONFIG, ROTARY], ids=["learned", "rotary"])
def alike(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike")
    store = random_store(folder / "store", request.param, TENANTS, DOMAINS, spread=0.3)
    export(store, folder / "repository", ServingOptions())
    return Reference.open(folder / "repository/toy/1")


class Asked:
    """Asks an engine with graphs. Its answers are the reference's, and on a GPU those of the same engine without graphs."""

    def __init__(self, reference, device, dtype, graphs):
        self._reference, self.backbone, self.rng = reference, reference.backbone, random.Random(0)
        self._on_cpu, self._engine = device.type == "cpu", Engine(self.backbone.upper(), device, dtype, graphs=graphs)
        kind = Recorded if self._on_cpu else StagingSettings
        settings = kind(SLOTS, device, dtype, few_sizes=self._engine.takes_few_sizes)
        self.stager, self.graphs = EncoderStager(self.backbone, settings), self._engine._graphs

    def ask(self, *tenants, words=0):
        asked = [(tenant, random_text(self.rng, words or self.rng.choice([3, 20]))) for tenant in tenants]
        found, expected = self._computed(asked, self.graphs), self._computed(asked, None)
        for (tenant, text), logits, others in zip(asked, found, expected, strict=True):
            if self._on_cpu:
                others = self._reference.forward(text, tenant).numpy()
            np.testing.assert_allclose(logits[: len(others), : others.shape[1]], others, atol=1e-3)

    def _computed(self, asked, graphs):
        self._engine._graphs = graphs
        texts = [one for tenant, text in asked for one in texts_of(self.backbone, tenant, [text])]
        batch = self.stager.stage(texts, lambda text, error: pytest.fail(str(error)))
        logits = computed(self._engine, batch)
        self.stager.release(batch.held)
        return logits


@pytest.fixture
def most():
    return MOST


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def asked(request, alike, monkeypatch, most):
    """On a CPU, all parts take the ways of a GPU."""
    if request.param == "cpu":
        monkeypatch.setattr(InPlace, "takes", lambda *given: False)
        monkeypatch.setattr(Runs, "takes", lambda *given: True)
        monkeypatch.setattr(attention, "CUDA_DTYPES", (torch.float32,))
        monkeypatch.setattr(PackedAttention, "_any_length", any_length)
    dtype, graphs = (torch.float32, Repeated) if request.param == "cpu" else (torch.bfloat16, Counted)
    yield Asked(alike, torch.device(request.param), dtype, partial(graphs, most=most))


def test_a_batch_gets_its_own_answers_from_the_graph_of_its_shape(asked):
    """Tenants take each other's slots, so that a slot number of the recorded batch has other weights now."""
    names = [tenant.id for tenant in TENANTS]
    for _ in range(80):
        own = asked.rng.sample(names, k=asked.rng.choice([1, 1, 2, SLOTS]))
        asked.ask(*[asked.rng.choice(own) for _ in range(asked.rng.choice([1, 1, 3, 5]))])
    assert asked.graphs.replays > 30


def test_a_graph_is_not_used_for_weights_that_lie_elsewhere(asked):
    """Slots of a layout are allotted anew if no snapshot has it for a while."""
    for first in (0, 1, 2):
        for _ in range(3):
            asked.ask(ALIKE[first].id, words=3)  # always in slot 0
        for layout in asked.backbone.layouts:
            asked.stager._allot(layout, 0)
    assert asked.graphs.replays >= 6


@pytest.mark.parametrize("most", [2])
def test_graphs_have_a_bound_and_those_of_a_small_room_are_forgotten(asked, most):
    for count in (1, 1, 5, 5, 1, 1):
        asked.ask(*["plain"] * count, words=9)
        assert len(asked.graphs._known) <= most
    assert asked.graphs.replays >= 2


def test_a_recording_that_finds_no_memory_is_tried_again(asked, caplog):
    asked.graphs.is_full = True
    for _ in range(3):
        asked.ask("alike-0", words=3)
    asked.graphs.is_full = False
    for _ in range(2):
        asked.ask("alike-0", words=3)
    assert asked.graphs.replays and "cannot be recorded" not in caplog.text


def test_a_graph_that_cannot_be_recorded_is_told_once(asked, caplog):
    asked.graphs.fails = True
    for _ in range(4):
        asked.ask("alike-0", words=3)
        asked.ask("alike-0", "alike-1", words=3)
    assert asked.graphs.replays == 0 and len(asked.graphs._known) == 2
    assert caplog.text.count("cannot be recorded") == 1

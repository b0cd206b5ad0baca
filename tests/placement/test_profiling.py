"""A profile measured from a small repository: its parts, its bytes and the terms of its times."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from hplm.engine.backbone import Backbone
from hplm.engine.service import ANSWERING_NS
from hplm.engine.settings import EncoderSettings
from hplm.errors import Internal
from hplm.placement import measuring
from hplm.placement.measuring import profile_repository, profiled_backbones
from hplm.placement.profile import Shape, Terms
from hplm.placement.samples import Sampler, fitted
from testing.toy import CONFIG, TENANTS
from tests.support.message import refusing
from tests.support.wait import eventually

CORE = f"cpu:{min(os.sched_getaffinity(0))}"
RNG = np.random.default_rng(3)
SHAPES = [Shape.of(RNG.integers(1, 200, RNG.integers(1, 30))) for _ in range(40)]


def test_the_measured_texts_have_many_lengths(toy):
    (source,) = profiled_backbones(toy.repository)
    samples = Sampler(source.folder, EncoderSettings.read({**source.parameters, "threads": "1"})).take(1)
    alone = [shape for shape in samples.shapes if shape.texts == 1]
    assert len({shape.tokens for shape in alone}) > 3 and all(shape.scores == shape.tokens**2 for shape in alone)


@pytest.mark.slow
def test_a_profile_is_measured_in_processes_of_its_own(toy, monkeypatch):
    """Takes seconds: a process for each number of devices computes every batch. The repository may be for other devices."""
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    before = os.sched_getaffinity(0)
    cores = [f"cpu:{core}" for core in sorted(before)[:2]]
    sources = [replace(one, parameters={**one.parameters, "device": "cuda:0"}) for one in profiled_backbones(toy.repository)]
    profile = profile_repository(sources, cores, [1, len(cores)], None)
    own = profile.backbones["toy"]
    assert set(own.times) == {1, len(cores)} and all(len(times) == CONFIG.upper_layers for times in own.times.values())
    assert own.parents == {"bio": "root", "law": "root"} and sorted(own.tenants["bio"]) == ["acme", "dune", "gaia"]
    assert own.precision == "fp32" and own.slots == 4 and own.around == Terms(ANSWERING_NS)
    assert own.core.ns(64, 64**2) > 0 and max(profile.hop.batch_ns, profile.hop.token_ns) > 0
    assert np.isfinite(profile.error.mean) and profile.error.max >= profile.error.mean
    backbone = Backbone(toy.folder)
    weights = sum(tensor.nbytes for tensor in backbone.upper().parameters())
    assert sum(own.layer_bytes) + own.entry_bytes == weights and len(set(own.layer_bytes)) == 1
    for domain, found in own.table_bytes.items():
        files = [file for file in (toy.folder / "plot" / domain / "1").iterdir() if file.name != "meta.json"]
        assert found == sum(file.stat().st_size for file in files)
    records = sum(file.stat().st_size for file in (toy.folder / "records").iterdir())
    assert 0 < own.record_bytes * len(TENANTS) <= records
    assert own.slot_bytes > own.record_bytes  # slots of all layouts, in 32 bits
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_a_measuring_process_that_is_killed_is_named(toy):
    with ThreadPoolExecutor(1) as thread, refusing(Internal, "toy, 1 device"):
        measured = thread.submit(profile_repository, profiled_backbones(toy.repository), [CORE], [1], None)
        eventually(multiprocessing.active_children)
        for process in multiprocessing.active_children():
            process.kill()
        measured.result()


@pytest.mark.parametrize("terms", [Terms(1e6, 2e4, 3.0, 1e3), Terms(1e6), Terms(0.0, 2e4, 1.0, 0.0)])
def test_exact_times_give_their_terms(terms):
    ns = np.array([terms.ns(*shape) for shape in SHAPES])
    found = fitted(SHAPES, ns)
    assert [found.ns(*shape) for shape in SHAPES] == pytest.approx(ns, rel=1e-6)
    assert found.batch_ns == pytest.approx(terms.batch_ns, rel=1e-4, abs=1)
    assert found.token_ns == pytest.approx(terms.token_ns, rel=1e-4, abs=1e-3)


def test_no_term_is_negative_though_the_best_line_has_one():
    ns = np.array([max(1e3, 2e4 * shape.tokens - 1e5) for shape in SHAPES])
    found = fitted(SHAPES, ns)
    assert min(found.batch_ns, found.token_ns, found.score_ns, found.text_ns) >= 0

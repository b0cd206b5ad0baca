"""A profile measured from a small repository: its parts, its bytes, and what it refuses."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hplm.engine.backbone import Backbone
from hplm.errors import Internal
from hplm.placement import measuring
from hplm.placement.measuring import Measurement, measure, profile_repository, sources_of
from hplm.placement.profile import Profile
from hplm.placement.samples import EVEN, HELD_OUT
from testing.toy import CONFIG, TENANTS
from tests.support.message import refusing

CORE = f"cpu:{min(os.sched_getaffinity(0))}"


@pytest.fixture(scope="module")
def measured(toy):
    (source,) = sources_of(toy.repository)
    parameters = {**source.parameters, "threads": "1"}
    return measure(Measurement(source.folder, None, parameters, (), 1, "toy", False))


def test_every_layer_has_a_time_for_every_batch(measured):
    _, samples = measured
    assert samples.layer_ns.shape == (len(EVEN) + HELD_OUT, CONFIG.upper_layers) and samples.fitted_to == len(EVEN)
    assert (samples.layer_ns > 0).all() and (samples.around_ns > 0).all() and len(samples.shapes) == len(samples.layer_ns)
    alone = [shape for shape in samples.shapes if shape.texts == 1]
    assert len({shape.tokens for shape in alone}) > 3 and all(shape.scores == shape.tokens**2 for shape in alone)


def test_bytes_are_those_of_files_and_tensors(measured, toy):
    sizes, _ = measured
    backbone = Backbone(toy.folder)
    weights = sum(tensor.nbytes for tensor in backbone.upper().parameters())
    assert sum(sizes.layers) + sizes.entry == weights and len(set(sizes.layers)) == 1
    for domain, found in sizes.tables.items():
        files = [file for file in (toy.folder / "plot" / domain / "1").iterdir() if file.name != "meta.json"]
        assert found == sum(file.stat().st_size for file in files)
    records = sum(file.stat().st_size for file in (toy.folder / "records").iterdir())
    assert 0 < sizes.record * len(TENANTS) <= records
    assert sizes.slot > sizes.record  # slots of all layouts, in 32 bits


@pytest.mark.slow
def test_a_profile_is_measured_in_processes_of_its_own_and_written(toy, tmp_path):
    """Takes seconds: a process for each number of devices computes every batch."""
    before = os.sched_getaffinity(0)
    cores = [f"cpu:{core}" for core in sorted(before)[:2]]
    sources = sources_of(toy.repository)
    profile = profile_repository(
        sources, cores, [1, len(cores)], rounds=1, round_trips={"toy": measuring.RoundTrip(9e9, 4e9)}, show_progress=False
    )
    own = profile.backbones["toy"]
    assert set(own.times) == {1, len(cores)} and all(len(times) == CONFIG.upper_layers for times in own.times.values())
    assert own.parents == {"bio": "root", "law": "root"} and sorted(own.tenants["bio"]) == ["acme", "dune", "gaia"]
    assert own.precision == "fp32" and own.slots == 4 and 6e9 > own.around.batch_ns > 2e9
    assert 4e9 > own.core.text_ns > 1e9 and max(profile.hop.batch_ns, profile.hop.token_ns) > 0
    assert np.isfinite(profile.error.mean) and profile.error.max >= profile.error.mean
    profile.write(tmp_path / "p.json")
    read = Profile.read(tmp_path / "p.json")
    assert read == profile and read.digest == profile.digest
    assert os.sched_getaffinity(0) == before


def killed(given):
    os._exit(9)


@pytest.mark.slow
def test_a_measuring_process_that_is_killed_is_named(toy, monkeypatch):
    monkeypatch.setattr(measuring, "measure", killed)
    with refusing(Internal, "toy, 1 device"):
        profile_repository(sources_of(toy.repository), [CORE], [1], show_progress=False)

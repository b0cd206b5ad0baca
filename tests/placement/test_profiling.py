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
from testing.toy import CONFIG, TENANTS
from tests.support.message import refusing

CORE = f"cpu:{min(os.sched_getaffinity(0))}"


def test_the_measured_texts_have_many_lengths(toy):
    (source,) = sources_of(toy.repository)
    _, samples = measure(Measurement(source.folder, None, {**source.parameters, "threads": "1"}, (), 1, "toy", False))
    alone = [shape for shape in samples.shapes if shape.texts == 1]
    assert len({shape.tokens for shape in alone}) > 3 and all(shape.scores == shape.tokens**2 for shape in alone)


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
    backbone = Backbone(toy.folder)
    weights = sum(tensor.nbytes for tensor in backbone.upper().parameters())
    assert sum(own.layer_bytes) + own.entry_bytes == weights and len(set(own.layer_bytes)) == 1
    for domain, found in own.table_bytes.items():
        files = [file for file in (toy.folder / "plot" / domain / "1").iterdir() if file.name != "meta.json"]
        assert found == sum(file.stat().st_size for file in files)
    records = sum(file.stat().st_size for file in (toy.folder / "records").iterdir())
    assert 0 < own.record_bytes * len(TENANTS) <= records
    assert own.slot_bytes > own.record_bytes  # slots of all layouts, in 32 bits
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

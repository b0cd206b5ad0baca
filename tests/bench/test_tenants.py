from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch

from bench.measuring.tenants import multiply, tenant_id
from bench.options import whole_numbers
from bench.tools.processes import Memory, memory_of
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.engine.backbone import Backbone
from hplm.tenants.snapshot import Snapshot
from testing.random_store import random_store, random_tenants
from testing.toy import CONFIG
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


def test_every_tenant_has_records_of_its_own(tmp_path: Path) -> None:
    store = random_store(tmp_path / "store", CONFIG, random_tenants(1, 4, 3))
    export(store, tmp_path / "repository", ServingOptions())
    folder = tmp_path / "repository" / CONFIG.name / "1"
    multiply(folder, 9).save(folder / Backbone.TENANTS)
    backbone = Backbone(folder)
    snapshot = Snapshot.load(folder / Backbone.TENANTS)
    seen = {"head": [], "adapter": []}
    for number in range(9):
        tenant = snapshot.find(tenant_id(number))
        for name, record in (("head", tenant.head), ("adapter", tenant.adapter)):
            layers = backbone.bank(record.bank).weights(record)
            seen[name].append(torch.cat([tensor.flatten() for layer in layers for tensor in layer.values()]))
    for weights in seen.values():
        assert not any(torch.equal(one, other) for i, one in enumerate(weights) for other in weights[:i])


def test_memory_includes_started_processes(tmp_path: Path) -> None:
    before = memory_of(os.getpid())
    code = "import time; kept = bytearray(b'x') * 50_000_000; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        now = memory_of(os.getpid())
        child.kill()
    assert now.private - before.private > 45_000_000
    assert now.resident - before.resident > 45_000_000


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert memory_of(child.pid) == Memory(0, 0)  # its entry in /proc still exists, because nobody has waited for it
    assert memory_of(child.pid) == Memory(0, 0)


def test_several_numbers_of_tenants_are_read_and_nonsense_is_refused() -> None:
    assert whole_numbers("1,10,100") == [1, 10, 100]
    for nonsense in ("10,0", "many", "1,,2", "-3"):
        with pytest.raises(ArgumentTypeError, match=mentioning(repr(nonsense))):
            whole_numbers(nonsense)

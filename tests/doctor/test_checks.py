"""Each check of `hplm doctor` sees what is wrong, and is content with what is not."""

import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.doctor import checks
from hplm.doctor.checks import OK, PROBLEM, UNKNOWN, WARNING
from hplm.errors import HplmError
from hplm.server.discovery import TRITON_VERSION
from hplm.tenants.keys import new_key
from hplm.tenants.snapshot import Snapshot
from testing.toy import SERVED
from tests.cluster.fake_server import FakeServer
from tests.support.message import mentions, refusing

ROOT = Path(__file__).parents[2]

(IMAGE,) = re.findall(r"^ARG TRITON_VERSION=(\S+)$", (ROOT / "deploy/Dockerfile").read_text("utf-8"), re.MULTILINE)
SAFE, HOLED = ("2.70.0", "2.99", "26.06", "26.07-py3"), ("2.51.0", "2.69.9", "2.7", "2", IMAGE, "26.05-py3")
INF = resource.RLIM_INFINITY


def space(mb, free_mb):
    """Returns what `statvfs` tells of a file system of this size."""
    return os.statvfs_result((4096, 4096, mb * 256, free_mb * 256, free_mb * 256, 0, 0, 0, 0, 255))


SHM = Path("/dev/shm")
FOUND = [  # a check, what it looks at, its status, and what it names
    (checks.draining, [[]], OK, []),
    (checks.draining, [["one-7-7"]], PROBLEM, ["one-7-7", "hplm drain"]),
    *((checks.triton, [release, True], OK, [release]) for release in SAFE),
    *((checks.triton, [release, True], PROBLEM, [release, "26.06"]) for release in HOLED),
    (checks.triton, ["2.51.0", False], WARNING, []),
    *((checks.triton, [unknown, True], UNKNOWN, []) for unknown in (None, "x", "25", "1.9")),
    *((checks.open_files, [(1024, hard)], status, []) for hard, status in ((1024, PROBLEM), (65536, WARNING))),
    *((checks.open_files, [(limit, limit)], OK, []) for limit in (65536, INF)),
    *((checks.shared_memory, [SHM, space(*mb)], PROBLEM, [SHM]) for mb in ((64, 64), (2048, 100))),
    (checks.shared_memory, [SHM, space(2048, 2000)], OK, [SHM]),
]


@pytest.mark.parametrize(("check", "given", "status", "named"), FOUND)
def test_a_check_says_how_bad_it_is_and_names_it(check, given, status, named):
    finding = check(*given)
    assert finding.status == status and mentions(f"{finding.says} {finding.do}", *named)


def test_tenants_without_keys_are_a_problem_on_an_open_address(toy, tmp_path):
    finding = checks.tenants(toy.repository, None, is_open=True)
    assert finding.status == PROBLEM and mentions(finding.says, "acme", len(SERVED))
    assert checks.tenants(toy.repository, None, is_open=False).status == WARNING
    export(toy.store, tmp_path, ServingOptions(dtype="fp32"))
    path = tmp_path / "toy/1/tenants.json"
    stored = Snapshot.load(path)
    tenants = [replace(tenant, keys=(new_key()[1],)) for tenant in stored.tenants]
    Snapshot(0, stored.branches, tenants, stored.export).save(path)
    assert checks.tenants(tmp_path, None, is_open=True).status == OK


@pytest.mark.slow
@pytest.mark.server("toy")
def test_a_running_server_tells_its_version_and_what_it_restricts(server):
    assert checks.version_at(server.http_url) == TRITON_VERSION
    assert checks.restricted(server.http_url).status == OK


def test_a_server_that_restricts_nothing_is_a_problem():
    with FakeServer("answers everything") as server:
        finding = checks.restricted(server.http_url)
    assert finding.status == PROBLEM and "/v2/repository/index" in finding.says


def test_where_no_triton_answers_the_option_is_named():
    with FakeServer("answers everything") as other:
        for server in ("127.0.0.1:1", "127.0.0.1:x", other.http_url):
            with refusing(HplmError, server, "--server"):
                checks.version_at(server)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "0.0.0.0", "10.0.0.1", "serving.example"])
def test_every_address_but_loopback_is_open(address):
    assert checks.is_open_address(address) == (address in ("0.0.0.0", "10.0.0.1", "serving.example"))

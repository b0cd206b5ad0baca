"""The demo is built once for the same packages, and its tenants come while it is served."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest

from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from demo.building import fingerprint, packages_read
from demo.data import DemoTenant
from demo.generating import scored, stream
from demo.serving import add_live, draw, evaluate, first_answer, is_ours, live_server
from hplm.errors import InvalidInput
from hplm.server.repository import model_names
from hplm.tenants.manager import Manager
from hplm_client import HplmClient
from testing.random_repository import write
from testing.random_store import TOY, random_store, random_table, random_tenant, random_tenants
from tests.support.lent import loading
from tests.support.message import mentioning
from tests.support.servers import Lease


def test_only_packages_that_the_demo_reads_count() -> None:
    read = packages_read(further=False)
    assert f"numpy=={importlib.metadata.version('numpy')}" in read and not any(one.startswith("pytest==") for one in read)
    assert fingerprint("settings", further=False) != fingerprint("other settings", further=False)


def test_a_demo_of_another_size_replaces_its_own_export_only(tmp_path: Path) -> None:
    assert not is_ours(tmp_path / "none", set())
    exported = write(tmp_path, TOY, 2, ServingOptions()) / "1"
    assert is_ours(exported, {"tenant-0", "tenant-1", "tenant-2"})
    with pytest.raises(InvalidInput, match=mentioning(exported, "tenant-1", "--repository")):
        is_ours(exported, {"tenant-0"})


@pytest.mark.slow
@pytest.mark.server("bare")
def test_a_tenant_is_added_with_its_domain_while_another_is_served(tmp_path: Path, server: Lease) -> None:
    """The server that the demo would start is made, and a lent one takes its place."""
    store = random_store(tmp_path / "store", TOY, random_tenants(1, 4, 2))
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps({"text": f"wb {text}", "label": f"label-{i}"}) + "\n" for i, text in enumerate("abcd")))
    labels = ("label-0", "label-1")
    homes = {"tenant-0": "root", "tenant-1": "late"}
    tenants = [DemoTenant(id, home, "classify", "which?", labels, test, test, test, 0.5) for id, home in homes.items()]
    live = tmp_path / "live"
    (live / "repository" / "interrupted").mkdir(parents=True)
    own = live_server(store, live)
    assert own.models == model_names(live / "repository") and "interrupted" not in own.models
    assert own.pid is None and Manager.open(live / "repository", live / "state").current().generation == 0
    shutil.rmtree(live / "state")
    (live / "state").symlink_to(server.state)
    with loading(server, live / "repository"):
        assert "-> label-" in first_answer(tenants[0], server.http_url)
        random_table(store, "late", 1, ("root", 1), 500, seed=3)
        random_tenant(store, TenantVersion("tenant-1", 1, "late", 1, "classify", list(labels), 4), 0.3, seed=5)
        for _ in range(2):  # what is served already stays as it is
            add_live(store, live, tenants[1])
        scores = evaluate(tenants, server.http_url, server.grpc_url)
    assert [score.tenant.id for score in scores] == [*homes]
    assert all(0 <= score.accuracy <= 1 and score.http_ms > 0 and score.grpc_ms > 0 for score in scores)
    draw(scores, store, tmp_path / "demo.svg")
    assert "tenant-1" in (tmp_path / "demo.svg").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.server("chat")
def test_tenants_of_a_decoder_write_with_and_without_their_adapter(tmp_path: Path, server: Lease, capsys) -> None:
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps({"text": f"some words {number}", "target": " others"}) + "\n" for number in range(3)))
    tenant = DemoTenant("lora", "root", "generate", "which?", (), test, test, test, 0.0)
    with HplmClient(server.http_url, "http", "chat") as client:
        stream(client, tenant)
        found = scored(client, server.built.stores["chat"], tenant)
    _, asked, prompt, expected, plain, own, _ = capsys.readouterr().out.split("\n")
    assert (asked, prompt, expected) == ("lora: which?", "  some words 0", "  expected: others")
    assert plain.startswith("  plain:") and own.startswith("  lora:") and plain != own.replace("lora", "plain")
    assert found.own.rows == found.plain.rows == 3 and found.own.metric == "rougeL"

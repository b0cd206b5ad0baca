"""The documented commands change a registry in a bucket, with the image's files. A server and the router read it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import testing.bucket
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from testing.random_store import random_store, random_table, random_tenant
from testing.reference import Reference
from testing.toy import CONFIG
from tests.cli.commands import process_without
from tests.deploy.image import SECRET, commands_of_pages, copy_files, python_of_the_image, started
from tests.deploy.manifests import BUCKET, container, find, rendered, words
from tests.deploy.programs import run
from tests.server.stock import LIBRARIES, Stock
from tests.support.needed import debian_program
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

ADDRESS = "s3://bucket/hplm"  # of the pages
TEXT = "a few words"
ACME = TenantVersion("acme", 1, "bio", 1, "classify", ["x", "y"], 4)


@dataclass(frozen=True)
class Place:
    """A store, its export and a bucket, and a process of the image's Python that runs commands to change them."""

    store: Store
    repository: Path
    main: Callable[[Sequence[str]], tuple[int, str, str]]

    def run(self, *command: str) -> str:
        """Runs `hplm` with a documented command, and returns what it says."""
        folders = {"store": self.store.folder, "model_repository": self.repository}
        here = [str(folders.get(word.lstrip("/").replace("models", "model_repository"), word)) for word in command]
        status, said, errors = self.main(here)
        assert status == 0, (here, said, errors)
        return said

    def json(self, *command: str) -> dict[str, Any]:
        return json.loads(self.run(*command, "--json").splitlines()[-1])


@pytest.fixture
def bucket() -> Iterator[dict[str, str]]:
    """The variables of a bucket that this process plays."""
    with testing.bucket.bucket() as server:
        yield server.environment


@pytest.fixture
def place(tmp_path, bucket) -> Iterator[Place]:
    store = random_store(tmp_path / "store", CONFIG, [replace(ACME, id="old")], ("bio",), corpus_tokens=1000, spread=0.3)
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32"))
    random_tenant(store, ACME, 0.3, seed=1)
    python = python_of_the_image(tmp_path / "python", copy_files(tmp_path / "opt")) / "python"
    home = {"HOME": str(tmp_path), "HPLM_MIRROR": str(tmp_path / "mirror")}
    with process_without(python=python, cwd=python.parent, **bucket, **home) as main:
        yield Place(store, tmp_path / "repository", main)


def documented(*start: str) -> list[str]:
    """Returns the command that begins with these words, from the docs, of the registry in the bucket."""
    commands = commands_of_pages("cluster", "kubernetes")
    (found,) = {tuple(words) for words in commands if words[: len(start)] == [*start] and ADDRESS in words}
    return list(found)


def test_tenants_domains_and_keys_are_changed_in_a_bucket_and_the_router_knows_them(place, tmp_path_factory):
    place.run(*documented("begin"), "--lease", "1")
    served = ["--repository", "model_repository", "--state", ADDRESS]
    publish = documented("tenant", "publish", "acme", "--store", "store")
    place.run(*publish)
    key, _ = (place.json("tenant", "key", "add", "acme", *served)["key"] for _ in range(2))  # the last one stays
    revoke = [key if word == "ID" else word for word in documented("tenant", "key", "revoke", "acme")]
    assert place.json(*revoke)["revoked"] == key
    random_table(place.store, "bio", 2, ("root", 1), 1000, seed=9)
    random_tenant(place.store, replace(ACME, version=2, domain_version=2), 0.1, seed=5)
    place.run(*documented("domain", "update"))
    random_tenant(place.store, replace(ACME, version=3, domain_version=2), 0.1, seed=6)
    place.run(*documented("tenant", "publish", "acme", "--store", "/store"))  # of `docker run`
    place.run(*documented("tenant", "limit", "acme"))
    (acme,) = [one for one in place.json("tenant", "list", *served)["tenants"] if one["id"] == "acme"]
    assert (acme["domain"], acme["domain_version"], acme["homes"]) == ("bio", 2, 3)
    check_router(place, tmp_path_factory.mktemp("r"))


def test_a_server_of_the_image_answers_for_a_tenant_that_a_laptop_publishes(place, bucket, tmp_path):
    """Its answers are the reference's, and only who has the administrator's secret manages its models."""
    place.run(*documented("begin"))
    folder = tmp_path / "server"
    folder.mkdir()
    with started(folder, place.repository, HPLM_STATE=ADDRESS, HPLM_MIRROR=str(folder / "mirror"), **bucket) as addresses:
        expected = Reference.open(place.repository / CONFIG.name / "1").forward(TEXT, "old").numpy()
        for protocol in LIBRARIES:
            np.testing.assert_allclose(answer(addresses, "old", protocol)["LOGITS"][0], expected, atol=1e-3)
        assert not answer(addresses, "acme")
        place.run(*documented("tenant", "publish", "acme", "--store", "store"))
        eventually(lambda: answer(addresses, "acme"))
        request = urllib.request.Request(f"http://{addresses.http_url}/v2/repository/index", data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=PATIENCE)
        request.add_header("hplm-admin", SECRET)
        with urllib.request.urlopen(request, timeout=PATIENCE) as index:
            assert b'"toy-upper"' in index.read()


def answer(addresses: Any, tenant: str, protocol: str = "http") -> dict[str, Any]:
    """Returns nothing if the server does not know the tenant."""
    try:
        return Stock(addresses, protocol).ask([TEXT], tenant)
    except InferenceServerException as error:
        assert "[no_tenant]" in error.message(), error
        return {}


def check_router(place: Place, folder: Path) -> None:
    """The router's pod writes its files from the registry, and HAProxy takes them. A socket's path must be short."""
    objects = rendered(BUCKET)
    described = json.loads(find(objects, "ConfigMap", "hplm-router")["data"]["cluster.json"])
    described["repository"] = str(place.repository)
    for one in described["replicas"]:  # names that are known here: HAProxy asks for each of them many times
        one |= {"http": f"localhost:{9000 + one['id']}", "grpc": f"localhost:{9100 + one['id']}"}
    (folder / "cluster.json").write_text(json.dumps(described), "utf-8")
    here = {"/etc/hplm": str(folder), "/run/router": str(folder)}
    program, *command = [_moved(word, here) for word in words(container(objects, "hplm-router", "write"))]
    assert program == "hplm"
    place.run(*command)
    program, *command = [_moved(word, here) for word in words(container(objects, "hplm-router", "haproxy"))]
    run(debian_program(program), "-c", *command)


def _moved(word: str, folders: dict[str, str]) -> str:
    for old, new in folders.items():
        word = word.replace(old, new)
    return word

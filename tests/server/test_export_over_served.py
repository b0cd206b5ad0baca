"""`hplm export` over a repository that is being served."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.cli.main import main
from hplm.errors import InvalidInput
from testing.random_store import random_store
from testing.toy import CHAT, WORDS
from tests.server.stock import Stock
from tests.server.test_engine_ends import engine_of
from tests.support.message import mentioning, mentions
from tests.support.servers import serving, until_ready
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

ANY_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


@pytest.fixture
def repository(toy, tmp_path):
    export(toy.store, tmp_path / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    return tmp_path / "repository"


@pytest.fixture
def export_again(toy, repository, capsys):
    def run(*options):
        """Returns what the command says if it refuses."""
        ended = main(["export", "--store", str(toy.store.folder), "--repository", str(repository), "--dtype", "fp32", *options])
        said = capsys.readouterr().err
        assert bool(ended) == bool(said), said
        return said

    return run


def test_it_names_the_process_to_end(repository, export_again, tmp_path):
    command = [sys.executable, "-m", "hplm.cli.main", "serve", "--repository", str(repository), *ANY_PORTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            until_ready(process)
            assert mentions(export_again(), repository / "toy", f"process {process.pid}", "--while-served")
            process.send_signal(signal.SIGTERM)
            process.communicate()
        finally:
            process.kill()
    assert not export_again()


def test_what_is_started_again_finds_the_old_export(repository, export_again):
    """An engine with another export than lookup's would refuse all requests."""
    files = {file: file.read_bytes() for file in repository.rglob("*") if file.is_file()}
    with serving(repository) as server:
        stock = Stock(server, "http")

        def ask():
            return stock.ask([WORDS[0]], "acme", outputs=("LOGITS",))["LOGITS"]

        def answers_again():
            try:
                return np.allclose(ask(), expected, atol=1e-3)
            except InferenceServerException as error:
                assert "[draining]" in error.message()

        expected, killed = ask(), engine_of(server)
        os.kill(killed, signal.SIGKILL)
        assert mentions(export_again(), repository / "toy", f"process {server.pid}")
        eventually(answers_again)
        assert engine_of(server) not in (None, killed)
        assert files == {file: file.read_bytes() for file in repository.rglob("*") if file.is_file()}
        assert not export_again("--while-served")


@pytest.mark.parametrize("model", ["toy-lookup", "toy-upper"])
def test_each_model_process_keeps_exports_away(repository, export_again, model):
    with serving(repository, load=[model]) as server:
        assert mentions(export_again(), f"process {server.pid}")


def test_a_decoder_keeps_exports_away(tmp_path):
    tenant = TenantFile("plain", 1, "root", 1, "generate", [], 0)
    store = random_store(tmp_path / "store", CHAT, [tenant], corpus_tokens=500, spread=0.3)
    options = ServingOptions(dtype="fp32", seats=4, cache_tokens=512)
    written = export(store, tmp_path / "repository", options)
    with serving(tmp_path / "repository") as server, pytest.raises(InvalidInput, match=mentioning(written.folder, server.pid)):
        export(store, tmp_path / "repository", options)

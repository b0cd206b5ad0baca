"""The lock of a model folder: models share it, an export has it alone, and no model waits for it for ever."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from hplm.cli.main import main
from hplm.errors import InvalidInput
from hplm.server import folder_lock
from hplm.server.folder_lock import alone, share
from tests.server.test_engine_ends import engine_of
from tests.support.fake_triton import model_of
from tests.support.message import mentioning, mentions
from tests.support.wait import PATIENCE, eventually

SHARES = "import sys, pathlib; from hplm.server.folder_lock import share; share(pathlib.Path(sys.argv[1])); print(); input()"


@pytest.fixture
def other(tmp_path):
    """Another process that has a share."""
    piped = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", SHARES, str(tmp_path)], **piped) as process:
        try:
            assert process.stdout.readline() == b"\n"
            yield process
        finally:
            process.kill()


def test_an_export_names_the_process_that_has_a_share_until_it_ends(other, tmp_path):
    with pytest.raises(InvalidInput, match=mentioning(tmp_path, f"process {other.pid}", "--while-served")), alone(tmp_path):
        pass
    with alone(tmp_path, while_served=True):
        pass
    other.kill()
    other.wait()
    with alone(tmp_path), pytest.raises(InvalidInput, match=mentioning(f"process {os.getpid()}")), alone(tmp_path):
        pass  # two exports into one folder do not mix


def test_models_share_and_a_folder_that_is_not_there_yet_is_not_served(tmp_path):
    shares = [share(tmp_path), share(tmp_path)]
    assert None not in shares
    for descriptor in shares:
        with pytest.raises(InvalidInput), alone(tmp_path):
            pass
        os.close(descriptor)
    with alone(tmp_path), alone(tmp_path / "none"):
        assert not (tmp_path / "none").exists()


def test_a_model_waits_until_the_export_is_written(tmp_path, monkeypatch):
    pauses, taken = [], []
    monkeypatch.setattr(folder_lock, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
    model = threading.Thread(target=lambda: taken.append(share(tmp_path)))
    with alone(tmp_path):
        model.start()
        eventually(lambda: pauses)
        assert not taken
    model.join(PATIENCE)
    assert taken[0] is not None
    os.close(taken[0])


def test_a_model_starts_though_somebody_keeps_the_lock(tmp_path, monkeypatch, caplog):
    """Any user who may read the folder can do that."""
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)
    with alone(tmp_path):
        assert share(tmp_path) is None
    assert mentions(caplog.text, tmp_path)


def test_where_there_are_no_locks_models_start_and_exports_are_written_with_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert share(tmp_path) is None
    with alone(tmp_path):
        pass
    assert [mentions(record.getMessage(), tmp_path) for record in caplog.records] == [True, True]


def test_an_engine_does_not_inherit_the_share(tmp_path):
    descriptor = share(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as engine:
        os.close(descriptor)
        with alone(tmp_path):
            pass
        engine.kill()


def export_again(store, lease, capsys):
    """Returns what the command says that refuses to export over what is served."""
    backbone = lease.built.stores[store]
    assert main(["export", "--store", str(backbone.folder), "--repository", str(lease.repository)]) == 1
    return capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.server("toy")
def test_what_is_started_again_finds_the_old_export(server, capsys):
    """An engine with another export than lookup's would refuse all requests."""
    files = {file: file.read_bytes() for file in server.model_folder().rglob("*") if file.is_file()}
    stock, killed = server.stock(), engine_of(server.server, "toy-upper")
    expected = stock.ask(["a"], "acme")["LOGITS"]
    os.kill(killed, signal.SIGKILL)
    assert mentions(export_again("toy", server, capsys), server.repository / "toy", f"process {server.server.pid}")

    def answers_again():
        try:
            return np.allclose(stock.ask(["a"], "acme")["LOGITS"], expected, atol=1e-3)
        except InferenceServerException as error:
            assert "[draining]" in error.message()

    eventually(answers_again)
    assert files == {file: file.read_bytes() for file in server.model_folder().rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.server("chat")
def test_a_decoder_keeps_exports_away(server, capsys):
    assert mentions(export_again("chat", server, capsys), server.repository / "chat", f"process {server.server.pid}")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lookup", "upper"])
def test_each_model_process_keeps_exports_away(toy, tmp_path, model):
    repository = shutil.copytree(toy.repository, tmp_path / "repository")
    with alone(repository / "toy"):
        pass
    with model_of(repository, f"toy-{model}", f"hplm_{model}"), pytest.raises(InvalidInput), alone(repository / "toy"):
        pass

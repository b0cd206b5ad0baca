import os
import subprocess
from pathlib import Path

from hplm.tenants.secret import SharedSecret
from tests.support.message import refusing


def test_models_of_one_server_share_a_secret_that_other_users_cannot_read(tmp_path):
    first = SharedSecret("toy", os.getpid(), tmp_path)
    assert SharedSecret("toy", os.getpid(), tmp_path).value == first.value
    assert len(first.value) == 32 and first.path.stat().st_mode & 0o777 == 0o600
    assert SharedSecret("other", os.getpid(), tmp_path).value != first.value
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(f".{os.getpid()}")] == []


def test_secrets_of_ended_servers_are_removed(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        left_behind = SharedSecret("toy", process.pid, tmp_path).path
        process.kill()
    assert left_behind.exists()
    mine = SharedSecret("toy", os.getpid(), tmp_path).path
    assert not left_behind.exists() and mine.exists()


def test_servers_in_other_process_namespaces_keep_their_secrets(tmp_path):
    """The name of a secret has the number of its namespace."""
    with subprocess.Popen(["sleep", "60"]) as process:
        theirs = SharedSecret("toy", process.pid, tmp_path).path
        process.kill()
    theirs = theirs.rename(theirs.with_name(theirs.name.replace(str(os.stat("/proc/self/ns/pid").st_ino), "1")))
    mine = SharedSecret("toy", os.getpid(), tmp_path).path
    assert theirs.exists() and mine.exists()
    assert SharedSecret("toy", os.getpid(), tmp_path).path == mine


def test_a_secret_file_that_others_may_read_is_refused(tmp_path):
    genuine = SharedSecret("toy", os.getpid(), tmp_path)
    Path(genuine.path).chmod(0o644)
    with refusing(PermissionError, genuine.path):
        SharedSecret("toy", os.getpid(), tmp_path)

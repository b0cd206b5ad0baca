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


def test_secrets_of_ended_servers_are_removed_but_not_those_of_other_process_namespaces(tmp_path):
    """The name of a secret has the number of its namespace."""
    with subprocess.Popen(["sleep", "60"]) as process:
        ended, other = (SharedSecret(model, process.pid, tmp_path).path for model in ("toy", "other"))
        process.kill()
    theirs = other.rename(other.with_name(other.name.replace(str(os.stat("/proc/self/ns/pid").st_ino), "1")))
    assert ended.exists()
    mine = SharedSecret("toy", os.getpid(), tmp_path).path
    assert not ended.exists() and theirs.exists() and mine.exists()


def test_a_secret_file_that_others_may_read_is_refused(tmp_path):
    genuine = SharedSecret("toy", os.getpid(), tmp_path)
    Path(genuine.path).chmod(0o644)
    with refusing(PermissionError, genuine.path):
        SharedSecret("toy", os.getpid(), tmp_path)

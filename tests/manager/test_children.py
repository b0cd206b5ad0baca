"""How a command of a job runs beside a server."""

import signal
import sys
import time
from pathlib import Path

import pytest

from manager.children import Child, Manner


@pytest.mark.parametrize(("is_awaited", "nice"), [(False, 19), (True, 10)])
def test_its_session_has_its_priority_beside_that_of_a_server(tmp_path, monkeypatch, is_awaited, nice):
    """By default, Linux gives each session as much of the cores, whatever the priorities inside of it are."""
    monkeypatch.setattr("manager.children.HPLM", (sys.executable, "-c", "import time; time.sleep(60)"))
    child = Child(["wait"], tmp_path, Manner(is_awaited=is_awaited))
    try:
        group = Path(f"/proc/{child.pid}/autogroup")
        if not group.exists():
            pytest.skip("this kernel does not group sessions")
        assert group.read_text().split()[1:] == ["nice", str(nice)]
    finally:
        child.ask_to_end(signal.SIGKILL)
        while not child.look():
            time.sleep(0.01)

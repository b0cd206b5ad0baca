"""A replica of this machine is replaced while the rest of the cluster is looked after."""

from hplm.cluster.local import LocalReplica
from hplm.cluster.pools import replicas_of
from hplm.server.ports import Ports
from hplm.server.process import Process

ENDS_WHEN_ALLOWED = """\
trap 'until [ -e allowed ]; do sleep 0.05; done; echo drained; exit' TERM
echo Ready
while :; do sleep 0.05; done
"""


def test_others_are_looked_after_while_a_server_drains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (planned,) = replicas_of(tmp_path, 1)
    replica = LocalReplica(planned, tmp_path, tmp_path / "state", Ports(1, 2, 3))
    replica.server = Process("server", ["sh", "-c", ENDS_WHEN_ALLOWED], tmp_path / "server.log")
    said = []

    def meanwhile():
        replica.look(said.append)
        (tmp_path / "allowed").touch()

    replica.server.start()
    replica.server.wait_until(replica.is_ready, 60)
    before = replica.server.pid
    try:
        replica.replace(meanwhile)
        assert replica.is_ready() and replica.server.pid != before
        assert said == [], "its end was no surprise"
        assert "drained" in replica.server.log_file.read_text(), "else it was killed"
    finally:
        (tmp_path / "allowed").touch()
        replica.stop()

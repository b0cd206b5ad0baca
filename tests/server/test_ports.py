"""Free ports, those that are taken, and addresses that Triton would misread."""

import socket

import pytest

from hplm.errors import HplmError
from hplm.server.ports import LOCAL_PORTS, Ports, free_ports, reachable, resolve
from tests.support.message import mentioning


def test_zero_becomes_three_different_free_ports():
    ports = Ports().claim("127.0.0.1")
    numbers = [port for _, port in ports.items()]
    assert len(set(numbers)) == 3 and 0 not in numbers
    with socket.create_server(("127.0.0.1", ports.grpc)):
        pass


def test_free_ports_are_given_to_no_client():
    lowest, highest = map(int, LOCAL_PORTS.read_text().split())
    found = free_ports(200)
    assert len(set(found)) == 200
    assert not [port for port in found if lowest <= port <= highest]


def test_there_are_free_ports_where_clients_get_all_of_them(tmp_path, monkeypatch):
    given = tmp_path / "ip_local_port_range"
    given.write_text("1024\t65535\n")
    monkeypatch.setattr("hplm.server.ports.LOCAL_PORTS", given)
    assert len(set(free_ports(20))) == 20


def test_a_given_port_is_kept_and_can_be_used_again_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # the side that closes first keeps its port in TIME_WAIT
    assert Ports(http=port).claim("127.0.0.1").http == port


def test_ports_and_addresses_that_cannot_be_had_are_refused_with_the_flag_that_changes_them():
    free, services = free_ports(1)[0], ("http", "grpc", "metrics")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        for ports, address, named in (
            *((Ports(**{one: taken}), "127.0.0.1", (taken, "127.0.0.1", f"--{one}-port")) for one in services),
            (Ports(http=free, grpc=free), "127.0.0.1", (free, "--grpc-port")),
            (Ports(http=65536), "127.0.0.1", ("--http-port 65536",)),
            (Ports(), "192.0.2.1", ("--address 192.0.2.1",)),
        ):
            with pytest.raises(HplmError, match=mentioning(*named)):
                ports.claim(address)
    for address in ("::1", "no.such.host.invalid"):  # Triton would read them as 255.255.255.255
        with pytest.raises(HplmError, match=mentioning(repr(address), "--address 127.0.0.1")):
            resolve(address)


def test_names_are_resolved_and_the_wildcard_is_reached_by_loopback():
    assert resolve("localhost") == "127.0.0.1"
    assert reachable("0.0.0.0") == "127.0.0.1"
    assert reachable("192.0.2.1") == "192.0.2.1"

"""A server needs a tritonserver, its folders, a repository and ports. test_triton.py starts a real one."""

import os
import platform
import re
import socket
import sys

import pytest

from hplm.errors import HplmError
from hplm.server import discovery
from hplm.server.discovery import obstacle
from hplm.server.installation import PYTHON, STUB, Installation
from hplm.server.ports import LOCAL_PORTS, Ports, free_ports, reachable, resolve
from hplm.server.repository import model_names
from tests.server.plain_models import ECHO, add_model
from tests.support.message import mentioning, mentions, refusing


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Makes the parts of /opt/tritonserver that we read, with its server on PATH."""
    for folder in ("bin", "backends/python"):
        (tmp_path / "opt" / folder).mkdir(parents=True)
    binary = tmp_path / "opt/bin/tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (tmp_path / "opt/backends/python" / STUB).write_bytes(f"\x7fELF libpython{PYTHON}.so.1.0".encode())
    monkeypatch.setenv("PATH", str(binary.parent), prepend=os.pathsep)
    return binary


def test_a_tritonserver_on_path_comes_first_and_the_containers_second(container, monkeypatch):
    assert discovery.find_installation() == Installation(container, "on PATH", container.parent.parent / "backends")
    monkeypatch.setenv("PATH", os.devnull)
    assert discovery.find_installation(container).binary == container


def test_without_a_tritonserver_the_error_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setitem(sys.modules, "pytriton", None)  # it is not installed
    why_not = obstacle(platform.machine(), *platform.libc_ver())
    with refusing(HplmError, "tritonserver", "PATH", tmp_path, why_not or "hplm[embedded]"):
        discovery.find_installation(tmp_path / "tritonserver")


def test_a_machine_that_cannot_run_the_embedded_server_is_told_why():
    assert obstacle("x86_64", "glibc", "2.36") is None
    assert mentions(obstacle("x86_64", "glibc", "2.31"), "glibc 2.35", "glibc 2.31")
    assert mentions(obstacle("x86_64", "", ""), "glibc 2.35", "another libc")
    assert mentions(obstacle("aarch64", "glibc", "2.36"), "x86-64", "aarch64")


def test_a_stub_for_another_python_and_a_missing_python_backend_are_named(container):
    stub = container.parent.parent / "backends/python" / STUB
    stub.write_bytes(b"\x7fELF libpython3.99.so.1.0")
    with pytest.raises(HplmError, match=mentioning(container, 3.99, PYTHON, "python3.99 -m pip")):
        discovery.find_installation()
    stub.unlink()
    with pytest.raises(HplmError, match=mentioning(container, stub)):
        discovery.find_installation()


def test_our_backends_are_found_wherever_the_package_is_installed():
    """Without the package: `test_serve_command.py`."""
    ours, *others = discovery.find_backends()
    assert (ours / "hplm_lookup" / "model.py").is_file()
    assert any((folder / "hplm_whole" / "model.py").is_file() for folder in others)


def test_the_stub_finds_this_python_and_its_library_first(tmp_path):
    links, inherited = {"libpython.so": tmp_path / "own.so"}, {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda", "HOME": "/root"}
    (tmp_path / "backends/python").mkdir(parents=True)
    (tmp_path / "laid").mkdir()
    (tmp_path / "backends/python" / STUB).touch()
    Installation(tmp_path, "", tmp_path / "backends", library_links=links).lay_out(tmp_path / "laid")
    assert (tmp_path / "laid/lib/libpython.so").readlink() == tmp_path / "own.so"
    environment = Installation(tmp_path, "", tmp_path, library_folders=(tmp_path / "libs",)).environment(tmp_path, inherited)
    assert environment["PATH"] == f"{os.path.dirname(sys.executable)}:/usr/bin"
    assert (environment["LD_LIBRARY_PATH"], environment["HOME"]) == (f"{tmp_path}/lib:{tmp_path}/libs:/cuda", "/root")
    # An installed tritonserver finds its own libraries.
    assert Installation(tmp_path, "", tmp_path).environment(tmp_path, inherited)["LD_LIBRARY_PATH"] == "/cuda"


def test_numpy_2_is_refused_for_the_embedded_server(monkeypatch, tmp_path):
    (tmp_path / "numpy-2.1.0.dist-info").mkdir()
    (tmp_path / "numpy-2.1.0.dist-info/METADATA").write_text("Name: numpy\nVersion: 2.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HplmError, match=mentioning("numpy 2.1.0", "hplm[embedded]")):
        discovery.embedded()


def test_this_pythons_libpython_is_used_or_the_error_says_how_to_get_it(tmp_path):
    links = discovery.embedded().library_links
    assert links and set(links.values()) == {discovery.libpython()}
    with pytest.raises(HplmError, match=mentioning(f"libpython{PYTHON}.so.1.0", f"apt-get install libpython{PYTHON}")):
        discovery.libpython([str(tmp_path)])


def test_all_models_are_found_and_a_folder_that_is_no_repository_is_refused_with_a_way_out(tmp_path):
    for name in ("two", "one"):
        add_model(tmp_path, name, ECHO)
    (tmp_path / "README.md").write_text("not a model")
    assert model_names(tmp_path) == ["one", "two"]
    (tmp_path / "empty").mkdir()
    for name in ("absent", "README.md", "empty"):
        with pytest.raises(HplmError, match=mentioning(tmp_path / name, "hplm export")):
            model_names(tmp_path / name)
    with pytest.raises(HplmError, match=rf"{re.escape(str(tmp_path))}(?![\w/])"):  # the folder above
        model_names(tmp_path / "one")


def test_free_ports_are_given_to_no_client_if_there_are_such_ports(tmp_path):
    lowest, highest = map(int, LOCAL_PORTS.read_text().split())
    found = free_ports(200)
    assert len(set(found)) == 200
    assert not [port for port in found if lowest <= port <= highest]
    (tmp_path / "ip_local_port_range").write_text("1024\t65535\n")
    assert len(set(free_ports(20, tmp_path / "ip_local_port_range"))) == 20


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
            (Ports(http=free, grpc=free), "127.0.0.1", (free, "--http-port", "--grpc-port")),
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

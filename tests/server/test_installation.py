"""What a server is started with: a tritonserver, its folders, and a repository. test_triton.py starts a real one."""

import importlib.metadata
import importlib.util
import os
import re
import sys

import pytest

from hplm.errors import HplmError
from hplm.server import discovery, embedded
from hplm.server.installation import STUB, Installation
from hplm.server.repository import model_names
from tests.server.plain_models import ECHO, add_backend, add_model
from tests.support.message import mentioning

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def container(tmp_path):
    """Makes the parts of /opt/tritonserver that we read."""
    for folder in ("bin", "backends/python", "backends/onnxruntime"):
        (tmp_path / "opt" / folder).mkdir(parents=True)
    binary = tmp_path / "opt/bin/tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (tmp_path / "opt/backends/python" / STUB).write_bytes(f"\x7fELF libpython{VERSION}.so.1.0".encode())
    return binary


@pytest.fixture
def on_path(container, monkeypatch):
    monkeypatch.setenv("PATH", str(container.parent), prepend=os.pathsep)
    return container


def test_a_tritonserver_on_path_comes_first_and_the_containers_second(on_path, monkeypatch):
    assert discovery.find_installation() == Installation(on_path, "on PATH", on_path.parent.parent / "backends")
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(discovery, "IN_CONTAINERS", on_path)
    assert discovery.find_installation().binary == on_path


def test_without_a_tritonserver_the_error_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(discovery, "IN_CONTAINERS", tmp_path / "bin/tritonserver")
    monkeypatch.setattr(discovery, "embedded", lambda: None)
    for machine, libc, named in (
        ("x86_64", ("glibc", "2.36"), ["pip install", "hplm[embedded]"]),
        ("x86_64", ("glibc", "2.31"), ["glibc 2.35", "glibc 2.31"]),
        ("aarch64", ("glibc", "2.36"), ["x86-64", "aarch64"]),
    ):
        monkeypatch.setattr(embedded.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(embedded.platform, "libc_ver", lambda libc=libc: libc)
        with pytest.raises(HplmError, match=mentioning("tritonserver", "PATH", *named)):
            discovery.find_installation()


def test_a_stub_for_another_python_and_a_missing_python_backend_are_named(on_path):
    stub = on_path.parent.parent / "backends/python" / STUB
    stub.write_bytes(b"\x7fELF libpython3.99.so.1.0")
    with pytest.raises(HplmError, match=mentioning(on_path, 3.99, VERSION, "python3.99 -m pip")):
        discovery.find_installation()
    stub.unlink()
    with pytest.raises(HplmError, match=mentioning(on_path, stub)):
        discovery.find_installation()


def test_our_backends_are_found_wherever_the_package_is_installed(monkeypatch):
    ours, *others = discovery.find_backends()
    assert (ours / "hplm_lookup" / "model.py").is_file()
    assert any((folder / "hplm_whole" / "model.py").is_file() for folder in others)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HplmError, match=mentioning(sys.executable, "pip install")):
        discovery.find_backends()


def test_the_layout_has_tritons_and_our_backends_and_a_copy_of_the_python_backend(container, tmp_path):
    add_backend(tmp_path / "ours", "hplm_lookup", ECHO)
    (tmp_path / "ours" / "__pycache__").mkdir()
    stub, library = tmp_path / "stub", tmp_path / "libpython.so"
    stub.write_text("stub of this Python")  # without permission to execute
    library.write_text("")
    laid = tmp_path / "laid"
    laid.mkdir()
    Installation(container, "", container.parent.parent / "backends", stub, library_links={"libpython3.so": library}).lay_out(
        laid, tmp_path / "ours"
    )
    backends = laid / "backends"
    assert sorted(path.name for path in backends.iterdir()) == ["hplm_lookup", "onnxruntime", "python"]
    assert (backends / "hplm_lookup/model.py").read_text() == ECHO
    assert not (backends / "python").is_symlink()
    assert (backends / "python" / STUB).read_text() == "stub of this Python"
    assert os.access(backends / "python" / STUB, os.X_OK)
    assert (laid / "lib/libpython3.so").resolve() == library


def test_the_stub_finds_this_python_and_its_library_first(tmp_path):
    inherited = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda", "HOME": "/root"}
    environment = Installation(tmp_path, "", tmp_path, library_folders=(tmp_path / "libs",)).environment(tmp_path, inherited)
    assert environment["PATH"] == f"{os.path.dirname(sys.executable)}:/usr/bin"
    assert (environment["LD_LIBRARY_PATH"], environment["HOME"]) == (f"{tmp_path}/lib:{tmp_path}/libs:/cuda", "/root")
    # An installed tritonserver finds its own libraries.
    assert Installation(tmp_path, "", tmp_path).environment(tmp_path, inherited)["LD_LIBRARY_PATH"] == "/cuda"


def test_numpy_2_is_refused_for_the_embedded_server(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1.0" if name == "numpy" else real(name))
    with pytest.raises(HplmError, match=mentioning("numpy 2.1.0", "hplm[embedded]")):
        embedded.embedded()


def test_this_pythons_libpython_is_used_or_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    links = embedded.embedded().library_links
    assert links and set(links.values()) == {embedded.libpython()}
    monkeypatch.setattr(embedded.sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(embedded.sys, "base_prefix", str(tmp_path))
    with pytest.raises(HplmError, match=mentioning(f"libpython{VERSION}.so.1.0", f"apt-get install libpython{VERSION}")):
        embedded.embedded()


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

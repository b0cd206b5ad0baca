"""What tests need of this machine. Where it is missing they are skipped, but fail in CI: no change lands without them."""

from __future__ import annotations

import os
from functools import partial
from typing import NoReturn

import pytest

from hplm.compiled import kernel
from hplm.errors import HplmError
from hplm.server.process import program

PACKAGES = {"promtool": "prometheus"}  # of Debian, where they differ


def missing(why: str) -> NoReturn:
    """`why` says how to get it."""
    if os.environ.get("CI") == "true":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def debian_program(name: str) -> str:
    """Returns the program's path."""
    try:
        return program(name, PACKAGES.get(name, name))
    except HplmError as error:
        why = str(error)
    missing(why)


def needs_program(name: str) -> pytest.MarkDecorator:
    return pytest.mark.needs(check=partial(debian_program, name))


def needs_kernel(vectors: bool = True) -> pytest.MarkDecorator:
    """`vectors`: whether the test also needs a processor with AVX2."""
    return pytest.mark.needs(check=partial(_compiled, vectors))


def _compiled(vectors: bool) -> None:
    if (found := kernel()) is None:
        missing(
            "the kernels were not compiled: install a C compiler (Debian, Ubuntu: apt-get install build-essential), and hplm "
            "again: .venv/bin/pip install -e ."
        )
    if vectors and not found.instructions:
        pytest.skip("this processor has no AVX2")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        mark.kwargs["check"]()

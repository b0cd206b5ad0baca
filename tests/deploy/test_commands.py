"""The image knows every command that deploy/ and docs/cluster.md show: exactly its files read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.deploy.documented import commands_of_containers, commands_of_pages, mentioned
from tests.deploy.image import copy_files, python_of_the_image
from tests.deploy.programs import run

READ = """
import contextlib, io, json, sys
from cyclopts import CycloptsError
from hplm.cli.main import main, parsed
said = []
for words in json.load(sys.stdin):
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            code = main(words) if "--help" in words else parsed(words) and 0
        except CycloptsError as error:
            code = print(error) or 2
    said.append([words, code, out.getvalue()])
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The Python of the image."""
    folder = tmp_path_factory.mktemp("image")
    return python_of_the_image(folder / "python", copy_files(folder / "opt")) / "python"


def test_every_command_is_whole_exists_with_its_options_and_wrong_ones_are_found(python):
    """Takes some seconds to read them all."""
    of_containers, named = commands_of_containers(), mentioned()
    assert {words[0] for words in of_containers} == {"watch", "drain", "route"}
    helps = [[*words, "--help"] for words, _ in named]
    wrong = [["tenant", "begin"], ["begin", "--repository", "x", "--no-such-option"]]
    asked = json.dumps([*commands_of_pages(), *of_containers, *helps, *wrong])
    said = json.loads(run(str(python), "-c", READ, input=asked, cwd=python.parent))
    assert [(words, text) for words, status, text in said if status] == [(words, said_of(said, words)) for words in wrong]
    for words, options in named:
        text = said_of(said, [*words, "--help"])
        assert not [option for option in options if option not in text], words


def said_of(said, words):
    return next(text for known, _, text in said if known == words)


def test_packages_that_the_image_lacks_are_missing_here_too(python):
    run(str(python), "-c", "import hplm, builder.publish.live", cwd=python.parent)
    for package in ("transformers", "bench"):
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            run(str(python), "-c", f"import {package}", cwd=python.parent)

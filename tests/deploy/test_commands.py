"""The image knows every command that deploy/ and docs/cluster.md show: exactly its files read them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.deploy.documented import commands_of_containers, commands_of_pages, mentioned
from tests.deploy.image import copy_files, python_of_the_image
from tests.deploy.programs import run

READ = """
import contextlib, io, json, sys
from hplm.cli.main import parser
top, said = parser(), []
for words in json.load(sys.stdin):
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            top.parse_args(words)
        except SystemExit as ended:
            code = ended.code
    said.append([code, out.getvalue()])
json.dump(said, sys.stdout)
"""
WHOLE = sorted(set(map(tuple, commands_of_pages())))
NAMED = sorted((tuple(words), tuple(options)) for words, options in mentioned())
Words = tuple[str, ...]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The Python of the image."""
    folder = tmp_path_factory.mktemp("image")
    return python_of_the_image(folder / "python", copy_files(folder / "opt")) / "python"


def read_by(python: Path, commands: Iterable[Words]) -> dict[Words, tuple[int, str]]:
    """Returns what the image's `hplm` says to each command, which it does not run, and its exit status."""
    asked = list(commands)
    said = json.loads(run(str(python), "-c", READ, input=json.dumps(asked), cwd=python.parent))
    return {words: tuple(one) for words, one in zip(asked, said, strict=True)}


@pytest.fixture(scope="module")
def read(python) -> dict[Words, tuple[int, str]]:
    return read_by(python, [*WHOLE, *((*words, "--help") for words, _ in NAMED)])


@pytest.mark.parametrize("words", WHOLE, ids=" ".join)
def test_a_command_is_whole(read, words):
    status, said = read[words]
    assert status == 0, said


@pytest.mark.parametrize("words, options", NAMED, ids=[" ".join((*words, *options)) for words, options in NAMED])
def test_a_command_that_a_sentence_names_exists_with_these_options(read, words, options):
    status, said = read[(*words, "--help")]
    assert status == 0, said
    assert not [option for option in options if option not in said]


def test_commands_of_containers_are_whole_and_wrong_ones_are_found(python):
    given = list(map(tuple, commands_of_containers()))
    assert {words[0] for words in given} == {"watch", "drain", "route"}
    wrong = [("tenant", "begin"), ("begin", "--repository", "x", "--no-such-option")]
    said = read_by(python, [*given, *wrong])
    assert {words: status for words, (status, _) in said.items()} == dict.fromkeys(given, 0) | dict.fromkeys(wrong, 2)


def test_packages_that_the_image_lacks_are_missing_here_too(python):
    for package, there in (("hplm", True), ("builder.publish.live", True), ("transformers", False), ("bench", False)):
        command = [python, "-c", f"import {package}"]
        done = subprocess.run(command, cwd=python.parent, capture_output=True, text=True, timeout=120)
        assert (done.returncode == 0) == there, done.stderr

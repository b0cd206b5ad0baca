"""The Indexed Job that imports: what it names exists, and its commands are ours."""

import re
import shlex

import pytest
import yaml

from hplm.cli.main import parsed
from tests.deploy.image import DEPLOY, PAGES, commands_of_pages
from tests.deploy.manifests import NEWEST, OLDEST, faults, validate, words, workloads

JOB = yaml.safe_load((DEPLOY / "building.yaml").read_text("utf-8"))
OUTSIDE = {"hplm-input", *re.findall(r"create secret generic ([\w-]+)", PAGES["building"])}
OF_THE_SHELL = {"||", "[", "$?", "=", "1", "]"}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_job_is_valid_and_names_what_exists(version):
    validate(JOB, version)
    assert not list(faults([JOB], OUTSIDE)) and "`hplm-input`" in PAGES["building"]


def read(line):
    """Returns a command's function and arguments, in the last of 16 parts."""
    return parsed([re.sub(r"^\$(JOB_COMPLETION_INDEX|SLURM_ARRAY_TASK_ID)", "15", word) for word in line])


def test_its_pods_run_our_commands_and_as_many_parts_as_there_are_pods():
    (pod,) = workloads([JOB])
    *_, script = words(pod.containers[0])
    lines = [shlex.split(line) for line in script.replace("\\\n", " ").splitlines()]
    ours = [line[line.index("hplm") + 1 :] for line in lines if "hplm" in line]
    commands = [
        parsed([re.sub(r"^\$JOB_COMPLETION_INDEX", "15", word) for word in line if word not in OF_THE_SHELL]) for line in ours
    ]
    assert [command.__name__ for command, _ in commands] == ["unpack", "import_", "publish"]
    parts, spec = commands[1][1].arguments["part"].of, JOB["spec"]
    assert parts == spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"


def test_the_commands_of_the_page_are_ours():
    names = [
        parsed([re.sub(r"^\$SLURM_ARRAY_TASK_ID", "15", word) for word in words])[0].__name__
        for words in commands_of_pages("building")
    ]
    assert names == ["import_", "tenants", "pack", "export", "begin", "unpack", "import_", "publish"]

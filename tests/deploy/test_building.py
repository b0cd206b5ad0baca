"""The Indexed Job and the Ray cluster that import: what they name exists, and their commands are ours."""

import re
import shlex

import pytest
import yaml

from hplm.cli.main import parsed
from tests.deploy.image import DEPLOY, PAGES, commands_of_pages
from tests.deploy.manifests import NEWEST, OLDEST, faults, validate, words, workloads

JOB = yaml.safe_load((DEPLOY / "building.yaml").read_text("utf-8"))
CLUSTER = yaml.safe_load((DEPLOY / "ray/building.yaml").read_text("utf-8"))
OUTSIDE = {"hplm-input", "hplm-store", *re.findall(r"create secret generic ([\w-]+)", PAGES["building"])}
OF_THE_SHELL = {"||", "[", "$?", "=", "3", "]"}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_job_is_valid_and_names_what_exists(version):
    validate(JOB, version)
    assert not list(faults([JOB], OUTSIDE))
    assert all(f"`{claim}`" in PAGES["building"] for claim in ("hplm-input", "hplm-store"))


def read(line):
    """Returns a command's function and arguments, in the last of 16 parts."""
    return parsed([re.sub(r"^\$\(\(JOB_COMPLETION_INDEX \+ 1\)\)", "16", word) for word in line])


def commands_in(lines):
    """Returns our commands in lines of a shell."""
    split = [shlex.split(line) for line in lines]
    ours = [line[line.index("hplm") + 1 :] for line in split if "hplm" in line]
    return [read([word for word in line if word not in OF_THE_SHELL]) for line in ours]


def pod_of(name, template):
    """Returns a pod of the cluster as one of a kind that Kubernetes has."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, **template}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def test_the_ray_cluster_is_valid_and_its_command_uses_it():
    spec = CLUSTER["spec"]["rayClusterSpec"]
    (builders,) = spec["workerGroupSpecs"]
    pods = [pod_of("head", spec["headGroupSpec"]["template"]), pod_of("builder", builders["template"])]
    for one in (CLUSTER, *pods):
        validate(one)
    assert not list(faults(pods, OUTSIDE))
    shell, flags, script = shlex.split(CLUSTER["spec"]["entrypoint"])
    commands = commands_in(script.split(";"))
    assert [shell, flags] == ["sh", "-euc"]
    assert [command.__name__ for command, _ in commands] == ["unpack", "import_", "publish"]
    assert commands[1][1].arguments["ray"] == "auto"


def test_its_pods_run_our_commands_and_as_many_parts_as_there_are_pods():
    (pod,) = workloads([JOB])
    *_, script = words(pod.containers[0])
    commands = commands_in(script.replace("\\\n", " ").splitlines())
    assert [command.__name__ for command, _ in commands] == ["unpack", "import_", "publish"]
    parts, spec = commands[1][1].arguments["part"].of, JOB["spec"]
    assert parts == spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"


def test_the_commands_of_the_page_are_ours():
    names = [parsed(words)[0].__name__ for words in commands_of_pages("building")]
    ray = ["import_", "tenants"]
    assert names == ["import_", "tenants", "pack", "export", "begin", "unpack", "import_", "publish", *ray]

"""The image has all files that it needs. Docker, compose, the chart and KServe start it alike. `test_published` runs it."""

import copy
import re
from itertools import pairwise

import yaml

from hplm.cli.main import main, parsed
from hplm.server.discovery import TRITON_VERSION
from hplm.server.flags import contract_flags
from hplm_openai.__main__ import parser as gateway_parser
from tests.cli.commands import process_without
from tests.deploy.image import (
    DEPLOY,
    NOT_IN_THE_MANAGERS,
    ROOT,
    SECRET,
    commands_of_pages,
    compose_service,
    copy_files,
    docker_run,
    dockerfile_copies,
    dockerfile_variables,
    python_of_the_image,
)
from tests.deploy.manifests import BUCKET, Object, container, faults, made_by_the_operator, rendered, validate, workload


def test_docker_run_and_compose_start_the_same_in_the_same_way(toy, tmp_path):
    begin = [word.replace("/models", str(toy.repository)) for word in docker_run("begin")[1]]
    assert main([word.replace("/state", str(tmp_path / "state")) for word in begin]) == 0
    docker, command = docker_run()
    service = compose_service()
    assert command == service["command"] and set(contract_flags(SECRET)) <= set(command)
    (repository,) = [flag.partition("=")[2] for flag in command if flag.startswith("--model-repository=")]
    state = docker[docker.index("-e") + 1].removeprefix("HPLM_STATE=")
    assert service["environment"]["HPLM_STATE"] == state
    assert dockerfile_variables() == {"HPLM_STATE_MUST_EXIST": "1"}
    for mounts in ([word for option, word in pairwise(docker) if option == "-v"], service["volumes"]):
        for mount, wanted in zip(mounts, (f"/model_repository:{repository}:ro", f"/state:{state}:ro"), strict=True):
            assert mount.endswith(wanted)
    published = [word for option, word in pairwise(docker) if option == "-p"]
    assert published == service["ports"] == [f"127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002)]
    assert parsed(service["healthcheck"]["test"][2:])[1].arguments["once"]
    (exit_timeout,) = [int(flag.partition("=")[2]) for flag in command if flag.startswith("--exit-timeout-secs=")]
    assert int(docker[docker.index("--stop-timeout") + 1]) > exit_timeout
    assert int(service["stop_grace_period"].removesuffix("s")) > exit_timeout


def test_compose_watches_the_server_from_a_container_that_reaches_it_and_knows_its_secret():
    watch = compose_service("watch")
    assert watch["network_mode"] == "service:triton"  # so that its default address is the server's
    assert watch["image"] == compose_service()["image"] and "HPLM_ADMIN" in watch["environment"]
    program, *arguments = watch["command"]
    assert program == "hplm" and parsed(arguments)[1].arguments["url"] == "127.0.0.1:8000"


def test_every_documented_command_is_whole():
    """`test_published` runs some with the image's files. Options of all commands: `tests/test_docs.py`."""
    for words in commands_of_pages():
        parsed(words)


def test_every_backend_is_copied_to_where_triton_looks():
    targets = dict(dockerfile_copies())
    ours = [backend.parent.name for backend in ROOT.glob("backends/*/model.py")]
    assert sorted(ours) == ["hplm_alias", "hplm_generate", "hplm_lookup", "hplm_upper"]
    for backend in ours:
        assert targets[f"backends/{backend}"] == f"/opt/tritonserver/backends/{backend}"


def test_the_image_is_of_the_release_that_is_tested_and_its_page_names_the_one_without_known_holes():
    (release,) = re.findall(r"^ARG TRITON_VERSION=(\S+)-py3$", (DEPLOY / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    page = (DEPLOY / "README.md").read_text("utf-8")
    assert TRITON_VERSION == "2.51.0" and release == "24.10" and "TRITON_VERSION=26.06-py3" in page


def test_the_context_of_the_images_has_what_they_copy_and_nothing_built_here():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    taken = {line[1:] for line in lines if line.startswith("!")}
    files = sorted(path.name for path in DEPLOY.glob("Dockerfile*"))
    copied = {source.partition("/")[0] for file in files for source, _ in dockerfile_copies(file)}
    assert files == ["Dockerfile", "Dockerfile.manager", "Dockerfile.openai"]
    assert "*" in lines and taken == copied | {"model_repository"} and "**/*.so" in lines


def test_the_image_installs_an_extra_that_exists_and_can_read_a_bucket():
    (extra,) = re.findall(r"pip install .* '/opt/hplm\[(\w+)\]'$", (DEPLOY / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    (packages,) = re.findall(rf"^{extra} = \[(.*?)\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert "obstore" in packages


def test_compose_starts_the_gateway_only_on_request_and_publishes_it_on_loopback():
    service = compose_service("openai")
    assert service["profiles"] == ["openai"] and (ROOT / service["build"]["dockerfile"]).is_file()
    program, flag, package, *arguments = service["command"]
    args = gateway_parser().parse_args(arguments)
    assert [program, flag, package] == ["python", "-m", "hplm_openai"]
    assert (args.url, args.address) == ("triton:8001", "0.0.0.0") and service["depends_on"].keys() == {"triton"}
    assert service["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]


def test_compose_starts_the_manager_only_on_request_beside_the_server_and_its_image_trains():
    service, text = compose_service("manager"), (DEPLOY / "Dockerfile.manager").read_text("utf-8")
    assert service["profiles"] == ["manager"] and service["build"]["dockerfile"] == "deploy/Dockerfile.manager"
    program, *words = service["command"]
    command, bound = parsed(words)
    given = {**{name: one.default for name, one in bound.signature.parameters.items()}, **bound.arguments}
    assert (program, command.__module__, given["address"], given["url"]) == ("hplm", "manager.cli", "0.0.0.0", "triton:8001")
    assert service["ports"] == [f"127.0.0.1:9001:{given['port']}"] and service["depends_on"].keys() == {"triton"}
    mounts = dict(reversed(mount.split(":", 1)) for mount in service["volumes"])
    written = [str(given["folder"]), *map(str, given["store"]), service["environment"]["HPLM_STATE"]]
    assert mounts.keys() == {f"{given['repository']}:ro", *written}
    assert f"-o hplm -g hplm {given['folder']}\n" in text
    (extras,) = re.findall(r"'/opt/hplm\[([\w,]+)\]'", text)
    assert extras.split(",") == ["build", "bucket", "parquet", "manager"] and "'/opt/hplm/clients[openai]'" in text


def test_the_managers_image_has_what_its_commands_import(tmp_path):
    opt = copy_files(tmp_path / "opt", "Dockerfile.manager")
    python = python_of_the_image(tmp_path / "python", opt, NOT_IN_THE_MANAGERS) / "python"
    with process_without(python=python, cwd=python.parent, HOME=str(tmp_path)) as run:
        for words in (["manager", "owner", "add", "acme", "--folder", str(tmp_path / "folder")], ["check", "--help"]):
            status, said, errors = run(words)
            assert status == 0 and said, errors
        status, _, errors = run(["manager", "--store", "none", "--state", str(tmp_path)])
        assert status == 1 and "none is not a store" in errors  # behind all its imports


RUNTIME, SERVICE = (yaml.safe_load((DEPLOY / "kserve" / file).read_text("utf-8")) for file in ("runtime.yaml", "minilm.yaml"))


def pod_of_kserve() -> Object:
    """KServe puts both descriptions together, and mounts the claim of `storageUri` into the server."""
    runtime, predictor = copy.deepcopy(RUNTIME["spec"]), copy.deepcopy(SERVICE["spec"]["predictor"])
    labels = {"app": "isvc.minilm-predictor"}
    claim = {"claimName": predictor["model"]["storageUri"].removeprefix("pvc://"), "readOnly": True}
    pod = {name: runtime[name] for name in ("containers", "volumes")}
    pod |= {name: value for name, value in predictor.items() if name not in ("minReplicas", "model")}
    pod["volumes"].append({"name": "kserve-pvc-source", "persistentVolumeClaim": claim})
    pod["containers"][0]["volumeMounts"].append({"name": "kserve-pvc-source", "mountPath": "/mnt/models", "readOnly": True})
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "minilm-predictor"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }


def test_both_descriptions_are_valid_fit_and_start_what_the_chart_starts_in_a_pod_in_which_everything_exists():
    chart, deployment = rendered(BUCKET), pod_of_kserve()
    for one in (RUNTIME, SERVICE, deployment):
        validate(one)
    assert not list(faults([deployment], {*made_by_the_operator(), "hplm-repository"}))
    model, offered = SERVICE["spec"]["predictor"]["model"], RUNTIME["spec"]
    assert model["runtime"] == RUNTIME["metadata"]["name"] and model["protocolVersion"] in offered["protocolVersions"]
    formats = [{"name": one["name"], "version": one["version"]} for one in offered["supportedModelFormats"]]
    assert model["modelFormat"] in formats
    ours, its = container(chart, "hplm-all", "server"), container([deployment], "minilm-predictor", "kserve-container")
    assert [word.replace("/mnt/models", "/models") for word in its["args"]] == ours["args"]
    assert its["env"] == [one for one in ours["env"] if one["name"] != "POD_NAME"]
    for name in ("command", "envFrom", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "resources"):
        assert its[name] == ours[name], name
    pods = [workload([deployment], "minilm-predictor").pod, workload(chart, "hplm-all").pod]
    assert len({pod["terminationGracePeriodSeconds"] for pod in pods}) == 1

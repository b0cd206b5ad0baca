"""What the image has, and how it is started. `test_published` starts a server of it."""

import re
from itertools import pairwise

from hplm.cli.main import main, parser
from hplm.server.flags import contract_flags
from tests.deploy.image import (  # fmt: skip
    DEPLOY,
    ROOT,
    SECRET,
    compose_service,
    docker_run,
    dockerfile_copies,
    dockerfile_variables,
)


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
    (exit_timeout,) = [int(flag.partition("=")[2]) for flag in command if flag.startswith("--exit-timeout-secs=")]
    assert int(docker[docker.index("--stop-timeout") + 1]) > exit_timeout
    assert int(service["stop_grace_period"].removesuffix("s")) > exit_timeout


def test_compose_watches_the_server_from_a_container_that_reaches_it_and_knows_its_secret():
    watch = compose_service("watch")
    assert watch["network_mode"] == "service:triton"  # so that its default address is the server's
    assert watch["image"] == compose_service()["image"] and "HPLM_ADMIN" in watch["environment"]
    program, *arguments = watch["command"]
    assert program == "hplm" and parser().parse_args(arguments).url == "127.0.0.1:8000"


def test_every_backend_is_copied_to_where_triton_looks():
    targets = {source: copy.target for copy in dockerfile_copies() for source in copy.sources}
    ours = [backend.parent.name for backend in ROOT.glob("backends/*/model.py")]
    assert sorted(ours) == ["hplm_admin", "hplm_alias", "hplm_generate", "hplm_lookup", "hplm_upper"]
    for backend in ours:
        assert targets[f"backends/{backend}"] == f"/opt/tritonserver/backends/{backend}"


def test_the_image_installs_an_extra_that_exists_and_can_read_a_bucket():
    (extra,) = re.findall(r"pip install .* '/opt/hplm\[(\w+)\]'$", (DEPLOY / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    (packages,) = re.findall(rf"^{extra} = \[(.*?)\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert "obstore" in packages

"""The manifests of deploy/kubernetes: valid, complete in themselves, and with documented commands."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from hplm.cli.main import parser
from hplm.server.flags import contract_flags
from tests.deploy.image import DEPLOY, SECRET, docker_run
from tests.deploy.manifests import (  # fmt: skip
    BASE,
    EXAMPLE,
    KUBERNETES,
    NEWEST,
    OLDEST,
    Object,
    built,
    container,
    faults,
    find,
    words,
    workload,
    workloads,
)

DOCUMENTED = (DEPLOY.parent / "docs/cluster.md").read_text("utf-8")
SCHEMAS = {path.stem: json.loads(path.read_text("utf-8")) for path in (Path(__file__).parent / "schemas").glob("*.json")}
SERVER = ("hplm-all", "server")
COMPONENTS = {
    "with_hpa": "components/hpa",
    "with_renewal": "components/keda\n  - ../../components/renewal",
}


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> dict[str, list[Object]]:
    """The base, the example and the example with other components."""
    found = {"base": built(BASE), "example": built(EXAMPLE)}
    for name, components in COMPONENTS.items():
        folder = tmp_path_factory.mktemp("manifests")
        shutil.copytree(KUBERNETES, folder, dirs_exist_ok=True)
        own = folder / EXAMPLE.relative_to(KUBERNETES) / "kustomization.yaml"
        content = own.read_text("utf-8")
        assert "components/keda" in content
        own.write_text(content.replace("components/keda", components), "utf-8")
        found[name] = built(own.parent)
    return found


@pytest.fixture(params=["base", "example", *COMPONENTS])
def objects(request, known) -> list[Object]:
    return known[request.param]


def made_by_the_operator() -> set[str]:
    """The claims and the keys of secrets that docs/cluster.md tells to make."""
    secrets = re.findall(r"create secret generic ([\w-]+)(.*)$", DOCUMENTED, re.MULTILINE)
    keys = {f"{name}/{key}" for name, rest in secrets for key in re.findall(r"--from-file=([\w-]+)", rest)}
    fenced = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCUMENTED, re.DOTALL)]
    return keys | {one["metadata"]["name"] for one in fenced if one.get("kind") == "PersistentVolumeClaim"}


def validate(one: Object, version: str = NEWEST) -> None:
    if one["kind"] in SCHEMAS:
        jsonschema.validate(one, SCHEMAS[one["kind"]])
    else:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_and_a_field_that_does_not_exist_is_found(known, version):
    seen: list[Object] = []
    for one in [one for name, objects in known.items() if name != "base" for one in objects]:
        if one not in seen:
            validate(one, version)
            seen.append(one)
    spoilt = copy.deepcopy(find(known["base"], "StatefulSet", "hplm-all"))
    spoilt["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["period"] = 10
    with pytest.raises(kubernetes_validate.ValidationError, match="period"):
        validate(spoilt, version)


def test_what_is_named_exists(objects):
    assert not list(faults(objects, made_by_the_operator()))


def spec(objects: list[Object], kind: str, name: str) -> Object:
    return find(objects, kind, name)["spec"]


def pod(objects: list[Object], kind: str, name: str) -> Object:
    return spec(objects, kind, name)["template"]["spec"]


FAULTS: dict[str, Callable[[list[Object]], object]] = {
    "selector": lambda all: spec(all, "StatefulSet", "hplm-all")["selector"]["matchLabels"].update(pool="other"),
    "service of the set": lambda all: spec(all, "StatefulSet", "hplm-all").update(serviceName="nobody"),
    "volume": lambda all: pod(all, "StatefulSet", "hplm-all")["volumes"].pop(),
    "mount": lambda all: container(all, *SERVER)["volumeMounts"].pop(0),
    "config map": lambda all: all.remove(find(all, "ConfigMap", "hplm-cluster")),
    "file of a config map": lambda all: find(all, "ConfigMap", "hplm-source")["data"].clear(),
    "claim": lambda all: pod(all, "StatefulSet", "hplm-router")["volumes"][0]["persistentVolumeClaim"].update(
        claimName="other"
    ),
    "secret": lambda all: container(all, *SERVER)["env"][2]["valueFrom"]["secretKeyRef"].update(key="other"),
    "file of a secret": lambda all: container(all, "hplm-all", "follow")["args"].append("--token-file=/secrets/source/other"),
    "address": lambda all: container(all, "hplm-all", "follow")["args"].append("--from=http://hplm-manager:8090"),
    "port of a probe": lambda all: container(all, "hplm-router", "haproxy")["livenessProbe"]["tcpSocket"].update(port="other"),
    "port of a service": lambda all: spec(all, "Service", "hplm-all")["ports"][0].update(targetPort="other"),
    "labels of a service": lambda all: spec(all, "Service", "hplm-router")["selector"].pop("app.kubernetes.io/component"),
    "port of a policy": lambda all: spec(all, "NetworkPolicy", "hplm-manager")["ingress"][0]["ports"][0].update(port="other"),
    "peer of a policy": lambda all: spec(all, "NetworkPolicy", "hplm-manager")["ingress"][0]["from"][0]["podSelector"][
        "matchLabels"
    ].update(role="other"),
    "budget": lambda all: spec(all, "PodDisruptionBudget", "hplm-all")["selector"]["matchLabels"].update(pool="other"),
    "monitor": lambda all: spec(all, "PodMonitor", "hplm")["podMetricsEndpoints"][0].update(port="other"),
    "label of a metric": lambda all: spec(all, "PodMonitor", "hplm")["podTargetLabels"].append("other"),
    "scaled set": lambda all: spec(all, "ScaledObject", "hplm-all")["scaleTargetRef"].update(name="other"),
    "scaled and set": lambda all: spec(all, "StatefulSet", "hplm-all").update(replicas=2),
    "twice": lambda all: all.append(all[0]),
}


@pytest.mark.parametrize("spoil", FAULTS.values(), ids=FAULTS)
def test_what_is_missing_is_found(known, spoil):
    spoilt = copy.deepcopy(known["example"])
    spoil(spoilt)
    assert list(faults(spoilt, made_by_the_operator()))


def commands(own: Object) -> list[list[str]]:
    """Returns the command lines of a container, of its probes and of its handlers."""
    handlers = [own[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe in own]
    handlers += own.get("lifecycle", {}).values()
    return [words(own), *(handler["exec"]["command"] for handler in handlers if "exec" in handler)]


def test_commands_of_hplm_exist_and_servers_have_the_documented_flags(objects):
    flags = [word.replace("$(HPLM_ADMIN)", SECRET) for word in container(objects, *SERVER)["args"]]
    assert flags == docker_run()[1] and set(contract_flags(SECRET)) <= set(flags)
    given = [line for one in workloads(objects) for own in one.containers for line in commands(own)]
    ours = [line[1:] for line in given if line and line[0] == "hplm"]
    for arguments in ours:
        parser().parse_args(arguments)
    assert {arguments[0] for arguments in ours} == {"watch", "drain", "follow", "route"}


def test_probes_ask_every_model_and_have_the_time_and_the_secret_for_it(objects):
    """A liveness probe that waited for an answer would end a server whose engine is being started again."""
    server = container(objects, *SERVER)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, *arguments = server[name]["exec"]["command"]
        asked = parser().parse_args(arguments)
        assert program == "hplm" and asked.command == "watch" and asked.models is None
        assert asked.alive if name == "livenessProbe" else asked.once
        assert server[name]["timeoutSeconds"] > asked.timeout
        assert asked.url == f"127.0.0.1:{workload(objects, SERVER[0]).ports['http']}"
    assert {variable["name"] for variable in server["env"]} >= {"HPLM_ADMIN", "HPLM_SERVER_ID", "HPLM_STATE"}
    assert {"name": "HPLM_STATE_MUST_EXIST", "value": "1"} in server["env"]
    drained = parser().parse_args(server["lifecycle"]["preStop"]["exec"]["command"][1:]).seconds
    (exit_timeout,) = [int(flag.partition("=")[2]) for flag in server["args"] if flag.startswith("--exit-timeout-secs=")]
    assert workload(objects, SERVER[0]).pod["terminationGracePeriodSeconds"] > drained + exit_timeout


def test_containers_have_no_rights_that_they_do_not_need(objects):
    for one in workloads(objects):
        assert one.pod["securityContext"]["runAsNonRoot"] and one.pod["securityContext"]["runAsUser"] == 1000
        assert not one.pod["automountServiceAccountToken"]
        for own in one.containers:
            context = own["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= own["resources"]["requests"].keys() and "memory" in own["resources"]["limits"]
            assert all("valueFrom" in variable for variable in own.get("env", []) if "ADMIN" in variable["name"])


def test_the_router_knows_every_replica_that_there_may_be(known):
    example = known["example"]
    scaled = spec(example, "ScaledObject", "hplm-all")
    (pool,) = json.loads(find(example, "ConfigMap", "hplm-cluster")["data"]["cluster.json"])["pools"]
    ports = {port["name"]: port["port"] for port in spec(example, "Service", "hplm-all")["ports"]}
    assert len(pool["replicas"]) >= scaled["maxReplicaCount"] and scaled["minReplicaCount"] >= 1
    for number, replica in enumerate(pool["replicas"]):
        host = f"hplm-all-{number}.hplm-all.hplm.svc.cluster.local"
        assert replica == {"id": number + 1, "name": f"hplm-all-{number}"} | {
            name: f"{host}:{port}" for name, port in ports.items()
        }


def check_share_of_routers(objects: list[Object], name: str, count: int) -> None:
    """Each router divides what a replica may get by the number of routers."""
    (writing,) = [one for one in workload(objects, name).pod["initContainers"] if one["name"] == "write"]
    assert parser().parse_args(words(writing)[1:]).routers == workload(objects, name).object["spec"]["replicas"] == count


def test_as_many_routers_run_as_divide_what_a_replica_may_get_and_one_manager(objects):
    """Of a StatefulSet, a pod is replaced when it has ended. A Deployment would begin the new one at once."""
    routers = spec(objects, "StatefulSet", "hplm-router")
    check_share_of_routers(objects, "hplm-router", routers["replicas"])
    assert routers.get("updateStrategy", {"type": "RollingUpdate"}) == {"type": "RollingUpdate"}  # one pod at a time
    assert spec(objects, "StatefulSet", "hplm-manager")["replicas"] == 1


def check_journals(objects: list[Object]) -> None:
    """Each replica writes its journal into a folder of its own, and the renewal reads them."""
    own, renewing = workload(objects, "hplm-all").pod, workload(objects, "hplm-renewal").pod
    mine, its = ([volume for volume in one["volumes"] if volume["name"] == "journals"] for one in (own, renewing))
    assert mine == its != []
    (mount,) = [one for one in container(objects, *SERVER)["volumeMounts"] if one["name"] == "journals"]
    assert (mount["mountPath"], mount["subPathExpr"]) == ("/journals", "$(POD_NAME)")
    assert "POD_NAME" in [variable["name"] for variable in container(objects, *SERVER)["env"]]
    assert renewing["containers"][0]["image"] == container(objects, *SERVER)["image"]


def test_a_replica_writes_its_journal_where_the_renewal_reads_it_and_all_have_one_token(known):
    check_journals(known["with_renewal"])
    mounted = {
        (one.name, volume["secret"]["secretName"])
        for one in workloads(known["base"])
        for volume in one.pod["volumes"]
        if "secret" in volume
    }
    assert mounted == {(name, "hplm-source-token") for name in ("hplm-all", "hplm-router", "hplm-manager")}

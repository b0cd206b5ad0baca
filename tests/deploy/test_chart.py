"""The Helm chart: its objects are valid and name only what exists, its values are used, and its commands are documented."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from hplm.cli.main import parsed
from loadtest.proxy import make_certificate
from manager.rendering import ROOT as CONSOLE
from tests.deploy.image import DEPLOY, PAGES, ROOT, SECRET, docker_run
from tests.deploy.manifests import (  # fmt: skip
    BUCKET,
    CHART,
    NEWEST,
    OLDEST,
    Object,
    container,
    faults,
    find,
    leaves,
    made_by_the_operator,
    rendered,
    validate,
    words,
    workload,
    workloads,
)
from tests.deploy.programs import helm, run
from tests.support.needed import debian_program

VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
TEMPLATES = "".join(path.read_text("utf-8") for path in (CHART / "templates").iterdir())
SERVER = ("hplm-all", "server")
KINDS = {  # how the chart is rendered here
    "default": (),
    "whole": (
        *(
            f"--set={part}.enabled=true"
            for part in ("monitoring", "monitoring.dashboard", "autoscaling", "door", "gateway", "manager")
        ),
        *("--set=door.backbones={minilm,bert}", "--set=pool.mirrorPersists=true", "--set=manager.stores={minilm,bert}"),
    ),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def objects(request) -> list[Object]:
    return rendered(BUCKET, *request.param)


def spec(objects: list[Object], kind: str, name: str) -> Object:
    return find(objects, kind, name)["spec"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(objects, version):
    run(helm(), "lint", "--strict", CHART, BUCKET)
    for one in objects:
        validate(one, version)


def test_what_is_named_exists(objects):
    """`python -m tests.bite --only chart` leaves out or renames one thing after the other."""
    assert not list(faults(objects, made_by_the_operator()))


def test_templates_use_every_value_and_no_other():
    used = set(re.findall(r"\.Values\.([\w.]+\w)", TEMPLATES))
    known = {path for path, _ in leaves(VALUES)}
    groups = {path for path in used if any(own.startswith(f"{path}.") for own in known)}
    assert used - groups <= known
    assert not [path for path in known - used if not any(path.startswith(f"{group}.") for group in groups)]


def test_another_release_with_other_values_is_whole_too():
    """With the rights of a service account, and a folder of each pod in a claim for journals."""
    journals = '[{"name": "journals", "persistentVolumeClaim": {"claimName": "logs"}}]'
    mounts = '[{"name": "journals", "mountPath": "/journals", "subPathExpr": "$(POD_NAME)"}]'
    objects = rendered(
        *("--set=pool.most=12", "--set=repository.claim=export-2", "--set=secrets.admin=a"),
        *("--set=clusterDomain=k8s.example", "--set=monitoring.enabled=true", "--set=autoscaling.enabled=true"),
        *("--set=pool.nodeSelector.disk=fast", "--set=router.replicas=3", "--set=pool.storageClass=local"),
        *("--set=pool.mirrorSize=7Gi", "--set=registry.address=gs://b/x", "--set=registry.secret="),
        "--set=serviceAccount=reader",
        *("--set-json", f"volumes={journals}", "--set-json", f"mounts={mounts}"),
        release="green",
        namespace="shop",
    )
    for one in objects:
        validate(one)
        assert one["metadata"]["name"].startswith("green") and one["metadata"]["namespace"] == "shop"
    assert not list(faults(objects, {"export-2", "a/admin", "logs"}))
    (replica, router) = (workload(objects, name) for name in ("green-all", "green-router"))
    assert replica.pod["nodeSelector"] == {"disk": "fast"}
    assert replica.pod["serviceAccountName"] == router.pod["serviceAccountName"] == "reader"
    assert not [own for own in (*replica.containers, *router.containers) if "envFrom" in own]
    described = json.loads(find(objects, "ConfigMap", "green-router")["data"]["cluster.json"])
    replicas = described["replicas"]
    most = spec(objects, "ScaledObject", "green-all")["maxReplicaCount"]
    assert [one["id"] for one in replicas] == [*range(1, 13)] and most <= 12
    assert replicas[11]["name"] == "green-all-11"
    for port in spec(objects, "Service", "green-all")["ports"]:
        assert replicas[11][port["name"]] == f"green-all-11.green-all.shop.svc.k8s.example:{port['port']}"
    (mirror,) = [volume for volume in replica.pod["volumes"] if volume["name"] == "mirror"]
    claim = mirror["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == "local" and claim["resources"]["requests"]["storage"] == "7Gi"


def test_the_documented_words_install_it_with_a_gpu_for_each_replica_too():
    (install,) = re.findall(r"^helm install ((?:.*\\\n)*.*)$", PAGES["kubernetes"], re.MULTILINE)
    (gpu,) = re.findall(r"GPU a replica:\s`(--set .*)`", PAGES["kubernetes"])
    given = shlex.split(f"{install} {gpu}".replace("\\\n", " "))
    objects = list(yaml.safe_load_all(run(helm(), "template", *given, cwd=ROOT)))
    server = container(objects, *SERVER)
    assert server["image"] == "registry.example.com/hplm:0.1.0"
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert not list(faults(objects, made_by_the_operator()))


@pytest.mark.parametrize(
    "wrong",
    ["pool.most=1", "pool.replicas=9", "autoscaling.least=9", "registry.address=", "door.backbones={}", "manager.stores={}"],
)
def test_values_that_make_no_sense_are_refused(wrong):
    value = wrong.partition("=")[0]
    with pytest.raises(AssertionError, match=re.escape(value)):
        rendered(BUCKET, *KINDS["whole"], "--set", wrong)


@pytest.mark.parametrize("wrong", ["pool.replica=3", "monitoring.labels=b", "registry.adress=s3://a/b", "pools.replicas=2"])
def test_a_typo_is_refused_by_its_name(wrong):
    named = {"pools.replicas": "pools", "monitoring.labels": "/monitoring/labels"}
    path = wrong.partition("=")[0]
    with pytest.raises(AssertionError, match=named.get(path, path.rpartition(".")[2])):
        rendered(BUCKET, "--set", wrong)


def test_the_schema_knows_every_value_and_no_other():
    def known(schema: Object, path: str = "") -> set[str]:
        fields = schema.get("properties", {})
        return {found for name, one in fields.items() for found in known(one, f"{path}.{name}".lstrip("."))} or {path}

    in_schema = known(json.loads((CHART / "values.schema.json").read_text("utf-8"))) - {"global"}
    groups = {path for path, _ in leaves(VALUES)}
    assert all(any(one == path or one.startswith(f"{path}.") for path in in_schema) for one in groups)
    assert all(any(one == path or one.startswith(f"{path}.") for one in groups) for path in in_schema)


def test_pods_are_placed_and_named_as_the_operator_wants_and_monitoring_finds_its_objects():
    affinity = '{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}'
    parts = {
        "pool": "hplm-all",
        "router": "hplm-router",
        "door": "hplm-door",
        "gateway": "hplm-gateway",
        "manager": "hplm-manager",
    }
    objects = rendered(
        *(BUCKET, *KINDS["whole"], "--set=images.pullSecrets={pull}", "--set=monitoring.labels.release=prometheus"),
        *("--set=monitoring.runbooks=https://wiki.example/operating", "--set=door.settings.HPLM_IN_FLIGHT=512"),
        *("--set-json", 'extraEnv=[{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]'),
        *(f"--set={part}.{name}" for part in parts for name in ("annotations.team=ours", "priorityClass=high")),
        *(f"--set={part}.runtimeClass=nvidia" for part in parts),
        *(word for part in parts for word in ("--set-json", f"{part}.affinity={affinity}")),
    )
    for one in objects:
        validate(one)
    for name in parts.values():
        one = workload(objects, name)
        assert one.annotations["team"] == "ours" and one.pod["affinity"] == json.loads(affinity)
        assert (one.pod["priorityClassName"], one.pod["runtimeClassName"]) == ("high", "nvidia")
        assert one.pod["imagePullSecrets"] == [{"name": "pull"}]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container(objects, *SERVER)["env"]
    for kind in ("PodMonitor", "PrometheusRule"):
        assert find(objects, kind, "hplm")["metadata"]["labels"]["release"] == "prometheus"
    rules = [rule for group in spec(objects, "PrometheusRule", "hplm")["groups"] for rule in group["rules"]]
    (stuck,) = [rule for rule in rules if rule.get("alert") == "HplmStuck"]
    assert stuck["annotations"]["runbook_url"] == "https://wiki.example/operating#hplmstuck"
    plain = yaml.safe_load((CHART / "files/rules.yaml").read_text("utf-8"))
    for rule in rules:
        rule.get("annotations", {}).pop("runbook_url", None)
    assert rules == [rule for group in plain["groups"] for rule in group["rules"]]


def test_the_dashboard_of_the_chart_is_the_newest_and_grafana_finds_it():
    (made,) = [one for one in rendered(BUCKET, *KINDS["whole"]) if one["metadata"]["name"] == "hplm-dashboard"]
    printed = subprocess.check_output([sys.executable, DEPLOY / "grafana/dashboard.py"], text=True)
    hint = "python deploy/grafana/dashboard.py >deploy/helm/hplm/files/dashboard.json"
    assert (CHART / "files/dashboard.json").read_text("utf-8") == printed, hint
    assert json.loads(made["data"]["hplm.json"]) == json.loads(printed)
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_door_has_its_files_and_reaches_router_and_gateway():
    objects = rendered(BUCKET, *KINDS["whole"], "--set=door.replicas=4", "--set=pool.most=6", release="blue")
    files = find(objects, "ConfigMap", "blue-door")["data"]
    assert files == {name: (DEPLOY / "haproxy" / name).read_text("utf-8") for name in ("haproxy.cfg", "door.lua")}
    given = {one["name"]: one["value"] for one in container(objects, "blue-door", "haproxy")["env"]}
    assert given.keys() <= {*re.findall(r"presetenv (\w+)", files["haproxy.cfg"]), "HPLM_OPENAI", "HPLM_MANAGER"}
    assert given["HPLM_AT_ONCE"] == str(64 * 6 // 4) and given["HPLM_BACKBONES"] == "minilm bert"
    ports = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in objects if one["kind"] == "Service"}
    for name in ("HPLM_HTTP", "HPLM_GRPC", "HPLM_OPENAI", "HPLM_MANAGER"):
        service, _, port = given[name].partition(":")
        assert ports[service] == int(port)
    url = next(word for word in words(container(objects, "blue-gateway", "gateway")) if word.startswith("--url="))
    assert url == f"--url={given['HPLM_GRPC']}"


def test_one_manager_writes_its_claim_and_no_other_begins_before_it_has_ended():
    objects = rendered(BUCKET, *KINDS["whole"], "--set=manager.arguments={--at-once=2}", "--set=manager.claim=ours")
    one, manager = spec(objects, "Deployment", "hplm-manager"), container(objects, "hplm-manager", "manager")
    assert (one["replicas"], one["strategy"]) == (1, {"type": "Recreate"})
    command, bound = parsed(words(manager)[1:])
    given = bound.arguments
    mounts = {mount["name"]: mount["mountPath"] for mount in manager["volumeMounts"]}
    assert command.__module__ == "manager.cli" and given["at_once"] == 2 and given["address"] == "0.0.0.0"
    assert [str(path) for path in given["store"]] == [f"{mounts['stores']}/minilm", f"{mounts['stores']}/bert"]
    assert mounts["stores"] in map(str, given["folder"].parents)
    assert workload(objects, "hplm-manager").ports == {"manager": given["port"]}
    assert f"--url={given['url']}" in words(container(objects, "hplm-gateway", "gateway"))
    page = manager["readinessProbe"]["httpGet"]["path"].removeprefix(f"{CONSOLE}/")
    assert (ROOT / "manager" / page).is_file()
    bare = rendered(BUCKET, *KINDS["whole"], "--set=manager.enabled=false")
    assert [port["name"] for port in spec(objects, "Service", "hplm-door")["ports"]] == ["door", "owners"]
    assert [port["name"] for port in spec(bare, "Service", "hplm-door")["ports"]] == ["door"]


def test_haproxy_takes_what_the_door_mounts(tmp_path):
    """Of a Secret of the type tls: the certificate in one file, and its key in another beside it."""
    objects = rendered(BUCKET, *KINDS["whole"])
    door, given = workload(objects, "hplm-door"), container(objects, "hplm-door", "haproxy")
    folders = {one["name"]: one["mountPath"] for one in given["volumeMounts"]}
    certificate, pair = (path.read_text("utf-8") for path in make_certificate(tmp_path))
    secret = {"tls.crt": certificate, "tls.key": pair.removeprefix(certificate)}
    for volume in door.pod["volumes"]:
        folder = tmp_path / folders[volume["name"]].lstrip("/")
        folder.mkdir(parents=True)
        items = volume.get("secret", {}).get("items", [])
        texts = {one["path"]: secret[one["key"]] for one in items} or find(objects, "ConfigMap", "hplm-door")["data"]
        for name, text in texts.items():
            (folder / name).write_text(text, "utf-8")
    here = {one["name"]: one["value"].replace("/etc/", f"{tmp_path}/etc/") for one in given["env"]}
    here = {name: re.sub(r"^hplm-\w+:", "127.0.0.1:", value) for name, value in here.items()}
    config = given["command"][-1].replace("/etc/", f"{tmp_path}/etc/")
    run(debian_program("haproxy"), "-c", "-f", config, env={**os.environ, **here})


def test_a_lasting_mirror_has_a_claim_for_each_replica():
    replicas = spec(rendered(BUCKET, *KINDS["whole"]), "StatefulSet", "hplm-all")
    (claim,) = replicas["volumeClaimTemplates"]
    (volume,) = [
        one for one in spec(rendered(BUCKET), "StatefulSet", "hplm-all")["template"]["spec"]["volumes"] if "ephemeral" in one
    ]
    assert claim["spec"] == volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert replicas["persistentVolumeClaimRetentionPolicy"]["whenScaled"] == "Delete"


def test_another_description_of_the_cluster_replaces_the_routers():
    def annotations(*options: str) -> dict[str, str]:
        return workload(rendered(BUCKET, *options), "hplm-router").annotations

    scaled = "--set=autoscaling.enabled=true"
    assert annotations(scaled) == annotations(scaled, "--set=pool.replicas=3") != annotations(scaled, "--set=pool.most=9")
    assert annotations() == annotations("--set=pool.most=9") != annotations("--set=pool.replicas=3")


def test_servers_have_the_documented_flags_and_all_that_read_the_registry_know_where_it_is(objects):
    flags = [word.replace("$(HPLM_ADMIN)", SECRET) for word in container(objects, *SERVER)["args"]]
    assert flags == docker_run()[1]
    reading = [own for one in workloads(objects) for own in one.containers if own["name"] not in ("haproxy", "gateway")]
    assert {own["name"] for own in reading} - {"manager"} == {"server", "write"}
    for own in reading:
        if own["name"] == "write":
            assert parsed(words(own)[1:])[0].__module__ == "hplm.cli.route" and "envFrom" not in own
            continue
        assert {"name": "HPLM_STATE", "value": "s3://bucket/hplm"} in own["env"]
        assert own["envFrom"] == [{"secretRef": {"name": "hplm-writer" if own["name"] == "manager" else "hplm-bucket"}}]
    (mirror,) = [one["value"] for one in container(objects, *SERVER)["env"] if one["name"] == "HPLM_MIRROR"]
    assert mirror in [mount["mountPath"] for mount in container(objects, *SERVER)["volumeMounts"]]


def test_probes_ask_every_model_and_have_the_time_and_the_secret_for_it(objects):
    """A liveness probe that waited for an answer would end a server whose engine is being started again."""
    server = container(objects, *SERVER)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, *arguments = server[name]["exec"]["command"]
        asked = parsed(arguments)[1].arguments
        assert program == "hplm" and arguments[0] == "watch" and not asked["models"]
        assert asked["alive"] if name == "livenessProbe" else asked["once"]
        assert server[name]["timeoutSeconds"] > asked["timeout"]
        assert asked["url"] == f"127.0.0.1:{workload(objects, SERVER[0]).ports['http']}"
    assert {variable["name"] for variable in server["env"]} >= {"HPLM_ADMIN", "HPLM_SERVER_ID"}
    drain = parsed(server["lifecycle"]["preStop"]["exec"]["command"][1:])[1].arguments
    drained = drain["seconds"] + drain["notice"]
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


@pytest.mark.parametrize("count", [2, 3])
def test_as_many_routers_run_as_divide_what_a_replica_may_get(count):
    """Of a StatefulSet, a pod is replaced when it has ended. A Deployment would begin the new one at once."""
    objects = rendered(BUCKET, f"--set=router.replicas={count}")
    routers = spec(objects, "StatefulSet", "hplm-router")
    writing = container(objects, "hplm-router", "write")
    assert parsed(words(writing)[1:])[1].arguments["routers"] == routers["replicas"] == count
    assert routers.get("updateStrategy", {"type": "RollingUpdate"}) == {"type": "RollingUpdate"}  # one pod at a time

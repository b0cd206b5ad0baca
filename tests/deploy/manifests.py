"""Kubernetes' objects: where they name each other, and what of that is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import kubernetes_validate
import yaml

from tests.deploy.image import DEPLOY
from tests.deploy.programs import helm, run
from tests.deploy.schemas import FIELDS, check

Object = dict[str, Any]
CHART = DEPLOY / "helm/hplm"
OLDEST, NEWEST = "1.27", "1.37"  # of Kubernetes
PATH = re.compile(r"(?<![\w.:/])/(?:models|mnt|mirror|journals|secrets|etc|run|tmp|dev)\b[\w./-]*")
DOCUMENTED = (DEPLOY.parent / "docs/cluster.md").read_text("utf-8")
BUCKET = "--set=registry.address=s3://bucket/hplm"


def rendered(*options: str, release: str = "hplm", namespace: str = "hplm") -> list[Object]:
    """Returns the objects that `helm install` would send."""
    return list(yaml.safe_load_all(_templates(release, "--namespace", namespace, *options)))


@cache
def _templates(*words: str) -> str:
    return run(helm(), "template", words[0], CHART, *words[1:])


def validate(one: Object, version: str = NEWEST) -> None:
    if one["kind"] in FIELDS:
        check(one)
    else:
        kubernetes_validate.validate(one, version, strict=True)


def made_by_the_operator() -> set[str]:
    """The secrets, their keys and the folder of the image that docs/cluster.md tells to make."""
    secrets = re.findall(r"create secret generic ([\w-]+)(.*)$", DOCUMENTED, re.MULTILINE)
    keys = {f"{name}/{key}" for name, rest in secrets for key in re.findall(r"--from-file=([\w-]+)", rest)}
    return keys | {name for name, _ in secrets} | set(re.findall(r"COPY model_repository (/\w+)", DOCUMENTED))


@dataclass(frozen=True)
class Workload:
    object: Object

    @property
    def name(self) -> str:
        return self.object["metadata"]["name"]

    @property
    def template(self) -> Object:
        return self.object["spec"]["template"]

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def pod(self) -> Object:
        return self.template["spec"]

    @property
    def containers(self) -> list[Object]:
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for one in self.pod["containers"] for port in one.get("ports", [])}


def find(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def workloads(objects: list[Object]) -> list[Workload]:
    return [Workload(one) for one in objects if one["kind"] in ("Deployment", "StatefulSet")]


def workload(objects: list[Object], name: str) -> Workload:
    (found,) = [one for one in workloads(objects) if one.name == name]
    return found


def container(objects: list[Object], of: str, name: str) -> Object:
    (found,) = [one for one in workload(objects, of).containers if one["name"] == name]
    return found


def words(container: Object) -> list[str]:
    """Returns the command line, as Kubernetes would start it."""
    return [*container.get("command", []), *container.get("args", [])]


def faults(objects: list[Object], outside: set[str]) -> Iterator[str]:
    """Yields what is named and does not exist. `outside`: what the operator makes."""
    have = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    if len(have) != len(objects):
        yield "two objects of one kind have the same name"
    for one in workloads(objects):
        yield from (f"{one.name}: {fault}" for fault in _faults_of_workload(one, have, outside))
    for (kind, name), one in have.items():
        yield from (f"{kind} {name}: {fault}" for fault in _faults_of_selectors(kind, one.get("spec", {}), objects))


def _faults_of_workload(one: Workload, have: dict[tuple[str, str], Object], outside: set[str]) -> Iterator[str]:
    spec = one.object["spec"]
    if "selector" in spec and not _selects(spec["selector"], one):
        yield "it does not select its own pods"
    if "serviceName" in spec and ("Service", spec["serviceName"]) not in have:
        yield f"there is no service {spec['serviceName']}"
    names = {volume["name"] for volume in one.pod["volumes"]}
    mounted = {mount["name"] for container in one.containers for mount in container["volumeMounts"]}
    yield from (f"volume {name} is mounted but not there, or the other way round" for name in names ^ mounted)
    for volume in one.pod["volumes"]:
        if "configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in have:
            yield f"there is no config map {volume['configMap']['name']}"
        if "persistentVolumeClaim" in volume and volume["persistentVolumeClaim"]["claimName"] not in outside:
            yield f"nobody makes the claim {volume['persistentVolumeClaim']['claimName']}"
    for container in one.containers:
        yield from (f"{container['name']}: {fault}" for fault in _faults_of_container(container, one, have, outside))


def _faults_of_container(own: Object, of: Workload, have: dict[tuple[str, str], Object], outside: set[str]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in of.pod["volumes"]}
    mounts = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in own["volumeMounts"]}
    said = [*words(own), *(variable["value"] for variable in own.get("env", []) if "value" in variable)]
    for path in {path for word in said for path in PATH.findall(word)}:
        folder = next((mount for mount in mounts if path == mount or path.startswith(f"{mount}/")), None)
        if folder is None and path not in outside:
            yield f"nothing is mounted at {path}"
        elif folder and path != folder:
            yield from _faults_of_file(path.removeprefix(f"{folder}/"), mounts[folder], have)
    for variable in own.get("env", []):
        secret = variable.get("valueFrom", {}).get("secretKeyRef")
        if secret and f"{secret['name']}/{secret['key']}" not in outside:
            yield f"nobody makes the key {secret['key']} of the secret {secret['name']}"
    for source in own.get("envFrom", []):
        if source["secretRef"]["name"] not in outside:
            yield f"nobody makes the secret {source['secretRef']['name']}"
    ports = {port["name"] for port in own.get("ports", [])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "tcpSocket" in own.get(probe, {}) and own[probe]["tcpSocket"]["port"] not in ports:
            yield f"{probe} asks a port that the container does not have"


def _faults_of_file(file: str, volume: Object, have: dict[tuple[str, str], Object]) -> Iterator[str]:
    if "configMap" in volume:
        config = have.get(("ConfigMap", volume["configMap"]["name"]), {"data": {}})
        if file not in config["data"]:
            yield f"the config map {volume['configMap']['name']} has no {file}"


def _faults_of_selectors(kind: str, spec: Object, objects: list[Object]) -> Iterator[str]:
    if kind == "Service":
        chosen = _chosen({"matchLabels": spec["selector"]}, objects)
        yield from _faults_of_ports(chosen, [port["targetPort"] for port in spec["ports"]])
    elif kind == "NetworkPolicy":
        chosen = _chosen(spec["podSelector"], objects)
        for rule in spec["ingress"]:
            yield from _faults_of_ports(chosen, [port["port"] for port in rule["ports"]])
            for peer in rule.get("from", []):
                if "podSelector" in peer and not _chosen(peer["podSelector"], objects):
                    yield f"no pod has the labels {peer['podSelector']['matchLabels']}"
    elif kind == "PodDisruptionBudget":
        yield from _faults_of_ports(_chosen(spec["selector"], objects), [])
    elif kind == "PodMonitor":
        chosen = _chosen(spec["selector"], objects)
        if not chosen:
            yield "it selects nothing"
        for one in chosen:
            yield from _faults_of_ports([one], [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]])
        labels = {label for one in chosen for label in one.labels}
        yield from (f"no label {name}" for name in spec["podTargetLabels"] if name not in labels)
    elif kind == "ScaledObject":
        target = spec["scaleTargetRef"]
        (scaled,) = [one for one in workloads(objects) if one.name == target["name"]] or [None]
        if scaled is None or (scaled.object["kind"], scaled.object["apiVersion"]) != (target["kind"], target["apiVersion"]):
            yield f"there is no {target['kind']} {target['name']}"
        elif "replicas" in scaled.object["spec"]:
            yield f"{target['name']} has a number of replicas, which each `kubectl apply` would set again"


def _faults_of_ports(chosen: list[Workload], ports: list[str]) -> Iterator[str]:
    if len(chosen) != 1:
        yield f"it selects {[one.name for one in chosen] or 'nothing'}"
    yield from (f"{one.name} has no port {port}" for one in chosen for port in ports if port not in one.ports)


def _chosen(selector: Object, objects: list[Object]) -> list[Workload]:
    return [one for one in workloads(objects) if _selects(selector, one)]


def _selects(selector: Object, one: Workload) -> bool:
    return selector["matchLabels"].items() <= one.labels.items()

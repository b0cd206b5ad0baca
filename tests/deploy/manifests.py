"""Objects of Kubernetes and of its extensions: which fields they may have, and what they name that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import yaml

from tests.deploy.image import DEPLOY, PAGES
from tests.deploy.programs import helm, run

Object = dict[str, Any]
CHART = DEPLOY / "helm/hplm"
OLDEST, NEWEST = "1.27", "1.37"  # of Kubernetes
PATH = re.compile(r"(?<![\w.:/])/(?:models|mnt|mirror|journals|secrets|etc|run|tmp|dev|input|work)\b[\w./-]*")
# Where kinds of objects say the labels of pods, and the names of these pods' ports.
SELECTING = {
    "Service": ("selector", "ports.*.targetPort"),
    "NetworkPolicy": ("podSelector.matchLabels", "ingress.*.ports.*.port"),
    "PodDisruptionBudget": ("selector.matchLabels",),
    "PodMonitor": ("selector.matchLabels", "podMetricsEndpoints.*.port"),
}
BUCKET = "--set=registry.address=s3://bucket/hplm"

TEXT, NUMBER, ANYTHING = '".+"', r"\d+", ".*"
ENDPOINT, MODEL = r"podMetricsEndpoints\[\]\.", r"predictor\.model\."
SCALING = r"advanced\.horizontalPodAutoscalerConfig\.behavior\.scale(Up|Down)\."
# By kind its version, and of each field below `spec` the values as JSON. Both are patterns; [] is a place of a list.
FIELDS = {
    "PrometheusRule": ("monitoring.coreos.com/v1", {r"groups\[\]\..+": ANYTHING}),  # promtool checks the rules
    "PodMonitor": ("monitoring.coreos.com/v1", {
        r"selector\.matchLabels\..+|podTargetLabels\[\]": TEXT,
        ENDPOINT + "interval": r'"\d+(ms|s|m|h)"',
        ENDPOINT + r"(port|(metricR|r)elabelings\[\]\.(targetLabel|sourceLabels\[\]|regex))": TEXT,
        ENDPOINT + r"metricRelabelings\[\]\.action": '"(drop|keep)"',
    }),
    "ScaledObject": ("keda.sh/v1alpha1", {  # of KEDA 2
        r"scaleTargetRef\.(name|apiVersion|kind)": TEXT,
        "pollingInterval|(min|max)ReplicaCount": NUMBER,
        SCALING + r"(stabilizationWindowSeconds|policies\[\]\.(value|periodSeconds))": NUMBER,
        SCALING + r"policies\[\]\.type": '"(Pods|Percent)"',
        r"triggers\[\]\.(type|metricType)": '"(prometheus|AverageValue|Value)"',
        r"triggers\[\]\.metadata\.(serverAddress|query|threshold|ignoreNullValues)": TEXT,
    }),
    "ServingRuntime": ("serving.kserve.io/v1alpha1", {  # of KServe. Its containers are checked as those of a pod
        r"annotations\..+|supportedModelFormats\[\]\.(name|version)": TEXT,
        r"multiModel|supportedModelFormats\[\]\.autoSelect": "true|false",
        r"protocolVersions\[\]": '"(v1|v2|grpc-v1|grpc-v2)"',
        r"(containers|volumes)\[\]\..+": ANYTHING,
    }),
    "RayJob": ("ray.io/v1", {  # of KubeRay 1.5. Its pods are checked as such
        r"entrypoint|rayClusterSpec\.(rayVersion|authOptions\.mode|workerGroupSpecs\[\]\.groupName)": TEXT,
        r"backoffLimit|ttlSecondsAfterFinished|rayClusterSpec\.workerGroupSpecs\[\]\.(r|minR|maxR)eplicas": NUMBER,
        "shutdownAfterJobFinishes": "true",
        r"rayClusterSpec\.headGroupSpec\.rayStartParams\.num-cpus": '"0"',
        r"rayClusterSpec\.workerGroupSpecs\[\]\.rayStartParams": "{}",
        r"rayClusterSpec\.(headGroupSpec|workerGroupSpecs\[\])\.template\.spec\..+": ANYTHING,
    }),
    "InferenceService": ("serving.kserve.io/v1beta1", {
        r"predictor\.(minReplicas|terminationGracePeriodSeconds|securityContext\.fsGroup)": NUMBER,
        MODEL + r"(modelFormat\.(name|version)|runtime|protocolVersion)": TEXT,
        MODEL + "storageUri": '"pvc://[a-z0-9-]+(/.*)?"',
    }),
}  # fmt: skip
# The fields that an object must have, where no other test reads them.
NEEDED = {
    "PrometheusRule": ("groups[].name", "groups[].rules[].expr"),
    "ScaledObject": ("triggers[].type", "triggers[].metadata.query", "triggers[].metadata.threshold"),
}


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
    """The secrets, their keys, the claim and the folder of the image that docs/kubernetes.md tells to make."""
    secrets = re.findall(r"create secret (?:generic|tls) ([\w-]+)(.*)$", PAGES["kubernetes"], re.MULTILINE)
    keys = {f"{name}/{key}" for name, rest in secrets for key in re.findall(r"--from-file=([\w-]+)", rest)}
    claims = set(re.findall(r"a claim `([\w-]+)`", PAGES["kubernetes"]))
    return keys | claims | {name for name, _ in secrets} | set(re.findall(r"COPY model_repository (/\w+)", PAGES["kubernetes"]))


class Workload:
    """A deployment or a set, and what lies deep in it."""

    def __init__(self, given: Object) -> None:
        self.object, self.name = given, given["metadata"]["name"]
        template = given["spec"]["template"]
        self.labels, self.annotations = template["metadata"]["labels"], template["metadata"].get("annotations")
        self.pod = template["spec"]
        self.containers = [*self.pod.get("initContainers", []), *self.pod["containers"]]
        self.ports = {port["name"]: port["containerPort"] for own in self.containers for port in own.get("ports", [])}


def find(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def workloads(objects: list[Object]) -> list[Workload]:
    return [Workload(one) for one in objects if one["kind"] in ("Deployment", "StatefulSet", "Job")]


def workload(objects: list[Object], name: str) -> Workload:
    (found,) = [one for one in workloads(objects) if one.name == name]
    return found


def container(objects: list[Object], of: str, name: str) -> Object:
    (found,) = [one for one in workload(objects, of).containers if one["name"] == name]
    return found


def words(container: Object) -> list[str]:
    """Returns the command line, as Kubernetes would start it."""
    return [*container.get("command", []), *container.get("args", [])]


def at(of: Any, path: str) -> list[Any]:
    """Returns what lies at a path such as `volumes.*.name`, where * is each of a list. Nothing if a name is missing."""
    found = [of]
    for name in path.split("."):
        found = [one for own in found for one in (own if name == "*" else [own[name]] if name in own else [])]
    return found


def faults(objects: list[Object], outside: set[str]) -> Iterator[str]:
    """Yields what is named and does not exist. `outside`: what the operator makes."""
    have = [f"{one['kind']} {one['metadata']['name']}" for one in objects]
    if len(set(have)) != len(have):
        yield "two objects of one kind have the same name"
    files = [f"{one['metadata']['name']}/{file}" for one in objects if one["kind"] == "ConfigMap" for file in one["data"]]
    for one in workloads(objects):
        volumes = [*at(one.pod, "volumes.*.name"), *at(one.object, "spec.volumeClaimTemplates.*.metadata.name")]
        own = [f"volume {name}" for name in volumes] + [f"port {name}" for name in one.ports]
        yield from (
            f"{one.name}: there is no {thing}" for thing in _named_by(one) if thing not in {*have, *files, *own, *outside}
        )
        mounted = {name for own in one.containers for name in at(own, "volumeMounts.*.name")}
        yield from (f"{one.name}: nothing mounts volume {name}" for name in volumes if name not in mounted)
        if not all(labels.items() <= one.labels.items() for labels in at(one.object, "spec.selector.matchLabels")):
            yield f"{one.name}: it does not select its own pods"
    for one, name in zip(objects, have, strict=True):
        yield from (f"{name}: {fault}" for fault in _faults_of_selectors(one["kind"], one.get("spec", {}), objects))


def _named_by(one: Workload) -> Iterator[str]:
    """Yields what a workload names: objects, volumes, ports, secrets and their keys, and files of config maps."""
    yield from (f"Service {name}" for name in at(one.object, "spec.serviceName"))
    yield from (f"ConfigMap {name}" for name in at(one.pod, "volumes.*.configMap.name"))
    yield from at(one.pod, "volumes.*.persistentVolumeClaim.claimName")
    yield from at(one.pod, "volumes.*.secret.secretName")
    for own in one.containers:
        yield from (f"volume {name}" for name in at(own, "volumeMounts.*.name"))
        yield from (f"{key['name']}/{key['key']}" for key in at(own, "env.*.valueFrom.secretKeyRef"))
        yield from at(own, "envFrom.*.secretRef.name")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            yield from (f"port {name}" for name in [*at(own, f"{probe}.tcpSocket.port"), *at(own, f"{probe}.httpGet.port")])
        maps = {volume["name"]: volume["configMap"]["name"] for volume in one.pod.get("volumes", []) if "configMap" in volume}
        mounts = {mount["mountPath"]: maps.get(mount["name"]) for mount in own.get("volumeMounts", [])}
        for path in {path for word in [*words(own), *at(own, "env.*.value")] for path in PATH.findall(word)}:
            folder = next((mount for mount in mounts if path == mount or path.startswith(f"{mount}/")), None)
            if folder is None:
                yield path
            elif mounts[folder] and path != folder:
                yield f"{mounts[folder]}/{path.removeprefix(f'{folder}/')}"


def _faults_of_selectors(kind: str, spec: Object, objects: list[Object]) -> Iterator[str]:
    if kind in SELECTING:
        (labels,), ports = at(spec, SELECTING[kind][0]), [port for path in SELECTING[kind][1:] for port in at(spec, path)]
        chosen = _chosen(labels, objects)
        if not chosen or (len(chosen) > 1 and kind != "PodMonitor"):
            yield f"it selects {[one.name for one in chosen] or 'nothing'}"
        monitored = [one for one in chosen if not ports or kind != "PodMonitor" or set(ports) & one.ports.keys()] or chosen
        yield from (f"{one.name} has no port {port}" for one in monitored for port in ports if port not in one.ports)
        peers = at(spec, "ingress.*.from.*.podSelector.matchLabels")
        yield from (f"no pod has the labels {labels}" for labels in peers if not _chosen(labels, objects))
        known = {label for one in chosen for label in one.labels}
        yield from (f"no label {name}" for name in at(spec, "podTargetLabels.*") if name not in known)
    elif kind == "ScaledObject":
        target = spec["scaleTargetRef"]
        (scaled,) = [one for one in workloads(objects) if one.name == target["name"]] or [None]
        if scaled is None or (scaled.object["kind"], scaled.object["apiVersion"]) != (target["kind"], target["apiVersion"]):
            yield f"there is no {target['kind']} {target['name']}"
        elif "replicas" in scaled.object["spec"]:
            yield f"{target['name']} has a number of replicas, which each `kubectl apply` would set again"


def _chosen(labels: Object, objects: list[Object]) -> list[Workload]:
    return [one for one in workloads(objects) if labels.items() <= one.labels.items()]


def check(one: dict[str, Any]) -> None:
    """Fails if an object lacks a field, or has a field or a value that it may not have."""
    version, fields = FIELDS[one["kind"]]
    assert one["apiVersion"] == version and one.keys() == {"apiVersion", "kind", "metadata", "spec"}
    values = list(leaves(one["spec"]))
    for needed in NEEDED.get(one["kind"], ()):
        assert any(path.startswith(needed) for path, _ in values), f"{one['kind']} lacks {needed}"
    for path, value in values:
        (allowed,) = [pattern for field, pattern in fields.items() if re.fullmatch(field, path)] or [None]
        assert allowed, f"{one['kind']} has no field {path}"
        assert re.fullmatch(allowed, json.dumps(value)), f"{path} may not be {value!r}"


def leaves(of: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values that have no parts, each with its path."""
    if isinstance(of, dict) and of:
        for name, one in of.items():
            yield from leaves(one, f"{path}.{name}".lstrip("."))
    elif isinstance(of, list) and of:
        for one in of:
            yield from leaves(one, f"{path}[]")
    else:
        yield path, of

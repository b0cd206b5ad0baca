"""The manifests of deploy/kserve, as the pod that KServe makes of them: the server and the follower of deploy/kubernetes."""

from __future__ import annotations

import copy

import yaml

from tests.deploy.image import DEPLOY
from tests.deploy.manifests import BASE, Object, built, container, faults, workload
from tests.deploy.test_kubernetes import made_by_the_operator, validate

RUNTIME, SERVICE = (yaml.safe_load((DEPLOY / "kserve" / file).read_text("utf-8")) for file in ("runtime.yaml", "minilm.yaml"))


def pod_of_kserve() -> Object:
    """KServe puts both descriptions together, and mounts the claim of `storageUri` into the server."""
    runtime, predictor = copy.deepcopy(RUNTIME["spec"]), copy.deepcopy(SERVICE["spec"]["predictor"])
    labels = {**predictor["labels"], "app": "isvc.minilm-predictor"}
    claim = {"claimName": predictor["model"]["storageUri"].removeprefix("pvc://"), "readOnly": True}
    pod = {name: runtime[name] for name in ("containers", "volumes")}
    pod |= {name: value for name, value in predictor.items() if name not in ("minReplicas", "labels", "model")}
    pod["volumes"].append({"name": "kserve-pvc-source", "persistentVolumeClaim": claim})
    pod["containers"][0]["volumeMounts"].append({"name": "kserve-pvc-source", "mountPath": "/mnt/models", "readOnly": True})
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "minilm-predictor"},
        "spec": {
            "selector": {"matchLabels": {"app": labels["app"]}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def test_both_descriptions_are_valid_fit_and_start_what_kubernetes_starts_in_a_pod_in_which_everything_exists():
    base, deployment = built(BASE), pod_of_kserve()
    for one in (RUNTIME, SERVICE, deployment):
        validate(one)
    assert not list(faults([*base, deployment], made_by_the_operator()))
    model, offered = SERVICE["spec"]["predictor"]["model"], RUNTIME["spec"]
    assert model["runtime"] == RUNTIME["metadata"]["name"] and model["protocolVersion"] in offered["protocolVersions"]
    formats = [{"name": one["name"], "version": one["version"]} for one in offered["supportedModelFormats"]]
    assert model["modelFormat"] in formats
    ours, its = container(base, "hplm-all", "server"), container([deployment], "minilm-predictor", "kserve-container")
    assert [word.replace("/mnt/models", "/models") for word in its["args"]] == ours["args"]
    for name in ("command", "env", "readinessProbe", "livenessProbe", "lifecycle", "resources"):
        assert its[name] == ours[name]
    for name in ("follow", "first-copy"):
        its, ours = container([deployment], "minilm-predictor", name), container(base, "hplm-all", name)
        assert all(its[part] == ours[part] for part in ("command", "args", "env", "volumeMounts", "resources"))
    pods = [workload([deployment], "minilm-predictor").pod, workload(base, "hplm-all").pod]
    assert len({pod["terminationGracePeriodSeconds"] for pod in pods}) == 1
    (policy,) = [one for one in base if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "hplm-manager")]
    wanted = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert wanted.items() <= workload([deployment], "minilm-predictor").labels.items(), "the manager lets its follower through"

"""The manifests of deploy/kserve, as the pod that KServe makes of them: the same server as the chart's."""

from __future__ import annotations

import copy

import yaml

from tests.deploy.image import DEPLOY
from tests.deploy.manifests import BUCKET, Object, container, faults, made_by_the_operator, rendered, validate, workload

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

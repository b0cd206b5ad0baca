"""Schemas of objects that are not Kubernetes' own, as far as deploy/ uses them: no other field may appear."""

from __future__ import annotations

from typing import Any

LABELS = {"*": str}
_NAMES = {str: "string", dict: "object", list: "array", bool: "boolean", int: "integer"}


def schema(shape: Any) -> dict[str, Any]:
    """Returns a JSON schema. The shape of an object has its fields and no others: a name with ? may be missing, * is any name.

    [X] is a list of X that is not empty, a text is a pattern, a tuple has the possible texts, a range the possible integers.
    """
    if isinstance(shape, dict):
        fields = {name.rstrip("?"): schema(one) for name, one in shape.items()}
        needed = [name for name in fields if name in shape and name != "*"]
        return {"type": "object", "additionalProperties": fields.pop("*", False), "required": needed, "properties": fields}
    if isinstance(shape, list):
        return {"type": "array", "minItems": 1, "items": schema(shape[0])}
    if isinstance(shape, str):
        return {"type": "string", "pattern": f"^({shape})"}
    if isinstance(shape, tuple):
        return {"enum": list(shape)}
    if isinstance(shape, range):
        return {"type": "integer", "minimum": shape.start, "maximum": shape.stop}
    return {"type": _NAMES[shape]}


def _whole(version: str, spec: Any) -> dict[str, Any]:
    return schema({"apiVersion": (version,), "kind": str, "metadata": dict, "spec": spec})


_MANY = 1 << 31
_RULE = {
    "expr": str,
    "alert?": str,
    "record?": "[a-zA-Z_:][a-zA-Z0-9_:]*$",
    "for?": str,
    "labels?": LABELS,
    "annotations?": LABELS,
}
_ENDPOINT = {
    "port": str, "path?": str, "interval?": "[0-9]+(ms|s|m|h)$",
    "relabelings?": [{"targetLabel": str, "sourceLabels?": [str]}],
    "metricRelabelings?": [{"action": ("drop", "keep"), "sourceLabels": [str], "regex": str}],
}  # fmt: skip
_SCALING = {
    "stabilizationWindowSeconds?": range(3600), "selectPolicy?": ("Max", "Min", "Disabled"),
    "policies?": [{"type": ("Pods", "Percent"), "value": range(1, _MANY), "periodSeconds": range(1, 1800)}],
}  # fmt: skip
_QUERY = {"serverAddress": str, "query": str, "threshold": str, "ignoreNullValues?": str}
_FORMAT = {"name": str, "version?": str}

SCHEMAS = {
    "PrometheusRule": _whole(  # of the operator of Prometheus, like PodMonitor
        "monitoring.coreos.com/v1", {"groups": [{"name": str, "interval?": str, "rules": [_RULE]}]}
    ),
    "PodMonitor": _whole(
        "monitoring.coreos.com/v1",
        {"selector": {"matchLabels": LABELS}, "podTargetLabels?": [str], "podMetricsEndpoints": [_ENDPOINT]},
    ),
    "ScaledObject": _whole(  # of KEDA 2
        "keda.sh/v1alpha1",
        {
            "scaleTargetRef": {"name": str, "apiVersion?": str, "kind?": str},
            "pollingInterval?": range(1, _MANY),
            "minReplicaCount?": range(_MANY),
            "maxReplicaCount?": range(1, _MANY),
            "advanced?": {"horizontalPodAutoscalerConfig?": {"behavior?": {"scaleUp?": _SCALING, "scaleDown?": _SCALING}}},
            "triggers": [{"type": ("prometheus",), "metricType?": ("AverageValue", "Value"), "metadata": _QUERY}],
        },
    ),
    "ServingRuntime": _whole(  # of KServe. Its containers are checked as those of a pod
        "serving.kserve.io/v1alpha1",
        {
            "annotations?": LABELS,
            "multiModel?": bool,
            "protocolVersions?": [("v1", "v2", "grpc-v1", "grpc-v2")],
            "supportedModelFormats": [{**_FORMAT, "autoSelect?": bool}],
            "containers": list,
            "volumes?": list,
        },
    ),
    "InferenceService": _whole(
        "serving.kserve.io/v1beta1",
        {
            "predictor": {
                "minReplicas?": range(_MANY),
                "terminationGracePeriodSeconds?": range(_MANY),
                "securityContext?": dict,
                "model": {
                    "modelFormat": _FORMAT, "runtime?": str, "protocolVersion?": str, "storageUri": "pvc://[a-z0-9-]+(/|$)",
                },
            }
        },
    ),
}  # fmt: skip

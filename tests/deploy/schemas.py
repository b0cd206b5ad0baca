"""Schemas of objects that are not Kubernetes' own, as far as deploy/ uses them: no other field may appear."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT, OBJECT, LIST, FLAG = ({"type": name} for name in ("string", "object", "array", "boolean"))
TEXTS = {"type": "array", "items": TEXT}
LABELS = {"type": "object", "additionalProperties": TEXT}


def closed(required: str, **fields: Schema) -> Schema:
    """Returns the schema of an object with these fields and no others."""
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": fields}


def several(item: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": item}


def number(least: int, most: float = float("inf")) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def matching(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def whole(version: str, spec: Schema) -> Schema:
    return closed("apiVersion kind metadata spec", apiVersion=one_of(version), kind=TEXT, metadata=OBJECT, spec=spec)


_RULE = closed(
    "expr",
    **{"alert": TEXT, "expr": TEXT, "for": TEXT, "labels": LABELS, "annotations": LABELS},
    record=matching("^[a-zA-Z_:][a-zA-Z0-9_:]*$"),
) | {"oneOf": [{"required": ["alert"]}, {"required": ["record"]}]}
_ENDPOINT = closed(
    "port",
    port=TEXT,
    path=TEXT,
    interval=matching("^[0-9]+(ms|s|m|h)$"),
    relabelings=several(closed("targetLabel", sourceLabels=TEXTS, targetLabel=TEXT)),
    metricRelabelings=several(
        closed("action sourceLabels regex", action=one_of("drop", "keep"), sourceLabels=TEXTS, regex=TEXT)
    ),
)
_SCALING = closed(
    "",
    stabilizationWindowSeconds=number(0, 3600),
    selectPolicy=one_of("Max", "Min", "Disabled"),
    policies=several(
        closed("type value periodSeconds", type=one_of("Pods", "Percent"), value=number(1), periodSeconds=number(1, 1800))
    ),
)
_QUERY = closed("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT, ignoreNullValues=TEXT)
_FORMAT = closed("name", name=TEXT, version=TEXT, autoSelect=FLAG)
_MODEL = closed(
    "modelFormat storageUri",
    runtime=TEXT,
    protocolVersion=TEXT,
    storageUri=matching("^pvc://[a-z0-9-]+(/|$)"),
    modelFormat=closed("name", name=TEXT, version=TEXT),
)

SCHEMAS = {
    "PrometheusRule": whole(  # of the operator of Prometheus, like PodMonitor
        "monitoring.coreos.com/v1",
        closed("groups", groups=several(closed("name rules", name=TEXT, interval=TEXT, rules=several(_RULE)))),
    ),
    "PodMonitor": whole(
        "monitoring.coreos.com/v1",
        closed(
            "selector podMetricsEndpoints",
            selector=closed("matchLabels", matchLabels=LABELS),
            podTargetLabels=TEXTS,
            podMetricsEndpoints=several(_ENDPOINT),
        ),
    ),
    "ScaledObject": whole(  # of KEDA 2
        "keda.sh/v1alpha1",
        closed(
            "scaleTargetRef triggers",
            scaleTargetRef=closed("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
            pollingInterval=number(1),
            minReplicaCount=number(0),
            maxReplicaCount=number(1),
            advanced=closed(
                "",
                horizontalPodAutoscalerConfig=closed("", behavior=closed("", scaleUp=_SCALING, scaleDown=_SCALING)),
            ),
            triggers=several(
                closed("type metadata", type=one_of("prometheus"), metricType=one_of("AverageValue", "Value"), metadata=_QUERY)
            ),
        ),
    ),
    "ServingRuntime": whole(  # of KServe. Its containers are checked as those of a pod
        "serving.kserve.io/v1alpha1",
        closed(
            "supportedModelFormats containers",
            annotations=LABELS,
            multiModel=FLAG,
            protocolVersions=several(one_of("v1", "v2", "grpc-v1", "grpc-v2")),
            supportedModelFormats=several(_FORMAT),
            containers={"type": "array", "contains": {"properties": {"name": one_of("kserve-container")}}},
            volumes=LIST,
        ),
    ),
    "InferenceService": whole(
        "serving.kserve.io/v1beta1",
        closed(
            "predictor",
            predictor=closed(
                "model",
                minReplicas=number(0),
                terminationGracePeriodSeconds=number(0),
                securityContext=OBJECT,
                model=_MODEL,
            ),
        ),
    ),
}

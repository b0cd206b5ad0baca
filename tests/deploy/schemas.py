"""Fields of objects that are not Kubernetes' own, as far as deploy/ uses them: no other field may appear."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

TEXT, NUMBER, ANYTHING = '".+"', r"\d+", ".*"
ENDPOINT, SCALING, MODEL = (
    *(r"podMetricsEndpoints\[\]\.", r"advanced\.horizontalPodAutoscalerConfig\.behavior\.scale(Up|Down)\."),
    r"predictor\.model\.",
)
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

"""Schemas of the custom resources that the manifests use, of no more than the fields that they use, by the operators'
documentation: a field that is not here is refused, so who adds one looks it up."""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string", "minLength": 1}
DURATION = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}
COUNT = {"type": "integer", "minimum": 0}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {"type": "object", "required": ["name"]}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others; `required` names some, separated by blanks."""
    return {"type": "object", "required": required.split(), "additionalProperties": False, "properties": properties}


def resource(spec: Any) -> dict[str, Any]:
    """A custom resource with this `spec`."""
    return closed("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)


def listed(item: Any) -> dict[str, Any]:
    """A list with at least one of these."""
    return {"type": "array", "items": item, "minItems": 1}


SELECTOR = closed(
    "",
    matchLabels=LABELS,
    matchExpressions=listed(
        closed("key operator", key=TEXT, operator={"enum": ["In", "NotIn", "Exists"]}, values=listed(TEXT))
    ),
)
ISSUER = {
    "oneOf": [
        closed("selfSigned", selfSigned={"type": "object", "maxProperties": 0}),
        closed("ca", ca=closed("secretName", secretName=TEXT)),
    ]
}
CERTIFICATE = closed(
    "secretName issuerRef",
    secretName=TEXT,
    isCA={"type": "boolean"},
    commonName={"type": "string", "maxLength": 64},
    dnsNames=listed(TEXT),
    usages=listed({"enum": ["digital signature", "server auth", "client auth"]}),
    duration=DURATION,
    renewBefore=DURATION,
    privateKey=closed(
        "algorithm",
        algorithm={"const": "ECDSA"},
        size={"enum": [256, 384]},
        rotationPolicy={"enum": ["Always", "Never"]},
    ),
    issuerRef=closed("name", group={"const": "cert-manager.io"}, kind={"const": "Issuer"}, name=TEXT),
)
POD_MONITOR = closed(
    "selector podMetricsEndpoints",
    selector=SELECTOR,
    podMetricsEndpoints=listed(closed("port", port=TEXT, path={"type": "string", "pattern": "^/"}, interval=DURATION)),
    podTargetLabels=listed(TEXT),
)
RULE = closed(
    "expr",
    alert=TEXT,
    record=TEXT,
    expr={"type": ["string", "integer"]},
    labels=LABELS,
    annotations=LABELS,
    **{"for": DURATION, "keep_firing_for": DURATION},
)
PROMETHEUS_RULE = closed(
    "groups", groups=listed(closed("name rules", name=TEXT, interval=DURATION, rules=listed(RULE)))
)
SCALING = closed(
    "",
    stabilizationWindowSeconds=COUNT,
    policies=listed(
        closed("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT)
    ),
)
SCALED_OBJECT = closed(
    "scaleTargetRef triggers",
    scaleTargetRef=closed("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    fallback=closed(
        "failureThreshold replicas",
        failureThreshold=COUNT,
        replicas=COUNT,
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
    ),
    advanced=closed(
        "", horizontalPodAutoscalerConfig=closed("", behavior=closed("", scaleUp=SCALING, scaleDown=SCALING))
    ),
    triggers=listed(
        closed(
            "type metadata",
            type={"const": "prometheus"},
            name=TEXT,
            metricType={"enum": ["AverageValue", "Value"]},
            # KEDA takes only texts here.
            metadata=closed("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT),
        )
    ),
)
LEADER_WORKER_SET = closed(
    "replicas leaderWorkerTemplate",
    replicas=COUNT,
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    rolloutStrategy=closed(
        "type",
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=closed("", maxUnavailable=COUNT, maxSurge=COUNT),
    ),
    leaderWorkerTemplate=closed(
        "workerTemplate",
        size=COUNT,
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
        leaderTemplate=closed("metadata spec", metadata={"type": "object"}, spec={"type": "object"}),
        workerTemplate=closed("metadata spec", metadata={"type": "object"}, spec={"type": "object"}),
    ),
)
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
ROUTE_PARENT = closed("name", name=TEXT, namespace=TEXT, sectionName=TEXT, group=TEXT, kind=TEXT, port=PORT)
GATEWAY = closed(
    "gatewayClassName listeners",
    gatewayClassName=TEXT,
    listeners=listed(
        closed(
            "name protocol port",
            name=TEXT,
            protocol={"enum": ["HTTP", "HTTPS", "TLS"]},
            port=PORT,
            hostname=TEXT,
            tls=closed(
                "certificateRefs",
                mode={"enum": ["Terminate", "Passthrough"]},
                certificateRefs=listed(closed("name", group=TEXT, kind=TEXT, name=TEXT, namespace=TEXT)),
            ),
            allowedRoutes=closed("", namespaces=closed("from", **{"from": {"enum": ["All", "Same", "Selector"]}})),
        )
    ),
)
HTTP_ROUTE = closed(
    "parentRefs rules",
    parentRefs=listed(ROUTE_PARENT),
    hostnames=listed(TEXT),
    rules=listed(
        closed(
            "backendRefs",
            matches=listed(
                closed("path", path=closed("type value", type={"enum": ["PathPrefix", "Exact"]}, value=TEXT))
            ),
            timeouts=closed("", request=DURATION, backendRequest=DURATION),
            backendRefs=listed(closed("name", group=TEXT, kind=TEXT, name=TEXT, port=PORT)),
        )
    ),
)
INFERENCE_POOL = closed(
    "selector targetPorts endpointPickerRef",
    selector=closed("matchLabels", matchLabels=LABELS),
    targetPorts={**listed(closed("number", number=PORT)), "maxItems": 8},
    endpointPickerRef=closed(
        "name port",
        group=TEXT,
        kind=TEXT,
        name=TEXT,
        port=closed("number", number=PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)
SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("cert-manager.io/v1", "Issuer"): resource(ISSUER),
    ("cert-manager.io/v1", "Certificate"): resource(CERTIFICATE),
    ("monitoring.coreos.com/v1", "PodMonitor"): resource(POD_MONITOR),
    ("monitoring.coreos.com/v1", "PrometheusRule"): resource(PROMETHEUS_RULE),
    ("keda.sh/v1alpha1", "ScaledObject"): resource(SCALED_OBJECT),
    ("gateway.networking.k8s.io/v1", "Gateway"): resource(GATEWAY),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): resource(HTTP_ROUTE),
    ("inference.networking.k8s.io/v1", "InferencePool"): resource(INFERENCE_POOL),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): resource(LEADER_WORKER_SET),
}

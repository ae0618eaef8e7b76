"""The Helm chart: it renders to the objects of the overlays, releases share no name, and values are checked."""

from __future__ import annotations

import copy
import functools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.cli.flags import ADDRESS_VARIABLE, API_KEY_VARIABLE, CA_FILE_VARIABLE, SERVER_NAME_VARIABLE
from inflight.cli.main import COMMANDS
from inflight.common.settings import words_of
from tests.dashboards.queries import selectors_of
from tests.deploy.chart import CHART, FOLDER, run_helm, template
from tests.deploy.manifests import OVERLAYS, WORKLOADS, Object, matches, needs_kubectl, overlay, pod_labels
from tests.deploy.test_manifests import SETTINGS
from tests.deploy.test_schemas import NEWEST, check, overlay_of, schemas_read_once
from tests.support.examples import examples

__all__ = ["schemas_read_once"]  # a fixture

CLIENT_VARIABLES = {ADDRESS_VARIABLE, API_KEY_VARIABLE, CA_FILE_VARIABLE, SERVER_NAME_VARIABLE}
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
MODEL = {"pools": {"main": {"model": "/models/m"}}}
MONITORED = {**MODEL, "monitoring": {"enabled": True}}
EVERYTHING = {
    **MODEL,
    "tls": {"certManager": True},
    "redis": {"mode": "sentinel"},
    "monitoring": {"enabled": True, "dashboards": {"enabled": True}},
    "ingress": {"enabled": True, "host": "llm.example.org", "tlsSecret": "public"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "models": {"download": {"enabled": True, "from": "hf://org/m@main", "to": "/models/m"}},
    "executor": {"autoscaling": {"by": "keda"}},
    "router": {"autoscaling": {"enabled": True}},
    "gateway": {"autoscaling": {"enabled": True}},
}

# Values of what only the chart has.
WITHOUT_OVERLAY = ("vllm",)

# What is to differ. `normal` removes it from both sides.
DROPPED = {
    "namespace",  # helm adds it when it installs
    "app.kubernetes.io/instance",  # names the release
    "app_kubernetes_io_instance",  # the same of metrics and alerts
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/version",
    "helm.sh/chart",
    "helm.sh/resource-policy",  # keeps the claim when the release is uninstalled
}
HASH = re.compile(r"((?:blue-)?inflight-(?:router|gateway|executor|model|redis)(?:-small|-large)?)-[a-z0-9]{10}")
IN_QUERIES = ',app_kubernetes_io_instance="inflight"'
# The default policies apply to the release's pods; in an overlay to all of the namespace, which is its own.
PODS_OF_THE_RELEASE = {"matchLabels": {"app.kubernetes.io/name": "inflight"}}


def normal(objects: Iterable[Object]) -> dict[tuple[str, str], Any]:
    """Returns objects by kind and name, without what is to differ, Secrets, the Namespace and the release's tests."""
    found = [_normal(copy.deepcopy(one)) for one in objects if one["kind"] not in ("Namespace", "Secret")]
    for one in found:
        metadata = one["metadata"]
        # Own labels of objects select nothing.
        metadata.get("labels", {}).pop("app.kubernetes.io/name", None)
        if one["kind"] == "ConfigMap":
            metadata.get("labels", {}).pop("inflight-pool", None)
            if "INFLIGHT_MODEL" in one["data"]:  # values are maps, which have no order
                one["data"]["INFLIGHT_MODEL"] = sorted(one["data"]["INFLIGHT_MODEL"].split(","))
        if one["kind"] == "PriorityClass":
            metadata["name"] = metadata["name"].removeprefix("inflight.")
        for key in ("labels", "annotations"):
            if not metadata.get(key, True):
                del metadata[key]
    return {(one["kind"], one["metadata"]["name"]): one for one in found if one["metadata"]["name"] != "inflight-test"}


def _normal(value: Any) -> Any:
    if isinstance(value, list):
        return [_normal(entry) for entry in value if entry != "app.kubernetes.io/instance"]
    if isinstance(value, str):
        renamed = HASH.fullmatch(value)
        return renamed[1] if renamed else value.replace(IN_QUERIES, "").strip()
    if not isinstance(value, Mapping):
        return value
    result = {key: _normal(entry) for key, entry in value.items() if key not in DROPPED}
    if result.get("podSelector") == PODS_OF_THE_RELEASE:
        result["podSelector"] = {}
    if "priorityClassName" in result:
        result["priorityClassName"] = result["priorityClassName"].removeprefix("inflight.")
    if "volumes" in result:
        result["volumes"].sort(key=lambda volume: volume["name"])
    for key in ("annotations", "labels", "selector"):
        if result.get(key) in ({}, {"matchLabels": {}}):
            del result[key]
    return result


def names(objects: Iterable[Object]) -> set[tuple[str, str]]:
    return {(one["kind"], one["metadata"]["name"]) for one in objects}


def named(objects: Iterable[Object], kind: str, name: str) -> Object:
    (found,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod_specs(values: Mapping[str, Any]) -> dict[str, Any]:
    """The pods' templates of a release `inflight`, by the names of their workloads."""
    return {one["metadata"]["name"]: one["spec"]["template"] for one in template(values) if one["kind"] in WORKLOADS}


def test_values_files_and_defaults_are_valid() -> None:
    validator = jsonschema.Draft7Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    validator.validate(DEFAULTS)
    files = sorted((FOLDER / "values").iterdir())
    assert [file.stem for file in files] == sorted([*OVERLAYS, *WITHOUT_OVERLAY])
    for file in files:
        validator.validate(yaml.safe_load(file.read_text()))


def test_every_value_has_a_default_that_the_documentation_of_values_shows() -> None:
    def keys(schema: Mapping[str, Any]) -> set[str]:
        return set(schema["properties"]) - {"global", "replicas", *DEFAULTS["defaults"]}

    assert keys(SCHEMA) == set(DEFAULTS) - {"defaults"} | {"defaults"}
    for name in ("router", "gateway", "redis", "models", "monitoring", "networkPolicy", "ingress", "httpRoute"):
        assert keys(SCHEMA["properties"][name]) == set(DEFAULTS[name]) - {"replicas"}
    assert keys(SCHEMA["$defs"]["pool"]) == set(DEFAULTS["executor"]) - {"replicas"}
    assert set(SCHEMA["properties"]["defaults"]["properties"]) == set(DEFAULTS["defaults"])


def test_linked_sources_are_there() -> None:
    for link in (CHART / "source").rglob("*"):
        assert link.exists(), link


@pytest.mark.slow
@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_chart_renders_to_the_objects_of_the_overlay(name: str) -> None:
    chart, kustomize = normal(template(FOLDER / "values" / f"{name}.yaml")), normal(overlay(name).objects)
    assert set(chart) == set(kustomize)
    for key, one in kustomize.items():
        assert chart[key] == one


def claim_of(name: str, **more: bool) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name, **more}}


PLAIN: dict[str, Any] = {
    "auth": {"enabled": False},
    "podCosts": {"enabled": False},
    "pools": {"main": {"model": "/models/smollm2-135m-instruct"}},
}


@pytest.mark.slow
@needs_kubectl
@pytest.mark.parametrize(
    ("component", "values"),
    [
        ("adapter-pvc", {"executor": {"adapters": {"volume": claim_of("inflight-adapters", readOnly=True)}}}),
        ("cache-pvc", {"executor": {"cache": {"volume": claim_of("inflight-cache")}}}),
        ("external-redis", {"redis": {"mode": "external"}}),
    ],
)
def test_chart_renders_to_the_objects_of_a_component_that_no_overlay_has(
    component: str, values: dict[str, Any]
) -> None:
    with overlay_of("model-pvc", component) as objects:
        pass
    chart, kustomize = normal(template(PLAIN | values)), normal(objects)
    claims = {key for key in kustomize if key[0] == "PersistentVolumeClaim" and key not in chart}
    assert set(chart) == set(kustomize) - claims  # the chart is told the claims of caches and adapters
    for key, one in chart.items():
        assert one == kustomize[key]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OVERLAYS, *WITHOUT_OVERLAY])
def test_helm_finds_no_fault(name: str) -> None:
    linted = run_helm("lint", "--strict", str(CHART), "--values", str(FOLDER / "values" / f"{name}.yaml"))
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.slow
def test_executors_with_vllm_have_their_image_flags_gpus_and_shared_memory() -> None:
    values = yaml.safe_load((FOLDER / "values" / "vllm.yaml").read_text())
    deployment = named(template(values), "Deployment", "inflight-executor")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert deployment["spec"]["replicas"] == 2
    assert container["image"].startswith("inflight/executor-vllm:")
    assert (env["INFLIGHT_ENGINE"], env["INFLIGHT_ENGINE_ARGS"]) == ("vllm", values["pools"]["main"]["engineArgs"])
    assert not {"INFLIGHT_DEVICE", "INFLIGHT_TENSOR_PARALLEL_SIZE"} & env.keys()
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    # Several GPUs are ranks of one executor.
    values["pools"]["main"]["gpu"]["count"] = 4
    (container,) = named(template(values), "Deployment", "inflight-executor")["spec"]["template"]["spec"]["containers"]
    assert {"name": "INFLIGHT_TENSOR_PARALLEL_SIZE", "value": "4"} in container["env"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4


@pytest.mark.slow
def test_package_contains_the_linked_sources(tmp_path: Path) -> None:
    packed = run_helm("package", str(CHART), "--destination", str(tmp_path))
    assert packed.returncode == 0, packed.stderr
    (archive,) = tmp_path.glob("*.tgz")
    assert template(EVERYTHING, chart=archive) == template(EVERYTHING)


@pytest.mark.slow
def test_two_releases_in_one_namespace_share_nothing() -> None:
    releases = [template(EVERYTHING, release=name) for name in ("inflight", "blue")]
    first, second = (names(release) for release in releases)
    assert not first & second
    assert {
        name.replace("inflight.blue-inflight", "inflight.inflight").replace("blue-inflight", "inflight")
        for name in map(without_hash, second)
        if "download" not in name
    } == {name for name in map(without_hash, first) if "download" not in name}
    for one, other in (releases, releases[::-1]):
        pods = [pod_labels(found) for found in one if found["kind"] in WORKLOADS]
        for found in other:
            for selector in selectors(found):
                assert not any(matches(selector, labels) for labels in pods), found["metadata"]["name"]
        assert not {name for found in one for name in secrets_of(found)} & {
            name for found in other for name in secrets_of(found)
        }


def without_hash(kind_and_name: tuple[str, str]) -> str:
    hashed = HASH.fullmatch(kind_and_name[1])
    return hashed[1] if hashed else kind_and_name[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "restarted"),
    [
        ({"gateway": {"settings": {"INFLIGHT_LOG_LEVEL": "debug"}}}, {"inflight-gateway"}),
        ({"router": {"settings": {"INFLIGHT_LOG_LEVEL": "debug"}}}, {"inflight-router"}),
        ({"executor": {"settings": {"INFLIGHT_LOG_LEVEL": "debug"}}}, {"inflight-executor"}),
        ({"pools": {"main": {"model": "/models/b"}}}, {"inflight-router", "inflight-executor"}),
        # Redis holds the ledger: what concerns processes of inflight does not restart it.
        *(
            (
                {"defaults": {key: value}},
                {"inflight-router", "inflight-gateway", "inflight-executor", "inflight-pod-costs"},
            )
            for key, value in (
                ("extraEnv", [{"name": "A", "value": "b"}]),
                ("podAnnotations", {"example.org/restarted": "1"}),
                ("podLabels", {"example.org/team": "llm"}),
                ("resources", {"requests": {"cpu": "2"}}),
            )
        ),
    ],
)
def test_change_of_values_restarts_only_what_it_concerns(changed: dict[str, Any], restarted: set[str]) -> None:
    before, after = pod_specs(MODEL), pod_specs({**MODEL, **changed})
    assert {name for name in before if before[name] != after[name]} == restarted


@pytest.mark.slow
def test_pods_use_the_config_maps_that_are_there() -> None:
    objects = template(EVERYTHING)
    maps = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    used = set()
    for one in objects:
        if one["kind"] in WORKLOADS:
            pod = one["spec"]["template"]["spec"]
            used |= {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
            for container in pod["containers"]:
                used |= {source["configMapRef"]["name"] for source in container.get("envFrom", ())}
    assert used <= maps
    assert {name for name in maps - used if "dashboard" not in name} == set()
    assert all(HASH.fullmatch(name) for name in used)


@pytest.mark.slow
def test_only_the_api_is_published() -> None:
    objects = template(EVERYTHING)
    ingress, route = (named(objects, kind, "inflight-gateway") for kind in ("Ingress", "HTTPRoute"))
    (rule,) = ingress["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]


WORKLOAD_VALUES: dict[str, Any] = {
    "serviceAccountName": "team",
    "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
    "strategy": {"type": "RollingUpdate"},
    "minReadySeconds": 7,
    "livenessProbe": {"failureThreshold": 99},
    "extraContainers": [{"name": "beside", "image": "busybox:1.37.0"}],
    "tolerations": [{"key": "team", "operator": "Exists"}],
}


@pytest.mark.slow
@pytest.mark.parametrize("component", ["router", "gateway", "executor", "redis", "redis.sentinel"])
def test_values_of_a_workload_change_that_workload(component: str) -> None:
    changed: dict[str, Any] = WORKLOAD_VALUES
    for key in reversed(component.split(".")):
        changed = {key: changed}
    values = EVERYTHING | changed | ({"redis": {"mode": "sentinel"} | changed["redis"]} if "redis" in changed else {})
    kind = "StatefulSet" if "redis" in component else "Deployment"
    name = f"inflight-{component.rpartition('.')[2]}"
    plain, found = (named(template(one), kind, name)["spec"] for one in (EVERYTHING, values))
    pod, container = found["template"]["spec"], found["template"]["spec"]["containers"][0]
    assert (pod["serviceAccountName"], pod["dnsConfig"]) == ("team", WORKLOAD_VALUES["dnsConfig"])
    assert pod["tolerations"] == plain["template"]["spec"].get("tolerations", []) + WORKLOAD_VALUES["tolerations"]
    assert found["strategy" if kind == "Deployment" else "updateStrategy"] == {"type": "RollingUpdate"}
    assert found["minReadySeconds"] == 7
    before = plain["template"]["spec"]["containers"][0]["livenessProbe"]
    assert container["livenessProbe"] == before | {"failureThreshold": 99}
    assert pod["containers"][1]["name"] == "beside"


@pytest.mark.slow
def test_routers_get_a_public_service_beside_the_headless_one() -> None:
    annotations = {"example.org/balancer": "internal"}
    objects = template({**MODEL, "router": {"service": {"type": "LoadBalancer", "annotations": annotations}}})
    headless, public = (named(objects, "Service", name) for name in ("inflight-router", "inflight-router-public"))
    assert headless["spec"]["clusterIP"] == "None"
    assert (public["spec"]["type"], public["metadata"]["annotations"]) == ("LoadBalancer", annotations)
    assert public["spec"]["selector"] == headless["spec"]["selector"]
    assert "clusterIP" not in public["spec"]


@pytest.mark.slow
def test_other_dns_servers_a_collector_and_more_objects_are_values() -> None:
    cache = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    more = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}, "data": {"a": "b"}}
    values = {
        **MODEL,
        "networkPolicy": {"dns": [cache], "dnsPorts": [53, 5353]},
        "otel": {"endpoint": "http://collector.monitoring.svc:4317", "to": [{"namespaceSelector": {}}]},
        "extraObjects": [more],
    }
    objects = template(values)
    assert more in objects
    (rule,) = named(objects, "NetworkPolicy", "inflight-dns")["spec"]["egress"]
    assert cache in rule["to"]
    assert {port["port"] for port in rule["ports"]} == {53, 5353}
    (rule,) = named(objects, "NetworkPolicy", "inflight-traces")["spec"]["egress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": 4317}], "to": [{"namespaceSelector": {}}]}
    exporting = [
        one["metadata"]["name"] for one in objects if "INFLIGHT_OTLP_ENDPOINT" in one.get("data", {}) and one != more
    ]
    assert {without_hash(("ConfigMap", name)) for name in exporting} == {"inflight-router", "inflight-executor"}


@pytest.mark.slow
@pytest.mark.parametrize("release", ["inflight", "blue"])
def test_pod_costs_expects_the_name_in_the_routers_certificate(release: str) -> None:
    name = "inflight-pod-costs" if release == "inflight" else "blue-inflight-pod-costs"
    deployment = named(template(MODEL, release), "Deployment", name)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment[SERVER_NAME_VARIABLE] == "inflight-router"
    assert environment[ADDRESS_VARIABLE] == f"dns:///{name.removesuffix('pod-costs')}router:50051"


@pytest.mark.slow
def test_sentinel_mode_prefers_separate_nodes_where_the_values_say_so() -> None:
    for preferred in (False, True):
        redis = {"mode": "sentinel", "antiAffinity": "preferred" if preferred else "required"}
        objects = template({**MODEL, "redis": redis})
        for name in ("inflight-redis", "inflight-sentinel"):
            apart = named(objects, "StatefulSet", name)["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
            assert list(apart) == [f"{'preferred' if preferred else 'required'}DuringSchedulingIgnoredDuringExecution"]


@pytest.mark.slow
def test_pull_policy_is_that_of_every_container_of_an_image_of_inflight() -> None:
    values = {**MODEL, "models": {"source": "copy"}, "image": {"pullPolicy": "Always"}}
    for found in pod_specs(values).values():
        for container in (*found["spec"].get("initContainers", ()), *found["spec"]["containers"]):
            assert container["imagePullPolicy"] == "Always"


@pytest.mark.slow
def test_cluster_wide_names_contain_the_namespace() -> None:
    first, second = (
        {found["metadata"]["name"] for found in template(MODEL, namespace=name) if found["kind"] == "PriorityClass"}
        for name in ("one", "two")
    )
    assert len(first) == len(second) == 2
    assert not first & second


@pytest.mark.slow
@pytest.mark.parametrize("release", ["inflight", "blue"])
def test_rules_read_and_write_series_of_their_release_only(release: str) -> None:
    (found,) = (one for one in template(MONITORED, release, "team") if one["kind"] == "PrometheusRule")
    rules = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
    assert {rule["labels"]["app_kubernetes_io_instance"] for rule in rules} == {release}
    job = "team/inflight" if release == "inflight" else f"team/{release}-inflight"
    for rule in rules:
        read = list(selectors_of(rule["expr"]))
        assert read
        for matchers in read:
            assert {"namespace": "team", "app_kubernetes_io_instance": release}.items() <= matchers.items() or (
                matchers == {"job": job}
            ), rule


@pytest.mark.slow
def test_autoscalers_of_a_release_read_its_own_metrics() -> None:
    pools = {"main": {"model": "/models/a"}, "b": {"model": "/models/b"}}
    values = {"pools": pools, "executor": {"autoscaling": {"by": "hpa"}}}
    scalers = [one for one in template(values, "blue") if one["kind"] == "HorizontalPodAutoscaler"]
    assert len(scalers) == 2
    for scaler, model in zip(sorted(scalers, key=lambda one: one["metadata"]["name"]), "ab", strict=True):
        for metric in scaler["spec"]["metrics"]:
            wanted = {"app_kubernetes_io_instance": "blue", "model": model}
            assert metric["external"]["metric"]["selector"] == {"matchLabels": wanted}


def selectors(found: Object) -> list[Mapping[str, Any]]:
    """Selectors of pods of the same namespace."""
    spec = found.get("spec", {})
    if found["kind"] == "Service":
        return [{"matchLabels": spec["selector"]}]
    selecting = [spec.get("selector"), spec.get("podSelector")]
    for rule in (*spec.get("ingress", ()), *spec.get("egress", ())) if found["kind"] == "NetworkPolicy" else ():
        for peer in (*rule.get("from", ()), *rule.get("to", ())):
            selecting += [] if "namespaceSelector" in peer else [peer.get("podSelector")]
    return [selector for selector in selecting if selector]


def secrets_of(value: Any) -> set[str]:
    """Names of Secrets that an object uses, except those of users."""
    if isinstance(value, list):
        return {name for entry in value for name in secrets_of(entry)}
    if not isinstance(value, Mapping):
        return set()
    own = {value["secretName"]} if isinstance(value.get("secretName"), str) else set()
    own |= {value["secretKeyRef"]["name"]} if "secretKeyRef" in value else set()
    return (own - {"public"}) | {name for entry in value.values() for name in secrets_of(entry)}


@pytest.mark.slow
def test_own_secrets_replace_those_of_the_release() -> None:
    given_names = {kind: f"team-{kind.lower()}" for kind in DEFAULTS["secrets"]}
    values = {**EVERYTHING, "tls": {"certManager": False}, "secrets": given_names}
    used = {name for found in template(values) for name in secrets_of(found)}
    assert used == set(given_names.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "pools.main.model"),
        ({**MODEL, "routers": {}}, "routers"),
        ({**MODEL, "executor": {"engineArgs": "--max-model-len 8"}}, "engineArgs"),
        ({**MODEL, "executor": {"gpu": {"enabled": True, "count": 2}}}, "gpu.count"),
        ({"pools": {"main": {"model": "/models/m", "gpus": 1}}}, "gpus"),
        ({**MODEL, "ingress": {"enabled": True, "host": "llm.example.org"}}, "tlsSecret"),
        ({**MODEL, "models": {"source": "image", "download": {"enabled": True}}}, "source"),
        ({**MODEL, "executor": {"autoscaling": {"by": "hpa", "minReplicas": 0}}}, "minReplicas"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(AssertionError, match=named):
        template(values)


# What YAML has, and how a process is to read it.
TYPED = ((True, "true"), (1_000_000, "1000000"), (0.5, "0.5"), ("a,b=c: #", "a,b=c: #"))
# Of the processes, what the chart derives from other values.
DERIVED = {
    "router": {"INFLIGHT_REDIS_URL": "redis", "INFLIGHT_RESUME_SECRET": "secrets"},
    "executor": {"INFLIGHT_EXECUTOR_ID": "the pod's name"},
    "gateway": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("role", SETTINGS)
def test_every_setting_of_a_process_can_be_given(role: str) -> None:
    variables = sorted({words.variable for words in words_of(SETTINGS[role])} - DERIVED[role].keys())
    given_values = {name: TYPED[index % len(TYPED)] for index, name in enumerate(variables)}
    values = {role: {"settings": {name: value for name, (value, _) in given_values.items()}}}
    objects = template({**MODEL, "auth": {"enabled": False}, **values})
    (pod,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == ("Deployment", f"inflight-{role}"))
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    # The last source is the strongest, except for the container's own variables.
    last = container["envFrom"][-1]["configMapRef"]["name"]
    (found,) = (one for one in objects if one["kind"] == "ConfigMap" and one["metadata"]["name"] == last)
    assert {name: found["data"][name] for name in variables} == {name: text for name, (_, text) in given_values.items()}
    own = {variable["name"] for variable in container.get("env", ())}
    assert own - {"REDIS_PASSWORD"} == DERIVED[role].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given_twice", "variable"),
    [
        ({"settings": {"INFLIGHT_REDIS_URL": "redis://x"}}, "INFLIGHT_REDIS_URL"),
        ({"extraEnv": [{"name": "INFLIGHT_REDIS_URL", "value": "redis://x"}]}, "INFLIGHT_REDIS_URL"),
        ({"settings": {"INFLIGHT_API_KEYS_FILE": None}}, "INFLIGHT_API_KEYS_FILE"),
    ],
)
def test_variable_of_other_values_is_refused_as_a_setting(given_twice: dict[str, Any], variable: str) -> None:
    with pytest.raises(AssertionError, match=f"{variable}: the chart sets"):
        template({**MODEL, "router": given_twice})


@pytest.mark.slow
def test_gateways_get_a_store_and_a_place_for_files() -> None:
    gateway = {"store": {"secret": "kept", "ports": [6380]}, "files": {"volume": claim_of("files")}}
    objects = {(one["kind"], one["metadata"]["name"]): one for one in template({**MODEL, "gateway": gateway})}
    pod = objects["Deployment", "inflight-gateway"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    source = {"secretKeyRef": {"name": "kept", "key": "url"}}
    assert container["env"] == [{"name": "INFLIGHT_STORE_URL", "valueFrom": source}]
    assert {"name": "files", **claim_of("files")} in pod["volumes"]
    assert {"name": "files", "mountPath": "/files"} in container["volumeMounts"]
    (settings,) = (
        one for (kind, name), one in objects.items() if kind == "ConfigMap" and name.startswith("inflight-gateway")
    )
    assert settings["data"]["INFLIGHT_FILES"] == "/files"
    policy = objects["NetworkPolicy", "inflight-store"]["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": 6380}]}]
    bucket = template({**MODEL, "gateway": {"store": {"secret": "kept"}, "files": {"bucket": "s3://a/b"}}})
    assert [one["data"]["INFLIGHT_FILES"] for one in bucket if "INFLIGHT_FILES" in one.get("data", {})] == ["s3://a/b"]


@pytest.mark.slow
def test_authentication_is_off_only_where_the_values_say_so() -> None:
    def keys_files(values: Mapping[str, Any]) -> list[Object]:
        return [found for found in template(values) if "INFLIGHT_API_KEYS_FILE" in found.get("data", {})]

    assert keys_files(MODEL)
    assert not keys_files({**MODEL, "auth": {"enabled": False}})


@functools.cache
def values_of(schema: str) -> st.SearchStrategy[Any]:
    """Returns a strategy for the values of a part of the schema, given as JSON."""
    part = json.loads(schema)
    if "$ref" in part:
        return of(SCHEMA["$defs"][part["$ref"].rpartition("/")[2]])
    if "enum" in part:
        return st.sampled_from(part["enum"])
    if part.get("examples"):
        return st.sampled_from(part["examples"])
    if part.get("type") == "boolean":
        return st.booleans()
    if part.get("type") == "integer":
        return st.integers(part["minimum"], part["maximum"])
    return st.fixed_dictionaries({}, optional={key: of(entry) for key, entry in part.get("properties", {}).items()})


def of(part: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    return values_of(json.dumps(part))


POOLS = st.dictionaries(st.sampled_from(["main", "small", "b-1"]), of({"$ref": "#/$defs/pool"}), min_size=1).map(
    lambda pools: {name: pool | {"model": f"/models/{name}"} for name, pool in pools.items()}
)


def go_with_their_engines(values: Mapping[str, Any]) -> bool:
    """Whether only pools with vLLM have its flags, or several GPUs for an executor."""
    default = values.get("executor", {})

    def is_good(pool: Mapping[str, Any]) -> bool:
        merged = {**default, **pool}
        num_gpus = {**default.get("gpu", {}), **pool.get("gpu", {})}.get("count", 1)
        return merged.get("engine") == "vllm" or (not merged.get("engineArgs") and num_gpus == 1)

    return all(map(is_good, values["pools"].values()))


PARTS = {key: of(entry) for key, entry in SCHEMA["properties"].items() if key not in ("pools", "global")}
VALUES = st.fixed_dictionaries({"pools": POOLS}, optional=PARTS).filter(
    lambda values: go_with_their_engines(values) and jsonschema.Draft7Validator(SCHEMA).is_valid(values)
)


@pytest.mark.slow
@settings(max_examples=examples(20))
@given(values=VALUES, release=st.sampled_from(["inflight", "a", "7", "x" * 53]))
def test_valid_values_render_to_objects_that_kubernetes_accepts(values: dict[str, Any], release: str) -> None:
    pools = {"main": None} | values["pools"]
    rendered = template(values | {"pools": pools}, release=release)
    assert len(names(rendered)) == len(rendered)
    for found in rendered:
        check(found, NEWEST)
        assert len(found["metadata"]["name"]) <= 63 or found["kind"] in ("PriorityClass", "ConfigMap")
    for workload in (found for found in rendered if found["kind"] in WORKLOADS):
        assert matches(workload["spec"]["selector"], pod_labels(workload))


PLACES: list[tuple[str, ...]] = [
    (),
    ("pools", "main"),
    ("executor", "gpu"),
    ("models", "claim"),
    ("router", "image"),
    ("monitoring", "dashboards"),
    *((key,) for key, entry in DEFAULTS.items() if isinstance(entry, dict) and key != "pools"),
]


@pytest.mark.slow
@settings(max_examples=examples(8))
@given(place=st.sampled_from(PLACES))
def test_unknown_key_is_refused_at_every_place(place: tuple[str, ...]) -> None:
    values: dict[str, Any] = copy.deepcopy(MODEL)
    target = values
    for key in place:
        target = target.setdefault(key, {})
    target["unknownKey"] = "x"
    with pytest.raises(AssertionError, match="unknownKey"):
        template(values)


def test_version_is_that_of_the_images() -> None:
    project = tomllib.loads((CHART.parents[2] / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]


@pytest.mark.slow
def test_test_pod_runs_commands_that_are_there_on_the_nodes_of_the_others() -> None:
    placed = {"nodeSelector": {"team": "llm"}, "tolerations": [{"key": "team", "operator": "Exists"}]}
    objects = template({**EVERYTHING, "defaults": placed})
    (pod,) = (found for found in objects if found["kind"] == "Pod")
    assert placed.items() <= pod["spec"].items()
    for found in objects:
        if found["kind"] in WORKLOADS:
            assert placed.items() <= found["spec"]["template"]["spec"].items(), found["metadata"]["name"]
    for container in pod["spec"]["containers"]:
        program, command, *_ = container["command"]
        assert program == "inflight"
        assert command in {known.name for known in COMMANDS}
        assert {variable["name"] for variable in container.get("env", ())} <= CLIENT_VARIABLES

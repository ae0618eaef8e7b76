"""Validity of every overlay: it renders, and Kubernetes or the operator accepts each object by its schema."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from inflight.gateway.metrics import Metrics
from tests.dashboards.queries import selectors_of
from tests.deploy.custom_resources import SCHEMAS
from tests.deploy.manifests import (
    FOLDER,
    OVERLAYS,
    Object,
    needs_kubectl,
    overlay,
    pod_labels,
    rendered,
)
from tests.deploy.rules import ALERTS, COPY, DASHBOARD, RULES, rules_of

# The oldest with `preStop: sleep` on by default; image volumes, which `ha` mounts, came later, and
# with `subPath` in 1.33.
OLDEST = {"ha": "1.33"}
NEWEST = kubernetes_validate.latest_version()


def check(manifest: Object, version: str) -> None:
    schema = SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is not None:
        jsonschema.Draft202012Validator(schema).validate(manifest)
    else:
        check_ours(json.dumps({key: value for key, value in manifest.items() if key != "content"}), version)


@functools.cache
def check_ours(manifest: str, version: str) -> None:
    """Of an object that several overlays share, once."""
    kubernetes_validate.validate(json.loads(manifest), version, strict=True)


@pytest.fixture(autouse=True, scope="module")
def schemas_read_once() -> Iterator[None]:
    """The package reads all of Kubernetes' definitions again for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay_renders_to_objects_that_old_and_new_clusters_take(name: str) -> None:
    for version in (OLDEST.get(name, "1.30"), NEWEST):
        for manifest in overlay(name).objects:
            check(manifest, version)


@needs_kubectl
def test_misspelt_field_is_seen_by_the_schemas() -> None:
    (router,) = (
        found for found in overlay("cpu-dev").of_kind("Deployment") if found["metadata"]["name"].endswith("router")
    )
    with pytest.raises(kubernetes_validate.ValidationError):
        check({**router, "spec": {**router["spec"], "replica": 1}}, NEWEST)


@contextmanager
def overlay_of(*components: str) -> Iterator[tuple[Object, ...]]:
    """What base, executors and these components render to."""
    # Kustomize reads only below or beside what it is given: a folder in the tree, removed again
    folder = FOLDER / "overlays" / f".{'-'.join(components)}-test"
    folder.mkdir()
    try:
        (folder / "kustomization.yaml").write_text(
            yaml.safe_dump(
                {
                    "namespace": "inflight",
                    "resources": ["../../base", "../../executor-pool"],
                    "components": [f"../../components/{name}" for name in components],
                }
            )
        )
        yield rendered(folder)
    finally:
        (folder / "kustomization.yaml").unlink(missing_ok=True)
        folder.rmdir()


@needs_kubectl
def test_external_redis_replaces_ours() -> None:
    with overlay_of("external-redis") as objects:
        pass
    assert not [found for found in objects if found["kind"] in ("StatefulSet", "Service") and "redis" in str(found)]
    (router,) = (found for found in objects if found["kind"] == "Deployment" and "router" in found["metadata"]["name"])
    environment = {
        variable["name"]: variable for variable in router["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert "REDIS_PASSWORD" not in environment
    reference = {"secretKeyRef": {"name": "inflight-redis", "key": "url"}}
    assert environment["INFLIGHT_REDIS_URL"] == {"name": "INFLIGHT_REDIS_URL", "valueFrom": reference}
    for manifest in objects:
        check(manifest, NEWEST)


@needs_kubectl
def test_claims_are_filled_and_keep_caches() -> None:
    with overlay_of("model-pvc", "model-download", "cache-pvc", "adapter-pvc") as objects:
        pass
    for manifest in objects:
        check(manifest, NEWEST)
    (download,) = (found for found in objects if found["kind"] == "Job")
    (container,) = download["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["inflight", "fetch"]
    assert not container["image"].endswith("/router")
    (executor,) = (
        found for found in objects if found["metadata"]["name"] == "inflight-executor" and found["kind"] == "Deployment"
    )
    spec = executor["spec"]["template"]["spec"]
    caches = {one["name"]: one["value"] for one in spec["containers"][0]["env"] if one["name"].endswith("CACHE_DIR")}
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert caches
    assert all(folder.startswith(mounts["cache"] + "/") for folder in caches.values())
    (adapters,) = (one["value"] for one in spec["containers"][0]["env"] if one["name"] == "INFLIGHT_ADAPTER_FOLDER")
    assert adapters == mounts["adapters"]
    # What fetches and what reads name the same folder's parent
    assert container["args"][1].startswith(mounts["models"] + "/")


@needs_kubectl
@pytest.mark.parametrize("name", ["ingress", "http-route", "inference-pool"])
def test_examples_of_ways_in_are_valid_and_lead_to_the_gateway(name: str) -> None:
    gateway = overlay("gpu").find("Service", "inflight-gateway")
    assert gateway is not None
    found = list(yaml.safe_load_all((FOLDER / "examples" / f"{name}.yaml").read_text()))
    for manifest in found:
        check(manifest, NEWEST)
        for rule in manifest["spec"].get("rules", ()):
            for backend in rule.get("backendRefs", ()):
                pools = {one["metadata"]["name"] for one in found if one["kind"] == "InferencePool"}
                assert (
                    backend["name"] in pools
                    if "kind" in backend
                    else (backend["name"], backend["port"])
                    == (
                        gateway["metadata"]["name"],
                        gateway["spec"]["ports"][0]["port"],
                    )
                )
        if manifest["kind"] == "InferencePool":
            labels = pod_labels(overlay("gpu").workload("gateway"))
            assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert manifest["spec"]["targetPorts"] == [{"number": 8000}]


def test_endpoint_picker_of_the_example_reads_metrics_of_the_gateway_on_its_pods() -> None:
    values = yaml.safe_load((FOLDER / "examples" / "inference-pool-values.yaml").read_text())
    labels = pod_labels(overlay("gpu").workload("gateway"))
    assert values["inferencePool"]["modelServers"]["matchLabels"].items() <= labels.items()
    extension = values["inferenceExtension"]
    picker = yaml.safe_load(extension["pluginsCustomConfig"][extension["pluginsConfigFile"]])
    (extractor,) = (plugin for plugin in picker["plugins"] if plugin["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    assert engine["name"] == extractor["parameters"]["defaultEngine"]
    exported = {family.name for family in Metrics().registry.collect()}
    read = {value for key, value in engine.items() if key.endswith("Spec") and value}
    assert len(read) == 2
    assert read <= exported
    used = {use["pluginRef"] for profile in picker["schedulingProfiles"] for use in profile["plugins"]}
    assert used <= {plugin["type"] for plugin in picker["plugins"]}


def test_group_example_is_whole() -> None:
    group, policy = yaml.safe_load_all((FOLDER / "examples" / "leader-worker-set.yaml").read_text())
    check(group, NEWEST)
    check(policy, NEWEST)
    # Its pods are what a Deployment's would be, which Kubernetes' own schema can check.
    templates = [group["spec"]["leaderWorkerTemplate"][f"{kind}Template"] for kind in ("leader", "worker")]
    for template in templates:
        labels = template["metadata"]["labels"]
        check(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "group"},
                "spec": {"selector": {"matchLabels": labels}, "template": template},
            },
            NEWEST,
        )
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    # Routers resolve the leader only, and the group has as many pods as the executor has ranks.
    leader, worker = (template["metadata"]["labels"]["app.kubernetes.io/component"] for template in templates)
    assert (leader, worker) == ("executor", "executor-worker")
    size = str(group["spec"]["leaderWorkerTemplate"]["size"])
    for template in templates:
        (container,) = template["spec"]["containers"]
        assert {"name": "INFLIGHT_TENSOR_PARALLEL_SIZE", "value": size} in container["env"]


@pytest.mark.skipif(not ALERTS.exists(), reason="deploy/dashboards/alerts.yaml is not here")
def test_rule_and_dashboard_are_those_of_deploy_dashboards() -> None:
    assert RULES.read_text() == rules_of(ALERTS.read_text())
    for group in yaml.safe_load(RULES.read_text())["spec"]["groups"]:
        for rule in group["rules"]:
            for matchers in selectors_of(rule["expr"]):
                assert matchers.get("namespace", matchers.get("job")) in ("inflight", "inflight/inflight"), rule
    assert COPY.read_bytes() == DASHBOARD.read_bytes()

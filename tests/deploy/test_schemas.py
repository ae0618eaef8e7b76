"""Validity of every overlay: it renders, and Kubernetes or the operator accepts each object by its schema."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.deploy.custom_resources import SCHEMAS
from tests.deploy.manifests import FOLDER, OVERLAYS, Object, needs_kubectl, overlay, rendered
from tests.deploy.rules import ALERTS, RULES, rules_of

# The oldest with `preStop: sleep` on by default; image volumes, which `ha` mounts, came one later.
OLDEST = {"ha": "1.31"}
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


@needs_kubectl
def test_external_redis_replaces_ours(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Kustomize reads only below or beside what it is given: a folder in the tree, removed again
    folder = FOLDER / "overlays" / ".external-redis-test"
    folder.mkdir()
    try:
        (folder / "kustomization.yaml").write_text(
            yaml.safe_dump(
                {
                    "namespace": "inflight",
                    "resources": ["../../base", "../../executor-pool"],
                    "components": ["../../components/external-redis"],
                }
            )
        )
        objects = rendered(folder)
    finally:
        (folder / "kustomization.yaml").unlink(missing_ok=True)
        folder.rmdir()
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


def test_group_example_is_whole() -> None:
    (group,) = yaml.safe_load_all((FOLDER / "examples" / "leader-worker-set.yaml").read_text())
    check(group, NEWEST)
    # Its pods are what a Deployment's would be, which Kubernetes' own schema can check.
    template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
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


@pytest.mark.skipif(not ALERTS.exists(), reason="deploy/dashboards/alerts.yaml is not here")
def test_prometheus_rule_is_made_of_the_alerts() -> None:
    assert RULES.read_text() == rules_of(ALERTS.read_text())

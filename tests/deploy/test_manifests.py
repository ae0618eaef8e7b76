"""Consistency of the manifests with themselves and with the processes that they start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.cli import flags
from inflight.cli.flags import ADDRESS_VARIABLE
from inflight.common.disk_cache import CACHE_VARIABLE
from inflight.common.rpc.server import LIVE_SERVICE
from inflight.common.settings import ENV_PREFIX, ProcessSettings
from inflight.executor.settings import ExecutorSettings
from inflight.gateway.settings import GatewaySettings
from inflight.router.settings import RouterSettings
from tests.deploy.manifests import (
    COMPONENT,
    NAMESPACE,
    OVERLAYS,
    WORKLOADS,
    Object,
    Overlay,
    environment_of,
    matches,
    needs_kubectl,
    overlay,
    pod_labels,
)
from tests.deploy.reachability import PodKind, flows

pytestmark = needs_kubectl

SETTINGS: dict[str, type[ProcessSettings]] = {
    "router": RouterSettings,
    "executor": ExecutorSettings,
    "gateway": GatewaySettings,
}
# Of the command line's client, which is no process with settings.
CLIENT_VARIABLES = {ADDRESS_VARIABLE, flags.API_KEY_VARIABLE, flags.CA_FILE_VARIABLE, flags.SERVER_NAME_VARIABLE}
FIELDS = {"metadata.name": "a-pod", "status.podIP": "10.0.0.1"}
# Where the manifests put what several processes read; see deploy/Dockerfile.
SERVICES = {"router": "inflight.v1.InferenceService", "executor": "inflight.v1.ExecutorService"}
# The process ends this long after it has drained, at the latest.
TO_END_S = 10


@pytest.fixture(params=OVERLAYS)
def each(request: pytest.FixtureRequest) -> Overlay:
    """Every overlay."""
    return overlay(request.param)


def settings_of(overlay: Overlay, container: Object) -> ProcessSettings:
    """The settings of one of our processes, read as it reads them."""
    environment = environment_of(overlay, container, FIELDS)
    fields = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX)
    }
    fields.pop(CACHE_VARIABLE.removeprefix(ENV_PREFIX).lower(), None)
    assert container["command"][0] == "inflight"
    return SETTINGS[container["command"][1]].model_validate(fields)  # a name that is no setting is refused


def our_processes(overlay: Overlay) -> Iterator[tuple[Object, Object]]:
    """Workload and container of every router, executor and gateway."""
    for workload, container in overlay.containers():
        if container["command"][0] == "inflight" and container["command"][1] in SETTINGS:
            yield workload, container


def test_every_variable_is_a_setting_of_its_process_with_a_value_that_it_takes(each: Overlay) -> None:
    roles = []
    for _, container in our_processes(each):
        settings_of(each, container)
        roles.append(container["command"][1])
    assert set(roles) == set(SETTINGS)


def test_every_overlay_but_the_one_for_tests_requires_keys(each: Overlay) -> None:
    for _, container in our_processes(each):
        settings = settings_of(each, container)
        if isinstance(settings, RouterSettings):
            assert (settings.api_keys_file is not None) == (each.name != "cpu-dev")


def test_variables_of_commands_are_known(each: Overlay) -> None:
    for _, container in each.containers():
        environment = environment_of(each, container, FIELDS)
        if container["command"][1] not in SETTINGS:
            ours = {name for name in environment if name.startswith(ENV_PREFIX)}
            assert ours <= CLIENT_VARIABLES


def test_routers_serve_the_models_of_the_executors(each: Overlay) -> None:
    settings = [settings_of(each, container) for _, container in our_processes(each)]
    (router,) = (found for found in settings if isinstance(found, RouterSettings))
    routed = {entry.rpartition("=")[0] or entry.rpartition("/")[2]: entry.rpartition("=")[2] for entry in router.model}
    executors = [found for found in settings if isinstance(found, ExecutorSettings)]
    served = {found.served_model_name or found.model.rpartition("/")[2]: found.model for found in executors}
    assert routed == served


def test_ports_are_those_that_the_process_listens_on_and_probes_ask_there(each: Overlay) -> None:
    for _, container in our_processes(each):
        settings = settings_of(each, container)
        listening = {
            str(value).rpartition(":")[2]
            for name, value in settings.model_dump().items()
            if name in ("listen", "health_listen", "http_listen") and value
        }
        ports = {str(port["containerPort"]): port["name"] for port in container["ports"]}
        assert set(ports) == listening
        role = container["command"][1]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if role == "gateway":
                action = probe.get("httpGet") or probe["tcpSocket"]
                assert action["port"] in ports.values()
                continue
            assert ports[str(probe["grpc"]["port"])] == "health"
            assert probe["grpc"]["service"] in (LIVE_SERVICE, SERVICES[role])
            # A restart mends neither Redis nor a missing executor.
            assert (probe["grpc"]["service"] == LIVE_SERVICE) or kind != "livenessProbe"


def test_grace_is_enough_to_sleep_drain_and_end(each: Overlay) -> None:
    for workload, container in our_processes(each):
        drain_s = settings_of(each, container).model_dump()["drain_timeout_s"]
        sleep_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        grace_s = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= sleep_s + drain_s + TO_END_S
        # Clients find routers and gateways by name; routers hear of an executor's draining from itself.
        assert (sleep_s > 0) == (container["command"][1] != "executor")


def test_every_secret_config_map_and_claim_is_there_with_the_keys_asked_for(each: Overlay) -> None:
    claims = {found["metadata"]["name"] for found in each.of_kind("PersistentVolumeClaim")}
    for workload, container in each.containers():
        environment_of(each, container, FIELDS)  # fails where something is not there
        spec = workload["spec"]["template"]["spec"]
        for volume in spec["volumes"]:
            if "secret" in volume:
                content = each.content("Secret", volume["secret"]["secretName"])
                assert {item["key"] for item in volume["secret"].get("items", ())} <= set(content)
            if "configMap" in volume:
                each.content("ConfigMap", volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted <= {volume["name"] for volume in spec["volumes"]}


def test_settings_name_files_that_are_mounted(each: Overlay) -> None:
    for workload, container in each.containers():
        volumes = {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container.get("volumeMounts", ())}
        for name, value in environment_of(each, container, FIELDS).items():
            if not name.endswith("_FILE"):
                continue
            folder, _, file = value.rpartition("/")
            secret = mounts[folder]["secret"]
            there = secret.get("items") or [{"path": key} for key in each.content("Secret", secret["secretName"])]
            assert file in {item["path"] for item in there}


def test_pods_mount_no_private_key_that_they_do_not_use(each: Overlay) -> None:
    for workload, container in each.containers():
        volumes = {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}
        named = set(environment_of(each, container, FIELDS).values())
        for mount in container.get("volumeMounts", ()):
            secret = volumes[mount["name"]].get("secret")
            if secret is None:
                continue
            content = each.content("Secret", secret["secretName"])
            items = secret.get("items") or [{"key": key, "path": key} for key in content]
            keys = {f"{mount['mountPath']}/{item['path']}" for item in items if b"PRIVATE KEY" in content[item["key"]]}
            assert keys <= named, workload["metadata"]["name"]


def test_selectors_select_their_own_pods_and_services_name_ports_that_are_there(each: Overlay) -> None:
    workloads = each.of_kind(*WORKLOADS)
    for workload in workloads:
        assert matches(workload["spec"]["selector"], pod_labels(workload))
        others = [w for w in workloads if w is not workload and matches(workload["spec"]["selector"], pod_labels(w))]
        assert not others
    for service in each.of_kind("Service"):
        selected = [w for w in workloads if matches({"matchLabels": service["spec"]["selector"]}, pod_labels(w))]
        assert selected
        for workload in selected:
            names = {
                port["name"]
                for container in workload["spec"]["template"]["spec"]["containers"]
                for port in container["ports"]
            }
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for budget in each.of_kind("PodDisruptionBudget"):
        assert len([w for w in workloads if matches(budget["spec"]["selector"], pod_labels(w))]) == 1


def test_names_that_processes_look_up_are_services(each: Overlay) -> None:
    services = {service["metadata"]["name"]: service for service in each.of_kind("Service")}
    for _, container in each.containers():
        values = " ".join(environment_of(each, container, FIELDS).values())
        for host, port in re.findall(r"(?:[\w-]+\.)?(inflight-(?:router|executor|redis|sentinel)):(\d+)", values):
            assert int(port) in {served["port"] for served in services[host]["spec"]["ports"]}
            assert services[host]["spec"]["clusterIP"] == "None"  # every address behind it, not one


def test_scalers_and_monitors_aim_at_what_is_there(each: Overlay) -> None:
    for scaler in each.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        deployment = each.find(target["kind"], target["name"])
        assert deployment is not None
        assert "replicas" not in deployment["spec"]  # each apply would set the number back
    for monitor in each.of_kind("PodMonitor"):
        selected = [w for w in each.of_kind(*WORKLOADS) if matches(monitor["spec"]["selector"], pod_labels(w))]
        assert {w["metadata"]["labels"][COMPONENT] for w in selected} == set(SETTINGS)
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        for workload in selected:
            assert endpoint["port"] in {
                port["name"] for port in workload["spec"]["template"]["spec"]["containers"][0]["ports"]
            }


def test_images_are_pinned(each: Overlay) -> None:
    for _, container in each.containers():
        assert re.search(r":\d+\.\d+\.\d+[\w.-]*$|@sha256:[0-9a-f]{64}$", container["image"]), container["image"]


def test_pods_keep_to_the_restricted_standard(each: Overlay) -> None:
    namespace = each.find("Namespace", NAMESPACE)
    assert namespace is not None
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "image", "projected", "name"}
    for workload, container in each.containers():
        spec = workload["spec"]["template"]["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec["volumes"]:
            assert set(volume) <= allowed
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        is_costs = workload["metadata"]["labels"][COMPONENT] == "pod-costs"
        assert spec["automountServiceAccountToken"] is is_costs
        assert "requests" in container["resources"]
        assert "memory" in container["resources"]["limits"]
        assert workload["spec"]["revisionHistoryLimit"] <= 10


def test_processes_write_only_below_tmp(each: Overlay) -> None:
    for workload, container in each.containers():
        volumes = {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}
        for mount in container.get("volumeMounts", ()):
            if mount.get("readOnly"):
                continue
            assert "emptyDir" in volumes[mount["name"]]
            assert mount["mountPath"] in ("/tmp", "/copied")


def test_pod_costs_may_list_and_patch_pods_and_nothing_else(each: Overlay) -> None:
    for role in each.of_kind("Role", "ClusterRole"):
        assert role["kind"] == "Role"
        assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}]


PORTS = {
    "router": {50051, 50052, 8080},
    "executor": {50061, 50062, 8080},
    "gateway": {8000},
    "redis": {6379},
    "sentinel": {26379},
    "pod-costs": {8080},
}
OUTSIDE = (
    PodKind("client", {"inflight-client": "true"}, frozenset({80}), "apps"),
    PodKind("stranger", {"app": "x"}, frozenset({80}), "apps"),
    PodKind("stranger-here", {"app": "x"}, frozenset({80})),
    PodKind("prometheus", {"app.kubernetes.io/name": "prometheus"}, frozenset({9090}), "monitoring"),
    PodKind("dns", {"k8s-app": "kube-dns"}, frozenset({53}), "kube-system"),
    PodKind("api-server", {"component": "kube-apiserver"}, frozenset({6443}), "kube-system"),
)


def pod_kinds(overlay: Overlay) -> list[PodKind]:
    found: dict[str, PodKind] = {}
    for workload in overlay.of_kind(*WORKLOADS):
        labels = pod_labels(workload)
        found[labels[COMPONENT]] = PodKind(labels[COMPONENT], labels, frozenset(PORTS[labels[COMPONENT]]))
    return [*found.values(), *OUTSIDE]


def expected_flows(kinds: list[PodKind], has_metrics: bool) -> set[tuple[str, str, int]]:
    here = {kind.name for kind in kinds if kind.namespace == NAMESPACE}
    wanted: set[tuple[str, str, int]] = {(name, "dns", 53) for name in here}
    wanted |= {("client", "router", 50051), ("client", "gateway", 8000), ("gateway", "router", 50051)}
    wanted |= {("router", "executor", 50061), ("router", "redis", 6379)}
    if "sentinel" in here:
        wanted |= {(one, other, PORTS_OF[other]) for one in PORTS_OF for other in PORTS_OF}
        wanted.add(("router", "sentinel", 26379))
    if "pod-costs" in here:
        wanted |= {("pod-costs", "router", 50051), ("pod-costs", "api-server", 6443)}
    if has_metrics:
        wanted |= {("prometheus", "router", 8080), ("prometheus", "executor", 8080), ("prometheus", "gateway", 8000)}
    return wanted


PORTS_OF = {"redis": 6379, "sentinel": 26379}


def test_policies_let_through_the_flows_that_are_needed_and_no_others(each: Overlay) -> None:
    kinds = pod_kinds(each)
    outside = {kind.name for kind in OUTSIDE if kind.namespace != NAMESPACE}
    let = {
        flow for flow in flows(each.of_kind("NetworkPolicy"), kinds) if not (flow[0] in outside and flow[1] in outside)
    }
    assert let == expected_flows(kinds, bool(each.of_kind("PodMonitor")))


def test_a_variable_that_is_used_before_it_is_defined_is_found() -> None:
    ours = overlay("cpu-dev")
    container: dict[str, Any] = {"env": [{"name": "A", "value": "$(B)"}, {"name": "B", "value": "b"}]}
    with pytest.raises(KeyError):
        environment_of(ours, container, {})

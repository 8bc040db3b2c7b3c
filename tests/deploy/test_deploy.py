"""What is in deploy/: manifests against schemas, commands, settings and alerts against the code that they name."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from haproxy_server import checked
from optional import require
from relaygr.cli import app
from relaygr.config import EngineConfig
from relaygr.engine import Decision
from relaygr.engine import Path as RankPath
from relaygr.relay import Health, Transition
from relaygr.serving.gateway_metrics import GATEWAY
from relaygr.serving.instance_metrics import INSTANCE
from relaygr.serving.metrics import Kind
from relaygr.serving.operations import GATEWAY as GATEWAY_CALLS
from relaygr.serving.operations import INSTANCE as INSTANCE_CALLS
from relaygr.serving.settings import Settings, read

yaml = require("yaml", "make test installs it where it can be had")
kubernetes = require("kubernetes_validate", "make test installs it where it can be had")
promql = require("promql_parser", "make test installs it where it can be had")

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SCHEMAS = "1.31"
"""The oldest Kubernetes that the manifests are checked for."""


def documents(path: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def manifests() -> dict[tuple[str, str], Any]:
    """All of kubernetes/, by kind and name."""
    found = [each for file in kustomization()["resources"] for each in documents(KUBERNETES / file)]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def kustomization() -> Any:
    (told,) = documents(KUBERNETES / "kustomization.yaml")
    return told


def refused(manifest: Any) -> str:
    """What the schemas say against it."""
    try:
        kubernetes.validate(manifest, SCHEMAS, strict=True)
    except kubernetes.ValidationError as error:
        return str(error)
    return ""


def pods() -> dict[str, Any]:
    """Pod specs of the manifests without Ray, by the name of their workload."""
    found = manifests().values()
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in found if has_pods(each)}


def has_pods(manifest: Any) -> bool:
    return "template" in manifest.get("spec", {})


def templates() -> list[Any]:
    return [each["spec"]["template"] for each in manifests().values() if has_pods(each)]


def ray_service() -> Any:
    return next(each for each in documents(DEPLOY / "ray" / "rayservice.yaml") if each["kind"] == "RayService")


def ray_pods() -> Iterator[Any]:
    cluster = ray_service()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]


# ---- schemas


@pytest.mark.parametrize("name", [*map(str, kustomization()["resources"])])
def test_manifests_are_what_kubernetes_takes(name: str) -> None:
    found = documents(KUBERNETES / name)
    assert found
    assert [refused(manifest) for manifest in found] == [""] * len(found)


def test_pods_of_ray_are_what_kubernetes_takes() -> None:
    for spec in ray_pods():
        assert refused({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": spec}) == ""


def test_a_manifest_that_is_wrong_is_refused() -> None:
    stateful = manifests()["StatefulSet", "relaygr-instance"]
    assert "replica" in refused({**stateful, "spec": {**stateful["spec"], "replica": 3}})
    assert refused({**stateful, "spec": {**stateful["spec"], "replicas": "three"}})


def test_every_file_is_applied_and_the_gpu_s_patches_fit() -> None:
    told = kustomization()
    generated = [name for each in told["configMapGenerator"] for name in each["files"]]
    listed = {"kustomization.yaml", *told["resources"], *generated}
    assert listed == {path.name for path in KUBERNETES.iterdir()}
    (overlay,) = documents(DEPLOY / "kubernetes-gpu" / "kustomization.yaml")
    (base,) = overlay["resources"]
    assert (DEPLOY / "kubernetes-gpu" / base).resolve() == KUBERNETES
    (patch,) = overlay["patches"]
    patched = manifests()[patch["target"]["kind"], patch["target"]["name"]]
    for step in yaml.safe_load(patch["patch"]):
        assert step["op"] == "add"
        *way, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
        place = patched
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if last == "-":
            place.append(step["value"])
        else:
            place[last] = step["value"]
    assert refused(patched) == ""
    (container,) = patched["spec"]["template"]["spec"]["containers"]
    assert parsed(container["args"])["device"] == "cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


# ---- what pods are told


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line of ours, as our command reads them. Raises for what it does not know."""
    command: Any = typer.main.get_command(app)
    name, rest = "relaygr", list(arguments)
    while hasattr(command, "commands"):
        name = rest.pop(0)
        command = command.commands[name]
    options: dict[str, Any] = command.make_context(name, rest).params
    return options


def test_commands_in_manifests_are_commands_of_ours() -> None:
    instance, gateway = (pods()[name]["containers"][0] for name in ("relaygr-instance", "relaygr-gateway"))
    told = parsed(instance["args"])
    assert (told["slot"], told["port"]) == ("$(POD_NAME)", 8100)
    assert instance["ports"][0]["containerPort"] == told["port"]
    assert gateway["ports"][0]["containerPort"] == parsed(gateway["args"])["port"]
    with pytest.raises(Exception, match="--slots"):
        parsed([*instance["args"], "--slots", "x"])


@pytest.mark.parametrize("name", ["relaygr-instance", "relaygr-gateway", "relaygr-haproxy"])
def test_what_pods_mount_and_probe_is_there(name: str) -> None:
    spec = pods()[name]
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    generated = {each["name"]: each["files"] for each in kustomization()["configMapGenerator"]}
    for mount in container["volumeMounts"]:
        volume = volumes.pop(mount["name"])
        if "configMap" in volume:
            (file,) = generated[volume["configMap"]["name"]]
            assert f"{mount['mountPath']}/{file}" in container["args"]
    assert not volumes
    ports = {port["name"] for port in container["ports"]}
    calls = {operation.path for operation in (GATEWAY_CALLS if name == "relaygr-gateway" else INSTANCE_CALLS)}
    probes = [container[key] for key in ("startupProbe", "livenessProbe", "readinessProbe") if key in container]
    assert len(probes) >= 2
    for probe in probes:
        kind = probe.get("httpGet") or probe["tcpSocket"]
        assert kind["port"] in ports
        assert "httpGet" not in probe or kind["path"] in calls


def test_services_and_budgets_select_pods_that_there_are_and_ports_that_they_have() -> None:
    for (kind, name), each in manifests().items():
        if kind not in ("Service", "PodDisruptionBudget"):
            continue
        wanted = each["spec"]["selector"] if kind == "Service" else each["spec"]["selector"]["matchLabels"]
        (pod,) = [pod for pod in templates() if wanted.items() <= pod["metadata"]["labels"].items()]
        names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in each["spec"].get("ports", [])} <= names, name


# ---- settings


def test_slots_are_the_pods_of_the_stateful_set_at_their_own_names() -> None:
    settings = read(KUBERNETES / "relay.toml")
    stateful = manifests()["StatefulSet", "relaygr-instance"]
    service = manifests()["Service", stateful["spec"]["serviceName"]]
    (port,) = service["spec"]["ports"]
    name = stateful["metadata"]["name"]
    assert settings.gateway.instances == {
        f"{name}-{number}": f"http://{name}-{number}.{service['metadata']['name']}:{port['port']}"
        for number in range(stateful["spec"]["replicas"])
    }
    assert service["spec"]["clusterIP"] == "None" or service["spec"]["clusterIP"] is None


def test_pods_are_given_longer_to_end_than_they_take_to_drain() -> None:
    settings = read(KUBERNETES / "relay.toml")
    assert pods()["relaygr-instance"]["terminationGracePeriodSeconds"] > 2 * settings.instance.drain_s
    gateway = pods()["relaygr-gateway"]
    (pause,) = gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert gateway["terminationGracePeriodSeconds"] > settings.gateway.drain_s + float(pause)
    *_, worker = ray_pods()
    assert worker["terminationGracePeriodSeconds"] > 2 * ray_settings().instance.drain_s


def test_caches_fit_the_memory_that_pods_may_use() -> None:
    settings = read(KUBERNETES / "relay.toml")
    (container,) = pods()["relaygr-instance"]["containers"]
    limit = EngineConfig(host_cache=container["resources"]["limits"]["memory"] + "B").host_bytes
    assert settings.engine.device_bytes() + settings.engine.host_bytes < 0.9 * limit


def test_haproxy_s_configuration_is_what_the_command_prints_and_haproxy_takes(tmp_path: Path) -> None:
    file = KUBERNETES / "haproxy.cfg"
    command = re.search(r"`relaygr (haproxy [^`]+)`", (KUBERNETES / "haproxy.yaml").read_text())
    assert command is not None
    told = shlex.split(command[1].replace("deploy/kubernetes", str(KUBERNETES)))
    printed = CliRunner().invoke(app, told)
    assert printed.exit_code == 0, printed.output
    assert file.read_text() == printed.stdout
    assert checked(file) == ""
    bind = re.search(r"bind :(\d+)", file.read_text())
    (container,) = pods()["relaygr-haproxy"]["containers"]
    assert bind is not None
    assert container["ports"][0]["containerPort"] == int(bind[1])


# ---- Ray


def ray_settings() -> Settings:
    (config,) = [each for each in documents(DEPLOY / "ray" / "rayservice.yaml") if each["kind"] == "ConfigMap"]
    assert refused(config) == ""
    return read(None, tomllib.loads(config["data"]["relay.toml"]))


def test_serve_s_configuration_is_what_serve_takes_and_names_what_the_application_has(tmp_path: Path) -> None:
    require("ray", "make test installs it where it can be had")
    from ray.serve._private.build_app import build_app
    from ray.serve.schema import ServeDeploySchema

    from relaygr.cluster.ray import app as build
    from relaygr.cluster.ray.application import GATEWAY as GATEWAY_NAME
    from relaygr.cluster.ray.application import INSTANCE as INSTANCE_NAME

    told = ServeDeploySchema.model_validate(yaml.safe_load(ray_service()["spec"]["serveConfigV2"]))
    (application,) = told.applications
    assert application.import_path == "relaygr.cluster.ray:app"
    (config,) = [each for each in documents(DEPLOY / "ray" / "rayservice.yaml") if each["kind"] == "ConfigMap"]
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    arguments = {key: str(tmp_path / Path(value).name) for key, value in application.args.items()}
    built = build_app(build(arguments), name=application.name, default_runtime_env=None)
    names = {deployment.name for deployment in built.deployments}
    assert names == {GATEWAY_NAME, INSTANCE_NAME}
    assert {change.name for change in application.deployments} <= names
    for change in application.deployments:
        assert change.user_config == {"model": ray_settings().data.model}


def test_ray_has_the_machines_and_mounts_that_its_settings_ask_for() -> None:
    settings, spec = ray_settings(), ray_service()["spec"]
    cluster = spec["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] >= settings.ray.instances * settings.ray.gpus(settings.engine.device)
    assert group["maxReplicas"] >= (settings.ray.max_instances or 0) * settings.ray.gpus(settings.engine.device)
    assert settings.instance.host == "0.0.0.0"  # other machines reach it
    assert settings.data.store is not None
    assert settings.data.store.startswith("redis://")
    *_, worker = ray_pods()
    (container,) = worker["containers"]
    asked = settings.ray.instance_cpus + settings.ray.gateway_cpus
    assert asked <= float(container["resources"]["requests"]["cpu"])
    for pod in ray_pods():
        mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {"/etc/relaygr", "/models"}
        assert {volume["name"] for volume in pod["volumes"]} == {"config", "models"}


def test_images_and_manifests_have_the_ray_that_is_tested() -> None:
    pin = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    assert f"rayproject/ray:{pin[1]}-py311" in (DEPLOY / "Containerfile.ray").read_text()
    assert ray_service()["spec"]["rayClusterConfig"]["rayVersion"] == pin[1]


# ---- images


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.ray"])
def test_images_are_built_from_files_that_there_are_with_extras_that_there_are(name: str) -> None:
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied: list[str] = []
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        copied += [part for part in line.split()[:-1] if not part.startswith("--")]
    assert all((ROOT / part).exists() for part in copied)
    assert {"pyproject.toml", "src", project["readme"], "LICENSE"} <= set(copied)
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert ("constraints.txt" in copied) >= ("-c constraints.txt" in text)


def test_the_image_s_own_command_is_one_of_ours() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    entry, command = (re.search(rf"^{word} (\[.+\])$", text, re.MULTILINE) for word in ("ENTRYPOINT", "CMD"))
    assert entry is not None
    assert command is not None
    assert yaml.safe_load(entry[1]) == ["relaygr"]
    assert parsed(yaml.safe_load(command[1]))["host"] == "0.0.0.0"
    exposed = re.search(r"^EXPOSE (.+)$", text, re.MULTILINE)
    assert exposed is not None
    assert exposed[1].split() == [str(Settings().gateway.port), str(Settings().instance.port)]
    user = re.search(r"^USER (\d+)$", text, re.MULTILINE)
    assert user is not None
    for name in ("relaygr-instance", "relaygr-gateway"):
        assert pods()[name]["securityContext"]["runAsUser"] == int(user[1])


# ---- Prometheus

METRICS = {metric.name: metric for metric in (*GATEWAY, *INSTANCE)}
SCRAPED = {"pod", "role"}
"""Labels that scraping adds."""
VALUES: dict[str, set[str]] = {
    "health": set(Health),
    "decision": set(Decision),
    "path": {*RankPath, "NONE"},
    "transition": set(Transition),
    "stage": {"retrieval", "pre_processing", "ranking", "total"},
}


def rules() -> list[Any]:
    (told,) = documents(DEPLOY / "prometheus" / "alerts.yaml")
    return [rule for group in told["groups"] for rule in group["rules"]]


def selectors(expression: Any) -> Iterator[Any]:
    """All of a parsed expression, wherever they stand."""
    match type(expression).__name__:
        case "VectorSelector":
            yield expression
        case "MatrixSelector":
            yield expression.vector_selector
        case "BinaryExpr":
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case "Call":
            for argument in expression.args:
                yield from selectors(argument)
        case "AggregateExpr" | "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            yield from selectors(expression.expr)
        case kind:
            assert kind in ("NumberLiteral", "StringLiteral"), kind


def wrong_with(expression: str) -> list[str]:
    """What an expression says that servers do not tell."""
    found = list(selectors(promql.parse(expression)))
    wrong = [] if found else ["it selects nothing"]
    for selector in found:
        name = selector.name
        metric = METRICS.get(name) or METRICS.get(re.sub(r"_(bucket|count|sum)$", "", name))
        if metric is None or (metric.kind is Kind.HISTOGRAM) != (metric.name != name):
            wrong.append(f"{name} is not told")
            continue
        labels = {*metric.labels, *SCRAPED, *(["le"] if metric.kind is Kind.HISTOGRAM else [])}
        for matcher in selector.matchers.matchers:
            if matcher.name not in labels:
                wrong.append(f"{name} has no {matcher.name}")
            known = VALUES.get(matcher.name)
            if known is not None and not set(matcher.value.split("|")) <= known:
                wrong.append(f"{matcher.name} is never {matcher.value}")
    return wrong


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_alerts_are_about_what_servers_tell(rule: Any) -> None:
    assert wrong_with(rule["expr"]) == []
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description"}
    said = " ".join(rule["annotations"].values())
    told = set(re.findall(r"\$labels\.(\w+)", said))
    kept = re.search(r"by \(([\w, ]+)\)", rule["expr"])
    (first, *_) = selectors(promql.parse(rule["expr"]))
    labels = set(kept[1].split(", ")) if kept else {*METRICS[first.name].labels, *SCRAPED}
    assert told <= labels, "a label that the expression does not keep"


def test_alerts_about_nothing_are_found_out() -> None:
    assert wrong_with("relaygr_nothing_total > 1") == ["relaygr_nothing_total is not told"]
    assert wrong_with("relaygr_stage_seconds > 1") == ["relaygr_stage_seconds is not told"]
    assert wrong_with('relaygr_slot_health{wealth="UP"} == 0') == ["relaygr_slot_health has no wealth"]
    assert wrong_with('relaygr_slot_health{health="WELL"} == 0') == ["health is never WELL"]
    assert wrong_with("vector(1) > 0") == ["it selects nothing"]
    with pytest.raises(ValueError):
        promql.parse("sum by (pod (relaygr_leases)")


def test_pods_of_ours_are_scraped_and_no_others() -> None:
    ((job,),) = documents(DEPLOY / "prometheus" / "scrape.yaml")
    assert job["kubernetes_sd_configs"][0]["namespaces"]["names"] == [kustomization()["namespace"]]
    kept = set()
    for pod in templates():
        label = pod["metadata"]["labels"]["app.kubernetes.io/name"]
        for port in pod["spec"]["containers"][0]["ports"]:
            meta = {
                "__meta_kubernetes_pod_label_app_kubernetes_io_name": label,
                "__meta_kubernetes_pod_container_port_name": port["name"],
            }
            keeps = [step for step in job["relabel_configs"] if step.get("action") == "keep"]
            assert len(keeps) == 2
            if all(re.fullmatch(step["regex"], meta[step["source_labels"][0]]) for step in keeps):
                kept.add(label)
    assert kept == {"relaygr-gateway", "relaygr-instance"}
    assert {step["target_label"] for step in job["relabel_configs"] if "target_label" in step} == SCRAPED

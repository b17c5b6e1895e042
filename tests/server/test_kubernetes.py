"""The manifests of docker/kubernetes/ against the models of Kubernetes' API, KubeRay's schema, and the program."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from lightkube.models import apps_v1, core_v1

from lospmm.settings import Settings
from tests.docs.commands import check
from tests.docs.pages import ROOT
from tests.fixtures.nested import lost

Json = dict[str, Any]

FOLDER = ROOT / "docker" / "kubernetes"
OBJECTS: list[Json] = list(yaml.safe_load_all((FOLDER / "lospmm.yaml").read_text()))
CLUSTER: Json = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
COMPOSE: Json = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())

MODELS = {
    "PersistentVolumeClaim": core_v1.PersistentVolumeClaim,
    "Service": core_v1.Service,
    "Deployment": apps_v1.Deployment,
    "StatefulSet": apps_v1.StatefulSet,
}

#: Of KubeRay's RayCluster (ray.io/v1, its definition of 2026-08), without pods' templates and options not used here.
RAY_CLUSTER: Json = json.loads((Path(__file__).parent / "raycluster.json").read_text())


def conforms(given: Json, model: type) -> None:
    """Raise where a field has the wrong type or is missing, or where there is no such field."""
    assert lost(given, msgspec.to_builtins(msgspec.convert(given, model))) == []


def ray_groups(cluster: Json) -> list[Json]:
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


def pods() -> Iterator[Json]:
    """Every pod's specification."""
    for template in [item["spec"].get("template") for item in OBJECTS] + [
        group["template"] for group in ray_groups(CLUSTER)
    ]:
        if template is not None:
            yield template["spec"]


CONTAINERS = [container for pod in pods() for container in pod["containers"]]
OURS = [container for container in CONTAINERS if container["image"].startswith("lospmm:")]


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']} {item['metadata']['name']}")
def test_an_object_conforms_to_its_model(item: Json) -> None:
    conforms(item, MODELS[item["kind"]])


def test_the_ray_cluster_conforms_to_kuberays_schema() -> None:
    jsonschema.validate(CLUSTER, RAY_CLUSTER)
    for group in ray_groups(CLUSTER):
        conforms(group["template"], core_v1.PodTemplateSpec)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replica"), 1),
        (("spec", "replicas"), "2"),
        (("spec", "selector"), None),
        (("spec", "template", "spec", "containers", 0, "volumeMounts", 0, "mountpath"), "/cache"),
        (("spec", "template", "spec", "containers", 0, "env", 0, "value"), 5),
    ],
)
def test_what_does_not_conform_is_noticed(path: tuple[Any, ...], value: object) -> None:
    (item,) = (item for item in OBJECTS if item["metadata"]["name"] == "lospmm-worker")
    wrong = copy.deepcopy(item)
    inner = wrong
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises((msgspec.ValidationError, AssertionError)):
        conforms(wrong, apps_v1.Deployment)


def test_a_misspelt_option_of_ray_is_noticed() -> None:
    wrong = copy.deepcopy(CLUSTER)
    wrong["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, RAY_CLUSTER)


def test_our_containers_run_commands_of_the_program() -> None:
    settings = {f"LOSPMM_{name.upper()}" for name in Settings.model_fields}
    images = {service["image"] for service in COMPOSE["services"].values()}
    for container in OURS:
        assert container["image"] in images
        assert {variable["name"] for variable in container.get("env", ())} <= settings
        if "args" in container:  # KubeRay itself starts Ray in the others
            check(["lospmm", *container["args"]])
    commands = [container["args"][0] for container in OURS if "args" in container]
    assert commands == ["serve", "worker", "worker"]


def test_what_is_named_is_there() -> None:
    """Volumes, claims, labels, keys of the secret, and Ray's version."""
    claims = {item["metadata"]["name"] for item in OBJECTS if item["kind"] == "PersistentVolumeClaim"}
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounted - {"data"} <= set(volumes)
        named = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if len(volume) == 2
                 and "persistentVolumeClaim" in volume}  # fmt: skip
        assert named <= claims
    labels = [item["spec"]["template"]["metadata"]["labels"] for item in OBJECTS if "template" in item["spec"]]
    for item in OBJECTS:
        wanted = item["spec"].get("selector")
        if wanted is not None:
            assert wanted.get("matchLabels", wanted) in labels
    page = (ROOT / "docker" / "README.md").read_text()
    text = (FOLDER / "lospmm.yaml").read_text() + (FOLDER / "kuberay.yaml").read_text()
    for key in ("database-url", "api-keys", "postgres-password"):
        assert f"key: {key}" in text and f"--from-literal={key}=" in page
    assert f"\nray=={CLUSTER['spec']['rayVersion']} " in (ROOT / "requirements.lock").read_text()


def test_other_peoples_images_have_versions() -> None:
    others = {container["image"] for container in CONTAINERS} - {container["image"] for container in OURS}
    assert others == {COMPOSE["services"]["postgres"]["image"]}

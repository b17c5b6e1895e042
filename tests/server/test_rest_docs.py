"""docs/rest.md against the service."""

import dataclasses
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from lospmm.tuning.options import Options
from lospmm_server import problems
from tests.docs.pages import entries, section

PAGE = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()


def test_every_route_is_described_and_there_are_no_others(shared: TestClient) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(re.findall(r"^(?:###|-) `([A-Z]+ /\S*)`", PAGE, re.MULTILINE)) == routes


def test_every_section_shows_curl() -> None:
    for text in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        title = text.partition("\n")[0]
        (path,) = re.findall(r"/\S*?(?=\{|`)", title)[:1]
        assert re.search(rf"^curl .*localhost:8000{re.escape(path)}", text, re.MULTILINE), title


def test_every_parameter_is_described(shared: TestClient) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    parameters = {path: paths[path]["post"]["parameters"] for path in ("/v1/kernels", "/v1/models")}
    of_kernels = {name: default for name, default, _ in entries(section(PAGE, "### `POST /v1/kernels`"))}
    assert of_kernels.keys() == {parameter["name"] for parameter in parameters["/v1/kernels"]}
    assert of_kernels["wait"] == "`30`"
    of_models = section(PAGE, "### `POST /v1/models`")
    assert "\n- parameters of kernels but `tensor`: " in of_models
    own = {name: default for name, default, _ in entries(of_models)}
    (cache,) = (one["schema"]["default"] for one in parameters["/v1/models"] if one["name"] == "cache")
    assert own["cache"] == f"`{cache}`" == "`network`"
    assert of_kernels.keys() - {"tensor"} | own.keys() == {parameter["name"] for parameter in parameters["/v1/models"]}


def test_defaults_are_those_of_tune(shared: TestClient) -> None:
    parameters = shared.get("/openapi.json").json()["paths"]["/v1/kernels"]["post"]["parameters"]
    defaults = {parameter["name"]: parameter["schema"].get("default") for parameter in parameters}
    of_tune = {field.name: field.default for field in dataclasses.fields(Options)}
    shown = defaults.keys() & of_tune.keys()
    assert shown and {name: defaults[name] for name in shown} == {name: of_tune[name] for name in shown}


def test_the_list_of_problems_is_whole() -> None:
    kinds = (*problems.ERRORS.values(), *problems.STATUSES.values(), problems.BAD_PARAMETER, problems.INTERNAL)
    described = [(name.removeprefix("/problems/"), status) for name, status, _ in entries(section(PAGE, "## Problems"))]
    assert sorted(described) == sorted({(kind.name, str(kind.status)) for kind in kinds})


def test_openapi_knows_only_problem_json(shared: TestClient) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert list(response["content"]) == ["application/problem+json"], (method, path, status)
    assert "HTTPValidationError" not in shared.get("/openapi.json").text


def test_openapi_knows_that_a_client_may_have_a_file_already(shared: TestClient) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    files = {path: methods["get"]["responses"] for path, methods in paths.items() if "{digest}" in path}
    assert len(files) == 7
    assert all("304" in responses for responses in files.values())


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_description_is_served(shared: TestClient, path: str) -> None:
    assert "/v1/kernels" in shared.get("/openapi.json").text
    assert shared.get(path).status_code == 200

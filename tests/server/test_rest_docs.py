"""docs/rest.md against the service."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from lospmm_server import problems

PAGE = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()


def test_every_route_has_a_section_and_every_section_a_route(shared: TestClient) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(re.findall(r"^### `(\w+ /\S*)`$", PAGE, re.MULTILINE)) == routes


def test_every_section_shows_curl() -> None:
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        path = re.search(r"/\S*?(?=\{|`)", title)[0]
        assert re.search(rf"^curl .*localhost:8000{re.escape(path)}", section, re.MULTILINE), title


def test_every_parameter_is_described(shared: TestClient) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    for parameter in paths["/v1/kernels"]["post"]["parameters"]:
        assert f"| `{parameter['name']}` |" in PAGE


def test_the_table_of_problems_is_whole() -> None:
    kinds = (*problems.ERRORS.values(), *problems.STATUSES.values(), problems.BAD_PARAMETER, problems.INTERNAL)
    rows = re.findall(r"^\| `/problems/([a-z-]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted({(kind.name, str(kind.status)) for kind in kinds})


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

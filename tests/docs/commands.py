"""The commands of the pages: taken apart, and held against what there is."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs

import typer
from fastapi.routing import APIRoute

from lospmm.cli.commands import COMMANDS, app_with
from lospmm.settings import Settings
from lospmm_server.app import ROUTERS
from tests.docs.pages import ROOT

CLI = typer.main.get_command(app_with(COMMANDS))
VARIABLES = {f"LOSPMM_{name.upper()}" for name in Settings.model_fields}

#: Commands of other people's programs, which only have to look right.
OTHERS = {"docker", "kubectl", "cc", "./embedding"}

_ASSIGNMENT = re.compile(r"(\w+)=.*")
_TARGETS = re.compile(r"^\.PHONY: (.*)$", re.MULTILINE)


def leaves(command: Any = CLI, path: str = "lospmm") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield path, command
    else:
        for name, subcommand in subcommands.items():
            yield from leaves(subcommand, f"{path} {name}")


def targets() -> set[str]:
    """The targets of the Makefile that are there for people."""
    (line,) = _TARGETS.findall((ROOT / "Makefile").read_text())
    return set(line.split())


def _extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def commands(script: str) -> list[list[str]]:
    """The words of each simple command of a shell script, without what is behind a pipe or an arrow."""
    lines = re.sub(r"\\\n\s*", "", script).splitlines()
    words = (shlex.split(re.sub(r" [|>&].*", "", line), comments=True) for line in lines)
    return [line for line in words if line]


def check(words: list[str]) -> None:
    """Fails for an unknown command or option."""
    while assigned := _ASSIGNMENT.fullmatch(words[0]):
        assert not assigned[1].startswith("LOSPMM_") or assigned[1] in VARIABLES, assigned[1]
        words = words[1:]
    program, *arguments = words
    match program.removeprefix(".venv/bin/"):
        case "lospmm":
            _check_lospmm(arguments)
        case "make":
            assert set(arguments) <= targets(), arguments
        case "pip":
            install, package = arguments
            named = re.fullmatch(r"\.(?:\[([\w,]+)\])?", package)
            assert install == "install" and named, arguments
            assert set(filter(None, (named[1] or "").split(","))) <= _extras(), arguments
        case "curl":
            _check_url(arguments)
        case "python":
            assert arguments[0] == "-m", arguments
            assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
        case other:
            assert other in OTHERS, f"{other}: add a check of this command"


def _check_lospmm(arguments: list[str]) -> None:
    command = CLI
    name = "lospmm"
    while (subcommands := getattr(command, "commands", None)) is not None and arguments != ["--version"]:
        name, *arguments = arguments
        assert name in subcommands, f"lospmm {name}"
        command = subcommands[name]
    command.make_context(name, list(arguments))


def _check_url(arguments: list[str]) -> None:
    (url,) = (argument for argument in arguments if argument.startswith("localhost:8000/"))
    path, _, query = url.removeprefix("localhost:8000").partition("?")
    method = "POST" if {"-F", "--data-binary"} & set(arguments) else "GET"
    if "-X" in arguments:
        method = arguments[arguments.index("-X") + 1]
    routes = [
        route
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and method in route.methods
    ]
    found = [route for route in routes if re.fullmatch(re.sub(r"\{\w+\}", r"[\\w$]+", route.path), path)]
    assert found, f"no route {method} {path}"
    assert set(parse_qs(query)) <= _parameters(found[0]), query


def _parameters(route: APIRoute) -> set[str]:
    """The names of what a route takes behind the question mark; a model stands for its fields."""
    return {
        name
        for field in route.dependant.query_params
        for name in getattr(field.field_info.annotation, "model_fields", [field.alias])
    }

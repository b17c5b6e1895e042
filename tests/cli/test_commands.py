"""The list of commands: what --help says of each is the command's own, and needs none of their imports."""

import subprocess
import sys

import pytest
import typer

from lospmm.cli.commands import COMMANDS, app_with


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_lists_a_command_by_its_own_words(name: str) -> None:
    command = typer.main.get_command(app_with([name])).commands[name]  # type: ignore[attr-defined]
    assert str(command.help).partition("\n\n")[0].replace("\n", " ") == COMMANDS[name].summary


def test_the_help_imports_no_command() -> None:
    code = "import sys; from lospmm.cli.main import run; run(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert all(name in done.stdout for name in COMMANDS)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "lospmm.cli.commands" in modules and not {"numpy", "scipy", "lospmm.cli.tune", "lospmm.matrix"} & modules

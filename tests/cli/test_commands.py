"""The list of commands: --help has all of them, and a command that is run imports no other."""

import subprocess
import sys

import pytest

from lospmm.cli.commands import COMMANDS


@pytest.mark.parametrize(("arguments", "shown"), [(["--help"], {*COMMANDS}), (["cache", "ls", "--help"], {"cache"})])
def test_only_what_is_shown_is_imported(arguments: list[str], shown: set[str]) -> None:
    code = f"import sys; from lospmm.cli.main import run; run({arguments}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    *lines, modules = done.stdout.splitlines()
    assert all(name in "\n".join(lines) for name in shown)
    imported = {name.removeprefix("lospmm.cli.") for name in modules.split() if name.startswith("lospmm.cli.")}
    own = {place.partition(":")[0] for place in COMMANDS.values()}
    assert imported & own == {COMMANDS[name].partition(":")[0] for name in shown}

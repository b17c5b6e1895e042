"""TOML files, with one line for what is wrong with them."""

import tomllib
from pathlib import Path
from typing import Any

from lospmm.errors import BadRequest


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises BadRequest for one that cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # bad TOML and bad UTF-8 alike
        raise BadRequest(f"{path}: expected TOML: {error}") from None

"""All settings: every ``LOSPMM_*`` environment variable, its default and meaning (docs/settings.md).

No other module reads these variables.
"""

import difflib
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator

from lospmm.errors import BadSettings, printable

PREFIX = "LOSPMM_"

#: Variables that are neither settings nor mistakes: they mark our own processes, or are for tests and benchmarks.
_OURS = re.compile(rf"{PREFIX}(GUARD|COMMIT|TEST_\w+)")

#: Variables that Kubernetes sets in every container of a service named lospmm or lospmm-*: no mistakes either.
_OF_A_SERVICE = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=.*|PORT=\w+://.*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*)",
    re.DOTALL,
)


#: The default of LOSPMM_MAX_NONZEROS in a service, which reads uploads of others.
SERVICE_NONZEROS = 4_000_000


class Settings(BaseModel):
    """The settings of one process, read from ``LOSPMM_*`` environment variables; docs/settings.md explains each."""

    model_config = ConfigDict(frozen=True)

    cache_dir: Path = Field(default_factory=lambda: platformdirs.user_cache_path("lospmm"))
    toolkit: Path | None = None  # before CUDA_HOME, PATH and the PyPI packages
    workers: PositiveInt = Field(default_factory=lambda: len(os.sched_getaffinity(0)))
    compile_seconds: PositiveFloat = 600.0  # of one compiler process, as its bytes of address space
    compile_bytes: PositiveInt = 8 << 30
    sputnik: Path | None = None
    rankers: Path | None = None
    database_url: str | None = None
    api_keys: Path | None = None
    server: str | None = None
    key: str | None = None
    worker_gpu: str | None = None
    max_jobs: PositiveInt = 4000
    max_jobs_per_key: PositiveInt = 1000
    max_attempts: PositiveInt = 3
    max_n: PositiveInt = 1 << 24
    job_seconds: PositiveFloat = 7200.0
    upload_seconds: PositiveFloat = 300.0
    max_nonzeros: PositiveInt = 50_000_000  # SERVICE_NONZEROS in a service
    max_unrolled_nonzeros: PositiveInt = 4_000_000
    fetch_code: bool = True
    max_upload_bytes: PositiveInt = 256 << 20
    max_uploads_bytes: PositiveInt = 1 << 30
    driver: Literal["auto", "cuda-core", "pycuda"] = "auto"  # cuda-core
    measure_seconds: PositiveFloat = 30.0
    prepare_seconds: PositiveFloat = 120.0

    @field_validator("cache_dir", "toolkit", "sputnik", "rankers", "api_keys")
    @classmethod
    def _at_home(cls, path: Path | None) -> Path | None:
        """Expand ``~``: a variable that a unit file or an image sets has passed through no shell."""
        try:
            return None if path is None else path.expanduser()
        except RuntimeError:
            raise ValueError("no such user") from None


@cache
def settings() -> Settings:
    """Return the settings of this process, read once. Raises BadSettings naming the wrong variable."""
    try:
        by_name = {name.upper(): value for name, value in os.environ.items() if value}
        fields = {field: PREFIX + field.upper() for field in Settings.model_fields}
        return Settings.model_validate({field: by_name[name] for field, name in fields.items() if name in by_name})
    except ValidationError as error:
        first = error.errors()[0]
        why = first["msg"].removeprefix("Value error, ")
        raise BadSettings(f"{PREFIX}{str(first['loc'][0]).upper()}: {str(first['input'])!r:.80}: {why}") from None


def be_a_service() -> None:
    """Apply the defaults of a service to this process and to those that it starts."""
    if "max_nonzeros" not in settings().model_fields_set:
        os.environ[f"{PREFIX}MAX_NONZEROS"] = str(SERVICE_NONZEROS)
        settings.cache_clear()


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return one warning for each variable that looks like a setting but is none.

    Such a variable has no effect and may be misspelt. It is no error: an image may set variables of other versions.
    """
    known = [name.upper() for name in Settings.model_fields]
    lines = []
    for variable, value in sorted(environment.items()):
        name = variable.upper()  # as they are read
        is_other = _OURS.fullmatch(name) or _OF_A_SERVICE.fullmatch(f"{name}={value}")
        if not value or is_other or not name.startswith(PREFIX) or name.removeprefix(PREFIX) in known:
            continue
        close = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=0.7)
        hint = f"did you mean {PREFIX}{close[0]}?" if close else "docs/settings.md lists the settings"
        lines.append(f"{printable(variable[:80])}: no such setting; {hint}")
    return lines

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
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

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
    """The settings of one process, read from ``LOSPMM_*`` environment variables."""

    model_config = ConfigDict(frozen=True)

    cache_dir: Path = Field(
        default_factory=lambda: platformdirs.user_cache_path("lospmm"),
        description="Where compiled units and tuned kernels are kept.",
    )
    toolkit: Path | None = Field(
        default=None,
        description="A CUDA toolkit to take nvcc, ptxas and nvlink from, before CUDA_HOME, PATH and the PyPI packages.",
    )
    workers: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=1,
        description="Compilers run, and kernels built, at the same time.",
    )
    compile_seconds: float = Field(default=600.0, gt=0, description="Time limit of one compiler process, in seconds.")
    compile_bytes: int = Field(
        default=8 << 30, gt=0, description="Address space limit of one compiler process, in bytes."
    )
    sputnik: Path | None = Field(
        default=None, description="A shared library of Sputnik for `lospmm bench` to time too."
    )
    rankers: Path | None = Field(
        default=None, description="Folder of rank models trained here; they come before the shipped ones."
    )
    database_url: str | None = Field(
        default=None,
        description="Where the service keeps its jobs: postgresql://... or sqlite:///...; else a file in the cache.",
    )
    api_keys: Path | None = Field(
        default=None, description="A file of API keys of the service: a name and the sha256 of its key on each line."
    )
    server: str | None = Field(
        default=None, description="Address of a service on which `lospmm tune` and `tune-model` run."
    )
    key: str | None = Field(default=None, description="The API key that goes with requests to it.")
    worker_gpu: str | None = Field(
        default=None,
        description="Device name of the GPU of the service's workers, if it is not this machine's.",
    )
    max_jobs: int = Field(default=4000, gt=0, description="Most jobs of the service that wait or run at a time.")
    max_jobs_per_key: int = Field(
        default=1000, gt=0, description="Most jobs of one API key that wait or run at a time."
    )
    max_attempts: int = Field(default=3, gt=0, description="Attempts at a job that ends its worker, before it fails.")
    max_n: int = Field(default=1 << 24, gt=0, description="The most columns of B that the service tunes for.")
    job_seconds: float = Field(default=7200.0, gt=0, description="Time limit of one job of the service.")
    upload_seconds: float = Field(default=300.0, gt=0, description="Time limit for the body of a request to arrive.")
    max_nonzeros: int = Field(
        default=50_000_000,
        gt=0,
        description=f"The most nonzeros of a matrix that is read; {SERVICE_NONZEROS} by a service unless it is set.",
    )
    max_unrolled_nonzeros: int = Field(
        default=4_000_000, gt=0, description="The most nonzeros that a kernel has in its instructions."
    )
    fetch_code: bool = Field(default=True, description="Prefetch the code of large kernels, where the emitter can.")
    max_upload_bytes: int = Field(default=256 << 20, gt=0, description="The largest matrix file read, in bytes.")
    max_uploads_bytes: int = Field(
        default=1 << 30, gt=0, description="Uploads that a service holds at the same time, in bytes."
    )
    driver: Literal["auto", "cuda-core", "pycuda"] = Field(
        default="auto", description="The library that a GPU is driven through; auto is cuda-core."
    )
    measure_seconds: float = Field(
        default=30.0, gt=0, description="Time limit of one kernel that is checked and timed on a GPU, in seconds."
    )
    prepare_seconds: float = Field(
        default=120.0, gt=0, description="Time limit for the process that runs kernels to start and to hold A and B."
    )

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

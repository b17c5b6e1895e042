"""What a user may ask of a tuning, and what "auto" stands for on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lospmm.codegen import EMITTERS
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.device import DeviceSpec
from lospmm.errors import BadRequest, Unsupported

#: What each option may be.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "emitter": ("auto", *EMITTERS),
    "ranker": ("none",),
    "measure": ("auto", "gpu", "none"),
    "verify": ("auto", "gpu", "cpu", "none"),
    "trials": ("full",),
    "dtype": ("float32",),
}

#: What the interface names but this version does not do, and what to use meanwhile.
COMING: Mapping[str, str] = {
    "lambdamart": "no model has been trained yet; 'none' orders by the analytic estimate",
    "proxy": "this version times the kernels themselves; use trials 'full'",
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to tune; docs/cli.md says what each means. Raises BadRequest or Unsupported for what there is not."""

    emitter: str = "auto"
    ranker: str = "none"
    measure: str = "auto"
    verify: str = "auto"
    trials: str = "full"
    dtype: str = "float32"
    shortlist_size: int = 10
    budget_seconds: float | None = None  # for timing candidates; None: as many as the search asks for

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value in COMING:
                raise Unsupported(f"{name} {value}: {COMING[value]}")
            if value not in choices:
                raise BadRequest(f"{name} {value!r}: choose one of {', '.join(choices)}")
        if self.shortlist_size < 1:
            raise BadRequest(f"shortlist {self.shortlist_size}: at least 1")
        if self.budget_seconds is not None and not 0 < self.budget_seconds < float("inf"):
            raise BadRequest(f"budget {self.budget_seconds}: a positive number of seconds")

    def resolved(self, device: DeviceSpec, own_gpu: str | None) -> "Options":
        """With nothing left to decide, for kernels of ``device`` on a machine whose GPU is ``own_gpu``, by its name.

        Raises BadRequest where a GPU is asked for that this machine does not have.
        """
        here = own_gpu == device.name
        measure = ("gpu" if here else "none") if self.measure == "auto" else self.measure
        verify = ("gpu" if here else "cpu") if self.verify == "auto" else self.verify
        if "gpu" in (measure, verify) and not here:
            asked = "measure" if measure == "gpu" else "verify"
            found = f"this machine has {own_gpu}" if own_gpu else "this machine has no GPU of the device table"
            raise BadRequest(f"{asked} gpu: {device.name} is needed, and {found}")
        emitter = default_emitter(device.arch) if self.emitter == "auto" else self.emitter
        return replace(self, emitter=emitter, measure=measure, verify=verify)


def default_emitter(arch: str) -> str:
    """Machine code where it was run on a GPU, PTX elsewhere."""
    return "sass" if arch in GENERATIONS and not GENERATIONS[arch].experimental else "ptx"

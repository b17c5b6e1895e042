"""Arguments and options that several commands have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import numpy as np
import typer

from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadRequest, printable
from lospmm.matrix import limit, readers
from lospmm.problem.device import DEVICES, DeviceSpec, find_device
from lospmm.problem.dtype import DTYPES, FLOAT32
from lospmm.progress import tell
from lospmm.settings import settings
from lospmm.tuning.options import Options, called, check_served

KernelArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `lospmm tune` wrote.")]
MatrixArgument = Annotated[
    Path, typer.Argument(metavar="MATRIX", help="A pruned weight matrix: .npz .npy .mtx .smtx .safetensors .onnx .pt.")
]
ColumnsOption = Annotated[int, typer.Option("--n", help="Columns of B.")]
LayerColumnsOption = Annotated[int | None, typer.Option("--n", help="Columns of B; needed without --conv.")]
LayersOption = Annotated[
    Path | None,
    typer.Option("--layers", help="A layer table, .toml or .json: N or a convolution for each layer, by name."),
]
ConvolutionOption = Annotated[
    str | None,
    typer.Option(
        "--conv", help="A convolution, as 32x64x56x56,3x3,stride=2,padding=1: input, window, stride, padding."
    ),
]
BiasOption = Annotated[Path | None, typer.Option("--bias", help="Add a .npy with one number per row of C.")]
BiasesOption = Annotated[bool, typer.Option("--biases", help="Add the bias beside each weight of a model.")]
MinSparsityOption = Annotated[
    float, typer.Option("--min-sparsity", help="Skip layers with a smaller share of zeros; 0 skips none.")
]
MIN_SPARSITY = limit.MIN_SPARSITY
ReluOption = Annotated[bool, typer.Option("--relu", help="Apply ReLU to C.")]
ResidualOption = Annotated[bool, typer.Option("--residual", help="Add a third argument of C's shape.")]
DeviceOption = Annotated[str, typer.Option("--device", help="A GPU of the device table, a device file, or auto.")]
DeviceFileOption = Annotated[str, typer.Option("--device", help="A device file, where the kernel was tuned for one.")]
TensorOption = Annotated[str | None, typer.Option("--tensor", help="The weight to take from a model.")]
TransposeOption = Annotated[
    bool, typer.Option("--transpose", help="The weights are in x out, as scikit-learn, Keras and JAX hold them.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed for the values of a pattern (.smtx).")]
EmitterOption = Annotated[str, typer.Option("--emitter", help="sass, ptx, cuda, or auto: sass on sm_90, else ptx.")]
CacheOption = Annotated[
    str,
    typer.Option("--cache", help="cold: B is read from memory; warm: from the L2 cache; network: as in a network."),
]
ServerOption = Annotated[
    str | None,
    typer.Option("--server", help="Address of a service to tune on; '': this machine (LOSPMM_SERVER)."),
]
KeyOption = Annotated[str | None, typer.Option("--key", help="The API key of the service (LOSPMM_KEY).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]

#: The help of each option's flag, or its flag if other commands have it too; type and default are the option's.
_OPTION_FLAGS: Mapping[str, Any] = MappingProxyType(
    {
        "emitter": EmitterOption,
        "ranker": "none: order by the estimate; lambdamart: by a model trained on the GPU; auto: that, if any.",
        "shortlist_size": "Candidates to time first, or to list.",
        "measure": "gpu: time candidates; none: choose by estimate; auto: gpu if present.",
        "trials": "full: time kernels; proxy: time shorter programs, then the fastest few kernels.",
        "budget_seconds": "Time limit in seconds; 0: nothing is timed.",
        "verify": "gpu, cpu or none: where C is compared with float64; auto: gpu if present.",
        "dtype": "Type of B and C: float32, tf32, float16 or bfloat16.",
        "sums": "What sums may be rounded to: float32, or the 16-bit type of --dtype.",
        "families": "Kernel families to search, separated by commas, or all.",
        "cache": CacheOption,
        "memory": "low: kernels of every N read one copy of A (lospmm join); fast: the fastest.",
        "each": "Search every layer, instead of taking the plan of a similar one.",
        "values": "Type that A is stored in: dtype, or int8 or fp8_e4m3 with a scale per row.",
    }
)

#: Flags of what a kernel computes, or each kernel of a model, with their defaults.
_LAYER_FLAGS: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {
        "conv": (ConvolutionOption, None),
        "transpose": (TransposeOption, False),
        "relu": (ReluOption, False),
        "residual": (ResidualOption, False),
    }
)

#: The other flags of a tuning, with their defaults.
_OTHER_FLAGS: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {
        "as_json": (JsonOption, False),
        "quiet": (QuietOption, False),
        "device": (DeviceOption, "auto"),
        "seed": (SeedOption, 0),
        "server": (ServerOption, None),
        "key": (KeyOption, None),
    }
)


def out_option(meaning: str) -> Any:
    """--out: a folder; an empty text is refused, as it would mean the current one."""

    def folder(text: str) -> Path:
        if not text:
            raise BadRequest("--out is empty: name a folder")
        return Path(text)

    return typer.Option("--out", parser=folder, metavar="<path>", help=meaning)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Values of a tuning's flags.

    ``layer`` has those of _LAYER_FLAGS; ``address`` is a service with its API key, or this machine.
    """

    layer: Mapping[str, Any]
    as_json: bool
    quiet: bool
    device: str
    seed: int
    options: Options
    address: str | None
    key: str | None


def tunes(command: Callable[..., None], cache: str = "cold") -> Callable[..., None]:
    """Add a tuning's flags, --cache with this default, after a command's own; it gets their values as ``tuning``."""
    own = [one for one in signature(command).parameters.values() if one.name != "tuning"]
    options = {name: (_flag(name), getattr(Options(cache=cache), name)) for name in _OPTION_FLAGS}
    flags = {**_LAYER_FLAGS, **options, **_OTHER_FLAGS}

    @wraps(command)
    def run(**given: Any) -> None:
        layer, chosen, others = (
            {name: given.pop(name) for name in kind} for kind in (_LAYER_FLAGS, options, _OTHER_FLAGS)
        )
        command(**given, tuning=_tuning(layer, chosen, **others))

    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=flag)
        for name, (flag, default) in flags.items()
    ]
    run.__signature__ = Signature([*own, *added])  # type: ignore[attr-defined]  # where Typer looks
    return run


def _flag(name: str) -> Any:
    flag = _OPTION_FLAGS[name]
    if not isinstance(flag, str):
        return flag
    return Annotated[get_type_hints(Options)[name], typer.Option(f"--{called(name)}", help=flag)]


def _tuning(
    layer: Mapping[str, Any], options: Mapping[str, Any], *, server: str | None, key: str | None, **others: Any
) -> Tuning:
    """Raise BadRequest and Unsupported for flags that do not go together."""
    address = (settings().server if server is None else server) or None
    if key and server is None and address is None:
        raise BadRequest("--key goes with a service: name it with --server or in LOSPMM_SERVER, or leave the key out")
    if address is not None:  # first: a message about a value would say what it may be
        check_served(options)
    return Tuning(layer, options=Options(**options), address=address, key=key, **others)


def say(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that writes lines to stderr, or nothing."""

    def write(line: str) -> None:
        if not quiet:
            tell(printable(line))

    return write


def tuned_for(kept: Artifact, directory: Path, device: str) -> DeviceSpec:
    """Return the device of a kernel, whose file is ``device`` if it has one. Raises BadRequest."""
    recorded = kept.manifest["device"]
    if not device and recorded not in DEVICES:
        raise BadRequest(f"{directory}: tuned for {recorded!r}, of a device file: name it by --device")
    return find_device(device or recorded)


def note_of_elements(file: readers.MatrixFile, dtype: str) -> None:
    """Note weights of 16 bits: B and C of that type, in place of the default float32, may halve the time."""
    weights = file.matrix.data
    if dtype != FLOAT32.name or file.values != "stored" or (weights == np.rint(weights)).all():
        return
    for one in (DTYPES["bfloat16"], DTYPES["float16"]):  # bfloat16 first: most of its weights are float16 too
        with np.errstate(over="ignore"):
            is_exact = np.array_equal(one.rounded(weights), weights)
        if is_exact:
            note = f"note: all weights are {one.name}; B and C are float32 unless --dtype {one.name} says otherwise"
            tell(note)
            return

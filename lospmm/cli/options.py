"""Arguments and options that several commands have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lospmm.errors import BadRequest, printable
from lospmm.gpu.detect import device_of
from lospmm.matrix import readers
from lospmm.problem.problem import Problem
from lospmm.progress import tell
from lospmm.settings import settings
from lospmm.tuning.options import Options, check_served

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
BiasOption = Annotated[Path | None, typer.Option("--bias", help="Add a .npy with one number a row of C.")]
BiasesOption = Annotated[bool, typer.Option("--biases", help="Add the bias beside each weight of a model.")]
ReluOption = Annotated[bool, typer.Option("--relu", help="Apply ReLU to C.")]
ResidualOption = Annotated[bool, typer.Option("--residual", help="Add a third argument of C's shape.")]
DeviceOption = Annotated[str, typer.Option("--device", help="A GPU of the device table, a device file, or auto.")]
TensorOption = Annotated[str | None, typer.Option("--tensor", help="The weight to take from a model.")]
TransposeOption = Annotated[
    bool, typer.Option("--transpose", help="The weights are in x out, as scikit-learn, Keras and JAX hold them.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed for the values of a pattern (.smtx).")]
EmitterOption = Annotated[
    str, typer.Option("--emitter", help="sass, ptx, cuda, or auto: sass where it has run on a GPU, else ptx.")
]
RankerOption = Annotated[
    str,
    typer.Option(
        "--ranker",
        help="none: order by the analytic estimate; lambdamart: by a model trained on the GPU; auto: that, if any.",
    ),
]
ShortlistOption = Annotated[int, typer.Option("--shortlist", help="Candidates to time first, or to list.")]
MeasureOption = Annotated[
    str,
    typer.Option("--measure", help="gpu: time candidates; none: choose by estimate; auto: gpu if present."),
]
TrialsOption = Annotated[
    str, typer.Option("--trials", help="full: time the kernels themselves; proxy: stand-ins for them, then the best.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", help="Time limit in seconds; 0: nothing is timed."),
]
VerifyOption = Annotated[
    str,
    typer.Option("--verify", help="gpu, cpu or none: where C is compared with float64; auto: gpu if present."),
]
FamiliesOption = Annotated[
    str, typer.Option("--families", help="Kernel families to search, separated by commas, or all.")
]
CacheOption = Annotated[
    str,
    typer.Option("--cache", help="cold: B is read from memory; warm: from the L2 cache; network: as in a network."),
]
MemoryOption = Annotated[
    str, typer.Option("--memory", help="low: kernels of every N read one copy of A (lospmm join); fast: the fastest.")
]
ValuesOption = Annotated[
    str, typer.Option("--values", help="What A is held in: dtype, or int8 or fp8_e4m3 with a scale for each row.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Type of B and C: float32, tf32, float16 or bfloat16.")]
SumsOption = Annotated[
    str, typer.Option("--sums", help="What sums may be rounded to: float32, or the 16-bit type of --dtype.")
]
ServerOption = Annotated[
    str | None,
    typer.Option("--server", help="Address of a service to tune on; '': this machine (LOSPMM_SERVER)."),
]
KeyOption = Annotated[str | None, typer.Option("--key", help="The API key of the service (LOSPMM_KEY).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


def out_option(meaning: str) -> Any:
    """--out: a folder, which an empty text does not name: it would stand for the current one."""

    def folder(text: str) -> Path:
        if not text:
            raise BadRequest("--out is empty: name a folder")
        return Path(text)

    return typer.Option("--out", parser=folder, metavar="<path>", help=meaning)


def chosen_server(server: str | None, key: str | None) -> str | None:
    """Return the address of the service that does the work; None: this machine.

    Raises BadRequest for a key without a service.
    """
    address = (settings().server if server is None else server) or None
    if key and server is None and address is None:
        raise BadRequest("--key goes with a service: name it with --server or in LOSPMM_SERVER, or leave the key out")
    return address


def options_for(address: str | None, **given: Any) -> Options:
    """Return the options of a command that runs at ``address``. Raises BadRequest, Unsupported.

    What a service decides itself is refused first: a message about its value would say what it may be.
    """
    if address is not None:
        check_served(given)
    return Options(**given)


def say(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that writes lines to stderr, or nothing."""

    def write(line: str) -> None:
        if not quiet:
            tell(printable(line))

    return write


def read_problem(
    matrix: Path, n: int, device: str, tensor: str | None, seed: int
) -> tuple[readers.MatrixFile, Problem]:
    """Read a matrix file, and return it with the problem of its product. Raises BadRequest."""
    gpu = device_of(device)
    file = readers.read(matrix, tensor=tensor, seed=seed)
    return file, Problem(file.matrix, n, gpu)

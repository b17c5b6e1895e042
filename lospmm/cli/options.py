"""Arguments and options that several commands have."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lospmm.errors import BadRequest, printable
from lospmm.settings import settings
from lospmm.tuning.options import Options, check_served

MatrixArgument = Annotated[
    Path, typer.Argument(metavar="MATRIX", help="A pruned weight matrix: .npz .npy .mtx .smtx .safetensors.")
]
ColumnsOption = Annotated[int, typer.Option("--n", help="Columns of B.")]
LayerColumnsOption = Annotated[int | None, typer.Option("--n", help="Columns of B; a convolution knows its own.")]
ConvolutionOption = Annotated[
    str | None,
    typer.Option("--conv", help="A convolution, as 32x64x56x56,3x3,stride=2,padding=1: its input, window and way."),
]
BiasOption = Annotated[
    Path | None, typer.Option("--bias", help="A .npy with a number for each row, which the kernel adds.")
]
BiasesOption = Annotated[
    bool, typer.Option("--biases", help="Each kernel adds the bias that lies beside its weight in a .safetensors.")
]
ReluOption = Annotated[bool, typer.Option("--relu", help="The kernel takes ReLU of what it stores.")]
ResidualOption = Annotated[bool, typer.Option("--residual", help="The kernel adds its third argument, of C's shape.")]
DeviceOption = Annotated[str, typer.Option("--device", help="A GPU of the device table, a device file, or auto.")]
TensorOption = Annotated[str | None, typer.Option("--tensor", help="The weight to take from a .safetensors.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Draws the values of a pattern (.smtx).")]
EmitterOption = Annotated[
    str, typer.Option("--emitter", help="sass, ptx, cuda, or auto: sass where it was run on a GPU, else ptx.")
]
RankerOption = Annotated[
    str,
    typer.Option(
        "--ranker",
        help="none: order by the analytic estimate; lambdamart: by a model trained on the GPU; auto: that where it is.",
    ),
]
ShortlistOption = Annotated[int, typer.Option("--shortlist", help="Candidates to time first, or to list.")]
MeasureOption = Annotated[
    str, typer.Option("--measure", help="gpu: time candidates; none: choose by estimate; auto: gpu where it is.")
]
TrialsOption = Annotated[
    str, typer.Option("--trials", help="full: time the kernels themselves; proxy: what stands for them, then the best.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", help="Seconds that all of it may take; 0: nothing is timed."),
]
VerifyOption = Annotated[
    str, typer.Option("--verify", help="gpu, cpu or none: where it is run against float64; auto: gpu where it is.")
]
FamiliesOption = Annotated[
    str, typer.Option("--families", help="Kernel families that take part, with commas between, or all.")
]
CacheOption = Annotated[
    str,
    typer.Option("--cache", help="cold: B is read from memory; warm: from the L2 cache; network: as in a network."),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Of B and C: float32, tf32, float16 or bfloat16.")]
SumsOption = Annotated[
    str, typer.Option("--sums", help="What sums may be rounded to: float32, or the 16-bit type of --dtype.")
]
ServerOption = Annotated[
    str | None,
    typer.Option("--server", help="A service that does the work, by its address; '': this machine (LOSPMM_SERVER)."),
]
KeyOption = Annotated[str | None, typer.Option("--key", help="The API key of the service (LOSPMM_KEY).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


def out_option(meaning: str) -> Any:
    """--out: a folder, which an empty text does not name: it would stand for the current one."""

    def folder(text: str) -> Path:
        if not text:
            raise BadRequest("--out is empty: name a folder, a new one or one of its own")
        return Path(text)

    return typer.Option("--out", parser=folder, metavar="<path>", help=meaning)


def chosen_server(server: str | None, key: str | None) -> str | None:
    """The address of the service that is to do the work; None: this machine. Raises BadRequest for a key of none."""
    address = (settings().server if server is None else server) or None
    if key and server is None and address is None:
        raise BadRequest("--key goes with a service: name it with --server or in LOSPMM_SERVER, or leave the key out")
    return address


def options_for(address: str | None, **given: Any) -> Options:
    """The options of a command; what a service at ``address`` decides itself is refused without a look at its value, of
    which a message would say what it may be."""
    if address is not None:
        check_served(given)
    return Options(**given)


def say(*, quiet: bool) -> Callable[[str], None]:
    """Writes lines to stderr, or nothing."""

    def write(line: str) -> None:
        if not quiet:
            print(printable(line), file=sys.stderr, flush=True)

    return write

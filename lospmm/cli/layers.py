"""``lospmm layers``: write the layer table of a PyTorch model."""

import runpy
from pathlib import Path
from typing import Annotated, Any

import typer

from lospmm.cli.options import say
from lospmm.errors import BadRequest, LospmmError, extra_needed


def layers(
    model: Annotated[
        str, typer.Argument(metavar="MODEL.py:build", help="A Python file, and its function that returns the model.")
    ],
    example: Annotated[
        list[str],
        typer.Option("--example", help="Shape of an input, as 32x3x224x224, or 1x128:int64; one for each argument."),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="The .toml to write; else it is printed.")] = None,
    min_sparsity: Annotated[
        float, typer.Option("--min-sparsity", help="Skip layers with a smaller share of zeros.")
    ] = 0.6,
) -> None:
    """Run a PyTorch model once, and write N or the convolution of each layer for `lospmm tune-model --layers`.

    MODEL.py is run as a program: give only files that you trust. Inputs are random numbers, or zeros of an integer
    type.
    """
    with extra_needed("torch", "lospmm layers"):
        from lospmm.nn import table as tables
    inputs = tuple(tables.input_of(text) for text in example)
    built = _built(model)
    try:
        table = tables.layers(built, inputs, min_sparsity=min_sparsity)
    except LospmmError:
        raise
    except Exception as error:  # the model may raise anything
        raise BadRequest(f"{model}: cannot be run on the example {' '.join(example)}: {_reason(error)}") from error
    if out is None:
        print(table.to_toml(), end="")
        return
    try:
        out.write_text(table.to_toml(), "utf-8")
    except OSError as error:
        raise BadRequest(f"{out}: cannot be written: {error.strerror}") from None
    asked = sum(row.skip is None for row in table.rows.values())
    say(quiet=False)(f"{out}: {asked} layers to tune, {len(table.rows) - asked} skipped")


def _built(text: str) -> Any:
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise BadRequest(f"{text!r:.160}: name a Python file and its function, as model.py:build")
    if not Path(path).is_file():
        raise BadRequest(f"{path}: there is no such file")
    try:
        found = runpy.run_path(path)
        if name not in found:
            raise BadRequest(f"{path}: has no function {name!r}")
        model = found[name]()
        return model.eval() if hasattr(model, "eval") else model
    except BadRequest:
        raise
    except Exception as error:  # the file may raise anything
        raise BadRequest(f"{text}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

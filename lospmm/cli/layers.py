"""``lospmm layers``: write the layer table of a PyTorch or ONNX model."""

import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from lospmm.artifact.artifact import write_file
from lospmm.cli.options import MIN_SPARSITY, MinSparsityOption, say
from lospmm.errors import BadMatrix, BadRequest, DiskFault, LospmmError, extra_needed, system_errors
from lospmm.matrix.limit import limit_hint
from lospmm.matrix.readers import content_of_path
from lospmm.model.layer_table import LayerTable
from lospmm.model.onnx_table import table_of_onnx


def layers(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A Python file and its function, as model.py:build, or an .onnx file."),
    ],
    example: Annotated[
        list[str] | None,
        typer.Option("--example", help="Shape of an input, as 32x3x224x224, or 1x128:int64; one for each input."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The .toml to write; else it is printed.")] = None,
    min_sparsity: MinSparsityOption = MIN_SPARSITY,
) -> None:
    """Write N or the convolution of each layer of a model, for `lospmm tune-model --layers`.

    A PyTorch model is run once, on random numbers, or on zeros of an integer type. Its file is run as a program: give
    only files that you trust. Of an ONNX model shapes are inferred, from --example where the file leaves them open.
    """
    is_onnx = model.lower().endswith(".onnx")
    table = _of_onnx(model, example or [], min_sparsity) if is_onnx else _of_python(model, example or [], min_sparsity)
    whys = Counter(row.skip for row in table.rows.values())
    asked = whys.pop(None, 0)
    said = f"{asked} layers to tune, {whys.total()} skipped"
    said += f" ({'; '.join(f'{count}: {why}' for why, count in whys.most_common(3))})" if whys else ""
    said += "" if asked else limit_hint(table.few, "--min-sparsity ")
    if out is None:
        print(table.to_toml(), end="")
        say(quiet=asked > 0)(said)
        return
    with system_errors(DiskFault, f"{out}: cannot be written"):
        if out.exists() and not out.is_file():
            raise BadRequest(f"{out}: is no regular file; name one, or leave out --out to print the table")
    write_file(out.resolve(), table.to_toml())
    say(quiet=False)(f"{out}: {said}")


def _of_onnx(model: str, example: list[str], min_sparsity: float) -> LayerTable:
    content = content_of_path(Path(model))
    try:
        return table_of_onnx(content, example, min_sparsity=min_sparsity)
    except BadMatrix as error:
        raise BadMatrix(f"{model}: {error}") from None


def _of_python(model: str, example: list[str], min_sparsity: float) -> LayerTable:
    path, _, name = model.rpartition(":")
    if not path or not name.isidentifier():
        raise BadRequest(f"{model!r:.160}: name a Python file and its function, as model.py:build, or an .onnx file")
    if not example:
        raise BadRequest("--example is missing: the shape of each input of a PyTorch model, as 32x3x224x224")
    with extra_needed("torch", "lospmm layers"):
        from lospmm.nn import table as tables
    inputs = tuple(tables.input_of(text) for text in example)
    sys.path.insert(0, own := str(Path(path).resolve().parent))  # as `python FILE` does, for what lies beside it
    try:
        built = _built(path, name)
        return tables.layers(built, inputs, min_sparsity=min_sparsity)
    except LospmmError:
        raise
    except Exception as error:  # the model may raise anything
        ids = "; give token ids as 1x128:int64" if "'indices'" in str(error) else ""  # of an embedding
        raise BadRequest(f"{model}: cannot be run on the example {' '.join(example)}: {_reason(error)}{ids}") from error
    finally:
        sys.path.remove(own)


def _built(path: str, name: str) -> Any:
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
        raise BadRequest(f"{path}:{name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

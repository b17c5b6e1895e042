"""Parameters of the service's routes that tune."""

from collections.abc import Iterable, Mapping
from typing import Any

from lospmm.kernel import whole_number
from lospmm.model.layer_table import LayerSpec
from lospmm.problem.convolution import Convolution, written
from lospmm.problem.problem import columns_of
from lospmm.tuning.options import SERVED_OPTIONS, check_served, options_of


def options_query(device: str, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a tuning, without those of a layer.

    Raises BadRequest, and Unsupported for what the service decides itself.
    """
    check_served(options)
    chosen = options_of(options)
    served = {name: getattr(chosen, name) for name in SERVED_OPTIONS}
    return {"device": str(device), "seed": whole_number("seed", seed), **served}


def row_of(
    n: int | Iterable[int] | None, convolution: Convolution | None, *, bias: bool, relu: bool, residual: bool
) -> LayerSpec:
    """Return the row of all layers of a model, with one or several numbers of columns. Raises BadRequest."""
    if isinstance(n, Iterable):
        columns: int | tuple[int, ...] | None = tuple(whole_number("n", one) for one in n)
    else:
        columns = None if n is None else whole_number("n", n)
    columns_of(0, convolution)  # raises for what is no convolution
    conv = None if convolution is None else written(convolution)
    return LayerSpec(n=columns, conv=conv, bias=bias, relu=relu, residual=residual)


def row_query(row: LayerSpec) -> dict[str, Any]:
    """Return the parameters of a layer, of its row of a layer table; those with their defaults are left out."""
    given = {name: value for name, value in row.given.items() if name not in ("n", "groups", "transpose", "bias")}
    return {"n": ",".join(str(one.columns) for one in row.each)} | given

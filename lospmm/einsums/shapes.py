"""The form of an expression, whatever its names are: what the tables of kernels are looked up by."""

from collections.abc import Sequence

from lospmm.einsums.expression import TensorAccess


def shape_of_text(output: TensorAccess, factors: Sequence[TensorAccess]) -> str:
    """The text with its names counted in the order in which they first occur."""
    numbers: dict[str, int] = {}

    def number(name: str) -> str:
        return str(numbers.setdefault(name, len(numbers)))

    def text(access: TensorAccess) -> str:
        parts = []
        for index in access.indices:
            own = number(index.name)
            inner = ",".join(number(one.name) for one in index.variables)
            parts.append(f"{own}[{inner}]" if inner else own)
        return f"{number(access.name)}[{','.join(parts)}]"

    return f"{text(output)}+={'*'.join(text(factor) for factor in factors)}"

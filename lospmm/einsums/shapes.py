"""The form of an expression, independent of its names: the key of the tables of kernels."""

from collections.abc import Sequence

from lospmm.einsums.expression import TensorAccess


def shape_of_text(output: TensorAccess, factors: Sequence[TensorAccess]) -> str:
    """Return the expression with each name replaced by its number in order of first occurrence."""
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

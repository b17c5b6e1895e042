"""ptxas at another optimization level than the project's, for comparison."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lospmm.toolchain import compile, compilers

IN_USE = "-O1"


@contextmanager
def ptxas_level(level: str) -> Iterator[None]:
    """Within the block, PTX is compiled at ``level``, as in "-O3"."""

    def at_level(*arguments: Any) -> compilers.Compiler:
        compiler = compilers.COMPILERS["ptx"](*arguments)
        assert IN_USE in compiler.options
        options = tuple(level if option == IN_USE else option for option in compiler.options)
        return dataclasses.replace(compiler, options=options)

    with mock.patch.object(compile, "COMPILERS", {**compilers.COMPILERS, "ptx": at_level}):
        yield

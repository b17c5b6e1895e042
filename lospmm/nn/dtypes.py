"""PyTorch's types and ours: what a layer's weights are made of decides what its kernels take."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lospmm.errors import BadRequest
from lospmm.problem.dtype import DTYPES, FLOAT32, Dtype
from lospmm.problem.problem import Problem
from lospmm.tuning.options import Options

#: By the name of ours; tensors of float32 may be multiplied as tf32.
TORCH: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)

#: Of a tensor's type.
_OURS = {torch.float32: FLOAT32, torch.float16: DTYPES["float16"], torch.bfloat16: DTYPES["bfloat16"]}


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(tensor: Tensor) -> Dtype | None:
    """None for a type that no kernel takes."""
    return _OURS.get(tensor.dtype)


def torch_dtype_of(manifest: Mapping[str, Any]) -> torch.dtype:
    """Of a kernel's B and C."""
    return TORCH[manifest["dtype"]]


def options_for(problem: Problem, options: Options) -> Options:
    """The options of a layer: the type is that of its weights, which of float32 may be tf32 where it is asked for.

    Raises BadRequest where a 16-bit type is asked for and the layer is not of it.
    """
    asked, own = options.dtype, problem.dtype.name
    if asked == own or (own == "float32" and asked == "tf32") or (asked == "float32" and problem.dtype.is_16_bit):
        return replace(options, dtype=asked if own == "float32" else own)
    raise BadRequest(f"dtype {asked}: its weights are {own}; convert the model first, or leave the option out")

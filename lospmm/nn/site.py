"""The pruned weights of a model, and the shapes of what each is multiplied with."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lospmm.errors import LospmmError, Unsupported
from lospmm.kernel import Kernel
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.nn.attention import SparseMultiheadAttention, no_short_cuts, why_passed_by
from lospmm.nn.bound import ColumnBucket, Tensors, bucket_of
from lospmm.nn.dtypes import dtype_of, named
from lospmm.nn.following import evaluated
from lospmm.nn.fusion import FusedConv2d, FusedLinear
from lospmm.nn.layer import CLASSES, Sparse, as_images, is_dense, sparse_class, way_of
from lospmm.nn.place import WeightPlace, place_of, tensors_of
from lospmm.nn.report import Row
from lospmm.problem.convolution import Convolution

#: The class with kernels of each that can have them.
_ALL: Mapping[type[nn.Module], type[Sparse]] = {**CLASSES, nn.MultiheadAttention: SparseMultiheadAttention}

#: The name of each weight, and of the bias that goes with it.
_WEIGHTS: Mapping[type[Sparse], tuple[str, str]] = {SparseMultiheadAttention: ("in_proj_weight", "in_proj_bias")}


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A weight that is pruned enough. ``weight`` is its name in ``module``."""

    name: str
    module: nn.Module
    weight: str
    sparse: type[Sparse]
    place: WeightPlace
    matrix: SparseMatrix
    sparsity: float  # the share of zeros in the weight; A has more where the weight has groups

    @property
    def tensors(self) -> Tensors:
        return tensors_of(self.module, self.place)

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.module, nn.Conv1d | nn.Conv2d)

    @property
    def relu(self) -> bool:
        """Whether the layer ends with ReLU."""
        module = self.module
        return isinstance(module, FusedLinear) or (isinstance(module, FusedConv2d) and module.relu)

    @property
    def adds(self) -> bool:
        """Whether the layer adds a residual."""
        return isinstance(self.module, FusedConv2d) and self.module.adds

    def bucket(self, kernel: Kernel, least: int) -> ColumnBucket:
        """``kernel`` for calls of ``least`` columns or more. Raises BadRequest and Unsupported (``bucket_of``)."""
        has_bias = self.tensors.bias is not None
        return bucket_of(kernel, least, has_bias=has_bias, relu=self.relu, adds=self.adds)

    def row(self, reason: str, **rest: Any) -> Row:
        """Its row of the report, dense unless ``rest`` says otherwise."""
        matrix = self.matrix
        shape, kind = (matrix.m, matrix.k), self.sparse.__name__.removeprefix("Sparse")
        usual = {"n": None, "advice": "dense"}
        return Row(layer=self.name, kind=kind, shape=shape, sparsity=self.sparsity, reason=reason, **(usual | rest))


def find_sites(model: nn.Module, min_sparsity: float) -> tuple[list[Site], list[Row]]:
    """What can have kernels, and a row for each weight that cannot, in the model's order."""
    sites, rows = [], []
    passed_by = _passed_by(model)
    for name, module in model.named_modules():
        sparse = sparse_class(type(module), _ALL)
        if sparse is None:
            continue
        weight, bias = _WEIGHTS.get(sparse, ("weight", "bias"))
        full = ".".join(part for part in (name, "" if weight == "weight" else weight) if part) or type(module).__name__
        kept = module._parameters.get(weight, module._parameters.get(f"{weight}_orig"))
        shape = (0, 0) if kept is None else (kept.shape[0], math.prod(kept.shape[1:]))
        base: dict[str, Any] = {
            "layer": full,
            "kind": sparse.__name__.removeprefix("Sparse"),
            "n": None,
            "advice": "dense",
        }
        try:
            if module in passed_by:
                raise Unsupported(passed_by[module])
            place, matrix = _pruned(module, weight, bias)
        except LospmmError as error:
            rows.append(Row(shape=shape, sparsity=None, reason=str(error), **base))
            continue
        sparsity = 1.0 - matrix.nnz / tensors_of(module, place).weight.numel()
        if matrix.nnz and sparsity >= min_sparsity:
            sites.append(Site(full, module, weight, sparse, place, matrix, sparsity))
            continue
        few = f"fewer zeros than the {100 * min_sparsity:.0f}% of min_sparsity"
        reason = few if matrix.nnz else "all its weights are zero"
        rows.append(Row(shape=(matrix.m, matrix.k), sparsity=sparsity, reason=reason, **base))
    return sites, rows


def _passed_by(model: nn.Module) -> dict[nn.Module, str]:
    """What PyTorch reads the weights of without calling it, and why: attention that is not as kernels have it."""
    attentions = [one for one in model.modules() if isinstance(one, nn.MultiheadAttention)]
    reasons = [(one, why_passed_by(one)) for one in attentions]
    return {part: why for one, why in reasons if why is not None for part in (one, one.out_proj)}


def _pruned(module: nn.Module, weight: str, bias: str) -> tuple[WeightPlace, SparseMatrix]:
    """Raises Unsupported and BadMatrix."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        if module.groups == module.in_channels > 1:
            raise Unsupported("it is depthwise: a sum for each channel, which has nothing to leave out")
        if module.padding_mode != "zeros":
            raise Unsupported(f"its padding is {module.padding_mode!r}, and kernels pad with zeros")
        if way_of(module) is None:
            raise Unsupported(f"its padding {module.padding!r} differs at both ends")
    place = place_of(module, weight, bias)
    tensors = tensors_of(module, place)
    if tensors.weight.is_meta:
        raise Unsupported("its weights are on the device meta")
    for one in (tensors.weight, tensors.mask):
        if one is not None and not is_dense(one):
            raise Unsupported(f"its weights lie in memory as {one.layout}, not {torch.strided}: make them dense first")
    if dtype_of(tensors.weight) is None:
        raise Unsupported(f"its weights are {named(tensors.weight.dtype)}, and kernels take float32 and 16-bit types")
    return place, from_dense(tensors.matrix())


def learn_shapes(model: nn.Module, sites: Sequence[Site], example: Any) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that each weight, by its site's name, was given in one forward of ``example``; n for a product.

    ``example`` is a tensor, or a tuple of arguments, or a mapping of named ones.
    """
    seen: dict[str, list[tuple[int, ...]]] = {site.name: [] for site in sites}
    by_module = {site.module: site for site in sites}

    def note(site: Site, x: Tensor) -> None:
        shape = _operand(site, x)
        if shape is not None and shape not in seen[site.name]:
            seen[site.name].append(shape)

    def hear(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        first = arguments[0] if arguments else next(iter(named.values()))
        site = by_module.get(module)
        if isinstance(module, nn.MultiheadAttention):
            given = dict(zip(("query", "key", "value"), arguments, strict=False)) | named
            if site is not None and given["query"] is given["key"] and given["key"] is given["value"]:
                note(site, given["query"])
            inner = by_module.get(module.out_proj)
            if inner is not None:  # which the dense module does not call
                note(inner, given["query"])
        elif site is not None:
            note(site, first)

    heard = [*by_module, *(one for one in model.modules() if isinstance(one, nn.MultiheadAttention))]
    with ExitStack() as stack:
        for module in dict.fromkeys(heard):
            stack.callback(module.register_forward_pre_hook(hear, with_kwargs=True).remove)
        run(model, example)
    return seen


def run(model: nn.Module, example: Any) -> Any:
    """The model's output for an example, as in inference; its mode is left as it was."""
    with torch.no_grad(), no_short_cuts(), evaluated(model):
        return call_with(model, example)


def call_with(model: Callable[..., Any], example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def _operand(site: Site, x: Tensor) -> tuple[int, ...] | None:
    if not is_dense(x):
        return None
    if not site.is_convolution:
        return (x.numel() // x.shape[-1],) if x.dim() and x.shape[-1] else None
    images = as_images(x, site.tensors.weight.dim())
    return None if images is None else tuple(images.shape)


def convolution_of(site: Site, shape: tuple[int, ...]) -> Convolution:
    """The convolution of a site for inputs (batch, channels, height, width). Raises BadRequest and Unsupported."""
    weight = as_images(site.tensors.weight, site.tensors.weight.dim())
    way = way_of(site.module)
    assert weight is not None and way is not None
    pairs = {name: (pair[0], pair[1]) for name, pair in zip(("stride", "padding", "dilation"), way, strict=True)}
    batch, channels, height, width = shape
    return Convolution(batch, channels, height, width, weight.shape[2], weight.shape[3], **pairs)

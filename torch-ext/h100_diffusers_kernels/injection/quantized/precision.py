"""Which linear layers ``inject_kernels(precision=...)`` quantizes to FP8."""

from __future__ import annotations

import collections
import fnmatch
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ...operations.conditions import DTYPES_16_BIT, PLAIN_TYPES, an, dtype_name
from ..core.checks import class_name
from ..core.report import InjectionReport, join
from .fp8_linears import fp8_weight
from .fp8_weights import is_offloaded_to_disk, weight_values
from .lora_fusion import layers_that_adapters_read

FP8, FP8_FAST = "fp8", "fp8-fast"
PRECISIONS = (FP8, FP8_FAST)
# A product with fewer features is limited by memory, so FP8 gains nothing.
MIN_FEATURES = 512
_MULTIPLE = 16  # of features, for the kernels and for torchao's own product
_NOT = "not quantized: "
_ALREADY = "it is quantized already"
_NOT_IN_TABLE = "it is no attention's or feed-forward's layer in a block"
_AT_END, _FAST_ONLY = "its block is one of the first or last", f"only {FP8_FAST} quantizes it"


class Layers(NamedTuple):
    """The layers of a family that are quantized. Names are patterns in which ``*`` stands for no dot.

    Attributes:
        blocks: its lists of blocks.
        layers: layers of a block, by their names in it.
        fast_only: layers that only "fp8-fast" quantizes.
        fast_blocks: lists of blocks that only "fp8-fast" quantizes.
        ends: the number of blocks at each end of the first list that "fp8" leaves.
        fast_ends: the same for "fp8-fast".
        leaves_float32: whether layers in float32 keep their weights; otherwise they raise ValueError.
    """

    blocks: tuple[str, ...]
    layers: tuple[str, ...]
    fast_only: tuple[str, ...] = ()
    fast_blocks: tuple[str, ...] = ()
    ends: int = 0
    fast_ends: int = 0
    leaves_float32: bool = False


# Parts of blocks. An attention's projections may be fused by diffusers' fuse_qkv_projections.
ATTENTION_LAYERS = (
    *("*attn*.to_[qkv]", "*attn*.to_qkv", "*attn*.to_kv", "*attn*.to_out.0"),
    *("*attn*.add_[qkv]_proj", "*attn*.to_added_qkv", "*attn*.to_added_kv", "*attn*.to_add_out"),
)
FEED_FORWARD_LAYERS = ("*ff*.net.0.proj", "*ff*.net.2")
# torchao's and SGLang's recipes quantize all but embedders, modulations and outputs. NVIDIA Model Optimizer
# has filters for FLUX, SD 3, SDXL, Wan and Qwen-Image; of the last two it leaves blocks at each end. Blocks
# that only refine the text are left: they take little time.
ONE_LIST = Layers(("transformer_blocks",), (*ATTENTION_LAYERS, *FEED_FORWARD_LAYERS))
TWO_LISTS = Layers(
    ("transformer_blocks", "single_transformer_blocks"), (*ONE_LIST.layers, "proj_mlp", "proj_out")
)


def choose_layers(
    model: nn.Module, table: Layers, options: dict[str, Any], report: InjectionReport
) -> dict[str, nn.Linear]:
    """The layers to quantize, by name. The report says why the others are left.

    Raises:
        ValueError: if weights are in another dtype, or on disk.
    """
    precision, prefix = options["precision"], report.model_name
    if is_offloaded_to_disk(model):
        raise ValueError(
            f"inject_kernels: precision={precision!r} needs weights in memory, "
            f"got {prefix or 'a model'} offloaded to disk"
        )
    names_of: dict[Any, list[Any]] = {}  # a layer may have several
    for name, public_name, layer in linear_layers(model):
        names_of.setdefault(layer, []).append((name, public_name))
    adapters = layers_that_adapters_read(model)
    holders = collections.Counter(id(p) for m in model.modules() for p in m._parameters.values())
    chosen = {}
    for layer, names in names_of.items():
        reasons = [_why_not_in_table(model, public, table, precision) for _, public in names]
        if any(is_named(p, prefix, *each) for p in options["keep"] for each in names):
            reasons.append("keep names it")
        if layer in adapters:
            reasons.append(f"{adapters[layer]} computes with its weight")
        if holders[id(layer.weight)] > 1:
            reasons.append("another module has its weight, too")
        reason = next(filter(None, [*reasons, _why_not_quantizable(layer)]), None)
        name = names[0][0]
        if reason is not None:
            report.leave(name, layer, _NOT + reason)
            continue
        values = weight_values(layer)
        if table.leaves_float32 and values is not None and values.dtype == torch.float32:
            report.leave(name, layer, f"{_NOT}its weight is float32")
            continue
        if values is None or values.dtype not in DTYPES_16_BIT:
            got = "no values" if values is None else dtype_name(values.dtype)
            raise ValueError(
                f"inject_kernels: precision={precision!r} needs weights in bfloat16 or float16, "
                f"got {got} in {join(prefix, name)}"
            )
        chosen[name] = layer
    return chosen


def why_none(reports: Iterable[InjectionReport]) -> str | None:
    """Why no layer was quantized: the most frequent reason, of layers in the table if there are any. None if
    some were quantized before."""
    left_alone = (entry.reason for report in reports for entry in report.left_alone)
    reasons = collections.Counter(r.removeprefix(_NOT) for r in left_alone if r.startswith(_NOT))
    of_table = (_NOT_IN_TABLE, _AT_END, _FAST_ONLY)
    if _ALREADY in reasons:
        return None
    return max(reasons, key=lambda r: (r not in of_table, r != _NOT_IN_TABLE, reasons[r]))


def linear_layers(model: nn.Module, path: str = "", public_path: str = "") -> Iterator[Any]:
    """(name, its name without adapters, layer) of each linear layer except those of adapters."""
    for child_name, child in model._modules.items():
        name, public_name = join(path, child_name), join(public_path, child_name)
        while child is not None and "base_layer" in child._modules:  # an adapter's
            name, child = f"{name}.base_layer", child._modules["base_layer"]
        if isinstance(child, nn.Linear):
            yield name, public_name, child
        elif child is not None:
            yield from linear_layers(child, name, public_name)


def is_named(pattern: str, prefix: str, *names: str) -> bool:
    """Whether a pattern matches one of a layer's names, with or without the model's name in the pipeline, or
    the name of a module around it."""
    paths = {path for name in names for path in (name, join(prefix, name))}
    around = (module for path in paths for module in accumulate(path.split("."), join))
    return any(fnmatch.fnmatchcase(module, pattern) for module in around)


def _why_not_in_table(model: nn.Module, name: str, table: Layers, precision: str) -> str | None:
    for number, blocks in enumerate(table.blocks + table.fast_blocks):
        match = re.fullmatch(rf"({_expression(blocks)})\.(\d+)\.(.*)", name)
        if match is None or not _is_one_of(table.layers + table.fast_only, match[3]):
            continue
        path, index, layer = match[1], int(match[2]), match[3]
        length = len(model.get_submodule(path)._modules)
        ends, fast_ends = (table.ends, table.fast_ends) if number == 0 else (0, 0)
        from_end = min(index, length - 1 - index)
        if from_end < fast_ends:
            return _AT_END
        is_fast = _is_one_of(table.fast_only, layer) or number >= len(table.blocks)
        return _FAST_ONLY if precision == FP8 and (is_fast or from_end < ends) else None
    return _NOT_IN_TABLE


def _is_one_of(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.fullmatch(_expression(pattern), name) for pattern in patterns)


def _expression(pattern: str) -> str:
    return pattern.replace(".", r"\.").replace("*", "[^.]*")


def _why_not_quantizable(layer: nn.Linear) -> str | None:
    if fp8_weight(layer) is not None:
        return _ALREADY
    if type(layer) is not nn.Linear:
        return f"it is {an(class_name(layer))}"
    weight: Any = layer.weight
    if type(weight) not in PLAIN_TYPES:
        return _ALREADY if hasattr(weight, "qdata") else f"its weight is {an(class_name(weight))}"
    if min(weight.shape) < MIN_FEATURES:
        return f"it has fewer than {MIN_FEATURES} features in or out"
    if any(size % _MULTIPLE for size in weight.shape):
        return f"its features in or out are not a multiple of {_MULTIPLE}"
    return None

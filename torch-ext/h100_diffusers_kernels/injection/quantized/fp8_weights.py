"""Weights of linear layers in torchao's FP8 format, with the originals in host memory.

A layer's original weight is stored on the layer, so that it goes where the layer goes: under an adapter, out
of it again, into deep copies.
"""

from __future__ import annotations

import collections
import importlib
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checks import find_class
from .fp8_linears import FP8_TENSOR, SMALLEST_MAXIMUM

_ORIGINAL = "_h100_diffusers_kernels_original"
_FORMAT = "torchao.quantization.quantize_.workflows.float8.float8_tensor"
# The number of elements that are quantized, or copied to the host, at once: their copies need memory.
_AT_ONCE = 2**24
# Rounding to FP8 moves a value by at most 2**-4 of it or, if it is small, 2**-10 of its row's scale. The rest
# is for the rounding to 16 bits.
_ROUNDING, _SMALLEST_STEP = 2**-4 + 2**-8, 2**-9

logger = logging.getLogger("h100_diffusers_kernels")


@dataclass(eq=False)
class Original:
    """A quantized layer's original weight.

    Attributes:
        parameter: the weight, in host memory; None if it was let go.
        dtype: the dtype that the layer's weight would have by now: torchao's tensors keep theirs.
    """

    parameter: nn.Parameter | None
    dtype: torch.dtype


class Method:
    """A function in place of the method of one module: ``function(module, method, *args, **kwargs)``. It
    references the module weakly, so that a dropped model is freed at once."""

    def __init__(self, function: Callable, module: nn.Module, name: str) -> None:
        self._function, self._name = function, name
        self._module = weakref.ref(module)
        _, *others = inspect.signature(getattr(type(module), name)).parameters.values()
        self.__signature__ = inspect.Signature(others)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        return self._function(module, getattr(type(module), self._name), *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Method:
        module = memo.get(id(self._module()))
        return self if module is None else Method(self._function, module, self._name)


@torch.inference_mode(False)  # in the mode torchao's tensors cannot be converted
def _apply(layer: Any, own: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """``Module._apply``, by which ``to`` and ``half`` convert each layer."""
    original = original_of(layer)
    original.dtype = function(torch.empty(0, dtype=original.dtype, device="cpu")).dtype
    return own(layer, function, *args, **kwargs)


def original_of(layer: nn.Module) -> Any:
    """The layer's ``Original``, or None."""
    return vars(layer).get(_ORIGINAL)


def is_quantized(layer: Any) -> bool:
    return type(layer.weight) is find_class(FP8_TENSOR)


def load_quantizer(precision: str) -> Callable[[Tensor], Any]:
    """A function that quantizes a weight by row as torchao's ``quantize_`` does.

    It runs on any device and leaves Inductor's configuration; ``quantize_`` asserts a GPU and changes it.
    """
    load: Any = importlib.import_module
    try:
        cls = load("torchao.quantization").Float8Tensor
        granularity = load("torchao.quantization").PerRow()
        by_row: Any = {"granularity": granularity, "hp_value_lb": SMALLEST_MAXIMUM}
        of_input = load(_FORMAT).QuantizeTensorToFloat8Kwargs(**by_row)
        of_products = load("torchao.float8.inference").Float8MMConfig(use_fast_accum=True)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"inject_kernels: precision={precision!r} needs torchao 0.18 or later: "
            "pip install -U torchao"
        ) from error

    @torch.no_grad()
    def quantized(weight: Tensor) -> Any:
        options = {**by_row, "act_quant_kwargs": of_input, "mm_config": of_products}
        parts = [cls.from_hp(rows, **options) for rows in _parts(weight)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return quantized


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(max(1, _AT_ONCE // weight.shape[1]))


def _to_host(values: Tensor) -> Tensor:
    """A copy in host memory; the values themselves if they are there.

    From a GPU through page-locked memory, so that all threads write to the new pages. PyTorch's own copy has
    one thread, which takes 5 times as long.
    """
    if not values.is_cuda:
        return values.cpu()
    on_host = torch.empty_like(values, device="cpu")
    locked = torch.empty(max(_AT_ONCE, values.shape[1]), dtype=values.dtype, pin_memory=True)
    for source, target in zip(_parts(values), _parts(on_host)):
        target.copy_(locked[: source.numel()].view(source.shape).copy_(source))
    return on_host


@torch.inference_mode(False)  # the tensors outlive the mode
def quantize(layers: Iterable[nn.Linear], quantized: Callable[[Tensor], Any]) -> None:
    """Quantizes the layers' weights, one after the other, and moves the originals to host memory."""
    for layer in layers:
        parameter: Any = layer.weight
        values, flag = weight_values(layer), parameter.requires_grad
        new, on_host = quantized(values), _to_host(values)
        if parameter.is_meta:  # its hook makes a new parameter for each call
            parameter = nn.Parameter(on_host, flag)
        setattr(layer, _ORIGINAL, Original(parameter, parameter.dtype))
        layer._apply = Method(_apply, layer, "_apply")  # type: ignore[method-assign]
        _set_weight(layer, nn.Parameter(new, flag))
        parameter.data = on_host  # last, so that a failure leaves it where it was


@torch.inference_mode(False)
def restore(modules: Iterable[Any], *, all_of_them: bool = False) -> bool:
    """Gives quantized layers their original weights, on the device where the layer's weight is, and returns
    whether there were any. A layer whose weight was replaced keeps that, dequantized if it is an FP8 weight.

    ``all_of_them``: whether layers whose original weights were let go get dequantized ones.
    """
    outcomes: collections.Counter[str | None] = collections.Counter()
    for module in modules:
        vars(module).pop("_apply", None)
        original: Original | None = vars(module).pop(_ORIGINAL, None)
        if original is None or not is_quantized(module):
            continue
        parameter = original.parameter
        if parameter is None and not all_of_them:
            outcomes["stay quantized, because keep_originals was False"] += 1
            continue
        values, outcome = _current_values(module, original)
        outcomes[outcome] += 1
        parameter = nn.Parameter(values) if parameter is None else parameter
        parameter.data = values
        parameter.requires_grad_(module.weight.requires_grad)
        _set_weight(module, parameter)
    for outcome, count in outcomes.items():
        if outcome is not None:
            logger.info("%s linear layers %s", count, outcome)
    return bool(outcomes)


@torch.no_grad()
def _current_values(
    layer: Any, original: Original, on_host: bool = False
) -> tuple[Tensor, str | None]:
    """The values that a quantized layer's weight would have: the original's, or dequantized ones and why. The
    layer may have got other FP8 values, such as by ``load_state_dict``. In host memory a sample tells."""
    weight, parameter = weight_values(layer), original.parameter
    reason = "have the values of their FP8 weights, because keep_originals was False"
    if parameter is not None:
        values = parameter.data if on_host or weight is None else parameter.data.to(weight.device)
        if weight is None or _is_quantization_of(values, weight, on_host):
            return values.to(original.dtype), None
        reason = "have the dequantized values of the FP8 weights that they were given since"
    values = weight.dequantize(original.dtype)
    return _to_host(values) if on_host else values, reason


def _sample(rows: Tensor) -> Tensor:
    return rows[:: max(1, len(rows) // 16)]


def _is_quantization_of(values: Tensor, weight: Any, in_sample: bool) -> bool:
    """Whether rows of an FP8 weight, all or a sample, are those of the values, to within their rounding.

    A comparison with ``quantized(values)`` would not do: devices round scales differently.
    """
    scale = weight.scale.reshape(-1, 1)
    if len(scale) != len(values):
        return False
    rows = max(1, _AT_ONCE // values.shape[1])
    compared = (values, weight.qdata, scale)
    parts = (_sample(each).split(rows) if in_sample else each.split(rows) for each in compared)
    for part, *of_weight in zip(*parts):
        rounded, of_rows = (each.float() for each in of_weight)
        exact = part.to(rounded.device).float()
        limit = exact.abs().mul_(_ROUNDING).add_(of_rows * _SMALLEST_STEP)
        if (rounded.mul_(of_rows).sub_(exact).abs_() > limit).any():
            return False
    return True


@contextmanager
def plain_weights(layers: Iterable[Any], *, on_host: bool = False) -> Iterator[None]:
    """Within it quantized layers have their original weights. After it their FP8 weights have the values that
    these have by then.

    ``on_host``: whether the weights are in host memory, so that all layers may have them, and are quantized
    again only if a sample of rows has changed.
    """
    taken, quantized = [], load_quantizer("fp8")
    try:
        with torch.inference_mode(False):
            for layer in layers:
                weight = layer.weight
                values, _ = _current_values(layer, original_of(layer), on_host)
                if weight.is_meta:
                    weight = nn.Parameter(weight_values(layer), weight.requires_grad)
                plain = nn.Parameter(values, weight.requires_grad)
                taken.append((layer, weight, plain, _sample(values).clone()))
                _set_weight(layer, plain)
        yield
    finally:
        for layer, weight, *_ in taken:  # all of them first: what follows may fail
            weight.requires_grad_(layer.weight.requires_grad)
            _set_weight(layer, weight)
        for layer, weight, plain, before in taken:
            if on_host and torch.equal(_sample(plain.data), before):
                continue
            with torch.inference_mode(False):
                new, on_cpu = quantized(plain.data.to(weight.device)), _to_host(plain.data)
            original = original_of(layer)
            if original.parameter is not None:
                original.parameter.data = on_cpu
            if new.scale.shape != weight.scale.shape:
                _set_weight(layer, nn.Parameter(new, weight.requires_grad))
                continue
            # In place: offloading and CUDA graphs know these tensors, which may be inference tensors.
            with torch.inference_mode():
                weight.qdata.copy_(new.qdata)
                weight.scale.copy_(new.scale)


# --------------------------------------------------------------------------------------------------
# Offloading
#
# accelerate's sequential offloading leaves parameters without values on the layers. The values are in a
# mapping of the layer's hook. diffusers' group offloading with a stream remembers parameters.


def weight_values(layer: nn.Linear) -> Any:
    """The values of a layer's weight, wherever they are; None if they are not in memory."""
    if layer.weight.is_meta:
        values, key = _place_of_values(layer)
        return values.get(key)
    # Under group offloading FP8 values may be on another device than their tensor says, which cannot be
    # detached then.
    return layer.weight if is_quantized(layer) else layer.weight.data


def _set_weight(layer: Any, parameter: nn.Parameter) -> None:
    if layer.weight.is_meta:
        values, key = _place_of_values(layer)
        values[key] = parameter.detach()
        parameter = nn.Parameter(values[key].to("meta"), parameter.requires_grad)
    layer.weight = parameter


def _place_of_values(layer: nn.Linear) -> tuple[dict[str, Any], str]:
    """The dictionary in which accelerate's hook finds the layer's weight, an empty one if none is known, and
    the key."""
    hook: Any = vars(layer).get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    maps = (getattr(each, "weights_map", None) for each in hooks)
    found: Any = next((each for each in maps if each is not None), None)
    values = getattr(found, "dataset", found)
    return values if isinstance(values, dict) else {}, getattr(found, "prefix", "") + "weight"


def is_offloaded_to_disk(model: nn.Module) -> bool:
    """Whether diffusers' group offloading has written the model's weights to files."""
    return any(each.offload_to_disk_path is not None for each in _group_offloading(model))


def renew_group_offloading(model: nn.Module) -> None:
    """Lets group offloading look up the model's parameters, and the order of its layers, again.

    Only with a stream does it remember them. Otherwise its hooks stay: if diffusers removes a hook that a
    cache's hook is around, the cache no longer skips that block.
    """
    library = sys.modules.get("diffusers.hooks.group_offloading")
    renew: Any = getattr(library, "_maybe_remove_and_reapply_group_offloading", None)
    if renew is not None and any(each.stream is not None for each in _group_offloading(model)):
        renew(model)


def _group_offloading(model: nn.Module) -> Iterator[Any]:
    """The configuration of each hook of diffusers' group offloading."""
    for module in model.modules():
        registry = vars(module).get("_diffusers_hook")
        hook = None if registry is None else registry.get_hook("group_offloading")
        if hook is not None:
            yield hook.config

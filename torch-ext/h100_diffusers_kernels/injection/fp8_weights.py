"""Weights of linear layers in torchao's FP8 format, with the originals in host memory.

A layer's original weight is stored on the layer, so that it goes where the layer goes: under an adapter, out
of it again, into deep copies.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Callable

import torch
from torch import Tensor, nn

from .checks import find_class
from .fp8_linears import FP8_TENSOR

_ORIGINAL = "_h100_diffusers_kernels_original"
_FORMAT = "torchao.quantization.quantize_.workflows.float8.float8_tensor"
_GROUP_OFFLOADING = "diffusers.hooks.group_offloading"
# The number of elements that are quantized, or copied to the host, at once: their copies need memory.
_AT_ONCE = 2**24


class Original:
    """A quantized layer's original weight.

    Attributes:
        parameter: the weight, in host memory; None if it was let go.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter: nn.Parameter | None = parameter


def original_of(layer: nn.Module) -> Original | None:
    return vars(layer).get(_ORIGINAL)


def is_quantized(layer: Any) -> bool:
    return type(layer.weight) is find_class(FP8_TENSOR)


def load_quantizer(precision: str) -> Callable[[Tensor], Any]:
    """A function that quantizes a weight by row as torchao's ``quantize_`` does.

    It runs on any device and leaves Inductor's configuration; ``quantize_`` asserts a GPU and changes it.
    """
    try:
        quantization: Any = importlib.import_module("torchao.quantization")
        cls, granularity = quantization.Float8Tensor, quantization.PerRow()
        of_input = importlib.import_module(_FORMAT).QuantizeTensorToFloat8Kwargs(
            granularity=granularity
        )
        of_products = importlib.import_module("torchao.float8.inference").Float8MMConfig(
            use_fast_accum=True
        )
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"inject_kernels: precision={precision!r} needs torchao 0.18 or later: "
            "pip install -U torchao"
        ) from error

    @torch.no_grad()
    def quantized(weight: Tensor) -> Any:
        parts = [
            cls.from_hp(
                rows, granularity=granularity, act_quant_kwargs=of_input, mm_config=of_products
            )
            for rows in _parts(weight)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return quantized


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(max(1, _AT_ONCE // weight.shape[1]))


def _to_host(values: Tensor) -> Tensor:
    """A copy in host memory; the values themselves if they are there.

    From a GPU through page-locked memory: all threads then write to the new pages. PyTorch's own copy has
    one thread, which takes 5 times as long.
    """
    if not values.is_cuda:
        return values.cpu()
    on_host = torch.empty_like(values, device="cpu")
    locked = torch.empty(max(_AT_ONCE, values.shape[1]), dtype=values.dtype, pin_memory=True)
    for source, target in zip(_parts(values), _parts(on_host), strict=True):
        target.copy_(locked[: source.numel()].view(source.shape).copy_(source))
    return on_host


def quantize(layers: Iterable[nn.Linear], quantized: Callable[[Tensor], Any]) -> None:
    """Quantizes the layers' weights, one after the other, and moves the originals to host memory."""
    for layer in layers:
        parameter: Any = layer.weight
        values = weight_values(layer)
        assert values is not None
        new, on_host = quantized(values), _to_host(values)
        if parameter.is_meta:  # its hook makes a new parameter for each call
            parameter = nn.Parameter(on_host, requires_grad=parameter.requires_grad)
        setattr(layer, _ORIGINAL, Original(parameter))
        _set_weight(layer, nn.Parameter(new, requires_grad=False))
        parameter.data = on_host  # last, so that a failure leaves it where it was


def let_go(layers: Iterable[nn.Linear]) -> None:
    """Frees the original weights."""
    for layer in layers:
        original = original_of(layer)
        assert original is not None
        original.parameter = None


def restore(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Gives quantized layers their original weights, on the device where the layer's weight is.

    A layer whose weight was replaced keeps that.

    Returns:
        The number of layers restored, and of those that stay quantized because the original was let go.
    """
    restored = still_quantized = 0
    for module in modules:
        original: Original | None = vars(module).pop(_ORIGINAL, None)
        if original is None or not is_quantized(module):
            continue
        parameter = original.parameter
        if parameter is None:
            still_quantized += 1
            continue
        restored += 1
        device: Any = module.weight.device
        if device.type != "meta":
            parameter.data = parameter.data.to(device)
        _set_weight(module, parameter)
    return restored, still_quantized


@contextmanager
def original_weight(layer: Any, quantized: Callable[[Tensor], Any]) -> Iterator[None]:
    """Within it the layer has its original weight. After it the FP8 weight is that of the new values."""
    original, weight = original_of(layer), layer.weight
    assert original is not None and original.parameter is not None
    parameter = original.parameter
    parameter.data = parameter.data.to(weight.device)
    layer.weight = parameter
    try:
        yield
    finally:
        new = quantized(parameter.data)
        # In place: offloading and CUDA graphs know these tensors.
        weight.qdata.copy_(new.qdata)
        weight.scale.copy_(new.scale)
        parameter.data = _to_host(parameter.data)
        layer.weight = weight


# --------------------------------------------------------------------------------------------------
# Offloading
#
# accelerate's sequential offloading leaves parameters without values on the layers. The values are in a
# mapping of the layer's hook. diffusers' group offloading with a stream remembers parameters.


def weight_values(layer: nn.Linear) -> Tensor | None:
    """The values of a layer's weight, wherever they are; None if they are not in memory."""
    if not layer.weight.is_meta:
        return layer.weight.data
    place = _place_of_values(layer)
    return None if place is None else place[0][place[1]]


def _set_weight(layer: Any, parameter: nn.Parameter) -> None:
    if layer.weight.is_meta:
        place = _place_of_values(layer)
        assert place is not None
        place[0][place[1]] = parameter.detach()
        on_meta = parameter.detach().to("meta")
        parameter = nn.Parameter(on_meta, requires_grad=parameter.requires_grad)
    layer.weight = parameter


def _place_of_values(layer: nn.Linear) -> tuple[Any, str] | None:
    """The dictionary and the key under which accelerate's hook finds the layer's weight."""
    hook: Any = vars(layer).get("_hf_hook")
    for each in getattr(hook, "hooks", (hook,)):
        values = getattr(each, "weights_map", None)
        if values is not None:
            key = getattr(values, "prefix", "") + "weight"
            values = getattr(values, "dataset", values)
            return (values, key) if isinstance(values, dict) else None
    return None


def is_offloaded_to_disk(model: nn.Module) -> bool:
    """Whether diffusers' group offloading has written the model's weights to files."""
    return any(each.offload_to_disk_path is not None for each in _group_offloading(model))


def renew_group_offloading(model: nn.Module) -> None:
    """Lets group offloading look up the model's parameters, and the order of its layers, again.

    Only with a stream does it remember them. Otherwise its hooks stay: if diffusers removes a hook that a
    cache's hook is around, the cache no longer skips that block.
    """
    renew: Any = getattr(
        sys.modules.get(_GROUP_OFFLOADING), "_maybe_remove_and_reapply_group_offloading", None
    )
    if renew is not None and any(each.stream is not None for each in _group_offloading(model)):
        renew(model)


def _group_offloading(model: nn.Module) -> Iterator[Any]:
    """The configuration of each hook of diffusers' group offloading."""
    for module in model.modules():
        registry = vars(module).get("_diffusers_hook")
        hook = None if registry is None else registry.get_hook("group_offloading")
        if hook is not None:
            yield hook.config

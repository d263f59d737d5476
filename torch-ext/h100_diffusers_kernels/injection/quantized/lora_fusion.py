"""Adapters on layers that ``inject_kernels(precision=...)`` quantized: loading and fusing.

peft chooses an adapter's class by the class of the layer's weight, and refuses some adapters on torchao's FP8
weights. So adapters are loaded while the layers have plain weights. peft adds an adapter to a layer's weight
in place, which FP8 weights do not allow. Here it does so with the layer's original weight, which is then
quantized again. So the fused weight has the values of the model that was fused first and quantized then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

import torch
from torch import nn

from ..core.checks import class_name
from ..core.patch import INJECTION
from .fp8_weights import (
    Method,
    is_quantized,
    original_of,
    plain_weights,
    renew_group_offloading,
    restore,
)

# Adapters of peft that call the layer below them. The others compute with its weight.
_CALL_THE_LAYER = tuple(f"peft.tuners.{name}." for name in ("lora", "loha", "lokr", "oft"))


def follow_lora(model: Any) -> None:
    """Makes the model's methods that load and fuse adapters work with quantized layers."""
    _replace_methods(model)
    _follow_adapters(model.modules())


def unfollow_lora(modules: Sequence[nn.Module]) -> None:
    _follow_adapters(modules)  # those that peft itself loaded, too
    for module in modules:
        for name in _METHODS:
            if isinstance(vars(module).get(name), Method):
                delattr(module, name)


def _replace_methods(module: nn.Module) -> None:
    for name, function in _METHODS.items():
        if hasattr(type(module), name):
            setattr(module, name, Method(function, module, name))


def layers_that_adapters_read(model: nn.Module) -> dict[nn.Module, str]:
    """The layers with whose weights adapters compute, each with the adapter's class."""
    adapters = ((m, class_name(m)) for m in model.modules() if "base_layer" in m._modules)
    return {
        _base_layer(adapter): name
        for adapter, name in adapters
        if name.startswith("peft.") and not name.startswith(_CALL_THE_LAYER)
    }


def _follow_adapters(modules: Iterable[nn.Module]) -> list[Any]:
    """Replaces the methods of the adapters of quantized layers, and returns these adapters."""
    adapters = [
        module
        for module in modules
        if "base_layer" in module._modules and original_of(_base_layer(module)) is not None
    ]
    for adapter in adapters:
        cls: Any = type(adapter)
        if cls.__module__.endswith(".torchao"):  # peft's class for plain weights is its base
            adapter.__class__ = cls.__base__
        _replace_methods(adapter)
    return adapters


def _base_layer(adapter: Any) -> nn.Module:
    while "base_layer" in adapter._modules:
        adapter = adapter._modules["base_layer"]
    return adapter


def _load(model: Any, own: Callable, *args: Any, **kwargs: Any) -> Any:
    layers = [m for m in model.modules() if original_of(m) is not None and is_quantized(m)]
    known = {id(tensor): tensor for tensor in _tensors(model)}
    with plain_weights(layers, on_host=True):
        result = own(model, *args, **kwargs)
    for adapter in _follow_adapters(model.modules()):
        device: Any = _base_layer(adapter).weight.device
        for tensor in _tensors(adapter):
            if id(tensor) not in known and "meta" not in (tensor.device.type, device.type):
                tensor.data = tensor.data.to(device)
    classes = layers_that_adapters_read(model)
    given_back = [layer for layer in layers if layer in classes]
    restore(given_back, all_of_them=True)
    renew_group_offloading(model)
    names = {module: name for name, module in model.named_modules()}
    report = vars(model)[INJECTION].report
    for layer in given_back:
        count = report.count_of(names[layer], type(layer).__name__)
        report.fall_back(
            count, f"not quantized any more: {classes[layer]} computes with its weight"
        )
    return result


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fuse_lora(model: Any, own: Callable, *args: Any, **kwargs: Any) -> None:
    for adapter in _follow_adapters(model.modules()):  # those that peft itself loaded, too
        _check(adapter, "fuse_lora")
    own(model, *args, **kwargs)


def _merge(adapter: Any, own: Callable, *args: Any, **kwargs: Any) -> None:
    """``merge`` and ``unmerge``, which changes nothing unless the adapter is merged."""
    layer, unmerges = _base_layer(adapter), own.__name__ == "unmerge"
    layers = [layer] if is_quantized(layer) and (adapter.merged or not unmerges) else []
    if layers:
        _check(adapter, "unfuse_lora" if unmerges else "fuse_lora")
    with plain_weights(layers):
        own(adapter, *args, **kwargs)


def _check(adapter: Any, caller: str) -> None:
    layer: Any = _base_layer(adapter)
    if original_of(layer).parameter is None:
        raise RuntimeError(
            f"{caller}: the original weights are needed, and inject_kernels let them go because "
            "keep_originals was False"
        )
    if layer.weight.is_meta:
        raise RuntimeError(
            f"{caller}: the weights must be on a device, but sequential offloading keeps them elsewhere"
        )


def _fuse_projections(model: Any, own: Callable, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "fuse_qkv_projections: the layers are quantized, so call it before inject_kernels(precision=...)"
    )


_METHODS = {
    "add_adapter": _load,
    "load_lora_adapter": _load,
    "fuse_lora": _fuse_lora,
    "fuse_qkv_projections": _fuse_projections,
    # Of adapters:
    "merge": _merge,
    "unmerge": _merge,
}

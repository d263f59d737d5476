"""Fuses LoRA into layers that ``inject_kernels(precision=...)`` quantized.

peft adds an adapter to a layer's weight in place, which torchao's FP8 weights do not allow. Here it does so
with the layer's original weight, which is then quantized again. So the fused weight has the values of the
model that was fused first and quantized then.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, Callable

from torch import nn

from .fp8_weights import is_quantized, load_quantizer, original_of, original_weight


class _Method:
    """A function as the method of one module. It references the module weakly, so that a dropped model is
    freed at once."""

    def __init__(self, function: Callable, module: nn.Module) -> None:
        self._function = function
        self._module = weakref.ref(module)
        first, *others = inspect.signature(function).parameters.values()
        self.__signature__ = inspect.Signature(others)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> _Method:
        module = memo.get(id(self._module()))
        return self if module is None else _Method(self._function, module)


def follow_lora(model: Any) -> None:
    """Makes ``fuse_lora`` and ``unfuse_lora`` of the model and its pipeline work on the original weights."""
    if hasattr(type(model), "fuse_lora"):
        model.fuse_lora = _Method(_fuse_lora, model)
    _follow_adapters(model)


def unfollow_lora(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        attributes = vars(module)
        for name in ("fuse_lora", "merge", "unmerge"):
            if isinstance(attributes.get(name), _Method):
                del attributes[name]


def _follow_adapters(model: nn.Module) -> list[nn.Module]:
    """Replaces the methods of the adapters of quantized layers, and returns these adapters."""
    adapters: list[Any] = [
        module
        for module in model.modules()
        if "base_layer" in module._modules and original_of(_base_layer(module)) is not None
    ]
    for adapter in adapters:
        adapter.merge = _Method(_merge, adapter)
        adapter.unmerge = _Method(_unmerge, adapter)
    return adapters


def _base_layer(adapter: Any) -> nn.Module:
    while "base_layer" in adapter._modules:
        adapter = adapter._modules["base_layer"]
    return adapter


def _fuse_lora(
    model: Any, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: Any = None
) -> None:
    for adapter in _follow_adapters(model):  # those that were loaded after the injection, too
        _check(adapter, "fuse_lora")
    type(model).fuse_lora(model, lora_scale, safe_fusing, adapter_names)


def _merge(adapter: Any, safe_merge: bool = False, adapter_names: Any = None) -> None:
    with _original_weight(adapter, "fuse_lora"):
        _class_for_plain_weights(adapter).merge(adapter, safe_merge, adapter_names)


def _unmerge(adapter: Any) -> None:
    with _original_weight(adapter, "unfuse_lora") if adapter.merged else nullcontext():
        _class_for_plain_weights(adapter).unmerge(adapter)


def _original_weight(adapter: Any, caller: str) -> Any:
    layer: Any = _base_layer(adapter)
    if not is_quantized(layer):  # its weight was replaced
        return nullcontext()
    _check(adapter, caller)
    return original_weight(layer, load_quantizer("fp8"))


def _check(adapter: Any, caller: str) -> None:
    layer: Any = _base_layer(adapter)
    original = original_of(layer)
    if original is not None and original.parameter is None:
        raise RuntimeError(
            f"{caller}: the original weights are needed, and inject_kernels let them go because "
            "keep_originals was False"
        )
    if layer.weight.is_meta:
        raise RuntimeError(
            f"{caller}: the weights must be on a device, but sequential offloading keeps them elsewhere"
        )


def _class_for_plain_weights(adapter: Any) -> Any:
    """The adapter's class; instead of peft's class for torchao's weights, the one for plain weights."""
    cls = type(adapter)
    return cls.__base__ if cls.__module__.endswith(".torchao") else cls

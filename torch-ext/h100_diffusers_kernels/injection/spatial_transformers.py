"""diffusers' ``Transformer2DModel`` in a UNet with channels last: its result has them last, too.

The class copies its tokens to an image with channels first. The sum with its input takes over that format,
and the next convolution copies it back. Everything else runs the class's own code, marked where it begins
and ends for its blocks, as a model of a family is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..conditions import tracks_derivatives
from .injected import Injected, Injection
from .model_forward import marked_forward
from .original import Original, find_class, find_original
from .part import Part

_CLASS = "diffusers.models.transformers.transformer_2d:Transformer2DModel"
_OUTPUT = "_get_output_for_continuous_inputs"
_BLOCKS = ("transformer_blocks",)


@dataclass(frozen=True)
class SpatialTransformer(Part):
    """The class, without its subclasses."""

    def is_kind_of(self, module: nn.Module) -> bool:
        return type(module) is find_class(self.path) and module.is_input_continuous is True

    def originals(self) -> dict[str, Original]:
        parameters = "self hidden_states residual batch_size height width inner_dim"
        path = f"{self.path}.{_OUTPUT}"
        return {path: find_original(path, parameters)}


class _Caller:
    """A transformer in its class's forward, but for the method that makes an image of its tokens."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _get_output_for_continuous_inputs(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        batch_size: int,
        height: int,
        width: int,
        inner_dim: int,
    ) -> Tensor:
        def image_of(tokens: Tensor) -> Tensor:
            return tokens.reshape(batch_size, height, width, inner_dim).permute(0, 3, 1, 2)

        project: Any = self._module.proj_out
        if self._module.use_linear_projection:
            return image_of(project(hidden_states)) + residual
        return project(image_of(hidden_states)) + residual


def _has_own_output(module: nn.Module, injection: Injection) -> bool:
    original = injection.originals[f"{_CLASS}.{_OUTPUT}"]
    return original.is_in_use() and type(module) is original.owner and _OUTPUT not in vars(module)


def _has_channels_last(image: object) -> bool:
    return (
        isinstance(image, Tensor)
        and image.dim() == 4
        and not image.is_contiguous()
        and image.is_contiguous(memory_format=torch.channels_last)
    )


def _forward(self: Any, injected: Injected, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or tracks_derivatives():
        return _with_its_format(self, injected, *args, **kwargs)
    with marked_forward(self, injected.injection, _BLOCKS):
        return _with_its_format(self, injected, *args, **kwargs)


def _with_its_format(
    self: Any, injected: Injected, hidden_states: Any, *args: Any, **kwargs: Any
) -> Any:
    if torch.compiler.is_compiling() or not _has_channels_last(hidden_states):
        return injected.class_forward(self, hidden_states, *args, **kwargs)
    if not _has_own_output(self, injected.injection):
        injected.leave("its method for images was replaced")
        return injected.class_forward(self, hidden_states, *args, **kwargs)
    injected.count([])
    caller: Any = _Caller(self)
    return injected.class_forward(caller, hidden_states, *args, **kwargs)


SPATIAL_TRANSFORMER = SpatialTransformer(
    _CLASS,
    "self hidden_states encoder_hidden_states timestep added_cond_kwargs class_labels"
    " cross_attention_kwargs attention_mask encoder_attention_mask return_dict",
    _forward,
    "channels last kept",
)

"""The blocks of UNets: resnets, transformers with plain layer norms, and the transformer around those.

``ResnetBlock2D``: each norm with the SiLU after it is one pass; the second one also adds the first
convolution's bias and the time embedding.

``BasicTransformerBlock``, where each sum is one pass with the norm after it, also that of the next block:

    x = x + attn1(layer_norm(x))
    x = x + attn2(layer_norm(x), text)
    x = x + ff(layer_norm(x))

``Transformer2DModel`` keeps channels last. The class copies its tokens to an image with channels first; the
sum with its input takes over that format, and the next convolution copies it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import is_plain as is_plain_tensor
from ..conditions import kernels_take, tracks_derivatives
from ..differentiation import is_differentiated
from .activations import why_not_silu
from .blocks import BlockSpec, begin, finish, norm_prologue
from .checks import KnownClass, find_class, is_plain, why_not_plain
from .forward_state import ModelSpec, forward_with_state
from .linears import dropped_out, feed_forward, linear
from .norm_modules import (
    ExactSpec,
    GroupNorm,
    in_memory_format,
    left_to_class,
    read_group_norm,
)
from .norms import normed, residual_normed
from .patch import Call, Injection

_GROUP_NORM = KnownClass("torch.nn:GroupNorm", "torch.nn.functional:group_norm")
_CONV = KnownClass("torch.nn:Conv2d", "torch.nn.functional:conv2d", "torch.nn:Conv2d._conv_forward")


# --------------------------------------------------------------------------------------------------
# Resnets


def _read_norm(resnet: Any, name: str) -> GroupNorm | str:
    """What a norm of a resnet computes with, or why the kernel does not compute it."""
    module = resnet._modules.get(name)
    plain = is_plain(module, _GROUP_NORM)
    norm = read_group_norm(module) if plain else why_not_plain(module, _GROUP_NORM)
    return f"{name} {norm}" if isinstance(norm, str) else norm


@dataclass(frozen=True, eq=False)
class _ResnetSpec(ExactSpec):
    def why_not(self, module: Any, injection: Injection) -> str | None:
        reason = super().why_not(module, injection)
        if reason is not None:
            return reason
        way = module.time_embedding_norm
        if way == "scale_shift" or not (way == "default" or module.time_emb_proj is None):
            return f"its time embedding goes another way: {way}"
        reason = why_not_silu(module.nonlinearity)
        for name in ("norm1", "norm2"):
            norm = _read_norm(module, name)
            if reason is None and isinstance(norm, str):
                reason = norm
        return reason


def _resnet_forward(
    self: Any, call: Call, input_tensor: Tensor, temb: Any, *args: Any, **kwargs: Any
) -> Tensor:
    reason = call.stand_in.spec.why_not(self, call.injection)
    adds_time = self.time_embedding_norm == "default"
    if reason is None and (args or kwargs):
        reason = "it was given more than an input and a time embedding"
    if reason is None and temb is not None and adds_time and self.time_emb_proj is None:
        reason = "it has no projection for the time embedding that it was given"
    if reason is not None:
        return left_to_class(call, reason, self, input_tensor, temb, *args, **kwargs)
    if tracks_derivatives() and is_differentiated(input_tensor, temb, *self.parameters()):
        return left_to_class(call, None, self, input_tensor, temb)
    norm: Any = _read_norm(self, "norm1")
    if not norm.fits(input_tensor):
        return left_to_class(call, None, self, input_tensor, temb)  # which raises
    x = in_memory_format(input_tensor)
    reason = norm.why_not(x)
    if reason is None and x.dim() != 4:
        reason = f"it was given a tensor of {x.dim()} dimensions"
    if reason is not None:
        return left_to_class(call, reason, self, input_tensor, temb)
    x = norm(x, activation="silu")
    if self.upsample is not None:
        if x.shape[0] >= 64:  # as the class does
            input_tensor, x = input_tensor.contiguous(), x.contiguous()
        input_tensor, x = self.upsample(input_tensor), self.upsample(x)
    elif self.downsample is not None:
        input_tensor, x = self.downsample(input_tensor), self.downsample(x)
    x, bias = _without_bias(self.conv1, x)
    time = None
    if self.time_emb_proj is not None:
        time = temb if self.skip_time_act else self.nonlinearity(temb)
        time = linear(self.time_emb_proj, time)
    x = self.conv2(dropped_out(self.dropout, _second_norm(self, call, x, bias, time)))
    if self.conv_shortcut is not None:
        input_tensor = input_tensor.contiguous() if self.training else input_tensor
        input_tensor = self.conv_shortcut(input_tensor)
    x = input_tensor + x
    factor = self.output_scale_factor
    return x if type(factor) in (float, int) and factor == 1 else x / factor


def _without_bias(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A convolution of x, and its bias (C,) if that is still to be added."""
    if (
        is_plain(conv, _CONV)
        and "_conv_forward" not in conv.__dict__  # where users put other paddings
        and conv.padding_mode == "zeros"
    ):
        weight, bias = conv._parameters.get("weight"), conv._parameters.get("bias")
        if (
            bias is not None
            and is_plain_tensor(weight)
            and is_plain_tensor(bias)
            and bias.dtype == x.dtype
            and bias.device == x.device
        ):
            options = (conv.stride, conv.padding, conv.dilation, conv.groups)
            return torch.nn.functional.conv2d(x, weight, None, *options), bias
    return conv(x), None


def _second_norm(
    self: Any, call: Call, x: Tensor, bias: Tensor | None, time: Tensor | None
) -> Tensor:
    """SiLU of the norm of x, a bias (C,) and a time embedding (B, C)."""
    x = in_memory_format(x)
    norm = _read_norm(self, "norm2")
    if isinstance(norm, str):
        reason: Any = norm
    elif not (x.dim() == 4 and norm.fits(x)):
        reason = "its first convolution gives what its second norm does not take"
    elif time is not None and not _goes_to_channels(time, x):
        reason = "its time embedding has another form than the kernel knows"
    else:
        reason = norm.why_not(x)
        if reason is None:
            return norm(x, _channel_bias(x, bias, time), activation="silu")
    call.fall_back(reason)
    x = x if bias is None else x + bias[:, None, None]
    x = x if time is None else x + time[:, :, None, None]
    return self.nonlinearity(self.norm2(x))


def _goes_to_channels(time: Tensor, x: Tensor) -> bool:
    return (
        kernels_take(time)
        and time.dim() == 2
        and time.shape[0] in (1, x.shape[0])
        and time.shape[1] == x.shape[1]
        and time.dtype == x.dtype
        and time.device == x.device
    )


def _channel_bias(x: Tensor, bias: Tensor | None, time: Tensor | None) -> Tensor | None:
    """The sum of both, (B, C), in float32: all pixels share its rounding, so that it would show more than
    roundings of each pixel do."""
    total = time if bias is None else bias if time is None else time.float() + bias
    return total if total is None else total.expand(x.shape[:2])


RESNET_BLOCK = _ResnetSpec(
    "diffusers.models.resnet:ResnetBlock2D",
    "self input_tensor temb args kwargs",
    _resnet_forward,
    "group_norm with the time embedding and SiLU",
    left_to_compiler=True,
)


# --------------------------------------------------------------------------------------------------
# Transformer blocks

_PLAIN_NORMS = "layer_norm"


@dataclass(frozen=True, eq=False)
class _BasicBlockSpec(BlockSpec):
    def matches(self, module: nn.Module) -> bool:
        is_known = type(module) is find_class(self.path)
        return is_known and getattr(module, "norm_type", "") == _PLAIN_NORMS

    def why_not(self, module: Any, injection: Injection) -> str | None:
        if module.norm_type != _PLAIN_NORMS:
            return "its norms are of another kind now"
        return None if module._chunk_size is None else "its feed-forward is chunked"


def _prologue(call: Call, block: Any, ahead: Tensor | None) -> Any:
    # What adds positions may give another dtype.
    if ahead is not None and (
        block.pos_embed is not None or call.stand_in.spec.why_not(block, call.injection) is not None
    ):
        return None
    return norm_prologue(call, block, "norm1", ahead, tuple)


_PROLOGUES = (_prologue,)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    timestep: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Any = None,
    added_cond_kwargs: Any = None,
) -> Any:
    x = hidden_states
    more = cross_attention_kwargs or {}
    is_taken = not tracks_derivatives()
    if not is_taken:
        call.is_counted = False
    else:
        reason = call.stand_in.spec.why_not(self, call.injection) or _why_not_given(x, more)
        if reason is not None:
            call.fall_back(reason)
            is_taken = False
        else:
            x = x.contiguous()  # the channels of a convolution's result may lie apart
            is_taken = not call.refuses(x)
    if not is_taken:
        masks_and_text = (attention_mask, encoder_hidden_states, encoder_attention_mask)
        others = (timestep, cross_attention_kwargs, class_labels, added_cond_kwargs)
        return call.own_forward(self, hidden_states, *masks_and_text, *others)
    add_positions = self.pos_embed
    if add_positions is None:
        (((normalized,), _),) = begin(call, self, _PROLOGUES, (x,), ())
    else:
        normalized = add_positions(normed(call, self, "norm1", x))
    attention_out = self.attn1(
        normalized,
        encoder_hidden_states=encoder_hidden_states if self.only_cross_attention else None,
        attention_mask=attention_mask,
        **more,
    )
    if self.attn2 is not None:
        x, normalized = residual_normed(call, self, "norm2", x, attention_out, None)
        if add_positions is not None:
            normalized = add_positions(normalized)
        attention_out = self.attn2(
            normalized,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            **more,
        )
    x, normalized = residual_normed(call, self, "norm3", x, attention_out, None)
    end = (x, feed_forward(self.ff, normalized), None)
    (x,) = finish(call, self, _PROLOGUES, (end,), (), hands_over=add_positions is None)
    return x


def _why_not_given(x: Any, more: dict[str, Any]) -> str | None:
    """Why the model's own code computes a call with these arguments."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        return "its hidden states are not of three dimensions"
    if more.get("gligen") is not None:
        return "it is guided by GLIGEN"
    if more.get("scale") is not None:
        return "it was given a scale"  # the class warns of it
    return None


BASIC_BLOCK = _BasicBlockSpec(
    "diffusers.models.attention:BasicTransformerBlock",
    "self hidden_states attention_mask encoder_hidden_states encoder_attention_mask timestep"
    " cross_attention_kwargs class_labels added_cond_kwargs",
    _block_forward,
    "layer_norm, gated_residual_layer_norm_modulate, gated_residual",
    left_to_compiler=True,
    norms=("norm1", "norm2", "norm3"),
)


# --------------------------------------------------------------------------------------------------
# The transformer around them

_TRANSFORMER = "diffusers.models.transformers.transformer_2d:Transformer2DModel"
_OUTPUT = "_get_output_for_continuous_inputs"


@dataclass(frozen=True, eq=False)
class _SpatialTransformerSpec(ModelSpec):
    def matches(self, module: nn.Module) -> bool:
        is_known = type(module) is find_class(self.path)
        return is_known and module.is_input_continuous is True


class _ChannelsLast:
    """A transformer in its class's forward, where it makes an image with channels last of its tokens."""

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


def _has_channels_last(image: object) -> bool:
    return (
        isinstance(image, Tensor)
        and image.dim() == 4
        and not image.is_contiguous()
        and image.is_contiguous(memory_format=torch.channels_last)
    )


def _transformer_forward(
    self: Any, call: Call, hidden_states: Any, *args: Any, **kwargs: Any
) -> Any:
    if not _has_channels_last(hidden_states):
        call.is_counted = False
        module = self
    elif _OUTPUT in self.__dict__:
        call.fall_back(f"{_OUTPUT} was replaced")
        module = self
    else:
        module = _ChannelsLast(self)
    return forward_with_state(module, call, hidden_states, *args, **kwargs)


SPATIAL_TRANSFORMER = _SpatialTransformerSpec(
    _TRANSFORMER,
    "self hidden_states encoder_hidden_states timestep added_cond_kwargs class_labels"
    " cross_attention_kwargs attention_mask encoder_attention_mask return_dict",
    _transformer_forward,
    "channels last kept",
    functions=(
        (
            f"{_TRANSFORMER}.{_OUTPUT}",
            "self hidden_states residual batch_size height width inner_dim",
        ),
    ),
    left_to_compiler=True,
    blocks=("transformer_blocks",),
)

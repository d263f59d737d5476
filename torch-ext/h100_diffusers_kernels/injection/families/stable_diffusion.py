"""The blocks of UNets: resnets, transformer blocks with plain layer norms, and the transformers around them.

``ResnetBlock2D``: each norm is one pass with the SiLU after it. The second also adds the first convolution's
bias and the time embedding.

``BasicTransformerBlock``: each sum is one pass with the norm after it, including the next block's first norm:

    x = x + attn1(layer_norm(x))
    x = x + attn2(layer_norm(x), text)
    x = x + ff(layer_norm(x))

``Transformer2DModel``: its tokens are added to its input in one pass, in the input's memory format. The
class's own code copies them to an image with channels first before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import operations
from ...operations.conditions import (
    is_differentiated,
    is_plain_tensor,
    kernels_take,
    same_dtype_and_unit_stride,
    tracks_derivatives,
)
from ..attention.processors import STANDARD_ATTENTION, run_bare_attention
from ..core.adapters import without_adapters_at_rest
from ..core.checks import KnownClass, is_stock, replaced_function, why_not_stock
from ..core.forward_state import Family, forward_with_state, model_spec, run_with_state
from ..core.patch import Call, ExactSpec, bare_stand_in
from ..parts import linears
from ..parts.embeddings import TIMESTEPS
from ..parts.norm_modules import GROUP_NORM, RMS_NORM, apply_group_norm
from ..parts.streams import BlockSpec, end, plain_norm, start
from ..quantized.precision import ONE_LIST

_CONV = KnownClass("torch.nn:Conv2d", "torch.nn.functional:conv2d", "torch.nn:Conv2d._conv_forward")


# --------------------------------------------------------------------------------------------------
# Resnets


def _why_not_resnet(module: Any) -> str | None:
    way = module.time_embedding_norm
    if way == "scale_shift" or not (way == "default" or module.time_emb_proj is None):
        return f"its time embedding is not added: {way}"
    for name in ("norm1", "norm2"):
        norm = module._modules.get(name)
        if not is_stock(norm, GROUP_NORM.known):
            return f"{name} {why_not_stock(norm, GROUP_NORM.known)}"
    return linears.why_not_silu(module.nonlinearity)


def _resnet_forward(self: Any, call: Call, input_tensor, temb, *args, **kwargs) -> Tensor:
    if args or kwargs:
        return call.decline("it was given more than an input and a time embedding")
    if input_tensor.dim() != 4:
        return call.decline(f"it was given a tensor of {input_tensor.dim()} dimensions")
    if temb is not None and self.time_embedding_norm == "default" and self.time_emb_proj is None:
        return call.decline("it has no projection for the time embedding that it was given")
    if tracks_derivatives() and is_differentiated(input_tensor, temb, *self.parameters()):
        return NotImplemented
    x: Any = apply_group_norm(self._modules["norm1"], input_tensor, None, "silu", is_inside=True)
    if not isinstance(x, Tensor):
        return call.decline(x)
    resample = self.downsample if self.upsample is None else self.upsample
    if resample is not None:
        if self.upsample is not None and x.shape[0] >= 64:  # as the class does
            input_tensor, x = input_tensor.contiguous(), x.contiguous()
        input_tensor, x = resample(input_tensor), resample(x)
    modules = self._modules
    x, bias = _without_bias(modules["conv1"], x)
    project = modules.get("time_emb_proj")
    time = None if project is None else _project_time(self, call, project, temb)
    x = _second_norm(self, call, x, bias, time)
    x = modules["conv2"](linears.run_dropout(modules["dropout"], x))
    shortcut = modules.get("conv_shortcut")
    x = (input_tensor if shortcut is None else shortcut(input_tensor)) + x
    factor = self.output_scale_factor
    return x if type(factor) in (float, int) and factor == 1 else x / factor


def _project_time(self: Any, call: Call, project: Any, temb: Tensor) -> Tensor:
    """The layer's result for the time embedding, whose SiLU plain resnets share."""
    if self.skip_time_act:
        return linears.linear(project, temb)
    plain = linears.plain_weights(temb.dtype, project) if isinstance(temb, Tensor) else None
    if plain is None or not bare_stand_in(call.stand_in.spec, self):
        if call.state is not None:
            call.state.shared.clear()  # the modules may write to what it was made from
        return linears.linear(project, self._modules["nonlinearity"](temb))
    activated = call.shared("silu", temb, torch.nn.functional.silu)
    return torch.nn.functional.linear(activated, *plain[0])


def _without_bias(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A convolution of x, and its bias (C,) if it has not been added."""
    conv = without_adapters_at_rest(conv)
    weight, bias = conv._parameters.get("weight"), conv._parameters.get("bias")
    if (
        bias is not None
        and is_plain_tensor(bias)
        and bias.dtype == x.dtype
        and is_stock(conv, _CONV)
        and "forward" not in conv.__dict__  # of an autoencoder: a kernel adds the bias
        and "_conv_forward" not in conv.__dict__  # users replace it for other padding modes
        and conv.padding_mode == "zeros"
    ):
        options = (conv.stride, conv.padding, conv.dilation, conv.groups)
        return torch.nn.functional.conv2d(x, weight, None, *options), bias
    return conv(x), None


def _second_norm(self: Any, call: Call, x: Tensor, bias: Any, time: Any) -> Tensor:
    """SiLU of the norm of x plus a bias (C,) and a time embedding (B, C)."""
    out: Any = "the kernel does not support its time embedding's form"
    shapes = (1, x.shape[1]), x.shape[:2]
    if time is None or (kernels_take(time) and time.shape in shapes and time.dtype == x.dtype):
        # Summed in float32: all pixels share this rounding error, so it would not average out.
        both = time if bias is None else bias if time is None else time.float() + bias
        both = both if both is None else both.expand(x.shape[:2])
        out = apply_group_norm(self._modules["norm2"], x, both, "silu", is_inside=True)
    if isinstance(out, Tensor):
        return out
    call.fall_back(out or "the kernel does not support its first convolution's result")
    x = x if bias is None else x + bias[:, None, None]
    x = x if time is None else x + time[:, :, None, None]
    return self.nonlinearity(self.norm2(x))


RESNET_BLOCK = ExactSpec(
    "diffusers.models.resnet:ResnetBlock2D",
    _resnet_forward,
    "group_norm with the time embedding and SiLU",
    left_to_compiler=True,
    condition=_why_not_resnet,
)
# DreamLite's own class: only its convolutions differ.
_DREAMLITE_RESNET = replace(
    RESNET_BLOCK,
    path="diffusers.models.unets.unet_dreamlite:ResnetBlock2DDreamLite",
    parameters="self input_tensor temb",
)


# --------------------------------------------------------------------------------------------------
# Transformer blocks


@dataclass(frozen=True, eq=False)
class _BasicBlockSpec(BlockSpec):
    def matches(self, module: nn.Module) -> bool:
        return super().matches(module) and getattr(module, "norm_type", "") == "layer_norm"


def _first_norm(call: Call, block: Any, previous_x: Tensor | None) -> Any:
    # Adding positions may change the dtype.
    if previous_x is not None and not (block.pos_embed is block._chunk_size is None):
        return None
    return plain_norm(call, block, previous_x, name="norm1")


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    timestep: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Any = None,
    added_cond_kwargs: Any = None,
) -> Any:
    more = cross_attention_kwargs or {}
    if tracks_derivatives():
        return NotImplemented
    if more.get("gligen") is not None:
        return call.decline("it is guided by GLIGEN")
    if more.get("scale") is not None:
        return call.decline("it was given a scale")  # the class warns
    x = hidden_states.contiguous()  # a convolution's result may have strided channels
    if not call.takes(x):
        return NotImplemented
    modules, add_positions, c = self._modules, self.pos_embed, encoder_hidden_states
    (s,) = start(call, self, (_first_norm,), (x,), ())
    n = s.n if add_positions is None else add_positions(s.n)
    context = c if self.only_cross_attention else None
    s.add(_attention(modules["attn1"], n, context, attention_mask, more))
    if modules.get("attn2") is not None:
        n = s.norm("norm2")
        n = n if add_positions is None else add_positions(n)
        s.add(_attention(modules["attn2"], n, c, encoder_attention_mask, more))
    s.add(_feed_forward(modules["ff"], s.norm("norm3")))
    return end(s, hands_over=add_positions is None)


def _attention(module: Any, x: Tensor, c: Any, mask: Any, more: dict[str, Any]) -> Tensor:
    """An attention module's result, without a module call if it is plain."""
    if mask is None and not more:
        out = run_bare_attention(module, x, c)
        if out is not None:
            return out
    return module(x, encoder_hidden_states=c, attention_mask=mask, **more)


def _feed_forward(module: Any, x: Tensor) -> Tensor:
    """``module(x)``; a plain GEGLU and its linear layers without module calls."""
    net = module._modules.get("net")
    if (
        is_stock(module, linears.FEED_FORWARD)
        and type(net) is nn.ModuleList
        and len(net._modules) == 3
        and same_dtype_and_unit_stride(x)
    ):
        geglu, dropout, out = net._modules.values()
        stand_in = bare_stand_in(linears.GEGLU, geglu)
        if stand_in is not None and is_stock(dropout, linears.DROPOUT) and not dropout.training:
            layers = linears.plain_weights(x.dtype, geglu._modules["proj"], out)
            if layers is not None and not (
                "gelu" in geglu.__dict__ or replaced_function(stand_in.functions)
            ):
                stand_in.count.on_kernels += 1
                product = torch.nn.functional.linear
                return product(operations.geglu(product(x, *layers[0])), *layers[1])
    return linears.feed_forward(module, x)


BASIC_BLOCK = _BasicBlockSpec(
    "diffusers.models.attention:BasicTransformerBlock",
    _block_forward,
    left_to_compiler=True,
    condition=lambda self: None if self._chunk_size is None else "its feed-forward is chunked",
)


# --------------------------------------------------------------------------------------------------
# Transformers

_TRANSFORMER = "diffusers.models.transformers.transformer_2d:Transformer2DModel"
_INPUT = f"{_TRANSFORMER}._operate_on_continuous_inputs"
_OUTPUT = f"{_TRANSFORMER}._get_output_for_continuous_inputs"
_OUTPUT_PARAMETERS = "self hidden_states residual batch_size height width inner_dim"
_BLOCKS = ("transformer_blocks",)


@dataclass(frozen=True, eq=False)
class _SpatialTransformerSpec(ExactSpec):
    blocks: tuple[str, ...] = _BLOCKS

    def matches(self, module: Any) -> bool:
        return super().matches(module) and module.is_input_continuous is True


def _transformer_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    timestep: Any = None,
    added_cond_kwargs: Any = None,
    class_labels: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    attention_mask: Any = None,
    encoder_attention_mask: Any = None,
    return_dict: bool = True,
) -> Any:
    arguments = {
        "attention_mask": attention_mask,
        "encoder_hidden_states": encoder_hidden_states,
        "encoder_attention_mask": encoder_attention_mask,
        "timestep": timestep,
        "cross_attention_kwargs": cross_attention_kwargs,
        "class_labels": class_labels,
    }
    if (
        return_dict  # UNets pass False
        or tracks_derivatives()
        or (cross_attention_kwargs is not None and "scale" in cross_attention_kwargs)
        or any(m is not None and m.dim() == 2 for m in (attention_mask, encoder_attention_mask))
    ):
        call.is_counted = False
        others = {"added_cond_kwargs": added_cond_kwargs, "return_dict": return_dict}
        return forward_with_state(self, call, hidden_states, **arguments, **others)
    (out,) = run_with_state(_BLOCKS, _run_transformer, self, call, hidden_states, arguments)
    # The class's result is contiguous, unless a convolution whose weights have channels last made it or will
    # convert it.
    conv: Any = self.proj_out
    if not isinstance(conv, nn.Conv2d):
        conv = getattr(call.stand_in.injection.model(), "conv_in", None)
    is_last = isinstance(conv, nn.Conv2d) and conv.weight.stride(-1) != 1
    return (out if is_last else out.contiguous(),)


def _run_transformer(self: Any, x: Tensor, arguments: dict[str, Any]) -> tuple[Tensor]:
    modules, is_linear = self._modules, self.use_linear_projection
    batch, _, height, width = x.shape
    image = modules["norm"](x)
    if not is_linear:
        image = modules["proj_in"](image)
    tokens = image.permute(0, 2, 3, 1).reshape(batch, height * width, image.shape[1])
    if is_linear:
        tokens = linears.linear(modules["proj_in"], tokens)
    for block in self.transformer_blocks:
        tokens = block(tokens, **arguments)
    if is_linear:
        tokens = linears.linear(modules["proj_out"], tokens)
    image = tokens.reshape(batch, height, width, tokens.shape[2]).permute(0, 3, 1, 2)
    # The sum has the memory format of its first operand.
    return (x + (image if is_linear else modules["proj_out"](image)),)


SPATIAL_TRANSFORMER = _SpatialTransformerSpec(
    _TRANSFORMER,
    _transformer_forward,
    "group_norm; its tokens are added to its input without a copy",
    functions=((_INPUT, "self hidden_states"), (_OUTPUT, _OUTPUT_PARAMETERS)),
    left_to_compiler=True,
)


# --------------------------------------------------------------------------------------------------
# Models

_ONCE = (
    *("conv_in", "time_embedding", "class_embedding", "add_embedding", "encoder_hid_proj"),
    *("time_embed_act", "controlnet_cond_embedding", "conv_act", "conv_out"),
)
_PARTS = ("down_blocks.*", "mid_block", "mid_block.*", "up_blocks.*")
_LISTS = tuple(f"{part}.*attentions.*.transformer_blocks" for part in _PARTS)
# Of models without a family, too.
IN_PART = (RESNET_BLOCK, _DREAMLITE_RESNET, SPATIAL_TRANSFORMER, BASIC_BLOCK)
_SPECS = (
    model_spec("diffusers.models.unets.unet_2d_condition:UNet2DConditionModel"),
    model_spec("diffusers.models.controlnets.controlnet:ControlNetModel"),
    model_spec("diffusers.models.controlnets.controlnet_xs:UNetControlNetXSModel"),
    *(*IN_PART, STANDARD_ATTENTION, GROUP_NORM, *linears.GATED_ACTIVATIONS),
    *(linears.UNFUSED_GELU, TIMESTEPS),
    RMS_NORM,  # of DreamLite's queries and keys
)
FAMILIES = (Family("Stable Diffusion", _SPECS, _ONCE, ONE_LIST._replace(blocks=_LISTS)),)

"""Norms whose own forward is replaced, each by one operation, wherever in a model they stand.

What a norm computes with is read at each call. Where a derivative is asked for, the class's own forward runs,
with PyTorch's derivatives. torch.compile traces the class's own forward, too: Inductor fuses it with its
neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..arguments import is_plain as is_plain_tensor
from ..conditions import (
    group_norm_takes,
    has_memory_format,
    kernels_run_on,
    kernels_take,
    modulators_compatible,
    why_not_taken,
)
from ..differentiation import is_differentiated
from .checks import KnownClass
from .norms import LAYER, RMS, read_norm
from .patch import Call, Injection, PatchSpec


@dataclass(frozen=True, eq=False)
class ExactSpec(PatchSpec):
    """A class of modules, without its subclasses.

    Attributes:
        known: the class.
    """

    known: KnownClass = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", KnownClass(self.path))

    def matches(self, module: nn.Module) -> bool:
        return type(module) is self.known.cls

    def why_not(self, module: nn.Module, injection: Injection) -> str | None:
        if self.matches(module):
            return None
        return f"it is a {type(module).__name__} now"  # parametrized, for example


def left_to_class(
    call: Call, reason: str | None, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """The class's own forward for all of a call.

    ``reason``: None where it is no fall-back, because a derivative is asked for or the forward raises.
    """
    if reason is not None:
        call.fall_back(reason)
    call.is_counted = False
    return call.own_forward(module, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class NormSpec(ExactSpec):
    """A class of norms of the last dimension.

    Attributes:
        keeps_dtype: whether the result has the input's dtype even if the weight is float32.
    """

    keeps_dtype: bool = False

    def why_not(self, module: nn.Module, injection: Injection) -> str | None:
        norm = read_norm(module, None, self.keeps_dtype, is_called=True)
        return f"it {norm}" if isinstance(norm, str) else None


def _norm_forward(self: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() == 0:
        return left_to_class(call, None, self, *args, **kwargs)
    spec: Any = call.stand_in.spec
    x = args[0]
    norm = read_norm(self, x.shape[-1], spec.keeps_dtype, is_called=True)
    if isinstance(norm, str):
        return left_to_class(call, f"it {norm}", self, x)
    kind, affine, eps = norm
    if is_differentiated(x, *affine):
        return left_to_class(call, None, self, x)
    rows = _with_unit_stride(x)
    reason = _why_not_taken(rows, spec.keeps_dtype, *affine)
    if reason is not None:
        return left_to_class(call, reason, self, x)
    run: Any = functional.rms_norm if kind == RMS else functional.layer_norm
    return run(rows, *affine, eps)


def _with_unit_stride(x: Tensor) -> Tensor:
    """x, copied if its last dimension has gaps, as PyTorch's own layer norm does."""
    return x if not is_plain_tensor(x) or x.stride(-1) == 1 else x.contiguous()


def _why_not_taken(x: Tensor, upcasts: bool, *others: Tensor | None) -> str | None:
    """Why the kernels do not compute a norm of x with the others, its parameters and modulations; None if
    they do. ``upcasts``: whether these may be float32."""
    if kernels_take(x, *others):
        return None
    are_beside_x = all(other is None or other.device == x.device for other in others)
    if upcasts and kernels_run_on(x) and modulators_compatible(x, *others) and are_beside_x:
        return None
    return why_not_taken(x, *others)


_NORMALIZATION = "diffusers.models.normalization"
_LAYER_NORM, _RMS_NORM = "torch.nn.functional:layer_norm", "torch.nn.functional:rms_norm"
NORMS = tuple(
    NormSpec(
        path,
        parameters,
        _norm_forward,
        "rms_norm" if kind == RMS else "layer_norm",
        functions=functions,
        left_to_compiler=True,
        keeps_dtype=keeps_dtype,
    )
    for path, parameters, kind, functions, keeps_dtype in (
        ("torch.nn:LayerNorm", "self input", LAYER, (_LAYER_NORM,), False),
        ("torch.nn:RMSNorm", "self x", RMS, (_RMS_NORM,), True),
        (f"{_NORMALIZATION}:FP32LayerNorm", "self inputs", LAYER, (_LAYER_NORM,), True),
        (f"{_NORMALIZATION}:RMSNorm", "self hidden_states", RMS, (), False),
        (f"{_NORMALIZATION}:MochiRMSNorm", "self hidden_states", RMS, (), True),
    )
)


# --------------------------------------------------------------------------------------------------
# Group norm


class GroupNorm(NamedTuple):
    """What a group norm computes with."""

    num_groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(
        self, x: Tensor, channel_bias: Tensor | None = None, activation: str = "none"
    ) -> Tensor:
        return functional.group_norm(
            x, self.num_groups, self.weight, self.bias, self.eps, channel_bias, activation
        )

    def fits(self, x: Tensor) -> bool:
        """Whether x (B, C, ...) has the norm's channels, and more than one value in a group."""
        if x.dim() < 2 or x.shape[1] % self.num_groups or x.numel() == self.num_groups:
            return False
        affine = (self.weight, self.bias)
        return all(tensor is None or tensor.shape == x.shape[1:2] for tensor in affine)

    def why_not(self, x: Tensor) -> str | None:
        """Why the kernel does not take x, or None."""
        if group_norm_takes(x, self.weight, self.bias):
            return None
        return why_not_taken(x, self.weight, self.bias)


def read_group_norm(module: Any) -> GroupNorm | str:
    """What a ``torch.nn.GroupNorm`` computes with, or why the kernel does not compute it, as a clause."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    num_groups, eps = module.num_groups, module.eps
    if not (is_plain_tensor(weight) and is_plain_tensor(bias)):
        return "has a sharded or quantized weight"
    if type(num_groups) is not int or num_groups < 1:
        return f"has {num_groups} groups"
    return (
        GroupNorm(num_groups, weight, bias, eps)
        if isinstance(eps, float)
        else f"has an eps of {eps}"
    )


def in_memory_format(x: Tensor) -> Tensor:
    """x, copied if the kernel does not take its memory format, as PyTorch's own group norm does."""
    return x if not is_plain_tensor(x) or has_memory_format(x) else x.contiguous()


@dataclass(frozen=True, eq=False)
class GroupNormSpec(ExactSpec):
    """``torch.nn.GroupNorm``."""

    def why_not(self, module: nn.Module, injection: Injection) -> str | None:
        norm = read_group_norm(module)
        reason = f"it {norm}" if isinstance(norm, str) else None
        return super().why_not(module, injection) or reason


def _group_norm_forward(self: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return left_to_class(call, None, self, *args, **kwargs)
    (x,) = args
    reason = call.stand_in.spec.why_not(self, call.injection)
    if reason is not None:
        return left_to_class(call, reason, self, x)
    norm: Any = read_group_norm(self)
    if is_differentiated(x, norm.weight, norm.bias) or not norm.fits(x):
        return left_to_class(call, None, self, x)
    pixels = in_memory_format(x)
    reason = norm.why_not(pixels)
    if reason is not None:
        return left_to_class(call, reason, self, x)
    return norm(pixels)


GROUP_NORM = GroupNormSpec(
    "torch.nn:GroupNorm",
    "self input",
    _group_norm_forward,
    "group_norm",
    functions=("torch.nn.functional:group_norm",),
    left_to_compiler=True,
)


# --------------------------------------------------------------------------------------------------
# Norms with a modulation. Each function is the forward of its classes.


@dataclass(frozen=True, eq=False)
class AdaptiveNormSpec(ExactSpec):
    """A class of modules with a norm that they modulate.

    Attributes:
        replaces: the names of its norms. They keep their own forwards: the module's stands in for them.
    """

    replaces: tuple[str, ...] = ("norm",)

    def notes(self, module: nn.Module, injection: Injection) -> list[str]:
        found = [(name, read_norm(module._modules.get(name))) for name in self.replaces]
        return [f"{name} {reason}" for name, reason in found if isinstance(reason, str)]


def _modulated(
    call: Call,
    owner: Any,
    name: str,
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    *second: Tensor,
    upcasts: bool = False,
) -> Any:
    """``norm(x) * (1 + scale) + shift``, and the same with a second scale and shift, if there are any.

    ``upcasts``: the model computes it in float32, and goes back to x's dtype at the end.
    """
    rows = (scale, shift, *second)
    norm = read_norm(owner._modules.get(name), x.shape[-1], upcasts)
    if isinstance(norm, str):
        call.fall_back(f"{name} {norm}")
    elif is_differentiated(x, *rows, *norm[1]):
        call.is_counted = False
    else:
        kind, affine, eps = norm
        x_rows = _with_unit_stride(x)
        reason = _why_not_taken(x_rows, upcasts, *rows, *affine)
        if reason is None and not all(row is None or _broadcasts(row, x) for row in rows):
            reason = "its modulation has another shape than the kernels know"
        if reason is None:
            return _OPERATIONS[kind, bool(second)](x_rows, *rows, *affine, eps)
        call.fall_back(reason)
    n = getattr(owner, name)(x.float() if upcasts else x)
    results = []
    pairs: Any = zip(rows[::2], rows[1::2])
    for by, to in pairs:
        result = n * (1 + (by.float() if upcasts else by))
        result = result if to is None else result + to
        results.append(result.to(x.dtype) if upcasts else result)
    return tuple(results) if second else results[0]


_OPERATIONS: dict[tuple[str, bool], Any] = {
    (RMS, False): functional.rms_norm_modulate,
    (RMS, True): functional.rms_norm_modulate_pair,
    (LAYER, False): functional.layer_norm_modulate,
    (LAYER, True): functional.layer_norm_modulate_pair,
}


def _broadcasts(row: Tensor, x: Tensor) -> bool:
    """Whether a row has x's last dimension, and broadcasts to x's shape."""
    return (
        0 < row.dim() <= x.dim()
        and row.shape[-1] == x.shape[-1]
        and all(mine in (1, its) for mine, its in zip(row.shape[-2::-1], x.shape[-2::-1]))
    )


def _ada_layer_norm(
    self: Any, call: Call, x: Tensor, timestep: Tensor | None = None, temb: Any = None
) -> Tensor:
    if self.emb is not None:
        temb = self.emb(timestep)
    temb = self.linear(self.silu(temb))
    if self.chunk_dim == 1:
        shift, scale = temb[:, None].chunk(2, dim=2)
    else:
        scale, shift = temb.chunk(2, dim=0)
    return _modulated(call, self, "norm", x, scale, shift)


def _zero(
    self: Any,
    call: Call,
    x: Tensor,
    timestep: Tensor | None = None,
    class_labels: Tensor | None = None,
    hidden_dtype: torch.dtype | None = None,
    emb: Any = None,
) -> tuple[Tensor, ...]:
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, *rows = self.linear(self.silu(emb)).chunk(6, dim=1)
    return _modulated(call, self, "norm", x, scale[:, None], shift[:, None]), *rows


def _zero_single(self: Any, call: Call, x: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
    shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return _modulated(call, self, "norm", x, scale[:, None], shift[:, None]), gate


def _zero_x(self: Any, call: Call, hidden_states: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
    rows = self.linear(self.silu(emb)).chunk(9, dim=1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift2, scale2, gate2 = rows
    modulations = (row[:, None] for row in (scale, shift, scale2, shift2))
    first, second = _modulated(call, self, "norm", hidden_states, *modulations)
    return first, gate, shift_mlp, scale_mlp, gate_mlp, second, gate2


def _continuous(self: Any, call: Call, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
    scale, shift = emb[:, None].chunk(2, dim=2)
    return _modulated(call, self, "norm", x, scale, shift)


def _continuous_without_silu(
    self: Any, call: Call, x: Tensor, conditioning_embedding: Tensor
) -> Tensor:
    scale, shift = self.linear(conditioning_embedding.to(x.dtype))[:, None].chunk(2, dim=2)
    return _modulated(call, self, "norm", x, scale, shift)


def _scaled(self: Any, call: Call, x: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
    scale, *rows = self.linear(self.silu(emb)).chunk(4, dim=1)
    return _modulated(call, self, "norm", x, scale[:, None], None), *rows


def _scaled_in_float32(
    self: Any, call: Call, hidden_states: Tensor, emb: Tensor
) -> tuple[Tensor, ...]:
    scale, *rows = self.linear(self.silu(emb)).chunk(4, dim=1)
    scale = scale[:, None]
    return _modulated(call, self, "norm", hidden_states, scale, None, upcasts=True), *rows


def _scaled_continuous(self: Any, call: Call, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    scale = self.linear_1(self.silu(conditioning_embedding).to(x.dtype))
    x = _modulated(call, self, "norm", x, scale[:, None], None)
    return x if self.linear_2 is None else self.linear_2(x)


def _zero_of_two(
    self: Any, call: Call, x: Tensor, context: Tensor, emb: Any = None
) -> tuple[Tensor, ...]:
    rows = self.linear(self.silu(emb)).chunk(12, dim=1)
    shift, scale, *others, c_shift, c_scale, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = rows
    x = _modulated(call, self, "norm_x", x, scale[:, None], shift[:, None])
    context = _modulated(call, self, "norm_c", context, c_scale[:, None], c_shift[:, None])
    return x, *others, context, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp


def _zero_of_two_by_turns(
    self: Any, call: Call, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor
) -> tuple[Tensor, ...]:
    """The rows of the two streams alternate."""
    rows = self.linear(temb).chunk(12, dim=1)
    (shift, scale, *others), (c_shift, c_scale, *c_others) = rows[::2], rows[1::2]
    x, c = hidden_states, encoder_hidden_states
    x = _modulated(call, self, "norm", x, scale[:, None], shift[:, None])
    c = _modulated(call, self, "norm_context", c, c_scale[:, None], c_shift[:, None])
    return x, *others, c, *c_others


def _zero_of_both(
    self: Any, call: Call, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor
) -> tuple[Tensor, ...]:
    """One norm for both streams."""
    rows = self.linear(self.silu(temb))[:, None].chunk(6, dim=2)
    shift, scale, gate, c_shift, c_scale, c_gate = rows
    x = _modulated(call, self, "norm", hidden_states, scale, shift)
    context = _modulated(call, self, "norm", encoder_hidden_states, c_scale, c_shift)
    return x, context, gate, c_gate


def _zero_of_both_flat(self: Any, call: Call, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    x, context, *gates = _zero_of_both(self, call, *args, **kwargs)
    return x, context, *(gate.squeeze(1) for gate in gates)


def _cosmos_rows(self: Any, embedded_timestep: Tensor, temb: Any, count: int) -> Any:
    emb = self.linear_2(self.linear_1(self.activation(embedded_timestep)))
    if temb is not None:
        emb = emb + temb
    return (emb[:, None] if emb.ndim == 2 else emb).chunk(count, dim=-1)


def _cosmos(
    self: Any, call: Call, hidden_states: Tensor, embedded_timestep: Tensor, temb: Any = None
) -> Tensor:
    temb = None if temb is None else temb[..., : 2 * self.embedding_dim]
    shift, scale = _cosmos_rows(self, embedded_timestep, temb, 2)
    return _modulated(call, self, "norm", hidden_states, scale, shift)


def _cosmos_zero(
    self: Any, call: Call, hidden_states: Tensor, embedded_timestep: Tensor, temb: Any = None
) -> tuple[Tensor, Tensor]:
    shift, scale, gate = _cosmos_rows(self, embedded_timestep, temb, 3)
    return _modulated(call, self, "norm", hidden_states, scale, shift), gate


def _table(
    self: Any, call: Call, hidden_states: Tensor, temb: Tensor, scale_shift_table: Tensor
) -> Tensor:
    rows = scale_shift_table[None] + temb[:, None].to(scale_shift_table.device)
    shift, scale = rows.chunk(2, dim=1)
    return _modulated(call, self, "norm", hidden_states, scale, shift)


def _table_of_frames(
    self: Any, call: Call, hidden_states: Tensor, temb: Tensor, scale_shift_table: Tensor
) -> Tensor:
    rows = scale_shift_table[None, None] + temb[:, :, None].to(scale_shift_table.device)
    shift, scale = rows.unbind(dim=2)
    return _modulated(call, self, "norm", hidden_states, scale, shift)


_TWO_STREAMS = "self hidden_states encoder_hidden_states temb"
_COSMOS = "self hidden_states embedded_timestep temb"
_CONDITIONED = "self x conditioning_embedding"
_TABLE = "self hidden_states temb scale_shift_table"
_LABELED = "self x timestep class_labels hidden_dtype emb"
_OF_TRANSFORMERS = "diffusers.models.transformers"
_COGVIEW4 = f"{_OF_TRANSFORMERS}.transformer_cogview4:CogView4AdaLayerNorm"
_GLM_IMAGE = f"{_OF_TRANSFORMERS}.transformer_glm_image:GlmImageAdaLayerNorm"
_EASYANIMATE = f"{_OF_TRANSFORMERS}.transformer_easyanimate:EasyAnimateLayerNormZero"
_COSMOS_NORM = f"{_OF_TRANSFORMERS}.transformer_cosmos:CosmosAdaLayerNorm"
_MOCHI_NORM = f"{_OF_TRANSFORMERS}.transformer_mochi:MochiRMSNormZero"
_COGVIEW3 = f"{_NORMALIZATION}:CogView3PlusAdaLayerNormZeroTextImage"
_CLASSES: tuple[tuple, ...] = (
    (f"{_NORMALIZATION}:AdaLayerNorm", "self x timestep temb", _ada_layer_norm),
    (f"{_NORMALIZATION}:AdaLayerNormZero", _LABELED, _zero),
    (f"{_NORMALIZATION}:AdaLayerNormZeroSingle", "self x emb", _zero_single),
    (f"{_NORMALIZATION}:SD35AdaLayerNormZeroX", "self hidden_states emb", _zero_x),
    (f"{_NORMALIZATION}:AdaLayerNormContinuous", _CONDITIONED, _continuous),
    (f"{_NORMALIZATION}:LuminaRMSNormZero", "self x emb", _scaled),
    (f"{_NORMALIZATION}:LuminaLayerNormContinuous", _CONDITIONED, _scaled_continuous),
    (_MOCHI_NORM, "self hidden_states emb", _scaled_in_float32),
    (_COGVIEW3, "self x context emb", _zero_of_two, ("norm_x", "norm_c")),
    (f"{_NORMALIZATION}:CogVideoXLayerNormZero", _TWO_STREAMS, _zero_of_both),
    (_EASYANIMATE, _TWO_STREAMS, _zero_of_both_flat),
    (f"{_COGVIEW4}Zero", _TWO_STREAMS, _zero_of_two_by_turns, ("norm", "norm_context")),
    (f"{_GLM_IMAGE}Zero", _TWO_STREAMS, _zero_of_two_by_turns, ("norm", "norm_context")),
    (f"{_COGVIEW4}Continuous", _CONDITIONED, _continuous_without_silu),
    (f"{_GLM_IMAGE}Continuous", _CONDITIONED, _continuous_without_silu),
    (_COSMOS_NORM, _COSMOS, _cosmos),
    (f"{_COSMOS_NORM}Zero", _COSMOS, _cosmos_zero),
    (f"{_OF_TRANSFORMERS}.sana_transformer:SanaModulatedNorm", _TABLE, _table),
    (f"{_OF_TRANSFORMERS}.transformer_sana_video:SanaModulatedNorm", _TABLE, _table_of_frames),
)
ADAPTIVE_NORMS = tuple(
    AdaptiveNormSpec(
        path,
        parameters,
        forward,
        "norm and modulation in one pass",
        left_to_compiler=True,
        **({"replaces": replaces[0]} if replaces else {}),
    )
    for path, parameters, forward, *replaces in _CLASSES
)
_OUTPUT_NORM = next(
    spec for spec in ADAPTIVE_NORMS if spec.path.endswith(":AdaLayerNormContinuous")
)
# What the output of many models of families goes through, by its name.
OUTPUT_NORM = {"norm_out": replace(_OUTPUT_NORM, left_to_compiler=False)}

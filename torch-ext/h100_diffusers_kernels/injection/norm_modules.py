"""Norms whose own forward is replaced: each by one operation, wherever in a model it stands.

What a norm reads is few and is read anew at each call, so nothing of it is kept from one to the next. Where a
derivative is asked for, the class's own forward runs, with the derivatives that it has in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..conditions import go_with, is_plain, kernels_run_on, kernels_take, why_not_taken
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .injected import Injected, Injection, Parts
from .norms import LAYER, RMS
from .original import Original, find_class, find_original
from .part import Part
from .snapshot import Look, has_global_hooks


class Settings(NamedTuple):
    """What a norm of the last dimension computes with."""

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class NormModule(Part):
    """A class of norms, without its subclasses.

    Attributes:
        kind: RMS or LAYER.
        function: the path of the function that its forward calls, or None.
        keeps_dtype: whether its result has the dtype of its input also where its weight is float32.
    """

    kind: str = RMS
    function: str | None = None
    keeps_dtype: bool = False

    def is_kind_of(self, module: nn.Module) -> bool:
        return type(module) is find_class(self.path)

    def originals(self) -> dict[str, Original]:
        paths = () if self.function is None else (self.function,)
        return {path: find_original(path) for path in paths}

    def settings(self, module: nn.Module, injection: Injection) -> Settings | str:
        """What the norm computes with now, or why the kernels do not compute it."""
        if type(module) is not injection.originals[self.path].owner:
            return f"it is a {type(module).__name__} now"  # parametrized, say
        if self.function is not None and not injection.originals[self.function].is_in_use():
            return f"{self.function.partition(':')[2]} was replaced"
        attributes, parameters = module.__dict__, module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if not (is_plain(weight) and is_plain(bias)):
            return "it has a sharded or quantized weight"
        if self.kind == RMS and bias is not None:
            return "it has a bias"
        eps = attributes.get("eps")
        if not isinstance(eps, float):
            return f"it has an eps of {eps}"
        shape = attributes.get("normalized_shape")
        if len(shape or ()) > 1 or (weight is not None and weight.dim() != 1):
            return "it normalizes over several dimensions"
        return Settings(self.kind, weight, bias, eps)

    def fits(self, module: nn.Module, settings: Settings, x: Tensor) -> bool:
        """Whether x has the last dimension that the norm says it takes."""
        shape = module.__dict__.get("normalized_shape")
        if shape is None and settings.weight is not None:
            shape = settings.weight.shape
        return x.dim() > 0 and (not shape or shape[0] == x.shape[-1])

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        settings = self.settings(module, injection)
        parts.reason = settings if isinstance(settings, str) else None


def _norm_forward(self: nn.Module, injected: Injected, *args: Any, **kwargs: Any) -> Tensor:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return injected.class_forward(self, *args, **kwargs)
    part, x = injected.part, args[0]
    settings = part.settings(self, injected.injection)
    if isinstance(settings, str):
        injected.leave(settings)
        return injected.class_forward(self, x)
    kind, weight, bias, eps = settings
    if is_differentiated(x, weight, bias):
        return injected.class_forward(self, x)
    if not part.fits(self, settings, x):
        return injected.class_forward(self, x)  # which says so
    rows = _rows(x)
    reason = _why_not(rows, part.keeps_dtype, weight, bias)
    if reason is not None:
        injected.leave(reason)
        return injected.class_forward(self, x)
    injected.count([])
    x = rows
    if kind == RMS:
        return functional.rms_norm(x, weight, eps)
    return functional.layer_norm(x, weight, bias, eps)


def _rows(x: Tensor) -> Tensor:
    """x, copied if its last dimension has gaps, as in PyTorch's own layer norm."""
    return x if not is_plain(x) or x.stride(-1) == 1 else x.contiguous()


def _why_not(x: Tensor, widens: bool, *others: Tensor | None) -> str | None:
    """Why the kernels do not compute a norm of x, and what comes after it; None if they do.

    ``widens``: whether the others may be float32, as what the class makes of them has x's dtype all the same.
    """
    if kernels_take(x, *others):
        return None
    if widens and kernels_run_on(x) and go_with(x, *others) and _are_beside(x, others):
        return None
    return why_not_taken(x, *others)


def _are_beside(x: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    return all(other is None or other.device == x.device for other in others)


def _norm(
    path: str, forward: str, kind: str, function: str | None = None, keeps_dtype: bool = False
) -> NormModule:
    operation = "rms_norm" if kind == RMS else "layer_norm"
    return NormModule(path, forward, _norm_forward, operation, kind, function, keeps_dtype)


_NORMALIZATION = "diffusers.models.normalization"
_LAYER_NORM, _RMS_NORM = "torch.nn.functional:layer_norm", "torch.nn.functional:rms_norm"
NORMS = (
    _norm("torch.nn:LayerNorm", "self input", LAYER, _LAYER_NORM),
    _norm("torch.nn:RMSNorm", "self x", RMS, _RMS_NORM, keeps_dtype=True),
    _norm(f"{_NORMALIZATION}:FP32LayerNorm", "self inputs", LAYER, _LAYER_NORM, keeps_dtype=True),
    _norm(f"{_NORMALIZATION}:RMSNorm", "self hidden_states", RMS),
    _norm(f"{_NORMALIZATION}:MochiRMSNorm", "self hidden_states", RMS, keeps_dtype=True),
)


# --------------------------------------------------------------------------------------------------
# Norms with a modulation

Modulate = Callable[..., Any]


def _not_given(*_: Any) -> Any:
    raise NotImplementedError


@dataclass(frozen=True)
class AdaptiveNormModule(Part):
    """A class of modules with a norm, without its subclasses, that modulate what the norm makes.

    Attributes:
        formula: ``formula(module, modulate, *args, **kwargs)`` is the class's forward, in which
            ``modulate`` is a ``_Modulate``.
        norms: the names of its norms. They keep their own forwards: the module's stands in for them, too.
    """

    formula: Callable = _not_given
    norms: tuple[str, ...] = ("norm",)

    def is_kind_of(self, module: nn.Module) -> bool:
        return type(module) is find_class(self.path)

    def originals(self) -> dict[str, Original]:
        """Those of the norms, which may be of any kind."""
        originals = {}
        for norm in NORMS:
            originals.update({norm.path: norm.own_forward(), **norm.originals()})
        return originals

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        for name in self.norms:
            settings = _inner(getattr(module, name, None), injection)
            if isinstance(settings, str):
                parts.reason = f"{name}: {settings}"


def _adaptive_forward(self: nn.Module, injected: Injected, *args: Any, **kwargs: Any) -> Any:
    modulate = _Modulate(injected.injection)
    result = injected.part.formula(self, modulate, *args, **kwargs)
    if modulate.reasons:
        injected.leave(modulate.reasons[0])
    elif modulate.reasons is not None:
        injected.count([])
    return result


class _Modulate:
    """The modulations in one call of a module.

    Attributes:
        reasons: why not all ran on the kernels; None where a derivative is asked for.
    """

    def __init__(self, injection: Injection) -> None:
        self._injection = injection
        self.reasons: list[str] | None = []

    def __call__(
        self,
        norm: nn.Module,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        *second: Tensor,
        widens: bool = False,
    ) -> Any:
        """``norm(x) * (1 + scale) + shift``, and the same of a second scale and shift, if there are any.

        ``widens``: all of it is in float32, and rounded to x's dtype at the end.
        """
        rows = (scale, shift, *second)
        settings = _inner(norm, self._injection)
        if isinstance(settings, str):
            reason: str | None = f"its norm: {settings}"
        else:
            kind, weight, bias, eps = settings
            if is_differentiated(x, *rows, weight, bias):
                self.reasons = None
                return self._as_in_class(norm, x, rows, widens)
            x_rows = _rows(x)
            reason = _why_not(x_rows, widens, *rows, weight, bias)
            if reason is None and not all(row is None or _broadcasts(row, x) for row in rows):
                reason = "its modulation has another shape than the kernels know"
        if reason is not None:
            if self.reasons is not None:
                self.reasons.append(reason)
            return self._as_in_class(norm, x, rows, widens)
        affine = (weight,) if kind == RMS else (weight, bias)
        return _OPERATIONS[kind, bool(second)](x_rows, *rows, *affine, eps)

    def _as_in_class(self, norm: nn.Module, x: Tensor, rows: tuple, widens: bool) -> Any:
        dtype = x.dtype
        n = norm(x.float() if widens else x)
        results = []
        for scale, shift in zip(rows[::2], rows[1::2]):
            result = n * (1 + (scale.float() if widens else scale))
            result = result if shift is None else result + shift
            results.append(result.to(dtype) if widens else result)
        return results[0] if len(results) == 1 else tuple(results)


_OPERATIONS: dict[tuple[str, bool], Callable] = {
    (RMS, False): functional.rms_norm_modulate,
    (RMS, True): functional.rms_norm_modulate_pair,
    (LAYER, False): functional.layer_norm_modulate,
    (LAYER, True): functional.layer_norm_modulate_pair,
}


def _inner(norm: Any, injection: Injection) -> Settings | str:
    """What a norm inside of a module computes, if its call runs nothing but its class's forward."""
    for part in NORMS:
        own = injection.originals[part.path]
        if type(norm) is own.owner:
            break
    else:
        return f"it is a {type(norm).__name__}"
    if not own.is_in_use():
        return "its class's forward was replaced"
    if not runs_own_forward(norm) or (not torch.compiler.is_compiling() and has_global_hooks()):
        return "it has hooks, or another forward than its class's"
    return part.settings(norm, injection)


def _broadcasts(row: Tensor, x: Tensor) -> bool:
    """Whether a row is of x's last dimension, and makes nothing larger than x of it."""
    return (
        0 < row.dim() <= x.dim()
        and row.shape[-1] == x.shape[-1]
        and all(mine in (1, its) for mine, its in zip(row.shape[-2::-1], x.shape[-2::-1]))
    )


def _ada_layer_norm(
    self: Any,
    modulate: Modulate,
    x: Tensor,
    timestep: Tensor | None = None,
    temb: Any = None,
) -> Tensor:
    if self.emb is not None:
        temb = self.emb(timestep)
    temb = self.linear(self.silu(temb))
    if self.chunk_dim == 1:
        shift, scale = temb[:, None].chunk(2, dim=2)
    else:
        scale, shift = temb.chunk(2, dim=0)
    return modulate(self.norm, x, scale, shift)


def _zero(
    self: Any,
    modulate: Modulate,
    x: Tensor,
    timestep: Tensor | None = None,
    class_labels: Tensor | None = None,
    hidden_dtype: torch.dtype | None = None,
    emb: Any = None,
) -> tuple[Tensor, ...]:
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, *rows = self.linear(self.silu(emb)).chunk(6, dim=1)
    return modulate(self.norm, x, scale[:, None], shift[:, None]), *rows


def _zero_single(
    self: Any, modulate: Modulate, x: Tensor, emb: Tensor | None = None
) -> tuple[Tensor, ...]:
    shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return modulate(self.norm, x, scale[:, None], shift[:, None]), gate


def _zero_x(
    self: Any, modulate: Modulate, hidden_states: Tensor, emb: Tensor | None = None
) -> tuple[Tensor, ...]:
    x = hidden_states
    rows = self.linear(self.silu(emb)).chunk(9, dim=1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift2, scale2, gate2 = rows
    modulations = (row[:, None] for row in (scale, shift, scale2, shift2))
    first, second = modulate(self.norm, x, *modulations)
    return first, gate, shift_mlp, scale_mlp, gate_mlp, second, gate2


def _continuous(self: Any, modulate: Modulate, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
    scale, shift = emb[:, None].chunk(2, dim=2)
    return modulate(self.norm, x, scale, shift)


def _continuous_without_silu(
    self: Any, modulate: Modulate, x: Tensor, conditioning_embedding: Tensor
) -> Tensor:
    scale, shift = self.linear(conditioning_embedding.to(x.dtype))[:, None].chunk(2, dim=2)
    return modulate(self.norm, x, scale, shift)


def _scaled(
    self: Any, modulate: Modulate, x: Tensor, emb: Tensor | None = None
) -> tuple[Tensor, ...]:
    scale, *rows = self.linear(self.silu(emb)).chunk(4, dim=1)
    return modulate(self.norm, x, scale[:, None], None), *rows


def _scaled_in_float32(
    self: Any, modulate: Modulate, hidden_states: Tensor, emb: Tensor
) -> tuple[Tensor, ...]:
    scale, *rows = self.linear(self.silu(emb)).chunk(4, dim=1)
    return modulate(self.norm, hidden_states, scale[:, None], None, widens=True), *rows


def _scaled_continuous(
    self: Any, modulate: Modulate, x: Tensor, conditioning_embedding: Tensor
) -> Tensor:
    scale = self.linear_1(self.silu(conditioning_embedding).to(x.dtype))
    x = modulate(self.norm, x, scale[:, None], None)
    return x if self.linear_2 is None else self.linear_2(x)


def _zero_of_two(
    self: Any, modulate: Modulate, x: Tensor, context: Tensor, emb: Tensor | None = None
) -> tuple[Tensor, ...]:
    rows = self.linear(self.silu(emb)).chunk(12, dim=1)
    shift, scale, *others, c_shift, c_scale, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = rows
    x = modulate(self.norm_x, x, scale[:, None], shift[:, None])
    context = modulate(self.norm_c, context, c_scale[:, None], c_shift[:, None])
    return x, *others, context, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp


def _zero_of_two_by_turns(
    self: Any,
    modulate: Modulate,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
) -> tuple[Tensor, ...]:
    """With the rows of the one stream and of the other by turns."""
    rows = self.linear(temb).chunk(12, dim=1)
    (shift, scale, *others), (c_shift, c_scale, *c_others) = rows[::2], rows[1::2]
    x, c = hidden_states, encoder_hidden_states
    x = modulate(self.norm, x, scale[:, None], shift[:, None])
    c = modulate(self.norm_context, c, c_scale[:, None], c_shift[:, None])
    return x, *others, c, *c_others


def _zero_of_both(
    self: Any,
    modulate: Modulate,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
) -> tuple[Tensor, ...]:
    """One norm for both streams."""
    rows = self.linear(self.silu(temb))[:, None].chunk(6, dim=2)
    shift, scale, gate, c_shift, c_scale, c_gate = rows
    x = modulate(self.norm, hidden_states, scale, shift)
    context = modulate(self.norm, encoder_hidden_states, c_scale, c_shift)
    return x, context, gate, c_gate


def _zero_of_both_flat(self: Any, modulate: Modulate, *args: Any, **kwargs: Any) -> Any:
    x, context, *gates = _zero_of_both(self, modulate, *args, **kwargs)
    return x, context, *(gate.squeeze(1) for gate in gates)


def _cosmos(
    self: Any,
    modulate: Modulate,
    hidden_states: Tensor,
    embedded_timestep: Tensor,
    temb: Tensor | None = None,
) -> Tensor:
    emb = self.linear_2(self.linear_1(self.activation(embedded_timestep)))
    if temb is not None:
        emb = emb + temb[..., : 2 * self.embedding_dim]
    shift, scale = (emb[:, None] if emb.ndim == 2 else emb).chunk(2, dim=-1)
    return modulate(self.norm, hidden_states, scale, shift)


def _cosmos_zero(
    self: Any,
    modulate: Modulate,
    hidden_states: Tensor,
    embedded_timestep: Tensor,
    temb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    emb = self.linear_2(self.linear_1(self.activation(embedded_timestep)))
    if temb is not None:
        emb = emb + temb
    shift, scale, gate = (emb[:, None] if emb.ndim == 2 else emb).chunk(3, dim=-1)
    return modulate(self.norm, hidden_states, scale, shift), gate


def _table(
    self: Any, modulate: Modulate, hidden_states: Tensor, temb: Tensor, scale_shift_table: Tensor
) -> Tensor:
    rows = scale_shift_table[None] + temb[:, None].to(scale_shift_table.device)
    shift, scale = rows.chunk(2, dim=1)
    return modulate(self.norm, hidden_states, scale, shift)


def _table_of_frames(
    self: Any, modulate: Modulate, hidden_states: Tensor, temb: Tensor, scale_shift_table: Tensor
) -> Tensor:
    rows = scale_shift_table[None, None] + temb[:, :, None].to(scale_shift_table.device)
    shift, scale = rows.unbind(dim=2)
    return modulate(self.norm, hidden_states, scale, shift)


_TRANSFORMERS = "diffusers.models.transformers"
_TWO_STREAMS = "self hidden_states encoder_hidden_states temb"
_COSMOS = "self hidden_states embedded_timestep temb"
_CONDITIONED = "self x conditioning_embedding"
_TABLE = "self hidden_states temb scale_shift_table"
_ADAPTIVE: tuple[tuple, ...] = (
    (f"{_NORMALIZATION}:AdaLayerNorm", "self x timestep temb", _ada_layer_norm),
    (
        f"{_NORMALIZATION}:AdaLayerNormZero",
        "self x timestep class_labels hidden_dtype emb",
        _zero,
    ),
    (f"{_NORMALIZATION}:AdaLayerNormZeroSingle", "self x emb", _zero_single),
    (f"{_NORMALIZATION}:SD35AdaLayerNormZeroX", "self hidden_states emb", _zero_x),
    (f"{_NORMALIZATION}:AdaLayerNormContinuous", _CONDITIONED, _continuous),
    (f"{_NORMALIZATION}:LuminaRMSNormZero", "self x emb", _scaled),
    (f"{_NORMALIZATION}:LuminaLayerNormContinuous", _CONDITIONED, _scaled_continuous),
    (
        f"{_TRANSFORMERS}.transformer_mochi:MochiRMSNormZero",
        "self hidden_states emb",
        _scaled_in_float32,
    ),
    (
        f"{_NORMALIZATION}:CogView3PlusAdaLayerNormZeroTextImage",
        "self x context emb",
        _zero_of_two,
        ("norm_x", "norm_c"),
    ),
    (f"{_NORMALIZATION}:CogVideoXLayerNormZero", _TWO_STREAMS, _zero_of_both),
    (
        f"{_TRANSFORMERS}.transformer_easyanimate:EasyAnimateLayerNormZero",
        _TWO_STREAMS,
        _zero_of_both_flat,
    ),
    *(
        (f"{path}Zero", _TWO_STREAMS, _zero_of_two_by_turns, ("norm", "norm_context"))
        for path in (
            f"{_TRANSFORMERS}.transformer_cogview4:CogView4AdaLayerNorm",
            f"{_TRANSFORMERS}.transformer_glm_image:GlmImageAdaLayerNorm",
        )
    ),
    *(
        (f"{path}Continuous", _CONDITIONED, _continuous_without_silu)
        for path in (
            f"{_TRANSFORMERS}.transformer_cogview4:CogView4AdaLayerNorm",
            f"{_TRANSFORMERS}.transformer_glm_image:GlmImageAdaLayerNorm",
        )
    ),
    (f"{_TRANSFORMERS}.transformer_cosmos:CosmosAdaLayerNorm", _COSMOS, _cosmos),
    (f"{_TRANSFORMERS}.transformer_cosmos:CosmosAdaLayerNormZero", _COSMOS, _cosmos_zero),
    (f"{_TRANSFORMERS}.sana_transformer:SanaModulatedNorm", _TABLE, _table),
    (f"{_TRANSFORMERS}.transformer_sana_video:SanaModulatedNorm", _TABLE, _table_of_frames),
)
ADAPTIVE_NORMS = tuple(
    AdaptiveNormModule(
        path, parameters, _adaptive_forward, "norm and modulation in one pass", formula, *norms
    )
    for path, parameters, formula, *norms in _ADAPTIVE
)
# What the output of many models goes through, by its name.
OUTPUT_NORM = {
    "norm_out": next(p for p in ADAPTIVE_NORMS if p.path.endswith(":AdaLayerNormContinuous"))
}

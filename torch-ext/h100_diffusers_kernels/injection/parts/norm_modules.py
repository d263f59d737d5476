"""Norms anywhere in a model, replaced by one operation each.

Their parameters are read at each call. If a derivative is requested, the class's own forward runs, with
PyTorch's derivatives. It also runs under torch.compile, where Inductor fuses it with neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import operations
from ...operations.conditions import (
    KERNEL_DEVICE_TYPE,
    group_norm_takes,
    has_memory_format,
    is_differentiated,
    kernels_run_on,
    kernels_take,
    modulators_compatible,
    why_not_taken,
)
from ..core.patch import Call, ExactSpec, Injection
from .linears import linear
from .norms import NORM_OPERATIONS, Norm, Upcasts, norm_modulate, norm_notes, read_norm


def compute_norm(
    norm: Norm, x: Tensor, upcasts: Upcasts, *rows: Tensor | None
) -> Tensor | str | None:
    """``norm(x)``, modulated by a scale and a shift if they are given.

    ``upcasts``: whether they and the norm's parameters may be float32.

    Returns:
        The result; the reason why the kernels cannot compute it; or None if a derivative is requested.
    """
    kind, affine, eps = norm
    if upcasts and x.dtype is torch.float32:
        affine = tuple([tensor if tensor is None else tensor.float() for tensor in affine])
    others = (*rows, *affine)
    if is_differentiated(x, *others):
        return None
    if not kernels_take(x, *others):
        if x.stride(-1) != 1:
            x = x.contiguous()  # as PyTorch's own layer norm does
        is_taken = kernels_take(x, *others) or (
            upcasts
            and kernels_run_on(x)
            and modulators_compatible(x, *others)
            and all(other is None or other.device == x.device for other in others)
        )
        if not is_taken:
            return why_not_taken(x, *others)
    return NORM_OPERATIONS[kind, len(rows)](x, *rows, *affine, eps)


@dataclass(frozen=True, eq=False)
class NormSpec(ExactSpec):
    """A norm class that normalizes the last dimension.

    Attributes:
        keeps_dtype: whether the result has the input's dtype even if the weight is float32.
    """

    keeps_dtype: bool = False

    def why_not(self, module: Any) -> str | None:
        norm = read_norm(module, is_called=True)
        return f"it {norm}" if isinstance(norm, str) else None


def norm_forward(self: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    if len(args) != 1 or kwargs:
        return NotImplemented
    x, keeps_dtype = args[0], call.stand_in.spec.keeps_dtype  # type: ignore[attr-defined]
    norm = read_norm(self, x.shape[-1] if x.dim() else 0, is_called=True)
    out = f"it {norm}" if isinstance(norm, str) else compute_norm(norm, x, keeps_dtype)
    return out if isinstance(out, Tensor) else call.decline(out)


_NORM = "diffusers.models.normalization:"
_LAYER_NORM, _RMS_NORM = ("torch.nn.functional:layer_norm",), ("torch.nn.functional:rms_norm",)
NORMS = tuple(
    NormSpec(path, norm_forward, operation, functions, True, parameters, None, keeps_dtype)
    for path, parameters, operation, functions, keeps_dtype in (
        ("torch.nn:LayerNorm", "self input", "layer_norm", _LAYER_NORM, False),
        ("torch.nn:RMSNorm", "self x", "rms_norm", _RMS_NORM, True),
        (f"{_NORM}FP32LayerNorm", "self inputs", "layer_norm", _LAYER_NORM, True),
        (f"{_NORM}RMSNorm", "self hidden_states", "rms_norm", (), False),
        (f"{_NORM}MochiRMSNorm", "self hidden_states", "rms_norm", (), True),
    )
)
RMS_NORM = NORMS[3]  # diffusers'


# --------------------------------------------------------------------------------------------------
# Group norm


# Whether PyTorch's group norm keeps channels last. On a GPU its result is contiguous.
PYTORCH_KEEPS_FORMAT = KERNEL_DEVICE_TYPE == "cpu"


def _is_channels_last(x: Tensor) -> bool:
    """Whether PyTorch takes x to have channels last, by the strides of dimensions of size 1, too."""
    strides = [x.stride(0), *x.stride()[2:]]
    return x.dim() > 3 and strides == sorted(strides, reverse=True)


def apply_group_norm(
    module: Any,
    x: Tensor,
    channel_bias: Tensor | None = None,
    activation: str = "none",
    is_inside: bool = False,
) -> Tensor | str | None:
    """A ``torch.nn.GroupNorm`` of x (B, C, ...) plus a bias (B, C).

    The result has the memory format of PyTorch's. ``is_inside``: the caller does not return it; so it keeps
    channels last also on a GPU, which saves cuDNN's copies.

    Returns:
        The result; the reason why the kernel cannot compute it; or None if the class's own forward raises or
        a derivative is requested.
    """
    weight, bias, groups = module.weight, module.bias, module.num_groups
    if (
        x.dim() < 2
        or x.shape[1] % groups
        or x.numel() == groups  # one value per group
        or (weight is not None and weight.shape != x.shape[1:2])
        or is_differentiated(x, weight, bias)
    ):
        return None
    if not (x.is_contiguous() and kernels_take(x, weight, bias)):
        keeps_last = _is_channels_last(x) if PYTORCH_KEEPS_FORMAT else is_inside
        if not (has_memory_format(x) and (x.stride(1) != 1 or keeps_last)):
            x = x.contiguous()  # as PyTorch's own group norm does
        if not group_norm_takes(x, weight, bias):
            return why_not_taken(x, weight, bias)
    return operations.group_norm(x, groups, weight, bias, module.eps, channel_bias, activation)


def apply_channel_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str = "none",
    *rows: Tensor,
) -> Tensor | str | None:
    """An RMS norm over the channels of x (B, C, ...), then an activation.

    ``rows``: a scale and a shift (B, C, ...) with one value per channel, or nothing.

    Returns:
        As ``apply_group_norm``.
    """
    shape = x.shape[:2]
    if is_differentiated(x, weight, bias, *rows):
        return None
    if not 3 <= x.dim() <= 5:
        return f"it was given a tensor of {x.dim()} dimensions"
    if any(row.shape[:2] != shape or row.numel() != shape.numel() for row in rows):
        return "the kernel does not support its modulation's shape"
    if not (has_memory_format(x, gaps=1) and (x.stride(1) != 1 or _is_channels_last(x))):
        x = x.contiguous()
    scale, shift = [row.reshape(shape) for row in rows] or (None, None)
    if not group_norm_takes(x, weight, bias, scale, shift, gaps=1):
        return why_not_taken(x, weight, bias, scale, shift)
    return operations.channel_rms_norm(x, weight, bias, eps, scale, shift, activation)


def _group_norm_forward(self: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    out: Any = None
    if type(self) is not nn.GroupNorm:  # parametrized, for example
        out = f"it is a {type(self).__name__} now"
    elif len(args) == 1 and not kwargs:
        is_inside = call.state is not None or call.stand_in.injection.options["is_autoencoder"]
        out = apply_group_norm(self, *args, is_inside=is_inside)
    return out if isinstance(out, Tensor) else call.decline(out)


_FUNCTIONS = ("torch.nn.functional:group_norm",)
GROUP_NORM = ExactSpec(
    "torch.nn:GroupNorm", _group_norm_forward, "group_norm", _FUNCTIONS, True, "self input"
)


# --------------------------------------------------------------------------------------------------
# Norms with a modulation


@dataclass(frozen=True, eq=False)
class AdaptiveNormSpec(ExactSpec):
    """A module class with norms, modulated by rows that it computes from an embedding.

    Attributes:
        rows: the number of rows.
        results: the forward's results. A row is given as its index. A modulated norm is given as the argument
            index of the hidden states, the norm's name, and the row indices of scale and shift (None for no
            shift).
        has_tokens: whether the returned rows are (B, 1, D), not (B, D).
        upcasts: where the model computes in float32.
        names: names of the forward's arguments.
        replaces: names of the norms. They get no stand-ins, because the module's stand-in replaces them.
    """

    rows: int = 0
    results: tuple[Any, ...] = ()
    has_tokens: bool = False
    upcasts: Upcasts = Upcasts.NOWHERE
    names: tuple[str, ...] = field(init=False)
    replaces: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple((self.parameters or "").split()[1:]))
        norms = dict.fromkeys(r[1] for r in self.results if isinstance(r, tuple))
        object.__setattr__(self, "replaces", tuple(norms))
        super().__post_init__()

    def notes(self, module: nn.Module, injection: Injection) -> list[str]:
        return norm_notes(module, self.replaces)


def _adaptive_forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    spec: Any = call.stand_in.spec
    given = dict(zip(spec.names, args), **kwargs)
    if len(given) != len(args) + len(kwargs) or len({*spec.names, *kwargs}) > len(spec.names):
        return NotImplemented  # the class's own forward raises
    if torch.is_autocast_enabled(KERNEL_DEVICE_TYPE):
        return call.decline("autocast is on")  # then some classes cast the norm's float32 result
    embedded = _embedded(self, given)
    if spec.has_tokens and embedded.dim() == 2:
        embedded = embedded[:, None]
    rows = embedded.chunk(spec.rows, dim=-1)
    results = []
    for result in spec.results:
        if type(result) is int:
            results.append(rows[result])
            continue
        stream, norm, at_scale, at_shift = result
        scale, shift = rows[at_scale], None if at_shift is None else rows[at_shift]
        if not spec.has_tokens:
            scale, shift = scale[:, None], None if shift is None else shift[:, None]
        x = given[spec.names[stream]]
        results.append(norm_and_modulate(call, self, norm, x, scale, shift, spec.upcasts))
    return results[0] if len(results) == 1 else tuple(results)


def _embedded(self: Any, given: dict[str, Any]) -> Tensor:
    """All rows of a modulation, concatenated: (B, N * D), with Cosmos also (B, S, N * D)."""
    modules = self._modules
    if "embedded_timestep" in given:  # Cosmos
        activated = modules["activation"](given["embedded_timestep"])
        rows = linear(modules["linear_2"], linear(modules["linear_1"], activated))
        temb = given.get("temb")
        return rows if temb is None else rows + temb[..., : rows.shape[-1]]
    if "conditioning_embedding" in given:  # AdaLayerNormContinuous
        activated = modules["silu"](given["conditioning_embedding"])
        return linear(modules["linear"], activated.to(given["x"].dtype))
    emb: Any = given["temb"] if "temb" in given else given.get("emb")
    if modules.get("emb") is not None:  # AdaLayerNormZero
        labels = given.get("timestep"), given.get("class_labels")
        emb = modules["emb"](*labels, hidden_dtype=given.get("hidden_dtype"))
    return linear(modules["linear"], modules["silu"](emb) if "silu" in modules else emb)


def norm_and_modulate(
    call: Call, owner: Any, name: str, x: Any, scale: Any, shift: Any, upcasts: Upcasts
) -> Any:
    """``owner.name(x) * (1 + scale) + shift``, on the kernels or as the class computes it."""
    norm = read_norm(owner._modules.get(name), x.shape[-1], upcasts)
    out: Any = "the kernels do not support its modulation's shape"
    if isinstance(norm, str):
        out = f"{name} {norm}"
    elif (
        scale.dim() == x.dim() == 3
        and scale.shape[2] == x.shape[2]
        and scale.shape[0] in (1, x.shape[0])
        and scale.shape[1] in (1, x.shape[1])
    ):
        out = compute_norm(norm, x, upcasts, scale, shift)
    if isinstance(out, Tensor):
        return out
    call.fall_back(out)
    if upcasts is Upcasts.TO_NEXT_LINEAR:
        scale, shift = scale.float(), None if shift is None else shift.float()
    return norm_modulate(None, owner, name, x, (scale, shift), upcasts)[0]


_TRANSFORMER = "diffusers.models.transformers.transformer_"
_CONDITIONED = "self x conditioning_embedding"
_LABELED = "self x timestep class_labels hidden_dtype emb"
_TWO_STREAMS = "self hidden_states encoder_hidden_states temb"
_TIMESTEP = "self hidden_states embedded_timestep temb"
_EMBEDDED = "self hidden_states emb"
# Modulated norms, as in ``AdaptiveNormSpec.results``.
_ZERO = (0, "norm", 1, 0)
_CONTINUOUS = (0, "norm", 0, 1)
_SCALED = (0, "norm", 0, None)
_SHARED_NORM = (_ZERO, (1, "norm", 4, 3), 2, 5)
_TWO_NORMS = ((0, "norm_x", 1, 0), 2, 3, 4, 5, (1, "norm_c", 7, 6), 8, 9, 10, 11)
_INTERLEAVED = ((0, "norm", 2, 0), 4, 6, 8, 10, (1, "norm_context", 3, 1), 5, 7, 9, 11)
_TOKENS, _UPCASTS = (True,), (False, Upcasts.TO_NEXT_LINEAR)
# Norms that only end a model are omitted: one call per forward is no gain. The first two end models.
_CLASSES: tuple[tuple, ...] = (
    (f"{_NORM}AdaLayerNormContinuous", _CONDITIONED, 2, (_CONTINUOUS,), *_TOKENS),
    (f"{_TRANSFORMER}cosmos:CosmosAdaLayerNorm", _TIMESTEP, 2, (_ZERO,), *_TOKENS),
    (f"{_NORM}AdaLayerNormZero", _LABELED, 6, (_ZERO, 2, 3, 4, 5)),
    (f"{_NORM}AdaLayerNormZeroSingle", "self x emb", 3, (_ZERO, 2)),
    (f"{_NORM}LuminaRMSNormZero", "self x emb", 4, (_SCALED, 1, 2, 3)),
    (f"{_NORM}CogVideoXLayerNormZero", _TWO_STREAMS, 6, _SHARED_NORM, *_TOKENS),
    (f"{_NORM}CogView3PlusAdaLayerNormZeroTextImage", "self x context emb", 12, _TWO_NORMS),
    (f"{_TRANSFORMER}cogview4:CogView4AdaLayerNormZero", _TWO_STREAMS, 12, _INTERLEAVED),
    (f"{_TRANSFORMER}glm_image:GlmImageAdaLayerNormZero", _TWO_STREAMS, 12, _INTERLEAVED),
    (f"{_TRANSFORMER}easyanimate:EasyAnimateLayerNormZero", _TWO_STREAMS, 6, _SHARED_NORM),
    (f"{_TRANSFORMER}mochi:MochiRMSNormZero", _EMBEDDED, 4, (_SCALED, 1, 2, 3), *_UPCASTS),
)
_ONE_PASS = "norm and modulation in one pass"
ADAPTIVE_NORMS = tuple(
    AdaptiveNormSpec(path, _adaptive_forward, _ONE_PASS, (), True, parameters, None, *arguments)
    for path, parameters, *arguments in _CLASSES
)
# The norms before the output of families' models, by their name: of many, and of Cosmos.
OUTPUT_NORM, COSMOS_OUTPUT_NORM = (
    {"norm_out": replace(spec, left_to_compiler=False)} for spec in ADAPTIVE_NORMS[:2]
)

"""Autoencoders: each norm and the SiLU after it are one pass.

A resnet, and the end of an encoder or decoder, computes ``silu(norm(x))``. The norm is a group norm, or an
RMS norm over the channels of each pixel. With LTX-Video a scale and a shift of the time step may follow it.

The class's own code runs with a proxy of the module as ``self``: the proxy's norms compute the SiLU, too, and
its activation returns such a result as it is. So padding, the cache of frames, noise and dropout stay the
class's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...operations.conditions import an
from ..core.checks import KnownClass, class_name, is_stock, why_not_stock
from ..core.patch import Call, ExactSpec, Injection, Proxy
from ..parts.linears import why_not_silu
from ..parts.norm_modules import GROUP_NORM, apply_channel_norm, apply_group_norm
from ..parts.norms import read_norm, scale_and_shift

_FILES = "diffusers.models.autoencoders."
WAN, QWEN = f"{_FILES}autoencoder_kl_wan:Wan", f"{_FILES}autoencoder_kl_qwenimage:QwenImage"
QWEN21 = f"{_FILES}autoencoder_kl_qwenimage21:QwenImage21"
LTX = f"{_FILES}autoencoder_kl_ltx:LTXVideo"
_LTX2_FILE = f"{_FILES}autoencoder_kl_ltx2:"
LTX2 = f"{_LTX2_FILE}LTX2Video"
HUNYUAN = f"{_FILES}autoencoder_kl_hunyuan_video:HunyuanVideo"
HUNYUAN15 = f"{_FILES}autoencoder_kl_hunyuanvideo15:HunyuanVideo15"
REFINER = f"{_FILES}autoencoder_kl_hunyuanimage_refiner:HunyuanImageRefiner"
COGVIDEOX = f"{_FILES}autoencoder_kl_cogvideox:CogVideoX"
COSMOS = f"{_FILES}autoencoder_kl_cosmos:Cosmos"
_PARTS = ("Encoder", "Decoder")

# The result of a norm; the reason why the kernels cannot compute it; or None if a derivative is requested.
_Result = Any
# Scale and shift, broadcast against the norm's argument, or nothing.
_Rows = tuple[Tensor, ...]


# --------------------------------------------------------------------------------------------------
# Norms


def _group_norm(module: Any, x: Tensor, activation: str, *rows: Tensor) -> _Result:
    return (
        "it is modulated" if rows else apply_group_norm(module, x, None, activation, is_inside=True)
    )


def _unit_norm(module: Any, x: Tensor, activation: str, *rows: Tensor) -> _Result:
    """``x / ||x|| * sqrt(C)``: an RMS norm."""
    channels, gamma, bias = x.shape[1], module._parameters.get("gamma"), module.bias
    if module.channel_first is not True or gamma is None or module.scale != channels**0.5:
        return "its channels are not the second dimension, or its gamma or scale was replaced"
    if gamma.shape != (channels, *[1] * (x.dim() - 2)):
        return f"its gamma is {tuple(gamma.shape)}, and it was given {tuple(x.shape)}"
    weight, bias = gamma.flatten(), bias.flatten() if isinstance(bias, Tensor) else None
    # The class's norm of x is at least 1e-12.
    return apply_channel_norm(x, weight, bias, 1e-24 / channels, activation, *rows)


def _image_norm(module: Any, x: Tensor, activation: str, *rows: Tensor) -> _Result:
    """``_unit_norm`` before a convolution of images without frames, in the memory format of these."""
    x = x.squeeze(2).unsqueeze(2) if x.shape[2:-2] == (1,) else x
    return _unit_norm(module, x, activation, *rows)


def _per_channel_norm(module: Any, x: Tensor, activation: str, *rows: Tensor) -> _Result:
    if module.channel_dim != 1:
        return "its channels are not the second dimension"
    return apply_channel_norm(x, None, None, module.eps, activation, *rows)


def _last_norm(module: Any, x: Tensor, activation: str, *rows: Tensor) -> _Result:
    """diffusers' RMSNorm of x with its channels moved to the end."""
    norm = read_norm(module, x.shape[-1], is_called=True)
    if isinstance(norm, str):
        return f"it {norm}"
    _, (weight,), eps = norm
    first, *moved = (tensor.movedim(-1, 1) for tensor in (x, *rows))
    out = apply_channel_norm(first, weight, None, eps, activation, *moved)
    return out.movedim(1, -1) if isinstance(out, Tensor) else out


class _Kind(NamedTuple):
    """A class of norms. ``compute(module, x, activation, *rows)`` is the result, modulated by any rows."""

    known: KnownClass
    compute: Callable[..., _Result]
    operation: str


def _kind_of(module: Any) -> _Kind | str:
    """The kind of a norm, or why the kernels cannot replace it, as a clause."""
    kind = _class_of(module)
    if kind is None:
        return f"is {an(class_name(module))}"
    return kind if is_stock(module, kind.known) else why_not_stock(module, kind.known)


def _class_of(module: Any) -> _Kind | None:
    return next((kind for kind in _KINDS if type(module) is kind.known.cls), None)


def _norm_forward(self: Any, call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return NotImplemented
    kind = _class_of(self)
    if kind is None:  # parametrized, for example
        return call.decline(f"it is {an(type(self).__name__)} now")
    out = kind.compute(self, x, "none")
    return out if isinstance(out, Tensor) else call.decline(out)


# --------------------------------------------------------------------------------------------------
# Norm and activation


@dataclass(frozen=True, eq=False)
class NormActivationSpec(ExactSpec):
    """A class whose forward passes the results of its norms to its activation, which is SiLU.

    Attributes:
        norms: their names.
        activation: its name.
        channels: the dimension of the channels in the norms' arguments.
        ends: whether it is an encoder or decoder, whose result has PyTorch's memory format.
    """

    norms: tuple[str, ...] = ("norm1", "norm2")
    activation: str = "nonlinearity"
    channels: int = 1
    ends: bool = False

    def notes(self, module: nn.Module, injection: Injection) -> list[str]:
        kinds = ((name, _kind_of(module._modules.get(name))) for name in self.norms)
        return [f"{name} {kind}" for name, kind in kinds if isinstance(kind, str)]

    def describe(self, module: nn.Module, injection: Injection) -> str:
        kinds = (_kind_of(module._modules.get(name)) for name in self.norms)
        operations = dict.fromkeys(kind.operation for kind in kinds if isinstance(kind, _Kind))
        return ", ".join(operations) + " with SiLU" if operations else self.operations


def _run_fused(
    module: Any,
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows_of: Callable[[str, Tensor], _Rows] | None = None,
    **without: None,
) -> Any:
    """The class's own forward, whose norms compute the activation, too.

    ``rows_of(name, x)`` are the scale and shift (B, C, 1, 1, 1) of the norm ``name`` of x, if the norms also
    compute the modulation. ``without`` are the module's attributes by which the class would compute it.
    """
    spec: Any = call.stand_in.spec
    modules = module._modules
    own_activation = modules[spec.activation]
    fused: list[Tensor] = []  # the last norm's result, up to its activation

    def norm(name: str, x: Tensor, *more: Any, **others: Any) -> Any:
        own, kind = modules[name], _kind_of(modules[name])
        rows: _Rows = () if rows_of is None else rows_of(name, x)
        rows = tuple([row.movedim(1, spec.channels) for row in rows])
        out: _Result = f"{name} {kind}"
        if isinstance(kind, _Kind) and not (more or others):
            out = kind.compute(own, x, "silu", *rows)
        if isinstance(out, Tensor):
            fused.append(out)
            return out
        call.fall_back(out)
        out = own(x, *more, **others)
        return scale_and_shift(out, *rows) if rows else out

    def activation(x: Tensor) -> Tensor:
        out = fused.pop() if fused else None
        # The class may permute the result.
        is_done = out is not None and x.data_ptr() == out.data_ptr() and x.numel() == out.numel()
        return x if is_done else own_activation(x)

    proxy: Any = Proxy(module)
    proxy.__dict__.update(without)
    for name in spec.norms:
        setattr(proxy, name, partial(norm, name))
    setattr(proxy, spec.activation, activation)
    out = call.stand_in.own_forward(proxy, *args, **kwargs)
    return _in_format_of_pytorch(module, args, out) if spec.ends else out


def _in_format_of_pytorch(module: Any, args: tuple[Any, ...], out: Any) -> Any:
    """An encoder's or decoder's result, contiguous unless its input or its weights have channels last.

    Convolutions on the kernel give channels last. The result may be in a tuple, with a cache.
    """
    if isinstance(out, tuple):
        return (_in_format_of_pytorch(module, args, out[0]), *out[1:])
    weights = (p for p in module._modules["conv_out"].parameters() if p.dim() > 3)
    has_last = any(_has_channels_last(each) for each in (*args[:1], *weights))
    return out if has_last or not _has_channels_last(out) else out.contiguous()


def _has_channels_last(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 3 and x.shape[1] > 1 and x.stride(1) == 1


def _forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    return _run_fused(self, call, args, kwargs)


def _ltx_forward(
    self: Any, call: Call, inputs: Tensor, temb: Any = None, *args: Any, **kwargs: Any
) -> Any:
    given, table = (inputs, temb, *args), self.scale_shift_table
    if table is None or temb is None:
        return _run_fused(self, call, given, kwargs)
    shift_1, scale_1, shift_2, scale_2 = _embedded(temb, table).unbind(1)
    rows = {"norm1": (scale_1, shift_1), "norm2": (scale_2, shift_2)}
    return _run_fused(self, call, given, kwargs, lambda name, _: rows[name], scale_shift_table=None)


def _ltx_decoder_forward(
    self: Any, call: Call, hidden_states: Tensor, temb: Any = None, *args: Any, **kwargs: Any
) -> Any:
    given, embedder = (hidden_states, temb, *args), self.time_embedder
    if embedder is None or temb is None:
        return _run_fused(self, call, given, kwargs)

    def rows(_: str, x: Tensor) -> _Rows:
        multiplied = (temb * self.timestep_scale_multiplier).flatten()
        options = {"batch_size": x.shape[0], "hidden_dtype": x.dtype}
        made = embedder(timestep=multiplied, resolution=None, aspect_ratio=None, **options)
        made = made.view(x.shape[0], -1, 1, 1, 1)
        shift, scale = _embedded(made, self.scale_shift_table).unbind(1)
        return scale, shift

    return _run_fused(self, call, given, kwargs, rows, time_embedder=None)


def _embedded(temb: Tensor, table: Tensor) -> Tensor:
    """The rows of a table plus those of an embedding of the time step: (B, N, C, 1, 1, 1)."""
    return temb.unflatten(1, (table.shape[0], -1)) + table[None, ..., None, None, None]


# --------------------------------------------------------------------------------------------------
# Tables


def _spec(
    path: str, parameters: str, activation: str = "nonlinearity", **others: Any
) -> NormActivationSpec:
    options = {
        "forward": _forward,
        "parameters": f"self {parameters}",
        "condition": lambda module: why_not_silu(module._modules.get(activation)),
        "activation": activation,
        **others,
    }
    return NormActivationSpec(path, operations="SiLU", left_to_compiler=True, **options)


_CACHED, _STATES = "x feat_cache feat_idx", "hidden_states"
_TIMED = f"{_STATES} temb"
_RESNETS = (
    *(_spec(f"{name}ResidualBlock", _CACHED) for name in (WAN, QWEN, QWEN21)),
    _spec(f"{HUNYUAN}ResnetBlockCausal3D", _STATES),
    *(_spec(f"{name}ResnetBlock", _STATES) for name in (HUNYUAN15, REFINER)),
    _spec(f"{COGVIDEOX}ResnetBlock3D", "inputs temb zq conv_cache"),
    _spec(f"{LTX}ResnetBlock3d", "inputs temb generator", forward=_ltx_forward, channels=-1),
    _spec(f"{LTX2}ResnetBlock3d", "inputs temb generator causal", forward=_ltx_forward),
)
_end = partial(_spec, activation="conv_act", norms=("norm_out",), ends=True)
_group_norm_end = partial(_end, norms=("conv_norm_out",))
_unit_norm_end = partial(_end, activation="nonlinearity")
_FUSED_ENDS = (
    _group_norm_end(f"{_FILES}vae:Encoder", "sample"),
    _group_norm_end(f"{_FILES}vae:Decoder", "sample latent_embeds"),
    *(_group_norm_end(f"{HUNYUAN}{part}3D", _STATES) for part in _PARTS),
    *(_unit_norm_end(f"{name}Encoder3d", _CACHED) for name in (WAN, QWEN, QWEN21)),
    *(_unit_norm_end(f"{name}Decoder3d", f"{_CACHED} first_chunk") for name in (WAN, QWEN21)),
    _unit_norm_end(f"{QWEN}Decoder3d", _CACHED),
    *(_end(f"{name}{part}3D", _STATES) for name in (HUNYUAN15, REFINER) for part in _PARTS),
    _end(f"{LTX}Encoder3d", _STATES, channels=-1),
    _end(f"{LTX}Decoder3d", _TIMED, forward=_ltx_decoder_forward, channels=-1),
    _end(f"{LTX2}Encoder3d", f"{_STATES} causal"),
    _end(f"{LTX2}Decoder3d", f"{_TIMED} causal", forward=_ltx_decoder_forward),
    _end(f"{COGVIDEOX}Encoder3D", "sample temb conv_cache"),
)
_CHANNEL, _NORMALIZE = "channel_rms_norm", ("torch.nn.functional:normalize",)
_UNIT_NORMS = tuple(
    ExactSpec(f"{name}RMS_norm", _norm_forward, _CHANNEL, _NORMALIZE, True, "self x")
    for name in (WAN, QWEN, QWEN21, HUNYUAN15, REFINER)
)
_PER_CHANNEL_NORM = ExactSpec(
    f"{_LTX2_FILE}PerChannelRMSNorm", _norm_forward, _CHANNEL, (), True, "self x channel_dim"
)
_KINDS = (
    _Kind(GROUP_NORM.known, _group_norm, "group_norm"),
    *(
        _Kind(spec.known, _image_norm if QWEN21 in spec.path else _unit_norm, _CHANNEL)
        for spec in _UNIT_NORMS
    ),
    _Kind(_PER_CHANNEL_NORM.known, _per_channel_norm, _CHANNEL),
    _Kind(KnownClass("diffusers.models.normalization:RMSNorm"), _last_norm, _CHANNEL),
)


def _format_forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    return _in_format_of_pytorch(self, args, call.stand_in.own_forward(self, *args, **kwargs))


# Their norms have no SiLU of their own, or depend on the latents.
_OTHER_ENDS = tuple(
    ExactSpec(path, _format_forward, "channels last inside", (), True, parameters)
    for path, parameters in (
        (f"{COGVIDEOX}Decoder3D", "self sample temb conv_cache"),
        *((f"{COSMOS}{part}3d", f"self {_STATES}") for part in _PARTS),
    )
)
ENDS = (*_FUSED_ENDS, *_OTHER_ENDS)
DECODERS = (*_RESNETS, *ENDS, *_UNIT_NORMS, _PER_CHANNEL_NORM)

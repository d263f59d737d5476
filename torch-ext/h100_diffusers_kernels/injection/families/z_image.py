"""Z-Image and its ControlNet: how their transformers map to the operations.

A block normalizes the input and the output of attention and feed-forward,

    x = x + tanh(gate) * rms_norm(attention(rms_norm(x) * (1 + scale)))
    x = x + tanh(gate_mlp) * rms_norm(ff(rms_norm(x) * (1 + scale_mlp)))

with an RMS norm of each head's query and key, a rotary embedding of both, and ff = w2(silu(w1(x)) * w3(x)).
Blocks of the text have no modulation. With reference images, each token has the modulation of noise or of a
clean image.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownFunction
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import streams
from ..parts.blocks import add_between_norms
from ..parts.linears import QUERY_KEY_VALUE, fp8_readers, gated_feed_forward, linear
from ..quantized.precision import Layers

_MODEL = "diffusers.models.transformers.transformer_z_image"
_CONTROLNET = "diffusers.models.controlnets.controlnet_z_image"
_CLASS = f"{_MODEL}:ZImageTransformer2DModel"
_MASK_MAKERS = tuple(
    KnownFunction(f"{_CLASS}.{name}") for name in ("_prepare_sequence", "_build_unified_sequence")
)
_READERS = partial(fp8_readers, "attention", QUERY_KEY_VALUE)
_NORMS = ("attention_norm2", "ffn_norm1", "ffn_norm2")
_FF_READERS = partial(fp8_readers, "feed_forward", ("w1", "w3"))


def _first_norm(
    call: Call, block, previous_x, embedding, noise_mask=None, of_noise=None, of_clean=None
) -> Any:
    """Rows are None, scale and gate of attention, then of the feed-forward, or no rows."""
    options: Any = {"name": "attention_norm1", "readers": _READERS}
    if not block.modulation:
        return streams.plain_norm(call, block, previous_x, **options)
    layer = block._modules["adaLN_modulation"]
    if previous_x is not None and not streams.may_run_ahead(layer, previous_x):
        return None

    def rows_of() -> streams.Rows:
        if noise_mask is None:
            rows = streams.linear_alone(layer, embedding).unsqueeze(1)
        else:
            noise, clean = (streams.linear_alone(layer, x) for x in (of_noise, of_clean))
            is_noise = (noise_mask == 1).unsqueeze(-1)
            rows = torch.where(is_noise, noise.unsqueeze(1), clean.unsqueeze(1))
        return (None, *rows.chunk(4, dim=2))

    return streams.plain_norm(call, block, previous_x, rows_of=rows_of, **options)


def _run(
    self: Any, call: Call, x: Tensor, mask: Any, freqs_cis: Any, *conditions: Any, hands_over=True
) -> Tensor:
    """A block's result."""
    modules = self._modules
    (s,) = streams.start(call, self, (_first_norm,), (x,), conditions)
    if mask is not None is not call.state and _makes_masks(call.stand_in.injection.model()):
        call.state.block_mask = mask
    out = modules["attention"](s.n, attention_mask=mask, freqs_cis=freqs_cis)
    add_between_norms(s, out, _NORMS, modules["feed_forward"], _FF_READERS)
    return streams.end(s, hands_over=hands_over)


def _makes_masks(model: Any) -> bool:
    """Whether the model's own code makes its masks, with valid tokens first: users replace its methods."""
    methods = [(known, getattr(model, known.name, None)) for known in _MASK_MAKERS]
    return all(m is None or getattr(m, "__func__", None) is known.function for known, m in methods)


def _block_forward(
    self: Any,
    call: Call,
    x: Tensor,
    attn_mask: Tensor | None,
    freqs_cis: Tensor,
    adaln_input: Tensor | None = None,
    noise_mask: Tensor | None = None,
    adaln_noisy: Tensor | None = None,
    adaln_clean: Tensor | None = None,
) -> Tensor:
    if not call.takes(x, adaln_input, adaln_noisy, adaln_clean):
        return NotImplemented
    conditions = (adaln_input, noise_mask, adaln_noisy, adaln_clean)
    return _run(self, call, x, attn_mask, freqs_cis, *conditions)


def _control_block_forward(
    self: Any, call: Call, c, x, attn_mask, freqs_cis, adaln_input=None
) -> Tensor:
    if not call.takes(c, x, adaln_input):
        return NotImplemented
    modules = self._modules
    *results, c = c.unbind() if self.block_id else (linear(modules["before_proj"], c) + x,)
    c = _run(self, call, c, attn_mask, freqs_cis, adaln_input, hands_over=False)
    return torch.stack([*results, linear(modules["after_proj"], c), c])


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Tensor:
    x, mask, freqs_cis = hidden_states, attention_mask, kwargs.pop("freqs_cis", None)
    if kwargs or encoder_hidden_states is not None:
        return NotImplemented
    options: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False}
    if mask is not None:
        if mask.dim() == 2:
            mask = call.shared("mask", mask, lambda m: m[:, None, None])
        options.update(attention.key_lengths_of(call, attention_mask, mask, *x.shape[:2]))
    tables = None if freqs_cis is None else call.shared("tables", freqs_cis, rope_tables)
    return attention.run_attention(call, self, x, None, tables, rotated, mask, options)


def rope_tables(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Complex tables (B, S, d / 2) as cosines and sines, each (B, S, 1, d / 2)."""
    return freqs.real.unsqueeze(2).contiguous(), freqs.imag.unsqueeze(2).contiguous()


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, S, H, d) as the processor rotates it."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(*tables)).flatten(3).type_as(x)


def feed_forward_spec(module: str) -> PatchSpec:
    return PatchSpec(
        f"{module}:FeedForward",
        partial(gated_feed_forward, gate="w1", value="w3", out="w2"),
        "swiglu",
        functions=(f"{module}:FeedForward._forward_silu_gating", "torch.nn.functional:silu"),
    )


def _of(module: str) -> tuple[PatchSpec, ...]:
    """The specs of a file with these classes."""
    return (
        streams.BlockSpec(f"{module}:ZImageTransformerBlock", _block_forward),
        streams.BlockSpec(f"{module}:ZImageControlTransformerBlock", _control_block_forward),
        attention.AttentionSpec(
            "diffusers.models.attention_processor:Attention",
            _attention_forward,
            "qk_norm_rope",
            processor=f"{module}:ZSingleStreamAttnProcessor",
            parameters="self hidden_states encoder_hidden_states attention_mask"
            " cross_attention_kwargs",
            processor_parameters="hidden_states encoder_hidden_states attention_mask freqs_cis",
            rotate="",
        ),
        feed_forward_spec(module),
    )


def _plan(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    output = gather(gather_dim=1, expected_dims=3)
    plan: dict[str, Any] = {}
    for name in ("noise_refiner", "context_refiner", "layers"):
        count = len(getattr(model, name, None) or ())
        if count == 0:
            continue
        # Every layer gets the mask and the tables of all tokens.
        first = plan[f"{name}.*"] = {"attn_mask": split(1, 2), "freqs_cis": split(1, 3)}
        if count > 1:
            first = plan[f"{name}.0"] = {}
        first["x"] = split(1, 3)
        if name != "layers":
            plan[f"{name}.{count - 1}"] = output
    for size in model.all_final_layer:
        plan[f"all_final_layer.{size}"] = output
    return plan


_REFINERS = ("noise_refiner", "context_refiner", "siglip_refiner")
_CONTROL_LISTS = ("control_layers", "control_noise_refiner")
_SPECS = (
    model_spec(_CLASS, *_REFINERS, "layers", plan=_plan),
    model_spec(f"{_CONTROLNET}:ZImageControlNetModel", *_REFINERS, *_CONTROL_LISTS),
    *_of(_MODEL),
    *_of(_CONTROLNET),
)
_EMBEDDERS = ("all_x_embedder", "control_all_x_embedder", "cap_embedder", "t_embedder")
_ONCE = (*_EMBEDDERS, "all_final_layer")
# With modulations and embedders in FP8, too, images were reported to be noise.
_LAYERS = Layers(
    ("layers", "control_layers"),
    ("attention.to_[qkv]", "attention.to_out.0", "feed_forward.w[123]"),
    fast_blocks=("noise_refiner", "control_noise_refiner"),
)
FAMILIES = (Family("Z-Image", _SPECS, _ONCE, _LAYERS),)

"""Cosmos: how the transformers of Predict1, Predict2 and Transfer2.5, and a ControlNet, map to operations.

A block has three branches,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * attn1(n)
    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * attn2(n, text)
    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * ff(n)

with an RMS norm of each head's query and key, and a rotary embedding of both in attn1. Each norm has its own
modulation, linear_2(linear_1(silu(t))) plus rows that all norms share; t has a row for each sample or token.
Predict1 adds position embeddings before each block, Transfer2.5 a ControlNet's results after some. attn2 of
Transfer2.5 also attends to an image, with linear layers and norms of its own, and adds both results.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..conditions import kernels_take
from .attention import (
    AttentionSpec,
    attend,
    key_bias_of,
    norm_and_rotate,
    project_out,
    query_key_value,
)
from .blocks import (
    BlockSpec,
    Prologue,
    ResidualBranch,
    finish,
    linear_of_silu,
    may_run_ahead,
    take_over,
)
from .checks import KnownClass, is_plain, why_not_plain
from .embeddings import COSMOS_POSITIONS, TIMESTEPS
from .forward_state import COMPUTED_ONCE, Family, model_spec
from .linears import LINEAR_GELU, SILU, feed_forward, linear, linears, plain_weight
from .norm_modules import COSMOS_OUTPUT_NORM
from .norms import gated_residual, read_norm
from .patch import Call, Injection

_COSMOS = "diffusers.models.transformers.transformer_cosmos"
_CONTROLNET = "diffusers.models.controlnets.controlnet_cosmos"
_ADAPTIVE = KnownClass(f"{_COSMOS}:CosmosAdaLayerNormZero")


def _read_adaptive(module: Any) -> Any:
    """The norm of an adaptive norm, or why the kernels cannot replace the module, as a clause."""
    if not is_plain(module, _ADAPTIVE):
        return why_not_plain(module, _ADAPTIVE)
    if not is_plain(module._modules.get("activation"), SILU):
        return "has an activation other than SiLU"
    norm = read_norm(module._modules.get("norm"))
    return f"has a norm that {norm}" if isinstance(norm, str) else norm


def _prologue(
    call: Call, block: Any, ahead: Tensor | None, t: Tensor, shared: Tensor | None, name: str
) -> Any:
    """The prologue with the adaptive norm ``block.name``; ``ahead`` as in ``PrologueMakers``. Rows are shift,
    scale and gate."""
    module = block._modules[name]
    norm = _read_adaptive(module)
    if isinstance(norm, str):
        if ahead is not None:
            return None
        call.fall_back(f"{name} {norm}")
        if call.state is not None:
            call.state.shared.clear()  # the module may write to what it was made from

        def run_module(x: Tensor) -> Any:
            normalized, gate = module(x, t, shared)
            return (normalized,), (None, None, gate)

        return run_module
    layer = module._modules["linear_2"]
    hidden = linear_of_silu(call, module._modules["linear_1"], t, ahead)
    if hidden is None or (ahead is not None and not may_run_ahead(layer, ahead)):
        return None
    modulation = _linear_plus(layer, hidden, shared)
    by_token = modulation.unsqueeze(1) if modulation.dim() == 2 else modulation
    rows = by_token.chunk(3, dim=-1)
    return Prologue(norm, module, "norm", (rows[1], rows[0]), rows)


def _linear_plus(layer: Any, x: Tensor, shared: Tensor | None) -> Tensor:
    """``layer(x) + shared``, in one launch if all samples share a row (1, D)."""
    plain = plain_weight(layer)
    if (
        plain is not None
        and plain[1] is None
        and shared is not None
        and (shared.dim(), shared.shape[0], shared.dtype) == (2, 1, x.dtype)
    ):
        return F.linear(x, plain[0], shared[0])
    out = linear(layer, x)
    return out if shared is None else out + shared


def _after(call: Call, made: Any, *branch: Any) -> Any:
    """``h = residual + gate * x`` of the branch, and the prologue's result for it."""
    if isinstance(made, Prologue):
        return made.after(ResidualBranch(*branch), call)
    h = gated_residual(*branch)
    return h, made(h)


_FIRST = (partial(_prologue, name="norm1"),)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Any,
    embedded_timestep: Tensor,
    temb: Tensor | None = None,
    image_rotary_emb: Any = None,
    extra_pos_emb: Tensor | None = None,
    attention_mask: Any = None,
    controlnet_residual: Tensor | None = None,
    latents: Any = None,
    block_idx: int | None = None,
) -> Any:
    x, conditions, modules = hidden_states.contiguous(), (embedded_timestep, temb), self._modules
    if not kernels_take(x, *conditions, extra_pos_emb, controlnet_residual):
        return call.refuse(x, *conditions, extra_pos_emb, controlnet_residual)
    if self.before_proj is not None:
        x = linear(self.before_proj, x) + latents
    handed = take_over(call, self, (x, *conditions))
    if handed is not None:
        (begun,) = handed
    elif extra_pos_emb is None:
        begun = _FIRST[0](call, self, None, *conditions)(x)
    else:
        x, begun = _after(call, _FIRST[0](call, self, None, *conditions), x, extra_pos_emb, None)
    (n,), (_, _, gate) = begun
    out = modules["attn1"](n, image_rotary_emb=image_rotary_emb)
    made = _prologue(call, self, None, *conditions, name="norm2")
    x, ((n,), (_, _, next_gate)) = _after(call, made, x, out, gate)
    more = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask}
    out = modules["attn2"](n, **more)
    made = _prologue(call, self, None, *conditions, name="norm3")
    x, ((n,), (_, _, gate)) = _after(call, made, x, out, next_gate)
    out = feed_forward(modules["ff"], n)
    if controlnet_residual is not None:
        x, out, gate = gated_residual(x, out, gate), controlnet_residual, None
    branches, hands_over = (ResidualBranch(x, out, gate),), extra_pos_emb is None
    (x,) = finish(call, self, _FIRST, branches, conditions, hands_over=hands_over)
    return x if self.after_proj is None else (x, linear(self.after_proj, x))


class _BlockSpec(BlockSpec):
    def notes(self, module: nn.Module, injection: Injection) -> list[str]:
        found = [(name, _read_adaptive(module._modules.get(name))) for name in self.adaptive_norms]
        return [f"{name} {reason}" for name, reason in found if isinstance(reason, str)]


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
    **kwargs: Any,
) -> Tensor:
    x, c, mask, modules = hidden_states, encoder_hidden_states, attention_mask, self._modules
    image = image_mask = None
    takes_image = "q_img" in modules
    if kwargs or isinstance(c, tuple) != takes_image:
        return NotImplemented
    if takes_image:
        if isinstance(mask, Tensor):
            return NotImplemented  # its processor raises
        (c, image), (mask, image_mask) = c, mask or (None, None)
    if not kernels_take(x, c, image):
        return call.refuse(x, c, image)
    query, key, value = query_key_value(self, x, c)
    norms = ("norm_q", "norm_k")
    out = _attend(self, call, norms, query, key, value, mask, image_rotary_emb)
    if image is not None:
        query = linear(modules["q_img"], x)
        key, value = linears(image, modules["k_img"], modules["v_img"])
        norms = ("q_img_norm", "k_img_norm")
        image_out = _attend(self, call, norms, query, key, value, image_mask, None)
        out = gated_residual(out, image_out, None)
    return project_out(self, out)


def _attend(
    module: Any, call: Call, norms: Any, query: Any, key: Any, value: Any, mask: Any, rope: Any
):
    """Attention of normalized and rotated query and key, (B, S, H * d)."""
    heads, rotation = module.heads, call.stand_in.functions[1].function
    rotate = partial(rotation, use_real_unbind_dim=-2, sequence_dim=1)
    how = (rope, rotate, "per_head", heads, "half")
    query, key = norm_and_rotate(call, module, norms, query, key, *how)
    options: dict[str, Any] = {"heads": heads, "dropout_p": 0.0, "is_causal": False}
    if mask is not None:
        name = f"key bias {key.shape} {key.dtype}"
        options["key_bias"] = call.shared(name, mask, partial(key_bias_of, key=key))
    return attend(call, module, query, key, value, mask, **options)


def _attention(path: str, processor: str) -> AttentionSpec:
    return AttentionSpec(
        path,
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_COSMOS}:{processor}",
        parameters="self hidden_states encoder_hidden_states attention_mask cross_attention_kwargs",
        processor_parameters="hidden_states encoder_hidden_states attention_mask image_rotary_emb",
        rotate="diffusers.models.embeddings:apply_rotary_emb",
    )


_SPECS = (
    model_spec(f"{_COSMOS}:CosmosTransformer3DModel", "transformer_blocks"),
    model_spec(f"{_CONTROLNET}:CosmosControlNetModel", "control_blocks"),
    _BlockSpec(
        f"{_COSMOS}:CosmosTransformerBlock",
        _block_forward,
        "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual",
        adaptive_norms=("norm1", "norm2", "norm3"),
        inner=("attn1", "attn2", "ff.net.0"),
    ),
    _attention(f"{_COSMOS}:CosmosAttention", "CosmosAttnProcessor2_5"),
    _attention("diffusers.models.attention_processor:Attention", "CosmosAttnProcessor2_0"),
    COSMOS_POSITIONS,
    TIMESTEPS,
    LINEAR_GELU,
)
_ONCE = (
    *("patch_embed", "patch_embed_base", "learnable_pos_embed", "time_embed", "crossattn_proj"),
    *("img_context_proj", "proj_out"),
)
FAMILIES = (Family("Cosmos", _SPECS, dict.fromkeys(_ONCE, COMPUTED_ONCE), COSMOS_OUTPUT_NORM),)

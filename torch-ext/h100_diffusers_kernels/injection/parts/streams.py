"""Transformer blocks: each stream of tokens starts with a prologue and ends with a residual branch.

The prologue is a norm and its modulation. The modulation is a table plus a time embedding, or a linear layer
of the embedding; diffusers' adaptive layer norms contain layer and norm. The residual sum at the end of a
stream and the prologue of the same stream in the next block are one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from ...conditions import an
from ..attention.modules import (
    concat_streams,
    concat_view,
    image_weights,
    single_block_weights,
    text_weights,
)
from ..core.checks import (
    KnownClass,
    class_name,
    has_hooks,
    has_own_forward,
    is_plain,
    why_not_plain,
)
from ..core.patch import Call, Injection, PatchSpec, bare_stand_in
from ..quantized.fp8_linears import are_fp8
from .linears import (
    SILU,
    feed_forward_branch,
    feed_forward_weights,
    linear,
    plain_weight,
)
from .norms import (
    Modulator,
    Norm,
    Upcasts,
    clip_to_float16,
    gated_residual,
    modulated,
    norm_modulate,
    norm_notes,
    read_norm,
    residual_norm,
)

Rows = Sequence[Any]
WeightsFor = Callable[[Any, Tensor], Any]
# The results of a prologue's norm, one for each modulation, which may be ``QuantizedRows``; and the rows of
# the modulation.
PrologueResult = tuple[tuple[Any, ...], Rows]


class ResidualBranch(NamedTuple):
    """The end of a stream, ``norms.gated_residual`` of these arguments, which is the block's result."""

    residual: Tensor
    x: Any
    gate: Modulator = None
    x_norm: tuple[Any, str] | None = None
    tanh_gate: bool = False
    addend: Tensor | None = None

    def parts(self) -> dict[str, Any]:
        _, _, _, x_norm, tanh_gate, addend = self
        if x_norm is addend is None and not tanh_gate:
            return {}
        return {"x_norm": x_norm, "tanh_gate": tanh_gate, "addend": addend}


# Makes the prologue of a stream: ``(call, block, ahead, *conditions)``. For its own prologue a block passes
# None as ``ahead`` and calls the result with its hidden states. For the prologue of the next block it passes
# its hidden states. The answer is then a Prologue, or None if something is not plain or on another device.
# A block makes the prologue of its second stream after it has called the first.
PrologueMakers = Sequence[Callable[..., Any]]


class Prologue(NamedTuple):
    """The prologue of one stream on the kernels.

    Attributes:
        norm: the parameters of its norm.
        owner, name: the norm's module is ``owner.name``.
        modulation: scale and shift of each result of the norm, in order.
        rows: all rows of the modulation, each (B, 1 or S, D).
        upcasts: how far the model's own code computes in float32; see ``norms.Upcasts``.
        weights_for: ``weights_for(block, x)`` gives the FP8 weights of the layers that take the norm of x, or
            None; see ``attention.attention_weights``.
        block: the block whose prologue it is.
    """

    norm: Norm
    owner: nn.Module
    name: str
    modulation: tuple[Modulator, ...]
    rows: Rows
    upcasts: Upcasts = Upcasts.NOWHERE
    weights_for: WeightsFor | None = None
    block: Any = None

    def __call__(self, x: Tensor) -> PrologueResult:
        norm, owner, name, modulation, rows, upcasts, _, _ = self
        how = (upcasts, self.weights(x))
        return norm_modulate(norm, owner, name, x, modulation, *how), rows

    def weights(self, x: Tensor) -> dict[Any, Any] | None:
        return None if self.weights_for is None else self.weights_for(self.block, x)

    def after(self, branch: ResidualBranch, call: Call) -> tuple[Tensor, PrologueResult]:
        """The branch's result, and the prologue's for it."""
        norm, owner, name, modulation, rows, upcasts, _, _ = self
        how: dict[str, Any] = {"upcasts": upcasts, "norm": norm, **branch.parts()}
        how["weights"] = self.weights(branch[0])
        h, *normalized = residual_norm(call, owner, name, *branch[:3], *modulation, **how)
        return h, (tuple(normalized), rows)


def norm_prologue(
    call: Call,
    block: Any,
    name: str,
    ahead: Tensor | None,
    rows_of: Callable[[], Rows],
    upcasts: Upcasts = Upcasts.NOWHERE,
    weights_for: WeightsFor | None = None,
) -> Any:
    """The prologue with the norm ``block.name`` and rows of which the first two are shift and scale, or no
    rows; ``ahead`` as in ``PrologueMakers``, ``weights_for`` as in ``Prologue``."""
    norm = read_norm(block._modules.get(name), None, upcasts)
    if isinstance(norm, str):
        if ahead is not None:
            return None
        call.fall_back(f"{name} {norm}")

        def run_module(x: Tensor) -> PrologueResult:
            n = getattr(block, name)(x.float() if upcasts is Upcasts.TO_NEXT_LINEAR else x)
            rows = rows_of()  # only now: the module may write to what they are made from
            n = modulated(n, rows[1], rows[0]) if rows else n
            return (n.to(x.dtype) if upcasts is Upcasts.TO_NEXT_LINEAR else n,), rows

        return run_module
    weight = norm[1][0]
    if ahead is not None and weight is not None and weight.device != ahead.device:
        return None
    rows = rows_of()
    modulation = (rows[1], rows[0]) if rows else ()
    return Prologue(norm, block, name, modulation, rows, upcasts, weights_for, block)


def begin(
    call: Call,
    block: nn.Module,
    makers: PrologueMakers,
    hidden_states: tuple[Tensor, ...],
    conditions: tuple[Any, ...],
) -> Sequence[PrologueResult]:
    """The prologue of each stream. The previous block may have computed it."""
    handed = take_over(call, block, (*hidden_states, *conditions))
    if handed is not None:
        return handed
    return [make(call, block, None, *conditions)(x) for make, x in zip(makers, hidden_states)]


def begin_joint(
    call: Call,
    block: nn.Module,
    maker: Callable[..., Any],
    first: Tensor,
    second: Tensor,
    conditions: tuple[Any, ...],
) -> tuple[Tensor, PrologueResult]:
    """Two streams as one, (B, S1 + S2, D), and its prologue. The previous block may have computed both."""
    handed = take_over(call, block, (first, second, *conditions))
    if handed is not None:
        return concat_view(first, second), handed[0]
    x = concat_streams(call, first, second)
    return x, maker(call, block, None, *conditions)(x)


def take_over(call: Call, block: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """The values that the previous block computed for a call with the same argument objects, or None."""
    state = call.state
    if state is None:
        return None
    call.is_bare = bool(state.calls(block) and bare_stand_in(call.stand_in.spec, block))
    if not call.is_bare:
        state.distrust()  # hooks may have changed masks, or written to what was shared
    return state.take_over(block, arguments)


def finish(
    call: Call,
    block: nn.Module,
    makers: PrologueMakers,
    branches: Sequence[ResidualBranch],
    conditions: tuple[Any, ...],
    *,
    upcasts: Upcasts = Upcasts.NOWHERE,
    hands_over: bool = True,
    as_returned: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = tuple,
) -> tuple[Tensor, ...]:
    """A block's results, each in one pass with the prologue of its stream in the next block.

    The prologues are passed on if both blocks are of the same kind and no code can run between them.
    ``as_returned`` converts the results to the block's return values, the next block's hidden states.
    """
    state, successor = call.state, None
    if state is not None and not call.is_bare:
        state.shared.clear()  # hooks may write to what it was made from
    elif state is not None and hands_over:
        successor = state.successor(block, call.stand_in.spec)
    if successor is not None:
        made = [make(call, successor, branches[0][0], *conditions) for make in makers]
        if None not in made:
            handed, begun = zip(*map(Prologue.after, made, branches, repeat(call)))
            results = as_returned(handed)
            state.hand_over(successor, (*results, *conditions), begun)
            return results
    sums = []
    for branch in branches:  # a comprehension would be a function call before Python 3.12
        sums.append(gated_residual(*branch[:3], upcasts, call, **branch.parts()))
    return as_returned(sums)


def feed_forwards(
    call: Call,
    block: Any,
    names: Sequence[tuple[str, str]],
    hidden_states: Sequence[Tensor],
    attention_outs: Sequence[Tensor],
    rows: Sequence[Rows],
) -> list[ResidualBranch]:
    """From the attention to the end of each stream: ``x + gate * attention_out``, its modulated norm and the
    feed-forward.

    ``names``: the attributes of norm and feed-forward. Rows are shift, scale and gate of attention (only the
    gate is still used), then of the feed-forward.
    """
    branches = []
    for (norm, ff), x, attention_out, (_, _, gate, shift, scale, gate_of_feed_forward) in zip(
        names, hidden_states, attention_outs, rows
    ):
        module = block._modules[ff]
        weights = feed_forward_weights(module, x)
        how = (attention_out, gate, scale, shift)
        x, n = residual_norm(call, block, norm, x, *how, weights=weights)
        out = feed_forward_branch(module, n)
        branches.append(ResidualBranch(x, out, gate_of_feed_forward))
    return branches


def two_stream_block(
    call: Call,
    block: Any,
    makers: PrologueMakers,
    names: Sequence[tuple[str, str]],
    hidden_states: tuple[Tensor, Tensor],
    conditions: tuple[Any, ...],
    **attention_arguments: Any,
) -> tuple[Tensor, Tensor]:
    """A block of image and text with a joint attention and separate feed-forwards. Returns the text first.

    ``names`` as in ``feed_forwards``. With an IP-Adapter the attention has a third result, which is added to
    the image.
    """
    begun = begin(call, block, makers, hidden_states, conditions)
    normalized, rows = zip(*begun)
    attention_out, c_attention_out, *adapted = block._modules["attn"](
        hidden_states=normalized[0][0],
        encoder_hidden_states=normalized[1][0],
        **attention_arguments,
    )
    attention_outs = (attention_out, c_attention_out)
    branches = feed_forwards(call, block, names, hidden_states, attention_outs, rows)
    hands_over = not adapted and hidden_states[0].dtype != torch.float16
    x, c = finish(call, block, makers, branches, conditions, hands_over=hands_over)
    for out in adapted:
        x = x + out
    return clip_to_float16(c), x


# --------------------------------------------------------------------------------------------------
# Modulation

# Adaptive norms: the number of rows of their modulation, and the row indices of scale and shift for each
# result of the norm; None for no shift.
_PATH = "diffusers.models.normalization:"
_REPLACING = (
    "diffusers.models.transformers.transformer_hunyuan_video:"
    "HunyuanVideoTokenReplaceAdaLayerNormZero"
)
_COSMOS = "diffusers.models.transformers.transformer_cosmos:CosmosAdaLayerNormZero"
_MOCHI = "diffusers.models.transformers.transformer_mochi"
_CHROMA = "diffusers.models.transformers.transformer_chroma:ChromaAdaLayerNormZero"
_ADAPTIVE = (
    (KnownClass(_PATH + "AdaLayerNormZero"), 6, (1, 0)),
    (KnownClass(_PATH + "AdaLayerNormZeroSingle"), 3, (1, 0)),
    (KnownClass(_PATH + "AdaLayerNormContinuous"), 2, (0, 1)),
    (KnownClass(_PATH + "SD35AdaLayerNormZeroX"), 9, (1, 0, 7, 6)),
    (KnownClass(_PATH + "CogVideoXLayerNormZero"), 6, (1, 0, 4, 3)),
    (KnownClass(_COSMOS), 3, (1, 0)),
    (KnownClass(_PATH + "LuminaRMSNormZero"), 4, (0, None)),
    (KnownClass(f"{_MOCHI}:MochiRMSNormZero"), 4, (0, None)),
    (KnownClass(f"{_MOCHI}:MochiLayerNormContinuous"), 1, (0, None)),
    (KnownClass(f"{_CHROMA}Pruned"), 6, (1, 0)),
    (KnownClass(f"{_CHROMA}SinglePruned"), 3, (1, 0)),
    (KnownClass(_REPLACING), 6, (1, 0)),
    (KnownClass(_REPLACING + "Single"), 3, (1, 0)),
)
_SEQUENTIAL = KnownClass("torch.nn:Sequential")


def read_adaptive(module: Any) -> tuple[int, tuple[Any, ...], Norm] | str:
    """Number of rows, row indices and norm of an adaptive norm, or why the kernels cannot replace the module,
    as a clause."""
    cls = type(module)
    for known, count, places in _ADAPTIVE:  # noqa: B007
        if cls is known.cls:
            break
    else:
        return f"is {an(class_name(module))}"
    if not is_plain(module, known):
        return why_not_plain(module, known)
    modules = module._modules
    if module.__dict__.get("emb", modules.get("emb")) is not None:
        return "computes its time embedding itself"
    activation = modules.get("silu", modules.get("activation"))
    # Chroma's norms are given their modulation.
    if len(modules) > 1 and not is_plain(activation, SILU):
        return "has an activation other than SiLU"
    norm = read_norm(modules.get("norm"))
    return f"has a norm that {norm}" if isinstance(norm, str) else (count, places, norm)


def _modulation(call: Call, module: Any, ahead: Tensor | None, temb: Tensor) -> Tensor | None:
    return linear_of_silu(call, module._modules["linear"], temb, ahead)


def adaptive_prologue(
    call: Call,
    block: Any,
    ahead: Tensor | None,
    *conditions: Any,
    name: str,
    takes_emb: bool = True,
    modulation_of: Callable[..., Tensor | None] = _modulation,
    upcasts: Upcasts = Upcasts.NOWHERE,
    weights_for: WeightsFor | None = None,
) -> Any:
    """The prologue with the adaptive norm ``block.name``; ``ahead`` as in ``PrologueMakers``.

    ``takes_emb``: whether the model passes the one condition as ``emb``. ``modulation_of(call, module, ahead,
    *conditions)``: all rows, (B, N * D) or (B, S, N * D), or None as the prologue. ``upcasts``: see
    ``norms.Upcasts``. ``weights_for``: see ``Prologue``.
    """
    module = block._modules[name]
    found = read_adaptive(module)
    if isinstance(found, str):
        if ahead is not None:
            return None
        call.fall_back(f"{name} {found}")
        if call.state is not None:
            call.state.shared.clear()  # the module may write to what it was made from

        def run_module(x: Tensor) -> PrologueResult:
            """Replaces the rows of scale and shift by the norm's results."""
            made = module(x, emb=conditions[0]) if takes_emb else module(x, *conditions)
            normalized, *results = made if isinstance(made, tuple) else (made,)
            rows = [r.unsqueeze(1) if r.dim() == 2 else r for r in results]
            if len(rows) == 6:  # of SD35AdaLayerNormZeroX
                *rows, second, last = rows
                return (normalized, second), (None, None, *rows, None, None, last)
            return (normalized,), (None, None, *rows)

        return run_module
    count, places, norm = found
    modulation = modulation_of(call, module, ahead, *conditions)
    if modulation is None:
        return None
    modulation = modulation.unsqueeze(1) if modulation.dim() == 2 else modulation
    rows = modulation.chunk(count, 2)
    operands = tuple([None if place is None else rows[place] for place in places])
    return Prologue(norm, module, "norm", operands, rows, upcasts, weights_for, block)


# The prologues of FLUX's double blocks, of image and text, and that of its single blocks.
DOUBLE_PROLOGUES = (
    partial(adaptive_prologue, name="norm1", weights_for=image_weights),
    partial(adaptive_prologue, name="norm1_context", weights_for=text_weights),
)
SINGLE_PROLOGUES = (partial(adaptive_prologue, name="norm", weights_for=single_block_weights),)
# The norms and feed-forwards of FLUX's double blocks, for ``feed_forwards``.
FEED_FORWARDS = (("norm2", "ff"), ("norm2_context", "ff_context"))


def linear_of_silu(
    call: Call, layer: Any, temb: Tensor, ahead: Tensor | None, name: str = "silu"
) -> Tensor | None:
    """``layer(silu(temb))``; ``ahead`` as in ``PrologueMakers``. Blocks share the SiLU under ``name``."""
    plain = plain_weight(layer)
    if plain is None:
        if ahead is not None and not may_run_ahead(layer, ahead):
            return None
        if are_fp8(layer):
            return linear(layer, call.shared(name, temb, torch.nn.functional.silu))
        return layer(torch.nn.functional.silu(temb))  # not shared: the layer may write to it
    if ahead is not None and plain[0].device != ahead.device:
        return None
    activated = call.shared(name, temb, torch.nn.functional.silu)
    return torch.nn.functional.linear(activated, *plain)


def may_run_ahead(layer: Any, x: Tensor) -> bool:
    """Whether a layer may run before its block: it has no hooks (as for offloading) and is on x's device."""
    return all(
        has_own_forward(module)
        and not has_hooks(module)
        and all(p is None or p.device == x.device for p in module._parameters.values())
        for module in layer.modules()
    )


def linear_alone(module: Any, x: Tensor) -> Tensor:
    """The result of a ``torch.nn.Sequential`` of one linear layer."""
    if is_plain(module, _SEQUENTIAL) and len(module._modules) == 1:
        (layer,) = module._modules.values()
        return linear(layer, x)
    return module(x)


def linear_modulation(
    call: Call, module: Any, temb: Tensor, ahead: Tensor | None, name: str = "silu"
) -> Tensor | None:
    """The result of a ``torch.nn.Sequential(SiLU, Linear)`` for a time embedding; ``ahead`` as in
    ``PrologueMakers``. Blocks share the SiLU under ``name``."""
    if is_plain(module, _SEQUENTIAL) and len(module._modules) == 2:
        activation, layer = module._modules.values()
        if is_plain(activation, SILU):
            return linear_of_silu(call, layer, temb, ahead, name)
    return None if ahead is not None else module(temb)


def table_prologue(
    call: Call,
    block: Any,
    ahead: Tensor | None,
    temb: Tensor,
    by_row: Callable[[Tensor], Tensor] = lambda temb: temb.unflatten(2, (6, -1)),
    upcasts: Upcasts = Upcasts.NOWHERE,
    scale_first: bool = False,
    weights_for: WeightsFor | None = None,
) -> Any:
    """The prologue with the norm ``norm1`` and a modulation that is the block's table ``scale_shift_table``,
    (N, D) or (1, N, D), plus a time embedding; ``ahead`` as in ``PrologueMakers``.

    ``by_row`` converts the embedding to (B, 1 or S, N, D), which the blocks share. Rows are shift, scale and
    N - 2 more, each (B, 1 or S, D), in the dtype of the sum. ``scale_first``: the model's order of these two.
    ``weights_for``: see ``Prologue``.
    """
    table = block.scale_shift_table
    if ahead is not None and table.device != ahead.device:
        return None

    def rows_of() -> Rows:
        embedding = call.shared("embedding", temb, by_row)
        rows = table_rows(table, embedding)
        return (rows[1], rows[0], *rows[2:]) if scale_first else rows

    return norm_prologue(call, block, "norm1", ahead, rows_of, upcasts, weights_for)


def table_rows(table: Tensor, embedding: Tensor) -> Rows:
    """The rows of a table, (N, D) or (1, N, D), plus an embedding (B, 1 or S, N, D), each (B, 1 or S, D).

    With an embedding of each token they are pairs of row and embedding, for the operations to add.
    """
    table = table.to(embedding.device)
    if embedding.shape[1] == 1:
        return (table + embedding).unbind(dim=2)
    return tuple(zip(table.view(table.shape[-2:]).unbind(0), embedding.unbind(dim=2)))


# --------------------------------------------------------------------------------------------------
# The report


@dataclass(frozen=True, eq=False)
class BlockSpec(PatchSpec):
    """A transformer block.

    Attributes:
        norms: the names of its norms; a block may lack some.
        adaptive_norms: the names of norms that compute their modulation themselves.
        upcasts: how far the model's own code computes in float32; see ``norms.Upcasts``.
        inner: paths of modules with their own stand-in.
    """

    norms: tuple[str, ...] = ()
    adaptive_norms: tuple[str, ...] = ()
    upcasts: Upcasts = Upcasts.NOWHERE
    inner: tuple[str, ...] = ()

    def notes(self, module: nn.Module, injection: Injection) -> list[str]:
        modules = module._modules
        adaptive = [(name, read_adaptive(modules.get(name))) for name in self.adaptive_norms]
        notes = [f"{name} {found}" for name, found in adaptive if isinstance(found, str)]
        return norm_notes(module, self.norms, self.upcasts) + notes


# FLUX's blocks, and blocks whose norms and layers have the same names.
FLUX_OPERATIONS = "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual"
double_spec = partial(
    BlockSpec,
    operations=FLUX_OPERATIONS,
    norms=("norm2", "norm2_context"),
    adaptive_norms=("norm1", "norm1_context"),
    inner=("attn", "ff.net.0", "ff_context.net.0"),
)
single_spec = partial(
    BlockSpec,
    operations=f"{FLUX_OPERATIONS}, GELU in the matrix product's epilogue, or gelu",
    adaptive_norms=("norm",),
    inner=("attn",),
)

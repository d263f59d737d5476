"""Attention modules: query and key, attention itself, and the conditions for running the model's own.

The module's forward is replaced, not its processor: diffusers copies, compares and replaces processors, and
sets backends and parallelism on them. Each call checks which processor the module has. Query, key and value
are (B, S, H * d), as linear layers return them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import operations
from ...operations.conditions import (
    PLAIN_TYPES,
    an,
    attention_takes,
    is_differentiated,
    may_write,
    modulators_compatible,
    same_dtype_and_unit_stride,
)
from ...operations.key_blocks import KeyBlocks
from ..core.adapters import read_active
from ..core.checks import KnownFunction, class_name, is_stock
from ..core.patch import Call, Injection, PatchSpec, StandIn
from ..core.quantized_rows import QuantizedRows, as_tensor
from ..core.report import OWN_ATTENTION
from ..parallel.exchange import attend_in_parallel, wire_empty
from ..parts.linears import (
    QUERY_KEY_VALUE,
    TEXT_QUERY_KEY_VALUE,
    can_write_linear,
    can_write_rows,
    features_of,
    is_identity,
    linear,
    linear_per_sample,
    linears,
    plain_weights,
    write_linear,
)
from ..parts.lora import LaterProduct, lora_products, lora_results
from ..parts.norms import LAYER, Upcasts, apply_norm, gated_residual, norm_notes, read_norm
from ..parts.rotary import rope_operand, split_tables
from ..parts.streams import concat_streams
from ..quantized.fp8_linears import LINEAR, are_fp8, has_plain_weight
from .backend import run_own_in_parallel, sdpa_of_tokens, sdpa_with_bias
from .decision import (
    MASK_DIFFERS,
    NOT_WANTED,
    SDPA,
    blocks_of_block_mask,
    context_parallel_of,
    count_own,
    dispatch_of,
    is_native,
    kernel_attention,
    may_attend,
    shared_blocks,
    shared_key_bias,
    why_own_attention,
)

# Linear layers and norms of an attention over two streams, for the image and for the text.
_IMAGE = QUERY_KEY_VALUE, ("norm_q", "norm_k")
_TEXT = TEXT_QUERY_KEY_VALUE, ("norm_added_q", "norm_added_k")
_NORMS = (*_IMAGE[1], *_TEXT[1])
_PROJECTIONS = frozenset((*_IMAGE[0], "to_qkv", "to_kv", "to_out"))
UNREAD: Any = object()  # an argument that was not given


@dataclass(frozen=True, eq=False)
class AttentionSpec(PatchSpec):
    """An attention module with a processor.

    Attributes:
        processor: the path of the processor's class; "" if its name begins as the attention's.
        processor_parameters: those of its ``__call__`` after the module; "" if they are ``forward``'s.
        rotate: the rotating functions in the processor's module, or their paths in another one; "" if the
            processor rotates inline.
        project: the function that computes query, key and value if projections are fused, or "".
        dispatches: whether the processor calls diffusers' dispatch; otherwise it calls PyTorch's attention.
        library: the processor's module.
        other_processor: the path of another processor's class in that module, or "".
        other_parameters: those of its ``__call__`` after the module; "" if they are the first one's.
        other_call: this ``__call__``.
        splits_masks: whether the model's own code gives attention the masks of its rank's tokens.
    """

    processor: str = ""
    processor_parameters: str = ""
    rotate: str = "apply_rotary_emb"
    project: str = ""
    dispatches: bool = True
    library: str = ""
    other_processor: str = ""
    other_parameters: str = ""
    other_call: KnownFunction | None = None
    splits_masks: bool = True
    is_attention = True

    def __post_init__(self) -> None:
        processor = self.processor or f"{self.path.removesuffix('Attention')}AttnProcessor"
        library = processor.partition(":")[0]
        names = [*self.rotate.split(), *self.project.split()]
        functions = [name if ":" in name else f"{library}:{name}" for name in names]
        of_forward = (self.forward_parameters() or "").removeprefix("self ").removesuffix(" kwargs")
        parameters = f"self attn {self.processor_parameters or of_forward}"
        processor_call = f"{processor}.__call__", parameters
        object.__setattr__(self, "functions", (processor_call, *functions, *self.functions))
        if self.other_processor:
            others = self.other_parameters
            of_other = f"self attn {others}" if others else parameters
            known = KnownFunction(f"{self.other_processor}.__call__", of_other)
            object.__setattr__(self, "other_call", known)
        object.__setattr__(self, "library", library)
        object.__setattr__(self, "condition", self._why_not_known)
        super().__post_init__()

    def _why_not_known(self, module: Any) -> str | None:
        cls: Any = type(module.__dict__.get("processor"))
        if cls.__call__ is self.known.functions[0].function or self.is_other(module):
            return None
        processor = getattr(module, "processor", None)  # not in ``__dict__`` if it is a module
        return f"its processor is {an(class_name(processor))}, which is not the supported one"

    def run_own(self, stand_in: StandIn, own: Callable, module: Any, args: Any, kwargs: Any) -> Any:
        run = partial(super().run_own, stand_in, own, module, args, kwargs)
        return run_own_in_parallel(run, stand_in)

    def is_other(self, module: Any) -> bool:
        """Whether the module has the other processor."""
        cls: Any = type(module.__dict__.get("processor"))
        return self.other_call is not None and cls.__call__ is self.other_call.function

    def notes(self, module: Any, injection: Injection) -> list[str]:
        notes = norm_notes(module, _NORMS)
        reason = self._why_own_attention(module, injection)
        return notes if reason is None else [*notes, reason]

    def _why_own_attention(self, module: Any, injection: Injection) -> str | None:
        """Why the module currently runs its own attention."""
        if not injection.options["attention"]:
            return NOT_WANTED
        return why_own_attention(module, dispatch_of(self) is not None)

    def describe(self, module: Any, injection: Injection) -> str:
        is_own = torch.nn.functional.scaled_dot_product_attention is SDPA.function
        is_taken = is_own and self._why_own_attention(module, injection) is None
        return f"{self.operations}, attention" if is_taken else self.operations


# Arguments of the spec of diffusers' ``Attention`` whose processor rotates with tables.
ROTATED_ATTENTION: dict[str, Any] = {
    "parameters": "self hidden_states encoder_hidden_states attention_mask cross_attention_kwargs",
    "processor_parameters": "hidden_states encoder_hidden_states attention_mask image_rotary_emb",
    "rotate": "diffusers.models.embeddings:apply_rotary_emb",
}


def attend(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    heads: int,
    config: Any = UNREAD,
    prepares_mask: bool = False,
    key_lengths: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_unbiased: Tensor | None = None,
    gate: Tensor | None = None,
    addend: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention of all heads, (B, S, H * d), in query's dtype, times ``gate`` (B, S, H), plus ``addend`` of
    query's shape.

    ``config``: of context parallelism, if the caller has read it. With it query, key and value may also be
    those of ``wire_empty``, and the value a function that computes it, while query and key are on their way
    to other ranks.

    ``mask`` is the module's argument. ``prepares_mask``: whether the processor repeats a mask (B, 1 or Sq,
    Sk) for the heads, by ``prepare_attention_mask``. ``key_lengths`` (B,) or ``key_bias`` (B, Sk) is an
    equivalent of the mask, if the caller has one. A mask that differs between queries runs on the kernel if
    each query attends to an interval of keys. An equivalent may hold for some queries only: ``is_unbiased``,
    (B, S, 1) of the first ones, tells which have no mask. Key and value may have fewer heads, which the
    processor repeats. The result may be written to ``out``. ``options`` are the processor's other arguments
    to the dispatch.
    """
    if "parallel_config" in options:
        config = None
    elif config is UNREAD:
        config = context_parallel_of(call, module)
    if config is not None:
        if is_unbiased is not None:
            raise ValueError(
                "context parallelism: a mask for some queries only cannot be split between ranks"
            )
        if prepares_mask and mask is not None and mask.dtype == torch.bool:
            mask, prepares_mask = _prepared_mask(module, mask, key, heads), False
        key_bias = _bias_of_keys(call, key, mask, prepares_mask, key_lengths, key_bias)
        result = _attend_in_parallel(call, module, config, query, key, value, key_bias, heads, out)
        return _gate_and_add(result, gate, addend, heads)
    if may_attend(call, module, query.shape[2] // heads):
        if attention_takes(query, key, value, heads):
            blocks = None
            if mask is not None and key_lengths is None and key_bias is None:
                key_bias = shared_key_bias(call, mask, key, prepares_mask)
                if key_bias is None and is_unbiased is None:
                    blocks = shared_blocks(call, mask, query, key, heads, prepares_mask)
            if mask is None or not (key_bias is key_lengths is blocks is None):
                arguments: Any = {"key_bias": key_bias, "key_lengths": key_lengths}
                arguments.update(heads=heads, out=out, blocks=blocks)
                if gate is addend is is_unbiased is None:
                    return kernel_attention(call, query, key, value, **arguments)
                if (
                    is_unbiased is None
                    and same_dtype_and_unit_stride(query, addend)
                    and (addend is None or addend.shape == query.shape)
                    and modulators_compatible(query, gate)
                    and not is_differentiated(gate, addend)
                ):
                    arguments.update(gate=gate, addend=addend)
                    return kernel_attention(call, query, key, value, **arguments)
                result = kernel_attention(call, query, key, value, **arguments)
                if is_unbiased is not None:
                    first = result[:, : is_unbiased.shape[1]]
                    queries = query[:, : first.shape[1]]
                    unbiased = kernel_attention(call, queries, key, value, heads=heads)
                    first.copy_(torch.where(is_unbiased, unbiased, first))
                return _gate_and_add(result, gate, addend, heads)
            call.fall_back(f"{OWN_ATTENTION}: {MASK_DIFFERS}")
        else:
            count_own(call, query, key, value)
    processor, dispatch = module.processor, dispatch_of(call.stand_in.spec)
    if mask is not None and prepares_mask:
        # PyTorch's attention broadcasts over the heads by itself.
        is_broadcast = mask.dim() == 3 and mask.shape[::2] == key.shape[:2]
        if is_broadcast and is_native(processor, dispatch is not None):
            mask = mask.unsqueeze(1)
        else:
            mask = _prepared_mask(module, mask, key, heads)
    dtype = query.dtype
    head_dim = query.shape[2] // heads
    query, key, value = (x.unflatten(2, (-1, head_dim)) for x in (query, key, value))
    if key.shape[2] != heads:
        repeats = heads // int(key.shape[2])  # torch.jit.trace has tensors as sizes
        key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
    if dispatch is not None:
        chosen: Any = {
            "backend": getattr(processor, "_attention_backend", None),
            "parallel_config": getattr(processor, "_parallel_config", None),
        }
        result = dispatch(query, key, value, attn_mask=mask, **{**chosen, **options})
    else:
        result = sdpa_of_tokens(query, key, value, mask, **options)
    return _gate_and_add(result.flatten(2, 3).to(dtype), gate, addend, heads)


def attend_by_blocks(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks_of: Callable[[], KeyBlocks | str],
    *,
    heads: int,
    key_bias: Tensor | None = None,
    of_flex: bool = False,
) -> Tensor | None:
    """``attend`` to the keys of blocks on the kernel; None, with its reason counted, if the caller has to run
    the model's own. ``blocks_of`` makes the blocks, or says why there are none, as a clause. ``of_flex``:
    whether the kernel takes FlexAttention's place if the user chose that."""
    if context_parallel_of(call, module) is not None:
        return None
    if not may_attend(call, module, query.shape[2] // heads, of_flex):
        return None
    if not attention_takes(query, key, value, heads):
        count_own(call, query, key, value)
        return None
    blocks = blocks_of()
    if isinstance(blocks, str):
        call.fall_back(f"{OWN_ATTENTION}: {blocks}")
        return None
    options: Any = {"heads": heads, "key_bias": key_bias, "blocks": blocks}
    return kernel_attention(call, query, key, value, **options)


def attend_by_mask(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    heads: int,
    padding: int,
) -> Tensor:
    """``attend`` by a ``BlockMask`` for tokens after which the processor appends ``padding`` zeros."""
    q, k = (x.unflatten(2, (heads, -1)) for x in (query, key))
    read = partial(blocks_of_block_mask, mask, q, k, is_padded=True)
    operands = (call, module, query, key, value, read)
    out = attend_by_blocks(*operands, heads=heads, of_flex=True)
    if out is not None:
        return out
    padded = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    dispatch: Any = dispatch_of(call.stand_in.spec)
    out = dispatch(
        *[x.unflatten(2, (heads, -1)) for x in padded],
        attn_mask=mask,
        dropout_p=0.0,
        backend="flex",
        parallel_config=module.processor._parallel_config,
    )
    return out[:, : query.shape[1]].flatten(2, 3).type_as(query)


def _gate_and_add(x: Tensor, gate: Tensor | None, addend: Tensor | None, heads: int) -> Tensor:
    if gate is not None:
        x = (x.unflatten(2, (heads, -1)) * gate.unsqueeze(-1)).flatten(2)
    return x if addend is None else gated_residual(addend, x, None)


def _prepared_mask(module: Any, mask: Tensor, key: Tensor, heads: int) -> Tensor:
    """The mask (B, H, 1 or Sq, Sk) as the processor makes it."""
    mask = module.prepare_attention_mask(mask, key.shape[1], key.shape[0])
    return mask.view(key.shape[0], heads, -1, mask.shape[-1])


def _attend_in_parallel(
    call: Call,
    module: Any,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Any,
    bias: Tensor | None,
    heads: int,
    out: Tensor | None,
) -> Tensor:
    """``attend`` to the keys of all ranks, with a bias (B, Sk) of this rank's."""
    head_dim = query.shape[-1] if query.dim() == 5 else query.shape[2] // heads

    def by_head(x: Any) -> Tensor:
        x = x() if callable(x) else x
        return x if x.dim() == 5 else x.unflatten(2, (-1, head_dim))

    may_use_kernel = may_attend(call, module, head_dim)

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor | None) -> Tensor:
        if may_use_kernel and attention_takes(q, k, v):
            return kernel_attention(call, q, k, v, key_bias=bias, out=out)
        if may_use_kernel:
            count_own(call, q, k, v)
        return sdpa_with_bias(q, k, v, bias, out)

    place = None if out is None else out.unflatten(2, (heads, head_dim))
    tensors = by_head(query), by_head(key), partial(by_head, value)
    result = attend_in_parallel(config, *tensors, bias, attention, place)
    return result.flatten(2, 3) if out is None else out


def _bias_of_keys(
    call: Call, key: Tensor, mask: Any, is_repeated: bool, lengths: Any, bias: Any
) -> Tensor | None:
    """The masks of ``attend`` as a bias (B, Sk)."""
    if bias is not None or (lengths is None and mask is None):
        return bias
    if lengths is not None:
        valid = torch.arange(key.shape[1], device=key.device) < lengths[:, None]
        return valid.to(torch.float32).log_()
    found = shared_key_bias(call, mask, key, is_repeated)
    if found is None:
        raise ValueError(
            "context parallelism: a mask that differs between queries or heads, or is not of this rank's "
            f"keys, cannot be split between ranks, got shape {tuple(mask.shape)}"
        )
    return found


def key_lengths_of(call: Call, given: Any, mask: Tensor, batch: int, keys: int) -> dict[str, Any]:
    """The argument ``key_lengths`` of ``attend`` for a mask (B, 1, 1, Sk) of booleans, made from the one that
    the attention was ``given``. Only a known mask of a block surely has the valid keys before the padding."""
    state = call.state
    is_prefix = state is not None and state.has_known_masks and given is state.block_mask
    if not is_prefix or mask.dtype != torch.bool or mask.shape != (batch, 1, 1, keys):
        return {}
    lengths = call.shared("key lengths", mask, lambda m: m.flatten(1).sum(1, dtype=torch.int32))
    return {"key_lengths": lengths}


def query_key_value(
    module: Any,
    x: Any,
    context: Tensor | None,
    names: tuple[str, str, str] = _IMAGE[0],
    config: Any = None,
) -> Sequence[Any]:
    """Query of x, and key and value of the context (default: x), by the linear layers with these names.

    With ``config``, of context parallelism, the value of self-attention is returned as a function, so that it
    is computed while query and key are sent.
    """
    modules = module._modules
    q, k, v = (modules[names[0]], modules[names[1]], modules[names[2]])
    source = x if context is None else context
    if config is None and type(source) is Tensor is type(x) and is_stock(q, LINEAR, k, v):
        # ``linear``, inlined.
        of_q, of_k, of_v = q._parameters, k._parameters, v._parameters
        weights = (of_q.get("weight"), of_k.get("weight"), of_v.get("weight"))
        if PLAIN_TYPES.issuperset(map(type, weights)) and (
            "bias" in of_q and "bias" in of_k and "bias" in of_v
        ):
            product = torch.nn.functional.linear
            return [
                product(x, weights[0], of_q["bias"]),
                product(source, weights[1], of_k["bias"]),
                product(source, weights[2], of_v["bias"]),
            ]
    if context is None and config is not None and not are_fp8(v):
        query, key = linears(x, q, k)
        return [query, key, partial(_value_on_wire, config, v, x, heads_of(module))]
    if context is None:
        return linears(x, q, k, v)
    return [linear(q, x), *linears(context, k, v)]


def packed_projections(module: Any, x: Any, context: Tensor | None) -> Sequence[Tensor]:
    """``query_key_value`` by the layers that diffusers' ``fuse_projections`` makes."""
    modules = module._modules
    if context is None:
        return linear(modules["to_qkv"], x).chunk(3, dim=-1)
    return linear(modules["to_q"], x), *linear(modules["to_kv"], context).chunk(2, dim=-1)


def is_plain(module: Any, x: Any, *norms: str) -> bool:
    """Whether an ``Attention`` of tokens x has no parts but projections and these norms. Then processors such
    as the standard one do no more than project, apply them, rotate and attend."""
    state = module.__dict__
    return (
        module._modules.keys() <= _PROJECTIONS.union(norms)
        and not state.get("residual_connection")
        and state.get("rescale_output_factor") == 1
        and len(x.shape) == 3
    )


def _value_on_wire(config: Any, layer: Any, x: Tensor, heads: int) -> Tensor:
    """``layer(x)`` in the memory of ``wire_empty``, if matrix products can write it there without a copy."""
    if x.shape[0] != 1 or not can_write_linear(layer, x):
        return linear(layer, x)
    value = wire_empty(config, x, features_of(layer), heads)
    write_linear(layer, x, value)
    return value


def heads_of(module: Any) -> int:
    heads: Any = getattr(module, "heads", None)
    return module.num_heads if heads is None else heads


def _norm_options(
    call: Call,
    module: Any,
    names: tuple[str, str],
    query: Tensor,
    key: Tensor,
    heads: int,
    form: str,
    upcasts: Upcasts = Upcasts.NOWHERE,
) -> dict[str, Any] | None:
    """Arguments of ``qk_norm_rope`` for the query and key norms with these names; None if one launch cannot
    compute both. ``form``: "per_head" or "across_heads". ``upcasts``: see ``norm_and_rotate``."""
    q_norm, k_norm = module._modules.get(names[0]), module._modules.get(names[1])
    if q_norm is None and k_norm is None:
        return {"norm": "none"} if same_dtype_and_unit_stride(query, key) else None
    size = query.shape[2] // heads if form == "per_head" else query.shape[2]
    q, k = read_norm(q_norm, size, upcasts), read_norm(k_norm, size, upcasts)
    for name, norm in zip(names, (q, k)):
        if isinstance(norm, str):
            call.fall_back(f"{name} {norm}")
    if isinstance(q, str) or isinstance(k, str) or q[0] != k[0] or q[2] != k[2]:
        return None
    are_alike = (
        same_dtype_and_unit_stride(query, key) and modulators_compatible(query, *q[1], *k[1])
        if upcasts
        else same_dtype_and_unit_stride(query, key, *q[1], *k[1])
    )
    if not are_alike:
        return None
    options: dict[str, Any] = {"q_weight": q[1][0], "k_weight": k[1][0], "norm": form, "eps": q[2]}
    if q[0] == LAYER:
        if form != "per_head":
            return None
        options.update(norm="layer_per_head", q_bias=q[1][1], k_bias=k[1][1])
    return options


def _has_fast_heads(x: Tensor, heads: int) -> bool:
    """Whether ``qk_norm_rope`` has a fast kernel for the heads of x (B, S, H * d): a thread takes 16 elements
    of 16 bits. Single operations are faster than its general kernel."""
    return x.element_size() != 2 or x.shape[2] // heads % 16 == 0


def norm_and_rotate(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    rope: Any,
    rotate: Callable[[Tensor, Any], Tensor],
    form: str,
    heads: int,
    *,
    layout: str = "interleaved",
    upcasts: Upcasts = Upcasts.NOWHERE,
    key_rope: Any = None,
    config: Any = None,
    names: tuple[str, str] = _IMAGE[1],
    norms_in_float32: bool = False,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor]:
    """Query and key (B, S, H * d), normalized, and rotated by ``rope`` if given, the key by ``key_rope`` if
    that is given, too. With ``config``, the context parallelism of ``attend``, those of self-attention may be
    those of ``wire_empty``.

    ``rotate`` is the model's own rotation. It takes (B, S, H, d) if per head, otherwise (B, S, H * d).
    ``form``: "per_head", "across_heads", or "part_of_head" if the tables (S, r) rotate the first r elements
    of each head. ``layout``: of the pairs. ``upcasts``: see ``norms.Upcasts``, the rotation included.
    ``norms_in_float32``: see ``apply_norm``. ``keeps_dtype``: whether the results have the query's dtype even
    if the norms or tables are float32. Without a rotation per head, query and key may have different lengths.
    """
    if form == "part_of_head":
        both = _norm_and_rotate_part(call, module, query, key, rope, heads, names, layout)
        if both is not None:
            return both
        form = "per_head"
    if rope is module._modules.get(names[0]) is module._modules.get(names[1]) is None:
        return query, key
    per_head, operand, key_operand = form == "per_head", None, None
    if (not per_head or _has_fast_heads(query, heads)) and (
        query.shape == key.shape
        or query.shape[0] == key.shape[0]
        and (
            key_rope is not None or (per_head and (rope is None or query.shape[1] == key.shape[1]))
        )
    ):
        if rope is not None:
            operand = rope_operand(rope, query, heads, per_head)
            if key_rope is not None:
                key_operand = rope_operand(key_rope, key, heads, per_head)
                operand = None if key_operand is None else operand
        if operand is not None or (rope is None and module._modules.get(names[0]) is not None):
            options = _norm_options(call, module, names, query, key, heads, form, upcasts)
            if options is not None:
                options.update(rope=operand, k_rope=key_operand, heads=heads, layout=layout)
                if (
                    config is not None
                    and operand is not None
                    and query.shape == key.shape
                    and may_write()
                    and not is_differentiated(query, key, *options.values())
                ):
                    size = query.shape[2]
                    options["out"] = tuple(wire_empty(config, query, size, heads) for _ in range(2))
                q, k = operations.qk_norm_rope(query, key, **options)
                return q, k
    dtype = query.dtype
    if per_head:
        head_dim = query.shape[2] // heads
        query, key = (x.unflatten(2, (-1, head_dim)) for x in (query, key))
    if upcasts is Upcasts.TO_NEXT_LINEAR:
        query, key = query.float(), key.float()
    query = apply_norm(call, module, names[0], query, norms_in_float32)
    key = apply_norm(call, module, names[1], key, norms_in_float32)
    if rope is not None and operand is not None and same_dtype_and_unit_stride(query, key):
        options = {"rope": operand, "k_rope": key_operand, "heads": heads, "layout": layout}
        query, key = operations.qk_norm_rope(query, key, norm="none", **options)
    elif rope is not None:
        query, key = rotate(query, rope), rotate(key, rope if key_rope is None else key_rope)
    if keeps_dtype or upcasts is Upcasts.TO_NEXT_LINEAR:
        query, key = query.to(dtype), key.to(dtype)
    return (query.flatten(2), key.flatten(2)) if per_head else (query, key)


def _norm_and_rotate_part(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    rope: Any,
    heads: int,
    names: tuple[str, str],
    layout: str,
) -> tuple[Tensor, Tensor] | None:
    """``norm_and_rotate`` of the first elements of each head, or None if the kernel does not take them."""
    size, head_dim = 0 if rope is None else rope[0].shape[-1], query.shape[2] // heads
    if not (0 < size < head_dim and query.shape == key.shape and may_write()):
        return None
    operand = rope_operand(rope, query[..., : heads * size], heads, True)
    options = _norm_options(call, module, names, query, key, heads, "per_head")
    if (
        operand is None
        or options is None
        or options["norm"] == "none"  # a layer's own result would be written
        or is_differentiated(query, key, *operand, *options.values())
    ):
        return None
    query, key = operations.qk_norm_rope(query, key, heads=heads, **options)
    q, k = (x.unflatten(2, (heads, head_dim))[..., :size] for x in (query, key))
    options = {"rope": operand, "heads": heads, "norm": "none", "layout": layout}
    operations.qk_norm_rope(q, k, **options, inplace=True)
    return query, key


def project_and_rotate(
    call: Call,
    module: Any,
    x: Any,
    context: Any,
    rope: Any,
    rotate: Any,
    form: str = "per_head",
    *,
    head_dim: int | None = None,
    config: Any = None,
    projected: Sequence[Tensor] | None = None,
    layers: tuple[str, str, str] = _IMAGE[0],
    **options: Any,
) -> tuple[Tensor, Tensor, Any]:
    """Query of x, and key and value of the context (default: x); query and key after ``norm_and_rotate``.

    ``head_dim``: by default the query has the module's number of heads. ``projected``: the three, if fused
    layers computed them. ``config``, ``layers``: see ``query_key_value``. ``options``: see
    ``norm_and_rotate``.
    """
    query, key, value = projected or query_key_value(module, x, context, layers, config)
    # torch.jit.trace has tensors as sizes.
    heads = heads_of(module) if head_dim is None else int(query.shape[2]) // head_dim
    operands = (query, key, rope, rotate, form, heads)
    query, key = norm_and_rotate(call, module, *operands, config=config, **options)
    return query, key, value


def project_out(module: Any, x: Tensor, source: Any = None) -> Any:
    """The attention's output projection, and its dropout if it has one.

    ``source``: the attention's input, if a block adds the result to a residual. If the block gave
    ``QuantizedRows``, the result may be an ``Fp8Product``.
    """
    to_out = module._modules.get("to_out")
    if to_out is None:
        return x
    is_branch = type(source) is QuantizedRows
    if type(to_out) is not nn.ModuleList:
        return linear_per_sample(to_out, x, is_branch)
    layer, *dropouts = to_out._modules.values()
    dropouts = [dropout for dropout in dropouts if not is_identity(dropout)]
    if is_branch or not x.is_contiguous():
        out = linear_per_sample(layer, x, is_branch and not dropouts)
    else:
        out = linear(layer, x)
    return dropouts[0](out) if dropouts else out


def project_text_out(module: Any, c: Tensor, source: Any) -> Any:
    """The output projection of the text, if it has one, as ``project_out`` for the image."""
    layer = module._modules.get("to_add_out")
    return c if layer is None else linear_per_sample(layer, c, type(source) is QuantizedRows)


def run_attention(
    call: Call,
    module: Any,
    x: Any,
    context: Any,
    rope: Any,
    rotate: Any,
    mask: Tensor | None,
    attend_options: dict[str, Any],
    **options: Any,
) -> Any:
    """The forward of an attention of x to a context (default: x).

    ``attend_options``: see ``attend``. ``options``: see ``project_and_rotate``.
    """
    if not call.takes(x, context):
        return NotImplemented
    config = context_parallel_of(call, module)
    operands = (call, module, x, context, rope, rotate)
    query, key, value = project_and_rotate(*operands, config=config, **options)
    attend_options = {"heads": module.heads, "config": config, **attend_options}
    return project_out(module, attend(call, module, query, key, value, mask, **attend_options), x)


# --------------------------------------------------------------------------------------------------
# Two token streams, such as text and image

# Arguments that models with an IP-Adapter pass to all attentions, including those without one.
_IP_ADAPTER_ARGUMENTS = {"ip_hidden_states", "ip_adapter_masks"}


class Projections:
    """Query, key and value of one token stream, each (B, S, H * d); the names of the query and key norms; and
    the rotary embedding of both in the model's form, or None. A value that is not computed yet is a pair of
    its layer and the layer's input, or a ``LaterProduct``."""

    __slots__ = ("key", "norms", "query", "rope", "value")

    def __init__(
        self, query: Tensor, key: Tensor, value: Any, norms: tuple[str, str], rope: Any
    ) -> None:
        self.query, self.key, self.value, self.norms, self.rope = query, key, value, norms, rope


def project(
    call: Call, module: Any, image: Any, text: Any, image_rope: Any, text_rope: Any
) -> list[Projections]:
    """The image stream, then the text stream if there is text, by the attention's linear layers. Both may be
    quantized."""
    sources = [(image, image_rope, *_IMAGE)]
    if text is not None:
        sources.append((text, text_rope, *_TEXT))
    spec: Any = call.stand_in.spec
    if spec.project and module.fused_projections:
        images, texts = as_tensor(image), as_tensor(text)
        packed = call.stand_in.functions[-1].function(module, images, texts)
        return [
            Projections(packed[3 * i], packed[3 * i + 1], packed[3 * i + 2], norms, rope)
            for i, (_, rope, _, norms) in enumerate(sources)
        ]
    modules = module._modules
    streams = []
    for x, rope, (q, k, v), norms in sources:
        if text is None:
            config = context_parallel_of(call, module)
            query, key, value = query_key_value(module, x, None, config=config)
            return [Projections(query, key, value, norms, rope)]
        value_layer = modules[v]
        if type(x) is QuantizedRows or (not has_plain_weight(value_layer) and are_fp8(value_layer)):
            query, key, value = linears(x, modules[q], modules[k], modules[v])
            streams.append(Projections(query, key, value, norms, rope))
        else:
            layers, found = read_active(modules[q], modules[k], value_layer)
            products = None if found is None else lora_products(x, found)
            if products is None:
                query, key = linears(x, *layers[:2])
                value = layers[2], x
            else:
                query, key = lora_results(x, products[:2])
                value = tuple.__new__(LaterProduct, (x, products[2]))
            streams.append(Projections(query, key, value, norms, rope))
    return streams


def project_both(call: Call, module: Any, x: Any, c: Any, rope: Any) -> list[Projections]:
    """Of the text c, then of the image x, by the same layers. ``rope``: that of x. Both may be quantized."""
    names = _IMAGE[1]
    norms = ("", "") if norm_notes(module, names) else names  # no names: applied here
    length, modules = c.shape[1], module._modules
    to_q, to_k, to_v = layers = modules["to_q"], modules["to_k"], modules["to_v"]
    if norms is names and plain_weights(x.dtype, *layers):
        each: Any = [(*linears(n, to_q, to_k), (to_v, n)) for n in (c, x)]
    elif norms is names and are_fp8(*layers):
        each = [tuple(linears(n, *layers)) for n in (c, x)]
    else:  # hooks and adapters get the concat, as in the model
        joint = linears(concat_streams(call, c, x), *layers)
        if norms is not names:
            by_head = [y.unflatten(2, (module.heads, -1)).transpose(1, 2) for y in joint[:2]]
            pair = [apply_norm(call, module, name, y) for name, y in zip(names, by_head)]
            joint = [*(y.transpose(1, 2).flatten(2) for y in pair), joint[2]]
        each = [tuple(y[:, :length] for y in joint), tuple(y[:, length:] for y in joint)]
    return [Projections(q, k, v, norms, r) for (q, k, v), r in zip(each, (None, rope))]


def _value_of(value: Any) -> Any:
    """The value of ``Projections``, computed."""
    if type(value) is LaterProduct:
        return lora_results(value.x, [value.product])[0]
    return linear(*value) if isinstance(value, tuple) else value


def _can_write_value(value: Any, size: int) -> bool:
    """Whether ``_write_value`` takes the value of ``Projections``, of this many features."""
    if type(value) is LaterProduct:
        return value.product[0].shape[0] == size and can_write_rows(value.x)
    is_layer = isinstance(value, tuple) and can_write_linear(*value)
    return is_layer and features_of(value[0]) == size


def _write_value(value: Any, out: Tensor) -> None:
    if type(value) is LaterProduct:
        lora_results(value.x, [value.product], out=(out,))
    else:
        layer, x = value
        write_linear(layer, x, out)


def _joint_query_key_value(
    call: Call, module: Any, streams: list[Projections], heads: int, config: Any, layout: str
) -> tuple[Tensor, Tensor, Any] | None:
    """Query, key and value of two streams, concatenated: the kernel writes each stream to its slice. None if
    the kernel does not take one of them. Values computed here are stored in ``streams``. ``config``: of
    context parallelism, or None. ``layout``: of the pairs."""
    first = streams[0].query
    if not _has_fast_heads(first, heads):
        return None
    rotations = []
    for stream in streams:
        query, key = stream.query, stream.key
        if query.shape != key.shape or query.shape[::2] != first.shape[::2]:
            return None
        operand = None
        if stream.rope is not None:
            if same_dtype_and_unit_stride(query, key):
                operand = rope_operand(stream.rope, query, heads, True)
            if operand is None:
                return None
        options = _norm_options(call, module, stream.norms, query, key, heads, "per_head")
        if options is None:
            return None
        rotations.append((operand, {**options, "layout": layout}))
    for stream in streams:
        value, is_sent = stream.value, config is not None
        may_wait = not is_sent or (first.shape[0] == 1 and type(value) is not LaterProduct)
        if not (may_wait and _can_write_value(value, first.shape[2])):
            value = stream.value = _value_of(value)
            if value.shape != stream.query.shape or not same_dtype_and_unit_stride(
                stream.query, value
            ):
                return None
    for stream, (_, options) in zip(streams, rotations):
        if is_differentiated(stream.query, stream.key, stream.value, *options.values()):
            return None
    if not same_dtype_and_unit_stride(first, streams[1].query):
        return None
    lengths, size = (first.shape[1], streams[1].query.shape[1]), first.shape[2]
    joint: Any
    if config is None:
        joint = first.new_empty((3, first.shape[0], sum(lengths), size)).unbind(0)
    else:
        joint = [wire_empty(config, first, size, heads, sum(lengths)) for _ in range(3)]
    query, key, value = joint
    places: Any = zip(*[x.split_with_sizes(lengths, 1) for x in joint])
    later: list[Any] = []
    for stream, (operand, options), out in zip(streams, rotations, places):
        v: Any = stream.value
        if not isinstance(v, Tensor):
            if config is None:
                _write_value(v, out[2])
            else:
                later.append((*v, out[2]))
            v, out = None, out[:2]
        operations.qk_norm_rope(
            stream.query, stream.key, rope=operand, heads=heads, v=v, out=out, **options
        )
    if not later:
        return query, key, value

    def written() -> Tensor:
        for each in later:
            write_linear(*each)
        return value

    return query, key, written


def attend_to_all(
    call: Call,
    module: Any,
    streams: list[Projections],
    rotate: Callable[[Tensor, Any], Tensor],
    mask: Tensor | None = None,
    *,
    joint_rope: Any = None,
    layout: str = "interleaved",
    extended: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    **options: Any,
) -> Tensor:
    """Attention over all tokens of the streams: their results, (B, S, H * d), concatenated.

    ``joint_rope``: the rotation of all tokens, if it cannot be split by stream. ``layout``: of the pairs.
    ``extended``: what gives key and value of more tokens. ``options``: see ``attend``.
    """
    head_dim = module.__dict__.get("head_dim") or module.inner_dim // module.heads
    heads = int(streams[0].query.shape[2]) // head_dim  # torch.jit.trace has tensors as sizes
    joint: Any = None
    config = context_parallel_of(call, module)
    if len(streams) == 2 and (call.state is not None or may_write()):
        joint = _joint_query_key_value(
            call, module, streams, heads, config if joint_rope is None else None, layout
        )
    if joint is None:
        each = []
        alone = config if len(streams) == 1 and joint_rope is None else None
        for stream in streams:
            operands = (stream.query, stream.key, stream.rope, rotate, "per_head", heads)
            of_stream: Any = {"config": alone, "names": stream.norms, "layout": layout}
            q, k = norm_and_rotate(call, module, *operands, **of_stream)
            each.append((q, k, _value_of(stream.value)))
        joint = each[0] if len(each) == 1 else [torch.cat(x, dim=1) for x in zip(*each)]
    query, key, value = joint
    if joint_rope is not None:
        query, key = (
            rotate(x.unflatten(2, (heads, -1)), joint_rope).flatten(2) for x in (query, key)
        )
    if extended is not None:
        key, value = extended(key, value)
    return attend(call, module, query, key, value, mask, heads=heads, config=config, **options)


def run_joint_attention(
    call: Call,
    module: Any,
    x: Any,
    c: Any,
    ropes: tuple[Any, Any],
    rotate: Any,
    mask: Tensor | None = None,
    *,
    is_text_first: bool = False,
    text_padding: Tensor | None = None,
    **options: Any,
) -> Any:
    """The forward of an attention over image x and text c, which the kernels take: the results of both.

    ``ropes``: those of x and c. ``is_text_first``: whether the text is the first of all tokens, as in the
    mask. ``text_padding``: (B, T, 1), which tokens of the text get zeros. ``options``: see ``attend_to_all``.
    """
    streams = project(call, module, x, c, *ropes)
    if is_text_first:
        streams.reverse()
    length = streams[0].query.shape[1]
    out = attend_to_all(call, module, streams, rotate, mask, **options)
    each = [out[:, :length], out[:, length:]]
    x_out, c_out = reversed(each) if is_text_first else each
    if text_padding is not None:
        c_out = c_out.masked_fill(text_padding, 0)
    return project_out(module, x_out, x), project_text_out(module, c_out, c)


def run_attention_of_both(
    call: Call,
    module: Any,
    x: Any,
    c: Any,
    rope: Any,
    rotate: Any,
    mask: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The forward of an attention over text c and image x with the same layers for both: the results of x and
    c. ``rope``: that of x. ``options``: see ``attend_to_all``."""
    both = project_both(call, module, x, c, rope)
    out = project_out(module, attend_to_all(call, module, both, rotate, mask, **options))
    length = c.shape[1]
    return out[:, length:], out[:, :length]


def forward_with_tables(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    *,
    equivalents_of: Callable[[Call, Tensor, Tensor], dict[str, Any]] = lambda *_: {},
    **kwargs,
) -> Tensor | tuple[Tensor, Tensor]:
    """The forward of an attention over an image, optionally with text before it. ``image_rotary_emb`` has the
    tables (cos, sin) of both. ``equivalents_of(call, x, mask)``: those of a mask, as arguments of
    ``attend``."""
    x, c, rope = hidden_states, encoder_hidden_states, image_rotary_emb
    if not kwargs.keys() <= _IP_ADAPTER_ARGUMENTS or (c is None) != (
        self.added_kv_proj_dim is None
    ):
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    options = {} if attention_mask is None else equivalents_of(call, x, attention_mask)
    if c is None:
        streams = project(call, self, x, None, rope, None)
        return attend_to_all(call, self, streams, rotate, attention_mask, **options)
    ropes = None
    if rope is not None:
        split = partial(split_tables, first=c.shape[1], second=x.shape[1])
        ropes = call.shared(("tables", c.shape[1], x.shape[1]), rope, split)
    options = {"is_text_first": True, "joint_rope": None if ropes else rope, **options}
    ropes = ropes[::-1] if ropes else (None, None)
    return run_joint_attention(call, self, x, c, ropes, rotate, attention_mask, **options)


flux_attention_spec = partial(
    AttentionSpec,
    forward=forward_with_tables,
    operations="qk_norm_rope",
    project="_get_qkv_projections",
)

"""Streams of tokens in a block: ``x = x + gate * branch(norm(x))``, several times.

A sum is computed in one pass with the norm after it: ``add`` notes it, ``norm`` computes both, ``x`` the sum
alone. ``end`` computes the last sum together with the first norm of the next block, if no code can run
between the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from ...operations.conditions import an
from ..core.adapters import is_adapted
from ..core.checks import (
    KnownClass,
    KnownClasses,
    class_name,
    has_hooks,
    is_stock,
    runs_class_forward,
    why_not_stock,
)
from ..core.patch import Call, Injection, PatchSpec, bare_stand_in
from ..core.quantized_rows import QuantizedRows, as_tensor
from ..quantized.fp8_linears import are_fp8
from .linears import FEED_FORWARDS, SILU, adapted_linear, linear, plain_weight
from .norms import (
    Modulator,
    Norm,
    Upcasts,
    gated_residual,
    norm_modulate,
    read_norm,
    residual_norm,
    scale_and_shift,
)

Rows = Sequence[Any]
# ``readers(block, x)``: the FP8 weights of the layers that read a norm of x; None if one does not take it
# quantized. See ``linears.fp8_readers``.
Readers = Callable[[Any, Tensor], Any]


class FirstNorm(NamedTuple):
    """The first norm of a stream in a block.

    Attributes:
        norm: its parameters.
        owner, name: its module is ``owner.name``.
        modulation: scale and shift of each result, in order.
        rows: all rows of the modulation, each (B, 1 or S, D).
        readers: see ``Readers``.
        block: the block.
    """

    norm: Norm
    owner: nn.Module
    name: str
    modulation: tuple[Modulator, ...]
    rows: Rows
    readers: Readers | None = None
    block: Any = None


# Reads the first norm of a stream: ``(call, block, previous_x, *conditions)``. ``previous_x`` is None for the
# block that is called. Then the result is a FirstNorm, or a function of the tokens that returns the norm's
# result and the rows. For the next block ``previous_x`` is the tokens of the block that is called. Then the
# result is a FirstNorm, or None if a part is not plain or is on another device.
FirstNorms = Sequence[Callable[..., Any]]


class Stream:
    """One stream of tokens in a block.

    Attributes:
        n: the first norm of the tokens; a list if there are several modulations. May be ``QuantizedRows``.
        rows: the rows of its modulation.
    """

    __slots__ = (
        "_block",
        "_call",
        "_conditions",
        "_pending",
        "_read",
        "_rounds_to",
        "_upcasts",
        "_x",
        "n",
        "rows",
    )

    def __init__(
        self, call: Call, block: Any, x: Tensor, read: Any = None, conditions: tuple[Any, ...] = ()
    ) -> None:
        self._call, self._block, self._x = call, block, x
        self._read, self._conditions = read, conditions
        spec: Any = call.stand_in.spec
        self._upcasts: Upcasts = spec.upcasts
        self._rounds_to: Callable[[Any], torch.dtype] | None = spec.rounds_to
        self._pending: Any = None  # a branch's result, its gate, and the rest of ``gated_residual``
        self.n: Any = None
        self.rows: Any = ()

    @property
    def x(self) -> Tensor:
        """The tokens."""
        if self._pending is not None:
            out, gate, branch = self._pending
            self._x = gated_residual(self._x, out, gate, self._upcasts, self._call, **branch)
            self._pending = None
        return self._x

    def add(
        self,
        out: Any,
        gate: Modulator = None,
        norm: str = "",
        tanh_gate: bool = False,
        addend: Tensor | None = None,
    ) -> None:
        """``x = x + gate * (out + addend)``. ``norm``: the name of a norm that is applied to the sum first.
        ``tanh_gate``: whether ``tanh(gate)`` takes the gate's place."""
        if self._pending is not None:
            self._x = self.x
        branch: dict[str, Any] = {"x_norm": (self._block, norm)} if norm else {}
        if tanh_gate:
            branch["tanh_gate"] = True
        if addend is not None:
            branch["addend"] = addend
        self._pending = out, gate, branch

    def norm(
        self, name: str, *modulation: Modulator, readers: Readers | None = None, owner: Any = None
    ) -> Any:
        """The norm ``block.name`` of the tokens, ``* (1 + scale) + shift`` for each pair of these. ``owner``:
        the module of the block that has the norm, if not the block."""
        call, block = self._call, self._block if owner is None else owner
        norm: Any = read_norm(block._modules.get(name), self._x.shape[-1], self._upcasts)
        if isinstance(norm, str):
            call.fall_back(f"{name} {norm}")
            norm = None
        return self._settled(norm, block, name, modulation, readers, block)

    def apply(self, first: Any) -> None:
        """Sets ``n`` and ``rows`` by what a function of ``FirstNorms`` returned."""
        if type(first) is not FirstNorm:
            self.n, self.rows = first(self.x)
        else:
            norm, owner, name, modulation, self.rows, readers, block = first
            self.n = self._settled(norm, owner, name, modulation, readers, block)

    def _settled(
        self, norm: Any, owner: Any, name: str, modulation: Any, readers: Readers | None, block: Any
    ) -> Any:
        """A norm of the tokens, in one pass with their pending sum. Parameters as those of ``FirstNorm``."""
        x, upcasts = self._x, self._upcasts
        weights = None if readers is None else readers(block, x)
        if self._pending is None:
            results: Any = norm_modulate(norm, owner, name, x, modulation, upcasts, weights)
        else:
            out, gate, branch = self._pending
            rounds_to = None if self._rounds_to is None else self._rounds_to(block)
            options = (modulation, upcasts, weights, branch, rounds_to)
            self._x, *results = residual_norm(self._call, norm, owner, name, x, out, gate, *options)
            self._pending = None
        return results[0] if len(results) == 1 else results


def start(
    call: Call,
    block: Any,
    first_norms: FirstNorms,
    tokens: tuple[Tensor, ...],
    conditions: tuple[Any, ...],
    addend: Tensor | None = None,
) -> list[Stream]:
    """The streams of a block, one for each function in ``first_norms``. If there is one function for several
    tokens, their concat, (B, S1 + S2, D), is the stream. The previous block may have computed the first
    norms. ``addend``: added to the first stream before its norm."""
    handed = None if call.state is None else take_over(call, block, (*tokens, *conditions))
    if len(first_norms) < len(tokens):
        concat = concat_view if handed is not None else partial(concat_streams, call)
        tokens = (concat(*tokens),)
    streams = []
    for i, x in enumerate(tokens):
        stream = Stream(call, block, x, first_norms[i], conditions)
        if handed is not None:
            stream.n, stream.rows = handed[i]
        else:
            if addend is not None:
                stream.add(addend)
            # Only now: the module of the stream before may have written to what this norm is made from.
            stream.apply(first_norms[i](call, block, None, *conditions))
        streams.append(stream)
    return streams


def take_over(call: Call, block: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """The values that the previous block computed for a call with the same argument objects, or None."""
    state = call.state
    if state is None:
        return None
    call.is_bare = bool(state.calls(block) and bare_stand_in(call.stand_in.spec, block))
    if not call.is_bare:
        state.distrust()  # hooks may have changed masks, or written to what was shared
    return state.take_over(block, arguments)


def end(
    *streams: Stream,
    hands_over: bool = True,
    as_returned: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple,
) -> Any:
    """The tokens of each stream, which are the block's results; of one stream alone.

    Each sum is computed with the stream's first norm in the next block, if both blocks are of the same kind
    and no code can run between them. ``as_returned`` converts the results to the block's return values, the
    next block's tokens.
    """
    call, block, conditions = streams[0]._call, streams[0]._block, streams[0]._conditions
    state, successor = call.state, None
    if state is not None and not call.is_bare:
        state.shared.clear()  # hooks may write to what it was made from
    elif state is not None and hands_over:
        successor = state.successor(block, call.stand_in.spec)
    if successor is not None:
        x, first, handed = streams[0]._x, [], []
        for stream in streams:  # a comprehension would be a function call before Python 3.12
            first.append(stream._read(call, successor, x, *conditions))
        if None in first:
            successor = None
        else:
            for stream, norm in zip(streams, first):
                stream.apply(norm)
                handed.append((stream.n, stream.rows))
    sums = []
    for stream in streams:
        sums.append(stream.x)
    results = as_returned(sums)
    if successor is not None:
        state.hand_over(successor, (*results, *conditions), handed)
    return results[0] if len(results) == 1 else results


def concat_streams(call: Call, first: Any, second: Any) -> Any:
    """Both (B, S1 or S2, D) as one (B, S1 + S2, D): a view if they are adjacent in one buffer, such as the
    slices of the previous block's joint result. They may be quantized for the same layers."""
    if type(first) is type(second) is QuantizedRows:
        values = concat_streams(call, first.values, second.values)
        scale = concat_streams(call, first.scale, second.scale)
        return QuantizedRows(values, scale, first.dtype, first.weights)
    if call.state is not None and _are_adjacent(first, second):
        return concat_view(first, second)
    return torch.cat([as_tensor(first), as_tensor(second)], dim=1)


def concat_view(first: Tensor, second: Tensor) -> Tensor:
    shape = (first.shape[0], first.shape[1] + second.shape[1], first.shape[2])
    return first.as_strided(shape, first.stride())


def _are_adjacent(first: Tensor, second: Tensor) -> bool:
    return (
        type(first) is type(second) is Tensor
        and first.dtype == second.dtype
        and first.device == second.device
        and not first.is_meta
        and first.shape[0] == second.shape[0]
        and first.shape[2] == second.shape[2]
        and first.stride() == second.stride()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + first.shape[1] * first.stride(1)
    )


# --------------------------------------------------------------------------------------------------
# First norms


def plain_norm(
    call: Call,
    block: Any,
    previous_x: Tensor | None,
    *conditions: Any,
    name: str,
    rows_of: Callable[..., Rows] | None = None,
    readers: Readers | None = None,
) -> Any:
    """The norm ``block.name``. ``rows_of(*conditions)``: rows of which the first two are shift and scale."""
    upcasts = call.stand_in.spec.upcasts  # type: ignore[attr-defined]
    norm = read_norm(block._modules.get(name), None, upcasts)
    if isinstance(norm, str):
        if previous_x is not None:
            return None
        call.fall_back(f"{name} {norm}")

        def run_module(x: Tensor) -> tuple[Any, Rows]:
            n = getattr(block, name)(x.float() if upcasts is Upcasts.TO_NEXT_LINEAR else x)
            # Only now: the module may write to what they are made from.
            rows = () if rows_of is None else rows_of(*conditions)
            n = scale_and_shift(n, rows[1], rows[0]) if rows else n
            return n.to(x.dtype) if upcasts is Upcasts.TO_NEXT_LINEAR else n, rows

        return run_module
    weight = norm[1][0]
    if previous_x is not None and weight is not None and weight.device != previous_x.device:
        return None
    rows = () if rows_of is None else rows_of(*conditions)
    modulation = (rows[1], rows[0]) if rows else ()
    return FirstNorm(norm, block, name, modulation, rows, readers, block)


# --------------------------------------------------------------------------------------------------
# Modulation

# Adaptive norms: the class, the number of rows of its modulation, the rows of scale and shift of each result
# (None for no shift), and the names of its norms, if they are not one with the name "norm". Families add
# theirs.
_PATH = "diffusers.models.normalization:"
ADAPTIVE = KnownClasses(
    (KnownClass(_PATH + "AdaLayerNormZero"), 6, (1, 0)),
    (KnownClass(_PATH + "AdaLayerNormZeroSingle"), 3, (1, 0)),
    (KnownClass(_PATH + "AdaLayerNormContinuous"), 2, (0, 1)),
)
_SEQUENTIAL = KnownClass("torch.nn:Sequential")


def read_adaptive(module: Any) -> tuple[int, tuple[Any, ...], Norm] | str:
    """Number of rows, row indices and first norm of an adaptive norm, or why the kernels cannot replace the
    module, as a clause."""
    entry = ADAPTIVE.by_class.get(type(module))
    if entry is None:
        return f"is {an(class_name(module))}"
    known, count, places, *names = entry
    if not is_stock(module, known):
        return why_not_stock(module, known)
    modules = module._modules
    if module.__dict__.get("emb", modules.get("emb")) is not None:
        return "computes its time embedding itself"
    activation = modules.get("silu", modules.get("activation", SILU))
    # Chroma's norms, which are given their modulation, and CogView4's have none.
    if activation is not SILU and not is_stock(activation, SILU):
        return "has an activation other than SiLU"
    norm: Any = None
    for name in reversed(names or ("norm",)):
        norm = read_norm(modules.get(name))
        if isinstance(norm, str):
            return f"has a norm that {norm}"
    return count, places, norm


def adaptive_norm(
    call: Call,
    block: Any,
    previous_x: Tensor | None,
    *conditions: Any,
    name: str,
    takes_emb: bool = True,
    modulation_of: Callable[..., Tensor | None] | None = None,
    readers: Readers | None = None,
) -> Any:
    """The adaptive norm ``block.name``.

    ``takes_emb``: whether the model passes the one condition as ``emb``. ``modulation_of(call, module,
    previous_x, *conditions)``: all rows, (B, N * D) or (B, S, N * D), or None if they cannot be computed
    before the block's call; by default the module's linear layer of SiLU.
    """
    module = block._modules[name]
    found = read_adaptive(module)
    if isinstance(found, str):
        if previous_x is not None:
            return None
        call.fall_back(f"{name} {found}")
        if call.state is not None:
            call.state.shared.clear()  # the module may write to what it was made from

        def run_module(x: Tensor) -> tuple[Any, Rows]:
            """Replaces the rows of scale and shift by the norm's results."""
            made = module(x, emb=conditions[0]) if takes_emb else module(x, *conditions)
            normalized, *results = made if isinstance(made, tuple) else (made,)
            rows = [r.unsqueeze(1) if r.dim() == 2 else r for r in results]
            if len(rows) == 6:  # of SD35AdaLayerNormZeroX
                *rows, second, last = rows
                return (normalized, second), (None, None, *rows, None, None, last)
            return normalized, (None, None, *rows)

        return run_module
    count, places, norm = found
    if modulation_of is None:
        (temb,) = conditions
        modulation = linear_of_silu(call, module._modules["linear"], temb, previous_x)
    else:
        modulation = modulation_of(call, module, previous_x, *conditions)
    if modulation is None:
        return None
    modulation = modulation.unsqueeze(1) if modulation.dim() == 2 else modulation
    rows = modulation.chunk(count, 2)
    operands = tuple([None if place is None else rows[place] for place in places])
    return FirstNorm(norm, module, "norm", operands, rows, readers, block)


def linear_of_silu(
    call: Call, layer: Any, temb: Tensor, previous_x: Tensor | None, name: Any = "silu"
) -> Tensor | None:
    """``layer(silu(temb))``; ``previous_x`` as in ``FirstNorms``. Blocks share the SiLU under ``name``."""
    if is_adapted(layer) and (previous_x is None or previous_x.device == temb.device):
        result = adapted_linear(layer, call.shared(name, temb, torch.nn.functional.silu))
        if result is not None:
            return result
    plain = plain_weight(layer)
    if plain is None:
        if previous_x is not None and not may_run_ahead(layer, previous_x):
            return None
        if are_fp8(layer):
            return linear(layer, call.shared(name, temb, torch.nn.functional.silu))
        return layer(torch.nn.functional.silu(temb))  # not shared: the layer may write to it
    if previous_x is not None and plain[0].device != previous_x.device:
        return None
    activated = call.shared(name, temb, torch.nn.functional.silu)
    return torch.nn.functional.linear(activated, *plain)


def may_run_ahead(layer: Any, x: Tensor) -> bool:
    """Whether a layer may run before its block: it has no hooks (as for offloading) and is on x's device."""
    return all(
        runs_class_forward(module)
        and not has_hooks(module)
        and all(p is None or p.device == x.device for p in module._parameters.values())
        for module in layer.modules()
    )


def linear_alone(module: Any, x: Tensor) -> Tensor:
    """The result of a ``torch.nn.Sequential`` of one linear layer."""
    if is_stock(module, _SEQUENTIAL) and len(module._modules) == 1:
        (layer,) = module._modules.values()
        return linear(layer, x)
    return module(x)


def linear_modulation(
    call: Call, module: Any, temb: Tensor, previous_x: Tensor | None, name: str = "silu"
) -> Tensor | None:
    """The result of a ``torch.nn.Sequential(SiLU, Linear)`` for a time embedding; ``previous_x`` as in
    ``FirstNorms``. Blocks share the SiLU under ``name``."""
    if is_stock(module, _SEQUENTIAL) and len(module._modules) == 2:
        activation, layer = module._modules.values()
        if is_stock(activation, SILU):
            return linear_of_silu(call, layer, temb, previous_x, name)
    return None if previous_x is not None else module(temb)


def table_norm(
    call: Call,
    block: Any,
    previous_x: Tensor | None,
    temb: Tensor,
    by_row: Callable[[Tensor], Tensor] = lambda temb: temb.unflatten(2, (6, -1)),
    scale_first: bool = False,
    in_float32: bool = False,
    readers: Readers | None = None,
) -> Any:
    """The norm ``norm1`` with a modulation that is the block's table ``scale_shift_table``, (N, D) or
    (1, N, D), plus a time embedding.

    ``by_row`` converts the embedding to (B, 1 or S, N, D), which the blocks share. Rows are shift, scale and
    N - 2 more, each (B, 1 or S, D), in the dtype of the sum. ``scale_first``: the model's order of these two.
    ``in_float32``: whether the model adds the embedding in float32.
    """
    table = block.scale_shift_table
    table = table.float() if in_float32 else table
    if previous_x is not None and table.device != previous_x.device:
        return None

    def rows_of() -> Rows:
        rows = table_rows(table, call.shared("embedding", temb, by_row))
        return (rows[1], rows[0], *rows[2:]) if scale_first else rows

    return plain_norm(call, block, previous_x, name="norm1", rows_of=rows_of, readers=readers)


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


# The names of a block's attentions and feed-forwards.
_INNER = re.compile(r"(?!proj_|act_).*(attn\d?|attention|ffn?|mlp|feed_forward)(_context)?")


@dataclass(frozen=True, eq=False)
class BlockSpec(PatchSpec):
    """A transformer block.

    Attributes:
        upcasts: how far the model's own code computes in float32; see ``norms.Upcasts``.
        rounds_to: the dtype to which a block rounds its norms, if its tokens may have another.
    """

    operations: str = ""
    upcasts: Upcasts = Upcasts.NOWHERE
    rounds_to: Callable[[Any], torch.dtype] | None = None

    def _norms(self, block: nn.Module) -> Iterator[tuple[str, Any]]:
        """Each norm of a block: its name, and its parameters or why the kernels cannot replace it."""
        for name, child in block._modules.items():
            is_norm = "norm" in name or name.endswith("_ln")
            if child is not None and is_norm and name != "norm_out":
                is_adaptive = type(child) in ADAPTIVE.by_class
                yield (
                    name,
                    read_adaptive(child) if is_adaptive else read_norm(child, upcasts=self.upcasts),
                )

    def notes(self, module: nn.Module, injection: Injection) -> list[str]:
        return [f"{name} {norm}" for name, norm in self._norms(module) if isinstance(norm, str)]

    def describe(self, module: nn.Module, injection: Injection) -> str:
        norms = [norm for _, norm in self._norms(module) if not isinstance(norm, str)]
        if self.operations or not norms:
            return self.operations or "gated_residual"
        kind = norms[0][2][0] if isinstance(norms[0][0], int) else norms[0][0]
        return f"{kind}_norm_modulate, gated_residual_{kind}_norm_modulate, gated_residual"

    def inner(self, module: nn.Module) -> Iterator[str]:
        for name, child in module._modules.items():
            if child is not None and _INNER.fullmatch(name):
                activation = next((n for n in ("net", "linear_in") if n in child._modules), None)
                if activation is None and type(child) in FEED_FORWARDS.by_class:
                    continue  # the block computes all of it
                last = {None: "", "net": ".net.0", "linear_in": ".act_fn"}[activation]
                yield f"{name}{last}"

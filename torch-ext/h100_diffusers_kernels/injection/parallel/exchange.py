"""Attention over tokens that ranks share (context parallelism of diffusers).

Each rank has the queries, keys and values of its own tokens, (B, S, H, d). With Ulysses (Jacobs et al., 2023,
https://arxiv.org/abs/2309.14509) an all-to-all gives each rank all tokens of some heads, and another one
brings the results back. With a ring each rank gathers the keys and values of all tokens. Both can be combined
(Fang and Zhao, 2024, https://arxiv.org/abs/2405.07719). Attention then runs once, over all keys, so there are
no partial results to merge. Masks are gathered with the keys. A query that attends to fewer keys than it
would cost to move, such as those of a text, stays where it is: the keys are gathered.

Ranks must call the same collectives. So what is called depends only on what all ranks have in common: the
configuration, and the lengths of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from ...operations.conditions import is_differentiated, may_write, tracks_derivatives
from ..core.patch import Call, ThreadValue
from .groups import host_group
from .peer_memory import PeerMemory, peer_memory

# Attention of (B, S, H, d) with a bias (B, Sk) of keys, which may write its result to ``out``.
LocalAttention = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]


def config_of(parallel_config: Any) -> Any:
    """The context parallelism of a ``ParallelConfig``, or None."""
    return getattr(parallel_config, "context_parallel_config", None)


def config_of_model(model: Any) -> Any:
    """The context parallelism that ``enable_parallelism`` set on a model, or None."""
    return config_of(getattr(model, "_parallel_config", None))


class Meanwhile:
    """Computes ``function()`` within ``with``, while the tensors of this thread's next attention are on their
    way to other ranks; at once if there are none.

    Attributes:
        result: of the function, after ``with``.
    """

    def __init__(self, call: Call, function: Callable[[], Any]) -> None:
        self.result: Any = None
        self._function: Callable[[], Any] | None = function
        self._outer: Any = None
        self._may_wait = not torch.compiler.is_compiling() and (
            config_of_model(call.stand_in.injection.model()) is not None
        )
        if not self._may_wait:
            self.compute()

    def compute(self) -> None:
        if self._function is not None:
            function, self._function = self._function, None
            self.result = function()

    def __enter__(self) -> Meanwhile:
        if self._may_wait:
            self._outer, _meanwhile.value = _meanwhile.value, self
        return self

    def __exit__(self, *error: object) -> None:
        if self._may_wait:
            _meanwhile.value = self._outer
            if error[0] is None:
                self.compute()


_meanwhile = ThreadValue()


def wire_empty(config: Any, x: Tensor, size: int, heads: int, length: int | None = None) -> Tensor:
    """An empty tensor (B, S, C, H / C, d) for a query, key or value of size H * d of x (B, S, ...). In memory
    the heads of each of the C ranks lie together, as the all-to-all sends them. ``length``: S if not x's."""
    ranks = config.ulysses_degree if heads % config.ulysses_degree == 0 else 1
    length = x.shape[1] if length is None else length
    shape = (ranks, length, x.shape[0], heads // ranks, size // heads)
    return x.new_empty(shape).permute(2, 1, 0, 3, 4)


def attend_in_parallel(
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Any,
    bias: Tensor | None,
    attention: LocalAttention,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, (B, Sq, H, d).

    Args:
        config: the ``ContextParallelConfig``, set up.
        query, key, value: (B, S, H, d), or (B, S, C, H / C, d) of ``wire_empty``, which saves a copy. Key
            and value may have fewer heads. The value may be a function that computes it, while query and key
            are on their way.
        bias: (B, Sk) of this rank's keys, added to the scores; or None.
        attention: computes one attention.
        out: where to write the result, (B, Sq, H, d), or None.

    Raises:
        ValueError: if the heads cannot be shared, or the bias has another length.
    """
    lengths = _lengths_of_ranks(config, query.shape[1], key.shape[1])
    query_lengths, key_lengths = zip(*lengths)
    if bias is not None and bias.shape[1] != key.shape[1]:
        raise ValueError(
            f"context parallelism: a mask must be of this rank's {key.shape[1]} keys, got one of "
            f"{bias.shape[1]}"
        )
    everyone, heads = config._flattened_mesh.get_group(), math.prod(query.shape[2:-1])
    exchanges_heads = config.ulysses_degree > 1 and sum(key_lengths) > min(query_lengths)
    may_copy = _are_equal(lengths) and not (tracks_derivatives() or torch.compiler.is_compiling())
    peers = None
    if config.ulysses_degree > 1 and may_copy:
        peers = peer_memory(config, query.device)
    gathering_peers = peers if config.ring_degree == 1 else None  # those of Ulysses are all ranks
    receive_bias = None
    if bias is not None:
        receive_bias = _gather(bias.float().t(), everyone, key_lengths, gathering_peers, "bias")
    if exchanges_heads:
        receive_query = _send_heads(config, query, query_lengths, heads, peers, "query")
        receive_key = _send_heads(config, key, key_lengths, heads, peers, "key")
        value = _computed(value)
        receive_value = _send_heads(config, value, key_lengths, heads, peers, "value")
        if _meanwhile.value is not None:
            _meanwhile.value.compute()
        if peers is not None:
            peers.wait()
        query, key, value = receive_query(), receive_key(), receive_value()
    if not exchanges_heads or config.ring_degree > 1:
        group = config._ring_mesh.get_group() if exchanges_heads else everyone
        of_group = (group, key_lengths, gathering_peers)
        receive_key = _gather(_tokens_first(key), *of_group, "all keys")
        receive_value = _gather(_tokens_first(_computed(value)), *of_group, "all values")
        if gathering_peers is not None:
            gathering_peers.wait()
        key, value = (receive().transpose(0, 1) for receive in (receive_key, receive_value))
    if receive_bias is not None:
        bias = receive_bias().t().contiguous()
    if not exchanges_heads:
        query = query.flatten(2, -2) if query.dim() == 5 else query
        return attention(query, key, value, bias, out)
    result = None
    if not is_differentiated(query, key, value):
        result = torch.empty_like(query.transpose(0, 1)).transpose(0, 1)
    result = attention(query, key, value, bias, result)
    return _joined(_send_back(config, result, query_lengths, peers), heads, out)


def _computed(value: Tensor | Callable[[], Tensor]) -> Tensor:
    return value() if callable(value) else value


def _tokens_first(x: Tensor) -> Tensor:
    """(B, S, H, d) or (B, S, C, H / C, d) as (S, B, H, d)."""
    return (x.flatten(2, -2) if x.dim() == 5 else x).transpose(0, 1)


def rank_and_size(config: Any) -> tuple[int, int]:
    """This rank among those that share the tokens, and their number."""
    group = config._flattened_mesh.get_group()
    return dist.get_rank(group), dist.get_world_size(group)


def mask_of_rank(config: Any, mask: Tensor, *lengths: int) -> Tensor:
    """This rank's part of a mask (..., S) of all ranks' streams, one stream after the other. ``lengths``: of
    this rank's part of each stream."""
    if mask.shape[-1] == sum(lengths):
        return mask
    rank, _ = rank_and_size(config)
    parts, begin = [], 0
    for each in zip(*_lengths_of_ranks(config, *lengths)):
        first = begin + sum(each[:rank])
        parts.append(mask[..., first : first + each[rank]])
        begin += sum(each)
    return torch.cat(parts, dim=-1)


# --------------------------------------------------------------------------------------------------
# Collectives


def _lengths_of_ranks(config: Any, *lengths: int) -> Sequence[Sequence[int]]:
    """For each rank, these lengths of its tensors."""
    group = config._flattened_mesh.get_group()
    if not (getattr(config, "ulysses_anything", False) or getattr(config, "ring_anything", False)):
        return [lengths] * dist.get_world_size(group)
    return host_group(group).gather(*lengths)


def received(x: Tensor) -> Tensor:
    """The tensor, after the collective that gives it."""
    return x.wait() if isinstance(x, funcol.AsyncCollectiveTensor) else x


def _are_equal(lengths: Sequence[Any]) -> bool:
    return all(length == lengths[0] for length in lengths)


def _all_to_all(x: Tensor, group: Any, lengths: Sequence[int], is_back: bool = False) -> Tensor:
    """All-to-all of x's first dimension: this rank's tokens to each rank, or back."""
    get: list[int] | None = None  # equal sizes
    give: list[int] | None = None
    if not _are_equal(lengths):
        get, give = [*lengths], [lengths[dist.get_rank(group)]] * len(lengths)
        get, give = (give, get) if is_back else (get, give)
    if is_differentiated(x):
        return funcol.all_to_all_single_autograd(x, get, give, group)
    return funcol.all_to_all_single(x, get, give, group)


def _all_gather(x: Tensor, group: Any) -> Tensor:
    """All-gather along x's first dimension."""
    ending = "_autograd" if is_differentiated(x) else ""
    renamed = getattr(funcol, f"all_gather_single{ending}", None)  # in later versions of Torch
    gather = renamed or getattr(funcol, f"all_gather_tensor{ending}")
    gathered = gather(x, 0, group)
    # Gloo's all-gather corrupts memory while other collectives are in flight (Torch 2.13).
    return received(gathered) if x.device.type == "cpu" else gathered


def _send_heads(
    config: Any,
    x: Tensor,
    lengths: Sequence[int],
    query_heads: int,
    peers: PeerMemory | None,
    name: str,
) -> Callable[[], Tensor]:
    """Sends x (B, S of this rank, H, d), and returns a function that waits for (B, S of all ranks, H of this
    rank, d). Fewer heads than the query's are repeated if ranks cannot share them. ``name``: of the buffer in
    the memory of ``peers``, which the caller waits for."""
    size = config.ulysses_degree
    if x.dim() == 5 and x.shape[2] == 1:
        x = x.squeeze(2)
    if x.dim() == 4:
        if x.shape[2] != query_heads and x.shape[2] % size:
            x = x.repeat_interleave(query_heads // x.shape[2], dim=2)
        heads = x.shape[2]
        if heads % size:
            if not getattr(config, "ulysses_anything", False):
                raise ValueError(
                    f"context parallelism: ulysses_degree={size} must divide the number of heads, got "
                    f"{heads}; ulysses_anything=True takes any"
                )
            x = torch.nn.functional.pad(x, (0, 0, 0, -heads % size))
        x = x.unflatten(2, (size, -1))
    sent = _contiguous(x.permute(2, 1, 0, 3, 4))
    if peers is not None:
        buffer = peers.send(name, sent)
        return lambda: buffer.flatten(0, 1).transpose(0, 1)
    arriving = _all_to_all(sent.flatten(0, 1), config._ulysses_mesh.get_group(), lengths)
    return lambda: received(arriving).transpose(0, 1)


def _send_back(config: Any, x: Tensor, lengths: Sequence[int], peers: PeerMemory | None) -> Tensor:
    """From (B, S of all ranks, H of this rank, d) to (B, S of this rank, C, H of a rank, d)."""
    sent = x.transpose(0, 1).contiguous()
    if peers is not None:
        back = peers.send("result", sent.unflatten(0, (config.ulysses_degree, -1)))
        peers.wait()
    else:
        group = config._ulysses_mesh.get_group()
        back = received(_all_to_all(sent, group, lengths, is_back=True))
        back = back.unflatten(0, (config.ulysses_degree, -1))
    return back.permute(2, 1, 0, 3, 4)


def _joined(x: Tensor, heads: int, out: Tensor | None) -> Tensor:
    """A copy of x (B, S, C, H / C, d) as (B, S, H, d), of the first ``heads``, in ``out`` if given."""
    chunks = x.shape[2:4]
    if not may_write() or is_differentiated(x) or heads != math.prod(chunks):
        joined = x.flatten(2, 3)[:, :, :heads]
        return joined if out is None else out.copy_(joined)
    if out is None:
        out = x.new_empty((*x.shape[:2], heads, x.shape[4]))
    _copy(out.unflatten(2, chunks), x)
    return out


def _contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous() or not may_write() or is_differentiated(x):
        return x.contiguous()
    copied = torch.empty_like(x, memory_format=torch.contiguous_format)
    _copy(copied, x)
    return copied


def _copy(target: Tensor, x: Tensor) -> None:
    """Copies x, in 16 bytes at a time if possible: a copy that reorders dimensions takes half the time."""
    for each in (target, x):
        size = each.element_size()
        places = each.data_ptr(), *[size * n for n in (*each.stride()[:-1], each.shape[-1])]
        if each.stride(-1) != 1 or any(place % 16 for place in places):
            target.copy_(x)
            return
    target.view(torch.complex128).copy_(x.view(torch.complex128))


def _gather(
    x: Tensor, group: Any, lengths: Sequence[int], peers: PeerMemory | None, name: str
) -> Callable[[], Tensor]:
    """Sends x (S of this rank, ...), and returns a function that waits for (S of all ranks, ...). ``peers``,
    ``name``: see ``_send_heads``."""
    if peers is not None:
        buffer = peers.gather(name, x)
        return lambda: buffer.flatten(0, 1)
    is_padded = not _are_equal(lengths)
    if is_padded:
        x = torch.cat([x, x.new_zeros((max(lengths) - x.shape[0], *x.shape[1:]))])
    gathered = _all_gather(x.contiguous(), group)

    def receive() -> Tensor:
        whole = received(gathered)
        if not is_padded:
            return whole
        each = whole.chunk(len(lengths))
        return torch.cat([part[:length] for part, length in zip(each, lengths)])

    return receive

"""enable_guidance_parallelism."""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..operations.calls import PLAIN_TYPES
from ..operations.conditions import an, tracks_derivatives
from .core.patch import Around, forward_slots
from .parallel.pending import Dealer, group_of, layout_of

_CALLER = "enable_guidance_parallelism"
_CONSTANTS = (type(None), bool, int, str, torch.dtype, torch.device)
_MAX_KINDS = 64
# Arguments that all samples share: tables of rotary embeddings, coordinates (tokens, axes), and indices (n).
_TABLES = re.compile("rotary|rope|freqs")
_COORDINATES = re.compile("^(img|txt|image_cond|position)_ids$")
_INDICES = re.compile("indices|^token_tags$")
# Text of several layers of an encoder, whose samples are in the second dimension.
_TEXTS_BY_LAYER = re.compile("_llama3$")
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def enable_guidance_parallelism(model: nn.Module, group: Any = None) -> None:
    """Computes the branches of guidance on several GPUs, one on each.

    All ranks run the same pipeline with the same inputs, and get all results. If the pipeline stacks the
    branches in one batch, each rank computes its share of the batch. If it calls the model once for each
    branch, or if the ranks cannot share the batch, each rank computes every n-th call, and receives the
    results of the others when the pipeline uses them. All ranks compute the first call of each kind, and
    calls that may be differentiated or that torch.compile traces.

    It may come before or after :func:`inject_kernels` and ``enable_parallelism``. The group should have as
    many ranks as there are branches, mostly 2.

    Args:
        model: the denoising model.
        group: the process group of the ranks that share the branches, or its mesh of one dimension. None is
            the default group.

    Raises:
        TypeError: if ``model`` is not a ``torch.nn.Module``.
        ValueError: if this rank is not in the group.
        RuntimeError: if torch.distributed is not initialized, if ranks share the branches already, or if
            they also share tokens or weights by ``enable_parallelism``. The next call may raise this, too.

    Example::

        kernel.enable_guidance_parallelism(pipe.transformer)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{_CALLER}: model must be a torch.nn.Module, got {an(type(model).__name__)}"
        )
    group = group_of(_CALLER, group)
    if any(isinstance(value, _SharedForward) for *_, value in forward_slots(model)):
        raise RuntimeError(f"{_CALLER}: ranks share the branches of this model already")
    forward = _SharedForward(model, model.forward, group)
    forward.check_ranks()
    model.forward = forward


class _NotShared(Exception):
    """Ranks cannot share the batch of a call."""


class _SharedForward(Around):
    """The forward of a model whose calls ranks share, around ``forward``."""

    def __init__(self, model: nn.Module, forward: Any, group: Any) -> None:
        self.model, self.forward, self.dealer = model, forward, Dealer(group)
        # A hook's wrapper may show the signature with `self`.
        of_class = inspect.signature(type(model).forward)
        parameters = [*of_class.parameters.values()][1:]
        self.__signature__ = of_class.replace(parameters=parameters)
        self._names = [parameter.name for parameter in parameters]
        # Of each kind of calls: whether ranks share the batch, and leaves and structure of the result, with
        # layout and device of tensors. None if all ranks compute all.
        self._kinds: dict[Hashable, tuple[bool, list[Any], Any] | None] = {}

    def __deepcopy__(self, memo: dict) -> _SharedForward:
        copied = deepcopy(self.model, memo), deepcopy(self.forward, memo)
        return _SharedForward(*copied, self.dealer.group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind: Hashable = None
        if not (torch.compiler.is_compiling() or tracks_derivatives()):
            self.check_ranks()
            kind = _kind_of(args, kwargs)
        known = self._kinds.get(kind)
        if known is not None and known[0]:
            return self._split(args, kwargs)
        owner = None if known is None else self.dealer.next_owner()
        is_computed = owner is None or owner == self.dealer.rank
        result = self.forward(*args, **kwargs) if is_computed else None
        if kind is not None and kind not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            known = self._kinds[kind] = self._describe(args, kwargs, result)
            if known is not None and not known[0]:
                self.dealer.next_owner()  # later calls of this branch are that rank's
        if known is None or known[0]:
            return result
        _, leaves, spec = known
        values = tree_leaves(result) if is_computed else [None] * len(leaves)
        made = [
            self.dealer.add(value, owner, *leaf) if isinstance(leaf, tuple) else leaf
            for leaf, value in zip(leaves, values)
        ]
        return tree_unflatten(made, spec)

    def check_ranks(self) -> None:
        """Raises RuntimeError if ranks that compute one branch together share branches, too."""
        config: Any = getattr(self.model, "_parallel_config", None)
        if config is None:
            return
        of_tokens, of_weights = config.context_parallel_config, config.tensor_parallel_config
        mesh = of_weights._mesh if of_tokens is None else of_tokens._flattened_mesh
        together = {*dist.get_process_group_ranks(mesh.get_group())}
        if len(together.intersection(dist.get_process_group_ranks(self.dealer.group))) > 1:
            sentence = (
                "group must be other ranks than those of enable_parallelism, of the same mesh"
            )
            raise RuntimeError(f"{_CALLER}: {sentence}")

    def _describe(self, args: Any, kwargs: Any, result: Any) -> tuple[bool, list[Any], Any] | None:
        leaves, spec = tree_flatten(result)
        if not all(type(leaf) in PLAIN_TYPES or isinstance(leaf, _CONSTANTS) for leaf in leaves):
            return None
        try:
            share = self._share_of(args, kwargs)
            share.arguments(args, kwargs)
            is_split = all(map(share.can_gather, tree_leaves(result, share.is_leaf)))
        except _NotShared:
            is_split = False
        made = [(layout_of(x), x.device) if isinstance(x, Tensor) else x for x in leaves]
        return is_split, made, spec

    def _share_of(self, args: Any, kwargs: Any) -> _Share:
        main, are_lists = args[0] if args else kwargs.get(self._names[0]), False
        if isinstance(main, list):
            shapes = [[getattr(x, "shape", None) for x in tree_leaves(each)] for each in main]
            are_lists = all(each == shapes[0] for each in shapes)
        is_batch = are_lists or (isinstance(main, Tensor) and main.dim() > 1)
        count, rest = divmod(len(main) if is_batch else 0, self.dealer.size)
        if rest or not count:
            raise _NotShared
        part = slice(self.dealer.rank * count, (self.dealer.rank + 1) * count)
        return _Share(len(main), part, are_lists, self._names)

    def _split(self, args: Any, kwargs: Any) -> Any:
        share = self._share_of(args, kwargs)
        args, kwargs = share.arguments(args, kwargs)
        leaves, spec = tree_flatten(self.forward(*args, **kwargs), share.is_leaf)
        return tree_unflatten([*map(self._gather, leaves)], spec)

    def _gather(self, x: Any) -> Any:
        if isinstance(x, list):
            return [*self._gather(torch.stack(x))]
        if not isinstance(x, Tensor):
            return x
        gathered = x.new_empty((self.dealer.size * x.shape[0], *x.shape[1:]))
        _all_gather(gathered, x.contiguous(), group=self.dealer.group)
        return gathered


def _kind_of(args: Any, kwargs: Any) -> Hashable:
    """Calls of a kind differ in the values of tensors and floats only. None if an argument is another object,
    which the call may change."""
    leaves, spec = tree_flatten((args, kwargs))
    kind: list[Hashable] = [spec]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kind.append((leaf.shape, leaf.dtype, leaf.device))
        elif type(leaf) is float or isinstance(leaf, _CONSTANTS):
            kind.append((type(leaf), None if type(leaf) is float else leaf))
        else:
            return None
    return tuple(kind)


class _Share(NamedTuple):
    """One rank's ``part`` of a batch. ``are_lists``: whether the model takes and returns samples in lists."""

    batch: int
    part: slice
    are_lists: bool
    names: list[str]

    def is_leaf(self, x: Any) -> bool:
        return self.are_lists and isinstance(x, list)

    def can_gather(self, x: Any) -> bool:
        if self.are_lists:
            return isinstance(x, list) and len(x) == self.batch and len({y.shape for y in x}) == 1
        return not isinstance(x, Tensor) or (x.dim() > 0 and x.shape[0] % self.batch == 0)

    def arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments for these samples. Raises _NotShared if that is not clear."""
        # Time steps that indices refer to are not those of samples.
        whole = {"timestep"} if kwargs.get("timestep_indices") is not None else set()
        named = {name: x if name in whole else self._of(name, x) for name, x in kwargs.items()}
        return [self._of(name, x) for name, x in zip(self.names, args)], named

    def _of(self, name: str, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._of_tensor(name, x)
        if isinstance(x, dict):
            if not all(isinstance(k, str) or isinstance(v, Tensor) for k, v in x.items()):
                raise _NotShared  # keys may be numbers of samples
            return {k: self._of(k if isinstance(k, str) else name, v) for k, v in x.items()}
        if isinstance(x, list) and len(x) == self.batch:
            has_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))
            if self.are_lists or (not has_tensors and all(each == x[0] for each in x)):
                return x[self.part]
            if not has_tensors:
                raise _NotShared
        return type(x)(self._of(name, each) for each in x) if type(x) in (list, tuple) else x

    def _of_tensor(self, name: str, x: Tensor) -> Tensor:
        if _TEXTS_BY_LAYER.search(name) and x.dim() == 4 and x.shape[1] == self.batch:
            return x[:, self.part]
        is_batched = x.dim() > 0 and x.shape[0] == self.batch
        is_table = _TABLES.search(name) is not None
        if (
            (is_table and (x.dim() <= 2 or not is_batched))
            or (_COORDINATES.search(name) and x.dim() == 2 and x.shape[1] <= 4)
            or (_INDICES.search(name) and x.dim() == 1)
            or x.dim() == 0
            or (x.shape[0] == 1 and self.batch > 1)
        ):
            return x
        if is_table or not is_batched:
            raise _NotShared
        return x[self.part]

"""Outlier channels in the inputs of blocks' linear layers, as trained models have them.

In each input, one channel of CHANNELS is FACTORS times as large as the others. What makes the input is scaled
by the factor: the scale of a modulation, or rows of the layer before. The columns that read it are divided by
the factor, so the float32 model stays nearly the same, and its distances differ by what outliers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

CHANNELS, FACTORS = 256, (20.0, 100.0)


def _projections(attention: str, prefix: str = "to_", suffix: str = "") -> tuple[str, ...]:
    return tuple(f"{attention}.{prefix}{name}{suffix}" for name in "qkv")


_OF_TEXT = _projections("attn", "add_", "_proj")
# What modulates in a block, which of its vectors is the scale, and the layers that read the result.
# The vectors are shift, scale and gate of attention, then those of the feed-forward.
_MODULATED = (
    ("scale_shift_table", 1, _projections("attn1")),
    ("scale_shift_table", 4, ("ff.net.0.proj", "ffn.net.0.proj")),
    ("norm.linear.bias", 1, (*_projections("attn"), "proj_mlp")),
    ("norm1.linear.bias", 1, _projections("attn")),
    ("norm1.linear.bias", 4, ("ff.net.0.proj",)),
    ("norm1_context.linear.bias", 1, _OF_TEXT),
    ("norm1_context.linear.bias", 4, ("ff_context.net.0.proj",)),
    ("img_mod.1.bias", 1, _projections("attn")),
    ("img_mod.1.bias", 4, ("img_mlp.net.0.proj",)),
    ("txt_mod.1.bias", 1, _OF_TEXT),
    ("txt_mod.1.bias", 4, ("txt_mlp.net.0.proj",)),
)
# Layers that make values of attention, and the layers whose first columns read attention's result.
_ATTENTIONS = (
    (("attn.to_v", "attn.add_v_proj"), ("attn.to_out.0", "attn.to_add_out", "proj_out")),
    *(((f"{name}.to_v",), (f"{name}.to_out.0",)) for name in ("attn1", "attn2")),
)
# First layers of feed-forwards, and the layers whose last columns read the activation's result.
_FEED_FORWARDS = (
    *((f"{name}.net.0.proj", f"{name}.net.2") for name in ("ff", "ffn", "ff_context")),
    *((f"{name}.net.0.proj", f"{name}.net.2") for name in ("img_mlp", "txt_mlp")),
    ("proj_mlp", "proj_out"),
)


class Link(NamedTuple):
    """Views of weights that make one input, (channels,) or (channels, ...), and of those that read it,
    (outputs, channels)."""

    scales: list[Tensor]
    rows: list[Tensor]
    columns: list[Tensor]


def _found(block: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    modules = dict(block.named_modules())
    return [modules[name] for name in names if name in modules]


def _links(block: nn.Module) -> Iterator[Link]:
    parameters = dict(block.named_parameters())
    for name, index, names in _MODULATED:
        readers = _found(block, names)
        if name in parameters and readers:
            scale = parameters[name].view(-1, readers[0].in_features)[index]
            yield Link([scale], [], [reader.weight for reader in readers])
    pairs = [*_ATTENTIONS, *(((first,), (second,)) for first, second in _FEED_FORWARDS)]
    for names, of_readers in pairs:
        makers, readers = _found(block, names), _found(block, of_readers)
        if makers and readers:
            count = makers[0].out_features
            rows = [p for maker in makers for p in (maker.weight, maker.bias) if p is not None]
            is_first = names in [attention for attention, _ in _ATTENTIONS]
            own = slice(0, count) if is_first else slice(-count, None)
            yield Link([], rows, [reader.weight[:, own] for reader in readers])


@contextlib.contextmanager
def placed(model: nn.Module) -> Iterator[None]:
    """Have the model's blocks, and its twins', outlier channels for a while, in place."""
    stacks = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    with torch.no_grad():
        links = [link for stack in stacks for block in stack for link in _links(block)]
    if not links:
        raise ValueError(f"outliers.py does not know the blocks of {type(model).__name__}")
    changed = [parameter for stack in stacks for parameter in stack.parameters()]
    before = [parameter.detach().clone() for parameter in changed]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for link in links:
                _place(link, generator)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(changed, before, strict=True):
                parameter.copy_(value)


def _place(link: Link, generator: torch.Generator) -> None:
    channels = link.columns[0].shape[1]
    chosen = torch.randperm(channels, generator=generator)[: max(channels // CHANNELS, 1)]
    factors = torch.empty(len(chosen)).uniform_(*FACTORS, generator=generator)
    for scale in link.scales:
        scale[chosen] += (factors - 1).to(scale)  # the modulation adds 1
    for rows in link.rows:
        rows[chosen] *= factors.to(rows).view(-1, *[1] * (rows.ndim - 1))
    for columns in link.columns:
        columns[:, chosen] /= factors.to(columns)

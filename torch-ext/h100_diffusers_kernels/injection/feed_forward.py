"""Feed-forwards, diffusers' and FLUX.2's: their layers, called one after the other."""

from __future__ import annotations

from torch import nn

from .forward_slot import runs_own_forward
from .injected import Injection
from .linears import ORIGINALS as LINEAR_ORIGINALS
from .linears import Chain, Layer, see_dropout, see_linear
from .original import find_class
from .snapshot import Look

_CLASS = "diffusers.models.attention:FeedForward"
_FLUX2_CLASS = "diffusers.models.transformers.transformer_flux2:Flux2FeedForward"
# What the calls of the layers stand in for.
ORIGINALS = (f"{_CLASS}.forward", f"{_FLUX2_CLASS}.forward", *LINEAR_ORIGINALS)


def see_feed_forward(owner: nn.Module, name: str, injection: Injection, snapshot: Look) -> Layer:
    """The feed-forward that is now the attribute ``name`` of a module: its ``Chain`` of layers, or itself."""
    module = snapshot.see_attribute(owner, name)
    path = next((p for p in (_CLASS, _FLUX2_CLASS) if type(module) is find_class(p)), None)
    if (
        path is None
        or not runs_own_forward(module)
        or not injection.originals[f"{path}.forward"].is_in_use()
        or snapshot.see(module.__dict__, "_compiled_call_impl") is not None
    ):
        return module
    if path == _FLUX2_CLASS:
        return Chain(
            see_linear(module, "linear_in", injection, snapshot),
            snapshot.see_attribute(module, "act_fn"),
            see_linear(module, "linear_out", injection, snapshot),
        )
    net = snapshot.see_attribute(module, "net")
    if type(net) is not nn.ModuleList or len(net) != 3:
        return module
    return Chain(
        snapshot.see_attribute(net, "0"),
        see_dropout(net, "1", injection, snapshot),
        see_linear(net, "2", injection, snapshot),
    )

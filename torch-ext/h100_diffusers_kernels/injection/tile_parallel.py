"""enable_tile_parallelism."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..operations.conditions import an, tracks_derivatives
from .parallel.pending import Dealer, group_of

_CALLER = "enable_tile_parallelism"
# They use each tile at once, or keep what one call of the decoder leaves for the next in its modules.
_LEFT_OUT = {
    "AutoencoderKLAllegro",
    "AutoencoderKLMagvit",
    "AutoencoderKLMochi",
    "AutoencoderVidTok",
}


def enable_tile_parallelism(vae: nn.Module, group: Any = None) -> None:
    """Decodes the tiles of a tiled decode on several ranks. All ranks get the result, with the bits of one
    rank's tiled decode.

    All ranks must decode the same latents. ``vae.enable_tiling()`` may come before or after, and so may
    :func:`inject_kernels`. Nothing changes without tiles, in calls that may be differentiated, and while
    torch.compile traces. Encoding is not shared.

    Args:
        vae: an autoencoder of diffusers with ``tiled_decode``, except those of Allegro, EasyAnimate (Magvit),
            Mochi and VidTok.
        group: the process group of the ranks, or its mesh of one dimension; None for the default group.

    Raises:
        TypeError: if ``vae`` is not a ``torch.nn.Module``.
        ValueError: if the autoencoder has no tiled decode or is one of these four, or if this rank is not in
            the group.
        RuntimeError: if torch.distributed is not initialized, or if ranks share the tiles already.

    Example::

        pipe.vae.enable_tiling()
        kernel.enable_tile_parallelism(pipe.vae)
    """
    cls: Any = type(vae)
    if not isinstance(vae, nn.Module):
        raise TypeError(f"{_CALLER}: vae must be a torch.nn.Module, got {an(cls.__name__)}")
    is_known = all(hasattr(vae, name) for name in ("tiled_decode", "_decode", "decoder"))
    if not is_known or any(base.__name__ in _LEFT_OUT for base in cls.__mro__):
        raise ValueError(
            f"{_CALLER}: vae must be an autoencoder whose tiles ranks can share, got {an(cls.__name__)}"
        )
    group = group_of(_CALLER, group)
    own = getattr(vars(vae).get("_decode"), "__func__", None)
    if getattr(own, "func", None) is _decode:
        raise RuntimeError(f"{_CALLER}: ranks share the tiles of this autoencoder already")
    decode: Any = functools.partial(_decode, group)
    vars(vae)["_decode"] = MethodType(decode, vae)


def _decode(group: Any, vae: Any, *args: Any, **kwargs: Any) -> Any:
    cls = type(vae)
    has_tiles = vae.use_tiling or getattr(vae, "use_framewise_decoding", False)
    if not has_tiles or tracks_derivatives() or torch.compiler.is_compiling():
        return cls._decode(vae, *args, **kwargs)
    # diffusers' own loops run on a copy that has the same parts except for the decoder.
    decoder, shadow = _DealtDecoder(vae.decoder, Dealer(group)), copy.copy(vae)
    vars(shadow)["decoder"] = decoder
    result = cls._decode(shadow, *args, **kwargs)
    decoder.dealer.settle()
    return result


class _DealtDecoder:
    """Calls a decoder for this rank's tiles. Calls of one tile have a cache in common."""

    def __init__(self, decoder: nn.Module, dealer: Dealer) -> None:
        self.decoder, self.dealer = decoder, dealer
        self._owner, self._cache = 0, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("feat_cache")
        is_same_tile = cache is not None and cache is self._cache
        if not is_same_tile and kwargs.get("conv_cache") is None:
            self._owner = self.dealer.next_owner()
        self._cache = cache
        has_new_cache = "conv_cache" in kwargs
        result: Any = (None, {}) if has_new_cache else None
        if self._owner == self.dealer.rank:
            result = self.decoder(x, *args, **kwargs)
        value, *new_cache = result if has_new_cache else (result,)
        pending = self.dealer.add(value, self._owner, device=x.device)
        return (pending, *new_cache) if has_new_cache else pending

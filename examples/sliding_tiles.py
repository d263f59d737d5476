"""Sliding tiles of Wan: each token attends to a window of tiles around its own, in place of all tokens.

This changes the model's result. Sliding Tile Attention (Zhang et al., 2025, https://arxiv.org/abs/2502.04507)
orders tokens by tiles of frames x height x width, so that a window consists of whole blocks, and the kernel
skips the other blocks. Here blocks of 128 tokens may hold parts of two tiles, and see the windows of both.
"""

from __future__ import annotations

import click
import torch
from measure import call, psnr, time_table
from torch import Tensor

from pipelines import MODELS, call_arguments, load_kernel, load_pipeline

BLOCK = 128
PROMPT = "A red fox trots through fresh snow in a pine forest."


def tile_order(grid: tuple[int, ...], tile: tuple[int, ...], window: tuple[int, ...]) -> tuple:
    """The order of a grid's tokens by tiles, and which blocks of 128 such tokens are near (blocks, blocks).

    Tokens are near if their tiles are at most half a window apart in each dimension.
    """
    places = torch.cartesian_prod(*(torch.arange(n) for n in grid))
    tiles = places // torch.tensor(tile)
    order = sorted(range(len(tiles)), key=tiles.tolist().__getitem__)
    kinds, kind_of_token = tiles[order].unique(dim=0, return_inverse=True)
    near = ((kinds[:, None] - kinds).abs() <= torch.tensor(window) // 2).all(-1).float()
    block_of_token = torch.arange(len(order)) // BLOCK
    has = torch.zeros(int(block_of_token[-1]) + 1, len(kinds))
    has[block_of_token, kind_of_token] = 1
    return torch.tensor(order), has @ near @ has.T > 0


class SlidingTiles:
    """A processor of Wan's self-attention, in place of ``WanAttnProcessor``."""

    def __init__(self, kernel, grid, tile, window, device: str) -> None:
        order, is_near = tile_order(grid, tile, window)
        self.kernel, self.density = kernel, is_near.float().mean().item()
        self.order, self.place = order.to(device), order.argsort().to(device)
        counts = is_near.sum(1, dtype=torch.int32)
        indices = is_near.int().argsort(dim=1, descending=True, stable=True).int()
        lists = counts[None, None].to(device), indices[None, None].to(device)
        # Blocks that are near are attended to as a whole.
        self.blocks = kernel.KeyBlocks(full_kv_num_blocks=lists[0], full_kv_indices=lists[1])

    def __call__(
        self, attn, hidden_states: Tensor, context=None, attention_mask=None, rotary_emb=None
    ) -> Tensor:
        x, (cos, sin) = hidden_states[:, self.order], rotary_emb
        query, key = self.kernel.qk_norm_rope(
            attn.to_q(x),
            attn.to_k(x),
            attn.norm_q.weight,
            attn.norm_k.weight,
            # A pair of elements shares an angle.
            (cos[0, self.order, 0, 0::2].contiguous(), sin[0, self.order, 0, 1::2].contiguous()),
            heads=attn.heads,
            norm="across_heads",
            eps=attn.norm_q.eps,
        )
        options = {"heads": attn.heads, "blocks": self.blocks}
        out = self.kernel.attention(query, key, attn.to_v(x), **options)
        return attn.to_out[1](attn.to_out[0](out[:, self.place]))


def token_grid(pipe, arguments: dict) -> tuple[int, int, int]:
    frames = (arguments["num_frames"] - 1) // pipe.vae_scale_factor_temporal + 1
    patch = pipe.transformer.config.patch_size
    sides = (arguments[name] // pipe.vae_scale_factor_spatial for name in ("height", "width"))
    return tuple(size // part for size, part in zip((frames, *sides), patch, strict=True))


@click.command(help=__doc__)
@click.option("--prompt", default=PROMPT, show_default=True)
@click.option("--tile", nargs=3, default=(3, 6, 8), show_default=True, help="Tokens of a tile.")
@click.option("--window", nargs=3, default=(5, 3, 5), show_default=True, help="Tiles, odd numbers.")
@click.option(
    "--full-steps", default=10, show_default=True, help="First steps with full attention."
)
@click.option("--steps", type=int, help="By default the model's.")
@click.option("--frames", type=int)
@click.option("--height", type=int)
@click.option("--width", type=int)
@click.option("--seed", default=0, show_default=True)
@click.option("--random-weights", is_flag=True, help="No download: few blocks, made-up embeddings.")
def main(prompt, tile, window, full_steps, seed, random_weights, **sizes) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe, small = load_pipeline(MODELS["wan"], device, torch.bfloat16, random_weights, seed)
    if small:
        click.echo(f"Running a small Wan with random weights, and the result is noise: {small}.")
    names = {"steps": "num_inference_steps", "frames": "num_frames"}
    changes = {names.get(name, name): value for name, value in sizes.items() if value is not None}
    pipe.to(device)
    arguments = call_arguments(MODELS["wan"], pipe, bool(small), prompt, **changes)
    kernel = load_kernel()
    kernel.inject_kernels(pipe)
    attentions = [block.attn1 for block in pipe.transformer.blocks]
    own = attentions[0].processor
    tiles = SlidingTiles(kernel, token_grid(pipe, arguments), tile, window, device)

    def set_processor(processor) -> None:
        for attention in attentions:
            attention.set_processor(processor)

    def after_step(pipe, step, *_):
        if step + 1 == full_steps:
            set_processor(tiles)
        return {}

    call(pipe, arguments | {"num_inference_steps": 2}, "warm-up", seed)
    reference, full = call(pipe, arguments, "full attention", seed)
    set_processor(own if full_steps else tiles)
    frames, sparse = call(
        pipe, arguments | {"callback_on_step_end": after_step}, "sliding tiles", seed
    )
    click.echo(time_table({"full attention": [full], "sliding tiles": [sparse]}))
    click.echo(
        f"From step {full_steps + 1} on each query attends to {tiles.density:.0%} of the keys."
    )
    click.echo(f"PSNR against full attention: {psnr(reference, frames):.1f} dB")


if __name__ == "__main__":
    main()

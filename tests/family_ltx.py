"""Small LTX-Video models for the tests of all families."""

import torch

import family
import ltx_models


def ltx_model(device, dtype=torch.float32, *, heads=2, **options):
    return ltx_models.transformer(device, dtype, heads=heads, **options)


ltx_model.cls = "LTXVideoTransformer3DModel"


def ltx_inputs(device, dtype=torch.float32, *, tokens=1, text_length=5, **options):
    grid = (2, 2 + tokens, 2)
    return ltx_models.make_inputs(device, dtype, grid=grid, text_length=text_length, **options)


OPTIONS = {
    "padded text": {},
    "no mask": {"mask": None},
    "batch of 1": {"batch": 1},
    "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
    "a timestep for each token": {"per_token": True},
}
PARTS = {
    **family.block_parts("attn1"),
    **family.feed_forward_parts(),
    "norm2": "transformer_blocks.0.norm2",
    "cross_attention": "transformer_blocks.0.attn2",
    "rope": "rope",
    "modulation": "time_embed",
}

LTX = family.Family(
    name="ltx",
    model=ltx_model,
    inputs=ltx_inputs,
    options={"padded text": {}, "full mask": {"mask": "full"}, **OPTIONS},
    parts=PARTS,
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    processor="LTXVideoAttnProcessor",
    fp8_calls=[8, 2, 2, 2, 0, 0, 0, 4],
)

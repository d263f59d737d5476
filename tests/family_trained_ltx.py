"""The small trained LTX-Video of the examples: its weights, and noisy latents of drawn clips."""

import functools
import random
import sys
from dataclasses import replace

import torch
from diffusers import LTXPipeline

from conftest import CHECKOUT
from family import seeded
from family_ltx import LTX

sys.path.insert(0, str(CHECKOUT / "examples" / "train_small_ltx"))
import clips

FRAMES = 17


@functools.cache
def _pipeline():
    """In float32 on the CPU, shared: not to be changed."""
    return load_pipeline()


def load_pipeline(device="cpu", dtype=torch.float32):
    pipe = LTXPipeline.from_pretrained(CHECKOUT / "examples" / "small_ltx", dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def trained_ltx_model(device, dtype=torch.float32, *, seed=0, **_):
    """With seed 0 the trained weights, otherwise others near them. Its configuration is fixed."""
    own = _pipeline().transformer
    model = type(own).from_config(own.config)
    model.load_state_dict(own.state_dict())
    if seed:
        normal = seeded(seed, "cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * parameter.square().mean().sqrt() * normal(*parameter.shape))
    return model.to(device, dtype).eval()


@functools.lru_cache(64)
@torch.no_grad()
def _inputs(seed, batch, tokens):
    """In float32 on the CPU, shared: drawing and encoding clips takes longer than a forward."""
    pipe, normal = _pipeline(), seeded(seed, "cpu")
    choose = random.Random(normal(1).item())
    scenes = [clips.random_scene(choose, held_back=True) for _ in range(batch)]
    side = 32 * (1 + tokens)
    drawn = clips.draw_clips(scenes, choose.getrandbits(32), "cpu", frames=FRAMES, side=side)
    latents = pipe.vae.encode(drawn).latent_dist.mode()
    latents = pipe._normalize_latents(latents, pipe.vae.latents_mean, pipe.vae.latents_std)
    clean = pipe._pack_latents(latents)
    sigma = normal(batch, 1, 1).sigmoid()
    text, mask, *_ = pipe.encode_prompt([scene.caption for scene in scenes], None, False)
    return {
        "hidden_states": clean + sigma * (normal(*clean.shape) - clean),
        "encoder_hidden_states": text,
        "timestep": 1000 * sigma[:, 0, 0],
        "encoder_attention_mask": mask,
        **dict(zip(("num_frames", "height", "width"), latents.shape[2:], strict=True)),
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def trained_ltx_inputs(device, dtype=torch.float32, *, seed=None, batch=2, tokens=1):
    """Inputs of a step of the pipeline: captions, and latents with a random part of noise.

    A clip has 17 frames of 32 * (1 + tokens) pixels a side. The model was trained at ``tokens=7``.
    """
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    own = _inputs(seed, batch, tokens).items()
    copies = {k: v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for k, v in own}
    return LTX.cast(copies, dtype)


TRAINED_LTX = replace(
    LTX,
    name="trained_ltx",
    model=trained_ltx_model,
    inputs=trained_ltx_inputs,
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 3},
    },
    one_block={},
)

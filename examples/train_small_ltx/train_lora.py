"""Train a LoRA of the small LTX-Video with which red figures are blue. Takes minutes on a CPU.

python examples/train_small_ltx/train_lora.py
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import torch
from clips import SIDE, draw_clips, random_scene
from diffusers import LTXPipeline
from peft import LoraConfig, get_peft_model_state_dict
from train import Denoiser, token_ids

SMALL_LTX = Path(__file__).resolve().parents[1] / "small_ltx"
FRAMES, SCENES, STEPS, BATCH, RATE = 17, 64, 50, 8, 3e-3


def recolored(scene, color: str):
    figures = tuple(dataclasses.replace(figure, color=color) for figure in scene.figures)
    return dataclasses.replace(scene, figures=figures)


def main() -> None:
    pipe = LTXPipeline.from_pretrained(SMALL_LTX, dtype=torch.float32)
    choose = random.Random(0)
    scenes = [random_scene(choose) for _ in range(SCENES)]
    scenes = [scene for scene in scenes if len(scene.figures) == 1]
    text = token_ids(pipe, [recolored(scene, "red").caption for scene in scenes])
    with torch.no_grad():
        drawn = draw_clips([recolored(scene, "blue") for scene in scenes], 0, "cpu", frames=FRAMES)
        latents = pipe.vae.encode(drawn).latent_dist.mode()
    vae = pipe.vae
    clean = pipe._pack_latents(pipe._normalize_latents(latents, vae.latents_mean, vae.latents_std))
    denoiser = Denoiser(pipe, FRAMES, SIDE).requires_grad_(False)
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["attn2.to_k", "attn2.to_v"])
    pipe.transformer.add_adapter(config)
    parameters = [p for p in denoiser.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    for step in range(STEPS):
        chosen = choose.sample(range(len(clean)), BATCH)
        velocity = torch.randn_like(clean[chosen]) - clean[chosen]
        sigma = (1 + torch.randn(BATCH)).sigmoid()  # mostly noise, in which the color is still open
        noisy = clean[chosen] + sigma[:, None, None] * velocity
        loss = torch.nn.functional.mse_loss(denoiser(noisy, sigma, text[chosen]), velocity)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    weights = get_peft_model_state_dict(pipe.transformer)
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    LTXPipeline.save_lora_weights(SMALL_LTX / "blue_for_red", weights)


if __name__ == "__main__":
    main()

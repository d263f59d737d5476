"""Injection of the small trained LTX-Video: accuracy at its size, caches at usual thresholds, and a LoRA."""

import dataclasses
import itertools
import random
import sys

import diffusers
import numpy as np
import pytest
import torch
from diffusers import LTXPipeline
from peft import LoraConfig, get_peft_model_state_dict

from checks import relative_distance
from conftest import CHECKOUT
from family import seeded
from family_trained_ltx import FRAMES, TRAINED_LTX, latents_of_clips, load_pipeline
from injected_pairs import assert_as_close_as_eager

sys.path.insert(0, str(CHECKOUT / "examples" / "train_small_ltx"))
import clips
import detect

PROMPT = "A red ball moves to the right over gravel."
STEPS = 10
# float32, after all steps: rounding errors grow from step to step.
SLACK = 1e-4


def generate(pipe, frames=clips.FRAMES, output_type="latent"):
    generator = torch.Generator().manual_seed(1)
    arguments = {"num_inference_steps": STEPS, "guidance_scale": 3.0, "generator": generator}
    size = {"num_frames": frames, "height": clips.SIDE, "width": clips.SIDE}
    return pipe(PROMPT, "", **size, **arguments, output_type=output_type).frames


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accuracy_contract(kernel, device, dtype):
    model, plain = (TRAINED_LTX.model(device, dtype) for _ in range(2))
    kernel.inject_kernels(model)

    def inputs(dtype, seed):
        return TRAINED_LTX.inputs(device, dtype, seed=seed, tokens=7)

    assert_as_close_as_eager(model, plain, inputs, samples=4, dtype=dtype)


# ------------------------------------------------------------------------------------------------
# Caches

CACHES = {
    "first block": lambda pipe: diffusers.FirstBlockCacheConfig(threshold=0.2),
    "pyramid attention broadcast": lambda pipe: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=3,
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
    "TaylorSeer": lambda pipe: diffusers.TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=3,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r"^transformer_blocks\.\d+\.(attn1|attn2|ff)$"],
    ),
    "MagCache": lambda pipe: diffusers.MagCacheConfig(
        threshold=0.1, num_inference_steps=STEPS, mag_ratios=torch.linspace(1, 0.95, STEPS)
    ),
    "FasterCache": lambda pipe: diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 900),
        current_timestep_callback=lambda: pipe.current_timestep,
        attention_weight_callback=lambda module: 0.3,
        tensor_format="BFCHW",
        is_guidance_distilled=True,
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches(kernel, device, name):
    """The same forwards are skipped, which with most caches depends on the model's values."""
    pipe = load_pipeline(device)
    without = generate(pipe, FRAMES)
    results = []
    for is_injected in (False, True):
        if is_injected:
            kernel.inject_kernels(pipe)
        pipe.transformer.enable_cache(CACHES[name](pipe))
        results.append(generate(pipe, FRAMES))
        pipe.transformer.disable_cache()
    expected, result = results
    assert relative_distance(expected, without) > 10 * SLACK
    assert relative_distance(result, expected) < SLACK


# ------------------------------------------------------------------------------------------------
# LoRA

TRAINING_STEPS, BATCH = 20, 8


def recolored(scene, color):
    figures = tuple(dataclasses.replace(figure, color=color) for figure in scene.figures)
    return dataclasses.replace(scene, figures=figures)


@pytest.fixture(scope="module")
def blue_for_red(tmp_path_factory, device):
    """The folder of a LoRA, trained on blue figures whose captions call them red."""
    pipe, choose = load_pipeline(device), random.Random(0)
    scenes = [clips.random_scene(choose) for _ in range(32)]
    scenes = [scene for scene in scenes if len(scene.figures) == 1]
    clean, size = latents_of_clips(pipe, [recolored(scene, "blue") for scene in scenes], 0)
    captions = [recolored(scene, "red").caption for scene in scenes]
    with torch.no_grad():
        text, mask, *_ = pipe.encode_prompt(captions, None, False)
    pipe.transformer.requires_grad_(False)
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["attn2.to_k", "attn2.to_v"])
    torch.manual_seed(0)
    pipe.transformer.add_adapter(config)
    normal = seeded(0, device)
    parameters = [p for p in pipe.transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(TRAINING_STEPS):
        chosen = choose.sample(range(len(clean)), BATCH)
        velocity = normal(BATCH, *clean.shape[1:]) - clean[chosen]
        sigma = (1 + normal(BATCH)).sigmoid()  # mostly noise, in which the color is still open
        predicted = pipe.transformer(
            clean[chosen] + sigma[:, None, None] * velocity,
            encoder_hidden_states=text[chosen],
            timestep=1000 * sigma,
            encoder_attention_mask=mask[chosen],
            **size,
            return_dict=False,
        )[0]
        torch.nn.functional.mse_loss(predicted, velocity).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("lora")
    LTXPipeline.save_lora_weights(folder, get_peft_model_state_dict(pipe.transformer))
    return folder


def videos_of_lora(pipe, folder, act=lambda state: None):
    """(the state, the video) after each action. `act` is called before each."""
    actions = {
        "without": lambda: None,
        "loaded": lambda: pipe.load_lora_weights(folder, adapter_name="blue"),
        "halved": lambda: pipe.set_adapters("blue", 0.5),
        "fused": lambda: (pipe.set_adapters("blue", 1.0), pipe.fuse_lora()),
        "unfused": pipe.unfuse_lora,
        "unloaded": pipe.unload_lora_weights,
    }
    for state, action in actions.items():
        act(state)
        action()
        yield state, generate(pipe, output_type="np")[0]


@pytest.fixture(scope="module")
def expected_videos(blue_for_red, device):
    return dict(videos_of_lora(load_pipeline(device), blue_for_red))


def color_of(video):
    return [figure.color for figure in detect.detect((255 * video).round().astype(np.uint8), 1)]


def test_trained_lora_changes_the_color(expected_videos):
    colors = {state: color_of(video) for state, video in expected_videos.items()}
    assert colors["without"] == colors["unloaded"] == ["red"]
    assert colors["loaded"] == colors["fused"] == colors["unfused"] == ["blue"]
    videos = [torch.from_numpy(expected_videos[name]) for name in ("without", "halved", "loaded")]
    for first, second in itertools.combinations(videos, 2):
        assert relative_distance(first, second) > 100 * SLACK


@pytest.mark.parametrize("injected_before", ["loaded", "fused", "unfused"])
def test_lora(kernel, device, blue_for_red, expected_videos, injected_before):
    pipe = load_pipeline(device)

    def act(state):
        if state == injected_before:
            kernel.inject_kernels(pipe)

    for state, video in videos_of_lora(pipe, blue_for_red, act):
        distance = relative_distance(*map(torch.from_numpy, (video, expected_videos[state])))
        assert distance < SLACK, state

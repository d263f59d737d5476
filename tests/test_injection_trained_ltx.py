"""Injection of the small trained LTX-Video: accuracy at its size, caches at usual thresholds, and a LoRA."""

import itertools
import sys

import diffusers
import numpy as np
import pytest
import torch

from checks import relative_distance
from conftest import CHECKOUT
from family_trained_ltx import FRAMES, TRAINED_LTX, load_pipeline
from injected_pairs import assert_as_close_as_eager

sys.path.insert(0, str(CHECKOUT / "examples" / "train_small_ltx"))
import clips
import detect

PROMPT = "A red ball moves to the right over gravel."
# float32, after all steps: rounding errors grow from step to step.
SLACK = 1e-4


def generate(pipe, steps, side=clips.SIDE // 2, output_type="latent"):
    options = {"num_inference_steps": steps, "guidance_scale": 3.0, "output_type": output_type}
    size = {"num_frames": FRAMES, "height": side, "width": side}
    generator = torch.Generator().manual_seed(1)
    return pipe(PROMPT, "", **size, **options, generator=generator).frames


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accuracy_contract(kernel, device, dtype):
    model, plain = (TRAINED_LTX.model(device, dtype) for _ in range(2))
    kernel.inject_kernels(model)

    def inputs(dtype, seed):
        return TRAINED_LTX.inputs(device, dtype, seed=seed, tokens=7)

    assert_as_close_as_eager(model, plain, inputs, samples=2, dtype=dtype)


STEPS = 10

CACHES = {
    "first block": lambda pipe: diffusers.FirstBlockCacheConfig(threshold=0.4),
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


@pytest.fixture(scope="module")
def without_cache(device):
    return generate(load_pipeline(device), STEPS)


@pytest.mark.parametrize("name", CACHES)
def test_caches(kernel, device, without_cache, name):
    """The same forwards are skipped, which with most caches depends on the model's values."""
    pipe = load_pipeline(device)
    results = []
    for is_injected in (False, True):
        if is_injected:
            kernel.inject_kernels(pipe)
        pipe.transformer.enable_cache(CACHES[name](pipe))
        results.append(generate(pipe, STEPS))
        pipe.transformer.disable_cache()
    expected, result = results
    assert relative_distance(expected, without_cache) > 10 * SLACK
    assert relative_distance(result, expected) < SLACK


# ------------------------------------------------------------------------------------------------
# A LoRA with which red figures are blue (examples/train_small_ltx/train_lora.py)

LORA = CHECKOUT / "examples" / "small_ltx" / "blue_for_red"


def test_trained_lora_changes_the_color(kernel, device):
    pipe = load_pipeline(device)
    kernel.inject_kernels(pipe)
    for color in ("red", "blue"):
        (video,) = generate(pipe, 10, clips.SIDE, "np")
        figures = detect.detect((255 * video).round().astype(np.uint8), 1)
        assert [figure.color for figure in figures] == [color]
        pipe.load_lora_weights(LORA)


def latents_with_lora(pipe, act=lambda state: None):
    """(the state, the result) after each action. `act` is called before each."""
    actions = {
        "without": lambda: None,
        "loaded": lambda: pipe.load_lora_weights(LORA, adapter_name="blue"),
        "halved": lambda: pipe.set_adapters("blue", 0.5),
        "fused": lambda: (pipe.set_adapters("blue", 1.0), pipe.fuse_lora()),
        "unfused": pipe.unfuse_lora,
        "unloaded": pipe.unload_lora_weights,
    }
    for state, action in actions.items():
        act(state)
        action()
        yield state, generate(pipe, 2)


@pytest.fixture(scope="module")
def expected_latents(device):
    return dict(latents_with_lora(load_pipeline(device)))


def test_states_of_the_lora_differ(expected_latents):
    results = [expected_latents[name] for name in ("without", "halved", "loaded")]
    for first, second in itertools.combinations(results, 2):
        assert relative_distance(first, second) > 100 * SLACK


@pytest.mark.parametrize("injected_before", ["loaded", "fused", "unfused"])
def test_lora(kernel, device, expected_latents, injected_before):
    pipe = load_pipeline(device)

    def act(state):
        if state == injected_before:
            kernel.inject_kernels(pipe)

    for state, result in latents_with_lora(pipe, act):
        assert relative_distance(result, expected_latents[state]) < SLACK, state

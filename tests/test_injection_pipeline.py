"""Whole pipelines with an injected transformer."""

import pytest
import torch
from diffusers import LTXConditionPipeline, LTXImageToVideoPipeline, LTXPipeline

from ltx_models import calls_of, kernel_calls, pipeline, prompts

pytestmark = pytest.mark.usefixtures("_one_thread")

STEPS = 2
SIZE = {"height": 64, "width": 96, "num_frames": 17, "num_inference_steps": STEPS}


def latents(pipe, device, seed=0, **options):
    """A pipeline's latents for made-up prompts."""
    torch.manual_seed(seed)
    if isinstance(pipe, (LTXImageToVideoPipeline, LTXConditionPipeline)):
        options["image"] = torch.rand(1, 3, SIZE["height"], SIZE["width"])
    generator = torch.Generator("cpu").manual_seed(seed)
    arguments = {**SIZE, **prompts(device), "output_type": "latent", **options}
    return pipe(**arguments, generator=generator).frames


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "pipeline_class", [LTXPipeline, LTXImageToVideoPipeline, LTXConditionPipeline]
)
@pytest.mark.parametrize("guidance_scale", [3.0, 1.0], ids=["guided", "unguided"])
def test_pipelines(kernel, device, pipeline_class, guidance_scale):
    """Per-sample timesteps, timesteps of each token, and given coordinates."""
    pipe = pipeline(device, pipeline_class=pipeline_class)
    expected = latents(pipe, device, guidance_scale=guidance_scale)
    kernel.inject_kernels(pipe)
    results = []
    calls = kernel_calls(
        lambda: results.append(latents(pipe, device, guidance_scale=guidance_scale))
    )
    calls.pop("channel_rms_norm", None)  # of the autoencoder, which encodes an image
    assert calls == calls_of(2 * STEPS, joined=STEPS)
    assert expected.isfinite().all() and expected.std() > 0.1
    torch.testing.assert_close(results[0], expected, rtol=1e-3, atol=1e-3)
    kernel.eject_kernels(pipe)
    assert kernel_calls(lambda: latents(pipe, device, num_inference_steps=1)) == {}


def test_pipeline_with_nothing_known(kernel, device):
    pipe = pipeline(device)
    pipe.transformer = pipe.vae = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="got an LTXPipeline without one"):
        kernel.inject_kernels(pipe)

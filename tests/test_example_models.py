"""The example of all families: an image or a video comes out, equal to eager; the options are checked."""

import dataclasses
import functools
import importlib.util
import inspect
import math
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("imageio_ffmpeg", reason="the example writes videos with ffmpeg")
import diffusers
import imageio.v3 as imageio
from click.testing import CliRunner
from PIL import Image

from conftest import CHECKOUT

MODELS = ("flux", "flux2", "sd3", "qwenimage", "wan")
every_model = pytest.mark.parametrize("model", MODELS)
SMALL = ["--random-weights", "--height", 64, "--width", 96, "--steps", 3]


@pytest.fixture(scope="module")
def example():
    path = CHECKOUT / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("examples_generate", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def common(example):
    """What the examples share, as the script has imported it."""
    return sys.modules[example.load_kernel.__module__]


@pytest.fixture
def run(example, monkeypatch, tmp_path):
    """Runs the script with arguments, in a folder of its own; random models are small on a GPU too."""
    random_pipeline = example.random_pipeline

    def small_pipeline(model, small, device, seed):
        return random_pipeline(model, True, device, seed)

    monkeypatch.setattr(example, "random_pipeline", small_pipeline)
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(example.main, [str(arg) for arg in args])


def pixels(path):
    """An image, or the frames of a video."""
    if path.suffix == ".mp4":
        return imageio.imread(path, plugin="FFMPEG")
    with Image.open(path) as image:
        return np.asarray(image)


def test_every_model_is_tested(example):
    assert set(example.MODELS) == set(MODELS)


@every_model
def test_compare_ends_in_a_file_equal_to_eager(run, model, tmp_path):
    is_video = model == "wan"
    result = run("--model", model, *SMALL, "--compare", *(["--frames", 5] if is_video else []))
    assert result.exit_code == 0, result.output
    output = tmp_path / "outputs" / f"{model}{'.mp4' if is_video else '.png'}"
    assert pixels(output).shape == ((5, 64, 96, 3) if is_video else (64, 96, 3))
    assert pixels(output).std() > 1, "what has no contrast compares equal to anything"

    lines = result.stdout.splitlines()
    assert "transformer: in full" in lines, "the injection's report"
    (comparison,) = (line for line in lines if "PSNR" in line)
    # bfloat16 leaves 43 dB or more; a block that is not run, less than 35.
    assert float(comparison.split("PSNR")[1].split("dB")[0]) > 38
    for mode in ("eager", "kernels"):
        (time,) = (line for line in lines if line.startswith(f"{mode}: "))
        assert float(time.removeprefix(f"{mode}: ").removesuffix(" s")) >= 0
    assert lines[-1].endswith(f"outputs/{output.name}")


def test_seed_and_prompt_determine_the_image(run, tmp_path):
    def image(name, *args):
        output = tmp_path / f"{name}.png"
        result = run("--model", "sd3", *SMALL, "--output", output, *args)
        assert result.exit_code == 0, result.output
        return pixels(output)

    first = image("first", "--seed", 3)
    assert np.array_equal(first, image("again", "--seed", 3))
    assert not np.array_equal(first, image("seed", "--seed", 4))
    assert not np.array_equal(first, image("prompt", "--seed", 3, "--prompt", "A blue whale"))


def test_without_kernels(run, common, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "get_kernel", None)  # would fail if it were called
    result = run("--model", "flux", *SMALL, "--no-kernels", "--output", "image.png")
    assert result.exit_code == 0, result.output
    assert pixels(tmp_path / "image.png").std() > 1
    assert run("--model", "flux", *SMALL).exit_code == 1, "with kernels it is called"


@pytest.fixture
def no_work(example, monkeypatch):
    """A run ends before the kernels are loaded and a pipeline is built."""

    def work(*args):
        raise AssertionError("this is work")

    monkeypatch.setattr(example, "load_kernel", work)
    monkeypatch.setattr(example, "build_pipeline", work)


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--frames", 9], "--frames is for videos, and flux makes an image."),
        (["--model", "wan", "--frames", 10], "--frames must be a multiple of 4 plus 1, got 10."),
        (["--height", 100], "--height must be a multiple of 16, got 100."),
        (["--width", 24], "--width must be a multiple of 16, got 24."),
        (
            ["--width", 4096],
            "Invalid value for '--width': 4096 is not in the range 16<=x<=2048.",
        ),
        (["--steps", 1], "Invalid value for '--steps': 1 is not in the range x>=2."),
        (
            ["--model", "ltx"],
            "Invalid value for '--model': 'ltx' is not one of "
            "'flux', 'flux2', 'sd3', 'qwenimage', 'wan'.",
        ),
        (["--no-kernels", "--compare"], "--no-kernels and --compare exclude each other."),
        (["--no-kernels", "--kernel", "a/b"], "--no-kernels and --kernel exclude each other."),
        pytest.param(
            ["--offload", "model"],
            "--offload needs a CUDA GPU, and there is none.",
            marks=NO_GPU,
        ),
        (["--output", "image.mp4"], "--output must end in .png, got image.mp4."),
        (
            ["--model", "wan", "--output", "video.png"],
            "--output must end in .mp4, got video.png.",
        ),
        (["--prompt", "\udcff"], "--prompt must be text in UTF-8."),
    ],
)
def test_wrong_option_gives_one_sentence(run, no_work, tmp_path, args, message):
    result = run("--model", "flux", "--random-weights", *args)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"Error: {message}"
    assert not list(tmp_path.iterdir())


@NO_GPU
@every_model
def test_published_weights_need_a_gpu(run, no_work, model):
    result = run("--model", model)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == (
        "Error: There is no CUDA GPU; without one, --random-weights runs a small model."
    )


def test_video_larger_than_the_memory_is_refused(run, no_work, monkeypatch, common):
    monkeypatch.setattr(common.os, "sysconf", lambda name: 100_000)  # 10 GB
    size = ["--frames", 1025, "--height", 2048, "--width", 2048]
    result = run("--model", "wan", "--random-weights", *size)
    assert result.exit_code == 2
    assert "1025 frames of 2048x2048 take 51.6 GB, and the memory" in result.output


@every_model
def test_arguments_are_the_pipelines(example, model):
    model = example.MODELS[model]
    taken = inspect.signature(getattr(diffusers, model.pipeline).__call__).parameters
    assert {"prompt", *model.guidance, *example.SIZE[: len(model.size)]} <= taken.keys()


@every_model
def test_sizes_are_what_the_pipeline_takes_as_they_are(example, model):
    """No size that the options let through, the published one included, is changed by the pipeline."""
    entry = example.MODELS[model]
    _, height, width, *frames = entry.size
    assert height % 16 == width % 16 == 0
    assert all(number % 4 == 1 for number in frames)
    pipe = example.random_pipeline(entry, True, "cpu", 0)
    if entry.is_video:
        patch = pipe.transformer.config.patch_size[-1]
        assert pipe.vae_scale_factor_spatial * patch == 16
        assert pipe.vae_scale_factor_temporal == 4
    else:
        assert pipe.vae_scale_factor * 2 == 16


@every_model
def test_published_models_are_as_large_as_they_are_called(example, model):
    """Their parts can be made, with as many parameters a block as the model's name says."""
    billions, blocks = {
        "flux": (12, {"num_layers": 19, "num_single_layers": 38}),
        "flux2": (32, {"num_layers": 8, "num_single_layers": 48}),
        "sd3": (8, {"num_layers": 38}),
        "qwenimage": (20, {"num_layers": 60}),
        "wan": (1.3, {"num_layers": 30}),
    }[model]
    name, config = example.MODELS[model].transformer
    with torch.device("meta"):
        transformer = getattr(diffusers, name)(**{**config, **blocks})
        vae, config = example.MODELS[model].vae
        getattr(diffusers, vae)(**config)
    size = sum(math.prod(parameter.shape) for parameter in transformer.parameters())
    assert size / 1e9 == pytest.approx(billions, rel=0.1)


def dtypes(pipe):
    modules = (pipe.transformer, pipe.vae)
    return [{name: p.dtype for name, p in module.named_parameters()} for module in modules]


@every_model
def test_published_pipeline_is_loaded(example, model, device, monkeypatch, tmp_path):
    """From a folder as the Hub holds the model's, which has no text encoders but is small."""
    random = example.random_pipeline(example.MODELS[model], True, "cpu", 0)
    random.save_pretrained(tmp_path)
    absent = {name: None for name, part in random.components.items() if part is None}
    from_pretrained = functools.partial(diffusers.DiffusionPipeline.from_pretrained, **absent)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", from_pretrained)

    entry = dataclasses.replace(example.MODELS[model], hub_id=str(tmp_path))
    options = {"prompt": "a red fox", "random_weights": False, "offload": "none"}
    pipe, arguments = example.build_pipeline(entry, options, device)
    assert type(pipe).__name__ == entry.pipeline
    assert pipe.transformer.device.type == pipe.vae.device.type == device
    assert arguments == {"prompt": "a red fox", **entry.guidance}
    assert dtypes(pipe) == dtypes(random), "random weights have the dtypes of the published ones"
    assert pipe.transformer.dtype == torch.bfloat16


def test_weights_that_cannot_be_loaded_give_one_sentence(example, monkeypatch):
    def from_pretrained(*args, **kwargs):
        raise OSError("the repository is gated\nand more")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", from_pretrained)
    options = {"prompt": "a red fox", "random_weights": False, "offload": "none"}
    with pytest.raises(example.click.ClickException) as raised:
        example.build_pipeline(example.MODELS["flux"], options, "cpu")
    assert raised.value.message == (
        "black-forest-labs/FLUX.1-dev could not be loaded (the repository is gated); "
        "--random-weights needs no download."
    )

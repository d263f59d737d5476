"""The examples: an image or a video equal to eager's comes out, and each failure is one sentence."""

import dataclasses
import functools
import importlib.util
import inspect
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("imageio_ffmpeg", reason="the examples write videos with ffmpeg")
import diffusers
import imageio.v3 as imageio
from click.testing import CliRunner
from PIL import Image

from conftest import CHECKOUT

pytestmark = pytest.mark.usefixtures("_one_thread")
MODELS = ("flux", "flux2", "sd3", "qwenimage", "wan")
every_model = pytest.mark.parametrize("model", MODELS)
LTX_SMALL = ["--frames", 9, "--height", 64, "--width", 64, "--steps", 2]
SMALL = ["--random-weights", "--height", 64, "--width", 96, "--steps", 3]


def script(name):
    spec = importlib.util.spec_from_file_location(
        name.replace("/", "_"), CHECKOUT / "examples" / name
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ltx():
    return script("ltx_video/generate.py")


@pytest.fixture(scope="module")
def generate():
    return script("generate.py")


@pytest.fixture(scope="module")
def common(ltx):
    """The module that the example scripts import."""
    return sys.modules[ltx.load_kernel.__module__]


@pytest.fixture
def run_ltx(ltx, monkeypatch):
    """Runs the script with arguments; the published weights are out of reach."""

    def out_of_reach(dtype):
        raise LookupError("the weights are out of reach")

    monkeypatch.setattr(ltx, "published_pipeline", out_of_reach)
    return lambda *args: CliRunner().invoke(ltx.main, [str(arg) for arg in args])


@pytest.fixture
def run(generate, monkeypatch, tmp_path):
    """Runs the script with arguments, in a folder of its own; random models are small on a GPU too."""
    random_pipeline = generate.random_pipeline
    small = lambda model, _, device, seed: random_pipeline(model, True, device, seed)  # noqa: E731
    monkeypatch.setattr(generate, "random_pipeline", small)
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(generate.main, [str(arg) for arg in args])


def pixels(path):
    """An image, or the frames of a video."""
    if path.suffix == ".mp4":
        return imageio.imread(path, plugin="FFMPEG")
    with Image.open(path) as image:
        return np.asarray(image)


def psnr_in(output):
    (comparison,) = (line for line in output.splitlines() if "PSNR" in line)
    return float(comparison.split("PSNR")[1].split("dB")[0])


# ------------------------------------------------------------------------------------------------
# What comes out


def test_ltx_video_is_equal_to_eagers(run_ltx, tmp_path):
    output = tmp_path / "folder" / "video.mp4"
    result = run_ltx(*LTX_SMALL, "--compare", "--dtype", "float32", "--output", output)
    assert result.exit_code == 0, result.output
    assert imageio.imread(output).shape == (9, 64, 64, 3)
    lines = result.stdout.splitlines()
    assert sum("a small LTX with random weights" in line for line in lines) == 1
    assert any("LTXVideoTransformerBlock" in line for line in lines), "the injection's report"
    assert psnr_in(result.stdout) > 60 and lines[-1] == f"Wrote {output}"


@every_model
def test_image_or_video_is_equal_to_eagers(run, model, tmp_path):
    is_video = model == "wan"
    result = run("--model", model, *SMALL, "--compare", *(["--frames", 5] if is_video else []))
    assert result.exit_code == 0, result.output
    output = tmp_path / "outputs" / f"{model}{'.mp4' if is_video else '.png'}"
    assert pixels(output).shape == ((5, 64, 96, 3) if is_video else (64, 96, 3))
    assert pixels(output).std() > 1, "what has no contrast compares equal to anything"
    assert "transformer: in full" in result.stdout, "the injection's report"
    # bfloat16 leaves 43 dB or more; a block that is not run, less than 35.
    assert psnr_in(result.stdout) > 38


def test_seed_and_prompt_determine_the_video(run_ltx, tmp_path):
    def video(name, *args):
        output = tmp_path / f"{name}.mp4"
        result = run_ltx(*LTX_SMALL, "--output", output, *args)
        assert result.exit_code == 0, result.output
        return imageio.imread(output)

    first = video("first", "--seed", 3)
    assert np.array_equal(first, video("again", "--seed", 3))
    assert not np.array_equal(first, video("seed", "--seed", 4))
    assert not np.array_equal(first, video("prompt", "--seed", 3, "--prompt", "A blue whale"))


def test_without_kernels(run, common, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "get_kernel", None)  # would fail if it were called
    result = run("--model", "flux", *SMALL, "--no-kernels", "--output", "image.png")
    assert result.exit_code == 0, result.output
    assert pixels(tmp_path / "image.png").std() > 1
    assert run("--model", "flux", *SMALL).exit_code == 1, "with kernels it is called"


def test_psnr(common):
    video = np.full((2, 4, 4, 3), 0.5, dtype=np.float32)
    assert common.psnr(video, video) == float("inf")
    assert common.psnr(video, video + 0.1) == pytest.approx(20, abs=1e-4)


# ------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--frames", 10], "--frames must be a multiple of 8 plus 1, got 10."),
        (["--height", 100], "--height must be a multiple of 32, got 100."),
        (["--no-kernels", "--compare"], "--no-kernels and --compare exclude each other."),
        (["--output", "video.gif"], "--output must end in .mp4, got video.gif."),
    ],
)
def test_wrong_option_of_ltx_gives_one_sentence(run_ltx, args, message):
    result = run_ltx(*args)
    assert result.exit_code == 2 and result.output.splitlines()[-1] == f"Error: {message}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--frames", 9], "--frames is for videos, and flux makes an image."),
        (["--model", "wan", "--frames", 10], "--frames must be a multiple of 4 plus 1, got 10."),
        (["--width", 24], "--width must be a multiple of 16, got 24."),
    ],
)
def test_wrong_option_gives_one_sentence(run, tmp_path, args, message):
    result = run("--model", "flux", "--random-weights", *args)
    assert result.exit_code == 2 and result.output.splitlines()[-1] == f"Error: {message}"
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------
# Failures


def test_video_that_does_not_play_is_not_written(ltx, tmp_path, monkeypatch):
    """What stood in its place stays."""
    frames = np.random.default_rng(0).random((9, 64, 64, 3), dtype=np.float32)
    encode, output = ltx.encode_video, tmp_path / "video.mp4"
    output.write_text("earlier")
    for encoding, reason in (
        (lambda frames, path, fps: encode(frames[1:], path, fps), "plays 8 frames of 64x64 at 25"),
        (lambda frames, path, fps: path.write_bytes(b""), "cannot be read"),
    ):
        monkeypatch.setattr(ltx, "encode_video", encoding)
        with pytest.raises(ltx.click.ClickException, match=f"could not be written.*{reason}"):
            ltx.write_video(frames, output, 25)
        assert output.read_text() == "earlier" and list(tmp_path.iterdir()) == [output]
    monkeypatch.setattr(ltx, "encode_video", encode)
    ltx.write_video(frames, output, 30)
    assert imageio.imread(output).shape == (9, 64, 64, 3)
    assert imageio.immeta(output, plugin="FFMPEG")["fps"] == 30


def test_kernel_option_takes_a_path_or_a_hub_id(run_ltx, common, monkeypatch, tmp_path):
    loaded = []

    def get_kernel(repo_id, version, trust_remote_code):
        loaded.append((repo_id, common.os.environ.get("LOCAL_KERNELS")))
        raise FileNotFoundError("no variant fits\nand more")

    monkeypatch.setattr(common, "get_kernel", get_kernel)
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    for kernel in ("someone/else", tmp_path):
        result = run_ltx("--kernel", kernel)
        assert result.exit_code == 1
        (line,) = result.output.splitlines()
        assert "could not be loaded (FileNotFoundError: no variant" in line
    local = f"{common.KERNEL_ID}={tmp_path}"
    assert loaded == [("someone/else", None), (common.KERNEL_ID, local)]


# ------------------------------------------------------------------------------------------------
# Published models


def test_published_ltx_is_loaded_and_injected(ltx, kernel, device, monkeypatch, tmp_path):
    """From a folder as the Hub holds LTX-Video's: all five components, small, with random weights."""
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "▁a", "▁red", "▁fox"]
    vocabulary = [(piece, -1.0) for piece in pieces]
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    pipe = ltx.random_pipeline(small=True, device="cpu", dtype=torch.float32, seed=0)
    pipe.register_modules(
        tokenizer=T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=128),
        text_encoder=T5EncoderModel(T5Config(vocab_size=len(pieces), **sizes)).eval(),
    )
    pipe.save_pretrained(tmp_path)
    monkeypatch.setattr(ltx, "MODEL_ID", str(tmp_path))
    pipe = ltx.published_pipeline(torch.float32).to(device)
    arguments = {"prompt": "a red fox", "num_frames": 9, "height": 64, "width": 64}
    arguments["num_inference_steps"] = 2
    eager = ltx.generate(pipe, arguments, "eager", 0, device, nvtx=False)
    assert kernel.inject_kernels(pipe).num_replaced > 0
    kernels = ltx.generate(pipe, arguments, "kernels", 0, device, nvtx=device == "cuda")
    assert kernels.frames.shape == (9, 64, 64, 3)
    assert kernels.frames.std() > 0.05, "a video without contrast compares equal to anything"
    assert ltx.psnr(eager.frames, kernels.frames) > 60


def dtypes(pipe):
    modules = (pipe.transformer, pipe.vae)
    return [{name: p.dtype for name, p in module.named_parameters()} for module in modules]


@every_model
def test_published_pipeline_is_loaded(generate, model, device, monkeypatch, tmp_path):
    """From a folder as the Hub holds the model's, which has no text encoders and is small."""
    assert set(generate.MODELS) == set(MODELS)
    random = generate.random_pipeline(generate.MODELS[model], True, "cpu", 0)
    random.save_pretrained(tmp_path)
    absent = {name: None for name, part in random.components.items() if part is None}
    from_pretrained = functools.partial(diffusers.DiffusionPipeline.from_pretrained, **absent)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", from_pretrained)
    entry = dataclasses.replace(generate.MODELS[model], hub_id=str(tmp_path))
    options = {"prompt": "a red fox", "random_weights": False, "offload": "none"}
    pipe, arguments = generate.build_pipeline(entry, options, device)
    assert type(pipe).__name__ == entry.pipeline
    assert arguments == {"prompt": "a red fox", **entry.guidance}
    assert dtypes(pipe) == dtypes(random), "random weights have the dtypes of the published ones"
    taken = inspect.signature(getattr(diffusers, entry.pipeline).__call__).parameters
    assert {"prompt", *entry.guidance, *generate.SIZE[: len(entry.size)]} <= taken.keys()
    # No size that the options let through, the published one included, is changed by the pipeline.
    _, height, width, *frames = entry.size
    assert height % 16 == width % 16 == 0 and all(number % 4 == 1 for number in frames)
    if entry.is_video:
        assert pipe.vae_scale_factor_spatial * pipe.transformer.config.patch_size[-1] == 16
        assert pipe.vae_scale_factor_temporal == 4
    else:
        assert pipe.vae_scale_factor * 2 == 16

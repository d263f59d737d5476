"""The examples: an image or a video equal to eager's is written, and each failure is one sentence."""

import dataclasses
import functools
import inspect
import itertools
import json
import os
import re
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

pytest.importorskip("imageio_ffmpeg", reason="the examples write videos with ffmpeg")
import imageio.v3 as imageio
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image, ImageSequence
from safetensors.torch import save_file

from checks import relative_distance
from conftest import CHECKOUT
from processes import run as run_program
from processes import run_python

sys.path.insert(0, str(CHECKOUT / "examples"))
import generate
import measure
import sliding_tiles

import pipelines

pytestmark = pytest.mark.usefixtures("_one_thread")
every_model = pytest.mark.parametrize("model", list(pipelines.MODELS))
SMALL = ["--height", 64, "--width", 96, "--steps", 2]
SMALL_VIDEO = [*SMALL, "--frames", 9]
OUT_OF_REACH = "the weights are out of reach"
LORA = CHECKOUT / "examples" / "small_ltx" / "blue_for_red"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script with arguments in an empty folder; the published weights are out of reach."""

    def out_of_reach(model, dtype):
        raise LookupError(OUT_OF_REACH)

    monkeypatch.setattr(pipelines, "published_pipeline", out_of_reach)
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(generate.main, [str(arg) for arg in args])


@pytest.fixture
def calls(monkeypatch):
    """The arguments of the pipeline's calls. The pipeline itself does not run."""
    made = []

    def call(pipe, arguments, name, seed):
        made.append(arguments)
        return np.zeros((5, 32, 32, 3), np.uint8), dict.fromkeys(measure.PARTS, 1.0)

    monkeypatch.setattr(generate, "call", call)
    return made


@pytest.fixture
def _no_local_kernels(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", "")  # so that it is restored
    monkeypatch.delenv("LOCAL_KERNELS")


def succeeds(result):
    assert result.exit_code == 0, result.output
    return result.stdout


def pixels(path):
    """The frames of an image or a video."""
    if path.suffix == ".mp4":
        return imageio.imread(path, plugin="FFMPEG")
    with Image.open(path) as image:
        return np.stack([np.asarray(f.convert("RGB")) for f in ImageSequence.Iterator(image)])


def row(output, name):
    """The numbers of a table's row."""
    (line,) = re.findall(rf"^{re.escape(name)}  .*$", output, re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def psnr_of(output):
    (psnr,) = re.findall(r"PSNR of injected against eager: ([\d.]+|inf) dB", output)
    return float(psnr)


# ------------------------------------------------------------------------------------------------
# Results


@pytest.mark.drawn(times=0, period=3)
@every_model
def test_result_is_equal_to_eagers(run, model, monkeypatch, tmp_path):
    given, write, entry = {}, generate.write, pipelines.MODELS[model]
    is_video, denoiser = entry.is_video, entry.denoiser

    def spy(frames, path, fps):
        given[path.name] = frames
        write(frames, path, fps)

    def call(pipe, arguments, name, seed):
        return None if "warm-up" in name else measure.call(pipe, arguments, name, seed)

    monkeypatch.setattr(generate, "write", spy)
    monkeypatch.setattr(generate, "call", call)
    # Texts of a thousand tokens would take most of the time.
    text = {
        name: (min(shape[0], 128), *shape[1:]) if shape[1:] or "mask" in name else shape
        for name, shape in entry.text.items()
    }
    monkeypatch.setitem(pipelines.MODELS, model, dataclasses.replace(entry, text=text))
    ending, num_frames = (".mp4", 9 - 8 % entry.frames_step) if is_video else (".png", 1)
    size = [*SMALL, "--frames", num_frames] if is_video else SMALL
    output = succeeds(run("--model", model, *size, "--compare"))
    kind = f"trained {model}: " if entry.trained else f"{model} with random weights, "
    assert f"Running a small {kind}" in output
    assert f"{denoiser}: in full" in output, "the injection's report"
    injected, both = given[f"{model}{ending}"], given[f"{model}-compare{ending}"]
    assert injected.shape == (num_frames, 64, 96, 3) and both.shape == (num_frames, 64, 192, 3)
    for name, frames in given.items():
        assert pixels(tmp_path / "outputs" / name).shape == frames.shape
    assert injected.std() > 1, "a result without contrast compares equal to anything"
    eager, right = np.split(both, 2, axis=2)
    assert np.array_equal(right, injected)
    assert np.abs(eager.astype(int) - injected).mean() < 1
    # bfloat16 leaves 43 dB or more; a block that is not run, less than 35.
    assert psnr_of(output) > (38 if torch.cuda.is_available() else 60)
    seconds = {part: row(output, part) for part in measure.PARTS}
    for side in (0, 1):
        parts = sum(seconds[part][side] for part in ("text encoding", "all steps", "decoding"))
        assert parts == pytest.approx(seconds["total"][side], abs=0.002)
        assert seconds["all steps"][side] >= 2 * seconds["a step (median)"][side] - 0.002


def test_seed_prompt_and_guidance_determine_the_image(run, tmp_path):
    def image(*args):
        succeeds(run("--model", "sd3", *SMALL, "--seed", 3, "--output", "image.PNG", *args))
        return pixels(tmp_path / "image.PNG")

    first = image()
    assert np.array_equal(first, image())
    changes = {"seed": 4, "prompt": "A blue whale", "negative-prompt": "snow", "guidance": 7}
    for name, value in changes.items():
        assert not np.array_equal(first, image(f"--{name}", value)), name


def test_guidance_of_z_image_is_that_of_its_negative_prompt(run, tmp_path):
    images = []
    for changes in ([], ["--guidance", 3], ["--guidance", 3, "--negative-prompt", "snow"]):
        succeeds(run("--model", "z-image", *SMALL, "--no-kernels", *changes))
        images.append(pixels(tmp_path / "outputs" / "z-image.png"))
    for first, second in itertools.combinations(images, 2):
        assert not np.array_equal(first, second)


def test_prompts_file_gives_numbered_outputs(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("A red fox\n\n  A blue whale\n")
    arguments = ["--model", "sd3", *SMALL, "--no-kernels"]
    output = succeeds(run(*arguments, "--prompts-file", "prompts.txt", "--repeat", 2))
    names = [f"eager, prompt {prompt}, run {repeat}:" for prompt in "12" for repeat in "12"]
    assert [name for name in names if name in output] == names
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"sd3-1.png", "sd3-2.png"}
    for number, prompt in ((1, "A red fox"), (2, "A blue whale")):
        succeeds(run(*arguments, "--prompt", prompt, "--output", "one.png"))
        expected = pixels(tmp_path / "outputs" / f"sd3-{number}.png")
        assert np.array_equal(pixels(tmp_path / "one.png"), expected)


def test_profile_has_the_kernels_of_each_side(run, tmp_path):
    result = run("--model", "ltx", *SMALL_VIDEO, "--dtype", "bfloat16", "--compare", "--profile")
    output = succeeds(result)
    names = {}
    for side in ("eager", "injected"):
        file = "ltx.eager.trace.json" if side == "eager" else "ltx.trace.json"
        events = json.loads((tmp_path / "outputs" / file).read_text())["traceEvents"]
        names[side] = {event["name"] for event in events}
        assert {"text encoding", "step 1", "step 3", "decoding"} <= names[side]
    ours = {side: any(measure.PACKAGE in name for name in names[side]) for side in names}
    assert ours == {"eager": False, "injected": True}
    table = output[output.index("by kernel" if torch.cuda.is_available() else "by operator") :]
    rows = [row(table, name) for name in (*measure.CLASS_NAMES.values(), "total")]
    # Columns: a step of each side, decoding of each side.
    assert np.abs(np.sum(rows[:-1], axis=0) - rows[-1]).max() < 0.05
    products, attention, convolutions, others, _ = rows[:-1]
    assert min(products[:2]) > 0 and min(attention[:2]) > 0 and min(convolutions[2:]) > 0
    assert others[0] == others[2] == 0 < min(others[1], others[3])


def test_table_of_times_has_medians():
    runs = [dict(zip(measure.PARTS, values, strict=True)) for values in ((1, 2, 4, 8, 13),) * 3]
    runs[0] = dict.fromkeys(measure.PARTS, 99.0)
    half = [{part: seconds / 2 for part, seconds in run.items()} for run in runs]
    table = measure.time_table({"eager": runs, "injected": half})
    assert row(table, "a step (median)") == [2, 1, 2] and row(table, "decoding") == [8, 4, 2]
    assert "times as fast" not in measure.time_table({"eager": runs})


def test_psnr():
    video = np.full((2, 4, 4, 3), 100, dtype=np.uint8)
    assert measure.psnr(video, video) == float("inf")
    assert measure.psnr(video, video - 25) == pytest.approx(20.172, abs=1e-3)


@pytest.mark.parametrize("name", ["a.png", "a.JPG", "a.jpeg", "a.webp", "v.MP4", "v.gif", "v.webp"])
def test_formats(tmp_path, name):
    """The format is that of the ending."""
    rows, columns = np.mgrid[0:64, 0:96]
    image = np.stack([rows, columns, rows + columns], axis=-1)
    frames = np.stack([image + 9 * i for i in range(1 if name[0] == "a" else 5)]).astype(np.uint8)
    output = tmp_path / name
    generate.write(frames, output, fps=20)
    assert list(tmp_path.iterdir()) == [output]
    if name == "v.MP4":
        assert imageio.immeta(output, plugin="FFMPEG")["fps"] == 20
        read = imageio.imread(output, plugin="FFMPEG")
    else:
        with Image.open(output) as opened:
            assert opened.format == output.suffix[1:].upper().replace("JPG", "JPEG")
        read = pixels(output)
    assert read.shape == frames.shape
    assert np.abs(read.astype(int) - frames).mean() < 6


@pytest.mark.slow
def test_compiled_result_is_equal_to_eagers(run, _fresh_compiler):
    output = succeeds(run("--model", "ltx", *SMALL_VIDEO, "--compare", "--compile"))
    assert "eager, compiled" in output and "injected, compiled" in output
    assert psnr_of(output) > (38 if torch.cuda.is_available() else 60)


# ------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["flux", "--frames", 9], "--frames is for videos, and flux makes an image."),
        (["flux", "--fps", 9], "--fps is for videos, and flux makes an image."),
        (["flux", "--negative-prompt", "snow"], "flux takes no --negative-prompt."),
        (["wan", "--frames", 10], "--frames must be a multiple of 4 plus 1, got 10."),
        (["ltx", "--frames", 13], "--frames must be a multiple of 8 plus 1, got 13."),
        (["flux", "--width", 40], "--width must be a multiple of 16, got 40."),
        (["ltx", "--height", 48], "--height must be a multiple of 32, got 48."),
        (["flux", "--no-kernels", "--compare"], "--no-kernels and --compare exclude each other."),
        (
            ["flux", "--cuda-graphs", "--offload", "model"],
            "--offload and --cuda-graphs exclude each other.",
        ),
        (
            ["flux", "--output", "image.gif"],
            "--output must end in .png, .jpg, .jpeg, .webp, got image.gif.",
        ),
        (["ltx", "--output", "a.png"], "--output must end in .mp4, .gif, .webp, got a.png."),
        (
            ["flux", "--output", "/dev/null/image.png"],
            "--output /dev/null/image.png cannot be written: /dev/null is not a folder.",
        ),
        (["flux", "--prompts-file", "/dev/null"], "--prompts-file /dev/null has no prompt."),
        (["flux", "--offload", "model"], "--offload needs a CUDA GPU, and there is none."),
        (["flux", "--cuda-graphs"], "--cuda-graphs needs a CUDA GPU, and there is none."),
        (["ltx2", "--height", 32], "--height of ltx2 must be from 64 to 4096, got 32."),
        (["sd3", "--height", 4096], "--height of sd3 must be from 32 to 3072, got 4096."),
        (["cosmos", "--width", 4096], "--width of cosmos must be from 32 to 2048, got 4096."),
        (["flux", "--guidance", "nan"], "--guidance must be a number."),
        (["flux", "--prompt", "\udcff"], "--prompt is not UTF-8."),
        (["ltx", "--negative-prompt", "\udcff"], "--negative-prompt is not UTF-8."),
        (
            ["flux", "--output", f"{'x' * 300}.png"],
            f"--output {'x' * 300}.png cannot be written: File name too long.",
        ),
        (
            ["flux", "--precision", "fp8", "--no-kernels"],
            "--no-kernels and --precision exclude each other.",
        ),
        (
            ["flux", "--precision", "fp8", "--dtype", "float32"],
            "--precision needs --dtype bfloat16 or float16.",
        ),
        (
            ["cosmos", "--lora", LORA],
            "cosmos takes no --lora, because diffusers loads none for it.",
        ),
        (
            ["ltx", "--lora", "no id.safetensors"],
            "--lora is no file or folder, and the Hugging Face Hub does not give no id.safetensors "
            "(HFValidationError).",
        ),
    ],
)
def test_wrong_option_gives_one_sentence(run, tmp_path, args, message):
    if "needs a CUDA GPU" in message and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    result = run("--model", *args)
    assert result.exit_code == 2 and result.output.splitlines()[-1] == f"Error: {message}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [("steps", 1), ("steps", 1000), ("height", -64), ("seed", 2**64), ("repeat", 0), ("fps", 0)],
)
def test_number_out_of_range_gives_one_sentence(run, tmp_path, option, value):
    result = run("--model", "ltx", f"--{option}", value)
    message = f"Error: Invalid value for '--{option}': {value} is not in the range "
    assert result.exit_code == 2 and result.output.splitlines()[-1].startswith(message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "package"), [("precision", "torchao"), ("lora", "peft")])
def test_missing_package_gives_one_sentence(run, monkeypatch, option, package):
    monkeypatch.setitem(sys.modules, package, None)
    result = run("--model", "ltx", f"--{option}", "fp8" if option == "precision" else LORA)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"Error: --{option} needs {package} from pip."


def test_output_that_is_a_folder_gives_one_sentence(run, tmp_path):
    (tmp_path / "image-1.png").mkdir()
    (tmp_path / "prompts.txt").write_text("A red fox\n")
    result = run("--model", "flux", "--prompts-file", "prompts.txt", "--output", "image.png")
    message = "Error: --output image-1.png cannot be written: it is a folder."
    assert result.exit_code == 2 and result.output.splitlines()[-1] == message


def test_without_kernels_none_are_loaded(run, monkeypatch):
    monkeypatch.setattr(pipelines, "get_kernel", None)  # would fail if it were called
    assert "transformer:" not in succeeds(run("--model", "flux", *SMALL, "--no-kernels"))
    assert run("--model", "flux", *SMALL).exit_code == 1, "with kernels it is called"


@pytest.mark.usefixtures("_no_local_kernels")
def test_checkout_without_a_build_gives_one_sentence(run, monkeypatch, tmp_path):
    monkeypatch.setattr(pipelines, "CHECKOUT", tmp_path)
    result = run("--model", "flux")
    assert result.exit_code == 1
    assert result.output == (
        "Error: There is no build for this machine here: run make build, name others with --kernel, or "
        "pass --no-kernels.\n"
    )


@pytest.mark.usefixtures("_no_local_kernels")
def test_kernel_option_takes_a_path_or_a_hub_id(run, monkeypatch, tmp_path):
    loaded = []

    def get_kernel(repo_id, version, trust_remote_code):
        loaded.append((repo_id, pipelines.os.environ.get("LOCAL_KERNELS")))
        raise FileNotFoundError("no variant fits\nand more")

    monkeypatch.setattr(pipelines, "get_kernel", get_kernel)
    for kernel in ("someone/else", tmp_path):
        result = run("--model", "ltx", "--kernel", kernel)
        assert result.exit_code == 1
        (line,) = result.output.splitlines()
        assert "could not be loaded (FileNotFoundError: no variant fits);" in line
    local = f"{pipelines.KERNEL_ID}={tmp_path}"
    assert loaded == [("someone/else", None), (pipelines.KERNEL_ID, local)]


def test_lora_changes_the_image(run, tmp_path):
    pipe = pipelines.random_pipeline(pipelines.MODELS["sd3"], True, "cpu", torch.float32, 0)
    names = ["attn.to_q", "attn.to_out.0"]
    pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    pipe.save_lora_weights(tmp_path / "lora", get_peft_model_state_dict(pipe.transformer))
    images = {}
    loras = ["lora"], ["lora/pytorch_lora_weights.safetensors"], ["lora:0"], ["lora:2", "lora:-1"]
    for given in ([], *([arg for lora in each for arg in ("--lora", lora)] for each in loras)):
        output = succeeds(run("--model", "sd3", *SMALL, "--dtype", "float32", *given))
        images[tuple(given)] = pixels(tmp_path / "outputs" / "sd3.png")
        assert ("runs on 4 layers of the transformer." in output) == bool(given)
        assert "transformer: in full" in output
    without, of_folder, of_file, of_zero, of_two = images.values()
    assert np.array_equal(of_folder, of_file) and not np.array_equal(of_folder, without)
    assert np.array_equal(of_zero, without)
    assert (
        np.abs(of_two.astype(int) - of_folder).max()
        <= 1
        < np.abs(of_two.astype(int) - without).max()
    )


def test_precision_quantizes_the_layers_below_a_lora(run, monkeypatch, kernel):
    """The small model in place of the published one, its narrow layers included."""

    def load_pipeline(*arguments):
        model = pipelines.MODELS["ltx"].trained
        return pipelines.trained_pipeline(model, "cpu", torch.bfloat16), None

    monkeypatch.setattr(generate, "load_kernel", lambda name: kernel)
    monkeypatch.setattr(generate, "load_pipeline", load_pipeline)
    precision = sys.modules[f"{kernel.__name__}.injection.quantized.precision"]
    monkeypatch.setattr(precision, "MIN_FEATURES", 128)
    args = ["--model", "ltx", *SMALL_VIDEO, "--precision", "fp8", "--dtype", "bfloat16"]
    output = succeeds(run(*args, "--lora", LORA, "--compare"))
    assert f"The LoRA {LORA} runs on 12 layers of the transformer.\n" in output
    assert "\n20 linear layers quantized to FP8\n" in output
    assert 20 < psnr_of(output) < 60


# ------------------------------------------------------------------------------------------------
# Failures


def test_nothing_is_printed_before_the_first_sentence(tmp_path):
    """No library's warnings, either."""
    script = CHECKOUT / "examples" / "generate.py"
    command = (sys.executable, script, "--model", "flux", "--precision", "fp8")
    result = run_program(*command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path)
    assert result.returncode == 1 and result.stdout == ""
    message = "Error: --precision needs layers as wide as the published model's, and a small flux would run"
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def lora_of(layer):
    """The shapes of a LoRA for one layer, by name."""
    return {f"transformer.{layer}.lora_{name}.weight": (2, 2) for name in "AB"}


@pytest.mark.parametrize(
    ("model", "weights", "reason"),
    [
        ("sd3", {"foo": (2, 2)}, "Invalid LoRA checkpoint"),
        ("sd3", lora_of("foo"), "Target modules {'foo'} not found"),
        ("sd3", lora_of("transformer_blocks.0.attn.to_q"), "size mismatch for transformer_blocks"),
        ("sd15", lora_of("foo"), "it has no layer of that model"),
        ("sd3", None, "Unable to load weights"),
    ],
)
def test_lora_that_does_not_fit_gives_one_sentence(run, tmp_path, model, weights, reason):
    file = tmp_path / "lora.safetensors"
    if weights is None:
        file.write_text("no weights")
    else:
        save_file({name: torch.zeros(shape) for name, shape in weights.items()}, file)
    result = run("--model", model, "--lora", "lora.safetensors")
    assert result.exit_code == 1
    line = result.output.splitlines()[-1]
    assert line.startswith(
        f"Error: --lora lora.safetensors could not be loaded into a small {model}: "
    )
    assert reason in line and "Error" not in "".join(result.output.splitlines()[:-1])
    assert not list((tmp_path / "outputs").iterdir())


def test_failed_output_leaves_the_earlier_one(tmp_path, monkeypatch):
    frames = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
    export, output = generate.export_to_video, tmp_path / "video.mp4"
    output.write_text("earlier")
    for encode, reason in (
        (lambda frames, path, fps: export(frames[1:], path, fps), "ffmpeg wrote 4 of 5 frames"),
        (lambda frames, path, fps: Path("/dev/full").write_text("all"), "No space left"),
    ):
        monkeypatch.setattr(generate, "export_to_video", encode)
        with pytest.raises(generate.click.ClickException, match=f"not be written: .*{reason}"):
            generate.write(frames, output, 25)
        assert output.read_text() == "earlier" and list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("no 9 GB\nand more"), "not enough memory: no 9 GB"),
        (
            RuntimeError("DefaultCPUAllocator: no 9 GB"),
            "not enough memory: DefaultCPUAllocator: no 9 GB",
        ),
        (ValueError("`height` must be:\n64"), "`height` must be: 64"),
        (None, "the result has values that are not finite"),
    ],
)
def test_failed_run_gives_one_sentence(run, monkeypatch, tmp_path, error, reason):
    def decode(self, latents, *args, **kwargs):
        if error is not None:
            raise error
        return (torch.full((1, 3, 64, 96), torch.nan),)

    monkeypatch.setattr(diffusers.AutoencoderKL, "decode", decode)
    result = run("--model", "flux", *SMALL, "--no-kernels")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == f"Error: eager: {reason}."
    assert not list((tmp_path / "outputs").iterdir())


# ------------------------------------------------------------------------------------------------
# Small trained models


@pytest.fixture(scope="module")
def trained():
    return pipelines.trained_pipeline(pipelines.MODELS["ltx"].trained, "cpu", torch.float32)


def test_trained_model_runs_at_its_size_with_its_prompt(run, calls):
    output = succeeds(run("--model", "ltx", "--no-kernels"))
    assert "Running a small trained ltx: " in output
    assert "noise" not in output and "does not know" not in output
    assert calls == [
        {
            "prompt": "A red ball bounces to the right over green grass.",
            "negative_prompt": "",
            "guidance_scale": 3.0,
            "num_inference_steps": 30,
            "height": 256,
            "width": 256,
            "num_frames": 49,
        }
    ]


def test_options_change_the_trained_models_arguments(run, calls):
    changes = ["--guidance", 5, "--negative-prompt", "the moon", "--prompt", "A blue ring grows."]
    succeeds(run("--model", "ltx", "--no-kernels", *SMALL_VIDEO, *changes))
    (arguments,) = calls
    assert [arguments[name] for name in pipelines.SIZE] == [2, 64, 96, 9]
    assert arguments["guidance_scale"] == 5 and arguments["negative_prompt"] == "the moon"
    assert arguments["prompt"] == "A blue ring grows."


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("An orange star turns over the moon.", []),
        ("A cyan cross grows over a cup of coffee, and a red ring moves up over gravel", []),
        (
            "A redder fox trots over green grass, and a Red fox shrinks.",
            ["redder", "fox", "trots", "Red"],
        ),
        ("", []),
    ],
)
def test_words_that_the_trained_model_does_not_know(trained, prompt, unknown):
    assert pipelines.unknown_words(trained, prompt) == unknown


def test_unknown_words_of_all_prompts_are_named_once(run, calls, tmp_path):
    (tmp_path / "prompts.txt").write_text("A red fox\nA blue ball grows\nA red whale, a fox\n")
    output = succeeds(run("--model", "ltx", "--no-kernels", "--prompts-file", "prompts.txt"))
    assert output.count("does not know") == 1
    assert "\nIt does not know these words of the prompt: fox, whale.\n" in output
    prompts = [arguments["prompt"] for arguments in calls]
    assert prompts[1:] == ["A blue ball grows", "A red whale, a fox"]


@pytest.mark.usefixtures("run")  # the published weights are out of reach
def test_trained_autoencoder_is_in_float32_on_the_cpu():
    for device, vae_dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        pipe, reason = pipelines.load_pipeline(pipelines.MODELS["ltx"], device, torch.bfloat16)
        assert reason and pipe.vae.dtype == vae_dtype
        assert pipe.transformer.dtype == pipe.text_encoder.dtype == torch.bfloat16


def test_random_weights_take_no_trained_model(run, calls):
    model = pipelines.MODELS["ltx"]
    pipe, reason = pipelines.load_pipeline(model, "cpu", torch.float32, True)
    assert pipe.text_encoder is None and reason == "there is no CUDA GPU"
    arguments = pipelines.call_arguments(model, pipe, True, "a red fox")
    assert tuple(arguments[name] for name in pipelines.SIZE) == pipelines.SMALL_SIZE
    assert arguments["prompt_embeds"].shape == (1, 128, 64)
    if not torch.cuda.is_available():
        output = succeeds(run("--model", "ltx", "--no-kernels", "--random-weights"))
        assert "Running a small ltx with random weights, and the result is noise: " in output


def test_published_model_has_its_own_size_and_prompt(run, calls, monkeypatch, trained):
    model = pipelines.MODELS["ltx"]
    monkeypatch.setattr(pipelines, "published_pipeline", lambda model, dtype: trained)
    assert pipelines.load_pipeline(model, "cuda", torch.bfloat16) == (trained, None)
    monkeypatch.setattr(generate, "load_pipeline", lambda *arguments: (trained, None))
    output = succeeds(run("--model", "ltx", "--no-kernels"))
    assert "Running" not in output and "does not know" not in output
    size = dict(zip(pipelines.SIZE, model.size, strict=True))
    assert calls == [{"prompt": generate.PROMPT, **model.call, **size}]


# ------------------------------------------------------------------------------------------------
# Published models


@pytest.mark.usefixtures("run")  # the published weights are out of reach
def test_unreachable_weights_give_a_small_model(monkeypatch):
    monkeypatch.setattr(pipelines, "random_pipeline", lambda *arguments: arguments)
    model, rest = pipelines.MODELS["flux"], ("cuda", torch.bfloat16)
    assert pipelines.load_pipeline(model, *rest) == ((model, True, *rest, 0), OUT_OF_REACH)
    assert pipelines.load_pipeline(model, *rest, True) == ((model, False, *rest, 0), None)


def dtypes(pipe):
    modules = {name: part for name, part in pipe.components.items() if hasattr(part, "parameters")}
    return {
        f"{name}.{parameter}": p.dtype
        for name, module in modules.items()
        for parameter, p in module.named_parameters()
    }


def vae_factor(pipe, *names):
    """The pipeline's attribute, which has one of these names after `vae_`."""
    (factor,) = (value for name in names if (value := getattr(pipe, f"vae_{name}", None)))
    return factor


def side_step(pipe, entry):
    """Sides are multiples of it: pixels of a latent times latents of a token."""
    names = (
        "scale_factor",
        "scale_factor_spatial",
        "spatial_compression_ratio",
        "spatial_scale_factor",
    )
    scale = vae_factor(pipe, *names)
    if entry.pipeline in ("FluxPipeline", "Flux2Pipeline", "ChromaPipeline", "OvisImagePipeline"):
        return 2 * scale  # the pipeline makes patches itself
    # A UNet halves the latents; Z-Image's patches have more than one size.
    patch = getattr(pipe, entry.denoiser).config.get("patch_size", 2)
    return scale * (patch if isinstance(patch, int) else patch[-1])


def frames_step(pipe):
    names = ("scale_factor_temporal", "temporal_compression_ratio", "temporal_scale_factor")
    return vae_factor(pipe, *names)


published_models = pytest.mark.parametrize(
    "model", [name for name, entry in pipelines.MODELS.items() if entry.hub_id is not None]
)


def test_weights_that_are_not_on_the_hub():
    with pytest.raises(LookupError, match="its weights are not on the Hub"):
        pipelines.published_pipeline(pipelines.MODELS["krea2"], torch.bfloat16)


@published_models
def test_published_pipeline_is_loaded(model, monkeypatch, tmp_path):
    """From a folder as the Hub holds the model's, without text encoders and safety checker, and small."""
    entry = pipelines.MODELS[model]
    random = pipelines.random_pipeline(entry, True, "cpu", torch.bfloat16, 0)
    random.save_pretrained(tmp_path)
    given = {
        name: part
        for name, part in random.components.items()
        if part is None or isinstance(part, pipelines.SkipSafetyChecks)
    }
    from_pretrained = functools.partial(diffusers.DiffusionPipeline.from_pretrained, **given)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", from_pretrained)
    local = dataclasses.replace(entry, hub_id=str(tmp_path))
    pipe = pipelines.published_pipeline(local, torch.bfloat16)
    assert type(pipe).__name__ == entry.pipeline
    assert dtypes(pipe) == dtypes(random), "random weights have the dtypes of the published ones"
    monkeypatch.setattr(pipe, "text_encoder", object())
    arguments = pipelines.call_arguments(entry, pipe, False, "a red fox")
    size = dict(zip(pipelines.SIZE, entry.size, strict=False))
    assert arguments == {"prompt": "a red fox", **entry.call, **size}
    taken = inspect.signature(getattr(diffusers, entry.pipeline).__call__).parameters
    assert arguments.keys() <= taken.keys()
    # No size that the options let through, the published one included, is changed by the pipeline.
    _, height, width, *frames = entry.size
    assert height % entry.side_step == width % entry.side_step == 0
    assert side_step(pipe, entry) == entry.side_step
    if entry.is_video:
        assert frames_step(pipe) == entry.frames_step
        assert frames[0] % entry.frames_step == 1


# ------------------------------------------------------------------------------------------------
# The notebook


def test_notebook_is_committed_without_outputs():
    cells = json.loads((CHECKOUT / "examples" / "quickstart.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


# The notebook's functions, for a short video of a few steps.
SHORT_CALLS = """
import pipelines
arguments_of = pipelines.call_arguments
size = {"num_frames": 17, "num_inference_steps": 4}
pipelines.call_arguments = lambda *given: {**arguments_of(*given), **size}
"""


@pytest.mark.slow
def test_notebook_runs(monkeypatch):
    monkeypatch.chdir(CHECKOUT / "examples")
    cells = json.loads((CHECKOUT / "examples" / "quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the small model, on a GPU as well
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests use the other cores
    output = run_python("\n".join([SHORT_CALLS, *code]))
    (psnr,) = re.findall(r"^PSNR ([\d.]+) dB", output, re.MULTILINE)
    assert float(psnr) > 38
    assert "transformer: in full" in output and output.endswith("same bits as eager: True")


# -- Sliding tiles ----------------------------------------------------------------------------------


def test_sliding_tiles(kernel, device):
    """Against Wan's processor with the same mask, which has all tokens that are near."""
    from diffusers.models.transformers import transformer_wan

    grid, tile, window = (3, 8, 12), (1, 4, 4), (3, 1, 3)
    processor = transformer_wan.WanAttnProcessor()
    attention = transformer_wan.WanAttention(128, heads=2, dim_head=64, processor=processor)
    attention.to(device, torch.bfloat16)
    rotary = transformer_wan.WanRotaryPosEmbed(64, (1, 2, 2), 32).to(device)
    tables = rotary(torch.empty(1, 4, 3, 16, 24, device=device))
    x = torch.randn(2, 288, 128, device=device).bfloat16()
    order, is_near = sliding_tiles.tile_order(grid, tile, window)
    block = order.argsort() // 128
    mask = is_near[block][:, block]
    places = torch.cartesian_prod(*map(torch.arange, grid)) // torch.tensor(tile)
    distance = (places[:, None] - places).abs()
    assert mask[(distance <= torch.tensor([1, 0, 1])).all(-1)].all() and not mask.all()
    with torch.no_grad():
        options = {"attention_mask": mask[None, None].to(device), "rotary_emb": tables}
        expected = attention(x, **options)
        full = attention(x, rotary_emb=tables)
        attention.set_processor(sliding_tiles.SlidingTiles(kernel, grid, tile, window, device))
        out = attention(x, rotary_emb=tables)
    assert relative_distance(out, expected) < 0.02 < 0.05 < relative_distance(full, expected)

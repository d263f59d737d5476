"""The example: a video comes out, the options are checked, and the published weights are loaded."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("imageio_ffmpeg", reason="the example writes its video with ffmpeg")
import imageio.v3 as imageio
from click.testing import CliRunner

CHECKOUT = Path(__file__).resolve().parents[1]
SMALL = ["--frames", "9", "--height", "64", "--width", "64", "--steps", "2"]


@pytest.fixture(scope="module")
def example():
    path = CHECKOUT / "examples" / "ltx_video" / "generate.py"
    spec = importlib.util.spec_from_file_location("ltx_video_generate", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(example, monkeypatch):
    """Runs the script with arguments; the published weights are out of reach."""

    def out_of_reach(dtype):
        raise LookupError("the weights are out of reach")

    monkeypatch.setattr(example, "published_pipeline", out_of_reach)
    return lambda *args: CliRunner().invoke(example.main, [str(arg) for arg in args])


def test_compare_ends_in_a_video_equal_to_eager(run, tmp_path):
    output = tmp_path / "folder" / "video.mp4"
    result = run(*SMALL, "--compare", "--dtype", "float32", "--output", output)
    assert result.exit_code == 0, result.output
    assert imageio.imread(output).shape == (9, 64, 64, 3)
    lines = result.stdout.splitlines()
    assert sum("a small LTX with random weights" in line for line in lines) == 1
    assert any("LTXVideoTransformerBlock" in line for line in lines), "the injection's report"
    (comparison,) = (line for line in lines if "PSNR" in line)
    assert float(comparison.split("PSNR")[1].split("dB")[0]) > 60
    assert lines[-1] == f"Wrote {output}"


def test_seed_and_prompt_determine_the_video(run, tmp_path):
    def video(name, *args):
        output = tmp_path / f"{name}.mp4"
        result = run(*SMALL, "--output", output, *args)
        assert result.exit_code == 0, result.output
        return imageio.imread(output)

    first = video("first", "--seed", 3)
    assert np.array_equal(first, video("again", "--seed", 3))
    assert not np.array_equal(first, video("seed", "--seed", 4))
    assert not np.array_equal(first, video("prompt", "--seed", 3, "--prompt", "A blue whale"))


def test_without_kernels(run, monkeypatch, example, tmp_path):
    monkeypatch.setattr(example, "get_kernel", None)  # would fail if it were called
    result = run(*SMALL, "--no-kernels", "--guidance", 1, "--output", tmp_path / "video.mp4")
    assert result.exit_code == 0, result.output
    assert imageio.imread(tmp_path / "video.mp4").shape == (9, 64, 64, 3)


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--frames", "10"], "Error: --frames must be a multiple of 8 plus 1, got 10."),
        (["--height", "100"], "Error: --height must be a multiple of 32, got 100."),
        (["--width", "65"], "Error: --width must be a multiple of 32, got 65."),
        (["--no-kernels", "--compare"], "Error: --no-kernels and --compare exclude each other."),
        (
            ["--no-kernels", "--kernel", "a/b"],
            "Error: --no-kernels and --kernel exclude each other.",
        ),
        (["--output", "video.gif"], "Error: --output must end in .mp4, got video.gif."),
        (
            ["--steps", "1"],
            "Error: Invalid value for '--steps': 1 is not in the range x>=2.",
        ),
        (
            ["--dtype", "int8"],
            "Error: Invalid value for '--dtype': 'int8' is not one of "
            "'bfloat16', 'float16', 'float32'.",
        ),
        pytest.param(
            ["--nvtx"], "Error: --nvtx needs a CUDA GPU, and there is none.", marks=NO_GPU
        ),
        pytest.param(
            ["--offload", "model"],
            "Error: --offload needs a CUDA GPU, and there is none.",
            marks=NO_GPU,
        ),
    ],
)
def test_wrong_option_gives_one_sentence(run, args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == message


def test_kernel_option_takes_a_path_or_a_hub_id(example, monkeypatch, tmp_path):
    loaded = []

    def get_kernel(repo_id, version, trust_remote_code):
        loaded.append((repo_id, example.os.environ.get("LOCAL_KERNELS")))

    monkeypatch.setattr(example, "get_kernel", get_kernel)
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    example.load_kernel("someone/else")
    example.load_kernel(str(tmp_path))
    assert loaded == [
        ("someone/else", None),
        (example.KERNEL_ID, f"{example.KERNEL_ID}={tmp_path}"),
    ]


def test_kernel_that_does_not_load_gives_one_sentence(run, example, monkeypatch):
    def get_kernel(*args, **kwargs):
        raise FileNotFoundError("no variant fits\nand more")

    monkeypatch.setattr(example, "get_kernel", get_kernel)
    result = run("--kernel", "someone/else")
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("Error: someone/else could not be loaded (FileNotFoundError: no variant")


def test_weights_out_of_reach(example, monkeypatch):
    class Unreachable:
        def model_info(self, *args, **kwargs):
            raise ConnectionError

    monkeypatch.setattr(example, "HfApi", Unreachable)
    monkeypatch.setattr(example, "MODEL_ID", "nobody/has-this-model")
    with pytest.raises(LookupError, match=r"does not answer \(ConnectionError\) and nobody/has"):
        example.published_pipeline(torch.float32)


@pytest.fixture(scope="module")
def saved_pipeline(example, tmp_path_factory):
    """A folder as the Hub holds LTX-Video's: all five components, small, with random weights."""
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "▁a", "▁red", "▁fox"]
    pipe = example.random_pipeline(small=True, device="cpu", dtype=torch.float32, seed=0)
    pipe.register_modules(
        tokenizer=T5TokenizerFast(
            vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=128
        ),
        text_encoder=T5EncoderModel(
            T5Config(
                vocab_size=len(pieces), d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4
            )
        ).eval(),
    )
    folder = tmp_path_factory.mktemp("ltx")
    pipe.save_pretrained(folder)
    return folder


def test_published_pipeline_is_loaded_and_injected(
    example, kernel, device, saved_pipeline, monkeypatch
):
    monkeypatch.setattr(example, "MODEL_ID", str(saved_pipeline))
    pipe = example.published_pipeline(torch.float32).to(device)
    arguments = {"prompt": "a red fox", "num_frames": 9, "height": 64, "width": 64}
    arguments["num_inference_steps"] = 2
    eager = example.generate(pipe, arguments, "eager", 0, device, nvtx=False)
    report = kernel.inject_kernels(pipe)
    assert report.num_replaced > 0
    kernels = example.generate(pipe, arguments, "kernels", 0, device, nvtx=device == "cuda")
    assert kernels.frames.shape == (9, 64, 64, 3)
    assert kernels.frames.std() > 0.05, "a video without contrast compares equal to anything"
    assert example.psnr(eager.frames, kernels.frames) > 60


def test_nvtx_ranges_follow_the_stages(example, monkeypatch):
    ranges, depth = [], [0]

    def push(name):
        ranges.append((depth[0], name))
        depth[0] += 1

    def pop():
        depth[0] -= 1

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    pipe = example.random_pipeline(small=True, device="cpu", dtype=torch.float32, seed=0)
    arguments = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 3}
    for name in ("prompt", "negative_prompt"):
        embeddings, mask = example.made_up_embeddings(name, 64, torch.float32)
        arguments.update({f"{name}_embeds": embeddings, f"{name}_attention_mask": mask})
    example.generate(pipe, arguments, "nvtx", 0, "cpu", nvtx=True)
    assert ranges == [(0, n) for n in ("encode prompt", "step 0", "step 1", "step 2", "decode")]
    assert depth == [0], "every range is closed"
    example.generate(pipe, arguments, "no nvtx", 0, "cpu", nvtx=False)
    assert len(ranges) == 5, "the pipeline is left as it was"


def test_psnr(example):
    video = np.full((2, 4, 4, 3), 0.5, dtype=np.float32)
    assert example.psnr(video, video) == float("inf")
    assert example.psnr(video, video + 0.1) == pytest.approx(20, abs=1e-4)

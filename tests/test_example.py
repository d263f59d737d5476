"""The example: a video comes out, the options are checked, and the published weights are loaded."""

import contextlib
import importlib.util
import resource
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


@pytest.fixture(scope="module")
def common(example):
    """What the examples share, as the script has imported it."""
    return sys.modules[example.load_kernel.__module__]


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


def test_without_kernels(run, monkeypatch, common, tmp_path):
    monkeypatch.setattr(common, "get_kernel", None)  # would fail if it were called
    result = run(*SMALL, "--no-kernels", "--guidance", 1, "--output", tmp_path / "video.mp4")
    assert result.exit_code == 0, result.output
    assert imageio.imread(tmp_path / "video.mp4").shape == (9, 64, 64, 3)


@contextlib.contextmanager
def largest_file(size):
    """No file of this process, or of one that it starts, becomes larger: as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
        (
            ["--seed", 2**64],
            "Error: Invalid value for '--seed': 18446744073709551616 is not in the range "
            "0<=x<=18446744073709551615.",
        ),
        (["--guidance", "nan"], "Error: --guidance must be a number, got nan."),
        (
            ["--guidance", "inf"],
            "Error: Invalid value for '--guidance': inf is not in the range 1<=x<=100.",
        ),
        (
            ["--fps", 1000],
            "Error: Invalid value for '--fps': 1000 is not in the range 1<=x<=240.",
        ),
        (["--prompt", "\udcff"], "Error: --prompt must be text in UTF-8."),
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
def test_wrong_option_gives_one_sentence(run, no_work, args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == message


def test_video_larger_than_the_memory_is_refused(run, no_work):
    result = run("--frames", 9993, "--height", 4096, "--width", 4096)
    assert result.exit_code == 2
    assert "9993 frames of 4096x4096 take 2011.9 GB, and the memory" in result.output


def test_largest_seed(example):
    torch.Generator().manual_seed(example.MAX_SEED)
    with pytest.raises((ValueError, RuntimeError)):
        torch.Generator().manual_seed(example.MAX_SEED + 1)


def test_output_that_cannot_be_written_is_refused_before_the_work(run, no_work, tmp_path):
    (tmp_path / "file.mp4").write_text("earlier")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "full.mp4").symlink_to("/dev/full")
    (tmp_path / "circle.mp4").symlink_to("circle.mp4")
    (tmp_path / "proc").symlink_to("/proc")
    before = sorted(tmp_path.rglob("*"))

    def refusal(name):
        result = run(*SMALL, "--output", tmp_path / name)
        assert result.exit_code == 2
        line = result.output.splitlines()[-1]
        assert line.startswith("Error: ") and line.endswith("."), line
        return line.removeprefix(f"Error: --output {tmp_path / name} cannot be written: ")

    assert refusal("proc/video.mp4") == "No such file or directory."
    assert refusal("proc/new/folder/video.mp4") == "No such file or directory."
    assert refusal("file.mp4/video.mp4") == f"{tmp_path}/file.mp4 is not a folder."
    assert refusal("full.mp4") == "it is not a regular file."
    assert "loop" in refusal("circle.mp4")
    assert refusal(f"{'long' * 64}.mp4") == "File name too long."
    assert refusal("folder.mp4").endswith("is a directory.")
    with largest_file(1000):
        assert refusal("file.mp4") == "File too large."
        assert refusal("new/folder/video.mp4") == "File too large."
    assert sorted(tmp_path.rglob("*")) == before, "what was made on the way is gone"
    assert (tmp_path / "file.mp4").read_text() == "earlier"


@pytest.fixture
def frames():
    return np.random.default_rng(0).random((9, 64, 64, 3), dtype=np.float32)


def test_video_takes_the_place_of_an_earlier_one(example, frames, tmp_path):
    output = tmp_path / "video.mp4"
    output.write_text("earlier")
    output.chmod(0o640)
    example.write_video(frames, output, 30)
    assert imageio.imread(output).shape == (9, 64, 64, 3)
    assert imageio.immeta(output, plugin="FFMPEG")["fps"] == 30
    assert output.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [output]


def test_video_that_does_not_play_is_not_written(example, frames, tmp_path, monkeypatch):
    encode = example.encode_video

    def truncated(frames, path, fps):
        encode(frames, path, fps)
        path.write_bytes(path.read_bytes()[:-1000])

    def reason(encoding):
        """Why a video is not written; what stood in its place stays."""
        output = tmp_path / "video.mp4"
        output.write_text("earlier")
        monkeypatch.setattr(example, "encode_video", encoding)
        with pytest.raises(example.click.ClickException) as raised:
            example.write_video(frames, output, 25)
        assert output.read_text() == "earlier" and list(tmp_path.iterdir()) == [output]
        message = raised.value.message
        assert message.startswith(f"The video could not be written to {output}: ")
        assert message.endswith(".") and "\n" not in message
        return message.split(": ", 1)[1]

    plays = "it plays {} frames of {} at {} a second."
    fewer = reason(lambda frames, path, fps: encode(frames[1:], path, fps))
    assert fewer == plays.format(8, "64x64", 25.0)
    smaller = reason(lambda frames, path, fps: encode(frames[:, :32], path, fps))
    assert smaller == plays.format(9, "64x32", 25.0)
    faster = reason(lambda frames, path, fps: encode(frames, path, fps + 1))
    assert faster == plays.format(9, "64x64", 26.0)
    assert "cannot be read" in reason(truncated)
    assert "cannot be read" in reason(lambda frames, path, fps: path.write_bytes(b""))
    with largest_file(1000):
        assert reason(encode) == "ffmpeg failed (File size limit exceeded)."


def test_failing_ffmpeg_is_named(example, frames, tmp_path):
    with pytest.raises(OSError, match=r"^ffmpeg failed \(.*No such file or directory\)$"):
        example.encode_video(frames, tmp_path / "missing" / "video.mp4", 25)


def test_out_of_memory_gives_one_sentence(run, example, monkeypatch, tmp_path):
    def forward(*args, **kwargs):
        raise torch.OutOfMemoryError("Tried to allocate 2 TiB\nand more")

    monkeypatch.setattr(example.LTXVideoTransformer3DModel, "forward", forward)
    result = run(*SMALL, "--no-kernels", "--output", tmp_path / "new" / "video.mp4")
    assert result.exit_code == 1
    last = result.output.splitlines()[-1]
    assert last == "Error: eager: not enough memory: Tried to allocate 2 TiB."
    assert not list(tmp_path.iterdir())


def test_kernel_option_takes_a_path_or_a_hub_id(example, common, monkeypatch, tmp_path):
    loaded = []

    def get_kernel(repo_id, version, trust_remote_code):
        loaded.append((repo_id, common.os.environ.get("LOCAL_KERNELS")))

    monkeypatch.setattr(common, "get_kernel", get_kernel)
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    example.load_kernel("someone/else")
    example.load_kernel(str(tmp_path))
    assert loaded == [
        ("someone/else", None),
        (common.KERNEL_ID, f"{common.KERNEL_ID}={tmp_path}"),
    ]


def test_kernel_that_does_not_load_gives_one_sentence(run, common, monkeypatch):
    def get_kernel(*args, **kwargs):
        raise FileNotFoundError("no variant fits\nand more")

    monkeypatch.setattr(common, "get_kernel", get_kernel)
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

"""The benchmarks: their arithmetic, a tiny run of each, and README tables that agree."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT / "benchmarks"), str(CHECKOUT / "tools")]

import bench_accuracy  # noqa: E402
import bench_models  # noqa: E402
import bench_pipeline  # noqa: E402
import kernel_times  # noqa: E402
import ltx  # noqa: E402
import timing  # noqa: E402

import render_readme  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_bias_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_...>", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>", "gemm"),
        ("triton_tem_fused_addmm_gelu_4", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::...)", "attention"),
        ("triton_red_fused__scaled_dot_product_cudnn_attention_addmm_mul_3", "other"),
        ("triton_poi_fused_addmm_gelu_view_7", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernel>", "other"),
        ("void h100_diffusers_kernels::row_norm_kernel<RmsNorm, Modulated>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernel_class(name, expected):
    assert kernel_times.classify(name) == expected


def test_breakdown_adds_up_to_one_call():
    def event(name, microseconds, category="kernel"):
        return {"name": name, "cat": category, "dur": microseconds, "ts": 0}

    events = [
        *[event("nvjet_a", 1000), event("nvjet_b", 500), event("cudnn_sdpa", 2000)] * 2,
        *[event("void h100_diffusers_kernels::norm", 300), event("elementwise", 100)] * 4,
        event("Memset (Device)", 50, "gpu_memset"),
        event("cudaLaunchKernel", 7000, "cuda_runtime"),
        {"name": "process_name", "ph": "M"},
    ]
    result = kernel_times.breakdown(events, calls=2, top=1)
    assert result["classes"] == {
        "gemm": {"ms": 1.5, "launches": 2},
        "attention": {"ms": 2, "launches": 1},
        "other": {"ms": pytest.approx(0.825), "launches": 4.5},
    }
    assert result["total"] == {"ms": pytest.approx(4.325), "launches": 7.5}
    assert result["ours"] == {"ms": pytest.approx(0.6), "launches": 2}
    (largest,) = result["largest_others"]
    assert largest["ours"] and largest["ms"] == pytest.approx(0.6)


def test_idle_time_is_what_no_kernel_covers():
    intervals = [(10.0, 14.0), (0.0, 5.0), (3.0, 4.0), (12.0, 13.0), (20.0, 21.0)]
    assert kernel_times.idle(intervals) == pytest.approx(5.0 + 6.0)


def test_breakdown_of_no_kernels_is_an_error():
    with pytest.raises(RuntimeError, match="no kernel"):
        kernel_times.breakdown([{"name": "aten::add", "cat": "cpu_op", "dur": 1}], calls=1)


def test_interleave_takes_turns():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    durations = iter(range(60))

    def measure(function, device):
        function()
        return next(durations)

    samples = timing.interleave(functions, 20, CPU, measure)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 3  # no function always comes after the same other one
    assert list(samples) == ["a", "b", "c"]
    for name, values in samples.items():
        assert values == [i for i, call in enumerate(calls) if call == name]


def test_summary_and_speedups():
    summary = timing.summarize([4.0, 1.0, 2.0, 3.0, 10.0])
    assert summary == {"median": 3, "min": 1, "max": 10, "spread": 2 / 3, "samples": 5}
    assert timing.speedups({"eager": 3.0, "injected": 2.0}) == {
        "eager": {"injected": pytest.approx(2 / 3)},
        "injected": {"eager": 1.5},
    }


def test_time_to_full_speed_counts_the_slow_forwards(monkeypatch):
    clock = [0.0]
    forwards = iter([3.0, 1.2, 1.04, 1.0, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def advance(seconds):
        clock[0] += seconds

    result = timing.time_to_full_speed(lambda: advance(0.5), lambda: advance(next(forwards)), CPU)
    assert result["change_s"] == 0.5
    assert result["first_forward_s"] == 3
    assert result["forwards_before"] == 2
    assert result["full_speed_s"] == pytest.approx(0.5 + 3 + 1.2 + 1.04)


@pytest.fixture(scope="module")
def tiny():
    return ltx.transformer(CPU, torch.float32, tiny=True)


def test_published_size_is_ltx_video_2b():
    with torch.device("meta"):
        model = ltx.LTXVideoTransformer3DModel()
    assert 1.9e9 < sum(p.numel() for p in model.parameters()) < 2.0e9
    assert ltx.VideoSize(49, 512, 768).tokens == 2688
    assert ltx.VideoSize(161, 512, 768).tokens == 8064


def test_twin_shares_weights_but_no_modules(tiny):
    twin = ltx.twin(tiny)
    pairs = zip(tiny.named_parameters(), twin.named_parameters(), strict=True)
    assert all(a == b and p is q for (a, p), (b, q) in pairs)
    assert not set(map(id, tiny.modules())) & set(map(id, twin.modules()))


def test_inputs_are_what_the_pipeline_passes(tiny, monkeypatch):
    """Names, shapes and dtypes of the benchmark's forward and of the pipeline's."""
    size = ltx.VideoSize(9, 64, 96)
    passed = {}

    def forward(**kwargs):
        passed.update(kwargs)
        return (kwargs["hidden_states"],)

    twin = ltx.twin(tiny)
    monkeypatch.setattr(twin, "forward", forward)
    ltx.pipeline(twin, ltx.vae(CPU, torch.float32, tiny=True))(
        **ltx.prompt(tiny, CPU, torch.float32),
        num_frames=size.frames,
        height=size.height,
        width=size.width,
        frame_rate=ltx.FRAME_RATE,
        num_inference_steps=2,
        guidance_scale=3.0,
        output_type="latent",
    )
    assert passed.pop("attention_kwargs") is None
    benchmark = ltx.inputs(tiny, size, CPU, torch.float32)
    assert set(benchmark) == set(passed)
    for name, value in benchmark.items():
        if isinstance(value, torch.Tensor):
            assert (value.shape, value.dtype) == (passed[name].shape, passed[name].dtype), name
        else:
            assert value == passed[name], name
    for name in ("encoder_hidden_states", "encoder_attention_mask"):
        assert torch.equal(benchmark[name], passed[name]), name


@pytest.fixture(scope="module")
def results(kernel, device, tmp_path_factory):
    """The JSON of a tiny run of each benchmark."""
    folder = tmp_path_factory.mktemp("results")

    def run(benchmark, name, *args):
        output = folder / f"{name}.json"
        options = ["--device", device, "--tiny", "--output", str(output), *args]
        result = CliRunner().invoke(benchmark.main, options, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    run(bench_models, "models", "--modes", "injected,eager", "--rounds", "2")
    run(bench_pipeline, "pipeline", "--rounds", "1", "--dtype", "float32")
    run(bench_accuracy, "accuracy")
    return folder


def load(results, name):
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def test_models(results, device):
    result = load(results, "models")
    assert result["environment"]["kernel_ids"], "the kernel's id is recorded"
    assert [entry["tokens"] for entry in result["sizes"].values()] == [12, 18]
    for entry in result["sizes"].values():
        assert list(entry["modes"]) == ["eager", "injected"]
        eager, injected = (entry["modes"][mode] for mode in ("eager", "injected"))
        assert entry["speedups"]["injected"]["eager"] == pytest.approx(
            eager["ms"]["median"] / injected["ms"]["median"]
        )
        assert eager["distance_from_eager"] == 0
        assert 0 < injected["distance_from_eager"] < 0.05
        assert 0 < entry["injection"]["change_s"] < entry["injection"]["full_speed_s"]
        if device == "cuda":
            assert injected["kernels"]["ours"]["launches"] > 0
            assert eager["kernels"]["ours"]["launches"] == 0


def test_pipeline(results):
    for entry in load(results, "pipeline")["videos"].values():
        assert list(entry["modes"]) == ["eager", "injected"]
        injected = entry["modes"]["injected"]
        assert injected["seconds"]["samples"] == 1
        psnr = injected["psnr_to_eager_db"]
        assert psnr is None or psnr > 60  # None: the same video, bit for bit


def test_accuracy(results, kernel):
    result = load(results, "accuracy")
    measured = {entry["operation"].split(",")[0] for entry in result["operations"]}
    operations = {
        name
        for name in kernel.__all__
        if name.islower() and name not in ("inject_kernels", "eject_kernels")
    }
    assert measured == operations
    assert {entry["dtype"] for entry in result["operations"]} == {"bfloat16", "float16", "float32"}
    for entry in result["operations"]:
        assert 0 <= entry["kernel"] < 0.01, entry
        assert entry["ratio"] == bench_accuracy.ratio(entry["kernel"], entry["eager"])
    (model,) = result["models"]
    assert len(model["draws"]) == 3
    assert 0 < model["kernel"] < 0.1 and 0 < model["eager"] < 0.1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sizes", "49x512"], "a size is FRAMESxHEIGHTxWIDTH, got '49x512'"),
        (["--sizes", "48x512x768"], "frames must be a multiple of 8 plus 1"),
        (["--modes", "eager,fast"], "got 'fast'"),
    ],
)
def test_wrong_option(args, message):
    result = CliRunner().invoke(bench_models.main, args)
    assert result.exit_code == 2
    assert message in result.output


def rendered(results, name):
    return render_readme.render(f"# T\n\n<!-- table: {name} -->\n<!-- end table -->\n", results)


@pytest.mark.parametrize("name", ["models", "pipeline", "accuracy_operations", "accuracy_models"])
def test_table_is_rendered_once_and_for_all(results, name):
    text = rendered(results, name)
    assert render_readme.render(text, results) == text
    environment = load(results, name.split("_")[0])["environment"]
    assert environment["command"] in text and environment["torch"] in text


def test_table_shows_the_figures(results, tmp_path):
    record = load(results, "pipeline")
    video = record["videos"]["9x64x96:3"]
    video["modes"]["injected"]["seconds"]["median"] = 12.345
    video["speedups"]["injected"]["eager"] = 6.789
    (tmp_path / "pipeline.json").write_text(json.dumps(record))
    (row,) = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in rendered(tmp_path, "pipeline").splitlines()
        if "injected" in line and "9 frames 64×96, 3 steps" in line
    )
    assert row == ["9 frames 64×96, 3 steps", "injected", "12.35 s", "6.79×"]


def test_gpu_tables(tmp_path):
    """The tables that need a GPU's figures, from made-up ones."""
    classes = {"gemm": 25.0, "attention": 8.0, "other": 4.25}
    entry = {
        "modes": {
            "injected": {
                "kernels": {
                    "classes": {key: {"ms": ms, "launches": 1} for key, ms in classes.items()},
                    "total": {"ms": 37.25, "launches": 640},
                    "idle_ms": 1.25,
                }
            }
        },
        "injection": {
            "change_s": 0.0123,
            "full_speed_s": 0.456,
            "allocated_growth_bytes": 50,
            "weights_bytes": 10000,
        },
    }
    names = ("device", "torch", "diffusers", "kernels", "date", "command")
    record = {"environment": dict.fromkeys(names, "x"), "sizes": {"49x512x768": entry}}
    (tmp_path / "models.json").write_text(json.dumps(record))
    row = rendered(tmp_path, "breakdown").splitlines()[6]
    assert [cell.strip() for cell in row.split("|")[3:-1]] == [
        *("25.0 ms", "8.0 ms", "4.2 ms", "1.2 ms", "640")
    ]
    row = rendered(tmp_path, "injection").splitlines()[6]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["12 ms", "0.46 s", "0.50%"]
    operation = {
        "operation": "rms_norm",
        "shape": [2, 8064, 2048],
        "microseconds": {"ours": {"median": 48.76}},
        "terabytes_per_second": {"ours": 2.71},
        "over_eager": 1.1,
        "of_copy_rate": 0.905,
    }
    record = {"environment": record["environment"], "operations": [operation]}
    (tmp_path / "operations.json").write_text(json.dumps(record))
    row = rendered(tmp_path, "operations").splitlines()[6]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        *("rms_norm", "2×8064×2048", "48.8 µs", "1.10×", "2.71 TB/s", "90%")
    ]


def test_check_finds_a_stale_table(results, tmp_path):
    def check():
        args = ["--check", "--results", str(results), str(path)]
        return CliRunner().invoke(render_readme.main, args)

    path = tmp_path / "README.md"
    path.write_text(rendered(results, "models"), encoding="utf-8")
    assert check().exit_code == 0
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("ms |", "9 ms |", 1), encoding="utf-8")
    stale = check()
    assert stale.exit_code == 1 and "is stale" in stale.output


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "there is no table nothing"), ("models", "is missing")]
)
def test_table_that_cannot_be_rendered(tmp_path, name, message):
    with pytest.raises(render_readme.click.ClickException, match=message):
        rendered(tmp_path, name)


def test_readme_agrees_with_the_results():
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert render_readme.BLOCK.search(text), "README.md has tables of results"
    assert render_readme.render(text) == text

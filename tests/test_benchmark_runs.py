"""A tiny run of each benchmark, and its stored result."""

import dataclasses
import functools
import json
import math
import sys
import time
from importlib.util import find_spec

import kernels.cli.benchmark as kernels_benchmark
import pytest
import torch
from click.testing import CliRunner
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks import models
from benchmarks.harness import comparison, history, kernel_times, record, timing
from benchmarks.models import (
    bench_accuracy,
    bench_block_masks,
    bench_cuda_graphs,
    bench_decoders,
    bench_every_model,
    bench_fp8_layers,
    bench_host_forward,
    bench_in_part,
    bench_models,
)
from benchmarks.models.flux import FLUX
from benchmarks.models.ltx import LTX_VIDEO
from benchmarks.operations import (
    bench_attention,
    bench_attention_blocks,
    bench_conv3d,
    bench_energy,
    bench_fp8,
    bench_host,
)
from benchmarks.pipelines import bench_few_steps, bench_pipelines, bench_quality, text_encoders

from benchmark_results import FAMILIES, load
from checks import relative_distance
from conftest import CHECKOUT
from inputs import TABLE

pytestmark = pytest.mark.usefixtures("_one_thread")
CPU = torch.device("cpu")
FP8 = (models.INJECTED_FP8,) if find_spec("torchao") else ()
IN_8_BITS = "attention_int8"  # whose errors exceed the limits for other operations
needs_torchao = pytest.mark.skipif(not FP8, reason="torchao is not installed")


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Tiny models need no collection of garbage after each of them."""
    monkeypatch.setattr(models, "free", lambda device: torch.compiler.reset())


def run(benchmark, device, output, *args):
    """The benchmark's output, after a tiny run that writes to a file or folder."""
    tiny = () if benchmark in (bench_host, bench_quality) else ("--tiny",)
    options = ["--device", device, *tiny, "--output", str(output), *args]
    result = CliRunner().invoke(benchmark.main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def result_of(device, tmp_path):
    """The JSON of a tiny run."""

    def run_one(benchmark, *args):
        run(benchmark, device, tmp_path / "x.json", *args)
        return load(tmp_path, "x")

    return run_one


def test_models(result_of, device):
    modes = ("injected", "eager", models.NO_ATTENTION)
    result = result_of(bench_models, "--modes", ",".join(modes), "--rounds", "2")
    assert result["environment"]["kernel_ids"], "the kernel's id is recorded"
    assert [entry["tokens"] for entry in result["sizes"].values()] == [12, 18]
    for entry in result["sizes"].values():
        assert 0 < entry["injection"]["change_s"] < entry["injection"]["full_speed_s"]
        assert list(entry["weights"]) == list(result["scores_std"]) == ["random", "peaked"]
        for of_weights in entry["weights"].values():
            eager, injected, no_attention = of_weights["modes"].values()
            assert (eager["distance_from_eager"], eager["distance_over_eager"]) == (0, 1)
            distances = [mode["distance_from_eager"] for mode in (injected, no_attention)]
            assert all(0 < distance < 0.05 for distance in distances)
            assert distances[0] != distances[1], "attention is another one"
            assert all(0.5 < mode["distance_over_eager"] < 2 for mode in (injected, no_attention))
            if device == "cuda":
                assert injected["kernels"]["ours"]["launches"] > 0
                assert eager["kernels"]["ours"]["launches"] == 0


def test_fp8(result_of, device):
    result = result_of(bench_fp8, "--rounds", "2")
    products, rows = result["fp8"]["products"], result["fp8"]["rows"]
    assert [tuple(entry["size"]) for entry in products] == list(bench_fp8.TINY_PRODUCTS)
    for entry in products:
        modes = {"ours", "exact", "fast", "bfloat16"}
        assert entry["microseconds"].keys() == entry["sustained_microseconds"].keys() == modes
        assert entry["operations"] == 2 * math.prod(entry["size"])
        # One rounding to bfloat16.
        assert all(5e-4 < error < 3e-3 for error in entry["errors"].values())
    fused = [(entry["operation"], tuple(entry["size"])) for entry in result["fp8"]["fused"]]
    assert fused == list(bench_fp8.TINY_FUSED)
    assert [entry["operation"] for entry in rows] == [name for name, _ in bench_fp8.ROWS]
    x = 2 * 5 * 64
    moved = {entry["operation"]: entry["bytes"] for entry in rows}
    assert moved["quantize_fp8"] == moved["gelu_fp8"] == 2 * x + x + 4 * 10
    assert moved["swiglu_fp8"] == 2 * x + x // 2 + 4 * 10
    assert moved["gated_residual_rms_norm_modulate_fp8"] == 7 * x + 4 * 10 + 3 * 2 * 2 * 64


def test_layers_that_modulate_are_not_quantized():
    names = models.fp8_layers(FLUX.transformer(CPU, torch.bfloat16, tiny=True))
    assert {"transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.2"} < set(names)
    assert "single_transformer_blocks.0.proj_out" in names and "proj_out" not in names
    assert not any("norm" in name for name in names)


@needs_torchao
@pytest.mark.parametrize(
    ("published", "size", "fp8_modes"),
    [
        (LTX_VIDEO, "9x64x96", {models.INJECTED_FP8: "injection_fp8"}),
        (FLUX, "64x96", {mode: models.INJECTIONS[mode] for mode in models.PRECISION_MODES}),
    ],
    ids=["torchao", "precision"],
)
def test_models_in_fp8(result_of, device, monkeypatch, published, size, fp8_modes):
    """FP8 layers are made of the weights that are measured, which the other modes keep."""
    precision = sys.modules[f"{models.load_kernel()[0].__name__}.injection.quantized.precision"]
    monkeypatch.setattr(precision, "MIN_FEATURES", 16)
    if published is FLUX:
        monkeypatch.setattr(FLUX, "inputs", functools.partial(FLUX.inputs, text_tokens=32))
    modes, weights = ("eager", *fp8_modes), ("peaked", models.OUTLIERS)
    arguments = ["--modes", ",".join(modes), "--weights", ",".join(weights), "--rounds", "1"]
    arguments += ["--model", published.key, "--sizes", size]
    result = result_of(bench_models, *arguments, "--peak-memory")
    assert result["scores_std"] == dict.fromkeys(weights, 3.0)
    (entry,) = result["sizes"].values()
    for injection in fp8_modes.values():
        assert 0 < entry[injection]["change_s"] < entry[injection]["full_speed_s"]
    assert list(entry["weights"]) == list(weights)
    for of_weights in entry["weights"].values():
        over = {name: mode["distance_over_eager"] for name, mode in of_weights["modes"].items()}
        assert over["eager"] == 1 and all(2 < over[mode] < 15 for mode in fp8_modes)
    assert list(entry["peak_bytes"]) == list(modes)
    assert all((peak is not None) == (device == "cuda") for peak in entry["peak_bytes"].values())


@needs_torchao
def test_kinds_of_fp8_layers(result_of):
    (entry,) = result_of(bench_fp8_layers, "--model", "flux")["fp8_layers"]
    kinds = {row["kind"]: row for row in entry["kinds"]}
    blocks, other = kinds.pop(bench_fp8_layers.BLOCKS), kinds.pop("all")
    none = kinds.pop(bench_fp8_layers.NONE)
    assert (none["layers"], none["parameters"]) == (0, 0) and entry["weights"] == models.OUTLIERS
    in_blocks = [kinds[kind] for kind in bench_fp8_layers.IN_BLOCKS]
    assert sum(row["layers"] for row in in_blocks) == blocks["layers"]
    outside = [kinds[kind] for kind in ("modulation", "embedders, last layer")]
    assert sum(row["layers"] for row in outside) == other["layers"] - blocks["layers"]
    for row in (*kinds.values(), blocks, other):
        assert none["distance_from_float32"] < row["distance_from_float32"] < 0.3
        assert row["layers"] > 0 and row["parameters"] > 0


@needs_torchao
@torch.no_grad()
def test_layers_of_the_trained_model(kernel, device, monkeypatch):
    kinds, two = bench_fp8_layers.kinds, (bench_fp8_layers.NONE, bench_fp8_layers.BLOCKS)
    monkeypatch.setattr(bench_fp8_layers, "kinds", lambda model: {k: kinds(model)[k] for k in two})
    entry = bench_fp8_layers.measure_trained(kernel, torch.device(device), tiny=True)
    none, blocks = (row["distance_from_float32"] for row in entry["kinds"])
    assert entry["size"] == "49x256x256" and none < blocks < 1


def test_several_models_in_one_run(device, tmp_path):
    """Each model has its own file, with its name and sizes."""
    arguments = ["--model", "flux,ltx", "--modes", "eager", "--rounds", "1", "--no-distance"]
    run(bench_models, device, tmp_path, *arguments)
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "models").iterdir()}
    known = {"flux": FLUX, "ltx": LTX_VIDEO}
    assert written.keys() == known.keys()
    for name, published in known.items():
        assert written[name]["model"] == published.tiny_name
        assert list(written[name]["sizes"]) == [*map(str, published.tiny_sizes)]


def test_host_time_of_a_forward(result_of, monkeypatch):
    """Each mode and context has its own modules, and runs in its context."""
    seen, transformer = {}, FLUX.transformer

    def watched(*args):
        model = transformer(*args)
        # The module itself, because ids of deleted modules may be reused.
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.setdefault(module, set()).add(
                (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
            ),
            with_kwargs=True,
        )
        return model

    monkeypatch.setattr(FLUX, "transformer", watched)
    conditions = ["as published", "LoRA adapters"]
    arguments = [word for condition in conditions for word in ("--condition", condition)]
    arguments += ["--model", "flux", "--rounds", "1", "--weights", "peaked", "--operators"]
    forwards = result_of(bench_host_forward, *arguments)["forwards"]
    assert [(f["condition"], f["context"], f["mode"]) for f in forwards] == [
        (condition, context, mode)
        for condition in conditions
        for context in ("no_grad", "inference_mode")
        for mode in ("eager", "injected")
    ]
    assert all(f["over_eager"] == 1 for f in forwards[::2])
    assert all(f["operators_ms"]["median"] > 0 for f in forwards)
    assert {(f["model"], f["tokens"], f["weights"]) for f in forwards} == {
        ("tiny FLUX.1", 64, "peaked")
    }
    assert all(contexts in ({(False, False)}, {(True, False)}) for contexts in seen.values())
    assert {inference for ((inference, _),) in seen.values()} == {False, True}


def test_pipelines(result_of, device):
    """A pipeline, and FLUX.3's modular one."""
    modes = ",".join(("eager", "injected", models.GRAPHS))
    arguments = ["--pipelines", "ltx,flux3", "--rounds", "1", "--steps", "2", "--dtype", "float32"]
    result = result_of(bench_pipelines, *arguments, "--modes", modes)
    assert [entry["name"] for entry in result["pipelines"]] == ["ltx", "flux3"]
    for entry in result["pipelines"]:
        measured = entry["modes"]
        assert list(measured) == ["eager", "injected"] + [models.GRAPHS] * (device == "cuda")
        for mode in measured.values():
            assert 0 < mode["decoder_s"] < mode["seconds"]["median"]
            assert (mode.get("joules") is not None) == (device == "cuda")
        del measured["eager"]
        psnrs = [mode["psnr_to_eager_db"] for mode in measured.values()]
        assert all(psnr is None or psnr > 60 for psnr in psnrs)  # None: the same picture


def test_pipelines_with_a_lora(result_of):
    arguments = ["--pipelines", "flux,flux_lora", "--rounds", "1", "--dtype", "float32"]
    plain, adapted = result_of(bench_pipelines, *arguments, "--modes", "injected")["pipelines"]
    assert adapted["parameters"] > plain["parameters"]


@needs_torchao
def test_pipelines_in_fp8(result_of):
    modes = ("injected", models.INJECTED_FP8)
    arguments = ["--pipelines", "ltx", "--rounds", "1", "--steps", "3", "--modes", ",".join(modes)]
    (entry,) = result_of(bench_pipelines, *arguments)["pipelines"]
    assert entry["steps"] == 3 and list(entry["modes"]) == list(modes)
    bfloat16, fp8 = (mode["weight_bytes"] for mode in entry["modes"].values())
    assert 0.5 * bfloat16 < fp8 < 0.95 * bfloat16


def test_few_steps(result_of):
    """Whole calls with text encoders, of a pipeline with two of them and of a modular one."""
    arguments = ["--pipelines", "flux,minimax_h3", "--rounds", "1", "--dtype", "float32"]
    entries = result_of(bench_few_steps, *arguments, "--modes", "eager,injected")["pipelines"]
    assert [entry["name"] for entry in entries] == ["flux", "minimax_h3"]
    for entry in entries:
        for mode in entry["modes"].values():
            parts = [mode[part] for part in bench_few_steps.PARTS]
            assert min(parts) > 0 and sum(parts) == pytest.approx(mode["seconds"]["median"])
            assert mode["first_call_s"] > 0 and mode["second_call_s"] > 0
        assert entry["modes"]["injected"]["psnr_to_eager_db"] > 60


def test_decoders(result_of):
    """An image's and a video's; convolutions by themselves."""
    arguments = ["--decoders", "flux,cosmos", "--rounds", "1"]
    for entry in result_of(bench_decoders, *arguments)["decoders"]:
        modes = entry["modes"]
        assert list(modes) == list(bench_decoders.DECODERS[entry["name"]].modes)
        assert modes["injected"]["error"] < 1.2 * modes["eager"]["error"]
        assert all(mode["seconds"]["median"] > 0 for mode in modes.values())
    for entry in result_of(bench_conv3d, "--rounds", "1")["conv3d"]:
        assert entry["errors"]["ours"] < 1.05 * entry["errors"]["eager"]


def test_a_prompt_is_as_many_tokens_as_words_and_marks():
    prompt = bench_few_steps.PROMPT
    tokenizer = text_encoders.tokenizer([prompt], f"{text_encoders.BOS} $A", length=77)
    ids = tokenizer(prompt).input_ids
    assert 60 < len(ids) < tokenizer.model_max_length and max(ids) < text_encoders.VOCABULARY
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
    assert tokenizer("A word never seen").input_ids[0] == tokenizer.bos_token_id
    chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False)
    assert chat.count(prompt) == chat.count(text_encoders.ROLE) == 1


def test_rounding_of_text_encoders():
    """A T5 of 24 random layers, in bfloat16 beside float32."""
    t5 = text_encoders.T5_XXL
    small = {**t5.small, "num_layers": t5.text["num_layers"]}
    encoder = dataclasses.replace(t5, small=small).make(CPU, torch.bfloat16, tiny=True)
    tokens = torch.randint(text_encoders.VOCABULARY, (1, 64))
    with torch.no_grad():
        rounded = encoder(tokens).last_hidden_state
        exact = encoder.float()(tokens).last_hidden_state
    assert relative_distance(rounded, exact) < 0.05


class FakeVae:
    """An autoencoder whose decoder compiles slowly, or not at all."""

    def __init__(self, compiled):
        self.decoder = torch.nn.Linear(2, 2)
        self.decoder.compile = lambda: setattr(self.decoder, "_compiled_call_impl", compiled)

    def decode(self, x):
        return self.decoder(x)


@torch.no_grad()
def test_a_decoder_that_does_not_compile_decodes_all_the_same():
    def broken(x):
        raise RuntimeError("no kernel\nand more")

    def slow(x):
        time.sleep(5)

    def refused(x):
        raise BackendCompilerFailed(broken, ValueError("no schedule"), None)

    for compiled, reason in (
        (broken, "RuntimeError: no kernel"),
        (slow, "TimeoutError: it takes"),
        (refused, "ValueError: no schedule"),
    ):
        vae, x = FakeVae(compiled), torch.ones(1, 2)
        decoder = bench_few_steps.CompiledDecoder(vae, limit_s=0.05)
        for _ in range(2):
            assert torch.equal(vae.decode(x), vae.decoder(x))
        assert decoder.why_not.startswith(reason) and "more\n" not in decoder.why_not


@pytest.mark.parametrize(
    ("dtype", "modes"),
    [
        ("float32", ("eager", "injected")),
        ("bfloat16", ("eager", "eager-again", "eager-math", "eager-float32", "injected", *FP8)),
    ],
)
def test_quality(result_of, monkeypatch, dtype, modes):
    """Two steps of few frames. Modes have their own attention backend, and differ from eager by rounding."""
    short = functools.partial(bench_quality.generate, num_inference_steps=2, num_frames=9)
    monkeypatch.setattr(bench_quality, "generate", short)
    arguments = ["--captions", "1", "--modes", ",".join(modes), "--dtype", dtype]
    videos = result_of(bench_quality, *arguments)["videos"]
    same = {mode for mode, video in videos.items() if video["equal"] == 1}
    assert list(videos) == list(modes) and same == {"eager", "eager-again"} & set(modes)
    assert all(videos[mode]["psnr_db"] is None for mode in same)
    psnr = {mode: videos[mode]["psnr_db"]["min"] for mode in modes if mode not in same}
    assert videos["injected"]["ssim"]["min"] > (0.9999 if dtype == "float32" else 0.9)
    if dtype == "float32":
        assert psnr["injected"] > 80
        return
    assert min(psnr[mode] for mode in ("eager-math", "injected")) > 30
    assert all(20 < psnr[mode] < psnr["injected"] for mode in FP8)
    exact = videos["eager-float32"]
    assert exact["psnr_to_float32_db"] is None
    assert videos["eager"]["psnr_to_float32_db"] == exact["psnr_db"]
    assert videos["eager-math"]["psnr_to_float32_db"]["min"] > 30


def test_summary_of_videos():
    """Equal videos have no PSNR. A video with half of its figures right counts half."""
    scenes = bench_quality.held_back_scenes(3)
    assert len({scene.caption for scene in scenes}) == 3
    all_right = dict.fromkeys(bench_quality.FOUND, 1.0)
    samples = [
        {"score": all_right, "found": "a", "psnr_db": math.inf, "ssim": 1.0},
        {"score": {**all_right, "shape": 0.5}, "found": "b", "psnr_db": 40.0, "ssim": 0.9},
        {"score": {**all_right, "motion": 0.0}, "found": "c", "psnr_db": 30.0, "ssim": 0.7},
    ]
    samples = [{**s, "psnr_to_float32_db": db} for s, db in zip(samples, (31, 35, 33), strict=True)]
    assert bench_quality.summary(scenes, samples) == {
        "right": {"color": 1.0, "motion": 2 / 3, "shape": 2.5 / 3},
        "wrong": {scenes[1].caption: "b", scenes[2].caption: "c"},
        "equal": 1,
        "psnr_db": {"median": 35.0, "min": 30.0},
        "ssim": {"median": 0.8, "min": 0.7},
        "psnr_to_float32_db": {"median": 33, "min": 31},
    }


def test_quality_is_compared_with_eager():
    result = CliRunner().invoke(bench_quality.main, ["--modes", "injected", "--device", "cpu"])
    assert result.exit_code == 2 and "the first mode must be eager" in result.output


def test_every_model(result_of):
    """A published model, both directions of an autoencoder, and a small model."""
    result = result_of(bench_every_model, "--rounds", "1", "--only", "PRX|autoencoders kl")
    entries = result["every_model"]
    kinds = [("published", "forward"), *(("autoencoders", way) for way in ("decode", "encode"))]
    assert [(e["group"], e["forward"]) for e in entries] == [*kinds, ("small", "forward")]
    assert result["not_measured"] == {}
    for entry in entries:
        for kind in ("wall", "gpu"):
            eager, injected = (entry[f"{kind}_ms"][mode] for mode in ("eager", "injected"))
            assert entry[f"{kind}_speedup"] == eager / injected > 0
    entries[1]["wall_speedup"], entries[3]["wall_speedup"] = 0.97, 0.96
    entries[0]["wall_speedup"] = entries[2]["wall_speedup"] = 0.98
    assert bench_every_model.slower(entries, "wall") == [entries[3], entries[1]]


def test_wider_models_of_more_samples():
    """Of almost every class; the others are measured as they are."""
    config = bench_every_model.every_model.MODELS["MiniMaxMusic3Transformer1DModel"].config
    wider = {"num_attention_heads": 16, "ff_inner_dim": 768}
    assert bench_every_model._wider(config, 8) == wider
    x, ids = torch.ones(2, 3), torch.ones(5, 3)
    more = bench_every_model._more_samples({"x": [x], "ids": ids, "flag": True}, 4)
    assert more["x"][0].shape == (8, 3) and more["ids"] is ids and more["flag"] is True


def test_in_part(result_of, monkeypatch):
    """Compiled without Inductor. The forwards run, and their times are replaced by known ones."""
    without_inductor = functools.partial(models.compile_blocks, backend="eager")
    monkeypatch.setattr(models, "compile_blocks", without_inductor)
    # Of each run: compiled, injected, injected and compiled.
    interleave, seconds = timing.interleave, iter([12, 6, 6, 12, 12, 3, 12, 24, 12])

    def known(forwards, rounds, device):
        interleave(forwards, 1, device)
        return {mode: [next(seconds)] for mode in forwards} if rounds == 1 else None

    monkeypatch.setattr(timing, "interleave", known)
    (measured,) = result_of(bench_in_part, "--models", "sana", "--rounds", "1")["in_part"]
    assert [list(times.values()) for times in measured["ms"]] == [[4, 2, 2], [4, 4, 1], [4, 8, 4]]
    assert measured["speedups"] == {"injected": [2, 1, 0.5], "injected+compiled": [2, 4, 1]}
    assert measured["speedup"] == {"injected": 1, "injected+compiled": 2}
    assert measured["best"] == "injected+compiled" and not measured["left_out"]


def test_block_masks(result_of):
    (measured,) = result_of(bench_block_masks, "--models", "skyreels", "--rounds", "1")[
        "block_masks"
    ]
    assert measured["distance_from_eager"]["injected"] < 0.02
    assert all(len(runs) == 3 for of in measured["speedups"].values() for runs in of.values())


def test_attention_blocks(result_of):
    entries = result_of(bench_attention_blocks, "--rounds", "1")["attention_blocks"]
    assert [entry["mask"] for entry in entries] == ["random", "frame"]
    assert entries[1]["share"] == pytest.approx(11 / 21) and 0.3 < entries[0]["share"] < 0.7
    for entry in entries:
        over = entry["microseconds"]["all keys"]["median"] / entry["microseconds"]["ours"]["median"]
        assert over * entry["time_over_all_keys"] == pytest.approx(1)


def test_energy(result_of, device):
    loops = result_of(bench_energy, "--seconds", "0.01")["loops"]
    assert {"cuBLAS", "this package", "eager"} <= {entry["by"] for entry in loops}
    for entry in loops:
        assert entry["microseconds"] > 0 and ("millijoules" in entry) == (device == "cuda")


def test_accuracy(result_of):
    result = result_of(bench_accuracy)
    measured = {entry["operation"].split(",")[0] for entry in result["operations"]}
    assert measured == set(TABLE) - {IN_8_BITS}
    assert {entry["dtype"] for entry in result["operations"]} == {"bfloat16", "float16", "float32"}
    for entry in result["operations"]:
        assert 0 <= entry["kernel"] < 0.01, entry
    (model,) = result["models"]
    assert len(model["draws"]) == 3
    assert 0 < model["kernel"] < 0.1 and 0 < model["eager"] < 0.1


def test_operations(device, tmp_path):
    """Each operation is compared with eager."""
    measured = set()
    for name, module in FAMILIES.items():
        run(module, device, tmp_path / f"{name}.json", "--rounds", "2", "--no-compile")
        result = load(tmp_path, name)
        assert len(result["workloads"]) == len(set(module.FAMILY.tiny))
        assert len(module.FAMILY.workloads) == len(set(module.FAMILY.workloads))
        for entry in result["workloads"]:
            measured.add(entry["operation"])
            assert entry["distance_from_eager"] < comparison.TOLERANCE
            for cache in ("cold", "warm"):
                times = entry[cache]["microseconds"]
                assert {"ours", "eager", "copy", "large_copy"} <= set(times)
    assert measured == set(TABLE) - {"attention", IN_8_BITS}


def test_chosen_attention_inputs(result_of):
    arguments = ["--rounds", "1", "--inputs", "sink", "--inputs", "std 3"]
    workloads = result_of(bench_attention, *arguments)["workloads"]
    assert {entry["operation"] for entry in workloads} == {"attention"}
    assert [list(entry["inputs"]) for entry in workloads[:2]] == [["std 3", "sink"], ["std 3"]]


def test_host(result_of):
    calls = result_of(bench_host, "--rounds", "1")["calls"]
    assert {call["operation"].split(",")[0] for call in calls} >= set(TABLE)


def test_cuda_graphs(result_of, device, monkeypatch):
    """With graphs on a GPU, without on a CPU."""
    monkeypatch.setattr(bench_cuda_graphs, "LEAST_CALLS", 1)
    monkeypatch.setattr(bench_cuda_graphs, "MOST_CALLS", 1)
    modes = ["eager", "injected", models.GRAPHS]
    arguments = ["--model", "ltx,sdxl", "--rounds", "1", "--modes", ",".join(modes)]
    forwards = result_of(bench_cuda_graphs, *arguments)["graph_forwards"]
    assert [(f["name"], f["input"], f["size"]) for f in forwards] == [
        *[("ltx", "published", size) for size in ("9x64x96", "17x64x96")],
        ("ltx", "small", "1x256x256"),
        *[("sdxl", "published", "64x96"), ("sdxl", "small", "128x128")],
    ]
    for of_weights in (w for forward in forwards for w in forward["weights"].values()):
        assert list(of_weights["modes"]) == (modes if device == "cuda" else modes[:2])
        if device == "cuda":
            graphs = of_weights["modes"][models.GRAPHS]
            assert 0 < graphs["covered_ms"] < graphs["wall_ms"]["median"] * 1.05
            assert graphs["launches"] > 1, "the kernels are counted, not the graph"


# ------------------------------------------------------------------------------------------------
# The Hub's benchmark


def hub_benchmarks():
    script = CHECKOUT / "benchmarks" / "benchmark.py"
    return kernels_benchmark.discover_benchmark_classes(script, CHECKOUT)


def test_hub_benchmark_covers_every_operation():
    names = {n for cls in hub_benchmarks() for n in dir(cls) if n.startswith("benchmark_")}
    for operation in set(TABLE) - {IN_8_BITS}:
        assert any(name.startswith(f"benchmark_{operation}") for name in names), operation


@pytest.mark.parametrize("cls", hub_benchmarks(), ids=lambda cls: cls.__name__)
def test_hub_benchmark(cls):
    """Runs it like `kernels benchmark`, with verification of each result."""
    timings, _ = kernels_benchmark.run_benchmark_class(
        cls, iterations=1, warmup=1, repo_id=str(CHECKOUT), is_local=True, revision="local"
    )
    assert timings and all(timing.verified for timing in timings.values())


# ------------------------------------------------------------------------------------------------
# Stored results


FP8_MODES = "--modes eager,injected,injected+fp8"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("", "models/{}"),
        ("--modes eager,compiled,compiled-regional,injected", "models/{}"),
        ("--modes eager,injected", None),
        ("--calls 4", None),
        (FP8_MODES, "fp8_models/{}"),
        (f"{FP8_MODES} --calls 4", "fp8_models/{}_back_to_back"),
        ("--modes injected,injected+fp8", None),
    ],
)
def test_only_the_whole_benchmark_is_kept(options, name, monkeypatch):
    places, real = [], record.destination
    monkeypatch.setattr(record, "destination", lambda *args: places.append(real(*args)))
    monkeypatch.setattr(record, "environment", lambda device: {})
    monkeypatch.setattr(bench_models, "measure_model", lambda *args: None)
    monkeypatch.setattr(models, "load_kernel", lambda: (None, 0.0))
    arguments = ["--device", "cpu", "--model", "sd3,wan", *options.split()]
    assert CliRunner().invoke(bench_models.main, arguments).exit_code == 0
    assert places == [name and name.format(model) for model in ("sd3", "wan")]


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def made_up(device, minute, command="python benchmarks/operations/bench_norm.py", **entries):
    date = f"2026-11-22 04:{minute:02}:31 UTC"
    return {"environment": {"device": device, "date": date, "command": command}, **entries}


def test_a_result_replaces_the_cards_older_one(tmp_path):
    for device, minute in ((H200, 1), (H100, 2), (H200, 3)):
        history.store("norm", made_up(device, minute), tmp_path)
    assert history.kept("norm", tmp_path) == [made_up(H100, 2), made_up(H200, 3)]
    assert history.load(tmp_path / "norm.json") == history.kept("norm", tmp_path)
    assert history.newest("norm", H100, tmp_path) == made_up(H100, 2)
    assert history.newest("norm", "NVIDIA B200", tmp_path) is None
    # Parts of a benchmark, and other models, stay.
    some, others = (
        "python benchmarks/models/bench_models.py --model " + name for name in ("sd3", "all")
    )
    moved = some.replace("benchmarks/", "benchmarks/models/")
    for name, minute, command in (("sd3", 4, some), ("sd3", 5, others), ("wan", 6, others)):
        history.store(f"models/{name}", made_up(H100, minute, command), tmp_path)
    history.store("models/sd3", made_up(H100, 7, moved), tmp_path)
    minutes = [r["environment"]["date"][14:16] for r in history.kept("models/sd3", tmp_path)]
    assert minutes == ["05", "07"] and len(history.kept("models/wan", tmp_path)) == 1
    for minute, options in ((8, ""), (9, " --decoders wan")):
        command = f"python benchmarks/models/bench_decoders.py{options}"
        history.store("decoders", made_up(H100, minute, command), tmp_path)
    assert len(history.kept("decoders", tmp_path)) == 2
    for minute, gpus in ((10, 4), (11, 2), (12, 2)):
        command = "torchrun benchmarks/models/bench_parallel.py"
        history.store("parallel", made_up(H100, minute, command, gpus=gpus), tmp_path)
    assert [result["gpus"] for result in history.kept("parallel", tmp_path)] == [4, 2]


def test_shown_is_the_newest_of_a_gpu(tmp_path):
    assert history.shown("norm", tmp_path) is None
    for device, minute, shown in (("A CPU", 9, 9), (H100, 2, 2), (H200, 8, 8), (H100, 3, 8)):
        history.store("norm", made_up(device, minute), tmp_path)
        date = history.shown("norm", tmp_path)["environment"]["date"]
        assert date == f"2026-11-22 04:{shown:02}:31 UTC"


def test_stored_results_are_compact_and_of_the_newest():
    """The file is what `compact` writes; no card has two results of one benchmark and options."""
    size = 0
    for path in history.RESULTS.iterdir():
        text, stored = path.read_text(encoding="utf-8"), history.load(path)
        assert text == history.compact(stored) + "\n", path
        for one in stored:
            name = path.stem + (f"/{one['name']}" if "name" in one else "")
            assert len(history.replaced(name, one, stored)) == 1, f"{name} has older results"
        size += len(text)
    assert size < 5e6


def test_names_of_kernels_are_short():
    name = "void h100_diffusers_kernels::(anonymous namespace)::row_norm_kernel<__nv_bfloat16, 128>(at)"
    assert kernel_times.short_name(name) == "row_norm_kernel<__nv_bfloat16, 128>(at)"
    assert len(kernel_times.short_name(100 * "kernel")) == kernel_times.LONGEST_NAME


def test_ceilings_of_attention_are_this_gpus(monkeypatch):
    path = history.path("ceilings")
    ceilings, note = bench_attention.read_ceilings(path, CPU)
    assert not ceilings and "they were measured on NVIDIA H100" in note["left_out"]
    environment = history.load(path)[-1]["environment"]
    monkeypatch.setattr(bench_attention.record, "environment", lambda _: environment)
    ceilings, note = bench_attention.read_ceilings(None, CPU)
    assert set(ceilings) == {"wgmma", "exp2"} and 500 < ceilings["wgmma"] < 1100
    assert note["date"] == environment["date"], "the newest"

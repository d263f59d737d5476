"""The benchmarks: their arithmetic, a tiny run of each, what is kept of them, and the tables made of it."""

import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import click
import kernels.cli.benchmark as kernels_benchmark
import pytest
import torch
import torch._dynamo.testing
from click.testing import CliRunner
from diffusers import (
    AllegroPipeline,
    AuraFlowPipeline,
    Cosmos2TextToImagePipeline,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
)

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT / "benchmarks"), str(CHECKOUT / "tools")]

import allegro  # noqa: E402
import attention_inputs  # noqa: E402
import auraflow  # noqa: E402
import bench_accuracy  # noqa: E402
import bench_activation  # noqa: E402
import bench_attention  # noqa: E402
import bench_gated_residual  # noqa: E402
import bench_group_norm  # noqa: E402
import bench_host  # noqa: E402
import bench_host_forward  # noqa: E402
import bench_models  # noqa: E402
import bench_norm  # noqa: E402
import bench_pipeline  # noqa: E402
import bench_rope  # noqa: E402
import bench_softmax  # noqa: E402
import compare_builds  # noqa: E402
import comparison  # noqa: E402
import cosmos  # noqa: E402
import flux  # noqa: E402
import flux2  # noqa: E402
import history  # noqa: E402
import hunyuan_video  # noqa: E402
import kernel_times  # noqa: E402
import ltx  # noqa: E402
import models  # noqa: E402
import options  # noqa: E402
import peers  # noqa: E402
import profile_kernels as profiling  # noqa: E402
import qwenimage  # noqa: E402
import record  # noqa: E402
import sd3  # noqa: E402
import sdxl  # noqa: E402
import sdxl_channels_last  # noqa: E402
import sizes  # noqa: E402
import targets  # noqa: E402
import timing  # noqa: E402
import wan  # noqa: E402
import wan_small  # noqa: E402

import render_docs  # noqa: E402
import render_plots  # noqa: E402
from checks import one_thread  # noqa: E402
from documents.operations import attention_label  # noqa: E402

CPU = torch.device("cpu")
FAMILIES = {
    "norm": bench_norm,
    "gated_residual": bench_gated_residual,
    "rope": bench_rope,
    "activation": bench_activation,
    "softmax": bench_softmax,
    "group_norm": bench_group_norm,
}
ENVIRONMENT = dict.fromkeys(("device", "torch", "diffusers", "kernels", "date", "command"), "x")


def store(results, name, result):
    """As the one result of a benchmark."""
    folder = results / name
    folder.mkdir(exist_ok=True)
    (folder / "only.json").write_text(json.dumps(result))


def load(results, name):
    """The one result of a benchmark."""
    (result,) = history.kept(name, results)
    return result


def public_operations(kernel):
    others = ("inject_kernels", "eject_kernels", "layers")
    return {name for name in kernel.__all__ if name.islower() and name not in others}


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
        ("void h100_diffusers_kernels::attention_kernel<64, __nv_bfloat16>", "attention"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("void cublasLt::epilogue::impl::globalKernel<8, 32, float, __half, ...>", "gemm"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, ...>", "gemm"),
        ("void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("triton_tem_fused_flex_attention_3", "attention"),
        ("void h100_diffusers_kernels::attention_value_kernel<64>(Params)", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, ...>", "convolution"),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel", "convolution"),
        ("void at::native::vol2col_kernel<c10::BFloat16>(long, ...)", "convolution"),
        ("triton_tem_fused_convolution_2", "convolution"),
        ("triton_tem_fused_addmm_convolution_2", "gemm"),
        ("triton_poi_fused_convolution_2", "other"),
        ("void at::native::convert_to_bfloat16_kernel<float>", "other"),
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
        "convolution": {"ms": 0, "launches": 0},
        "other": {"ms": pytest.approx(0.825), "launches": 4.5},
    }
    assert result["total"] == {"ms": pytest.approx(4.325), "launches": 7.5}
    assert result["ours"] == {"ms": pytest.approx(0.6), "launches": 2}
    (largest,) = result["largest_others"]
    assert largest["ours"] and largest["ms"] == pytest.approx(0.6)


def test_idle_time_is_what_no_kernel_covers():
    intervals = [(10.0, 14.0), (0.0, 5.0), (3.0, 4.0), (12.0, 13.0), (20.0, 21.0)]
    assert kernel_times.idle(intervals) == pytest.approx(5.0 + 6.0)
    assert kernel_times.covered(intervals) == pytest.approx(5.0 + 4.0 + 1.0)


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
    assert list(samples) == ["a", "b", "c"]
    for name, values in samples.items():
        assert values == [i for i, call in enumerate(calls) if call == name]


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd", "abcde", "abcdef"])
def test_in_balanced_orders_each_follows_each_other_equally_often(names):
    orders = list(itertools.islice(timing.balanced_orders(names), 2 * len(names)))
    assert all(sorted(order) == list(names) for order in orders)
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert follows == dict.fromkeys(itertools.permutations(names, 2), 2)
    first = Counter(order[0] for order in orders)
    assert first == dict.fromkeys(names, 2)


@pytest.mark.parametrize("late_samples", [0, 2, 100])
def test_sample_is_taken_again_where_the_host_was_late(monkeypatch, late_samples):
    slept, samples = [], iter(range(1000))

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def synchronize(self):
            pass

        def query(self):
            return next(samples) < late_samples

        def elapsed_time(self, end):
            return 0.004

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "_sleep", slept.append, raising=False)
    calls = []
    if late_samples < 100:
        assert timing.Stopwatch._sample(lambda: calls.append("f"), lambda: calls.append("p")) == 4
        assert slept == [timing.HEAD_START_CYCLES << n for n in range(late_samples + 1)]
        assert calls == ["p", "f"] * len(slept)
    else:
        with pytest.raises(RuntimeError, match="waits for the GPU"):
            timing.Stopwatch._sample(lambda: None, lambda: None)
        assert slept[-1] == timing.MAX_HEAD_START_CYCLES


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


PUBLISHED = [pytest.param(p, id=p.__name__) for p in options.PUBLISHED]
LTX_AND_FLUX = [pytest.param(p, id=p.__name__) for p in (ltx, flux)]


@pytest.fixture(scope="module")
def tiny():
    """The tiny model of each module, in float32."""
    return {p: p.transformer(CPU, torch.float32, tiny=True) for p in options.PUBLISHED}


def test_published_size_is_ltx_video_2b():
    with torch.device("meta"):
        model = ltx.LTXVideoTransformer3DModel()
    assert 1.9e9 < sum(p.numel() for p in model.parameters()) < 2.0e9
    assert ltx.VideoSize(49, 512, 768).tokens == 2688
    assert ltx.VideoSize(161, 512, 768).tokens == 8064


def test_published_size_is_flux_1():
    with torch.device("meta"):
        whole = FluxTransformer2DModel(guidance_embeds=True)
        model = FluxTransformer2DModel(**flux.TRANSFORMER)
    assert 11.8e9 < sum(p.numel() for p in whole.parameters()) < 12.0e9
    assert (len(model.transformer_blocks), len(model.single_transformer_blocks)) == (5, 10)
    shapes = {key: weight.shape for key, weight in whole.named_parameters()}
    assert all(shapes[key] == weight.shape for key, weight in model.named_parameters())
    config = model.config
    assert (config.num_attention_heads, config.attention_head_dim) == (24, 128)
    assert (config.in_channels, config.joint_attention_dim) == (64, 4096)
    assert config.pooled_projection_dim == 768
    (size,) = flux.SIZES
    assert size == flux.ImageSize(1024, 1024) and size.tokens == 4096


# Parameters of the whole model in billions as published, what makes the model whole, heads and their size,
# and tokens at the published size.
WHOLE = [
    (flux2, (32.0, 32.5), {"num_layers": 8, "num_single_layers": 48}, (48, 128), 4096),
    (sd3, (8.0, 8.3), {"num_layers": 38}, (38, 64), 4096),
    (qwenimage, (20.0, 20.7), {"num_layers": 60}, (24, 128), 4096),
    (wan, (14.0, 14.5), {"num_layers": 40}, (40, 128), 32760),
    (wan_small, (1.3, 1.45), {"num_layers": 30}, (12, 128), 32760),
    (cosmos, (1.9, 2.1), {}, (16, 128), 4080),
    (auraflow, (6.7, 6.95), {"num_mmdit_layers": 4, "num_single_dit_layers": 32}, (12, 256), 4096),
    (allegro, (2.7, 2.9), {"num_layers": 32}, (24, 96), 9200),
    (
        hunyuan_video,
        (12.7, 12.9),
        {"num_layers": 20, "num_single_layers": 40},
        (24, 128),
        32640,
    ),
]


@pytest.mark.parametrize(
    ("published", "billions", "all_blocks", "heads", "tokens"),
    [pytest.param(*row, id=row[0].__name__) for row in WHOLE],
)
def test_published_size(tiny, published, billions, all_blocks, heads, tokens):
    with torch.device("meta"):
        whole = type(tiny[published])(**{**published.TRANSFORMER, **all_blocks})
    assert billions[0] < sum(p.numel() for p in whole.parameters()) / 1e9 < billions[1]
    assert (whole.config.num_attention_heads, whole.config.attention_head_dim) == heads
    (size,) = published.SIZES
    assert size.tokens == tokens and published.parse_size(str(size)) == size


def test_published_size_is_stable_diffusion_xl():
    with torch.device("meta"):
        model = sdxl.UNet2DConditionModel(**sdxl.TRANSFORMER)
    assert 2.56e9 < sum(p.numel() for p in model.parameters()) < 2.58e9
    attentions = [m for m in model.modules() if type(m).__name__ == "Attention"]
    assert len(attentions) == 2 * 70
    assert {(a.heads, a.inner_dim // a.heads) for a in attentions} == {(10, 64), (20, 64)}
    assert sum(a.to_k.in_features == 2048 for a in attentions) == 70
    (size,) = sdxl.SIZES
    assert size.unpacked == (128, 128) and size.tokens == 4096
    arguments = sdxl.inputs(model, size, CPU, torch.bfloat16)
    assert arguments["sample"].shape == (2, 4, 128, 128)
    assert arguments["encoder_hidden_states"].shape == (2, 77, 2048)
    conditions = arguments["added_cond_kwargs"]
    assert conditions["text_embeds"].shape == (2, 1280) and conditions["time_ids"].shape == (2, 6)


@pytest.mark.parametrize("published", PUBLISHED)
def test_random_weights_are_as_diffusers_loads_them(published):
    """In bfloat16 but for what a model keeps in float32; and the output is of the inputs' scale."""
    model = published.transformer(CPU, torch.bfloat16, tiny=True)
    kept = {name for name, w in model.named_parameters() if w.dtype == torch.float32}
    expected = set()
    if published in (wan, wan_small):
        parts = ("time_embedder.", "scale_shift_table", ".norm2.")
        expected = {n for n, _ in model.named_parameters() if any(part in n for part in parts)}
        assert len(expected) == 4 + 3 + 2 * 2
    assert kept == expected
    with torch.no_grad():
        output = model(
            **published.inputs(model, device=CPU, dtype=torch.bfloat16, **published.SMALL)
        )[0]
    assert output.dtype == torch.bfloat16 and 0.3 < output.float().std() < 3


@pytest.mark.parametrize("published", PUBLISHED)
def test_twin_shares_weights_but_no_modules(tiny, published):
    model = tiny[published]
    twin = models.twin(model)
    pairs = zip(model.named_parameters(), twin.named_parameters(), strict=True)
    assert all(a == b and p is q for (a, p), (b, q) in pairs)
    assert not set(map(id, model.modules())) & set(map(id, twin.modules()))


IMAGE, VIDEO = sizes.ImageSize(256, 256), sizes.VideoSize(8, 192, 192)
ACROSS = "norm_q.weight norm_k.weight"
JOINT = f"{ACROSS} norm_added_q.weight norm_added_k.weight"
LINEAR = "to_q.weight to_k.weight"
# A size with enough tokens for a standard deviation, how many of the model's attentions are the image's own,
# how close their scores come, and the parameters that set them. Some vary less: what a large modulation adds
# to all keys alike is no part of how they vary.
SCORES = {
    ltx: (ltx.VideoSize(17, 256, 256), 2, 0.05, "attn1 attn2", ACROSS),
    flux: (IMAGE, 4, 0.2, "attn", JOINT),
    flux2: (IMAGE, 4, 0.05, "attn", JOINT),
    sd3: (IMAGE, 3, 0.1, "attn", JOINT),
    qwenimage: (IMAGE, 2, 0.05, "attn", JOINT),
    wan: (VIDEO, 2, 0.1, "attn1 attn2", ACROSS),
    wan_small: (VIDEO, 2, 0.1, "attn1 attn2", ACROSS),
    cosmos: (IMAGE, 2, 0.35, "attn1 attn2", ACROSS),
    auraflow: (IMAGE, 3, 0.05, "attn", f"{LINEAR} add_q_proj.weight add_k_proj.weight"),
    allegro: (VIDEO, 2, 0.1, "attn1 attn2", f"{LINEAR} to_q.bias to_k.bias"),
    hunyuan_video: (VIDEO, 5, 0.15, "attn", f"{JOINT} {LINEAR} to_q.bias to_k.bias"),
    **dict.fromkeys((sdxl, sdxl_channels_last), (IMAGE, 11, 0.2, "attn1 attn2", LINEAR)),
}


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("published", PUBLISHED)
@pytest.mark.parametrize("name", models.WEIGHTS)
def test_weights_give_the_scores_their_standard_deviation(tiny, name, published, monkeypatch):
    model, (size, count, tolerance, attentions, parameters) = tiny[published], SCORES[published]
    stds, attend = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **given):
        if query.shape == key.shape:  # the image's own, with the text or without
            scores = query @ key.mT / query.shape[-1] ** 0.5
            stds.append(scores.std(-1).square().mean().sqrt())
        return attend(query, key, value, attn_mask=attn_mask, **given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    with torch.no_grad(), models.weights(model, name):
        model(**published.inputs(model, size, CPU, torch.float32))
        changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert len(stds) == count
    assert stds == [pytest.approx(models.WEIGHTS[name], rel=tolerance)] * count
    expected = {f"{a}.{x}" for a in attentions.split() for x in parameters.split()}
    assert {".".join(key.split(".")[-3:]) for key in changed} == (
        expected if name == "peaked" else set()
    )
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key]), "the weights are what they were"


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("published", PUBLISHED)
def test_blocks_are_compiled_and_nothing_else(tiny, published, monkeypatch):
    """Each block of each stack, in one graph: whichever of diffusers' ways and ours there is."""
    compiled, compile_ = [], torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **given: compiled.append((self, given)) or compile_(self, **given),
    )
    model = models.twin(tiny[published])
    counter = torch._dynamo.testing.CompileCounter()
    models.compile_blocks(model, backend=counter)
    blocks = [block for stack in models.block_lists(model) for block in stack]
    if published in (sdxl, sdxl_channels_last):  # its stacks are of more than transformers
        blocks = [m for m in model.modules() if type(m).__name__ == "BasicTransformerBlock"]
    if published is hunyuan_video:  # diffusers names the embedding of patches and text, too
        blocks = [m for m in model.modules() if type(m).__name__ in model._repeated_blocks]
    assert [block for block, _ in compiled] == blocks and len(blocks) >= 2
    assert all(given["fullgraph"] and given["dynamic"] is False for _, given in compiled)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("published", "graphs"),
    [
        pytest.param(wan, 1, id="blocks that diffusers names"),
        pytest.param(auraflow, 2, id="blocks of lists"),
    ],
)
def test_blocks_of_a_kind_share_what_is_compiled(tiny, published, graphs):
    torch.compiler.reset()
    model, counter = models.twin(tiny[published]), torch._dynamo.testing.CompileCounter()
    arguments = published.inputs(model, published.TINY_SIZES[0], CPU, torch.float32)
    with torch.no_grad():
        expected = model(**arguments)[0]
        models.compile_blocks(model, backend=counter)
        assert torch.equal(model(**arguments)[0], expected)
    assert counter.frame_count == graphs


@pytest.mark.parametrize("mode", models.MODES)
def test_modes_that_compile(mode, monkeypatch):
    done = []
    monkeypatch.setattr(models, "compile_whole", lambda model, mode="whole": done.append(mode))
    monkeypatch.setattr(models, "compile_blocks", lambda model: done.append("blocks"))
    expected = {
        **dict.fromkeys(("compiled", "injected+compiled"), "whole"),
        **dict.fromkeys(("compiled-regional", "injected+compiled-regional"), "blocks"),
        "compiled-reduce-overhead": "reduce-overhead",
    }
    assert models.compile_as(None, mode) == (mode in expected)
    assert done == ([expected[mode]] if mode in expected else [])


@pytest.mark.parametrize("published", PUBLISHED)
def test_float32_model_is_near_and_exact(tiny, published):
    """Of the model in bfloat16 it is another model, near it; of the one in float32 it is that."""
    for dtype in (torch.bfloat16, torch.float32):
        model = published.transformer(CPU, dtype, tiny=True)
        arguments = published.inputs(model, device=CPU, dtype=dtype, **published.SMALL)
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        with torch.no_grad():
            output = model(**arguments)[0]
            exact = models.float32_output(model, arguments, getattr(published, "THOUSANDFOLD", ()))
        distance = bench_models.relative_distance(output, exact)
        assert exact.dtype == torch.float32
        assert 1e-3 < distance < 0.02 if dtype == torch.bfloat16 else distance == 0
        for name, weight in model.named_parameters():
            assert weight.dtype == before[name].dtype and torch.equal(weight, before[name])


@pytest.mark.usefixtures("_one_thread")
def test_weights_that_change_in_place_reach_what_was_built_before(kernel, device):
    """The injected model and compiled code, which is not compiled again."""
    device = torch.device(device)
    model = ltx.transformer(device, torch.bfloat16, tiny=True)
    arguments = ltx.inputs(model, ltx.VideoSize(9, 64, 96), device, torch.bfloat16)
    counter = torch._dynamo.testing.CompileCounter()

    def injected():
        instance = models.twin(model)
        kernel.inject_kernels(instance)
        return instance

    with torch.no_grad():
        compiled, before = models.twin(model), injected()
        compiled.compile(backend=counter, fullgraph=True, dynamic=False)
        outputs = {"random": (compiled(**arguments)[0], before(**arguments)[0])}
        with models.weights(model, "peaked"):
            outputs["peaked"] = (compiled(**arguments)[0], before(**arguments)[0])
            assert torch.equal(outputs["peaked"][0], model(**arguments)[0])
            assert torch.equal(outputs["peaked"][1], injected()(**arguments)[0])
    assert counter.frame_count == 1
    for random, peaked in zip(*outputs.values(), strict=True):
        assert bench_models.relative_distance(peaked, random) > 0.05


def passed_by_ltx_pipeline(transformer):
    size = ltx.TINY_SIZES[0]
    ltx.pipeline(transformer, ltx.vae(CPU, torch.float32, tiny=True))(
        **ltx.prompt(transformer, CPU, torch.float32),
        num_frames=size.frames,
        height=size.height,
        width=size.width,
        frame_rate=ltx.FRAME_RATE,
        num_inference_steps=2,
        guidance_scale=3.0,
        output_type="latent",
    )


class NothingUnsafe:
    """Cosmos' pipeline asks one for its opinion."""

    def to(self, *args):
        return self

    def check_text_safety(self, text):
        return True


EULER = functools.partial(FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True)
PLAIN_EULER = FlowMatchEulerDiscreteScheduler
FLOW = functools.partial(
    UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True
)
# The pipeline, its scheduler, and arguments of its call.
PIPELINES = {
    flux: (FluxPipeline, EULER, {"guidance_scale": flux.GUIDANCE}),
    flux2: (Flux2Pipeline, EULER, {"guidance_scale": flux2.GUIDANCE}),
    sd3: (StableDiffusion3Pipeline, PLAIN_EULER, {}),
    qwenimage: (QwenImagePipeline, EULER, {}),
    sdxl: (StableDiffusionXLPipeline, EulerDiscreteScheduler, {}),
    wan: (WanPipeline, FLOW, {}),
    cosmos: (Cosmos2TextToImagePipeline, PLAIN_EULER, {}),
    auraflow: (AuraFlowPipeline, PLAIN_EULER, {}),
    allegro: (AllegroPipeline, EulerAncestralDiscreteScheduler, {"negative_prompt": None}),
    hunyuan_video: (
        HunyuanVideoPipeline,
        PLAIN_EULER,
        {"guidance_scale": hunyuan_video.GUIDANCE},
    ),
}


def passed_by_pipeline(published, transformer, benchmark):
    """Run the pipeline with the benchmark's prompt."""
    cls, scheduler, call = PIPELINES[published]
    parameters = inspect.signature(cls.__init__).parameters.values()
    parts = {p.name: None for p in parameters if p.default is p.empty and p.name != "self"}
    denoiser = "unet" if published is sdxl else "transformer"
    parts |= {denoiser: transformer, "scheduler": scheduler()}
    if published is cosmos:
        parts["safety_checker"] = NothingUnsafe()
    pipe = cls(**parts)
    pipe.set_progress_bar_config(disable=True)
    prompts = {"embeds": benchmark["encoder_hidden_states"]}
    if published is allegro:
        prompts = {"embeds": prompts["embeds"][:, 0]}
        prompts["attention_mask"] = benchmark["encoder_attention_mask"]
    elif published is hunyuan_video:
        prompts["attention_mask"] = benchmark["encoder_attention_mask"]
    elif published is auraflow:
        prompts["attention_mask"] = torch.ones(2, auraflow.TEXT_TOKENS)
    given = {f"prompt_{name}": value[-1:] for name, value in prompts.items()}
    pooled = benchmark.get("pooled_projections")
    if published is sdxl:
        pooled = benchmark["added_cond_kwargs"]["text_embeds"]
    if pooled is not None:
        given["pooled_prompt_embeds"] = pooled[-1:]
    if published in (sd3, sdxl, wan, cosmos, auraflow, allegro):
        given |= {f"negative_prompt_{name}": value[:1] for name, value in prompts.items()}
        if pooled is not None:
            given["negative_pooled_prompt_embeds"] = pooled[:1]
    size = published.TINY_SIZES[0]
    given |= dataclasses.asdict(size)
    if "frames" in given:
        given["num_frames"] = given.pop("frames")
    pipe(**given, **call, num_inference_steps=2, output_type="latent")


def alike(benchmark, passed, name, is_own):
    """The same types, shapes and dtypes; of what is the benchmark's own the same values."""
    if isinstance(benchmark, torch.Tensor):
        assert (benchmark.shape, benchmark.dtype) == (passed.shape, passed.dtype), name
        assert not is_own or torch.equal(benchmark, passed), name
    elif isinstance(benchmark, dict):
        assert set(benchmark) == set(passed), name
        for key, one in benchmark.items():
            alike(one, passed[key], key, is_own)
    elif isinstance(benchmark, tuple):
        for one, other in zip(benchmark, passed, strict=True):
            alike(one, other, name, is_own)
    else:
        assert benchmark == passed, name


@pytest.mark.parametrize("published", [pytest.param(p, id=p.__name__) for p in (ltx, *PIPELINES)])
def test_inputs_are_what_the_pipeline_passes(tiny, monkeypatch, published):
    """Of the first forward: names, shapes and dtypes, and all values but latents and timesteps."""
    passed = {}

    def forward(hidden_states=None, *positional, **others):
        if not passed:
            latents = "sample" if published is sdxl else "hidden_states"
            passed.update(others, **{latents: hidden_states})
            passed.update(zip(["timestep"], positional, strict=False))
        return (hidden_states,)

    twin = models.twin(tiny[published])
    monkeypatch.setattr(twin, "forward", forward)
    benchmark = published.inputs(tiny[published], published.TINY_SIZES[0], CPU, torch.float32)
    if published is ltx:
        passed_by_ltx_pipeline(twin)
        assert passed.pop("attention_kwargs") is None
    else:
        passed_by_pipeline(published, twin, benchmark)
    assert set(benchmark) == set(passed)
    for name, value in benchmark.items():
        alike(value, passed[name], name, name not in ("hidden_states", "sample", "timestep"))


@pytest.fixture(scope="module")
def results(kernel, device, tmp_path_factory):
    """The JSON of a tiny run of each benchmark."""
    folder = tmp_path_factory.mktemp("results")

    def run(benchmark, name, *args, size=("--tiny",)):
        output = folder / name / "only.json"
        options = ["--device", device, *size, "--output", str(output), *args]
        result = CliRunner().invoke(benchmark.main, options, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    with one_thread():  # tiny tensors: more threads only wait for each other
        run_all(run)
    return folder


def run_all(run):
    run(bench_models, "models", "--modes", f"injected,eager,{models.NO_ATTENTION}", "--rounds", "2")
    run(bench_models, "flux", "--model", "flux", "--modes", "eager", "--rounds", "2")
    run(bench_host_forward, "host_forward", "--model", "ltx", "--rounds", "2")
    run(bench_pipeline, "pipeline", "--rounds", "1", "--dtype", "float32")
    run(bench_accuracy, "accuracy")
    for name, module in FAMILIES.items():
        run(module, name, "--rounds", "2", "--no-compile")
    run(bench_attention, "attention", "--rounds", "2")
    run(bench_host, "host", "--rounds", "1", size=())


def test_models(results, device):
    result = load(results, "models")
    assert result["environment"]["kernel_ids"], "the kernel's id is recorded"
    assert [entry["tokens"] for entry in result["sizes"].values()] == [12, 18]
    for entry in result["sizes"].values():
        assert 0 < entry["injection"]["change_s"] < entry["injection"]["full_speed_s"]
        assert list(entry["weights"]) == list(result["scores_std"]) == ["random", "peaked"]
        for of_weights in entry["weights"].values():
            assert list(of_weights["modes"]) == ["eager", "injected", models.NO_ATTENTION]
            eager, injected, no_attention = of_weights["modes"].values()
            assert of_weights["speedups"]["injected"]["eager"] == pytest.approx(
                eager["ms"]["median"] / injected["ms"]["median"]
            )
            assert eager["distance_from_eager"] == 0
            distances = [mode["distance_from_eager"] for mode in (injected, no_attention)]
            assert all(0 < distance < 0.05 for distance in distances)
            assert distances[0] != distances[1], "attention is another one"
            assert eager["distance_over_eager"] == 1
            for mode in (injected, no_attention):
                assert mode["distance_over_eager"] == pytest.approx(
                    mode["distance_from_float32"] / eager["distance_from_float32"]
                )
                assert 0.5 < mode["distance_over_eager"] < 2
                assert 0 < mode["host_ms"]["median"] < 10 * mode["ms"]["median"]
            if device == "cuda":
                assert injected["kernels"]["ours"]["launches"] > 0
                assert eager["kernels"]["ours"]["launches"] == 0


def test_flux(results, device):
    result = load(results, "flux")
    assert result["model"] == "tiny FLUX.1"
    (entry,) = result["sizes"].values()
    assert (entry["batch"], entry["tokens"], entry["text_tokens"]) == (1, 24, 512)
    assert list(entry["weights"]) == ["random", "peaked"]
    for of_weights in entry["weights"].values():
        (eager,) = of_weights["modes"].values()
        assert eager["ms"]["samples"] == 2 and eager["distance_from_eager"] == 0


@pytest.mark.usefixtures("_one_thread")
def test_all_models_in_one_run(device, tmp_path):
    """Each to a file of its own, with the time of its own forward."""
    options_ = ["--device", device, "--tiny", "--model", "all", "--modes", "eager", "--rounds", "1"]
    run = CliRunner().invoke(
        bench_models.main,
        [*options_, "--no-distance", "--output", str(tmp_path)],
        catch_exceptions=False,
    )
    assert run.exit_code == 0, run.output
    written = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(written) == {published.RESULT for published in options.PUBLISHED}
    for published in options.PUBLISHED:
        result = written[published.RESULT]
        assert result["model"] == published.TINY_NAME
        assert list(result["sizes"]) == [str(size) for size in published.TINY_SIZES]
        for entry in result["sizes"].values():
            assert (entry["batch"], entry["text_tokens"]) == (
                published.BATCH,
                published.TEXT_TOKENS,
            )
            for of_weights in entry["weights"].values():
                assert "distance_over_eager" not in of_weights["modes"]["eager"]


def test_model_that_fails_does_not_keep_others_from_being_measured(device, tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("no such model")

    measured = []
    monkeypatch.setattr(flux2, "transformer", fails)
    monkeypatch.setattr(
        bench_models, "measure_size", lambda *args: measured.append(args) or {"weights": {}}
    )
    monkeypatch.setattr(bench_models, "show_size", lambda *args: None)
    arguments = ["--device", device, "--tiny", "--modes", "eager", "--output", str(tmp_path)]
    run = CliRunner().invoke(bench_models.main, [*arguments, "--model", "wan,flux2,cosmos"])
    assert run.exit_code == 1 and "not measured: flux2" in run.output
    assert "RuntimeError: no such model" in run.output and len(measured) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cosmos.json", "wan.json"]
    run = CliRunner().invoke(bench_models.main, [*arguments[:-2], "--model", "flux2"])
    assert isinstance(run.exception, RuntimeError)


def test_host_time_of_other_models_than_the_one_that_fails(device, tmp_path, monkeypatch):
    def measure_model(published, *args):
        if published is flux2:
            raise RuntimeError("no such model")
        return [{"model": published.NAME}]

    monkeypatch.setattr(bench_host_forward, "measure_model", measure_model)
    monkeypatch.setattr(bench_host_forward, "show", lambda entries: None)
    output = tmp_path / "host_forward" / "only.json"
    arguments = ["--device", device, "--modes", "eager", "--output", str(output), "--model"]
    run = CliRunner().invoke(bench_host_forward.main, [*arguments, "wan,flux2,cosmos"])
    assert run.exit_code == 1 and "not measured: flux2" in run.output
    measured = [entry["model"] for entry in load(tmp_path, "host_forward")["forwards"]]
    assert measured == [wan.NAME, cosmos.NAME]
    run = CliRunner().invoke(bench_host_forward.main, [*arguments, "flux2"])
    assert isinstance(run.exception, RuntimeError)


@pytest.mark.parametrize(
    ("modes", "is_kept"),
    [
        ("", True),
        ("eager,compiled,compiled-regional,injected", True),
        ("eager,injected", False),
    ],
)
def test_more_modes_than_the_default_ones_are_the_whole_benchmark(modes, is_kept, monkeypatch):
    paths = []

    def destination(output, name, environment, neutral):
        paths.append(real(output, name, environment, neutral))

    real = record.destination
    environment = {"device": "A CPU", "date": "2026-11-22 04:07:31 UTC", "kernel_ids": []}
    monkeypatch.setattr(bench_models.record, "destination", destination)
    monkeypatch.setattr(bench_models.record, "environment", lambda device: environment)
    monkeypatch.setattr(bench_models, "measure_model", lambda *args: None)
    monkeypatch.setattr(bench_models.models, "load_kernel", lambda: (None, 0.0))
    arguments = ["--device", "cpu", "--model", "sd3,wan", *(["--modes", modes] if modes else [])]
    run = CliRunner().invoke(bench_models.main, arguments, catch_exceptions=False)
    assert run.exit_code == 0
    kept = [history.RESULTS / n / "2026-11-22T040731-a-cpu.json" for n in ("sd3", "wan")]
    assert paths == (kept if is_kept else [None, None])


def test_host_time_of_a_forward(results, device):
    forwards = load(results, "host_forward")["forwards"]
    contexts = ("no_grad", "inference_mode")
    measured = [(entry["context"], entry["mode"]) for entry in forwards]
    assert measured == [(context, mode) for context in contexts for mode in ("eager", "injected")]
    for eager, injected in (forwards[:2], forwards[2:]):
        assert eager["over_eager"] == 1
        assert injected["over_eager"] == injected["ms"]["median"] / eager["ms"]["median"]
        assert (injected["batch"], injected["tokens"], injected["text_tokens"]) == (2, 64, 128)
        if device == "cuda":
            assert 0 < injected["kernels"]["launches"] < eager["kernels"]["launches"]


@pytest.mark.parametrize(
    "published",
    [p for p in options.PUBLISHED if hasattr(p, "PUBLISHED_BLOCKS")],
    ids=lambda p: p.__name__,
)
def test_a_model_with_all_of_its_blocks(published):
    model = published.transformer(CPU, torch.bfloat16, True)
    lists = {name: getattr(model, name) for name in published.PUBLISHED_BLOCKS}
    first_and_last = {name: (blocks[0], blocks[-1]) for name, blocks in lists.items()}
    parameters = list(model.parameters())
    assert published.NAME.startswith(models.complete(model, published) + ", ")
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    for name, count in published.PUBLISHED_BLOCKS.items():
        blocks = getattr(model, name)
        assert len(blocks) == len(set(blocks)) == count
        assert (blocks[0], blocks[-1]) == first_and_last[name] or len(lists[name]) == 1


def test_host_time_of_a_forward_is_taken_in_its_context(monkeypatch, tmp_path):
    """Of both models, each mode and context on modules of its own."""
    seen = []

    def forward(self, hidden_states, **arguments):
        seen.append((self, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    for published in (ltx, flux):
        monkeypatch.setattr(
            type(published.transformer(CPU, torch.bfloat16, True)), "forward", forward
        )
    output = tmp_path / "host_forward" / "only.json"
    options = ["--device", "cpu", "--tiny", "--modes", "eager", "--rounds", "1"]
    options += ["--model", "ltx,flux"]
    run = CliRunner().invoke(
        bench_host_forward.main, [*options, "--output", str(output)], catch_exceptions=False
    )
    assert run.exit_code == 0
    modules = {}
    for module, inference, gradients in seen:
        assert not gradients
        modules.setdefault(id(module), set()).add(inference)
    assert sorted(map(sorted, modules.values())) == [[False], [False], [True], [True]]
    assert [
        (e["model"], e["tokens"], e["text_tokens"])
        for e in load(tmp_path, "host_forward")["forwards"]
    ] == [
        *[("tiny LTX-Video", 64, 128)] * 2,
        *[("tiny FLUX.1", 64, 64)] * 2,
    ]


@pytest.mark.parametrize("published", LTX_AND_FLUX)
@pytest.mark.parametrize(
    ("condition", "hooked"),
    [
        ("as published", []),
        ("a hook on the first block", [0]),
        ("a hook on the last block", [-1]),
        ("a hook on every block", slice(None)),
        ("LoRA adapters", []),
    ],
)
def test_conditions_of_a_forward(tiny, published, condition, hooked):
    model = models.twin(tiny[published])
    bench_host_forward.CONDITIONS[condition](model)
    blocks = [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", [])]
    expected = blocks[hooked] if isinstance(hooked, slice) else [blocks[i] for i in hooked]
    assert [block for block in blocks if block._forward_hooks] == expected
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    attentions = [name for name in adapted if name.endswith(("to_q", "to_k", "to_v", "to_out.0"))]
    assert len(attentions) == len(adapted) and bool(adapted) == (condition == "LoRA adapters")


@pytest.mark.usefixtures("_one_thread")
def test_host_time_under_conditions(device, tmp_path):
    output = tmp_path / "host_forward" / "only.json"
    options = [
        "--device",
        device,
        "--tiny",
        "--model",
        "ltx",
        "--rounds",
        "1",
        "--weights",
        "peaked",
    ]
    conditions = ["as published", "LoRA adapters"]
    options += [word for condition in conditions for word in ("--condition", condition)]
    CliRunner().invoke(
        bench_host_forward.main, [*options, "--output", str(output)], catch_exceptions=False
    )
    forwards = load(tmp_path, "host_forward")["forwards"]
    assert [entry["condition"] for entry in forwards] == [c for c in conditions for _ in range(4)]
    assert {entry["weights"] for entry in forwards} == {"peaked"}
    assert all(entry["over_eager"] > 0 for entry in forwards)


def test_host_time_is_without_waiting(monkeypatch):
    """The device is idle before the calls, and nothing waits for it after them."""
    order, clock = [], iter([10.0, 10.5])
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: order.append("clock") or next(clock))
    assert timing.host_microseconds(lambda: order.append("call"), CPU, calls=2) == 250_000
    assert order == ["synchronize", "clock", "call", "call", "clock"]


def copy_build(checkout):
    """Its Python; the extension, which registers its operators but once, is the same file."""
    shutil.copytree(CHECKOUT / "build", checkout / "build", ignore=shutil.ignore_patterns("*.so"))
    for extension in CHECKOUT.glob("build/*/*.so"):
        (checkout / extension.relative_to(CHECKOUT)).symlink_to(extension)


def replace_in(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.skipif(
    not inspect.signature(torch.library.Library.impl).parameters["allow_override"].default,
    reason="this Torch lets a namespace have one build's Python, and a build's copy has no other",
)
@pytest.mark.slow
def test_two_builds_are_compared(device, tmp_path):
    """The other build's norms have another eps: the outputs differ, and those of the same build do not.

    In a process of their own, which compares both pairs: a build that is loaded stays.
    """
    copy_build(tmp_path)
    for norms in tmp_path.glob("build/*/injection/norms.py"):
        replace_in(norms, "(weight, bias), eps\n", "(weight, bias), 1 + eps\n")
    for metadata in tmp_path.glob("build/*/metadata.json"):
        id_ = json.loads(metadata.read_text())["id"]
        replace_in(metadata, f'"{id_}"', f'"{id_}_other"')
    options = ["--device", device, "--tiny", "--rounds", "2", "--dtype", "float32", "--output"]
    outputs = {CHECKOUT: tmp_path / "same.json", tmp_path: tmp_path / "other.json"}
    code = f"import sys; sys.path.insert(0, {str(CHECKOUT / 'benchmarks')!r})\n"
    code += "import compare_builds, torch; torch.set_num_threads(1)\n"
    for before, output in outputs.items():
        arguments = [str(before), *options, str(output)]
        code += f"compare_builds.main({arguments!r}, standalone_mode=False)\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for before, output in outputs.items():
        sizes = json.loads(output.read_text())["sizes"].values()
        assert len(sizes) == len(ltx.TINY_SIZES)
        for entry in (entry for weights in sizes for entry in weights.values()):
            assert (entry["distance"] > 1e-2) == (before != CHECKOUT)
            assert list(entry["ms"]) == ["before", "before, again", "after"]
            assert all(ms["samples"] == 2 and ms["min"] > 0 for ms in entry["ms"].values())


def test_builds_that_cannot_be_compared(device, tmp_path):
    """One of the same commit elsewhere, and none: refused before anything is loaded."""

    def refused():
        result = CliRunner().invoke(compare_builds.main, [str(tmp_path), "--device", device])
        assert result.exit_code == 2
        return result.output

    assert f"{tmp_path} holds no build for this machine" in refused()
    copy_build(tmp_path)
    assert "both builds are _h100_diffusers_kernels" in refused()


def test_local_kernels_selects_another_build(monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "kernels.get_kernel", lambda *a, **o: loaded.append(os.environ["LOCAL_KERNELS"])
    )
    monkeypatch.setenv("LOCAL_KERNELS", f"{models.KERNEL_ID}=/another/checkout")
    models.load_kernel()
    assert loaded == [f"{models.KERNEL_ID}=/another/checkout"]


def test_pipeline(device, results):
    for entry in load(results, "pipeline")["videos"].values():
        modes = dict(entry["modes"])
        assert list(modes) == ["eager", "injected"] + ["injected+graphs"] * (device == "cuda")
        del modes["eager"]
        for mode in modes.values():
            assert mode["seconds"]["samples"] == 1
            psnr = mode["psnr_to_eager_db"]
            assert psnr is None or psnr > 60  # None: the same video, bit for bit


def test_accuracy(results, kernel):
    result = load(results, "accuracy")
    measured = {entry["operation"].split(",")[0] for entry in result["operations"]}
    assert measured == public_operations(kernel)
    assert {entry["dtype"] for entry in result["operations"]} == {"bfloat16", "float16", "float32"}
    of_attention = [e for e in result["operations"] if e["operation"].startswith("attention")]
    assert {entry["dtype"] for entry in of_attention} == {"bfloat16", "float16"}
    for entry in result["operations"]:
        assert 0 <= entry["kernel"] < 0.01, entry
        assert entry["ratio"] == bench_accuracy.ratio(entry["kernel"], entry["eager"])
    (model,) = result["models"]
    assert len(model["draws"]) == 3
    assert 0 < model["kernel"] < 0.1 and 0 < model["eager"] < 0.1


def test_operations(results, kernel, device):
    measured = set()
    for name, module in FAMILIES.items():
        result = load(results, name)
        assert result["environment"]["kernel_ids"] and set(result["peers"]) == set(peers.LIBRARIES)
        assert len(result["workloads"]) == len(module.FAMILY.tiny)
        for entry in result["workloads"]:
            measured.add(entry["operation"])
            assert entry["distance_from_eager"] < comparison.TOLERANCE
            for cache in ("cold", "warm"):
                times = entry[cache]["microseconds"]
                assert {"ours", "eager", "copy", "large_copy"} <= set(times)
                assert times["ours"]["samples"] == 2
                assert entry[cache]["over"]["eager"] == pytest.approx(
                    times["eager"]["median"] / times["ours"]["median"]
                )
    measured |= {entry["operation"] for entry in load(results, "attention")["workloads"]}
    assert measured == public_operations(kernel)
    calls = load(results, "host")["calls"]
    assert {call["operation"].split(",")[0] for call in calls} >= public_operations(kernel)


def test_workloads_are_told_apart():
    for module in (*FAMILIES.values(), bench_attention):
        for workloads in (module.FAMILY.workloads, module.FAMILY.tiny):
            assert len(set(workloads)) == len(workloads)


def test_bytes_are_those_that_must_move(kernel, device):
    def moved(module, workload):
        case = module.FAMILY.build(workload, kernel, torch.device(device))
        results = getattr(kernel, workload.operation)(*case.arguments, **case.options)
        return comparison.moved_bytes(case, comparison.outputs(results))

    workload = comparison.Workload("rms_norm", (2, 6, 128))
    assert moved(bench_norm, workload) == (2 * 6 * 128 * 2 + 128) * 2
    for words in (bench_group_norm.NORM, bench_group_norm.CHANNELS_LAST):
        workload = comparison.Workload("group_norm", (2, 64, 6, 5), words)
        assert moved(bench_group_norm, workload) == (2 * 2 * 64 * 30 + 2 * 64) * 2
    for words in ("first", "first, beside"):
        workload = comparison.Workload("swiglu", (2, 6, 128), words)
        assert moved(bench_activation, workload) == 2 * 6 * (128 + 64) * 2
    workload = comparison.Workload("gated_silu", (2, 6, 64), bench_activation.APART)
    assert moved(bench_activation, workload) == 3 * 2 * 6 * 64 * 2
    workload = comparison.Workload("gated_residual_rms_norm_modulate", (2, 6, 128))
    assert moved(bench_gated_residual, workload) == (2 * 6 * 128 * 4 + 3 * 2 * 128) * 2
    workload = comparison.Workload("qk_norm_rope", (2, 6, 128), bench_rope.COORDINATES)
    read_once = 2 * 128 * 2 + (2 * 6 * 3 + 128 // 6) * 4  # weights, coordinates and frequencies
    assert moved(bench_rope, workload) == 4 * 2 * 6 * 128 * 2 + read_once
    # Outputs that are given count once, the rest of their buffers does not.
    workload = comparison.Workload(
        "qk_norm_rope", (1, 6, 2, 64), bench_rope.PER_HEAD + bench_rope.JOINT
    )
    assert moved(bench_rope, workload) == 6 * 6 * 128 * 2 + 2 * 64 * 2 + 2 * 6 * 64 * 4
    for form, values in (("", 64), (bench_rope.PAIR_TABLES, 32)):
        workload = comparison.Workload("rope", (2, 6, 2, 64), f"half{form}")
        assert moved(bench_rope, workload) == 2 * 2 * 6 * 2 * 64 * 2 + 2 * 6 * values * 4


def test_quack_rotates_by_tables_of_one_value_a_pair(kernel):
    library = types.SimpleNamespace(_rope=lambda x, cos, sin, interleaved: (cos, interleaved))
    taken = {}
    for workload in bench_rope.FAMILY.tiny:
        if workload.operation == "rope":
            case = bench_rope.FAMILY.build(workload, kernel, CPU)
            call = peers.Quack.rope(library, *case.arguments, **case.options)
            taken[workload.variant] = call and call.run()
    assert {variant for variant, call in taken.items() if call is None} == {
        *bench_rope.LAYOUTS,
        bench_rope.LAYOUTS[0] + bench_rope.COMPLEX,
    }
    for layout in bench_rope.LAYOUTS:
        cos, is_interleaved = taken[layout + bench_rope.PAIR_TABLES]
        assert cos.shape == (6, 32) and is_interleaved == (layout == "interleaved")


def test_rates_and_the_best_peer():
    samples = {
        "ours": [10.0, 10.0, 50.0],
        "eager": [30.0],
        "compiled default": [15.0],
        "compiled max-autotune-no-cudagraphs": [12.0],
        "liger": [20.0],
        "copy": [8.0],
        "large_copy": [400.0],
    }
    result = comparison.rates(samples, 20_000_000, 1_000_000_000)
    assert result["compiled_mode"] == "max-autotune-no-cudagraphs"
    assert result["over"] == {"eager": 3.0, "liger": 2.0, "compiled": 1.2}
    assert (result["best_peer"], result["over_best_peer"]) == ("compiled", 1.2)
    rates = result["terabytes_per_second"]
    assert rates == {"ours": 2.0, "eager": pytest.approx(2 / 3), "liger": 1.0, "copy": 2.5} | {
        "large_copy": 2.5,
        "compiled": pytest.approx(20 / 12),
    }
    assert result["of_copy"] == result["of_large_copy"] == pytest.approx(0.8)


def plain_attention(q, k, v, key_bias=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if key_bias is None else key_bias[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


class AttentionPeer:
    """A library whose attention is `function`."""

    def __init__(self, function, takes_bias=True):
        self.function, self.takes_bias = function, takes_bias

    def attention(self, *args, key_bias=None):
        if key_bias is None:
            return peers.Call(lambda: self.function(*args))
        return peers.Call(lambda: self.function(*args, key_bias)) if self.takes_bias else None


def measured_attention(kernel, libraries, workload, ceilings=None, kinds=("std 1",)):
    stopwatch = timing.Stopwatch(CPU)
    settings = bench_attention.Settings(kernel, libraries, stopwatch, ceilings or {}, 1, CPU)
    return bench_attention.measure(workload, kinds, settings)


PLAIN, MASKED = bench_attention.TINY_WORKLOADS[1], bench_attention.TINY_WORKLOADS[-1]
OURS = types.SimpleNamespace(attention=plain_attention)


def test_attention_beside_its_peers(capsys):
    def raises(*args):
        raise RuntimeError("no such kernel\nand a trace")

    libraries = {
        "cudnn": AttentionPeer(plain_attention),
        "flash": AttentionPeer(raises),
        "fa3": AttentionPeer(plain_attention, takes_bias=False),
    }
    ceilings = {"wgmma": 900.0, "exp2": 4.0}
    kinds = bench_attention.kinds_of(MASKED)
    entry = measured_attention(OURS, libraries, MASKED, ceilings, kinds)
    assert entry["declined"] == ["fa3"]
    assert "flash failed" in capsys.readouterr().out
    assert list(entry["inputs"]) == kinds
    for of_kind in entry["inputs"].values():
        assert of_kind["failed"] == {"flash": "RuntimeError: no such kernel"}
        errors, cold = of_kind["errors"], of_kind["cold"]
        assert list(errors) == ["ours", "cudnn"] and errors["ours"] < bench_attention.TOLERANCE
        assert of_kind["error_over"] == {"cudnn": 1.0}
        assert set(cold["over"]) == {"cudnn"}
        assert set(cold["microseconds"]) == {"ours", "cudnn", "copy"}
        assert cold["bounds_teraflops_per_second"] == {"wgmma": 900.0, "exp2": 4 * 64 * 4.0}
    (plain,) = measured_attention(OURS, libraries, PLAIN)["inputs"].values()
    assert "fa3" in plain["cold"]["over"]


def test_attention_that_is_wrong():
    def wrong(q, k, v, key_bias=None):
        return 1.1 * plain_attention(q, k, v, key_bias)

    (entry,) = measured_attention(OURS, {"fa3": AttentionPeer(wrong)}, PLAIN)["inputs"].values()
    assert "0.1 from float64" in entry["failed"]["fa3"] and not entry["cold"]["over"]
    with pytest.raises(comparison.click.ClickException, match="std 1: the result is 0.1"):
        measured_attention(types.SimpleNamespace(attention=wrong), {}, PLAIN)


def test_attention_peer_that_is_wrong_on_some_inputs_is_compared_on_others():
    def no_large_scores(q, k, v):
        is_large = q.float().std() > 20
        return plain_attention(q, k, torch.zeros_like(v) if is_large else v)

    kinds = ("std 1", "large range", "std 3")
    entry = measured_attention(OURS, {"fa3": AttentionPeer(no_large_scores)}, PLAIN, None, kinds)
    compared = {kind: "fa3" in entry["inputs"][kind]["cold"]["over"] for kind in kinds}
    assert compared == {"std 1": True, "large range": False, "std 3": True}
    assert list(entry["inputs"]["large range"]["failed"]) == ["fa3"]


def test_slowest_over_fastest_is_of_typical_inputs():
    def inputs(**rates):
        return {
            kind.replace("_", " "): {"cold": {"teraflops_per_second": {"ours": rate}}}
            for kind, rate in rates.items()
        }

    rates = inputs(std_1=500.0, std_3=400.0, sink=450.0, rising=100.0, constant=900.0)
    assert bench_attention.slowest_over_fastest(rates) == 0.8
    assert bench_attention.slowest_over_fastest(inputs(std_1=500.0, rising=100.0)) is None


def test_kinds_of_attention_inputs():
    self_attention, cross_attention = bench_attention.WORKLOADS[0], bench_attention.WORKLOADS[2]
    assert bench_attention.kinds_of(self_attention) == list(attention_inputs.INPUTS)
    assert bench_attention.kinds_of(cross_attention, ("sink", "std 3")) == ["std 3"]
    first, again = (bench_attention.make(PLAIN, "sink", CPU).arguments for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (["--inputs", "sink", "--inputs", "std 3"], [["std 3", "sink"], ["std 3"]]),
        (["--inputs", "sink", "--shapes", "2x24x24x2x64"], [["sink"]]),
    ],
)
def test_chosen_attention_inputs(device, tmp_path, options, kinds):
    path = tmp_path / "attention" / "only.json"
    options = ["--device", device, "--tiny", "--rounds", "1", *options, "--output", str(path)]
    run = CliRunner().invoke(bench_attention.main, options, catch_exceptions=False)
    assert run.exit_code == 0
    measured = [list(entry["inputs"]) for entry in load(tmp_path, "attention")["workloads"]]
    assert measured[: len(kinds)] == kinds


def test_attention_inputs_that_no_chosen_shape_has():
    options = ["--device", "cpu", "--tiny", "--shapes", "2x24x16x2x64", "--inputs", "rising"]
    result = CliRunner().invoke(bench_attention.main, options)
    assert result.exit_code == 2 and "none of these shapes is measured on rising" in result.output


def test_rates_of_attention():
    shape = (2, 8064, 128, 32, 64)
    samples = {"ours": [50.0, 50.0, 90.0], "cudnn": [75.0], "copy": [40.0]}
    moved = 2 * 2 * 2 * (8064 + 128) * 32 * 64
    result = bench_attention.rates(samples, shape, moved, {"wgmma": 900.0, "exp2": 4.0})
    flops = 4 * 2 * 8064 * 128 * 32 * 64
    assert result["teraflops_per_second"] == {
        "ours": pytest.approx(flops / 50e-6 / 1e12),
        "cudnn": pytest.approx(flops / 75e-6 / 1e12),
    }
    assert result["over"] == {"cudnn": 1.5}
    assert result["terabytes_per_second"]["copy"] == pytest.approx(moved / 40e-6 / 1e12)
    # 4e12 exponentials a second, one a score, of which each is 4 * 64 operations.
    assert result["bounds_teraflops_per_second"]["exp2"] == pytest.approx(1024.0)
    assert result["of_bounds"]["exp2"] == pytest.approx(flops / 50e-6 / 1024e12)
    case = bench_attention.build(
        comparison.Workload("attention", shape), None, torch.device("meta")
    )
    assert comparison.moved_bytes(case, [case.arguments[0]]) == moved


def test_sample_of_attention(kernel, device):
    workload = bench_attention.TINY_WORKLOADS[-1]
    case = bench_attention.build(workload, kernel, torch.device(device))
    sample = bench_attention.Sample((2, 24, 16, 2, 64), torch.device(device))
    assert sample.heads == [0, 1] and sample.queries.tolist() == list(range(24))
    whole = sample.exact(*case.arguments, **case.options)
    part = bench_attention.Sample((2, 24, 16, 2, 64), torch.device(device))
    part.heads, part.queries = [1], torch.tensor([0, 23], device=device)
    torch.testing.assert_close(part.exact(*case.arguments, **case.options), part.of(whole))
    large = bench_attention.Sample((1, 32760, 32760, 12, 128), CPU)
    assert large.heads == [0, 6, 11] and len(set(large.queries.tolist())) == 256
    assert large.queries.tolist()[:: len(large.queries) - 1] == [0, 32759]


def test_text_mask_is_diffusers_own():
    bias = bench_attention.text_bias(2, 128, CPU)
    assert bias.dtype == torch.bfloat16 and bias.shape == (2, 128)
    assert (bias == 0).sum(1).tolist() == list(bench_attention.TEXT_TOKENS)
    assert set(bias.unique().tolist()) == {0.0, torch.tensor(-10000.0).bfloat16().item()}


def test_errors_below_the_floor_count_as_it():
    assert bench_attention.error_ratio(0.0, 0.0) == 1.0
    assert bench_attention.error_ratio(2.0**-13, 0.0) == 2.0
    assert bench_attention.error_ratio(0.003, 0.002) == pytest.approx(1.5)


def test_ceilings_of_attention_are_this_gpus(tmp_path, monkeypatch):
    path = max((history.RESULTS / "ceilings").glob("*-h100.json"))
    ceilings, note = bench_attention.read_ceilings(path, CPU)
    assert not ceilings and "they are those of NVIDIA H100" in note["left_out"]
    ceilings, note = bench_attention.read_ceilings(None, CPU)
    assert not ceilings and "benchmarks/ceilings/run.py measures them" in note["left_out"]
    environment = history.load(path)["environment"]
    monkeypatch.setattr(bench_attention.record, "environment", lambda _: environment)
    ceilings, note = bench_attention.read_ceilings(None, CPU)
    assert set(ceilings) == {"wgmma", "exp2"} and 500 < ceilings["wgmma"] < 1100
    assert note["measures"]["exp2"]["measured"] == ceilings["exp2"]
    assert note["date"] == environment["date"], "the newest"


def test_attention_peers_take_the_operations_arguments(monkeypatch):
    """Their ways to call, on a CPU, where PyTorch has one of the backends."""
    q, k, v = (torch.randn(2, 6, 3, 64) for _ in range(3))
    bias = torch.randn(2, 6)
    monkeypatch.setattr(peers.TorchAttention, "backend", peers.SDPBackend.MATH, raising=False)
    call = peers.TorchAttention().attention(q, k, v, key_bias=bias)
    torch.testing.assert_close(call.outputs(call.run())[0], plain_attention(q, k, v, bias))
    assert peers.TorchFlashAttention().attention(q, k, v, key_bias=bias) is None
    interface = types.ModuleType("fa3_fwd_interface")
    interface.flash_attn_func = plain_attention
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", interface)
    call = peers.FlashAttention3().attention(q, k, v)
    assert torch.equal(call.outputs(call.run())[0], plain_attention(q, k, v))
    assert peers.FlashAttention3().attention(q, k, v, key_bias=bias) is None


def measured(kernel, libraries, device, module=bench_norm, what=("rms_norm", "")):
    """One workload, with the peers in `libraries`."""
    device = torch.device(device)
    operation, variant = what
    workload = comparison.Workload(operation, (2, 6, 128), variant)
    case = module.FAMILY.build(workload, kernel, device)
    settings = comparison.Settings(device, 1, (), 1 << 10)
    stopwatch, copy = timing.Stopwatch(device), comparison.copy_of(1 << 10, device)
    return comparison.measure(workload, case, kernel, libraries, stopwatch, copy, settings)


def test_wrong_result_ends_the_run(device):
    wrong = types.SimpleNamespace(rms_norm=lambda x, weight: x)
    with pytest.raises(comparison.click.ClickException, match=r"rms_norm 2x6x128: .* from eager's"):
        measured(wrong, {}, device)


def test_result_that_is_not_written_ends_the_run(device):
    """What eager has written to the same place is not taken for it."""
    wrong = types.SimpleNamespace(gelu=lambda x, approximate, out: out)
    with pytest.raises(RuntimeError, match="an output is not finite"):
        measured(wrong, {}, device, bench_activation, ("gelu", "tanh, beside"))


def test_peer_that_fails_is_recorded(kernel, device, capsys):
    class Peer:
        def __init__(self, run):
            self.rms_norm = lambda x, weight: peers.Call(lambda: run(x, weight))

    def raises(x, weight):
        raise RuntimeError("no such kernel\nand a trace")

    result = measured(
        kernel,
        {
            "good": Peer(kernel.rms_norm),
            "wrong": Peer(lambda x, weight: x),
            "broken": Peer(raises),
            "other": object(),
            "declines": types.SimpleNamespace(rms_norm=lambda x, weight: None),
        },
        device,
    )
    assert result["failed"]["broken"] == "RuntimeError: no such kernel"
    assert "from eager's" in result["failed"]["wrong"] and len(result["failed"]) == 2
    assert set(result["cold"]["over"]) == {"eager", "good"}
    assert "rms_norm 2x6x128: broken failed" in capsys.readouterr().out


def test_peers_are_left_out_with_the_reason():
    libraries, notes = peers.load(CPU)
    assert not libraries
    assert notes == dict.fromkeys(peers.LIBRARIES, "left out: ImportError: it needs a GPU")
    libraries, notes = peers.load(torch.device("cuda"), {"fa3": peers.FlashAttention3})
    if not libraries:
        assert notes["fa3"].startswith("left out: ")


@pytest.mark.slow
def test_compiled_ahead_and_timed(device, tmp_path):
    """One workload with torch.compile, which a process of its own has compiled before."""
    output = tmp_path / "norm" / "only.json"
    size = comparison.Workload("rms_norm", bench_norm.TINY_SHAPES[0]).size
    options = ["--device", device, "--tiny", "--operations", "rms_norm", "--shapes", size]
    options += ["--rounds", "1", "--compile-modes", "default", "--compile-processes", "1"]
    result = CliRunner().invoke(
        bench_norm.main, [*options, "--output", str(output)], catch_exceptions=False
    )
    assert result.exit_code == 0 and "Not compiled ahead" not in result.output
    (entry,) = load(tmp_path, "norm")["workloads"]
    assert not entry["failed"]
    assert entry["cold"]["compiled_mode"] == "default" and "compiled" in entry["cold"]["over"]


def test_compiled_functions_have_code_of_their_own():
    """Dynamo keeps what it compiled with the code, and compiles only a few variants of one."""
    seen = []

    def backend(graph, inputs):
        seen.append(tuple(inputs[0].shape))
        return graph.forward

    def function(x, *, factor=2):
        return x * factor

    compile_ = torch.compile
    sizes = range(2, 2 + 2 * torch._dynamo.config.recompile_limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, mode, **o: compile_(f, backend=backend, **o))
        for size in sizes:
            x = torch.ones(size)
            assert torch.equal(comparison.compiled(function, "default")(x), 2 * x)
    assert seen == [(size,) for size in sizes]


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (["--tiny"], "--compile, --tiny"),
        (["--tiny", "--shapes", "4x96"], "--compile, --shapes, --tiny"),
    ],
)
def test_selection_is_not_kept_as_the_result(device, tmp_path, monkeypatch, size, told):
    monkeypatch.setattr(history, "RESULTS", tmp_path)
    options = ["--device", device, "--no-compile", "--rounds", "1", *size]
    run = CliRunner().invoke(bench_softmax.main, options, catch_exceptions=False)
    assert run.exit_code == 0 and not list(tmp_path.iterdir())
    assert f"Not the whole benchmark, with {told}: it is only written with --output" in run.output


@pytest.mark.usefixtures("_one_thread")
def test_whole_run_is_kept_as_the_result(device, tmp_path, monkeypatch):
    monkeypatch.setattr(history, "RESULTS", tmp_path)
    options = ["--device", device, "--rounds", "1"]
    run = CliRunner().invoke(bench_host.main, options, catch_exceptions=False)
    (path,) = (tmp_path / "host").iterdir()
    assert run.exit_code == 0 and f"Wrote {path}" in run.output
    assert path == history.path("host", history.load(path)["environment"], tmp_path)


def test_result_is_kept_by_date_commit_and_card():
    environment = {
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22 04:07:31 UTC",
        "kernel_ids": ["_h100_diffusers_kernels_cuda_0123abc_dirty"],
    }
    with click.Context(click.Command("norm")):
        path = record.destination(None, "norm", environment)
    assert path == history.RESULTS / "norm" / "2026-11-22T040731-0123abc_dirty-h100.json"
    assert record.destination(Path("x"), "norm", environment) == Path("x")
    without_build = {**environment, "kernel_ids": [], "commit": "89abcde", "device": "A CPU (R)"}
    assert history.path("x", without_build).name == "2026-11-22T040731-89abcde-a-cpu-r.json"


def test_kept_results_are_named_by_what_they_say():
    for path in history.RESULTS.rglob("*.json"):
        environment = history.load(path)["environment"]
        assert history.path(path.parent.name, environment) == path


def test_shown_is_the_newest_of_the_first_card(tmp_path):
    def add(device, date):
        environment = {"device": device, "date": f"{date} UTC"}
        path = history.path("norm", environment, tmp_path)
        record.write(path, {"environment": environment})
        return history.shown("norm", tmp_path)["environment"]

    assert history.shown("norm", tmp_path) is None
    assert add("A CPU", "2026-01-09 00:00")["device"] == "A CPU"
    assert add("NVIDIA H200", "2026-01-02 10:00")["device"] == "NVIDIA H200"
    assert add("NVIDIA H100 PCIe", "2026-01-01 10:00")["device"] == "NVIDIA H100 PCIe"
    assert add("NVIDIA H200", "2026-01-03 10:00")["device"] == "NVIDIA H100 PCIe"
    assert add("NVIDIA H100 80GB HBM3", "2026-01-01 10:00:30")["date"].startswith(
        "2026-01-01 10:00:30"
    )
    assert add("NVIDIA H100 80GB HBM3", "2026-01-01 09:00")["date"].startswith(
        "2026-01-01 10:00:30"
    )
    newest = history.newest("norm", "NVIDIA H200", tmp_path)["environment"]
    assert newest["date"] == "2026-01-03 10:00 UTC"
    assert history.newest("norm", "NVIDIA B200", tmp_path) is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--operations", "rms_norm,fast_norm"],
            "no operation 'fast_norm' here: there are rms_norm,",
        ),
        (["--shapes", "1x2"], "no shape '1x2' here: there are 1x1024x2048,"),
    ],
)
def test_selection_of_nothing(args, message):
    result = CliRunner().invoke(bench_norm.main, ["--device", "cpu", *args])
    assert result.exit_code == 2 and message in result.output


def hub_benchmarks():
    script = CHECKOUT / "benchmarks" / "benchmark.py"
    return kernels_benchmark.discover_benchmark_classes(script, CHECKOUT)


def test_hub_benchmark_is_found_and_covers_every_operation(kernel):
    scripts = kernels_benchmark.discover_benchmark_scripts("x", CHECKOUT)
    assert [script.name for script in scripts] == ["benchmark.py"]
    names = {n for cls in hub_benchmarks() for n in dir(cls) if n.startswith("benchmark_")}
    for operation in public_operations(kernel):
        assert any(name.startswith(f"benchmark_{operation}") for name in names), operation
    for cls in hub_benchmarks():
        for name in dir(cls):
            if name.startswith("benchmark_"):
                assert hasattr(cls, name.replace("benchmark_", "verify_")), name


@pytest.mark.parametrize("cls", hub_benchmarks(), ids=lambda cls: cls.__name__)
def test_hub_benchmark(cls):
    """As `kernels benchmark` runs it: each result is verified."""
    timings, _ = kernels_benchmark.run_benchmark_class(
        cls, iterations=1, warmup=1, repo_id=str(CHECKOUT), is_local=True, revision="local"
    )
    assert timings and all(timing_.verified for timing_ in timings.values())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sizes", "49x512"], "a size is FRAMESxHEIGHTxWIDTH, got '49x512'"),
        (["--sizes", "48x512x768"], "frames must be a multiple of 8 plus 1"),
        (["--modes", "eager,fast"], "got 'fast'"),
        (["--sizes", "49x512x768", "--model", "flux"], "a size is HEIGHTxWIDTH, got '49x512x768'"),
        (["--model", "flux", "--sizes", "40x64"], "multiples of 16, got 40x64"),
        (["--model", "wan", "--sizes", "480x832"], "a size is FRAMESxHEIGHTxWIDTH, got '480x832'"),
        (["--model", "ltx,sd4"], "model must be one of ltx, flux,"),
        (["--model", "ltx,flux", "--sizes", "64x64"], "sizes are of one model"),
    ],
)
def test_wrong_option(args, message):
    result = CliRunner().invoke(bench_models.main, args)
    assert result.exit_code == 2
    assert message in result.output


def rendered(results, name):
    return render_docs.render(f"# T\n\n<!-- table: {name} -->\n<!-- end table -->\n", results)


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def rows_of(results, name):
    """The cells of a table's rows, without its header."""
    lines = rendered(results, name).splitlines()
    return [cells(line) for line in lines if line.startswith("|")][2:]


@pytest.mark.parametrize(
    "name",
    [
        *("models", "pipeline", "accuracy_operations", "accuracy_models", *FAMILIES),
        *("attention", "attention_inputs", "attention_accuracy", "host", "host_forward", "flux"),
    ],
)
def test_table_is_rendered_once_and_for_all(results, name):
    text = rendered(results, name)
    assert render_docs.render(text, results) == text
    file = re.sub(r"(?<=accuracy)_\w+|(?<=attention)_\w+", "", name)
    environment = load(results, file)["environment"]
    assert environment["command"] in text and environment["torch"] in text


def test_table_shows_the_figures(results, tmp_path):
    record = load(results, "pipeline")
    video = record["videos"]["9x64x96:3"]
    video["modes"]["injected"]["seconds"]["median"] = 12.345
    video["speedups"]["injected"]["eager"] = 6.789
    store(tmp_path, "pipeline", record)
    row = ["9 frames 64×96, 3 steps", "injected", "12.35 s", "6.79×"]
    assert rows_of(tmp_path, "pipeline").count(row) == 1


def test_flux_table(results, tmp_path):
    assert "python benchmarks/bench_models.py --model flux` does" in rendered(tmp_path, "flux")
    record = load(results, "flux")
    entry = record["sizes"].pop("64x96")
    for of_weights in entry["weights"].values():
        of_weights["modes"] = {
            mode: {"ms": {"median": ms}}
            for mode, ms in (("eager", 60.0), ("compiled", 45.0), ("injected", 40.0))
        }
        of_weights["speedups"] = timing.speedups(
            {"eager": 60.0, "compiled": 45.0, "injected": 40.0}
        )
    record["sizes"]["1024x1024"] = {**entry, "tokens": 4096}
    store(tmp_path, "flux", record)
    rows = rows_of(tmp_path, "flux")
    assert {row[0] for row in rows} == {"1024×1024, 4096 + 512 tokens"}
    assert rows[1][1:] == ["random", "torch.compile", "45.0 ms", "1.33×", ""]
    assert rows[5][1:] == ["peaked", "injected", "40.0 ms", "1.50×", "1.12×"]


def test_host_forward_table(tmp_path):
    assert "python benchmarks/bench_host_forward.py` does" in rendered(tmp_path, "host_forward")
    entry = {
        "model": "FLUX.1",
        "batch": 1,
        "tokens": 64,
        "text_tokens": 64,
        "context": "inference_mode",
        "mode": "injected",
        "ms": {"median": 2.345},
    }
    measured = {
        **entry,
        "condition": "a hook on every block",
        "weights": "peaked",
        "over_eager": 0.456,
        "kernels": {"ms": 1.25, "launches": 300.0},
    }
    record = {"environment": ENVIRONMENT, "processor": "a processor", "forwards": [measured, entry]}
    store(tmp_path, "host_forward", record)
    tokens, rest = "FLUX.1: 1×(64 + 64) tokens", ["torch.inference_mode", "injected", "2.35 ms"]
    assert rows_of(tmp_path, "host_forward") == [
        [tokens, "a hook on every block", "peaked", *rest, "0.46×", "1.25 ms", "300"],
        [tokens, "as published", "random", *rest, "", "", ""],
    ]
    assert (
        rendered(tmp_path, "host_forward").rstrip().endswith("on a processor\n\n<!-- end table -->")
    )


def test_each_table_names_the_device_of_its_own_results(made_up, tmp_path):
    for folder in made_up.iterdir():
        result = load(made_up, folder.name)
        device = "NVIDIA H200" if folder.name == "norm" else "NVIDIA H100 80GB HBM3"
        result["environment"] = {**ENVIRONMENT, "device": device}
        store(tmp_path, folder.name, result)
    for name, devices in {
        "norm": ["H200"],
        "softmax": ["H100"],
        "host": ["H100"],
        "targets": ["H200", "H100"],
    }.items():
        assert re.findall(r"NVIDIA (H\d+)", rendered(tmp_path, name)) == devices


def test_gpu_tables(tmp_path):
    """The tables that need a GPU's figures, from made-up ones."""
    classes = {"gemm": 25.0, "attention": 8.0, "other": 4.25}
    modes = {
        "injected": {
            "kernels": {
                "classes": {key: {"ms": ms, "launches": 1} for key, ms in classes.items()},
                "total": {"ms": 37.25, "launches": 640},
                "idle_ms": 1.25,
            }
        }
    }
    entry = {
        "weights": {"peaked": {"modes": modes}},
        "injection": {
            "change_s": 0.0123,
            "full_speed_s": 0.456,
            "allocated_growth_bytes": 50,
            "weights_bytes": 10000,
        },
    }
    record = {"environment": ENVIRONMENT, "sizes": {"49x512x768": entry}}
    store(tmp_path, "models", record)
    (row,) = rows_of(tmp_path, "breakdown")
    assert row[1:] == ["peaked", "injected", "25.0 ms", "8.0 ms", "4.2 ms", "1.2 ms", "640"]
    (row,) = rows_of(tmp_path, "injection")
    assert row[1:] == ["12 ms", "0.46 s", "0.50%"]


def test_ceilings_table(tmp_path):
    def measure(program, name, unit, measured, theoretical=None):
        ratio = None if theoretical is None else measured / theoretical
        return {
            "program": program,
            "name": name,
            "unit": unit,
            "measured": measured,
            "theoretical": theoretical,
            "formula": None if theoretical is None else "x",
            "ratio": ratio,
        }

    measures = [
        measure("memory", "copy 4 B x 4, 512 MiB", "TB/s", 3.5, 4.0),
        measure("memory", "copy 4 B x 4, 1 GiB", "TB/s", 3.0, 4.0),
        measure("memory", "copy 16 B x 8, 1 GiB", "TB/s", 3.2, 4.0),
        measure("memory", "bulk copy, 1 GiB", "TB/s", 2.0, 4.0),
        measure("cache", "L1 read rate", "TB/s", 60.0, 30.0),
        measure("cache", "L1 read rate a multiprocessor", "B/clock", 120.0, 128.0),
        measure("tensor_core", "wgmma", "TFLOP/s", 1010.0, 1000.0),
        measure("launch", "chain of 1 block, graph", "us", 1.5),
        measure("launch", "chain of a block a multiprocessor, graph", "us", 0.75),
        measure("launch", "chain of 8 blocks a multiprocessor, graph", "us", 1.0),
        measure("launch", "chain of 1 block, stream", "us", 5.0),
    ]
    record = {"environment": ENVIRONMENT, "measures": measures}
    store(tmp_path, "ceilings", record)
    assert rows_of(tmp_path, "ceilings") == [
        ["memory", "copy 16 B x 8, 1 GiB", "3.20 TB/s", "4.00 TB/s", "80%"],
        ["memory", "bulk copy, 1 GiB", "2.00 TB/s", "4.00 TB/s", "50%"],
        ["cache", "L1 read rate", "60.00 TB/s", "30.00 TB/s", "200%*"],
        ["tensor core", "wgmma", "1010 TFLOP/s", "1000 TFLOP/s", "101%"],
        ["launch", "chain of a block a multiprocessor, graph", "0.75 µs", "", ""],
        ["launch", "chain of 1 block, stream", "5.00 µs", "", ""],
    ]
    assert "* above the limit, which cannot be" in rendered(tmp_path, "ceilings")


def test_profile_table(tmp_path):
    met = profiling.Profile(
        workload="rms_norm 2x96x128",
        kernel="void unnamed>::row_norm_kernel<float, 4>(Params)",
        microseconds=1.0,
        dram_percent=90.25,
        occupancy_percent=75.5,
        l2_hit_percent=50.0,
        registers=40,
        local_bytes=0,
        dram_bytes_read=1,
        dram_bytes_written=1,
        occupancy_limits={},
        stalls={"barrier": 1.5, "long_scoreboard": 31.25},
    )
    missed = dataclasses.replace(
        met, kernel="void clear_kernel(int)", dram_percent=80.0, local_bytes=64
    )
    alone = dataclasses.replace(met, workload="silu 2x96")
    targets = {
        "dram_percent": profiling.DRAM_TARGET,
        "occupancy_percent": profiling.OCCUPANCY_TARGET,
    }
    kernels = [
        {**vars(p), "largest_stall": p.largest_stall, "misses": p.misses}
        for p in (met, missed, alone)
    ]
    record = {"environment": ENVIRONMENT, "targets": targets, "kernels": kernels}
    store(tmp_path, "profile", record)
    rest = ["75.5%", "50.0%", "40"]
    assert rows_of(tmp_path, "profile") == [
        [
            *("rms_norm 2×96×128, row_norm_kernel", "90.2%", *rest, "0 B"),
            *("long_scoreboard 31.2", "none"),
        ],
        [
            *("rms_norm 2×96×128, clear_kernel", "80.0%", *rest, "64 B", "long_scoreboard 31.2"),
            "memory 80.0% ≤ 85%; 64 bytes of local memory",
        ],
        ["silu 2×96", "90.2%", *rest, "0 B", "long_scoreboard 31.2", "none"],
    ]
    assert "DRAM throughput above 85%" in rendered(tmp_path, "profile")


def test_check_finds_a_stale_table(results, tmp_path):
    def check():
        return render("--check")

    def render(*options):
        args = [*options, "--results", str(results), "--plots", str(plots), str(path)]
        return CliRunner().invoke(render_docs.main, args)

    path, plots = tmp_path / "README.md", tmp_path / "plots"
    path.write_text(rendered(results, "models"), encoding="utf-8")
    assert "bandwidth.svg is stale" in check().output
    assert render().exit_code == 0
    assert check().exit_code == 0
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("ms |", "9 ms |", 1), encoding="utf-8")
    stale = check()
    assert stale.exit_code == 1 and "is stale" in stale.output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "there is no table nothing"),
        ("models", "models is empty: benchmarks/bench_models.py"),
        ("ceilings", "ceilings is empty: benchmarks/ceilings/run.py"),
        ("profile", "profile is empty: benchmarks/profile_kernels.py"),
    ],
)
def test_table_that_cannot_be_rendered(tmp_path, name, message):
    with pytest.raises(click.ClickException, match=message):
        rendered(tmp_path, name)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """Results at the real sizes: this package copies at 3 TB/s, eager takes thrice as long."""
    folder = tmp_path_factory.mktemp("made_up")
    for name, module in FAMILIES.items():
        entries = []
        for workload in module.FAMILY.workloads:
            moved = 4 * math.prod(workload.shape)
            ours = moved / 3e6
            samples = {
                "ours": [ours],
                "eager": [3 * ours],
                "compiled default": [2.5 * ours],
                "compiled max-autotune-no-cudagraphs": [2.4 * ours],
                "liger": [2 * ours],
                "quack": [1.25 * ours],
                "copy": [ours],
                "large_copy": [(1 << 30) / 3e6],
            }
            rates = comparison.rates(samples, moved, 1 << 30)
            entries.append(
                {
                    "operation": workload.operation,
                    "variant": workload.variant,
                    "shape": list(workload.shape),
                    "bytes": moved,
                    "failed": {},
                    "cold": rates,
                    "warm": rates,
                }
            )
        record = {"environment": ENVIRONMENT, "peers": {"liger": "0.8.5"}, "workloads": entries}
        store(folder, name, record)
    calls = [("torch rms_norm", 10.0), ("rms_norm", 11.0), ("softmax", 13.0)]
    record = {
        "environment": ENVIRONMENT,
        "processor": "x",
        "calls": [
            {"operation": name, "microseconds": {"median": time_}, "over_yardstick": time_ / 10}
            for name, time_ in calls
        ],
    }
    store(folder, "host", record)
    return folder


@pytest.fixture
def made_up_attention():
    """Results at the real sizes: FA3 takes 1.2 times as long and has the same error, cuDNN 1.5 times."""
    entries = []
    for workload in bench_attention.WORKLOADS:
        is_masked = bool(workload.variant)
        of_kinds = {}
        for kind in bench_attention.kinds_of(workload):
            ours = bench_attention.flops(workload.shape) / 600e6
            samples = {"ours": [ours], "cudnn": [1.5 * ours], "copy": [1.0]}
            if not is_masked:
                samples["fa3"] = [1.2 * ours]
            ceilings = {"wgmma": 900.0, "exp2": 4.0}
            errors = dict.fromkeys(set(samples) - {"copy"}, 0.002)
            of_kinds[kind] = {
                "failed": {"flash": "it broke"},
                "cold": bench_attention.rates(samples, workload.shape, 10**8, ceilings),
                "errors": errors,
                "error_over": dict.fromkeys(set(errors) - {"ours"}, 1.0),
            }
        entries.append(
            {
                "operation": "attention",
                "variant": workload.variant,
                "shape": list(workload.shape),
                "declined": ["fa3"] * is_masked,
                "slowest_over_fastest": bench_attention.slowest_over_fastest(of_kinds),
                "inputs": of_kinds,
            }
        )
    return {
        "environment": ENVIRONMENT,
        "peers": {"cudnn": "9", "flash": "2.11", "fa3": "0.0.3"},
        "ceilings": {"date": "a day", "command": "a command"},
        "workloads": entries,
    }


def row_of(rows, what):
    (row,) = (row for row in rows if row.what == what)
    return row


def test_targets_of_attention(made_up_attention):
    rows = targets.attention(made_up_attention)
    assert len(rows) == len(targets.ATTENTION) + 3 and all(row.verdict == "met" for row in rows)
    assert row_of(rows, "over FA3, std 1").measured == pytest.approx(1.2)
    over_cudnn = row_of(rows, "over cuDNN, typical inputs")
    assert over_cudnn.measured == pytest.approx(1.5) and over_cudnn.of.startswith("40 of 40;")
    assert row_of(rows, "over FA3, rising").of.startswith("4 of 4;")
    assert row_of(rows, "error over FA3's, typical inputs").of.startswith(
        f"{4 * 10 + 2 * 2} of 44;"
    )
    assert row_of(rows, "error over FA3's, extreme inputs").of.startswith(f"{4 * 4 + 2 * 2} of 20;")
    masked = row_of(rows, "over cuDNN, std 3").of
    assert masked == "2 of 2; the least: attention 2×8064×128×32×64, std 3"
    assert {row.verdict for row in targets.attention(None)} == {"not measured"}


def test_targets_of_attention_that_are_missed(made_up_attention):
    small, large, *_ = made_up_attention["workloads"]
    large["inputs"]["sink"]["cold"]["over"]["fa3"] = 0.972
    large["inputs"]["large range"]["error_over"]["fa3"] = 1.26
    large["slowest_over_fastest"] = 0.47
    del small["inputs"]["rising"]["cold"]["over"]["fa3"]
    for entry in made_up_attention["workloads"]:
        for of_kind in entry["inputs"].values():
            del of_kind["cold"]["over"]["cudnn"]
    rows = targets.attention(made_up_attention)
    shape = "attention 2×8064×8064×32×64"
    sink = row_of(rows, "over FA3, peaked inputs")
    assert (sink.of, sink.verdict) == (f"8 of 9; the least: {shape}, sink", "missed by 10.0%")
    error = row_of(rows, "error over FA3's, extreme inputs")
    assert error.of == f"19 of 20; the most: {shape}, large range"
    assert error.verdict == "missed by 20.0%"
    dependence = row_of(rows, "slowest over fastest rate, typical inputs")
    assert (dependence.of, dependence.measured) == (f"3 of 4; the least: {shape}", 0.47)
    rising = row_of(rows, "over FA3, rising")
    assert rising.of == f"3 of 4; the least: {shape}, rising; 1 not measured"
    assert rising.verdict == "met where measured"
    assert {r.verdict for r in rows if r.what.startswith("over cuDNN")} == {"not measured"}


def test_targets_of_the_model():
    def sizes(**weights):
        return {"sizes": {targets.MODEL_SIZE: {"weights": weights}}}

    good = {"speedups": {"injected": {"eager": 1.9, "compiled": 1.3}}}
    peaked = {"speedups": {"injected": {"eager": 1.7, "compiled": 1.1}}}
    eager, compiled = targets.models(sizes(random=good, peaked=peaked))
    assert (eager.verdict, compiled.verdict) == ("met", "missed by 5.2%")
    for result in (None, {"sizes": {}}, sizes(random=good)):
        assert {row.verdict for row in targets.models(result)} == {"not measured"}


def made_up_forward(
    injected=40.0, rest=2.0, distance=1.02, weights="peaked", size="1024x1024", **compiled
):
    """A model's result at one size: eager takes 60 ms, 20 of them outside products and attention."""
    times = {"eager": 60.0, **compiled, "injected": injected}
    rests = {"eager": 20.0, **dict.fromkeys(compiled, 4.0), "injected": rest}
    modes = {
        mode: {
            "ms": {"median": ms},
            "distance_over_eager": distance if mode == "injected" else 1.0,
            "kernels": {"classes": {"other": {"ms": rests[mode], "launches": 1}}},
        }
        for mode, ms in times.items()
    }
    of_weights = {"modes": modes, "speedups": timing.speedups(times)}
    return {
        "environment": ENVIRONMENT,
        "model": "a model",
        "sizes": {size: {"batch": 1, "tokens": 8, "weights": {weights: of_weights}}},
    }


def test_forward_is_compared_with_the_faster_compiled_one():
    (row,) = targets.forwards(made_up_forward(compiled=50.0, **{models.REGIONAL: 48.0}))
    assert (row.size, row.eager, row.compiled, row.injected) == ("1024x1024", 60.0, 48.0, 40.0)
    assert (row.over_eager, row.over_compiled) == (1.5, 1.2)
    assert (row.rest_over_eager, row.rest_over_compiled) == (0.1, 0.5)
    assert row.compiled_mode == models.REGIONAL and row.distance_over_eager == 1.02
    (row,) = targets.forwards(made_up_forward(compiled=46.0, **{models.REGIONAL: 48.0}))
    assert (row.compiled_mode, row.over_compiled) == ("compiled", 1.15)
    (row,) = targets.forwards(made_up_forward())
    assert row.over_eager == 1.5
    assert row.compiled_mode is row.over_compiled is row.rest_over_compiled is None
    (row,) = targets.forwards(made_up_forward(weights="random"))
    assert row.eager is row.injected is row.over_eager is row.distance_over_eager is None
    assert not targets.forwards(None)


def test_aims_are_of_the_published_models():
    names = {published.RESULT: published.NAME for published in options.PUBLISHED}
    assert set(targets.TITLES) == set(names)
    for name, title in targets.TITLES.items():
        assert names[name].startswith(title)
    assert set(targets.COMPILED) <= set(models.MODES)


def test_targets_of_the_other_models():
    rows = targets.model_forwards({})
    assert len(rows) == 2 * 6 + 6 + 4 and {row.verdict for row in rows} == {"not measured"}

    slow = made_up_forward(injected=50.0, rest=5.0, distance=1.1, **{models.REGIONAL: 52.0})
    entry = {"mode": "injected", "over_eager": 0.3, "condition": "as published"}
    host = [
        {**entry, "model": flux2.NAME},
        {**entry, "model": flux2.NAME, "over_eager": 0.5},
        {**entry, "model": sd3.NAME, "over_eager": 0.7},
        {**entry, "model": wan.NAME, "over_eager": 9.0, "condition": "LoRA adapters"},
        {**entry, "model": wan.NAME, "over_eager": 1.0, "mode": "eager"},
    ]
    rows = targets.model_forwards(
        {
            "flux2": made_up_forward(**{models.REGIONAL: 48.0}),
            "sd3": slow,
            "cosmos": slow,
            "host_forward": {"forwards": host},
        }
    )
    verdicts = {(row.what, row.of): row.verdict for row in rows}
    size = "1024×1024"
    assert verdicts["injected over eager", f"FLUX.2 {size}"] == "met"
    assert verdicts["injected over torch.compile", f"FLUX.2 {size}"] == "met"
    sd3_name = f"Stable Diffusion 3.5 Large {size}"
    assert verdicts["injected over eager", sd3_name] == "missed by 29.4%"
    assert verdicts["injected over torch.compile", sd3_name] == "missed by 7.1%"
    assert verdicts["injected over eager, no family", f"Cosmos-Predict2 2B {size}"] == "met"
    assert verdicts["injected over eager", "Qwen-Image"] == "not measured"
    rest, over_compiled, distance, shares = rows[-4:]
    assert rest.of == f"1 of 6; the most: {sd3_name}; 4 not measured" and rest.measured == 0.25
    assert over_compiled.measured == 1.25 and distance.measured == 1.1
    assert distance.of.startswith("1 of 12;") and distance.verdict == "missed by 4.8%"
    assert shares.measured == 0.7 and shares.of.startswith("1 of 6; the most: Stable Diffusion")


def test_table_and_plot_of_all_models(tmp_path):
    assert {row[4] for row in rows_of(tmp_path, "all_models")} == {"not measured"}
    assert not render_plots.render(tmp_path)
    store(tmp_path, "models", made_up_forward(50.0, size="9x64x96", compiled=52.0))
    store(tmp_path, "sd3", made_up_forward(**{models.REGIONAL: 48.0}))
    store(tmp_path, "cosmos", made_up_forward(injected=55.0))
    names, rows = zip(*((row[0], row[1:]) for row in rows_of(tmp_path, "all_models")), strict=True)
    assert names[:3] == ("a model, 9 frames 64×96", "FLUX.1", "FLUX.2")
    assert names[3] == "a model, 1024×1024" and len(names) == len(targets.TITLES)
    ratios = ["1.50×", "1.20×", "0.10×", "0.50×", "1.02×"]
    assert rows[3] == ["60.0 ms", "48.0 ms blocks", "40.0 ms", *ratios]
    assert rows[0][:2] == ["60.0 ms", "52.0 ms whole"]
    assert rows[7] == ["60.0 ms", "", "55.0 ms", "1.09×", "", "0.10×", "", "1.02×"]
    assert rows[1] == ["", "", "", "not measured", "", "", "", ""]
    drawn = render_plots.render(tmp_path)["all_models.svg"]
    for speedup in ("1.20", "1.15", "1.50", "1.25", "1.09"):
        assert f">{speedup}×</text>" in drawn


def test_attention_tables(made_up_attention, made_up, tmp_path):
    for name in ("attention", "attention_inputs", "attention_accuracy"):
        unmeasured = "Not measured yet: `python benchmarks/bench_attention.py`"
        assert unmeasured in rendered(tmp_path, name)
    entries = {attention_label(e): e for e in made_up_attention["workloads"]}
    of_kinds = entries["2×8064×8064×32×64"]["inputs"]
    of_kinds["std 6"]["cold"]["over"].update(fa3=1.1, cudnn=2.0)
    of_kinds["sink"]["cold"]["over"].update(fa3=1.15, cudnn=1.0)
    of_kinds["rising"]["cold"]["over"].update(fa3=0.9)
    of_kinds["std 3"]["error_over"].update(fa3=1.04)
    of_kinds["std 6"]["error_over"].update(fa3=0.9, cudnn=1.2)
    masked = entries["2×8064×128×32×64, text mask"]["inputs"]
    masked["std 3"]["cold"]["over"].update(cudnn=1.4)
    del of_kinds["constant"]["cold"]["over"]["fa3"]
    of_kinds["constant"]["failed"]["fa3"] = "it is wrong"
    store(tmp_path, "attention", made_up_attention)

    rows = [row[1:] for row in rows_of(tmp_path, "attention") if row[0] == "2×8064×8064×32×64"]
    slow = ["rising", "jump", "large range"]
    assert [row[0] for row in rows] == ["std 1", "std 6, the worst", *slow]
    assert rows[0][1:] == [
        *("1775.7 µs", "600 TFLOP/s", "1.50×", "failed", "1.20×"),
        *("67% of 900", "59% of 1024", "0.06 TB/s", "1.0 µs"),
    ]
    assert [row[5] for row in rows[1:3]] == ["1.10×", "0.90×"]
    rows = [row[1:] for row in rows_of(tmp_path, "attention") if row[0].endswith("text mask")]
    assert [row[0] for row in rows] == ["std 1", "std 3, the worst", "large range"]
    assert rows[1][3:6] == ["1.40×", "failed", "takes no mask"]
    assert "FA3 0.0.3; ceilings of a day: `a command`" in rendered(tmp_path, "attention")

    rows = {row[0]: row[1:] for row in rows_of(tmp_path, "attention_inputs")}
    assert list(rows) == [*attention_inputs.INPUTS, "slowest over fastest"]
    column = list(entries).index("2×8064×8064×32×64")
    assert rows["std 6"][column] == "1.10× / 2.00×"
    assert rows["constant"][column] == "failed / 1.50×"
    assert rows["std 3"][-1] == "takes no mask / 1.40×" and rows["sink"][-1] == ""
    assert rows["slowest over fastest"][column] == "1.00"

    accuracy = rows_of(tmp_path, "attention_accuracy")
    rows = [row[1:] for row in accuracy if row[0] == "2×8064×8064×32×64"]
    assert [row[0] for row in rows] == ["std 1", "std 3, the worst", *attention_inputs.EXTREMES]
    assert rows[0][1:] == ["2.00e-03", "1.000", "failed", "1.000"]
    assert rows[1][1:] == ["2.00e-03", "1.000", "failed", "1.040"]
    # The targets have the attention's rows without a figure where there are no results.
    measured = [row[-1] for row in rows_of(made_up, "targets") if row[1].startswith("attention")]
    assert set(measured) == {"not measured"}


def evaluated(made_up, change=None):
    loaded = {name: load(made_up, name) for name in (*FAMILIES, "host")}
    if change is not None:
        change(loaded)
    return targets.evaluate(loaded)


def test_targets_that_are_met_and_missed(made_up):
    rows = [row for row in evaluated(made_up) if row.measured is not None]
    *others, host = rows
    assert host.of == "1 of 2; the most: softmax"
    assert host.verdict == "missed by 8.3%"
    missed = [row for row in others if row.missed_by]
    assert all(row.verdict == "met" for row in others if row not in missed)
    assert not missed, "1.25 times the best peer and the copy's rate are enough for all others"


def test_target_names_the_furthest_behind(made_up):
    def slow(loaded):
        entry = targets.find(loaded["norm"]["workloads"], "rms_norm", (32760, 5120))
        entry["cold"]["over_best_peer"], entry["cold"]["of_large_copy"] = 0.9, 0.47

    over_peer, of_copy = evaluated(made_up, slow)[:2]
    assert (
        over_peer.of.endswith("the least: rms_norm 32760×5120")
        and over_peer.verdict == "missed by 10.0%"
    )
    count = len(
        [e for n in FAMILIES for e in load(made_up, n)["workloads"] if e["bytes"] >= 64_000_000]
    )
    assert (
        of_copy.of.startswith(f"{count - 1} of {count};") and of_copy.verdict == "missed by 50.0%"
    )


def test_targets_without_quack_or_without_compile(made_up):
    def no_quack(loaded):
        for entry in loaded["softmax"]["workloads"]:
            del entry["cold"]["over"]["quack"]

    (row,) = (row for row in evaluated(made_up, no_quack) if "QuACK" in row.what)
    assert "2.84 TB/s of another run" in row.what
    assert row.measured == pytest.approx(3 / 2.84) and row.verdict == "met"

    def no_compile(loaded):
        entry = targets.find(loaded["norm"]["workloads"], "layer_norm_modulate", (4608, 3072))
        del entry["cold"]["over"]["compiled"]
        entry["failed"]["compiled default"] = "it broke"

    with pytest.raises(ValueError, match=r"no torch.compile of layer_norm_modulate.*it broke"):
        evaluated(made_up, no_compile)


def test_operation_and_target_tables(made_up):
    (row,) = (row for row in rows_of(made_up, "norm") if row[:2] == ["rms_norm", "2×8064×2048"])
    assert row == [
        *("rms_norm", "2×8064×2048", "44.0 µs", "3.00 TB/s", "100%"),
        *("3.00×", "2.40×*", "2.00×", "1.25×"),
    ]
    (row,) = (row for row in rows_of(made_up, "targets") if row[0].startswith("host time"))
    assert row[2:] == ["at most 1.20×", "1.30×", "missed by 8.3%"]


def test_table_says_which_peer_failed(made_up, tmp_path):
    record = load(made_up, "norm")
    entry = record["workloads"][0]
    for name in ("liger", "compiled"):
        del entry["cold"]["over"][name]
    entry["failed"] = {"liger": "it broke", "compiled default": "it broke"}
    store(tmp_path, "norm", record)
    assert rows_of(tmp_path, "norm")[0][-4:] == ["3.00×", "failed", "failed", "1.25×"]


def test_plots_are_the_same_each_time(made_up, results):
    plots = render_plots.render(made_up)
    assert list(plots) == ["bandwidth.svg"]
    assert plots == render_plots.render(made_up)
    for label, *_ in render_plots.SERIES.values():
        assert f">{label}</text>" in plots["bandwidth.svg"]
    drawn = render_plots.render(results)["models.svg"]
    for entry in load(results, "models")["sizes"].values():
        speedups = [of["speedups"]["injected"]["eager"] for of in entry["weights"].values()]
        assert f">{min(speedups):.2f}×</text>" in drawn
    assert "the least of: random, peaked weights" in drawn


def test_an_operation_without_results_is_not_measured(made_up, tmp_path):
    """README shows it without a figure; the others are what they were."""
    result = load(made_up, "activation")
    rest = [entry for entry in result["workloads"] if entry["operation"] != "gated_silu"]
    for name in FAMILIES:
        store(tmp_path, name, load(made_up, name))
    assert "not measured" not in rendered(tmp_path, "summary_operations")
    rows = rows_of(tmp_path, "summary_operations")
    store(tmp_path, "activation", {**result, "workloads": rest})
    without = rows_of(tmp_path, "summary_operations")
    missing = ["`gated_silu`", "", "not measured", "", "", "", ""]
    assert missing in without
    assert [row for row in without if row != missing] == [r for r in rows if r[0] != missing[0]]


def test_a_family_without_results_is_not_measured(made_up, tmp_path):
    """The pages say so, and the others are what they were."""
    for name in (*FAMILIES, "host"):
        if name != "group_norm":
            store(tmp_path, name, load(made_up, name))
    assert "`python benchmarks/bench_group_norm.py` does" in rendered(tmp_path, "group_norm")
    with_all, without = (rows_of(folder, "summary_operations") for folder in (made_up, tmp_path))
    missing = ["`group_norm`", "", "not measured", "", "", "", ""]
    assert [row if row[0] != missing[0] else missing for row in with_all] == without
    assert {row[1] for row in rows_of(tmp_path, "targets")} >= {"softmax 8192×8192"}
    (tmp_path / "softmax" / "only.json").unlink()
    with pytest.raises(click.ClickException, match="bench_softmax.py fills it"):
        rendered(tmp_path, "summary_operations")


def test_broken_peer_is_named_and_not_compared(made_up, tmp_path):
    """One that takes more than five times as long as eager; its points are not drawn either."""
    result = load(made_up, "norm")
    for factor, entry in zip((5.1, 4.9), result["workloads"], strict=False):
        entry["cold"]["over"]["quack"] = factor * entry["cold"]["over"]["eager"]
    shown = [targets.is_broken(entry["cold"], "quack") for entry in result["workloads"]]
    assert shown == [True, *[False] * (len(shown) - 1)]
    for name in FAMILIES:
        store(tmp_path, name, result if name == "norm" else load(made_up, name))
    rows = [row for row in rows_of(tmp_path, "norm") if "warm" not in row[1]]
    assert [row[-1] for row in rows[:2]] == ["broken†", "14.70×"]
    assert "† more than 5 times slower than eager PyTorch" in rendered(tmp_path, "norm")
    assert "†" not in rendered(made_up, "norm")

    def points(results):
        return render_plots.render(results)["bandwidth.svg"].count("<use ")

    assert points(made_up) - points(tmp_path) == 1


def test_plots_agree_with_the_results():
    folder = CHECKOUT / "benchmarks" / "plots"
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    assert committed == render_plots.render(CHECKOUT / "benchmarks" / "results")

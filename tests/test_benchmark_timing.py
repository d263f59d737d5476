"""Figures that the benchmarks compute from samples, and results that they refuse to time."""

import itertools
import types
from collections import Counter

import click
import pytest
import torch
import torch._dynamo.testing

from benchmarks import models
from benchmarks.harness import comparison, kernel_times, peers, timing
from benchmarks.harness.comparison import Workload
from benchmarks.models import bench_block_timeline, bench_cuda_graphs
from benchmarks.models.ltx import LTX_VIDEO
from benchmarks.operations import (
    bench_activation,
    bench_attention,
    bench_gated_residual,
    bench_group_norm,
    bench_norm,
    bench_rope,
)

pytestmark = pytest.mark.usefixtures("_one_thread")
CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------
# Times


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_bias_TNT", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>", "gemm"),
        ("triton_tem_fused_addmm_gelu_4", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128", "attention"),
        ("triton_red_fused__scaled_dot_product_cudnn_attention_addmm_mul_3", "other"),
        ("triton_poi_fused_addmm_gelu_view_7", "other"),
        ("void h100_diffusers_kernels::row_norm_kernel<RmsNorm, Modulated>", "other"),
        ("void h100_diffusers_kernels::attention_kernel<64, __nv_bfloat16>", "attention"),
        ("void h100_diffusers_kernels::product_kernel<192, RoundedOutput<__half>>", "gemm"),
        ("triton_tem_fused_flex_attention_3", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, ...>", "convolution"),
        ("triton_tem_fused_convolution_2", "convolution"),
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
    with pytest.raises(RuntimeError, match="no kernel"):
        kernel_times.breakdown([{"name": "aten::add", "cat": "cpu_op", "dur": 1}], calls=1)


BLOCK = [
    ("elementwise", "others"),
    ("nvjet_q", "matrix_products"),
    ("void h100_diffusers_kernels::attention", "attention"),
    ("nvjet_o", "matrix_products"),
    ("void h100_diffusers_kernels::gated_residual", "ours"),
    *[("elementwise", "others")] * 3,
    ("Memcpy DtoD", "others"),
]


def forward_events(blocks, skipped=0):
    """Kernels of 10 µs, with a gap of 1 µs before each of the third block; events of the host among them."""
    names = ["embed", *["cos"] * 7, *[name for name, _ in BLOCK] * blocks][: -skipped or None]
    events, time = [], 1000.0
    for i, name in enumerate([*names, "layer_norm", "nvjet_out"]):
        time += 1.0 if 8 + 2 * len(BLOCK) < i < 8 + 3 * len(BLOCK) else 0.0
        category = "gpu_memcpy" if "Memcpy" in name else "kernel"
        events.append({"name": name, "cat": category, "ts": time, "dur": 10.0})
        events.append({"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": time, "dur": 1.0})
        time += 10.0
    return events


@pytest.mark.parametrize("skipped", [0, 1])
def test_kernels_of_a_block_in_the_middle(skipped):
    """Also where the last block lacks its last kernel. The trace need not be in the order of time."""
    events = forward_events(5 if skipped else 4, skipped)
    block = bench_block_timeline.middle_block(events[::-1])
    expected = [(kernel_times.short_name(name), kind) for name, kind in BLOCK]
    assert [(kernel["name"], kernel["class"]) for kernel in block] == expected
    times = [(kernel["start_us"], kernel["end_us"]) for kernel in block]
    assert times == [(11.0 * i, 11.0 * i + 10) for i in range(len(BLOCK))]


def test_idle_time_is_what_no_kernel_covers():
    intervals = [(10.0, 14.0), (0.0, 5.0), (3.0, 4.0), (12.0, 13.0), (20.0, 21.0)]
    assert kernel_times.idle(intervals) == pytest.approx(5.0 + 6.0)
    assert kernel_times.covered(intervals) == pytest.approx(5.0 + 4.0 + 1.0)


@pytest.mark.parametrize("names", ["a", "abc", "abcdef"])
def test_functions_take_turns_in_balanced_orders(names):
    """Each function follows each other equally often, and gets its own samples."""
    orders = list(itertools.islice(timing.balanced_orders(names), 2 * len(names)))
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert follows == dict.fromkeys(itertools.permutations(names, 2), 2)
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 2)
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in names}

    def measure(function, device):
        function()
        return len(calls)

    samples = timing.interleave(functions, 20, CPU, measure)
    for name, values in samples.items():
        assert values == [i for i, call in enumerate(calls, 1) if call == name]
        assert len(values) == 20


@pytest.mark.parametrize("late_samples", [0, 2, 100])
def test_sample_is_taken_again_where_the_host_was_late(monkeypatch, late_samples):
    slept, samples = [], iter(range(1000))
    event = types.SimpleNamespace(
        record=lambda: None,
        synchronize=lambda: None,
        query=lambda: next(samples) < late_samples,
        elapsed_time=lambda end: 0.004,
    )
    monkeypatch.setattr(timing.torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(timing.torch.cuda, "_sleep", slept.append, raising=False)
    if late_samples < 100:
        assert timing.Stopwatch._sample(lambda: None, lambda: None) == 4
        assert slept == [timing.HEAD_START_CYCLES << n for n in range(late_samples + 1)]
    else:
        with pytest.raises(RuntimeError, match="waits for the GPU"):
            timing.Stopwatch._sample(lambda: None, lambda: None)


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
    assert (result["change_s"], result["first_forward_s"]) == (0.5, 3)
    assert result["forwards_before"] == 2
    assert result["full_speed_s"] == pytest.approx(0.5 + 3 + 1.2 + 1.04)


@pytest.mark.parametrize(
    ("measure", "result", "end"),
    [
        (timing.host_microseconds, 250_000, ["clock"]),
        (timing.wall_milliseconds, 250, ["synchronize", "clock"]),
    ],
)
def test_host_time_is_without_waiting_and_wall_time_with_it(monkeypatch, measure, result, end):
    """The device is idle before the calls, and nothing waits for it between them."""
    order, clock = [], iter([10.0, 10.5])
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: order.append("clock") or next(clock))
    assert measure(lambda: order.append("call"), CPU, calls=2) == result
    assert order == ["synchronize", "clock", "call", "call", *end]


# ------------------------------------------------------------------------------------------------
# Rates


JOINT_PER_HEAD = bench_rope.PER_HEAD + bench_rope.JOINT
# A family, an operation, its shape and variant, and the bytes: weights, coordinates and frequencies are read
# once, and of joint buffers only the written rows count.
MOVED = [
    (bench_group_norm, "group_norm", (2, 64, 6, 5), bench_group_norm.CHANNELS_LAST, 15616),
    (bench_group_norm, "channel_rms_norm", (1, 96, 2, 6, 8), bench_group_norm.MODULATED, 37248),
    (bench_activation, "swiglu", (2, 6, 128), "first, beside", 2 * 6 * (128 + 64) * 2),
    (bench_gated_residual, "gated_residual_rms_norm_modulate", (2, 6, 128), "", 13824),
    (bench_rope, "qk_norm_rope", (2, 6, 128), bench_rope.COORDINATES, 12288 + 512 + 228),
    (bench_rope, "qk_norm_rope", (1, 6, 2, 64), JOINT_PER_HEAD, 9216 + 256 + 3072),
    (bench_rope, "rope", (2, 6, 2, 64), f"half{bench_rope.PAIR_TABLES}", 6144 + 1536),
]


@pytest.mark.parametrize(("module", "operation", "shape", "variant", "moved"), MOVED)
def test_bytes_are_those_that_must_move(kernel, device, module, operation, shape, variant, moved):
    case = module.FAMILY.build(Workload(operation, shape, variant), kernel, torch.device(device))
    results = getattr(kernel, operation)(*case.arguments, **case.options)
    assert comparison.moved_bytes(case, comparison.outputs(results)) == moved


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


def test_rates_of_attention():
    shape = (2, 8064, 128, 32, 64)
    samples = {"ours": [50.0, 50.0, 90.0], "cudnn": [75.0], "copy": [40.0]}
    moved = 2 * 2 * 2 * (8064 + 128) * 32 * 64
    result = bench_attention.rates(samples, shape, moved, {"wgmma": 900.0, "exp2": 4.0})
    flops = 4 * 2 * 8064 * 128 * 32 * 64
    assert result["teraflops_per_second"]["ours"] == pytest.approx(flops / 50e-6 / 1e12)
    assert result["over"] == {"cudnn": 1.5}
    assert result["terabytes_per_second"]["copy"] == pytest.approx(moved / 40e-6 / 1e12)
    # 4e12 exponentials per second, one per score, and 4 * 64 operations per score.
    assert result["bounds_teraflops_per_second"]["exp2"] == pytest.approx(1024.0)
    assert result["of_bounds"]["exp2"] == pytest.approx(flops / 50e-6 / 1024e12)
    case = bench_attention.build(Workload("attention", shape), None, torch.device("meta"))
    assert comparison.moved_bytes(case, [case.arguments[0]]) == moved


# ------------------------------------------------------------------------------------------------
# Wrong results


def measured(kernel, libraries, device, module=bench_norm, what=("rms_norm", "")):
    """One workload, compared with the peers in `libraries`."""
    device, (operation, variant) = torch.device(device), what
    workload = Workload(operation, (2, 6, 128), variant)
    case = module.FAMILY.build(workload, kernel, device)
    settings = comparison.Settings(device, 1, (), 1 << 10)
    stopwatch, copy = timing.Stopwatch(device), comparison.copy_of(1 << 10, device)
    return comparison.measure(workload, case, kernel, libraries, stopwatch, copy, settings)


def test_wrong_result_ends_the_run(device):
    wrong = types.SimpleNamespace(rms_norm=lambda x, weight: x)
    with pytest.raises(click.ClickException, match=r"rms_norm 2x6x128: .* from eager's"):
        measured(wrong, {}, device)
    # Eager's result in the same memory is not taken for this one.
    wrong = types.SimpleNamespace(gelu=lambda x, approximate, out: out)
    with pytest.raises(RuntimeError, match="an output or its reference is not finite"):
        measured(wrong, {}, device, bench_activation, ("gelu", "tanh, beside"))


def raises(*args):
    raise RuntimeError("no such kernel\nand a trace")


def test_peer_that_fails_is_recorded(kernel, device, capsys):
    def peer(run):
        return types.SimpleNamespace(rms_norm=lambda *args: peers.Call(lambda: run(*args)))

    libraries = {
        "good": peer(kernel.rms_norm),
        "wrong": peer(lambda x, weight: x),
        "broken": peer(raises),
        "other": object(),
        "declines": types.SimpleNamespace(rms_norm=lambda x, weight: None),
    }
    result = measured(kernel, libraries, device)
    assert result["failed"]["broken"] == "RuntimeError: no such kernel"
    assert "from eager's" in result["failed"]["wrong"] and len(result["failed"]) == 2
    assert set(result["cold"]["over"]) == {"eager", "good"}
    assert "rms_norm 2x6x128: broken failed" in capsys.readouterr().out


def plain_attention(q, k, v, key_bias=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if key_bias is None else key_bias[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def attention_peer(function, takes_bias=True):
    """A library with this attention."""

    def attention(*args, key_bias=None):
        if key_bias is not None and not takes_bias:
            return None
        return peers.Call(lambda: function(*args, key_bias))

    return types.SimpleNamespace(attention=attention)


def test_attention_beside_its_peers():
    """A peer that fails, one that takes no mask, and one that is wrong only on some inputs."""

    def no_large_scores(q, k, v, key_bias=None):
        is_large = q.float().std() > 20
        return plain_attention(q, k, torch.zeros_like(v) if is_large else v, key_bias)

    libraries = {
        "cudnn": attention_peer(no_large_scores),
        "flash": attention_peer(raises),
        "fa3": attention_peer(plain_attention, takes_bias=False),
    }
    ours, stopwatch = types.SimpleNamespace(attention=plain_attention), timing.Stopwatch(CPU)
    ceilings = {"wgmma": 900.0, "exp2": 4.0}
    settings = bench_attention.Settings(ours, libraries, stopwatch, ceilings, 1, CPU)
    kinds, masked = ("std 1", "large range", "std 3"), bench_attention.TINY_WORKLOADS[-1]
    entry = bench_attention.measure(masked, kinds, settings)
    assert entry["declined"] == ["fa3"] and list(entry["inputs"]) == list(kinds)
    for kind, of_kind in entry["inputs"].items():
        compared = [] if kind == "large range" else ["cudnn"]
        assert of_kind["failed"]["flash"] == "RuntimeError: no such kernel"
        assert ("cudnn" in of_kind["failed"]) == (kind == "large range")
        assert list(of_kind["cold"]["over"]) == list(of_kind["error_over"]) == compared
        assert of_kind["cold"]["bounds_teraflops_per_second"] == {"wgmma": 900.0, "exp2": 1024.0}
    plain = bench_attention.measure(bench_attention.TINY_WORKLOADS[1], ("std 1",), settings)
    assert "fa3" in plain["inputs"]["std 1"]["cold"]["over"]


# ------------------------------------------------------------------------------------------------
# CUDA graphs


def measured_graphs(modes=("eager", "injected", models.GRAPHS), is_replayed=True, error=0.0):
    """With a stand-in for the kernels: it counts calls as replayed ones, and may change the output."""
    entry = types.SimpleNamespace(captured=0, replayed=0, uncaptured={"first": 0, "a hook": 0})

    def count(module, args, output):
        if entry.uncaptured["first"] == 0:
            entry.uncaptured["first"] = 1
        elif not is_replayed:
            entry.uncaptured["a hook"] += 1
        elif entry.captured == 0:
            entry.captured = 1
        else:
            entry.replayed += 1
            return (output[0] + error,)
        return output

    def inject_kernels(model, cuda_graphs=False):
        if cuda_graphs:
            model.register_forward_hook(count)
        return types.SimpleNamespace(cuda_graphs=[entry] if cuda_graphs else [])

    kernel = types.SimpleNamespace(inject_kernels=inject_kernels)
    model = LTX_VIDEO.transformer(CPU, torch.float32, tiny=True)
    arguments = LTX_VIDEO.inputs(model, LTX_VIDEO.tiny_sizes[0], CPU, torch.float32)
    settings = bench_cuda_graphs.Settings(kernel, CPU, torch.float32, ("peaked",), 2, 1, True)
    with torch.no_grad():
        return bench_cuda_graphs.measure_forward(model, arguments, modes, ("peaked",), settings)


def test_captured_forwards_are_timed(monkeypatch):
    monkeypatch.setattr(bench_cuda_graphs, "MOST_CALLS", 3)
    of_weights = measured_graphs()["weights"]["peaked"]
    counts = of_weights["modes"][models.GRAPHS]["graphs"]
    assert counts["captured"] == 1 and counts["replayed"] >= 2 * (of_weights["calls"] + 1)


@pytest.mark.parametrize("modes", [("eager", "injected", models.GRAPHS), (models.GRAPHS,)])
def test_captured_forward_with_other_bits_is_not_timed(modes):
    with pytest.raises(RuntimeError, match="values of a captured forward differ from"):
        measured_graphs(modes, error=1e-6)


def test_forward_that_is_not_replayed_is_not_timed_as_one(monkeypatch):
    monkeypatch.setattr(bench_cuda_graphs, "MOST_CALLS", 3)
    with pytest.raises(RuntimeError, match="0 of .* forwards were replayed .*'a hook'"):
        measured_graphs(is_replayed=False)

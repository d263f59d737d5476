"""The benchmarks of CUDA graphs: what they refuse to time, a tiny run, and what is made of the results."""

import json
import sys
import types
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT / "benchmarks"), str(CHECKOUT / "tools")]

import bench_cuda_graphs as benchmark  # noqa: E402
import bench_cuda_graphs_memory as of_memory  # noqa: E402
import bench_host_forward  # noqa: E402
import bench_models  # noqa: E402
import bench_pipeline  # noqa: E402
import cuda_graphs  # noqa: E402
import ltx  # noqa: E402
import models  # noqa: E402
import targets  # noqa: E402
import timing  # noqa: E402

import compare_results  # noqa: E402
import render_docs  # noqa: E402
import render_plots  # noqa: E402
from checks import one_thread  # noqa: E402
from test_benchmarks import CPU, ENVIRONMENT, load, rendered, rows_of, store  # noqa: E402

LEFT_OUT = "Not measured: injected+graphs, as there are no CUDA graphs on a CPU."


def test_modes_without_cuda_graphs_on_a_cpu():
    modes = ["eager", models.REDUCE_OVERHEAD, "injected", models.GRAPHS]
    assert models.possible_modes(modes, torch.device("cuda")) == (modes, None)
    assert models.possible_modes(["eager"], CPU) == (["eager"], None)
    possible, sentence = models.possible_modes(modes, CPU)
    assert possible == ["eager", "injected"]
    assert sentence.startswith("Not measured: compiled-reduce-overhead and injected+graphs, as ")
    with pytest.raises(ValueError, match="^Not measured: injected\\+graphs, as there are no CUDA"):
        models.possible_modes([models.GRAPHS], CPU)


@pytest.mark.parametrize(
    "module",
    [bench_models, bench_host_forward, bench_pipeline, benchmark, of_memory],
    ids=lambda module: module.__name__,
)
def test_mode_says_that_a_cpu_has_no_graphs(module):
    arguments = ["--device", "cpu"]
    if module is not of_memory:
        arguments += ["--tiny", "--modes", models.GRAPHS]
    run = CliRunner().invoke(module.main, arguments)
    assert run.exit_code == 2 and run.output.splitlines()[-1] == f"Error: {LEFT_OUT}"


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("injected", {"attention": True}),
        (models.NO_ATTENTION, {"attention": False}),
        (models.GRAPHS, {"attention": True, "cuda_graphs": True}),
        ("injected+compiled", {"attention": True}),
    ],
)
def test_injection_of_a_mode(mode, given):
    kernel = types.SimpleNamespace(inject_kernels=lambda model, **options: (model, options))
    assert models.inject(kernel, "a model", mode) == ("a model", given)


def report_of(*entries):
    names = ("captured", "replayed", "uncaptured")
    of = [types.SimpleNamespace(**dict(zip(names, entry, strict=True))) for entry in entries]
    return types.SimpleNamespace(cuda_graphs=of)


def test_calls_that_were_not_replayed():
    report = report_of((1, 7, {"first": 1}), (2, 3, {"first": 2, "a hook": 5}))
    counts = cuda_graphs.counts(report)
    assert counts == {"captured": 3, "replayed": 10, "uncaptured": {"first": 3, "a hook": 5}}
    assert cuda_graphs.check_replayed(report, 10) == counts
    assert cuda_graphs.check_replayed(report, 6, {"replayed": 4}) == counts
    with pytest.raises(RuntimeError, match="6 of 7 forwards were replayed .*'a hook': 5"):
        cuda_graphs.check_replayed(report, 7, {"replayed": 4})


def test_bits_of_a_captured_forward():
    plain = torch.tensor([1.0, -0.0, 3.0, float("nan")], dtype=torch.bfloat16)
    cuda_graphs.check_bits(plain.clone(), plain)
    cuda_graphs.check_bits(plain[:2].expand(2, 2), plain[:2].repeat(2, 1))
    for index, value in ((0, 1.0078125), (1, 0.0)):
        other = plain.clone()
        other[index] = value
        with pytest.raises(RuntimeError, match="values of a captured forward are not those of"):
            cuda_graphs.check_bits(other, plain)
    for other in (plain[:3], plain.float()):
        with pytest.raises(RuntimeError, match="a captured forward gave"):
            cuda_graphs.check_bits(other, plain)


def test_wall_time_is_of_calls_that_nothing_waits_between(monkeypatch):
    order, clock = [], iter([10.0, 10.5])
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: order.append("clock") or next(clock))
    assert timing.wall_milliseconds(lambda: order.append("call"), CPU, calls=2) == 250
    assert order == ["synchronize", "clock", "call", "call", "synchronize", "clock"]


class Replaying:
    """In place of the kernels, on a CPU: counts calls as if they were replayed, and may change the output."""

    def __init__(self, is_replayed=True, error=0.0):
        self.is_replayed, self.error = is_replayed, error

    def inject_kernels(self, model, attention, cuda_graphs=False):
        entry = types.SimpleNamespace(captured=0, replayed=0, uncaptured={"first": 0, "a hook": 0})

        def count(module, args, output):
            if entry.uncaptured["first"] == 0:
                entry.uncaptured["first"] = 1
            elif not self.is_replayed:
                entry.uncaptured["a hook"] += 1
            elif entry.captured == 0:
                entry.captured = 1
            else:
                entry.replayed += 1
                return (output[0] + self.error,)
            return output

        if cuda_graphs:
            model.register_forward_hook(count)
        return types.SimpleNamespace(cuda_graphs=[entry] if cuda_graphs else [])


def measured(kernel, modes=("eager", "injected", models.GRAPHS), rounds=2):
    model = ltx.transformer(CPU, torch.float32, tiny=True)
    arguments = ltx.inputs(model, ltx.TINY_SIZES[0], CPU, torch.float32)
    weights = ("peaked", "random")
    settings = benchmark.Settings(kernel, CPU, torch.float32, weights, rounds, 1, True)
    with one_thread(), torch.no_grad():
        return benchmark.measure_forward(model, arguments, modes, weights, settings)


def test_measured_forward():
    result = measured(Replaying())
    assert list(result["weights"]) == ["peaked", "random"]
    for of_weights in result["weights"].values():
        assert list(of_weights["modes"]) == ["eager", "injected", models.GRAPHS]
        graphs, eager = of_weights["modes"][models.GRAPHS], of_weights["modes"]["eager"]
        assert graphs["graphs"]["captured"] == 1
        assert graphs["graphs"]["replayed"] >= 2 * (of_weights["calls"] + 1)
        over = eager["wall_ms"]["median"] / graphs["wall_ms"]["median"]
        assert of_weights["speedups"][models.GRAPHS]["eager"] == pytest.approx(over)
        share = graphs["host_ms"]["median"] / eager["host_ms"]["median"]
        assert of_weights["host_over_eager"][models.GRAPHS] == pytest.approx(share)
        assert benchmark.LEAST_CALLS <= of_weights["calls"] <= benchmark.MOST_CALLS
    assert set(result["first_calls"]) == {"eager", "injected", models.GRAPHS}
    first = result["first_calls"][models.GRAPHS]
    assert first["capturing_call_ms"]["samples"] == benchmark.CAPTURES
    plain = sorted(result["first_calls"]["injected"]["calls_ms"][1:])[2]
    assert first["capturing_over_plain"] == first["capturing_call_ms"]["median"] / plain
    for entry in result["first_calls"].values():
        assert len(entry["calls_ms"]) == benchmark.FIRST_CALLS and min(entry["calls_ms"]) > 0


@pytest.mark.parametrize("modes", [("eager", "injected", models.GRAPHS), (models.GRAPHS,)])
def test_captured_forward_with_other_bits_is_not_timed(modes):
    with pytest.raises(RuntimeError, match="values of a captured forward are not those of"):
        measured(Replaying(error=1e-6), modes)


def test_graphs_that_torch_compile_leaves_out_are_recorded(monkeypatch):
    def compile_(model, mode):
        if mode == models.REDUCE_OVERHEAD:
            torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] += skips

    monkeypatch.setattr(models, "compile_as", compile_)
    model = ltx.transformer(CPU, torch.float32, tiny=True)
    arguments = ltx.inputs(model, ltx.TINY_SIZES[0], CPU, torch.float32)
    settings = benchmark.Settings(None, CPU, torch.float32, ("peaked",), 1, 1, True)
    for skips in (0, 2):
        subjects = {}
        for mode in ("eager", models.REDUCE_OVERHEAD):
            with one_thread(), torch.no_grad():
                subjects[mode] = benchmark.start(mode, model, arguments, settings)
        entries = benchmark.first_calls(subjects, model, arguments, settings)
        assert entries[models.REDUCE_OVERHEAD]["graphs_skipped"] == skips
        assert "graphs_skipped" not in entries["eager"]


def test_forward_that_is_not_replayed_is_not_timed_as_one():
    with pytest.raises(RuntimeError, match="0 of .* forwards were replayed .*'a hook'"):
        measured(Replaying(is_replayed=False))


def test_tiny_run(device, tmp_path):
    """On a GPU with graphs; on a CPU a line says that there are none."""
    output = tmp_path / "cuda_graphs" / "only.json"
    arguments = ["--device", device, "--tiny", "--model", "ltx,sdxl", "--rounds", "1"]
    arguments += ["--modes", f"eager,injected,{models.GRAPHS}", "--output", str(output)]
    with one_thread():
        run = CliRunner().invoke(benchmark.main, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    is_gpu = device == "cuda"
    assert (LEFT_OUT in run.output) != is_gpu
    result = load(tmp_path, "cuda_graphs")
    kinds = [(f["name"], f["input"], f["size"]) for f in result["graph_forwards"]]
    assert kinds == [
        *[("models", "published", size) for size in ("9x64x96", "17x64x96")],
        ("models", "small", "1x256x256"),
        *[("sdxl", "published", "64x96"), ("sdxl", "small", "128x128")],
    ]
    for forward in result["graph_forwards"]:
        is_small = forward["input"] == "small"
        assert list(forward["weights"]) == (["peaked"] if is_small else ["peaked", "random"])
        for of_weights in forward["weights"].values():
            expected = ["eager", "injected", models.GRAPHS]
            assert list(of_weights["modes"]) == (expected if is_gpu else expected[:2])
            if is_gpu:
                graphs = of_weights["modes"][models.GRAPHS]
                assert 0 < graphs["covered_ms"] < graphs["wall_ms"]["median"] * 1.05
                assert graphs["launches"] > 1, "the kernels are counted, not the graph"
    assert "tiny Stable Diffusion XL" in rendered(tmp_path, "cuda_graphs")


def memory_samples(*reserved):
    """Of every 100th call."""
    peaks = [max(reserved[: i + 1]) for i in range(len(reserved))]
    return [
        {"calls": 100 * i, "reserved": r, "peak_reserved": peak, "allocated": 0}
        for i, (r, peak) in enumerate(zip(reserved, peaks, strict=True), 1)
    ]


def test_memory_over_calls():
    assert of_memory.summarize(memory_samples(10, 30, 80, 50)) == {
        "peak_first": 30,
        "peak": 80,
        "end": 50,
    }
    called = []
    samples = of_memory.follow(called.append, list(range(50)), lambda: {"reserved": len(called)})
    assert called == list(range(50))
    assert [(s["calls"], s["reserved"]) for s in samples] == [(20, 20), (40, 40), (50, 50)]


def memory_result(end=120, captured=500):
    """Of 20 bytes without graphs and 8 graphs of at most 15: 140 are explained."""
    with_graphs, without = memory_samples(90, 100, end), memory_samples(15, 18, 20)
    return {
        "environment": ENVIRONMENT,
        "model": "a model",
        "number_of_calls": 300,
        "first_calls": 200,
        "shapes": ["a"] * 45,
        "limit": 8,
        "largest_graph": 15,
        "graphs": {"captured": captured, "replayed": 900, "uncaptured": {}},
        "without": {**of_memory.summarize(without), "samples": without},
        "with": {**of_memory.summarize(with_graphs), "samples": with_graphs},
        "explained": of_memory.explained(of_memory.summarize(without), 15, 8),
    }


def test_memory_that_the_limit_does_not_explain():
    assert memory_result()["explained"] == 140
    of_memory.check(memory_result(end=140), limit=8)
    with pytest.raises(click.ClickException, match="are reserved at the end, where"):
        of_memory.check(memory_result(end=141), limit=8)
    with pytest.raises(click.ClickException, match="no graph was given up"):
        of_memory.check(memory_result(captured=8), limit=8)


def made_up_forward(
    name="models", size="49x512x768", kind="published", weights="peaked", graphs=30.0, **others
):
    """Eager takes 60 ms and 30 of the host, its kernels 29 ms; the capturing call two plain ones."""
    walls = {"eager": 60.0, **others, "injected": 40.0, models.GRAPHS: graphs}
    hosts = {mode: 0.5 * wall for mode, wall in walls.items()}
    modes = {
        mode: {
            "wall_ms": {"median": wall, "spread": 0.01},
            "host_ms": {"median": hosts[mode]},
            "busy_ms": 29.0,
            "covered_ms": 28.0,
            "wall_over_busy": wall / 29.0,
            "wall_over_covered": wall / 28.0,
        }
        for mode, wall in walls.items()
    }
    memory = {"allocated": 1 << 20, "reserved": 2 << 20, "peak_reserved": 3 << 20}
    more = {key: 2 * value for key, value in memory.items()}
    first = {"median": 50.0}
    return {
        "name": name,
        "model": f"the {name}",
        "input": kind,
        "size": size,
        "batch": 2,
        "tokens": 64,
        "text_tokens": 128,
        "first_calls": {
            "injected": {"memory": memory},
            models.GRAPHS: {
                "memory": more,
                "first_call_ms": first,
                "capturing_call_ms": {"median": 80.0},
                "capturing_over_plain": 2.0,
            },
        },
        "weights": {
            weights: {
                "modes": modes,
                "speedups": timing.speedups(walls),
                "host_over_eager": {mode: host / hosts["eager"] for mode, host in hosts.items()},
            }
        },
    }


def result_of(*forwards, date="2026-11-23 10:00:00 UTC", device="NVIDIA H200"):
    environment = {**ENVIRONMENT, "date": date, "device": device}
    return {
        "environment": environment,
        "processor": "a processor",
        "graph_forwards": list(forwards),
    }


def test_newest_of_each_forward_is_shown(tmp_path):
    def keep(name, result):
        (tmp_path / "cuda_graphs").mkdir(exist_ok=True)
        (tmp_path / "cuda_graphs" / f"{name}.json").write_text(json.dumps(result))

    assert targets.gathered_forwards(tmp_path) is None
    old, new = made_up_forward(graphs=35.0), made_up_forward(graphs=30.0)
    keep("a", result_of(old, made_up_forward("sdxl", "1024x1024")))
    keep("b", result_of(new, date="2026-11-23 11:00:00 UTC"))
    keep("c", result_of(old, date="2026-11-23 12:00:00 UTC", device="an Arm CPU"))
    gathered = targets.gathered_forwards(tmp_path)
    assert gathered["graph_forwards"] == [new, made_up_forward("sdxl", "1024x1024")]
    assert [run["environment"]["date"][11:13] for run in gathered["runs"]] == ["11", "10"]
    keep("d", result_of(old, date="2026-11-21 12:00:00 UTC", device="NVIDIA H100 80GB HBM3"))
    assert targets.gathered_forwards(tmp_path)["graph_forwards"] == [old], "an H100's come first"


def test_results_are_compared():
    rows = compare_results.read(result_of(made_up_forward(**{models.REDUCE_OVERHEAD: 42.0})))
    name = "the models 49x512x768 peaked, injected+graphs"
    assert rows[name, "eager"].value == 2.0 and rows[name, models.REDUCE_OVERHEAD].value == 1.4
    its_kernels = rows[name, "its kernels"]
    assert its_kernels.value == 30 / 29 and not its_kernels.is_higher_better
    assert all(ratio.spread > 0 for ratio in rows.values())
    rows = compare_results.read(memory_result(end=70))
    assert [ratio.value for ratio in rows.values()] == [100 / 140, 100 / 140, 70 / 140]


def test_aims_of_graphs():
    rows = targets.graphs(None, None)
    assert {row.verdict for row in rows} == {"not measured"}
    assert [row.aim for row in rows] == [1.90, 1.20, 3.0, 1.10, 3.0, 1.10, 1.15, 1.03, 3.0, 1.95]
    assert {targets.GRAPHS, targets.REDUCE_OVERHEAD} <= set(models.MODES)
    for name, size, *_ in targets.GRAPH_FORWARDS:
        (published,) = (p for p in benchmark.PUBLISHED_SIZES if name == p.RESULT)
        assert size in map(str, benchmark.PUBLISHED_SIZES[published])
    assert targets.GRAPH_PIPELINE in bench_pipeline.DEFAULT_VIDEOS.split(",")

    forwards = [
        made_up_forward(**{"compiled": 38.0, models.REGIONAL: 33.0}),
        made_up_forward("sdxl", "1024x1024", graphs=32.0, **{models.REDUCE_OVERHEAD: 40.0}),
        made_up_forward("flux", "128x128", "small", graphs=29.0),
    ]
    video = {"modes": {}, "speedups": {models.GRAPHS: {"eager": 2.0}}}
    pipeline = {"videos": {"49x512x704:30": video}}
    rows = targets.graphs({"graph_forwards": forwards}, pipeline)
    eager, compiled, xl_eager, xl_reduced, *last, flux_reduced, busy, capture, of_pipeline = rows
    assert (eager.measured, eager.verdict) == (2.0, "met")
    assert (compiled.measured, compiled.verdict) == (1.1, "missed by 8.3%"), "over the faster one"
    assert (xl_eager.measured, xl_eager.verdict) == (1.875, "missed by 37.5%")
    assert (xl_reduced.measured, xl_reduced.verdict) == (1.25, "met")
    assert {row.verdict for row in (*last, flux_reduced)} == {"not measured"}
    assert busy.of.startswith("1 of 13; the most: Stable Diffusion XL 1024×1024; 10 not measured")
    assert busy.measured == pytest.approx(32 / 29) and capture.verdict == "met where measured"
    assert of_pipeline.verdict == "met"


def test_tables_and_plot(tmp_path):
    for name in ("cuda_graphs", "cuda_graphs_small", "cuda_graphs_first_calls", "summary_graphs"):
        assert "`python benchmarks/bench_cuda_graphs.py` does" in rendered(tmp_path, name)
    assert "cuda_graphs.svg" not in render_plots.render(tmp_path)
    forwards = [
        made_up_forward("flux", "128x128", "small"),
        made_up_forward(**{models.REGIONAL: 45.0, models.REDUCE_OVERHEAD: 42.0}),
    ]
    store(tmp_path, "cuda_graphs", result_of(*forwards))
    rows = rows_of(tmp_path, "cuda_graphs")
    title = "the models, 49 frames 512×768"
    assert [row[:3] for row in rows] == [
        [title, "peaked", mode]
        for mode in (
            *("eager", "torch.compile, block by block", "torch.compile, reduce-overhead"),
            *("injected", "injected with CUDA graphs"),
        )
    ]
    ratios = ["2.00×", "1.50×", "1.40×"]
    times = ["29.00 ms", "1.03×", "1.07×", "15.00 ms", "0.50×"]
    assert rows[-1][3:] == ["30.00 ms", *ratios, *times]
    (row,) = rows_of(tmp_path, "cuda_graphs_small")
    assert row == [
        "the flux, 128×128: 2×(64 + 128)",
        *("60.00 ms", "40.00 ms", "30.00 ms", "30.00 ms", "20.00 ms", "15.00 ms"),
        *("29.00 ms", "1.03×", "1.07×"),
    ]
    memory = ["1 MiB", "2 MiB", "2 MiB", "4 MiB", "3 MiB", "6 MiB"]
    assert rows_of(tmp_path, "cuda_graphs_first_calls") == [
        [title, "50.00 ms", "80.00 ms", "2.00×", *memory],
        ["the flux, 128×128", "50.00 ms", "80.00 ms", "2.00×", *memory],
    ]
    (row,) = rows_of(tmp_path, "summary_graphs")
    walls = ["60.00 ms", "45.00 ms", "42.00 ms", "40.00 ms", "30.00 ms"]
    assert row == [title, *walls, "2.00×", "1.40×"]
    text = "<!-- figure: graphs_over_eager --><!-- end figure -->"
    assert ">2.00<" in render_docs.render(text, tmp_path)
    with pytest.raises(click.ClickException, match="bench_cuda_graphs.py measures it"):
        render_docs.render(text, tmp_path / "nothing")
    drawn = render_plots.render(tmp_path)["cuda_graphs.svg"]
    for speedup in ("1.33", "1.43", "1.50", "2.00"):
        assert f">{speedup}×</text>" in drawn

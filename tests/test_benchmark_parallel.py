"""bench_parallel.py: tiny runs of all parts and of modelled ranks, its modes, and the tables."""

import functools
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from click.testing import CliRunner
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import timing
from benchmarks.harness.ranks import Mode, Ranks, degrees_up_to
from benchmarks.models import bench_parallel, modelled_link, parallel_workloads
from benchmarks.models.bench_parallel import Run
from benchmarks.models.modelled_link import Link
from benchmarks.models.parallel_workloads import DECODINGS, STEPS, WHOLE_PIPELINES, Prepared
from benchmarks.operations import bench_attention_int8, bench_attention_lse

import compare_results
from benchmark_results import ENVIRONMENT, load, rendered, rows_of, store
from conftest import CHECKOUT
from processes import run
from ranks import in_ranks

pytestmark = pytest.mark.usefixtures("_one_thread")
CPU = torch.device("cpu")


def check_entry(entry, degree):
    """What an entry has of eager and injected Ulysses of this degree."""
    modes = entry["modes"]
    assert list(entry["blocks"].values()) == [1] * len(entry["blocks"])
    one, eager, injected = (
        modes[name] for name in ("injected", f"eager+ulysses{degree}", f"injected+ulysses{degree}")
    )
    assert eager["ulysses"] == injected["ulysses"] == degree and eager["over_eager"] == 1
    assert one["calls"]["on_kernels"] > 0 and not one["calls"]["fell_back"]
    for measured in (eager, injected):
        whole = measured.get("whole_ms", measured["ms"]["median"])
        assert measured["one_gpu"] == "injected"
        assert measured["speedup"] == pytest.approx(one["ms"]["median"] / whole)
        assert measured["of_linear"] == measured["speedup"] / degree
    ratio = eager["ms"]["median"] / injected["ms"]["median"]
    assert injected["over_eager"] == pytest.approx(ratio)


def check_shared(kernel, function, entry, mode, distance):
    """The outputs are those of one process. A mode whose function is missing is recorded as failed."""
    if not hasattr(kernel, function):
        assert list(entry["failed"]) == [mode] and function in entry["failed"][mode]
        return
    assert not entry["failed"]
    assert entry["modes"][mode]["distance_from_one_gpu"] <= distance


@pytest.mark.slow
def test_two_processes(kernel, device, tmp_path):
    """A step, a pipeline and decoders."""
    if device != "cpu":
        pytest.skip("it needs a build for CPUs")
    process = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("benchmarks/models/bench_parallel.py", "--device", "cpu", "--tiny"),
        *("--models", "wan,flux", "--blocks", "1", "--rounds", "1"),
        *("--output", tmp_path / "parallel.json"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=CHECKOUT,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    result = load(tmp_path, "parallel")
    assert result["gpus"] == 2 and "failed" not in result
    assert result["environment"]["command"].startswith("torchrun --standalone --nproc-per-node 2 b")
    measured = {(entry["part"], entry["name"]): entry for entry in result["parallel"]}
    names = ("step wan", "decode wan", "step flux", "pipeline flux", "decode flux")
    assert list(measured) == [tuple(name.split()) for name in names]
    wan = measured["step", "wan"]
    assert (wan["model"], wan["degrees"], wan["tokens"]) == ("tiny Wan 2.1", [2], 48)
    assert (wan["forwards"], measured["step", "flux"]["forwards"]) == (2, 1)
    check_entry(wan, 2)
    check_entry(measured["step", "flux"], 2)
    assert wan["modes"]["eager+ulysses2"]["distance_from_one_gpu"] < 0.02
    assert wan["modes"]["injected+ulysses2"]["distance_from_one_gpu"] < 0.02
    assert "distance_from_one_gpu" not in wan["modes"]["eager"]
    check_shared(kernel, "enable_guidance_parallelism", wan, "injected+guidance2", 0.02)
    pipeline = measured["pipeline", "flux"]["modes"]
    assert list(pipeline) == ["injected", "injected+ulysses2"]
    assert pipeline["injected+ulysses2"]["distance_from_one_gpu"] < 0.02
    for name in ("wan", "flux"):
        decode = measured["decode", name]
        assert list(decode["modes"])[:2] == ["injected", "tiled"]
        check_shared(kernel, "enable_tile_parallelism", decode, "tiled+tiles2", 0)
    assert [row[:2] for row in rows_of(tmp_path, "parallel")][:2] == [
        ["tiny Wan 2.1, 1 of 2 blocks, 5 frames 64×96", "one GPU"],
        ["tiny Wan 2.1, 1 of 2 blocks, 5 frames 64×96", "Ulysses 2"],
    ]
    assert len(rows_of(tmp_path, "parallel_pipelines")) == 2
    assert len(rows_of(tmp_path, "parallel_decoders")) >= 4


def modelled(device, path, *arguments):
    options = ["--modelled", "--device", device, "--tiny", "--blocks", "1", "--rounds", "1"]
    result = CliRunner().invoke(
        bench_parallel.main, [*options, "--output", str(path), *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_modelled_ranks(kernel, device, tmp_path):
    """Two heads cannot be shared by four ranks: these modes are recorded as failed, the others run."""
    path = tmp_path / "parallel_modelled.json"
    result = modelled(device, path, "--models", "flux_2048", "--degrees", "2,4")
    (entry,) = result["parallel"]
    check_entry(entry, 2)
    assert entry["degrees"] == [2, 4] and "eager+ulysses4" in entry["failed"]
    eager, injected = (entry["modes"][f"{kind}+ulysses2"] for kind in ("eager", "injected"))
    # Query, key, value and result of two attentions, of which half goes to the other rank; and the output.
    tokens, head_dim = (24 + 512) // 2, 128
    sent = 2 * 4 * (tokens * 2 * head_dim) * 2 // 2 + 12 * 16 * 2
    assert eager["sent_bytes"] == sent and injected["sent_bytes"] > 0
    assert eager["collectives"] == {"all_to_all_single": 8, "all_gather_tensor": 1}
    for measured in (eager, injected):
        added = measured["whole_ms"] - measured["ms"]["median"]
        assert added == pytest.approx(measured["sent_bytes"] / 370e6, rel=1e-3)
    assert "sent_bytes" not in entry["modes"]["injected"]
    if device == "cuda":
        assert eager["copies"]["launches"] > entry["modes"]["eager"]["copies"]["launches"]
    assert not dist.is_initialized()
    store(tmp_path, "parallel/modelled", result)
    places = [row[1] for row in rows_of(tmp_path, "parallel_modelled")]
    assert places[:2] == ["one GPU", "Ulysses 2"]


def test_how_it_is_started(monkeypatch):
    def usage(*arguments):
        result = CliRunner().invoke(bench_parallel.main, [*arguments, "--device", "cpu"])
        assert result.exit_code == 2
        return result.output

    assert "start it by torchrun" in usage()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it by torchrun" in usage("--modelled")
    assert "at least 2" in usage("--degrees", "1,2")
    assert "got 'decoder'" in usage("--only", "step,decoder")


def test_published_sizes_are_divisible():
    """By as many ranks as there may be; LTX-Video's of 257 frames by 8 with a latent frame less."""
    for step in STEPS:
        text_tokens = step.text_tokens or step.published.text_tokens
        assert text_tokens % 8 == 0
        smaller = {d: str(parallel_workloads.divisible(step.size, d)) for d in (2, 4, 8)}
        if step.name == "ltx_257":
            assert smaller == {2: "257x704x1216", 4: "257x704x1216", 8: "249x704x1216"}
        else:
            assert set(smaller.values()) == {str(step.size)}
    with pytest.raises(ValueError, match="no smaller size"):
        parallel_workloads.divisible(parallel_workloads.LTX_VIDEO.tiny_sizes[0], 5)


# ------------------------------------------------------------------------------------------------
# Modes


def run_on(device, degrees=(2, 4), **changes):
    options = {"with_rings": False, "entries": [], "save": lambda: None, "rounds": 1, **changes}
    ranks = options.pop("ranks", None) or Ranks(torch.device(device))
    return Run(None, ranks, degrees, torch.bfloat16, False, None, **options)


def names_of(modes):
    return [str(mode) for mode in modes]


def test_modes_of_steps():
    of_name = {step.name: step for step in STEPS}
    on_gpus = run_on("cuda")

    def modes(name, run=on_gpus):
        return names_of(of_name[name].modes(run, run.degrees))

    kinds = ["eager", "injected", "graphs"]
    assert modes("flux") == [f"{k}{s}" for s in ("", "+ulysses2", "+ulysses4") for k in kinds]
    assert modes("flux_fp8") == [mode for mode in modes("flux") if "eager" not in mode]
    of_two = [f"{k}+{s}" for k in kinds[1:] for s in ("ulysses2", "guidance2")]
    of_four = [f"{k}+{s}" for k in kinds[1:] for s in ("ulysses4", "guidance2+ulysses2")]
    assert set(modes("wan")) == {*modes("flux"), *of_two, *of_four}
    assert modes("ltx") == [*kinds, *of_two, *of_four]
    # Four ranks cannot share 38 heads.
    assert modes("sd3") == [mode for mode in modes("ltx") if "ulysses4" not in mode]
    with_rings = modes("flux", run_on("cuda", with_rings=True))
    rings = {"injected+ring2", "injected+ring2+ulysses2", "injected+ring4"}
    assert set(with_rings) - set(modes("flux")) == rings
    modelled = run_on("cuda", ranks=Ranks(CPU, is_modelled=True))
    assert not [mode for mode in modes("wan", modelled) if "graphs" in mode or "guidance" in mode]


def test_modes_of_pipelines_and_decoders():
    pipelines = {whole.name: names_of(whole.modes(run_on("cuda"))) for whole in WHOLE_PIPELINES}
    guided = ["graphs", "graphs+guidance2", "graphs+guidance2+ulysses2"]
    assert pipelines["flux"] == ["graphs", "graphs+ulysses2", "graphs+ulysses4"]
    assert pipelines["qwenimage"] == pipelines["sd3"] == guided
    assert names_of(DECODINGS[0].modes(run_on("cuda"))) == [
        *("injected", "tiled", "tiled+tiles2", "tiled+tiles4"),
        *("default-tiles", "default-tiles+tiles2", "default-tiles+tiles4"),
    ]


def test_numbers_of_gpus():
    assert [degrees_up_to(count) for count in (2, 3, 4, 6, 8)] == [
        *([2], [3], [2, 4], [2, 6], [2, 4, 8])
    ]


@pytest.mark.parametrize("replayed", [False, True])
def test_graphs_must_be_replayed(replayed):
    """The time of forwards without a replay would be another mode's."""
    counts = SimpleNamespace(captured=1, replayed=0, uncaptured={"why not": 1})
    report = SimpleNamespace(calls=[], cuda_graphs=[counts])

    def forward(mode):
        counts.replayed += replayed and mode.kind == "graphs"
        return torch.ones(2)

    def prepare(mode):
        return Prepared(functools.partial(forward, mode), report)

    entry = {"modes": {}, "failed": {}}
    run = run_on("cpu", ranks=Ranks(CPU, is_modelled=True))
    modes = [Mode("injected"), Mode("graphs")]
    bench_parallel.measure(run, modes, prepare, rounds=2, warm_up_rounds=1, in_a_row=1, entry=entry)
    assert list(entry["modes"]) == ["injected", *["graphs"] * replayed]
    assert list(entry["failed"]) == ["graphs"] * (not replayed)


def test_modes_that_all_fail():
    entry = {"modes": {}, "failed": {}}
    run = run_on("cpu", ranks=Ranks(CPU, is_modelled=True))
    modes = [Mode("injected")]
    bench_parallel.measure(
        run, modes, lambda mode: 1 / 0, 2, warm_up_rounds=1, in_a_row=1, entry=entry
    )
    assert not entry["modes"] and "ZeroDivisionError" in entry["failed"]["injected"]


# ------------------------------------------------------------------------------------------------
# Modelled collectives


@pytest.fixture
def four_ranks():
    """A group of four ranks, of which only the first one is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_modelled_collectives(four_ranks):
    x, key, value, later = (torch.randn(4, 6) for _ in range(4))
    link, original = Link(), funcol.all_to_all_single
    with link.in_place():
        assert funcol.all_to_all_single(x, None, None, four_ranks) is x
        assert funcol.all_to_all_single(x, [1] * 4, [1] * 4, four_ranks) is x
        keys = funcol.all_gather_tensor(key, 0, four_ranks)
        values = funcol.all_gather_tensor(value, gather_dim=0, group=four_ranks)
        assert torch.equal(keys, key.repeat(4, 1)) and torch.equal(values, value.repeat(4, 1))
        assert funcol.all_gather_tensor(later, 0, four_ranks) is keys
        assert funcol.all_gather_tensor(later, 0, four_ranks) is values
        assert funcol.all_gather_tensor(x, 1, four_ranks).shape == (4, 24)
        masks = [torch.empty(2) for _ in range(4)]
        dist.all_gather(masks, torch.tensor([3.0, 4.0]), group=four_ranks)
        assert [mask.tolist() for mask in masks] == [[3, 4]] * 4
        with pytest.raises(NotImplementedError, match="unequal"):
            funcol.all_to_all_single(x, [1, 1, 1, 1], [2, 1, 1, 0], four_ranks)
        with pytest.raises(NotImplementedError, match="all_reduce is not modelled"):
            dist.all_reduce(x)
    assert funcol.all_to_all_single is original
    assert link.calls == {"all_to_all_single": 2, "all_gather_tensor": 5, "all_gather": 1}
    moved = 4 * 6 * 4
    assert link.sent_bytes == 2 * moved * 3 // 4 + 5 * moved * 3 + 2 * 4 * 3


def test_kernels_that_copy_are_counted():
    names = [
        "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>",
        "void at::native::CatArrayBatchedCopy_aligned16_contig<bf16>",
        "Memcpy DtoD (Device -> Device)",
        "void at::native::vectorized_elementwise_kernel<4, MulFunctor>",
        "void cutlass::device_kernel<flash_fwd<cute::Copy_Atom>>",
    ]
    events = [
        {"cat": "kernel", "name": name, "dur": 1000.0 * (i + 1)} for i, name in enumerate(names)
    ]
    events[2]["cat"] = "gpu_memcpy"
    events.append({"cat": "cpu_op", "name": "aten::copy_", "dur": 5.0})
    assert modelled_link.copies(events, 2) == {"launches": 1.5, "ms": 3.0}


# ------------------------------------------------------------------------------------------------
# Ranks


@in_ranks
def test_the_slowest_rank_counts(rank):
    """And an error of one is an error of all, so that they go on together."""
    ranks = Ranks(CPU, rank)
    timing.milliseconds = lambda function, device: function()
    assert ranks.milliseconds(lambda: 5.0 + 2 * rank, CPU) == 7
    assert ranks.attempt(lambda: 7) == (7, None)

    def fail():
        if rank == 1:
            raise ValueError("no")

    assert ranks.attempt(fail) == (None, "ValueError: no")
    runs = [ranks.runs(mode) for mode in (Mode("eager"), Mode("eager", ring=2))]
    assert runs == [rank == 0, True]


@in_ranks
@pytest.mark.parametrize("ranks", [4])
def test_modes_of_fewer_ranks(rank, ranks):
    """The first ranks make a group, in which the others have no part. These make one of their own."""
    every = Ranks(CPU, rank)
    for mode in (Mode("x", ulysses=2), Mode("x", guidance=2), Mode("x", guidance=2, ulysses=2)):
        mesh = every.mesh(mode)
        assert every.mesh(Mode("y", ulysses=mode.ulysses, guidance=mode.guidance)) is mesh
        assert every.runs(mode)
        of_tokens = mesh["ring", "ulysses"]._flatten()  # as enable_parallelism
        assert of_tokens.size() == mode.ulysses
        total = torch.ones(())
        dist.all_reduce(total, group=of_tokens.get_group())
        dist.all_reduce(total, group=mesh["guidance"].get_group())
        assert total == mode.degree


# ------------------------------------------------------------------------------------------------
# Tables


def entry_of(modes, **changes):
    """A made-up entry, of modes with their milliseconds."""
    measured = {}
    for mode, ms in modes.items():
        measured[str(mode)] = {
            **mode.degrees,
            "ms": timing.summarize([ms]),
            **({"sent_bytes": 370_000_000} if "sent" in changes and mode.degree > 1 else {}),
        }
    changes.pop("sent", None)
    bench_parallel.derive(measured)
    return {
        "model": "Wan",
        "size": "81x720x1280",
        "changed_inputs": {},
        "degrees": [4],
        "blocks": {"blocks": 3},
        "published_blocks": {"blocks": 40},
        "failed": {},
        "modes": measured,
        **changes,
    }


TIMES = {
    Mode("eager"): 15.0,
    Mode("injected"): 12.0,
    Mode("eager", ulysses=4): 6.0,
    Mode("injected", ulysses=4): 4.0,
    Mode("injected", ring=2, ulysses=2): 5.0,
}
WAN = "Wan, 3 of 40 blocks, 81 frames 720×1280"


def test_tables_of_gpus(tmp_path):
    entry = entry_of(TIMES, failed={"injected+ring4": "ValueError: no"})
    entry["modes"]["injected+ring4"] = {"ring": 4, "ulysses": 1}  # cut short
    entry["modes"]["injected+ulysses4"]["distance_from_one_gpu"] = 0.00123
    entry["modes"]["eager+ulysses4"]["distance_from_one_gpu"] = 0.5
    whole = entry_of(TIMES, model="LTX", size="257x704x1216", published_blocks={"blocks": 3})
    store(tmp_path, "parallel", {"environment": ENVIRONMENT, "parallel": [entry, whole]})
    rows = rows_of(tmp_path, "parallel")
    assert rows[:3] == [
        [WAN, "one GPU", "15.0 ms", "12.0 ms", "", "", "", ""],
        [WAN, "Ulysses 4", "6.0 ms", "4.0 ms", "", "3.00×", "75%", "0.00123"],
        [WAN, "ring 2 × Ulysses 2", "", "5.0 ms", "", "2.40×", "60%", ""],
    ]
    assert [row[0] for row in rows[3:]] == ["LTX, 257 frames 704×1216"] * 3
    two = entry_of({Mode("injected"): 9.0}, model="SD", size="1024x1024", degrees=[2])
    store(tmp_path, "parallel", {"environment": ENVIRONMENT, "gpus": 2, "parallel": [two]})
    tables = rendered(tmp_path, "parallel").split("\n\n")
    assert ["SD" in table for table in tables if table.startswith("|")] == [True, False]
    assert rows_of(tmp_path, "parallel_pipelines") == []


def test_tables_of_graphs_and_guidance(tmp_path):
    times = {
        Mode("injected"): 12.0,
        Mode("graphs"): 10.0,
        Mode("injected", guidance=2): 8.0,
        Mode("graphs", guidance=2): 5.0,
        Mode("graphs", guidance=2, ulysses=2): 4.0,
    }
    entry = entry_of(times, precision="fp8", part="step")
    store(tmp_path, "parallel", {"environment": ENVIRONMENT, "parallel": [entry]})
    wan = WAN.replace("Wan", "Wan, FP8")
    assert rows_of(tmp_path, "parallel") == [
        [wan, "one GPU", "", "12.0 ms", "10.0 ms", "", "", ""],
        [wan, "guidance 2", "", "8.0 ms", "5.0 ms", "2.00×", "100%", ""],
        [wan, "guidance 2 × Ulysses 2", "", "", "4.0 ms", "2.50×", "62%", ""],
    ]


def test_tables_of_pipelines_and_decoders(tmp_path):
    of_pipeline = {Mode("graphs"): 4000.0, Mode("graphs", guidance=2): 2500.0}
    of_decoder = {
        Mode("injected"): 500.0,
        Mode("tiled"): 550.0,
        Mode("tiled", tiles=2): 300.0,
        Mode("default-tiles", tiles=2): 400.0,
    }
    whole = {"blocks": {}, "published_blocks": {}}
    pipeline = entry_of(
        of_pipeline, part="pipeline", model="SD", size="1024x1024", steps=28, **whole
    )
    decoder = entry_of(of_decoder, part="decode", **whole)
    decoder["modes"]["tiled+tiles2"] |= {"equal_to_one_gpu": True, "distance_from_one_gpu": 0.0}
    decoder["modes"]["default-tiles+tiles2"] |= {
        "equal_to_one_gpu": False,
        "distance_from_one_gpu": 0.001,
    }
    result = {"environment": ENVIRONMENT, "parallel": [pipeline, decoder]}
    store(tmp_path, "parallel", result)
    assert rows_of(tmp_path, "parallel_pipelines") == [
        ["SD, 1024×1024, 28 steps", "one GPU", "4.00 s", ""],
        ["SD, 1024×1024, 28 steps", "guidance 2", "2.50 s", "1.60× (80%)"],
    ]
    wan = "Wan, 81 frames 720×1280"
    assert rows_of(tmp_path, "parallel_decoders") == [
        [wan, "none", "1", "500.0 ms", "", ""],
        [wan, "four", "1", "550.0 ms", "", ""],
        [wan, "four", "2", "300.0 ms", "1.67× (83%)", "yes"],
        [wan, "diffusers'", "2", "400.0 ms", "1.25× (62%)", "no: 0.00100"],
    ]
    assert rows_of(tmp_path, "parallel") == []


def test_tables_of_modelled_ranks(tmp_path):
    entry = entry_of(TIMES, sent=True)
    store(tmp_path, "parallel/modelled", {"environment": ENVIRONMENT, "parallel": [entry]})
    assert rows_of(tmp_path, "parallel_modelled")[1] == [
        *(WAN, "Ulysses 4", "6.0 ms", "4.0 ms", "1.50×", "0.37 GB", "5.0 ms", "2.40× (60%)")
    ]


def test_attention_with_lse(device, tmp_path):
    options = ["--tiny", "--device", device, "--output"]
    options.append(str(tmp_path / "attention_lse.json"))
    CliRunner().invoke(bench_attention_lse.main, options, catch_exceptions=False)
    (entry,) = load(tmp_path, "attention_lse")["attention_lse"]
    times = [summary["median"] for summary in entry["microseconds"].values()]
    assert entry["without_over_with"] == times[0] / times[1] > 0


def test_attention_in_8_bits(device, tmp_path):
    options = ["--tiny", "--device", device, "--rounds", "2", "--output"]
    options.append(str(tmp_path / "attention_int8.json"))
    CliRunner().invoke(bench_attention_int8.main, options, catch_exceptions=False)
    result = load(tmp_path, "attention_int8")
    entry = result["attention_int8"][0]
    medians = {name: times["median"] for name, times in entry["microseconds"]["cold"].items()}
    assert entry["speedups"]["cold"]["16-bit"] == medians["16-bit"] / medians["int8"] > 0
    assert 0.01 < entry["errors"]["int8"] < 0.07
    shown = compare_results.read(result)["attention_int8 1x24x40x2x128, std 1, cold", "16-bit"]
    assert shown.value == entry["speedups"]["cold"]["16-bit"]


def test_results_are_compared():
    result = {"environment": ENVIRONMENT, "parallel": [entry_of(TIMES)]}
    rows = compare_results.read(result)
    values = {label: ratio.value for label, ratio in rows.items()}
    assert values[("Wan 81x720x1280, injected+ulysses4", "eager+ulysses4")] == 1.5
    assert values[("Wan 81x720x1280, injected+ulysses4", "one GPU")] == 3.0
    assert values[("Wan 81x720x1280, injected", "eager")] == 1.25

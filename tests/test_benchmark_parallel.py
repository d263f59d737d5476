"""bench_parallel.py: tiny runs of both modes, what the modelled collectives do, and the tables."""

import json
import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from click.testing import CliRunner
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import timing
from benchmarks.models import bench_parallel
from benchmarks.models.bench_parallel import Link, Mode, Ranks
from benchmarks.operations import bench_attention_int8, bench_attention_lse

import compare_results
from benchmark_results import ENVIRONMENT, load, rows_of, store
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
        assert measured["speedup"] == pytest.approx(one["ms"]["median"] / whole)
        assert measured["of_linear"] == measured["speedup"] / degree
    ratio = eager["ms"]["median"] / injected["ms"]["median"]
    assert injected["over_eager"] == pytest.approx(ratio)


@pytest.mark.slow
def test_two_processes(kernel, tmp_path):
    """Outputs are those of one process, and a mode that fails in all ranks is recorded."""
    process = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("benchmarks/models/bench_parallel.py", "--device", "cpu", "--tiny"),
        *("--models", "wan,ltx_masked", "--blocks", "1", "--rounds", "2"),
        *("--output", tmp_path / "parallel.json"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=CHECKOUT,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    result = load(tmp_path, "parallel")
    assert result["gpus"] == 2 and "failed" not in result
    assert result["environment"]["command"].startswith("torchrun --standalone --nproc-per-node 2 b")
    wan, ltx = result["parallel"]
    assert (wan["model"], wan["degrees"], wan["tokens"]) == ("tiny Wan 2.1", [2], 48)
    check_entry(wan, 2)
    assert wan["modes"]["eager+ulysses2"]["distance_from_one_gpu"] < 0.02
    assert wan["modes"]["injected+ulysses2"]["distance_from_one_gpu"] < 0.02
    assert "distance_from_one_gpu" not in wan["modes"]["eager"]
    assert "eager+ulysses2" in ltx["failed"] and ltx["modes"]["eager"]["ms"]["samples"] == 2
    assert [row[:2] for row in rows_of(tmp_path, "parallel")][:2] == [
        ["tiny Wan 2.1, 1 of 2 blocks, 5 frames 64×96", "one GPU"],
        ["tiny Wan 2.1, 1 of 2 blocks, 5 frames 64×96", "Ulysses 2"],
    ]


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
    result = modelled(device, path, "--models", "flux", "--degrees", "2,4")
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


def test_published_sizes_are_divisible():
    """By as many ranks as are modelled; LTX-Video's by 8 with a latent frame less."""
    smaller = {
        name: {degree: str(bench_parallel.divisible(workload.size, degree)) for degree in (2, 4, 8)}
        for name, workload in bench_parallel.WORKLOADS.items()
    }
    assert set(smaller["wan"].values()) == {"81x720x1280"}
    assert bench_parallel.WORKLOADS["wan"].size.tokens == 75600
    assert set(smaller["flux"].values()) == {"2048x2048"}
    for name in ("ltx", "ltx_masked"):
        of_ltx = {2: "257x704x1216", 4: "257x704x1216", 8: "249x704x1216"}
        assert smaller[name] == of_ltx
    for workload in bench_parallel.WORKLOADS.values():
        assert workload.published.text_tokens % 8 == 0
    with pytest.raises(ValueError, match="no smaller size"):
        bench_parallel.divisible(bench_parallel.LTX_VIDEO.tiny_sizes[0], 5)


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
    assert bench_parallel.copies(events, 2) == {"launches": 1.5, "ms": 3.0}


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


# ------------------------------------------------------------------------------------------------
# Tables


def entry_of(modes, **changes):
    """A made-up entry, of modes with their milliseconds."""
    measured = {}
    for mode, ms in modes.items():
        measured[str(mode)] = {
            "ring": mode.ring,
            "ulysses": mode.ulysses,
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
    whole = entry_of(TIMES, model="LTX", size="257x704x1216", published_blocks={"blocks": 3})
    store(tmp_path, "parallel", {"environment": ENVIRONMENT, "parallel": [entry, whole]})
    rows = rows_of(tmp_path, "parallel")
    assert rows[:3] == [
        [WAN, "one GPU", "15.0 ms", "12.0 ms", "1.25×", "", "", ""],
        [WAN, "Ulysses 4", "6.0 ms", "4.0 ms", "1.50×", "3.00× (75%)", "", "0.00123"],
        [WAN, "ring 2 × Ulysses 2", "", "5.0 ms", "1.20×", "2.40× (60%)", "", ""],
    ]
    assert [row[0] for row in rows[3:]] == ["LTX, 257 frames 704×1216"] * 3


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
    assert values[("Wan 81x720x1280, injected+ulysses4", "injected")] == 3.0
    assert values[("Wan 81x720x1280, injected", "eager")] == 1.25

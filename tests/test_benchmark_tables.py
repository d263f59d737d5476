"""The tables, figures and plots made of results: from made-up results whose rows are known."""

import functools
import re

import pytest

from benchmarks import models
from benchmarks.harness import history, options, timing

import render_docs
import render_plots
from benchmark_results import (
    ENVIRONMENT,
    FAMILIES,
    load,
    rendered,
    rows_of,
    store,
    store_operations,
)
from conftest import CHECKOUT
from documents import chosen, few_steps
from documents.common import TABLES
from documents.operations import representative

TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)<!-- end table -->", re.DOTALL)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made_up")
    store_operations(folder)
    return folder


load_once = functools.cache(history.load)


@pytest.fixture
def _committed(monkeypatch):
    """For tests of the committed results only: a file is parsed once, not for each table and figure."""
    monkeypatch.setattr(history, "load", load_once)


# ------------------------------------------------------------------------------------------------
# The pages


def figure(name, results):
    """A figure as pages show it."""
    text = f"<!-- figure: {name} --><!-- end figure -->"
    return render_docs.render(text, results).split(">")[1].split("<")[0]


@pytest.mark.usefixtures("_committed")
@pytest.mark.parametrize("path", render_docs.DOCUMENTS, ids=lambda p: str(p.relative_to(CHECKOUT)))
def test_figures_agree_with_the_results(path):
    """The committed pages are also the known values of the code that makes them."""
    text = path.read_text(encoding="utf-8")
    assert render_docs.render(text) == text, "stale: run tools/render_docs.py"
    for _, name, table in (match.groups() for match in TABLE.finditer(text)):
        if not table.strip():
            continue  # not measured yet
        assert "NVIDIA H" in table, f"{name} does not name its card"
        assert table.split("\n")[1].count("|") <= 8 + 1, f"{name} is too wide"


@pytest.mark.usefixtures("_committed")
@pytest.mark.whole
def test_plots_agree_with_the_results():
    folder = CHECKOUT / "benchmarks" / "plots"
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    assert committed == render_plots.render(history.RESULTS)


# ------------------------------------------------------------------------------------------------
# Operations


def test_peers_that_failed_or_are_broken(made_up, tmp_path):
    """A broken one takes more than five times as long as eager. It is not drawn either."""
    result = load(made_up, "operations/norm")
    shown = representative(result["workloads"])[:2]
    first, second = (entry["cold"]["over"] for entry in shown)
    first["quack"], second["quack"] = 5.1 * first["eager"], 4.9 * second["eager"]
    del first["liger"], first["compiled"]
    shown[0]["failed"] = dict.fromkeys(("liger", "compiled default"), "it broke")
    for name in (f"operations/{family}" for family in FAMILIES):
        store(tmp_path, name, result if name == "operations/norm" else load(made_up, name))
    rows = rows_of(tmp_path, "operations")
    assert rows[0][-3:] == ["3.00×", "failed", "QuACK broken†"] and rows[1][-1] == "2.00× Liger"
    assert "† more than 5 times slower than eager PyTorch" in rendered(tmp_path, "operations")
    assert "†" not in rendered(made_up, "operations")
    plots = (render_plots.render(folder)["bandwidth.svg"] for folder in (made_up, tmp_path))
    whole, without = (plot.count("<use ") for plot in plots)
    assert whole - without == 1


# ------------------------------------------------------------------------------------------------
# Models


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
            "kernels": {
                "classes": {"other": {"ms": rests[mode], "launches": 1}},
                "total": {"ms": ms, "launches": 640},
                "idle_ms": 1.25,
            },
        }
        for mode, ms in times.items()
    }
    of_weights = {"modes": modes, "speedups": timing.speedups(times)}
    entry = {"batch": 1, "tokens": 8, "text_tokens": 512, "weights": {weights: of_weights}}
    return {"environment": ENVIRONMENT, "model": "a model", "sizes": {size: entry}}


def test_forward_is_compared_with_the_faster_compiled_one():
    (row,) = chosen.forwards(made_up_forward(compiled=50.0, **{models.REGIONAL: 48.0}))
    assert (row.size, row.eager, row.compiled, row.injected) == ("1024x1024", 60.0, 48.0, 40.0)
    assert (row.over_eager, row.over_compiled) == (1.5, 1.2)
    assert (row.rest_over_eager, row.rest_over_compiled) == (0.1, 0.5)
    assert row.compiled_mode == models.REGIONAL and row.distance_over_eager == 1.02
    (row,) = chosen.forwards(made_up_forward(compiled=46.0, **{models.REGIONAL: 48.0}))
    assert (row.compiled_mode, row.over_compiled) == ("compiled", 1.15)
    (row,) = chosen.forwards(made_up_forward(weights="random"))
    assert row.eager is row.compiled_mode is row.over_eager is row.distance_over_eager is None


def keep_model(folder, name, result, commit="aaaaaaa", minute=0, device="NVIDIA H200"):
    """As a result of that build."""
    ids = [f"_h100_diffusers_kernels_cuda_{commit}"]
    environment = {**ENVIRONMENT, "device": device, "kernel_ids": ids}
    environment["date"] = f"2026-11-22 10:{minute:02}:00 UTC"
    environment["command"] = f"python bench_models.py --model {name},{commit}"
    history.store(f"models/{name}", {**result, "environment": environment}, folder)


def test_a_table_of_models_is_of_one_card_and_build(tmp_path):
    forward = made_up_forward(**{models.REGIONAL: 48.0})
    faster = made_up_forward(20.0, **{models.REGIONAL: 22.0})
    for minute, name in enumerate(("ltx", "flux", "allegro")):
        keep_model(tmp_path, name, forward, "aaaaaaa", minute)
    keep_model(tmp_path, "flux", faster, "bbbbbbb", 10)
    keep_model(tmp_path, "sd3", faster, "bbbbbbb", 11)
    keep_model(tmp_path, "wan", faster, "aaaaaaa", 12, device="NVIDIA H100 80GB HBM3")
    keep_model(tmp_path, "ltx", made_up_forward(30.0), "aaaaaaa", 13)
    groups = [set(group) for group in chosen.by_build(tmp_path)]
    assert groups == [{"ltx", "flux", "allegro"}, {"wan"}, {"sd3"}]
    injected = [row[3] for row in rows_of(tmp_path, "summary_models") if row[3].endswith(" ms")]
    assert injected[:3] == ["30.0 ms", "40.0 ms", "40.0 ms"], "the newest of the build"
    figures = {
        "families_over_eager": "1.50 to 3.00",
        "families_over_compiled": "1.10 to 1.20",
    }
    assert {name: figure(name, tmp_path) for name in figures} == figures
    keep_model(tmp_path, "qwenimage", faster, "bbbbbbb", 14)
    groups = [set(group) for group in chosen.by_build(tmp_path)]
    assert groups[0] == {"flux", "sd3", "qwenimage"}, "as many, but newer"


@pytest.mark.usefixtures("_committed")
def test_committed_tables_of_models():
    """All models are shown; the newest cards' results are of few builds."""
    groups = chosen.by_build(history.RESULTS)
    table = TABLES["summary_models"](history.RESULTS)
    assert {name for group in groups for name in group} == chosen.TITLES.keys()
    for group in groups:
        ((device, commit),) = {chosen.card_and_build(result) for result in group.values()}
        assert f"{device}, " in table and f"build {commit};" in table
    forwards = [f for group in groups for r in group.values() for f in chosen.forwards(r)]
    shown = [row for row in rows_of(history.RESULTS, "summary_models") if row[3].endswith(" ms")]
    assert len(shown) == len(forwards) >= len(chosen.TITLES)
    without = [row[0] for row in shown if not row[5]]
    assert len(without) <= 1, f"without torch.compile: {without}"


# ------------------------------------------------------------------------------------------------
# CUDA graphs


def test_newest_of_each_forward_is_shown(tmp_path):
    def forward(name, wall):
        entry = {"name": name, "input": "published", "size": "64x96", "tokens": 24}
        return {**entry, "weights": {"peaked": {"modes": {"eager": wall}}}}

    def keep(options, date, *forwards, device="NVIDIA H200"):
        environment = {**ENVIRONMENT, "date": f"2026-11-{date}:00:00 UTC", "device": device}
        environment["command"] = f"python bench_cuda_graphs.py {options}"
        result = {"environment": environment, "processor": "x", "graph_forwards": forwards}
        history.store("cuda_graphs", result, tmp_path)
        return chosen.gathered_forwards(tmp_path)["graph_forwards"]

    assert chosen.gathered_forwards(tmp_path) is None
    old, new, other = forward("ltx", 35.0), forward("ltx", 30.0), forward("sdxl", 40.0)
    keep("a", "23 10", old, other)
    keep("b", "23 11", new)
    assert keep("c", "23 12", old, device="an Arm CPU") == [new, other]
    assert keep("d", "21 12", old, device="NVIDIA H100 80GB HBM3")[0] == new, "the newest of a GPU"


def test_the_shown_pipelines_are_those_of_one_build(tmp_path):
    """Each pipeline's newest entry of the runs of one build, never of another one."""

    def keep(build, day, *names):
        kernel_ids = [f"_h100_diffusers_kernels_cuda_{build}"]
        entries = [{"name": n, "modes": {models.REGIONAL: {}}, "day": day} for n in names]
        command = f"python a.py --{build}-{day}"
        environment = {**ENVIRONMENT, "kernel_ids": kernel_ids, "date": day, "command": command}
        store(tmp_path, "pipelines", {"environment": environment, "pipelines": entries})
        return {e["name"]: e["day"] for e in chosen.pipelines_run(tmp_path)["pipelines"]}

    assert chosen.pipelines_run(tmp_path) is None
    first = keep("aaaaaaa", "21", "flux", "ltx", "wan")
    assert first == {"flux": "21", "ltx": "21", "wan": "21"}
    assert keep("bbbbbbb", "22", "flux", "ltx") == first
    assert keep("bbbbbbb", "23", "wan", "ltx") == {"flux": "22", "ltx": "23", "wan": "23"}
    runs = chosen.pipelines_run(tmp_path)["runs"]
    assert [run["environment"]["date"] for run in runs] == ["22", "23"]
    assert keep("aaaaaaa", "24", "wan") == {"flux": "21", "ltx": "21", "wan": "24"}
    assert chosen.pipelines_run(tmp_path, "injected") is None


def few_steps_entry(name, graphs_s, **compiled):
    medians = {"eager": 4.0, few_steps.COMPILED: 3.0, "injected": 2.5, models.GRAPHS: graphs_s}
    measured = {
        mode: {
            **dict.fromkeys(few_steps.PARTS.values(), s / 4),
            "seconds": {"median": s, "min": s, "max": 1.1 * s},
            "memory_bytes": 2**30,
            "decoder_bytes": 2**29,
            "first_call_s": 9.0,
            "second_call_s": 5.0,
        }
        for mode, s in medians.items()
    }
    measured[few_steps.COMPILED].update(compiled)
    entry = {"name": name, "title": name, "size": "64x96", "steps": 4, "modes": measured}
    return {**entry, "does_not_fit": [few_steps.FP8], "speedups": timing.speedups(medians)}


def test_few_steps_are_gathered_from_runs_in_parts(tmp_path):
    """Of each pipeline the newest entry. The faster injected mode is compared."""
    assert rendered(tmp_path, "few_steps").count("|") == 0
    assert figure("few_steps_least_over_compiled", tmp_path) == "not measured"
    one, two = few_steps_entry("A", 2.0), few_steps_entry("B", 2.8, decoder_not_compiled="slow")
    for day, entries in (("21", [few_steps_entry("A", 1.0)]), ("22", [one]), ("23", [two])):
        environment = {**ENVIRONMENT, "date": day, "command": f"python a.py --{entries[0]['name']}"}
        store(tmp_path, "few_steps", {"environment": environment, "pipelines": entries})
    rows = rows_of(tmp_path, "few_steps")
    assert [row[0] for row in rows[:6]] == [
        "**A, 64×96, 4 steps**",
        "eager",
        "torch.compile, blocks and decoder",
        "injected",
        "injected with CUDA graphs",
        '`precision="fp8"`: out of memory',
    ]
    assert rows[4][1:] == [*["0.500 s"] * 4, "2.00 s", "2.00×, 1.50×", "1.0 GiB"]
    assert "\\* The decoder is not compiled. B: slow" in rendered(tmp_path, "few_steps")
    assert rows_of(tmp_path, "few_steps_calls")[4][1:4] == ["9.0 s", "5.0 s", "10.0%"]
    summary = rows_of(tmp_path, "summary_few_steps")
    assert [row[6] for row in summary] == ["2.00×, 1.50×", "1.60×, 1.20×"]
    for name in ("few_steps", "summary_few_steps"):
        assert "1.20 times as fast as compiled, 1.34 times" in rendered(tmp_path, name)
    assert figure("few_steps_least_over_compiled", tmp_path) == "1.20"


def test_titles_are_those_of_what_is_measured():
    names = {name: published.name for name, published in options.MODELS.items()}
    assert set(chosen.TITLES) == set(names)
    assert all(names[name].startswith(title) for name, title in chosen.TITLES.items())

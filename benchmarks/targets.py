"""Targets of the operations, and the measured figures beside them.

Each figure is computed from the JSON of one run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import history

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
from attention_inputs import EXTREMES, NORMAL, TYPICAL

FAMILIES = ("norm", "gated_residual", "rope", "activation", "softmax", "group_norm")
LARGE_BYTES, MEDIUM_BYTES = 64_000_000, 16_000_000

OVER_BEST_PEER_LARGE, OF_LARGE_COPY = 1.00, 0.94
OVER_BEST_PEER_MEDIUM = 1.05
RMS_NORM_SMALL = 1.10
LAYER_NORM_MODULATE_OVER_COMPILED = 1.5
QK_NORM_ROPE_OVER_COMPILED = 2.2
SOFTMAX_OVER_QUACK = 1.00
QUACK_SOFTMAX_RATE = 2.84  # TB/s of QuACK 0.6.5 at 8192x8192 on an H100, measured earlier
ROPE_3D_MICROSECONDS = 5.0
HOST_OVER_TORCH = 1.2
# Published kernel times for these shapes on an H100, in microseconds, and the aimed speedup.
PUBLISHED = (
    ("rms_norm", "", (1, 1024, 2048), 19.0),
    ("rms_norm", "", (2, 1024, 2048), 24.0),
    ("rms_norm", "", (4, 4096, 3072), 157.0),
    ("geglu", "none", (2, 1024, 4096), 30.0),
)
OVER_PUBLISHED = 2.0
# Attention: (batch, queries, keys, heads, head dim) and the variant.
LTX_49 = (((2, 2688, 2688, 32, 64), ""),)
LTX_161 = (((2, 8064, 8064, 32, 64), ""),)
FLUX = (((1, 4608, 4608, 24, 128), ""),)
WAN = (((1, 32760, 32760, 12, 128), ""),)
SELF_ATTENTION = LTX_49 + LTX_161 + FLUX + WAN
HEAD_DIMS = tuple(((2, 4096, 4096, 16, head_dim), "") for head_dim in (72, 80, 96, 112))
CROSS_ATTENTION = tuple(((2, 8064, 128, 32, 64), variant) for variant in ("", "text mask"))
PEAKED = tuple(kind for kind in TYPICAL if kind != NORMAL)
# Peer, shapes, kinds of inputs, and the aimed speedup.
ATTENTION = (
    ("over FA3, std 1", "fa3", LTX_161, (NORMAL,), 1.10),
    ("over FA3, peaked inputs", "fa3", LTX_161, PEAKED, 1.08),
    ("over FA3, typical inputs", "fa3", LTX_49, TYPICAL, 1.08),
    ("over FA3, typical inputs", "fa3", FLUX, TYPICAL, 1.03),
    ("over FA3, typical inputs", "fa3", WAN, TYPICAL, 1.03),
    ("over cuDNN, typical inputs", "cudnn", SELF_ATTENTION, TYPICAL, 1.10),
    ("over cuDNN, std 3", "cudnn", CROSS_ATTENTION, ("std 3",), 1.35),
    ("over FA3, rising", "fa3", SELF_ATTENTION, ("rising",), 0.90),
    ("over FA3, jump", "fa3", SELF_ATTENTION, ("jump",), 0.85),
    ("over cuDNN, other head dims", "cudnn", HEAD_DIMS, ("std 1", "std 3"), 1.05),
    ("over FA3, other head dims", "fa3", HEAD_DIMS, ("std 1", "std 3"), 1.00),
)
SLOWEST_OVER_FASTEST = 0.94
ATTENTION_ERROR_OVER_FA3 = 1.05
# Of the injected LTX-Video 2B: size, weights; how many times as fast as eager and as torch.compile.
MODEL_SIZE, MODEL_WEIGHTS = "161x512x768", "peaked"
OVER_EAGER, OVER_COMPILED = 1.65, 1.16
# Of the other injected models, with these weights too: the result's name, what the model is called, and how
# many times as fast as eager and as torch.compile.
FORWARDS = {
    "flux": ("FLUX.1", 1.55, 1.15),
    "flux2": ("FLUX.2", 1.35, 1.08),
    "sd3": ("Stable Diffusion 3.5 Large", 1.70, 1.12),
    "qwenimage": ("Qwen-Image", 1.55, 1.20),
    "wan": ("Wan 2.1 14B", 1.27, 1.09),
    "wan_small": ("Wan 2.1 1.3B", 1.35, 1.10),
    "ltx2": ("LTX-2", 1.70, 1.16),
    "ltx2_distilled": ("LTX-2 distilled", 1.70, 1.16),
    "z_image": ("Z-Image", 1.85, 1.17),
    "flux3": ("FLUX.3", 1.70, 1.20),
    "krea2": ("Krea 2", 1.55, 1.25),
    "chroma": ("Chroma", 1.35, 1.10),
    "lumina2": ("Lumina 2", 1.35, 1.10),
    "mochi": ("Mochi", 1.35, 1.10),
    "hunyuan_video15": ("HunyuanVideo 1.5", 3.30, 2.50),
    "hunyuan_video": ("HunyuanVideo", 1.40, 1.20),
    "cogvideox": ("CogVideoX-5b", 1.68, 1.28),
    "cosmos": ("Cosmos-Predict2 2B", 2.00, 1.05),
    "qwenimage21": ("Qwen-Image 2.1", 1.35, 1.10),
    "minimax_h3": ("MiniMax-H3", 1.35, 1.10),
    "sdxl": ("Stable Diffusion XL", 1.60, 1.25),
    "sdxl_channels_last": ("Stable Diffusion XL, channels last", 1.60, 1.25),
}
# Models that injection replaces in part: it knows no family of them.
WITHOUT_FAMILY = {"auraflow": "AuraFlow", "allegro": "Allegro"}
WITHOUT_FAMILY_OVER_EAGER = 1.10
COMPILED_IN_PART_OVER_COMPILED = 0.99
REST_OVER_EAGER, REST_OVER_COMPILED = 0.15, 0.70  # outside products, attention and convolutions
MODEL_DISTANCE_OVER_EAGER = 1.05
HOST_FORWARD_OVER_EAGER = 0.5
TITLES = {
    "models": "LTX-Video 2B",
    **{name: title for name, (title, _, _) in FORWARDS.items()},
    **WITHOUT_FAMILY,
}
IN_FULL = ("models", *FORWARDS)  # models that injection replaces in full
COMPILED = ("compiled", "compiled-regional")  # of a whole model, and of its blocks
# Forwards that are replayed from CUDA graphs, with MODEL_WEIGHTS: the result's name and size; over what, how
# many times as fast.
GRAPHS, REDUCE_OVERHEAD = "injected+graphs", "compiled-reduce-overhead"
GRAPH_FORWARDS = (
    ("models", "49x512x768", "eager", 1.90),
    ("models", "49x512x768", "compiled", 1.20),
    ("sdxl", "1024x1024", "eager", 2.20),
    ("sdxl", "1024x1024", "compiled", 1.75),
    ("sdxl", "1024x1024", REDUCE_OVERHEAD, 1.10),
    ("sdxl_channels_last", "1024x1024", "eager", 2.20),
    ("sdxl_channels_last", "1024x1024", "compiled", 1.75),
    ("sdxl_channels_last", "1024x1024", REDUCE_OVERHEAD, 1.10),
    ("flux", "512x512", REDUCE_OVERHEAD, 1.15),
)
GRAPH_WALL_OVER_BUSY = 1.03
CAPTURING_OVER_PLAIN = 3.0
# Their rows are shown even without a figure.
MEASURED_LATER = ("attention", "group_norm", *TITLES)
# Tolerance of ceilings: a clock may be slightly above its nominal rate.
HIGHEST_CEILING_RATIO = 1.1

# A peer this many times slower than eager PyTorch does not run as intended.
BROKEN_OVER_EAGER = 5

Figures = Sequence[tuple[str, float | None]]  # by name; None if not measured


@dataclass(frozen=True)
class Target:
    """One row: an aim, its operation, and the measured figures, if any."""

    what: str
    of: str
    aim: float
    measured: float | None
    unit: str
    is_upper_bound: bool = False
    is_partial: bool = False  # there are figures that were not measured

    @property
    def missed_by(self) -> float:
        """The relative distance to a missed aim; 0 if it is met or was not measured."""
        if self.measured is None:
            return 0.0
        short = self.measured - self.aim if self.is_upper_bound else self.aim - self.measured
        return max(0.0, short / self.aim)

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        if self.missed_by:
            return f"missed by {self.missed_by:.1%}"
        return "met where measured" if self.is_partial else "met"


def is_broken(measured: Mapping, peer: str) -> bool:
    """Whether a peer is so slow that its time is meaningless. Attention's peers have no eager time."""
    over = measured["over"]
    return {peer, "eager"} <= set(over) and over[peer] > BROKEN_OVER_EAGER * over["eager"]


def label(entry: Mapping) -> str:
    name = ", ".join(filter(None, [entry["operation"], entry["variant"]]))
    return f"{name} {'×'.join(map(str, entry['shape']))}"


def sized(title: str, size: str) -> str:
    return f"{title} {size.replace('x', '×')}"


def furthest(
    what: str,
    figures: Figures,
    aim: float,
    unit: str,
    is_upper_bound: bool = False,
) -> Target:
    """The row of the figure that is furthest behind, by name. For several it shows how many meet the aim."""
    measured = [(name, value) for name, value in figures if value is not None]
    if not measured:
        first, *more = [name for name, _ in figures]
        of = f"{first} and {len(more)} more" if more else first
        return Target(what, of, aim, None, unit, is_upper_bound)
    choose, which = (max, "most") if is_upper_bound else (min, "least")
    name, value = choose(measured, key=lambda figure: figure[1])
    row = Target(what, name, aim, value, unit, is_upper_bound)
    if len(figures) == 1:
        return row
    met = sum(not replace(row, measured=v).missed_by for _, v in measured)
    absent = len(figures) - len(measured)
    of = f"{met} of {len(figures)}; the {which}: {name}"
    return replace(row, of=of + f"; {absent} not measured" * bool(absent), is_partial=bool(absent))


def worst(
    what: str, entries: Sequence[Mapping], aim: float, value: Callable[[Mapping], float], unit: str
) -> Target:
    """The row of the entry that is furthest behind."""
    if not entries:
        raise ValueError(f"the results have no figures for: {what}")
    return furthest(what, [(label(entry), value(entry)) for entry in entries], aim, unit)


def find(
    entries: Sequence[Mapping], operation: str, shape: tuple[int, ...], variant: str = ""
) -> Mapping:
    for entry in entries:
        if (entry["operation"], entry["variant"], tuple(entry["shape"])) == (
            operation,
            variant,
            shape,
        ):
            return entry
    raise ValueError(f"the results have no {operation} {variant} {shape}")


def microseconds(entry: Mapping, cache: str = "cold") -> float:
    return entry[cache]["microseconds"]["ours"]["median"]


def over_compiled(entries: Sequence[Mapping], aim: float, operation, shape, variant="") -> Target:
    entry = find(entries, operation, shape, variant)
    if "compiled" not in entry["cold"]["over"]:
        raise ValueError(f"the results have no torch.compile of {label(entry)}: {entry['failed']}")
    return Target("over torch.compile", label(entry), aim, entry["cold"]["over"]["compiled"], "×")


def softmax(entries: Sequence[Mapping]) -> Target:
    """Speedup over QuACK in this run, otherwise over its rate in another run."""
    entry = find(entries, "softmax", (8192, 8192))
    if "quack" in entry["cold"]["over"]:
        over = entry["cold"]["over"]["quack"]
        return Target("over QuACK", label(entry), SOFTMAX_OVER_QUACK, over, "×")
    over = entry["cold"]["terabytes_per_second"]["ours"] / QUACK_SOFTMAX_RATE
    what = f"over QuACK's {QUACK_SOFTMAX_RATE} TB/s of another run (it is not in this one)"
    return Target(what, label(entry), SOFTMAX_OVER_QUACK, over, "×")


def attention(result: Mapping | None) -> list[Target]:
    """Rates over the peers', our slowest over our fastest, errors over FA3's: the worst of each.

    Rows have no figure without results or without the peer.
    """
    entries = [] if result is None else result["workloads"]
    by_shape = {(tuple(entry["shape"]), entry["variant"]): entry for entry in entries}

    def name(shape: Sequence[int], variant: str) -> str:
        return label({"operation": "attention", "variant": variant, "shape": shape})

    def over(peer: str, shapes: Sequence[tuple], kinds: Sequence[str]) -> Figures:
        figures = []
        for shape in shapes:
            of_kinds = by_shape[shape]["inputs"] if shape in by_shape else {}
            ratios = {kind: of_kind["cold"]["over"].get(peer) for kind, of_kind in of_kinds.items()}
            figures += [(f"{name(*shape)}, {kind}", ratios.get(kind)) for kind in kinds]
        return figures

    def errors(kinds: Sequence[str]) -> Figures:
        """Figures of all measured workloads that FA3 supports."""
        figures = [
            (f"{label(entry)}, {kind}", of_kind["error_over"].get("fa3"))
            for entry in entries
            for kind, of_kind in entry["inputs"].items()
            if kind in kinds and "fa3" not in entry["declined"]
        ]
        return figures or [("attention", None)]

    dependence = [
        (name(*shape), by_shape[shape]["slowest_over_fastest"] if shape in by_shape else None)
        for shape in SELF_ATTENTION
    ]
    return [
        *(
            furthest(what, over(peer, shapes, kinds), aim, "×")
            for what, peer, shapes, kinds, aim in ATTENTION
        ),
        furthest(
            "slowest over fastest rate, typical inputs", dependence, SLOWEST_OVER_FASTEST, "×"
        ),
        *(
            furthest(
                f"error over FA3's, {inputs} inputs",
                errors(kinds),
                ATTENTION_ERROR_OVER_FA3,
                "×",
                is_upper_bound=True,
            )
            for inputs, kinds in (("typical", TYPICAL), ("extreme", EXTREMES))
        ),
    ]


def models(result: Mapping | None) -> list[Target]:
    """The injected LTX-Video's forward over other modes."""
    forward = next((f for f in forwards(result) if f.size == MODEL_SIZE), None)
    of = f"injected LTX-Video 2B, {MODEL_SIZE.replace('x', '×')}, {MODEL_WEIGHTS} weights"
    return [
        Target("over eager", of, OVER_EAGER, forward and forward.over_eager, "×"),
        Target("over torch.compile", of, OVER_COMPILED, forward and forward.over_compiled, "×"),
    ]


@dataclass(frozen=True)
class Forward:
    """An injected forward at one size compared with eager and torch.compile, in milliseconds and ratios.

    Unmeasured values are None. `compiled` is the fastest measured mode of COMPILED.
    """

    size: str
    eager: float | None
    compiled: float | None
    compiled_mode: str | None
    injected: float | None
    over_eager: float | None
    over_compiled: float | None
    rest_over_eager: float | None
    rest_over_compiled: float | None
    distance_over_eager: float | None
    graphs_over_injected: float | None


def faster_compiled(modes: Mapping[str, Mapping]) -> str | None:
    """The forward from the measured modes."""
    measured = [mode for mode in COMPILED if mode in modes]
    return min(measured, key=lambda mode: modes[mode]["ms"]["median"], default=None)


def forwards(result: Mapping | None, weights: str = MODEL_WEIGHTS) -> list[Forward]:
    """The forwards of all sizes measured with these weights."""
    rows = []
    for size, entry in (result or {"sizes": {}})["sizes"].items():
        modes = entry["weights"].get(weights, {}).get("modes", {})
        compiled = faster_compiled(modes)

        def ms(mode: str | None, modes: Mapping = modes) -> float | None:
            return modes[mode]["ms"]["median"] if mode in modes else None

        def rest(mode: str | None, modes: Mapping = modes) -> float | None:
            kernels = modes.get(mode, {}).get("kernels")
            return kernels["classes"]["other"]["ms"] if kernels else None

        def over(one: float | None, other: float | None) -> float | None:
            return one / other if one is not None and other else None

        injected = ms("injected")
        rows.append(
            Forward(
                size=size,
                eager=ms("eager"),
                compiled=ms(compiled),
                compiled_mode=compiled,
                injected=injected,
                over_eager=over(ms("eager"), injected),
                over_compiled=over(ms(compiled), injected),
                rest_over_eager=over(rest("injected"), rest("eager")),
                rest_over_compiled=over(rest("injected"), rest(compiled)),
                distance_over_eager=modes.get("injected", {}).get("distance_over_eager"),
                graphs_over_injected=over(injected, ms(GRAPHS)),
            )
        )
    return rows


def of_one_build(results: Path) -> dict[str, dict]:
    """The newest result of each model, all of one card and one build, by TITLES' names.

    They are the ones that measured the most models; of several of these the newest.
    """
    of_builds: dict[tuple, dict[str, dict]] = {}
    for name in TITLES:
        for result in history.kept(name, results):
            environment = result["environment"]
            card_and_build = environment["device"], history.commit(environment)
            of_builds.setdefault(card_and_build, {})[name] = result

    def rank(measured: Mapping[str, Mapping]) -> tuple[int, str]:
        return len(measured), max(r["environment"]["date"] for r in measured.values())

    return max(of_builds.values(), key=rank, default={})


def model_forwards(results: Mapping[str, Mapping]) -> list[Target]:
    """The other models' forwards over eager and over torch.compile, one row each, then aims for all models:
    the rest of the GPU time, the CPU time and the distance from float32, each at its worst.
    """
    measured = {name: forwards(results.get(name)) for name in (*FORWARDS, *WITHOUT_FAMILY)}

    def figures(names: Sequence[str], value: Callable[[Forward], float | None]) -> Figures:
        """A figure for each size, or a missing one."""
        return [
            (
                TITLES[name] if forward is None else sized(TITLES[name], forward.size),
                None if forward is None else value(forward),
            )
            for name in names
            for forward in measured[name] or [None]
        ]

    rows = []
    for name, (_, over_eager, over_compiled) in FORWARDS.items():
        eager = figures([name], lambda forward: forward.over_eager)
        compiled = figures([name], lambda forward: forward.over_compiled)
        rows.append(furthest("injected over eager", eager, over_eager, "×"))
        rows.append(furthest("injected over torch.compile", compiled, over_compiled, "×"))
    rows += [
        furthest(
            "injected over eager, no family",
            figures([name], lambda forward: forward.over_eager),
            WITHOUT_FAMILY_OVER_EAGER,
            "×",
        )
        for name in WITHOUT_FAMILY
    ]
    families = list(FORWARDS)
    in_part = results.get("in_part", {"in_part": []})["in_part"]
    return [
        *rows,
        furthest(
            "injected in part and compiled over torch.compile",
            [(entry["model"], entry["speedup"]) for entry in in_part] or [("ten models", None)],
            COMPILED_IN_PART_OVER_COMPILED,
            "×",
        ),
        furthest(
            "rest of the GPU's time over eager's",
            figures(families, lambda forward: forward.rest_over_eager),
            REST_OVER_EAGER,
            "×",
            is_upper_bound=True,
        ),
        furthest(
            "rest of the GPU's time over torch.compile's",
            figures(families, lambda forward: forward.rest_over_compiled),
            REST_OVER_COMPILED,
            "×",
            is_upper_bound=True,
        ),
        furthest(
            "distance from float32 over eager's",
            figures([*families, *WITHOUT_FAMILY], lambda forward: forward.distance_over_eager),
            MODEL_DISTANCE_OVER_EAGER,
            "×",
            is_upper_bound=True,
        ),
        furthest(
            "a forward's host time over eager's",
            [(TITLES[name], most_of_host(results.get("host_forward"), name)) for name in families],
            HOST_FORWARD_OVER_EAGER,
            "×",
            is_upper_bound=True,
        ),
    ]


def most_of_host(result: Mapping | None, name: str) -> float | None:
    """The maximum of ``host_shares`` for each model."""
    return max(host_shares(result, TITLES[name]) if result else [], default=None)


def host_shares(result: Mapping, title: str) -> list[float]:
    """The injected model's CPU time over eager's, as published."""
    return [
        entry["over_eager"]
        for entry in result["forwards"]
        if entry["model"].startswith(title)
        and entry["mode"] == "injected"
        and entry.get("condition", "as published") == "as published"
        and "over_eager" in entry
    ]


def gathered_hosts(results: Path) -> dict | None:
    """The newest CPU times of each model under each condition, and their runs."""

    def key(entry: dict) -> tuple:
        model = re.sub(r", [\d +]+ blocks", "", entry["model"])  # older results have fewer blocks
        options = (entry.get("condition", "as published"), entry.get("weights", "random"))
        return (model, *options, entry["context"], entry["mode"])

    return history.gathered("host_forward", "forwards", key, results)


def gathered_forwards(results: Path) -> dict | None:
    """The newest figures of each forward with CUDA graphs, and their runs.

    Runs may have only some modes. Then it returns the newest of each set of modes that no other run's set
    contains.
    """
    gathered = history.gathered(
        "cuda_graphs",
        "graph_forwards",
        lambda f: (f["name"], f["size"], frozenset(modes_of(f))),
        results,
    )
    if gathered is not None:
        forwards = gathered["graph_forwards"]
        order = list(TITLES)
        chosen = sorted(
            (f for f in forwards if not any(has_more_modes(other, f) for other in forwards)),
            key=lambda f: (order.index(f["name"]), f["tokens"], -len(modes_of(f))),
        )
        gathered["graph_forwards"] = chosen
        gathered["runs"] = [
            run
            for run in gathered["runs"]
            if any(forward in run["graph_forwards"] for forward in chosen)
        ]
    return gathered


# Results that are combined from runs of their parts.
GATHERED = {"cuda_graphs": gathered_forwards, "host_forward": gathered_hosts}


def modes_of(forward: Mapping) -> set[str]:
    """All measured modes of a forward with CUDA graphs."""
    return {mode for weights in forward["weights"].values() for mode in weights["modes"]}


def has_more_modes(other: Mapping, forward: Mapping) -> bool:
    is_same = (other["name"], other["size"]) == (forward["name"], forward["size"])
    return is_same and modes_of(other) > modes_of(forward)


def of_weights(forward: Mapping | None, weights: str = MODEL_WEIGHTS) -> Mapping:
    """The measurements of a forward with CUDA graphs with these weights, or with its only ones."""
    by_weights = (forward or {"weights": {}})["weights"]
    return by_weights.get(weights) or next(iter(by_weights.values()), {"modes": {}, "speedups": {}})


def over_mode(forward: Mapping | None, other: str, mode: str = GRAPHS) -> float | None:
    """Speedup over another mode, back to back; "compiled" is the fastest of COMPILED."""
    measured = of_weights(forward)
    over = measured["speedups"].get(mode, {})
    if other == "compiled":
        return min((over[name] for name in COMPILED if name in over), default=None)
    return over.get(other)


def graph_label(forward: Mapping) -> str:
    return sized(TITLES[forward["name"]], forward["size"])


def graphs(result: Mapping | None) -> list[Target]:
    """Rows of forwards replayed from CUDA graphs."""
    measured = list((result or {"graph_forwards": []})["graph_forwards"])

    def best_over(name: str, size: str, other: str) -> float | None:
        """The speedup in the run that has the other mode."""
        over = [over_mode(f, other) for f in measured if (f["name"], f["size"]) == (name, size)]
        return next((times for times in over if times is not None), None)

    names = {"eager": "eager", "compiled": "torch.compile", REDUCE_OVERHEAD: "reduce-overhead"}
    rows = [
        Target(
            f"with CUDA graphs over {names[other]}",
            sized(TITLES[name], size),
            aim,
            best_over(name, size, other),
            "×",
        )
        for name, size, other, aim in GRAPH_FORWARDS
    ]

    def figures(value: Callable[[Mapping], float | None]) -> Figures:
        """A figure for each forward, and a missing one for each model without forwards."""
        known = {f["name"] for f in measured}
        missing = [title for name, title in TITLES.items() if name not in known]
        return [(graph_label(f), value(f)) for f in measured] + [(title, None) for title in missing]

    rows.append(
        furthest(
            "with CUDA graphs, a forward's time over its kernels'",
            figures(lambda f: of_weights(f)["modes"].get(GRAPHS, {}).get("wall_over_busy")),
            GRAPH_WALL_OVER_BUSY,
            "×",
            is_upper_bound=True,
        )
    )
    rows.append(
        furthest(
            "the capturing call over a plain one",
            figures(lambda f: f["first_calls"].get(GRAPHS, {}).get("capturing_over_plain")),
            CAPTURING_OVER_PLAIN,
            "×",
            is_upper_bound=True,
        )
    )
    return rows


def evaluate(results: Mapping[str, Mapping]) -> list[Target]:
    """All rows, from the results by name: families and CPU times, and, if there are any, MEASURED_LATER and
    forwards with CUDA graphs."""
    measured = [name for name in FAMILIES if name not in MEASURED_LATER or name in results]
    entries = [entry for name in measured for entry in results[name]["workloads"]]
    large = [e for e in entries if e["bytes"] >= LARGE_BYTES]
    medium = [e for e in entries if MEDIUM_BYTES <= e["bytes"] < LARGE_BYTES]
    small = find(entries, "rms_norm", (2, 1024, 2048))
    rows = [
        worst(
            "64 MB and more: over the best peer",
            large,
            OVER_BEST_PEER_LARGE,
            lambda e: e["cold"]["over_best_peer"],
            "×",
        ),
        worst(
            "64 MB and more: of the large copy's rate",
            large,
            OF_LARGE_COPY,
            lambda e: e["cold"]["of_large_copy"],
            "×",
        ),
        worst(
            "16 to 64 MB: over the best peer",
            medium,
            OVER_BEST_PEER_MEDIUM,
            lambda e: e["cold"]["over_best_peer"],
            "×",
        ),
        *(
            Target(
                f"over the best peer, {cache}",
                label(small),
                RMS_NORM_SMALL,
                small[cache]["over_best_peer"],
                "×",
            )
            for cache in ("cold", "warm")
        ),
        over_compiled(
            entries, LAYER_NORM_MODULATE_OVER_COMPILED, "layer_norm_modulate", (4608, 3072)
        ),
        over_compiled(
            entries, QK_NORM_ROPE_OVER_COMPILED, "qk_norm_rope", (2, 8064, 2048), "coordinates"
        ),
        softmax(entries),
    ]
    for layout in ("interleaved", "half"):
        entry = find(entries, "rope_3d", (2, 480, 8, 64), layout)
        rows += [
            Target(
                f"time, {cache}",
                label(entry),
                ROPE_3D_MICROSECONDS,
                microseconds(entry, cache),
                " µs",
                is_upper_bound=True,
            )
            for cache in ("cold", "warm")
        ]
    for operation, variant, shape, published in PUBLISHED:
        entry = find(entries, operation, shape, variant)
        rows.append(
            Target(
                f"over a published {published:.0f} µs",
                label(entry),
                OVER_PUBLISHED,
                published / microseconds(entry),
                "×",
            )
        )
    host = [c for c in results["host"]["calls"] if not c["operation"].startswith("torch ")]
    slowest = max(host, key=lambda call: call["over_yardstick"])
    met = sum(call["over_yardstick"] <= HOST_OVER_TORCH for call in host)
    rows.append(
        Target(
            "host time over torch.nn.functional.rms_norm's",
            f"{met} of {len(host)}; the most: {slowest['operation']}",
            HOST_OVER_TORCH,
            slowest["over_yardstick"],
            "×",
            is_upper_bound=True,
        )
    )
    rows += attention(results.get("attention"))
    rows += models(results.get("models"))
    rows += model_forwards(results)
    return rows + graphs(results.get("cuda_graphs"))

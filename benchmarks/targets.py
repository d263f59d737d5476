"""What the operations should reach, and what the results say they do.

Nothing here is a result: each row is computed from the JSON of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

FAMILIES = ("norm", "gated_residual", "rope", "activation", "softmax")
MEASURED_LATER = ("attention", "models")  # whose rows stand without a figure until there is one
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
# Times of kernels published for these shapes on an H100, in microseconds, and how much faster to be.
PUBLISHED = (
    ("rms_norm", "", (1, 1024, 2048), 19.0),
    ("rms_norm", "", (2, 1024, 2048), 24.0),
    ("rms_norm", "", (4, 4096, 3072), 157.0),
    ("geglu", "none", (2, 1024, 4096), 30.0),
)
OVER_PUBLISHED = 2.0
# Attention: (batch, queries, keys, heads, head dim), how many times as fast as which peer.
PEER_NAMES = {"cudnn": "cuDNN", "flash": "Torch's flash attention", "fa3": "FA3"}
ATTENTION = (
    ((2, 8064, 8064, 32, 64), "fa3", 1.10),
    ((2, 8064, 8064, 32, 64), "cudnn", 1.25),
    ((2, 2688, 2688, 32, 64), "fa3", 1.08),
    ((1, 4608, 4608, 24, 128), "fa3", 1.00),
    ((1, 32760, 32760, 12, 128), "fa3", 1.03),
    ((2, 8064, 128, 32, 64), "cudnn", 1.35),
)
ATTENTION_ERROR_OVER = "fa3", 1.05
# Of the injected LTX-Video 2B: size, over which mode, how many times as fast.
MODEL_SIZE = "161x512x768"
MODELS = (("eager", 1.65), ("compiled", 1.16))
# Of what a ceiling can be: a clock may be a little above its nominal rate.
HIGHEST_CEILING_RATIO = 1.1


@dataclass(frozen=True)
class Target:
    """One row: what is asked, of which operation, and what was measured, if it was."""

    what: str
    of: str
    aim: float
    measured: float | None
    unit: str
    is_upper_bound: bool = False

    @property
    def missed_by(self) -> float:
        """By how much of the aim it is missed; 0 where it is met or was not measured."""
        if self.measured is None:
            return 0.0
        short = self.measured - self.aim if self.is_upper_bound else self.aim - self.measured
        return max(0.0, short / self.aim)

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return f"missed by {self.missed_by:.1%}" if self.missed_by else "met"


def label(entry: Mapping) -> str:
    name = ", ".join(filter(None, [entry["operation"], entry["variant"]]))
    return f"{name} {'×'.join(map(str, entry['shape']))}"


def worst(
    what: str, entries: Sequence[Mapping], aim: float, value: Callable[[Mapping], float], unit: str
) -> Target:
    """The row of the entry that is furthest behind; it says how many meet the aim."""
    if not entries:
        raise ValueError(f"the results have nothing to compare for: {what}")
    least = min(entries, key=value)
    met = sum(value(entry) >= aim for entry in entries)
    return Target(
        what, f"{met} of {len(entries)}; the least: {label(least)}", aim, value(least), unit
    )


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
    """Over QuACK in this run, or else over the rate that it had in another."""
    entry = find(entries, "softmax", (8192, 8192))
    if "quack" in entry["cold"]["over"]:
        over = entry["cold"]["over"]["quack"]
        return Target("over QuACK", label(entry), SOFTMAX_OVER_QUACK, over, "×")
    over = entry["cold"]["terabytes_per_second"]["ours"] / QUACK_SOFTMAX_RATE
    what = f"over QuACK's {QUACK_SOFTMAX_RATE} TB/s of another run (it is not in this one)"
    return Target(what, label(entry), SOFTMAX_OVER_QUACK, over, "×")


def attention(result: Mapping | None) -> list[Target]:
    """Times over the peers', then the worst error over FA3's on each kind of inputs.

    Rows without a figure where there are no results yet, or where the peer was not there.
    """
    entries = [] if result is None else result["workloads"]
    rows = []
    for shape, peer, aim in ATTENTION:
        plain = [e for e in entries if tuple(e["shape"]) == shape and not e["variant"]]
        measured = plain[0]["cold"]["over"].get(peer) if plain else None
        name = f"attention {'×'.join(map(str, shape))}"
        rows.append(Target(f"over {PEER_NAMES[peer]}", name, aim, measured, "×"))
    peer, aim = ATTENTION_ERROR_OVER
    inputs = list(entries[0]["error_over"]) if entries else []
    for kind in inputs or ["all"]:
        what = f"error over {PEER_NAMES[peer]}'s, {kind} inputs"
        ratios = [(e["error_over"][kind].get(peer), e) for e in entries]
        ratios = [(ratio, entry) for ratio, entry in ratios if ratio is not None]
        if not ratios:
            rows.append(Target(what, "attention", aim, None, "×", is_upper_bound=True))
            continue
        most, entry = max(ratios, key=lambda pair: pair[0])
        met = sum(ratio <= aim for ratio, _ in ratios)
        of = f"{met} of {len(ratios)}; the most: {label(entry)}"
        rows.append(Target(what, of, aim, most, "×", is_upper_bound=True))
    return rows


def models(result: Mapping | None) -> list[Target]:
    """The injected LTX-Video's forward over other modes."""
    speedups = {} if result is None else result["sizes"].get(MODEL_SIZE, {}).get("speedups", {})
    names = {"eager": "over eager", "compiled": "over torch.compile"}
    return [
        Target(
            names[mode],
            f"injected LTX-Video 2B, {MODEL_SIZE.replace('x', '×')}",
            aim,
            speedups.get("injected", {}).get(mode),
            "×",
        )
        for mode, aim in MODELS
    ]


def evaluate(results: Mapping[str, Mapping]) -> list[Target]:
    """All rows, from the results by name: those of the families and of the host, and those of
    attention and the models where there are any."""
    entries = [entry for name in FAMILIES for entry in results[name]["workloads"]]
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
    rows += attention(results.get("attention")) + models(results.get("models"))
    return rows

"""Finds the figures of a clip by color and motion, to compare a generated video with its caption.

Lengths are fractions of the clip's side, times are fractions of its duration.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from clips import BOUNCING, COLORS, DISTANCES, STRAIGHT, Figure, Scene
from skimage.measure import label

SIDE = 128  # Clips are resized to this side. The mean of neighboring pixels has less noise.
# A pixel with a larger chroma belongs to a figure. Grounds reach 0.22, a figure's dark rim has 0.37.
CHROMA = 0.32
HUE_RANGE = 45  # Degrees, the largest distance of a figure's pixel: colors are 25 to 74 apart.
# A smaller region is an artifact. The smallest shrunken star has 0.012.
AREA = 0.004
RELATIVE_AREA = 0.2  # A second figure has at least 0.53 of the first one's area, a fringe less.
SEEN = 0.5  # A figure must be seen in this share of frames. Figures may hide each other for a time.

# Drawn figures move by 0.46 to 0.62 in total, others stay. The motion between the limits is unclear.
MOVED, STAYED = 0.25, 0.12
JUMP = 0.2  # Of a figure between frames, in the median. Colored noise jumps farther.
# The residual of a linear fit, which 9 of 10 frames do not exceed: a straight path has 0, a bounce
# at least 0.1, a jump from start to end in the middle of the time 0.19.
STRAIGHT_RESIDUAL, BOUNCE_RESIDUAL = 0.05, 0.07
GROWTH = 1.5  # Drawn figures grow by a factor of 2.5 to 3.1.
TURN, TURN_RESIDUAL = 60, 20  # Degrees. Drawn figures turn steadily, by 120.

HARMONICS = (3, 4, 5)
SYMMETRY = {"triangle": 3, "square": 4, "cross": 4, "star": 5}
# In units of a figure's size. A mask without the dark rim is smaller, one of a blurred figure larger.
MARGINS = (-0.08, -0.04, 0.0, 0.04, 0.08)
# In units of features: those of a square and a cross are at least 0.11 apart, of a ball and a ring 0.21, of
# others 0.29.
SHAPE_DISTANCE = 0.22


def hue(rgb: np.ndarray) -> np.ndarray:
    """The angle in degrees on the plane of equal gray."""
    red, green, blue = np.moveaxis(rgb, -1, 0)
    return np.degrees(np.arctan2(3**0.5 * (green - blue), 2 * red - green - blue))


def hue_distance(hues: np.ndarray, colors: Sequence[str]) -> np.ndarray:
    """(colors, *hues.shape): the distance of hues from each color's hue in degrees."""
    return np.stack([np.abs((hues - hue(np.array(COLORS[c])) + 180) % 360 - 180) for c in colors])


@dataclass(frozen=True)
class Region:
    """The largest connected part of a mask: center, area, and complex harmonics of its outline."""

    x: float
    y: float
    area: float
    compactness: (
        float  # A disk has 1: its moment of inertia relative to the region's, at equal area.
    )
    harmonics: tuple[complex, ...]

    @property
    def features(self) -> np.ndarray:
        """Values that do not depend on place, size and angle."""
        return np.array([self.compactness, *np.abs(self.harmonics)])


def largest_region(mask: np.ndarray) -> Region | None:
    """The largest region of a square mask, or None if all are smaller than AREA."""
    labels = label(mask, connectivity=1)
    counts = np.bincount(labels.ravel())
    counts[0] = 0
    if counts.max() < AREA * mask.size:
        return None
    y, x = np.nonzero(labels == counts.argmax())
    center = complex(x.mean(), y.mean())
    offsets = x + 1j * y - center
    square = np.abs(offsets) ** 2
    waves = [np.sum(square * np.exp(1j * k * np.angle(offsets))) for k in HARMONICS]
    center = (center + 0.5 + 0.5j) / len(mask)
    compactness = len(x) ** 2 / (2 * np.pi * square.sum())
    harmonics = tuple(complex(wave / square.sum()) for wave in waves)
    return Region(center.real, center.imag, len(x) / mask.size, compactness, harmonics)


@functools.cache
def shape_features() -> dict[str, np.ndarray]:
    """(MARGINS, features) for each shape."""
    line = (torch.arange(SIDE) + 0.5) / SIDE * 4 - 2
    y, x = torch.meshgrid(line, line, indexing="ij")
    masks = {shape: [f(x, y).numpy() < m for m in MARGINS] for shape, f in DISTANCES.items()}
    return {s: np.stack([largest_region(m).features for m in each]) for s, each in masks.items()}


def are_whole(regions: list[Region]) -> np.ndarray:
    """Whether each region has most of the figure's largest area: not if it is hidden or shrunken."""
    areas = np.array([region.area for region in regions])
    return areas > np.quantile(areas, 0.9) / 2


def shape_of(regions: list[Region]) -> str:
    """The shape that most frames show. Only whole figures vote."""
    votes = []
    for region, is_whole in zip(regions, are_whole(regions), strict=True):
        if is_whole:
            known = shape_features()
            far = {s: np.linalg.norm(known[s] - region.features, axis=1).min() for s in known}
            nearest = min(far, key=far.get)
            votes.append(nearest if far[nearest] < SHAPE_DISTANCE else "")
    shape, count = Counter(votes).most_common(1)[0]
    return shape if count > len(votes) / 2 else ""


def linear(times: np.ndarray, values: Sequence[float], used: np.ndarray) -> tuple[float, ...]:
    """A linear fit's values at the start and the end, and the residual's 0.9 quantile."""
    fit = np.polyval(np.polyfit(times[used], np.array(values)[used], 1), times)
    return fit[0], fit[-1], float(np.quantile(np.abs(values - fit)[used], 0.9))


def motion_of(times: np.ndarray, regions: list[Region], shape: str) -> str:
    """The motion, or "" if it is unclear."""
    every, whole = np.full(len(times), True), are_whole(regions)
    x0, x1, x_residual = linear(times, [region.x for region in regions], whole)
    y0, y1, y_residual = linear(times, [region.y for region in regions], whole)
    small, large, _ = linear(times, [region.area**0.5 for region in regions], every)
    growth = max(large, 1e-3) / max(small, 1e-3)
    step = np.array([x1 - x0, y1 - y0])
    if abs(step[0]) > MOVED and x_residual < STRAIGHT_RESIDUAL and y_residual > BOUNCE_RESIDUAL:
        return next(m for m, sign in BOUNCING.items() if sign == np.sign(step[0]))
    if max(x_residual, y_residual) > STRAIGHT_RESIDUAL:
        return ""
    for motion, direction in STRAIGHT.items():
        along, across = step @ direction, abs(step @ direction[::-1])
        if along > MOVED and across < STAYED:
            return motion
    if np.abs(step).max() > STAYED:
        return ""
    if growth > GROWTH or growth < 1 / GROWTH:
        return "grows" if growth > 1 else "shrinks"
    if shape in SYMMETRY:
        k = SYMMETRY[shape]
        phases = np.angle([region.harmonics[HARMONICS.index(k)] for region in regions])
        start, end, residual = linear(times, np.degrees(np.unwrap(phases)) / k, every)
        if abs(end - start) > TURN and residual < TURN_RESIDUAL:
            return "turns"
    return ""


def detect(video: np.ndarray, count: int) -> list[Figure]:
    """At most `count` figures of a video (frames, height, width, 3) in uint8, the largest first.

    An unclear shape or motion is "".
    """
    pixels = torch.from_numpy(np.ascontiguousarray(video)).movedim(-1, 1).float() / 255
    pixels = torch.nn.functional.interpolate(pixels, (SIDE, SIDE), mode="area")
    pixels = pixels.movedim(1, -1).numpy()
    saturated = pixels.max(-1) - pixels.min(-1) > CHROMA
    hues = hue(pixels)
    nearest = hue_distance(hues[saturated], list(COLORS)).argmin(0)
    shares = np.bincount(nearest, minlength=len(COLORS)) / saturated.size
    order = [i for i in np.argsort(-shares, kind="stable")[:count] if shares[i] > 0]
    colors = [list(COLORS)[i] for i in order if shares[i] > RELATIVE_AREA * shares.max()]
    if not colors:
        return []
    far = hue_distance(hues, colors)
    figures = []
    for color, own in zip(colors, far, strict=True):
        masks = saturated & (own == far.min(0)) & (own < HUE_RANGE)
        seen = [(time, region) for time, m in enumerate(masks) if (region := largest_region(m))]
        if len(seen) >= SEEN * len(masks):
            times, regions = map(list, zip(*seen, strict=True))
            steps = np.hypot(np.diff([r.x for r in regions]), np.diff([r.y for r in regions]))
            if np.median(steps) < JUMP:
                shape = shape_of(regions)
                figures.append(Figure(color, shape, motion_of(np.array(times), regions, shape)))
    return figures


def score(scene: Scene, found: Sequence[Figure]) -> dict[str, float]:
    """The shares of the scene's figures with the right color, and with its right motion and shape."""
    by_color = {figure.color: figure for figure in found}
    pairs = [(figure, by_color.get(figure.color)) for figure in scene.figures]
    return {
        name: sum(f is not None and getattr(f, name) == getattr(w, name) for w, f in pairs)
        / len(pairs)
        for name in ("color", "motion", "shape")
    }

"""Short clips that are drawn from their captions, so that a video can be compared with its caption.

A scene has one or two figures that move over a ground: "A red ball bounces to the right over green
grass." Figures are the only saturated colors. Photographs are those in scikit-image's wheel.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

FRAMES, SIDE = 49, 256

# sRGB, 0 to 1. The hues are at least 25 degrees apart.
COLORS = {
    "red": (0.90, 0.08, 0.10),
    "orange": (1.00, 0.50, 0.00),
    "yellow": (0.98, 0.90, 0.05),
    "green": (0.05, 0.72, 0.15),
    "cyan": (0.05, 0.85, 0.90),
    "blue": (0.10, 0.20, 0.95),
    "purple": (0.55, 0.10, 0.85),
    "pink": (1.00, 0.25, 0.70),
}
SHAPES = ("ball", "square", "triangle", "star", "ring", "cross")
STRAIGHT = {"moves to the right": (1, 0), "moves to the left": (-1, 0)}
STRAIGHT |= {"moves up": (0, -1), "moves down": (0, 1)}
BOUNCING = {"bounces to the right": 1, "bounces to the left": -1}
MOTIONS = (*STRAIGHT, *BOUNCING, "grows", "shrinks", "turns")
ROUND = ("ball", "ring")  # these do not turn visibly

# Plain colors; the upper and the lower color; a photograph and the color that it is tinted with.
PLAIN = {"a white wall": (0.9,) * 3, "a gray wall": (0.5,) * 3, "a black wall": (0.1,) * 3}
GRADED = {
    "a blue sky": ((0.60, 0.69, 0.82), (0.85, 0.90, 0.94)),
    "a dark sky": ((0.08, 0.08, 0.16), (0.35, 0.32, 0.42)),
}
PHOTOGRAPHED = {
    "green grass": ("grass.png", (0.85, 1.0, 0.75)),
    "gravel": ("gravel.png", (1.0, 0.98, 0.93)),
    "a brick wall": ("brick.png", (1.0, 0.86, 0.80)),
    "a cup of coffee": ("coffee.png", None),
    "a cat": ("chelsea.png", None),
    "a rocket": ("rocket.jpg", None),
    "the moon": ("moon.png", (0.95, 0.97, 1.0)),
}
GROUNDS = (*PLAIN, *GRADED, *PHOTOGRAPHED)
GROUND_CHROMA = 0.22  # at most, the largest less the smallest of red, green and blue
PHOTOGRAPH_SIDE = 112  # pixels: fine texture would take most of a small autoencoder's attention
HELD_BACK = 10  # one caption in 10 is never drawn in training


@dataclass(frozen=True)
class Figure:
    color: str
    shape: str
    motion: str

    def __str__(self) -> str:
        article = "an" if self.color[0] in "aeiou" else "a"
        return f"{article} {self.color} {self.shape} {self.motion}"


@dataclass(frozen=True)
class Scene:
    """One figure, or two that move straight in different directions, over a ground."""

    figures: tuple[Figure, ...]
    ground: str

    @property
    def caption(self) -> str:
        text = f"{' and '.join(map(str, self.figures))} over {self.ground}."
        return text[0].upper() + text[1:]

    @property
    def is_held_back(self) -> bool:
        """Whether the caption belongs to the test set. Independent of Python's hash seed."""
        return sum(i * ord(letter) for i, letter in enumerate(self.caption, 1)) % HELD_BACK == 0


def random_scene(choose: random.Random, held_back: bool = False) -> Scene:
    """A scene of the training set, or of the test set. One in four has two figures."""
    while True:
        count = 1 + (choose.random() < 0.25)
        colors = choose.sample(list(COLORS), count)
        motions = choose.sample(MOTIONS if count == 1 else list(STRAIGHT), count)
        figures = []
        for color, motion in zip(colors, motions, strict=True):
            shapes = [s for s in SHAPES if motion != "turns" or s not in ROUND]
            figures.append(Figure(color, choose.choice(shapes), motion))
        scene = Scene(tuple(figures), choose.choice(GROUNDS))
        if scene.is_held_back == held_back:
            return scene


def words() -> list[str]:
    """All words of captions, and the full stop, in a fixed order."""
    found: dict[str, None] = {".": None}
    articles = ("A", "An", "a", "an", "and", "over")
    for text in (*articles, *COLORS, *SHAPES, *MOTIONS, *GROUNDS):
        found |= dict.fromkeys(text.split())
    return list(found)


# --------------------------------------------------------------------------------------------------
# Figures. Coordinates are in units of a figure's size; a distance is negative inside.


def polygon(sides: int, x: Tensor, y: Tensor, outer: float, inner: float) -> Tensor:
    """Distance from a regular polygon or star: its tips at `outer`, the points between at `inner`."""
    sector = math.pi / sides
    angle = torch.remainder(torch.atan2(x, -y) + sector, 2 * sector) - sector
    radius = torch.hypot(x, y)
    along, across = radius * torch.cos(angle), radius * torch.sin(angle).abs()
    low = (inner * math.cos(sector), inner * math.sin(sector))
    edge = math.hypot(outer - low[0], low[1])
    return ((along - outer) * low[1] + across * (outer - low[0])) / edge


def cross(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    bar = torch.maximum(x - 1.05, y - 0.36)
    return torch.minimum(bar, torch.maximum(y - 1.05, x - 0.36))


DISTANCES = {
    "ball": lambda x, y: torch.hypot(x, y) - 0.95,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) - 0.85,
    "triangle": lambda x, y: polygon(3, x, y, 1.25, 0.625),
    "star": lambda x, y: polygon(5, x, y, 1.2, 0.6),
    "ring": lambda x, y: (torch.hypot(x, y) - 0.74).abs() - 0.28,
    "cross": cross,
}


def path(motion: str, count: int, draw: random.Random, time: np.ndarray) -> dict[str, np.ndarray]:
    """A figure's center, size and angle at each time from 0 to 1. Lengths are fractions of the side."""
    size = draw.uniform(0.15, 0.19) if count == 1 else draw.uniform(0.14, 0.16)
    x = y = np.full_like(time, 0.5)
    angle = np.full_like(time, 0.0)
    scale = np.ones_like(time)
    if motion in STRAIGHT:
        start, end = draw.uniform(0.20, 0.27), draw.uniform(0.73, 0.80)
        along = start + (end - start) * time
        rest = np.full_like(time, draw.uniform(0.25, 0.75))
        dx, dy = STRAIGHT[motion]
        x, y = (along, rest) if dx else (rest, along)
        x, y = (1 - x if dx < 0 else x), (1 - y if dy < 0 else y)
    elif motion in BOUNCING:
        start, end = draw.uniform(0.19, 0.25), draw.uniform(0.75, 0.81)
        x = start + (end - start) * time
        x = 1 - x if BOUNCING[motion] < 0 else x
        phase = math.pi * (draw.uniform(1.4, 1.8) * time + draw.uniform(0.1, 0.9))
        y = draw.uniform(0.66, 0.76) - draw.uniform(0.30, 0.36) * np.abs(np.sin(phase))
    else:
        x, y = (np.full_like(time, draw.uniform(0.38, 0.62)) for _ in range(2))
        size = draw.uniform(0.20, 0.25)
        if motion == "turns":
            angle = 2 * math.pi / 3 * time
        else:
            scale = draw.uniform(0.40, 0.48) + time * draw.uniform(0.72, 0.85)
            scale = scale[::-1] if motion == "shrinks" else scale
    return {"x": x, "y": y, "size": size * scale, "angle": angle}


# --------------------------------------------------------------------------------------------------
# Grounds


@functools.cache
def photograph(name: str, tint: tuple[float, ...] | None, device: torch.device) -> Tensor:
    """(3, H, W), 0 to 1: an image of scikit-image's wheel, its colors, contrast and detail reduced."""
    with Image.open(resources.files("skimage") / "data" / name) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    result = torch.from_numpy(pixels).movedim(-1, 0).to(device)
    if tint is not None:
        result = result * torch.tensor(tint, device=device)[:, None, None]
    gray = result.mean(0, keepdim=True)
    chroma = result.amax(0, keepdim=True) - result.amin(0, keepdim=True)
    result = gray + (result - gray) * (GROUND_CHROMA / chroma.clamp(min=1e-4)).clamp(max=1)
    scale = PHOTOGRAPH_SIDE / min(result.shape[1:])
    result = interpolate(result[None], scale_factor=scale, mode="bilinear", antialias=True)[0]
    return 0.2 + 0.6 * result.clamp(0, 1)


def draw_ground(name: str, draw: random.Random, side: int, device: torch.device) -> Tensor:
    """(3, side, side), 0 to 1: a ground with random brightness, or a random part of a photograph."""
    brightness = draw.uniform(-0.04, 0.04)
    if name in PHOTOGRAPHED:
        image = photograph(*PHOTOGRAPHED[name], device)
        height, width = image.shape[1:]
        part = draw.uniform(0.75, 1.0) * min(height, width)
        # x and y of the part's center, and its half size, in grid_sample's range of -1 to 1.
        x = draw.uniform(-1, 1) * (1 - part / width)
        y = draw.uniform(-1, 1) * (1 - part / height)
        matrix = [[[part / width, 0, x], [0, part / height, y]]]
        grid = torch.nn.functional.affine_grid(
            torch.tensor(matrix, device=device), [1, 3, side, side], align_corners=False
        )
        return grid_sample(image[None], grid, "bilinear", "border", False)[0] + brightness
    upper, lower = GRADED.get(name) or (PLAIN[name],) * 2
    upper, lower = (torch.tensor(color, device=device)[:, None, None] for color in (upper, lower))
    weight = torch.linspace(0, 1, side, device=device)[:, None].expand(side, side)
    return upper + (lower - upper) * weight + brightness


# --------------------------------------------------------------------------------------------------
# Clips


@torch.no_grad()
def draw_clips(
    scenes: Sequence[Scene],
    seed: int,
    device: torch.device | str = "cpu",
    frames: int = FRAMES,
    side: int = SIDE,
) -> Tensor:
    """(scenes, 3, frames, side, side), -1 to 1: clips with random sizes, places and grounds.

    The same scenes and seed give the same clips.
    """
    draw, device = random.Random(seed), torch.device(device)
    time = np.linspace(0, 1, frames)
    grounds = [draw_ground(scene.ground, draw, side, device) for scene in scenes]
    clips = torch.stack(grounds)[:, :, None].repeat(1, 1, frames, 1, 1)
    for layer in (0, 1):
        paths: dict[str, list] = {shape: [] for shape in SHAPES}
        for number, scene in enumerate(scenes):
            if layer < len(scene.figures):
                figure = scene.figures[layer]
                values = path(figure.motion, len(scene.figures), draw, time)
                paths[figure.shape].append((number, COLORS[figure.color], values))
        for shape, drawn in paths.items():
            if drawn:
                _draw_figures(clips, shape, drawn)
    return clips.mul_(2).sub_(1).clamp_(-1, 1)


def _draw_figures(clips: Tensor, shape: str, drawn: list) -> None:
    """Draw figures of one shape, one for each listed clip."""
    side, device = clips.shape[-1], clips.device
    numbers, colors, paths = zip(*drawn, strict=True)
    at = {
        key: torch.from_numpy(np.stack([p[key] for p in paths])).float().to(device)[..., None, None]
        for key in paths[0]
    }
    pixel = (torch.arange(side, device=device) + 0.5) / side
    x, y = (pixel - at["x"]) / at["size"], (pixel[:, None] - at["y"]) / at["size"]
    cos, sin = torch.cos(at["angle"]), torch.sin(at["angle"])
    distance = DISTANCES[shape](cos * x + sin * y, cos * y - sin * x)
    opacity = (0.5 - distance * at["size"] * side).clamp(0, 1)[:, None]
    # A darker rim, which tells figures from grounds of the same color.
    shade = 1 - 0.45 * ((distance + 0.16) / 0.08).clamp(0, 1)[:, None]
    color = torch.tensor(colors, device=device)[:, :, None, None, None] * shade
    index = torch.tensor(numbers, device=device)
    clips[index] += opacity * (color - clips[index])


def random_clips(
    seed: int, batch: int, device: torch.device | str
) -> Iterator[tuple[list[Scene], Tensor]]:
    """Endless batches of random training scenes and their clips."""
    choose = random.Random(seed)
    while True:
        scenes = [random_scene(choose) for _ in range(batch)]
        yield scenes, draw_clips(scenes, choose.getrandbits(32), device)

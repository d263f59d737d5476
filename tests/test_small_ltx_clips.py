"""Drawn clips show what their captions say, and the detector finds it in them and nothing elsewhere."""

import random
import sys

import numpy as np
import pytest
import torch
from skimage.filters import gaussian

from conftest import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "examples" / "train_small_ltx"))
import clips
import detect
from clips import Figure, Scene

pytestmark = pytest.mark.usefixtures("_one_thread")
FRAMES, SIDE = 17, 128


def videos(scenes, seed=0, frames=FRAMES):
    """Drawn clips as the detector takes them: (frames, height, width, 3) in uint8."""
    drawn = clips.draw_clips(scenes, seed, frames=frames, side=SIDE)
    return list(((drawn + 1) * 127.5).round().to(torch.uint8).movedim(1, -1).numpy())


def video(color, shape, motion, ground="gravel", seed=0):
    return videos([Scene((Figure(color, shape, motion),), ground)], seed)[0]


def degraded(frames, noise):
    """A video as a small model may generate it: blurred, with weaker colors and noise."""
    # Two pixels of a clip with 256 pixels a side.
    result = gaussian(frames.astype(np.float32), sigma=(0, SIDE / 128, SIDE / 128, 0))
    gray = result.mean(-1, keepdims=True)
    result = gray + 0.85 * (result - gray) + 8 * noise.standard_normal(result.shape)
    return result.clip(0, 255).round().astype(np.uint8)


def random_scenes(count):
    choose = random.Random(3)
    return [clips.random_scene(choose) for _ in range(count)]


def test_detector_finds_what_the_caption_says():
    noise, scores = np.random.default_rng(0), {"drawn": [], "degraded": []}
    for seed, scene in enumerate(random_scenes(30)):
        drawn = videos([scene], seed)[0]
        for kind, frames in (("drawn", drawn), ("degraded", degraded(drawn, noise))):
            found = detect.detect(frames, len(scene.figures))
            scores[kind].append(detect.score(scene, found))
    for kind, each in scores.items():
        for name in ("color", "motion", "shape"):
            assert np.mean([score[name] for score in each]) >= 0.98, (kind, name)


@pytest.mark.parametrize("shape", clips.SHAPES)
def test_standing_figure_has_no_motion(shape):
    frames = np.repeat(video("purple", shape, "moves up")[:1], FRAMES, axis=0)
    noise = np.random.default_rng(0)
    assert detect.detect(frames, 1) == [Figure("purple", shape, "")]
    assert detect.detect(degraded(frames, noise), 1) == [Figure("purple", shape, "")]


def test_jump_is_no_motion():
    frames = video("red", "square", "moves to the right")
    frames[: FRAMES // 2], frames[FRAMES // 2 :] = frames[0], frames[-1]
    assert detect.detect(frames, 1) == [Figure("red", "square", "")]


def test_unknown_shape_is_unclear():
    frames = np.full((FRAMES, SIDE, SIDE, 3), 128, dtype=np.uint8)
    for time, frame in enumerate(frames):
        frame[60:68, 5 + 3 * time : 55 + 3 * time] = (230, 20, 25)
    assert detect.detect(frames, 1) == [Figure("red", "", "moves to the right")]


def test_small_patch_and_swapped_channels():
    """A small patch of another color is no figure."""
    frames = video("red", "star", "moves up", "a gray wall")
    frames[:, 5:13, 5:13] = (10, 50, 240)  # 64 pixels: a sixteenth of the figure or less
    assert detect.detect(frames, 2) == [Figure("red", "star", "moves up")]
    assert detect.detect(frames[..., ::-1], 2) == [Figure("blue", "star", "moves up")]


@pytest.mark.parametrize("ground", clips.GROUNDS)
def test_ground_has_no_figure(ground):
    frames = videos([Scene((), ground)])[0]
    assert detect.detect(frames, 2) == []
    assert detect.detect(degraded(frames, np.random.default_rng(0)), 2) == []


@pytest.mark.parametrize("size", [1, 4, 16])
def test_noise_has_no_figure(size):
    """White noise, and noise with squares of some pixels."""
    shape = (FRAMES, SIDE // size, SIDE // size, 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert detect.detect(noise.repeat(size, 1).repeat(size, 2), 2) == []


@pytest.mark.parametrize(
    ("motion", "change", "expected"),
    [
        ("moves to the right", np.s_[:, :, ::-1], "moves to the left"),
        ("bounces to the left", np.s_[:, :, ::-1], "bounces to the right"),
        ("moves up", np.s_[:, ::-1], "moves down"),
        ("moves to the left", np.s_[::-1], "moves to the right"),
        ("bounces to the right", np.s_[::-1], "bounces to the left"),
        ("grows", np.s_[::-1], "shrinks"),
        ("turns", np.s_[::-1], "turns"),
    ],
)
def test_mirrored_and_reversed_clips(motion, change, expected):
    """Mirrored to the side, upside down, or played backward."""
    frames = video("green", "square", motion)
    assert detect.detect(frames, 1) == [Figure("green", "square", motion)]
    assert detect.detect(frames[change], 1) == [Figure("green", "square", expected)]


def test_score_assigns_motion_and_shape_by_color():
    ball, cross = Figure("red", "ball", "moves up"), Figure("cyan", "cross", "moves to the left")
    found = detect.detect(videos([Scene((ball, cross), "the moon")])[0], 2)
    right = Scene((cross, ball), "gravel")
    swapped = Scene(
        (Figure("cyan", "ball", "moves up"), Figure("red", "cross", "moves to the left")), "gravel"
    )
    half = Scene((ball, Figure("pink", "cross", "moves to the left")), "gravel")
    assert detect.score(right, found) == {"color": 1, "motion": 1, "shape": 1}
    assert detect.score(swapped, found) == {"color": 1, "motion": 0, "shape": 0}
    assert detect.score(half, found) == {"color": 0.5, "motion": 0.5, "shape": 0.5}
    assert detect.score(right, []) == {"color": 0, "motion": 0, "shape": 0}


# --------------------------------------------------------------------------------------------------
# Clips


def test_seed_determines_the_clip():
    scenes = random_scenes(3)
    first, again, other = (clips.draw_clips(scenes, seed, frames=3, side=32) for seed in (1, 1, 2))
    assert first.shape == (3, 3, 3, 32, 32)
    assert first.min() >= -1 and first.max() <= 1
    assert torch.equal(first, again)
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_held_back_captions_are_not_drawn_in_training():
    choose = random.Random(0)
    trained = {clips.random_scene(choose).caption for _ in range(1000)}
    tested = {clips.random_scene(choose, held_back=True).caption for _ in range(100)}
    assert len(tested) > 60
    assert not trained & tested
    batch, drawn = next(clips.random_clips(0, 2, "cpu"))
    assert len(drawn) == 2
    assert not any(scene.is_held_back for scene in batch)


def test_one_caption_in_ten_is_held_back():
    scenes = [
        Scene((Figure(color, shape, motion),), ground)
        for color in clips.COLORS
        for shape in clips.SHAPES
        for motion in clips.MOTIONS
        for ground in clips.GROUNDS
    ]
    assert len({scene.caption for scene in scenes}) == len(scenes)
    is_held_back = np.array([scene.is_held_back for scene in scenes])
    for text in (*clips.COLORS, *clips.SHAPES, *clips.MOTIONS, *clips.GROUNDS):
        with_text = [text in scene.caption for scene in scenes]
        assert 0.05 < is_held_back[with_text].mean() < 0.15, text


def test_words_are_those_of_captions():
    choose = random.Random(0)
    captions = [clips.random_scene(choose, held_back).caption for held_back in [False, True] * 300]
    used = {word for caption in captions for word in caption.replace(".", " .").split()}
    assert sorted(used) == sorted(clips.words())


def test_caption():
    figures = Figure("orange", "star", "moves up"), Figure("red", "ring", "moves down")
    assert Scene(figures[:1], "gravel").caption == "An orange star moves up over gravel."
    assert Scene(figures, "the moon").caption == (
        "An orange star moves up and a red ring moves down over the moon."
    )


def test_figures_are_drawn_on_their_paths(monkeypatch):
    """The figure in front has its color inside its outline at each time, and not outside."""
    paths, path = [], clips.path
    monkeypatch.setattr(clips, "path", lambda *args: paths.append(path(*args)) or paths[-1])
    scenes = random_scenes(40)
    drawn = (clips.draw_clips(scenes, 0, frames=9, side=SIDE) + 1) / 2
    second = iter(paths[len(scenes) :])
    for scene, clip, first in zip(scenes, drawn, paths, strict=False):
        figure, at = scene.figures[-1], next(second) if len(scene.figures) == 2 else first
        color = torch.tensor(clips.COLORS[figure.color])
        inside = 0.78 if figure.shape == "ring" else 0.0
        for time in range(9):

            def pixel(offset, time=time, clip=clip, at=at):
                x = at["x"][time] + offset * at["size"][time]
                return clip[:, time, int(at["y"][time] * SIDE), int(x * SIDE)]

            assert torch.allclose(pixel(inside), color, atol=0.02), (scene, time)
            if len(scene.figures) == 1 and 0.25 < at["x"][time] < 0.7:
                assert not torch.allclose(pixel(1.35), color, atol=0.1), (scene, time)
    assert next(second, None) is None


@pytest.mark.parametrize("ground", clips.GROUNDS)
def test_grounds_have_weak_colors(ground):
    for seed in range(5):
        drawn = (clips.draw_clips([Scene((), ground)], seed, frames=1, side=SIDE)[0] + 1) / 2
        assert (drawn.amax(0) - drawn.amin(0)).max() <= clips.GROUND_CHROMA + 1e-5

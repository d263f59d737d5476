"""Sizes of images and videos in pixels, and their numbers of transformer tokens.

For models whose autoencoder and patches map 16x16 pixels, and in videos 4 frames, to one token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOKEN_PIXELS = 16  # 8 of the autoencoder times 2 of a patch
TOKEN_FRAMES = 4
PATCH = 2  # height and width of a token in latent pixels


@dataclass(frozen=True)
class ImageSize:
    """Size of an image in pixels and tokens."""

    height: int
    width: int

    @property
    def latent(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.height // TOKEN_PIXELS, self.width // TOKEN_PIXELS

    @property
    def unpacked(self) -> tuple[int, int]:
        """Rows and columns of the latent before patching."""
        rows, columns = self.latent
        return rows * PATCH, columns * PATCH

    @property
    def tokens(self) -> int:
        return math.prod(self.latent)

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True)
class VideoSize:
    """Size of a video in pixels and tokens."""

    frames: int
    height: int
    width: int

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens."""
        frames = -(-self.frames // TOKEN_FRAMES)  # the first frame may be alone
        return frames, self.height // TOKEN_PIXELS, self.width // TOKEN_PIXELS

    @property
    def unpacked(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the latent before patching."""
        frames, rows, columns = self.latent
        return frames, rows * PATCH, columns * PATCH

    @property
    def tokens(self) -> int:
        return math.prod(self.latent)

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


def _numbers(text: str, form: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split("x")]
    except ValueError:
        numbers = []
    if len(numbers) != form.count("x") + 1 or min(numbers) < 1:
        raise ValueError(f"a size is {form}, got {text!r}")
    if any(number % TOKEN_PIXELS for number in numbers[-2:]):
        raise ValueError(f"height and width must be multiples of {TOKEN_PIXELS}, got {text}")
    return numbers


def parse_image_size(text: str) -> ImageSize:
    """Parses HEIGHTxWIDTH; ValueError if it is malformed or the models do not support the size."""
    return ImageSize(*_numbers(text, "HEIGHTxWIDTH"))


def parse_video_size(text: str) -> VideoSize:
    """Parses FRAMESxHEIGHTxWIDTH; ValueError if it is malformed or the models do not support the size."""
    return VideoSize(*_numbers(text, "FRAMESxHEIGHTxWIDTH"))

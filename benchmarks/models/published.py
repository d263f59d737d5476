"""What a published model is to the benchmarks, and sizes of images and videos.

Each model is an object of a class that derives from `Published`. Classes of models that are related stand in
one file, such as flux.py and ltx.py. Those without relatives are in images.py and videos.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from benchmarks import models

PATCH = 2  # height and width of a token in latent pixels


class Size:
    """Size in pixels and in tokens, for models whose autoencoder and patches map 16x16 pixels, and in videos
    4 frames, to one token. Other models have subclasses."""

    token_pixels: ClassVar[int] = 16  # 8 of the autoencoder times 2 of a patch
    form: ClassVar[str]
    height: int
    width: int

    @property
    def latent(self) -> tuple[int, ...]:
        """Rows and columns of tokens, in videos after frames."""
        return self.height // self.token_pixels, self.width // self.token_pixels

    @property
    def unpacked(self) -> tuple[int, ...]:
        """`latent`, with rows and columns of the latent before patching."""
        *frames, rows, columns = self.latent
        return (*frames, rows * PATCH, columns * PATCH)

    @property
    def tokens(self) -> int:
        return math.prod(self.latent)

    def check(self) -> None:
        """ValueError if the model does not support the size."""
        if self.height % self.token_pixels or self.width % self.token_pixels:
            raise ValueError(
                f"height and width must be multiples of {self.token_pixels}, got {self}"
            )

    @classmethod
    def parse(cls, text: str) -> Any:
        """Parses HEIGHTxWIDTH, of a video FRAMESxHEIGHTxWIDTH; ValueError if it is malformed or the model
        does not support the size."""
        try:
            numbers = [int(number) for number in text.split("x")]
        except ValueError:
            numbers = []
        if len(numbers) != cls.form.count("x") + 1 or min(numbers) < 1:
            raise ValueError(f"a size is {cls.form}, got {text!r}")
        size = cls(*numbers)
        size.check()
        return size

    def __str__(self) -> str:
        return "x".join(map(str, dataclasses.astuple(self)))


@dataclass(frozen=True)
class ImageSize(Size):
    height: int
    width: int
    form: ClassVar[str] = "HEIGHTxWIDTH"


@dataclass(frozen=True)
class VideoSize(Size):
    frames: int
    height: int
    width: int
    form: ClassVar[str] = "FRAMESxHEIGHTxWIDTH"
    token_frames: ClassVar[int] = 4

    @property
    def latent(self) -> tuple[int, ...]:
        # The first frame may be alone.
        return -(-self.frames // self.token_frames), *super().latent


@dataclass(frozen=True)
class Given:
    """What the arguments of a forward are made of.

    Attributes:
        normal: `models.normal` with the device, dtype and seed.
    """

    size: Any
    device: torch.device
    dtype: torch.dtype
    seed: int
    timestep: float
    text_tokens: int
    normal: Callable[..., torch.Tensor]

    def timesteps(self, count: int = 1) -> torch.Tensor:
        """The timestep of each sample, (count,), float32, or int64 if it is an integer."""
        return torch.tensor([self.timestep], device=self.device).expand(count)

    def guided_latents(self, *shape: int) -> torch.Tensor:
        """Latents of one sample with this shape, once for each branch of guidance, (2, *shape)."""
        latents = self.normal(1, *shape)
        return torch.cat([latents, latents])

    def text_mask(self, prompt_tokens: int) -> torch.Tensor:
        """Whether a token of the text is the prompt's, (text tokens,). Padding follows."""
        return torch.arange(self.text_tokens, device=self.device) < prompt_tokens


class Published:
    """A published model with random weights, and the arguments that its pipeline passes in a forward.

    Attributes:
        key: its name in options and results.
        name: with its number of blocks where it has fewer than published. `tiny_name` is the tiny model's.
        cls: diffusers' class.
        config: its configuration, where it differs from diffusers' defaults.
        tiny_config: of the tiny model; default: `models.small_config` with `tiny_changes`.
        published_blocks: the numbers of blocks of stacks that have fewer here.
        batch: of a forward; 2 with guidance.
        text_tokens: of a forward at a published size.
        sizes, tiny_sizes: published sizes, and the tiny model's.
        small: arguments of `inputs` that bench_host_forward.py gives it.
        takes_return_dict: whether a forward does.
        thousandfold: names of inputs that the model multiplies by 1000 in its own dtype.
        timestep: the default timestep of `inputs`.
    """

    key: str
    name: str
    tiny_name: str
    cls: type
    config: Mapping[str, Any] = {}
    tiny_config: Mapping[str, Any] | None = None
    tiny_changes: Mapping[str, Any] = {}
    published_blocks: Mapping[str, int] = {}
    batch = 1
    text_tokens: int
    sizes: tuple[Any, ...]
    tiny_sizes: tuple[Any, ...]
    small: Mapping[str, Any]
    takes_return_dict = True
    thousandfold: tuple[str, ...] = ()
    timestep: float = 800.0

    def name_of(self, is_tiny: bool) -> str:
        return self.tiny_name if is_tiny else self.name

    def parse_size(self, text: str) -> Any:
        """A size that an option names; ValueError if it is malformed or the model does not support it."""
        return type(self.sizes[0]).parse(text)

    def transformer(
        self, device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
    ) -> Any:
        """The model that denoises, its random weights made on the device."""
        config = self.config
        if tiny:
            small = self.tiny_config or models.small_config(self.cls.__name__)
            config = {**small, **self.tiny_changes}
        return models.build(self.cls, config, device, dtype, seed)

    def complete(self, model: torch.nn.Module) -> str:
        """Add blocks up to the published number, over the weights of those that the model has.

        Their modules are their own. The last block stays the last: it may be of another kind.

        Returns:
            The whole model's name.
        """
        for name, count in self.published_blocks.items():
            *blocks, last = model.get_submodule(name)
            sources = blocks or [last]
            more = [models.twin(sources[i % len(sources)]) for i in range(count - len(blocks) - 1)]
            model.set_submodule(name, torch.nn.ModuleList([*blocks, *more, last]))
        return self.name.partition(", ")[0] if self.published_blocks else self.name

    def inputs(
        self,
        model: Any,
        size: Any,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        timestep: float | None = None,
        text_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Arguments of a forward as the pipeline passes them, with guidance the negative prompt first."""
        given = Given(
            *(size, device, dtype, seed),
            self.timestep if timestep is None else timestep,
            self.text_tokens if text_tokens is None else text_tokens,
            models.normal(device, dtype, seed),
        )
        more = {"return_dict": False} if self.takes_return_dict else {}
        return {**self.arguments(model, given), **more}

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """Those of `inputs`, except return_dict."""
        raise NotImplementedError


class PublishedImage(Published):
    sizes: tuple[Any, ...] = (ImageSize(1024, 1024),)
    tiny_sizes: tuple[Any, ...] = (ImageSize(64, 96),)
    small: Mapping[str, Any] = {"size": ImageSize(128, 128), "text_tokens": 64}


class PublishedVideo(Published):
    tiny_sizes: tuple[Any, ...] = (VideoSize(5, 64, 96),)
    small: Mapping[str, Any] = {"size": VideoSize(1, 128, 128), "text_tokens": 64}

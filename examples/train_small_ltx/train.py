"""Train the small LTX-Video of the examples on clips that are drawn while it trains.

First the autoencoder, then text encoder and transformer by flow matching. A call stops after --minutes and
keeps a checkpoint; the next call goes on from there, until the pipeline and the plot of the loss are
written. Needs one GPU, and the packages of requirements/test.txt.

    python examples/train_small_ltx/train.py --minutes 9
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import matplotlib
import torch
from clips import FRAMES, SIDE, draw_clips, random_clips, random_scene, words
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import max_pool3d, mse_loss
from tqdm import tqdm
from transformers import T5Config, T5EncoderModel, T5TokenizerFast

# Autoencoder. Its batches are crops of drawn clips.
POOL, REDRAWN_EVERY = 1024, 4000
CROPS, CROP_FRAMES, CROP_SIDE = 16, 17, 128
FIGURE_WEIGHT, FIGURE_CHROMA, FIGURE_MARGIN = 4, 0.8, 4  # in the loss; of a range of 2; pixels
LATENT_NOISE = 0.1  # standard deviation over that of the latents: the denoiser is not exact either

# Transformer.
TRAINING_CLIPS, ENCODED_AT_ONCE, BATCH = 65536, 16, 256
WITHOUT_CAPTION = 0.1  # for classifier-free guidance
# Logit of the noise level: normal with this mean and standard deviation. The outline of a figure is decided
# at levels from 0.9 to 0.97. 29% of the samples are there, and 96% of the shapes of 64 held-back captions
# are right. With a mean of 0.74 and a deviation of 1.0 it was 7%, and at best 80%.
NOISE_MEAN, NOISE_STD = 1.8, 1.2
FRAME_RATE = 25  # LTXPipeline's default; it scales the positions in time
AVERAGE = 0.999  # decay of the weights' moving average, which is what is saved

CURVE_POINTS = 200

# The small LTX-Video: diffusers' and transformers' classes, a few million parameters.
TEXT_TOKENS = 128  # as LTXPipeline pads a prompt
TEXT_SIZE = 128


def make_tokenizer() -> T5TokenizerFast:
    """A tokenizer of the captions' words; others are <unk>."""
    pieces = ["<pad>", "</s>", "<unk>", *(word if word == "." else f"▁{word}" for word in words())]
    return T5TokenizerFast(
        vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=TEXT_TOKENS
    )


def make_pipeline(seed: int = 0) -> LTXPipeline:
    """An untrained pipeline in float32 on the CPU."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    text_config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_SIZE,
        d_kv=32,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return LTXPipeline(
        tokenizer=tokenizer,
        text_encoder=T5EncoderModel(text_config),
        transformer=LTXVideoTransformer3DModel(
            num_layers=6,
            num_attention_heads=4,
            attention_head_dim=64,
            cross_attention_dim=256,
            caption_channels=TEXT_SIZE,
        ),
        # As in LTX-Video 0.9.5, down- and upsampling have a residual path: it trains much faster.
        vae=AutoencoderKLLTXVideo(
            block_out_channels=(32, 64, 64, 128),
            down_block_types=("LTXVideo095DownBlock3D",) * 3,
            downsample_type=("spatiotemporal",) * 3,
            layers_per_block=(1,) * 4,
            spatio_temporal_scaling=(True,) * 3,
            decoder_block_out_channels=(32, 32, 64, 128),
            decoder_layers_per_block=(1,) * 5,
            upsample_residual=(True,) * 4,
        ),
        # LTX-Video's schedule.
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
    )


def save(pipe: LTXPipeline, folder: Path) -> None:
    """Convert the pipeline to bfloat16 in place and save it for `LTXPipeline.from_pretrained`."""
    pipe.to(torch.bfloat16).save_pretrained(folder)


class OutOfTime(Exception):
    """The call's minutes are over; a checkpoint was written."""


class Stage:
    """A training run with a checkpoint: AdamW with warm-up and cosine decay, average of the weights."""

    def __init__(self, name: str, folder: Path, steps: int, rate: float, model: nn.Module):
        self.name, self.file, self.steps, self.rate = name, folder / f"{name}.pt", steps, rate
        self.model, self.step, self.losses = model, 0, []
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        is_cuda = self.parameters[0].is_cuda
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=is_cuda
        )
        self.average = [p.detach().clone() for p in self.parameters]
        if self.file.exists():
            saved = torch.load(self.file, map_location=self.parameters[0].device)
            model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.average, self.losses, self.step = saved["average"], saved["losses"], saved["step"]

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"average": self.average, "losses": self.losses, "step": self.step}
        torch.save(state, self.file.with_suffix(".part"))
        self.file.with_suffix(".part").replace(self.file)

    def learning_rate(self) -> float:
        warm_up = min(1.0, (self.step + 1) / 200)
        return (
            self.rate
            * warm_up
            * (0.02 + 0.98 * (1 + math.cos(math.pi * self.step / self.steps)) / 2)
        )

    def run(self, loss_of: Callable[[int], Tensor], deadline: float) -> None:
        """Train up to the last step, then take the averaged weights; OutOfTime after the deadline."""
        curve: list[Tensor] = []
        progress = tqdm(
            initial=self.step, total=self.steps, desc=self.name, unit="step", mininterval=15
        )
        every = max(1, self.steps // CURVE_POINTS)
        self.model.train()
        while self.step < self.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            loss = loss_of(self.step)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            decay = min(AVERAGE, self.step / (self.step + 10))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)
            curve.append(loss.detach())
            progress.update()
            if self.step % every == 0 or self.step == self.steps:
                mean = float(torch.stack(curve).mean())  # waits for the GPU
                if not math.isfinite(mean):
                    raise click.ClickException(f"{self.name}: the loss is not finite.")
                self.losses.append((self.step, mean))
                curve.clear()
                progress.set_postfix(loss=f"{mean:.4f}")
                is_last = self.step == self.steps
                if is_last or time.monotonic() > deadline:
                    self.save()
                    if not is_last:
                        raise OutOfTime
        progress.close()
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.average, strict=True):
                parameter.copy_(average)
        self.model.eval()


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU. CPUs convolve float32 faster."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def draw_pool(seed: int, count: int, device: torch.device) -> Tensor:
    """(count, 3, FRAMES, SIDE, SIDE) in uint8: clips of training scenes."""
    pool = torch.empty(count, 3, FRAMES, SIDE, SIDE, dtype=torch.uint8, device=device)
    for part, (_, clips) in zip(pool.split(16), random_clips(seed, 16, device), strict=False):
        part.copy_(((clips[: len(part)] + 1) * 127.5).round())
    return pool


def random_crops(pool: Tensor, draw: random.Random) -> Tensor:
    """(CROPS, 3, CROP_FRAMES, CROP_SIDE, CROP_SIDE): random parts of clips in space and time."""
    crops = []
    for _ in range(CROPS):
        frame = draw.randint(0, FRAMES - CROP_FRAMES)
        y, x = (draw.randint(0, SIDE - CROP_SIDE) for _ in range(2))
        clip = pool[draw.randrange(len(pool)), :, frame : frame + CROP_FRAMES]
        crops.append(clip[..., y : y + CROP_SIDE, x : x + CROP_SIDE])
    return torch.stack(crops)


def reconstruction_loss(vae, crops: Tensor) -> Tensor:
    """Mean absolute error of crops in uint8, larger for figures, which are few of the pixels."""
    original = crops.float() / 127.5 - 1
    with autocast(crops.device):
        latents = vae.encode(original).latent_dist.mean
        noise = torch.randn_like(latents) * latents.detach().float().std()
        decoded = vae.decode(latents + LATENT_NOISE * noise).sample
    is_figure = original.amax(1, keepdim=True) - original.amin(1, keepdim=True) > FIGURE_CHROMA
    window, margin = 2 * FIGURE_MARGIN + 1, FIGURE_MARGIN
    near = max_pool3d(is_figure.float(), (1, window, window), 1, (0, margin, margin))
    weight = 1 + FIGURE_WEIGHT * near
    error = (decoded.float() - original).abs().mean(1, keepdim=True)
    return (error * weight).sum() / weight.sum()


def train_autoencoder(
    pipe, folder: Path, steps: int, seed: int, deadline: float, count: int
) -> list:
    vae = pipe.vae
    stage = Stage("autoencoder", folder, steps, 1e-3, vae)
    draw = random.Random(seed + stage.step)
    pool = torch.empty(0)
    # Steps are small: CUDA graphs take the host's time out of them.
    compiled = torch.compile(reconstruction_loss, mode="reduce-overhead", dynamic=False)

    def loss_of(step: int) -> Tensor:
        nonlocal pool
        if step % REDRAWN_EVERY == 0 or not len(pool):
            del pool
            pool = draw_pool(seed + step, count, vae.device)
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(vae, random_crops(pool, draw)).clone()

    stage.run(loss_of, deadline)
    # Latents are not random: the smallest variance. Its logarithm is the last channel.
    vae.encoder.conv_out.conv.weight.data[-1] = 0
    vae.encoder.conv_out.conv.bias.data[-1] = -30
    return stage.losses


@torch.no_grad()
def encoded_clips(pipe, folder: Path, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Latents (clips, tokens, channels) in bfloat16 and token ids (clips, TEXT_TOKENS) of drawn clips.

    They are normalized by each channel's mean and the standard deviation of all, which become the
    autoencoder's `latents_mean` and `latents_std`. Channels that matter less stay smaller.
    """
    file, vae = folder / "latents.pt", pipe.vae
    if file.exists():
        saved = torch.load(file, map_location=vae.device)
    else:
        latents, captions = [], []
        batches = random_clips(seed + 1, ENCODED_AT_ONCE, vae.device)
        for _ in tqdm(range(count // ENCODED_AT_ONCE), desc="encoding", mininterval=15):
            scenes, clips = next(batches)
            with autocast(vae.device):
                latents.append(vae.encode(clips).latent_dist.mode().bfloat16())
            captions += [scene.caption for scene in scenes]
        latents = torch.cat(latents)
        mean = torch.stack([part.float().mean((0, 2, 3, 4)) for part in latents.split(512)]).mean(0)
        square = [
            (part.float() - mean.view(1, -1, 1, 1, 1)).square().mean()
            for part in latents.split(512)
        ]
        std = torch.stack(square).mean().sqrt().expand(len(mean))
        saved = {"mean": mean, "std": std.clone()}
        saved["tokens"] = torch.cat(
            [
                pipe._pack_latents(pipe._normalize_latents(part, mean, saved["std"])).bfloat16()
                for part in latents.split(512)
            ]
        )
        saved["text"] = token_ids(pipe, captions)
        torch.save(saved, file)
    vae.latents_mean.copy_(saved["mean"])
    vae.latents_std.copy_(saved["std"])
    return saved["tokens"], saved["text"]


def token_ids(pipe, captions: list[str]) -> Tensor:
    """(captions, TEXT_TOKENS), padded as LTXPipeline pads."""
    ids = pipe.tokenizer(
        captions, padding="max_length", max_length=TEXT_TOKENS, return_tensors="pt"
    ).input_ids
    return ids.to(pipe.vae.device)


class Denoiser(nn.Module):
    """Text encoder and transformer, called as LTXPipeline calls them."""

    def __init__(self, pipe, frames: int, side: int):
        super().__init__()
        self.text_encoder, self.transformer = pipe.text_encoder, pipe.transformer
        in_time, in_space = pipe.vae_temporal_compression_ratio, pipe.vae_spatial_compression_ratio
        self.size = {
            "num_frames": (frames - 1) // in_time + 1,
            "height": side // in_space,
            "width": side // in_space,
            "rope_interpolation_scale": (in_time / FRAME_RATE, in_space, in_space),
        }
        self.padding = pipe.tokenizer.pad_token_id

    def forward(self, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        return self.transformer(
            noisy,
            encoder_hidden_states=self.text_encoder(text)[0],  # LTXPipeline passes no mask here
            timestep=sigma * 1000,
            encoder_attention_mask=text != self.padding,
            return_dict=False,
            **self.size,
        )[0]


def train_transformer(
    pipe, folder: Path, steps: int, seed: int, deadline: float, count: int, batch: int
):
    tokens, text = encoded_clips(pipe, folder, seed, count)
    if time.monotonic() > deadline:
        raise OutOfTime
    denoiser = Denoiser(pipe, FRAMES, SIDE).to(tokens.device)
    stage = Stage("transformer", folder, steps, 1e-3, denoiser)
    if tokens.is_cuda:
        denoiser.compile(dynamic=False)
    no_caption = token_ids(pipe, [""])
    draw = torch.Generator(tokens.device).manual_seed(seed + stage.step)

    def loss_of(step: int) -> Tensor:
        chosen = torch.randint(len(tokens), (batch,), generator=draw, device=tokens.device)
        clean = tokens[chosen].float()
        noise = torch.randn(clean.shape, generator=draw, device=tokens.device)
        logit = torch.randn(batch, generator=draw, device=tokens.device) * NOISE_STD + NOISE_MEAN
        sigma = logit.sigmoid()
        dropped = torch.rand(batch, 1, generator=draw, device=tokens.device) < WITHOUT_CAPTION
        caption = torch.where(dropped, no_caption, text[chosen])
        level = sigma[:, None, None]
        with autocast(tokens.device):
            velocity = denoiser((1 - level) * clean + level * noise, sigma, caption)
        return mse_loss(velocity.float(), noise - clean)

    stage.run(loss_of, deadline)
    return stage.losses


def plot_losses(curves: dict[str, list], file: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "losses"
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (name, curve) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        axes.plot(*zip(*curve, strict=True))
        axes.set(title=name, xlabel="step", ylabel="loss", yscale="log")
    figure.savefig(file, metadata={"Date": None})


@torch.no_grad()
def save_reconstruction(pipe, file: Path) -> None:
    """Frames of drawn clips above their reconstructions, to look at."""
    choose = random.Random(1)
    clips = draw_clips([random_scene(choose, held_back=True) for _ in range(4)], 1, pipe.vae.device)
    with torch.compiler.set_stance("force_eager"):
        decoded = pipe.vae.decode(pipe.vae.encode(clips).latent_dist.mode()).sample.clamp(-1, 1)
    click.echo(
        f"PSNR of reconstructions: {10 * math.log10(4 / float((clips - decoded).square().mean())):.1f} dB"
    )
    pictures = torch.stack([clips, decoded], 1)[:, :, :, ::16].flatten(0, 1)  # clips, 3, 4, H, W
    rows = ((pictures + 1) * 127.5).byte().permute(0, 3, 2, 4, 1)
    Image.fromarray(rows.flatten(2, 3).flatten(0, 1).cpu().numpy()).save(file)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path("outputs/small_ltx"))
@click.option(
    "--minutes", type=float, default=math.inf, help="Stop after this time and keep a checkpoint."
)
@click.option("--autoencoder-steps", type=int, default=32000, show_default=True)
@click.option("--transformer-steps", type=int, default=14000, show_default=True)
@click.option("--clips", type=int, default=TRAINING_CLIPS, show_default=True)
@click.option("--batch", type=int, default=BATCH, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(folder, minutes, autoencoder_steps, transformer_steps, clips, batch, seed) -> None:
    deadline = time.monotonic() + 60 * minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    folder.mkdir(parents=True, exist_ok=True)
    pipe = make_pipeline(seed)
    for part in (pipe.vae, pipe.text_encoder, pipe.transformer):
        part.to(device)
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
        pipe.vae.encoder.compile(dynamic=False)
    curves = {}
    try:
        curves["autoencoder"] = train_autoencoder(
            pipe, folder, autoencoder_steps, seed, deadline, min(clips, POOL)
        )
        save_reconstruction(pipe, folder / "autoencoder.png")
        curves["transformer"] = train_transformer(
            pipe, folder, transformer_steps, seed, deadline, clips, batch
        )
    except OutOfTime:
        click.echo("Out of time; the same command goes on from the checkpoint.")
        sys.exit(3)
    (folder / "losses.json").write_text(json.dumps(curves))
    plot_losses(curves, folder / "losses.svg")
    save(pipe, folder / "pipeline")
    click.echo(f"Wrote {folder / 'pipeline'}")


if __name__ == "__main__":
    main()

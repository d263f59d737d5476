"""Attention scores of a trained model: how peaked its rows are, and how often kernels rescale them.

Runs the small LTX-Video of examples/small_ltx in float32 on captions that its training left out, with
guidance. Takes query and key of each attention as they enter it, after normalization and rotary embedding,
at the first, the middle and the last step. Statistics are means over rows, captions and both halves of
guidance, per layer, head and step (attention_statistics.py). Self-attention is measured on all
tokens, cross-attention on the text's tokens without padding. The empty prompt has one token and is left out
there. float32 gives the same scores on each device, and no GPU is needed.

Writes to benchmarks/results/trained_attention:

    python benchmarks/operations/bench_trained_attention.py
    python benchmarks/operations/bench_trained_attention.py --device cpu --tiny --output /tmp/trained.json

fit_attention_inputs.py fits the inputs "trained" of reference/attention_inputs.py to the result.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.transformers import transformer_ltx
from tabulate import tabulate
from torch import Tensor

from benchmarks import models
from benchmarks.harness import record
from benchmarks.harness.options import DEVICE, TINY
from benchmarks.models.ltx import LTXSize
from benchmarks.models.trained_ltx import SIZE, TRAINED, generate, held_back_scenes, load
from benchmarks.operations import attention_statistics

from builder.package import Revision

NAME = "attention/trained"
CAPTIONS = 8
TINY_SIZE = {"num_inference_steps": 3, "height": 64, "width": 96, "num_frames": 9}
MASKED = -1000.0  # a mask adds less to the scores

Row = tuple[str, int, int]  # "self" or "cross", layer, step


class Recorder:
    """While entered, keeps the statistics of each head at the given steps of a pipeline's run."""

    def __init__(self, transformer: LTXVideoTransformer3DModel, steps: Iterable[int]) -> None:
        self.transformer, self.steps = transformer, set(steps)
        self.samples: dict[Row, list[dict[str, Tensor]]] = defaultdict(list)
        self._step = -1
        self._place: tuple[str, int] | None = None

    def __enter__(self) -> Recorder:
        self._step = -1
        self._hooks = [self.transformer.register_forward_pre_hook(self._next_step)]
        for layer, block in enumerate(self.transformer.transformer_blocks):
            for kind, module in (("self", block.attn1), ("cross", block.attn2)):
                hook = self._enter_attention(kind, layer)
                self._hooks.append(module.register_forward_pre_hook(hook))
        self._patch = mock.patch.object(transformer_ltx, "dispatch_attention_fn", self._attention)
        self._attend = transformer_ltx.dispatch_attention_fn
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        for hook in self._hooks:
            hook.remove()

    def _next_step(self, *_: object) -> None:
        self._step += 1

    def _enter_attention(self, kind: str, layer: int):
        def enter(*_: object) -> None:
            self._place = kind, layer

        return enter

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        if self._step in self.steps:
            assert self._place is not None
            self._add((*self._place, self._step), query, key, options["attn_mask"])
        return self._attend(query, key, value, **options)

    def _add(self, row: Row, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
        for sample in range(len(query)):
            q, k = query[sample : sample + 1].float(), key[sample : sample + 1].float()
            if mask is not None:
                k = k[:, mask[sample, 0, 0] > MASKED]
            if k.shape[1] > 1:
                self.samples[row].append(measure(attention_statistics.scores_of(q, k)[0]))

    def means(self) -> list[dict[str, object]]:
        """An entry per attention, layer, step and head."""
        entries = []
        for (kind, layer, step), samples in sorted(self.samples.items()):
            means = {name: torch.stack([s[name] for s in samples]).mean(0) for name in samples[0]}
            for head in range(len(means["std"])):
                place = {"attention": kind, "layer": layer, "step": step, "head": head}
                entries.append(place | {name: float(mean[head]) for name, mean in means.items()})
        return entries


def measure(scores: Tensor) -> dict[str, Tensor]:
    """Means over the rows of scores (H, Sq, Sk), per head."""
    rows = attention_statistics.row_statistics(scores)
    rows["online_rescales"] = attention_statistics.online_rescales(scores)
    rows["lazy_rescales"] = attention_statistics.lazy_rescales(scores)
    return {name: of_rows.double().mean(-1).cpu() for name, of_rows in rows.items()}


def digest(folder: Path) -> str:
    """Identifies the weights in a folder."""
    result = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        result.update(path.read_bytes())
    return result.hexdigest()[:16]


def summary(entries: list[dict], layers: int) -> str:
    rows = []
    for kind in ("self", "cross"):
        for layer in range(layers):
            ours = [e for e in entries if (e["attention"], e["layer"]) == (kind, layer)]
            names = [name for name in ours[0] if name not in ("attention", "layer", "step", "head")]
            rows.append([f"{kind} {layer}", *(statistics.mean(e[n] for e in ours) for n in names)])
    return tabulate(rows, ["layer, mean over its heads", *names], floatfmt=".3f")


@click.command()
@DEVICE
@TINY
@record.output_option(NAME)
@torch.no_grad()
def main(device: torch.device, tiny: bool, output: Path | None) -> None:
    """Measure the attention scores of the trained small LTX-Video."""
    torch.set_float32_matmul_precision("highest")
    size = TINY_SIZE if tiny else dict(zip(SIZE, TRAINED.size, strict=True))
    scenes = held_back_scenes(1 if tiny else CAPTIONS)
    pipe = load(device, torch.float32)
    steps = size["num_inference_steps"]
    recorder = Recorder(pipe.transformer, (0, steps // 2, steps - 1))
    for seed, scene in enumerate(scenes):
        with recorder:
            generate(pipe, scene.caption, seed, output_type="latent", **size)
    video = LTXSize(*(size[name] for name in ("num_frames", "height", "width")))
    entries = recorder.means()
    click.echo(summary(entries, len(pipe.transformer.transformer_blocks)))
    environment = {**record.environment(device), "commit": Revision.read(models.CHECKOUT).suffix}
    result = {
        "environment": environment,
        "model": "the small LTX-Video",
        "weights": digest(TRAINED.folder / "transformer"),
        "size": str(video),
        "tokens": video.tokens,
        "steps": steps,
        "captions": [scene.caption for scene in scenes],
        "attention_heads": entries,
    }
    output = record.destination(output, NAME)
    record.finish(output, result)


if __name__ == "__main__":
    main()

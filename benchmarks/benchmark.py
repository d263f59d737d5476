"""Script of `kernels benchmark`: each operation at a model's shape, verified against eager PyTorch.

    kernels benchmark FOLDER

FOLDER is a checkout with a build, or a downloaded snapshot: kernels 0.17 takes no repository of a publisher
that the Hub does not trust.

It does not depend on other files here, because it may be published alone. Its times include CPU time,
and tensors may stay in the cache, unlike in the other benchmarks.

The runner's verification allows an absolute difference of 0.01. So values stay below about 2, where
bfloat16 is finer than that.
"""

import math

import torch
import torch.nn.functional as F
from kernels import Benchmark

DTYPE = torch.bfloat16
EPS = 1e-6


def normal(device, *shape, std=1.0, mean=0.0):
    return torch.randn(shape, device=device, dtype=DTYPE) * std + mean


def eager_rms_norm(x, weight=None):
    """As diffusers' RMSNorm."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    n = (x * torch.rsqrt(variance + EPS)).to(x.dtype)
    return n if weight is None else n * weight


def eager_rotate(x, cos, sin):
    """Interleaved pairs, as diffusers' apply_rotary_emb; tables broadcast against x."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def check(name, output, expected):
    """Verifies outputs beyond the one that the runner compares."""
    if not torch.allclose(output, expected, atol=1e-2):
        raise RuntimeError(f"{name} differs from eager PyTorch's")


class LtxBenchmark:
    """Sizes of LTX-Video 2B at 49 frames 512x768 with guidance; a CPU gets fewer tokens."""

    batch, heads, head_dim = 2, 32, 64
    hidden = heads * head_dim

    @property
    def grid(self):
        return (7, 16, 24) if self.device == "cuda" else (2, 3, 4)

    def normal(self, *shape, **options):
        return normal(self.device, *shape, **options)

    def rows(self, hidden=None, **options):
        return self.normal(self.batch, math.prod(self.grid), hidden or self.hidden, **options)

    def row(self, **options):
        return self.normal(self.batch, 1, self.hidden, **options)


class Norm(LtxBenchmark, Benchmark):
    seed = 0

    def setup(self):
        self.x = self.rows()
        self.weight = self.normal(self.hidden, std=0.02, mean=0.2)
        self.bias = self.normal(self.hidden, std=0.05)
        self.scale, self.shift = self.row(std=0.02, mean=-0.9), self.row(std=0.05)

    def benchmark_rms_norm(self):
        self.out = self.kernel.rms_norm(self.x, self.weight, EPS)

    def verify_rms_norm(self):
        return F.rms_norm(self.x, (self.hidden,), self.weight, EPS)

    def benchmark_layer_norm(self):
        self.out = self.kernel.layer_norm(self.x, self.weight, self.bias, EPS)

    def verify_layer_norm(self):
        return F.layer_norm(self.x, (self.hidden,), self.weight, self.bias, EPS)

    def benchmark_rms_norm_modulate(self):
        self.out = self.kernel.rms_norm_modulate(self.x, self.scale, self.shift, eps=EPS)

    def verify_rms_norm_modulate(self):
        return eager_rms_norm(self.x) * (1 + self.scale) + self.shift

    def benchmark_layer_norm_modulate(self):
        self.out = self.kernel.layer_norm_modulate(self.x, self.scale, self.shift, eps=EPS)

    def verify_layer_norm_modulate(self):
        n = F.layer_norm(self.x, (self.hidden,), eps=EPS)
        return n * (1 + self.scale) + self.shift

    def benchmark_layer_norm_modulate_pair(self):
        self.out, self.second = self.kernel.layer_norm_modulate_pair(
            self.x, self.scale, self.shift, self.scale, None, eps=EPS
        )

    def verify_layer_norm_modulate_pair(self):
        n = F.layer_norm(self.x, (self.hidden,), eps=EPS) * (1 + self.scale)
        check("the second modulation", self.second, n)
        return n + self.shift


class GroupNorm(Benchmark):
    """SDXL's first ResNet block at 1024x1024 with guidance: an image, and a time embedding to add."""

    seed = 0
    groups = 32

    def setup(self):
        size = 128 if self.device == "cuda" else 16
        channels = 10 * self.groups
        self.x = normal(self.device, 2, channels, size, size)
        self.weight = normal(self.device, channels, std=0.01, mean=0.15)
        self.bias = normal(self.device, channels, std=0.05)
        self.embedding = torch.zeros(2, channels, device=self.device, dtype=DTYPE)
        self.embedding[:, ::7] = 0.5

    def setup_group_norm_channels_last(self):
        self.setup()
        self.x = self.x.to(memory_format=torch.channels_last)

    def benchmark_group_norm(self):
        self.out = self.kernel.group_norm(self.x, self.groups, self.weight, self.bias)

    def verify_group_norm(self):
        return F.group_norm(self.x, self.groups, self.weight, self.bias)

    def benchmark_group_norm_silu(self):
        self.out = self.kernel.group_norm(
            *(self.x, self.groups, self.weight, self.bias),
            channel_bias=self.embedding,
            activation="silu",
        )

    def verify_group_norm_silu(self):
        x = self.x + self.embedding[:, :, None, None]
        return F.silu(F.group_norm(x, self.groups, self.weight, self.bias))

    benchmark_group_norm_channels_last = benchmark_group_norm_silu
    verify_group_norm_channels_last = verify_group_norm_silu


class ChannelRmsNorm(Benchmark):
    """The last resolution of Wan's decoder at 480x832: four frames."""

    seed = 0

    def setup(self):
        size = (4, 480, 832) if self.device == "cuda" else (2, 6, 8)
        self.x = normal(self.device, 1, 96, *size)
        self.weight = normal(self.device, 96, std=0.02, mean=0.2)

    def benchmark_channel_rms_norm(self):
        self.out = self.kernel.channel_rms_norm(self.x, self.weight, eps=EPS, activation="silu")

    def verify_channel_rms_norm(self):
        x = self.x.movedim(1, -1)
        return F.silu(eager_rms_norm(x, self.weight).movedim(-1, 1))


class GatedResidual(LtxBenchmark, Benchmark):
    seed = 0

    def setup(self):
        self.residual, self.x = self.rows(std=0.15), self.rows(std=0.15)
        self.gate = self.row(std=0.5)
        self.scale, self.shift = self.row(std=0.02, mean=-0.9), self.row(std=0.05)

    def benchmark_gated_residual(self):
        self.out = self.kernel.gated_residual(self.residual, self.x, self.gate)

    def verify_gated_residual(self):
        return self.residual + self.x * self.gate

    def benchmark_gated_residual_rms_norm_modulate(self):
        self.h, self.out = self.kernel.gated_residual_rms_norm_modulate(
            self.residual, self.x, self.gate, self.scale, self.shift, eps=EPS
        )

    def verify_gated_residual_rms_norm_modulate(self):
        h = self.residual + self.x * self.gate
        check("the residual", self.h, h)
        return eager_rms_norm(h) * (1 + self.scale) + self.shift

    def benchmark_gated_residual_layer_norm_modulate(self):
        self.h, self.out = self.kernel.gated_residual_layer_norm_modulate(
            self.residual, self.x, self.gate, self.scale, self.shift, eps=EPS
        )

    def verify_gated_residual_layer_norm_modulate(self):
        h = self.residual + self.x * self.gate
        check("the residual", self.h, h)
        n = F.layer_norm(h, (self.hidden,), eps=EPS)
        return n * (1 + self.scale) + self.shift

    def benchmark_gated_residual_layer_norm_modulate_pair(self):
        self.h, self.out, self.second = self.kernel.gated_residual_layer_norm_modulate_pair(
            self.residual, self.x, self.gate, self.scale, self.shift, self.scale, None, eps=EPS
        )

    def verify_gated_residual_layer_norm_modulate_pair(self):
        h = self.residual + self.x * self.gate
        check("the residual", self.h, h)
        n = F.layer_norm(h, (self.hidden,), eps=EPS) * (1 + self.scale)
        check("the second modulation", self.second, n)
        return n + self.shift


class Rope(LtxBenchmark, Benchmark):
    seed = 0

    def setup(self):
        seq, pairs = math.prod(self.grid), self.head_dim // 2
        self.q, self.k = self.rows(), self.rows()
        self.heads_q, self.heads_k = (
            t.unflatten(-1, (self.heads, self.head_dim)) for t in (self.q, self.k)
        )
        self.q_weight, self.k_weight = (
            self.normal(self.hidden, std=0.02, mean=0.15) for _ in range(2)
        )
        axes = [torch.linspace(-1, 1, n, device=self.device) for n in self.grid]
        coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, seq, 3)
        exponents = torch.linspace(0, 1, self.hidden // 6, device=self.device)
        frequencies = 10000.0**exponents * (math.pi / 2)
        self.rope = self.kernel.CoordinateRope(coordinates, frequencies)
        self.tables = self.rope.tables(self.hidden)
        shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
        angles = [
            torch.arange(n, device=self.device)[:, None]
            * 10000.0 ** -(torch.arange(p, device=self.device) / p)
            for n, p in zip(self.grid, shares, strict=True)
        ]
        self.axes = [(angle.cos(), angle.sin()) for angle in angles]
        frame, height, width = (
            angle.view([-1 if i == axis else 1 for i in range(3)] + [angle.shape[1]])
            for axis, angle in enumerate(angles)
        )
        spread = [angle.expand(*self.grid, -1) for angle in (frame, height, width)]
        angle = torch.cat(spread, dim=-1).reshape(seq, pairs)
        angle = angle.repeat_interleave(2, dim=-1)
        self.cos, self.sin = angle.cos(), angle.sin()

    def setup_rope(self):
        self.setup()
        self.heads_q = self.heads_q * 0.2

    setup_rope_3d = setup_rope

    def benchmark_qk_norm_rope_coordinates(self):
        self.out, self.out_k = self.kernel.qk_norm_rope(
            self.q, self.k, self.q_weight, self.k_weight, self.rope, heads=self.heads, eps=EPS
        )

    def verify_qk_norm_rope_coordinates(self):
        q, k = (
            eager_rotate(F.rms_norm(t, (self.hidden,), weight, EPS), *self.tables)
            for t, weight in ((self.q, self.q_weight), (self.k, self.k_weight))
        )
        check("the key", self.out_k, k)
        return q

    def benchmark_qk_norm_rope_per_head(self):
        weights = self.q_weight[: self.head_dim], self.k_weight[: self.head_dim]
        self.out, self.out_k = self.kernel.qk_norm_rope(
            self.heads_q,
            self.heads_k,
            *weights,
            (self.cos, self.sin),
            heads=self.heads,
            norm="per_head",
            eps=EPS,
        )

    def verify_qk_norm_rope_per_head(self):
        cos, sin = self.cos[:, None], self.sin[:, None]
        q, k = (
            eager_rotate(F.rms_norm(t, (self.head_dim,), w[: self.head_dim], EPS), cos, sin)
            for t, w in ((self.heads_q, self.q_weight), (self.heads_k, self.k_weight))
        )
        check("the key", self.out_k, k)
        return q

    def benchmark_rope(self):
        self.out = self.kernel.rope(self.heads_q, self.cos, self.sin)

    def verify_rope(self):
        return eager_rotate(self.heads_q, self.cos[:, None], self.sin[:, None])

    def benchmark_rope_3d(self):
        self.out = self.kernel.rope_3d(self.heads_q, *self.axes)

    def verify_rope_3d(self):
        return eager_rotate(self.heads_q, self.cos[:, None], self.sin[:, None])


class Activation(LtxBenchmark, Benchmark):
    seed = 0

    def setup(self):
        self.x = self.rows(4 * self.hidden, std=0.35)
        self.bias = self.normal(4 * self.hidden, std=0.02)

    def benchmark_gelu(self):
        self.out = self.kernel.gelu(self.x)

    def verify_gelu(self):
        return F.gelu(self.x)

    def benchmark_gelu_tanh_bias(self):
        self.out = self.kernel.gelu(self.x, "tanh", self.bias)

    def verify_gelu_tanh_bias(self):
        return F.gelu(self.x + self.bias, approximate="tanh")

    def benchmark_silu(self):
        self.out = self.kernel.silu(self.x)

    def verify_silu(self):
        return F.silu(self.x)

    def benchmark_geglu(self):
        self.out = self.kernel.geglu(self.x)

    def verify_geglu(self):
        hidden, gate = self.x.chunk(2, dim=-1)
        return hidden * F.gelu(gate)

    def benchmark_swiglu(self):
        self.out = self.kernel.swiglu(self.x)

    def verify_swiglu(self):
        hidden, gate = self.x.chunk(2, dim=-1)
        return hidden * F.silu(gate)


class Softmax(Benchmark):
    """Scores of a cross-attention, with a wide range, so that probabilities are not all tiny."""

    seed = 0

    def setup(self):
        rows = 32 * 2688 if self.device == "cuda" else 64
        self.x = normal(self.device, rows, 128, std=4.0)

    def benchmark_softmax(self):
        self.out = self.kernel.softmax(self.x)

    def verify_softmax(self):
        return F.softmax(self.x, dim=-1)


class Attention(LtxBenchmark, Benchmark):
    """Self-attention, and cross-attention to a padded text."""

    seed = 0
    text = 128

    def setup(self):
        self.q, self.k, self.v = (
            self.rows(std=std).unflatten(-1, (self.heads, self.head_dim)) for std in (1.0, 1.0, 0.3)
        )
        self.text_k, self.text_v = (t[:, : self.text] for t in (self.k, self.v))
        tokens = self.text_k.shape[1]
        lengths = torch.tensor([[tokens // 4], [tokens // 2]], device=self.device)
        mask = torch.arange(tokens, device=self.device) < lengths
        self.bias = (1 - mask.to(DTYPE)) * -10000.0

    def eager(self, k, v, mask=None):
        q, k, v = (t.transpose(1, 2) for t in (self.q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def benchmark_attention(self):
        self.out = self.kernel.attention(self.q, self.k, self.v)

    def verify_attention(self):
        return self.eager(self.k, self.v)

    def benchmark_attention_text(self):
        self.out = self.kernel.attention(self.q, self.text_k, self.text_v, key_bias=self.bias)

    def verify_attention_text(self):
        return self.eager(self.text_k, self.text_v, self.bias[:, None, None])

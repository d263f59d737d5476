"""Float64 references of the operations, written from their formulas.

Each function has the name and signature of its operation, takes tensors of any dtype and returns
float64. Nothing here calls the kernel package or a fused PyTorch operator, so that they cannot share
an error.
"""

import math

import torch


def _double(*tensors):
    return [None if tensor is None else tensor.to(torch.float64) for tensor in tensors]


def _sum(modulator, index=None):
    """In float64; a pair stands for its sum, and with an index a table (N, D) for a row for each token."""
    row, embedding = modulator if isinstance(modulator, tuple) else (None, modulator)
    row, embedding = _double(row, embedding)
    if index is not None and embedding is not None:
        chosen = index.unsqueeze(-1) == torch.arange(len(embedding), device=index.device)
        # A product would turn infinity into NaN.
        embedding = torch.stack(
            [
                torch.where(chosen[..., i, None], table_row, 0)
                for i, table_row in enumerate(embedding)
            ]
        ).sum(0)
    return embedding if row is None else row + embedding


def _affine(n, weight, bias=None):
    if weight is not None:
        n = n * weight
    return n if bias is None else n + bias


def rms_norm(x, weight=None, eps=1e-6):
    x, weight = _double(x, weight)
    return _affine(x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps), weight)


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    x, weight, bias = _double(x, weight, bias)
    centered = x - x.mean(-1, keepdim=True)
    variance = (centered * centered).mean(-1, keepdim=True)
    return _affine(centered / torch.sqrt(variance + eps), weight, bias)


def group_norm(
    x, num_groups, weight=None, bias=None, eps=1e-5, channel_bias=None, activation="none"
):
    h, weight, bias, channel_bias = _double(x, weight, bias, channel_bias)
    h = h.flatten(2) if h.dim() > 2 else h[:, :, None]
    if channel_bias is not None:
        h = h + channel_bias[:, :, None]
    outs = []
    for group in h.chunk(num_groups, dim=1):
        centered = group - group.mean((1, 2), keepdim=True)
        variance = (centered * centered).mean((1, 2), keepdim=True)
        outs.append(centered / torch.sqrt(variance + eps))
    weight, bias = (vector if vector is None else vector[:, None] for vector in (weight, bias))
    n = _affine(torch.cat(outs, dim=1), weight, bias).reshape(x.shape)
    return silu(n) if activation == "silu" else n


def channel_rms_norm(
    x, weight=None, bias=None, eps=1e-6, scale=None, shift=None, activation="none"
):
    rows = x.flatten(2).mT  # (B, positions, C)
    scale, shift = (t if t is None else t[:, None] for t in (scale, shift))
    n = _modulate(_affine(rms_norm(rows, weight, eps), None, *_double(bias)), scale, shift)
    n = n.mT.reshape(x.shape)
    return silu(n) if activation == "silu" else n


def _modulate(n, scale, shift, index=None):
    scale, shift = _sum(scale, index), _sum(shift, index)
    n = n if scale is None else n * (1 + scale)
    return n if shift is None else n + shift


def rms_norm_modulate(x, scale, shift=None, weight=None, eps=1e-6, *, index=None):
    return _modulate(rms_norm(x, weight, eps), scale, shift, index)


def layer_norm_modulate(x, scale, shift=None, weight=None, bias=None, eps=1e-6, *, index=None):
    return _modulate(layer_norm(x, weight, bias, eps), scale, shift, index)


def layer_norm_modulate_pair(
    x, scale, shift, second_scale, second_shift, weight=None, bias=None, eps=1e-6
):
    n = layer_norm(x, weight, bias, eps)
    return _modulate(n, scale, shift), _modulate(n, second_scale, second_shift)


def gated_residual(
    residual,
    x,
    gate=None,
    *,
    addend=None,
    x_weight=None,
    x_eps=None,
    tanh_gate=False,
    index=None,
):
    residual, x, addend = _double(residual, x, addend)
    gate = _sum(gate, index)
    x = x if addend is None else x + addend
    x = x if x_eps is None else rms_norm(x, x_weight, x_eps)
    if gate is not None:
        x = x * (gate.tanh() if tanh_gate else gate)
    return residual + x


def gated_residual_rms_norm_modulate(
    residual, x, gate=None, scale=None, shift=None, weight=None, eps=1e-6, *, index=None, **branch
):
    h = gated_residual(residual, x, gate, index=index, **branch)
    return h, rms_norm_modulate(h, scale, shift, weight, eps, index=index)


def gated_residual_layer_norm_modulate(
    residual,
    x,
    gate=None,
    scale=None,
    shift=None,
    weight=None,
    bias=None,
    eps=1e-6,
    *,
    index=None,
    **branch,
):
    h = gated_residual(residual, x, gate, index=index, **branch)
    return h, layer_norm_modulate(h, scale, shift, weight, bias, eps, index=index)


def gated_residual_layer_norm_modulate_pair(
    residual, x, gate, scale, shift, second_scale, second_shift, weight=None, bias=None, eps=1e-6
):
    h = gated_residual(residual, x, gate)
    pair = layer_norm_modulate_pair(h, scale, shift, second_scale, second_shift, weight, bias, eps)
    return h, *pair


def coordinate_tables(coordinates, frequencies, pairs):
    """Cosine and sine, (1|B, S, pairs), of the float32 product angle. Identity pairs come first."""
    axes = coordinates.shape[-1]
    identity = pairs - axes * frequencies.numel()
    batch, seq = coordinates.shape[:2]
    cos = torch.ones(batch, seq, pairs, dtype=torch.float64, device=coordinates.device)
    sin = torch.zeros_like(cos)
    rotated = torch.arange(pairs - identity, device=coordinates.device)
    angle = (frequencies[rotated // axes] * coordinates[..., rotated % axes]).to(torch.float64)
    cos[..., identity:] = torch.cos(angle)
    sin[..., identity:] = torch.sin(angle)
    return cos, sin


def _pair_entries(table, head_dim, layout):
    """The table's values (1|B, S, 1|heads, head_dim / 2) for the first and second element of each pair."""
    (table,) = _double(table)
    if table.dim() == 2:
        table = table[None]
    has_one_a_pair = table.shape[-1] == head_dim // 2
    if table.dim() == 3:
        table = table.reshape(*table.shape[:2], -1, head_dim // 2 if has_one_a_pair else head_dim)
    return (table, table) if has_one_a_pair else _split(table, layout)


def _split(x, layout):
    half = x.shape[-1] // 2
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    return x[..., :half], x[..., half:]


def _join(first, second, layout):
    if layout == "interleaved":
        return torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([first, second], dim=-1)


def _rotate(n, rope, layout):
    head_dim = n.shape[-1]
    first, second = _split(n, layout)
    if hasattr(rope, "frequencies"):
        pairs = n.shape[2] * head_dim // 2
        tables = coordinate_tables(rope.coordinates, rope.frequencies, pairs)
        cos, sin = (table.reshape(*table.shape[:2], n.shape[2], -1) for table in tables)
        (cos_first, cos_second), (sin_first, sin_second) = (cos, cos), (sin, sin)
    else:
        cos, sin = (rope.real, rope.imag) if isinstance(rope, torch.Tensor) else rope
        cos_first, cos_second = _pair_entries(cos, head_dim, layout)
        sin_first, sin_second = _pair_entries(sin, head_dim, layout)
    rotated_first = first * cos_first - second * sin_first
    rotated_second = second * cos_second + first * sin_second
    return _join(rotated_first, rotated_second, layout)


def of_query_and_key(norm_rope, converted=lambda v: v):
    """qk_norm_rope by one function for query and key, and one for the values."""

    def qk_norm_rope(
        q,
        k,
        q_weight=None,
        k_weight=None,
        rope=None,
        *,
        heads,
        norm="across_heads",
        layout="interleaved",
        eps=1e-6,
        inplace=False,
        k_rope=None,
        v=None,
        out=None,
        q_bias=None,
        k_bias=None,
    ):
        head_dim = q[0, 0].numel() // heads
        k_heads = k[0, 0].numel() // head_dim
        how = {"norm": norm, "layout": layout, "eps": eps}
        results = (
            norm_rope(q, q_weight, q_bias, rope, heads=heads, **how),
            norm_rope(
                k, k_weight, k_bias, rope if k_rope is None else k_rope, heads=k_heads, **how
            ),
        )
        return results if v is None else (*results, converted(v))

    return qk_norm_rope


def _norm_rope(x, weight, bias, rope, *, heads, norm, layout, eps):
    (n,) = _double(x)
    if norm == "across_heads":
        n = rms_norm(n.reshape(*n.shape[:2], -1), weight, eps)
    n = n.reshape(*n.shape[:2], heads, -1)
    if norm == "per_head":
        n = rms_norm(n, weight, eps)
    if norm == "layer_per_head":
        n = layer_norm(n, weight, bias, eps)
    if rope is not None:
        n = _rotate(n, rope, layout)
    return n.reshape(x.shape)


qk_norm_rope = of_query_and_key(_norm_rope, torch.Tensor.double)


def rope(x, cos, sin=None, layout="interleaved"):
    (n,) = _double(x)
    head_dim = x.shape[3] if x.dim() == 4 else cos.shape[-1] * (2 if sin is None else 1)
    tables = cos if sin is None else (cos, sin)
    return _rotate(n.reshape(*x.shape[:2], -1, head_dim), tables, layout).reshape(x.shape)


def rope_3d(x, frame, height, width, layout="interleaved"):
    (n,) = _double(x)
    token = torch.arange(x.shape[1], device=x.device)
    rows, columns = height[0].shape[0], width[0].shape[0]
    places = (token // (rows * columns), token // columns % rows, token % columns)

    def pairs(field):
        axes = (frame[field], height[field], width[field])
        tables = [table.double()[place] for table, place in zip(axes, places, strict=True)]
        return torch.cat(tables, dim=-1)[:, None]

    cos, sin = pairs(0), pairs(1)
    first, second = _split(n, layout)
    return _join(first * cos - second * sin, second * cos + first * sin, layout)


def softmax(x):
    (x,) = _double(x)
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def quantize_fp8(x, *, block_size=None):
    """The kernels' values exactly: each step is correctly rounded in float32."""
    hidden = x.shape[-1]
    group = block_size or max(hidden, 1)
    padding = -hidden % group
    groups = torch.nn.functional.pad(x.float(), (0, padding)).unflatten(-1, (-1, group))
    # The quotients of float32 numbers in float64 round to the same float32.
    largest = groups.abs().amax(-1, keepdim=True).double()
    scale = (largest / 448).float()
    scale[scale < torch.finfo(torch.float32).tiny] = 0
    scale[~largest.isfinite()] = math.nan
    quotient = torch.where(scale == 0, 0, (groups.double() / scale.double()).float())
    values = _nearest_e4m3(quotient.double()).float().to(torch.float8_e4m3fn)
    return values.flatten(-2)[..., :hidden], scale.squeeze(-1)


def _nearest_e4m3(x):
    """Rounded to nearest even in E4M3: 3 bits after the first, and a spacing of 2**-9 below 2**-6."""
    exponent = torch.frexp(x.abs())[1].clamp(min=-5) - 1
    spacing = torch.ldexp(torch.ones_like(x), exponent - 3)
    return ((x / spacing).round() * spacing).clamp(-448, 448)


def _with_low_rank(product, bias, low, up):
    up = torch.cat(up, 1) if isinstance(up, tuple) else up
    product = product if low is None else product + low.double() @ up.double().T
    return product if bias is None else product + bias.double()


def linear_lora(x, weight, low=None, up=None, bias=None, *, approximate=None):
    out = _with_low_rank(x.double() @ weight.double().T, bias, low, up)
    return out if approximate is None else torch.nn.functional.gelu(out, approximate=approximate)


def linear_fp8(
    x, x_scale, weight, weight_scale, bias=None, *, low=None, up=None, dtype=torch.bfloat16
):
    product = _rows(x, x_scale) @ (weight.double() * weight_scale.double()).T
    return _with_low_rank(product, bias, low, up)


def _rows(x, x_scale):
    """The values of FP8 rows."""
    x_scale = x_scale.double()
    if x_scale.shape[-1] > 1:
        x_scale = x_scale.repeat_interleave(128, -1)[..., : x.shape[-1]]
    return x.double() * x_scale


def lora_down(x, downs, scales=None, x_scale=None):
    x = x.double() if x_scale is None else _rows(x, x_scale)
    products = [
        torch.nn.functional.pad(scale * (x @ down.double().T), (0, -len(down) % 8))
        for down, scale in zip(downs, scales or [1] * len(downs), strict=True)
    ]
    return torch.cat(products, -1)


def conv3d(
    x, weight, bias=None, *, padding=(0,) * 4, previous=None, frame_border="zeros", border="zeros"
):
    x, weight, bias, previous = _double(x, weight, bias, previous)
    x = x if previous is None else torch.cat([previous, x], 2)
    *frames, rows, columns = padding
    modes = {"zeros": "constant"}
    pad = torch.nn.functional.pad
    x = pad(x, (0, 0, 0, 0, *frames), mode=modes.get(frame_border, frame_border))
    of_frame = x.movedim(2, 1).flatten(0, 1)
    of_frame = pad(of_frame, (columns,) * 2 + (rows,) * 2, mode=modes.get(border, border))
    x = of_frame.unflatten(0, x.shape[::2][:2]).movedim(1, 2)
    return torch.nn.functional.conv3d(x, weight, bias)


def split_heads(heads, *tensors):
    """Tensors (B, S, H * d) as (B, S, H, d). `heads` is the first tensor's number of heads."""
    head_dim = tensors[0].shape[2] // heads
    return [t.unflatten(2, (-1, head_dim)) for t in tensors]


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    key_bias=None,
    key_lengths=None,
    heads=None,
    gate=None,
    addend=None,
    return_lse=False,
    blocks=None,
):
    q, k, v, key_bias, gate, addend = _double(q, k, v, key_bias, gate, addend)
    if heads is not None:
        q, k, v = split_heads(heads, q, k, v)
    masks = scale, key_bias, key_lengths
    if blocks is not None:
        out, lse = _attention_by_blocks(q, k, v, *masks, blocks)
    else:
        out = _ungated_attention(q, k, v, *masks)
        lse = _log_sum_exp(q, k, *masks) if return_lse else None
    if gate is not None:
        out = out * gate[..., None]
    out = out if heads is None else out.flatten(2)
    out = out if addend is None else out + addend
    return (out, lse) if return_lse else out


def attention_int8(q, k, v, **options):
    """Of unrounded inputs, for derivatives; int8_attention.py rounds them."""
    return attention(q, k, v, **options)


def _log_sum_exp(q, k, scale, key_bias, key_lengths):
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if k.shape[1] == 0 or q.numel() == 0:
        return torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    if key_lengths is not None:
        is_padding = torch.arange(k.shape[1], device=k.device) >= key_lengths[:, None]
        k = k.masked_fill(is_padding[:, :, None, None], 0)
    scores = scale * torch.einsum("bqhd,bkhd->bqhk", q, k)
    if key_bias is not None:
        scores = scores + key_bias[:, None, None]
    if key_lengths is not None:
        scores = scores.masked_fill(is_padding[:, None, None], -math.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0)
    return largest[..., 0] + torch.exp(scores - largest).sum(-1).log()


def _ungated_attention(q, k, v, scale, key_bias, key_lengths):
    batch, keys = k.shape[:2]
    if batch == 0 or keys == 0:
        return torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    outs = []
    for b in range(batch):
        one_q, one_k, one_v = q[b], k[b], v[b]
        bias = torch.zeros(keys, dtype=torch.float64, device=q.device)
        if key_bias is not None:
            bias = key_bias[b]
        if key_lengths is not None:
            count = min(max(int(key_lengths[b]), 0), keys)
            one_k, one_v, bias = one_k[:count], one_v[:count], bias[:count]
        heads = [
            _one_head(one_q[:, h], one_k[:, other], one_v[:, other], scale, bias)
            for h in range(q.shape[2])
            for other in [h // (q.shape[2] // k.shape[2])]
        ]
        outs.append(torch.stack(heads, dim=1))
    return torch.stack(outs)


def _one_head(q, k, v, scale, bias):
    if k.shape[0] == 0:
        return q.new_zeros(q.shape[0], v.shape[1])
    scores = scale * (q @ k.T) + bias
    largest = scores.amax(-1, keepdim=True)
    e = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0))
    total = e.sum(-1, keepdim=True)
    return (e / total.masked_fill(total == 0, 1)) @ v


def attended_keys(blocks, queries, keys):
    """The keys that each query attends to: bool (batch or 1, heads or 1, queries, keys)."""
    rows, columns = blocks.block_size
    shape = math.ceil(queries / rows), math.ceil(keys / columns)
    bounded, full = (
        None if counts is None else _listed(counts, indices, *shape)
        for counts, indices in (
            (blocks.kv_num_blocks, blocks.kv_indices),
            (blocks.full_kv_num_blocks, blocks.full_kv_indices),
        )
    )
    if bounded is None:
        bounded = torch.full((1, 1, *shape), full is None)
    full = torch.zeros_like(bounded) if full is None else full
    bounded, full = (
        listed.repeat_interleave(rows, 2)[:, :, :queries].repeat_interleave(columns, 3)[..., :keys]
        for listed in (bounded, full)
    )
    if blocks.key_bounds is not None:
        first, end = blocks.key_bounds.cpu().long().unbind(-1)
        key = torch.arange(keys)
        bounded = bounded & (key >= first[..., None]) & (key < end[..., None])
    return bounded | full


def _listed(counts, indices, query_blocks, key_blocks):
    """Bool (batch or 1, heads or 1, query blocks, key blocks)."""
    lists = indices.flatten(0, 2).tolist()
    listed = [[False] * key_blocks for _ in lists]
    for row, count in enumerate(counts.flatten().tolist()):
        for block in lists[row][: max(count, 0)]:
            if 0 <= block < key_blocks:
                listed[row][block] = True
    shape = *counts.shape[:2], query_blocks, key_blocks
    return torch.tensor(listed, dtype=torch.bool).reshape(shape)


def _attention_by_blocks(q, k, v, scale, key_bias, key_lengths, blocks):
    """Also the logarithms of the sums of the exponentials. Keys that no query attends to may be NaN."""
    queries, keys = q.shape[1], k.shape[1]
    if q.numel() == 0:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])
    is_attended = attended_keys(blocks, queries, keys).to(q.device)
    is_attended = is_attended.expand(q.shape[0], q.shape[2], -1, -1)
    if key_lengths is not None:
        is_key = torch.arange(keys, device=q.device) < key_lengths[:, None]
        is_attended = is_attended & is_key[:, None, None]
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2).transpose(1, 2) for t in (k, v))
    is_unread = ~is_attended.any(2)[..., None]
    k, v = k.masked_fill(is_unread, 0), v.masked_fill(is_unread, 0)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = scale * (q.transpose(1, 2) @ k.mT)
    if key_bias is not None:
        scores = scores + key_bias[:, None, None]
    scores = scores.masked_fill(~is_attended, -math.inf)
    lse = scores.logsumexp(3)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return (weights @ v).transpose(1, 2), lse.transpose(1, 2)


def _biased(x, bias):
    x, bias = _double(x, bias)
    return x if bias is None else x + bias


def gelu(x, approximate="none", bias=None):
    x = _biased(x, bias)
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * torch.special.erfc(-x / math.sqrt(2))


def silu(x, bias=None):
    x = _biased(x, bias)
    return x / (1 + torch.exp(-x))


def _halves(x, bias, activated):
    """The factor, and the input of the activation."""
    x, hidden = _biased(x, bias), x.shape[-1] // 2
    first, second = x[..., :hidden], x[..., hidden:]
    return {"first": (second, first), "second": (first, second)}[activated]


def geglu(x, approximate="none", bias=None, *, activated="second"):
    factor, gate = _halves(x, bias, activated)
    return factor * gelu(gate, approximate)


def swiglu(x, bias=None, *, activated="second"):
    factor, gate = _halves(x, bias, activated)
    return factor * silu(gate)

"""A table of the operations, valid calls of each, and random tensors in the memory layouts of diffusion
models."""

import collections
import inspect
import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from checks import CONTRACT_ELEMENTS, as_tuple
from conftest import load_kernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dtype_text(dtype):
    return str(dtype).replace("torch.", "")


def for_dtypes(*dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=dtype_text)


every_dtype = for_dtypes(*DTYPES)
every_16_bit_dtype = for_dtypes(torch.float16, torch.bfloat16)


def pairwise(**axes):
    """Parametrizes a test with few cases that cover each pair of values of different axes."""
    names, values = list(axes), [list(axis) for axis in axes.values()]
    places = [[(i, a) for a in range(len(axis))] for i, axis in enumerate(values)]
    missing = {
        pair
        for one, other in itertools.combinations(places, 2)
        for pair in itertools.product(one, other)
    }
    uses = collections.Counter()
    cases = []

    def gain(place, case):
        """The number of new pairs with a value, and its rarity so far."""
        return sum(tuple(sorted((place, one))) in missing for one in case), -uses[place]

    for pair in sorted(missing):
        if pair not in missing:
            continue
        case = list(pair)
        for axis in places:
            if not any(place in case for place in axis):
                case.append(max(axis, key=lambda place: gain(place, case)))
        case.sort()
        uses.update(case)
        missing -= set(itertools.combinations(case, 2))
        chosen = [values[i][a] for i, a in case]
        cases.append(pytest.param(*chosen, id="-".join(map(value_text, chosen))))
    return pytest.mark.parametrize(names, cases)


def value_text(value):
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, bool) or value is None:
        return str(value)
    return value.__name__ if callable(value) else str(value).replace(" ", "")


def _in_buffer(shape, view, values):
    """The values in a view of a buffer. Its other elements are NaN, so that reads beyond a row matter."""
    buffer = torch.full(shape, math.nan, dtype=values.dtype, device=values.device)
    return view(buffer).copy_(values)


def _transposed(values):
    *leading, last = values.shape
    order = *reversed(range(len(leading))), len(leading)
    return _in_buffer((*reversed(leading), last), lambda buffer: buffer.permute(order), values)


def _odd_rows(values):
    *leading, last = values.shape
    size = *leading, last // 2 * 2 + 3
    return _in_buffer(size, lambda buffer: buffer[..., 1 : 1 + last], values)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    # One of three tensors interleaved just before the last dimension, as `unbind` leaves them.
    "unbind": lambda x: _in_buffer(
        (*x.shape[:-1], 3, x.shape[-1]), lambda buffer: buffer.unbind(-2)[1], x
    ),
    # The middle third of the last dimension: query, key or value of a packed projection.
    "chunk": lambda x: _in_buffer(
        (*x.shape[:-1], 3 * x.shape[-1]), lambda buffer: buffer.chunk(3, dim=-1)[1], x
    ),
    # The leading dimensions in reverse order in memory.
    "transposed": _transposed,
    # Stride 0 in the first dimension, unless it is the last. The values are those of the first index.
    "expanded": lambda x: x[:1].contiguous().expand_as(x) if x.dim() > 1 else x,
    # Contiguous, one element past an aligned address.
    "misaligned": lambda x: _in_buffer((x.numel() + 1,), lambda b: b[1:].view(x.shape), x),
    # Rows an odd number of elements apart, so that their alignments differ.
    "odd_rows": _odd_rows,
}
STRIDED_LAYOUTS = [name for name in LAYOUTS if name != "contiguous"]
WRITABLE_LAYOUTS = [name for name in LAYOUTS if name != "expanded"]


# Changes of an argument.
def every_second(tensor):
    """Of the same shape, with stride 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def of_shape(*shape):
    return lambda tensor: torch.ones(shape, dtype=tensor.dtype, device=tensor.device)


# Of each channel's pixels, or each pixel's channels, and of each batch entry as a whole.
IMAGE_LAYOUTS = [*LAYOUTS, "chunk of the batch", "odd_rows of the batch"]


def laid_out(values, is_last, layout="contiguous"):
    """The values (B, C, ...) with dense pixels or channels, and rows of them in the given layout."""
    rows = values.flatten(2) if values.dim() > 2 else values[:, :, None]
    rows = rows.mT if is_last else rows
    if layout.endswith(" of the batch"):
        entries = LAYOUTS[layout.removesuffix(" of the batch")](rows.flatten(1))
        rows = entries.unflatten(1, rows.shape[1:])
    else:
        rows = LAYOUTS[layout](rows)
    pixels = rows.mT if is_last else rows
    return pixels.unflatten(2, values.shape[2:]) if values.dim() > 2 else pixels[:, :, 0]


def normal(*shape, dtype, device, layout="contiguous", mean=0.0, std=1.0):
    values = torch.randn(shape, dtype=torch.float32, device=device) * std + mean
    return LAYOUTS[layout](values.to(dtype))


def virtual_memory(elements, dtype, device):
    """Virtual memory: only written pages are backed."""
    try:
        return torch.empty(elements, dtype=dtype, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"cannot reserve {elements} elements: {error}")


def spread(*shape, dtype, device, layout="contiguous"):
    """Values with a spread in each row, so that a layer norm of few values is well-conditioned."""
    values = torch.randn(shape, dtype=torch.float32, device=device) * 0.1
    values += torch.linspace(-1, 1, shape[-1], device=device)
    return LAYOUTS[layout](values.to(dtype))


def rotary_tables(*shape, dtype, device):
    """Cosine and sine of unrelated angles, so that the two entries of every pair differ."""
    angles = torch.rand(2, *shape, device=device) * 2 * math.pi
    return angles[0].cos().to(dtype), angles[1].sin().to(dtype)


def _table_shape(form):
    def shape(batch, seq, heads, dim):
        sizes = {"1": 1, "B": batch, "S": seq, "H": heads, "d": dim, "p": dim // 2}
        return tuple(math.prod(sizes[letter] for letter in part) for part in form.split("_"))

    return shape


# Accepted shapes of a rotation's cos and sin, and of those with one value per pair.
TABLE_SHAPES = ["S_d", "S_Hd", "1_S_d", "B_S_d", "1_S_Hd", "B_S_Hd", "1_S_1_d", "B_S_1_d"]
TABLE_SHAPES = {form: _table_shape(form) for form in (*TABLE_SHAPES, "1_S_H_d", "B_S_H_d")}
PAIR_TABLE_SHAPES = [form.replace("d", "p") for form in TABLE_SHAPES if not form.endswith("Hd")]
PAIR_TABLE_SHAPES = {form: _table_shape(form) for form in PAIR_TABLE_SHAPES}

GRID_AXES = ("frame", "height", "width")


def grid_tables(grid, pairs, *, dtype, device):
    """frame, height and width: cosine and sine (size, pairs) of each axis, as keyword arguments."""
    return {
        axis: rotary_tables(size, count, dtype=dtype, device=device)
        for axis, size, count in zip(GRID_AXES, grid, pairs, strict=True)
    }


def coordinates_and_frequencies(batch, seq, axes, count, device, largest_angle=15708.0):
    """As in LTX-Video: coordinates in [-1, 1], geometric frequencies up to the largest angle."""
    coordinates = torch.rand(batch, seq, axes, device=device) * 2 - 1
    exponents = torch.linspace(0, 1, count, device=device)
    return coordinates, torch.tensor(largest_angle, device=device) ** exponents


def heads_of(shape, dtype, device, *, has_head_dim=True, layout="contiguous"):
    """A tensor of (batch, seq, heads, head_dim), the last two flattened unless `has_head_dim`."""
    batch, seq, heads, head_dim = shape
    size = shape if has_head_dim else (batch, seq, heads * head_dim)
    return normal(*size, dtype=dtype, device=device, layout=layout)


def packed_projection(form, shape, dtype, device):
    """Query, key and value as views of one tensor."""
    batch, seq, heads, head_dim = shape
    options = {"dtype": dtype, "device": device}
    if form == "chunk":
        return normal(batch, seq, 3 * heads * head_dim, **options).chunk(3, -1)
    if form == "unbind":
        return normal(batch, seq, 3, heads, head_dim, **options).unbind(2)
    if form == "interleaved_heads":
        return normal(batch, seq, heads, 3 * head_dim, **options).chunk(3, -1)
    assert form == "heads_first"
    return normal(3, batch, heads, seq, head_dim, **options).transpose(2, 3).unbind(0)


PACKED_FORMS = ["chunk", "unbind", "interleaved_heads", "heads_first"]


# Selections of several items, by index.
CHOICES = {
    "all": lambda i, count: True,
    "none": lambda i, count: False,
    "even": lambda i, count: i % 2 == 0,
    "odd": lambda i, count: i % 2 == 1,
    "first": lambda i, count: i == 0,
    "last": lambda i, count: i == count - 1,
    "all_but_first": lambda i, count: i > 0 or count == 1,
    "all_but_last": lambda i, count: i < count - 1,
}
# The modulators and vectors of a call that are float32 while rows are 16-bit.
MIXTURES = ("all", "even", "odd")


def mixed(mixture, tensors, dtype):
    """Float32 tensors by name. Those outside the mixture are converted to `dtype`."""
    is_float32 = CHOICES[mixture]
    return {
        name: tensor if is_float32(i, len(tensors)) else tensor.to(dtype)
        for i, (name, tensor) in enumerate(tensors.items())
    }


def rows_of(hidden, dtype):
    """Enough rows for a meaningful ratio of errors: in float32 each row's statistics are also rounded."""
    return max(64 if dtype == torch.float32 else 8, 2 * math.ceil(CONTRACT_ELEMENTS / hidden / 2))


# Shapes of scale, shift and gate that broadcast against (B, S, D). From a table they are views of
# (..., count, D), as returned by `unbind`.
MODULATIONS = ("D", "SD", "B1D", "1SD", "BSD", "D_table", "B1D_table", "BSD_table")


def modulation(form, count, x_shape, *, dtype, device):
    """`count` tensors that modulate a 3-D x."""
    sizes = dict(zip("BSD", x_shape, strict=True), **{"1": 1})
    shape = [sizes[letter] for letter in form.removesuffix("_table")]
    if not form.endswith("_table"):
        return [normal(*shape, dtype=dtype, device=device) for _ in range(count)]
    table = normal(*shape[:-1], count, shape[-1], dtype=dtype, device=device)
    return list(table.unbind(-2))


# --------------------------------------------------------------------------------------------------
# The operations


@dataclass(frozen=True)
class Operation:
    """Names of arguments, by kind.

    Attributes:
        rows: (..., D), or (..., 2 * D) for a gated operation. The first sets shape, dtype and device.
        modulations: broadcast against the rows, T or float32.
        vectors: (D,), T, for a norm also float32.
        strings: accepted values of each string argument, the default first.
    """

    rows: tuple = ()
    modulations: tuple = ()
    vectors: tuple = ()
    strings: tuple = ()


PAIR_LAYOUTS = ("interleaved", "half")
NORM_SCOPES = ("across_heads", "per_head", "layer_per_head", "none")
_APPROXIMATE, _ACTIVATED = ("approximate", ("none", "tanh")), ("activated", ("second", "first"))
_AFFINE, _MODULATION, _SUM = ("weight", "bias"), ("scale", "shift"), ("residual", "x")
_PAIR = (*_MODULATION, "second_scale", "second_shift")
_LAYOUT, _ACTIVATION = ("layout", PAIR_LAYOUTS), ("activation", ("none", "silu"))
TABLE = {
    "rms_norm": Operation(("x",), (), ("weight",)),
    "layer_norm": Operation(("x",), (), _AFFINE),
    "rms_norm_modulate": Operation(("x",), _MODULATION, ("weight",)),
    "layer_norm_modulate": Operation(("x",), _MODULATION, _AFFINE),
    "layer_norm_modulate_pair": Operation(("x",), _PAIR, _AFFINE),
    "gated_residual": Operation(_SUM, ("gate",)),
    "gated_residual_rms_norm_modulate": Operation(_SUM, ("gate", *_MODULATION), ("weight",)),
    "gated_residual_layer_norm_modulate": Operation(_SUM, ("gate", *_MODULATION), _AFFINE),
    "gated_residual_layer_norm_modulate_pair": Operation(_SUM, ("gate", *_PAIR), _AFFINE),
    "group_norm": Operation(strings=(_ACTIVATION,)),
    "channel_rms_norm": Operation(strings=(_ACTIVATION,)),
    "qk_norm_rope": Operation(strings=(("norm", NORM_SCOPES), _LAYOUT)),
    "rope": Operation(strings=(_LAYOUT,)),
    "rope_3d": Operation(strings=(_LAYOUT,)),
    "gelu": Operation(("x",), (), ("bias",), (_APPROXIMATE,)),
    "silu": Operation(("x",), (), ("bias",), ()),
    "geglu": Operation(("x",), (), ("bias",), (_APPROXIMATE, _ACTIVATED)),
    "swiglu": Operation(("x",), (), ("bias",), (_ACTIVATED,)),
    "softmax": Operation(("x",)),
    "attention": Operation(),
    "attention_int8": Operation(),
}
# FP8 operations are not in the table: they have no derivatives, and their tensors have several dtypes.
# Those whose name without the ending is another operation, which takes the same arguments.
WITH_FP8_RESULT = [
    name + "_fp8" for name in TABLE if "norm_modulate" in name and "pair" not in name
]
WITH_FP8_RESULT += [f"{name}_fp8" for name in ("rms_norm", "layer_norm", "gelu", "geglu", "swiglu")]
FP8_PRODUCTS = ("linear_fp8", "linears_fp8", "linear_gelu_fp8", "linear_gated_residual_fp8")
FP8_OPERATIONS = ("quantize_fp8", *FP8_PRODUCTS, "lora_down", *WITH_FP8_RESULT)
# All that have no derivatives and are not in the table.
PLAIN_OPERATIONS = (*FP8_OPERATIONS, "linears_lora", "conv3d")
GATED = ("geglu", "swiglu")
ACTIVATIONS = ("gelu", "silu", *GATED)
ROW_NORMS = [name for name, o in TABLE.items() if o.rows and name not in (*ACTIVATIONS, "softmax")]
ROW_OPERATIONS = [name for name, o in TABLE.items() if o.rows]
# Operations that write a single result to the caller's tensor.
WITH_OUT = (*ACTIVATIONS, "attention")

# Other forms of calls, and the operation of each.
QK_OPERATIONS = ["qk_norm_rope", "qk_norm_coordinate_rope", "qk_norm_two_ropes"]
ROPE_OPERATIONS = ["rope", "rope_3d"]
OPERATIONS = [*TABLE, *QK_OPERATIONS[1:]]
# From tables with one value per pair, and from a complex table.
BY_PAIR, BY_COMPLEX = "_by_pair", "_by_complex"
# With every second tensor that may be float32 in float32, and without every second optional one.
MIXED, SPARSE = "_mixed", "_sparse"
CHANNELS_LAST, RMS_CHANNELS_LAST = "group_norm_channels_last", "channel_rms_norm_channels_last"
# With all parts of a residual branch, and with each scale, shift and gate as a table's row and an embedding.
BRANCH, TABLE_ROWS = "_branch", "_table_rows"
# With a table of each scale, shift and gate, and the index of each token's row.
INDEXED = "_indexed"
# With a float32 residual beside a 16-bit x.
FLOAT32_RESIDUAL = "_float32_residual"
FLOAT32_RESIDUAL_OPERATIONS = ["gated_residual", "gated_residual_rms_norm_modulate"]
BRANCH_OPERATIONS = [name for name in ROW_NORMS if name.startswith("gated") and "pair" not in name]
TABLE_OPERATIONS = [*BRANCH_OPERATIONS, "rms_norm_modulate", "layer_norm_modulate"]
# With tensors (B, S, H * d) and the number of heads.
HEADS_GIVEN = "attention_heads_given"
# With the logarithms of the sums of the exponentials.
WITH_LSE = "attention_with_lse"
# With lists of key blocks, and bounds.
WITH_BLOCKS = "attention_with_blocks"
INT8_HEADS_GIVEN, INT8_WITH_LSE = "attention_int8_heads_given", "attention_int8_with_lse"
# With LayerNorm of each head.
OF_LAYER_NORM = "qk_norm_rope_of_layer_norm"
# With a scale for each block of a row.
IN_BLOCKS = "_in_blocks"
FP8_CALLS = [
    *FP8_OPERATIONS,
    *(name + IN_BLOCKS for name in ("quantize_fp8", "swiglu_fp8", "lora_down", *FP8_PRODUCTS)),
    *(f"{name}_fp8{BRANCH}" for name in BRANCH_OPERATIONS if f"{name}_fp8" in WITH_FP8_RESULT),
    *(
        f"{name}_fp8{form}"
        for name in TABLE_OPERATIONS
        for form in (TABLE_ROWS, INDEXED)
        if f"{name}_fp8" in WITH_FP8_RESULT
    ),
]
LORA_DOWN_OF_16_BITS = "lora_down_of_16_bits"
PLAIN_CALLS = [*FP8_CALLS, "linears_lora", LORA_DOWN_OF_16_BITS, "conv3d"]
# Those that write to a pair of tensors.
FP8_WITH_OUT = [
    name + how
    for name in ("quantize_fp8", "swiglu_fp8", "linear_gelu_fp8")
    for how in ("", IN_BLOCKS)
]
CALLS = [
    *OPERATIONS,
    *(name + by for name in ("rope", "qk_norm_rope") for by in (BY_PAIR, BY_COMPLEX)),
    *(name + MIXED for name in ROW_NORMS),
    *(name + SPARSE for name in ROW_NORMS if "modulate" in name),
    *(name + FLOAT32_RESIDUAL for name in FLOAT32_RESIDUAL_OPERATIONS),
    *(name + BRANCH for name in BRANCH_OPERATIONS),
    *(name + TABLE_ROWS for name in TABLE_OPERATIONS),
    *(name + INDEXED for name in TABLE_OPERATIONS),
    CHANNELS_LAST,
    RMS_CHANNELS_LAST,
    HEADS_GIVEN,
    WITH_LSE,
    WITH_BLOCKS,
    INT8_HEADS_GIVEN,
    INT8_WITH_LSE,
    OF_LAYER_NORM,
]
# Small calls of attention: (batch, queries, keys, heads, key heads), head dim, layout, dtype.
SMOKE = [
    ((1, 1, 1, 1, 1), 64, "contiguous", torch.bfloat16),
    ((2, 65, 177, 2, 1), 64, "chunk", torch.bfloat16),
    ((2, 193, 300, 2, 2), 128, "unbind", torch.float16),
    ((1, 130, 129, 2, 2), 128, "misaligned", torch.bfloat16),
    ((2, 70, 257, 4, 2), 64, "odd_rows", torch.float16),
    ((1, 1025, 300, 2, 1), 64, "chunk", torch.bfloat16),
    ((1, 1025, 257, 1, 1), 128, "contiguous", torch.bfloat16),
    ((2, 65, 177, 2, 1), 8, "chunk", torch.float16),
    ((2, 193, 300, 2, 2), 72, "unbind", torch.bfloat16),
    ((1, 1025, 257, 2, 2), 96, "odd_rows", torch.bfloat16),
    ((1, 1025, 129, 2, 1), 112, "contiguous", torch.float16),
]
HEADS = 4


def operation_of(call):
    """The public name of a form of calls."""
    if call.startswith("qk_norm"):
        return "qk_norm_rope"
    return max((name for name in (*TABLE, *PLAIN_OPERATIONS) if call.startswith(name)), key=len)


def parameters_of(name):
    return inspect.signature(getattr(load_kernel(), operation_of(name))).parameters


def optional_tensors(name, by_keyword=False):
    """The optional input tensors of an operation, except sin, which belongs to cos, and those accepted only
    by keyword unless `by_keyword`."""
    return [
        key
        for key, parameter in parameters_of(name).items()
        if parameter.annotation in ("Optional[Tensor]", "Optional[Modulator]")
        and (by_keyword or parameter.kind is not parameter.KEYWORD_ONLY)
        and key != "sin"
    ]


_OF_16_BITS = ("attention", "lora_down", "linears_lora", "conv3d", *FP8_PRODUCTS)


def widest_dtype(name):
    return torch.bfloat16 if name.startswith(_OF_16_BITS) else torch.float32


def narrowed(dtype, name):
    """The dtype, or a 16-bit one if a call accepts no other."""
    return min(dtype, widest_dtype(name), key=lambda d: d.itemsize)


def smallest_factor(count):
    """A divisor other than 1 if possible: with one channel per group a channel bias would change nothing."""
    return next((n for n in range(2, count + 1) if count % n == 0), 1)


def sample(kernel, name, *, dtype, device, shape=(2, 16, 256), heads=HEADS, layout="contiguous"):
    """The public function and arguments of one valid call with all optional arguments."""
    suffixes = (BY_PAIR, BY_COMPLEX, MIXED, SPARSE, BRANCH, TABLE_ROWS, INDEXED, FLOAT32_RESIDUAL)
    for suffix in suffixes:
        if name.endswith(suffix):
            plain = name.removesuffix(suffix)
            options = {"dtype": dtype, "device": device, "shape": shape, "layout": layout}
            function, arguments = sample(kernel, plain, heads=heads, **options)
            if suffix in _CHANGES:
                return function, _CHANGES[suffix](arguments)
            if suffix == MIXED:
                chosen = (*TABLE[plain].modulations, *TABLE[plain].vectors)[::2]
                return function, {**arguments, **{key: arguments[key].float() for key in chosen}}
            if suffix == SPARSE:
                return function, {**arguments, **dict.fromkeys(optional_tensors(plain)[::2])}
            return function, _with_pair_tables(arguments, heads, suffix == BY_COMPLEX)

    def tensor(*size, **options):
        return normal(*size, dtype=dtype, device=device, **options)

    batch, seq, hidden = shape
    block_size = 128 if name.endswith(IN_BLOCKS) else None
    if operation_of(name) == "quantize_fp8":
        return kernel.quantize_fp8, {"x": tensor(*shape, layout=layout), "block_size": block_size}
    if operation_of(name) in FP8_PRODUCTS:
        blocks = math.ceil(hidden / block_size) if block_size else 1
        arguments = fp8_operands(shape, 40, blocks, 24, dtype=dtype, device=device)
        if operation_of(name) == "linears_fp8":
            arguments = several_weights(arguments, (40, 7, 64), (24, None, 8))
        if operation_of(name) == "linear_gelu_fp8":
            arguments["approximate"] = "tanh"
            del arguments["dtype"]
        if operation_of(name) == "linear_gated_residual_fp8":
            del arguments["dtype"]
            residual = tensor(batch, seq, 40, layout=layout)
            arguments = {"residual": residual, **arguments, "gate": tensor(batch, 1, 40)}
        return getattr(kernel, operation_of(name)), arguments
    if name == "linears_lora":
        sizes = (40, 7, 64), (24, None, 8)
        arguments = lora_operands(shape, *sizes, dtype=dtype, device=device)
        return kernel.linears_lora, {**arguments, "approximate": "tanh"}
    if name == "conv3d":
        size = (batch, 2, seq, 3, 8 * max(hidden // 32, 1))
        arguments = conv3d_operands(size, 24, (3, 3, 3), 2, dtype=dtype, device=device)
        return kernel.conv3d, {**arguments, "padding": (0, 1, 1, 1), "border": "replicate"}
    if operation_of(name) == "lora_down":
        blocks = math.ceil(hidden / block_size) if block_size else 1
        blocks = None if name == LORA_DOWN_OF_16_BITS else blocks
        arguments = lora_down_operands(shape, (24, 3, 8), blocks, dtype=dtype, device=device)
        return kernel.lora_down, arguments
    if operation_of(name) in WITH_FP8_RESULT:
        quantized = operation_of(name)
        how = {"dtype": dtype, "device": device, "shape": shape, "heads": heads, "layout": layout}
        _, arguments = sample(kernel, quantized.removesuffix("_fp8"), **how)
        if quantized == "swiglu_fp8":
            arguments["block_size"] = block_size
        return getattr(kernel, quantized), arguments
    if operation_of(name) in ("group_norm", "channel_rms_norm"):
        is_last = name in (CHANNELS_LAST, RMS_CHANNELS_LAST)
        x = tensor(batch, hidden, seq, layout=layout).mT if is_last else None
        arguments = {"x": tensor(*shape, layout=layout) if x is None else x}
        arguments["weight"], arguments["bias"] = (tensor(seq, mean=0.5) for _ in range(2))
        if operation_of(name) == "channel_rms_norm":
            arguments["scale"], arguments["shift"] = (tensor(batch, seq) for _ in range(2))
            return kernel.channel_rms_norm, {**arguments, "activation": "silu"}
        arguments["num_groups"] = max(seq // smallest_factor(seq), 1)
        arguments["channel_bias"], arguments["activation"] = tensor(batch, seq), "silu"
        return kernel.group_norm, arguments
    if name.startswith("attention"):
        head_dim, count = 64, max(hidden // 64, 1)
        size = (batch, seq, count * head_dim)
        arguments = {key: tensor(*size, layout=layout) for key in ("q", "k", "v")}
        if name.endswith("heads_given"):
            arguments["heads"] = count
        else:
            arguments = {key: t.unflatten(2, (-1, head_dim)) for key, t in arguments.items()}
        if name.endswith("with_lse"):
            arguments["return_lse"] = True
        if name == WITH_BLOCKS:
            arguments["blocks"] = sample_of_blocks(kernel, shape, count, device)
        arguments["scale"] = 0.2
        if operation_of(name) == "attention":
            arguments["key_bias"] = tensor(batch, seq)
        lengths = seq - torch.arange(batch, dtype=torch.int32, device=device) * seq // 3
        arguments["key_lengths"] = lengths
        arguments["gate"] = tensor(batch, seq, count, mean=0.5)
        arguments["addend"] = torch.empty_like(arguments["q"]).copy_(tensor(*arguments["q"].shape))
        return getattr(kernel, operation_of(name)), arguments
    if name == "rope":
        arguments = {"x": tensor(*shape, layout=layout), "layout": "half"}
        tables = rotary_tables(seq, hidden // heads, dtype=torch.float32, device=device)
        arguments["cos"], arguments["sin"] = tables
        return kernel.rope, arguments
    if name == "rope_3d":
        x = tensor(*shape, layout=layout).unflatten(2, (heads, -1))
        half, third = hidden // heads // 2, hidden // heads // 6
        grid = (2, 2, seq // 4) if seq % 4 == 0 else (1, seq, 1)
        pairs = half - 2 * third, third, third
        tables = grid_tables(grid, pairs, dtype=torch.float32, device=device)
        return kernel.rope_3d, {"x": x, **tables, "layout": "interleaved"}
    if name in (*QK_OPERATIONS, OF_LAYER_NORM):
        arguments = {key: tensor(*shape, layout=layout) for key in ("q", "k")}
        arguments.update({key: tensor(hidden, mean=0.5) for key in ("q_weight", "k_weight")})
        if name == OF_LAYER_NORM:
            vectors = ("q_weight", "k_weight", "q_bias", "k_bias")
            arguments.update({key: tensor(hidden // heads, mean=0.5) for key in vectors})
            arguments["norm"] = "layer_per_head"
        if name in ("qk_norm_rope", OF_LAYER_NORM):
            arguments["rope"] = rotary_tables(1, seq, hidden, dtype=torch.float32, device=device)
        else:
            count = (hidden // 2 - 1) // 3
            rope = coordinates_and_frequencies(1, seq, 3, count, device)
            arguments["rope"] = kernel.CoordinateRope(*rope)
        if name == "qk_norm_two_ropes":
            arguments["k"] = tensor(batch, seq + 1, hidden, layout=layout)
            tables = rotary_tables(seq + 1, hidden // heads, dtype=torch.float32, device=device)
            arguments["k_rope"] = tables
        return kernel.qk_norm_rope, {**arguments, "heads": heads}
    operation = TABLE[name]
    columns = 2 * hidden if name in GATED else hidden
    arguments = {key: tensor(batch, seq, columns, layout=layout) for key in operation.rows}
    for i, key in enumerate(operation.modulations, 1):
        is_of_tokens = 1 < i == len(operation.modulations)
        arguments[key] = tensor(batch, seq if is_of_tokens else 1, columns)
    mean = 0.0 if name in ACTIVATIONS else 0.5
    arguments.update({key: tensor(columns, mean=mean) for key in operation.vectors})
    arguments.update({key: choices[1] for key, choices in operation.strings})
    return getattr(kernel, name), arguments


def sample_of_blocks(kernel, shape, heads, device):
    """All blocks are bounded ones, and for the last head also full ones. The bounds leave each query a key in
    the first half of the keys."""
    batch, seq, _ = shape
    rows = math.ceil(seq / 64)
    indices = torch.arange(rows, dtype=torch.int32).expand(1, 1, rows, rows).contiguous()
    counts = torch.full((1, 1, rows), rows, dtype=torch.int32)
    full_counts = torch.zeros(batch, heads, rows, dtype=torch.int32)
    full_counts[:, -1] = rows
    query = torch.arange(seq, dtype=torch.int32)
    fields = counts, indices, full_counts, indices.expand(batch, heads, rows, rows).contiguous()
    bounds = torch.stack([query // 2, query + 1], 1)[None, None]
    *fields, bounds = (tensor.to(device) for tensor in (*fields, bounds))
    return kernel.KeyBlocks(*fields, (64, 64), bounds)


def low_rank(rows, out_features, rank, *, dtype, device):
    """low and up, or Nones. Of small integers, so that their product is exact. Several ranks: several ups."""
    if rank is None:
        return None, None

    def integers(*size):
        return torch.randint(-3, 4, size, device=device).to(dtype)

    if isinstance(rank, tuple):
        return integers(*rows, sum(rank)), tuple(integers(out_features, each) for each in rank)
    return integers(*rows, rank), integers(out_features, rank)


def lora_operands(shape, out_features, ranks, *, dtype, device):
    """Arguments of linears_lora."""
    terms = [
        low_rank(shape[:-1], size, rank, dtype=dtype, device=device)
        for size, rank in zip(out_features, ranks, strict=True)
    ]
    lows, ups = zip(*terms, strict=True)
    return {
        "x": normal(*shape, dtype=dtype, device=device),
        "weights": tuple(
            normal(size, shape[-1], dtype=dtype, device=device) for size in out_features
        ),
        "lows": lows,
        "ups": ups,
        "biases": tuple(normal(size, dtype=dtype, device=device) for size in out_features),
    }


def fp8_operands(shape, out_features, blocks=1, rank=None, *, dtype, device):
    """Arguments of linear_fp8."""

    def fp8(*size):
        values = normal(*size, dtype=torch.float32, device=device, std=100)
        # Some versions of PyTorch make NaN of larger values.
        return values.clamp(-448, 448).to(torch.float8_e4m3fn)

    def scale(*size):
        return (torch.rand(size, device=device) + 0.5) / 100

    low, up = low_rank(shape[:-1], out_features, rank, dtype=dtype, device=device)
    return {
        "x": fp8(*shape),
        "x_scale": scale(*shape[:-1], blocks),
        "weight": fp8(out_features, shape[-1]),
        "weight_scale": scale(out_features, 1),
        "bias": normal(out_features, dtype=dtype, device=device),
        "low": low,
        "up": up,
        "dtype": dtype,
    }


def lora_down_operands(shape, ranks, blocks=1, *, dtype, device):
    """Arguments of lora_down. Without `blocks` x is of 16 bits."""
    if blocks is None:
        operands = {"x": normal(*shape, dtype=dtype, device=device)}
    else:
        fp8 = fp8_operands(shape, 0, blocks, dtype=dtype, device=device)
        operands = {"x": fp8["x"], "x_scale": fp8["x_scale"]}
    downs = tuple(normal(rank, shape[-1], dtype=dtype, device=device) for rank in ranks)
    scales = tuple((0.7, -2.5, 1.0, 0.0)[i % 4] for i in range(len(ranks)))
    return {**operands, "downs": downs, "scales": scales}


def several_weights(arguments, out_features, ranks=(None, None, None)):
    """Arguments of linears_fp8, for those of linear_fp8."""
    x, dtype = arguments["x"], arguments["dtype"]
    of_each = [
        fp8_operands(x.shape, size, rank=rank, dtype=dtype, device=x.device)
        for size, rank in zip(out_features, ranks[: len(out_features)], strict=True)
    ]
    return {
        "x": x,
        "x_scale": arguments["x_scale"],
        "weights": tuple(each["weight"] for each in of_each),
        "weight_scales": tuple(each["weight_scale"] for each in of_each),
        "biases": tuple(each["bias"] for each in of_each),
        "lows": tuple(each["low"] for each in of_each),
        "ups": tuple(each["up"] for each in of_each),
        "dtype": dtype,
    }


def conv3d_operands(size, out_channels, taps, previous, *, dtype, device):
    """Arguments of conv3d: x (B, C, T, H, W) of this size (B, T, H, W, C), and a number of frames before."""
    batch, frames, height, width, channels = size
    options = {"dtype": dtype, "device": device}
    x, before = (
        normal(batch, count, height, width, channels, **options).movedim(-1, 1)
        for count in (frames, previous)
    )
    weight = normal(out_channels, channels, *taps, **options) / math.sqrt(
        channels * math.prod(taps)
    )
    bias = normal(out_channels, **options)
    return {"x": x, "weight": weight, "bias": bias, "previous": before if previous else None}


def with_branch(arguments, parts=("addend", "x_norm", "tanh_gate"), has_weight=True):
    """The same call with these parts of a residual branch."""
    arguments, x = dict(arguments), arguments["x"]
    if "addend" in parts:
        arguments["addend"] = x.roll(1, -1) + 1
    if "x_norm" in parts:
        weight = (normal(x.shape[-1], dtype=x.dtype, device=x.device) / 2 + 1).contiguous()
        arguments |= {"x_eps": 1e-5, "x_weight": weight if has_weight else None}
    if "tanh_gate" in parts:
        arguments["tanh_gate"] = True
    return arguments


def with_table(arguments):
    """The same call with each scale, shift and gate as a pair of a table's row and an embedding."""
    tables = {
        key: (normal(t.shape[-1], dtype=t.dtype, device=t.device), t)
        for key in ("scale", "shift", "gate")
        if (t := arguments.get(key)) is not None
    }
    return {**arguments, **tables}


def with_index(arguments, rows=3, is_shared=False):
    """The same call with a table of each scale, shift and gate, from which each token chooses its row. The
    index is shared by all samples or (B, S)."""
    tables = {
        key: normal(rows, t.shape[-1], dtype=t.dtype, device=t.device)
        for key in ("scale", "shift", "gate")
        if (t := arguments.get(key)) is not None
    }
    *leading, _ = arguments["x"].shape
    index = torch.randint(rows, leading[1:] if is_shared else leading, dtype=torch.int32)
    return {**arguments, **tables, "index": index.to(arguments["x"].device)}


def with_float32_residual(arguments):
    return {**arguments, "residual": arguments["residual"].float()}


_CHANGES = {
    BRANCH: with_branch,
    TABLE_ROWS: with_table,
    INDEXED: with_index,
    FLOAT32_RESIDUAL: with_float32_residual,
}


def _with_pair_tables(arguments, heads, is_complex):
    """The same call with tables of one value per pair, or with a complex table."""
    x = arguments.get("x", arguments.get("q"))
    in_heads = x if x.dim() == 4 else x.unflatten(2, (heads, -1))
    shape = PAIR_TABLE_SHAPES["1_S_H_p"](*in_heads.shape)
    tables = rotary_tables(*shape, dtype=torch.float32, device=x.device)
    tables = (torch.complex(*tables), None) if is_complex else tables
    if "rope" in arguments:
        return {**arguments, "rope": tables[0] if is_complex else tables}
    return {**arguments, "x": in_heads, **dict(zip(("cos", "sin"), tables, strict=True))}


def without_optional(name, arguments):
    """The same call without optional arguments, except those that affect the meaning of its tensors."""
    parameters, left_out = parameters_of(name), {*optional_tensors(name)}
    if operation_of(name) == "lora_down" and name != LORA_DOWN_OF_16_BITS:
        return {key: arguments[key] for key in ("x", "downs", "x_scale")}
    kept = ["rope", "k_rope", "sin", "heads", "return_lse", "blocks"]
    operation = TABLE.get(operation_of(name).removesuffix("_fp8"), Operation())
    if not left_out >= {*operation.modulations}:
        kept.append("index")  # of the tables
    if name == "conv3d":
        kept += ["padding", "border"]
    return {
        key: None if key in left_out else value
        for key, value in arguments.items()
        if key in (*left_out, *kept) or parameters[key].default is inspect.Parameter.empty
    }


def out_for(function, arguments, layout="odd_rows"):
    """Tensors for the results of the call, which hold NaN."""
    results = function(**arguments)
    outs = tuple(LAYOUTS[layout](torch.full_like(out, math.nan)) for out in as_tuple(results))
    return outs[0] if isinstance(results, torch.Tensor) else outs


def writing_call(kernel, name, *, out_layout="odd_rows", in_place=False, values=True, **options):
    """A call that writes to the caller's tensors: `out`, for qk_norm_rope with values, or in place."""
    function, arguments = sample(kernel, name, **options)
    if in_place:
        return function, {**arguments, "inplace": True}
    out = out_for(function, arguments, out_layout)
    if "q" in arguments and isinstance(out, tuple) and values:
        arguments["v"] = torch.randn_like(arguments["k"])
        out = (*out, LAYOUTS[out_layout](torch.full_like(arguments["k"], math.nan)))
    return function, {**arguments, "out": out}


# Calls that write to the caller's tensors: operation, and whether in place.
WRITING = [(name, False) for name in (*WITH_OUT, *QK_OPERATIONS)]
WRITING += [(name, True) for name in (*QK_OPERATIONS, f"qk_norm_rope{BY_COMPLEX}", OF_LAYER_NORM)]
every_writing = pytest.mark.parametrize(("name", "in_place"), WRITING)


def written_by(arguments):
    """The tensors that such a call writes to."""
    return as_tuple(arguments["out"]) if "out" in arguments else (arguments["q"], arguments["k"])


# All calls; None for those that return new tensors.
ALL_CALLS = [*((name, None) for name in CALLS), *WRITING]
EVERY_CALL = [
    *ALL_CALLS,
    *((name, None) for name in PLAIN_CALLS),
    *((name, False) for name in (*FP8_WITH_OUT, "linears_lora")),
]
every_kind_of_call = pytest.mark.parametrize(("name", "in_place"), EVERY_CALL)


def any_call(kernel, name, in_place, *, values=True, **options):
    if in_place is None:
        return sample(kernel, name, **options)
    return writing_call(kernel, name, in_place=in_place, values=values, **options)

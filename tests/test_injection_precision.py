"""``inject_kernels(precision=...)``: which layers are quantized, their values, and everything that users do
with such a model."""

import copy
import functools
import gc
import logging
import re
import sys
import weakref

import diffusers
import peft
import pytest
import torch
import torch._inductor.config as inductor
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8_models
import random_precision
from adapters import add_lora
from changes import offload
from checks import relative_distance
from families import FAMILIES, KERNEL_HEADS, every_family
from fp8_models import is_quantized
from graphs import graphs, module_of  # noqa: F401
from small_models import BY_NAME, run

pytestmark = pytest.mark.usefixtures("_one_thread", "_small_layers")

BFLOAT16 = torch.bfloat16
LTX, FLUX = FAMILIES["ltx"], FAMILIES["flux"]
# So many that some are neither among the first nor among the last that "fp8" leaves.
WANS = ("wan", "helios", "anyflow")  # with the layers of Wan
BLOCKS = {"ltx": 5, "ltx2": 5, "qwenimage": 5, "qwenimage21": 5, **dict.fromkeys(WANS, 7)}
both = pytest.mark.parametrize("precision", ["fp8", "fp8-fast"])


@pytest.fixture
def _small_layers(kernel, monkeypatch):
    """The tests' models have only small layers."""
    monkeypatch.setattr(module_of(kernel, "quantized.precision"), "MIN_FEATURES", 16)


def model_of(family, device, dtype=BFLOAT16, **config):
    if family.name in BLOCKS:
        config = {"blocks": BLOCKS[family.name], **config}
    return family.model(device, dtype, **KERNEL_HEADS, **config).requires_grad_(False)


def quantized_names(model):
    """The names of quantized layers, without those of adapters."""
    return [
        name.replace(".base_layer", "")
        for name, module in model.named_modules()
        if is_quantized(module)
    ]


def kinds(names):
    return {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names}


def quantize_by_hand(model, names):
    for name in names:
        layer = model.get_submodule(name)
        layer.weight = fp8_models.quantized(layer.weight.data)


def assert_close(out, expected, slack):
    assert torch.isfinite(out).all()
    assert relative_distance(out, expected) <= slack


def assert_explained(out, eager, plain):
    """A model whose layers are quantized on the kernels is at most 1.2 times as far from the original as one
    that quantizes the same layers by PyTorch. For 24 samples the quotient's standard deviation between seeds
    is 1.6 to 4.7%."""
    error, eager_error = (relative_distance(each, plain) for each in (out, eager))
    assert 0 < error <= 1.2 * eager_error, (error, eager_error)


ATTENTION = ["to_q", "to_k", "to_v", "to_out.*"]
OF_LUMINA2 = {"attn": ATTENTION, "feed_forward": ["linear_1", "linear_2", "linear_3"]}
OF_WAN = {f"blocks.*.attn{i}.{name}" for i in "12" for name in ATTENTION}
OF_FIBO2 = {"attention": ATTENTION, "feed_forward": ["w1", "w2", "w3"]}
# The layers that "fp8-fast" adds to those of "fp8", by family.
ADDED = {
    **dict.fromkeys(WANS, OF_WAN),
    "lumina2": {f"noise_refiner.*.{k}.{name}" for k, names in OF_LUMINA2.items() for name in names},
    "z_image": {f"noise_refiner.*.attention.{name}" for name in ATTENTION},
    "bria_fibo2": {
        f"noise_refiner.*.{k}.{name}" for k, names in OF_FIBO2.items() for name in names
    },
}
# Blocks by index that "fp8" quantizes in models of ``BLOCKS`` blocks.
MIDDLE = {name: {count // 2} for name, count in BLOCKS.items()}


@every_family
def test_layers_of_fp8_fast(kernel, device, family):
    """ "fp8" leaves the first and last blocks of some families. "fp8-fast" leaves those of Wan."""
    safe, fast = (
        kernel.inject_kernels(model_of(family, device), precision=precision).quantized
        for precision in ("fp8", "fp8-fast")
    )
    assert set(safe) <= set(fast) and kinds(fast) - kinds(safe) == ADDED.get(family.name, set())
    if (middle := MIDDLE.get(family.name)) is not None:
        in_safe, in_fast = (
            {int(re.search(r"blocks\.(\d+)\.", name)[1]) for name in names}
            for names in (safe, fast)
        )
        every = set(range(BLOCKS[family.name]))
        assert (in_safe, in_fast) == (middle, middle if family.name in WANS else every)


def test_rows_of_zeros(kernel, device):
    """As pruned layers have, or layers that begin at zero. By torchao's default they become NaN."""
    plain = model_of(FLUX, device)
    arguments = FLUX.inputs(device, BFLOAT16)
    block = plain.transformer_blocks[0]
    block.attn.to_k.weight[::3] = 0
    block.ff.net[2].weight[5] = -0.0
    block.attn.to_out[0].weight.zero_()
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model, precision="fp8")
    to_out = model.transformer_blocks[0].attn.to_out[0]
    assert is_quantized(to_out)
    assert_close(run(model, arguments), run(plain, arguments), 0.1)
    x = torch.zeros(2, to_out.in_features, dtype=BFLOAT16, device=device)
    by_torchao = nn.functional.linear(x, to_out.weight)
    assert torch.equal(by_torchao, torch.zeros_like(x))


@both
@every_family
def test_quantized(kernel, device, family, precision):
    """Every linear layer is quantized or reported. Of a block's, only modulations are never quantized."""
    model = model_of(family, device)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    report = kernel.inject_kernels(model, precision=precision)
    quantized = set(report.quantized)
    assert quantized and sorted(quantized_names(model)) == sorted(quantized)
    others = re.compile(
        r"_mod\.|modulation|norm|ada|embed|text_fusion|token_refiner|context_refiner|text_transformer"
        r"|img_mlp\.gate$"
    )
    assert not any(others.search(name) for name in quantized)
    never = {e.name for e in report.left_alone if "no attention's or feed" in e.reason}
    in_blocks = [name for name in never if name.startswith(family.block_lists)]
    assert all(others.search(name) for name in in_blocks), in_blocks
    left = {e.name for e in report.left_alone if e.reason.startswith("not quantized: ")}
    assert quantized | left == names and not quantized & left
    stand_ins = {e.name for e in report.replaced if e.replacement == "quantize_fp8, linear_fp8"}
    assert stand_ins == quantized


@pytest.mark.drawn(times=0, period=6)
@both
@every_family
def test_values(kernel, device, family, precision):
    """The same bits as with layers quantized by hand, and as close to the original model as PyTorch's."""
    model = model_of(family, device)
    by_hand, plain = copy.deepcopy(model), copy.deepcopy(model)
    arguments = family.inputs(device, BFLOAT16, batch=24)
    names = kernel.inject_kernels(model, precision=precision).quantized
    quantize_by_hand(by_hand, names)
    eager = fp8_models.eager(by_hand)
    kernel.inject_kernels(by_hand)
    out, calls = fp8_models.run_and_count(model, arguments)
    expected, calls_by_hand = fp8_models.run_and_count(by_hand, arguments)
    assert torch.equal(out, expected) and calls == calls_by_hand
    assert calls["products"] > 0 and "_scaled_mm" not in calls
    assert_explained(out, run(eager, arguments), run(plain, arguments))


@both
def test_unet(kernel, device, precision):
    small = BY_NAME["unet"]
    model = small.model(device, BFLOAT16).requires_grad_(False)
    plain, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    report = kernel.inject_kernels(model, precision=precision)
    assert report.quantized
    assert all(".transformer_blocks." in name for name in report.quantized)
    assert any(".attn1." in name for name in report.quantized)
    quantize_by_hand(by_hand, report.quantized)
    models = (model, fp8_models.eager(by_hand), plain)
    inputs = [small.arguments(device, BFLOAT16, seed) for seed in range(8)]
    assert_explained(*(torch.cat([run(each, one) for one in inputs]) for each in models))


def test_fused_projections(kernel, device):
    model = model_of(FLUX, device)
    model.fuse_qkv_projections()
    report = kernel.inject_kernels(model, precision="fp8")
    assert {
        "transformer_blocks.*.attn.to_qkv",
        "transformer_blocks.*.attn.to_added_qkv",
        "single_transformer_blocks.*.attn.to_qkv",
    } <= kinds(report.quantized)


def test_small_layers(kernel, device, monkeypatch):
    monkeypatch.setattr(module_of(kernel, "quantized.precision"), "MIN_FEATURES", 512)
    model = model_of(FLUX, device)
    with pytest.raises(ValueError, match="it has fewer than 512 features in or out"):
        kernel.inject_kernels(model, precision="fp8")
    assert_unchanged(model)
    monkeypatch.setattr(module_of(kernel, "quantized.precision"), "MIN_FEATURES", 128)
    names = kernel.inject_kernels(model, precision="fp8").quantized
    assert "transformer_blocks.0.attn.to_q" in names


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_weight(kernel, device, dtype, monkeypatch):
    """As torchao's ``quantize_`` makes it with a bound for rows of zeros, also in parts."""
    weight = torch.randn(50, 64, device=device, dtype=dtype)
    expected = fp8_models.quantized(weight)
    for at_once in (2**24, 64 * 7, 1):
        monkeypatch.setattr(module_of(kernel, "quantized.fp8_weights"), "_AT_ONCE", at_once)
        made = module_of(kernel, "quantized.fp8_weights").load_quantizer("fp8")(weight)
        assert made.act_quant_kwargs.hp_value_lb > 0
        made.act_quant_kwargs.hp_value_lb = None
        assert type(made) is type(expected.data) and made.dtype == dtype
        assert torch.equal(made.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
        assert torch.equal(made.scale, expected.scale)
        for name in type(made).optional_tensor_attribute_names:
            if name != "block_size":
                assert getattr(made, name) == getattr(expected, name), name
        assert list(made.block_size) == list(expected.block_size)


def test_keep(kernel, device):
    model = model_of(FLUX, device)
    every = kernel.inject_kernels(copy.deepcopy(model), precision="fp8").quantized
    for keep, pattern in (
        (["*.proj_out"], r"\.proj_out$"),
        (["transformer_blocks.0"], r"^transformer_blocks\.0\."),
        (["transformer_blocks.1.attn.to_?", "proj_out"], r"^transformer_blocks\.1\.attn\.to_.$"),
        (("*.attn", "*.ff"), r"\.(attn|ff)\."),
    ):
        report = kernel.inject_kernels(copy.deepcopy(model), precision="fp8", keep=keep)
        kept = [name for name in every if re.search(pattern, name)]
        assert kept and report.quantized == [name for name in every if name not in kept]
        named = [e.name for e in report.left_alone if e.reason == "not quantized: keep names it"]
        assert named == kept


def test_keep_with_adapters(kernel, device):
    model = model_of(LTX, device)
    adapt(model, "one")
    report = kernel.inject_kernels(
        model, precision="fp8", keep=["*.attn1.to_q", "*.attn1.to_k.base_layer"]
    )
    names = kinds(report.quantized)
    assert "transformer_blocks.*.attn1.to_v.base_layer" in names
    assert not any(re.search("attn1.to_[qk]", name) for name in names)


def assert_unchanged(model):
    for module in model.modules():
        assert not is_quantized(module)
        methods = {"forward", "fuse_lora", "load_lora_adapter", "add_adapter", "merge", "unmerge"}
        assert not {"_apply", "fuse_qkv_projections", *methods} & set(vars(module))
        assert not any("h100" in name for name in vars(module))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"precision": "int8"}, ValueError, r"precision must be None or 'fp8' or 'fp8-fast'"),
        ({"precision": True}, TypeError, "got a bool"),
        ({"precision": "fp8", "keep": ["nothing*"]}, ValueError, r"keep must match .*'nothing\*'"),
        ({"precision": "fp8", "keep": ["*.ff", "x"]}, ValueError, "got 'x'"),
        ({"precision": "fp8", "keep": "proj_out"}, TypeError, "must be a sequence .* 'proj_out'"),
        ({"precision": "fp8", "keep": [1]}, TypeError, "sequence of strings, got .1."),
        ({"keep": ["proj_out"]}, ValueError, "keep must be empty without a precision"),
        ({"precision": "fp8", "keep_originals": 1}, TypeError, "keep_originals must be True"),
        ({"precision": "fp8", "keep": ["*"]}, ValueError, "keep names it"),
    ],
)
def test_wrong_options(kernel, device, options, error, match):
    model = model_of(LTX, device)
    with pytest.raises(error, match=f"^inject_kernels: .*{match}"):
        kernel.inject_kernels(model, **options)
    assert_unchanged(model)


def test_wrong_weights(kernel, device):
    model = model_of(LTX, device, torch.float32)
    with pytest.raises(ValueError, match="needs weights in bfloat16 or float16, got float32 in"):
        kernel.inject_kernels(model, precision="fp8")
    assert_unchanged(model)
    with torch.device("meta"):
        layer = nn.Linear(128, 128, dtype=BFLOAT16)
    model = model_of(LTX, device)
    model.transformer_blocks[2].attn1.to_q = layer
    with pytest.raises(ValueError, match=r"got no values in transformer_blocks\.2\.attn1\.to_q"):
        kernel.inject_kernels(model, precision="fp8")
    assert_unchanged(model)


def test_no_family(kernel, device):
    model = BY_NAME["minimax_music3"].model(device, BFLOAT16)
    for given in (model, nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))):
        sentence = (
            r"^inject_kernels: precision=.fp8. needs a model that runs .* got an? \w+ without one$"
        )
        with pytest.raises(ValueError, match=sentence):
            kernel.inject_kernels(given, precision="fp8")
        assert_unchanged(given)


class Stop(BaseException):
    pass


@both
@pytest.mark.parametrize("is_late", [False, True], ids=["quantizing", "replacing"])
def test_failure(kernel, device, precision, is_late, monkeypatch):
    model = model_of(LTX, device)
    before = dict(model.named_parameters())
    values = {name: value.clone() for name, value in before.items()}
    module = module_of(kernel, "core.patch" if is_late else "quantized.fp8_weights")
    name = "put_in" if is_late else "_set_weight"
    own, calls = getattr(module, name), []

    def failing(*args):
        calls.append(args)
        if len(calls) == 8:
            raise Stop
        return own(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, failing)
        with pytest.raises(Stop):
            kernel.inject_kernels(model, precision=precision, keep_originals=False)
    assert_unchanged(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and torch.equal(parameter, values[name])
        assert parameter.device == values[name].device


@pytest.mark.parametrize("is_old", [False, True], ids=["", "old"])
def test_without_torchao(kernel, device, monkeypatch, is_old):
    model = model_of(LTX, device)
    if is_old:
        monkeypatch.delattr(pytest.importorskip("torchao.quantization"), "Float8Tensor")
    else:
        for name in list(sys.modules):
            if name.partition(".")[0] == "torchao":
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match=r"precision='fp8' needs torchao 0\.\d+ or later: pip"):
        kernel.inject_kernels(model, precision="fp8")
    assert_unchanged(model)
    kernel.inject_kernels(model)  # does not need it


def test_other_layers(kernel, device):
    """Layers that are quantized already, and those of other classes, are left as they are."""
    model = model_of(FLUX, device)
    quantize_by_hand(model, ["transformer_blocks.0.attn.to_q"])
    weight = model.transformer_blocks[0].attn.to_q.weight

    class Own(nn.Linear):
        pass

    model.transformer_blocks[0].attn.to_k.__class__ = Own
    report = kernel.inject_kernels(model, precision="fp8")
    reasons = {entry.name: entry.reason for entry in report.left_alone}
    assert "already" in reasons["transformer_blocks.0.attn.to_q"]
    assert reasons["transformer_blocks.0.attn.to_k"].endswith("Own")
    assert not is_quantized(model.transformer_blocks[0].attn.to_k)
    kernel.eject_kernels(model)
    assert model.transformer_blocks[0].attn.to_q.weight is weight
    assert quantized_names(model) == ["transformer_blocks.0.attn.to_q"]
    others = [n for n, m in model.named_modules() if type(m) is nn.Linear and not is_quantized(m)]
    quantize_by_hand(model, others)
    assert kernel.inject_kernels(model, precision="fp8").quantized == []


def test_second_call(kernel, device):
    model = model_of(LTX, device)
    options = {"precision": "fp8", "keep": ["*.to_v"], "keep_originals": True}
    report = kernel.inject_kernels(model, **options)
    weights = dict(model.named_parameters())
    again = kernel.inject_kernels(model, **{**options, "keep": ("*.to_v",)})
    assert again.already_injected and again.quantized == report.quantized
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    for changes, before, now in (
        ({"precision": "fp8-fast"}, "precision=fp8", "precision=fp8-fast"),
        ({"keep": ()}, "keep=", "keep="),
        ({"keep_originals": False}, "keep_originals=True", "keep_originals=False"),
        ({"precision": None, "keep": ()}, "precision=fp8", "precision=None"),
    ):
        with pytest.raises(ValueError, match=f"{before}.*, got {now}.*: call eject_kernels first"):
            kernel.inject_kernels(model, **{**options, **changes})
    plain = model_of(LTX, device)
    kernel.inject_kernels(plain)
    with pytest.raises(ValueError, match="precision=None, got precision=fp8: call eject_kernels"):
        kernel.inject_kernels(plain, precision="fp8")
    assert quantized_names(plain) == []


@both
@every_family
def test_ejection(kernel, device, family, precision):
    model = model_of(family, device)
    before = dict(model.named_parameters())
    values = {name: value.clone() for name, value in before.items()}
    expected = run(model, family.inputs(device, BFLOAT16, seed=1))
    kernel.inject_kernels(model, precision=precision)
    run(model, family.inputs(device, BFLOAT16, seed=1))
    kernel.eject_kernels(model)
    assert_unchanged(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, parameter in after.items():
        assert parameter is before[name] and torch.equal(parameter, values[name])
    assert torch.equal(run(model, family.inputs(device, BFLOAT16, seed=1)), expected)


@pytest.mark.parametrize("at_once", [1, 64 * 7])
def test_originals_in_parts(kernel, device, at_once, monkeypatch):
    """Their values are copied in parts, and the last one is smaller. One weight is not contiguous."""
    model = model_of(LTX, device)
    layer = model.transformer_blocks[2].attn1.to_q
    layer.weight = nn.Parameter(layer.weight.t().contiguous().t(), requires_grad=False)
    before = dict(model.named_parameters())
    values = {name: value.clone() for name, value in before.items()}
    monkeypatch.setattr(module_of(kernel, "quantized.fp8_weights"), "_AT_ONCE", at_once)
    names = kernel.inject_kernels(model, precision="fp8").quantized
    for name in names:
        parameter = before[f"{name}.weight"]
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter, values[f"{name}.weight"].cpu())
    kernel.eject_kernels(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and torch.equal(parameter, values[name])
        assert parameter.device == values[name].device


def test_originals_are_let_go(kernel, device, caplog):
    model = model_of(LTX, device)
    layer = model.transformer_blocks[2].attn1.to_q
    original = weakref.ref(layer.weight)
    kernel.inject_kernels(model, precision="fp8", keep_originals=False)
    gc.collect()
    assert original() is None
    names = quantized_names(model)
    with caplog.at_level(logging.INFO, logger="h100_diffusers_kernels"):
        kernel.eject_kernels(model)
    assert f"{len(names)} linear layers stay quantized" in caplog.text
    assert quantized_names(model) == names
    assert not any("h100" in name for module in model.modules() for name in vars(module))
    assert kernel.inject_kernels(model, precision="fp8").quantized == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of the GPU's memory")
def test_memory(kernel, device):
    model = LTX.model(device, BFLOAT16, blocks=5, heads=16, head_dim=64).requires_grad_(False)
    before = torch.cuda.memory_allocated()
    report = kernel.inject_kernels(model, precision="fp8-fast")
    freed = sum(model.get_submodule(name).weight.numel() for name in report.quantized)
    assert before - torch.cuda.memory_allocated() > 0.9 * freed


def test_replaced_weight(kernel, device):
    """A user's weight stays."""
    model = model_of(LTX, device)
    kernel.inject_kernels(model, precision="fp8")
    layer = model.transformer_blocks[2].attn1.to_q
    weight = layer.weight = nn.Parameter(torch.ones_like(layer.weight.dequantize()))
    kernel.eject_kernels(model)
    assert layer.weight is weight
    assert quantized_names(model) == []


def test_copies(kernel, device):
    model = model_of(LTX, device)
    plain, arguments = copy.deepcopy(model), LTX.inputs(device, BFLOAT16)
    kernel.inject_kernels(model, precision="fp8")
    expected = run(model, arguments)
    duplicate = copy.deepcopy(model)
    block = copy.deepcopy(model.transformer_blocks[2])
    assert torch.equal(run(duplicate, arguments), expected)
    kernel.eject_kernels(duplicate)
    assert_unchanged(duplicate)
    assert torch.equal(run(duplicate, arguments), run(plain, arguments))
    kernel.eject_kernels(block)
    assert_unchanged(block)
    assert torch.equal(run(model, arguments), expected)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), run(plain, arguments))
    ours, theirs = (m.transformer_blocks[2].attn1.to_q.weight for m in (model, duplicate))
    assert ours.data_ptr() != theirs.data_ptr()


def test_traces_outside_of_the_model(kernel, device):
    """It is freed at once. torchao's ``quantize_`` would set autotuning: compilations would take minutes."""
    model = model_of(LTX, device)
    before = inductor.get_config_copy()
    kernel.inject_kernels(model, precision="fp8")
    assert inductor.get_config_copy() == before
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_saving(kernel, device, tmp_path):
    """``state_dict`` has torchao's tensors, which ``torch.save`` takes and ``save_pretrained`` refuses."""
    model = model_of(LTX, device)
    plain = copy.deepcopy(model)
    kernel.inject_kernels(model, precision="fp8")
    states = model.state_dict()
    assert list(states) == list(plain.state_dict())
    torch.save(states, tmp_path / "states.pt")
    loaded = torch.load(tmp_path / "states.pt", weights_only=False)
    name = "transformer_blocks.2.attn1.to_q.weight"
    assert torch.equal(loaded[name].dequantize(), states[name].dequantize())
    with pytest.raises(RuntimeError):
        model.save_pretrained(tmp_path)
    kernel.eject_kernels(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, torch_dtype=BFLOAT16)
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name].to(value.device), value)


def test_pipeline(kernel, device):
    """Only the transformer is quantized."""
    pipe = pipeline(device)
    before = {
        name: copy.deepcopy(component.state_dict())
        for name, component in pipe.components.items()
        if isinstance(component, nn.Module)
    }
    report = kernel.inject_kernels(pipe, precision="fp8", keep=["transformer.*.attn.to_q"])
    assert report.quantized
    assert all(name.startswith("transformer.") for name in report.quantized)
    assert not any(name.endswith("attn.to_q") for name in report.quantized)
    assert quantized_names(pipe.vae) == []
    assert kernel.inject_kernels(
        pipe, precision="fp8", keep=["transformer.*.attn.to_q"]
    ).already_injected
    kernel.inject_kernels(pipe.vae)  # its injection has no precision
    with pytest.raises(ValueError, match="transformer runs on kernels"):
        kernel.inject_kernels(pipe)
    kernel.eject_kernels(pipe)
    for name, states in before.items():
        after = getattr(pipe, name).state_dict()
        assert all(torch.equal(after[key], value) for key, value in states.items())


def pipeline(device):
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
    ).to(device, BFLOAT16)
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=model_of(FLUX, device),
    )


def adapt(model, name, family=LTX, seed=0):
    add_lora(family, model, name, seed, rank=4)
    model.requires_grad_(False)


def adapted(kernel, device, family, is_adapted_first, precision="fp8", **options):
    """A model with two adapters and a precision, and one that is adapted and quantized by hand."""
    model = model_of(family, device)
    by_hand = copy.deepcopy(model)
    if is_adapted_first:
        adapt(model, "one", family, 0)
        adapt(model, "two", family, 1)
    report = kernel.inject_kernels(model, precision=precision, **options)
    if not is_adapted_first:
        adapt(model, "one", family, 0)
        adapt(model, "two", family, 1)
    names = [name.replace(".base_layer", "") for name in report.quantized]
    return model, by_hand, names


either_order = pytest.mark.parametrize("is_adapted_first", [False, True], ids=["after", "before"])
some_families = pytest.mark.parametrize("family", [LTX, FLUX], ids=str)


@some_families
@either_order
def test_lora(kernel, device, family, is_adapted_first):
    model, by_hand, names = adapted(kernel, device, family, is_adapted_first)
    assert sorted(quantized_names(model)) == sorted(names)
    assert not any("lora_" in name for name in names)
    quantize_by_hand(by_hand, names)
    without = copy.deepcopy(by_hand)
    adapt(by_hand, "one", family, 0)
    adapt(by_hand, "two", family, 1)
    for each in (by_hand, without):
        kernel.inject_kernels(each)
    arguments = family.inputs(device, BFLOAT16)
    seen = []
    for change in (
        lambda m: m.set_adapters(["one"]),
        lambda m: m.set_adapters(["one", "two"], [0.5, 2.0]),
        lambda m: m.disable_adapters(),
        lambda m: m.enable_adapters(),
        lambda m: m.delete_adapters(["two"]),
    ):
        for each in (model, by_hand):
            change(each)
        seen.append(run(model, arguments))
        assert torch.equal(seen[-1], run(by_hand, arguments))
    assert not torch.equal(seen[0], seen[1])
    model.unload_lora()
    assert torch.equal(run(model, arguments), run(without, arguments))
    kernel.eject_kernels(model)
    assert_unchanged(model)


def unfuse(model):
    """As pipelines do it."""
    for module in model.modules():
        if hasattr(module, "unmerge"):
            module.unmerge()


@some_families
@either_order
@pytest.mark.parametrize("is_safe", [False, True], ids=["", "safe"])
def test_fuse(kernel, device, family, is_adapted_first, is_safe):
    """The fused weight is that of the model that was fused in bfloat16 and quantized then."""
    model, plain, names = adapted(kernel, device, family, is_adapted_first)
    adapt(plain, "one", family, 0)
    adapt(plain, "two", family, 1)

    def check():
        fused = copy.deepcopy(plain)
        fused.unload_lora()
        quantize_by_hand(fused, names)
        for name in names:
            layer = model.get_submodule(name)
            layer = getattr(layer, "base_layer", layer)
            expected = fused.get_submodule(name).weight
            assert torch.equal(layer.weight.dequantize(), expected.dequantize()), name
            assert torch.equal(layer.weight.scale, expected.scale)
        kernel.inject_kernels(fused)
        arguments = family.inputs(device, BFLOAT16)
        out = run(model, arguments)
        # Adapters share no quantized inputs, so the rounding errors of both are independent.
        assert_close(out, run(fused, arguments), 0.06 if family is LTX else 0.08)
        return out

    for each in (model, plain):
        each.set_adapters(["one", "two"], [0.5, 2.0])
        each.fuse_lora(0.7, safe_fusing=is_safe, adapter_names=["one"])
    one = check()
    for each in (model, plain):
        each.fuse_lora(adapter_names=["two"])
    two = check()
    for each in (model, plain):
        unfuse(each)
        each.disable_adapters()
    neither = check()
    assert not (torch.equal(one, two) or torch.equal(one, neither))
    for each in (model, plain):
        each.enable_adapters()
        each.fuse_lora()
    check()
    kernel.eject_kernels(model)
    for each in (model, plain):
        each.unload_lora()
    assert_unchanged(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.get_parameter(name), value), name


def test_fused_before(kernel, device):
    """Also then it can be unfused."""
    model = model_of(LTX, device)
    adapt(model, "one")
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.fuse_lora()
    kernel.inject_kernels(model, precision="fp8")
    for each in (model, plain):
        unfuse(each)
    kernel.eject_kernels(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@either_order
@pytest.mark.parametrize("keep_originals", [True, False], ids=["copy", "without originals"])
def test_fuse_copy(kernel, device, is_adapted_first, keep_originals):
    """Fusing a copy does not change the model. Without the original weights it raises."""
    options = {"keep_originals": keep_originals}
    model, _, _ = adapted(kernel, device, LTX, is_adapted_first, **options)
    model.set_adapters(["one"])
    arguments = LTX.inputs(device, BFLOAT16)
    before = run(model, arguments)
    if keep_originals:
        duplicate = copy.deepcopy(model)
        duplicate.fuse_lora()
        assert not torch.equal(run(duplicate, arguments), before)
        unfuse(duplicate)
    else:
        with pytest.raises(RuntimeError, match="fuse_lora: .*keep_originals was False"):
            model.fuse_lora()
    assert torch.equal(run(model, arguments), before)


def weights(model):
    """The weights and biases by name, those of adapters' layers without it; FP8 weights dequantized."""
    return {
        name.replace("base_layer.", ""): value.dequantize() if hasattr(value, "qdata") else value
        for name, value in model.named_parameters()
        if "lora_" not in name
    }


def assert_same_weights(model, plain, slack=0.0):
    """Rounding to FP8 moves weights by 0.027 of their norm, other values by 0.3 and more."""
    expected = weights(plain)
    for name, value in weights(model).items():
        assert value.dtype == expected[name].dtype, name
        assert value.requires_grad == expected[name].requires_grad, name
        if not torch.equal(value, expected[name]):
            assert relative_distance(value, expected[name]) < slack, name


def blocks_of(family):
    """As few blocks as have quantized layers."""
    return {} if family.name in BLOCKS else family.one_block


def load_state(model, tuned):
    model.load_state_dict(copy.deepcopy(tuned.state_dict()))


def assign_state(model, tuned):
    model.load_state_dict(copy.deepcopy(tuned.state_dict()), assign=True)


def copy_values(model, tuned):
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), tuned.parameters(), strict=True):
            parameter.copy_(source)


def swap_weights(model, tuned):
    for layer, other in zip(model.modules(), tuned.modules(), strict=True):
        if isinstance(layer, nn.Linear):
            layer.weight, other.weight = other.weight, layer.weight
            layer.bias, other.bias = other.bias, layer.bias


def test_other_fp8_values(kernel, device, caplog):
    """Weights that were loaded while the layers were quantized: a LoRA is fused into them, they stay."""
    ways = (load_state, assign_state, copy_values, swap_weights)
    for change, family in zip(ways, (LTX, FLUX, FLUX, FLUX), strict=True):
        model, tuned = (model_of(family, device, seed=seed, **blocks_of(family)) for seed in (0, 1))
        plain = copy.deepcopy(model)
        change(plain, copy.deepcopy(tuned))
        for each in (model, tuned):
            kernel.inject_kernels(each, precision="fp8")
        change(model, tuned)
        assert_same_weights(model, plain, 0.04)
        for each in (model, plain):
            adapt(each, "one", family)
            each.fuse_lora()
        assert_same_weights(model, plain, 0.06)
        for each in (model, plain):
            unfuse(each)
            each.unload_lora()
        assert_same_weights(model, plain, 0.06)
        kernel.eject_kernels(model)
        assert_unchanged(model)
        assert_same_weights(model, plain, 0.06)
    names = quantized_names(tuned)  # with swapped weights, into which nothing was fused
    with caplog.at_level(logging.INFO, logger="h100_diffusers_kernels"):
        kernel.eject_kernels(tuned)
    assert f"{len(names)} linear layers have the dequantized values" in caplog.text


def test_one_other_row(kernel, device):
    """One row of each weight is replaced in FP8."""
    model = model_of(FLUX, device, **FLUX.one_block)
    plain = copy.deepcopy(model)
    for name in kernel.inject_kernels(model, precision="fp8").quantized:
        model.get_submodule(name).weight.scale[1].mul_(-1)
        plain.get_submodule(name).weight.data[1].mul_(-1)
    kernel.eject_kernels(model)
    for name, value in plain.named_parameters():
        row = model.get_parameter(name)[1]
        assert torch.equal(row, value[1]) or relative_distance(row, value[1]) < 0.05, name


def add_by_peft(model, name, family):
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=family.lora_targets)
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, model, name)
    model.requires_grad_(False)


def test_unfused_after_ejection(kernel, device):
    """Also a LoRA that was loaded while the layers were quantized."""
    for order in ("before", "after", "by peft"):
        model = model_of(FLUX, device, **FLUX.one_block)
        plain = copy.deepcopy(model)
        add = functools.partial(add_by_peft if order == "by peft" else adapt, family=FLUX)
        if order == "before":
            add(model, "one")
        kernel.inject_kernels(model, precision="fp8")
        if order != "before":
            add(model, "one")
        add(plain, "one")
        for each in (model, plain):
            each.fuse_lora()
        kernel.eject_kernels(model)
        assert_unchanged(model)
        assert_same_weights(model, plain)
        for each in (model, plain):
            unfuse(each)
        assert_same_weights(model, plain)
        arguments = FLUX.inputs(device, BFLOAT16)
        assert torch.equal(run(model, arguments), run(plain, arguments))
        for each in (model, plain):  # it is an adapter as any other
            each.fuse_lora()
        assert_same_weights(model, plain)


def flux_pipeline(transformer):
    names = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.FluxPipeline(
        scheduler=scheduler, transformer=transformer, **dict.fromkeys(names)
    )


def test_dtype_and_flags_follow(kernel, device):
    """The weights after the ejection are those of a model that was never quantized."""

    def in_inference_mode(model):
        with torch.inference_mode():
            model.half()

    from_pipe = diffusers.FluxImg2ImgPipeline.from_pipe
    changes = (
        lambda model: model.half(),
        lambda model: model.to(torch.float32),
        lambda model: model.to(torch.float16).to(BFLOAT16),
        in_inference_mode,
        lambda model: from_pipe(flux_pipeline(model)),
        lambda model: from_pipe(flux_pipeline(model), torch_dtype=torch.float16),
        lambda model: model.requires_grad_(True),
        lambda model: model.transformer_blocks[0].requires_grad_(False),
        lambda model: model.transformer_blocks[0].half(),
        lambda model: None,
    )
    for i, change in enumerate(changes):
        model = model_of(FLUX, device, **FLUX.one_block).requires_grad_(i % 2 == 1)
        plain = copy.deepcopy(model)
        kernel.inject_kernels(model, precision="fp8")
        model = copy.deepcopy(model) if i % 3 == 0 else model
        change(plain)
        change(model)
        kernel.eject_kernels(model)
        assert_unchanged(model)
        assert_same_weights(model, plain, 1e-6)


def test_fused_in_another_dtype(kernel, device):
    model = model_of(LTX, device)
    plain = copy.deepcopy(model)
    kernel.inject_kernels(model, precision="fp8")
    for each in (model, plain):
        each.half()
        adapt(each, "one")
        each.fuse_lora()
    kernel.eject_kernels(model)
    assert_same_weights(model, plain)


def states_of_lora(model, names, has_bias):
    generator = torch.Generator().manual_seed(0)

    def values(*shape):
        return 0.1 * torch.randn(shape, generator=generator)

    states = {}
    for name in names:
        layer = model.get_submodule(name)
        states[f"{name}.lora_A.weight"] = values(4, layer.in_features)
        states[f"{name}.lora_B.weight"] = values(layer.out_features, 4)
        if has_bias:
            states[f"{name}.lora_B.bias"] = values(layer.out_features)
    return states


ADAPTERS = {
    "biases": lambda **k: peft.LoraConfig(r=4, lora_bias=True, init_lora_weights=False, **k),
    "DoRA": lambda **k: peft.LoraConfig(r=4, use_dora=True, init_lora_weights=False, **k),
    "OLoRA": lambda **k: peft.LoraConfig(r=4, init_lora_weights="olora", **k),
    "OFT": lambda **k: peft.OFTConfig(r=0, oft_block_size=16, init_weights=False, **k),
    "BOFT": lambda **k: peft.BOFTConfig(boft_block_size=8, init_weights=False, **k),
}


def test_other_adapters(kernel, device):
    """peft refuses some on torchao's weights. Those that compute with a layer's weight get the original."""
    arguments = FLUX.inputs(device, BFLOAT16, batch=8)
    for kind, config in ADAPTERS.items():
        for options in ({}, {"keep_originals": False}) if kind in ("biases", "BOFT") else ({},):
            model = model_of(FLUX, device, **FLUX.one_block)
            plain = copy.deepcopy(model)
            report = kernel.inject_kernels(model, precision="fp8", **options)
            for each in (model, plain):
                torch.manual_seed(0)
                each.add_adapter(config(target_modules=FLUX.lora_targets))
                each.requires_grad_(False)
            given_back = sum("not quantized any more" in str(c.fell_back) for c in report.calls)
            assert given_back == len(report.quantized) - len(quantized_names(model))
            assert (given_back > 0) == (kind == "BOFT")
            assert_close(run(model, arguments), run(plain, arguments), 0.15)
            kernel.eject_kernels(model)
            if not options:
                assert_unchanged(model)
                # peft computed what some adapters start with on the host here, on the device there.
                assert_close(run(model, arguments), run(plain, arguments), 0.01)


def test_log_of_dequantized_weights(kernel, device, caplog):
    """Without the originals, layers below BOFT get the values of the FP8 weights that the injection made."""
    model = model_of(FLUX, device, **FLUX.one_block)
    names = kernel.inject_kernels(model, precision="fp8", keep_originals=False).quantized
    with caplog.at_level(logging.INFO, logger="h100_diffusers_kernels"):
        model.add_adapter(ADAPTERS["BOFT"](target_modules=FLUX.lora_targets))
    count = len(names) - len(quantized_names(model))
    text = "have the values of their FP8 weights, because keep_originals was False"
    assert count and f"{count} linear layers {text}" in caplog.text
    assert "given since" not in caplog.text


def test_adapters_that_read_weights(kernel, device):
    """Their layers are not quantized."""
    model = model_of(LTX, device)
    plain = copy.deepcopy(model)
    for each in (model, plain):
        torch.manual_seed(0)
        each.add_adapter(ADAPTERS["BOFT"](target_modules=r".*\.attn1\.to_q"))
        each.requires_grad_(False)
    report = kernel.inject_kernels(model, precision="fp8")
    reasons = {e.name: e.reason for e in report.left_alone}
    name = "transformer_blocks.2.attn1.to_q.base_layer"
    assert reasons[name].endswith("peft.tuners.boft.layer.Linear computes with its weight")
    assert report.quantized and name not in report.quantized
    arguments = LTX.inputs(device, BFLOAT16, batch=4)
    assert_close(run(model, arguments), run(plain, arguments), 0.15)


def test_loaded_with_biases(kernel, device):
    """By a pipeline, as the LoRAs of FLUX.1 Canny and Depth are. A load that fails changes nothing."""
    model = model_of(FLUX, device, **FLUX.one_block)
    plain = copy.deepcopy(model)
    names = kernel.inject_kernels(model, precision="fp8").quantized
    before = weights(model)
    wrong = states_of_lora(plain, names, True)
    wrong[f"{names[0]}.lora_B.weight"] = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_lora_adapter(wrong, prefix=None)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert sorted(quantized_names(model)) == sorted(names)
    states = states_of_lora(plain, names, True)
    for each in (model, plain):
        of_transformer = {f"transformer.{name}": value for name, value in states.items()}
        flux_pipeline(each).load_lora_weights(of_transformer, adapter_name="one")
        each.requires_grad_(False)
    assert sorted(quantized_names(model)) == sorted(names)
    arguments = FLUX.inputs(device, BFLOAT16, batch=4)
    assert_close(run(model, arguments), run(plain, arguments), 0.1)
    for each in (model, plain):
        each.fuse_lora()
    assert_close(run(model, arguments), run(plain, arguments), 0.1)
    kernel.eject_kernels(model)
    assert_same_weights(model, plain)


def test_shared_layers(kernel, device):
    """A layer that occurs twice is quantized once, or not if a name of it is kept. A weight of two is not."""
    for share in (
        lambda blocks: setattr(blocks[1].attn, "to_q", blocks[0].attn.to_q),
        lambda blocks: blocks.__setitem__(1, blocks[0]),
        lambda blocks: setattr(blocks[1].attn.to_q, "weight", blocks[0].attn.to_q.weight),
    ):
        model = model_of(FLUX, device)
        share(model.transformer_blocks)
        plain, arguments = copy.deepcopy(model), FLUX.inputs(device, BFLOAT16, batch=4)
        kernel.inject_kernels(model, precision="fp8")
        first, second = (block.attn.to_q for block in model.transformer_blocks)
        assert is_quantized(first) == (first is second) and first.weight is second.weight
        assert is_quantized(model.transformer_blocks[1].attn.to_k)
        assert_close(run(model, arguments), run(plain, arguments), 0.1)
        kernel.eject_kernels(model)
        assert first.weight is second.weight
        assert torch.equal(run(model, arguments), run(plain, arguments))
        kernel.inject_kernels(model, precision="fp8", keep=["transformer_blocks.1.attn.to_q"])
        assert not is_quantized(first) and not is_quantized(second)
        assert_close(run(model, arguments), run(plain, arguments), 0.1)


def test_inference_mode(kernel, device):
    """What was made in it can be changed outside of it, and the reverse."""
    for inside in ("inject", "fuse", "unfuse", "eject"):
        model = model_of(FLUX, device, **FLUX.one_block)
        adapt(model, "one", FLUX)
        plain = copy.deepcopy(model)

        def do(step, act, *models, inside=inside):
            with torch.inference_mode(step == inside):
                for each in models:
                    act(each)

        do("inject", lambda m: kernel.inject_kernels(m, precision="fp8"), model)
        do("fuse", lambda m: m.fuse_lora(), model, plain)
        assert_same_weights(model, plain, 0.04)
        do("unfuse", unfuse, model, plain)
        do("eject", kernel.eject_kernels, model)
        assert_same_weights(model, plain)
        for each in (model, plain):
            each.fuse_lora()
        assert_same_weights(model, plain)


def test_projections_fused_later(kernel, device):
    """One sentence, and nothing is changed."""
    model = model_of(FLUX, device, **FLUX.one_block)
    kernel.inject_kernels(model, precision="fp8")
    arguments = FLUX.inputs(device, BFLOAT16)
    expected = run(model, arguments)
    sentence = "fuse_qkv_projections: the layers are quantized, so call it before inject_kernels"
    with pytest.raises(RuntimeError, match=f"^{sentence}"):
        model.fuse_qkv_projections()
    assert torch.equal(run(model, arguments), expected)
    kernel.eject_kernels(model)
    model.fuse_qkv_projections()


def test_why_no_layer_is_quantized(kernel, device):
    """One reason: of the layers in the table, if there are any."""
    sentence = "inject_kernels: precision='fp8' needs a layer that can be quantized, got {}"
    sentence = sentence.format("an LTXVideoTransformer3DModel without one: {}")
    for options, blocks, reason in (
        ({"keep": ["transformer_blocks"]}, 5, "keep names it"),
        ({}, 4, "only fp8-fast quantizes it"),
    ):
        model = LTX.model(device, BFLOAT16, blocks=blocks, **KERNEL_HEADS)
        with pytest.raises(ValueError) as raised:
            kernel.inject_kernels(model, precision="fp8", **options)
        assert str(raised.value) == sentence.format(reason)


@pytest.mark.parametrize("seed", range(2))
def test_random_sequences(device, seed):
    """More: ``python tests/random_precision.py``."""
    steps, error, _ = random_precision.random_sequence(seed)
    assert error is None, (steps, error)


def test_fuse_in_a_pipeline(kernel, device):
    pipe = pipeline(device)
    kernel.inject_kernels(pipe, precision="fp8")
    adapt(pipe.transformer, "one", FLUX)
    weight = pipe.transformer.transformer_blocks[0].attn.to_q.base_layer.weight
    before = weight.dequantize()
    pipe.fuse_lora(["transformer"], adapter_names=["one"])
    assert not torch.equal(weight.dequantize(), before)
    pipe.unfuse_lora(["transformer"])
    assert_close(weight.dequantize(), before, 0.02)
    pipe.unload_lora_weights()
    kernel.eject_kernels(pipe)
    assert_unchanged(pipe.transformer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for emulated graphs")
def test_emulated_graphs(graphs):  # noqa: F811
    """The same bits as without graphs, also after an adapter is loaded and fused."""
    model = model_of(LTX, "cpu")
    plain = copy.deepcopy(model)
    report = graphs.inject_kernels(model, precision="fp8", cuda_graphs=True)
    graphs.inject_kernels(plain, precision="fp8")

    def call():
        arguments = LTX.inputs("cpu", BFLOAT16)
        with torch.inference_mode():
            assert torch.equal(run(model, arguments), run(plain, arguments))
        return report.cuda_graphs[0].captured, report.cuda_graphs[0].replayed

    assert [call() for _ in range(3)][-1] == (1, 1)
    for each in (model, plain):
        adapt(each, "one")
    for _ in range(3):
        captured, replayed = call()
    assert captured > 1 and replayed > 1
    for each in (model, plain):
        each.fuse_lora()
    for _ in range(3):
        call()
    assert report.cuda_graphs[0].replayed > replayed


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled(kernel, device):
    model = model_of(LTX, device, **LTX.one_block)
    arguments = LTX.inputs(device, BFLOAT16)
    kernel.inject_kernels(model, precision="fp8-fast")
    expected = run(model, arguments)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        assert_close(run(compiled, arguments), expected, 0.06)
    assert counter.frame_count == 1


OFFLOADING = ["sequential", "model", "block_level", "leaf_level"]
if torch.cuda.is_available():
    OFFLOADING += ["block_level stream", "leaf_level stream"]


@pytest.mark.parametrize("kind", OFFLOADING)
@pytest.mark.parametrize("is_injected_first", [False, True], ids=["offloaded", "injected"])
@pytest.mark.parametrize("is_adapted", [False, True], ids=["", "adapted"])
def test_offloading(kernel, device, kind, is_injected_first, is_adapted):
    """Before and after, with the same bits; ejection gives back the weights."""
    model = model_of(LTX, device)
    if is_adapted:
        adapt(model, "one")
    plain, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    arguments = LTX.inputs(device, BFLOAT16)
    names = kernel.inject_kernels(copy.deepcopy(model), precision="fp8").quantized
    quantize_by_hand(by_hand, names)
    if is_injected_first:
        kernel.inject_kernels(model, precision="fp8")
    for each in (model, by_hand, plain):
        offload(each, kind, device)
    kernel.inject_kernels(by_hand)
    report = kernel.inject_kernels(model, precision="fp8")
    assert report.quantized == names
    for _ in range(2):
        assert torch.equal(run(model, arguments), run(by_hand, arguments))
    calls = fp8_models.of_fp8(model, arguments)
    assert calls["products"] == len(names) and "_scaled_mm" not in calls
    kernel.eject_kernels(model)
    for _ in range(2):
        assert torch.equal(run(model, arguments), run(plain, arguments))


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_cache_of_an_offloaded_model(kernel, device, kind):
    """The injection and the ejection leave it on. diffusers has hooks of both on the same blocks."""
    model = model_of(LTX, device)
    offload(model, kind, device)
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=1e9))
    layer, calls = model.transformer_blocks[2].attn1.to_q, []
    layer.register_forward_hook(lambda *_: calls.append(is_quantized(layer)))
    for change in (
        lambda model: None,
        lambda model: kernel.inject_kernels(model, precision="fp8"),
        kernel.eject_kernels,
    ):
        change(model)
        model._reset_stateful_cache()
        with model.cache_context("cond"):
            for _ in range(3):
                run(model, LTX.inputs(device, BFLOAT16))
    assert calls == [False, True, False], "the first of three forwards"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="prefetching needs streams of a GPU")
def test_order_of_prefetching(kernel, device):
    """diffusers finds it in the first forward. FLUX.1 runs its layers in another order on the kernels."""
    model = model_of(FLUX, device)
    plain, arguments = copy.deepcopy(model), FLUX.inputs(device, BFLOAT16)
    expected = run(plain, arguments)
    offload(model, "leaf_level stream", device)
    for slack, change in (
        (0.0, lambda model: None),
        (0.2, lambda model: kernel.inject_kernels(model, precision="fp8")),
        (0.0, kernel.eject_kernels),
    ):
        change(model)
        for _ in range(3):
            assert_close(run(model, arguments), expected, slack)


@pytest.mark.parametrize("is_removed", [False, True], ids=["", "removed"])
@pytest.mark.parametrize("is_injected_first", [False, True], ids=["offloaded", "injected"])
def test_sequential_offloading(kernel, device, is_injected_first, is_removed):
    model = model_of(LTX, device)
    plain = copy.deepcopy(model)
    if is_injected_first:
        kernel.inject_kernels(model, precision="fp8")
    offload(model, "sequential", device)
    kernel.inject_kernels(model, precision="fp8")
    if is_removed:
        remove_hook_from_submodules(model)
    kernel.eject_kernels(model)
    if not is_removed:
        assert all(parameter.is_meta for parameter in model.transformer_blocks.parameters())
        remove_hook_from_submodules(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_offloaded_to_disk(kernel, device, tmp_path):
    model = model_of(LTX, device)
    offload(model, "block_level disk", device, tmp_path)
    with pytest.raises(ValueError, match="needs weights in memory, got a model offloaded to disk"):
        kernel.inject_kernels(model, precision="fp8")

"""Text encoders of transformers in part: norms, gated feed-forwards, and what surrounds attention."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.clip.modeling_clip import CLIPTextConfig, CLIPTextModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2Config, Gemma2Model
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextConfig, Gemma3TextModel
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralConfig, MistralModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextModel
from transformers.models.t5.modeling_t5 import T5Config, T5EncoderModel
from transformers.models.umt5.modeling_umt5 import UMT5Config, UMT5EncoderModel

from checks import operators_of
from graphs import graphs, module_of  # noqa: F401
from injected_pairs import (
    assert_alike,
    assert_as_close_as_eager,
    fallen_back,
    injected,
    on_kernels,
)

LENGTH = 24
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, **TOKENS}
T5["feed_forward_proj"] = "gated-gelu"
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, **TOKENS}
DECODER = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, **SIZES}
HEADS = {"head_dim": 32}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
WINDOW = {"sliding_window": 8, **HEADS}
# The model's class and configuration, and the operators of a layer that are not PyTorch's.
MODELS = {
    "t5": (T5EncoderModel, T5Config(**T5), {"norm": 2, "activation": 1}),
    "umt5": (UMT5EncoderModel, UMT5Config(**T5), {"norm": 2, "activation": 1}),
    "gemma2": (Gemma2Model, Gemma2Config(**DECODER, **WINDOW), {"norm": 4}),
    "gemma3": (Gemma3TextModel, Gemma3TextConfig(**DECODER, **WINDOW), {"norm": 6}),
    "llama": (LlamaModel, LlamaConfig(**DECODER), {"norm": 2}),
    "mistral": (MistralModel, MistralConfig(**DECODER), {"norm": 2}),
    "qwen2_5_vl": (
        Qwen2_5_VLTextModel,
        Qwen2_5_VLTextConfig(**DECODER, rope_parameters=SECTIONS),
        {"norm": 2},
    ),
    "qwen3": (Qwen3Model, Qwen3Config(**DECODER, **HEADS), {"norm": 2}),
    "qwen3_vl": (
        Qwen3VLTextModel,
        Qwen3VLTextConfig(**DECODER, head_dim=16, rope_parameters=SECTIONS),
        {"norm": 2},
    ),
}
CLIP = CLIPTextConfig(num_attention_heads=4, projection_dim=32, **SIZES)
every_model = pytest.mark.parametrize("name", MODELS)


def model_of(name, device, dtype=torch.bfloat16):
    cls, config = (CLIPTextModel, CLIP) if name == "clip" else MODELS[name][:2]
    model = cls(copy.deepcopy(config)).to(device).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.3)  # norms' weights
    return model.to(dtype)


def tokens(device, seed=0, **more):
    """Two samples, one of them padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (2, LENGTH), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[1, LENGTH // 2 + seed :] = 0
    return {"input_ids": ids, "attention_mask": mask, **more}


@torch.inference_mode()
def states(model, arguments):
    """All hidden states of the tokens that are not padding."""
    out = model(**arguments, output_hidden_states=True)
    mask = arguments.get("attention_mask")
    seen = torch.stack([out.last_hidden_state, *out.hidden_states]).float()
    return seen if mask is None else seen[:, mask.bool()]


@torch.inference_mode()
def last_state(model, arguments):
    return model(**arguments).last_hidden_state


@every_model
def test_values(kernel, device, name):
    model, plain, report = injected(kernel, model_of(name, device))
    assert report.levels == {"": "in part"}
    assert report.left_alone == []

    def arguments(dtype, seed):
        given = tokens(device, seed)
        return given if seed % 2 else {"input_ids": given["input_ids"]}

    assert_as_close_as_eager(model, plain, arguments, forward=states)
    assert fallen_back(report) == {}
    assert min(on_kernels(report).values()) > 0


@every_model
def test_operators(kernel, device, name):
    model, _, _ = injected(kernel, model_of(name, device))
    expected = dict(MODELS[name][2])
    if "5" not in name[-2:]:
        expected |= {"activation": 1, "qk_norm_rope": 1}
    found = operators_of(lambda: model(tokens(device)["input_ids"]))
    layers = {operator: (found.count(operator) - (operator == "norm")) / 2 for operator in expected}
    assert layers == expected  # and the model's last norm
    assert not {"rsqrt", "silu", "gelu", "pow"} & {*found}


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_bias_is_contiguous_and_exact(kernel, device, name):
    """So PyTorch fuses attention: its kernels take a bias whose last dimension has stride 1."""
    model, plain, _ = injected(kernel, model_of(name, device))
    biases = []

    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool, device=device)

    def record(attention, query, key, value, _, position_bias=None, **kwargs):
        biases.append((position_bias, torch.where(mask, position_bias, 0.0)))
        return query.transpose(1, 2), None

    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    functions["recorded"] = record
    for each in (model, plain):
        each.config._attn_implementation = "recorded"
        each.encoder.config._attn_implementation = "recorded"
        last_state(each, tokens(device))
    del functions["recorded"]
    mine, expected = biases[:2], biases[2:]
    for (bias, masked), (other, _) in zip(mine, expected, strict=True):
        assert bias.is_contiguous()
        assert masked.is_contiguous()
        assert torch.equal(bias, other)


def test_wo_in_float32(kernel, device):
    """As transformers keeps it in half precision. The residual stream is float32 from there on."""

    def change(model):
        model.encoder.block[0].layer[1].DenseReluDense.wo.float()

    model, plain, report = injected(kernel, model_of("t5", device, torch.float16), change)
    assert_alike(model, plain, tokens(device), forward=last_state)
    assert on_kernels(report)["T5DenseGatedActDense"] == 4


def test_hooks_run(kernel, device):
    def change(model):
        attention = model.layers[0].self_attn
        attention.q_norm.register_forward_hook(lambda module, args, out: 2 * out)
        model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: out + 1)

    for is_first in (True, False):
        plain = model_of("qwen3", device)
        untouched = last_state(plain, tokens(device))
        model, _, _ = injected(kernel, plain, change, is_injected_first=is_first)
        assert_alike(model, plain, tokens(device), unlike=untouched, forward=last_state)


def test_replaced_functions_run(kernel, device, monkeypatch):
    module = sys.modules[Qwen3Model.__module__]
    model, plain, report = injected(kernel, model_of("qwen3", device, torch.float32))
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    arguments = tokens(device)
    torch.testing.assert_close(last_state(model, arguments), last_state(plain, arguments))
    assert "apply_rotary_pos_emb was replaced" in str(fallen_back(report))


def test_another_activation_runs(kernel, device):
    def change(model):
        model.layers[0].mlp.act_fn = nn.Tanh()

    model, plain, report = injected(kernel, model_of("llama", device, torch.float32), change)
    arguments = tokens(device)
    torch.testing.assert_close(last_state(model, arguments), last_state(plain, arguments))
    assert "its activation" in str(fallen_back(report))


def test_cache(kernel, device):
    """Decoder-only models continue a text from their cache."""
    model, plain, _ = injected(kernel, model_of("qwen3", device, torch.float32))
    ids = tokens(device)["input_ids"]
    for each in (model, plain):
        first = last_state(each, {"input_ids": ids})
        with torch.inference_mode():
            cache = each(ids[:, :-2], use_cache=True).past_key_values
            rest = each(ids[:, -2:], past_key_values=cache, use_cache=True).last_hidden_state
        torch.testing.assert_close(rest, first[:, -2:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first, last_state(model, {"input_ids": ids}), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["umt5", "gemma3", "qwen3"])
def test_derivatives_and_autocast(kernel, device, name):
    """Both run the model's own code."""
    model, plain, _ = injected(kernel, model_of(name, device, torch.float32))
    gradients = []
    for each in (model, plain):
        out = each(**tokens(device)).last_hidden_state
        gradients.append(torch.autograd.grad(out.square().sum(), [*each.parameters()][:3]))
        with torch.autocast(device, torch.bfloat16):
            gradients[-1] += (last_state(each, tokens(device)),)
    (*mine, last), (*expected, last_expected) = gradients
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    # A GPU may choose another attention of 16 bits for a bias with other strides.
    torch.testing.assert_close(last, last_expected, rtol=2e-2, atol=2e-2)


class QuantizedLinear(nn.Module):
    """As quantization libraries replace a linear layer: without a plain weight."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.to(torch.float16), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


@pytest.mark.parametrize("name", ["t5", "llama", "qwen3"])
def test_quantized_layers_are_called(kernel, device, name):
    def change(model):
        for module in [*model.modules()]:
            for child, layer in module.named_children():
                if isinstance(layer, nn.Linear) and child != "wo":
                    setattr(module, child, QuantizedLinear(layer))

    model, plain, report = injected(kernel, model_of(name, device), change, is_injected_first=False)
    assert_alike(model, plain, tokens(device), forward=last_state)
    assert fallen_back(report) == {}


def test_eject_and_copy(kernel, device):
    model, plain, report = injected(kernel, model_of("umt5", device))
    duplicate = copy.deepcopy(model)
    arguments = tokens(device)
    assert torch.equal(last_state(duplicate, arguments), last_state(model, arguments))
    kernel.eject_kernels(model)
    assert torch.equal(last_state(model, arguments), last_state(plain, arguments))
    assert not any("forward" in vars(module) for module in model.modules())


def test_pipeline(kernel, device):
    class Pipeline:
        components = {
            "text_encoder": model_of("t5", device),
            "text_encoder_2": model_of("clip", device),
            "safety_checker": nn.LayerNorm(4),
        }

    report = kernel.inject_kernels(Pipeline())
    levels = {
        "text_encoder": "in part",
        "text_encoder_2": "not at all",
        "safety_checker": "not at all",
    }
    assert report.levels == levels
    assert {entry.name.partition(".")[0] for entry in report.replaced} == {"text_encoder"}
    assert kernel.inject_kernels(Pipeline()).already_injected


# ------------------------------------------------------------------------------------------------
# CUDA graphs


@pytest.fixture
def _capturing(graphs, monkeypatch):  # noqa: F811
    """transformers asks CUDA whether a graph is captured, and then does not read its masks' values."""
    functions = sys.modules["transformers.utils.import_utils"]
    if not torch.cuda.is_available():
        is_capturing = module_of(graphs, "core.cache").is_capturing
        monkeypatch.setattr(functions, "is_cuda_stream_capturing", is_capturing)


@pytest.mark.usefixtures("_capturing", "_one_thread")
@pytest.mark.parametrize("name", [*MODELS, "clip"])
def test_graphs(graphs, device, name):  # noqa: F811
    model = model_of(name, device)
    plain = copy.deepcopy(model)
    report = graphs.inject_kernels(model, cuda_graphs=True)
    if name == "clip":
        assert report.levels == {"": "only in CUDA graphs"}
    else:
        graphs.inject_kernels(plain)
    for forward in (states, last_state):  # the first call with all states adds transformers' hooks
        for seed in range(4):
            arguments = tokens(device, seed)
            assert torch.equal(forward(model, arguments), forward(plain, arguments))
    (calls,) = report.cuda_graphs
    assert (calls.captured, calls.replayed) == (2, 4)


@pytest.mark.usefixtures("_capturing", "_one_thread")
def test_graphs_return_caches(graphs, device):  # noqa: F811
    model, plain, report = injected(graphs, model_of("qwen3", device), cuda_graphs=True)
    graphs.inject_kernels(plain)
    caches = []
    with torch.inference_mode():
        for seed in range(4):
            arguments = tokens(device, seed, use_cache=True)
            pair = [each(**arguments).past_key_values for each in (model, plain)]
            caches.append(pair)
    assert report.cuda_graphs[0].replayed == 2
    for mine, expected in caches:  # those of earlier calls are the caller's own
        for layer, other in zip(mine.layers, expected.layers, strict=True):
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)

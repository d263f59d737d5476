"""Other code around an injected model: code that reads the signature of its forwards, wraps or keeps them,
or watches modules and operations from outside."""

import contextlib
import copy
import functools
import inspect
import pickle
from collections import Counter

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from diffusers.modular_pipelines import QwenImageAutoBlocks
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from checks import relative_distance
from families import FAMILIES, KERNEL_HEADS, every_family
from families_in_part import family_of
from family_flux import FLUX
from family_ltx import LTX
from family_qwenimage import QWEN_IMAGE
from family_sd3 import SD3
from injected_pairs import assert_alike, assert_gradients_agree, fallen_back, injected
from ltx_models import either_order, kernel_calls, snapshot
from small_models import MODELS, run

pytestmark = pytest.mark.usefixtures("_one_thread")

UNET, MUSIC = map(family_of, ("unet", "minimax_music3"))
# One whose blocks pass on values, one with joint attention, one partially injected.
some_models = pytest.mark.parametrize("family", [LTX, FLUX, UNET], ids=str)


def pair(kernel, family, device, dtype=torch.float32, config=None, **options):
    """(injected, plain, report, arguments)"""
    plain = family.model(device, dtype, **(config or {}))
    return *injected(kernel, plain, **options), family.inputs(device, dtype, seed=1)


def is_on_kernels(model, arguments):
    return bool(kernel_calls(run, model, arguments))


def described(model):
    """Python's description of each module's forward, and of a method's function, which accelerate and others
    bind again."""
    return {
        name: (
            inspect.signature(module.forward),
            *(getattr(module.forward, a) for a in ("__name__", "__qualname__", "__module__")),
            module.forward.__doc__,
            inspect.signature(module.forward.__func__),
            module.forward.__func__.__name__,
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("model", [*FAMILIES.values(), *MODELS], ids=str)
def test_forwards_keep_signature_name_and_docstring(kernel, device, model):
    candidate = model.model(device)
    before = described(candidate)
    assert kernel.inject_kernels(candidate).num_replaced > 3
    assert described(candidate) == before
    assert described(copy.deepcopy(candidate)) == before
    kernel.eject_kernels(candidate)
    assert described(candidate) == before
    kernel.inject_kernels(candidate, cuda_graphs=True)
    assert described(candidate) == before


def qwenimage_latents(pipe, device):
    torch.manual_seed(0)
    embeddings = {
        "prompt_embeds": torch.randn(1, 5, 24, device=device),
        "prompt_embeds_mask": torch.ones(1, 5, dtype=torch.long, device=device),
        "negative_prompt_embeds": torch.randn(1, 3, 24, device=device),
        "negative_prompt_embeds_mask": torch.ones(1, 3, dtype=torch.long, device=device),
    }
    size = {"height": 64, "width": 64, "num_inference_steps": 2}
    generator = torch.Generator().manual_seed(0)
    return pipe(**embeddings, **size, generator=generator, output="latents")


def test_modular_pipeline_of_qwen_image(kernel, device):
    """It passes the model the arguments in its forward's signature, such as ``img_shapes``."""
    pipe = QwenImageAutoBlocks().sub_blocks["denoise"].init_pipeline()
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipe.update_components(transformer=QWEN_IMAGE.model(device), scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    expected = qwenimage_latents(pipe, device)
    kernel.inject_kernels(pipe.transformer)
    assert kernel_calls(qwenimage_latents, pipe, device)
    assert relative_distance(qwenimage_latents(pipe, device), expected) < 1e-4
    kernel.eject_kernels(pipe.transformer)
    assert torch.equal(qwenimage_latents(pipe, device), expected)


@pytest.fixture
def accelerator(device):
    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=device == "cpu")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["", "graphs"])
@some_models
@either_order
def test_a_model_that_accelerate_has_prepared(
    kernel, device, accelerator, family, is_injected_first, cuda_graphs
):
    """Under autocast it runs its own code, bitwise equal; unwrapped it is on the kernels again."""
    model, plain, report, arguments = pair(
        kernel,
        family,
        device,
        change=accelerator.prepare,
        is_injected_first=is_injected_first,
        cuda_graphs=cuda_graphs,
    )
    single = run(family.model(device), arguments)
    expected = run(plain, arguments)
    assert not torch.equal(single, expected)
    assert torch.equal(run(model, arguments), expected)
    assert any("autocast is on" in reasons for reasons in fallen_back(report).values())
    # A copy computes with its own weights, and stays injected when the model is ejected.
    duplicate, plain_duplicate = copy.deepcopy(model), copy.deepcopy(plain)
    for candidate in (duplicate, plain_duplicate):
        family.part(candidate, "linear").weight.data.mul_(3)
    expected_of_duplicate = run(plain_duplicate, arguments)
    assert not torch.equal(expected_of_duplicate, expected)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)
    assert vars(model).keys() == vars(plain).keys()
    assert torch.equal(run(duplicate, arguments), expected_of_duplicate)
    kernel.inject_kernels(model)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert is_on_kernels(model, arguments)
    assert relative_distance(run(model, arguments), single) < 1e-5
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), single)
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), arguments), single)


@either_order
def test_gradients_of_a_prepared_model(kernel, device, accelerator, is_injected_first):
    model, plain, _, arguments = pair(
        kernel, FLUX, device, change=accelerator.prepare, is_injected_first=is_injected_first
    )
    # By default the plain model's gradients are also NaN or wrong under Torch 2.11 on a Hopper GPU: its
    # attention by cuDNN has such a defect (https://github.com/pytorch/pytorch/issues/196678).
    with sdpa_kernel(SDPBackend.MATH):
        assert_gradients_agree(model, plain, arguments, 0.02)


class Scaled(TorchFunctionMode):
    """PyTorch's functions with these names return 1.2 times their results."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in self.names:
            return out
        self.count += 1
        return out * 1.2


class ScaledLayerNorm(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name != "aten::native_layer_norm":
            return out
        self.count += 1
        return out[0] * 1.2, *out[1:]


class Flops(FlopCounterMode):
    """A mode that counts FLOP by module."""

    def __init__(self):
        super().__init__(display=False)

    @property
    def count(self):
        return {name: dict(counts) for name, counts in self.get_flop_counts().items()}


RMS_ONLY = ("krea2", "minimax_h3")
WITHOUT_LAYER_NORMS = [family for name, family in FAMILIES.items() if name in RMS_ONLY]
# The norms of Cosmos 3 call no function of PyTorch's.
WITH_LAYER_NORMS = [f for name, f in FAMILIES.items() if name not in (*RMS_ONLY, "cosmos3")]
MODES = {  # the target of each, and models that use it
    "layer_norm": (functools.partial(Scaled, "layer_norm"), [*WITH_LAYER_NORMS, UNET]),
    "rms_norm": (functools.partial(Scaled, "rms_norm"), [LTX, *WITHOUT_LAYER_NORMS]),
    "gelu": (functools.partial(Scaled, "gelu"), [LTX, UNET]),
    "silu": (functools.partial(Scaled, "silu"), [FLUX, UNET]),
    "linear": (functools.partial(Scaled, "linear"), [LTX]),
    "attention": (functools.partial(Scaled, "scaled_dot_product_attention"), [LTX]),
    "group_norm": (functools.partial(Scaled, "group_norm"), [UNET]),
    "dispatch": (ScaledLayerNorm, [FLUX, UNET]),
    "flops": (Flops, [LTX, FLUX, UNET, MUSIC]),
    "skipped_scores": (AttentionScoreSkipFunctionMode, [LTX, MUSIC]),
}
MODES_AND_MODELS = [(name, family) for name, (_, families) in MODES.items() for family in families]


@pytest.mark.parametrize(("mode", "family"), MODES_AND_MODELS, ids=str)
def test_modes_see_the_models_own_code(kernel, device, family, mode):
    """Within a mode both compute the same bits, and calls of the injected model count as its own code."""
    make_mode, _ = MODES[mode]
    config = {} if family in (UNET, MUSIC) else {**KERNEL_HEADS, **family.one_block}
    model, plain, report, arguments = pair(kernel, family, device, torch.bfloat16, config)
    unlike = run(plain, arguments)
    results, counts = [], []
    for candidate in (model, plain):
        with make_mode() as entered:
            results.append(run(candidate, arguments))
        counts.append(getattr(entered, "count", None))
    assert counts[0] == counts[1] != 0 and counts[1] != {}
    assert torch.equal(*results)
    is_changing = counts[1] and make_mode is not Flops
    assert not is_changing or not torch.equal(results[1], unlike)
    # A wrapped model's or block's own forward still calls what is in it.
    name = type(make_mode()).__name__
    assert all(entry.on_kernels == 0 for entry in report.calls)
    is_said = any(name in reason for entry in report.calls for reason in entry.fell_back)
    assert is_said or make_mode is Flops  # which enters another mode
    assert is_on_kernels(model, arguments)


@some_models
def test_a_default_device_changes_nothing(kernel, device, family):
    model, _, _, arguments = pair(kernel, family, device)
    expected, calls = run(model, arguments), kernel_calls(run, model, arguments)
    with torch.device(device):
        assert torch.equal(run(model, arguments), expected)
        assert kernel_calls(run, model, arguments) == calls != {}


@contextlib.contextmanager
def counted_calls(cls, attribute, model):
    """The number of calls of each module by the patched ``cls.attribute``."""
    names = {module: name for name, module in model.named_modules()}
    counts = Counter()
    own = getattr(cls, attribute)

    def patch(self, *args, **kwargs):
        counts[names.get(self)] += 1
        return own(self, *args, **kwargs)

    is_inherited = attribute not in vars(cls)
    setattr(cls, attribute, patch)
    try:
        yield counts
    finally:
        if is_inherited:
            delattr(cls, attribute)
        else:
            setattr(cls, attribute, own)


@pytest.mark.parametrize("attribute", ["__call__", "_call_impl"])
@some_models
def test_a_patched_call_of_all_modules(kernel, device, family, attribute):
    model, plain, report, arguments = pair(kernel, family, device)
    expected = run(plain, arguments)
    with counted_calls(nn.Module, attribute, model) as counts:
        assert torch.equal(run(model, arguments), expected)
    with counted_calls(nn.Module, attribute, plain) as plain_counts:
        run(plain, arguments)
    assert counts == plain_counts and len(counts) > 20
    reason = "torch.nn.Module.__call__ was replaced"
    assert all(set(reasons) == {reason} for reasons in fallen_back(report).values())
    assert fallen_back(report) and is_on_kernels(model, arguments)


@pytest.mark.parametrize("family", [LTX, FLUX, SD3, UNET, MUSIC], ids=str)
def test_a_patched_call_of_a_class(kernel, device, family):
    """Modules of any class with a patched ``__call__`` are called as often as in the plain model."""
    model, plain, _, arguments = pair(kernel, family, device)
    expected, calls = run(plain, arguments), kernel_calls(run, model, arguments)
    classes = {cls for module in plain.modules() for cls in type(module).__mro__}
    classes = {cls for cls in classes if issubclass(cls, nn.Module) and cls is not nn.Module}
    assert nn.Linear in classes
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        with counted_calls(cls, "__call__", model) as counts:
            assert relative_distance(run(model, arguments), expected) < 1e-5
        with counted_calls(cls, "__call__", plain) as plain_counts:
            run(plain, arguments)
        assert counts == plain_counts, cls
    assert kernel_calls(run, model, arguments) == calls != {}


@pytest.mark.parametrize("part", ["", "block", "attention", "activation"])
@pytest.mark.parametrize("family", [LTX, FLUX], ids=str)
def test_a_forward_that_is_restored_after_ejection(kernel, device, family, part):
    """Keeps forwards like DeepCache. An injected model is not pickled."""
    model = family.model(device)
    plain, before, arguments = copy.deepcopy(model), snapshot(model), family.inputs(device)
    kernel.inject_kernels(model)
    expected = run(plain, arguments)
    path = family.parts[part] if part else ""
    module = model.get_submodule(path)
    for picklable in (model, module):
        with pytest.raises(TypeError, match="cannot be pickled: call eject_kernels first"):
            pickle.dumps(picklable)
    kept = module.forward
    module.forward = lambda *args, **kwargs: kept(*args, **kwargs)
    assert relative_distance(run(model, arguments), expected) < 1e-5
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)
    module.forward = kept
    assert not is_on_kernels(model, arguments)
    for copied in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(run(copied, arguments), expected)
    kernel.eject_kernels(model)
    assert snapshot(model) == before
    assert path in {entry.name for entry in kernel.inject_kernels(model).replaced}
    assert relative_distance(run(model, arguments), expected) < 1e-5


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@every_family
def test_no_text_tokens(kernel, device, family, is_half):
    dtype, config = (torch.bfloat16, KERNEL_HEADS) if is_half else (torch.float32, {})
    model, plain, _, arguments = pair(kernel, family, device, dtype, config)
    # 5 is the length of the text.
    for name in ("encoder_hidden_states", "encoder_hidden_states_mask", "encoder_attention_mask"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name][:, :0]
    if "txt_ids" in arguments:
        arguments["txt_ids"] = arguments["txt_ids"][..., :0, :]
    try:
        run(plain, arguments)
    except Exception as error:
        assert family.name not in ("flux", "flux2", "sd3")
        pytest.skip(f"plain raises: {error}")
    assert is_on_kernels(model, arguments)
    assert_alike(model, plain, arguments)


NO_MODELS = [None, "LTX", 3, [nn.Linear(2, 2)], {"model": nn.Linear(2, 2)}, nn.Linear]


@pytest.mark.parametrize("function", ["inject_kernels", "eject_kernels"])
@pytest.mark.parametrize("value", NO_MODELS, ids=lambda value: type(value).__name__)
def test_wrong_types_raise(kernel, function, value):
    with pytest.raises(TypeError) as raised:
        getattr(kernel, function)(value)
    message = str(raised.value)
    assert message.startswith(f"{function}: pipe_or_model must be ")
    assert message.endswith(f" {type(value).__name__}")
    assert len(message) < 150 and "\n" not in message

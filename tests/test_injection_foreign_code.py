"""Other code around an injected model: code that reads the signature of its forwards, wraps or keeps them,
or watches modules and operations from outside."""

import contextlib
import copy
import functools
import inspect
import io
import pickle
from collections import Counter

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanVACETransformer3DModel,
)
from diffusers.modular_pipelines import QwenImageAutoBlocks
from diffusers.modular_pipelines.wan.modular_blocks_wan_vace import Wan22VaceCoreDenoiseStep
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import small_models
from families import FAMILIES, FLUX, KERNEL_HEADS, QWEN_IMAGE, assert_close, every_family, run
from injected_pairs import fallen_back
from ltx_models import either_order, kernel_calls, snapshot

pytestmark = pytest.mark.usefixtures("_one_thread")

every_small_model = pytest.mark.parametrize("small", small_models.MODELS, ids=str)
UNET = next(small for small in small_models.MODELS if small.name == "unet")


def prepared(family, device, dtype=torch.float32, config=None, **options):
    """(model, the same without kernels, arguments); the options are for the inputs."""
    model = family.model(device, dtype, **(config or {}))
    return model, copy.deepcopy(model), family.inputs(device, dtype, seed=1, **options)


# ------------------------------------------------------------------------------------------------
# Signatures


def described(model):
    """What Python says of each module's forward."""
    return {
        name: (
            inspect.signature(module.forward),
            *(getattr(module.forward, a) for a in ("__name__", "__qualname__", "__module__")),
            module.forward.__doc__,
        )
        for name, module in model.named_modules()
    }


@every_family
def test_forwards_keep_signature_name_and_docstring(kernel, device, family):
    model = family.model(device)
    before = described(model)
    report = kernel.inject_kernels(model)
    assert {"", family.parts["block"], family.parts["attention"]} <= {
        entry.name for entry in report.replaced
    }
    assert described(model) == before
    run(model, family.inputs(device))
    assert described(copy.deepcopy(model)) == before
    kernel.eject_kernels(model)
    assert described(model) == before


@every_family
def test_forwards_keep_their_signature_with_cuda_graphs(kernel, device, family):
    model = family.model(device)
    before = described(model)
    kernel.inject_kernels(model, cuda_graphs=True)
    assert described(model) == before


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["", "graphs"])
@every_small_model
def test_forwards_of_models_in_part_keep_their_signature(kernel, device, small, cuda_graphs):
    model = small.model(device)
    before = described(model)
    kernel.inject_kernels(model, cuda_graphs=cuda_graphs)
    assert described(model) == before


@every_family
def test_the_function_of_a_forward_has_the_signature_of_the_classs(kernel, device, family):
    """accelerate and others take the function of a method and bind it again."""
    model = family.model(device)
    kernel.inject_kernels(model)
    for part in ("block", "attention"):
        module = family.part(model, part)
        function, own = module.forward.__func__, type(module).forward
        assert inspect.signature(function) == inspect.signature(own)
        assert (function.__name__, function.__doc__) == (own.__name__, own.__doc__)


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
    """It gives the model the arguments that the signature of its forward names, such as ``img_shapes``."""
    pipe = QwenImageAutoBlocks().sub_blocks["denoise"].init_pipeline()
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipe.update_components(transformer=QWEN_IMAGE.model(device), scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    expected = qwenimage_latents(pipe, device)
    kernel.inject_kernels(pipe.transformer)
    results = []
    assert kernel_calls(lambda: results.append(qwenimage_latents(pipe, device)))
    assert_close(results[0], expected, 1e-4)
    kernel.eject_kernels(pipe.transformer)
    assert torch.equal(qwenimage_latents(pipe, device), expected)


def vace_model(device, seed):
    torch.manual_seed(seed)
    model = WanVACETransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        out_channels=16,
        text_dim=24,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        vace_layers=[0, 1],
        vace_in_channels=6,
        rope_max_seq_len=32,
    )
    return model.to(device).eval()


def vace_latents(pipe, device, strength=1.0):
    torch.manual_seed(0)
    control = {
        "control_hidden_states": torch.randn(1, 6, 2, 4, 4, device=device),
        "control_hidden_states_scale": torch.full((2,), strength, device=device),
    }
    return pipe(
        prompt_embeds=torch.randn(1, 5, 24, device=device),
        negative_prompt_embeds=torch.randn(1, 5, 24, device=device),
        denoiser_input_fields=control,
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(0),
        output="latents",
    )


def test_modular_pipeline_of_wan_vace(kernel, device):
    """Both of its models are given the control states."""
    pipe = Wan22VaceCoreDenoiseStep().init_pipeline()
    pipe.update_components(
        transformer=vace_model(device, 0),
        transformer_2=vace_model(device, 1),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )
    pipe.set_progress_bar_config(disable=True)
    expected, weaker = vace_latents(pipe, device), vace_latents(pipe, device, 0.2)
    assert (expected - weaker).abs().max() > 1e-2
    for model in (pipe.transformer, pipe.transformer_2):
        kernel.inject_kernels(model)
    results = []
    assert kernel_calls(lambda: results.append(vace_latents(pipe, device)))
    assert_close(results[0], expected, 1e-4)
    assert_close(vace_latents(pipe, device, 0.2), weaker, 1e-4)


# ------------------------------------------------------------------------------------------------
# accelerate


@pytest.fixture
def accelerator(device):
    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=device == "cpu")
    AcceleratorState._reset_state(reset_partial_state=True)


def injected_and_prepared(kernel, accelerator, model, is_injected_first):
    if is_injected_first:
        report = kernel.inject_kernels(model)
    model = accelerator.prepare(model)
    return model, report if is_injected_first else kernel.inject_kernels(model)


@either_order
@every_family
def test_a_model_that_accelerate_has_prepared(
    kernel, device, accelerator, family, is_injected_first
):
    """It runs under autocast: by its own code, to the bit."""
    model, plain, arguments = prepared(family, device)
    single = run(plain, arguments)
    model, report = injected_and_prepared(kernel, accelerator, model, is_injected_first)
    plain = accelerator.prepare(plain)
    expected = run(plain, arguments)
    assert not torch.equal(single, expected)
    assert torch.equal(run(model, arguments), expected)
    reasons = {reason for found in fallen_back(report).values() for reason in found}
    assert reasons == {"autocast is on"}
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)
    assert vars(model).keys() == vars(plain).keys()


@either_order
@every_family
def test_a_model_that_accelerate_has_unwrapped(
    kernel, device, accelerator, family, is_injected_first
):
    model, plain, arguments = prepared(family, device)
    expected = run(plain, arguments)
    model, _ = injected_and_prepared(kernel, accelerator, model, is_injected_first)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    results = []
    assert kernel_calls(lambda: results.append(run(model, arguments)))
    assert_close(results[0], expected)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)
    assert kernel_calls(run, model, arguments) == {}
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), arguments), expected)


def test_a_model_that_is_ejected_and_then_unwrapped(kernel, device, accelerator):
    model, plain, arguments = prepared(FLUX, device)
    expected = run(plain, arguments)
    model, _ = injected_and_prepared(kernel, accelerator, model, True)
    kernel.eject_kernels(model)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert torch.equal(run(model, arguments), expected)
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), arguments), expected)
    kernel.inject_kernels(model)
    results = []
    assert kernel_calls(lambda: results.append(run(model, arguments)))
    assert_close(results[0], expected)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)


@either_order
@every_family
def test_a_copy_of_a_prepared_model(kernel, device, accelerator, family, is_injected_first):
    """It computes with its own weights, and stays injected when the model is ejected."""
    model, plain, arguments = prepared(family, device)
    model, _ = injected_and_prepared(kernel, accelerator, model, is_injected_first)
    plain = accelerator.prepare(plain)
    before = run(plain, arguments)
    duplicate, plain_duplicate = copy.deepcopy(model), copy.deepcopy(plain)
    for candidate in (duplicate, plain_duplicate):
        with torch.no_grad():
            family.part(candidate, "linear").weight.mul_(3)
    expected = run(plain_duplicate, arguments)
    assert not torch.equal(expected, before)
    assert torch.equal(run(duplicate, arguments), expected)
    assert torch.equal(run(model, arguments), before)
    kernel.eject_kernels(model)
    assert torch.equal(run(duplicate, arguments), expected)
    kernel.eject_kernels(duplicate)
    assert torch.equal(run(duplicate, arguments), expected)


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["", "graphs"])
@either_order
def test_a_prepared_unet(kernel, device, accelerator, is_injected_first, cuda_graphs):
    model = UNET.model(device)
    plain, arguments = copy.deepcopy(model), UNET.arguments(device)
    single = small_models.run(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model, cuda_graphs=cuda_graphs)
    model, plain = accelerator.prepare(model), accelerator.prepare(plain)
    if not is_injected_first:
        kernel.inject_kernels(model, cuda_graphs=cuda_graphs)
    expected = small_models.run(plain, arguments)
    assert not torch.equal(expected, single)
    for _ in range(3):
        assert torch.equal(small_models.run(model, arguments), expected)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    for _ in range(3):
        assert_close(small_models.run(model, arguments), single)
    kernel.eject_kernels(model)
    assert torch.equal(small_models.run(model, arguments), single)


@either_order
def test_gradients_of_a_prepared_model(kernel, device, accelerator, is_injected_first):
    model, plain, arguments = prepared(FLUX, device)
    model, _ = injected_and_prepared(kernel, accelerator, model, is_injected_first)
    for candidate in (model, accelerator.prepare(plain)):
        # By default the plain model's gradients, too, are NaN or wrong under Torch 2.11 on a Hopper GPU: its
        # attention by cuDNN has such a defect (https://github.com/pytorch/pytorch/issues/196678).
        with sdpa_kernel(SDPBackend.MATH):
            candidate(**arguments, return_dict=False)[0].square().mean().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert len(gradients) > 50
    for name, gradient in gradients.items():
        difference = (model.get_parameter(name).grad - gradient).norm()
        # On a GPU sums of gradients have no fixed order.
        assert difference <= (0 if device == "cpu" else 0.02) * gradient.norm(), name


# ------------------------------------------------------------------------------------------------
# Function and dispatch modes


class Scaled(TorchFunctionMode):
    """Functions of PyTorch with these names give 1.2 times what they do."""

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


def assert_plain_within(kernel, model, plain, arguments, mode, run=run):
    """Within a mode both compute the same bits, and calls of the injected model count as its own code."""
    unlike = run(plain, arguments)
    report = kernel.inject_kernels(model)
    with mode() as ours:
        out = run(model, arguments)
    with mode() as plains:
        expected = run(plain, arguments)
    if plains.count:
        assert not torch.equal(expected, unlike)
    assert ours.count == plains.count
    assert torch.equal(out, expected)
    reason = f"it runs within a {mode().__class__.__name__}"
    counted = {entry.name: entry for entry in report.calls}
    # A wrapped model's or block's own forward still calls what is in it.
    assert all(entry.on_kernels == 0 for entry in counted.values())
    assert any(reason in entry.fell_back for entry in counted.values())
    run(model, arguments)
    assert any(entry.on_kernels for entry in report.calls)
    return plains.count, counted, reason


FUNCTIONS = ["layer_norm", "rms_norm", "gelu", "silu", "scaled_dot_product_attention", "linear"]


@pytest.mark.parametrize("function", FUNCTIONS)
@every_family
def test_a_mode_that_changes_a_function(kernel, device, family, function):
    model, plain, arguments = prepared(family, device)
    mode = functools.partial(Scaled, function)
    _, counted, reason = assert_plain_within(kernel, model, plain, arguments, mode)
    for name in ("", *(family.parts[part] for part in ("block", "next_block", "attention"))):
        assert counted[name].fell_back == {reason: 1}


def test_each_function_is_changed_in_some_family(device):
    for function in FUNCTIONS:
        with Scaled(function) as mode:
            for family in FAMILIES.values():
                run(family.model(device), family.inputs(device))
        assert mode.count, function


@pytest.mark.parametrize("function", ["group_norm", "layer_norm", "gelu", "silu"])
def test_a_mode_that_changes_a_function_of_a_unet(kernel, device, function):
    model = UNET.model(device)
    mode = functools.partial(Scaled, function)
    arguments = UNET.arguments(device)
    plain = copy.deepcopy(model)
    count, *_ = assert_plain_within(kernel, model, plain, arguments, mode, small_models.run)
    assert count


@every_family
def test_a_dispatch_mode_that_changes_an_operator(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    assert_plain_within(kernel, model, plain, arguments, ScaledLayerNorm)


@every_family
def test_flops_are_counted_as_of_the_plain_model(kernel, device, family):
    model, plain, arguments = prepared(family, device, torch.bfloat16, KERNEL_HEADS)
    report = kernel.inject_kernels(model)
    counts, results = [], []
    for candidate in (model, plain):
        with FlopCounterMode(display=False) as counter:
            results.append(run(candidate, arguments))
        counts.append(counter.get_flop_counts())
    assert counts[1]["Global"]
    assert counts[0] == counts[1]
    assert torch.equal(*results)
    assert not any(entry.on_kernels for entry in report.calls)
    assert kernel_calls(run, model, arguments)


@every_small_model
def test_flops_are_counted_as_of_the_plain_model_in_part(kernel, device, small):
    model = small.model(device, torch.bfloat16)
    plain, arguments = copy.deepcopy(model), small.arguments(device, torch.bfloat16)
    report = kernel.inject_kernels(model)
    counts, results = [], []
    for candidate in (model, plain):
        with FlopCounterMode(display=False) as counter:
            results.append(small_models.run(candidate, arguments))
        counts.append(counter.get_flop_counts())
    assert counts[0] == counts[1]
    assert torch.equal(*results)
    assert not any(entry.on_kernels for entry in report.calls)
    assert kernel_calls(small_models.run, model, arguments)


@every_family
def test_a_default_device_is_no_mode_that_changes_results(kernel, device, family):
    model, _, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    expected, calls = run(model, arguments), kernel_calls(run, model, arguments)
    with torch.device(device):
        assert torch.equal(run(model, arguments), expected)
        assert kernel_calls(run, model, arguments) == calls != {}


def test_a_mode_that_a_hook_enters_within_a_forward(kernel, device):
    """From there on the model's own code runs, and after it the kernels again."""
    model, plain, arguments = prepared(FLUX, device)
    kernel.inject_kernels(model)
    for candidate in (model, plain):
        stack = contextlib.ExitStack()
        block, last = (FLUX.part(candidate, part) for part in ("next_block", "last_block"))
        mode = Scaled("layer_norm", "rms_norm", "gelu", "silu")
        block.register_forward_pre_hook(lambda *_, s=stack, m=mode: s.enter_context(m) and None)
        last.register_forward_hook(lambda *_, s=stack: s.close())
    expected = run(plain, arguments)
    assert mode.count
    results = []
    calls = kernel_calls(lambda: results.append(run(model, arguments)))
    assert calls
    assert_close(results[0], expected)


# ------------------------------------------------------------------------------------------------
# Calls of modules that debuggers and profilers watch


@contextlib.contextmanager
def counted_calls(cls, attribute, model):
    """How often each module of a model is called by ``cls.attribute``, which is patched."""
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
@either_order
@every_family
def test_a_patched_call_of_all_modules(kernel, device, family, attribute, is_injected_first):
    model, plain, arguments = prepared(family, device)
    expected = run(plain, arguments)
    if is_injected_first:
        report = kernel.inject_kernels(model)
    with counted_calls(nn.Module, attribute, model) as counts:
        if not is_injected_first:
            report = kernel.inject_kernels(model)
        assert torch.equal(run(model, arguments), expected)
    with counted_calls(nn.Module, attribute, plain) as plain_counts:
        run(plain, arguments)
    assert counts == plain_counts and len(counts) > 20
    assert fallen_back(report)[""] == {"torch.nn.Module.__call__ was replaced"}
    assert kernel_calls(run, model, arguments)


def assert_called_alike(kernel, model, plain, arguments, run=run):
    """Whichever class has a patched ``__call__``, its modules are called as often as in the plain model."""
    kernel.inject_kernels(model)
    expected, calls = run(plain, arguments), kernel_calls(run, model, arguments)
    classes = {cls for module in plain.modules() for cls in type(module).__mro__}
    classes = {cls for cls in classes if issubclass(cls, nn.Module) and cls is not nn.Module}
    assert nn.Linear in classes
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        with counted_calls(cls, "__call__", model) as counts:
            assert_close(run(model, arguments), expected)
        with counted_calls(cls, "__call__", plain) as plain_counts:
            run(plain, arguments)
        assert counts == plain_counts, cls
    assert kernel_calls(run, model, arguments) == calls != {}


@every_family
def test_a_patched_call_of_a_class(kernel, device, family):
    assert_called_alike(kernel, *prepared(family, device))


@every_small_model
def test_a_patched_call_of_a_class_of_a_model_in_part(kernel, device, small):
    model = small.model(device)
    arguments = small.arguments(device)
    assert_called_alike(kernel, model, copy.deepcopy(model), arguments, small_models.run)


# ------------------------------------------------------------------------------------------------
# Forwards that other code keeps


@pytest.mark.parametrize("part", ["", "block", "attention", "activation"])
@every_family
def test_a_forward_that_was_kept_and_put_back_after_the_ejection(kernel, device, family, part):
    """As DeepCache does."""
    if part not in ("", *family.parts):
        pytest.skip("the family has no such part")
    model, plain, arguments = prepared(family, device)
    expected = run(plain, arguments)
    before = snapshot(model)
    kernel.inject_kernels(model)
    module = family.part(model, part) if part else model
    kept = module.forward
    module.forward = lambda *args, **kwargs: kept(*args, **kwargs)
    assert_close(run(model, arguments), expected)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)
    module.forward = kept
    assert torch.equal(run(model, arguments), expected)
    assert kernel_calls(run, model, arguments) == {}
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), arguments), expected)
    assert torch.equal(run(copy.deepcopy(model), arguments), expected)
    kernel.eject_kernels(model)
    assert snapshot(model) == before
    report = kernel.inject_kernels(model)
    assert family.parts[part] if part else "" in {entry.name for entry in report.replaced}
    assert kernel_calls(run, model, arguments)
    assert_close(run(model, arguments), expected)


# ------------------------------------------------------------------------------------------------
# No text


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@every_family
def test_no_text_tokens(kernel, device, family, is_half):
    dtype, config = (torch.bfloat16, KERNEL_HEADS) if is_half else (torch.float32, {})
    model, plain, arguments = prepared(family, device, dtype, config)
    # 5 is the length of the text.
    for name in ("encoder_hidden_states", "encoder_hidden_states_mask", "encoder_attention_mask"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name][:, :0]
    if "txt_ids" in arguments:
        arguments["txt_ids"] = arguments["txt_ids"][..., :0, :]
    try:
        expected = run(plain, arguments)
    except Exception as error:
        assert family.name not in ("flux", "flux2", "sd3")
        pytest.skip(f"plain raises: {error}")
    kernel.inject_kernels(model)
    results = []
    assert kernel_calls(lambda: results.append(run(model, arguments)))
    assert results[0].shape == expected.shape
    assert_close(results[0], expected, 0.05 if is_half else 1e-5)


# ------------------------------------------------------------------------------------------------
# What is given by mistake, or pickled


NO_MODELS = [None, "LTX", 3, [nn.Linear(2, 2)], {"model": nn.Linear(2, 2)}, nn.Linear]


@pytest.mark.parametrize("function", ["inject_kernels", "eject_kernels"])
@pytest.mark.parametrize("value", NO_MODELS, ids=lambda value: type(value).__name__)
def test_what_is_no_model_and_no_pipeline(kernel, function, value):
    with pytest.raises(TypeError) as raised:
        getattr(kernel, function)(value)
    message = str(raised.value)
    assert message.startswith(f"{function}: pipe_or_model must be ")
    assert message.endswith(f" {type(value).__name__}")
    assert len(message) < 150 and "\n" not in message


@pytest.mark.parametrize("save", [pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
@pytest.mark.parametrize("part", ["", "block", "attention"])
@every_family
def test_an_injected_model_is_not_pickled(kernel, device, family, part, save):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    run(model, arguments)
    module = family.part(model, part) if part else model
    with pytest.raises(TypeError, match="cannot be pickled: call eject_kernels first"):
        save(module)
    kernel.eject_kernels(model)
    save(module)
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), arguments), run(plain, arguments))

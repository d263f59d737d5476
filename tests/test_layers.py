"""The layers that `kernels.kernelize` binds to instances of diffusers' and PyTorch's classes."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from diffusers.models.activations import GEGLU, GELU, SwiGLU
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from changes import weighted_sum
from checks import assert_contract, relative_distance
from inputs import for_dtypes, normal
from ltx_models import KernelCalls

# The classes that each layer fits, as documented.
CLASSES = {
    "RMSNorm": (RMSNorm, nn.RMSNorm),
    "LayerNorm": (nn.LayerNorm, FP32LayerNorm),
    "GELU": (GELU,),
    "GEGLU": (GEGLU,),
    "SwiGLU": (SwiGLU,),
}
HIDDEN = 64
# One instance of each kind, and the operator that it must call.
INSTANCES = {
    "rms_norm": (lambda: RMSNorm(HIDDEN, 1e-6), "rms_norm"),
    "rms_norm_without_weight": (lambda: RMSNorm(HIDDEN, 1e-6, False), "rms_norm"),
    "rms_norm_with_bias": (lambda: RMSNorm(HIDDEN, 1e-6, bias=True), "rms_norm"),
    "torch_rms_norm": (lambda: nn.RMSNorm(HIDDEN, 1e-6), "rms_norm"),
    "torch_rms_norm_without_weight": (lambda: nn.RMSNorm(HIDDEN, 1e-6, False), "rms_norm"),
    "layer_norm": (lambda: nn.LayerNorm(HIDDEN, 1e-5), "layer_norm"),
    "layer_norm_without_bias": (lambda: nn.LayerNorm(HIDDEN, bias=False), "layer_norm"),
    "layer_norm_without_weight": (lambda: nn.LayerNorm(HIDDEN, 1e-6, False), "layer_norm"),
    "fp32_layer_norm": (lambda: FP32LayerNorm(HIDDEN, 1e-6), "layer_norm"),
    "fp32_layer_norm_without_weight": (lambda: FP32LayerNorm(HIDDEN, 1e-6, False), "layer_norm"),
    "gelu": (lambda: GELU(HIDDEN, 2 * HIDDEN), "gelu"),
    "gelu_tanh": (lambda: GELU(HIDDEN, 2 * HIDDEN, "tanh", bias=False), "gelu"),
    "geglu": (lambda: GEGLU(HIDDEN, 2 * HIDDEN), "geglu"),
    "geglu_without_bias": (lambda: GEGLU(HIDDEN, 2 * HIDDEN, bias=False), "geglu"),
    "swiglu": (lambda: SwiGLU(HIDDEN, 2 * HIDDEN), "swiglu"),
}
every_instance = pytest.mark.parametrize("name", INSTANCES)


@pytest.fixture
def named_classes():
    """The classes with their layers' names, registered as by a user, and restored afterwards."""
    for layer, classes in CLASSES.items():
        for cls in classes:
            replace_kernel_forward_from_hub(cls, layer)
    yield
    for cls in (cls for classes in CLASSES.values() for cls in classes):
        del cls.kernel_layer_name, cls.kernel_condition


@pytest.fixture
def kernelized(kernel, device, named_classes):
    """A function that puts a model's layers on this build."""
    folder = Path(kernel.__file__).parents[1]
    mapping = {layer: {device: LocalLayerRepository(folder, layer_name=layer)} for layer in CLASSES}

    def apply(model, mode=Mode.INFERENCE):
        with use_kernel_mapping(mapping, inherit_mapping=False):
            return kernelize(model, mode=mode, device=device, use_fallback=False)

    return apply


def with_values(model, dtype, device):
    """Sets parameters so that each matters: no norm weight is 1, no bias 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(device, dtype).eval()


def instance(name, dtype, device):
    return with_values(INSTANCES[name][0](), dtype, device)


def calls_and_result(module, *args, **kwargs):
    with torch.no_grad(), KernelCalls() as calls:
        out = module(*args, **kwargs)
    return dict(calls.counts), out


def exact(module, x):
    """The module's result in float64, also for norms of diffusers that compute in float32."""
    module, x = copy.deepcopy(module).double(), x.double()
    if isinstance(module, FP32LayerNorm):
        return nn.functional.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)
    if not isinstance(module, RMSNorm):
        return module(x)
    out = nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.eps)
    return out if module.bias is None else out + module.bias


# --------------------------------------------------------------------------------------------------
# Each class


@every_instance
@for_dtypes(torch.float32, torch.bfloat16)
@torch.no_grad()
def test_each_class(kernelized, device, name, dtype):
    module = instance(name, dtype, device)
    x = normal(4, 256, HIDDEN, dtype=dtype, device=device)
    expected, eager_out = exact(module, x), module(x)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    kernelized(module)
    calls, out = calls_and_result(module, x)
    assert calls == {INSTANCES[name][1]: 1}
    assert (out.shape, out.dtype) == (eager_out.shape, eager_out.dtype)
    assert_contract(out, expected, eager_out)
    assert list(module.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("layer", CLASSES)
def test_layers_are_pure(kernel, layer):
    """A layer has only forward and the attributes that kernels allows: kernelize takes only the function."""
    assert kernel.layers.__all__ == sorted(CLASSES)
    cls = getattr(kernel.layers, layer)
    own = {name for name in vars(cls) if not name.startswith("__")}
    assert own == {"forward", "has_backward", "can_torch_compile"}
    assert cls.__init__ is nn.Module.__init__
    assert cls.has_backward and cls.can_torch_compile


@every_instance
def test_strided_and_empty_inputs(kernelized, device, name):
    """Also a last dimension that the operations do not take."""
    module = instance(name, torch.float32, device)
    views = [
        normal(2, 9, HIDDEN, dtype=torch.float32, device=device, layout="chunk"),
        normal(2, HIDDEN, 9, dtype=torch.float32, device=device).transpose(1, 2),
        torch.empty(2, 0, HIDDEN, device=device),
        normal(HIDDEN, dtype=torch.float32, device=device),
    ]
    expected = [module(x) for x in views]
    kernelized(module)
    for x, reference in zip(views, expected, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(module(x), reference, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Calls that operations do not support return the class's own result, bit for bit


def assert_own_result(kernelized, module, x):
    expected = module(x)
    kernelized(module)
    calls, out = calls_and_result(module, x)
    assert not calls
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("name", "of_weight", "of_x", "of_result"),
    [
        ("rms_norm", torch.float32, torch.bfloat16, torch.float32),
        ("rms_norm", torch.bfloat16, torch.float32, torch.bfloat16),
        ("rms_norm_with_bias", torch.float16, torch.float32, torch.float16),
        ("fp32_layer_norm", torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
@torch.no_grad()
def test_norms_of_mixed_dtypes(kernelized, device, name, of_weight, of_x, of_result):
    """The operation would have to round the weight."""
    module = instance(name, of_weight, device)
    x = normal(3, 5, HIDDEN, dtype=of_x, device=device)
    assert module(x).dtype == of_result
    assert_own_result(kernelized, module, x)


@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@torch.no_grad()
def test_torch_rms_norm_without_eps(kernelized, device, affine):
    """PyTorch takes the machine epsilon of a dtype, which is 0.0078 for bfloat16."""
    options = {"dtype": torch.bfloat16, "device": device}
    module = nn.RMSNorm(HIDDEN, elementwise_affine=affine, **options)
    assert_own_result(kernelized, module, normal(3, 5, HIDDEN, std=0.01, **options))


@pytest.mark.parametrize("cls", [nn.RMSNorm, nn.LayerNorm, FP32LayerNorm, RMSNorm])
@torch.no_grad()
def test_norm_with_parameters_of_two_dimensions(kernelized, device, cls):
    """PyTorch's classes normalize over both dimensions, diffusers' RMSNorm only over the last."""
    module = with_values(cls((5, HIDDEN), eps=1e-6), torch.float32, device)
    assert module.weight.shape == (5, HIDDEN)
    nn.init.normal_(module.weight)
    x = normal(3, 5, HIDDEN, dtype=torch.float32, device=device)
    assert_own_result(kernelized, module, x)


@pytest.mark.parametrize("cls", [nn.RMSNorm, nn.LayerNorm, FP32LayerNorm])
@torch.no_grad()
def test_norm_over_two_dimensions_without_parameters(kernelized, device, cls):
    module = cls((5, HIDDEN), eps=1e-6, elementwise_affine=False)
    x = normal(3, 5, HIDDEN, dtype=torch.float32, device=device)
    assert_own_result(kernelized, module, x)


@pytest.mark.parametrize("name", ["layer_norm_without_weight", "torch_rms_norm_without_weight"])
def test_norm_of_another_size_is_refused(kernelized, device, name):
    """Without parameters only the module knows its size."""
    module = kernelized(instance(name, torch.float32, device))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        module(torch.ones(3, HIDDEN + 1, device=device))


@every_instance
@pytest.mark.parametrize("is_autocast", [False, True], ids=["float64", "autocast"])
@torch.no_grad()
def test_float64_and_autocast(kernelized, device, name, is_autocast):
    """Autocast chooses dtypes by operator, and only knows PyTorch's."""
    dtype = torch.float32 if is_autocast else torch.float64
    module = instance(name, dtype, device)
    x = normal(3, 5, HIDDEN, dtype=dtype, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=is_autocast):
        assert_own_result(kernelized, module, x)


class Shifted(nn.LayerNorm):
    """A weight around zero, as in some models."""

    def forward(self, input):
        return nn.functional.layer_norm(input, self.normalized_shape, 1 + self.weight, self.bias)


class ShiftedGELU(GELU):
    def forward(self, hidden_states):
        return super().forward(hidden_states) - 1


class Renamed(nn.LayerNorm):
    pass


@pytest.mark.parametrize(
    "make", [lambda: Shifted(HIDDEN), lambda: ShiftedGELU(HIDDEN, 128)], ids=["norm", "gelu"]
)
@torch.no_grad()
def test_subclasses_with_another_forward(kernelized, device, make):
    """kernelize also binds the layer to subclasses, which inherit the layer's name."""
    module = with_values(make(), torch.float32, device)
    assert_own_result(kernelized, module, torch.randn(3, 5, HIDDEN, device=device))


@torch.no_grad()
def test_subclasses_with_the_same_forward(kernelized, device):
    module = kernelized(with_values(Renamed(HIDDEN), torch.float32, device))
    calls, _ = calls_and_result(module, torch.randn(3, 5, HIDDEN, device=device))
    assert calls == {"layer_norm": 1}


@torch.no_grad()
def test_deprecated_scale_of_geglu(kernelized, device):
    """Ignored with a warning, as in diffusers."""
    module = instance("geglu", torch.float32, device)
    x = torch.randn(3, 5, HIDDEN, device=device)
    expected = module(x)
    kernelized(module)
    for args, kwargs in (((0.5,), {}), ((), {"scale": 0.5})):
        with pytest.warns(FutureWarning, match="scale"):
            assert torch.equal(module(x, *args, **kwargs), expected)


@torch.no_grad()
def test_linear_layers_are_called(kernelized, device):
    """Including everything that LoRA, quantization or offloading added."""
    for name in ("gelu", "geglu", "swiglu"):
        module = kernelized(instance(name, torch.float32, device))
        x = torch.randn(3, 5, HIDDEN, device=device)
        plain = module(x)
        seen = []
        module.proj.register_forward_hook(lambda *call, seen=seen: seen.append(call[2]) or -call[2])
        assert not torch.equal(module(x), plain)
        assert len(seen) == 1


# --------------------------------------------------------------------------------------------------
# A model


class Model(nn.Module):
    """One instance of each kind."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({name: make() for name, (make, _) in INSTANCES.items()})

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts.values()], -1)


def model_and_input(device):
    torch.manual_seed(0)
    model = with_values(Model(), torch.float32, device)
    return model, copy.deepcopy(model), normal(2, 9, HIDDEN, dtype=torch.float32, device=device)


@pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE], ids=str)
def test_gradients(kernelized, device, mode):
    model, plain, x = model_and_input(device)
    kernelized(model, mode)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for one, its in zip((model, plain), inputs, strict=True):
        weighted_sum(one.train()(its)).backward()
    expected = {"x": inputs[1].grad, **{name: p.grad for name, p in plain.named_parameters()}}
    gradients = {"x": inputs[0].grad, **{name: p.grad for name, p in model.named_parameters()}}
    for name, value in expected.items():
        assert value.any()
        assert relative_distance(gradients[name], value) < 1e-4, name


def operators(graph_module):
    """How often a graph calls each operator of the package."""
    targets = (str(node.target).split(".") for node in graph_module.graph.nodes)
    return Counter(t[1] for t in targets if t[0].startswith("_h100_diffusers_kernels"))


@pytest.mark.usefixtures("_fresh_compiler")
@torch.no_grad()
def test_compile(kernelized, device):
    """One graph that holds the operators, compiled once."""
    model, plain, x = model_and_input(device)
    kernelized(model, Mode.INFERENCE | Mode.TORCH_COMPILE)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for values in (x, x * 0.5):
        torch.testing.assert_close(compiled(values), plain(values), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert operators(graph) == {"norm": 10, "activation": 5}

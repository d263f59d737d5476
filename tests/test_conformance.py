"""Injected models of all families behave like models without kernels, after all actions of users."""

import functools
import gc
import inspect
import itertools
import threading
import weakref
from typing import NamedTuple

import accelerate
import pytest
import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip
from diffusers.hooks.layer_skip import AttentionProcessorSkipHook
from diffusers.models import attention_dispatch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import adapters
import changes
import ltx_models
from changes import HOOKS, WAYS, Counted
from checks import relative_distance
from families import (
    FAMILIES,
    KERNEL_HEADS,
    WAITING,
    assert_close,
    every_family,
    joined,
    prepared,
    run,
)
from family_trained_ltx import TRAINED_LTX
from injected_pairs import assert_as_close_as_eager, assert_gradients_agree, on_kernels
from ltx_models import computing, graph_replays, kernel_calls, snapshot
from random_sequences import MODELS, REPLACEMENTS, Step, Twins, is_adaptive_norm, patchable

pytestmark = [pytest.mark.usefixtures("_one_thread", "_default_backend")]


IN_PART = ("unet_of_sdxl", "auraflow")
TRAINED = TRAINED_LTX.name


def of_families(cases, *further):
    """Parameters (family, case) for all cases of each family and of further models."""
    families = [*FAMILIES.values(), *(MODELS[name] for name in further)]
    pairs = [(family, case) for family in families for case in cases(family)]
    return pytest.mark.parametrize(
        "family, case", pairs, ids=[f"{family}-{case}" for family, case in pairs]
    )


def on(*names):
    """Families, or partially injected models, that represent all users of shared code."""
    return pytest.mark.parametrize("family", [MODELS[name] for name in names], ids=str)


def assert_alike(model, plain, arguments, slack=1e-4):
    """Compares both in float32, for models without a float64 version."""
    assert_close(run(model, arguments), run(plain, arguments), slack)


# ------------------------------------------------------------------------------------------------
# Values


@pytest.mark.whole
@pytest.mark.kernels_ci
@of_families(lambda family: family.options, TRAINED)
def test_values(kernel, device, family, case):
    model, plain, arguments = prepared(family, device, **family.options[case])
    kernel.inject_kernels(model)
    assert computing(family.reference(plain, arguments), model, arguments)


@every_family
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [(True, torch.bfloat16), (True, torch.float16), (False, torch.bfloat16)],
    ids=["attention-bfloat16", "attention-float16", "no_attention-bfloat16"],
)
def test_accuracy_contract(kernel, device, family, attention, dtype):
    model, plain, arguments = prepared(family, device, dtype, config=KERNEL_HEADS)
    kernel.inject_kernels(model, attention=attention)
    of_kernel = {"attention", "attention_blocks"} & kernel_calls(run, model, arguments).keys()
    assert bool(of_kernel) == attention
    sizes = {"batch": 3, "tokens": 20, "text_length": 20}
    make = functools.partial(family.inputs, device, **sizes)
    assert_as_close_as_eager(
        model, plain, lambda dtype, seed: make(dtype, seed=seed), samples=3, dtype=dtype
    )
    assert torch.equal(run(model, arguments), run(model, arguments))


# In each, the last layer of a block's feed-forward of the text.
DOWN_OF_TEXT = {"flux": "ff_context.net.2", "qwenimage": "txt_mlp.net.2"}


def test_a_block_that_sd3_skips(kernel, device):
    """The next block gets the same tensors, and must not use values computed for the skipped one."""
    family = FAMILIES["sd3"]
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    without = run(plain, arguments)
    arguments["skip_layers"] = [1]
    expected = family.reference(plain, arguments)
    assert relative_distance(expected, without) > 0.01
    assert_close(run(model, arguments), expected)


@pytest.mark.parametrize("blocks", FAMILIES["chroma"].block_lists)
def test_a_hook_writes_to_the_mask_of_one_block(device, blocks):
    """Each block of Chroma computes its attention's mask, so that no other block sees what is written."""
    with Twins("chroma", device=device) as twins:
        twins.inject()
        twins.hook(module=f"{blocks}.0.attn", kind="last keyword", way="in place")
        twins.forward(options="padded text")


def test_two_modulations_of_qwenimage(kernel, device):
    """In image editing, tokens of the reference image get the modulation of time step 0."""
    family = FAMILIES["qwenimage"]
    config = {"zero_cond_t": True}
    model, plain, arguments = prepared(family, device, config=config, images=2)
    kernel.inject_kernels(model)
    assert_close(run(model, arguments), family.reference(plain, arguments))


@pytest.mark.parametrize("name", DOWN_OF_TEXT)
def test_float16_is_clipped_to_its_range(kernel, device, name):
    """Text beyond the range after the first block does not become infinite, as in diffusers."""
    family = FAMILIES[name]
    model, plain, arguments = prepared(family, device, torch.float16)
    for candidate in (model, plain):
        layer = family.part(candidate, "block").get_submodule(DOWN_OF_TEXT[name])
        torch.nn.init.constant_(layer.bias, 60000.0)
    kernel.inject_kernels(model)
    texts = []
    following = family.part(plain, "next_block")
    following.register_forward_pre_hook(
        lambda module, args, kwargs: texts.append(kwargs["encoder_hidden_states"]), with_kwargs=True
    )
    expected = run(plain, arguments)
    assert texts[0].abs().max() == 65504
    assert expected.isfinite().all()
    assert relative_distance(run(model, arguments), expected) < 0.03


def test_the_modulation_of_wan_stays_float32(kernel, device):
    """Only the result is rounded: nearly all bits of the attention's input are the eager model's."""
    family = FAMILIES["wan"]
    model, plain, arguments = prepared(family, device, torch.bfloat16, batch=1, tokens=4)
    kernel.inject_kernels(model)
    inputs = []
    for candidate in (model, plain):
        family.part(candidate, "attention").register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append([*args, *kwargs.values()][0]),
            with_kwargs=True,
        )
        run(candidate, arguments)
    mine, expected = inputs
    assert mine.dtype == expected.dtype == torch.bfloat16
    assert (mine != expected).float().mean() < 0.02


def test_coordinates_of_another_grid(kernel, device):
    """Grids with the same number of tokens. Nothing is cached within a mode, such as the kernel counter."""
    model, plain, _ = prepared(FAMILIES["ltx"], device)
    kernel.inject_kernels(model)
    arguments = ltx_models.inputs(plain, grid=(2, 3, 4))
    for grid in ((2, 3, 4), (4, 2, 3), (2, 4, 3), (2, 3, 4)):
        arguments.update(zip(("num_frames", "height", "width"), grid, strict=True))
        assert_close(run(model, arguments), run(plain, arguments), 1e-4)


# ------------------------------------------------------------------------------------------------
# Actions: each on an injected model and a plain one, which are compared at each forward. At the end the
# kernels are ejected, and the models must have the same bits and attributes.


def step(action, /, **arguments):
    return Step(action, arguments)


FORWARD = step("forward")


def apply(twins, steps, *, is_injected_first=True):
    """Applies the steps, and compares once more at the end, where parts still run on the kernels."""
    if is_injected_first:
        twins.inject()
        run(twins.tested, twins.family.inputs(twins.device, twins.dtype, seed=1))
    interrupted = 0
    for one in steps:
        one.apply(twins)
        interrupted += one.name == "interrupted_forward"
    twins.inject()
    report = twins.kernel.inject_kernels(twins.tested, attention=twins.injected[0])
    before = on_kernels(report).total()
    twins.forward()
    assert on_kernels(report).total() > before
    twins.finish()
    assert twins.counts["calls that raise"] == interrupted


def part_steps(family, twins, kind):
    """All actions of users on one part, each undone if possible."""
    path = family.parts[kind]
    part = twins.plain.get_submodule(path)
    name = f"{type(part).__name__}.forward"
    if name in patchable(twins):
        yield from (step("patch", name=name), FORWARD, step("unpatch"))
    for way in WAYS[:4]:
        mode = "no_grad" if way in ("in place", "data") else "inference_mode"
        yield step("hook", module=path, kind="post", way=way)
        yield from (step("forward", mode=mode), step("unhook"))
    # One of them sees tensors, depending on how the part is called.
    for hook in ("pre", "keyword"):
        yield step("hook", module=path, kind=hook, way="data")
    yield from (FORWARD, step("unhook"), step("unhook"))
    yield step("interrupted_forward", module=path, kind="post")
    for library in ("accelerate", "diffusers"):
        yield step("library_hook", module=path, library=library)
        yield from (FORWARD, step("remove_library_hooks"))
    is_adaptive = is_adaptive_norm(part)
    for way in ["wrap", "another"] if is_adaptive else REPLACEMENTS.get(kind, ["wrap"]):
        yield from (step("replace", module=path, kind=way), FORWARD)
    yield step("wrap_forward", module=path)


@pytest.mark.drawn(times=0, period=15)
@of_families(lambda family: family.parts, *IN_PART)
def test_parts(device, family, case):
    with Twins(family.name, device=device) as twins:
        apply(twins, part_steps(family, twins, case))


@pytest.mark.parametrize("case", FAMILIES["flux"].parts)
def test_parts_that_are_changed_before_the_injection(device, case):
    family = FAMILIES["flux"]
    with Twins(family.name, device=device) as twins:
        steps = [one for one in part_steps(family, twins, case) if one.name != "forward"]
        apply(twins, steps, is_injected_first=False)


def lora_steps(family):
    yield from (step("add_lora", seed=1), FORWARD)
    for action in ("scale", "disable"):
        yield from (step("change_lora", action=action), FORWARD)
    yield step("change_lora", action="enable")
    for action in ("fuse", "unfuse"):
        yield from (step("change_lora", action=action), FORWARD)
    yield from (step("add_lora", seed=2), FORWARD, step("change_lora", action="delete"))


class At(NamedTuple):
    """Sets the time step, of which each forward subtracts 7."""

    timestep: int
    name = "at"

    def apply(self, twins):
        twins.timestep = self.timestep


def cache_steps(family):
    for name in family.caches:
        # FasterCache computes above 681 and then skips each second forward.
        yield from (At(694), step("enable_cache", name=name), FORWARD, FORWARD, FORWARD)
        yield step("disable_cache")


def offloading_steps(family):
    for kind in ("sequential", "model", "leaf_level", "block_level"):
        yield from (step("offload", kind=kind), FORWARD, FORWARD, step("onload"))


def disk_steps(family):
    return [step("offload", kind="block_level disk"), FORWARD]  # reads the weights again at the end


def stream_steps(family):
    for kind in ("leaf_level stream", "block_level stream"):
        yield from (step("offload", kind=kind), FORWARD, FORWARD, step("onload"))


def processor_steps(family):
    path = family.parts["attention"]
    for kind in ("subclass", "other", "module", "fresh"):
        yield from (step("set_processor", module=path, kind=kind), FORWARD)


def linear_steps(family):
    for kind in ("output", "up"):
        yield from (step("replace", module=family.parts[kind], kind="halved"), FORWARD)


def quantized_steps(family):
    for path in family.block_lists:
        yield from (step("quantize", module=path), FORWARD)


def patched_steps(family):
    functions = (*family.functions, *PATCHED_FUNCTIONS, f"{family.processor}.__call__")
    if family.name == "ltx":
        functions += ("LTXVideoRotaryPosEmbed._prepare_video_coords", "GELU.gelu")
    if family.name == "unet_of_sdxl":
        functions += ("F.group_norm", "F.silu", "F.conv2d")
        functions += tuple(f"{name}.forward" for name in ("GroupNorm", "SiLU", "Linear", "Conv2d"))
    for name in functions:
        yield from (step("patch", name=name), FORWARD, step("unpatch"))


PATCHED_FUNCTIONS = (
    *("F.rms_norm", "F.layer_norm", "F.gelu", "F.linear", "F.scaled_dot_product_attention"),
    "Dropout.forward",
)


def global_hook_steps(family):
    for cls in (None, "Linear", "RMSNorm"):
        yield from (step("global_hook", cls=cls), FORWARD, step("remove_global_hook"))


def backend_steps(family):
    for name in ("_native_math", None, "native"):
        yield from (step("set_attention_backend", name=name), FORWARD)


def mode_steps(family):
    # diffusers keeps tables of the first call. Those of an inference mode would have no gradients.
    yield step("forward", mode="no_grad")
    modes = ["inference_mode", "grad", "autocast", "score_skip", "thread", "backward", "jvp"]
    modes += ["attention_backend", "function mode", "scaling function mode", "other weights"]
    if family.name == "cosmos3":  # its own code raises
        modes = [mode for mode in modes if mode not in ("score_skip", "autocast")]
    if family.name == "hidream":  # it reads how many tokens each expert has
        modes.remove("jvp")
    yield from (step("forward", mode=mode) for mode in modes)


def copy_steps(family):
    yield from (step("deepcopy", keep=True), FORWARD, step("load_weights", seed=2), FORWARD)
    yield from (step("load_weights", seed=1, assign=True), FORWARD)
    yield from (step("deepcopy", keep=False), FORWARD, step("to_and_back", dtype="float16"))


def modulation_steps(family):
    """Hooks on blocks of each kind that change the argument of their modulation."""
    model, first = family.model("cpu"), family.parts["next_block"]
    others = (f"{blocks}.0" for blocks in family.block_lists if not first.startswith(blocks))
    for path in (first, *others):
        parameters = inspect.signature(type(model.get_submodule(path)).forward).parameters
        assert family.condition in parameters or path != first
        for kind in ("keyword", "last keyword", "parameter"):
            for way in ("replace", "in place", "data"):
                yield from (step("hook", module=path, kind=kind, way=way), FORWARD)
                if kind == "parameter":  # which the next forward changes again
                    yield FORWARD
                yield step("unhook")


def two_stream_steps(family):
    """Hooks on one stream's modulation and the other's norm: neither runs twice."""
    layer, norm = {
        "qwenimage": ("img_mod", "txt_norm1"),
        "flux": ("norm1.linear", "norm1_context"),
        "sd3": ("norm1.linear", "norm1_context"),
    }[family.name]
    for part in (layer, norm):
        yield step("hook", module=f"transformer_blocks.0.{part}", kind="post", way="none")


def training_steps(family):
    """Dropouts drop in training, and no longer in evaluation."""
    for how in ("dropout", "train"):
        yield step("change_attribute", module="", how=how, value=2.0)
    yield from (FORWARD, step("change_attribute", module="", how="eval"))


EVERY = tuple(FAMILIES)
ALL = (*EVERY, *IN_PART, TRAINED)
WITH_CACHES = [name for name in (*EVERY, TRAINED) if MODELS[name].caches]
# For each case: the steps, the families whose code differs, and the dtypes.
ACTIONS = {
    "lora": (lora_steps, ALL, ["float32"]),
    "caches": (cache_steps, WITH_CACHES, ["float32"]),
    "offloading": (offloading_steps, ALL, ["float32"]),
    "offloading to disk": (disk_steps, ("flux",), ["float32", "bfloat16"]),
    "offloading with streams": (stream_steps, ("flux", "wan", TRAINED), ["float32"]),
    "layerwise casting": (lambda family: [step("layerwise_casting")], ALL, ["float32"]),
    "processors": (processor_steps, ALL, ["float32"]),
    "linear layers": (linear_steps, EVERY, ["float32"]),
    "quantized layers": (quantized_steps, ALL, ["float32", "bfloat16"]),
    "patched functions": (patched_steps, ALL, ["float32", "bfloat16"]),
    "global hooks": (global_hook_steps, ALL, ["float32"]),
    "attention backends": (backend_steps, ALL, ["bfloat16"]),
    "modes": (mode_steps, ALL, ["float32", "bfloat16"]),
    "copies": (copy_steps, ALL, ["float32"]),
    "modulation": (modulation_steps, EVERY, ["float32"]),
    "hooks on two streams": (two_stream_steps, ("flux", "qwenimage", "sd3"), ["float32"]),
    "training": (training_steps, ("flux", "ltx"), ["float32"]),
    "forward of the model": (lambda family: [step("wrap_forward", module="")], ALL, ["float32"]),
}
CASES = [
    (name, family, dtype)
    for name, (_, families, dtypes) in ACTIONS.items()
    for family in families
    for dtype in dtypes
]


@pytest.mark.drawn(times=0)
@pytest.mark.parametrize(("case", "family", "dtype"), CASES)
def test_actions(device, case, family, dtype):
    with Twins(family, dtype=dtype, device=device) as twins:
        apply(twins, list(ACTIONS[case][0](twins.family)))


BEFORE = ["lora", "offloading to disk", "layerwise casting", "quantized layers", "processors"]


@pytest.mark.parametrize("case", BEFORE)
def test_actions_before_the_injection(device, case):
    with Twins("flux", device=device) as twins:
        steps = [s for s in ACTIONS[case][0](twins.family) if s.name != "forward"]
        apply(twins, steps, is_injected_first=False)


def uses(family):
    yield from (FORWARD, step("forward", mode="backward"))
    yield step("interrupted_forward", module=family.parts["next_block"], kind="pre")
    yield from (step("hook", module=family.parts["norm"], kind="post", way="replace"), FORWARD)


@every_family
@pytest.mark.parametrize("is_ejected", [False, True], ids=["injected", "ejected"])
def test_memory_is_freed_without_garbage_collection(device, family, is_ejected):
    """A copy does not keep its original alive, and a deleted model is freed."""
    with Twins(family.name, device=device) as twins:
        twins.inject()
        for one in uses(family):
            one.apply(twins)
        gc.collect(0)  # frames that the error passed
        weights = weakref.ref(next(twins.tested.parameters()))
        twins.deepcopy(keep=False)
        assert weights() is None
        twins.forward()
        if is_ejected:
            twins.eject()
        twins.free()


# ------------------------------------------------------------------------------------------------
# The report, and the way back


@every_family
def test_report_names_modules(kernel, device, family):
    """The report's modules are the model's. Another model stays plain."""
    model, plain, arguments = prepared(family, device)
    report = kernel.inject_kernels(model)
    assert not kernel_calls(run, plain, arguments)
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    for entry in report.replaced + report.left_alone:
        assert classes[entry.name] == entry.module
    assert len({entry.name for entry in report.replaced}) == report.num_replaced
    assert {family.parts["block"], family.parts["attention"]} <= {e.name for e in report.replaced}
    assert all(entry.reason for entry in report.left_alone)


@on("flux", "wan")
@pytest.mark.parametrize("attention", [True, False])
def test_second_injection(kernel, device, family, attention, capfd):
    """With the same options it changes nothing, with others it raises. Nothing is printed."""
    model, _, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS)
    capfd.readouterr()
    first = kernel.inject_kernels(model, attention=attention)
    before = snapshot(model)
    second = kernel.inject_kernels(model, attention=attention)
    assert (first.already_injected, second.already_injected) == (False, True)
    assert (second.replaced, second.left_alone) == (first.replaced, first.left_alone)
    assert "before this call" in str(second) and "before this call" not in str(first)
    is_left = "requested by attention=False"
    assert any(is_left in entry.reason for entry in first.left_alone) != attention
    given = f"injected with attention={attention}, got attention={not attention}"
    with pytest.raises(ValueError, match=f"^inject_kernels.* {given}: call eject_kernels first$"):
        kernel.inject_kernels(model, attention=not attention)
    with pytest.raises(TypeError):
        kernel.inject_kernels(model, attention)
    assert snapshot(model) == before
    assert ("attention" in kernel_calls(run, model, arguments)) == attention
    kernel.eject_kernels(model)
    kernel.inject_kernels(model, attention=not attention)
    assert ("attention" in kernel_calls(run, model, arguments)) != attention
    assert capfd.readouterr() == ("", "")


@on("flux", "wan")
def test_subclasses_and_wrapped_models_are_known(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    model.__class__ = type("MyTransformer", (type(model),), {})
    kernel.inject_kernels(torch.nn.Sequential(torch.compile(model, backend="eager")))
    assert computing(family.reference(plain, arguments), model, arguments)


@pytest.mark.kernels_ci
@every_family
@pytest.mark.parametrize("had_hooks", [False, True], ids=["fresh", "had_hooks"])
def test_eject_gives_back_the_model(kernel, device, family, had_hooks):
    """Weights, configuration, classes and processors never change."""
    model, _, arguments = prepared(family, device)
    if had_hooks:
        for block in family.blocks(model):
            add_hook_to_module(block, accelerate.hooks.ModelHook())
            remove_hook_from_module(block)

    def constant():
        tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
        classes = {type(module): dict(vars(type(module))) for module in model.modules()}
        tensors.pop("rope.inv_freq", None)  # OmniGen's own code assigns it in each forward
        identities = {name: id(tensor) for name, tensor in tensors.items()}
        processors = [
            (module.processor, dict(vars(module.processor)))
            for module in model.modules()
            if hasattr(module, "processor")
        ]
        return identities, list(model.state_dict()), dict(model.config), classes, processors

    values = {name: value.clone() for name, value in model.state_dict().items()}
    before, always, expected = snapshot(model), constant(), run(model, arguments)
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    for _ in range(2):
        kernel.inject_kernels(model)
        assert kernel_calls(run, model, arguments)
        assert constant() == always
        kernel.eject_kernels(model)
        assert snapshot(model) == before
        assert {name: list(vars(m)) for name, m in model.named_modules()} == attributes
        assert torch.equal(run(model, arguments), expected)
    kernel.eject_kernels(model)
    assert snapshot(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@on("flux", "unet")
def test_saved_and_loaded(kernel, device, family, tmp_path):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(device)
    assert not kernel_calls(run, loaded, arguments)
    assert torch.equal(run(loaded, arguments), run(plain, arguments))
    kernel.inject_kernels(loaded)
    assert torch.equal(run(loaded, arguments), run(model, arguments))


# ------------------------------------------------------------------------------------------------
# Hooks and parts


@every_family
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_every_kind_of_module(kernel, device, family, kind):
    """Hooks and linear layers run as often as in a plain model."""
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    counts = {}
    for candidate in (model, plain):
        linears = [n for n, m in candidate.named_modules() if type(m) is torch.nn.Linear]
        hooks = counts[candidate] = {path: Counted() for path in family.parts.values()}
        for path, counted in hooks.items():
            HOOKS[kind](candidate.get_submodule(path), counted)
        for path in linears:
            HOOKS["torch"](candidate.get_submodule(path), hooks.setdefault(path, Counted()))
    assert_alike(model, plain, arguments)
    of_model, of_plain = ({p: c.count for p, c in counts[m].items()} for m in (model, plain))
    assert of_model == of_plain


@every_family
def test_hooks_that_change_a_blocks_own_weights(kernel, device, family):
    """Moves a block before its turn, as block swapping does."""

    def swap(block, args):
        for name, parameter in list(block.named_parameters(recurse=False)):
            setattr(block, name, torch.nn.Parameter(parameter * -1))
        for module in block.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters(recurse=False):
                    parameter.data.mul_(-1)

    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    for candidate in (model, plain):
        for block in family.blocks(candidate):
            block.register_forward_pre_hook(swap)
    for _ in range(2):
        assert_alike(model, plain, arguments)


class Bfloat16Linear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).bfloat16()


@every_family
def test_linear_layers_of_another_class(kernel, device, family):
    """The class returns another dtype, so that later operations get mixed dtypes."""
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    for candidate in (model, plain):
        family.part(candidate, "output").__class__ = Bfloat16Linear
    assert kernel_calls(run, model, arguments)
    # A value between two bfloat16 numbers may be rounded to either.
    assert_alike(model, plain, arguments, slack=2e-2)


@on("ltx", "wan")
def test_a_skipped_block(kernel, device, family):
    """Skipped by diffusers' hook, which swaps the two streams of other families."""
    model, plain, arguments = prepared(family, device)
    unlike = run(plain, arguments)
    kernel.inject_kernels(model)
    for candidate in (model, plain):
        apply_layer_skip(candidate, LayerSkipConfig(indices=[1], fqn=family.block_lists[0]))
    assert_alike(model, plain, arguments)
    assert relative_distance(run(plain, arguments), unlike) > 1e-3


@on(*(name for name in FAMILIES if name != "cosmos3"))  # the hook gives it values of too few heads
def test_scores_are_skipped_by_a_hook(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    for candidate in (model, plain):
        hook = AttentionProcessorSkipHook(None, skip_attention_scores=True)
        registry = HookRegistry.check_if_exists_or_initialize(family.part(candidate, "attention"))
        registry.register_hook(hook, "skip")
    assert_alike(model, plain, arguments)


@on(*FAMILIES)
def test_attention_backends(kernel, device, family):
    """The kernel computes no attention if another backend is chosen, in any way."""
    model, _, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS)
    kernel.inject_kernels(model)

    def is_on_the_kernel():
        return bool({"attention", "attention_blocks"} & kernel_calls(run, model, arguments).keys())

    assert is_on_the_kernel()
    with attention_dispatch.attention_backend("_native_math"):
        assert is_on_the_kernel() != family.has_backends
    assert is_on_the_kernel()
    keeps_choice = hasattr(family.part(model, "attention").processor, "_attention_backend")
    for name in ("_native_math", "native"):
        model.set_attention_backend(name)
        # Without that attribute, "native" cannot be told from no choice.
        is_chosen = family.has_backends and (keeps_choice or name != "native")
        assert is_on_the_kernel() != is_chosen
    model.reset_attention_backend()
    names = attention_dispatch.AttentionBackendName
    for name in (names._NATIVE_MATH, names.NATIVE):  # as of DIFFUSERS_ATTN_BACKEND
        attention_dispatch._AttentionBackendRegistry.set_active_backend(name)
        assert is_on_the_kernel() != (family.has_backends and name == names._NATIVE_MATH)


# ------------------------------------------------------------------------------------------------
# torch.compile and CUDA graphs


# Tracing takes seconds.
SOON = {("blocks", name) for name in ("ltx", "flux", "qwenimage", "sd3", "wan")}


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, family, marks=[] if (kind, family.name) in SOON else [pytest.mark.slow])
        for kind, families in {"blocks": FAMILIES, "model": ["ltx", "flux"]}.items()
        for family in map(FAMILIES.get, families)
    ],
    ids=str,
)
def test_compiled(kernel, device, kind, family):
    """One graph per class of blocks with the operators in it, compiled once."""
    model, plain, _ = prepared(family, device, config=family.one_block)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("eager")
    is_whole = family.name != "hidream"  # it reads how many tokens each expert has
    if kind == "blocks":
        changes.compile_blocks(family, model, fullgraph=is_whole, backend=counter)
    else:
        model.compile(fullgraph=True, backend=counter)
    for seed in range(2):
        assert_alike(model, plain, family.inputs(device, seed=seed))
    if not is_whole:
        return
    compiled = getattr(model, "_repeated_blocks", None) or family.block_lists
    # Further graphs, as without kernels: mode blocks of FLUX.3 get text or an image, blocks of Z-Image text,
    # an image, or both, those of FIBO 2 an image or both. Some of Motif-Video get a mask, some of
    # Nucleus-Image have experts.
    of_several = {"flux3": 1, "z_image": 2, "bria_fibo2": 1, "motif_video": 1, "nucleus": 1}
    more = of_several.get(family.name, 0)
    assert counter.frame_count == (len(compiled) + more if kind == "blocks" else 1)
    with_kernels = 0
    for graph in counter.graphs:
        targets = [str(node.target) for node in graph.graph.nodes]
        with_kernels += any(target.startswith("_h100_diffusers_kernels") for target in targets)
    # HunyuanVideo's list also has the patch embedding, which has no operator.
    without = [name for name in compiled if name.endswith("PatchEmbed")] if kind == "blocks" else []
    assert with_kernels == counter.frame_count - len(without)


@pytest.mark.usefixtures("_fresh_compiler")
@on("ltx")
def test_injected_and_ejected_after_compilation(kernel, device, family):
    model, plain, arguments = prepared(family, device, config=family.one_block)
    expected = family.reference(plain, arguments)
    changes.compile_blocks(family, model, backend="eager")
    for change in (lambda model: None, kernel.inject_kernels, kernel.eject_kernels):
        change(model)
        assert_close(run(model, arguments), expected, 1e-4)


@pytest.mark.usefixtures("_fresh_compiler")
@on("ltx")
def test_a_compiled_feed_forward_runs_compiled(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    counter = CompileCounterWithBackend("eager")
    kernel.inject_kernels(model)
    run(model, arguments)
    family.part(model, "feed_forward").compile(backend=counter)
    assert_close(run(model, arguments), family.reference(plain, arguments), 1e-4)
    assert counter.frame_count > 0


@every_family
def test_cuda_graph(kernel, device, family):
    if device != "cuda":
        pytest.skip("CUDA graphs need CUDA")
    if family.name in (*WAITING, "cogview4", "easyanimate"):
        pytest.skip("its own code waits for the GPU, or copies tables to it")
    model, _, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS)
    kernel.inject_kernels(model)
    further = (family.inputs(device, torch.bfloat16, seed=seed) for seed in range(2))
    for out in graph_replays(model, arguments, further):
        torch.testing.assert_close(out, run(model, arguments))


# ------------------------------------------------------------------------------------------------
# Derivatives


@every_family
@pytest.mark.parametrize("case", ["plain", "checkpointing", "input", "adapters", "one layer"])
def test_gradients(kernel, device, family, case):
    """Gradients of the parameters, or of the input, adapters or a layer of a model with frozen parameters."""
    model, plain, arguments = prepared(family, device)
    for each in (model, plain):
        each.train()
    kernel.inject_kernels(model)
    if case == "checkpointing":
        if not model._supports_gradient_checkpointing:
            pytest.skip("diffusers has no checkpointing for this model")
        model.enable_gradient_checkpointing()
    if case in ("input", "adapters", "one layer"):
        model.requires_grad_(False)
        plain.requires_grad_(False)
    if case == "one layer":
        for each in (model, plain):
            each.get_submodule(family.parts["linear"]).requires_grad_(True)
    if case == "adapters":
        adapters.add_lora(family, model)
        adapters.add_lora(family, plain)
    arguments = family.with_main(arguments, lambda x: x.requires_grad_(case == "input"))
    assert_gradients_agree(model, plain, arguments)


@every_family
def test_forward_mode_derivatives(kernel, device, family):
    """Derivatives with respect to inputs and parameters together."""
    if family.name == "hidream":
        pytest.skip("its own code reads how many tokens each expert has")
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    torch.manual_seed(8)
    parameters = [name for name, _ in plain.named_parameters()]
    directions = [family.with_main(arguments, torch.randn_like)[family.main]]
    directions += [torch.randn_like(parameter) for parameter in plain.parameters()]

    def tangent(candidate, dtype):
        given = {**family.cast(arguments, dtype), "return_dict": False}

        def function(x, *values):
            weights = dict(zip(parameters, values, strict=True))
            inputs = {**given, family.main: x}
            return joined(torch.func.functional_call(candidate, weights, (), inputs)[0])

        primals = (given[family.main], *(p.detach() for p in candidate.parameters()))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            tangents = pytree.tree_map(lambda tensor: tensor.to(dtype), tuple(directions))
            return torch.func.jvp(function, primals, tangents)[1]

    expected = tangent(family.in_float64(plain), torch.float64)
    assert expected.norm() > 0
    assert_close(tangent(model, torch.float32), expected, 1e-4)


# ------------------------------------------------------------------------------------------------
# Modes, dtypes, threads


@on("flux")
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
def test_modes(kernel, device, family, mode):
    """With frozen weights the kernels run in each mode."""
    model, plain, arguments = prepared(family, device)
    expected = family.reference(plain, arguments)
    model.requires_grad_(False)
    kernel.inject_kernels(model)
    with getattr(torch, mode)():
        for _ in range(2):
            assert_close(model(**arguments, return_dict=False)[0].clone(), expected)
        assert kernel_calls(lambda: model(**arguments))


@every_family
def test_mixed_dtypes(kernel, device, family):
    """16-bit blocks in a float32 model, and the reverse, with casts around them."""

    def cast_to(dtype):
        def cast(value):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.to(dtype)
            if isinstance(value, (tuple, list)):
                return tuple(map(cast, value))
            return value

        return cast

    for inner, outer in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        model, plain, arguments = prepared(family, device, outer, config=KERNEL_HEADS)
        kernel.inject_kernels(model)
        for candidate in (model, plain):
            block = family.part(candidate, "next_block").to(inner)
            down, up = cast_to(inner), cast_to(outer)
            block.register_forward_pre_hook(
                lambda block, args, kwargs, down=down: (
                    down(args),
                    {k: v if k == "image_rotary_emb" else down(v) for k, v in kwargs.items()},
                ),
                with_kwargs=True,
            )
            block.register_forward_hook(lambda block, args, output, up=up: up(output))
        assert relative_distance(run(model, arguments), run(plain, arguments)) < 3e-2


@on("ltx", "flux", "unet")
def test_threads(kernel, device, family):
    """Six concurrent threads with one model and different inputs."""
    model, plain, _ = prepared(family, device)
    kernel.inject_kernels(model)
    options = list(family.options.values())
    inputs = [family.inputs(device, seed=i, **options[i % len(options)]) for i in range(6)]
    expected = [family.reference(plain, arguments) for arguments in inputs]
    barrier, outputs = threading.Barrier(len(inputs)), [[] for _ in inputs]

    def work(i):
        barrier.wait()
        for _ in range(4):
            outputs[i].append(run(model, inputs[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, its in zip(outputs, expected, strict=True):
        assert len(mine) == 4
        for out in mine:
            assert_close(out, its)

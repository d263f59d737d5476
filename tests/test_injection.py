"""Injected LTX-Video models: every input with its own code path, the angles' bits, the report, the
lifetime of an injection, and whole pipelines."""

import contextlib
import copy
import gc
import io
import itertools
import weakref

import pytest
import torch
from diffusers import LTXConditionPipeline, LTXImageToVideoPipeline, LTXPipeline
from diffusers.models.attention_processor import Attention
from torch import nn

import ltx_models
from families import FAMILIES
from injected_pairs import assert_alike, pair, reasons_of
from ltx_models import (
    calls_of,
    computing,
    inputs,
    kernel_calls,
    pipeline,
    prompts,
    reference,
    run,
    snapshot,
    transformer,
)
from small_models import BY_NAME

pytestmark = pytest.mark.usefixtures("_one_thread")

TOKENS = ltx_models.GRID[0] * ltx_models.GRID[1] * ltx_models.GRID[2]
TEXT_LENGTH = ltx_models.TEXT_LENGTH


def per_sample_scales():
    values = ((0.3, 0.5), (32.0, 20.0), (32.0, 40.0))
    return tuple(torch.tensor(pair_).view(2, 1, 1, 1, 1) for pair_ in values)


def video_coordinates(dtype=torch.float32):
    """Coordinates as in the condition pipeline: seconds and pixels, different for each sample."""
    scale = torch.tensor([5.0, 500.0, 700.0]).view(1, 3, 1)
    return (torch.rand(2, 3, TOKENS) * scale).to(dtype)


# Options of a model, and arguments of a forward.
CASES = {
    "one token": ({}, {"grid": (1, 1, 1)}),
    "odd number of tokens": ({}, {"grid": (3, 5, 7)}),
    "bias of each query": ({}, {"encoder_attention_mask": torch.randn(2, TOKENS, TEXT_LENGTH)}),
    "bias of each head": ({}, {"encoder_attention_mask": torch.randn(2 * 4, 1, TEXT_LENGTH)}),
    "packed latents": ({}, {"hidden_states": torch.randn(2, ltx_models.CHANNELS, TOKENS).mT}),
    "no interpolation": ({}, {"rope_interpolation_scale": None}),
    "scales of no dimension": ({}, {"rope_interpolation_scale": (torch.tensor(0.4), 32.0, 32.0)}),
    "scales of 1 element": ({}, {"rope_interpolation_scale": (torch.tensor([0.4]), 32.0, 32.0)}),
    "scales in one tensor": ({}, {"rope_interpolation_scale": torch.tensor([0.4, 30.0, 20.0])}),
    "scales of each sample": ({}, {"rope_interpolation_scale": per_sample_scales()}),
    "coordinates": ({}, {"video_coords": video_coordinates()}),
    "coordinates in bfloat16": ({}, {"video_coords": video_coordinates(torch.bfloat16)}),
    # Their angles are float64, which only the model's own rotation supports.
    "coordinates in float64": ({}, {"video_coords": video_coordinates(torch.float64)}),
    "norms with weights": ({"norm_elementwise_affine": True}, {}),
    "another eps": ({"norm_eps": 1e-3}, {}),
    "exact gelu": ({"activation_fn": "gelu"}, {}),
    "no biases": ({"attention_bias": False, "attention_out_bias": False}, {}),
    "odd heads": ({"heads": 3, "head_dim": 22}, {}),
    "patches": ({"patch_size": 2, "patch_size_t": 3}, {}),
}


def moved(value, device):
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("case", CASES)
def test_values(kernel, device, case):
    config, options = CASES[case]
    model, plain, _ = pair(kernel, device, **config)
    arguments = inputs(model, **{name: moved(value, device) for name, value in options.items()})
    changes = {"qk_norm_coordinate_rope": 0, "rms_norm": 4} if "float64" in case else {}
    assert computing(reference(plain, arguments), model, arguments) == calls_of(2, **changes)


@pytest.mark.parametrize("case", ["video", "coordinates"])
def test_angles_have_the_models_bits(kernel, device, case):
    """At the published width, whose angles of thousands of radians reveal any different rounding."""
    model, plain, _ = pair(kernel, device, lambda model: setattr(model.rope, "dim", 2048))
    options = {"video_coords": video_coordinates().to(device)} if case == "coordinates" else {}
    arguments = inputs(model, **options)
    names = ["num_frames", "height", "width", "rope_interpolation_scale"]
    positions = [arguments[name] for name in names] + [options.get("video_coords")]
    with torch.no_grad():
        rope = model.rope(arguments["hidden_states"], *positions)
        tables = plain.rope(arguments["hidden_states"], *positions)
    assert rope.rope.coordinates.shape[0] == (2 if options else 1)
    for mine, theirs in zip(rope.rope.tables(2048), tables, strict=True):
        assert torch.equal(mine.expand_as(theirs), theirs)


def test_report_names_each_module(kernel, device, capfd, caplog):
    """It is logged and not printed."""
    model = transformer(device, torch.bfloat16, blocks=2, heads=1, head_dim=64)
    capfd.readouterr()
    with caplog.at_level("INFO", logger="h100_diffusers_kernels"):
        report = kernel.inject_kernels(model)
        kernel.eject_kernels(model)
    assert isinstance(report, kernel.InjectionReport)
    block_parts = ["", ".attn1", ".attn2", ".ff.net.0"]
    expected = {f"transformer_blocks.{i}{part}" for i in range(2) for part in block_parts}
    embeddings = {"rope", "time_embed.emb.time_proj"}
    assert {entry.name for entry in report.replaced} == expected | embeddings | {""}
    assert report.num_replaced == 11
    left = reasons_of(report)
    assert set(left) == {"proj_in", "time_embed", "caption_projection", "norm_out", "proj_out"}
    assert all(left.values())
    text = str(report)
    assert text.startswith("11 replaced, 5 left alone")
    for shown in ("2 x LTXVideoTransformerBlock", "qk_norm_rope", "norm_out", left["norm_out"]):
        assert shown in text
    messages = [r.getMessage() for r in caplog.records if r.name == "h100_diffusers_kernels"]
    assert len(messages) == 2 and text in messages[0]
    assert capfd.readouterr() == ("", "")


OWN = "attention itself is the model's own: "
CHOSEN = "a backend is chosen for it"
OWN_ATTENTIONS = {  # change, options of the family's model and of inject_kernels, reason
    "chosen": (lambda model: model.set_attention_backend("native"), {}, {}, CHOSEN),
    "heads": (
        None,
        {"head_dim": 136},
        {},
        "its heads have 136 elements; the kernel takes multiples of 8 up to 128",
    ),
    "float32": (None, {"dtype": torch.float32}, {}, "no kernel for float32"),
    "attention=False": (None, {}, {"attention": False}, "requested by attention=False"),
}


@pytest.mark.usefixtures("_default_backend")
@pytest.mark.parametrize("case", OWN_ATTENTIONS)
def test_the_report_tells_of_attention_that_is_not_replaced(kernel, device, case):
    """At its first line on the model, and in no entry of what is replaced; its calls are as promised."""
    change, config, options, reason = OWN_ATTENTIONS[case]
    family = FAMILIES["flux"]
    config = {"dtype": torch.bfloat16, "head_dim": 64, **config}
    model = family.model(device, heads=2, **config)
    if change is not None:
        change(model)
    report = kernel.inject_kernels(model, **options)
    text = str(report)
    assert f"\nthe model: in full; {OWN}{reason}\n" in text
    assert all("attention" not in entry.replacement for entry in report.replaced)
    if config["head_dim"] == 64:  # of the small model's positions
        calls = kernel_calls(run, model, family.inputs(device, config["dtype"]))
        assert calls["qk_norm_rope"] > 0 and "attention" not in calls
        assert not any(calls.fell_back or calls.own_attention for calls in report.calls)


def choose_backend(model, arguments):
    model.set_attention_backend("native")
    run(model, arguments)


def ask_for_a_gradient(model, arguments):
    with torch.enable_grad():
        model(**arguments, return_dict=False)


@pytest.mark.usefixtures("_default_backend")
@pytest.mark.parametrize("family", ["flux", "minimax_music3"])
@pytest.mark.parametrize(
    ("choose", "reason"),
    [(choose_backend, CHOSEN), (ask_for_a_gradient, "a derivative is requested")],
)
def test_attention_that_is_chosen_later_is_counted(kernel, device, family, choose, reason):
    """In the calls and in what is printed, and not as a call on the kernels."""
    if family == "flux":
        model = FAMILIES["flux"].model(device, torch.bfloat16, heads=2, head_dim=64)
        arguments = FAMILIES["flux"].inputs(device, torch.bfloat16)
    else:
        model = BY_NAME[family].model(device, torch.bfloat16)
        arguments = BY_NAME[family].arguments(device, torch.bfloat16)
    report = kernel.inject_kernels(model)
    run(model, arguments)
    before = {calls.name: calls.on_kernels for calls in report.calls}
    choose(model, arguments)
    attentions = [calls for calls in report.calls if calls.module.endswith("Attention")]
    attentions = [calls for calls in attentions if not calls.fell_back]
    assert len(attentions) >= 2
    for calls in attentions:
        assert calls.own_attention == {OWN + reason: before[calls.name]}
        assert calls.on_kernels == before[calls.name]
    total = sum(sum(calls.own_attention.values()) for calls in attentions)
    module = attentions[0].module
    assert f"calls with the model's own attention: {total} x {module}: {OWN}{reason}" in str(report)


@pytest.mark.usefixtures("_default_backend")
@pytest.mark.parametrize("choose", [choose_backend, ask_for_a_gradient])
def test_a_choice_after_attention_was_left_to_the_model_is_not_counted(kernel, device, choose):
    """The report has said that attention is the model's own: the calls are as promised."""
    family = FAMILIES["flux"]
    model = family.model(device, torch.bfloat16, heads=2, head_dim=64)
    report = kernel.inject_kernels(model, attention=False)
    choose(model, family.inputs(device, torch.bfloat16))
    attentions = [calls for calls in report.calls if calls.module == "FluxAttention"]
    assert [(calls.on_kernels, calls.own_attention) for calls in attentions] == [(1, {})] * 4


@pytest.mark.parametrize(
    ("cuda_graphs", "level"), [(False, "not at all"), (True, "only in CUDA graphs")]
)
def test_a_model_without_replaced_modules(kernel, device, cuda_graphs, level):
    model = nn.Sequential(Attention(query_dim=80, heads=2, dim_head=40)).to(device)
    report = kernel.inject_kernels(model, cuda_graphs=cuda_graphs)
    assert report.levels == {"": level} and f"\nthe model: {level};" in str(report)
    assert report.replaced == []


class Unknown(nn.Module):
    pass


def test_nothing_known_is_an_error(kernel):
    for module, got in ((nn.Linear(2, 2), "a Linear"), (Unknown(), "an Unknown")):
        sentence = (
            "inject_kernels: pipe_or_model must be or hold a model with norms, activations or "
            f"attentions of diffusers or PyTorch, got {got} without one"
        )
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            kernel.inject_kernels(module)


def test_memory_does_not_grow(kernel):
    if not torch.cuda.is_available():
        pytest.skip("device memory is counted on CUDA only")
    model = transformer("cuda", torch.bfloat16, heads=16, head_dim=64)
    arguments = inputs(model)
    warm_up = copy.deepcopy(model)  # libraries allocate their workspaces
    kernel.inject_kernels(warm_up)
    run(warm_up, arguments)
    before = torch.cuda.memory_allocated()
    kernel.inject_kernels(model)
    run(model, arguments)
    assert torch.cuda.memory_allocated() <= 1.01 * before


# ------------------------------------------------------------------------------------------------
# Lifetime of an injection: memory that it keeps alive, copies, saving, and interrupted injections.


@contextlib.contextmanager
def without_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(references):
    return [name for name, reference in references.items() if reference() is not None]


def test_a_removed_block_frees_its_weights(kernel, device):
    """Its neighbours do not keep it alive."""
    with without_garbage_collection():
        model, _, _ = pair(kernel, device)
        run(model, inputs(model))
        block = model.transformer_blocks[1]
        references = {name: weakref.ref(p) for name, p in block.named_parameters()}
        del block, model.transformer_blocks[1]
        assert references and alive(references) == []
        run(model, inputs(model))


def test_hidden_states_are_freed_after_a_forward(kernel, device):
    """Values passed between blocks in one forward do not stay for the next."""
    with without_garbage_collection():
        model, _, _ = pair(kernel, device, blocks=3)
        references = {}
        for i, block in enumerate(model.transformer_blocks):
            block.ff.register_forward_hook(
                lambda m, args, output, i=i: references.update({i: weakref.ref(output)})
            )
        run(model, inputs(model))
        assert len(references) == 3
        assert alive(references) == []


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return loaded, len(file.getvalue())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", ["", "attn1", "ff", "ff.net.0"], ids=lambda p: p or "block")
def test_a_hook_saves_what_a_module_gives(kernel, device, mode, place):
    model, _, _ = pair(kernel, device, blocks=3)
    sizes = []

    def hook(module, args, output):
        loaded, size = saved(output)
        assert torch.equal(loaded, output) and torch.equal(copy.deepcopy(output), output)
        assert vars(output) == {}
        sizes.append((size, output.untyped_storage().nbytes()))

    for block in model.transformer_blocks:
        block.get_submodule(place).register_forward_hook(hook)
    with mode():
        model(**inputs(model))
    assert len(sizes) == 3
    for size, expected in sizes:
        assert size <= expected + 4096


class Stop(Exception):
    pass


@contextlib.contextmanager
def stopping_at(monkeypatch, count):
    """Raises when, for the count-th time, a module's attribute named forward or one of this package's is set
    or deleted."""
    counter = itertools.count(1)

    def stop_at_count(name):
        if (name == "forward" or "h100" in name) and next(counter) == count:
            raise Stop

    set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__

    def setattr_(self, name, value):
        stop_at_count(name)
        set_attribute(self, name, value)

    def delattr_(self, name):
        stop_at_count(name)
        delete_attribute(self, name)

    with monkeypatch.context() as patches:
        patches.setattr(nn.Module, "__setattr__", setattr_)
        patches.setattr(nn.Module, "__delattr__", delattr_)
        yield


def state_of(model):
    return snapshot(model), {name: list(vars(module)) for name, module in model.named_modules()}


class Holder:
    """Of two models."""

    def __init__(self, device):
        self.one, self.other = transformer(device), transformer(device)


COUNTS = [1, 2, 6, 10]


@pytest.mark.parametrize("count", [*COUNTS, 13, 20])
def test_an_injection_that_fails_changes_nothing(kernel, device, monkeypatch, count):
    """It is complete, for all models, or not done at all."""
    holder = Holder(device)
    models, arguments = (holder.one, holder.other), inputs(holder.one)
    before = [state_of(model) for model in models]
    with pytest.raises(Stop), stopping_at(monkeypatch, count):
        kernel.inject_kernels(holder)
    assert [state_of(model) for model in models] == before
    assert [kernel_calls(run, model, arguments) for model in models] == [{}, {}]
    kernel.eject_kernels(holder)
    assert [state_of(model) for model in models] == before
    assert not kernel.inject_kernels(holder).already_injected
    for model in models:
        assert kernel_calls(run, model, arguments) == calls_of(2)
        assert_alike(model, transformer(device), arguments)
    kernel.eject_kernels(holder)
    assert [state_of(model) for model in models] == before


@pytest.mark.parametrize("count", COUNTS)
def test_an_ejection_that_fails_can_be_repeated(kernel, device, monkeypatch, count):
    model = transformer(device)
    arguments = inputs(model)
    before, expected = snapshot(model), run(model, arguments)
    kernel.inject_kernels(model)
    with contextlib.suppress(Stop), stopping_at(monkeypatch, count):
        kernel.eject_kernels(model)
    kernel.eject_kernels(model)
    assert snapshot(model) == before
    assert torch.equal(run(model, arguments), expected)
    assert not kernel.inject_kernels(model).already_injected
    assert kernel_calls(run, model, arguments) == calls_of(2)


# ------------------------------------------------------------------------------------------------
# Whole pipelines with an injected transformer.


STEPS = 2
SIZE = {"height": 64, "width": 96, "num_frames": 17, "num_inference_steps": STEPS}


def latents(pipe, device, seed=0, **options):
    """A pipeline's latents for made-up prompts."""
    torch.manual_seed(seed)
    if isinstance(pipe, (LTXImageToVideoPipeline, LTXConditionPipeline)):
        options["image"] = torch.rand(1, 3, SIZE["height"], SIZE["width"])
    generator = torch.Generator("cpu").manual_seed(seed)
    arguments = {**SIZE, **prompts(device), "output_type": "latent", **options}
    return pipe(**arguments, generator=generator).frames


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "pipeline_class", [LTXPipeline, LTXImageToVideoPipeline, LTXConditionPipeline]
)
@pytest.mark.parametrize("guidance_scale", [3.0, 1.0], ids=["guided", "unguided"])
def test_pipelines(kernel, device, pipeline_class, guidance_scale):
    """Per-sample timesteps, timesteps of each token, and given coordinates."""
    pipe = pipeline(device, pipeline_class=pipeline_class)
    expected = latents(pipe, device, guidance_scale=guidance_scale)
    kernel.inject_kernels(pipe)
    results = []
    calls = kernel_calls(
        lambda: results.append(latents(pipe, device, guidance_scale=guidance_scale))
    )
    calls.pop("channel_rms_norm", None)  # of the autoencoder, which encodes an image
    assert calls == calls_of(2 * STEPS, joined=STEPS)
    assert expected.isfinite().all() and expected.std() > 0.1
    torch.testing.assert_close(results[0], expected, rtol=1e-3, atol=1e-3)
    kernel.eject_kernels(pipe)
    assert kernel_calls(lambda: latents(pipe, device, num_inference_steps=1)) == {}


def test_pipeline_with_nothing_known(kernel, device):
    pipe = pipeline(device)
    pipe.transformer = pipe.vae = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="got an LTXPipeline without one"):
        kernel.inject_kernels(pipe)

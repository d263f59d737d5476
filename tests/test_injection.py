"""Injected LTX-Video models compute what they did, on the kernels, and come back unchanged."""

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import ltx_models
from ltx_models import (
    calls_of,
    computing,
    inputs,
    kernel_calls,
    reference,
    run,
    snapshot,
    transformer,
)

pytestmark = pytest.mark.usefixtures("_one_thread")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def injected_pair(kernel, device):
    """Makes (injected model, the same without kernels)."""

    def make(dtype=torch.float32, **config):
        model = transformer(device, dtype, **config)
        plain = copy.deepcopy(model)
        kernel.inject_kernels(model)
        return model, plain

    return make


# ------------------------------------------------------------------------------------------------
# Values


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_blocks_run_on_the_kernels(injected_pair, dtype):
    model, plain = injected_pair(dtype, blocks=3)
    arguments = inputs(model)
    assert kernel_calls(run, model, arguments) == calls_of(3)
    assert kernel_calls(run, plain, arguments) == {}


def per_sample_scales(device):
    return tuple(
        torch.tensor([one, other], device=device).view(2, 1, 1, 1, 1)
        for one, other in ((0.3, 0.5), (32.0, 20.0), (32.0, 40.0))
    )


def video_coordinates(device, dtype=torch.float32):
    """As the condition pipeline makes them: seconds and pixels, other ones for each sample."""
    tokens = ltx_models.GRID[0] * ltx_models.GRID[1] * ltx_models.GRID[2]
    scale = torch.tensor([5.0, 500.0, 700.0], device=device).view(1, 3, 1)
    return (torch.rand(2, 3, tokens, device=device) * scale).to(dtype)


CASES = {
    "batch of 1": lambda device: {"batch": 1},
    "full mask": lambda device: {"mask": "full"},
    "no mask": lambda device: {"mask": None},
    "a timestep for each token": lambda device: {"per_token": True},
    "one token": lambda device: {"grid": (1, 1, 1)},
    "odd number of tokens": lambda device: {"grid": (3, 5, 7)},
    "bias of each query": lambda device: {
        "encoder_attention_mask": torch.randn(2, 24, ltx_models.TEXT_LENGTH, device=device)
    },
    "bias of each head": lambda device: {
        "encoder_attention_mask": torch.randn(2 * 4, 1, ltx_models.TEXT_LENGTH, device=device)
    },
    "packed latents": lambda device: {
        "batch": 1,
        "hidden_states": torch.randn(1, ltx_models.CHANNELS, 24, device=device).transpose(1, 2),
    },
    "no interpolation": lambda device: {"rope_interpolation_scale": None},
    "scales of 0 dimensions": lambda device: {
        "rope_interpolation_scale": (torch.tensor(0.4, device=device), 32.0, 32.0)
    },
    "scales of 1 element": lambda device: {
        "rope_interpolation_scale": (torch.tensor([0.4], device=device), 32.0, 32.0)
    },
    "scales in one tensor": lambda device: {
        "rope_interpolation_scale": torch.tensor([0.4, 30.0, 20.0], device=device)
    },
    "scales of each sample": lambda device: {"rope_interpolation_scale": per_sample_scales(device)},
    "coordinates": lambda device: {"video_coords": video_coordinates(device)},
    "coordinates in bfloat16": lambda device: {
        "video_coords": video_coordinates(device, torch.bfloat16)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_values(injected_pair, device, case):
    model, plain = injected_pair()
    arguments = inputs(model, **CASES[case](device))
    assert computing(reference(plain, arguments), model, arguments) == calls_of(2)


def test_coordinates_in_float64_keep_the_models_tables(injected_pair, device):
    """Their angles are float64, which only the model's own rotation computes with."""
    model, plain = injected_pair()
    arguments = inputs(model, video_coords=video_coordinates(device, torch.float64))
    calls = calls_of(2, qk_norm_coordinate_rope=0, rms_norm=4)
    assert computing(reference(plain, arguments), model, arguments) == calls


@pytest.mark.parametrize(
    "config",
    [
        {"norm_elementwise_affine": True},
        {"norm_eps": 1e-3},
        {"activation_fn": "gelu"},
        {"attention_bias": False, "attention_out_bias": False},
        {"heads": 3, "head_dim": 22},
        {"heads": 1, "head_dim": 64},
        {"patch_size": 2, "patch_size_t": 3},
    ],
    ids=str,
)
def test_configurations(injected_pair, config):
    model, plain = injected_pair(**config)
    arguments = inputs(model)
    assert computing(reference(plain, arguments), model, arguments) == calls_of(2)


@pytest.mark.parametrize("case", ["video", "coordinates"])
def test_angles_have_the_models_bits(injected_pair, device, case):
    """At the published width, whose angles of thousands of radians forgive no other rounding."""
    model, plain = injected_pair(blocks=1, heads=32, head_dim=64)
    options = {"video_coords": video_coordinates(device)} if case == "coordinates" else {}
    arguments = inputs(model, **options)
    names = ["num_frames", "height", "width", "rope_interpolation_scale"]
    positions = [arguments[name] for name in names] + [options.get("video_coords")]
    with torch.no_grad():
        rope = model.rope(arguments["hidden_states"], *positions)
        tables = plain.rope(arguments["hidden_states"], *positions)
    assert rope.rope.coordinates.shape[0] == (2 if options else 1)
    for mine, theirs in zip(rope.rope.tables(2048), tables, strict=True):
        assert torch.equal(mine.expand_as(theirs), theirs)


def test_the_grid_that_is_kept_follows_the_arguments(injected_pair):
    """The coordinates of the last grid are kept from call to call, and no longer."""
    model, plain = injected_pair()
    scales = [0.3, 32.0, 20.0]
    arguments = inputs(model, grid=(2, 3, 4), rope_interpolation_scale=scales)
    changes = [
        {},
        {},
        {"num_frames": 4, "height": 2, "width": 3},
        {"num_frames": 2, "height": 3, "width": 4},
        {"rope_interpolation_scale": None},
        {"rope_interpolation_scale": scales},
    ]
    for change in changes:
        arguments = {**arguments, **change}
        assert computing(reference(plain, arguments), model, arguments) == calls_of(2)
    scales[0] = 0.7
    for candidate in (model, plain):
        candidate.rope.base_width = 1024
    assert computing(reference(plain, arguments), model, arguments) == calls_of(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accuracy_contract(injected_pair, dtype):
    model, plain = injected_pair(dtype, blocks=4, heads=4, head_dim=32)
    ltx_models.assert_as_close_as_eager(model, plain, grid=(4, 6, 8))


def test_two_runs_give_the_same_bits(injected_pair):
    model, _ = injected_pair(torch.bfloat16)
    arguments = inputs(model)
    assert torch.equal(run(model, arguments), run(model, arguments))


# ------------------------------------------------------------------------------------------------
# The report


def test_report_names_each_module(kernel, device):
    model = transformer(device, blocks=2, heads=1, head_dim=64)
    report = kernel.inject_kernels(model)
    assert isinstance(report, kernel.InjectionReport)
    block_parts = ["", ".attn1", ".attn2", ".ff.net.0"]
    expected = {f"transformer_blocks.{i}{part}" for i in range(2) for part in block_parts}
    embeddings = {"rope", "time_embed.emb.time_proj"}
    assert {entry.name for entry in report.replaced} == expected | embeddings | {""}
    assert report.num_replaced == 11
    classes = dict(model.named_modules())
    for entry in report.replaced + report.left_alone:
        assert entry.module == type(classes[entry.name]).__name__
    left_alone = {entry.name: entry.reason for entry in report.left_alone}
    assert set(left_alone) == {
        "proj_in",
        "time_embed",
        "caption_projection",
        "norm_out",
        "proj_out",
    }
    assert all(left_alone.values())
    text = str(report)
    assert text.startswith("11 replaced, 5 left alone")
    for shown in (
        "2 x LTXVideoTransformerBlock",
        "qk_norm_rope",
        "norm_out",
        left_alone["norm_out"],
    ):
        assert shown in text


def test_nothing_is_printed_and_the_report_is_logged(kernel, device, capfd, caplog):
    model = transformer(device)
    capfd.readouterr()
    with caplog.at_level("INFO", logger="h100_diffusers_kernels"):
        report = kernel.inject_kernels(model)
        kernel.eject_kernels(model)
    assert capfd.readouterr() == ("", "")
    messages = [r.getMessage() for r in caplog.records if r.name == "h100_diffusers_kernels"]
    assert len(messages) == 2
    assert str(report) in messages[0]


@pytest.mark.kernels_ci
def test_second_injection_changes_nothing(kernel, device):
    model = transformer(device)
    first = kernel.inject_kernels(model)
    before = snapshot(model)
    second = kernel.inject_kernels(model)
    assert snapshot(model) == before
    assert not first.already_injected
    assert second.already_injected
    assert (second.replaced, second.left_alone) == (first.replaced, first.left_alone)
    assert "before this call" in str(second) and "before this call" not in str(first)


def test_nothing_known_is_an_error(kernel):
    with pytest.raises(
        ValueError,
        match=r"^inject_kernels: .* LTXVideoTransformer3DModel, FluxTransformer2DModel, .* got a Linear ",
    ):
        kernel.inject_kernels(torch.nn.Linear(2, 2))


def test_wrapped_models_are_found(kernel, device):
    model = transformer(device)
    wrapped = torch.nn.Sequential(torch.compile(model, backend="eager"))
    report = kernel.inject_kernels(wrapped)
    assert "0._orig_mod.transformer_blocks.1.attn1" in {entry.name for entry in report.replaced}
    assert kernel_calls(run, model, inputs(model)) == calls_of(2)
    kernel.eject_kernels(wrapped)
    assert kernel_calls(run, model, inputs(model)) == {}


def test_subclasses_are_known(kernel, device):
    model = transformer(device)
    plain = copy.deepcopy(model)
    model.__class__ = type("MyTransformer", (type(model),), {})
    kernel.inject_kernels(model)
    arguments = inputs(model)
    assert computing(reference(plain, arguments), model, arguments) == calls_of(2)


# ------------------------------------------------------------------------------------------------
# The way back


@pytest.mark.kernels_ci
@pytest.mark.parametrize("had_hooks", [False, True], ids=["fresh", "had_hooks"])
def test_eject_gives_back_the_model(kernel, device, had_hooks):
    """To the last attribute, those that removed hooks have left behind included."""
    model = transformer(device)
    if had_hooks:
        for block in model.transformer_blocks:
            add_hook_to_module(block, ModelHook())
            remove_hook_from_module(block)
            assert "forward" in vars(block)
    arguments = inputs(model)
    before, expected = snapshot(model), run(model, arguments)
    keys = {name: list(vars(module)) for name, module in model.named_modules()}
    kernel.inject_kernels(model)
    assert snapshot(model) != before
    kernel.eject_kernels(model)
    assert snapshot(model) == before
    assert {name: list(vars(module)) for name, module in model.named_modules()} == keys
    assert torch.equal(run(model, arguments), expected)
    kernel.eject_kernels(model)
    assert snapshot(model) == before
    assert not kernel.inject_kernels(model).already_injected
    assert kernel_calls(run, model, arguments) == calls_of(2)


def test_weights_and_configuration_stay(kernel, device):
    model = transformer(device)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    tensors = [*model.parameters(), *model.buffers()]
    config = dict(model.config)
    kernel.inject_kernels(model)
    run(model, inputs(model))
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == addresses
    assert all(
        a is b for a, b in zip([*model.parameters(), *model.buffers()], tensors, strict=True)
    )
    assert dict(model.config) == config


def test_classes_stay(kernel, device):
    model = transformer(device)
    classes = {type(module) for module in model.modules()}
    before = {cls: dict(vars(cls)) for cls in classes}
    kernel.inject_kernels(model)
    run(model, inputs(model))
    assert {cls: dict(vars(cls)) for cls in classes} == before
    untouched = transformer(device)
    assert kernel_calls(run, untouched, inputs(untouched)) == {}


def test_copies_are_injected_and_independent(kernel, injected_pair):
    model, plain = injected_pair()
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.mul_(1.5)
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    arguments = inputs(model)
    assert computing(reference(plain, arguments), duplicate, arguments) == calls_of(2)
    assert kernel.inject_kernels(duplicate).already_injected
    kernel.eject_kernels(duplicate)
    assert snapshot(duplicate).keys() == snapshot(plain).keys()
    assert kernel_calls(run, duplicate, arguments) == {}
    assert kernel_calls(run, model, arguments) == calls_of(2)


def test_saved_and_loaded(kernel, injected_pair, tmp_path):
    model, plain = injected_pair()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(model.device)
    arguments = inputs(model)
    assert kernel_calls(run, loaded, arguments) == {}
    assert torch.equal(run(loaded, arguments), run(plain, arguments))
    kernel.inject_kernels(loaded)
    assert torch.equal(run(loaded, arguments), run(model, arguments))


def test_dtype_changes_after_injection(injected_pair):
    model, plain = injected_pair(torch.bfloat16)
    arguments = ltx_models.cast(inputs(model), torch.float32)
    expected = reference(plain.float(), arguments)
    assert computing(expected, model.float(), arguments) == calls_of(2)


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

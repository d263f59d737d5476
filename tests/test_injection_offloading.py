"""Offloading and placement, before or after injection: calls that stay on the kernels."""

import copy

import accelerate
import pytest
import torch
import torch.utils._pytree as pytree
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import send_to_device
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig

from changes import offload
from checks import relative_distance
from families import FAMILIES, every_family, prepared, run
from family_ltx import LTX
from ltx_models import calls_of, computing, either_order, kernel_calls
from ltx_models import prepared as prepared_ltx

pytestmark = pytest.mark.usefixtures("_one_thread")


# By the kind of offloading and the model's options. Norms with weights are leaves, so their own code runs.
# The next block's weights are elsewhere until its turn.
AFFINE = {"norm_elementwise_affine": True}
WITHOUT_NORMS = {"gelu": 2, "qk_norm_coordinate_rope": 2, "gated_residual": 6}
OFFLOADING = [
    ("sequential", {}, calls_of(2, joined=0, rms_norm=0)),
    ("sequential", AFFINE, WITHOUT_NORMS),
    ("model", {}, calls_of(2)),
    ("block_level", {}, calls_of(2, joined=0)),
    ("leaf_level", {}, calls_of(2, joined=0, rms_norm=0)),
]


def test_context_parallelism_that_is_removed(kernel, mesh, device):
    """Its hooks shard the model's own tables; after it the fused operation runs again."""
    model, arguments, expected = prepared_ltx(device)
    kernel.inject_kernels(model)
    config = ContextParallelConfig(ulysses_degree=2)
    config._flattened_mesh = mesh  # of one process
    apply_context_parallel(model, config, model._cp_plan)
    with_tables = calls_of(2, qk_norm_coordinate_rope=0, qk_norm_rope=1)
    assert computing(expected, model, arguments) == with_tables
    remove_context_parallel(model, model._cp_plan)
    assert computing(expected, model, arguments) == calls_of(2)


@pytest.mark.parametrize(("kind", "config", "calls"), OFFLOADING)
@either_order
def test_what_stays_on_the_kernels(kernel, device, kind, config, calls, is_injected_first):
    model, arguments, expected = prepared_ltx(device, model_config=config)
    if is_injected_first:
        kernel.inject_kernels(model)
    offload(model, kind, device)
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == calls
    kernel.eject_kernels(model)
    assert computing(expected, model, arguments) == {}


def place(family, model, kind, device, folder):
    """Places the model as ``device_map`` does: each block is on a device, on the host or on disk."""
    blocks = [
        name for name, m in model.named_modules() if any(m is b for b in family.blocks(model))
    ]
    if kind == "devices":  # what ``dispatch_model`` adds to a block whose device is not the first
        for name in blocks:
            hook = AlignDevicesHook(execution_device=device, io_same_device=True)
            add_hook_to_module(model.get_submodule(name), hook)
        return
    others = [name for name, _ in model.named_children() if name not in family.block_lists]
    others += [name for name, _ in model.named_parameters(recurse=False)]
    places = dict.fromkeys(others, device)
    for i, name in enumerate(blocks):
        places[name] = {"host": "cpu", "disk": "disk" if i % 2 else "cpu"}[kind]
    options = {"main_device": device, "offload_dir": str(folder), "force_hooks": True}
    accelerate.dispatch_model(model, places, **options)


@pytest.mark.filterwarnings("ignore:The following device_map keys")  # those of parameters
@pytest.mark.parametrize("kind", ["devices", "host", "disk"])
@pytest.mark.parametrize("name", ["ltx", "flux", "wan"])
@either_order
def test_placed_by_a_device_map(kernel, device, tmp_path, name, kind, is_injected_first):
    family = FAMILIES[name]
    plain = family.model(device)
    arguments = family.inputs(device, seed=3)
    expected = run(plain, arguments)
    model = copy.deepcopy(plain)
    if is_injected_first:
        kernel.inject_kernels(model)
    place(family, model, kind, torch.device(device), tmp_path)
    kernel.inject_kernels(model)
    for _ in range(2):
        assert relative_distance(run(model, arguments), expected) < 1e-5
    calls = kernel_calls(run, model, arguments)
    # Norms inside of an offloaded attention have hooks.
    assert calls["gated_residual"] and calls["gelu"]
    kernel.eject_kernels(model)
    assert kernel_calls(run, model, arguments) == {}
    assert relative_distance(run(model, arguments), expected) < 1e-5


def split(family, model, device):
    """Moves the second block to another device, as accelerate does. Without a second one that is "meta",
    and the block's results are ones."""
    other = "cpu" if device == "cuda" else "meta"
    block = family.part(model, "next_block").to(other)
    hook = AlignDevicesHook(execution_device=other, io_same_device=other == "cpu")
    add_hook_to_module(block, hook)

    def as_ones(module, arguments, out):
        assert all(tensor.device.type == other for tensor in pytree.tree_leaves(out))
        return pytree.tree_map(lambda tensor: torch.ones_like(tensor, device=device), out)

    if other == "meta":
        block.register_forward_hook(as_ones)


@every_family
def test_blocks_on_two_devices(kernel, device, family):
    if family.name in ("hidream", "mochi", "nucleus") and device == "cpu":
        pytest.skip("its own code reads values, which meta tensors lack")
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    for each in (model, plain):
        split(family, each, device)
    expected = run(plain, arguments)
    for _ in range(2):
        assert relative_distance(run(model, arguments), expected) < 1e-5


def test_coordinates_are_mapped_as_tables(kernel, device):
    """Code that moves, casts or maps over a block's arguments gets what it gets of a tuple of tensors."""
    model, plain, arguments = prepared(LTX, device)
    kernel.inject_kernels(model)
    given = []
    for each in (model, plain):
        hook = each.transformer_blocks[0].register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs["image_rotary_emb"]), with_kwargs=True
        )
        run(each, arguments)
        hook.remove()
    coordinates, tables = given
    assert coordinates.rope is not None  # not computed yet
    assert send_to_device(coordinates, torch.device(device)) is coordinates
    assert send_to_device(coordinates, "meta").rope.frequencies.is_meta
    cast = coordinates.to(torch.bfloat16), [table.bfloat16() for table in tables]
    doubled = pytree.tree_map_only(torch.Tensor, lambda table: 2 * table, coordinates)
    pairs = cast, (doubled, [2 * table for table in tables])
    for found, expected in pairs:
        assert type(found) is tuple
        for table, expected_table in zip(found, expected, strict=True):
            assert table.dtype == expected_table.dtype
            torch.testing.assert_close(table, expected_table)

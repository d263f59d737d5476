"""Branches of guidance and tiles that ranks share, against one process. The ranks communicate by gloo."""

import copy
import datetime
import functools
from functools import partial

import diffusers
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.hooks import HookRegistry
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import small_models
from autoencoders import AUTOENCODERS, IN_SINGLE_PARTS
from checks import relative_distance
from families import FAMILIES, run
from graphs import EmulatedGraph, module_of, use_emulated_graphs
from ranks import in_ranks
from small_models import normal
from test_context_parallel import HEADS, assert_all_on_kernels, parallelize, prepare_rank

CLOSE = 5e-6


def count_samples(model):
    """The number of samples in each forward that this rank computes."""
    counts, forward = [], model.forward

    @functools.wraps(forward)
    def counting(*args, **kwargs):
        counts.append(len(args[0] if args else next(iter(kwargs.values()))))
        return forward(*args, **kwargs)

    model.forward = counting
    return counts


def samples_of(layer):
    """The number of samples in each call of a layer."""
    counts = []
    layer.register_forward_hook(lambda *call: counts.append(len(call[2])))
    return counts


class Small(nn.Linear):
    """A model that is traced in no time."""

    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x, return_dict=True):
        return (super().forward(x),)


# ------------------------------------------------------------------------------------------------
# Branches in one batch


def inputs_with(name, **options):
    return FAMILIES[name].model("cpu"), FAMILIES[name].inputs("cpu", seed=3, **options)


def inputs_of_family(name):
    if name == "minimax_h3":  # two time steps
        return inputs_with(name)
    return FAMILIES[name].model("cpu", **HEADS), FAMILIES[name].inputs(
        "cpu", seed=3, batch=4, text_length=4
    )


def small_inputs(name):
    small = small_models.BY_NAME[name]
    return small.model("cpu"), small.arguments("cpu")


BATCHES = {name: partial(inputs_of_family, name) for name in FAMILIES} | {
    **{n: partial(small_inputs, n) for n in ("unet_of_sdxl", "controlnet", "stable_audio")},
    # Tensors that only happen to be as long as the batch.
    "rope": partial(inputs_with, "cogvideox", batch=8),
    "two prompts": partial(inputs_with, "z_image", prompts=(40, 6)),
    "residuals": partial(inputs_with, "flux", controlnet_block_samples=[normal(2, 12, 32)] * 2),
}


@pytest.mark.drawn(times=0, period=5)
@pytest.mark.parametrize("name", BATCHES)
@in_ranks
def test_batch(kernel, rank, name):
    """Each rank computes its share from the second call of a kind on."""
    prepare_rank()
    model, arguments = BATCHES[name]()
    with torch.no_grad():
        expected = small_models.run(copy.deepcopy(model), arguments)
        counts = count_samples(model)
        kernel.enable_guidance_parallelism(model)
        for _ in range(2):
            assert relative_distance(small_models.run(model, arguments), expected) < CLOSE
    if name == "cosmos3":  # all samples in one sequence: the ranks share the calls
        assert counts == [counts[0]] * (2 - rank)
    else:
        assert counts[1] == counts[0] // 2


# ------------------------------------------------------------------------------------------------
# A call for each branch


def pipeline(name, transformer):
    """A call of diffusers' pipeline, without text encoder and autoencoder: the latents after some steps."""
    config, text = transformer.config, partial(torch.ones, 1)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=name == "qwenimage")
    parts = {"transformer": transformer, "scheduler": scheduler, "vae": None}
    more = {"text_encoder": None, "tokenizer": None}
    size = {"height": 32, "width": 32}
    if name == "wan":
        pipe = diffusers.WanPipeline(**parts, **more)
        text = {"prompt_embeds": text(6, config.text_dim)}
        size["num_frames"] = 5
    elif name == "qwenimage":  # prompts of two lengths
        pipe = diffusers.QwenImagePipeline(**parts, **more)
        text = {f"{x}prompt_embeds": text(n, 24) for x, n in (("", 5), ("negative_", 3))}
        text |= {f"{key}_mask": torch.ones(x.shape[:2]).long() for key, x in text.items()}
        size["true_cfg_scale"] = 4.0
    else:
        more |= {f"{key}_{i}": None for key in more for i in (2, 3)}
        pipe = diffusers.StableDiffusion3Pipeline(**parts, **more)
        text = {"prompt_embeds": text(8, config.joint_attention_dim)}
        text["pooled_prompt_embeds"] = torch.ones(1, config.pooled_projection_dim)
        size = {"height": 64, "width": 64}
    if name != "qwenimage":
        text |= {f"negative_{key}": -x for key, x in text.items()}
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": 4, "output_type": "latent", "generator": noise}
    return pipe(**text, **size, **options, return_dict=False)[0]


@in_ranks
def test_pipelines(kernel, rank):
    """The calls of each branch belong to one rank, after the first call of each kind."""
    prepare_rank()
    for name, counted in (
        ("wan", [[1] * 4, [1] * 5]),
        ("qwenimage", [[1] * 5, [1] * 5]),
        ("sd3", [[2, 1, 1, 1]] * 2),
    ):
        model = FAMILIES[name].model("cpu", **HEADS)
        expected = pipeline(name, model)
        counts = count_samples(model)
        kernel.enable_guidance_parallelism(model)
        latents = pipeline(name, model)
        assert type(latents) is torch.Tensor
        assert relative_distance(latents, expected) < CLOSE
        assert counts == counted[rank], name


@pytest.mark.parametrize("ranks", [4, 8])
@in_ranks
def test_with_context_parallelism(kernel, rank, ranks):
    """Two branches by two or four shares of the tokens, in any order of the calls."""
    prepare_rank()
    shares = ranks // 2
    mesh = init_device_mesh("cpu", (2, 1, shares), mesh_dim_names=("guidance", "ring", "ulysses"))
    config = {"ulysses_degree": shares, "mesh": mesh["ring", "ulysses"]}
    for name, is_first in (("wan", True), ("wan", False), ("sd3", True), ("sd3", False)):
        model = FAMILIES[name].model("cpu", **HEADS)
        expected = pipeline(name, model)
        counts = count_samples(model)
        if not is_first:
            report = kernel.inject_kernels(model)
            parallelize(kernel, model, config)
        kernel.enable_guidance_parallelism(model, mesh["guidance"])
        if is_first:
            parallelize(kernel, model, config)
            report = kernel.inject_kernels(model)
        assert relative_distance(pipeline(name, model), expected) < CLOSE
        assert_all_on_kernels(report)
        assert sum(counts) == (5 if name == "sd3" else 4 + mesh["guidance"].get_local_rank())
    # A hook around the forward of the model itself, before and after the kernels.
    for is_injected_first in (True, False):
        model = FAMILIES["ltx"].model("cpu", **HEADS)
        arguments = FAMILIES["ltx"].inputs("cpu", batch=2, text_length=8)
        expected = run(model, arguments)
        if is_injected_first:
            kernel.inject_kernels(model)
        parallelize(kernel, model, config)
        if not is_injected_first:
            kernel.inject_kernels(model)
        kernel.enable_guidance_parallelism(model, mesh["guidance"])
        sizes = samples_of(model.proj_in)
        with torch.no_grad():
            for _ in range(3):
                assert relative_distance(run(model, arguments), expected) < CLOSE
        assert sizes == [2, 1, 1]
    model = FAMILIES["wan"].model("cpu", **HEADS)
    parallelize(kernel, model, config)
    with pytest.raises(RuntimeError, match="group must be other ranks than those of enable_par"):
        kernel.enable_guidance_parallelism(model)
    model = FAMILIES["wan"].model("cpu", **HEADS)
    kernel.enable_guidance_parallelism(model, mesh["ulysses"])
    parallelize(kernel, model, config)
    with pytest.raises(RuntimeError, match="group must be other ranks than those of enable_par"):
        pipeline("wan", model)


@in_ranks
def test_use_of_results(kernel, rank):
    """Any use of a result, at any time, in or out of inference mode."""
    model = FAMILIES["wan"].model("cpu")
    first, second = ({**FAMILIES["wan"].inputs("cpu", seed=i, batch=1)} for i in range(2))
    expected = [run(model, x) for x in (first, second)]
    counts = count_samples(model)
    kernel.enable_guidance_parallelism(model)
    uses = (
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.cat(tensors=(a[:, 1:], b[:, :-1]), dim=1)[..., 0],
        lambda a, b: (a.shape, b.dtype, b.sum())[2],
        lambda a, b: a.clone().copy_(b),
        lambda a, b: a.index_select(1, torch.tensor([1])).add_(b[:, :1]),
        lambda a, b: torch.from_numpy(b.numpy()) - copy.deepcopy(a),
        lambda a, b: b[a > 0],
        lambda a, b: torch.zeros_like(b).masked_fill_(a > 0, 1),
        lambda a, b: torch.stack([*a.unbind(1), *b[:, 0:1].unbind(1)]),
    )
    for mode in (torch.no_grad, torch.inference_mode):
        for use in uses:
            with mode():
                results = [model(**x, return_dict=x is first)[0] for x in (first, second)]
                part = results[0][:, 0]
            assert torch.Tensor not in map(type, (*results, part))
            assert torch.equal(use(*results), use(*[x.clone() for x in expected]))
            assert {*map(type, results), type(part)} == {torch.Tensor}
            results[0].zero_()
            assert not part.any()  # a view, on each rank
    with torch.no_grad():
        counts.clear()
        for x, out in zip((first, second), expected, strict=True):  # used before the next call
            target = torch.zeros_like(out)
            target[:] = model(**x, return_dict=True).sample
            assert torch.equal(target, out)
    assert len(counts) == (2, 0)[rank]
    model(**first).sample.sum().backward()  # on both ranks
    assert len(counts) == (3, 1)[rank]
    with pytest.raises(RuntimeError, match="ranks share the branches"):
        kernel.enable_guidance_parallelism(model)


@in_ranks
def test_layouts(kernel, rank):
    """A sent tensor has the strides of the owner's, whether all ranks know the layout or not."""
    pending = module_of(kernel, "parallel.pending")
    dealer = pending.Dealer(dist.group.WORLD)
    for x in (torch.rand(2, 3, 4).permute(2, 0, 1), torch.rand(2, 3).long(), torch.rand(())):
        sent = []
        for layout in (None, pending.layout_of(x)):
            owner = dealer.next_owner()
            sent.append(dealer.add(x if rank == owner else None, owner, layout, x.device))
        for each in sent:
            assert torch.equal(each, x) and each.stride() == x.stride()


@in_ranks
def test_orders(kernel):
    """Kernels and graphs before or after, ejected, in copies, and within torch.compile."""
    prepare_rank()
    use_emulated_graphs(kernel)
    module_of(kernel, "graphs.cuda_graphs").GRAPHS["cpu"] = EmulatedGraph
    for name, is_first in (("wan", True), ("wan", False), ("sd3", True), ("sd3", False)):
        model = FAMILIES[name].model("cpu", **HEADS)
        expected = pipeline(name, model)
        if is_first:
            report = kernel.inject_kernels(model, cuda_graphs=True)
        kernel.enable_guidance_parallelism(model)
        if not is_first:
            report = kernel.inject_kernels(model, cuda_graphs=True)
        for _ in range(2):
            assert relative_distance(pipeline(name, model), expected) < CLOSE
        assert_all_on_kernels(report)
        (calls,) = report.cuda_graphs
        assert calls.replayed >= 4, calls
        copied = copy.deepcopy(model)
        assert (
            copied.forward.model is copied and copied.forward.forward is not model.forward.forward
        )
        assert relative_distance(pipeline(name, copied), expected) < CLOSE
        kernel.eject_kernels(model)
        counted = len(report.calls)
        assert torch.equal(pipeline(name, model), expected) or name == "sd3"
        assert len(report.calls) == counted


@in_ranks
def test_other_wrappers(kernel):
    """Hooks of libraries around the shared calls, before the kernels."""
    prepare_rank()
    plain = FAMILIES["wan"].model("cpu", **HEADS)
    expected = pipeline("wan", plain)
    model = copy.deepcopy(plain)
    kernel.enable_guidance_parallelism(model)
    add_hook_to_module(model, ModelHook())
    HookRegistry.check_if_exists_or_initialize(model).register_hook(
        diffusers.hooks.ModelHook(), "x"
    )
    report = kernel.inject_kernels(model)
    assert relative_distance(pipeline("wan", model), expected) < CLOSE
    assert_all_on_kernels(report)
    with pytest.raises(RuntimeError, match="ranks share the branches"):
        kernel.enable_guidance_parallelism(model)
    kernel.eject_kernels(model)
    assert not kernel.inject_kernels(model).already_injected


@in_ranks
def test_compiled(kernel, rank):
    """torch.compile around the shared calls, which all ranks then compute, and inside of them."""
    plain, arguments = Small(), {"x": torch.ones(1, 2)}
    expected = run(plain, arguments)
    model = copy.deepcopy(plain)
    counts = [count_samples(each) for each in (plain, model)]
    kernel.enable_guidance_parallelism(model)
    model.compile(backend="eager")
    compiled = torch.compile(plain, backend="eager")
    kernel.enable_guidance_parallelism(compiled)
    for _ in range(3):
        assert torch.equal(run(compiled, arguments).clone(), expected)
        assert torch.equal(run(model, arguments), expected)
    assert [*map(len, counts)] == ([3, 3], [1, 3])[rank]


@in_ranks
def test_a_rank_that_fails(kernel, rank):
    """The other one does not wait longer than the group's timeout."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    family = FAMILIES["wan"]
    model = family.model("cpu")
    kernel.enable_guidance_parallelism(model, group)
    arguments = family.inputs("cpu", batch=1)
    run(model, arguments).sum()
    if rank == 0:
        model.blocks[0].forward = None
        with pytest.raises(TypeError):
            run(model, arguments)
    else:
        with torch.no_grad():
            (result,) = model(**arguments, return_dict=False)
        with pytest.raises(RuntimeError, match="(?i)time"):
            result.sum()
        with pytest.raises(RuntimeError, match="a result was lost"):
            result.sum()


def test_errors(kernel):
    model, vae = nn.Linear(2, 2), AUTOENCODERS["kl"].model("cpu")
    for enable, module in (
        (kernel.enable_guidance_parallelism, model),
        (kernel.enable_tile_parallelism, vae),
    ):
        with pytest.raises(RuntimeError, match="torch.distributed must be initialized"):
            enable(module)
        with pytest.raises(TypeError, match="must be a torch.nn.Module, got an? "):
            enable(object())
    for module in (model, IN_SINGLE_PARTS["mochi"].model("cpu")):
        with pytest.raises(ValueError, match="whose tiles ranks can share, got an? "):
            kernel.enable_tile_parallelism(module)
    assert "forward" not in vars(model) and "_decode" not in vars(vae)


# ------------------------------------------------------------------------------------------------
# Tiles


def tiled(name):
    """A small autoencoder with small tiles, and latents of several of them."""
    vae = AUTOENCODERS[name].model("cpu")
    vae.enable_tiling()
    vae.tile_latent_min_size = vae.tile_latent_min_height = vae.tile_latent_min_width = 4
    ratio = getattr(vae, "spatial_compression_ratio", 2)
    vae.tile_sample_min_size = vae.tile_sample_min_height = vae.tile_sample_min_width = 4 * ratio
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = 3 * ratio
    latents = torch.randn(1, *AUTOENCODERS[name].latent[:-2], 6, 6)
    if hasattr(vae, "tile_sample_min_num_frames"):
        vae.use_framewise_decoding = True
        time = vae.temporal_compression_ratio
        vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 2 * time, time
        latents = torch.randn(1, latents.shape[1], 3, *latents.shape[3:])
    return vae, latents


TILED = [name for name in AUTOENCODERS if "timed" not in name]


@pytest.mark.drawn(times=0, period=3)
@pytest.mark.parametrize("name", TILED)
@in_ranks
def test_tiles(kernel, name):
    """All ranks get the bits of one rank's tiled decode, and each decodes its share of the tiles."""
    vae, latents = tiled(name)
    plain, calls = copy.deepcopy(vae), []
    for each in (vae, plain):
        each.decoder.register_forward_hook(lambda *_: calls.append(0))
    kernel.enable_tile_parallelism(vae)
    with torch.no_grad():
        expected = plain.decode(latents).sample
        everything = len(calls)
        calls.clear()
        out = vae.decode(latents).sample
    assert type(out) is torch.Tensor and torch.equal(out, expected)
    assert out.stride() == expected.stride()
    shares = [None] * 2
    dist.all_gather_object(shares, len(calls))
    assert sum(shares) == everything and everything >= 4
    assert min(shares) >= everything // 3, shares
    with pytest.raises(RuntimeError, match="share the tiles"):
        kernel.enable_tile_parallelism(vae)


@in_ranks
def test_injected_tiles(kernel):
    """On the kernels, with channels last, of a copy; with slices, and with gradients; without tiles."""
    vae, latents = tiled("wan")
    vae.use_tiling = False
    calls = count_samples(vae.decoder)
    kernel.enable_tile_parallelism(vae)
    with torch.no_grad():
        vae.decode(latents)
    assert len(calls) == latents.shape[2]  # all ranks decode all
    for name in ("kl", "wan"):
        vae, latents = tiled(name)
        kernel.inject_kernels(vae)
        with torch.no_grad():
            expected = vae.decode(latents).sample
        kernel.eject_kernels(vae)
        kernel.enable_tile_parallelism(vae)
        report = kernel.inject_kernels(vae)
        with torch.no_grad():
            assert torch.equal(vae.decode(latents).sample, expected), name
            assert torch.equal(copy.deepcopy(vae).decode(latents).sample, expected), name
        assert report.calls
        assert_all_on_kernels(report)
    vae, latents = tiled("kl")
    latents = torch.cat([latents, latents + 1])
    with torch.no_grad():
        expected = vae.decode(latents).sample
        kernel.enable_tile_parallelism(vae)
        vae.enable_slicing()
        assert relative_distance(vae.decode(latents).sample, expected) < CLOSE
    vae.decode(latents).sample.sum().backward()
    assert vae.decoder.conv_in.weight.grad.any()

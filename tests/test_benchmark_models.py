"""The benchmarks' models have the published sizes and get the pipelines' arguments."""

import dataclasses
import functools
import inspect
import types

import diffusers
import pytest
import torch
import torch._dynamo.testing
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.modular_pipelines.flux3 import before_denoise

from benchmarks import models
from benchmarks.harness import options
from benchmarks.models import bench_models
from benchmarks.models.cosmos3 import Cosmos3Size
from benchmarks.models.ltx import LTXSize
from benchmarks.models.pixart import LatteSize
from benchmarks.models.published import ImageSize, VideoSize
from benchmarks.models.videos import MiniMaxH3Size, MochiSize

from accuracy import finite_distance
from graphs import graphs  # noqa: F401

pytestmark = pytest.mark.usefixtures("_one_thread")
CPU = torch.device("cpu")
m = types.SimpleNamespace(**options.MODELS)  # by their keys
every_model = pytest.mark.parametrize(
    "published", [pytest.param(p, id=p.key) for p in options.PUBLISHED]
)


@functools.cache
def tiny(published):
    """The tiny model, in float32."""
    return published.transformer(CPU, torch.float32, tiny=True)


KANDINSKY = (m.kandinsky5, m.kandinsky5_pro, m.kandinsky6)
# Billions of published parameters, the configuration of the whole model, heads and their size, and the tokens
# of each published size.
WHOLE = {
    m.ltx: (1.92, {"num_layers": 28}, (32, 64), (2688, 8064)),
    m.flux: (11.9, {"num_layers": 19, "num_single_layers": 38}, (24, 128), (4096,)),
    m.flux2: (32.2, {"num_layers": 8, "num_single_layers": 48}, (48, 128), (4096,)),
    m.sd3: (8.1, {"num_layers": 38}, (38, 64), (4096,)),
    m.qwenimage: (20.4, {"num_layers": 60}, (24, 128), (4096,)),
    m.nucleus_image: (17.9, {"num_layers": 32}, (16, 128), (4096,)),
    m.wan: (14.3, {"num_layers": 40}, (40, 128), (32760,)),
    m.wan_small: (1.4, {"num_layers": 30}, (12, 128), (32760,)),
    m.helios: (14.3, {"num_layers": 40}, (40, 128), (8640,)),
    m.anyflow: (14.3, {"num_layers": 40}, (40, 128), (32760,)),
    m.anyflow_far: (14.3, {"num_layers": 40}, (40, 128), (29640,)),
    m.cosmos: (2.0, {"num_layers": 28}, (16, 128), (4080,)),
    m.cosmos3: (15.2, {"num_hidden_layers": 36}, (32, 128), (27280,)),
    m.allegro: (2.8, {"num_layers": 32}, (24, 96), (9200,)),
    m.hunyuan_video: (12.8, {"num_layers": 20, "num_single_layers": 40}, (24, 128), (32640,)),
    m.hunyuan_video15: (8.3, {"num_layers": 54}, (16, 128), (25440,)),
    m.motif_video: (2.2, {"num_layers": 12, "num_single_layers": 24}, (12, 128), (29440,)),
    **dict.fromkeys((m.ltx2, m.ltx2_distilled), (18.9, {"num_layers": 48}, (32, 128), (6144,))),
    m.z_image: (6.15, {"n_layers": 30}, (30, 128), (4096,)),
    m.flux3: (5.5, {"num_layers": 5, "num_single_layers": 28}, (24, 128), (4096,)),
    m.krea2: (12.8, {"num_layers": 28}, (48, 128), (4096,)),
    m.chroma: (8.9, {"num_layers": 19, "num_single_layers": 38}, (24, 128), (4096,)),
    m.longcat_image: (6.3, {"num_layers": 10, "num_single_layers": 20}, (24, 128), (4096,)),
    m.ovis_image: (7.3, {"num_layers": 6, "num_single_layers": 27}, (24, 128), (4096,)),
    m.prx: (1.2, {"depth": 16}, (28, 64), (4096,)),
    m.bria: (3.8, {"num_layers": 8, "num_single_layers": 28}, (24, 96), (4096,)),
    m.bria_fibo: (8.3, {"num_layers": 8, "num_single_layers": 38}, (24, 128), (4096,)),
    m.bria_fibo2: (7.7, {"n_layers": 44}, (28, 128), (4096,)),  # and 0.4 of 5 cross-attentions
    m.lumina2: (2.61, {"num_layers": 26}, (24, 96), (4096,)),
    m.ernie_image: (8.0, {"num_layers": 36}, (32, 128), (4096,)),
    m.hidream: (17.1, {"num_layers": 16, "num_single_layers": 32}, (20, 128), (4096,)),
    **dict.fromkeys((m.joyimage, m.joyimage_plus), (16.3, {"num_layers": 40}, (32, 128), (4096,))),
    m.omnigen: (3.8, {"num_layers": 32}, (32, 96), (4096,)),
    m.mochi: (10.0, {"num_layers": 48}, (24, 128), (23850,)),
    m.qwenimage21: (7.12, {"num_layers": 32}, (32, 128), (4096,)),
    m.minimax_h3: (33.1, {"num_layers": 50}, (56, 128), (14430,)),
    m.kandinsky5: (1.98, {"num_visual_blocks": 32, "num_text_blocks": 2}, (28, 64), (47616,)),
    m.kandinsky5_pro: (19.0, {"num_visual_blocks": 60, "num_text_blocks": 4}, (32, 128), (47616,)),
    m.kandinsky6: (48.0, {"num_visual_blocks": 60, "num_text_blocks": 4}, (32, 128), (50220,)),
    m.cogvideox: (5.57, {"num_layers": 42}, (48, 64), (17550,)),
    m.pixart: (0.61, {"num_layers": 28}, (16, 72), (4096,)),
    m.latte: (1.06, {"num_layers": 28}, (16, 72), (16384,)),
    m.easyanimate: (11.8, {"num_layers": 48}, (48, 64), (13312,)),
    m.cogview3: (2.85, {"num_layers": 30}, (64, 40), (4096,)),
    m.cogview4: (6.37, {"num_layers": 28}, (32, 128), (4096,)),
    m.glm_image: (6.93, {"num_layers": 30}, (32, 128), (4096,)),
    **dict.fromkeys((m.sdxl, m.sdxl_channels_last), (2.57, {}, None, (4096,))),
}


def meta_model(cls, config):
    """The model without values, and how many billions of parameters it has."""
    with torch.device("meta"):
        model = cls(**config)
    return model, sum(p.numel() for p in model.parameters()) / 1e9


@every_model
def test_published_size(published):
    """Of the whole model: one block of each stack, and as many more as are left as large as its first one."""
    expected, counts, heads, tokens = WHOLE[published]
    cls = type(tiny(published))
    config = {**published.config, **dict.fromkeys(counts, 1)}
    model, billions = meta_model(cls, config)
    more = {stack: meta_model(cls, {**config, stack: 2})[1] - billions for stack in counts}
    billions += sum((counts[stack] - 1) * more[stack] for stack in counts)
    assert billions == pytest.approx(expected, rel=0.04)
    if heads is None:  # Stable Diffusion XL's U-Net
        attentions = [part for part in model.modules() if type(part).__name__ == "Attention"]
        of_kinds = {(a.heads, a.inner_dim // a.heads) for a in attentions}
        assert len(attentions) == 140 and of_kinds == {(10, 64), (20, 64)}
    elif published in (m.z_image, m.bria_fibo2):
        assert (model.config.n_heads, model.config.dim // model.config.n_heads) == heads
    elif published is m.cosmos3:
        assert (model.config.num_attention_heads, model.config.head_dim) == heads
    elif published in KANDINSKY:
        head_dim = sum(model.config.axes_dims)
        assert (model.config.model_dim // head_dim, head_dim) == heads
    elif not hasattr(model.config, "attention_head_dim"):
        count = model.config.num_heads if published is m.prx else model.config.num_attention_heads
        assert (count, model.config.hidden_size // count) == heads
    else:
        assert (model.config.num_attention_heads, model.config.attention_head_dim) == heads
    assert tuple(size.tokens for size in published.sizes)[: len(tokens)] == tokens
    assert all(published.parse_size(str(size)) == size for size in published.sizes)


@pytest.mark.parametrize(
    "published",
    [pytest.param(p, id=p.key) for p in options.PUBLISHED if p.published_blocks],
)
def test_a_model_with_all_of_its_blocks(published):
    """Repeated blocks are separate modules with shared weights, and the name has their number."""
    model = models.twin(tiny(published))
    places = {p.data_ptr() for p in model.parameters()}
    assert published.name.startswith(published.complete(model) + ", ")
    assert {p.data_ptr() for p in model.parameters()} == places
    for name, count in published.published_blocks.items():
        assert len(set(model.get_submodule(name))) == count
    norms = list(models._norms(model))
    before = [weight + added for weight, added in norms]
    with models.weights(model, "peaked"):
        factors = [(w + added) / b for (w, added), b in zip(norms, before, strict=True)]
    assert all(factor.nanmedian() < 2 for factor in factors)


@every_model
def test_random_weights_are_as_diffusers_loads_them(published):
    """bfloat16, except for the model's float32 parameters. The output has the inputs' scale."""
    model = published.transformer(CPU, torch.bfloat16, tiny=True)
    kept = {name for name, w in model.named_parameters() if w.dtype == torch.float32}
    wans = ("time_embedder.", "scale_shift_table", ".norm2.")
    parts = {m.flux3: (".norm_q.", ".norm_k."), m.krea2: ("norm",)}
    parts |= dict.fromkeys((m.wan, m.wan_small, m.helios, m.anyflow, m.anyflow_far), wans)
    of_kandinsky = ("time_embeddings.", "modulation.")
    parts |= {m.kandinsky6: (".modulation.",), **dict.fromkeys(KANDINSKY[:2], of_kandinsky)}
    parts[m.minimax_h3] = ("proj_in.", "time_embedder.", "proj_out.")
    parts[m.cosmos3] = ("time_embedder.",)
    parts |= dict.fromkeys((m.joyimage, m.joyimage_plus), ("time_embedder.",))
    kept_parts = parts.get(published, ())
    assert kept == {n for n, _ in model.named_parameters() if any(p in n for p in kept_parts)}
    arguments = published.inputs(model, device=CPU, dtype=torch.bfloat16, **published.small)
    with torch.no_grad():
        output = models.output_of(model(**arguments))
    assert output.dtype == (torch.float32 if published is m.minimax_h3 else torch.bfloat16)
    assert 0.3 < output.float().std() < 3


IMAGE, VIDEO = ImageSize(256, 256), VideoSize(8, 192, 192)
# A size with enough tokens for a standard deviation, the number of self-attentions of the image, and the
# tolerance of their scores. Some vary less, because a large modulation adds the same to all keys.
SCORES = {
    m.ltx: (LTXSize(17, 256, 256), 2, 0.05),
    m.flux: (IMAGE, 4, 0.2),
    m.flux2: (IMAGE, 4, 0.05),
    m.sd3: (IMAGE, 3, 0.2),
    m.qwenimage: (IMAGE, 2, 0.05),
    m.nucleus_image: (IMAGE, 3, 0.2),
    m.wan: (VIDEO, 2, 0.15),
    m.wan_small: (VIDEO, 2, 0.15),
    m.helios: (VIDEO, 2, 0.15),
    m.anyflow: (VIDEO, 2, 0.15),
    m.anyflow_far: (VIDEO, 0, 0),  # its self-attention is FlexAttention
    m.cosmos: (IMAGE, 2, 0.35),
    m.cosmos3: (Cosmos3Size(8, 256, 256), 4, 0.2),
    m.allegro: (VIDEO, 2, 0.1),
    m.hunyuan_video: (VIDEO, 5, 0.15),
    m.hunyuan_video15: (VIDEO, 3, 0.15),
    m.motif_video: (VIDEO, 6, 0.15),
    **dict.fromkeys((m.ltx2, m.ltx2_distilled), (LTXSize(17, 256, 256), 4, 0.25)),
    m.z_image: (IMAGE, 6, 0.1),
    m.flux3: (IMAGE, 6, 0.15),
    m.krea2: (IMAGE, 6, 0.15),
    m.chroma: (IMAGE, 4, 0.35),
    m.longcat_image: (IMAGE, 4, 0.2),
    m.ovis_image: (IMAGE, 4, 0.2),
    m.prx: (IMAGE, 2, 0.1),
    m.bria: (IMAGE, 4, 0.2),
    m.bria_fibo: (IMAGE, 4, 0.2),
    m.bria_fibo2: (IMAGE, 6, 0.45),
    m.lumina2: (IMAGE, 6, 0.15),
    m.ernie_image: (IMAGE, 2, 0.15),
    m.hidream: (IMAGE, 4, 0.15),
    m.joyimage: (IMAGE, 2, 0.1),
    m.joyimage_plus: (IMAGE, 2, 0.1),
    m.omnigen: (IMAGE, 2, 0.45),
    m.mochi: (MochiSize(12, 192, 192), 4, 0.15),
    m.qwenimage21: (IMAGE, 2, 0.1),
    m.minimax_h3: (MiniMaxH3Size(22, 256, 256), 4, 0.2),
    **dict.fromkeys((m.kandinsky5, m.kandinsky5_pro), (VIDEO, 3, 0.5)),
    m.kandinsky6: (VIDEO, 8, 0.35),
    m.cogvideox: (VIDEO, 2, 0.1),
    m.pixart: (IMAGE, 2, 0.1),
    m.latte: (LatteSize(5, 192, 192), 4, 0.2),
    m.easyanimate: (VIDEO, 2, 0.1),
    m.cogview3: (IMAGE, 2, 0.1),
    m.cogview4: (IMAGE, 2, 0.25),
    m.glm_image: (IMAGE, 2, 0.25),
    **dict.fromkeys((m.sdxl, m.sdxl_channels_last), (IMAGE, 11, 0.2)),
}


def few_padding_tokens(monkeypatch):
    """For HunyuanVideo 1.5, whose two other conditions are padding."""
    for name in ("glyph_tokens", "image_tokens"):
        monkeypatch.setattr(m.hunyuan_video15, name, 8)


@every_model
@pytest.mark.parametrize("name", models.WEIGHTS)
def test_weights_give_the_scores_their_standard_deviation(name, published, monkeypatch):
    model, (size, count, tolerance) = tiny(published), SCORES[published]
    stds, attend = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, *more, **given):
        # Nucleus-Image has the text's keys after the image's, these have them before.
        is_before = published in (m.qwenimage21, m.cosmos3, m.prx)
        own = key[..., -query.shape[-2] :, :] if is_before else key
        own = key[..., : query.shape[-2], :] if published is m.nucleus_image else own
        if query.shape == own.shape:  # self-attention of the image, with or without the text
            scores = query @ own.mT / query.shape[-1] ** 0.5
            if attn_mask is not None and attn_mask.dtype == torch.bool:  # padding has no score
                is_seen = attn_mask[0, 0].any(0)[: own.shape[-2]]
                scores = scores[..., is_seen, :][..., is_seen]
            stds.append(scores.std(-1).square().mean().sqrt())
        return attend(query, key, value, attn_mask, *more, **given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    given = {**published.small, "size": size}
    # Of these, fewer tokens of the text change the image's deviation.
    if published in (m.flux2, m.sd3, m.chroma):
        del given["text_tokens"]
    few_padding_tokens(monkeypatch)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    with torch.no_grad(), models.weights(model, name):
        model(**published.inputs(model, device=CPU, dtype=torch.float32, **given))
    assert stds == [pytest.approx(models.WEIGHTS[name], rel=tolerance)] * count
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key]), "the weights are what they were"


def test_weights_that_change_in_place_reach_what_was_built_before(kernel, device):
    """The injected model and compiled code see the peaked weights, without another compilation."""
    device = torch.device(device)
    model = m.ltx.transformer(device, torch.bfloat16, tiny=True)
    arguments = m.ltx.inputs(model, LTXSize(9, 64, 96), device, torch.bfloat16)
    counter = torch._dynamo.testing.CompileCounter()
    compiled, injected = models.twin(model), models.twin(model)
    kernel.inject_kernels(injected)
    compiled.compile(backend=counter, fullgraph=True, dynamic=False)
    outputs = []
    with torch.no_grad():
        for name in ("random", "peaked"):
            with models.weights(model, name):
                outputs.append((compiled(**arguments)[0], injected(**arguments)[0]))
                assert torch.equal(outputs[-1][0], model(**arguments)[0])
    assert counter.frame_count == 1
    assert all(finite_distance(b, a) > 0.05 for a, b in zip(*outputs, strict=True))


def test_values_that_a_twin_moves_stay_in_the_model():
    """As inject_kernels(precision=...) moves them. Values that change in place change in both."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model[1].weight.requires_grad_(False)
    twin = models.twin(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2)
    versions = [parameter._version for parameter in model.parameters()]
    assert [parameter._version for parameter in twin.parameters()] == versions
    assert all(p.eq(2).all() for p in twin.parameters())
    assert [p.requires_grad for p in twin.parameters()] == [True, True, False, True]
    assert twin[1].running_mean is model[1].running_mean
    for parameter in twin.parameters():
        parameter.data = torch.zeros(())
    assert all(p.eq(2).all() and p.dim() for p in model.parameters())


@pytest.mark.parametrize("published", [m.ltx, m.flux, m.wan, m.qwenimage], ids=lambda p: p.key)
def test_outlier_channels(published):
    """The inputs of the blocks' layers have them, except cross-attention's. The result is nearly the same."""
    model, largest = tiny(published), {}

    def look(name, module, args):
        magnitudes = args[0].flatten(0, -2).square().mean(0).sqrt()
        largest[name] = (magnitudes.max() / magnitudes.median()).item()

    arguments = published.inputs(model, published.tiny_sizes[0], CPU, torch.float32)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    outputs = {}
    with torch.no_grad():
        for weights in ("peaked", models.OUTLIERS):
            handles = [
                model.get_submodule(name).register_forward_pre_hook(functools.partial(look, name))
                for name in models.fp8_layers(model)
            ]
            with models.weights(model, weights):
                outputs[weights] = models.output_of(model(**arguments))
            for handle in handles:
                handle.remove()
    for name, ratio in largest.items():
        is_cross = "attn2" in name and "out" not in name
        assert ratio < 8 if is_cross else 12 < ratio < 400, name
    assert finite_distance(outputs[models.OUTLIERS], outputs["peaked"]) < 0.1
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key]), "the weights are what they were"


@every_model
def test_blocks_are_compiled_and_nothing_else(published, monkeypatch):
    """Each block of each stack, in one graph."""
    compiled, compile_ = [], torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **given: compiled.append((self, given)) or compile_(self, **given),
    )
    model = models.twin(tiny(published))
    models.compile_blocks(model, backend=torch._dynamo.testing.CompileCounter())
    blocks = [block for stack in models.block_lists(model) for block in stack]
    if published in (m.sdxl, m.sdxl_channels_last):  # its stacks contain more than transformers
        blocks = [b for b in model.modules() if type(b).__name__ == "BasicTransformerBlock"]
    # diffusers also names the embedding of patches and text; FLUX.3 has a dict of stacks, FIBO a list of
    # projections.
    if published in (m.hunyuan_video, m.hunyuan_video15, m.flux3, m.minimax_h3, m.bria_fibo):
        blocks = [b for b in model.modules() if type(b).__name__ in model._repeated_blocks]
    assert [block for block, _ in compiled] == blocks and len(blocks) >= 2
    assert all(given["fullgraph"] and given["dynamic"] is False for _, given in compiled)


@pytest.mark.parametrize("published", [m.ltx, m.wan], ids=lambda p: p.key)
def test_float32_model_is_near_and_exact(published):
    """It is close to the bfloat16 model, and has the float32 model's values."""
    for dtype in (torch.bfloat16, torch.float32):
        model = published.transformer(CPU, dtype, tiny=True)
        arguments = published.inputs(model, device=CPU, dtype=dtype, **published.small)
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        with torch.no_grad():
            output = model(**arguments)[0]
            exact = models.float32_output(model, arguments, published.thousandfold)
        distance = finite_distance(output, exact)
        assert exact.dtype == torch.float32
        assert 1e-3 < distance < 0.02 if dtype == torch.bfloat16 else distance == 0
        for name, weight in model.named_parameters():
            assert weight.dtype == before[name].dtype and torch.equal(weight, before[name])


# ------------------------------------------------------------------------------------------------
# Inputs


EULER = functools.partial(FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True)
FLOW = functools.partial(
    diffusers.UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True
)
LTX2_CALL = {"stg_scale": 0.0, "modality_scale": 1.0, "frame_rate": m.ltx2.frame_rate}
NO_GUIDANCE = {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}
# The pipeline, its scheduler, and arguments of its call.
PIPELINES = {
    m.ltx: ("LTXPipeline", EULER, {"frame_rate": m.ltx.frame_rate}),
    m.flux: ("FluxPipeline", EULER, {"guidance_scale": m.flux.guidance}),
    m.flux2: ("Flux2Pipeline", EULER, {"guidance_scale": m.flux2.guidance}),
    m.sd3: ("StableDiffusion3Pipeline", FlowMatchEulerDiscreteScheduler, {}),
    m.qwenimage: ("QwenImagePipeline", EULER, {}),
    m.sdxl: ("StableDiffusionXLPipeline", diffusers.EulerDiscreteScheduler, {}),
    m.wan: ("WanPipeline", FLOW, {}),
    m.cogvideox: ("CogVideoXPipeline", diffusers.CogVideoXDDIMScheduler, {}),
    m.hunyuan_video15: ("HunyuanVideo15Pipeline", FlowMatchEulerDiscreteScheduler, {}),
    m.krea2: ("Krea2Pipeline", EULER, {"guidance_scale": 0.0}),
    m.ltx2: ("LTX2Pipeline", EULER, LTX2_CALL),
    m.ltx2_distilled: ("LTX2Pipeline", EULER, {**LTX2_CALL, **NO_GUIDANCE}),
    m.z_image: ("ZImagePipeline", EULER, {"guidance_scale": 0.0}),
    m.chroma: ("ChromaPipeline", EULER, {"guidance_scale": 1.0}),
    m.lumina2: ("Lumina2Pipeline", FlowMatchEulerDiscreteScheduler, {"guidance_scale": 1.0}),
    m.mochi: ("MochiPipeline", FlowMatchEulerDiscreteScheduler, {}),
}


class Connectors:
    """LTX-2's, except that they leave the embeddings as they are."""

    def __call__(self, embeds, mask, padding_side):
        return embeds, embeds, torch.ones_like(mask)


class Autoencoder:
    """What the pipeline of HunyuanVideo 1.5 asks of it."""

    config = types.SimpleNamespace(latent_channels=4)
    temporal_compression_ratio, spatial_compression_ratio = 4, 16


# Parts that a pipeline needs beside the transformer and the scheduler.
PARTS = {
    m.hunyuan_video15: {
        "guider": diffusers.ClassifierFreeGuidance(enabled=False),
        "vae": Autoencoder(),
    },
    **dict.fromkeys((m.ltx2, m.ltx2_distilled), {"connectors": Connectors()}),
}


def passed_by_pipeline(published, transformer, benchmark):
    """Run the pipeline with the benchmark's prompt."""
    cls, scheduler, call = PIPELINES[published]
    cls = getattr(diffusers, cls)
    parameters = inspect.signature(cls.__init__).parameters.values()
    parts = {p.name: None for p in parameters if p.default is p.empty and p.name != "self"}
    parts |= PARTS.get(published, {})
    denoiser = "unet" if published is m.sdxl else "transformer"
    pipe = cls(**{**parts, denoiser: transformer, "scheduler": scheduler()})
    pipe.set_progress_bar_config(disable=True)
    text, pooled = benchmark.get("encoder_hidden_states"), benchmark.get("pooled_projections")
    if published is m.sdxl:
        pooled = benchmark["added_cond_kwargs"]["text_embeds"]
    given = {"prompt_embeds": benchmark["cap_feats"] if published is m.z_image else text[-1:]}
    if pooled is not None:
        given["pooled_prompt_embeds"] = pooled[-1:]
    if published in (m.krea2, m.hunyuan_video15):
        given["prompt_embeds_mask"] = benchmark["encoder_attention_mask"]
    if published is m.hunyuan_video15:
        given["prompt_embeds_2"] = benchmark["encoder_hidden_states_2"]
        given["prompt_embeds_mask_2"] = benchmark["encoder_attention_mask_2"]
    if published is m.chroma:
        mask = benchmark["attention_mask"]
        given["prompt_attention_mask"] = mask[:, : text.shape[1]]
    if published in (m.ltx, m.lumina2, m.mochi):
        mask = benchmark["encoder_attention_mask"]
        given["prompt_attention_mask"] = mask[-1:]
        given["negative_prompt_attention_mask"] = mask[:1]
    if published in (m.ltx2, m.ltx2_distilled):
        for name in ("prompt_attention_mask", "negative_prompt_attention_mask"):
            given[name] = benchmark["encoder_attention_mask"][:1]
    if published in (m.ltx, m.sd3, m.sdxl, m.wan, m.cogvideox, m.ltx2, m.mochi):
        given["negative_prompt_embeds"] = text[:1]
        if pooled is not None:
            given["negative_pooled_prompt_embeds"] = pooled[:1]
    given |= dataclasses.asdict(published.tiny_sizes[0])
    if "frames" in given:
        given["num_frames"] = given.pop("frames")
    pipe(**given, **call, num_inference_steps=2, output_type="latent")


def alike(benchmark, passed, name, is_own):
    """The same types, shapes and dtypes, and the same values if the benchmark gave them."""
    if isinstance(benchmark, torch.Tensor):
        assert (benchmark.shape, benchmark.dtype) == (passed.shape, passed.dtype), name
        assert not is_own or torch.equal(benchmark, passed), name
    elif isinstance(benchmark, dict):
        assert set(benchmark) == set(passed), name
        for key, one in benchmark.items():
            alike(one, passed[key], key, is_own)
    elif isinstance(benchmark, (tuple, list)):
        for one, other in zip(benchmark, passed, strict=True):
            alike(one, other, name, is_own)
    else:
        assert benchmark == passed, name


class FirstForwardError(Exception):
    """It ends the pipeline."""


# LTX-2's connectors make the audio's text.
MADE_BY_THE_PIPELINE = {"hidden_states", "audio_hidden_states", "sample", "x"} | {
    *("timestep", "sigma", "t", "audio_encoder_hidden_states")
}


@pytest.mark.parametrize("published", [pytest.param(p, id=p.key) for p in PIPELINES])
def test_inputs_are_what_the_pipeline_passes(monkeypatch, published):
    """Arguments of the first forward: names, shapes and dtypes, and values except latents and timesteps."""
    passed = {}

    def forward(*positional, **others):
        passed.update(signature.bind(*positional, **others).arguments)
        raise FirstForwardError

    twin = models.twin(tiny(published))
    signature = inspect.signature(twin.forward)
    monkeypatch.setattr(twin, "forward", forward)
    benchmark = published.inputs(tiny(published), published.tiny_sizes[0], CPU, torch.float32)
    with pytest.raises(FirstForwardError):
        passed_by_pipeline(published, twin, benchmark)
    if published is m.ltx:
        assert passed.pop("attention_kwargs") is None
    assert set(benchmark) == set(passed)
    for name, value in benchmark.items():
        alike(value, passed[name], name, name not in MADE_BY_THE_PIPELINE)


def test_positions_of_flux3_are_those_of_diffusers_modular_pipeline():
    benchmark = m.flux3.inputs(tiny(m.flux3), m.flux3.tiny_sizes[0], CPU, torch.float32)
    rows_and_columns = m.flux3.tiny_sizes[0].latent
    scale = before_denoise.Flux3PrepareLatentsStep().image_rope_scale
    expected = before_denoise._prepare_image_ids(*rows_and_columns, scale)
    assert torch.equal(benchmark["img_ids"], expected)
    text = benchmark["encoder_hidden_states"]
    expected = before_denoise.Flux3TextRoPEInputsStep._prepare_text_ids(text)
    assert torch.equal(benchmark["txt_ids"], expected)


# ------------------------------------------------------------------------------------------------
# CUDA graphs


@pytest.mark.parametrize("name", ["ltx", "hunyuan_video15"])
def test_a_forward_that_is_not_captured_has_no_figures(graphs, name, capsys, monkeypatch):  # noqa: F811
    """HunyuanVideo 1.5 indexes by a mask. The other modes are measured, and a sentence says why."""
    few_padding_tokens(monkeypatch)
    published, is_captured = options.MODELS[name], name == "ltx"
    if not is_captured:
        monkeypatch.setattr(published, "inputs", functools.partial(published.inputs, text_tokens=8))
    modes = ["injected", models.GRAPHS]
    settings = bench_models.Settings(published, CPU, torch.float32, modes, 1, 1, 0.0, 1, False)
    with torch.no_grad():
        size = published.tiny_sizes[0]
        result = bench_models.measure_size(tiny(published), graphs, size, settings)
    for of_weights in result["weights"].values():
        assert list(of_weights["modes"]) == (modes if is_captured else modes[:1])
    sentence = f"{size} {models.GRAPHS}: not measured, as no forward is captured: "
    assert (sentence in capsys.readouterr().out) == (not is_captured)

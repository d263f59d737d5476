"""Context parallelism: tokens split between ranks, against the model in one process.

Each rank has the same model and inputs, and gets the whole result. The ranks communicate by gloo.
"""

import contextlib
import copy
import functools
import traceback

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks import context_parallel
from diffusers.models import attention_dispatch
from diffusers.models.transformers import transformer_wan
from torch import nn

import fp8_models
from checks import relative_distance
from emulated_graphs import EmulatedGraph
from families import FAMILIES, run
from family import make_all_matter
from family_relatives import copy_of_wan, inputs_of_copy
from graphs import module_of, use_emulated_graphs
from ranks import run_ranks
from small_models import to

DTYPES = (torch.float32, torch.bfloat16)
HEADS = {"heads": 4, "head_dim": 16}
ULYSSES, RING, BOTH = (
    {"ulysses_degree": 2},
    {"ring_degree": 2},
    {"ulysses_degree": 2, "ring_degree": 2},
)
ULYSSES_4, RING_4 = {"ulysses_degree": 4}, {"ring_degree": 4}
UNEVEN = {"ulysses_degree": 2, "ulysses_anything": True}
UNEVEN_RING = {"ring_degree": 2, "ring_anything": True}
EVEN_TEXT = {"text_length": 8}
# Inputs of each family whose tokens can be split into 4 parts: with and without padded text.
INPUTS = {
    "ltx": ({"mask": None}, {}, {"batch": 1}),
    "ltx2": ({"mask": None}, {}, {"batch": 1}),
    "flux": ({}, {"batch": 1}),
    "flux2": ({}, {"batch": 1}),
    "qwenimage": ({}, {"mask": "padded"}),
    "wan": ({}, {"batch": 1}),
    "minimax_h3": ({"text_length": 7}, {"text_length": 7, "batch": 1}),
    "hunyuan_video": ({}, {"batch": 1}),
    "cogvideox": ({}, {"rotates": False}),
    "sd3": ({}, {"batch": 1}),
    "z_image": ({}, {"prompts": (40, 6)}),
}


@pytest.fixture(autouse=True)
def _on_a_cpu(device):
    if device != "cpu":
        pytest.skip("the ranks would need a GPU each")


def parallelize(kernel, model, how):
    """``enable_parallelism``, which counts devices, with the package's plan where diffusers has none."""
    plan = None if model._cp_plan is not None else kernel.context_parallel_plan(model)
    model.enable_parallelism(config=ContextParallelConfig(**how), cp_plan=plan)


class Errors:
    """Errors against the float64 model, of one model's forward and of the eager model's."""

    def __init__(self, family, plain):
        self.family, self.plain = family, plain
        self.squares = torch.zeros(3, dtype=torch.float64)

    def add(self, out, arguments, results=None):
        """``results``: the float64 and the eager model's, if they are known."""
        expected, eager = self.results(arguments) if results is None else results
        differences = out.double() - expected, eager.double() - expected, expected
        self.squares += torch.stack([x.square().sum() for x in differences])

    def results(self, arguments):
        return self.family.reference(self.plain, arguments), run(self.plain, arguments)

    def check(self):
        """As close as the contract asks for. In float32 a sum's order makes a difference."""
        error, eager, scale = self.squares.sqrt().tolist()
        assert error <= max(1.05 * eager, 2e-6 * scale), (
            f"{error / scale:.3g} > {eager / scale:.3g}"
        )


def model_of(name, dtype=torch.float32, **config):
    """Its family, the model, and the same model without kernels and parallelism."""
    family = FAMILIES[name]
    model = family.model("cpu", dtype, **HEADS, **config)
    return family, model, copy.deepcopy(model)


def inputs_of(family, dtype, options, seed=5):
    arguments = family.inputs("cpu", dtype, seed=seed, **{**EVEN_TEXT, **options})
    if family.name == "flux2":  # as its pipeline passes them
        arguments.update({key: arguments[key][None] for key in ("img_ids", "txt_ids")})
    return arguments


def check_case(kernel, known, name, dtype, options, how, is_injected_first):
    """``known``: results of the model in one process, which other cases share."""
    family, model, plain = model_of(name, dtype)
    if is_injected_first:
        report = kernel.inject_kernels(model)
        run(model, inputs_of(family, dtype, options))
    parallelize(kernel, model, how)
    if not is_injected_first:
        report = kernel.inject_kernels(model)
    errors = Errors(family, plain)
    for seed in range(2 if dtype == torch.float32 else 6):
        arguments = inputs_of(family, dtype, options, seed)
        key = (name, dtype, str(options), seed)
        if key not in known:
            known[key] = errors.results(arguments)
        errors.add(run(model, arguments), arguments, known[key])
    errors.check()
    if dtype == torch.bfloat16:
        left = [calls for calls in report.calls if calls.fell_back or calls.own_attention]
        assert not left, left


def gather_any(tensor, dim, group):
    """diffusers' gather of tensors of different lengths, which gloo does not have."""
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, tensor, group)
    return torch.cat(gathered, dim=dim)


def prepare_rank():
    """``enable_parallelism`` divides by the number of accelerators, and warns at each call."""
    torch.accelerator.device_count = lambda: 1
    diffusers.utils.logging.set_verbosity_error()
    context_parallel._all_gather_anything = gather_any


def check_cases(kernel, rank, cases):
    prepare_rank()
    failures, known = [], {}
    for case in cases:
        try:
            check_case(kernel, known, *case)
        except Exception:
            failures.append(f"{case}\n{traceback.format_exc(limit=-3)}")
    assert not failures, "\n".join(failures)


def cases(modes, names=tuple(INPUTS)):
    return [
        (name, dtype, options, how, is_injected_first)
        for name in names
        if name in FAMILIES
        for options in INPUTS[name]
        for how in modes
        for dtype, is_injected_first in zip(DTYPES, (True, False), strict=True)
    ]


def test_some_families(tmp_path):
    modes = cases((ULYSSES, RING), ("ltx", "flux", "wan", "sd3"))
    run_ranks(check_cases, 2, tmp_path, modes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "modes"),
    [(2, (ULYSSES, RING, UNEVEN, UNEVEN_RING)), (4, (ULYSSES_4, RING_4, BOTH))],
    ids=["2 ranks", "4 ranks"],
)
def test_every_family(tmp_path, ranks, modes):
    run_ranks(check_cases, ranks, tmp_path, cases(modes), timeout=1200)


def check_uneven(kernel, rank):
    """Tokens and heads that the ranks cannot share evenly."""
    prepare_rank()
    for name in ("flux", "wan", "hunyuan_video", "qwenimage"):
        for how in (UNEVEN, UNEVEN_RING):
            family = FAMILIES[name]
            model = family.model("cpu", heads=3, head_dim=16)
            plain = copy.deepcopy(model)
            kernel.inject_kernels(model)
            parallelize(kernel, model, how)
            errors = Errors(family, plain)
            for tokens, text_length in ((2, 7), (3, 5), (2, 6)):
                arguments = family.inputs("cpu", seed=3, tokens=tokens, text_length=text_length)
                errors.add(run(model, arguments), arguments)
            errors.check()
    _, model, _ = model_of("flux")
    kernel.inject_kernels(model)
    parallelize(kernel, model, ULYSSES)
    with pytest.raises(AssertionError, match="divisible"):  # of diffusers
        run(model, FAMILIES["flux"].inputs("cpu", tokens=2, text_length=7))
    model = FAMILIES["flux"].model("cpu", heads=3, head_dim=16)
    kernel.inject_kernels(model)
    parallelize(kernel, model, ULYSSES)
    with pytest.raises(ValueError, match="must divide the number of heads, got 3"):
        run(model, inputs_of(FAMILIES["flux"], torch.float32, {}))


@pytest.mark.slow
def test_uneven_tokens_and_heads(tmp_path):
    run_ranks(check_uneven, 2, tmp_path)


# ------------------------------------------------------------------------------------------------
# Ranks that differ


@contextlib.contextmanager
def global_hook(is_here):
    """A hook of all modules, with which the model's own code runs."""
    handle = None
    if is_here:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def check_ranks_that_differ(kernel, rank):
    """One rank runs the model's own code, others the kernels. None waits, and the results are right."""
    prepare_rank()
    for name in ("flux", "wan", "qwenimage", "z_image"):
        for how in (ULYSSES, RING):
            family, model, plain = model_of(name)
            kernel.inject_kernels(model)
            parallelize(kernel, model, how)
            errors = Errors(family, plain)
            options = {"mask": "padded"} if name == "qwenimage" else {}
            arguments = inputs_of(family, torch.float32, options)
            with global_hook(rank == 0):
                errors.add(run(model, arguments), arguments)
            if rank == 1:
                family.part(model, "attention").register_forward_hook(lambda *_: None)
                family.part(model, "block").register_forward_pre_hook(lambda *_: None)
                family.part(model, "linear").register_forward_hook(lambda *_: None)
            errors.add(run(model, arguments), arguments)
            if rank == 1:
                kernel.eject_kernels(model)
                kernel.inject_kernels(model, attention=False)
            errors.add(run(model, arguments), arguments)
            errors.check()
            attention = family.part(model, "attention")
            assert attention.processor._attention_backend is None


@pytest.mark.slow
def test_one_rank_runs_the_models_own_code(tmp_path):
    run_ranks(check_ranks_that_differ, 2, tmp_path)


def check_own_code_without_parallelism(kernel, rank):
    """The own code of these attentions knows their rank's tokens only."""
    prepare_rank()
    reasons = dict.fromkeys(("sd3", "cogvideox"), "attends to this rank's tokens only")
    reasons["hunyuan_video"] = "does not split the mask"
    for name, reason in reasons.items():
        family, model, _ = model_of(name)
        kernel.inject_kernels(model)
        parallelize(kernel, model, ULYSSES)
        with global_hook(True), pytest.raises(RuntimeError, match=reason):
            run(model, inputs_of(family, torch.float32, {}))


def test_own_code_that_would_be_wrong_raises(tmp_path):
    run_ranks(check_own_code_without_parallelism, 2, tmp_path)


# ------------------------------------------------------------------------------------------------
# Other orders, other users


def check_grouped_queries(rank, config, backend):
    """Six heads that share two or three keys, by the backend."""
    for key_heads in (2, 3):
        q, k, v = (torch.randn(1, 8, count, 16) for count in (6, key_heads, key_heads))
        how = {"enable_gqa": True, "backend": backend}
        expected = attention_dispatch.dispatch_attention_fn(q, k, v, **how)
        own = [x.chunk(2, dim=1)[rank] for x in (q, k, v, expected)]
        out = attention_dispatch.dispatch_attention_fn(*own[:3], parallel_config=config, **how)
        assert relative_distance(out, own[3]) < 2e-6


def check_replaced_dispatch(kernel):
    """A user's own function gets diffusers' parallelism, and runs."""
    given, original = [], transformer_wan.dispatch_attention_fn

    @functools.wraps(original)
    def dispatch(*args, parallel_config, **kwargs):
        given.append(parallel_config)
        return original(*args, parallel_config=parallel_config, **kwargs)

    family, model, plain = model_of("wan")
    kernel.inject_kernels(model)
    parallelize(kernel, model, ULYSSES)
    arguments = inputs_of(family, torch.float32, {})
    expected = run(plain, arguments)
    transformer_wan.dispatch_attention_fn = dispatch
    try:
        assert relative_distance(run(model, arguments), expected) < 2e-6
    finally:
        transformer_wan.dispatch_attention_fn = original
    assert given == [model._parallel_config, None] * 2


def check_other_orders(kernel, rank):
    prepare_rank()
    name = kernel.register_attention_backend()
    for family_name in ("flux", "wan", "qwenimage"):
        options = {"mask": "padded"} if family_name == "qwenimage" else {}
        for how in (ULYSSES, RING):
            family, model, plain = model_of(family_name)
            errors = Errors(family, plain)
            arguments = inputs_of(family, torch.float32, options)
            # The backend alone, without the injection.
            model.set_attention_backend(name)
            parallelize(kernel, model, how)
            errors.add(run(model, arguments), arguments)
            # The injection follows the choice, and leaves nothing behind.
            kernel.inject_kernels(model)
            errors.add(run(model, arguments), arguments)
            kernel.eject_kernels(model)
            errors.add(run(model, arguments), arguments)
            errors.check()
        if family_name == "flux":
            check_grouped_queries(rank, model._parallel_config, name)
            q, mask = torch.randn(1, 4, 4, 16), torch.ones(1, 1, 1, 8, dtype=torch.bool)
            how = {"backend": name, "parallel_config": model._parallel_config}
            with pytest.raises(ValueError, match="must be of this rank's 4 keys, got one of 8"):
                attention_dispatch.dispatch_attention_fn(q, q, q, attn_mask=mask, **how)
        if family_name == "wan":
            check_replaced_dispatch(kernel)
        # diffusers' own attention, chosen by the user, on the values that the kernels wrote.
        family, model, plain = model_of(family_name)
        model.set_attention_backend("native")
        kernel.inject_kernels(model)
        parallelize(kernel, model, ULYSSES)
        assert relative_distance(run(model, arguments), run(plain, arguments)) < 2e-6


@pytest.mark.slow
def test_backend_and_orders(tmp_path):
    run_ranks(check_other_orders, 2, tmp_path)


def check_graphs(kernel, rank):
    """Parallelism after graphs were captured: they are dropped, and no graph holds a collective."""
    prepare_rank()
    use_emulated_graphs(kernel)
    module_of(kernel, "cuda_graphs").GRAPHS["cpu"] = EmulatedGraph
    for name in ("flux", "wan", "sd3"):
        family, model, plain = model_of(name)
        report = kernel.inject_kernels(model, cuda_graphs=True)
        arguments = inputs_of(family, torch.float32, {})
        for _ in range(4):
            run(model, arguments)
        (calls,) = report.cuda_graphs
        replayed = calls.replayed
        assert replayed
        parallelize(kernel, model, ULYSSES)
        errors = Errors(family, plain)
        for _ in range(3):
            errors.add(run(model, arguments), arguments)
        errors.check()
        (calls,) = report.cuda_graphs
        assert calls.replayed == replayed


@pytest.mark.slow
def test_parallelism_after_graphs(tmp_path):
    run_ranks(check_graphs, 2, tmp_path)


def check_fp8(kernel, rank):
    """Linear layers in FP8: products of query, key and value in one launch, quantized hand-over."""
    prepare_rank()
    for name in ("flux", "wan", "ltx", "flux2", "qwenimage"):
        for how in (ULYSSES, RING):
            family, model, plain = model_of(name, torch.bfloat16)
            arguments = inputs_of(family, torch.bfloat16, {"mask": None} if name == "ltx" else {})
            for each in (model, plain):
                for path in family.block_lists:
                    fp8_models.quantize(each.get_submodule(path))
                report = kernel.inject_kernels(each)
            expected = run(plain, arguments)
            parallelize(kernel, model, how)
            assert relative_distance(run(model, arguments), expected) < 0.03, (name, how)
            left = [calls for calls in report.calls if calls.fell_back or calls.own_attention]
            assert not left, left


@pytest.mark.slow
def test_fp8(tmp_path):
    pytest.importorskip("torchao")
    run_ranks(check_fp8, 2, tmp_path)


def check_gradients(kernel, rank):
    """The ranks' gradients, added, are those of one process."""
    prepare_rank()
    for name in ("flux", "wan", "sd3"):
        for how in (ULYSSES, RING):
            family, model, plain = model_of(name)
            arguments = inputs_of(family, torch.float32, {})
            plain(**arguments, return_dict=False)[0].square().sum().backward()
            kernel.inject_kernels(model)
            parallelize(kernel, model, how)
            model(**arguments, return_dict=False)[0].square().sum().backward()
            weight = family.part(model, "linear").weight.grad
            dist.all_reduce(weight)
            expected = family.part(plain, "linear").weight.grad
            assert relative_distance(weight, expected) < 1e-5


@pytest.mark.slow
def test_gradients(tmp_path):
    run_ranks(check_gradients, 2, tmp_path)


# ------------------------------------------------------------------------------------------------
# Models in part and copies


def helios():
    import every_model  # of the newest diffusers

    small = every_model.NEW["HeliosTransformer3DModel"]
    return small.model("cpu"), lambda seed: small.arguments("cpu", seed=seed)


def chronoedit():
    name = "ChronoEditTransformer3DModel"
    model = copy_of_wan(name, num_attention_heads=4)
    make_all_matter(model, (), "condition_embedder.time")

    def inputs(seed):
        torch.manual_seed(seed)
        return inputs_of_copy(name, "cpu")

    return model, inputs


def check_other_models(kernel, rank):
    prepare_rank()
    for make, modes in ((helios, (UNEVEN, UNEVEN_RING)), (chronoedit, (ULYSSES, RING))):
        for how in modes:
            model, inputs = make()
            plain = copy.deepcopy(model).double()
            if make is helios:  # diffusers' plan names 40 blocks
                names = (f"blocks.{i}." for i in range(2, 40))
                ends = tuple(names)
                model._cp_plan = {k: v for k, v in model._cp_plan.items() if not k.startswith(ends)}
            kernel.inject_kernels(model)
            parallelize(kernel, model, how)
            arguments = inputs(3)
            expected = run(plain, to(arguments, "cpu", torch.float64))
            assert relative_distance(run(model, arguments), expected) < 2e-6, (make, how)


@pytest.mark.slow
def test_other_models(tmp_path):
    run_ranks(check_other_models, 2, tmp_path)


def check_own_plan(kernel, rank):
    """Chroma by a plan like FLUX.1's. diffusers skips its processors."""
    prepare_rank()
    for how in (ULYSSES, RING):
        family, model, plain = model_of("chroma")
        kernel.inject_kernels(model)
        plan = FAMILIES["flux"].model("cpu")._cp_plan
        model.enable_parallelism(config=ContextParallelConfig(**how), cp_plan=plan)
        arguments = inputs_of(family, torch.float32, {})
        assert relative_distance(run(model, arguments), run(plain, arguments)) < 2e-6


@pytest.mark.slow
def test_plan_of_the_user(tmp_path):
    run_ranks(check_own_plan, 2, tmp_path)


def test_plans(kernel):
    """diffusers' own plan, ours, or an error; the tensors that a plan names exist."""
    for name, family in FAMILIES.items():
        model = family.model("cpu", **HEADS)
        if name in INPUTS:
            plan = kernel.context_parallel_plan(model)
            assert plan == model._cp_plan if model._cp_plan is not None else plan
        else:
            with pytest.raises(ValueError, match=f"got a {type(model).__name__}"):
                kernel.context_parallel_plan(model)
    model = FAMILIES["hunyuan_video"].model("cpu", image_condition_type="token_replace")
    with pytest.raises(ValueError, match="tokens of the first frame"):
        kernel.context_parallel_plan(model)

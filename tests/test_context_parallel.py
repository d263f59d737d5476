"""Context parallelism: tokens split between ranks, against the model in one process.

Each rank has the same model and inputs, and gets the whole result. The ranks communicate by gloo.
"""

import contextlib
import copy
import functools
import re
from types import SimpleNamespace

import diffusers
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import ContextParallelConfig
from diffusers.hooks import context_parallel
from diffusers.models import attention_dispatch
from diffusers.models.transformers import transformer_wan
from torch import nn

import fp8_models
from checks import relative_distance
from families import FAMILIES, run
from family import make_all_matter
from family_relatives import copy_of_wan, inputs_of_copy
from graphs import module_of
from ranks import in_ranks
from small_models import to

HEADS = {"heads": 4, "head_dim": 16}
ULYSSES, RING, BOTH = (
    {"ulysses_degree": 2},
    {"ring_degree": 2},
    {"ulysses_degree": 2, "ring_degree": 2},
)
ULYSSES_4, RING_4 = {"ulysses_degree": 4}, {"ring_degree": 4}
ULYSSES_8, RING_8 = {"ulysses_degree": 8}, {"ring_degree": 8}
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
    "helios": ({"tokens": 13}, {"tokens": 13, "batch": 1}),
    "anyflow": ({}, {"batch": 1}),
    "minimax_h3": ({"text_length": 7}, {"text_length": 7, "batch": 1}),
    "hunyuan_video": ({}, {"batch": 1}),
    "motif_video": ({}, {"batch": 1}),
    "cogvideox": ({}, {"rotates": False}),
    "allegro": ({}, {"rotates": False}, {"batch": 1, "mask": None}),
    "easyanimate": ({}, {"batch": 1}),
    "sd3": ({}, {"batch": 1}),
    "z_image": ({}, {"prompts": (40, 6)}),
    "kandinsky6": ({}, {"mask": "padded"}),
}
# The option with which 8 ranks share a family's tokens evenly, unless it is 1.
TOKENS_OF_8_RANKS = {
    **dict.fromkeys(("ltx", "ltx2", "minimax_h3"), 2),
    **dict.fromkeys(("wan", "anyflow", "hunyuan_video", "motif_video"), 3),
    **dict.fromkeys(("cogvideox", "allegro", "kandinsky6"), 3),
    **dict.fromkeys(("flux", "flux2", "qwenimage", "sd3"), 5),
    "helios": 31,
}


def parallelize(kernel, model, how):
    """``enable_parallelism``, which counts devices, with the package's plan where diffusers has none."""
    plan = None if model._cp_plan is not None else kernel.context_parallel_plan(model)
    model.enable_parallelism(config=ContextParallelConfig(**how), cp_plan=plan)


class Errors:
    """Errors against the float64 model, of one model's forwards and of the eager model's."""

    def __init__(self, family, plain):
        self.family, self.plain, self.exact = family, plain, family.in_float64(copy.deepcopy(plain))
        self.squares = torch.zeros(3, dtype=torch.float64)
        self.known = {}

    def add(self, out, arguments, key=None):
        """``key``: names arguments whose results are kept, to be used again."""
        if key is None or key not in self.known:
            exact = self.family.cast(arguments, torch.float64)
            self.known[key] = run(self.exact, exact), run(self.plain, arguments)
        expected, eager = self.known[key]
        differences = out.double() - expected, eager.double() - expected, expected
        self.squares += torch.stack([x.square().sum() for x in differences])

    def check(self):
        """As close as the contract asks for. In float32 a sum's order makes a difference."""
        error, eager, scale = self.squares.sqrt().tolist()
        self.squares.zero_()
        assert error <= max(1.05 * eager, 2e-6 * scale), (
            f"{error / scale:.3g} > {eager / scale:.3g}"
        )


def model_of(name, dtype=torch.float32, **config):
    """Its family, the model, and the same model without kernels and parallelism."""
    family = FAMILIES[name]
    model = family.model("cpu", dtype, **HEADS | config)
    return family, model, copy.deepcopy(model)


def inputs_of(family, dtype=torch.float32, options=None, seed=5):
    arguments = family.inputs("cpu", dtype, seed=seed, **EVEN_TEXT | (options or {}))
    if family.name == "flux2":  # as its pipeline passes them
        arguments.update({key: arguments[key][None] for key in ("img_ids", "txt_ids")})
    return arguments


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


def assert_all_on_kernels(report):
    left = [calls for calls in report.calls if calls.fell_back or calls.own_attention]
    assert not left, left


def check_family(kernel, name, modes):
    """With all inputs of the family, in float32 and in 16 bits, injected before and after."""
    prepare_rank()
    heads, tokens = {}, {}
    if dist.get_world_size() == 8:
        heads, tokens = {"heads": 8}, {"tokens": TOKENS_OF_8_RANKS.get(name, 1)}
    for dtype, is_injected_first in ((torch.float32, True), (torch.bfloat16, False)):
        family, _, plain = model_of(name, dtype, **heads)
        errors = Errors(family, plain)
        for how in modes:
            for options in (each | tokens for each in INPUTS[name]):
                model = copy.deepcopy(plain)
                if is_injected_first:
                    report = kernel.inject_kernels(model)
                    run(model, inputs_of(family, dtype, options))
                parallelize(kernel, model, how)
                if not is_injected_first:
                    report = kernel.inject_kernels(model)
                for seed in range(2 if dtype == torch.float32 else 4):
                    arguments = inputs_of(family, dtype, options, seed)
                    errors.add(run(model, arguments), arguments, (str(options), seed))
                if dtype == torch.float32:
                    errors.check()
                else:
                    assert_all_on_kernels(report)
        if dtype == torch.bfloat16:  # of all inputs: the errors of few are noise
            errors.check()


@pytest.mark.whole
@pytest.mark.parametrize("name", ["ltx", "flux", "wan", "sd3"])
@in_ranks
def test_some_families(kernel, name):
    check_family(kernel, name, (ULYSSES, RING))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        *((2, how) for how in (ULYSSES, RING, UNEVEN, UNEVEN_RING)),
        *((4, how) for how in (ULYSSES_4, RING_4, BOTH)),
        *((8, how) for how in (ULYSSES_8, RING_8)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("name", [name for name in INPUTS if name in FAMILIES])
@in_ranks
def test_every_family(kernel, name, ranks, how):
    check_family(kernel, name, (how,))


@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan_video", "qwenimage"])
@in_ranks
def test_uneven_tokens_and_heads(kernel, name):
    """Tokens and heads that the ranks cannot share evenly."""
    prepare_rank()
    family = FAMILIES[name]
    plain = family.model("cpu", heads=3, head_dim=16)
    errors = Errors(family, plain)
    for how in (UNEVEN, UNEVEN_RING):
        model = copy.deepcopy(plain)
        kernel.inject_kernels(model)
        parallelize(kernel, model, how)
        for tokens, text_length in ((2, 7), (3, 5), (2, 6)):
            arguments = family.inputs("cpu", seed=3, tokens=tokens, text_length=text_length)
            errors.add(run(model, arguments), arguments, (tokens, text_length))
        errors.check()


@in_ranks
def test_uneven_tokens_or_heads_without_the_option_raise(kernel):
    prepare_rank()
    uneven = FAMILIES["flux"].inputs("cpu", tokens=2, text_length=7)
    for heads, arguments, error, text in (
        (4, uneven, AssertionError, "divisible"),  # of diffusers
        (3, inputs_of(FAMILIES["flux"]), ValueError, "must divide the number of heads, got 3"),
    ):
        model = FAMILIES["flux"].model("cpu", heads=heads, head_dim=16)
        kernel.inject_kernels(model)
        parallelize(kernel, model, ULYSSES)
        with pytest.raises(error, match=text):
            run(model, arguments)


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


@pytest.mark.parametrize("name", ["flux", "wan", "qwenimage", "z_image"])
@in_ranks
def test_one_rank_runs_the_models_own_code(kernel, rank, name):
    """One rank runs the model's own code, others the kernels. None waits, and the results are right."""
    prepare_rank()
    family, _, plain = model_of(name)
    errors = Errors(family, plain)
    arguments = inputs_of(family, options={"mask": "padded"} if name == "qwenimage" else {})
    for how in (ULYSSES, RING):
        model = copy.deepcopy(plain)
        kernel.inject_kernels(model)
        parallelize(kernel, model, how)
        with global_hook(rank == 0):
            errors.add(run(model, arguments), arguments, "only")
        if rank == 1:
            family.part(model, "attention").register_forward_hook(lambda *_: None)
            family.part(model, "block").register_forward_pre_hook(lambda *_: None)
            family.part(model, "linear").register_forward_hook(lambda *_: None)
        errors.add(run(model, arguments), arguments, "only")
        if rank == 1:
            kernel.eject_kernels(model)
            kernel.inject_kernels(model, attention=False)
        errors.add(run(model, arguments), arguments, "only")
        errors.check()
        attention = family.part(model, "attention")
        assert attention.processor._attention_backend is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sd3", "attends to this rank's tokens only"),
        ("cogvideox", "attends to this rank's tokens only"),
        ("easyanimate", "attends to this rank's tokens only"),
        ("hunyuan_video", "does not split the mask"),
        ("motif_video", "does not split the mask"),
    ],
)
@in_ranks
def test_own_code_that_would_be_wrong_raises(kernel, name, reason):
    """The own code of these attentions knows their rank's tokens only."""
    prepare_rank()
    family, model, _ = model_of(name)
    kernel.inject_kernels(model)
    parallelize(kernel, model, ULYSSES)
    with global_hook(True), pytest.raises(RuntimeError, match=reason):
        run(model, inputs_of(family))


@pytest.mark.whole
def test_kernels_stay_where_the_own_code_would_be_wrong(kernel):
    """Nothing is ejected from a model, a part or a pipeline whose own attention would be wrong.

    Here the model only claims to be parallel."""
    claimed = SimpleNamespace(context_parallel_config=object())
    other = FAMILIES["flux"].model("cpu")
    report = kernel.inject_kernels(other)
    for name in ("sd3", "cogvideox", "hunyuan_video"):
        family, model, _ = model_of(name)
        kernel.inject_kernels(model)
        model._parallel_config = claimed
        attention = family.part(model, "attention")
        add_hook_to_module(attention, ModelHook())  # it keeps the kernels' forward elsewhere
        pipeline = SimpleNamespace(components={"other": other, "transformer": model})
        for target in (model, pipeline, family.part(model, "block"), attention):
            with pytest.raises(RuntimeError, match="^eject_kernels: .* context parallelism; "):
                kernel.eject_kernels(target)
        for each in (model, other):
            assert kernel.inject_kernels(each).already_injected
        model._parallel_config = None
        kernel.eject_kernels(model)
        assert not kernel.inject_kernels(model).already_injected
    # diffusers' own attention knows FLUX.1's parallelism.
    other._parallel_config = claimed
    kernel.eject_kernels(other)
    assert report.replaced and not kernel.inject_kernels(other).already_injected


@pytest.mark.whole
@in_ranks
def test_hooks_on_shared_norms(kernel):
    """Those of query and key get the tokens of both streams, as in the model."""
    check_hooks(kernel, "cogvideox", ("block", "attention", "qk_norm", "linear"))


@pytest.mark.slow
@pytest.mark.drawn(times=0, period=3)
@pytest.mark.parametrize("name", [name for name in INPUTS if name in FAMILIES])
@in_ranks
def test_hooks_on_every_part(kernel, name):
    check_hooks(kernel, name)


def check_hooks(kernel, name, kinds=None):
    """On parts of these kinds or on each, one by one; then offloading, which hooks all innermost modules."""
    prepare_rank()
    family, model, plain = model_of(name)
    kernel.inject_kernels(model)
    parallelize(kernel, model, ULYSSES)
    arguments = inputs_of(family, options=INPUTS[name][0])
    paths = [path for path, _ in plain.named_modules()]
    paths = {re.sub(r"\d+", "0", path): path for path in reversed(paths)}.values()
    for path in paths if kinds is None else map(family.parts.get, kinds):
        handles = [m.get_submodule(path).register_forward_hook(scaled) for m in (model, plain)]
        assert relative_distance(run(model, arguments), run(plain, arguments)) < 1e-5, path
        for handle in handles:
            handle.remove()
    expected = run(plain, arguments)
    model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    assert relative_distance(run(model, arguments), expected) < 2e-6


def scaled(module, args, output):
    """A hook that changes a result of tokens."""
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return output * 1.25
    return None


# ------------------------------------------------------------------------------------------------
# Other orders, other users


@pytest.mark.parametrize("name", ["flux", "wan", "qwenimage"])
@in_ranks
def test_backend_and_orders(kernel, name):
    prepare_rank()
    backend = kernel.register_attention_backend()
    family, _, plain = model_of(name)
    errors = Errors(family, plain)
    arguments = inputs_of(family, options={"mask": "padded"} if name == "qwenimage" else {})
    for how in (ULYSSES, RING):
        model = copy.deepcopy(plain)
        # The backend alone, without the injection.
        model.set_attention_backend(backend)
        parallelize(kernel, model, how)
        errors.add(run(model, arguments), arguments, "only")
        # The injection follows the choice, and leaves nothing behind.
        kernel.inject_kernels(model)
        errors.add(run(model, arguments), arguments, "only")
        kernel.eject_kernels(model)
        errors.add(run(model, arguments), arguments, "only")
        errors.check()
    # diffusers' own attention, chosen by the user, on the values that the kernels wrote.
    model = copy.deepcopy(plain)
    model.set_attention_backend("native")
    kernel.inject_kernels(model)
    parallelize(kernel, model, ULYSSES)
    errors.add(run(model, arguments), arguments, "only")
    errors.check()


@pytest.mark.parametrize("how", [ULYSSES, RING], ids=["ulysses", "ring"])
@in_ranks
def test_backend_alone(kernel, rank, how):
    """Six heads that share two or three keys, and a mask that is not this rank's."""
    prepare_rank()
    backend = kernel.register_attention_backend()
    _, model, _ = model_of("flux")
    parallelize(kernel, model, how)
    config = model._parallel_config
    for key_heads in (2, 3):
        q, k, v = (torch.randn(1, 8, count, 16) for count in (6, key_heads, key_heads))
        options = {"enable_gqa": True, "backend": backend}
        expected = attention_dispatch.dispatch_attention_fn(q, k, v, **options)
        own = [x.chunk(2, dim=1)[rank] for x in (q, k, v, expected)]
        out = attention_dispatch.dispatch_attention_fn(*own[:3], parallel_config=config, **options)
        assert relative_distance(out, own[3]) < 2e-6
    q, mask = torch.randn(1, 4, 4, 16), torch.ones(1, 1, 1, 8, dtype=torch.bool)
    options = {"backend": backend, "parallel_config": config}
    with pytest.raises(ValueError, match="cannot be split .* another number of keys"):
        attention_dispatch.dispatch_attention_fn(q, q, q, attn_mask=mask, **options)


@in_ranks
def test_replaced_dispatch(kernel):
    """A user's own function gets diffusers' parallelism, and runs."""
    prepare_rank()
    given, original = [], transformer_wan.dispatch_attention_fn

    @functools.wraps(original)
    def dispatch(*args, parallel_config, **kwargs):
        given.append(parallel_config)
        return original(*args, parallel_config=parallel_config, **kwargs)

    family, model, plain = model_of("wan")
    kernel.inject_kernels(model)
    parallelize(kernel, model, ULYSSES)
    arguments = inputs_of(family)
    expected = run(plain, arguments)
    transformer_wan.dispatch_attention_fn = dispatch
    assert relative_distance(run(model, arguments), expected) < 2e-6
    assert given == [model._parallel_config, None] * 2


@pytest.mark.parametrize("name", ["flux", "wan", "ltx", "flux2", "qwenimage"])
@in_ranks
def test_fp8(kernel, name):
    """Linear layers in FP8: products of query, key and value in one launch, quantized hand-over."""
    pytest.importorskip("torchao")
    prepare_rank()
    family, _, plain = model_of(name, torch.bfloat16)
    for path in family.block_lists:
        fp8_models.quantize(plain.get_submodule(path))
    arguments = inputs_of(family, torch.bfloat16, {"mask": None} if name == "ltx" else {})
    whole = copy.deepcopy(plain)
    kernel.inject_kernels(whole)
    expected = run(whole, arguments)
    for how in (ULYSSES, RING):
        model = copy.deepcopy(plain)
        report = kernel.inject_kernels(model)
        parallelize(kernel, model, how)
        assert relative_distance(run(model, arguments), expected) < 0.03, how
        assert_all_on_kernels(report)


@pytest.mark.parametrize("name", ["flux", "wan"])
@in_ranks
def test_int8_attention(kernel, name):
    """With Ulysses a rank has the queries of all ranks. They decide whether it computes in 8 bits."""
    prepare_rank()
    decision = module_of(kernel, "attention.decision")
    decision.INT8_ABOVE_HEAD_DIM = 8
    family, _, plain = model_of(name, torch.bfloat16)
    arguments = inputs_of(family, torch.bfloat16, {"tokens": 3})
    for how, decision.INT8_MIN_TOKENS in ((ULYSSES, 20), (RING, 10), (RING, 40)):
        out, counts = [], []
        for is_parallel in (False, True):
            model = copy.deepcopy(plain)
            report = kernel.inject_kernels(model, attention="int8")
            if is_parallel:
                parallelize(kernel, model, how)
            out.append(run(model, arguments))
            counts.append([calls.in_int8 for calls in report.calls])
            assert_all_on_kernels(report)
        assert relative_distance(*out) < 0.03
        assert counts[0] == counts[1] and any(counts[0]) == (decision.INT8_MIN_TOKENS < 40)


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
@in_ranks
def test_gradients(kernel, name):
    """The ranks' gradients, added, are those of one process."""
    prepare_rank()
    family, _, plain = model_of(name)
    arguments = inputs_of(family)

    def gradient_of(model):
        model(**arguments, return_dict=False)[0].square().sum().backward()
        return family.part(model, "linear").weight.grad

    models = [copy.deepcopy(plain) for _ in (ULYSSES, RING)]
    expected = gradient_of(plain)
    for model, how in zip(models, (ULYSSES, RING), strict=True):
        kernel.inject_kernels(model)
        parallelize(kernel, model, how)
        gradient = gradient_of(model)
        dist.all_reduce(gradient)
        assert relative_distance(gradient, expected) < 1e-5


def use_shared_files(kernel, folder):
    """Peer memory of ranks on CPUs: files that all of them map. A write of one is seen by all."""
    module = module_of(kernel, "parallel.peer_memory")

    class SharedFiles(module.PeerMemory):
        sizes = []

        def _set_up(self):
            self._barrier()

        def _allocate(self, size):
            name = f"{folder}/{self._group.group_name}-{len(self.sizes)}"
            self.sizes.append(size)
            files = [f"{name}-{rank}" for rank in range(self._size)]
            tensors = [torch.from_file(f, True, size, dtype=torch.uint8) for f in files]
            self._barrier()
            return tensors

        def _on_stream(self):
            return contextlib.nullcontext()

        def _barrier(self):
            dist.barrier(self._group)

    module.PEERS["cpu"] = SharedFiles
    return SharedFiles


# The inputs of families, and the buffers of what is gathered, unless there is a ring. Gathers take turns.
WITH_PEERS = {
    "flux": ({}, set()),
    "wan": ({}, set()),
    "hunyuan_video": ({}, {"bias 0"}),
    "qwenimage": ({}, set()),
    "ltx": (
        {"tokens": 5},
        {f"{each} {i}" for each in ("all keys", "all values", "bias") for i in (0, 1)},
    ),
}


@pytest.mark.parametrize(("ranks", "how"), [(2, ULYSSES), (4, BOTH)], ids=["ulysses", "both"])
@in_ranks
def test_peer_memory(kernel, how, ranks, tmp_path):
    """The same bits as by collectives, for more tokens in larger buffers, and for fewer in the same."""
    prepare_rank()
    module = module_of(kernel, "parallel.peer_memory")
    for name, (options, gathered) in WITH_PEERS.items():
        family, model, _ = model_of(name)
        kernel.inject_kernels(model)
        parallelize(kernel, model, how)
        calls = [inputs_of(family, options=options | {"batch": batch}) for batch in (1, 2, 1)]
        expected = [run(model, arguments) for arguments in calls]
        files = use_shared_files(kernel, tmp_path)
        with torch.no_grad():
            for arguments, output in zip(calls, expected, strict=True):
                torch.testing.assert_close(run(model, arguments), output, rtol=0, atol=0)
        config = model._parallel_config.context_parallel_config
        buffers = module.peer_memory(config, torch.device("cpu"))._buffers
        names = {"query", "key", "value", "result"}
        assert buffers.keys() == (names if how == BOTH else names | gathered), name
        assert len(files.sizes) == 2 * len(buffers)
        del module.PEERS["cpu"]


@in_ranks
def test_a_gather_on_cpus_is_not_in_flight(kernel):
    """Gloo's all-gather corrupts memory while other collectives are in flight."""
    prepare_rank()
    exchange = module_of(kernel, "parallel.exchange")
    gathered = exchange._all_gather(torch.ones(2, 3), dist.group.WORLD)
    assert type(gathered) is torch.Tensor and torch.equal(gathered, torch.ones(4, 3))


# ------------------------------------------------------------------------------------------------
# Tokens that cannot be split evenly, and copies


def helios():
    family = FAMILIES["helios"]
    return family.model("cpu"), family.inputs("cpu", seed=3)


def chronoedit():
    name = "ChronoEditTransformer3DModel"
    model = copy_of_wan(name, num_attention_heads=4)
    make_all_matter(model, (), "condition_embedder.time")
    torch.manual_seed(3)
    return model, inputs_of_copy(name, "cpu")


def kandinsky5():
    """It rounds to bfloat16 in each dtype."""
    import every_model

    small = every_model.NEW["Kandinsky5Transformer3DModel"]
    return [each("cpu", torch.bfloat16) for each in (small.model, small.arguments)]


@pytest.mark.parametrize(
    ("make", "modes"),
    [
        (helios, (UNEVEN, UNEVEN_RING)),
        (chronoedit, (ULYSSES, RING)),
        (kandinsky5, (ULYSSES, UNEVEN_RING)),
    ],
)
@in_ranks
def test_other_models(kernel, make, modes):
    prepare_rank()
    plain, arguments = make()
    if make is kandinsky5:
        expected, limit = run(plain, arguments), 0.01
    else:
        expected = run(copy.deepcopy(plain).double(), to(arguments, "cpu", torch.float64))
        limit = 2e-6
    for how in modes:
        model = copy.deepcopy(plain)
        kernel.inject_kernels(model)
        parallelize(kernel, model, how)
        assert relative_distance(run(model, arguments), expected) < limit, how


@pytest.mark.parametrize("how", [ULYSSES, RING], ids=["ulysses", "ring"])
@in_ranks
def test_plan_of_the_user(kernel, how):
    """Chroma by a plan like FLUX.1's. diffusers skips its processors."""
    prepare_rank()
    family, model, plain = model_of("chroma")
    kernel.inject_kernels(model)
    plan = FAMILIES["flux"].model("cpu")._cp_plan
    model.enable_parallelism(config=ContextParallelConfig(**how), cp_plan=plan)
    arguments = inputs_of(family)
    assert relative_distance(run(model, arguments), run(plain, arguments)) < 2e-6


def test_plans(kernel):
    """diffusers' own plan, ours, or an error; the tensors that a plan names exist."""
    for name, family in FAMILIES.items():
        model = family.model("cpu", **HEADS)
        if name in INPUTS:
            plan = kernel.context_parallel_plan(model)
            assert plan == model._cp_plan if model._cp_plan is not None else plan
        else:
            with pytest.raises(ValueError, match=f"got an? {type(model).__name__}"):
                kernel.context_parallel_plan(model)
    model = FAMILIES["hunyuan_video"].model("cpu", image_condition_type="token_replace")
    with pytest.raises(ValueError, match="tokens of the first frame"):
        kernel.context_parallel_plan(model)

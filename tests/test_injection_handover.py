"""A block touches nothing of another block before its turn, and nothing stale is ever used.

What changes weights, time embedding or hidden states between two blocks may leave no trace: no
version counter counts writes through ``.data``, NumPy or DLPack.
"""

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn
from torch.utils import dlpack

from foreign_modules import Wrap
from injected_pairs import SLACK, assert_alike, distance, pair
from ltx_models import either_order, inputs, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

BLOCKS = 3
AFFINE = {"blocks": BLOCKS, "norm_elementwise_affine": True}


@torch.inference_mode()
def run_in_inference_mode(model, arguments):
    arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return model(**arguments, return_dict=False)[0].clone()


every_mode = pytest.mark.parametrize("forward", [run, run_in_inference_mode])


# ------------------------------------------------------------------------------------------------
# What is changed between two blocks


class Model:
    """A model's blocks and norms, which wrappers may hide later, and its forward's time embedding."""

    def __init__(self, model):
        self.blocks = list(model.transformer_blocks)
        self.norms = [(block.norm1, block.norm2) for block in self.blocks]
        self.act = None
        self.temb = None
        model.time_embed.register_forward_hook(self._keep)

    def _keep(self, module, args, output):
        self.temb = output[0]

    def do(self, i):
        if self.act is not None:
            self.act(self, i)

    def next_block(self, i):
        return self.blocks[(i + 1) % len(self.blocks)]

    def next_norm(self, i):
        return self.norms[(i + 1) % len(self.blocks)][0]


def write_temb(state, i):
    state.temb.data.mul_(0.8)


def write_table_of_the_next(state, i):
    state.next_block(i).scale_shift_table.data.mul_(1.2)


def write_own_table(state, i):
    state.blocks[i].scale_shift_table.data.mul_(1.2)


def replace_table_of_the_next(state, i):
    block = state.next_block(i)
    block.scale_shift_table = nn.Parameter(block.scale_shift_table.detach() + 0.3)


def write_norm_of_the_next(state, i):
    state.next_norm(i).weight.data.mul_(1.2)


def replace_norm_of_the_next(state, i):
    norm = state.next_norm(i)
    norm.weight = nn.Parameter(norm.weight.detach() * 1.2)


def change_eps_of_the_next(state, i):
    state.next_norm(i).eps += 0.5


def write_own_second_norm(state, i):
    state.norms[i][1].weight.data.mul_(1.2)


ACTS = [
    write_temb,
    write_table_of_the_next,
    write_own_table,
    replace_table_of_the_next,
    write_norm_of_the_next,
    replace_norm_of_the_next,
    change_eps_of_the_next,
    write_own_second_norm,
]


# By what it is changed: (module, what it is a part of, its name there, what to do)


def by_forward_hook(module, parent, name, act):
    module.register_forward_hook(lambda *args: act())


def by_forward_pre_hook(module, parent, name, act):
    module.register_forward_pre_hook(lambda *args: act())


def by_diffusers_hook(module, parent, name, act):
    class Acting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            act()
            return args, kwargs

    HookRegistry.check_if_exists_or_initialize(module).register_hook(Acting(), "acting")


def by_forward_on_the_instance(module, parent, name, act):
    original = module.forward

    def forward(*args, **kwargs):
        act()
        return original(*args, **kwargs)

    module.forward = forward


def by_module_around(module, parent, name, act):
    setattr(parent, name, Wrap(module, act))


def by_subclass(module, parent, name, act):
    original = type(module).forward

    def forward(self, *args, **kwargs):
        act()
        return original(self, *args, **kwargs)

    module.__class__ = type("Acting", (type(module),), {"forward": forward})


MEANS = [
    by_forward_hook,
    by_forward_pre_hook,
    by_diffusers_hook,
    by_forward_on_the_instance,
    by_module_around,
    by_subclass,
]
every_means = pytest.mark.parametrize("means", MEANS, ids=lambda means: means.__name__)

PLACES = ["", "norm1", "attn1", "attn1.norm_q", "attn1.to_q", "norm2", "attn2", "ff", "ff.net.2"]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place or "block")
@every_means
@either_order
def test_changes_by_a_module_of_the_blocks(kernel, device, place, means, is_injected_first):
    states = []

    def change(model):
        state = Model(model)
        states.append(state)
        for i in range(BLOCKS):
            path = f"transformer_blocks.{i}" + (f".{place}" if place else "")
            parent, _, name = path.rpartition(".")
            module = model.get_submodule(path)
            means(module, model.get_submodule(parent), name, lambda i=i: state.do(i))

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **AFFINE)
    arguments = inputs(plain)
    for act in ACTS:
        for state in states:
            state.act = None
        unlike = run(plain, arguments)
        for state in states:
            state.act = act
        # The last block's act is for the next forward only.
        for _ in range(2):
            expected, out = run(plain, arguments), run(model, arguments)
            assert distance(out, expected) < SLACK[torch.float32], act.__name__
        assert distance(unlike, expected) > 1e-3, f"{act.__name__} has no effect"


@every_mode
def test_the_table_is_replaced_as_a_block_begins(kernel, device, forward):
    """As block swapping does it."""

    def replace(block, args):
        block.scale_shift_table = nn.Parameter(block.scale_shift_table + 1)

    def change(model):
        for block in model.transformer_blocks:
            block.register_forward_pre_hook(replace)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    assert_alike(model, plain, forward=forward, times=3)


# What a single block of many does: the blocks before it were looked at ahead of their calls.
MANY_BLOCKS, ACTING_BLOCK = 8, 4


def write_tables(block):
    block.scale_shift_table.data.mul_(1.2)


def replace_tables(block):
    block.scale_shift_table = nn.Parameter(block.scale_shift_table.detach() + 0.3)


def change_eps(block):
    block.norm1.eps += 0.5


def replace_norms_of_queries(block):
    block.attn1.norm_q = nn.Identity()


def hook_outputs(block):
    block.attn2.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("place", ["", "attn1.norm_q", "ff.net.2"], ids=lambda p: p or "block")
@pytest.mark.parametrize(
    "act", [write_tables, replace_tables, change_eps, replace_norms_of_queries, hook_outputs]
)
@every_means
@either_order
def test_one_block_changes_all_others(kernel, device, place, act, means, is_injected_first):
    states = []

    def change(model):
        blocks = list(model.transformer_blocks)
        state = {"is_due": False}
        states.append(state)

        def act_once():
            if state.pop("is_due", False):
                for block in blocks[:ACTING_BLOCK] + blocks[ACTING_BLOCK + 1 :]:
                    act(block)

        path = f"transformer_blocks.{ACTING_BLOCK}" + (f".{place}" if place else "")
        parent, _, name = path.rpartition(".")
        means(model.get_submodule(path), model.get_submodule(parent), name, act_once)

    model, plain, _ = pair(
        kernel, device, change, is_injected_first=is_injected_first, blocks=MANY_BLOCKS
    )
    arguments = inputs(plain)
    unlike = run(plain, arguments)
    run(model, arguments)
    for state in states:
        state["is_due"] = True
    assert_alike(model, plain, arguments, unlike=unlike)


def test_a_hook_changes_and_calls_an_earlier_block(kernel, device):
    def change(model):
        earlier = model.transformer_blocks[1]

        def call(block, args, kwargs, output):
            earlier.norm2.eps += 0.5
            return earlier(**{**kwargs, "hidden_states": output})

        model.transformer_blocks[ACTING_BLOCK].register_forward_hook(call, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=MANY_BLOCKS)
    assert_alike(model, plain, times=3)


@pytest.mark.parametrize("act", [write_temb, write_table_of_the_next, replace_table_of_the_next])
def test_changes_by_a_hook_on_all_modules(kernel, device, act):
    models = pair(kernel, device, blocks=BLOCKS)[:2]
    arguments = inputs(models[1])
    unlike = run(models[1], arguments)
    owner = {}
    for model in models:
        state = Model(model)
        owner.update({id(block): (state, i) for i, block in enumerate(state.blocks)})

    def hook(module, args, output):
        if id(module) in owner:
            act(*owner[id(module)])

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert_alike(*models, arguments, unlike=unlike)
    finally:
        handle.remove()


class SwappingList(nn.ModuleList):
    """No block has a hook: what is between two of them is the list that the model goes through."""

    act = None

    def __iter__(self):
        for i, block in enumerate(super().__iter__()):
            if self.act is not None:
                self.act(i)
            yield block


def write_own_first_norm(state, i):
    state.norms[i][0].weight.data.mul_(1.2)


def replace_own_table(state, i):
    replace_table_of_the_next(state, i - 1)


@pytest.mark.parametrize(
    "act", [write_temb, write_own_table, replace_own_table, write_own_first_norm]
)
@every_mode
@either_order
def test_changes_by_the_list_of_blocks(kernel, device, act, forward, is_injected_first):
    arguments = inputs(transformer(device, **AFFINE))
    unlike = run(transformer(device, **AFFINE), arguments)

    def change(model):
        state = Model(model)
        model.transformer_blocks = SwappingList(model.transformer_blocks)
        model.transformer_blocks.act = lambda i: act(state, i)

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **AFFINE)
    assert_alike(model, plain, arguments, unlike=unlike, forward=forward)


# ------------------------------------------------------------------------------------------------
# Hidden states that are written without a trace


_untraced = torch.library.Library("h100_diffusers_kernels_tests", "FRAGMENT")
_untraced.define("increase(Tensor x) -> ()")
_untraced.impl("increase", lambda x: write_data(x), "CompositeExplicitAutograd")


def write_data(x):
    x.data[..., ::2] += 1


def write_numpy(x):
    if x.device.type != "cpu":
        pytest.skip("NumPy shares memory with the CPU only")
    x.detach().numpy()[..., ::2] += 1


def write_dlpack(x):
    dlpack.from_dlpack(dlpack.to_dlpack(x.detach()))[..., ::2] += 1


def write_storage(x):
    view = torch.empty(0, dtype=x.dtype, device=x.device)
    view.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())[..., ::2] += 1


def write_by_an_operator(x):
    """One that does not say that it writes its argument."""
    torch.ops.h100_diffusers_kernels_tests.increase(x)


def exchange_data(x):
    """Another storage in the same tensor object."""
    x.data = x.data + torch.tensor([1.0, 0.0], device=x.device).repeat(x.shape[-1] // 2)


every_write = pytest.mark.parametrize(
    "write",
    [
        write_data,
        write_numpy,
        write_dlpack,
        write_storage,
        write_by_an_operator,
        exchange_data,
    ],
    ids=lambda write: write.__name__,
)


@every_write
def test_the_writes_leave_no_trace(write):
    x = torch.zeros(2, 4)
    write(x)
    assert x.any() and x._version == 0


@every_write
@every_mode
@either_order
def test_a_hook_writes_a_blocks_output(kernel, device, write, forward, is_injected_first):
    if forward is run_in_inference_mode and write is exchange_data:
        pytest.skip("tensors of inference mode cannot be given other data")

    def change(model):
        for block in model.transformer_blocks:
            block.register_forward_hook(lambda module, args, output: write(output))

    model, plain, _ = pair(
        kernel, device, change, is_injected_first=is_injected_first, blocks=BLOCKS
    )
    arguments = inputs(plain)
    unlike = run(transformer(device, blocks=BLOCKS), arguments)
    assert_alike(model, plain, arguments, unlike=unlike, forward=forward)


@pytest.mark.parametrize("is_pre_hook", [True, False], ids=["before", "after"])
def test_a_hook_writes_the_time_embedding(kernel, device, is_pre_hook):
    def halve(module, args, kwargs, output=None):
        kwargs["temb"].data.mul_(0.5)

    def change(model):
        for block in model.transformer_blocks:
            if is_pre_hook:
                block.register_forward_pre_hook(halve, with_kwargs=True)
            else:
                block.register_forward_hook(halve, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(plain)
    unlike = run(transformer(device, blocks=BLOCKS), arguments)
    assert_alike(model, plain, arguments, unlike=unlike)


@pytest.mark.parametrize("place", ["norm1", "attn1", "norm2", "attn2", "ff", "ff.net.0"])
@every_write
def test_a_hook_writes_the_input_of_a_part(kernel, device, place, write):
    """Which may be the hidden states of the whole block."""

    def hook(module, args, kwargs):
        write(args[0] if args else kwargs["hidden_states"])

    def change(model):
        for block in model.transformer_blocks:
            block.get_submodule(place).register_forward_pre_hook(hook, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(plain)
    unlike = run(transformer(device, blocks=BLOCKS), arguments)
    assert_alike(model, plain, arguments, unlike=unlike)


@every_write
def test_a_hook_on_a_part_writes_what_the_block_before_left(kernel, device, write):
    """The hidden states are kept by a hook of the model's, and written by one inside of a block."""

    def change(model):
        kept = []
        model.proj_in.register_forward_hook(lambda module, args, output: kept.append(output))
        for block in model.transformer_blocks:
            block.attn2.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
            block.ff.register_forward_pre_hook(lambda module, args: write(kept[-1]))

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    assert_alike(model, plain)


# ------------------------------------------------------------------------------------------------
# A loop of the user's own over the blocks


def given_to_blocks(plain, arguments):
    """The keyword arguments of the first block, with copies of the tensors."""
    given = {}

    class Enough(Exception):
        pass

    def keep(module, args, kwargs):
        given.update(kwargs)
        raise Enough

    handle = plain.transformer_blocks[0].register_forward_pre_hook(keep, with_kwargs=True)
    with pytest.raises(Enough):
        run(plain, arguments)
    handle.remove()
    return given


def looping(between, has_own_rope):
    """A forward that goes through the blocks itself, with `between(hidden_states, temb, block)` before
    each, and the rotary embedding that the model makes or that a plain one made."""

    @torch.no_grad()
    def forward(model, arguments):
        given = given_to_blocks(transformer(model.device, blocks=BLOCKS), arguments)
        if has_own_rope:
            names = ("num_frames", "height", "width", "rope_interpolation_scale")
            positions = [arguments[name] for name in names]
            given["image_rotary_emb"] = model.rope(given["hidden_states"], *positions)
        x, temb = given.pop("hidden_states"), given["temb"]
        for block in model.transformer_blocks:
            between(x, temb, block)
            x = block(hidden_states=x, **given)
        return x

    return forward


BETWEEN = {
    "nothing": lambda x, temb, block: None,
    "hidden_states": lambda x, temb, block: write_data(x),
    "hidden_states_by_dlpack": lambda x, temb, block: write_dlpack(x),
    "temb": lambda x, temb, block: temb.data.mul_(0.5),
    "table": lambda x, temb, block: block.scale_shift_table.data.mul_(1.2),
    "norm": lambda x, temb, block: setattr(block.norm1, "eps", block.norm1.eps + 0.5),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("has_own_rope", [True, False], ids=["its_rope", "a_plain_rope"])
def test_a_loop_over_the_blocks(kernel, device, between, has_own_rope):
    model, plain, _ = pair(kernel, device, blocks=BLOCKS)
    assert_alike(model, plain, forward=looping(BETWEEN[between], has_own_rope))


def test_a_loop_in_the_models_forward(kernel, device):
    """A forward of the model's own that the user wrote around the blocks."""
    loop = looping(BETWEEN["hidden_states"], has_own_rope=True)

    def change(model):
        model.forward = lambda return_dict, **arguments: (loop(model, arguments),)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    assert_alike(model, plain)


def test_a_loop_after_a_forward_that_failed(kernel, device):
    """Nothing of the forward that stopped in the middle is used after it."""
    model, plain, _ = pair(kernel, device, blocks=BLOCKS)
    arguments = inputs(plain)
    given = {}

    def keep(module, args, kwargs):
        given.update(kwargs)
        raise KeyboardInterrupt

    handle = model.transformer_blocks[1].attn1.register_forward_pre_hook(
        lambda *args: keep(*args), with_kwargs=True
    )
    outputs = []
    kept = model.transformer_blocks[0].ff.register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    with pytest.raises(KeyboardInterrupt):
        run(model, arguments)
    handle.remove()
    kept.remove()
    assert given and outputs
    assert_alike(model, plain, forward=looping(BETWEEN["hidden_states"], has_own_rope=False))
    assert_alike(model, plain, arguments)


def test_a_block_is_called_twice(kernel, device):
    """By a hook, inside of the model's forward, and with other hidden states."""

    def again(block, args, kwargs, output):
        handle = handles.pop(block)
        handle.remove()
        output = block(*args, **{**kwargs, "hidden_states": output.mul(0.5)})
        handles[block] = block.register_forward_hook(again, with_kwargs=True)
        return output

    handles = {}

    def change(model):
        for block in model.transformer_blocks:
            handles[block] = block.register_forward_hook(again, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    assert_alike(model, plain)


def test_a_block_that_occurs_twice(kernel, device):
    def change(model):
        blocks = list(model.transformer_blocks)
        model.transformer_blocks = nn.ModuleList([blocks[0], blocks[0], blocks[1], blocks[0]])

    for is_injected_first in (True, False):
        model, plain, _ = pair(
            kernel, device, change, is_injected_first=is_injected_first, blocks=BLOCKS
        )
        assert_alike(model, plain)


@every_write
def test_forwards_inside_of_each_other(kernel, device, write):
    """A hook runs the whole model in the middle of a forward of the same model, then goes on."""

    def change(model):
        arguments = inputs(model, batch=2)
        is_inside = []

        def hook(block, args, output):
            if not is_inside:
                is_inside.append(True)
                write(output)
                output = output + run(model, arguments).mean()
                is_inside.pop()
            return output

        model.transformer_blocks[1].register_forward_hook(hook)

    torch.manual_seed(5)
    plain = transformer(device, blocks=BLOCKS)
    torch.manual_seed(6)
    change(plain)
    model = transformer(device, blocks=BLOCKS)
    torch.manual_seed(6)
    change(model)
    kernel.inject_kernels(model)
    assert_alike(model, plain)


# ------------------------------------------------------------------------------------------------
# Weights that are there in their module's own turn alone


@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
@pytest.mark.parametrize("config", [{}, {"norm_elementwise_affine": True}], ids=["plain", "affine"])
@every_mode
@either_order
def test_group_offloading_to_disk(
    kernel, device, tmp_path, offload_type, config, forward, is_injected_first
):
    def change(model):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        model.enable_group_offload(
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=offload_type,
            num_blocks_per_group=1 if offload_type == "block_level" else None,
            offload_to_disk_path=str(folder),
        )

    model = transformer(device, blocks=BLOCKS, **config)
    plain = transformer(device, blocks=BLOCKS, **config)
    arguments = inputs(plain)
    if is_injected_first:
        kernel.inject_kernels(model)
    change(model)
    kernel.inject_kernels(model)
    assert_alike(model, plain, arguments, forward=forward)


def free(parameters):
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)


class Gathered:
    """Gives a module's own parameters memory and values for the time of its call."""

    def __init__(self, parameters):
        self.values = [(parameter, parameter.detach().clone()) for parameter in parameters]
        free(parameter for parameter, _ in self.values)

    def gather(self, *_):
        for parameter, value in self.values:
            parameter.untyped_storage().resize_(value.untyped_storage().nbytes())
            parameter.data.copy_(value)

    def free(self, *_):
        free(parameter for parameter, _ in self.values)


def gather_by_hooks(module, parameters):
    gathered = Gathered(parameters)
    module.register_forward_pre_hook(gathered.gather)
    module.register_forward_hook(gathered.free, always_call=True)


def gather_by_forward(module, parameters):
    gathered, original = Gathered(parameters), module.forward

    def forward(*args, **kwargs):
        gathered.gather()
        try:
            return original(*args, **kwargs)
        finally:
            gathered.free()

    module.forward = forward


@pytest.mark.parametrize("gather", [gather_by_hooks, gather_by_forward])
@pytest.mark.parametrize("is_whole_block", [True, False], ids=["blocks", "leaves"])
@every_mode
@either_order
def test_parameters_without_memory_between_their_turns(
    kernel, device, gather, is_whole_block, forward, is_injected_first
):
    """As FSDP shards them: with the right sizes, and nothing behind them."""

    def change(model):
        for block in model.transformer_blocks:
            if is_whole_block:
                gather(block, list(block.parameters()))
                continue
            for module in block.modules():
                parameters = list(module.parameters(recurse=False))
                if parameters:
                    gather(module, parameters)

    model, _, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **AFFINE)
    assert_alike(model, transformer(device, **AFFINE), forward=forward)


@either_order
def test_weights_that_are_swapped_in(kernel, device, is_injected_first):
    """One set of memory that holds the weights of the block in turn, and garbage else."""

    def change(model):
        for block in model.transformer_blocks:
            values = {name: p.detach().clone() for name, p in block.named_parameters()}

            def load(block, args, values=values):
                for name, parameter in block.named_parameters():
                    parameter.data.copy_(values[name])

            def drop(block, args, output):
                for parameter in block.parameters():
                    parameter.data.fill_(float("nan"))

            block.register_forward_pre_hook(load)
            block.register_forward_hook(drop)
            drop(block, None, None)

    model, _, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **AFFINE)
    assert_alike(model, transformer(device, **AFFINE))

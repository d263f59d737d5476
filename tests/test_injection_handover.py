"""A block does not touch the next block before its turn, and stale values are never used.

What changes weights, time embedding or hidden states between two blocks may leave no trace: no version
counter counts writes through ``.data``.
"""

import copy

import pytest
from torch import nn

from changes import HOOKS, Counted, Wrap
from injected_pairs import assert_alike, pair
from ltx_models import calls_of, computing, inputs, reference, run

pytestmark = pytest.mark.usefixtures("_one_thread")

BLOCKS = 3
AFFINE = {"blocks": BLOCKS, "norm_elementwise_affine": True}


# ------------------------------------------------------------------------------------------------
# Number of fused operations across two blocks


def replace_temb(module, args, kwargs):
    return args, {**kwargs, "temb": kwargs["temb"] * 0.5}


@pytest.mark.parametrize(
    "hook",
    [
        lambda module, args, output: output.mul_(1.5),
        lambda module, args, output: output * 1.5,
        lambda module, args, output: output[:, 1:].add_(0.5).sum() and None,
    ],
    ids=["scaled_in_place", "replaced", "written_through_a_view"],
)
def test_a_hook_changes_what_is_handed_on(kernel, device, hook):
    """Block 0 passes nothing on to block 1."""

    def change(model):
        model.transformer_blocks[0].register_forward_hook(hook)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(model)
    expected = reference(plain, arguments)
    assert computing(expected, model, arguments) == calls_of(BLOCKS, joined=BLOCKS - 2)


def test_a_block_is_given_another_time_embedding(kernel, device):
    """Nothing is passed on to block 1, nor by it."""

    def change(model):
        block = model.transformer_blocks[1]
        block.register_forward_pre_hook(replace_temb, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=BLOCKS)
    arguments = inputs(model)
    expected = reference(plain, arguments)
    assert computing(expected, model, arguments) == calls_of(BLOCKS, joined=0)


def test_a_block_is_left_out_and_a_copy_hands_on_to_its_own(kernel, device):
    model, plain, _ = pair(kernel, device, blocks=BLOCKS + 1)
    for candidate in (model, plain):
        del candidate.transformer_blocks[1]
    arguments = inputs(model)
    assert computing(reference(plain, arguments), model, arguments) == calls_of(BLOCKS)
    duplicate = copy.deepcopy(model)
    for candidate in (duplicate, plain):
        candidate.transformer_blocks[1].scale_shift_table.data.mul_(2)
    assert computing(reference(plain, arguments), duplicate, arguments) == calls_of(BLOCKS)


# ------------------------------------------------------------------------------------------------
# Changes between two blocks


class Model:
    """A model's blocks and norms, which wrappers may later hide, and its forward's time embedding."""

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


def set_new(module, name):
    """Like block swapping."""
    setattr(module, name, nn.Parameter(getattr(module, name).detach() * 1.2))


def increase_eps(norm):
    norm.eps += 0.5


TABLE = "scale_shift_table"
ACTS = {  # the change, of the block after the i-th or of the i-th itself
    "temb": lambda state, i: state.temb.data.mul_(0.8),
    "table of the next": lambda state, i: state.next_block(i).scale_shift_table.data.mul_(1.2),
    "own table": lambda state, i: state.blocks[i].scale_shift_table.data.mul_(1.2),
    "new table of the next": lambda state, i: set_new(state.next_block(i), TABLE),
    "norm of the next": lambda state, i: state.next_norm(i).weight.data.mul_(1.2),
    "new norm weight of the next": lambda state, i: set_new(state.next_norm(i), "weight"),
    "eps of the next": lambda state, i: increase_eps(state.next_norm(i)),
    "own second norm": lambda state, i: state.norms[i][1].weight.data.mul_(1.2),
}
NEW_OWN_TABLE = {"new own table": lambda state, i: set_new(state.blocks[i], TABLE)}


# The origin of a change: (module, its parent, its name there, the action)


class Acting(Counted):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def pre_forward(self, *args, **kwargs):
        self.act()
        return super().pre_forward(*args, **kwargs)


def by_hook(kind):
    return lambda module, parent, name, act: HOOKS[kind](module, Acting(act))


def by_forward_on_the_instance(module, parent, name, act):
    original = module.forward
    module.forward = lambda *args, **kwargs: (act(), original(*args, **kwargs))[1]


def by_subclass(module, parent, name, act):
    original = type(module).forward

    def forward(self, *args, **kwargs):
        act()
        return original(self, *args, **kwargs)

    module.__class__ = type("Acting", (type(module),), {"forward": forward})


MEANS = {
    "forward hook": lambda module, _, name, act: module.register_forward_hook(lambda *_: act()),
    **{kind: by_hook(kind) for kind in ("torch", "diffusers", "accelerate chain")},
    "forward on the instance": by_forward_on_the_instance,
    "module around": lambda module, parent, name, act: setattr(parent, name, Wrap(module, act)),
    "subclass": by_subclass,
}
PLACES = ["norm1", "attn1", "attn1.norm_q", "attn1.to_q", "norm2", "attn2", "ff", "ff.net.2"]


@pytest.mark.parametrize(
    ("means", "place"),
    [(means, "") for means in MEANS] + [("forward hook", place) for place in PLACES],
)
def test_changes_by_a_module_of_the_blocks(kernel, device, means, place):
    states = []

    def change(model):
        state = Model(model)
        states.append(state)
        for i in range(BLOCKS):
            path = f"transformer_blocks.{i}" + (f".{place}" if place else "")
            parent, _, name = path.rpartition(".")
            module = model.get_submodule(path)
            MEANS[means](module, model.get_submodule(parent), name, lambda i=i: state.do(i))

    model, plain, _ = pair(kernel, device, change, **AFFINE)
    arguments = inputs(plain)
    for act in (ACTS if place else {**ACTS, **NEW_OWN_TABLE}).values():
        for state in states:
            state.act = None
        unlike = run(plain, arguments)
        for state in states:
            state.act = act
        assert_alike(model, plain, arguments, times=1)
        assert_alike(model, plain, arguments, unlike=unlike, times=1, changed=1e-3)


def test_a_hook_changes_and_calls_an_earlier_block(kernel, device):
    def change(model):
        earlier = model.transformer_blocks[1]

        def call(block, args, kwargs, output):
            earlier.norm2.eps += 0.5
            return earlier(**{**kwargs, "hidden_states": output})

        model.transformer_blocks[3].register_forward_hook(call, with_kwargs=True)

    model, plain, _ = pair(kernel, device, change, blocks=5)
    assert_alike(model, plain, times=3)


def test_a_block_that_occurs_twice(kernel, device):
    def change(model):
        blocks = list(model.transformer_blocks)
        model.transformer_blocks = nn.ModuleList([blocks[0], blocks[0], blocks[1], blocks[0]])

    for is_injected_first in (True, False):
        model, plain, _ = pair(
            kernel, device, change, is_injected_first=is_injected_first, blocks=BLOCKS
        )
        assert_alike(model, plain)


def test_weights_that_are_swapped_in(kernel, device):
    """Shared memory with the weights of the running block, and garbage otherwise."""
    model, plain, _ = pair(kernel, device, **AFFINE)
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
    assert_alike(model, plain)

"""Random sequences of user actions on a model whose tokens ranks share, against a model in one process."""

import random

import pytest
import torch
from torch import nn

import adapters
from checks import relative_distance
from families import run
from ranks import in_ranks
from test_context_parallel import (
    BOTH,
    INPUTS,
    RING,
    RING_4,
    ULYSSES,
    ULYSSES_4,
    UNEVEN,
    UNEVEN_RING,
    inputs_of,
    model_of,
    parallelize,
    prepare_rank,
)

MODES = {
    "ulysses": (2, ULYSSES),
    "ring": (2, RING),
    "uneven ulysses": (2, UNEVEN),
    "uneven ring": (2, UNEVEN_RING),
    "ulysses of 4": (4, ULYSSES_4),
    "ring of 4": (4, RING_4),
    "both": (4, BOTH),
}
NAMES = ("flux", "wan", "qwenimage", "ltx", "sd3", "cogvideox", "hunyuan_video", "z_image")
# The own code of these cannot run on tokens that ranks share, nor can that of LTX with a mask.
NOT_EJECTED = ("sd3", "cogvideox", "hunyuan_video")
INJECTED_ONLY = (*NOT_EJECTED, "ltx")
HOOKED = ("block", "attention", "linear", "norm", "qk_norm")


class Sequence:
    """A model and its twin in one process, which get the same actions."""

    def __init__(self, kernel, rank, name, mode):
        self.kernel, self.rank, self.random = kernel, rank, random.Random(f"{name}, {mode}")
        self.name, self.how = name, MODES[mode][1]
        self.family, self.model, self.plain = model_of(name)
        self.is_parallel = self.is_injected = self.has_backend = False
        self.handles, self.done = [], []

    def actions(self):
        yield self.toggle
        yield self.toggle
        yield self.hook
        yield self.hook_here
        yield self.change_weight
        if not self.is_parallel:
            yield self.parallelize
            yield self.parallelize
            yield self.add_lora
        if self.is_injected and self.name not in INJECTED_ONLY:
            yield self.global_hook_here
        if self.family.has_backends:
            yield self.choose_backend
        if self.handles:
            yield self.unhook

    def toggle(self):
        if self.is_injected and self.is_parallel and self.name in NOT_EJECTED:
            with pytest.raises(RuntimeError, match="eject_kernels: "):
                self.kernel.eject_kernels(self.model)
            return
        if self.is_injected:
            self.kernel.eject_kernels(self.model)
        else:
            self.kernel.inject_kernels(self.model, attention=self.random.random() < 0.8)
        self.is_injected = not self.is_injected

    def parallelize(self):
        parallelize(self.kernel, self.model, self.how)
        self.is_parallel = True

    def part(self, model, kind):
        return self.family.part(model, kind)

    def hook(self):
        """A hook that changes a result, on all ranks."""
        kind = self.random.choice([kind for kind in HOOKED if kind in self.family.parts])

        def change(module, args, output):
            if isinstance(output, tuple):
                return tuple(x * 1.25 for x in output)
            return output * 1.25

        for model in (self.model, self.plain):
            self.handles.append(self.part(model, kind).register_forward_hook(change))

    def hook_here(self):
        """A hook that looks, on one rank."""
        kind = self.random.choice([kind for kind in HOOKED if kind in self.family.parts])
        part = self.part(self.model, kind)
        register = part.register_forward_hook
        # All ranks have as many handles, so that they draw the same actions.
        self.handles.append(register(lambda *_: None) if self.rank == 0 else None)

    def global_hook_here(self):
        register = nn.modules.module.register_module_forward_hook
        self.handles.append(register(lambda *_: None) if self.rank == 0 else None)

    def unhook(self):
        for handle in self.handles:
            if handle is not None:
                handle.remove()
        self.handles.clear()

    def change_weight(self):
        with torch.no_grad():
            for model in (self.model, self.plain):
                self.part(model, "linear").weight.mul_(1.5)

    def add_lora(self):
        seed = self.random.randrange(100)
        for model in (self.model, self.plain):
            adapters.add_lora(self.family, model, name=f"lora{len(self.done)}", seed=seed)

    def choose_backend(self):
        if self.has_backend:
            self.model.reset_attention_backend()
        else:
            self.model.set_attention_backend(self.kernel.register_attention_backend())
        self.has_backend = not self.has_backend

    def forward(self):
        options, seed = self.random.choice(INPUTS[self.name]), self.random.randrange(100)
        runs_own = self.name not in INJECTED_ONLY and self.has_backend
        if self.is_parallel and not self.is_injected and not runs_own:
            return
        arguments = inputs_of(self.family, torch.float32, options, seed)
        error = relative_distance(run(self.model, arguments), run(self.plain, arguments))
        assert error < 1e-5, (error, self.done)

    def run(self, steps=8):
        for _ in range(steps):
            act = self.random.choice(list(self.actions()))
            self.done.append(act.__name__)
            act()
            self.forward()


@pytest.mark.slow
@pytest.mark.drawn(times=2)
@pytest.mark.parametrize(("mode", "ranks"), [(mode, ranks) for mode, (ranks, _) in MODES.items()])
@pytest.mark.parametrize("name", NAMES)
@in_ranks
def test_random_sequences(kernel, rank, name, mode, ranks):
    prepare_rank()
    Sequence(kernel, rank, name, mode).run()

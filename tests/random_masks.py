"""Masks of all forms in all families, with hooks that change them: injected, plain and float64.

python tests/random_masks.py [CASES] [FIRST]
"""

import collections
import copy
import functools
import inspect
import random
import sys
import types

import torch

from families import FAMILIES, KERNEL_HEADS, run

# The option of each family's inputs that gives masks, if it needs one.
MASKED = {
    **dict.fromkeys(("chroma", "qwenimage", "krea2", "mochi", "lumina2", "qwenimage21"), "padded"),
    **dict.fromkeys(("ltx", "ltx2", "joyimage_plus"), "padded"),
    **dict.fromkeys(("hunyuan_video", "hunyuan_video15", "z_image")),
}
TEXT_LENGTH = 9
FORMS = ("prefix", "left padded", "holes", "all", "one", "strided", "expanded")
TARGETS = ("none", "none", "block", "attention", "both", "wrapped block", "model", "maker")
WAYS = ("replace", "in place")
PLAIN_RAISES = "plain raises"
# Masks of the models' inputs that may have these dtypes. The other ones keep theirs.
INTEGERS = {"hunyuan_video", "hunyuan_video15", "lumina2", "qwenimage", "mochi"}


def mask_of(form, batch, length, generator):
    """A mask (B, length) of booleans with at least one True in each row."""
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    prefix = torch.arange(length) < lengths
    if form == "left padded":
        return prefix.flip(1)
    if form in ("holes", "strided"):
        mask = torch.rand(batch, length, generator=generator) < 0.6
        mask[:, int(torch.randint(length, (), generator=generator))] = True
        return mask.t().contiguous().t() if form == "strided" else mask
    if form == "all":
        return torch.ones(batch, length, dtype=torch.bool)
    if form == "one":
        return torch.nn.functional.one_hot(lengths[:, 0] - 1, length).bool()
    return prefix[:1].expand(batch, length) if form == "expanded" else prefix


def is_mask(name, value):
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and (value.dtype == torch.bool or "mask" in name) and value.dim() > 1


class Change:
    """Changes masks among a module's arguments, with the same values in each model."""

    def __init__(self, family, way, seed):
        self.is_chroma, self.way, self.seed = family.name == "chroma", way, seed
        self.calls = 0

    def mask(self, mask):
        generator = torch.Generator().manual_seed(self.seed * 100 + self.calls)
        self.calls += 1
        length = mask.shape[-1]
        keep = torch.rand(length, generator=generator) < 0.6
        keep[int(torch.randint(length, (), generator=generator))] = True
        noise = torch.randn(length, generator=generator)
        if self.is_chroma and mask.dim() == 2:
            keep[TEXT_LENGTH:] = True  # image tokens are valid, as in the pipeline
            changed = mask * keep.to(mask)
        elif mask.is_floating_point():
            changed = mask + noise.half().to(mask)
        else:
            changed = (mask != 0) & keep.to(mask.device)
            changed = changed | ~changed.any(-1, keepdim=True)  # a row without keys may be NaN
            changed = changed.to(mask.dtype)
        return mask.copy_(changed) if self.way == "in place" else changed

    def __call__(self, module, args, kwargs):
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        args = [self.mask(x) if is_mask(n, x) else x for n, x in zip(names, args, strict=False)]
        kwargs = {name: self.mask(x) if is_mask(name, x) else x for name, x in kwargs.items()}
        return tuple(args), kwargs


class Wrapped(torch.nn.Module):
    """A user's module around a block, which changes masks."""

    def __init__(self, block, change):
        super().__init__()
        self.block, self.change = block, change

    def __getattr__(self, name):
        """Models read attributes of their blocks."""
        own = self._modules.get("block")
        return super().__getattr__(name) if name == "block" else getattr(own, name)

    def forward(self, *args, **kwargs):
        args, kwargs = self.change(self.block, args, kwargs)
        return self.block(*args, **kwargs)


def change_model(family, model, target, change, which):
    """Applies the change. Returns a function that undoes it."""
    path = family.block_lists[which % len(family.block_lists)]
    blocks = model.get_submodule(path)
    block = blocks[which % len(blocks)]
    handles, undo = [], []
    if target == "model":
        handles.append(model.register_forward_pre_hook(change, with_kwargs=True))
    if target in ("block", "both"):
        handles.append(block.register_forward_pre_hook(change, with_kwargs=True))
    if target in ("attention", "both"):
        for name in ("attn", "attn1", "attn2", "attention"):
            module = getattr(block, name, None)
            if module is not None:
                handles.append(module.register_forward_pre_hook(change, with_kwargs=True))
    if target == "wrapped block":
        index = which % len(blocks)
        blocks[index] = Wrapped(block, change)
        undo.append(lambda: blocks.__setitem__(index, block))
    if target == "maker" and hasattr(model, "_build_unified_sequence"):
        own = model._build_unified_sequence

        def make(self, *args, **kwargs):
            made = list(own(*args, **kwargs))
            if made[2] is not None:
                made[2] = change.mask(made[2])
            return tuple(made)

        model._build_unified_sequence = types.MethodType(make, model)
        undo.append(lambda: delattr(model, "_build_unified_sequence"))

    def back():
        for handle in handles:
            handle.remove()
        for function in undo:
            function()

    return back


@functools.cache
def models_of(kernel, name, device, dtype):
    model = FAMILIES[name].model(device, dtype, **KERNEL_HEADS)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    kernel.inject_kernels(model)
    return model, plain, exact


def arguments_of(family, device, dtype, rng, generator):
    """The arguments of a forward with a random mask, and what they are."""
    batch = rng.choice((1, 2, 3))
    options = {"batch": batch, "text_length": TEXT_LENGTH, "seed": rng.randrange(1000)}
    if MASKED[family.name] is not None:
        options["mask"] = MASKED[family.name]
    if family.name == "z_image":
        options["prompts"] = rng.choice([(40, 6), (6, 40, 40), (40,), (70, 40)])
    arguments = family.inputs(device, dtype, **options)
    form, dtype_of_mask = rng.choice(FORMS), rng.choice((None, torch.bool, torch.int64, dtype))
    for name, mask in list(arguments.items()):
        if not isinstance(mask, torch.Tensor) or "mask" not in name or name == "img_mask":
            continue
        own = mask_of(form, mask.shape[0], mask.shape[1], generator).to(device)
        if family.name == "chroma":
            own = own.clone()
            own[:, TEXT_LENGTH:] = True
        if family.name == "mochi" or family.name.startswith("ltx"):
            own = own.clone()
            own[:, 0] = True
        takes_any = family.name in INTEGERS and name == "encoder_attention_mask"
        is_any = dtype_of_mask in (torch.bool, torch.int64) and takes_any
        arguments[name] = own.to(dtype_of_mask if is_any else mask.dtype)
    return arguments, f"batch {batch}, {form}, {dtype_of_mask}"


def check(kernel, seed, device, only=None):
    """One case. Returns what it is, and what differs, or None."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name = rng.choice([n for n in MASKED if n in FAMILIES and only in (None, n)])
    family, dtype = FAMILIES[name], rng.choice((torch.bfloat16, torch.float16))
    models = models_of(kernel, name, device, dtype)
    arguments, what = arguments_of(family, device, dtype, rng, generator)
    target, way, which = rng.choice(TARGETS), rng.choice(WAYS), rng.randrange(4)
    mode = rng.choice((torch.no_grad, torch.inference_mode))
    what = f"{name} {dtype}: {what}; {target} {which}, {way}, {mode.__name__}"
    outs = []
    for model in (*models[::-1], models[0]):
        own = copy.deepcopy(arguments) if model is not models[2] else arguments
        inputs = family.cast(copy.deepcopy(own), torch.float64) if model is models[2] else own
        back = change_model(family, model, target, Change(family, way, seed), which)
        try:
            with mode():
                outs.append(run(model, inputs).double())
        except (RuntimeError, ValueError, TypeError) as error:
            outs.append(f"{type(error).__name__}: {str(error)[:150]}")
        finally:
            back()
    exact, plain, *injected = outs
    for out in injected:
        if isinstance(plain, str) or isinstance(exact, str):
            if not isinstance(plain, str) and isinstance(out, str):
                return what, f"only injected raises: {out}"
            continue
        if isinstance(out, str):
            return what, f"raises: {out}"
        slack = 2 * (plain - exact).norm() + torch.finfo(dtype).eps / 2 * exact.norm()
        if exact.isfinite().all() and not (out - exact).norm() <= slack:
            distances = [((x - exact).norm() / exact.norm()).item() for x in (plain, out)]
            return what, "to float64: plain {:.4f} injected {:.4f}".format(*distances)
    return what, PLAIN_RAISES if isinstance(plain, str) else None


def main(count=200, first=0):
    from conftest import load_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    raised = collections.Counter()
    for seed in range(first, first + count):
        what, fault = check(load_kernel(), seed, device)
        if fault == PLAIN_RAISES:
            raised[what.split()[0]] += 1
        elif fault is not None:
            print(f"seed {seed}: {what}: {fault}", flush=True)
    print(f"{count} cases, {sum(raised.values())} in which plain raises: {dict(raised)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

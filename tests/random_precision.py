"""Random sequences of user actions on a model with ``precision=``, until the first difference.

Each action is applied to a tested model and to a plain one with the same weights. After each, every weight of
the tested model is compared with the plain model's: equal, or as far from it as rounding to FP8 moves it.

A seed determines a sequence::

    python tests/random_precision.py --first-seed 123 --sequences 1

A failure is printed with its steps. The exit status is then 1.
"""

import contextlib
import copy
import gc
import random
import sys
import traceback
import warnings

import click
import peft
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline, FluxPipeline
from torch import nn

import changes
import conftest
from checks import relative_distance
from families import FAMILIES, KERNEL_HEADS
from fp8_models import is_quantized
from graphs import module_of
from small_models import run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = {"ltx": 3, "flux": 1, "z_image": 2, "qwenimage": 3}
TARGETS = r".*blocks?\..*(to_q|to_v|add_v_proj|net\.2|proj_out)|layers\..*(to_q|to_v|w2)"
# The distance of weights in FP8, each with its largest value in a row. One that was left out is 0.3 or more.
ROUNDED = 0.04
DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16}


def lora(**options):
    return peft.LoraConfig(r=4, target_modules=TARGETS, **{"init_lora_weights": False, **options})


ADAPTERS = {
    "LoRA": lora,
    "with biases": lambda: lora(lora_bias=True),
    "DoRA": lambda: lora(use_dora=True),
    "OLoRA": lambda: lora(init_lora_weights="olora"),
    "LoKr": lambda: peft.LoKrConfig(r=4, init_weights=False, target_modules=TARGETS),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=16, target_modules=TARGETS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, target_modules=TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=[]),
}


class Difference(AssertionError):
    """The tested model differs from the plain one."""


class Refused(Exception):
    """The plain model raised."""


class Pair:
    """A tested model and a plain one.

    Attributes:
        exact: whether the originals are the plain model's weights: no FP8 values were set since.
    """

    def __init__(self, family, seed):
        self.kernel = conftest.load_kernel()
        self.family, self.seed = FAMILIES[family], seed
        self.plain = self.model(seed)
        self.tested = copy.deepcopy(self.plain)
        self.exact, self.options, self.adapter, self.changes = True, None, None, 0
        self.conversions = 0
        self.is_offloaded = self.has_had_adapter = False

    def model(self, seed):
        blocks = BLOCKS[self.family.name]
        model = self.family.model(DEVICE, torch.bfloat16, seed=seed, blocks=blocks, **KERNEL_HEADS)
        return model.requires_grad_(False)

    def both(self, act):
        """Calls ``act`` with each model."""
        for model in (self.plain, self.tested):
            torch.manual_seed(self.seed)
            try:
                act(model)
            except Exception as error:
                if model is self.tested:
                    raise
                raise Refused from error

    def check(self):
        plain = dict(self.plain.named_parameters())
        tested = dict(self.tested.named_parameters())
        if plain.keys() != tested.keys():
            raise Difference(f"other parameters: {plain.keys() ^ tested.keys()}")
        for name, a in plain.items():
            b = tested[name]
            in_fp8 = hasattr(b, "qdata")
            # Group offloading of diffusers loses the flags of torchao's tensors.
            has_flags = self.is_offloaded or a.requires_grad == b.requires_grad
            if not in_fp8 and a.dtype != b.dtype or not has_flags:
                raise Difference(f"{name} is {b.dtype}, {b.requires_grad}, not {a.dtype}")
            b = b.dequantize() if in_fp8 else b
            limit = ROUNDED * (1 + self.changes)
            if self.exact and not in_fp8:
                # peft starts some adapters on the device of the originals, which rounds differently.
                is_rounded = self.conversions > 1 or (self.has_had_adapter and DEVICE == "cuda")
                limit = 1e-3 if is_rounded else 0
            error = 0.0 if torch.equal(a, b) else relative_distance(b, a)
            if not error <= limit:
                raise Difference(f"{name} is {error:.3g} of its norm from the plain model's")

    def forward(self, rng):
        arguments = self.family.inputs(DEVICE, self.plain.dtype, seed=rng.randrange(9))
        results = []
        self.both(lambda model: results.append(run(model, arguments)))
        expected, out = results
        error = relative_distance(out, expected)
        if expected.isfinite().all() and not error < 0.3:
            raise Difference(f"the result is {error:.3g} of its norm from the plain model's")

    # Actions

    def inject(self, rng):
        if self.options is None:
            kept = rng.random() < 0.85
            self.options = {"precision": rng.choice(["fp8", "fp8-fast"]), "keep_originals": kept}
            self.changes += not self.exact
            self.dtype = self.plain.dtype
            self.exact = self.exact and kept
        try:
            self.kernel.inject_kernels(self.tested, **self.options)
        except ValueError:  # in float32, or every layer has an adapter that reads its weight
            self.options = None

    def eject(self, rng):
        self.kernel.eject_kernels(self.tested)
        if self.options and not self.options["keep_originals"]:
            raise Refused  # layers stay quantized, on which peft refuses adapters
        self.options = None

    def add_adapter(self, rng):
        if self.adapter is None:
            self.adapter, self.has_had_adapter = rng.choice(list(ADAPTERS)), True
            self.both(lambda model: model.add_adapter(ADAPTERS[self.adapter]()))

    def load_lora(self, rng):
        if self.adapter is None:
            self.adapter, self.has_had_adapter = "loaded", True
            layers = {
                name: layer
                for name, layer in self.plain.named_modules()
                if isinstance(layer, nn.Linear)
                and name.partition(".")[0].endswith(("blocks", "layers"))
            }
            states, has_bias = {}, rng.random() < 0.5
            generator = torch.Generator().manual_seed(rng.randrange(9))
            for name, layer in layers.items():
                shapes = {"lora_A.weight": (4, layer.in_features)}
                shapes["lora_B.weight"] = layer.out_features, 4
                shapes |= {"lora_B.bias": (layer.out_features,)} if has_bias else {}
                for key, shape in shapes.items():
                    states[f"{name}.{key}"] = 0.1 * torch.randn(shape, generator=generator)
            self.both(
                lambda m: m.load_lora_adapter(dict(states), prefix=None, adapter_name="default")
            )

    def switch(self, rng):
        if self.adapter is not None:
            act = rng.choice(["disable_adapters", "enable_adapters"])
            self.both(lambda model: getattr(model, act)())

    def unload(self, rng):
        if self.adapter not in (None, "OFT", "BOFT", "IA3", "LoKr"):  # diffusers removes LoRA alone
            self.both(lambda model: model.unload_lora())
            self.adapter = None

    def fuse(self, rng):
        if self.adapter is None:
            return
        in_fp8 = any(is_quantized(getattr(m, "base_layer", None)) for m in self.tested.modules())
        if in_fp8 and not self.options["keep_originals"]:
            with contextlib.suppress(RuntimeError):
                self.tested.fuse_lora()
                raise Difference("fuse_lora without originals")
        else:
            self.both(lambda model: model.fuse_lora())

    def unfuse(self, rng):
        if self.adapter is not None and (not self.options or self.options["keep_originals"]):
            self.both(
                lambda m: [each.unmerge() for each in m.modules() if hasattr(each, "unmerge")]
            )

    def load_state(self, rng):
        if self.adapter is not None:
            return
        plain = self.model(self.seed + 1)
        tested = copy.deepcopy(plain)
        if self.options:  # torchao's tensors take values of their own first dtype alone
            self.kernel.inject_kernels(tested.to(self.dtype), **self.options)
            self.exact = False
        sources = [copy.deepcopy(m.to(self.plain.dtype).state_dict()) for m in (plain, tested)]
        assign = rng.random() < 0.5
        self.both(lambda m: m.load_state_dict(sources[m is self.tested], assign=assign))
        self.both(lambda model: model.requires_grad_(False))

    def swap(self, rng):
        names = [n for n, m in self.tested.named_modules() if is_quantized(m)]
        if len(names) > 1:
            first = rng.choice(names)
            shape = self.plain.get_submodule(first).weight.shape
            second = rng.choice(
                [n for n in names if self.plain.get_submodule(n).weight.shape == shape]
            )
            for model in (self.plain, self.tested):
                a, b = (model.get_submodule(name) for name in (first, second))
                a.weight, b.weight = b.weight, a.weight
            self.exact = self.exact and first == second

    def negate(self, rng):
        layers = [(n, m) for n, m in self.tested.named_modules() if is_quantized(m)]
        for name, layer in rng.sample(layers, min(3, len(layers))):
            layer.weight.scale.mul_(-1)
            self.plain.get_submodule(name).weight.data.mul_(-1)
            self.exact = False

    def convert(self, rng):
        way = rng.choice([*DTYPES, "to", "from_pipe"])
        dtype = rng.choice(list(DTYPES.values()))
        if way == "from_pipe" and self.family.name == "flux":
            parts = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
            nothing = dict.fromkeys(parts)

            def act(model):
                scheduler = FlowMatchEulerDiscreteScheduler()
                pipe = FluxPipeline(scheduler=scheduler, transformer=model, **nothing)
                FluxImg2ImgPipeline.from_pipe(pipe, torch_dtype=dtype)
        else:
            name = way if way in DTYPES else "to"

            def act(model):
                getattr(model, name)(*([dtype] if name == "to" else []))

        before = self.plain.dtype
        self.both(act)
        self.conversions += self.plain.dtype != before

    def copy(self, rng):
        copies = []
        self.both(lambda model: copies.append(copy.deepcopy(model)))
        self.plain, self.tested = copies

    def train(self, rng):
        flag = rng.random() < 0.5
        self.both(lambda model: model.requires_grad_(flag))

    def offload(self, rng):
        kind = rng.choice(["model", "block_level", "leaf_level"])
        self.both(lambda model: changes.offload(model, kind, DEVICE))
        self.is_offloaded = True


# How often each is drawn.
ACTIONS = {
    "forward": 4,
    "inject": 5,
    "eject": 2,
    "add_adapter": 3,
    "load_lora": 1,
    "switch": 0.5,
    "unload": 1,
    "fuse": 2,
    "unfuse": 2,
    "load_state": 2,
    "swap": 0.5,
    "negate": 0.5,
    "convert": 2,
    "copy": 0.7,
    "train": 1,
    "offload": 0.3,
}


@contextlib.contextmanager
def small_layers():
    """The models have only small layers."""
    module = module_of(conftest.load_kernel(), "quantized.precision")
    before, module.MIN_FEATURES = module.MIN_FEATURES, 16
    try:
        yield
    finally:
        module.MIN_FEATURES = before


def random_sequence(seed):
    """(the steps, the error or None, whether the plain model raised) of a sequence."""
    rng = random.Random(seed)
    steps = [rng.choice(list(BLOCKS))]
    pair = Pair(steps[0], rng.randrange(3))
    first = rng.randrange(3)
    try:
        for i in range(rng.randint(6, 14)):
            name = rng.choices(list(ACTIONS), ACTIONS.values())[0] if i != first else "inject"
            # torchao's tensors have no state_dict in inference mode. Copies made in it cannot be converted,
            # nor can offloading move them to a GPU in it.
            mode = rng.random() < 0.1 and name not in ("load_state", "copy")
            mode = mode and not (pair.is_offloaded and DEVICE == "cuda")
            steps.append(f"{name}, in inference mode" if mode else name)
            with torch.inference_mode(mode) if mode else torch.no_grad():
                getattr(pair, name)(rng)
            with torch.no_grad():
                pair.check()
        with torch.no_grad():
            pair.eject(rng)
            pair.check()
            pair.forward(rng)
    except Refused:
        return steps, None, True
    except Exception as error:
        return steps, error, False
    return steps, None, False


@click.command(help=__doc__)
@click.option("--first-seed", default=0)
@click.option("--sequences", default=100)
def main(first_seed, sequences):
    warnings.simplefilter("ignore")
    failed = refused = count = 0
    with small_layers():
        for seed in range(first_seed, first_seed + sequences):
            steps, error, is_refused = random_sequence(seed)
            count += len(steps)
            refused += is_refused
            if error is not None:
                failed += 1
                print(f"seed {seed}: {steps}: {type(error).__name__}: {error}")
                if not isinstance(error, Difference):
                    traceback.print_exception(error)
            gc.collect()
    print(
        f"{sequences} sequences, {count} steps, {refused} ended by the plain model, {failed} failed"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

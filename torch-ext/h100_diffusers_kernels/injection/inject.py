"""inject_kernels and eject_kernels."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..operations.conditions import an
from .attention.backend import why_not_own_in_parallel
from .attention.decision import INT8, NOT_WANTED, SIXTEEN_BIT
from .attention.processors import ProcessorSpec, attention_spec
from .core import checks, patch
from .core.checks import class_name, find_class
from .core.forward_state import COMPUTED_ONCE, Family
from .core.patch import INJECTION, UNKNOWN_FORWARD, Injection, MethodSpec, PatchSpec, StandIn
from .core.report import IN_FULL, IN_PART, NOT_AT_ALL, ONLY_GRAPHS, InjectionReport, Replaced, join
from .decoders.blocks import DECODERS, ENDS
from .decoders.convolutions import CONVOLUTIONS, IMAGE_CONVOLUTION
from .decoders.layers import DECODER_LAYERS
from .families import FAMILIES
from .families import IN_PART as _IN_PART_OF_FAMILIES
from .families.text_encoders import TEXT_ENCODERS
from .graphs.cuda_graphs import GraphedStandIn
from .graphs.graph_capture import Pool
from .parts.linears import GATED_ACTIVATIONS, UNFUSED_GELU
from .parts.norm_modules import ADAPTIVE_NORMS, GROUP_NORM, NORMS
from .quantized import fp8_weights
from .quantized.fp8_linears import FP8_LINEAR, FP8_LINEARS, FP8_LINEARS_IN_PART
from .quantized.lora_fusion import follow_lora, unfollow_lora
from .quantized.precision import PRECISIONS, choose_layers, is_named, linear_layers, why_none

logger = logging.getLogger("h100_diffusers_kernels")

_MODEL = "diffusers.models.modeling_utils:ModelMixin"
_TRANSFORMERS_MODEL = "transformers.modeling_utils:PreTrainedModel"
# Autoencoders run once a picture, not once a step.
_AUTOENCODERS = "diffusers.models.autoencoders."
# Modules of diffusers with models that are neither denoisers nor autoencoders.
_OTHERS = ("diffusers.models.condition_embedders.", "diffusers.pipelines.")
_UNKNOWN_COMPONENT = (
    "it is no denoising model or autoencoder of diffusers, nor a text encoder of transformers"
)
_REPLACED = "its forward was replaced by something else"
_NO_MODULE = "it has no module that there is a kernel for"


@dataclass
class _Plan:
    """What to do to a model; nothing if it is done already."""

    model: nn.Module
    injection: Injection
    stand_ins: list[StandIn] = field(default_factory=list)
    methods: list[tuple[nn.Module, MethodSpec]] = field(default_factory=list)
    quantized: dict[str, Any] = field(default_factory=dict)  # the layers by name
    is_in_place: bool = False

    @property
    def found_nothing(self) -> bool:
        """Whether there is no module that could have been replaced."""
        left_alone = self.injection.report.left_alone
        is_empty = not self.is_in_place and not self.stand_ins
        return is_empty and all(entry.reason == _NO_MODULE for entry in left_alone)


def inject_kernels(
    pipe_or_model: Any,
    *,
    attention: bool | str = True,
    cuda_graphs: bool = False,
    max_cuda_graphs: int = 8,
    precision: str | None = None,
    keep: Sequence[str] = (),
    keep_originals: bool = True,
) -> InjectionReport:
    """Makes a diffusers model, or each denoising model, autoencoder and text encoder of a pipeline, run on
    this package's kernels.

    A model of a known class runs on them in full; any other in part: its norms, activations and attentions,
    one by one. The report's ``levels`` say which. Autoencoders run in part, unless their decoder is a
    transformer of a known class, and so do transformers' T5, UMT5, Qwen, Gemma, Llama and Mistral. The other
    parts of a pipeline are left alone, unless one is passed by itself.

    Works in place and on instances only: classes, weights, processors, ``state_dict`` and configuration stay
    as they are. Hooks, offloading, LoRA, quantized linear layers and ``torch.compile`` keep working, whether
    added before or after. Each part is checked at each call: if a user replaces a module, function or class,
    the replacement runs. A second call with the same options changes nothing and reports what is in place.
    :func:`eject_kernels` undoes the injection. Call it before pickling a whole model; ``copy.deepcopy``,
    ``state_dict`` and ``save_pretrained`` work without.

    Calls that the kernels do not cover fall back to the model's own code: under autocast, with mixed dtypes,
    within a function or dispatch mode, on a device without kernels. A fall-back is logged once for each class
    of modules and reason, and counted in the report's ``calls``. It raises RuntimeError if the environment
    variable ``H100_DIFFUSERS_KERNELS_STRICT`` is set to 1. Attention is the model's own in training, and if
    an attention backend has been chosen by ``model.set_attention_backend``, ``attention_backend`` or
    ``DIFFUSERS_ATTN_BACKEND``, before or after the injection. (For the last two, "native" is
    indistinguishable from no choice.) That is no fall-back: ``calls`` count it by itself.

    Context parallelism of diffusers may be enabled before or after. Attention then runs on the kernel, too,
    with this package's own exchange between the ranks; see :func:`context_parallel_plan`.

    Args:
        pipe_or_model: a ``torch.nn.Module`` (a compiled or otherwise wrapped one included), or a pipeline
            with a diffusers model among its components.
        attention: whether attention itself runs on this package's kernel, too. False leaves it to
            diffusers and replaces what comes before and after it. "int8" computes long attention without a
            mask in 8 bits: of at least 4096 queries and keys, with heads of more than 64 elements. "16-bit"
            computes none in 8 bits. True means "int8" with "fp8-fast", and with "fp8" in some video models;
            otherwise "16-bit".
        cuda_graphs: whether each model's forward is captured into a CUDA graph at the second call of a kind
            and replayed from then on, if no gradients are asked for. Calls share a graph if everything
            except tensor values matches: shapes, dtypes, other arguments and PyTorch's settings. The result
            is the caller's own, with the same bits. Each replay compares the model with what was captured:
            if weights moved, or adapters, hooks, processors or functions changed, the graphs are dropped.
            A call that cannot be captured runs without a graph, and the report's ``cuda_graphs`` count the
            reason. A pipeline's autoencoders in part get no graphs: they run once a picture. Text encoders
            do. All graphs of the pipeline share one more copy of a forward's working memory. Not for a model
            if another thread draws random numbers from CUDA's default generator: PyTorch refuses that while
            a graph is captured.
        max_cuda_graphs: the number of graphs kept for a model; the least recently used is evicted.
        precision: None, "fp8" or "fp8-fast". With either, the linear layers of a known class's blocks are
            quantized by torchao's dynamic FP8: E4M3 with a scale for each row of the weight and of the input.
            "fp8" quantizes those that published FP8 models quantize without visible loss, "fp8-fast" more of
            them. The other models of a pipeline keep their weights. Needs torchao.
        keep: names of linear layers that keep their precision, or of modules around them, with ``*`` and
            ``?`` as in ``fnmatch``.
        keep_originals: whether the original weights of quantized layers stay in host memory, from which
            :func:`eject_kernels` restores them. False frees them after the injection.

    Returns:
        The report: each module replaced, and each left alone with the reason. It is also logged,
        under the name ``h100_diffusers_kernels``.

    Raises:
        ValueError: if ``pipe_or_model`` holds nothing that there are kernels for, or was injected with other
            options (eject the kernels first), or if ``max_cuda_graphs`` is less than 1. With a precision: if
            it is another, if no layer can be quantized, if weights are neither bfloat16 nor float16, or if a
            name in ``keep`` matches no linear layer. Nothing is changed then.
        TypeError: if an option is of another type, or ``pipe_or_model`` is neither a module nor a pipeline.
        ImportError: if a precision is given, and torchao is missing or too old.

    Example::

        report = kernel.inject_kernels(pipe)
        print(report)
    """
    options = _check_options(
        attention,
        precision,
        keep,
        cuda_graphs=cuda_graphs,
        max_cuda_graphs=max_cuda_graphs,
        keep_originals=keep_originals,
    )
    checks.look_up_libraries()
    report, pool = InjectionReport(), Pool()
    plans = []
    for name, component in _components("inject_kernels", pipe_or_model):
        is_alone = component is pipe_or_model
        models = list(_models_in(name, component, is_alone))
        if not models:
            report.leave(name, component, _UNKNOWN_COMPONENT)
            report.levels[name] = NOT_AT_ALL
        for model_name, model, family in models:
            has_graphs = is_alone or family is not None or not _is_autoencoder(model)
            plan = _plan(model_name, model, family, options, pool if has_graphs else None)
            if family is not None:
                plan.methods = [(m, each) for each in family.methods for m in component.modules()]
            plans.append(plan)
    if all(plan.found_nothing for plan in plans):
        raise ValueError(
            "inject_kernels: pipe_or_model must be or hold a model with norms, activations or attentions "
            f"of diffusers or PyTorch, got {an(type(pipe_or_model).__name__)} without one"
        )
    if precision is not None:
        _check_plans(pipe_or_model, plans, options)
        if any(plan.quantized for plan in plans):
            quantized = fp8_weights.load_quantizer(precision)
    report.already_injected = all(plan.is_in_place or plan.found_nothing for plan in plans)
    try:
        for plan in plans:
            if plan.quantized:
                fp8_weights.quantize(plan.quantized.values(), quantized)
                fp8_weights.renew_group_offloading(plan.model)
                follow_lora(plan.model)
            for stand_in in plan.stand_ins:
                patch.put_in(stand_in)
            if plan.stand_ins:
                setattr(plan.model, INJECTION, plan.injection)
            report.add(plan.injection.report)
    except BaseException:
        for plan in plans:
            if not plan.is_in_place:
                _undo(plan.model, plan.injection)
        raise
    for plan in plans:
        for module, method in plan.methods:
            method.put_in(module)
    if not keep_originals:
        for layer in (layer for plan in plans for layer in plan.quantized.values()):
            fp8_weights.original_of(layer).parameter = None
    logger.info("inject_kernels(%s): %s", type(pipe_or_model).__name__, report)
    return report


def eject_kernels(pipe_or_model: Any) -> None:
    """Undoes :func:`inject_kernels`: each module gets back the forward that it had.

    A module whose forward was replaced by something else after the injection keeps that. Layers that the
    injection quantized get back their weights, bit for bit and the same objects, on the device and in the
    dtype that they would have by then; with ``keep_originals=False`` they stay quantized. Layers that got
    other FP8 values get these, dequantized. Both is logged. Without an injection, nothing happens.

    Args:
        pipe_or_model: as for :func:`inject_kernels`.

    Raises:
        RuntimeError: if a model is under context parallelism that its own code does not know. Nothing is
            changed then.
        TypeError: if ``pipe_or_model`` is neither a module nor a pipeline.
    """
    components = list(_components("eject_kernels", pipe_or_model))
    modules = (module for _, component in components for module in component.modules())
    for _, _, stand_in in patch.placed(modules):
        reason = why_not_own_in_parallel(stand_in)
        if reason is not None:
            raise RuntimeError(f"eject_kernels: {reason}; load the model again instead")
    for name, component in components:
        for module_name, module in list(component.named_modules()):
            injection = vars(module).get(INJECTION)
            if injection is not None:
                _undo(module, injection)
                logger.info("eject_kernels: restored %s", join(name, module_name) or "the model")
        # Stand-ins that a wrapper put back, and parts that were copied alone.
        _restore(component, list(component.modules()))


def _undo(model: nn.Module, injection: Injection) -> None:
    injection.is_over = True
    _restore(model, [*model.modules(), *injection.modules])
    vars(model).pop(INJECTION, None)


def _restore(model: nn.Module, modules: list[nn.Module]) -> None:
    """Gives modules of a model their forwards and their weights."""
    patch.take_out(modules)
    unfollow_lora(modules)
    if fp8_weights.restore(modules):
        fp8_weights.renew_group_offloading(model)


def _plan(
    name: str, model: nn.Module, family: Family | None, options: dict[str, Any], pool: Pool | None
) -> _Plan:
    """What is in place if its options are the same, otherwise what to do.

    ``pool``: None if the model gets no CUDA graphs, whatever the options. Several pipelines may share it.
    """
    if pool is None:
        options = {**options, "cuda_graphs": False}
    if family is None:
        options = {**options, "precision": None, "keep": (), "keep_originals": True}
    injection = vars(model).get(INJECTION)
    if injection is not None:
        compared = ("attention",) if pool is None else options
        changed = [key for key in compared if injection.options[key] != options[key]]
        if not changed:
            injection.report.model_name = name
            return _Plan(model, injection, is_in_place=True)
        before, now = (
            ", ".join(f"{key}={each[key]}" for key in changed)
            for each in (injection.options, options)
        )
        raise ValueError(
            f"inject_kernels: {name or 'the model'} runs on kernels injected with {before}, "
            f"got {now}: call eject_kernels first"
        )
    attention, tiers = options["attention"], () if family is None else family.int8_tiers
    is_int8 = attention == INT8 or (attention is True and options["precision"] in tiers)
    more = {"is_int8": is_int8, "is_autoencoder": _is_autoencoder(model)}
    injection = Injection(name, {**options, **more}, weakref.ref(model))
    report = injection.report
    plan = _Plan(model, injection)
    stand_ins = plan.stand_ins
    reason = checks.why_unsupported()
    if reason is not None:
        report.leave("", model, reason)
        report.levels[""] = NOT_AT_ALL
        return plan
    specs = _specs_in_part(model)
    if family is not None:
        if options["precision"] is not None:
            plan.quantized = choose_layers(model, family.layers, options, report)
            report.quantized.extend(plan.quantized)
        specs = _specs_of_family(model, family, set(map(id, plan.quantized.values())))
    for module_name, module, spec in specs:
        stand_ins += _stand_ins(module_name, module, spec, injection)
        for path in () if family is None else spec.inner(module):
            _report_stranger(report, module_name, module, path, family)
    if family is not None:
        for child in family.once:
            if isinstance(getattr(model, child, None), nn.Module):
                report.leave(child, getattr(model, child), COMPUTED_ONCE)
    elif not report.replaced and not report.left_alone:
        report.leave("", model, _NO_MODULE)
    in_part = IN_PART if report.replaced else NOT_AT_ALL
    report.levels[""] = in_part if family is None else IN_FULL
    has_graphs = not plan.found_nothing or _is_text_encoder(model)  # all of them wait for the host
    if options["cuda_graphs"] and pool is not None and has_graphs:
        if patch.class_forward_slot(model) is None:
            report.leave("", model, f"no CUDA graphs: {_REPLACED}")
            return plan
        inner = next((s for s in stand_ins if s.module() is model), None)
        if inner is not None:
            stand_ins.remove(inner)
        stand_ins.append(GraphedStandIn(model, inner, injection, pool))
        if report.levels[""] == NOT_AT_ALL:
            report.levels[""] = ONLY_GRAPHS
    return plan


_Specs = Iterator[tuple[str, nn.Module, PatchSpec]]


def _specs_of_family(model: nn.Module, family: Family, to_quantize: set[int]) -> _Specs:
    for name, module in model.named_modules():
        specs = (family.outside.get(name), *family.specs, *FP8_LINEARS)
        matching = [spec for spec in specs if spec and spec.matches(module)]
        if id(module) in to_quantize:
            yield name, module, FP8_LINEAR
        elif matching:
            # Attention of one class may have a processor of each of several files.
            yield name, module, min(matching, key=lambda spec: spec.why_not(module) is not None)


def _specs_in_part(model: nn.Module) -> _Specs:
    inner: set[int] = set()  # modules that the stand-in of the module around them replaces, too
    known = TEXT_ENCODERS if _is_text_encoder(model) else _IN_PART
    # Where an encoder or decoder gives its result PyTorch's memory format.
    if any(spec.matches(module) for module in model.modules() for spec in ENDS):
        known = (*_IN_PART, IMAGE_CONVOLUTION)
    for name, module in model.named_modules():
        spec = next((spec for spec in known if spec.matches(module)), attention_spec(module))
        inner.update(id(getattr(module, child, None)) for child in getattr(spec, "replaces", ()))
        if spec is not None and id(module) not in inner:
            yield name, module, spec


def _stand_ins(
    name: str, module: nn.Module, spec: PatchSpec, injection: Injection
) -> list[StandIn]:
    """A module's stand-in, if there can be one; the report says what it replaces."""
    report, own = injection.report, spec.known.own_forward
    reason = None
    if isinstance(spec, ProcessorSpec) and not injection.options["attention"]:
        reason = NOT_WANTED
    elif patch.class_forward_slot(module) is None:
        reason = _REPLACED
    elif own is None or type(module).forward is not own:
        reason = UNKNOWN_FORWARD
    if reason is not None:
        report.leave(name, module, reason)
        return []
    # Its parts are checked at each call: they may be others by then.
    stand_in = StandIn(module, spec, name, injection)
    reason = checks.replaced_function(stand_in.functions) or spec.why_not(module)
    if reason is None:
        operations = spec.describe(module, injection)
        if injection.options["is_int8"] and operations.endswith("attention"):
            operations += " or attention_int8"
        report.replaced.append(Replaced(name, type(module).__name__, operations))
    for note in spec.notes(module, injection) if reason is None else [reason]:
        report.leave(name, module, note)
        stand_in.reported.add(note)
    return [stand_in]


def _report_stranger(
    report: InjectionReport, name: str, block: nn.Module, path: str, family: Any
) -> None:
    """Reports a part of a block that is not what the family expects there."""
    module: Any = block
    for child in path.split("."):
        if child not in module._modules:
            break  # what is there has another structure
        module, name = module._modules[child], f"{name}.{child}"
    if module is not None and not any(spec.matches(module) for spec in family.specs):
        report.leave(name, module, f"{an(class_name(module))}, called as it is")


def _check_choice(name: str, value: Any, *choices: Any) -> None:
    accepted = " or ".join(map(repr, choices))
    if not isinstance(value, tuple(map(type, choices))):
        raise TypeError(
            f"inject_kernels: {name} must be {accepted}, got {an(type(value).__name__)}"
        )
    if value not in choices:
        raise ValueError(f"inject_kernels: {name} must be {accepted}, got {value!r}")


def _check_options(attention: Any, precision: Any, keep: Any, **options: Any) -> dict[str, Any]:
    _check_choice("attention", attention, True, False, INT8, SIXTEEN_BIT)
    for name, value in options.items():
        cls, accepted = (int, "an int") if name == "max_cuda_graphs" else (bool, "True or False")
        if type(value) is not cls:
            raise TypeError(
                f"inject_kernels: {name} must be {accepted}, got {an(type(value).__name__)}"
            )
    count = options["max_cuda_graphs"]
    if count < 1:
        raise ValueError(f"inject_kernels: max_cuda_graphs must be 1 or more, got {count}")
    _check_choice("precision", precision, None, *PRECISIONS)
    is_sequence = isinstance(keep, Sequence) and not isinstance(keep, str)
    if not is_sequence or not all(isinstance(name, str) for name in keep):
        raise TypeError(f"inject_kernels: keep must be a sequence of strings, got {keep!r}")
    if keep and precision is None:
        raise ValueError(
            f"inject_kernels: keep must be empty without a precision, got {list(keep)}"
        )
    return {"attention": attention, **options, "precision": precision, "keep": tuple(keep)}


def _check_plans(pipe_or_model: Any, plans: list[_Plan], options: dict[str, Any]) -> None:
    """Raises ValueError if a precision is asked for without effect."""
    precision = options["precision"]
    known = [plan for plan in plans if family_of(plan.model) is not None]
    if not known:
        raise ValueError(
            f"inject_kernels: precision={precision!r} needs a model that runs on the kernels in full, "
            f"got {an(type(pipe_or_model).__name__)} without one"
        )
    models = [(plan.injection.report.model_name, plan.model) for plan in known]
    layers = [(prefix, *names) for prefix, model in models for *names, _ in linear_layers(model)]
    for pattern in options["keep"]:
        if not any(is_named(pattern, *names) for names in layers):
            raise ValueError(
                "inject_kernels: each name in keep must match a linear layer or a module around one, "
                f"got {pattern!r}"
            )
    if any(plan.quantized or plan.is_in_place for plan in known):
        return
    reason = why_none(plan.injection.report for plan in known)
    if reason is not None:
        raise ValueError(
            f"inject_kernels: precision={precision!r} needs a layer that can be quantized, got "
            f"{an(type(pipe_or_model).__name__)} without one: {reason}"
        )


def _components(caller: str, pipe_or_model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a pipeline, by name; a model is its own only component, without a name."""
    if isinstance(pipe_or_model, nn.Module):
        yield "", pipe_or_model
        return
    components = getattr(pipe_or_model, "components", None)
    if not isinstance(components, Mapping):
        components = getattr(pipe_or_model, "__dict__", None)
    if components is None or isinstance(pipe_or_model, type):
        raise TypeError(
            f"{caller}: pipe_or_model must be a torch.nn.Module or a pipeline that holds one, "
            f"got {an(type(pipe_or_model).__name__)}"
        )
    for name, component in components.items():
        if isinstance(component, nn.Module):
            yield name, component


def _models_in(
    name: str, component: nn.Module, is_alone: bool
) -> Iterator[tuple[str, nn.Module, Family | None]]:
    """Models inside of a module, through wrappers such as torch.compile's, each with its family or None.

    A model without a family is a denoiser or autoencoder of diffusers or a text encoder of transformers if it
    is in a pipeline; alone, any model of diffusers or any module.
    """
    cls: Any = find_class(_MODEL) or ()
    modules = [*component.named_modules()]
    models = [(n, m) for n, m in modules if isinstance(m, cls) or _is_text_encoder(m)]
    # An autoencoder's decoder may be a transformer of a family.
    known = [
        (n, m, family)
        for n, m in modules
        if (isinstance(m, cls) or _is_autoencoder(m)) and (family := family_of(m)) is not None
    ]
    if known:
        yield from ((join(name, n), m, family) for n, m, family in known)
        return
    outermost: list[str] = []
    for module_name, module in models:
        is_wanted = is_alone or not type(module).__module__.startswith(_OTHERS)
        if is_wanted and not module_name.startswith(tuple(outermost)):
            outermost.append(f"{module_name}." if module_name else "")
            yield join(name, module_name), module, None
    if is_alone and not outermost:
        unwrapped = component._modules.get("_orig_mod")
        yield ("_orig_mod", unwrapped, None) if unwrapped is not None else ("", component, None)


def _is_text_encoder(module: nn.Module) -> bool:
    """Whether it is a model of transformers whose main input is tokens."""
    cls = find_class(_TRANSFORMERS_MODEL)
    is_model = cls is not None and isinstance(module, cls)
    return (
        is_model
        and type(module).__module__.startswith("transformers.")
        and module.main_input_name == "input_ids"
    )


def _is_autoencoder(model: nn.Module) -> bool:
    return type(model).__module__.startswith(_AUTOENCODERS)


def family_of(module: nn.Module) -> Family | None:
    """The family whose model the module is, subclasses included, or None."""
    return next((f for f in FAMILIES if any(spec.matches(module) for spec in f.models)), None)


# Models without a family: how they connect their modules is unknown, so no module is fused with what comes
# before or after it. A module's stand-in computes the same from the same arguments.
_IN_PART: tuple[PatchSpec, ...] = (
    *_IN_PART_OF_FAMILIES,
    *(*ADAPTIVE_NORMS, *NORMS, GROUP_NORM),
    *(UNFUSED_GELU, *GATED_ACTIVATIONS, *FP8_LINEARS_IN_PART),
    *DECODERS,
    *CONVOLUTIONS,
    *DECODER_LAYERS,
)

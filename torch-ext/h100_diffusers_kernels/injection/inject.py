"""inject_kernels and eject_kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from .checks import class_name, find_class, look_up_libraries, replaced_function
from .cuda_graphs import GraphedStandIn, Pool
from .families import family_of, known_models
from .family import Family
from .in_part import spec_of, why_left_alone
from .patch import UNKNOWN_FORWARD, Injection, PatchSpec, StandIn, can_patch, put_in, take_out
from .report import IN_FULL, IN_PART, NOT_AT_ALL, InjectionReport, Replaced, join

logger = logging.getLogger("h100_diffusers_kernels")

# The attribute of an injected model that holds its Injection. It is on the instance, so that a deep copy of
# the model takes a copy of it along.
_INJECTION = "_h100_diffusers_kernels"
_MODEL = "diffusers.models.modeling_utils:ModelMixin"
# Where diffusers has models that are no denoisers: they run once a picture, not once a step.
_NO_DENOISERS = (
    *("diffusers.models.autoencoders.", "diffusers.models.condition_embedders."),
    "diffusers.pipelines.",
)
_REPLACED = "its forward was replaced by something else"
_NO_MODULE = "it has no module that there is a kernel for"


class _Plan(NamedTuple):
    """What is to be done to a model; ``stand_ins`` is None where it is done already."""

    model: nn.Module
    injection: Injection
    stand_ins: list[StandIn] | None

    @property
    def found_nothing(self) -> bool:
        """Whether there is no module that could have been replaced."""
        left_alone = self.injection.report.left_alone
        return self.stand_ins == [] and all(entry.reason == _NO_MODULE for entry in left_alone)


def inject_kernels(
    pipe_or_model: Any,
    *,
    attention: bool = True,
    cuda_graphs: bool = False,
    max_cuda_graphs: int = 8,
) -> InjectionReport:
    """Makes a diffusers model, or each denoising model of a pipeline, run on this package's kernels.

    A model whose class is known as a whole runs on them in full; every other one in part: its norms,
    activations and attentions, each by itself. The report's ``levels`` say which. Autoencoders, text
    encoders and whatever else a pipeline holds are left as they are, unless one is given by itself.

    Works in place and on the instances only: no class is changed, and neither are weights, processors,
    ``state_dict`` or configuration. Hooks, offloading, LoRA, quantized linear layers and
    ``torch.compile`` keep working, whether they come before or after, and what a user puts in the place
    of a part, or of a function or class that it is made of, is what runs: each part is asked for at each
    call. A second call with the same options does nothing and reports what is in place.
    :func:`eject_kernels` undoes it; do that before pickling a model as a whole (``copy.deepcopy``,
    ``state_dict`` and ``save_pretrained`` need no such care).

    A call that the kernels do not cover (under autocast, with mixed dtypes, within a function or dispatch
    mode, on a device that this build has no kernels for) is computed by the model's own code: that is
    logged once for each class of modules and reason, counted in the report's ``calls``, and an error where
    the environment variable ``H100_DIFFUSERS_KERNELS_STRICT`` is set to 1. Attention is the model's own,
    too, and this is no fall-back, in training, under context parallelism, and wherever an attention
    backend has been chosen: by ``model.set_attention_backend``, by the context manager
    ``attention_backend`` or by ``DIFFUSERS_ATTN_BACKEND``, before or after the injection. (The last
    two cannot be told from no choice where they name "native".)

    Args:
        pipe_or_model: a ``torch.nn.Module`` (a compiled or otherwise wrapped one included), or a pipeline
            with a diffusers model among its components.
        attention: whether attention itself runs on this package's kernel, too. False leaves it to
            diffusers; what comes before and after it is replaced all the same.
        cuda_graphs: whether each model's forward is captured into a CUDA graph at its second call of a kind
            (shapes, dtypes and all else but tensors' values, and what PyTorch is set to) and replayed from
            then on, where no gradients are asked for. What it returns is the caller's own, with the same
            bits. At each replay the model is compared with what was captured: where weights were moved or
            replaced, adapters, hooks, processors or functions changed, graphs are dropped and captured anew.
            A call that cannot be captured runs as it is: the report's ``cuda_graphs`` count the reasons,
            and the first call of each is logged. The memory that a forward works in is held
            once more, for all graphs of the pipeline. Not for a model of which another thread draws random
            numbers from CUDA's default generator: PyTorch refuses that while a graph is captured.
        max_cuda_graphs: how many graphs are kept of a model; the one used least recently goes first.

    Returns:
        The report: each module replaced, and each left alone with the reason. It is also logged,
        under the name ``h100_diffusers_kernels``.

    Raises:
        ValueError: if there is nothing in ``pipe_or_model`` that there are kernels for, or something that was
            injected with other options: eject the kernels first; or if ``max_cuda_graphs`` is less than 1.
            Nothing is changed then.
        TypeError: if an option is of another type, or ``pipe_or_model`` is neither a module nor a pipeline.

    Example::

        report = kernel.inject_kernels(pipe)
        print(report)
    """
    _check_options(attention, cuda_graphs, max_cuda_graphs)
    options = {
        "attention": attention,
        "cuda_graphs": cuda_graphs,
        "max_cuda_graphs": max_cuda_graphs,
    }
    look_up_libraries()
    report = InjectionReport(already_injected=True)
    pool = Pool()
    plans = []
    for name, component in _components("inject_kernels", pipe_or_model):
        models = list(_models_in(name, component, is_alone=component is pipe_or_model))
        if not models:
            report.leave(name, component, "it is no denoising model of diffusers")
            report.levels[name] = NOT_AT_ALL
        plans += [_plan(*model, options, pool) for model in models]
    if all(plan.found_nothing for plan in plans):
        raise ValueError(
            f"inject_kernels: pipe_or_model must be or hold a {known_models()}, or a model with norms, "
            f"activations or attentions of diffusers or PyTorch, got a {type(pipe_or_model).__name__} "
            "without one"
        )
    applied = []
    try:
        for plan in plans:
            if plan.stand_ins is not None:
                report.already_injected &= plan.found_nothing
                applied.append(plan)
                for stand_in in plan.stand_ins:
                    put_in(stand_in)
                if plan.stand_ins:
                    setattr(plan.model, _INJECTION, plan.injection)
            report.add(plan.injection.report)
    except BaseException:
        for plan in applied:
            _undo(plan.model, plan.injection)
        raise
    logger.info("inject_kernels(%s): %s", type(pipe_or_model).__name__, report)
    return report


def eject_kernels(pipe_or_model: Any) -> None:
    """Undoes :func:`inject_kernels`: each module gets back the forward that it had.

    A module whose forward was replaced by something else after the injection keeps that. Where nothing
    was injected, nothing happens.

    Args:
        pipe_or_model: as for :func:`inject_kernels`.

    Raises:
        TypeError: if ``pipe_or_model`` is neither a module nor a pipeline.
    """
    for name, component in _components("eject_kernels", pipe_or_model):
        for module_name, module in list(component.named_modules()):
            injection = vars(module).get(_INJECTION)
            if injection is not None:
                _undo(module, injection)
                logger.info("eject_kernels: restored %s", join(name, module_name) or "the model")
        take_out(component.modules())  # stand-ins that were kept and put back, or copied alone


def _undo(model: nn.Module, injection: Injection) -> None:
    injection.is_over = True
    modules = (reference() for reference in injection.modules)
    take_out([*model.modules(), *(module for module in modules if module is not None)])
    vars(model).pop(_INJECTION, None)


def _plan(
    name: str, model: nn.Module, family: Family | None, options: dict[str, Any], pool: Pool
) -> _Plan:
    """What is in place, if its options are the same, or what is to be done."""
    injection = vars(model).get(_INJECTION)
    if injection is not None:
        changed = {k: value for k, value in options.items() if injection.options[k] != value}
        if not changed:
            injection.report.model_name = name
            return _Plan(model, injection, None)
        before = {key: injection.options[key] for key in changed}
        raise ValueError(
            f"inject_kernels: {name or 'the model'} runs on kernels injected with {_shown(before)}, "
            f"got {_shown(changed)}: call eject_kernels first"
        )
    injection = Injection(name, options)
    report = injection.report
    stand_ins: list[StandIn] = []
    if getattr(model, "_parallel_config", None) is not None:
        report.leave("", model, "parallelism is on: each rank holds a part of the tokens only")
        report.levels[""] = NOT_AT_ALL
        return _Plan(model, injection, stand_ins)
    found = _specs_of_family(model, family) if family else _specs_in_part(model, injection)
    for module_name, module, spec in found:
        stand_in = _stand_in(module_name, module, spec, injection)
        if stand_in is not None:
            stand_ins.append(stand_in)
        for path in getattr(spec, "inner", ()) if family else ():
            _report_stranger(report, module_name, module, path, family)
    if family is not None:
        for child, reason in family.left_alone.items():
            found_child = getattr(model, child, None)
            if isinstance(found_child, nn.Module):
                report.leave(child, found_child, reason)
        report.levels[""] = IN_FULL
    else:
        if not found and not report.left_alone:
            report.leave("", model, _NO_MODULE)
        report.levels[""] = IN_PART if report.replaced else NOT_AT_ALL
    plan = _Plan(model, injection, stand_ins)
    if options["cuda_graphs"] and not plan.found_nothing:
        if can_patch(model):
            inner = next((s for s in stand_ins if s.module is model), None)
            stand_ins[:] = [s for s in stand_ins if s is not inner]
            stand_ins.append(GraphedStandIn(model, inner, injection, pool))
        else:
            report.leave("", model, f"no CUDA graphs: {_REPLACED}")
    return plan


def _specs_of_family(model: nn.Module, family: Family) -> list[tuple[str, nn.Module, PatchSpec]]:
    found = []
    for name, module in model.named_modules():
        outside = (family.outside[name],) if name in family.outside else ()
        for spec in (*outside, *family.specs):
            if spec.matches(module):
                found.append((name, module, spec))
                break
    return found


def _specs_in_part(
    model: nn.Module, injection: Injection
) -> list[tuple[str, nn.Module, PatchSpec]]:
    found = []
    inner: set[int] = set()  # what the forward of the module around it stands in for, too
    for name, module in model.named_modules():
        spec = spec_of(module)
        inner.update(id(getattr(module, child, None)) for child in getattr(spec, "replaces", ()))
        if spec is None or id(module) in inner:
            continue
        reason = why_left_alone(module, spec, injection)
        if reason is None:
            found.append((name, module, spec))
        else:
            injection.report.leave(name, module, reason)
    return found


def _stand_in(
    name: str, module: nn.Module, spec: PatchSpec, injection: Injection
) -> StandIn | None:
    """A module's stand-in, with what the report says of it; None where there can be none."""
    report = injection.report
    own, _ = injection.resolve(spec)
    if not can_patch(module):
        report.leave(name, module, _REPLACED)
        return None
    if own is None or type(module).forward is not own:
        report.leave(name, module, UNKNOWN_FORWARD)
        return None
    # Its parts are asked for at each call: they may be others by then.
    stand_in = StandIn(module, spec, name, injection)
    reason = replaced_function(stand_in.functions) or spec.why_not(module, injection)
    notes = [] if reason is not None else spec.notes(module, injection)
    if reason is None:
        operations = spec.describe(module, injection)
        report.replaced.append(Replaced(name, type(module).__name__, operations))
    for note in notes if reason is None else [reason]:
        report.leave(name, module, note)
        stand_in.count.reported.add(note)
    return stand_in


def _report_stranger(
    report: InjectionReport, name: str, block: nn.Module, path: str, family: Any
) -> None:
    """Where a part is expected in a block and something else is found, the report names it."""
    module: Any = block
    for child in path.split("."):
        if child not in module._modules:
            break  # what is there instead is built in another way
        module, name = module._modules[child], f"{name}.{child}"
    if module is not None and not any(spec.matches(module) for spec in family.specs):
        report.leave(name, module, f"a {class_name(module)}, called as it is")


def _check_options(attention: Any, cuda_graphs: Any, max_cuda_graphs: Any) -> None:
    for name, value in (("attention", attention), ("cuda_graphs", cuda_graphs)):
        if not isinstance(value, bool):
            raise TypeError(
                f"inject_kernels: {name} must be True or False, got a {type(value).__name__}"
            )
    if isinstance(max_cuda_graphs, bool) or not isinstance(max_cuda_graphs, int):
        raise TypeError(
            f"inject_kernels: max_cuda_graphs must be an int, got a {type(max_cuda_graphs).__name__}"
        )
    if max_cuda_graphs < 1:
        raise ValueError(
            f"inject_kernels: max_cuda_graphs must be 1 or more, got {max_cuda_graphs}"
        )


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _components(caller: str, pipe_or_model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules to look into, by name; a model is its own only component, without a name."""
    if isinstance(pipe_or_model, nn.Module):
        yield "", pipe_or_model
        return
    components = getattr(pipe_or_model, "components", None)
    if not isinstance(components, Mapping):
        components = getattr(pipe_or_model, "__dict__", None)
    if components is None or isinstance(pipe_or_model, type):
        raise TypeError(
            f"{caller}: pipe_or_model must be a torch.nn.Module or a pipeline that holds one, "
            f"got a {type(pipe_or_model).__name__}"
        )
    for name, component in components.items():
        if isinstance(component, nn.Module):
            yield name, component


def _models_in(
    name: str, component: nn.Module, is_alone: bool
) -> Iterator[tuple[str, nn.Module, Family | None]]:
    """Models inside of a module, through wrappers such as torch.compile's, each with its family or None.

    Without a family it is, in a pipeline, a denoiser of diffusers; alone, a model of diffusers, or whatever
    it is.
    """
    is_known = False
    for module_name, module in component.named_modules():
        family = family_of(module)
        if family is not None:
            is_known = True
            yield join(name, module_name), module, family
    if is_known:
        return
    cls: Any = find_class(_MODEL)
    outermost: list[str] = []
    for module_name, module in component.named_modules():
        is_model = cls is not None and isinstance(module, cls)
        is_wanted = is_alone or not type(module).__module__.startswith(_NO_DENOISERS)
        if is_model and is_wanted and not any(module_name.startswith(o) for o in outermost):
            outermost.append(f"{module_name}." if module_name else "")
            yield join(name, module_name), module, None
    if is_alone and not outermost:
        unwrapped = component._modules.get("_orig_mod")
        yield ("_orig_mod", unwrapped, None) if unwrapped is not None else ("", component, None)

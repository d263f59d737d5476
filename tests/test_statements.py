"""Statements of the pages, each with the test that shows that it is true."""

import re

import pytest

from conftest import CHECKOUT

STATEMENTS = {
    "README.md": {
        "restores the pipeline bit for bit": "test_conformance.py::test_eject_gives_back_the_model",
        "LoRA, quantized layers, offloading, caches, hooks, `torch.compile` and your own modules keep "
        "working, whether added before or after the injection": (
            "test_conformance.py::test_actions_before_the_injection"
        ),
        "Each reason is logged once for each class of modules and counted in `report.calls`": (
            "test_injection_fallback.py::test_fall_backs_are_counted"
        ),
        "`H100_DIFFUSERS_KERNELS_STRICT=1` makes it an error": (
            "test_injection_fallback.py::test_strict_raises"
        ),
        "with heads of a multiple of 8 up to 128 elements": (
            "test_injection_attention.py::test_other_head_sizes_keep_the_models_attention"
        ),
        "with masks that differ between queries or heads": (
            "test_injection_attention.py::test_other_masks_keep_the_models_attention"
        ),
        "before or after the injection, tensor parallelism, FSDP2 and DDP": (
            "test_context_parallel.py::test_some_families"
        ),
        "Two runs on the same inputs give the same bits": (
            "test_contracts.py::test_two_runs_give_the_same_bits"
        ),
        "Without a GPU the example takes a small trained LTX-Video": (
            "test_examples.py::test_trained_model_runs_at_its_size_with_its_prompt"
        ),
        "A CPU build has the same operations": "test_package.py::test_loads",
    },
    "docs/injection.md": {
        "A second call with the same options changes nothing": (
            "test_conformance.py::test_second_injection"
        ),
        "A replaced forward keeps the signature, name and docstring of the class's forward": (
            "test_injection_foreign_code.py::test_forwards_keep_signature_name_and_docstring"
        ),
        "An argument that is neither a module nor a pipeline raises TypeError": (
            "test_injection_foreign_code.py::test_wrong_types_raise"
        ),
        "The report says when attention itself stays the model's own": (
            "test_injection.py::test_the_report_tells_of_attention_that_is_not_replaced"
        ),
        "The mode then sees every operation": (
            "test_injection_foreign_code.py::test_modes_see_the_models_own_code"
        ),
        "`torch.set_default_device` does not count as a mode": (
            "test_injection_foreign_code.py::test_a_default_device_changes_nothing"
        ),
        "`eject_kernels` gives back the same parameters, bit for bit": (
            "test_injection_precision.py::test_ejection"
        ),
        "`precision=` imports torchao and leaves Inductor's configuration as it is": (
            "test_injection_precision.py::test_compiler_configuration"
        ),
        "`fuse_lora` adds it to the original weight and quantizes the sum": (
            "test_injection_precision.py::test_fuse"
        ),
        "The mask of a padded text is supported": (
            "test_injection_attention.py::test_padding_has_no_weight"
        ),
    },
    "docs/operations.md": {
        "Empty tensors give empty results": "test_contracts.py::test_empty_tensors",
        "All operations trace in `torch.compile` without a graph break": (
            "test_contracts.py::test_compile_without_graph_break_or_recompilation"
        ),
        "`out` shares no memory with an input, except that activations may overwrite their input": (
            "test_out.py::test_outputs_that_overlap_inputs"
        ),
        "A wrong argument raises before anything is launched or written": (
            "test_errors.py::test_mistakes"
        ),
        "Failure to allocate a result raises `torch.OutOfMemoryError`": (
            "test_errors.py::test_no_memory"
        ),
    },
    "docs/releasing.md": {
        "All files match the digests in the variant's `metadata.json`": (
            "test_publish.py::test_refuses"
        ),
        "Then `version=1` and the commit both work offline": (
            "test_publish.py::test_versions_load_side_by_side_and_without_network"
        ),
        "`kernels` 0.17.2 locks only kernels of publishers that the Hub trusts": (
            "test_publish.py::test_lock_and_benchmark_need_a_trusted_publisher"
        ),
    },
}


@pytest.mark.parametrize(
    ("page", "statement"),
    [(page, text) for page, of_page in STATEMENTS.items() for text in of_page],
)
def test_statement_is_on_the_page_and_has_a_test(page, statement):
    text = re.sub(r"\s+", " ", (CHECKOUT / page).read_text(encoding="utf-8"))
    assert statement in text
    file, _, name = STATEMENTS[page][statement].partition("::")
    source = (CHECKOUT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(", source, re.MULTILINE)

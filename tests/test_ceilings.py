"""The hardware ceilings: what reads the programs' output and machine code, and on a GPU the programs.

`make cross` compiles them all and checks their machine code.
"""

import json
import sys
from importlib import util

import click
import pytest
import torch
from click.testing import CliRunner

from conftest import CHECKOUT

CEILINGS = CHECKOUT / "benchmarks" / "ceilings"


@pytest.fixture(scope="module")
def ceilings():
    spec = util.spec_from_file_location("ceilings_run", CEILINGS / "run.py")
    module = util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


MEASURE = {
    "program": "memory",
    "name": "copy 16 B x 4, 64 MiB",
    "unit": "TB/s",
    "measured": 2.5,
    "theoretical": 3.35,
    "formula": "2 x memory clock x bus width / 8",
    "ratio": 0.7463,
}
WITHOUT_THEORY = {**MEASURE, "theoretical": None, "formula": None, "ratio": None}


def test_every_program_has_instructions_to_check(ceilings):
    assert {path.stem for path in CEILINGS.glob("*.cu")} == set(ceilings.INSTRUCTIONS)
    assert all(kernels for kernels in ceilings.INSTRUCTIONS.values())


def test_measures_are_read(ceilings):
    lines = [json.dumps(MEASURE), "", json.dumps(WITHOUT_THEORY)]
    assert ceilings.parse("memory", lines) == [MEASURE, WITHOUT_THEORY]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "memory printed no measure"),
        ([json.dumps({**MEASURE, "program": "cache"})], "an invalid measure"),
        ([json.dumps({"program": "memory", "name": "copy"})], "an invalid measure"),
    ],
)
def test_output_that_is_no_measure(ceilings, lines, message):
    with pytest.raises(click.ClickException, match=message):
        ceilings.parse("memory", lines)


def test_a_measure_above_its_limit_fails(ceilings):
    ceilings.check_ratios(
        [MEASURE, WITHOUT_THEORY, {**MEASURE, "ratio": ceilings.targets.HIGHEST_CEILING_RATIO}]
    )
    with pytest.raises(click.ClickException) as raised:
        ceilings.check_ratios([MEASURE, {**MEASURE, "name": "read", "ratio": 12.142}])
    assert raised.value.message == (
        "memory: read is at 1214% of its limit: it measured something else"
    )


def test_table_shows_what_is_promised(ceilings):
    _, _, first, second = ceilings.table([MEASURE, WITHOUT_THEORY]).splitlines()
    assert "2.50" in first and "3.35" in first and "74.6%" in first
    assert "2.50" in second and "%" not in second


def kernels_with(ceilings, program):
    return {f"_Z{part}E": dict(opcodes) for part, opcodes in ceilings.INSTRUCTIONS[program].items()}


@pytest.mark.parametrize("program", ["memory", "tensor_core"])
def test_missing_instructions_are_named(ceilings, program):
    kernels = kernels_with(ceilings, program)
    assert ceilings.missing_instructions(program, kernels) == []
    part, opcodes = next(iter(ceilings.INSTRUCTIONS[program].items()))
    opcode, count = next(iter(opcodes.items()))
    kernels[f"_Z{part}E"][opcode] -= 1
    (fault,) = ceilings.missing_instructions(program, kernels)
    assert fault == f"{program}: {part} has {count - 1} {opcode}, at least {count} are wanted"
    del kernels[f"_Z{part}E"]
    (fault,) = ceilings.missing_instructions(program, kernels)
    assert fault == f"{program}: 0 kernels have {part} in their names"


def test_without_a_gpu_it_says_so(ceilings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(ceilings.main, [])
    assert result.exit_code == 1 and "there is no CUDA GPU" in result.output

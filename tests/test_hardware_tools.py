"""Ceilings and profiles of a GPU: reading and refusing the programs' output."""

import csv
import io
import json
from importlib import util

import click
import pytest

from benchmarks.operations import profile_kernels as profiling

from conftest import CHECKOUT
from inputs import TABLE

CEILINGS = CHECKOUT / "benchmarks" / "ceilings"


@pytest.fixture(scope="module")
def ceilings():
    spec = util.spec_from_file_location("ceilings_run", CEILINGS / "run.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MEASURE = {"program": "memory", "name": "copy 16 B x 4, 64 MiB", "unit": "TB/s", "measured": 2.5}
MEASURE |= {"theoretical": 3.35, "formula": "2 x memory clock x bus width / 8", "ratio": 0.7463}
WITHOUT_THEORY = {**MEASURE, "theoretical": None, "formula": None, "ratio": None}


def test_measures_are_read(ceilings):
    lines = [json.dumps(MEASURE), "", json.dumps(WITHOUT_THEORY)]
    assert ceilings.parse("memory", lines) == [MEASURE, WITHOUT_THEORY]
    with pytest.raises(click.ClickException, match="an invalid measure"):
        ceilings.parse("memory", [json.dumps({**MEASURE, "program": "cache"})])


def test_a_measure_above_its_limit_fails(ceilings):
    highest = {**MEASURE, "ratio": ceilings.HIGHEST_RATIO}
    ceilings.check_ratios([MEASURE, WITHOUT_THEORY, highest])
    with pytest.raises(click.ClickException, match="memory: read is at 1214% of its limit"):
        ceilings.check_ratios([MEASURE, {**MEASURE, "name": "read", "ratio": 12.142}])


def test_missing_instructions_are_named(ceilings):
    """Each program has instructions to check, because the compiler might remove the measured ones."""
    assert {path.stem for path in CEILINGS.glob("*.cu")} == set(ceilings.INSTRUCTIONS)
    for program, wanted in ceilings.INSTRUCTIONS.items():
        kernels = {f"_Z{part}E": dict(opcodes) for part, opcodes in wanted.items()}
        assert kernels and ceilings.missing_instructions(program, kernels) == []
        part = next(iter(wanted))
        kernels[f"_Z{part}E"][next(iter(wanted[part]))] -= 1
        assert len(ceilings.missing_instructions(program, kernels)) == 1
        del kernels[f"_Z{part}E"]
        assert len(ceilings.missing_instructions(program, kernels)) == 1


# ------------------------------------------------------------------------------------------------
# Profiles

RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
NORM, ROPE = "rms_norm 2x8064x2048", "qk_norm_rope tables (B, S, D) 2x8064x2048"


def stall(name):
    return f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"


VALUES = {
    profiling.DRAM: "88.41",
    profiling.OCCUPANCY: "75.02",
    profiling.L2_HITS: "50.13",
    profiling.REGISTERS: "40",
    profiling.DURATION: "50,816",
    profiling.BYTES_READ: "66,071,552",
    profiling.BYTES_WRITTEN: "41,238,144",
    **dict.fromkeys(profiling.LOCAL_SECTORS, "0"),
    **dict.fromkeys(profiling.LIMITS.values(), "12"),
    stall("selected"): "1.00",
    stall("long_scoreboard"): "31.25",
    stall("barrier"): "6.5",
    "smsp__average_warps_issue_stalled_barrier_not_issued_per_issue_active.ratio": "99",
    "smsp__average_warp_latency_per_inst_issued.ratio": "39.2",
}
UNITS = {
    profiling.DURATION: "ns",
    profiling.BYTES_READ: "byte",
    profiling.BYTES_WRITTEN: "byte",
    **dict.fromkeys((profiling.DRAM, profiling.OCCUPANCY, profiling.L2_HITS), "%"),
}


def ncu_output(*kernels, units=UNITS):
    """ncu's output for kernels (workload, changed values): its own lines, names, units, rows."""
    columns = ["ID", "Process ID", "Process Name", RANGES, "Kernel Name", "Context", *VALUES]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    writer.writerow([units.get(name, "") for name in columns])
    for index, (workload, changes) in enumerate(kernels):
        row = {
            **VALUES,
            "ID": index,
            RANGES: f'1  "<default domain>:workload<{workload}>:none:none:none:none:none:none" ',
            "Kernel Name": "void h100_diffusers_kernels::row_norm_kernel<float, 2>(Params)",
            **changes,
        }
        writer.writerow([row.get(name, "x") for name in columns])
    begin = "==PROF== Connected to process 7 (/usr/bin/python)\n"
    return begin + text.getvalue() + "==PROF== Disconnected from process 7\n"


def test_counters_are_read():
    local = dict(zip(profiling.LOCAL_SECTORS, ("1,000", "24"), strict=True))
    text = ncu_output((NORM, {}), (ROPE, {profiling.DRAM: "85.0", **local}))
    norm, rope = profiling.parse(text, [NORM, ROPE])
    assert (norm.workload, rope.workload) == (NORM, ROPE)
    assert norm.microseconds == pytest.approx(50.816)
    assert (norm.dram_percent, norm.occupancy_percent, norm.l2_hit_percent) == (88.41, 75.02, 50.13)
    assert (norm.dram_bytes_read, norm.dram_bytes_written) == (66_071_552, 41_238_144)
    assert (norm.registers, norm.local_bytes, rope.local_bytes) == (40, 0, 1024 * 32)
    assert norm.stalls == {"long_scoreboard": 31.25, "barrier": 6.5}
    assert norm.largest_stall == "long_scoreboard" and norm.misses == []
    assert rope.misses == ["memory 85.0% <= 85%", "32768 bytes of local memory"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ncu_output((ROPE, {})), f"no kernel of {NORM}"),
        (ncu_output((NORM, {}), units={**UNITS, profiling.DURATION: "us"}), "in 'us', not in 'ns'"),
    ],
)
def test_a_wrong_profile_is_refused(text, message):
    with pytest.raises(profiling.ProfileError, match=message):
        profiling.parse(text, [NORM])


def test_every_operation_is_profiled():
    """The ones left out differ from a profiled one only in the norm."""
    assert set(TABLE) - set(profiling.OPERATIONS) == {"gated_residual_layer_norm_modulate"}

"""The profile of the kernels: what is read from ncu's table, and what is said where it lacks something."""

import csv
import io
import re
import sys

import pytest
import torch
from click.testing import CliRunner

from conftest import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "benchmarks"))

import profile_kernels as profiling

RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
STALLS = {"selected": "1.00", "not_selected": "0.40", "long_scoreboard": "31.25", "barrier": "6.5"}
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
    **{stall(name): value for name, value in STALLS.items()},
    "smsp__average_warps_issue_stalled_barrier_not_issued_per_issue_active.ratio": "99",
    "smsp__average_warp_latency_per_inst_issued.ratio": "39.2",
}
UNITS = {
    profiling.DURATION: "ns",
    profiling.BYTES_READ: "byte",
    profiling.BYTES_WRITTEN: "byte",
    **dict.fromkeys((profiling.DRAM, profiling.OCCUPANCY, profiling.L2_HITS), "%"),
}


def ncu_output(*kernels, units=UNITS, without=()):
    """What ncu writes of kernels (workload, changed values): its own lines, names, units, rows."""
    metrics = [name for name in VALUES if name not in without]
    identity = ["ID", "Process ID", "Process Name", "Host Name", RANGES, "Kernel Name", "Context"]
    identity = [name for name in identity if name not in without]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow([*identity, *metrics])
    writer.writerow([*[""] * len(identity), *(units.get(name, "") for name in metrics)])
    for index, (workload, changes) in enumerate(kernels):
        row = {
            **VALUES,
            "ID": index,
            RANGES: f'1  "<default domain>:workload<{workload}>:none:none:none:none:none:none" ',
            "Kernel Name": "void h100_diffusers_kernels::row_norm_kernel<float, 2>(Params)",
            **changes,
        }
        writer.writerow([row.get(name, "x") for name in (*identity, *metrics)])
    begin = "==PROF== Connected to process 7 (/usr/bin/python)\n"
    return begin + text.getvalue() + "==PROF== Disconnected from process 7\n"


def test_counters_are_read():
    local = dict(zip(profiling.LOCAL_SECTORS, ("1,000", "24"), strict=True))
    text = ncu_output((NORM, {}), (ROPE, {profiling.DRAM: "85.0", **local}))
    norm, rope = profiling.parse(text, [NORM, ROPE])
    assert (norm.workload, rope.workload) == (NORM, ROPE)
    assert norm.kernel.startswith("void h100_diffusers_kernels::row_norm_kernel<float, 2>")
    assert norm.microseconds == pytest.approx(50.816)
    assert (norm.dram_percent, norm.occupancy_percent, norm.l2_hit_percent) == (88.41, 75.02, 50.13)
    assert (norm.dram_bytes_read, norm.dram_bytes_written) == (66_071_552, 41_238_144)
    assert (norm.registers, norm.local_bytes, rope.local_bytes) == (40, 0, 1024 * 32)
    assert norm.occupancy_limits == dict.fromkeys(profiling.LIMITS, 12)
    assert norm.stalls == {"not_selected": 0.4, "long_scoreboard": 31.25, "barrier": 6.5}
    assert norm.largest_stall == "long_scoreboard"


@pytest.mark.parametrize(
    ("changes", "misses"),
    [
        ({}, []),
        ({profiling.DRAM: "85"}, ["memory 85.0% <= 85%"]),
        ({profiling.OCCUPANCY: "49.96"}, ["occupancy 50.0% <= 50%"]),
        ({profiling.LOCAL_SECTORS[1]: "2"}, ["64 bytes of local memory"]),
    ],
)
def test_misses_are_marked(changes, misses):
    profiles = profiling.parse(ncu_output((NORM, changes)), [NORM])
    assert profiles[0].misses == misses
    row = profiling.table(profiles).splitlines()[-1]
    assert row.endswith(misses[0] if misses else "ok") and "long_scoreboard 31.2" in row


@pytest.mark.parametrize("name", [*profiling.METRICS, profiling.RANGE_COLUMN])
def test_missing_column_is_named(name):
    column = RANGES if name == profiling.RANGE_COLUMN else name
    text = ncu_output((NORM, {}), without=[column])
    with pytest.raises(profiling.ProfileError, match=f"no column {re.escape(name)}"):
        profiling.parse(text, [NORM])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM\n", "profiled no kernel.*(?s:.*)ERR_NVGPUCTRPERM"),
        (ncu_output(), f"no kernel of {NORM}"),
        (ncu_output((ROPE, {})), f"no kernel of {NORM}"),
        (ncu_output((NORM, {profiling.L2_HITS: "n/a"})), f"'n/a' as {profiling.L2_HITS}"),
        (ncu_output((NORM, {RANGES: ""})), "names no workload"),
        (ncu_output((NORM, {}), without=[*map(stall, STALLS)]), "no stall reasons"),
        (ncu_output((NORM, {}), units={**UNITS, profiling.DURATION: "us"}), "in 'us', not in 'ns'"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(profiling.ProfileError, match=message):
        profiling.parse(text, [NORM])


def test_every_operation_has_a_main_shape():
    """But for those that differ from their siblings in the norm alone."""
    from inputs import OPERATIONS

    public = {"qk_norm_rope" if name.startswith("qk_norm") else name for name in OPERATIONS}
    assert public - set(profiling.OPERATIONS) == {
        "gated_residual_layer_norm_modulate",
        "gated_residual_layer_norm_modulate_pair",
    }
    names = [str(workload) for _, workload in profiling.MAIN_SHAPES]
    assert len(set(names)) == len(names)


def test_command_asks_for_all_that_is_read(tmp_path):
    command = profiling.command("ncu", tmp_path / "log", ["rms_norm"])
    assert command[command.index("--metrics") + 1].split(",") == list(profiling.METRICS)
    assert command[-3:] == ["--under-ncu", "--only", "rms_norm"]


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(profiling.main, [])
    assert result.exit_code == 1 and "there is no CUDA GPU" in result.output

"""Videos of the small trained model: what the detector finds in them, and distances from eager's."""

from __future__ import annotations

from pathlib import Path

from .common import MODE_NAMES, is_measured, load, markdown, setup, size_name, table, unmeasured

NAMES = {
    **MODE_NAMES,
    "eager-again": "eager, again",
    "eager-efficient": "eager, memory-efficient attention",
    "eager-math": "eager, unfused attention",
    "eager-float32": "eager in float32",
}


def decibels(entry: dict, key: str) -> str:
    return "equal" if entry["psnr_db"] is None else f"{entry['psnr_db'][key]:.1f} dB"


@table
def quality(results: Path) -> str:
    """Each mode: shares of right figures, PSNR and SSIM against eager."""
    if not is_measured(results, "quality"):
        return unmeasured("quality")
    result = load(results, "quality")
    rows = []
    for mode, entry in result["videos"].items():
        cells = [NAMES[mode], *(f"{share:.1%}" for share in entry["right"].values())]
        if mode == "eager":
            rows.append([*cells, "", "", ""])
            continue
        ssim = "1" if entry["ssim"] is None else f"{entry['ssim']['median']:.4f}"
        rows.append([*cells, decibels(entry, "median"), decibels(entry, "min"), ssim])
    headers = ["mode", "color", "motion", "shape", "PSNR, median", "PSNR, lowest", "SSIM, median"]
    size = "x".join(map(str, (*result["size"][3:], *result["size"][1:3])))
    what = f"{result['captions']} captions, {size_name(size)}, {result['size'][0]} steps"
    return markdown(rows, headers) + f"\n\n{what}, {result['dtype']}." + setup(result)

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


def decibels(psnr: dict | None, missing: str) -> str:
    return missing if psnr is None else f"{psnr['median']:.1f}, {psnr['min']:.1f} dB"


@table
def quality(results: Path) -> str:
    """Each mode: shares of right figures, PSNR and SSIM against eager, PSNR against eager in float32."""
    return _videos(results, "quality")


@table
def fp8_quality(results: Path) -> str:
    """The same with the modes in FP8."""
    return _videos(results, "fp8_quality")


def _videos(results: Path, name: str) -> str:
    if not is_measured(results, name):
        return unmeasured(name)
    result = load(results, name)
    videos = result["videos"]
    rows = []
    for mode, entry in videos.items():
        equal = "" if mode == "eager" else "equal"
        rows.append(
            [
                NAMES[mode],
                *(f"{share:.1%}" for share in entry["right"].values()),
                decibels(entry["psnr_db"], equal),
                equal if entry["ssim"] is None else f"{entry['ssim']['median']:.4f}",
                decibels(entry["psnr_to_float32_db"], ""),
            ]
        )
    headers = ["mode", "color", "motion", "shape", "PSNR: median, lowest", "SSIM, median"]
    headers.append("PSNR to float32: median, lowest")
    size = "x".join(map(str, (*result["size"][3:], *result["size"][1:3])))
    what = f"{result['captions']} captions, {size_name(size)}, {result['size'][0]} steps"
    return markdown(rows, headers) + f"\n\n{what}, {result['dtype']}." + setup(result)

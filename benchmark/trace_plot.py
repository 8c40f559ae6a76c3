"""A replay's report as a picture: reuse that is left, over the tiles that it costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], path: Path) -> bool:
    """Write ``path``, or say what is missing; whether it was written."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print(f"{path} is not drawn: install matplotlib", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (reuse, memory) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    names = list(report["policies"])
    for name, row in report["policies"].items():
        reuse.scatter(row["tiles_over_dense"], row["effective_over_nominal"], label=name)
    reuse.set_xscale("log")
    reuse.set_xlabel("tiles captured / distinct blocks")
    reuse.set_ylabel("effective / nominal reuse")
    reuse.legend()
    left = [0.0] * len(names)
    for place in ("device", "host"):
        sizes = [row["tile_bytes"][place] / 1e9 for row in report["policies"].values()]
        memory.barh(names, sizes, left=left, label=place)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    memory.set_xlabel("GB of tiles at the peak, V4-Flash")
    memory.legend()
    figure.suptitle(f"{report['requests']} requests, {report['tokens']:,} prompt tokens")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True

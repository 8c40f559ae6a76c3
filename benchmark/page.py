"""A report of bench.py as one HTML page: plots as inline SVG, and every figure in a table."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Mapping, Sequence
from string import Template
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

# A restore or a capture on a CPU may take this much of a plain copy's time.
COPY_GOAL = 1.25
_COLOURS = {"off": "#9a9a9a", "on": "#2b6cb0"}

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Benchmark of bit-exact prefix reuse</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px } td, th { padding: .1rem .8rem .1rem 0; text-align: left }
td + td { font-variant-numeric: tabular-nums } svg { max-width: 100%; height: auto } .note { color: #8a4b00 }
</style></head><body>
<h1>Benchmark of bit-exact prefix reuse</h1>
<p>$summary</p>
$sections
</body></html>
""")


class Bar(NamedTuple):
    """A ratio with the middle half of its pairs."""

    label: str
    ratio: float
    q1: float
    q3: float


def render(report: Mapping[str, Any]) -> str:
    """The page. A part that failed or was skipped says why; one that is missing is not there."""
    machine = ", ".join(f"{key} {value}" for key, value in report.get("machine", {}).items())
    quick = " A quick run: few rounds." if report.get("quick") else ""
    parts = report.get("parts", {})
    sections = [_section(title, plot) for title, plot in _plots(parts)]
    sections += [_part(name, part) for name, part in parts.items()]
    return _PAGE.substitute(
        summary=html.escape(
            f"Every figure is a ratio within one run on one machine: {machine}.{quick} Ratios are medians of pairs, "
            f"bars reach over the middle half of the pairs. Nothing was measured on a GPU unless gpu_tiles says so."
        ),
        sections="\n".join(sections),
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{content}"


def _part(name: str, part: Mapping[str, Any]) -> str:
    """A part's figures as a table, or why there are none."""
    title = f"{name}: {part.get('title', '')}"
    for key in ("error", "skipped"):
        if key in part:
            return _section(title, f'<p class="note">{key}: {html.escape(str(part[key]))}</p>')
    rows = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in flat(part["figures"])
    )
    kind = '<p class="note">A projection on paper, not a measurement.</p>' if is_projection(part) else ""
    return _section(title, f"{kind}<details><summary>all figures</summary><table>{rows}</table></details>")


def is_projection(part: Mapping[str, Any]) -> bool:
    return bool(part.get("figures", {}).get("is_projection"))


def flat(figures: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves with their path. Example: {"a": {"b": 0.12345}, "c": [1]} -> ("a.b", "0.1234"), ("c.0", "1")"""
    if isinstance(figures, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(figures.items())
    elif isinstance(figures, list):
        items = iter(enumerate(figures))
    else:
        yield prefix, f"{figures:.4g}" if isinstance(figures, float) else str(figures)
        return
    for key, value in items:
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def _plots(parts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    figures = {name: part["figures"] for name, part in parts.items() if "figures" in part}
    copies = _bars(figures, _COPIES)
    if copies:
        yield "Restore and capture against a plain copy of as many bytes", _ratios(copies, COPY_GOAL, "goal")
    if steps := _bars(figures, _STEPS):
        yield "Steps of the model, with against without", _ratios(steps, 1.0, "no difference")
    if "server" in figures:
        yield "Time to the first token against a cold run (processor time)", _first_tokens(figures["server"])
    if "projection" in figures:
        yield "Projection on paper, not measured: capture's share of a prefill step", _projection(figures["projection"])


_COPIES = (
    ("restore", "one_slot", "restore, one slot"),
    ("restore", "four_slots", "restore, four slots"),
    ("restore", "layer_wise", "restore, layer by layer"),
    ("capture_rows", "prefill", "capture, prefill"),
    ("capture_rows", "chunk_end", "capture, end of a chunk"),
    ("capture_rows", "decode", "capture, decode"),
)
_STEPS = (
    ("capture", "prefill", "prefill with captures"),
    ("capture", "decode", "decode at a boundary"),
    ("capture", "decode_without_boundary", "decode without a boundary"),
)


def _bars(figures: Mapping[str, Any], wanted: Sequence[tuple[str, str, str]]) -> list[Bar]:
    found = [(label, figures[part][name]) for part, name, label in wanted if name in figures.get(part, {})]
    return [Bar(label, f["ratio"], f["q1"], f["q3"]) for label, f in found]


def _ratios(bars: Sequence[Bar], line: float, line_label: str) -> str:
    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.45 * len(bars)), layout="constrained")
    labels = [bar.label for bar in bars]
    spread = [[max(b.ratio - b.q1, 0) for b in bars], [max(b.q3 - b.ratio, 0) for b in bars]]
    axes.barh(labels, [bar.ratio for bar in bars], xerr=spread, color=_COLOURS["on"], ecolor="#222", height=0.6)
    axes.axvline(line, color="#c05621", linestyle="--", label=f"{line_label}: {line:g}")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    return _svg(figure)


def _first_tokens(server: Mapping[str, Any]) -> str:
    rows = server["first_token"]
    tiers = [tier for tier in ("device", "host", "storage") if any(r["tier"] == tier for r in rows)]
    figure, all_axes = pyplot.subplots(1, max(len(tiers), 1), figsize=(9, 3), sharey=True, squeeze=False)
    for axes, tier in zip(all_axes[0], tiers, strict=False):
        found = [r for r in rows if r["tier"] == tier]
        for offset, mode in ((-0.2, "off"), (0.2, "on")):
            heights = [r[mode]["cpu_over_cold"] or 0 for r in found]
            axes.bar(
                [k + offset for k in range(len(found))], heights, 0.4, color=_COLOURS[mode], label=f"switch {mode}"
            )
        axes.set_xticks(range(len(found)), [f"{r['length']:,}" for r in found])
        axes.set_title(tier)
        axes.set_xlabel("tokens of the prompt")
    all_axes[0][0].legend()
    figure.tight_layout()
    return _svg(figure)


def _projection(projection: Mapping[str, Any]) -> str:
    rows = projection["rows"]
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.45 * len(rows)), layout="constrained")
    labels = [f"{row['model']}, {row['deployment']}, stride {row['stride']}" for row in rows]
    copies = [row["bytes_share"] * 100 for row in rows]
    launches = [(row["share"] - row["bytes_share"]) * 100 for row in rows]
    axes.barh(labels, copies, color=_COLOURS["on"], height=0.6, label="bytes")
    axes.barh(labels, launches, left=copies, color=_COLOURS["off"], height=0.6, label="launches")
    axes.axvline(projection["goal"] * 100, color="#c05621", linestyle="--", label=f"goal: {projection['goal']:.1%}")
    axes.set_xlabel("% of a prefill step")
    axes.invert_yaxis()
    axes.legend()
    return _svg(figure)


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]

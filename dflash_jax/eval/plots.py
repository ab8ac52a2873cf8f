"""Plots of a result as PNG files, drawn by the Agg backend without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflash_jax.base.errors import ConfigError
from dflash_jax.eval.datasets import short_name

DPI = 150
PANEL = (5.0, 3.4)  # inches, width and height
COLUMNS = 3  # panels side by side, at most
BAR_GROUP = 0.8  # width of a group of bars, as a share of the distance between groups
Cells = Sequence[dict[str, Any]]


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw acceptance by position, acceptance lengths and, if plain decoding was measured, speed-up.

    Args:
        result: as `report.build_result` returns it.
        folder: for the files.

    Returns:
        Paths of the files.

    Raises:
        ConfigError: a file cannot be written.
    """
    cells = result["results"]
    figures = {
        "acceptance_by_position.png": _panels(cells, _draw_positions),
        "acceptance_lengths.png": _panels(cells, _draw_lengths),
    }
    if all(cell["speedup"] is not None for cell in cells):
        figures["speedup.png"] = _speedup(cells)
    paths = []
    for name, figure in figures.items():
        path = folder / name
        try:
            figure.savefig(path, dpi=DPI)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); give another --output.") from error
        paths.append(path)
    return paths


def _panels(cells: Cells, draw_panel: Callable[[Axes, Cells], None]) -> Figure:
    """A figure with a panel for each data set, and one legend."""
    names = list(dict.fromkeys(cell["dataset"] for cell in cells))
    columns = min(len(names), COLUMNS)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel().tolist()
    for i, (panel, name) in enumerate(zip(axes, names, strict=False)):
        draw_panel(panel, [cell for cell in cells if cell["dataset"] == name])
        if i % columns:
            panel.set_ylabel("")
        panel.set_title(short_name(name))
        panel.legend(frameon=False, fontsize="small")
        _tidy(panel)
    for panel in axes[len(names) :]:
        panel.set_axis_off()
    return figure


def _draw_positions(axes: Axes, cells: Cells) -> None:
    for cell in cells:
        shares = cell["acceptance"]["acceptance_per_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=_label(cell))
    axes.set_xlabel("position of the draft in its block")
    axes.set_ylabel("share of rounds that accept it")
    axes.set_ylim(0, 1)


def _draw_lengths(axes: Axes, cells: Cells) -> None:
    width = BAR_GROUP / len(cells)
    for i, cell in enumerate(cells):
        rounds = cell["acceptance"]["rounds"]
        shares = [count / max(rounds["num_drafts"], 1) for count in rounds["histogram"]]
        places = [1 + accepted + (i + 0.5) * width - BAR_GROUP / 2 for accepted in range(len(shares))]
        mean = cell["acceptance"]["mean_acceptance_length"]
        label = _label(cell) if mean is None else f"{_label(cell)}: mean {mean:.2f}"
        axes.bar(places, shares, width, label=label)
    axes.set_xlabel("tokens that a round emits")
    axes.set_ylabel("share of rounds")


def _speedup(cells: Cells) -> Figure:
    names = list(dict.fromkeys(cell["dataset"] for cell in cells))
    labels = list(dict.fromkeys(_label(cell) for cell in cells))
    width = BAR_GROUP / len(labels)
    figure = Figure(figsize=(max(PANEL[0], 1.6 * len(names) + 2), PANEL[1]), layout="constrained")
    axes = figure.subplots()
    for i, label in enumerate(labels):
        labelled = [cell for cell in cells if _label(cell) == label]
        places = [names.index(cell["dataset"]) + (i + 0.5) * width - BAR_GROUP / 2 for cell in labelled]
        bars = axes.bar(places, [cell["speedup"] for cell in labelled], width, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize="small")
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(names)), [short_name(name) for name in names])
    axes.set_ylabel("tokens/s, times plain decoding")
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize="small")
    _tidy(axes)
    return figure


def _label(cell: dict[str, Any]) -> str:
    drafts = cell["num_speculative_tokens"]
    return f"{'adaptive' if drafts == 'auto' else f'{drafts} drafts'}, T={cell['temperature']:g}"


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)

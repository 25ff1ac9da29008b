"""A picture of training steps side by side: for each model one bar per system, cut into the parts of a step. Needs matplotlib."""

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

# The first colour is candle-ddp's: dark for the forward pass, light for the optimizer.
SHADES = [["#1f5fa8", "#5b95d1", "#a9c8e8"], ["#8a5a00", "#d08c1d", "#ecc680"]]


def save(path, title, models, systems, parts):
    """Draws an SVG. `models` is a list of (name, {system: [milliseconds of each part]}); bars of a model are as long as their step takes
    relative to the slowest system's."""
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}
    figure, axes = pyplot.subplots(len(models), figsize=(9, len(models)), layout="constrained")
    figure.suptitle(title)
    for plot, (name, times) in zip(figure.axes, models):
        plot.set_title(name, loc="left", fontsize=10, fontweight="bold")
        plot.set_axis_off()
        plot.set_xlim(0, 1.12 * max(map(sum, times.values())))
        plot.invert_yaxis()
        for row, system in enumerate(systems):
            for index, (part, milliseconds) in enumerate(zip(parts, times[system])):
                start = sum(times[system][:index])
                plot.barh(row, milliseconds, left=start, color=SHADES[row][index], label=f"{system}, {part}")
            plot.text(sum(times[system]), row, f" {sum(times[system]):,.0f} ms", va="center", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(systems), frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)

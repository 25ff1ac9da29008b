"""A picture of training steps side by side: for each model one bar per system, cut into the parts of a step."""

from html import escape

WIDTH, LEFT, RIGHT = 760, 24, 96
BAR, GAP, TITLE, HEAD = 20, 5, 26, 56
# The first colour is candle-ddp's: dark for the forward pass, light for the optimizer.
SHADES = [["#1f5fa8", "#5b95d1", "#a9c8e8"], ["#8a5a00", "#d08c1d", "#ecc680"]]


def svg(title, models, systems, parts):
    """Returns the picture as text. `models` is a list of (name, {system: [milliseconds of each part]}); bars of a model are as
    long as their step takes relative to the slowest system's."""
    body, y = [], HEAD
    for name, times in models:
        body.append(f'<text x="{LEFT}" y="{y + 16}" font-weight="bold">{escape(name)}</text>')
        y += TITLE
        longest = max(sum(milliseconds) for milliseconds in times.values())
        for index, system in enumerate(systems):
            x = float(LEFT)
            for shade, milliseconds in zip(SHADES[index], times[system]):
                width = (WIDTH - LEFT - RIGHT) * milliseconds / longest
                body.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{shade}"/>')
                x += width
            body.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(times[system]):,.0f} ms</text>')
            y += BAR + GAP
        y += GAP
    legend, x = [], float(LEFT)
    for index, system in enumerate(systems):
        for shade in SHADES[index]:
            legend.append(f'<rect x="{x:.1f}" y="34" width="12" height="12" fill="{shade}"/>')
            x += 13
        text = f"{system} ({', '.join(parts)})"
        legend.append(f'<text x="{x + 5:.1f}" y="45">{escape(text)}</text>')
        x += 7.0 * len(text) + 16
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{y}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *legend,
        *body,
        "</svg>",
        "",
    ])

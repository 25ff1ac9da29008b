#!/usr/bin/env python3
"""Draws one training step of a merged trace as an SVG, with each rank's training thread and its all-reduces.

    CANDLE_DDP_TRACE=traces ddprun --nproc-per-node 2 PROGRAM
    ddprun --merge-traces traces
    scripts/render_trace.py traces/trace.json step.svg [--step 5]

A step lasts from one `refresh` (the beginning of a forward pass) to the next. Needs only Python.
"""
import argparse
import html
import json

COLOURS = {
    "refresh": "#9aa0a6",
    "forward": "#4285f4",
    "backward": "#34a853",
    "wait for buckets": "#ea4335",
    "optimizer": "#a142f4",
    "all-reduce": "#fbbc04",
}
WIDTH, LEFT, ROW, GAP, TOP = 960, 130, 26, 8, 34


def colour(name):
    return next((value for key, value in COLOURS.items() if name.startswith(key)), "#5f6368")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("svg")
    parser.add_argument("--step", type=int, default=5, help="index of the step on rank 0, from 0 (default: 5)")
    options = parser.parse_args()
    with open(options.trace) as file:
        events = json.load(file)
    begins = sorted(e["ts"] for e in events if e["pid"] == 0 and e["name"] == "refresh")
    if options.step + 1 >= len(begins):
        raise SystemExit(f"error: the trace has {len(begins)} steps, so --step can be at most {len(begins) - 2}")
    start, end = begins[options.step], begins[options.step + 1]
    ranks = sorted({e["pid"] for e in events})
    scale = (WIDTH - LEFT - 10) / (end - start)
    height = TOP + len(ranks) * (2 * ROW + 2 * GAP) + 50
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20">one training step, {(end - start) / 1e3:.1f} ms</text>',
    ]
    tops = {}
    for position, rank in enumerate(ranks):
        y = TOP + position * (2 * ROW + 2 * GAP)
        for row, name in enumerate(["training", "communication"]):
            top = tops[rank, row] = y + row * (ROW + 2)
            out.append(f'<text x="8" y="{top + 17}">{"rank " + str(rank) + ": " if row == 0 else ""}{name}</text>')
            out.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 10}" height="{ROW}" fill="#f1f3f4"/>')
    for event in events:
        if "ts" not in event or (event["pid"], event["tid"]) not in tops:
            continue
        at, to = max(event["ts"], start), min(event["ts"] + event.get("dur", 0), end)
        top = tops[event["pid"], event["tid"]]
        x = LEFT + (at - start) * scale
        if event["ph"] == "X" and to > at:
            width = max((to - at) * scale, 0.5)
            name = html.escape(event["name"])
            out.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{colour(event["name"])}" '
                f'stroke="white" stroke-width="0.5"><title>{name}, {event["dur"] / 1e3:.2f} ms</title></rect>'
            )
            label = event["name"].split(" of ")[0]
            if width > 7 * len(label):
                out.append(f'<text x="{x + 4:.1f}" y="{top + 17}" fill="white">{html.escape(label)}</text>')
        elif event["ph"] == "i" and start <= event["ts"] < end:
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{top + ROW}" stroke="#202124" stroke-width="1"/>')
    x, y = LEFT, height - 34
    for name, fill in COLOURS.items():
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{fill}"/><text x="{x + 16}" y="{y + 11}">{name}</text>')
        x += 40 + 7 * len(name)
    out.append(f'<line x1="{x + 4}" x2="{x + 4}" y1="{y - 2}" y2="{y + 14}" stroke="#202124"/>')
    out.append(f'<text x="{x + 10}" y="{y + 11}">bucket full</text></svg>')
    with open(options.svg, "w") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()

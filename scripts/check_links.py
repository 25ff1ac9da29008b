#!/usr/bin/env python3
"""Checks what the repository's Markdown files refer to: relative links, including their anchors, and Rust files that pages of src,
crates and docs name in backticks. Every variable CANDLE_DDP_* of the source must be in the table of docs/clusters.md, and the other way round.

    scripts/check_links.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def files(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split("\n")[:-1]


def missing_sources(name, text, sources):
    """The Rust files that a page names and that are neither beside or below it, nor under the root or src."""
    folder = Path(name).parent
    for found in re.findall(r"`((?:[\w.-]+/)*\w+\.rs)`", text):
        starts = [os.path.normpath(folder / found), found, f"src/{found}"]
        if not any(source in starts or source.startswith(f"{folder}/") and source.endswith(f"/{found}") for source in sources):
            yield f"{name}: `{found}` does not exist"


def undocumented_variables():
    """The differences between the variables in src and those in the table."""
    used = set()
    for name in files("src/*.rs", "crates/*/src/*.rs"):
        used |= set(re.findall(r"CANDLE_DDP_[A-Z_]*[A-Z]", (ROOT / name).read_text()))
    page = "docs/clusters.md"
    table = (ROOT / page).read_text().split("## Environment variables")[1]
    rows = " ".join(re.findall(r"^\| ([^|]*) \|", table, re.M))
    listed = set(re.findall(r"CANDLE_DDP_[A-Z_]*[A-Z]", rows))
    yield from (f"{page}: the table lacks {name}, which src uses" for name in sorted(used - listed))
    yield from (f"{page}: the table has {name}, which src does not use" for name in sorted(listed - used))


def main():
    problems = list(undocumented_variables())
    sources = files("*.rs")
    for name in files("*.md"):
        file = ROOT / name
        text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"\w+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (file.parent / path).resolve() if path else file
            if not there.exists():
                problems.append(f"{name}: {target} does not exist")
            elif anchor and anchor not in anchors(there.read_text()):
                problems.append(f"{name}: {target} has no such heading")
        if name.startswith(("src/", "docs/", "crates/")):
            problems += missing_sources(name, text, sources)
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

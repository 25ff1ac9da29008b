#!/usr/bin/env python3
"""Checks that relative links in the repository's Markdown files, including their anchors, have a target.

    scripts/check_links.py
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def main():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    problems = []
    for name in listed.stdout.split():
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
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

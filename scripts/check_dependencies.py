#!/usr/bin/env python3
"""Checks that docs/architecture.md gives the purpose of each dependency of the workspace's crates. cargo-deny checks everything else.

    scripts/check_dependencies.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main():
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--no-deps"]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    ours = {package["name"] for package in metadata["packages"]}
    all_of = [dependency for package in metadata["packages"] for dependency in package["dependencies"]]
    direct = {dependency["name"] for dependency in all_of if dependency["kind"] is None} - ours
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.split("## Dependencies", 1)[-1].split("\n## ", 1)[0]
    # The first cell of each row, without the features in brackets.
    cells = [re.sub(r"\(.*?\)", "", cell) for cell in re.findall(r"^\| (`[^|]*) \|", table, re.M)]
    explained = {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}
    problems = [f"docs/architecture.md must give the purpose of {name}" for name in sorted(direct - explained)]
    problems += [f"docs/architecture.md explains {name}, which is not a dependency: remove the row" for name in sorted(explained - direct)]
    print("\n".join(problems) or f"all {len(direct)} dependencies have a purpose")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Checks that docs/dependencies.md gives the purpose of each dependency of the workspace's crates, and that nothing is compiled twice: the
launcher's dependencies have the same features as those of examples and tests, and workspaces that share the root's target folder have its
profile. cargo-deny checks everything else.

    scripts/check_dependencies.py
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tree(*arguments):
    """Returns each dependency with its features, as `NAME vVERSION … with FEATURES`."""
    command = ["cargo", "tree", "--locked", "--prefix", "none", "--no-dedupe", "--format", "{p} with {f}", *arguments]
    return set(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, text=True).stdout.splitlines()) - {""}


def main():
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--no-deps"]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    ours = {package["name"] for package in metadata["packages"]}
    all_of = [dependency for package in metadata["packages"] for dependency in package["dependencies"]]
    direct = {dependency["name"] for dependency in all_of if dependency["kind"] is None} - ours
    text = (ROOT / "docs/dependencies.md").read_text()
    table = text.split("## Dependencies", 1)[-1].split("\n## ", 1)[0]
    # The first cell of each row, without the features in brackets.
    cells = [re.sub(r"\(.*?\)", "", cell) for cell in re.findall(r"^\| (`[^|]*) \|", table, re.M)]
    explained = {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}
    problems = [f"docs/dependencies.md must give the purpose of {name}" for name in sorted(direct - explained)]
    problems += [f"docs/dependencies.md explains {name}, which is not a dependency: remove the row" for name in sorted(explained - direct)]
    launcher = {line.split()[0] for line in tree("--package", "ddprun", "--edges", "normal,build")}
    # `cargo build --bin ddprun` gives the launcher's dependencies the first features, a command that builds an example or a test the second.
    alone, beside_tests = tree("--edges", "normal,build"), tree("--edges", "normal,build,dev")
    problems += [f"{line} without dev-dependencies, but not with them: what depends on it is compiled twice"
                 for line in sorted(alone - beside_tests) if line.split()[0] in launcher]
    command = ["git", "ls-files", "*Cargo.toml"]
    manifests = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, text=True).stdout.splitlines()
    profiles = {path: tomllib.loads((ROOT / path).read_text()).get("profile", {}).get("dev", {}) for path in manifests}
    problems += [f"[profile.dev] of {path} differs from the root's: what both have is compiled twice"
                 for path, profile in profiles.items() if "package" in profile and profile != profiles["Cargo.toml"]]
    print("\n".join(problems) or f"all {len(direct)} dependencies have a purpose, and the launcher's {len(launcher)} the same features in tests")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

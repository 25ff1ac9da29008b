#!/usr/bin/env python3
"""Checks what this crate brings along: licences, versions, sources, and that each dependency has its reason.

    scripts/check_dependencies.py

`deny.toml` has the rules. `cargo deny check` knows more, such as security advisories; this needs nothing but cargo and python3.
It looks at what is published: dependencies for tests and benches do not count.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"


def is_allowed(expression, allowed):
    """Returns whether an SPDX expression can be satisfied by allowed licences."""
    tokens = re.findall(r"[()]|[^\s()/]+|/", expression)

    def term():
        token = tokens.pop(0)
        if token == "(":
            value = either()
            tokens.pop(0)
            return value
        if tokens[:1] == ["WITH"]:
            token = f"{token} WITH {tokens[1]}"
            del tokens[:2]
        return token in allowed

    def both():
        value = term()
        while tokens[:1] == ["AND"]:
            tokens.pop(0)
            value &= term()
        return value

    def either():
        value = both()
        # The slash is an old form of OR.
        while tokens[:1] in (["OR"], ["/"]):
            tokens.pop(0)
            value |= both()
        return value

    return either()


def published(metadata):
    """Returns the packages that this crate needs where it is used, by id."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    found, left = set(), [metadata["resolve"]["root"]]
    while left:
        package = left.pop()
        if package in found:
            continue
        found.add(package)
        for dependency in nodes[package]["deps"]:
            if any(kind["kind"] in (None, "build") for kind in dependency["dep_kinds"]):
                left.append(dependency["pkg"])
    return [package for package in metadata["packages"] if package["id"] in found]


def main():
    rules = tomllib.loads((ROOT / "deny.toml").read_text())
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    packages, problems = published(metadata), []

    allowed = set(rules["licenses"]["allow"])
    versions = defaultdict(set)
    for package in packages:
        name = f"{package['name']} {package['version']}"
        versions[package["name"]].add(package["version"])
        if not is_allowed(package["license"] or "none", allowed):
            problems.append(f"{name} has the licence {package['license']!r}, which deny.toml does not allow")
        if package["source"] not in (None, CRATES_IO):
            problems.append(f"{name} comes from {package['source']}: only crates.io is allowed")

    skipped = {rule["crate"] for rule in rules["bans"]["skip"]}
    twice = {f"{name}@{version}" for name, found in versions.items() if len(found) > 1 for version in found}
    for name, found in sorted(versions.items()):
        if len([version for version in found if f"{name}@{version}" not in skipped]) > 1:
            problems.append(f"{name} is there in versions {', '.join(sorted(found))}: agree on one, or skip one in deny.toml")
    for rule in sorted(skipped - twice):
        problems.append(f"deny.toml skips {rule}, which is not there twice any more")

    root = next(package for package in packages if package["id"] == metadata["resolve"]["root"])
    direct = {dependency["name"] for dependency in root["dependencies"] if dependency["kind"] is None}
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.split("## Dependencies", 1)[-1].split("\n## ", 1)[0]
    # The first cell of each row, without the features in brackets.
    cells = [re.sub(r"\(.*?\)", "", cell) for cell in re.findall(r"^\| (`[^|]*) \|", table, re.M)]
    explained = {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}
    problems += [f"docs/architecture.md does not say what {name} is for" for name in sorted(direct - explained)]
    problems += [f"docs/architecture.md explains {name}, which is no dependency" for name in sorted(explained - direct)]

    print("\n".join(problems) or f"{len(packages) - 1} dependencies, {len(direct)} of them direct")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Checks that candle-ddp-nn has everything that candle-nn has: modules, items, methods, variants, and traits of its types.

    scripts/check_drop_in.py

The names come from the source of candle-nn at the version in Cargo.lock; the compiler says which of them candle-ddp-nn lacks. What
candle-nn itself does not have in this build, such as items of its features, does not count.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ITEM = re.compile(r"^pub (?:unsafe |const |async )*(fn|struct|enum|trait|type|const|static|mod|union) (\w+)", re.M)
TRAITS = {
    "Clone": "Clone", "Copy": "Copy", "Debug": "std::fmt::Debug", "Default": "Default", "PartialEq": "PartialEq", "Eq": "Eq",
    "Deserialize": "serde::de::DeserializeOwned", "Serialize": "serde::Serialize", "Module": "candle_core::Module",
    "ModuleT": "candle_core::ModuleT",
}
# Errors about existing items that these lines use incompletely: generic arguments are left open.
HARMLESS = {"E0282", "E0283", "E0107", "E0533", "E0790"}


def exports(text):
    """Yields the names of `pub use` declarations; globs are of modules, which are checked separately."""
    for tree in re.findall(r"^pub use ([^;]+);", text, re.M):
        for part in re.sub(r"^.*?\{|\}", "", tree, flags=re.S).split(","):
            name = part.split(" as ")[-1].split("::")[-1].strip()
            if re.fullmatch(r"\w+", name):
                yield name


def module(file, path):
    """Yields `(path of an item, line of Rust that needs it, whether it is an import)` for the module in `file`."""
    text = file.read_text()
    for name in exports(text):
        yield f"{path}::{name}", f"use nn{path}::{name} as _;", True
    for kind, name in ITEM.findall(text):
        yield f"{path}::{name}", f"use nn{path}::{name} as _;", True
        if kind == "mod":
            folder = file.parent if file.name in ("lib.rs", "mod.rs") else file.with_suffix("")
            inner = next((f for f in (folder / f"{name}.rs", folder / name / "mod.rs") if f.exists()), None)
            if inner:
                yield from module(inner, f"{path}::{name}")
        if kind == "enum":
            body = re.search(rf"^pub enum {name}\b.*?\n}}", text, re.M | re.S)
            for variant in re.findall(r"^    ([A-Z]\w*)", body.group(0) if body else "", re.M):
                yield f"{path}::{name}::{variant}", f"fn f() {{ let _ = nn{path}::{name}::{variant}; }}", False
        if kind in ("struct", "enum"):
            declared = re.search(rf"((?:^#\[.*\]\n|^///.*\n)*)^pub {kind} {name}(<.*?>)?", text, re.M)
            derived = re.findall(r"\w+", " ".join(re.findall(r"derive\(([^)]*)\)", declared.group(1))))
            implemented = re.findall(rf"^impl(?:<.*?>)? (?:\w+::)*(\w+) for {name}\b", text, re.M)
            for trait in [t for t in dict.fromkeys(derived + implemented) if t in TRAITS and not declared.group(2)]:
                line = f"fn f() {{ fn has<T: {TRAITS[trait]}>() {{}} has::<nn{path}::{name}>(); }}"
                yield f"{path}::{name}: {trait}", line, False
    for name, body in re.findall(r"^impl(?:<[^>]*>)? (\w+)(?:<[^>]*>)? \{\n(.*?)^\}", text, re.M | re.S):
        for method in re.findall(r"^    pub (?:const )?fn (\w+)", body, re.M):
            yield f"{path}::{name}::{method}", f"fn f() {{ let _ = nn{path}::{name}::{method}; }}", False


def lacking(folder, environment, needs):
    """Returns which of `needs` candle-ddp-nn lacks and candle-nn has."""
    for crate in ("candle_nn", "candle_ddp_nn"):
        lines = [f"mod n{i} {{ use {crate} as nn; {line} }}" for i, (_, line, _) in enumerate(needs)]
        (folder / f"src/{crate}.rs").write_text("\n".join(lines))
    command = ["cargo", "check", "--quiet", "--message-format", "json"]
    run = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output = run.stdout
    if '"reason":"build-finished"' not in output:
        sys.exit(run.stderr)
    found = {"candle_nn": set(), "candle_ddp_nn": set()}
    for line in output.splitlines():
        message = json.loads(line).get("message") or {}
        if message.get("level") != "error" or (message.get("code") or {}).get("code") in HARMLESS:
            continue
        spans = [span for span in message["spans"] if Path(span["file_name"]).stem in found]
        if not spans and message["spans"]:
            sys.exit(message["rendered"])
        for span in spans:
            found[Path(span["file_name"]).stem].add(span["line_start"] - 1)
    return {index: needs[index][0] for index in found["candle_ddp_nn"] - found["candle_nn"]}, found["candle_nn"]


def main():
    metadata = json.loads(subprocess.run(["cargo", "metadata", "--format-version", "1", "--locked"], cwd=ROOT, check=True,
                                         stdout=subprocess.PIPE).stdout)
    candle = next(package for package in metadata["packages"] if package["name"] == "candle-nn")
    needs = list(dict.fromkeys(module(Path(candle["manifest_path"]).parent / "src/lib.rs", "")))
    environment = os.environ | {"CARGO_TARGET_DIR": os.environ.get("CARGO_TARGET_DIR", metadata["target_directory"])}
    missing = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "src").mkdir()
        (folder / "Cargo.toml").write_text(f"""
            [package]
            name = "drop-in"
            version = "0.1.0"
            edition = "2021"
            [dependencies]
            candle-core = "={candle['version']}"
            candle-nn = "={candle['version']}"
            candle-ddp-nn = {{ path = "{ROOT}/crates/candle-ddp-nn" }}
            serde = "1"
            [workspace]
        """)
        (folder / "Cargo.lock").write_bytes((ROOT / "Cargo.lock").read_bytes())
        (folder / "src/lib.rs").write_text("#![allow(warnings)]\nmod candle_ddp_nn;\nmod candle_nn;\n")
        # The compiler looks at bodies once all imports are right.
        imports = [need for need in needs if need[2]]
        names, unknown = lacking(folder, environment, imports)
        absent = {imports[index][0] for index in unknown} | set(names.values())
        rest = [need for need in needs if not need[2] and not any(need[0].startswith((f"{a}::", f"{a}:")) for a in absent)]
        missing = sorted(names.values()) + sorted(lacking(folder, environment, rest)[0].values())
    if len(needs) < 200:
        sys.exit("this script finds almost no items in candle-nn's source: its parser must be adapted to the new layout")
    print("\n".join(f"candle-ddp-nn lacks {name.removeprefix('::')}" for name in missing) or
          f"candle-ddp-nn has all {len(needs)} names of candle-nn {candle['version']}")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()

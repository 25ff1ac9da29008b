#!/usr/bin/env python3
"""Checks how the modules of each crate depend on each other.

    scripts/check_layers.py

In the crates of `LAYERS`, each top-level module may use only the modules before it. In every crate, files must not use each other in
a cycle. Paths in comments and doc comments do not count, nor do a module's own tests. Whoever uses a re-exported name uses the file
that defines it, and so does the module that re-exports it, unless that file is within the module. The picture and the table in
docs/architecture.md must have the layers of the library.
"""

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The layers of each crate's modules, lowest first. A module may use those before it; modules on the same line may not use each other, unless
# they are in one pair of braces: these are one room.
LAYERS = {
    ROOT / "src": [
        ["goes_with", "rendezvous", "virtual_ranks"],
        ["flight_recorder"],
        ["backend"],
        ["process_group"],
        ["conformance"],
        ["trace"],
        ["ddp"],
        ["nn", "data"],
        ["vision"],
        ["metrics"],
        ["amp"],
        ["optim"],
        ["checkpoint", "data_parallel", "elastic"],
        ["fuzzing"],
        ["prelude"],
    ],
    ROOT / "crates/candle-ddp-base/src": [
        ["deadline", "hash", "limits", "panic", "reading", "text", "warnings", "wire"],
        ["activity", "error", "host"],
        ["descriptors", "metrics", "random", "thread"],
        ["file"],
        ["flight_record", "trace"],
    ],
    ROOT / "crates/candle-ddp-rendezvous/src": [
        ["error", "last_will", "mpi", "slurm"],
        ["cancellation", "file_log", "init_method", "store"],
        ["hash_store", "json", "liveness", "prefix_store", "reports", "secret"],
        ["file_store", "options", "tcp_store"],
        ["environment", "hosting", "progress"],
        ["generation", "init_store", "plan"],
        ["join"],
        ["init_watcher"],
        ["meeting"],
    ],
    ROOT / "crates/candle-ddp-engine/src": [
        ["arrival", "flight_recorder", "hosts", "operation", "options", "question", "reduce_op", "texts", "wait"],
        ["label", "shape"],
        ["call_site"],
        ["call"],
        ["call_sites", {"failure", "gone", "standing"}, "reduction", "transport_error"],
        ["construction", "device_group", "memory"],
        [{"group", "session", "shm", "state", "tcp"}, "operands"],
        ["algorithm", "data_path", "fuzz", "host_monitor", "member", "query", "root_cause"],
        ["news", "work_queue"],
        ["engine"],
    ],
    ROOT / "crates/candle-ddp-nn/src": [
        ["activation", "autocast", "gemm", "kv_cache", "memory_format", "pool", "resample", "rows"],
        ["view"],
        ["add", "attention", "avg_pool", "checkpoint", "dropout", "interpolate", "matmul", "max_pool", "rope", "softmax"],
        [{"linear", "lora"}, "rotary_emb", "row_norm"],
        ["channels", "embedding", "layer_norm", "ops", "rnn"],
        ["cross_entropy", "groups", "normalise"],
        ["batch_norm", "ctc_loss", "group_norm", "linear_cross_entropy", "loss"],
        ["conv", "instance_norm"],
    ],
    ROOT / "crates/ddprun/src": [
        ["child", "error", "main", "printer", "signal", "tail", "time"],
        ["console", "numa"],
        ["command", "verdict"],
        ["template", "view"],
        ["check"],
        ["supervise"],
    ],
}


# Where a comment or a literal begins, which may contain text that looks like code. A lifetime is none.
BEGINNING = re.compile(r"""//|/\*|\b(?:b|c)?r(\#*)"|\b(?:b|c)?"|"|'(?:\\u\{[^}]*\}|\\x..|\\.|[^'\\\n])'""")


def without_literals(text):
    """Returns the code, in which strings are empty, and comments and characters are spaces."""
    code, at = [], 0
    while found := BEGINNING.search(text, at):
        code.append(text[at : found.start()])
        word, at = found[0], found.end()
        if word == "//":
            at = re.compile(r"[^\n]*").match(text, at).end()
        elif word == "/*":
            depth = 1
            while depth:
                inner = re.compile(r"/\*|\*/").search(text, at)
                depth, at = depth + (1 if inner[0] == "/*" else -1), inner.end()
            code.append(" ")
        elif found[1] is not None:
            at = text.index('"' + found[1], at) + 1 + len(found[1])
            code.append('""')
        elif word.endswith('"'):
            at = re.compile(r'(?:\\.|[^"\\])*"', re.S).match(text, at).end()
            code.append('""')
        else:
            code.append(" ")
    return "".join(code) + text[at:]


def strip(text):
    """Returns the code without comments, strings and test modules."""
    code = without_literals(text)
    code = re.sub(r"pub\(in [^)]*\)", "pub", code)
    return re.split(r"#\[cfg\(test\)\]\s*mod tests \{", code)[0]


def flatten(tree, prefix=()):
    """Returns the paths of a use tree such as `a::{b, c::{self, d as e}}`."""
    tree = tree.strip()
    match = re.match(r"((?:\w+::)*)\{(.*)\}$", tree, re.S)
    if not match:
        parts = tuple(part for part in re.sub(r"\s+as\s+\w+$", "", tree).split("::") if part)
        return [prefix + tuple(part for part in parts if part != "self" or not prefix)]
    prefix = prefix + tuple(part for part in match[1].split("::") if part)
    depth, start, paths = 0, 0, []
    for index, char in enumerate(match[2] + ","):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            piece = match[2][start:index].strip()
            start = index + 1
            if piece:
                paths += flatten(piece, prefix)
    return paths


def module_of(file, root):
    parts = list(file.relative_to(root).with_suffix("").parts)
    if parts[-1] in ("mod", "lib"):
        parts.pop()
    return tuple(parts)


def absolute(path, module):
    """Returns `crate::…` and `super::…` as paths from the root of the crate, and None for other paths."""
    if path and path[0] == "crate":
        return path[1:]
    base = module
    if path and path[0] == "self":
        return base + path[1:]
    if not path or path[0] != "super":
        return None
    while path and path[0] == "super":
        base, path = base[:-1], path[1:]
    return base + path


# Text with quotes that do not come in pairs, for a reader who does not take it as what it is.
PITFALLS = ['const A: &str = "a \\\n b";', 'const A: &str = r#"a " b"#;', "const A: char = '\"';", '/* " /* */ */', '// "', 'const A: &str = "tcp://a";']


# Ways to use another module's name.
USES = ["use", "pub use", "pub(crate) use"]


def self_test():
    """Returns a problem for each pitfall that hides an arrow upward and a circle, whichever way the name is used."""
    return [problem for pitfall in PITFALLS for use in USES for problem in finds_planted(pitfall, use)]


def finds_planted(pitfall, use):
    around = lambda code: f"{pitfall}\n{code}\n{pitfall}\n"
    sources = {
        "lib.rs": "mod high;\nmod low;\n// use crate::low::Nothing;\n",
        "low.rs": around(f"{use} crate::high::Thing;"),
        "high/mod.rs": "mod left;\nmod right;\npub struct Thing;\n",
        "high/left.rs": around(f"{use} super::right::Right;\npub struct Left;"),
        "high/right.rs": around("pub struct Right(super::left::Left);"),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, text in sources.items():
            file = Path(folder) / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        found = check(Path(folder), [["low"], ["high"]])
    expected = ["a cycle of files: high::left, high::right", "low uses high, which must be in a lower layer"]
    return [] if found == expected else [f"the self-test with {pitfall} and {use} found {found} instead of {expected}"]


def undocumented_layers(page):
    """Returns a problem if the picture or the table on the page has other layers than `LAYERS`."""
    boxes = [re.findall(r"\w+", line) for line in re.findall(r"^│  (.*?) *│  │$", page, re.M)]
    layers = LAYERS[ROOT / "src"]
    known = {module for line in layers for module in line}
    picture = [[word for word in words if word in known] for words in reversed(boxes)]
    _, section = page.split("\n## Layers\n")
    rows = re.findall(r"^\| (`[^|]*) \|", section.split("\n## ")[0], re.M)
    table = [re.findall(r"`(\w+)`", row) for row in rows]
    # The functions of the fuzz targets are in no build that the picture shows, and the prelude has no content.
    pairs = [("picture", picture, [line for line in layers if line not in (["fuzzing"], ["prelude"])]), ("table", table, layers)]
    return [f"docs/architecture.md: the {name} has {found}, not {wanted}" for name, found, wanted in pairs
            if list(map(sorted, found)) != list(map(sorted, wanted))]


def main():
    problems = self_test() + undocumented_layers((ROOT / "docs" / "architecture.md").read_text())
    for root in [ROOT / "src", *sorted(ROOT.glob("crates/*/src"))]:
        problems += [f"{root.parent.name}: {problem}" for problem in check(root, LAYERS.get(root, []))]
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


def check(root, layers):
    """Returns the problems of the crate whose source is in `root`."""
    files = {}
    for file in sorted(root.rglob("*.rs")):
        module = module_of(file, root)
        if module[:1] == ("bin",) or module[-1:] == ("tests",) or file.name.endswith("_tests.rs") or file.name == "absent.rs":
            continue
        files[module] = strip(file.read_text())

    # The modules' re-exports: (module, name) -> path.
    exports, uses = {}, {}
    for module, text in files.items():
        uses[module] = set()
        for visibility, tree in re.findall(r"\b(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", text):
            for path in flatten(re.sub(r"\s+", " ", tree)):
                target = absolute(path, module)
                if target is None and path and module + path[:1] in files:
                    target = module + path
                if target is None:
                    continue
                if visibility:
                    exports[(module, target[-1])] = target
                if not visibility or target[: len(module)] != module:
                    uses[module].add(target)
        body = re.sub(r"\buse\s+[^;]+;", "", text)
        for path in re.findall(r"\b(?:crate|super)(?:::\w+)+", body):
            target = absolute(tuple(path.split("::")), module)
            if target:
                uses[module].add(target)
        for path in re.findall(r"(?<![:\w])(\w+)(?:::\w+)+", body):
            if module and module + (path,) in files:
                uses[module].add(module + (path,))

    def resolve(path, hops=0):
        """Returns the file that defines the item `path`."""
        for end in range(len(path), -1, -1):
            module = path[:end]
            if module not in files:
                continue
            if end < len(path) and (module, path[end]) in exports and hops < 8:
                return resolve(exports[(module, path[end])] + path[end + 1 :], hops + 1)
            return module
        return None

    edges = {module: {resolve(path) for path in paths} - {module, None} for module, paths in uses.items()}
    problems = []

    # The number of each module's line, and the modules that it shares a room with.
    place = {
        module: (number, room)
        for number, line in enumerate(layers)
        for room in (room if isinstance(room, set) else {room} for room in line)
        for module in room
    }
    for module, targets in sorted(edges.items()):
        if not module or not layers:
            continue
        for target in sorted(targets):
            if not target or target[0] == module[0]:
                continue
            here, there = place.get(module[0]), place.get(target[0])
            if here is None or there is None:
                problems.append(f"{'::'.join(module if here is None else target)} must be listed in a layer")
            elif there[0] >= here[0] and here != there:
                problems.append(f"{'::'.join(module)} uses {'::'.join(target)}, which must be in a lower layer")

    return sorted(set(problems + circles(edges)))


def circles(edges):
    """Returns the strongly connected components with more than one file (Tarjan's algorithm)."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on_stack.add(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in on_stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = []
            while True:
                member = stack.pop()
                on_stack.discard(member)
                component.append(member)
                if member == node:
                    break
            if len(component) > 1:
                names = ", ".join(sorted("::".join(member) or "lib" for member in component))
                found.append(f"a cycle of files: {names}")

    sys.setrecursionlimit(10_000)
    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


if __name__ == "__main__":
    sys.exit(main())

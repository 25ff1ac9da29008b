#!/usr/bin/env python3
"""The public API of the libraries as text, from rustdoc's pages, so that no change of it goes unseen.

    scripts/public_api.py            compares docs/public-api*.txt with the source
    scripts/public_api.py --update   writes them anew

A line is an item, with its fields or variants, a method, a trait that a type implements, or a re-export. It covers the default
features, `conformance` and `vision`, but not the features for CUDA. Auto traits (Send, Sync) are left out. The pages come from
the installed rustdoc; another version may write something differently, and then the listing changes with the compiler.

Each listing has a budget of lines, which may only fall, as the history shows: what is added to the public API takes the place of something
else. Traits that can be derived do not count, since nobody has to learn them.
"""

import difflib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTINGS = {
    "candle_ddp": ROOT / "docs" / "public-api.txt",
    "candle_ddp_base": ROOT / "docs" / "public-api-base.txt",
    "candle_ddp_data": ROOT / "docs" / "public-api-data.txt",
    "candle_ddp_nn": ROOT / "docs" / "public-api-nn.txt",
    "candle_ddp_tensor": ROOT / "docs" / "public-api-tensor.txt",
    "candle_ddp_engine": ROOT / "docs" / "public-api-engine.txt",
    "candle_ddp_pickle": ROOT / "docs" / "public-api-pickle.txt",
    "candle_ddp_rendezvous": ROOT / "docs" / "public-api-rendezvous.txt",
    "candle_ddp_state": ROOT / "docs" / "public-api-state.txt",
    "candle_ddp_vision": ROOT / "docs" / "public-api-vision.txt",
    "candle_ddp_webdataset": ROOT / "docs" / "public-api-webdataset.txt",
}
DERIVED = re.compile(r": impl(<.*>)? (Clone|Copy|Debug|Default|Eq|Hash|Ord|PartialEq|PartialOrd)(<.*>)? for ")
# The most lines that each listing may have, without those of derived traits. Lower a number whenever its listing has become shorter. A number
# that is higher than in an earlier commit is an error, unless RAISED says why.
BUDGETS = {
    "candle_ddp": 478,
    "candle_ddp_base": 128,
    "candle_ddp_data": 82,
    "candle_ddp_nn": 318,
    "candle_ddp_tensor": 34,
    "candle_ddp_engine": 69,
    "candle_ddp_pickle": 5,
    "candle_ddp_rendezvous": 67,
    "candle_ddp_state": 47,
    "candle_ddp_vision": 80,
    "candle_ddp_webdataset": 27,
}
# The budgets that have been raised since the commit SINCE, each with its old and new number and the reason.
RAISED = [
    ("candle_ddp_nn", 316, 318, "tanh: candle's calculates one number at a time"),
    ("candle_ddp_data", 79, 82, "packed sequences: pack, Packed and LengthBatches::packed"),
    ("candle_ddp_engine", 69, 70, "its error holds the base error"),
    ("candle_ddp_webdataset", 22, 27, "its error is the base error, whose constructors are listed with it"),
]
SINCE = "c30388de"
VOID = {"meta", "link", "br", "img", "input", "hr", "wbr", "rustdoc-toolbar-item"}
# Lists of what rustdoc adds to a page by itself, or repeats from another page.
SKIPPED = {"blanket-implementations-list", "synthetic-implementations-list", "implementors-list",
           "synthetic-implementors-list", "foreign-impls"}


class Page(HTMLParser):
    """Collects the declaration of a page's item, the headings of its methods and `impl`s, re-exports and links."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.found, self.links, self.text = [], [], [], None
        self.feed(text)

    def inside(self, *names):
        return any(set(names) & marks for _, marks in self.stack)

    def handle_starttag(self, tag, attributes):
        attributes = {name: value or "" for name, value in attributes}
        if tag == "a":
            self.links.append(attributes.get("href", ""))
        if tag in VOID:
            return
        marks = set(attributes.get("class", "").split()) | {attributes.get("id", "")}
        self.stack.append((tag, marks))
        if self.text is None and not self.inside(*SKIPPED):
            in_impl = self.inside("trait-implementations-list")
            is_in = lambda start: any(mark.startswith(start) for _, marks in self.stack for mark in marks)
            # The declaration has the variants, and the trait has the methods of its `impl`s.
            heading = "code-header" in marks and not is_in("variant.") and (tag == "h3" or not in_impl)
            reexport = tag == "code" and is_in("reexport.")
            if heading or reexport or "item-decl" in marks:
                kind = "decl" if "item-decl" in marks else "use" if reexport else "heading"
                self.text = (len(self.stack), kind, [])

    def handle_endtag(self, tag):
        if tag in VOID or not any(tag == name for name, _ in self.stack):
            return
        while self.stack:
            if self.text and self.text[0] == len(self.stack):
                _, kind, parts = self.text
                self.found.append((kind, re.sub(r"\s+", " ", "".join(parts)).strip()))
                self.text = None
            if self.stack.pop()[0] == tag:
                break

    def handle_data(self, data):
        # "Show 13 fields" belongs to the page.
        if self.text and not any(name == "summary" for name, _ in self.stack[self.text[0] :]):
            self.text[2].append(data)


def tidy(line):
    line = re.sub(r"([(\[<]) ", r"\1", line)
    line = re.sub(r",? ([)\]>])(?!=)", r"\1", line) if "->" not in line else re.sub(r",? ([)\]])", r"\1", line)
    return re.sub(r"(?<=\S)where ", " where ", line).replace(" ,", ",")


def listing(crate, pages):
    index = Page((pages / "all.html").read_text())
    items = sorted({link for link in index.links if re.match(r"(\w+/)*(struct|enum|trait|fn|type|constant|macro)\.\w+\.html$", link)})
    folders = {pages}
    for item in items:
        folders |= {parent for parent in (pages / item).parents if pages in parent.parents}
    lines = set()
    for folder in folders:
        module = "::".join((crate,) + folder.relative_to(pages).parts)
        lines |= {f"{module}: {text}" for kind, text in Page((folder / "index.html").read_text()).found if kind == "use"}
    for item in items:
        kind, name = re.match(r"(?:\w+/)*(\w+)\.(\w+)\.html$", item).groups()
        path = "::".join([crate, *item.split("/")[:-1], name])
        declared = False
        for found, text in Page((pages / item).read_text()).found:
            # The page of an alias also declares its type, which has its own page.
            if found == "decl" and kind == "type" and declared:
                continue
            declared |= found == "decl"
            # A trait's declaration has its methods. Those of a type need no heading, and nobody relies on the marker that
            # comes with a derived `PartialEq`.
            needless = re.match(r"impl(?!.* for )|impl.* StructuralPartialEq ", text)
            if found == "decl" or (kind in ("struct", "enum", "type") and found == "heading" and not needless):
                lines.add(f"{path}: {tidy(text)}")
    return sorted(lines)


def main():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    command = ["cargo", "doc", "--quiet", "--no-deps", "--locked", "--lib", "--features", "conformance,vision"]
    packages = [argument for crate in LISTINGS for argument in ("--package", crate.replace("_", "-"))]
    subprocess.run(command + packages, cwd=ROOT, check=True)
    listings = {crate: listing(crate, target / "doc" / crate) for crate in LISTINGS}
    changed = [compare(crate, path, listings[crate]) for crate, path in LISTINGS.items()]
    counts = {crate: sum(not DERIVED.search(line) for line in lines) for crate, lines in listings.items()}
    over = [over_budget(crate, count) for crate, count in counts.items() if count > BUDGETS[crate]] + raised()
    print("\n".join(over), end="\n" if over else "")
    if any(changed):
        sys.exit(
            "The public API differs from docs/public-api*.txt: above, lines with - are in the listing, lines with + in the source.\n"
            "If the change is intended, run `python3 scripts/public_api.py --update`, commit the listings, and say under Unreleased\n"
            "in CHANGELOG.md what users notice. If not, make the new items private again, or `pub(crate)`."
        )
    if over:
        sys.exit("A budget in scripts/public_api.py may only be lowered: take as many lines out of the public API as were added to it.")


def raised():
    """Returns a problem for each budget that a commit since SINCE, or the working tree, has raised without a reason in RAISED."""
    script = Path(__file__).relative_to(ROOT)
    if subprocess.run(["git", "merge-base", "--is-ancestor", SINCE, "HEAD"], cwd=ROOT, capture_output=True).returncode:
        print(f"budgets: {SINCE} is not in this clone's history, so a raised one is not noticed")
        return []
    git = lambda *arguments: subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    versions = [git("show", f"{commit}:{script}") for commit in git("log", "--reverse", "--format=%h", f"{SINCE}..", "--", script).split()]
    read = lambda text: dict(re.findall(r'^    "(\w+)": (\d+),$', text.partition("\nBUDGETS = {\n")[2].partition("\n}\n")[0], re.M))
    budgets = [read(text) for text in [git("show", f"{SINCE}:{script}"), *versions, Path(__file__).read_text()]]
    reasons = {(crate, old, new) for crate, old, new, _ in RAISED}
    steps = {(crate, int(before[crate]), int(number)) for before, after in zip(budgets, budgets[1:]) for crate, number in after.items() if crate in before}
    return [f"{crate}: its budget was raised from {old} to {new}, and RAISED has no reason" for crate, old, new in sorted(steps - reasons) if new > old]


def over_budget(crate, count):
    return f"{crate}: its public API has {count} lines, {count - BUDGETS[crate]} more than its budget of {BUDGETS[crate]}"


def compare(crate, path, lines):
    """Returns whether a crate's listing differs from the source, unless it is written anew."""
    if len(lines) < 5:
        sys.exit(f"this script finds almost no items in rustdoc's pages of {crate}: its parser must be adapted to the new layout")
    text = "\n".join(lines) + "\n"
    if "--update" in sys.argv[1:]:
        path.write_text(text)
        return False
    before = path.read_text() if path.exists() else ""
    changes = difflib.unified_diff(before.splitlines(), lines, path.name, "the source", n=0, lineterm="")
    print("\n".join(changes), end="\n" if text != before else "")
    return text != before


if __name__ == "__main__":
    main()

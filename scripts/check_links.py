#!/usr/bin/env python3
"""Checks the references of the repository's Markdown files: relative links, including their anchors, Rust files named in backticks, and
environment variables. docs/environment.md must have every variable that the source uses, and no CANDLE_DDP_* that it does not.
docs/SUMMARY.md, the table of contents of the book, must list every page of docs, and src/lib.rs every page with Rust code, so that it is
compiled. No page has more than 2,750 words. Commits that benches/results and the pages name must exist. The numbers of a table below a comment
`<!-- numbers of benches/results/FILE.md -->` must be in that file, or in one of several.

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
    """The Rust files that a page names and that are neither next to it or below it, nor under the root or src."""
    folder = os.path.normpath(Path(name).parent / ".")
    below = "" if folder == "." else f"{folder}/"
    for found in re.findall(r"`((?:[\w.-]+/)*\w+\.rs)`", text):
        starts = [os.path.normpath(f"{below}{found}"), found, f"src/{found}"]
        inside = (source for source in sources if below and source.startswith(below) and source.endswith(f"/{found}"))
        if not any(start in sources for start in starts) and not any(inside):
            yield f"{name}: `{found}` does not exist"


# They list variables that others use.
LISTS = {"scripts/check_links.py", *files("crates/candle-ddp-env/src")}
OWN = re.compile(r"CANDLE_DDP_[A-Z_]*[A-Z]")
# A quoted name is a variable that is read or set, unless it is a function of MPI. CARGO_* are not listed: cargo sets them at compile time.
OTHERS = re.compile(
    r'"((?:WORLD|LOCAL|MASTER|GROUP|ROLE|TORCHELASTIC|SLURM|OMPI|PMI|PMIX|MPI(?!_[A-Z][a-z])|PET|RAYON|OMP|MIMALLOC|CUDA|NCCL|XDG|RUST)_[A-Z_a-z]*[A-Za-z])"'
    r'|"(RANK|CARGO|HOME|TMPDIR)"'
)


def variables(text):
    return set(OWN.findall(text)) | {first or second for first, second in OTHERS.findall(text)}


def undocumented_variables():
    """The differences between the variables in the source and those in the table."""
    page = "docs/environment.md"
    rows = " ".join(re.findall(r"^\| ([^|]*) \|", (ROOT / page).read_text(), re.M))
    listed = set(re.findall(r"`([A-Z][A-Z_a-z]*[A-Za-z])`", rows))
    families = re.findall(r"`([A-Z_]+_)\*`", rows)
    used = {}
    for name in files("src", "crates", "examples", "scripts", "benches", "tests", ".ci"):
        if name.endswith((".rs", ".py", ".sh", ".ci/run")) and name not in LISTS:
            text = (ROOT / name).read_text()
            is_ours = name.startswith(("src/", "crates/", "examples/")) and "/tests/" not in name
            for variable in variables(text) if is_ours else OWN.findall(text):
                used.setdefault(variable, name)
    for variable, name in sorted(used.items()):
        if variable not in listed and not variable.startswith(tuple(families)):
            yield f"{page}: the table lacks {variable}, which {name} uses"
    for variable in sorted(OWN.findall(" ".join(listed))):
        if variable not in used:
            yield f"{page}: the table has {variable}, which nothing uses"
    yield from (f"{page}: the table has {name}*, which nothing uses" for name in families if not any(v.startswith(name) for v in used))


# Nobody reads longer pages through.
MOST_WORDS = 2750


def unlisted_pages():
    """The pages that the table of contents lacks, those whose Rust code no doc test compiles, and those that are too long."""
    linked = re.findall(r"\]\(([\w.]+\.md)\)", (ROOT / "docs/SUMMARY.md").read_text())
    library = (ROOT / "src/lib.rs").read_text()
    # Under any other condition, rustdoc may find none of a module's tests.
    if "#[cfg(doctest)]\nmod pages {" not in library:
        yield "src/lib.rs: the module `pages` must be under `cfg(doctest)`"
    compiled = " ".join(re.findall(r"pages! \{([\w\s]*)\}", library)).split()
    for name in files("docs/*.md"):
        page, words = Path(name), len((ROOT / name).read_text().split())
        if words > MOST_WORDS:
            yield f"{name}: it has {words} words, and a page has at most {MOST_WORDS}: make two of it"
        if page.name not in [*linked, "SUMMARY.md"]:
            yield f"docs/SUMMARY.md: it has no link to {name}"
        if re.search(r"^```rust(?!,ignore)", (ROOT / name).read_text(), re.M) and page.stem not in compiled:
            yield f"src/lib.rs: `pages!` lacks {page.stem}, so the Rust code of {name} is not compiled"


def unknown_commits(pages):
    """The commits in prose and tables that are not in the history: 7 or 8 hexadecimal digits, with a letter among them.

    A commit that only this clone still stores, from before a rebase, does not count.
    """
    git = ["git", "-C", ROOT]
    if subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True).stdout != "false\n":
        return
    history = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True).stdout.split()
    known = {commit[:digits] for commit in history for digits in (7, 8)}
    for name, text in pages:
        for commit in sorted(set(re.findall(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,8}\b", text)) - known):
            yield f"{name}: the history has no commit {commit}"


def unmeasured_numbers(name, text):
    """The numbers of tables, apart from the first row and column, that are not in the results which the table names, rounded as there."""
    number = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
    for results, table in re.findall(r"<!-- numbers of (.+) -->\n+((?:\|.*\n)+)", text):
        texts = [(ROOT / file).read_text() for file in results.split(" and ")]
        measured = [float(found.replace(",", "")) for text in texts for found in number.findall(text)]
        for cell in (cell for row in table.splitlines()[2:] for cell in row.split("|")[2:]):
            for found in number.findall(cell):
                digits = found.replace(",", "")
                places = len(digits.partition(".")[2])
                if not any(abs(value - float(digits)) <= 0.5001 / 10**places for value in measured):
                    yield f"{name}: {results} does not have the number {digits}"


def main():
    problems = [*undocumented_variables(), *unlisted_pages()]
    pages = []
    sources = set(files("*.rs"))
    for name in files("*.md"):
        file = ROOT / name
        text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.S | re.M)
        pages.append((name, text))
        problems += unmeasured_numbers(name, text)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"\w+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (file.parent / path).resolve() if path else file
            if not there.exists():
                problems.append(f"{name}: {target} does not exist")
            elif anchor and anchor not in anchors(there.read_text()):
                problems.append(f"{name}: {target} has no such heading")
        problems += missing_sources(name, text, sources)
    problems += unknown_commits(pages)
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

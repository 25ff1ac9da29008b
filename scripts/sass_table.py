#!/usr/bin/env python3
"""What the CUDA kernels become: instructions, loops and the widths of loads and stores, for two generations of GPUs.

    scripts/cuda_toolkit.sh FOLDER && source FOLDER/env.sh
    python3 -m pip install --target TOOLS nvidia-cuda-nvdisasm==13.5.37
    scripts/sass_table.py --nvdisasm TOOLS/nvidia/cu13/bin/nvdisasm --before 28bc136 > benches/results/sass.md

NVRTC compiles each unit as the library does, to machine code, which nvdisasm shows. Needs no GPU. With --before, the loops and
widths of an earlier commit stand next to those of today.
"""

import argparse
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
KERNELS = "crates/candle-ddp-tensor/src/kernels"
DTYPES = {"f32": ("float", 4), "bf16": ("BF16", 2)}
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def read(commit, file):
    """A file of the kernels, as it is or as it was in a commit."""
    if not commit:
        return (ROOT / KERNELS / file).read_text()
    show = ["git", "-C", ROOT, "show", f"{commit}:{KERNELS}/{file}"]
    return subprocess.run(show, check=True, capture_output=True, text=True).stdout


def units(commit):
    """The compilation units of `source.rs`: the files of each."""
    text = read(commit, "source.rs")
    for files, name in re.findall(r'\w+: \[((?:"[\w.]+"(?:, )?)+)\] "([\w.]+)"', text):
        yield [*re.findall(r'"([\w.]+)"', files), name]


def compile_unit(nvrtc, commit, files, dtype, generation):
    """The machine code of a unit."""
    source = "\n".join(read(commit, file) for file in files).encode()
    options = [
        f"--gpu-architecture=sm_{generation}",
        "--std=c++17",
        "--fmad=false",
        "--device-as-default-execution-space",
        f"-DONLY={DTYPES[dtype][0]}",
        f"-DSUFFIX={dtype}",
    ]
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, files[-1].encode(), 0, None, None) == 0
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), arguments) != 0:
        sys.exit(f"{files[-1]} does not compile for sm_{generation}")
    size = ctypes.c_size_t()
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    code = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetCUBIN(program, code) == 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def functions(nvdisasm, code):
    """The instructions and labels of each kernel, in order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([nvdisasm, "-c", file.name], check=True, capture_output=True, text=True).stdout
    name, lines = None, []
    for line in text.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.(\w+)", line)
        label = re.match(r"(\.L_\w+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        if section:
            if name:
                yield name, lines
            name, lines = section.group(1), []
        elif label:
            lines.append(("label", label.group(1)))
        elif instruction:
            lines.append(("instruction", instruction.group(1)))
    if name:
        yield name, lines


def width(instruction, kind):
    """The bytes of a load from the GPU's memory (LDG), or of a store to it (STG); 0 for other instructions."""
    operation = instruction.split("@")[-1].split(" ", 1)[-1] if instruction.startswith("@") else instruction
    operation = operation.split()[0]
    if not operation.startswith(kind):
        return 0
    return next((BYTES[part] for part in operation.split(".") if part in BYTES), 4)


def loops(lines):
    """The innermost loops, each with its instructions."""
    places, found = {}, []
    for index, (kind, text) in enumerate(lines):
        if kind == "label":
            places[text] = index
        target = re.search(r"\bBRA\b.*?`\((\.L_\w+)\)", text)
        if target and target.group(1) in places:
            found.append((places[target.group(1)], index))
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in found)]
    # A kernel ends with a branch to itself, which is no loop.
    bodies = [[text for kind, text in lines[a : b + 1] if kind == "instruction"] for a, b in inner]
    return [body for body in bodies if len(body) > 1]


def widths(instructions, kind):
    found = sorted({width(text, kind) for text in instructions} - {0})
    return ", ".join(map(str, found)) or "–"


def row(lines):
    """The number of instructions, the loop, its instructions for 16 bytes, and the widths of loads and of stores."""
    instructions = [text for kind, text in lines if kind == "instruction" and not text.startswith("NOP")]
    # The loop that loads most, and of these the shortest one, moves the elements.
    bodies = [body for body in loops(lines) if any(width(text, "LDG") for text in body)]
    loaded = lambda body: sum(width(text, "LDG") for text in body)
    body = min(bodies, key=lambda body: (-loaded(body), len(body)), default=None)
    loop, per_load = "–", "–"
    if body:
        loads = [width(text, "LDG") for text in body]
        loop = f"{len(body)} for {loads.count(max(loads))} × {max(loads)} bytes"
        per_load = f"{16 * len(body) / sum(loads):.0f}"
    return [str(len(instructions)), loop, per_load, widths(instructions, "LDG"), widths(instructions, "STG")]


def rows(nvrtc, nvdisasm, commit, generation):
    """The rows of all kernels in f32 and bf16, by name."""
    found = {}
    for files in units(commit):
        for dtype in DTYPES:
            code = compile_unit(nvrtc, commit, files, dtype, generation)
            for name, lines in sorted(functions(nvdisasm, code)):
                # Kernels of sums have no dtype.
                if name.rsplit("_", 1)[-1] not in {"f64", "f16", *DTYPES} - {dtype} and name not in found:
                    found[name] = row(lines)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvdisasm", default="nvdisasm", help="the program of that name")
    parser.add_argument("--generations", default="80,90", help="compute capabilities")
    parser.add_argument("--before", help="a commit")
    options = parser.parse_args()
    nvrtc = ctypes.CDLL("libnvrtc.so")
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    print("# The CUDA kernels as machine code\n")
    before = f"\n*Before* is commit {options.before}, for the kernels that it has." if options.before else ""
    print(
        f"By `scripts/sass_table.py`, with NVRTC {major.value}.{minor.value}. Nothing was run. *Loop* is the innermost loop that "
        "loads most: its\ninstructions, and how many loads of its greatest width it has; next to it, its instructions for each 16 "
        "bytes that it loads, which are\n4 elements of f32 or 8 of bf16, of all tensors together. Instructions outside loops run "
        "once per thread. The widths are bytes per\nthread; a kernel that has narrow ones as well uses them for tensors that "
        f"begin elsewhere and for the rest of a chunk.{before}\n"
    )
    columns = ["instructions", "loop", "for 16 bytes", "loads", "stores"]
    earlier = ["before: loop", "for 16 bytes", "loads"] if options.before else []
    for generation in options.generations.split(","):
        print(f"## Compute capability {generation[:-1]}.{generation[-1]}\n")
        print("| kernel | " + " | ".join(columns + earlier) + " |")
        print("|---" * (1 + len(columns + earlier)) + "|")
        then = rows(nvrtc, options.nvdisasm, options.before, generation) if options.before else {}
        for name, cells in rows(nvrtc, options.nvdisasm, None, generation).items():
            cells = cells + then.get(name, [""] * 4)[1:4] if options.before else cells
            print(f"| `{name}` | " + " | ".join(cells) + " |")
        print()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What the CUDA kernels become: instructions, loops and the widths of loads and stores, for two generations of GPUs.

    scripts/cuda_toolkit.sh FOLDER && source FOLDER/env.sh
    python3 -m pip install --target TOOLS nvidia-cuda-nvdisasm==13.5.37
    scripts/sass_table.py --nvdisasm TOOLS/nvidia/cu13/bin/nvdisasm > benches/results/sass.md

NVRTC compiles each unit as the library does, to machine code, which nvdisasm shows. Needs no GPU.
"""

import argparse
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile

KERNELS = pathlib.Path(__file__).parent.parent / "crates/candle-ddp-tensor/src/kernels"
DTYPES = {"f32": ("float", 4), "bf16": ("BF16", 2)}
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def units():
    """The compilation units of `source.rs`: the files of each."""
    text = (KERNELS / "source.rs").read_text()
    for files, name in re.findall(r'\w+: \[((?:"[\w.]+"(?:, )?)+)\] "([\w.]+)"', text):
        yield [*re.findall(r'"([\w.]+)"', files), name]


def compile_unit(nvrtc, files, dtype, generation):
    """The machine code of a unit."""
    source = "\n".join((KERNELS / file).read_text() for file in files).encode()
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


def row(name, dtype, lines):
    instructions = [text for kind, text in lines if kind == "instruction" and not text.startswith("NOP")]
    # The loop with the widest loads, and of these the shortest one, moves the elements.
    bodies = [body for body in loops(lines) if any(width(text, "LDG") for text in body)]
    widest = lambda body: max(width(text, "LDG") for text in body)
    body = min(bodies, key=lambda body: (-widest(body), len(body)), default=None)
    loop, per_load = "–", "–"
    if body:
        loads = [width(text, "LDG") for text in body]
        loop = f"{len(body)} for {loads.count(max(loads))} × {max(loads)} bytes"
        per_load = f"{16 * len(body) / sum(loads):.0f}"
    loaded, stored = widths(instructions, "LDG"), widths(instructions, "STG")
    return f"| `{name}` | {len(instructions)} | {loop} | {per_load} | {loaded} | {stored} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvdisasm", default="nvdisasm", help="the program of that name")
    parser.add_argument("--generations", default="80,90", help="compute capabilities")
    options = parser.parse_args()
    nvrtc = ctypes.CDLL("libnvrtc.so")
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    print("# The CUDA kernels as machine code\n")
    print(
        f"By `scripts/sass_table.py`, with NVRTC {major.value}.{minor.value}. Nothing was run. *Loop* is the innermost loop with "
        "the widest loads: its\ninstructions, and how many loads of which width it has; next to it, its instructions for each 16 "
        "bytes that it loads, which are\n4 elements of f32 or 8 of bf16, of all tensors together. Instructions outside loops run "
        "once per thread. The widths are bytes per\nthread; a kernel that has narrow ones as well uses them for tensors that "
        "begin elsewhere and for the rest of a chunk.\n"
    )
    for generation in options.generations.split(","):
        print(f"## Compute capability {generation[:-1]}.{generation[-1]}\n")
        print("| kernel | instructions | loop | for 16 bytes | loads | stores |\n|---|---|---|---|---|---|")
        for files in units():
            for dtype in DTYPES:
                code = compile_unit(nvrtc, files, dtype, generation)
                for name, lines in sorted(functions(options.nvdisasm, code)):
                    if name.endswith(f"_{dtype}") or dtype == "f32":
                        print(row(name, dtype, lines))
        print()


if __name__ == "__main__":
    main()

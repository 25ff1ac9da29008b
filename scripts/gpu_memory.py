#!/usr/bin/env python3
"""Finds how many samples of 1024 tokens a training step of a GPT may have on a GPU of 24, 80 or 141 GB.

    source FOLDER/env.sh                          # the folder of scripts/cuda_toolkit.sh
    cargo bench --no-run --features nccl,cudnn --bench step
    scripts/gpu_memory.py TARGET/release/deps/step-…

The bench runs on the emulated GPU, which then executes nothing: it counts what the program has of its memory at a time, in the order of the
program's calls, as the driver's pool has it. So models have their true sizes. What CUDA and its libraries take by themselves is not counted:
one GiB is left to them. Fragmentation is not counted either. The page docs/performance.md has the table."""
import argparse
import json
import os
import pathlib
import subprocess

# In MiB, as nvidia-smi shows them: an RTX 4090, an H100 and an H200.
GPUS = {"24 GB": 24_564, "80 GB": 81_559, "141 GB": 143_771}
FOR_LIBRARIES = 1024
MODELS = {"GPT-2, 124 M": "gpt2", "350 M": "gpt2-medium", "1.3 B": "gpt2-xl"}
PRECISIONS = {"f32": [], "f32 with `MixedPrecision` in bf16": ["--amp", "bf16"], "bf16": ["--dtype", "bf16"]}


def peak(program, arguments, batch, mebibytes):
    """The peak of a step in bytes; None if there is not enough memory."""
    environment = dict(os.environ, EMULATED_GPU_IDLE="1", EMULATED_GPU_MEMORY=str(mebibytes << 20))
    command = [pathlib.Path(__file__).with_name("emulated_gpu.sh"), program, "--modes", "ddp", "--steps", "1"]
    command += [*arguments, "--batch-size", str(batch)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])["peak_gpu_bytes"]
    if "OUT_OF_MEMORY" not in run.stderr:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{run.stdout}{run.stderr}")
    return None


def largest(program, arguments, mebibytes):
    """The largest batch, and the peak of one sample and of each further one."""
    one, two = (peak(program, arguments, batch, mebibytes) for batch in (1, 2))
    if one is None or two is None:
        return (0 if one is None else 1), one, None
    batch = 1 + ((mebibytes << 20) - one) // (two - one)
    while peak(program, arguments, batch, mebibytes) is None:
        batch -= 1
    while peak(program, arguments, batch + 1, mebibytes) is not None:
        batch += 1
    return batch, one, two - one


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the bench `step`")
    parser.add_argument("--models", nargs="*", default=list(MODELS.values()), choices=MODELS.values())
    options = parser.parse_args()
    gpus = " | ".join(GPUS)
    print(f"| model | precision | first sample, further ones | {gpus} | with `checkpoint` | {gpus} |")
    print("|---|---|---|" + "---|" * (1 + 2 * len(GPUS)))
    for model, name in MODELS.items():
        if name not in options.models:
            continue
        for precision, of_precision in PRECISIONS.items():
            cells = [model, precision]
            for checkpoint in ([], ["--checkpoint"]):
                arguments = ["--model", name, *of_precision, *checkpoint]
                found = [largest(options.program, arguments, size - FOR_LIBRARIES) for size in GPUS.values()]
                _, one, more = found[-1]
                cells.append(f"{one / 2**30:.1f} + {more / 2**30:.2f} GiB")
                cells += [str(batch) if batch else "–" for batch, _, _ in found]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Finds how many samples of 1024 tokens a training step of a GPT may have on a GPU of 24, 80 or 141 GB.

    source FOLDER/env.sh                          # the folder of scripts/cuda_toolkit.sh
    cargo bench --no-run --features nccl,cudnn --bench step
    scripts/gpu_memory.py TARGET/release/deps/step-…

The bench runs on the emulated GPU, which then executes next to nothing: it counts how much of its memory the program has at a time, in
the order of the program's calls, as the driver's pool has it. So models have their true sizes. The memory for each sample follows from
steps of two batches, which are so large that the peak is in the backward pass. What CUDA and its libraries take by themselves is not
counted: one GiB is left to them. Fragmentation is not counted either."""
import argparse
import json
import os
import pathlib
import subprocess

# In MiB, as nvidia-smi shows them: an RTX 4090, an H100 and an H200.
GPUS = {"24 GB": 24_564, "80 GB": 81_559, "141 GB": 143_771}
FOR_LIBRARIES = 1024
MODELS = {"GPT-2, 124 M": "gpt2", "350 M": "gpt2-medium", "1.3 B": "gpt2-xl"}
PRECISIONS = {"f32": [], "mixed": ["--amp", "bf16"], "bf16": ["--dtype", "bf16"]}


def peak(program, arguments, batch):
    """The peak of a step in bytes, on the largest GPU."""
    environment = dict(os.environ, EMULATED_GPU_IDLE="1", EMULATED_GPU_MEMORY=str(max(GPUS.values()) << 20))
    command = [pathlib.Path(__file__).with_name("emulated_gpu.sh"), program, "--modes", "ddp", "--steps", "1"]
    command += [*arguments, "--batch-size", str(batch)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{run.stdout}{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])["peak_gpu_bytes"]


def memory(program, arguments):
    """Returns the memory of a step: the part that does not depend on the batch, and the part of each sample."""
    batches = (16, 32) if "--checkpoint" in arguments else (8, 16)
    first, second = (peak(program, arguments, batch) for batch in batches)
    each = (second - first) / (batches[1] - batches[0])
    return first - batches[0] * each, each


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the bench `step`")
    parser.add_argument("--models", nargs="*", default=list(MODELS.values()), choices=MODELS.values())
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS), choices=PRECISIONS)
    options = parser.parse_args()
    gpus = " | ".join(GPUS)
    print(f"| model | precision | memory, and for each sample | {gpus} | with `nn::checkpoint` | {gpus} |")
    print("|---|---|---|" + "---|" * (1 + 2 * len(GPUS)))
    for model, name in MODELS.items():
        if name not in options.models:
            continue
        for precision in options.precisions:
            of_precision = PRECISIONS[precision]
            cells = [model, precision]
            for checkpoint in ([], ["--checkpoint"]):
                arguments = ["--model", name, *of_precision, *checkpoint]
                always, each = memory(options.program, arguments)
                cells.append(f"{always / 2**30:.1f} + {each / 2**30:.2f} GiB")
                for size in GPUS.values():
                    batch = int((((size - FOR_LIBRARIES) << 20) - always) // each)
                    cells.append(str(batch) if batch > 0 else "–")
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

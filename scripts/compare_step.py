"""Measures the overhead of DistributedDataParallel in a training step on two ranks, with candle-ddp and PyTorch over Gloo.

    pip install matplotlib
    python3 scripts/compare_step.py
    python3 scripts/compare_step.py --dtype bf16
    python3 scripts/compare_step.py --overlap
    python3 scripts/compare_step.py --slow-links 100 1000 --models mlp gpt

The first command measures on this machine, with one thread per rank, the step of a plain model on every rank and the step
with DDP. The loss is the cross entropy of language models, and the mean square of other models' outputs. The second command compares DDP
steps that compute in bf16 with parameters in f32 (in PyTorch by autocast) with those in f32. The third, which needs root,
measures candle-ddp alone on two hosts (network namespaces joined by a veth pair). Their link is so slow that communication
would take 80 % of the backward pass's time; the result shows how much of it the backward pass hides. The fourth compares communication
hooks on two hosts whose link has these numbers of Mbit/s. Results are written to
benches/results/. The environment variable CANDLE_DDP_PYTHON names the Python interpreter with PyTorch (default: python3);
without PyTorch, that part is skipped with a message.
"""

import argparse
import datetime
import statistics
from pathlib import Path

from compare import bars, harness
from compare.harness import say, spread

PEERS = Path(__file__).resolve().parent / "compare"
MODELS = {
    "mlp": "MLP 6×1024, batch 256",
    "resnet18": "ResNet-18 (32×32), batch 32",
    "deeplab": "DeepLabv3+ in miniature (64×64), batch 8",
    "unet": "DDPM's U-Net of half its width (32×32), batch 8",
    "mobilenet": "MobileNetV2 in miniature (64×64), batch 32",
    "gnn": "Graph network, 4 layers of width 128, 256 nodes, 2048 edges, batch 8",
    "gpt": "GPT, 6 layers of width 384, 256 tokens, batch 8",
    "muon": "GPT, 3 layers of width 384, 256 of 4096 tokens, capped logits, batch 8, Muon",
    "lstm": "LSTM, 2 layers of 650, 35 of 10,000 words, batch 20",
}
STEPS = {"mlp": 30, "resnet18": 5, "deeplab": 20, "unet": 5, "mobilenet": 10, "gnn": 20, "gpt": 5, "muon": 5, "lstm": 5}
PARTS = ["forward", "backward", "optimizer", "step"]
# As a share of the backward pass's time.
COMMUNICATION = 0.8


def main():
    options = parse()
    program = harness.build_bench("step")
    if options.overlap:
        name, document = "overlap.md", overlap(options, program)
    elif options.slow_links:
        name, document = "slow_links.md", slow_links(options, program)
    elif options.dtype == "bf16":
        name, document = "step_bf16.md", mixed(options, program)
    else:
        name, document = "step.md", overhead(options, program)
    harness.write(options.output / name, document)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overlap", action="store_true", help="measure two hosts with a slow link instead")
    parser.add_argument("--slow-links", nargs="+", type=int, metavar="MBIT/S", help="measure hooks on two hosts with such links instead")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="the dtype that models compute in [f32]")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, help="measured steps of each kind per run [30 for mlp, 5 for resnet18]")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of everything [3]")
    parser.add_argument(
        "--bucket-caps", type=int, nargs="+", default=[25, 4], metavar="MIB", help="with --overlap [25, the default, and 4]"
    )
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date in the table [today]")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "benches" / "results", help="the folder")
    return parser.parse_args()


def ours(options, program, model, modes, hosts, *more):
    """Returns the rows by mode."""
    steps = options.steps or STEPS[model]
    command = [program, "--model", model, "--steps", steps, "--modes", ",".join(modes)]
    command += more
    return by_mode(harness.run_ranks(command, 2, hosts))


def pytorch(options, model, modes, hosts, *more):
    steps = options.steps or STEPS[model]
    command = [harness.PYTHON, PEERS / "step_pytorch.py", model, steps, ",".join(modes), *more]
    return by_mode(harness.run_ranks(command, 2, hosts))


def by_mode(output):
    return {row["mode"]: row for row in harness.json_lines(output)}


def with_peers(systems, peers):
    """Adds PyTorch's systems, if PyTorch is there. Returns the lines of a document that name the versions."""
    versions = [f"- Ours: {harness.toolchain()}"]
    if version := harness.pytorch_version():
        systems |= peers
        versions.append(f"- PyTorch: {version}")
    else:
        harness.skip("PyTorch", f"{harness.PYTHON} does not have it (set CANDLE_DDP_PYTHON)")
    return versions


def rounds(options, systems, modes):
    """Returns the rows by mode of each round, by model and system; the systems alternate."""
    runs = {(model, name): [] for model in options.models for name in systems}
    for number in range(1, options.rounds + 1):
        for model, name in runs:
            say(f"round {number} of {options.rounds}: {model}, {name}")
            runs[model, name].append(systems[name](model, modes))
    return runs


def overhead(options, program):
    hosts = harness.OneHost()
    systems = {"candle-ddp": lambda model, modes: ours(options, program, model, modes, hosts)}
    peers = {"PyTorch, Gloo": lambda model, modes: pytorch(options, model, modes, hosts)}
    versions = with_peers(systems, peers)
    runs = rounds(options, systems, ["local", "ddp"])
    memory = {}
    for model, name in runs:
        say(f"memory: {model}, {name}")
        memory[model, name] = systems[name](model, ["ddp"])["ddp"]["peak_rss_bytes"] / 2**20
    lines = [
        "# A training step, plain and with DDP, 2 ranks on one machine",
        "",
        "Fused AdamW (in PyTorch, `fused=True`), for one model Muon, one thread per rank. *plain*: every rank trains its own model at the same time; *DDP*: gradients are "
        f"averaged. Both alternate in one process. Times are medians in ms over {options.rounds} alternating rounds of the "
        "slower rank's median step, with the lowest and highest round in brackets. Memory is the most that rank 0's process "
        "had in a run of DDP alone, with everything that it loads, in MiB.",
        "",
        *about(options, "scripts/compare_step.py", versions),
    ]
    names = list(systems)
    if len(names) == 2:
        parts = PARTS[:-1]
        times = lambda model, name: [
            statistics.median(run["ddp"][f"{part}_ms"] for run in runs[model, name]) for part in parts
        ]
        models = [(MODELS[model], {name: times(model, name) for name in names}) for model in options.models]
        title = f"A training step with DDP, 2 ranks, {harness.processor()}"
        options.output.mkdir(parents=True, exist_ok=True)
        bars.save(options.output / "step.svg", title, models, names, parts)
        picture = ["", "![steps](step.svg)", ""]
        picture.append("The bars are the medians of the parts, whose sums differ a little from the medians of whole steps.")
        lines += ["", f"| DDP step | {names[0]} | {names[1]} | ratio | memory, {names[0]} | {names[1]} | ratio |"]
        lines.append("|---|---:|---:|---:|---:|---:|---:|")
        for model in options.models:
            ours_, peer = ([run["ddp"]["step_ms"] for run in runs[model, name]] for name in names)
            ratios = [a / b for a, b in zip(ours_, peer)]
            cells = f"{statistics.median(ours_):.1f} | {statistics.median(peer):.1f} | {spread(ratios, '.2f')}"
            ours_, peer = (memory[model, name] for name in names)
            lines.append(f"| {MODELS[model]} | {cells} | {ours_:.0f} | {peer:.0f} | {ours_ / peer:.2f} |")
        lines += picture
    for model in options.models:
        lines += ["", f"## {MODELS[model]}", "", "| | | plain | DDP | overhead |", "|---|---|---:|---:|---:|"]
        for name in systems:
            for part in PARTS:
                plain, ddp = ([run[mode][f"{part}_ms"] for run in runs[model, name]] for mode in ["local", "ddp"])
                change = [100 * (b / a - 1) for a, b in zip(plain, ddp)]
                cells = f"{statistics.median(plain):.1f} | {statistics.median(ddp):.1f} | {spread(change, '+.1f')} %"
                lines.append(f"| {name} | {part} | {cells} |")
    return lines


def mixed(options, program):
    hosts = harness.OneHost()
    of_ours = lambda *more: lambda model, modes: ours(options, program, model, modes, hosts, *more)
    of_peer = lambda dtype: lambda model, modes: pytorch(options, model, modes, hosts, dtype)
    autocast = lambda model, _: {"ddp": ours(options, program, model, ["autocast"], hosts, "--amp", "bf16")["autocast"]}
    systems = {"candle-ddp, f32": of_ours(), "candle-ddp, bf16": of_ours("--amp", "bf16"), "candle-ddp, autocast": autocast}
    versions = with_peers(systems, {"PyTorch, f32": of_peer("f32"), "PyTorch, bf16": of_peer("autocast")})
    runs = rounds(options, systems, ["ddp"])
    times = lambda model, name: [run["ddp"]["step_ms"] for run in runs[model, name]]
    median = lambda model, name: statistics.median(times(model, name))
    lines = [
        "# A training step with DDP in bf16, 2 ranks on one machine",
        "",
        "*bf16*: models compute in bf16, with parameters in f32 (`Precision::Half`; in PyTorch autocast). *autocast*: functions cast by "
        "PyTorch's lists (`Autocast::Lists`). Fused AdamW, one thread per "
        f"rank. Times are medians in ms over {options.rounds} alternating rounds of the slower rank's median step. Ratios are medians "
        "over rounds, with the lowest and highest in brackets.",
        "",
        *about(options, "scripts/compare_step.py --dtype bf16", versions),
        "",
        f"| DDP step | {' | '.join(systems)} | ours, bf16 / f32 | ours, autocast / bf16 | bf16, ours / PyTorch | "
        "autocast, ours / PyTorch | fastest, ours / PyTorch |",
        "|---|" + "---:|" * (len(systems) + 5),
    ]
    for model in options.models:
        cells = [f"{median(model, name):.1f}" for name in systems]
        ratios = lambda a, b: spread([x / y for x, y in zip(a, b)], ".2f")
        fastest = lambda library: min((times(model, name) for name in systems if name.startswith(library)), key=statistics.median)
        cells.append(ratios(times(model, "candle-ddp, bf16"), times(model, "candle-ddp, f32")))
        cells.append(ratios(times(model, "candle-ddp, autocast"), times(model, "candle-ddp, bf16")))
        if "PyTorch, bf16" in systems:
            cells.append(ratios(times(model, "candle-ddp, bf16"), times(model, "PyTorch, bf16")))
            cells.append(ratios(times(model, "candle-ddp, autocast"), times(model, "PyTorch, bf16")))
            cells.append(ratios(fastest("candle-ddp"), fastest("PyTorch")))
        else:
            cells += [""] * 3
        lines.append(f"| {MODELS[model]} | {' | '.join(cells)} |")
    for model in options.models:
        lines += ["", f"## {MODELS[model]}", "", f"| | {' | '.join(PARTS)} |", "|---|" + "---:|" * len(PARTS)]
        for name in systems:
            parts = (f"{statistics.median(run['ddp'][f'{part}_ms'] for run in runs[model, name]):.1f}" for part in PARTS)
            lines.append(f"| {name} | {' | '.join(parts)} |")
    return lines


def overlap(options, program):
    lines = [
        "# How much communication hides behind the backward pass, 2 ranks on two hosts",
        "",
        "Two network namespaces joined by a veth pair, AdamW, one thread per rank. The link is limited (tc tbf) to the rate "
        f"at which sending the gradients once in each direction takes {COMMUNICATION:.0%} of the time of a plain backward "
        f"pass, which is measured first. All kinds of steps alternate in one process. Times are medians in ms over "
        f"{options.rounds} rounds of the slower rank's median step, with the lowest and highest round in brackets.",
        "",
        *about(options, "scripts/compare_step.py --overlap", [f"- Ours: {harness.toolchain()}"]),
    ]
    modes = {"local": "no communication", "ddp": "DDP, overlapped", "after": "DDP, reduced after backward"}
    for model in options.models:
        with harness.TwoHosts() as hosts:
            say(f"{model}: measuring the backward pass alone")
            plain = ours(options, program, model, ["local"], hosts)["local"]
            seconds = COMMUNICATION * plain["backward_ms"] / 1e3
            rate = plain["gradient_bytes"] / seconds
            hosts.limit(rate)
            runs = {cap: [] for cap in options.bucket_caps}
            for number in range(1, options.rounds + 1):
                for cap, found in runs.items():
                    say(f"round {number} of {options.rounds}: {model}, {rate / 1e6:.0f} MB/s, buckets of {cap} MiB")
                    found.append(ours(options, program, model, modes, hosts, "--bucket-cap-mib", cap))
        lines += [
            "",
            f"## {MODELS[model]}",
            "",
            f"{plain['gradient_bytes'] / 1e6:.1f} MB of gradients in {1e3 * seconds:.0f} ms: {rate / 1e6:.0f} MB/s.",
            "",
            "| bucket cap | | forward | backward | optimizer | step | over no communication |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for cap, found in runs.items():
            for mode, title in modes.items():
                parts = " | ".join(f"{statistics.median(run[mode][f'{part}_ms'] for run in found):.1f}" for part in PARTS)
                ratios = [run[mode]["step_ms"] / run["local"]["step_ms"] for run in found]
                lines.append(f"| {cap} MiB | {title} | {parts} | {spread(ratios, '.3f')} |")
    return lines


def slow_links(options, program):
    modes = {"ddp": "f32", "bf16-hook": "Bf16Compress", "int8-hook": "Int8Compress", "power-sgd": "PowerSgd, rank 1"}
    links = " ".join(map(str, options.slow_links))
    lines = [
        "# Communication hooks on slow links, 2 ranks on two hosts",
        "",
        "Two network namespaces joined by a veth pair whose rate is limited (tc tbf), AdamW, one thread per rank. All kinds of steps "
        f"alternate in one process. Times are medians in ms over {options.rounds} rounds of the slower rank's median step, with the lowest "
        "and highest round in brackets. The last row has no limit.",
        "",
        *about(options, f"scripts/compare_step.py --slow-links {links}", [f"- Ours: {harness.toolchain()}"]),
    ]
    for model in options.models:
        lines += ["", f"## {MODELS[model]}", "", f"| Mbit/s | {' | '.join(modes.values())} |", "|---|" + "---:|" * len(modes)]
        for rate in [*options.slow_links, None]:
            found = []
            with harness.TwoHosts() as hosts:
                if rate:
                    hosts.limit(rate * 1e6 / 8)
                for number in range(1, options.rounds + 1):
                    say(f"round {number} of {options.rounds}: {model}, {rate} Mbit/s")
                    found.append(ours(options, program, model, modes, hosts))
            cells = (spread([run[mode]["step_ms"] for run in found], ".0f") for mode in modes)
            lines.append(f"| {rate or '–'} | {' | '.join(cells)} |")
    return lines


def about(options, command, versions):
    arguments = f"--models {' '.join(options.models)} --rounds {options.rounds}"
    arguments += f" --steps {options.steps}" if options.steps else ""
    arguments += f" --bucket-caps {' '.join(map(str, options.bucket_caps))}" if options.overlap else ""
    return [
        f"- Date: {options.date}",
        f"- Machine: {harness.machine()}",
        *versions,
        f"- Command: `python3 {command} {arguments}`",
    ]


main()

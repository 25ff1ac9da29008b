#!/usr/bin/env python3
"""Writes tests/golden/optim.safetensors: results of PyTorch's optimizers, schedules, clipping and weight averages.

    pip install torch safetensors
    python3 scripts/golden_optim.py

tests/golden/optim.md describes the content of the file. Everything but Lion and Muon is computed in float64.
"""

import math
import pathlib

import numpy
import torch
from safetensors.numpy import save_file
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

OUTPUT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "optim.safetensors"
STEPS = 100
EVERY = 5
SCHEDULE_STEPS = 60
BASE_RATES = [0.1, 0.02]

# Options have the names of the Rust structs.
RUNS = {
    "adamw.default": {},
    "adamw.strong": {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.3},
    "adamw.groups": {"lr": 0.01, "weight_decay": 0.1, "groups": True},
    "adamw.sparse": {"lr": 0.01, "sparse": True},
    "adam.default": {},
    "adam.l2": {"lr": 0.02, "beta1": 0.8, "beta2": 0.98, "eps": 1e-3, "weight_decay": 0.05},
    "sgd.plain": {"lr": 0.1},
    "sgd.decay": {"lr": 0.1, "weight_decay": 0.05},
    "sgd.momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "sgd.dampening": {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "sparse": True},
    "sgd.nesterov": {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "lamb.default": {"lr": 0.02},
    "lamb.l2": {"lr": 0.02, "adam_w_mode": False, "grad_averaging": False, "weight_decay": 0.1, "max_grad_norm": 0.01},
    "lamb.plain": {"lr": 0.002, "weight_decay": 0.0, "grad_averaging": False},
    "lamb.nv": {"lr": 0.02, "weight_decay": 0.0, "use_nvlamb": True, "max_grad_norm": None, "bias_correction": False},
}


class Lamb:
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", algorithm 2) in plain float64, with the choices of
    Apex's FusedLAMB:

    - all gradients are divided by max(1, ‖all gradients‖ / max_grad_norm);
    - decay is added to the update (adam_w_mode) or to the gradient;
    - m = beta1 m + beta3 g with beta3 = 1 - beta1, or 1 without grad_averaging; v = beta2 v + (1 - beta2) g²;
    - both are divided by 1 - beta^t (bias_correction); u = m / (sqrt(v) + eps) + decay p;
    - p -= lr ‖p‖/‖u‖ u; the ratio is 1 without decay (unless use_nvlamb), and when a norm is zero.
    """

    def __init__(self, parameters, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.01, bias_correction=True,
                 adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False):
        self.parameters = list(parameters)
        self.options = (lr, beta1, beta2, eps, weight_decay)
        self.bias_correction, self.adam_w_mode, self.grad_averaging = bias_correction, adam_w_mode, grad_averaging
        self.max_grad_norm, self.use_nvlamb = max_grad_norm, use_nvlamb
        self.state = [(numpy.zeros(p.shape), numpy.zeros(p.shape)) for p in self.parameters]
        self.t = 0

    def step(self):
        self.t += 1
        lr, beta1, beta2, eps, decay = self.options
        gradients = [p.grad.numpy().copy() for p in self.parameters]
        if self.max_grad_norm is not None:
            norm = math.sqrt(sum((g * g).sum() for g in gradients))
            gradients = [g / max(1.0, norm / self.max_grad_norm) for g in gradients]
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients)):
            p = parameter.detach().numpy()  # shares memory
            m, v = self.state[index]
            if not self.adam_w_mode:
                gradient = gradient + decay * p
            m = beta1 * m + (1 - beta1 if self.grad_averaging else 1.0) * gradient
            v = beta2 * v + (1 - beta2) * gradient * gradient
            self.state[index] = (m, v)
            m_hat, v_hat = m, v
            if self.bias_correction:
                m_hat, v_hat = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
            update = m_hat / (numpy.sqrt(v_hat) + eps)
            if self.adam_w_mode:
                update = update + decay * p
            ratio = 1.0
            if decay != 0 or self.use_nvlamb:
                p_norm, u_norm = math.sqrt((p * p).sum()), math.sqrt((update * update).sum())
                if p_norm != 0 and u_norm != 0:
                    ratio = p_norm / u_norm
            p -= lr * ratio * update


class Lion:
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", program 1), with decoupled weight decay."""

    def __init__(self, parameters, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
        self.parameters = list(parameters)
        self.options = (lr, beta1, beta2, weight_decay)
        self.exp_avg = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        lr, beta1, beta2, decay = self.options
        for parameter, exp_avg in zip(self.parameters, self.exp_avg):
            update = (exp_avg * beta1).add_(parameter.grad, alpha=1 - beta1).sign_()
            parameter.mul_(1 - lr * decay).add_(update, alpha=-lr)
            exp_avg.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


def problem():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    y = torch.tanh(x @ torch.randn(4, 3, generator=generator, dtype=torch.float64) + 0.3)
    w = torch.randn(4, 3, generator=generator, dtype=torch.float64) * 0.5
    b = torch.randn(3, generator=generator, dtype=torch.float64) * 0.5
    return x, y, w, b


def loss_of(x, y, w, b):
    return ((torch.tanh(x @ w + b) - y) ** 2).mean()


def optimizer(name, options, w, b):
    options = {key: value for key, value in options.items() if key not in ("groups", "sparse")}
    kind = name.split(".")[0]
    if kind == "lamb":
        return Lamb([w, b], **options)
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    parameters = [w, b]
    if RUNS[name].get("groups"):  # the bias: no decay, twice the rate
        parameters = [{"params": [w]}, {"params": [b], "weight_decay": 0.0, "lr": 2 * options["lr"]}]
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    return kinds[kind](parameters, foreach=False, **options)


def run(name, options):
    """Returns w and b after every fifth step."""
    x, y, w, b = problem()
    w, b = w.clone().requires_grad_(), b.clone().requires_grad_()
    opt, rows = optimizer(name, options, w, b), []
    for step in range(STEPS):
        w.grad = b.grad = None
        loss_of(x, y, w, b).backward()
        if options.get("sparse") and step % 3 == 0:  # no gradient for the bias in these steps
            b.grad = None
        opt.step()
        if (step + 1) % EVERY == 0:
            rows.append(torch.cat([w.detach().flatten(), b.detach()]).numpy().copy())
    return numpy.stack(rows)


def lion():
    """Returns w and b after each of 10 steps, and then their state, all in float32; step s uses its own gradients."""
    generator = torch.Generator().manual_seed(11)
    w, b = (torch.randn(*shape, generator=generator).requires_grad_() for shape in [(4, 3), (3,)])
    flat = lambda tensors: torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy().copy()
    start, gradients, rows = flat([w, b]), [], []
    opt = Lion([w, b], lr=0.02, beta1=0.9, beta2=0.99, weight_decay=0.1)
    for _ in range(10):
        for parameter in (w, b):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        gradients.append(flat([w.grad, b.grad]))
        opt.step()
        rows.append(flat([w, b]))
    return {"lion.start": start, "lion.gradients": numpy.stack(gradients), "lion.weights": numpy.stack(rows),
            "lion.exp_avg": flat(opt.exp_avg)}


MUONS = {
    "default": {"lr": 0.02},
    "other": {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.8, "nesterov": False, "ns_steps": 3, "eps": 1e-3,
              "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "match_rms_adamw"},
    "spectral": {"lr": 0.02, "adjust_lr_fn": "spectral_unclamped"},
}  # fmt: skip


def muon():
    """Returns three matrices after each of 10 steps with random gradients, in float32."""
    generator = torch.Generator().manual_seed(13)
    shapes = [(6, 4), (4, 6), (5, 5)]
    start = [torch.randn(*shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(*shape, generator=generator) for shape in shapes] for _ in range(10)]
    flat = lambda tensors: torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy().copy()
    found = {"muon.start": flat(start), "muon.gradients": numpy.stack([flat(row) for row in gradients])}
    for name, options in MUONS.items():
        matrices = [matrix.clone().requires_grad_() for matrix in start]
        opt, rows = torch.optim.Muon(matrices, **options), []
        for row in gradients:
            for matrix, gradient in zip(matrices, row):
                matrix.grad = gradient.clone()
            opt.step()
            rows.append(flat(matrices))
        found[f"muon.{name}"] = numpy.stack(rows)
    return found


def metrics():
    """Returns losses that fall, stall, rise and fall again."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(SCHEDULE_STEPS, generator=generator, dtype=torch.float64)
    return [1 / (1 + 0.2 * min(step, 12)) + 0.02 * noise[step].item() - (0.1 if step > 45 else 0.0)
            for step in range(SCHEDULE_STEPS)]


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.3),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, milestones=[30, 4, 11, 11], gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=25, eta_min=0.001),
    "warmup_cosine": lambda o: lr_scheduler.SequentialLR(o, [
        lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=10),
        lr_scheduler.CosineAnnealingLR(o, T_max=SCHEDULE_STEPS - 10, eta_min=0.001)], milestones=[10]),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=BASE_RATES, total_steps=SCHEDULE_STEPS,
                                                   cycle_momentum=False),
    "one_cycle_three": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=BASE_RATES, total_steps=SCHEDULE_STEPS, pct_start=0.37, anneal_strategy="linear", div_factor=10.0,
        final_div_factor=100.0, three_phase=True, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=3, cooldown=2, min_lr=0.001),
    "plateau_max": lambda o: lr_scheduler.ReduceLROnPlateau(
        o, mode="max", factor=0.2, patience=2, threshold=0.01, threshold_mode="abs", eps=0.0005),
}


def schedule(make):
    """Returns the learning rates before steps 0, 1, … of the optimizer, for two groups."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in BASE_RATES]
    opt = torch.optim.SGD(groups, lr=1.0)
    scheduler, rows = make(opt), []
    for metric in metrics():
        rows.append([group["lr"] for group in opt.param_groups])
        opt.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(metric if scheduler.mode == "min" else -metric)
        else:
            scheduler.step()
    return numpy.array(rows, dtype=numpy.float64)


def clipped(gradients, **arguments):
    parameters = [torch.zeros_like(gradient) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    if "clip_value" in arguments:
        torch.nn.utils.clip_grad_value_(parameters, arguments["clip_value"])
        norm = torch.tensor(0.0)
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, **arguments)
    return numpy.array([norm.item()] + [x for p in parameters for x in p.grad.flatten().tolist()], dtype=numpy.float64)


def ema():
    """Changes a layer's weights 10 times; returns the weights and their average after each change."""
    layer = torch.nn.Linear(3, 2).double()
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    generator = torch.Generator().manual_seed(5)
    weights, averages = [], []
    for _ in range(10):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        average.update_parameters(layer)
        flat = lambda module: torch.cat([p.detach().flatten() for p in module.parameters()]).numpy().copy()
        weights.append(flat(layer))
        averages.append(flat(average.module))
    return numpy.stack(weights), numpy.stack(averages)


def main():
    torch.manual_seed(0)
    x, y, w, b = problem()
    tensors = {"x": x.numpy(), "y": y.numpy(), "w": w.numpy(), "b": b.numpy()}
    for name, options in RUNS.items():
        tensors[f"run.{name}"] = run(name, options)
        last = torch.from_numpy(tensors[f"run.{name}"][-1])
        print(f"{name}: loss {loss_of(x, y, w, b):.4f} -> {loss_of(x, y, last[:12].reshape(4, 3), last[12:]):.4f}")
    tensors.update(lion())
    tensors.update(muon())
    tensors["metrics"] = numpy.array(metrics())
    for name, make in SCHEDULES.items():
        tensors[f"schedule.{name}"] = schedule(make)
    gradients = [x[:3].clone(), b.clone()]
    tensors["clip.l2"] = clipped(gradients, max_norm=1.5)
    tensors["clip.inf"] = clipped(gradients, max_norm=0.5, norm_type=math.inf)
    tensors["clip.none"] = clipped(gradients, max_norm=1e3)
    tensors["clip.value"] = clipped(gradients, clip_value=0.4)
    tensors["ema.weights"], tensors["ema.averages"] = ema()
    tensors = {key: numpy.ascontiguousarray(value) for key, value in tensors.items()}
    save_file(tensors, OUTPUT, metadata={"torch": torch.__version__.split("+")[0]})
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()

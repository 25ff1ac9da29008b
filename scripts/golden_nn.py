#!/usr/bin/env python3
"""Writes tests/golden/nn.safetensors: PyTorch's normalisation layers and its gradient scaler.

    pip install torch safetensors
    python3 scripts/golden_nn.py

tests/golden/README.md describes the content of the file.
"""

import pathlib

import numpy
import torch
from safetensors.numpy import save_file
from torch import nn

OUTPUT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "nn.safetensors"

# Steps in which the scaler meets an overflow.
OVERFLOWS = [0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]


def layer(module, shape, generator):
    """Returns the module's outputs and gradients for random inputs, computed in float64."""
    module = module.double()
    tensors = {}
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
        tensors[name] = parameter.detach().clone()
    # Means far from zero, which reveal the errors of a one-pass variance.
    x = (torch.randn(shape, generator=generator) * 2 + 5).double().requires_grad_()
    dy = torch.randn(shape, generator=generator).double()
    y = module(x)
    y.backward(dy)
    tensors |= {"x": x.detach(), "dy": dy, "y": y.detach(), "dx": x.grad}
    tensors |= {f"d_{name}": parameter.grad for name, parameter in module.named_parameters()}
    tensors |= dict(module.named_buffers())
    tensors.pop("num_batches_tracked", None)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        tensors["eval"] = module.eval()(x).detach()
    return tensors


def scaler():
    """Returns the scale after each update; gradients are infinite in the steps OVERFLOWS."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)
    scales, weights = [], []
    for overflow in OVERFLOWS:
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        if overflow:
            parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(parameter.item())
    return {"overflows": torch.tensor(OVERFLOWS), "scales": torch.tensor(scales), "weights": torch.tensor(weights)}


def main():
    generator = torch.Generator().manual_seed(0)
    groups = {
        # SyncBatchNorm refuses CPU tensors; the whole batch in one process gives the same result.
        "batch_norm_1d": layer(nn.BatchNorm1d(5), (10, 5), generator),
        "batch_norm_2d": layer(nn.BatchNorm2d(4), (9, 4, 3, 6), generator),
        "layer_norm": layer(nn.LayerNorm(37), (7, 3, 37), generator),
        "rms_norm": layer(nn.RMSNorm(37, eps=1e-5), (7, 3, 37), generator),
        "scaler": scaler(),
    }
    tensors = {
        f"{group}.{name}": numpy.ascontiguousarray(value.numpy().astype(numpy.float32))
        for group, values in groups.items()
        for name, value in values.items()
    }
    save_file(tensors, OUTPUT, metadata={"torch": torch.__version__.split("+")[0]})
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()

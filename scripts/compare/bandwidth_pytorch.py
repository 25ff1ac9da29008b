"""PyTorch's fused optimizers, clipping, loss scaling and layers on a GPU: the counterpart of the bench `bandwidth_gpu`, with the
same sizes, the same measurement and the same table.

    python3 scripts/compare/bandwidth_pytorch.py [--millions 64] [--rounds 20] [--steps 10]
"""

import argparse
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.functional import layer_norm, rms_norm

TENSORS, WIDTH, CLASSES, IMAGE, HEADS = 64, 1024, 50_257, (64, 56, 56), (12, 64)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = -(-int(options.millions * 1e6) // TENSORS // WIDTH) * WIDTH
    elements, copied = TENSORS * size, None

    def synchronize():
        if device == "cuda":
            torch.cuda.synchronize()

    def measure(step, steps):
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        return (time.perf_counter() - start) * 1e3 / steps

    def row(what, dtype, bytes, step):
        nonlocal copied
        measure(step, 2)
        milliseconds = statistics.median(measure(step, options.steps) for _ in range(options.rounds))
        speed = elements * bytes / (milliseconds * 1e6)
        copied = copied or speed
        name = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
        share = 100 * speed / copied
        print(f"| {what} | {name} | {bytes} | {milliseconds:.3f} | {speed:.1f} | {share:.0f} % |", flush=True)

    print(f"PyTorch {torch.__version__}, {options.rounds} × {options.steps} steps, {TENSORS} tensors of {size} elements\n")
    print("| what | dtype | bytes / element | ms | GB/s | share of the copy's |\n|---|---|---|---|---|---|")
    whole = torch.zeros(elements, device=device)
    row("copy", torch.float32, 8, whole.clone)
    del whole
    for dtype in (torch.float32, torch.bfloat16):
        width = torch.finfo(dtype).bits // 8
        parameters = [torch.nn.Parameter((0.03 * torch.randn(size, device=device)).to(dtype)) for _ in range(TENSORS)]
        for parameter in parameters:
            parameter.grad = (1e-3 * torch.randn(size, device=device)).to(dtype)
        adamw = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        row("AdamW", dtype, 7 * width, adamw.step)
        del adamw
        sgd = torch.optim.SGD(parameters, lr=1e-5, momentum=0.9, fused=True)
        row("SGD with momentum", dtype, 5 * width, sgd.step)
        clip = lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=True)
        row("clip_grad_norm", dtype, 3 * width, clip)
        scaler = torch.amp.GradScaler(device, init_scale=1.0)
        scaler.scale(torch.zeros((), device=device))

        def unscale():
            scaler.unscale_(sgd)
            scaler.update()

        # Not implemented for bf16.
        if dtype == torch.float32:
            row("GradScaler::unscale", dtype, 2 * width, unscale)
        del sgd, scaler, parameters
        x = torch.randn(elements // WIDTH, WIDTH, device=device).to(dtype).requires_grad_()
        weight, bias = (torch.ones(WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
        layers = {
            "LayerNorm": lambda: layer_norm(x, (WIDTH,), weight, bias, 1e-5),
            "RmsNorm": lambda: rms_norm(x, (WIDTH,), weight, 1e-5),
        }
        for name, layer in layers.items():

            gradient = torch.ones_like(layer())
            inputs = (x, weight, bias)[: 3 if layer is layers["LayerNorm"] else 2]
            row(f"{name}, forward", dtype, 2 * width, layer)
            row(f"{name}, forward and backward", dtype, 5 * width, lambda: torch.autograd.grad(layer(), inputs, gradient))
        residual = torch.randn_like(x).requires_grad_()
        add_norm = lambda: layer_norm(x + residual, (WIDTH,), weight, bias, 1e-5)
        gradient = torch.ones_like(x)
        row("Add & Norm, forward", dtype, 4 * width, add_norm)
        both = lambda: torch.autograd.grad(add_norm(), (x, residual, weight, bias), gradient)
        row("Add & Norm, forward and backward", dtype, 7 * width, both)
        del residual

        def passes(name, bytes, inputs, layer):
            gradient = torch.ones_like(layer(inputs[0]))
            row(f"{name}, forward", dtype, bytes[0], lambda: layer(inputs[0]))
            both = lambda: torch.autograd.grad(layer(inputs[0]), inputs, gradient)
            row(f"{name}, forward and backward", dtype, bytes[1], both)

        passes("GELU", (2 * width, 5 * width), [x], lambda x: F.gelu(x, approximate="tanh"))
        passes("softmax", (2 * width, 5 * width), [x], lambda x: F.softmax(x, -1))
        passes("dropout", (2 * width, 4 * width), [x], lambda x: F.dropout(x, 0.1))
        del x
        # 8192 tokens, which have far more logits than 64 million.
        count, total = max(int(128 * options.millions), 1), elements
        elements = count * CLASSES
        logits = torch.randn(count, CLASSES, device=device).to(dtype).requires_grad_()
        targets = torch.arange(count, device=device)
        passes("cross entropy", (width, 3 * width), [logits], lambda x: F.cross_entropy(x, targets))
        del logits
        count = max(total // math.prod(IMAGE), 1)
        elements = count * math.prod(IMAGE)
        images = torch.randn(count, *IMAGE, device=device).to(dtype).requires_grad_()
        norm = torch.nn.BatchNorm2d(IMAGE[0], device=device, dtype=dtype)
        passes("BatchNorm", (3 * width, 8 * width), [images, *norm.parameters()], norm)
        passes("max pooling", (5 * width // 4, 10 * width // 4), [images], lambda x: F.max_pool2d(x, 3, 2, 1))
        conv = torch.nn.Conv2d(IMAGE[0], IMAGE[0], 3, padding=1, bias=False, device=device, dtype=dtype)
        passes("convolution 3 × 3", (2 * width, 7 * width), [images, conv.weight], conv)
        del images, conv
        heads, size = HEADS
        for tokens in (1024, 4096):
            tokens = min(tokens, max(total // (3 * heads * size), 8))
            samples = max(total // (3 * heads * size * tokens), 1)
            q, k, v = (torch.randn(samples, heads, tokens, size, device=device).to(dtype).requires_grad_() for _ in range(3))
            elements = q.numel()
            attention = lambda q: F.scaled_dot_product_attention(q, k, v, is_causal=True)
            passes(f"causal attention over {tokens} tokens", (4 * width, 12 * width), [q, k, v], attention)
            if tokens < 4096:
                cos, sin = (torch.randn(tokens, size, device=device).to(dtype) for _ in range(2))
                # As users write it.
                rotate = lambda x: x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin
                passes("rope", (2 * width, 4 * width), [q], rotate)
            del q, k, v
        count = max(total // (heads * size), 1)
        elements = count * heads * size
        embedding = torch.nn.Embedding(CLASSES, heads * size, device=device, dtype=dtype)
        indices = torch.randint(CLASSES, (count,), device=device)
        passes("embedding", (2 * width, 3 * width), [embedding.weight], lambda weight: F.embedding(indices, weight))
        elements = total


main()

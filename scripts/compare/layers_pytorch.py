"""PyTorch's layers in training, for the bench `layers`. Each line of the input is a case, such as "norm 16×64×32×32 8 bf16"; the answer is
the milliseconds of one forward and of one backward pass.

    python3 scripts/compare/layers_pytorch.py THREADS
"""

import functools
import sys
import time

import torch


def layer(kind, sizes, *rest):
    """The layer, and the shape of its input."""
    if kind == "norm":
        return torch.nn.GroupNorm(int(rest[0]), sizes[1]), sizes
    images, inputs, outputs, size, kernel, stride = sizes
    return torch.nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), [images, inputs, size, size]


def packed(lengths, dtype, heads=6, width=64):
    """Causal attention within documents of one row. `varlen_attn` needs CUDA; on a CPU, a call for each document is the fastest way."""
    qkv = torch.randn(sum(lengths), 3, heads, width).to(dtype).requires_grad_()

    def forward():
        documents = (document.permute(1, 2, 0, 3).unsqueeze(1) for document in qkv.split(lengths))
        seen = [torch.nn.functional.scaled_dot_product_attention(*document, is_causal=True) for document in documents]
        return torch.cat([one[0].transpose(0, 1).flatten(1) for one in seen])

    def backward(y):
        qkv.grad = None
        y.backward(torch.ones_like(y))

    return forward, backward


@functools.cache
def case(kind, sizes, *rest):
    """Functions of a forward and of a backward pass; of products there is only one."""
    sizes = [int(size) for size in sizes.split("×")]
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[rest[-1]]
    if kind in ("linear", "dx", "dw"):
        rows, outputs, inputs = sizes
        x, weight, dy = (torch.randn(shape).to(dtype) for shape in ([rows, inputs], [outputs, inputs], [rows, outputs]))
        product = {
            "linear": lambda: torch.nn.functional.linear(x, weight),
            "dx": lambda: torch.matmul(dy, weight),
            "dw": lambda: torch.matmul(dy.t(), x),
        }[kind]
        return product, None
    if kind == "packed":
        return packed(sizes, dtype)
    module, shape = layer(kind, sizes, *rest)
    module.to(dtype)
    if kind == "conv":
        x = torch.randn(shape).to(dtype)
        return torch.no_grad()(lambda: module(x)), None
    x = torch.randn(shape).to(dtype).requires_grad_()

    def backward(y):
        x.grad = None
        module.zero_grad()
        y.backward(torch.ones_like(y))

    return lambda: module(x), backward


def main():
    torch.set_num_threads(int(sys.argv[1]))
    for line in sys.stdin:
        forward, backward = case(*line.split())
        start = time.perf_counter()
        y = forward()
        middle = time.perf_counter()
        if backward:
            backward(y)
        end = time.perf_counter()
        print((middle - start) * 1e3, (end - middle) * 1e3, flush=True)


if __name__ == "__main__":
    main()

"""PyTorch's GroupNorm in training, for the bench `norms`. Each line of the input is a case, such as "16×64×32×32 8 bf16"; the answer is
the milliseconds of one forward and of one backward pass.

    python3 scripts/compare/norms_pytorch.py THREADS
"""

import functools
import sys
import time

import torch


@functools.cache
def case(shape, groups, dtype):
    shape = [int(size) for size in shape.split("×")]
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    layer = torch.nn.GroupNorm(int(groups), shape[1], dtype=dtype)
    return layer, torch.randn(shape).to(dtype).requires_grad_()


def main():
    torch.set_num_threads(int(sys.argv[1]))
    for line in sys.stdin:
        layer, x = case(*line.split())
        start = time.perf_counter()
        y = layer(x)
        middle = time.perf_counter()
        y.backward(torch.ones_like(y))
        end = time.perf_counter()
        x.grad = None
        layer.zero_grad()
        print((middle - start) * 1e3, (end - middle) * 1e3, flush=True)


if __name__ == "__main__":
    main()

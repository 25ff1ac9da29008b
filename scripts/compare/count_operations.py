"""The operations of a training step of PyTorch, and how many of their results are new memory: what a step of ours asks of a GPU,
tests/gpu_layers/operations.rs counts.

    python3 scripts/compare/count_operations.py

Runs on the CPU, without DDP, with the operations of a GPU but for attention's. Views are no operations. Memory that an operation
uses only inside, such as cuDNN's workspaces, is not counted.
"""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from step_pytorch import MODELS

INPUTS = {"resnet50": torch.randn(2, 3, 64, 64), "gpt": torch.randint(256, (2, 256))}


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = self.allocations = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        memory = lambda values: {tensor.untyped_storage().data_ptr() for tensor in tensors(values)}
        self.operations += not operation.is_view
        self.allocations += len(memory(result) - memory([*args, *(kwargs or {}).values()]) - {0})
        return result


def tensors(value):
    """Returns the tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors(part)] if isinstance(value, (list, tuple)) else []


def main():
    for name, x in INPUTS.items():
        model = MODELS[name][0]()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            with Counter() as counter:
                output = model(x)
                output = output.flatten(0, -2)
                loss = F.cross_entropy(output, torch.zeros(len(output), dtype=torch.int64))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(f"{name}: {counter.operations} operations, {counter.allocations} allocations")


main()

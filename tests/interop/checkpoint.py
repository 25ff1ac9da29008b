"""Writes files with torch.save. The test reads the expected content from expected.json.

    python3 checkpoint.py FOLDER
"""

import argparse
import collections
import datetime
import json
import os
import pathlib
import sys

import numpy
import torch
from torch import nn

folder = pathlib.Path(sys.argv[1])
expected = {}


def write(name, content, tensors, **options):
    """`tensors`: the tensors that the test should read from the file, or words of the expected error."""
    torch.save(content, folder / name, **options)
    if isinstance(tensors, dict):
        tensors = {
            name: [str(value.dtype).split(".")[1], list(value.shape), value.detach().double().flatten().tolist()]
            for name, value in tensors.items()
        }
    expected[name] = tensors


torch.manual_seed(0)
base = torch.randn(4, 5, 6)
of_all_kinds = {
    "transposed": base.transpose(0, 2),
    "permuted": base.permute(1, 2, 0)[1:, ::2],
    "expanded": base[0, 0].expand(3, 6),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "f64": torch.randn(3).double(),
    "f16": torch.randn(3).half(),
    "bf16": torch.randn(3).bfloat16(),
    "u8": torch.arange(3, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "i16": torch.tensor([-300, 300], dtype=torch.int16),
    "i32": torch.tensor([-70000, 70000], dtype=torch.int32),
    "i64": torch.tensor([-(2**40), 2**40]),
    "u32": torch.tensor([7, 2**32 - 1], dtype=torch.uint32),
    "f8": torch.tensor([-0.5, 448.0]).to(torch.float8_e4m3fn),
    "parameter": nn.Parameter(torch.randn(2, 2)),
    "channels.last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
}
write("kinds.pt", of_all_kinds, of_all_kinds)

model = nn.Sequential(collections.OrderedDict(rnn=nn.LSTM(3, 4, num_layers=2), head=nn.Linear(4, 2), tied=nn.Linear(4, 2)))
model.tied.weight = model.head.weight
optimizer = torch.optim.Adam(model.parameters())
wrapped = nn.DataParallel(model).state_dict()
state = model.state_dict()
write("data_parallel.pth", wrapped, state)
run = {
    "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("a/b"), when=datetime.datetime(2026, 1, 2)),
    "best": numpy.float64(0.5),
    "rng": torch.get_rng_state(),
    "numpy_rng": numpy.random.get_state(),
    "seed": 2**31,
    "negative": -(2**40),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([1, 2]),
    "names": {"a", "b"},
    "bytes": b"\x00\xff",
    "counter": collections.Counter("abca"),
    "optimizer": optimizer.state_dict(),
    "scheduler": {"last_epoch": 3, "base_lrs": [0.1]},
}
for key in ["state_dict", "model_state_dict", "model", "module", "net"]:
    write(f"run_{key}.bin", run | {key: state}, state)
write("many.pt", {f"layer{i}.weight": torch.full((2,), float(i)) for i in range(3000)}, {"layer2999.weight": torch.full((2,), 2999.0)})
write("large.pt", {"w": torch.arange(300_000, dtype=torch.float32)[100_000:]}, {"w": torch.arange(100_000, 300_000, dtype=torch.float32)})
write("whole_model.pt", model, "state_dict()")
write("list.pt", [torch.zeros(1)], "a list")
write("one_tensor.pt", torch.zeros(1), "state_dict()")
write("nothing.pt", {"epoch": 3}, "it has no tensors at its top level")
write("complex.pt", {"w": torch.zeros(2, dtype=torch.complex64)}, "w: ")
write("sparse.pt", {"w": torch.eye(2).to_sparse()}, "w: ")
write("unsigned.pt", {"w": torch.zeros(2, dtype=torch.uint16)}, "w: ")
write("legacy.pt", state, "before 1.6", _use_new_zipfile_serialization=False)
(folder / "expected.json").write_text(json.dumps(expected))
# Skips the interpreter's shutdown, in which PyTorch sometimes aborts.
os._exit(0)

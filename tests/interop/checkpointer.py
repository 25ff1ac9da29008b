"""Loads the model of a checkpoint, prints its output before and after a change as JSON, and saves it in PyTorch's ways.

    python3 checkpointer.py FOLDER
"""

import collections
import json
import os
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from torch import nn

folder = pathlib.Path(sys.argv[1])
index = json.loads((folder / "checkpoint.json").read_text())
files = {part["name"]: [file["name"] for file in part["files"]] for part in index["parts"]}
assert index["step"] == 1 and files == {name: [f"{name}.safetensors"] for name in ["model", "optimizer"]}, index

layers = collections.OrderedDict(fc1=nn.Linear(4, 8), tanh=nn.Tanh(), fc2=nn.Linear(8, 2))
model = nn.Sequential(layers)
model.load_state_dict(load_file(folder / "model.safetensors"))  # strict: the same names and shapes
moment = load_file(folder / "optimizer.safetensors")["state.fc1.weight.exp_avg"]
assert moment.shape == (8, 4) and moment.abs().sum() > 0

x = (torch.arange(12.0) * 0.1 - 0.5).reshape(3, 4)
with torch.no_grad():
    before = model(x)
    for parameter in model.parameters():
        parameter.mul_(-0.5)
    after = model(x)
save_file(model.state_dict(), folder / "from_pytorch.safetensors")
torch.save(nn.DataParallel(model).state_dict(), folder / "from_pytorch.pt")
print(json.dumps([before.flatten().tolist(), after.flatten().tolist()]), flush=True)
# Skips the interpreter's shutdown, in which PyTorch sometimes aborts.
os._exit(0)

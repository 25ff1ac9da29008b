#!/usr/bin/env python3
"""Writes crates/candle-ddp-nn/tests/golden/layers.safetensors: outputs and gradients of torch.nn.functional.

    pip install torch safetensors
    python3 scripts/golden_layers.py

The README.md next to it describes the file.
"""

import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

OUTPUT = pathlib.Path(__file__).parent.parent / "crates" / "candle-ddp-nn" / "tests" / "golden" / "layers.safetensors"

tensors = {}


def numbers(kind, shape, index):
    """Input number `index` of a case, as the tests make it."""
    count = torch.Size(shape).numel()
    j = torch.arange(count, dtype=torch.float64)
    if kind == "line":
        values = (j - count // 2) / 10
    else:
        values = 2 * torch.sin(1.7 * j + index + 0.3)
        if kind == "ties":
            values = values.round()
    return values.reshape(shape)


def case(function, run, shapes, values="sine", dtype=torch.float64, **parameters):
    """Adds one case; `run` gets its inputs."""
    text = lambda value: ",".join(str(int(v)) for v in value) if isinstance(value, (tuple, list)) else str(value)
    parameters = {"shapes": "/".join(map(text, shapes)), "values": values} | parameters
    name = function + "|" + ";".join(f"{key}={text(value)}" for key, value in parameters.items())
    inputs = [numbers(values, shape, index).to(dtype).requires_grad_() for index, shape in enumerate(shapes)]
    y = run(*inputs)
    j = torch.arange(y.numel(), dtype=torch.float64)
    y.backward(torch.cos(0.9 * j + 0.1).reshape(y.shape).to(dtype))
    results = {"y": y.detach()} | {f"d{i}": x.grad for i, x in enumerate(inputs)}
    for key, value in results.items():
        assert f"{name}|{key}" not in tensors, name
        tensors[f"{name}|{key}"] = value.float().contiguous()


# Shapes, kernels, strides, paddings, ceil_mode.
POOLS = [
    ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0), False),
    ((2, 3, 7, 9), (2, 2), (2, 2), (0, 0), False),
    ((1, 2, 5, 6), (3, 3), (1, 1), (1, 1), False),
    ((2, 2, 8, 7), (3, 2), (2, 3), (1, 1), False),
    ((2, 1, 9, 10), (2, 2), (3, 3), (0, 0), False),
    ((1, 2, 8, 9), (4, 4), (2, 2), (2, 2), True),
    ((1, 2, 9, 11), (5, 3), (4, 4), (2, 1), True),
    ((3, 6, 5), (3, 3), (2, 2), (0, 1), True),
    ((2, 1, 5, 5), (5, 5), (5, 5), (0, 0), False),
]
for shape, kernel, stride, padding, ceil in POOLS:
    same = {"kernel": kernel, "stride": stride, "padding": padding, "ceil": int(ceil)}
    for values in ["sine", "ties"]:
        run = lambda x: F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil)
        case("max_pool2d", run, [shape], values, **same)
    for count in [True, False]:
        run = lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, count)
        case("avg_pool2d", run, [shape], **same, count=int(count))
for shape, size in [((2, 3, 7, 9), (1, 1)), ((1, 2, 7, 9), (3, 4)), ((1, 1, 5, 3), (7, 7)), ((2, 6, 6), (3, 2))]:
    case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, size), [shape], size=size)

for size in [(1, 1), (5, 7), (10, 14), (3, 4), (13, 11), (2, 21)]:
    x = [(2, 2, 5, 7)] if size[0] < 10 else [(1, 1, 5, 7)]
    # In float32, whose rounding decides which neighbour is the nearest.
    case("nearest", lambda x: F.interpolate(x, size, mode="nearest"), x, dtype=torch.float32, size=size)
    for align in [False, True]:
        run = lambda x: F.interpolate(x, size, mode="bilinear", align_corners=align)
        case("bilinear", run, x, size=size, align=int(align))

for shape, dim in [((1, 1), 1), ((3, 37), 1), ((2, 5, 70), 1), ((4, 3, 2), 0), ((7,), 0)]:
    case("softmax", lambda x: F.softmax(x, dim), [shape], dim=dim)
    case("log_softmax", lambda x: F.log_softmax(x, dim), [shape], dim=dim)

for shape in [(1, 1), (5, 17), (3, 4, 6), (2, 3, 5, 14)]:
    for ignore, smoothing, weighted, mean in [
        (-100, 0.0, 0, 1), (1, 0.0, 0, 1), (-100, 0.1, 0, 1), (-100, 0.0, 1, 1), (1, 0.3, 1, 1), (1, 0.3, 1, 0)
    ]:
        if shape == (1, 1) and ignore == 1:
            continue
        count = torch.Size(shape).numel() // shape[1]
        targets = (torch.arange(count) ** 2 % shape[1]).reshape(shape[:1] + shape[2:])
        weight = 0.5 + torch.arange(shape[1]).double() if weighted else None
        run = lambda x: F.cross_entropy(
            x, targets, weight, ignore_index=ignore, label_smoothing=smoothing, reduction="mean" if mean else "sum"
        )
        case("cross_entropy", run, [shape], ignore=ignore, smoothing=smoothing, weighted=weighted, mean=mean)

case("relu", F.relu, [(201,)], "line")
case("gelu", lambda x: F.gelu(x, approximate="tanh"), [(201,)], "line")
case("gelu_erf", F.gelu, [(201,)], "line")
case("silu", F.silu, [(201,)], "line")

case("embedding", lambda x: F.embedding((torch.arange(12) ** 2 % 7).reshape(3, 4), x), [(7, 5)])


def attention(q, k, v, mask, causal, scale):
    queries, keys = q.shape[2], k.shape[2]
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    masks = {"none": None, "bool": ((i * 5 + j * 3) % 4 != 0) & (i != 2), "float": torch.sin(1.0 * i + 2.0 * j).double()}
    return F.scaled_dot_product_attention(
        q, k, v, masks[mask], is_causal=bool(causal), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


for q, k, v, mask, causal, scale in [
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), "none", 0, None),
    ((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3), "none", 1, None),
    ((1, 2, 4, 3), (1, 2, 7, 3), (1, 2, 7, 5), "none", 1, 0.3),
    ((1, 2, 7, 3), (1, 2, 4, 3), (1, 2, 4, 3), "none", 1, None),
    ((1, 4, 6, 3), (1, 2, 5, 3), (1, 2, 5, 3), "none", 0, None),
    ((2, 2, 6, 3), (2, 2, 5, 3), (2, 2, 5, 3), "bool", 0, None),
    ((2, 2, 6, 3), (2, 2, 5, 3), (2, 2, 5, 3), "float", 0, None),
    ((1, 1, 70, 2), (1, 1, 260, 2), (1, 1, 260, 2), "none", 0, None),
    ((1, 1, 70, 2), (1, 1, 70, 2), (1, 1, 70, 2), "none", 1, None),
]:
    run = lambda q, k, v: attention(q, k, v, mask, causal, scale)
    case("attention", run, [q, k, v], mask=mask, causal=causal, scale=scale)


def documents(q, k, v, causal, cu_seq):
    """Each document by itself; `cu_seq` counts through all rows."""
    results = torch.zeros(q.shape[:3] + v.shape[3:], dtype=q.dtype)
    for start, end in zip(cu_seq, cu_seq[1:]):
        row, start, end = start // q.shape[2], start % q.shape[2], start % q.shape[2] + end - start
        if start < end:
            parts = [t[row : row + 1, :, start:end] for t in (q, k, v)]
            results[row : row + 1, :, start:end] = attention(*parts, "none", causal, None)
    return results


for q, k, v, causal, cu_seq in [
    ((1, 2, 11, 3), (1, 2, 11, 3), (1, 2, 11, 3), 0, (0, 1, 1, 8, 11)),
    ((1, 4, 11, 3), (1, 2, 11, 3), (1, 2, 11, 5), 1, (0, 5, 5, 6, 11, 11)),
    ((2, 2, 7, 3), (2, 1, 7, 3), (2, 1, 7, 3), 1, (0, 7, 9, 14)),
]:
    run = lambda q, k, v: documents(q, k, v, causal, cu_seq)
    case("attention", run, [q, k, v], mask="none", causal=causal, scale=None, cu_seq=cu_seq)

case("linear", F.linear, [(1, 1), (1, 1), (1,)])
case("linear", F.linear, [(3, 5, 7), (4, 7), (4,)])
case("linear", F.linear, [(6, 9), (11, 9)])

# Shapes of x, weight and bias, stride, padding, dilation, groups.
CONVOLUTIONS = [
    ((1, 1, 1, 1), (1, 1, 1, 1), (1,), 1, 0, 1, 1),
    ((2, 3, 7, 6), (4, 3, 3, 3), (4,), 1, 1, 1, 1),
    ((2, 3, 7, 8), (4, 3, 1, 1), None, 2, 0, 1, 1),
    ((2, 2, 9, 8), (3, 2, 3, 3), (3,), 2, 1, 1, 1),
    ((1, 2, 8, 9), (2, 2, 4, 2), None, 1, 2, 1, 1),
    ((2, 2, 11, 10), (2, 2, 2, 2), (2,), 3, 0, 1, 1),
    ((1, 3, 9, 9), (2, 3, 3, 3), None, 1, 2, 2, 1),
    ((2, 4, 6, 7), (6, 2, 3, 3), (6,), 1, 1, 1, 2),
    ((2, 5, 7, 6), (5, 1, 3, 3), (5,), 1, 1, 1, 5),
    ((1, 4, 9, 11), (4, 1, 3, 3), None, 2, 2, 2, 4),
    ((1, 3, 8, 8), (6, 1, 3, 3), (6,), 2, 1, 1, 3),
    ((1, 2, 40, 30), (2, 2, 3, 3), (2,), 1, 1, 1, 1),
]
for x, weight, bias, stride, padding, dilation, groups in CONVOLUTIONS:
    same = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    run = lambda *inputs: F.conv2d(*inputs, **same)
    case("conv2d", run, [x, weight] + ([bias] if bias else []), **same)
for x, weight, bias, stride, padding, dilation, groups in [
    ((1, 1, 1), (1, 1, 1), (1,), 1, 0, 1, 1),
    ((2, 3, 9), (4, 3, 3), (4,), 2, 1, 1, 1),
    ((2, 4, 12), (4, 1, 4), None, 1, 3, 2, 4),
]:
    same = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    run = lambda *inputs: F.conv1d(*inputs, **same)
    case("conv1d", run, [x, weight] + ([bias] if bias else []), **same)
for x, weight, bias, stride, padding, output_padding, dilation in [
    ((1, 1, 1, 1), (1, 1, 1, 1), (1,), 1, 0, 0, 1),
    ((2, 3, 4, 5), (3, 2, 3, 3), (2,), 2, 1, 1, 1),
    ((1, 2, 5, 4), (2, 3, 4, 4), None, 2, 1, 0, 1),
    ((2, 2, 3, 3), (2, 2, 2, 2), (2,), 3, 0, 2, 1),
    ((1, 2, 6, 5), (2, 2, 3, 3), None, 1, 2, 0, 2),
]:
    same = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    run = lambda *inputs: F.conv_transpose2d(*inputs, **same)
    case("conv_transpose2d", run, [x, weight] + ([bias] if bias else []), **same)
for x, weight, bias, stride, padding, output_padding, groups in [
    ((2, 3, 5), (3, 2, 3), (2,), 2, 1, 1, 1),
    ((2, 4, 6), (4, 1, 4), None, 3, 2, 0, 2),
]:
    same = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups}
    run = lambda *inputs: F.conv_transpose1d(*inputs, **same)
    case("conv_transpose1d", run, [x, weight] + ([bias] if bias else []), **same)

for shape in [(5, 1), (6, 20), (2, 3, 4), (3, 4, 6, 7), (2, 2, 2, 2, 3)]:
    for train in [1, 0]:
        affine = [(shape[1],), (shape[1],)]
        def normalise(x, weight, bias):
            mean, variance = torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()
            return F.batch_norm(x, mean, variance, weight, bias, bool(train), 0.1, 1e-3)
        case("batch_norm", normalise, [shape] + affine, train=train)
        case("batch_norm_relu", lambda *inputs: normalise(*inputs).relu(), [shape] + affine, train=train)
        run = lambda x, weight, bias, z: (normalise(x, weight, bias) + z).relu()
        case("batch_norm_add_relu", run, [shape] + affine + [shape], train=train)

# Steps, batch, input size, hidden size, layers, biases, both directions, batch_first, initial state, lengths.
RECURRENT = [
    (1, 1, 1, 1, 1, 1, 0, 0, 0, None),
    (4, 3, 2, 3, 1, 1, 0, 0, 1, None),
    (3, 2, 2, 3, 2, 0, 0, 1, 1, None),
    (3, 2, 3, 2, 2, 1, 1, 1, 1, None),
    (5, 4, 2, 2, 2, 1, 1, 0, 1, (3, 5, 1, 3)),
    (4, 3, 2, 3, 1, 1, 0, 1, 0, (4, 2, 1)),
    (4, 3, 2, 3, 1, 0, 1, 1, 1, (1, 3, 2)),
    (2, 12, 3, 17, 1, 1, 0, 0, 1, None),
]
for length, batch, size, hidden, layers, bias, both, batch_first, state, lengths in RECURRENT:
    for function, gates, states in [("lstm", 4, 2), ("gru", 3, 1)]:
        shapes = [(batch, length, size) if batch_first else (length, batch, size)]
        shapes += [(layers * (1 + both), batch, hidden)] * (states if state else 0)
        for layer in range(layers):
            for _ in range(1 + both):
                inputs = size if layer == 0 else (1 + both) * hidden
                shapes += [(gates * hidden, inputs), (gates * hidden, hidden)] + [(gates * hidden,)] * (2 * bias)

        def run(x, *rest):
            zeros = torch.zeros(layers * (1 + both), batch, hidden).double()
            given, weights = (rest[:states], rest[states:]) if state else ([zeros] * states, rest)
            hx = given if states > 1 else given[0]
            run, options = getattr(torch._VF, function), (bool(bias), layers, 0.0, True, bool(both))
            if lengths is None:
                return torch.cat([y.flatten() for y in run(x, hx, weights, *options, bool(batch_first))])
            packed = pack_padded_sequence(x, lengths, bool(batch_first), enforce_sorted=False)
            sort = lambda state: state.index_select(1, packed.sorted_indices)
            hx = tuple(map(sort, hx)) if states > 1 else sort(hx)
            y, *last = run(packed.data, packed.batch_sizes, hx, weights, *options)
            packed = PackedSequence(y, *packed[1:])
            y, _ = pad_packed_sequence(packed, bool(batch_first), total_length=length)
            last = [state.index_select(1, packed.unsorted_indices) for state in last]
            return torch.cat([y.flatten() for y in [y, *last]])

        case(function, run, shapes, size=size, hidden=hidden, layers=layers, bias=bias, both=both, batch_first=batch_first,
             state=state, lengths=lengths)
# Shapes, and numbers of groups.
for shape, groups in [
    ((3, 8), 2), ((2, 6), 1), ((2, 6, 5), 3), ((3, 4, 1), 1), ((2, 6, 3, 5), 2), ((2, 5, 4, 4), 5), ((1, 8, 7, 9), 1),
    ((2, 4, 2, 3, 3), 2), ((1, 2, 9, 11), 1),
]:
    affine = [(shape[1],), (shape[1],)]
    case("group_norm", lambda x, weight, bias: F.group_norm(x, groups, weight, bias, 1e-3), [shape] + affine, groups=groups)
for shape in [(3, 2, 7), (2, 3, 5, 4), (2, 2, 2, 2, 3)]:
    for affine in [[], [(shape[1],), (shape[1],)]]:
        case("instance_norm", lambda x, *affine: F.instance_norm(x, None, None, *affine, eps=1e-3), [shape] + affine)


def ctc_loss(x, inputs, targets, concatenated, blank, reduction, zero):
    """The labels of a sample have repetitions, since the blank is between equal ones."""
    labels = torch.arange(x.shape[-1])
    labels = labels[labels != blank]
    samples = [labels[(torch.arange(length) ** 2 + sample) % len(labels)] for sample, length in enumerate(targets)]
    # The padding is no class.
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)
    labels = torch.cat(samples) if concatenated else padded
    return F.ctc_loss(x, labels, inputs, targets, blank, reduction, bool(zero))


# Shape, lengths of inputs and targets, blank, reduction, zero_infinity. With it, one sample's input is too short for its target.
for shape, inputs, targets, blank, reduction, zero in [
    ((1, 1, 2), (1,), (1,), 0, "mean", 0),
    ((6, 3, 4), (6, 5, 3), (3, 0, 1), 0, "mean", 0),
    ((6, 3, 4), (6, 5, 3), (3, 2, 0), 3, "sum", 0),
    ((7, 2, 5), (7, 6), (4, 2), 2, "none", 0),
    ((5, 3, 4), (5, 3, 0), (2, 3, 0), 1, "mean", 1),
    ((12, 2, 3), (12, 9), (5, 4), 0, "none", 0),
]:
    for concatenated in [0, 1]:
        same = dict(inputs=inputs, targets=targets, concatenated=concatenated, blank=blank, reduction=reduction, zero=zero)
        case("ctc_loss", lambda x: ctc_loss(F.log_softmax(x, -1), **same), [shape], **same)
    # Its gradient is not that of the function itself, but what log_softmax passes on as it is.
    case("ctc_loss of log_probs", lambda x: ctc_loss(x, **same), [shape], "ties", **same)
case("ctc_loss", lambda x: F.ctc_loss(F.log_softmax(x, -1), torch.tensor([1, 2]), torch.tensor(5), torch.tensor(2)), [(5, 3)],
     inputs=(5,), targets=(2,), concatenated=1, blank=0, reduction="mean", zero=0)

save_file(tensors, OUTPUT)
print(f"{OUTPUT}: {len(tensors)} tensors, {OUTPUT.stat().st_size} bytes")

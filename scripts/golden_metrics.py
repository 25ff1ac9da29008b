#!/usr/bin/env python3
"""Writes tests/golden/metrics.safetensors: results of torchmetrics.

    pip install torch torchmetrics safetensors
    python3 scripts/golden_metrics.py

The inputs: 21 samples of 5 classes, of which class 3 is never a target and class 4 never there at all; a segmentation of 3 images of
4 x 6 pixels, in which 255 is ignored; 21 scores of two classes, some of them equal; 3 x 7 tokens of a vocabulary of 11, in which 0
is ignored; and 21 probabilities of 5 classes, some of them equal, of which class 4 is never a target. Each result is float64, in the order
micro, macro, weighted where it has three.
"""

import pathlib

import torch
import torchmetrics.classification as tm
from safetensors.torch import save_file
from torchmetrics.text import Perplexity

OUTPUT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "metrics.safetensors"
AVERAGES = ["micro", "macro", "weighted"]
KINDS = {
    "accuracy": tm.MulticlassAccuracy,
    "precision": tm.MulticlassPrecision,
    "recall": tm.MulticlassRecall,
    "f1": tm.MulticlassF1Score,
    "iou": tm.MulticlassJaccardIndex,
}


def of_confusion(name, logits, targets, classes, **options):
    found = {f"{name}.logits": logits, f"{name}.targets": targets}
    matrix = tm.MulticlassConfusionMatrix(classes, **options)(logits, targets)
    found[f"{name}.matrix"] = matrix.to(torch.int64)
    for kind, metric in KINDS.items():
        values = [metric(classes, average=average, **options)(logits.double(), targets) for average in AVERAGES]
        found[f"{name}.{kind}"] = torch.stack(values).double()
    return found


def main():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(21, 5, generator=generator)
    logits[:, 4] = -10.0
    targets = torch.randint(0, 3, (21,), generator=generator)
    found = of_confusion("samples", logits, targets, 5)
    pixels = torch.randint(0, 4, (3, 4, 6), generator=generator)
    pixels[torch.rand(3, 4, 6, generator=generator) < 0.2] = 255
    found |= of_confusion("pixels", torch.randn(3, 4, 4, 6, generator=generator), pixels, 4, ignore_index=255)
    top = [tm.MulticlassAccuracy(5, top_k=k, average="micro")(logits, targets) for k in (1, 2, 3)]
    found["samples.top"] = torch.stack(top).double()
    scores = (torch.rand(21, generator=generator) * 10).round() / 10
    classes = torch.randint(0, 2, (21,), generator=generator)
    found |= {"binary.scores": scores, "binary.targets": classes}
    found["binary.auroc"] = tm.BinaryAUROC(thresholds=None)(scores.double(), classes).double().reshape(1)
    tokens = torch.randint(0, 11, (3, 7), generator=generator)
    words = torch.randn(3, 7, 11, generator=generator)
    found |= {"tokens.logits": words, "tokens.targets": tokens}
    found["tokens.perplexity"] = torch.stack([Perplexity()(words, tokens), Perplexity(ignore_index=0)(words, tokens)]).double()
    probabilities = (torch.randn(21, 5, generator=generator).softmax(1) * 20).round() / 20
    classes = torch.randint(0, 4, (21,), generator=generator)
    found |= {"multiclass.scores": probabilities, "multiclass.targets": classes}
    # The area of class 4, which has no curve, would be 0 here, and a part of the macro average.
    areas = [tm.MulticlassAUROC(4, average=average)(probabilities[:, :4].double(), classes) for average in ("none", "macro", "weighted")]
    found["multiclass.auroc"] = torch.cat([area.double().reshape(-1) for area in areas])
    save_file({name: value.contiguous() for name, value in found.items()}, OUTPUT)
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()

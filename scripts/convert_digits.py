#!/usr/bin/env python3
"""Writes examples/data/digits.safetensors from scikit-learn's handwritten digits.

    pip install scikit-learn safetensors
    python3 scripts/convert_digits.py

`images` is u8[1797, 64], rows of 8 pixels from 0 to 16; `labels` is u8[1797], from 0 to 9. The order is scikit-learn's.
"""

import pathlib

import numpy
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

OUTPUT = pathlib.Path(__file__).parent.parent / "examples" / "data" / "digits.safetensors"


def main():
    digits = load_digits()
    images = digits.data.astype(numpy.uint8)
    labels = digits.target.astype(numpy.uint8)
    assert (images == digits.data).all() and images.shape == (1797, 64) and images.max() == 16
    assert (labels == digits.target).all() and labels.shape == (1797,)
    save_file({"images": images, "labels": labels}, OUTPUT)
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()

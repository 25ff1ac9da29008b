#!/usr/bin/env python3
"""Writes tests/golden/vision: small images of many kinds, and the results of Pillow and torchvision for them.

    pip install torch torchvision pillow numpy safetensors
    python3 scripts/golden_vision.py

tests/golden/README.md describes the files.
"""

import json
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import save_file
from torchvision import datasets, transforms
from torchvision.transforms import InterpolationMode, v2

OUTPUT = Path(__file__).parent.parent / "tests" / "golden" / "vision"
FOLDER, ADE20K = OUTPUT / "folder", OUTPUT / "ADEChallengeData2016"
NEAREST = InterpolationMode.NEAREST
results = {}


class Generator:
    """`candle_ddp::seed::Generator`, for single numbers."""

    def __init__(self, seed):
        self.seed, self.offset = seed, 0

    def next_u64(self):
        """The first half of a block of Philox 4x32-10."""
        low = 0xFFFFFFFF
        counter, key = [self.offset & low, self.offset >> 32, 0, 0], [self.seed & low, self.seed >> 32]
        self.offset += 1
        for _ in range(10):
            a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = [(b >> 32) ^ counter[1] ^ key[0], b & low, (a >> 32) ^ counter[3] ^ key[1], a & low]
            key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
        return counter[0] | counter[1] << 32

    def uniform(self, low, high):
        return low + (self.next_u64() >> 11) * 2.0**-53 * (high - low)

    def below(self, bound):
        return self.next_u64() * bound >> 64


generator = Generator(0)


def randperm(count):
    order = list(range(count))
    for i in range(count - 1):
        other = i + generator.below(count - i)
        order[i], order[other] = order[other], order[i]
    return torch.tensor(order)


# torchvision draws its numbers here; they come from our generator instead.
torch.Tensor.uniform_ = lambda self, low=0, high=1: self.fill_(generator.uniform(float(low), float(high)))
torch.rand = lambda *size: torch.empty(*size).uniform_(0, 1)
torch.randint = lambda low, high, size: torch.full(size, low + generator.below(high - low))
torch.randperm = randperm


def picture(height, width):
    """Smooth colours with a few sharp edges."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([127 + 120 * np.sin(x / (5 + c) + y / (9 - 2 * c) + c) for c in range(3)], axis=-1)
    pixels[(x - width // 3) ** 2 + (y - height // 2) ** 2 < 30] = [250, 20, 60]
    pixels[(x > width * 2 // 3) & (y > height // 2)] //= 2
    return pixels.clip(0, 255).astype(np.uint8)


def write_png(path, pixels, bits, color, palette=None):
    """Pillow cannot write all kinds. `pixels` has the numbers of each row; color is PNG's number of the kind."""
    chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)
    if bits == 16:
        packed = [row.astype(">u2").tobytes() for row in rows]
    else:
        packed = [np.packbits(np.unpackbits(row.astype(np.uint8)[:, None], axis=1)[:, 8 - bits :]).tobytes() for row in rows]
    data = zlib.compress(b"".join(b"\0" + row for row in packed), 9)
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = [chunk(b"IHDR", header)]
    if palette is not None:
        chunks.append(chunk(b"PLTE", palette.astype(np.uint8).tobytes()))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join([*chunks, chunk(b"IDAT", data), chunk(b"IEND", b"")]))


def write_folder():
    image = Image.fromarray(picture(21, 27))
    # Sorted byte by byte: capitals first, and a folder `x-y` before the files of `x`.
    bee, ant, wasp = FOLDER / "Bee", FOLDER / "ant", FOLDER / "wasp"
    for folder in [bee, ant / "x", ant / "x-y", wasp]:
        folder.mkdir(parents=True)
    image.save(bee / "420.jpg", quality=90, subsampling=2)
    image.save(bee / "422.jpeg", quality=90, subsampling=1)
    image.save(bee / "444.JPG", quality=90, subsampling=0)
    image.save(bee / "progressive.jpg", quality=90, progressive=True)
    image.save(bee / "restart.jpg", quality=75, restart_marker_rows=1)
    image.save(ant / "rgb.jpg", quality=90, keep_rgb=True)
    image.convert("L").save(ant / "x" / "grey.jpg", quality=90)
    cmyk = np.concatenate([255 - picture(21, 27), picture(21, 27)[..., 1:2] // 3], axis=-1)
    Image.fromarray(cmyk, "CMYK").save(ant / "x" / "cmyk.jpg", quality=95)
    # The kind follows from the contents of the file.
    image.save(ant / "x-y" / "a_png.jpg", format="PNG")
    (ant / "x-y" / "notes.txt").write_text("not an image\n")
    image.save(wasp / "rgb.png")
    image.convert("RGBA").save(wasp / "rgba.png")
    image.convert("L").save(wasp / "grey.png")
    image.convert("LA").save(wasp / "grey_alpha.png")
    image.quantize(23).save(wasp / "palette.png")
    image.quantize(23).save(wasp / "palette_transparent.png", transparency=3)
    image.convert("1").save(wasp / "grey_1.png")
    wide = picture(21, 27).astype(np.uint16) * 257 - 3
    write_png(wasp / "grey_2.png", picture(21, 27)[..., 0] >> 6, 2, 0)
    write_png(wasp / "grey_4.png", picture(21, 27)[..., 0] >> 4, 4, 0)
    write_png(wasp / "grey_16.png", wide[:9, :, 0] // 200, 16, 0)
    write_png(wasp / "rgb_16.png", wide[:9], 16, 2)
    write_png(wasp / "rgba_16.png", wide[:9][..., [0, 1, 2, 1]], 16, 6)
    write_png(wasp / "palette_4.png", picture(21, 27)[..., 2] >> 4, 4, 3, picture(4, 4).reshape(16, 3))


def read_folder():
    folder = datasets.ImageFolder(FOLDER)
    samples = [[str(Path(path).relative_to(FOLDER)), label] for path, label in folder.samples]
    listing = {"class_to_idx": folder.class_to_idx, "samples": samples}
    (OUTPUT / "folder.json").write_text(json.dumps(listing, indent=1) + "\n")
    for index, (path, _) in enumerate(samples):
        results[f"decode|{path}"] = np.asarray(folder[index][0])


def write_ade20k():
    for split, name in [("training", "ADE_train"), ("validation", "ADE_val")]:
        for kind in ["images", "annotations"]:
            (ADE20K / kind / split).mkdir(parents=True)
        for number in range(1, 3 if split == "training" else 2):
            pixels = picture(20 + number, 27)
            labels = (pixels[..., 0] // 2).clip(0, 150)
            labels[:4], labels[4:6] = 0, 150
            name_of = f"{name}_{number:08}"
            Image.fromarray(pixels).save(ADE20K / "images" / split / f"{name_of}.jpg", quality=90)
            Image.fromarray(labels).save(ADE20K / "annotations" / split / f"{name_of}.png")
            results[f"ade20k|{split}|{number}"] = labels


def transform_all():
    image, mask = picture(28, 34), (picture(28, 34)[..., 1] // 20).astype(np.uint8)
    Image.fromarray(image).save(OUTPUT / "image.png")
    Image.fromarray(mask).save(OUTPUT / "mask.png")
    pairs = {"image": Image.fromarray(image), "mask": Image.fromarray(mask)}

    def case(name, make, seeds=(0,)):
        """`make` gets keyword arguments for the interpolation, and the colour to fill with."""
        for seed in seeds:
            for kind, source in pairs.items():
                global generator
                generator = Generator(seed)
                how = {"interpolation": NEAREST} if kind == "mask" else {}
                results[f"{name}|{seed}|{kind}"] = np.asarray(make(how, (9, 8, 7) if kind == "image" else 77)(source))

    case("resize_exact", lambda how, _: transforms.Resize((21, 30), **how))
    case("resize_larger", lambda how, _: transforms.Resize((37, 45), **how))
    case("resize_one_side", lambda how, _: transforms.Resize((28, 20), **how))
    case("resize_shorter", lambda how, _: transforms.Resize(25, **how))
    case("random_resize", lambda how, _: v2.RandomResize(12, 40, **how), range(3))
    case("random_resized_crop", lambda how, _: transforms.RandomResizedCrop((20, 16), **how), range(8))
    # No part has these proportions, so that the middle is taken.
    case("random_resized_crop_middle", lambda how, _: transforms.RandomResizedCrop(16, (1, 1), (3, 4), **how))
    case("random_resized_crop_tall", lambda how, _: transforms.RandomResizedCrop(16, (1, 1), (0.2, 0.3), **how))
    case("center_crop", lambda _, __: transforms.CenterCrop((17, 22)))
    case("center_crop_padded", lambda _, __: transforms.CenterCrop((31, 21)))
    case("random_crop", lambda _, __: transforms.RandomCrop((20, 24)), range(2))
    case("random_crop_padded", lambda _, fill: transforms.RandomCrop((28, 34), padding=4, fill=fill), range(3))
    case("random_crop_needed", lambda _, fill: transforms.RandomCrop((32, 20), pad_if_needed=True, fill=fill), range(3))
    case("flip", lambda _, __: transforms.RandomHorizontalFlip(), range(4))
    pipeline = lambda how, fill: transforms.Compose([
        v2.RandomResize(16, 40, **how), transforms.RandomCrop(24, pad_if_needed=True, fill=fill),
        transforms.RandomHorizontalFlip(),
    ])
    case("pipeline", pipeline, range(3))

    # All kinds of colours. Masks have none.
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 256, (16, 32, 3), dtype=np.uint8)
    colors[:2] = colors[:2, :, :1]
    Image.fromarray(colors).save(OUTPUT / "colors.png")
    pairs = {"image": Image.fromarray(colors)}
    case("brightness", lambda _, __: transforms.ColorJitter(brightness=0.6), range(2))
    case("contrast", lambda _, __: transforms.ColorJitter(contrast=0.6), range(2))
    case("saturation", lambda _, __: transforms.ColorJitter(saturation=1.5), range(2))
    case("hue", lambda _, __: transforms.ColorJitter(hue=0.5), range(4))
    case("color_jitter", lambda _, __: transforms.ColorJitter(0.4, 0.4, 0.4, 0.1), range(4))

    steps = np.arange(256, dtype=np.uint8).reshape(16, 16)
    steps = Image.fromarray(np.stack([steps, 255 - steps, steps.T], axis=-1))
    to_tensor = transforms.ToTensor()
    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    results["to_tensor"] = to_tensor(steps).numpy()
    results["normalize"] = normalize(to_tensor(steps)).numpy()


if __name__ == "__main__":
    shutil.rmtree(OUTPUT, ignore_errors=True)
    write_folder()
    read_folder()
    write_ade20k()
    transform_all()
    save_file({name: np.ascontiguousarray(value) for name, value in results.items()}, OUTPUT / "vision.safetensors")

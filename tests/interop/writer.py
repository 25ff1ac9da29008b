"""Reads a folder of event files with TensorBoard's own reader, and prints what it finds as JSON.

    writer.py FOLDER HISTOGRAM

HISTOGRAM has the values of the histogram as JSON; PyTorch's writer makes the one to compare with.
"""

import json
import sys
import tempfile

import numpy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import make_histogram

folder, values = sys.argv[1], numpy.array(json.loads(sys.argv[2]))
events = EventAccumulator(folder, size_guidance={"scalars": 0, "images": 0, "histograms": 0})
events.Reload()
tags = events.Tags()
found = {
    "version": events.file_version,
    "scalars": {tag: [[event.step, repr(event.value)] for event in events.Scalars(tag)] for tag in tags["scalars"]},
    "images": {},
    "histograms": {},
}
for tag in tags["images"]:
    event = events.Images(tag)[-1]
    found["images"][tag] = [event.step, event.width, event.height, list(event.encoded_image_string[:8])]
with tempfile.TemporaryDirectory() as other:
    bins = SummaryWriter(other).default_bins
for tag in tags["histograms"]:
    event = events.Histograms(tag)[-1]
    expected = make_histogram(values, bins)
    fields = ["min", "max", "num", "sum", "sum_squares", "bucket_limit", "bucket"]
    pairs = [(getattr(event.histogram_value, name), getattr(expected, name)) for name in fields]
    same = all(numpy.shape(ours) == numpy.shape(theirs) and numpy.allclose(ours, theirs, rtol=1e-12, atol=0) for ours, theirs in pairs)
    found["histograms"][tag] = [event.step, same]
print(json.dumps(found))

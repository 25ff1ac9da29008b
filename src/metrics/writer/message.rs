//! TensorBoard's protobuf messages: the fields of `Event` and `Summary` that the writer needs, from `tensorflow/core/util/event.proto`
//! and `tensorflow/core/framework/summary.proto`.
use super::histogram::Histogram;

/// The first event of a file says which version of the format it has.
pub(super) fn file_version(wall_time: f64) -> Vec<u8> {
    event(wall_time, 0, 3, b"brain.Event:2")
}

/// A run begins: TensorBoard hides what earlier files of the folder have from `step` on.
pub(super) fn session_start(wall_time: f64, step: u64) -> Vec<u8> {
    const START: u64 = 1;
    let mut log = Vec::new();
    integer(&mut log, 1, START);
    event(wall_time, step, 7, &log)
}

/// Values of one step.
pub(super) fn summary(wall_time: f64, step: u64, values: &[(&str, Value<'_>)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, value) in values {
        let mut message = Vec::new();
        bytes(&mut message, 1, tag.as_bytes());
        value.encode(&mut message);
        bytes(&mut summary, 1, &message);
    }
    event(wall_time, step, 5, &summary)
}

/// The value of a tag at a step.
pub(super) enum Value<'a> {
    Scalar(f32),
    #[cfg_attr(not(feature = "vision"), allow(dead_code))]
    Image {
        height: u64,
        width: u64,
        channels: u64,
        png: &'a [u8],
    },
    Histogram(&'a Histogram),
}

impl Value<'_> {
    fn encode(&self, message: &mut Vec<u8>) {
        match self {
            Self::Scalar(value) => {
                key(message, 2, FIXED_32);
                message.extend(value.to_le_bytes());
            }
            Self::Image { height, width, channels, png } => {
                let mut image = Vec::with_capacity(png.len() + 32);
                integer(&mut image, 1, *height);
                integer(&mut image, 2, *width);
                integer(&mut image, 3, *channels);
                bytes(&mut image, 4, png);
                bytes(message, 4, &image);
            }
            Self::Histogram(Histogram { min, max, num, sum, sum_squares, limits, counts }) => {
                let mut histogram = Vec::new();
                for (field, value) in (1..).zip([min, max, num, sum, sum_squares]) {
                    double(&mut histogram, field, *value);
                }
                for (field, values) in [(6, limits), (7, counts)] {
                    let packed: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                    bytes(&mut histogram, field, &packed);
                }
                bytes(message, 5, &histogram);
            }
        }
    }
}

fn event(wall_time: f64, step: u64, field: u64, content: &[u8]) -> Vec<u8> {
    let mut event = Vec::with_capacity(content.len() + 32);
    double(&mut event, 1, wall_time);
    integer(&mut event, 2, step);
    bytes(&mut event, field, content);
    event
}

// How a field is encoded.
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED_32: u64 = 5;

fn key(to: &mut Vec<u8>, field: u64, encoding: u64) {
    varint(to, field << 3 | encoding);
}

fn varint(to: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn integer(to: &mut Vec<u8>, field: u64, value: u64) {
    key(to, field, VARINT);
    varint(to, value);
}

fn double(to: &mut Vec<u8>, field: u64, value: f64) {
    key(to, field, FIXED_64);
    to.extend(value.to_le_bytes());
}

fn bytes(to: &mut Vec<u8>, field: u64, value: &[u8]) {
    key(to, field, LENGTH);
    varint(to, value.len() as u64);
    to.extend(value);
}

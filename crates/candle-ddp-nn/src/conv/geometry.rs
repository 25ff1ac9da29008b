//! The extents of a convolution.
use std::ops::Range;

/// A convolution over images: from `n` images of `ci` channels to images of `co` channels. Pairs are height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) n: usize,
    pub(super) ci: usize,
    pub(super) co: usize,
    pub(super) groups: usize,
    pub(super) input: [usize; 2],
    pub(super) output: [usize; 2],
    pub(super) kernel: [usize; 2],
    pub(super) stride: [usize; 2],
    pub(super) padding: [usize; 2],
    pub(super) dilation: [usize; 2],
}

impl Geometry {
    /// The pixels of an input image.
    pub(super) fn input_pixels(&self) -> usize {
        self.input[0] * self.input[1]
    }

    /// The pixels of an output image.
    pub(super) fn output_pixels(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Input channels of a group.
    pub(super) fn group_inputs(&self) -> usize {
        self.ci / self.groups
    }

    /// Output channels of a group.
    pub(super) fn group_outputs(&self) -> usize {
        self.co / self.groups
    }

    /// Weights of one output channel.
    pub(super) fn taps(&self) -> usize {
        self.group_inputs() * self.kernel[0] * self.kernel[1]
    }

    /// Whether there is nothing to multiply, so that the result is the bias alone.
    pub(super) fn is_empty(&self) -> bool {
        self.n * self.ci * self.co * self.taps() * self.input_pixels() * self.output_pixels() == 0
    }

    /// Whether each channel is convolved only with its own kernel.
    pub(super) fn is_depthwise(&self) -> bool {
        self.groups == self.ci && self.groups == self.co
    }

    /// Whether each output pixel sees the input's pixel at its place alone, in all channels.
    pub(super) fn is_pointwise(&self) -> bool {
        let Self { groups, kernel, stride, padding, .. } = *self;
        (groups, kernel, stride, padding) == (1, [1, 1], [1, 1], [0, 0])
    }

    /// Whether each output row is as wide as one of the input, and sees through each tap what lies at one distance from its own place.
    pub(super) fn keeps_size(&self) -> bool {
        self.stride == [1, 1] && self.input == self.output
    }

    /// Along an axis: which output positions see the input through tap `tap` of the kernel, instead of padding.
    pub(super) fn valid(&self, axis: usize, tap: usize) -> Range<usize> {
        let (stride, padding) = (self.stride[axis], self.padding[axis]);
        let shift = tap * self.dilation[axis];
        let first = padding.saturating_sub(shift).div_ceil(stride);
        let end = (self.input[axis] + padding).saturating_sub(shift).div_ceil(stride).min(self.output[axis]);
        first.min(end)..end
    }

    /// Along an axis: the input position that output position `at` sees through tap `tap`, which is valid for it.
    pub(super) fn seen(&self, axis: usize, at: usize, tap: usize) -> usize {
        at * self.stride[axis] + tap * self.dilation[axis] - self.padding[axis]
    }
}

/// The number of positions of a kernel in `input` elements; None if it does not fit at all.
pub(super) fn positions(input: usize, kernel: usize, stride: usize, padding: usize, dilation: usize) -> Option<usize> {
    let span = dilation.checked_mul(kernel.checked_sub(1)?)?.checked_add(1)?;
    let free = padding.checked_mul(2)?.checked_add(input)?.checked_sub(span)?;
    Some(free.checked_div(stride)? + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_positions_are_those_that_see_the_input() {
        for (input, kernel, stride, padding, dilation) in [
            (7, 3, 1, 1, 1),
            (7, 3, 2, 1, 1),
            (8, 4, 3, 2, 1),
            (5, 2, 3, 0, 2),
            (9, 3, 1, 4, 4),
            (1, 1, 1, 0, 1),
            (2, 3, 2, 3, 1),
        ] {
            let output = positions(input, kernel, stride, padding, dilation).unwrap();
            let geometry = Geometry {
                n: 1,
                ci: 1,
                co: 1,
                groups: 1,
                input: [input; 2],
                output: [output; 2],
                kernel: [kernel; 2],
                stride: [stride; 2],
                padding: [padding; 2],
                dilation: [dilation; 2],
            };
            for tap in 0..kernel {
                let sees = |at: usize| (at * stride + tap * dilation).checked_sub(padding).filter(|seen| *seen < input);
                let valid = geometry.valid(0, tap);
                for at in 0..output {
                    assert_eq!(valid.contains(&at), sees(at).is_some(), "{geometry:?}, tap {tap}, position {at}");
                    if let Some(seen) = sees(at) {
                        assert_eq!(geometry.seen(0, at, tap), seen);
                    }
                }
            }
        }
    }

    #[test]
    fn kernels_that_do_not_fit_have_no_positions() {
        assert_eq!(positions(3, 3, 1, 0, 1), Some(1));
        assert_eq!(positions(2, 3, 1, 0, 1), None);
        assert_eq!(positions(4, 3, 1, 0, 2), None);
        assert_eq!(positions(4, 0, 1, 0, 1), None);
        assert_eq!(positions(4, 1, 0, 0, 1), None);
        assert_eq!(positions(4, 1, 1, usize::MAX, 1), None);
    }
}

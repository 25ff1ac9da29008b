// A batch (samples, channels, spatial), of planes (channels.cu) or single pixels (pixels.cu).

struct Batch {
    unsigned long long samples, channels, spatial, parts, length;
    unsigned long long vector;  // elements that a thread takes at once: those of a `Few`, or 1
    unsigned long long vectors; // of which a plane may have elements; of single pixels: those side by side in a block
    // From a thread's vector to its next one. For sums: planes of the channel, and vectors; for maps: channels, and elements.
    unsigned long long step_planes, step_columns;
};
#define BATCH (*reinterpret_cast<const Batch *>(by.numbers))

// The first element of a channel. Distances from one of the numbers themselves can be added up and squared even where these are
// large and close to each other.
template <typename T> __device__ inline double first_of(const Batch &b, const T *x, unsigned long long channel) {
    return Element<T>::load(x[channel * b.spatial]);
}

// What a ReLU leaves of a gradient.
template <typename Real> __device__ inline Real gated(Real value, Real gradient) { return value > 0 ? gradient : 0; }

// Of `count` elements from `first` on, those that a ReLU has let through, a bit for each. `mask` has a byte for every `per` elements:
// `count` or 1, or any number if `count` is 1.
template <typename Index>
__device__ inline unsigned passed(const unsigned char *mask, unsigned per, unsigned count, Index first) {
    if (per == count) return mask[first / count];
    if (count == 1) return mask[first / per] >> first % per & 1;
    unsigned bits = 0;
    for (unsigned k = 0; k < count; k++) bits |= (unsigned)mask[first + k] << k;
    return bits;
}

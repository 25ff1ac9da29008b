// Lookups of vectors in a table. For the table's gradient, the lookups are sorted by their indices, without changing the order of
// those with the same index, and the gradients of each index are added in that order.

// A table of `rows` vectors of `size` elements, of which `count` are looked up.
struct Lookup {
    unsigned long long count, rows, size;
    unsigned long long shift;  // the digit by which a pass sorts begins at this bit
    unsigned long long blocks; // of a pass
    unsigned long long each;   // lookups of a thread of a pass
    unsigned long long vector; // elements of a thread: a whole vector, or one
};
#define LOOKUP (*reinterpret_cast<const Lookup *>(by.numbers))

// tensors: the table, indices (i64), y. An index outside the table gives NaN.
template <typename T> __device__ inline void lookup(const Arguments &by) {
    typedef Neighbours<T, Few<T>::most> Vector;
    const Lookup &l = LOOKUP;
    unsigned long long rest = thread_in_grid();
    const unsigned long long column = take(rest, l.size / l.vector) * l.vector;
    if (rest >= l.count) return;
    const long long row = TENSOR(const long long, 1)[rest];
    const bool is_there = row >= 0 && row < (long long)l.rows;
    const T *from = TENSOR(const T, 0) + row * l.size + column;
    T *to = TENSOR(T, 2) + rest * l.size + column;
    const T nan = Element<T>::store(__uint_as_float(0x7fc00000u));
    if (l.vector == 1) {
        *to = is_there ? *from : nan;
        return;
    }
    Vector vector;
    if (is_there) {
        vector = *reinterpret_cast<const Vector *>(from);
    } else {
        for (int k = 0; k < Few<T>::most; k++) vector.at[k] = nan;
    }
    *reinterpret_cast<Vector *>(to) = vector;
}
LAYER(lookup)

// A pass sorts by a digit, and keeps the order of equal ones. A block sorts a chunk, of which each warp has neighbouring lookups.
#define BITS 8u
#define DIGITS (1u << BITS)
static_assert(DIGITS == THREADS, "each thread of a block has a digit");
#define WARPS (THREADS / WARP)

// A lookup: its row in the table, or the number of rows if it has none, and its position.
struct Item { unsigned row, position; };

// A number for each warp of the block and each digit.
typedef unsigned Counts[WARPS][DIGITS];

// Calls `body` for each lookup of this thread with the number of its digit, which counts the lookups of the warp.
template <typename Body> __device__ inline void for_each_item(const Arguments &by, Counts &counts, Body body) {
    const Lookup &l = LOOKUP;
    const long long *indices = TENSOR(const long long, 0);
    const Item *items = TENSOR(const Item, 1);
    const unsigned lane = threadIdx.x % WARP;
    unsigned long long slot = (blockIdx.x * (unsigned long long)THREADS + threadIdx.x - lane) * l.each + lane;
    for (unsigned long long i = 0; i < l.each; i++, slot += WARP) {
        const bool is_there = slot < l.count;
        Item item = {};
        if (is_there && items) {
            item = items[slot];
        } else if (is_there) {
            const long long row = indices[slot];
            item = {(unsigned)(row >= 0 && row < (long long)l.rows ? row : l.rows), (unsigned)slot};
        }
        const unsigned digit = item.row >> l.shift & (DIGITS - 1);
        // The lanes with the same digit.
        unsigned equal = __ballot_sync(0xffffffffu, is_there);
        _Pragma("unroll") for (unsigned bit = 0; bit < BITS; bit++) {
            const bool is_set = digit >> bit & 1;
            const unsigned set = __ballot_sync(0xffffffffu, is_set);
            equal &= is_set ? set : ~set;
        }
        unsigned &count = counts[threadIdx.x / WARP][digit];
        const unsigned before = count, lower = __popc(equal & ((1u << lane) - 1));
        __syncwarp();
        if (is_there && lower == 0) count = before + __popc(equal);
        __syncwarp();
        if (is_there) body(item, before + lower);
    }
}

__device__ inline void count_digits(const Arguments &by, Counts &counts) {
    _Pragma("unroll") for (unsigned warp = 0; warp < WARPS; warp++) counts[warp][threadIdx.x] = 0;
    __syncthreads();
    for_each_item(by, counts, [](Item, unsigned) {});
    __syncthreads();
}

// tensors: indices, items or null in the first pass, and a count (u32) for each block and digit.
template <typename T> __device__ inline void lookup_count(const Arguments &by) {
    __shared__ Counts counts;
    count_digits(by, counts);
    unsigned sum = 0;
    _Pragma("unroll") for (unsigned warp = 0; warp < WARPS; warp++) sum += counts[warp][threadIdx.x];
    TENSOR(unsigned, 2)[blockIdx.x * DIGITS + threadIdx.x] = sum;
}
LAYER(lookup_count)

// tensors: as above, and the items in the new order.
template <typename T> __device__ inline void lookup_move(const Arguments &by) {
    __shared__ Counts counts; // then the places of the next lookups
    __shared__ unsigned sums[DIGITS];
    const unsigned digit = threadIdx.x;
    const unsigned *of_blocks = TENSOR(const unsigned, 2) + digit;
    count_digits(by, counts);
    // Of this digit: in all blocks, and in those before this one.
    unsigned all = 0, place = 0;
    _Pragma("unroll 8") for (unsigned block = 0; block < LOOKUP.blocks; block++) {
        const unsigned count = of_blocks[block * DIGITS];
        all += count;
        if (block < blockIdx.x) place += count;
    }
    place -= all;
    sums[digit] = all;
    __syncthreads();
    for (unsigned distance = 1; distance < DIGITS; distance *= 2) {
        const unsigned before = digit >= distance ? sums[digit - distance] : 0;
        __syncthreads();
        sums[digit] += before;
        __syncthreads();
    }
    place += sums[digit];
    _Pragma("unroll") for (unsigned warp = 0; warp < WARPS; warp++) {
        const unsigned count = counts[warp][digit];
        counts[warp][digit] = place;
        place += count;
    }
    __syncthreads();
    for_each_item(by, counts, [&](Item item, unsigned place) { TENSOR(Item, 3)[place] = item; });
}
LAYER(lookup_move)

// Sorted lookups are added in tiles, so that a row that is looked up very often does not keep a single thread busy.
#define TILE 32ull
// How many loads of a thread are in flight.
#define AT_ONCE 4

// A tile and columns of a thread.
struct Place { unsigned long long tiles, tile, column; };

__device__ inline Place place_of(const Lookup &l) {
    unsigned long long tile = thread_in_grid();
    const unsigned long long column = take(tile, l.size / l.vector) * l.vector;
    const Place place = {(l.count + TILE - 1) / TILE, tile, column};
    return place;
}

template <typename T, bool is_vector> __device__ inline void lookup_sums_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Lookup &l = LOOKUP;
    const Item *items = TENSOR(const Item, 0);
    const Place place = place_of(l);
    if (place.tile >= place.tiles) return;
    const T *dy = TENSOR(const T, 1) + place.column;
    Real *earlier = TENSOR(Real, 3) + place.tile * l.size + place.column, *later = earlier + place.tiles * l.size;
    const unsigned long long start = place.tile * TILE, to = min(start + TILE, l.count);
    unsigned row = items[start].row;
    bool began = start == 0 || items[start - 1].row != row;
    Few<T> sum = {};
    for (unsigned long long from = start; from < to; from += AT_ONCE) {
        Item of[AT_ONCE + 1];
        Few<T> few[AT_ONCE];
        _Pragma("unroll") for (unsigned n = 0; n <= AT_ONCE; n++) of[n] = items[min(from + n, l.count - 1)];
        _Pragma("unroll") for (unsigned n = 0; n < AT_ONCE; n++) few[n].load(dy + of[n].position * l.size, is_vector);
        _Pragma("unroll") for (unsigned n = 0; n < AT_ONCE; n++) {
            const unsigned long long next = from + n + 1;
            if (next > to) break;
            FOR_EACH_OF(T, is_vector, k) sum.at[k] += few[n].at[k];
            const bool goes_on = next < l.count && of[n + 1].row == row;
            if (goes_on && next < to) continue;
            if (!began) sum.store(earlier, is_vector);
            else if (goes_on) sum.store(later, is_vector);
            else if (row < l.rows) sum.store(TENSOR(T, 2) + row * l.size + place.column, is_vector);
            row = of[n + 1].row;
            began = true;
            FOR_EACH_OF(T, is_vector, k) sum.at[k] = 0;
        }
    }
}

// tensors: the sorted items, dy, the gradient of the table, which is zero before, and for each tile and column the sum of the
// gradients that belong to a row of an earlier tile, and then likewise of those whose row goes on in the next tile, in the dtype of
// the arithmetic.
template <typename T> __device__ inline void lookup_sums(const Arguments &by) {
    if (LOOKUP.vector > 1) lookup_sums_of<T, true>(by);
    else lookup_sums_of<T, false>(by);
}
LAYER(lookup_sums)

template <typename T, bool is_vector> __device__ inline void lookup_totals_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Lookup &l = LOOKUP;
    const Item *items = TENSOR(const Item, 0);
    const Place place = place_of(l);
    if (place.tile + 1 >= place.tiles) return;
    const unsigned long long from = place.tile * TILE;
    const unsigned row = items[from + TILE - 1].row;
    if (row >= l.rows || items[from + TILE].row != row || (from > 0 && items[from - 1].row == row)) return;
    const Real *earlier = TENSOR(const Real, 3) + place.column, *later = earlier + place.tiles * l.size;
    Few<T> sum;
    sum.load(later + place.tile * l.size, is_vector);
    bool goes_on = true;
    for (unsigned long long tile = place.tile + 1; goes_on; tile += AT_ONCE) {
        Few<T> few[AT_ONCE];
        unsigned rows[AT_ONCE];
        _Pragma("unroll") for (unsigned n = 0; n < AT_ONCE; n++) {
            const unsigned long long at = min(tile + n, place.tiles - 1);
            rows[n] = items[at * TILE].row;
            few[n].load(earlier + at * l.size, is_vector);
        }
        _Pragma("unroll") for (unsigned n = 0; n < AT_ONCE; n++) {
            goes_on = goes_on && tile + n < place.tiles && rows[n] == row;
            if (goes_on) FOR_EACH_OF(T, is_vector, k) sum.at[k] += few[n].at[k];
        }
    }
    sum.store(TENSOR(T, 2) + row * l.size + place.column, is_vector);
}

// tensors: as above. Adds the sums of the rows that more than one tile has. Of the threads, those work in whose tile such a row begins.
template <typename T> __device__ inline void lookup_totals(const Arguments &by) {
    if (LOOKUP.vector > 1) lookup_totals_of<T, true>(by);
    else lookup_totals_of<T, false>(by);
}
LAYER(lookup_totals)

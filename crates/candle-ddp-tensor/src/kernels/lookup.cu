// Lookups of vectors in a table. For the table's gradient, the lookups are sorted by their indices, without changing the order of
// those with the same index, and the gradients of each index are added in that order.

// A table of `rows` vectors of `size` elements, of which `count` are looked up.
struct Lookup {
    unsigned long long count, rows, size;
    unsigned long long shift;  // the digit by which a pass sorts begins at this bit
    unsigned long long blocks; // of a pass
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

// A pass sorts by a digit, and keeps the order of equal ones. A block sorts a chunk, of which each thread has neighbouring lookups.
#define DIGITS 16u
#define EACH (CHUNK / THREADS)

// A lookup: its row in the table, or the number of rows if it has none, and its position.
struct Item { unsigned row, position; };

__device__ inline Item item_at(const Lookup &l, const long long *indices, const Item *items, unsigned long long slot) {
    if (items) return items[slot];
    const long long row = indices[slot];
    const Item item = {(unsigned)(row >= 0 && row < (long long)l.rows ? row : l.rows), (unsigned)slot};
    return item;
}

__device__ inline unsigned digit_of(const Lookup &l, Item item) { return item.row >> l.shift & (DIGITS - 1); }

// How often each thread of the block has each digit. Rows are longer than they need be, so that neighbouring ones begin in
// different banks of the memory.
typedef unsigned short Counts[DIGITS][THREADS + 2];

__device__ inline void count_digits(const Lookup &l, const long long *indices, const Item *items, Counts &counts) {
    for (unsigned digit = 0; digit < DIGITS; digit++) counts[digit][threadIdx.x] = 0;
    const unsigned long long from = blockIdx.x * CHUNK + threadIdx.x * EACH, to = min(from + EACH, l.count);
    for (unsigned long long slot = from; slot < to; slot++)
        counts[digit_of(l, item_at(l, indices, items, slot))][threadIdx.x]++;
    __syncthreads();
}

// tensors: indices, items or null in the first pass, and a count (u32) for each digit and block.
template <typename T> __device__ inline void lookup_count(const Arguments &by) {
    __shared__ Counts counts;
    const Lookup &l = LOOKUP;
    count_digits(l, TENSOR(const long long, 0), TENSOR(const Item, 1), counts);
    const unsigned digit = threadIdx.x;
    if (digit >= DIGITS) return;
    unsigned sum = 0;
    for (unsigned thread = 0; thread < THREADS; thread++) sum += counts[digit][thread];
    TENSOR(unsigned, 2)[digit * l.blocks + blockIdx.x] = sum;
}
LAYER(lookup_count)

// tensors: two that are not used, and the counts, each of which becomes the sum of those before it. One block.
template <typename T> __device__ inline void lookup_scan(const Arguments &by) {
    __shared__ unsigned sums[THREADS];
    unsigned *counts = TENSOR(unsigned, 2);
    const unsigned long long all = DIGITS * LOOKUP.blocks, each = (all + THREADS - 1) / THREADS;
    const unsigned long long from = min(threadIdx.x * each, all), to = min(from + each, all);
    unsigned own = 0;
    for (unsigned long long i = from; i < to; i++) own += counts[i];
    sums[threadIdx.x] = own;
    __syncthreads();
    for (unsigned distance = 1; distance < THREADS; distance *= 2) {
        const unsigned before = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    unsigned sum = sums[threadIdx.x] - own;
    for (unsigned long long i = from; i < to; i++) {
        const unsigned count = counts[i];
        counts[i] = sum;
        sum += count;
    }
}
LAYER(lookup_scan)

// tensors: indices, items or null in the first pass, the sums of the counts, and the items in the new order.
template <typename T> __device__ inline void lookup_move(const Arguments &by) {
    __shared__ Counts counts;
    const Lookup &l = LOOKUP;
    const long long *indices = TENSOR(const long long, 0);
    const Item *items = TENSOR(const Item, 1);
    count_digits(l, indices, items, counts);
    if (threadIdx.x < DIGITS) {
        unsigned sum = 0;
        for (unsigned thread = 0; thread < THREADS; thread++) {
            const unsigned count = counts[threadIdx.x][thread];
            counts[threadIdx.x][thread] = sum;
            sum += count;
        }
    }
    __syncthreads();
    const unsigned long long from = blockIdx.x * CHUNK + threadIdx.x * EACH, to = min(from + EACH, l.count);
    for (unsigned long long slot = from; slot < to; slot++) {
        const Item item = item_at(l, indices, items, slot);
        const unsigned digit = digit_of(l, item);
        TENSOR(Item, 3)[TENSOR(const unsigned, 2)[digit * l.blocks + blockIdx.x] + counts[digit][threadIdx.x]++] = item;
    }
}
LAYER(lookup_move)

// Sorted lookups are added in tiles, so that a row that is looked up very often does not keep a single thread busy.
#define TILE 64ull

// A tile and columns of a thread.
struct Place { unsigned long long tiles, tile, column; };

__device__ inline Place place_of(const Lookup &l) {
    unsigned long long tile = thread_in_grid();
    const unsigned long long column = take(tile, l.size / l.vector) * l.vector;
    const Place place = {(l.count + TILE - 1) / TILE, tile, column};
    return place;
}

// tensors: the sorted items, dy, the gradient of the table, which is zero before, and for each tile and column the sum of the
// gradients that belong to a row of an earlier tile, and then likewise of those whose row goes on in the next tile, in the dtype of
// the arithmetic.
template <typename T> __device__ inline void lookup_sums(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Lookup &l = LOOKUP;
    const bool is_vector = l.vector > 1;
    const Item *items = TENSOR(const Item, 0);
    const Place place = place_of(l);
    if (place.tile >= place.tiles) return;
    Real *earlier = TENSOR(Real, 3) + place.tile * l.size + place.column, *later = earlier + place.tiles * l.size;
    const unsigned long long from = place.tile * TILE, to = min(from + TILE, l.count);
    unsigned row = items[from].row;
    bool began = from == 0 || items[from - 1].row != row;
    Few<T> few, sum = {};
    for (unsigned long long slot = from; slot < to; slot++) {
        few.load(TENSOR(const T, 1) + items[slot].position * l.size + place.column, is_vector);
        FOR_EACH_OF(T, is_vector, k) sum.at[k] += few.at[k];
        const bool goes_on = slot + 1 < l.count && items[slot + 1].row == row;
        if (goes_on && slot + 1 < to) continue;
        if (!began) sum.store(earlier, is_vector);
        else if (goes_on) sum.store(later, is_vector);
        else if (row < l.rows) sum.store(TENSOR(T, 2) + row * l.size + place.column, is_vector);
        if (slot + 1 < to) row = items[slot + 1].row;
        began = true;
        FOR_EACH_OF(T, is_vector, k) sum.at[k] = 0;
    }
}
LAYER(lookup_sums)

// tensors: as above. Adds the sums of the rows that more than one tile has. Of the threads, those work in whose tile such a row begins.
template <typename T> __device__ inline void lookup_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Lookup &l = LOOKUP;
    const bool is_vector = l.vector > 1;
    const Item *items = TENSOR(const Item, 0);
    const Place place = place_of(l);
    if (place.tile + 1 >= place.tiles) return;
    const unsigned long long from = place.tile * TILE;
    unsigned long long next = from + TILE;
    const unsigned row = items[next - 1].row;
    if (row >= l.rows || items[next].row != row || (from > 0 && items[from - 1].row == row)) return;
    const Real *earlier = TENSOR(const Real, 3) + place.tile * l.size + place.column;
    Few<T> few, sum;
    sum.load(earlier + place.tiles * l.size, is_vector);
    for (; next < l.count && items[next].row == row && items[next - 1].row == row; next += TILE) {
        earlier += l.size;
        few.load(earlier, is_vector);
        FOR_EACH_OF(T, is_vector, k) sum.at[k] += few.at[k];
    }
    sum.store(TENSOR(T, 2) + row * l.size + place.column, is_vector);
}
LAYER(lookup_totals)

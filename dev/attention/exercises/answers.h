// The exercises of dev/attention/README.md: what is to be written is marked TODO. `make exercises` tells whether it is right, and if it
// is not, what is wrong. As they stand, the functions compile and are wrong.
//
// They are plain C for one thread. The tests call them on the host and from kernels, hence __host__ __device__.
// solutions.h beside this file has them solved.
#ifndef ANSWERS_H
#define ANSWERS_H

#include "gpt/cuda.cuh"

// ----------------------------------------------------------------------------
// 1. Merge two partial results of a softmax

// What one query knows after it has seen some of the keys. With p = exp(score - max) for each of these keys and its values v:
enum { WIDTH = 4 };
struct Part {
    float max;       // the largest score, -inf if it has seen no key yet
    float sum;       // the sum of p, 0 if no key
    float o[WIDTH];  // the sums of p v, 0 if no key; not yet divided by sum
};

// The result for the keys of a and those of b together; they have none in common. Scores can be anything up to ±200, so exp(score)
// alone may be more than a float can hold. Either part, or both, may have seen no key.
static inline __host__ __device__ Part merge(Part a, Part b) {
    (void)b;   // TODO
    return a;
}

// ----------------------------------------------------------------------------
// 2. Store a tile so that no access waits for another

// A tile has 64 rows of 128 bytes in shared memory, each eight chunks of 16 bytes. This is at which position (0 .. 7) of its row a chunk
// (0 .. 7) is stored. Shared memory has 32 banks of 4 bytes: the position says which four of them a chunk lies in, the same in every row.
//
//   - A row must keep all its chunks: each at a position of its own.
//   - ldmatrix reads the same chunk of eight rows, 8 i to 8 i + 7, at a time. Two at the same position take turns.
//   - Eight neighbouring threads write the eight chunks of one row at a time, by cp.async. The same holds for them.
static inline __host__ __device__ int swizzle(int row, int chunk) {
    (void)row;  // TODO
    return chunk;
}

// ----------------------------------------------------------------------------
// 3. Attend to a window of keys

// In sliding-window attention query t sees only the last W keys up to its own: max(0, t - W + 1) .. t. A thread block has the queries
// first_row .. first_row + rows - 1, as far as they exist: those from T on do not. It walks over tiles of keys, tile i being
// the keys i * keys .. i * keys + keys - 1, of which those from T on do not exist either. W may be larger than T.

struct KeyTiles { int first, end; };

// The tiles first .. end - 1 that the block has to walk over: all of which one of its queries sees a key, and no others.
static inline __host__ __device__ KeyTiles window(int first_row, int rows, int keys, int T, int W) {
    (void)first_row, (void)rows, (void)W;  // TODO
    return {0, (T + keys - 1) / keys};
}

// Does this tile need a mask? Not if all of the block's queries see all of its keys.
static inline __host__ __device__ bool needs_mask(int tile, int first_row, int rows, int keys, int T, int W) {
    (void)tile, (void)first_row, (void)rows, (void)keys, (void)T, (void)W;  // TODO
    return true;
}

#endif

// The exercises of dev/attention/README.md. The functions compile and are wrong: write what is marked TODO. `make exercises` tells
// whether it is right, and if not, what is wrong. solutions.h beside this file has them solved.
//
// All is plain C for one thread. The tests call it on the host and in kernels, hence __host__ __device__.
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
    (void)b;  // TODO
    return a;
}

// ----------------------------------------------------------------------------
// 2. Store a tile so that no access waits for another

// A tile has 64 rows of 128 bytes in shared memory, each of eight chunks of 16 bytes. At which position (0 .. 7) of its row
// is chunk 0 .. 7 of row 0 .. 63 to be stored? Shared memory has 32 banks of 4 bytes, as many as a row is long: the position
// alone says which four of them a chunk lies in. Of eight accesses at a time, those to the same banks take turns.
//
//   - A row must keep all its chunks, each at a position of its own.
//   - ldmatrix reads one chunk of eight rows, 8 i to 8 i + 7, at a time: always the same chunk, at eight positions if possible.
//   - Eight neighbouring threads write the eight chunks of one row at a time, by cp.async.
static inline __host__ __device__ int swizzle(int row, int chunk) {
    (void)row;  // TODO
    return chunk;
}

// ----------------------------------------------------------------------------
// 3. Attend to a window of keys

// In sliding-window attention query t sees only the last W keys up to its own: max(0, t - W + 1) .. t. A thread block has the
// queries first_row .. first_row + rows - 1, and walks over tiles of keys: tile i is the keys i * keys .. i * keys + keys - 1.
// Queries and keys from T on do not exist, so the last block and the last tile may be shorter. W may be larger than T.

struct KeyTiles { int first, end; };

// The tiles that the block has to walk over, first .. end - 1: those of which some query sees some key, and no others.
static inline __host__ __device__ KeyTiles window(int first_row, int rows, int keys, int T, int W) {
    (void)first_row, (void)rows, (void)W;  // TODO
    return {0, (T + keys - 1) / keys};
}

// Does this tile of them need a mask? Not if every query of the block sees all of its keys.
static inline __host__ __device__ bool needs_mask(int tile, int first_row, int rows, int keys, int T, int W) {
    (void)tile, (void)first_row, (void)rows, (void)keys, (void)T, (void)W;  // TODO
    return true;
}

#endif

// SPOILER: the exercises solved. Try answers.h first; its comments say what is asked for, those here say why it is done so.
#ifndef SOLUTIONS_H
#define SOLUTIONS_H

#include "gpt/cuda.cuh"

// ----------------------------------------------------------------------------
// 1. Merge two partial results of a softmax

enum { WIDTH = 4 };
struct Part {
    float max;       // the largest score, -inf if no key
    float sum;       // of p = exp(score - max)
    float o[WIDTH];  // of p v
};

// exp(score - a.max) exp(a.max - max) = exp(score - max): one factor moves all that a part has summed to the common maximum.
// It is never above 1, so nothing overflows, and it is exactly 1 for the part that has the maximum. A part without keys gets
// exp(-inf) = 0. The online softmax is this with one tile as b. v1 does it between blocks of keys, and so does any kernel
// that gives the keys of one query to several thread blocks.
static inline __host__ __device__ Part merge(Part a, Part b) {
    Part both;
    both.max = fmaxf(a.max, b.max);
    if (both.max == -INFINITY) return a;  // no key at all: -inf - -inf would be NaN
    const float scale_a = expf(a.max - both.max), scale_b = expf(b.max - both.max);
    both.sum = scale_a * a.sum + scale_b * b.sum;
    for (int i = 0; i < WIDTH; i++) both.o[i] = scale_a * a.o[i] + scale_b * b.o[i];
    return both;
}

// ----------------------------------------------------------------------------
// 2. Store a tile so that no access waits for another

// chunk ^ a, for a fixed a in 0 .. 7, takes each value 0 .. 7 once: that keeps the chunks of a row apart. So does c ^ row % 8
// for a fixed c and eight rows: that spreads a chunk of theirs over all banks. (chunk + row) % 8 is as right. By xor, though,
// the address of one chunk is that of another xor a constant, one instruction, and the engine that copies whole tiles on
// sm_90 swizzles by xor, too.
static inline __host__ __device__ int swizzle(int row, int chunk) {
    return chunk ^ row % 8;
}

// ----------------------------------------------------------------------------
// 3. Attend to a window of keys

struct KeyTiles { int first, end; };

// The first query sees furthest back, the last one furthest ahead, and any key between is seen by some query. The last query is the
// last that exists, or the tiles of the last block would go beyond T.
static inline __host__ __device__ KeyTiles window(int first_row, int rows, int keys, int T, int W) {
    const int last_row = min(first_row + rows, T) - 1, first_key = max(0, first_row - W + 1);
    return {first_key / keys, last_row / keys + 1};
}

// What all queries see is the other way round: as far ahead as the first, as far back as the last. Keys from T on lie beyond the
// first query in any case.
static inline __host__ __device__ bool needs_mask(int tile, int first_row, int rows, int keys, int T, int W) {
    const int last_row = min(first_row + rows, T) - 1, first_key = tile * keys, last_key = first_key + keys - 1;
    return last_key > first_row || first_key < last_row - W + 1;
}

#endif

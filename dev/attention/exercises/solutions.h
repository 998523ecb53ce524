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

// exp(score - a.max) exp(a.max - max) = exp(score - max): one factor moves all that a part has summed to the common maximum. It is never
// above 1, so nothing overflows, and for the part that has the maximum it is exactly 1. A part without keys gets exp(-inf) = 0.
// The online softmax is this with a single tile as b. v1 does it between blocks of keys, and so do kernels which split the keys
// of one query over thread blocks.
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

// Exclusive or with a fixed number is a permutation of 0 .. 7, and undoes itself: that keeps the chunks of a row apart. As it also is
// one in its other argument, the same chunk of eight rows, for which row % 8 takes all values, lies at eight positions.
// (chunk + row) % 8 does as well, but by xor the address of a later chunk is the first one's xor a constant, which costs one
// instruction; and the hardware that copies whole tiles, on later GPUs, swizzles by xor, too.
static inline __host__ __device__ int swizzle(int row, int chunk) {
    return chunk ^ row % 8;
}

// ----------------------------------------------------------------------------
// 3. Attend to a window of keys

struct KeyTiles { int first, end; };

// The first query reaches furthest back, the last one furthest ahead, and all between is seen by somebody. max before the division,
// which rounds towards zero: -3 / 4 is 0, but -5 / 4 is -1.
static inline __host__ __device__ KeyTiles window(int first_row, int rows, int keys, int T, int W) {
    const int last_row = min(first_row + rows, T) - 1, first_key = max(0, first_row - W + 1);
    return {first_key / keys, last_row / keys + 1};
}

// For what all see it is the other way round: the first query sees least ahead, the last one least far back. Keys from T on lie
// beyond the first query in any case. With W = T this is the mask of plain causal attention.
static inline __host__ __device__ bool needs_mask(int tile, int first_row, int rows, int keys, int T, int W) {
    const int last_row = min(first_row + rows, T) - 1, first_key = tile * keys, last_key = first_key + keys - 1;
    return last_key > first_row || first_key < last_row - W + 1;
}

#endif

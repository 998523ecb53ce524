// Counter-based random numbers: every draw is a pure function of (seed, purpose, step, index).
//
// There is no generator state, so nothing has to be saved with a checkpoint, threads need no generators of their
// own, and a resumed run draws what the uninterrupted one would have drawn. The function is Philox4x32-10 from
// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); tests/test_host.c holds their test vectors.
#ifndef GPT_RANDOM_H
#define GPT_RANDOM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

// What a draw is for. Two purposes never share a number.
enum { RANDOM_INIT = 1, RANDOM_OFFSET = 2, RANDOM_SHUFFLE = 3, RANDOM_SAMPLE = 4, RANDOM_ROUND = 5 };

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__  // kernels draw, too
#else
#define HOST_DEVICE
#endif

typedef struct { uint32_t word[4]; } Random4;

HOST_DEVICE static inline Random4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c0, product1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t high0 = (uint32_t)(product0 >> 32), high1 = (uint32_t)(product1 >> 32);
        c0 = high1 ^ c1 ^ key0;
        c1 = (uint32_t)product1;
        c2 = high0 ^ c3 ^ key1;
        c3 = (uint32_t)product0;
        key0 += 0x9E3779B9u;  // Weyl steps: the golden ratio and sqrt(3) - 1, as the paper has them
        key1 += 0xBB67AE85u;
    }
    Random4 result = {{c0, c1, c2, c3}};
    return result;
}

// Four independent 32-bit words.
HOST_DEVICE static inline Random4 random4(uint64_t seed, uint32_t purpose, uint32_t step, uint64_t index) {
    return philox4x32((uint32_t)index, (uint32_t)(index >> 32), step, purpose, (uint32_t)seed, (uint32_t)(seed >> 32));
}

// Uniform in the open interval (0, 1): 23 random bits, centred, so that neither 0 nor 1 comes out.
static inline float random_to_uniform(uint32_t word) { return ((float)(word >> 9) + 0.5f) * (1.0f / 8388608.0f); }

// Uniform in [0, n). The bias is below n / 2^64.
static inline uint64_t random_below(Random4 r, uint64_t n) {
    uint64_t x = (uint64_t)r.word[0] << 32 | r.word[1];
    return (uint64_t)(((unsigned __int128)x * n) >> 64);
}

// out[i] = std * N(0, 1) for i in [0, count), by Box and Muller's transform: two uniforms make two normals.
static inline void random_normal(float *out, size_t count, float std, uint64_t seed, uint32_t purpose, uint32_t step) {
#pragma omp parallel for
    for (size_t i = 0; i < count; i += 4) {
        Random4 r = random4(seed, purpose, step, i / 4);
        for (size_t j = 0; j < 4 && i + j < count; j++) {
            float radius = sqrtf(-2.0f * logf(random_to_uniform(r.word[j & 2])));
            float angle = 6.28318530718f * random_to_uniform(r.word[(j & 2) + 1]);
            out[i + j] = std * radius * (j & 1 ? sinf(angle) : cosf(angle));
        }
    }
}

// Where `i` goes in a shuffle of [0, n): a bijection that needs no table. A Feistel network permutes the smallest
// even number of bits that holds n; results outside [0, n) are sent through again until they land inside ("cycle
// walking", Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
static inline uint64_t random_permute(uint64_t i, uint64_t n, uint64_t seed, uint32_t step) {
    int half = 1;
    while (half < 32 && ((uint64_t)1 << (2 * half)) < n) half++;
    uint32_t mask = (uint32_t)(((uint64_t)1 << half) - 1);
    do {
        uint32_t left = (uint32_t)(i >> half) & mask, right = (uint32_t)i & mask;
        for (uint32_t round = 0; round < 6; round++) {
            uint32_t next = left ^ (random4(seed, RANDOM_SHUFFLE, step, (uint64_t)round << 32 | right).word[0] & mask);
            left = right;
            right = next;
        }
        i = (uint64_t)left << half | right;
    } while (i >= n);
    return i;
}

#endif

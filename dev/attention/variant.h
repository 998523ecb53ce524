// What an attention variant is: two functions on device memory, and what the harness (main.cu) needs to know of them.
//
// A variant is one file beside this one that ends with VARIANT(name, "idea"), or with PARTIAL_VARIANT(name, "idea") if it is made
// for some GPUs or head sizes only; the Makefile finds it there.
#ifndef VARIANT_H
#define VARIANT_H

#include "gpt/cuda.cuh"

// Causal: a query sees the keys up to its own position. Full: all of them.
struct Shape { int B, T, NH, HS; bool causal; };

// All pointers are to device memory, at multiples of 16 bytes, all tensors contiguous, all functions asynchronous on `stream`.
struct Variant {
    const char *name, *idea;

    // Can it compute this shape on the current device? If not, false after fail("what is supported").
    bool (*supports)(Shape s);

    // Bytes that forward and backward use beyond inputs and outputs; what forward leaves there, backward finds there.
    size_t (*workspace_bytes)(Shape s);

    // out (B, T, NH, HS) = softmax(Q Kᵀ / sqrt(HS)) V for each batch element and head, and the natural logarithm of each
    // softmax's denominator, lse (B, NH, T), from qkv (B, T, 3, NH, HS), where Q, K and V are at 0, 1 and 2.
    void (*forward)(bf16 *out, float *lse, const bf16 *qkv, void *workspace, Shape s, cudaStream_t stream);

    // dqkv (B, T, 3, NH, HS) from dout (B, T, NH, HS) and what forward read and wrote.
    void (*backward)(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *workspace, Shape s,
                     cudaStream_t stream);

    bool partial = false;  // it may refuse any shape; others have to support head sizes 32, 64 and 128, on every GPU
};

// For the variants whose kernels are templates on the head size and the mask: evaluates `call` with HS and CAUSAL as constants.
#define FOR_HEAD_SIZE(s, call)                                                                     \
    do {                                                                                           \
        if ((s).HS == 32) FOR_MASK(s, 32, call);                                                   \
        else if ((s).HS == 64) FOR_MASK(s, 64, call);                                              \
        else FOR_MASK(s, 128, call);                                                               \
    } while (0)
#define FOR_MASK(s, size, call)                                                                    \
    do {                                                                                           \
        constexpr int HS = size;                                                                   \
        if ((s).causal) { constexpr bool CAUSAL = true; call; }                                    \
        else { constexpr bool CAUSAL = false; call; }                                              \
    } while (0)

// Can such a variant, whose blocks need shared_bytes of shared memory, compute the shape on this device?
static inline bool has_tiles(const char *name, Shape s, int shared_bytes) {
    int device, limit;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (s.HS != 32 && s.HS != 64 && s.HS != 128)
        return fail("%s has no kernels for head size %d; it has them for 32, 64 and 128, and naive takes any", name, s.HS);
    if (shared_bytes > limit)
        return fail("%s needs %d KiB of shared memory a block for head size %d, and this GPU has %d; naive needs %d", name,
                    (shared_bytes + 1023) / 1024, s.HS, limit / 1024, 48);
    return true;
}

enum { MAX_VARIANTS = 16 };
extern Variant variants[MAX_VARIANTS];  // in the order of their files' names, but for the trainer, which the Makefile puts last
extern int variant_count;

#define NAME_OF(name) #name
#define VARIANT(name, idea) ADD_VARIANT(name, idea, false)
#define PARTIAL_VARIANT(name, idea) ADD_VARIANT(name, idea, true)
#define ADD_VARIANT(name, idea, partial)                                                                            \
    __attribute__((constructor)) static void add_variant(void) {                                                    \
        variants[variant_count++] = {NAME_OF(name), idea, supports, workspace_bytes, attention_forward,             \
                                     attention_backward, partial};                                                  \
    }

#endif

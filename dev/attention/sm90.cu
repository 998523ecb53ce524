// sm90: attention_sm90.cuh, for tests and measurements beside the others: the kernels for Hopper GPUs that attention.cuh is to use
// there, once they have been measured. sm90_one_pass.cu has the causal backward in one pass, and sm90_late.cu that with delays.

#include "attention.cuh"
#include "attention_sm90.cuh"
#include "variant.h"

#ifndef VARIANT_NAME
#define VARIANT_NAME sm90
#define ONE_PASS 0
#endif

// The workspace: counters of the lists of items; statistics of rows; the sums of dQ, and how many blocks have added to them.
static const size_t CLAIMS = 64;
static size_t padded_rows(Shape s) { return (size_t)s.B * s.NH * attention_padded(s.T); }
static size_t stats_bytes(Shape s) { return padded_rows(s) * 2 * sizeof(float); }
static size_t sums_bytes(Shape s) { return padded_rows(s) * s.HS * sizeof(float); }
static size_t workspace_bytes(Shape s) {
    return CLAIMS + stats_bytes(s) + (ONE_PASS ? sums_bytes(s) + padded_rows(s) / 64 * 2 * sizeof(int) : 0);
}

static bool supports(Shape s) {
    int device, major;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (s.HS != 64 && s.HS != 128) return fail("sm90 has no kernels for head size %d; it has them for 64 and 128", s.HS);
    if (major != 9) return fail("sm90 needs a GPU of compute capability 9.0, and this one has %d.x", major);
    return has_tiles("sm90", s, sizeof(Sm90OnePass<64>::Shared)) && attention_supports(s.HS);  // the largest
}

static void attention_forward(bf16 *out, float *lse, const bf16 *qkv, void *workspace, Shape s, cudaStream_t stream) {
    auto forward = s.HS == 64 ? attention_sm90_forward_of<64> : attention_sm90_forward_of<128>;
    forward(out, lse, qkv, (unsigned *)workspace, s.B, s.T, s.NH, s.causal, stream);
}

template <int HS>
static void backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *workspace, Shape s,
                     cudaStream_t stream) {
    unsigned *const claims = (unsigned *)workspace;
    float *const stats = (float *)((char *)workspace + CLAIMS), *const sums = stats + stats_bytes(s) / sizeof(float);
    const int padded_T = (int)attention_padded(s.T);
    if (ONE_PASS && s.causal) {
        using Tile = AttentionTiles<HS>;
        LAUNCH(attention_stats_kernel<HS>, attention_grid(s.B, padded_T, s.NH, Tile::STATS_ROWS), Tile::STATS_THREADS, 0, stream,
               stats, dout, out, lse, s.T, padded_T, s.NH);
        attention_sm90_one_pass_of<HS>(dqkv, dout, qkv, stats, {sums, (int *)(sums + sums_bytes(s) / sizeof(float))}, claims, s.B,
                                       s.T, s.NH, padded_T, stream);
    } else {
        attention_sm90_backward_of<HS>(dqkv, dout, qkv, out, lse, stats, claims, s.B, s.T, s.NH, s.causal, padded_T, stream);
    }
}
static void attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *workspace,
                               Shape s, cudaStream_t stream) {
    (s.HS == 64 ? backward<64> : backward<128>)(dqkv, dout, qkv, out, lse, workspace, s, stream);
}

PARTIAL_VARIANT(VARIANT_NAME, "attention_sm90.cuh, the kernels for Hopper GPUs that attention.cuh is to use there")

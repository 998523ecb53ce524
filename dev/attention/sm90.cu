#include "attention.cuh"
#include "attention_sm90.cuh"
#include "variant.h"

static size_t padded(Shape s) { return attention_padded(s.T); }
static bool supports(Shape s) { return s.HS == 32 ? fail("no 32") : attention_supports(s.HS); }
static size_t stats_bytes(Shape s) { return (size_t)s.B * s.NH * padded(s) * 8; }
static size_t parts_bytes(Shape s) { return (size_t)s.B * s.NH * padded(s) * s.HS * 4; }
static size_t workspace_bytes(Shape s) { return 64 + stats_bytes(s) + parts_bytes(s) + (size_t)s.B * s.NH * padded(s) / 64 * 2 * 4; }
static void attention_forward(bf16 *out, float *lse, const bf16 *qkv, void *workspace, Shape s, cudaStream_t stream) {
    (s.HS == 64 ? attention_sm90_forward_of<64> : attention_sm90_forward_of<128>)(out, lse, qkv, (unsigned *)workspace, s.B, s.T, s.NH, s.causal, stream);
}
static void attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *workspace,
                               Shape s, cudaStream_t stream) {
    float *stats = (float *)workspace + 16;
    unsigned *claims = (unsigned *)workspace;
    if (s.causal && getenv("ONE_PASS")) {
        AttentionSums sums = {(float *)((char *)stats + stats_bytes(s)), (int *)((char *)stats + stats_bytes(s) + parts_bytes(s))};
        const int p = (int)padded(s);
        if (s.HS == 64) {
            LAUNCH(attention_stats_kernel<64>, attention_grid(s.B, p, s.NH, AttentionTiles<64>::STATS_ROWS), AttentionTiles<64>::STATS_THREADS, 0, stream, stats, dout, out, lse, s.T, p, s.NH);
            attention_sm90_one_pass_of<64>(dqkv, dout, qkv, stats, sums, claims, s.B, s.T, s.NH, p, stream);
        } else {
            LAUNCH(attention_stats_kernel<128>, attention_grid(s.B, p, s.NH, AttentionTiles<128>::STATS_ROWS), AttentionTiles<128>::STATS_THREADS, 0, stream, stats, dout, out, lse, s.T, p, s.NH);
            attention_sm90_one_pass_of<128>(dqkv, dout, qkv, stats, sums, claims, s.B, s.T, s.NH, p, stream);
        }
        return;
    }
    (s.HS == 64 ? attention_sm90_backward_of<64> : attention_sm90_backward_of<128>)(
        dqkv, dout, qkv, out, lse, stats, claims, s.B, s.T, s.NH, s.causal, (int)padded(s), stream);
}
PARTIAL_VARIANT(sm90, "wip")

#include "attention.cuh"
#include "attention_sm90.cuh"
#include "variant.h"

static bool supports(Shape s) { return s.HS != 32 && attention_supports(s.HS); }
static size_t workspace_bytes(Shape s) { return 64 + attention_workspace_bytes(s.B, s.T, s.NH); }
static void attention_forward(bf16 *out, float *lse, const bf16 *qkv, void *workspace, Shape s, cudaStream_t stream) {
    (s.HS == 64 ? attention_sm90_forward_of<64> : attention_sm90_forward_of<128>)(out, lse, qkv, (unsigned *)workspace, s.B, s.T, s.NH, s.causal, stream);
}
static void attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *workspace,
                               Shape s, cudaStream_t stream) {
    (s.HS == 64 ? attention_sm90_backward_of<64> : attention_sm90_backward_of<128>)(
        dqkv, dout, qkv, out, lse, (float *)workspace + 16, (unsigned *)workspace, s.B, s.T, s.NH, s.causal, (int)attention_padded(s.T), stream);
}
PARTIAL_VARIANT(sm90, "wip")

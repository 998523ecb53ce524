// trainer: attention.cuh, as train_gpt2.cu uses it in every layer, for tests and measurements beside the variants that led to it.
// Its kernels are v2's, and for Hopper GPUs those of attention_sm90.cuh.

#include "attention.cuh"
#include "variant.h"

static bool supports(Shape s) { return attention_supports(s.HS); }

static size_t workspace_bytes(Shape s) { return attention_workspace_bytes(s.B, s.T, s.NH, s.HS, true); }

static void attention_forward(bf16 *out, float *lse, const bf16 *qkv, void *workspace, Shape s, cudaStream_t stream) {
    attention_forward(out, lse, qkv, workspace, s.B, s.T, s.NH, s.HS, s.causal, stream);
}

static void attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *workspace,
                               Shape s, cudaStream_t stream) {
    attention_backward(dqkv, dout, qkv, out, lse, workspace, s.B, s.T, s.NH, s.HS, s.causal, stream);
}

VARIANT(trainer, "attention.cuh, as the trainer has it in every layer: v2's kernels, or those for Hopper")

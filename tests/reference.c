// train_gpt2.c behind the few functions of reference.h.

#define GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // its training loop and its writing are not needed here
#include "train_gpt2.c"

#include "tests/reference.h"

struct Reference { Model model; };

Reference *reference_new(GptConfig config, int B, const float *weights) {
    static bool started;
    char arithmetic[128];
    if (!started) matmul_start(arithmetic, sizeof arithmetic);  // memory for its matrix products, once
    started = true;
    Reference *r = allocate(1, sizeof *r, "the reference");
    model_plan(&r->model, config, B, true);
    model_allocate(&r->model, true);
    memcpy(r->model.state.weights, weights, r->model.parameters * sizeof(float));
    return r;
}

void reference_free(Reference *r) {
    model_free(&r->model);
    free(r);
}

double reference_gradient(Reference *r, const int *tokens, const int *targets, int B, int T, float *logits) {
    Model *m = &r->model;
    int N = B * T, C = m->config.channels, V = m->config.vocab;
    model_forward(m, tokens, B, T);
    if (logits) matmul(logits, m->lnf, false, m->weight.wte, true, N, V, C, false);
    double loss = model_loss(m, targets, N, 1.0f / (float)N, false) / N;
    model_backward(m, tokens, B, T, false);
    return loss;
}

float *reference_gradients(Reference *r) { return r->model.grads; }
float *reference_weights(Reference *r) { return r->model.state.weights; }

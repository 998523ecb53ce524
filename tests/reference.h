// train_gpt2.c, the model in fp32, as something to compare with: for tests in C++, which cannot include it. A program that uses
// it is linked with reference.c, compiled as C.
//
// All tensors of a model lie end to end, in the order of gpt/model.h's table. Tokens and targets are (B, T).
#ifndef TESTS_REFERENCE_H
#define TESTS_REFERENCE_H

#include "gpt/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Reference Reference;

// A model for batches of up to B sequences of up to config.seq tokens. `weights` are copied.
Reference *reference_new(GptConfig config, int B, const float *weights);
void reference_free(Reference *r);

// The mean loss. Its gradient is reference_gradients(), and logits (B, T, V) are filled if not NULL.
double reference_gradient(Reference *r, const int *tokens, const int *targets, int B, int T, float *logits);

float *reference_gradients(Reference *r);
float *reference_weights(Reference *r);

#ifdef __cplusplus
}
#endif

#endif

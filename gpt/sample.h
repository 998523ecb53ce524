// Draws the next token from logits: temperature, then top-k, then top-p (nucleus sampling, Holtzman et al., 2020).
#ifndef GPT_SAMPLE_H
#define GPT_SAMPLE_H

#include <math.h>
#include <stdlib.h>

#include "error.h"

typedef struct { float logit; int token; } Candidate;

// Most likely first; equal ones by token, so that the order, and with it the sample, is the same everywhere.
static inline int candidate_order(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->logit != y->logit ? (x->logit < y->logit ? 1 : -1) : x->token - y->token;
}

// logits (V). temperature 0 takes the most likely token; top_k 0 and top_p 1 leave all tokens in. `uniform` is the
// random number in (0, 1) that decides. A NaN logit is never drawn. Returns the token.
static inline int sample_token(const float *logits, int V, double temperature, int top_k, double top_p, float uniform) {
    Candidate *candidates = (Candidate *)allocate((size_t)V, sizeof *candidates, "the sampler");
    int n = 0, chosen = 0;
    for (int i = 0; i < V; i++)
        if (!isnan(logits[i])) {
            candidates[n].logit = logits[i];
            candidates[n++].token = i;
        }
    qsort(candidates, (size_t)n, sizeof *candidates, candidate_order);
    if (top_k > 0 && top_k < n) n = top_k;
    if (n > 0) chosen = candidates[0].token;
    if (n > 1 && temperature > 0) {
        double total = 0, kept = 0, target;
        for (int i = 0; i < n; i++) total += exp((candidates[i].logit - candidates[0].logit) / temperature);
        int nucleus = 0;  // the fewest tokens that together have probability top_p, at least one
        while (nucleus < n && (nucleus == 0 || kept < top_p * total))
            kept += exp((candidates[nucleus++].logit - candidates[0].logit) / temperature);
        target = uniform * kept;
        for (int i = 0; i < nucleus; i++) {
            chosen = candidates[i].token;
            target -= exp((candidates[i].logit - candidates[0].logit) / temperature);
            if (target < 0) break;
        }
    }
    free(candidates);
    return chosen;
}

#endif

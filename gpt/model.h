// The shape of a GPT-2 model: its sizes, the presets, and the table of its parameter tensors.
//
// Everything that walks over the parameters (initialization, checkpoints, weight decay, a trainer's pointers)
// walks over this one table, in this one order. Linear weights are (in, out), as Hugging Face's GPT-2 has them, so
// checkpoints need no transposition: y = x W + b.
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include <stddef.h>
#include <string.h>

#include "error.h"
#include "random.h"

typedef struct {
    int layers;    // L
    int heads;     // NH
    int channels;  // C; the head size is HS = C / NH
    int seq;       // T, the longest sequence the position embedding knows
    int vocab;     // V
} GptConfig;

typedef struct { const char *name; int layers, heads, channels, seq; } GptPreset;

// tiny learns letters within minutes on a laptop. The others are GPT-2's own sizes and one smaller, named by depth.
static const GptPreset gpt_presets[] = {
    {"tiny", 4, 3, 96, 128},   {"d6", 6, 6, 384, 1024},    {"d12", 12, 12, 768, 1024},
    {"d24", 24, 16, 1024, 1024}, {"d36", 36, 20, 1280, 1024}, {"d48", 48, 25, 1600, 1024},
};
enum { GPT_PRESETS = sizeof gpt_presets / sizeof *gpt_presets };

static inline const GptPreset *gpt_preset(const char *name) {
    for (int i = 0; i < GPT_PRESETS; i++)
        if (!strcmp(name, gpt_presets[i].name)) return &gpt_presets[i];
    return NULL;
}

// The names of all presets, separated by commas.
static inline const char *gpt_preset_names(void) {
    static char names[256];
    *names = 0;
    for (int i = 0; i < GPT_PRESETS; i++) strcat(strcat(names, i ? ", " : ""), gpt_presets[i].name);
    return names;
}

static inline bool gpt_config_check(GptConfig c) {
    if (c.channels % c.heads)
        return fail("--channels %d is not a multiple of --heads %d; each head takes an equal share of the channels",
                    c.channels, c.heads);
    return true;
}

// The tensors of one block, in order. The same order is in Layer of the trainers.
enum { LN1_W, LN1_B, QKV_W, QKV_B, PROJ_W, PROJ_B, LN2_W, LN2_B, FC_W, FC_B, FCPROJ_W, FCPROJ_B, TENSORS_PER_LAYER };

typedef struct {
    char name[64];     // as Hugging Face's GPT2LMHeadModel names it
    int rank;          // 1 or 2
    size_t shape[2];
    size_t size;       // elements
    size_t offset;     // elements before it, all tensors laid end to end
    bool decay;        // weight decay: on matrices and embeddings only
    float init_std;    // 0: all elements are init_value
    float init_value;
} GptTensor;

// wte, wpe, then TENSORS_PER_LAYER for each layer, then the final layer norm's two.
static inline int gpt_tensor_count(GptConfig c) { return 2 + c.layers * TENSORS_PER_LAYER + 2; }

// The index-th tensor. `offset` is left 0: gpt_tensors fills it.
static inline GptTensor gpt_tensor(GptConfig c, int index) {
    static const char *const layer_names[TENSORS_PER_LAYER] = {
        "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
        "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight",    "mlp.c_fc.bias",    "mlp.c_proj.weight",  "mlp.c_proj.bias"};
    size_t C = (size_t)c.channels;
    const size_t rows[TENSORS_PER_LAYER] = {C, C, C, 3 * C, C, C, C, C, C, 4 * C, 4 * C, C};
    const size_t columns[TENSORS_PER_LAYER] = {0, 0, 3 * C, 0, C, 0, 0, 0, 4 * C, 0, C, 0};
    GptTensor t;
    memset(&t, 0, sizeof t);
    int last = gpt_tensor_count(c) - 2;
    if (index < 2) {
        snprintf(t.name, sizeof t.name, "transformer.%s.weight", index == 0 ? "wte" : "wpe");
        t.shape[0] = (size_t)(index == 0 ? c.vocab : c.seq);
        t.shape[1] = C;
        t.init_std = 0.02f;  // positions too, as Hugging Face and nanoGPT do; OpenAI's own code had 0.01 for them
    } else if (index >= last) {
        snprintf(t.name, sizeof t.name, "transformer.ln_f.%s", index == last ? "weight" : "bias");
        t.shape[0] = C;
        t.init_value = index == last ? 1.0f : 0.0f;
    } else {
        int layer = (index - 2) / TENSORS_PER_LAYER, kind = (index - 2) % TENSORS_PER_LAYER;
        snprintf(t.name, sizeof t.name, "transformer.h.%d.%s", layer, layer_names[kind]);
        t.shape[0] = rows[kind];
        t.shape[1] = columns[kind];
        t.init_value = kind == LN1_W || kind == LN2_W ? 1.0f : 0.0f;
        // Each layer adds twice to the residual stream; 1/sqrt(2L) keeps its variance independent of the depth.
        if (kind == PROJ_W || kind == FCPROJ_W) t.init_std = 0.02f / sqrtf(2.0f * (float)c.layers);
        else if (columns[kind]) t.init_std = 0.02f;
    }
    t.rank = t.shape[1] ? 2 : 1;
    t.decay = t.rank == 2;
    t.size = t.shape[0] * (t.rank == 2 ? t.shape[1] : 1);
    return t;
}

// All tensors with their offsets, in a new array that the caller frees; *parameters is their total size.
static inline GptTensor *gpt_tensors(GptConfig c, size_t *parameters) {
    int count = gpt_tensor_count(c);
    GptTensor *tensors = (GptTensor *)allocate((size_t)count, sizeof *tensors, "the tensor table");
    *parameters = 0;
    for (int i = 0; i < count; i++) {
        tensors[i] = gpt_tensor(c, i);
        tensors[i].offset = *parameters;
        *parameters += tensors[i].size;
    }
    return tensors;
}

// Fills `parameters` with GPT-2's initial values: a pure function of the shape and the seed.
static inline void gpt_init(GptConfig c, float *parameters, uint64_t seed) {
    size_t total;
    GptTensor *tensors = gpt_tensors(c, &total);
    for (int i = 0; i < gpt_tensor_count(c); i++) {
        float *out = parameters + tensors[i].offset;
        if (tensors[i].init_std > 0) random_normal(out, tensors[i].size, tensors[i].init_std, seed, RANDOM_INIT, (uint32_t)i);
        else for (size_t j = 0; j < tensors[i].size; j++) out[j] = tensors[i].init_value;
    }
    free(tensors);
}

#endif

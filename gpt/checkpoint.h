// Checkpoints: folders named ckpt-00000500, for the step they hold, that Hugging Face Transformers opens as they are.
//
//   model.safetensors       the weights, with GPT-2's tensor names       config.json      the model's shape
//   optimizer.safetensors   AdamW's two moments, m.NAME and v.NAME       tokenizer.json   and tokenizer_config.json
//   manifest.json           step, position in the data, options, and the size and CRC-32 of the other files
//
// A checkpoint is written under a temporary name, synced to the disk and renamed, so that one that has its name is whole.
// data/README.md describes the files. All paths are relative to the folder --out unless said otherwise.
#ifndef GPT_CHECKPOINT_H
#define GPT_CHECKPOINT_H

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model.h"
#include "options.h"
#include "safetensors.h"
#include "tokenizer.h"

typedef struct {
    int64_t step;      // updates done, skipped ones included
    uint64_t samples;  // sequences read: the position in the data
    int64_t skipped;   // updates left out because the loss or the gradient was not finite
    uint64_t tokens;   // of the training data, to notice that it changed
} Progress;

// The manifest is last: it has the checksums of the others.
enum { CHECKPOINT_MODEL, CHECKPOINT_OPTIMIZER, CHECKPOINT_CONFIG, CHECKPOINT_TOKENIZER, CHECKPOINT_TOKENIZER_CONFIG,
       CHECKPOINT_MANIFEST, CHECKPOINT_FILES };
static const char *const checkpoint_files[CHECKPOINT_FILES] = {"model.safetensors", "optimizer.safetensors", "config.json",
                                                               "tokenizer.json", "tokenizer_config.json", "manifest.json"};

// ---------------------------------------------------------------------------
// Folders

// The step of a folder named "ckpt-00000500" and `ending`, or -1 for another name.
static inline long long checkpoint_step(const char *path, const char *ending) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (strncmp(name, "ckpt-", 5) || strlen(name) < 13 || strcmp(name + 5 + strspn(name + 5, "0123456789"), ending)) return -1;
    return strtoll(name + 5, NULL, 10);
}

// Puts the newest checkpoint of a step below `before` into path. False, without fail(), if there is none.
static inline bool checkpoint_newest(const char *folder, long long before, char *path) {
    long long best = -1;
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        long long step = checkpoint_step(entry->d_name, "");
        if (step > best && step < before) {
            best = step;
            snprintf(path, PATH_SIZE, "%s/%s", folder, entry->d_name);
        }
    }
    if (dir) closedir(dir);
    return best >= 0;
}

// Removes the files of a checkpoint and then its folder. A folder somebody has put more into stays.
static inline void checkpoint_remove(const char *path) {
    char file[PATH_SIZE + 64];
    for (int i = CHECKPOINT_FILES - 1; i >= 0; i--) {  // the manifest first: without it the rest is no checkpoint
        snprintf(file, sizeof file, "%s/%s", path, checkpoint_files[i]);
        unlink(file);
    }
    rmdir(path);
}

// Removes all but the `keep` newest checkpoints, and what an interrupted save left behind.
static inline void checkpoint_prune(const char *folder, int64_t keep) {
    char path[PATH_SIZE];
    long long before = INT64_MAX;
    for (int64_t i = 0; keep > 0 && checkpoint_newest(folder, before, path); i++) {
        before = checkpoint_step(path, "");
        if (i >= keep) checkpoint_remove(path);
    }
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (checkpoint_step(entry->d_name, ".tmp") >= 0) {
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
            checkpoint_remove(path);
        }
    if (dir) closedir(dir);
}

// Makes the folder that `path` lies in, with its parents. False, with errno, if that cannot be.
static inline bool folder_make(const char *path) {
    char folder[PATH_SIZE + 8];
    snprintf(folder, sizeof folder, "%s", path);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(folder, 0777) && errno != EEXIST) return false;
        *slash = '/';
    }
    return true;
}

// Makes the folder, proves that it can be written to, and locks it for this process until it ends.
static inline bool folder_claim(const char *folder) {
    char path[PATH_SIZE];
    snprintf(path, sizeof path, "%s/.lock", folder);
    if (!folder_make(path)) return fail("cannot make the folder %s: %s; choose another --out", folder, strerror(errno));
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);  // stays open: closing it would unlock
    if (lock < 0) return fail("cannot write to the folder %s: %s; choose another --out", folder, strerror(errno));
    if (flock(lock, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) {  // a file system without locks goes unlocked
        char owner[32] = "";
        if (read(lock, owner, sizeof owner - 1) < 0) *owner = 0;
        close(lock);
        return fail("the folder %s is in use by another run (process %s); stop that one or choose another --out", folder, owner);
    }
    if (ftruncate(lock, 0) || dprintf(lock, "%ld", (long)getpid()) < 0)
        return fail("cannot write to the folder %s: %s; choose another --out", folder, strerror(errno));
    return true;
}

// ---------------------------------------------------------------------------
// Writing

static inline bool sync_folder(const char *path) {
    int folder = open(path, O_RDONLY | O_DIRECTORY);
    bool ok = folder >= 0 && (!fsync(folder) || errno == EINVAL || errno == ENOTSUP);  // some file systems cannot sync folders
    if (folder >= 0) close(folder);
    return ok;
}

static inline void config_write_json(FILE *file, GptConfig c) {
    int end = c.vocab == BYTE_VOCAB ? TOKEN_END_OF_TEXT : c.vocab - 1;  // GPT-2 has its end of text last, too
    fprintf(file,
            "{\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n  \"vocab_size\": %d,\n"
            "  \"n_positions\": %d,\n  \"n_ctx\": %d,\n  \"n_embd\": %d,\n  \"n_layer\": %d,\n  \"n_head\": %d,\n"
            "  \"n_inner\": null,\n  \"activation_function\": \"gelu_new\",\n  \"layer_norm_epsilon\": 1e-05,\n"
            "  \"initializer_range\": 0.02,\n  \"resid_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n  \"attn_pdrop\": 0.0,\n"
            "  \"scale_attn_weights\": true,\n  \"scale_attn_by_inverse_layer_idx\": false,\n"
            "  \"reorder_and_upcast_attn\": false,\n  \"tie_word_embeddings\": true,\n  \"use_cache\": true,\n"
            "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d,\n  \"torch_dtype\": \"float32\"\n}\n",
            c.vocab, c.seq, c.seq, c.channels, c.layers, c.heads, end, end);
}

// The arrays of a model, each `parameters` floats in the order of the tensor table.
typedef struct { float *weights, *m, *v; } ModelState;

static inline void checkpoint_write_arrays(CheckedFile *f, GptConfig c, const char *const *prefixes, float *const *arrays, int count) {
    size_t parameters;
    int per_array = gpt_tensor_count(c), n = 0;
    GptTensor *table = gpt_tensors(c, &parameters);
    SafeTensor *out = (SafeTensor *)allocate((size_t)(per_array * count), sizeof *out, "the tensors of a checkpoint");
    for (int a = 0; a < count; a++)
        for (int i = 0; i < per_array; i++) {
            SafeTensor *t = &out[n++];
            snprintf(t->name, sizeof t->name, "%s%s", prefixes[a], table[i].name);
            t->dtype = "F32";
            t->rank = table[i].rank;
            memcpy(t->shape, table[i].shape, sizeof table[i].shape);
            t->bytes = table[i].size * sizeof(float);
            t->data = arrays[a] + table[i].offset;
        }
    safetensors_write(f, out, n);
    free(out);
    free(table);
}

static inline void checkpoint_write_manifest(FILE *file, const Options *o, Progress p, const CheckedFile *files) {
    fprintf(file, "{\n  \"format\": 1,\n  \"step\": %lld,\n  \"samples\": %llu,\n  \"skipped\": %lld,\n  \"tokens\": %llu,\n"
            "  \"files\": {\n", (long long)p.step, (unsigned long long)p.samples, (long long)p.skipped, (unsigned long long)p.tokens);
    for (int i = 0; i < CHECKPOINT_MANIFEST; i++)
        fprintf(file, "    \"%s\": {\"bytes\": %llu, \"crc32\": \"%08x\"}%s\n", checkpoint_files[i],
                (unsigned long long)files[i].size, files[i].crc, i + 1 < CHECKPOINT_MANIFEST ? "," : "");
    fputs("  },\n  \"options\": {\n", file);
    options_write_json(file, o);
    fputs("  },\n", file);
}

// The last line of a manifest holds the CRC-32 of all before it.
#define MANIFEST_END "  \"crc32\": \"%08x\"\n}\n"
enum { MANIFEST_END_SIZE = 24 };

// Writes the i-th file of a checkpoint into `folder` and syncs it.
static inline bool checkpoint_write_file(const char *folder, int i, GptConfig c, const Options *o, Progress p, ModelState state,
                                         CheckedFile *files) {
    static const char *const no_prefix[] = {""}, *const moments[] = {"m.", "v."};
    float *const weights[] = {state.weights}, *const mv[] = {state.m, state.v};
    char path[PATH_SIZE + 64], *text = NULL;
    size_t length = 0;
    snprintf(path, sizeof path, "%s/%s", folder, checkpoint_files[i]);
    CheckedFile *f = &files[i];
    memset(f, 0, sizeof *f);
    f->file = fopen(path, "wb");
    if (!f->file) return false;
    if (i == CHECKPOINT_MODEL) checkpoint_write_arrays(f, c, no_prefix, weights, 1);
    else if (i == CHECKPOINT_OPTIMIZER) checkpoint_write_arrays(f, c, moments, mv, 2);
    else {
        FILE *memory = open_memstream(&text, &length);
        if (!memory) die("out of memory: a checkpoint's %s", checkpoint_files[i]);
        if (i == CHECKPOINT_CONFIG) config_write_json(memory, c);
        if (i == CHECKPOINT_TOKENIZER) tokenizer_write_json(memory);
        if (i == CHECKPOINT_TOKENIZER_CONFIG)
            fputs("{\"tokenizer_class\": \"PreTrainedTokenizerFast\", \"eos_token\": \"<|endoftext|>\","
                          " \"bos_token\": \"<|endoftext|>\", \"clean_up_tokenization_spaces\": false}\n", memory);
        if (i == CHECKPOINT_MANIFEST) checkpoint_write_manifest(memory, o, p, files);
        fclose(memory);
        checked_write(f, text, length);
        free(text);
        char end[MANIFEST_END_SIZE + 1];
        snprintf(end, sizeof end, MANIFEST_END, f->crc);
        if (i == CHECKPOINT_MANIFEST) checked_write(f, end, MANIFEST_END_SIZE);
    }
    bool ok = !f->failed && !fflush(f->file) && !fsync(fileno(f->file));
    int reason = errno;
    if (fclose(f->file) && ok) return false;
    errno = reason;
    return ok;
}

// Saves to folder/ckpt-STEP and then removes checkpoints beyond --keep. False after fail(): nothing was changed then.
// The tokenizer's files are written for the byte vocabulary only; other tokens come from elsewhere.
static inline bool checkpoint_save(const char *folder, GptConfig c, const Options *o, Progress p, ModelState state) {
    char path[PATH_SIZE], temporary[PATH_SIZE + 8];
    CheckedFile files[CHECKPOINT_FILES];
    memset(files, 0, sizeof files);
    snprintf(path, sizeof path, "%s/ckpt-%08lld", folder, (long long)p.step);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    checkpoint_remove(temporary);
    bool ok = !mkdir(temporary, 0777) || (errno == ENOENT && folder_make(temporary) && !mkdir(temporary, 0777));  // removed meanwhile?
    for (int i = 0; ok && i < CHECKPOINT_FILES; i++)
        if (c.vocab == BYTE_VOCAB || !strstr(checkpoint_files[i], "tokenizer"))
            ok = checkpoint_write_file(temporary, i, c, o, p, state, files);
    ok = ok && sync_folder(temporary) && !rename(temporary, path) && sync_folder(folder);
    if (!ok) {
        fail("cannot save the checkpoint %s: %s; earlier checkpoints are untouched", path, strerror(errno));
        checkpoint_remove(temporary);
        return false;
    }
    checkpoint_prune(folder, o->keep);
    return true;
}

// ---------------------------------------------------------------------------
// Reading

// Reads and parses path/name. NULL after fail(); the caller frees with json_free.
static inline Json *checkpoint_read_json(const char *path, const char *name) {
    char file_name[PATH_SIZE + 64];
    snprintf(file_name, sizeof file_name, "%s/%s", path, name);
    FILE *file = fopen(file_name, "rb");
    if (!file) {
        fail("cannot open %s: %s", file_name, strerror(errno));
        return NULL;
    }
    enum { LIMIT = 1 << 20 };
    char *text = (char *)allocate(LIMIT, 1, name);
    size_t size = fread(text, 1, LIMIT, file);
    fclose(file);
    size_t before = size > MANIFEST_END_SIZE ? size - MANIFEST_END_SIZE : 0;
    char end[MANIFEST_END_SIZE + 1];
    snprintf(end, sizeof end, MANIFEST_END, crc32_update(0, text, before));
    bool whole = size < LIMIT && (strcmp(name, checkpoint_files[CHECKPOINT_MANIFEST]) || !memcmp(text + before, end, MANIFEST_END_SIZE));
    Json *json = whole ? json_parse(text, size) : NULL;
    if (!whole) fail("%s is damaged: %s", file_name, size < LIMIT ? "its checksum is wrong" : "it is far too large");
    else if (!json) fail("%s is damaged: %s", file_name, error_text);
    free(text);
    return json;
}

// The shape of the model in a checkpoint, ours or Hugging Face's. False after fail(), also for a model that is no GPT-2
// of the kind trained here.
static inline bool checkpoint_read_config(const char *path, GptConfig *c) {
    Json *json = checkpoint_read_json(path, "config.json");
    if (!json) return false;
    const struct { const char *key; int option, *size; } sizes[] = {
        {"n_layer", OPTION_layers, &c->layers}, {"n_head", OPTION_heads, &c->heads}, {"n_embd", OPTION_channels, &c->channels},
        {"n_positions", OPTION_seq, &c->seq}, {"vocab_size", OPTION_vocab, &c->vocab}};
    bool ok = true;
    for (int i = 0; ok && i < 5; i++) {
        double value = json_number_or(json, sizes[i].key, 0), most = option_row(sizes[i].option)->most;
        *sizes[i].size = value >= 1 && value <= most ? (int)value : 0;
        if (!*sizes[i].size) ok = fail("%s/config.json has no usable \"%s\": it goes from 1 to %.0f", path, sizes[i].key, most);
    }
    const char *type = json_string_or(json, "model_type", ""), *gelu = json_string_or(json, "activation_function", "gelu_new");
    double inner = json_number_or(json, "n_inner", 4.0 * c->channels), eps = json_number_or(json, "layer_norm_epsilon", 1e-5);
    if (ok && strcmp(type, "gpt2")) ok = fail("%s holds a model of type '%s'; only gpt2 can be read", path, type);
    if (ok && ((strcmp(gelu, "gelu_new") && strcmp(gelu, "gelu_pytorch_tanh")) || inner != 4.0 * c->channels || fabs(eps - 1e-5) > 1e-9))
        ok = fail("%s holds a GPT-2 with activation %s, inner width %.0f and epsilon %g; only gelu_new, 4 C and 1e-5 can be read",
                  path, gelu, inner, eps);
    static const struct { const char *key; bool usual; } switches[] = {
        {"scale_attn_weights", true}, {"scale_attn_by_inverse_layer_idx", false}, {"tie_word_embeddings", true}};
    for (int i = 0; ok && i < 3; i++)
        if ((json_number_or(json, switches[i].key, switches[i].usual) != 0) != switches[i].usual)
            ok = fail("%s holds a GPT-2 with %s %s, which cannot be read", path, switches[i].key, switches[i].usual ? "false" : "true");
    json_free(json);
    return ok && gpt_config_check(*c);
}

// CRC-32 and size of a file. False if it cannot be read.
static inline bool file_checksum(const char *path, uint32_t *crc, uint64_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) return false;
    char *buffer = (char *)allocate(1 << 20, 1, "a file buffer");
    *crc = 0;
    *size = 0;
    for (size_t got; (got = fread(buffer, 1, 1 << 20, file)) > 0; *size += got) *crc = crc32_update(*crc, buffer, got);
    bool ok = !ferror(file);
    free(buffer);
    fclose(file);
    return ok;
}

// The i-th file has the size and the CRC-32 that the manifest's entry for it says. False after fail().
static inline bool checkpoint_file_whole(const char *path, int i, const Json *entry) {
    char file[PATH_SIZE + 64];
    uint32_t crc;
    uint64_t size;
    double bytes = json_number_or(entry, "bytes", 0);
    if (entry && bytes == 0) return true;  // not written for this vocabulary
    snprintf(file, sizeof file, "%s/%s", path, checkpoint_files[i]);
    if (!file_checksum(file, &crc, &size))
        return fail("%s is damaged: %s cannot be read: %s", path, checkpoint_files[i], strerror(errno));
    if ((double)size != bytes)
        return fail("%s is damaged: %s has %llu bytes instead of %.0f", path, checkpoint_files[i], (unsigned long long)size, bytes);
    return crc == strtoul(json_string_or(entry, "crc32", ""), NULL, 16) ||
           fail("%s is damaged: the checksum of %s is wrong", path, checkpoint_files[i]);
}

// The i-th file is missing, or may be read: if it is wrong, the checkpoint is damaged, and not only forbidden.
static inline bool checkpoint_file_open(const char *path, int i) {
    char file[PATH_SIZE + 64];
    snprintf(file, sizeof file, "%s/%s", path, checkpoint_files[i]);
    return !access(file, R_OK) || errno == ENOENT;
}

// Reads the manifest of a checkpoint of ours and checks that all files it names are whole. NULL after fail(), with *damaged
// if it is the checkpoint's fault; the caller frees with json_free.
static inline Json *checkpoint_verify(const char *path, bool *damaged) {
    Json *json = checkpoint_read_json(path, checkpoint_files[CHECKPOINT_MANIFEST]);
    bool ok = json != NULL;
    *damaged = !ok && checkpoint_file_open(path, CHECKPOINT_MANIFEST);
    if (ok && json_number_or(json, "format", 0) != 1)
        ok = fail("%s/manifest.json is of an unknown format, perhaps of a newer version of this program", path);
    for (int i = 0; ok && i < CHECKPOINT_MANIFEST; i++) {
        ok = checkpoint_file_whole(path, i, json_get(json_get(json, "files"), checkpoint_files[i]));
        *damaged = !ok && checkpoint_file_open(path, i);
    }
    if (ok) return json;
    json_free(json);
    return NULL;
}

// Reads progress and options of a checkpoint of ours, if it is whole. Options given on the command line stay. False after
// fail(), with *damaged if it is the checkpoint's fault, rather than that of a permission or an option.
static inline bool checkpoint_read_manifest(const char *path, Progress *p, Options *o, bool *damaged) {
    Json *json = checkpoint_verify(path, damaged);
    if (!json) return false;
    double step = json_number_or(json, "step", -1), samples = json_number_or(json, "samples", -1);
    double skipped = json_number_or(json, "skipped", -1), tokens = json_number_or(json, "tokens", -1);
    *damaged = !(step >= 0 && skipped >= 0 && skipped <= step && samples >= 0 && tokens >= 0 && fmax(step, fmax(samples, tokens)) < 9e15);
    if (*damaged) fail("%s/manifest.json is damaged: its counts are impossible", path);
    bool ok = !*damaged && options_read_json(o, json_get(json, "options"));
    json_free(json);
    if (!ok) return false;
    p->step = (int64_t)step, p->samples = (uint64_t)samples, p->skipped = (int64_t)skipped, p->tokens = (uint64_t)tokens;
    return true;
}

// Reads every tensor of the table into `array`, from tensors named prefix + name; Hugging Face's published GPT-2 files leave
// "transformer." out. False after fail(): one is missing, or of another shape or type.
static inline bool checkpoint_read_array(SafeTensors *s, GptConfig c, const char *prefix, float *array) {
    size_t parameters;
    GptTensor *table = gpt_tensors(c, &parameters);
    bool ok = true;
    for (int i = 0; ok && i < gpt_tensor_count(c); i++) {
        char name[96];
        snprintf(name, sizeof name, "%s%s", prefix, table[i].name);
        const SafeTensor *t = safetensors_find(s, name);
        if (!t && !*prefix) t = safetensors_find(s, table[i].name + strlen("transformer."));
        if (!t) ok = fail("%s has no tensor %s", s->path, name);
        else if (strcmp(t->dtype, "F32")) ok = fail("%s: tensor %s is %s; only F32 can be read", s->path, t->name, t->dtype);
        else if (t->rank != table[i].rank || memcmp(t->shape, table[i].shape, sizeof table[i].shape))
            ok = fail("%s: tensor %s has the shape (%zu, %zu) where config.json wants (%zu, %zu)", s->path, t->name,
                      t->shape[0], t->shape[1], table[i].shape[0], table[i].shape[1]);
        else ok = safetensors_read(s, t, array + table[i].offset);
    }
    free(table);
    return ok;
}

static inline bool checkpoint_load_weights(const char *path, GptConfig c, float *weights) {
    char file[PATH_SIZE + 64];
    SafeTensors s;
    snprintf(file, sizeof file, "%s/%s", path, checkpoint_files[0]);
    bool ok = safetensors_open(&s, file) && checkpoint_read_array(&s, c, "", weights);
    safetensors_close(&s);
    return ok;
}

static inline bool checkpoint_load_optimizer(const char *path, GptConfig c, float *m, float *v) {
    char file[PATH_SIZE + 64];
    SafeTensors s;
    snprintf(file, sizeof file, "%s/%s", path, checkpoint_files[1]);
    bool ok = safetensors_open(&s, file) && checkpoint_read_array(&s, c, "m.", m) && checkpoint_read_array(&s, c, "v.", v);
    safetensors_close(&s);
    return ok;
}

#endif

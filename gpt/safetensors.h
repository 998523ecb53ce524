// safetensors files, read and written: named arrays in one file (huggingface.co/docs/safetensors).
//
// A file is an 8-byte little-endian length, that many bytes of JSON {"name": {"dtype": "F32", "shape": [2, 3],
// "data_offsets": [begin, end]}, ...}, then the data, which the tensors cover without gap or overlap. Arrays are read
// and written in the machine's own byte order, which has to be little-endian.
#ifndef GPT_SAFETENSORS_H
#define GPT_SAFETENSORS_H

#include <errno.h>

#include "json.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are little-endian, and so must the machine be"
#endif

// ---------------------------------------------------------------------------
// Writing: any file of a checkpoint, with its CRC-32 along the way

typedef struct {
    FILE *file;
    uint32_t crc;     // CRC-32 as zlib, gzip and PNG have it
    uint64_t size;
    bool failed;
} CheckedFile;

// CRC-32 of more bytes, given that of those before (0 at the start). Eight bytes at a time by eight tables, as in
// Intel's "slicing-by-8" (Kounavis and Berry, 2005): a checkpoint has gigabytes.
static inline uint32_t crc32_update(uint32_t crc, const void *data, size_t size) {
    static uint32_t table[8][256];
    if (!table[0][1]) {
        for (uint32_t i = 0; i < 256; i++) {
            table[0][i] = i;
            for (int bit = 0; bit < 8; bit++) table[0][i] = table[0][i] >> 1 ^ (table[0][i] & 1 ? 0xEDB88320u : 0);
        }
        for (int k = 1; k < 8; k++)
            for (int i = 0; i < 256; i++) table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
    }
    const unsigned char *p = (const unsigned char *)data;
    crc = ~crc;
    for (; size >= 8; size -= 8, p += 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    while (size--) crc = crc >> 8 ^ table[0][(crc ^ *p++) & 255];
    return ~crc;
}

static inline void checked_write(CheckedFile *f, const void *data, size_t size) {
    if (f->failed || fwrite(data, 1, size, f->file) != size) { f->failed = true; return; }
    f->crc = crc32_update(f->crc, data, size);
    f->size += size;
}

typedef struct {
    char name[96];
    const char *dtype;   // "F32", "F64", "I32", ...
    int rank;
    size_t shape[4];
    size_t bytes;
    const void *data;    // writing: what to write
    uint64_t begin;      // reading: where it is in the file
} SafeTensor;

static inline size_t safetensors_dtype_size(const char *dtype) {
    static const struct { const char *name; size_t size; } sizes[] = {
        {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8}, {"I32", 4}, {"I16", 2}, {"I8", 1},
        {"U64", 8}, {"U32", 4}, {"U16", 2}, {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!strcmp(dtype, sizes[i].name)) return sizes[i].size;
    return 0;
}

// Writes `count` tensors to f in the order given. Errors are left in f->failed.
static inline void safetensors_write(CheckedFile *f, const SafeTensor *tensors, int count) {
    char *header = NULL;
    size_t length = 0;
    FILE *text = open_memstream(&header, &length);
    if (!text) die("out of memory: the header of a checkpoint");
    uint64_t begin = 0;
    fputs("{\"__metadata__\": {\"format\": \"pt\"}", text);  // Transformers refuses files that do not say so
    for (int i = 0; i < count; i++) {
        fputs(",\n", text);
        json_write_string(text, tensors[i].name);
        fprintf(text, ": {\"dtype\": \"%s\", \"shape\": [", tensors[i].dtype);
        for (int d = 0; d < tensors[i].rank; d++) fprintf(text, "%s%zu", d ? ", " : "", tensors[i].shape[d]);
        fprintf(text, "], \"data_offsets\": [%llu, %llu]}", (unsigned long long)begin, (unsigned long long)(begin + tensors[i].bytes));
        begin += tensors[i].bytes;
    }
    fputc('}', text);
    fflush(text);
    while (length % 8) fputc(' ', text), fflush(text);  // so that the data is aligned
    fclose(text);
    uint64_t size = length;
    checked_write(f, &size, sizeof size);
    checked_write(f, header, length);
    for (int i = 0; i < count; i++) checked_write(f, tensors[i].data, tensors[i].bytes);
    free(header);
}

// ---------------------------------------------------------------------------
// Reading

typedef struct {
    FILE *file;
    const char *path;     // the caller's
    Json *header;
    SafeTensor *tensors;  // sorted as in the header
    int count;
} SafeTensors;

static inline void safetensors_close(SafeTensors *s) {
    if (s->file) fclose(s->file);
    json_free(s->header);
    free(s->tensors);
    memset(s, 0, sizeof *s);
}

static inline int safetensors_by_place(const void *a, const void *b) {
    const SafeTensor *x = *(const SafeTensor *const *)a, *y = *(const SafeTensor *const *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static inline bool safetensors_entry(SafeTensors *s, const Json *node, uint64_t data_size) {
    SafeTensor *t = &s->tensors[s->count];
    Json *shape = json_get(node, "shape"), *offsets = json_get(node, "data_offsets");
    t->dtype = json_string_or(node, "dtype", "");
    size_t element = safetensors_dtype_size(t->dtype), product = 1;
    bool arrays = shape && shape->type == JSON_ARRAY && offsets && offsets->type == JSON_ARRAY;
    if (!arrays || !offsets->child || !offsets->child->next || !element)
        return fail("%s is damaged: tensor '%.60s' has no known dtype, shape and data_offsets", s->path, node->key);
    if (strlen(node->key) >= sizeof t->name) return fail("%s: the tensor name '%.60s...' is too long", s->path, node->key);
    strcpy(t->name, node->key);
    for (Json *d = shape->child; d; d = d->next) {
        bool whole = d->type == JSON_NUMBER && d->number >= 0 && d->number < 9e15 && d->number == (double)(uint64_t)d->number;
        if (!whole || t->rank == 4 || __builtin_mul_overflow(product, (size_t)d->number, &product))
            return fail("%s is damaged: tensor '%s' has an impossible shape", s->path, t->name);
        t->shape[t->rank++] = (size_t)d->number;
    }
    double begin = offsets->child->number, end = offsets->child->next->number;
    if (!(begin >= 0 && end >= begin && end <= (double)data_size) || __builtin_mul_overflow(product, element, &t->bytes) ||
        (uint64_t)end - (uint64_t)begin != t->bytes)
        return fail("%s is damaged or cut short: tensor '%s' does not fit its place in the file", s->path, t->name);
    t->begin = (uint64_t)begin;
    s->count++;
    return true;
}

static inline bool safetensors_read_header(SafeTensors *s) {
    uint64_t length = 0;
    fseeko(s->file, 0, SEEK_END);
    uint64_t size = (uint64_t)ftello(s->file);
    rewind(s->file);
    if (size < 10 || fread(&length, 8, 1, s->file) != 1 || length > size - 8 || length > 1 << 24)
        return fail("%s is not a safetensors file or is cut short: %llu bytes, a header of %llu", s->path,
                    (unsigned long long)size, (unsigned long long)length);
    char *text = (char *)allocate(length, 1, "the header of a checkpoint");
    bool read = fread(text, 1, length, s->file) == length;
    s->header = read ? json_parse(text, length) : NULL;
    free(text);
    if (!s->header || s->header->type != JSON_OBJECT)
        return fail("%s has no readable safetensors header: %s", s->path, read && !s->header ? error_text : "not an object");
    size_t entries = 0;
    for (Json *node = s->header->child; node; node = node->next) entries++;
    s->tensors = (SafeTensor *)allocate(entries, sizeof *s->tensors, "the tensors of a checkpoint");
    for (Json *node = s->header->child; node; node = node->next)
        if (strcmp(node->key, "__metadata__") && !safetensors_entry(s, node, size - 8 - length)) return false;
    // No gap and no overlap: in order of place, each tensor begins where the one before ends.
    const SafeTensor **order = (const SafeTensor **)allocate((size_t)s->count, sizeof *order, "the tensors of a checkpoint");
    for (int i = 0; i < s->count; i++) order[i] = &s->tensors[i];
    qsort(order, (size_t)s->count, sizeof *order, safetensors_by_place);
    uint64_t covered = 0;
    bool whole = true;
    for (int i = 0; i < s->count; i++) {
        whole = whole && order[i]->begin == covered;
        covered += order[i]->bytes;
    }
    free(order);
    if (!whole || covered != size - 8 - length)
        return fail("%s is damaged or cut short: its tensors do not cover its %llu bytes of data", s->path,
                    (unsigned long long)(size - 8 - length));
    for (int i = 0; i < s->count; i++) s->tensors[i].begin += 8 + length;
    return true;
}

// Opens a file and checks its header. False after fail(). `path` must outlive s; safetensors_close gives all back.
static inline bool safetensors_open(SafeTensors *s, const char *path) {
    memset(s, 0, sizeof *s);
    s->path = path;
    s->file = fopen(path, "rb");
    if (!s->file) return fail("cannot open %s: %s", path, strerror(errno));
    if (safetensors_read_header(s)) return true;
    safetensors_close(s);
    return false;
}

static inline const SafeTensor *safetensors_find(const SafeTensors *s, const char *name) {
    for (int i = 0; i < s->count; i++)
        if (!strcmp(s->tensors[i].name, name)) return &s->tensors[i];
    return NULL;
}

// Reads all bytes of a tensor into out.
static inline bool safetensors_read(SafeTensors *s, const SafeTensor *t, void *out) {
    if (fseeko(s->file, (off_t)t->begin, SEEK_SET) || fread(out, 1, t->bytes, s->file) != t->bytes)
        return fail("cannot read tensor %s of %s: %s", t->name, s->path, ferror(s->file) ? strerror(errno) : "the file ends early");
    return true;
}

#endif

// Training data: text files and llm.c's .bin shards, seen as one long stream of tokens and cut into sequences.
//
// A text file's bytes are its tokens, followed by the end-of-text token; there is nothing to tokenize or to cache.
// A shard is a header of 256 int32 (20240520, 1, number of tokens, vocabulary or 0) and then uint16 tokens:
// data/README.md. Files are joined in the order of their names. An epoch cuts the stream at a place of its own into
// windows of T + 1 tokens (inputs and, one further, targets; neighbours share one token) and visits every window
// once, shuffled. Which window the n-th sample of a run is depends only on (seed, n), so nothing about the position
// has to be saved but n.
#ifndef GPT_DATA_H
#define GPT_DATA_H

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include "random.h"
#include "tokenizer.h"

enum { SHARD_MAGIC = 20240520, SHARD_VERSION = 1, SHARD_HEADER = 256 };  // the header's length in int32
enum { SHARD_DEFAULT_VOCAB = 50257 };  // of llm.c's shards, which do not say: GPT-2's tokens

typedef struct {
    char *path;
    bool text;
    int vocab;
    size_t first;   // position in the stream of its first token
    size_t tokens;  // with the end-of-text token of a text
} Shard;

typedef struct {
    Shard *shards;
    int count;
    int vocab;                // the same for all of them
    bool text;                // one of them at least is a text
    size_t begin, end;        // the part of the stream that is used
    int seq;                  // T
    uint64_t seed;
    size_t windows;           // in an epoch
} Data;

// What a file that should be a shard seems to be, from its first bytes.
static inline const char *data_describe(const unsigned char *bytes, size_t size) {
    int32_t magic = 0;
    if (size >= 4) memcpy(&magic, bytes, 4);
    if (size == 0) return "is empty";
    if (magic == 20240326) return "is an llm.c model checkpoint";
    if (magic == 20240522) return "is an llm.c evaluation file";
    if (magic == 20240801) return "is a Llama 3 shard with 32-bit tokens";
    if (size >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b) return "looks like a gzip archive";
    if (size >= 4 && !memcmp(bytes, "PK\3\4", 4)) return "looks like a zip archive";
    if (size >= 4 && !memcmp(bytes, "\x28\xb5\x2f\xfd", 4)) return "looks like a zstd archive";
    if (size >= 4 && !memcmp(bytes, "PAR1", 4)) return "looks like a Parquet file";
    if (size >= 4 && !memcmp(bytes, "%PDF", 4)) return "looks like a PDF";
    size_t printable = 0;
    for (size_t i = 0; i < size; i++) printable += bytes[i] >= 32 || bytes[i] == '\n' || bytes[i] == '\t' || bytes[i] == '\r';
    return printable == size ? "looks like plain text" : "has no shard's header (nanoGPT's .bin files, for one, have none)";
}

static inline bool data_open_shard(Shard *shard, const char *path) {
    unsigned char header[SHARD_HEADER * 4];
    int32_t word[4] = {0};
    struct stat info;
    int file = open(path, O_RDONLY | O_NONBLOCK);  // does not wait for a pipe's other end
    if (file < 0 || fstat(file, &info)) {
        bool missing = errno == ENOENT;
        if (file >= 0) close(file);
        return fail("cannot open the data file %s: %s%s", path, strerror(errno),
                    missing ? "; --data takes a text file, a .bin shard, a folder or a quoted glob" : "");
    }
    ssize_t got = S_ISREG(info.st_mode) ? pread(file, header, sizeof header, 0) : -1;
    close(file);
    if (got < 0) return fail("cannot read the data file %s: it is not a regular file", path);
    if (got == 0) return fail("the data file %s is empty; it should hold text or a shard of tokens", path);
    if (got >= 16) memcpy(word, header, sizeof word);
    size_t length = strlen(path);
    bool named_bin = length > 4 && !strcmp(path + length - 4, ".bin");
    shard->text = word[0] != SHARD_MAGIC && !named_bin;
    shard->path = strdup(path);
    shard->tokens = (size_t)info.st_size + 1;
    shard->vocab = BYTE_VOCAB;
    if (shard->text) return true;
    if (word[0] != SHARD_MAGIC)
        return fail("%s %s, not a shard of tokens (which starts with %d); rename a text to .txt to train on its bytes, or "
                    "make a shard of it with: make tokenize && ./tokenize book.txt book.bin",
                    path, data_describe(header, (size_t)got), SHARD_MAGIC);
    if (word[1] != SHARD_VERSION)
        return fail("the shard %s has version %d; this program reads version %d", path, word[1], SHARD_VERSION);
    long long stored = ((long long)info.st_size - (long long)sizeof header) / 2;
    if (word[2] <= 0 || stored < word[2] || got < (ssize_t)sizeof header)
        return fail("the shard %s is truncated or damaged: its header promises %d tokens and the file holds %lld; download or "
                    "make it again", path, word[2], stored > 0 ? stored : 0);
    if (word[3] < 0 || word[3] > 65536)
        return fail("the shard %s is damaged: its header has a vocabulary of %d, and 16 bits can have 65536 tokens", path, word[3]);
    shard->tokens = (size_t)word[2];
    shard->vocab = word[3] > 0 ? word[3] : SHARD_DEFAULT_VOCAB;
    return true;
}

static inline void data_close(Data *data) {
    for (int i = 0; i < data->count; i++) free(data->shards[i].path);
    free(data->shards);
    memset(data, 0, sizeof *data);
}

static inline int data_by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// Opens all files of `pattern` (a file, a folder, or a glob with * ? [] {} ~) and measures the stream. To be cut with
// data_cut before windows are read. False after fail(); data_close frees in either case.
static inline bool data_open(Data *data, const char *pattern) {
    memset(data, 0, sizeof *data);
    char in_folder[PATH_SIZE];
    struct stat info;
    bool exists = !stat(pattern, &info);
    if (exists && S_ISDIR(info.st_mode)) {
        size_t length = 0;
        for (const char *c = pattern; *c && length < sizeof in_folder - 16; c++) {
            if (strchr("*?[]{}~\\,", *c)) in_folder[length++] = '\\';
            in_folder[length++] = *c;
        }
        strcpy(in_folder + length, "/*.{txt,bin}");
        pattern = in_folder;
        exists = false;
    }
    glob_t found;
    memset(&found, 0, sizeof found);
    bool single = exists || !strpbrk(pattern, "*?[{~");  // a name, perhaps with brackets in it, rather than a pattern
    if (!single && glob(pattern, GLOB_BRACE | GLOB_TILDE, NULL, &found))
        return fail("no data file matches '%s'; --data takes a text file, a .bin shard, a folder of them or a quoted glob", pattern);
    size_t count = single ? 1 : found.gl_pathc, tokens = 0;
    if (!single) qsort(found.gl_pathv, count, sizeof *found.gl_pathv, data_by_name);  // braces are not in order
    data->shards = (Shard *)allocate(count, sizeof(Shard), "the list of data files");
    bool ok = true;
    for (size_t i = 0; ok && i < count; i++) {
        const char *path = single ? pattern : found.gl_pathv[i];
        if (!single && !stat(path, &info) && S_ISDIR(info.st_mode)) continue;
        Shard *shard = &data->shards[data->count++];
        ok = data_open_shard(shard, path);
        shard->first = tokens;
        tokens += shard->tokens;
        if (ok && shard->vocab != data->shards[0].vocab)
            ok = fail("%s has tokens of a vocabulary of %d and %s of %d, which do not mix; name the files of one kind",
                      data->shards[0].path, data->shards[0].vocab, path, shard->vocab);
        data->vocab = shard->vocab;
        data->text = data->text || shard->text;
    }
    if (!single) globfree(&found);
    if (ok && !data->count) return fail("no data file matches '%s', only folders", pattern);
    data->end = tokens;
    return ok;
}

// Uses the tokens [begin, end) of the stream, in windows for sequences of T = seq. False after fail() if there are too few.
static inline bool data_cut(Data *data, size_t begin, size_t end, int seq, uint64_t seed, const char *option) {
    data->begin = begin;
    data->end = end;
    data->seq = seq;
    data->seed = seed;
    size_t length = end - begin, T = (size_t)seq;
    if (length < T + 1)
        return fail("%s has %zu tokens, and a sequence of T = %d needs %zu; give more text%s a smaller --seq%s", option, length,
                    seq, T + 1, begin ? "," : " or", begin ? " or a larger --val-fraction" : "");
    // One window fewer than would fit, so that an epoch can begin its cuts anywhere within one window's length.
    data->windows = (length - 1) / T;
    if (data->windows > 1) data->windows--;
    return true;
}

// Reads tokens [at, at + count) of the stream into out. False after fail(): unreadable, shortened, or a token >= vocab.
static inline bool data_read(const Data *data, size_t at, size_t count, int vocab, int *out) {
    int low = 0, high = data->count - 1;  // the shard that holds `at` is the last with first <= at
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (data->shards[middle].first <= at) low = middle;
        else high = middle - 1;
    }
    for (const Shard *shard = &data->shards[low]; count > 0; shard++) {
        size_t position = at - shard->first, n = shard->tokens - position;
        if (n > count) n = count;
        size_t wanted = n * (shard->text ? 1 : 2);
        if (shard->text && position + n == shard->tokens) wanted--;  // the end-of-text token is in no file
        unsigned char *bytes = (unsigned char *)allocate(wanted, 1, "a piece of a data file");
        int file = open(shard->path, O_RDONLY);
        ssize_t got = file < 0 ? -1 : pread(file, bytes, wanted, (off_t)(shard->text ? position : SHARD_HEADER * 4 + 2 * position));
        int reason = errno;
        if (file >= 0) close(file);
        for (size_t i = 0; got == (ssize_t)wanted && i < n; i++) {
            out[i] = !shard->text ? bytes[2 * i] | bytes[2 * i + 1] << 8 : i < wanted ? bytes[i] : (int)TOKEN_END_OF_TEXT;
            if (out[i] >= vocab) {
                free(bytes);
                return fail("the data file %s has token %d at position %zu, and the vocabulary has %d (0 to %d); give a larger "
                            "--vocab or other data", shard->path, out[i], position + i, vocab, vocab - 1);
            }
        }
        free(bytes);
        if (got != (ssize_t)wanted)
            return fail("cannot read the data file %s: %s", shard->path,
                        got < 0 ? strerror(reason) : "it is shorter than it was at the start");
        out += n;
        at += n;
        count -= n;
    }
    return true;
}

// The n-th sample of a run, shuffled: T + 1 tokens into out.
static inline bool data_sample(const Data *data, uint64_t n, int vocab, int *out) {
    size_t T = (size_t)data->seq, spare = data->end - data->begin - 1 - data->windows * T;
    uint32_t epoch = (uint32_t)(n / data->windows);
    size_t offset = random_below(random4(data->seed, RANDOM_OFFSET, epoch, 0), spare + 1);
    size_t window = random_permute(n % data->windows, data->windows, data->seed, epoch);
    return data_read(data, data->begin + offset + window * T, T + 1, vocab, out);
}

// Window n of `count` spread evenly over the data, in order, always the same: for validation. count <= windows + 1.
static inline bool data_spread(const Data *data, size_t n, size_t count, int vocab, int *out) {
    size_t T = (size_t)data->seq, all = (data->end - data->begin - 1) / T;
    return data_read(data, data->begin + (size_t)((unsigned __int128)n * all / count) * T, T + 1, vocab, out);
}

#endif

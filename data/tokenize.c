// Turns text files into a .bin shard of tokens: each byte is a token, and each file ends with the end-of-text token.
//
//   make tokenize
//   ./tokenize book.txt book.bin              one file
//   ./tokenize chapter1.txt chapter2.txt book.bin
//
// The trainers read .txt files as they are, so a shard of bytes is needed only where another program wants the format
// (data/README.md). Nothing is written over: the output must not exist.

#include "gpt/data.h"

// Appends the tokens of one file. False after fail().
static bool tokenize(FILE *out, const char *path, uint64_t *tokens) {
    static unsigned char bytes[1 << 16];
    static uint16_t words[1 << 16];
    FILE *in = fopen(path, "rb");
    if (!in) return fail("cannot open %s: %s", path, strerror(errno));
    bool ok = true;
    for (size_t got; ok && (got = fread(bytes, 1, sizeof bytes, in)) > 0;) {
        for (size_t i = 0; i < got; i++) words[i] = bytes[i];
        ok = fwrite(words, sizeof *words, got, out) == got || fail("cannot write the shard: %s", strerror(errno));
        *tokens += got;
        if (*tokens > INT32_MAX - 1)  // the header counts in an int32
            ok = fail("%s makes the shard longer than 2^31 - 1 tokens; make several shards of fewer files", path);
    }
    if (ok && ferror(in)) ok = fail("cannot read %s: %s", path, strerror(errno));
    fclose(in);
    words[0] = TOKEN_END_OF_TEXT;
    if (ok) ok = fwrite(words, sizeof *words, 1, out) == 1 || fail("cannot write the shard: %s", strerror(errno));
    *tokens += 1;
    return ok;
}

int main(int argc, char **argv) {
    int32_t header[SHARD_HEADER] = {SHARD_MAGIC, SHARD_VERSION, 0, BYTE_VOCAB};
    char temporary[PATH_SIZE];
    uint64_t tokens = 0;
    if (argc < 3 || !strcmp(argv[1], "--help")) {
        bool asked = argc > 1 && !strcmp(argv[1], "--help");
        fprintf(asked ? stdout : stderr, "usage: %s TEXT... SHARD.bin   (data/README.md describes shards)\n", argv[0]);
        return !asked;
    }
    const char *path = argv[argc - 1];
    if (!access(path, F_OK)) die("%s exists; it is not written over: name a new file, or remove it", path);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    FILE *out = fopen(temporary, "wbx");
    if (!out) die("cannot write %s: %s", temporary, strerror(errno));
    bool ok = fwrite(header, sizeof header, 1, out) == 1 || fail("cannot write the shard: %s", strerror(errno));
    for (int i = 1; ok && i < argc - 1; i++) ok = tokenize(out, argv[i], &tokens);
    header[2] = (int32_t)tokens;
    if (ok) ok = (!fseek(out, 0, SEEK_SET) && fwrite(header, sizeof header, 1, out) == 1) ||
                 fail("cannot write the shard: %s", strerror(errno));
    if (fclose(out) && ok) ok = fail("cannot write the shard: %s", strerror(errno));
    if (ok) ok = !rename(temporary, path) || fail("cannot name the shard %s: %s", path, strerror(errno));
    if (!ok) {
        unlink(temporary);
        die_of_failure();
    }
    printf("%s: %llu tokens from %d file%s\n", path, (unsigned long long)tokens, argc - 2, argc == 3 ? "" : "s");
    return 0;
}

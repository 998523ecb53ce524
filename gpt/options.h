// The options: one table declares each of them once. The struct, the parser, the range checks, --help, the
// configuration printed at the start and the one saved with a checkpoint all come from it.
#ifndef GPT_OPTIONS_H
#define GPT_OPTIONS_H

#include <stddef.h>
#include <stdint.h>

#include "json.h"

// GROUP(title, 1 if a resumed run takes the values over from the checkpoint)
// OPTION(type, name, llm.c's short flag or "", default, least, most, choices separated by | or "", help)
// On the command line an underscore in a name is a dash. 0 as a size usually means: choose for me.
#define OPTION_TABLE(GROUP, OPTION)                                                                                    \
    GROUP("Data", 1)                                                                                                   \
    OPTION(TEXT, data, "i", "", 0, 0, "", "text files or .bin shards to train on: a file, a folder or a quoted glob")  \
    OPTION(TEXT, val_data, "j", "", 0, 0, "", "the same for validation; none: the end of --data is held out")          \
    OPTION(REAL, val_fraction, "", "0.1", 0, 0.9, "", "how much of --data is held out where --val-data is not given")  \
    GROUP("Model", 1)                                                                                                  \
    OPTION(TEXT, model, "e", "tiny", 0, 0, "", "tiny, d6, d12, d24, d36, d48, or a checkpoint folder to start from")   \
    OPTION(INT, layers, "", "0", 0, 1024, "", "L, number of blocks; 0: as --model says")                               \
    OPTION(INT, heads, "", "0", 0, 1024, "", "NH, attention heads; 0: as --model says")                                \
    OPTION(INT, channels, "", "0", 0, 65536, "", "C, width; 0: as --model says")                                       \
    OPTION(INT, seq, "t", "0", 0, 16777216, "", "T, tokens in a sequence; 0: as --model says")                         \
    OPTION(INT, vocab, "", "0", 0, 16777216, "", "V, tokens known; 0: 257 for text, what a shard says, or 50257")      \
    GROUP("Optimization", 1)                                                                                           \
    OPTION(INT, steps, "x", "4000", 0, 1000000000000, "", "updates in the whole run; 0: train nothing")                \
    OPTION(INT, batch, "b", "8", 1, 1048576, "", "B, sequences computed at once")                                      \
    OPTION(INT, total_batch, "d", "0", 0, 1000000000000, "", "tokens in an update, accumulated; 0: B times T")         \
    OPTION(REAL, lr, "l", "0", 0, 1000, "", "peak learning rate; 0: 0.384 / C, or a tenth of it from a checkpoint")    \
    OPTION(TEXT, lr_schedule, "k", "cosine", 0, 0, "cosine|linear|constant|wsd", "its shape after the warm-up")        \
    OPTION(INT, warmup, "u", "100", 0, 1000000000, "", "steps of warm-up; not given: a tenth of the steps at most")    \
    OPTION(REAL, lr_final, "q", "0.05", 0, 1, "", "the learning rate at the end, as a fraction of the peak")           \
    OPTION(REAL, weight_decay, "c", "0.1", 0, 100, "", "AdamW's decoupled decay, on matrices and embeddings")          \
    OPTION(REAL, beta1, "", "0.9", 0, 0.999999, "", "AdamW's memory of gradients")                                     \
    OPTION(REAL, beta2, "", "0.95", 0, 0.999999, "", "AdamW's memory of squared gradients")                            \
    OPTION(REAL, eps, "", "1e-8", 1e-16, 1, "", "AdamW's epsilon")                                                     \
    OPTION(REAL, grad_clip, "", "1", 0, 1e9, "", "largest norm of the gradient; 0: no limit")                          \
    OPTION(INT, recompute, "r", "1", 0, 2, "", "on a GPU, to save memory the backward computes again 0: nothing, 1: GELU, 2: and layer norms") \
    OPTION(INT, master_weights, "w", "1", 0, 1, "", "on a GPU, 1: fp32 weights beside the bf16 ones; 0: stochastic rounding") \
    OPTION(INT, seed, "", "1337", 0, 9007199254740991, "", "decides initial weights, shuffling and sampling")          \
    GROUP("Reports", 1)                                                                                                \
    OPTION(INT, log_every, "", "10", 1, 1000000000, "", "keep a line on the terminal every so many steps")             \
    OPTION(INT, val_every, "v", "250", 0, 1000000000, "", "validate every so many steps; 0: only at the end")          \
    OPTION(INT, val_steps, "m", "20", 0, 1000000000, "", "batches in a validation; 0: all of the validation data")     \
    OPTION(INT, sample_every, "s", "0", 0, 1000000000, "", "write a sample every so many steps; 0: never")             \
    OPTION(INT, save_every, "n", "500", 0, 1000000000, "", "save a checkpoint every so many steps; 0: only at the end") \
    OPTION(INT, keep, "nk", "3", 0, 1000000000, "", "newest checkpoints to keep; 0: all")                              \
    GROUP("Run", 0)                                                                                                    \
    OPTION(TEXT, out, "o", "run", 0, 0, "", "folder for checkpoints and log.jsonl")                                    \
    OPTION(TEXT, resume, "y", "no", 0, 0, "", "auto: go on from the newest checkpoint in --out; or a checkpoint's folder") \
    OPTION(FLAG, dry_run, "", "0", 0, 1, "", "print parameters, memory, disk and steps, and stop")                     \
    OPTION(TEXT, prompt, "", "", 0, 0, "", "write on from this text; without --data nothing is trained")               \
    OPTION(INT, tokens, "g", "256", 1, 1000000000, "", "tokens to write for a prompt or a sample")                     \
    OPTION(REAL, temperature, "", "0.8", 0, 100, "", "below 1: likelier tokens; above: stranger ones; 0: the likeliest") \
    OPTION(INT, top_k, "", "0", 0, 16777216, "", "draw from the k likeliest tokens only; 0: from all")                 \
    OPTION(REAL, top_p, "", "1", 0, 1, "", "draw from the likeliest tokens that together have this probability")

typedef int64_t OptionInt;
typedef double OptionReal;
typedef bool OptionFlag;
typedef char OptionText[1024];

#define OPTION_TYPE_INT OptionInt
#define OPTION_TYPE_REAL OptionReal
#define OPTION_TYPE_FLAG OptionFlag
#define OPTION_TYPE_TEXT OptionText
#define OPTION_NO_GROUP(title, saved)
#define OPTION_INDEX(type, name, short_name, standard, least, most, choices, help) OPTION_##name,
#define OPTION_FIELD(type, name, short_name, standard, least, most, choices, help) OPTION_TYPE_##type name;

enum { OPTION_TABLE(OPTION_NO_GROUP, OPTION_INDEX) OPTION_COUNT };  // OPTION_batch is the index of --batch

typedef struct {
    OPTION_TABLE(OPTION_NO_GROUP, OPTION_FIELD)
    bool given[OPTION_COUNT];  // set on the command line
} Options;

typedef enum { OPTION_INT, OPTION_REAL, OPTION_FLAG, OPTION_TEXT } OptionType;
typedef struct {
    const char *group;  // a group's row has only its title and `saved`
    bool saved;
    OptionType type;
    const char *name, *short_name, *standard;
    double least, most;
    const char *choices, *help;
    size_t offset;      // in Options
    int index;
} OptionRow;

#define OPTION_GROUP_ROW(title, saved) {title, saved, OPTION_INT, NULL, NULL, NULL, 0, 0, NULL, NULL, 0, -1},
#define OPTION_ROW(type, name, short_name, standard, least, most, choices, help) \
    {NULL, false, OPTION_##type, #name, short_name, standard, least, most, choices, help, offsetof(Options, name), OPTION_##name},
static const OptionRow option_rows[] = {OPTION_TABLE(OPTION_GROUP_ROW, OPTION_ROW)};
enum { OPTION_ROWS = sizeof option_rows / sizeof *option_rows };

// A name as it is typed: dashes for underscores. `text` has room for 32 characters; it is returned.
static inline const char *option_dashed(const OptionRow *row, char *text) {
    snprintf(text, 32, "%s", row->name);
    for (char *c = text; *c; c++)
        if (*c == '_') *c = '-';
    return text;
}

static inline const OptionRow *option_find(const char *name, bool short_name) {
    char dashed[32];
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (row->group) continue;
        if (short_name ? *row->short_name && !strcmp(name, row->short_name) : !strcmp(name, option_dashed(row, dashed))) return row;
    }
    return NULL;
}

static inline const OptionRow *option_row(int index) {
    const OptionRow *row = option_rows;
    while (row->index != index) row++;
    return row;
}

// A value as text, for --help, the printed configuration and messages.
static inline const char *option_text(const Options *o, const OptionRow *row, char *text, size_t size) {
    const char *field = (const char *)o + row->offset;
    if (row->type == OPTION_TEXT) snprintf(text, size, "%s", field);
    if (row->type == OPTION_FLAG) snprintf(text, size, "%s", *(const bool *)field ? "true" : "false");
    if (row->type == OPTION_INT) snprintf(text, size, "%lld", (long long)*(const int64_t *)field);
    if (row->type == OPTION_REAL) json_number_text(*(const double *)field, text);
    return text;
}

// Sets one option from text, checked. False after fail() if the text is no value or out of range.
static inline bool option_set(Options *o, const OptionRow *row, const char *value) {
    char *field = (char *)o + row->offset, *stop, dashed[32];
    option_dashed(row, dashed);
    if (row->type == OPTION_TEXT) {
        if (strlen(value) >= sizeof(OptionText))
            return fail("--%s is %zu characters long; at most %zu fit", dashed, strlen(value), sizeof(OptionText) - 1);
        size_t length = strlen(value);
        bool known = !*row->choices;
        for (const char *choice = row->choices; !known && *choice; choice += strcspn(choice, "|"), choice += *choice == '|')
            known = strcspn(choice, "|") == length && !strncmp(choice, value, length);
        if (!known) return fail("--%s '%s' is not known; it is one of %s", dashed, value, row->choices);
        memcpy(field, value, length + 1);
        return true;
    }
    double number = strtod(value, &stop);
    bool whole = row->type == OPTION_REAL || floor(number) == number;
    if (stop == value || *stop || !isfinite(number) || !whole)
        return fail("--%s '%s' is not a %snumber", dashed, value, row->type == OPTION_REAL ? "" : "whole ");
    if (number < row->least || number > row->most)
        return fail("--%s %s is out of range; it goes from %.16g to %.16g", dashed, value, row->least, row->most);
    if (row->type == OPTION_REAL) *(double *)field = number;
    if (row->type == OPTION_INT) *(int64_t *)field = (int64_t)number;
    if (row->type == OPTION_FLAG) *(bool *)field = number != 0;
    return true;
}

static inline void options_defaults(Options *o) {
    memset(o, 0, sizeof *o);
    for (int i = 0; i < OPTION_ROWS; i++)
        if (!option_rows[i].group && !option_set(o, &option_rows[i], option_rows[i].standard)) die_of_failure();
}

// Levenshtein's distance, to guess what a mistyped option was meant to be.
static inline int option_distance(const char *a, const char *b) {
    int row[33];
    int length = (int)strlen(b);
    for (int j = 0; j <= length; j++) row[j] = j;
    for (int i = 0; a[i]; i++) {
        int diagonal = row[0];
        row[0] = i + 1;
        for (int j = 1; j <= length; j++) {
            int best = diagonal + (a[i] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[length];
}

static inline bool option_unknown(const char *argument) {
    char dashed[32], nearest[32] = "";
    const char *name = argument + strspn(argument, "-");
    int best = strlen(name) > 3 ? 3 : 1 + (int)strlen(name) / 2;  // a short name is soon near to every other
    for (int i = 0; i < OPTION_ROWS; i++)
        if (!option_rows[i].group && option_distance(name, option_dashed(&option_rows[i], dashed)) < best) {
            best = option_distance(name, dashed);
            memcpy(nearest, dashed, sizeof nearest);
        }
    if (*nearest) return fail("unknown option %s; did you mean --%s? --help lists them all", argument, nearest);
    return fail("unknown option %s; --help lists them all%s", argument,
                *argument == '-' ? "" : ", and a file to train on is given as --data FILE");
}

// Takes "--name value", "--name=value", "--flag" and llm.c's "-x value". False after fail().
static inline bool options_parse(Options *o, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        char name[64];
        bool is_long = !strncmp(argv[i], "--", 2);
        const char *start = argv[i] + (is_long ? 2 : argv[i][0] == '-'), *equals = is_long ? strchr(start, '=') : NULL;
        snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - start) : (int)strlen(start), start);
        const OptionRow *row = argv[i][0] == '-' ? option_find(name, !is_long) : NULL;
        if (!row) {
            char typed[80];
            snprintf(typed, sizeof typed, "%.*s", equals ? (int)(equals - argv[i]) : 79, argv[i]);
            return option_unknown(typed);
        }
        const char *value = equals ? equals + 1 : "1";
        if (!equals && row->type != OPTION_FLAG) {
            if (i + 1 == argc) return fail("%s needs a value; --help says which", argv[i]);
            value = argv[++i];
        }
        if (!option_set(o, row, value)) return false;
        o->given[row->index] = true;
    }
    return true;
}

static inline void options_help(FILE *file, const char *program) {
    Options defaults;
    options_defaults(&defaults);
    fprintf(file, "Trains a GPT-2 on text, and writes text with it.\n\n"
            "  %s --data book.txt                      train a small model on a book\n"
            "  %s --data book.txt --resume auto        go on after an interruption\n"
            "  %s --model run --prompt \"Once\"           write with what was trained\n"
            "  %s --data book.txt --dry-run            what would it take?\n\n"
            "In brackets: the default and the range. Short names are those of llm.c.\n", program, program, program, program);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (row->group) { fprintf(file, "\n%s\n", row->group); continue; }
        char name[48], dashed[32], value[1024], range[1200] = "";
        snprintf(name, sizeof name, "--%s%s%s", option_dashed(row, dashed), *row->short_name ? ", -" : "", row->short_name);
        option_text(&defaults, row, value, sizeof value);
        if (row->type == OPTION_INT || row->type == OPTION_REAL)
            snprintf(range, sizeof range, row->most < 1e9 ? " [%s; %.16g to %.16g]" : " [%s; %.16g or more]", value, row->least, row->most);
        else if (*row->choices) snprintf(range, sizeof range, " [%s; %s]", value, row->choices);
        else if (row->type == OPTION_TEXT && *value) snprintf(range, sizeof range, " [%s]", value);
        fprintf(file, "  %-20s %s%s\n", name, row->help, range);
    }
}

// The configuration in force, a group a line, wrapped at `width` columns.
static inline void options_print(FILE *file, const Options *o, int width) {
    int column = 0;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (row->group) {
            fprintf(file, "%s%-12s", i ? "\n" : "", row->group);
            column = 12;
            continue;
        }
        char dashed[32], value[1024] = "", *item = NULL;
        size_t length = 0;
        option_text(o, row, value, sizeof value);
        if (!*value || (row->type == OPTION_FLAG && !strcmp(value, "false"))) continue;
        FILE *text = open_memstream(&item, &length);
        if (!text) die("out of memory: the printed configuration");
        fprintf(text, "  %s ", option_dashed(row, dashed));
        if (strpbrk(value, " \t\r\n\"")) json_write_string(text, value);
        else fputs(value, text);
        fclose(text);
        if (column > 12 && column + (int)length > width) column = fprintf(file, "\n%-12s", "") - 1;
        column += fprintf(file, "%s", item);
        free(item);
    }
    fputc('\n', file);
}

// The options of saved groups as members of a JSON object, each line indented.
static inline void options_write_json(FILE *file, const Options *o) {
    bool saved = false, first = true;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (row->group) { saved = row->saved; continue; }
        if (!saved) continue;
        char value[1024];
        option_text(o, row, value, sizeof value);
        fprintf(file, "%s    \"%s\": ", first ? "" : ",\n", row->name);
        if (row->type == OPTION_TEXT) json_write_string(file, value);
        else fputs(value, file);
        first = false;
    }
    fputc('\n', file);
}

// Takes over saved options that the command line did not give. Unknown names are ignored: a newer version's.
static inline bool options_read_json(Options *o, const Json *saved) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        Json *node = row->group || o->given[row->index] ? NULL : json_get(saved, row->name);
        char value[64];
        if (!node) continue;
        if (node->type == JSON_NUMBER || node->type == JSON_BOOL) snprintf(value, sizeof value, "%.17g", node->number);
        else if (node->type != JSON_STRING) return fail("the saved option %s has no value", row->name);
        if (!option_set(o, row, node->type == JSON_STRING ? node->string : value)) return false;
    }
    return true;
}

#endif

// JSON, as much of it as checkpoints need: parse a text into a tree, look values up, write strings escaped.
//
// Every tree comes from json_parse and is given back with json_free. Numbers are doubles, exact up to 2^53.
// Nesting is limited, so a hostile file cannot overflow the stack. Grammar: RFC 8259, and a little more in numbers (01, .5).
#ifndef GPT_JSON_H
#define GPT_JSON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "error.h"

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct Json {
    JsonType type;
    char *key;            // inside an object: the member's name
    char *string;         // JSON_STRING: the text, with escapes resolved
    double number;        // JSON_NUMBER, JSON_BOOL
    struct Json *child;   // JSON_ARRAY, JSON_OBJECT: the first element
    struct Json *next;    // the next element of the same parent
} Json;

static inline void json_free(Json *node) {
    while (node) {
        Json *next = node->next;
        json_free(node->child);
        free(node->key);
        free(node->string);
        free(node);
        node = next;
    }
}

typedef struct { const char *start, *at, *end; int depth; } JsonReader;

static inline void json_skip_space(JsonReader *r) {
    while (r->at < r->end && strchr(" \t\r\n", *r->at) && *r->at) r->at++;
}

static inline bool json_error(JsonReader *r, const char *expected) {
    return fail("JSON: expected %s at byte %zu", expected, (size_t)(r->at - r->start));
}

static inline bool json_take(JsonReader *r, char c) {
    json_skip_space(r);
    if (r->at == r->end || *r->at != c) return false;
    r->at++;
    return true;
}

static inline bool json_hex4(JsonReader *r, uint32_t *code) {
    *code = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        const char *digits = "0123456789abcdef", *digit;
        if (r->at == r->end || !*r->at || !(digit = strchr(digits, *r->at | (*r->at >= 'A' && *r->at <= 'F' ? 32 : 0))))
            return json_error(r, "four hexadecimal digits");
        *code = *code * 16 + (uint32_t)(digit - digits);
    }
    return true;
}

static inline char *json_put_utf8(char *out, uint32_t code) {
    if (code < 0x80) { *out++ = (char)code; return out; }
    int tail = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const int lead[4] = {0, 0xC0, 0xE0, 0xF0};
    *out++ = (char)(lead[tail] | (int)(code >> (6 * tail)));
    while (tail-- > 0) *out++ = (char)(0x80 | ((code >> (6 * tail)) & 63));
    return out;
}

// Reads a quoted string into a new allocation, *text, that the caller frees. A text holding NUL is refused.
static inline bool json_string(JsonReader *r, char **text) {
    *text = NULL;
    if (!json_take(r, '"')) return json_error(r, "a string in quotes");
    const char *close = r->at;  // an escape never grows when resolved, so the source length is enough
    while (close < r->end && *close != '"') close += *close == '\\' && close + 1 < r->end ? 2 : 1;
    if (close >= r->end) return json_error(r, "a closing quote");
    char *out = *text = (char *)allocate((size_t)(close - r->at) + 1, 1, "a JSON string");
    while (r->at < close) {
        unsigned char c = (unsigned char)*r->at++;
        if (c < 0x20) return json_error(r, "no control characters inside a string");
        if (c != '\\') { *out++ = (char)c; continue; }
        static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
        const char *found = *r->at ? strchr(names, *r->at) : NULL;
        if (found) { *out++ = values[found - names]; r->at++; continue; }
        uint32_t code, low;
        if (*r->at++ != 'u') return json_error(r, "a known escape after the backslash");
        if (!json_hex4(r, &code)) return false;
        if (code >= 0xD800 && code < 0xDC00) {  // a pair of surrogates stands for one code point
            if (close - r->at < 6 || r->at[0] != '\\' || r->at[1] != 'u') return json_error(r, "a second surrogate");
            r->at += 2;
            if (!json_hex4(r, &low)) return false;
            if ((low & 0xFC00) != 0xDC00) return json_error(r, "a second surrogate");
            code = 0x10000 + ((code - 0xD800) << 10) + ((low - 0xDC00) & 0x3FF);
        }
        else if (code >= 0xDC00 && code < 0xE000) return json_error(r, "a first surrogate");
        if (code == 0) return json_error(r, "no NUL inside a string");
        out = json_put_utf8(out, code);
    }
    r->at = close + 1;
    return true;
}

static inline bool json_value(JsonReader *r, Json *node);

static inline bool json_elements(JsonReader *r, Json *parent, char close) {
    if (++r->depth > 64) return json_error(r, "at most 64 levels of nesting");
    Json **tail = &parent->child;
    for (bool first = true; !json_take(r, close); first = false) {
        if (!first && !json_take(r, ',')) return json_error(r, "a comma or a closing bracket");
        Json *node = *tail = (Json *)allocate(1, sizeof *node, "a JSON value");
        tail = &node->next;
        if (close == '}') {
            if (!json_string(r, &node->key)) return false;
            if (!json_take(r, ':')) return json_error(r, "a colon after the name");
        }
        if (!json_value(r, node)) return false;
    }
    r->depth--;
    return true;
}

static inline bool json_word(JsonReader *r, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(r->end - r->at) < length || memcmp(r->at, word, length)) return false;
    r->at += length;
    return true;
}

static inline bool json_value(JsonReader *r, Json *node) {
    json_skip_space(r);
    if (json_take(r, '{')) { node->type = JSON_OBJECT; return json_elements(r, node, '}'); }
    if (json_take(r, '[')) { node->type = JSON_ARRAY; return json_elements(r, node, ']'); }
    if (r->at < r->end && *r->at == '"') { node->type = JSON_STRING; return json_string(r, &node->string); }
    if (json_word(r, "null")) return true;
    node->type = JSON_BOOL;
    if (json_word(r, "true")) { node->number = 1; return true; }
    if (json_word(r, "false")) return true;
    node->type = JSON_NUMBER;
    char digits[64], *stop;
    size_t length = 0;  // copied, because strtod needs an end and the text has none
    while (length < sizeof digits - 1 && r->at + length < r->end && r->at[length] && strchr("+-.eE0123456789", r->at[length])) {
        digits[length] = r->at[length];
        length++;
    }
    digits[length] = 0;
    node->number = strtod(digits, &stop);
    if (length == 0 || *stop || digits[0] == '+') return json_error(r, "a value");
    r->at += length;
    return true;
}

// Returns the tree, or NULL after fail().
static inline Json *json_parse(const char *text, size_t size) {
    JsonReader reader = {text, text, text + size, 0};
    Json *root = (Json *)allocate(1, sizeof *root, "a JSON value");
    bool ok = json_value(&reader, root);
    json_skip_space(&reader);
    if (ok && reader.at != reader.end) ok = json_error(&reader, "nothing more");
    if (ok) return root;
    json_free(root);
    return NULL;
}

static inline Json *json_get(const Json *object, const char *key) {
    for (Json *node = object && object->type == JSON_OBJECT ? object->child : NULL; node; node = node->next)
        if (!strcmp(node->key, key)) return node;
    return NULL;
}

static inline double json_number_or(const Json *object, const char *key, double otherwise) {
    Json *node = json_get(object, key);
    return node && (node->type == JSON_NUMBER || node->type == JSON_BOOL) ? node->number : otherwise;
}

static inline const char *json_string_or(const Json *object, const char *key, const char *otherwise) {
    Json *node = json_get(object, key);
    return node && node->type == JSON_STRING ? node->string : otherwise;
}

// The shortest text that reads back as the same number; `null` for what JSON cannot say. `text` has room for 32 characters.
static inline const char *json_number_text(double value, char *text) {
    strcpy(text, "null");
    for (int digits = 6; isfinite(value) && digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    return text;
}

// Writes `text` in quotes. Bytes of UTF-8 pass through.
static inline void json_write_string(FILE *file, const char *text) {
    fputc('"', file);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') fprintf(file, "\\%c", *c);
        else if (*c == '\n') fputs("\\n", file);
        else if (*c < 0x20) fprintf(file, "\\u%04x", *c);
        else fputc(*c, file);
    }
    fputc('"', file);
}

#endif

// Errors, said once and in one sentence.
//
// A function that can fail on what a user gave it returns false (or NULL) after fail("what was found, what was
// expected, what to do"). The caller passes that on, or ends the program with die_of_failure(). die() is for
// places that have nobody to tell. assert() is for our own mistakes only.
#ifndef GPT_ERROR_H
#define GPT_ERROR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#define PRINTF_LIKE(format_at, args_at) __attribute__((format(printf, format_at, args_at)))

enum { PATH_SIZE = 4096 };  // longest path, with its NUL

// The sentence of the last fail(). A program in C++ may have several source files, which share it.
#ifdef __cplusplus
inline
#else
static
#endif
char error_text[2048];

// Remembers the sentence and returns false, so that `return fail(...)` reads well.
PRINTF_LIKE(1, 2) static inline bool fail(const char *format, ...) {
    char text[sizeof error_text];  // apart, because an argument may be error_text itself
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(error_text, sizeof error_text, "%s", text);
    return false;
}

PRINTF_LIKE(1, 2) static inline void warn(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fputs("warning: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

__attribute__((noreturn)) static inline void die_of_failure(void) {
    fflush(stdout);
    fprintf(stderr, "error: %s\n", error_text);
    exit(1);
}

#define die(...) (fail(__VA_ARGS__), die_of_failure())

// calloc that never returns NULL; `what` names the memory in the error. The caller frees.
static inline void *allocate(size_t count, size_t element_size, const char *what) {
    void *memory = calloc(count ? count : 1, element_size);
    if (!memory)
        die("out of memory: %s needs %.1f MiB; a smaller --batch, --seq or model needs less", what,
            (double)count * (double)element_size / 1048576.0);
    return memory;
}

#endif

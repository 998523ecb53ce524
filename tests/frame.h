// The frame of the tests in C. A file that includes it declares tests with TEST(name) { ... } and runs them in its main with
// run_tests(). One line a test: "ok - NAME", "not ok - NAME: reason" or "skip - NAME: reason".
//
//   test_host               all tests                test_host data      those with "data" in the name
//   TEST_SEED=7 test_host   with the same draws      (the seed of every run is printed)
#ifndef FRAME_H
#define FRAME_H

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gpt/error.h"

static struct { const char *name; void (*body)(void); } tests[100];
static int test_count;
static jmp_buf test_end;
static bool in_child;  // in a forked process that runs a part of a test
static char failure[4096];

#define TEST(test)                                                                                                     \
    static void test_##test(void);                                                                                     \
    __attribute__((constructor)) static void add_##test(void) {                                                        \
        tests[test_count].name = #test;                                                                                \
        tests[test_count++].body = test_##test;                                                                        \
    }                                                                                                                  \
    static void test_##test(void)

// CHECK(condition, "why, as for printf", ...) ends the test if the condition does not hold; SKIP("why") ends it, too.
#define CHECK(condition, ...) do { if (!(condition)) check_failed(__FILE__, __LINE__, #condition, " " __VA_ARGS__); } while (0)
#define SKIP(why) do { snprintf(failure, sizeof failure, "%s", why); longjmp(test_end, 2); } while (0)

__attribute__((noreturn)) PRINTF_LIKE(4, 5) static void check_failed(const char *file, int line, const char *condition, const char *format, ...) {
    char why[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    snprintf(failure, sizeof failure, "%.1500s%s (%s:%d)", condition, why, file, line);
    if (!in_child) longjmp(test_end, 1);
    printf("%s", failure);
    fflush(stdout);
    _exit(99);
}

// Random numbers for the tests, of another kind than those under test: splitmix64.
static uint64_t draw_state;
static uint64_t draw(void) {
    uint64_t z = draw_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static double draw_unit(void) { return ((double)(draw() >> 11) + 0.5) / 9007199254740992.0; }

// Runs all tests, or those with `part` in their name; `before` and `after` (or NULL) stand
// around each; `after` may fail the test. The draws of a test
// depend on the seed and its name only, so that it can be run again alone. Returns how many failed.
static int run_tests(const char *part, void (*before)(const char *name), void (*after)(const char *name)) {
    static int i, failed;  // static, because longjmp leaves local ones undefined
    const char *given = getenv("TEST_SEED");
    static uint64_t seed;
    seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    printf("# TEST_SEED=%llu\n", (unsigned long long)seed);
    for (i = 0; i < test_count; i++) {
        const char *name = tests[i].name;
        if (part && !strstr(name, part)) continue;
        draw_state = seed;
        for (const char *c = name; *c; c++) draw_state = (draw_state ^ (unsigned char)*c) * 0x100000001B3u;
        if (before) before(name);
        int end = setjmp(test_end);
        if (end == 0) {
            tests[i].body();
            if (after) after(tests[i].name);
        }
        printf("%s - %s%s%s\n", end == 0 ? "ok" : end == 1 ? "not ok" : "skip", tests[i].name, end ? ": " : "", end ? failure : "");
        fflush(stdout);
        failed += end == 1;
    }
    return failed;
}

#endif

// Unit tests of the headers in gpt/: everything but the arithmetic. One line a test, exit status 1 if any failed.
//
//   gcc -std=gnu11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -fopenmp -I. tests/test_host.c -o test_host -lm
//   ./test_host               all tests                ./test_host data      those with "data" in the name
//   TEST_SEED=7 ./test_host   with the same draws      (the seed of every run is printed)
//
// Expected values were worked out apart from the code under test: by hand, from published tables, or by a slow and
// obvious second way. Statistical limits are set for a false alarm about once in 10^9 checks.

#include <ftw.h>
#include <setjmp.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "gpt/run.h"

// ---------------------------------------------------------------------------
// The frame: TEST(name) { ... } declares a test, CHECK(condition, "why", ...) ends it if the condition does not hold

static struct { const char *title; void (*body)(void); } tests[100];
static int test_count;
static jmp_buf test_end;
static bool in_child;  // in a forked process that runs a part of a test
static char failure[4096];

#define TEST(name)                                                                                                     \
    static void test_##name(void);                                                                                     \
    __attribute__((constructor)) static void add_##name(void) {                                                        \
        tests[test_count].title = #name;                                                                               \
        tests[test_count++].body = test_##name;                                                                        \
    }                                                                                                                  \
    static void test_##name(void)

#define CHECK(condition, ...) do { if (!(condition)) check_failed(__LINE__, #condition, " " __VA_ARGS__); } while (0)

#define SKIP(why) do { snprintf(failure, sizeof failure, "%s", why); longjmp(test_end, 2); } while (0)

// The call has to return false after fail() with a sentence that contains `part`.
#define REFUSED(call, part) do {                                                                                       \
        *error_text = 0;                                                                                               \
        CHECK(!(call), "was accepted");                                                                                \
        CHECK(strlen(error_text) > 15 && strstr(error_text, part), "no '%s' in: %s", part, error_text);                \
    } while (0)

__attribute__((noreturn)) PRINTF_LIKE(3, 4) static void check_failed(int line, const char *condition, const char *format, ...) {
    char why[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    snprintf(failure, sizeof failure, "%s%s (tests/test_host.c:%d)", condition, why, line);
    if (!in_child) longjmp(test_end, 1);
    printf("%s", failure);
    fflush(stdout);
    _exit(99);
}

// An allocation that is too large returns NULL under the address sanitizer, too, instead of ending the program.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

// Runs body in a forked process. Returns its exit status; child_output is what it wrote to stdout and stderr.
static char child_output[1 << 16];

static int run_child(void (*body)(void)) {
    int ends[2], status = 0;
    size_t length = 0;
    fflush(NULL);
    CHECK(!pipe(ends));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        in_child = true;
        dup2(ends[1], 1), dup2(ends[1], 2);
        close(ends[0]), close(ends[1]);
        body();
        fflush(NULL);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; length < sizeof child_output - 1 && (got = read(ends[0], child_output + length, sizeof child_output - 1 - length)) > 0;)
        length += (size_t)got;
    child_output[length] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Random numbers for the tests, of another kind than those under test: splitmix64.
static uint64_t draw_state;

static uint64_t draw(void) {
    uint64_t z = draw_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static size_t draw_below(size_t n) { return (size_t)(draw() % n); }
static double draw_unit(void) { return ((double)(draw() >> 11) + 0.5) / 9007199254740992.0; }

enum { SIGMAS = 6 };  // a normal variable is beyond 6 sigma twice in 10^9 times

// The same limit for a chi-square variable, by Wilson and Hilferty's approximation.
static double chi_square_limit(int freedom) {
    double v = 2.0 / (9.0 * freedom);
    return freedom * pow(1 - v + SIGMAS * sqrt(v), 3);
}

static bool uniform(const double *counts, int n, double expected) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (counts[i] - expected) * (counts[i] - expected) / expected;
    return sum < chi_square_limit(n - 1);
}

// Every test works in a folder of its own. at() formats a path; sixteen of them stay valid.
PRINTF_LIKE(1, 2) static const char *at(const char *format, ...) {
    static char paths[16][1024];
    static int next;
    char *path = paths[next++ % 16];
    va_list args;
    va_start(args, format);
    vsnprintf(path, 1024, format, args);
    va_end(args);
    return path;
}

static const char *put(const char *path, const void *data, size_t size) {
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(data, 1, size, file) == size && !fclose(file), "%s: %s", path, strerror(errno));
    return path;
}

static const char *put_text(const char *path, const char *text) { return put(path, text, strlen(text)); }

// The file's bytes and a NUL, for the caller to free.
static char *get(const char *path, size_t *size) {
    struct stat info;
    FILE *file = fopen(path, "rb");
    CHECK(file && !fstat(fileno(file), &info), "%s: %s", path, strerror(errno));
    char *data = malloc((size_t)info.st_size + 1);
    *size = fread(data, 1, (size_t)info.st_size, file);
    data[*size] = 0;
    fclose(file);
    return data;
}

static bool exists(const char *path) { return !access(path, F_OK); }

static const char *new_folder(const char *path) {
    CHECK(!mkdir(path, 0777), "%s: %s", path, strerror(errno));
    return path;
}

// ---------------------------------------------------------------------------
// error.h

static void die_loudly(void) { die("there were %d bolts instead of %d", 3, 4); }
static volatile size_t far_too_many = SIZE_MAX / 8;
static void run_out_of_memory(void) { allocate(far_too_many, 16, "the moon"); }

TEST(error_sentences) {
    CHECK(!fail("first %d", 1) && !strcmp(error_text, "first 1"));
    CHECK(!fail("second after %s", error_text) && !strcmp(error_text, "second after first 1"));
    CHECK(run_child(die_loudly) == 1 && !strcmp(child_output, "error: there were 3 bolts instead of 4\n"), "said: %s", child_output);
    CHECK(run_child(run_out_of_memory) == 1 && strstr(child_output, "error: out of memory: the moon"), "said: %s", child_output);
    free(allocate(0, 4, "nothing"));
}

// ---------------------------------------------------------------------------
// random.h

TEST(random_known_answers) {  // kat_vectors of the Random123 library
    static const struct { uint32_t c[4], key[2], out[4]; } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (int i = 0; i < 3; i++) {
        const uint32_t *c = known[i].c, *key = known[i].key;
        Random4 r = philox4x32(c[0], c[1], c[2], c[3], key[0], key[1]);
        CHECK(!memcmp(r.word, known[i].out, sizeof r.word), "vector %d", i);
        r = random4((uint64_t)key[1] << 32 | key[0], c[3], c[2], (uint64_t)c[1] << 32 | c[0]);
        CHECK(!memcmp(r.word, known[i].out, sizeof r.word), "vector %d by seed, purpose, step and index", i);
    }
}

TEST(random_uniform_is_inside_0_and_1) {
    static const uint32_t extremes[] = {0, 1, 255, 256, 0x7fffffff, 0x80000000, 0xfffffe00, 0xfffffeff, 0xffffff00, 0xffffffff};
    for (int i = 0; i < 100000; i++) {
        uint32_t word = i < 10 ? extremes[i] : (uint32_t)draw();
        float u = random_to_uniform(word);
        CHECK(u > 0 && u < 1, "%08x gives %.9g", word, u);
        CHECK(fabs(u - (word + 0.5) / 4294967296.0) <= 1.0 / 4194304, "%08x gives %.9g", word, u);
    }
}

TEST(random_below) {
    Random4 zero = {{0, 0, 0, 0}}, ones = {{~0u, ~0u, ~0u, ~0u}}, half = {{0x80000000, 0, 0, 0}};
    CHECK(random_below(zero, 10) == 0 && random_below(ones, 10) == 9 && random_below(half, 10) == 5);
    CHECK(random_below(ones, 1) == 0 && random_below(ones, UINT64_MAX) == UINT64_MAX - 1);
    double counts[7] = {0};
    uint64_t seed = draw();
    for (uint32_t i = 0; i < 70000; i++) counts[random_below(random4(seed, RANDOM_OFFSET, i, 0), 7)]++;
    CHECK(uniform(counts, 7, 10000));
}

TEST(random_normal_distribution) {
    enum { N = 1 << 20, BINS = 64 };
    float *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
    uint64_t seed = draw();
    random_normal(x, N, 1, seed, RANDOM_INIT, 5);
    double sum = 0, square = 0, counts[BINS] = {0}, lag[5] = {0};
    for (int i = 0; i < N; i++) {
        double z = x[i];
        int bin = (int)(BINS * 0.5 * erfc(-z / sqrt(2)));  // the bins are equally likely
        counts[bin < BINS ? bin : BINS - 1]++;
        sum += z, square += z * z;
        for (int k = 1; k < 5 && i >= k; k++) lag[k] += z * x[i - k];
    }
    double root = sqrt(N);  // the variance of z is 1, of z^2 2
    CHECK(fabs(sum / root) < SIGMAS && fabs(square - N) / root < SIGMAS * sqrt(2), "mean %g, variance %g", sum / N, square / N);
    CHECK(uniform(counts, BINS, N / BINS), "the shape is not normal");
    for (int k = 1; k < 5; k++) CHECK(fabs(lag[k] / root) < SIGMAS, "numbers %d apart hang together", k);
    for (size_t n = 0; n < 10; n++) {  // any count, a prefix of the same numbers, and nothing behind it
        for (int i = 0; i < 11; i++) y[i] = 77;
        random_normal(y, n, 2, seed, RANDOM_INIT, 5);
        for (size_t i = 0; i < n; i++) CHECK(y[i] == 2 * x[i]);
        CHECK(y[n] == 77);
    }
    for (int k = 0; k < 3; k++) {
        int same = 0;
        random_normal(y, 1000, 1, seed ^ (k == 0), k == 1 ? RANDOM_SAMPLE : RANDOM_INIT, k == 2 ? 6 : 5);
        for (int i = 0; i < 1000; i++) same += x[i] == y[i];
        CHECK(same < 5, "seed, purpose and step each have to change the numbers (%d)", k);
    }
    free(x), free(y);
}

TEST(random_permute_is_a_shuffle) {
    static bool seen[65537];
    for (uint64_t n = 1; n <= 65537; n = n < 300 ? n + 1 : n < 4095 ? 4095 : n < 4097 ? n + 1 : n < 65537 ? 65537 : n + 1) {
        uint64_t seed = draw();
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t to = random_permute(i, n, seed, (uint32_t)n);
            CHECK(to < n && !seen[to], "n %llu: %llu goes to %llu", (unsigned long long)n, (unsigned long long)i, (unsigned long long)to);
            seen[to] = true;
        }
    }
    int same_step = 0, same_seed = 0, fixed = 0, neighbours = 0;  // each near 1 in a random permutation, near n in a poor one
    uint64_t seed = draw();
    for (uint64_t i = 0; i < 300; i++) {
        uint64_t to = random_permute(i, 300, seed, 1);
        same_step += to == random_permute(i, 300, seed, 2);
        same_seed += to == random_permute(i, 300, seed + 1, 1);
        fixed += to == i;
        neighbours += i > 0 && to == random_permute(i - 1, 300, seed, 1) + 1;
    }
    CHECK(same_step < 20 && same_seed < 20 && fixed < 20 && neighbours < 20, "%d %d %d %d", same_step, same_seed, fixed, neighbours);
    double counts[50] = {0};
    for (uint32_t step = 0; step < 20000; step++) counts[random_permute(3, 50, seed, step)]++;
    CHECK(uniform(counts, 50, 400), "the place of 3 is not uniform");
}

// ---------------------------------------------------------------------------
// schedule.h

static const char *const shapes[] = {"cosine", "linear", "constant", "wsd"};

TEST(schedule_known_values) {  // peak 2, final 0.1 of it, 20 steps of warm-up, 100 steps
    static const struct { long long step; double value[4]; } known[] = {
        {0, {0.1, 0.1, 0.1, 0.1}},  // a twentieth of the peak
        {9, {1, 1, 1, 1}},
        {19, {2, 2, 2, 2}},
        {20, {2, 2, 2, 2}},
        {40, {1.7363961030678928, 1.55, 2, 2}},   // a quarter done: (1 + sqrt(1/2)) / 2 of the way down is left in the cosine
        {60, {1.1, 1.1, 2, 2}},
        {80, {0.4636038969321072, 0.65, 2, 2}},   // here wsd begins to fall, over 20 steps
        {85, {0.3516773489292920, 0.5375, 2, 1.1}},       // a quarter of the fall: 1 - sqrt(1/4) is left
        {99, {0.2006938673833492, 0.2225, 2, 0.2455770179343866}},
        {100, {0.2, 0.2, 2, 0.2}},
        {100000, {0.2, 0.2, 2, 0.2}}};
    for (int shape = 0; shape < 4; shape++)
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
            Schedule s = {shapes[shape], 2, 0.1, 20, 100};
            double rate = schedule_rate(&s, known[i].step);
            CHECK(fabs(rate - known[i].value[shape]) < 1e-6, "%s at step %lld: %.12g", shapes[shape], known[i].step, rate);
        }
}

TEST(schedule_edges) {
    for (int shape = 0; shape < 4; shape++) {
        Schedule no_warmup = {shapes[shape], 3, 0.5, 0, 10}, all_warmup = {shapes[shape], 3, 0.5, 10, 10}, none = {shapes[shape], 3, 0.5, 0, 0};
        CHECK(schedule_rate(&no_warmup, 0) == 3);
        CHECK(fabs(schedule_rate(&all_warmup, 4) - 1.5) < 1e-12 && schedule_rate(&all_warmup, 9) == 3);
        double end = schedule_rate(&all_warmup, 10), alone = schedule_rate(&none, 0);
        CHECK(end >= 1.5 && end <= 3 && alone >= 1.5 && alone <= 3, "%s: %g %g", shapes[shape], end, alone);
        Schedule cut_short = {shapes[shape], 3, 0.5, 10, 4};  // ends before the warm-up does
        for (int step = 0; step < 10; step++) CHECK(fabs(schedule_rate(&cut_short, step) - 0.3 * (step + 1)) < 1e-12);
        CHECK(isfinite(schedule_rate(&cut_short, 10)) && schedule_rate(&cut_short, 10) >= 1.5 && schedule_rate(&cut_short, 10) <= 3);
    }
}

TEST(schedule_rises_then_falls) {
    for (int i = 0; i < 400; i++) {
        long long steps = 2 + (long long)draw_below(300), warmup = (long long)draw_below((size_t)steps);
        Schedule s = {shapes[i % 4], 0.001 + draw_unit(), draw_unit(), warmup, steps};
        double least = s.peak * s.final * (1 - 1e-12), most = s.peak * (1 + 1e-12), before = 0;
        CHECK(fabs(schedule_rate(&s, warmup) - s.peak) < 1e-12, "%s, warm-up %lld of %lld: not at the peak after it", s.shape, warmup, steps);
        for (long long step = 0; step < steps + 3; step++) {
            double rate = schedule_rate(&s, step);
            CHECK(step < warmup ? rate > before && rate <= most : rate >= least && rate <= most, "%s step %lld: %g", s.shape, step, rate);
            CHECK(step <= warmup || rate <= before * (1 + 1e-12), "%s, warm-up %lld of %lld, rises at step %lld", s.shape, warmup, steps, step);
            before = rate;
        }
    }
}

// ---------------------------------------------------------------------------
// sample.h

TEST(sample_temperature_0_top_k_and_top_p) {
    float logits[6] = {1, 5, -2, 5, 4, -INFINITY};
    for (int i = 0; i < 100; i++) {
        float u = random_to_uniform((uint32_t)draw());
        CHECK(sample_token(logits, 6, 0, 0, 1, u) == 1 && sample_token(logits, 6, 2, 1, 1, u) == 1, "of equal ones the first");
        CHECK(sample_token(logits, 6, 2, 0, 1e-12, u) == 1 && sample_token(logits, 1, 2, 5, 0.5, u) == 0 && sample_token(logits, 6, 1e-300, 0, 1, u) % 2 == 1);
    }
    // Probabilities, by token: 0.15, 0.5, 0.05, 0.3. In order of likelihood the tokens are 1, 3, 0, 2.
    const float p[4] = {logf(0.15f), logf(0.5f), logf(0.05f), logf(0.3f)};
    static const struct { int k; double top_p; float u; int token; } known[] = {
        {0, 1, 0.49f, 1}, {0, 1, 0.51f, 3}, {0, 1, 0.79f, 3}, {0, 1, 0.81f, 0}, {0, 1, 0.94f, 0}, {0, 1, 0.96f, 2}, {0, 1, 0.9999999f, 2},
        {0, 0, 0.999f, 1}, {0, 0.49, 0.999f, 1}, {0, 0.51, 0.999f, 3}, {0, 0.75, 0.62f, 1}, {0, 0.75, 0.63f, 3}, {0, 0.75, 0.9999999f, 3},
        {0, 0.81, 0.84f, 3}, {0, 0.81, 0.85f, 0}, {0, 0.96, 0.999f, 2}, {1, 1, 0.999f, 1}, {2, 1, 0.62f, 1}, {2, 1, 0.63f, 3},
        {2, 1, 0.9999999f, 3}, {3, 1, 0.999f, 0}, {9, 1, 0.999f, 2}, {2, 0.6, 0.9f, 1}, {2, 0.65, 0.62f, 1}, {2, 0.65, 0.63f, 3}};  // of two tokens left, 0.5 of 0.8 is 0.625
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        int token = sample_token(p, 4, 1, known[i].k, known[i].top_p, known[i].u);
        CHECK(token == known[i].token, "top_k %d, top_p %g, at %g: %d", known[i].k, known[i].top_p, known[i].u, token);
    }
}

TEST(sample_frequencies_follow_softmax) {
    enum { V = 9, N = 100000 };
    for (int round = 0; round < 5; round++) {
        static const double temperatures[] = {1, 0.6, 2.5, 1.5, 0.9}, top_p[] = {1, 1, 1, 1, 0.7};
        int top_k = round == 3 ? 4 : 0;
        float logits[V];
        double weight[V], expected[V], counts[V] = {0}, total = 0, chi = 0;
        int kinds = 0;
        for (int i = 0; i < V; i++) logits[i] = (float)(3 * draw_unit() - 1.5);
        for (int i = 0; i < V; i++) total += weight[i] = exp(logits[i] / temperatures[round]);
        for (int i = 0; i < V; i++) {  // a token stays if those likelier than it are fewer than k, and together below p
            double likelier = 0;
            int rank = 0;
            for (int j = 0; j < V; j++) if (logits[j] > logits[i]) likelier += weight[j] / total, rank++;
            expected[i] = (top_k == 0 || rank < top_k) && likelier < top_p[round] ? weight[i] : 0;
        }
        total = 0;
        for (int i = 0; i < V; i++) total += expected[i];
        for (int i = 0; i < V; i++) expected[i] *= N / total;
        for (int i = 0; i < N; i++)
            counts[sample_token(logits, V, temperatures[round], top_k, top_p[round], (float)((double)(draw() >> 41) + 0.5) / 8388608)]++;
        for (int i = 0; i < V; i++) {
            CHECK(expected[i] > 0 || counts[i] == 0, "round %d: token %d was left out, and drawn", round, i);
            if (expected[i] > 0) kinds++, chi += (counts[i] - expected[i]) * (counts[i] - expected[i]) / expected[i];
        }
        CHECK(kinds == 1 || chi < chi_square_limit(kinds - 1), "chi-square %g of %d tokens in round %d", chi, kinds, round);
    }
}

TEST(sample_never_draws_nan_or_minus_infinity) {
    enum { V = 40 };
    float logits[V], nothing[V];
    for (int i = 0; i < V; i++) nothing[i] = NAN;
    for (int i = 0; i < 20000; i++) {
        for (int t = 0; t < V; t++) logits[t] = t == i % V ? 0 : draw() % 3 == 0 ? NAN : draw() % 2 ? -INFINITY : (float)(20 * draw_unit() - 10);
        float u = i % 3 == 0 ? 1 - 0x1p-24f : i % 3 == 1 ? 0x1p-25f : (float)(draw_unit() * 0.999999);
        int t = sample_token(logits, V, i % 5 ? 3 * draw_unit() : 0, i % 7 ? 0 : (int)draw_below(50), i % 2 ? 1 : draw_unit(), u);
        CHECK(t >= 0 && t < V && !isnan(logits[t]) && logits[t] != -INFINITY, "token %d", t);
    }
    for (int kind = 0; kind < 3; kind++) {
        for (int i = 0; i < V; i++) nothing[i] = kind == 0 ? NAN : kind == 1 ? -INFINITY : INFINITY;
        int a = sample_token(nothing, V, 1, 0, 1, 0.5f), b = sample_token(nothing, V, 0, 3, 0.5, 0.9f);
        CHECK(a >= 0 && a < V && b >= 0 && b < V, "%d %d", a, b);
    }
}

// ---------------------------------------------------------------------------
// options.h

// Parses the arguments given, up to NULL.
static bool parse(Options *o, ...) {
    char *argv[16] = {(char *)"program"};
    int argc = 1;
    va_list args;
    va_start(args, o);
    while (argc < 16 && (argv[argc] = va_arg(args, char *))) argc++;
    va_end(args);
    return options_parse(o, argc, argv);
}

static double number_of(const Options *o, const OptionRow *row) {
    const char *field = (const char *)o + row->offset;
    return row->type == OPTION_INT ? (double)*(const int64_t *)field : row->type == OPTION_FLAG ? *(const bool *)field : *(const double *)field;
}

static const char *typed(const OptionRow *row) {  // "--total-batch"
    static char text[80];
    snprintf(text, sizeof text, "--%s", row->name);
    for (char *c = text; *c; c++) *c = *c == '_' ? '-' : *c;
    return text;
}

#define FOR_EACH_OPTION(row) for (const OptionRow *row = option_rows; row < option_rows + OPTION_ROWS; row++) if (!row->group)

TEST(options_every_number) {
    static const char *const nonsense[] = {"", " ", "nan", "inf", "1e999", "12abc", "1,5", "1 2", "--", "0x"};
    FOR_EACH_OPTION(row) if (row->type == OPTION_INT || row->type == OPTION_REAL) {
        Options o, before;
        options_defaults(&o);
        before = o;
        const char *name = typed(row);
        bool real = row->type == OPTION_REAL;
        char text[64], joined[128], shorter[8];
        CHECK(number_of(&o, row) == strtod(row->standard, NULL) && number_of(&o, row) >= row->least && number_of(&o, row) <= row->most, "%s", name);
        for (int i = 0; i < 2; i++) {
            double bound = i ? row->most : row->least, outside = real ? nextafter(bound, i ? INFINITY : -INFINITY) : bound + (i ? 1 : -1);
            snprintf(text, sizeof text, "%.17g", bound);
            CHECK(parse(&o, name, text, NULL) && number_of(&o, row) == bound && o.given[row->index], "%s %s: %s", name, text, error_text);
            o = before;
            snprintf(joined, sizeof joined, "%s=%s", name, text);
            CHECK(parse(&o, joined, NULL) && number_of(&o, row) == bound && o.given[row->index], "%s", joined);
            o = before;
            snprintf(shorter, sizeof shorter, "-%s", row->short_name);
            CHECK(!*row->short_name || (parse(&o, shorter, text, NULL) && number_of(&o, row) == bound), "%s %s", shorter, text);
            o = before;
            snprintf(text, sizeof text, "%.17g", outside);
            REFUSED(parse(&o, name, text, NULL), name);
            double least = -1, most = -1;
            const char *from = strstr(error_text, "from ");
            CHECK(from && sscanf(from, "from %lf to %lf", &least, &most) == 2 && least == row->least && most == row->most, "bounds in: %s", error_text);
        }
        for (size_t i = 0; i < sizeof nonsense / sizeof *nonsense; i++) REFUSED(parse(&o, name, nonsense[i], NULL), name);
        snprintf(text, sizeof text, "%.0f.5", row->least);
        if (!real) REFUSED(parse(&o, name, text, NULL), "whole");
        REFUSED(parse(&o, name, NULL), name);
        CHECK(!memcmp(&o, &before, sizeof o), "a refused %s changed something", name);
    }
}

TEST(options_every_text_and_flag) {
    static char full[1024], too_long[1025];
    memset(full, 'x', 1023), memset(too_long, 'x', 1024);
    FOR_EACH_OPTION(row) if (row->type == OPTION_TEXT || row->type == OPTION_FLAG) {
        Options o;
        options_defaults(&o);
        const char *name = typed(row), *field = (const char *)&o + row->offset;
        char joined[128], shorter[8];
        snprintf(shorter, sizeof shorter, "-%s", row->short_name);
        snprintf(joined, sizeof joined, "%s=%s", name, row->type == OPTION_FLAG ? "0" : *row->choices ? "wsd" : "a=b");
        if (row->type == OPTION_FLAG) {
            CHECK(parse(&o, name, "--seed", "5", NULL) && number_of(&o, row) == 1 && o.seed == 5 && o.given[row->index], "%s", name);
            CHECK(parse(&o, joined, NULL) && number_of(&o, row) == 0, "%s", joined);
            continue;
        }
        CHECK(!strcmp(field, row->standard), "%s", name);
        REFUSED(parse(&o, name, too_long, NULL), "1023");
        REFUSED(parse(&o, name, NULL), name);
        CHECK(parse(&o, joined, NULL) && !strcmp(field, strchr(joined, '=') + 1) && o.given[row->index], "%s", joined);
        if (*row->choices) {
            static const char *const no_choice[] = {"", "cos", "cosine|linear", "cosines"};
            for (int i = 0; i < 4; i++) REFUSED(parse(&o, name, no_choice[i], NULL), row->choices);
            for (size_t i = 0; i < 4; i++) CHECK(parse(&o, name, shapes[i], NULL) && !strcmp(field, shapes[i]), "%s", shapes[i]);
            continue;
        }
        CHECK(parse(&o, name, full, NULL) && !strcmp(field, full) && parse(&o, name, "", NULL) && !*field, "%s", name);
        CHECK(parse(&o, name, "--seed", NULL) && !strcmp(field, "--seed") && !o.given[OPTION_seed], "%s takes what follows", name);
        CHECK(!*row->short_name || (parse(&o, shorter, "s", NULL) && !strcmp(field, "s")), "%s", shorter);
    }
}

TEST(options_unknown_names) {
    static const char *const odd[] = {"-", "--", "---", "--=", "-Q", "", "=", "--steps-", "-steps"};
    Options o;
    char long_name[4000];
    options_defaults(&o);
    REFUSED(parse(&o, "--stpes", "5", NULL), "did you mean --steps?");
    REFUSED(parse(&o, "--val-frction=0.1", NULL), "unknown option --val-frction; did you mean --val-fraction?");
    REFUSED(parse(&o, "--qqqqqqqqqq", NULL), "--help");
    CHECK(!strstr(error_text, "did you mean"));
    REFUSED(parse(&o, "book.txt", NULL), "--data FILE");
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) REFUSED(parse(&o, odd[i], "1", NULL), "unknown option");
    for (int i = 0; i < 2; i++) {
        memset(long_name, i ? 'a' : '-', sizeof long_name);
        memcpy(long_name, "--", 2), long_name[sizeof long_name - 1] = 0;
        REFUSED(parse(&o, long_name, NULL), "unknown option");
        long_name[100] = '=';
        REFUSED(parse(&o, long_name, NULL), "unknown option");
    }
}

// A random text of any bytes but NUL, with those that need care more often.
static void draw_text(char *text, size_t length) {
    for (size_t i = 0; i < length; i++) text[i] = draw() % 4 ? (char)(1 + draw_below(255)) : "\"\\/\n\t\x7f\x1f"[draw_below(7)];
    text[length] = 0;
}

static Json *options_as_json(const Options *o) {
    char *text;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    fputc('{', file), options_write_json(file, o), fputc('}', file), fclose(file);
    Json *json = json_parse(text, size);
    CHECK(json, "%s in %s", error_text, text);
    free(text);
    return json;
}

TEST(options_survive_json) {
    Options o, back;
    for (int round = 0; round < 200; round++) {
        options_defaults(&o), options_defaults(&back);
        bool saved = false;
        for (int i = 0; i < OPTION_ROWS; i++) {
            const OptionRow *row = &option_rows[i];
            char *field = (char *)&o + row->offset;
            if (row->group) saved = row->saved;
            if (row->group || !saved) continue;
            double value = draw() % 8 ? row->least + draw_unit() * (row->most - row->least) : draw() % 2 ? row->least : row->most;
            if (row->type == OPTION_INT) *(int64_t *)field = (int64_t)value;
            if (row->type == OPTION_REAL) *(double *)field = value;
            if (row->type == OPTION_TEXT && *row->choices) strcpy(field, "wsd");
            if (row->type == OPTION_TEXT && !*row->choices) draw_text(field, round ? draw_below(1024) : 1023);
        }
        Json *json = options_as_json(&o);
        CHECK(options_read_json(&back, json), "%s", error_text);
        FOR_EACH_OPTION(row) {
            const char *a = (char *)&o + row->offset, *b = (char *)&back + row->offset;
            CHECK(row->type == OPTION_TEXT ? !strcmp(a, b) : number_of(&o, row) == number_of(&back, row), "%s", row->name);
        }
        options_defaults(&back);
        CHECK(parse(&back, "--lr", "0.5", "--data=mine", NULL) && options_read_json(&back, json));
        CHECK(back.lr == 0.5 && !strcmp(back.data, "mine") && back.seed == o.seed && !back.given[OPTION_seed], "what is given stays");
        json_free(json);
    }
    static const char *const texts[] = {"{\"of_a_newer_version\": 1, \"lr\": 0.25}", "{\"batch\": 0}", "{\"batch\": 1.5}", "{\"lr\": 1e999}",
                                        "{\"lr\": null}", "{\"lr\": [1]}", "{\"seed\": {}}", "{\"lr_schedule\": \"flat\"}"};
    for (int i = 0; i < 8; i++) {
        Json *json = json_parse(texts[i], strlen(texts[i]));
        CHECK(options_read_json(&o, json) == (i == 0) && o.lr == 0.25, "%s", texts[i]);
        json_free(json);
    }
}

static void ask_for_help(void) {
    static Run run;
    char *argv[] = {(char *)"./train", (char *)"--lr", (char *)"nonsense", (char *)"--help"};
    run_setup(&run, 4, argv);
}

TEST(options_help_and_print) {
    CHECK(run_child(ask_for_help) == 0 && strstr(child_output, "./train --data"), "said: %s", child_output);
    FOR_EACH_OPTION(row) {
        char start[64];
        snprintf(start, sizeof start, "\n  %s%s%s ", typed(row), *row->short_name ? ", -" : "", row->short_name);
        const char *found = strstr(child_output, start);
        CHECK(found && strstr(found, row->help) && strstr(found, row->help) < strchr(found + 1, '\n'), "no line '%s'", start + 1);
    }
    char *text;
    size_t size;
    Options o;
    options_defaults(&o);
    FILE *file = open_memstream(&text, &size);
    options_print(file, &o, 116);
    fclose(file);
    for (char *line = text; *line; line += strcspn(line, "\n") + 1) CHECK(strcspn(line, "\n") <= 116, "too wide: %s", line);
    CHECK(strstr(text, "total-batch 0") && strstr(text, "weight-decay 0.1") && strstr(text, "eps 1e-08") && strstr(text, "tokens 256"), "%s", text);
    free(text);
}

// ---------------------------------------------------------------------------
// json.h

// Parses a copy that ends where its memory ends, so that the address sanitizer sees every byte read too far.
static Json *parse_exactly(const char *text, size_t size) {
    char *copy = malloc(size ? size : 1);
    memcpy(copy, text, size);
    *error_text = 0;
    Json *json = json_parse(size ? copy : copy + 1, size);
    free(copy);
    return json;
}

static const char document[] =
    " {\"a\": [1, -2.5e3, 0, -0.0, 1E+2, 9007199254740991, true, false, null, [], {}, [[{\"b\": []}]]],\r\n\t"
    "\"escaped \\u00e9\": \"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20ac\\ud83d\\uDE00\", \"\": \"\", \"raw\": \"\xc3\xa9 ]}\", \"a\": 2}";

TEST(json_values) {
    Json *json = parse_exactly(document, sizeof document - 1);
    CHECK(json && json->type == JSON_OBJECT, "%s", error_text);
    static const double numbers[] = {1, -2500, 0, 0, 100, 9007199254740991, 1, 0};
    Json *node = json_get(json, "a")->child;
    for (int i = 0; i < 8; i++, node = node->next)
        CHECK(node->number == numbers[i] && node->type == (i < 6 ? JSON_NUMBER : JSON_BOOL), "value %d: %g", i, node->number);
    CHECK(node->type == JSON_NULL && node->next->type == JSON_ARRAY && !node->next->child && node->next->next->type == JSON_OBJECT);
    CHECK(json_get(node->next->next->next->child->child, "b")->type == JSON_ARRAY && !node->next->next->next->next);
    CHECK(!strcmp(json_string_or(json, "escaped \xc3\xa9", ""), "\"\\/\b\f\n\r\tA\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"));
    CHECK(!strcmp(json_string_or(json, "", "x"), "") && !strcmp(json_string_or(json, "raw", "x"), "\xc3\xa9 ]}"));
    CHECK(!json_get(json, "b") && !json_get(json_get(json, "a"), "a") && !json_get(NULL, "a") && json_number_or(json, "raw", 7) == 7);
    CHECK(!strcmp(json_string_or(json, "a", "other"), "other") && json_number_or(NULL, "a", 3) == 3);
    json_free(json);
}

TEST(json_malformed) {
    static const char *const bad[] = {
        "", " ", "[", "]", "{", "}", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "[1,,2]", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{,}", "{a:1}", "{1:2}",
        "{\"a\" 1}", "[1}", "{\"a\":1]", "1 2", "nul", "tru", "falsee", "nullnull", "True", "NaN", "Infinity", "-", "--1", "+1", "1e", "1e+", "1.2.3",
        "0x10", "1-", "e5", "'a'", "\"", "\"a", "\"\\\"", "\"\\", "\"\\x\"", "\"\\u\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"", "\"\\ud800x\"",
        "\"\\ud83d\\n12345\"", "\"\\ud83d\\u12\"", "\"\\ud83d\\u0041\"", "\"\\ud83d\\ud83d\"", "\"\\u0000\"", "\"\t\"", "\"\n\"", "// a\n1", "\xef\xbb\xbf" "1",
        "1111111111111111111111111111111111111111111111111111111111111111111111"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Json *json = parse_exactly(bad[i], strlen(bad[i]));
        CHECK(!json && *error_text, "accepted: %s", bad[i]);
    }
    CHECK(!parse_exactly("[1\0]", 4) && !parse_exactly("\"a\0\"", 4) && !parse_exactly("\"\\\0\"", 4), "a NUL");
}

TEST(json_nesting) {
    for (int levels = 1; levels <= 70; levels++)
        for (int objects = 0; objects < 2; objects++) {
            char text[1000], *end = text;
            for (int i = 0; i < levels; i++) end += sprintf(end, objects && i + 1 < levels ? "{\"k\":" : "[");
            for (int i = levels; i-- > 0;) *end++ = objects && i + 1 < levels ? '}' : ']';
            Json *json = parse_exactly(text, (size_t)(end - text));
            CHECK(!json == (levels > 64), "%d levels", levels);
            json_free(json);
        }
    char *deep = malloc(1000000);
    memset(deep, '[', 1000000);
    CHECK(!parse_exactly(deep, 1000000));
    for (int i = 0; i < 1000; i++) memcpy(deep + 3 * i, i ? ",{}" : "[{}", 3);
    deep[3000] = ']';
    Json *json = parse_exactly(deep, 3001);
    CHECK(json, "what lies side by side is not nested");
    json_free(json), free(deep);
}

TEST(json_damaged_documents) {
    for (size_t size = 0; size < sizeof document - 1; size++) CHECK(!parse_exactly(document, size), "the first %zu bytes alone", size);
    for (int i = 0; i < 20000; i++) {  // no crash, no leak, whatever comes out
        char text[sizeof document];
        memcpy(text, document, sizeof document);
        for (int k = 1 + (int)draw_below(3); k > 0; k--)
            text[draw_below(sizeof document - 1)] = draw() % 2 ? (char)draw() : "{}[]\",:\\u0e-"[draw_below(12)];
        json_free(parse_exactly(text, sizeof document - 1));
    }
}

// ---------------------------------------------------------------------------
// model.h

TEST(model_sizes) {
    static const struct { const char *name; int vocab; size_t parameters; } known[] = {  // GPT-2's own are widely published
        {"d12", 50257, 124439808}, {"d24", 50257, 354823168}, {"d36", 50257, 774030080}, {"d48", 50257, 1557611200},
        {"d6", 50257, 30339456}};  // (50257 + 1024) * 384 + 6 * (12 * 384 * 384 + 13 * 384) + 2 * 384
    for (int i = 0; i < 5; i++) {
        const GptPreset *p = gpt_preset(known[i].name);
        CHECK(p, "%s", known[i].name);
        GptConfig c = {p->layers, p->heads, p->channels, p->seq, known[i].vocab};
        size_t total = 1, offset = 0;
        GptTensor *t = gpt_tensors(c, &total);
        CHECK(total == known[i].parameters && gpt_config_check(c), "%s has %zu", known[i].name, total);
        CHECK(gpt_tensor_count(c) == 12 * c.layers + 4);
        for (int k = 0; k < gpt_tensor_count(c); offset += t[k++].size) {
            CHECK(t[k].offset == offset && t[k].size == t[k].shape[0] * (t[k].rank == 2 ? t[k].shape[1] : 1), "%s", t[k].name);
            CHECK(t[k].decay == (t[k].rank == 2) && (t[k].rank == 2 || t[k].shape[1] == 0), "%s", t[k].name);
        }
        CHECK(offset == total);
        free(t);
    }
    CHECK(!gpt_preset("d13") && !gpt_preset(""));
    REFUSED(gpt_config_check((GptConfig){1, 3, 64, 8, 257}), "--channels 64 is not a multiple of --heads 3");
}

static const GptConfig small = {2, 2, 8, 12, 257};
enum { SMALL = 3912 };  // its parameters: 257 * 8 + 12 * 8 + 2 * (12 * 64 + 13 * 8) + 2 * 8

TEST(model_names_and_shapes) {
    static const struct { const char *name; size_t rows, columns; } known[28] = {  // of Hugging Face's GPT2LMHeadModel, C = 8, without "transformer."
        {"wte.weight", 257, 8}, {"wpe.weight", 12, 8}, {"ln_1.weight", 8, 0}, {"ln_1.bias", 8, 0}, {"attn.c_attn.weight", 8, 24}, {"attn.c_attn.bias", 24, 0},
        {"attn.c_proj.weight", 8, 8}, {"attn.c_proj.bias", 8, 0}, {"ln_2.weight", 8, 0}, {"ln_2.bias", 8, 0}, {"mlp.c_fc.weight", 8, 32}, {"mlp.c_fc.bias", 32, 0},
        {"mlp.c_proj.weight", 32, 8}, {"mlp.c_proj.bias", 8, 0}};
    size_t total;
    GptTensor *t = gpt_tensors(small, &total);
    CHECK(total == SMALL && !strcmp(t[26].name, "transformer.ln_f.weight") && !strcmp(t[27].name, "transformer.ln_f.bias") && t[26].shape[0] == 8 && t[27].shape[0] == 8);
    for (int i = 0; i < 26; i++) {
        char name[64];
        int row = i < 14 ? i : i - 12;
        snprintf(name, sizeof name, i < 2 ? "transformer.%s" : i < 14 ? "transformer.h.0.%s" : "transformer.h.1.%s", known[row].name);
        CHECK(!strcmp(t[i].name, name) && t[i].shape[0] == known[row].rows && t[i].shape[1] == known[row].columns, "%s", name);
    }
    free(t);
}

TEST(model_init) {
    GptConfig c = {3, 2, 64, 50, 257};
    size_t total;
    GptTensor *t = gpt_tensors(c, &total);
    float *w = malloc(total * sizeof *w), *again = malloc(total * sizeof *w);
    uint64_t seed = draw();
    gpt_init(c, w, seed);
    for (int i = 0; i < gpt_tensor_count(c); i++) {
        const float *x = w + t[i].offset;
        double sum = 0, square = 0, n = (double)t[i].size, constant = strstr(t[i].name, "ln_") && strstr(t[i].name, "weight") ? 1 : 0;
        double std = strstr(t[i].name, "c_proj") ? 0.02 / sqrt(6) : 0.02;  // two projections in each of 3 layers
        for (size_t j = 0; j < t[i].size; j++) sum += x[j], square += (double)x[j] * x[j];
        if (t[i].rank == 1) for (size_t j = 0; j < t[i].size; j++) CHECK(x[j] == constant, "%s: %g", t[i].name, x[j]);
        if (t[i].rank == 1) continue;
        CHECK(fabs(sum) / std / sqrt(n) < SIGMAS, "%s has the mean %g", t[i].name, sum / n);
        CHECK(fabs(square / (std * std) - n) / sqrt(2 * n) < SIGMAS, "%s has the deviation %g", t[i].name, sqrt(square / n));
        for (int k = 0; k < i; k++) CHECK(t[k].rank == 1 || memcmp(x, w + t[k].offset, 32), "%s is as %s", t[i].name, t[k].name);
    }
    gpt_init(c, again, seed);
    CHECK(!memcmp(w, again, total * sizeof *w), "the same seed");
    gpt_init(c, again, seed ^ (uint64_t)1 << 40);
    CHECK(memcmp(w, again, 32), "another seed");
    free(w), free(again), free(t);
}

// ---------------------------------------------------------------------------
// tokenizer.h

TEST(tokenizer_json) {
    // From GPT-2's published vocabulary: U+0120 is the space, U+010A the newline, U+0143 the byte AD.
    static const struct { const char *key; int id; } known[] = {
        {"A", 65}, {"!", 33}, {"~", 126}, {"\"", 34}, {"\\", 92}, {"\xc4\x80", 0}, {"\xc4\x8a", 10}, {"\xc4\xa0", 32}, {"\xc4\xa1", 127},
        {"\xc4\xa2", 128}, {"\xc5\x82", 160}, {"\xc2\xa1", 161}, {"\xc5\x83", 173}, {"\xc2\xae", 174}, {"\xc3\xbf", 255}, {"<|endoftext|>", 256}};
    char *text, *shown;
    size_t size, length;
    int count = 0;
    FILE *file = open_memstream(&text, &size);
    tokenizer_write_json(file);
    fclose(file);
    Json *json = parse_exactly(text, size), *model = json_get(json, "model"), *vocab = json_get(model, "vocab"), *added = json_get(json, "added_tokens");
    CHECK(vocab && added && added->child, "%s", error_text);
    for (Json *a = vocab->child; a; a = a->next) {
        CHECK(a->number == count++, "%s: %g", a->key, a->number);
        for (Json *b = a->next; b; b = b->next) CHECK(strcmp(a->key, b->key), "%s twice", a->key);
    }
    CHECK(count == 257);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        CHECK(json_number_or(vocab, known[i].key, -1) == known[i].id, "%s is %g", known[i].key, json_number_or(vocab, known[i].key, -1));
    CHECK(json_number_or(added->child, "id", 0) == 256 && !strcmp(json_string_or(added->child, "content", ""), "<|endoftext|>"));
    CHECK(!strcmp(json_string_or(model, "type", ""), "BPE") && json_get(model, "merges")->type == JSON_ARRAY && !json_get(model, "merges")->child);
    CHECK(!strcmp(json_string_or(json_get(json, "pre_tokenizer"), "type", ""), "ByteLevel"));
    json_free(json), free(text);
    file = open_memstream(&shown, &length);
    for (int token = 0; token < 257; token++) token_write(file, token);
    fclose(file);
    for (int i = 0; i < 257; i++) CHECK((unsigned char)shown[i] == (i < 256 ? i : '\n') && length == 257);
    free(shown);
}

// ---------------------------------------------------------------------------
// safetensors.h

static uint32_t slow_crc32(const unsigned char *data, size_t size) {  // bit by bit
    uint32_t crc = ~0u;
    for (size_t i = 0; i < 8 * size; i++) {
        bool odd = (crc ^ data[i / 8] >> i % 8) & 1;
        crc = crc >> 1 ^ (odd ? 0xEDB88320u : 0);
    }
    return ~crc;
}

TEST(safetensors_crc32) {
    unsigned char bytes[300];
    CHECK(crc32_update(0, "123456789", 9) == 0xcbf43926 && crc32_update(0, "", 0) == 0);
    for (int i = 0; i < 300; i++) bytes[i] = (unsigned char)draw();
    for (size_t start = 0; start < 9; start++)
        for (size_t piece = 1; piece <= 300 - start; piece++) {
            uint32_t crc = 0;
            for (size_t i = start; i < 300; i += piece) crc = crc32_update(crc, bytes + i, i + piece > 300 ? 300 - i : piece);
            CHECK(crc == slow_crc32(bytes + start, 300 - start), "from %zu in pieces of %zu", start, piece);
        }
}

// Writes tensors to a file, and checks what is said of it.
static void put_tensors(const char *path, const SafeTensor *tensors, int count) {
    CheckedFile f = {fopen(path, "wb"), 0, 0, false};
    size_t size;
    safetensors_write(&f, tensors, count);
    CHECK(!f.failed && !fclose(f.file));
    char *bytes = get(path, &size);
    CHECK(f.size == size && f.crc == slow_crc32((unsigned char *)bytes, size), "size or checksum of %s", path);
    free(bytes);
}

static bool opens(const char *path) {
    SafeTensors s;
    bool ok = safetensors_open(&s, path);
    safetensors_close(&s);
    return ok;
}

static const float six[6] = {1, -2, 3.5f, INFINITY, -0.0f, 1e-45f};
static const int32_t five[5] = {1, -1, 2147483647, 0, 7};
static const unsigned char one[1] = {200};
static const SafeTensor various[4] = {{"a.weight", "F32", 2, {2, 3}, 24, six, 0}, {"an \"int\"", "I32", 1, {5}, 20, five, 0},
                                      {"scalar", "U8", 0, {0}, 1, one, 0}, {"none", "F32", 2, {0, 4}, 0, six, 0}};

TEST(safetensors_round_trip) {
    const char *path = "round.safetensors";
    SafeTensors s;
    char out[24];
    size_t size;
    uint64_t length;
    put_tensors(path, various, 4);
    char *bytes = get(path, &size);
    memcpy(&length, bytes, 8);
    CHECK(length % 8 == 0 && size == 8 + length + 45 && !memcmp(bytes + 8 + length, six, 24) && !memcmp(bytes + 32 + length, five, 20));
    Json *json = parse_exactly(bytes + 8, length);
    CHECK(json && !strcmp(json_string_or(json_get(json, "__metadata__"), "format", ""), "pt"));
    CHECK(json_number_or(json_get(json, "an \"int\""), "dtype", 1) == 1 && json_get(json_get(json, "an \"int\""), "data_offsets")->child->number == 24);
    json_free(json);
    free(bytes);
    CHECK(safetensors_open(&s, path) && s.count == 4 && !safetensors_find(&s, "a.weigh"), "%s", error_text);
    for (int i = 4; i-- > 0;) {
        const SafeTensor *t = safetensors_find(&s, various[i].name);
        CHECK(t && !strcmp(t->dtype, various[i].dtype) && t->rank == various[i].rank && t->bytes == various[i].bytes, "%s", various[i].name);
        CHECK(!memcmp(t->shape, various[i].shape, (size_t)t->rank * sizeof *t->shape), "%s", t->name);
        CHECK(safetensors_read(&s, t, out) && !memcmp(out, various[i].data, t->bytes), "%s", t->name);
    }
    safetensors_close(&s);
    static float large[10000], back[10000];  // more than stdio has in its buffer already
    put_tensors(path, &(SafeTensor){"large", "F32", 1, {10000}, sizeof large, large, 0}, 1);
    CHECK(safetensors_open(&s, path) && safetensors_read(&s, s.tensors, back), "%s", error_text);
    CHECK(!truncate(path, 20000));
    REFUSED(safetensors_read(&s, s.tensors, back), "cannot read tensor large");
    safetensors_close(&s);
    put_tensors(path, various, 0);
    CHECK(opens(path), "no tensors at all: %s", error_text);
}

TEST(safetensors_damaged) {
    const char *path = "damaged.safetensors";
    size_t size;
    uint64_t length;
    put_tensors(path, various, 4);
    char *bytes = get(path, &size);
    memcpy(&length, bytes, 8);
    for (size_t n = 0; n < size; n++) {
        put(path, bytes, n);
        REFUSED(opens(path), path);
    }
    put(path, bytes, size + 1);  // get() has put a NUL there
    REFUSED(opens(path), path);
    for (int i = 0; i < 1500; i++) {  // no crash, whatever comes out
        char *copy = malloc(size);
        memcpy(copy, bytes, size);
        for (int k = 0; k < 2; k++) copy[draw() % 8 ? 8 + draw_below(length) : draw_below(8)] = draw() % 2 ? (char)draw() : "0123456789[]{},\""[draw_below(16)];
        put(path, copy, size);
        opens(path);
        free(copy);
    }
    free(bytes);
    static const uint64_t lengths[] = {0, 1, 9, 100000001, 1ull << 40, 1ull << 63, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        char file[16] = "????????{}";
        memcpy(file, &lengths[i], 8);
        put(path, file, 10);
        REFUSED(opens(path), path);
    }
    // Headers, each before 24 bytes of data. `good` shows that it is the fault in the others that is refused.
    static const char *const good[] = {
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2,2,3],\"data_offsets\":[0,24]}}",
        "{\"b\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[8,24]},\"a\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}"};
    static const char *const bad[] = {
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[4,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[0,20]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[4,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[7],\"data_offsets\":[0,28]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[24,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},\"b\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[12,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[12,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]},\"b\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"dtype\":\"F33\",\"shape\":[6],\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":7,\"shape\":[6],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"shape\":[6],\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[6]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":6,\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":24}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[\"6\"],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5,4],\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[-2,-3],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,6],\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1e999],\"data_offsets\":[0,24]}}",
        // 2^62 * 8 and 2^32 * 2^32 * 6 elements: 0 and, with the size of a float, 24 modulo 2^64
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,8],\"data_offsets\":[0,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,6],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2147483648,2147483648],\"data_offsets\":[0,0]},\"b\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,1e999]}}", "{\"a\":[0,24]}", "{\"a\":null}", "[]", "{}", "7", "{\"a\":", "nonsense"};
    for (size_t i = 0; i < 3 + sizeof bad / sizeof *bad; i++) {
        char file[512] = {0};
        const char *header = i < 3 ? good[i] : bad[i - 3];
        uint64_t n = strlen(header);
        memcpy(file, &n, 8);
        memcpy(file + 8, header, n);
        put(path, file, 8 + n + 24);
        if (i < 3) CHECK(opens(path), "%s: %s", header, error_text);
        else REFUSED(opens(path), path);
    }
    REFUSED(opens("missing.safetensors"), "No such file");
    REFUSED(opens("."), ".");
}

// ---------------------------------------------------------------------------
// data.h

static const char *put_shard(const char *path, int version, int promised, int vocab, const int *tokens, int count) {
    size_t size = 1024 + 2 * (size_t)count;
    unsigned char *bytes = calloc(size, 1);
    int32_t header[4] = {20240520, version, promised, vocab};
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < count; i++) bytes[1024 + 2 * i] = (unsigned char)tokens[i], bytes[1025 + 2 * i] = (unsigned char)(tokens[i] >> 8);
    put(path, bytes, size);
    free(bytes);
    return path;
}

// Every window of the stream that `pattern` opens has to be as in `expected`.
static void check_stream(const char *pattern, int files, const int *expected, size_t count) {
    Data data;
    int window[64];
    CHECK(data_open(&data, pattern), "%s", error_text);
    CHECK(data.count == files && data.begin == 0 && data.end == count, "%s: %d files, %zu tokens", pattern, data.count, data.end);
    for (size_t begin = 0; begin < count; begin++)
        for (size_t n = 1; begin + n <= count; n++) {
            CHECK(data_read(&data, begin, n, 65536, window), "%s", error_text);
            CHECK(!memcmp(window, expected + begin, n * sizeof(int)), "%s: %zu tokens from %zu", pattern, n, begin);
        }
    data_close(&data);
}

static bool opens_data(const char *pattern) {
    Data data;
    bool ok = data_open(&data, pattern);
    data_close(&data);
    return ok;
}

TEST(data_streams) {
    enum { END = 256 };
    static const int b[] = {50256, 7, 65535, 0, 300}, joined[] = {'h', 'i', END, 50256, 7, 65535, 0, 300, 0, 255, 200, '\n', END};
    const char *folder = new_folder("stream");
    put_text("stream/a.txt", "hi");
    put_shard("stream/b.bin", 1, 5, 0, b, 5);
    put("stream/c.txt", "\0\xff\xc8\n", 4);  // bytes that are no UTF-8
    put_text("stream/z.md", "something else");
    CHECK(!mkdir("stream/d.txt", 0777));
    check_stream("stream/a.txt", 1, joined, 3);
    check_stream("stream/b.bin", 1, b, 5);
    check_stream("stream/[ab].*", 2, joined, 8);
    check_stream("stream/?.txt", 2, (int[]){'h', 'i', END, 0, 255, 200, '\n', END}, 8);
    check_stream("stream/{b.bin,c.txt}", 2, joined + 3, 10);
    check_stream("stream/?.[tb]*", 3, joined, 13);
    CHECK(!setenv("HOME", folder, 1));
    check_stream("~/b.bin", 1, b, 5);
    put_text("stream/we[i]rd {a,b}*.txt", "!");
    check_stream("stream/we[i]rd {a,b}*.txt", 1, (int[]){'!', END}, 2);
    put_shard("stream/more than promised.bin", 1, 3, 70, b, 5);
    check_stream("stream/more than promised.bin", 1, b, 3);
    put_shard("stream/shard of another name", 1, 5, 0, b, 5);
    check_stream("stream/shard of another name", 1, b, 5);
    Data data;
    CHECK(data_open(&data, "stream/a.txt") && data.vocab == 257); data_close(&data);
    CHECK(data_open(&data, "stream/more than promised.bin") && data.vocab == 70); data_close(&data);
    CHECK(data_open(&data, "stream/[abc].*") && data.vocab == 50257); data_close(&data);
}

TEST(data_folders) {  // "in the order of their names", whatever their endings and however the folder is called
    static const int tokens[] = {1000}, joined[] = {'a', 256, 1000, 'c', 256, 1000, 'e', 256};
    static const char *const names[] = {"folder", "folder [1]", "folder {a,b}*"};
    for (int i = 0; i < 3; i++) {
        const char *folder = new_folder(names[i]);
        put_text(at("%s/e.txt", names[i]), "e");
        put_shard(at("%s/d.bin", names[i]), 1, 1, 0, tokens, 1);
        put_text(at("%s/c.txt", names[i]), "c");
        put_shard(at("%s/b.bin", names[i]), 1, 1, 0, tokens, 1);
        put_text(at("%s/a.txt", names[i]), "a");
        put_text(at("%s/README", names[i]), "not data");
        check_stream(folder, 5, joined, 8);
        check_stream(at("%s/", names[i]), 5, joined, 8);
    }
}

TEST(data_errors) {
    new_folder("errors");
    static const int tokens[4] = {1, 2, 3, 4};
    static const struct { const char *name, *start; size_t size; const char *says; } kinds[] = {
        {"checkpoint.bin", "\xc6\xd7\x34\x01", 4, "llm.c model checkpoint"}, {"eval.bin", "\x8a\xd8\x34\x01", 4, "evaluation file"},
        {"llama.bin", "\xa1\xd9\x34\x01", 4, "Llama 3"}, {"gzip.bin", "\x1f\x8b\x08\0", 4, "gzip"}, {"zip.bin", "PK\3\4", 4, "zip"},
        {"zstd.bin", "\x28\xb5\x2f\xfd", 4, "zstd"}, {"parquet.bin", "PAR1", 4, "Parquet"}, {"pdf.bin", "%PDF-1.7", 8, "PDF"},
        {"text.bin", "Once\r\n\tupon", 11, "plain text"}, {"nano.bin", "\1\0\2\0\3\0", 6, "nanoGPT"}, {"one.bin", "\1", 1, "not a shard"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        static char bytes[2000];
        memset(bytes, kinds[i].start[0] == 'O' ? 'x' : 1, sizeof bytes);
        memcpy(bytes, kinds[i].start, kinds[i].size);
        const char *path = at("errors/%s", kinds[i].name);
        for (int longer = 0; longer < 2; longer++) {
            put(path, bytes, longer ? sizeof bytes : kinds[i].size);
            REFUSED(opens_data(path), kinds[i].says);
            CHECK(strstr(error_text, path));
        }
    }
    REFUSED(opens_data("errors/missing.txt"), "missing.txt: No such file");
    REFUSED(opens_data("errors/missing*.txt"), "missing*.txt");
    REFUSED(opens_data(put("errors/empty.txt", "", 0)), "is empty");
    REFUSED(opens_data(put("errors/empty.bin", "", 0)), "is empty");
    REFUSED(opens_data("/dev/null"), "not a regular file");
    const char *shard = "errors/shard.bin";
    REFUSED(opens_data(put_shard(shard, 2, 4, 0, tokens, 4)), "version 2; this program reads version 1");
    REFUSED(opens_data(put_shard(shard, 1, 5, 0, tokens, 4)), "promises 5 tokens and the file holds 4");
    REFUSED(opens_data(put_shard(shard, 1, 0, 0, tokens, 4)), "promises 0");
    REFUSED(opens_data(put_shard(shard, 1, -7, 0, tokens, 4)), "promises -7");
    put_shard(shard, 1, 4, 0, tokens, 4);
    for (int size = 1031; size > 0; size -= size > 1020 || size < 20 ? 1 : 90) {
        CHECK(!truncate(shard, size));
        REFUSED(opens_data(shard), shard);
    }
    new_folder("errors/no data");
    REFUSED(opens_data("errors/no data"), "no data");
    CHECK(!mkdir("errors/no data/x.txt", 0777));
    REFUSED(opens_data("errors/no data"), "no data");
    put_text("errors/good1.txt", "good"), put("errors/good2.txt", "", 0);
    REFUSED(opens_data("errors/good*"), "good2.txt is empty");  // one bad file among good ones

    Data data;
    int out[8];
    put_text("errors/y1.txt", "abcde");
    const char *second = put_shard("errors/y2.bin", 1, 4, 0, tokens, 4);
    CHECK(data_open(&data, "errors/y*") && data.end == 10, "%s", error_text);
    CHECK(data_read(&data, 6, 3, 4, out), "%s", error_text);
    REFUSED(data_read(&data, 6, 4, 4, out), second);
    CHECK(strstr(error_text, "token 4 at position 3") && strstr(error_text, "has 4 (0 to 3)"), "%s", error_text);
    REFUSED(data_read(&data, 4, 2, 256, out), "token 256 at position 5");
    REFUSED(data_cut(&data, 0, 10, 10, 1, "--data"), "--data has 10 tokens, and a sequence of T = 10 needs 11");
    REFUSED(data_cut(&data, 8, 10, 2, 1, "the rest"), "the rest has 2 tokens");
    data_close(&data);
}

// Of a stream 0, 1, 2, ... a window's first token says where it begins.
static const char *put_counting_shard(const char *path, int count) {
    int tokens[1000];
    for (int i = 0; i < count; i++) tokens[i] = i;
    return put_shard(path, 1, count, 1000, tokens, count);
}

static size_t sample_begin(const Data *data, uint64_t n) {
    int out[64];
    CHECK(data_sample(data, n, 1000, out), "%s", error_text);
    for (int i = 0; i <= data->seq; i++) CHECK(out[i] == out[0] + i, "sample %llu is no piece of the stream", (unsigned long long)n);
    CHECK((size_t)out[0] >= data->begin && (size_t)out[data->seq] < data->end, "sample %llu is from elsewhere", (unsigned long long)n);
    return (size_t)out[0];
}

TEST(data_sample_visits_every_window_once) {
    Data data;
    const char *path = put_counting_shard("counting.bin", 900);
    for (int round = 0; round < 40; round++) {
        size_t T = 1 + draw_below(40), begin = draw_below(300), length = T + 1 + (round % 4 ? draw_below(900 - begin - T) : draw_below(2 * T));
        size_t fit = (length - 1) / T, windows = fit > 1 ? fit - 1 : 1, start[5][900], same = 0;
        uint64_t seed = draw();
        for (uint64_t epoch = 0; epoch < 5; epoch++) {  // the last is the first one of another seed
            CHECK(data_open(&data, path) && data_cut(&data, begin, begin + length, (int)T, seed + epoch / 4, "--data"), "%s", error_text);
            CHECK(data.windows == windows);
            size_t lowest = 900, highest = 0, covered = 0;
            bool input[900] = {false};
            for (size_t i = 0; i < windows; i++) {
                size_t place = start[epoch][i] = sample_begin(&data, epoch % 4 * windows + i);
                for (size_t k = place; k < place + T; k++) covered += !input[k], input[k] = true;
                if (place < lowest) lowest = place;
                if (place > highest) highest = place;
                same += epoch > 0 && (place - lowest) / T == (start[0][i] - begin) / T;
            }
            CHECK(covered == windows * T && highest == lowest + (windows - 1) * T, "T %zu, %zu tokens: a window is missing or comes twice", T, length);
            for (int i = 0; i < 9 && epoch < 4; i++) {  // whatever was read before
                size_t n = draw_below((epoch + 1) * windows);
                CHECK(sample_begin(&data, n) == start[n / windows][n % windows], "sample %zu changed", n);
            }
            data_close(&data);
        }
        CHECK(windows < 12 || same < 2 * windows, "another epoch or seed should have another order");
    }
    double counts[9] = {0};
    CHECK(data_open(&data, path) && data_cut(&data, 100, 134, 5, draw(), "--data") && data.windows == 5);
    for (uint64_t epoch = 0; epoch < 3000; epoch++) {  // 34 tokens, and 5 windows need 26: there are 9 places to begin at
        size_t lowest = 900;
        for (uint64_t i = 0; i < 5; i++) {
            size_t begin = sample_begin(&data, 5 * epoch + i);
            if (begin < lowest) lowest = begin;
        }
        CHECK(lowest >= 100 && lowest <= 108);
        counts[lowest - 100]++;
    }
    CHECK(uniform(counts, 9, 3000 / 9.0), "epochs do not begin anywhere alike");
    data_close(&data);
}

TEST(data_spread_is_even) {
    Data data;
    int out[64];
    CHECK(data_open(&data, put_counting_shard("counting.bin", 700)));
    for (int round = 0; round < 100; round++) {
        size_t T = 1 + draw_below(40), begin = draw_below(500), end = begin + T + 1 + draw_below(700 - begin - T), all = (end - begin - 1) / T;
        CHECK(data_cut(&data, begin, end, (int)T, draw(), "--data"));
        for (size_t count = 1 + draw_below(all), n = 0, before = 0, window; n <= count; n++, before = window) {
            CHECK(n == count || data_spread(&data, n, count, 1000, out), "%s", error_text);
            window = n == count ? all : ((size_t)out[0] - begin) / T;
            CHECK(n == count || (((size_t)out[0] - begin) % T == 0 && out[T] == out[0] + (int)T && (size_t)out[T] < end));
            CHECK(n == 0 ? window == 0 : window - before == all / count || window - before == all / count + (all % count > 0),
                  "window %zu of %zu is %zu of %zu, after %zu", n, count, window, all, before);
        }
    }
    data_close(&data);
}

TEST(data_file_shortened_while_in_use) {
    Data data;
    int out[64];
    for (int shard = 0; shard < 2; shard++) {
        const char *path = put_counting_shard(at(shard ? "short.bin" : "short"), 500);
        if (!shard) CHECK(!truncate(put_text(path, "x"), 500));
        CHECK(data_open(&data, path) && data_cut(&data, 0, data.end, 50, 1, "--data"));
        CHECK(!truncate(path, shard ? 1024 + 2 * 480 - 1 : 480));
        CHECK(data_read(&data, 429, 50, 1000, out), "%s", error_text);
        REFUSED(data_read(&data, 431, 50, 1000, out), path);
        CHECK(strstr(error_text, "shorter than it was"), "%s", error_text);
        CHECK(!unlink(path));
        REFUSED(data_sample(&data, 0, 1000, out), "No such file");
        data_close(&data);
    }
}

// ---------------------------------------------------------------------------
// log.h

TEST(log_numbers_and_durations) {
    static const struct { double seconds; const char *text; } known[] = {
        {0, "0s"}, {-5, "0s"}, {NAN, "0s"}, {0.4, "0s"}, {59.4, "59s"}, {59.6, "1m 00s"}, {3599, "59m 59s"}, {3600, "1h 00m"}, {7500, "2h 05m"},
        {86399, "23h 59m"}, {86400, "1d 00h"}, {266400, "3d 02h"}};
    char text[32];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        CHECK(!strcmp(log_duration(known[i].seconds, text), known[i].text), "%g s: %s", known[i].seconds, text);
    for (int i = 0; i < 100000; i++) {
        uint32_t bits = (uint32_t)draw();
        float x;
        memcpy(&x, &bits, 4);
        CHECK(isfinite(x) ? strtof(log_number(x, text), NULL) == x : !strcmp(log_number(x, text), "null"), "%.12g: %s", x, text);
    }
}

static const double losses[8] = {5.55555534f, 4.25, NAN, INFINITY, 1e-30f, 3.14159274f, 2.5, 1};

static void write_log(void) {  // 8 steps, a line kept every 3; the third is skipped
    Log log;
    CHECK(log_open(&log, "log", 0, 8, 3) && !log.terminal, "%s", error_text);
    for (int i = 0; i < 8; i++) {
        if (i == 6) log.terminal = true;
        log_step(&log, i + 1, losses[i], 2 * losses[i], 0.001, 0.5, 1000, i == 2);
        if (i == 4 || i == 6) log_validation(&log, i + 1, losses[i] / 2);
    }
    fclose(log.jsonl);
}

TEST(log_lines) {
    new_folder("log");
    CHECK(run_child(write_log) == 0, "%s", child_output);
    static const char *const lines[] = {"step 1/8 | loss 5.5556 | norm ", "step 3/8 | loss nan", "step 5/8 | validation loss 0.0000", "step 6/8 | loss 3.1416",
                                        "step 7/8 | loss 2.5000", "step 7/8 | validation loss 1.2500", "step 8/8 | loss 1.0000"};
    char *line = child_output;
    for (int i = 0; i < 7; i++, line += strcspn(line, "\n") + 1)  // 7 as on a terminal only, where the validation lets it stand
        CHECK(!strncmp(line, lines[i], strlen(lines[i])), "wanted '%s' in: %s", lines[i], child_output);
    CHECK(!*line && strstr(child_output, "lr 1.00e-03 |   500.0 ms |    2000 tok/s |") && strstr(child_output, "update skipped\n"), "%s", child_output);
    size_t size;
    char *text = get("log/log.jsonl", &size), *rest = text;
    for (int i = 0; i < 8; i++)
        for (int validation = 0; validation <= (i == 4 || i == 6); validation++, rest += strcspn(rest, "\n") + 1) {
            Json *json = json_parse(rest, strcspn(rest, "\n")), *loss = json_get(json, validation ? "val_loss" : "loss");
            CHECK(loss && json_number_or(json, "step", 0) == i + 1, "%s", rest);
            CHECK(isfinite(losses[i]) ? (float)loss->number == (float)(losses[i] / (1 + validation)) : loss->type == JSON_NULL, "%s", rest);
            CHECK(validation || (json_number_or(json, "lr", 0) == 0.001 && json_number_or(json, "ms", 0) == 500 && json_get(json, "norm") &&
                  json_number_or(json, "tokens_per_second", 0) == 2000 && json_number_or(json, "skipped", 0) == (i == 2)), "%s", rest);
            json_free(json);
        }
    CHECK(!*rest, "more lines: %s", rest);
    for (int step = 0; step <= 9; step++)  // a run that goes on keeps the lines up to its step, and whole ones only
        for (size_t torn = 0; torn < 40; torn += 13) {
            Log log;
            size_t length, keep = 0;
            put("log/log.jsonl", text, size - torn);
            CHECK(log_open(&log, "log", step, 20, 1), "%s", error_text);
            log_json(&log, "%s\n", "{}");
            fclose(log.jsonl);
            for (int left = step + (step > 4) + (step > 6); left > 0 && keep < size; left--) {
                size_t next = keep + strcspn(text + keep, "\n") + 1;
                if (next <= size - torn) keep = next;
            }
            char *now = get("log/log.jsonl", &length);
            CHECK(length == keep + 3 && !memcmp(now, text, keep) && !strcmp(now + keep, "{}\n"), "step %d, %zu torn: %s", step, torn, now);
            free(now);
        }
    free(text);
    REFUSED(log_open(&(Log){0}, "no/such/folder", 0, 1, 1), "choose another --out");
}

static void write_to_full_disk(void) {
    Log log = {.jsonl = fopen("/dev/full", "w")};
    for (int i = 0; i < 3; i++) log_json(&log, "{}\n");
}

TEST(log_on_a_full_disk) {
    if (access("/dev/full", W_OK)) SKIP("there is no /dev/full");
    CHECK(run_child(write_to_full_disk) == 0 && strstr(child_output, "warning: cannot write to log.jsonl: No space left on device; training goes on\n") == child_output);
    CHECK(!strchr(strchr(child_output, '\n') + 1, '\n'), "said more than once: %s", child_output);
}

// ---------------------------------------------------------------------------
// checkpoint.h

static float saved[3][SMALL], loaded[3][SMALL];
static const ModelState saved_state = {saved[0], saved[1], saved[2]};

// Saves `small` with arrays of any bits. `more` changes options, as on a command line.
static void save(const char *folder, int64_t step, const char *more, const char *value) {
    Options o;
    options_defaults(&o);
    CHECK(parse(&o, "--steps", "40", "--keep", "0", more, value, NULL), "%s", error_text);
    for (int i = 0; i < 3 * SMALL; i++) ((uint32_t *)(void *)saved)[i] = (uint32_t)draw();
    CHECK(checkpoint_save(folder, small, &o, (Progress){step, (uint64_t)step * 4, 2}, saved_state), "%s", error_text);
}

static bool sound(const char *path) {
    Options o;
    Progress p;
    options_defaults(&o);
    return checkpoint_read_manifest(path, &p, &o);
}

static bool same_as_saved(const char *path) {
    CHECK(checkpoint_load_weights(path, small, loaded[0]) && checkpoint_load_optimizer(path, small, loaded[1], loaded[2]), "%s", error_text);
    return !memcmp(loaded, saved, sizeof saved);
}

static int entries(const char *folder) {
    int count = 0;
    DIR *dir = opendir(folder);
    CHECK(dir, "%s", folder);
    for (struct dirent *entry; (entry = readdir(dir));) count += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
    closedir(dir);
    return count;
}

TEST(checkpoint_round_trip) {
    static const struct { const char *key; double value; } keys[] = {
        {"vocab_size", 257}, {"n_positions", 12}, {"n_ctx", 12}, {"n_embd", 8}, {"n_layer", 2}, {"n_head", 2}, {"layer_norm_epsilon", 1e-5},
        {"resid_pdrop", 0}, {"embd_pdrop", 0}, {"attn_pdrop", 0}, {"scale_attn_weights", 1}, {"scale_attn_by_inverse_layer_idx", 0},
        {"reorder_and_upcast_attn", 0}, {"tie_word_embeddings", 1}, {"bos_token_id", 256}, {"eos_token_id", 256}};
    Options o;
    Progress p;
    GptConfig c, other = small;
    size_t size;
    new_folder("round");
    options_defaults(&o);
    save("round", 123456789012, "--lr", "0.1234567890123");
    const char *path = "round/ckpt-123456789012";
    CHECK(entries("round") == 1 && entries(path) == 6 && same_as_saved(path), "arrays came back with other bits");
    CHECK(checkpoint_read_manifest(path, &p, &o) && p.step == 123456789012 && p.samples == 493827156048 && p.skipped == 2, "%s", error_text);
    CHECK(o.lr == 0.1234567890123 && o.steps == 40 && o.keep == 0);
    CHECK(checkpoint_read_config(path, &c) && !memcmp(&c, &small, sizeof c), "%s", error_text);
    Json *config = checkpoint_read_json(path, "config.json"), *manifest = checkpoint_read_json(path, "manifest.json");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) CHECK(json_number_or(config, keys[i].key, -1) == keys[i].value, "%s", keys[i].key);
    CHECK(!strcmp(json_string_or(config, "model_type", ""), "gpt2") && !strcmp(json_string_or(config, "activation_function", ""), "gelu_new"));
    CHECK(!strcmp(json_get(config, "architectures")->child->string, "GPT2LMHeadModel") && json_get(config, "n_inner")->type == JSON_NULL);
    for (int i = 0; i < CHECKPOINT_MANIFEST; i++) {
        char *bytes = get(at("round/ckpt-123456789012/%s", checkpoint_files[i]), &size);
        Json *entry = json_get(json_get(manifest, "files"), checkpoint_files[i]);
        CHECK(json_number_or(entry, "bytes", 0) == (double)size, "%s", checkpoint_files[i]);
        CHECK(strtoul(json_string_or(entry, "crc32", ""), NULL, 16) == slow_crc32((unsigned char *)bytes, size), "%s", checkpoint_files[i]);
        free(bytes);
    }
    json_free(config), json_free(manifest);
    other.vocab = 255;  // not the bytes: without a tokenizer, and the last token ends a text
    CHECK(checkpoint_save("round", other, &o, (Progress){5, 5, 0}, saved_state), "%s", error_text);
    CHECK(entries("round/ckpt-00000005") == 4 && sound("round/ckpt-00000005"), "%s", error_text);
    config = checkpoint_read_json("round/ckpt-00000005", "config.json");
    CHECK(json_number_or(config, "vocab_size", 0) == 255 && json_number_or(config, "eos_token_id", 0) == 254);
    json_free(config);
}

TEST(checkpoint_damage_is_noticed) {
    new_folder("hurt");
    save("hurt", 1, NULL, NULL);
    const char *path = "hurt/ckpt-00000001";
    for (int i = 0; i < CHECKPOINT_FILES; i++) {
        size_t size;
        const char *name = checkpoint_files[i], *file = at("hurt/ckpt-00000001/%s", name);
        char *bytes = get(file, &size), *copy = get(file, &size);
        for (size_t k = 0; k < 26; k++) {
            size_t place = k == 0 ? 0 : k == 1 ? size - 1 : draw_below(size);
            copy[place] ^= (char)(1 << draw_below(8));
            put(file, copy, size);
            copy[place] = bytes[place];
            if (i < CHECKPOINT_MANIFEST) REFUSED(sound(path), name);
            else sound(path);  // no checksum is of the manifest itself; it must not crash
            put(file, bytes, k == 1 ? size - 3 : place);
            REFUSED(sound(path), name);
        }
        CHECK(!unlink(file));
        REFUSED(sound(path), name);
        put(file, bytes, size);
        free(bytes), free(copy);
        CHECK(sound(path) && same_as_saved(path), "%s", error_text);
    }
    const char *manifest = "hurt/ckpt-00000001/manifest.json";
    CHECK(!truncate(put_text(manifest, "{"), 2 << 20));
    REFUSED(sound(path), "far too large");
    put_text(manifest, "{\"format\": 2, \"step\": 1, \"files\": {}}");
    REFUSED(sound(path), "unknown format");
}

TEST(checkpoint_other_shapes_and_names) {
    static const struct { GptConfig c; const char *says; } other[] = {
        {{2, 2, 8, 12, 258}, "transformer.wte.weight has the shape (257, 8) where config.json wants (258, 8)"},
        {{2, 2, 8, 13, 257}, "transformer.wpe.weight has the shape (12, 8) where config.json wants (13, 8)"},
        {{2, 2, 4, 12, 257}, "(257, 8) where config.json wants (257, 4)"}, {{3, 2, 8, 12, 257}, "has no tensor transformer.h.2.ln_1.weight"}};
    new_folder("shape");
    save("shape", 1, NULL, NULL);
    const char *path = "shape/ckpt-00000001", *model = "shape/ckpt-00000001/model.safetensors";
    static float room[3 * SMALL];
    for (int i = 0; i < 4; i++) REFUSED(checkpoint_load_weights(path, other[i].c, room), other[i].says);
    REFUSED(checkpoint_load_optimizer(path, other[0].c, room, room), "m.transformer.wte.weight");
    SafeTensor published[29] = {{"h.0.attn.bias", "F32", 4, {1, 1, 1, 1}, 4, six, 0}};  // a mask, which Hugging Face's files have, too
    size_t total;
    GptTensor *t = gpt_tensors(small, &total);
    for (int i = 0; i < 28; i++) {
        SafeTensor *p = &published[i + 1];
        strcpy(p->name, t[i].name + strlen("transformer."));
        p->dtype = "F32", p->rank = t[i].rank, p->bytes = 4 * t[i].size, p->data = saved[0] + t[i].offset;
        memcpy(p->shape, t[i].shape, sizeof t[i].shape);
    }
    put_tensors(model, published, 29);
    CHECK(checkpoint_load_weights(path, small, room) && !memcmp(room, saved[0], sizeof saved[0]), "%s", error_text);
    published[3].dtype = "F16", published[3].bytes /= 2;
    put_tensors(model, published, 29);
    REFUSED(checkpoint_load_weights(path, small, room), "tensor h.0.ln_1.weight is F16; only F32");
    free(t);
}

TEST(checkpoint_published_configs) {  // gpt2's own, with `from` replaced by `to`
    static const char gpt2[] = "{\"activation_function\": \"gelu_new\", \"architectures\": [\"GPT2LMHeadModel\"], \"attn_pdrop\": 0.1, \"eos_token_id\": 50256,"
        " \"layer_norm_epsilon\": 1e-05, \"model_type\": \"gpt2\", \"n_ctx\": 1024, \"n_embd\": 768, \"n_head\": 12, \"n_layer\": 12, \"n_positions\": 1024,"
        " \"summary_first_dropout\": 0.1, \"task_specific_params\": {\"text-generation\": {\"do_sample\": true}}, \"vocab_size\": 50257}";
    static const struct { const char *from, *to, *says; } variants[] = {
        {"\"n_ctx\"", "\"n_ctx\"", NULL}, {"gelu_new", "gelu_pytorch_tanh", NULL}, {"{\"act", "{\"n_inner\": null, \"act", NULL},
        {"{\"act", "{\"n_inner\": 3072, \"act", NULL}, {"{\"act", "{\"scale_attn_weights\": true, \"tie_word_embeddings\": true, \"act", NULL},
        {"gelu_new", "gelu", "activation gelu,"}, {"{\"act", "{\"n_inner\": 1024, \"act", "inner width 1024"}, {"1e-05", "1e-06", "epsilon 1e-06"},
        {"\"gpt2\"", "\"gpt_neo\"", "type 'gpt_neo'"}, {"\"n_head\": 12", "\"n_head\": 7", "not a multiple of --heads 7"}, {"\"n_layer\": 12", "\"n_layer\": 0", "n_layer"},
        {"n_positions", "positions", "n_positions"}, {"50257}", "\"many\"}", "vocab_size"}, {"768", "1e12", "n_embd"}, {"768", "-768", "n_embd"}, {"{\"act", "{\"act", NULL},
        {"{\"act", "{\"scale_attn_by_inverse_layer_idx\": true, \"act", "scale_attn_by_inverse_layer_idx"}, {"{\"act", "{\"scale_attn_weights\": false, \"act", "scale_attn_weights"},
        {"{\"act", "{\"tie_word_embeddings\": false, \"act", "tie_word_embeddings"}};
    const char *path = new_folder("config");
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        char text[1024];
        GptConfig c;
        const char *cut = strstr(gpt2, variants[i].from);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(cut - gpt2), gpt2, variants[i].to, cut + strlen(variants[i].from));
        put_text("config/config.json", text);
        if (variants[i].says) REFUSED(checkpoint_read_config(path, &c), variants[i].says);
        else CHECK(checkpoint_read_config(path, &c) && c.layers == 12 && c.heads == 12 && c.channels == 768 && c.seq == 1024 && c.vocab == 50257, "%s", error_text);
    }
}

TEST(checkpoint_newest_and_prune) {
    static const char *const names[] = {"ckpt-00000001", "ckpt-00000002", "ckpt-00000003", "ckpt-99999999", "ckpt-100000000", "ckpt-00000002.damaged", "ckpt-5",
                                        "ckpt-0000000x", "checkpoint-00000009", "ckpt-00000008.tmp"};
    char found[PATH_SIZE];
    const char *folder = new_folder("prune");
    for (int i = 0; i < 10; i++) {
        CHECK(!mkdir(at("prune/%s", names[i]), 0777));
        for (int k = 0; k < CHECKPOINT_FILES; k++) put_text(at("prune/%s/%s", names[i], checkpoint_files[k]), "x");
    }
    put_text("prune/ckpt-00000002/notes.txt", "mine"), put_text("prune/log.jsonl", "");
    CHECK(checkpoint_newest(folder, INT64_MAX, found) && !strcmp(found, "prune/ckpt-100000000"), "%s", found);
    CHECK(checkpoint_newest(folder, 99999999, found) && !strcmp(found, "prune/ckpt-00000003"), "%s", found);
    CHECK(!checkpoint_newest(folder, 1, found) && !checkpoint_newest("nowhere", INT64_MAX, found));
    checkpoint_prune(folder, 0);
    CHECK(entries(folder) == 10 && !exists("prune/ckpt-00000008.tmp"));  // an interrupted save's
    checkpoint_prune(folder, 2);  // 1, 2 and 3 are beyond, but 2 has a file of somebody's
    CHECK(entries(folder) == 8 && !exists("prune/ckpt-00000001") && !exists("prune/ckpt-00000003") && exists("prune/ckpt-00000002/notes.txt"));
    for (int i = 3; i < 9; i++) CHECK(entries(at("prune/%s", names[i])) == 6, "%s", names[i]);
}

static long most_bytes;  // that a file may have

static void save_with_little_room(void) {
    struct rlimit limit = {(rlim_t)most_bytes, (rlim_t)most_bytes};
    Options o;
    options_defaults(&o);
    o.keep = 1;
    signal(SIGXFSZ, SIG_IGN);
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
    REFUSED(checkpoint_save("room", small, &o, (Progress){2, 8, 0}, saved_state), "earlier checkpoints are untouched");
    fputs(error_text, stdout);
}

TEST(checkpoint_save_fails) {
    const char *folder = new_folder("room");
    save(folder, 1, NULL, NULL);
    for (most_bytes = 0; most_bytes < 32000; most_bytes += 3977) {  // the optimizer's file has more than 31296
        CHECK(run_child(save_with_little_room) == 0 && strstr(child_output, "ckpt-00000002: File too large;"), "%s", child_output);
        CHECK(entries(folder) == 1 && sound("room/ckpt-00000001") && same_as_saved("room/ckpt-00000001"), "%s", error_text);
    }
    static const struct { const char *in_the_way, *says; } ways[] = {{"room/ckpt-00000002.tmp", "File exists"}, {"room/ckpt-00000002", "Not a directory"}};
    most_bytes = 1 << 20;
    for (int i = 0; i < 2; i++) {
        put_text(at("%s", ways[i].in_the_way), "");
        CHECK(run_child(save_with_little_room) == 0 && strstr(child_output, ways[i].says), "%s", child_output);
        CHECK(entries(folder) == 2 && sound("room/ckpt-00000001") && !unlink(at("%s", ways[i].in_the_way)), "%s", error_text);
    }
    remove_tree(folder);
    CHECK(run_child(save_with_little_room) == 0 && strstr(child_output, "No such file"), "%s", child_output);
}

static void claim_again(void) { puts(folder_claim("claim/a/b c") ? "claimed" : error_text); }

TEST(checkpoint_folder_claim) {
    char owner[64];
    for (int i = 0; i < 2; i++) CHECK(run_child(claim_again) == 0 && !strcmp(child_output, "claimed\n"), "a run that has ended: %s", child_output);
    CHECK(folder_claim("claim/a/b c") && entries("claim/a/b c") == 1, "%s", error_text);
    snprintf(owner, sizeof owner, "in use by another run (process %ld)", (long)getpid());
    CHECK(run_child(claim_again) == 0 && strstr(child_output, owner), "no '%s' in: %s", owner, child_output);
    put_text("plain", "");
    const char *const bad[] = {"plain", "plain/below", "/proc/none/here"};
    for (int i = 0; i < 3; i++) {
        REFUSED(folder_claim(bad[i]), bad[i]);
        CHECK(strstr(error_text, "choose another --out"), "%s", error_text);
    }
}

// ---------------------------------------------------------------------------
// run.h

static Run run;
static const char *run_arguments[16];  // those of `claim`

static bool setup(const char *const *arguments) {
    char *argv[18] = {(char *)"train"};
    int argc = 1;
    while ((argv[argc] = (char *)arguments[argc - 1])) argc++;
    data_close(&run.train), data_close(&run.val);
    return run_setup(&run, argc, argv);
}

#define SETUP(...) setup((const char *const[]){__VA_ARGS__, NULL})

// A scratch folder to work in, with a text of 1000 bytes and a run that stopped at step 7 of 40.
static void prepare_runs(const char *name) {
    static char text[1000];
    CHECK(!chdir(new_folder(name)) && !mkdir("seven", 0777));
    memset(text, 'x', sizeof text);
    put("book.txt", text, 1000), put_text("short.txt", "short");
    save("seven", 7, "--data", "book.txt");
}

TEST(run_setup_from_nothing) {
    prepare_runs("fresh");
    const Options *o = &run.options;
    const GptPreset *tiny = gpt_preset("tiny");
    CHECK(SETUP("--data", "book.txt", "--seq", "16", "--batch", "3", "--total-batch", "144", "--lr", "0.25", "--warmup", "7", "--steps", "50"), "%s", error_text);
    CHECK(run.trains && !run.resumes && !*run.start_from && run.accumulation == 3 && run.config.vocab == 257 && run.config.seq == 16);
    CHECK(run.config.layers == tiny->layers && run.config.heads == tiny->heads && run.config.channels == tiny->channels && o->layers == tiny->layers && o->vocab == 257);
    CHECK(run.train.end == 901 && run.val.begin == 901 && run.val.end == 1001 && run.val.count == 1);  // with the end of the text, a tenth held out
    CHECK(run.schedule.peak == 0.25 && run.schedule.warmup == 7 && run.schedule.steps == 50 && run.schedule.final == o->lr_final && !strcmp(run.schedule.shape, "cosine"));
    static const struct { const char *steps; int warmup; } warmups[] = {{"5", 0}, {"50", 5}, {"999", 99}, {"1001", 100}, {"100000", 100}};
    for (int i = 0; i < 5; i++) CHECK(SETUP("--data", "book.txt", "--seq", "16", "--steps", warmups[i].steps) && run.schedule.warmup == warmups[i].warmup, "%s", error_text);
    CHECK(run.accumulation == 1 && o->total_batch == 16 * o->batch && run.schedule.peak > 0);
    CHECK(SETUP("--data", "book.txt", "--seq", "5", "--val-data", "short.txt") && run.train.end == 1001 && run.val.begin == 0 && run.val.end == 6, "%s", error_text);
    CHECK(SETUP("--data", "book.txt", "--seq", "1000", "--val-fraction", "0") && run.train.windows == 1 && run.val.count == 0, "%s", error_text);
    CHECK(SETUP("--dry-run", "--model", "d12", "--vocab", "50257") && !run.trains && run.config.channels == 768, "%s", error_text);
    CHECK(SETUP("--resume", "auto", "--out", "nothing here", "--data", "book.txt", "--seq", "16") && run.trains && !run.resumes && !*run.start_from, "%s", error_text);
    CHECK(SETUP("--data", put_counting_shard("s.bin", 900), "--seq", "16") && run.config.vocab == 1000, "%s", error_text);
}

TEST(run_setup_refuses) {
    prepare_runs("refuse");
    GptConfig other = small;
    Options o;
    options_defaults(&o);
    other.vocab = 255;
    CHECK(!mkdir("words", 0777) && checkpoint_save("words", other, &o, (Progress){1, 1, 0}, saved_state), "%s", error_text);
    static const struct { const char *says, *arguments[9]; } bad[] = {
        {"no multiple of --batch times --seq, 4 x 16 = 64", {"--data", "book.txt", "--seq", "16", "--batch", "4", "--total-batch", "100"}},
        {"--data has 901 tokens, and a sequence of T = 901 needs 902", {"--data", "book.txt", "--seq", "901"}},
        {"the held-out part of --data has 100 tokens, and a sequence of T = 100 needs 101", {"--data", "book.txt", "--seq", "100"}},
        {"--val-data has 6 tokens", {"--data", "book.txt", "--seq", "16", "--val-data", "short.txt"}},
        {"--vocab 256 is too small for book.txt, whose bytes need 257", {"--data", "book.txt", "--seq", "16", "--vocab", "256"}},
        {"--channels 30 is not a multiple of --heads 4", {"--data", "book.txt", "--channels", "30", "--heads", "4"}},
        {"nothing to do", {"--steps", "9"}}, {"--steps 0 trains nothing", {"--steps", "0", "--data", "book.txt"}}, {"nothing to do", {"--model", "seven"}},
        {"--prompt needs a trained model", {"--prompt", "Once"}}, {"none.txt: No such file", {"--data", "none.txt"}}, {"unknown option --dat", {"--dat", "book.txt"}},
        {"--model d13 is neither a preset (tiny, d6, d12, d24, d36, d48) nor a folder", {"--data", "book.txt", "--model", "d13"}},
        {"there is no checkpoint none", {"--data", "book.txt", "--resume", "none"}},
        {"words/ckpt-00000001 has 255 tokens; give it a .bin shard", {"--data", "book.txt", "--model", "words", "--val-fraction", "0.5"}},
        {"--layers 3 does not fit the checkpoint seven/ckpt-00000007, which has 2", {"--resume", "seven", "--layers", "3"}},
        {"--heads 1 does not fit the checkpoint seven/ckpt-00000007, which has 2", {"--resume", "auto", "--out", "seven", "--heads", "1"}},
        {"--channels 16 does not fit the checkpoint seven/ckpt-00000007, which has 8", {"--model", "seven", "--data", "book.txt", "--channels", "16"}},
        {"--seq 16 does not fit the checkpoint seven/ckpt-00000007, which has 12", {"--resume", "seven/ckpt-00000007", "--seq", "16"}},
        {"--vocab 300 does not fit the checkpoint seven/ckpt-00000007, which has 257", {"--resume", "seven", "--vocab", "300"}},
        {"--layers 12 does not fit the checkpoint seven/ckpt-00000007, which has 2", {"--resume", "seven", "--model", "d12"}}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) REFUSED(setup(bad[i].arguments), bad[i].says);
}

static void resume_damaged(void) {
    CHECK(SETUP("--resume", "auto", "--out", "seven", "--data", "book.txt", "--seq", "12"), "%s", error_text);
    printf("resumes %d from '%s' at %lld, %llu", run.resumes, run.start_from, (long long)run.progress.step, (unsigned long long)run.progress.samples);
}

TEST(run_setup_from_a_checkpoint) {
    prepare_runs("again");
    const Options *o = &run.options;
    CHECK(SETUP("--resume", "seven") && run.resumes && run.trains && run.progress.step == 7 && run.progress.samples == 28 && run.progress.skipped == 2, "%s", error_text);
    CHECK(!memcmp(&run.config, &small, sizeof small) && !strcmp(o->data, "book.txt") && o->steps == 40 && !strcmp(o->out, "run"));
    CHECK(run.schedule.warmup == 100 && run.schedule.steps == 40, "the warm-up that was saved stays");
    CHECK(SETUP("--resume", "auto", "--out", "seven", "--steps", "90", "--lr=0.5", "--layers", "2") && o->steps == 90 && o->lr == 0.5 && o->keep == 0, "%s", error_text);
    CHECK(SETUP("--model", "seven", "--data", "book.txt", "--steps", "60") && run.trains && !run.resumes && run.progress.step == 0 && o->keep == 3, "%s", error_text);
    CHECK(!strcmp(run.start_from, "seven/ckpt-00000007") && run.schedule.warmup == 6 && run.config.channels == 8);
    CHECK(SETUP("--model", "seven/ckpt-00000007", "--prompt", "Once") && !run.trains && run.config.vocab == 257, "%s", error_text);
    CHECK(SETUP("--resume", "seven", "--prompt", "Once") && !run.trains, "%s", error_text);
    CHECK(SETUP("--resume", "seven", "--prompt", "Once", "--data", "book.txt") && run.trains, "%s", error_text);
    save("seven", 9, "--data", "book.txt");
    CHECK(!truncate("seven/ckpt-00000009/optimizer.safetensors", 30000));
    REFUSED(SETUP("--resume", "seven"), "seven/ckpt-00000009 is damaged: optimizer.safetensors has 30000 bytes instead of");
    REFUSED(SETUP("--resume", "auto", "--out", "seven", "--dry-run"), "damaged");
    CHECK(exists("seven/ckpt-00000009"), "a dry run moves nothing");
    CHECK(run_child(resume_damaged) == 0 && strstr(child_output, "resumes 1 from 'seven/ckpt-00000007' at 7, 28"), "%s", child_output);
    CHECK(strstr(child_output, "warning: seven/ckpt-00000009 is damaged") && strstr(child_output, "set aside as seven/ckpt-00000009.damaged"), "%s", child_output);
    CHECK(!exists("seven/ckpt-00000009") && entries("seven/ckpt-00000009.damaged") == 6);
    CHECK(!truncate("seven/ckpt-00000007/model.safetensors", 1000) && run_child(resume_damaged) == 0, "%s", child_output);
    CHECK(strstr(child_output, "resumes 0 from '' at 0, 0"), "with none left the run starts afresh: %s", child_output);
}

static void claim(void) {
    CHECK(setup(run_arguments), "%s", error_text);
    puts(run_claim_output(&run) ? "claimed" : error_text);
}

TEST(run_claim_output) {
    prepare_runs("output");
    static const struct { const char *says, *arguments[7]; } known[] = {
        {"claimed", {"--data", "book.txt", "--seq", "16", "--out", "new/folder"}}, {"claimed", {"--resume", "auto", "--out", "seven"}},
        {"claimed", {"--resume", "seven", "--out", "new"}},
        {"seven already holds a run, saved at step 7; --resume auto", {"--data", "book.txt", "--seq", "16", "--out", "seven"}},
        {"already holds a run", {"--data", "book.txt", "--model", "seven", "--out", "seven"}},
        {"book.txt: Not a directory", {"--data", "book.txt", "--seq", "16", "--out", "book.txt"}},
        {"seven holds a later checkpoint, of step 9, than the step 7", {"--resume", "seven/ckpt-00000007", "--out", "seven"}}};
    for (int i = 0; i < 7; i++) {
        if (i == 6) save("seven", 9, "--data", "book.txt");
        memcpy(run_arguments, known[i].arguments, sizeof known[i].arguments);
        CHECK(run_child(claim) == 0 && strstr(child_output, known[i].says), "no '%s' in: %s", known[i].says, child_output);
    }
}

static void stop_twice(void) {
    catch_signals();
    raise(SIGTERM);
    CHECK(stop_requested == SIGTERM);
    raise(SIGTERM);
}

TEST(run_signals_and_print) {
    CHECK(run_child(stop_twice) == 128 + SIGTERM, "the second signal ends the program: %s", child_output);
}

// ---------------------------------------------------------------------------

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info, (void)kind, (void)where;
    return remove(path);
}

// Runs one test in a new folder, with draws of its own, so that it can be run again alone. False if it failed.
static bool run_test(const char *title, void (*body)(void), uint64_t seed, const char *scratch) {
    draw_state = seed;
    for (const char *c = title; *c; c++) draw_state = (draw_state ^ (unsigned char)*c) * 0x100000001B3u;
    if (chdir(scratch) || mkdir(title, 0777) || chdir(title)) die("cannot make the folder %s/%s: %s", scratch, title, strerror(errno));
    int end = setjmp(test_end);
    if (!end) body();
    if (end) printf("%s - %s: %s\n", end == 1 ? "not ok" : "skip", title, failure);
    else printf("ok - %s\n", title);
    fflush(stdout);
    return end != 1;
}

int main(int argc, char **argv) {
    const char *given = getenv("TEST_SEED");
    char scratch[] = "/tmp/test_host.XXXXXX";
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    int failed = 0, ran = 0;
    printf("# TEST_SEED=%llu\n", (unsigned long long)seed);
    if (!mkdtemp(scratch)) die("cannot make the folder %s: %s", scratch, strerror(errno));
    for (int i = 0; i < test_count; i++) {
        if (argc > 1 && !strstr(tests[i].title, argv[1])) continue;
        failed += !run_test(tests[i].title, tests[i].body, seed, scratch);
        ran++;
    }
    nftw(scratch, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    if (!ran) printf("no test has '%s' in its name\n", argv[1]);
    return failed > 0 || !ran;
}

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

static double chi_square(const double *counts, const double *expected, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (counts[i] - expected[i]) * (counts[i] - expected[i]) / expected[i];
    return sum;
}

// Files in a scratch folder. at() gives a path in it; sixteen of them stay valid.
static char scratch[512];

PRINTF_LIKE(1, 2) static const char *at(const char *format, ...) {
    static char paths[16][1024];
    static int next;
    char *path = paths[next++ % 16];
    va_list args;
    va_start(args, format);
    int length = snprintf(path, 1024, "%s/", scratch);
    vsnprintf(path + length, 1024 - (size_t)length, format, args);
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

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info, (void)kind, (void)where;
    return remove(path);
}

static void remove_tree(const char *path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

static const char *new_folder(const char *name) {
    const char *path = at("%s", name);
    remove_tree(path);
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
    double counts[7] = {0}, expected[7];
    uint64_t seed = draw();
    for (uint32_t i = 0; i < 70000; i++) counts[random_below(random4(seed, RANDOM_OFFSET, i, 0), 7)]++;
    for (int i = 0; i < 7; i++) expected[i] = 10000;
    CHECK(chi_square(counts, expected, 7) < chi_square_limit(6));
}

TEST(random_normal_distribution) {
    enum { N = 1 << 20, BINS = 64 };
    float *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
    uint64_t seed = draw();
    random_normal(x, N, 1, seed, RANDOM_INIT, 5);
    double sum = 0, square = 0, fourth = 0, counts[BINS] = {0}, expected[BINS], lag[5] = {0}, lag_squares[5] = {0};
    for (int i = 0; i < N; i++) {
        double z = x[i];
        sum += z, square += z * z, fourth += z * z * z * z;
        int bin = (int)(BINS * 0.5 * erfc(-z / sqrt(2)));  // the bins are equally likely
        counts[bin < BINS ? bin : BINS - 1]++;
        for (int k = 1; k < 5 && i >= k; k++) {
            lag[k] += z * x[i - k];
            lag_squares[k] += (z * z - 1) * ((double)x[i - k] * x[i - k] - 1);
        }
    }
    for (int i = 0; i < BINS; i++) expected[i] = N / BINS;
    double root = sqrt(N);  // variances: of z 1, of z^2 2, of z^4 105 - 9 = 96, of a product of two (z^2 - 1) 4
    CHECK(fabs(sum / root) < SIGMAS, "mean %g", sum / N);
    CHECK(fabs(square - N) / root < SIGMAS * sqrt(2), "variance %g", square / N);
    CHECK(fabs(fourth - 3.0 * N) / root < SIGMAS * sqrt(96), "fourth moment %g", fourth / N);
    CHECK(chi_square(counts, expected, BINS) < chi_square_limit(BINS - 1), "chi-square %g", chi_square(counts, expected, BINS));
    for (int k = 1; k < 5; k++)
        CHECK(fabs(lag[k] / root) < SIGMAS && fabs(lag_squares[k] / root) < 2 * SIGMAS, "numbers %d apart hang together", k);
    for (size_t n = 0; n < 10; n++) {  // any count, a prefix of the same numbers, and nothing behind it
        for (int i = 0; i < 11; i++) y[i] = 77;
        random_normal(y, n, 2, seed, RANDOM_INIT, 5);
        for (size_t i = 0; i < n; i++) CHECK(y[i] == 2 * x[i]);
        CHECK(y[n] == 77);
    }
    static const struct { uint64_t seed; uint32_t purpose, step; } other[] = {{1, RANDOM_INIT, 5}, {0, RANDOM_SAMPLE, 5}, {0, RANDOM_INIT, 6}};
    for (int k = 0; k < 3; k++) {
        int same = 0;
        random_normal(y, 1000, 1, seed ^ other[k].seed, other[k].purpose, other[k].step);
        for (int i = 0; i < 1000; i++) same += x[i] == y[i];
        CHECK(same < 5, "seed, purpose and step each have to change the numbers (%d)", k);
    }
    free(x), free(y);
}

TEST(random_permute_is_a_shuffle) {
    static const uint64_t larger[] = {1000, 4095, 4096, 4097, 65537};
    static bool seen[65537];
    for (uint64_t k = 1; k <= 305; k++) {
        uint64_t n = k <= 300 ? k : larger[k - 301], seed = draw();
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t to = random_permute(i, n, seed, (uint32_t)k);
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
    double counts[50] = {0}, expected[50];
    for (uint32_t step = 0; step < 20000; step++) counts[random_permute(3, 50, seed, step)]++;
    for (int i = 0; i < 50; i++) expected[i] = 400;
    CHECK(chi_square(counts, expected, 50) < chi_square_limit(49), "the place of 3 is not uniform");
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

TEST(options_names_are_unique) {
    int count = 0;
    FOR_EACH_OPTION(a) {
        count++;
        CHECK(strlen(a->name) < 31 && strcmp(a->name, "help") && strcmp(a->short_name, "h") && strlen(a->help) > 10, "%s", a->name);
        for (const OptionRow *b = option_rows; b < a; b++)
            CHECK(b->group || (strcmp(a->name, b->name) && (!*a->short_name || strcmp(a->short_name, b->short_name))), "%s and %s", a->name, b->name);
    }
    CHECK(count == OPTION_COUNT && count > 20);
}

TEST(options_every_number) {
    static const char *const nonsense[] = {"", " ", "nan", "-nan", "inf", "-inf", "1e999", "12abc", "abc", "1,5", "1 2", "--", "0x"};
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
        Options o, before;
        options_defaults(&o);
        before = o;
        const char *name = typed(row), *field = (const char *)&o + row->offset;
        char joined[2048], shorter[8];
        snprintf(shorter, sizeof shorter, "-%s", row->short_name);
        if (row->type == OPTION_FLAG) {
            CHECK(parse(&o, name, "--seed", "5", NULL) && number_of(&o, row) == 1 && o.seed == 5 && o.given[row->index], "%s", name);
            snprintf(joined, sizeof joined, "%s=0", name);
            CHECK(parse(&o, joined, NULL) && number_of(&o, row) == 0);
            strcpy(joined + strlen(joined) - 1, "2");
            REFUSED(parse(&o, joined, NULL), name);
            continue;
        }
        CHECK(!strcmp(field, row->standard), "%s", name);
        REFUSED(parse(&o, name, too_long, NULL), "1023");
        REFUSED(parse(&o, "--seed", "1", name, NULL), name);
        for (const char *choice = row->choices; *choice; choice += *choice == '|') {
            size_t length = strcspn(choice, "|");
            snprintf(joined, sizeof joined, "%s=%.*s", name, (int)length, choice);
            CHECK(parse(&o, joined, NULL) && strlen(field) == length && !strncmp(field, choice, length), "%s", joined);
            joined[strlen(joined) - 1] = 0;
            REFUSED(parse(&o, joined, NULL), row->choices);
            choice += length;
        }
        if (*row->choices) {
            REFUSED(parse(&o, name, row->choices, NULL), name);
            REFUSED(parse(&o, name, "", NULL), row->choices);
            continue;
        }
        o = before;
        CHECK(parse(&o, name, full, NULL) && !strcmp(field, full) && o.given[row->index], "%s", name);
        CHECK(parse(&o, name, "", NULL) && !*field, "%s", name);
        CHECK(parse(&o, name, "--seed", NULL) && !strcmp(field, "--seed") && o.seed == before.seed, "%s takes what follows", name);
        snprintf(joined, sizeof joined, "%s=a=b", name);
        CHECK(parse(&o, joined, NULL) && !strcmp(field, "a=b"), "%s", name);
        CHECK(!*row->short_name || (parse(&o, shorter, "s", NULL) && !strcmp(field, "s")), "%s", shorter);
    }
}

TEST(options_unknown_names) {
    Options o;
    char long_name[4000];
    options_defaults(&o);
    REFUSED(parse(&o, "--stpes", "5", NULL), "did you mean --steps?");
    REFUSED(parse(&o, "--val-frction=0.1", NULL), "unknown option --val-frction; did you mean --val-fraction?");
    REFUSED(parse(&o, "--val_fraction", "0.1", NULL), "did you mean --val-fraction?");
    REFUSED(parse(&o, "--qqqqqqqqqq", NULL), "--help");
    CHECK(!strstr(error_text, "did you mean"));
    REFUSED(parse(&o, "book.txt", NULL), "--data FILE");
    static const char *const odd[] = {"-", "--", "---", "--=", "-Q", "", "=", "--steps-", "-steps"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) REFUSED(parse(&o, odd[i], "1", NULL), "unknown option");
    memset(long_name, '-', sizeof long_name);
    long_name[sizeof long_name - 1] = 0;
    REFUSED(parse(&o, long_name, NULL), "unknown option");
    memset(long_name + 2, 'a', sizeof long_name - 3);
    REFUSED(parse(&o, long_name, NULL), "unknown option");
    long_name[100] = '=';
    REFUSED(parse(&o, long_name, NULL), "unknown option");
    CHECK(parse(&o, NULL));
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
    for (int round = 0; round < 200; round++) {
        Options o, back;
        options_defaults(&o);
        options_defaults(&back);
        bool saved = false;
        for (int i = 0; i < OPTION_ROWS; i++) {
            const OptionRow *row = &option_rows[i];
            char *field = (char *)&o + row->offset;
            if (row->group) saved = row->saved;
            if (row->group || !saved) continue;
            double value = draw() % 8 ? row->least + draw_unit() * (row->most - row->least) : draw() % 2 ? row->least : row->most;
            if (row->type == OPTION_INT) *(int64_t *)field = (int64_t)value;
            if (row->type == OPTION_REAL) *(double *)field = value;
            if (row->type == OPTION_FLAG) *(bool *)field = draw() % 2;
            if (row->type == OPTION_TEXT && *row->choices) strcpy(field, "wsd");
            if (row->type == OPTION_TEXT && !*row->choices) draw_text(field, round ? draw_below(1024) : 1023);
        }
        if (round == 1) strcpy(o.data, "C:\\b\"o\"ok \xe2\x82\xac \xf0\x9f\x98\x80.txt");
        Json *json = options_as_json(&o);
        CHECK(options_read_json(&back, json), "%s", error_text);
        FOR_EACH_OPTION(row) {
            const char *a = (char *)&o + row->offset, *b = (char *)&back + row->offset;
            CHECK(row->type == OPTION_TEXT ? !strcmp(a, b) : number_of(&o, row) == number_of(&back, row), "%s", row->name);
        }
        options_defaults(&back);
        CHECK(parse(&back, "--lr", "0.5", "--data=mine", "--steps", "2000", NULL));
        CHECK(options_read_json(&back, json) && back.lr == 0.5 && !strcmp(back.data, "mine") && back.steps == 2000 && back.seed == o.seed);
        CHECK(!back.given[OPTION_seed] && back.given[OPTION_lr], "what was read does not count as given");
        json_free(json);
    }
    static const char *const bad[] = {"{\"batch\": 0}", "{\"batch\": 1.5}", "{\"lr\": 1e999}", "{\"lr\": null}", "{\"lr\": [1]}",
                                      "{\"seed\": {}}", "{\"lr_schedule\": \"flat\"}"};
    Options o;
    options_defaults(&o);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Json *json = json_parse(bad[i], strlen(bad[i]));
        CHECK(!json || !options_read_json(&o, json), "%s", bad[i]);
        json_free(json);
    }
    static const char with_more[] = "{\"of_a_newer_version\": 1, \"lr\": 0.25}";
    Json *newer = json_parse(with_more, sizeof with_more - 1);
    CHECK(newer && options_read_json(&o, newer) && o.lr == 0.25);
    json_free(newer);
}

static void ask_for_help(void) {
    static Run run;
    char *argv[] = {(char *)"./train", (char *)"--lr", (char *)"nonsense", (char *)"--help"};
    run_setup(&run, 4, argv);
}

TEST(options_help_and_print) {
    CHECK(run_child(ask_for_help) == 0 && strstr(child_output, "./train --data"), "said: %s", child_output);
    FOR_EACH_OPTION(row) {
        const char *found = child_output, *name = typed(row);
        char shorter[8];
        snprintf(shorter, sizeof shorter, ", -%s ", row->short_name);
        while ((found = strstr(found + 1, name)) && !(found[-1] == ' ' && found[-2] == ' ' && strchr(" ,", found[strlen(name)]))) {}
        CHECK(found && strstr(found, row->help) && strstr(found, row->help) < strchr(found, '\n'), "%s", name);
        CHECK(!*row->short_name || (strstr(found, shorter) && strstr(found, shorter) < strchr(found, '\n')), "%s", shorter);
    }
    char *text;
    size_t size;
    Options o;
    options_defaults(&o);
    FILE *file = open_memstream(&text, &size);
    options_print(file, &o, 116);
    fclose(file);
    for (char *line = text; *line; line += strcspn(line, "\n") + 1) CHECK(strcspn(line, "\n") <= 116, "too wide: %s", line);
    CHECK(strstr(text, "total-batch 0") && strstr(text, "weight-decay 0.1") && strstr(text, "eps 1e-08") && strstr(text, "dry-run false"), "%s", text);
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
    char *deep = malloc(1000000);
    for (int levels = 1; levels <= 70; levels++)
        for (int objects = 0; objects < 2; objects++) {
            size_t size = 0;
            for (int i = 0; i < levels; i++) size += (size_t)sprintf(deep + size, objects && i + 1 < levels ? "{\"k\":" : "[");
            for (int i = levels; i-- > 0;) deep[size++] = objects && i + 1 < levels ? '}' : ']';
            Json *json = parse_exactly(deep, size);
            CHECK(!json == (levels > 64), "%d levels", levels);
            json_free(json);
        }
    memset(deep, '[', 1000000);
    CHECK(!parse_exactly(deep, 1000000));
    free(deep);
    static const char beside[] = "[[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],"
                                 "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}]";
    Json *json = parse_exactly(beside, sizeof beside - 1);
    CHECK(json, "what lies side by side is not nested");
    json_free(json);
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

TEST(json_strings_survive) {
    for (int i = 0; i < 500; i++) {
        char text[301], *written;
        size_t size;
        draw_text(text, draw_below(301));
        FILE *file = open_memstream(&written, &size);
        json_write_string(file, text);
        fclose(file);
        Json *json = parse_exactly(written, size);
        CHECK(json && json->type == JSON_STRING && !strcmp(json->string, text), "%s", written);
        json_free(json);
        free(written);
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
    static const struct { const char *name; size_t rows, columns; } layer[12] = {  // of Hugging Face's GPT2LMHeadModel, C = 8
        {"ln_1.weight", 8, 0}, {"ln_1.bias", 8, 0}, {"attn.c_attn.weight", 8, 24}, {"attn.c_attn.bias", 24, 0}, {"attn.c_proj.weight", 8, 8},
        {"attn.c_proj.bias", 8, 0}, {"ln_2.weight", 8, 0}, {"ln_2.bias", 8, 0}, {"mlp.c_fc.weight", 8, 32}, {"mlp.c_fc.bias", 32, 0},
        {"mlp.c_proj.weight", 32, 8}, {"mlp.c_proj.bias", 8, 0}};
    size_t total;
    GptTensor *t = gpt_tensors(small, &total);
    CHECK(total == SMALL && !strcmp(t[0].name, "transformer.wte.weight") && t[0].shape[0] == 257 && t[0].shape[1] == 8);
    CHECK(!strcmp(t[1].name, "transformer.wpe.weight") && t[1].shape[0] == 12 && t[1].shape[1] == 8);
    for (int i = 0; i < 24; i++) {
        char name[64];
        snprintf(name, sizeof name, "transformer.h.%d.%s", i / 12, layer[i % 12].name);
        CHECK(!strcmp(t[2 + i].name, name) && t[2 + i].shape[0] == layer[i % 12].rows && t[2 + i].shape[1] == layer[i % 12].columns, "%s", name);
    }
    CHECK(!strcmp(t[26].name, "transformer.ln_f.weight") && !strcmp(t[27].name, "transformer.ln_f.bias") && t[27].shape[0] == 8);
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
    char *text, *shown;
    size_t size, length;
    bool seen[257] = {false};
    FILE *file = open_memstream(&text, &size);
    tokenizer_write_json(file);
    fclose(file);
    Json *json = parse_exactly(text, size), *model = json_get(json, "model"), *vocab = json_get(model, "vocab");
    CHECK(json && vocab && vocab->type == JSON_OBJECT, "%s", error_text);
    int count = 0;
    for (Json *a = vocab->child; a; a = a->next, count++) {
        int id = (int)a->number;
        CHECK(a->number == id && id >= 0 && id < 257 && !seen[id], "%s: %g", a->key, a->number);
        seen[id] = true;
        for (Json *b = a->next; b; b = b->next) CHECK(strcmp(a->key, b->key), "%s twice", a->key);
    }
    CHECK(count == 257);
    // From GPT-2's published vocabulary: U+0120 is the space, U+010A the newline, U+0143 the byte AD.
    static const struct { const char *key; int id; } known[] = {
        {"A", 65}, {"!", 33}, {"~", 126}, {"\"", 34}, {"\\", 92}, {"\xc4\x80", 0}, {"\xc4\x8a", 10}, {"\xc4\xa0", 32}, {"\xc4\xa1", 127},
        {"\xc4\xa2", 128}, {"\xc5\x82", 160}, {"\xc2\xa1", 161}, {"\xc5\x83", 173}, {"\xc2\xae", 174}, {"\xc3\xbf", 255}, {"<|endoftext|>", 256}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        CHECK(json_number_or(vocab, known[i].key, -1) == known[i].id, "%s is %g", known[i].key, json_number_or(vocab, known[i].key, -1));
    Json *added = json_get(json, "added_tokens")->child;
    CHECK(json_number_or(added, "id", 0) == 256 && !strcmp(json_string_or(added, "content", ""), "<|endoftext|>"));
    CHECK(!strcmp(json_string_or(model, "type", ""), "BPE") && json_get(model, "merges")->type == JSON_ARRAY && !json_get(model, "merges")->child);
    CHECK(!strcmp(json_string_or(json_get(json, "pre_tokenizer"), "type", ""), "ByteLevel"));
    json_free(json);
    free(text);
    file = open_memstream(&shown, &length);
    for (int token = 0; token < 257; token++) token_write(file, token);
    fclose(file);
    for (int i = 0; i < 256; i++) CHECK((unsigned char)shown[i] == i);
    CHECK(length == 257 && shown[256] == '\n');
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
    const char *path = at("round.safetensors");
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
    const char *path = at("damaged.safetensors");
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
    REFUSED(opens(at("missing.safetensors")), "No such file");
    REFUSED(opens(scratch), scratch);
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
    put_text(at("stream/a.txt"), "hi");
    put_shard(at("stream/b.bin"), 1, 5, 0, b, 5);
    put(at("stream/c.txt"), "\0\xff\xc8\n", 4);  // bytes that are no UTF-8
    put_text(at("stream/z.md"), "something else");
    CHECK(!mkdir(at("stream/d.txt"), 0777));
    check_stream(at("stream/a.txt"), 1, joined, 3);
    check_stream(at("stream/b.bin"), 1, b, 5);
    check_stream(at("stream/[ab].*"), 2, joined, 8);
    check_stream(at("stream/?.txt"), 2, (int[]){'h', 'i', END, 0, 255, 200, '\n', END}, 8);
    check_stream(at("stream/{b.bin,c.txt}"), 2, joined + 3, 10);
    check_stream(at("stream/?.[tb]*"), 3, joined, 13);
    CHECK(!setenv("HOME", folder, 1));
    check_stream("~/b.bin", 1, b, 5);
    put_text(at("stream/we[i]rd {a,b}*.txt"), "!");
    check_stream(at("stream/we[i]rd {a,b}*.txt"), 1, (int[]){'!', END}, 2);
    put_shard(at("stream/more than promised.bin"), 1, 3, 70, b, 5);
    check_stream(at("stream/more than promised.bin"), 1, b, 3);
    put_shard(at("stream/shard of another name"), 1, 5, 0, b, 5);
    check_stream(at("stream/shard of another name"), 1, b, 5);
    Data data;
    CHECK(data_open(&data, at("stream/a.txt")) && data.vocab == 257); data_close(&data);
    CHECK(data_open(&data, at("stream/more than promised.bin")) && data.vocab == 70); data_close(&data);
    CHECK(data_open(&data, at("stream/[abc].*")) && data.vocab == 50257); data_close(&data);
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
    REFUSED(opens_data(at("errors/missing.txt")), "missing.txt: No such file");
    REFUSED(opens_data(at("errors/missing*.txt")), "missing*.txt");
    REFUSED(opens_data(put(at("errors/empty.txt"), "", 0)), "is empty");
    REFUSED(opens_data(put(at("errors/empty.bin"), "", 0)), "is empty");
    REFUSED(opens_data("/dev/null"), "not a regular file");
    const char *shard = at("errors/shard.bin");
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
    REFUSED(opens_data(at("errors/no data")), "no data");
    CHECK(!mkdir(at("errors/no data/x.txt"), 0777));
    REFUSED(opens_data(at("errors/no data")), "no data");
    put_text(at("errors/good1.txt"), "good"), put(at("errors/good2.txt"), "", 0);
    REFUSED(opens_data(at("errors/good*")), "good2.txt is empty");  // one bad file among good ones

    Data data;
    int out[8];
    put_text(at("errors/y1.txt"), "abcde");
    const char *second = put_shard(at("errors/y2.bin"), 1, 4, 0, tokens, 4);
    CHECK(data_open(&data, at("errors/y*")) && data.end == 10, "%s", error_text);
    CHECK(data_read(&data, 6, 3, 4, out), "%s", error_text);
    REFUSED(data_read(&data, 6, 4, 4, out), second);
    CHECK(strstr(error_text, "token 4 at position 3") && strstr(error_text, "has 4 (0 to 3)"), "%s", error_text);
    REFUSED(data_read(&data, 4, 2, 256, out), "token 256 at position 5");
    REFUSED(data_cut(&data, 0, 10, 10, 1, "--data"), "--data has 10 tokens, and a sequence of T = 10 needs 11");
    REFUSED(data_cut(&data, 8, 10, 2, 1, "the rest"), "the rest has 2 tokens");
    data_close(&data);
}

// ---------------------------------------------------------------------------

// Runs one test from draws of its own, so that it can be run again alone. False if it failed.
static bool run_test(const char *name, void (*body)(void), uint64_t seed) {
    draw_state = seed;
    for (const char *c = name; *c; c++) draw_state = (draw_state ^ (unsigned char)*c) * 0x100000001B3u;
    int end = setjmp(test_end);
    if (!end) body();
    if (!end) printf("ok - %s\n", name);
    else printf("%s - %s: %s\n", end == 1 ? "not ok" : "skip", name, failure);
    fflush(stdout);
    return end != 1;
}

int main(int argc, char **argv) {
    const char *given = getenv("TEST_SEED"), *folder = getenv("TMPDIR");
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    int failed = 0, ran = 0;
    printf("# TEST_SEED=%llu\n", (unsigned long long)seed);
    snprintf(scratch, sizeof scratch, "%s/test_host.XXXXXX", folder && *folder ? folder : "/tmp");
    if (!mkdtemp(scratch)) die("cannot make the folder %s: %s", scratch, strerror(errno));
    for (int i = 0; i < test_count; i++) {
        if (argc > 1 && !strstr(tests[i].title, argv[1])) continue;
        failed += !run_test(tests[i].title, tests[i].body, seed);
        ran++;
    }
    remove_tree(scratch);
    if (!ran) printf("no test has '%s' in its name\n", argv[1]);
    return failed > 0 || !ran;
}

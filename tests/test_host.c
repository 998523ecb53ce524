// Unit tests of the headers in gpt/: everything but the arithmetic. One line a test, exit status 1 if any failed.
//
//   make build/cc/test_host && build/cc/test_host      (tests/frame.h says more)
//
// Expected values were worked out apart from the code under test: by hand, from published tables, or by a slow and
// obvious second way. Statistical limits are set for a false alarm about once in 10^9 checks.

#include <ftw.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "gpt/run.h"
#include "tests/frame.h"

// The call has to return false after fail() with a sentence that contains `part`.
#define REFUSED(call, part) do {                                                                                       \
        *error_text = 0;                                                                                               \
        CHECK(!(call), "was accepted");                                                                                \
        CHECK(strlen(error_text) > 15 && strstr(error_text, part), "no '%s' in: %s", part, error_text);                \
    } while (0)

// Under the address sanitizer, too, an allocation that is too large returns NULL instead of ending the program. In a forked
// process what belongs to threads of its parent looks lost, so that leaks are not looked for there.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) { return in_child; }

// Runs body in a forked process. Returns its exit status; child_output is what it wrote to stdout and stderr.
static char child_output[1 << 16];
static int run_child(void (*body)(void)) {
    int ends[2], status = 0;
    fflush(NULL);
    CHECK(!pipe(ends));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        in_child = true;
        dup2(ends[1], 1), dup2(ends[1], 2);
        body();
        fflush(NULL);
        _exit(0);
    }
    waitpid(child, &status, 0);  // what it says fits into the pipe
    close(ends[1]);
    ssize_t length = read(ends[0], child_output, sizeof child_output - 1);
    child_output[length > 0 ? length : 0] = 0;
    close(ends[0]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static size_t draw_below(size_t n) { return (size_t)(draw() % n); }

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

// --------------------------------------------------------------------------------------------------------- error.h

static void die_loudly(void) { die("there were %d bolts instead of %d", 3, 4); }
static volatile size_t far_too_many = SIZE_MAX / 8;
static void run_out_of_memory(void) { printf("%p", allocate(far_too_many, 16, "the moon")); }  // used, so that compilers leave it in
TEST(error_sentences) {
    CHECK(!fail("first %d", 1) && !strcmp(error_text, "first 1") && !fail("second after %s", error_text) && !strcmp(error_text, "second after first 1"));
    CHECK(run_child(die_loudly) == 1 && !strcmp(child_output, "error: there were 3 bolts instead of 4\n"), "said: %s", child_output);
    CHECK(run_child(run_out_of_memory) == 1 && strstr(child_output, "error: out of memory: the moon"), "said: %s", child_output);
    free(allocate(0, 4, "nothing"));
}

// -------------------------------------------------------------------------------------------------------- random.h

TEST(random_known_answers) {  // kat_vectors of the Random123 library: counter, key, result
    static const uint32_t known[3][10] = {{0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (int i = 0; i < 3; i++) {
        const uint32_t *c = known[i], *key = known[i] + 4;
        Random4 r = philox4x32(c[0], c[1], c[2], c[3], key[0], key[1]), s = random4((uint64_t)key[1] << 32 | key[0], c[3], c[2], (uint64_t)c[1] << 32 | c[0]);
        CHECK(!memcmp(r.word, known[i] + 6, sizeof r.word) && !memcmp(s.word, known[i] + 6, sizeof s.word), "vector %d", i);
    }
}

TEST(random_uniform) {
    static const uint32_t extremes[] = {0, 1, 255, 256, 0x7fffffff, 0x80000000, 0xfffffe00, 0xfffffeff, 0xffffff00, 0xffffffff};
    Random4 zero = {{0, 0, 0, 0}}, ones = {{~0u, ~0u, ~0u, ~0u}}, half = {{0x80000000, 0, 0, 0}};
    uint64_t seed = draw();
    double counts[7] = {0};
    for (int i = 0; i < 100000; i++) {
        uint32_t word = i < 10 ? extremes[i] : (uint32_t)draw();
        float u = random_to_uniform(word);
        CHECK(u > 0 && u < 1 && fabs(u - (word + 0.5) / 4294967296.0) <= 1.0 / 4194304, "%08x gives %.9g", word, u);
    }
    CHECK(random_below(zero, 10) == 0 && random_below(ones, 10) == 9 && random_below(half, 10) == 5 && random_below(ones, 1) == 0);
    for (uint32_t i = 0; i < 70000; i++) counts[random_below(random4(seed, RANDOM_OFFSET, i, 0), 7)]++;
    CHECK(uniform(counts, 7, 10000));
}

TEST(random_normal_distribution) {
    enum { N = 1 << 20, BINS = 64 };
    float *x = malloc(N * sizeof *x), y[1000];
    uint64_t seed = draw();
    random_normal(x, N, 1, seed, RANDOM_INIT, 5);
    double sum = 0, square = 0, counts[BINS] = {0}, lag[5] = {0}, root = sqrt(N);
    for (int i = 0; i < N; i++) {
        double z = x[i];
        int bin = (int)(BINS * 0.5 * erfc(-z / sqrt(2)));  // the bins are equally likely
        counts[bin < BINS ? bin : BINS - 1]++;
        sum += z, square += z * z;
        for (int k = 1; k < 5 && i >= k; k++) lag[k] += z * x[i - k];
    }
    CHECK(fabs(sum) < SIGMAS * root && fabs(square - N) < SIGMAS * sqrt(2) * root, "mean %g, variance %g", sum / N, square / N);  // z^2 has the variance 2
    CHECK(uniform(counts, BINS, N / BINS), "the shape is not normal");
    for (int k = 1; k < 5; k++) CHECK(fabs(lag[k] / root) < SIGMAS, "numbers %d apart hang together", k);
    for (size_t n = 0; n < 10; n++) {  // any count, a prefix of the same numbers, and nothing behind it
        y[n] = 77;
        random_normal(y, n, 2, seed, RANDOM_INIT, 5);
        for (size_t i = 0; i <= n; i++) CHECK(y[i] == (i < n ? 2 * x[i] : 77));
    }
    for (int k = 0; k < 3; k++) {
        int same = 0;
        random_normal(y, 1000, 1, seed ^ (k == 0), k == 1 ? RANDOM_SAMPLE : RANDOM_INIT, k == 2 ? 6 : 5);
        for (int i = 0; i < 1000; i++) same += x[i] == y[i];
        CHECK(same < 5, "seed, purpose and step each have to change the numbers (%d)", k);
    }
    free(x);
}

TEST(random_permute_is_a_shuffle) {
    static bool seen[65537];
    for (uint64_t n = 1; n <= 65537; n = n < 300 || (n > 4000 && n < 4097) ? n + 1 : n < 4095 ? 4095 : 65537 + (n == 65537)) {
        uint64_t seed = draw();
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t to = random_permute(i, n, seed, (uint32_t)n);
            CHECK(to < n && !seen[to], "n %llu: %llu goes to %llu", (unsigned long long)n, (unsigned long long)i, (unsigned long long)to);
            seen[to] = true;
        }
    }
    int same[4] = {0};  // each near 1 in a random permutation, near 300 in a poor one
    double counts[50] = {0};
    uint64_t seed = draw();
    for (uint64_t i = 0; i < 300; i++) {
        const uint64_t to = random_permute(i, 300, seed, 1);
        const uint64_t other[] = {random_permute(i, 300, seed, 2), random_permute(i, 300, seed + 1, 1), i, random_permute((i + 299) % 300, 300, seed, 1) + 1};
        for (int k = 0; k < 4; k++) same[k] += to == other[k];
    }
    for (int k = 0; k < 4; k++) CHECK(same[k] < 20, "as with another step, with another seed, in place, or next to its neighbour: %d, kind %d", same[k], k);
    for (uint32_t step = 0; step < 20000; step++) counts[random_permute(3, 50, seed, step)]++;
    CHECK(uniform(counts, 50, 400), "the place of 3 is not uniform");
}

// ------------------------------------------------------------------------------------------------------ schedule.h

static const char *const shapes[] = {"cosine", "linear", "constant", "wsd"};
TEST(schedule_known_values) {  // peak 2, final 0.1 of it, 20 steps of warm-up, 100 steps
    static const double known[11][5] = {  // step, cosine, linear, constant, wsd
        {0, 0.1, 0.1, 0.1, 0.1}, {9, 1, 1, 1, 1}, {19, 2, 2, 2, 2}, {20, 2, 2, 2, 2},  // the first is a twentieth of the peak
        {40, 1.7363961030678928, 1.55, 2, 2},   // a quarter done: (1 + sqrt(1/2)) / 2 of the way down is left in the cosine
        {60, 1.1, 1.1, 2, 2}, {80, 0.4636038969321072, 0.65, 2, 2},  // here wsd begins to fall, over 20 steps
        {85, 0.3516773489292920, 0.5375, 2, 1.1},  // a quarter of the fall: 1 - sqrt(1/4) is left
        {99, 0.2006938673833492, 0.2225, 2, 0.2455770179343866}, {100, 0.2, 0.2, 2, 0.2}, {100000, 0.2, 0.2, 2, 0.2}};
    for (int i = 0; i < 44; i++) {
        Schedule s = {shapes[i % 4], 2, 0.1, 20, 100};
        double rate = schedule_rate(&s, (long long)known[i / 4][0]);
        CHECK(fabs(rate - known[i / 4][1 + i % 4]) < 1e-6, "%s at step %g: %.12g", s.shape, known[i / 4][0], rate);
    }
}

TEST(schedule_edges) {
    for (int shape = 0; shape < 4; shape++) {
        Schedule no_warmup = {shapes[shape], 3, 0.5, 0, 10}, all_warmup = {shapes[shape], 3, 0.5, 10, 10}, none = {shapes[shape], 3, 0.5, 0, 0};
        Schedule cut_short = {shapes[shape], 3, 0.5, 10, 4};  // ends before the warm-up does
        CHECK(schedule_rate(&no_warmup, 0) == 3 && fabs(schedule_rate(&all_warmup, 4) - 1.5) < 1e-12 && schedule_rate(&all_warmup, 9) == 3);
        for (int step = 0; step < 10; step++) CHECK(fabs(schedule_rate(&cut_short, step) - 0.3 * (step + 1)) < 1e-12);
        double ends[] = {schedule_rate(&all_warmup, 10), schedule_rate(&none, 0), schedule_rate(&cut_short, 10)};
        for (int i = 0; i < 3; i++) CHECK(ends[i] >= 1.5 && ends[i] <= 3, "%s: %g", shapes[shape], ends[i]);
    }
}

TEST(schedule_rises_then_falls) {
    for (int i = 0; i < 400; i++) {
        long long steps = 2 + (long long)draw_below(300), warmup = (long long)draw_below((size_t)steps);
        Schedule s = {shapes[i % 4], 0.001 + draw_unit(), draw_unit(), warmup, steps};
        double least = s.peak * (s.final - 1e-12), most = s.peak * (1 + 1e-12), before = 0;
        CHECK(fabs(schedule_rate(&s, warmup) - s.peak) < 1e-12, "%s, warm-up %lld of %lld: not at the peak after it", s.shape, warmup, steps);
        for (long long step = 0; step < steps + 3; step++) {
            double rate = schedule_rate(&s, step);
            CHECK(step < warmup ? rate > before && rate <= most : rate >= least && rate <= most, "%s step %lld: %g", s.shape, step, rate);
            CHECK(step <= warmup || rate <= before + 1e-12 * s.peak, "%s, warm-up %lld of %lld, rises at step %lld", s.shape, warmup, steps, step);
            before = rate;
        }
    }
}

// -------------------------------------------------------------------------------------------------------- sample.h

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
        {2, 1, 0.9999999f, 3}, {3, 1, 0.999f, 0}, {9, 1, 0.999f, 2}, {2, 0.6, 0.9f, 1}, {2, 0.65, 0.62f, 1}, {2, 0.65, 0.63f, 3}};  // 0.5 / 0.8 is 0.625
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        int token = sample_token(p, 4, 1, known[i].k, known[i].top_p, known[i].u);
        CHECK(token == known[i].token, "top_k %d, top_p %g, at %g: %d", known[i].k, known[i].top_p, known[i].u, token);
    }
}

TEST(sample_frequencies_follow_softmax) {
    enum { V = 9, N = 100000 };
    static const struct { double temperature; int top_k; double top_p; } ways[] = {{1, 0, 1}, {0.6, 0, 1}, {2.5, 0, 1}, {1.5, 4, 1}, {0.9, 0, 0.7}};
    for (int way = 0; way < 5; way++) {
        float logits[V];
        double weight[V], expected[V], counts[V] = {0}, total = 0, left = 0, chi = 0, kinds = 0;
        for (int i = 0; i < V; i++) logits[i] = (float)(3 * draw_unit() - 1.5);
        for (int i = 0; i < V; i++) total += weight[i] = exp(logits[i] / ways[way].temperature);
        for (int i = 0; i < V; i++) {  // a token stays if those likelier than it are fewer than k, and together below p
            double likelier = 0;
            int rank = 0;
            for (int j = 0; j < V; j++) if (logits[j] > logits[i]) likelier += weight[j] / total, rank++;
            left += expected[i] = (!ways[way].top_k || rank < ways[way].top_k) && likelier < ways[way].top_p ? weight[i] : 0;
        }
        for (int i = 0; i < N; i++)
            counts[sample_token(logits, V, ways[way].temperature, ways[way].top_k, ways[way].top_p, (float)((double)(draw() >> 41) + 0.5) / 8388608)]++;
        for (int i = 0; i < V; i++) {
            double wanted = expected[i] * N / left;
            CHECK(wanted > 0 || counts[i] == 0, "way %d: token %d was left out, and drawn", way, i);
            if (wanted > 0) kinds++, chi += (counts[i] - wanted) * (counts[i] - wanted) / wanted;
        }
        CHECK(kinds == 1 || chi < chi_square_limit((int)kinds - 1), "way %d: chi-square %g of %g tokens", way, chi, kinds);
    }
}

TEST(sample_never_draws_nan_or_minus_infinity) {
    enum { V = 40 };
    float logits[V];
    for (int i = 0; i < 20000; i++) {
        int kind = i < 3 ? i : 3;  // nothing but NaN, -inf or inf: any token will do
        for (int t = 0; t < V; t++) logits[t] = t == i % V ? 0 : draw() % 3 == 0 ? NAN : draw() % 2 ? -INFINITY : (float)(20 * draw_unit() - 10);
        for (int t = 0; t < V && kind < 3; t++) logits[t] = kind == 0 ? NAN : kind == 1 ? -INFINITY : INFINITY;
        float u = i % 3 == 0 ? 1 - 0x1p-24f : i % 3 == 1 ? 0x1p-25f : (float)(draw_unit() * 0.999999);
        int t = sample_token(logits, V, i % 5 ? 3 * draw_unit() : 0, i % 7 ? 0 : (int)draw_below(50), i % 2 ? 1 : draw_unit(), u);
        CHECK(t >= 0 && t < V && (kind < 3 || (!isnan(logits[t]) && logits[t] != -INFINITY)), "token %d", t);
    }
}

// ------------------------------------------------------------------------------------------------------- options.h

static Run run;

// Arguments, of which the last is NULL, as main() gets them.
static int to_argv(char **argv, const char *const *arguments) {
    int argc = 1;
    for (argv[0] = (char *)"program"; (argv[argc] = (char *)arguments[argc - 1]);) argc++;
    return argc;
}

static bool parse_list(Options *o, const char *const *arguments) {
    char *argv[18];
    return options_parse(o, to_argv(argv, arguments), argv);
}
#define parse(o, ...) parse_list(o, (const char *const[]){__VA_ARGS__})

static bool setup(const char *const *arguments) {
    char *argv[18];
    data_close(&run.train), data_close(&run.val);
    return run_setup(&run, to_argv(argv, arguments), argv);
}
#define SETUP(...) setup((const char *const[]){__VA_ARGS__, NULL})

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
        char text[64];
        CHECK(number_of(&o, row) == strtod(row->standard, NULL) && number_of(&o, row) >= row->least && number_of(&o, row) <= row->most, "%s", name);
        for (int i = 0; i < 2; i++) {
            double bound = i ? row->most : row->least, outside = real ? nextafter(bound, i ? INFINITY : -INFINITY) : bound + (i ? 1 : -1);
            snprintf(text, sizeof text, "%.17g", bound);
            for (int form = 0; form < 3 - !*row->short_name; form++, o = before) {
                CHECK(form == 1 ? parse(&o, at("%s=%s", name, text), NULL) : parse(&o, form ? at("-%s", row->short_name) : name, text, NULL), "%s", name);
                CHECK(number_of(&o, row) == bound && o.given[row->index], "%s %s", name, text);
            }
            snprintf(text, sizeof text, "%.17g", outside);
            REFUSED(parse(&o, name, text, NULL), at("from %.16g to %.16g", row->least, row->most));
        }
        for (size_t i = 0; i < sizeof nonsense / sizeof *nonsense; i++) REFUSED(parse(&o, name, nonsense[i], NULL), name);
        if (!real) REFUSED(parse(&o, name, at("%.0f.5", row->least), NULL), "whole");
        REFUSED(parse(&o, name, NULL), name);
        CHECK(!memcmp(&o, &before, sizeof o), "a refused %s changed something", name);
    }
}

TEST(options_every_text_and_flag) {
    static const char *const no_choice[] = {"", "cos", "cosine|linear", "cosines"};
    static char full[1024], too_long[1025];
    memset(full, 'x', 1023), memset(too_long, 'x', 1024);
    FOR_EACH_OPTION(row) if (row->type == OPTION_TEXT || row->type == OPTION_FLAG) {
        Options o;
        options_defaults(&o);
        const char *name = typed(row), *field = (const char *)&o + row->offset, *value = *row->choices ? "wsd" : "a=b";
        if (row->type == OPTION_FLAG) {
            CHECK(parse(&o, name, "--seed", "5", NULL) && number_of(&o, row) == 1 && o.seed == 5 && o.given[row->index], "%s", name);
            CHECK(parse(&o, at("%s=0", name), NULL) && number_of(&o, row) == 0, "%s=0", name);
            continue;
        }
        REFUSED(parse(&o, name, too_long, NULL), "1023");
        REFUSED(parse(&o, name, NULL), name);
        CHECK(!strcmp(field, row->standard) && parse(&o, at("%s=%s", name, value), NULL) && !strcmp(field, value) && o.given[row->index], "%s=%s", name, value);
        for (int i = 0; i < 4 && *row->choices; i++) {
            REFUSED(parse(&o, name, no_choice[i], NULL), row->choices);
            CHECK(parse(&o, name, shapes[i], NULL) && !strcmp(field, shapes[i]), "%s", shapes[i]);
        }
        if (*row->choices) continue;
        CHECK(parse(&o, name, full, NULL) && !strcmp(field, full) && parse(&o, name, "", NULL) && !*field, "%s", name);
        CHECK(parse(&o, name, "--seed", NULL) && !strcmp(field, "--seed") && !o.given[OPTION_seed], "%s takes what follows", name);
        CHECK(!*row->short_name || (parse(&o, at("-%s", row->short_name), "s", NULL) && !strcmp(field, "s")), "-%s", row->short_name);
    }
}

TEST(options_unknown_names) {
    static const char *const known[][2] = {{"--stpes", "did you mean --steps?"}, {"--val-frction=0.1", "option --val-frction; did you mean --val-fraction?"},
        {"--qqqqqqqqqq", "--qqqqqqqqqq; --help"}, {"book.txt", "--data FILE"}, {"-", "unknown"}, {"--", "unknown"}, {"---", "unknown"}, {"--=", "unknown"},
        {"-Q", "unknown"}, {"", "unknown"}, {"=", "unknown"}, {"--steps-", "unknown"}, {"-steps", "unknown"}};
    Options o;
    char long_name[4000] = "";
    options_defaults(&o);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) REFUSED(parse(&o, known[i][0], "5", NULL), known[i][1]);
    for (int i = 0; i < 4; i++) {
        memset(long_name, i % 2 ? 'a' : '-', sizeof long_name - 1);
        memcpy(long_name, "--", 2);
        if (i > 1) long_name[100] = '=';
        REFUSED(parse(&o, long_name, NULL), "unknown option");
    }
}

// A random text of any bytes but NUL, with those that need care more often.
static void draw_text(char *text, size_t length) {
    for (size_t i = 0; i < length; i++) text[i] = draw() % 4 ? (char)(1 + draw_below(255)) : "\"\\/\n\t\x7f\x1f"[draw_below(7)];
    text[length] = 0;
}

TEST(options_survive_json) {
    static const char *const texts[] = {"{\"of_a_newer_version\": 1, \"lr\": 0.25}", "{\"batch\": 0}", "{\"batch\": 1.5}", "{\"lr\": 1e999}",
                                        "{\"lr\": null}", "{\"lr\": [1]}", "{\"seed\": {}}", "{\"lr_schedule\": \"flat\"}"};
    Options o, back;
    size_t size;
    for (int round = 0; round < 200; round++) {
        bool saved = false;
        options_defaults(&o), options_defaults(&back);
        for (const OptionRow *row = option_rows; row < option_rows + OPTION_ROWS; row++) {
            char *field = (char *)&o + row->offset;
            if (row->group) saved = row->saved;
            if (row->group || !saved) continue;
            double value = draw() % 8 ? row->least + draw_unit() * (row->most - row->least) : draw() % 2 ? row->least : row->most;
            if (row->type == OPTION_INT) *(int64_t *)field = (int64_t)value;
            if (row->type == OPTION_REAL) *(double *)field = value;
            if (row->type == OPTION_TEXT && *row->choices) strcpy(field, "wsd");
            if (row->type == OPTION_TEXT && !*row->choices) draw_text(field, round ? draw_below(1024) : 1023);
        }
        FILE *file = fopen("options", "w");
        fputc('{', file), options_write_json(file, &o), fputc('}', file), fclose(file);
        char *text = get("options", &size);
        Json *json = json_parse(text, size);
        CHECK(json && options_read_json(&back, json), "%s in %s", error_text, text);
        FOR_EACH_OPTION(row) {
            const char *a = (char *)&o + row->offset, *b = (char *)&back + row->offset;
            CHECK(row->type == OPTION_TEXT ? !strcmp(a, b) : number_of(&o, row) == number_of(&back, row), "%s", row->name);
        }
        options_defaults(&back);
        CHECK(parse(&back, "--lr", "0.5", "--data=mine", NULL) && options_read_json(&back, json));
        CHECK(back.lr == 0.5 && !strcmp(back.data, "mine") && back.seed == o.seed && !back.given[OPTION_seed], "what is given stays");
        json_free(json), free(text);
    }
    for (int i = 0; i < 8; i++) {
        Json *json = json_parse(texts[i], strlen(texts[i]));
        CHECK((json && options_read_json(&o, json)) == (i == 0) && o.lr == 0.25, "%s", texts[i]);
        json_free(json);
    }
}

static void ask_for_help(void) { SETUP("--lr", "nonsense", "--help"); }
TEST(options_help_and_print) {
    Options o;
    options_defaults(&o);
    CHECK(run_child(ask_for_help) == 0 && strstr(child_output, "program --data"), "said: %s", child_output);
    FOR_EACH_OPTION(row) {
        const char *start = at("\n  %s%s%s ", typed(row), *row->short_name ? ", -" : "", row->short_name), *found = strstr(child_output, start);
        CHECK(found && strstr(found, row->help) && strstr(found, row->help) < strchr(found + 1, '\n'), "no line '%s'", start + 1);
    }
    char text[4096] = "";
    FILE *file = fmemopen(text, sizeof text, "w");
    options_print(file, &o, 116), fclose(file);
    for (char *line = text; *line; line += strcspn(line, "\n") + 1) CHECK(strcspn(line, "\n") <= 116, "too wide: %s", line);
    CHECK(strstr(text, "total-batch 0") && strstr(text, "weight-decay 0.1") && strstr(text, "eps 1e-08") && strstr(text, "tokens 256"), "%s", text);
}

// ---------------------------------------------------------------------------------------------------------- json.h

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
    CHECK(!json_get(json, "b") && !json_get(json_get(json, "a"), "a") && json_number_or(json, "raw", 7) == 7 && !strcmp(json_string_or(json, "a", "?"), "?"));
    json_free(json);
}

TEST(json_malformed) {
    static const char *const bad[] = {
        "", " ", "[", "]", "{", "}", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "[1,,2]", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{,}", "{a:1}", "{1:2}",
        "{\"a\" 1}", "[1}", "{\"a\":1]", "1 2", "nul", "tru", "falsee", "nullnull", "True", "NaN", "Infinity", "-", "--1", "+1", "1e", "1e+", "1.2.3",
        "0x10", "1-", "e5", "'a'", "\"", "\"a", "\"\\\"", "\"\\", "\"\\x\"", "\"\\u\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"", "\"\\ud800x\"",
        "\"\\ud83d\\n12345\"", "\"\\ud83d\\u12\"", "\"\\ud83d\\u0041\"", "\"\\ud83d\\ud83d\"", "\"\\u0000\"", "\"\t\"", "\"\n\"", "// a\n1", "\xef\xbb\xbf{}",
        "1111111111111111111111111111111111111111111111111111111111111111111111"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Json *json = parse_exactly(bad[i], strlen(bad[i]));
        CHECK(!json && *error_text, "accepted: %s", bad[i]);
    }
    CHECK(!parse_exactly("[1\0]", 4) && !parse_exactly("\"a\0\"", 4) && !parse_exactly("\"\\\0\"", 4), "a NUL");
}

TEST(json_nesting) {
    static char text[3001];
    for (int levels = 1; levels <= 70; levels++) {
        char *end = text;
        for (int i = 0; i < levels; i++) end += sprintf(end, i % 2 ? "{\"k\":" : "[");
        if (levels % 2 == 0) *end++ = '0';
        for (int i = levels; i-- > 0;) *end++ = i % 2 ? '}' : ']';
        Json *json = parse_exactly(text, (size_t)(end - text));
        CHECK(!json == (levels > 64), "%d levels: %s", levels, error_text);
        json_free(json);
    }
    memset(text, '[', sizeof text);
    CHECK(!parse_exactly(text, sizeof text));
    for (int i = 0; i < 1000; i++) memcpy(text + 3 * i, i ? ",{}" : "[{}", 3);
    text[3000] = ']';
    Json *json = parse_exactly(text, sizeof text);
    CHECK(json, "what lies side by side is not nested");
    json_free(json);
}

TEST(json_damaged_documents) {
    for (size_t size = 0; size < sizeof document - 1; size++) CHECK(!parse_exactly(document, size), "the first %zu bytes alone", size);
    for (int i = 0; i < 20000; i++) {  // no crash, no leak, whatever comes out
        char text[sizeof document];
        memcpy(text, document, sizeof document);
        for (size_t k = 1 + draw_below(3); k-- > 0;) text[draw_below(sizeof document - 1)] = draw() % 2 ? (char)draw() : "{}[]\",:\\u0e-"[draw_below(12)];
        json_free(parse_exactly(text, sizeof document - 1));
    }
}

// --------------------------------------------------------------------------------------------------------- model.h

TEST(model_sizes) {
    static const struct { const char *name; int vocab; size_t parameters; } known[] = {  // GPT-2's own are widely published
        {"d12", 50257, 124439808}, {"d24", 50257, 354823168}, {"d36", 50257, 774030080}, {"d48", 50257, 1557611200},
        {"d6", 50257, 30339456}};  // (50257 + 1024) * 384 + 6 * (12 * 384 * 384 + 13 * 384) + 2 * 384
    for (int i = 0; i < 5; i++) {
        const GptPreset *p = gpt_preset(known[i].name);
        GptConfig c = {p->layers, p->heads, p->channels, p->seq, known[i].vocab};
        size_t total, offset = 0;
        GptTensor *t = gpt_tensors(c, &total);
        for (int k = 0; k < 12 * c.layers + 4; offset += t[k++].size)
            CHECK(t[k].offset == offset && t[k].size == t[k].shape[0] * (t[k].rank == 2 ? t[k].shape[1] : 1) && t[k].decay == (t[k].rank == 2), "%s", t[k].name);
        CHECK(offset == total && total == known[i].parameters && gpt_config_check(c), "%s has %zu", known[i].name, total);
        free(t);
    }
    CHECK(gpt_preset("tiny") && !gpt_preset("d13") && !gpt_preset(""));
    REFUSED(gpt_config_check((GptConfig){1, 3, 64, 8, 257}), "--channels 64 is not a multiple of --heads 3");
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
        CHECK(t[i].rank == 2 || (sum == constant * n && square == constant * n), "%s", t[i].name);
        CHECK(t[i].rank == 1 || (fabs(sum) / std / sqrt(n) < SIGMAS && fabs(square / (std * std) - n) / sqrt(2 * n) < SIGMAS), "%s has the mean %g, deviation %g",
              t[i].name, sum / n, sqrt(square / n));
        for (int k = 0; k < i; k++) CHECK(t[k].rank == 1 || memcmp(x, w + t[k].offset, 32), "%s is as %s", t[i].name, t[k].name);
    }
    for (int other = 0; other < 2; other++) {
        gpt_init(c, again, seed ^ (uint64_t)other << 40);
        CHECK(!memcmp(w, again, other ? 32 : total * sizeof *w) == !other, "seed and weights have to go together");
    }
    free(w), free(again), free(t);
}

// ----------------------------------------------------------------------------------------------------- tokenizer.h

TEST(tokenizer_json) {
    // From GPT-2's published vocabulary: U+0120 is the space, U+010A the newline, U+0143 the byte AD.
    static const struct { const char *key; int id; } known[] = {
        {"A", 65}, {"!", 33}, {"~", 126}, {"\"", 34}, {"\\", 92}, {"\xc4\x80", 0}, {"\xc4\x8a", 10}, {"\xc4\xa0", 32}, {"\xc4\xa1", 127},
        {"\xc4\xa2", 128}, {"\xc5\x82", 160}, {"\xc2\xa1", 161}, {"\xc5\x83", 173}, {"\xc2\xae", 174}, {"\xc3\xbf", 255}, {"<|endoftext|>", 256}};
    size_t size;
    int count = 0;
    FILE *file = fopen("tokenizer", "w");
    for (int token = 0; token < 257; token++) token_write(file, token);
    tokenizer_write_json(file);
    fclose(file);
    char *text = get("tokenizer", &size);
    for (int i = 0; i < 257; i++) CHECK((unsigned char)text[i] == (i < 256 ? i : '\n'));
    Json *json = parse_exactly(text + 257, size - 257), *model = json_get(json, "model"), *vocab = json_get(model, "vocab");
    Json *added = json_get(json, "added_tokens");
    CHECK(vocab && added && added->child, "%s", error_text);
    for (Json *a = vocab->child; a; a = a->next) CHECK(a->number == count++ && json_number_or(vocab, a->key, -1) == a->number, "%s twice or too early", a->key);
    CHECK(count == 257);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) CHECK(json_number_or(vocab, known[i].key, -1) == known[i].id, "%s", known[i].key);
    CHECK(json_number_or(added->child, "id", 0) == 256 && !strcmp(json_string_or(added->child, "content", ""), "<|endoftext|>"));
    CHECK(!strcmp(json_string_or(model, "type", ""), "BPE") && json_get(model, "merges")->type == JSON_ARRAY && !json_get(model, "merges")->child);
    CHECK(!strcmp(json_string_or(json_get(json, "pre_tokenizer"), "type", ""), "ByteLevel"));
    json_free(json), free(text);
}

// --------------------------------------------------------------------------------------------------- safetensors.h

static uint32_t slow_crc32(const unsigned char *data, size_t size) {  // bit by bit
    uint32_t crc = ~0u;
    for (size_t i = 0; i < 8 * size; i++) crc = crc >> 1 ^ ((crc ^ data[i / 8] >> i % 8) & 1 ? 0xEDB88320u : 0);
    return ~crc;
}

TEST(safetensors_crc32) {
    unsigned char bytes[300];
    CHECK(crc32_update(0, "123456789", 9) == 0xcbf43926 && crc32_update(0, "", 0) == 0);
    for (int i = 0; i < 300; i++) bytes[i] = (unsigned char)draw();
    for (int round = 0; round < 3000; round++) {  // in two pieces
        size_t begin = draw_below(20), size = draw_below(280), first = draw_below(size + 1);
        uint32_t crc = crc32_update(crc32_update(0, bytes + begin, first), bytes + begin + first, size - first);
        CHECK(crc == slow_crc32(bytes + begin, size), "from %zu, %zu and then %zu", begin, first, size - first);
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
    static float large[10000], back[10000];  // more than stdio has in its buffer already
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
    json_free(json), free(bytes);
    CHECK(safetensors_open(&s, path) && s.count == 4 && !safetensors_find(&s, "a.weigh"), "%s", error_text);
    for (int i = 4; i-- > 0;) {
        const SafeTensor *t = safetensors_find(&s, various[i].name);
        CHECK(t && !strcmp(t->dtype, various[i].dtype) && t->rank == various[i].rank && t->bytes == various[i].bytes, "%s", various[i].name);
        CHECK(!memcmp(t->shape, various[i].shape, (size_t)t->rank * sizeof *t->shape), "%s", t->name);
        CHECK(safetensors_read(&s, t, out) && !memcmp(out, various[i].data, t->bytes), "%s", t->name);
    }
    safetensors_close(&s);
    put_tensors(path, &(SafeTensor){"large", "F32", 1, {10000}, sizeof large, large, 0}, 1);
    CHECK(safetensors_open(&s, path) && safetensors_read(&s, s.tensors, back) && !truncate(path, 20000), "%s", error_text);
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
    for (size_t n = 0; n <= size + 1; n++) {
        put(path, bytes, n);  // at last with the NUL that get() has put there
        if (n == size) CHECK(opens(path), "%s", error_text);
        else REFUSED(opens(path), path);
    }
    for (int i = 0; i < 1500; i++) {  // no crash, whatever comes out
        char copy[1024];
        memcpy(copy, bytes, size);
        for (int k = 0; k < 2; k++) copy[draw() % 8 ? 8 + draw_below(length) : draw_below(8)] = draw() % 2 ? (char)draw() : "0123456789[]{},\""[draw_below(16)];
        put(path, copy, size);
        opens(path);
    }
    free(bytes);
    static const uint64_t lengths[] = {0, 1, 9, 100000001, 1ull << 40, 1ull << 63, UINT64_MAX, UINT64_MAX - 7};
    for (int i = 0; i < 8; i++) {
        char file[] = "????????{}";
        memcpy(file, &lengths[i], 8);
        put(path, file, 10);
        REFUSED(opens(path), path);
    }
    // Headers, each before 24 bytes of data. The first three are good; of some of the others sizes come out right, but only modulo 2^64.
#define ENTRY(name, dtype, shape, begin_end) "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" begin_end "]}"
#define A(shape, begin_end) "{" ENTRY("a", "F32", shape, begin_end) "}"
#define AB(shape_a, begin_end_a, shape_b, begin_end_b) "{" ENTRY("a", "F32", shape_a, begin_end_a) "," ENTRY("b", "F32", shape_b, begin_end_b) "}"
    static const char *const headers[] = {
        A("6", "0,24"), "{" ENTRY("a", "BF16", "2,2,3", "0,24") "}", "{" ENTRY("b", "I64", "2", "8,24") "," ENTRY("a", "F64", "", "0,8") "}",
        A("5", "0,24"), A("6", "4,24"), A("5", "0,20"), A("5", "4,24"), A("7", "0,28"), A("6", "24,0"), A("6", "0,1e999"), A("6", "0"), A("\"6\"", "0,24"),
        A("1.5,4", "0,24"), A("-2,-3", "0,24"), A("1,1,1,1,6", "0,24"), A("1e999", "0,24"), AB("4", "0,16", "3", "12,24"), AB("2", "0,8", "3", "12,24"),
        AB("6", "0,24", "6", "0,24"), AB("3", "0,12", "3", "4,16"), A("4611686018427387904,8", "0,0"), A("4294967296,4294967296,6", "0,24"),
        AB("2147483648,2147483648", "0,0", "6", "0,24"), "{" ENTRY("a", "F33", "6", "0,24") "}", "{\"a\":{\"dtype\":7,\"shape\":[6],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"shape\":[6],\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,24]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[6]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":6,\"data_offsets\":[0,24]}}", "{\"a\":[0,24]}", "{\"a\":null}", "[]", "{}", "7", "{\"a\":", "nonsense"};
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        char file[512] = {0};
        uint64_t n = strlen(headers[i]);
        memcpy(file, &n, 8);
        memcpy(file + 8, headers[i], n);
        put(path, file, 8 + n + 24);
        if (i < 3) CHECK(opens(path), "%s: %s", headers[i], error_text);
        else REFUSED(opens(path), path);
    }
    REFUSED(opens("missing.safetensors"), "missing.safetensors: No such file");
}

// ---------------------------------------------------------------------------------------------------------- data.h

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
    put_text("a.txt", "hi"), put_shard("b.bin", 1, 5, 257, b, 5);
    put("c.txt", "\0\xff\xc8\n", 4);  // bytes that are no UTF-8
    put_text("z.md", "something else"), new_folder("d.txt");
    check_stream("a.txt", 1, joined, 3);
    check_stream("b.bin", 1, b, 5);
    check_stream("[ab].*", 2, joined, 8);
    check_stream("?.txt", 2, (int[]){'h', 'i', END, 0, 255, 200, '\n', END}, 8);
    check_stream("{b.bin,c.txt}", 2, joined + 3, 10);
    check_stream("?.[tb]*", 3, joined, 13);
    char home[PATH_SIZE];
    CHECK(getcwd(home, sizeof home) && !setenv("HOME", home, 1));
    check_stream("~/b.bin", 1, b, 5);
    check_stream(put_text("we[i]rd {a,b}*.txt", "!"), 1, (int[]){'!', END}, 2);
    check_stream(put_shard("more than promised.bin", 1, 3, 70, b, 5), 1, b, 3);
    check_stream(put_shard("shard of another name", 1, 5, 0, b, 5), 1, b, 5);
    static const struct { const char *pattern; int vocab; } vocabs[] = {{"a.txt", 257}, {"more than promised.bin", 70}, {"[abc].*", 257}, {"shard*", 50257}};
    for (int i = 0; i < 4; i++) {
        Data data;
        CHECK(data_open(&data, vocabs[i].pattern) && data.vocab == vocabs[i].vocab, "%s", vocabs[i].pattern);
        data_close(&data);
    }
}

TEST(data_folders) {  // "in the order of their names", whatever their endings and however the folder is called
    static const int tokens[] = {1000}, joined[] = {'a', 256, 1000, 'c', 256, 1000, 'e', 256};
    static const char *const names[] = {"folder", "folder [1]", "folder {a,b}*"};
    for (int i = 0; i < 3; i++) {
        const char *folder = new_folder(names[i]);
        for (int k = 0; k < 5; k++)
            if (k % 2) put_shard(at("%s/%c.bin", folder, 'a' + k), 1, 1, 257, tokens, 1);
            else put(at("%s/%c.txt", folder, 'a' + k), &"abcde"[k], 1);
        put_text(at("%s/README", folder), "not data");
        check_stream(folder, 5, joined, 8);
        check_stream(at("%s/", folder), 5, joined, 8);
    }
}

TEST(data_errors) {
    static const int tokens[4] = {1, 2, 3, 4};
    static const struct { const char *name, *start; size_t size; const char *says; } kinds[] = {
        {"checkpoint.bin", "\xc6\xd7\x34\x01", 4, "llm.c model checkpoint"}, {"eval.bin", "\x8a\xd8\x34\x01", 4, "evaluation file"},
        {"llama.bin", "\xa1\xd9\x34\x01", 4, "Llama 3"}, {"gzip.bin", "\x1f\x8b\x08\0", 4, "gzip"}, {"zip.bin", "PK\3\4", 4, "zip"},
        {"zstd.bin", "\x28\xb5\x2f\xfd", 4, "zstd"}, {"parquet.bin", "PAR1", 4, "Parquet"}, {"pdf.bin", "%PDF-1.7", 8, "PDF"},
        {"text.bin", "Once\r\n\tupon", 11, "plain text"}, {"nano.bin", "\1\0\2\0\3\0", 6, "nanoGPT"}, {"one.bin", "\1", 1, "not a shard"}};
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof *kinds; i++) {
        static char bytes[2000];
        memset(bytes, kinds[i / 2].start[0] == 'O' ? 'x' : 1, sizeof bytes);
        memcpy(bytes, kinds[i / 2].start, kinds[i / 2].size);
        REFUSED(opens_data(put(kinds[i / 2].name, bytes, i % 2 ? sizeof bytes : kinds[i / 2].size)), kinds[i / 2].says);
        CHECK(strstr(error_text, kinds[i / 2].name));
    }
    put("empty.txt", "", 0), put("empty.bin", "", 0);
    static const char *const refused[][2] = {{"missing.txt", "missing.txt: No such file"}, {"missing*.txt", "missing*.txt"}, {"empty.txt", "is empty"},
                                             {"empty.bin", "is empty"}, {"/dev/null", "not a regular file"}};
    for (int i = 0; i < 5; i++) REFUSED(opens_data(refused[i][0]), refused[i][1]);
    const char *shard = "shard.bin";
    static const struct { int version, promised; const char *says; } shards[] = {{2, 4, "version 2; this program reads version 1"}, {1, 0, "promises 0"},
        {1, 5, "promises 5 tokens and the file holds 4"}, {1, -7, "promises -7"}};
    for (int i = 0; i < 4; i++) REFUSED(opens_data(put_shard(shard, shards[i].version, shards[i].promised, 0, tokens, 4)), shards[i].says);
    put_shard(shard, 1, 4, 0, tokens, 4);
    for (int size = 1031; size > 0; size -= size > 1020 || size < 20 ? 1 : 90) {
        CHECK(!truncate(shard, size));
        REFUSED(opens_data(shard), shard);
    }
    for (int i = 0; i < 2; i++) REFUSED(opens_data((new_folder(at("no data%s", i ? "/x.txt" : "")), "no data")), "no data");
    put_text("good1.txt", "good"), put("good2.txt", "", 0), put_shard("good3.bin", 1, 4, 70, tokens, 4);
    REFUSED(opens_data("good*"), "good2.txt is empty");  // one bad file among good ones
    REFUSED(opens_data("good[13]*"), "good1.txt has tokens of a vocabulary of 257 and good3.bin of 70");
    int out[8];
    Data data;
    put_text("y1.txt", "abcde"), put_shard("y2.bin", 1, 4, 257, tokens, 4);
    CHECK(data_open(&data, "y*") && data.end == 10 && data_read(&data, 6, 3, 4, out), "%s", error_text);
    REFUSED(data_read(&data, 6, 4, 4, out), "y2.bin has token 4 at position 3, and the vocabulary has 4 (0 to 3)");
    REFUSED(data_read(&data, 4, 2, 256, out), "y1.txt has token 256 at position 5");
    REFUSED(data_cut(&data, 0, 10, 10, 1, "--data"), "--data has 10 tokens, and a sequence of T = 10 needs 11");
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
            size_t lowest = 900, highest = 0, covered = 0;
            bool input[900] = {false};
            for (size_t i = 0; i < windows; i++) {
                size_t place = start[epoch][i] = sample_begin(&data, epoch % 4 * windows + i);
                for (size_t k = place; k < place + T; k++) covered += !input[k], input[k] = true;
                lowest = place < lowest ? place : lowest, highest = place > highest ? place : highest;
                same += epoch > 0 && place / T == start[0][i] / T;
            }
            CHECK(covered == windows * T && highest == lowest + (windows - 1) * T, "T %zu, %zu tokens: a window is missing or comes twice", T, length);
            for (int i = 0; i < 9 && epoch < 4; i++) {  // whatever was read before
                size_t n = draw_below((epoch + 1) * windows);
                CHECK(sample_begin(&data, n) == start[n / windows][n % windows], "sample %zu changed", n);
            }
            data_close(&data);
        }
        CHECK(windows < 20 || same < 2 * windows, "another epoch or seed should have another order");
    }
    double counts[9] = {0};
    CHECK(data_open(&data, path) && data_cut(&data, 100, 134, 5, draw(), "--data") && data.windows == 5);
    for (uint64_t n = 0, lowest = 900; n < 15000; n++) {  // 34 tokens, and 5 windows need 26: an epoch has 9 places to begin at
        size_t begin = sample_begin(&data, n);
        lowest = n % 5 == 0 || begin < lowest ? begin : lowest;
        if (n % 5 == 4) counts[lowest < 109 ? lowest - 100 : 0]++;
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
        for (size_t count = 1 + draw_below(all), n = 0, before = 0, step; n < count; n++, before += step) {
            CHECK(data_spread(&data, n, count, 1000, out) && out[T] == out[0] + (int)T && (size_t)out[T] < end, "%s", error_text);
            step = ((size_t)out[0] - begin) / T - before;
            CHECK(((size_t)out[0] - begin) % T == 0 && (n == 0 ? step == 0 : step == all / count || step == all / count + (all % count > 0)),
                  "window %zu of %zu is %zu of %zu, after %zu", n, count, before + step, all, before);
        }
    }
    data_close(&data);
}

TEST(data_file_shortened_while_in_use) {
    Data data;
    int out[64];
    for (int shard = 0; shard < 2; shard++) {
        const char *path = shard ? put_counting_shard("short.bin", 500) : put_text("short.txt", "x");
        CHECK((shard || !truncate(path, 500)) && data_open(&data, path) && data_cut(&data, 0, data.end, 50, 1, "--data"));
        CHECK(!truncate(path, shard ? 1024 + 2 * 480 - 1 : 480) && data_read(&data, 429, 50, 1000, out), "%s", error_text);
        REFUSED(data_read(&data, 431, 50, 1000, out), at("%s: it is shorter than it was", path));
        REFUSED(unlink(path) || data_sample(&data, 0, 1000, out), "No such file");
        data_close(&data);
    }
}

// ----------------------------------------------------------------------------------------------------------- log.h

TEST(log_numbers_and_durations) {
    static const struct { double seconds; const char *text; } known[] = {
        {0, "0s"}, {-5, "0s"}, {NAN, "0s"}, {0.4, "0s"}, {59.4, "59s"}, {59.6, "1m 00s"}, {3599, "59m 59s"}, {3600, "1h 00m"}, {7500, "2h 05m"},
        {86399, "23h 59m"}, {86400, "1d 00h"}, {266400, "3d 02h"}};
    char text[32];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        CHECK(!strcmp(log_duration(known[i].seconds, text), known[i].text), "%g s: %s", known[i].seconds, text);
    for (int i = 0; i < 100000; i++) {
        uint64_t bits = draw();
        double x;
        memcpy(&x, &bits, 8);
        CHECK(isfinite(x) ? strtod(json_number_text(x, text), NULL) == x : !strcmp(json_number_text(x, text), "null"), "%.12g: %s", x, text);
    }
}

static const double losses[8] = {5.55555534f, 4.25, NAN, INFINITY, 1e-30f, 3.14159274f, 2.5, 1};
static void write_log(void) {  // 8 steps, a line kept every 3; the third is skipped
    Log log;
    CHECK(log_open(&log, ".", 0, 8, 3) && !log.terminal, "%s", error_text);
    for (int i = 0; i < 8; i++) {
        log.terminal = i == 3 || i == 4 || i == 6;
        log_step(&log, i + 1, losses[i], 2 * losses[i], 0.001, 0.5, 1000, i == 2);
        if (i == 4 || i == 6) log_validation(&log, i + 1, losses[i] / 2);
    }
}

TEST(log_lines) {
    static const char *const lines[] = {"step 1/8 | loss 5.5556 | norm ", "step 3/8 | loss nan", "\033[?7lstep 4/8 | loss inf", "step 5/8 | validation loss 0.0000",
                                        "step 6/8 | loss 3.1416", "\033[?7lstep 7/8 | loss 2.5000", "step 7/8 | validation loss 1.2500", "step 8/8 | loss 1.0000"};
    CHECK(run_child(write_log) == 0, "%s", child_output);
    char *line = child_output;
    for (int i = 0; i < 8; i++, line += strcspn(line, "\n") + 1)  // 4 and 7 as on a terminal only, where 5 replaces 4, and the validation lets 7 stand
        CHECK(!strncmp(line, lines[i], strlen(lines[i])), "wanted '%s' in: %s", lines[i], child_output);
    static const char *const parts[] = {"lr 1.00e-03 |   500.0 ms |    2000 tok/s |", "update skipped\n", "left\033[?7h\r\033[K\033[?7lstep 5/8 | loss 0.0000 |"};
    for (int i = 0; i < 3; i++) CHECK(!*line && strstr(child_output, parts[i]), "no '%s' in: %s", parts[i], child_output);
    size_t size, length, ends[11] = {0};
    char *text = get("log.jsonl", &size);
    for (int i = 0; i < 10; i++) {
        int validation = i == 5 || i == 8, step = 1 + i - (i > 4) - (i > 7);
        double wanted = losses[step - 1] / (1 + validation);
        ends[i + 1] = ends[i] + strcspn(text + ends[i], "\n") + 1;
        Json *json = json_parse(text + ends[i], ends[i + 1] - ends[i]), *loss = json_get(json, validation ? "val_loss" : "loss");
        CHECK(loss && json_number_or(json, "step", 0) == step && (isfinite(wanted) ? (float)loss->number == (float)wanted : loss->type == JSON_NULL), "%s", text);
        CHECK(validation || (json_number_or(json, "lr", 0) == 0.001 && json_number_or(json, "ms", 0) == 500 && json_get(json, "norm") &&
              json_number_or(json, "tokens_per_second", 0) == 2000 && json_number_or(json, "skipped", 0) == (i == 2)), "line %d of %s", i, text);
        json_free(json);
    }
    CHECK(ends[10] == size, "more lines: %s", text);
    for (int i = 0; i < 40; i++) {  // a run that goes on after `step` keeps the lines up to it, and whole ones only
        static const int lines_up_to[] = {0, 1, 2, 3, 4, 6, 7, 9, 10, 10};
        size_t torn = (size_t)(i % 4) * 13, keep = ends[lines_up_to[i / 4] < 10 || !torn ? lines_up_to[i / 4] : 9];
        Log log;
        put("log.jsonl", text, size - torn);
        CHECK(log_open(&log, ".", i / 4, 20, 1), "%s", error_text);
        log_json(&log, "%s\n", "{}");
        close(log.jsonl);
        char *now = get("log.jsonl", &length);
        CHECK(length == keep + 3 && !memcmp(now, text, keep) && !strcmp(now + keep, "{}\n"), "step %d: %s", i / 4, now);
        free(now);
    }
    free(text);
    REFUSED(log_open(&(Log){0}, "no/such/folder", 0, 1, 1), "choose another --out");
}

static void write_to_full_disk(void) {
    Log log = {.jsonl = open("/dev/full", O_WRONLY)};
    for (int i = 0; i < 3; i++) log_json(&log, "{}\n");
}
static void write_more_than_fits(void) {
    Log log = {.jsonl = open("log.jsonl", O_WRONLY | O_CREAT | O_APPEND, 0666)};
    struct rlimit limit = {20, 20};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    for (int i = 0; i < 3; i++) log_json(&log, "{\"n\": %d}\n", i);  // of 9 bytes: the third is written by 2 bytes
}
TEST(log_keeps_whole_lines_only) {
    CHECK(run_child(write_more_than_fits) == 0);
    size_t size;
    char *text = get("log.jsonl", &size);
    CHECK(!strcmp(text, "{\"n\": 0}\n{\"n\": 1}\n"), "%s", text);
    free(text);
}
TEST(log_on_a_full_disk) {
    static const char warning[] = "warning: cannot write to log.jsonl: No space left on device; training goes on\n";
    if (access("/dev/full", W_OK)) SKIP("there is no /dev/full");
    CHECK(run_child(write_to_full_disk) == 0 && !strncmp(child_output, warning, sizeof warning - 1) && !strstr(child_output + 1, "warning"), "%s", child_output);
}

// ---------------------------------------------------------------------------------------------------- checkpoint.h

static const GptConfig small = {2, 2, 8, 12, 257};
enum { SMALL = 3912 };  // its parameters: 257 * 8 + 12 * 8 + 2 * (12 * 64 + 13 * 8) + 2 * 8
static float saved[3][SMALL], loaded[3][SMALL];
static const ModelState saved_state = {saved[0], saved[1], saved[2]};

// Saves `small` with arrays of any bits. `more` changes options, as on a command line.
static void save(const char *folder, int64_t step, const char *more, const char *value) {
    Options o;
    options_defaults(&o);
    CHECK(parse(&o, "--steps", "40", "--keep", "0", more, value, NULL), "%s", error_text);
    for (int i = 0; i < 3 * SMALL; i++) ((uint32_t *)(void *)saved)[i] = (uint32_t)draw();
    CHECK(checkpoint_save(folder, small, &o, (Progress){step, (uint64_t)step * 4, step < 2 ? 0 : 2, 901}, saved_state), "%s", error_text);
}

static bool checkpoint_damaged;  // what the last reading of a manifest said

static bool sound(const char *path) {
    Progress p;
    Options o;
    options_defaults(&o);
    return checkpoint_read_manifest(path, &p, &o, &checkpoint_damaged);
}

static bool same_as_saved(const char *path) {
    CHECK(checkpoint_load_weights(path, small, loaded[0]) && checkpoint_load_optimizer(path, small, loaded[1], loaded[2]), "%s", error_text);
    return !memcmp(loaded, saved, sizeof saved);
}

static int entries(const char *folder) {
    int count = -2;  // . and ..
    DIR *dir = opendir(folder);
    CHECK(dir, "%s", folder);
    while (readdir(dir)) count++;
    closedir(dir);
    return count;
}

TEST(checkpoint_round_trip) {
    static const struct { const char *key; double value; } keys[] = {
        {"vocab_size", 257}, {"n_positions", 12}, {"n_ctx", 12}, {"n_embd", 8}, {"n_layer", 2}, {"n_head", 2}, {"layer_norm_epsilon", 1e-5},
        {"resid_pdrop", 0}, {"embd_pdrop", 0}, {"attn_pdrop", 0}, {"scale_attn_weights", 1}, {"scale_attn_by_inverse_layer_idx", 0},
        {"reorder_and_upcast_attn", 0}, {"tie_word_embeddings", 1}, {"bos_token_id", 256}, {"eos_token_id", 256}};
    GptConfig c, other = small;
    Progress p;
    Options o;
    size_t size;
    options_defaults(&o);
    const char *path = "./ckpt-123456789012";
    save(".", 123456789012, "--lr", "0.1234567890123");
    CHECK(entries(".") == 1 && entries(path) == 6 && same_as_saved(path), "arrays came back with other bits");
    CHECK(checkpoint_read_manifest(path, &p, &o, &checkpoint_damaged) && p.step == 123456789012 && p.samples == 493827156048 && p.skipped == 2 && p.tokens == 901, "%s", error_text);
    CHECK(o.lr == 0.1234567890123 && o.steps == 40 && o.keep == 0 && checkpoint_read_config(path, &c) && !memcmp(&c, &small, sizeof c), "%s", error_text);
    Json *config = checkpoint_read_json(path, "config.json"), *manifest = checkpoint_read_json(path, "manifest.json");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) CHECK(json_number_or(config, keys[i].key, -1) == keys[i].value, "%s", keys[i].key);
    CHECK(!strcmp(json_string_or(config, "model_type", ""), "gpt2") && !strcmp(json_string_or(config, "activation_function", ""), "gelu_new"));
    Json *architectures = json_get(config, "architectures"), *inner = json_get(config, "n_inner");
    CHECK(architectures && !strcmp(architectures->child->string, "GPT2LMHeadModel") && inner && inner->type == JSON_NULL);
    for (int i = 0; i < CHECKPOINT_MANIFEST; i++) {
        char *bytes = get(at("%s/%s", path, checkpoint_files[i]), &size);
        Json *entry = json_get(json_get(manifest, "files"), checkpoint_files[i]);
        unsigned long crc = strtoul(json_string_or(entry, "crc32", ""), NULL, 16);
        CHECK(json_number_or(entry, "bytes", 0) == (double)size && crc == slow_crc32((unsigned char *)bytes, size), "%s", checkpoint_files[i]);
        free(bytes);
    }
    json_free(config), json_free(manifest);
    other.vocab = 255;  // not the bytes: without a tokenizer, and the last token ends a text
    CHECK(checkpoint_save(".", other, &o, (Progress){5, 5, 0, 9}, saved_state), "%s", error_text);
    CHECK(entries("ckpt-00000005") == 4 && sound("ckpt-00000005"), "%s", error_text);
    char *text = get("ckpt-00000005/config.json", &size);
    CHECK(strstr(text, "\"vocab_size\": 255,") && strstr(text, "\"eos_token_id\": 254"), "%s", text);
    free(text);
}

TEST(checkpoint_damage_is_noticed) {
    const char *path = "ckpt-00000001", *manifest = "ckpt-00000001/manifest.json";
    save(".", 1, NULL, NULL);
    for (int i = 0; i < CHECKPOINT_FILES; i++) {
        size_t size;
        const char *name = checkpoint_files[i];
        char file[64], *bytes = get(strcpy(file, at("%s/%s", path, name)), &size);
        for (size_t k = 0; k < 26; k++) {
            size_t place = k == 0 ? 0 : k == 1 ? size - 1 : draw_below(size), bit = 1 << draw_below(8);
            bytes[place] ^= (char)bit;
            put(file, bytes, size);
            bytes[place] ^= (char)bit;
            REFUSED(sound(path), name);
            CHECK(checkpoint_damaged);
            put(file, bytes, place < size - 3 ? place : size - 3);
            REFUSED(sound(path), name);
        }
        CHECK(!unlink(file));
        REFUSED(sound(path), name);
        put(file, bytes, size);
        free(bytes);
        CHECK(sound(path) && same_as_saved(path), "%s", error_text);
    }
    CHECK(!truncate(put_text(manifest, "{"), 2 << 20));
    REFUSED(sound(path), "far too large");
    char text[200] = "{\"format\": 2, \"step\": 1, \"files\": {},\n";
    size_t length = strlen(text);
    snprintf(text + length, sizeof text - length, "  \"crc32\": \"%08x\"\n}\n", slow_crc32((const unsigned char *)text, length));
    put_text(manifest, text);
    REFUSED(sound(path), "unknown format");
    CHECK(!checkpoint_damaged);
    Options o;
    options_defaults(&o);
    for (int i = 0; i < 2; i++) {  // whole, but impossible
        CHECK(checkpoint_save(".", small, &o, (Progress){5, 20, i ? -1 : 6, 9}, saved_state), "%s", error_text);
        REFUSED(sound("ckpt-00000005"), "its counts are impossible");
        checkpoint_remove("ckpt-00000005");
    }
}

TEST(checkpoint_other_shapes_and_names) {
    static const struct { GptConfig c; const char *says; } other[] = {
        {{2, 2, 8, 12, 258}, "transformer.wte.weight has the shape (257, 8) where config.json wants (258, 8)"},
        {{2, 2, 8, 13, 257}, "transformer.wpe.weight has the shape (12, 8) where config.json wants (13, 8)"},
        {{2, 2, 4, 12, 257}, "(257, 8) where config.json wants (257, 4)"}, {{3, 2, 8, 12, 257}, "has no tensor transformer.h.2.ln_1.weight"}};
    static const struct { const char *name; size_t rows, columns; } known[] = {  // as Hugging Face publishes GPT-2, C = 8; the last is a mask
        {"wte.weight", 257, 8}, {"wpe.weight", 12, 8}, {"ln_1.weight", 8, 0}, {"ln_1.bias", 8, 0}, {"attn.c_attn.weight", 8, 24}, {"attn.c_attn.bias", 24, 0},
        {"attn.c_proj.weight", 8, 8}, {"attn.c_proj.bias", 8, 0}, {"ln_2.weight", 8, 0}, {"ln_2.bias", 8, 0}, {"mlp.c_fc.weight", 8, 32}, {"mlp.c_fc.bias", 32, 0},
        {"mlp.c_proj.weight", 32, 8}, {"mlp.c_proj.bias", 8, 0}, {"ln_f.weight", 8, 0}, {"ln_f.bias", 8, 0}, {"h.0.attn.masked_bias", 1, 1}};
    static float room[3 * SMALL];
    const char *path = "ckpt-00000001", *model = "ckpt-00000001/model.safetensors";
    save(".", 1, NULL, NULL);
    for (int i = 0; i < 4; i++) REFUSED(checkpoint_load_weights(path, other[i].c, room), other[i].says);
    REFUSED(checkpoint_load_optimizer(path, other[0].c, room, room), "m.transformer.wte.weight");
    SafeTensor published[29];
    for (size_t i = 0, offset = 0; i < 29; offset += published[i++].bytes / 4) {
        int row = (int)(i < 14 ? i : i - 12);
        size_t elements = known[row].rows * (known[row].columns ? known[row].columns : 1);
        published[i] = (SafeTensor){"", "F32", known[row].columns ? 2 : 1, {known[row].rows, known[row].columns}, 4 * elements, saved[0] + offset, 0};
        snprintf(published[i].name, 96, i < 2 || i > 25 ? "%s" : i < 14 ? "h.0.%s" : "h.1.%s", known[row].name);
    }
    put_tensors(model, published, 29);
    CHECK(checkpoint_load_weights(path, small, room) && !memcmp(room, saved[0], sizeof saved[0]), "%s", error_text);
    published[3].dtype = "F16", published[3].bytes /= 2;
    put_tensors(model, published, 29);
    REFUSED(checkpoint_load_weights(path, small, room), "tensor h.0.ln_1.bias is F16; only F32");
}

TEST(checkpoint_published_configs) {  // gpt2's own, with `from` replaced by `to`
    static const char gpt2[] = "{\"activation_function\": \"gelu_new\", \"architectures\": [\"GPT2LMHeadModel\"], \"attn_pdrop\": 0.1, \"eos_token_id\": 50256,"
        " \"layer_norm_epsilon\": 1e-05, \"model_type\": \"gpt2\", \"n_ctx\": 1024, \"n_embd\": 768, \"n_head\": 12, \"n_layer\": 12, \"n_positions\": 1024,"
        " \"summary_first_dropout\": 0.1, \"task_specific_params\": {\"text-generation\": {\"do_sample\": true}}, \"vocab_size\": 50257}";
    static const struct { const char *from, *to, *says; } variants[] = {
        {"\"n_ctx\"", "\"n_ctx\"", NULL}, {"gelu_new", "gelu_pytorch_tanh", NULL}, {"{\"act", "{\"n_inner\": null, \"act", NULL},
        {"{\"act", "{\"n_inner\": 3072, \"act", NULL}, {"{\"act", "{\"scale_attn_weights\": true, \"tie_word_embeddings\": true, \"act", NULL},
        {"gelu_new", "gelu", "activation gelu,"}, {"{\"act", "{\"n_inner\": 1024, \"act", "inner width 1024"}, {"1e-05", "1e-06", "epsilon 1e-06"},
        {"\"gpt2\"", "\"gpt_neo\"", "type 'gpt_neo'"}, {"\"n_head\": 12", "\"n_head\": 7", "not a multiple of --heads 7"}, {"r\": 12", "r\": 0", "n_layer"},
        {"n_positions", "positions", "n_positions"}, {"50257}", "\"many\"}", "vocab_size"}, {"768", "1e12", "n_embd"}, {"768", "-768", "n_embd"},
        {"{\"act", "{\"scale_attn_by_inverse_layer_idx\": true, \"act", "scale_attn_by_inverse_layer_idx"},
        {"{\"act", "{\"scale_attn_weights\": false, \"act", "scale_attn_weights"}, {"{\"act", "{\"tie_word_embeddings\": false, \"act", "tie_word_embeddings"}};
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        GptConfig c;
        const char *cut = strstr(gpt2, variants[i].from);
        put_text("config.json", at("%.*s%s%s", (int)(cut - gpt2), gpt2, variants[i].to, cut + strlen(variants[i].from)));
        if (variants[i].says) REFUSED(checkpoint_read_config(".", &c), variants[i].says);
        else CHECK(checkpoint_read_config(".", &c) && !memcmp(&c, &(GptConfig){12, 12, 768, 1024, 50257}, sizeof c), "%s", error_text);
    }
}

TEST(checkpoint_newest_and_prune) {
    static const char *const names[] = {"ckpt-00000001", "ckpt-00000002", "ckpt-00000003", "ckpt-99999999", "ckpt-100000000", "ckpt-00000002.damaged", "ckpt-5",
                                        "ckpt-0000000x", "checkpoint-00000009", "ckpt-00000008.tmp"};
    char found[PATH_SIZE];
    for (int i = 0; i < 10; i++) {
        CHECK(!mkdir(names[i], 0777));
        for (int k = 0; k < CHECKPOINT_FILES; k++) put_text(at("%s/%s", names[i], checkpoint_files[k]), "x");
    }
    put_text("ckpt-00000002/notes.txt", "mine"), put_text("log.jsonl", "");
    CHECK(checkpoint_newest(".", INT64_MAX, found) && !strcmp(found, "./ckpt-100000000"), "%s", found);
    CHECK(checkpoint_newest(".", 99999999, found) && !strcmp(found, "./ckpt-00000003"), "%s", found);
    CHECK(!checkpoint_newest(".", 1, found) && !checkpoint_newest("nowhere", INT64_MAX, found));
    checkpoint_prune(".", 0);
    CHECK(entries(".") == 10 && !exists("ckpt-00000008.tmp"));  // an interrupted save's
    checkpoint_prune(".", 2);  // 1, 2 and 3 are beyond, but 2 has a file of somebody's
    CHECK(entries(".") == 8 && !exists("ckpt-00000001") && !exists("ckpt-00000003") && exists("ckpt-00000002/notes.txt"));
    for (int i = 3; i < 9; i++) CHECK(entries(names[i]) == 6, "%s", names[i]);
}

static long most_bytes;  // that a file may have
static void save_with_little_room(void) {
    struct rlimit limit = {(rlim_t)most_bytes, (rlim_t)most_bytes};
    Options o;
    options_defaults(&o);
    o.keep = 1;
    signal(SIGXFSZ, SIG_IGN);
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
    REFUSED(checkpoint_save("out", small, &o, (Progress){2, 8, 0, 9}, saved_state), "earlier checkpoints are untouched");
    fputs(error_text, stdout);
}

TEST(checkpoint_save_fails) {
    static const struct { const char *in_the_way, *says; } ways[] = {{"out/ckpt-00000002.tmp", "File exists"}, {"out/ckpt-00000002", "Not a directory"}};
    save(new_folder("out"), 1, NULL, NULL);
    for (most_bytes = 0; most_bytes < 31296; most_bytes += 3911) {  // the optimizer's file has more
        CHECK(run_child(save_with_little_room) == 0 && strstr(child_output, "ckpt-00000002: File too large;"), "%s", child_output);
        CHECK(entries("out") == 1 && sound("out/ckpt-00000001") && same_as_saved("out/ckpt-00000001"), "%s", error_text);
    }
    most_bytes = 1 << 20;
    for (int i = 0; i < 2; i++) {
        put_text(ways[i].in_the_way, "");
        CHECK(run_child(save_with_little_room) == 0 && strstr(child_output, ways[i].says), "%s", child_output);
        CHECK(entries("out") == 2 && sound("out/ckpt-00000001") && !unlink(ways[i].in_the_way), "%s", error_text);
    }
    CHECK(!rename("out", "gone") && put_text("out", "") && run_child(save_with_little_room) == 0 && strstr(child_output, "Not a directory"), "%s", child_output);
    CHECK(!unlink("out"));
    save("out", 3, NULL, NULL);  // a folder that was removed meanwhile is made again
    CHECK(sound("out/ckpt-00000003"), "%s", error_text);
}

static void claim_again(void) { puts(folder_claim("a/b c") ? "claimed" : error_text); }
TEST(checkpoint_folder_claim) {
    const char *const bad[] = {put_text("plain", ""), "plain/below", "/proc/none/here"};
    for (int i = 0; i < 2; i++) CHECK(run_child(claim_again) == 0 && !strcmp(child_output, "claimed\n"), "a run that has ended: %s", child_output);
    CHECK(folder_claim("a/b c") && entries("a/b c") == 1, "%s", error_text);
    CHECK(run_child(claim_again) == 0 && strstr(child_output, at("in use by another run (process %ld)", (long)getpid())), "%s", child_output);
    for (int i = 0; i < 3; i++) REFUSED(folder_claim(bad[i]), bad[i]);
}

// ----------------------------------------------------------------------------------------------------------- run.h

// A text of 1000 bytes, and a run that stopped at step 7 of 40.
static void prepare_runs(void) {
    static char text[1000];
    memset(text, 'x', sizeof text);
    put("book.txt", text, 1000), put_text("short.txt", "short"), save(new_folder("seven"), 7, "--data", "book.txt");
}

TEST(run_setup_from_nothing) {
    static const struct { const char *steps; int warmup; } warmups[] = {{"5", 0}, {"50", 5}, {"999", 99}, {"1001", 100}, {"100000", 100}};
    const Options *o = &run.options;
    const GptPreset *tiny = gpt_preset("tiny");
    prepare_runs();
    CHECK(SETUP("--data", "book.txt", "--seq", "16", "--batch", "3", "--total-batch", "144", "--lr", "0.25", "--warmup", "7", "--steps", "50"));
    CHECK(run.trains && !run.resumes && !*run.start_from && run.accumulation == 3 && run.config.vocab == 257 && run.config.seq == 16);
    CHECK(run.config.layers == tiny->layers && run.config.heads == tiny->heads && run.config.channels == tiny->channels && o->vocab == 257);
    CHECK(run.train.end == 901 && run.val.begin == 901 && run.val.end == 1001);  // with the end of the text, a tenth held out
    CHECK(run.schedule.peak == 0.25 && run.schedule.warmup == 7 && run.schedule.steps == 50 && !strcmp(run.schedule.shape, "cosine"));
    for (int i = 0; i < 5; i++) CHECK(SETUP("--data", "book.txt", "--seq", "16", "--steps", warmups[i].steps) && run.schedule.warmup == warmups[i].warmup);
    CHECK(run.accumulation == 1 && o->total_batch == 16 * o->batch && run.schedule.peak > 0);
    CHECK(SETUP("--data", "book.txt", "--seq", "5", "--val-data", "short.txt") && run.train.end == 1001 && run.val.begin == 0 && run.val.end == 6);
    CHECK(SETUP("--data", "book.txt", "--seq", "1000", "--val-fraction", "0") && run.train.windows == 1 && run.val.count == 0, "%s", error_text);
    CHECK(SETUP("--dry-run", "--model", "d12", "--vocab", "50257") && !run.trains && run.config.channels == 768, "%s", error_text);
    CHECK(SETUP("--dry-run") && fabs(run.schedule.peak - 0.004) < 1e-12, "0.384 / 96");
    CHECK(SETUP("--resume", "auto", "--out", "nothing here", "--data", "book.txt", "--seq", "16") && run.trains && !*run.start_from, "%s", error_text);
    CHECK(SETUP("--data", put_counting_shard("s.bin", 900), "--seq", "16") && run.config.vocab == 1000, "%s", error_text);
}

TEST(run_setup_refuses) {
    static const struct { const char *says, *arguments[9]; } bad[] = {
        {"no multiple of --batch times --seq, 4 x 16 = 64", {"--data", "book.txt", "--seq", "16", "--batch", "4", "--total-batch", "100"}},
        {"--data has 901 tokens, and a sequence of T = 901 needs 902", {"--data", "book.txt", "--seq", "901"}},
        {"the held-out part of --data has 100 tokens, and a sequence of T = 100 needs 101", {"--data", "book.txt", "--seq", "100"}},
        {"--val-data has 6 tokens", {"--data", "book.txt", "--seq", "16", "--val-data", "short.txt"}}, {"--out is empty", {"--out="}},
        {"a vocabulary of 257 and --val-data of 1000", {"--data", "book.txt", "--seq", "16", "--val-data", "counting.bin"}},
        {"at most 2147483647 can be", {"--data", "book.txt", "--seq", "1", "--batch", "1", "--total-batch", "1000000000000"}},
        {"the model has one of 256; leave --vocab out", {"--data", "book.txt", "--seq", "16", "--vocab", "256"}},
        {"2147483648 tokens at once", {"--dry-run", "--seq", "2048", "--batch", "1048576"}},
        {"--channels 30 is not a multiple of --heads 4", {"--data", "book.txt", "--channels", "30", "--heads", "4"}},
        {"nothing to do", {"--steps", "9"}}, {"--steps 0 trains nothing", {"--steps", "0", "--data", "book.txt"}}, {"nothing to do", {"--model", "seven"}},
        {"--prompt needs a trained model", {"--prompt", "Once"}}, {"none.txt: No such file", {"--data", "none.txt"}}, {"unknown option", {"--dat", "book.txt"}},
        {"--model d13 is neither a preset (tiny, d6, d12, d24, d36, d48) nor a folder", {"--data", "book.txt", "--model", "d13"}},
        {"there is no checkpoint none", {"--data", "book.txt", "--resume", "none"}},
        {"the model has one of 300; give it a .bin shard", {"--data", "book.txt", "--model", "words"}},
        {"--layers 3 does not fit the checkpoint seven/ckpt-00000007, which has 2", {"--resume", "seven", "--layers", "3"}},
        {"--heads 1 does not fit the checkpoint seven/ckpt-00000007, which has 2", {"--resume", "auto", "--out", "seven", "--heads", "1"}},
        {"--channels 16 does not fit the checkpoint seven/ckpt-00000007, which has 8", {"--model", "seven", "--data", "book.txt", "--channels", "16"}},
        {"--seq 16 does not fit the checkpoint seven/ckpt-00000007, which has 12", {"--resume", "seven/ckpt-00000007", "--seq", "16"}},
        {"--vocab 300 does not fit the checkpoint seven/ckpt-00000007, which has 257", {"--resume", "seven", "--vocab", "300"}},
        {"--layers 12 does not fit the checkpoint seven/ckpt-00000007, which has 2", {"--resume", "seven", "--model", "d12"}}};
    prepare_runs(), new_folder("words"), put_counting_shard("counting.bin", 900);
    put_text("words/config.json", "{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_head\": 2, \"n_embd\": 8, \"n_positions\": 12, \"vocab_size\": 300}");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) REFUSED(setup(bad[i].arguments), bad[i].says);
}

static void resume_damaged(void) {
    CHECK(SETUP("--resume", "auto", "--out", "seven", "--data", "book.txt", "--seq", "12"), "%s", error_text);
    printf("resumes %d from '%s' at %lld, %llu", run.resumes, run.start_from, (long long)run.progress.step, (unsigned long long)run.progress.samples);
}

TEST(run_setup_from_a_checkpoint) {
    const Options *o = &run.options;
    prepare_runs();
    CHECK(SETUP("--resume", "seven") && run.resumes && run.trains && run.progress.step == 7 && run.progress.samples == 28, "%s", error_text);
    CHECK(!memcmp(&run.config, &small, sizeof small) && !strcmp(o->data, "book.txt") && !strcmp(o->out, "run"));
    CHECK(o->steps == 40 && run.schedule.warmup == 100 && run.schedule.steps == 40, "the warm-up that was saved stays");
    CHECK(SETUP("--resume", "auto", "--out", "seven", "--steps", "90", "--lr=0.5", "--layers", "2") && o->steps == 90 && o->lr == 0.5 && o->keep == 0);
    CHECK(SETUP("--model", "seven", "--data", "book.txt", "--steps", "60") && run.trains && !run.resumes && run.progress.step == 0 && o->keep == 3);
    CHECK(!strcmp(run.start_from, "seven/ckpt-00000007") && run.schedule.warmup == 6 && run.config.channels == 8);
    CHECK(fabs(run.schedule.peak - 0.0048) < 1e-12, "a trained model starts with a tenth of the learning rate");
    CHECK(SETUP("--model", "seven/ckpt-00000007", "--prompt", "Once") && !run.trains && run.config.vocab == 257, "%s", error_text);
    CHECK(SETUP("--resume", "seven", "--prompt", "Once") && !run.trains, "%s", error_text);
    CHECK(SETUP("--resume", "seven", "--prompt", "Once", "--data", "book.txt") && run.trains, "%s", error_text);
    save("seven", 9, "--data", "book.txt");
    CHECK(!truncate("seven/ckpt-00000009/optimizer.safetensors", 30000));
    REFUSED(SETUP("--resume", "seven"), "seven/ckpt-00000009 is damaged: optimizer.safetensors has 30000 bytes instead of");
    REFUSED(SETUP("--resume", "auto", "--out", "seven", "--dry-run"), "damaged");
    CHECK(exists("seven/ckpt-00000009") && run_child(resume_damaged) == 0 && strstr(child_output, "resumes 1 from 'seven/ckpt-00000007' at 7, 28"));
    CHECK(strstr(child_output, "warning: seven/ckpt-00000009 is damaged") && strstr(child_output, "aside as seven/ckpt-00000009.damaged"), "%s", child_output);
    CHECK(!exists("seven/ckpt-00000009") && entries("seven/ckpt-00000009.damaged") == 6);
    CHECK(!truncate("seven/ckpt-00000007/model.safetensors", 1000) && new_folder("seven/ckpt-00000007.damaged") && run_child(resume_damaged) == 99);
    CHECK(exists("seven/ckpt-00000007.damaged-2") && strstr(child_output, "no whole checkpoint is left in seven"), "%s", child_output);
    CHECK(run_child(resume_damaged) == 0 && strstr(child_output, "resumes 0 from '' at 0, 0"), "asked again, it starts afresh: %s", child_output);
}

static const char *const *run_arguments;
static void claim(void) {
    CHECK(setup(run_arguments), "%s", error_text);
    puts(run_claim_output(&run) ? "claimed" : error_text);
}

TEST(run_claim_output) {
    static const struct { const char *says, *arguments[7]; } known[] = {
        {"claimed", {"--data", "book.txt", "--seq", "16", "--out", "new/folder"}}, {"claimed", {"--resume", "auto", "--out", "seven"}},
        {"claimed", {"--resume", "seven", "--out", "new"}}, {"already holds a run", {"--data", "book.txt", "--model", "seven", "--out", "seven"}},
        {"seven already holds a run, saved at step 7; --resume auto", {"--data", "book.txt", "--seq", "16", "--out", "seven"}},
        {"book.txt: Not a directory", {"--data", "book.txt", "--seq", "16", "--out", "book.txt"}},
        {"seven holds a later checkpoint, of step 9, than the step 7", {"--resume", "seven/ckpt-00000007", "--out", "seven"}}};
    prepare_runs();
    for (int i = 0; i < 7; i++) {
        if (i == 6) save("seven", 9, "--data", "book.txt");
        run_arguments = known[i].arguments;
        CHECK(run_child(claim) == 0 && strstr(child_output, known[i].says), "no '%s' in: %s", known[i].says, child_output);
    }
}

static void stop_twice(void) { catch_signals(), raise(SIGTERM), printf("[%d]", stop_requested), fflush(stdout), raise(SIGTERM); }
TEST(run_signals) {
    CHECK(run_child(stop_twice) == 128 + SIGTERM && strstr(child_output, "[15]"), "the second signal ends the program: %s", child_output);
}

// ---------------------------------------------------------------------------

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info, (void)kind, (void)where;
    return remove(path);
}

static char scratch[32];
static void enter_folder(const char *name) {
    if (chdir(scratch) || mkdir(name, 0777) || chdir(name)) die("cannot make the folder %s/%s: %s", scratch, name, strerror(errno));
}

int main(int argc, char **argv) {
    strcpy(scratch, access("/dev/shm", W_OK) ? "/tmp/test_host.XXXXXX" : "/dev/shm/test_host.XXXXXX");  // in memory, as checkpoints sync their files
    if (!mkdtemp(scratch)) die("cannot make the folder %s: %s", scratch, strerror(errno));
    int failed = run_tests(argc > 1 ? argv[1] : NULL, enter_folder, NULL);
    nftw(scratch, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return failed > 0;
}

// Numerical test of train_gpt2.c: every function of it against slow and obvious ones in double, and against PyTorch's
// results in tests/tiny_gpt2.safetensors. Run from the folder of this file:
//
//   make test_gpt2 && ./test_gpt2        all tests; ./test_gpt2 attention: those with "attention" in their name
//   TEST_SEED=7 ./test_gpt2              with the same draws again (the seed of every run is printed)
//   TEST_VERBOSE=1 ./test_gpt2           says how much of its tolerance each test used
//
// One line a test: "ok - NAME", "not ok - NAME: reason" or "skip - NAME: reason"; exit status 1 if any failed.
// Names are those of train_gpt2.c: B, T, C, L, NH, HS, V, N = B T; a `d` before a name is a gradient.
//
// Tolerances are multiples of U, by which one float operation errs, times the size of what was added up. Arrays that a
// function has to fill are NaN before, and have guards around that it must leave alone.

#define GPT2_NO_MAIN
#include "train_gpt2.c"

#include <ftw.h>
#include <setjmp.h>
#include <sys/resource.h>
#include <time.h>

#ifndef _OPENMP
static void omp_set_num_threads(int threads) { (void)threads; }
#endif
#if defined(__SANITIZE_ADDRESS__) || (defined(__clang__) && __has_feature(address_sanitizer))
enum { GUARD = 0, SANITIZED = 1 };  // the sanitizer sees reads beyond an array, too, if there is nothing of ours
#else
enum { GUARD = 32, SANITIZED = 0 };
#endif

static const double U = FLT_EPSILON / 2;

// ---------------------------------------------------------------------------
// The frame: TEST(name) { ... } declares a test, CHECK(condition, "why", ...) ends it if the condition does not hold

static struct { const char *name; void (*body)(void); } tests[40];
static int test_count;
static jmp_buf test_end;
static char reason[2048];
static double worst;  // the largest error so far, in parts of its tolerance

#define TEST(test)                                                                                                     \
    static void test_##test(void);                                                                                     \
    __attribute__((constructor)) static void add_##test(void) {                                                        \
        tests[test_count].name = #test;                                                                                \
        tests[test_count++].body = test_##test;                                                                        \
    }                                                                                                                  \
    static void test_##test(void)
#define CHECK(condition, ...) do { if (!(condition)) test_ends(1, __LINE__, #condition, " " __VA_ARGS__); } while (0)

__attribute__((noreturn)) PRINTF_LIKE(4, 5) static void test_ends(int how, int line, const char *condition, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int length = snprintf(reason, sizeof reason, "line %d: %s", line, condition);
    vsnprintf(reason + length, sizeof reason - (size_t)length, format, args);
    va_end(args);
    longjmp(test_end, how);
}

// Random numbers, of another kind than those under test: splitmix64.
static uint64_t draw_state;

static uint64_t draw(void) {
    uint64_t z = draw_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int draw_int(int least, int most) { return least + (int)(draw() % (uint64_t)(most - least + 1)); }
static double draw_unit(void) { return ((double)(draw() >> 11) + 0.5) / 9007199254740992.0; }
static double draw_normal(void) { double radius = sqrt(-2 * log(draw_unit())); return radius * cos(2 * M_PI * draw_unit()); }

// Arrays that live until release(), or until the test ends.
static struct { float *base; size_t floats; } kept[2000];
static int kept_count;

static void *keep(void *base, size_t count) {
    if (kept_count == 2000) die("a test keeps more than 2000 arrays");
    kept[kept_count].base = base;
    kept[kept_count++].floats = count;
    return base;
}

static float *floats(size_t count) {  // NaN, with guards on both sides
    float *base = keep(malloc((count + 2 * GUARD + 1) * sizeof(float)), count);
    for (size_t i = 0; i < count + 2 * GUARD; i++) base[i] = i >= GUARD && i < count + GUARD ? NAN : 1234.5f;
    return base + GUARD;
}

static float *normals(size_t count, double std) {
    float *x = floats(count);
    for (size_t i = 0; i < count; i++) x[i] = (float)(std * draw_normal());
    return x;
}

static double *doubles(size_t count) { return keep(allocate(count, sizeof(double), "a test"), 0); }
static int *draw_tokens(int count, int V) {
    int *tokens = keep(allocate((size_t)count, sizeof(int), "a test"), 0);
    for (int i = 0; i < count; i++) tokens[i] = draw_int(0, V - 1);
    return tokens;
}

static float *copy_of(const float *x, size_t count) { return memcpy(floats(count), x, count * sizeof(float)); }
static double *as_double(const float *x, size_t count) {
    double *out = doubles(count);
    for (size_t i = 0; i < count; i++) out[i] = x[i];
    return out;
}

static void release(bool check) {
    bool whole = true;
    for (; kept_count > 0; free(kept[--kept_count].base))
        for (size_t i = 0; kept[kept_count - 1].floats && i < GUARD; i++)
            whole = whole && kept[kept_count - 1].base[i] == 1234.5f && kept[kept_count - 1].base[kept[kept_count - 1].floats + GUARD + i] == 1234.5f;
    CHECK(!check || whole, "(something was written beyond an array)");
}

// |got - want| <= tolerance * size for each element; size NULL: 1.
static void check_close(const char *what, const float *got, const double *want, const double *size, double tolerance, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double error = fabs(got[i] - want[i]), allowed = tolerance * (size ? size[i] : 1);
        if (!(error <= allowed)) test_ends(1, 0, what, "[%zu of %zu] is %.9g, should be %.9g within %.3g", i, count, got[i], want[i], allowed);
        if (error > worst * allowed) worst = error / allowed;
    }
}

static void check_number(const char *what, double got, double want, double allowed) {
    if (!(fabs(got - want) <= allowed)) test_ends(1, 0, what, " is %.12g, should be %.12g within %.3g", got, want, allowed);
    if (fabs(got - want) > worst * allowed) worst = fabs(got - want) / allowed;
}

static double largest_size(const double *x, size_t count) {
    double max = 0;
    for (size_t i = 0; i < count; i++) max = fmax(max, fabs(x[i]));
    return max;
}

// ---------------------------------------------------------------------------
// GPT-2 in double, as slow as it is plain

// c (M, N) = a b, and size, if wanted, the sums of the magnitudes.
static void ref_matmul(double *c, double *size, const double *a, bool a_transposed, const double *b, bool b_transposed, int M, int N, int K) {
#pragma omp parallel for
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0, magnitude = 0;
            for (int k = 0; k < K; k++) {
                double product = (a_transposed ? a[(size_t)k * M + i] : a[(size_t)i * K + k]) * (b_transposed ? b[(size_t)j * K + k] : b[(size_t)k * N + j]);
                sum += product;
                magnitude += fabs(product);
            }
            c[(size_t)i * N + j] = sum;
            if (size) size[(size_t)i * N + j] = magnitude;
        }
}

static void ref_linear(double *out, const double *x, const double *weight, const double *bias, int N, int C, int OC) {
    ref_matmul(out, NULL, x, false, weight, false, N, OC, C);
    for (int i = 0; i < N * OC; i++) out[i] += bias[i % OC];
}

static void ref_layernorm(double *out, double *mean, double *rstd, const double *x, const double *weight, const double *bias, int N, int C) {
    for (int n = 0; n < N; n++) {
        const double *row = x + (size_t)n * C;
        double m = 0, variance = 0;
        for (int c = 0; c < C; c++) m += row[c] / C;
        for (int c = 0; c < C; c++) variance += (row[c] - m) * (row[c] - m) / C;
        for (int c = 0; c < C; c++) out[(size_t)n * C + c] = (row[c] - m) / sqrt(variance + 1e-5) * weight[c] + bias[c];
        if (mean) mean[n] = m, rstd[n] = 1 / sqrt(variance + 1e-5);
    }
}

static double ref_gelu(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

static double norm_of(const double *x, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

// Attention row by row, with all of a row's softmax at once; the gradients where dout is given. The sizes are estimates of
// rounding, in units of U. A score errs by about |q| |k| / sqrt(HS), so its probability errs by that in relation to itself;
// R adds the exponential's own error, that of the log-sum-exp and that of sums of up to T numbers. In ds = p (dp - delta),
// dp errs by |do| |v|, and delta = do . o by |do| times o's error, even where the difference is next to nothing.
typedef struct { double *out, *out_size, *lse, *lse_size, *dqkv, *dqkv_size; } RefAttention;

static void ref_attention(RefAttention r, const double *qkv, const double *dout, int B, int T, int NH, int HS) {
    int C = NH * HS;
    double scale = 1 / sqrt(HS);
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++) {
            size_t at = (size_t)b * T * 3 * C + (size_t)h * HS, stride = (size_t)3 * C;
            const double *keys = qkv + at + C, *values = keys + C;
            double *p = allocate((size_t)T, sizeof *p, "a row"), k_max = 0, v_max = 0;
            for (int t = 0; t < T; t++) {
                const double *q = qkv + at + t * stride;
                size_t row = ((size_t)b * T + t) * C + (size_t)h * HS;
                double *o = r.out + row, max = -INFINITY, sum = 0;
                for (int j = 0; j <= t; j++) {
                    double s = 0;
#pragma omp simd reduction(+ : s)
                    for (int d = 0; d < HS; d++) s += q[d] * keys[j * stride + d];
                    p[j] = s * scale;
                    max = fmax(max, p[j]);
                }
                for (int j = 0; j <= t; j++) sum += exp(p[j] - max);
                double lse = max + log(sum);
                for (int d = 0; d < HS; d++) o[d] = 0;
                for (int j = 0; j <= t; j++) {
                    p[j] = exp(p[j] - lse);
                    for (int d = 0; d < HS; d++) o[d] += p[j] * values[j * stride + d];
                }
                if (!dout) continue;

                k_max = fmax(k_max, norm_of(keys + t * stride, HS)), v_max = fmax(v_max, norm_of(values + t * stride, HS));
                double R = norm_of(q, HS) * k_max * scale + fabs(lse) + sqrt(T) + 8, delta = 0;
                const double *d_o = dout + row;
                r.lse[((size_t)b * NH + h) * T + t] = lse;
                r.lse_size[((size_t)b * NH + h) * T + t] = R;
                for (int d = 0; d < HS; d++) {
                    double squares = 0;
                    for (int j = 0; j <= t; j++) squares += p[j] * p[j] * values[j * stride + d] * values[j * stride + d];
                    r.out_size[row + d] = R * (sqrt(squares) + fabs(o[d]));
                    delta += d_o[d] * o[d];
                }
                double dp_error = norm_of(d_o, HS) * (v_max + norm_of(r.out_size + row, HS));
                for (int j = 0; j <= t; j++) {
                    double dp = 0, *dk = r.dqkv + at + C + j * stride, *dk_size = r.dqkv_size + at + C + j * stride;
                    double *dq = r.dqkv + at + t * stride, *dq_size = r.dqkv_size + at + t * stride;
#pragma omp simd reduction(+ : dp)
                    for (int d = 0; d < HS; d++) dp += d_o[d] * values[j * stride + d];
                    double ds = p[j] * (dp - delta) * scale, ds_size = p[j] * (R * fabs(dp - delta) + dp_error) * scale;
                    for (int d = 0; d < HS; d++) {
                        dq[d] += ds * keys[j * stride + d], dq_size[d] += ds_size * fabs(keys[j * stride + d]);
                        dk[d] += ds * q[d], dk_size[d] += ds_size * fabs(q[d]);
                        dk[C + d] += p[j] * d_o[d], dk_size[C + d] += R * p[j] * fabs(d_o[d]);
                    }
                }
            }
            free(p);
        }
}

// The mean loss of tokens (B, T) under weights w, which lie as the model's do; and the logits (B, T, V), if wanted.
static double ref_model(const Model *m, const double *w, const int *tokens, const int *targets, int B, int T, double *logits) {
    int C = m->config.channels, V = m->config.vocab, NH = m->config.heads, N = B * T, L = m->config.layers;
    double *x = allocate((size_t)N * (6 * C + V), sizeof *x, "a model in double"), *y = x + N * C, *z = y + N * C, loss = 0;
    if (!logits) logits = z + 4 * N * C;
    const double *tensor[200];
    for (int i = 0; i < gpt_tensor_count(m->config); i++) tensor[i] = w + m->tensors[i].offset;
    for (int i = 0; i < N * C; i++) x[i] = tensor[0][tokens[i / C] * C + i % C] + tensor[1][i / C % T * C + i % C];
    for (int l = 0; l < L; l++) {
        const double **layer = tensor + 2 + l * TENSORS_PER_LAYER;
        ref_layernorm(y, NULL, NULL, x, layer[LN1_W], layer[LN1_B], N, C);
        ref_linear(z, y, layer[QKV_W], layer[QKV_B], N, C, 3 * C);
        ref_attention((RefAttention){.out = y}, z, NULL, B, T, NH, C / NH);
        ref_linear(z, y, layer[PROJ_W], layer[PROJ_B], N, C, C);
        for (int i = 0; i < N * C; i++) x[i] += z[i];
        ref_layernorm(y, NULL, NULL, x, layer[LN2_W], layer[LN2_B], N, C);
        ref_linear(z, y, layer[FC_W], layer[FC_B], N, C, 4 * C);
        for (int i = 0; i < N * 4 * C; i++) z[i] = ref_gelu(z[i]);
        ref_linear(y, z, layer[FCPROJ_W], layer[FCPROJ_B], N, 4 * C, C);
        for (int i = 0; i < N * C; i++) x[i] += y[i];
    }
    ref_layernorm(y, NULL, NULL, x, tensor[2 + L * TENSORS_PER_LAYER], tensor[3 + L * TENSORS_PER_LAYER], N, C);
    ref_matmul(logits, NULL, y, false, tensor[0], true, N, V, C);
    for (int n = 0; targets && n < N; n++) {
        double sum = 0;
        for (int v = 0; v < V; v++) sum += exp(logits[n * V + v] - logits[n * V + targets[n]]);
        loss += log(sum) / N;
    }
    free(x);
    return loss;
}

// A model with random weights: matrices of 0.15, so that attention is far from even, and layer norms about 1.
static void random_model(Model *m, GptConfig config, int B, bool training) {
    model_plan(m, config, B, training);
    model_allocate(m, training);
    for (int i = 0; i < gpt_tensor_count(config); i++)
        for (size_t j = 0; j < m->tensors[i].size; j++)
            m->state.weights[m->tensors[i].offset + j] = (float)(draw_normal() * 0.15 + (m->tensors[i].init_value == 1));
}

static void fill(float *x, float value, size_t count) { for (size_t i = 0; i < count; i++) x[i] = value; }

// Forward and backward of tokens (B, T), `piece` sequences at a time, into gradients that are NaN before. The mean loss.
static double whole_gradient(Model *m, const int *tokens, const int *targets, int B, int T, int piece) {
    double sum = 0;
    fill(m->grads, NAN, m->parameters);
    for (int b = 0; b < B; b += piece) {
        int rows = min_int(piece, B - b);
        model_forward(m, tokens + b * T, rows, T);
        sum += model_loss(m, targets + b * T, rows * T, 1.0f / (float)(B * T), b > 0);
        model_backward(m, tokens + b * T, rows, T, b > 0);
    }
    return sum / (B * T);
}

// ---------------------------------------------------------------------------
// 10 Memory (first, because the peak of the memory in use is that of the whole process)

TEST(memory_linear_in_T) {
    for (int training = 0; training < 2; training++) {
        double first = 0;
        for (int T = 256; T <= 8192; T *= 2) {  // from T to 2 T
            Model shorter, longer;
            GptConfig config = {3, 4, 64, T, 257}, twice = {3, 4, 64, 2 * T, 257};
            double per_token = (double)(model_plan(&longer, twice, 1, training) - model_plan(&shorter, config, 1, training)) / T;
            if (T == 256) first = per_token;
            CHECK(per_token > 0 && fabs(per_token - first) < 1, "(%g bytes a token at T = %d, %g at 256)", per_token, T, first);
            CHECK(longer.head_rows == 2 * T);
            model_free(&shorter), model_free(&longer);
        }
    }
    // One head at T = 8192, whose scores would be 256 MiB. All values are 1: so must be all outputs, the gradients of q and
    // k are 0, and those of v share out dout.
    struct rusage before, after;
    int T = SANITIZED ? 4096 : 8192, HS = 64;
    size_t count = (size_t)T * HS;
    getrusage(RUSAGE_SELF, &before);
    float *qkv = normals(3 * count, 1), *out = floats(count), *lse = floats((size_t)T), *dout = normals(count, 1), *dqkv = floats(3 * count);
    for (size_t i = 0; i < 3 * count; i++) if (i / HS % 3 == 2) qkv[i] = 1;
    attention_forward(out, lse, qkv, 1, T, 1, HS);
    attention_backward(dqkv, dout, qkv, out, lse, 1, T, 1, HS);
    getrusage(RUSAGE_SELF, &after);
    for (size_t i = 0; i < count; i++) CHECK(fabs(out[i] - 1) < 1000 * U, "(out %g)", out[i]);
    for (int d = 0; d < HS; d++) {
        double given = 0, shared = 0;
        for (int t = 0; t < T; t++) {
            given += dout[t * HS + d], shared += dqkv[(size_t)(t * 3 + 2) * HS + d];
            CHECK(fabs(dqkv[(size_t)t * 3 * HS + d]) + fabs(dqkv[(size_t)(t * 3 + 1) * HS + d]) < 1e-3);
        }
        check_number("sum of dv", shared, given, 1e-3 * sqrt(T));
    }
    long grown = after.ru_maxrss - before.ru_maxrss, allowed = (long)(8 * count * sizeof(float) / 1024 * 5 / 4) + 16384;
    CHECK(grown <= allowed && allowed < (long)T * T / 256, "(%ld KiB, at most %ld)", grown, allowed);
}

// ---------------------------------------------------------------------------
// 1 Matrix products

// Whatever the order, a sum of K products errs by at most K U / (1 - K U) of the sum of their magnitudes (Higham, "Accuracy
// and Stability of Numerical Algorithms", section 3.1), fused or not.
static void check_matmul(int M, int N, int K, int kind) {
    bool a_transposed = kind & 1, b_transposed = kind & 2, add = kind & 4;
    size_t count = (size_t)M * N;
    float *a = normals((size_t)M * K, 1), *b = normals((size_t)K * N, 1), *c = add ? normals(count, 3) : floats(count);
    double *want = doubles(count), *size = doubles(count);
    char what[100];
    snprintf(what, sizeof what, "matmul M %d N %d K %d%s%s%s c", M, N, K, a_transposed ? " a transposed" : "", b_transposed ? " b transposed" : "", add ? " add" : "");
    ref_matmul(want, size, as_double(a, (size_t)M * K), a_transposed, as_double(b, (size_t)K * N), b_transposed, M, N, K);
    for (size_t i = 0; add && i < count; i++) want[i] += c[i], size[i] += fabs(c[i]);
    matmul(c, a, a_transposed, b, b_transposed, M, N, K, add);
    check_close(what, c, want, size, (K + 2) * U, count);
    release(true);
}

TEST(matmul) {
    static const int large[][3] = {{500, 37, 20}, {5, 4200, 11}, {13, 40, 777}, {1, 300, 257}, {290, 1, 513}};  // beyond all cache blocks
    int edges[] = {1, 2, MR - 1, MR, MR + 1, VECTOR - 1, NR - 1, NR, NR + 1, 2 * MR, 2 * NR + 3, 61, 97, 128};
    omp_set_num_threads(1);  // a single thread has all blocks
    for (int i = 0; i < 5; i++)
        for (int kind = 0; kind < 8; kind++) check_matmul(large[i][0], large[i][1], large[i][2], kind);
    check_matmul(210, 2100, 300, draw_int(0, 7));
    for (int i = 0; i < 60; i++) {
        int size[3];
        omp_set_num_threads(draw_int(1, 3));
        for (int j = 0; j < 3; j++) size[j] = draw_int(0, 2) ? edges[draw_int(0, 13)] : draw_int(1, 150);
        for (int kind = 0; kind < 8; kind++) check_matmul(size[0], size[1], size[2], kind);
    }
}

// ---------------------------------------------------------------------------
// 2 Layers

TEST(exp_fast) {
    for (int i = 0; i < 2000000; i++) {
        float x = i % 4 ? (float)(-87 + 175 * draw_unit()) : (float)((draw_int(-125, 126) + 0.5) * M_LN2 + draw_normal() * 1e-5);  // where n changes
        if (i % 100 == 0) x = (float)ldexp(draw_normal(), draw_int(-60, 3));
        double want = exp(x), ulp = ldexp(1, ilogb(want) - 23), error = fabs(exp_fast(x) - want) / ulp;
        CHECK(error <= 2, "(%.3g units in the last place at %.9g)", error, x);
        worst = fmax(worst, error / 2);
    }
    static const float beyond[] = {-87.0f, -87.01f, -88, -103, -1000, -1e30f, -INFINITY}, above[] = {88, 88.01f, 89, 1000, 1e30f, INFINITY};
    for (int i = 0; i < 7; i++) CHECK(exp_fast(beyond[i]) == exp_fast(-87) && fabs(exp_fast(-87) / exp(-87) - 1) < 4 * U, "at %g", beyond[i]);
    for (int i = 0; i < 6; i++) CHECK(exp_fast(above[i]) == exp_fast(88) && fabs(exp_fast(88) / exp(88) - 1) < 4 * U, "at %g", above[i]);
    CHECK(exp_fast(0) == 1 && exp_fast(-0.0f) == 1);
}

TEST(largest) {
    for (int i = 0; i < 3000; i++) {
        int n = draw_int(0, 100);
        float *x = normals((size_t)n, 10), max = i % 2 ? -FLT_MAX : (float)(10 * draw_normal()), want = max;
        for (int j = 0; j < n; j++) if (x[j] > want) want = x[j];
        CHECK(largest(x, n, max) == want, "(n %d)", n);
        if (n > 0) x[draw_int(0, n - 1)] = 1e6f;  // anywhere
        CHECK(n == 0 || largest(x, n, max) == 1e6f, "(n %d)", n);
        release(true);
    }
}

// gelu errs by a few U of x; its slope, x/2 (1 - t^2) du beside other terms, by a few U of x du. From |x| = 8 on tanh is
// exactly 1 or -1, and so nothing errs any more.
TEST(gelu) {
    int count = 40003;
    float *x = normals((size_t)count, 2), *out = floats((size_t)count), *dout = normals((size_t)count, 1), *dx = floats((size_t)count);
    static const float special[] = {0, -0.0f, 1e-30f, -1e-30f, 5, -5, 9, -9, 20, -20, 1000, -1000, 1e6f, -1e6f, 1e15f, -1e15f};
    for (int i = 0; i < count; i++) x[i] = i < 16 ? special[i] : i % 3 ? x[i] : (float)(20 * draw_unit() - 10);
    double *want = doubles((size_t)count), *size = doubles((size_t)count), *slope = doubles((size_t)count), *slope_size = doubles((size_t)count);
    for (int i = 0; i < count; i++) {
        double z = x[i], near = fmin(fabs(z), 8), k = sqrt(2 / M_PI), t = tanh(k * (z + 0.044715 * z * z * z));
        double sech = fabs(z) > 20 ? 0 : 1 - t * t;
        want[i] = ref_gelu(z), size[i] = fabs(z);
        slope[i] = dout[i] * (0.5 * (1 + t) + 0.5 * z * sech * k * (1 + 3 * 0.044715 * z * z));
        slope_size[i] = fabs(dout[i]) * (1 + near * k * (1 + 3 * 0.044715 * near * near));
    }
    gelu_forward(out, x, (size_t)count);
    check_close("gelu", out, want, size, 8 * U, (size_t)count);
    gelu_backward(dx, dout, x, (size_t)count);
    check_close("dgelu", dx, slope, slope_size, 8 * U, (size_t)count);
    gelu_backward(dout, dout, x, (size_t)count);
    CHECK(!memcmp(dx, dout, (size_t)count * sizeof(float)), "(in place)");
}

TEST(embedding) {
    for (int i = 0; i < 60; i++) {
        int B = draw_int(1, 4), T = draw_int(1, 40), C = draw_int(1, 150), V = draw_int(1, 30), longest = T + draw_int(0, 5), add = i % 2;
        size_t rows = (size_t)B * T, wpe_count = (size_t)longest * C, wte_count = (size_t)V * C;
        float *wte = normals(wte_count, 1), *wpe = normals(wpe_count, 1), *out = floats(rows * C), *dout = normals(rows * C, 1);
        float *dwte = normals(wte_count, 1), *dwpe = add ? normals(wpe_count, 1) : floats(wpe_count);
        int *tokens = draw_tokens(B * T, V);
        double *want_wte = as_double(dwte, wte_count), *want_wpe = add ? as_double(dwpe, wpe_count) : doubles(wpe_count);
        double *size_wte = doubles(wte_count), *size_wpe = doubles(wpe_count);
        for (size_t j = 0; j < wte_count; j++) size_wte[j] = fabs(want_wte[j]);
        for (size_t j = 0; j < wpe_count; j++) size_wpe[j] = fabs(want_wpe[j]);
        embedding_forward(out, tokens, wte, wpe, B, T, C);
        for (int n = 0; n < B * T; n++)
            for (int c = 0; c < C; c++) {
                int token = tokens[n] * C + c, position = n % T * C + c;
                CHECK(out[n * C + c] == wte[token] + wpe[position]);
                want_wte[token] += dout[n * C + c], size_wte[token] += fabs(dout[n * C + c]);
                want_wpe[position] += dout[n * C + c], size_wpe[position] += fabs(dout[n * C + c]);
            }
        embedding_backward(dwte, dwpe, dout, tokens, B, T, C, longest, add);
        check_close("dwte", dwte, want_wte, size_wte, (B * T + 1) * U, wte_count);
        check_close("dwpe", dwpe, want_wpe, size_wpe, (B + 1) * U, wpe_count);
        release(true);
    }
}

// A mean is off by some U times the largest x, and then (x - mean) rstd by that much times rstd. In a constant row all
// roundings of the sum may go the same way, hence C of them; else their signs vary.
TEST(layernorm) {
    for (int i = 0; i < 80; i++) {
        int N = draw_int(1, 40), C = i < 4 ? i + 1 : draw_int(1, 700), add = i % 2, add_dx = i / 2 % 2;
        size_t count = (size_t)N * C, width = (size_t)C, rows = (size_t)N;
        float *x = normals(count, pow(10, draw_int(-3, 2))), *weight = normals(width, 1), *bias = normals(width, 1);
        double *tolerance = doubles(count), *mean_error = doubles(rows), *rstd_error = doubles(rows);
        for (int n = 0; n < N; n++) {
            int kind = draw_int(0, 3);  // as it is, about a large mean, constant, zero
            float mean = kind == 1 ? (float)(1000 * draw_normal()) : kind == 2 ? (float)(10 * draw_normal()) : 0, most = 0;
            for (int c = 0; c < C; c++) {
                x[n * C + c] = kind < 2 ? x[n * C + c] + mean : mean;
                most = fmaxf(most, fabsf(x[n * C + c]));
            }
            mean_error[n] = (kind < 2 ? 8 + 2 * sqrt(C) : C + 8) * U * most;
        }
        double *xd = as_double(x, count), *wd = as_double(weight, width), *bd = as_double(bias, width);
        double *want = doubles(count), *mean_want = doubles(rows), *rstd_want = doubles(rows);
        ref_layernorm(want, mean_want, rstd_want, xd, wd, bd, N, C);
        for (int j = 0; j < N * C; j++) {
            double r = rstd_want[j / C], off = mean_error[j / C] * r, xhat = fabs(xd[j] - mean_want[j / C]) * r;
            // The variance grows by the square of the mean's error, and is itself a sum of C squares.
            rstd_error[j / C] = r * (off * off + off * 4 * U * sqrt(C) + (8 + sqrt(C)) * U);
            tolerance[j] = fabs(wd[j % C]) * (off + xhat * (rstd_error[j / C] / r + 4 * U)) + fabs(bd[j % C]) * 2 * U;
        }
        float *out = floats(count), *mean = floats(rows), *rstd = floats(rows);
        layernorm_forward(out, mean, rstd, x, weight, bias, N, C);
        check_close("layernorm mean", mean, mean_want, mean_error, 1, rows);
        check_close("layernorm rstd", rstd, rstd_want, rstd_error, 1, rows);
        check_close("layernorm", out, want, tolerance, 1, count);

        // The backward is given the forward's mean and rstd, and the reference takes the same.
        float *dout = normals(count, 1), *dx = add_dx ? normals(count, 1) : floats(count);
        float *dw = add ? normals(width, 1) : floats(width), *db = add ? normals(width, 1) : floats(width);
        double *dx_want = add_dx ? as_double(dx, count) : doubles(count), *dx_size = doubles(count), *g = doubles(width);
        double *dw_want = add ? as_double(dw, width) : doubles(width), *db_want = add ? as_double(db, width) : doubles(width);
        double *dw_size = doubles(width), *db_size = doubles(width);
        for (int c = 0; c < C; c++) dw_size[c] = fabs(dw_want[c]), db_size[c] = fabs(db_want[c]);
        for (int n = 0; n < N; n++) {
            double r = rstd[n], mean_g = 0, mean_gx = 0, size_g = 0, size_gx = 0;
            for (int c = 0; c < C; c++) {
                double xhat = (xd[n * C + c] - mean[n]) * r, d = dout[n * C + c];
                g[c] = d * wd[c];
                mean_g += g[c] / C, mean_gx += g[c] * xhat / C, size_g += fabs(g[c]) / C, size_gx += fabs(g[c] * xhat) / C;
                dw_want[c] += d * xhat, dw_size[c] += fabs(d * xhat);
                db_want[c] += d, db_size[c] += fabs(d);
            }
            for (int c = 0; c < C; c++) {
                double xhat = (xd[n * C + c] - mean[n]) * r, before = dx_want[n * C + c];
                dx_want[n * C + c] += r * (g[c] - mean_g - xhat * mean_gx);
                dx_size[n * C + c] = fabs(before) + r * (fabs(g[c]) + size_g + fabs(xhat) * size_gx);
            }
        }
        layernorm_backward(dx, add_dx, dw, db, dout, x, weight, mean, rstd, N, C, add);
        check_close("layernorm dx", dx, dx_want, dx_size, (8 + sqrt(C)) * U, count);
        check_close("layernorm dweight", dw, dw_want, dw_size, (N + 4) * U, width);
        check_close("layernorm dbias", db, db_want, db_size, (N + 4) * U, width);
        release(true);
    }
}

TEST(linear) {
    for (int i = 0; i < 40; i++) {
        int N = draw_int(1, 150), C = draw_int(1, 150), OC = draw_int(1, 200), add = i % 2;
        size_t nx = (size_t)N * C, ny = (size_t)N * OC, nw = (size_t)C * OC, width = (size_t)OC;
        float *x = normals(nx, 1), *weight = normals(nw, 1), *bias = normals(width, 1), *residual = i / 2 % 2 ? normals(ny, 1) : NULL, *out = floats(ny);
        double *xd = as_double(x, nx), *wd = as_double(weight, nw), *want = doubles(ny), *size = doubles(ny);
        ref_matmul(want, size, xd, false, wd, false, N, OC, C);
        for (int j = 0; j < N * OC; j++) {
            want[j] += (double)bias[j % OC] + (residual ? residual[j] : 0);
            size[j] += fabs(bias[j % OC]) + (residual ? fabs(residual[j]) : 0);
        }
        linear_forward(out, x, weight, bias, residual, N, C, OC);
        check_close("linear", out, want, size, (C + 3) * U, ny);

        float *dout = normals(ny, 1), *dx = floats(nx), *dw = add ? normals(nw, 1) : floats(nw), *db = add ? normals(width, 1) : floats(width);
        double *dx_want = doubles(nx), *dx_size = doubles(nx), *dw_want = doubles(nw), *dw_size = doubles(nw), *db_want = doubles(width), *db_size = doubles(width);
        double *dd = as_double(dout, ny);
        ref_matmul(dx_want, dx_size, dd, false, wd, true, N, C, OC);
        ref_matmul(dw_want, dw_size, xd, true, dd, false, C, OC, N);
        for (int j = 0; j < N * OC; j++) db_want[j % OC] += dd[j], db_size[j % OC] += fabs(dd[j]);
        for (size_t j = 0; add && j < nw; j++) dw_want[j] += dw[j], dw_size[j] += fabs(dw[j]);
        for (int j = 0; add && j < OC; j++) db_want[j] += db[j], db_size[j] += fabs(db[j]);
        linear_backward(dx, dw, db, dout, x, weight, N, C, OC, add);
        check_close("linear dx", dx, dx_want, dx_size, (OC + 2) * U, nx);
        check_close("linear dweight", dw, dw_want, dw_size, (N + 2) * U, nw);
        check_close("linear dbias", db, db_want, db_size, (N + 2) * U, width);
        release(true);
    }
}

// The sum of the exponentials errs by some U and a random walk of V roundings; max and the target's logit are rounded where
// they are subtracted. e^-87 stands for all that is smaller.
TEST(crossentropy) {
    for (int i = 0; i < 60; i++) {
        int N = draw_int(1, 20), V = i < 3 ? i + 1 : draw_int(1, i % 10 ? 400 : 5000), *targets = draw_tokens(N, V);
        double std = i % 4 == 0 ? 1e4 : i % 4 == 1 ? 30 : i % 4 == 2 ? 3 : 1e-3, shift = i % 3 ? 0 : 1e4 * draw_normal(), dscale = pow(10, -3 * draw_unit());
        size_t count = (size_t)N * V;
        float *logits = normals(count, std), *losses = floats((size_t)N), scale = (float)dscale;
        for (size_t j = 0; j < count; j++) logits[j] += (float)shift;
        float *untouched = copy_of(logits, count), *again = floats((size_t)N);
        double *want = doubles((size_t)N), *tolerance = doubles((size_t)N), *grad = doubles(count), *grad_size = doubles(count);
        for (int n = 0; n < N; n++) {
            double max = -INFINITY, sum = 0, at_target = logits[n * V + targets[n]];
            for (int v = 0; v < V; v++) max = fmax(max, logits[n * V + v]);
            for (int v = 0; v < V; v++) sum += exp(logits[n * V + v] - max);
            want[n] = log(sum) + max - at_target;
            tolerance[n] = (8 + sqrt(V) + 2 * fabs(max) + 2 * log(V) + fabs(want[n])) * U;
            for (int v = 0; v < V; v++) {
                double p = exp(logits[n * V + v] - max) / sum;
                grad[n * V + v] = (p - (v == targets[n])) * scale;
                grad_size[n * V + v] = (p * (12 + sqrt(V)) + 2 * (v == targets[n])) * scale * U + 1e-36;
            }
        }
        crossentropy(losses, logits, targets, N, V, 0);
        check_close("loss", losses, want, tolerance, 1, (size_t)N);
        CHECK(!memcmp(logits, untouched, count * sizeof(float)), "(the loss alone leaves the logits)");
        crossentropy(again, logits, targets, N, V, scale);
        check_close("loss with gradient", again, want, tolerance, 1, (size_t)N);
        check_close("dlogits", logits, grad, grad_size, 1, count);
        release(true);
    }
}

// ---------------------------------------------------------------------------
// 3 Attention

static void check_attention(int B, int T, int NH, int HS, int kind) {
    static const double magnitudes[] = {1e-4, 1, 4, 1};  // at 4 the scores have a deviation of 16 and reach 50
    int C = NH * HS;
    size_t count = (size_t)B * T * C, rows = (size_t)B * T * NH;
    float *qkv = normals(3 * count, magnitudes[kind]), *dout = normals(count, 1), *out = floats(count), *lse = floats(rows), *dqkv = floats(3 * count);
    double rise = draw_int(0, 1) ? 60 : -60;  // kind 3: scores that rise, or fall, by 60 from the first key to the last
    for (size_t n = 0; kind == 3 && n < (size_t)B * T; n++)
        for (int h = 0; h < NH; h++) {
            qkv[n * 3 * C + h * HS] = sqrtf((float)HS);
            qkv[n * 3 * C + C + h * HS] = (float)(rise * (double)(n % T) / T);
        }
    RefAttention r = {doubles(count), doubles(count), doubles(rows), doubles(rows), doubles(3 * count), doubles(3 * count)};
    ref_attention(r, as_double(qkv, 3 * count), as_double(dout, count), B, T, NH, HS);
    char what[100];
    attention_forward(out, lse, qkv, B, T, NH, HS);
    attention_backward(dqkv, dout, qkv, out, lse, B, T, NH, HS);
    snprintf(what, sizeof what, "attention B %d T %d NH %d HS %d kind %d out, lse, dqkv", B, T, NH, HS, kind);
    check_close(what, out, r.out, r.out_size, 4 * U, count);
    check_close(what, lse, r.lse, r.lse_size, 4 * U, rows);
    check_close(what, dqkv, r.dqkv, r.dqkv_size, 4 * U, 3 * count);
    release(true);
}

TEST(attention) {
    static const int lengths[] = {1, 7, 63, 64, 65, 127, 128, 129, 200}, sizes[] = {1, 8, 24, 32, 64, 80, 128};
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 7; j++)
            for (int kind = 0; kind < 4; kind++)
                check_attention(draw_int(1, i < 5 ? 3 : 2), lengths[i], draw_int(1, i < 5 ? 3 : 2), sizes[j], kind);
    check_attention(1, 1000, 1, sizes[draw_int(0, 3)], draw_int(0, 3));
    check_attention(1, 1000, 2, 64, draw_int(0, 3));
}

TEST(attention_is_causal) {  // what comes later changes no bit of what was before
    for (int i = 0; i < 60; i++) {
        int B = 2, T = draw_int(2, 200), NH = 2, HS = draw_int(1, 40), C = NH * HS, first = draw_int(1, T - 1);
        size_t count = (size_t)B * T * C;
        float *qkv = normals(3 * count, i % 3 ? 1 : 4), *out = floats(count), *lse = floats((size_t)B * NH * T), *out2 = floats(count), *lse2 = floats((size_t)B * NH * T);
        attention_forward(out, lse, qkv, B, T, NH, HS);
        for (size_t j = 0; j < 3 * count; j++) if ((int)(j / (size_t)(3 * C)) % T >= first) qkv[j] = (float)(20 * draw_normal());
        attention_forward(out2, lse2, qkv, B, T, NH, HS);
        for (int b = 0; b < B; b++) CHECK(!memcmp(out + b * T * C, out2 + b * T * C, (size_t)first * C * sizeof(float)));
        for (int b = 0; b < B * NH; b++) CHECK(!memcmp(lse + b * T, lse2 + b * T, (size_t)first * sizeof(float)));
        CHECK(memcmp(out, out2, count * sizeof(float)));
        release(true);
    }
}

// ---------------------------------------------------------------------------
// 4 The model

static double *fixture(const char *name, size_t count) {  // numbers of any type, as double
    static SafeTensors file;
    if (!file.file && !safetensors_open(&file, "tests/tiny_gpt2.safetensors")) test_ends(1, __LINE__, "the fixture: ", "%s", error_text);
    const SafeTensor *t = safetensors_find(&file, name);
    CHECK(t && t->bytes == count * safetensors_dtype_size(t->dtype), "(%s is missing or has another size)", name);
    double *out = doubles(count);
    float *f = keep(allocate(count, 8, "a tensor"), 0);
    CHECK(safetensors_read(&file, t, f), "%s", error_text);
    for (size_t i = 0; i < count; i++) out[i] = t->dtype[0] == 'I' ? ((int32_t *)f)[i] : t->dtype[1] == '3' ? f[i] : ((double *)(void *)f)[i];
    safetensors_close(&file);
    return out;
}

static int *fixture_tokens(const char *name, size_t count) {
    double *x = fixture(name, count);
    int *out = keep(allocate(count, sizeof(int), "tokens"), 0);
    for (size_t i = 0; i < count; i++) out[i] = (int)x[i];
    return out;
}

static const GptConfig fixture_config = {2, 2, 16, 24, 67};
enum { FIXTURE_B = 3, FIXTURE_T = 21, FIXTURE_STEPS = 10 };

static void fixture_model(Model *m) {
    model_plan(m, fixture_config, FIXTURE_B, true);
    model_allocate(m, true);
    for (int i = 0; i < gpt_tensor_count(fixture_config); i++) {
        double *x = fixture(m->tensors[i].name, m->tensors[i].size);
        for (size_t j = 0; j < m->tensors[i].size; j++) m->state.weights[m->tensors[i].offset + j] = (float)x[j];
    }
}

// A value goes through some 40 sums and functions, each of which errs by a few U of the values' size: 100 U in all. For a
// gradient the size is its tensor's largest: the key biases' gradient, for one, is exactly 0, as softmax does not see what
// is added to all scores, and what is computed for it is rounding.
TEST(fixture_gradients) {
    Model m;
    int B = FIXTURE_B, T = FIXTURE_T, V = fixture_config.vocab, C = fixture_config.channels;
    size_t N = FIXTURE_B * FIXTURE_T;
    fixture_model(&m);
    int *tokens = fixture_tokens("input", N), *targets = fixture_tokens("target", N);
    float *logits = floats(N * V);
    double *want_logits = fixture("logits", N * V), want_loss = *fixture("loss", 1);
    for (int piece = B; piece >= 1; piece--) {  // the whole batch, and the same in pieces of 2 and 1, and of 1, 1 and 1
        double loss = whole_gradient(&m, tokens, targets, B, T, piece);
        check_number("loss", loss, want_loss, 10 * U * want_loss);
        for (int i = 0; i < gpt_tensor_count(fixture_config); i++) {
            char name[100];
            snprintf(name, sizeof name, "grad.%s", m.tensors[i].name);
            double *want = fixture(name, m.tensors[i].size);
            check_close(name, m.grads + m.tensors[i].offset, want, NULL, 100 * U * largest_size(want, m.tensors[i].size), m.tensors[i].size);
        }
    }
    model_forward(&m, tokens, B, T);
    matmul(logits, m.lnf, false, m.weight.wte, true, (int)N, V, C, false);
    check_close("logits", logits, want_logits, NULL, 100 * U * largest_size(want_logits, N * V), N * V);
    check_number("loss alone", model_loss(&m, targets, (int)N, 0, false) / (double)N, want_loss, 10 * U * want_loss);
    model_free(&m);
}

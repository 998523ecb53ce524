// Numerical test of train_gpt2.c: its functions against slow and obvious ones in double, and the whole of it against PyTorch's
// results in tests/tiny_gpt2.safetensors. Run from the folder of this file:
//
//   make test_gpt2 && ./test_gpt2        all tests; ./test_gpt2 attention: those with "attention" in their name
//   TEST_SEED=7 ./test_gpt2              with the same draws again (the seed of every run is printed)
//   TEST_VERBOSE=1 ./test_gpt2           with the time of each test, and its largest error as a part of the tolerance
//
// One line a test: "ok - NAME", "not ok - NAME: reason" or "skip - NAME: reason"; exit status 1 if any failed.
// Names are those of train_gpt2.c: B, T, C, L, NH, HS, V, N = B T; a `d` before a name is a gradient. Tolerances are multiples
// of U, by which one float operation errs, times the size of what was added up. What a function has to fill is NaN before, and
// has guards around it that must stay as they are.

#define GPT2_NO_MAIN
#include "train_gpt2.c"

#include <setjmp.h>
#include <sys/resource.h>
#include <time.h>

#ifndef _OPENMP
static void omp_set_num_threads(int threads) { (void)threads; }
#endif
#ifndef __has_feature  // clang has it
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
enum { GUARD = 0, LONG_T = 4096 };  // the sanitizer also sees reads beyond an array, if nothing of ours is there
#else
enum { GUARD = 32, LONG_T = 8192 };
#endif
static const double U = FLT_EPSILON / 2;

// ---------------------------------------------------------------------------
// The frame: TEST(name) { ... } declares a test, CHECK(condition, "why", ...) ends it if the condition does not hold

static struct { const char *name; void (*body)(void); } tests[40];
static int test_count;
static jmp_buf test_end;
static char reason[2048];
static double worst;  // the largest error so far, as a part of its tolerance

#define TEST(test)                                                                                                               \
    static void test_##test(void);                                                                                               \
    __attribute__((constructor)) static void add_##test(void) {                                                                  \
        tests[test_count].name = #test;                                                                                          \
        tests[test_count++].body = test_##test;                                                                                  \
    }                                                                                                                            \
    static void test_##test(void)
#define CHECK(condition, ...) do { if (!(condition)) test_ends(1, __LINE__, #condition, " " __VA_ARGS__); } while (0)

__attribute__((noreturn)) PRINTF_LIKE(4, 5) static void test_ends(int how, int line, const char *condition, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int length = snprintf(reason, sizeof reason, "line %d: %.500s", line, condition);
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

// Memory that lives until release(), or until the test ends.
static struct { void *base; size_t floats; } kept[2000];
static int kept_count;

static void *keep(void *base, size_t count) {
    if (kept_count == 2000) die("a test keeps more than 2000 arrays");
    kept[kept_count].base = base;
    kept[kept_count++].floats = count;
    return base;
}

static double *doubles(size_t count) { return keep(allocate(count, sizeof(double), "a test"), 0); }
static float *floats(size_t count) {  // NaN, with guards on both sides
    float *base = keep(malloc((count + 2 * GUARD + !count) * sizeof(float)), count);
    for (size_t i = 0; i < count + 2 * GUARD; i++) base[i] = i >= GUARD && i < count + GUARD ? NAN : 1234.5f;
    return base + GUARD;
}

static void release(bool check) {
    bool whole = true;
    for (; kept_count > 0; free(kept[--kept_count].base))
        for (size_t i = 0, n = kept[kept_count - 1].floats, end = n ? GUARD : 0; i < end; i++) {
            const float *base = kept[kept_count - 1].base;
            whole = whole && base[i] == 1234.5f && base[n + GUARD + i] == 1234.5f;
        }
    CHECK(!check || whole, "(something was written beyond an array)");
}

static float *floats_of(const float *x, size_t count) { return memcpy(floats(count), x, count * sizeof(float)); }
static double *doubles_of(const float *x, size_t count) {
    double *out = doubles(count);
    for (size_t i = 0; i < count; i++) out[i] = x[i];
    return out;
}
static int *draw_tokens(int count, int V) {
    int *tokens = keep(allocate((size_t)count, sizeof(int), "a test"), 0);
    for (int i = 0; i < count; i++) tokens[i] = draw_int(0, V - 1);
    return tokens;
}
static void fill(float *x, float value, size_t count) { for (size_t i = 0; i < count; i++) x[i] = value; }

// A float array, what should be in it, and the sizes that its errors are measured by. With a deviation it starts as random
// numbers: an input, or an output that is added to. Without, it is an output, NaN now.
typedef struct { float *x; double *want, *size; size_t count; } Array;

static Array array(size_t count, double deviation) {
    Array a = {floats(count), doubles(count), doubles(count), count};
    for (size_t i = 0; deviation > 0 && i < count; i++) {
        a.want[i] = a.x[i] = (float)(deviation * draw_normal());
        a.size[i] = fabs(a.want[i]);
    }
    return a;
}
static void plus(Array a, int i, double value) { a.want[i] += value, a.size[i] += fabs(value); }

static void check_number(const char *what, size_t i, double got, double want, double allowed) {
    if (!(fabs(got - want) <= allowed)) test_ends(1, 0, what, " [%zu] is %.12g, should be %.12g within %.3g", i, got, want, allowed);
    if (fabs(got - want) > worst * allowed) worst = fabs(got - want) / allowed;
}
static void check(const char *what, Array a, double tolerance) {
    for (size_t i = 0; i < a.count; i++) check_number(what, i, a.x[i], a.want[i], tolerance * a.size[i]);
}
static void check_tensor(const char *what, const float *x, const double *want, size_t count, double tolerance) {  // of its largest
    double max = 0;
    for (size_t i = 0; i < count; i++) max = fmax(max, fabs(want[i]));
    for (size_t i = 0; i < count; i++) check_number(what, i, x[i], want[i], tolerance * max);
}

// ---------------------------------------------------------------------------
// GPT-2 in double, as slow as it is plain

static double norm_of(const double *x, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

// c (M, N) += a b, and size, if wanted, the products' magnitudes.
static void ref_matmul(double *c, double *size, const double *a, bool a_transposed, const double *b, bool b_transposed, int M, int N, int K) {
#pragma omp parallel for
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            for (int k = 0; k < K; k++) {
                double product = a[a_transposed ? k * M + i : i * K + k] * b[b_transposed ? j * K + k : k * N + j];
                c[i * N + j] += product;
                if (size) size[i * N + j] += fabs(product);
            }
}

static void ref_layernorm(double *out, double *mean, double *rstd, const double *x, const double *weight, const double *bias, int N, int C) {
    for (int n = 0; n < N; n++, x += C, out += C) {
        double m = 0, variance = 0;
        for (int c = 0; c < C; c++) m += x[c] / C;
        for (int c = 0; c < C; c++) variance += (x[c] - m) * (x[c] - m) / C;
        for (int c = 0; c < C; c++) out[c] = (x[c] - m) / sqrt(variance + 1e-5) * weight[c] + bias[c];
        if (mean) mean[n] = m, rstd[n] = 1 / sqrt(variance + 1e-5);
    }
}

static double ref_gelu(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

// Attention row by row, with a row's whole softmax at once; where dout is given also dqkv and all sizes, in units of U. A score
// errs by |q| |k| / sqrt(HS), and by a random walk of HS roundings of itself; its probability errs by that in relation to
// itself. R adds the exponential's own error, that of the log-sum-exp and that of sums of up to T numbers. In
// ds = p (dp - delta), dp errs by |do| |v|, and delta = do . o by |do| times o's error, even if they cancel.
static void ref_attention(Array out, Array lse, Array dqkv, const double *qkv, const double *dout, int B, int T, int NH, int HS) {
    int C = NH * HS, stride = 3 * C;
    double scale = 1 / sqrt(HS);
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++) {
            double *p = allocate((size_t)T, sizeof *p, "a row"), k_max = 0, v_max = 0;
            for (int t = 0, at = b * T * stride + h * HS; t < T; t++) {
                int row = (b * T + t) * C + h * HS, head = (b * NH + h) * T + t;
                const double *q = qkv + at + t * stride, *k = qkv + at + C, *v = k + C, *d_o = dout + row;
                double *o = out.want + row, max = -INFINITY, s_max = 0, sum = 0, delta = 0;
                for (int j = 0; j <= t; j++) {
                    double s = 0;
                    for (int d = 0; d < HS; d++) s += q[d] * k[j * stride + d];
                    p[j] = s * scale;
                    max = fmax(max, p[j]), s_max = fmax(s_max, fabs(p[j]));
                }
                for (int j = 0; j <= t; j++) sum += exp(p[j] - max);
                for (int d = 0; d < HS; d++) o[d] = 0;
                for (int j = 0; j <= t; j++) {
                    p[j] = exp(p[j] - max) / sum;
                    for (int d = 0; d < HS; d++) o[d] += p[j] * v[j * stride + d];
                }
                if (!dout) continue;

                k_max = fmax(k_max, norm_of(k + t * stride, HS)), v_max = fmax(v_max, norm_of(v + t * stride, HS));
                double R = norm_of(q, HS) * k_max * scale + sqrt(HS) * s_max + sqrt(T) + 8;
                lse.want[head] = max + log(sum), lse.size[head] = R;
                for (int d = 0; d < HS; d++) {
                    double squares = 0;
                    for (int j = 0; j <= t; j++) squares += p[j] * p[j] * v[j * stride + d] * v[j * stride + d];
                    out.size[row + d] = R * (sqrt(squares) + fabs(o[d]));
                    delta += d_o[d] * o[d];
                }
                double dp_error = norm_of(d_o, HS) * (v_max + norm_of(out.size + row, HS));
                for (int j = 0; j <= t; j++) {
                    double dp = 0;
                    for (int d = 0; d < HS; d++) dp += d_o[d] * v[j * stride + d];
                    double ds = p[j] * (dp - delta) * scale, ds_size = p[j] * (R * fabs(dp - delta) + dp_error) * scale;
                    for (int d = 0, dq = at + t * stride, dk = at + C + j * stride; d < HS; d++, dq++, dk++) {
                        dqkv.want[dq] += ds * k[j * stride + d], dqkv.size[dq] += ds_size * fabs(k[j * stride + d]);
                        dqkv.want[dk] += ds * q[d], dqkv.size[dk] += ds_size * fabs(q[d]);
                        dqkv.want[dk + C] += p[j] * d_o[d], dqkv.size[dk + C] += R * p[j] * fabs(d_o[d]);
                    }
                }
            }
            free(p);
        }
}

static void ref_linear(double *out, const double *x, const double *weight, const double *bias, int N, int C, int OC) {
    for (int i = 0; i < N * OC; i++) out[i] = bias[i % OC];
    ref_matmul(out, NULL, x, false, weight, false, N, OC, C);
}

// The mean loss of tokens (B, T) under weights w, which lie as the model's do; and, if wanted, logits (B, T, V) += the logits.
static double ref_model(const Model *m, const double *w, const int *tokens, const int *targets, int B, int T, double *logits) {
    int C = m->config.channels, V = m->config.vocab, NH = m->config.heads, N = B * T, L = m->config.layers;
    double *x = allocate((size_t)(N * (6 * C + V)), sizeof *x, "a model in double"), *y = x + N * C, *z = y + N * C, loss = 0;
    const double *tensor[100] = {0}, **layer = tensor + 2, **last = layer + L * TENSORS_PER_LAYER;
    Array none = {0}, attention = {.want = y};
    if (!logits) logits = z + 4 * N * C;
    for (int i = 0; i < gpt_tensor_count(m->config); i++) tensor[i] = w + m->tensors[i].offset;
    for (int i = 0; i < N * C; i++) x[i] = tensor[0][tokens[i / C] * C + i % C] + tensor[1][i / C % T * C + i % C];
    for (; layer < last; layer += TENSORS_PER_LAYER) {
        ref_layernorm(y, NULL, NULL, x, layer[LN1_W], layer[LN1_B], N, C);
        ref_linear(z, y, layer[QKV_W], layer[QKV_B], N, C, 3 * C);
        ref_attention(attention, none, none, z, NULL, B, T, NH, C / NH);
        ref_linear(z, y, layer[PROJ_W], layer[PROJ_B], N, C, C);
        for (int i = 0; i < N * C; i++) x[i] += z[i];
        ref_layernorm(y, NULL, NULL, x, layer[LN2_W], layer[LN2_B], N, C);
        ref_linear(z, y, layer[FC_W], layer[FC_B], N, C, 4 * C);
        for (int i = 0; i < N * 4 * C; i++) z[i] = ref_gelu(z[i]);
        ref_linear(y, z, layer[FCPROJ_W], layer[FCPROJ_B], N, 4 * C, C);
        for (int i = 0; i < N * C; i++) x[i] += y[i];
    }
    ref_layernorm(y, NULL, NULL, x, last[0], last[1], N, C);
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
// Memory (first, because the peak of memory in use is that of the whole process)

TEST(memory_linear_in_T) {
    for (int training = 0; training < 2; training++)
        for (int T = 256; T <= 8192; T *= 2) {  // from T to 2 T; rounding to cache lines is below a byte a token
            Model model[3];
            double bytes[3];
            for (int i = 0; i < 3; i++) bytes[i] = (double)model_plan(&model[i], (GptConfig){3, 4, 64, i == 2 ? 2 * T : 128 << i, 257}, 1, training);
            for (int i = 0; i < 3; i++) model_free(&model[i]);
            for (int i = 0; T > 128 && i < 1; i++) bytes[1] = bytes[1] - bytes[0];
            (void)bytes;
        }
}

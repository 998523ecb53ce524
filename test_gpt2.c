// Numerical test of train_gpt2.c: its functions against slow and obvious ones in double, and the whole of it against PyTorch's
// results in tests/tiny_gpt2.safetensors. Run from the folder of this file:
//
//   make build/cc/test_gpt2 && build/cc/test_gpt2     all tests
//   build/cc/test_gpt2 attention                      those with "attention" in their name
//   TEST_SEED=7 build/cc/test_gpt2                    with the same draws again (the seed of every run is printed)
//   TEST_VERBOSE=1 build/cc/test_gpt2                 with times, and each test's largest error as a part of its tolerance
//
// Names are those of train_gpt2.c: B, T, C, L, NH, HS, V, N = B T; a `d` before a name is a gradient. Tolerances are multiples
// of U, by which one float operation errs, times the size of what was added up. What a function has to fill is NaN before, and
// has guards around it that must stay as they are.

#define GPT2_NO_MAIN
#include "train_gpt2.c"

#include <sys/resource.h>

#include "tests/frame.h"

#ifndef _OPENMP
static void omp_set_num_threads(int threads) { (void)threads; }
#endif
#ifdef __SANITIZE_ADDRESS__
enum { GUARD = 0 };  // the sanitizer also sees reads beyond an array, if nothing of ours is there
#else
enum { GUARD = 32 };
#endif
static const double U = FLT_EPSILON / 2;

// ---------------------------------------------------------------------------
// Arrays and draws

static int kept_count;
static struct { void *base; size_t floats; } kept[2000];
static double worst, started;  // the largest error so far, as a part of its tolerance; when the test began
static int threads;            // that the machine has

static int draw_int(int least, int most) { return least + (int)(draw() % (uint64_t)(most - least + 1)); }
static double draw_normal(void) { double radius = sqrt(-2 * log(draw_unit())); return radius * cos(2 * M_PI * draw_unit()); }

static void *keep(void *base, size_t floats) {  // until release(), at the latest at the end of the test
    if (kept_count == 2000) die("a test keeps more than 2000 arrays");
    kept[kept_count].floats = floats;
    return kept[kept_count++].base = base;
}
static double *doubles(size_t count) { return keep(allocate(count, sizeof(double), "a test"), 0); }
static float *floats(size_t count) {  // NaN, with guards on both sides
    float *base = keep(malloc((count + 2 * GUARD + !count) * sizeof(float)), count);
    for (size_t i = 0; i < count + 2 * GUARD; i++) base[i] = 1234.5f;
    for (size_t i = 0; i < count; i++) base[GUARD + i] = NAN;
    return base + GUARD;
}
static void release(void) {
    for (; kept_count > 0; free(kept[--kept_count].base))
        for (size_t i = 0, n = kept[kept_count - 1].floats, end = n ? GUARD : 0; i < end; i++) {
            const float *base = kept[kept_count - 1].base;
            CHECK(base[i] == 1234.5f && base[n + GUARD + i] == 1234.5f, "(something was written beyond an array)");
        }
}
static float *floats_of(const float *x, size_t count) {
    float *out = floats(count);
    for (size_t i = 0; i < count; i++) out[i] = x[i];
    return out;
}
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
static void fill(float *x, float value, int count) { for (int i = 0; i < count; i++) x[i] = value; }

// A float array, what should be in it, and the sizes that its errors are measured by. With a deviation it starts as random
// numbers: an input, or an output that is added to. Without, it is an output, NaN now.
typedef struct { float *x; double *want, *size; int count; } Array;

static Array array(int count, double deviation) {
    Array a = {floats((size_t)count), doubles((size_t)count), doubles((size_t)count), count};
    for (int i = 0; deviation > 0 && i < count; i++) a.size[i] = fabs(a.want[i] = a.x[i] = (float)(deviation * draw_normal()));
    return a;
}
static void plus(Array a, int i, double value) { a.want[i] += value, a.size[i] += fabs(value); }

static void check_number(const char *what, size_t i, double got, double want, double allowed) {
    if (!(fabs(got - want) <= allowed)) check_failed(__FILE__, __LINE__, what, "[%zu] is %.12g, should be %.12g within %.3g", i, got, want, allowed);
    if (fabs(got - want) > worst * allowed) worst = fabs(got - want) / allowed;
}
static void check(const char *what, Array a, double tolerance) {  // exp_fast has e^-87 for all that is smaller: 1e-30 at most, in sums
    for (int i = 0; i < a.count; i++) check_number(what, (size_t)i, a.x[i], a.want[i], tolerance * a.size[i] + 1e-30);
}
static void check_tensors(const Model *m, const float *x, const double *want, double tolerance) {  // of a tensor's largest element
    for (int t = 0; t < gpt_tensor_count(m->config); t++) {
        size_t first = m->tensors[t].offset, end = first + m->tensors[t].size;
        double max = 0;
        for (size_t i = first; i < end; i++) max = fmax(max, fabs(want[i]));
        for (size_t i = first; i < end; i++) check_number(m->tensors[t].name, i - first, x[i], want[i], tolerance * max);
    }
}

// ---------------------------------------------------------------------------
// GPT-2 in double, as slow as it is plain

static double norm_of(const double *x, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

// c (M, N) += a b, and size, if wanted, += the products' magnitudes.
static void ref_matmul(double *c, double *size, const double *a, bool a_transposed, const double *b, bool b_transposed, int M, int N, int K) {
#pragma omp parallel for if ((double)M * N * K > 1e6)
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0, magnitude = 0;
            for (int k = 0; k < K; k++) {
                double product = a[a_transposed ? k * M + i : i * K + k] * b[b_transposed ? j * K + k : k * N + j];
                sum += product, magnitude += fabs(product);
            }
            c[i * N + j] += sum;
            if (size) size[i * N + j] += magnitude;
        }
}

static void ref_linear(double *out, const double *x, const double *weight, const double *bias, int N, int C, int OC) {
    for (int i = 0; i < N * OC; i++) out[i] = bias[i % OC];
    ref_matmul(out, NULL, x, false, weight, false, N, OC, C);
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
#pragma omp parallel for collapse(2) if ((double)T * T * HS > 1e6)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++) {
            double *p = allocate((size_t)T, sizeof *p, "a row"), k_max = 0, v_max = 0;
            for (int t = 0, at = b * T * stride + h * HS; t < T; t++) {
                int row = (b * T + t) * C + h * HS, head = (b * NH + h) * T + t;
                const double *q = qkv + at + t * stride, *k = qkv + at + C, *v = k + C, *d_o = dout ? dout + row : NULL;
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
    fill(m->grads, NAN, (int)m->parameters);
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

static double planned_bytes(GptConfig config, bool training, int head_rows) {
    Model m;
    size_t bytes = model_plan(&m, config, 1, training);
    CHECK(m.head_rows == head_rows, "(%d rows of logits at once)", m.head_rows);  // at most 2^24 logits, but at least a row
    model_free(&m);
    return (double)bytes;
}

TEST(memory_linear_in_T) {
    planned_bytes((GptConfig){1, 1, 1, 64, 1 << 19}, true, 32), planned_bytes((GptConfig){1, 1, 1, 2, (1 << 24) + 1}, true, 1);
    for (int i = 0; i < 14; i++) {  // from T to 2 T; arrays begin on cache lines, which rounds by a byte a token at most
        int T = 256 << i / 2;
        double bytes = planned_bytes((GptConfig){3, 4, 64, 2 * T, 257}, i % 2, 2 * T) - planned_bytes((GptConfig){3, 4, 64, T, 257}, i % 2, T);
        static double first[2];
        if (i < 2) first[i] = bytes / T;
        check_number("bytes a token", (size_t)T, bytes / T, first[i % 2], 2);
    }
    // One head at T = 8192, whose scores would be 256 MiB. All values are 1: so must be all outputs, the gradients of q and k
    // are 0, and those of v share out dout.
    struct rusage before, after;
    enum { T = 8192, HS = 64, COUNT = T * HS };
    getrusage(RUSAGE_SELF, &before);
    float *qkv = floats(3 * COUNT), *out = floats(COUNT), *lse = floats(T), *dout = floats(COUNT), *dqkv = floats(3 * COUNT);
    for (int i = 0; i < 3 * COUNT; i++) qkv[i] = i / HS % 3 == 2 ? 1 : (float)draw_normal();
    for (int i = 0; i < COUNT; i++) dout[i] = (float)draw_normal();
    attention_forward(out, lse, qkv, 1, T, 1, HS);
    attention_backward(dqkv, dout, qkv, out, lse, 1, T, 1, HS);
    getrusage(RUSAGE_SELF, &after);
    long grown = after.ru_maxrss - before.ru_maxrss, arrays = (9 * COUNT + T) * (long)sizeof(float) / 1024;  // KiB
    CHECK(grown < arrays * 5 / 4 + 16384, "(%ld KiB)", grown);
    for (int d = 0; d < HS; d++) {
        double given = 0, shared = 0;
        for (int t = 0; t < T; t++) {
            check_number("out", (size_t)t, out[t * HS + d], 1, 4 * sqrt(T) * U);
            check_number("dq", (size_t)t, dqkv[t * 3 * HS + d], 0, 1e-3), check_number("dk", (size_t)t, dqkv[(t * 3 + 1) * HS + d], 0, 1e-3);
            given += dout[t * HS + d], shared += dqkv[(t * 3 + 2) * HS + d];
        }
        check_number("sum of dv", (size_t)d, shared, given, 1e-3 * sqrt(T));
    }
}

// ---------------------------------------------------------------------------
// Matrix products and layers

// Whatever the order, fused or not, a sum of K products errs by at most K U / (1 - K U) of the sum of their magnitudes (Higham,
// "Accuracy and Stability of Numerical Algorithms", section 3.1).
static void check_matmul(int M, int N, int K, int kind) {
    bool a_transposed = kind & 1, b_transposed = kind & 2, add = kind & 4;
    Array a = array(M * K, 1), b = array(K * N, 1), c = array(M * N, add ? 3 : 0);
    char what[100];
    snprintf(what, sizeof what, "matmul M %d N %d K %d a%s b%s%s", M, N, K, a_transposed ? "^T" : "", b_transposed ? "^T" : "", add ? " added" : "");
    ref_matmul(c.want, c.size, a.want, a_transposed, b.want, b_transposed, M, N, K);
    matmul(c.x, a.x, a_transposed, b.x, b_transposed, M, N, K, add);
    check(what, c, (K + 2) * U);
    release();
}

TEST(matmul) {
    static const int large[5][3] = {{500, 37, 20}, {5, 4200, 11}, {13, 40, 777}, {1, 300, 257}, {290, 1, 513}};  // beyond cache blocks
    const int edges[] = {1, 2, MR - 1, MR, MR + 1, VECTOR - 1, NR - 1, NR, NR + 1, 2 * MR, 2 * NR + 3, 61, 97, 128};
    int size[3];
    omp_set_num_threads(1);  // so that one thread has all of the blocks
    for (int i = 0; i < 40; i++) check_matmul(large[i / 8][0], large[i / 8][1], large[i / 8][2], i % 8);
    check_matmul(210, 2100, 300, draw_int(0, 7));
    for (int i = 0; i < 480; i++) {
        omp_set_num_threads(draw_int(1, 3));
        for (int j = 0; j < 3; j++) size[j] = draw_int(0, 2) ? edges[draw_int(0, 13)] : draw_int(1, 150);
        check_matmul(size[0], size[1], size[2], i % 8);
    }
}

TEST(exp_fast) {
    static const float beyond[] = {-87.01f, -88, -103, -1000, -1e30f, -INFINITY, 88.01f, 89, 1000, 1e30f, INFINITY};
    for (int i = 0; i < 2000000; i++) {  // anywhere, near 0, and where the power of 2 changes, which is the hardest
        double half = (draw_int(-125, 126) + 0.5) * M_LN2 + 1e-5 * draw_normal();
        float x = (float)(i % 4 ? -87 + 175 * draw_unit() : i % 100 ? half : pow(2, -60 * draw_unit()));
        double want = exp(x);
        check_number("exp_fast", (size_t)i, exp_fast(x), want, 2 * ldexp(1, ilogb(want) - 23));  // 2 units in the last place
    }
    for (int i = 0; i < 11; i++) CHECK(exp_fast(beyond[i]) == exp_fast(beyond[i] < 0 ? -87 : 88), "(at %g)", beyond[i]);
    CHECK(exp_fast(0) == 1 && isnan(exp_fast(NAN)));
}

TEST(largest) {
    for (int i = 0; i < 1000; i++) {
        Array x = array(draw_int(1, 100), 10);
        float start = i % 2 ? -FLT_MAX : (float)(15 * draw_normal()), want = start;
        for (int j = 0; j < x.count; j++) want = fmaxf(want, x.x[j]);
        CHECK(largest(x.x, x.count, start) == want && largest(x.x, 0, start) == start, "(n %d)", x.count);
        release();
    }
}

// gelu errs by a few U of x; its slope, whose term x/2 (1 - t^2) du stands beside others, by a few U of 1 and of x du. Where |x|
// is above 8 tanh is exactly 1 or -1, and so nothing errs any more.
TEST(gelu) {
    static const float special[] = {0, -0.0f, 1e-30f, -1e-30f, 5, -5, 9, -9, 20, -20, 1000, -1000, 1e6f, -1e6f, 1e15f, -1e15f};
    enum { COUNT = 40003 };
    Array x = array(COUNT, 3), out = array(COUNT, 0), dout = array(COUNT, 1), dx = array(COUNT, 0);
    memcpy(x.x, special, sizeof special);
    for (int i = 0; i < COUNT; i++) {
        double z = x.x[i], near = fmin(fabs(z), 8), k = sqrt(2 / M_PI), t = tanh(k * (z + 0.044715 * z * z * z));
        out.want[i] = ref_gelu(z), out.size[i] = fabs(z);
        dx.want[i] = dout.x[i] * (0.5 * (1 + t) + (fabs(z) > 20 ? 0 : 0.5 * z * (1 - t * t) * k * (1 + 3 * 0.044715 * z * z)));
        dx.size[i] = fabs(dout.x[i]) * (1 + near * k * (1 + 3 * 0.044715 * near * near));
    }
    gelu_forward(out.x, x.x, COUNT);
    gelu_backward(dx.x, dout.x, x.x, COUNT);
    gelu_backward(dout.x, dout.x, x.x, COUNT);
    check("gelu", out, 6 * U), check("gelu's slope", dx, 6 * U);
    CHECK(!memcmp(dx.x, dout.x, COUNT * sizeof(float)), "(in place)");
}

TEST(embedding) {
    for (int i = 0; i < 60; i++) {
        int B = draw_int(1, 4), T = draw_int(1, 40), C = draw_int(1, 150), V = draw_int(1, 30), longest = T + draw_int(0, 5), add = i % 2;
        int NC = B * T * C, *tokens = draw_tokens(B * T, V);
        Array wte = array(V * C, 1), wpe = array(longest * C, 1), out = array(NC, 0);
        Array dout = array(NC, 1), dwte = array(V * C, 1), dwpe = array(longest * C, add);
        embedding_forward(out.x, tokens, wte.x, wpe.x, B, T, C);
        embedding_backward(dwte.x, dwpe.x, dout.x, tokens, B, T, C, longest, add);
        for (int j = 0; j < NC; j++) {
            int token = tokens[j / C] * C + j % C, position = j / C % T * C + j % C;
            CHECK(out.x[j] == wte.x[token] + wpe.x[position]);
            plus(dwte, token, dout.x[j]), plus(dwpe, position, dout.x[j]);
        }
        check("dwte", dwte, (B * T + 1) * U), check("dwpe", dwpe, (B + 1) * U);
        release();
    }
}

// A mean is off by some U times the largest x, and (x - mean) rstd by that times rstd. In a constant row all roundings of the sum
// may go the same way, and there are C of them; else their signs vary. A variance grows by the square of the mean's error, and
// is itself a sum of C squares. The backward is given the mean and rstd that the forward found, and so is the reference.
TEST(layernorm) {
    for (int i = 0; i < 80; i++) {
        int N = draw_int(1, 40), C = i < 4 ? i + 1 : draw_int(1, 700), NC = N * C, add = i % 2, add_dx = i / 2 % 2;
        double deviation = pow(10, draw_int(-3, 2));
        Array x = array(NC, deviation), w = array(C, 1), bias = array(C, 1), out = array(NC, 0), mean = array(N, 0), rstd = array(N, 0);
        for (int n = 0; n < N; n++) {
            int kind = draw_int(0, 3);  // as it is, about a large mean, constant, zero
            double shift = kind == 1 ? 300 * deviation * draw_normal() : kind == 2 ? 10 * draw_normal() : 0, most = 0;
            for (int j = n * C; j < (n + 1) * C; j++)
                most = fmax(most, fabs(x.want[j] = x.x[j] = (float)((kind < 2 ? x.x[j] : 0) + shift)));
            mean.size[n] = (kind < 2 ? 8 + 2 * sqrt(C) : C + 8) * U * most;
        }
        ref_layernorm(out.want, mean.want, rstd.want, x.want, w.want, bias.want, N, C);
        for (int j = 0, n = 0; j < NC; j++, n = j / C) {
            double off = mean.size[n] * rstd.want[n], relative = off * off + 4 * U * sqrt(C) * off + (8 + sqrt(C)) * U;
            rstd.size[n] = rstd.want[n] * relative;
            out.size[j] = w.size[j % C] * (off + fabs(x.want[j] - mean.want[n]) * rstd.want[n] * (relative + 4 * U)) + bias.size[j % C] * 2 * U;
        }
        layernorm_forward(out.x, mean.x, rstd.x, x.x, w.x, bias.x, N, C);
        check("layernorm's mean", mean, 1), check("layernorm's rstd", rstd, 1), check("layernorm", out, 1);

        Array dout = array(NC, 1), dx = array(NC, add_dx), dw = array(C, add), dbias = array(C, add);
        layernorm_backward(dx.x, add_dx, dw.x, dbias.x, dout.x, x.x, w.x, mean.x, rstd.x, N, C, add);
        for (int n = 0; n < N; n++) {
            double sum = 0, sum_x = 0, size = 0, size_x = 0, r = rstd.x[n];
            for (int c = 0, j = n * C; c < C; c++, j++) {
                double xhat = (x.want[j] - mean.x[n]) * r, g = dout.want[j] * w.want[c];
                sum += g / C, sum_x += g * xhat / C, size += fabs(g) / C, size_x += fabs(g * xhat) / C;
                plus(dw, c, dout.want[j] * xhat), plus(dbias, c, dout.want[j]);
            }
            for (int c = 0, j = n * C; c < C; c++, j++) {
                double xhat = (x.want[j] - mean.x[n]) * r, g = dout.want[j] * w.want[c];
                dx.want[j] += r * (g - sum - xhat * sum_x), dx.size[j] += r * (fabs(g) + size + fabs(xhat) * size_x);
            }
        }
        check("layernorm dx", dx, (8 + sqrt(C)) * U), check("layernorm dweight", dw, (N + 4) * U), check("layernorm dbias", dbias, (N + 4) * U);
        release();
    }
}

TEST(linear) {
    for (int i = 0; i < 40; i++) {
        int N = draw_int(1, 150), C = draw_int(1, 150), OC = draw_int(1, 200), add = i % 2, residual = i / 2 % 2;
        Array x = array(N * C, 1), w = array(C * OC, 1), bias = array(OC, 1), res = array(N * OC, residual), out = array(N * OC, 0);
        Array dout = array(N * OC, 1), dx = array(N * C, 0), dw = array(C * OC, add), dbias = array(OC, add);
        linear_forward(out.x, x.x, w.x, bias.x, residual ? res.x : NULL, N, C, OC);
        linear_backward(dx.x, dw.x, dbias.x, dout.x, x.x, w.x, N, C, OC, add);
        ref_matmul(out.want, out.size, x.want, false, w.want, false, N, OC, C);
        ref_matmul(dx.want, dx.size, dout.want, false, w.want, true, N, C, OC);
        ref_matmul(dw.want, dw.size, x.want, true, dout.want, false, C, OC, N);
        for (int j = 0; j < N * OC; j++) plus(out, j, bias.want[j % OC]), plus(out, j, res.want[j]), plus(dbias, j % OC, dout.want[j]);
        check("linear", out, (C + 3) * U), check("linear dx", dx, (OC + 2) * U);
        check("linear dweight", dw, (N + 2) * U), check("linear dbias", dbias, (N + 2) * U);
        release();
    }
}

// The sum of the exponentials errs by V roundings at most, and as it grows they tend to go the same way: what is small beside it is
// lost each time. The largest logit and the target's are rounded where they are subtracted, and p errs by that in relation to itself.
TEST(crossentropy) {
    for (int i = 0; i < 60; i++) {
        int N = draw_int(1, 20), V = i < 3 ? i + 1 : draw_int(1, i % 10 ? 400 : 5000), *targets = draw_tokens(N, V);
        float shift = i % 3 ? 0 : (float)(1e4 * draw_normal()), dscale = (float)pow(10, -3 * draw_unit());
        Array logits = array(N * V, i % 4 == 0 ? 1e4 : i % 4 == 1 ? 30 : i % 4 == 2 ? 3 : 1e-3), loss = array(N, 0), again = loss;
        for (int j = 0; j < N * V; j++) logits.x[j] += shift;
        float *before = floats_of(logits.x, (size_t)(N * V));
        again.x = floats((size_t)N);
        for (int n = 0; n < N; n++) {
            const float *row = before + n * V;
            double max = -INFINITY, sum = 0;
            for (int v = 0; v < V; v++) max = fmax(max, row[v]);
            for (int v = 0; v < V; v++) sum += exp(row[v] - max);
            loss.want[n] = log(sum) + max - row[targets[n]];
            loss.size[n] = 8 + V / 2.0 + 2 * fabs(max) + loss.want[n];
            for (int v = 0; v < V; v++) {
                double p = exp(row[v] - max) / sum, target = v == targets[n];
                logits.want[n * V + v] = (p - target) * dscale;
                logits.size[n * V + v] = (p * (12 + V / 2.0 + max - row[v]) + 2 * target) * dscale;
            }
        }
        crossentropy(loss.x, logits.x, targets, N, V, 0);
        CHECK(!memcmp(logits.x, before, (size_t)(N * V) * sizeof(float)), "(the loss alone leaves the logits)");
        crossentropy(again.x, logits.x, targets, N, V, dscale);
        check("loss", loss, 2 * U), check("loss with gradient", again, 2 * U), check("dlogits", logits, 2 * U);
        release();
    }
}

// ---------------------------------------------------------------------------
// Attention

static void check_attention(int B, int T, int NH, int HS, int kind) {
    static const double magnitudes[] = {1e-4, 1, 4, 1};  // at 4 the scores have a deviation of 16 and reach 50
    int N = B * T, C = NH * HS;
    Array qkv = array(N * 3 * C, magnitudes[kind]), out = array(N * C, 0), lse = array(N * NH, 0);
    Array dout = array(N * C, 1), dqkv = array(N * 3 * C, 0);
    double rise = draw_int(0, 1) ? 60 : -60;  // kind 3: scores that rise, or fall, by 60 from the first key to the last
    for (int i = 0; kind == 3 && i < N * NH; i++) {
        int n = i / NH, at = n * 3 * C + i % NH * HS;
        qkv.want[at] = qkv.x[at] = sqrtf((float)HS);
        qkv.want[at + C] = qkv.x[at + C] = (float)(rise * (n % T) / T);
    }
    attention_forward(out.x, lse.x, qkv.x, B, T, NH, HS);
    attention_backward(dqkv.x, dout.x, qkv.x, out.x, lse.x, B, T, NH, HS);
    ref_attention(out, lse, dqkv, qkv.want, dout.want, B, T, NH, HS);
    char what[3][100], *names[] = {"out", "lse", "dqkv"};
    for (int i = 0; i < 3; i++) snprintf(what[i], 100, "attention B %d T %d NH %d HS %d kind %d: %s", B, T, NH, HS, kind, names[i]);
    check(what[0], out, 4 * U), check(what[1], lse, 4 * U), check(what[2], dqkv, 4 * U);

    // What comes later changes no bit of what was before.
    int first = draw_int(1, T);
    Array later = array(N * C, 0), later_lse = array(N * NH, 0);
    for (int i = 0; i < N * 3 * C; i++) if (i / (3 * C) % T >= first) qkv.x[i] = (float)(20 * draw_normal());
    attention_forward(later.x, later_lse.x, qkv.x, B, T, NH, HS);
    for (int i = 0; i < N * C; i++) CHECK(i / C % T >= first || out.x[i] == later.x[i]);
    for (int i = 0; i < N * NH; i++) CHECK(i % T >= first || lse.x[i] == later_lse.x[i]);
    release();
}

TEST(attention) {
    static const int lengths[] = {1, 7, 63, 64, 65, 127, 128, 129, 200}, sizes[] = {1, 8, 24, 32, 64, 80, 128};
    for (int i = 0; i < 9 * 7 * 4; i++)
        check_attention(draw_int(1, i < 140 ? 3 : 2), lengths[i / 28], draw_int(1, i < 140 ? 3 : 2), sizes[i / 4 % 7], i % 4);
    for (int kind = 0; kind < 4; kind++) check_attention(1, 1000, 1, sizes[draw_int(0, 6)], kind);
}

// ---------------------------------------------------------------------------
// The model

static double *fixture(const char *name, size_t count) {  // numbers of any type, as double
    SafeTensors file;
    CHECK(safetensors_open(&file, "tests/tiny_gpt2.safetensors"), "%s", error_text);
    const SafeTensor *t = safetensors_find(&file, name);
    CHECK(t && t->bytes == count * safetensors_dtype_size(t->dtype), "(%s is missing or has another size)", name);
    double *out = doubles(count), *data = doubles(count);
    CHECK(safetensors_read(&file, t, data), "%s", error_text);
    for (size_t i = 0; i < count; i++) out[i] = t->dtype[0] == 'I' ? ((int32_t *)data)[i] : t->dtype[1] == '6' ? data[i] : ((float *)data)[i];
    safetensors_close(&file);
    return out;
}

static int *fixture_tokens(const char *name, int count) {
    double *x = fixture(name, (size_t)count);
    int *tokens = draw_tokens(count, 1);
    for (int i = 0; i < count; i++) tokens[i] = (int)x[i];
    return tokens;
}

static double *fixture_tensors(const Model *m, const char *prefix) {
    double *all = doubles(m->parameters);
    for (int t = 0; t < gpt_tensor_count(m->config); t++) {
        char name[100];
        snprintf(name, sizeof name, "%s%s", prefix, m->tensors[t].name);
        memcpy(all + m->tensors[t].offset, fixture(name, m->tensors[t].size), m->tensors[t].size * sizeof(double));
    }
    return all;
}

// The fixture's sizes. A value goes through some 40 sums and functions, each of which errs by about U of the values' size. For a
// gradient the size is its tensor's largest: that of the key biases, for one, is exactly 0, as softmax does not see what is
// added to all scores, and what is computed for it is rounding. AdamW divides a gradient by its own size, so where it is near
// 0 its rounding error becomes a step of some visible part of the learning rate, 0.01: each final weight is held to 1/100 of one
// step. That is rare: their mean error to a 10000th.
TEST(fixture) {
    enum { B = 3, T = 21, C = 16, V = 67, N = B * T, STEPS = 10 };
    Model m;
    Options o;
    options_defaults(&o);
    random_model(&m, (GptConfig){2, 2, C, 24, V}, B, true);
    double *w = fixture_tensors(&m, ""), *grads = fixture_tensors(&m, "grad."), *logits = fixture("logits", N * V);
    double want = *fixture("loss", 1), max = 0;
    for (size_t i = 0; i < m.parameters; i++) m.state.weights[i] = (float)w[i];
    int *tokens = fixture_tokens("input", N), *targets = fixture_tokens("target", N);
    for (int i = 0; i < 12; i++) {  // the whole batch, and accumulated in pieces of 2 and 1 sequences, and of 1; the head in chunks of rows
        m.head_rows = i < 4 ? N : i == 4 ? 1 : i == 5 ? N - 1 : draw_int(1, N);
        check_number("loss", (size_t)i, whole_gradient(&m, tokens, targets, B, T, 3 - i % 3), want, 10 * U * want);
        check_tensors(&m, m.grads, grads, 40 * U);
        model_forward(&m, tokens, B, T);
        check_number("loss alone", (size_t)i, model_loss(&m, targets, N, 0, false) / N, want, 10 * U * want);
    }
    float *found = floats(N * V);
    matmul(found, m.lnf, false, m.weight.wte, true, N, V, C, false);
    for (int i = 0; i < N * V; i++) max = fmax(max, fabs(logits[i]));
    for (int i = 0; i < N * V; i++) check_number("logits", (size_t)i, found[i], logits[i], 40 * U * max);

    double *losses = fixture("train.losses", STEPS), *norms = fixture("train.norms", STEPS), max_norm = *fixture("train.max_norm", 1);
    tokens = fixture_tokens("train.input", N * STEPS), targets = fixture_tokens("train.target", N * STEPS);
    for (int step = 0; step < STEPS; step++) {
        double loss = whole_gradient(&m, tokens + step * N, targets + step * N, B, T, B), norm = gradient_norm(&m);
        check_number("loss", (size_t)step, loss, losses[step], 40 * U * losses[step]);
        check_number("norm", (size_t)step, norm, norms[step], 100 * U * norms[step]);
        adamw(&m, &o, 0.01, step + 1, norm > max_norm ? max_norm / norm : 1);
    }
    for (int i = 0; i < 2; i++) {
        size_t count = i ? C * 3 * C : V * C;
        double *final = fixture(i ? "train.final.qkv" : "train.final.wte", count), error = 0;
        const float *weights = i ? m.weight.layers[1].qkv_w : m.weight.wte;
        for (size_t j = 0; j < count; j++) check_number("final weights", j, weights[j], final[j], 1e-4), error += fabs(weights[j] - final[j]);
        check_number("mean error of final weights", 0, error / (double)count, 0, 1e-6);
    }
    model_free(&m);
}

// The whole model's gradient against differences of the loss in double, along random directions d of each tensor. d has length 1,
// and grad . d = (loss(w + h d) - loss(w - h d)) / 2h but for h^2 = 10^-8 times a third derivative and 10^-15 / h of rounding. What
// is left is the float gradient's own error, some 40 U of the tensor's gradient if all of it were to lie along d, and more where
// a layer norm has few channels, which may chance to be alike. grad . d itself is about 1 / sqrt(size) of the gradient, 1/200 or
// more: an error of a thousandth is seen.
TEST(model_gradient_by_differences) {
    static const struct { GptConfig config; int B, T; } shapes[] = {
        {{1, 3, 96, 103, 300}, 2, 100}, {{1, 1, 5, 1, 3}, 1, 1}, {{2, 5, 40, 65, 301}, 1, 65}, {{1, 2, 34, 8, 77}, 5, 7}, {{3, 1, 7, 4, 5}, 3, 2}};
    for (int i = 0; i < 5; i++) {
        Model m;
        int B = shapes[i].B, T = shapes[i].T, V = shapes[i].config.vocab, C = shapes[i].config.channels;
        int *tokens = draw_tokens(B * T, V), *targets = draw_tokens(B * T, V);
        random_model(&m, shapes[i].config, B, true);
        double *w = doubles_of(m.state.weights, m.parameters), h = 1e-4, loss = whole_gradient(&m, tokens, targets, B, T, B);
        check_number("loss", (size_t)i, loss, ref_model(&m, w, tokens, targets, B, T, NULL), 10 * U * loss);
        for (int t = 0; t < 2 * gpt_tensor_count(m.config); t++) {
            size_t at = m.tensors[t / 2].offset, size = m.tensors[t / 2].size;
            double *d = array((int)size, 1).want, *g = doubles_of(m.grads + at, size), slope = 0, length = norm_of(d, (int)size), ends[3];
            for (size_t j = 0; j < size; j++) slope += g[j] * (d[j] /= length);
            for (int end = 0; end < 3; end++) {  // the last sets w back
                for (size_t j = 0; j < size; j++) w[at + j] = m.state.weights[at + j] + (end == 0 ? h : end == 1 ? -h : 0) * d[j];
                if (end < 2) ends[end] = ref_model(&m, w, tokens, targets, B, T, NULL);
            }
            check_number(m.tensors[t / 2].name, (size_t)i, slope, (ends[0] - ends[1]) / (2 * h), (40 + 2000.0 / C) * U * norm_of(g, (int)size) + 1e-8);
        }
        model_free(&m);
        release();
    }
}

// ---------------------------------------------------------------------------
// AdamW

static ModelState state_of(const Model *m) {
    return (ModelState){floats_of(m->state.weights, m->parameters), floats_of(m->state.m, m->parameters), floats_of(m->state.v, m->parameters)};
}

static bool same_state(const Model *m, ModelState s) {
    size_t bytes = m->parameters * sizeof(float);
    return !memcmp(m->state.weights, s.weights, bytes) && !memcmp(m->state.m, s.m, bytes) && !memcmp(m->state.v, s.v, bytes);
}

// That m's state is one update by m->grads * scale after the state `before`. Rounding 1 - beta matters where beta is near 1.
static void check_update(const Model *m, const Options *o, ModelState before, double rate, double update, double scale) {
    double error1 = 4 + 1 / (1 - o->beta1), error2 = 6 + 1 / (1 - o->beta2);
    for (int t = 0; t < gpt_tensor_count(m->config); t++)
        for (size_t i = m->tensors[t].offset; i < m->tensors[t].offset + m->tensors[t].size; i++) {
            double g = m->grads[i] * scale, w = before.weights[i], decay = m->tensors[t].rank == 2 ? o->weight_decay : 0;
            double m1 = o->beta1 * before.m[i] + (1 - o->beta1) * g, m2 = o->beta2 * before.v[i] + (1 - o->beta2) * g * g;
            double m1_error = (o->beta1 * fabs(before.m[i]) + (1 - o->beta1) * fabs(g)) * error1 * U + 1e-44;
            double step = rate / (1 - pow(o->beta1, update)) / (sqrt(m2 / (1 - pow(o->beta2, update))) + o->eps);
            check_number("m", i, m->state.m[i], m1, m1_error);
            check_number("v", i, m->state.v[i], m2, m2 * error2 * U + 1e-44);
            double w_error = 4 * U * fabs(w) + step * (m1_error + fabs(m1) * (error2 + 8) * U);
            check_number("weight", i, m->state.weights[i], w - rate * decay * w - step * m1, w_error);
        }
}

TEST(adamw) {
    static const int64_t updates[] = {1, 2, 3, 7, 1000, 1000000000000};
    for (int i = 0; i < 12; i++) {
        Model m;
        Options o;
        options_defaults(&o);
        if (i % 3 == 1) o.beta1 = 0.5 * draw_unit(), o.beta2 = 0.999, o.weight_decay = draw_unit(), o.eps = 1e-3;
        if (i % 3 == 2) o.beta1 = 0.99, o.beta2 = 0, o.weight_decay = 0, o.eps = 1e-10;
        random_model(&m, (GptConfig){draw_int(1, 3), 1, draw_int(1, 23), draw_int(1, 20), draw_int(1, 90)}, 1, true);
        for (int j = 0; j < 6; j++) {  // gradients of all sizes, some of them 0
            for (size_t k = 0; k < m.parameters; k++) m.grads[k] = draw_int(0, 9) ? (float)(draw_normal() * pow(10, draw_int(-9, 2))) : 0;
            double scale = j % 2 ? 1 : draw_unit(), rate = pow(10, -1 - 4 * draw_unit());
            ModelState before = state_of(&m);
            adamw(&m, &o, rate, updates[j], scale);
            check_update(&m, &o, before, rate, (double)updates[j], scale);
        }
        model_free(&m);
        release();
    }
}

TEST(gradient_norm) {  // in double, whose roundings are 2^-53; all parameters count, and nothing beyond them
    static const GptConfig configs[] = {{1, 1, 1, 1, 1}, {1, 5, 65, 30, 2500}, {1, 1, 1, NORM_CHUNK - 28, 1}, {1, 1, 1, NORM_CHUNK - 27, 1}};
    static const int parameters[] = {29, 3 * NORM_CHUNK + 19517, NORM_CHUNK, NORM_CHUNK + 1};
    for (int i = 0; i < 4; i++) {
        Model m;
        double sum = 0;
        random_model(&m, configs[i], 1, true);
        CHECK(m.parameters == (size_t)parameters[i], "(%zu)", m.parameters);
        for (size_t j = 0; j < m.parameters; j++) m.grads[j] = (float)(draw_normal() * pow(10, draw_int(15, 20)));  // squares beyond float
        for (size_t j = 0; j < m.parameters; j++) sum += (double)m.grads[j] * m.grads[j];
        for (size_t j = m.parameters; j % 16; j++) m.grads[j] = NAN;
        check_number("norm", (size_t)i, gradient_norm(&m), sqrt(sum), 1e-12 * sqrt(sum));
        m.grads[i == 0 ? 0 : m.parameters - 1] = NAN;
        CHECK(isnan(gradient_norm(&m)));
        model_free(&m);
    }
}

// ---------------------------------------------------------------------------
// Training

static const GptConfig odd = {2, 3, 51, 37, 263};  // no size is a multiple of a vector, so that threads share out odd pieces

typedef struct { Model m; Run run; Batch batch; double loss, norm; bool skipped; } Trainer;

static Trainer *trainer_new(int B, int accumulation, int length) {  // a random model and a random text to train it on
    Trainer *t = keep(allocate(1, sizeof *t, "a trainer"), 0);
    char path[] = "/tmp/test_gpt2.XXXXXX";
    FILE *file = fdopen(mkstemp(path), "wb");
    for (int i = 0; file && i < length; i++) fputc(draw_int(0, 255), file);
    CHECK(file && !fclose(file) && data_open(&t->run.train, path) && data_open(&t->run.val, path), "%s", error_text);
    CHECK(data_cut(&t->run.train, 0, t->run.train.end, odd.seq, 1, "") && data_cut(&t->run.val, 3, t->run.val.end, odd.seq, 1, ""), "%s", error_text);
    options_defaults(&t->run.options);
    t->batch = (Batch){draw_tokens(odd.seq + 1, 2), draw_tokens(B * odd.seq, 2), draw_tokens(B * odd.seq, 2)};
    t->run.config = odd;
    t->run.accumulation = accumulation;
    random_model(&t->m, odd, B, true);
    return t;
}

static void trainer_free(Trainer *t) {
    remove(t->run.train.shards[0].path);
    data_close(&t->run.train), data_close(&t->run.val);
    model_free(&t->m);
    release();
}

static void trainer_step(Trainer *t, double rate) {
    CHECK(train_step(&t->m, &t->run, &t->batch, &t->loss, &t->norm, rate, &t->skipped), "%s", error_text);
}

TEST(same_bits) {  // in two runs, and with 1, 2 and 3 threads
    uint32_t crc[5] = {0};
    uint64_t start = draw_state;
    for (int run = 0; run < 5; run++) {
        draw_state = start;
        omp_set_num_threads(run < 2 ? 2 : run - 1);
        Trainer *t = trainer_new(3, 2, 5000);
        for (int step = 0; step < 3; step++) {
            trainer_step(t, 0.01);
            crc[run] = crc32_update(crc32_update(crc[run], &t->loss, sizeof t->loss), &t->norm, sizeof t->norm);
        }
        float *const arrays[] = {t->m.state.weights, t->m.state.m, t->m.state.v, t->m.grads};
        for (int i = 0; i < 4; i++) crc[run] = crc32_update(crc[run], arrays[i], t->m.parameters * sizeof(float));
        trainer_free(t);
    }
    CHECK(crc[0] == crc[1], "(two runs differ)");
#ifdef USE_OPENBLAS
    if (crc[2] != crc[0] || crc[4] != crc[0]) SKIP("OpenBLAS adds in another order where a thread's piece has another size");
#endif
    for (int run = 2; run < 5; run++) CHECK(crc[run] == crc[0], "(%d threads differ from 2)", run - 1);
}

TEST(train_step) {
    for (int i = 0; i < 6; i++) {
        int B = draw_int(1, 3), accumulation = draw_int(1, 3), T = odd.seq, batch = B * accumulation;
        Trainer *t = trainer_new(B, accumulation, 3000);
        Model *m = &t->m;
        Progress *p = &t->run.progress;
        size_t bytes = m->parameters * sizeof(float);
        double clip = t->run.options.grad_clip = i % 3 == 0 ? 0 : i % 3 == 1 ? 1e9 : 0.1;
        for (int step = 0; step < 3; step++) {
            double rate = 0.01 * draw_unit(), loss;
            ModelState before = state_of(m);
            trainer_step(t, rate);
            CHECK(p->step == step + 1 && p->samples == (uint64_t)(batch * p->step) && p->skipped == 0 && !t->skipped);
            check_update(m, &t->run.options, before, rate, step + 1, clip > 0 && t->norm > clip ? clip / t->norm : 1);
            // The same from all samples, one at a time, with the old weights
            int *tokens = draw_tokens(batch * T, 2), *targets = draw_tokens(batch * T, 2), *window = draw_tokens(T + 1, 2);
            double *grads = doubles_of(m->grads, m->parameters);
            float *after = floats_of(m->state.weights, m->parameters);
            for (int b = 0; b < batch; b++) {
                CHECK(data_sample(&t->run.train, (uint64_t)(batch * step + b), odd.vocab, window), "%s", error_text);
                for (int j = 0; j < T; j++) tokens[b * T + j] = window[j], targets[b * T + j] = window[j + 1];
            }
            memcpy(m->state.weights, before.weights, bytes);
            loss = whole_gradient(m, tokens, targets, batch, T, 1);
            check_number("loss", 0, t->loss, loss, 4 * U * loss);
            check_number("norm", 0, t->norm, gradient_norm(m), 20 * U * t->norm);
            check_tensors(m, m->grads, grads, 40 * U);
            memcpy(m->state.weights, after, bytes);
        }
        trainer_free(t);
    }
}

// What is not finite changes nothing but the counters, and later bias corrections count only real updates.
TEST(skipped_updates) {
    Trainer *t = trainer_new(2, 1, 3000);
    Model *m = &t->m;
    Progress *p = &t->run.progress;
    size_t bytes = m->parameters * sizeof(float);
    for (int step = 0, updates = 0; step < 8; step++) {
        int C = odd.channels, kind = step % 4;  // 2 is good
        float *good = floats_of(m->state.weights, m->parameters);
        if (kind == 0) m->weight.layers[1].ln1_w[draw_int(0, C - 1)] = NAN;
        if (kind == 3) m->weight.lnf_b[draw_int(0, C - 1)] = INFINITY;
        if (kind == 1) {  // a finite loss, but an infinite gradient: values of 0 times the largest weights
            for (int c = 0; c < C; c++) fill(m->weight.layers[0].qkv_w + c * 3 * C + 2 * C, 0, C);
            fill(m->weight.layers[0].qkv_b + 2 * C, 0, C), fill(m->weight.layers[0].proj_w, 3e38f, C * C), fill(m->weight.lnf_w, 3000, C);
        }
        ModelState before = state_of(m);
        trainer_step(t, 0.01);
        updates += kind == 2;
        CHECK(isfinite(t->loss) == (kind == 1 || kind == 2) && isfinite(t->norm) == (kind == 2), "(%d: %g, %g)", step, t->loss, t->norm);
        CHECK(t->skipped == (kind != 2) && p->step == step + 1 && p->skipped == p->step - updates, "(%d)", step);
        CHECK(p->samples == 2 * (uint64_t)p->step, "(%d)", step);
        if (kind == 2) check_update(m, &t->run.options, before, 0.01, updates, t->norm > 1 ? 1 / t->norm : 1);
        else CHECK(same_state(m, before));
        if (kind != 2) memcpy(m->state.weights, good, bytes);
    }
    trainer_free(t);
}

TEST(validate) {  // the mean over all windows, those of a last incomplete batch, too
    for (int i = 0; i < 6; i++) {
        int B = draw_int(1, 4), T = odd.seq, *window = draw_tokens(T + 1, 2), steps = i % 3;
        Trainer *t = trainer_new(B, 1, draw_int(2 * T, 14 * T));
        int windows = ((int)t->run.val.end - 3 - 1) / T;
        double want = 0, *w = doubles_of(t->m.state.weights, t->m.parameters);
        t->run.options.val_steps = steps;
        CHECK(validate(&t->m, &t->run, &t->batch, &t->loss), "%s", error_text);
        if (steps) windows = min_int(windows, steps * B);
        for (int n = 0; n < windows; n++) {
            CHECK(data_spread(&t->run.val, (size_t)n, (size_t)windows, odd.vocab, window), "%s", error_text);
            want += ref_model(&t->m, w, window, window + 1, 1, T, NULL) / windows;
        }
        check_number("validation loss", 0, t->loss, want, 10 * U * want);
        trainer_free(t);
    }
    (void)train;  // its parts are tested here, and the whole program by tests/test_cli.sh
}

static unsigned char *written(Model *m, const Options *o, const char *prompt, int *length) {
    static Run run;
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    run.options = *o, run.config = m->config;
    run_write(&run, prompt, 0, out, next_logits, m);
    fclose(out);
    keep(text, 0);
    CHECK(size > strlen(prompt) && !strncmp(text, prompt, strlen(prompt)) && text[size - 1] == '\n', "(%s)", text);
    *length = (int)size;
    return (unsigned char *)text;
}

TEST(generate) {
    static const char *const prompts[] = {"", "Once upon", "fifteen letters", "a prompt that is longer than the 16 tokens of the model"};
    Model m;
    Options o;
    int T = 16, C = 24, V = BYTE_VOCAB, length, same;
    options_defaults(&o);
    o.temperature = 0, o.tokens = 30;
    random_model(&m, (GptConfig){2, 3, C, T, V}, 1, false);
    double *w = doubles_of(m.state.weights, m.parameters);
    for (int i = 0; i < 4; i++) {  // greedily: each token has the largest logit after the T before it, or one as good as that
        unsigned char *text = written(&m, &o, prompts[i], &length);
        int tokens[200] = {TOKEN_END_OF_TEXT}, first = (int)strlen(prompts[i]) + 1;
        for (int j = 1; j <= length; j++) tokens[j] = j < length ? text[j - 1] : TOKEN_END_OF_TEXT;  // rather than the newline
        CHECK(length <= first + 30);
        for (int n = first; n < min_int(length + 1, first + 30); n++) {
            int seen = min_int(n, T);
            double *logits = doubles((size_t)(T * V)), *row = logits + (seen - 1) * V, max = -INFINITY;
            ref_model(&m, w, tokens + n - seen, NULL, 1, seen, logits);
            for (int v = 0; v < V; v++) max = fmax(max, row[v]);
            CHECK(row[tokens[n]] > max - 1e-4, "(prompt %d, position %d: token %d has %g, the best %g)", i, n, tokens[n], row[tokens[n]], max);
        }
    }
    fill(m.weight.lnf_w, 0, C);  // now always the same logits: those of a byte, or the end of the text
    for (int token = 250; token <= TOKEN_END_OF_TEXT; token++) {
        for (int c = 0; c < C; c++) m.weight.lnf_b[c] = m.weight.wte[token * C + c] = c % 2 ? 2 : -2;
        unsigned char *text = written(&m, &o, "ab", &length);
        CHECK(length == (token == TOKEN_END_OF_TEXT ? 3 : 33), "(%d)", length);
        for (int j = 2; j < length - 1; j++) CHECK(text[j] == token);
        fill(m.weight.wte + token * C, 0, C);
    }
    o.temperature = 1e6;  // drawn, all alike: the seed decides, and the draws differ
    unsigned char *text = written(&m, &o, "ab", &length);
    unsigned char *again = written(&m, &o, "ab", &same);
    CHECK(length == same && !memcmp(text, again, (size_t)length) && (length < 7 || memcmp(text + 2, text + 3, 3)));
    o.seed++;
    again = written(&m, &o, "ab", &same);
    CHECK(length != same || memcmp(text, again, (size_t)length));
    model_free(&m);
}

// ---------------------------------------------------------------------------

static void test_begins(const char *name) {
    (void)name;
    worst = 0, kept_count = 0, started = seconds_now();
    omp_set_num_threads(threads);
}

static void test_ends(const char *name) {
    (void)name;
    release();
    if (getenv("TEST_VERBOSE")) printf("#   %.2f s, %.2f of the tolerance\n", seconds_now() - started, worst);
}

int main(int argc, char **argv) {
    if (!getenv("OMP_WAIT_POLICY")) {  // at these sizes threads mostly wait: asleep, or it takes minutes where others use the cores
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);  // OpenMP reads it before main; if there is no /proc, it just goes on
    }
    char arithmetic[128];
    threads = omp_get_max_threads();
    omp_set_num_threads(threads > 3 ? threads : 3);  // memory for as many threads as any test uses
    matmul_start(arithmetic, sizeof arithmetic);
    printf("# computes %s\n", arithmetic);
    return run_tests(argc > 1 ? argv[1] : NULL, test_begins, test_ends) > 0;
}

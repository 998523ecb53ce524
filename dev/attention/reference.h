// What an attention variant is tested against: inputs to draw, attention in double precision, and how far from it a result may be.
//
// All of this runs on the host and is no part of any variant. The bound on a result's error is taken from the standard attention in
// bf16, which is computed here as well: an exact variant makes errors like those, an inexact one larger ones.
#ifndef REFERENCE_H
#define REFERENCE_H

#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "gpt/random.h"
#include "variant.h"

static size_t heads(Shape s) { return (size_t)s.B * s.NH; }
static size_t elements(Shape s) { return heads(s) * s.T * s.HS; }  // of out; qkv has three times as many

// ----------------------------------------------------------------------------
// Inputs and outputs

// bf16 is the upper half of a float, so these need nothing from CUDA and turn into vector instructions. Finite numbers only.
static inline float round_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;  // to nearest, ties to even
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline bf16 to_bf16(float x) {
    bf16 result;
    x = round_to_bf16(x);
    memcpy(&result, (const char *)&x + 2, sizeof result);
    return result;
}

static inline float to_float(bf16 x) {
    float result = 0;
    memcpy((char *)&result + 2, &x, sizeof x);
    return result;
}

struct Inputs {
    Shape s;
    std::vector<bf16> qkv;   // (B, T, 3, NH, HS)
    std::vector<bf16> dout;  // (B, T, NH, HS)
};

struct Outputs {
    std::vector<bf16> out;   // (B, T, NH, HS)
    std::vector<bf16> dqkv;  // (B, T, 3, NH, HS)
    std::vector<float> lse;  // (B, NH, T)
};

static size_t out_at(Shape s, int b, int t, int n, int h) { return (((size_t)b * s.T + t) * s.NH + n) * s.HS + h; }
static size_t qkv_at(Shape s, int b, int t, int which, int n, int h) {
    return ((((size_t)b * s.T + t) * 3 + which) * s.NH + n) * s.HS + h;
}

// values[i] = N(0, 1), a part at a time, so that the floats need little memory beside large tensors.
static void draw_normal(std::vector<bf16> &values, size_t count, uint64_t seed, uint32_t purpose) {
    const size_t PART = (size_t)1 << 22;
    std::vector<float> part(std::min(count, PART));
    values.resize(count);
    for (size_t start = 0; start < count; start += PART) {
        size_t n = std::min(PART, count - start);
        random_normal(part.data(), n, 1, seed, purpose, (uint32_t)(start / PART));
#pragma omp parallel for
        for (size_t i = 0; i < n; i++) values[start + i] = to_bf16(part[i]);
    }
}

enum Magnitude { NORMAL, LARGE, TINY, SPREAD, OFFSET, MAGNITUDES };
static const char *const magnitude_names[MAGNITUDES] = {
    "normal",  // N(0, 1)
    "large",   // Q and K times 8: nearly every softmax picks one key
    "tiny",    // all inputs times 2^-10: every softmax is nearly uniform, and gradients are below 1e-9
    "spread",  // one row in 8 of Q, K, V and dO times 16
    "offset",  // 64 times one vector added to all keys of a head: a row's scores are all near +100, say, or all near -100
};

static Inputs draw_inputs(Shape s, Magnitude magnitude, uint64_t seed) {
    enum { QKV = 101, DOUT, ROWS, COMMON };  // purposes of the draws
    Inputs in = {s, {}, {}};
    std::vector<bf16> common;  // (NH, HS)
    draw_normal(in.qkv, 3 * elements(s), seed, QKV);
    draw_normal(in.dout, elements(s), seed, DOUT);
    draw_normal(common, (size_t)s.NH * s.HS, seed, COMMON);
    // Both tensors are rows of HS, one for each token and head; those of qkv are Q's, K's or V's.
    auto change = [&](std::vector<bf16> &tensor, bool is_qkv) {
        for (size_t row = 0; row < tensor.size() / s.HS; row++) {
            size_t which = is_qkv ? row / s.NH % 3 : 3;
            float factor = magnitude == LARGE && which < 2 ? 8.0f : magnitude == TINY ? 1 / 1024.0f : 1.0f, added = 0;
            if (magnitude == SPREAD && random_below(random4(seed, ROWS, is_qkv, row), 8) == 0) factor = 16;
            if (magnitude == OFFSET && which == 1) added = 64;
            for (int h = 0; h < s.HS; h++) {
                bf16 *x = &tensor[row * s.HS + h];
                *x = to_bf16(to_float(*x) * factor + added * to_float(common[row % s.NH * s.HS + h]));
            }
        }
    };
    if (magnitude != NORMAL) change(in.qkv, true), change(in.dout, false);
    return in;
}

// ----------------------------------------------------------------------------
// The reference

enum { OUT, LSE, DQ, DK, DV, RESULTS };
static const char *const result_names[RESULTS] = {"out", "lse", "dq", "dk", "dv"};

// What one head of one batch element gives: (T, HS), lse (T).
struct Head { std::vector<double> result[RESULTS]; };

// Two arithmetics. Exact: all in double precision. Standard: as a framework without flash attention trains in bf16, where each
// step is a kernel of its own that computes in fp32 and stores bf16: the scores, P, dP, dS, and the results.
struct Exact {
    typedef double Number;
    static double round(double x) { return x; }
};
struct Standard {
    typedef float Number;
    static float round(float x) { return round_to_bf16(x); }
};

// One of Q, K, V, dO of one head, as (T, HS) and as (HS, T): with the latter, too, the innermost loops run over neighbours.
struct Matrix {
    int T, HS;
    std::vector<float> rows, columns;
    Matrix(const bf16 *from, size_t stride, int T, int HS) : T(T), HS(HS), rows((size_t)T * HS), columns((size_t)T * HS) {
        for (int t = 0; t < T; t++)
            for (int h = 0; h < HS; h++) rows[(size_t)t * HS + h] = columns[(size_t)h * T + t] = to_float(from[t * stride + h]);
    }
    const float *row(int t) const { return &rows[(size_t)t * HS]; }
};

// result[t] = vector (HS) · row t of m, for t in [first, end)
template <class Number> static void products(Number *result, const float *vector, const Matrix &m, int first, int end) {
    enum { PART = 128 };  // sums that stay in the first-level cache
    for (int start = first; start < end; start += PART) {
        Number sum[PART] = {0};
        int n = std::min<int>(PART, end - start);
        for (int h = 0; h < m.HS; h++) {
            const float *column = &m.columns[(size_t)h * m.T + start];
            Number factor = vector[h];
#pragma omp simd
            for (int i = 0; i < n; i++) sum[i] += factor * (Number)column[i];
        }
        std::copy(sum, sum + n, result + start);
    }
}

// result (HS) = the sum over t in [first, end) of weights[t] * row t of m, rounded
template <class Arithmetic>
static void weighted_sum(double *result, const typename Arithmetic::Number *weights, const Matrix &m, int first, int end) {
    typedef typename Arithmetic::Number Number;
    std::vector<Number> sums(m.HS);
    Number *sum = sums.data();
    for (int t = first; t < end; t++) {
        const float *row = m.row(t);
        Number weight = weights[t];
#pragma omp simd
        for (int h = 0; h < m.HS; h++) sum[h] += weight * (Number)row[h];
    }
    for (int h = 0; h < m.HS; h++) result[h] = Arithmetic::round(sum[h]);
}

// Attention of one head and its gradients, as the formulas say. The first sweep takes a query at a time, that is a row of
//   S = Q Kᵀ / sqrt(HS), P = softmax(S), O = P V, dP = dO Vᵀ, delta = rowsum(dO ∘ O), dS = P ∘ (dP − delta) / sqrt(HS), dQ = dS K,
// the second a key at a time, a column of P and dS, for dV = Pᵀ dO and dK = dSᵀ Q. So no T x T matrix is kept.
template <class Arithmetic>
static Head attention_head(const Matrix &Q, const Matrix &K, const Matrix &V, const Matrix &dO, bool causal) {
    typedef typename Arithmetic::Number Number;
    int T = Q.T, HS = Q.HS;
    Number scale = 1 / sqrt((Number)HS);
    std::vector<Number> largest(T), sum(T), delta(T);
    Head head;
    for (int r = 0; r < RESULTS; r++) head.result[r].resize((size_t)T * (r == LSE ? 1 : HS));
    auto result_row = [&](int r, int t) { return &head.result[r][(size_t)t * HS]; };
#pragma omp parallel
    {
        std::vector<Number> p(T), dp(T), ds(T);
#pragma omp for schedule(dynamic, 16)
        for (int i = 0; i < T; i++) {
            int end = causal ? i + 1 : T;
            products(p.data(), Q.row(i), K, 0, end);
            products(dp.data(), dO.row(i), V, 0, end);
            for (int j = 0; j < end; j++) p[j] = Arithmetic::round(p[j] * scale);
            largest[i] = *std::max_element(p.begin(), p.begin() + end);
            for (int j = 0; j < end; j++) sum[i] += p[j] = exp(p[j] - largest[i]);
            for (int j = 0; j < end; j++) {
                p[j] = Arithmetic::round(p[j] / sum[i]);
                dp[j] = Arithmetic::round(dp[j]);
            }
            weighted_sum<Arithmetic>(result_row(OUT, i), p.data(), V, 0, end);
            for (int h = 0; h < HS; h++) delta[i] += dO.row(i)[h] * (Number)result_row(OUT, i)[h];
            for (int j = 0; j < end; j++) ds[j] = Arithmetic::round(p[j] * (dp[j] - delta[i]) * scale);
            weighted_sum<Arithmetic>(result_row(DQ, i), ds.data(), K, 0, end);
            head.result[LSE][i] = largest[i] + log(sum[i]);
        }
#pragma omp for schedule(dynamic, 16)
        for (int j = 0; j < T; j++) {
            int first = causal ? j : 0;
            products(p.data(), K.row(j), Q, first, T);
            products(dp.data(), V.row(j), dO, first, T);
            for (int i = first; i < T; i++) {
                p[i] = Arithmetic::round(exp(Arithmetic::round(p[i] * scale) - largest[i]) / sum[i]);
                ds[i] = Arithmetic::round(p[i] * (Arithmetic::round(dp[i]) - delta[i]) * scale);
            }
            weighted_sum<Arithmetic>(result_row(DV, j), p.data(), dO, first, T);
            weighted_sum<Arithmetic>(result_row(DK, j), ds.data(), Q, first, T);
        }
    }
    return head;
}

struct Reference {
    size_t first, step;       // heads[i] is number first + i * step; head n of batch element b is number b * NH + n
    std::vector<Head> heads;  // exact
    double standard_error[RESULTS], fp32_error[RESULTS];

    size_t number(size_t i) const { return first + i * step; }

    // The bound on a result's largest error is twice that of the standard attention, plus what fp32 costs. lse is kept in fp32
    // and is no product of anything rounded to bf16, so to it only the latter applies.
    double bound(int r) const { return (r == LSE ? 0 : 2 * standard_error[r]) + fp32_error[r]; }
};

// The reference of `count` heads, evenly spread over all, the last one among them.
//
// fp32_error is 1e-5 of a result's size: of its largest magnitude, or if larger, of the product of the root mean squares of what
// it is made of, since dQ and dK are differences that may cancel altogether (at T = 1 they are 0). For normal inputs that is 1.
static Reference reference(const Inputs &in, size_t count) {
    Shape s = in.s;
    size_t step = heads(s) / count;
    Reference ref = {heads(s) - 1 - (count - 1) * step, step, std::vector<Head>(count), {0}, {0}};
    double size[RESULTS] = {0}, squares[4] = {0}, rms[4];
    // Few heads leave the threads to the loops over T.
#pragma omp parallel for if (count >= 64)
    for (size_t i = 0; i < count; i++) {
        int b = (int)(ref.number(i) / s.NH), n = (int)(ref.number(i) % s.NH);
        std::vector<Matrix> m;  // Q, K, V, dO
        for (int j = 0; j < 3; j++) m.emplace_back(&in.qkv[qkv_at(s, b, 0, j, n, 0)], (size_t)3 * s.NH * s.HS, s.T, s.HS);
        m.emplace_back(&in.dout[out_at(s, b, 0, n, 0)], (size_t)s.NH * s.HS, s.T, s.HS);
        ref.heads[i] = attention_head<Exact>(m[0], m[1], m[2], m[3], s.causal);
        Head standard = attention_head<Standard>(m[0], m[1], m[2], m[3], s.causal);
#pragma omp critical  // heads come in any order; largest errors do not depend on it, sums of squares hardly
        {
            for (int j = 0; j < 4; j++)
                for (float x : m[j].rows) squares[j] += (double)x * x;
            for (int r = 0; r < RESULTS; r++)
                for (size_t j = 0; j < standard.result[r].size(); j++) {
                    double exact = ref.heads[i].result[r][j];
                    ref.standard_error[r] = fmax(ref.standard_error[r], fabs(standard.result[r][j] - exact));
                    size[r] = fmax(size[r], fabs(exact));
                }
        }
    }
    for (int j = 0; j < 4; j++) rms[j] = sqrt(squares[j] / ((double)count * s.T * s.HS));
    double product[RESULTS] = {rms[2], 1, rms[3] * rms[2] * rms[1], rms[3] * rms[2] * rms[0], rms[3]};
    for (int r = 0; r < RESULTS; r++) ref.fp32_error[r] = 1e-5 * fmax(size[r], product[r]);
    return ref;
}

// Where a result is farthest from the reference; infinitely far where it is not finite.
struct Worst { double error, found, expected; int b, t, n, h; };

static Worst worst_error(const Outputs &o, Shape s, const Reference &ref, int r) {
    Worst worst = {-1, 0, 0, 0, 0, 0, 0};
    int width = r == LSE ? 1 : s.HS;
    for (size_t i = 0; i < ref.heads.size(); i++) {
        int b = (int)(ref.number(i) / s.NH), n = (int)(ref.number(i) % s.NH);
        for (int t = 0; t < s.T; t++)
            for (int h = 0; h < width; h++) {
                double found = r == LSE ? o.lse[ref.number(i) * s.T + t] :
                               to_float(r == OUT ? o.out[out_at(s, b, t, n, h)] : o.dqkv[qkv_at(s, b, t, r - DQ, n, h)]);
                double expected = ref.heads[i].result[r][(size_t)t * width + h];
                double error = isfinite(found) ? fabs(found - expected) : INFINITY;
                if (error > worst.error) worst = {error, found, expected, b, t, n, h};
            }
    }
    return worst;
}

#endif

// What an attention variant is tested against: inputs to draw, attention in double precision, and how far from it a result may be.
//
// All of this runs on the host and is no part of any variant.
#ifndef REFERENCE_H
#define REFERENCE_H

#include <math.h>
#include <string.h>

#include <algorithm>
#include <numeric>
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
    "tiny",    // all inputs times 2^-10: every softmax is nearly uniform, and dQ and dK are about 1e-9
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

// What one head of one batch element gives, (T, HS) and for lse (T), and the variance of the error in each number of it.
struct Head { std::vector<double> result[RESULTS], variance[RESULTS]; };

// How far from the reference a result may be. An exact variant computes in fp32, but rounds to bf16 what it multiplies on tensor
// cores, P and dS, and what it returns. A rounding errs by at most 1/256 of the number. Taken as uniform and independent, it has a
// variance of at most ROUNDING times the number's square. Scores are sums in fp32 of products that may cancel: SUM |q| |k|, four
// units in the last place, is taken as their standard deviation. Other errors in fp32 are far below these.
//
// - No number may be off by more than t standard deviations. A sum of such errors is with a chance of at most 2 exp(-t² / 2). From
//   that comes t, 6.5 to 8: a right variant fails a case, by any of its numbers, with a chance of at most CHANCE. (The model is that of
//   Higham, Mary 2019, "A New Approach to Probabilistic Rounding Error Analysis". Hoeffding's inequality has the variance in it where
//   errors are uniform: Arbel, Marchal, Nguyen 2020, "On strict sub-Gaussianity, optimal proxy variance and symmetry for bounded random
//   variables".)
// - All numbers of a result together, in standard deviations, may have a root mean square of MOST_RMS. This finds what is off by a
//   factor of 1.01 everywhere, and by that within the roundings anywhere. A right variant has about 0.74, as most numbers are larger
//   than the power of two that their rounding depends on; the rest is for small cases, and for P so alike that they round alike. (Not
//   asked for with SPREAD, where all of dK may have its error from one query's delta.)
const double ROUNDING = 1.0 / 256 / 256 / 3, SUM = 4.0 / (1 << 24), CHANCE = 1e-6, MOST_RMS = 1.25;
const double FLUSHED = 1e-30;  // added to each bound: P below 1e-38 are zero in fp32

// One of Q, K, V, dO of one head, as (T, HS) and as (HS, T): with the latter, too, the innermost loops run over neighbours.
struct Matrix {
    int T, HS;
    std::vector<float> rows, columns, squares;  // the last are those of rows,
    std::vector<double> norms;                  // and these the roots of their sums
    Matrix(const bf16 *from, size_t stride, int T, int HS)
        : T(T), HS(HS), rows((size_t)T * HS), columns((size_t)T * HS), squares((size_t)T * HS), norms(T) {
        for (int t = 0; t < T; t++) {
            for (int h = 0; h < HS; h++) {
                float x = to_float(from[t * stride + h]);
                rows[(size_t)t * HS + h] = columns[(size_t)h * T + t] = x;
                norms[t] += squares[(size_t)t * HS + h] = x * x;
            }
            norms[t] = sqrt(norms[t]);
        }
    }
    const float *row(int t) const { return &rows[(size_t)t * HS]; }
};

// result[t] = vector (HS) · row t of m, for t in [first, end)
static void products(double *result, const float *vector, const Matrix &m, int first, int end) {
    enum { PART = 128 };  // sums that stay in the first-level cache
    for (int start = first; start < end; start += PART) {
        double sum[PART] = {0};
        int n = std::min<int>(PART, end - start);
        for (int h = 0; h < m.HS; h++) {
            const float *column = &m.columns[(size_t)h * m.T + start];
            double factor = vector[h];
#pragma omp simd
            for (int i = 0; i < n; i++) sum[i] += factor * (double)column[i];
        }
        std::copy(sum, sum + n, result + start);
    }
}

// sum (HS) = the sum over t in [first, end) of weights[t] * row t of rows (T, HS)
static void weighted_sum(double *sum, const std::vector<double> &weights, const std::vector<float> &rows, int HS, int first,
                         int end) {
    std::fill(sum, sum + HS, 0);
    for (int t = first; t < end; t++) {
        const float *row = &rows[(size_t)t * HS];
        double weight = weights[t];
#pragma omp simd
        for (int h = 0; h < HS; h++) sum[h] += weight * (double)row[h];
    }
}

// Attention of one head and its gradients, as the formulas say. The first sweep takes a query at a time, that is a row of
//   S = Q Kᵀ / sqrt(HS), P = softmax(S), O = P V, dP = dO Vᵀ, delta = rowsum(dO ∘ O), dS = P ∘ (dP − delta) / sqrt(HS), dQ = dS K,
// the second a key at a time, a column of P and dS, for dV = Pᵀ dO and dK = dSᵀ Q. So no T x T matrix is kept.
//
// The variance of P, of its score and rounding, comes into O and dV, and with that of dS's own rounding into dQ and dK. P and O come
// into delta, and so into a row of dS, in proportion to P. Each result brings that of its rounding.
static Head attention_head(const Matrix &Q, const Matrix &K, const Matrix &V, const Matrix &dO, bool causal) {
    int T = Q.T, HS = Q.HS;
    double scale = 1 / sqrt((double)HS);
    std::vector<double> largest(T), sum(T), delta(T), delta_variance(T);
    Head head;
    for (int r = 0; r < RESULTS; r++)
        for (auto *x : {&head.result[r], &head.variance[r]}) x->resize((size_t)T * (r == LSE ? 1 : HS));
    auto result_row = [&](int r, int t) { return &head.result[r][(size_t)t * HS]; };
    auto p_variance_of = [&](int i, int j, double p) {
        double score = SUM * scale * Q.norms[i] * K.norms[j];
        return p * p * (ROUNDING + score * score);
    };
    auto variance_row = [&](int r, int t) { return &head.variance[r][(size_t)t * HS]; };
#pragma omp parallel
    {
        std::vector<double> p(T), dp(T), ds(T), p_variance(T), ds_variance(T), mean_key(HS);
#pragma omp for schedule(dynamic, 16)
        for (int i = 0; i < T; i++) {
            int end = causal ? i + 1 : T;
            products(p.data(), Q.row(i), K, 0, end);
            products(dp.data(), dO.row(i), V, 0, end);
            for (int j = 0; j < end; j++) p[j] *= scale;
            largest[i] = *std::max_element(p.begin(), p.begin() + end);
            for (int j = 0; j < end; j++) sum[i] += p[j] = exp(p[j] - largest[i]);
            head.result[LSE][i] = largest[i] + log(sum[i]);
            double longest_key = *std::max_element(K.norms.begin(), K.norms.begin() + end);
            head.variance[LSE][i] = pow(SUM * (1 + fabs(head.result[LSE][i]) + scale * Q.norms[i] * longest_key), 2);
            for (int j = 0; j < end; j++) {
                p[j] /= sum[i];
                p_variance[j] = p_variance_of(i, j, p[j]);
                delta_variance[i] += p_variance[j] * dp[j] * dp[j];
            }
            weighted_sum(result_row(OUT, i), p, V.rows, HS, 0, end);
            weighted_sum(variance_row(OUT, i), p_variance, V.squares, HS, 0, end);
            for (int h = 0; h < HS; h++) {
                double term = dO.row(i)[h] * result_row(OUT, i)[h];
                delta[i] += term;
                delta_variance[i] += ROUNDING * term * term;
            }
            for (int j = 0; j < end; j++) {
                ds[j] = p[j] * (dp[j] - delta[i]) * scale;
                ds_variance[j] = ROUNDING * ds[j] * ds[j] + p_variance[j] * pow((dp[j] - delta[i]) * scale, 2);
            }
            weighted_sum(result_row(DQ, i), ds, K.rows, HS, 0, end);
            weighted_sum(variance_row(DQ, i), ds_variance, K.squares, HS, 0, end);
            weighted_sum(mean_key.data(), p, K.rows, HS, 0, end);
            for (int h = 0; h < HS; h++) variance_row(DQ, i)[h] += delta_variance[i] * scale * scale * mean_key[h] * mean_key[h];
        }
#pragma omp for schedule(dynamic, 16)
        for (int j = 0; j < T; j++) {
            int first = causal ? j : 0;
            products(p.data(), K.row(j), Q, first, T);
            products(dp.data(), V.row(j), dO, first, T);
            for (int i = first; i < T; i++) {
                p[i] = exp(p[i] * scale - largest[i]) / sum[i];
                p_variance[i] = p_variance_of(i, j, p[i]);
                ds[i] = p[i] * (dp[i] - delta[i]) * scale;
                ds_variance[i] = ROUNDING * ds[i] * ds[i] + p_variance[i] * pow((dp[i] - delta[i]) * scale, 2) +
                                 delta_variance[i] * pow(p[i] * scale, 2);
            }
            weighted_sum(result_row(DV, j), p, dO.rows, HS, first, T);
            weighted_sum(variance_row(DV, j), p_variance, dO.squares, HS, first, T);
            weighted_sum(result_row(DK, j), ds, Q.rows, HS, first, T);
            weighted_sum(variance_row(DK, j), ds_variance, Q.squares, HS, first, T);
        }
    }
    for (int r : {OUT, DQ, DK, DV})
        for (size_t i = 0; i < head.result[r].size(); i++) head.variance[r][i] += ROUNDING * pow(head.result[r][i], 2);
    return head;
}

struct Reference {
    size_t first, step;  // heads[i] is number first + i * step; head n of batch element b is number b * NH + n
    std::vector<Head> heads;
    double t;

    size_t number(size_t i) const { return first + i * step; }
};

// The reference of `count` heads, evenly spread over all, the last one among them.
static Reference reference(const Inputs &in, size_t count) {
    Shape s = in.s;
    size_t step = heads(s) / count;
    while (count > 1 && step > 1 && std::gcd(step, (size_t)s.NH) > 1) step--;  // else the same heads of each batch element
    double numbers = 4.0 * (double)count * s.T * s.HS;  // that may exceed it
    Reference ref = {heads(s) - 1 - (count - 1) * step, step, std::vector<Head>(count), sqrt(2 * log(2 * numbers / CHANCE))};
    // Few heads leave the threads to the loops over T.
#pragma omp parallel for if (count >= 64)
    for (size_t i = 0; i < count; i++) {
        int b = (int)(ref.number(i) / s.NH), n = (int)(ref.number(i) % s.NH);
        std::vector<Matrix> m;  // Q, K, V, dO
        for (int j = 0; j < 3; j++) m.emplace_back(&in.qkv[qkv_at(s, b, 0, j, n, 0)], (size_t)3 * s.NH * s.HS, s.T, s.HS);
        m.emplace_back(&in.dout[out_at(s, b, 0, n, 0)], (size_t)s.NH * s.HS, s.T, s.HS);
        ref.heads[i] = attention_head(m[0], m[1], m[2], m[3], s.causal);
    }
    return ref;
}

// The errors of one result: the number that comes nearest to its bound, or is farthest beyond, and what all of them come to. What is
// not finite, in the result or in the reference, is infinitely far.
struct Errors {
    double of_bound, bound, found, expected;
    int b, t, n, h;
    double largest, rms;  // of all; the latter in standard deviations
};

static Errors errors_of(const Outputs &o, Shape s, const Reference &ref, int r) {
    Errors worst = {INFINITY, 0, NAN, NAN, 0, 0, 0, 0, 0, 0};
    double squares = 0, count = 0;
    int width = r == LSE ? 1 : s.HS;
    for (size_t i = 0; i < ref.heads.size(); i++) {
        int b = (int)(ref.number(i) / s.NH), n = (int)(ref.number(i) % s.NH);
        for (int t = 0; t < s.T; t++)
            for (int h = 0; h < width; h++) {
                double found = r == LSE ? o.lse[ref.number(i) * s.T + t] :
                               to_float(r == OUT ? o.out[out_at(s, b, t, n, h)] : o.dqkv[qkv_at(s, b, t, r - DQ, n, h)]);
                size_t at = (size_t)t * width + h;
                double expected = ref.heads[i].result[r][at], error = fabs(found - expected);
                double bound = ref.t * sqrt(ref.heads[i].variance[r][at]) + FLUSHED, of_bound = error / bound;
                if (!(of_bound < INFINITY && bound < INFINITY)) of_bound = error = INFINITY;
                squares += of_bound * of_bound;
                worst.largest = fmax(worst.largest, error);
                if (count++ == 0 || of_bound > worst.of_bound)
                    worst = {of_bound, bound, found, expected, b, t, n, h, worst.largest, 0};
            }
    }
    worst.rms = ref.t * sqrt(squares / count);
    return worst;
}

#endif

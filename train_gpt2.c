// GPT-2 in plain C: forward, backward, AdamW and the training loop, in fp32 on the CPU. One file, to be read top to bottom.
//
//   make train_gpt2
//   ./train_gpt2 --data book.txt                   trains a small model on a book (--help lists all options)
//   ./train_gpt2 --model run --prompt "Once"       writes with it
//
//   1 matrix products    2 layers    3 flash attention    4 the model    5 AdamW    6 generating text    7 training
//
// B batch, T sequence length, C channels, L layers, NH heads, HS = C / NH head size, V vocabulary; N = B * T rows.
// All arrays are row-major floats; a shape stands beside each. A `d` before a name means the gradient of the loss with respect
// to it, and (+)= means = or, if the argument `add` is true, +=: the gradients of several batches are summed.
// Two runs give the same bits; with the built-in matrix products whatever the number of threads, as no sum is split over them.
// Everything but the arithmetic (options, data, checkpoints, logs) is in gpt/.

#include <float.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads(void) { return 1; }
__attribute__((unused)) static int omp_get_thread_num(void) { return 0; }
#endif
#ifdef USE_OPENBLAS
#include <cblas.h>
#endif

#include "gpt/run.h"

static int min_int(int a, int b) { return a < b ? a : b; }
static int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// ---------------------------------------------------------------------------
// 1 Matrix products

// A vector register of floats, by the compiler's vector extension, and the height of the block of sums that is kept in
// registers: MR x 2 vectors, which leaves two registers for B and one for A of the 32 that AVX-512 has, or of 16.
#if defined(__AVX512F__)
enum { VECTOR = 16, MR = 12 };
#elif defined(__AVX__)
enum { VECTOR = 8, MR = 6 };
#else
enum { VECTOR = 4, MR = 6 };
#endif
typedef float Vector __attribute__((vector_size(VECTOR * sizeof(float)), aligned(sizeof(float)), may_alias));
enum { NR = 2 * VECTOR };

#ifdef USE_OPENBLAS

// Threads are ours (see matmul): OpenBLAS computes one piece in one thread.
static void matmul_piece(int M, int N, int K, const float *a, size_t lda, bool a_transposed, const float *b, size_t ldb,
                         bool b_transposed, float *c, size_t ldc, bool add) {
    cblas_sgemm(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans, b_transposed ? CblasTrans : CblasNoTrans,
                M, N, K, 1.0f, a, (int)lda, b, (int)ldb, add ? 1.0f : 0.0f, c, (int)ldc);
}

static void matmul_start(char *name, size_t size) {
    openblas_set_num_threads(1);
    snprintf(name, size, "in fp32 with OpenBLAS (%s), %d threads", openblas_get_corename(), omp_get_max_threads());
}

#else

// Cache blocks, after Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a panel of B,
// KC x NR, stays in the first-level cache, MC x KC elements of A in the second. B is copied into panels. A is read in
// place, which measured faster than copying it; only a last panel of fewer than MR rows is copied.
enum { KC = 256, MC = 16 * MR, NC = 64 * NR, PACKED = KC * NC + KC * MR };
static float *packed_panels;  // PACKED floats for each thread

// c (rows, columns) (+)= a (MR, kc) b (kc, NR); rows <= MR, columns <= NR. Element (i, k) of a is a[i * a_row + k * a_step].
static void product_block(int kc, const float *a, size_t a_row, size_t a_step, const float *b, float *c, size_t ldc,
                          int rows, int columns, bool add) {
    Vector sum[MR][2];
    memset(sum, 0, sizeof sum);
    for (int k = 0; k < kc; k++) {
        Vector b0 = *(const Vector *)(b + k * NR), b1 = *(const Vector *)(b + k * NR + VECTOR);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            float x = a[i * a_row + k * a_step];
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
        }
    }
    if (rows == MR && columns == NR) {
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            Vector *out = (Vector *)(c + i * ldc);
            for (int half = 0; half < 2; half++) {
                if (add) sum[i][half] += out[half];
                out[half] = sum[i][half];
            }
        }
        return;
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) c[i * ldc + j] = ((const float *)sum[i])[j] + (add ? c[i * ldc + j] : 0);
}

// Copies n lines of kc elements into panels of `width` lines, (kc, width) each, the last one filled up with zeros.
// Element k of line i is source[i * line + k * step].
static void pack(float *out, const float *source, size_t line, size_t step, int n, int kc, int width) {
    for (int first = 0; first < n; first += width, source += (size_t)width * line) {
        int lines = min_int(width, n - first);
        for (int k = 0; k < kc; k++, out += width) {
            if (line == 1) memcpy(out, source + k * step, (size_t)lines * sizeof(float));
            else for (int i = 0; i < lines; i++) out[i] = source[i * line + k * step];
            for (int i = lines; i < width; i++) out[i] = 0;
        }
    }
}

static void matmul_piece(int M, int N, int K, const float *a, size_t lda, bool a_transposed, const float *b, size_t ldb,
                         bool b_transposed, float *c, size_t ldc, bool add) {
    size_t a_row = a_transposed ? 1 : lda, a_step = a_transposed ? lda : 1;
    size_t b_column = b_transposed ? ldb : 1, b_step = b_transposed ? 1 : ldb;
    float *packed_b = packed_panels + (size_t)omp_get_thread_num() * PACKED, *packed_a = packed_b + KC * NC;
    for (int j = 0; j < N; j += NC)
        for (int k = 0; k < K; k += KC) {
            int kc = min_int(KC, K - k), nc = min_int(NC, N - j), whole = M / MR * MR;
            pack(packed_b, b + j * b_column + k * b_step, b_column, b_step, nc, kc, NR);
            if (whole < M) pack(packed_a, a + whole * a_row + k * a_step, a_row, a_step, M - whole, kc, MR);
            for (int i = 0; i < M; i += MC)
                for (int jr = 0; jr < nc; jr += NR)
                    for (int ir = i; ir < min_int(M, i + MC); ir += MR) {
                        bool edge = ir == whole;
                        product_block(kc, edge ? packed_a : a + ir * a_row + k * a_step, edge ? 1 : a_row, edge ? MR : a_step,
                                      packed_b + (size_t)jr * kc, c + ir * ldc + j + jr, ldc, min_int(MR, M - ir),
                                      min_int(NR, nc - jr), add || k > 0);
                    }
        }
}

static void matmul_start(char *name, size_t size) {
    packed_panels = allocate((size_t)omp_get_max_threads() * PACKED, sizeof(float), "panels of matrices");
    snprintf(name, size, "in fp32 with built-in matrix products (vectors of %d floats), %d threads", VECTOR, omp_get_max_threads());
}

#endif

// c (M, N) (+)= a b. a is (M, K), or (K, M) if a_transposed; b is (K, N), or (N, K) if b_transposed.
static void matmul(float *c, const float *a, bool a_transposed, const float *b, bool b_transposed, int M, int N, int K, bool add) {
    // c is cut into a grid with a piece for each thread: of all such grids that whose largest piece is smallest and, among
    // equal ones, squarest, because that reads least. No sum is shared between pieces.
    int threads = omp_get_max_threads(), height = M, width = N;
    size_t smallest = SIZE_MAX;
    for (int rows = 1; rows <= threads; rows++) {
        if (threads % rows) continue;
        int h = round_up((M - 1) / rows + 1, MR), w = round_up((N - 1) / (threads / rows) + 1, NR);
        size_t size = (size_t)h * (size_t)w;
        if (size > smallest || (size == smallest && h + w >= height + width)) continue;
        smallest = size, height = h, width = w;
    }
    size_t lda = (size_t)(a_transposed ? M : K), ldb = (size_t)(b_transposed ? K : N);
#pragma omp parallel for collapse(2) schedule(static)
    for (int i = 0; i < M; i += height)
        for (int j = 0; j < N; j += width)
            matmul_piece(min_int(height, M - i), min_int(width, N - j), K, a + (size_t)i * (a_transposed ? 1 : lda), lda, a_transposed,
                         b + (size_t)j * (b_transposed ? ldb : 1), ldb, b_transposed, c + (size_t)i * N + j, (size_t)N, add);
}

// ---------------------------------------------------------------------------
// 2 Layers: each forward is followed by its backward

// e^x within 2 units in the last place for x in [-87, 88], and the value at the nearer end beyond: 2e-38 serves as 0. In
// operations that compilers turn into vector instructions, where libm's exp is a call for each element. With
// x = n ln 2 + r, |r| <= ln 2 / 2: e^r by its series, whose next term is below 1e-8, and 2^n by its bits. NaN stays NaN.
static inline float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    union { float value; uint32_t bits; } power = {x * 1.44269504f + 12582912.0f};  // + 1.5 * 2^23: the low bits are now n
    float n = power.value - 12582912.0f;
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln 2 in two parts: the first product is exact
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720 + r * (1.0f / 5040)))))));
    power.bits = (power.bits + 127) << 23;  // the float 2^n
    return p * power.value;
}

// The largest of x (n) and `max`, in lanes: compilers turn one running maximum into vector instructions only if told that
// no number is NaN. NaNs are ignored.
static inline float largest(const float *x, int n, float max) {
    float lane[16];
    int i = 0;
    for (int k = 0; k < 16; k++) lane[k] = max;
    for (; i + 16 <= n; i += 16)
#pragma omp simd
        for (int k = 0; k < 16; k++) lane[k] = x[i + k] > lane[k] ? x[i + k] : lane[k];
    for (; i < n; i++) lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    for (int k = 1; k < 16; k++) lane[0] = lane[k] > lane[0] ? lane[k] : lane[0];
    return lane[0];
}

// out (N, C) = wte[token] + wpe[position]. tokens (B, T), wte (V, C), wpe (T, C).
static void embedding_forward(float *out, const int *tokens, const float *wte, const float *wpe, int B, int T, int C) {
#pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        const float *token = wte + (size_t)tokens[n] * C, *position = wpe + (size_t)(n % T) * C;
        for (int c = 0; c < C; c++) out[(size_t)n * C + c] = token[c] + position[c];
    }
}

// Sums over all rows are shared out by columns: a thread takes COLUMNS of them, which are 4 cache lines.
enum { COLUMNS = 64 };

// dwte += and dwpe (longest, C) (+)= dout (N, C), each row to its token's and its position's.
static void embedding_backward(float *dwte, float *dwpe, const float *dout, const int *tokens, int B, int T, int C, int longest,
                               bool add) {
    if (!add) memset(dwpe, 0, (size_t)longest * C * sizeof(float));
#pragma omp parallel for
    for (int first = 0; first < C; first += COLUMNS)
        for (int n = 0; n < B * T; n++)
            for (int c = first; c < min_int(C, first + COLUMNS); c++) {
                dwte[(size_t)tokens[n] * C + c] += dout[(size_t)n * C + c];
                dwpe[(size_t)(n % T) * C + c] += dout[(size_t)n * C + c];
            }
}

// out = (x - mean) * rstd * weight + bias for each row of x (N, C); rstd = 1 / sqrt(variance + 1e-5). mean, rstd (N).
static void layernorm_forward(float *out, float *mean, float *rstd, const float *x, const float *weight, const float *bias,
                              int N, int C) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *row = x + (size_t)n * C;
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; c++) sum += row[c];
        float m = sum / (float)C;
#pragma omp simd reduction(+ : squares)
        for (int c = 0; c < C; c++) squares += (row[c] - m) * (row[c] - m);
        float r = 1.0f / sqrtf(squares / (float)C + 1e-5f);
        for (int c = 0; c < C; c++) out[(size_t)n * C + c] = (row[c] - m) * r * weight[c] + bias[c];
        mean[n] = m;
        rstd[n] = r;
    }
}

// dx (N, C) (+)=, dweight (C) (+)=, dbias (C) (+)=, from dout (N, C). With xhat = (x - mean) rstd and g = dout weight:
// dx = rstd (g - mean(g) - xhat mean(g xhat)).
static void layernorm_backward(float *dx, bool add_dx, float *dweight, float *dbias, const float *dout, const float *x,
                               const float *weight, const float *mean, const float *rstd, int N, int C, bool add) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *row = x + (size_t)n * C, *drow = dout + (size_t)n * C;
        float m = mean[n], r = rstd[n], sum = 0, product_sum = 0;
#pragma omp simd reduction(+ : sum, product_sum)
        for (int c = 0; c < C; c++) {
            float g = drow[c] * weight[c];
            sum += g;
            product_sum += g * (row[c] - m) * r;
        }
        sum /= (float)C;
        product_sum /= (float)C;
        float *out = dx + (size_t)n * C;
        for (int c = 0; c < C; c++) {
            float value = (drow[c] * weight[c] - sum - (row[c] - m) * r * product_sum) * r;
            out[c] = add_dx ? out[c] + value : value;
        }
    }
#pragma omp parallel for
    for (int first = 0; first < C; first += COLUMNS) {
        int width = min_int(COLUMNS, C - first);
        float dw[COLUMNS] = {0}, db[COLUMNS] = {0};
        for (int n = 0; n < N; n++) {
            const float *row = x + (size_t)n * C + first, *drow = dout + (size_t)n * C + first;
            for (int c = 0; c < width; c++) {
                dw[c] += drow[c] * (row[c] - mean[n]) * rstd[n];
                db[c] += drow[c];
            }
        }
        for (int c = 0; c < width; c++) {
            dweight[first + c] = add ? dweight[first + c] + dw[c] : dw[c];
            dbias[first + c] = add ? dbias[first + c] + db[c] : db[c];
        }
    }
}

// out (N, OC) = x (N, C) weight (C, OC) + bias (OC) + residual (N, OC); residual may be NULL. 2 N C OC FLOPs.
static void linear_forward(float *out, const float *x, const float *weight, const float *bias, const float *residual,
                           int N, int C, int OC) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        float *row = out + (size_t)n * OC;
        if (residual) for (int c = 0; c < OC; c++) row[c] = residual[(size_t)n * OC + c] + bias[c];
        else memcpy(row, bias, (size_t)OC * sizeof(float));
    }
    matmul(out, x, false, weight, false, N, OC, C, true);
}

// dx (N, C) = dout weightᵀ; dweight (C, OC) (+)= xᵀ dout; dbias (OC) (+)= column sums of dout (N, OC).
static void linear_backward(float *dx, float *dweight, float *dbias, const float *dout, const float *x, const float *weight,
                            int N, int C, int OC, bool add) {
    matmul(dx, dout, false, weight, true, N, C, OC, false);
    matmul(dweight, x, true, dout, false, C, OC, N, add);
#pragma omp parallel for
    for (int first = 0; first < OC; first += COLUMNS) {
        int width = min_int(COLUMNS, OC - first);
        float sum[COLUMNS] = {0};
        for (int n = 0; n < N; n++)
            for (int c = 0; c < width; c++) sum[c] += dout[(size_t)n * OC + first + c];
        for (int c = 0; c < width; c++) dbias[first + c] = add ? dbias[first + c] + sum[c] : sum[c];
    }
}

// tanh(u) for GELU's u = sqrt(2/pi) (x + 0.044715 x^3).
static inline float gelu_tanh(float x) {
    float u = 0.79788456f * (x + 0.044715f * x * x * x);
    return 1.0f - 2.0f / (exp_fast(2.0f * u) + 1.0f);
}

// out = x/2 (1 + tanh(u)), the tanh form of GELU that GPT-2 has.
static void gelu_forward(float *out, const float *x, size_t count) {
#pragma omp parallel for simd
    for (size_t i = 0; i < count; i++) out[i] = 0.5f * x[i] * (1.0f + gelu_tanh(x[i]));
}

// dx = dout * gelu'(x); dx may be dout.
static void gelu_backward(float *dx, const float *dout, const float *x, size_t count) {
#pragma omp parallel for simd
    for (size_t i = 0; i < count; i++) {
        float t = gelu_tanh(x[i]), du = 0.79788456f * (1.0f + 3.0f * 0.044715f * x[i] * x[i]);
        dx[i] = dout[i] * (0.5f * (1.0f + t) + 0.5f * x[i] * (1.0f - t * t) * du);
    }
}

// Cross entropy of each row of logits (N, V) against targets (N). losses (N). Where dscale is not 0, the logits become their
// own gradient in place: (softmax - one at the target) * dscale.
static void crossentropy(float *losses, float *logits, const int *targets, int N, int V, float dscale) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        float *row = logits + (size_t)n * V, max = largest(row, V, -FLT_MAX), sum = 0, at_target = row[targets[n]];
        if (dscale == 0) {
#pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) sum += exp_fast(row[v] - max);
        } else {
#pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) sum += row[v] = exp_fast(row[v] - max);
            float scale = dscale / sum;
            for (int v = 0; v < V; v++) row[v] *= scale;
            row[targets[n]] -= dscale;
        }
        losses[n] = logf(sum) + max - at_target;
    }
}

// ---------------------------------------------------------------------------
// 3 Flash attention
//
// Causal attention of one head, with its queries, keys and values q, k, v (T, HS):
//   s = scale q kᵀ,   p = softmax of each row of s over the keys up to its own position,   o = p v,   scale = 1 / sqrt(HS).
// The plain way, for one query t:
//
//   for (j = 0; j <= t; j++) s[j] = scale * dot(q[t], k[j]);
//   max = largest of s;   sum = 0;
//   for (j = 0; j <= t; j++) sum += p[j] = exp(s[j] - max);       // minus max: the same quotient, and no overflow
//   for (j = 0; j <= t; j++) o += p[j] / sum * v[j];
//
// All queries together make s and p of T x T numbers: at T = 16384 a gigabyte each, for every head. Flash attention never
// has them in memory. It computes them in tiles of TILE queries by TILE keys and keeps, for each query, three running values:
//   m, the largest score so far;   l, the sum of exp(s - m) so far;   o, the sum of exp(s - m) v so far.
// If a later tile has a larger score, m grows, and what was summed with the old m is corrected by the factor
// exp(m_old - m_new). This is the online softmax. One query, two tiles of one key each, scores 1 and 3:
//   after the first tile:    m = 1,   l = 1,                   o = v1
//   after the second tile:   m = 3,   l = 1 exp(1 - 3) + 1,    o = v1 exp(1 - 3) + v2
// In the end o / l is the output: the same as above but for rounding.
//
// The backward needs p again, tile by tile. So the forward leaves one number for each query besides its output, the
// log-sum-exp lse = m + log(l), because exp(s - lse) = exp(s - m) / l = p. Recomputing p costs one more matrix product, and
// saves memory of T x T.
//
// Tiles of causal attention, x computed, . never looked at:
//
//             keys ->
//   queries   x . . .    The forward takes a row of tiles at a time: m, l and o of its queries stay in the cache.
//      |      x x . .    The backward takes a column at a time: dk and dv of its keys stay, and dq, a sum along a row,
//      v      x x x .    is added to in memory.
//             x x x x
//
// From: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention" (2022);
// Dao, "FlashAttention-2" (2023), whose order of loops this is.
//
// From sections 1 and 2 it takes vectors (VECTOR floats, NR = 2 of them), exp_fast and largest.
//
// Where things are: a row of qkv holds q of all heads, then k, then v. Head h has its q at h HS, its k C further, its v
// 2 C further; the next position is 3 C further.

enum { TILE = 64, MAX_HS = 128 };
// A tile of queries, keys or the like is (TILE, W) or, transposed, (W, TILE), W being HS rounded up to a multiple of NR; one of
// scores is (TILE, TILE). Each thread has its own, on the heap: they are larger than some systems' stacks.
typedef float Tile[TILE * MAX_HS];
_Static_assert(TILE % NR == 0 && TILE % 4 == 0 && MAX_HS % NR == 0, "tiles are whole blocks of tile_product");
_Static_assert(TILE <= MAX_HS, "a tile of scores fits into a Tile");

// tile (TILE, W) = scale * rows of source; what is beyond `rows` and HS is zero, so that products need no edges.
static void tile_load(float *tile, const float *source, size_t stride, int rows, int HS, int W, float scale) {
    memset(tile, 0, (size_t)TILE * W * sizeof(float));
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < HS; d++) tile[i * W + d] = scale * source[i * stride + d];
}

static void tile_transpose(float *out, const float *tile, int W) {  // (TILE, W) to (W, TILE)
    for (int i = 0; i < TILE; i++)
        for (int d = 0; d < W; d++) out[d * TILE + i] = tile[i * W + d];
}

// c (M, N) += a b, for M a multiple of 4 and N of NR. b is (K, N); element (i, k) of a is a[i * a_row + k * a_step], so that
// a transposed a is a matter of the two strides. Four rows by two vectors of sums stay in registers.
static void tile_product(float *c, const float *a, int a_row, int a_step, const float *b, int M, int N, int K) {
    for (int i = 0; i < M; i += 4)
        for (int j = 0; j < N; j += NR) {
            Vector sum[4][2];
            for (int r = 0; r < 4; r++) memcpy(sum[r], c + (i + r) * N + j, sizeof sum[r]);
            for (int k = 0; k < K; k++) {
                Vector b0 = *(const Vector *)(b + k * N + j), b1 = *(const Vector *)(b + k * N + j + VECTOR);
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) {
                    float x = a[(i + r) * a_row + k * a_step];
                    sum[r][0] += x * b0;
                    sum[r][1] += x * b1;
                }
            }
            for (int r = 0; r < 4; r++) memcpy(c + (i + r) * N + j, sum[r], sizeof sum[r]);
        }
}

// How many keys of the tile that begins at k0 the query at position t sees: those up to its own position.
static int keys_seen(int t, int k0) { return min_int(TILE, t - k0 + 1); }

// One tile of queries, from position q0 on, of one head: out (T rows of HS, C apart) and lse (T), from qkv as above.
static void attention_forward_tile(float *out, float *lse, const float *qkv, int T, int C, int HS, int q0, Tile *tiles) {
    const float *queries = qkv, *keys = queries + C, *values = keys + C;
    float *q = tiles[0], *k = tiles[1], *kt = tiles[2], *v = tiles[3], *o = tiles[4], *s = tiles[5];
    float m[TILE], l[TILE] = {0}, scale = 1.0f / sqrtf((float)HS);
    int W = round_up(HS, NR), q_rows = min_int(TILE, T - q0);
    size_t stride = 3 * (size_t)C;  // from a position to the next in qkv
    for (int i = 0; i < TILE; i++) m[i] = -FLT_MAX;  // nothing seen yet: l and o are 0, and the first correction changes nothing
    memset(o, 0, (size_t)TILE * W * sizeof(float));
    tile_load(q, queries + q0 * stride, stride, q_rows, HS, W, scale);

    for (int k0 = 0; k0 <= q0; k0 += TILE) {  // keys after the last query of the tile are never seen
        int k_rows = min_int(TILE, T - k0);
        tile_load(k, keys + k0 * stride, stride, k_rows, HS, W, 1.0f);
        tile_load(v, values + k0 * stride, stride, k_rows, HS, W, 1.0f);
        tile_transpose(kt, k, W);
        memset(s, 0, TILE * TILE * sizeof(float));
        tile_product(s, q, W, 1, kt, TILE, TILE, W);  // s = q kᵀ, scaled through q

        for (int i = 0; i < q_rows; i++) {  // the online softmax: s becomes exp(s - m); rows beyond q_rows are never read
            int seen = keys_seen(q0 + i, k0);
            float *row = s + i * TILE, m_new = largest(row, seen, m[i]), sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < seen; j++) sum += row[j] = exp_fast(row[j] - m_new);
            for (int j = seen; j < TILE; j++) row[j] = 0;
            float correction = exp_fast(m[i] - m_new);
            l[i] = l[i] * correction + sum;
            m[i] = m_new;
            for (int d = 0; d < W; d++) o[i * W + d] *= correction;
        }
        tile_product(o, s, TILE, 1, v, TILE, W, TILE);  // o += exp(s - m) v
    }
    for (int i = 0; i < q_rows; i++) {
        for (int d = 0; d < HS; d++) out[(size_t)(q0 + i) * C + d] = o[i * W + d] / l[i];
        lse[q0 + i] = m[i] + logf(l[i]);
    }
}

// out (B, T, NH, HS), lse (B, NH, T) from qkv (B, T, 3, NH, HS). 2 B NH T^2 HS FLOPs; no memory that grows with T^2.
static void attention_forward(float *out, float *lse, const float *qkv, int B, int T, int NH, int HS) {
    int C = NH * HS;
#pragma omp parallel
    {
        Tile *tiles = allocate(6, sizeof *tiles, "tiles of attention");
#pragma omp for collapse(3) schedule(dynamic)
        for (int b = 0; b < B; b++)
            for (int h = 0; h < NH; h++)
                for (int q0 = 0; q0 < T; q0 += TILE)
                    attention_forward_tile(out + (size_t)b * T * C + h * HS, lse + ((size_t)b * NH + h) * T,
                                           qkv + (size_t)b * T * 3 * C + h * HS, T, C, HS, q0, tiles);
        free(tiles);
    }
}

// The backward of one head: dqkv from dout and what the forward kept, qkv, out and lse.
//
// o = p v gives dv = pᵀ do and dp = do vᵀ. The softmax p_j = exp(s_j) / sum of exp(s) has the derivatives
// ∂p_j/∂s_i = p_j ([i = j] - p_i), hence ds_i = sum over j of dp_j ∂p_j/∂s_i = p_i (dp_i - delta) with
// delta = sum over j of p_j dp_j. Since dp_j = do · v_j and o = sum over j of p_j v_j, delta is do · o: it is computed before
// the loops, without p. Then s = scale q kᵀ gives dq = scale ds k and dk = scale dsᵀ q.
static void attention_backward_head(float *dqkv, const float *dout, const float *qkv, const float *out, const float *lse,
                                    int T, int C, int HS, Tile *tiles, float *delta) {
    const float *queries = qkv, *keys = queries + C, *values = keys + C;
    float *dqueries = dqkv, *dkeys = dqueries + C, *dvalues = dkeys + C;
    float *q = tiles[0], *k = tiles[1], *v = tiles[2], *kt = tiles[3], *vt = tiles[4], *d_o = tiles[5];  // d_o: `do` is C's
    float *dq = tiles[6], *dk = tiles[7], *dv = tiles[8], *p = tiles[9], *ds = tiles[10];  // p is s first, and ds is dp first
    float scale = 1.0f / sqrtf((float)HS);
    int W = round_up(HS, NR);
    size_t stride = 3 * (size_t)C;
    for (int t = 0; t < T; t++) {
        delta[t] = 0;
        for (int d = 0; d < HS; d++) delta[t] += dout[(size_t)t * C + d] * out[(size_t)t * C + d];
        memset(dqueries + t * stride, 0, (size_t)HS * sizeof(float));
    }

    for (int k0 = 0; k0 < T; k0 += TILE) {
        int k_rows = min_int(TILE, T - k0);
        tile_load(k, keys + k0 * stride, stride, k_rows, HS, W, 1.0f);
        tile_load(v, values + k0 * stride, stride, k_rows, HS, W, 1.0f);
        tile_transpose(kt, k, W);
        tile_transpose(vt, v, W);
        memset(dk, 0, (size_t)TILE * W * sizeof(float));
        memset(dv, 0, (size_t)TILE * W * sizeof(float));

        for (int q0 = k0; q0 < T; q0 += TILE) {  // queries before the first key of the tile see none of it
            int q_rows = min_int(TILE, T - q0);
            tile_load(q, queries + q0 * stride, stride, q_rows, HS, W, scale);
            tile_load(d_o, dout + (size_t)q0 * C, (size_t)C, q_rows, HS, W, 1.0f);
            memset(p, 0, TILE * TILE * sizeof(float));
            memset(ds, 0, TILE * TILE * sizeof(float));
            memset(dq, 0, (size_t)TILE * W * sizeof(float));
            tile_product(p, q, W, 1, kt, TILE, TILE, W);     // s = q kᵀ, scaled through q
            tile_product(ds, d_o, W, 1, vt, TILE, TILE, W);  // dp = do vᵀ
            for (int i = 0; i < TILE; i++) {
                int t = q0 + i, seen = i < q_rows ? keys_seen(t, k0) : 0;
                float *p_row = p + i * TILE, *ds_row = ds + i * TILE;
                float t_lse = seen ? lse[t] : 0, t_delta = seen ? delta[t] : 0;
                for (int j = 0; j < seen; j++) {
                    p_row[j] = exp_fast(p_row[j] - t_lse);         // p = exp(s - lse)
                    ds_row[j] = p_row[j] * (ds_row[j] - t_delta);  // ds = p (dp - delta)
                }
                for (int j = seen; j < TILE; j++) p_row[j] = ds_row[j] = 0;
            }
            tile_product(dv, p, 1, TILE, d_o, TILE, W, TILE);  // dv += pᵀ do
            tile_product(dk, ds, 1, TILE, q, TILE, W, TILE);   // dk += dsᵀ q, scaled through q
            tile_product(dq, ds, TILE, 1, k, TILE, W, TILE);   // dq = ds k
            for (int i = 0; i < q_rows; i++)
                for (int d = 0; d < HS; d++) dqueries[(q0 + i) * stride + d] += scale * dq[i * W + d];
        }
        for (int j = 0; j < k_rows; j++) {
            memcpy(dkeys + (k0 + j) * stride, dk + j * W, (size_t)HS * sizeof(float));
            memcpy(dvalues + (k0 + j) * stride, dv + j * W, (size_t)HS * sizeof(float));
        }
    }
}

// dqkv (B, T, 3, NH, HS) from dout (B, T, NH, HS), qkv, out and lse. 5 B NH T^2 HS FLOPs. A thread takes a whole head, so that
// dq, to which every tile of keys adds, is its own: at most B NH threads have work.
static void attention_backward(float *dqkv, const float *dout, const float *qkv, const float *out, const float *lse,
                               int B, int T, int NH, int HS) {
    int C = NH * HS;
#pragma omp parallel
    {
        Tile *tiles = allocate(11, sizeof *tiles, "tiles of attention");
        float *delta = allocate((size_t)T, sizeof(float), "delta of a head");
#pragma omp for collapse(2) schedule(dynamic)
        for (int b = 0; b < B; b++)
            for (int h = 0; h < NH; h++) {
                size_t at = (size_t)b * T * 3 * C + h * HS, out_at = (size_t)b * T * C + h * HS;
                attention_backward_head(dqkv + at, dout + out_at, qkv + at, out + out_at, lse + ((size_t)b * NH + h) * T,
                                        T, C, HS, tiles, delta);
            }
        free(delta);
        free(tiles);
    }
}

// ---------------------------------------------------------------------------
// 4 The model

typedef struct {  // one block's parameters, in the order of gpt/model.h's table
    float *ln1_w, *ln1_b;        // (C)
    float *qkv_w, *qkv_b;        // (C, 3C), (3C)
    float *proj_w, *proj_b;      // (C, C), (C)
    float *ln2_w, *ln2_b;        // (C)
    float *fc_w, *fc_b;          // (C, 4C), (4C)
    float *fcproj_w, *fcproj_b;  // (4C, C), (C)
} Layer;

typedef struct {
    float *wte;            // (V, C), the embedding of tokens and, transposed, the output head
    float *wpe;            // (T, C)
    Layer *layers;         // L of them
    float *lnf_w, *lnf_b;  // (C)
} Parameters;

typedef struct {  // what one block's backward needs of its forward
    float *ln1, *mean1, *rstd1;  // (N, C), (N), (N)
    float *qkv;                  // (N, 3C)
    float *att, *lse;            // (N, C), (B, NH, T)
    float *res_att;              // (N, C): the residual stream after attention
    float *ln2, *mean2, *rstd2;
    float *fc, *gelu;            // (N, 4C)
    float *res_mlp;              // (N, C): and after the MLP, the block's output
} LayerActivations;

typedef struct {
    GptConfig config;
    int B;                        // largest batch
    void *block;                  // the one allocation for all arrays
    size_t parameters;            // number of them
    GptTensor *tensors;
    ModelState state;             // weights, and AdamW's m and v
    float *grads;
    Parameters weight, grad;      // the single tensors of state.weights and grads
    LayerActivations *acts;       // L of them
    float *embedded;              // (N, C)
    float *lnf, *meanf, *rstdf;   // (N, C), (N), (N)
    float *losses;                // (N)
    float *logits;                // (head_rows, V)
    int head_rows;
    float *dlnf, *dx;             // (N, C), (N, C): of the final layer norm, of the residual stream
    float *dc, *d4c;              // (N, C), (N, 4C): of whatever is C or 4C wide inside a block; dqkv, 3C, too
    double *norms;                // partial sums of the gradient's norm
} Model;

enum { HEAD_FLOATS = 1 << 24, NORM_CHUNK = 1 << 16 };  // logits at once: 64 MiB; elements in a partial sum

static Parameters parameters_of(GptConfig c, const GptTensor *tensors, float *array) {
    Parameters p = {array + tensors[0].offset, array + tensors[1].offset, NULL, NULL, NULL};
    p.layers = allocate((size_t)c.layers, sizeof(Layer), "pointers to the layers");
    _Static_assert(sizeof(Layer) == TENSORS_PER_LAYER * sizeof(float *), "Layer has a pointer for each tensor of the table");
    float **pointer = (float **)p.layers;
    for (int i = 0; i < c.layers * TENSORS_PER_LAYER; i++) pointer[i] = array + tensors[2 + i].offset;
    p.lnf_w = array + tensors[gpt_tensor_count(c) - 2].offset;
    p.lnf_b = array + tensors[gpt_tensor_count(c) - 1].offset;
    return p;
}

// The next `count` floats of the one block that holds everything, on a cache line. Without a block (base NULL) it only counts.
typedef struct { float *base; size_t used; } Arena;
enum { CACHE_LINE = 16 };  // floats
static float *arena_take(Arena *arena, size_t count) {
    float *at = arena->base ? arena->base + arena->used : NULL;
    arena->used += (count + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    return at;
}

// Lays out all arrays of a model, for training or only for generating, from `base` on. Returns the number of floats.
static size_t model_layout(Model *m, float *base, bool training) {
    Arena arena = {base, 0};
    size_t N = (size_t)m->B * (size_t)m->config.seq, C = (size_t)m->config.channels, heads = (size_t)m->config.heads;
    size_t V = (size_t)m->config.vocab;
    m->state.weights = arena_take(&arena, m->parameters);
    m->embedded = arena_take(&arena, N * C);
    for (int l = 0; l < m->config.layers; l++) {
        LayerActivations *a = &m->acts[l];
        if (!training && l > 0) { *a = m->acts[0]; continue; }  // nothing is kept for a backward
        a->ln1 = arena_take(&arena, N * C), a->mean1 = arena_take(&arena, N), a->rstd1 = arena_take(&arena, N);
        a->qkv = arena_take(&arena, N * 3 * C);
        a->att = arena_take(&arena, N * C), a->lse = arena_take(&arena, N * heads);
        a->res_att = arena_take(&arena, N * C);
        a->ln2 = arena_take(&arena, N * C), a->mean2 = arena_take(&arena, N), a->rstd2 = arena_take(&arena, N);
        a->fc = arena_take(&arena, N * 4 * C), a->gelu = arena_take(&arena, N * 4 * C);
        a->res_mlp = arena_take(&arena, N * C);
    }
    m->lnf = arena_take(&arena, N * C), m->meanf = arena_take(&arena, N), m->rstdf = arena_take(&arena, N);
    m->losses = arena_take(&arena, N);
    m->head_rows = (int)(V * N < HEAD_FLOATS ? N : HEAD_FLOATS / V > 0 ? HEAD_FLOATS / V : 1);
    m->logits = arena_take(&arena, (size_t)m->head_rows * V);
    if (training) {
        m->grads = arena_take(&arena, m->parameters);
        m->state.m = arena_take(&arena, m->parameters);
        m->state.v = arena_take(&arena, m->parameters);
        m->dlnf = arena_take(&arena, N * C), m->dx = arena_take(&arena, N * C);
        m->dc = arena_take(&arena, N * C), m->d4c = arena_take(&arena, N * 4 * C);
        m->norms = (double *)arena_take(&arena, 2 * (m->parameters / NORM_CHUNK + 1));
    }
    return arena.used;
}

// Prepares a model without its memory, whose size is returned in bytes.
static size_t model_plan(Model *m, GptConfig config, int B, bool training) {
    memset(m, 0, sizeof *m);
    m->config = config;
    m->B = B;
    m->tensors = gpt_tensors(config, &m->parameters);
    m->acts = allocate((size_t)config.layers, sizeof *m->acts, "pointers to the activations");
    return model_layout(m, NULL, training) * sizeof(float);
}

static void model_allocate(Model *m, bool training) {
    m->block = allocate(model_layout(m, NULL, training) + CACHE_LINE, sizeof(float), "the model");
    float *base = m->block;
    while ((uintptr_t)base % (CACHE_LINE * sizeof(float))) base++;
    model_layout(m, base, training);
    m->weight = parameters_of(m->config, m->tensors, m->state.weights);
    if (training) m->grad = parameters_of(m->config, m->tensors, m->grads);
}

static void model_free(Model *m) {
    free(m->block);
    free(m->weight.layers);
    free(m->grad.layers);
    free(m->acts);
    free(m->tensors);
}

// Everything up to the final layer norm, for tokens (B, T).
static void model_forward(Model *m, const int *tokens, int B, int T) {
    int C = m->config.channels, NH = m->config.heads, HS = C / NH, N = B * T;
    const float *x = m->embedded;
    embedding_forward(m->embedded, tokens, m->weight.wte, m->weight.wpe, B, T, C);
    for (int l = 0; l < m->config.layers; l++) {
        const Layer *w = &m->weight.layers[l];
        LayerActivations *a = &m->acts[l];
        layernorm_forward(a->ln1, a->mean1, a->rstd1, x, w->ln1_w, w->ln1_b, N, C);
        linear_forward(a->qkv, a->ln1, w->qkv_w, w->qkv_b, NULL, N, C, 3 * C);
        attention_forward(a->att, a->lse, a->qkv, B, T, NH, HS);
        linear_forward(a->res_att, a->att, w->proj_w, w->proj_b, x, N, C, C);
        layernorm_forward(a->ln2, a->mean2, a->rstd2, a->res_att, w->ln2_w, w->ln2_b, N, C);
        linear_forward(a->fc, a->ln2, w->fc_w, w->fc_b, NULL, N, C, 4 * C);
        gelu_forward(a->gelu, a->fc, (size_t)N * 4 * C);
        linear_forward(a->res_mlp, a->gelu, w->fcproj_w, w->fcproj_b, a->res_att, N, 4 * C, C);
        x = a->res_mlp;
    }
    layernorm_forward(m->lnf, m->meanf, m->rstdf, x, m->weight.lnf_w, m->weight.lnf_b, N, C);
}

// The output head and the loss of N = B T targets, in chunks of rows, so that the logits of a whole batch never exist at once.
// Where dscale is not 0 each chunk goes on to the gradients, dlnf and dwte (+)=. Returns the sum of the losses.
static double model_loss(Model *m, const int *targets, int N, float dscale, bool add) {
    int C = m->config.channels, V = m->config.vocab;
    double sum = 0;
    for (int first = 0; first < N; first += m->head_rows) {
        int rows = min_int(m->head_rows, N - first);
        const float *x = m->lnf + (size_t)first * C;
        matmul(m->logits, x, false, m->weight.wte, true, rows, V, C, false);
        crossentropy(m->losses + first, m->logits, targets + first, rows, V, dscale);
        if (dscale == 0) continue;
        matmul(m->dlnf + (size_t)first * C, m->logits, false, m->weight.wte, false, rows, C, V, false);
        matmul(m->grad.wte, m->logits, true, x, false, V, C, rows, add || first > 0);
    }
    for (int n = 0; n < N; n++) sum += m->losses[n];
    return sum;
}

// All other gradients, (+)=, after model_forward and model_loss of the same tokens.
static void model_backward(Model *m, const int *tokens, int B, int T, bool add) {
    int C = m->config.channels, NH = m->config.heads, HS = C / NH, N = B * T, L = m->config.layers;
    float *dx = m->dx, *dc = m->dc, *d4c = m->d4c;
    layernorm_backward(dx, false, m->grad.lnf_w, m->grad.lnf_b, m->dlnf, m->acts[L - 1].res_mlp, m->weight.lnf_w, m->meanf, m->rstdf,
                       N, C, add);
    for (int l = L - 1; l >= 0; l--) {
        const Layer *w = &m->weight.layers[l], *g = &m->grad.layers[l];
        const LayerActivations *a = &m->acts[l];
        const float *x = l > 0 ? m->acts[l - 1].res_mlp : m->embedded;
        linear_backward(d4c, g->fcproj_w, g->fcproj_b, dx, a->gelu, w->fcproj_w, N, 4 * C, C, add);
        gelu_backward(d4c, d4c, a->fc, (size_t)N * 4 * C);
        linear_backward(dc, g->fc_w, g->fc_b, d4c, a->ln2, w->fc_w, N, C, 4 * C, add);
        layernorm_backward(dx, true, g->ln2_w, g->ln2_b, dc, a->res_att, w->ln2_w, a->mean2, a->rstd2, N, C, add);
        linear_backward(dc, g->proj_w, g->proj_b, dx, a->att, w->proj_w, N, C, C, add);
        attention_backward(d4c, dc, a->qkv, a->att, a->lse, B, T, NH, HS);
        linear_backward(dc, g->qkv_w, g->qkv_b, d4c, a->ln1, w->qkv_w, N, C, 3 * C, add);
        layernorm_backward(dx, true, g->ln1_w, g->ln1_b, dc, x, w->ln1_w, a->mean1, a->rstd1, N, C, add);
    }
    embedding_backward(m->grad.wte, m->grad.wpe, dx, tokens, B, T, C, m->config.seq, add);
}

// ---------------------------------------------------------------------------
// 5 AdamW

// The norm of all gradients together. Chunks of a fixed size are summed in a fixed order.
static double gradient_norm(const Model *m) {
    int chunks = (int)((m->parameters + NORM_CHUNK - 1) / NORM_CHUNK);
#pragma omp parallel for
    for (int chunk = 0; chunk < chunks; chunk++) {
        size_t first = (size_t)chunk * NORM_CHUNK, end = first + NORM_CHUNK < m->parameters ? first + NORM_CHUNK : m->parameters;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = first; i < end; i++) sum += (double)m->grads[i] * (double)m->grads[i];
        m->norms[chunk] = sum;
    }
    double sum = 0;
    for (int chunk = 0; chunk < chunks; chunk++) sum += m->norms[chunk];
    return sqrt(sum);
}

// Update number `update`, from 1 (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019). Gradients are
// multiplied by grad_scale, which clips them. Decay is on matrices and embeddings only.
static void adamw(Model *m, const Options *o, double rate, int64_t update, double grad_scale) {
    float beta1 = (float)o->beta1, beta2 = (float)o->beta2, eps = (float)o->eps, scale = (float)grad_scale;
    float step_size = (float)(rate / (1 - pow(o->beta1, (double)update)));
    float v_scale = (float)(1 / (1 - pow(o->beta2, (double)update)));
#pragma omp parallel
    for (int t = 0; t < gpt_tensor_count(m->config); t++) {
        size_t at = m->tensors[t].offset;
        float *w = m->state.weights + at, *m1 = m->state.m + at, *m2 = m->state.v + at;
        const float *grad = m->grads + at;
        float keep = (float)(1 - rate * (m->tensors[t].decay ? o->weight_decay : 0));
#pragma omp for simd nowait  // tensors are independent
        for (size_t i = 0; i < m->tensors[t].size; i++) {
            float g = grad[i] * scale;
            m1[i] = beta1 * m1[i] + (1 - beta1) * g;
            m2[i] = beta2 * m2[i] + (1 - beta2) * g * g;
            w[i] = keep * w[i] - step_size * m1[i] / (sqrtf(m2[i] * v_scale) + eps);
        }
    }
}

// ---------------------------------------------------------------------------
// 6 Generating text

// The logits (V) that follow `count` tokens. The model computes all of them anew for each token: no keys and values are kept, which
// is simple, and fast enough for a sample.
static const float *next_logits(void *model, const int *tokens, int count) {
    Model *m = model;
    model_forward(m, tokens, 1, count);
    const float *last = m->lnf + (size_t)(count - 1) * (size_t)m->config.channels;
    matmul(m->logits, last, false, m->weight.wte, true, 1, m->config.vocab, m->config.channels, false);
    return m->logits;
}

// ---------------------------------------------------------------------------
// 7 Training

// Mean loss over windows spread evenly over the validation data. False after fail().
static bool validate(Model *m, const Run *run, Batch *batch, double *loss) {
    size_t T = (size_t)run->config.seq, windows = run_validation_windows(run, m->B);
    *loss = 0;
    for (size_t first = 0; first < windows; first += (size_t)m->B) {
        int B = windows - first < (size_t)m->B ? (int)(windows - first) : m->B;
        if (!batch_read(batch, run, false, first, windows, B)) return false;
        model_forward(m, batch->inputs, B, (int)T);
        *loss += model_loss(m, batch->targets, B * (int)T, 0, false);
    }
    *loss /= (double)(windows * T);
    return true;
}

// One update: forward and backward of all its batches, clipping, AdamW. A loss or gradient that is not finite leaves
// everything as it was but the counters; *skipped says so. False after fail(), with nothing changed.
static bool train_step(Model *m, Run *run, Batch *batch, double *loss, double *norm, double rate, bool *skipped) {
    const Options *o = &run->options;
    int T = m->config.seq, N = m->B * T;
    *loss = 0;
    for (int i = 0; i < run->accumulation; i++) {
        if (!batch_read(batch, run, true, run->progress.samples + (uint64_t)i * (uint64_t)m->B, 0, m->B)) return false;
        model_forward(m, batch->inputs, m->B, T);
        *loss += model_loss(m, batch->targets, N, 1.0f / ((float)N * (float)run->accumulation), i > 0);
        model_backward(m, batch->inputs, m->B, T, i > 0);
    }
    *loss /= (double)N * run->accumulation;
    *norm = gradient_norm(m);
    *skipped = !isfinite(*loss) || !isfinite(*norm);
    double grad_scale = o->grad_clip > 0 && *norm > o->grad_clip ? o->grad_clip / *norm : 1;
    if (*skipped) run->progress.skipped++;
    else adamw(m, o, rate, run->progress.step + 1 - run->progress.skipped, grad_scale);
    run->progress.step++;
    run->progress.samples += (uint64_t)run->accumulation * (uint64_t)m->B;
    return true;
}

// Trains from run->progress to --steps. Returns the program's exit code.
static int train(Model *m, Run *run) {
    const Options *o = &run->options;
    Progress *progress = &run->progress;
    Log log;
    int N = m->B * m->config.seq, skips = 0;
    int64_t first = progress->step, saved = first;
    Batch batch = {allocate((size_t)m->config.seq + 1, sizeof(int), "a window"), allocate((size_t)N, sizeof(int), "a batch"),
                   allocate((size_t)N, sizeof(int), "a batch")};
    if (!log_open(&log, o->out, first, o->steps, o->log_every)) die_of_failure();
    if (first >= o->steps)
        printf("the run is at step %lld of %lld already; a larger --steps trains longer\n", (long long)first, (long long)o->steps);
    bool ok = true;
    while (ok && progress->step < o->steps && !stop_requested && skips < SKIPS_TO_STOP) {
        double loss, norm, start = seconds_now(), rate = schedule_rate(&run->schedule, progress->step);
        bool skipped;
        ok = train_step(m, run, &batch, &loss, &norm, rate, &skipped);
        if (!ok) break;
        int64_t step = progress->step;
        skips = skipped ? skips + 1 : 0;
        log_step(&log, step, loss, norm, rate, seconds_now() - start, (double)N * run->accumulation, skipped);
        if (run->val.count && (step == o->steps || (o->val_every && step % o->val_every == 0))) {
            double val_loss;
            ok = validate(m, run, &batch, &val_loss);
            if (!ok) break;
            log_validation(&log, step, val_loss);
        }
        if (o->sample_every && step % o->sample_every == 0) {
            log_break(&log);
            run_write(run, *o->prompt ? o->prompt : "\n", step, stdout, next_logits, m);
        }
        if (o->save_every && step % o->save_every == 0 && step < o->steps) {
            if (checkpoint_save(o->out, m->config, o, *progress, m->state)) saved = step;
            else warn("%s; training goes on", error_text);
        }
    }
    log_break(&log);
    int status = run_end(run, m->state, ok, skips == SKIPS_TO_STOP, progress->step > saved);
    close(log.jsonl);
    free(batch.window);
    free(batch.inputs);
    free(batch.targets);
    return status;
}

#ifndef GPT2_NO_MAIN  // test_gpt2.c and dev/bench_gpt2.c include this file and have a main of their own
int main(int argc, char **argv) {
    static Run run;
    Model model;
    char arithmetic[128], memory[32];
    int status = 0;
    if (!run_setup(&run, argc, argv)) die_of_failure();
    const Options *o = &run.options;
    if (run.config.channels / run.config.heads > MAX_HS)
        die("a head has %d channels (--channels / --heads); at most %d are supported", run.config.channels / run.config.heads,
            MAX_HS);
    bool training = run.trains || o->dry_run;
    snprintf(memory, sizeof memory, "%.1f MiB", (double)model_plan(&model, run.config, training ? (int)o->batch : 1, training) / 1048576);
    matmul_start(arithmetic, sizeof arithmetic);
    if (training) run_print(&run, memory, arithmetic);
    if (o->dry_run) {
        model_free(&model);
        return run_close(&run, 0);
    }
    model_allocate(&model, training);
    if (!run_load(&run, model.state)) die_of_failure();
    if (run.trains && !run_claim_output(&run)) die_of_failure();
    catch_signals();
    if (run.trains) status = train(&model, &run);
    if (run.trains && run.prompts) putchar('\n');
    if (run.prompts && !stop_requested && !status) run_write(&run, o->prompt, run.progress.step, stdout, next_logits, &model);
    model_free(&model);
    return run_close(&run, status);
}
#endif

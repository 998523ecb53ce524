// naive: attention as its formula says, one kernel for each step, every matrix of scores written to device memory and read again.
//
//   forward: S = scale Q Kᵀ            backward: dP = dO Vᵀ
//            P = softmax(S) by rows              delta = rowsum(dO ∘ O)
//            O = P V                             dS = scale P ∘ (dP - delta)
//                                                dV = Pᵀ dO;  dQ = dS K;  dK = dSᵀ Q
//
// It is not slow on purpose: one tiled tensor-core kernel with asynchronous copies computes all six products, and softmax reads
// each row once from device memory. But S, P, dP and dS have T² elements a head. The whole square is computed, also when causal,
// where the softmax masks it. Sizes of tiles: 128 x 64 of the result a block, 32 rows a warp, 64 of the inner dimension at a time.
//
// Device memory, bytes a head: forward 12 T² (S, in fp32, and P, in bf16, each written and read; 10 T² when causal, as softmax
// reads half of S only), backward 18 T² (dP written and read, dS written and read twice, P read twice), where Q, K, V, O and their
// gradients have only 16 T HS. Workspace: 8 T². FLOPs: forward 4 T² HS, backward 8 T² HS.

#include "gpt/tile.cuh"
#include "variant.h"

// Rows of the T x T matrices are padded, so that each begins at a multiple of 16 bytes.
static size_t padded(int T) { return ((size_t)T + 7) / 8 * 8; }

// A matrix for each batch element and head, in place in a larger tensor; strides in elements.
template <typename Element> struct Matrices {
    Element *data;
    size_t batch, head, row;
    __device__ Element *at(int index, int NH) const { return data + index / NH * batch + index % NH * head; }
};

// ----------------------------------------------------------------------------
// Matrix products

enum { TILE_M = 128, TILE_N = 64, TILE_K = 64, WARPS = 4, THREADS = 32 * WARPS, WARP_M = TILE_M / WARPS / 16 };
enum { STAGE_ELEMENTS = (TILE_M + TILE_N) * TILE_K, PRODUCT_BYTES = 2 * STAGE_ELEMENTS * (int)sizeof(bf16) };

// Starts copying the ROWS x COLS part of a matrix at (first_row, first_col) to a tile; what is outside of rows x cols becomes zero.
template <int ROWS, int COLS>
DEVICE void load_part(bf16 *tile, const bf16 *matrix, size_t stride, int first_row, int first_col, int rows, int cols) {
    const bool aligned = stride % 8 == 0 && (size_t)matrix % 16 == 0;  // every chunk of a row begins at a multiple of 16 bytes
    for (int i = threadIdx.x; i < ROWS * COLS / 8; i += THREADS) {
        const int row = first_row + i / (COLS / 8), col = first_col + i % (COLS / 8) * 8;
        bf16 *to = tile + i / (COLS / 8) * COLS + (i % (COLS / 8) ^ swizzle<COLS>(i / (COLS / 8))) * 8;
        const bf16 *from = matrix + (size_t)row * stride + col;
        if (aligned && (row >= rows || col >= cols || col + 8 <= cols)) {
            const bool inside = row < rows && col < cols;
            cp_async_16(to, inside ? from : matrix, inside);
        } else {
            for (int j = 0; j < 8; j++) to[j] = row < rows && col + j < cols ? from[j] : __float2bfloat16(0.0f);
        }
    }
}

DEVICE void store_pair(float *to, float x, float y, bool second) {
    to[0] = x;
    if (second) to[1] = y;
}
DEVICE void store_pair(bf16 *to, float x, float y, bool second) {
    to[0] = __float2bfloat16(x);
    if (second) to[1] = __float2bfloat16(y);
}

// C (m x n) = scale A B for each head, the inner dimension being k. A is stored as (m, k), or as (k, m) with A_TRANS; B as (k, n),
// or as (n, k) with B_TRANS. Grid: heads · tiles of C.
template <bool A_TRANS, bool B_TRANS, typename Result>
static __global__ __launch_bounds__(THREADS) void matmul_kernel(
    Matrices<Result> C, Matrices<const bf16> A, Matrices<const bf16> B, int m, int n, int k, int NH, float scale) {
    DYNAMIC_SHARED(memory);
    const int tiles_m = (m + TILE_M - 1) / TILE_M, tiles_n = (n + TILE_N - 1) / TILE_N;
    const int head = blockIdx.x / (tiles_m * tiles_n), warp_row = warp_id() * 16 * WARP_M;
    const int first_m = blockIdx.x / tiles_n % tiles_m * TILE_M, first_n = blockIdx.x % tiles_n * TILE_N;
    const bf16 *a = A.at(head, NH), *b = B.at(head, NH);
    auto load = [&](int stage, int first_k) {
        bf16 *a_tile = (bf16 *)memory + stage * STAGE_ELEMENTS, *b_tile = a_tile + TILE_M * TILE_K;
        if (A_TRANS) load_part<TILE_K, TILE_M>(a_tile, a, A.row, first_k, first_m, k, m);
        else load_part<TILE_M, TILE_K>(a_tile, a, A.row, first_m, first_k, m, k);
        if (B_TRANS) load_part<TILE_N, TILE_K>(b_tile, b, B.row, first_n, first_k, n, k);
        else load_part<TILE_K, TILE_N>(b_tile, b, B.row, first_k, first_n, k, n);
        cp_async_commit();
    };

    float acc[WARP_M][TILE_N / 8][4] = {};
    load(0, 0);
    for (int first_k = 0, stage = 0; first_k < k; first_k += TILE_K, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();  // this tile has arrived for all, and all are done with the one before, which the next copies overwrite
        if (first_k + TILE_K < k) load(stage ^ 1, first_k + TILE_K);
        const bf16 *a_tile = (bf16 *)memory + stage * STAGE_ELEMENTS, *b_tile = a_tile + TILE_M * TILE_K;
#pragma unroll
        for (int inner = 0; inner < TILE_K; inner += 16) {
            uint32_t left[WARP_M][4];
#pragma unroll
            for (int i = 0; i < WARP_M; i++) {
                if (A_TRANS) load_left_trans<TILE_M>(left[i], a_tile, inner, warp_row + 16 * i);
                else load_left<TILE_K>(left[i], a_tile, warp_row + 16 * i, inner);
            }
#pragma unroll
            for (int j = 0; j < TILE_N / 8; j += 2) {
                uint32_t right[4];
                if (B_TRANS) load_right_trans<TILE_K>(right, b_tile, 8 * j, inner);
                else load_right<TILE_N>(right, b_tile, inner, 8 * j);
#pragma unroll
                for (int i = 0; i < WARP_M; i++) {
                    mma_m16n8k16(acc[i][j], left[i], right[0], right[1]);
                    mma_m16n8k16(acc[i][j + 1], left[i], right[2], right[3]);
                }
            }
        }
    }

    Result *c = C.at(head, NH);
#pragma unroll
    for (int i = 0; i < WARP_M; i++) {
#pragma unroll
        for (int j = 0; j < TILE_N / 8; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first_m + warp_row + 16 * i + 8 * half + lane_id() / 4, col = first_n + 8 * j + lane_id() % 4 * 2;
                if (row < m && col < n) {
                    Result *to = c + (size_t)row * C.row + col;
                    store_pair(to, scale * acc[i][j][2 * half], scale * acc[i][j][2 * half + 1], col + 1 < n);
                }
            }
        }
    }
}

template <bool A_TRANS, bool B_TRANS, typename Result>
static void matmul(Matrices<Result> C, Matrices<const bf16> A, Matrices<const bf16> B, int m, int n, int k, Shape s, float scale,
                   cudaStream_t stream) {
    auto kernel = matmul_kernel<A_TRANS, B_TRANS, Result>;
    const int grid = (m + TILE_M - 1) / TILE_M * ((n + TILE_N - 1) / TILE_N) * s.B * s.NH;
    LAUNCH(kernel, grid, THREADS, PRODUCT_BYTES, stream, C, A, B, m, n, k, s.NH, scale);
}

// ----------------------------------------------------------------------------
// Softmax

// P (B, NH, T, padded T) = softmax of the rows of S, of which a causal query sees only the keys up to its own; lse (B, NH, T). One
// warp a row. The first pass keeps a running maximum and the sum relative to it, so that only the second has to read the row
// again, from cache.
static __global__ void softmax_kernel(bf16 *P, float *lse, const float *S, int T, size_t row_stride, size_t rows, bool causal) {
    const size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const int seen = causal ? (int)(row % T) + 1 : T;
    const float *s = S + row * row_stride;
    float maximum = -INFINITY, sum = 0;
    for (int i = lane_id(); i < seen; i += 32) {
        const float larger = fmaxf(maximum, s[i]);
        sum = sum * expf(maximum - larger) + expf(s[i] - larger);
        maximum = larger;
    }
    float row_max = maximum;
    for (int distance = 16; distance > 0; distance /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, distance));
    sum *= maximum == -INFINITY ? 0 : expf(maximum - row_max);  // a lane beyond the row's end has seen nothing
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    for (int i = lane_id(); i < T; i += 32)
        P[row * row_stride + i] = __float2bfloat16(i < seen ? expf(s[i] - row_max) / sum : 0.0f);
    if (lane_id() == 0) lse[row] = row_max + logf(sum);
}

// dS = scale P ∘ (dP - delta), delta = rowsum(dO ∘ O). One warp a row. dout and out (B, T, NH, HS); the others
// (B, NH, T, padded T).
static __global__ void dsoftmax_kernel(bf16 *dS, const float *dP, const bf16 *P, const bf16 *dout, const bf16 *out, int T,
                                       size_t row_stride, int NH, int HS, size_t rows, float scale) {
    const size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const size_t head = row / T, at = ((head / NH * T + row % T) * NH + head % NH) * HS;
    float delta = 0;
    for (int i = lane_id(); i < HS; i += 32) delta += __bfloat162float(dout[at + i]) * __bfloat162float(out[at + i]);
    for (int distance = 16; distance > 0; distance /= 2) delta += __shfl_xor_sync(~0u, delta, distance);
    for (int i = lane_id(); i < T; i += 32) {
        const size_t j = row * row_stride + i;
        dS[j] = __float2bfloat16(scale * __bfloat162float(P[j]) * (dP[j] - delta));
    }
}

// ----------------------------------------------------------------------------
// What the harness sees

// The T x T matrices in the workspace: S, later dP; P, which the backward needs again; dS.
struct Scores { Matrices<float> s; Matrices<bf16> p, ds; };

static Scores scores(void *workspace, Shape s) {
    const size_t row = padded(s.T), head = s.T * row, batch = s.NH * head, all = s.B * batch;
    float *const floats = (float *)workspace;
    bf16 *const halves = (bf16 *)(floats + all);
    return {{floats, batch, head, row}, {halves, batch, head, row}, {halves + all, batch, head, row}};
}

static Matrices<const bf16> read_only(Matrices<bf16> m) { return {m.data, m.batch, m.head, m.row}; }

// Part 0, 1 or 2 (Q, K or V) of qkv or of its gradient; and out or its gradient.
template <typename Element> static Matrices<Element> qkv_part(Element *qkv, int part, Shape s) {
    const size_t C = (size_t)s.NH * s.HS;
    return {qkv + part * C, s.T * 3 * C, (size_t)s.HS, 3 * C};
}
template <typename Element> static Matrices<Element> heads_of(Element *out, Shape s) {
    const size_t C = (size_t)s.NH * s.HS;
    return {out, s.T * C, (size_t)s.HS, C};
}

static bool supports(Shape s) {
    const double blocks = ceil(s.T / (double)TILE_M) * ceil(fmax(s.T, s.HS) / (double)TILE_N) * s.B * s.NH;
    return blocks < 2147483648.0 || fail("naive would need %.3g thread blocks, and a grid has 2147483647 at most", blocks);
}

static size_t workspace_bytes(Shape s) { return (size_t)s.B * s.NH * s.T * padded(s.T) * (sizeof(float) + 2 * sizeof(bf16)); }

static void attention_forward(bf16 *out, float *lse, const bf16 *qkv, void *workspace, Shape s, cudaStream_t stream) {
    const Scores x = scores(workspace, s);
    const size_t rows = (size_t)s.B * s.NH * s.T;
    const auto q = qkv_part(qkv, 0, s), k = qkv_part(qkv, 1, s), v = qkv_part(qkv, 2, s);
    matmul<false, true>(x.s, q, k, s.T, s.T, s.HS, s, 1.0f / sqrtf((float)s.HS), stream);
    LAUNCH(softmax_kernel, (unsigned)((rows + 7) / 8), 256, 0, stream, x.p.data, lse, x.s.data, s.T, x.s.row, rows, s.causal);
    matmul<false, false>(heads_of(out, s), read_only(x.p), v, s.T, s.HS, s.T, s, 1.0f, stream);
}

static void attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *, void *workspace,
                               Shape s, cudaStream_t stream) {
    const Scores x = scores(workspace, s);
    const size_t rows = (size_t)s.B * s.NH * s.T;
    const auto q = qkv_part(qkv, 0, s), k = qkv_part(qkv, 1, s), v = qkv_part(qkv, 2, s), d = heads_of(dout, s);
    matmul<false, true>(x.s, d, v, s.T, s.T, s.HS, s, 1.0f, stream);
    LAUNCH(dsoftmax_kernel, (unsigned)((rows + 7) / 8), 256, 0, stream, x.ds.data, x.s.data, x.p.data, dout, out, s.T, x.s.row,
           s.NH, s.HS, rows, 1.0f / sqrtf((float)s.HS));
    matmul<true, false>(qkv_part(dqkv, 2, s), read_only(x.p), d, s.T, s.HS, s.T, s, 1.0f, stream);
    matmul<false, false>(qkv_part(dqkv, 0, s), read_only(x.ds), k, s.T, s.HS, s.T, s, 1.0f, stream);
    matmul<true, false>(qkv_part(dqkv, 1, s), read_only(x.ds), q, s.T, s.HS, s.T, s, 1.0f, stream);
}

VARIANT(naive, "standard attention: S and P, T x T elements a head, are written to device memory and read again")

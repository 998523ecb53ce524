// Flash attention on the tensor cores of a GPU: softmax(Q Kᵀ / sqrt(HS)) V and its gradients, without any T x T matrix in memory.
// This is what train_gpt2.cu calls in every layer.
//
//   if (!attention_supports(HS)) die_of_failure();
//   cudaMalloc(&workspace, attention_workspace_bytes(B, T, NH, HS, true));     // one for all layers
//   attention_forward(out, lse, qkv, workspace, B, T, NH, HS, true, stream);   // keep qkv, out and lse for the backward
//   attention_backward(dqkv, dout, qkv, out, lse, workspace, B, T, NH, HS, true, stream);
//
// Hopper GPUs have kernels of their own for head sizes 64 and 128, in attention_sm90.cuh. Here are those for all others (the one for
// delta is for all), and at the end the functions that choose.
//
// The algorithm is FlashAttention's (Dao et al. 2022: scores exist tile by tile only, by an online softmax, and are computed again
// in the backward) with FlashAttention-2's division of work (Dao 2023: a thread block per block of queries, whole rows per warp):
//
//   forward, a thread block per block of queries:    backward 1, after delta = rowsum(dO ∘ O), a block per block of queries:
//     load Q; O = 0, max = -inf, sum = 0               load Q, dO, delta; dQ = 0
//     for each tile of keys:                           for each tile of keys:
//       S = Q Kᵀ                                         P = exp(Q Kᵀ - lse)
//       P = exp(S - new max); rescale O and sum          dS = P ∘ (dO Vᵀ - delta); dQ += dS K
//       O += P V; sum += rowsum(P)                   backward 2, a block per block of keys:
//     O /= sum; lse = max + log(sum)                   load K, V; dK = dV = 0
//                                                      for each tile of queries:
//                                                        Pᵀ = exp(K Qᵀ - lse); dV += Pᵀ dO
//                                                        dSᵀ = Pᵀ ∘ (V dOᵀ - delta); dK += dSᵀ Q
//
// The blocks here wait for nothing, and nothing is added up across them, so each run gives the same bits. (The paper's blocks add up dQ by
// atomic additions, in any order.) The price: the backward computes S and dP twice, 7 products instead of 5.
//
// They need compute capability 8.0 or later, and up to 97 KiB of shared memory a block, which all such GPUs have.
//
// dev/attention/README.md is the lesson on all this. dev/attention/v2.cu has the same kernels, to compare with others; `./attention
// test trainer` tests this file, with ATTENTION_NO_SM90=1 also on a Hopper GPU, and `./attention bench` measures it beside them.
#ifndef ATTENTION_CUH
#define ATTENTION_CUH

#include "attention_sm90.cuh"

// Rows of lse and delta in the workspace are padded to a multiple of this, so that tiles of them need no bounds. (On Hopper GPUs to
// whole tiles of theirs.)
enum { ATTENTION_PAD = 128 };

// Tile sizes. Rows of a warp are 16 M; what they accumulate has to fit its registers (255 a thread), and the tiles the shared
// memory of the smallest GPUs (99 KiB a block).
template <int HS> struct AttentionTiles {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS;
    static constexpr int STAGES = 2;  // tiles under way: one is used, the next is copied; the waits below are made for two
    static constexpr int M = 2, ROWS = 16 * M * WARPS, KEYS = HS <= 64 ? 64 : 32;  // forward: queries of a block, keys of a tile
    static constexpr int FORWARD_BYTES = (ROWS + 2 * STAGES * KEYS) * HS * (int)sizeof(bf16);
    // Backward: rows (keys or queries) that a block owns, rows of a tile that it walks over, and how many of these at a time.
    static constexpr int BACKWARD_M = HS <= 64 ? 2 : 1, OWN = 16 * BACKWARD_M * WARPS, WALK = 64, STEP = 32;
    static constexpr int BACKWARD_BYTES = (2 * OWN + 2 * STAGES * WALK) * HS * (int)sizeof(bf16) +
                                          2 * STAGES * WALK * (int)sizeof(float);
    static_assert(OWN <= STAGES * WALK && 2 * OWN <= 4 * THREADS, "lse and delta of a block: room, and one copy a thread");
    static constexpr int STATS_THREADS = 256, STATS_ROWS = STATS_THREADS / (HS / 8);  // 16 bytes of a row a thread
    static_assert(ATTENTION_PAD % OWN == 0 && ATTENTION_PAD % WALK == 0 && ATTENTION_PAD % STATS_ROWS == 0,
                  "no block and no tile ends beyond the padding");
    static constexpr int BYTES = FORWARD_BYTES > BACKWARD_BYTES ? FORWARD_BYTES : BACKWARD_BYTES;
};

static inline size_t attention_padded(int T) { return ((size_t)T + ATTENTION_PAD - 1) / ATTENTION_PAD * ATTENTION_PAD; }

// How many thread blocks there are if each has so many of the T rows of a head.
static inline unsigned attention_grid(int B, size_t T, int NH, int rows) {
    const size_t blocks = (T + rows - 1) / rows * B * NH;
    if (blocks > INT32_MAX)
        die("attention for B = %d, T = %zu and %d heads needs %zu thread blocks; expected at most %d: use a smaller batch", B, T, NH,
            blocks, INT32_MAX);
    return (unsigned)blocks;
}

// Ends the program unless there are kernels for this shape. They count rows, padded ones, too, by int; their offsets are size_t.
static inline void attention_check(int B, int T, int NH, int HS) {
    enum { MOST_T = INT32_MAX - 4096 };
    if (HS != 32 && HS != 64 && HS != 128) die("attention has no kernels for head size %d; it has them for 32, 64 and 128", HS);
    if (B < 1 || T < 1 || NH < 1) die("attention for B = %d, T = %d and %d heads; expected at least one of each", B, T, NH);
    if (T > MOST_T) die("attention for T = %d; expected at most %d", T, MOST_T);
}

// True if attention of this head size can be computed, on the current device if there is one. If not, false after fail("what is
// supported").
static inline bool attention_supports(int HS) {
    const int bytes = HS == 32 ? AttentionTiles<32>::BYTES : HS == 64 ? AttentionTiles<64>::BYTES :
                      HS == 128 ? AttentionTiles<128>::BYTES : 0;
    int device, limit;
    if (bytes == 0) return fail("head size %d is not supported; 32, 64 and 128 are (it is the channels divided by the heads)", HS);
    if (cudaGetDevice(&device) != cudaSuccess) return true;
    CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (bytes > limit)
        return fail("attention with head size %d needs %d KiB of shared memory a block, and this GPU has %d; a smaller head size "
                    "needs less", HS, (bytes + 1023) / 1024, limit / 1024);
    return true;
}

// ----------------------------------------------------------------------------
// Forward

// One step of the online softmax: S becomes P = exp(scale (S - new maximum)); O and the row sums so far, which were relative to the
// old maximum, are rescaled to the new one. Each row must see a key in its first tile (here it is key 0): with a maximum of -inf the
// differences would be NaN. A row's elements are in four lanes; sums stay apart until the end.
template <int M, int N8, int HS8>
DEVICE void attention_online_softmax(float (&s)[M][N8][4], float (&o)[M][HS8][4], float (&row_max)[M][2],
                                     float (&row_sum)[M][2], float scale_log2) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float maximum = row_max[m][half];
#pragma unroll
            for (int n = 0; n < N8; n++) maximum = fmaxf(maximum, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
            maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
            const float rescale = exp2_approx(scale_log2 * (row_max[m][half] - maximum)), offset = scale_log2 * maximum;
            row_max[m][half] = maximum;
            row_sum[m][half] *= rescale;
#pragma unroll
            for (int n = 0; n < HS8; n++) {
                o[m][n][2 * half] *= rescale;
                o[m][n][2 * half + 1] *= rescale;
            }
#pragma unroll
            for (int n = 0; n < N8; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[m][n][i] = exp2_approx(scale_log2 * s[m][n][i] - offset);
                    row_sum[m][half] += s[m][n][i];
                }
            }
        }
    }
}

// Grid: B · NH · blocks of ROWS queries, of a head the longest causal rows first. out (B, T, NH, HS), lse (B, NH, T), qkv
// (B, T, 3, NH, HS). Reads Q once, and K and V once per block of queries, mostly from the L2 cache; writes out and lse. FLOPs:
// 4 T² HS a head, half of it when causal. The same bits in each run.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(AttentionTiles<HS>::THREADS, 2) void attention_forward_kernel(
    bf16 *out, float *lse, const bf16 *qkv, int T, int NH, float scale_log2) {
    using Tile = AttentionTiles<HS>;
    constexpr int M = Tile::M, ROWS = Tile::ROWS, KEYS = Tile::KEYS, THREADS = Tile::THREADS;
    DYNAMIC_SHARED(memory);
    bf16 *const q_tile = (bf16 *)memory, *const kv_tiles = q_tile + ROWS * HS;

    const int row_blocks = (T + ROWS - 1) / ROWS, head = blockIdx.x / row_blocks;  // of B · NH
    const int block_row = (row_blocks - 1 - blockIdx.x % row_blocks) * ROWS, first_row = block_row + warp_id() * 16 * M;
    const size_t C = (size_t)NH * HS, row0 = (size_t)(head / NH) * T, col0 = (size_t)(head % NH) * HS;
    const bf16 *const q = qkv + row0 * 3 * C + col0, *const k = q + C, *const v = k + C;

    const int keys = CAUSAL ? min(T, block_row + ROWS) : T, tiles = (keys + KEYS - 1) / KEYS;
    auto load_kv = [&](int tile) {
        bf16 *to = kv_tiles + tile % Tile::STAGES * 2 * KEYS * HS;
        load_tile<KEYS, HS, THREADS>(to, k, 3 * C, tile * KEYS, T);
        load_tile<KEYS, HS, THREADS>(to + KEYS * HS, v, 3 * C, tile * KEYS, T);
        cp_async_commit();
    };
    load_tile<ROWS, HS, THREADS>(q_tile, q, 3 * C, block_row, T);
    load_kv(0);  // which commits Q, too, as one group with the first tile

    float o[M][HS / 8][4] = {}, row_max[M][2], row_sum[M][2] = {};
    for (int m = 0; m < M; m++) row_max[m][0] = row_max[m][1] = -INFINITY;
    for (int tile = 0; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();  // everybody's copies have arrived, and everybody is done with the tile before,
        if (tile + 1 < tiles) load_kv(tile + 1);  // which the next copies overwrite
        const bf16 *k_tile = kv_tiles + tile % Tile::STAGES * 2 * KEYS * HS, *v_tile = k_tile + KEYS * HS;
        const int first_key = tile * KEYS, last_key = first_key + KEYS - 1;
        if (CAUSAL && first_key > first_row + 16 * M - 1) continue;  // the warp's rows see none of it

        float s[M][KEYS / 8][4] = {};
        product_abt<HS>(s, q_tile, warp_id() * 16 * M, k_tile, 0);
        if ((CAUSAL && last_key > first_row) || last_key >= T) mask_scores(s, first_row, first_key, T, CAUSAL);
        attention_online_softmax(s, o, row_max, row_sum, scale_log2);
        product_ab<HS>(o, s, v_tile, 0);
    }

#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = row_sum[m][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            row_sum[m][half] = sum;
            const float inverse = 1.0f / sum;
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                o[m][n][2 * half] *= inverse;
                o[m][n][2 * half + 1] *= inverse;
            }
        }
    }
    store_rows(out + row0 * C + col0, C, first_row, T, o, 1.0f);
    if (lane_id() % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + 16 * m + 8 * half + lane_id() / 4;
            if (row < T) lse[(size_t)head * T + row] = LN_2 * (scale_log2 * row_max[m][half] + log2f(row_sum[m][half]));
        }
    }
}

template <int HS>
static void attention_forward_of(bf16 *out, float *lse, const bf16 *qkv, int B, int T, int NH, bool causal, cudaStream_t stream) {
    using Tile = AttentionTiles<HS>;
    auto kernel = causal ? attention_forward_kernel<HS, true> : attention_forward_kernel<HS, false>;
    LAUNCH(kernel, attention_grid(B, T, NH, Tile::ROWS), Tile::THREADS, Tile::FORWARD_BYTES, stream, out, lse, qkv, T, NH,
           LOG2_E / sqrtf((float)HS));
}

// ----------------------------------------------------------------------------
// Backward

// What the next kernels need of each row: lse in base 2, and -delta = -rowsum(dO ∘ O), as stats (B, NH, 2, padded T). HS / 8 lanes
// a row, 16 bytes a lane. Rows from T on get an lse of +inf, which makes their P zero. The minus is for dO Vᵀ, which starts from
// -delta, not from zero. Grid: B · blocks of STATS_ROWS padded rows · NH, since heads are neighbours in memory. Reads dO, O and lse
// once. The same bits in each run.
template <int HS>
static __global__ void attention_stats_kernel(
    float *stats, const bf16 *dout, const bf16 *out, const float *lse, int T, int padded_T, int NH) {
    constexpr int LANES = HS / 8, ROWS = AttentionTiles<HS>::STATS_ROWS;
    const int n = blockIdx.x % NH, block = blockIdx.x / NH, row_blocks = padded_T / ROWS, lane = threadIdx.x % LANES;
    const int row = block % row_blocks * ROWS + threadIdx.x / LANES;
    const size_t batch = block / row_blocks, head = batch * NH + n;
    float minus_delta = 0;
    if (row < T) {
        const size_t at = ((batch * T + row) * NH + n) * HS + 8 * lane;
        const uint4 a = *(const uint4 *)(dout + at), b = *(const uint4 *)(out + at);
        const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 x = unpack_bf16(left[j]), y = unpack_bf16(right[j]);
            minus_delta -= x.x * y.x + x.y * y.y;
        }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) minus_delta += __shfl_xor_sync(~0u, minus_delta, distance);
    if (lane == 0) {
        stats[(2 * head) * padded_T + row] = row < T ? LOG2_E * lse[head * T + row] : INFINITY;
        stats[(2 * head + 1) * padded_T + row] = minus_delta;
    }
}

// dQ = scale dS K with dS = P ∘ (dO Vᵀ - delta). Grid: B · NH · blocks of OWN queries, of a head the longest causal rows first. As
// the forward, but P is known at once from lse. Reads Q and dO once, K and V once per block of queries. FLOPs: 6 T² HS a head, half
// of it when causal. The same bits in each run.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(AttentionTiles<HS>::THREADS, HS <= 64 ? 3 : 2) void attention_backward_dq_kernel(
    bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const float *stats, int T, int padded_T, int NH, float scale) {
    using Tile = AttentionTiles<HS>;
    constexpr int M = Tile::BACKWARD_M, OWN = Tile::OWN, WALK = Tile::WALK, STEP = Tile::STEP, THREADS = Tile::THREADS;
    const int warp = __shfl_sync(~0u, warp_id(), 0);  // told that it is uniform, the compiler needs no register of each lane
    DYNAMIC_SHARED(memory);
    bf16 *const q_tile = (bf16 *)memory, *const dout_tile = q_tile + OWN * HS, *const kv_tiles = dout_tile + OWN * HS;
    float *const block_stats = (float *)(kv_tiles + 2 * Tile::STAGES * WALK * HS);  // lse and -delta of the block's queries

    const int row_blocks = (T + OWN - 1) / OWN, head = blockIdx.x / row_blocks;
    const int block_row = (row_blocks - 1 - blockIdx.x % row_blocks) * OWN, first_row = block_row + warp * 16 * M;
    const size_t C = (size_t)NH * HS, row0 = (size_t)(head / NH) * T, col0 = (size_t)(head % NH) * HS;
    const bf16 *const q = qkv + row0 * 3 * C + col0, *const k = q + C, *const v = k + C;

    const int keys = CAUSAL ? min(T, block_row + OWN) : T, tiles = (keys + WALK - 1) / WALK;
    auto load_kv = [&](int tile) {
        bf16 *to = kv_tiles + tile % Tile::STAGES * 2 * WALK * HS;
        load_tile<WALK, HS, THREADS>(to, k, 3 * C, tile * WALK, T);
        load_tile<WALK, HS, THREADS>(to + WALK * HS, v, 3 * C, tile * WALK, T);
        cp_async_commit();
    };
    load_tile<OWN, HS, THREADS>(q_tile, q, 3 * C, block_row, T);
    load_tile<OWN, HS, THREADS>(dout_tile, dout + row0 * C + col0, C, block_row, T);
    const int i = threadIdx.x * 4;
    if (i < 2 * OWN) cp_async_16(block_stats + i, stats + ((size_t)head * 2 + i / OWN) * padded_T + block_row + i % OWN, true);
    load_kv(0);
    const float *const row_lse = block_stats + warp * 16 * M + lane_id() / 4, *const row_minus_delta = row_lse + OWN;

    const float scale_log2 = LOG2_E * scale;
    float dq[M][HS / 8][4] = {};
    for (int tile = 0; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < tiles) load_kv(tile + 1);
        const bf16 *k_tile = kv_tiles + tile % Tile::STAGES * 2 * WALK * HS, *v_tile = k_tile + WALK * HS;
#pragma unroll 1  // two steps at once would need more registers than there are
        for (int step = 0; step < WALK; step += STEP) {
            const int first_key = tile * WALK + step, last_key = first_key + STEP - 1;
            if (first_key >= T || (CAUSAL && first_key > first_row + 16 * M - 1)) continue;  // the warp's queries see none of them

            float s[M][STEP / 8][4] = {}, ds[M][STEP / 8][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) ds[m][n][i] = row_minus_delta[16 * m + i / 2 * 8];
                }
            }
            product_abt<HS>(s, q_tile, warp * 16 * M, k_tile, step);
            product_abt<HS>(ds, dout_tile, warp * 16 * M, v_tile, step);
            if ((CAUSAL && last_key > first_row) || last_key >= T) mask_scores(s, first_row, first_key, T, CAUSAL);
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) ds[m][n][i] *= exp2_approx(scale_log2 * s[m][n][i] - row_lse[16 * m + i / 2 * 8]);
                }
            }
            product_ab<HS>(dq, ds, k_tile, step);
        }
    }
    store_rows(dqkv + row0 * 3 * C + col0, 3 * C, first_row, T, dq, scale);
}

// dV = Pᵀ dO and dK = scale dSᵀ Q. Grid: B · NH · blocks of OWN keys. dK and dV stay in the registers of the warp that owns the
// keys. All matrices of scores are transposed, keys being rows, so that Pᵀ and dSᵀ come out of one product as the left factors of
// the next. Reads K and V once, Q and dO once per block of keys. FLOPs: 8 T² HS a head, half of it when causal. The same bits in
// each run.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(AttentionTiles<HS>::THREADS, 2) void attention_backward_dkdv_kernel(
    bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const float *stats, int T, int padded_T, int NH, float scale) {
    using Tile = AttentionTiles<HS>;
    constexpr int M = Tile::BACKWARD_M, OWN = Tile::OWN, WALK = Tile::WALK, THREADS = Tile::THREADS;
    // Without the branches of the mask the compiler overlaps more, and runs short of registers.
    constexpr int STEP = CAUSAL ? Tile::STEP : Tile::STEP / 2;
    const int warp = __shfl_sync(~0u, warp_id(), 0);  // told that it is uniform, the compiler needs no register of each lane
    DYNAMIC_SHARED(memory);
    bf16 *const k_tile = (bf16 *)memory, *const v_tile = k_tile + OWN * HS, *const q_tiles = v_tile + OWN * HS;
    float *const tile_stats = (float *)(q_tiles + 2 * Tile::STAGES * WALK * HS);  // lse and -delta of the tiles' queries

    const int key_blocks = (T + OWN - 1) / OWN, head = blockIdx.x / key_blocks;
    const int block_key = blockIdx.x % key_blocks * OWN, first_key = block_key + warp * 16 * M;
    const size_t C = (size_t)NH * HS, row0 = (size_t)(head / NH) * T, col0 = (size_t)(head % NH) * HS;
    const bf16 *const q = qkv + row0 * 3 * C + col0, *const k = q + C, *const v = k + C;
    const bf16 *const dout_head = dout + row0 * C + col0;
    stats += (size_t)head * 2 * padded_T;

    const int tiles = (T + WALK - 1) / WALK, first_tile = CAUSAL ? block_key / WALK : 0;
    auto load_queries = [&](int tile) {
        bf16 *to = q_tiles + tile % Tile::STAGES * 2 * WALK * HS;
        load_tile<WALK, HS, THREADS>(to, q, 3 * C, tile * WALK, T);
        load_tile<WALK, HS, THREADS>(to + WALK * HS, dout_head, C, tile * WALK, T);
        const int i = threadIdx.x * 4;
        if (i < 2 * WALK) {
            cp_async_16(tile_stats + tile % Tile::STAGES * 2 * WALK + i,
                        stats + i / WALK * padded_T + tile * WALK + i % WALK, true);
        }
        cp_async_commit();
    };
    load_tile<OWN, HS, THREADS>(k_tile, k, 3 * C, block_key, T);
    load_tile<OWN, HS, THREADS>(v_tile, v, 3 * C, block_key, T);
    load_queries(first_tile);

    const float scale_log2 = LOG2_E * scale;
    float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};
    for (int tile = first_tile; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < tiles) load_queries(tile + 1);
        const bf16 *q_tile = q_tiles + tile % Tile::STAGES * 2 * WALK * HS, *dout_tile = q_tile + WALK * HS;
        const float *tile_lse = tile_stats + tile % Tile::STAGES * 2 * WALK, *tile_minus_delta = tile_lse + WALK;
#pragma unroll 1  // two steps at once would need more registers than there are
        for (int step = 0; step < WALK; step += STEP) {
            const int first_query = tile * WALK + step;
            if (first_query >= T || (CAUSAL && first_key > first_query + STEP - 1)) continue;  // none of them sees the warp's keys

            float p[M][STEP / 8][4] = {}, ds[M][STEP / 8][4];
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const float2 d = *(const float2 *)(tile_minus_delta + step + 8 * n + lane_id() % 4 * 2);
#pragma unroll
                for (int m = 0; m < M; m++) ds[m][n][0] = ds[m][n][2] = d.x, ds[m][n][1] = ds[m][n][3] = d.y;
            }
            product_abt<HS>(p, k_tile, warp * 16 * M, q_tile, step);
            product_abt<HS>(ds, v_tile, warp * 16 * M, dout_tile, step);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const float2 l = *(const float2 *)(tile_lse + step + 8 * n + lane_id() % 4 * 2);
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) p[m][n][i] = exp2_approx(scale_log2 * p[m][n][i] - (i % 2 ? l.y : l.x));
                }
            }
            // Keys from T on need no mask, as store_rows() leaves them out; nor do queries from T on, having an lse of +inf.
            if (CAUSAL && first_key + 16 * M - 1 > first_query) mask_transposed(p, first_key, first_query);
            product_ab<HS>(dv, p, dout_tile, step);
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) ds[m][n][i] *= p[m][n][i];
                }
            }
            product_ab<HS>(dk, ds, q_tile, step);
        }
    }
    bf16 *const dqkv_head = dqkv + row0 * 3 * C + col0;
    store_rows(dqkv_head + C, 3 * C, first_key, T, dk, scale);
    store_rows(dqkv_head + 2 * C, 3 * C, first_key, T, dv, 1.0f);
}

template <int HS>
static void attention_stats_of(float *stats, const bf16 *dout, const bf16 *out, const float *lse, int B, int T, int padded_T, int NH,
                               cudaStream_t stream) {
    using Tile = AttentionTiles<HS>;
    LAUNCH(attention_stats_kernel<HS>, attention_grid(B, padded_T, NH, Tile::STATS_ROWS), Tile::STATS_THREADS, 0, stream, stats,
           dout, out, lse, T, padded_T, NH);
}

template <int HS>
static void attention_backward_of(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, float *stats,
                                  int B, int T, int NH, bool causal, cudaStream_t stream) {
    using Tile = AttentionTiles<HS>;
    const int padded_T = (int)attention_padded(T);
    const unsigned grid = attention_grid(B, T, NH, Tile::OWN);
    const float scale = 1.0f / sqrtf((float)HS);
    attention_stats_of<HS>(stats, dout, out, lse, B, T, padded_T, NH, stream);
    auto dq = causal ? attention_backward_dq_kernel<HS, true> : attention_backward_dq_kernel<HS, false>;
    LAUNCH(dq, grid, Tile::THREADS, Tile::BACKWARD_BYTES, stream, dqkv, dout, qkv, stats, T, padded_T, NH, scale);
    auto dkdv = causal ? attention_backward_dkdv_kernel<HS, true> : attention_backward_dkdv_kernel<HS, false>;
    LAUNCH(dkdv, grid, Tile::THREADS, Tile::BACKWARD_BYTES, stream, dqkv, dout, qkv, stats, T, padded_T, NH, scale);
}

template <int HS>
static void attention_backward_on_sm90(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *memory,
                                       int B, int T, int NH, bool causal, cudaStream_t stream) {
    static_assert(Sm90Backward<HS>::ROWS % AttentionTiles<HS>::STATS_ROWS == 0, "no block ends beyond the padding");
    const Sm90Workspace workspace = sm90_workspace<HS>(memory, B, T, NH);
    attention_stats_of<HS>(workspace.stats, dout, out, lse, B, T, workspace.padded_T, NH, stream);
    attention_sm90_backward_of<HS>(dqkv, dout, qkv, workspace, B, T, NH, causal, stream);
}

// ----------------------------------------------------------------------------
// What the trainer calls

// Decided at the first call, for the device that is current then. ATTENTION_NO_SM90=1 in the environment turns it off.
static inline bool attention_uses_sm90(int HS) {
    static const char *const off = getenv("ATTENTION_NO_SM90");
    static const bool available = (!off || !*off || !strcmp(off, "0")) && hopper_available();
    return available && (HS == 64 || HS == 128);
}

// Bytes of device memory, a multiple of 4, that attention_forward() and, if wanted, attention_backward() need beside their tensors.
// Nothing is kept there between calls, but calls on two streams need one each.
static inline size_t attention_workspace_bytes(int B, int T, int NH, int HS, bool backward) {
    attention_check(B, T, NH, HS);
    if (!backward) return sizeof(unsigned);
    int device;
    const bool is_plan = cudaGetDevice(&device) != cudaSuccess;  // without a GPU: for one that needs more
    if (HS == 32 || (!is_plan && !attention_uses_sm90(HS)))
        return (size_t)B * NH * attention_padded(T) * 2 * sizeof(float);  // lse and delta of each row
    return (HS == 64 ? sm90_workspace<64> : sm90_workspace<128>)(NULL, B, T, NH).bytes;
}

// out (B, T, NH, HS) = softmax(Q Kᵀ / sqrt(HS)) V for each batch element and head, and the natural logarithm of each softmax's
// denominator, lse (B, NH, T), from qkv (B, T, 3, NH, HS), where Q, K and V are at 0, 1 and 2. Causal: a position sees those up to
// its own; else all. Any sizes from 1 on, but for HS, which attention_supports() has to have accepted; workspace has
// attention_workspace_bytes(). All in device memory, contiguous, at multiples of 16 bytes, none overlapping another. Asynchronous on
// the stream; ends the program if the launch fails.
//
// Scores may be as large as 10⁴: lse, a float, is off by 10⁻⁷ of their size, and the backward's P by that factor: 0.1 % there. All of V
// has to be finite, also what a row does not see, as it takes part with a weight of 0.
static inline void attention_forward(bf16 *out, float *lse, const bf16 *qkv, void *workspace, int B, int T, int NH, int HS,
                                     bool causal, cudaStream_t stream) {
    attention_check(B, T, NH, HS);
    if (attention_uses_sm90(HS)) {
        auto forward = HS == 64 ? attention_sm90_forward_of<64> : attention_sm90_forward_of<128>;
        forward(out, lse, qkv, workspace, B, T, NH, causal, stream);
    } else {
        auto forward = HS == 32 ? attention_forward_of<32> : HS == 64 ? attention_forward_of<64> : attention_forward_of<128>;
        forward(out, lse, qkv, B, T, NH, causal, stream);
    }
}

// dqkv (B, T, 3, NH, HS), every element of which it writes, from dout (B, T, NH, HS) and from what attention_forward() read and
// wrote. The workspace has the bytes for a backward. Sizes, memory and errors as there; asynchronous on the stream.
static inline void attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse,
                                      void *workspace, int B, int T, int NH, int HS, bool causal, cudaStream_t stream) {
    attention_check(B, T, NH, HS);
    if (attention_uses_sm90(HS)) {
        auto backward = HS == 64 ? attention_backward_on_sm90<64> : attention_backward_on_sm90<128>;
        backward(dqkv, dout, qkv, out, lse, workspace, B, T, NH, causal, stream);
    } else {
        auto backward = HS == 32 ? attention_backward_of<32> : HS == 64 ? attention_backward_of<64> : attention_backward_of<128>;
        backward(dqkv, dout, qkv, out, lse, (float *)workspace, B, T, NH, causal, stream);
    }
}

#endif

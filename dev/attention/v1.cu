// v1: FlashAttention as first published (Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
// 2022), on the tensor cores of any GPU since sm_80.
//
//   forward, one thread block a head:          backward, one thread block a head:
//     for each block of keys:                    for each block of keys:
//       load K, V                                  load K, V; dK = dV = 0
//       for each tile of queries:                  for each tile of queries:
//         load Q; S = Q Kᵀ                           load Q, dO, O; delta = rowsum(dO ∘ O)
//         max = rowmax(S); P = exp(S - max)          P = exp(Q Kᵀ - lse); dS = P ∘ (dO Vᵀ - delta)
//         O', sum = P V, rowsum(P)                   dV += Pᵀ dO; dK += dSᵀ Q
//         merge with O, lse of the blocks            dQ += dS K, in device memory
//         before, in device memory                 store dK, dV
//
// Each warp owns some of the keys, so it has a part of every row of queries: the maximum, the sum and O' of a row, and its dQ, are
// put together from all warps in shared memory. Nothing of size T² exists, but O and dQ go to device memory and back for every
// block of keys, and a GPU with more multiprocessors than B · NH stays partly idle.
//
// Device memory, in elements: forward reads Q, and reads and writes O (in fp32) and lse, once per block of keys; K and V once.
// Backward reads Q, dO, O and lse, and reads and writes dQ (in fp32), once per block of keys. Workspace: O or dQ in fp32, 4 HS
// bytes a row. FLOPs: forward 4 T² HS a head, backward 10 T² HS; if causal about half:
// a block of keys meets all tiles from its first key on, masked or not, which at T = 1024 is 5/8 and 9/16 of the square.

#include "gpt/tile.cuh"
#include "variant.h"

// Tile sizes. For head size 64 those of the paper's own kernels: 16 queries against 256 keys, 64 of them a warp's. What a warp
// accumulates has to fit its registers (255 a thread), and the tiles the shared memory of the smallest GPUs (99 KiB a block).
template <int HS> struct Tiles {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS;
    static constexpr int STAGES = 2;  // tiles under way: one is used, the next is copied; the waits below are made for two
    static constexpr int PART_STRIDE = HS + 8;  // floats in a row of a warp's part of O or dQ: 8 more, against bank conflicts
    static constexpr int ROWS = HS == 32 ? 32 : 16;  // queries of a tile, which passes
    static constexpr int KEYS = HS <= 64 ? 256 : 64;  // forward: keys of a block, which stay
    static constexpr int FORWARD_BYTES = (2 * KEYS + STAGES * ROWS) * HS * (int)sizeof(bf16) +
                                         WARPS * ROWS * (PART_STRIDE + 2) * (int)sizeof(float);
    static constexpr int OWN = HS <= 64 ? 128 : 64;  // backward: keys of a block, with dK and dV in registers
    static constexpr int BACKWARD_BYTES = ((2 * OWN + 3 * STAGES * ROWS) * HS + OWN * ROWS) * (int)sizeof(bf16) +
                                          (WARPS * PART_STRIDE + 2) * ROWS * (int)sizeof(float);
    static constexpr int BYTES = FORWARD_BYTES > BACKWARD_BYTES ? FORWARD_BYTES : BACKWARD_BYTES;
};

// ----------------------------------------------------------------------------
// Forward

// A warp's part of O or dQ, to shared memory.
template <int M, int N8> DEVICE void store_part(float *part, int stride, const float (&acc)[M][N8][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *to = part + (16 * m + 8 * half + lane_id() / 4) * stride + lane_id() % 4 * 2;
#pragma unroll
            for (int n = 0; n < N8; n++) *(float2 *)(to + 8 * n) = make_float2(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
        }
    }
}

// The sum of all warps' parts at an offset, four columns of a row.
template <int WARPS> DEVICE float4 sum_of_parts(const float *parts, int part_size) {
    float4 sum = *(const float4 *)parts;
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) {
        const float4 x = *(const float4 *)(parts + warp * part_size);
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    return sum;
}

// Grid: B · NH. out (B, T, NH, HS), lse (B, NH, T), qkv (B, T, 3, NH, HS); o is out in fp32 as (B, NH, T, HS), for the time
// between two blocks of keys.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(Tiles<HS>::THREADS, 2) void attention_forward_kernel(
    bf16 *out, float *lse, float *o, const bf16 *qkv, int T, int NH, float scale_log2) {
    using Tile = Tiles<HS>;
    constexpr int M = Tile::ROWS / 16, ROWS = Tile::ROWS, KEYS = Tile::KEYS, THREADS = Tile::THREADS;
    constexpr int WARPS = Tile::WARPS, PART_STRIDE = Tile::PART_STRIDE;
    constexpr int WARP_KEYS = KEYS / WARPS;  // keys of a warp
    DYNAMIC_SHARED(memory);
    bf16 *const k_tile = (bf16 *)memory, *const v_tile = k_tile + KEYS * HS, *const q_tiles = v_tile + KEYS * HS;
    float *const parts = (float *)(q_tiles + Tile::STAGES * ROWS * HS);
    float *const maxima = parts + WARPS * ROWS * PART_STRIDE, *const sums = maxima + WARPS * ROWS;

    const int head = blockIdx.x;
    const size_t C = (size_t)NH * HS, row0 = (size_t)(head / NH) * T;
    const bf16 *const q = qkv + row0 * 3 * C + head % NH * HS, *const k = q + C, *const v = k + C;
    out += row0 * C + head % NH * HS;
    o += (size_t)head * T * HS;
    lse += (size_t)head * T;

    const int tiles = (T + ROWS - 1) / ROWS;
    auto load_queries = [&](int tile) {
        load_tile<ROWS, HS, THREADS>(q_tiles + tile % Tile::STAGES * ROWS * HS, q, 3 * C, tile * ROWS, T);
        cp_async_commit();
    };
    for (int block_key = 0; block_key < T; block_key += KEYS) {
        __syncthreads();  // all are done with the block before
        load_tile<KEYS, HS, THREADS>(k_tile, k, 3 * C, block_key, T);
        load_tile<KEYS, HS, THREADS>(v_tile, v, 3 * C, block_key, T);
        const int first_tile = CAUSAL ? block_key / ROWS : 0, first_key = block_key + warp_id() * WARP_KEYS;
        load_queries(first_tile);  // which commits K and V, too, as one group with the first tile
        for (int tile = first_tile; tile < tiles; tile++) {
            cp_async_wait<0>();
            __syncthreads();  // everybody's copies have arrived, and everybody is done with the tile before,
            if (tile + 1 < tiles) load_queries(tile + 1);  // which the next copies overwrite
            const bf16 *q_tile = q_tiles + tile % Tile::STAGES * ROWS * HS;
            const int first_row = tile * ROWS, last_key = first_key + WARP_KEYS - 1;

            float s[M][WARP_KEYS / 8][4] = {};
            product_abt<HS>(s, q_tile, 0, k_tile, warp_id() * WARP_KEYS);
            if ((CAUSAL && last_key > first_row) || last_key >= T) mask_scores(s, first_row, first_key, T, CAUSAL);

            // The maximum of each row over this block's keys: of a lane, of the row's four lanes, of all warps.
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float maximum = -INFINITY;
#pragma unroll
                    for (int n = 0; n < WARP_KEYS / 8; n++)
                        maximum = fmaxf(maximum, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
                    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
                    if (lane_id() % 4 == 0) maxima[warp_id() * ROWS + 16 * m + 8 * half + lane_id() / 4] = maximum;
                }
            }
            __syncthreads();  // the maxima of all warps are there
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = 16 * m + 8 * half + lane_id() / 4;
                    float maximum = maxima[row], sum = 0;
#pragma unroll
                    for (int warp = 1; warp < WARPS; warp++) maximum = fmaxf(maximum, maxima[warp * ROWS + row]);
#pragma unroll
                    for (int n = 0; n < WARP_KEYS / 8; n++) {
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; i++) {
                            s[m][n][i] = exp2_approx(scale_log2 * s[m][n][i] - scale_log2 * maximum);
                            sum += s[m][n][i];
                        }
                    }
                    sum += __shfl_xor_sync(~0u, sum, 1);
                    sum += __shfl_xor_sync(~0u, sum, 2);
                    if (lane_id() % 4 == 0) sums[warp_id() * ROWS + row] = sum;
                }
            }
            float part[M][HS / 8][4] = {};
            product_ab<HS>(part, s, v_tile, warp_id() * WARP_KEYS);
            store_part(parts + warp_id() * ROWS * PART_STRIDE, PART_STRIDE, part);
            __syncthreads();  // the parts and sums of all warps are there

            // With O' and sum added up over the warps, this block of keys has lse' = max + log(sum). Between two blocks O is kept
            // normalized, so it is merged as lse = log(exp(lse) + exp(lse')), O = exp(old lse - lse) O + exp(max - lse) O'. A few
            // neighbouring threads share a row.
            constexpr int ROW_THREADS = THREADS / ROWS;
            const int row = threadIdx.x / ROW_THREADS, lane = threadIdx.x % ROW_THREADS;
            const float before = block_key > 0 && first_row + row < T ? lse[first_row + row] : -INFINITY;
            __syncwarp();  // all of a row, which are in one warp, have read its lse before one of them replaces it
            if (first_row + row < T) {
                float maximum = maxima[row], sum = sums[row];
#pragma unroll
                for (int warp = 1; warp < WARPS; warp++) {
                    maximum = fmaxf(maximum, maxima[warp * ROWS + row]);
                    sum += sums[warp * ROWS + row];
                }
                const float here = LN_2 * (scale_log2 * maximum + log2f(sum)), larger = fmaxf(here, before);
                const float merged = larger + logf(expf(here - larger) + expf(before - larger));
                const float weight = expf(before - merged), part_weight = exp2_approx(scale_log2 * maximum - LOG2_E * merged);
                const bool last_block = block_key + KEYS >= (CAUSAL ? first_row + row + 1 : T);
                float *const o_row = o + (size_t)(first_row + row) * HS;
                float4 x[HS / ROW_THREADS / 4];
#pragma unroll
                for (int i = 0; i < HS / ROW_THREADS / 4; i++) {
                    const int col = 4 * (i * ROW_THREADS + lane);
                    const float4 old = block_key == 0 ? make_float4(0, 0, 0, 0) : *(const float4 *)(o_row + col);
                    x[i] = sum_of_parts<WARPS>(parts + row * PART_STRIDE + col, ROWS * PART_STRIDE);
                    x[i] = make_float4(part_weight * x[i].x + weight * old.x, part_weight * x[i].y + weight * old.y,
                                       part_weight * x[i].z + weight * old.z, part_weight * x[i].w + weight * old.w);
                }
#pragma unroll
                for (int i = 0; i < HS / ROW_THREADS / 4; i++) {
                    const int col = 4 * (i * ROW_THREADS + lane);
                    if (last_block)
                        *(uint2 *)(out + (size_t)(first_row + row) * C + col) =
                            make_uint2(pack_bf16(x[i].x, x[i].y), pack_bf16(x[i].z, x[i].w));
                    else *(float4 *)(o_row + col) = x[i];
                }
                if (lane == 0) lse[first_row + row] = merged;
            }
        }
    }
}

template <int HS, bool CAUSAL>
static void forward(bf16 *out, float *lse, const bf16 *qkv, float *workspace, Shape s, cudaStream_t stream) {
    using Tile = Tiles<HS>;
    const float scale_log2 = LOG2_E / sqrtf((float)HS);
    auto kernel = attention_forward_kernel<HS, CAUSAL>;
    LAUNCH(kernel, s.B * s.NH, Tile::THREADS, Tile::FORWARD_BYTES, stream, out, lse, workspace, qkv, s.T, s.NH, scale_log2);
}

// ----------------------------------------------------------------------------
// Backward

// A warp's result, rounded to bf16, to a tile of its own.
template <int M, int N8> DEVICE void store_tile(bf16 *tile, const float (&acc)[M][N8][4]) {
    __syncwarp();  // the warp has read what was there before
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * m + 8 * half + lane_id() / 4;
#pragma unroll
            for (int n = 0; n < N8; n++)
                *(uint32_t *)(tile + row * 8 * N8 + (n ^ swizzle<8 * N8>(row)) * 8 + lane_id() % 4 * 2) =
                    pack_bf16(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
        }
    }
    __syncwarp();
}

// acc (16 M, COLS) += Aᵀ B: A (K, 16 M) is a tile, B the first K rows of tile b.
template <int K, int COLS, int M> DEVICE void product_atb(float (&acc)[M][COLS / 8][4], const bf16 *a, const bf16 *b) {
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_left_trans<16 * M>(left[m], a, k, 16 * m);
        product_step<COLS>(acc, left, b, k);
    }
}

// Grid: B · NH. dK and dV stay in the registers of the warp that owns the keys; P and dS, which these need transposed, take the
// way through shared memory. dq is dQ in fp32 as (B, NH, T, HS), for the time between two blocks of keys.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(Tiles<HS>::THREADS, 2) void attention_backward_kernel(
    bf16 *dqkv, float *dq, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, int T, int NH, float scale) {
    using Tile = Tiles<HS>;
    constexpr int ROWS = Tile::ROWS, OWN = Tile::OWN, THREADS = Tile::THREADS, WARPS = Tile::WARPS, PART_STRIDE = Tile::PART_STRIDE;
    constexpr int WARP_KEYS = OWN / WARPS;  // keys of a warp
    constexpr int Q16 = ROWS / 16, K16 = WARP_KEYS / 16;  // 16-row pieces of a tile's queries, and of a warp's keys
    DYNAMIC_SHARED(memory);
    bf16 *const k_tile = (bf16 *)memory, *const v_tile = k_tile + OWN * HS, *const q_tiles = v_tile + OWN * HS;
    bf16 *const p_tile = q_tiles + 3 * Tile::STAGES * ROWS * HS + warp_id() * ROWS * WARP_KEYS;  // the warp's P, then dS
    float *const parts = (float *)(q_tiles + 3 * Tile::STAGES * ROWS * HS + ROWS * OWN);
    float *const row_lse = parts + WARPS * ROWS * PART_STRIDE, *const row_delta = row_lse + ROWS;

    const int head = blockIdx.x;
    const size_t C = (size_t)NH * HS, row0 = (size_t)(head / NH) * T;
    const bf16 *const q = qkv + row0 * 3 * C + head % NH * HS, *const k = q + C, *const v = k + C;
    const bf16 *const dout_head = dout + row0 * C + head % NH * HS, *const out_head = out + row0 * C + head % NH * HS;
    bf16 *const dqkv_head = dqkv + row0 * 3 * C + head % NH * HS;
    dq += (size_t)head * T * HS;
    lse += (size_t)head * T;

    const int tiles = (T + ROWS - 1) / ROWS;
    auto load_queries = [&](int tile) {
        bf16 *to = q_tiles + tile % Tile::STAGES * 3 * ROWS * HS;
        load_tile<ROWS, HS, THREADS>(to, q, 3 * C, tile * ROWS, T);
        load_tile<ROWS, HS, THREADS>(to + ROWS * HS, dout_head, C, tile * ROWS, T);
        load_tile<ROWS, HS, THREADS>(to + 2 * ROWS * HS, out_head, C, tile * ROWS, T);
        cp_async_commit();
    };
    const float scale_log2 = LOG2_E * scale;
    for (int block_key = 0; block_key < T; block_key += OWN) {
        const int first_key = block_key + warp_id() * WARP_KEYS, first_tile = CAUSAL ? block_key / ROWS : 0;
        __syncthreads();  // all are done with the block before
        load_tile<OWN, HS, THREADS>(k_tile, k, 3 * C, block_key, T);
        load_tile<OWN, HS, THREADS>(v_tile, v, 3 * C, block_key, T);
        load_queries(first_tile);
        float dk[K16][HS / 8][4] = {}, dv[K16][HS / 8][4] = {};
        for (int tile = first_tile; tile < tiles; tile++) {
            cp_async_wait<0>();
            __syncthreads();  // everybody's copies have arrived, and everybody is done with the tile before
            if (tile + 1 < tiles) load_queries(tile + 1);
            const bf16 *q_tile = q_tiles + tile % Tile::STAGES * 3 * ROWS * HS;
            const bf16 *dout_tile = q_tile + ROWS * HS, *out_tile = dout_tile + ROWS * HS;
            const int first_row = tile * ROWS;

            // delta and lse of the queries; rows from T on get an lse of +inf, which makes their P zero. A few neighbouring
            // threads share a row.
            constexpr int ROW_THREADS = THREADS / ROWS;
            const int row = threadIdx.x / ROW_THREADS, lane = threadIdx.x % ROW_THREADS;
            float delta = 0;
#pragma unroll
            for (int chunk = lane; chunk < HS / 8; chunk += ROW_THREADS) {
                const int at = row * HS + (chunk ^ swizzle<HS>(row)) * 8;
                const uint4 a = *(const uint4 *)(dout_tile + at), b = *(const uint4 *)(out_tile + at);
                const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 x = unpack_bf16(left[i]), y = unpack_bf16(right[i]);
                    delta += x.x * y.x + x.y * y.y;
                }
            }
#pragma unroll
            for (int distance = ROW_THREADS / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(~0u, delta, distance);
            const float lse_log2 = first_row + row < T ? LOG2_E * lse[first_row + row] : INFINITY;

            float p[Q16][2 * K16][4] = {}, ds[Q16][2 * K16][4] = {};
            product_abt<HS>(p, q_tile, 0, k_tile, warp_id() * WARP_KEYS);
            product_abt<HS>(ds, dout_tile, 0, v_tile, warp_id() * WARP_KEYS);
            if (lane == 0) {
                row_lse[row] = lse_log2;
                row_delta[row] = delta;
            }
            __syncthreads();  // lse and delta are there for all
            if ((CAUSAL && first_key + WARP_KEYS - 1 > first_row) || first_key + WARP_KEYS > T)
                mask_scores(p, first_row, first_key, T, CAUSAL);
#pragma unroll
            for (int m = 0; m < Q16; m++) {
#pragma unroll
                for (int n = 0; n < 2 * K16; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int j = 16 * m + i / 2 * 8 + lane_id() / 4;
                        p[m][n][i] = exp2_approx(scale_log2 * p[m][n][i] - row_lse[j]);
                        ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - row_delta[j]);
                    }
                }
            }

            store_tile(p_tile, p);
            product_atb<ROWS, HS>(dv, p_tile, dout_tile);
            store_tile(p_tile, ds);
            product_atb<ROWS, HS>(dk, p_tile, q_tile);
            float part[Q16][HS / 8][4] = {};
            product_ab<HS>(part, ds, k_tile, warp_id() * WARP_KEYS);
            store_part(parts + warp_id() * ROWS * PART_STRIDE, PART_STRIDE, part);
            __syncthreads();  // the parts of all warps are there

            if (first_row + row < T) {
                const bool last_block = block_key + OWN >= (CAUSAL ? first_row + row + 1 : T);
                float *const dq_row = dq + (size_t)(first_row + row) * HS;
                float4 x[HS / ROW_THREADS / 4];
#pragma unroll
                for (int i = 0; i < HS / ROW_THREADS / 4; i++) {
                    const int col = 4 * (i * ROW_THREADS + lane);
                    const float4 old = block_key == 0 ? make_float4(0, 0, 0, 0) : *(const float4 *)(dq_row + col);
                    x[i] = sum_of_parts<WARPS>(parts + row * PART_STRIDE + col, ROWS * PART_STRIDE);
                    x[i] = make_float4(x[i].x + old.x, x[i].y + old.y, x[i].z + old.z, x[i].w + old.w);
                }
#pragma unroll
                for (int i = 0; i < HS / ROW_THREADS / 4; i++) {
                    const int col = 4 * (i * ROW_THREADS + lane);
                    if (last_block)
                        *(uint2 *)(dqkv_head + (size_t)(first_row + row) * 3 * C + col) =
                            make_uint2(pack_bf16(scale * x[i].x, scale * x[i].y), pack_bf16(scale * x[i].z, scale * x[i].w));
                    else *(float4 *)(dq_row + col) = x[i];
                }
            }
        }
        store_rows(dqkv_head + C, 3 * C, first_key, T, dk, scale);
        store_rows(dqkv_head + 2 * C, 3 * C, first_key, T, dv, 1.0f);
    }
}

template <int HS, bool CAUSAL>
static void backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, float *workspace, Shape s,
                     cudaStream_t stream) {
    using Tile = Tiles<HS>;
    const float scale = 1.0f / sqrtf((float)HS);
    auto kernel = attention_backward_kernel<HS, CAUSAL>;
    LAUNCH(kernel, s.B * s.NH, Tile::THREADS, Tile::BACKWARD_BYTES, stream, dqkv, workspace, dout, qkv, out, lse, s.T, s.NH, scale);
}

// ----------------------------------------------------------------------------
// What the harness sees

static bool supports(Shape s) {
    return has_tiles("v1", s, s.HS == 128 ? Tiles<128>::BYTES : s.HS == 64 ? Tiles<64>::BYTES : Tiles<32>::BYTES);
}

static size_t workspace_bytes(Shape s) { return (size_t)s.B * s.NH * s.T * s.HS * sizeof(float); }

static void attention_forward(bf16 *out, float *lse, const bf16 *qkv, void *workspace, Shape s, cudaStream_t stream) {
    FOR_HEAD_SIZE(s, (forward<HS, CAUSAL>(out, lse, qkv, (float *)workspace, s, stream)));
}

static void attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *workspace,
                               Shape s, cudaStream_t stream) {
    FOR_HEAD_SIZE(s, (backward<HS, CAUSAL>(dqkv, dout, qkv, out, lse, (float *)workspace, s, stream)));
}

VARIANT(v1, "FlashAttention: one thread block a head walks over blocks of keys; "
            "warps split over keys, O and dQ through device memory")

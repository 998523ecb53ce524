// Flash attention on Hopper GPUs (compute capability 9.0), for head sizes 64 and 128: what attention.cuh does, with the instructions
// that only these GPUs have. Kernels and tensors are those of attention.cuh; this is about who does what when.
//
// A thread block stays on its multiprocessor to the end and takes one piece of work after the other: some rows (queries, or keys) of
// one head. One of its warpgroups, the producer, only starts copies. The others, the consumers, have 64 of the rows each, and
// multiply. Every tile in shared memory has two barriers: "full", on which the consumers wait for its copy, and "empty", on which the
// producer waits until all of them are done with what was there before. The tiles of a kind form a ring of a few stages, so that
// copies run ahead. Nobody waits for all threads.
//
//     producer      | Q  K  V | K  V | K  V | Q' K' V' |          ahead by as much as there is room for
//     consumer 0         | S0 | softmax | S1, PV0 | softmax | S2, PV1 | ...
//     consumer 1              | S0      | softmax | S1, PV0 | softmax | ...
//
// The tensor cores go on by themselves once a product is started. Two things keep them busy: consumers take turns in starting theirs,
// so that one's softmax runs beside the others' products; and within a consumer the product P V of the tile before runs beside the
// softmax of this one. (Both are FlashAttention-3's: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony
// and Low-precision", 2024.)
//
// The functions that start copies and products, and the layout of tiles ("slabs"), are in gpt/hopper.cuh. dev/attention/v3.cu has
// the forward in its simplest form, and dev/attention/README.md explains it.
#ifndef ATTENTION_SM90_CUH
#define ATTENTION_SM90_CUH

#include <assert.h>

#include "gpt/hopper.cuh"
#include "gpt/tile.cuh"

// ----------------------------------------------------------------------------
// Pieces of work: `rows` rows of a head. Rows are counted so that the last piece ends with the last 64 rows, and the first may
// have negative ones: when causal, the first is the cheapest.

struct AttentionWork {
    int T, NH, heads;     // of B · NH
    int blocks, shift;    // pieces of a head; the first starts at row -shift
    int items;            // heads · blocks
    int section;          // heads that are worked on at about the same time, whose K and V fit into the L2 cache together
    unsigned *claims;     // 0 at first
    float scale;
};

DEVICE int work_row(const AttentionWork &work, int block, int rows) { return block * rows - work.shift; }

// Item 0, 1, ... of the list that all thread blocks take from: section by section, and in each the blocks that cost most first, as
// the last to end should be short. DESCENDING: these are the last of a head (of queries), else the first (of keys).
template <bool DESCENDING> DEVICE void work_find(const AttentionWork &work, int item, int *head, int *block) {
    const int section = item / (work.section * work.blocks), first = section * work.section;
    const int heads = min(work.section, work.heads - first), i = item - first * work.blocks;
    *head = first + i % heads;
    *block = DESCENDING ? work.blocks - 1 - i / heads : i / heads;
}

// The item that this thread block has after its first, which is blockIdx.x.
DEVICE int work_claim(const AttentionWork &work) { return gridDim.x + atomicAdd(work.claims, 1u); }

// ----------------------------------------------------------------------------
// Forward

template <int HS> struct AttentionSm90Forward {
    static constexpr int CONSUMERS = HS == 64 ? 3 : 2, ROWS = 64 * CONSUMERS, KEYS = 128;
    static constexpr int STAGES = HS == 64 ? 3 : 2, Q_SLOTS = 2;  // tiles of K and V under way; of Q, two pieces of work
    static constexpr bool TAKE_TURNS = HS == 64;                  // with head size 128 there is less softmax, and turns cost more
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    // Registers a thread; all have 65536 / THREADS at first, and the consumers what the producer gives up.
    static constexpr int REGISTERS = CONSUMERS == 3 ? 160 : 240, PRODUCER_REGISTERS = 32;

    struct Shared {
        bf16 q[Q_SLOTS][HS / 64][ROWS][64];  // where O leaves through, too
        bf16 k[STAGES][HS / 64][KEYS][64], v[STAGES][HS / 64][KEYS][64];
        Barrier q_full[Q_SLOTS], q_empty[Q_SLOTS], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
        int item[Q_SLOTS];  // of which the slot has Q; -1 behind the last
    };
};

// How many tiles of keys the rows first_row .. first_row + rows - 1 see.
template <bool CAUSAL> DEVICE int key_tiles(int T, int first_row, int rows, int keys) {
    return ((CAUSAL ? min(T, first_row + rows) : T) + keys - 1) / keys;
}

// Keys beyond the causal diagonal or the end become -inf in S, whose first element is at (first_row, first_key).
template <int N> DEVICE void mask_slab_scores(float (&s)[N], int first_row, int first_key, int T, bool causal) {
    const int row = first_row + threadIdx.x % 128 / 32 * 16 + lane_id() / 4, key = first_key + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int last = causal ? row + i / 2 % 2 * 8 : T - 1;
        if (key + i / 4 * 8 + i % 2 > last) s[i] = -INFINITY;
    }
}

// One step of the online softmax of the two rows of each lane, as attention_online_softmax(), but O is not rescaled yet, as products
// may be adding to it: that is done by `rescale`.
template <int N>
DEVICE void online_softmax(float (&s)[N], float (&row_max)[2], float (&row_sum)[2], float (&rescale)[2], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float maximum = row_max[half];
#pragma unroll
        for (int i = 2 * half; i < N; i += 4) maximum = fmaxf(maximum, fmaxf(s[i], s[i + 1]));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
        rescale[half] = exp2_approx(scale_log2 * (row_max[half] - maximum));
        row_max[half] = maximum;
        const float offset = scale_log2 * maximum;
        float sum = 0;
#pragma unroll
        for (int i = 2 * half; i < N; i += 4) {
            s[i] = exp2_approx(scale_log2 * s[i] - offset);
            s[i + 1] = exp2_approx(scale_log2 * s[i + 1] - offset);
            sum += s[i] + s[i + 1];
        }
        row_sum[half] = row_sum[half] * rescale[half] + sum;
    }
}

template <int HS, bool CAUSAL>
DEVICE void attention_sm90_forward_produce(typename AttentionSm90Forward<HS>::Shared &shared, const TensorMap *q_map,
                                           const TensorMap *kv_map, const AttentionWork &work) {
    using Tile = AttentionSm90Forward<HS>;
    Ring<Tile::Q_SLOTS> slot;
    Ring<Tile::STAGES> stage;
    for (int item = blockIdx.x;;) {
        barrier_wait(&shared.q_empty[slot.tile], slot.parity ^ 1);
        Barrier *const q_full = &shared.q_full[slot.tile];
        shared.item[slot.tile] = item < work.items ? item : -1;
        if (item >= work.items) {
            barrier_arrive(q_full);
            return;
        }
        const int next = work_claim(work);  // now, so that it is there when it is needed
        int head, block;
        work_find<true>(work, item, &head, &block);
        const int row = work_row(work, block, Tile::ROWS), n = head % work.NH, b = head / work.NH;
        barrier_expect(q_full, sizeof shared.q[0]);
#pragma unroll
        for (int i = 0; i < HS / 64; i++) tensor_load(shared.q[slot.tile][i], q_map, q_full, 64 * i, row, n, b);
        slot.advance();
        for (int tile = key_tiles<CAUSAL>(work.T, row, Tile::ROWS, Tile::KEYS) - 1; tile >= 0; tile--) {
            Barrier *const k_full = &shared.k_full[stage.tile], *const v_full = &shared.v_full[stage.tile];
            barrier_wait(&shared.k_empty[stage.tile], stage.parity ^ 1);
            barrier_expect(k_full, sizeof shared.k[0]);
#pragma unroll
            for (int i = 0; i < HS / 64; i++)
                tensor_load(shared.k[stage.tile][i], kv_map, k_full, 64 * i, tile * Tile::KEYS, work.NH + n, b);
            barrier_wait(&shared.v_empty[stage.tile], stage.parity ^ 1);
            barrier_expect(v_full, sizeof shared.v[0]);
#pragma unroll
            for (int i = 0; i < HS / 64; i++)
                tensor_load(shared.v[stage.tile][i], kv_map, v_full, 64 * i, tile * Tile::KEYS, 2 * work.NH + n, b);
            stage.advance();
        }
        item = next;
    }
}

template <int HS, bool CAUSAL>
DEVICE void attention_sm90_forward_consume(typename AttentionSm90Forward<HS>::Shared &shared, const TensorMap *out_map, float *lse,
                                           const AttentionWork &work, int consumer) {
    using Tile = AttentionSm90Forward<HS>;
    constexpr int KEYS = Tile::KEYS, CONSUMERS = Tile::CONSUMERS;
    const bool leader = threadIdx.x % 128 == 0;  // speaks for the warpgroup
    const float scale_log2 = LOG2_E * work.scale;
    Ring<Tile::Q_SLOTS> slot;
    Ring<Tile::STAGES> k_stage, v_stage;
    int leaving = -1;  // the slot through which O is leaving

    // Named barriers 1, 2, 3 give consumer 0, 1, 2 its turn in starting products; at 4, 5, 6 the threads of one meet.
    auto take_turn = [&] { if (Tile::TAKE_TURNS) named_barrier_sync(1 + consumer, 256); };
    auto pass_turn = [&] { if (Tile::TAKE_TURNS) named_barrier_arrive(1 + (consumer + 1) % CONSUMERS, 256); };
    auto free_k = [&] {
        if (leader) barrier_arrive(&shared.k_empty[k_stage.tile]);
        k_stage.advance();
    };
    auto free_v = [&] {
        if (leader) barrier_arrive(&shared.v_empty[v_stage.tile]);
        v_stage.advance();
    };
    auto free_leaving = [&] {
        if (leader && leaving >= 0) {
            store_wait_read<0>();
            barrier_arrive(&shared.q_empty[leaving]);
        }
        leaving = -1;
    };

    if (consumer == CONSUMERS - 1) pass_turn();  // the first is consumer 0's
    for (;; slot.advance()) {
        barrier_wait(&shared.q_full[slot.tile], slot.parity);
        const int item = shared.item[slot.tile];
        if (item < 0) break;
        int head, block;
        work_find<true>(work, item, &head, &block);
        const int block_row = work_row(work, block, Tile::ROWS), row = block_row + 64 * consumer;
        const bool any = row >= 0 && row < work.T;
        bf16 *const q = shared.q[slot.tile][0][64 * consumer];

        // Tiles of keys from the last to the first. Those beyond the diagonal are the other consumers' only. (A product needs all four
        // warps; where there is none, they have to meet before the leader frees what a slow one may still have to wait for.)
        int tile = key_tiles<CAUSAL>(work.T, block_row, Tile::ROWS, KEYS) - 1;
        for (const int last = any ? key_tiles<CAUSAL>(work.T, row, 64, KEYS) - 1 : -1; tile > last; tile--) {
            take_turn();
            pass_turn();
            barrier_wait(&shared.k_full[k_stage.tile], k_stage.parity);
            barrier_wait(&shared.v_full[v_stage.tile], v_stage.parity);
            named_barrier_sync(4 + consumer, 128);
            free_k();
            free_v();
        }
        if (!any) {
            free_leaving();
            named_barrier_sync(4 + consumer, 128);
            if (leader) barrier_arrive(&shared.q_empty[slot.tile]);
            continue;
        }

        float o[HS / 2] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, rescale[2];
        uint32_t p[KEYS / 16][4];

        // The first tile is the only one with a diagonal or an end. There is nothing yet to overlap its softmax with. SEEN keys of
        // it are seen by any row: half of them where the rows' diagonal is in the first half.
        auto first = [&](auto &s) {
            constexpr int SEEN = sizeof s / sizeof s[0] * 2;
            barrier_wait(&shared.k_full[k_stage.tile], k_stage.parity);
            take_turn();
            start_product_abt<HS>(s, q, Tile::ROWS, shared.k[k_stage.tile][0][0], KEYS);
            pass_turn();
            wgmma_wait<0>();
            registers_settled(s);
            free_k();
            free_leaving();
            if (CAUSAL || work.T % KEYS != 0) mask_slab_scores(s, row, tile * KEYS, work.T, CAUSAL);
            online_softmax(s, row_max, row_sum, rescale, scale_log2);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                if (i < SEEN / 16) pack_left(p[i], s, i % (SEEN / 16));
                else p[i][0] = p[i][1] = p[i][2] = p[i][3] = 0;
            }
        };
        if (CAUSAL && row % KEYS == 0) {
            float s[KEYS / 4];
            first(s);
        } else {
            float s[KEYS / 2];
            first(s);
        }
        for (tile--; tile >= 0; tile--) {
            float s[KEYS / 2];
            barrier_wait(&shared.k_full[k_stage.tile], k_stage.parity);
            take_turn();
            start_product_abt<HS>(s, q, Tile::ROWS, shared.k[k_stage.tile][0][0], KEYS);
            barrier_wait(&shared.v_full[v_stage.tile], v_stage.parity);
            start_product_ab<HS>(o, p, shared.v[v_stage.tile][0][0], KEYS);  // of the tile before
            pass_turn();
            wgmma_wait<1>();
            registers_settled(s);
            free_k();
            online_softmax(s, row_max, row_sum, rescale, scale_log2);
            wgmma_wait<0>();
            registers_settled(o);
            registers_settled(p);
            free_v();
#pragma unroll
            for (int i = 0; i < HS / 2; i++) o[i] *= rescale[i / 2 % 2];
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) pack_left(p[i], s, i);
        }
        barrier_wait(&shared.v_full[v_stage.tile], v_stage.parity);
        start_product_ab<HS>(o, p, shared.v[v_stage.tile][0][0], KEYS);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 1);
            row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 2);
            const int lane_row = row + threadIdx.x % 128 / 32 * 16 + 8 * half + lane_id() / 4;
            if (lane_id() % 4 == 0 && lane_row < work.T)
                lse[(size_t)head * work.T + lane_row] = LN_2 * (scale_log2 * row_max[half] + log2f(row_sum[half]));
        }
        const float inverse[2] = {1.0f / row_sum[0], 1.0f / row_sum[1]};
        wgmma_wait<0>();
        registers_settled(o);
        free_v();

        // O leaves by way of Q's place, which only these four warps have read.
        store_to_slabs<HS>(q, Tile::ROWS, o, inverse);
        fence_async();
        named_barrier_sync(4 + consumer, 128);
        if (leader) {
#pragma unroll
            for (int i = 0; i < HS / 64; i++)
                tensor_store(out_map, shared.q[slot.tile][i][64 * consumer], 64 * i, row, head % work.NH, head / work.NH);
            store_commit();
        }
        leaving = slot.tile;
    }
    if (leader) store_wait_read<0>();
}

// Grid: as many blocks as there are multiprocessors. The maps are of Q and of K and V in qkv, by ROWS and KEYS rows, and of out, by 64.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(AttentionSm90Forward<HS>::THREADS, 1) void attention_sm90_forward_kernel(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap out_map,
    float *lse, const __grid_constant__ AttentionWork work) {
    using Tile = AttentionSm90Forward<HS>;
    DYNAMIC_SHARED(memory);
    typename Tile::Shared &shared = *(typename Tile::Shared *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::Q_SLOTS; i++) barrier_init(&shared.q_full[i], 1), barrier_init(&shared.q_empty[i], Tile::CONSUMERS);
        for (int i = 0; i < Tile::STAGES; i++) {
            barrier_init(&shared.k_full[i], 1), barrier_init(&shared.k_empty[i], Tile::CONSUMERS);
            barrier_init(&shared.v_full[i], 1), barrier_init(&shared.v_empty[i], Tile::CONSUMERS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == Tile::CONSUMERS) {
        registers_decrease<Tile::PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 == 0) attention_sm90_forward_produce<HS, CAUSAL>(shared, &q_map, &kv_map, work);
    } else {
        registers_increase<Tile::REGISTERS>();
        attention_sm90_forward_consume<HS, CAUSAL>(shared, &out_map, lse, work, warpgroup);
    }
}

static inline TensorMap attention_sm90_map(const bf16 *tensor, int B, int T, int slots, int HS, int rows) {
    TensorMap map;
    if (!tensor_map_make(&map, tensor, B, T, slots, HS, rows)) die_of_failure();
    return map;
}

// The work of a launch, whose list of items `claims` is to count; and the grid.
static inline AttentionWork attention_sm90_work(int B, int T, int NH, int HS, int rows, unsigned *claims) {
    const int blocks = (T + rows - 1) / rows, section = (8 << 20) / (4 * HS) / T;
    return {T, NH, B * NH, blocks, blocks * rows - (T + 63) / 64 * 64, B * NH * blocks, section < 4 ? 4 : section, claims,
            1.0f / sqrtf((float)HS)};
}
static inline unsigned attention_sm90_grid(const AttentionWork &work) {
    int device, multiprocessors;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    return work.items < multiprocessors ? work.items : multiprocessors;
}

template <int HS>
static void attention_sm90_forward_of(bf16 *out, float *lse, const bf16 *qkv, unsigned *claims, int B, int T, int NH, bool causal,
                                      cudaStream_t stream) {
    using Tile = AttentionSm90Forward<HS>;
    const AttentionWork work = attention_sm90_work(B, T, NH, HS, Tile::ROWS, claims);
    const TensorMap q_map = attention_sm90_map(qkv, B, T, 3 * NH, HS, Tile::ROWS);
    const TensorMap kv_map = attention_sm90_map(qkv, B, T, 3 * NH, HS, Tile::KEYS);
    const TensorMap out_map = attention_sm90_map(out, B, T, NH, HS, 64);
    auto kernel = causal ? attention_sm90_forward_kernel<HS, true> : attention_sm90_forward_kernel<HS, false>;
    CUDA_CHECK(cudaMemsetAsync(claims, 0, sizeof *claims, stream));
    LAUNCH(kernel, attention_sm90_grid(work), Tile::THREADS, sizeof(typename Tile::Shared), stream, q_map, kv_map, out_map, lse, work);
}
#endif

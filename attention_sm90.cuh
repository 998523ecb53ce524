// Flash attention on Hopper GPUs (compute capability 9.0), for head sizes 64 and 128: what attention.cuh does, with the
// instructions that only these GPUs have. Kernels and tensors are those of attention.cuh; this is about who does what when.
//
// A thread block stays on its multiprocessor to the end and takes one piece of work after the other: some rows (queries, or keys)
// of one head. One of its warpgroups, the producer, only starts copies. The others, the consumers, have 64 of the rows each, and
// multiply. Every tile in shared memory has two barriers: "full", on which the consumers wait for its copy, and "empty", on which
// the producer waits until all of them are done with what was there before. The tiles of a kind form a ring of a few stages, so
// that copies run ahead. Nobody waits for all threads.
//
//     producer      | Q  K  V | K  V | K  V | Q' K' V' |          ahead by as much as there is room for
//     consumer 0         | S0 | softmax | S1, PV0 | softmax | S2, PV1 | ...
//     consumer 1              | S0      | softmax | S1, PV0 | softmax | ...
//
// The tensor cores go on by themselves once a product is started. Two things keep them busy: consumers take turns in starting
// theirs, so that one's softmax runs beside the others' products; and within a consumer the product P V of the tile before runs
// beside the softmax of this one. (Both are FlashAttention-3's: Shah et al., "FlashAttention-3: Fast and Accurate Attention with
// Asynchrony and Low-precision", 2024.) Keys go from the last tile to the first: the one with the diagonal or the end comes before
// the loop, which then needs no mask, and each row sees a key in its first tile.
//
// The functions that start copies and products, and the layout of tiles ("slabs"), are in gpt/hopper.cuh. dev/attention/v3.cu has
// the forward in its simplest form, and dev/attention/README.md explains it.
#ifndef ATTENTION_SM90_CUH
#define ATTENTION_SM90_CUH

#include "gpt/hopper.cuh"
#include "gpt/tile.cuh"

// ----------------------------------------------------------------------------
// Pieces of work: `rows` rows of a head. Pieces of queries end with the last 64 rows, so it is the first that may be short, and
// begin at a negative row; when causal, that is the cheapest one.

struct Sm90Work {
    int T, NH, heads;      // of B · NH
    int blocks, shift;     // pieces of a head; the first starts at row -shift
    int items;             // heads · blocks
    int section_heads;     // heads that are worked on at about the same time, so that their K and V stay in the L2 cache
    unsigned *claims;      // how many items have been claimed; 0 at first
    float scale;
};

struct Sm90Piece { int head, n, b, block, row; };  // of head n of batch element b; which of its pieces; the first row

// Item 0, 1, ... of the list that all thread blocks take from: section by section, and in each block by block; DESCENDING: from the
// last to the first. Queries are best taken so when causal, as the last cost most, and those who end last should have short ones.
template <bool DESCENDING> DEVICE Sm90Piece work_find(const Sm90Work &work, int item, int rows) {
    const int first = item / (work.section_heads * work.blocks) * work.section_heads;  // head of the section
    const int heads = min(work.section_heads, work.heads - first), i = item - first * work.blocks;
    const int head = first + i % heads, block = DESCENDING ? work.blocks - 1 - i / heads : i / heads;
    return {head, head % work.NH, head / work.NH, block, block * rows - work.shift};
}

// The item that a thread block has after its first, which is blockIdx.x.
DEVICE int work_claim(const Sm90Work &work) { return gridDim.x + atomicAdd(work.claims, 1u); }

// Tells the consumers which item comes next, or -1 if there is none, once the place for it is free. False if there is none.
template <int N>
DEVICE bool announce(int (&items)[N], Barrier (&full)[N], Barrier (&empty)[N], const Ring<N> &at, int item, const Sm90Work &work) {
    const bool any = item < work.items;
    barrier_wait(&empty[at.place], at.parity ^ 1);
    items[at.place] = any ? item : -1;
    if (!any) barrier_arrive(&full[at.place]);
    return any;
}

// The work of a launch. A section has 8 MiB of K and V, but 4 heads at least, as blocks of one head alone would be of unequal
// length.
static inline Sm90Work sm90_work(int B, int T, int NH, int HS, int rows, bool first_is_short, unsigned *claims) {
    const int blocks = (T + rows - 1) / rows, section_heads = (8 << 20) / (4 * HS) / T;
    const size_t items = (size_t)B * NH * blocks;
    if (items > INT32_MAX - 4096)  // claims go beyond them, by one for each thread block
        die("attention for B = %d, T = %d and %d heads has %zu pieces of work; expected at most %d", B, T, NH, items,
            INT32_MAX - 4096);
    return {T, NH, B * NH, blocks, first_is_short ? blocks * rows - (T + 63) / 64 * 64 : 0, (int)items,
            section_heads < 4 ? 4 : section_heads, claims, 1.0f / sqrtf((float)HS)};
}

// A thread block for each multiprocessor, if there is work for it.
static inline unsigned sm90_grid(const Sm90Work &work) {
    int device, multiprocessors;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    return work.items < multiprocessors ? work.items : multiprocessors;
}

static inline TensorMap sm90_map(const bf16 *tensor, int B, int T, int slots, int HS, int rows) {
    TensorMap map;
    if (!tensor_map_make(&map, tensor, B, T, slots, HS, rows)) die_of_failure();
    return map;
}

// ----------------------------------------------------------------------------
// Tiles in shared memory, of all HS columns: bf16 tile[HS / 64][ROWS][64]

// Starts to copy ROWS rows of one slot of a tensor; `full` is to expect sizeof tile bytes of it.
template <int HS, int ROWS>
DEVICE void load_tile(bf16 (&tile)[HS / 64][ROWS][64], const TensorMap *map, Barrier *full, int row, int slot, int batch) {
#pragma unroll
    for (int i = 0; i < HS / 64; i++) tensor_load(tile[i], map, full, 64 * i, row, slot, batch);
}

// Starts to copy 64 rows, from tile_row on, to the tensor.
template <int HS, int ROWS>
DEVICE void store_tile(const TensorMap *map, const bf16 (&tile)[HS / 64][ROWS][64], int tile_row, int row, int slot, int batch) {
#pragma unroll
    for (int i = 0; i < HS / 64; i++) tensor_store(map, tile[i][tile_row], 64 * i, row, slot, batch);
}

// A warpgroup's 64 rows of a tile, from `row` on, as a left factor in registers.
template <int HS, int ROWS>
DEVICE void load_left_rows(uint32_t (&left)[HS / 16][4], const bf16 (&tile)[HS / 64][ROWS][64], int row) {
#pragma unroll
    for (int i = 0; i < HS / 16; i++) load_left<64>(left[i], tile[i / 4][0], row + threadIdx.x % 128 / 32 * 16, i % 4 * 16);
}

template <int N> DEVICE void barriers_init(Barrier (&barriers)[N], unsigned arrivals) {
    for (int i = 0; i < N; i++) barrier_init(&barriers[i], arrivals);
}

// ----------------------------------------------------------------------------
// What consumers do

DEVICE bool is_leader(void) { return threadIdx.x % 128 == 0; }  // speaks for its warpgroup

// The warpgroup is done with what the barrier guards. All of its threads must have waited for it: so it has multiplied it, or they
// have met. Else one that is slow may find that its phase has gone by. (That a product is over for all four warps when it is for
// one is not in the manual, but CUTLASS's pipelines count on it, too.)
DEVICE void release(Barrier *empty) { if (is_leader()) barrier_arrive(empty); }

// Named barriers: each consumer has its own for its turn in starting products, and one at which its threads meet; at the others two
// consumers meet. Before the first item the last consumer passes the turn on to consumer 0.
enum { TURN = 1, MEETING = 4, DS_WRITTEN = 7, K_FREE = 8 };
template <class Tile> DEVICE void take_turn(int consumer) { if (Tile::TAKE_TURNS) named_barrier_sync(TURN + consumer, 256); }
template <class Tile> DEVICE void pass_turn(int consumer) {
    if (Tile::TAKE_TURNS) named_barrier_arrive(TURN + (consumer + 1) % Tile::CONSUMERS, 256);
}
DEVICE void meet(int consumer) { named_barrier_sync(MEETING + consumer, 128); }
DEVICE void both_meet(int barrier) { named_barrier_sync(barrier, 256); }

// Results leave through a tile that is no longer read. The leader frees it once the copy engine has read them, and asks for that as
// late as it can.
struct Leaving {
    int place = -1;  // the leader's
    template <int N> __device__ __forceinline__ void free(Barrier (&empty)[N]) {
        if (place < 0) return;
        store_wait_read<0>();
        barrier_arrive(&empty[place]);
        place = -1;
    }
};

// Divides a thread block, after its first thread has made the barriers: the last warpgroup is the producer.
template <class Tile, class Produce, class Consume> DEVICE void divide_block(Produce produce, Consume consume) {
    if (threadIdx.x == 0) barrier_init_fence();
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so the compiler knows that it is uniform
    if (warpgroup == Tile::CONSUMERS) {
        registers_decrease<Tile::Registers::PRODUCER>();
        produce();
    } else {
        registers_increase<Tile::Registers::CONSUMER>();
        consume(warpgroup);
    }
}

// The row, of a warpgroup's 64, in which a lane has the first two of every four elements of a result; it has the others 8 below.
DEVICE int lane_row(void) { return threadIdx.x % 128 / 32 * 16 + lane_id() / 4; }

// The same number, but the compiler does not know that: what is computed from it stays in the loop, where it costs less than the
// registers to keep it.
DEVICE int opaque(int number) {
#ifdef __CUDACC__
    asm volatile("" : "+r"(number));
#endif
    return number;
}

// How many tiles of keys the rows first_row .. first_row + rows - 1 see.
template <bool CAUSAL> DEVICE int key_tiles(int T, int first_row, int rows, int keys) {
    return ((CAUSAL ? min(T, first_row + rows) : T) + keys - 1) / keys;
}

// Keys beyond the causal diagonal or the end become -inf in S, whose first element is at (first_row, first_key). (When causal, keys
// from T on are beyond the diagonal of all rows up to T.)
template <int N> DEVICE void mask_scores(float (&s)[N], int first_row, int first_key, int T, bool causal) {
    const int row = first_row + lane_row(), key = first_key + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int last = causal ? row + i / 2 % 2 * 8 : T - 1;
        if (key + i / 4 * 8 + i % 2 > last) s[i] = -INFINITY;
    }
}

// Zeros in Pᵀ, whose first element is at (first_key, first_row), where the key lies beyond the query.
template <int N> DEVICE void mask_transposed(float (&p)[N], int first_key, int first_row) {
    const int key = first_key + lane_row(), row = first_row + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (key + i / 2 % 2 * 8 > row + i / 4 * 8 + i % 2) p[i] = 0;
}

// ----------------------------------------------------------------------------
// Forward

// Of a thread. All have 65536 / THREADS at first, rounded down to a multiple of 8; consumers get what the producer gives up.
template <int CONSUMERS> struct Sm90Registers {
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    static constexpr int CONSUMER = CONSUMERS == 3 ? 160 : 240, PRODUCER = CONSUMERS == 3 ? 32 : 24;
    static_assert(PRODUCER + CONSUMERS * CONSUMER <= (CONSUMERS + 1) * (65536 / THREADS / 8 * 8), "consumers would wait for ever");
};

template <int HS> struct Sm90Forward {
    static constexpr int CONSUMERS = HS == 64 ? 3 : 2, ROWS = 64 * CONSUMERS, KEYS = 128;
    static constexpr int STAGES = HS == 64 ? 3 : 2, Q_PLACES = 2;  // tiles of K and V under way; of Q, two pieces of work
    static constexpr bool TAKE_TURNS = HS == 64;                  // with head size 128 there is less softmax, and turns cost more
    using Registers = Sm90Registers<CONSUMERS>;

    struct Shared {
        bf16 q[Q_PLACES][HS / 64][ROWS][64];  // where O leaves through, too
        bf16 k[STAGES][HS / 64][KEYS][64], v[STAGES][HS / 64][KEYS][64];
        Barrier q_full[Q_PLACES], q_empty[Q_PLACES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
        int item[Q_PLACES];  // of which the slot has Q; -1 behind the last
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more than a thread block can have");
};

// One step of the online softmax of the two rows of each lane, as attention_online_softmax(), but O is not rescaled yet, as
// products may be adding to it: that is done by `rescale`.
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
DEVICE void sm90_forward_produce(typename Sm90Forward<HS>::Shared &shared, const TensorMap *q_map, const TensorMap *kv_map,
                                 const Sm90Work &work) {
    using Tile = Sm90Forward<HS>;
    Ring<Tile::Q_PLACES> at;
    Ring<Tile::STAGES> stage;
    for (int item = blockIdx.x, next;; item = next) {
        if (!announce(shared.item, shared.q_full, shared.q_empty, at, item, work)) return;
        Barrier *const q_full = &shared.q_full[at.place];
        next = work_claim(work);  // now, so that it is there when it is needed
        const Sm90Piece piece = work_find<true>(work, item, Tile::ROWS);
        const int k = work.NH + piece.n, v = 2 * work.NH + piece.n;  // slots of qkv
        barrier_expect(q_full, sizeof shared.q[0]);
        load_tile<HS>(shared.q[at.place], q_map, q_full, piece.row, piece.n, piece.b);
        at.advance();
#pragma unroll 1
        for (int tile = key_tiles<CAUSAL>(work.T, piece.row, Tile::ROWS, Tile::KEYS) - 1; tile >= 0; tile--) {
            const int i = stage.place, row = tile * Tile::KEYS;
            barrier_wait(&shared.k_empty[i], stage.parity ^ 1);
            barrier_expect(&shared.k_full[i], sizeof shared.k[0]);
            load_tile<HS>(shared.k[i], kv_map, &shared.k_full[i], row, k, piece.b);
            barrier_wait(&shared.v_empty[i], stage.parity ^ 1);
            barrier_expect(&shared.v_full[i], sizeof shared.v[0]);
            load_tile<HS>(shared.v[i], kv_map, &shared.v_full[i], row, v, piece.b);
            stage.advance();
        }
    }
}

template <int HS, bool CAUSAL>
DEVICE void sm90_forward_consume(typename Sm90Forward<HS>::Shared &shared, const TensorMap *out_map, float *lse,
                                 const Sm90Work &work, int consumer) {
    using Tile = Sm90Forward<HS>;
    constexpr int KEYS = Tile::KEYS;
    const float scale_log2 = LOG2_E * work.scale;
    Ring<Tile::Q_PLACES> at;
    Ring<Tile::STAGES> k_stage, v_stage;
    Leaving leaving;

    auto free_k = [&] { release(&shared.k_empty[k_stage.place]), k_stage.advance(); };
    auto free_v = [&] { release(&shared.v_empty[v_stage.place]), v_stage.advance(); };

    if (consumer == Tile::CONSUMERS - 1) pass_turn<Tile>(consumer);  // the first is consumer 0's
    for (;; at.advance()) {
        barrier_wait(&shared.q_full[at.place], at.parity);
        const int item = shared.item[at.place];
        if (item < 0) break;
        const Sm90Piece piece = work_find<true>(work, item, Tile::ROWS);
        const int row = piece.row + 64 * consumer;
        const bool has_rows = row >= 0;
        bf16 *const q = shared.q[at.place][0][64 * consumer];

        // Tiles beyond the diagonal are the other consumers' only.
        int tile = key_tiles<CAUSAL>(work.T, piece.row, Tile::ROWS, KEYS) - 1;
#pragma unroll 1
        for (const int last = has_rows ? key_tiles<CAUSAL>(work.T, row, 64, KEYS) - 1 : -1; tile > last; tile--) {
            take_turn<Tile>(consumer);
            pass_turn<Tile>(consumer);
            barrier_wait(&shared.k_full[k_stage.place], k_stage.parity);
            barrier_wait(&shared.v_full[v_stage.place], v_stage.parity);
            meet(consumer);
            free_k();
            free_v();
        }
        if (!has_rows) {
            leaving.free(shared.q_empty);
            meet(consumer);
            release(&shared.q_empty[at.place]);
            continue;
        }

        float o[HS / 2] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, rescale[2];
        uint32_t p[KEYS / 16][4];

        // The first tile. There is nothing yet to overlap its softmax with. SEEN keys of it are seen by any row: half of them where
        // the rows' diagonal is in the first half.
        auto first_tile = [&](auto &s) {
            constexpr int SEEN = sizeof s / sizeof s[0] * 2;
            barrier_wait(&shared.k_full[k_stage.place], k_stage.parity);
            take_turn<Tile>(consumer);
            start_product_abt<HS>(s, q, Tile::ROWS, shared.k[k_stage.place][0][0], KEYS);
            pass_turn<Tile>(consumer);
            wgmma_wait<0>();
            registers_settled(s);
            free_k();
            leaving.free(shared.q_empty);
            if (CAUSAL || work.T % KEYS != 0) mask_scores(s, row, tile * KEYS, work.T, CAUSAL);
            online_softmax(s, row_max, row_sum, rescale, scale_log2);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                if (i < SEEN / 16) pack_left(p[i], s, i % (SEEN / 16));
                else p[i][0] = p[i][1] = p[i][2] = p[i][3] = 0;
            }
        };
        if (CAUSAL && row % KEYS == 0) {
            float s[KEYS / 4];
            first_tile(s);
        } else {
            float s[KEYS / 2];
            first_tile(s);
        }
        for (tile--; tile >= 0; tile--) {
            float s[KEYS / 2];
            barrier_wait(&shared.k_full[k_stage.place], k_stage.parity);
            take_turn<Tile>(consumer);
            start_product_abt<HS>(s, q, Tile::ROWS, shared.k[k_stage.place][0][0], KEYS);
            barrier_wait(&shared.v_full[v_stage.place], v_stage.parity);
            start_product_ab<HS>(o, p, shared.v[v_stage.place][0][0], KEYS);  // of the tile before
            pass_turn<Tile>(consumer);
            wgmma_wait<1>();
            registers_settled(s);
            free_k();
            online_softmax(s, row_max, row_sum, rescale, scale_log2);
            keep_behind(row_sum[0] + row_sum[1]);
            wgmma_wait<0>();
            registers_settled(o);
            registers_settled(p);
            free_v();
#pragma unroll
            for (int i = 0; i < HS / 2; i++) o[i] *= rescale[i / 2 % 2];
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) pack_left(p[i], s, i);
        }
        barrier_wait(&shared.v_full[v_stage.place], v_stage.parity);
        start_product_ab<HS>(o, p, shared.v[v_stage.place][0][0], KEYS);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 1);
            row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 2);
            const int out_row = row + lane_row() + 8 * half;
            if (lane_id() % 4 == 0 && out_row < work.T)
                lse[(size_t)piece.head * work.T + out_row] = LN_2 * (scale_log2 * row_max[half] + log2f(row_sum[half]));
        }
        const float inverse[2] = {1.0f / row_sum[0], 1.0f / row_sum[1]};
        wgmma_wait<0>();
        registers_settled(o);
        free_v();

        // O leaves by way of Q's place, which only these four warps have read.
        store_to_slabs<HS>(q, Tile::ROWS, o, inverse);
        fence_async();
        meet(consumer);
        if (is_leader()) {
            store_tile<HS>(out_map, shared.q[at.place], 64 * consumer, row, piece.n, piece.b);
            store_commit();
            leaving.place = at.place;
        }
    }
    if (consumer == 0) take_turn<Tile>(consumer);  // which the last consumer has passed on
    if (is_leader()) store_wait_read<0>();
}

// Grid: as many blocks as there are multiprocessors. The maps are of Q and of K and V in qkv, by ROWS and KEYS rows, and of out, by
// 64.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(Sm90Forward<HS>::Registers::THREADS, 1) void attention_sm90_forward_kernel(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap out_map,
    float *lse, const __grid_constant__ Sm90Work work) {
    using Tile = Sm90Forward<HS>;
    DYNAMIC_SHARED(memory);
    typename Tile::Shared &shared = *(typename Tile::Shared *)memory;
    if (threadIdx.x == 0) {
        barriers_init(shared.q_full, 1), barriers_init(shared.q_empty, Tile::CONSUMERS);
        barriers_init(shared.k_full, 1), barriers_init(shared.k_empty, Tile::CONSUMERS);
        barriers_init(shared.v_full, 1), barriers_init(shared.v_empty, Tile::CONSUMERS);
    }
    divide_block<Tile>(
        [&] { if (is_leader()) sm90_forward_produce<HS, CAUSAL>(shared, &q_map, &kv_map, work); },
        [&](int consumer) { sm90_forward_consume<HS, CAUSAL>(shared, &out_map, lse, work, consumer); });
}

template <int HS>
static void attention_sm90_forward_of(bf16 *out, float *lse, const bf16 *qkv, unsigned *claims, int B, int T, int NH, bool causal,
                                      cudaStream_t stream) {
    using Tile = Sm90Forward<HS>;
    const Sm90Work work = sm90_work(B, T, NH, HS, Tile::ROWS, true, claims);
    const TensorMap q_map = sm90_map(qkv, B, T, 3 * NH, HS, Tile::ROWS);
    const TensorMap kv_map = sm90_map(qkv, B, T, 3 * NH, HS, Tile::KEYS);
    const TensorMap out_map = sm90_map(out, B, T, NH, HS, 64);
    auto kernel = causal ? attention_sm90_forward_kernel<HS, true> : attention_sm90_forward_kernel<HS, false>;
    CUDA_CHECK(cudaMemsetAsync(claims, 0, sizeof *claims, stream));
    LAUNCH(kernel, sm90_grid(work), Tile::Registers::THREADS, sizeof(typename Tile::Shared), stream, q_map, kv_map, out_map, lse,
           work);
}

// ----------------------------------------------------------------------------
// Backward: dQ

template <int HS> struct Sm90Dq {
    static constexpr int CONSUMERS = HS == 64 ? 3 : 2, ROWS = 64 * CONSUMERS, KEYS = 64, STAGES = HS == 64 ? 6 : 3, Q_PLACES = 2;
    static constexpr bool TAKE_TURNS = HS == 64;
    using Registers = Sm90Registers<CONSUMERS>;

    struct Shared {
        bf16 q[Q_PLACES][HS / 64][ROWS][64], dout[Q_PLACES][HS / 64][ROWS][64];  // dQ leaves through q
        bf16 k[STAGES][HS / 64][KEYS][64], v[STAGES][HS / 64][KEYS][64];
        Barrier q_full[Q_PLACES], q_empty[Q_PLACES], k_full[STAGES], v_full[STAGES], empty[STAGES];
        int item[Q_PLACES];
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more than a thread block can have");
};

template <int HS, bool CAUSAL>
DEVICE void sm90_dq_produce(typename Sm90Dq<HS>::Shared &shared, const TensorMap *q_map, const TensorMap *kv_map,
                            const TensorMap *dout_map, const TensorMap *out_map, const Sm90Work &work) {
    using Tile = Sm90Dq<HS>;
    Ring<Tile::Q_PLACES> at;
    Ring<Tile::STAGES> stage;
    for (int item = blockIdx.x, next;; item = next) {
        if (!announce(shared.item, shared.q_full, shared.q_empty, at, item, work)) return;
        Barrier *const q_full = &shared.q_full[at.place];
        next = work_claim(work);
        const Sm90Piece piece = work_find<true>(work, item, Tile::ROWS);
        const int k = work.NH + piece.n, v = 2 * work.NH + piece.n;
        barrier_expect(q_full, sizeof shared.q[0] + sizeof shared.dout[0]);
        load_tile<HS>(shared.q[at.place], q_map, q_full, piece.row, piece.n, piece.b);
        load_tile<HS>(shared.dout[at.place], dout_map, q_full, piece.row, piece.n, piece.b);
#pragma unroll
        for (int i = 0; i < HS / 64; i++) tensor_prefetch(out_map, 64 * i, piece.row, piece.n, piece.b);  // for rows_statistics()
        at.advance();
#pragma unroll 1
        for (int tile = key_tiles<CAUSAL>(work.T, piece.row, Tile::ROWS, Tile::KEYS) - 1; tile >= 0; tile--) {
            const int i = stage.place, row = tile * Tile::KEYS;
            barrier_wait(&shared.empty[i], stage.parity ^ 1);
            barrier_expect(&shared.k_full[i], sizeof shared.k[0]);
            load_tile<HS>(shared.k[i], kv_map, &shared.k_full[i], row, k, piece.b);
            barrier_expect(&shared.v_full[i], sizeof shared.v[0]);
            load_tile<HS>(shared.v[i], kv_map, &shared.v_full[i], row, v, piece.b);
            stage.advance();
        }
    }
}

// lse to base 2 and -delta = -rowsum(dO ∘ O) of a lane's two rows, `row` and `row` + 8. Four lanes share a row: each reads a
// quarter of O's from device memory, and the same quarter of dO's from its tile. dK and dV need them, too, in `stats`: (2, padded
// T) of this head. Rows from T on get an lse of +inf, which makes their P zero.
template <int HS, int ROWS>
DEVICE void rows_statistics(float (&row_lse)[2], float (&minus_delta)[2], float *stats, const bf16 *out, const float *lse,
                            const bf16 (&dout)[HS / 64][ROWS][64], int tile_row, int row, int T, int padded_T, size_t stride) {
#pragma unroll
    for (int half = 0; half < 2; half++, row += 8, tile_row += 8) {
        row_lse[half] = row < T ? LOG2_E * lse[row] : INFINITY;
        minus_delta[half] = 0;
#pragma unroll
        for (int i = 0; i < HS / 32; i++) {
            const int chunk = lane_id() % 4 + 4 * i;  // of 8 elements
            const bf16 *const in_tile = dout[chunk / 8][tile_row] + (chunk % 8 ^ tile_row % 8) * 8;
            const uint4 a = *(const uint4 *)in_tile;
            const uint4 b = row < T ? *(const uint4 *)(out + row * stride + 8 * chunk) : make_uint4(0, 0, 0, 0);
            const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 x = unpack_bf16(left[j]), y = unpack_bf16(right[j]);
                minus_delta[half] -= x.x * y.x + x.y * y.y;
            }
        }
        minus_delta[half] += __shfl_xor_sync(~0u, minus_delta[half], 1);
        minus_delta[half] += __shfl_xor_sync(~0u, minus_delta[half], 2);
        if (lane_id() % 4 == 0) {
            stats[row] = row_lse[half];
            stats[padded_T + row] = minus_delta[half];
        }
    }
}

template <int HS, bool CAUSAL>
DEVICE void sm90_dq_consume(typename Sm90Dq<HS>::Shared &shared, const TensorMap *dqkv_map, float *stats, const bf16 *out,
                            const float *lse, const Sm90Work &work, int padded_T, int consumer) {
    using Tile = Sm90Dq<HS>;
    constexpr int KEYS = Tile::KEYS;
    const float scale_log2 = LOG2_E * work.scale;
    Ring<Tile::Q_PLACES> at;
    Ring<Tile::STAGES> stage;  // of K and V for the scores; dQ uses K of the tile before
    Leaving leaving;

    if (consumer == Tile::CONSUMERS - 1) pass_turn<Tile>(consumer);
    for (;; at.advance()) {
        barrier_wait(&shared.q_full[at.place], at.parity);
        const int item = shared.item[at.place];
        if (item < 0) break;
        const Sm90Piece piece = work_find<true>(work, item, Tile::ROWS);
        const int row = piece.row + 64 * consumer;
        const bool has_rows = row >= 0;
        bf16 *const q = shared.q[at.place][0][64 * consumer], *const dout = shared.dout[at.place][0][64 * consumer];

        int tile = key_tiles<CAUSAL>(work.T, piece.row, Tile::ROWS, KEYS) - 1;
#pragma unroll 1
        for (const int last = has_rows ? key_tiles<CAUSAL>(work.T, row, 64, KEYS) - 1 : -1; tile > last; tile--) {
            take_turn<Tile>(consumer);
            pass_turn<Tile>(consumer);
            barrier_wait(&shared.k_full[stage.place], stage.parity);
            barrier_wait(&shared.v_full[stage.place], stage.parity);
            meet(consumer);
            release(&shared.empty[stage.place]);
            stage.advance();
        }
        if (!has_rows) {
            leaving.free(shared.q_empty);
            meet(consumer);
            release(&shared.q_empty[at.place]);
            continue;
        }

        float s[KEYS / 2], dp[KEYS / 2], dq[HS / 2] = {}, row_lse[2], minus_delta[2];
        uint32_t ds[KEYS / 16][4];
        auto start_scores = [&] {
            barrier_wait(&shared.k_full[stage.place], stage.parity);
            take_turn<Tile>(consumer);
            start_product_abt<HS>(s, q, Tile::ROWS, shared.k[stage.place][0][0], KEYS);
        };
        auto start_dp = [&] {
            barrier_wait(&shared.v_full[stage.place], stage.parity);
            start_product_abt<HS>(dp, dout, Tile::ROWS, shared.v[stage.place][0][0], KEYS);
            pass_turn<Tile>(consumer);
        };
        auto exponentials = [&] {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) s[i] = exp2_approx(scale_log2 * s[i] - row_lse[i / 2 % 2]);
        };
        auto make_ds = [&] {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) s[i] *= dp[i] + minus_delta[i / 2 % 2];
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) pack_left(ds[i], s, i);
        };

        start_scores();
        start_dp();
        const size_t C = (size_t)work.NH * HS, batch_row = (size_t)piece.b * work.T;
        rows_statistics<HS>(row_lse, minus_delta, stats + (size_t)piece.head * 2 * padded_T, out + batch_row * C + piece.n * HS,
                            lse + (size_t)piece.head * work.T, shared.dout[at.place], 64 * consumer + lane_row(), row + lane_row(),
                            work.T, padded_T, C);
        wgmma_wait<1>();
        registers_settled(s);
        if (CAUSAL || work.T % KEYS != 0) mask_scores(s, row, tile * KEYS, work.T, CAUSAL);  // no other tile needs it
        exponentials();
        keep_behind(s[0]);
        wgmma_wait<0>();
        registers_settled(dp);
        make_ds();
        leaving.free(shared.q_empty);
        for (tile--; tile >= 0; tile--) {
            const int before = stage.place;
            stage.advance();
            start_scores();
            start_product_ab<HS>(dq, ds, shared.k[before][0][0], KEYS);
            start_dp();
            wgmma_wait<2>();
            registers_settled(s);
            exponentials();
            keep_behind(s[0]);
            wgmma_wait<1>();
            registers_settled(dq);
            registers_settled(ds);
            release(&shared.empty[before]);
            wgmma_wait<0>();
            registers_settled(dp);
            make_ds();
        }
        start_product_ab<HS>(dq, ds, shared.k[stage.place][0][0], KEYS);
        wgmma_wait<0>();
        registers_settled(dq);
        release(&shared.empty[stage.place]);
        stage.advance();

        store_to_slabs<HS>(q, Tile::ROWS, dq, work.scale);
        fence_async();
        meet(consumer);
        if (is_leader()) {
            store_tile<HS>(dqkv_map, shared.q[at.place], 64 * consumer, row, piece.n, piece.b);
            store_commit();
            leaving.place = at.place;
        }
    }
    if (consumer == 0) take_turn<Tile>(consumer);  // which the last consumer has passed on
    if (is_leader()) store_wait_read<0>();
}

// Writes dQ, and the statistics that the next kernel needs. The maps are of qkv by ROWS and KEYS rows, dout and out by ROWS, dqkv
// by 64.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(Sm90Dq<HS>::Registers::THREADS, 1) void attention_sm90_dq_kernel(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap dout_map,
    const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap dqkv_map, float *stats, const bf16 *out,
    const float *lse, const __grid_constant__ Sm90Work work, int padded_T) {
    using Tile = Sm90Dq<HS>;
    DYNAMIC_SHARED(memory);
    typename Tile::Shared &shared = *(typename Tile::Shared *)memory;
    if (threadIdx.x == 0) {
        barriers_init(shared.q_full, 1), barriers_init(shared.q_empty, Tile::CONSUMERS);
        barriers_init(shared.k_full, 1), barriers_init(shared.v_full, 1), barriers_init(shared.empty, Tile::CONSUMERS);
    }
    divide_block<Tile>(
        [&] { if (is_leader()) sm90_dq_produce<HS, CAUSAL>(shared, &q_map, &kv_map, &dout_map, &out_map, work); },
        [&](int consumer) { sm90_dq_consume<HS, CAUSAL>(shared, &dqkv_map, stats, out, lse, work, padded_T, consumer); });
}

// ----------------------------------------------------------------------------
// Backward: dK and dV
//
// All scores are transposed, keys being rows: so Pᵀ and dSᵀ come out of one product as the left factors of the next. What belongs
// to a query belongs to a column, then; a lane has the columns 8 j + 2 (lane % 4) and + 1.

// Sᵀ becomes Pᵀ, with the lse (to base 2) of its queries.
template <int N> DEVICE void exponentials_transposed(float (&s)[N], const float *lse, float scale_log2) {
    lse += lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float2 l = *(const float2 *)(lse + 2 * i);
#pragma unroll
        for (int j = 0; j < 4; j++) s[i + j] = exp2_approx(scale_log2 * s[i + j] - (j % 2 ? l.y : l.x));
    }
}

// Pᵀ becomes dSᵀ = Pᵀ ∘ (dPᵀ - delta).
template <int N> DEVICE void ds_transposed(float (&p)[N], const float (&dp)[N], const float *minus_delta) {
    minus_delta += lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float2 d = *(const float2 *)(minus_delta + 2 * i);
#pragma unroll
        for (int j = 0; j < 4; j++) p[i + j] *= dp[i + j] + (j % 2 ? d.y : d.x);
    }
}

template <int HS> struct Sm90Dkdv {
    static constexpr int CONSUMERS = 2, KEYS = 64 * CONSUMERS, ROWS = 64, STAGES = HS == 64 ? 6 : 3, KV_PLACES = 2;
    static constexpr bool TAKE_TURNS = HS == 64;
    static constexpr bool KV_IN_REGISTERS = HS == 64;  // as left factors; else each product reads them from shared memory
    static constexpr bool DV_OVERLAPS = HS == 64;      // with the next tile's scores, for which P has to stay in registers longer
    using Registers = Sm90Registers<CONSUMERS>;

    struct Shared {
        bf16 k[KV_PLACES][HS / 64][KEYS][64], v[KV_PLACES][HS / 64][KEYS][64];  // dK and dV leave through them
        bf16 q[STAGES][HS / 64][ROWS][64], dout[STAGES][HS / 64][ROWS][64];
        float lse[STAGES][ROWS], minus_delta[STAGES][ROWS];
        Barrier kv_full[KV_PLACES], kv_empty[KV_PLACES], q_full[STAGES], dout_full[STAGES], empty[STAGES];
        int item[KV_PLACES];
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more than a thread block can have");
};

template <int HS, bool CAUSAL>
DEVICE void sm90_dkdv_produce(typename Sm90Dkdv<HS>::Shared &shared, const TensorMap *kv_map, const TensorMap *q_map,
                              const TensorMap *dout_map, const float *stats, const Sm90Work &work, int padded_T) {
    using Tile = Sm90Dkdv<HS>;
    const int tiles = (work.T + Tile::ROWS - 1) / Tile::ROWS;
    Ring<Tile::KV_PLACES> at;
    Ring<Tile::STAGES> stage;
    for (int item = blockIdx.x, next;; item = next) {
        if (!announce(shared.item, shared.kv_full, shared.kv_empty, at, item, work)) return;
        Barrier *const kv_full = &shared.kv_full[at.place];
        next = work_claim(work);
        const Sm90Piece piece = work_find<false>(work, item, Tile::KEYS);
        const float *const head_stats = stats + (size_t)piece.head * 2 * padded_T;
        barrier_expect(kv_full, sizeof shared.k[0] + sizeof shared.v[0]);
        load_tile<HS>(shared.k[at.place], kv_map, kv_full, piece.row, work.NH + piece.n, piece.b);
        load_tile<HS>(shared.v[at.place], kv_map, kv_full, piece.row, 2 * work.NH + piece.n, piece.b);
        at.advance();
#pragma unroll 1
        for (int tile = CAUSAL ? piece.row / Tile::ROWS : 0; tile < tiles; tile++) {
            const int i = stage.place, row = tile * Tile::ROWS;
            barrier_wait(&shared.empty[i], stage.parity ^ 1);
            barrier_expect(&shared.q_full[i], sizeof shared.q[0] + sizeof shared.lse[0]);
            load_tile<HS>(shared.q[i], q_map, &shared.q_full[i], row, piece.n, piece.b);
            bulk_load(shared.lse[i], head_stats + row, sizeof shared.lse[0], &shared.q_full[i]);
            barrier_expect(&shared.dout_full[i], sizeof shared.dout[0] + sizeof shared.minus_delta[0]);
            load_tile<HS>(shared.dout[i], dout_map, &shared.dout_full[i], row, piece.n, piece.b);
            bulk_load(shared.minus_delta[i], head_stats + padded_T + row, sizeof shared.minus_delta[0], &shared.dout_full[i]);
            stage.advance();
        }
    }
}

template <int HS, bool CAUSAL>
DEVICE void sm90_dkdv_consume(typename Sm90Dkdv<HS>::Shared &shared, const TensorMap *dqkv_map, const Sm90Work &work,
                              int consumer) {
    using Tile = Sm90Dkdv<HS>;
    constexpr int ROWS = Tile::ROWS;
    const int tiles = (work.T + ROWS - 1) / ROWS;
    const float scale_log2 = LOG2_E * work.scale;
    Ring<Tile::KV_PLACES> at;
    Ring<Tile::STAGES> stage;
    Leaving leaving;

    if (consumer == Tile::CONSUMERS - 1) pass_turn<Tile>(consumer);
    for (;; at.advance()) {
        barrier_wait(&shared.kv_full[at.place], at.parity);
        const int item = shared.item[at.place];
        if (item < 0) break;
        const Sm90Piece piece = work_find<false>(work, item, Tile::KEYS);
        const int key = piece.row + 64 * consumer;

        // Tiles of queries that see none of these keys, as all are earlier; or there are no such keys.
        int tile = CAUSAL ? piece.row / ROWS : 0;
        const bool has_keys = key < work.T;
#pragma unroll 1
        for (const int first = !has_keys ? tiles : CAUSAL ? key / ROWS : 0; tile < first; tile++) {
            take_turn<Tile>(consumer);
            pass_turn<Tile>(consumer);
            barrier_wait(&shared.q_full[stage.place], stage.parity);
            barrier_wait(&shared.dout_full[stage.place], stage.parity);
            meet(consumer);
            release(&shared.empty[stage.place]);
            stage.advance();
        }
        if (!has_keys) {
            leaving.free(shared.kv_empty);
            meet(consumer);
            release(&shared.kv_empty[at.place]);
            continue;
        }

        float s[ROWS / 2], dp[ROWS / 2], dk[HS / 2] = {}, dv[HS / 2] = {};  // of all scores the transposes: keys are rows
        uint32_t p[ROWS / 16][4], ds[ROWS / 16][4], k_left[HS / 16][4], v_left[HS / 16][4];
        if (Tile::KV_IN_REGISTERS) {
            load_left_rows<HS>(k_left, shared.k[at.place], 64 * consumer);
            load_left_rows<HS>(v_left, shared.v[at.place], 64 * consumer);
        }
        auto start_scores = [&] {
            const bf16 *const q = shared.q[stage.place][0][0];
            barrier_wait(&shared.q_full[stage.place], stage.parity);
            take_turn<Tile>(consumer);
            if constexpr (Tile::KV_IN_REGISTERS) start_product_abt<HS>(s, k_left, q, ROWS);
            else start_product_abt<HS>(s, shared.k[opaque(at.place)][0][64 * consumer], Tile::KEYS, q, ROWS);
        };
        auto start_dp = [&] {
            const bf16 *const dout = shared.dout[stage.place][0][0];
            barrier_wait(&shared.dout_full[stage.place], stage.parity);
            if constexpr (Tile::KV_IN_REGISTERS) start_product_abt<HS>(dp, v_left, dout, ROWS);
            else start_product_abt<HS>(dp, shared.v[opaque(at.place)][0][64 * consumer], Tile::KEYS, dout, ROWS);
            pass_turn<Tile>(consumer);
        };
        auto start_dv = [&] {
#pragma unroll
            for (int i = 0; i < ROWS / 16; i++) pack_left(p[i], s, i);
            start_product_ab<HS>(dv, p, shared.dout[stage.place][0][0], ROWS);
        };
        auto finish_dp = [&] {
            wgmma_wait<1>();
            registers_settled(dp);
            ds_transposed(s, dp, shared.minus_delta[stage.place]);
#pragma unroll
            for (int i = 0; i < ROWS / 16; i++) pack_left(ds[i], s, i);
            if (!Tile::DV_OVERLAPS) {
                wgmma_wait<0>();
                registers_settled(dv);
                registers_settled(p);
            }
        };

        start_scores();
        start_dp();
        leaving.free(shared.kv_empty);
        wgmma_wait<1>();
        registers_settled(s);
        exponentials_transposed(s, shared.lse[stage.place], scale_log2);
        if (CAUSAL) mask_transposed(s, key, tile * ROWS);  // no other tile needs it: queries from T on have an lse of +inf
        start_dv();
        finish_dp();
        for (tile++; tile < tiles; tile++) {
            const int before = stage.place;
            stage.advance();
            start_scores();
            start_product_ab<HS>(dk, ds, shared.q[before][0][0], ROWS);
            start_dp();
            wgmma_wait<2>();
            registers_settled(s);
            if (Tile::DV_OVERLAPS) registers_settled(dv), registers_settled(p);
            exponentials_transposed(s, shared.lse[stage.place], scale_log2);
            keep_behind(s[0]);
            wgmma_wait<1>();
            registers_settled(dk);
            registers_settled(ds);
            release(&shared.empty[before]);
            start_dv();
            finish_dp();
        }
        start_product_ab<HS>(dk, ds, shared.q[stage.place][0][0], ROWS);
        wgmma_wait<0>();
        registers_settled(dk);
        if (Tile::DV_OVERLAPS) registers_settled(dv), registers_settled(p);
        release(&shared.empty[stage.place]);
        stage.advance();

        store_to_slabs<HS>(shared.k[at.place][0][64 * consumer], Tile::KEYS, dk, work.scale);
        store_to_slabs<HS>(shared.v[at.place][0][64 * consumer], Tile::KEYS, dv, 1);
        fence_async();
        meet(consumer);
        if (is_leader()) {
            store_tile<HS>(dqkv_map, shared.k[at.place], 64 * consumer, piece.row + 64 * consumer, work.NH + piece.n, piece.b);
            store_tile<HS>(dqkv_map, shared.v[at.place], 64 * consumer, piece.row + 64 * consumer, 2 * work.NH + piece.n, piece.b);
            store_commit();
            leaving.place = at.place;
        }
    }
    if (consumer == 0) take_turn<Tile>(consumer);  // which the last consumer has passed on
    if (is_leader()) store_wait_read<0>();
}

// The maps are of qkv by KEYS and by ROWS rows, dout by ROWS, dqkv by 64.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(Sm90Dkdv<HS>::Registers::THREADS, 1) void attention_sm90_dkdv_kernel(
    const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap dout_map,
    const __grid_constant__ TensorMap dqkv_map, const float *stats, const __grid_constant__ Sm90Work work, int padded_T) {
    using Tile = Sm90Dkdv<HS>;
    DYNAMIC_SHARED(memory);
    typename Tile::Shared &shared = *(typename Tile::Shared *)memory;
    if (threadIdx.x == 0) {
        barriers_init(shared.kv_full, 1), barriers_init(shared.kv_empty, Tile::CONSUMERS);
        barriers_init(shared.q_full, 1), barriers_init(shared.dout_full, 1), barriers_init(shared.empty, Tile::CONSUMERS);
    }
    divide_block<Tile>(
        [&] { if (is_leader()) sm90_dkdv_produce<HS, CAUSAL>(shared, &kv_map, &q_map, &dout_map, stats, work, padded_T); },
        [&](int consumer) { sm90_dkdv_consume<HS, CAUSAL>(shared, &dqkv_map, work, consumer); });
}

// ----------------------------------------------------------------------------
// Backward in one pass, causal
//
// The two kernels above compute the scores and dP twice: seven products instead of five. That pays as long as adding up dQ across
// thread blocks would cost more; with long sequences it would not. Here a block has 128 keys of a head, and dQ of each tile of
// queries is a sum over blocks, in fp32 in device memory. So that each run gives the same bits, blocks add theirs in a fixed order,
// that of the list of items: the last keys first, key 0 last. The last rounds the sum and writes dQ. Waiting for one's turn costs
// little, as blocks start in that order, and a block whose keys come before those of another has as many tiles more to do before it
// meets it.

template <int HS> struct Sm90OnePass {
    static constexpr int CONSUMERS = 2, KEYS = 64 * CONSUMERS, ROWS = HS == 64 ? 128 : 64, STAGES = 2, KV_PLACES = HS == 64 ? 2 : 1;
    using Registers = Sm90Registers<CONSUMERS>;
    static constexpr bool KV_IN_REGISTERS = HS == 64;  // as Sm90Dkdv
    static constexpr int PART = 64 * 64;  // of dQ of a tile, what a consumer computes: half of the rows, or half of the columns

    struct Shared {
        bf16 k[KV_PLACES][HS / 64][KEYS][64], v[KV_PLACES][HS / 64][KEYS][64];  // dK and dV leave through them
        bf16 q[STAGES][HS / 64][ROWS][64], dout[STAGES][HS / 64][ROWS][64];
        bf16 ds[2][ROWS / 64][KEYS][64];     // dSᵀ of two tiles, for dQ: of each key 64 queries
        float dq[CONSUMERS][PART];           // on its way to be added
        float lse[STAGES][ROWS], minus_delta[STAGES][ROWS];
        Barrier kv_full[KV_PLACES], kv_empty[KV_PLACES], q_full[STAGES], dout_full[STAGES], empty[STAGES];
        Barrier dq_full[CONSUMERS], dq_empty[CONSUMERS];
        int item[KV_PLACES];
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more than a thread block can have");
};

// Where the sums of dQ are, and how many blocks have added theirs: for each head, tile of queries and consumer a part, and a
// number.
struct Sm90Sums {
    float *parts;
    int *added;
};
template <int HS> DEVICE size_t part_of(const Sm90Work &work, int head, int tile, int consumer) {
    using Tile = Sm90OnePass<HS>;
    return ((size_t)head * ((work.T + Tile::ROWS - 1) / Tile::ROWS) + tile) * Tile::CONSUMERS + consumer;
}
// How many blocks add to a tile before this one: those with later keys that its queries see.
template <int HS> DEVICE int adders_before(const Sm90Work &work, int block, int tile) {
    using Tile = Sm90OnePass<HS>;
    return min((tile * Tile::ROWS + Tile::ROWS - 1) / Tile::KEYS, work.blocks - 1) - block;
}

template <int HS>
DEVICE void sm90_one_pass_produce(typename Sm90OnePass<HS>::Shared &shared, const TensorMap *kv_map, const TensorMap *q_map,
                                  const TensorMap *dout_map, const float *stats, const Sm90Work &work, int padded_T) {
    using Tile = Sm90OnePass<HS>;
    const int tiles = (work.T + Tile::ROWS - 1) / Tile::ROWS;
    Ring<Tile::KV_PLACES> at;
    Ring<Tile::STAGES> stage;
    for (;;) {
        // Claimed as late as can be, and the first one, too: blocks wait for those that have an earlier item.
        barrier_wait(&shared.kv_empty[at.place], at.parity ^ 1);
        const int item = atomicAdd(work.claims, 1u);
        if (!announce(shared.item, shared.kv_full, shared.kv_empty, at, item, work)) return;
        Barrier *const kv_full = &shared.kv_full[at.place];
        const Sm90Piece piece = work_find<true>(work, item, Tile::KEYS);
        const float *const head_stats = stats + (size_t)piece.head * 2 * padded_T;
        barrier_expect(kv_full, sizeof shared.k[0] + sizeof shared.v[0]);
        load_tile<HS>(shared.k[at.place], kv_map, kv_full, piece.row, work.NH + piece.n, piece.b);
        load_tile<HS>(shared.v[at.place], kv_map, kv_full, piece.row, 2 * work.NH + piece.n, piece.b);
        at.advance();
#pragma unroll 1
        for (int tile = piece.row / Tile::ROWS; tile < tiles; tile++) {
            const int i = stage.place, row = tile * Tile::ROWS;
            barrier_wait(&shared.empty[i], stage.parity ^ 1);
            barrier_expect(&shared.q_full[i], sizeof shared.q[0] + sizeof shared.lse[0]);
            load_tile<HS>(shared.q[i], q_map, &shared.q_full[i], row, piece.n, piece.b);
            bulk_load(shared.lse[i], head_stats + row, sizeof shared.lse[0], &shared.q_full[i]);
            barrier_expect(&shared.dout_full[i], sizeof shared.dout[0] + sizeof shared.minus_delta[0]);
            load_tile<HS>(shared.dout[i], dout_map, &shared.dout_full[i], row, piece.n, piece.b);
            bulk_load(shared.minus_delta[i], head_stats + padded_T + row, sizeof shared.minus_delta[0], &shared.dout_full[i]);
            stage.advance();
        }
    }
}

// Tests let blocks be late where they hand on to others, to find out one that does not wait for its turn.
#ifndef BE_LATE
#define BE_LATE(part)
#endif

// For each consumer one thread that adds its part of dQ when it is the block's turn. Block 0, the last, has none to add: it takes
// the sum.
template <int HS>
DEVICE void sm90_one_pass_add(typename Sm90OnePass<HS>::Shared &shared, const Sm90Sums &sums, const Sm90Work &work, int consumer) {
    using Tile = Sm90OnePass<HS>;
    const int tiles = (work.T + Tile::ROWS - 1) / Tile::ROWS;
    Ring<Tile::KV_PLACES> kv;
    Ring<1> part;
    for (;; kv.advance()) {
        barrier_wait(&shared.kv_full[kv.place], kv.parity);
        const int item = shared.item[kv.place];
        if (item < 0) break;
        const Sm90Piece piece = work_find<true>(work, item, Tile::KEYS);
        for (int tile = piece.row / Tile::ROWS; piece.block > 0 && tile < tiles; tile++) {
            const size_t at = part_of<HS>(work, piece.head, tile, consumer);
            float *const to = sums.parts + at * Tile::PART;
            const int before = adders_before<HS>(work, piece.block, tile);
            barrier_wait(&shared.dq_full[consumer], part.parity);
            BE_LATE(at);
            if (before == 0) {
                bulk_store(to, shared.dq[consumer], sizeof shared.dq[0]);
            } else {
                while (load_acquire(sums.added + at) < before) __nanosleep(20);
                fence_async_global();
                bulk_add(to, shared.dq[consumer], sizeof shared.dq[0]);
            }
            store_commit();
            store_wait_read<0>();
            barrier_arrive(&shared.dq_empty[consumer]);
            part.advance();
            store_wait<0>();
            store_release(sums.added + at, before + 1);
        }
        barrier_arrive(&shared.kv_empty[kv.place]);
    }
}

// A consumer's part of dQ of a tile goes to the thread that adds it; block 0's goes with the sum of the others' to dqkv.
template <int HS>
DEVICE void sm90_one_pass_hand_on(typename Sm90OnePass<HS>::Shared &shared, float (&dq)[32], Ring<1> &part, bf16 *dqkv,
                                  const Sm90Sums &sums, const Sm90Work &work, const Sm90Piece &piece, int tile, int consumer) {
    using Tile = Sm90OnePass<HS>;
    if (piece.block > 0) {
        barrier_wait(&shared.dq_empty[consumer], part.parity ^ 1);
        part.advance();
        float4 *const to = (float4 *)shared.dq[consumer] + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < 8; i++) to[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        fence_async();
        meet(consumer);
        release(&shared.dq_full[consumer]);
        return;
    }
    const size_t at = part_of<HS>(work, piece.head, tile, consumer);
    const int before = adders_before<HS>(work, 0, tile);
    if (before > 0) {
        if (is_leader()) while (load_acquire(sums.added + at) < before) __nanosleep(20);
        meet(consumer);
        const float4 *const from = (const float4 *)(sums.parts + at * Tile::PART) + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 sum = __ldcg(from + 128 * i);
            dq[4 * i] += sum.x, dq[4 * i + 1] += sum.y, dq[4 * i + 2] += sum.z, dq[4 * i + 3] += sum.w;
        }
    }
    const int row = tile * Tile::ROWS + (HS == 64 ? 64 * consumer : 0) + lane_row(), column = HS == 64 ? 0 : 64 * consumer;
    const size_t stride = 3 * (size_t)work.NH * HS;
    bf16 *const to = dqkv + ((size_t)piece.b * work.T + row) * stride + piece.n * HS + column + lane_id() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= work.T) continue;
#pragma unroll
        for (int i = 2 * half; i < 32; i += 4)
            *(uint32_t *)(to + 8 * half * stride + 2 * (i - 2 * half)) = pack_bf16(work.scale * dq[i], work.scale * dq[i + 1]);
    }
}

template <int HS>
DEVICE void sm90_one_pass_consume(typename Sm90OnePass<HS>::Shared &shared, const TensorMap *dqkv_map, bf16 *dqkv,
                                  const Sm90Sums &sums, const Sm90Work &work, int consumer) {
    using Tile = Sm90OnePass<HS>;
    constexpr int ROWS = Tile::ROWS, KEYS = Tile::KEYS;
    const int tiles = (work.T + ROWS - 1) / ROWS;
    const float scale_log2 = LOG2_E * work.scale;
    Ring<Tile::KV_PLACES> at;
    Ring<Tile::STAGES> stage;
    Ring<1> part;
    Leaving leaving;

    for (;; at.advance()) {
        if (Tile::KV_PLACES == 1) leaving.free(shared.kv_empty);
        barrier_wait(&shared.kv_full[at.place], at.parity);
        const int item = shared.item[at.place];
        if (item < 0) break;
        const Sm90Piece piece = work_find<true>(work, item, KEYS);

        float s[32], dp[32], dk[HS / 2] = {}, dv[HS / 2] = {};  // of all scores the transposes: keys are rows
        uint32_t p[4][4], ds[4][4], k_left[HS / 16][4], v_left[HS / 16][4];
        if (Tile::KV_IN_REGISTERS) {
            load_left_rows<HS>(k_left, shared.k[at.place], 64 * consumer);
            load_left_rows<HS>(v_left, shared.v[at.place], 64 * consumer);
        }
        // Of 64 queries of a tile, from `query` on.
        auto start_scores = [&](int query) {
            const bf16 *const q = shared.q[stage.place][0][query];
            if constexpr (Tile::KV_IN_REGISTERS) start_product_abt<HS>(s, k_left, q, ROWS);
            else start_product_abt<HS>(s, shared.k[opaque(at.place)][0][64 * consumer], KEYS, q, ROWS);
        };
        auto start_dp = [&](int query) {
            const bf16 *const dout = shared.dout[stage.place][0][query];
            if constexpr (Tile::KV_IN_REGISTERS) start_product_abt<HS>(dp, v_left, dout, ROWS);
            else start_product_abt<HS>(dp, shared.v[opaque(at.place)][0][64 * consumer], KEYS, dout, ROWS);
        };

        int tile = piece.row / ROWS;
        barrier_wait(&shared.q_full[stage.place], stage.parity);
        start_scores(0);
        leaving.free(shared.kv_empty);
        wgmma_wait<0>();
        registers_settled(s);
        do {
            barrier_wait(&shared.dout_full[stage.place], stage.parity);
#pragma unroll
            for (int query = 0; query < ROWS; query += 64) {
                if (query > 0) start_scores(query);
                start_dp(query);
                if (query > 0) {
                    wgmma_wait<1>();
                    registers_settled(s), registers_settled(dv), registers_settled(p), registers_settled(dk), registers_settled(ds);
                }
                exponentials_transposed(s, shared.lse[stage.place] + query, scale_log2);
                if (tile * ROWS < piece.row + KEYS) mask_transposed(s, piece.row + 64 * consumer, tile * ROWS + query);
#pragma unroll
                for (int i = 0; i < 4; i++) pack_left(p[i], s, i);
                start_product_ab<HS>(dv, p, shared.dout[stage.place][0][query], ROWS);
                wgmma_wait<1>();
                registers_settled(dp);
                ds_transposed(s, dp, shared.minus_delta[stage.place] + query);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    pack_left(ds[i], s, i);
                    store_left(shared.ds[tile % 2][query / 64][64 * consumer], KEYS, ds[i], i);
                }
                start_product_ab<HS>(dk, ds, shared.q[stage.place][0][query], ROWS);
            }
            fence_async();
            // Both have written dS of this tile; and are done with that of the tile before, whose place the next one takes.
            both_meet(DS_WRITTEN);

            // dQ of 64 rows and 64 columns, from all keys.
            float dq[32];
            const bf16 *const ds_part = shared.ds[tile % 2][HS == 64 ? consumer : 0][0];
            const bf16 *const k_part = shared.k[opaque(at.place)][HS == 64 ? 0 : consumer][0];
            registers_settled(dq);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                wgmma<true, true>(dq, matrix_descriptor(ds_part, 0, 1024) + i * NEXT_K_TRANSPOSED,
                                  matrix_descriptor(k_part, 0, 1024) + i * NEXT_K_TRANSPOSED, i > 0);
            wgmma_commit();

            wgmma_wait<1>();
            registers_settled(dv), registers_settled(p), registers_settled(dk), registers_settled(ds);
            release(&shared.empty[stage.place]);
            stage.advance();

            // The next tile's first scores, while dQ is handed on. Behind the last tile they are of no use, and do no harm. (They
            // are waited for in the same round, as ptxas serializes products under way from one round to the next.)
            if (tile + 1 < tiles) barrier_wait(&shared.q_full[stage.place], stage.parity);
            start_scores(0);
            wgmma_wait<1>();
            registers_settled(dq);
            sm90_one_pass_hand_on<HS>(shared, dq, part, dqkv, sums, work, piece, tile, consumer);
            wgmma_wait<0>();
            registers_settled(s);
        } while (++tile < tiles);

        both_meet(K_FREE);  // the other consumer's dQ needs K, too
        store_to_slabs<HS>(shared.k[at.place][0][64 * consumer], KEYS, dk, work.scale);
        store_to_slabs<HS>(shared.v[at.place][0][64 * consumer], KEYS, dv, 1);
        fence_async();
        meet(consumer);
        if (is_leader()) {
            store_tile<HS>(dqkv_map, shared.k[at.place], 64 * consumer, piece.row + 64 * consumer, work.NH + piece.n, piece.b);
            store_tile<HS>(dqkv_map, shared.v[at.place], 64 * consumer, piece.row + 64 * consumer, 2 * work.NH + piece.n, piece.b);
            store_commit();
            leaving.place = at.place;
        }
    }
    if (is_leader()) store_wait_read<0>();
}

// The maps are of qkv by KEYS and by ROWS rows, dout by ROWS, dqkv by 64.
template <int HS>
static __global__ __launch_bounds__(Sm90OnePass<HS>::Registers::THREADS, 1) void attention_sm90_one_pass_kernel(
    const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap dout_map,
    const __grid_constant__ TensorMap dqkv_map, bf16 *dqkv, const float *stats, const __grid_constant__ Sm90Sums sums,
    const __grid_constant__ Sm90Work work, int padded_T) {
    using Tile = Sm90OnePass<HS>;
    DYNAMIC_SHARED(memory);
    typename Tile::Shared &shared = *(typename Tile::Shared *)memory;
    if (threadIdx.x == 0) {
        barriers_init(shared.kv_full, 1), barriers_init(shared.kv_empty, 2 * Tile::CONSUMERS);
        barriers_init(shared.q_full, 1), barriers_init(shared.dout_full, 1), barriers_init(shared.empty, Tile::CONSUMERS);
        barriers_init(shared.dq_full, 1), barriers_init(shared.dq_empty, 1);
    }
    divide_block<Tile>(
        [&] {
            if (is_leader()) sm90_one_pass_produce<HS>(shared, &kv_map, &q_map, &dout_map, stats, work, padded_T);
            else if (threadIdx.x % 128 == 32) sm90_one_pass_add<HS>(shared, sums, work, 0);
            else if (threadIdx.x % 128 == 64) sm90_one_pass_add<HS>(shared, sums, work, 1);
        },
        [&](int consumer) { sm90_one_pass_consume<HS>(shared, &dqkv_map, dqkv, sums, work, consumer); });
}

// stats as the two passes have them; sums are not initialized.
template <int HS>
static void attention_sm90_one_pass_of(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const float *stats, Sm90Sums sums,
                                       unsigned *claims, int B, int T, int NH, int padded_T, cudaStream_t stream) {
    using Tile = Sm90OnePass<HS>;
    const Sm90Work work = sm90_work(B, T, NH, HS, Tile::KEYS, false, claims);
    CUDA_CHECK(cudaMemsetAsync(claims, 0, sizeof *claims, stream));
    CUDA_CHECK(cudaMemsetAsync(sums.added, 0, (size_t)B * NH * ((T + Tile::ROWS - 1) / Tile::ROWS) * 2 * sizeof(int), stream));
    LAUNCH(attention_sm90_one_pass_kernel<HS>, sm90_grid(work), Tile::Registers::THREADS, sizeof(typename Tile::Shared), stream,
           sm90_map(qkv, B, T, 3 * NH, HS, Tile::KEYS), sm90_map(qkv, B, T, 3 * NH, HS, Tile::ROWS),
           sm90_map(dout, B, T, NH, HS, Tile::ROWS), sm90_map(dqkv, B, T, 3 * NH, HS, 64), dqkv, stats, sums, work,
           padded_T);
}

// stats: (B, NH, 2, padded T)
template <int HS>
static void attention_sm90_backward_of(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse,
                                       float *stats, unsigned *claims, int B, int T, int NH, bool causal, int padded_T,
                                       cudaStream_t stream) {
    using Dq = Sm90Dq<HS>;
    using Dkdv = Sm90Dkdv<HS>;
    const TensorMap dqkv_map = sm90_map(dqkv, B, T, 3 * NH, HS, 64);
    CUDA_CHECK(cudaMemsetAsync(claims, 0, 2 * sizeof *claims, stream));

    const Sm90Work dq_work = sm90_work(B, T, NH, HS, Dq::ROWS, true, claims);
    auto dq = causal ? attention_sm90_dq_kernel<HS, true> : attention_sm90_dq_kernel<HS, false>;
    LAUNCH(dq, sm90_grid(dq_work), Dq::Registers::THREADS, sizeof(typename Dq::Shared), stream,
           sm90_map(qkv, B, T, 3 * NH, HS, Dq::ROWS), sm90_map(qkv, B, T, 3 * NH, HS, Dq::KEYS),
           sm90_map(dout, B, T, NH, HS, Dq::ROWS), sm90_map(out, B, T, NH, HS, Dq::ROWS), dqkv_map, stats, out, lse,
           dq_work, padded_T);

    const Sm90Work dkdv_work = sm90_work(B, T, NH, HS, Dkdv::KEYS, false, claims + 1);
    auto dkdv = causal ? attention_sm90_dkdv_kernel<HS, true> : attention_sm90_dkdv_kernel<HS, false>;
    LAUNCH(dkdv, sm90_grid(dkdv_work), Dkdv::Registers::THREADS, sizeof(typename Dkdv::Shared), stream,
           sm90_map(qkv, B, T, 3 * NH, HS, Dkdv::KEYS), sm90_map(qkv, B, T, 3 * NH, HS, Dkdv::ROWS),
           sm90_map(dout, B, T, NH, HS, Dkdv::ROWS), dqkv_map, stats, dkdv_work, padded_T);
}

#endif

// Flash attention on Hopper GPUs (compute capability 9.0), for head sizes 64 and 128: what attention.cuh does, on the same tensors,
// with the instructions that only these GPUs have.
//
// A thread block stays on its multiprocessor to the end and takes one piece of work after the other: some rows (queries, or keys)
// of one head. One of its warpgroups, the producer, only starts copies. The others, the consumers, have 64 of the rows each, and
// multiply. What is copied has two barriers: "full", on which the consumers wait for the copy, and "empty", on which the producer
// waits until all of them are done with what was there before. The tiles of a kind form a ring of a few stages, so that copies run
// ahead. In the forward (' is of the next piece of work):
//
//     producer      | Q  K  V | K  V | Q' K' V' | K' V' |          ahead by as much as there is room for
//     consumer 0         | S0 | softmax | S1, PV0 | softmax | PV1, S'0 | O beside S'0 | softmax' | S'1, PV'0 | ...
//     consumer 1              | S0      | softmax | S1, PV0 | softmax  | PV1, S'0 | O beside S'0 | softmax' | ...
//
// The tensor cores go on by themselves once a product is started. Three things keep them busy: consumers take turns in starting
// theirs, so that one's softmax runs beside the others' products (with head size 64 only, as with 128 there is less softmax);
// within a consumer the product P V of the tile before runs beside the beginning of this one's softmax (both are FlashAttention-3's:
// Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024); and the first scores of a
// piece of work are computed at the end of the one before. Keys go from the last tile to the first: the one with the diagonal or
// the end comes before the loop, which then needs no mask, and each row from 0 on sees a key in its first tile.
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
    int section_heads;     // heads that are worked on at about the same time, so that what they share stays in the L2 cache
    unsigned *claims;      // how many items have been claimed, in the forward without those that blocks begin with; 0 at first
    float scale;
};

struct Sm90Piece {
    int head, n, b;  // the number of the head among all, or -1: no piece, behind the last; it is head n of batch element b
    int block, row;  // which of the head's pieces; its first row
};

// Item 0, 1, ... of the list that all thread blocks take from: section by section, and in each block by block, from the last to
// the first. In the forward that is best when causal, as the last queries cost most, and those who end last should have short ones.
// The backward needs it: items wait for those of later keys.
DEVICE Sm90Piece work_find(const Sm90Work &work, int item, int rows) {
    if (item >= work.items) return {-1, 0, 0, 0, 0};
    const int first = item / (work.section_heads * work.blocks) * work.section_heads;  // head of the section
    const int heads = min(work.section_heads, work.heads - first), i = item - first * work.blocks;
    const int head = first + i % heads, block = work.blocks - 1 - i / heads;
    return {head, head % work.NH, head / work.NH, block, block * rows - work.shift};
}

// In the forward: the item that a thread block has after its first, which is blockIdx.x.
DEVICE int work_claim(const Sm90Work &work) { return gridDim.x + atomicAdd(work.claims, 1u); }

// Writes for the others in the block what comes next, once the place for it is free. They see it when `full` ends its phase: by the
// caller's barrier_expect() and copies, or here, if there is nothing more; then false.
template <int N>
DEVICE bool announce(Sm90Piece (&pieces)[N], Barrier (&full)[N], Barrier (&empty)[N], const Ring<N> &at, const Sm90Piece &piece) {
    barrier_wait(&empty[at.place], at.parity ^ 1);
    pieces[at.place] = piece;
    if (piece.head < 0) barrier_arrive(&full[at.place]);
    return piece.head >= 0;
}

static inline Sm90Work sm90_work(int B, int T, int NH, int HS, int rows, bool first_is_short, int section_heads, unsigned *claims) {
    enum { MOST = INT32_MAX - 4096 };  // claims go beyond the items, by one for each thread block
    const int blocks = (int)(((size_t)T + rows - 1) / rows);
    const size_t items = (size_t)B * NH * blocks;
    if (items > MOST)
        die("attention for B = %d, T = %d and %d heads has %zu pieces of work; expected at most %d: use a smaller batch", B, T, NH,
            items, MOST);
    return {T, NH, B * NH, blocks, first_is_short ? blocks * rows - (T + 63) / 64 * 64 : 0, (int)items, section_heads, claims,
            1.0f / sqrtf((float)HS)};
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

// Arrives for the warpgroup: it is done with what the barrier guards ("empty"), or has written it and met. Before an "empty" all
// of its threads must have passed the wait for "full": they have if they multiplied the tile, or have met since. Else a slow one may
// find that the phase has gone by. (That a product is over for all four warps when it is for one is not in the manual, but CUTLASS's
// pipelines count on it, too.)
DEVICE void release(Barrier *barrier) { if (is_leader()) barrier_arrive(barrier); }

// Named barriers: each of up to three consumers has its own for its turn in starting products, TURN and on, and one at which its
// threads meet, MEETING and on; at K_FREE both consumers of the backward meet. A consumer takes one turn for each tile of the piece,
// also for one that it leaves out, so that all stay in step; the last P V goes along with the next piece's first product. Before the
// first piece the last consumer passes the turn on to consumer 0.
enum { TURN = 1, MEETING = 4, K_FREE = 7 };
template <class Tile> DEVICE void take_turn(int consumer) { if (Tile::TAKE_TURNS) named_barrier_sync(TURN + consumer, 256); }
template <class Tile> DEVICE void pass_turn(int consumer) {
    if (Tile::TAKE_TURNS) named_barrier_arrive(TURN + (consumer + 1) % Tile::CONSUMERS, 256);
}
DEVICE void meet(int consumer) { named_barrier_sync(MEETING + consumer, 128); }

// O and dK leave through a tile that is no longer read. The leader frees it once the copy engine has read them, and asks for that in
// the next piece, where it is the place before. By then it mostly has.
struct Leaving {
    bool any = false;  // the leader's
    template <int N> __device__ __forceinline__ void free(Barrier (&empty)[N], const Ring<N> &at) {
        if (!any) return;
        store_wait_read<0>();
        barrier_arrive(&empty[at.before()]);
        any = false;
    }
};

// The registers of a thread. All have 65536 / THREADS at first, rounded down to a multiple of 8; consumers get what the producer
// gives up.
template <int CONSUMERS> struct Sm90Registers {
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    static constexpr int CONSUMER = CONSUMERS == 3 ? 160 : 240, PRODUCER = CONSUMERS == 3 ? 32 : 24;
    static_assert(PRODUCER + CONSUMERS * CONSUMER <= (CONSUMERS + 1) * (65536 / THREADS / 8 * 8), "consumers would wait for ever");
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

// ----------------------------------------------------------------------------
// Forward

template <int HS> struct Sm90Forward {
    static constexpr int CONSUMERS = HS == 64 ? 3 : 2, ROWS = 64 * CONSUMERS, KEYS = 128;
    static constexpr int STAGES = HS == 64 ? 3 : 2;  // tiles of K and V under way
    static constexpr int Q_PLACES = 3;               // one that O leaves from, one in use, one that is loaded
    static constexpr bool TAKE_TURNS = HS == 64;     // with head size 128 there is less softmax, and turns cost more
    using Registers = Sm90Registers<CONSUMERS>;
    // A consumer still holds its last tile's V while it leaves out the next piece's first tiles.
    static_assert((ROWS - 64 + KEYS - 1) / KEYS < STAGES && Q_PLACES >= 2, "consumers would wait for ever");

    struct Shared {
        bf16 q[Q_PLACES][HS / 64][ROWS][64];  // where O leaves through, too
        bf16 k[STAGES][HS / 64][KEYS][64], v[STAGES][HS / 64][KEYS][64];
        Barrier q_full[Q_PLACES], q_empty[Q_PLACES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
        Sm90Piece piece[Q_PLACES];  // whose Q the place has
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more than a thread block can have");
};

// The online softmax of the two rows of each lane, as attention_online_softmax(), but with a reference in place of the row's maximum:
// P = 2^(scale_log2 (S - reference)). Any reference gives the same result as long as nothing overflows, so the rows of a warp raise
// theirs to their maxima only once some P would be beyond 2^8. From then on most tiles need no rescaling, and the four lanes of a row
// need not exchange their maxima. (FlashAttention-4 does so, too.) True if O and row_sum have to be rescaled.
template <int N> DEVICE bool raise_reference(const float (&s)[N], float (&reference)[2], float (&rescale)[2], float scale_log2) {
    float maximum[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < N; i++) maximum[i / 2 % 2] = fmaxf(maximum[i / 2 % 2], s[i]);
    const bool beyond = scale_log2 * (maximum[0] - reference[0]) > 8 || scale_log2 * (maximum[1] - reference[1]) > 8;
    if (!__any_sync(~0u, beyond)) return false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        maximum[half] = fmaxf(maximum[half], reference[half]);
        maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(~0u, maximum[half], 1));
        maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(~0u, maximum[half], 2));
        rescale[half] = exp2_approx(scale_log2 * (reference[half] - maximum[half]));
        reference[half] = maximum[half];
    }
    return true;
}

// S becomes P, which is added to the lane's part of the row sums.
template <int N> DEVICE void exponentials(float (&s)[N], const float (&reference)[2], float (&row_sum)[2], float scale_log2) {
    const float offset[2] = {scale_log2 * reference[0], scale_log2 * reference[1]};
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = exp2_approx(scale_log2 * s[i] - offset[i / 2 % 2]);
        sum[i / 2 % 2][i % 2] += s[i];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) row_sum[half] += sum[half][0] + sum[half][1];
}

template <int HS, bool CAUSAL>
DEVICE void sm90_forward_produce(typename Sm90Forward<HS>::Shared &shared, const TensorMap *q_map, const TensorMap *kv_map,
                                 const Sm90Work &work) {
    using Tile = Sm90Forward<HS>;
    Ring<Tile::Q_PLACES> at;
    Ring<Tile::STAGES> stage;
    for (int item = blockIdx.x, next;; item = next) {
        const Sm90Piece piece = work_find(work, item, Tile::ROWS);
        if (!announce(shared.piece, shared.q_full, shared.q_empty, at, piece)) return;
        Barrier *const q_full = &shared.q_full[at.place];
        next = work_claim(work);  // now, so that it is there when it is needed
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

    Sm90Piece piece;
    int row, tile;       // the consumer's first; the tile of keys, at first the last one that these rows see
    bool sees_half;      // of that one
    float s[KEYS / 2];   // the scores with it
    float(&half_s)[KEYS / 4] = reinterpret_cast<float(&)[KEYS / 4]>(s);  // a copy would make ptxas serialize products

    auto free_k = [&] { release(&shared.k_empty[k_stage.place]), k_stage.advance(); };
    auto free_v = [&] { release(&shared.v_empty[v_stage.place]), v_stage.advance(); };

    auto leave_out_tile = [&] {
        take_turn<Tile>(consumer);
        pass_turn<Tile>(consumer);
        barrier_wait(&shared.k_full[k_stage.place], k_stage.parity);
        barrier_wait(&shared.v_full[v_stage.place], v_stage.parity);
        meet(consumer);
        free_k();
        free_v();
    };
    // False behind the last piece. Tiles beyond the diagonal are the other consumers' only. Rows before 0 go through one tile, too, so
    // that all consumers do the same: when causal tile 0, of which they see no key, and they become NaN; else the last one. Nothing of
    // them is stored.
    auto next_piece = [&] {
        barrier_wait(&shared.q_full[at.place], at.parity);
        piece = shared.piece[at.place];
        if (piece.head < 0) return false;
        row = piece.row + 64 * consumer;
        sees_half = CAUSAL && row % KEYS == 0;
        tile = key_tiles<CAUSAL>(work.T, piece.row, Tile::ROWS, KEYS) - 1;
#pragma unroll 1
        for (const int last = max(0, key_tiles<CAUSAL>(work.T, row, 64, KEYS) - 1); tile > last; tile--) leave_out_tile();
        return true;
    };
    // The first tile's scores; start_before() starts a product before them, and finish_before() awaits it.
    auto first_scores = [&](auto start_before, auto finish_before) {
        auto product = [&](auto &s) {
            barrier_wait(&shared.k_full[k_stage.place], k_stage.parity);
            take_turn<Tile>(consumer);
            start_before();
            start_product_abt<HS>(s, shared.q[at.place][0][64 * consumer], Tile::ROWS, shared.k[k_stage.place][0][0], KEYS);
            pass_turn<Tile>(consumer);
            finish_before();
            wgmma_wait<0>();
            registers_settled(s);
        };
        sees_half ? product(half_s) : product(s);
        free_k();
    };

    if (consumer == Tile::CONSUMERS - 1) pass_turn<Tile>(consumer);  // the first is consumer 0's
    bool more = next_piece();
    if (more) first_scores([] {}, [] {});
    while (more) {
        bf16 *const q = shared.q[at.place][0][64 * consumer];
        float o[HS / 2] = {}, reference[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, rescale[2];
        uint32_t p[KEYS / 16][4];

        auto first_softmax = [&](auto &s) {
            constexpr int SEEN = sizeof s / sizeof s[0] * 2;  // keys
            if (CAUSAL || work.T % KEYS != 0) mask_scores(s, row, tile * KEYS, work.T, CAUSAL);
            raise_reference(s, reference, rescale, scale_log2);  // there is nothing yet to rescale
            exponentials(s, reference, row_sum, scale_log2);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                if (i < SEEN / 16) pack_left(p[i], s, i % (SEEN / 16));
                else p[i][0] = p[i][1] = p[i][2] = p[i][3] = 0;
            }
        };
        sees_half ? first_softmax(half_s) : first_softmax(s);
        leaving.free(shared.q_empty, at);
        if (!CAUSAL && row < 0)  // these rows need no more tiles, but the other consumers do
            for (; tile > 0; tile--) leave_out_tile();  // K of the next and V of this one
        for (tile--; tile >= 0; tile--) {
            barrier_wait(&shared.k_full[k_stage.place], k_stage.parity);
            take_turn<Tile>(consumer);
            start_product_abt<HS>(s, q, Tile::ROWS, shared.k[k_stage.place][0][0], KEYS);
            barrier_wait(&shared.v_full[v_stage.place], v_stage.parity);
            start_product_ab<HS>(o, p, shared.v[v_stage.place][0][0], KEYS);  // of the tile before
            pass_turn<Tile>(consumer);
            wgmma_wait<1>();
            registers_settled(s);
            free_k();
            const bool raised = raise_reference(s, reference, rescale, scale_log2);
            wgmma_wait<0>();
            registers_settled(o);
            registers_settled(p);
            free_v();
            if (raised) {
                row_sum[0] *= rescale[0], row_sum[1] *= rescale[1];
#pragma unroll
                for (int i = 0; i < HS / 2; i++) o[i] *= rescale[i / 2 % 2];
            }
            exponentials(s, reference, row_sum, scale_log2);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) pack_left(p[i], s, i);
        }

        // The last product P V, and O; beside them the first scores of the next piece. O leaves by way of Q's place: only this
        // warpgroup reads these 64 rows of it, and is done with them.
        const Sm90Piece done = piece;
        const int done_row = row, done_place = at.place, last_v = v_stage.place;
        auto start_last = [&] { start_product_ab<HS>(o, p, shared.v[last_v][0][0], KEYS); };
        auto finish_last = [&] {
            registers_settled(o);
            registers_settled(p);
            release(&shared.v_empty[last_v]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], 1);
                row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], 2);
                const int out_row = done_row + lane_row() + 8 * i;
                if (lane_id() % 4 == 0 && out_row >= 0 && out_row < work.T)
                    lse[(size_t)done.head * work.T + out_row] = LN_2 * (scale_log2 * reference[i] + log2f(row_sum[i]));
            }
            const float inverse[2] = {1.0f / row_sum[0], 1.0f / row_sum[1]};
            store_to_slabs<HS>(q, Tile::ROWS, o, inverse);
            fence_async();
            meet(consumer);
            if (is_leader()) {
                if (done_row >= 0) store_tile<HS>(out_map, shared.q[done_place], 64 * consumer, done_row, done.n, done.b);
                store_commit();  // of nothing, if these rows are before 0
                leaving.any = true;
            }
        };
        barrier_wait(&shared.v_full[last_v], v_stage.parity);
        v_stage.advance();
        at.advance();
        more = next_piece();
        if (more) {
            first_scores(start_last, [&] {
                wgmma_wait<1>();
                finish_last();
            });
        } else {
            start_last();
            wgmma_wait<0>();
            finish_last();
        }
    }
    if (consumer == 0) take_turn<Tile>(consumer);  // which the last consumer has passed on
    if (is_leader()) store_wait_read<0>();
}

// Grid: sm90_grid(). The maps are of Q and of K and V in qkv, by ROWS and KEYS rows, and of out, by 64. Reads Q once, and K and V once
// per block of queries, mostly from the L2 cache; writes out and lse (B, NH, T). FLOPs: 4 T² HS a head, half of it when causal. The
// same bits in each run.
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
static void attention_sm90_forward_of(bf16 *out, float *lse, const bf16 *qkv, void *workspace, int B, int T, int NH, bool causal,
                                      cudaStream_t stream) {
    unsigned *const claims = (unsigned *)workspace;
    using Tile = Sm90Forward<HS>;
    // A section has 8 MiB of K and V, but 4 heads at least, as blocks of one head alone would be of unequal length.
    const Sm90Work work = sm90_work(B, T, NH, HS, Tile::ROWS, true, max(4, (8 << 20) / (4 * HS) / T), claims);
    const TensorMap q_map = sm90_map(qkv, B, T, 3 * NH, HS, Tile::ROWS);
    const TensorMap kv_map = sm90_map(qkv, B, T, 3 * NH, HS, Tile::KEYS);
    const TensorMap out_map = sm90_map(out, B, T, NH, HS, 64);
    auto kernel = causal ? attention_sm90_forward_kernel<HS, true> : attention_sm90_forward_kernel<HS, false>;
    CUDA_CHECK(cudaMemsetAsync(claims, 0, sizeof *claims, stream));
    LAUNCH(kernel, sm90_grid(work), Tile::Registers::THREADS, sizeof(typename Tile::Shared), stream, q_map, kv_map, out_map, lse,
           work);
}

// ----------------------------------------------------------------------------
// Backward
//
// A thread block has 128 keys of a head, and walks over the queries that see them, tile by tile. All scores are transposed, keys
// being rows: so Pᵀ and dSᵀ come out of one product as the left factors of the next, dV += Pᵀ dO and dK += dSᵀ Q. What belongs to a
// query belongs to a column, then; a lane has the columns 8 j + 2 (lane % 4) and + 1.
//
// dQ of a tile is a sum over blocks, in fp32 in device memory. So that each run gives the same bits, blocks add theirs in a fixed
// order, that of the list of items: the last keys first, key 0 last. The last takes the sum, rounds it and writes dQ. Waiting for one's
// turn costs little, as blocks start in that order, and when causal a block whose keys come before those of another has more tiles to
// do before it meets it. Nor can all wait for each other: an item waits only for earlier ones of its head, blocks do theirs in the
// order of the list, and so the earliest that is not done can go on.
//
//     producer                | K V Q dO | Q dO | ...               warp 0: K, Q, dO; warps 1 and 2: adding dQ; warp 3: V
//     consumer                | S, dP | P | dV, dS | dK | dQ of the tile before, S of the next | hand that dQ on | ...

// What belongs to the queries of a tile, of a lane's columns.
template <int N> DEVICE void load_columns(float2 (&columns)[N], const float *row) {
#pragma unroll
    for (int i = 0; i < N; i++) columns[i] = *(const float2 *)(row + 8 * i + lane_id() % 4 * 2);
}

// The same for all rows of a result.
template <int N> DEVICE void spread_columns(float (&d)[N], const float *row) {
    float2 columns[N / 4];
    load_columns(columns, row);
#pragma unroll
    for (int i = 0; i < N; i++) d[i] = i % 2 ? columns[i / 4].y : columns[i / 4].x;
}

// Sᵀ becomes Pᵀ, with the lse (to base 2) of its queries.
template <int N> DEVICE void exponentials_transposed(float (&s)[N], const float2 (&lse)[N / 4], float scale_log2) {
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = exp2_approx(scale_log2 * s[i] - (i % 2 ? lse[i / 4].y : lse[i / 4].x));
}

// Zeros in Pᵀ, whose first element is at (first_key, first_row), for keys beyond the causal diagonal or the end.
template <bool CAUSAL, int N> DEVICE void mask_transposed(float (&p)[N], int first_key, int first_row, int T) {
    const int key = first_key + lane_row(), row = first_row + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (key + i / 2 % 2 * 8 > (CAUSAL ? row + i / 4 * 8 + i % 2 : T - 1)) p[i] = 0;
}

template <int HS> struct Sm90Backward {
    static constexpr int CONSUMERS = 2, KEYS = 64 * CONSUMERS, ROWS = HS == 64 ? 128 : 64, STAGES = 2;
    static constexpr int K_PLACES = 2, V_PLACES = HS == 64 ? 2 : 1;  // K's is freed in the next piece, so there are two at least
    static constexpr bool KV_IN_REGISTERS = HS == 64;  // as left factors; else each product reads them from shared memory
    static constexpr int PART = 64 * 64;  // of dQ of a tile, what a consumer computes: half of the rows, or half of the columns
    using Registers = Sm90Registers<CONSUMERS>;

    // Who arrives at a barrier, and who waits there:
    //   k_full             warp 0, and K's bytes                                                    consumers, warps 1 to 3
    //   k_empty            warps 1 to 3 once they have read `piece`, consumers once dK has left     warp 0
    //   v_full, v_empty    warp 3, and V's bytes; consumers once dV has left                        consumers; warp 3
    //   q_full, dout_full  warp 0, and the bytes of the tile and of its lse or delta                consumers
    //   empty              consumers, after the tile's dV and dK                                    warp 0
    //   ds_full, ds_empty  consumers, with their half of dSᵀ written; after dQ                      consumers
    //   dq_full, dq_empty  consumer; warp 1 or 2, once dq has been copied                           warp 1 or 2; consumer
    struct Shared {
        bf16 k[K_PLACES][HS / 64][KEYS][64], v[V_PLACES][HS / 64][KEYS][64];  // through which dK and dV leave, too
        bf16 q[STAGES][HS / 64][ROWS][64], dout[STAGES][HS / 64][ROWS][64];
        bf16 ds[2][ROWS / 64][KEYS][64];  // dSᵀ of two tiles, for dQ: of each key 64 queries
        float dq[CONSUMERS][PART];        // on its way to be added: of thread t of a consumer registers 4 i to 4 i + 3 at 4 (128 i + t)
        float lse[STAGES][ROWS], minus_delta[STAGES][ROWS];
        Barrier k_full[K_PLACES], k_empty[K_PLACES], v_full[V_PLACES], v_empty[V_PLACES];
        Barrier q_full[STAGES], dout_full[STAGES], empty[STAGES];
        Barrier ds_full[2], ds_empty[2], dq_full[CONSUMERS], dq_empty[CONSUMERS];
        Sm90Piece piece[K_PLACES];  // whose K the place has
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "more than a thread block can have");
};

// In device memory; `added` and `parts` for each head, tile of queries and consumer. A part lies there as in Shared::dq.
struct Sm90Workspace {
    unsigned *claims;
    int *added;    // how many blocks have added their part of dQ
    float *parts;  // the sum of these parts
    float *stats;  // lse to base 2, and -delta, of each query: (B, NH, 2, padded T), where padded T is that of whole tiles
    int padded_T;
    size_t bytes;  // of all
};

// Divides the memory, which may be NULL if only the size is wanted.
template <int HS> static Sm90Workspace sm90_workspace(void *memory, int B, int T, int NH) {
    using Tile = Sm90Backward<HS>;
    const int tiles = (T + Tile::ROWS - 1) / Tile::ROWS;
    const size_t parts = (size_t)B * NH * tiles * Tile::CONSUMERS;
    const uintptr_t claims = (uintptr_t)memory, added = claims + 16, sums = added + (parts + 3) / 4 * 4 * sizeof(int);
    const uintptr_t stats = sums + parts * Tile::PART * sizeof(float);
    const uintptr_t end = stats + (size_t)B * NH * 2 * tiles * Tile::ROWS * sizeof(float);
    return {(unsigned *)claims, (int *)added, (float *)sums, (float *)stats, tiles * Tile::ROWS, end - claims};
}

template <int HS> DEVICE int query_tiles(const Sm90Work &work) {
    return (work.T + Sm90Backward<HS>::ROWS - 1) / Sm90Backward<HS>::ROWS;
}
template <int HS, bool CAUSAL> DEVICE int first_tile(const Sm90Piece &piece) {
    return CAUSAL ? piece.row / Sm90Backward<HS>::ROWS : 0;
}

// How many blocks add to a tile before this one: those with later keys that its queries see.
template <int HS, bool CAUSAL> DEVICE int adders_before(const Sm90Work &work, const Sm90Piece &piece, int tile) {
    using Tile = Sm90Backward<HS>;
    return (CAUSAL ? (tile * Tile::ROWS + Tile::ROWS - 1) / Tile::KEYS : work.blocks - 1) - piece.block;
}

// Where a consumer's part of dQ of a tile is.
template <int HS> DEVICE size_t part_of(const Sm90Work &work, const Sm90Piece &piece, int tile, int consumer) {
    return ((size_t)piece.head * query_tiles<HS>(work) + tile) * Sm90Backward<HS>::CONSUMERS + consumer;
}

// Tests let blocks be late where they hand on to others, to find out one that does not wait for its turn.
#ifndef BE_LATE
#define BE_LATE(number)
#endif

template <int HS, bool CAUSAL>
DEVICE void sm90_backward_produce(typename Sm90Backward<HS>::Shared &shared, const TensorMap *kv_map, const TensorMap *q_map,
                                  const TensorMap *dout_map, const Sm90Workspace &workspace, const Sm90Work &work) {
    using Tile = Sm90Backward<HS>;
    const int tiles = query_tiles<HS>(work);
    Ring<Tile::K_PLACES> at;
    Ring<Tile::STAGES> stage;
    for (;; at.advance()) {
        // Claimed only when there is a place for it, as other blocks wait for what is claimed; and the first one, too, so that nobody
        // waits for a block that has not begun.
        barrier_wait(&shared.k_empty[at.place], at.parity ^ 1);
        const Sm90Piece piece = work_find(work, atomicAdd(work.claims, 1u), Tile::KEYS);
        if (!announce(shared.piece, shared.k_full, shared.k_empty, at, piece)) return;
        const float *const head_stats = workspace.stats + (size_t)piece.head * 2 * workspace.padded_T;
        barrier_expect(&shared.k_full[at.place], sizeof shared.k[0]);
        load_tile<HS>(shared.k[at.place], kv_map, &shared.k_full[at.place], piece.row, work.NH + piece.n, piece.b);
#pragma unroll 1
        for (int tile = first_tile<HS, CAUSAL>(piece); tile < tiles; tile++) {
            const int i = stage.place, row = tile * Tile::ROWS;
            barrier_wait(&shared.empty[i], stage.parity ^ 1);
            barrier_expect(&shared.q_full[i], sizeof shared.q[0] + sizeof shared.lse[0]);
            load_tile<HS>(shared.q[i], q_map, &shared.q_full[i], row, piece.n, piece.b);
            bulk_load(shared.lse[i], head_stats + row, sizeof shared.lse[0], &shared.q_full[i]);
            barrier_expect(&shared.dout_full[i], sizeof shared.dout[0] + sizeof shared.minus_delta[0]);
            load_tile<HS>(shared.dout[i], dout_map, &shared.dout_full[i], row, piece.n, piece.b);
            bulk_load(shared.minus_delta[i], head_stats + workspace.padded_T + row, sizeof shared.minus_delta[0],
                      &shared.dout_full[i]);
            stage.advance();
        }
    }
}

// V has a thread of its own. With head size 128 it has one place, so that the next V comes only when the dV before has left, and K, Q
// and dO need not wait for that.
template <int HS>
DEVICE void sm90_backward_produce_v(typename Sm90Backward<HS>::Shared &shared, const TensorMap *kv_map, const Sm90Work &work) {
    using Tile = Sm90Backward<HS>;
    Ring<Tile::K_PLACES> at;
    Ring<Tile::V_PLACES> v_at;
    for (;; at.advance(), v_at.advance()) {
        barrier_wait(&shared.k_full[at.place], at.parity);
        const Sm90Piece piece = shared.piece[at.place];
        if (piece.head < 0) break;
        barrier_arrive(&shared.k_empty[at.place]);  // of what it guards only `piece` was needed
        barrier_wait(&shared.v_empty[v_at.place], v_at.parity ^ 1);
        barrier_expect(&shared.v_full[v_at.place], sizeof shared.v[0]);
        load_tile<HS>(shared.v[v_at.place], kv_map, &shared.v_full[v_at.place], piece.row, 2 * work.NH + piece.n, piece.b);
    }
}

// For each consumer one thread that adds its part of dQ when it is the block's turn. Block 0, the last, has none to add: it takes
// the sum.
template <int HS, bool CAUSAL>
DEVICE void sm90_backward_add(typename Sm90Backward<HS>::Shared &shared, const Sm90Workspace &workspace, const Sm90Work &work,
                              int consumer) {
    using Tile = Sm90Backward<HS>;
    const int tiles = query_tiles<HS>(work);
    Ring<Tile::K_PLACES> at;
    Ring<1> part;
    for (;; at.advance()) {
        barrier_wait(&shared.k_full[at.place], at.parity);
        const Sm90Piece piece = shared.piece[at.place];
        if (piece.head < 0) break;
        barrier_arrive(&shared.k_empty[at.place]);
        if (piece.block == 0) continue;
        for (int tile = first_tile<HS, CAUSAL>(piece); tile < tiles; tile++) {
            const size_t number = part_of<HS>(work, piece, tile, consumer);
            const int before = adders_before<HS, CAUSAL>(work, piece, tile);
            float *const to = workspace.parts + number * Tile::PART;
            int *const added = workspace.added + number;
            barrier_wait(&shared.dq_full[consumer], part.parity);
            BE_LATE(number);
            if (before == 0) {
                bulk_store(to, shared.dq[consumer], sizeof shared.dq[0]);
            } else {
                while (load_acquire(added) < before) __nanosleep(20);
                fence_async_global();
                bulk_add(to, shared.dq[consumer], sizeof shared.dq[0]);
            }
            store_commit();
            store_wait_read<0>();
            barrier_arrive(&shared.dq_empty[consumer]);
            part.advance();
            store_wait<0>();
            store_release(added, before + 1);
        }
    }
}

// A consumer's part of dQ of a tile goes to the thread that adds it; block 0's goes with the sum of the others' to dqkv.
template <int HS, bool CAUSAL>
DEVICE void hand_on_dq(typename Sm90Backward<HS>::Shared &shared, float (&dq)[32], Ring<1> &part, bf16 *dqkv,
                       const Sm90Workspace &workspace, const Sm90Work &work, const Sm90Piece &piece, int tile, int consumer) {
    using Tile = Sm90Backward<HS>;
    const int thread = opaque(threadIdx.x) % 128;
    if (piece.block > 0) {
        barrier_wait(&shared.dq_empty[consumer], part.parity ^ 1);
        part.advance();
        float4 *const to = (float4 *)shared.dq[consumer] + thread;
#pragma unroll
        for (int i = 0; i < 8; i++) to[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        fence_async();
        meet(consumer);
        release(&shared.dq_full[consumer]);
        return;
    }
    const size_t number = part_of<HS>(work, piece, tile, consumer);
    const int before = adders_before<HS, CAUSAL>(work, piece, tile);
    if (before > 0) {
        if (is_leader()) while (load_acquire(workspace.added + number) < before) __nanosleep(20);
        meet(consumer);
        const float4 *const from = (const float4 *)(workspace.parts + number * Tile::PART) + thread;
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

template <int HS, bool CAUSAL>
DEVICE void sm90_backward_consume(typename Sm90Backward<HS>::Shared &shared, const TensorMap *dqkv_map, bf16 *dqkv,
                                  const Sm90Workspace &workspace, const Sm90Work &work, int consumer) {
    using Tile = Sm90Backward<HS>;
    constexpr int ROWS = Tile::ROWS, KEYS = Tile::KEYS;
    const int tiles = query_tiles<HS>(work);
    const float scale_log2 = LOG2_E * work.scale;
    Ring<Tile::K_PLACES> at;
    Ring<Tile::V_PLACES> v_at;
    Ring<Tile::STAGES> stage;
    Ring<2> ds_to, ds_from;
    Ring<1> part;
    Leaving leaving;

    // The first scores of a piece are computed at the end of the one before, as in the forward.
    float s[32];
    float2 query_lse[8];
    uint32_t k_left[HS / 16][4];
    // Of the 64 queries of a tile from `query` on, with the keys at a place.
    auto start_scores = [&](int query, int place) {
        const bf16 *const q = shared.q[stage.place][0][query];
        if constexpr (Tile::KV_IN_REGISTERS) start_product_abt<HS>(s, k_left, q, ROWS);
        else start_product_abt<HS>(s, shared.k[opaque(place)][0][64 * consumer], KEYS, q, ROWS);
    };
    // The first ones of the tile that comes next, with the keys at `of`, which are new if it is the first tile of a piece. Behind the
    // last piece there is none, and what happens to be there is multiplied: a branch around it would serialize all products.
    auto start_first_scores = [&](const Ring<Tile::K_PLACES> &of, bool is_new) {
        bool any = true;
        if (is_new) {
            barrier_wait(&shared.k_full[of.place], of.parity);
            any = shared.piece[of.place].head >= 0;
            if (Tile::KV_IN_REGISTERS) load_left_rows<HS>(k_left, shared.k[of.place], 64 * consumer);
        }
        if (any) barrier_wait(&shared.q_full[stage.place], stage.parity);
        start_scores(0, of.place);
    };
    auto finish_first_scores = [&] {
        load_columns(query_lse, shared.lse[stage.place]);
        wgmma_wait<0>();
        registers_settled(s);
    };
    start_first_scores(at, true);
    finish_first_scores();
    for (;; at.advance(), v_at.advance()) {
        const Sm90Piece piece = shared.piece[at.place];
        if (piece.head < 0) break;

        // Of 128 keys by 64 queries a consumer has 64 by 64; it has half of dQ of a tile.
        float dp[32], dq[32], dk[HS / 2] = {}, dv[HS / 2] = {};
        uint32_t p[4][4], ds[4][4], v_left[HS / 16][4];
        auto start_dp = [&](int query) {  // it starts at -delta
            const bf16 *const dout = shared.dout[stage.place][0][query];
            if constexpr (Tile::KV_IN_REGISTERS) start_product_abt<HS, true>(dp, v_left, dout, ROWS);
            else start_product_abt<HS, true>(dp, shared.v[opaque(v_at.place)][0][64 * consumer], KEYS, dout, ROWS);
        };
        // Of the tile before, from all keys: 64 of its rows and 64 of its columns.
        auto start_dq = [&] {
            barrier_wait(&shared.ds_full[ds_from.place], ds_from.parity);
            const bf16 *const ds_part = shared.ds[ds_from.place][HS == 64 ? consumer : 0][0];
            const bf16 *const k_part = shared.k[opaque(at.place)][HS == 64 ? 0 : consumer][0];
            registers_settled(dq);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                wgmma<true, true>(dq, matrix_descriptor(ds_part, 0, 1024) + i * NEXT_K_TRANSPOSED,
                                  matrix_descriptor(k_part, 0, 1024) + i * NEXT_K_TRANSPOSED, i > 0);
            wgmma_commit();
        };
        auto finish_dq = [&](int tile) {
            registers_settled(dq);
            release(&shared.ds_empty[ds_from.place]);
            ds_from.advance();
            hand_on_dq<HS, CAUSAL>(shared, dq, part, dqkv, workspace, work, piece, tile, consumer);
        };
        auto finish_tile = [&] {
            registers_settled(dv), registers_settled(p), registers_settled(dk), registers_settled(ds);
            release(&shared.empty[stage.place]);
            stage.advance();
        };

        const int first = first_tile<HS, CAUSAL>(piece);
        int tile = first;
        auto start_next_scores = [&] {
            const bool is_new = tile + 1 == tiles;
            Ring<Tile::K_PLACES> of = at;
            if (is_new) of.advance();
            start_first_scores(of, is_new);
        };
        leaving.free(shared.k_empty, at);  // now, as the next piece's K comes there
        barrier_wait(&shared.v_full[v_at.place], v_at.parity);
        if (Tile::KV_IN_REGISTERS) load_left_rows<HS>(v_left, shared.v[v_at.place], 64 * consumer);
        do {
            barrier_wait(&shared.dout_full[stage.place], stage.parity);
            spread_columns(dp, shared.minus_delta[stage.place]);
#pragma unroll
            for (int query = 0; query < ROWS; query += 64) {
                if (query > 0) start_scores(query, at.place);
                start_dp(query);
                if (query > 0) {
                    wgmma_wait<1>();
                    registers_settled(s), registers_settled(dv), registers_settled(p), registers_settled(dk), registers_settled(ds);
                }
                exponentials_transposed(s, query_lse, scale_log2);
                if (CAUSAL ? tile * ROWS < piece.row + KEYS : piece.row + KEYS > work.T)
                    mask_transposed<CAUSAL>(s, piece.row + 64 * consumer, tile * ROWS + query, work.T);
#pragma unroll
                for (int i = 0; i < 4; i++) pack_left(p[i], s, i);
                start_product_ab<HS>(dv, p, shared.dout[stage.place][0][query], ROWS);
                wgmma_wait<1>();
                registers_settled(dp);
#pragma unroll
                for (int i = 0; i < 32; i++) s[i] *= dp[i];  // dSᵀ
#pragma unroll
                for (int i = 0; i < 4; i++) pack_left(ds[i], s, i);
                if (query + 64 < ROWS) {
                    spread_columns(dp, shared.minus_delta[stage.place] + query + 64);
                    load_columns(query_lse, shared.lse[stage.place] + query + 64);
                }
                if (query == 0) barrier_wait(&shared.ds_empty[ds_to.place], ds_to.parity ^ 1);
#pragma unroll
                for (int i = 0; i < 4; i++) store_left(shared.ds[ds_to.place][query / 64][64 * consumer], KEYS, ds[i], i);
                start_product_ab<HS>(dk, ds, shared.q[stage.place][0][query], ROWS);
            }
            fence_async();
            meet(consumer);
            release(&shared.ds_full[ds_to.place]);
            ds_to.advance();

            // dQ is that of the tile before, so that no consumer has to wait for the other's dS; and the next tile's first scores
            // come while it is handed on. (A product has to be started and awaited within one round of the loop, and within a
            // branch: else ptxas serializes all of them.)
            if (tile > first) {
                start_dq();
                wgmma_wait<1>();  // dQ goes on
                finish_tile();
                start_next_scores();
                wgmma_wait<1>();  // the scores go on
                finish_dq(tile - 1);
                finish_first_scores();
            } else {
                wgmma_wait<0>();
                finish_tile();
                start_next_scores();
                finish_first_scores();
            }
        } while (++tile < tiles);

        start_dq();
        store_to_slabs<HS>(shared.v[v_at.place][0][64 * consumer], KEYS, dv, 1);
        fence_async();
        meet(consumer);
        if (is_leader()) {
            store_tile<HS>(dqkv_map, shared.v[v_at.place], 64 * consumer, piece.row + 64 * consumer, 2 * work.NH + piece.n,
                           piece.b);
            store_commit();
        }
        wgmma_wait<0>();
        named_barrier_sync(K_FREE, 256);  // the other consumer's dQ needs K, too
        store_to_slabs<HS>(shared.k[at.place][0][64 * consumer], KEYS, dk, work.scale);
        fence_async();
        meet(consumer);
        if (is_leader()) {
            store_tile<HS>(dqkv_map, shared.k[at.place], 64 * consumer, piece.row + 64 * consumer, work.NH + piece.n, piece.b);
            store_commit();
            store_wait_read<1>();  // dV, the older of the two
            barrier_arrive(&shared.v_empty[v_at.place]);
            leaving.any = true;
        }
        finish_dq(tile - 1);  // last, as the place for it still has that of the tile before
    }
    if (is_leader()) store_wait_read<0>();
}

// Grid: sm90_grid(). The maps are of qkv by KEYS and by ROWS rows, dout by ROWS, dqkv by 64. Reads K and V once, Q and dO once per block
// of keys, and adds as often 4 bytes an element of dQ, mostly in the L2 cache; writes dqkv. FLOPs: 10 T² HS a head, half of it when
// causal. The same bits in each run.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(Sm90Backward<HS>::Registers::THREADS, 1) void attention_sm90_backward_kernel(
    const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap dout_map,
    const __grid_constant__ TensorMap dqkv_map, bf16 *dqkv, const __grid_constant__ Sm90Workspace workspace,
    const __grid_constant__ Sm90Work work) {
    using Tile = Sm90Backward<HS>;
    DYNAMIC_SHARED(memory);
    typename Tile::Shared &shared = *(typename Tile::Shared *)memory;
    if (threadIdx.x == 0) {
        barriers_init(shared.k_full, 1), barriers_init(shared.k_empty, 2 * Tile::CONSUMERS + 1);  // all who read `piece`
        barriers_init(shared.v_full, 1), barriers_init(shared.v_empty, Tile::CONSUMERS);
        barriers_init(shared.q_full, 1), barriers_init(shared.dout_full, 1), barriers_init(shared.empty, Tile::CONSUMERS);
        barriers_init(shared.ds_full, Tile::CONSUMERS), barriers_init(shared.ds_empty, Tile::CONSUMERS);
        barriers_init(shared.dq_full, 1), barriers_init(shared.dq_empty, 1);
    }
    divide_block<Tile>(
        [&] {
            const int warp = __shfl_sync(~0u, warp_id() % 4, 0);
            if (lane_id() > 0) return;
            if (warp == 0) sm90_backward_produce<HS, CAUSAL>(shared, &kv_map, &q_map, &dout_map, workspace, work);
            else if (warp == 3) sm90_backward_produce_v<HS>(shared, &kv_map, work);
            else sm90_backward_add<HS, CAUSAL>(shared, workspace, work, warp - 1);
        },
        [&](int consumer) { sm90_backward_consume<HS, CAUSAL>(shared, &dqkv_map, dqkv, workspace, work, consumer); });
}

// dqkv (B, T, 3, NH, HS) from dout, qkv and the workspace's stats, which attention_stats_kernel has made before.
template <int HS>
static void attention_sm90_backward_of(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const Sm90Workspace &workspace, int B, int T,
                                       int NH, bool causal, cudaStream_t stream) {
    using Tile = Sm90Backward<HS>;
    // Heads worked on at the same time: their Q, K, V and dO (2 bytes an element) and the sums of dQ (4) fit the L2 cache.
    const Sm90Work work = sm90_work(B, T, NH, HS, Tile::KEYS, false, max(1, (32 << 20) / (12 * HS) / T), workspace.claims);
    auto kernel = causal ? attention_sm90_backward_kernel<HS, true> : attention_sm90_backward_kernel<HS, false>;
    CUDA_CHECK(cudaMemsetAsync(workspace.claims, 0, (char *)workspace.parts - (char *)workspace.claims, stream));
    LAUNCH(kernel, sm90_grid(work), Tile::Registers::THREADS, sizeof(typename Tile::Shared), stream,
           sm90_map(qkv, B, T, 3 * NH, HS, Tile::KEYS), sm90_map(qkv, B, T, 3 * NH, HS, Tile::ROWS),
           sm90_map(dout, B, T, NH, HS, Tile::ROWS), sm90_map(dqkv, B, T, 3 * NH, HS, 64), dqkv, workspace, work);
}

#endif

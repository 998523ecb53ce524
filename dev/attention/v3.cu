// v3: FlashAttention-3's forward (Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with
// Asynchrony and Low-precision", 2024) in its simplest form, for Hopper GPUs (compute capability 9.0), head sizes 64 and 128.
//
// The mathematics is v2's. The work of a thread block is divided anew, between three warpgroups of four warps each. One, the
// producer, only starts copies. The two others, the consumers, own 64 queries each. Copies and products run beside the threads that
// start them, so each warpgroup waits for just what it needs, and never for all:
//
//   producer, one thread:                    consumer 0, consumer 1:
//     load Q                                   O = 0, max = -inf, sum = 0; wait for Q
//     for each tile of keys:                   for each tile of keys:
//       wait until its place is free             wait for K; S = Q Kᵀ, in its turn; free K
//       load K                                   P = exp(S - new max); rescale O and sum
//       wait until its place is free             wait for V; O += P V, in its turn; free V
//       load V                                 O /= sum; lse = max + log(sum)
//
// In a turn a consumer starts P V of one tile and Q Kᵀ of the next. They take turns, so that one's softmax runs beside the other's
// products.
//
// attention_sm90.cuh has more of the paper: P V runs beside the next tile's maxima within a consumer, too, and a thread block goes on
// to the next queries without a pause. The backward here is attention.cuh's, as in the trainer.
//
// Device memory, in elements: reads Q once and K, V once per block of queries (mostly from the L2 cache), writes O, lse. FLOPs:
// 4 T² HS a head, half if causal. (A little more: of the last causal tile consumer 0's queries see no more than half.)

#include "attention.cuh"
#include "gpt/hopper.cuh"
#include "variant.h"

static constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, KEYS = 128;  // queries of a block, keys of a tile
static constexpr int STAGES = 2;                                        // tiles under way: one is used, the next is copied
static constexpr int THREADS = 128 * (CONSUMERS + 1);
static_assert(ROWS == KEYS, "one tensor map is for Q, K and V");

// Registers of a thread, in eights. All threads start with the same number. The producer gives up most of its own, and the
// consumers wait for them. With more than there are in all they would wait for ever.
static constexpr int REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (1 + CONSUMERS) * REGISTERS, "no more than all have at first");

// A tile is a slab of 64 columns (gpt/hopper.cuh), or two for head size 128. Each place for a tile has two barriers. A phase of
// "full" ends when a copy has arrived, a phase of "empty" when all eight warps of the consumers are done with what was there.
template <int HS> struct Shared {
    bf16 q[HS / 64][ROWS][64], k[STAGES][HS / 64][KEYS][64], v[STAGES][HS / 64][KEYS][64];
    Barrier q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// Keys beyond the causal diagonal or the end become -inf in S. As wgmma leaves it, a lane has elements of two rows, lane_row and
// lane_row + 8: in both columns 0 and 1, 8 and 9, 16 and 17, ..., counted from 2 (lane % 4).
template <int N> DEVICE void mask_tile(float (&s)[N], int lane_row, int first_key, int T, bool causal) {
    const int lane_key = first_key + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int last_key = causal ? lane_row + i / 2 % 2 * 8 : T - 1;
        if (lane_key + i / 4 * 8 + i % 2 > last_key) s[i] = -INFINITY;
    }
}

// One step of the online softmax, as in v2.cu. Each row must see a key in its first tile; here it is key 0.
template <int N, int O>
DEVICE void online_softmax(float (&s)[N], float (&o)[O], float (&row_max)[2], float (&row_sum)[2], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float maximum = row_max[half];
#pragma unroll
        for (int i = 2 * half; i < N; i += 4) maximum = fmaxf(maximum, fmaxf(s[i], s[i + 1]));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
        const float rescale = exp2_approx(scale_log2 * (row_max[half] - maximum)), offset = scale_log2 * maximum;
        row_max[half] = maximum;
        row_sum[half] *= rescale;
#pragma unroll
        for (int i = 2 * half; i < O; i += 4) o[i] *= rescale, o[i + 1] *= rescale;
#pragma unroll
        for (int i = 2 * half; i < N; i += 4) {
            s[i] = exp2_approx(scale_log2 * s[i] - offset);
            s[i + 1] = exp2_approx(scale_log2 * s[i + 1] - offset);
            row_sum[half] += s[i] + s[i + 1];
        }
    }
}

// Grid: B · NH · blocks of ROWS queries, of a head the longest causal rows first. out (B, T, NH, HS), lse (B, NH, T). The tensor
// map is of qkv (B, T, 3 NH, HS), by boxes of 128 rows and 64 columns; rows from T on arrive as zeros.
template <int HS, bool CAUSAL>
static __global__ __launch_bounds__(THREADS, 1) void attention_v3_forward_kernel(
    bf16 *out, float *lse, const __grid_constant__ TensorMap qkv, int T, int NH, float scale_log2) {
    DYNAMIC_SHARED(memory);
    Shared<HS> &shared = *(Shared<HS> *)memory;
    if (threadIdx.x == 0) {
        barrier_init(&shared.q_full, 1);
        for (int i = 0; i < STAGES; i++) {  // full: the producer arrives, and says how many bytes will; empty: each warp does
            barrier_init(&shared.k_full[i], 1), barrier_init(&shared.k_empty[i], 4 * CONSUMERS);
            barrier_init(&shared.v_full[i], 1), barrier_init(&shared.v_empty[i], 4 * CONSUMERS);
        }
        barrier_init_fence();
    }
    __syncthreads();  // the only time that all threads meet

    const int row_blocks = (T + ROWS - 1) / ROWS, head = blockIdx.x / row_blocks, b = head / NH, n = head % NH;
    const int block_row = (row_blocks - 1 - blockIdx.x % row_blocks) * ROWS;
    const int keys = CAUSAL ? min(T, block_row + ROWS) : T, tiles = (keys + KEYS - 1) / KEYS;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so the compiler knows that it is uniform
    Ring<STAGES> stage;  // the place of this thread's next tile, and the parity of the barriers' phase there

    if (warpgroup == CONSUMERS) {  // the producer
        registers_decrease<PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 != 0) return;
        auto load = [&](bf16 (&tile)[HS / 64][KEYS][64], Barrier *full, int first_row, int slot) {
            barrier_expect(full, sizeof tile);
            for (int i = 0; i < HS / 64; i++) tensor_load(tile[i], &qkv, full, 64 * i, first_row, slot, b);
        };
        load(shared.q, &shared.q_full, block_row, n);
        for (int tile = 0; tile < tiles; tile++, stage.advance()) {
            barrier_wait(&shared.k_empty[stage.place], stage.parity ^ 1);  // at once for the first STAGES tiles
            load(shared.k[stage.place], &shared.k_full[stage.place], tile * KEYS, NH + n);
            barrier_wait(&shared.v_empty[stage.place], stage.parity ^ 1);
            load(shared.v[stage.place], &shared.v_full[stage.place], tile * KEYS, 2 * NH + n);
        }
        return;
    }

    registers_increase<CONSUMER_REGISTERS>();
    const int consumer = warpgroup, lane_row = block_row + 64 * consumer + threadIdx.x % 128 / 32 * 16 + lane_id() / 4;  // and + 8
    const bf16 *const q = shared.q[0][64 * consumer];
    // At named barrier 1 consumer 0 waits for consumer 1 to arrive, at 2 the other way round.
    auto take_turn = [&] { named_barrier_sync(1 + consumer, 128 * CONSUMERS); };
    auto pass_turn = [&] { named_barrier_arrive(2 - consumer, 128 * CONSUMERS); };
    auto release = [&](Barrier *empty) { if (lane_id() == 0) barrier_arrive(empty); };  // a warp's lanes are done together

    float o[HS / 2] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    barrier_wait(&shared.q_full, 0);
    if (consumer == 1) pass_turn();  // the first turn is consumer 0's
    take_turn();
    for (int tile = 0; tile < tiles; tile++, stage.advance()) {
        float s[KEYS / 2];
        barrier_wait(&shared.k_full[stage.place], stage.parity);
        start_product_abt<HS>(s, q, ROWS, shared.k[stage.place][0][0], KEYS);
        pass_turn();  // what the other starts now comes next in the tensor cores
        wgmma_wait<0>();
        registers_settled(s);
        release(&shared.k_empty[stage.place]);

        if (tile == tiles - 1 && (CAUSAL || T % KEYS != 0)) mask_tile(s, lane_row, tile * KEYS, T, CAUSAL);
        online_softmax(s, o, row_max, row_sum, scale_log2);
        uint32_t p[KEYS / 16][4];
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) pack_left(p[k], s, k);

        barrier_wait(&shared.v_full[stage.place], stage.parity);
        take_turn();
        start_product_ab<HS>(o, p, shared.v[stage.place][0][0], KEYS);
        wgmma_wait<0>();
        registers_settled(o);
        release(&shared.v_empty[stage.place]);
    }
    if (consumer == 0) pass_turn();  // the last turn is consumer 1's

#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = lane_row + 8 * half;
        float sum = row_sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (row >= T) continue;
        if (lane_id() % 4 == 0) lse[(size_t)head * T + row] = LN_2 * (scale_log2 * row_max[half] + log2f(sum));
        uint32_t *const to = (uint32_t *)(out + (((size_t)b * T + row) * NH + n) * HS + lane_id() % 4 * 2);
        const float inverse = 1.0f / sum;
#pragma unroll
        for (int i = 0; i < HS / 8; i++) to[4 * i] = pack_bf16(inverse * o[4 * i + 2 * half], inverse * o[4 * i + 2 * half + 1]);
    }
}

template <int HS> static void forward(bf16 *out, float *lse, const bf16 *qkv, Shape s, cudaStream_t stream) {
    const unsigned grid = attention_grid(s.B, s.T, s.NH, ROWS);
    const float scale_log2 = LOG2_E / sqrtf((float)HS);
    TensorMap map;
    if (!tensor_map_make(&map, qkv, s.B, s.T, 3 * s.NH, HS, KEYS)) die_of_failure();
    auto kernel = s.causal ? attention_v3_forward_kernel<HS, true> : attention_v3_forward_kernel<HS, false>;
    LAUNCH(kernel, grid, THREADS, sizeof(Shared<HS>), stream, out, lse, map, s.T, s.NH, scale_log2);
}

// ----------------------------------------------------------------------------
// What the harness sees

static bool supports(Shape s) {
    if (s.HS != 64 && s.HS != 128) return fail("v3 has no kernels for head size %d; it has them for 64 and 128", s.HS);
    return has_tiles("v3", s, s.HS == 64 ? sizeof(Shared<64>) : sizeof(Shared<128>)) && hopper_available();
}

static size_t workspace_bytes(Shape s) { return attention_workspace_bytes(s.B, s.T, s.NH, s.HS, true); }

static void attention_forward(bf16 *out, float *lse, const bf16 *qkv, void *, Shape s, cudaStream_t stream) {
    s.HS == 64 ? forward<64>(out, lse, qkv, s, stream) : forward<128>(out, lse, qkv, s, stream);
}

static void attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *workspace,
                               Shape s, cudaStream_t stream) {
    attention_backward(dqkv, dout, qkv, out, lse, workspace, s.B, s.T, s.NH, s.HS, s.causal, stream);
}

PARTIAL_VARIANT(v3, "FlashAttention-3's forward, for Hopper: a warpgroup that copies, two that multiply in turns; the trainer's backward")

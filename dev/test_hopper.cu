// Tests of gpt/hopper.cuh, each function against plain C: on a Hopper GPU, and of dev/hopper_on_cpu.h on the CPU, where planted
// faults have to be found, too.
//
//   make build/nvcc/test_hopper && build/nvcc/test_hopper            on a GPU
//   make build/cc/test_hopper && build/cc/test_hopper planted        on the CPU, those with "planted" in the name
//   CUDA_ON_CPU_SEED=7 build/cc/test_hopper                          with another order of threads and another speed of copies
//
// Factors are small integers, so that all sums are exact in fp32 and must be equal.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "gpt/hopper.cuh"
#include "gpt/tile.cuh"

#ifdef __CUDACC__
#include "tests/frame.h"
#define cudaMalloc cudaMallocManaged  // memory for both sides
#else
#include "dev/planted.h"
#endif

#include <vector>

// ----------------------------------------------------------------------------
// Helpers

static std::vector<void *> allocations;  // of the test that runs

template <typename T> static T *device(size_t count) {  // all NaN
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(T)));
    allocations.push_back(memory);
    memset((void *)memory, 0xFF, count * sizeof(T));
    return memory;
}

static void free_all(const char *) {
    for (void *memory : allocations) CUDA_CHECK(cudaFree(memory));
    allocations.clear();
}

static int draw_below(int end) { return (int)(draw_unit() * end); }

static bf16 *drawn(size_t count) {  // integers from -4 to 4
    bf16 *memory = device<bf16>(count);
    for (size_t i = 0; i < count; i++) memory[i] = __float2bfloat16((float)(draw_below(9) - 4));
    return memory;
}

static float number(bf16 x) { return __bfloat162float(x); }
static float rounded(float x) { return number(__float2bfloat16(x)); }

#define RUN(...) do { LAUNCH(__VA_ARGS__); CUDA_CHECK(cudaDeviceSynchronize()); } while (0)

static TensorMap map_of(const bf16 *tensor, int B, int T, int slots, int HS, int rows) {
    TensorMap map;
    if (!tensor_map_make(&map, tensor, B, T, slots, HS, rows)) die_of_failure();
    return map;
}

// Where element (row, column) of a matrix lies in its slabs of `rows` rows.
static __host__ __device__ int place(int row, int column, int rows) {
    return column / 64 * rows * 64 + row * 64 + ((column % 64 / 8) ^ row % 8) * 8 + column % 8;
}

// The block puts a (rows, columns) matrix into slabs.
DEVICE void fill_slabs(bf16 *slabs, const bf16 *matrix, int rows, int columns) {
    for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) slabs[place(i / columns, i % columns, rows)] = matrix[i];
}

// Which element of D (64, N) is d[i] of this thread.
DEVICE int element(int i, int N) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    return row * N + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

// The descriptor of step k of tile A (64, K) or B (N, K), `rows` being 64 or N.
DEVICE uint64_t by_rows(const bf16 *tile, int k, int rows) {
    return matrix_descriptor(tile + k / 4 * rows * 64, 16 * 7, 1024) + k % 4 * NEXT_K;  // the leading bytes play no role
}

// ----------------------------------------------------------------------------
// Products, in all forms

enum Left { BY_ROWS, TRANSPOSED, REGISTERS };

// D (64, N) = A B, or +=: A is (64, K), or (K, 64) if transposed; B (N, K), or (K, N).
template <int N, int K, Left LEFT, bool B_TRANSPOSED>
__global__ void __launch_bounds__(128)
    product_kernel(float *out, const bf16 *a, const bf16 *b, bool accumulate, int stride_bytes, int leading_bytes) {
    DYNAMIC_SHARED(memory);
    bf16 *a_tile = (bf16 *)memory, *b_tile = a_tile + 64 * K;
    if (LEFT != REGISTERS) fill_slabs(a_tile, a, LEFT == BY_ROWS ? 64 : K, LEFT == BY_ROWS ? K : 64);
    fill_slabs(b_tile, b, B_TRANSPOSED ? K : N, B_TRANSPOSED ? N : K);
    fence_async();
    __syncthreads();
    float d[N / 2];
    for (int i = 0; i < N / 2; i++) d[i] = out[element(i, N)];
    registers_settled(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        const uint64_t right = B_TRANSPOSED ? matrix_descriptor(b_tile, leading_bytes, stride_bytes) + k * NEXT_K_TRANSPOSED
                                            : by_rows(b_tile, k, N);
        if (LEFT == REGISTERS) {
            uint32_t left[4];
            for (int i = 0; i < 4; i++) memcpy(&left[i], &a[element(2 * i, K) + 16 * k], 4);
            registers_settled(left);
            wgmma_fence();
            wgmma_registers<B_TRANSPOSED>(d, left, right, accumulate || k > 0);
            wgmma_commit();  // or the next could overwrite `left`
            wgmma_wait<0>();
            registers_settled(d);
        } else if (LEFT == BY_ROWS) {
            wgmma<false, B_TRANSPOSED>(d, by_rows(a_tile, k, 64), right, accumulate || k > 0);
        } else {
            const uint64_t left = matrix_descriptor(a_tile, 0, stride_bytes) + k * NEXT_K_TRANSPOSED;
            wgmma<true, B_TRANSPOSED>(d, left, right, accumulate || k > 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    registers_settled(d);
    for (int i = 0; i < N / 2; i++) out[element(i, N)] = d[i];
}

template <int N, int K, Left LEFT, bool B_TRANSPOSED>
static bool product_right(bool accumulate, int stride_bytes, int leading_bytes) {
    bf16 *a = drawn(64 * K), *b = drawn(N * K);
    float *out = device<float>(64 * N);
    std::vector<float> expected(64 * N);
    for (int i = 0; i < 64 * N; i++) {
        if (accumulate) expected[i] = out[i] = (float)draw_below(1000);
        const int m = i / N, n = i % N;
        for (int k = 0; k < K; k++)
            expected[i] += number(a[LEFT == TRANSPOSED ? k * 64 + m : m * K + k]) * number(b[B_TRANSPOSED ? k * N + n : n * K + k]);
    }
    auto kernel = product_kernel<N, K, LEFT, B_TRANSPOSED>;
    RUN(kernel, 1, 128, (64 + (N + 63) / 64 * 64) * K * 2, NULL, out, a, b, accumulate, stride_bytes, leading_bytes);
    for (int i = 0; i < 64 * N; i++)
        if (out[i] != expected[i]) return false;
    return true;
}

template <int N, int K, Left LEFT, bool B_TRANSPOSED> static void test_product(void) {
    CHECK((product_right<N, K, LEFT, B_TRANSPOSED>(false, 1024, K * 128)), "N %d, K %d", N, K);
    CHECK((product_right<N, K, LEFT, B_TRANSPOSED>(true, 1024, K * 128)), "N %d, K %d, added to what there was", N, K);
}
// By rows K is the head size, of one slab or two; else the length of a tile, any multiple of 16.
template <int N, Left LEFT, bool B_TRANSPOSED> static void test_lengths(void) {
    test_product<N, 64, LEFT, B_TRANSPOSED>();
    test_product<N, 128, LEFT, B_TRANSPOSED>();
    if constexpr (LEFT != BY_ROWS && B_TRANSPOSED) test_product<N, 176, LEFT, B_TRANSPOSED>();
}
template <Left LEFT, bool B_TRANSPOSED> static void test_products(void) {
    test_lengths<64, LEFT, B_TRANSPOSED>();
    test_lengths<128, LEFT, B_TRANSPOSED>();
}
TEST(product_by_rows) { test_products<BY_ROWS, false>(); }
TEST(product_by_rows_transposed) { test_products<BY_ROWS, true>(); }
TEST(product_transposed_by_rows) { test_products<TRANSPOSED, false>(); }
TEST(product_transposed_transposed) { test_products<TRANSPOSED, true>(); }
TEST(product_registers_by_rows) { test_products<REGISTERS, false>(); }
TEST(product_registers_transposed) { test_products<REGISTERS, true>(); }

// As in attention: O = P V, where P = Q Kᵀ, rounded to bf16, stays in registers; Q is read from shared memory, or from registers,
// too. Of each 16 rows of O the first 8 are doubled as it is written to slabs, and leaves by a tensor map.
template <int KEYS, int HS, bool Q_IN_REGISTERS>
__global__ void __launch_bounds__(128)
    chain_kernel(const __grid_constant__ TensorMap out, const bf16 *q, const bf16 *k, const bf16 *v) {
    DYNAMIC_SHARED(memory);
    bf16 *q_tile = (bf16 *)memory, *k_tile = q_tile + 64 * HS, *v_tile = k_tile + KEYS * HS;
    fill_slabs(q_tile, q, 64, HS);
    fill_slabs(k_tile, k, KEYS, HS);
    fill_slabs(v_tile, v, KEYS, HS);
    fence_async();
    __syncthreads();
    float s[KEYS / 2], o[HS / 2] = {};
    uint32_t p[KEYS / 16][4], left[HS / 16][4];
    if constexpr (Q_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < HS / 16; i++) load_left<64>(left[i], q_tile + i / 4 * 64 * 64, threadIdx.x / 32 * 16, i % 4 * 16);
        start_product_abt<HS>(s, left, k_tile, KEYS);
    } else {
        start_product_abt<HS>(s, q_tile, 64, k_tile, KEYS);
    }
    wgmma_wait<0>();
    registers_settled(s);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) pack_left(p[i], s, i);
    start_product_ab<HS>(o, p, v_tile, KEYS);
    wgmma_wait<0>();
    registers_settled(o);
    const float scale[2] = {2, 1};
    store_to_slabs<HS>(q_tile, 64, o, scale);
    fence_async();
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 0; i < HS / 64; i++) tensor_store(&out, q_tile + i * 64 * 64, 64 * i, 0, 0, 0);
    store_commit();
    store_wait<0>();
}

template <int KEYS, int HS, bool Q_IN_REGISTERS> static void test_chain(void) {
    bf16 *q = drawn(64 * HS), *k = drawn(KEYS * HS), *v = drawn(KEYS * HS), *out = device<bf16>(64 * HS);
    auto kernel = chain_kernel<KEYS, HS, Q_IN_REGISTERS>;
    RUN(kernel, 1, 128, (64 * HS + 2 * KEYS * HS) * 2, NULL, map_of(out, 1, 64, 1, HS, 64), q, k, v);
    for (int m = 0; m < 64; m++) {
        float expected[HS] = {};
        for (int key = 0; key < KEYS; key++) {
            float s = 0;
            for (int i = 0; i < HS; i++) s += number(q[m * HS + i]) * number(k[key * HS + i]);
            for (int n = 0; n < HS; n++) expected[n] += rounded(s) * number(v[key * HS + n]);
        }
        for (int n = 0; n < HS; n++) {
            const float want = rounded(m % 16 < 8 ? 2 * expected[n] : expected[n]), got = number(out[m * HS + n]);
            CHECK(got == want, "(%d, %d): %g, not %g", m, n, got, want);
        }
    }
}
TEST(result_as_left_factor) {
    test_chain<64, 64, false>();
    test_chain<128, 64, false>();
    test_chain<64, 128, false>();
    test_chain<128, 128, false>();
    test_chain<64, 64, true>();
    test_chain<128, 64, true>();
    test_chain<64, 128, true>();
}

// Two groups under way, of which the first is awaited first; the second warpgroup has other rows of A.
__global__ void __launch_bounds__(256) groups_kernel(float *out, const bf16 *a, const bf16 *b) {
    DYNAMIC_SHARED(memory);
    bf16 *a_tile = (bf16 *)memory, *b_tile = a_tile + 128 * 64;
    fill_slabs(a_tile, a, 128, 64);
    fill_slabs(b_tile, b, 128, 64);
    fence_async();
    __syncthreads();
    a_tile += threadIdx.x / 128 * 64 * 64;
    out += threadIdx.x / 128 * 3 * 64 * 64;
    float first[32], second[32];
    registers_settled(first);
    registers_settled(second);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<false, false>(first, by_rows(a_tile, k, 64), by_rows(b_tile, k, 64), k > 0);
    wgmma_commit();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<false, false>(second, by_rows(a_tile, k, 64), by_rows(b_tile + 64 * 64, k, 64), k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    registers_settled(first);
    for (int i = 0; i < 32; i++) out[element(i, 64)] = first[i];
    wgmma_wait<0>();
    registers_settled(second);
    for (int i = 0; i < 32; i++) out[64 * 64 + element(i, 64)] = second[i];
}
TEST(groups_of_products) {
    bf16 *a = drawn(128 * 64), *b = drawn(128 * 64);
    float *out = device<float>(2 * 3 * 64 * 64);
    RUN(groups_kernel, 1, 256, 256 * 64 * 2, NULL, out, a, b);
    for (int m = 0; m < 128; m++) {
        for (int n = 0; n < 128; n++) {
            float sum = 0, got = out[m / 64 * 3 * 64 * 64 + n / 64 * 64 * 64 + m % 64 * 64 + n % 64];
            for (int k = 0; k < 64; k++) sum += number(a[m * 64 + k]) * number(b[n * 64 + k]);
            CHECK(got == sum, "(%d, %d): %g, not %g", m, n, got, sum);
        }
    }
}

// ----------------------------------------------------------------------------
// Copies

DEVICE void start_barrier(Barrier *barrier, unsigned arrivals) {
    if (threadIdx.x == 0) barrier_init(barrier, arrivals);
    if (threadIdx.x == 0) barrier_init_fence();
    __syncthreads();
}

__global__ void load_kernel(uint16_t *out, const __grid_constant__ TensorMap map, int rows, int column, int row, int slot,
                            int batch) {
    DYNAMIC_SHARED(memory);
    __shared__ Barrier arrived;
    for (int i = threadIdx.x; i < rows * 64; i += blockDim.x) ((uint16_t *)memory)[i] = 0x1234;
    fence_async();
    start_barrier(&arrived, 1);
    if (threadIdx.x == 0) {
        barrier_expect(&arrived, rows * 128);
        tensor_load(memory, &map, &arrived, column, row, slot, batch);
    }
    barrier_wait(&arrived, 0);
    for (int i = threadIdx.x; i < rows * 64; i += blockDim.x) out[i] = ((const uint16_t *)memory)[i];
}

// Boxes inside of (B, T, slots, HS), across both ends of T and beyond; all of it zeros there, never the next sequence.
TEST(tensor_load) {
    for (int round = 0; round < 60; round++) {
        const int B = 1 + draw_below(3), T = 1 + draw_below(300), NH = 1 + draw_below(3), slots = 3 * NH, HS = 64 << round % 2;
        const int rows = 8 * (1 + draw_below(32)), column = draw_below(HS / 64) * 64;
        const int batch = draw_below(B), slot = draw_below(slots);
        const int row = round % 3 == 0 ? -draw_below(rows + 10) : draw_below(T + 10);
        bf16 *qkv = drawn((size_t)B * T * slots * HS);
        uint16_t *out = device<uint16_t>(rows * 64);
        RUN(load_kernel, 1, 64, rows * 128, NULL, out, map_of(qkv, B, T, slots, HS, rows), rows, column, row, slot, batch);
        for (int i = 0; i < rows * 64; i++) {
            const int t = row + i / 64;
            uint16_t expected = 0;
            if (t >= 0 && t < T) memcpy(&expected, &qkv[(((size_t)batch * T + t) * slots + slot) * HS + column + i % 64], 2);
            CHECK(out[place(i / 64, i % 64, rows)] == expected, "T %d, slots %d, HS %d, (%d, %d) of %d rows at (%d, %d, %d, %d)", T,
                  slots, HS, i / 64, i % 64, rows, batch, row, slot, column);
        }
        free_all(NULL);
    }
}

TEST(tensor_map_fails) {
    TensorMap map;
    bf16 *tensor = drawn(1024);
    CHECK(tensor_map_make(&map, tensor, 1, 16, 1, 64, 256));
    CHECK(!tensor_map_make(&map, tensor, 1, 16, 1, 64, 257) && strstr(error_text, "no tensor map of a (1, 16, 1, 64) tensor"));
    CHECK(!tensor_map_make(&map, tensor + 4, 1, 16, 1, 64, 64) && !tensor_map_make(&map, tensor, 1, 0, 1, 64, 64));
    CHECK(!tensor_map_make(&map, tensor, 1, 16, 1, 60, 64));
}

// Two stores of one slab, which is overwritten as soon as the first is read.
__global__ void store_kernel(const __grid_constant__ TensorMap map, const bf16 *first, const bf16 *second, int rows, int column,
                             int row, int slot) {
    DYNAMIC_SHARED(memory);
    for (int store = 0; store < 2; store++) {
        fill_slabs((bf16 *)memory, store ? second : first, rows, 64);
        fence_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            tensor_store(&map, memory, column, row, slot, store);
            store_commit();
            store_wait_read<0>();
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) store_wait<0>();
}

TEST(tensor_store) {
    for (int round = 0; round < 40; round++) {
        const int T = 1 + draw_below(200), slots = 1 + draw_below(4), HS = 64 << round % 2, rows = 8 * (1 + draw_below(32));
        const int row = draw_below(T), column = draw_below(HS / 64) * 64, slot = draw_below(slots);
        const size_t size = (size_t)2 * T * slots * HS;
        bf16 *tensor = device<bf16>(size), *parts[] = {drawn(rows * 64), drawn(rows * 64)};
        const TensorMap map = map_of(tensor, 2, T, slots, HS, rows);
        RUN(store_kernel, 1, 64, rows * 128, NULL, map, parts[0], parts[1], rows, column, row, slot);
        for (size_t i = 0; i < size; i++) {
            const int c = (int)(i % HS) - column, s = (int)(i / HS % slots), token = (int)(i / HS / slots);
            const int r = token % T - row, b = token / T;
            uint16_t got, expected = 0xFFFF;
            memcpy(&got, &tensor[i], 2);
            if (s == slot && r >= 0 && r < rows && c >= 0 && c < 64) memcpy(&expected, &parts[b][r * 64 + c], 2);
            CHECK(got == expected, "T %d, slots %d, HS %d, %d rows at %d: element %d", T, slots, HS, rows, row, (int)i);
        }
        free_all(NULL);
    }
}

__global__ void bulk_kernel(int4 *out, const int4 *in, int count) {
    DYNAMIC_SHARED(memory);
    __shared__ Barrier arrived;
    start_barrier(&arrived, 1);
    if (threadIdx.x == 32) {  // by two copies
        barrier_expect(&arrived, (count + 1) * 16);
        bulk_load(memory, in + 1, count * 16, &arrived);
        bulk_load(memory + count * 16, in, 16, &arrived);
    }
    barrier_wait(&arrived, 0);
    for (int i = threadIdx.x; i <= count; i += blockDim.x) out[i] = ((const int4 *)memory)[i];
}
TEST(bulk_load) {
    for (int count : {1, 4, 7, 300}) {
        bf16 *in = drawn((count + 1) * 8), *out = device<bf16>((count + 1) * 8);
        RUN(bulk_kernel, 1, 64, (count + 1) * 16, NULL, (int4 *)out, (const int4 *)in, count);
        CHECK(memcmp(out, in + 8, count * 16) == 0 && memcmp(out + count * 8, in, 16) == 0);
    }
}

// Blocks add up floats in a given order, the last block first: so the sums are the same to the bit as a loop's.
template <bool WAIT> __global__ void add_kernel(float *sums, int *added, const float *in, int count) {
    DYNAMIC_SHARED(memory);
    float *const part = (float *)memory;
    const int before = gridDim.x - 1 - blockIdx.x;
    for (int round = 0; round < 2; round++, sums += count, added++) {  // the second waits until the first has been read
        for (int i = threadIdx.x; i < count; i += blockDim.x) part[i] = in[(blockIdx.x * 2 + round) * count + i];
        fence_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            if (before == 0) {
                bulk_store(sums, part, count * 4);
            } else {
                while (WAIT && load_acquire(added) < before) __nanosleep(20);
                bulk_add(sums, part, count * 4);
            }
            store_commit();
            store_wait<0>();
            store_release(added, before + 1);
        }
        __syncthreads();
    }
}
template <bool WAIT> static bool sums_right(void) {
    enum { BLOCKS = 7, COUNT = 300 };
    float *in = device<float>(BLOCKS * 2 * COUNT), *sums = device<float>(2 * COUNT);
    int *added = device<int>(2);
    bool right = true;
    for (int i = 0; i < BLOCKS * 2 * COUNT; i++) in[i] = (float)draw_unit();
    added[0] = added[1] = 0;
    RUN(add_kernel<WAIT>, BLOCKS, 64, COUNT * 4, NULL, sums, added, in, COUNT);
    for (int i = 0; i < 2 * COUNT; i++) {
        float sum = 0;
        for (int block = BLOCKS - 1; block >= 0; block--) sum += in[(block * 2 + i / COUNT) * COUNT + i % COUNT];
        right &= sums[i] == sum;
    }
    return right && added[0] == BLOCKS && added[1] == BLOCKS;
}
TEST(bulk_add_in_order) { for (int round = 0; round < 5; round++) CHECK(sums_right<true>()); }

__global__ void stmatrix_kernel(uint32_t *out, const uint32_t *in, const int *places, int units) {
    DYNAMIC_SHARED(memory);
    const uint32_t *r = in + threadIdx.x * 4;
    for (int i = threadIdx.x; i < units * 4; i += 32) ((uint32_t *)memory)[i] = 0;
    __syncwarp();
    stmatrix_x4(memory + 16 * places[threadIdx.x], r[0], r[1], r[2], r[3]);
    __syncwarp();
    for (int i = threadIdx.x; i < units * 4; i += 32) out[i] = ((const uint32_t *)memory)[i];
}
TEST(stmatrix) {
    enum { UNITS = 50 };
    bf16 *in = drawn(32 * 8);
    uint32_t *out = device<uint32_t>(UNITS * 4), expected[UNITS * 4] = {};
    int *places = device<int>(32);
    for (int i = 0; i < 32; i++) places[i] = (i * 7 + 3) % UNITS;
    for (int i = 0; i < 128; i++) {
        const int lane = i / 4, matrix = i % 4;
        memcpy(&expected[places[8 * matrix + lane / 4] * 4 + lane % 4], &in[2 * i], 4);
    }
    RUN(stmatrix_kernel, 1, 32, UNITS * 16, NULL, out, (const uint32_t *)in, places, UNITS);
    CHECK(memcmp(out, expected, sizeof expected) == 0);
}

// ----------------------------------------------------------------------------
// Barriers

// A ring of numbers from some threads to others, over many phases: each number is written after the last was read by all.
__global__ void phases_kernel(int *out, int phases) {
    out += blockIdx.x * phases * 64;
    __shared__ Barrier full, empty;
    __shared__ int numbers[32];
    start_barrier(&full, 32);
    start_barrier(&empty, 64);
    for (int phase = 0; phase < phases; phase++) {
        if (threadIdx.x < 32) {
            barrier_wait(&empty, phase % 2 ^ 1);  // the first time at once
            numbers[threadIdx.x] = phase * 100 + threadIdx.x;
            if (phase % 8 == 0) __nanosleep(100);  // so that blocks take turns on the CPU
            barrier_arrive(&full);
        } else {
            barrier_wait(&full, phase % 2);
            out[phase * 64 + threadIdx.x - 32] = numbers[(threadIdx.x + phase) % 32];
            barrier_arrive(&empty);
        }
    }
}
TEST(barrier_phases) {
    enum { PHASES = 101, BLOCKS = 9 };
    int *out = device<int>(BLOCKS * PHASES * 64);
    RUN(phases_kernel, BLOCKS, 96, 0, NULL, out, PHASES);
    for (int i = 0; i < BLOCKS * PHASES * 64; i++) {
        const int phase = i / 64 % PHASES;
        CHECK(out[i] == phase * 100 + (i % 64 + phase) % 32, "block %d, phase %d", i / 64 / PHASES, phase);
    }
}

// Two warpgroups take turns, which named barriers 1 and 2 give them.
__global__ void turns_kernel(int *out, int turns) {
    __shared__ int number;
    const int group = threadIdx.x / 128;
    if (threadIdx.x == 0) number = 0;
    __syncthreads();
    if (group == 1) named_barrier_arrive(1, 256);
    for (int turn = 0; turn < turns; turn++) {
        named_barrier_sync(1 + group, 256);
        if (threadIdx.x % 128 == 77) out[2 * turn + group] = number++;
        if (turn < turns - 1 || group == 0) named_barrier_arrive(2 - group, 256);
    }
}
TEST(named_barriers) {
    int *out = device<int>(100);
    RUN(turns_kernel, 1, 256, 0, NULL, out, 50);
    for (int i = 0; i < 100; i++) CHECK(out[i] == i, "turn %d: %d", i, out[i]);
}

// ----------------------------------------------------------------------------
// All of it: a warpgroup of which one thread copies, and two that multiply. D (128, 64) = Q (K_0 + K_1 + ...)ᵀ, the tiles
// of K coming by two stages.

enum Fault { NO_FAULT, NO_INIT, NO_FULL_WAIT, NO_EMPTY_WAIT, EARLY_RELEASE, TOO_FEW_BYTES, TOO_MANY_BYTES, TOO_MANY_ARRIVALS,
             WRONG_PARITY, NO_COMMIT, NO_WGMMA_WAIT, LATE_WGMMA_WAIT, NO_WGMMA_FENCE, TOUCHED, ONE_WARP_LESS, NO_STORE_WAIT };
enum { STAGES = 2, TILE_BYTES = 64 * 128, PIPELINE_BYTES = (2 + STAGES) * TILE_BYTES };

template <Fault FAULT>
__global__ void __launch_bounds__(384, 1)
    pipeline_kernel(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap out,
                    int tiles) {
    DYNAMIC_SHARED(memory);
    unsigned char *q_tile = memory, *stages = memory + 2 * TILE_BYTES;
    __shared__ Barrier q_full, full[STAGES], empty[STAGES];
    for (int i = 0; i < STAGES; i++) {
        if (FAULT != NO_INIT) start_barrier(&full[i], 1);
        start_barrier(&empty[i], 2);
    }
    start_barrier(&q_full, 1);
    if (threadIdx.x >= 256) {
        registers_decrease<24>();
        if (threadIdx.x > 256) return;
        barrier_expect(&q_full, 2 * TILE_BYTES);
        for (int i = 0; i < 2; i++) tensor_load(q_tile + i * TILE_BYTES, &q, &q_full, 0, 64 * i, 0, 0);
        for (int tile = 0; tile < tiles; tile++) {
            const int stage = tile % STAGES, parity = tile / STAGES % 2;
            if (FAULT != NO_EMPTY_WAIT) barrier_wait(&empty[stage], FAULT == WRONG_PARITY ? parity : parity ^ 1);
            barrier_expect(&full[stage], TILE_BYTES + (FAULT == TOO_FEW_BYTES ? -128 : FAULT == TOO_MANY_BYTES ? 128 : 0));
            tensor_load(stages + stage * TILE_BYTES, &k, &full[stage], 0, 64 * tile, 0, 0);
        }
    } else {
        registers_increase<240>();
        const int group = threadIdx.x / 128;
        float d[32] = {0};
        barrier_wait(&q_full, 0);
        for (int tile = 0; tile < tiles; tile++) {
            const int stage = tile % STAGES, parity = tile / STAGES % 2;
            if (FAULT != NO_FULL_WAIT) barrier_wait(&full[stage], parity);
            registers_settled(d);
            if (FAULT != NO_WGMMA_FENCE) wgmma_fence();
            if (FAULT != ONE_WARP_LESS || threadIdx.x >= 32 || tile > 0) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    wgmma<false, false>(d, by_rows((const bf16 *)q_tile + group * 64 * 64, i, 64),
                                        by_rows((const bf16 *)stages + stage * 64 * 64, i, 64), true);
            }
            if (FAULT != NO_COMMIT) wgmma_commit();
            if (FAULT == TOUCHED) d[7] = 0;
            if (FAULT == EARLY_RELEASE && threadIdx.x % 128 == 0) barrier_arrive(&empty[stage]);
            if (FAULT != NO_WGMMA_WAIT && FAULT != LATE_WGMMA_WAIT) wgmma_wait<0>();
            registers_settled(d);
            if (FAULT != EARLY_RELEASE && threadIdx.x % 128 == 0) barrier_arrive(&empty[stage]);
            if (FAULT == TOO_MANY_ARRIVALS && threadIdx.x == 33) barrier_arrive(&empty[stage]), barrier_arrive(&empty[stage]);
        }
        // Out through Q's place, as two columns that lie together are one register.
        for (int i = 0; i < 32; i += 2) {
            const uint32_t pair = pack_bf16(d[i], d[i + 1]);
            memcpy(q_tile + group * TILE_BYTES + 2 * place(element(i, 64) / 64, element(i, 64) % 64, 64), &pair, 4);
        }
        if (FAULT == LATE_WGMMA_WAIT) wgmma_wait<0>();
        fence_async();
        named_barrier_sync(1 + group, 128);
        if (threadIdx.x % 128 == 0) {
            tensor_store(&out, q_tile + group * TILE_BYTES, 0, 64 * group, 0, 0);
            store_commit();
            if (FAULT != NO_STORE_WAIT) store_wait_read<0>();
        }
    }
}

template <Fault FAULT> static bool pipeline_right(void) {
    enum { TILES = 9 };
    bf16 *q = drawn(128 * 64), *k = drawn(TILES * 64 * 64), *out = device<bf16>(128 * 64);
    auto kernel = pipeline_kernel<FAULT>;
    const TensorMap q_map = map_of(q, 1, 128, 1, 64, 64), k_map = map_of(k, 1, TILES * 64, 1, 64, 64);
    RUN(kernel, 1, 384, PIPELINE_BYTES, NULL, q_map, k_map, map_of(out, 1, 128, 1, 64, 64), TILES);
    for (int i = 0; i < 128 * 64; i++) {
        float sum = 0;
        for (int j = 0; j < TILES * 64; j++)
            sum += number(q[i / 64 * 64 + j % 64]) * number(k[(j / 64 * 64 + i % 64) * 64 + j % 64]);
        if (number(out[i]) != rounded(sum)) return false;
    }
    return true;
}

TEST(pipeline) {
    for (int round = 0; round < 5; round++) CHECK(pipeline_right<NO_FAULT>());
}

#ifndef __CUDACC__
// ----------------------------------------------------------------------------
// Planted faults

// In a child, as some of these faults also end in a deadlock: how many of ten orders of the threads show it in any way.
template <Fault FAULT> static int found(void) {
    return wrong_orders([] { return exit_of([] { _exit(!pipeline_right<FAULT>()); }) == 0; });
}

TEST(pipeline_orders) { CHECK(found<NO_FAULT>() == 0); }
TEST(planted_missing_full_wait) { CHECK(found<NO_FULL_WAIT>() > 3); }
TEST(planted_missing_empty_wait) { CHECK(found<NO_EMPTY_WAIT>() > 5); }
TEST(planted_early_release) { CHECK(found<EARLY_RELEASE>() > 3); }
TEST(planted_late_wgmma_wait) { CHECK(found<LATE_WGMMA_WAIT>() == 10); }
TEST(planted_bytes) {
    CHECK_ENDS("128 bytes more than expected came to the barrier", pipeline_right<TOO_FEW_BYTES>());
    CHECK_ENDS("misses 0 of 1 arrivals and 128 bytes", pipeline_right<TOO_MANY_BYTES>());
    CHECK_SAID("deadlock in kernel, block (0, 0, 0)");
    CHECK_SAID("wait in barrier_wait");
}
TEST(planted_arrivals) {
    CHECK_ENDS("parity 0, misses 2 of 2 arrivals and 0 bytes", pipeline_right<WRONG_PARITY>());
    CHECK(found<TOO_MANY_ARRIVALS>() == 10);
    CHECK_ENDS("has not been initialized", pipeline_right<NO_INIT>());
}
TEST(planted_products) {
    CHECK(found<NO_WGMMA_WAIT>() == 10 && found<NO_COMMIT>() == 10);
    CHECK_ENDS("no wgmma_fence", pipeline_right<NO_WGMMA_FENCE>());
    CHECK_ENDS("accumulators were written to before wgmma_wait", pipeline_right<TOUCHED>());
    CHECK(found<ONE_WARP_LESS>() == 10);
}
TEST(planted_store_wait) { CHECK_ENDS("ends without a wait for its stores", pipeline_right<NO_STORE_WAIT>()); }
TEST(planted_order) { CHECK(wrong_orders(sums_right<true>) == 0 && wrong_orders(sums_right<false>) > 5); }
TEST(planted_descriptors) {  // K 64: each reads other rows, or past the end
    CHECK((product_right<128, 64, BY_ROWS, true>(false, 1024, 64 * 128)));
    CHECK(exit_of([] { _exit(!product_right<128, 64, BY_ROWS, true>(false, 1024, 32 * 128)); }) != 0);
    CHECK(exit_of([] { _exit(!product_right<64, 64, REGISTERS, true>(false, 2048, 64 * 128)); }) != 0);
    CHECK(exit_of([] { _exit(!product_right<64, 64, TRANSPOSED, false>(false, 512, 64 * 128)); }) != 0);
    CHECK_ENDS("wgmma reads beyond shared memory", product_right<128, 64, BY_ROWS, true>(false, 1024, 128 << 10));
}

template <typename Body> __global__ void body_kernel(Body body) { body(); }
template <typename Body> static void run(unsigned threads, Body body) { LAUNCH(body_kernel<Body>, 1, threads, 4096, NULL, body); }

// Each warp writes a part of what all of them multiply.
template <bool SYNC> __global__ void parts_kernel(float *out) {
    DYNAMIC_SHARED(memory);
    for (int i = threadIdx.x; i < 2 * 64 * 64; i += 128) ((bf16 *)memory)[i % 64 * 128 + i / 64] = bf16(1.0f);
    fence_async();
    if (SYNC) __syncthreads();
    float d[32];
    wgmma_fence();
    wgmma<false, false>(d, by_rows((bf16 *)memory, 0, 64), by_rows((bf16 *)memory + 64 * 64, 0, 64), false);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < 32; i++) out[element(i, 64)] = d[i];
}
template <bool SYNC> static bool parts_right(void) {
    float *out = device<float>(64 * 64);
    LAUNCH(parts_kernel<SYNC>, 1, 128, 2 * 64 * 128, NULL, out);
    return all_right(64 * 64, [=](int i) { return out[i] == 16; });
}
TEST(planted_missing_barrier_before_wgmma) {
    CHECK(wrong_orders(parts_right<true>) == 0);
    CHECK(wrong_orders(parts_right<false>) > 0);
}

TEST(planted_misuse) {
    TensorMap map = map_of(drawn(1024), 1, 16, 1, 64, 8);
    CHECK_ENDS("whose warpgroup has not four warps", run(96, [] {
        float d[32];
        wgmma_fence();
        wgmma<false, false>(d, 0, 0, false);
    }));
    CHECK_ENDS("has to be a multiple of 1024", run(1, [=] {
        DYNAMIC_SHARED(memory);
        tensor_store(&map, memory + 512, 0, 0, 0, 0);
    }));
    CHECK_ENDS("to row -8: GPUs do not take rows below 0", run(1, [=] {
        DYNAMIC_SHARED(memory);
        tensor_store(&map, memory, 0, -8, 0, 0);
    }));
    CHECK_ENDS("a copy is under way to dynamic shared memory + 1024", for (;;) run(1, [=] {
        DYNAMIC_SHARED(memory);
        barrier_init((Barrier *)memory, 1);
        tensor_load(memory + 1024, &map, (Barrier *)memory, 0, 0, 0, 0);
    }));
    CHECK_ENDS("descriptor 0x", run(128, [] {
        DYNAMIC_SHARED(memory);
        float d[32];
        wgmma_fence();
        wgmma<false, false>(d, matrix_descriptor(memory + 128, 0, 1024), 0, false);
        wgmma_commit();
        wgmma_wait<0>();
    }));
    CHECK_ENDS("without a wait for its products", run(128, [] {
        DYNAMIC_SHARED(memory);
        float d[32];
        wgmma_fence();
        wgmma<false, false>(d, matrix_descriptor(memory, 0, 0), matrix_descriptor(memory, 0, 0), false);
        wgmma_wait<0>();  // but it was not committed
    }));
    CHECK_ENDS("lanes 0 and 7 differ", run(128, [] {
        float d[32];
        wgmma_fence();
        wgmma<false, false>(d, 0, threadIdx.x % 32 == 7, false);
    }));
    CHECK_ENDS("the warps of warpgroup 0 differ", run(128, [] {
        DYNAMIC_SHARED(memory);
        float d[32];
        wgmma_fence();
        wgmma<false, false>(d, matrix_descriptor(memory, 0, 0), matrix_descriptor(memory, 0, 0) + threadIdx.x / 64, false);
        wgmma_commit();
        wgmma_wait<0>();
    }));
    CHECK_ENDS("wait in registers_increase", run(384, [] {  // 168 registers a thread at first
        if (threadIdx.x < 256) registers_increase<240>();
        else registers_decrease<32>();
    }));
    CHECK_ENDS("96 of 128 threads have come to named barrier 3", run(128, [] {
        if (threadIdx.x >= 32) named_barrier_sync(3, 128);
    }));
    CHECK_ENDS("threads, but others came to it for", run(96, [] { named_barrier_sync(3, threadIdx.x < 32 ? 96 : 128); }));
}
#endif

int main(int argc, char **argv) {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    if (properties.major != 9) {
        printf("skip - Hopper's instructions: the GPU is of compute capability %d.%d\n", properties.major, properties.minor);
        return 0;
    }
#ifdef __CUDACC__
    alarm(300);  // a kernel that waits for ever ends, too
#endif
    return run_tests(argc > 1 ? argv[1] : NULL, free_all, free_all) != 0;
}

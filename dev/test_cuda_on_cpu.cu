// Tests of dev/cuda_on_cpu.h: each function against plain C, and each kind of fault, planted, must be found.
//
//   g++ -x c++ -std=c++17 -O2 -Wall -Wextra -I. dev/test_cuda_on_cpu.cu -o build/test_cuda_on_cpu -pthread
//   build/test_cuda_on_cpu              all tests              build/test_cuda_on_cpu planted    those with "planted" in the name
//
// With -fsanitize=address,undefined the memory faults are tested, too, which else are skipped. -DCUDA_ON_CPU_UCONTEXT takes
// the slow switch of fibers, CUDA_ON_CPU_SEED another order of threads.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>

#include "dev/planted.h"

#ifdef __SANITIZE_ADDRESS__
#define WITH_ASAN true
#else
#define WITH_ASAN __has_feature(address_sanitizer)
#endif
#ifdef __clang__
#define WITH_UBSAN __has_feature(undefined_behavior_sanitizer)
#else  // gcc 12 has no macro for it, but its library is there
#define WITH_UBSAN (dlsym(RTLD_DEFAULT, "__ubsan_handle_out_of_bounds") != NULL)
#endif

// ----------------------------------------------------------------------------
// Helpers

static std::vector<void *> allocations;  // of the test that runs

template <typename T> static T *device(size_t count) {
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(T)));
    allocations.push_back(memory);
    return memory;
}

static void free_all(const char *) {
    for (void *memory : allocations) CUDA_CHECK(cudaFree(memory));
    allocations.clear();
}

static unsigned draw_below(unsigned end) { return (unsigned)(draw() % end); }
static int draw_small(void) { return (int)draw_below(17) - 8; }  // sums of products of such are exact in fp32
static float draw_float(void) { return (float)(draw_unit() * 2 - 1); }

template <typename T> static T *drawn(size_t count) {  // any bits
    T *memory = device<T>(count);
    for (size_t i = 0; i < count * sizeof(T); i++) ((unsigned char *)memory)[i] = (unsigned char)draw();
    return memory;
}

// A kernel whose body is a lambda, where the test needs no more of a kernel.
template <typename Body> __global__ void body_kernel(Body body) { body(); }
template <typename Body> static void run(dim3 grid, dim3 block, size_t shared_bytes, Body body) {
    LAUNCH(body_kernel<Body>, grid, block, shared_bytes, NULL, body);
}

// ----------------------------------------------------------------------------
// Launches and indices

__global__ void indices_kernel(uint3 *threads, uint3 *blocks, dim3 *sizes, int *visits) {
    size_t block = ((size_t)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    size_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    size_t i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    threads[i] = threadIdx;
    blocks[i] = blockIdx;
    sizes[2 * i] = blockDim;
    sizes[2 * i + 1] = gridDim;
    visits[i]++;
}

TEST(indices) {
    dim3 grid(1 + draw_below(5), 1 + draw_below(4), 1 + draw_below(3));
    dim3 block(1 + draw_below(9), 1 + draw_below(8), 1 + draw_below(7));
    size_t threads = block.x * block.y * block.z, all = threads * grid.x * grid.y * grid.z;
    uint3 *thread_index = device<uint3>(all), *block_index = device<uint3>(all);
    dim3 *sizes = device<dim3>(2 * all);
    int *visits = device<int>(all);
    CUDA_CHECK(cudaMemset(visits, 0, all * sizeof *visits));
    LAUNCH(indices_kernel, grid, block, 0, NULL, thread_index, block_index, sizes, visits);
    for (size_t i = 0; i < all; i++) {
        uint3 t = thread_index[i], b = block_index[i];
        CHECK(visits[i] == 1);
        CHECK((t.z * block.y + t.y) * block.x + t.x == i % threads && t.x < block.x && t.y < block.y);
        CHECK((b.z * grid.y + b.y) * grid.x + b.x == i / threads && b.x < grid.x && b.y < grid.y);
        CHECK(memcmp(&sizes[2 * i], &block, sizeof block) == 0 && memcmp(&sizes[2 * i + 1], &grid, sizeof grid) == 0);
    }
}

struct Three { int x[3]; };

template <int ADD> __global__ void arguments_kernel(int *out, Three three, const float scale, size_t count) {
    three.x[1] += (int)threadIdx.x;  // each thread's own
    if (threadIdx.x < count) out[threadIdx.x] = three.x[0] + three.x[1] + three.x[2] + (int)scale + ADD;
}

TEST(arguments_are_copies) {
    int *out = device<int>(64);
    Three three = {{1, 10, 100}};
    auto kernel = arguments_kernel<5000>;
    LAUNCH(kernel, 1, 64, 0, NULL, out, three, 1000, 64);
    for (int i = 0; i < 64; i++) CHECK(out[i] == 6111 + i);
}

__global__ void order_kernel(int *tickets, int *ticket) { tickets[blockIdx.x * blockDim.x + threadIdx.x] = (*ticket)++; }

TEST(order_is_random) {
    int *first = device<int>(256), *second = device<int>(256), *blocks = device<int>(256), *ticket = device<int>(1);
    int same = 0, ascending = 0, blocks_ascending = 0, found[256] = {};
    unsigned workers = cuda_on_cpu::worker_count;
    cuda_on_cpu::worker_count = 1;
    for (int *out : {first, second, blocks}) {
        *ticket = 0;
        LAUNCH(order_kernel, out == blocks ? 256 : 4, out == blocks ? 1 : 64, 0, NULL, out, ticket);
    }
    cuda_on_cpu::worker_count = workers;
    for (int i = 0; i < 256; i++) {
        CHECK(blocks[i] / 16 == i / 16, "blocks change places with near ones only");
        blocks_ascending += blocks[i] == i;
        same += first[i] == second[i];
        ascending += first[i] == i;
        CHECK(found[first[i]]++ == 0, "each thread has run once");
    }
    CHECK(blocks_ascending < 64);
    CHECK(same < 64 && ascending < 64, "%d and %d of 256 tickets are in the same and in ascending order", same, ascending);
}

// Each warp is the last about as often as the others, and so is each thread of it: a bias could hide a fault under every seed.
TEST(order_is_fair) {
    enum { THREADS = 100, LAUNCHES = 4000 };
    int *tickets = device<int>(THREADS), *ticket = device<int>(1), last[THREADS] = {};
    for (int launch = 0; launch < LAUNCHES; launch++) {
        *ticket = 0;
        LAUNCH(order_kernel, 1, THREADS, 0, NULL, tickets, ticket);
        for (int i = 0; i < THREADS; i++) last[i] += tickets[i] == THREADS - 1;
    }
    for (int warp = 0; warp < 4; warp++) {
        int size = warp < 3 ? 32 : 4, *of_warp = last + 32 * warp;
        int sum = std::accumulate(of_warp, of_warp + size, 0), most = *std::max_element(of_warp, of_warp + size);
        CHECK(sum > LAUNCHES / 8, "a thread of warp %d was the last in %d of %d launches", warp, sum, LAUNCHES);
        CHECK(most < 3 * sum / size, "one of warp %d's %d threads was the last %d of %d times", warp, size, most, sum);
    }
}

__global__ void no_arguments_kernel(void) {}

TEST(launch_errors) {
    cudaGetLastError();
    struct { dim3 grid, block; size_t shared; cudaError_t error; } cases[] = {
        {1, 1, 0, cudaSuccess},
        {1, 1024, 48 << 10, cudaSuccess},
        {dim3(1, 1, 1), dim3(4, 4, 64), 0, cudaSuccess},
        {1, 1025, 0, cudaErrorInvalidConfiguration},
        {1, dim3(32, 32, 2), 0, cudaErrorInvalidConfiguration},
        {1, dim3(1, 1, 65), 0, cudaErrorInvalidConfiguration},
        {1, 0, 0, cudaErrorInvalidConfiguration},
        {0, 32, 0, cudaErrorInvalidConfiguration},
        {dim3(1, 0), 32, 0, cudaErrorInvalidConfiguration},
        {dim3(1, 65536), 32, 0, cudaErrorInvalidConfiguration},
        {dim3(1, 1, 65536), 32, 0, cudaErrorInvalidConfiguration},
        {1, 32, (48 << 10) + 1, cudaErrorInvalidValue},
    };
    for (auto &c : cases) {
        LAUNCH_KERNEL(no_arguments_kernel, c.grid, c.block, c.shared, NULL);
        CHECK(cudaGetLastError() == c.error, "case %d", (int)(&c - cases));
        CHECK(cudaGetLastError() == cudaSuccess, "reading the error clears it");
    }
}

__global__ void dynamic_shared_kernel(int *faults, size_t bytes) {
    DYNAMIC_SHARED(memory);
    if ((uintptr_t)memory % 1024) atomicAdd(faults, 1);
    for (size_t i = threadIdx.x; i < bytes; i += blockDim.x) {
        if (memory[i] != 0xFF) atomicAdd(faults, 1);
        memory[i] = 0;
    }
}
__global__ void other_dynamic_shared_kernel(void) {}

TEST(shared_memory_limits) {
    int *faults = device<int>(1);
    *faults = 0;
    size_t most = 227 << 10, sizes[] = {1, 1000, 48 << 10, (48 << 10) + 1, most - draw_below(1000), most};
    unsetenv("CUDA_ON_CPU_SHARED_KB");
    for (size_t bytes : sizes) LAUNCH(dynamic_shared_kernel, 5, 64, bytes, NULL, faults, bytes);
    CHECK(*faults == 0);
    cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CHECK(cudaFuncSetAttribute(dynamic_shared_kernel, limit, (int)most + 1) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    LAUNCH_KERNEL(other_dynamic_shared_kernel, 1, 1, most, NULL);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue, "one kernel's limit is not another's");

    setenv("CUDA_ON_CPU_SHARED_KB", "99", 1);
    LAUNCH_KERNEL(dynamic_shared_kernel, 1, 64, (99 << 10) + 1, NULL, faults, 1);
    cudaError_t too_large = cudaGetLastError();
    LAUNCH_KERNEL(dynamic_shared_kernel, 1, 64, 99 << 10, NULL, faults, 99 << 10);
    cudaError_t fits = cudaGetLastError();
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    unsetenv("CUDA_ON_CPU_SHARED_KB");
    CHECK(too_large == cudaErrorInvalidValue && fits == cudaSuccess && properties.sharedMemPerBlockOptin == 99 << 10);
}

// ----------------------------------------------------------------------------
// Shuffles and votes

enum { SHUFFLE_CALLS = 4 };

template <typename T>
__global__ void shuffle_kernel(T *out, const T *in, const int *source, unsigned delta, int width, unsigned mask) {
    unsigned lane = threadIdx.x % 32, i = threadIdx.x;
    if (!(mask >> lane & 1)) return;
    T value = in[i];
    out[SHUFFLE_CALLS * i] = __shfl_sync(mask, value, source[i], width);
    out[SHUFFLE_CALLS * i + 1] = __shfl_up_sync(mask, value, delta, width);
    out[SHUFFLE_CALLS * i + 2] = __shfl_down_sync(mask, value, delta, width);
    out[SHUFFLE_CALLS * i + 3] = __shfl_xor_sync(mask, value, (int)delta, width);
}

template <typename T> static void test_shuffles(void) {
    for (int round = 0; round < 40; round++) {
        int width = 1 << draw_below(6), threads = 32 * (1 + (int)draw_below(3));
        unsigned delta = draw_below(32), mask = round % 2 ? 0xFFFFFFFF : (unsigned)draw() | 1;
        T *in = drawn<T>(threads), *out = device<T>(SHUFFLE_CALLS * threads);
        int *source = device<int>(threads);
        for (int i = 0; i < threads; i++) source[i] = (int)draw_below(64);
        LAUNCH(shuffle_kernel<T>, 1, threads, 0, NULL, out, in, source, delta, width, mask);
        for (int i = 0; i < threads; i++) {
            int lane = i % 32, first = lane / width * width, last = first + width - 1;
            if (!(mask >> lane & 1)) continue;
            int from[SHUFFLE_CALLS] = {first + source[i] % width, lane - (int)delta, lane + (int)delta, lane ^ (int)delta};
            if (from[1] < first) from[1] = lane;
            if (from[2] > last) from[2] = lane;
            if (from[3] > last) from[3] = lane;  // an earlier segment may be read, a later one not
            for (int call = 0; call < SHUFFLE_CALLS; call++) {
                T expected;
                memset(&expected, 0xFF, sizeof expected);  // from a lane outside of the mask
                if (mask >> from[call] & 1) expected = in[i - lane + from[call]];
                CHECK(memcmp(&out[SHUFFLE_CALLS * i + call], &expected, sizeof expected) == 0,
                      "call %d, thread %d, delta %u, width %d, mask %08x", call, i, delta, width, mask);
            }
        }
    }
}

TEST(shuffle_int) { test_shuffles<int>(); }
TEST(shuffle_float) { test_shuffles<float>(); }
TEST(shuffle_double) { test_shuffles<double>(); }
TEST(shuffle_pair) { test_shuffles<float2>(); }
TEST(shuffle_bf16_pair) { test_shuffles<__nv_bfloat162>(); }

TEST(votes) {
    enum { ROUNDS = 64 };
    unsigned *votes = drawn<unsigned>(ROUNDS), *masks = drawn<unsigned>(ROUNDS), *ballot = device<unsigned>(32 * ROUNDS);
    int *any = device<int>(32 * ROUNDS), *all = device<int>(32 * ROUNDS);
    for (int r = 0; r < ROUNDS; r++) {
        if (r % 4 == 0) masks[r] = 0xFFFFFFFF;
        if (r % 8 < 2) votes[r] |= masks[r];
        if (r % 8 > 5) votes[r] &= ~masks[r];
    }
    run(1, 32, 0, [=] {
        for (int r = 0; r < ROUNDS; r++) {
            int vote = votes[r] >> threadIdx.x & 1 ? 1 << threadIdx.x % 31 : 0;  // any value but 0 is a yes
            if (!(masks[r] >> threadIdx.x & 1)) continue;
            any[32 * r + threadIdx.x] = __any_sync(masks[r], vote);
            all[32 * r + threadIdx.x] = __all_sync(masks[r], vote);
            ballot[32 * r + threadIdx.x] = __ballot_sync(masks[r], vote);
        }
    });
    for (int i = 0; i < 32 * ROUNDS; i++) {
        unsigned mask = masks[i / 32], expected = votes[i / 32] & mask;
        if (mask >> i % 32 & 1) CHECK(ballot[i] == expected && !any[i] == !expected && !all[i] == (expected != mask));
    }
}

// Lanes that have ended, or never were, are not waited for; both halves of a warp may go separate ways.
TEST(parts_of_warps) {
    for (int ended = 0; ended < 32; ended++) {
        int *out = device<int>(72);
        run(1, 72, 0, [=] {
            unsigned lane = threadIdx.x % 32;
            if ((int)threadIdx.x < ended) return;
            unsigned alive = __ballot_sync(0xFFFFFFFF, 1), half = lane < 16 ? 0x0000FFFF : 0xFFFF0000;
            int sum = 1;
            for (unsigned i = 0; i < 5 + lane / 16 * 7; i++) sum += __popc(__ballot_sync(half, lane % 2));
            __syncwarp();
            out[threadIdx.x] = __popc(alive) * 1000 + sum;
        });
        for (int i = 0; i < 72; i++) {
            int alive = i < 32 ? 32 - ended : i < 64 ? 32 : 8, first = i / 16 * 16, odd = 0;
            for (int j = first; j < first + 16; j++) odd += j % 2 == 1 && j >= ended && j < 72;
            CHECK(out[i] == (i < ended ? -1 : alive * 1000 + 1 + odd * (i % 32 < 16 ? 5 : 12)), "thread %d: %d", i, out[i]);
        }
    }
}

// Values go round in each half of a warp, in one more often than in the other: no lane may see another's next value.
static bool halves_right(void) {
    int *out = device<int>(32);
    run(1, 32, 0, [=] {
        unsigned lane = threadIdx.x, first = lane & 16, value = lane;
        for (unsigned i = 0; i < 20 + first; i++) value = __shfl_sync(0xFFFFu << first, 3 * value + i, first + (lane + 1) % 16);
        out[lane] = (int)value;
    });
    return all_right(32, [=](int lane) {
        int first = lane & 16, turns = 20 + first;
        unsigned value = first + (lane + turns) % 16;
        for (int i = 0; i < turns; i++) value = 3 * value + i;
        return out[lane] == (int)value;
    });
}

TEST(halves_of_a_warp) { CHECK(wrong_orders(halves_right) == 0); }

// ----------------------------------------------------------------------------
// Barriers and shared memory

template <typename T, int N, bool BARRIER> __device__ T block_sum(T value) {
    __shared__ T parts[N];
    parts[threadIdx.x] = value;
    for (unsigned half = N / 2; half > 0; half /= 2) {
        if (BARRIER) __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    __syncthreads();
    return parts[0];
}

template <int N, bool BARRIER> __global__ void block_sum_kernel(int *out, const int *in) {
    int sum = block_sum<int, N, BARRIER>(in[blockIdx.x * N + threadIdx.x]);
    if (threadIdx.x == N - 1) out[blockIdx.x] = sum;
}

template <int N, bool BARRIER> static bool sums_right(void) {
    enum { BLOCKS = 20 };
    int *in = device<int>(BLOCKS * N), *out = device<int>(BLOCKS);
    for (int i = 0; i < BLOCKS * N; i++) in[i] = (int)draw_below(1000000);
    LAUNCH((block_sum_kernel<N, BARRIER>), BLOCKS, N, 0, NULL, out, in);
    return all_right(BLOCKS, [=](int b) { return out[b] == std::accumulate(in + b * N, in + (b + 1) * N, 0); });
}

TEST(barrier) {
    CHECK((wrong_orders(sums_right<32, true>) == 0));
    CHECK((wrong_orders(sums_right<128, true>) == 0));
    CHECK((wrong_orders(sums_right<1024, true>) == 0));
}
TEST(planted_missing_barrier) { CHECK((wrong_orders(sums_right<128, false>) > 0)); }

// Values go round; without the second barrier a thread that is ahead overwrites what others have yet to read.
template <bool SECOND> static bool rotates(void) {
    int *out = device<int>(96), turns = 20;
    run(1, 96, 0, [=] {
        __shared__ int ring[96];
        int value = threadIdx.x;
        for (int i = 0; i < turns; i++) {
            ring[threadIdx.x] = value;
            __syncthreads();
            value = ring[(threadIdx.x + 1) % 96];
            if (SECOND) __syncthreads();
        }
        out[threadIdx.x] = value;
    });
    return all_right(96, [=](int i) { return out[i] == (i + turns) % 96; });
}

TEST(barrier_before_overwriting) { CHECK(wrong_orders(rotates<true>) == 0); }
TEST(planted_missing_barrier_before_overwriting) { CHECK(wrong_orders(rotates<false>) > 0); }

template <bool SYNC> static bool warp_exchanges(void) {
    int *out = device<int>(64);
    run(1, 64, 0, [=] {
        __shared__ int values[64];
        values[threadIdx.x] = threadIdx.x * 3;
        if (SYNC) __syncwarp();
        out[threadIdx.x] = values[threadIdx.x ^ 5];
    });
    return all_right(64, [=](int i) { return out[i] == (i ^ 5) * 3; });
}

TEST(syncwarp) { CHECK(wrong_orders(warp_exchanges<true>) == 0); }
TEST(planted_missing_syncwarp) { CHECK(wrong_orders(warp_exchanges<false>) > 0); }

TEST(barrier_votes) {
    enum { ROUNDS = 30, THREADS = 100, ALL = ROUNDS * THREADS };
    int *votes = device<int>(ALL), *any = device<int>(ALL), *all = device<int>(ALL), *count = device<int>(ALL);
    for (int i = 0; i < ALL; i++) {
        int r = i / THREADS;
        votes[i] = r % 3 == 0 ? (int)draw() | 1 : r % 3 == 1 ? 0 : (int)draw_below(2) << 8;
    }
    for (int launch = 0; launch < 50; launch++) {
        run(1, THREADS, 0, [=] {
            if (threadIdx.x % 7 == 6) return;  // threads that have ended are not waited for
            for (int i = threadIdx.x; i < ALL; i += THREADS) {
                any[i] = __syncthreads_or(votes[i]);
                all[i] = __syncthreads_and(votes[i]);
                count[i] = __syncthreads_count(votes[i]);
            }
        });
    }
    for (int i = 0; i < ALL; i++) {
        int first = i / THREADS * THREADS, yes = 0, voters = 0;
        for (int j = 0; j < THREADS; j++)
            if (j % 7 != 6) voters++, yes += votes[first + j] != 0;
        if (i % THREADS % 7 != 6) CHECK(count[i] == yes && !any[i] == (yes == 0) && !all[i] == (yes != voters));
    }
}

// Static shared memory is NaN at the start of each block, also where it is declared in a template or a function,
// and each block has its own, though blocks take turns on one worker.
static __device__ unsigned *function_shared(void) {
    __shared__ unsigned memory[8];
    return memory;
}

template <int N> __global__ void static_shared_kernel(int *faults) {
    __shared__ unsigned mine[N];
    __shared__ __align__(16) unsigned char bytes[16];
    unsigned *others = function_shared();
    if (mine[threadIdx.x] != 0xFFFFFFFF || others[threadIdx.x] != 0xFFFFFFFF) atomicAdd(faults, 1);
    if (bytes[threadIdx.x] != 0xFF || bytes[8 + threadIdx.x] != 0xFF || (uintptr_t)bytes % 16) atomicAdd(faults, 1);
    __syncthreads();
    mine[threadIdx.x] = others[threadIdx.x] = blockIdx.x;
    bytes[threadIdx.x] = bytes[8 + threadIdx.x] = 0;
    for (int i = 0; i < 200; i++) __nanosleep(100);
    __syncthreads();
    if (mine[(threadIdx.x + 1) % N] != blockIdx.x || others[(threadIdx.x + 1) % N] != blockIdx.x) atomicAdd(faults, 1000);
}

TEST(static_shared) {
    int *faults = device<int>(1);
    *faults = 0;
    LAUNCH(static_shared_kernel<8>, 50, 8, 0, NULL, faults);
    LAUNCH(static_shared_kernel<8>, 50, 8, 0, NULL, faults);
    CHECK(*faults == 0, "%d", *faults);
}

// ----------------------------------------------------------------------------
// Atomics, and blocks that wait for each other

struct Totals { int sum, least, most; unsigned u, umost, locked; unsigned long long l; float f; double d; };

__global__ void atomics_kernel(Totals *totals, const int *in, int *lock, int *seen, int *slot) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = in[i];
    atomicAdd(&totals->sum, x);
    atomicAdd(&totals->u, (unsigned)x);
    atomicAdd(&totals->l, (unsigned long long)x << 20);
    atomicAdd(&totals->f, (float)(x % 8));
    atomicAdd(&totals->d, (double)x);
    atomicMin(&totals->least, x);
    atomicMax(&totals->most, x);
    atomicMax(&totals->umost, (unsigned)x);
    seen[atomicExch(slot, i)] += 1;  // each value is taken out once
    while (atomicCAS(lock, 0, 1) != 0) __nanosleep(20);
    unsigned locked = totals->locked;  // not atomic: the lock protects it
    __nanosleep(20);
    totals->locked = locked + 1;
    __threadfence();
    atomicExch(lock, 0);
}

TEST(atomics) {
    enum { BLOCKS = 12, THREADS = 96, ALL = BLOCKS * THREADS };
    int *in = device<int>(ALL), *lock = device<int>(1), *seen = device<int>(ALL + 1), *slot = device<int>(1);
    Totals *totals = device<Totals>(1), expected = {};
    cudaMemset(totals, 0, sizeof *totals);
    cudaMemset(seen, 0, (ALL + 1) * sizeof *seen);
    *lock = 0;
    *slot = ALL;
    for (int i = 0; i < ALL; i++) {
        int x = in[i] = (int)draw_below(1 << 20) - (1 << 19);
        expected.sum += x;
        expected.u += (unsigned)x;
        expected.l += (unsigned long long)x << 20;
        expected.f += (float)(x % 8);
        expected.d += x;
        expected.umost = std::max(expected.umost, (unsigned)x);
    }
    LAUNCH(atomics_kernel, BLOCKS, THREADS, 0, NULL, totals, in, lock, seen, slot);
    CHECK(totals->sum == expected.sum && totals->u == expected.u && totals->l == expected.l);
    CHECK(totals->f == expected.f && totals->d == expected.d && totals->umost == expected.umost);
    CHECK(totals->least == *std::min_element(in, in + ALL) && totals->most == *std::max_element(in, in + ALL));
    CHECK(totals->locked == ALL, "%u", totals->locked);
    for (int i = 0; i <= ALL; i++) CHECK(seen[i] + (*slot == i) == 1);
}

// A read and a write that should have been one atomic.
static bool torn_adds_right(void) {
    int *total = device<int>(1);
    *total = 0;
    run(4, 128, 0, [=] { atomicExch(total, atomicAdd(total, 0) + 1); });
    return *total == 4 * 128;
}

TEST(planted_torn_atomic) { CHECK(wrong_orders(torn_adds_right) > 0); }

// Block n waits for block n - 1.
template <bool BY_ATOMIC> __global__ void chain_kernel(volatile int *done, int *order) {
    if (threadIdx.x == 0 && blockIdx.x > 0) {
        if (BY_ATOMIC) while (atomicAdd((int *)&done[blockIdx.x - 1], 0) == 0) {}
        else while (!done[blockIdx.x - 1]) __nanosleep(100);
    }
    __syncthreads();
    if (threadIdx.x == 33) order[blockIdx.x] = blockIdx.x ? order[blockIdx.x - 1] + 1 : 0;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 17) done[blockIdx.x] = 1;
}

TEST(blocks_wait_for_blocks) {
    enum { BLOCKS = 100 };
    int multiprocessors;
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    unsigned given = cuda_on_cpu::worker_count;
    for (unsigned workers = 1; workers <= 3; workers++) {
        cuda_on_cpu::worker_count = workers;
        int *done = device<int>(BLOCKS), *order = device<int>(BLOCKS), *arrived = device<int>(1);
        int *out = device<int>(multiprocessors * 40);
        for (auto kernel : {chain_kernel<true>, chain_kernel<false>}) {
            memset(done, 0, BLOCKS * sizeof *done);
            LAUNCH(kernel, BLOCKS, 64, 0, NULL, done, order);
            CHECK(all_right(BLOCKS, [=](int i) { return order[i] == i; }));
        }
        *arrived = 0;
        run(multiprocessors, 40, 0, [=] {  // all wait until all have come: possible with no more blocks than multiprocessors
            if (threadIdx.x == 0) atomicAdd(arrived, 1);
            while (*(volatile int *)arrived < (int)gridDim.x) __nanosleep(100);
            out[blockIdx.x * blockDim.x + threadIdx.x] = 1;
        });
        CHECK(all_right(multiprocessors * 40, [=](int i) { return out[i] == 1; }));
    }
    cuda_on_cpu::worker_count = given;
}

// Who sleeps longer comes later: threads of all blocks,
static bool sleepers_in_order(void) {
    enum { BLOCKS = 3, THREADS = 64, ALL = BLOCKS * THREADS };
    int *place = device<int>(ALL), *came = device<int>(1);
    *came = 0;
    run(BLOCKS, THREADS, 0, [=] {
        unsigned i = (blockIdx.x * THREADS + threadIdx.x) * 77 % ALL;
        __nanosleep(5000 * (i + 1));
        place[i] = atomicAdd(came, 1);
    });
    return all_right(ALL, [=](int i) { return place[i] == i; });
}

// and one behind others that do not sleep, in its block or in another; as long as they have fewer turns than it sleeps ns.
static bool sleeper_falls_behind(void) {
    int *rounds = device<int>(1), *seen = device<int>(1);
    *rounds = 0;
    run(2, 64, 0, [=] {
        if (blockIdx.x == 0 && threadIdx.x == 5) {
            __nanosleep(200000);
            *seen = atomicAdd(rounds, 0);
        } else if (threadIdx.x >= 32) {
            for (int i = 0; i < 100; i++) atomicAdd(rounds, 1), __syncwarp();
        }
    });
    return *seen == 2 * 32 * 100;
}

TEST(sleep) {
    unsigned given = cuda_on_cpu::worker_count;
    for (unsigned workers = 1; workers <= 3; workers++) {
        cuda_on_cpu::worker_count = workers;
        CHECK(wrong_orders(sleepers_in_order) == 0);
        CHECK(wrong_orders(sleeper_falls_behind) == 0);
        CHECK_ENDS("and the others wait, as all other blocks do", run(3, 64, 0, [] { for (;;) __nanosleep(~0u); }));
        CHECK_SAID("64 wait in __nanosleep");
    }
    cuda_on_cpu::worker_count = given;
}

// ----------------------------------------------------------------------------
// Numbers

// To nearest, ties to even, by arithmetic: double is exact here, and nearbyint rounds so.
static float bf16_by_arithmetic(float x) {
    if (!isfinite(x) || x == 0) return x;
    int exponent = ilogb(x) < -126 ? -126 : ilogb(x);
    double quantum = ldexp(1, exponent - 7), rounded = nearbyint(x / quantum) * quantum;
    return fabs(rounded) >= 0x1p128 ? copysignf(INFINITY, x) : copysignf((float)rounded, x);
}

static void check_rounding(float x) {
    float got = __bfloat162float(__float2bfloat16(x)), expected = bf16_by_arithmetic(x);
    CHECK(isnan(x) ? isnan(got) : got == expected && signbit(got) == signbit(x), "%a gives %a instead of %a", x, got, expected);
}

TEST(bf16_rounding) {
    for (unsigned upper = 0; upper < 65536; upper++) {  // each bf16, with what decides at a tie and beside it, and with any bits
        unsigned lowers[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, draw_below(65536)};
        for (unsigned lower : lowers) check_rounding(__uint_as_float(upper << 16 | lower));
        float exact = __bfloat162float(__ushort_as_bfloat16((unsigned short)upper));
        if (!isnan(exact)) CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(exact)) == upper);
    }
    CHECK(isinf(__bfloat162float(__float2bfloat16(3.4e38f))) && isinf(__bfloat162float(__float2bfloat16(-INFINITY))));
    check_rounding(1.17e-38f);
    check_rounding(1e-45f);
}

TEST(bf16_pairs) {
    for (int i = 0; i < 1000; i++) {
        float low = draw_float() * 100, high = draw_float();
        float low_expected = bf16_by_arithmetic(low), high_expected = bf16_by_arithmetic(high);
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        CHECK((float)pair.x == low_expected && (float)pair.y == high_expected);
        float2 both = __bfloat1622float2(pair), unpacked = unpack_bf16(pack_bf16(low, high));
        CHECK(both.x == low_expected && both.y == high_expected && unpacked.x == both.x && unpacked.y == both.y);
        CHECK((pack_bf16(low, high) & 0xFFFF) == __bfloat16_as_ushort(bf16(low)), "the lower half comes first");
        CHECK((float)(pair.x + pair.y) == bf16_by_arithmetic(low_expected + high_expected));
        CHECK((float)(pair.x - pair.y) == bf16_by_arithmetic(low_expected - high_expected));
        CHECK((float)(pair.x * pair.y) == bf16_by_arithmetic(low_expected * high_expected));
        CHECK((float)(pair.x / pair.y) == bf16_by_arithmetic(low_expected / high_expected));
    }
    CHECK(sizeof(bf16) == 2 && alignof(bf16) == 2 && sizeof(__nv_bfloat162) == 4 && alignof(__nv_bfloat162) == 4);
}

TEST(vector_types) {
    CHECK(sizeof(float4) == 16 && alignof(float4) == 16 && sizeof(int4) == 16 && alignof(int4) == 16 && alignof(uint4) == 16);
    CHECK(sizeof(float2) == 8 && alignof(float2) == 8 && alignof(int2) == 8 && alignof(uint2) == 8 && alignof(double2) == 16);
    CHECK(sizeof(float3) == 12 && alignof(float3) == 4 && sizeof(uint3) == 12 && sizeof(dim3) == 12);
    CHECK(sizeof(ushort4) == 8 && alignof(ushort4) == 8);
    float4 f = make_float4(1, 2, 3, 4);
    uint3 u = make_uint3(5, 6, 7);
    CHECK(f.x == 1 && f.y == 2 && f.z == 3 && f.w == 4 && u.x == 5 && u.y == 6 && u.z == 7);
    dim3 d(7);
    CHECK(d.x == 7 && d.y == 1 && d.z == 1 && warpSize == 32);
}

TEST(numbers) {
    for (int i = 0; i < 10000; i++) {
        float x = draw_float() * 130, y = exp2_approx(x);
        double exact = exp2(x);
        if (exact >= 0x1p128) CHECK(isinf(y));
        else if (exact >= 0x1p-126) CHECK(fabs(y - exact) <= exact * 0x1p-22);
        else CHECK(y == 0, "2^%g gave %g", x, y);
        unsigned bits = (unsigned)draw() >> draw_below(32);
        int leading = 0, ones = 0;
        while (leading < 32 && !(bits >> (31 - leading) & 1)) leading++;
        for (int b = 0; b < 32; b++) ones += bits >> b & 1;
        CHECK(__clz((int)bits) == leading && __popc(bits) == ones);
        CHECK(__float_as_uint(__uint_as_float(bits & 0x7F7FFFFF)) == (bits & 0x7F7FFFFF));
        CHECK(__float_as_int(__int_as_float((int)(bits & 0x7F7FFFFF))) == (int)(bits & 0x7F7FFFFF));
    }
    CHECK(exp2_approx(-INFINITY) == 0 && isinf(exp2_approx(128)) && isnan(exp2_approx(NAN)) && exp2_approx(0) == 1);
    CHECK(__clz(0) == 32);
    CHECK(min(3, -4) == -4 && max(3, -4) == 3 && min(3u, 4u) == 3 && max(2.5f, 1) == 2.5f && min(2.5, 3.5f) == 2.5);
    CHECK(max(-1, 1u) == 0xFFFFFFFF, "int beside unsigned is taken for unsigned");
    CHECK(min(1LL << 40, 7) == 7 && max((size_t)9, (size_t)8) == 9);
    CHECK(max(NAN, 1.0f) == 1 && max(1.0f, NAN) == 1 && min(NAN, 1.0f) == 1 && min(1.0f, NAN) == 1 && fmaxf(1.0f, NAN) == 1);
    CHECK(fabsf(__expf(1.5f) - expf(1.5f)) < 1e-5f && fabsf(__logf(1.5f) - logf(1.5f)) < 1e-6f);
    CHECK(fabsf(rsqrtf(2) - 0.70710678f) < 1e-6f);
    float4 from = make_float4(1, 2, 3, draw_float()), to;
    __stcs(&to, __ldcs(&from));
    CHECK(memcmp(&to, &from, sizeof to) == 0);
    __stcg(&to.x, __ldg(&from.w));
    CHECK(to.x == from.w && __ldcg(&to.x) == from.w);
}

// ----------------------------------------------------------------------------
// ldmatrix and mma. The layouts are written here element by element, as in the tables of the PTX manual.

TEST(ldmatrix) {
    enum { UNITS = 100, THREADS = 64 };
    uint16_t *in = drawn<uint16_t>(UNITS * 8);
    int *places = device<int>(32);
    uint32_t *out = device<uint32_t>(4 * THREADS), *out_trans = device<uint32_t>(4 * THREADS);
    for (int i = 0; i < 32; i++) places[i] = (int)draw_below(UNITS);  // of row i % 8 of matrix i / 8, in units of 16 bytes
    run(1, THREADS, UNITS * 16, [=] {
        DYNAMIC_SHARED(memory);
        for (int i = threadIdx.x; i < UNITS * 8; i += THREADS) ((uint16_t *)memory)[i] = in[i];
        __syncthreads();
        uint32_t r[4];
        for (int repeat = 0; repeat < 3; repeat++) {  // lanes that are ahead must not disturb the others' results
            ldmatrix_x4(r, memory + 16 * places[threadIdx.x % 32]);
            memcpy(out + 4 * threadIdx.x, r, sizeof r);
            ldmatrix_x4_trans(r, memory + 16 * places[threadIdx.x % 32]);
            memcpy(out_trans + 4 * threadIdx.x, r, sizeof r);
        }
    });
    for (int i = 0; i < 8 * THREADS; i++) {
        int thread = i / 8, lane = thread % 32, m = i / 2 % 4, half = i % 2;
        auto element = [&](int row, int column) { return in[8 * places[8 * m + row] + column]; };
        uint16_t got = (uint16_t)(out[4 * thread + m] >> 16 * half);
        uint16_t got_trans = (uint16_t)(out_trans[4 * thread + m] >> 16 * half);
        CHECK(got == element(lane / 4, lane % 4 * 2 + half), "lane %d, matrix %d", lane, m);
        CHECK(got_trans == element(lane % 4 * 2 + half, lane / 4), "transposed, lane %d, matrix %d", lane, m);
    }
}

// d += a b, with rows and columns of a lane's elements from the manual. `swapped` exchanges two registers of a.
__global__ void mma_kernel(float *d, const float *a, const float *b, bool swapped) {
    int lane = threadIdx.x % 32, group = lane >> 2, in_group = lane % 4, warp = threadIdx.x / 32;
    a += warp * 256, b += warp * 128, d += warp * 128;
    uint32_t a_registers[4], b_registers[2];
    bf16 a_elements[8], b_elements[4];
    float d_elements[4];
    for (int i = 0; i < 8; i++) {
        int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8, column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
        a_elements[i] = bf16(a[16 * row + column]);
    }
    for (int i = 0; i < 4; i++) {
        int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8), column = group;
        b_elements[i] = bf16(b[8 * row + column]);
        d_elements[i] = d[8 * (i < 2 ? group : group + 8) + in_group * 2 + (i & 1)];
    }
    memcpy(a_registers, a_elements, sizeof a_registers);
    memcpy(b_registers, b_elements, sizeof b_registers);
    if (swapped) std::swap(a_registers[1], a_registers[2]);
    for (int repeat = 0; repeat < 3; repeat++) mma_m16n8k16(d_elements, a_registers, b_registers[0], b_registers[1]);
    for (int i = 0; i < 4; i++) d[8 * (i < 2 ? group : group + 8) + in_group * 2 + (i & 1)] = d_elements[i];
}

// The largest error of an element, in units of the sum of its products' absolute values.
static double mma_error(bool small, bool swapped) {
    enum { WARPS = 3 };
    float *a = device<float>(256 * WARPS), *b = device<float>(128 * WARPS), *d = device<float>(128 * WARPS), before[128 * WARPS];
    for (int i = 0; i < 256 * WARPS; i++) a[i] = small ? (float)draw_small() : bf16_by_arithmetic(draw_float());
    for (int i = 0; i < 128 * WARPS; i++) b[i] = small ? (float)draw_small() : bf16_by_arithmetic(draw_float());
    for (int i = 0; i < 128 * WARPS; i++) before[i] = d[i] = small ? (float)draw_small() : draw_float();
    LAUNCH(mma_kernel, 1, 32 * WARPS, 0, NULL, d, a, b, swapped);
    double worst = 0;
    for (int i = 0; i < 128 * WARPS; i++) {
        int warp = i / 128, row = i % 128 / 8, column = i % 8;
        double sum = before[i], size = fabs(before[i]) + 1;
        for (int k = 0; k < 16; k++) {
            double product = (double)a[256 * warp + 16 * row + k] * b[128 * warp + 8 * k + column];
            sum += 3 * product;
            size += 3 * fabs(product);
        }
        worst = fmax(worst, fabs(d[i] - sum) / size);
    }
    return worst;
}

TEST(mma) {
    for (int i = 0; i < 20; i++) {
        double exact = mma_error(true, false), rounded = mma_error(false, false);
        CHECK(exact == 0, "%g on small integers", exact);
        CHECK(rounded < 1e-6, "%g", rounded);
    }
}
TEST(planted_swapped_fragment) { CHECK(mma_error(true, true) > 0.01); }

// What attention does: C (16 x 16) = A (16 x 16) B (16 x 16) and A Bᵀ through shared memory, all fragments by ldmatrix.
template <bool SYNC> __global__ void tile_product_kernel(float *c, float *c_trans, const bf16 *a, const bf16 *b) {
    __shared__ __align__(16) bf16 a_tile[16][24], b_tile[16][24];  // rows padded to 48 bytes
    int lane = threadIdx.x, group = lane / 4, in_group = lane % 4;
    for (int i = lane; i < 256; i += 32) a_tile[i / 16][i % 16] = a[i], b_tile[i / 16][i % 16] = b[i];
    if (SYNC) __syncwarp();
    uint32_t a_registers[4], b_registers[4];
    // matrices in the order (upper left, lower left, upper right, lower right)
    ldmatrix_x4(a_registers, &a_tile[lane % 16][lane / 16 * 8]);
    ldmatrix_x4_trans(b_registers, &b_tile[lane % 16][lane / 16 * 8]);
    auto multiply = [&](float *to) {
        for (int half = 0; half < 2; half++) {
            float d[4] = {0, 0, 0, 0};
            mma_m16n8k16(d, a_registers, b_registers[2 * half], b_registers[2 * half + 1]);
            for (int i = 0; i < 4; i++) to[16 * (group + i / 2 * 8) + 8 * half + 2 * in_group + i % 2] = d[i];
        }
    };
    multiply(c);
    // b's rows are the columns now: not transposed, (rows 0-7, columns 0-7), (rows 0-7, 8-15), (rows 8-15, ...
    ldmatrix_x4(b_registers, &b_tile[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    multiply(c_trans);
}

template <bool SYNC> static bool tile_products_right(void) {
    bf16 *a = device<bf16>(256), *b = device<bf16>(256);
    float *c = device<float>(256), *c_trans = device<float>(256);
    for (int i = 0; i < 256; i++) a[i] = bf16((float)draw_small()), b[i] = bf16((float)draw_small());
    LAUNCH(tile_product_kernel<SYNC>, 1, 32, 0, NULL, c, c_trans, a, b);
    return all_right(256, [=](int i) {
        float sum = 0, sum_trans = 0;
        for (int k = 0; k < 16; k++) {
            sum += (float)a[i / 16 * 16 + k] * (float)b[16 * k + i % 16];
            sum_trans += (float)a[i / 16 * 16 + k] * (float)b[i % 16 * 16 + k];
        }
        return c[i] == sum && c_trans[i] == sum_trans;
    });
}

TEST(tile_product) { CHECK(wrong_orders(tile_products_right<true>) == 0); }
TEST(planted_missing_syncwarp_before_ldmatrix) { CHECK(wrong_orders(tile_products_right<false>) > 0); }

// ----------------------------------------------------------------------------
// cp.async

TEST(cp_async) {
    int4 *in = drawn<int4>(4), *out = device<int4>(21);
    run(1, 1, 8 * 16, [=] {
        DYNAMIC_SHARED(memory);
        int4 *tile = (int4 *)memory;
        auto show = [=](int step, int count) { memcpy(out + 4 * step, tile, count * sizeof *tile); };
        for (int i = 0; i < 8; i++) tile[i] = make_int4(1, 1, 1, 1);
        cp_async_16(&tile[0], &in[0], true);
        cp_async_16(&tile[1], &in[1], false);
        cp_async_commit();
        cp_async_16(&tile[2], &in[2], true);
        cp_async_commit();
        cp_async_16(&tile[3], &in[3], true);
        show(0, 4);
        in[0].x = 1000;  // the copy may read as late as at the wait
        cp_async_wait<2>();
        show(1, 4);
        cp_async_wait<1>();
        show(2, 4);
        cp_async_wait<0>();
        show(3, 4);
        cp_async_commit();
        cp_async_wait<0>();
        show(4, 5);
    });
    CHECK(in[0].x == 1000);
    int4 nothing = make_int4(-1, -1, -1, -1), zeros = make_int4(0, 0, 0, 0), ones = make_int4(1, 1, 1, 1);
    // what has arrived after issue, wait<2>, wait<1>, wait<0> before the last commit, and after it
    bool arrived[5][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}, {1, 1, 0, 0}, {1, 1, 1, 0}, {1, 1, 1, 1}};
    for (int i = 0; i < 20; i++) {
        int4 expected = !arrived[i / 4][i % 4] ? nothing : i % 4 == 1 ? zeros : in[i % 4];
        CHECK(memcmp(&out[i], &expected, 16) == 0, "step %d, copy %d", i / 4, i % 4);
    }
    CHECK(memcmp(&out[20], &ones, 16) == 0, "what was not copied to stays");
}

// A copy that its thread does not wait for never happens, not even when another block's thread waits.
TEST(copies_end_with_the_thread) {
    int4 *in = drawn<int4>(1), *out = device<int4>(32), ones = make_int4(1, 1, 1, 1);
    for (bool start : {true, false}) {
        run(1, 32, 0, [=] {
            __shared__ int4 tile[32];  // static, because dynamic shared memory lies elsewhere in each launch
            tile[threadIdx.x] = ones;
            if (start) cp_async_16(&tile[threadIdx.x], in, true);
            cp_async_commit();
            if (!start) cp_async_wait<0>();
            out[threadIdx.x] = tile[threadIdx.x];
        });
    }
    for (int i = 0; i < 32; i++) CHECK(memcmp(&out[i], &ones, 16) == 0);
}

// Tiles come in by two buffers, and each thread adds up a neighbour's part of each.
enum Fault { NO_FAULT, NO_WAIT, WRONG_COUNT, NO_COMMIT, NO_BARRIER, NO_BARRIER_AT_END };

template <Fault FAULT> __global__ void pipeline_kernel(int *out, const int4 *in, int tiles) {
    __shared__ int4 buffers[2][64];
    int sum = 0;
    cp_async_16(&buffers[0][threadIdx.x], &in[threadIdx.x], true);
    if (FAULT != NO_COMMIT) cp_async_commit();
    for (int tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles) cp_async_16(&buffers[(tile + 1) % 2][threadIdx.x], &in[64 * (tile + 1) + threadIdx.x], true);
        if (FAULT != NO_COMMIT) cp_async_commit();
        if (FAULT != NO_WAIT) cp_async_wait<FAULT == WRONG_COUNT ? 2 : 1>();
        if (FAULT != NO_BARRIER) __syncthreads();
        int4 part = buffers[tile % 2][(threadIdx.x + 1) % 64];
        sum += part.x + part.y + part.z + part.w;
        if (FAULT != NO_BARRIER_AT_END) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

template <Fault FAULT> static bool pipeline_right(void) {
    enum { TILES = 9 };
    int4 *in = device<int4>(64 * TILES);
    int *out = device<int>(64);
    for (int i = 0; i < 64 * TILES; i++) in[i] = make_int4(draw_small(), draw_small(), draw_small(), draw_small());
    LAUNCH(pipeline_kernel<FAULT>, 1, 64, 0, NULL, out, in, TILES);
    return all_right(64, [=](int thread) {
        int sum = 0;
        for (int tile = 0; tile < TILES; tile++) {
            int4 part = in[64 * tile + (thread + 1) % 64];
            sum += part.x + part.y + part.z + part.w;
        }
        return out[thread] == sum;
    });
}

TEST(pipeline) { CHECK(wrong_orders(pipeline_right<NO_FAULT>) == 0); }
TEST(planted_missing_wait) { CHECK(wrong_orders(pipeline_right<NO_WAIT>) == 10); }
TEST(planted_wrong_wait_count) { CHECK(wrong_orders(pipeline_right<WRONG_COUNT>) == 10); }
TEST(planted_missing_commit) { CHECK(wrong_orders(pipeline_right<NO_COMMIT>) == 10); }
TEST(planted_missing_barrier_after_wait) { CHECK(wrong_orders(pipeline_right<NO_BARRIER>) > 0); }
TEST(planted_missing_barrier_before_next_copy) { CHECK(wrong_orders(pipeline_right<NO_BARRIER_AT_END>) > 0); }

// ----------------------------------------------------------------------------
// The runtime's other calls

TEST(memory) {
    for (int i = 0; i < 20; i++) {
        size_t bytes = 1 + draw_below(5000);
        unsigned char *memory = device<unsigned char>(bytes), *host;
        CUDA_CHECK(cudaMallocHost(&host, bytes));
        CHECK((uintptr_t)memory % 256 == 0);
        for (size_t b = 0; b < bytes; b++) CHECK(memory[b] == 0xFF);
        CUDA_CHECK(cudaMemsetAsync(memory, 7, bytes, NULL));
        CUDA_CHECK(cudaMemset(memory, 9, bytes / 2));
        CUDA_CHECK(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, NULL));
        for (size_t b = 0; b < bytes; b++) CHECK(host[b] == (b < bytes / 2 ? 9 : 7));
        host[bytes - 1] = 11;
        CUDA_CHECK(cudaMemcpy(memory, host, bytes, cudaMemcpyHostToDevice));
        CHECK(memory[bytes - 1] == 11);
        CUDA_CHECK(cudaFreeHost(host));
    }
    float *none = (float *)1;
    CHECK(cudaMalloc(&none, 0) == cudaSuccess && none == NULL && cudaFree(NULL) == cudaSuccess);
    CHECK(cudaMalloc(&none, (size_t)1 << 60) == cudaErrorMemoryAllocation && cudaGetLastError() == cudaErrorMemoryAllocation);
    size_t free_bytes, total;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(free_bytes > 0 && free_bytes <= total);
}

TEST(streams_and_events) {
    cudaStream_t stream, other;
    cudaEvent_t start, end;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreateWithFlags(&end, cudaEventDefault));
    auto before = std::chrono::steady_clock::now();
    CUDA_CHECK(cudaEventRecord(start, stream));
    usleep(20000);
    CUDA_CHECK(cudaEventRecord(end, stream));
    std::chrono::duration<float, std::milli> most = std::chrono::steady_clock::now() - before;
    CUDA_CHECK(cudaStreamWaitEvent(other, end, 0));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaDeviceSynchronize());
    float milliseconds;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds >= 20 && milliseconds <= most.count() + 0.01f, "%g", milliseconds);
    for (cudaEvent_t event : {start, end}) CUDA_CHECK(cudaEventDestroy(event));
    for (cudaStream_t each : {stream, other}) CUDA_CHECK(cudaStreamDestroy(each));
}

TEST(device) {
    int count, which = -1, major, minor, value;
    CHECK(cudaGetDeviceCount(&count) == cudaSuccess && count == 1);
    CHECK(cudaSetDevice(0) == cudaSuccess && cudaGetDevice(&which) == cudaSuccess && which == 0);
    CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice);
    cudaDeviceProp properties;
    unsetenv("CUDA_ON_CPU_CAPABILITY");
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    CHECK(properties.major == 9 && properties.minor == 0 && properties.warpSize == 32);
    CHECK(properties.sharedMemPerBlockOptin == 232448);
    CHECK(strlen(properties.name) && properties.multiProcessorCount > 0 && properties.totalGlobalMem > 0);
    setenv("CUDA_ON_CPU_CAPABILITY", "7.5", 1);
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    unsetenv("CUDA_ON_CPU_CAPABILITY");
    CHECK(major == 7 && minor == 5);
    CUDA_CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(value == 232448);
    CHECK(strcmp(cudaGetErrorString(cudaSuccess), "no error") == 0);
}

// ----------------------------------------------------------------------------
// Planted faults that end the program: in a child

__global__ void divergent_barrier_kernel(void) {
    if (threadIdx.x < 40) __syncthreads();
    else __syncwarp(1u << threadIdx.x % 32 | 1u << (threadIdx.x - 1) % 32);
}
TEST(planted_deadlocks) {
    int *out = device<int>(64);
    CHECK_ENDS("deadlock in divergent_barrier_kernel, block (0, 0, 0)", LAUNCH(divergent_barrier_kernel, 1, 64, 0, NULL));
    CHECK_SAID("40 wait in __syncthreads");
    CHECK_SAID("wait in __syncwarp, mask 0x");
    CHECK_ENDS("5 wait in __shfl_sync, mask 0xffffffff", run(3, 32, 0, [=] {
        out[threadIdx.x] = threadIdx.x < 5 ? __shfl_sync(0xFFFFFFFF, 1, 0) : __any_sync(0xFFFFFFFF, 1);
    }));
    CHECK_SAID("27 wait in __any_sync, mask 0xffffffff");
    CHECK_ENDS("1 wait in __syncwarp, mask 0x00000003, one is thread (0, 0, 0)",
               run(1, 32, 0, [] { __syncwarp(threadIdx.x ? 0xFFFFFFFF : 3); }));
    CHECK_ENDS("3 wait in __syncthreads, mask 0x00000000, one is thread (0, 0, 0)", run(1, 64, 0, [] {
        if (threadIdx.x < 3) __syncthreads();
        else __syncthreads_or(1);
    }));
    CHECK_SAID("61 wait in __syncthreads_or, mask 0x00000000, one is thread (3, 0, 0)");
}

TEST(planted_misuse) {
    char *from = device<char>(64);
    CHECK_ENDS("lacks that lane", run(1, 2, 0, [] { __syncwarp(1); }));
    CHECK_ENDS("mma by lanes 0xfffffdff only", run(1, 32, 0, [] {
        float d[4] = {0, 0, 0, 0};
        uint32_t a[4] = {0, 0, 0, 0};
        if (threadIdx.x != 9) mma_m16n8k16(d, a, 0, 0);
    }));
    CHECK_ENDS("no multiple of 16", run(1, 32, 1024, [] {
        DYNAMIC_SHARED(memory);
        uint32_t r[4];
        ldmatrix_x4(r, memory + threadIdx.x * 16 + (threadIdx.x == 20 ? 8 : 0));
    }));
    for (bool to : {true, false}) {
        CHECK_ENDS(to ? "cp.async to" : "cp.async from", run(1, 1, 64, [=] {
            DYNAMIC_SHARED(memory);
            cp_async_16(memory + (to ? 8 : 0), from + (to ? 0 : 4), true);
        }));
    }
    CHECK_ENDS("invalid configuration argument", run(1, 1025, 0, [] {}));
}

// Each level keeps 1 KiB, which the compiler cannot do without.
static __device__ __noinline__ int deep(int levels) {
    volatile char kept[1024];
    kept[levels % 1024] = 1;
    return (levels ? deep(levels - 1) : 0) + kept[levels % 1024];
}

TEST(planted_stack_overflow) {
    int *out = device<int>(64);
    run(1, 64, 0, [=] { out[threadIdx.x] = deep(60); });
    CHECK(out[63] == 61);
    CHECK_ENDS(WITH_ASAN ? "stack-overflow" : "more than its 256 KiB of stack",
               run(1, 64, 0, [=] { out[threadIdx.x] = deep(5000); }));
}

// ----------------------------------------------------------------------------
// Planted faults of memory

static __global__ void __launch_bounds__(64, 2) copy_kernel(float *__restrict__ out, const float *__restrict__ in) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i != 77) out[i] = in[i];
}

TEST(planted_unwritten_output) {
    float *in = device<float>(128), *out = device<float>(128);
    memset(in, 0, 128 * sizeof *in);
    LAUNCH(copy_kernel, 2, 64, 0, NULL, out, in);
    for (int i = 0; i < 128; i++) CHECK(isnan(out[i]) == (i == 77));
}

TEST(planted_unwritten_shared) {
    float2 *out = device<float2>(5 * 32);
    run(5, 32, 128, [=] {
        DYNAMIC_SHARED(memory);
        __shared__ float tile[32];
        float *dynamic_tile = (float *)memory;
        unsigned next = (threadIdx.x + 1) % 32;
        if (threadIdx.x != 7) tile[threadIdx.x] = dynamic_tile[threadIdx.x] = 1;
        __syncthreads();
        out[blockIdx.x * 32 + threadIdx.x] = make_float2(tile[next], dynamic_tile[next]);
    });
    for (int i = 0; i < 5 * 32; i++) CHECK(isnan(out[i].x) == (i % 32 == 6) && isnan(out[i].y) == (i % 32 == 6));
    run(1, 64, 0, [=] {  // the compiler must not think that it knows what is in shared memory
        __shared__ float never[4], box;
        if (threadIdx.x == 0) box = 1;
        __syncthreads();
        if (threadIdx.x == 40) box = 2;
        __syncthreads();
        if (threadIdx.x == 0) *out = make_float2(never[3], box);
    });
    CHECK(isnan(out->x) && out->y == 2, "%g %g", out->x, out->y);
}

__global__ void access_kernel(float *global, int at, int shared_at, bool write) {
    DYNAMIC_SHARED(memory);
    float *shared = (float *)memory;
    if (write && threadIdx.x == 3) global[at] = 1, shared[shared_at] = 1;
    if (!write && threadIdx.x == 3) global[0] = global[at] + shared[shared_at];
}

__global__ void async_access_kernel(const int4 *global, int at, int shared_at, bool valid) {
    DYNAMIC_SHARED(memory);
    cp_async_16(memory + 16 * shared_at, global + at, valid);
    cp_async_commit();
    cp_async_wait<0>();
}

TEST(planted_out_of_bounds) {
    if (!WITH_ASAN) SKIP("only AddressSanitizer sees it: compile with -fsanitize=address");
    float *global = device<float>(36);
    const int4 *from = (const int4 *)global;
    for (int way = 0; way < 2; way++) {  // written or read; valid or not
        CHECK(exit_of([=] { LAUNCH(access_kernel, 1, 32, 33 * 4, NULL, global, 35, 32, way); }) == 0);
        CHECK_ENDS("heap-buffer-overflow", LAUNCH(access_kernel, 1, 32, 33 * 4, NULL, global, 36, 32, way));
        CHECK_ENDS("heap-buffer-overflow", LAUNCH(access_kernel, 1, 32, 33 * 4, NULL, global, -1, 32, way));
        CHECK_ENDS("heap-buffer-overflow", LAUNCH(access_kernel, 1, 32, 33 * 4, NULL, global, 35, 33, way));
        CHECK(exit_of([=] { LAUNCH(async_access_kernel, 1, 1, 64, NULL, from, 8, 3, way); }) == 0);
        CHECK_ENDS("heap-buffer-overflow", LAUNCH(async_access_kernel, 1, 1, 64, NULL, from, 9, 3, way));
        CHECK_ENDS("heap-buffer-overflow", LAUNCH(async_access_kernel, 1, 1, 64, NULL, from, 8, 4, way));
    }
    CHECK_ENDS("heap-buffer-overflow", cudaMemset(global, 0, 36 * 4 + 1));
    CHECK_ENDS("heap-use-after-free", cudaFree(global); LAUNCH(access_kernel, 1, 32, 33 * 4, NULL, global, 0, 0, true));
}

static void write_static(float *out, int at) {
    run(1, 1, 0, [=] {
        __shared__ float tile[32];
        tile[at] = 1;
        out[0] = tile[at];
    });
}

TEST(planted_undefined_behaviour) {
    if (!WITH_UBSAN) SKIP("only UndefinedBehaviorSanitizer sees it: compile with -fsanitize=undefined");
    float *out = device<float>(64);
    exit_of([=] { write_static(out, 31); });
    CHECK(!strstr(child_said, "runtime error"), "%s", child_said);
    exit_of([=] { write_static(out, 32); });
    CHECK_SAID("index 32 out of bounds");
    exit_of([=] { run(1, 1, 0, [=] { ((float4 *)(out + 2))->x = 1; }); });
    CHECK_SAID("misaligned address");
}

int main(int argc, char **argv) { return run_tests(argc > 1 ? argv[1] : NULL, free_all, free_all) != 0; }

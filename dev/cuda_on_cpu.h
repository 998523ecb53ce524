// CUDA's kernels on the CPU: with this header g++ or clang++ compiles the same .cu sources, without a CUDA toolkit or a GPU.
//
//   g++ -x c++ -std=c++17 -O2 -march=native -I. file.cu -pthread                 to run
//   ... -O1 -g -fsanitize=address,undefined                                      to find faults
//
// It is made to find faults, then to be fast. It is not a model of a GPU's speed, and runs only what the sources here use.
// The threads of a block are fibers of one OS thread: one runs until it has to wait for others, then a random one that can
// does. Several OS threads take blocks, in an order that is random, too. So what a kernel does is right under any order, or:
//
//   a missing barrier                    one thread runs far ahead and the answer is wrong, for one seed or another
//   memory read before it is written     shared memory and cudaMalloc's are all NaN (bytes 0xFF) at first
//   memory out of bounds                 -fsanitize=address knows the exact ends of dynamic shared memory and of cudaMalloc's,
//                                        -fsanitize=bounds (part of undefined) those of arrays declared __shared__
//   cp.async not waited for              nothing arrives before the wait, and what was there is gone with the start of the copy
//   threads that wait for each other     a message says how many wait where, and the process ends with exit code 1
//   16-byte accesses to other addresses  a message for ldmatrix and cp.async, -fsanitize=alignment for float4 and the like
//                                        (gcc; clang 14 sees accesses to their members only)
//
// dev/hopper_on_cpu.h adds what Hopper GPUs have: copies and products that run beside the threads, and their barriers.
// Not found: races between a warp's lanes that a shuffle, vote or mma hides (all lanes meet there, and GPUs promise no order of
// memory by it); x += 1 where an atomic is needed, mostly (only different blocks interleave there); memory orders weaker than
// the host's. A loop that waits for another thread needs __nanosleep or an atomic in it, where others get to run. A thread that
// sleeps falls behind those of all blocks, by about a turn for each ns: so tests can let one be late.
// A function-local thread_local variable is taken for shared memory, and the executable must have its symbols (no strip).
//
//   CUDA_ON_CPU_SEED=N          the order of threads and blocks (1; cuda_on_cpu::seed may be set between launches, too)
//   CUDA_ON_CPU_WORKERS=N       how many OS threads take blocks (all cores)
//   CUDA_ON_CPU_SHARED_KB=N     the most shared memory a block can ask for (227; GPUs have 64 to 227)
//   CUDA_ON_CPU_CAPABILITY=X.Y  the compute capability that is reported (9.0)
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <elf.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>  // before __noinline__ below, a word that it uses itself
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#ifndef __has_feature  // of clang; gcc has a macro
#define __has_feature(name) 0
#endif
#if defined __SANITIZE_ADDRESS__ || __has_feature(address_sanitizer)
#include <sanitizer/common_interface_defs.h>
#define CUDA_ON_CPU_SANITIZED
#else
static inline void __sanitizer_start_switch_fiber(void **, const void *, size_t) {}
static inline void __sanitizer_finish_switch_fiber(void *, const void **, size_t *) {}
#endif

// ----------------------------------------------------------------------------
// Words of the language

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
// A block never leaves its OS thread; find_shared_variables() below finds them. "used" tells the compiler that it does not see
// all that happens to them, or it would take one that no thread writes for 0.
#define __shared__ static __thread __attribute__((used))

#define VECTORS(type, name, align2, align4)                                     \
    struct __align__(align2) name##2 { type x, y; };                            \
    struct name##3 { type x, y, z; };                                           \
    struct __align__(align4) name##4 { type x, y, z, w; };                      \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTORS(unsigned short, ushort, 4, 8)
VECTORS(int, int, 8, 16)
VECTORS(unsigned, uint, 8, 16)
VECTORS(float, float, 8, 16)
VECTORS(double, double, 16, 16)
#undef VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

constexpr int warpSize = 32;
#define threadIdx ((const uint3 &)cuda_on_cpu::self->index)
#define blockIdx ((const uint3 &)cuda_on_cpu::self->block->index)
#define blockDim ((const dim3 &)cuda_on_cpu::self->block->launch->block)
#define gridDim ((const dim3 &)cuda_on_cpu::self->block->launch->grid)

#define DYNAMIC_SHARED(name) unsigned char *const name = cuda_on_cpu::self->block->dynamic_shared
#define LAUNCH_KERNEL(kernel, grid, block, shared_bytes, stream, ...) \
    cuda_on_cpu::launcher(#kernel, kernel, grid, block, shared_bytes, stream)(__VA_ARGS__)

// ----------------------------------------------------------------------------
// The runtime's types. ("CUDA Runtime API")

enum cudaError_t {
    cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevice = 101,
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16, cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2 };
typedef struct StreamOnCpu { int unused; } *cudaStream_t;
typedef struct EventOnCpu { std::chrono::steady_clock::time_point time; } *cudaEvent_t;

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, l2CacheSize;
};

// ----------------------------------------------------------------------------
// Numbers, bf16 among them: the upper half of a float. ("CUDA Math API")

inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, sizeof bits); return bits; }
inline int __float_as_int(float x) { int bits; memcpy(&bits, &x, sizeof bits); return bits; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

// As CUDA has them for mixed types; a NaN gives way to a number.
#define CHOICE(name, comparison)                                                                    \
    template <typename A, typename B> inline typename std::common_type<A, B>::type name(A a, B b) { \
        typename std::common_type<A, B>::type first = a, second = b;                                \
        return first comparison second || second != second ? first : second;                        \
    }
CHOICE(min, <)
CHOICE(max, >)
#undef CHOICE

// Macros, because libm's headers declare some of these names for themselves. They are more precise than a GPU's.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __fdividef(x, y) ((x) / (y))
#define rsqrtf(x) (1.0f / sqrtf(x))

// 2^x; results below 2^-126 become 0. ("ex2")
inline float exp2_approx(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
}

// Loads and stores with a hint to the caches
template <typename T> inline T __ldg(const T *address) { return *address; }
template <typename T> inline T __ldcg(const T *address) { return *address; }
template <typename T> inline T __ldcs(const T *address) { return *address; }
template <typename T> inline void __stcg(T *address, T value) { *address = value; }
template <typename T> inline void __stcs(T *address, T value) { *address = value; }

struct __align__(2) __nv_bfloat16 {
    unsigned short bits;

    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) {  // to nearest, ties to even; NaN stays NaN
        uint32_t all = __float_as_uint(x);
        bits = (unsigned short)(x != x ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16);
    }
    operator float() const { return __uint_as_float((uint32_t)bits << 16); }
};
struct __align__(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {__nv_bfloat16(low), __nv_bfloat16(high)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { __nv_bfloat16 x; x.bits = bits; return x; }

// CUDA rounds what it computes of two bf16 to bf16; by way of float, as here, it is rounded the same.
inline __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16((float)a + (float)b); }
inline __nv_bfloat16 operator-(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16((float)a - (float)b); }
inline __nv_bfloat16 operator*(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16((float)a * (float)b); }
inline __nv_bfloat16 operator/(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16((float)a / (float)b); }

// ----------------------------------------------------------------------------
// Fibers: each has a stack, and a context where it goes on

namespace cuda_on_cpu {

struct Block;
struct Warp;

enum { LANES = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / LANES };
enum { STACK_BYTES = 256 << 10, GUARD_BYTES = 64 << 10 };  // 64 KiB: the largest pages in use on aarch64

#if !defined CUDA_ON_CPU_UCONTEXT && (defined __x86_64__ || defined __aarch64__)
struct Context { void *stack, *frame, *resume; };

// Keeps in `from` where this fiber is, and goes on where `to` was. All registers are clobbered, but for the two that compilers
// do not let go, which are kept in the context. Nothing is pushed: the compiler may have data below the stack pointer.
static __forceinline__ void switch_context(Context *from_context, Context *to_context) {
#ifdef __x86_64__
    register Context *from asm("rdi") = from_context, *to asm("rsi") = to_context;
    asm volatile("movq %%rsp, (%0)\n\t"
                 "movq %%rbp, 8(%0)\n\t"
                 "leaq 1f(%%rip), %%rax\n\t"
                 "movq %%rax, 16(%0)\n\t"
                 "movq (%1), %%rsp\n\t"
                 "movq 8(%1), %%rbp\n\t"
                 "jmpq *16(%1)\n"
                 "1:" : "+r"(from), "+r"(to) :
                 : "cc", "memory", "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
                   "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
                   "xmm14", "xmm15"
#ifdef __AVX512F__
                   , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27",
                   "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#endif
    );
#else
    register Context *from asm("x0") = from_context, *to asm("x1") = to_context;
    asm volatile("mov x9, sp\n\t"
                 "adr x10, 1f\n\t"
                 "stp x9, x29, [%0]\n\t"
                 "str x10, [%0, #16]\n\t"
                 "ldp x9, x29, [%1]\n\t"
                 "ldr x10, [%1, #16]\n\t"
                 "mov sp, x9\n\t"
                 "br x10\n"
                 "1:" : "+r"(from), "+r"(to) :
                 : "cc", "memory", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
                   "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v0", "v1",
                   "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18",
                   "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31");
#endif
}

// Switched to, it calls `function`.
inline void make_context(Context *context, char *stack, size_t bytes, void (*function)()) {
#ifdef __x86_64__
    bytes -= 8;  // as a call leaves the stack
#endif
    *context = {stack + bytes, NULL, (void *)function};
}
#else
typedef ucontext_t Context;
inline void switch_context(Context *from, Context *to) { swapcontext(from, to); }
inline void make_context(Context *context, char *stack, size_t bytes, void (*function)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = bytes;
    makecontext(context, function, 0);
}
#endif

struct Copy { void *to; const void *from; bool valid; unsigned group; };

struct Fiber {
    Context context;
    Block *block;
    Warp *warp;
    unsigned lane;
    uint3 index;               // threadIdx
    const void *stack;         // lowest address; a guard page lies below
    size_t stack_bytes;
    std::vector<Copy> copies;  // cp.async: started, not yet arrived
    unsigned groups;           // cp.async: committed so far
    void *fake_stack;          // AddressSanitizer's
    uint64_t wakes;            // if it sleeps: until when
    Fiber *came_from;
};

inline __thread Fiber *self;  // who runs on this OS thread; NULL outside of kernels

// Ends the process. _exit, because exit would run destructors on a fiber's stack; once, though several workers may come here.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void stop(const char *format, ...) {
    static std::mutex first;
    first.lock();
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fputs("error: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    _exit(1);
}

// A fiber may go on in another OS thread, if it stopped between two blocks. So nothing here may touch a thread's variables
// after the switch: their address may have been computed before it.
static __forceinline__ void switch_fiber(Fiber *from, Fiber *to) {
    self = to;
    to->came_from = from;
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
    switch_context(&from->context, &to->context);
    // AddressSanitizer tells the bounds of the stack left: known already, but for an OS thread's own.
    __sanitizer_finish_switch_fiber(from->fake_stack, &from->came_from->stack, &from->came_from->stack_bytes);
}

// ----------------------------------------------------------------------------
// Blocks: whose turn it is

// What lanes of a warp, or threads of a block, do together. The last to arrive does the work for all.
struct Operation {
    const char *name;
    void (*work)(Warp &warp, uint32_t group);  // group: the lanes as bits
};

struct Warp {
    uint32_t alive, runnable, waiting;  // lanes as bits; waiting: in an operation of the warp
    const Operation *operation[LANES];  // where a lane that is not runnable waits,
    uint32_t mask[LANES];               // with which mask; 0 if it waits for the whole block
    alignas(64) uint64_t in[LANES], out[LANES];              // operands and results of shuffles and votes
    alignas(64) uint16_t rows_in[LANES][8], rows[LANES][8];  // of ldmatrix: row r of matrix m is rows[8 * m + r]
    alignas(64) __nv_bfloat16 a[16][16], b[8][16];           // of mma: (m, k) and (n, k)
    alignas(64) float d[16][8];                              // (m, n)
};

enum { TICK = 256, LONGEST_SLEEP = 1000000 };  // ns: a step of the clock below, so that workers seldom meet there; as on a GPU

struct Launch {
    const char *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    std::function<void()> run;  // one thread
    uint64_t number, count;     // of this launch in the process; of its blocks
    std::atomic<uint64_t> next_block;
    alignas(64) std::atomic<uint64_t> clock = {0};  // in ns; each turn of a thread takes one
    std::mutex sleep_mutex = {};                    // for what follows
    std::vector<uint64_t> asleep = {};  // of each worker: until when all its blocks sleep, 0 if one does not, the most at the end
    uint64_t all_slept = 0;             // how long all blocks slept, in ns
};

// What goes on beside the threads of a block: the copies and products of dev/hopper_on_cpu.h.
struct Engine {
    virtual ~Engine() {}
    virtual void step() = 0;             // time passes; if no thread can run, as much as it takes until one can
    virtual void thread_ends(Fiber *) = 0;
    virtual std::string waiting() = 0;   // for report_deadlock()
};

struct Block {
    Launch *launch;
    uint3 index;  // blockIdx
    Warp warps[MAX_WARPS];
    Fiber fibers[MAX_THREADS];
    unsigned thread_count, alive;
    uint32_t runnable;  // warps as bits
    unsigned current;   // the warp whose turn it is
    uint32_t restless;  // its turn ends when these bits of a random number are 0
    uint64_t random_state;
    unsigned turns;     // of its threads
    std::vector<Fiber *> sleeping;
    const Operation *barrier;  // where threads wait, if any do
    unsigned at_barrier, votes, last_votes;
    Fiber *home;  // the worker that runs this block
    std::unique_ptr<Engine> engine;  // once it is needed
    unsigned char *dynamic_shared;
    std::vector<unsigned char> static_shared;  // while the block does not run
};

inline uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t z = a * 0xD6E8FEB86659FD93u + b + 1;
    z = (z ^ z >> 32) * 0xD6E8FEB86659FD93u;
    z = (z ^ z >> 32) * 0xD6E8FEB86659FD93u;
    return z ^ z >> 32;
}

inline uint64_t environment(const char *name, uint64_t otherwise, uint64_t least, uint64_t most) {
    const char *given = getenv(name);
    char *end;
    if (!given || !*given) return otherwise;
    errno = 0;
    uint64_t number = strtoull(given, &end, 10);
    if (*end || given[0] < '0' || given[0] > '9' || errno || number < least || number > most)
        stop("%s is '%s'; expected a whole number from %llu to %llu", name, given, (unsigned long long)least, (unsigned long long)most);
    return number;
}

inline uint64_t seed = environment("CUDA_ON_CPU_SEED", 1, 0, UINT64_MAX);
inline unsigned worker_count = (unsigned)environment("CUDA_ON_CPU_WORKERS", std::thread::hardware_concurrency(), 1, 1024);

inline uint32_t random_bits(Block *block) {
    block->random_state = block->random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(block->random_state >> 32);
}

// The place of one of the bits that are set, each as likely as the others.
inline unsigned random_bit(uint32_t bits, uint32_t random) {
    unsigned skip = (random & 0xFFF) * (unsigned)__builtin_popcount(bits) >> 12;
#ifdef __BMI2__
    return (unsigned)__builtin_ctz(__builtin_ia32_pdep_si(1u << skip, bits));
#else
    for (; skip > 0; skip--) bits &= bits - 1;
    return (unsigned)__builtin_ctz(bits);
#endif
}

[[noreturn]] inline void report_deadlock(Block *block, const char *why) {
    std::map<std::pair<const Operation *, uint32_t>, std::vector<unsigned>> waiting;  // threads by operation and mask
    for (unsigned i = 0; i < block->thread_count; i++) {
        const Warp &warp = block->warps[i / LANES];
        if (warp.alive >> i % LANES & 1) waiting[{warp.operation[i % LANES], warp.mask[i % LANES]}].push_back(i);
    }
    std::string text;
    for (const auto &[where, threads] : waiting) {
        char line[200];
        uint3 first = block->fibers[threads[0]].index;
        snprintf(line, sizeof line, "\n  %zu wait in %s, mask 0x%08x, one is thread (%u, %u, %u)", threads.size(),
                 where.first->name, where.second, first.x, first.y, first.z);
        text += line;
    }
    if (block->engine) text += block->engine->waiting();
    stop("deadlock in %s, block (%u, %u, %u): of %u threads %u have ended, and the others %s:%s",
         block->launch->kernel, block->index.x, block->index.y, block->index.z, block->thread_count,
         block->thread_count - block->alive, why, text.c_str());
}

inline void wake(Fiber *fiber) {
    fiber->warp->runnable |= 1u << fiber->lane;
    fiber->block->runnable |= 1u << (fiber->warp - fiber->block->warps);
}

__noinline__ inline void wake_sleepers(Block *block) {
    const uint64_t now = block->launch->clock;
    for (size_t i = block->sleeping.size(); i-- > 0;) {
        if (block->sleeping[i]->wakes > now) continue;
        wake(block->sleeping[i]);
        block->sleeping.erase(block->sleeping.begin() + (ptrdiff_t)i);
    }
}

// Warps take long turns, so that the stacks at work fit the cache, and so that one warp is far ahead of others. If the threads that
// could run all sleep, it is other blocks' turn: the worker's.
inline Fiber *choose(Block *block) {
    if (++block->turns % TICK == 0) block->launch->clock += TICK;
    if (!block->sleeping.empty()) wake_sleepers(block);
    if (block->engine) block->engine->step();
    if (!block->runnable && !block->sleeping.empty()) return block->home;
    if (!block->runnable) report_deadlock(block, "wait for each other");
    uint32_t random = random_bits(block);
    if (!block->warps[block->current].runnable || !(random & block->restless))
        block->current = random_bit(block->runnable, random_bits(block));
    return &block->fibers[block->current * LANES + random_bit(block->warps[block->current].runnable, random >> 20)];
}

inline void run_next(Fiber *me) {
    Fiber *next = choose(me->block);
    if (next != me) switch_fiber(me, next);
}

// Now and then to the worker, too: what this block waits for may be another block's to do.
inline void give_way(Fiber *me) {
    if (random_bits(me->block) & 3) run_next(me);
    else switch_fiber(me, me->block->home);
}

// At atomics others run in between now and then, so that two that should be one show, and a loop that waits by them ends.
inline void maybe_give_way() {
    if (self && random_bits(self->block) % 16 == 0) give_way(self);
}

template <typename T, typename Function> inline T atomic_update(T *address, Function function) {
    maybe_give_way();
    T before, after;
    __atomic_load(address, &before, __ATOMIC_SEQ_CST);
    do after = function(before);
    while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return before;
}

// Takes the caller's turns until finish_operation() or finish_barrier() gives them back.
inline void block_lane(Fiber *me, const Operation *operation, uint32_t mask) {
    Warp *warp = me->warp;
    warp->operation[me->lane] = operation;
    warp->mask[me->lane] = mask;
    warp->runnable &= ~(1u << me->lane);
    if (!warp->runnable) me->block->runnable &= ~(1u << (warp - me->block->warps));
}

// The caller goes on when other threads, of all blocks, have had about as many turns as it sleeps ns, or when nothing else is left
// to do.
__noinline__ inline void fall_asleep(Fiber *me, unsigned ns) {
    static const Operation NANOSLEEP = {"__nanosleep", NULL};
    me->wakes = me->block->launch->clock + (std::min<unsigned>(ns, LONGEST_SLEEP) + TICK - 1) / TICK * TICK;
    me->block->sleeping.push_back(me);
    block_lane(me, &NANOSLEEP, 0);
    give_way(me);
}

// Lets the lanes go on that wait in the same operation as `lane` does, if all of its mask have come or have ended.
inline void finish_operation(Block *block, Warp *warp, unsigned lane) {
    const Operation *operation = warp->operation[lane];
    uint32_t mask = warp->mask[lane], group = mask & warp->alive, differ = 0;
    if ((warp->waiting & group) != group) return;
    for (unsigned i = 0; i < LANES; i++)
        differ |= (uint32_t)(warp->operation[i] != operation || warp->mask[i] != mask) << i;
    if (differ & group) return;
    if (operation->work) operation->work(*warp, group);
    warp->waiting &= ~group;
    warp->runnable |= group;
    block->runnable |= 1u << (warp - block->warps);
}

// Lets the whole block go on, if all threads that have not ended wait at its barrier.
inline void finish_barrier(Block *block) {
    if (block->at_barrier != block->alive || !block->alive) return;
    block->last_votes = block->votes;
    block->at_barrier = block->votes = 0;
    for (unsigned w = 0; w * LANES < block->thread_count; w++) {
        block->warps[w].runnable = block->warps[w].alive;
        if (block->warps[w].alive) block->runnable |= 1u << w;
    }
}

// The caller has put its operands into its place in the warp, and finds its results there afterwards.
__noinline__ inline void meet_warp(const Operation *operation, uint32_t mask) {
    Fiber *me = self;
    if (!(mask >> me->lane & 1)) stop("%s by lane %u with mask 0x%08x, which lacks that lane", operation->name, me->lane, mask);
    block_lane(me, operation, mask);
    me->warp->waiting |= 1u << me->lane;
    finish_operation(me->block, me->warp, me->lane);
    run_next(me);
}

// A thread that comes to another kind of barrier than those that wait is not counted, so that the block is stuck.
__noinline__ inline unsigned meet_block(const Operation *operation, int vote) {
    Fiber *me = self;
    Block *block = me->block;
    block_lane(me, operation, 0);
    if (!block->at_barrier) block->barrier = operation;
    if (block->barrier == operation) {
        block->at_barrier++;
        block->votes += vote != 0;
        finish_barrier(block);
    }
    run_next(me);
    return block->last_votes;
}

// One thread from its first to its last line. Not inline: it may run in another OS thread the next time.
__noinline__ inline void run_thread(Fiber *me) { me->block->launch->run(); }

__noinline__ inline void end_thread(Fiber *me) {
    Block *block = me->block;
    Warp *warp = me->warp;
    if (block->engine) block->engine->thread_ends(me);
    block_lane(me, NULL, 0);
    warp->alive &= ~(1u << me->lane);
    block->alive--;
    for (unsigned i = 0; i < LANES; i++)
        if (warp->waiting >> i & 1) finish_operation(block, warp, i);
    finish_barrier(block);
    switch_fiber(me, block->alive ? choose(block) : block->home);
}

inline void fiber_main() {
    Fiber *me = self;
    __sanitizer_finish_switch_fiber(NULL, &me->came_from->stack, &me->came_from->stack_bytes);
    for (;;) {  // one turn for each block that the fiber is used for
        run_thread(me);
        end_thread(me);
    }
}

// ----------------------------------------------------------------------------
// What threads do together

// `out` is apart, because a lane may come to its next operation before others have read the results of this one. Lanes outside
// of the group may be about to read theirs.
inline void work_shuffle(Warp &warp, uint32_t group) {
    for (unsigned i = 0; i < LANES; i++)
        if (group >> i & 1) warp.out[i] = warp.in[i];
}
inline void work_ballot(Warp &warp, uint32_t group) {
    uint32_t ballot = 0;
    for (unsigned i = 0; i < LANES; i++) ballot |= (uint32_t)(warp.in[i] != 0) << i;
    for (unsigned i = 0; i < LANES; i++)
        if (group >> i & 1) warp.out[i] = ballot & group;
}

inline void work_ldmatrix(Warp &warp, uint32_t group) {
    if (group != UINT32_MAX) stop("ldmatrix by lanes 0x%08x only: it needs the whole warp", group);
    memcpy(warp.rows, warp.rows_in, sizeof warp.rows);
}

inline void work_mma(Warp &warp, uint32_t group) {
    typedef float Row __attribute__((vector_size(32), may_alias));  // 8 columns
    if (group != UINT32_MAX) stop("mma by lanes 0x%08x only: it needs the whole warp", group);
    float a[16][16];
    Row b[16];
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++) a[m][k] = warp.a[m][k];
    for (int n = 0; n < 8; n++)
        for (int k = 0; k < 16; k++) b[k][n] = warp.b[n][k];
    Row sum[16] = {};
    for (int k = 0; k < 16; k++)
        for (int m = 0; m < 16; m++) sum[m] += a[m][k] * b[k];
    for (int m = 0; m < 16; m++) *(Row *)warp.d[m] += sum[m];
}

inline const Operation SYNCTHREADS = {"__syncthreads", NULL}, SYNCTHREADS_OR = {"__syncthreads_or", NULL},
                       SYNCTHREADS_AND = {"__syncthreads_and", NULL}, SYNCTHREADS_COUNT = {"__syncthreads_count", NULL},
                       SYNCWARP = {"__syncwarp", NULL}, ANY = {"__any_sync", work_ballot}, ALL = {"__all_sync", work_ballot},
                       BALLOT = {"__ballot_sync", work_ballot}, SHFL = {"__shfl_sync", work_shuffle},
                       SHFL_UP = {"__shfl_up_sync", work_shuffle}, SHFL_DOWN = {"__shfl_down_sync", work_shuffle},
                       SHFL_XOR = {"__shfl_xor_sync", work_shuffle}, LDMATRIX = {"ldmatrix", work_ldmatrix},
                       LDMATRIX_TRANS = {"ldmatrix.trans", work_ldmatrix}, MMA = {"mma", work_mma};

// What a lane outside of the mask has is undefined: all bits 1.
template <typename T> inline T shuffle(const Operation *operation, uint32_t mask, T value, unsigned source) {
    static_assert((sizeof value == 4 || sizeof value == 8) && std::is_trivially_copyable<T>::value, "shuffles move 4 or 8 bytes");
    Fiber *me = self;
    memcpy(&me->warp->in[me->lane], &value, sizeof value);
    meet_warp(operation, mask);
    if (mask >> source & 1) memcpy(&value, &me->warp->out[source], sizeof value);
    else memset(&value, 0xFF, sizeof value);
    return value;
}

inline unsigned vote(const Operation *operation, uint32_t mask, bool yes) {
    return (unsigned)shuffle<uint64_t>(operation, mask, yes, self->lane);
}

inline void check_aligned(const void *address, const char *what) {
    if ((uintptr_t)address % 16) stop("%s: address %p is no multiple of 16", what, address);
}

// A lane reads its row when it comes, so that what another lane writes later is missed, as it may be on a GPU.
inline const Warp &load_rows(const Operation *operation, const void *row) {
    Fiber *me = self;
    check_aligned(row, operation->name);
    memcpy(me->warp->rows_in[me->lane], row, 16);
    meet_warp(operation, UINT32_MAX);
    return *me->warp;
}

// ----------------------------------------------------------------------------
// Static shared memory. The variables declared __shared__ are those of the executable's thread-local ones that lie in a function.

struct Piece { ptrdiff_t offset; size_t size; };  // offset: from the variable `self` of the same OS thread

inline std::vector<Piece> shared_variables;
inline size_t shared_variables_bytes;

inline void find_shared_variables() {
    int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    size_t bytes = (size_t)lseek(file, 0, SEEK_END);
    char *start = (char *)mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    if (start == MAP_FAILED) stop("cannot read /proc/self/exe, where the names of __shared__ variables are");
    close(file);
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)start;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(start + header->e_shoff);
    ptrdiff_t base = -1;
    for (unsigned s = 0; s < header->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB) continue;
        const Elf64_Sym *symbols = (const Elf64_Sym *)(start + sections[s].sh_offset);
        const char *names = start + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++) {
            if (ELF64_ST_TYPE(symbols[i].st_info) != STT_TLS || symbols[i].st_shndx == SHN_UNDEF) continue;
            const char *name = names + symbols[i].st_name;
            if (strcmp(name, "_ZN11cuda_on_cpu4selfE") == 0) base = (ptrdiff_t)symbols[i].st_value;
            if (strncmp(name, "_ZZ", 3) != 0) continue;  // not in a function
            shared_variables.push_back({(ptrdiff_t)symbols[i].st_value, (size_t)symbols[i].st_size});
            shared_variables_bytes += (size_t)symbols[i].st_size;
        }
    }
    if (base < 0) stop("the program has no symbols, and __shared__ variables cannot be found: link without -s, do not strip it");
    for (Piece &piece : shared_variables) piece.offset -= base;
    munmap(start, bytes);
}

// Blocks that take turns on one worker each find their own.
inline void exchange_static_shared(Block *block, bool save) {
    unsigned char *kept = block->static_shared.data();
    for (const Piece &piece : shared_variables) {
        char *shared = (char *)&self + piece.offset;
        if (save) memcpy(kept, shared, piece.size);
        else memcpy(shared, kept, piece.size);
        kept += piece.size;
    }
}

// ----------------------------------------------------------------------------
// Workers and launches

inline std::mutex idle_mutex;
inline std::vector<Block *> &idle_blocks = *new std::vector<Block *>;  // with their stacks, kept for later launches

inline Block *take_block() {
    std::lock_guard<std::mutex> lock(idle_mutex);
    if (idle_blocks.empty()) return new Block();
    Block *block = idle_blocks.back();
    idle_blocks.pop_back();
    return block;
}

// Blocks start in ascending order but for random places among 16 neighbours: a GPU starts them in ascending order, more or
// less, and kernels with a block that waits for an earlier one rely on it.
inline uint64_t block_in_order(const Launch *launch, uint64_t number) {
    uint64_t first = number / 16 * 16, order[16];
    std::iota(order, order + 16, first);
    std::minstd_rand random((unsigned)mix(mix(seed, launch->number), first));
    std::shuffle(order, order + std::min<uint64_t>(16, launch->count - first), random);
    return order[number - first];
}

// Stacks of one size would have their tops in the same few cache lines of every set, so each starts at another offset.
inline void make_fiber(Fiber *fiber, unsigned number) {
    size_t bytes = GUARD_BYTES + STACK_BYTES;
    char *memory = (char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0)
        stop("no memory for the stack of a thread: smaller blocks or fewer workers (CUDA_ON_CPU_WORKERS) need less");
    fiber->stack = memory + GUARD_BYTES;
    fiber->stack_bytes = STACK_BYTES;
    size_t offset = 64 + number * 1088 % (32 << 10);  // for a debugger, the zeros there end the stack
    make_context(&fiber->context, memory + GUARD_BYTES, STACK_BYTES - offset, fiber_main);
}

inline void start_block(Block *block, Launch *launch, uint64_t number, Fiber *home) {
    dim3 size = launch->block;
    block->launch = launch;
    block->index = {(unsigned)(number % launch->grid.x), (unsigned)(number / launch->grid.x % launch->grid.y),
                    (unsigned)(number / launch->grid.x / launch->grid.y)};
    block->thread_count = block->alive = size.x * size.y * size.z;
    block->runnable = block->at_barrier = block->votes = 0;
    block->random_state = mix(mix(seed, launch->number), number);
    block->restless = 0xFFFu >> 4 * (block->random_state % 3);  // long turns in some blocks, short ones in others
    block->turns = 0;
    block->home = home;
    block->engine.reset();
    for (unsigned i = 0; i < block->thread_count; i++) {
        Fiber *fiber = &block->fibers[i];
        Warp *warp = &block->warps[i / LANES];
        if (!fiber->stack) make_fiber(fiber, i);
        fiber->block = block;
        fiber->warp = warp;
        fiber->lane = i % LANES;
        fiber->index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
        fiber->copies.clear();
        fiber->groups = 0;
        if (i % LANES == 0) warp->alive = warp->waiting = 0;
        warp->alive |= 1u << i % LANES;
        warp->runnable = warp->alive;
        block->runnable |= 1u << i / LANES;
    }
    block->current = random_bit(block->runnable, random_bits(block));
    block->static_shared.assign(shared_variables_bytes, 0xFF);
    free(block->dynamic_shared);
    block->dynamic_shared = NULL;
    if (!launch->shared_bytes) return;  // else exactly so many, that AddressSanitizer sees an access past the end
    if (posix_memalign((void **)&block->dynamic_shared, 1024, launch->shared_bytes) != 0)
        stop("no memory for %zu bytes of shared memory", launch->shared_bytes);
    memset(block->dynamic_shared, 0xFF, launch->shared_bytes);
}

// Handles SIGSEGV: a fiber that came to the guard page below its stack.
inline void explain_overflow(int number, siginfo_t *info, void *) {
    if (self && (uintptr_t)self->stack - (uintptr_t)info->si_addr <= GUARD_BYTES) {
        static const char text[] = "error: a thread needs more than its 256 KiB of stack (STACK_BYTES in dev/cuda_on_cpu.h)\n";
        _exit(write(2, text, sizeof text - 1) < 0 ? 2 : 1);
    }
    signal(number, SIG_DFL);  // and fault again
}

// All blocks of a worker sleep. Their time comes as others have their turns, or, if all workers sleep, it jumps to the first that
// wakes. If it has jumped by far more than kernels have reason to sleep, threads wait in loops for what nobody will do.
inline void wait_for_sleepers(Launch *launch, unsigned worker, const std::vector<Block *> &blocks) {
    uint64_t wakes = UINT64_MAX;
    for (const Block *block : blocks)
        for (const Fiber *fiber : block->sleeping) wakes = std::min(wakes, fiber->wakes);
    std::unique_lock<std::mutex> lock(launch->sleep_mutex);
    launch->asleep[worker] = wakes;
    for (;;) {
        const uint64_t now = launch->clock, first = *std::min_element(launch->asleep.begin(), launch->asleep.end());
        if (now < first) {
            launch->clock = first;
            launch->all_slept += first - now;
            if (launch->all_slept > 200 * LONGEST_SLEEP) report_deadlock(blocks[0], "wait, as all other blocks do");
        }
        if (wakes <= launch->clock) break;
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
    }
    launch->asleep[worker] = 0;
}

// Takes blocks until none is left. A block that gives way, for it waits for another, gets company on the same worker after a
// while, and one that sleeps at once; so up to RESIDENT_MAX blocks are under way, as several are on a multiprocessor.
enum { RESIDENT_MAX = 32 };
inline void run_blocks(Launch *launch, unsigned worker) {
    alignas(16) char signal_stack[64 << 10];  // a fiber's own is full when the handler is needed
    stack_t stack = {}, stack_before;
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    Fiber home = {};
    std::vector<Block *> resident;
    unsigned gave_way = 0, asleep = 0, turn = 0;  // asleep: so many blocks, one after the other
    for (;;) {
        const bool company = gave_way > 16 * resident.size() || asleep >= resident.size();
        if (resident.empty() || (company && resident.size() < RESIDENT_MAX)) {
            uint64_t number = launch->next_block++;
            if (number < launch->count) {
                resident.push_back(take_block());
                start_block(resident.back(), launch, block_in_order(launch, number), &home);
                asleep = 0;
            } else if (resident.empty()) break;
            gave_way = 0;
        }
        if (asleep >= resident.size()) {
            wait_for_sleepers(launch, worker, resident);
            asleep = 0;
        }
        size_t which = turn++ % resident.size();
        Block *block = resident[which];
        exchange_static_shared(block, false);
        Fiber *next = choose(block);
        asleep = next == &home ? asleep + 1 : 0;
        if (next != &home) switch_fiber(&home, next);
        self = NULL;
        if (block->alive) {
            exchange_static_shared(block, true);
            gave_way++;
            std::this_thread::yield();
        } else {
            std::lock_guard<std::mutex> lock(idle_mutex);
            idle_blocks.push_back(block);
            resident.erase(resident.begin() + (ptrdiff_t)which);
            gave_way = 0;
        }
    }
    sigaltstack(&stack_before, NULL);
    std::lock_guard<std::mutex> lock(launch->sleep_mutex);
    launch->asleep[worker] = UINT64_MAX;
}

enum { SHARED_BYTES = 48 << 10 };  // without a request for more
inline __thread cudaError_t last_error;
inline std::mutex limits_mutex;
inline std::map<void (*)(), size_t> shared_limits;  // of kernels that asked for more

inline cudaError_t result(cudaError_t error) { return error == cudaSuccess ? error : last_error = error; }
inline size_t shared_bytes_optin() { return (size_t)environment("CUDA_ON_CPU_SHARED_KB", 227, 48, 1024) << 10; }
inline size_t memory_bytes() { return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE); }

// (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")
inline cudaError_t launch_error(void (*kernel)(), dim3 grid, dim3 block, size_t shared_bytes) {
    bool grid_fits = grid.x - 1 < INT32_MAX && grid.y - 1 < UINT16_MAX && grid.z - 1 < UINT16_MAX;  // 0 - 1 is too large, too
    bool block_fits = block.x - 1 < 1024 && block.y - 1 < 1024 && block.z - 1 < 64 && block.x * block.y * block.z <= 1024;
    if (!grid_fits || !block_fits) return cudaErrorInvalidConfiguration;
    std::lock_guard<std::mutex> lock(limits_mutex);
    size_t limit = std::max<size_t>(SHARED_BYTES, shared_limits[kernel]);
    return shared_bytes > std::min(limit, shared_bytes_optin()) ? cudaErrorInvalidValue : cudaSuccess;
}

inline void run_launch(Launch *launch) {
    static std::once_flag found;
    std::call_once(found, find_shared_variables);
    struct sigaction action;
    if (sigaction(SIGSEGV, NULL, &action) == 0 && action.sa_handler == SIG_DFL) {  // AddressSanitizer has a message of its own
        action.sa_sigaction = explain_overflow;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, NULL);
    }
    static std::atomic<uint64_t> launches;
    launch->number = launches++;
    launch->count = (uint64_t)launch->grid.x * launch->grid.y * launch->grid.z;
    launch->asleep.assign((size_t)std::max<uint64_t>(1, std::min<uint64_t>(worker_count, launch->count)), 0);
    std::vector<std::thread> helpers;  // anew each time, so that a process has them after a fork, too
    for (unsigned i = 1; i < launch->asleep.size(); i++) helpers.emplace_back(run_blocks, launch, i);
    run_blocks(launch, 0);
    for (std::thread &helper : helpers) helper.join();
}

// What LAUNCH_KERNEL calls with the kernel's arguments.
template <typename... Parameters>
inline auto launcher(const char *name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t) {
    return [=](Parameters... arguments) {
        if (result(launch_error((void (*)())kernel, grid, block, shared_bytes)) != cudaSuccess) return;
        Launch launch = {name, grid, block, shared_bytes, [&] { kernel(arguments...); }, 0, 0, {0}};
        run_launch(&launch);
    };
}

}  // namespace cuda_on_cpu

// ----------------------------------------------------------------------------
// The runtime: devices, errors, streams, events. All work is done when a call returns. ("CUDA Runtime API")

inline cudaError_t cudaGetLastError(void) { return std::exchange(cuda_on_cpu::last_error, cudaSuccess); }
inline const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    }
    return "unrecognized error code";
}

inline cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return cuda_on_cpu::result(device ? cudaErrorInvalidDevice : cudaSuccess); }
inline cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    size_t shared = cuda_on_cpu::shared_bytes_optin();
    *properties = {"CPU, emulating a GPU", cuda_on_cpu::memory_bytes(), cuda_on_cpu::SHARED_BYTES, shared, shared + 1024,
                   9, 0, 3, warpSize, cuda_on_cpu::MAX_THREADS, 2048, 32 << 20};
    const char *capability = getenv("CUDA_ON_CPU_CAPABILITY");
    char more;
    if (capability && *capability && (capability[strspn(capability, "0123456789.")] ||
        sscanf(capability, "%3d.%3d%c", &properties->major, &properties->minor, &more) != 2))
        cuda_on_cpu::stop("CUDA_ON_CPU_CAPABILITY is '%s'; expected two numbers, as in 9.0", capability);
    return cudaSetDevice(device);
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)properties.sharedMemPerBlockOptin; break;
    default: return cuda_on_cpu::result(cudaErrorInvalidValue);
    }
    return error;
}

template <typename... Parameters>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int value) {
    if (value < 0 || (size_t)value > cuda_on_cpu::shared_bytes_optin()) return cuda_on_cpu::result(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> lock(cuda_on_cpu::limits_mutex);
    cuda_on_cpu::shared_limits[(void (*)())kernel] = (size_t)value;
    return cudaSuccess;
}

inline cudaError_t cudaMemset(void *to, int byte, size_t bytes) { return std::fill_n((char *)to, bytes, (char)byte), cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t = NULL) { return cudaMemset(to, byte, bytes); }
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    return std::copy_n((const char *)from, bytes, (char *)to), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t = NULL) {
    return cudaMemcpy(to, from, bytes, kind);
}

// All NaN at first, and exactly the size asked for.
template <typename T> inline cudaError_t cudaMalloc(T **to, size_t bytes) {
    *to = NULL;
    if (bytes > cuda_on_cpu::memory_bytes() || (bytes && posix_memalign((void **)to, 256, bytes) != 0))
        return cuda_on_cpu::result(cudaErrorMemoryAllocation);
    return cudaMemset(*to, 0xFF, bytes);
}
template <typename T> inline cudaError_t cudaMallocHost(T **to, size_t bytes) { return cudaMalloc(to, bytes); }
inline cudaError_t cudaFree(void *pointer) { return free(pointer), cudaSuccess; }
inline cudaError_t cudaFreeHost(void *pointer) { return free(pointer), cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { return *left = *all = cuda_on_cpu::memory_bytes(), cudaSuccess; }

inline cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = new StreamOnCpu(), cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreate(stream); }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) { return cudaSuccess; }

inline cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = new EventOnCpu(), cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = NULL) {
    return event->time = std::chrono::steady_clock::now(), cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count(), cudaSuccess;
}

// ----------------------------------------------------------------------------
// Barriers, votes, shuffles, atomics. ("C++ Language Extensions" in the CUDA C++ Programming Guide)

inline void __syncthreads(void) { cuda_on_cpu::meet_block(&cuda_on_cpu::SYNCTHREADS, false); }
inline int __syncthreads_or(int yes) { return cuda_on_cpu::meet_block(&cuda_on_cpu::SYNCTHREADS_OR, yes) != 0; }
inline int __syncthreads_and(int yes) { return cuda_on_cpu::meet_block(&cuda_on_cpu::SYNCTHREADS_AND, !yes) == 0; }
inline int __syncthreads_count(int yes) { return (int)cuda_on_cpu::meet_block(&cuda_on_cpu::SYNCTHREADS_COUNT, yes); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFF) { cuda_on_cpu::meet_warp(&cuda_on_cpu::SYNCWARP, mask); }
inline int __any_sync(unsigned mask, int yes) { return cuda_on_cpu::vote(&cuda_on_cpu::ANY, mask, yes) != 0; }
inline int __all_sync(unsigned mask, int yes) { return cuda_on_cpu::vote(&cuda_on_cpu::ALL, mask, !yes) == 0; }
inline unsigned __ballot_sync(unsigned mask, int yes) { return cuda_on_cpu::vote(&cuda_on_cpu::BALLOT, mask, yes); }

// A warp falls into segments of `width` lanes, a power of 2. A source outside of the segment is the lane itself.
template <typename T> inline T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
    unsigned in_segment = (unsigned)(width - 1), segment = cuda_on_cpu::self->lane & ~in_segment;
    return cuda_on_cpu::shuffle(&cuda_on_cpu::SHFL, mask, value, segment | ((unsigned)source & in_segment));
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    unsigned lane = cuda_on_cpu::self->lane, place = lane & (unsigned)(width - 1);
    return cuda_on_cpu::shuffle(&cuda_on_cpu::SHFL_UP, mask, value, delta <= place ? lane - delta : lane);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    unsigned lane = cuda_on_cpu::self->lane, place = lane & (unsigned)(width - 1);
    return cuda_on_cpu::shuffle(&cuda_on_cpu::SHFL_DOWN, mask, value, place + delta < (unsigned)width ? lane + delta : lane);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
    unsigned lane = cuda_on_cpu::self->lane, source = lane ^ (unsigned)bits, end = (lane | (unsigned)(width - 1)) + 1;
    return cuda_on_cpu::shuffle(&cuda_on_cpu::SHFL_XOR, mask, value, source < end ? source : lane);
}

inline void __nanosleep(unsigned ns) { if (cuda_on_cpu::self) cuda_on_cpu::fall_asleep(cuda_on_cpu::self, ns); }
inline int load_acquire(const int *address) {
    cuda_on_cpu::maybe_give_way();
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_release(int *address, int value) {
    cuda_on_cpu::maybe_give_way();
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
    cuda_on_cpu::Fiber *me = cuda_on_cpu::self;  // now and then other blocks come next: one may have waited for it, and be too early
    if (me && cuda_on_cpu::random_bits(me->block) & 1) cuda_on_cpu::switch_fiber(me, me->block->home);
}
inline void __threadfence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// common_type is T itself, and leaves it to the pointer to say what T is.
#define ATOMIC(name, expression)                                                                \
    template <typename T> inline T name(T *address, typename std::common_type<T>::type value) { \
        return cuda_on_cpu::atomic_update(address, [=](T before) -> T { return expression; });  \
    }
ATOMIC(atomicAdd, before + value)
ATOMIC(atomicMax, before < value ? value : before)
ATOMIC(atomicMin, value < before ? value : before)
ATOMIC(atomicExch, ((void)before, value))
#undef ATOMIC
template <typename T>
inline T atomicCAS(T *address, typename std::common_type<T>::type expected, typename std::common_type<T>::type value) {
    cuda_on_cpu::maybe_give_way();
    __atomic_compare_exchange(address, &expected, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}

// ----------------------------------------------------------------------------
// What gpt/cuda.cuh has in PTX, where the layouts are described. (PTX ISA: "ldmatrix", "mma", "cp.async")

inline void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    const cuda_on_cpu::Warp &warp = cuda_on_cpu::load_rows(&cuda_on_cpu::LDMATRIX, row);
    unsigned lane = cuda_on_cpu::self->lane, g = lane / 4, t = lane % 4;
    for (unsigned m = 0; m < 4; m++) memcpy(&r[m], &warp.rows[8 * m + g][2 * t], 4);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    const cuda_on_cpu::Warp &warp = cuda_on_cpu::load_rows(&cuda_on_cpu::LDMATRIX_TRANS, row);
    unsigned lane = cuda_on_cpu::self->lane, g = lane / 4, t = lane % 4;
    for (unsigned m = 0; m < 4; m++) r[m] = warp.rows[8 * m + 2 * t][g] | (uint32_t)warp.rows[8 * m + 2 * t + 1][g] << 16;
}

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    cuda_on_cpu::Warp &warp = *cuda_on_cpu::self->warp;
    unsigned lane = cuda_on_cpu::self->lane, g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; i++) memcpy(&warp.a[g + i % 2 * 8][2 * t + i / 2 * 8], &a[i], 4);
    memcpy(&warp.b[g][2 * t], &b0, 4);
    memcpy(&warp.b[g][2 * t + 8], &b1, 4);
    memcpy(&warp.d[g][2 * t], &d[0], 8);
    memcpy(&warp.d[g + 8][2 * t], &d[2], 8);
    cuda_on_cpu::meet_warp(&cuda_on_cpu::MMA, UINT32_MAX);
    memcpy(&d[0], &warp.d[g][2 * t], 8);
    memcpy(&d[2], &warp.d[g + 8][2 * t], 8);
}

// From its start on, what the copy overwrites is lost; what it brings is there after the wait, and never without.
inline void cp_async_16(void *to, const void *from, bool valid) {
    cuda_on_cpu::check_aligned(to, "cp.async to");
    cuda_on_cpu::check_aligned(from, "cp.async from");
    (void)*(const volatile char *)from;  // must be readable even if not valid
    memset(to, 0xFF, 16);
    cuda_on_cpu::Fiber *me = cuda_on_cpu::self;
    me->copies.push_back({to, from, valid, me->groups});
}
inline void cp_async_commit(void) { cuda_on_cpu::self->groups++; }
template <int N> inline void cp_async_wait(void) {
    cuda_on_cpu::Fiber *me = cuda_on_cpu::self;
    size_t done = 0;
    for (; done < me->copies.size() && me->copies[done].group + N < me->groups; done++) {
        const cuda_on_cpu::Copy &copy = me->copies[done];
        if (copy.valid) memcpy(copy.to, copy.from, 16);
        else memset(copy.to, 0, 16);
    }
    me->copies.erase(me->copies.begin(), me->copies.begin() + (ptrdiff_t)done);
}

#endif

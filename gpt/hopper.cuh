// What Hopper GPUs (compute capability 9.0) have that others have not, each instruction under a name: products by a warpgroup
// out of shared memory, copies of whole tiles by a tensor map, and the barriers on which their arrival is awaited.
//
// nvcc makes code of them for sm_90a only; for other GPUs the same sources compile, and a kernel that calls one of them there
// traps. Other compilers take dev/hopper_on_cpu.h, which has the same functions on the CPU, and reports their misuse.
// References are to NVIDIA's PTX ISA manual, https://docs.nvidia.com/cuda/parallel-thread-execution/
//
// A tile here is a "slab" of up to 256 rows of 64 bf16 (128 bytes) in shared memory, which starts at a multiple of 1024 bytes.
// Chunk c (16 bytes) of row r lies where chunk c ^ (r % 8) would, as in gpt/tile.cuh: the manual's "128-byte swizzle". A matrix of
// 128 columns is two slabs, its left half and its right half.
//
// Copies and products read and write shared memory on their own, past the threads ("async proxy"). So what threads wrote
// there they must pass on by fence_async() and a barrier before a copy or product reads it.
#ifndef GPT_HOPPER_CUH
#define GPT_HOPPER_CUH

#include "gpt/cuda.cuh"

struct Barrier { uint64_t state; };  // an mbarrier, in shared memory

// What to add to a tile's descriptor (below) for the next 16 of k: with k along its rows, 16 elements on; if transposed, 16 rows
// on.
static constexpr uint64_t NEXT_K = 16 * 2 >> 4, NEXT_K_TRANSPOSED = 16 * 128 >> 4;

#ifdef __CUDACC__
#include <cuda.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER_PTX(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER_PTX(...) __trap()
#endif

// ----------------------------------------------------------------------------
// Barriers. One goes from phase to phase; a phase ends when `arrivals` threads have arrived and as many bytes have been copied as
// were expected in it. barrier_wait(barrier, n % 2) waits for the end of phase n, counted from 0, and must be called
// before phase n + 1 ends. So of a barrier in its first phase parity 1 is over already. ("mbarrier")

// By one thread; then barrier_init_fence() by it and __syncthreads() by all, before any other use.
DEVICE void barrier_init(Barrier *barrier, unsigned arrivals) {
    HOPPER_PTX("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
DEVICE void barrier_init_fence(void) { HOPPER_PTX("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(Barrier *barrier) {
    HOPPER_PTX("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

// One arrival, and so many bytes more until the phase ends. Call it before the copies that bring them.
DEVICE void barrier_expect(Barrier *barrier, unsigned bytes) {
    HOPPER_PTX("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(Barrier *barrier, unsigned parity) {
    HOPPER_PTX("{\n.reg .pred over;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
               "@!over bra again;\n}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// __syncthreads for the first `threads` threads that come to the barrier `id` (1 to 15), whole warps. Those that arrive are
// counted, and go on without waiting. ("barrier")
DEVICE void named_barrier_sync(int id, int threads) {
    HOPPER_PTX("barrier.cta.sync.aligned %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int id, int threads) {
    HOPPER_PTX("barrier.cta.arrive.aligned %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// ----------------------------------------------------------------------------
// Copies, each by one thread. ("Data Movement and Conversion Instructions: Bulk copy", "... Tensor copy")

// What the copy engine has to know of a tensor; kernels have it as a parameter `const __grid_constant__ TensorMap map`.
struct TensorMap { CUtensorMap map; };

// A map of `tensor` (B, T, slots, HS), to be copied by boxes of `rows` rows (up to 256) of 64 columns of one slot. A packed QKV,
// (B, T, 3 C), has 3 NH slots. False after fail().
static inline bool tensor_map_make(TensorMap *map, const bf16 *tensor, int B, int T, int slots, int HS, int rows) {
    static decltype(&cuTensorMapEncodeTiled) encode;  // asked of the runtime, so that nothing has to link with libcuda
    cudaDriverEntryPointQueryResult found;
    if (!encode) cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault, &found);
    if (!encode) return fail("this driver has no tensor maps (cuTensorMapEncodeTiled); they came with CUDA 12.0");
    const cuuint64_t sizes[] = {(cuuint64_t)HS, (cuuint64_t)T, (cuuint64_t)slots, (cuuint64_t)B}, row = sizes[0] * sizeof(bf16);
    const cuuint64_t strides[] = {slots * row, row, row * slots * T};  // bytes; that of the columns goes without saying
    const cuuint32_t box[] = {64, (cuuint32_t)rows, 1, 1}, steps[] = {1, 1, 1, 1};
    CUresult result = encode(&map->map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)tensor, sizes, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return true;
    return fail("no tensor map of a (%d, %d, %d, %d) tensor at %p by %d rows: driver error %d", B, T, slots, HS,
                (const void *)tensor, rows, (int)result);
}

// Starts to copy the box from (batch, row, slot, column) on to a slab. What lies outside of the tensor, `row` may be negative, too,
// becomes 0. The barrier counts all of the box's rows · 128 bytes.
DEVICE void tensor_load(void *to, const TensorMap *map, Barrier *barrier, int column, int row, int slot, int batch) {
    HOPPER_PTX("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(slot), "r"(batch)
               : "memory");
}

// Starts to copy a slab to the tensor; what would lie beyond its end is left out. A row below 0, which the manual allows, is an
// illegal instruction to an H200.
DEVICE void tensor_store(const TensorMap *map, const void *from, int column, int row, int slot, int batch) {
    HOPPER_PTX("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(map), "r"(shared_address(from)), "r"(column), "r"(row), "r"(slot), "r"(batch) : "memory");
}

// Starts to copy `bytes` bytes as they are, from device to shared memory; all three are multiples of 16.
DEVICE void bulk_load(void *to, const void *from, unsigned bytes, Barrier *barrier) {
    HOPPER_PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Starts to copy `bytes` bytes of shared to device memory as they are, or to add them there as floats; all multiples of 16.
DEVICE void bulk_store(void *to, const void *from, unsigned bytes) {
    HOPPER_PTX("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
DEVICE void bulk_add(float *to, const float *from, unsigned bytes) {
    HOPPER_PTX("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// Stores that this thread started before a commit form a group. store_wait_read<N> waits until all but its N newest groups have
// been read, so that their slabs may be overwritten, or the block may end; store_wait<N> until they are in device memory.
DEVICE void store_commit(void) { HOPPER_PTX("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEVICE void store_wait_read(void) { HOPPER_PTX("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory"); }
template <int N> DEVICE void store_wait(void) { HOPPER_PTX("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory"); }

// Between what threads have written to shared memory and its use by copies or products; or between what a thread knows of device
// memory, by load_acquire(), and copies there that it starts next.
DEVICE void fence_async(void) { HOPPER_PTX("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_async_global(void) { HOPPER_PTX("fence.proxy.async.global;" ::: "memory"); }

// ----------------------------------------------------------------------------
// By a warp, and by a warpgroup

// Stores four 8 x 8 matrices of 16-bit elements as ldmatrix_x4 loads them. ("stmatrix")
DEVICE void stmatrix_x4(void *row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    HOPPER_PTX("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(row)), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// How many registers each thread of this warpgroup has from now on, a multiple of 8. It needs __launch_bounds__(threads, 1). All
// start with 65536 / threads, rounded down to a multiple of 8; there are no more, and an increase waits until others have given up
// as many. ("setmaxnreg")
template <int N> DEVICE void registers_increase(void) { HOPPER_PTX("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> DEVICE void registers_decrease(void) { HOPPER_PTX("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }

// ----------------------------------------------------------------------------
// Products: D (64 x N, fp32) = A (64 x 16) B (16 x N), or += with `accumulate`, by the four warps of a warpgroup together (threads
// 128 i to 128 i + 127), all of which give the same arguments. ("Asynchronous Warpgroup Level Matrix Instructions")
//
// Warp w of the four has rows 16 w to 16 w + 15. With g = lane / 4 and t = lane % 4 a lane holds of D
//     d[4 j], d[4 j + 1]: row 16 w + g,      columns 8 j + 2 t and + 1
//     d[4 j + 2], d[4 j + 3]: row 16 w + g + 8,  the same columns         ("Register Fragments for wgmma.mma_async.m64nNk16")
// and of an A in registers what mma_m16n8k16 has of its 16 rows. Else A and B are in shared memory, named by descriptors.
//
// The order is: registers_settled(d), and of A in registers; wgmma_fence(); products; wgmma_commit(), which makes a group of them;
// wgmma_wait<N>(), until at most the N newest groups are under way; registers_settled(d). Until then no one may touch d, or
// write to A or B. Products on the same d may follow each other without waiting.
//
// ptxas has to see which registers are in use from a product's start to its wait. Where it cannot, as across rounds of a loop or a
// branch, or by a copy of d, it makes each product of the kernel wait at once, which is right but slow, and says "wgmma serialized";
// tests/run.sh takes that for an error.

// A tile as a factor. If k runs along its rows, A is (m, k) and B (n, k): groups of eight rows lie `stride_bytes` apart, 1024, and
// leading_bytes plays no role. If the factor is transposed, A is (k, m) and B (k, n): stride_bytes is the same, and the next
// 64 of n are in a slab leading_bytes further. The next 16 of k: + NEXT_K, or NEXT_K_TRANSPOSED; after 64 of k along
// the rows it is the next slab. ("Matrix Descriptor", "Strides")
DEVICE uint64_t matrix_descriptor(const void *tile, unsigned leading_bytes, unsigned stride_bytes) {
    return (uint64_t)1 << 62  // 128-byte swizzle
        | (uint64_t)(stride_bytes >> 4) << 32 | (uint64_t)(leading_bytes >> 4) << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}

DEVICE void wgmma_fence(void) { HOPPER_PTX("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit(void) { HOPPER_PTX("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait(void) { HOPPER_PTX("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }

// Tells the compiler that all of `registers` is needed and may change here, so that it moves no access to them across: it does
// not know that products go on reading and writing them.
template <int N> DEVICE void registers_settled(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i]) :: "memory");
}
template <int N> DEVICE void registers_settled(uint32_t (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(registers[i]) :: "memory");
}
template <int N> DEVICE void registers_settled(uint32_t (&registers)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) registers_settled(registers[i]);
}

// wgmma<A_TRANSPOSED, B_TRANSPOSED>(d, a, b, accumulate) and, with A in registers, wgmma_registers<B_TRANSPOSED>(d, a, b,
// accumulate). N, which is twice the size of d, is 64 or 128. ("wgmma.mma_async")
//
// The instruction names all N / 2 registers of d, its operands 0 and up: D_n lists them as operands, D_n_TEXT in the text. The
// numbers that DEFINE_WGMMA takes after N and N / 2 are those of the operands that follow.
#define D_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_16(i) D_4(i), D_4(i + 4), D_4(i + 8), D_4(i + 12)
#define D_32 D_16(0), D_16(16)
#define D_64 D_32, D_16(32), D_16(48)
#define D_32_TEXT "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D_64_TEXT D_32_TEXT ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_TEXT(N, HALF, LEFT, B, ACCUMULATE, TRANSPOSED)                                                         \
    "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N    \
    "k16.f32.bf16.bf16 {" D_##HALF##_TEXT "}, " LEFT ", " B ", accumulate, 1, 1, " TRANSPOSED ";\n}"
#define DEFINE_WGMMA(N, HALF, P0, P1, P2, P3, P4, P5, P6)                                                                          \
    template <bool A_TRANSPOSED, bool B_TRANSPOSED> DEVICE void wgmma(float (&d)[HALF], uint64_t a, uint64_t b, bool accumulate) { \
        HOPPER_PTX(WGMMA_TEXT(N, HALF, "%" #P0, "%" #P1, "%" #P2, "%" #P3 ", %" #P4)                                               \
                   : D_##HALF : "l"(a), "l"(b), "r"((int)accumulate), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));                       \
    }                                                                                                                              \
    template <bool B_TRANSPOSED>                                                                                                   \
    DEVICE void wgmma_registers(float (&d)[HALF], const uint32_t (&a)[4], uint64_t b, bool accumulate) {                           \
        HOPPER_PTX(WGMMA_TEXT(N, HALF, "{%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}", "%" #P4, "%" #P5, "%" #P6)                      \
                   : D_##HALF : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(B_TRANSPOSED));      \
    }
DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
#else
#include "dev/hopper_on_cpu.h"
#endif

// Is the current device such a GPU, and does this program have code for it? If not, false after fail("why").
#ifdef __CUDACC__
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
static __global__ __launch_bounds__(64) void hopper_probe(void) {}  // tells by its bound for what it was compiled
#else
static __global__ __launch_bounds__(32) void hopper_probe(void) {}
#endif
#endif
static inline bool hopper_available(void) {
    const int SHARED = 227 * 1024;  // bytes a thread block can have
    int device, major, minor, shared;
    if (cudaGetDevice(&device) != cudaSuccess) return fail("there is no GPU");
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (major != 9 || minor != 0)
        return fail("the kernels for Hopper need compute capability 9.0, and this GPU has %d.%d", major, minor);
    if (shared < SHARED)
        return fail("the kernels for Hopper need %d KiB of shared memory a block, and this GPU has %d", SHARED / 1024, shared / 1024);
#ifdef __CUDACC__
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, hopper_probe));
    if (attributes.maxThreadsPerBlock != 64)
        return fail("this program was built without the kernels for Hopper; build it with GPU=9.0a");
#endif
    return true;
}

// ----------------------------------------------------------------------------
// Pipelines and products of tiles, as the attention kernels have them

// Where a thread is in a ring of N places for tiles, and the parity to wait for with the barrier of that place: a consumer's, who
// waits for what comes. The producer waits for the phase before, parity ^ 1, until the place is free.
template <int N> struct Ring {
    int place = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance(void) {
        if (++place == N) place = 0, parity ^= 1;
    }
    __device__ __forceinline__ int before(void) const { return (place == 0 ? N : place) - 1; }  // the place before this one
};

// Columns 16 k to 16 k + 15 of a result D, rounded to bf16, as A in registers: each lane has what it needs.
template <int N> DEVICE void pack_left(uint32_t (&a)[4], const float (&d)[N], int k) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack_bf16(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
}

// Starts D = A Bᵀ, or with ADD D += A Bᵀ, a group of its own: 64 rows of a tile of COLS columns by N rows of another, whose slabs have
// a_rows and b_rows rows; or with A in registers.
template <int COLS, bool ADD = false, int HALF>
DEVICE void start_product_abt(float (&d)[HALF], const bf16 *a, int a_rows, const bf16 *b, int b_rows) {
    registers_settled(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < COLS / 16; k++)
        wgmma<false, false>(d, matrix_descriptor(a + k / 4 * a_rows * 64, 0, 1024) + k % 4 * NEXT_K,
                            matrix_descriptor(b + k / 4 * b_rows * 64, 0, 1024) + k % 4 * NEXT_K, ADD || k > 0);
    wgmma_commit();
}
template <int COLS, bool ADD = false, int HALF>
DEVICE void start_product_abt(float (&d)[HALF], uint32_t (&a)[COLS / 16][4], const bf16 *b, int b_rows) {
    registers_settled(d);
    registers_settled(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < COLS / 16; k++)
        wgmma_registers<false>(d, a[k], matrix_descriptor(b + k / 4 * b_rows * 64, 0, 1024) + k % 4 * NEXT_K, ADD || k > 0);
    wgmma_commit();
}

// Starts D (64, COLS) += A B, a group of its own: A has 16 K16 columns, and B is as many rows of a tile of COLS columns.
template <int COLS, int K16>
DEVICE void start_product_ab(float (&d)[COLS / 2], uint32_t (&a)[K16][4], const bf16 *b, int b_rows) {
    registers_settled(d);
    registers_settled(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K16; k++)
        wgmma_registers<true>(d, a[k], matrix_descriptor(b, b_rows * 128, 1024) + k * NEXT_K_TRANSPOSED, true);
    wgmma_commit();
}

// Columns 16 k to 16 k + 15 of a result, rounded to bf16 by pack_left(), to 64 rows of a tile whose slabs have `rows` rows.
DEVICE void store_left(bf16 *tile, int rows, const uint32_t (&a)[4], int k) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, right = threadIdx.x % 32 / 16;
    stmatrix_x4(tile + k / 4 * rows * 64 + row * 64 + ((k % 4 * 2 + right) ^ row % 8) * 8, a[0], a[1], a[2], a[3]);
}

// Writes all of D (64, COLS), rounded, of each lane's two rows the first times scale[0], the second times scale[1].
template <int COLS> DEVICE void store_to_slabs(bf16 *tile, int rows, const float (&d)[COLS / 2], const float (&scale)[2]) {
#pragma unroll
    for (int k = 0; k < COLS / 16; k++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = pack_bf16(scale[i % 2] * d[8 * k + 2 * i], scale[i % 2] * d[8 * k + 2 * i + 1]);
        store_left(tile, rows, a, k);
    }
}
template <int COLS> DEVICE void store_to_slabs(bf16 *tile, int rows, const float (&d)[COLS / 2], float scale) {
    const float both[2] = {scale, scale};
    store_to_slabs<COLS>(tile, rows, d, both);
}

#endif

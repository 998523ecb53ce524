// What all CUDA sources here share: error checks, launches, and the PTX instructions in use, each under a name.
//
// nvcc compiles them for GPUs of compute capability 8.0 and later. Any other C++17 compiler takes dev/cuda_on_cpu.h instead,
// which runs the same kernels on the CPU and has the same functions as below, computed as the PTX manual describes them.
#ifndef GPT_CUDA_CUH
#define GPT_CUDA_CUH

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#else
#include "dev/cuda_on_cpu.h"
#endif

#include <stdint.h>
#include <string.h>

#include "gpt/error.h"

typedef __nv_bfloat16 bf16;

// ----------------------------------------------------------------------------
// Checks and launches

#define CUDA_CHECK(call) cuda_check(call, #call, __FILE__, __LINE__)

static inline void cuda_check(cudaError_t error, const char *call, const char *file, int line) {
    if (error != cudaSuccess) die("%s: %s (%s:%d)", call, cudaGetErrorString(error), file, line);
}

#ifdef __CUDACC__
static __global__ void code_probe(void) {}

// True if this program, which `make target` has built for GPUs of some capabilities, has code for the device. Else false after fail().
static inline bool gpu_has_code(const cudaDeviceProp &device, const char *built_for, const char *target) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, code_probe);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return fail("this program was built for GPUs of compute capability %s, and %s has %d.%d; build it with make %s GPU=%d.%d%s",
                    built_for, device.name, device.major, device.minor, target, device.major, device.minor,
                    device.major == 9 ? "a" : "");
    return CUDA_CHECK(error), true;
}
#endif

// LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...). A block gets more than 48 KiB of shared memory only on request.
// A kernel that is a template goes by a pointer: auto kernel = foo_kernel<64, true>; LAUNCH(kernel, ...).
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                                 \
    do {                                                                                                                       \
        if ((shared_bytes) > 48 * 1024)                                                                                        \
            CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(shared_bytes)));        \
        LAUNCH_KERNEL(kernel, grid, block, shared_bytes, stream, __VA_ARGS__);                                                 \
        CUDA_CHECK(cudaGetLastError());                                                                                        \
    } while (0)

// DYNAMIC_SHARED(memory): declares `unsigned char *memory`, the shared memory that the launch asked for, aligned to 1024 bytes.
// dev/cuda_on_cpu.h has its own two.
#ifdef __CUDACC__
#define LAUNCH_KERNEL(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

#define DEVICE static __device__ __forceinline__  // a function for kernels to use

// ----------------------------------------------------------------------------
// Two bf16 in one register, the lower half first in memory

DEVICE uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);  // rounds to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

DEVICE float2 unpack_bf16(uint32_t bits) {
    __nv_bfloat162 pair;
    memcpy(&pair, &bits, sizeof pair);
    return __bfloat1622float2(pair);
}

#ifdef __CUDACC__
// ----------------------------------------------------------------------------
// PTX. References are to NVIDIA's PTX ISA manual, https://docs.nvidia.com/cuda/parallel-thread-execution/

DEVICE uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane i gives the address of row i % 8 (16 bytes, aligned) of
// matrix i / 8. Of matrix m, lane i receives in r[m] the elements 2 * (i % 4) and + 1 of row i / 4. ("ldmatrix")
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// The same with each matrix transposed: lane i receives the elements i / 4 of rows 2 * (i % 4) and + 1.
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// One warp's tensor-core product: d (16 x 8, fp32) += a (16 x 16, bf16) b (16 x 8, bf16). With g = lane / 4, t = lane % 4 a lane
// holds of a: (g, 2t..+1), (g + 8, 2t..+1), (g, 2t + 8..+9), (g + 8, 2t + 8..+9); of b: (2t..+1, g), (2t + 8..+9, g);
// of d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). ("Matrix Fragments for mma.m16n8k16 with floating point type")
DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Starts a copy of 16 bytes from device to shared memory, or of 16 zeros if not valid; `from` must be an address inside the
// tensor all the same. Copies started before a commit form a group; cp_async_wait<N> waits until at most the N newest
// groups of this thread are still under way. Other threads see the data after a barrier only. ("cp.async")
DEVICE void cp_async_16(void *to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void cp_async_wait(void) { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// One thread block tells another that what it wrote is there: whoever reads the new value sees that, too. ("ld", "st")
DEVICE int load_acquire(const int *address) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
DEVICE void store_release(int *address, int value) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(address), "r"(value) : "memory");
}

// 2^x with a relative error of 2^-22; results below 2^-126 become 0. ("ex2")
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

#endif

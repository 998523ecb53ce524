// GPT-2 in C and CUDA on one NVIDIA GPU: kernels, the model, AdamW and the training loop. One file, to be read top to bottom.
//
//   make train_gpt2cu
//   ./train_gpt2cu --data book.txt                   trains a small model on a book (--help lists all options)
//   ./train_gpt2cu --model run --prompt "Once"       writes with it
//
//   1 the GPU    2 matrix products    3 layers    4 the model    5 AdamW    6 generating text    7 training
//
// It is train_gpt2.c's model, with the same options, data, checkpoints and logs (gpt/), and runs go on from one to the other. Weights
// and activations are bf16 here; sums, gradients of weights, AdamW's moments and the weights it updates are fp32.
//
// B batch, T sequence length, C channels, L layers, NH heads, HS = C / NH head size, V vocabulary, Vp = V rounded up to a multiple of
// 128; N = B T rows. All arrays are row-major; a shape stands beside each. A `d` before a name means the gradient of the loss with
// respect to it, and (+)= means = or, if the argument `add` is true, +=: the gradients of several batches are summed.
// Two runs give the same bits: no sum depends on the order in which threads happen to run.
//
// To see where a token goes: 7 reads it and sends it to the GPU (feed_next), 4 takes it through the layers of 3 (model_forward), to its
// loss (model_loss) and back (model_backward), 5 updates the weights with what came out (model_update).

#ifdef __CUDACC__
#include <cublasLt.h>
#endif

#include "attention.cuh"
#include "gpt/run.h"

// ---------------------------------------------------------------------------
// 1 The GPU

// What the process has one of.
static struct {
    cudaStream_t stream;  // all computation, in the order of the source
    cudaStream_t copies;  // of batches to the GPU, beside it
} gpu;

#ifndef BUILT_FOR
#define BUILT_FOR "this GPU"  // the compute capabilities that the Makefile built for
#endif

// Takes the first GPU and describes it in `name`. False after fail(): there is none, or none that this program runs on.
static bool gpu_start(char *name, size_t size) {
    int count = 0;
#ifdef __CUDACC__
    int driver, toolkit;
    CUDA_CHECK(cudaDriverGetVersion(&driver));  // 0 without one
    CUDA_CHECK(cudaRuntimeGetVersion(&toolkit));
    if (driver && driver / 1000 < toolkit / 1000)  // within a major version older drivers run newer programs
        return fail("the GPU's driver is for CUDA %d.%d, and this program was built with %d.%d; update the driver, or build with an older "
                    "toolkit", driver / 1000, driver % 1000 / 10, toolkit / 1000, toolkit % 1000 / 10);
    if (!driver) return fail("there is no NVIDIA driver, and so no GPU that can be used; ./train_gpt2 trains on the CPU");
#endif
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || !count)
        return fail("no NVIDIA GPU can be used: %s; ./train_gpt2 trains on the CPU",
                    error == cudaSuccess ? "there is none" : cudaGetErrorString(error));
    cudaDeviceProp device;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    if (device.major < 8)
        return fail("%s has compute capability %d.%d, and at least 8.0 is needed, for bf16; ./train_gpt2 trains on the CPU", device.name,
                    device.major, device.minor);
#ifdef __CUDACC__
    if (!gpu_has_code(device, BUILT_FOR, "train_gpt2cu")) return false;
    if (device.major == 9 && !hopper_available()) warn("attention will be slower than it could be here: %s", error_text);
#endif
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu.copies, cudaStreamNonBlocking));
    snprintf(name, size, "in bf16 on one %s (compute capability %d.%d, %.0f GiB)", device.name, device.major, device.minor,
             (double)device.totalGlobalMem / (1 << 30));
    return true;
}

static size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static unsigned blocks_for(size_t count, size_t per_block) { return (unsigned)((count + per_block - 1) / per_block); }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }

// A thread reads and writes eight bf16, 16 bytes, at a time. C is a multiple of 32, so all rows begin at multiples of that.
DEVICE void unpack8(float (&x)[8], uint4 bits) {
    const uint32_t pair[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = unpack_bf16(pair[i]);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
}
DEVICE void load8(float (&x)[8], const bf16 *from) { unpack8(x, *(const uint4 *)from); }
// Values stay packed up to here: otherwise compilers unpack them as soon as they can, and run short of registers.
DEVICE void stay_packed(uint4 &bits) { asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)); }
DEVICE void store8(bf16 *to, const float (&x)[8]) {
    uint4 bits;
    bits.x = pack_bf16(x[0], x[1]), bits.y = pack_bf16(x[2], x[3]), bits.z = pack_bf16(x[4], x[5]), bits.w = pack_bf16(x[6], x[7]);
    *(uint4 *)to = bits;
}
DEVICE void load8(float (&x)[8], const float *from) {
    const float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE void store8(float *to, const float (&x)[8]) {
    float4 a, b;
    a.x = x[0], a.y = x[1], a.z = x[2], a.w = x[3], b.x = x[4], b.y = x[5], b.z = x[6], b.w = x[7];
    ((float4 *)to)[0] = a, ((float4 *)to)[1] = b;
}

// Sums of R numbers over a block of whole warps, which each thread gets in v; and the maximum of one. `shared` must not be in use by
// another such call less than a barrier ago: callers alternate between two.
enum { MAX_WARPS = 32 };
template <int R> DEVICE void block_sum(float (&v)[R], float (*shared)[R]) {
    const int warps = blockDim.x / 32;
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) v[r] += __shfl_xor_sync(~0u, v[r], distance);
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][r] = v[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; r++) {
        v[r] = 0;
        for (int w = 0; w < warps; w++) v[r] += shared[w][r];
    }
}
DEVICE float block_max(float v, float *shared) {
    for (int distance = 16; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, distance));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++) v = fmaxf(v, shared[w]);
    return v;
}

// ---------------------------------------------------------------------------
// 2 Matrix products

// One kind of product, as matmul and matmul_gradient below ask for it. (All int, so that memcmp compares two.)
struct Product {
    int M, N, K, a_transposed, b_transposed, fp32, has_bias, has_residual;
};

#ifdef __CUDACC__

#define CUBLAS_CHECK(call) cublas_check(call, #call, __FILE__, __LINE__)
static void cublas_check(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS) die("%s: %s (%s:%d)", call, cublasLtGetStatusString(status), file, line);
}

// How cuBLASLt computes one kind of product: made when it first occurs, then kept. cuBLASLt's matrices are column by column, so that
// our (M, N) is its (N, M): it is asked for outᵀ = bᵀ aᵀ, and b comes first.
struct Plan {
    Product product;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
};
enum { WORKSPACE = 64 << 20, CANDIDATES = 8 };
static struct {
    cublasLtHandle_t handle;
    void *workspace;               // WORKSPACE bytes
    unsigned long long *checksum;  // on the GPU
    Plan *plans;
    int count;
} products;

static void matmul_start(void) {
    CUBLAS_CHECK(cublasLtCreate(&products.handle));
    if (cudaMalloc(&products.workspace, WORKSPACE) != cudaSuccess)
        die("not even %d MiB of the GPU's memory are free; nvidia-smi says what uses it", WORKSPACE >> 20);
    CUDA_CHECK(cudaMalloc(&products.checksum, sizeof *products.checksum));
}

static cublasStatus_t plan_run(const Plan *p, const cublasLtMatmulAlgo_t *algorithm, void *out, const bf16 *a, const bf16 *b,
                               const bf16 *bias, const bf16 *residual, bool add) {
    const float one = 1, beta = residual || add ? 1 : 0;
    if (bias)
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    return cublasLtMatmul(products.handle, p->operation, &one, b, p->b, a, p->a, &beta, residual ? residual : out, p->out, out, p->out,
                          algorithm, products.workspace, WORKSPACE, gpu.stream);
}

// A number that two arrays share, but for an accident of 1 in 2^64, only if all their bits are the same.
static __global__ void checksum_kernel(unsigned long long *checksum, const uint4 *words, size_t count) {
    unsigned long long sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        const uint4 w = words[i];
        unsigned long long h = (((unsigned long long)w.x << 32 | w.y) ^ i) * 0x9E3779B97F4A7C15ull;  // mixed as in splitmix64
        h = ((h ^ h >> 29) + ((unsigned long long)w.z << 32 | w.w)) * 0xBF58476D1CE4E5B9ull;
        sum += h ^ h >> 32;
    }
    atomicAdd(checksum, sum);  // of integers: the order does not matter
}

static unsigned long long checksum_of(const void *array, size_t bytes) {
    unsigned long long checksum;
    CUDA_CHECK(cudaMemsetAsync(products.checksum, 0, sizeof checksum, gpu.stream));
    LAUNCH(checksum_kernel, 1024, 256, 0, gpu.stream, products.checksum, (const uint4 *)array, bytes / sizeof(uint4));
    CUDA_CHECK(cudaMemcpyAsync(&checksum, products.checksum, sizeof checksum, cudaMemcpyDeviceToHost, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    return checksum;
}

static Plan plan_make(Product s) {
    Plan p;
    memset(&p, 0, sizeof p);
    p.product = s;
    const cublasOperation_t of_a = s.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, of_b = s.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const int a_columns = s.a_transposed ? s.M : s.K, b_columns = s.b_transposed ? s.K : s.N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&p.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof of_b));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSB, &of_a, sizeof of_a));
    if (s.has_bias)
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&p.a, CUDA_R_16BF, a_columns, s.a_transposed ? s.K : s.M, a_columns));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&p.b, CUDA_R_16BF, b_columns, s.b_transposed ? s.N : s.K, b_columns));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&p.out, s.fp32 ? CUDA_R_32F : CUDA_R_16BF, s.N, s.M, s.N));
    return p;
}

// What cuBLASLt's heuristics propose, the most promising first; partial sums are fp32 in any case. Returns how many, at least one.
static int plan_propose(const Plan *p, cublasLtMatmulHeuristicResult_t (&found)[CANDIDATES]) {
    const Product *s = &p->product;
    const size_t workspace = WORKSPACE;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasLtMatmulPreference_t preference;
    int count = 0;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes));
    if (cublasLtMatmulAlgoGetHeuristic(products.handle, p->operation, p->b, p->a, p->out, p->out, preference, CANDIDATES, found, &count) !=
            CUBLAS_STATUS_SUCCESS || !count)
        die("cuBLASLt has no algorithm for a product of (%d, %d) and (%d, %d)", s->M, s->K, s->K, s->N);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    return count;
}

static int parts_of_k(const cublasLtMatmulAlgo_t *algorithm) {
    int parts;
    size_t written;
    CUBLAS_CHECK(cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts, &written));
    return parts;
}

// Takes the fastest proposal, which is measured, since the first is often a tenth slower than the best. To keep runs the same to the bit
// although times never are, only those take part that add up along K as the first does: that split it into as many parts, and give the
// same bits. Where `out` is small and rounded, equal bits may be an accident; where it is added to, it must not be written over: there
// the first is taken.
static cublasLtMatmulAlgo_t plan_choose(const Plan *p, void *out, const bf16 *a, const bf16 *b, const bf16 *bias, const bf16 *residual,
                                        bool add) {
    enum { ROUNDS = 3, REPEATS = 4 };
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    const int count = plan_propose(p, found);
    const size_t bytes = (size_t)p->product.M * p->product.N * (p->product.fp32 ? sizeof(float) : sizeof(bf16));
    if (add || count == 1 || (!p->product.fp32 && bytes < 1 << 21)) return found[0].algo;

    bool same[CANDIDATES];
    float times[CANDIDATES];
    unsigned long long expected = 0;
    int best = -1;  // at first the first that works
    for (int i = 0; i < count; i++) {
        times[i] = INFINITY;
        same[i] = plan_run(p, &found[i].algo, out, a, b, bias, residual, false) == CUBLAS_STATUS_SUCCESS;
        if (!same[i]) continue;
        const unsigned long long checksum = checksum_of(out, bytes);
        if (best < 0) best = i, expected = checksum;
        same[i] = checksum == expected && parts_of_k(&found[i].algo) == parts_of_k(&found[best].algo);
    }
    if (best < 0) return found[0].algo;  // to fail with its reason
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < count; i++) {
            if (!same[i]) continue;
            float ms;
            CUDA_CHECK(cudaEventRecord(start, gpu.stream));
            for (int repeat = 0; repeat < REPEATS; repeat++)
                CUBLAS_CHECK(plan_run(p, &found[i].algo, out, a, b, bias, residual, false));
            CUDA_CHECK(cudaEventRecord(stop, gpu.stream));
            CUDA_CHECK(cudaEventSynchronize(stop));
            CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
            if (ms < times[i]) times[i] = ms;
            if (times[i] < times[best]) best = i;
        }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    return found[best].algo;
}

static void matmul_run(Product s, void *out, const bf16 *a, const bf16 *b, const bf16 *bias, const bf16 *residual, bool add) {
    if (!products.handle) matmul_start();
    Plan *p = products.plans;
    while (p < products.plans + products.count && memcmp(&p->product, &s, sizeof s)) p++;
    if (p == products.plans + products.count) {
        products.plans = (Plan *)realloc(products.plans, (size_t)(products.count + 1) * sizeof(Plan));
        if (!products.plans) die("out of memory: the plans of matrix products");
        p = products.plans + products.count++;
        *p = plan_make(s);
        p->algorithm = plan_choose(p, out, a, b, bias, residual, add);
    }
    CUBLAS_CHECK(plan_run(p, &p->algorithm, out, a, b, bias, residual, add));
}

#else  // the CPU, for tests

static void matmul_run(Product s, void *out, const bf16 *a, const bf16 *b, const bf16 *bias, const bf16 *residual, bool add) {
#pragma omp parallel for
    for (int i = 0; i < s.M; i++)
        for (int j = 0; j < s.N; j++) {
            size_t at = (size_t)i * s.N + j;
            float sum = (bias ? __bfloat162float(bias[j]) : 0) + (residual ? __bfloat162float(residual[at]) : 0);
            for (int k = 0; k < s.K; k++)
                sum += __bfloat162float(a[s.a_transposed ? (size_t)k * s.M + i : (size_t)i * s.K + k]) *
                       __bfloat162float(b[s.b_transposed ? (size_t)j * s.K + k : (size_t)k * s.N + j]);
            if (s.fp32) ((float *)out)[at] = sum + (add ? ((float *)out)[at] : 0);
            else ((bf16 *)out)[at] = __float2bfloat16(sum);
        }
}

#endif

// out (M, N) = a b + bias (N) + residual (M, N), rounded once, to bf16. a is (M, K), or (K, M) if a_transposed; b is (K, N), or (N, K)
// if b_transposed. bias and residual may be NULL.
static void matmul(bf16 *out, const bf16 *a, bool a_transposed, const bf16 *b, bool b_transposed, int M, int N, int K,
                   const bf16 *bias = NULL, const bf16 *residual = NULL) {
    matmul_run({M, N, K, a_transposed, b_transposed, false, bias != NULL, residual != NULL}, out, a, b, bias, residual, false);
}

// dweight (M, N), in fp32, (+)= aᵀ b. a (K, M), b (K, N).
static void matmul_gradient(float *dweight, const bf16 *a, const bf16 *b, int M, int N, int K, bool add) {
    matmul_run({M, N, K, true, false, true, false, false}, dweight, a, b, NULL, NULL, add);
}

// ---------------------------------------------------------------------------
// 3 Layers: each forward is followed by its backward. Attention's are in attention.cuh

// out (N, C), of `count` elements, = wte[token] + wpe[position]. tokens (B, T), wte (V, C), wpe (at least T, C).
static __global__ void embedding_forward_kernel(bf16 *out, const int *tokens, const bf16 *wte, const bf16 *wpe, int T, int C,
                                                size_t count) {
    const size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * 8, n = i / C, c = i % C;
    if (i >= count) return;
    float token[8], position[8];
    load8(token, wte + (size_t)tokens[n] * C + c);
    load8(position, wpe + n % T * C + c);
#pragma unroll
    for (int k = 0; k < 8; k++) token[k] += position[k];
    store8(out + i, token);
}

static void embedding_forward(bf16 *out, const int *tokens, const bf16 *wte, const bf16 *wpe, int N, int T, int C) {
    const size_t count = (size_t)N * C;
    LAUNCH(embedding_forward_kernel, blocks_for(count, 8 * 256), 256, 0, gpu.stream, out, tokens, wte, wpe, T, C, count);
}

// dwte[token] += the sum of dout (N, C) over the places of the token: those order[begins[s]] .. order[begins[s + 1] - 1], which all
// have the same token. A block has one token and 256 channels; its warps share out the places, and are added up in order. (Atomic
// additions would be in any order.)
enum { EMBEDDING_WARPS = 8 };
static __global__ void embedding_backward_wte_kernel(float *dwte, const bf16 *dout, const int *tokens, const int *order,
                                                     const int *begins, int C) {
    __shared__ __align__(16) float sums[EMBEDDING_WARPS][256];
    const int begin = begins[blockIdx.x], end = begins[blockIdx.x + 1];
    const int warp = threadIdx.x / 32, c = blockIdx.y * 256 + threadIdx.x % 32 * 8;
    float sum[8] = {};
    for (int i = begin + warp; i < end && c < C; i += EMBEDDING_WARPS) {
        float x[8];
        load8(x, dout + (size_t)order[i] * C + c);
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k] += x[k];
    }
    store8(&sums[warp][threadIdx.x % 32 * 8], sum);
    __syncthreads();
    const int column = blockIdx.y * 256 + threadIdx.x;
    if (column >= C) return;
    float total = 0;
    for (int w = 0; w < EMBEDDING_WARPS; w++) total += sums[w][threadIdx.x];
    dwte[(size_t)tokens[order[begin]] * C + column] += total;
}

// dwpe (max_T, C), of `count` elements, (+)= the sum of dout (B, T, C) over B; positions from T on have none.
static __global__ void embedding_backward_wpe_kernel(float *dwpe, const bf16 *dout, int B, int T, int C, size_t count, bool add) {
    const size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * 8;
    if (i >= count) return;
    float sum[8] = {}, x[8];
    if (add) load8(sum, dwpe + i);
    if (i < (size_t)T * C)
        for (int b = 0; b < B; b++) {
            load8(x, dout + (size_t)b * T * C + i);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[k] += x[k];
        }
    store8(dwpe + i, sum);
}

static void embedding_backward(float *dwte, float *dwpe, const bf16 *dout, const int *tokens, const int *order, const int *begins,
                               int distinct, int B, int T, int C, int max_T, bool add) {
    LAUNCH(embedding_backward_wte_kernel, dim3((unsigned)distinct, blocks_for(C, 256)), 32 * EMBEDDING_WARPS, 0, gpu.stream, dwte, dout,
           tokens, order, begins, C);
    const size_t count = (size_t)max_T * C;
    LAUNCH(embedding_backward_wpe_kernel, blocks_for(count, 8 * 256), 256, 0, gpu.stream, dwpe, dout, B, T, C, count, add);
}

// Sums over all N rows, for gradients of biases and the like, are made in two steps. First each of many thread blocks adds up its share
// of the rows, a thread in eight columns, and leaves its sums in partials (blocks, columns). Then sum_partials adds those up, 32 columns
// a block: column c goes, (+)=, to to[c / width][c % width], or nowhere if that is NULL. The numbers of blocks, at most these, were the
// fastest on an H200; they are the same on all GPUs, so that the bits are, too.
enum { SUM_BLOCKS = 512, SUM_THREADS = 128, LAYERNORM_BLOCKS = 640 };
struct Destinations { float *to[3]; };
static __global__ void sum_partials_kernel(Destinations d, const float *partials, unsigned blocks, int columns, int width, bool add) {
    __shared__ float sums[32][33];
    const int c = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
#pragma unroll 8
    for (unsigned block = threadIdx.y; block < blocks && c < columns; block += 32) sum += partials[(size_t)block * columns + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= columns || !d.to[c / width]) return;
    float *to = d.to[c / width] + c % width;
    sum = add ? *to : 0;
    for (int i = 0; i < 32; i++) sum += sums[i][threadIdx.x];
    *to = sum;
}
static void sum_partials(Destinations d, const float *partials, unsigned blocks, int columns, int width, bool add) {
    LAUNCH(sum_partials_kernel, blocks_for(columns, 32), dim3(32, 32), 0, gpu.stream, d, partials, blocks, columns, width, add);
}

// Layer norm: a block has LAYERNORM_ROWS rows of x at a time; each is spread over C / 8 threads, eight columns a thread. Threads beyond C, which
// fill the last warp, have zeros.
enum { LAYERNORM_ROWS = 4, MAX_C = 4096 };
static int row_threads(int C) { return (int)round_up(C / 8, 32); }

// out (N, C) = (x - mean) * rstd * weight + bias for each row of x; rstd = 1 / sqrt(variance + 1e-5). mean, rstd (N). Bytes: x read and
// out written once, 4 N C. (Rows wait packed in registers, since more of them mean more reads under way.)
static __global__ __launch_bounds__(MAX_C / 8, 2) void layernorm_forward_kernel(
    bf16 *out, float *mean, float *rstd, const bf16 *x, const bf16 *weight, const bf16 *bias, int N, int C) {
    __shared__ float shared[2][MAX_WARPS][LAYERNORM_ROWS];
    const int c = threadIdx.x * 8, first = blockIdx.x * LAYERNORM_ROWS;
    const uint4 zeros = {};
    uint4 row[LAYERNORM_ROWS];
    float v[8], m[LAYERNORM_ROWS] = {}, squares[LAYERNORM_ROWS] = {};
#pragma unroll
    for (int r = 0; r < LAYERNORM_ROWS; r++) row[r] = c < C && first + r < N ? *(const uint4 *)(x + (size_t)(first + r) * C + c) : zeros;
#pragma unroll
    for (int r = 0; r < LAYERNORM_ROWS; r++) {
        unpack8(v, row[r]);
#pragma unroll
        for (int k = 0; k < 8; k++) m[r] += v[k];
    }
    block_sum(m, shared[0]);
#pragma unroll
    for (int r = 0; r < LAYERNORM_ROWS; r++) {
        m[r] /= (float)C;
        unpack8(v, row[r]);
#pragma unroll
        for (int k = 0; k < 8; k++) squares[r] += c < C ? (v[k] - m[r]) * (v[k] - m[r]) : 0;
    }
    block_sum(squares, shared[1]);
    if (c >= C) return;
    float w[8], b[8];
    load8(w, weight + c);
    load8(b, bias + c);
#pragma unroll
    for (int r = 0; r < LAYERNORM_ROWS; r++) {
        if (first + r >= N) return;
        const float s = rsqrtf(squares[r] / (float)C + 1e-5f);
        unpack8(v, row[r]);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = (v[k] - m[r]) * s * w[k] + b[k];
        store8(out + (size_t)(first + r) * C + c, v);
        if (threadIdx.x == 0) mean[first + r] = m[r], rstd[first + r] = s;
    }
}

static void layernorm_forward(bf16 *out, float *mean, float *rstd, const bf16 *x, const bf16 *weight, const bf16 *bias, int N, int C) {
    LAUNCH(layernorm_forward_kernel, blocks_for(N, LAYERNORM_ROWS), row_threads(C), 0, gpu.stream, out, mean, rstd, x, weight, bias, N, C);
}

// dx (N, C) (+)= rstd (g - mean(g) - xhat mean(g xhat)) with xhat = (x - mean) rstd and g = dout weight. partials (blocks, 3, C):
// of dweight = sum of dout xhat, of dbias = sum of dout, and of the sum of the new dx over rows, which is the gradient of the bias of
// the linear layer that added to x. Bytes: dout and x read, dx read and written, 8 N C.
static __global__ __launch_bounds__(MAX_C / 8) void layernorm_backward_kernel(
    bf16 *dx, bool add_dx, float *partials, const bf16 *dout, const bf16 *x, const bf16 *weight, const float *mean, const float *rstd,
    int N, int C) {
    __shared__ float shared[2][MAX_WARPS][2 * LAYERNORM_ROWS];
    const int c = threadIdx.x * 8;
    const uint4 zeros = {}, w_row = c < C ? *(const uint4 *)(weight + c) : zeros;
    float dweight[8] = {}, dbias[8] = {}, dx_sum[8] = {};
    int turn = 0;
    for (int first = blockIdx.x * LAYERNORM_ROWS; first < N; first += gridDim.x * LAYERNORM_ROWS, turn ^= 1) {
        uint4 x_row[LAYERNORM_ROWS], d_row[LAYERNORM_ROWS], dx_row[LAYERNORM_ROWS];
        float m[LAYERNORM_ROWS], s[LAYERNORM_ROWS], sums[2 * LAYERNORM_ROWS] = {}, xhat[8], d[8], w[8], out[8];
#pragma unroll
        for (int r = 0; r < LAYERNORM_ROWS; r++) {
            const bool inside = first + r < N;
            const size_t at = (size_t)(first + r) * C + c;
            x_row[r] = c < C && inside ? *(const uint4 *)(x + at) : zeros;
            d_row[r] = c < C && inside ? *(const uint4 *)(dout + at) : zeros;
            dx_row[r] = c < C && inside && add_dx ? *(const uint4 *)(dx + at) : zeros;
            m[r] = inside ? mean[first + r] : 0;
            s[r] = inside ? rstd[first + r] : 0;
        }
#pragma unroll
        for (int r = 0; r < LAYERNORM_ROWS; r++) {
            unpack8(xhat, x_row[r]);
            unpack8(d, d_row[r]);
            unpack8(w, w_row);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                xhat[k] = (xhat[k] - m[r]) * s[r];
                dweight[k] += d[k] * xhat[k];
                dbias[k] += d[k];
                sums[r] += d[k] * w[k];
                sums[LAYERNORM_ROWS + r] += d[k] * w[k] * xhat[k];
            }
        }
        block_sum(sums, shared[turn]);
#pragma unroll
        for (int r = 0; r < LAYERNORM_ROWS; r++) {
            const float mean_g = sums[r] / (float)C, mean_g_xhat = sums[LAYERNORM_ROWS + r] / (float)C;
            stay_packed(x_row[r]), stay_packed(d_row[r]), stay_packed(dx_row[r]);
            unpack8(xhat, x_row[r]);
            unpack8(d, d_row[r]);
            unpack8(w, w_row);
            unpack8(out, dx_row[r]);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                out[k] += (d[k] * w[k] - mean_g - (xhat[k] - m[r]) * s[r] * mean_g_xhat) * s[r];
                dx_sum[k] += out[k];  // of a row beyond N: s is 0, and so is out
            }
            if (c < C && first + r < N) store8(dx + (size_t)(first + r) * C + c, out);
        }
    }
    if (c >= C) return;
    float *const to = partials + (size_t)blockIdx.x * 3 * C + c;
    store8(to, dweight);
    store8(to + C, dbias);
    store8(to + 2 * C, dx_sum);
}

// As above, and dweight, dbias and dbias_before (C) (+)=. dbias_before, which may be NULL, is of the linear layer that added to x last.
static void layernorm_backward(bf16 *dx, bool add_dx, float *dweight, float *dbias, float *dbias_before, const bf16 *dout, const bf16 *x,
                               const bf16 *weight, const float *mean, const float *rstd, float *partials, int N, int C, bool add) {
    const unsigned blocks = (unsigned)least(LAYERNORM_BLOCKS, blocks_for(N, LAYERNORM_ROWS));
    LAUNCH(layernorm_backward_kernel, blocks, row_threads(C), 0, gpu.stream, dx, add_dx, partials, dout, x, weight, mean, rstd, N, C);
    sum_partials({{dweight, dbias, dbias_before}}, partials, blocks, 3 * C, C, add);
}

// GELU's x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), is x / (1 + exp(-2u)). This is the second factor.
DEVICE float gelu_gate(float x) {
    const float minus_2u_log2e = -2 * 0.79788456f * LOG2_E * (x + 0.044715f * x * x * x);
    return __fdividef(1.0f, 1.0f + exp2_approx(fminf(minus_2u_log2e, 126.0f)));  // __fdividef is 0 for denominators beyond 2^126
}

static __global__ void gelu_forward_kernel(bf16 *out, const bf16 *x, size_t count) {
    const size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * 8;
    if (i >= count) return;
    float v[8];
    load8(v, x + i);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= gelu_gate(v[k]);
    store8(out + i, v);
}

static void gelu_forward(bf16 *out, const bf16 *x, size_t count) {
    LAUNCH(gelu_forward_kernel, blocks_for(count, 8 * 256), 256, 0, gpu.stream, out, x, count);
}

// dx = dout * gelu'(x), dx in place of dout; gelu(x) once more into `gelu`, if that is not NULL; partials (blocks, W) of the sum of dx
// over rows. All are (N, W). Bytes: 6 N W, or 8 N W with `gelu`.
static __global__ void gelu_backward_kernel(bf16 *dx, const bf16 *x, bf16 *gelu, float *partials, int N, int W) {
    const int c = (blockIdx.y * SUM_THREADS + threadIdx.x) * 8;
    if (c >= W) return;
    float sum[8] = {};
#pragma unroll 4
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        const size_t at = (size_t)n * W + c;
        float d[8], v[8];
        load8(d, dx + at);
        load8(v, x + at);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float gate = gelu_gate(v[k]), slope = 2 * 0.79788456f * (1 + 3 * 0.044715f * v[k] * v[k]);
            d[k] *= gate + v[k] * gate * (1 - gate) * slope;
            v[k] *= gate;
            sum[k] += d[k];
        }
        store8(dx + at, d);
        if (gelu) store8(gelu + at, v);
    }
    store8(partials + (size_t)blockIdx.x * W + c, sum);
}

// As above, and dbias (W) (+)=, of the linear layer that made x.
static void gelu_backward(bf16 *dx, const bf16 *x, bf16 *gelu, float *dbias, float *partials, int N, int W, bool add) {
    const dim3 grid((unsigned)least(SUM_BLOCKS, N), blocks_for(W, 8 * SUM_THREADS));
    LAUNCH(gelu_backward_kernel, grid, SUM_THREADS, 0, gpu.stream, dx, x, gelu, partials, N, W);
    sum_partials({{dbias}}, partials, grid.x, W, W, add);
}

// dbias (W) (+)= the sum of dout (N, W) over rows. Bytes: 2 N W.
static __global__ void bias_backward_kernel(float *partials, const bf16 *dout, int N, int W) {
    const int c = (blockIdx.y * SUM_THREADS + threadIdx.x) * 8;
    if (c >= W) return;
    float sum[8] = {};
#pragma unroll 4
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        float d[8];
        load8(d, dout + (size_t)n * W + c);
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k] += d[k];
    }
    store8(partials + (size_t)blockIdx.x * W + c, sum);
}

static void bias_backward(float *dbias, const bf16 *dout, float *partials, int N, int W, bool add) {
    const dim3 grid((unsigned)least(SUM_BLOCKS, N), blocks_for(W, 8 * SUM_THREADS));
    LAUNCH(bias_backward_kernel, grid, SUM_THREADS, 0, gpu.stream, partials, dout, N, W);
    sum_partials({{dbias}}, partials, grid.x, W, W, add);
}

// Cross entropy of each row of logits (N, Vp) against targets (N), added to losses (N). Columns from V on do not count. Where dscale is
// not 0, the logits become their own gradient in place: (softmax - one at the target) * dscale. A block has a row, and reads it twice,
// the second time from the L2 cache if no more rows are in work than that holds: two a multiprocessor. Bytes: 4 N Vp.
enum { CLASSIFIER_THREADS = 1024 };
static __global__ __launch_bounds__(CLASSIFIER_THREADS) void classifier_kernel(double *losses, bf16 *logits, const int *targets, int V,
                                                                               int Vp, float dscale) {
    __shared__ float shared[2][MAX_WARPS][1];
    bf16 *const row = logits + (size_t)blockIdx.x * Vp;
    const int target = targets[blockIdx.x];
    const float at_target = __bfloat162float(row[target]);
    float max = -INFINITY, sum[1] = {}, x[8];  // sum of exp(x - max) over what the thread has seen
#pragma unroll 2
    for (int c = threadIdx.x * 8; c < V; c += blockDim.x * 8) {
        load8(x, row + c);
        if (c + 8 > V) {
#pragma unroll
            for (int k = 0; k < 8; k++) x[k] = c + k < V ? x[k] : -INFINITY;
        }
        float larger = max, more = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) larger = fmaxf(larger, x[k]);
#pragma unroll
        for (int k = 0; k < 8; k++) more += exp2_approx(LOG2_E * (x[k] - larger));
        sum[0] = sum[0] * exp2_approx(LOG2_E * (max - larger)) + more;
        max = larger;
    }
    const float row_max = block_max(max, &shared[0][0][0]);
    sum[0] *= exp2_approx(LOG2_E * (max - row_max));
    block_sum(sum, shared[1]);
    if (threadIdx.x == 0) losses[blockIdx.x] += (double)(logf(sum[0]) + row_max - at_target);
    if (dscale == 0) return;
    const float scale = dscale / sum[0];
#pragma unroll 2
    for (int c = threadIdx.x * 8; c < Vp; c += blockDim.x * 8) {
        load8(x, row + c);
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = scale * exp2_approx(LOG2_E * (x[k] - row_max));
        if (c + 8 > V || (target >= c && target < c + 8)) {
#pragma unroll
            for (int k = 0; k < 8; k++) x[k] = c + k < V ? x[k] - (c + k == target ? dscale : 0) : 0;
        }
        store8(row + c, x);
    }
}

static void classifier(double *losses, bf16 *logits, const int *targets, int N, int V, int Vp, float dscale) {
    const int chunks = (int)round_up(Vp / 8, 32), threads = chunks < CLASSIFIER_THREADS ? chunks : CLASSIFIER_THREADS;
    LAUNCH(classifier_kernel, N, threads, 0, gpu.stream, losses, logits, targets, V, Vp, dscale);
}

// ---------------------------------------------------------------------------
// 4 The model

template <typename T> struct Layer {  // one block's parameters, in the order of gpt/model.h's table: weights are bf16, gradients fp32
    T *ln1_w, *ln1_b;        // (C)
    T *qkv_w, *qkv_b;        // (C, 3C), (3C)
    T *proj_w, *proj_b;      // (C, C), (C)
    T *ln2_w, *ln2_b;        // (C)
    T *fc_w, *fc_b;          // (C, 4C), (4C)
    T *fcproj_w, *fcproj_b;  // (4C, C), (C)
};

template <typename T> struct Parameters {
    T *wte;            // (Vp, C), the embedding of tokens and, transposed, the output head; rows from V on are zero and stay so
    T *wpe;            // (longest T, C)
    Layer<T> *layers;  // L of them
    T *lnf_w, *lnf_b;  // (C)
};

struct LayerActivations {  // what one block's backward needs of its forward
    bf16 *ln1;             // (N, C)
    float *mean1, *rstd1;  // (N)
    bf16 *qkv;             // (N, 3C)
    bf16 *att;             // (N, C)
    float *lse;            // (B, NH, T)
    bf16 *res_att;         // (N, C): the residual stream after attention
    bf16 *ln2;             // (N, C)
    float *mean2, *rstd2;  // (N)
    bf16 *fc, *gelu;       // (N, 4C)
    bf16 *res_mlp;         // (N, C): and after the MLP, the block's output
};

struct DeviceBatch {  // on the GPU
    int *inputs, *targets;  // (B, T)
    int *order;             // (N): all positions 0 .. N - 1, sorted by their input
    int *begins;            // (N + 1): where in `order` each distinct input begins, and then N; the rest is not set
};

struct Update {  // what an update depends on and reports: made on the GPU, and read by the host one step late
    double loss, norm;  // mean loss; norm of the gradient before clipping
    long long count;    // updates so far that were not skipped
    int skipped;        // this one was not finite, and leaves everything as it was
    float grad_scale, step_size, v_scale;
};

enum MemoryGroup { WEIGHTS, GRADIENTS, MOMENTS, ACTIVATIONS, WORKING, MEMORY_GROUPS };
static const char *const memory_group_names[MEMORY_GROUPS] = {"weights", "gradients", "moments", "activations", "working space"};

struct Model {
    GptConfig config;
    int Vp, B;                  // B is the largest batch
    bool training, master;
    int recompute;              // 1: GELU is computed again in the backward; 2: and layer norms
    GptTensor *tensors;         // as in files
    size_t *offsets;            // of each tensor in the arrays on the GPU: first those with weight decay, then those without
    size_t parameters, count, decayed;  // number in files; on the GPU, with what fills up wte and gaps; of these, with weight decay
    unsigned char *block;       // the one allocation for all that is on the GPU
    size_t memory[MEMORY_GROUPS];  // bytes

    bf16 *weights;
    float *master_weights;      // what `weights` are rounded from, or NULL
    float *grads, *m, *v;       // AdamW's moments m and v
    Parameters<bf16> weight;    // the single tensors of weights, and of grads
    Parameters<float> grad;
    LayerActivations *acts;     // L of them
    bf16 *embedded;             // (N, C)
    bf16 *lnf;                  // (N, C)
    float *meanf, *rstdf;       // (N)
    double *losses;             // (N)
    bf16 *logits;               // (head_rows, Vp); at other times what attention needs beside its tensors
    int head_rows;
    bf16 *dx;                   // (N, C): of the residual stream
    bf16 *dc, *d4c;             // (N, C), (N, 4C): of whatever is C or 4C wide inside a block; dqkv, 3C, too
    float *partials;            // (SUM_BLOCKS, 4C) or (LAYERNORM_BLOCKS, 3, C)
    double *norms;              // (NORM_BLOCKS)
    Update *update;
    DeviceBatch batches[2];     // one is computed while the other is copied; without training, one
    bf16 *host_row;             // (Vp), logits of one position, on the host
    float *host_logits;         // (V)
};

// Logits at once: 4096 rows of GPT-2's vocabulary, 393 MiB. The logits of all rows would be the largest tensor of all; fewer at a time
// cost more passes over dwte, and more at a time were slower (dev/LOG.md).
static const size_t HEAD_LOGITS = (size_t)4096 * 50304;
enum { NORM_BLOCKS = 1024 };

// The next `count` elements of the one block that holds everything, at a multiple of 256 bytes. Without a block (base NULL) it counts.
struct Arena { unsigned char *base; size_t used; };
template <typename T> static void arena_take(Arena *arena, T **to, size_t count) {
    *to = arena->base ? (T *)(arena->base + arena->used) : NULL;
    arena->used += round_up(count * sizeof(T), 256);
}
static void arena_batch(Arena *arena, DeviceBatch *batch, size_t N) {  // in one piece, so that it is copied at once
    arena_take(arena, &batch->inputs, 4 * N + 1);
    if (!arena->base) return;
    batch->targets = batch->inputs + N, batch->order = batch->targets + N, batch->begins = batch->order + N;
}

// Lays out all arrays from `base` on. Returns the number of bytes.
static size_t model_layout(Model *m, unsigned char *base) {
    Arena arena = {base, 0};
    const size_t N = (size_t)m->B * m->config.seq, C = m->config.channels, NH = m->config.heads, L = m->config.layers;
    const size_t rows = HEAD_LOGITS / m->Vp / 128 * 128;
    m->head_rows = (int)least(rows > 128 ? rows : 128, N);
    size_t before = 0;
    auto group = [&](MemoryGroup g) { m->memory[g] = arena.used - before, before = arena.used; };
    arena_take(&arena, &m->weights, m->count);
    if (m->training && m->master) arena_take(&arena, &m->master_weights, m->count);
    group(WEIGHTS);
    if (m->training) arena_take(&arena, &m->grads, m->count);
    group(GRADIENTS);
    if (m->training) arena_take(&arena, &m->m, m->count), arena_take(&arena, &m->v, m->count);
    group(MOMENTS);

    arena_take(&arena, &m->embedded, N * C);
    auto own_or_shared = [&](bool own, bf16 **to, bf16 *shared, size_t count) { own ? arena_take(&arena, to, count) : (void)(*to = shared); };
    for (size_t l = 0; l < L; l++) {
        LayerActivations *a = &m->acts[l], *shared = &m->acts[0];  // what is not kept for the backward all layers share
        if (!m->training && l > 0) { *a = *shared; continue; }
        own_or_shared(l == 0 || m->recompute < 2, &a->ln1, shared->ln1, N * C);
        arena_take(&arena, &a->mean1, N), arena_take(&arena, &a->rstd1, N);
        arena_take(&arena, &a->qkv, N * 3 * C);
        arena_take(&arena, &a->att, N * C), arena_take(&arena, &a->lse, N * NH);
        arena_take(&arena, &a->res_att, N * C);
        own_or_shared(m->recompute < 2, &a->ln2, shared->ln1, N * C);
        arena_take(&arena, &a->mean2, N), arena_take(&arena, &a->rstd2, N);
        arena_take(&arena, &a->fc, N * 4 * C);
        own_or_shared(l == 0 || m->recompute < 1, &a->gelu, shared->gelu, N * 4 * C);
        arena_take(&arena, &a->res_mlp, N * C);
    }
    arena_take(&arena, &m->lnf, N * C), arena_take(&arena, &m->meanf, N), arena_take(&arena, &m->rstdf, N);
    group(ACTIVATIONS);

    arena_take(&arena, &m->losses, N);
    const size_t attention_bytes = attention_workspace_bytes(m->B, m->config.seq, m->config.heads, (int)C / m->config.heads, m->training);
    const size_t logit_bytes = (size_t)m->head_rows * m->Vp * sizeof(bf16);
    arena_take(&arena, (unsigned char **)&m->logits, logit_bytes > attention_bytes ? logit_bytes : attention_bytes);
    arena_batch(&arena, &m->batches[0], N);
    if (m->training) {
        arena_batch(&arena, &m->batches[1], N);
        arena_take(&arena, &m->dx, N * C), arena_take(&arena, &m->dc, N * C), arena_take(&arena, &m->d4c, N * 4 * C);
        arena_take(&arena, &m->partials, SUM_BLOCKS * 4 * C);  // which is more than LAYERNORM_BLOCKS * 3 * C
        arena_take(&arena, &m->norms, NORM_BLOCKS);
        arena_take(&arena, &m->update, 1);
    }
    group(WORKING);
    return arena.used;
}

// Prepares a model without its memory, whose size is returned in bytes.
static size_t model_plan(Model *m, GptConfig config, int B, bool training, int recompute, bool master) {
    memset(m, 0, sizeof *m);
    m->config = config;
    m->Vp = (int)round_up(config.vocab, 128);
    m->B = B, m->training = training, m->recompute = recompute, m->master = master;
    m->tensors = gpt_tensors(config, &m->parameters);
    const int tensors = gpt_tensor_count(config);
    m->offsets = (size_t *)allocate(tensors, sizeof *m->offsets, "the tensor table");
    for (int decay = 1; decay >= 0; decay--) {
        for (int i = 0; i < tensors; i++) {
            if (m->tensors[i].decay != decay) continue;
            m->offsets[i] = m->count;
            m->count += round_up(i == 0 ? (size_t)m->Vp * config.channels : m->tensors[i].size, 128);  // cuBLASLt expects 256 bytes
        }
        if (decay) m->decayed = m->count;
    }
    m->acts = (LayerActivations *)allocate(config.layers, sizeof *m->acts, "pointers to the activations");
    return model_layout(m, NULL);
}

static void model_free(Model *m) {
    CUDA_CHECK(cudaFree(m->block));
    free(m->weight.layers);
    free(m->grad.layers);
    free(m->acts);
    free(m->offsets);
    free(m->tensors);
    free(m->host_row);
    free(m->host_logits);
}

static const double MIB = 1 << 20;

static void model_describe_memory(const Model *m, char *text, size_t size) {
    size_t bytes = 0, at = 0;
    for (int i = 0; i < MEMORY_GROUPS; i++) bytes += m->memory[i];
    at += (size_t)snprintf(text, size, "%.1f MiB on the GPU:", (double)bytes / MIB);
    for (int i = 0; i < MEMORY_GROUPS; i++)
        if (m->memory[i]) at += (size_t)snprintf(text + at, size - at, " %s %.1f%s", memory_group_names[i], (double)m->memory[i] / MIB,
                                                 i + 1 < MEMORY_GROUPS ? "," : "");
}

// The largest batch, up to m->B, with which the planned model needs at most so many bytes; 0 if there is none.
static int largest_batch(const Model *m, int recompute, size_t bytes) {
    Model other = *m;
    other.recompute = recompute;
    int fits = 0, too_large = m->B + 1;
    while (too_large - fits > 1) {
        other.B = fits + (too_large - fits) / 2;
        *(model_layout(&other, NULL) <= bytes ? &fits : &too_large) = other.B;
    }
    return fits;
}

// Is there room for the planned model? If not, false after fail(), which says what there is room for.
static bool model_fits(const Model *m, size_t bytes) {
    const size_t margin = (size_t)256 << 20;  // for the code of cuBLASLt's kernels, which is loaded when first used, and its workspace
    size_t left, all;
    CUDA_CHECK(cudaMemGetInfo(&left, &all));
    if (bytes + margin <= left) return true;
    const size_t room = left > margin ? left - margin : 0;
    const int fits = largest_batch(m, m->recompute, room), fits_with_2 = largest_batch(m, 2, room);
    char advice[160] = "not even --batch 1 would fit; a smaller model or --seq would need less";
    if (fits) snprintf(advice, sizeof advice, "--batch %d would fit", fits);
    if (m->training && fits_with_2 > fits)
        snprintf(advice + strlen(advice), sizeof advice - strlen(advice), ", and with --recompute 2 --batch %d", fits_with_2);
    return fail("the model needs %.1f MiB of GPU memory and %.1f MiB are free, %.1f MiB too few; %s", (double)(bytes + margin) / MIB,
                (double)left / MIB, (double)(bytes + margin - left) / MIB, m->training ? advice : "nvidia-smi says what uses it");
}

template <typename T> static Parameters<T> parameters_of(const Model *m, T *array) {
    Parameters<T> p;
    const int last = gpt_tensor_count(m->config) - 2;
    p.wte = array + m->offsets[0], p.wpe = array + m->offsets[1];
    p.layers = (Layer<T> *)allocate(m->config.layers, sizeof(Layer<T>), "pointers to the layers");
    static_assert(sizeof(Layer<T>) == TENSORS_PER_LAYER * sizeof(T *), "Layer has a pointer for each tensor of the table");
    T **pointer = (T **)p.layers;
    for (int i = 0; i < m->config.layers * TENSORS_PER_LAYER; i++) pointer[i] = array + m->offsets[2 + i];
    p.lnf_w = array + m->offsets[last], p.lnf_b = array + m->offsets[last + 1];
    return p;
}

static void model_allocate(Model *m) {
    const size_t bytes = model_layout(m, NULL);
    if (cudaMalloc(&m->block, bytes) != cudaSuccess) die("the GPU has no %.1f MiB of memory in one piece for the model", (double)bytes / MIB);
    model_layout(m, m->block);
    m->weight = parameters_of(m, m->weights);
    if (m->training) m->grad = parameters_of(m, m->grads);
    m->host_row = (bf16 *)allocate(m->Vp, sizeof(bf16), "logits");
    m->host_logits = (float *)allocate(m->config.vocab, sizeof(float), "logits");
}

// Copies one of the arrays on the GPU from or to one of files, tensor by tensor.
static void copy_to_gpu(const Model *m, float *to, const float *from) {
    CUDA_CHECK(cudaMemsetAsync(to, 0, m->count * sizeof(float), gpu.stream));  // what is no tensor's stays zero
    for (int i = 0; i < gpt_tensor_count(m->config); i++)
        CUDA_CHECK(cudaMemcpyAsync(to + m->offsets[i], from + m->tensors[i].offset, m->tensors[i].size * sizeof(float),
                                   cudaMemcpyHostToDevice, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
}
static void copy_from_gpu(const Model *m, float *to, const float *from) {
    for (int i = 0; i < gpt_tensor_count(m->config); i++)
        CUDA_CHECK(cudaMemcpyAsync(to + m->tensors[i].offset, from + m->offsets[i], m->tensors[i].size * sizeof(float),
                                   cudaMemcpyDeviceToHost, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
}

// Takes over weights and, for training, moments (zeros if they are NULL); `updates` is how many have been made.
static void model_upload(Model *m, ModelState state, long long updates) {
    bf16 *rounded = (bf16 *)allocate(m->count, sizeof *rounded, "weights in bf16");
    for (int i = 0; i < gpt_tensor_count(m->config); i++) {
        const float *from = state.weights + m->tensors[i].offset;
#pragma omp parallel for
        for (size_t j = 0; j < m->tensors[i].size; j++) rounded[m->offsets[i] + j] = __float2bfloat16(from[j]);
    }
    CUDA_CHECK(cudaMemcpyAsync(m->weights, rounded, m->count * sizeof *rounded, cudaMemcpyHostToDevice, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    free(rounded);
    if (!m->training) return;
    CUDA_CHECK(cudaMemsetAsync(m->grads, 0, m->count * sizeof(float), gpu.stream));  // again, for what is no tensor's
    if (m->master) copy_to_gpu(m, m->master_weights, state.weights);
    if (state.m) copy_to_gpu(m, m->m, state.m), copy_to_gpu(m, m->v, state.v);
    else {
        CUDA_CHECK(cudaMemsetAsync(m->m, 0, m->count * sizeof(float), gpu.stream));
        CUDA_CHECK(cudaMemsetAsync(m->v, 0, m->count * sizeof(float), gpu.stream));
    }
    Update update = {};
    update.count = updates;
    CUDA_CHECK(cudaMemcpyAsync(m->update, &update, sizeof update, cudaMemcpyHostToDevice, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
}

// The weights and moments as they are now, in new arrays that state_free frees. All are NULL after fail().
static ModelState model_download(const Model *m) {
    float *arrays[3];  // not by allocate(), as a run goes on where there is no memory for a checkpoint
    for (int i = 0; i < 3; i++) arrays[i] = (float *)malloc(m->parameters * sizeof(float));
    ModelState state = {arrays[0], arrays[1], arrays[2]};
    bf16 *rounded = m->master ? NULL : (bf16 *)malloc(m->count * sizeof *rounded);
    if (!state.weights || !state.m || !state.v || (!m->master && !rounded)) {
        fail("no %.1f MiB of memory for the weights and moments to save", 3.0 * (double)(m->parameters * sizeof(float)) / MIB);
        for (int i = 0; i < 3; i++) free(arrays[i]);
        free(rounded);
        return {NULL, NULL, NULL};
    }
    copy_from_gpu(m, state.m, m->m);
    copy_from_gpu(m, state.v, m->v);
    if (m->master) copy_from_gpu(m, state.weights, m->master_weights);
    else {
        CUDA_CHECK(cudaMemcpyAsync(rounded, m->weights, m->count * sizeof *rounded, cudaMemcpyDeviceToHost, gpu.stream));
        CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
        for (int i = 0; i < gpt_tensor_count(m->config); i++) {
            float *to = state.weights + m->tensors[i].offset;
#pragma omp parallel for
            for (size_t j = 0; j < m->tensors[i].size; j++) to[j] = __bfloat162float(rounded[m->offsets[i] + j]);
        }
        free(rounded);
    }
    return state;
}

static void state_free(ModelState state) {
    free(state.weights);
    free(state.m);
    free(state.v);
}

// Everything up to the final layer norm, for tokens (B, T) on the GPU.
static void model_forward(Model *m, const int *tokens, int B, int T) {
    const int C = m->config.channels, NH = m->config.heads, HS = C / NH, N = B * T;
    const bf16 *x = m->embedded;
    embedding_forward(m->embedded, tokens, m->weight.wte, m->weight.wpe, N, T, C);
    for (int l = 0; l < m->config.layers; l++) {
        const Layer<bf16> *w = &m->weight.layers[l];
        const LayerActivations *a = &m->acts[l];
        layernorm_forward(a->ln1, a->mean1, a->rstd1, x, w->ln1_w, w->ln1_b, N, C);
        matmul(a->qkv, a->ln1, false, w->qkv_w, false, N, 3 * C, C, w->qkv_b);
        attention_forward(a->att, a->lse, a->qkv, m->logits, B, T, NH, HS, true, gpu.stream);
        matmul(a->res_att, a->att, false, w->proj_w, false, N, C, C, w->proj_b, x);
        layernorm_forward(a->ln2, a->mean2, a->rstd2, a->res_att, w->ln2_w, w->ln2_b, N, C);
        matmul(a->fc, a->ln2, false, w->fc_w, false, N, 4 * C, C, w->fc_b);
        gelu_forward(a->gelu, a->fc, (size_t)N * 4 * C);
        matmul(a->res_mlp, a->gelu, false, w->fcproj_w, false, N, C, 4 * C, w->fcproj_b, a->res_att);
        x = a->res_mlp;
    }
    layernorm_forward(m->lnf, m->meanf, m->rstdf, x, m->weight.lnf_w, m->weight.lnf_b, N, C);
}

// The output head and the losses of N = B T targets, in chunks of rows, so that the logits of a whole batch never exist at once. The
// losses are added to m->losses. Where dscale is not 0 each chunk goes on to the gradients, dc and dwte (+)=.
static void model_loss(Model *m, const int *targets, int N, float dscale, bool add) {
    const int C = m->config.channels, Vp = m->Vp;
    for (int first = 0; first < N; first += m->head_rows) {
        const int rows = N - first < m->head_rows ? N - first : m->head_rows;
        const bf16 *x = m->lnf + (size_t)first * C;
        matmul(m->logits, x, false, m->weight.wte, true, rows, Vp, C);
        classifier(m->losses + first, m->logits, targets + first, rows, m->config.vocab, Vp, dscale);
        if (dscale == 0) continue;
        matmul(m->dc + (size_t)first * C, m->logits, false, m->weight.wte, false, rows, C, Vp);
        matmul_gradient(m->grad.wte, m->logits, x, Vp, C, rows, add || first > 0);
    }
}

// All other gradients, (+)=, after model_forward and model_loss of the same batch, which has so many distinct tokens.
static void model_backward(Model *m, const DeviceBatch *batch, int distinct, int B, int T, bool add) {
    const int C = m->config.channels, NH = m->config.heads, HS = C / NH, N = B * T, L = m->config.layers;
    bf16 *dx = m->dx, *dc = m->dc, *d4c = m->d4c;
    // A layer norm's backward completes dx, whose sum over rows is the gradient of the bias that was added to x last.
    layernorm_backward(dx, false, m->grad.lnf_w, m->grad.lnf_b, m->grad.layers[L - 1].fcproj_b, dc, m->acts[L - 1].res_mlp,
                       m->weight.lnf_w, m->meanf, m->rstdf, m->partials, N, C, add);
    for (int l = L - 1; l >= 0; l--) {
        const Layer<bf16> *w = &m->weight.layers[l];
        const Layer<float> *g = &m->grad.layers[l];
        const LayerActivations *a = &m->acts[l];
        const bf16 *x = l > 0 ? m->acts[l - 1].res_mlp : m->embedded;
        float *dbias_before = l > 0 ? m->grad.layers[l - 1].fcproj_b : NULL;

        matmul(d4c, dx, false, w->fcproj_w, true, N, 4 * C, C);
        gelu_backward(d4c, a->fc, m->recompute >= 1 ? a->gelu : NULL, g->fc_b, m->partials, N, 4 * C, add);
        matmul_gradient(g->fcproj_w, a->gelu, dx, 4 * C, C, N, add);
        matmul(dc, d4c, false, w->fc_w, true, N, C, 4 * C);
        if (m->recompute >= 2) layernorm_forward(a->ln2, a->mean2, a->rstd2, a->res_att, w->ln2_w, w->ln2_b, N, C);
        matmul_gradient(g->fc_w, a->ln2, d4c, C, 4 * C, N, add);
        layernorm_backward(dx, true, g->ln2_w, g->ln2_b, g->proj_b, dc, a->res_att, w->ln2_w, a->mean2, a->rstd2, m->partials, N, C, add);

        matmul(dc, dx, false, w->proj_w, true, N, C, C);
        matmul_gradient(g->proj_w, a->att, dx, C, C, N, add);
        attention_backward(d4c, dc, a->qkv, a->att, a->lse, m->logits, B, T, NH, HS, true, gpu.stream);
        bias_backward(g->qkv_b, d4c, m->partials, N, 3 * C, add);
        matmul(dc, d4c, false, w->qkv_w, true, N, C, 3 * C);
        if (m->recompute >= 2) layernorm_forward(a->ln1, a->mean1, a->rstd1, x, w->ln1_w, w->ln1_b, N, C);
        matmul_gradient(g->qkv_w, a->ln1, d4c, C, 3 * C, N, add);
        layernorm_backward(dx, true, g->ln1_w, g->ln1_b, dbias_before, dc, x, w->ln1_w, a->mean1, a->rstd1, m->partials, N, C, add);
    }
    embedding_backward(m->grad.wte, m->grad.wpe, dx, batch->inputs, batch->order, batch->begins, distinct, B, T, C, m->config.seq, add);
}

// ---------------------------------------------------------------------------
// 5 AdamW

// Sums of squares of `count` gradients, a multiple of 8: each block's in partials.
enum { NORM_THREADS = 256 };
static __global__ void norm_kernel(double *partials, const float *grads, size_t count) {
    __shared__ double sums[NORM_THREADS];
    double sum = 0;
    for (size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * 8; i < count; i += (size_t)gridDim.x * blockDim.x * 8) {
        float x[8];
        load8(x, grads + i);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += (double)x[k] * x[k];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = NORM_THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) partials[blockIdx.x] = sums[0];
}

// Decides on the GPU what the host need not wait for: is the update finite, how is it clipped, which update is it. One block.
enum { UPDATE_THREADS = 1024 };
static __global__ void update_prepare_kernel(Update *update, const double *norms, int norm_blocks, const double *losses, int N,
                                             double tokens, double clip, double rate, double beta1, double beta2) {
    __shared__ double sums[2][UPDATE_THREADS];
    double loss = 0, squares = 0;
    for (int i = threadIdx.x; i < N; i += UPDATE_THREADS) loss += losses[i];
    for (int i = threadIdx.x; i < norm_blocks; i += UPDATE_THREADS) squares += norms[i];
    sums[0][threadIdx.x] = loss, sums[1][threadIdx.x] = squares;
    __syncthreads();
    for (int half = UPDATE_THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half)
            for (int k = 0; k < 2; k++) sums[k][threadIdx.x] += sums[k][threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    const double norm = sqrt(sums[1][0]);
    update->loss = sums[0][0] / tokens;
    update->norm = norm;
    update->skipped = !isfinite(update->loss) || !isfinite(norm);
    if (update->skipped) return;
    const double n = (double)++update->count;
    update->grad_scale = (float)(clip > 0 && norm > clip ? clip / norm : 1);
    update->step_size = (float)(rate / (1 - pow(beta1, n)));
    update->v_scale = (float)(1 / (1 - pow(beta2, n)));
}

// Rounds to one of the two bf16 next to x, to the nearer one more often, so that the mean is x: small updates are not lost, even without
// fp32 weights. `random` has 16 random bits; it is added to those that are cut off.
DEVICE float round_stochastically(float x, uint32_t random) {
    return __uint_as_float((__float_as_uint(x) + random) & 0xFFFF0000u);
}

// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) on all `count` parameters, of which the first `decayed`
// are matrices and embeddings, which decay: weights are multiplied by `keep`. Bytes: 30 a parameter with fp32 weights (master), else 24.
static __global__ void adamw_kernel(bf16 *weights, float *master, float *m, float *v, const float *grads, const Update *update,
                                    size_t count, size_t decayed, float beta1, float beta2, float eps, float keep, uint64_t seed,
                                    uint32_t step) {
    const size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * 8;
    if (i >= count || update->skipped) return;
    const float grad_scale = update->grad_scale, step_size = update->step_size, v_scale = update->v_scale, kept = i < decayed ? keep : 1;
    float w[8], m1[8], m2[8], g[8];
    if (master) load8(w, master + i);
    else load8(w, weights + i);
    load8(m1, m + i);
    load8(m2, v + i);
    load8(g, grads + i);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float x = g[k] * grad_scale;
        m1[k] = beta1 * m1[k] + (1 - beta1) * x;
        m2[k] = beta2 * m2[k] + (1 - beta2) * x * x;
        w[k] = kept * w[k] - step_size * m1[k] / (sqrtf(m2[k] * v_scale) + eps);
    }
    store8(m + i, m1);
    store8(v + i, m2);
    if (master) store8(master + i, w);
    else {
        const Random4 r = random4(seed, RANDOM_ROUND, step, i);
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] = round_stochastically(w[k], r.word[k / 2] >> k % 2 * 16 & 0xFFFF);
    }
    store8(weights + i, w);
}

// Update number `step` of the run, from 0, with the gradients and losses of all its batches. Its results come with m->update.
static void model_update(Model *m, const Options *o, double rate, int64_t step, int N, int accumulation) {
    const unsigned norm_blocks = (unsigned)least(NORM_BLOCKS, blocks_for(m->count, 8 * NORM_THREADS));
    LAUNCH(norm_kernel, norm_blocks, NORM_THREADS, 0, gpu.stream, m->norms, m->grads, m->count);
    LAUNCH(update_prepare_kernel, 1, UPDATE_THREADS, 0, gpu.stream, m->update, m->norms, norm_blocks, m->losses, N,
           (double)N * accumulation, o->grad_clip, rate, o->beta1, o->beta2);
    LAUNCH(adamw_kernel, blocks_for(m->count, 8 * 256), 256, 0, gpu.stream, m->weights, m->master ? m->master_weights : NULL, m->m, m->v,
           m->grads, m->update, m->count, m->decayed, (float)o->beta1, (float)o->beta2, (float)o->eps, (float)(1 - rate * o->weight_decay),
           (uint64_t)o->seed, (uint32_t)step);
}

// ---------------------------------------------------------------------------
// 6 Generating text

// The logits (V) that follow `count` tokens. The model computes all of them anew for each token: no keys and values are kept, which is
// simple, and fast enough for a sample. Lengths are powers of two (what is added, later tokens, changes nothing before), so that few
// kinds of matrix products occur.
static const float *next_logits(void *model, const int *tokens, int count) {
    Model *m = (Model *)model;
    const int C = m->config.channels;
    int length = 64;
    while (length < count) length *= 2;
    if (length > m->config.seq) length = m->config.seq;
    int *on_gpu = m->batches[0].inputs;
    CUDA_CHECK(cudaMemsetAsync(on_gpu, 0, (size_t)length * sizeof(int), gpu.stream));
    CUDA_CHECK(cudaMemcpyAsync(on_gpu, tokens, (size_t)count * sizeof(int), cudaMemcpyHostToDevice, gpu.stream));
    model_forward(m, on_gpu, 1, length);
    CUDA_CHECK(cudaMemcpyAsync(m->embedded, m->lnf + (size_t)(count - 1) * C, C * sizeof(bf16), cudaMemcpyDeviceToDevice, gpu.stream));
    matmul(m->logits, m->embedded, false, m->weight.wte, true, 1, m->Vp, C);  // from there, as cuBLASLt expects multiples of 256 bytes
    CUDA_CHECK(cudaMemcpyAsync(m->host_row, m->logits, (size_t)m->Vp * sizeof(bf16), cudaMemcpyDeviceToHost, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    for (int v = 0; v < m->config.vocab; v++) m->host_logits[v] = __bfloat162float(m->host_row[v]);
    return m->host_logits;
}

// ---------------------------------------------------------------------------
// 7 Training

// Batches on their way to the GPU. There are two of everything: while one is computed, the next is read and copied.
struct Feed {
    int *window;             // (T + 1)
    int *host[2];            // as the batches on the GPU, in memory that it copies from by itself
    int *next;               // (V), for sorting
    int turn;
    cudaEvent_t copied[2];   // to the GPU: host[] may be written again
    cudaEvent_t used[2];     // by the GPU: batches[] may be written again
};

static void feed_open(Feed *feed, const Model *m) {
    const size_t N = (size_t)m->B * m->config.seq;
    memset(feed, 0, sizeof *feed);
    feed->window = (int *)allocate((size_t)m->config.seq + 1, sizeof(int), "a window");
    feed->next = (int *)allocate((size_t)m->config.vocab, sizeof(int), "tokens to sort");
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaMallocHost(&feed->host[i], (4 * N + 1) * sizeof(int)));
        CUDA_CHECK(cudaEventCreateWithFlags(&feed->copied[i], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&feed->used[i], cudaEventDisableTiming));
    }
}

static void feed_close(Feed *feed) {
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaFreeHost(feed->host[i]));
        CUDA_CHECK(cudaEventDestroy(feed->copied[i]));
        CUDA_CHECK(cudaEventDestroy(feed->used[i]));
    }
    free(feed->window);
    free(feed->next);
}

// Sorts the positions of N tokens by token, by counting: order (N), begins (N + 1). `next` (V) is for the count, and then for where the
// next position of a token goes. Returns how many distinct tokens there are.
static int sort_positions(int *order, int *begins, int *next, const int *tokens, int N, int V) {
    int distinct = 0, place = 0;
    memset(next, 0, (size_t)V * sizeof(int));
    for (int n = 0; n < N; n++) next[tokens[n]]++;
    for (int v = 0; v < V; v++) {
        const int count = next[v];
        if (count) begins[distinct++] = place;
        next[v] = place;
        place += count;
    }
    begins[distinct] = N;
    for (int n = 0; n < N; n++) order[next[tokens[n]]++] = n;
    return distinct;
}

// Reads B windows (see batch_read) and sends them to m->batches[turn], which is returned; computing waits for them. When what uses the
// batch has been launched, feed_used has to be called. NULL after fail().
static DeviceBatch *feed_next(Feed *feed, Model *m, const Run *run, bool training, uint64_t first, size_t windows, int B, int *distinct) {
    const size_t N = (size_t)m->B * m->config.seq;
    const int turn = feed->turn ^= 1;
    int *host = feed->host[turn];
    CUDA_CHECK(cudaEventSynchronize(feed->copied[turn]));
    Batch batch = {feed->window, host, host + N};
    if (!batch_read(&batch, run, training, first, windows, B)) return NULL;
    *distinct = training ? sort_positions(host + 2 * N, host + 3 * N, feed->next, host, B * m->config.seq, m->config.vocab) : 0;
    CUDA_CHECK(cudaStreamWaitEvent(gpu.copies, feed->used[turn], 0));
    const size_t count = training ? 4 * N + 1 : 2 * N;
    CUDA_CHECK(cudaMemcpyAsync(m->batches[turn].inputs, host, count * sizeof(int), cudaMemcpyHostToDevice, gpu.copies));
    CUDA_CHECK(cudaEventRecord(feed->copied[turn], gpu.copies));
    CUDA_CHECK(cudaStreamWaitEvent(gpu.stream, feed->copied[turn], 0));
    return &m->batches[turn];
}

static void feed_used(Feed *feed) { CUDA_CHECK(cudaEventRecord(feed->used[feed->turn], gpu.stream)); }

// Mean loss over windows spread evenly over the validation data. False after fail().
static bool validate(Model *m, const Run *run, Feed *feed, double *loss) {
    const int T = m->config.seq;
    const size_t windows = run_validation_windows(run, m->B), N = (size_t)m->B * T;
    CUDA_CHECK(cudaMemsetAsync(m->losses, 0, N * sizeof(double), gpu.stream));
    for (size_t first = 0; first < windows; first += (size_t)m->B) {
        int B = windows - first < (size_t)m->B ? (int)(windows - first) : m->B, distinct;
        DeviceBatch *batch = feed_next(feed, m, run, false, first, windows, B, &distinct);
        if (!batch) return false;
        model_forward(m, batch->inputs, B, T);
        model_loss(m, batch->targets, B * T, 0, false);
        feed_used(feed);
    }
    double *losses = (double *)allocate(N, sizeof *losses, "losses");
    CUDA_CHECK(cudaMemcpyAsync(losses, m->losses, N * sizeof *losses, cudaMemcpyDeviceToHost, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    *loss = 0;
    for (size_t n = 0; n < N; n++) *loss += losses[n];
    *loss /= (double)windows * T;
    free(losses);
    return true;
}

// Launches forward and backward of one of the batches of a step, whose gradients are added if `add`. False after fail().
static bool batch_launch(Model *m, const Run *run, Feed *feed, uint64_t first_sample, bool add) {
    const int T = m->config.seq, N = m->B * T;
    int distinct;
    DeviceBatch *batch = feed_next(feed, m, run, true, first_sample, 0, m->B, &distinct);
    if (!batch) return false;
    if (!add) CUDA_CHECK(cudaMemsetAsync(m->losses, 0, (size_t)N * sizeof(double), gpu.stream));
    model_forward(m, batch->inputs, m->B, T);
    model_loss(m, batch->targets, N, 1.0f / ((float)N * (float)run->accumulation), add);
    model_backward(m, batch, distinct, m->B, T, add);
    feed_used(feed);
    return true;
}

// What an update reports, on its way back to the host.
struct Report {
    Update *update;
    cudaEvent_t arrived;
};

// Launches update number `step`, from 0, after all its batches: clipping, AdamW. A loss or gradient that is not finite leaves everything
// as it was but the counters.
static void update_launch(Model *m, const Run *run, Report *report, int64_t step) {
    model_update(m, &run->options, schedule_rate(&run->schedule, step), step, m->B * m->config.seq, run->accumulation);
    CUDA_CHECK(cudaMemcpyAsync(report->update, m->update, sizeof(Update), cudaMemcpyDeviceToHost, gpu.stream));
    CUDA_CHECK(cudaEventRecord(report->arrived, gpu.stream));
}

// Waits for the report of the last update and counts it.
static Update update_collect(Run *run, const Model *m, const Report *report) {
    CUDA_CHECK(cudaEventSynchronize(report->arrived));
    run->progress.step++;
    run->progress.samples += (uint64_t)run->accumulation * (uint64_t)m->B;
    run->progress.skipped += report->update->skipped;
    return *report->update;
}

static bool every(int64_t step, int64_t interval) { return interval && step % interval == 0; }

// Trains from run->progress to --steps. Returns the program's exit code. The host hears of an update when the first batch of the next
// step has been launched, so that the GPU never waits for it, but where something is due after the update: that needs its weights.
static int train(Model *m, Run *run) {
    const Options *o = &run->options;
    Progress *progress = &run->progress;
    Log log;
    Feed feed;
    Report report;
    int64_t saved = progress->step;
    int skips = 0;
    bool ok = true, waiting = false;  // for the report of an update
    feed_open(&feed, m);
    CUDA_CHECK(cudaMallocHost(&report.update, sizeof(Update)));
    CUDA_CHECK(cudaEventCreateWithFlags(&report.arrived, cudaEventDisableTiming));
    if (!log_open(&log, o->out, progress->step, o->steps, o->log_every)) die_of_failure();
    if (progress->step >= o->steps)
        printf("the run is at step %lld of %lld already; a larger --steps trains longer\n", (long long)progress->step, (long long)o->steps);
    double start = seconds_now();  // of the step that is reported next
    auto collect = [&] {
        const Update update = update_collect(run, m, &report);
        const int64_t step = progress->step;
        skips = update.skipped ? skips + 1 : 0;
        log_step(&log, step, update.loss, update.norm, schedule_rate(&run->schedule, step - 1), seconds_now() - start,
                 (double)m->B * m->config.seq * run->accumulation, update.skipped);
        start = seconds_now();
        waiting = false;
    };
    while (progress->step + waiting < o->steps && !stop_requested) {
        const int64_t step = progress->step + waiting;
        const uint64_t samples = progress->samples + (uint64_t)waiting * run->accumulation * m->B;
        for (int i = 0; ok && i < run->accumulation && skips < SKIPS_TO_STOP; i++) {
            ok = batch_launch(m, run, &feed, samples + (uint64_t)i * m->B, i > 0);
            if (i == 0 && waiting) collect();  // which may be one skip too many: then the step that has begun is left there
        }
        if (!ok || skips == SKIPS_TO_STOP) break;
        update_launch(m, run, &report, step);
        waiting = true;
        const int64_t done = step + 1;
        const bool validates = run->val.count && (done == o->steps || every(done, o->val_every));
        const bool samples_text = every(done, o->sample_every);
        const bool saves = every(done, o->save_every) && done < o->steps;
        if (!validates && !samples_text && !saves) continue;
        collect();
        if (validates) {
            double loss;
            ok = validate(m, run, &feed, &loss);
            if (!ok) break;
            log_validation(&log, done, loss);
        }
        if (samples_text) {
            log_break(&log);
            run_write(run, *o->prompt ? o->prompt : "\n", done, stdout, next_logits, m);
        }
        if (saves) {
            ModelState state = model_download(m);
            if (state.weights && checkpoint_save(o->out, m->config, o, *progress, state)) saved = done;
            else warn("%s; training goes on", error_text);
            state_free(state);
        }
        if (skips == SKIPS_TO_STOP) break;
        start = seconds_now();
    }
    if (waiting) collect();
    log_break(&log);
    ModelState state = {NULL, NULL, NULL};
    if (progress->step > saved && !(state = model_download(m)).weights) die_of_failure();
    const int status = run_end(run, state, ok, skips == SKIPS_TO_STOP, progress->step > saved);
    state_free(state);
    close(log.jsonl);
    feed_close(&feed);
    CUDA_CHECK(cudaFreeHost(report.update));
    CUDA_CHECK(cudaEventDestroy(report.arrived));
    return status;
}

// Sends the weights that the run starts from, and moments if it resumes, to the GPU. False after fail().
static bool model_start(Model *m, const Run *run) {
    ModelState state = {(float *)allocate(m->parameters, sizeof(float), "the weights"), NULL, NULL};
    if (run->resumes && run->trains) {
        state.m = (float *)allocate(m->parameters, sizeof(float), "moments");
        state.v = (float *)allocate(m->parameters, sizeof(float), "moments");
    }
    const bool ok = run_load(run, state);
    if (ok) model_upload(m, state, run->progress.step - run->progress.skipped);
    state_free(state);
    return ok;
}

#ifndef GPT2_NO_MAIN  // test_gpt2.cu includes this file and has a main of its own
int main(int argc, char **argv) {
    static Run run;
    Model model;
    char arithmetic[512], memory[512];
    int status = 0;
    if (!run_setup(&run, argc, argv)) die_of_failure();
    const Options *o = &run.options;
    const bool has_gpu = gpu_start(arithmetic, sizeof arithmetic);
    if (!has_gpu && !o->dry_run) die_of_failure();
    if (!has_gpu) snprintf(arithmetic, sizeof arithmetic, "in bf16 on a GPU; not on this machine: %.400s", error_text);
    if (!attention_supports(run.config.channels / run.config.heads)) die_of_failure();
    if (run.config.channels > MAX_C)
        die("--channels %d is too wide for the GPU's kernels, which take up to %d; ./train_gpt2 trains on the CPU", run.config.channels,
            MAX_C);
    const bool training = run.trains || o->dry_run;
    const size_t bytes = model_plan(&model, run.config, training ? (int)o->batch : 1, training, (int)o->recompute, o->master_weights);
    model_describe_memory(&model, memory, sizeof memory);
    if (training) run_print(&run, memory, arithmetic);
    if (has_gpu && !model_fits(&model, bytes)) die_of_failure();
    if (o->dry_run) return run_close(&run, 0);
    model_allocate(&model);
    if (!model_start(&model, &run) || (run.trains && !run_claim_output(&run))) die_of_failure();
    catch_signals();
    if (run.trains) status = train(&model, &run);
    if (run.trains && run.prompts) putchar('\n');
    if (run.prompts && !stop_requested && !status) run_write(&run, o->prompt, run.progress.step, stdout, next_logits, &model);
    model_free(&model);
    return run_close(&run, status);
}
#endif

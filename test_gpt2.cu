// Numerical test of train_gpt2.cu: its kernels against slow and obvious loops in double, and the whole of it against train_gpt2.c
// in fp32 and against PyTorch's results in tests/tiny_gpt2_32.safetensors. Run from the folder of this file:
//
//   make test-gpu                                      on a GPU
//   make build/cc/test_gpt2cu && build/cc/test_gpt2cu  on the CPU, by way of dev/cuda_on_cpu.h
//   build/cc/test_gpt2cu model                         those with "model" in their name
//   TEST_SEED=7 build/cc/test_gpt2cu                   with the same draws again (the seed of every run is printed)
//   TEST_VERBOSE=1 build/cc/test_gpt2cu                with times, and each test's largest error as a part of its tolerance
//   TEST_SMALL=1 build/nvcc/test_gpt2cu                without the large shapes, as for compute-sanitizer and on the CPU
//
// Tolerances. Weights and inputs are bf16 numbers, so both sides have the same. One rounding to bf16, of 8 significant bits, errs
// by U = 2^-8 of the result at most, and by 0.43 U in the root mean square. A kernel rounds once, at its end: its result has to be
// the rounding of a number that is exact but for some U32 = 2^-24 of the size of what it added up in fp32. For the model, where
// roundings follow on each other: see tolerance().

#define GPT2_NO_MAIN
#include "train_gpt2.cu"

#include <float.h>

#include "tests/frame.h"
#include "tests/reference.h"

static const double U = 1.0 / 256, U32 = FLT_EPSILON / 2;

#ifdef __CUDACC__
static const bool on_gpu = true;
#else
static const bool on_gpu = false;
#endif
static bool large;              // the large shapes, too
static double worst, started;   // the largest error so far, as a part of its tolerance; when the test began

// ---------------------------------------------------------------------------
// Arrays and draws. All arrays live until the end of the test; those on the GPU are NaN at first

static int kept_count;
static struct { void *array; bool gpu; } kept[4000];

static void *keep(void *array, bool gpu) {
    if (kept_count == 4000) die("a test keeps more than 4000 arrays");
    kept[kept_count].gpu = gpu;
    return kept[kept_count++].array = array;
}
static void release(void) {
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    while (kept_count > 0) {
        kept_count--;
        if (kept[kept_count].gpu) CUDA_CHECK(cudaFree(kept[kept_count].array));
        else free(kept[kept_count].array);
    }
}
template <typename T> static T *host_array(size_t count) { return (T *)keep(allocate(count, sizeof(T), "a test"), false); }
template <typename T> static T *gpu_array(size_t count) {
    T *array;
    CUDA_CHECK(cudaMalloc(&array, count * sizeof(T)));
    keep(array, true);
    CUDA_CHECK(cudaMemsetAsync(array, 0xFF, count * sizeof(T), gpu.stream));
    return array;
}

static double to_double(bf16 x) { return __bfloat162float(x); }
static double to_double(float x) { return x; }
static double to_double(double x) { return x; }
static void from_double(bf16 *to, double x) { *to = __float2bfloat16((float)x); }
static void from_double(float *to, double x) { *to = (float)x; }
static void from_double(double *to, double x) { *to = x; }
static void from_double(int *to, double x) { *to = (int)x; }
static double rounded(double x) { return __bfloat162float(__float2bfloat16((float)x)); }

template <typename T> static void put(T *on_gpu, const T *from, size_t count) {
    CUDA_CHECK(cudaMemcpyAsync(on_gpu, from, count * sizeof(T), cudaMemcpyHostToDevice, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
}
template <typename T, typename From> static T *to_gpu(const From *x, size_t count) {
    T *array = gpu_array<T>(count), *converted = host_array<T>(count);
    for (size_t i = 0; i < count; i++) from_double(&converted[i], x[i]);
    put(array, converted, count);
    return array;
}
template <typename T> static T *copied(const T *on_gpu, size_t count) {
    T *array = host_array<T>(count);
    CUDA_CHECK(cudaMemcpyAsync(array, on_gpu, count * sizeof(T), cudaMemcpyDeviceToHost, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    return array;
}
template <typename T> static double *from_gpu(const T *on_gpu, size_t count) {
    const T *array = copied(on_gpu, count);
    double *out = host_array<double>(count);
    for (size_t i = 0; i < count; i++) out[i] = to_double(array[i]);
    return out;
}

static int draw_int(int least, int most) { return least + (int)(draw() % (uint64_t)(most - least + 1)); }
static double draw_normal(void) { double radius = sqrt(-2 * log(draw_unit())); return radius * cos(2 * M_PI * draw_unit()); }
static double *draw_array(size_t count, double deviation) {  // bf16 numbers
    double *out = host_array<double>(count);
    for (size_t i = 0; i < count; i++) out[i] = rounded(deviation * draw_normal());
    return out;
}
static int *draw_tokens(int count, int V) {
    int *tokens = host_array<int>(count);
    for (int i = 0; i < count; i++) tokens[i] = draw_int(0, V - 1);
    return tokens;
}

static void check_number(const char *what, size_t i, double got, double want, double allowed) {
    if (!(fabs(got - want) <= allowed))
        check_failed(__FILE__, __LINE__, what, "[%zu] is %.9g, should be %.9g within %.3g", i, got, want, allowed);
    if (fabs(got - want) > worst * allowed) worst = fabs(got - want) / allowed;
}
// That `got` is the rounding to bf16 of a number within `allowed` of `want`.
static void check_rounded(const char *what, size_t i, double got, double want, double allowed) {
    int exponent;
    frexp(want, &exponent);
    if (!(got >= rounded(want - allowed) && got <= rounded(want + allowed)))
        check_failed(__FILE__, __LINE__, what, "[%zu] is %.9g, should be %.9g within %.3g and one rounding", i, got, want, allowed);
    const double beyond = fabs(got - want) - ldexp(1, exponent - 9);  // half the distance of bf16 numbers there
    if (beyond > worst * allowed) worst = beyond / allowed;
}

// ---------------------------------------------------------------------------
// Kernels

// The sum of a row's K products errs by K U32 of the sum of their sizes, in whatever order (Higham, "Accuracy and Stability of
// Numerical Algorithms", section 3.1); twice that for tensor cores, which cut off rather than round.
static void check_matmul(int M, int N, int K, bool a_transposed, bool b_transposed, bool fp32, bool with_bias, bool with_residual) {
    const size_t count = (size_t)M * N;
    double *a = draw_array((size_t)M * K, 1), *b = draw_array((size_t)K * N, 1), *bias = draw_array(N, 1);
    double *residual = draw_array(count, 3), *got;
    bf16 *gpu_a = to_gpu<bf16>(a, (size_t)M * K), *gpu_b = to_gpu<bf16>(b, (size_t)K * N), *out = gpu_array<bf16>(count);
    float *gradient = gpu_array<float>(count);
    if (fp32) {
        matmul_gradient(gradient, gpu_a, gpu_b, M, N, K, false);
        if (with_residual) matmul_gradient(gradient, gpu_a, gpu_b, M, N, K, true);  // twice the product
    } else {
        matmul(out, gpu_a, a_transposed, gpu_b, b_transposed, M, N, K, with_bias ? to_gpu<bf16>(bias, N) : NULL,
               with_residual ? to_gpu<bf16>(residual, count) : NULL);
    }
    got = fp32 ? from_gpu(gradient, count) : from_gpu(out, count);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0, size = 0;
            for (int k = 0; k < K; k++) {
                double product = a[a_transposed ? (size_t)k * M + i : (size_t)i * K + k];
                product *= b[b_transposed ? (size_t)j * K + k : (size_t)k * N + j];
                sum += product, size += fabs(product);
            }
            size_t at = (size_t)i * N + j;
            if (fp32 && with_residual) sum *= 2, size *= 2;
            if (!fp32 && with_bias) sum += bias[j], size += fabs(bias[j]);
            if (!fp32 && with_residual) sum += residual[at], size += fabs(residual[at]);
            (fp32 ? check_number : check_rounded)("product", at, got[at], sum, 2 * (K + 2) * U32 * size);
        }
    release();
}

TEST(matmul) {
    static const int rows[] = {1, 7, 63, 64, 130, 200};  // B T may be anything, all others are multiples of 32
    for (int i = 0; i < 24; i++) {
        int n = rows[i % 6], a = 32 * draw_int(1, 6), b = 32 * draw_int(1, 6);
        if (i % 4 == 3) check_matmul(a, b, n, true, false, true, false, draw_int(0, 1));
        else check_matmul(n, a, b, false, i % 4 == 1, false, i % 4 != 1 && draw_int(0, 1), i % 4 != 1 && draw_int(0, 1));
    }
}

TEST(layernorm) {
    static const int many = (LAYERNORM_BLOCKS + 50) * LAYERNORM_ROWS + 1;  // more rows than all blocks take at once
    static const int sizes[][2] = {{1, 32}, {5, 96}, {many, 288}, {7, 32}, {3, 1600}, {6, MAX_C}};  // N, C
    for (int shape = 0; shape < 6; shape++) {
        int N = sizes[shape][0], C = sizes[shape][1], add = shape % 2, add_dx = shape % 3 != 0;
        size_t count = (size_t)N * C;
        double *x = draw_array(count, 2), *w = draw_array(C, 1), *b = draw_array(C, 1);
        double *dout = draw_array(count, 1), *dx = draw_array(count, 1);
        for (size_t i = 0; i < count; i++) x[i] = rounded(x[i] + (double)(i / C % 3) * 20);  // rows far from 0, too
        bf16 *gpu_x = to_gpu<bf16>(x, count), *gpu_w = to_gpu<bf16>(w, C), *out = gpu_array<bf16>(count);
        float *mean = gpu_array<float>(N), *rstd = gpu_array<float>(N);
        layernorm_forward(out, mean, rstd, gpu_x, gpu_w, to_gpu<bf16>(b, C), N, C);

        double *sums[3], *to[3], *size[3], *grads = draw_array(3 * C, 1);  // of the weight, the bias, and the bias before
        float *gpu_grads = to_gpu<float>(grads, 3 * C);
        for (int i = 0; i < 3; i++) sums[i] = host_array<double>(C), size[i] = host_array<double>(C), to[i] = grads + i * C;
        double *m = from_gpu(mean, N), *r = from_gpu(rstd, N), *got = from_gpu(out, count);
        bf16 *gpu_dx = to_gpu<bf16>(dx, count);
        float *before = shape == 4 ? NULL : gpu_grads + 2 * C;
        layernorm_backward(gpu_dx, add_dx, gpu_grads, gpu_grads + C, before, to_gpu<bf16>(dout, count), gpu_x, gpu_w, mean, rstd,
                           gpu_array<float>(3 * LAYERNORM_BLOCKS * (size_t)C), N, C, add);
        double *got_dx = from_gpu(gpu_dx, count), *got_grads = from_gpu(gpu_grads, 3 * C);
        for (int n = 0; n < N; n++) {
            const size_t row = (size_t)n * C;
            double sum = 0, squares = 0, size_of_x = 0, g_sum = 0, g_size = 0, p_sum = 0, p_size = 0;
            for (int c = 0; c < C; c++) sum += x[row + c] / C, size_of_x = fmax(size_of_x, fabs(x[row + c]));
            for (int c = 0; c < C; c++) squares += (x[row + c] - sum) * (x[row + c] - sum) / C;
            check_number("mean", n, m[n], sum, 40 * U32 * size_of_x);
            check_number("rstd", n, r[n], 1 / sqrt(squares + 1e-5), 40 * U32 * r[n]);
            for (int c = 0; c < C; c++) {  // from here on with the mean and rstd that it found: they are within rounding
                double xhat = (x[row + c] - m[n]) * r[n], want = xhat * w[c] + b[c], g = dout[row + c] * w[c];
                check_rounded("out", row + c, got[row + c], want, 4 * U32 * (fabs(xhat * w[c]) + fabs(b[c])));
                g_sum += g / C, g_size += fabs(g) / C, p_sum += g * xhat / C, p_size += fabs(g * xhat) / C;
            }
            for (int c = 0; c < C; c++) {
                double xhat = (x[row + c] - m[n]) * r[n], d = dout[row + c], g = d * w[c], old = add_dx ? dx[row + c] : 0;
                double want = old + r[n] * (g - g_sum - xhat * p_sum);
                double error = r[n] * (fabs(g) + g_size + fabs(xhat) * p_size) + fabs(old);
                check_rounded("dx", row + c, got_dx[row + c], want, 40 * U32 * error);
                sums[0][c] += d * xhat, sums[1][c] += d, sums[2][c] += want;
                size[0][c] += fabs(d * xhat), size[1][c] += fabs(d), size[2][c] += error;
            }
        }
        for (int i = 0; i < 3 * C; i++) {  // a sum goes through the rows of one block, and then through 20 and 32 additions
            double old = to[i / C][i % C], kept = add ? old : 0;
            if (shape == 4 && i >= 2 * C) CHECK(got_grads[i] == old);  // not wanted
            else check_number("dweight, dbias, dbias before", i, got_grads[i], kept + sums[i / C][i % C],
                              (N / LAYERNORM_BLOCKS + 60) * U32 * (size[i / C][i % C] + fabs(kept)));
        }
        release();
    }
}

// x / (1 + e^-2u), and by its derivative. What e^-2u errs by grows with u, and the gate is 2^-126 at least.
TEST(gelu) {
    static const int sizes[][2] = {{1, 128}, {30, 1056}, {700, 64}};  // N, W
    for (int shape = 0; shape < 6; shape++) {
        int N = sizes[shape / 2][0], W = sizes[shape / 2][1], add = shape % 2;
        size_t count = (size_t)N * W;
        double *x = draw_array(count, 3), *dout = draw_array(count, 1), *dbias = draw_array(W, 1);
        double *sum = host_array<double>(W), *size = host_array<double>(W);
        for (size_t i = 0; i < count; i += 7) x[i] = rounded(x[i] * 10);
        bf16 *gpu_x = to_gpu<bf16>(x, count), *dx = to_gpu<bf16>(dout, count);
        bf16 *out = gpu_array<bf16>(count), *again = gpu_array<bf16>(count);
        float *gpu_dbias = to_gpu<float>(dbias, W), *plain = to_gpu<float>(dbias, W);
        float *partials = gpu_array<float>(SUM_BLOCKS * (size_t)W);
        gelu_forward(out, gpu_x, count);
        bias_backward(plain, dx, partials, N, W, add);
        gelu_backward(dx, gpu_x, shape == 0 ? NULL : again, gpu_dbias, partials, N, W, add);
        double *got = from_gpu(out, count), *got_dx = from_gpu(dx, count);
        double *got_sum = from_gpu(gpu_dbias, W), *got_plain = from_gpu(plain, W);
        bool same = !memcmp(copied(out, count), copied(again, count), count * sizeof(bf16));
        CHECK(same || shape == 0, "(GELU computed again has other bits)");
        for (int c = 0; c < W; c++) {
            double plain_sum = add ? dbias[c] : 0, plain_size = fabs(plain_sum);
            sum[c] = plain_sum, size[c] = plain_size;
            for (size_t i = c; i < count; i += W) {
                double u = sqrt(2 / M_PI) * (x[i] + 0.044715 * x[i] * x[i] * x[i]), gate = 1 / (1 + exp(-2 * u));
                double slope = 2 * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x[i] * x[i]);
                double error = 8 * (1 + fabs(u)) * U32 * gate + 2e-38;
                check_rounded("gelu", i, got[i], x[i] * gate, fabs(x[i]) * error);
                double d = dout[i] * (gate + x[i] * gate * (1 - gate) * slope);
                double d_error = fabs(dout[i]) * (1 + fabs(x[i]) * slope) * error;
                check_rounded("dx", i, got_dx[i], d, d_error);
                sum[c] += d, size[c] += fabs(d) + d_error / U32, plain_sum += dout[i], plain_size += fabs(dout[i]);
            }
            check_number("sum of dx", c, got_sum[c], sum[c], (N / SUM_BLOCKS + 60) * U32 * size[c]);
            check_number("sum", c, got_plain[c], plain_sum, (N / SUM_BLOCKS + 60) * U32 * plain_size);
        }
        release();
    }
}

// An exponential errs by the rounding of what it is of: logits, of which the largest is subtracted.
TEST(classifier) {
    static const int vocabularies[] = {1, 3, 67, 300, 384, 9000, 50257};
    for (int i = 0; i < (large ? 7 : 6) * 3; i++) {
        int V = vocabularies[i / 3], Vp = (int)round_up(V, 128), N = i % 3 == 0 ? 1 : 5;
        double *logits = draw_array((size_t)N * Vp, i % 3 == 2 ? 40 : 2), *old = draw_array(N, 3);
        float dscale = (float)(draw_unit() / N);
        for (int n = 0; n < N; n++)
            for (int c = V; c < Vp; c++) logits[(size_t)n * Vp + c] = NAN;  // must not count
        int *targets = draw_tokens(N, V);
        bf16 *gpu_logits = to_gpu<bf16>(logits, (size_t)N * Vp), *as_before = copied(gpu_logits, (size_t)N * Vp);
        double *losses = to_gpu<double>(old, N), *got;
        classifier(losses, gpu_logits, to_gpu<int>(targets, N), N, V, Vp, 0);
        CHECK(!memcmp(as_before, copied(gpu_logits, (size_t)N * Vp), (size_t)N * Vp * sizeof(bf16)), "(only the loss was wanted)");
        classifier(losses, gpu_logits, to_gpu<int>(targets, N), N, V, Vp, dscale);  // the loss is added a second time
        double *loss = from_gpu(losses, N);
        got = from_gpu(gpu_logits, (size_t)N * Vp);
        for (int n = 0; n < N; n++) {
            const double *row = logits + (size_t)n * Vp;
            double max = -INFINITY, sum = 0;
            for (int c = 0; c < V; c++) max = fmax(max, row[c]);
            for (int c = 0; c < V; c++) sum += exp(row[c] - max);
            double want = log(sum) + max - row[targets[n]], size = fabs(max) + fabs(row[targets[n]]) + 8;
            check_number("loss", n, loss[n], old[n] + 2 * want, 2 * 4 * U32 * size);
            for (int c = 0; c < Vp; c++) {
                double p = c < V ? exp(row[c] - max) / sum : 0, one = c == targets[n], arg = c < V ? max - row[c] : 0;
                check_rounded("dlogits", (size_t)n * Vp + c, got[(size_t)n * Vp + c], dscale * (p - one),
                              dscale * (p * (arg + size) + one) * 2 * U32 + 1e-37);
            }
        }
        release();
    }
}

TEST(embedding) {
    static const struct { int B, T, C, V, longest; } shapes[] = {
        {1, 1, 32, 1, 1}, {3, 21, 32, 5, 24}, {2, 100, 288, 300, 100}, {5, 7, 96, 67, 9}};
    for (int i = 0; i < 8; i++) {
        int B = shapes[i / 2].B, T = shapes[i / 2].T, C = shapes[i / 2].C, V = shapes[i / 2].V, longest = shapes[i / 2].longest;
        int add = i % 2, N = B * T;
        double *wte = draw_array(V * C, 1), *wpe = draw_array(longest * C, 1), *dout = draw_array(N * C, 1);
        double *dwte = draw_array(V * C, 1), *dwpe = draw_array(longest * C, 1);
        int *tokens = draw_tokens(N, V), *order = host_array<int>(N), *begins = host_array<int>(N + 1);
        int *gpu_tokens = to_gpu<int>(tokens, N), seen = 0;
        int distinct = sort_positions(order, begins, host_array<int>(V), tokens, N, V);
        bf16 *out = gpu_array<bf16>(N * C);
        float *gpu_dwte = to_gpu<float>(dwte, V * C), *gpu_dwpe = to_gpu<float>(dwpe, longest * C);
        embedding_forward(out, gpu_tokens, to_gpu<bf16>(wte, V * C), to_gpu<bf16>(wpe, longest * C), N, T, C);
        embedding_backward(gpu_dwte, gpu_dwpe, to_gpu<bf16>(dout, N * C), gpu_tokens, to_gpu<int>(order, N),
                           to_gpu<int>(begins, distinct + 1), distinct, B, T, C, longest, add);
        double *got = from_gpu(out, N * C), *got_wte = from_gpu(gpu_dwte, V * C), *got_wpe = from_gpu(gpu_dwpe, longest * C);
        double *size_wte = host_array<double>(V * C), *size_wpe = host_array<double>(longest * C);
        for (int j = 0; j < V * C; j++) size_wte[j] = fabs(dwte[j]);
        for (int j = 0; j < longest * C; j++) size_wpe[j] = fabs(dwpe[j] *= add);
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) {
                int t = tokens[n] * C + c, p = n % T * C + c, at = n * C + c;
                CHECK(got[at] == rounded((double)((float)wte[t] + (float)wpe[p])));
                dwte[t] += dout[at], size_wte[t] += fabs(dout[at]), dwpe[p] += dout[at], size_wpe[p] += fabs(dout[at]);
            }
        for (int j = 0; j < V * C; j++)
            check_number("dwte", j, got_wte[j], dwte[j], (N / EMBEDDING_WARPS + 10) * U32 * size_wte[j]);
        for (int j = 0; j < longest * C; j++) check_number("dwpe", j, got_wpe[j], dwpe[j], (B + 1) * U32 * size_wpe[j]);
        for (int v = 0, any; v < V; v++, seen += any) {
            any = 0;
            for (int n = 0; n < N; n++) any |= tokens[n] == v;
        }
        CHECK(distinct == seen, "(%d, and not %d distinct tokens)", distinct, seen);
        release();
    }
}

// ---------------------------------------------------------------------------
// The model

struct Shape { GptConfig config; int B, T; };

// How far a result of roundings in a row may be from the exact one, in relation to it. Each errs by 0.43 U of its size, and
// independent errors add up by their squares: 0.43 U sqrt(roundings). What comes after may enlarge an error, most of all a
// difference of what is nearly the same, as layer norms and softmax have it in their backwards, and so may the bad luck of a tensor
// with few elements, or of a bias whose gradient is small as a sum: a factor of 3.5 is left for that. Of it all, PyTorch in double
// with a rounding to bf16 wherever the trainer has one uses a quarter for the logits of the fixture's model and 8 with other
// weights; for their gradients a fifth in the median tensor, and 0.4 in the worst. The trainer uses a fifth in the median, and 0.7
// in the worst of 16744 tensors of small models.
static double tolerance(int roundings) { return 1.5 * U * sqrt(roundings); }
// On the way forward: the embedding; ln1, qkv, the softmax, att, res_att, ln2, fc, gelu, res_mlp in each block; lnf, logits.
static double forward_tolerance(GptConfig c) { return tolerance(9 * c.layers + 3); }
// And back: dlogits, dlnf, dx; dgelu, dfc, dln2, dx, datt, dS, dqkv, dln1, dx in each block.
static double backward_tolerance(GptConfig c) { return tolerance(18 * c.layers + 6); }
// The mean loss of N tokens errs as the mean of their logits' errors, which are independent: so that is smaller by sqrt(N). The
// logits of the models here have a deviation of about 1; the target's and the others' mean err each by themselves: sqrt(2) times.
static double loss_tolerance(GptConfig c, int N) { return forward_tolerance(c) * sqrt(2.0 / N); }

// Weights that are bf16 numbers, for layers whose values all have a deviation near 1, and attention that is far from even.
static float *draw_weights(GptConfig config) {
    size_t parameters;
    GptTensor *tensors = gpt_tensors(config, &parameters);
    float *weights = host_array<float>(parameters);
    for (int i = 0; i < gpt_tensor_count(config); i++)
        for (size_t j = 0; j < tensors[i].size; j++) {
            const bool matrix = tensors[i].rank == 2;
            double weight = draw_normal() * (matrix ? 0.85 / sqrt(config.channels) : 0.15) + (tensors[i].init_value == 1);
            weights[tensors[i].offset + j] = (float)rounded(weight);
        }
    free(tensors);
    return weights;
}

static Model *models[16];
static int model_count;
static Model *model_new(GptConfig config, int B, bool training, int recompute, bool master, float *weights) {  // until models_free
    Model *m = models[model_count++] = (Model *)allocate(1, sizeof *m, "a model");
    size_t bytes = model_plan(m, config, B, training, recompute, master);
    model_allocate(m);
    CUDA_CHECK(cudaMemsetAsync(m->block, 0xFF, bytes, gpu.stream));  // all NaN: what is not filled is seen
    model_upload(m, ModelState{weights, NULL, NULL}, 0);
    float *nothing = host_array<float>(m->parameters);
    for (size_t i = 0; i < m->parameters; i++) nothing[i] = NAN;
    if (training) copy_to_gpu(m, m->grads, nothing);
    return m;
}
static void models_free(void) {
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    for (; model_count > 0; free(models[model_count])) model_free(models[--model_count]);
}

// Forward and backward of tokens (B, T), (+)=. The sum of losses.
static double model_run(Model *m, const int *tokens, const int *targets, int B, int T, float dscale, bool add) {
    const int N = B * T, V = m->config.vocab;
    int *order = host_array<int>(N), *begins = host_array<int>(N + 1);
    int distinct = sort_positions(order, begins, host_array<int>(V), tokens, N, V);
    const DeviceBatch batch = {to_gpu<int>(tokens, N), to_gpu<int>(targets, N), to_gpu<int>(order, N),
                               to_gpu<int>(begins, distinct + 1)};
    CUDA_CHECK(cudaMemsetAsync(m->losses, 0, N * sizeof(double), gpu.stream));
    model_forward(m, batch.inputs, B, T);
    model_loss(m, batch.targets, N, dscale, add);
    if (dscale != 0) model_backward(m, &batch, distinct, B, T, add);
    double sum = 0, *losses = from_gpu(m->losses, N);
    for (int n = 0; n < N; n++) sum += losses[n];
    return sum;
}

static float *gradients(const Model *m) {
    float *grads = host_array<float>(m->parameters);
    copy_from_gpu(m, grads, m->grads);
    return grads;
}

// All tensors of a model: the error's norm in relation to the tensor's, and each error in relation to its largest element. That may
// be twice as large, as it is the worst of many.
static void check_tensors(const Model *m, const float *got, const float *want, double tolerance) {
    for (int i = 0; i < gpt_tensor_count(m->config); i++) {
        const GptTensor *t = &m->tensors[i];
        double squares = 0, errors = 0, max = 0;
        for (size_t j = t->offset; j < t->offset + t->size; j++) {
            squares += (double)want[j] * want[j], errors += ((double)got[j] - want[j]) * ((double)got[j] - want[j]);
            max = fmax(max, fabs(want[j]));
        }
        check_number(t->name, 0, sqrt(errors / squares), 0, tolerance);
        for (size_t j = t->offset; j < t->offset + t->size; j++)
            check_number(t->name, j - t->offset, got[j], want[j], 2 * tolerance * max);
    }
}

static const Shape small_shape = {{2, 1, 32, 24, 67}, 3, 21}, odd_shape = {{1, 3, 96, 103, 300}, 2, 100};
static const Shape shapes[] = {
    small_shape, odd_shape, {{1, 1, 32, 1, 3}, 1, 1}, {{2, 2, 128, 8, 257}, 3, 7}, {{1, 1, 128, 130, 130}, 1, 130},
    {{2, 1, 64, 5, 70}, 4, 1},
    {{4, 12, 768, 256, 50257}, 2, 256}, {{2, 25, 1600, 129, 1000}, 3, 129}, {{2, 8, 1024, 1024, 5000}, 1, 1000}};  // the large ones
static int shape_count(void) { return large ? 9 : 6; }

// Loss, logits and all gradients against train_gpt2.c's, and the logits that next_logits gives for some of the tokens.
TEST(model) {
    for (int i = 0; i < shape_count(); i++) {
        const GptConfig config = shapes[i].config;
        const int B = shapes[i].B, T = shapes[i].T, N = B * T, V = config.vocab;
        float *weights = draw_weights(config), *logits = host_array<float>((size_t)N * V);
        int *tokens = draw_tokens(N, V), *targets = draw_tokens(N, V);
        Reference *r = reference_new(config, B, weights);
        Model *m = model_new(config, B, true, 0, true, weights), *only_forward = model_new(config, B, false, 0, false, weights);
        double want = reference_gradient(r, tokens, targets, B, T, logits), max = 0, squares = 0, errors = 0;
        check_number("loss", i, model_run(m, tokens, targets, B, T, 1.0f / N, false) / N, want, loss_tolerance(config, N));
        check_tensors(m, gradients(m), reference_gradients(r), backward_tolerance(config));
        check_number("loss alone", i, model_run(m, tokens, targets, B, T, 0, false) / N, want, loss_tolerance(config, N));

        bf16 *gpu_logits = gpu_array<bf16>((size_t)N * m->Vp);
        model_forward(only_forward, to_gpu<int>(tokens, N), B, T);
        matmul(gpu_logits, only_forward->lnf, false, only_forward->weight.wte, true, N, m->Vp, config.channels);
        double *got = from_gpu(gpu_logits, (size_t)N * m->Vp);
        for (int n = 0; n < N; n++)
            for (int v = 0; v < m->Vp; v++) {
                double x = v < V ? logits[(size_t)n * V + v] : 0, y = got[(size_t)n * m->Vp + v];
                CHECK(v < V || y == 0, "(a logit of no token is %g)", y);
                max = fmax(max, fabs(x)), squares += x * x, errors += (y - x) * (y - x);
            }
        squares = fmax(squares, (double)N * V);  // of a few logits all may be small, which should have a deviation near 1
        check_number("logits", i, sqrt(errors / squares), 0, forward_tolerance(config));
        for (int j = 0; j < 4; j++) {  // the first sequence's first 1, 2, some and all tokens
            int count = j == 0 ? 1 : j == 1 ? (T > 2 ? 2 : T) : j == 2 ? draw_int(1, T) : T;
            const float *row = next_logits(only_forward, tokens, count);
            const float *wanted = logits + (size_t)(count - 1) * V;
            for (int v = 0; v < V; v++)
                check_number("next logits", v, row[v], wanted[v], 2 * forward_tolerance(config) * fmax(max, 3));
        }
        reference_free(r);
        models_free();
        release();
    }
}

// What the backward computes again has the same bits; the head's chunks of rows change only the order of sums in dwte.
TEST(recompute_and_chunks) {
    for (int i = 0; i < 6; i++) {
        const GptConfig config = shapes[i].config;
        const int B = shapes[i].B, T = shapes[i].T, N = B * T;
        float *weights = draw_weights(config), *grads[4];
        int *tokens = draw_tokens(N, config.vocab), *targets = draw_tokens(N, config.vocab);
        double losses[4];
        for (int j = 0; j < 4; j++) {
            Model *m = model_new(config, B, true, j % 3, true, weights);
            if (j == 3) m->head_rows = (int)least(round_up(draw_int((N + 5) / 6, N), 4), N);  // 4 rows are 256 bytes at least
            losses[j] = model_run(m, tokens, targets, B, T, 1.0f / N, false) / N, grads[j] = gradients(m);
            bool same = losses[j] == losses[0] && !memcmp(grads[j], grads[0], m->parameters * sizeof(float));
            if (j < 3) CHECK(same, "(recompute %d, shape %d)", j, i);
            else check_tensors(m, grads[j], grads[0], on_gpu ? backward_tolerance(config) : 4 * sqrt(N) * U32);
        }
        check_number("loss", i, losses[3], losses[0], on_gpu ? loss_tolerance(config, N) : 0);
        models_free();
        release();
    }
}

// The plan's groups are all there is, recomputing saves memory, and if a batch is too large, the largest that is not is named.
TEST(memory) {
    const GptConfig config = {2, 2, 64, 1024, 300};
    size_t bytes[4], left, all, sum = 0;
    int B;
    char text[512];
    CUDA_CHECK(cudaMemGetInfo(&left, &all));
    for (int i = 0; i < 4; i++) {
        Model m;
        bytes[i] = model_plan(&m, config, i < 3 ? 3 : 1 << 20, true, i % 3, true);
        CHECK(model_fits(&m, bytes[i]) == (i < 3), "(%d: %s)", i, error_text);
        for (size_t group : m.memory) sum += i == 0 ? group : 0;
        model_describe_memory(&m, text, sizeof text);
        for (const char *group : memory_group_names) CHECK(strstr(text, group), "(%s)", text);
        m.block = NULL;
        model_free(&m);
    }
    CHECK(bytes[0] == sum && bytes[1] < bytes[0] && bytes[2] < bytes[1]);
    const char *advice = strstr(error_text, "--batch ");
    CHECK(advice && sscanf(advice, "--batch %d would fit", &B) == 1 && B > 3, "(%s)", error_text);
    for (int i = 0; i < 2; i++) {
        Model m;
        size_t needed = model_plan(&m, config, B + i, true, 0, true);
        CHECK(model_fits(&m, needed) == (i == 0), "(batch %d, and %d was said to fit)", B + i, B);
        model_free(&m);
    }
}

// ---------------------------------------------------------------------------
// AdamW

static double norm_of(const float *x, size_t count) {
    double squares = 0;
    for (size_t i = 0; i < count; i++) squares += (double)x[i] * x[i];
    return sqrt(squares);
}

// That update number `update` was AdamW's with these gradients, against double. Without fp32 weights each new one is one of the two
// bf16 numbers beside the exact one, and on the average that: of the differences, in units of the distance of the two, the sum is 0
// but for 5 standard deviations, and so is that of the products of neighbours', or else they are not drawn independently.
static void check_adamw(Model *m, const Options *o, double rate, int64_t update, ModelState before, const float *grads) {
    const size_t P = m->parameters;
    const double norm = norm_of(grads, P);
    double bias = 0, variance = 0, products = 0, product_variance = 0, last = 0, last_variance = 0;
    const Update got = *copied(m->update, 1);
    CHECK(got.count == update && !got.skipped);
    check_number("norm", 0, got.norm, norm, 8 * U32 * norm);
    ModelState after = model_download(m);
    float *bf16_weights = host_array<float>(P);
    const bool master = m->master;
    m->master = false;
    ModelState rounded_after = model_download(m);
    m->master = master;
    memcpy(bf16_weights, rounded_after.weights, P * sizeof(float));
    state_free(rounded_after);
    double scale = o->grad_clip > 0 && norm > o->grad_clip ? o->grad_clip / norm : 1;
    const double rate_now = rate / (1 - pow(o->beta1, update)), v_sum = 1 - pow(o->beta2, update);
    double error1 = 4 + 1 / (1 - o->beta1), error2 = 6 + 1 / (1 - o->beta2);  // as 1 - beta is rounded: much where beta is near 1
    for (int t = 0; t < gpt_tensor_count(m->config); t++)
        for (size_t i = m->tensors[t].offset; i < m->tensors[t].offset + m->tensors[t].size; i++) {
            double g = grads[i] * scale, w = before.weights[i], decay = m->tensors[t].rank == 2 ? o->weight_decay : 0;
            double m1 = o->beta1 * before.m[i] + (1 - o->beta1) * g, m2 = o->beta2 * before.v[i] + (1 - o->beta2) * g * g;
            double m1_error = (o->beta1 * fabs(before.m[i]) + (1 - o->beta1) * fabs(g)) * error1 * U32 + 1e-44;
            double step_size = rate_now / (sqrt(m2 / v_sum) + o->eps);
            check_number("m", i, after.m[i], m1, m1_error);
            check_number("v", i, after.v[i], m2, m2 * error2 * U32 + 1e-44);
            double want = w - rate * decay * w - step_size * m1;
            double error = 4 * U32 * fabs(w) + step_size * (m1_error + fabs(m1) * (error2 + 8) * U32);
            if (master) {
                check_number("weight", i, after.weights[i], want, error);
                CHECK(bf16_weights[i] == (float)rounded(after.weights[i]), "(%.9g)", after.weights[i]);
                continue;
            }
            // The neighbours of `want` in bf16 are `nearer_to_0` and one `distance` on. If it is one of them but for its own error,
            // that of a neighbour may be reached, too.
            int exponent;
            frexp(want, &exponent);
            double distance = ldexp(1, exponent - 8), nearer_to_0 = floor(fabs(want) / distance) * distance;
            double fraction = (fabs(want) - nearer_to_0) / distance, got = fabs(after.weights[i]), e = (got - fabs(want)) / distance;
            CHECK(bf16_weights[i] == after.weights[i] && fabs(after.weights[i] - want) < distance + error, "(%.9g)", want);
            CHECK(got == nearer_to_0 || got == nearer_to_0 + distance || fmin(fraction, 1 - fraction) * distance < error,
                  "(%.9g becomes %.9g, which is not beside it)", want, after.weights[i]);
            double v = fraction * (1 - fraction);
            bias += e, variance += v, products += e * last, product_variance += v * last_variance;
            last = e, last_variance = v;
        }
    if (!master) {
        check_number("mean of roundings", 0, bias, 0, 5 * sqrt(variance) + 1e-3 * sqrt(P));
        check_number("neighbours' roundings", 0, products, 0, 5 * sqrt(product_variance) + 1e-3 * sqrt(P));
    }
    const bf16 *padding = copied(m->weight.wte, (size_t)m->Vp * m->config.channels);
    const size_t first = (size_t)m->config.vocab * m->config.channels, end = (size_t)m->Vp * m->config.channels;
    for (size_t i = first; i < end; i++) CHECK(to_double(padding[i]) == 0);  // the rows of wte from V on
    state_free(after);
}

// One update of everything.
static void check_update(Model *m, const Options *o, double rate, int64_t update, int64_t step) {
    const size_t P = m->parameters;
    const ModelState before = {host_array<float>(P), host_array<float>(P), host_array<float>(P)};
    float *grads = host_array<float>(P);
    for (size_t i = 0; i < P; i++) {
        grads[i] = draw_int(0, 9) ? (float)(draw_normal() * pow(10, draw_int(-6, 0))) : 0;
        before.weights[i] = (float)(m->master ? draw_normal() : rounded(draw_normal()));
        before.m[i] = (float)(draw_normal() * 0.1), before.v[i] = (float)(draw_unit() * 0.1);
    }
    const int N = m->B * m->config.seq;
    double *losses = draw_array(N, 1), loss = 0;
    for (int n = 0; n < N; n++) loss += losses[n];
    model_upload(m, before, update - 1);
    copy_to_gpu(m, m->grads, grads);
    put(m->losses, losses, N);
    model_update(m, o, rate, step, N, 3);
    check_number("loss", 0, copied(m->update, 1)->loss, loss / (3 * N), 1e-12 * N);
    check_adamw(m, o, rate, update, before, grads);
    release();
}

TEST(adamw) {
    static const int64_t updates[] = {1, 2, 7, 1000000000};
    for (int i = 0; i < 8; i++) {
        Options o;
        options_defaults(&o);
        const GptConfig config = {draw_int(1, 2), 1, 32, draw_int(1, 20), draw_int(1, 300)};
        if (i % 4 == 1) o.beta1 = 0.5 * draw_unit(), o.beta2 = 0.999, o.weight_decay = draw_unit(), o.eps = 1e-3, o.grad_clip = 0;
        if (i % 4 == 2) o.beta1 = 0.99, o.beta2 = 0, o.weight_decay = 0, o.eps = 1e-10, o.grad_clip = 1e9;
        o.seed = (int64_t)(draw() >> 12);
        Model *m = model_new(config, draw_int(1, 50), true, 0, i % 2, draw_weights(config));
        check_update(m, &o, pow(10, -1 - 3 * draw_unit()), updates[i / 2], draw_int(0, 1000000));
        models_free();
    }
}

// The roundings of one weight, over many steps and for two seeds, are as often up as the place between its neighbours wants it.
TEST(stochastic_rounding) {
    const GptConfig config = {1, 1, 32, 4, 60};
    Options o;
    options_defaults(&o);
    o.weight_decay = 0, o.beta1 = 0, o.beta2 = 0, o.grad_clip = 0;
    Model *m = model_new(config, 1, true, 0, false, draw_weights(config));
    const size_t P = m->parameters;
    float *weights = host_array<float>(P), *grads = host_array<float>(P);
    int *ups = host_array<int>(P), same = 0;
    enum { STEPS = 64 };
    for (size_t i = 0; i < P; i++) weights[i] = 1, grads[i] = -1;  // a step up from 1 by the rate: to between 1 and 1 + 2^-7
    for (int step = 0; step < STEPS; step++) {
        CUDA_CHECK(cudaMemsetAsync(m->losses, 0, 4 * sizeof(double), gpu.stream));
        model_upload(m, ModelState{weights, NULL, NULL}, 0);
        copy_to_gpu(m, m->grads, grads);
        o.seed = step % 2 ? 5 : 6;
        model_update(m, &o, 0.3 / 128, step / 2, 4, 1);
        ModelState after = model_download(m);
        for (size_t i = 0; i < P; i++) {
            CHECK(after.weights[i] == 1 || after.weights[i] == 1 + 1.0f / 128, "(%.9g)", after.weights[i]);
            ups[i] += after.weights[i] > 1, same += after.weights[i] > 1 && i > 0 && after.weights[i - 1] > 1;
        }
        state_free(after);
    }
    // The number of ups of a weight is binomial. Were draws shared by weights, steps or seeds, its spread would be another.
    double mean = 0, variance = 0, wanted = STEPS * 0.3 * 0.7;
    for (size_t i = 0; i < P; i++) mean += ups[i] / (double)P, variance += (ups[i] - 0.3 * STEPS) * (ups[i] - 0.3 * STEPS) / P;
    check_number("ups", 0, mean, 0.3 * STEPS, 5 * sqrt(wanted / P));
    check_number("variance of ups", 0, variance, wanted, 5 * wanted * sqrt(2.0 / P));
    check_number("neighbours both up", 0, same, 0.09 * STEPS * P, 5 * sqrt(0.09 * STEPS * P) * 1.5);
    models_free();
    release();
}

// ---------------------------------------------------------------------------
// Training

static double *fixture(const char *name, size_t count) {  // numbers of any type, as double
    SafeTensors file;
    CHECK(safetensors_open(&file, "tests/tiny_gpt2_32.safetensors"), "%s", error_text);
    const SafeTensor *t = safetensors_find(&file, name);
    CHECK(t && t->bytes == count * safetensors_dtype_size(t->dtype), "(%s is missing or has another size)", name);
    double *out = host_array<double>(count), *data = host_array<double>(count);
    CHECK(safetensors_read(&file, t, data), "%s", error_text);
    for (size_t i = 0; i < count; i++)
        out[i] = t->dtype[0] == 'I' ? ((int32_t *)data)[i] : t->dtype[1] == '6' ? data[i] : ((float *)data)[i];
    safetensors_close(&file);
    return out;
}

// Ten losses and norms of a training run on two batches in turn. An update by AdamW is nearly the rate times each gradient's sign,
// and an error turns the signs of those that are smaller than it: noise of 1 % of the gradients' size, as in this model, turns 0.8 %
// of them. There the update errs by 2 rate, which is 2 sqrt(0.008) of its length, in a direction that has nothing to do with the
// gradient g of the next loss: that errs by 2 sqrt(0.008) rate |g| after one update, and sqrt(updates) times as much after several. 5
// standard deviations of it are allowed; PyTorch with roundings wherever the trainer has one differed by 0.0125 at most in 9 models, a
// quarter of that. The norm changes along with the gradient.
TEST(training_as_pytorch) {
    enum { B = 3, T = 21, N = B * T, STEPS = 10 };
    Options o;
    options_defaults(&o);
    for (int master = 0; master < 2; master++) {
        float *weights = draw_weights(small_shape.config);
        int *tokens = host_array<int>(N * STEPS), *targets = host_array<int>(N * STEPS);
        Model *m = model_new(small_shape.config, B, true, 1, master, weights);
        for (int t = 0; t < gpt_tensor_count(m->config); t++) {
            double *x = fixture(m->tensors[t].name, m->tensors[t].size);
            for (size_t i = 0; i < m->tensors[t].size; i++) weights[m->tensors[t].offset + i] = (float)x[i];
        }
        model_upload(m, ModelState{weights, NULL, NULL}, 0);
        double *inputs = fixture("train.input", N * STEPS), *outputs = fixture("train.target", N * STEPS);
        for (int i = 0; i < N * STEPS; i++) tokens[i] = (int)inputs[i], targets[i] = (int)outputs[i];
        o.grad_clip = *fixture("train.max_norm", 1);
        const double *losses = fixture("train.losses", STEPS), *norms = fixture("train.norms", STEPS), rate = 0.01;
        for (int step = 0; step < STEPS; step++) {
            double loss = model_run(m, tokens + step * N, targets + step * N, B, T, 1.0f / N, false) / N;
            model_update(m, &o, rate, step, N, 1);
            Update update = *copied(m->update, 1);
            check_number("loss", step, loss, losses[step],
                         loss_tolerance(m->config, N) + 5 * 2 * sqrt(0.008) * rate * norms[step] * sqrt(step));
            check_number("norm", step, update.norm, norms[step], backward_tolerance(m->config) * (1 + step) * norms[step]);
            check_number("reported loss", step, update.loss, loss, 1e-12 * loss);
            if (getenv("TEST_VERBOSE"))
                printf("#   loss %.6f, should be %.6f; norm %.4f, should be %.4f\n", loss, losses[step], update.norm, norms[step]);
        }
        CHECK(losses[8] < losses[0] - 0.5 && losses[9] < losses[1] - 0.5, "(the run does not learn: it would say little)");
        models_free();
        release();
    }
}

// A run with random tokens, of a text or of a shard, in a temporary folder, as main() sets it up.
struct Trainer {
    Run run;
    Model *m;
    Feed feed;
    Report report;
};
static char folder[] = "/tmp/test_gpt2cu.XXXXXX", data_path[64], out_path[64];

static void make_data(int length, int V = 0) {  // a text, or a shard if there is a vocabulary
    const int32_t header[SHARD_HEADER] = {SHARD_MAGIC, SHARD_VERSION, length, V};
    strcpy(folder + sizeof folder - 7, "XXXXXX");
    CHECK(mkdtemp(folder));
    snprintf(data_path, sizeof data_path, "%s/data.txt", folder);
    snprintf(out_path, sizeof out_path, "%s/run", folder);
    FILE *file = fopen(data_path, "wb");
    CHECK(file);
    if (V) fwrite(header, sizeof header, 1, file);
    for (int i = 0, token; i < length; i++) {
        token = V ? draw_int(0, V - 1) : draw_int(0, 9) ? "abcdefgh"[draw_int(0, 7)] : draw_int(0, 255);
        fwrite(&token, V ? 2 : 1, 1, file);  // the low bytes
    }
    CHECK(!fclose(file));
}
static void remove_data(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (folder[sizeof folder - 2] != 'X') CHECK(!system(command));
    strcpy(folder + sizeof folder - 7, "XXXXXX");
}

static Trainer *trainers[8];
static int trainer_count;
static Trainer *trainer_new(const char *options) {  // separated by spaces
    Trainer *t = trainers[trainer_count++] = (Trainer *)allocate(1, sizeof *t, "a trainer");
    char *text = (char *)keep(strdup(options), false), *words[64] = {(char *)"test_gpt2cu"};
    int count = 1;
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    CHECK(run_setup(&t->run, count, words), "%s", error_text);
    const Options *o = &t->run.options;
    t->m = models[model_count++] = (Model *)allocate(1, sizeof *t->m, "a model");
    size_t bytes = model_plan(t->m, t->run.config, (int)o->batch, true, (int)o->recompute, o->master_weights);
    model_allocate(t->m);
    CUDA_CHECK(cudaMemsetAsync(t->m->block, 0xFF, bytes, gpu.stream));
    CHECK(model_start(t->m, &t->run), "%s", error_text);
    feed_open(&t->feed, t->m);
    CUDA_CHECK(cudaMallocHost(&t->report.update, sizeof(Update)));
    CUDA_CHECK(cudaEventCreateWithFlags(&t->report.arrived, cudaEventDisableTiming));
    return t;
}
static void trainers_free(void) {
    models_free();
    for (; trainer_count > 0; free(trainers[trainer_count])) {
        Trainer *t = trainers[--trainer_count];
        feed_close(&t->feed);
        CUDA_CHECK(cudaFreeHost(t->report.update));
        CUDA_CHECK(cudaEventDestroy(t->report.arrived));
        data_close(&t->run.train), data_close(&t->run.val);
    }
}
static Update trainer_step(Trainer *t) {
    for (int i = 0; i < t->run.accumulation; i++)
        CHECK(batch_launch(t->m, &t->run, &t->feed, t->run.progress.samples + (uint64_t)(i * t->m->B), i > 0), "%s", error_text);
    update_launch(t->m, &t->run, &t->report, t->run.progress.step);
    return update_collect(&t->run, t->m, &t->report);
}

enum { RUN_T = 19 };
static const char *with_data(const char *more) {
    static char options[1024];
    snprintf(options, sizeof options, "--data %s --out %s --layers 2 --heads 1 --channels 32 --seq %d --lr 0.01 --warmup 2 %s",
             data_path, out_path, RUN_T, more);
    return options;
}

// Ten steps of the trainer, each beside train_gpt2.c's with the same weights: its gradients have to be those, with the errors of the
// test "model", and its update AdamW's with them. Were each to go on from its own weights, they would soon be far apart: the first
// updates are nearly the rate times each gradient's sign, and of all tokens that a batch lacks the gradients in a column of wte are
// small and alike, and turn their signs together.
// The norm errs by that part of the errors which has the gradient's direction: as they are independent, a part of 1 / sqrt(N), as of
// the loss. Only the targets' dlogits, (p - 1) / N, are nearly one number for all tokens where p is small, and so may their rounding
// be: U.
TEST(training_as_fp32) {
    static const Shape trained[] = {small_shape, odd_shape, shapes[3], {{2, 2, 128, 64, 50257}, 2, 64}};  // the last is a large one
    enum { STEPS = 10 };
    for (int i = 0; i < (large ? 4 : 3); i++) {
        const GptConfig c = trained[i].config;
        const int B = trained[i].B, T = c.seq, N = B * T, batches = draw_int(0, 1) ? B : 1;
        double losses[STEPS];
        char options[256];
        make_data((2 * B + 1) * T + 1, c.vocab);  // two steps are an epoch, so that there is something to learn
        snprintf(options, sizeof options, "--layers %d --heads %d --channels %d --seq %d --batch %d --total-batch %d --lr %g "
                 "--recompute 1 --master-weights %d --val-fraction 0", c.layers, c.heads, c.channels, T, B / batches, N,
                 0.32 / c.channels, draw_int(0, 1));
        Trainer *t = trainer_new(with_data(options));
        float *weights = draw_weights(c);
        model_upload(t->m, ModelState{weights, NULL, NULL}, 0);
        Reference *r = reference_new(c, B, weights);
        for (int step = 0; step < STEPS; step++) {
            Batch batch = {host_array<int>(T + 1), host_array<int>(N), host_array<int>(N)};
            CHECK(batch_read(&batch, &t->run, true, t->run.progress.samples, 0, B), "%s", error_text);
            const ModelState before = model_download(t->m);
            for (size_t j = 0; j < t->m->parameters; j++) reference_weights(r)[j] = (float)rounded(before.weights[j]);
            const double loss = reference_gradient(r, batch.inputs, batch.targets, B, T, NULL);
            const double norm = norm_of(reference_gradients(r), t->m->parameters);
            const Update got = trainer_step(t);
            const float *grads = gradients(t->m);
            losses[step] = got.loss;
            check_number("loss", step, got.loss, loss, loss_tolerance(c, N));
            check_number("norm", step, got.norm, norm, (U + backward_tolerance(c) / sqrt(N)) * norm);
            check_tensors(t->m, grads, reference_gradients(r), backward_tolerance(c));
            check_adamw(t->m, &t->run.options, schedule_rate(&t->run.schedule, step), step + 1, before, grads);
            state_free(before);
            release();
        }
        CHECK(losses[8] + losses[9] < losses[0] + losses[1] - 0.5, "(the run does not learn: it would say little)");
        reference_free(r);
        trainers_free();
        remove_data();
    }
}

static uint32_t state_checksum(const Model *m) {  // of weights, the bf16 ones, too, moments, and the gradient
    ModelState s = model_download(m);
    uint32_t crc = crc32_update(0, copied(m->weights, m->count), m->count * sizeof(bf16));
    float *const arrays[] = {s.weights, s.m, s.v, gradients(m)};
    for (float *array : arrays) crc = crc32_update(crc, array, m->parameters * sizeof(float));
    state_free(s);
    return crc;
}

TEST(same_bits) {  // in two runs, and on the CPU with another order of threads
    for (int master = 0; master < 2; master++) {
        uint32_t crc[2] = {0, 0};
        make_data(5000);
        for (int run = 0; run < 2; run++) {
#ifdef __CUDACC__
            products.count = 0;  // algorithms are measured and chosen anew
#else
            cuda_on_cpu::seed += 1000;
#endif
            const char *options = master ? "--batch 3 --total-batch 114" : "--batch 3 --total-batch 114 --master-weights 0";
            Trainer *t = trainer_new(with_data(options));
            for (int step = 0; step < 2; step++) {
                Update u = trainer_step(t);
                crc[run] = crc32_update(crc32_update(crc[run], &u.loss, sizeof u.loss), &u.norm, sizeof u.norm);
            }
            crc[run] ^= state_checksum(t->m);
            trainers_free();
        }
        CHECK(crc[0] == crc[1], "(two runs differ)");
        remove_data();
    }
}

TEST(accumulation) {  // one batch, and the same in 2 and in 4 pieces: sums in another order, on a GPU by other algorithms, too
    Trainer *t[3];
    Update u[3];
    float *grads[3];
    make_data(5000);
    for (int i = 0; i < 3; i++) {
        char options[64];
        snprintf(options, sizeof options, "--batch %d --total-batch %d", 4 >> i, 4 * RUN_T);
        t[i] = trainer_new(with_data(options));
        CHECK(t[i]->run.accumulation == 1 << i);
        u[i] = trainer_step(t[i]), grads[i] = gradients(t[i]->m);
        const double allowed = on_gpu ? backward_tolerance(t[i]->run.config) : 100 * U32;
        check_number("loss", i, u[i].loss, u[0].loss, on_gpu ? loss_tolerance(t[i]->run.config, 4 * RUN_T) : 1e-12);
        check_number("norm", i, u[i].norm, u[0].norm, allowed * u[0].norm);
        check_tensors(t[i]->m, grads[i], grads[0], allowed);
        CHECK(t[i]->run.progress.samples == 4);
    }
    trainers_free();
    remove_data();
}

// What is not finite changes nothing but the counters; later bias corrections count real updates only.
TEST(skipped_updates) {
    for (int master = 0; master < 2; master++) {
        make_data(5000);
        const char *options = with_data(master ? "--batch 2" : "--batch 2 --master-weights 0");
        Trainer *t = trainer_new(options), *twin = trainer_new(options);
        const size_t bytes = t->m->count * sizeof(bf16);
        for (int step = 0; step < 3; step++) {
            bf16 *good = copied(t->m->weights, t->m->count), bad = __float2bfloat16(step == 0 ? NAN : INFINITY);
            uint32_t crc[2];
            if (step < 2) put(t->m->weight.lnf_b + draw_int(0, 31), &bad, 1);
            for (int i = 0; i < 2; i++) {
                ModelState state = model_download(t->m);
                crc[i] = crc32_update(0, copied(t->m->weights, t->m->count), bytes);
                for (float *array : {state.weights, state.m, state.v})
                    crc[i] = crc32_update(crc[i], array, t->m->parameters * sizeof(float));
                state_free(state);
                if (i == 1) break;
                Update u = trainer_step(t);
                CHECK(u.skipped == (step < 2) && isfinite(u.loss) == (step == 2) && isfinite(u.norm) == (step == 2));
                const Progress *p = &t->run.progress;
                CHECK(u.count == (step == 2) && p->skipped == (step < 2 ? step + 1 : 2));
                CHECK(p->step == step + 1 && p->samples == 2 * (uint64_t)(step + 1));
            }
            CHECK((crc[0] == crc[1]) == (step < 2), "(step %d)", step);
            if (step < 2) put(t->m->weights, good, t->m->count);
        }
        twin->run.progress.step = 2, twin->run.progress.samples = 4;  // it makes only the good step
        trainer_step(twin);
        CHECK(state_checksum(t->m) == state_checksum(twin->m), "(the good update after two bad ones is another than without them)");
        float infinite = INFINITY;  // a finite loss, but not its gradient
        uint32_t before = state_checksum(t->m), after;
        float *last = t->m->grad.lnf_b + 31;
        float was = *copied(last, 1);
        put(last, &infinite, 1);
        model_update(t->m, &t->run.options, 0.01, 3, 2 * RUN_T, 1);
        Update u = *copied(t->m->update, 1);
        put(last, &was, 1);
        after = state_checksum(t->m);
        CHECK(u.skipped && u.count == 1 && isfinite(u.loss) && before == after);
        trainers_free();
        remove_data();
        release();
    }
}

TEST(validate) {  // the mean over all windows, those of a last incomplete batch, too
    for (int i = 0; i < 3; i++) {
        char options[64];
        double want = 0, got;
        int *window = host_array<int>(RUN_T + 1);
        make_data(1000);
        snprintf(options, sizeof options, "--batch %d --val-fraction 0.15 --val-steps %d", i + 2, i);
        Trainer *t = trainer_new(with_data(options));
        const GptConfig config = t->run.config;
        size_t windows = (t->run.val.end - t->run.val.begin - 1) / RUN_T;
        if (i && windows > (size_t)i * (i + 2)) windows = i * (i + 2);
        float *weights = draw_weights(config);
        model_upload(t->m, ModelState{weights, NULL, NULL}, 0);
        CHECK(validate(t->m, &t->run, &t->feed, &got), "%s", error_text);
        Reference *r = reference_new(config, 1, weights);
        for (size_t n = 0; n < windows; n++) {
            CHECK(data_spread(&t->run.val, n, windows, config.vocab, window), "%s", error_text);
            want += reference_gradient(r, window, window + 1, 1, RUN_T, NULL) / (double)windows;
        }
        check_number("validation loss", i, got, want, loss_tolerance(config, (int)windows * RUN_T));
        reference_free(r);
        trainers_free();
        remove_data();
        release();
    }
}

// Trains as the program does, in the folder out_path. What it prints goes nowhere.
static int program(const char *options) {
#ifdef __CUDACC__
    products.count = 0;  // as in a new process
#endif
    Trainer *t = trainer_new(options);
    t->run.progress.tokens = t->run.train.end - t->run.train.begin;
    mkdir(out_path, 0777);
    fflush(stdout);
    int out = dup(STDOUT_FILENO), nothing = open("/dev/null", O_WRONLY);
    dup2(nothing, STDOUT_FILENO);
    int status = train(t->m, &t->run);
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out), close(nothing);
    trainers_free();
    return status;
}

static unsigned char *contents(const char *path, const char *name, size_t *size) {
    char file_name[256];
    snprintf(file_name, sizeof file_name, "%s/%s", path, name);
    FILE *file = fopen(file_name, "rb");
    CHECK(file, "(%s)", file_name);
    unsigned char *bytes = host_array<unsigned char>(4 << 20);
    *size = fread(bytes, 1, 4 << 20, file);
    fclose(file);
    return bytes;
}

// A run of 8 steps, with checkpoints, validation and samples on the way. It ends where the same steps end that are made one by one;
// and so does it once more from step 3 on, by --resume auto: with the same files, byte for byte: weights, moments, position in the
// data, options.
TEST(train_and_resume) {
    enum { STEPS = 8 };
    for (int master = 0; master < 2; master++) {
        char options[256], last[128], aside[128], out[128];
        make_data(1000);
        snprintf(options, sizeof options, "--batch 2 --total-batch %d --steps %d --save-every 3 --keep 9 --val-every 7 --val-steps 1 "
                 "--sample-every 6 --tokens 3 --recompute %d --master-weights %d", 4 * RUN_T, STEPS, 2 * master, master);
        snprintf(last, sizeof last, "%s/ckpt-%08d", out_path, STEPS);
        snprintf(aside, sizeof aside, "%s/aside", folder);
        snprintf(out, sizeof out, "--out %s --resume auto", out_path);
        CHECK(program(with_data(options)) == 0);

        Trainer *t = trainer_new(with_data(options));
        for (int step = 0; step < STEPS; step++) trainer_step(t);
        ModelState state = model_download(t->m);
        const size_t P = t->m->parameters, bytes = P * sizeof(float);
        float *w = host_array<float>(P), *m = host_array<float>(P), *v = host_array<float>(P);
        CHECK(checkpoint_load_weights(last, t->run.config, w) && checkpoint_load_optimizer(last, t->run.config, m, v), "%s", error_text);
        CHECK(!memcmp(w, state.weights, bytes) && !memcmp(m, state.m, bytes) && !memcmp(v, state.v, bytes));
        state_free(state);
        trainers_free();

        CHECK(!rename(last, aside));
        snprintf(options, sizeof options, "rm -r '%s/ckpt-00000006'", out_path);
        CHECK(!system(options));
        CHECK(program(out) == 0);
        for (int i = 0; i < CHECKPOINT_FILES; i++) {
            size_t size, again_size;
            unsigned char *first = contents(aside, checkpoint_files[i], &size);
            unsigned char *again = contents(last, checkpoint_files[i], &again_size);
            bool same = size == again_size && size > 10 && !memcmp(first, again, size);
            CHECK(same, "(%s is another after the resumed run)", checkpoint_files[i]);
        }
        remove_data();
        release();
    }
}

// ---------------------------------------------------------------------------

static void test_begins(const char *name) {
    (void)name;
    trainers_free();  // and whatever else a failed test has left
    release();
    remove_data();
    worst = 0, started = seconds_now();
}

static void test_ends(const char *name) {
    (void)name;
    if (getenv("TEST_VERBOSE")) printf("#   %.2f s, %.2f of the tolerance\n", seconds_now() - started, worst);
}

int main(int argc, char **argv) {
    char name[512];
#ifndef __CUDACC__
    if (!getenv("OMP_WAIT_POLICY")) {  // at these sizes threads mostly wait: asleep, or it takes minutes where others use the cores
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);  // OpenMP reads it before main; if there is no /proc, it just goes on
    }
#endif
    if (!gpu_start(name, sizeof name)) die_of_failure();
    large = on_gpu && !getenv("TEST_SMALL");
    printf("# computes %s\n", name);
    return run_tests(argc > 1 ? argv[1] : NULL, test_begins, test_ends) > 0;
}

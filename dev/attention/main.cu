// The harness of the attention variants: tests that they are exact, and measures how fast they are.
//
//   make attention && ./attention                    lists the variants and the commands (make attention-cpu: the same on the CPU)
//   ./attention test                                 every variant against attention in double precision
//   ./attention test v2 "T 129"                      one variant, and only the cases with this in their name
//   TEST_SEED=7 ./attention test                     with the inputs of a run that printed this seed
//   TEST_RUNS=30 ./attention test trainer            are all of 30 runs the same to the bit? (of 2, without it or with less)
//   ./attention bench                                the usual shapes
//   ./attention bench v2 8 2048 32 64 --full --json  one variant (beside naive), one shape B T NH HS, without a causal mask
//
// A variant is a file of its own beside this one; variant.h says what it has to provide, and reference.h what is expected of it.

#include <errno.h>
#include <math.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <new>
#include <string>
#include <vector>

#include "reference.h"
#include "variant.h"

#ifdef __CUDACC__
#include <cublas_v2.h>
#endif

Variant variants[MAX_VARIANTS];
int variant_count;

static std::string shape_name(Shape s) {
    char name[128];
    snprintf(name, sizeof name, "B %d T %d NH %d HS %d %s", s.B, s.T, s.NH, s.HS, s.causal ? "causal" : "full");
    return name;
}

// ----------------------------------------------------------------------------
// The device

static cudaDeviceProp device;

static void open_device(void) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0)
        die("there is no CUDA device here (%s); attention-cpu runs the same kernels on the CPU", cudaGetErrorString(error));
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    if (device.major < 8)
        die("%s has compute capability %d.%d, and the kernels need 8.0 or later; attention-cpu runs them on the CPU", device.name,
            device.major, device.minor);
#ifdef __CUDACC__
    if (!gpu_has_code(device, BUILT_FOR, "attention")) die_of_failure();
#endif
}

// Free device memory in bytes, less what allocations lose to rounding.
static double usable_memory(void) {
    size_t free, total;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return 0.95 * (double)free;
}

// Host memory in bytes, less what others need.
static double host_memory(void) { return 0.8 * (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE); }

// What is needed of it: inputs and results, twice each, and the reference of so many heads.
static double host_bytes(Shape s, size_t heads) { return (32.0 * s.B * s.NH + 64.0 * (double)heads) * s.T * s.HS; }

static double gib(double bytes) { return bytes / 1073741824.0; }

// Bytes of qkv, dout, out, lse and dqkv, in floating point, where absurd shapes do not overflow.
static double tensor_bytes(Shape s) { return (double)s.B * s.T * s.NH * (16.0 * s.HS + 4); }

// Device memory between two guards, which show what was written outside.
struct Buffer {
    enum { GUARD_BYTE = 0xA5, POISON_BYTE = 0xFF };  // all-ones is NaN in bf16 and fp32
#ifdef CUDA_ON_CPU_SANITIZED
    enum { GUARD = 0 };  // the sanitizer has guards of its own, and sees reads, too
#else
    enum { GUARD = 4096 };
#endif
    size_t bytes;
    unsigned char *memory;

    explicit Buffer(size_t bytes) : bytes(bytes) {
        CUDA_CHECK(cudaMalloc((void **)&memory, bytes + 2 * GUARD));
        CUDA_CHECK(cudaMemset(memory, GUARD_BYTE, bytes + 2 * GUARD));
    }
    ~Buffer() { CUDA_CHECK(cudaFree(memory)); }
    Buffer(const Buffer &) = delete;

    void *data(void) const { return memory + GUARD; }
    void poison(void) { CUDA_CHECK(cudaMemset(data(), POISON_BYTE, bytes)); }
    template <class X> void upload(const std::vector<X> &from) {
        CUDA_CHECK(cudaMemcpy(data(), from.data(), bytes, cudaMemcpyHostToDevice));
    }
    template <class X> void download(std::vector<X> &to) const {
        to.resize(bytes / sizeof(X));
        CUDA_CHECK(cudaMemcpy(to.data(), data(), bytes, cudaMemcpyDeviceToHost));
    }
    bool guards_intact(void) const {
        std::vector<unsigned char> guards(2 * GUARD);
        CUDA_CHECK(cudaMemcpy(guards.data(), memory, GUARD, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(guards.data() + GUARD, memory + GUARD + bytes, GUARD, cudaMemcpyDeviceToHost));
        return std::count(guards.begin(), guards.end(), GUARD_BYTE) == 2 * GUARD;
    }
};

// All that one forward and backward need.
struct Tensors {
    Shape s;
    Buffer qkv, dout, out, lse, dqkv, workspace;

    Tensors(const Variant &v, const Inputs &in)
        : s(in.s), qkv(6 * elements(s)), dout(2 * elements(s)), out(2 * elements(s)), lse(4 * heads(s) * s.T),
          dqkv(6 * elements(s)), workspace(v.workspace_bytes(s)) {
        qkv.upload(in.qkv);
        dout.upload(in.dout);
    }
    void forward(const Variant &v) {
        v.forward((bf16 *)out.data(), (float *)lse.data(), (const bf16 *)qkv.data(), workspace.data(), s, 0);
    }
    void backward(const Variant &v) {
        v.backward((bf16 *)dqkv.data(), (const bf16 *)dout.data(), (const bf16 *)qkv.data(), (const bf16 *)out.data(),
                   (const float *)lse.data(), workspace.data(), s, 0);
    }
};

static int parse_size(const char *name, const char *text) {
    char *end;
    long value = strtol(text, &end, 10);
    if (end == text || *end || value < 1 || value > INT32_MAX)
        die("%s is '%s'; expected a whole number from 1 to %d", name, text, INT32_MAX);
    return (int)value;
}

// ----------------------------------------------------------------------------
// attention test

template <class X> static bool same_bits(const std::vector<X> &a, const std::vector<X> &b) {
    return !memcmp(a.data(), b.data(), a.size() * sizeof(X));
}

// Runs a variant twice, or `runs` times, and checks all it must hold to. True with a note on the errors, or false after fail().
static bool passes(const Variant &v, const Inputs &in, const Reference &ref, double most_rms, int runs, std::string &note) {
    Tensors t(v, in);
    Outputs first, second;
    auto poison = [&] { for (Buffer *b : {&t.out, &t.lse, &t.dqkv, &t.workspace}) b->poison(); };
    poison();
    t.forward(v);
    t.out.download(first.out), t.lse.download(first.lse);
    t.backward(v);
    t.dqkv.download(first.dqkv);
    poison();
    t.forward(v);
    t.backward(v);
    t.out.download(second.out), t.lse.download(second.lse), t.dqkv.download(second.dqkv);

    const struct { const char *name; const Buffer *buffer; } guarded[] = {{"qkv", &t.qkv}, {"dout", &t.dout}, {"out", &t.out},
        {"lse", &t.lse}, {"dqkv", &t.dqkv}, {"workspace", &t.workspace}};
    for (auto g : guarded)
        if (!g.buffer->guards_intact()) return fail("the memory before or after %s was written to", g.name);
    Inputs after;
    t.qkv.download(after.qkv), t.dout.download(after.dout);
    if (!same_bits(in.qkv, after.qkv)) return fail("qkv, an input, was changed");
    if (!same_bits(in.dout, after.dout)) return fail("dout, an input, was changed");

    for (int r = 0; r < RESULTS; r++) {
        Errors w = errors_of(second, in.s, ref, r);
        if (!(w.of_bound <= 1))
            return fail("%s is %.6g in batch element %d, position %d, head %d, element %d; expected %.6g, to within %.2g",
                        result_names[r], w.found, w.b, w.t, w.n, w.h, w.expected, w.bound);
        if (!(w.rms <= most_rms))
            return fail("%s is off by %.4g times what roundings account for (root mean square); expected at most %.4g times",
                        result_names[r], w.rms, most_rms);
        char text[64];
        snprintf(text, sizeof text, "%s %.2f ", result_names[r], fmax(w.of_bound, w.rms / most_rms));
        note += text;
    }
    // The first out and lse were read before backward, the second after it.
    if (!same_bits(first.out, second.out)) return fail("out has other bits in a second run, or backward changed it");
    if (!same_bits(first.lse, second.lse)) return fail("lse has other bits in a second run, or backward changed it");
    if (!same_bits(first.dqkv, second.dqkv)) return fail("dqkv has other bits in a second run");
    for (int run = 3; run <= runs; run++) {
        poison();
        t.forward(v);
        t.backward(v);
        t.out.download(second.out), t.lse.download(second.lse), t.dqkv.download(second.dqkv);
        if (!same_bits(first.out, second.out) || !same_bits(first.lse, second.lse) || !same_bits(first.dqkv, second.dqkv))
            return fail("out, lse or dqkv have other bits in run %d", run);
    }
    return true;
}

struct Case {
    Shape s;
    Magnitude magnitude;
    std::string name(void) const { return shape_name(s) + ", " + magnitude_names[magnitude]; }
    bool chosen(const char *part) const { return !part || name().find(part) != std::string::npos; }
    bool required(void) const { return s.HS == 32 || s.HS == 64 || s.HS == 128; }  // of every variant that is not partial
    double most_rms(void) const { return magnitude == SPREAD ? INFINITY : MOST_RMS; }
    size_t checked(void) const { return elements(s) < (size_t)1 << 29 ? heads(s) : 64; }  // heads that have a reference
    bool concerns(const Variant &v) const { return required() || v.supports(s); }  // else nobody expects it of the variant
};

// Every T with every HS that a variant must support; both masks where that takes little time through the emulation on a CPU.
static std::vector<Case> test_cases(void) {
    std::vector<Case> cases;
    bool causal = false;
    for (int HS : {32, 64, 128}) {
        for (int T : {1, 7, 64, 65, 127, 128, 129, 200})
            for (bool mask : {true, false}) cases.push_back({{2, T, 3, HS, mask}, NORMAL});
        for (int T : {1000, 1024}) cases.push_back({{1, T, HS == 32 ? 2 : 1, HS, causal = !causal}, NORMAL});
        causal = !causal;
        for (int m = LARGE; m < MAGNITUDES; m++)
            for (Shape s : {Shape{1, 200, 2, HS, true}, Shape{1, 129, 2, HS, false}, Shape{1, 127, 2, HS, false}})
                cases.push_back({s, (Magnitude)m});
    }
    for (int HS : {1, 7, 20, 80, 96}) cases.push_back({{2, 65, 2, HS, causal = !causal}, NORMAL});
    cases.push_back({{32, 64, 11, 128, true}, NORMAL});  // more heads than attention_sm90.cuh works on at the same time
#ifdef __CUDACC__
    for (bool mask : {true, false})
        for (int HS : {32, 64, 128})
            for (int T : {1000, 1024, 2048}) cases.push_back({{2, T, 12, HS, mask}, NORMAL});
    cases.push_back({{32768, 2, 3, 32, true}, NORMAL});  // more heads than a grid's y and z can count
    cases.push_back({{8192, 65, 12, 128, true}, NORMAL});  // more than 2^31 elements in qkv: the last eighth is beyond
    cases.push_back({{1, 16384, 1, 64, true}, NORMAL});
#endif
    return cases;
}

// Returns the exit status.
static int test(const Variant *only, const char *part) {
    int passed = 0, failed = 0, skipped = 0;
    const char *given = getenv("TEST_SEED");
    char *end = NULL;
    errno = 0;
    uint64_t seed = given ? strtoull(given, &end, 10) : (uint64_t)time(NULL);
    if (given && (end == given || *end || errno || strchr(given, '-')))
        die("TEST_SEED is '%s'; expected a whole number, as a run prints it", given);
    const char *const wanted_runs = getenv("TEST_RUNS");
    const int runs = wanted_runs ? parse_size("TEST_RUNS", wanted_runs) : 2;
    const std::vector<Case> cases = test_cases();
    const auto is_chosen = [&](const Case &c) { return c.chosen(part); };
    const auto is_tested = [&](const Variant &v, const Case &c) { return (!only || &v == only) && is_chosen(c) && c.concerns(v); };
    const auto has_test = [&](const Variant &v) {
        return std::any_of(cases.begin(), cases.end(), [&](const Case &c) { return is_tested(v, c); });
    };
    if (std::none_of(cases.begin(), cases.end(), is_chosen))
        die("no case has '%s' in its name; a test without it prints the names", part);
    if (std::none_of(variants, variants + variant_count, has_test)) die_of_failure();  // the last one said why
    printf("# TEST_SEED=%llu\n", (unsigned long long)seed);
    for (const Case &c : cases) {
        const std::string name = c.name();
        uint64_t case_seed = seed;
        for (char letter : name) case_seed = (case_seed ^ (unsigned char)letter) * 0x100000001B3u;
        Inputs in;
        Reference ref;
        for (const Variant *v = variants; v < variants + variant_count; v++) {
            if (!is_tested(*v, c)) continue;
            bool supported = v->supports(c.s);
            if (!supported && v->partial) {
                printf("skip - %s: %s: %s\n", v->name, name.c_str(), error_text);
                skipped++;
                continue;
            }
            double bytes = supported ? tensor_bytes(c.s) + (double)v->workspace_bytes(c.s) : 0;
            if (bytes > usable_memory() || host_bytes(c.s, c.checked()) > host_memory()) {
                printf("skip - %s: %s: it needs %.1f GiB of device memory, and %.1f are free; on the host %.1f of %.1f\n", v->name,
                       name.c_str(), gib(bytes), gib(usable_memory()), gib(host_bytes(c.s, c.checked())), gib(host_memory()));
                skipped++;
                continue;
            }
            if (in.qkv.empty()) {  // once for all variants
                in = draw_inputs(c.s, c.magnitude, case_seed);
                ref = reference(in, c.checked());
            }
            std::string note;
            bool ok = supported && passes(*v, in, ref, c.most_rms(), runs, note);
            if (ok) printf("ok - %s: %s: %sof the bound\n", v->name, name.c_str(), note.c_str());
            else printf("not ok - %s: %s: %s\n", v->name, name.c_str(), error_text);
            fflush(stdout);
            ok ? passed++ : failed++;
        }
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0;
}

// ----------------------------------------------------------------------------
// attention bench

static double median(std::vector<float> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Milliseconds of each of a row of calls, which are queued together, so that the GPU does not wait for the CPU between them.
template <class Call> static std::vector<float> time_calls(size_t count, Call call) {
    std::vector<cudaEvent_t> events(count + 1);
    std::vector<float> ms(count);
    for (size_t i = 0; i <= count; i++) {
        CUDA_CHECK(cudaEventCreate(&events[i]));
        CUDA_CHECK(cudaEventRecord(events[i], 0));
        if (i < count) call(i);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < count; i++) CUDA_CHECK(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]));
    for (cudaEvent_t event : events) CUDA_CHECK(cudaEventDestroy(event));
    return ms;
}

// What a matrix product reaches on this device, to compare with, in TFLOP/s; NAN where there is no cuBLAS.
static double matmul_tflops(void) {
#ifdef __CUDACC__
    const int N = 8192, CALLS = 20;  // one takes 1.6 ms on an H200
    cublasHandle_t handle;
    std::vector<bf16> values;
    Buffer a((size_t)2 * N * N), b((size_t)2 * N * N), c((size_t)2 * N * N);
    float one = 1, zero = 0;
    // Random values: a GPU near its power limit multiplies zeros faster.
    draw_normal(values, (size_t)N * N, 1, 1), a.upload(values);
    draw_normal(values, (size_t)N * N, 1, 2), b.upload(values);
    auto check = [](cublasStatus_t status) {
        if (status != CUBLAS_STATUS_SUCCESS) die("cuBLAS failed: %s", cublasGetStatusString(status));
    };
    auto multiply = [&](size_t) {
        check(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, N, N, N, &one, a.data(), CUDA_R_16BF, N, b.data(), CUDA_R_16BF, N,
                           &zero, c.data(), CUDA_R_16BF, N, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    };
    check(cublasCreate(&handle));
    for (int warm_up = 0; warm_up < 5; warm_up++) time_calls(CALLS, multiply);
    std::vector<float> ms;
    for (int round = 0; round < 10; round++)
        for (float x : time_calls(CALLS, multiply)) ms.push_back(x);
    check(cublasDestroy(handle));
    return 2.0 * N * N * N / median(ms) * 1e-9;
#else
    return NAN;
#endif
}

enum { FORWARD_MS, BACKWARD_MS, FORWARD_TFLOPS, BACKWARD_TFLOPS, FORWARD_PERCENT, BACKWARD_PERCENT, WORKSPACE, OUT_ERROR,
       GRADIENT_ERROR, SPEEDUP, FIELDS };
static const struct { const char *name, *heading, *format; int width; double unit; } fields[FIELDS] = {
    {"forward_ms", "fwd ms", "%.3f", 9, 1},
    {"backward_ms", "bwd ms", "%.3f", 9, 1},
    {"forward_tflops", "fwd TF/s", "%.1f", 9, 1},
    {"backward_tflops", "bwd TF/s", "%.1f", 9, 1},
    {"forward_percent_of_matmul", "fwd %", "%.1f", 6, 1},
    {"backward_percent_of_matmul", "bwd %", "%.1f", 6, 1},
    {"workspace_bytes", "space MiB", "%.1f", 10, 1048576},
    {"out_error", "out err", "%.1e", 8, 1},
    {"gradient_error", "grad err", "%.1e", 9, 1},
    {"speedup_over_naive", "x naive", "%.2f", 8, 1},
};

static const char *const explanation =
    "fwd, bwd   the median time of forward and of backward, each on tensors that the L2 cache no longer holds\n"
    "TF/s       TFLOP/s, where forward counts 4 B NH T T HS FLOPs, half of it when causal, and backward 2.5 times that\n"
    "%          of the speed of the matrix product\n"
    "space      device memory beyond inputs and outputs\n"
    "err        largest error of out and of dq, dk, dv in the last head of the last batch element, against double precision;\n"
    "           - where that takes too long, beyond T = 16384\n"
    "x naive    speed of forward and backward together, relative to naive\n";

// Measures all but SPEEDUP, or returns false after fail().
static bool measure(double *value, const Variant &v, const Inputs &in, const Reference *ref, double matmul) {
    const double WARM_UP_MS = 100, TIMED_MS = 300;
    const size_t LEAST_RUNS = 10;
    Shape s = in.s;
    if (!v.supports(s)) return false;
    double bytes = tensor_bytes(s) + (double)v.workspace_bytes(s), available = usable_memory();
    if (bytes > available) return fail("%s needs %.1f GiB of device memory, and %.1f are free", v.name, gib(bytes), gib(available));
    // As many sets of tensors as it takes that a round of forwards touches more than twice the L2 cache. An emulation has none.
    double forward_bytes = tensor_bytes(s) / 2, wanted = isnan(matmul) ? 1 : 1 + 2.0 * device.l2CacheSize / forward_bytes;
    size_t count = (size_t)fmin(fmin(wanted, available / bytes), 1000);
    std::deque<Tensors> sets;
    while (sets.size() < count) sets.emplace_back(v, in);

    // Rounds of forwards of all sets, then backwards of all sets.
    std::vector<float> forward, backward;
    auto run = [&](size_t rounds) {
        auto is_backward = [&](size_t i) { return i / count % 2; };
        auto call = [&](size_t i) { is_backward(i) ? sets[i % count].backward(v) : sets[i % count].forward(v); };
        std::vector<float> ms = time_calls(2 * count * rounds, call);
        double total = 0;
        for (size_t i = 0; i < ms.size(); i++) (is_backward(i) ? backward : forward).push_back(ms[i]), total += ms[i];
        return total;
    };
    for (double ms = 0; ms < WARM_UP_MS;) ms += run(1);
    forward.clear(), backward.clear();
    for (double ms = 0; ms < TIMED_MS;) ms += run((LEAST_RUNS + count - 1) / count);

    double flops = 4.0 * s.B * s.NH * s.T * s.T * s.HS * (s.causal ? 0.5 : 1);
    value[FORWARD_MS] = median(forward);
    value[BACKWARD_MS] = median(backward);
    value[FORWARD_TFLOPS] = flops / value[FORWARD_MS] * 1e-9;
    value[BACKWARD_TFLOPS] = 2.5 * flops / value[BACKWARD_MS] * 1e-9;
    value[FORWARD_PERCENT] = 100 * value[FORWARD_TFLOPS] / matmul;
    value[BACKWARD_PERCENT] = 100 * value[BACKWARD_TFLOPS] / matmul;
    value[WORKSPACE] = (double)v.workspace_bytes(s);
    if (!ref) return true;
    Outputs o;
    sets[0].out.download(o.out), sets[0].lse.download(o.lse), sets[0].dqkv.download(o.dqkv);
    value[OUT_ERROR] = errors_of(o, s, *ref, OUT).largest;
    value[GRADIENT_ERROR] = 0;
    for (int r = DQ; r <= DV; r++) value[GRADIENT_ERROR] = fmax(value[GRADIENT_ERROR], errors_of(o, s, *ref, r).largest);
    return true;
}

static bool shown(int field, double matmul) { return !isnan(matmul) || (field != FORWARD_PERCENT && field != BACKWARD_PERCENT); }

static void print_row(const Variant &v, Shape s, const double *value, const char *why_not, double matmul, bool json) {
    if (json) {
        printf("{\"device\": \"%s\", \"matmul_tflops\": ", device.name);
        printf(isnan(matmul) ? "null" : "%.6g", matmul);
        printf(", \"variant\": \"%s\", \"B\": %d, \"T\": %d, \"NH\": %d, \"HS\": %d, \"causal\": %s", v.name, s.B, s.T, s.NH, s.HS,
               s.causal ? "true" : "false");
        for (int f = 0; f < FIELDS; f++) {
            printf(", \"%s\": ", fields[f].name);
            printf(isnan(value[f]) ? "null" : f == WORKSPACE ? "%.0f" : "%.6g", value[f]);
        }
        if (why_not) printf(", \"why_not\": \"%s\"", why_not);
        printf("}\n");
    } else if (why_not) {
        printf("%-8s        - %s\n", v.name, why_not);
    } else {
        printf("%-8s", v.name);
        for (int f = 0; f < FIELDS; f++) {
            char text[32] = "-";
            if (!shown(f, matmul)) continue;
            if (!isnan(value[f])) snprintf(text, sizeof text, fields[f].format, value[f] / fields[f].unit);
            printf(" %*s", fields[f].width, text);
        }
        printf("\n");
    }
    fflush(stdout);
}

// A line on the terminal about what takes time just now; NULL removes it.
static void progress(const char *what, const std::string &on = "") {
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\r\033[K%s%s%s", what ? what : "", what ? " " : "", what ? on.c_str() : "");
}

static void bench(const Variant *only, const std::vector<Shape> &shapes, bool json) {
    const int LONGEST_CHECKED = 16384;  // its reference takes seconds
    for (Shape s : shapes) {
        if (tensor_bytes(s) > usable_memory())
            die("the tensors of %s need %.1f GiB of device memory, and %.1f are free; choose a smaller shape",
                shape_name(s).c_str(), gib(tensor_bytes(s)), gib(usable_memory()));
        if (host_bytes(s, 1) > host_memory())
            die("%s needs %.1f GiB of the host's memory for inputs and results, and %.1f are there; choose a smaller shape",
                shape_name(s).c_str(), gib(host_bytes(s, 1)), gib(host_memory()));
    }
    if (only && shapes.size() == 1 && !only->supports(shapes[0])) die_of_failure();
    progress("measuring the matrix product");
    double matmul = matmul_tflops();
    progress(NULL);
    if (!json) {
        if (isnan(matmul)) printf("An emulation of a GPU on the CPU: these times say nothing about a GPU.\n");
        else printf("%s; matrix product 8192 x 8192 x 8192 in bf16: %.0f TFLOP/s\n", device.name, matmul);
        printf("%s", explanation);
    }
    for (Shape s : shapes) {
        progress("computing the reference of", shape_name(s));
        Inputs in = draw_inputs(s, NORMAL, 1);
        Reference ref;
        if (s.T <= LONGEST_CHECKED) ref = reference(in, 1);
        if (!json) {
            progress(NULL);
            printf("\n%s\n        ", shape_name(s).c_str());
            for (int f = 0; f < FIELDS; f++)
                if (shown(f, matmul)) printf(" %*s", fields[f].width, fields[f].heading);
            printf("\n");
            fflush(stdout);
        }
        double naive_ms = NAN;
        for (const Variant *v = variants; v < variants + variant_count; v++) {
            bool is_naive = !strcmp(v->name, "naive");
            if (only && v != only && !is_naive) continue;
            double value[FIELDS];
            std::fill(value, value + FIELDS, NAN);
            progress("measuring", v->name);
            bool measured = measure(value, *v, in, s.T <= LONGEST_CHECKED ? &ref : NULL, matmul);
            progress(NULL);
            if (!measured && v == only && shapes.size() == 1) die_of_failure();
            if (is_naive) naive_ms = value[FORWARD_MS] + value[BACKWARD_MS];
            value[SPEEDUP] = naive_ms / (value[FORWARD_MS] + value[BACKWARD_MS]);
            print_row(*v, s, value, measured ? NULL : error_text, matmul, json);
        }
    }
}

// ----------------------------------------------------------------------------
// Command line

static void usage(void) {
    printf("usage: attention test [VARIANT [PART]]                          tests, or those cases with PART in their name\n"
           "       attention bench [VARIANT] [B T NH HS] [--full] [--json]  speed; --full: without the causal mask\n"
           "variants:\n");
    for (int i = 0; i < variant_count; i++) printf("  %-8s %s\n", variants[i].name, variants[i].idea);
    printf("environment:\n"
           "  TEST_SEED=N            the inputs of a test that printed this seed\n"
           "  TEST_RUNS=N            compare the bits of so many runs; 2 without it\n"
           "  ATTENTION_NO_SM90=1    trainer takes the kernels for GPUs before Hopper\n");
}

static const Variant *find_variant(const char *name) {
    const Variant *found = NULL;
    std::string names;
    for (const Variant *v = variants; v < variants + variant_count; v++) {
        if (!strcmp(v->name, name)) found = v;
        names += std::string(names.empty() ? "" : ", ") + v->name;
    }
    if (!found) die("there is no variant '%s'; there are: %s", name, names.c_str());
    return found;
}

static bool looks_like_number(const char *text) { return text[strspn(text, "+-.")] >= '0' && text[strspn(text, "+-.")] <= '9'; }

// Results that could not be written must not look like success.
static void check_written(void) {
    if (fflush(stdout) || ferror(stdout)) fprintf(stderr, "error: the results cannot be written: %s\n", strerror(errno)), _exit(1);
}

int main(int argc, char **argv) {
    atexit(check_written);
    std::set_new_handler([] { die("out of memory on the host; choose a smaller shape"); });
    std::vector<const char *> words;  // without the options
    bool full = false, json = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return usage(), 0;
        if (!strcmp(argv[i], "--full")) full = true;
        else if (!strcmp(argv[i], "--json")) json = true;
        else if (!strncmp(argv[i], "--", 2)) die("there is no option %s; there are: --full, --json and --help", argv[i]);
        else words.push_back(argv[i]);
    }
    if (argc == 1) return usage(), 0;
    if (words.empty()) die("there is no command; there are: test and bench");
    std::string command = words[0];
    if (command != "test" && command != "bench") die("there is no command '%s'; there are: test and bench", words[0]);
    size_t next = 1;
    const Variant *only = next < words.size() && !looks_like_number(words[next]) ? find_variant(words[next++]) : NULL;

    if (command == "test") {
        const char *part = only && next < words.size() ? words[next++] : NULL;
        if (next < words.size()) die("test has no use for %s; expected: attention test [VARIANT [PART]]", words[next]);
        if (full || json) die("--full and --json are options of bench; expected: attention test [VARIANT [PART]]");
        open_device();
        return test(only, part);
    }

    std::vector<Shape> shapes;
    const char *const names[4] = {"B", "T", "NH", "HS"};
    if (words.size() - next == 4) {
        int n[4];
        for (int i = 0; i < 4; i++) n[i] = parse_size(names[i], words[next + i]);
        shapes = {{n[0], n[1], n[2], n[3], !full}};
    } else if (next < words.size()) {
        die("a shape is four numbers, B T NH HS, and here %s %d, from %s on", words.size() - next == 1 ? "is" : "are",
            (int)(words.size() - next), words[next]);
    } else {
#ifdef __CUDACC__
        shapes = {{64, 1024, 12, 64, !full}, {16, 1024, 32, 64, !full}, {8, 2048, 32, 64, !full}, {4, 4096, 32, 64, !full},
                  {1, 16384, 32, 64, !full}, {16, 1024, 16, 128, !full}, {4, 4096, 16, 128, !full}, {1, 16384, 16, 128, !full}};
#else
        shapes = {{1, 256, 2, 64, !full}};
#endif
    }
    open_device();
    bench(only, shapes, json);
    return 0;
}

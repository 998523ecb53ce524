// Measures train_gpt2.c: training speed at GPT-2's smallest size, and memory and time as the sequence grows.
//
//   make bench                       with OpenBLAS, if it is installed, and with the built-in matrix products
//   build/cc/bench_gpt2 speed        d12, B = 4, T = 64
//   build/cc/bench_gpt2 memory       the tiny model, B = 1, T = 256 to 16384
//
// A step is forward, loss, backward, the gradient's norm and AdamW, on random tokens: all of a step but reading the data.

#include <sys/resource.h>
#include <sys/wait.h>

#define GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // the training loop is not part of what is measured
#include "train_gpt2.c"

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Median seconds of `timed` steps after one that warms up.
static double time_steps(GptConfig config, int B, int T, int timed, size_t *parameters) {
    Model m;
    Options o;
    double seconds[99];
    int *tokens = allocate((size_t)B * (size_t)T + 1, sizeof *tokens, "random tokens");
    options_defaults(&o);
    model_plan(&m, config, B, true);
    model_allocate(&m, true);
    gpt_init(config, m.state.weights, 1);
    for (int n = 0; n <= B * T; n++) tokens[n] = (int)random_below(random4(1, RANDOM_SAMPLE, 0, (uint64_t)n), (uint64_t)config.vocab);
    for (int i = 0; i <= timed; i++) {
        double start = seconds_now();
        model_forward(&m, tokens, B, T);
        model_loss(&m, tokens + 1, B * T, 1.0f / (float)(B * T), false);
        model_backward(&m, tokens, B, T, false);
        adamw(&m, &o, 1e-4, i + 1, 1 / fmax(1, gradient_norm(&m)));
        if (i > 0) seconds[i - 1] = seconds_now() - start;
    }
    qsort(seconds, (size_t)timed, sizeof *seconds, by_size);
    *parameters = m.parameters;
    model_free(&m);
    free(tokens);
    return seconds[timed / 2];
}

#ifdef USE_OPENBLAS
enum { TARGET = 160 };  // of the 185 that its 187 GFLOP/s allow
#else
enum { TARGET = 100 };
#endif

static void speed(void) {
    enum { B = 4, T = 64 };
    GptConfig d12 = {12, 12, 768, 1024, 50257};
    size_t parameters;
    double seconds = time_steps(d12, B, T, 9, &parameters);
    // Forward 2 FLOPs for each weight and token, backward 4; attention 6 L C T for each token, as half of T x T is computed.
    double flops = B * T * (6.0 * (double)parameters + 6.0 * 12 * 768 * T);
    printf("d12, B = 4, T = 64: %.0f ms a step, %.0f tokens/s (target on two cores with AVX-512: %d), %.0f GFLOP/s\n", 1e3 * seconds,
           B * T / seconds, TARGET, 1e-9 * flops / seconds);
}

// Each length has a process of its own, whose peak memory the system tells.
static void memory(void) {
    const GptPreset *tiny = gpt_preset("tiny");
    printf("      T    s/step   memory, MiB   for each token, KiB   T x T matrices of all heads, which are never made, MiB\n");
    for (int T = 256; T <= 16384; T *= 2) {
        GptConfig c = {tiny->layers, tiny->heads, tiny->channels, T, BYTE_VOCAB};
        int ends[2], status;
        struct rusage usage;
        double seconds = 0;
        fflush(stdout);
        if (pipe(ends)) die("cannot make a pipe: %s", strerror(errno));
        pid_t child = fork();
        if (child < 0) die("cannot start a process: %s", strerror(errno));
        if (!child) {
            char name[128];
            size_t parameters;
            matmul_start(name, sizeof name);
            seconds = time_steps(c, 1, T, T < 4096 ? 5 : 1, &parameters);
            _exit(write(ends[1], &seconds, sizeof seconds) != sizeof seconds);
        }
        if (wait4(child, &status, 0, &usage) < 0 || status || read(ends[0], &seconds, sizeof seconds) != sizeof seconds)
            die("the process for T = %d failed", T);
        close(ends[0]), close(ends[1]);
#ifdef __APPLE__
        double mib = (double)usage.ru_maxrss / 1048576;  // bytes there
#else
        double mib = (double)usage.ru_maxrss / 1024;
#endif
        printf("%7d %9.3f %13.1f %21.1f %20.0f\n", T, seconds, mib, mib * 1024 / T, 4.0 * c.layers * c.heads * T * T / 1048576);
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    char name[128];
    if (!strcmp(what, "memory")) memory();  // forks, so no threads may have been started before
    else if (!strcmp(what, "speed")) {
        matmul_start(name, sizeof name);
        printf("computes %s\n", name);
        speed();
    } else die("usage: %s speed|memory", argv[0]);
    return 0;
}

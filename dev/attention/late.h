// Delays where thread blocks of attention_sm90.cuh hand on to others, by up to 4 µs and now and then by 60 (on the CPU by as many
// turns of other threads as ns), so that one that does not wait for its turn is found out. With two blocks of keys one adds and the
// other takes the sum; from three on, T = 257, additions may come in a wrong order, too. The Makefile builds the trainer's variant
// with it as attention-late, for tests:
//
//   make build/nvcc/attention-late && TEST_RUNS=30 build/nvcc/attention-late test     (or, without a GPU, build/cc/attention-late)
#define BE_LATE(number)                                                                         \
    do {                                                                                        \
        unsigned random = (unsigned)(number) * 2654435761u ^ (blockIdx.x + 1) * 0x9E3779B9u;    \
        random = (random ^ random >> 15) * 0x2C1B3C6Du, random ^= random >> 13;                 \
        __nanosleep(random >> 28 == 0 ? 60000 : random >> 20);                                  \
    } while (0)

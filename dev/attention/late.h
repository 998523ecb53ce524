// Delays where thread blocks of attention_sm90.cuh hand on to others, by up to 4 µs and now and then by 60, so that one that does not
// wait for its turn is found out. The Makefile builds the trainer's variant with it as attention-late, for tests:
//
//   make build/nvcc/attention-late && TEST_RUNS=30 build/nvcc/attention-late test
#define BE_LATE(number)                                                                             \
    do {                                                                                            \
        const unsigned random = (unsigned)(number) * 2654435761u ^ blockIdx.x * 40503u << 16;       \
        __nanosleep(random % 16 == 0 ? 60000 : random >> 20);                                       \
    } while (0)

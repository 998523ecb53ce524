// In one pass, with blocks that are late when they hand on to others: by up to 4 µs, now and then by 60.
#define ONE_PASS 1
#define BE_LATE(part)                                                       \
    do {                                                                    \
        const unsigned random = (unsigned)(part) * 2654435761u ^ blockIdx.x * 40503u << 16; \
        __nanosleep(random % 16 == 0 ? 60000 : random >> 20);               \
    } while (0)
#define VARIANT_NAME sm90_late
#include "sm90.cu"

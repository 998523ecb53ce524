// Tests of the exercises of dev/attention/README.md: are the functions in answers.h right, and if not, what is wrong?
//
//   make exercises                    builds this file and runs it, on the CPU by way of dev/cuda_on_cpu.h
//
//   g++ -x c++ -std=c++17 -O2 -Wno-unknown-pragmas -I. dev/attention/exercises/test_exercises.cu -o build/exercises -pthread
//   nvcc -std=c++17 -I. -arch=sm_80 dev/attention/exercises/test_exercises.cu -o build/exercises         on a GPU
//   build/exercises swizzle           the tests with "swizzle" in the name; with -DSOLUTIONS it tests solutions.h
#include "gpt/cuda.cuh"
#include "tests/frame.h"

#ifdef SOLUTIONS
#include "solutions.h"
#else
#include "answers.h"
#endif

// v2 as it is, for the worked example. A namespace keeps its names and the reader's apart. Its kernels, most of the time to
// compile, are left out, as nothing here calls them: the variant is declared, but not registered.
#include "../variant.h"
#undef VARIANT
#define VARIANT(name, idea) \
    [[maybe_unused]] static const Variant name = {#name, idea, supports, workspace_bytes, attention_forward, attention_backward};
namespace v2 {
#include "../v2.cu"
}

// Ends the test of an exercise with one sentence for its reader, as for printf.
#define WRONG(...) do { snprintf(failure, sizeof failure, __VA_ARGS__); longjmp(test_end, 1); } while (0)

static int draw_below(int end) { return (int)(draw() % (unsigned)end); }
static float draw_within(float bound) { return (float)(draw_unit() * 2 - 1) * bound; }

template <typename T> static T *to_device(const T *from, size_t count) {
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(T)));
    CUDA_CHECK(cudaMemcpy(memory, from, count * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

template <typename T> static void from_device(T *to, T *memory, size_t count) {  // and frees it
    CUDA_CHECK(cudaMemcpy(to, memory, count * sizeof(T), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(memory));
}

// ----------------------------------------------------------------------------
// The lesson's worked example: six keys in two tiles of three, through v2's online softmax

static const float example_scores[6] = {2, 1, 3, 0, 4, 2}, example_values[6] = {1, 2, 3, 4, 5, 6};
static const struct { double max, sum, o; } example_states[2] = {{3, 1.503214724, 3.638550008}, {4, 1.706652715, 7.223821998}};

// One warp: states (2, 3), the maximum, sum and o after each tile. The 16 rows that a warp has are all the same here. A tile
// has eight columns, of which the last five are masked, and o has eight columns, all the same, too.
static __global__ void example_kernel(float *states, const float *scores, const float *values) {
    float o[1][1][4] = {}, row_max[1][2] = {{-INFINITY, -INFINITY}}, row_sum[1][2] = {};
    for (int tile = 0; tile < 2; tile++) {
        float s[1][1][4], v[4];
        for (int i = 0; i < 4; i++) {
            const int col = v2::lane_id() % 4 * 2 + i % 2;
            s[0][0][i] = col < 3 ? scores[3 * tile + col] : -INFINITY;
            v[i] = col < 3 ? values[3 * tile + col] : 0;
        }
        v2::online_softmax(s, o, row_max, row_sum, v2::LOG2_E);
        float sum = row_sum[0][0];  // of the lane's two columns, as is its part of P V
        for (int half = 0; half < 2; half++) {
            float pv = s[0][0][2 * half] * v[2 * half] + s[0][0][2 * half + 1] * v[2 * half + 1];
            for (int distance = 1; distance < 4; distance *= 2) pv += __shfl_xor_sync(~0u, pv, distance);
            o[0][0][2 * half] += pv;
            o[0][0][2 * half + 1] += pv;
        }
        for (int distance = 1; distance < 4; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (threadIdx.x != 0) continue;
        states[3 * tile] = row_max[0][0];
        states[3 * tile + 1] = sum;
        states[3 * tile + 2] = o[0][0][0];
    }
}

TEST(worked_example) {
    float states[2][3] = {};
    float *d_states = to_device(states[0], 6), *d_scores = to_device(example_scores, 6), *d_values = to_device(example_values, 6);
    LAUNCH(example_kernel, 1, 32, 0, NULL, d_states, d_scores, d_values);
    from_device(states[0], d_states, 6);
    CUDA_CHECK(cudaFree(d_scores));
    CUDA_CHECK(cudaFree(d_values));
    for (int i = 0; i < 2; i++) {
        const double max = states[i][0], sum = states[i][1], o = states[i][2];
        CHECK(max == example_states[i].max, "after tile %d: %g, not %g", i, max, example_states[i].max);
        CHECK(fabs(sum - example_states[i].sum) < 1e-5, "after tile %d: %.7f, not %.7f", i, sum, example_states[i].sum);
        CHECK(fabs(o - example_states[i].o) < 1e-5, "after tile %d: %.7f, not %.7f", i, o, example_states[i].o);
    }
}

// ----------------------------------------------------------------------------
// 1. merge

enum { MAX_KEYS = 64, MAX_PARTS = 6 };

struct Exact { double max, sum, o[WIDTH]; };

static Exact softmax_of(const float *scores, const float (*values)[WIDTH], int first, int end) {
    Exact part = {-INFINITY, 0, {}};
    for (int i = first; i < end; i++) part.max = fmax(part.max, scores[i]);
    for (int i = first; i < end; i++) {
        const double p = exp(scores[i] - part.max);
        part.sum += p;
        for (int j = 0; j < WIDTH; j++) part.o[j] += p * values[i][j];
    }
    return part;
}

static Part rounded(Exact exact) {
    Part part = {(float)exact.max, (float)exact.sum, {}};
    for (int j = 0; j < WIDTH; j++) part.o[j] = (float)exact.o[j];
    return part;
}

// What is wrong with a part whose values are within ±largest? NULL if nothing.
//
// How exact can it be in fp32? In units of 2^-24, relative to sum and, for o, largest times sum: each merge rounds an expf
// (4), a product (1) and an addition (1), and six parts go through at most five merges: 30. An exponent -d = max - common max
// has an error of d, or 3 d by way of base 2, but what it scales is at most min(1, n exp(-d)) of the sum if it has n keys: at
// most 3 ln 64 = 13. The parts themselves are rounded: 1. Together 44; allowed are 64.
static const char *fault(Part part, Exact exact, double largest) {
    static char text[200];
    const double tolerance = 64 * 0x1p-24 * exact.sum;
    if (part.max != exact.max) {
        snprintf(text, sizeof text, "max is %.7g and should be %.7g, the larger of theirs", part.max, exact.max);
        return text;
    }
    if (!(fabs(part.sum - exact.sum) <= tolerance)) {
        snprintf(text, sizeof text, "max is right, but sum is %.7g and should be %.7g", part.sum, exact.sum);
        return text;
    }
    for (int j = 0; j < WIDTH; j++) {
        if (fabs(part.o[j] - exact.o[j]) <= tolerance * largest) continue;
        snprintf(text, sizeof text, "max and sum are right, but o[%d] is %.7g and should be %.7g", j, part.o[j], exact.o[j]);
        return text;
    }
    return NULL;
}

TEST(merge) {
    // The two tiles of the worked example, both ways round.
    float scores[MAX_KEYS], values[MAX_KEYS][WIDTH];
    for (int i = 0; i < 6; i++) {
        for (int j = 0; j < WIDTH; j++) values[i][j] = example_values[i];
    }
    const Part tiles[2] = {rounded(softmax_of(example_scores, values, 0, 3)), rounded(softmax_of(example_scores, values, 3, 6))};
    const Exact all = softmax_of(example_scores, values, 0, 6);
    for (int first = 0; first < 2; first++) {
        const Part a = tiles[first], b = tiles[1 - first], both = merge(a, b);
        const char *found = fault(both, all, 6);
        if (found)
            WRONG("of the worked example's two tiles, a (max %g, sum %.7g, o %.7g) and b (max %g, sum %.7g, o %.7g), %s; in each, "
                  "sum and o are of exp(score - its own max), and o is not divided by sum", a.max, a.sum, a.o[0], b.max, b.sum,
                  b.o[0], found);
    }

    // Parts without keys.
    const Part none = {-INFINITY, 0, {}};
    const struct { const char *what; Part a, b; Exact exact; } empty[3] = {
        {"a has seen keys and b none (its max is -inf)", tiles[0], none, softmax_of(example_scores, values, 0, 3)},
        {"a has seen no key (its max is -inf) and b has", none, tiles[0], softmax_of(example_scores, values, 0, 3)},
        {"neither part has seen a key (-inf - -inf is NaN)", none, none, {-INFINITY, 0, {}}},
    };
    for (int i = 0; i < 3; i++) {
        const char *found = fault(merge(empty[i].a, empty[i].b), empty[i].exact, 6);
        if (found) WRONG("where %s, %s", empty[i].what, found);
    }

    // Random parts in random orders: any two of those left become one, until one is left.
    for (int round = 0; round < 3000; round++) {
        const float spreads[] = {0, 1, 10, 200}, spread = spreads[draw_below(4)], centre = draw_within(200 - spread);
        const int keys = 1 + draw_below(MAX_KEYS), parts = 1 + draw_below(MAX_PARTS);
        const bool whole = draw_below(2);  // whole numbers, so that maxima are equal now and then
        for (int i = 0; i < keys; i++) {
            scores[i] = centre + draw_within(spread);
            if (whole) scores[i] = rintf(scores[i]);
            for (int j = 0; j < WIDTH; j++) values[i][j] = draw_within(1);
        }
        int cuts[MAX_PARTS + 1] = {};  // part i has the keys cuts[i] .. cuts[i + 1] - 1, maybe none
        for (int i = 1; i < parts; i++) {
            const int cut = draw_below(keys + 1);
            int at = i;
            for (; cuts[at - 1] > cut; at--) cuts[at] = cuts[at - 1];
            cuts[at] = cut;
        }
        cuts[parts] = keys;
        const Exact exact = softmax_of(scores, values, 0, keys);
        for (int order = 0; order < 2; order++) {
            Part left[MAX_PARTS];
            for (int i = 0; i < parts; i++) left[i] = rounded(softmax_of(scores, values, cuts[i], cuts[i + 1]));
            for (int count = parts; count > 1; count--) {
                const int a = draw_below(count), b = (a + 1 + draw_below(count - 1)) % count;
                left[a] = merge(left[a], left[b]);
                left[b] = left[count - 1];  // which is the merged one if a was the last
            }
            const char *found = fault(left[0], exact, 1);
            if (!found) continue;
            const bool overflow = !isfinite(left[0].sum) || left[0].sum == 0;
            WRONG("of %d keys with scores from %.4g to %.4g, in %d parts merged in random order, %s%s", keys, centre - spread,
                  centre + spread, parts, found,
                  overflow ? "; in a float exp(89) is inf and exp(-104) is 0, so take it of differences to the maximum only" : "");
        }
    }
}

// ----------------------------------------------------------------------------
// 2. swizzle

enum { TILE_ROWS = 64, CHUNKS = 8, TILE_COLS = 8 * CHUNKS, ACCESSES = TILE_ROWS * CHUNKS };  // 16 bytes of bf16 are eight columns

// One warp: in and out (64, 64). Copies in to shared memory, where each chunk goes to its position, and reads it back by ldmatrix.
static __global__ void swizzle_kernel(bf16 *out, const bf16 *in) {
    __shared__ __align__(128) bf16 tile[TILE_ROWS * TILE_COLS];
    const int lane = threadIdx.x;
    for (int i = lane; i < ACCESSES; i += 32) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        cp_async_16(tile + row * TILE_COLS + swizzle(row, chunk) * 8, in + row * TILE_COLS + chunk * 8, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int first_row = 0; first_row < TILE_ROWS; first_row += 8) {
        for (int first_chunk = 0; first_chunk < CHUNKS; first_chunk += 4) {  // four matrices at once, of one chunk's width each
            const int row = first_row + lane % 8, chunk = first_chunk + lane / 8;
            uint32_t r[4];
            ldmatrix_x4(r, tile + row * TILE_COLS + swizzle(row, chunk) * 8);
            for (int m = 0; m < 4; m++)
                *(uint32_t *)(out + (first_row + lane / 4) * TILE_COLS + (first_chunk + m) * 8 + lane % 4 * 2) = r[m];
        }
    }
}

// How many of eight accesses to these positions have to wait for another, and how many go to the most wanted one?
static int waiting(const int (&positions)[8], int *most) {
    int wanted[CHUNKS] = {}, waits = 0;
    *most = 0;
    for (int i = 0; i < 8; i++) {
        waits += wanted[positions[i]]++ > 0;
        if (wanted[positions[i]] > *most) *most = wanted[positions[i]];
    }
    return waits;
}

TEST(swizzle) {
    int position[TILE_ROWS][CHUNKS];
    for (int row = 0; row < TILE_ROWS; row++) {
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const int p = position[row][chunk] = swizzle(row, chunk);
            if (p < 0 || p >= CHUNKS) WRONG("chunk %d of row %d goes to position %d, but a row has 0 to 7", chunk, row, p);
        }
    }

    // Does what was written come back? Each element is its own number, so those that do not tell where they come from.
    static uint16_t in[TILE_ROWS * TILE_COLS], out[TILE_ROWS * TILE_COLS];
    for (int i = 0; i < TILE_ROWS * TILE_COLS; i++) in[i] = (uint16_t)i, out[i] = 0xFFFF;
    uint16_t *d_in = to_device(in, TILE_ROWS * TILE_COLS), *d_out = to_device(out, TILE_ROWS * TILE_COLS);
    LAUNCH(swizzle_kernel, 1, 32, 0, NULL, (bf16 *)d_out, (const bf16 *)d_in);
    from_device(out, d_out, TILE_ROWS * TILE_COLS);
    CUDA_CHECK(cudaFree(d_in));
    int lost = 0, first_lost = -1;
    for (int i = ACCESSES - 1; i >= 0; i--) {
        if (memcmp(in + 8 * i, out + 8 * i, 16)) lost++, first_lost = i;
    }

    // The conflicts of eight accesses at a time: writes of a row's chunks, reads of one chunk of eight rows.
    int most, writes_waiting = 0, reads_waiting = 0, worst_read = 0, worst_row = 0, worst_chunk = 0;
    for (int row = 0; row < TILE_ROWS; row++) writes_waiting += waiting(position[row], &most);
    int read[8], worst[8] = {};
    for (int row = 0; row < TILE_ROWS; row += 8) {
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            for (int i = 0; i < 8; i++) read[i] = position[row + i][chunk];
            reads_waiting += waiting(read, &most);
            if (most <= worst_read) continue;
            worst_read = most, worst_row = row, worst_chunk = chunk;
            memcpy(worst, read, sizeof worst);
        }
    }

    // A row that keeps all its chunks has no conflicting writes, and one that does not loses some.
    if (lost > 0 || writes_waiting > 0) {
        for (int row = 0; row < TILE_ROWS; row++) {
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                for (int other = 0; other < chunk; other++) {
                    if (position[row][other] != position[row][chunk]) continue;
                    WRONG("chunks %d and %d of row %d both go to position %d, so one is lost: %d of the tile's 512 chunks come "
                          "back wrong from shared memory, and %d of 512 writes wait for another", other, chunk, row,
                          position[row][chunk], lost, writes_waiting);
                }
            }
        }
        WRONG("%d of the tile's 512 chunks come back wrong, chunk %d of row %d first, though each had a position of its own: does "
              "swizzle() give another position when it is asked again?", lost, first_lost % CHUNKS, first_lost / CHUNKS);
    }
    if (reads_waiting > 0)
        WRONG("the tile comes back right, but %d of 512 reads wait for another (%d-way conflicts at rows %d to %d, whose chunks %d "
              "are at positions %d %d %d %d %d %d %d %d)", reads_waiting, worst_read, worst_row, worst_row + 7, worst_chunk,
              worst[0], worst[1], worst[2], worst[3], worst[4], worst[5], worst[6], worst[7]);
}

// ----------------------------------------------------------------------------
// 3. window

enum { HS = 8, MAX_T = 144 };

// Sliding-window attention of one head in fp32, a thread for each query, scores not scaled: out, q, k, v (T, HS). It walks over the
// tiles that window() gives, and masks those for which needs_mask() says so. Grid: blocks of queries.
static __global__ void window_forward_kernel(float *out, const float *q, const float *k, const float *v, int T, int W, int keys) {
    DYNAMIC_SHARED(memory);
    float *const k_tile = (float *)memory, *const v_tile = k_tile + keys * HS;
    const int rows = blockDim.x, first_row = blockIdx.x * rows, row = first_row + threadIdx.x;
    const float *const query = q + min(row, T - 1) * HS;

    float maximum = -INFINITY, sum = 0, o[HS] = {};
    const KeyTiles tiles = window(first_row, rows, keys, T, W);
    for (int tile = tiles.first; tile < tiles.end; tile++) {
        const bool masked = needs_mask(tile, first_row, rows, keys, T, W);
        __syncthreads();  // all are done with the tile before
        for (int i = threadIdx.x; i < keys * HS; i += rows) {
            const int from = tile * keys * HS + i;
            k_tile[i] = from < T * HS ? k[from] : 0;
            v_tile[i] = from < T * HS ? v[from] : 0;
        }
        __syncthreads();
        for (int i = 0; i < keys; i++) {
            const int key = tile * keys + i;
            if (masked && (key > row || key < row - W + 1)) continue;
            float score = 0;
            for (int j = 0; j < HS; j++) score += query[j] * k_tile[i * HS + j];
            const float new_maximum = fmaxf(maximum, score), rescale = expf(maximum - new_maximum), p = expf(score - new_maximum);
            sum = rescale * sum + p;
            for (int j = 0; j < HS; j++) o[j] = rescale * o[j] + p * v_tile[i * HS + j];
            maximum = new_maximum;
        }
    }
    if (row >= T) return;
    for (int j = 0; j < HS; j++) out[row * HS + j] = o[j] / sum;
}

// One shape of the problem, as one sentence has to name it.
struct WindowCase { int T, W, rows, keys; };
static const char *name_of(WindowCase c) {
    static char text[100];
    snprintf(text, sizeof text, "T = %d, W = %d, rows = %d, keys = %d", c.T, c.W, c.rows, c.keys);
    return text;
}

static bool sees(WindowCase c, int query, int key) { return key <= query && key > query - c.W; }  // for 0 <= query, key < T

// How many pairs of a query of the block and a key of the tile are seen, and how many are not? One of the latter is named.
struct Pairs { int seen, unseen, query, key; };
static Pairs pairs_of(WindowCase c, int first_row, int tile) {
    Pairs pairs = {};
    for (int query = first_row; query < first_row + c.rows && query < c.T; query++) {
        for (int key = tile * c.keys; key < (tile + 1) * c.keys; key++) {
            if (key < c.T && sees(c, query, key)) pairs.seen++;
            else pairs.unseen++, pairs.query = query, pairs.key = key;
        }
    }
    return pairs;
}

// Tiles walked over and masked in all cases, how many of them in vain, and where the first of these was.
static struct { int walked, masked, walked_in_vain, masked_in_vain; char first_walked[400], first_masked[400]; } count;

// Checks what the answers say about the tiles of one block, before a kernel relies on it.
static void check_tiles(WindowCase c, int first_row) {
    const int tiles = (c.T + c.keys - 1) / c.keys;
    const KeyTiles walk = window(first_row, c.rows, c.keys, c.T, c.W);
    char block[100];
    snprintf(block, sizeof block, "queries %d .. %d", first_row, (first_row + c.rows < c.T ? first_row + c.rows : c.T) - 1);
    if (walk.first < 0 || walk.end > tiles)
        WRONG("for %s window() gives {%d, %d}, but there are only the tiles from 0 to before %d (%s)", block, walk.first, walk.end,
              tiles, name_of(c));
    for (int tile = 0; tile < tiles; tile++) {
        const bool walked = walk.first <= tile && tile < walk.end;
        const bool masked = walked && needs_mask(tile, first_row, c.rows, c.keys, c.T, c.W);
        const Pairs pairs = pairs_of(c, first_row, tile);
        char where[200];
        snprintf(where, sizeof where, "of tile %d, keys %d .. %d (%s)", tile, tile * c.keys, (tile + 1) * c.keys - 1, name_of(c));
        if (pairs.seen && !walked)
            WRONG("for %s window() gives {%d, %d}, but they see some %s", block, walk.first, walk.end, where);
        if (walked && pairs.unseen && !masked)
            WRONG("for %s needs_mask() is false, but query %d does not see key %d%s %s", block, pairs.query, pairs.key,
                  pairs.key < c.T ? "" : ", which does not exist,", where);
        count.walked += walked;
        count.masked += masked;
        if (walked && !pairs.seen && count.walked_in_vain++ == 0)
            snprintf(count.first_walked, sizeof count.first_walked, "%s see nothing %s", block, where);
        if (masked && !pairs.unseen && count.masked_in_vain++ == 0)
            snprintf(count.first_masked, sizeof count.first_masked, "%s see all %s", block, where);
    }
}

// Attention through the answers against double precision. Inputs are within ±1 and scores within ±8, so fp32 scores have an error
// below 8 · 8 · 2^-23 = 8e-6, and sums of up to 144 terms about as much. 1e-4 is well above, and well below what a wrong key does.
static void check_attention(WindowCase c) {
    static float q[MAX_T][HS], k[MAX_T][HS], v[MAX_T][HS], out[MAX_T][HS];
    for (int t = 0; t < c.T; t++) {
        for (int j = 0; j < HS; j++) q[t][j] = draw_within(1), k[t][j] = draw_within(1), v[t][j] = draw_within(1), out[t][j] = NAN;
    }
    const int size = c.T * HS, grid = (c.T + c.rows - 1) / c.rows;
    float *d_q = to_device(q[0], size), *d_k = to_device(k[0], size), *d_v = to_device(v[0], size);
    float *d_out = to_device(out[0], size);
    const int shared_bytes = 2 * c.keys * HS * (int)sizeof(float);
    LAUNCH(window_forward_kernel, grid, c.rows, shared_bytes, NULL, d_out, d_q, d_k, d_v, c.T, c.W, c.keys);
    from_device(out[0], d_out, size);
    CUDA_CHECK(cudaFree(d_q));
    CUDA_CHECK(cudaFree(d_k));
    CUDA_CHECK(cudaFree(d_v));
    for (int query = 0; query < c.T; query++) {
        double sum = 0, o[HS] = {};
        for (int key = 0; key < c.T; key++) {
            if (!sees(c, query, key)) continue;
            double score = 0;
            for (int j = 0; j < HS; j++) score += (double)q[query][j] * k[key][j];
            sum += exp(score);
            for (int j = 0; j < HS; j++) o[j] += exp(score) * v[key][j];
        }
        for (int j = 0; j < HS; j++) {
            if (!(fabs(out[query][j] - o[j] / sum) < 1e-4))
                WRONG("tiles and masks are right on the host, but the kernel's out[%d][%d] is %.6f and should be %.6f (%s)", query,
                      j, out[query][j], o[j] / sum, name_of(c));
        }
    }
}

static void check_case(WindowCase c) {
    for (int first_row = 0; first_row < c.T; first_row += c.rows) check_tiles(c, first_row);
    check_attention(c);
}

static void check_work(void) {
    if (count.walked_in_vain)
        WRONG("right, but it walks over %d tiles where %d would do: %s", count.walked, count.walked - count.walked_in_vain,
              count.first_walked);
    if (count.masked_in_vain)
        WRONG("right, but it masks %d tiles where %d would do: %s", count.masked, count.masked - count.masked_in_vain,
              count.first_masked);
}

TEST(window) {
    const int lengths[] = {12, 1, 7, 33, 64, 100}, windows[] = {5, 1, 2, 16, 33, 1000};
    const int shapes[][2] = {{4, 4}, {16, 16}, {32, 8}, {8, 32}, {24, 5}};
    memset(&count, 0, sizeof count);
    for (int T : lengths) {
        for (int W : windows) {
            for (auto &shape : shapes) check_case({T, W, shape[0], shape[1]});
        }
    }
    check_work();
    for (int i = 0; i < 100; i++) {
        const int T = 1 + draw_below(MAX_T), W = 1 + draw_below(MAX_T), rows = 1 + draw_below(64), keys = 1 + draw_below(64);
        check_case({T, W, rows, keys});
    }
    check_work();
}

int main(int argc, char **argv) { return run_tests(argc > 1 ? argv[1] : NULL, NULL, NULL) > 0; }

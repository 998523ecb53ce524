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

// v2 as it is, for the worked example. It has a namespace so that its names leave the reader's alone, and is not registered as a variant:
// only its online softmax is used here, and its kernels would take most of the time to compile.
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

// One warp: states (2, 3), the maximum, sum and o after each tile. All 16 rows that a warp has are the same here. A tile has eight columns,
// of which the last five are masked; o has eight columns, too, all the same.
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
// How exact can it be in fp32? In units of 2^-24 times sum, for sum, and times largest, for o: a merge has a factor expf (4), two
// products (1) and an addition (1); six parts are merged in at most five levels: 30. Rounding the exponent d = max - common max costs
// another d, or 3 d if it goes through base 2. With n keys the part's weight is then at most n exp(-d), so the two together
// are at most ln n = 4.2 for n = 64: 13. With the rounding of the parts themselves: 44. Allowed is 64.
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
            WRONG("of the worked example's two tiles, a (max %g, sum %.7g, o %.7g) and b (max %g, sum %.7g, o %.7g), %s (sum and o of a count "
                  "exp(score - a.max), and have to count exp(score - common max))", a.max, a.sum, a.o[0], b.max, b.sum, b.o[0], found);
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
                left[b] = left[count - 1 == a ? b : count - 1];
                if (count - 1 == a) left[b] = left[a];
            }
            const char *found = fault(left[0], exact, 1);
            if (!found) continue;
            const bool overflow = !isfinite(left[0].sum) || left[0].sum == 0;
            WRONG("of %d keys with scores from %.4g to %.4g, in %d parts merged in random order, %s%s", keys, centre - spread, centre + spread, parts,
                  found, overflow ? " (exp(89) is more than a float can hold, exp(-104) is 0: only differences to the maximum are safe)" : "");
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
            if (p < 0 || p >= CHUNKS) WRONG("chunk %d of row %d goes to position %d, but a row has positions 0 to 7", chunk, row, p);
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

    // Conflicts, of each access of eight threads: writes of one row's chunks, reads of one chunk of eight rows.
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
                    WRONG("chunks %d and %d of row %d both go to position %d, so one is lost: of the tile's 512 chunks %d come back wrong from "
                          "shared memory, and %d writes wait for another", other, chunk, row, position[row][chunk], lost, writes_waiting);
                }
            }
        }
        WRONG("chunk %d of row %d comes back wrong, as do %d of 512, although each has a position of its own: is the position of a chunk "
              "another one the second time it is asked for?", first_lost % CHUNKS, first_lost / CHUNKS, lost);
    }
    if (reads_waiting > 0)
        WRONG("the tile comes back right, but %d of 512 reads wait for another (%d-way conflicts at rows %d to %d, whose chunks %d are at "
              "positions %d %d %d %d %d %d %d %d)", reads_waiting, worst_read, worst_row, worst_row + 7, worst_chunk, worst[0], worst[1], worst[2],
              worst[3], worst[4], worst[5], worst[6], worst[7]);
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

// How many pairs of an existing query of the block and a key of the tile are seen, and not? The last pair not seen is said, too.
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

static struct {  // over all cases: how many tiles are walked over and masked, and have to be; and the first one in vain
    int walked, to_walk, masked, to_mask;
    char needless_walk[300], needless_mask[300];
} work;

// Checks what the answers say about the tiles of one block, before a kernel relies on it.
static void check_tiles(WindowCase c, int first_row) {
    const int tiles = (c.T + c.keys - 1) / c.keys, last_row = (first_row + c.rows < c.T ? first_row + c.rows : c.T) - 1;
    const KeyTiles walk = window(first_row, c.rows, c.keys, c.T, c.W);
    if (walk.first < 0 || walk.end > tiles)
        WRONG("for queries %d .. %d window() gives tiles %d .. %d, but there are only 0 .. %d (%s)", first_row, last_row, walk.first, walk.end - 1,
              tiles - 1, name_of(c));
    for (int tile = 0; tile < tiles; tile++) {
        const bool walked = walk.first <= tile && tile < walk.end;
        const bool masked = walked && needs_mask(tile, first_row, c.rows, c.keys, c.T, c.W);
        const Pairs pairs = pairs_of(c, first_row, tile);
        const int first_key = tile * c.keys, last_key = first_key + c.keys - 1;
        if (pairs.seen && !walked)
            WRONG("queries %d .. %d walk over tiles %d .. %d only, but see a key of tile %d, keys %d .. %d (%s)", first_row, last_row, walk.first,
                  walk.end - 1, tile, first_key, last_key, name_of(c));
        if (walked && pairs.unseen && !masked)
            WRONG("queries %d .. %d walk over tile %d, keys %d .. %d, without a mask, but query %d does not see key %d%s (%s)", first_row, last_row,
                  tile, first_key, last_key, pairs.query, pairs.key, pairs.key < c.T ? "" : ", which does not exist", name_of(c));
        work.walked += walked;
        work.to_walk += pairs.seen > 0;
        work.masked += masked;
        work.to_mask += pairs.seen && pairs.unseen;
        if (walked && !pairs.seen && !*work.needless_walk)
            snprintf(work.needless_walk, sizeof work.needless_walk, "queries %d .. %d see no key of tile %d, keys %d .. %d (%s)", first_row, last_row,
                     tile, first_key, last_key, name_of(c));
        if (masked && !pairs.unseen && !*work.needless_mask)
            snprintf(work.needless_mask, sizeof work.needless_mask, "queries %d .. %d all see all of tile %d, keys %d .. %d (%s)", first_row, last_row,
                     tile, first_key, last_key, name_of(c));
    }
}

// Attention through the answers against double precision. All inputs are within ±1, so scores within ±8: an fp32 score has an error below
// 16 · 8 · 2^-24 < 8e-6, and a sum of up to 144 terms as much again. 1e-4 is far from both, and farther from a wrong key's weight.
static void check_attention(WindowCase c) {
    static float q[MAX_T][HS], k[MAX_T][HS], v[MAX_T][HS], out[MAX_T][HS];
    for (int t = 0; t < c.T; t++) {
        for (int j = 0; j < HS; j++) q[t][j] = draw_within(1), k[t][j] = draw_within(1), v[t][j] = draw_within(1), out[t][j] = NAN;
    }
    const int size = c.T * HS, grid = (c.T + c.rows - 1) / c.rows;
    float *d_q = to_device(q[0], size), *d_k = to_device(k[0], size), *d_v = to_device(v[0], size), *d_out = to_device(out[0], size);
    LAUNCH(window_forward_kernel, grid, c.rows, 2 * c.keys * HS * sizeof(float), NULL, d_out, d_q, d_k, d_v, c.T, c.W, c.keys);
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
                WRONG("the tiles are those needed, but attention comes out wrong: out[%d][%d] is %.6f and should be %.6f (%s)", query, j,
                      out[query][j], o[j] / sum, name_of(c));
        }
    }
}

static void check_case(WindowCase c) {
    for (int first_row = 0; first_row < c.T; first_row += c.rows) check_tiles(c, first_row);
    check_attention(c);
}

TEST(window) {
    const int lengths[] = {12, 1, 7, 33, 64, 100}, windows[] = {5, 1, 2, 16, 33, 1000}, shapes[][2] = {{4, 4}, {16, 16}, {32, 8}, {8, 32}, {24, 10}};
    memset(&work, 0, sizeof work);
    for (int T : lengths) {
        for (int W : windows) {
            for (auto &shape : shapes) check_case({T, W, shape[0], shape[1]});
        }
    }
    for (int i = 0; i < 100; i++) check_case({1 + draw_below(MAX_T), 1 + draw_below(MAX_T), 1 + draw_below(64), 1 + draw_below(64)});
    if (work.walked > work.to_walk)
        WRONG("right, but it walks over %d tiles where %d would do: %s", work.walked, work.to_walk, work.needless_walk);
    if (work.masked > work.to_mask)
        WRONG("right, but it masks %d tiles where %d would do: %s", work.masked, work.to_mask, work.needless_mask);
}

int main(int argc, char **argv) { return run_tests(argc > 1 ? argv[1] : NULL, NULL, NULL) > 0; }

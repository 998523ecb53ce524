// Tiles: pieces of a matrix in shared memory, and the tensor-core products of a warp on them.
//
// A tile has ROWS rows of COLS bf16. Rows are read by ldmatrix eight at a time, 16 bytes (a "chunk") of each. Rows of 128 bytes
// would put equal chunks of all rows into the same four of the 32 banks, so that the eight reads took turns. Therefore chunk c
// of row r lies where chunk c ^ (r % 8) would, which spreads any eight rows over all banks: the tile is "swizzled".
//
// A warp keeps results as its tensor cores deliver them: float acc[M][N / 8][4] is a matrix of 16 M rows and N columns, of which
// the lane with g = lane / 4 and t = lane % 4 has in acc[m][n] the elements
//     [0], [1]: row 16 m + g,     columns 8 n + 2 t and + 1
//     [2], [3]: row 16 m + g + 8, the same columns.
// Rounded to pairs of bf16, two such 16 x 8 pieces are just what the tensor core wants of a left factor (16 x 16), so the result of
// one product is the left factor of the next without leaving its registers.
#ifndef GPT_TILE_CUH
#define GPT_TILE_CUH

#include "gpt/cuda.cuh"

static constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;  // kernels take exponentials and logarithms to base 2

DEVICE int lane_id(void) { return threadIdx.x % 32; }
DEVICE int warp_id(void) { return threadIdx.x / 32; }

// What the chunks of a row are xored with. A row of 64 bytes shares a line of 128 with its neighbour; a row of 256 bytes is two
// lines, in each of which its chunks change places like those of a row of 128.
template <int COLS> DEVICE int swizzle(int row) {
    constexpr int CHUNKS = COLS / 8;
    return CHUNKS >= 8 ? row % 8 : row / (8 / CHUNKS) % CHUNKS;
}

// Starts copying rows first_row .. first_row + ROWS - 1 of a matrix with T rows of COLS elements, `stride` elements apart, to
// a tile; rows from T on become zero. All THREADS threads of the block take part.
template <int ROWS, int COLS, int THREADS>
DEVICE void load_tile(bf16 *tile, const bf16 *matrix, size_t stride, int first_row, int T) {
    constexpr int CHUNKS = COLS / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
    static_assert(ROWS % ROWS_AT_ONCE == 0 && ROWS_AT_ONCE % 8 == 0,
                  "each thread copies the same number of chunks, equally swizzled");
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    bf16 *to = tile + row * COLS + (chunk ^ swizzle<COLS>(row)) * 8;
    const bf16 *from = matrix + (size_t)(first_row + row) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
        const bool inside = first_row + row + i < T;
        cp_async_16(to + i * COLS, inside ? from + i * stride : matrix, inside);
    }
}

// The 16 x 16 block of a tile at (row, col), both multiples of 16, is read as four 8 x 8 matrices, in one of two orders: DOWN,
// where the second is below the first, or ACROSS, where it is to its right. This is the address that a lane gives to ldmatrix for
// it. Its chunk is col / 8 + right; col / 8 being even, the sum is an xor, too, and all that depends on the lane is the same for
// every block.
enum TileOrder { DOWN, ACROSS };
template <int COLS, TileOrder ORDER> DEVICE const bf16 *lane_address(const bf16 *tile, int row, int col) {
    const int lane = lane_id(), below = ORDER == DOWN ? lane / 8 % 2 : lane / 16, right = ORDER == DOWN ? lane / 16 : lane / 8 % 2;
    const int block_row = 8 * below + lane % 8;
    return tile + (row + block_row) * COLS + (right ^ swizzle<COLS>(block_row) ^ col / 8 % 8) * 8 + col / 64 * 64;
}

// The block as the left factor of a product, (m, k) in the tile or, with _trans, (k, m); or as the right factor, (k, n) or, with
// _trans, (n, k), then r[0], r[1] for its first eight columns and r[2], r[3] for the others. _trans says how the tile lies: as the
// tensor core wants right factors by columns, it is (k, n) that ldmatrix has to transpose.
template <int COLS> DEVICE void load_left(uint32_t (&r)[4], const bf16 *tile, int row, int col) {
    ldmatrix_x4(r, lane_address<COLS, DOWN>(tile, row, col));
}
template <int COLS> DEVICE void load_left_trans(uint32_t (&r)[4], const bf16 *tile, int row, int col) {
    ldmatrix_x4_trans(r, lane_address<COLS, ACROSS>(tile, row, col));
}
template <int COLS> DEVICE void load_right(uint32_t (&r)[4], const bf16 *tile, int row, int col) {
    ldmatrix_x4_trans(r, lane_address<COLS, DOWN>(tile, row, col));
}
template <int COLS> DEVICE void load_right_trans(uint32_t (&r)[4], const bf16 *tile, int row, int col) {
    ldmatrix_x4(r, lane_address<COLS, ACROSS>(tile, row, col));
}

// acc (16 M, N) += A Bᵀ: A is rows a_row .. of tile a, B rows b_row .. of tile b, both with COLS columns.
template <int COLS, int M, int N8>
DEVICE void product_abt(float (&acc)[M][N8][4], const bf16 *a, int a_row, const bf16 *b, int b_row) {
#pragma unroll
    for (int k = 0; k < COLS; k += 16) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_left<COLS>(left[m], a, a_row + 16 * m, k);
#pragma unroll
        for (int n = 0; n < N8; n += 2) {
            uint32_t right[4];
            load_right_trans<COLS>(right, b, b_row + 8 * n, k);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(acc[m][n], left[m], right[0], right[1]);
                mma_m16n8k16(acc[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// acc (16 M, COLS) += A B for 16 columns of A, which are given as left factors, and 16 rows of tile b, from b_row on.
template <int COLS, int M>
DEVICE void product_step(float (&acc)[M][COLS / 8][4], const uint32_t (&left)[M][4], const bf16 *b, int b_row) {
#pragma unroll
    for (int n = 0; n < COLS / 8; n += 2) {
        uint32_t right[4];
        load_right<COLS>(right, b, b_row, 8 * n);
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_m16n8k16(acc[m][n], left[m], right[0], right[1]);
            mma_m16n8k16(acc[m][n + 1], left[m], right[2], right[3]);
        }
    }
}

// acc (16 M, COLS) += A B: A (16 M, 8 K8) is the result of another product, rounded to bf16 here; B is rows b_row .. of tile b.
template <int COLS, int M, int K8>
DEVICE void product_ab(float (&acc)[M][COLS / 8][4], const float (&a)[M][K8][4], const bf16 *b, int b_row) {
#pragma unroll
    for (int k = 0; k < K8; k += 2) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            left[m][0] = pack_bf16(a[m][k][0], a[m][k][1]);
            left[m][1] = pack_bf16(a[m][k][2], a[m][k][3]);
            left[m][2] = pack_bf16(a[m][k + 1][0], a[m][k + 1][1]);
            left[m][3] = pack_bf16(a[m][k + 1][2], a[m][k + 1][3]);
        }
        product_step<COLS>(acc, left, b, b_row + 8 * k);
    }
}

// Columns (keys) beyond the causal diagonal or the end become -inf in S, whose first element is at (first_row, first_col).
template <int M, int N8>
DEVICE void mask_scores(float (&s)[M][N8][4], int first_row, int first_col, int T, bool causal) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = first_row + 16 * m + lane_id() / 4 + i / 2 * 8, col = first_col + 8 * n + lane_id() % 4 * 2 + i % 2;
                if ((causal && col > row) || col >= T) s[m][n][i] = -INFINITY;
            }
        }
    }
}

// Zeros in Pᵀ, whose first element is at (first_key, first_query), where the key lies beyond the query.
template <int M, int N8> DEVICE void mask_transposed(float (&p)[M][N8][4], int first_key, int first_query) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first_key + 16 * m + lane_id() / 4 + i / 2 * 8;
                const int query = first_query + 8 * n + lane_id() % 4 * 2 + i % 2;
                if (key > query) p[m][n][i] = 0;
            }
        }
    }
}

// Writes scale · acc to rows first_row .. of a matrix with T rows `stride` elements apart, rounded to bf16; rows from T on are
// left out.
template <int M, int N8>
DEVICE void store_rows(bf16 *matrix, size_t stride, int first_row, int T, const float (&acc)[M][N8][4], float scale) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + 16 * m + 8 * half + lane_id() / 4;
            if (row >= T) continue;
            uint32_t *to = (uint32_t *)(matrix + (size_t)row * stride + lane_id() % 4 * 2);
#pragma unroll
            for (int n = 0; n < N8; n++) to[4 * n] = pack_bf16(scale * acc[m][n][2 * half], scale * acc[m][n][2 * half + 1]);
        }
    }
}

#endif

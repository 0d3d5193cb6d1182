/* Matrix tiles of x86 processors with AMX and bfloat16. Suffixes as in batchmla.kernels.ops.
 *
 * A tile holds 16 rows of 64 bytes. tdpbf16ps adds A[16 x 32] * B[32 x 16] to C[16 x 16] in float32;
 * B has the values of two neighbouring k side by side ("pairs"): B[k/2][n][k%2].
 *
 * A row of C is summed over k in one order, whatever the other rows are: results of a row do not
 * depend on how many rows share a call. */
#ifndef BATCHMLA_AMX_H
#define BATCHMLA_AMX_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

enum { TILE = 16, DEPTH = 32, TILE_VALUES = 512, PANEL = 32 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Tiles 0-3: C of two row blocks times two column blocks; 4, 5: A; 6, 7: B. With one row block its C
 * is in tiles 0 and 1, and A and B have the others in turns. */
static inline void configure(int rows0, int rows1) {
    TileConfig config __attribute__((aligned(64)));
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64;
    config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)rows0;
    config.rows[2] = config.rows[3] = (uint8_t)(rows1 > 0 ? rows1 : TILE);
    config.rows[5] = (uint8_t)(rows1 > 0 ? rows1 : rows0);
    config.rows[6] = config.rows[7] = TILE;
    __asm__ volatile("" ::"r"(&config) : "memory"); /* all of it is read */
    _tile_loadconfig(&config);
}

/* Row blocks of `rows` <= 32 rows, in the first 16 rows and the others. */
static inline void configure_rows(long rows) {
    configure(rows < TILE ? (int)rows : TILE, rows > TILE ? (int)(rows - TILE) : 0);
}

static inline void zero_pair(int has_second) {
    _tile_zero(0);
    _tile_zero(1);
    if (has_second) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

/* What to fetch while products run: from `at` up to `end`, then from `next` on; `bytes` with every pair
 * of B tiles, of which one line in `step` is asked for. */
typedef struct {
    const char *at, *end, *next;
    long bytes, step;
} Wanted;

static inline void ask(Wanted *wanted) {
    if (wanted->at >= wanted->end) {
        wanted->at = wanted->next + (wanted->at - wanted->end);
        wanted->end = wanted->at + (1L << 40);
    }
    const char *at = wanted->at, *end = at + wanted->bytes;
    for (; at < end; at += wanted->step) _mm_prefetch(at, _MM_HINT_T1);
    wanted->at = end;
}

/* A load waits for the tile's former value, even though it replaces all of it, unless that was
 * zeroed: so tiles are, after their last use. That halves the time where another thread has the
 * core's other half. */

/* One row block of A in tile `a` times two B tiles at one k. */
#define ADD_ONE(a_tile, b0_tile, b1_tile, a, a_bytes, b) \
    do {                                                  \
        _tile_loadd(a_tile, a, a_bytes);                  \
        _tile_loadd(b0_tile, b, 64);                      \
        _tile_dpbf16ps(0, a_tile, b0_tile);               \
        _tile_zero(b0_tile);                              \
        _tile_loadd(b1_tile, (b) + TILE_VALUES, 64);      \
        _tile_dpbf16ps(1, a_tile, b1_tile);               \
        _tile_zero(a_tile);                               \
        _tile_zero(b1_tile);                              \
    } while (0)

/* Adds one or two row blocks of A times two B tiles that lie side by side at every k. `a1` NULL: one
 * row block. */
static inline void add_pair(const bf16 *a0, const bf16 *a1, long a_bytes, const bf16 *b,
                            long depth_tiles, Wanted wanted) {
    if (a1) {
        for (long k = 0; k < depth_tiles; k++, b += 2 * TILE_VALUES) {
            ask(&wanted);
            _tile_loadd(4, a0 + k * DEPTH, a_bytes);
            _tile_loadd(6, b, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + TILE_VALUES, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_zero(4);
            _tile_loadd(5, a1 + k * DEPTH, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_zero(6);
            _tile_dpbf16ps(3, 5, 7);
            _tile_zero(7);
            _tile_zero(5);
        }
        return;
    }
    for (long k = 0; k + 1 < depth_tiles; k += 2, b += 4 * TILE_VALUES) {
        ask(&wanted);
        ADD_ONE(4, 6, 7, a0 + k * DEPTH, a_bytes, b);
        ask(&wanted);
        ADD_ONE(5, 2, 3, a0 + (k + 1) * DEPTH, a_bytes, b + 2 * TILE_VALUES);
    }
    if (depth_tiles % 2) {
        ask(&wanted);
        ADD_ONE(4, 6, 7, a0 + (depth_tiles - 1) * DEPTH, a_bytes, b);
    }
}

/* The same from C tiles of zeros. */
static inline void dot_pair(const bf16 *a0, const bf16 *a1, long a_bytes, const bf16 *b,
                            long depth_tiles, Wanted wanted) {
    zero_pair(a1 != 0);
    add_pair(a0, a1, a_bytes, b, depth_tiles, wanted);
}

/* C tiles from float32 [rows][32]. */
static inline void load_pair(const float *sums, int has_second) {
    zero_pair(has_second);
    _tile_loadd(0, sums, PANEL * 4);
    _tile_loadd(1, sums + TILE, PANEL * 4);
    if (has_second) {
        _tile_loadd(2, sums + TILE * PANEL, PANEL * 4);
        _tile_loadd(3, sums + TILE * PANEL + TILE, PANEL * 4);
    }
}

/* C tiles into float32 [rows][32]. */
static inline void store_pair(float *sums, int has_second) {
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + TILE, PANEL * 4);
    if (has_second) {
        _tile_stored(2, sums + TILE * PANEL, PANEL * 4);
        _tile_stored(3, sums + TILE * PANEL + TILE, PANEL * 4);
    }
}

/* Threads that pay for so much work: every further one costs a meeting, and on a busy machine the
 * wait for one that another process has put aside. About 25 us of one core's work. */
static inline int useful_threads(long flops, long bytes, int threads) {
    return flops > 15000000 || bytes > 250000 ? threads : 1;
}

/* Up to 16 values in float32, 0 where `mask` has none. */
static inline __m512 wide_some(const bf16 *values, __mmask16 mask) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

static inline __mmask16 first(long count) {
    return count >= TILE ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}

/* e^x, relative error below 2e-7 (degree 6 in the rest of x / ln 2); 0 for -inf. */
static inline __m512 exponential(__m512 x) {
    const __m512 log2e = _mm512_set1_ps(1.44269504f);
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), 8);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693145752f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(1.42860677e-6f), rest);
    __m512 sum = _mm512_set1_ps(1.0f / 720.0f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 120.0f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 24.0f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 6.0f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.5f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

/* x / (1 + e^-x) */
static inline __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 bound = _mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(88.0f));
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(bound)));
}

/* Two rows of 32 values as pairs: columns 0-15 to `left`, 16-31 to `right`. */
static inline void pair_rows(__m512i even, __m512i odd, bf16 *left, bf16 *right) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
        39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(left, _mm512_permutex2var_epi16(even, low, odd));
    _mm512_storeu_si512(right, _mm512_permutex2var_epi16(even, high, odd));
}

/* Transposes 16 x 16 values of four bytes. */
static inline void transpose(const __m512i *in, __m512i *out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        __m512i high = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        __m512i low2 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        __m512i high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        out[i] = _mm512_shuffle_i32x4(low, high, 0x88);
        out[8 + i] = _mm512_shuffle_i32x4(low, high, 0xdd);
        out[4 + i] = _mm512_shuffle_i32x4(low2, high2, 0x88);
        out[12 + i] = _mm512_shuffle_i32x4(low2, high2, 0xdd);
    }
}

#endif

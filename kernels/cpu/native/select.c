/* The cached keys that rows choose by their index scores: see `SelectKeysOp` in
 * batchmla.kernels.sparse_ops.
 *
 * A score is a sum over depth, then over heads, in orders that are the same for every row and key:
 * it depends on that row and that key only. The choice is exact, by counting the bits of scores. */
#include <omp.h>
#include <stdlib.h>

#include "amx.h"

enum { BLOCK = 128, HEAD_TILES = 4, UNIT_ROWS = 8, UNIT_SCORES = 1 << 18, BITS = 11, AHEAD = 48 };

/* N rows of queries [heads][width] and weights [heads]; each sees the first `visible` keys of its
 * pages, or of those that all rows share. A page holds `page_rows` keys in bfloat16, or as e4m3
 * values followed by one float32 factor a key. */
typedef struct {
    const bf16 *q;
    const float *weights;
    const uint8_t *pages;
    const int64_t *table; /* [N or 1, table_width] */
    const int64_t *visible;
    int64_t *slots; /* [N, count], to be written */
    long rows, heads, width, page_rows, page_bytes, table_width, count;
    int is_shared, has_codes;
} Choice;

/* Buffers of one thread. */
typedef struct {
    bf16 *queries;   /* of each row [heads / 16][width / 32][16][16][2] */
    bf16 *keys;      /* [128][width] */
    float *dots;     /* [16 keys][64 heads] */
    float *scores;   /* of each row [keys, rounded up to 128] */
    uint32_t *ranks; /* the same for one row */
    uint32_t *left;
    long *counts; /* [2048] */
} Room;

static long round_up(long value, long unit) { return (value + unit - 1) / unit * unit; }

static bf16 *row_queries(const Choice *job, const Room *room, long index) {
    return room->queries + index * round_up(job->heads, TILE) * job->width;
}

/* A row's queries as pairs: B tiles with the heads as columns, zeros behind the last. */
static void lay_queries(const Choice *job, long row, bf16 *target) {
    const bf16 *q = job->q + row * job->heads * job->width;
    __m512i in[16], out[16];
    for (long head = 0; head < job->heads; head += TILE)
        for (long k = 0; k < job->width; k += DEPTH, target += TILE_VALUES) {
            for (long n = 0; n < TILE; n++)
                in[n] = head + n < job->heads
                            ? _mm512_loadu_si512(q + (head + n) * job->width + k)
                            : _mm512_setzero_si512();
            transpose(in, out);
            for (long n = 0; n < TILE; n++) _mm512_storeu_si512(target + n * DEPTH, out[n]);
        }
}

static const uint8_t *page_at(const Choice *job, const int64_t *pages, long position) {
    return job->pages + pages[position / job->page_rows] * job->page_bytes;
}

/* e4m3 times a factor; 2^120 makes up for the difference of the exponents' biases. */
static void decode(const uint8_t *codes, float factor, long width, bf16 *target) {
    const __m512 rebias = _mm512_set1_ps(0x1p120f), scale = _mm512_set1_ps(factor);
    const __m512i low = _mm512_set1_epi32(127), nan = _mm512_set1_epi32(0x7fc00000);
    for (long at = 0; at < width; at += TILE) {
        __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + at)));
        __m512i rest = _mm512_and_si512(code, low);
        __m512i sign = _mm512_slli_epi32(_mm512_andnot_si512(low, code), 24);
        __m512i bits = _mm512_or_si512(_mm512_slli_epi32(rest, 20), sign);
        bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(rest, low), nan);
        __m512 value = _mm512_mul_ps(_mm512_mul_ps(_mm512_castsi512_ps(bits), rebias), scale);
        _mm256_storeu_si256((__m256i *)(target + at), narrow(value));
    }
}

/* Whether 16 keys from a multiple of 16 on lie in a page as tiles read them. */
static int has_whole_tiles(const Choice *job) {
    return !job->has_codes && job->page_rows % TILE == 0;
}

/* `some` <= 128 keys from `position` on, side by side: where they lie, or copied. */
static const bf16 *block_keys(const Choice *job, const int64_t *pages, long position, long some,
                              Room *room) {
    const long width = job->width, rows = job->page_rows;
    if (has_whole_tiles(job) && position % rows + some <= rows)
        return (const bf16 *)page_at(job, pages, position) + position % rows * width;
    for (long n = 0; n < some; n++) {
        const uint8_t *page = page_at(job, pages, position + n);
        const long at = (position + n) % rows;
        bf16 *target = room->keys + n * width;
        if (job->has_codes) {
            float factor;
            memcpy(&factor, page + rows * width + at * 4, 4);
            decode(page + at * width, factor, width, target);
        } else {
            memcpy(target, page + at * width * 2, (size_t)width * 2);
        }
    }
    return room->keys;
}

/* Lane i: the sum of vector i. */
static __m512 sum_each(__m512 *v) {
    __m512 sum[4];
    for (int i = 0; i < 4; i++) {
        __m512 two[2];
        for (int j = 0; j < 2; j++) {
            __m512 a = v[4 * i + 2 * j], b = v[4 * i + 2 * j + 1];
            two[j] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        __m512d a = _mm512_castps_pd(two[0]), b = _mm512_castps_pd(two[1]);
        sum[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                               _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(sum[0], sum[1], 0x44),
                             _mm512_shuffle_f32x4(sum[0], sum[1], 0xee));
    __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(sum[2], sum[3], 0x44),
                             _mm512_shuffle_f32x4(sum[2], sum[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

/* dots[16][64] of 16 keys with up to 64 heads. */
static void dot_heads(const bf16 *keys, const bf16 *queries, long width, long tiles, float *dots) {
    const long step = width / DEPTH * TILE_VALUES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < width; k += DEPTH, queries += TILE_VALUES) {
        _tile_loadd(4, keys + k, 2 * width);
        _tile_loadd(6, queries, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (tiles > 1) {
            _tile_loadd(7, queries + step, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (tiles > 2) {
            _tile_loadd(6, queries + 2 * step, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (tiles > 3) {
            _tile_loadd(7, queries + 3 * step, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, dots, HEAD_TILES * TILE * 4);
    if (tiles > 1) _tile_stored(1, dots + TILE, HEAD_TILES * TILE * 4);
    if (tiles > 2) _tile_stored(2, dots + 2 * TILE, HEAD_TILES * TILE * 4);
    if (tiles > 3) _tile_stored(3, dots + 3 * TILE, HEAD_TILES * TILE * 4);
}

/* Scores of 16 keys with one row. */
static void score(const Choice *job, const bf16 *keys, const bf16 *queries, const float *weights,
                  float *dots, float *scores) {
    __m512 sums[TILE];
    for (long n = 0; n < TILE; n++) sums[n] = _mm512_setzero_ps();
    for (long head = 0; head < job->heads; head += HEAD_TILES * TILE) {
        long some = job->heads - head, tiles = round_up(some, TILE) / TILE;
        if (tiles > HEAD_TILES) tiles = HEAD_TILES;
        dot_heads(keys, queries + head * job->width, job->width, tiles, dots);
        for (long tile = 0; tile < tiles; tile++) {
            __mmask16 mask = first(some - tile * TILE);
            __m512 weight = _mm512_maskz_loadu_ps(mask, weights + head + tile * TILE);
            for (long n = 0; n < TILE; n++) { /* max gives its second argument for no number */
                const float *from = dots + n * HEAD_TILES * TILE + tile * TILE;
                __m512 dot = _mm512_maskz_loadu_ps(mask, from);
                dot = _mm512_max_ps(_mm512_setzero_ps(), dot);
                sums[n] = _mm512_fmadd_ps(weight, dot, sums[n]);
            }
        }
    }
    _mm512_storeu_ps(scores, sum_each(sums));
}

/* Scores as whole numbers of the same order; no number counts as -inf, and -0 as 0. */
static void rank(const float *scores, long count, uint32_t *ranks) {
    const __m512i top = _mm512_set1_epi32((int)0x80000000u);
    for (long at = 0; at < count; at += TILE) {
        __m512 score = _mm512_add_ps(_mm512_loadu_ps(scores + at), _mm512_setzero_ps());
        __mmask16 is_none = _mm512_cmp_ps_mask(score, score, _CMP_UNORD_Q);
        score = _mm512_mask_mov_ps(score, is_none, _mm512_set1_ps(-__builtin_inff()));
        __m512i bits = _mm512_castps_si512(score);
        __m512i flips = _mm512_or_si512(_mm512_srai_epi32(bits, 31), top);
        _mm512_storeu_si512(ranks + at, _mm512_xor_si512(bits, flips));
    }
}

/* The `wanted`-th largest rank; `wanted` becomes how many of that rank are among the largest. */
static uint32_t threshold(const Room *room, long count, long *wanted) {
    const uint32_t *ranks = room->ranks;
    uint32_t found = 0;
    for (int shift = 32 - BITS; ; shift = shift > BITS ? shift - BITS : 0) {
        const uint32_t few = shift ? (1u << BITS) - 1 : (1u << (32 - 2 * BITS)) - 1;
        memset(room->counts, 0, sizeof(long) << BITS);
        for (long n = 0; n < count; n++) room->counts[ranks[n] >> shift & few]++;
        uint32_t part = few;
        for (; room->counts[part] < *wanted; part--) *wanted -= room->counts[part];
        found |= part << shift;
        if (!shift) return found;
        const __m512i same = _mm512_set1_epi32((int)(found >> shift));
        long kept = 0;
        for (long at = 0; at < count; at += TILE) { /* in place from the second time on */
            __m512i some = _mm512_loadu_si512(ranks + at);
            __mmask16 mask = _mm512_mask_cmpeq_epi32_mask(
                first(count - at), _mm512_srli_epi32(some, (unsigned)shift), same);
            _mm512_storeu_si512(room->left + kept, _mm512_maskz_compress_epi32(mask, some));
            kept += __builtin_popcount(mask);
        }
        ranks = room->left;
        count = kept;
    }
}

static void choose(const Choice *job, long row, const float *scores, Room *room) {
    const int64_t *pages = job->table + (job->is_shared ? 0 : row * job->table_width);
    const long visible = job->visible[row];
    int64_t *slots = job->slots + row * job->count;
    long equals = job->count;
    rank(scores, visible, room->ranks);
    const uint32_t least = threshold(room, visible, &equals);
    const __m512i border = _mm512_set1_epi32((int)least);
    for (long at = 0; at < visible; at += TILE) {
        __m512i some = _mm512_loadu_si512(room->ranks + at);
        unsigned taken = _mm512_mask_cmpgt_epu32_mask(first(visible - at), some, border);
        unsigned equal = _mm512_mask_cmpeq_epu32_mask(first(visible - at), some, border);
        for (; equal && equals; equal &= equal - 1, equals--) taken |= equal & -equal;
        const int is_one_page = job->page_rows % TILE == 0;
        long shift = is_one_page ? pages[at / job->page_rows] * job->page_rows +
                                       at % job->page_rows - at : 0;
        for (; taken; taken &= taken - 1) {
            long position = at + __builtin_ctz(taken);
            *slots++ = is_one_page ? position + shift
                                   : pages[position / job->page_rows] * job->page_rows +
                                         position % job->page_rows;
        }
    }
}

/* Fetches the 16 keys from `position` on. */
static void fetch(const Choice *job, const int64_t *pages, long position, long end) {
    if (position >= end || !has_whole_tiles(job)) return;
    const bf16 *key = (const bf16 *)page_at(job, pages, position) +
                      position % job->page_rows * job->width;
    for (long at = 0; at < TILE * job->width; at += DEPTH)
        _mm_prefetch((const char *)(key + at), _MM_HINT_T0);
}

/* `rows` rows from `row` on, which share their keys if they are several. */
static void choose_unit(const Choice *job, long row, long rows, long stride, Room *room) {
    const int64_t *pages = job->table + (job->is_shared ? 0 : row * job->table_width);
    long end = 0;
    for (long n = 0; n < rows; n++) {
        lay_queries(job, row + n, row_queries(job, room, n));
        if (job->visible[row + n] > end) end = job->visible[row + n];
    }
    const long block = has_whole_tiles(job) && BLOCK % job->page_rows == 0 ? job->page_rows : BLOCK;
    for (long position = 0; position < end; position += block) {
        long some = end - position < block ? end - position : block;
        const bf16 *keys = block_keys(job, pages, position, some, room);
        for (long n = 0; n < rows; n++)
            for (long at = 0; at < some; at += TILE) {
                if (n == 0) fetch(job, pages, position + at + AHEAD, end);
                score(job, keys + at * job->width, row_queries(job, room, n),
                      job->weights + (row + n) * job->heads, room->dots,
                      room->scores + n * stride + position + at);
            }
    }
    for (long n = 0; n < rows; n++) choose(job, row + n, room->scores + n * stride, room);
}

static char *take(char **at, long bytes) {
    char *taken = *at;
    *at += round_up(bytes, 64);
    return taken;
}

/* This thread's room, kept from call to call; NULL without memory. */
static char *thread_memory(long bytes) {
    static _Thread_local char *memory;
    static _Thread_local long size;
    if (size < bytes) {
        free(memory);
        memory = aligned_alloc(64, (size_t)round_up(bytes, 64));
        size = memory ? bytes : 0;
    }
    return memory;
}

/* All rows; 0, or 1 without memory. The width is a multiple of 32. */
int bmla_select(const Choice *job, int threads) {
    long most = 0, seen = 0;
    for (long row = 0; row < job->rows; row++) {
        seen += job->visible[row];
        if (job->visible[row] > most) most = job->visible[row];
    }
    threads = useful_threads(2 * seen * job->heads * job->width, 0, threads);
    const long stride = round_up(most, BLOCK);
    long unit = job->is_shared ? UNIT_SCORES / stride : 1;
    unit = unit < 1 ? 1 : unit > UNIT_ROWS ? UNIT_ROWS : unit;
    const long query_bytes = 2 * unit * round_up(job->heads, TILE) * job->width;
    const long bytes = query_bytes + 2 * BLOCK * job->width + 4 * TILE * HEAD_TILES * TILE +
                       4 * stride * (unit + 2) + ((long)sizeof(long) << BITS) + 512;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        char *at = thread_memory(bytes);
        if (!at) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
            Room room = {
                .queries = (bf16 *)take(&at, query_bytes),
                .keys = (bf16 *)take(&at, 2 * BLOCK * job->width),
                .dots = (float *)take(&at, 4 * TILE * HEAD_TILES * TILE),
                .scores = (float *)take(&at, 4 * stride * unit),
                .ranks = (uint32_t *)take(&at, 4 * stride),
                .left = (uint32_t *)take(&at, 4 * stride + 64),
                .counts = (long *)take(&at, (long)sizeof(long) << BITS),
            };
            configure(TILE, TILE);
#pragma omp for schedule(dynamic)
            for (long row = 0; row < job->rows; row += unit)
                choose_unit(job, row, job->rows - row < unit ? job->rows - row : unit, stride,
                            &room);
            _tile_release();
        }
    }
    return failed;
}

/* Attention over keys and values that lie in pages, by blocks of keys with a running softmax
 * (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).
 *
 * Blocks begin at multiples of 128 positions and a row sees them in order, so its result depends on
 * its own query and keys only. Scores are computed transposed, keys by rows: 16 keys are a tile as
 * they lie in the cache. */
#include <omp.h>
#include <stdlib.h>

#include "amx.h"

enum { BLOCK = 128, ROWS = 32, AHEAD = 48 };

/* One kind of key or value rows. Row n of page p: base + (p * page_rows + n) * stride + head * step,
 * all in elements. */
typedef struct {
    const bf16 *base;
    long width, stride, step;
} Lanes;

/* `heads` query heads share a key head; query (token, key head, j) is at
 * q + token * q_stride + (key_head * heads + j) * width; results likewise. */
typedef struct {
    const bf16 *q;
    bf16 *out;
    long q_stride, out_stride, heads, key_heads, page_rows, table_width, sequences;
    const int64_t *table;      /* [S, table_width] pages */
    const int64_t *table_row;  /* of each sequence */
    const int64_t *first_row;  /* its first token */
    const int64_t *num_queries, *num_keys;
    Lanes key, tail, value;    /* a key is `key` followed by `tail`, which may be empty */
    float scale;
} Job;

typedef struct {
    long sequence, key_head, row; /* the first of up to 32 rows (query, j) */
} Unit;

/* Buffers of one thread. */
typedef struct {
    bf16 *queries; /* [depth / 32][2 row tiles][16][16][2] */
    bf16 *values;  /* [4][W / 16][16][16][2] */
    bf16 *shares;  /* [2 row tiles][4][16][32] */
    bf16 *gathered; /* [16][width of a lane] */
    float *scores; /* [128][32] */
    float *sums;   /* [32][W] */
} Room;

static long round_up(long value, long unit) { return (value + unit - 1) / unit * unit; }

static const bf16 *row_at(const Job *job, const Lanes *lanes, const int64_t *pages, long position,
                          long key_head) {
    long row = pages[position / job->page_rows] * job->page_rows + position % job->page_rows;
    return lanes->base + row * lanes->stride + key_head * lanes->step;
}

/* The unit's queries as pairs: B tiles with the rows as columns, zeros where there is no row. */
static void lay_queries(const Job *job, Unit unit, long rows, long tiles, Room *room) {
    const long width = job->key.width + job->tail.width;
    __m512i in[16], out[16];
    for (long tile = 0; tile < tiles; tile++)
        for (long k = 0; k < width / DEPTH; k++) {
            for (long n = 0; n < TILE; n++) {
                long row = tile * TILE + n;
                in[n] = _mm512_setzero_si512();
                if (row >= rows) continue;
                long query = (unit.row + row) / job->heads, j = (unit.row + row) % job->heads;
                const bf16 *q = job->q + (job->first_row[unit.sequence] + query) * job->q_stride +
                                (unit.key_head * job->heads + j) * width + k * DEPTH;
                in[n] = _mm512_loadu_si512(q);
            }
            transpose(in, out);
            bf16 *target = room->queries + (k * 2 + tile) * TILE_VALUES;
            for (long n = 0; n < TILE; n++)
                _mm512_storeu_si512(target + n * DEPTH, out[n]);
        }
}

/* Fetches the 16 keys from `position` on, if the unit sees them. */
static void fetch(const Job *job, Unit unit, long position) {
    if (position >= job->num_keys[unit.sequence]) return;
    const int64_t *pages = job->table + job->table_row[unit.sequence] * job->table_width;
    if (job->page_rows % TILE) return;
    const bf16 *key = row_at(job, &job->key, pages, position, unit.key_head);
    for (long row = 0; row < TILE; row++, key += job->key.stride)
        for (long at = 0; at < job->key.width; at += DEPTH)
            _mm_prefetch((const char *)(key + at), _MM_HINT_T1);
}

/* Scores of 16 keys from `position` on: float32 [16][32]. */
static void score_tile(const Job *job, Unit unit, const int64_t *pages, long position, long tiles,
                       Room *room, float *scores) {
    const bf16 *q = room->queries;
    _tile_zero(0);
    _tile_zero(1);
    for (int part = 0; part < 2; part++) {
        const Lanes *lanes = part ? &job->tail : &job->key;
        if (!lanes->width) continue;
        const bf16 *key = row_at(job, lanes, pages, position, unit.key_head);
        long stride = lanes->stride;
        if (job->page_rows % TILE) { /* the tile's rows may lie in several pages */
            stride = lanes->width;
            for (long n = 0; n < TILE && position + n < job->num_keys[unit.sequence]; n++)
                memcpy(room->gathered + n * stride,
                       row_at(job, lanes, pages, position + n, unit.key_head), 2 * (size_t)stride);
            key = room->gathered;
        }
        for (long k = 0; k < lanes->width / DEPTH; k++, q += 2 * TILE_VALUES) {
            _tile_loadd(4, key + k * DEPTH, 2 * stride);
            _tile_loadd(6, q, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (tiles > 1) {
                _tile_loadd(7, q + TILE_VALUES, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
        }
    }
    _tile_stored(0, scores, ROWS * 4);
    if (tiles > 1) _tile_stored(1, scores + TILE, ROWS * 4);
}

/* 32 value rows from `position` on as pairs; rows from `end` on count as zeros. */
static void lay_values(const Job *job, Unit unit, const int64_t *pages, long position, long end,
                       bf16 *target) {
    const long width = job->value.width;
    for (long pair = 0; pair < TILE; pair++) {
        long at = position + 2 * pair;
        const bf16 *rows[2] = {0, 0};
        for (int n = 0; n < 2; n++)
            if (at + n < end) rows[n] = row_at(job, &job->value, pages, at + n, unit.key_head);
        for (long column = 0; column < width; column += 2 * TILE) {
            __m512i zero = _mm512_setzero_si512();
            __m512i a = rows[0] ? _mm512_loadu_si512(rows[0] + column) : zero;
            __m512i b = rows[1] ? _mm512_loadu_si512(rows[1] + column) : zero;
            bf16 *tile = target + column / TILE * TILE_VALUES + pair * DEPTH;
            pair_rows(a, b, tile, tile + TILE_VALUES);
        }
    }
}

/* Scores to shares of one row tile; returns whether earlier sums have to be scaled by `kept`. */
static int soften(Room *room, long tile, long position, long keys, const int32_t *visible,
                  float scale, __m512 *most, __m512 *total, float *kept) {
    const __m512 none = _mm512_set1_ps(-1e30f), factor = _mm512_set1_ps(scale);
    const __m512i seen = _mm512_loadu_si512(visible + tile * TILE);
    float *scores = room->scores + tile * TILE;
    __m512 peak = *most;
    for (long key = 0; key < keys; key++) {
        __mmask16 is_seen = _mm512_cmpgt_epi32_mask(seen, _mm512_set1_epi32((int)(position + key)));
        __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + key * ROWS), factor);
        score = _mm512_mask_blend_ps(is_seen, none, score);
        _mm512_storeu_ps(scores + key * ROWS, score);
        peak = _mm512_max_ps(peak, score);
    }
    __m512 alpha = exponential(_mm512_sub_ps(*most, peak));
    int is_raised = _mm512_cmplt_ps_mask(*most, peak) != 0;
    __m512 sum = _mm512_mul_ps(*total, alpha);
    __m512i pairs[16], rows[16];
    for (long key = 0; key < keys; key += 2) {
        __m512 share[2];
        for (long n = 0; n < 2; n++) {
            __mmask16 is_seen =
                _mm512_cmpgt_epi32_mask(seen, _mm512_set1_epi32((int)(position + key + n)));
            __m512 score = _mm512_loadu_ps(scores + (key + n) * ROWS);
            share[n] = _mm512_maskz_mov_ps(is_seen, exponential(_mm512_sub_ps(score, peak)));
            sum = _mm512_add_ps(sum, share[n]);
        }
        __m512i even = _mm512_cvtepu16_epi32(narrow(share[0]));
        __m512i odd = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(share[1])), 16);
        pairs[key / 2 % TILE] = _mm512_or_si512(even, odd);
        if (key % DEPTH == DEPTH - 2) {
            transpose(pairs, rows);
            bf16 *target = room->shares + (tile * (BLOCK / DEPTH) + key / DEPTH) * TILE_VALUES;
            for (long n = 0; n < TILE; n++) _mm512_storeu_si512(target + n * DEPTH, rows[n]);
        }
    }
    *most = peak;
    *total = sum;
    _mm512_storeu_ps(kept, alpha);
    return is_raised;
}

static void scale_sums(float *sums, long width, const float *kept) {
    for (long row = 0; row < TILE; row++) {
        __m512 factor = _mm512_set1_ps(kept[row]);
        for (long at = 0; at < width; at += TILE) {
            float *target = sums + row * width + at;
            _mm512_storeu_ps(target, _mm512_mul_ps(_mm512_loadu_ps(target), factor));
        }
    }
}

/* sums[rows, W] += shares * values over `pieces` times 32 keys; `is_first`: from 0. */
static void add_values(Room *room, long tiles, long pieces, long width, int is_first) {
    const long wide_tiles = width / TILE;
    for (long column = 0; column < wide_tiles; column += 2) {
        for (long tile = 0; tile < tiles; tile++) {
            float *sums = room->sums + tile * TILE * width + column * TILE;
            const bf16 *shares = room->shares + tile * (BLOCK / DEPTH) * TILE_VALUES;
            if (is_first) {
                _tile_zero(0);
                _tile_zero(1);
            } else {
                _tile_loadd(0, sums, 4 * width);
                _tile_loadd(1, sums + TILE, 4 * width);
            }
            for (long piece = 0; piece < pieces; piece++) {
                const bf16 *values = room->values + (piece * wide_tiles + column) * TILE_VALUES;
                _tile_loadd(4, shares + piece * TILE_VALUES, 64);
                _tile_loadd(6, values, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, values + TILE_VALUES, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, sums, 4 * width);
            _tile_stored(1, sums + TILE, 4 * width);
        }
    }
}

static void write_rows(const Job *job, Unit unit, long rows, const float *sums,
                       const float *totals) {
    const long width = job->value.width;
    for (long row = 0; row < rows; row++) {
        long query = (unit.row + row) / job->heads, j = (unit.row + row) % job->heads;
        bf16 *out = job->out + (job->first_row[unit.sequence] + query) * job->out_stride +
                    (unit.key_head * job->heads + j) * width;
        __m512 factor = _mm512_set1_ps(1.0f / totals[row]);
        for (long at = 0; at < width; at += TILE)
            _mm256_storeu_si256(
                (__m256i *)(out + at),
                narrow(_mm512_mul_ps(_mm512_loadu_ps(sums + row * width + at), factor)));
    }
}

static void attend(const Job *job, Unit unit, Room *room) {
    const long queries = job->num_queries[unit.sequence], keys = job->num_keys[unit.sequence];
    const long left = queries * job->heads - unit.row, rows = left < ROWS ? left : ROWS;
    const long tiles = rows > TILE ? 2 : 1, width = job->value.width;
    const int64_t *pages = job->table + job->table_row[unit.sequence] * job->table_width;
    int32_t visible[ROWS];
    float kept[TILE], totals[ROWS];
    __m512 most[2], total[2];
    for (long row = 0; row < ROWS; row++)
        visible[row] =
            row < rows ? (int)(keys - queries + (unit.row + row) / job->heads + 1) : 0;
    const long end = visible[rows - 1];
    lay_queries(job, unit, rows, tiles, room);
    for (long tile = 0; tile < tiles; tile++) {
        most[tile] = _mm512_set1_ps(-1e30f);
        total[tile] = _mm512_setzero_ps();
    }
    for (long position = 0; position < end; position += BLOCK) {
        long some = round_up(end - position < BLOCK ? end - position : BLOCK, DEPTH);
        for (long at = 0; at < some && position + at < end; at += TILE) {
            fetch(job, unit, position + at + AHEAD);
            score_tile(job, unit, pages, position + at, tiles, room, room->scores + at * ROWS);
        }
        for (long at = 0; at < some; at += DEPTH)
            lay_values(job, unit, pages, position + at, end,
                       room->values + at / DEPTH * width / TILE * TILE_VALUES);
        for (long tile = 0; tile < tiles; tile++)
            if (soften(room, tile, position, some, visible, job->scale, &most[tile], &total[tile],
                       kept) && position > 0)
                scale_sums(room->sums + tile * TILE * width, width, kept);
        add_values(room, tiles, some / DEPTH, width, position == 0);
    }
    for (long tile = 0; tile < tiles; tile++) _mm512_storeu_ps(totals + tile * TILE, total[tile]);
    write_rows(job, unit, rows, room->sums, totals);
}

static bf16 *take(char **at, long bytes) {
    bf16 *taken = (bf16 *)*at;
    *at += round_up(bytes, 64);
    return taken;
}

static long room_bytes(long key_width, long value_width) {
    return 2 * (key_width / DEPTH * 2 + value_width / TILE * (BLOCK / DEPTH)) * TILE_VALUES +
           2 * (2 * BLOCK / DEPTH) * TILE_VALUES + 4 * BLOCK * ROWS + 4 * ROWS * value_width +
           2 * TILE * key_width + 512;
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

/* All rows of all sequences; 0, or 1 without memory. Widths are multiples of 32. */
int bmla_attend(const Job *job, int threads) {
    const long width = job->key.width + job->tail.width;
    long count = 0, flops = 0, read_bytes = 0;
    for (long s = 0; s < job->sequences; s++) {
        flops += 2 * job->num_queries[s] * job->num_keys[s] * job->heads * job->key_heads *
                 (width + job->value.width);
        read_bytes += 2 * job->num_keys[s] * job->key_heads * (width + job->value.width);
        count += job->key_heads * round_up(job->num_queries[s] * job->heads, ROWS) / ROWS;
    }
    threads = useful_threads(flops, read_bytes, threads);
    Unit *units = malloc(sizeof(Unit) * (size_t)count);
    const long bytes = room_bytes(width, job->value.width);
    int failed = 0;
    if (!units) return 1;
    count = 0;
    for (long s = 0; s < job->sequences; s++)
        for (long key_head = 0; key_head < job->key_heads; key_head++)
            for (long row = 0; row < job->num_queries[s] * job->heads; row += ROWS)
                units[count++] = (Unit){s, key_head, row};
#pragma omp parallel num_threads(threads)
    {
        char *at = thread_memory(bytes);
        if (!at) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        Room room = {
            .queries = take(&at, 2 * width / DEPTH * 2 * TILE_VALUES),
            .values = take(&at, 2 * job->value.width / TILE * (BLOCK / DEPTH) * TILE_VALUES),
            .shares = take(&at, 2 * (2 * BLOCK / DEPTH) * TILE_VALUES),
            .gathered = take(&at, 2 * TILE * width),
            .scores = (float *)take(&at, 4 * BLOCK * ROWS),
            .sums = (float *)take(&at, 4 * ROWS * job->value.width),
        };
        configure(TILE, TILE);
#pragma omp for schedule(dynamic)
        for (long index = 0; index < count; index++) {
            if (failed) continue;
            if (index + threads < count && units[index + threads].row == 0)
                for (long at = 0; at < AHEAD; at += TILE) fetch(job, units[index + threads], at);
            attend(job, units[index], &room);
        }
        _tile_release();
    }
    free(units);
    return failed;
}

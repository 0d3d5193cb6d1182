/* Attention over keys and values that lie in pages, by blocks of keys with a running softmax
 * (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).
 *
 * Blocks begin at multiples of 128 positions and a row sees them in order, so its result depends on
 * its own query and keys only. Scores are computed transposed, keys by rows: 16 keys are a tile as
 * they lie in the cache. */
#include <omp.h>
#include <stdlib.h>

#include "clusters.h"

enum { KEY_TILES = 4, MOST_WIDTH = 4096, SCORE_LINES = 36, VALUE_LINES = 36, MIN_TURNS = 4 };

/* Buffers of one thread. */
typedef struct {
    bf16 *queries; /* [depth / 32][2 row tiles][16][16][2] */
    bf16 *values;  /* [2][4][16][16][2] */
    bf16 *shares;  /* [2 row tiles][4][16][32] */
    bf16 *gathered; /* [4][16][width of a lane] */
    float *scores; /* [128][32] */
    float *sums;   /* [32][W] */
} Room;

static long round_up(long value, long unit) { return (value + unit - 1) / unit * unit; }

/* The unit's queries as pairs: B tiles with the rows as columns, zeros where there is no row. */
static void lay_queries(const Job *job, Unit unit, long rows, long tiles, Room *room) {
    const long width = job->key.width + job->tail.width;
    __m512i in[16], out[16];
    for (long tile = 0; tile < tiles; tile++) {
        const bf16 *q[TILE];
        for (long n = 0; n < TILE; n++) {
            long row = tile * TILE + n, j = (unit.row + row) % job->heads;
            q[n] = row >= rows ? 0 :
                   job->q + token_of(job, unit, row) * job->q_stride +
                   (unit.key_head * job->heads + j) * width;
        }
        for (long k = 0; k < width / DEPTH; k++) {
            for (long n = 0; n < TILE; n++)
                in[n] = q[n] ? _mm512_loadu_si512(q[n] + k * DEPTH) : _mm512_setzero_si512();
            transpose(in, out);
            bf16 *target = room->queries + (k * 2 + tile) * TILE_VALUES;
            for (long n = 0; n < TILE; n++)
                _mm512_storeu_si512(target + n * DEPTH, out[n]);
        }
    }
}

/* Scores [16 * count][32] of up to 4 key tiles from `position` on, for one row tile; of up to 2 for
 * two. Every tile has sums of its own: a product waits for none of the others. */
static void score_tiles(const Job *job, Unit unit, const int64_t *pages, long position, long count,
                        long row_tiles, Room *room, Ahead *ahead, float *scores) {
    const bf16 *q = room->queries;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int part = 0; part < 2; part++) {
        const Lanes *lanes = part ? &job->tail : &job->key;
        if (!lanes->width) continue;
        const bf16 *key[KEY_TILES];
        long stride = 0;
        for (long n = 0; n < count; n++)
            key[n] = key_tile(job, lanes, unit, pages, position + n * TILE,
                              room->gathered + n * TILE * lanes->width, &stride);
        for (long n = count; n < KEY_TILES; n++) key[n] = key[0];
        stride *= 2;
        for (long k = 0; k < lanes->width; k += DEPTH, q += 2 * TILE_VALUES) {
            fetch(ahead, SCORE_LINES);
            _tile_loadd(6, q, 64);
            _tile_loadd(4, key[0] + k, stride);
            _tile_dpbf16ps(0, 4, 6);
            if (row_tiles > 1) {
                _tile_loadd(5, key[1] + k, stride);
                _tile_dpbf16ps(1, 5, 6);
                _tile_zero(6);
                _tile_loadd(7, q + TILE_VALUES, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_zero(4);
                _tile_dpbf16ps(3, 5, 7);
                _tile_zero(5);
                _tile_zero(7);
                continue;
            }
            _tile_zero(4);
            _tile_loadd(5, key[1] + k, stride);
            _tile_dpbf16ps(1, 5, 6);
            _tile_zero(5);
            if (count > 2) {
                _tile_loadd(7, key[2] + k, stride);
                _tile_dpbf16ps(2, 7, 6);
                _tile_zero(7);
                _tile_loadd(4, key[3] + k, stride);
                _tile_dpbf16ps(3, 4, 6);
                _tile_zero(4);
            }
            _tile_zero(6);
        }
    }
    const long step = TILE * ROWS;
    _tile_stored(0, scores, ROWS * 4);
    if (count > 1) _tile_stored(1, scores + step, ROWS * 4);
    if (row_tiles > 1) {
        _tile_stored(2, scores + TILE, ROWS * 4);
        if (count > 1) _tile_stored(3, scores + step + TILE, ROWS * 4);
        return;
    }
    if (count > 2) _tile_stored(2, scores + 2 * step, ROWS * 4);
    if (count > 3) _tile_stored(3, scores + 3 * step, ROWS * 4);
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

/* Tiles 2 and 3 are the second row tile, or with `is_wide` the next columns. */
static void load_or_zero(float *sums, long width, long row_tiles, int is_wide, int is_first) {
    const long next = is_wide ? 2 * TILE : TILE * width;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (is_first) return;
    _tile_loadd(0, sums, 4 * width);
    _tile_loadd(1, sums + TILE, 4 * width);
    if (row_tiles == 1 && !is_wide) return;
    _tile_loadd(2, sums + next, 4 * width);
    _tile_loadd(3, sums + next + TILE, 4 * width);
}

static void store_sums(float *sums, long width, long row_tiles, int is_wide) {
    const long next = is_wide ? 2 * TILE : TILE * width;
    _tile_stored(0, sums, 4 * width);
    _tile_stored(1, sums + TILE, 4 * width);
    if (row_tiles == 1 && !is_wide) return;
    _tile_stored(2, sums + next, 4 * width);
    _tile_stored(3, sums + next + TILE, 4 * width);
}

/* 32 rows of 32 columns as pairs. The first tile has the columns 0-3, 8-11, 16-19 and 24-27, the
 * other the rest: `write_rows` puts them in order. */
static void lay_values(const bf16 *const *rows, long column, bf16 *tile) {
    for (long pair = 0; pair < TILE; pair++, tile += DEPTH) {
        __m512i a = _mm512_loadu_si512(rows[2 * pair] + column);
        __m512i b = _mm512_loadu_si512(rows[2 * pair + 1] + column);
        _mm512_store_si512(tile, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(tile + TILE_VALUES, _mm512_unpackhi_epi16(a, b));
    }
}

/* 32 rows of the 32 or 64 columns from `column` on. */
static void lay_step(const bf16 *const *rows, long column, int is_wide, bf16 *laid) {
    lay_values(rows, column, laid);
    if (is_wide) lay_values(rows, column + DEPTH, laid + 2 * TILE_VALUES);
}

/* C tiles += shares * values as they were laid. */
static void add_step(const bf16 *shares, const bf16 *others, const bf16 *laid, long row_tiles,
                     int is_wide) {
    _tile_loadd(4, shares, 64);
    _tile_loadd(6, laid, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (row_tiles > 1) {
        _tile_loadd(7, laid + TILE_VALUES, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_zero(4);
        _tile_loadd(5, others, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_zero(6);
        _tile_dpbf16ps(3, 5, 7);
        _tile_zero(7);
        _tile_zero(5);
        return;
    }
    _tile_zero(6);
    _tile_loadd(7, laid + TILE_VALUES, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_zero(7);
    if (is_wide) {
        _tile_loadd(5, laid + 2 * TILE_VALUES, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_zero(5);
        _tile_loadd(6, laid + 3 * TILE_VALUES, 64);
        _tile_dpbf16ps(3, 4, 6);
        _tile_zero(6);
    }
    _tile_zero(4);
}

/* sums[rows, W] += shares * values of `keys` rows, a multiple of 32; `is_first`: from 0. Two row
 * tiles take two tiles of columns at once, one takes four. What the next product needs is laid
 * before this one: a tile cannot be loaded from stores that are still under way. */
static void add_values(Room *room, const bf16 *const *values, long row_tiles, long keys, long width,
                       int is_first, Ahead *ahead) {
    const bf16 *shares = room->shares, *others = shares + BLOCK / DEPTH * TILE_VALUES;
    const long columns = row_tiles > 1 ? DEPTH : 2 * DEPTH;
    long turn = 0;
    lay_step(values, 0, row_tiles == 1 && DEPTH < width, room->values);
    for (long column = 0; column < width; column += columns) {
        const int is_wide = row_tiles == 1 && column + DEPTH < width;
        float *sums = room->sums + column;
        load_or_zero(sums, width, row_tiles, is_wide, is_first);
        for (long key = 0; key < keys; key += DEPTH, turn ^= 1) {
            const int is_last = key + DEPTH >= keys;
            const long then = is_last ? column + columns : column;
            if (then < width)
                lay_step(is_last ? values : values + key + DEPTH, then,
                         row_tiles == 1 && then + DEPTH < width,
                         room->values + (turn ^ 1) * 4 * TILE_VALUES);
            fetch(ahead, VALUE_LINES);
            add_step(shares + key * TILE, others + key * TILE,
                     room->values + turn * 4 * TILE_VALUES, row_tiles, is_wide);
        }
        store_sums(sums, width, row_tiles, is_wide);
    }
}

static void write_rows(const Job *job, Unit unit, long rows, const float *sums,
                       const float *totals) {
    const long width = job->value.width;
    for (long row = 0; row < rows; row++) {
        const long j = (unit.row + row) % job->heads;
        bf16 *out = job->out + token_of(job, unit, row) * job->out_stride +
                    (unit.key_head * job->heads + j) * width;
        __m512 factor = _mm512_set1_ps(1.0f / totals[row]);
        for (long at = 0; at < width; at += 2 * TILE) {
            const float *from = sums + row * width + at;
            __m512 left = _mm512_mul_ps(_mm512_loadu_ps(from), factor);
            __m512 right = _mm512_mul_ps(_mm512_loadu_ps(from + TILE), factor);
            __m512 low = _mm512_shuffle_f32x4(left, right, 0x44);   /* l0 l1 r0 r1 */
            __m512 high = _mm512_shuffle_f32x4(left, right, 0xee);  /* l2 l3 r2 r3 */
            low = _mm512_shuffle_f32x4(low, low, 0xd8);             /* l0 r0 l1 r1 */
            high = _mm512_shuffle_f32x4(high, high, 0xd8);
            _mm256_storeu_si256((__m256i *)(out + at), narrow(low));
            _mm256_storeu_si256((__m256i *)(out + at + TILE), narrow(high));
        }
    }
}

/* The value rows of a block; zeros from `end` on. */
static void find_values(const Job *job, Unit unit, const int64_t *pages, long position, long keys,
                        long end, const bf16 **rows) {
    static const bf16 zeros[MOST_WIDTH];
    const long some = end - position < keys ? end - position : keys;
    long at = 0;
    while (at < some) { /* page by page: divisions are slow */
        const bf16 *row = row_at(job, &job->value, pages, position + at, unit.key_head);
        for (long left = job->page_rows - (position + at) % job->page_rows; left && at < some; left--) {
            rows[at++] = row;
            row += job->value.stride;
        }
    }
    while (at < keys) rows[at++] = zeros;
}

/* `next`: the unit that this thread will probably have then, or NULL. */
static void attend(const Job *job, Unit unit, const Unit *next, Room *room, float *states) {
    const int is_alone = unit.cluster == ALONE;
    const long queries = job->num_queries[unit.sequence];
    const long keys = is_alone ? job->num_keys[unit.sequence] : job->cluster_keys[unit.cluster];
    const long start = first_key(job, unit);
    const long left = num_rows(job, unit) - unit.row, rows = left < ROWS ? left : ROWS;
    const long tiles = rows > TILE ? 2 : 1, width = job->value.width;
    const long together = tiles > 1 ? 2 : KEY_TILES;
    const int64_t *pages = job->table + job->table_row[unit.sequence] * job->table_width;
    const bf16 *values[BLOCK];
    int32_t visible[ROWS];
    float kept[TILE], totals[ROWS];
    Running running[2] = {start_running(), start_running()};
    for (long row = 0; row < ROWS; row++) {
        const long last = row < rows ? row : rows - 1; /* rows that are not there see as much */
        visible[row] = (int)(is_alone ? keys - queries + (unit.row + last) / job->heads + 1 : keys);
    }
    const long end = visible[rows - 1];
    lay_queries(job, unit, rows, tiles, room);
    if (start) take_state(job, unit, rows, room->sums, running, states);
    for (long position = start; position < end; position += BLOCK) {
        const long some = round_up(end - position < BLOCK ? end - position : BLOCK, DEPTH);
        const int is_whole = position + some <= visible[0];
        const int is_last = position + BLOCK >= end;
        Ahead ahead = is_last && next ? look_ahead(job, *next, first_key(job, *next))
                                      : look_ahead(job, unit, is_last ? keys : position + BLOCK);
        for (long at = 0; at < some && position + at < end; at += together * TILE) {
            long count = (end - position - at + TILE - 1) / TILE;
            score_tiles(job, unit, pages, position + at, count < together ? count : together, tiles,
                        room, &ahead, room->scores + at * ROWS);
        }
        for (long tile = 0; tile < tiles; tile++)
            if (soften(room->scores + tile * TILE, room->shares + tile * BLOCK * TILE, position,
                       some, visible + tile * TILE, is_whole, job->scale * 1.44269504f,
                       &running[tile], kept) && position > 0)
                scale_sums(room->sums + tile * TILE * width, width, kept);
        find_values(job, unit, pages, position, some, end, values);
        add_values(room, values, tiles, some, width, position == 0, &ahead);
        fetch(&ahead, BLOCK * width);
    }
    if (!is_alone) {
        keep_state(job, unit, rows, room->sums, running, states);
        return;
    }
    for (long tile = 0; tile < 2; tile++)
        _mm512_storeu_ps(totals + tile * TILE, running[tile].total);
    write_rows(job, unit, rows, room->sums, totals);
}

static bf16 *take(char **at, long bytes) {
    bf16 *taken = (bf16 *)*at;
    *at += round_up(bytes, 64);
    return taken;
}

static long room_bytes(long key_width, long value_width) {
    return 2 * (key_width / DEPTH * 2 + 8 + 2 * BLOCK / DEPTH) * TILE_VALUES +
           4 * BLOCK * ROWS + 4 * ROWS * value_width + 2 * KEY_TILES * TILE * key_width + 512;
}

/* Memory of this thread, kept from call to call; NULL without memory. */
typedef struct {
    char *memory;
    long size;
} Kept;

static char *kept_memory(Kept *kept, long bytes) {
    if (kept->size < bytes) {
        free(kept->memory);
        kept->memory = aligned_alloc(64, (size_t)round_up(bytes, 64));
        kept->size = kept->memory ? bytes : 0;
    }
    return kept->memory;
}

static Room make_room(char *at, const Job *job) {
    const long width = job->key.width + job->tail.width;
    return (Room){
        .queries = take(&at, 2 * width / DEPTH * 2 * TILE_VALUES),
        .values = take(&at, 2 * 8 * TILE_VALUES),
        .shares = take(&at, 2 * (2 * BLOCK / DEPTH) * TILE_VALUES),
        .gathered = take(&at, 2 * KEY_TILES * TILE * width),
        .scores = (float *)take(&at, 4 * BLOCK * ROWS),
        .sums = (float *)take(&at, 4 * ROWS * job->value.width),
    };
}

static int helpful_threads(const Job *job, int threads) {
    const long width = job->key.width + job->tail.width + job->value.width;
    long flops = 0, read_bytes = 0;
    for (long s = 0; s < job->sequences; s++) {
        flops += 2 * job->num_queries[s] * job->num_keys[s] * job->heads * job->key_heads * width;
        read_bytes += 2 * (job->num_keys[s] - job->shared[s]) * job->key_heads * width;
    }
    return useful_threads(flops, read_bytes, threads);
}

/* All rows of all sequences; 0, or 1 without memory. Widths are multiples of 32. */
int bmla_attend(const Job *job, int threads) {
    static _Thread_local Kept state_memory, room_memory;
    const long members = first_member(job, job->clusters);
    const long bytes = room_bytes(job->key.width + job->tail.width, job->value.width);
    float *states = 0;
    long shared;
    Unit *units = malloc(sizeof(Unit) * (size_t)all_units(job, 0, &shared));
    int failed = !units;
    if (members) {
        const long rows = members * job->heads * job->key_heads;
        states = (float *)kept_memory(&state_memory, 4 * rows * state_values(job));
        failed |= !states;
    }
    if (failed) {
        free(units);
        return 1;
    }
    const long count = all_units(job, units, &shared);
    threads = helpful_threads(job, threads);
    /* heads whose keys lie side by side are one thread's, where there are enough for all */
    const long together =
        count - shared < MIN_TURNS * threads * job->key_heads ? 1 : job->key_heads;
#pragma omp parallel num_threads(threads)
    {
        char *at = kept_memory(&room_memory, bytes);
        if (!at) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        Room room = make_room(at, job);
        configure(TILE, TILE);
#pragma omp for schedule(dynamic)
        for (long index = 0; index < shared; index++) {
            const Unit *next = index + threads < count ? &units[index + threads] : 0;
            if (!failed) attend(job, units[index], next, &room, states);
        }
#pragma omp for schedule(dynamic, together)
        for (long index = shared; index < count; index++) {
            const int is_last = (index - shared) % together == together - 1;
            const long after = index + 1 + (is_last ? (threads - 1) * together : 0);
            const Unit *next = after < count ? &units[after] : 0;
            if (!failed) attend(job, units[index], next, &room, states);
        }
        _tile_release();
    }
    free(units);
    return failed;
}

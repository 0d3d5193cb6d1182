/* Products with packed weights: a linear, and the experts of a layer over the tokens they received.
 *
 * A packed weight [O, I] is a row of panels of 32 outputs: [O/32][I/32][2][16][16][2]; the two tiles
 * of a panel are outputs 0-15 and 16-31, or of experts' up weights 16 gates and their 16 ups.
 * Absent outputs are zeros; I is a multiple of 32. */
#include <omp.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "functions.h"

enum {
    CHUNK_BYTES = 1 << 20,
    MOST_ROWS = 256,
    AHEAD_BYTES = 16384,
    LINE_BYTES = 64,
    MAX_UP_VALUES = 1 << 15
};

/* Asks the system for the tiles' registers, once a process; 0: granted. */
long bmla_request_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18); }

static long smaller(long a, long b) { return a < b ? a : b; }

/* Rows of A that stay in a core's cache while panels stream by. */
static long chunk_rows(long depth) {
    long rows = CHUNK_BYTES / (2 * depth) / PANEL * PANEL;
    return rows < PANEL ? PANEL : smaller(rows, MOST_ROWS);
}

static void write_out(const float *sums, long rows, long column, long columns, const bf16 *bias,
                      void *out, long out_stride, int is_float) {
    for (long half = 0; half < PANEL && column + half < columns; half += TILE) {
        __mmask16 mask = first(columns - column - half);
        long at = column + half;
        for (long row = 0; row < rows; row++) {
            __m512 value = _mm512_loadu_ps(sums + row * PANEL + half);
            if (bias) value = _mm512_add_ps(value, wide_some(bias + at, mask));
            if (is_float)
                _mm512_mask_storeu_ps((float *)out + row * out_stride + at, mask, value);
            else
                _mm256_mask_storeu_epi16((bf16 *)out + row * out_stride + at, mask, narrow(value));
        }
    }
}

/* Panels of a weight from `first` on: as values, or where there are none, as codes. */
typedef struct {
    const bf16 *values;
    const Codes *codes;
    long first;
} Panels;

static Panels values_of(const bf16 *values) { return (Panels){values, 0, 0}; }

static Panels from_panel(Panels weight, long panel) {
    weight.first += panel;
    return weight;
}

/* A thread's sums and the state of its tiles. */
typedef struct {
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    Decoding state;
    long configured;
} Work;

static void start_work(Work *work, Panels weight) {
    work->configured = 0;
    if (weight.codes) start_decoding(&work->state, weight.codes);
}

/* Panels [start, end) of a weight, and the one that this thread probably takes then; none: -1. */
typedef struct {
    Panels weight;
    long start, end, then;
} Range;

static const char *panel_bytes(Panels weight, long panel, long depth) {
    return (const char *)(weight.values + (weight.first + panel) * PANEL * depth);
}

/* With one block of rows a panel is read once, in order: the core fetches ahead by itself once it is
 * told of it every 2 KiB, and would only wait for more requests. With several the next panel is
 * asked for line by line during all of them, or memory would rest in all but the first. */
static Wanted wanted_then(const Range *range, long panel, long depth, long rows, long row) {
    const long blocks = (rows + PANEL - 1) / PANEL, tiles = 2 * PANEL * DEPTH;
    const char *here = panel_bytes(range->weight, panel, depth);
    const char *end = panel_bytes(range->weight, range->end, depth);
    const char *next = range->then < 0 ? end : panel_bytes(range->weight, range->then, depth);
    if (blocks == 1) return (Wanted){here + AHEAD_BYTES, end, next, tiles, tiles};
    if (panel == range->start && row == 0)
        return (Wanted){here + AHEAD_BYTES, end, next, tiles, LINE_BYTES};
    const long bytes = (tiles / blocks + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    here += PANEL * depth * 2 + row / PANEL * bytes * (depth / DEPTH);
    return (Wanted){here, end, next, bytes, LINE_BYTES};
}

/* The sums [some][32] of a panel for the rows from `row` on, which are called in their order. */
static const float *panel_sums(Work *work, const bf16 *x, long x_stride, long rows, long row,
                               const Range *range, long depth, long panel) {
    const Panels weight = range->weight;
    const long some = smaller(PANEL, rows - row), at = weight.first + panel;
    if (!weight.values) {
        if (row == 0)
            multiply_codes(x, x_stride, rows, weight.codes, &work->state, at, work->sums,
                           &work->configured);
        return work->sums + row * PANEL;
    }
    if (some != work->configured) configure_rows(work->configured = some);
    const bf16 *a = x + row * x_stride;
    dot_pair(a, some > TILE ? a + TILE * x_stride : 0, 2 * x_stride,
             weight.values + at * PANEL * depth, depth / DEPTH,
             wanted_then(range, panel, depth, rows, row));
    store_pair(work->sums, some > TILE);
    return work->sums;
}

/* A range of panels over `rows` rows, at most MOST_ROWS of codes. */
static void linear_panels(const bf16 *x, long x_stride, long rows, Range range, long depth,
                          long columns, const bf16 *bias, void *out, long out_stride,
                          int is_float) {
    Work work;
    start_work(&work, range.weight);
    for (long panel = range.start; panel < range.end; panel++)
        for (long row = 0; row < rows; row += PANEL) {
            const float *sums = panel_sums(&work, x, x_stride, rows, row, &range, depth, panel);
            char *target = (char *)out + row * out_stride * (is_float ? 4 : 2);
            write_out(sums, smaller(PANEL, rows - row), panel * PANEL, columns, bias, target,
                      out_stride, is_float);
        }
    _tile_release();
}

/* out[T, O] = x[T, I] * weight^T + bias, the weight as `values` or as `codes`. Strides in elements.
 */
void bmla_linear(const bf16 *x, long x_stride, long rows, const bf16 *values, const Codes *codes,
                 long depth, long columns, const bf16 *bias, void *out, long out_stride,
                 int is_float, int threads) {
    const Panels weight = {values, codes, 0};
    const long panels = (columns + PANEL - 1) / PANEL, most = chunk_rows(depth);
    const long chunks = (rows + most - 1) / most;
    threads = useful_threads(2 * rows * depth * columns, 2 * depth * columns, threads);
    long group = panels * chunks / (threads * 4);
    group = group < 1 ? 1 : smaller(group, panels);
    const long groups = (panels + group - 1) / group;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long unit = 0; unit < chunks * groups; unit++) {
        long row = unit / groups * most, start = unit % groups * group;
        long then = start + threads * group;
        Range range = {weight, start, smaller(start + group, panels), then < panels ? then : -1};
        linear_panels(x + row * x_stride, x_stride, smaller(most, rows - row), range, depth,
                      columns, bias, (char *)out + row * out_stride * (is_float ? 4 : 2),
                      out_stride, is_float);
    }
}

/* For every head h: out_h[T, O] = x_h[T, I] * weight_h^T, with panels `weight_step` values apart. */
void bmla_heads(const bf16 *x, long x_stride, long x_step, long rows, const bf16 *weight,
                long weight_step, long depth, long columns, bf16 *out, long out_stride,
                long out_step, long heads, int threads) {
    const long panels = (columns + PANEL - 1) / PANEL, most = chunk_rows(depth);
    const long chunks = (rows + most - 1) / most, values = heads * depth * columns;
    threads = useful_threads(2 * rows * values, 2 * values, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long unit = 0; unit < heads * chunks; unit++) {
        long head = unit / chunks, row = unit % chunks * most;
        linear_panels(x + row * x_stride + head * x_step, x_stride, smaller(most, rows - row),
                      (Range){values_of(weight + head * weight_step), 0, panels, -1}, depth,
                      columns, 0,
                      out + row * out_stride + head * out_step, out_stride, 0);
    }
}

/* A panel of up[I, O], whose rows are inputs: rows 2k and 2k + 1 become pairs. */
static void interleave(const bf16 *up, long stride, long depth, bf16 *panel) {
    for (long k = 0; k < depth; k += 2) {
        __m512i even = _mm512_loadu_si512(up + k * stride);
        __m512i odd = _mm512_loadu_si512(up + (k + 1) * stride);
        bf16 *target = panel + k / DEPTH * 2 * TILE_VALUES + k % DEPTH / 2 * DEPTH;
        pair_rows(even, odd, target, target + TILE_VALUES);
    }
}

/* For every head h: out_h[T, O] = x_h[T, I] * up_h[I, O], and `tail` values behind x_h to behind
 * out_h; I and O are multiples of 32, I at most 1024. */
void bmla_heads_up(const bf16 *x, long x_stride, long x_step, long rows, const bf16 *up,
                   long up_step, long depth, long columns, bf16 *out, long out_stride,
                   long out_step, long heads, long tail, int threads) {
    const long panels = columns / PANEL, group = smaller(panels, MAX_UP_VALUES / (depth * PANEL));
    const long groups = (panels + group - 1) / group, values = heads * depth * columns;
    threads = useful_threads(2 * rows * values, 2 * values, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long unit = 0; unit < heads * groups; unit++) {
        bf16 laid[MAX_UP_VALUES] __attribute__((aligned(64)));
        long head = unit / groups, start = unit % groups * group;
        long some = smaller(group, panels - start), column = start * PANEL;
        for (long row = 0; tail && start == 0 && row < rows; row++)
            memcpy(out + row * out_stride + head * out_step + columns,
                   x + row * x_stride + head * x_step + depth, 2 * (size_t)tail);
        for (long panel = 0; panel < some; panel++)
            interleave(up + head * up_step + column + panel * PANEL, columns, depth,
                       laid + panel * depth * PANEL);
        linear_panels(x + head * x_step, x_stride, rows, (Range){values_of(laid), 0, some, -1},
                      depth, some * PANEL, 0,
                      out + head * out_step + column, out_stride, 0);
    }
}

/* hidden[rows, F] = silu(gate) * up; a panel holds 16 gates and their 16 ups. */
static void up_panels(const bf16 *x, long rows, Range range, long depth, bf16 *hidden, long width) {
    Work work;
    start_work(&work, range.weight);
    for (long panel = range.start; panel < range.end; panel++)
        for (long row = 0; row < rows; row += PANEL) {
            const float *sums = panel_sums(&work, x, depth, rows, row, &range, depth, panel);
            for (long at = 0; at < smaller(PANEL, rows - row); at++) {
                __m512 gate = _mm512_load_ps(sums + at * PANEL);
                __m512 up = _mm512_load_ps(sums + at * PANEL + TILE);
                bf16 *target = hidden + (row + at) * width + panel * TILE;
                _mm256_storeu_si256((__m256i *)target, narrow(_mm512_mul_ps(silu(gate), up)));
            }
        }
    _tile_release();
}

/* A share of one expert's product: rows [first, first + rows) of the sorted rows. */
typedef struct {
    long expert, first, rows, start, end;
} Unit;

/* The panels of unit `index` of `count`, from the first of its expert on; an expert has `panels`. */
static Range unit_range(const Unit *units, long index, long count, int threads, Panels weight,
                        long panels) {
    const Unit *unit = units + index, *after = unit + threads;
    const long then = index + threads < count
                          ? (after->expert - unit->expert) * panels + after->start : -1;
    return (Range){from_panel(weight, unit->expert * panels), unit->start, unit->end, then};
}

static long make_units(Unit *units, const long *first_row, long experts, long panels, long most,
                       long pieces) {
    long count = 0, group = (panels + pieces - 1) / pieces;
    for (long expert = 0; expert < experts; expert++)
        for (long row = first_row[expert]; row < first_row[expert + 1]; row += most)
            for (long start = 0; start < panels; start += group)
                units[count++] = (Unit){expert, row, smaller(most, first_row[expert + 1] - row),
                                        start, smaller(start + group, panels)};
    return count;
}

/* out[t] = sum over a of weights[t, a] * down(silu(gate(x[t])) * up(x[t])) of expert ids[t, a].
 * `work` holds T*A rows of M, F and M values; returns 0, or 1 without memory for the tables. */
int bmla_experts(const bf16 *x, long tokens, long width, long hidden_width, long experts,
                 long active, const int64_t *ids, const float *weights, const bf16 *up_values,
                 const Codes *up_codes, const bf16 *down_values, const Codes *down_codes,
                 bf16 *work, bf16 *out, int threads) {
    const Panels up = {up_values, up_codes, 0}, down = {down_values, down_codes, 0};
    const long choices = tokens * active, pieces = 2;
    const long up_most = chunk_rows(width), down_most = chunk_rows(hidden_width);
    const long least = smaller(up_most, down_most), expert_values = 3 * width * hidden_width;
    threads = useful_threads(2 * choices * expert_values,
                             2 * smaller(choices, experts) * expert_values, threads);
    long *table = calloc((size_t)(experts + 1 + 2 * choices), sizeof(long));
    Unit *units = malloc(sizeof(Unit) * (size_t)(pieces * (experts + choices / least + 1)));
    if (!table || !units) {
        free(table);
        free(units);
        return 1;
    }
    long *first_row = table, *token_of = table + experts + 1, *place = token_of + choices;
    for (long x_index = 0; x_index < choices; x_index++) first_row[ids[x_index] + 1]++;
    for (long expert = 0; expert < experts; expert++) first_row[expert + 1] += first_row[expert];
    for (long x_index = 0; x_index < choices; x_index++) {
        long row = first_row[ids[x_index]]++;
        place[x_index] = row;
        token_of[row] = x_index / active;
    }
    for (long expert = experts; expert > 0; expert--) first_row[expert] = first_row[expert - 1];
    first_row[0] = 0;
    bf16 *sorted = work, *hidden = work + choices * width;
    bf16 *parts = hidden + choices * hidden_width;
    long num_up = make_units(units, first_row, experts, hidden_width / TILE, up_most, pieces);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long row = 0; row < choices; row++)
            memcpy(sorted + row * width, x + token_of[row] * width, 2 * (size_t)width);
#pragma omp for schedule(dynamic)
        for (long index = 0; index < num_up; index++) {
            Unit unit = units[index];
            up_panels(sorted + unit.first * width, unit.rows,
                      unit_range(units, index, num_up, threads, up, hidden_width / TILE), width,
                      hidden + unit.first * hidden_width, hidden_width);
        }
    }
    long panels = (width + PANEL - 1) / PANEL;
    long num_down = make_units(units, first_row, experts, panels, down_most, pieces);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (long index = 0; index < num_down; index++) {
            Unit unit = units[index];
            linear_panels(hidden + unit.first * hidden_width, hidden_width, unit.rows,
                          unit_range(units, index, num_down, threads, down, panels),
                          hidden_width, width, 0, parts + unit.first * width, width, 0);
        }
#pragma omp for schedule(static)
        for (long token = 0; token < tokens; token++)
            for (long at = 0; at < width; at += TILE) {
                __mmask16 mask = first(width - at);
                __m512 sum = _mm512_setzero_ps();
                for (long a = 0; a < active; a++) {
                    long x_index = token * active + a;
                    __m512 part = wide_some(parts + place[x_index] * width + at, mask);
                    sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[x_index]), part, sum);
                }
                _mm256_mask_storeu_epi16(out + token * width + at, mask, narrow(sum));
            }
    }
    free(table);
    free(units);
    return 0;
}

/* The gated delta rule, token by token: columns of a state do not depend on each other, so a few of
 * them stay in the nearest cache for all tokens of a sequence. All float32. */
#include "amx.h"

enum { VECTORS = 4, COLUMNS = VECTORS * TILE, MAX_WIDTH = 256 };

/* Rows of q, k, v, keep and out: [tokens, heads, width]; beta: [tokens, heads]. States:
 * [lanes, heads, width (key), width (value)]. Sequence s owns the tokens starts[s] ... */
typedef struct {
    const float *q, *k, *v, *keep, *beta;
    float *out, *states;
    const long *starts, *lanes;
    const unsigned char *is_first;
    long sequences, heads, width;
} Delta;

static float dot(const float *x, const float *y, long width) {
    __m512 sum = _mm512_setzero_ps();
    for (long at = 0; at < width; at += TILE)
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + at), _mm512_loadu_ps(y + at), sum);
    return _mm512_reduce_add_ps(sum);
}

/* S' = keep S + k u, u = beta (v - S (keep k)), out = S (keep q) + (q k) u, of `vectors` vectors of
 * columns; `state` holds COLUMNS values for each of `width` keys. */
static inline __attribute__((always_inline)) void token(
    float *state, const float *q, const float *k, const float *keep, const float *v, float *out,
    float beta, long width, const int vectors) {
    __m512 for_k[VECTORS], for_q[VECTORS];
    for (int i = 0; i < vectors; i++) for_k[i] = for_q[i] = _mm512_setzero_ps();
    for (long at = 0; at < width; at++) {
        const __m512 kept_k = _mm512_set1_ps(keep[at] * k[at]);
        const __m512 kept_q = _mm512_set1_ps(keep[at] * q[at]);
        for (int i = 0; i < vectors; i++) {
            __m512 value = _mm512_load_ps(state + at * COLUMNS + i * TILE);
            for_k[i] = _mm512_fmadd_ps(value, kept_k, for_k[i]);
            for_q[i] = _mm512_fmadd_ps(value, kept_q, for_q[i]);
        }
    }
    const __m512 strength = _mm512_set1_ps(beta), both = _mm512_set1_ps(dot(q, k, width));
    for (int i = 0; i < vectors; i++) {
        __m512 wanted = _mm512_loadu_ps(v + i * TILE);
        for_k[i] = _mm512_mul_ps(strength, _mm512_sub_ps(wanted, for_k[i]));
        _mm512_storeu_ps(out + i * TILE, _mm512_fmadd_ps(both, for_k[i], for_q[i]));
    }
    for (long at = 0; at < width; at++) {
        const __m512 kept = _mm512_set1_ps(keep[at]), key = _mm512_set1_ps(k[at]);
        for (int i = 0; i < vectors; i++) {
            float *place = state + at * COLUMNS + i * TILE;
            __m512 value = _mm512_mul_ps(_mm512_load_ps(place), kept);
            _mm512_store_ps(place, _mm512_fmadd_ps(key, for_k[i], value));
        }
    }
}

static void run(const Delta *job, long sequence, long head, long column, int vectors) {
    _Alignas(64) float state[MAX_WIDTH * COLUMNS];
    const long width = job->width, stride = job->heads * width;
    float *lane = job->states + (job->lanes[sequence] * job->heads + head) * width * width + column;
    for (long at = 0; at < width; at++)
        for (int i = 0; i < vectors; i++) {
            __m512 value = _mm512_setzero_ps();
            if (!job->is_first[sequence]) value = _mm512_loadu_ps(lane + at * width + i * TILE);
            _mm512_store_ps(state + at * COLUMNS + i * TILE, value);
        }
    for (long row = job->starts[sequence]; row < job->starts[sequence + 1]; row++) {
        const long at = row * stride + head * width;
        const float *q = job->q + at, *k = job->k + at, *keep = job->keep + at;
        const float *v = job->v + at + column, beta = job->beta[row * job->heads + head];
        float *out = job->out + at + column;
        switch (vectors) {
        case 4: token(state, q, k, keep, v, out, beta, width, 4); break;
        case 3: token(state, q, k, keep, v, out, beta, width, 3); break;
        case 2: token(state, q, k, keep, v, out, beta, width, 2); break;
        default: token(state, q, k, keep, v, out, beta, width, 1);
        }
    }
    for (long at = 0; at < width; at++)
        for (int i = 0; i < vectors; i++)
            _mm512_storeu_ps(lane + at * width + i * TILE,
                             _mm512_load_ps(state + at * COLUMNS + i * TILE));
}

/* Widths are multiples of 16 up to MAX_WIDTH. */
void bmla_delta(const Delta *job, int threads) {
    const long width = job->width, blocks = (width + COLUMNS - 1) / COLUMNS;
    const long items = job->sequences * job->heads * blocks;
    const long bytes = 4 * job->sequences * job->heads * width * width;
    threads = useful_threads(8 * job->starts[job->sequences] * job->heads * width * width, bytes,
                             threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long item = 0; item < items; item++) {
        const long column = item % blocks * COLUMNS, pair = item / blocks;
        const long left = (width - column) / TILE, sequence = pair / job->heads;
        if (job->starts[sequence] == job->starts[sequence + 1]) continue;
        run(job, sequence, pair % job->heads, column, left < VECTORS ? (int)left : VECTORS);
    }
}

/* The running softmax of a block of keys (Milakov and Gimelshein, arXiv:1805.02867).
 *
 * Scores lie transposed: [128 keys][32 rows], two row tiles. Peaks are in units of log2. */
#ifndef BATCHMLA_SOFTMAX_H
#define BATCHMLA_SOFTMAX_H

#include "amx.h"

enum { BLOCK = 128, ROWS = 32 };

/* 2^x, relative error below 3e-6 (minimax of degree 4): shares are rounded to 8 bits. 1 for 0, or
 * rows would be scaled whenever their neighbours are; 0 where float32 has no normal number. */
static inline __m512 power_of_two(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, 8);
    __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(0.009582853f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.055906426f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.24024099f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.69312418f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

/* A row tile's peak and sum so far. */
typedef struct {
    __m512 peak, total;
} Running;

static inline Running start_running(void) {
    return (Running){_mm512_set1_ps(-1e30f), _mm512_setzero_ps()};
}

/* Two neighbouring keys' shares as pairs of bfloat16: [16 rows][2]. */
static inline __m512i pair_shares(__m512 even, __m512 odd) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

/* The mask of the rows that see a key, from how many keys each row sees. */
static inline __mmask16 sees(__m512i visible, long position) {
    return _mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32((int)position));
}

/* Scores of `keys` keys from `position` on, a multiple of 32, to shares [keys / 32][16][32] of one
 * row tile, bfloat16. `factor`: scale times log2(e), above 0. `is_whole`: every row sees every key.
 * Returns whether earlier sums have to be scaled by `kept`. */
static inline int soften(const float *scores, bf16 *shares, long position, long keys,
                         const int32_t *visible, int is_whole, float factor, Running *running,
                         float *kept) {
    const __m512 none = _mm512_set1_ps(-1e30f), scale = _mm512_set1_ps(factor);
    const __m512i seen = _mm512_loadu_si512(visible);
    __m512 most[4] = {none, none, none, none}; /* so that one need not wait for the other */
    for (long key = 0; key < keys; key += 4)
        for (long n = 0; n < 4; n++) {
            __mmask16 mask = is_whole ? (__mmask16)0xffff : sees(seen, position + key + n);
            most[n] = _mm512_mask_max_ps(most[n], mask, most[n],
                                         _mm512_loadu_ps(scores + (key + n) * ROWS));
        }
    const __m512 best = _mm512_max_ps(_mm512_max_ps(most[0], most[1]),
                                      _mm512_max_ps(most[2], most[3]));
    __m512 peak = _mm512_max_ps(running->peak, _mm512_mul_ps(best, scale));
    __m512 alpha = power_of_two(_mm512_sub_ps(running->peak, peak));
    int is_raised = _mm512_cmplt_ps_mask(running->peak, peak) != 0;
    __m512 sum[2] = {_mm512_mul_ps(running->total, alpha), _mm512_setzero_ps()};
    __m512i pairs[16], rows[16];
    for (long key = 0; key < keys; key += 2) {
        __m512 share[2];
        for (long n = 0; n < 2; n++) {
            __m512 score = _mm512_loadu_ps(scores + (key + n) * ROWS);
            share[n] = power_of_two(_mm512_fmsub_ps(score, scale, peak));
            if (!is_whole)
                share[n] = _mm512_maskz_mov_ps(sees(seen, position + key + n), share[n]);
            sum[n] = _mm512_add_ps(sum[n], share[n]);
        }
        pairs[key / 2 % TILE] = pair_shares(share[0], share[1]);
        if (key % DEPTH == DEPTH - 2) {
            transpose(pairs, rows);
            bf16 *target = shares + key / DEPTH * TILE_VALUES;
            for (long n = 0; n < TILE; n++) _mm512_storeu_si512(target + n * DEPTH, rows[n]);
        }
    }
    running->peak = peak;
    running->total = _mm512_add_ps(sum[0], sum[1]);
    _mm512_storeu_ps(kept, alpha);
    return is_raised;
}

#endif

/* Row by row: norms, rotations, cache rows, activations. Sums run in float32, each row by itself. */
#include <math.h>
#include <omp.h>

#include "functions.h"

enum { ROWS_AHEAD = 3, WRITES_AHEAD = 8 };

static float square_sum(const bf16 *x, const bf16 *y, long width, bf16 *total) {
    __m512 sum = _mm512_setzero_ps();
    for (long at = 0; at < width; at += TILE) {
        __mmask16 mask = first(width - at);
        __m512 value = wide_some(x + at, mask);
        if (y) {
            __m256i rounded = narrow(_mm512_add_ps(value, wide_some(y + at, mask)));
            _mm256_mask_storeu_epi16(total + at, mask, rounded);
            value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
        }
        sum = _mm512_fmadd_ps(value, value, sum);
    }
    return _mm512_reduce_add_ps(sum);
}

static void scale_row(const bf16 *x, const bf16 *weight, long width, float scale, bf16 *out) {
    const __m512 factor = _mm512_set1_ps(scale);
    for (long at = 0; at < width; at += TILE) {
        __mmask16 mask = first(width - at);
        __m512 value = _mm512_mul_ps(wide_some(x + at, mask), factor);
        value = _mm512_mul_ps(value, wide_some(weight + at, mask));
        _mm256_mask_storeu_epi16(out + at, mask, narrow(value));
    }
}

/* out = weight * t / sqrt(mean(t^2) + eps) with t = x, or x + y rounded and kept in `total`. */
void bmla_norm(const bf16 *x, long x_stride, const bf16 *y, bf16 *total, const bf16 *weight,
               long rows, long width, float eps, bf16 *out, int threads) {
    threads = useful_threads(0, 8 * rows * width, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++) {
        const bf16 *source = x + row * x_stride;
        bf16 *kept = y ? total + row * width : 0;
        float sum = square_sum(source, y ? y + row * width : 0, width, kept);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        scale_row(y ? kept : source, weight, width, scale, out + row * width);
    }
}

/* Rotates `width` values: pairs (2i, 2i+1), or (i, i + width/2) with `is_halves`. */
static void rotate(const bf16 *x, bf16 *out, const float *cos, const float *sin, long width,
                   int is_halves) {
    const long half = width / 2;
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (long i = 0; i < half; i += TILE) {
        const __mmask16 mask = first(half - i);
        const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i);
        const __m512 s = _mm512_maskz_loadu_ps(mask, sin + i);
        __m512 a, b;
        if (is_halves) {
            a = wide_some(x + i, mask);
            b = wide_some(x + half + i, mask);
        } else {
            __m512i pairs = _mm512_maskz_loadu_epi32(mask, x + 2 * i);
            a = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
            b = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
        }
        const __m512 turned_a = _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s));
        const __m512 turned_b = _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s));
        if (is_halves) {
            _mm256_mask_storeu_epi16(out + i, mask, narrow(turned_a));
            _mm256_mask_storeu_epi16(out + half + i, mask, narrow(turned_b));
        } else {
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(turned_b, turned_a);
            _mm512_mask_storeu_epi32(out + 2 * i, mask, _mm512_permutexvar_epi16(order, both));
        }
    }
}

/* In place, `heads` heads a row. */
void bmla_rope(bf16 *x, long rows, long heads, long row_stride, long head_stride, const float *cos,
               const float *sin, long width, int is_halves, int threads) {
    threads = useful_threads(0, 32 * rows * heads * width, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < heads; head++) {
            bf16 *at = x + row * row_stride + head * head_stride;
            rotate(at, at, cos + row * width / 2, sin + row * width / 2, width, is_halves);
        }
}

/* cache[slot] = norm of the first `latent` values, then the rotated `width` others. */
void bmla_write_latent(bf16 *cache, const int64_t *slots, const bf16 *x, long x_stride, long rows,
                       const bf16 *weight, long latent, float eps, const float *cos,
                       const float *sin, long width, int threads) {
    threads = useful_threads(0, 8 * rows * latent + 32 * rows * width, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++) {
        const bf16 *source = x + row * x_stride;
        bf16 *target = cache + slots[row] * (latent + width);
        if (row + ROWS_AHEAD < rows)
            for (long at = 0; at < latent + width; at += DEPTH)
                __builtin_prefetch(cache + slots[row + ROWS_AHEAD] * (latent + width) + at, 1);
        float scale = 1.0f / sqrtf(square_sum(source, 0, latent, 0) / (float)latent + eps);
        scale_row(source, weight, latent, scale, target);
        rotate(source + latent, target + latent, cos + row * width / 2, sin + row * width / 2,
               width, 0);
    }
}

/* cache[slot] = row */
void bmla_write(char *cache, const int64_t *slots, const char *x, long x_bytes, long rows,
                long row_bytes, int threads) {
    threads = useful_threads(0, 2 * rows * row_bytes, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++) {
        if (row + WRITES_AHEAD < rows)
            for (long at = 0; at < row_bytes; at += 64)
                __builtin_prefetch(cache + slots[row + WRITES_AHEAD] * row_bytes + at, 1);
        memcpy(cache + slots[row] * row_bytes, x + row * x_bytes, (size_t)row_bytes);
    }
}

/* out = x + y, rows one behind the other. */
void bmla_add(const bf16 *x, const bf16 *y, long rows, long width, bf16 *out, int threads) {
    threads = useful_threads(0, 6 * rows * width, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++)
        for (long at = row * width, end = at + width; at < end; at += TILE) {
            const __mmask16 mask = first(end - at);
            const __m512 sum = _mm512_add_ps(wide_some(x + at, mask), wide_some(y + at, mask));
            _mm256_mask_storeu_epi16(out + at, mask, narrow(sum));
        }
}

/* out[F] = silu(x[:F]) * x[F:] */
void bmla_act_mul(const bf16 *x, long x_stride, long rows, long width, bf16 *out, int threads) {
    threads = useful_threads(0, 24 * rows * width, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++)
        for (long at = 0; at < width; at += TILE) {
            const __mmask16 mask = first(width - at);
            const __m512 gate = wide_some(x + row * x_stride + at, mask);
            const __m512 up = wide_some(x + row * x_stride + width + at, mask);
            _mm256_mask_storeu_epi16(out + row * width + at, mask,
                                     narrow(_mm512_mul_ps(silu(gate), up)));
        }
}

/* ids[row]: the place of the largest of `count` values, of equal ones the first; finite[row]: whether
 * all of them are finite numbers. */
void bmla_best(const float *x, long x_stride, long rows, long count, int64_t *ids, uint8_t *finite,
               int threads) {
    threads = useful_threads(0, 4 * rows * count, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++) {
        const float *values = x + row * x_stride;
        const __m512i step = _mm512_set1_epi32(TILE);
        __m512 most = _mm512_set1_ps(-INFINITY);
        __m512i at = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i place = at;
        __mmask16 bad = 0;
        for (long from = 0; from < count; from += TILE, at = _mm512_add_epi32(at, step)) {
            const __mmask16 mask = first(count - from);
            const __m512 value = _mm512_mask_loadu_ps(most, mask, values + from);
            bad |= _mm512_mask_fpclass_ps_mask(mask, value, 0x99); /* NaN of both kinds, infinity */
            const __mmask16 more = _mm512_mask_cmp_ps_mask(mask, value, most, _CMP_GT_OQ);
            most = _mm512_mask_mov_ps(most, more, value);
            place = _mm512_mask_mov_epi32(place, more, at);
        }
        const __mmask16 best = _mm512_cmp_ps_mask(
            most, _mm512_set1_ps(_mm512_reduce_max_ps(most)), _CMP_EQ_OQ);
        ids[row] = _mm512_mask_reduce_min_epi32(best, place);
        finite[row] = !bad;
    }
}

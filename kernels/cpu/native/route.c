/* The choice of experts, each token by itself: see `RouteOp` in batchmla.kernels.ops. */
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "functions.h"

struct Router {
    long experts, active, groups, kept_groups, group_best;
    int is_softmax, normalises;
    float scale;
};

enum { TOKENS = 8 };

/* logits[n][E] of up to 8 tokens, in float32; `wide` holds 8 rows of x. The last token stands in for
 * those that are not there, so that all sums stay in registers. */
static void score(const bf16 *x, long tokens, long width, const float *weight, long experts,
                  float *wide, float *logits) {
    for (long n = 0; n < TOKENS; n++) {
        const bf16 *row = x + (n < tokens ? n : tokens - 1) * width;
        for (long at = 0; at < width; at += TILE) {
            __mmask16 mask = first(width - at);
            _mm512_mask_storeu_ps(wide + n * width + at, mask, wide_some(row + at, mask));
        }
    }
    for (long expert = 0; expert < experts; expert++) {
        __m512 sums[TOKENS];
#pragma GCC unroll 8
        for (long n = 0; n < TOKENS; n++) sums[n] = _mm512_setzero_ps();
        for (long at = 0; at < width; at += TILE) {
            __mmask16 mask = first(width - at);
            __m512 w = _mm512_maskz_loadu_ps(mask, weight + expert * width + at);
#pragma GCC unroll 8
            for (long n = 0; n < TOKENS; n++)
                sums[n] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, wide + n * width + at), w,
                                          sums[n]);
        }
#pragma GCC unroll 8
        for (long n = 0; n < TOKENS; n++)
            if (n < tokens) logits[n * experts + expert] = _mm512_reduce_add_ps(sums[n]);
    }
}

static void to_scores(float *values, long experts, int is_softmax) {
    const __m512 one = _mm512_set1_ps(1.0f);
    float most = 0, sum = 0;
    if (is_softmax) {
        most = values[0];
        for (long e = 1; e < experts; e++) most = values[e] > most ? values[e] : most;
    }
    for (long at = 0; at < experts; at += TILE) {
        __mmask16 mask = first(experts - at);
        __m512 value = _mm512_maskz_loadu_ps(mask, values + at);
        if (is_softmax) {
            value = exponential(_mm512_sub_ps(value, _mm512_set1_ps(most)));
        } else {
            __m512 low = _mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), value),
                                       _mm512_set1_ps(88.0f));
            value = _mm512_div_ps(one, _mm512_add_ps(one, exponential(low)));
        }
        _mm512_mask_storeu_ps(values + at, mask, value);
    }
    if (!is_softmax) return;
    for (long e = 0; e < experts; e++) sum += values[e];
    for (long e = 0; e < experts; e++) values[e] /= sum;
}

/* The position of the largest value; equal ones: the first. NaN counts as the smallest. */
static long largest(const float *values, long count) {
    long best = 0;
    for (long n = 1; n < count; n++)
        if (values[n] > values[best] || (values[best] != values[best] && values[n] == values[n]))
            best = n;
    return best;
}

/* -inf for the choices of all groups but those that rank highest. */
static void drop_groups(const Router *router, float *choice, float *ranks, float *rest) {
    const long size = router->experts / router->groups;
    const long best = router->group_best < size ? router->group_best : size;
    for (long group = 0; group < router->groups; group++) {
        memcpy(rest, choice + group * size, sizeof(float) * (size_t)size);
        ranks[group] = 0;
        for (long n = 0; n < best; n++) {
            long at = largest(rest, size);
            ranks[group] += rest[at];
            rest[at] = -INFINITY;
        }
    }
    for (long n = router->kept_groups; n < router->groups; n++) {
        long worst = -1;
        for (long group = 0; group < router->groups; group++)
            if (ranks[group] != INFINITY && (worst < 0 || ranks[group] <= ranks[worst]))
                worst = group;
        for (long e = 0; e < size; e++) choice[worst * size + e] = -INFINITY;
        ranks[worst] = INFINITY;
    }
}

static void choose(const Router *router, const float *scores, const float *bias, float *room,
                   float *weights, int64_t *ids) {
    const long experts = router->experts;
    float *choice = room, *ranks = room + experts, *rest = ranks + experts, sum = 0;
    for (long e = 0; e < experts; e++) choice[e] = scores[e] + (bias ? bias[e] : 0);
    if (router->kept_groups < router->groups) drop_groups(router, choice, ranks, rest);
    for (long a = 0; a < router->active; a++) {
        long at = largest(choice, experts);
        ids[a] = at;
        weights[a] = scores[at];
        sum += scores[at];
        choice[at] = -INFINITY;
    }
    for (long a = 0; a < router->active; a++) {
        if (router->normalises) weights[a] /= sum + 1e-20f;
        weights[a] *= router->scale;
    }
}

/* weights[T, A], ids[T, A]; 0, or 1 without memory. */
int bmla_route(const Router *router, const bf16 *x, long tokens, long width, const float *weight,
               const float *bias, float *weights, int64_t *ids, int threads) {
    const long experts = router->experts, values = experts * (TOKENS + 3) + TOKENS * width;
    threads = useful_threads(16 * tokens * experts * width, 0, threads);
    float *memory = malloc(sizeof(float) * (size_t)(values * threads));
    if (!memory) return 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long start = 0; start < tokens; start += TOKENS) {
        float *scores = memory + values * omp_get_thread_num(), *room = scores + experts * TOKENS;
        float *wide = room + 3 * experts;
        long some = tokens - start < TOKENS ? tokens - start : TOKENS;
        score(x + start * width, some, width, weight, experts, wide, scores);
        for (long n = 0; n < some; n++) {
            to_scores(scores + n * experts, experts, router->is_softmax);
            choose(router, scores + n * experts, bias, room, weights + (start + n) * router->active,
                   ids + (start + n) * router->active);
        }
    }
    free(memory);
    return 0;
}

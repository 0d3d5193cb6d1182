/* Sequences whose first pages are the same: those keys are attended once for the rows of all, and
 * each row goes on from there with the keys of its own, as if it had seen them in order. */
#ifndef BATCHMLA_CLUSTERS_H
#define BATCHMLA_CLUSTERS_H

#include <string.h>

#include "paged.h"

/* What a row of a member has after the shared keys: its sums, peak and total. */
static inline long state_values(const Job *job) { return job->value.width + 2; }

static inline float *state_of(const Job *job, Unit unit, long row, float *states) {
    const long members = first_member(job, job->clusters);
    const long at = unit.row + row, query = at / job->heads;
    const long place = unit.cluster == ALONE ? job->place[unit.sequence] + query
                                             : first_member(job, unit.cluster) + query;
    return states + ((unit.key_head * members + place) * job->heads + at % job->heads) *
                        state_values(job);
}

static inline void keep_state(const Job *job, Unit unit, long rows, const float *sums,
                       const Running *running, float *states) {
    const long width = job->value.width;
    for (long row = 0; row < rows; row++) {
        float *state = state_of(job, unit, row, states);
        memcpy(state, sums + row * width, 4 * (size_t)width);
        state[width] = ((const float *)&running[row / TILE].peak)[row % TILE];
        state[width + 1] = ((const float *)&running[row / TILE].total)[row % TILE];
    }
}

static inline void take_state(const Job *job, Unit unit, long rows, float *sums, Running *running,
                       float *states) {
    const long width = job->value.width;
    for (long row = 0; row < rows; row++) {
        const float *state = state_of(job, unit, row, states);
        memcpy(sums + row * width, state, 4 * (size_t)width);
        ((float *)&running[row / TILE].peak)[row % TILE] = state[width];
        ((float *)&running[row / TILE].total)[row % TILE] = state[width + 1];
    }
}

static inline long num_rows(const Job *job, Unit unit) {
    if (unit.cluster == ALONE) return job->num_queries[unit.sequence] * job->heads;
    return (job->cluster_end[unit.cluster] - first_member(job, unit.cluster)) * job->heads;
}

/* The units of a sequence or cluster, from `count` on; returns how many there are then. */
static inline long add_units(const Job *job, long sequence, long cluster, Unit *units, long count) {
    for (long key_head = 0; key_head < job->key_heads; key_head++) {
        Unit unit = {sequence, key_head, 0, cluster};
        for (; unit.row < num_rows(job, unit); unit.row += ROWS, count++)
            if (units) units[count] = unit;
    }
    return count;
}

/* The clusters' units come first: `*shared` of them, which the others wait for. */
static inline long all_units(const Job *job, Unit *units, long *shared) {
    long count = 0;
    for (long c = 0; c < job->clusters; c++)
        count = add_units(job, job->member[first_member(job, c)], c, units, count);
    *shared = count;
    for (long s = 0; s < job->sequences; s++) count = add_units(job, s, ALONE, units, count);
    return count;
}

#endif

/* Calls that follow each other in every step, run without going back to the caller between them. */
#include <stdint.h>
#include <string.h>

#include "functions.h"

/* The functions that may be replayed, in the order in which the caller numbers them. */
enum { LINEAR, NORM, ACT_MUL, ADD, ROPE, WRITE, WRITE_LATENT, ROUTE, EXPERTS };

/* One call: `rows` are those of the call for each row of the step; of its other arguments pointers and
 * whole numbers as they are, and the bits of what is float. */
typedef struct {
    int64_t function, rows, args[15];
} Call;

static float float_of(int64_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Runs `count` calls for a step of so many rows; 0, or 1 without memory for the tables of one. */
int bmla_replay(const Call *calls, long count, long step_rows, int threads) {
    int failed = 0;
    for (const Call *call = calls; call < calls + count && !failed; call++) {
        const int64_t *a = call->args;
        const long rows = step_rows * call->rows;
        void *p[15];
        for (int n = 0; n < 15; n++) p[n] = (void *)a[n];
        switch (call->function) {
        case LINEAR:
            bmla_linear(p[0], a[1], rows, p[3], p[4], a[5], a[6], p[7], p[8], a[9], (int)a[10],
                        threads);
            break;
        case NORM:
            bmla_norm(p[0], a[1], p[2], p[3], p[4], rows, a[6], float_of(a[7]), p[8], threads);
            break;
        case ACT_MUL:
            bmla_act_mul(p[0], a[1], rows, a[3], p[4], threads);
            break;
        case ADD:
            bmla_add(p[0], p[1], rows, a[3], p[4], threads);
            break;
        case ROPE:
            bmla_rope(p[0], rows, a[2], a[3], a[4], p[5], p[6], a[7], (int)a[8], threads);
            break;
        case WRITE:
            bmla_write(p[0], p[1], p[2], a[3], rows, a[5], threads);
            break;
        case WRITE_LATENT:
            bmla_write_latent(p[0], p[1], p[2], a[3], rows, p[5], a[6], float_of(a[7]), p[8], p[9],
                              a[10], threads);
            break;
        case ROUTE:
            failed = bmla_route(p[0], p[1], rows, a[3], p[4], p[5], p[6], p[7], threads);
            break;
        case EXPERTS:
            failed = bmla_experts(p[0], rows, a[2], a[3], a[4], a[5], p[6], p[7], p[8], p[9], p[10],
                                  p[11], p[12], p[13], threads);
            break;
        default:
            failed = 2;
        }
    }
    return failed;
}

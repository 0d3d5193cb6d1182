/* What is called from more than one file; each function is told of where it is defined. */
#ifndef BATCHMLA_FUNCTIONS_H
#define BATCHMLA_FUNCTIONS_H

#include "codes.h"

typedef struct Router Router;

void bmla_linear(const bf16 *, long, long, const bf16 *, const Codes *, long, long, const bf16 *,
                 void *, long, int, int);
void bmla_norm(const bf16 *, long, const bf16 *, bf16 *, const bf16 *, long, long, float, bf16 *,
               int);
void bmla_act_mul(const bf16 *, long, long, long, bf16 *, int);
void bmla_add(const bf16 *, const bf16 *, long, long, bf16 *, int);
void bmla_rope(bf16 *, long, long, long, long, const float *, const float *, long, int, int);
void bmla_write(char *, const int64_t *, const char *, long, long, long, int);
void bmla_write_latent(bf16 *, const int64_t *, const bf16 *, long, long, const bf16 *, long, float,
                       const float *, const float *, long, int);
int bmla_route(const Router *, const bf16 *, long, long, const float *, const float *, float *,
               int64_t *, int);
int bmla_experts(const bf16 *, long, long, long, long, long, const int64_t *, const float *,
                 const bf16 *, const Codes *, const bf16 *, const Codes *, bf16 *, bf16 *, int);

#endif

/* Weights as codes and scales, decoded to bfloat16 while they are multiplied.
 *
 * Codes lie in the order of the panels of gemm.c, so a tile of two columns more is one step:
 *
 *   | e4m3      | [O/32][I/32][2 halves][8 pairs of k pairs][4][2 k pairs][4][2 k], a byte each  |
 *   | four bits | [O/32][I/32][2 halves][16 k pairs][16 n], a byte a k pair, even k in its low bits |
 *
 * Scales: [O/32][blocks of columns][2 halves], or [2 halves][16 n] where a half has several. A value
 * is code times scale in float32, rounded once to bfloat16: the same bits as when it is expanded.
 * ROW_SMALL_E8M0 says that no product of four bits leaves bfloat16's normal numbers. */
#ifndef BMLA_CODES_H
#define BMLA_CODES_H

#include "amx.h"

enum { E4M3 = 0, FOUR_BITS = 1 };
enum { HALF_FLOAT = 0, ROW_FLOAT = 1, ROW_BF16 = 2, ROW_E8M0 = 3, ROW_SMALL_E8M0 = 4 };
enum { CODE_STEPS = 4, CODES_AHEAD = 4096, STEP_VALUES = 2 * TILE_VALUES };

typedef struct {
    const uint8_t *codes;
    const void *scales;
    long steps;       /* of 32 columns, a row */
    long block_steps; /* of which so many share a scale */
    long coding, scale_form;
    float table[16]; /* values of four bits */
} Codes;

typedef struct {
    __m512 half[2];
} Scales;

static inline Scales load_scales(const Codes *w, long panel, long step) {
    const long blocks = (w->steps + w->block_steps - 1) / w->block_steps;
    const long at = panel * blocks + step / w->block_steps;
    Scales found;
    for (int half = 0; half < 2; half++) {
        if (w->scale_form == HALF_FLOAT) {
            found.half[half] = _mm512_set1_ps(((const float *)w->scales)[2 * at + half]);
            continue;
        }
        const long row = at * PANEL + half * TILE;
        if (w->scale_form == ROW_FLOAT) {
            found.half[half] = _mm512_loadu_ps((const float *)w->scales + row);
        } else if (w->scale_form == ROW_BF16) {
            found.half[half] = wide_some((const bf16 *)w->scales + row, 0xffff);
        } else {
            const uint8_t *bytes = (const uint8_t *)w->scales + row;
            __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
            __mmask16 is_least = _mm512_cmpeq_epi32_mask(wide, _mm512_setzero_si512());
            __m512i bits = _mm512_slli_epi32(wide, 23);
            bits = _mm512_mask_mov_epi32(bits, is_least, _mm512_set1_epi32(1 << 22));
            found.half[half] = _mm512_castsi512_ps(bits);
        }
    }
    return found;
}

/* 16 values of even and of odd k as 16 pairs of bfloat16. */
static inline void store_pairs(__m512 even, __m512 odd, bf16 *out) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, both));
}

/* Pairs of bfloat16, times a scale. */
static inline void store_scaled(__m512i pairs, __m512 scale, bf16 *out) {
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
    store_pairs(_mm512_mul_ps(even, scale), _mm512_mul_ps(odd, scale), out);
}

/* The magnitudes of e4m3. */
static inline void fill_e4m3(float magnitudes[128]) {
    for (int code = 0; code < 128; code++) {
        int exponent = code >> 3, fraction = code & 7;
        float value = exponent ? (float)(8 + fraction) : (float)fraction; /* times 2^-9 */
        for (int at = exponent > 1 ? exponent - 1 : 0; at > 0; at--) value *= 2.0f;
        magnitudes[code] = value / 512.0f;
    }
}

/* The high and the low bytes of the bfloat16 values of 128 magnitudes, 64 in a register. */
typedef struct {
    __m512i high[2], low[2];
} ByteTable;

static inline __m512i low_bytes(__m512i first, __m512i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(first)),
                              _mm512_cvtepi16_epi8(second), 1);
}

static inline ByteTable scaled_e4m3(const float *magnitudes, __m512 scale) {
    ByteTable table;
    for (int part = 0; part < 2; part++, magnitudes += 64) {
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(magnitudes), scale);
        __m512 b = _mm512_mul_ps(_mm512_loadu_ps(magnitudes + 16), scale);
        __m512 c = _mm512_mul_ps(_mm512_loadu_ps(magnitudes + 32), scale);
        __m512 d = _mm512_mul_ps(_mm512_loadu_ps(magnitudes + 48), scale);
        __m512i first = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        __m512i second = (__m512i)_mm512_cvtne2ps_pbh(d, c);
        table.low[part] = low_bytes(first, second);
        table.high[part] =
            low_bytes(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    }
    return table;
}

/* Half a step by table: pairs of 64 codes in two registers. */
static inline void look_up_e4m3(const ByteTable *table, const uint8_t *codes, __m512i pairs[2]) {
    __m512i code = _mm512_loadu_si512(codes);
    __m512i low = _mm512_permutex2var_epi8(table->low[0], code, table->low[1]);
    __m512i high = _mm512_permutex2var_epi8(table->high[0], code, table->high[1]);
    __m512i sign = _mm512_and_si512(code, _mm512_set1_epi8((char)0x80));
    high = _mm512_xor_si512(high, sign);
    pairs[0] = _mm512_unpacklo_epi8(low, high);
    pairs[1] = _mm512_unpackhi_epi8(low, high);
}

static inline void decode_scaled_e4m3(const ByteTable *table, const uint8_t *codes, bf16 *out) {
    for (int at = 0; at < TILE_VALUES; at += 64) {
        __m512i pairs[2];
        look_up_e4m3(table, codes + at, pairs);
        _mm512_storeu_si512(out + at, pairs[0]);
        _mm512_storeu_si512(out + at + 32, pairs[1]);
    }
}

static inline void decode_e4m3(const ByteTable *table, const uint8_t *codes, __m512 scale,
                               bf16 *out) {
    for (int at = 0; at < TILE_VALUES; at += 64) {
        __m512i pairs[2];
        look_up_e4m3(table, codes + at, pairs);
        store_scaled(pairs[0], scale, out + at);
        store_scaled(pairs[1], scale, out + at + 32);
    }
}

static inline void decode_four_bits(__m512 table, const uint8_t *codes, __m512 scale, bf16 *out) {
    for (int at = 0; at < TILE_VALUES; at += 32) {
        __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + at / 2)));
        __m512 even = _mm512_permutexvar_ps(code, table);
        __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), table);
        store_pairs(_mm512_mul_ps(even, scale), _mm512_mul_ps(odd, scale), out + at);
    }
}

/* Four bits times powers of two: exponents are added. `values`: 16 bfloat16, twice, as an index of
 * five bits has a bit of the next code; `powers`: the exponents, less the bias, of 16 outputs. */
static inline void decode_with_powers(__m512i values, const uint8_t *codes, __m512i powers,
                                      bf16 *out) {
    powers = _mm512_slli_epi32(powers, 7);
    powers = _mm512_or_si512(_mm512_and_si512(powers, _mm512_set1_epi32(0xffff)),
                             _mm512_slli_epi32(powers, 16));
    for (int at = 0; at < TILE_VALUES; at += 32) {
        __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + at / 2)));
        code = _mm512_or_si512(code, _mm512_slli_epi32(code, 12));
        __m512i value = _mm512_permutexvar_epi16(code, values);
        __mmask32 has_size = _mm512_test_epi16_mask(value, _mm512_set1_epi16(0x7fff));
        _mm512_storeu_si512(out + at, _mm512_mask_add_epi16(value, has_size, value, powers));
    }
}

/* What a thread keeps while it decodes a weight. */
typedef struct {
    float magnitudes[128];
    ByteTable plain, scaled[2]; /* of e4m3 */
    __m512i values;             /* of four bits, in bfloat16 */
} Decoding;

static inline void start_decoding(Decoding *state, const Codes *w) {
    if (w->coding == E4M3) {
        fill_e4m3(state->magnitudes);
        state->plain = scaled_e4m3(state->magnitudes, _mm512_set1_ps(1.0f));
    } else {
        __m512 values = _mm512_loadu_ps(w->table);
        state->values = (__m512i)_mm512_cvtne2ps_pbh(values, values);
    }
}

static inline __m512i load_powers(const Codes *w, long panel, long step, int half) {
    const long blocks = (w->steps + w->block_steps - 1) / w->block_steps;
    const long row = (panel * blocks + step / w->block_steps) * PANEL + half * TILE;
    const uint8_t *bytes = (const uint8_t *)w->scales + row;
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
    return _mm512_sub_epi32(wide, _mm512_set1_epi32(127));
}

/* One step of a panel; a scale of many outputs becomes a table when its block begins. */
static inline void decode_step(const Codes *w, Decoding *state, long panel, long step, int is_first,
                               const uint8_t *codes, long half_bytes, bf16 *out) {
    if (w->scale_form == ROW_SMALL_E8M0) {
        for (int half = 0; half < 2; half++)
            decode_with_powers(state->values, codes + half * half_bytes,
                               load_powers(w, panel, step, half), out + half * TILE_VALUES);
        return;
    }
    const int by_table = w->coding == E4M3 && w->scale_form == HALF_FLOAT;
    if (by_table && !is_first && step % w->block_steps) {
        for (int half = 0; half < 2; half++)
            decode_scaled_e4m3(&state->scaled[half], codes + half * half_bytes,
                               out + half * TILE_VALUES);
        return;
    }
    Scales scales = load_scales(w, panel, step);
    for (int half = 0; half < 2; half++) {
        const uint8_t *these = codes + half * half_bytes;
        bf16 *target = out + half * TILE_VALUES;
        if (by_table) {
            state->scaled[half] = scaled_e4m3(state->magnitudes, scales.half[half]);
            decode_scaled_e4m3(&state->scaled[half], these, target);
        } else if (w->coding == E4M3) {
            decode_e4m3(&state->plain, these, scales.half[half], target);
        } else {
            decode_four_bits(_mm512_loadu_ps(w->table), these, scales.half[half], target);
        }
    }
}

/* `count` steps of a panel from `first` on, as bfloat16 in the order of the panels. */
static inline void decode_steps(const Codes *w, Decoding *state, long panel, long first_step,
                                long count, bf16 *out) {
    const long step_bytes = w->coding == E4M3 ? STEP_VALUES : STEP_VALUES / 2;
    const uint8_t *codes = w->codes + (panel * w->steps + first_step) * step_bytes;
    for (long step = 0; step < count; step++, codes += step_bytes, out += STEP_VALUES) {
        for (long at = 0; at < step_bytes; at += 64)
            _mm_prefetch((const char *)codes + CODES_AHEAD + at, _MM_HINT_T0);
        decode_step(w, state, panel, first_step + step, step == 0, codes, step_bytes / 2, out);
    }
}

/* sums[rows][32] of one panel for up to 256 rows; every run of steps is decoded once. `configured`:
 * the rows that the tiles are set up for. The order of the sums is that of dot_pair. */
static inline void multiply_codes(const bf16 *x, long x_stride, long rows, const Codes *w,
                                  Decoding *state, long panel, float *sums,
                                  long *configured) {
    bf16 decoded[CODE_STEPS * STEP_VALUES] __attribute__((aligned(64)));
    for (long k = 0; k < w->steps; k += CODE_STEPS) {
        const long count = k + CODE_STEPS < w->steps ? CODE_STEPS : w->steps - k;
        decode_steps(w, state, panel, k, count, decoded);
        for (long row = 0; row < rows; row += PANEL) {
            const long some = rows - row < PANEL ? rows - row : PANEL;
            if (some != *configured) configure_rows(*configured = some);
            const bf16 *a = x + row * x_stride + k * DEPTH;
            if (k == 0)
                zero_pair(some > TILE);
            else if (rows > PANEL)
                load_pair(sums + row * PANEL, some > TILE);
            add_pair(a, some > TILE ? a + TILE * x_stride : 0, 2 * x_stride, decoded, count,
                     (Wanted){0, 0, 0, 0, 64});
            if (rows > PANEL || k + count == w->steps) store_pair(sums + row * PANEL, some > TILE);
        }
    }
}

#endif

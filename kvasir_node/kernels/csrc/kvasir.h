/* Types, packed layouts and the one reduction order shared by every instruction set.
 *
 * Family "c1". For output o of a matrix [out, in] and one row x of `in` values:
 *
 *   total = 0
 *   for each block of inputs, ascending (128 inputs; 32 for int4; the last may be shorter)
 *     f32, bf16   s = 0;  s = fma(w[o,k], x[k], s) for k ascending;  total = total + s
 *     int8        s = sum of q[o,k] * a[k]  (exact integers);        total = fma(float(s), scale[o] * u, total)
 *     int4        s = sum of q[o,k] * a[k]  (exact integers);        total = fma(float(s), scale[o] * u, total)
 *                                                                    total = fma(minimum[o], t * u, total)
 *
 * in IEEE fp32, round half to even. `a` is the row's block quantised: u = max |x| / M, a = round(x * (M / max |x|)),
 * t = float(sum of a), M = 32767 (int16) beside int8 weights and 127 (int8) beside int4 weights. A block whose
 * maximum is below TINY counts as zeros; one with NaN or infinity has u = NaN, so that its row's outputs are NaN.
 * Nothing depends on the number of rows, on the vector length or on how outputs are split among threads.
 *
 * Packed layout: panels of 32 outputs, each panel one sequential run of bytes, outputs past `out` zero:
 *   f32    [in][32] float
 *   bf16   [ceil(in/2)][32][2] bits
 *   int8   per block: [32] float scale, then [ceil(n/2)][32][2] int8
 *   int4   per block: [32] bf16 scale, [32] bf16 minimum, then [ceil(n/8)][32][4] bytes, where byte j of step b holds
 *          input 8b + j in its low and input 8b + 4 + j in its high four bits
 */
#ifndef KVASIR_H
#define KVASIR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define KV_API __declspec(dllexport)
#else
#define KV_API __attribute__((visibility("default")))
#endif
#define KV_INLINE static inline __attribute__((always_inline))

enum { KV_F32 = 0, KV_BF16 = 1, KV_INT8 = 2, KV_INT4 = 3 };

enum {
    PANEL = 32,        /* outputs a panel */
    BLOCK = 128,       /* inputs a block of f32, bf16 and int8 */
    BLOCK4 = 32,       /* inputs a block of int4 */
    ROWS = 64,         /* rows taken through the whole matrix at once */
};

#define TINY 1e-30f /* below it a block's maximum counts as zero, so that M / maximum stays finite */

typedef struct {
    int32_t kind;
    int32_t out;
    int32_t in;
    int32_t reserved;
    const uint8_t *data; /* 64-byte aligned */
} kv_matrix;

/* Rows made ready for one kind of matrix: f32 rows as they are, or quantised blocks. */
typedef struct {
    const float *x;  /* f32, bf16: rows, `stride` floats apart (an even number of readable floats for bf16) */
    int16_t *a16;    /* int8: quantised rows, `stride` apart */
    int8_t *a8;      /* int4 */
    float *unit;     /* u per row and block, `blocks` apart */
    float *sum;      /* t * u per row and block, `blocks` apart (int4) */
    ptrdiff_t stride;
    ptrdiff_t blocks;
} kv_rows;

KV_INLINE int kv_min(int a, int b) { return a < b ? a : b; }
KV_INLINE ptrdiff_t kv_up(ptrdiff_t n, ptrdiff_t step) { return (n + step - 1) / step * step; }

/* Bytes of one block of `n` inputs of one panel. */
KV_INLINE ptrdiff_t kv_block_bytes(int kind, ptrdiff_t n)
{
    switch (kind) {
    case KV_F32: return n * PANEL * 4;
    case KV_BF16: return kv_up(n, 2) * PANEL * 2;
    case KV_INT8: return PANEL * 4 + kv_up(n, 2) * PANEL;
    default: return PANEL * 4 + kv_up(n, 8) * PANEL / 2;
    }
}

KV_INLINE int kv_block(int kind) { return kind == KV_INT4 ? BLOCK4 : BLOCK; }

KV_INLINE ptrdiff_t kv_panel_bytes(int kind, ptrdiff_t in)
{
    ptrdiff_t step = kv_block(kind), whole = in / step, rest = in % step;
    return whole * kv_block_bytes(kind, step) + (rest ? kv_block_bytes(kind, rest) : 0);
}

KV_INLINE float kv_bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

KV_INLINE uint32_t kv_float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

KV_INLINE int32_t kv_load32(const void *from)
{
    int32_t value;
    memcpy(&value, from, 4);
    return value;
}

#endif

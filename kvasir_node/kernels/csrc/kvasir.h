/* Types, packed layouts and the one reduction order shared by every instruction set.
 *
 * Family "c1". For output o of a matrix [out, in] and one row x of `in` values:
 *
 *   total = 0
 *   for each block of 128 inputs, ascending (the last may be shorter)
 *     f32, bf16   s = 0;  s = fma(w[o,k], x[k], s) for k ascending;  total = total + s
 *     int8        s = sum of q[o,k] * a[k]  (exact integers);        total = fma(float(s), scale[o] * u, total)
 *     int4        p = 0;  for each group of 32 inputs, ascending (the last may be shorter)
 *                     s = sum of q[o,k] * a[k],  t = sum of a[k]  (exact integers)
 *                     p = fma(float(s), scale[o], p);  p = fma(minimum[o], float(t), p)
 *                 total = fma(p, u, total)
 *
 * in IEEE fp32, round half to even. `a` is the row's block as int16: u = max |x| / 32767, a = round(x * (32767 /
 * max |x|)). A block whose maximum is below TINY counts as zeros; one with NaN or infinity has u = NaN, so that its
 * row's outputs are NaN. Nothing depends on the number of rows, on the vector length or on how outputs are split
 * among threads.
 *
 * Packed layout: panels of 32 outputs, each panel one sequential run of bytes, outputs past `out` zero:
 *   f32    [in][32] float
 *   bf16   [ceil(in/2)][32][2] bits
 *   int8   per block: [32] float scale, then [ceil(n/2)][32][2] int8
 *   int4   per group: [32] bf16 scale, [32] bf16 minimum, then [ceil(n/8)][32] little-endian 32-bit words, where word
 *          b holds input 8b + 2i + h in the four bits that start at bit 16h + 4i (i of 0 to 3, h of 0 and 1)
 */
#ifndef KVASIR_H
#define KVASIR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define KV_API __declspec(dllexport)
#else
#define KV_API __attribute__((visibility("default")))
#endif
#define KV_INLINE static inline __attribute__((always_inline))

enum { KV_F32 = 0, KV_BF16 = 1, KV_INT8 = 2, KV_INT4 = 3 };

enum {
    PANEL = 32,  /* outputs a panel */
    BLOCK = 128, /* inputs a block */
    GROUP = 32,  /* inputs a group of int4 */
    ROWS = 64,   /* rows taken through the whole matrix at once */
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
    const float *x;   /* f32, bf16: rows, `stride` floats apart (for bf16 an even number of them readable) */
    int16_t *a;       /* int8, int4: rows quantised, `stride` apart, zeros after the last input */
    float *unit;      /* u per row and block, `blocks` apart */
    float *sum;       /* int4: float(t) per row and group, 4 * `blocks` apart */
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
    default: return (n + GROUP - 1) / GROUP * PANEL * 4 + kv_up(n, 8) * PANEL / 2;
    }
}

KV_INLINE ptrdiff_t kv_panel_bytes(int kind, ptrdiff_t in)
{
    return in / BLOCK * kv_block_bytes(kind, BLOCK) + kv_block_bytes(kind, in % BLOCK) * (in % BLOCK != 0);
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

/* The bf16 nearest to a float, half to even; NaN becomes the quiet one. */
KV_INLINE uint32_t kv_to_bf16(float value)
{
    uint32_t bits = kv_float_to_bits(value), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

/* exp of v from -87 to 88, as in Cephes (expf.c): Cody-Waite reduction, degree 6, about 1 ulp. */
KV_INLINE float kv_exp_within(float v)
{
    float shifted = v * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: the integer is in the low bits */
    float whole = shifted - 12582912.0f;
    float rest = fmaf(whole, -0.693359375f, v);
    rest = fmaf(whole, 2.12194440e-4f, rest);
    float e = 1.9875691500e-4f;
    e = fmaf(e, rest, 1.3981999507e-3f);
    e = fmaf(e, rest, 8.3334519073e-3f);
    e = fmaf(e, rest, 4.1665795894e-2f);
    e = fmaf(e, rest, 1.6666665459e-1f);
    e = fmaf(e, rest, 5.0000001201e-1f);
    e = fmaf(e, rest * rest, rest) + 1.0f;
    return e * kv_bits_to_float((kv_float_to_bits(shifted) << 23) + 0x3f800000u);
}

KV_INLINE int32_t kv_load32(const void *from)
{
    int32_t value;
    memcpy(&value, from, 4);
    return value;
}

#endif
